"""One queue for everything that needs a person: what stands, since when, and the commands that settle it.

An item is derived from the fold, never stored. Its id is made of its kind and the hash of the fact that opened it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from ..store.chain import Draft
from ..store.clock import Now
from ..store.entry import leaf
from ..store.errors import BadValue, Fenced, NotFound, Refused
from .drive import BLOCKING, run
from .facts import body, fact
from .openings import opened_as, when
from .report import REASONS, RollbackReport
from .saga import RUNNING, SUSPENDED, Saga
from .state import State
from .step import WAITING, Step
from .unwind import take, unwind
from .values import encode

if TYPE_CHECKING:
    from .kit import AgentKit


class Item(NamedTuple):
    """One thing for a person. seq: the fact that opened it."""

    id: str
    kind: str
    saga: Saga
    step: Step | None
    reason: str
    seq: int
    at: int


def item_id(kind: str, line: bytes) -> str:
    """base32(SHA-256(kind ‖ h))[:10], h the hash of the fact that opened it."""
    return base64.b32encode(sha256(kind.encode() + leaf(line)).digest()).decode().lower()[:10]


def queue(kit: AgentKit) -> list[Item]:
    """Every item, oldest first."""
    kit.log.refresh()
    return sorted(_items(kit), key=lambda item: item.seq)


def _items(kit: AgentKit) -> Iterator[Item]:
    for saga in list(kit.engine.state.sagas.values()):
        for step in saga.steps.values():
            if step.state == WAITING:
                why = "An irreversible step waits for a named person."
                yield _item(kit, "approval", saga, step, why, step.asked_seq)
        for number, why in saga.escalated.items():
            found = saga.steps.get(number)
            yield _item(kit, "escalation", saga, found, REASONS[why][0], _escalated_at(kit, saga, number), why)
        root = kit.engine.state.root(saga)
        if saga is root and saga.phase in (RUNNING, SUSPENDED) and saga.on_crash == "resume":
            if not kit.holds(saga.driver) or not saga.driver:
                yield _item(kit, "resume", saga, None, "It died and waits to be run again.", saga.opened_seq)


def _item(kit: AgentKit, kind: str, saga: Saga, step: Step | None, reason: str, seq: int, why: str = "") -> Item:
    record = kit.log.record(seq)
    return Item(item_id(kind, record.line), why or kind, saga, step, reason, seq, record.entry.at)


def _escalated_at(kit: AgentKit, saga: Saga, step: int) -> int:
    for record in reversed(kit.log.thread(saga.id)):
        if record.entry.kind == "saga.escalated" and record.entry.step == step:
            return record.entry.seq
    return saga.opened_seq


def items(kit: AgentKit) -> list[dict[str, Any]]:
    """The queue as data (PROMISES 12.1)."""
    return [
        {
            "id": item.id,
            "kind": item.kind,
            "saga": opened_as(kit.log, item.saga.id)[0] or item.saga.id,
            "step": item.step.number if item.step else 0,
            "tool": item.step.tool if item.step else "",
            "since": when(item.at),
            "reason": item.reason,
            "commands": commands(item),
        }
        for item in queue(kit)
    ]


def commands(item: Item) -> list[str]:
    """What settles an item."""
    if item.kind == "approval":
        return [f"amends approve {item.id} --by NAME", f"amends deny {item.id} --by NAME"]
    if item.kind == "resume":
        return ["run it again with the same id", "or wait: it is undone when resume_within has passed"]
    verbs = {
        "accept": f"amends accept {item.id} --by NAME --reason TEXT",
        "retry": f"amends retry {item.id} --by NAME",
    }
    return [verbs[verb] for verb in REASONS[item.kind][1]]


def find(kit: AgentKit, name: str, kinds: Sequence[str] = ()) -> Item:
    """The item with this id, or the only one whose id begins so. Raises NotFound."""
    found = [item for item in queue(kit) if item.id == name or (len(name) >= 4 and item.id.startswith(name))]
    if len(found) != 1:
        told = "No item" if not found else f"{len(found)} items"
        raise NotFound(f"{told} in the inbox begin with {name!r}.", next="Run `amends inbox`.")
    if kinds and found[0].kind not in kinds:
        raise Refused(f"{name} is no {' or '.join(kinds)}.", next=f"It is settled by: {'; '.join(commands(found[0]))}.",
                      code="wrong_verb")  # fmt: skip
    return found[0]


def named(by: str) -> str:
    """A person's name. Raises BadValue for none."""
    if not by or not by.strip():
        raise BadValue("A named person decides.", next="Pass --by NAME.")
    return by.strip()


def answer(kit: AgentKit, name: str, out: str, by: str, note: str) -> None:
    """Decide an approval: the first valid decision wins, inside the transaction."""
    item = find(kit, name, ("approval",))
    assert item.step is not None
    step = item.step.number
    draft = fact(
        "step.answered",
        body(by=encode(named(by)), note=encode(note) if note else b""),
        saga=item.saga.id,
        step=step,
        out=out,
        ref=item.seq,
    )

    def decide(state: State, now: Now) -> Sequence[Draft]:
        saga = state.sagas.get(item.saga.id)
        found = saga.steps.get(step) if saga else None
        if found is None or found.state != WAITING:
            raise Refused("It was decided already, or withdrawn.", next="Run `amends inbox`.", code="decided")
        return (draft,)

    kit.log.commit(decide)


ESCALATIONS = tuple(REASONS)


def accept(kit: AgentKit, name: str, by: str, reason: str) -> RollbackReport | None:
    """Account for what stands in a person's name, then go on with what waited behind it."""
    if not reason or not reason.strip():
        raise BadValue("Accepting what stands needs a reason.", next="Pass --reason TEXT.")
    item = find(kit, name, ESCALATIONS)
    assert item.step is not None
    step = item.step.number
    draft = fact(
        "step.accepted", body(by=encode(named(by)), reason=encode(reason)), saga=item.saga.id, step=step, up=True
    )

    def decide(state: State, now: Now) -> Sequence[Draft]:
        saga = state.sagas.get(item.saga.id)
        if saga is None or step not in saga.escalated:
            raise Refused("It was settled already.", next="Run `amends inbox`.", code="decided")
        return (draft,)

    kit.log.commit(decide)
    return _go_on(kit, item.saga, "accepted")


def retry(kit: AgentKit, name: str, by: str) -> RollbackReport:
    """Take an escalated saga and try again what stopped it, in a person's name."""
    person = named(by)
    item = find(kit, name, ESCALATIONS)
    report = _go_on(kit, item.saga, "retry", item.step.number if item.step else 0, person)
    if report is None:
        raise Refused("Somebody else drives it now.", next="Run `amends inbox`.", code="saga_busy")
    return report


def _go_on(kit: AgentKit, saga: Saga, why: str, step: int = 0, by: str = "") -> RollbackReport | None:
    """Unwind on from where a person unblocked it; None if a live driver has it and will."""
    kit.log.refresh()
    root = kit.engine.state.root(saga)
    if root.id not in kit.engine.state.sagas or (root.driver and kit.holds(root.driver)):
        return None
    try:
        kit.log.commit(take(kit.engine, root.id, root.driver, why, (saga.id, step) if step else ("", 0), by))
    except Fenced:  # a daemon saw the decision and was faster
        return None
    return run(unwind(BLOCKING, kit.engine, root.id, kit.reach(kit.engine.resting.get(root.id))))
