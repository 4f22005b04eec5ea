"""One queue for everything that needs a person: what stands, since when, and the commands that settle it.

Questions to people, effects that nobody could settle, glasses that were broken, sagas that wait to be run again, are
frozen or make no progress, a keyring that is frozen or about to be replaced. An item is derived from the fold, never
stored. Its id is made of its kind and the hash of the fact that opened it, so it stays the same whatever becomes of the
others. It is found by that id, or by its saga where there is only one.
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
from .decisions import asked_of
from .drift import ACCEPTED, DRIFT, OBSERVED, Drifted
from .drive import BLOCKING, run
from .due import holds_up, unwinding_order
from .facts import body, fact
from .gate import ceremonies, keyring
from .gate.approvals import APPROVE, DENY, PENDING, SAID, Asked, each, left_ms, persons, standing
from .gate.freeze import QUARANTINED, freeze
from .gate.levels import FILE, LEVELS
from .gate.question import Question
from .gate.signing import allowed, close_review, dead_votes, request_text, vote
from .gate.switch import HALT, QUARANTINE, check_switch, typed
from .gate.ways import deciding
from .openings import known_as, raw_fields, when
from .plain import blank, named
from .report import REASONS, RollbackReport
from .saga import CONCLUDING, RUNNING, SUSPENDED, Saga
from .state import State
from .step import Step
from .story import Stories, step_fields, text_of
from .stuck import stuck
from .unwind import take, unwind
from .values import encode, is_manifest

if TYPE_CHECKING:
    from .kit import AgentKit


RECENT = 20_000
"""How many of the newest records are looked through for a decision that was made already."""


_ID = re.compile(r"[a-z2-7]{4,10}")


class Item(NamedTuple):
    """One thing for a person. seq: the fact that opened it. saga: None for what is about the whole device. settles:
    commands that belong to this very item; else those of its kind. asked: the request, and the votes that do not count.
    """

    id: str
    kind: str
    saga: Saga | None
    step: Step | None
    reason: str
    seq: int
    at: int
    settles: tuple[str, ...] = ()
    asked: Asked | None = None
    dead: frozenset[int] = frozenset()


def item_id(kind: str, line: bytes) -> str:
    """base32(SHA-256(kind ‖ h))[:10], h the hash of the fact that opened it."""
    return base64.b32encode(sha256(kind.encode() + leaf(line)).digest()).decode().lower()[:10]


def is_id(name: str) -> bool:
    """Whether a text can be the id of an item, or a beginning of one."""
    return bool(_ID.fullmatch(name))


def queue(kit: AgentKit) -> list[Item]:
    """Every item, oldest first."""
    kit.log.refresh()
    return sorted(_items(kit), key=lambda item: item.seq)


def _items(kit: AgentKit) -> Iterator[Item]:
    yield from _approvals(kit)
    for saga in list(kit.engine.state.sagas.values()):
        for number, why in list(saga.escalated.items()):  # a snapshot: others may commit while a follower looks
            found = saga.steps.get(number)
            yield _item(kit, "escalation", saga, found, REASONS[why][0], _escalated_at(kit, saga, number), why)
        root = kit.engine.state.root(saga)
        if saga is root and saga.phase in (RUNNING, SUSPENDED) and saga.on_crash == "resume":
            if not kit.holds(saga.driver) or not saga.driver:
                yield _item(kit, "resume", saga, None, "It died and waits to be run again.", saga.opened_seq)
    yield from _reviews(kit)
    yield from _frozen(kit)
    yield from _drifts(kit)
    for idle in stuck(kit):
        freeze_it = f"amends quarantine {idle.saga.id} --by NAME --reason TEXT"
        slow = _item(kit, "stuck", idle.saga, None, idle.reason, idle.seq)
        yield slow._replace(settles=(freeze_it, _END_IT))
    for need in ceremonies.needs(kit):
        item = _item(kit, need.kind, None, None, need.reason, need.seq)
        yield item._replace(settles=need.commands)


def _approvals(kit: AgentKit) -> Iterator[Item]:
    """Questions that still need somebody: not those that are answered and about to be spent."""
    state, lived = kit.engine.state, kit.log.now().lived
    for asked in state.approvals.open:
        saga = state.sagas.get(asked.saga)
        step = saga.steps.get(asked.step) if saga else None
        dead = dead_votes(kit, asked) if asked.votes else frozenset()
        if saga is not None and step is not None and standing(state.approvals, asked.request, lived, dead) == PENDING:
            gone = agent_gone(kit, saga)
            item = _item(kit, "approval", saga, step, gone or _needed(asked), asked.seq)
            settles = (_UNDO_IT,) if gone == GIVEN_UP else _decided_by(kit, item.id, asked)
            yield item._replace(asked=asked, dead=dead, settles=settles)


GIVEN_UP = "Its agent died: no answer lets the step happen any more, and its saga is to be undone."
LET_GO = "Its agent died: an answer counts once the saga is run again with the same id."
_UNDO_IT = "amends recoverd --once"


def agent_gone(kit: AgentKit, saga: Saga) -> str:
    """What is to be said of a question whose agent does not live any more; empty while it does."""
    root = kit.engine.state.root(saga)
    if root.id in kit.engine.runs or (root.driver and kit.holds(root.driver)):
        return ""
    return LET_GO if root.on_crash == "resume" and root.phase in (RUNNING, SUSPENDED) else GIVEN_UP


def _needed(asked: Asked) -> str:
    """What a question asks of whom."""
    what = "An irreversible step" if asked.sem == "irreversible" else "A step"
    return f"{what} waits for {asked_of(asked.level, asked.quorum)}."


def _decided_by(kit: AgentKit, item: str, asked: Asked) -> tuple[str, ...]:
    """The commands that would be taken: of those who may say yes, and of anybody who says no."""
    ring, text, level = keyring.read(kit.log), request_text(kit.log, asked), each(asked.level)
    roles = tuple(msgspec.json.decode(text).get("roles") or ()) if text else ()
    yes = deciding(item, APPROVE, level, roles, allowed(ring, max(FILE, level), roles))
    return (*(("amends keys list",) if ring.frozen else yes), *deciding(item, DENY, level, roles, ()))


def in_the_way(kit: AgentKit, request: str) -> list[str]:
    """What keeps the step of an open request from starting, though people let it; empty if it goes on. A lever on a tag
    is not seen from here: which tags a call has is known once it starts."""
    state = kit.engine.state
    asked = state.approvals.requests.get(request)
    saga = state.sagas.get(asked.saga) if asked else None
    if asked is None or saga is None or asked.over:
        return []
    question = Question(asked.tool, asked.sem, saga.id, state.root(saga).id)
    refusals = (check_switch(state, question, kit.log.now()), kit.engine.policy.now().broken)
    return [said for said in (agent_gone(kit, saga), *(one.said for one in refusals if one)) if said]


def _reviews(kit: AgentKit) -> Iterator[Item]:
    for glass in list(kit.engine.state.approvals.reviews.values()):
        saga = kit.engine.state.past(glass.saga)
        step = saga.steps.get(glass.step) if saga else None
        why = f"{_by(kit, glass.seq)} broke the glass to let {glass.tool} happen; somebody else has to look at it."
        yield _item(kit, "review", saga, step, why, glass.seq)


def _drifts(kit: AgentKit) -> Iterator[Item]:
    """Effects of which the world says otherwise than the log."""
    for drifted in kit.engine.state.drifts.open:
        saga = kit.engine.state.past(drifted.of)
        step = saga.steps.get(drifted.step) if saga else None
        if saga is None or step is None:  # its records were removed
            continue
        item = _item(kit, DRIFT, saga, step, _drifted(kit, drifted), drifted.seq)
        undo = (f"amends undo {quote(known_as(kit.log, saga.id))} --by NAME --reason TEXT",)
        settles = (_COMMANDS["accept"].format(item.id), *(undo if saga.out == "committed" else ()))
        yield item._replace(settles=(*settles, "or put it right: `amends reconcile` then finds it so"))


def _drifted(kit: AgentKit, drifted: Drifted) -> str:
    """What was said when it was found."""
    from .reconcile import WHY

    said = text_of(raw_fields(kit.log.record(drifted.seq).blob).get("note"))
    return f"{WHY.get(drifted.why, drifted.why)} {said}".strip()


def _frozen(kit: AgentKit) -> Iterator[Item]:
    """Sagas that a person has stopped as they stand."""
    state, now = kit.engine.state, kit.log.now()
    for root in list(state.roots()) if state.switches.levers else ():
        why = freeze(state, state.family(root), now)
        levers = [lever for lever in state.switches.active(now) if lever.mode == _FREEZES.get(why)]
        if levers:
            lever = max(levers, key=lambda one: (root.id in one.target, one.seq))
            said = f"It is {'quarantined' if why == QUARANTINED else 'halted'}: it stays so until that is lifted."
            found = _item(kit, "frozen", root, None, said, lever.seq, of=root.id)
            scope = quote(typed(kit, lever.target))
            yield found._replace(settles=(f"amends resume {scope} --by NAME --reason TEXT",))


_END_IT = "or end its process, if it lives: `amends recoverd --once` then undoes it"
_FREEZES = {QUARANTINED: QUARANTINE, "halted": HALT}


def _by(kit: AgentKit, seq: int) -> str:
    return text_of(raw_fields(kit.log.record(seq).blob).get("by")) or "Somebody"


def _item(
    kit: AgentKit, kind: str, saga: Saga | None, step: Step | None, reason: str, seq: int, why: str = "", of: str = ""
) -> Item:
    """of: what tells apart items of one kind that one fact has opened."""
    record = kit.log.record(seq)
    return Item(item_id(kind + of, record.line), why or kind, saga, step, reason, seq, record.entry.at)


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
    saga = known_as(kit.log, item.saga.id) if item.saga else ""
    fields = step_fields(kit, item.saga.id, item.step.number) if item.saga and item.step else {}
    told = {
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
        "confirmation": _compensation(fields.get("confirmation")),
        "behind": [{"step": step.number, "tool": step.tool} for step in _behind(kit, item)],
        "show": f"amends show {quote(saga)}" if saga else "",
    }
    if item.asked is not None:
        told["approval"] = _question(kit, item.asked, item)
    if item.saga is not None and item.kind in REASONS:
        locks = kit.engine.state.locks
        told["locks"] = [held.lock for held in locks.of(kit.engine.state.root(item.saga).id)]
        told["waiting"] = [known_as(kit.log, saga) for lock in told["locks"] for saga in locks.awaiting(lock)]
    return told


def _question(kit: AgentKit, asked: Asked, item: Item) -> dict[str, Any]:
    """What a question asks: how many people, on which evidence, and for how long it is open."""
    return {
        "request": asked.request,
        "have": len(persons(asked, item.dead)),
        "need": asked.quorum,
        "level": LEVELS[asked.level][0],
        "left_ms": left_ms(asked, kit.log.now().lived),
        "escalated": asked.reached,
        "agent_lives": item.reason not in (GIVEN_UP, LET_GO),
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
    if item.saga is None or item.step is None or item.kind not in REASONS:
        return []
    root = kit.engine.state.root(item.saga)
    if root.phase == CONCLUDING:  # what is to be confirmed is confirmed each on its own
        return []
    if root.on_failure == "continue" or not holds_up(item.step):
        return []
    order = unwinding_order(kit.engine.state.family(root))
    place = next((n for n, (_, step) in enumerate(order) if step is item.step), len(order))
    return [step for saga, step in order[place + 1 :] if step.number not in saga.escalated]


def verbs(item: Item) -> tuple[str, ...]:
    """The decisions that settle an item."""
    if item.kind in REASONS:
        return REASONS[item.kind][1]
    return _VERBS.get(item.kind, ())


_VERBS: dict[str, tuple[str, ...]] = {"approval": ("approve", "deny"), "review": ("accept",), DRIFT: ("accept",)}
_SAYS = {"approve": ("vote.cast",), "deny": ("vote.cast",), "accept": ("step.accepted", "review.closed")}
"""The facts that a decision leaves."""
_OPENS = {"step.asked": "approval", "saga.escalated": "escalation", "vote.cast": "review", OBSERVED: DRIFT}
"""The fact that opens an item of a kind."""
_COMMANDS = {
    "accept": "amends accept {} --by NAME --reason TEXT",
    "retry": "amends retry {} --by NAME",
}


def commands(item: Item) -> list[str]:
    """What settles an item."""
    if item.settles or item.kind in _SETTLES:
        return list(item.settles or _SETTLES[item.kind])
    return [_COMMANDS[verb].format(item.id) for verb in verbs(item)]


_SETTLES = {
    "resume": ("run it again with the same id", "or wait: it is undone when resume_within has passed"),
}


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
    found = [item for item in waiting if item.saga is not None and item.saga.id in family]
    fits = [item for item in found if not verb or verb in verbs(item)]
    if fits:
        return fits
    said = _newest(kit, family, verb)
    if said is not None:
        raise _settled(kit, said)
    if not found:
        raise NotFound(f"Nothing of saga {name!r} waits for a person.", next=f"`amends show {quote(name)}` tells it.")
    return found


def _newest(kit: AgentKit, family: set[str], verb: str) -> Record | None:
    """The newest decision of this sort about one of these sagas, among the newest records."""
    found = None
    for record in kit.log.records(max(0, kit.log.size - RECENT)):
        entry = record.entry
        if entry.kind in _SAYS.get(verb, ()) and not entry.why and (entry.saga or entry.of) in family:
            found = record
    return found


def _refuse_if_settled(kit: AgentKit, name: str) -> None:
    """Whoever comes second is told who was first, and not that there never was such a question."""
    if not is_id(name):
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
    if entry.kind == "step.accepted":
        return "escalation", max(
            (r.entry.seq for r in kit.log.thread(entry.saga)
             if r.entry.kind == "saga.escalated" and r.entry.step == entry.step and r.entry.seq < entry.seq),
            default=entry.seq,
        )  # fmt: skip
    if entry.kind == "vote.cast" and not entry.why:
        return "approval", next(
            (r.entry.seq for r in kit.log.thread(entry.of) if r.entry.request == entry.request), entry.seq
        )
    return ("review", entry.ref) if entry.kind == "review.closed" else None


def _settled(kit: AgentKit, record: Record) -> Refused:
    entry = record.entry
    by, said = text_of(raw_fields(record.blob).get("by")), SAID.get(entry.out, "accepted")
    saga = entry.saga or entry.of
    return Refused(
        f"{by} {said} it already ({when(entry.at)[:19].replace('T', ' ')} UTC).",
        next=f"`amends show {quote(known_as(kit.log, saga))}` tells the rest." if saga else "Run `amends inbox`.",
        code="decided",
    )


# ---- deciding -------------------------------------------------------------------------------------------------------


def answer(
    kit: AgentKit, name: str, verdict: str, by: str, note: str, *, break_glass: bool = False, reason: str = ""
) -> None:
    """Decide an approval by name: the first valid decision wins, inside the transaction. Keys sign through `vote`."""
    vote(kit, name, verdict, by=by, note=note, break_glass=break_glass, reason=reason)


def accept(kit: AgentKit, name: str, by: str, reason: str) -> None:
    """Account for what stands in a person's name, then go on with what waited behind it; or look at a broken glass."""
    if blank(reason):
        raise BadValue("Accepting what stands needs a reason.", next="Pass --reason TEXT.")
    item = find(kit, name, "accept")
    if item.kind == "review":
        return close_review(kit, item.seq, by, reason)
    if item.kind == DRIFT:
        return _accept_drift(kit, item.seq, named(by), reason)
    assert item.step is not None and item.saga is not None
    owner, step = item.saga, item.step.number
    draft = fact("step.accepted", body(by=encode(named(by)), reason=encode(reason)), saga=owner.id, step=step, up=True)

    def decide(state: State, now: Now) -> Sequence[Draft]:
        saga = state.sagas.get(owner.id)
        if saga is None or step not in saga.escalated:
            raise Refused("It was settled already.", next="Run `amends inbox`.", code="decided")
        return (draft,)

    kit.log.commit(decide)
    try:
        _go_on(kit, owner, "accepted")
    except Refused as frozen:  # accepted all the same; what waits behind it goes on when that is lifted
        if frozen.code != QUARANTINED:
            raise
    return None


def _accept_drift(kit: AgentKit, seq: int, by: str, reason: str) -> None:
    """A person accounts for it that the world is not as the log says: found so again, it is news no more."""
    opening = body(by=encode(by), reason=encode(reason))

    def decide(state: State, now: Now) -> Sequence[Draft]:
        one = next((one for one in state.drifts.open if one.seq == seq), None)
        if one is None:
            raise Refused("It was settled already.", next="Run `amends inbox`.", code="decided")
        about = {"of": one.of, "step": one.step, "ref": one.ref, "why": one.why}
        return (fact(OBSERVED, opening, out=ACCEPTED, **about, up=True),)

    kit.log.commit(decide)


def retry(kit: AgentKit, name: str, by: str) -> RollbackReport:
    """Take an escalated saga and try again what stopped it, in a person's name."""
    person = named(by)
    item = find(kit, name, "retry")
    assert item.saga is not None
    report = _go_on(kit, item.saga, "retry", item.step.number if item.step else 0, person)
    if report is None:
        raise Refused("Somebody else drives it now.", next="Run `amends inbox`.", code="saga_busy")
    return report


def _go_on(kit: AgentKit, saga: Saga, why: str, step: int = 0, by: str = "") -> RollbackReport | None:
    """Go on from where a person unblocked it; None if a live driver has it and will. Raises Refused if it is
    quarantined."""
    kit.log.refresh()
    root = kit.engine.state.root(saga)
    if root.id not in kit.engine.state.sagas or (root.driver and kit.holds(root.driver)):
        return None
    try:
        kit.log.commit(take(kit.engine, root.id, root.driver, why, (saga.id, step) if step else ("", 0), by))
    except Fenced:  # a daemon saw the decision and was faster
        return None
    return run(unwind(BLOCKING, kit.engine, root.id, kit.reach(kit.engine.resting.get(root.id))))
