"""Sagas that were open in a log that was given up: taken into the new one, and left to a person.

A log that was set back does not know what happened since; what looks half done may have been committed, or undone
already. So nothing is undone by itself: each effect that stands is carried over with its compensation and escalated.
`retry` undoes it, under the key it had; `accept` accounts for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..store.chain import Chain, Decide, Draft
from ..store.clock import Now
from ..store.entry import parse
from ..store.errors import Malformed, NotFound
from ..store.evidence import Evidence
from ..store.home import new_id
from ..store.log import Record
from ..store.seal import is_sealed
from ..store.sqlite import SqliteLog
from ..store.squeeze import unshut
from ..store.stubs import Stub
from .carry import carry, completed
from .facts import body, fact
from .openings import blob_at, raw_fields
from .saga import Saga
from .state import State
from .step import INTENDED, MAY_STAND, UNKNOWN, Step

if TYPE_CHECKING:
    from .kit import AgentKit


class Old:
    """The log of an incarnation that was given up, read once, folded as its device folded it."""

    def __init__(self, path: str | os.PathLike[str], origin: str, log: SqliteLog) -> None:
        self.state = State()
        self._records: dict[int, Record] = {}
        chain = Chain(self.state)
        with Evidence(path) as evidence:
            for row in evidence.stored_of(origin):
                if isinstance(row, Stub):  # nothing that was open is among those
                    continue
                entry = parse(row.line)
                if entry.seq > chain.size:
                    chain.skip(entry.seq, entry.prev)
                chain.follow(entry, row.line)
                blob, why = row.blob, ""
                if blob is not None and is_sealed(blob):
                    blob, why = log.open_cell(origin, entry, blob)
                self._records[row.seq] = Record(entry, row.line, unshut(blob or b"") or None, why)

    def record(self, seq: int) -> Record:
        """One record. Raises NotFound."""
        if seq not in self._records:
            raise NotFound(f"The old log has no record {seq}.")
        return self._records[seq]


def follows(kit: AgentKit) -> str:
    """The origin of the log that this one goes on from; empty for a first incarnation."""
    return kit.log.record(0).entry.follows


def carry_over(kit: AgentKit) -> list[str]:
    """Open a follow-up for every saga that the old log left open and that has none yet; return their header ids.

    Run again after a crash it does what is left.
    """
    if kit.home is None or not kit.home.load_install().left:  # nearly every home: no record is read for it
        return []
    origin = follows(kit)
    if not origin or kit.log.keeping.compacted:  # done at the first start, and what was made then may be removed since
        return []
    with Evidence(kit.home.db) as evidence:
        if origin not in evidence.origins():
            return []
    assert isinstance(kit.log, SqliteLog)
    old = Old(kit.home.db, origin, kit.log)
    known = {kit.log.record(row.first).entry.of for row in kit.log.sagas()}
    made = []
    for saga in list(old.state.roots()):
        if saga.id not in known:
            drafts = _followup(old, kit, saga)
            if drafts:
                kit.log.commit(_with_names(drafts, [held.lock for held in old.state.locks.of(saga.id)]))
                made.append(str(drafts[0].fields["saga"]))
    return made


def _with_names(drafts: Sequence[Draft], names: Sequence[str]) -> Decide:
    """The follow-up keeps the names that its saga had claimed, but for those that another has claimed since."""
    new = drafts[0].fields["saga"]

    def decide(state: State, now: Now) -> Sequence[Draft]:
        free = [name for name in names if name not in state.locks.held]
        claims = [fact("lock.taken", saga=new, fence=1, lock=name, up=True) for name in free]
        return [*drafts[:-1], *claims, drafts[-1]]

    return decide


def _followup(old: Old, kit: AgentKit, root: Saga) -> Sequence[Draft]:
    pairs = [(saga, step) for saga in old.state.family(root) for step in saga.steps.values() if step.state in MAY_STAND]
    if not pairs:
        return ()
    new = new_id()
    drafts = [fact("saga.opened", _named(old, root), saga=new, fence=1, driver=kit.engine.driver, of=root.id, up=True)]
    for number, (saga, step) in enumerate(sorted(pairs, key=lambda pair: completed(pair[1])), 1):
        drafts.append(_carried(old, saga, step, new, number))
    drafts.append(fact("saga.unwinding", saga=new, fence=1, why="adopted", up=True))
    drafts += [
        fact("saga.escalated", saga=new, fence=1, step=number, why="adopted", up=True)
        for number in range(1, len(pairs) + 1)
    ]
    drafts.append(fact("saga.released", saga=new, fence=1))
    return drafts


def _carried(old: Old, saga: Saga, step: Step, into: str, number: int) -> Draft:
    draft = carry(old, saga, step, into, 1, late=step.late)
    draft.fields["step"] = number
    draft.fields["out"] = "unknown" if step.state in (INTENDED, UNKNOWN) else "done"  # what was being confirmed too
    del draft.fields["ref"]  # a position in another log says nothing here
    return draft


def _named(old: Old, saga: Saga) -> bytes:
    """The name a person knows it by, as a label: the id itself belongs to the old log."""
    try:
        fields: dict[str, Any] = raw_fields(blob_at(old, saga.opened_seq))
    except Malformed:
        return b"{}"
    name = fields.get("name") or fields.get("label")
    return body(label=name) if name else b"{}"
