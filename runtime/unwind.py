"""Undo what stands, or confirm what is tentative, in the order that `due` says, until nothing is left or only a person
can go on.

The same loop runs in the process whose saga failed and in the daemon after a crash; they differ in who reaches the
handlers (`Reach`). Each handler is announced before it starts and its outcome is durable before the next one. What a
person has frozen is let go of as it stands, and whether it is is asked again in the transaction of each announcement.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ..store.chain import Decide, Draft
from ..store.clock import Now
from ..store.errors import AmendsError, Fenced
from .drive import Drive
from .due import Action, Confirm, End, Escalate, Frozen, Lost, Probe, Resolve, Rest, Undo, Wait, Withdraw, due
from .engine import Engine
from .facts import body, fact
from .gate.freeze import freeze, refuse_quarantined
from .hosts import Outcome
from .inverse import NONE, Inverse, Recorded, read
from .openings import needed_at
from .report import RollbackReport
from .saga import CONCLUDING, JOINED, RUNNING, SUSPENDED, Saga
from .state import State
from .step import CONFIRMING, INTENDED, STUCK, UNDO_LOST, UNDOING, Step, may_land_for
from .values import encode, fitting

ATTEMPTS = 3
"""How often one unwinding tries a compensation that fails or whose answer is lost."""
BACKOFF = 0.2
LONGEST_LOOK = 1.0


class Reach(Protocol):
    """Finds where handlers live, and runs them."""

    async def perform(
        self, drive: Drive, saga: Saga, step: Step, recorded: Recorded, key: str, purpose: str
    ) -> Outcome:
        """Run the handler that undoes (`undo`) or confirms (`confirm`) a step. Never raises for what a handler does."""

    def missing(self, saga: Saga, step: Step, recorded: Recorded, purpose: str) -> tuple[str, str] | None:
        """Why nobody here can run it: a reason code of report.REASONS and a sentence; None if somebody can."""

    async def probe(self, drive: Drive, saga: Saga, step: Step) -> Outcome:
        """Ask the world about the forward effect: present, absent or cannot_tell."""

    async def refined(self, drive: Drive, saga: Saga, step: Step, result: Any) -> Inverse:
        """What undoes an effect whose result a probe has told; NONE leaves what was declared. Raises NoInverse."""


def held(engine: Engine, family: Sequence[Saga], drafts: Sequence[Draft]) -> Decide:
    """Facts of sagas that this process still holds; refused as a whole if it has lost one of them."""
    fences = {saga.id: saga.fence for saga in family}
    driver = engine.driver

    def decide(state: State, now: Now) -> Sequence[Draft]:
        for name, fence in fences.items():
            saga = state.sagas.get(name)
            if saga is None or saga.fence != fence or saga.driver != driver:
                raise Fenced("The saga was taken over or ended while it was being unwound.", next="Nothing to do.")
        return drafts

    return decide


def of(saga: Saga, kind: str, opening: bytes = b"", **header: Any) -> Draft:
    """A fact of a saga under its present fence."""
    return fact(kind, opening, saga=saga.id, fence=saga.fence, **header)


def take(engine: Engine, root: str, expected: str, why: str, item: tuple[str, int] = ("", 0), by: str = "") -> Decide:
    """Take a whole family over from `expected` (a driver that is dead, or "" for one that let go).

    After a crash it also says what is lost and that the family unwinds, unless its fate was decided before. item: the
    (saga, step) that a person wants tried again, by their name; other steps that wait for a person go on waiting.
    Raises Fenced if somebody was faster, Refused for one that is quarantined.
    """
    driver = engine.driver

    def decide(state: State, now: Now) -> Sequence[Draft]:
        saga = state.sagas.get(root)
        if saga is None or saga.driver != expected:
            raise Fenced("Somebody else was faster.", next="Nothing to do.")
        refuse_quarantined(state, saga, now)
        drafts: list[Draft] = []
        for member in state.family(saga):
            fence = member.fence + 1
            step, reason = (item[1], why) if member.id == item[0] else (0, "beside" if item[0] else why)
            drafts.append(
                fact(
                    "saga.taken",
                    body(by=encode(by)) if by else b"",
                    saga=member.id,
                    step=step,
                    fence=fence,
                    driver=driver,
                    why=reason,
                    up=True,
                )  # fmt: skip
            )
            drafts += [
                fact(LOST[step.state], saga=member.id, fence=fence, step=step.number, why="died", up=True)
                for step in member.steps.values()
                if step.state in LOST
            ]
            if why != "resume" and member.phase in (RUNNING, SUSPENDED, JOINED):
                drafts.append(fact("saga.unwinding", saga=member.id, fence=fence, why=why, up=True))
        return drafts

    return decide


LOST = {INTENDED: "step.lost", UNDOING: "undo.lost", CONFIRMING: "confirm.lost"}
"""What is lost with whoever performed it, by the state it was in."""


async def unwind(drive: Drive, engine: Engine, root: str, reach: Reach) -> RollbackReport:
    """Take a family that this process holds, and whose fate is decided, as far as it goes without a person.

    Raises Fenced if somebody else takes it over meanwhile. Bounded: each step is tried ATTEMPTS times.
    """
    tries: dict[tuple[str, int], int] = {}
    log = engine.log
    while True:
        size = log.size
        state = engine.state
        saga = state.sagas.get(root)
        if saga is None:
            raise Fenced("The saga ended while it was being unwound.", next="Nothing to do.")
        family, now = state.family(saga), log.now()
        action = due(family, now, freeze(state, family, now))
        if isinstance(action, Wait):
            left = (action.until - log.now().lived) / 1000
            if not await drive.grown(log, size, max(0.001, min(left, LONGEST_LOOK))):
                log.refresh()
        elif isinstance(action, (Rest, Frozen)) and saga.parent in state.sagas:
            return _report(family, action)  # the outer one still holds it, and says when it lets go
        elif isinstance(action, (End, Rest, Frozen)):
            if await drive.commit(log, _last(engine, family, action)):
                if isinstance(action, End):
                    engine.resting.pop(root, None)
                elif isinstance(action, Rest):
                    engine.needs_people()
                return _report(family, action)
        elif type(action) in FACTS:
            await drive.commit(log, held(engine, family, [FACTS[type(action)](action)]))
        else:
            await _ACT[type(action)](drive, engine, family, action, reach, tries)


def _report(family: Sequence[Saga], action: Action) -> RollbackReport:
    return RollbackReport(family, family[0].why, action.why if isinstance(action, Frozen) else "")


def _last(engine: Engine, family: Sequence[Saga], action: End | Rest | Frozen) -> Decide:
    """End the family or let go of it, unless something happened since we looked: then there is more to do."""

    def decide(state: State, now: Now) -> Sequence[Draft]:
        why = action.why if isinstance(action, Frozen) else ""
        drafts = _ending(family) if isinstance(action, End) else [of(m, "saga.released", why=why) for m in family]
        drafts = list(held(engine, family, drafts)(state, now))
        found = state.family(state.sagas[family[0].id])
        left = due(found, now, freeze(state, found, now))
        return drafts if type(left) is type(action) and left == action else ()

    return decide


def _announced(engine: Engine, family: Sequence[Saga], draft: Draft) -> Decide:
    """The fact before a handler starts: not for a family that has been frozen since we looked."""
    held_by_us = held(engine, family, [draft])

    def decide(state: State, now: Now) -> Sequence[Draft]:
        drafts = held_by_us(state, now)
        return () if freeze(state, state.family(state.sagas[family[0].id]), now) else drafts

    return decide


def _ending(family: Sequence[Saga]) -> list[Draft]:
    """The inner sagas end before the outer one, all in one commit."""
    refused = family[0].why == "refused" and not any(step.ended_seq for saga in family for step in saga.steps.values())
    out = "committed" if family[0].phase == CONCLUDING else "refused" if refused else "compensated"
    return [of(member, "saga.ended", out=out) for member in reversed(family)]


Tries = dict[tuple[str, int], int]


async def _probe(
    drive: Drive, engine: Engine, family: Sequence[Saga], action: Action, reach: Reach, tries: Tries
) -> None:
    assert isinstance(action, Probe)
    saga, step = action.saga, action.step
    said = await reach.probe(drive, saga, step)
    left = may_land_for(step, engine.log.now().lived)
    if left and said.outcome == ("present" if step.state == UNDO_LOST else "absent"):
        # What is on its way may change the answer: nothing is written, and `due` has it asked again.
        await drive.grown(engine.log, engine.log.size, min(left / 1000, LONGEST_LOOK))
        return
    out = said.outcome if said.outcome in ("present", "absent") else "cannot_tell"
    inverse = NONE
    if out == "present":
        try:
            inverse = await reach.refined(drive, saga, step, said.result)
        except AmendsError as error:  # the factory cannot use what the probe told: what was declared stands, or nothing
            said = said._replace(why=str(error))
    drafts = [probed(saga, step, said, out, inverse)]
    if step.state == UNDO_LOST and out == "absent":
        drafts.append(of(saga, "undo.done", step=step.number, out="already"))
    await drive.commit(engine.log, held(engine, family, drafts))


def probed(saga: Saga, step: Step, said: Outcome, out: str, inverse: Inverse) -> Draft:
    """What the world said, with the inverse that its answer refines."""
    found = inverse is not NONE
    return of(
        saga, "step.probed", _told(said, inverse.payload), step=step.number, out=out,
        inv=inverse.inv if found else "", handler=inverse.handler, again=inverse.again,
    )  # fmt: skip


class Job(NamedTuple):
    """A handler to be run for a step. verb: `undo` or `confirm`, its purpose and the kinds it is told in; again: why it
    may be repeated if its answer is lost; header: what its announcement says besides."""

    verb: str
    saga: Saga
    step: Step
    recorded: Recorded
    key: str
    again: str
    header: dict[str, Any]


async def _undo(
    drive: Drive, engine: Engine, family: Sequence[Saga], action: Action, reach: Reach, tries: Tries
) -> None:
    assert isinstance(action, Undo)
    saga, step = action.saga, action.step
    recorded = read(needed_at(engine.log, step.inverse_seq))
    if recorded is None:
        return await _stop(drive, engine, family, saga, step, "unreadable", "Its opening is gone.")
    repeated = step.state in (UNDO_LOST, STUCK) and step.undo_key
    key = step.undo_key if repeated else recorded.late_key if action.scope == "undo/late" else recorded.key
    header = {"scope": action.scope, "attempt": step.undo_attempts + 1}
    await _run(drive, engine, family, Job("undo", saga, step, recorded, key, step.again, header), reach, tries)


async def _confirm(
    drive: Drive, engine: Engine, family: Sequence[Saga], action: Action, reach: Reach, tries: Tries
) -> None:
    assert isinstance(action, Confirm)
    saga, step = action.saga, action.step
    recorded = read(needed_at(engine.log, step.seq), "confirmation")
    if recorded is None:
        return await _stop(drive, engine, family, saga, step, "unreadable", "Its opening is gone.")
    header = {"attempt": step.confirm_attempts + 1}
    job = Job("confirm", saga, step, recorded, recorded.key, step.confirm_again, header)
    await _run(drive, engine, family, job, reach, tries)


async def _run(drive: Drive, engine: Engine, family: Sequence[Saga], job: Job, reach: Reach, tries: Tries) -> None:
    """Announce a handler, run it once, and record what it said."""
    saga, step, recorded = job.saga, job.step, job.recorded
    missing = reach.missing(saga, step, recorded, job.verb)
    if missing:
        return await _stop(drive, engine, family, saga, step, *missing)
    intent = of(
        saga, f"{job.verb}.intended", step=step.number, handler=recorded.handler, key=job.key, **job.header,
    )  # fmt: skip
    if not await drive.commit(engine.log, _announced(engine, family, intent)):
        return
    done = await reach.perform(drive, saga, step, recorded, job.key, job.verb)
    tried = tries[saga.id, step.number] = tries.get((saga.id, step.number), 0) + 1
    await drive.commit(engine.log, held(engine, family, _outcome(job, done, tried >= ATTEMPTS)))
    if done.outcome in ("failed", "again", "lost") and tried < ATTEMPTS:
        await drive.sleep(BACKOFF * 2 ** (tried - 1))


async def _stop(
    drive: Drive, engine: Engine, family: Sequence[Saga], saga: Saga, step: Step, why: str, sentence: str
) -> None:
    draft = of(saga, "saga.escalated", body(error=encode(sentence)), step=step.number, why=why, up=True)
    await drive.commit(engine.log, held(engine, family, [draft]))


_REASONS = {
    "undo": {"failed": "compensation_failed", "lost": "undo_answer_lost", "human": "human_task"},
    "confirm": {"failed": "confirm_failed", "lost": "confirm_answer_lost", "human": "confirm_by_hand"},
}
"""Why a step goes to a person, by the verb of its handler and by what that said."""


def _outcome(job: Job, done: Outcome, last: bool) -> list[Draft]:
    saga, step, verb = job.saga, job.step, job.verb
    if done.outcome in ("done", "already_done"):
        out = "already" if done.outcome == "already_done" else "done"
        return [of(saga, f"{verb}.done", _told(done), step=step.number, out=out)]
    lost = done.outcome == "lost"
    kind = f"{verb}.lost" if lost else f"{verb}.failed"
    drafts = [of(saga, kind, _told(done), step=step.number, why=done.outcome, up=True)]
    why = {"human": _REASONS[verb]["human"], "unavailable": "no_handler"}.get(done.outcome)
    if why is None and last:
        why = _REASONS[verb]["lost" if lost else "failed"]
    if why is None and lost and not job.again:
        return drafts  # `due` asks its probe, or escalates
    if why:
        drafts.append(of(saga, "saga.escalated", _told(done), step=step.number, why=why, up=True))
    return drafts


def _told(done: Outcome, compensation: bytes = b"") -> bytes:
    """What a handler said, for people."""
    return body(
        compensation=compensation,
        error=encode(fitting(done.why)) if done.why else b"",
        host=encode(fitting(done.host)) if done.host else b"",
        note=encode(fitting(done.note)) if done.note else b"",
        stderr=encode(fitting(done.stderr)) if done.stderr else b"",
    )


_ACT: dict[type, Callable[..., Awaitable[None]]] = {Probe: _probe, Undo: _undo, Confirm: _confirm}

FACTS: dict[type, Callable[[Any], Draft]] = {
    Lost: lambda action: of(action.saga, action.kind, step=action.step.number, why="gone", up=True),
    Resolve: lambda action: of(action.saga, action.kind, step=action.step.number, out="nothing"),
    Withdraw: lambda action: of(action.saga, "step.refused", step=action.step.number, why="withdrawn"),
    Escalate: lambda action: of(action.saga, "saga.escalated", step=action.step.number, why=action.why, up=True),
}
"""The fact that an action leaves where nothing has to be done in the world."""
