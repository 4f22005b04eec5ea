"""What happens after a saga has ended opens a follow-up saga: an undo on request, or an effect that landed late.

The follow-up carries the steps that stand, with the keys they had, and is unwound like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..store.chain import Draft
from ..store.entry import Entry
from ..store.errors import BadValue, NotFound, Refused
from ..store.home import new_id
from ..store.log import Overlay, SagaRow
from .carry import carried, carry, stands
from .drive import BLOCKING, Drive, run
from .engine import Run
from .facts import body, fact
from .inverse import read
from .openings import blob_at, fields_of, opened_as, raw_fields, spread, whole
from .plain import blank, named
from .report import RollbackReport
from .saga import ENDED, RUNNING, SUSPENDED, UNWINDING, Saga, replay
from .state import State
from .step import COMPENSATED, DONE, FAILED, UNKNOWN, Step
from .unwind import take, unwind
from .values import encode

if TYPE_CHECKING:
    from .kit import AgentKit


def resolve(kit: AgentKit, name: str) -> Saga:
    """A saga by the id the user gave, its header id, or an unambiguous prefix of at least 4. Raises NotFound."""
    kit.log.refresh()
    state = kit.engine.state
    newest: Saga | None = None
    generation = 0
    while (
        found := state.past(kit.engine.hide(name if not generation else f"{name}\0{generation}"), derived=True)
    ) is not None:
        newest, generation = found, generation + 1
    if newest is not None:
        return newest
    exact = state.past(name)
    if exact is not None:
        return exact
    matches = _by_prefix(kit, name) if len(name) >= 4 else []
    if len(matches) == 1:
        saga = state.past(matches[0])
        assert saga is not None
        return saga
    if matches:
        raise NotFound(f"{len(matches)} sagas begin with {name!r}.", next="Give more of it; `amends ps` lists them.")
    raise NotFound(f"There is no saga {name!r} on this device.", next="`amends ps` lists them.")


def _by_prefix(kit: AgentKit, prefix: str) -> list[str]:
    rows = kit.log.sagas()
    by_header = [row.saga for row in rows if row.saga.startswith(prefix)]
    return by_header or [row.saga for row in rows if opened_as(kit.log, row.saga)[0].startswith(prefix)]


def followups(kit: AgentKit, saga: Saga) -> list[Saga]:
    """Later sagas that took over something of this one, oldest first."""
    found = []
    for row in kit.log.sagas():
        if row.first <= saga.opened_seq:
            break
        if _opening(kit, row).of == saga.id:
            later = kit.engine.state.past(row.saga)
            found += [later] if later is not None else []
    return found[::-1]


def family_of(kit: AgentKit, saga: Saga) -> list[Saga]:
    """An ended or open saga and every saga inside it, outermost first."""
    family = [saga]
    rows = [row for row in kit.log.sagas() if row.first > saga.opened_seq]
    for row in reversed(rows):
        if any(_opening(kit, row).parent == member.id for member in family):
            inner = kit.engine.state.past(row.saga)
            family += [inner] if inner is not None else []
    return family


def _opening(kit: AgentKit, row: SagaRow) -> Entry:
    """The first entry of a saga; an empty one if it was removed since it was listed."""
    try:
        return kit.log.record(row.first).entry
    except NotFound:
        return Entry(row.first, "", 0, "")


TELLING = 6
"""Characters from which a text in a result says what it came from, if it has a digit: an id, not a word."""
LOOKED_AT = 50_000


class Use(NamedTuple):
    """A later step that was given something this saga's results returned."""

    saga: str
    step: int
    tool: str


def built_on(kit: AgentKit, saga: Saga) -> list[Use]:
    """Steps of other sagas, later on this device, whose arguments hold a text from this saga's results.

    A look and not a proof: what went through another system, or was computed, is not seen. The newest LOOKED_AT
    records are looked at.
    """
    family = family_of(kit, saga)
    results = [
        raw_fields(record.blob).get("result", b"null")
        for member in family
        for record in whole(kit.log.thread(member.id))
        if record.entry.step
    ]
    texts = {msgspec.json.encode(text) for result in results for text in _texts(msgspec.json.decode(result))}
    own = {member.id for member in family} | {later.id for later in followups(kit, saga)}
    found = []
    for record in kit.log.records(max(saga.opened_seq, kit.log.size - LOOKED_AT)):
        entry = record.entry
        if entry.saga in own or not entry.tool or not record.blob or entry.kind == "step.carried":
            continue
        args = raw_fields(record.blob).get("args", b"")
        if any(text in args for text in texts):
            found.append(Use(opened_as(kit.log, entry.saga)[0] or entry.saga, entry.step, entry.tool))
    return found


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value that is long enough to be an id; of a tagged one its content, and not the tag."""
    if isinstance(value, dict) and "$" in value:
        value = value.get("v")
    if isinstance(value, str):
        if len(value) >= TELLING and any(character.isdigit() for character in value):
            yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _undone(kit: AgentKit, later: Sequence[Saga]) -> set[int]:
    """The intents (by their place in the log) whose effects later sagas have undone or are undoing."""
    return {
        record.entry.ref
        for saga in later
        for record in whole(kit.log.thread(saga.id))
        if record.entry.kind == "step.carried"
        and (saga.phase != ENDED or saga.steps[record.entry.step].state not in (DONE, UNKNOWN))
    }


async def undo_committed(
    drive: Drive, kit: AgentKit, name: str, *, by: str, reason: str, step: int | None = None, dry_run: bool = False
) -> RollbackReport:
    """Unwind a committed saga as a follow-up saga, youngest first, under the keys it had; or give up a dead one that
    waits to be run again.

    dry_run runs the plan over an Overlay of the log and calls nothing: its report tells what would be undone and what
    would stand. Raises NotFound, Refused (`not_committed`, `nothing_to_undo`).
    """
    person = named(by)
    if blank(reason):
        raise BadValue("Undoing a committed saga needs a reason.", next="Pass --reason TEXT.")
    saga = resolve(kit, name)
    if saga.phase in (RUNNING, SUSPENDED) and not kit.holds(saga.driver) and saga.id not in kit.engine.runs:
        return await _give_up(drive, kit, saga, person, dry_run)
    if saga.phase != ENDED or saga.out not in ("committed", "continued"):
        raise Refused(
            f"Saga {name} is {saga.out or saga.phase}; only a committed one is undone later.",
            next=f"Run `amends show {quote(name)}`.", code="not_committed",
        )  # fmt: skip
    if step is not None and step not in saga.steps:
        there = ", ".join(f"{one.number} {one.tool}" for one in saga.steps.values()) or "none"
        raise NotFound(f"There is no step {step} in saga {name}.", next=f"Its steps: {there}.")
    later = followups(kit, saga)
    if saga.out == "continued":
        heir = opened_as(kit.log, later[0].id)[0] or later[0].id
        raise Refused(f"Saga {name} went on as {heir}, which has its steps.", next=f"Undo {heir}.", code="continued")
    taken = _undone(kit, later)
    members = family_of(kit, saga) if step is None else [saga]
    standing = [s for m in members for s in m.steps.values() if stands(s) and s.seq not in taken]
    chosen = {s.seq for s in standing if step in (None, s.number)}
    if not chosen:
        raise Refused(
            f"Nothing of saga {name} is left to undo.", next=f"Run `amends show {quote(name)}`.", code="nothing_to_undo"
        )
    _refuse_redacted(kit, name, [s for s in standing if s.seq in chosen])
    new = kit.engine.hide(f"{saga.id}\0undo\0{len(later)}")
    opening = body(by=encode(person), reason=encode(reason))
    drafts = [
        fact("saga.opened", opening, saga=new, fence=1, driver=kit.engine.driver, of=saga.id, up=True),
        *carried(kit.log, members, new, 1, chosen),
        fact("saga.unwinding", saga=new, fence=1, why="undo", up=True),
    ]
    if dry_run:
        return planned(kit, drafts, new)
    await drive.commit(kit.log, lambda state, now: _first(state, new, drafts))
    kit.engine.runs[new] = None  # type: ignore[assignment]
    try:
        return await unwind(drive, kit.engine, new, kit.reach())
    finally:
        kit.engine.runs.pop(new, None)


def _refuse_redacted(kit: AgentKit, name: str, steps: Sequence[Step]) -> None:
    """What undoes a step may have been redacted: then nothing is begun that could not be finished."""
    for step in steps:
        if step.inverse_seq and step.inv not in ("", "none", "human") and not _readable(kit, step.inverse_seq):
            raise Refused(
                f"What undoes step {step.number} {step.tool} of {name} is not in record {step.inverse_seq} any "
                "more: it was redacted, and amends cannot take that effect back.",
                next="Undo it by hand; `--step N` undoes another one by itself.",
                code="redacted",
            )


def _readable(kit: AgentKit, seq: int) -> bool:
    record = kit.log.record(seq)
    return bool(record.withheld) or read(blob_at(kit.log, seq)) is not None


async def _give_up(drive: Drive, kit: AgentKit, saga: Saga, by: str, dry_run: bool) -> RollbackReport:
    """A dead saga that waits to be run again, undone before its time is over because a person says so."""
    from .rehearsal import imagine

    root = kit.engine.state.root(saga)
    taking = take(kit.engine, root.id, root.driver, "given_up", by=by)
    if dry_run:
        overlay = Overlay(kit.log)
        overlay.commit(taking)
        return RollbackReport(imagine(overlay, root.id, root.id)[1], "dry run")
    await drive.commit(kit.log, taking)
    return await unwind(drive, kit.engine, root.id, kit.reach())


def _first(state: State, new: str, drafts: Sequence[Draft]) -> Sequence[Draft]:
    """The n-th follow-up of a saga has one id, whoever opens it: of two who undo the same thing one is told."""
    if state.past(new, derived=True) is not None:
        raise Refused("Somebody is undoing this saga now.", next="Run `amends ps`.", code="saga_busy")
    return drafts


def planned(kit: AgentKit, drafts: Sequence[Draft], saga: str) -> RollbackReport:
    """What unwinding would do: the facts on an Overlay, and the planner's own story from there; nothing called."""
    from .rehearsal import imagine

    overlay = Overlay(kit.log)
    overlay.commit(lambda state, now: drafts)
    _, family = imagine(overlay, saga, saga)
    return RollbackReport(family, "dry run")


def undo_landed(kit: AgentKit, made: Run) -> None:
    """An effect landed after everybody stopped waiting: if its saga is unwound and nobody drives it, see to it."""
    engine = kit.engine
    saga = engine.state.sagas.get(made.id)
    if saga is not None:
        root = engine.state.root(saga)
        if root.phase != UNWINDING or root.driver:
            return  # whoever unwinds it looks at the log once more before letting go
        try:
            engine.log.commit(take(engine, root.id, "", "landed"))
        except Refused:  # somebody else saw it land, or it is quarantined
            return
        run(unwind(BLOCKING, engine, root.id, kit.reach(made)))


def follow_landed(kit: AgentKit, made: Run, number: int, landing: Draft) -> RollbackReport | None:
    """The saga of a late effect has ended: open its follow-up with that one step and unwind it."""
    past = replay(record.entry for record in kit.log.thread(made.id))
    step = past.steps.get(number) if past else None
    if past is None or step is None or past.out not in ("compensated", "refused"):
        return None
    early = step.state == COMPENSATED and step.provisional
    if landing.fields.get("out") != "done" or not (early or step.state == FAILED):
        return None
    new = new_id()
    draft = carry(kit.log, past, step, new, 1, late=early)
    if landing.openings and landing.fields.get("inv"):
        draft.openings = _only_compensation(landing)
        draft.fields |= {name: landing.fields[name] for name in ("inv", "handler", "again") if name in landing.fields}
    drafts = [
        fact("saga.opened", saga=new, fence=1, driver=kit.engine.driver, of=past.id, up=True),
        draft,
        fact("saga.unwinding", saga=new, fence=1, why="landed", up=True),
    ]
    kit.log.commit(lambda state, now: drafts)
    if (made.id, number) in made.live:
        made.live[new, number] = made.live[made.id, number]
    kit.engine.runs[new] = made
    try:
        return run(unwind(BLOCKING, kit.engine, new, kit.reach(made)))
    finally:
        kit.engine.runs.pop(new, None)


def _only_compensation(landing: Draft) -> tuple[bytes, ...]:
    made = fields_of(landing.openings).get("compensation")
    return spread((body(compensation=made),)) if made else ()
