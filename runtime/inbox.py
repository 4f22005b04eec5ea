"""One queue for everything that needs a person: what stands, since when, and the commands that settle it.

An item is derived from the fold, never stored. Its id is made of its kind and the hash of the fact that opened it, so
it stays the same whatever becomes of the others. It is found by that id, or by its saga where there is only one.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..store.chain import Draft
from ..store.clock import Now
from ..store.entry import leaf
from ..store.errors import BadValue, Fenced, NotFound, Refused
from ..store.log import Record
from .drive import BLOCKING, run
from .due import holds_up, unwinding_order
from .facts import body, fact
from .openings import known_as, raw_fields, when
from .report import REASONS, RollbackReport
from .saga import RUNNING, SUSPENDED, Saga
from .state import State
from .step import WAITING, Step
from .story import Stories, step_fields, text_of
from .unwind import take, unwind
from .values import encode, is_manifest

if TYPE_CHECKING:
    from .kit import AgentKit


RECENT = 20_000
"""How many of the newest records are looked through for a decision that was made already."""


_ID = re.compile(r"[a-z2-7]{4,10}")


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
    return [_told(kit, item) for item in queue(kit)]


def _told(kit: AgentKit, item: Item) -> dict[str, Any]:
    """One item with what a person needs in order to decide: of what, with which result, why, and what waits for it."""
    saga = known_as(kit.log, item.saga.id)
    fields = step_fields(kit, item.saga.id, item.step.number) if item.step else {}
    return {
        "id": item.id,
        "kind": item.kind,
        "saga": saga,
        "step": item.step.number if item.step else 0,
        "tool": item.step.tool if item.step else "",
        "since": when(item.at),
        "reason": item.reason,
        "commands": commands(item),
        "args": _value(fields.get("args")),
        "result": _value(fields.get("result")),
        "error": text_of(fields.get("error")) or None,
        "compensation": _compensation(fields.get("compensation")),
        "behind": [{"step": step.number, "tool": step.tool} for step in _behind(kit, item)],
        "show": f"amends show {quote(saga)}",
    }


def _value(raw: bytes | None) -> Any:
    return msgspec.json.decode(raw) if raw else None


def _compensation(raw: bytes | None) -> dict[str, Any] | None:
    found = _value(raw)
    if not isinstance(found, dict) or is_manifest(found):
        return None
    return {name: found.get(name) for name in ("handler", "kwargs", "description")}


def _behind(kit: AgentKit, item: Item) -> list[Step]:
    """The steps that are undone only once this item is settled, in the order of their undoing."""
    root = kit.engine.state.root(item.saga)
    if item.step is None or item.kind not in REASONS or root.on_failure == "continue" or not holds_up(item.step):
        return []
    order = unwinding_order(kit.engine.state.family(root))
    place = next((n for n, (_, step) in enumerate(order) if step is item.step), len(order))
    return [step for saga, step in order[place + 1 :] if step.number not in saga.escalated]


def verbs(item: Item) -> tuple[str, ...]:
    """The decisions that settle an item."""
    return _VERBS.get(item.kind) or REASONS[item.kind][1]


_VERBS: dict[str, tuple[str, ...]] = {"approval": ("approve", "deny"), "resume": ("run again",)}
_SAYS = {"approve": "step.answered", "deny": "step.answered", "accept": "step.accepted"}
"""The fact that a decision leaves."""
_OPENS = {"step.asked": "approval", "saga.escalated": "escalation"}
"""The fact that opens an item of a kind."""
_COMMANDS = {
    "approve": "amends approve {} --by NAME",
    "deny": "amends deny {} --by NAME",
    "accept": "amends accept {} --by NAME --reason TEXT",
    "retry": "amends retry {} --by NAME",
}


def commands(item: Item) -> list[str]:
    """What settles an item."""
    if item.kind == "resume":
        return ["run it again with the same id", "or wait: it is undone when resume_within has passed"]
    return [_COMMANDS[verb].format(item.id) for verb in verbs(item)]


# ---- by name --------------------------------------------------------------------------------------------------------


def find(kit: AgentKit, name: str, verb: str = "") -> Item:
    """An item by its id, by a beginning of at least 4 characters, or by its saga where only one thing of that can be
    decided so. Raises NotFound; Refused for a verb that does not settle it, and where somebody was first."""
    waiting = queue(kit)
    found = [item for item in waiting if item.id == name or (len(name) >= 4 and item.id.startswith(name))]
    if not found:
        _refuse_if_settled(kit, name)
        found = _of_saga(kit, name, waiting, verb)
    if len(found) > 1:
        listed = ", ".join(f"{item.id} ({item.step.tool if item.step else 'saga'})" for item in found)
        raise NotFound(f"{len(found)} items go by {name!r}: {listed}.", next="Name one of them.", code="ambiguous")
    if verb and verb not in verbs(found[0]):
        raise Refused(f"{verb} does not settle {name}: {found[0].reason}",
                      next=f"What settles it: {'; '.join(commands(found[0]))}.", code="wrong_verb")  # fmt: skip
    return found[0]


def _of_saga(kit: AgentKit, name: str, waiting: Sequence[Item], verb: str) -> list[Item]:
    """The items of a saga and its family that the verb settles; if it settles none of them, all. Never empty."""
    from .followup import resolve

    try:
        story = Stories(kit).of(resolve(kit, name))
    except NotFound as unknown:
        raise NotFound(
            f"No item in the inbox goes by {name!r}. {unknown.message}", next="`amends inbox` lists what needs you."
        ) from None
    family = {thread.saga.id for thread in story.threads}
    found = [item for item in waiting if item.saga.id in family]
    fits = [item for item in found if not verb or verb in verbs(item)]
    if fits:
        return fits
    said = [r for thread in story.threads for r in thread.records if r.entry.kind == _SAYS.get(verb)]
    if said:
        raise _settled(kit, max(said, key=lambda record: record.entry.seq))
    if not found:
        raise NotFound(f"Nothing of saga {name!r} waits for a person.", next=f"`amends show {quote(name)}` tells it.")
    return found


def _refuse_if_settled(kit: AgentKit, name: str) -> None:
    """Whoever comes second is told who was first, and not that there never was such a question."""
    if not _ID.fullmatch(name):
        return
    over = False
    for record in kit.log.records(max(0, kit.log.size - RECENT)):
        asked = _asked(kit, record)
        if asked and item_id(asked[0], kit.log.record(asked[1]).line).startswith(name):
            raise _settled(kit, record)
        opened = _OPENS.get(record.entry.kind)
        over = over or (opened is not None and item_id(opened, record.line).startswith(name))
    if over:  # tried again, withdrawn, or its time was over: nobody's word says so, but it was asked
        raise NotFound("It was settled already, or withdrawn.", next="Run `amends inbox`.", code="decided")


def _asked(kit: AgentKit, record: Record) -> tuple[str, int] | None:
    """The kind of item that a record settled, and the fact that opened it; None for any other record."""
    entry = record.entry
    if entry.kind == "step.answered":
        return "approval", entry.ref
    if entry.kind == "step.accepted":
        return "escalation", max(
            (r.entry.seq for r in kit.log.thread(entry.saga)
             if r.entry.kind == "saga.escalated" and r.entry.step == entry.step and r.entry.seq < entry.seq),
            default=entry.seq,
        )  # fmt: skip
    return None


def _settled(kit: AgentKit, record: Record) -> Refused:
    by, said = text_of(raw_fields(record.blob).get("by")), record.entry.out or "accepted"
    return Refused(
        f"{by} {said} it already ({when(record.entry.at)[:19].replace('T', ' ')} UTC).",
        next=f"`amends show {quote(known_as(kit.log, record.entry.saga))}` tells the rest.",
        code="decided",
    )


# ---- deciding -------------------------------------------------------------------------------------------------------


def named(by: str) -> str:
    """A person's name. Raises BadValue for none."""
    if not by or not by.strip():
        raise BadValue("A named person decides.", next="Pass --by NAME.")
    return by.strip()


def answer(kit: AgentKit, name: str, out: str, by: str, note: str) -> None:
    """Decide an approval: the first valid decision wins, inside the transaction."""
    item = find(kit, name, "approve" if out == "approved" else "deny")
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

    try:
        kit.log.commit(decide)
    except Refused:
        kit.log.refresh()
        _refuse_if_settled(kit, item.id)
        raise


def accept(kit: AgentKit, name: str, by: str, reason: str) -> None:
    """Account for what stands in a person's name, then go on with what waited behind it."""
    if not reason or not reason.strip():
        raise BadValue("Accepting what stands needs a reason.", next="Pass --reason TEXT.")
    item = find(kit, name, "accept")
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
    _go_on(kit, item.saga, "accepted")


def retry(kit: AgentKit, name: str, by: str) -> RollbackReport:
    """Take an escalated saga and try again what stopped it, in a person's name."""
    person = named(by)
    item = find(kit, name, "retry")
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
