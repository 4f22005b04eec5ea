"""Undo what stands, in the order that `due` says, until nothing is left or only a person can go on.

The same loop runs in the process whose saga failed and in the daemon after a crash; they differ in who reaches the
handlers (`Reach`). Each compensation is announced before it starts and its outcome is durable before the next one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from ..store.chain import Decide, Draft
from ..store.clock import Now
from ..store.errors import AmendsError, Fenced
from .drive import Drive
from .due import Action, End, Escalate, Lost, Probe, Rest, Undo, Wait, Withdraw, due
from .engine import Engine
from .facts import body, fact
from .hosts import Outcome
from .inverse import NONE, Inverse, Recorded, read
from .openings import blob_at
from .report import RollbackReport
from .saga import JOINED, RUNNING, SUSPENDED, Saga
from .state import State
from .step import INTENDED, STUCK, UNDO_LOST, UNDOING, Step, may_land_for
from .values import encode, fitting

ATTEMPTS = 3
"""How often one unwinding tries a compensation that fails or whose answer is lost."""
BACKOFF = 0.2
LONGEST_LOOK = 1.0


class Reach(Protocol):
    """Finds where handlers live, and runs them."""

    async def undo(self, drive: Drive, saga: Saga, step: Step, recorded: Recorded, key: str) -> Outcome:
        """Run the compensation. Never raises for what a handler does."""

    def missing(self, saga: Saga, step: Step, recorded: Recorded) -> tuple[str, str] | None:
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

    After a crash it also says what is lost and that the family unwinds. item: the (saga, step) that a person wants
    tried again, by their name; other steps that wait for a person go on waiting. Raises Fenced if somebody was faster.
    """
    driver = engine.driver

    def decide(state: State, now: Now) -> Sequence[Draft]:
        saga = state.sagas.get(root)
        if saga is None or saga.driver != expected:
            raise Fenced("Somebody else was faster.", next="Nothing to do.")
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
                fact(
                    "step.lost" if step.state == INTENDED else "undo.lost",
                    saga=member.id, fence=fence, step=step.number, why="died", up=True,
                )
                for step in member.steps.values()
                if step.state in (INTENDED, UNDOING)
            ]  # fmt: skip
            if why != "resume" and member.phase in (RUNNING, SUSPENDED, JOINED):
                drafts.append(fact("saga.unwinding", saga=member.id, fence=fence, why=why, up=True))
        return drafts

    return decide


async def unwind(drive: Drive, engine: Engine, root: str, reach: Reach) -> RollbackReport:
    """Take a family that this process holds, and that is to be unwound, as far as it goes without a person.

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
        family = state.family(saga)
        action = due(family, log.now())
        if isinstance(action, Wait):
            left = (action.until - log.now().lived) / 1000
            if not await drive.grown(log, size, max(0.001, min(left, LONGEST_LOOK))):
                log.refresh()
        elif isinstance(action, Rest) and saga.parent in state.sagas:
            return RollbackReport(family, saga.why)  # the outer one still holds it, and says when it lets go
        elif isinstance(action, (End, Rest)):
            if await drive.commit(log, _last(engine, family, type(action))):
                if isinstance(action, End):
                    engine.resting.pop(root, None)
                return RollbackReport(family, saga.why)
        elif type(action) in FACTS:
            await drive.commit(log, held(engine, family, [FACTS[type(action)](action)]))
        else:
            await _ACT[type(action)](drive, engine, family, action, reach, tries)


def _last(engine: Engine, family: Sequence[Saga], action: type) -> Decide:
    """End the family or let go of it, unless something landed since we looked: then there is more to do."""

    def decide(state: State, now: Now) -> Sequence[Draft]:
        drafts = _ending(family) if action is End else [of(m, "saga.released") for m in family]
        drafts = list(held(engine, family, drafts)(state, now))
        return drafts if type(due(state.family(state.sagas[family[0].id]), now)) is action else ()

    return decide


def _ending(family: Sequence[Saga]) -> list[Draft]:
    """The inner sagas end before the outer one, all in one commit."""
    refused = family[0].why == "refused" and not any(step.ended_seq for saga in family for step in saga.steps.values())
    out = "refused" if refused else "compensated"
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


async def _undo(
    drive: Drive, engine: Engine, family: Sequence[Saga], action: Action, reach: Reach, tries: Tries
) -> None:
    assert isinstance(action, Undo)
    saga, step = action.saga, action.step
    recorded = read(blob_at(engine.log, step.inverse_seq))
    if recorded is None:
        return await _stop(drive, engine, family, saga, step, "unreadable", "Its opening is gone.")
    missing = reach.missing(saga, step, recorded)
    if missing:
        return await _stop(drive, engine, family, saga, step, *missing)
    repeated = step.state in (UNDO_LOST, STUCK) and step.undo_key
    key = step.undo_key if repeated else recorded.late_key if action.scope == "undo/late" else recorded.key
    intent = of(
        saga, "undo.intended", step=step.number, handler=recorded.handler, key=key, scope=action.scope,
        attempt=step.undo_attempts + 1,
    )  # fmt: skip
    await drive.commit(engine.log, held(engine, family, [intent]))
    done = await reach.undo(drive, saga, step, recorded, key)
    tried = tries[saga.id, step.number] = tries.get((saga.id, step.number), 0) + 1
    await drive.commit(engine.log, held(engine, family, _outcome(saga, step, done, tried >= ATTEMPTS)))
    if done.outcome in ("failed", "again", "lost") and tried < ATTEMPTS:
        await drive.sleep(BACKOFF * 2 ** (tried - 1))


async def _stop(
    drive: Drive, engine: Engine, family: Sequence[Saga], saga: Saga, step: Step, why: str, sentence: str
) -> None:
    draft = of(saga, "saga.escalated", body(error=encode(sentence)), step=step.number, why=why, up=True)
    await drive.commit(engine.log, held(engine, family, [draft]))


def _outcome(saga: Saga, step: Step, done: Outcome, last: bool) -> list[Draft]:
    if done.outcome in ("done", "already_done"):
        out = "already" if done.outcome == "already_done" else "done"
        return [of(saga, "undo.done", _told(done), step=step.number, out=out)]
    lost = done.outcome == "lost"
    kind = "undo.lost" if lost else "undo.failed"
    drafts = [of(saga, kind, _told(done), step=step.number, why=done.outcome, up=True)]
    why = {"human": "human_task", "unavailable": "no_handler"}.get(done.outcome)
    if why is None and last:
        why = "undo_answer_lost" if lost else "compensation_failed"
    if why is None and lost and not step.again:
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


_ACT: dict[type, Callable[..., Awaitable[None]]] = {Probe: _probe, Undo: _undo}

FACTS: dict[type, Callable[[Any], Draft]] = {
    Lost: lambda action: of(action.saga, action.kind, step=action.step.number, why="gone", up=True),
    Withdraw: lambda action: of(action.saga, "step.refused", step=action.step.number, why="withdrawn"),
    Escalate: lambda action: of(action.saga, "saga.escalated", step=action.step.number, why=action.why, up=True),
}
"""The fact that an action leaves where nothing has to be done in the world."""
