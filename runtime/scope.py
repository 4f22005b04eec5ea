"""A scope is a saga: leave it well and everything stands, leave it badly and everything is undone.

`with` and `async with` are equals. The body's steps share one fate; a scope inside a scope shares the outer one's.
An exception unwinds first and then leaves as `SagaAborted`; a cancellation, Ctrl-C or exit unwinds and leaves as
itself, with `.saga_report`. Leaving well with a step that nobody knows about aborts: an unknown cannot be committed.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import signal
import sys
import threading
import unicodedata
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from shlex import quote
from types import TracebackType
from typing import Any

import msgspec

from ..store.chain import Decide, Draft
from ..store.clock import Now
from ..store.errors import AmendsError, BadValue, Fenced, Refused
from ..store.home import new_id
from .current import CURRENT, current_saga
from .drive import BLOCKING, LOOPING, Drive, current_task, run
from .engine import Engine, ResumeConflict, Run, execute, suspend, unserved
from .facts import body, fact
from .gate.freeze import refuse_quarantined
from .gate.locks import lock_id, names_of
from .gate.provenance import untag
from .gate.switch import tags_of
from .kit import AgentKit
from .openings import raw_fields, redacted, served_steps, whole
from .perform import Call, ask
from .report import RollbackReport, outcome
from .saga import CONCLUDING, ENDED, JOINED, RUNNING, SUSPENDED, UNWINDING, Saga, pending
from .semantics import SEMANTICS, ActionSemantics, semantics_of
from .state import State
from .step import INTENDED, UNKNOWN, WAITING, may_land_for
from .tentative import TentativeResource, call_of
from .tools import ONCE, Compensation, Fallback, RetryPolicy, check_name, declared_options, misfit
from .unwind import take, unwind
from .values import Secret, decode, encode, fitting, secret_names

RESUME_WITHIN = 24 * 3600.0
LOOK = 0.02
STOP_GRACE = 2.0
"""Seconds that steps still in flight get to stop before an unwinding goes on without them."""


class SagaAborted(AmendsError):
    """The scope was left by an exception and has been unwound. `cause` is that exception, `report` says what stands."""

    code = "saga_aborted"
    exit = 1

    def __init__(self, cause: BaseException, report: RollbackReport) -> None:
        said = in_words(cause)
        stop = "" if said.endswith((".", "!", "?")) else "."
        super().__init__(f"{said}{stop} {report.summary()}", code="saga_aborted")
        self.cause, self.report = cause, report


def in_words(error: BaseException) -> str:
    """Why a scope was left: what amends itself says is a sentence, anybody else's error has the name of its class."""
    return error.message if isinstance(error, AmendsError) else f"{type(error).__name__}: {error}"


class Unconfirmed(AmendsError):
    """The scope was left well and stands, but something tentative in it could not be confirmed, or not yet. `report`
    says what; it waits for a person, or for a lever to be lifted."""

    code = "unconfirmed"
    exit = 1

    def __init__(self, name: str, report: RollbackReport) -> None:
        why = "it is frozen" if report.frozen else "it needs a person"
        super().__init__(
            f"Saga {name} stands, but not all that is tentative in it is confirmed: {why}.",
            next="Run `amends status`." if report.frozen else "Run `amends inbox`.",
        )
        self.report = report


class Unsettled(AmendsError):
    """The scope was left well, but nobody knows whether a step happened."""

    code = "unsettled_step"
    exit = 3


class Plan:
    """What a scope was asked to be, before it is open."""

    def __init__(
        self,
        id: str | None,
        name: str | None,
        kit: AgentKit | None,
        on_crash: str,
        resume_within: float,
        barriers: str,
        on_compensation_failure: str,
        restart: str | None,
        restart_reason: str,
        unwind_on_sigterm: bool,
    ) -> None:
        _one_of("on_crash", on_crash, ("unwind", "resume"))
        _one_of("barriers", barriers, ("strict", "merged"))
        _one_of("on_compensation_failure", on_compensation_failure, ("halt", "continue"))
        if restart is not None and (not isinstance(restart, str) or not restart.strip()):
            raise BadValue("restart= takes the name of the person who lets it run again.")
        if id is not None:
            _spoken("id", id)
        if name is not None:
            _spoken("name", name)
        if on_crash == "resume" and id is None:
            raise BadValue("on_crash='resume' needs an id.", next='Write saga_scope(id="order-42", on_crash="resume").')
        self.id, self.name, self.kit = id, name, kit
        self.on_crash, self.within, self.barriers = on_crash, resume_within, barriers
        self.on_failure, self.restart, self.reason = on_compensation_failure, restart, restart_reason
        self.on_sigterm = unwind_on_sigterm

    def continued(self, id: str) -> Plan:
        """The same wishes for the saga that goes on under another id."""
        return Plan(
            id, self.name, self.kit, self.on_crash, self.within, self.barriers, self.on_failure, None, "", False
        )


def _spoken(what: str, value: Any) -> None:
    """Text that people can say and no device mistakes: 1 to 1024 characters, none of them for control, no half ones."""
    said = isinstance(value, str) and 0 < len(value) <= 1024
    if not said or any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        raise BadValue(
            f"A saga's {what} is text of 1 to 1024 characters without control characters; this is {repr(value)[:80]}.",
            code="bad_saga_id",
        )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadValue(f"{name}={value!r}: one of {', '.join(allowed)} is asked.")


class saga_scope:  # noqa: N801  (a context manager reads as a word)
    """Open a saga for the block: `with saga_scope(id=…) as saga:` or `async with`.

    id: makes the saga resumable and unrepeatable. name: for people. kit: an AgentKit; the device's own by default.
    on_crash: `unwind` or `resume` (recovery leaves it for resume_within seconds). barriers: `strict` or `merged`.
    restart: a named person who lets an ended id run again. Raises Refused for an id that is busy, finished or undone.
    """

    def __init__(
        self,
        id: str | None = None,
        *,
        name: str | None = None,
        kit: AgentKit | None = None,
        on_crash: str = "unwind",
        resume_within: float = RESUME_WITHIN,
        barriers: str = "strict",
        on_compensation_failure: str = "halt",
        restart: str | None = None,
        restart_reason: str = "",
        unwind_on_sigterm: bool = False,
    ) -> None:
        self._plan = Plan(
            id, name, kit, on_crash, resume_within, barriers, on_compensation_failure, restart, restart_reason,
            unwind_on_sigterm,
        )  # fmt: skip
        self._open: Opened | None = None

    def __enter__(self) -> SyncSaga:
        _warn_if_loop()
        self._open = run(_enter(BLOCKING, self._plan, SyncSaga))
        handle = self._open.handle
        assert isinstance(handle, SyncSaga)
        return handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = self._take()
        if kind is not None and error is None:
            error = kind()
        _leave_blocking(opened, error)

    async def __aenter__(self) -> AsyncSaga:
        self._open = await _enter(LOOPING, self._plan, AsyncSaga)
        handle = self._open.handle
        assert isinstance(handle, AsyncSaga)
        return handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = self._take()
        await _shielded(opened, _leave(LOOPING, opened, error), error)

    def _take(self) -> Opened:
        opened, self._open = self._open, None
        if opened is None:
            raise BadValue("This scope is not open.", next="Make a new saga_scope for each block.")
        opened.close_context()
        return opened


_WARNED_LOOP = False


def _warn_if_loop() -> None:
    global _WARNED_LOOP
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if not _WARNED_LOOP:
        _WARNED_LOOP = True
        sys.stderr.write("amends: a sync saga on a thread with a running event loop blocks it; use `async with`\n")


# ---- opening ---------------------------------------------------------------------------------------------------------


class Opened:
    """An open scope: its run, its handle, and what has to be put back when it closes."""

    def __init__(self, plan: Plan, kit: AgentKit, handle: Handle) -> None:
        self.plan, self.kit, self.handle = plan, kit, handle
        self._token = CURRENT.set(handle)
        self._sigterm = _catch_sigterm() if plan.on_sigterm else None

    @property
    def run(self) -> Run:
        """The run that the handle holds now: `continue_as_new` puts another in its place."""
        return self.handle._run

    def close_context(self) -> None:
        try:
            CURRENT.reset(self._token)
        except ValueError:  # closed in another context than it was opened in (a generator that moved)
            CURRENT.set(None)
        if self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)


def _catch_sigterm() -> Any:
    if threading.current_thread() is not threading.main_thread():
        raise BadValue("unwind_on_sigterm=True works on the main thread only.")

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    return signal.signal(signal.SIGTERM, stop)


async def _enter(drive: Drive, plan: Plan, kind: type[SyncSaga] | type[AsyncSaga]) -> Opened:
    if os.environ.get("AMENDS_HANDLER_HOST"):
        raise Refused("A handler host opens no saga.", next="Guard the script with if __name__ == '__main__'.",
                      code="in_handler_host")  # fmt: skip
    outer = current_saga()
    kit = plan.kit or (outer.kit if outer is not None else AgentKit.default())
    engine = kit.engine
    parent = outer._run if outer is not None and outer._run.engine is engine and not outer._run.gone else None
    made = await _find_or_make(drive, plan, kit, engine, parent)
    if not made.finished and engine.runs.setdefault(made.id, made) is not made:
        raise _busy(kit, made.name, engine.driver)
    return Opened(plan, kit, kind(kit, made, plan))


async def _find_or_make(drive: Drive, plan: Plan, kit: AgentKit, engine: Engine, parent: Run | None) -> Run:
    if plan.id is None and parent is None:
        return _fresh(plan, engine, new_id(), None, "")
    if plan.id is not None:
        base = plan.id
    else:
        assert parent is not None
        with parent.lock:
            parent.calls["\0saga"] = k = parent.calls.get("\0saga", 0) + 1  # no tool can have that name
        base = f"{parent.id}/{plan.name or 'saga'}/{k}"
    engine.log.refresh()
    size = engine.log.size
    past, header, later = _latest(engine, base)
    if past is None or (plan.restart is not None and past.phase == ENDED):
        made = _fresh(plan, engine, later, parent, past.id if past else "")
        made.looked = size
        return made
    return await _again(drive, plan, kit, engine, past, parent)


def _latest(engine: Engine, name: str) -> tuple[Saga | None, str, str]:
    """The newest generation of a name, the header id for a first one, and the id for one after the newest."""
    newest: Saga | None = None
    for generation in range(1 << 16):
        header = engine.hide(name if generation == 0 else f"{name}\0{generation}")
        found = engine.state.past(header, derived=True)
        if found is None:
            return newest, header, header
        newest = found
    raise Refused(f"Saga {name!r} was restarted too often.", next="Use another id.")


def _fresh(plan: Plan, engine: Engine, header: str, parent: Run | None, of: str) -> Run:
    if parent is None:
        engine.room()
    opening = fact(
        "saga.opened",
        body(
            name=encode(plan.id) if plan.id is not None else b"",
            label=encode(plan.name or "saga") if plan.name or parent else b"",
            by=encode(plan.restart) if of and plan.restart else b"",
            reason=encode(plan.reason) if of and plan.reason else b"",
        )
        if plan.id is not None or plan.name or parent
        else b"",
        saga=header,
        fence=1,
        driver=engine.driver,
        parent=parent.id if parent else "",
        of=of,
        on_crash="" if plan.on_crash == "unwind" else plan.on_crash,
        on_failure="" if plan.on_failure == "halt" else plan.on_failure,
        within_ms=int(plan.within * 1000) if plan.on_crash == "resume" else 0,
        up=True,
    )
    return Run(engine, header, plan.id or header, opening=opening, parent=parent, merged=plan.barriers == "merged")


async def _again(drive: Drive, plan: Plan, kit: AgentKit, engine: Engine, past: Saga, parent: Run | None) -> Run:
    """An id that the log knows: serve it, take it up again, or say why not."""
    name = plan.id or past.id
    inside = past.parent if past.parent in engine.state.sagas else ""
    if parent is None or past.parent != parent.id:
        parent = None  # it was not begun inside the scope that asks for it, and has a fate of its own
    if past.phase == ENDED and past.out in ("committed", "continued"):
        return _served(plan, engine, past, parent, finished=True)
    if past.phase == ENDED:
        raise Refused(
            f"Saga {name} was undone ({past.out}).",
            next='A named person lets it run again with saga_scope(…, restart="NAME"); other work takes another id.',
            code="saga_compensated",
        )
    if parent is not None and past.phase == JOINED and past.driver == engine.driver:
        return _served(plan, engine, past, parent, finished=True)
    if past.id in engine.runs or kit.lives(past.driver) or (parent is None and inside in engine.runs):
        raise _busy(kit, name, past.driver, f" since record {past.opened_seq}")
    if past.phase == CONCLUDING:
        raise Refused(
            f"Saga {name} stands, and what is tentative in it is being confirmed.",
            next=f"Run `amends recoverd --once`, then `amends show {quote(name)}`.",
            code="saga_concluding",
        )
    if past.phase not in (RUNNING, SUSPENDED, JOINED) or past.escalated:
        raise Refused(
            f"Saga {name} is {outcome(past, lives=False)}: what it did is being undone.",
            next=f"Run `amends show {quote(name)}`.",
            code="saga_unwinding",
        )
    if inside and parent is None:
        raise Refused(
            f"Saga {name} is part of another one and shares its fate.", next="Run the outer one again.",
            code="saga_inside",
        )  # fmt: skip
    if past.on_crash != "resume" and parent is None:
        raise Refused(
            f"Saga {name} died; recovery undoes it.",
            next=f"Run `amends recoverd --once`, then `amends show {quote(name)}`.",
            code="saga_crashed",
        )
    if parent is None:  # with a parent, that one was taken, and this one with it
        await drive.commit(engine.log, take(engine, past.id, past.driver, "resume"))
    return _served(plan, engine, engine.state.sagas[past.id], parent, finished=False)


def _busy(kit: AgentKit, name: str, driver: str, since: str = "") -> Refused:
    told = f"Saga {name} is being run by {kit.who(driver)}{since}."
    return Refused(told, next="Wait for it, or use another id.", code="saga_busy")


def _served(plan: Plan, engine: Engine, past: Saga, parent: Run | None, *, finished: bool) -> Run:
    made = Run(
        engine, past.id, plan.id or past.id, opening=None, parent=parent, fence=past.fence,
        merged=plan.barriers == "merged", found=past,
    )  # fmt: skip
    made.finished = finished
    if finished:
        _refuse_redacted(made)
    made.served = served_steps(engine.log, past.id)
    return made


def _refuse_redacted(made: Run) -> None:
    """What a finished saga returned is served from its records; what is gone from them is not made up."""
    for record in made.engine.log.thread(made.id):
        entry = record.entry
        if redacted(record) and (entry.step or entry.kind in _RETURNS):
            raise Refused(
                f"Saga {made.name} is finished, and what its records held was redacted (record {entry.seq}): its "
                "results cannot be served any more.",
                next="Use another id, or restart=NAME.",
                code="redacted",
            )


_RETURNS = ("saga.ended", "saga.concluding", "saga.joined")


# ---- leaving ---------------------------------------------------------------------------------------------------------


def _leave_blocking(opened: Opened, error: BaseException | None) -> None:
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write(f"amends: undoing saga {opened.run.name}; Ctrl-C again leaves it to the daemon\n")
    try:
        run(_leave(BLOCKING, opened, error))
    except KeyboardInterrupt:
        _let_go(opened)
        raise


async def _shielded(opened: Opened, leaving: Coroutine[Any, Any, None], error: BaseException | None) -> None:
    """A cancelled task does not abandon a rollback: it is waited for, and the cancellation told afterwards."""
    task = asyncio.ensure_future(leaving)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as stop:
            cancelled = stop
        except BaseException:
            if not task.done():
                raise
    if task.cancelled():
        _let_go(opened)
    elif cancelled is not None and error is None and task.exception() is None:
        raise cancelled
    task.result()


def _let_go(opened: Opened) -> None:
    """Leave an unwinding, that of the outermost saga, to the daemon, though this process may live on."""
    engine, made = opened.run.engine, opened.run
    whole: Run | None = made
    while whole is not None:  # the scopes around it are left next, and have nothing to undo any more
        whole.over, whole = True, whole.parent

    def decide(state: State, now: Now) -> Sequence[Draft]:
        saga = state.sagas.get(made.id)
        if saga is None or saga.fence != made.fence or saga.driver != engine.driver:
            return ()
        return [fact("saga.released", saga=m.id, fence=m.fence) for m in state.family(state.root(saga))]

    engine.runs.pop(made.id, None)
    engine.log.append(decide)


def _held(made: Run) -> bool:
    """Whether the fate of a saga is still ours: neither taken over, nor let go, nor decided with the outer one."""
    saga = made.saga(made.engine.state)
    if made.over:
        return False
    if saga is None:
        return made.opening is not None and not made.gone
    if saga.fence != made.fence or saga.driver != made.engine.driver:
        return False
    return made.parent is None or not made.parent.over


async def _leave(drive: Drive, opened: Opened, error: BaseException | None) -> None:
    made = opened.run
    engine = made.engine
    try:
        if made.broken is not None and error is None:
            raise made.broken
        if made.broken is not None or made.finished:
            return
        if error is not None and not _held(made):
            return
        if error is None:
            error = await _finish(drive, opened)
            if error is None:
                return
            if not _held(made):
                raise error
        report = await roll_back(drive, opened.kit, made, error)
    finally:
        made.over = True
        if engine.runs.get(made.id) is made:
            del engine.runs[made.id]
    if isinstance(error, Exception):
        raise SagaAborted(error, report) from error
    error.saga_report = report  # type: ignore[attr-defined]


async def _finish(drive: Drive, opened: Opened) -> BaseException | None:
    """Commit the scope. Returns why it cannot be committed."""
    made = opened.run
    left = unserved(made)
    if left:
        told = f"Saga {made.name}: its log has the step {left[0][0]} {left[0][2]}, which this run never called."
        await suspend(drive, made, ResumeConflict(told, next="Run it with the code it began with."))
    for resource in opened.handle._promised:
        if not resource.marked:
            told = f"saga.tentative({resource.resource_id!r}) was not awaited."
            return BadValue(told, next="Write `await` before it.")
    await _wait_flying(drive, made)
    await _probe_unknown(drive, made)
    await _undo_thawed(drive, opened.kit, made)
    try:
        await drive.commit(made.engine.log, _conclusion(made, opened.handle._result))
    except (Unsettled, Refused) as refusal:
        if isinstance(refusal, Fenced):
            raise
        return refusal
    saga = made.saga(made.engine.state)
    if saga is not None and saga.phase == CONCLUDING:
        await _confirm(drive, opened.kit, made)
    return None


async def _undo_thawed(drive: Drive, kit: AgentKit, made: Run) -> None:
    """A saga inside this one that was given up while it was frozen is undone now, if it is not frozen any more."""
    saga = made.saga(made.engine.state)
    for member in made.engine.state.family(saga)[1:] if saga else []:
        if member.phase == UNWINDING:
            await unwind(drive, made.engine, member.id, kit.reach(made))


async def _confirm(drive: Drive, kit: AgentKit, made: Run) -> None:
    """What is tentative becomes final. Nothing of it can be undone any more. Raises Unconfirmed."""
    report = await unwind(drive, made.engine, made.id, kit.reach(made))
    if made.id in made.engine.state.sagas:
        made.engine.resting[made.id] = made
        raise Unconfirmed(made.name, report)


async def _wait_flying(drive: Drive, made: Run) -> None:
    """Steps that nobody awaited get STOP_GRACE to end before the scope is left."""
    for _ in range(int(STOP_GRACE / LOOK)):
        if not _flying(made):
            return
        await drive.sleep(LOOK)


def _flying(made: Run) -> list[Any]:
    """The tasks (None for one that is on a thread) of effects of this saga and those inside it that are in the air."""
    state = made.engine.state
    saga = made.saga(state)
    names = {member.id for member in state.family(saga)} if saga else {made.id}
    return [task for (name, _), task in list(made.flying.items()) if name in names]


async def _probe_unknown(drive: Drive, made: Run) -> None:
    saga = made.saga(made.engine.state)
    for step in list(saga.steps.values()) if saga else []:
        probe = made.probes.get((made.id, step.number))
        if step.state == UNKNOWN and probe is not None and step.settled != "cannot_tell":
            said = await ask(drive, *probe)
            left = may_land_for(step, made.engine.log.now().lived)
            if left and said.amends_outcome == "absent":  # it may still be on its way
                await drive.sleep(left / 1000)
                said = await ask(drive, *probe)
            opening = body(note=encode(said.note)) if said.note else b""
            draft = fact("step.probed", opening, step=step.number, out=said.amends_outcome)
            await drive.commit(made.engine.log, made.facts(draft))


def _conclusion(made: Run, result: bytes) -> Decide:
    """The last fact of a saga: joined to the outer one, or the end of the whole family in one commit; where something
    in it is tentative, the decision that it stands."""
    opening = body(result=result) if result else b""
    joined = made.facts(fact("saga.joined", opening))
    ended = made.facts(fact("saga.ended", opening, out="committed"))
    concluding = made.facts(fact("saga.concluding", opening, up=True))

    def decide(state: State, now: Now) -> Sequence[Draft]:
        saga = state.sagas.get(made.id)
        if saga is None and not result and not made.named:
            made.over = True
            return ()  # nothing happened in it, and nobody can ask for it by name
        inner = state.family(saga)[1:] if saga else []
        for member in inner:
            if member.phase != JOINED:
                raise Refused(f"A saga inside {made.name} is still {member.phase}.", code="inner_saga_open")
        _refuse_unsettled([saga, *inner] if saga else [])
        if saga is not None:
            refuse_quarantined(state, saga, now)
        if made.parent is not None:
            return joined(state, now)
        if saga is not None and any(pending(step) for member in [saga, *inner] for step in member.steps.values()):
            return [
                *concluding(state, now),
                *(fact("saga.concluding", saga=m.id, fence=m.fence, up=True) for m in inner),
            ]
        ends = [fact("saga.ended", saga=m.id, fence=m.fence, out="committed") for m in reversed(inner)]
        drafts = ended(state, now)
        return [*drafts[:-1], *ends, drafts[-1]]

    return decide


def _refuse_unsettled(family: Sequence[Saga]) -> None:
    for saga in family:
        for step in saga.steps.values():
            if step.state == UNKNOWN:
                raise Unsettled(f"Nobody knows whether {step.tool} happened.", next="Declare probe= for it.")
            if step.state in (INTENDED, WAITING):
                raise Unsettled(
                    f"{step.tool} was not finished when its scope was left.", next="Await every step inside the scope."
                )


async def roll_back(drive: Drive, kit: AgentKit, made: Run, error: BaseException) -> RollbackReport:
    """Stop what is in flight, decide that the family unwinds, and unwind it."""
    engine = made.engine
    await _stop_flying(made)
    why = "refused" if isinstance(error, Refused) else error.code if isinstance(error, AmendsError) else "exception"
    cause = fitting(made.hush(in_words(error)))

    def decide(state: State, now: Now) -> Sequence[Draft]:
        saga = state.sagas.get(made.id)
        made.over = True
        if saga is None:
            return ()
        if saga.fence != made.fence:
            raise Fenced(
                f"Saga {made.name} was taken over by another process.", next=f"Run `amends show {quote(made.name)}`."
            )
        return [
            fact("saga.unwinding", body(cause=encode(cause)) if m is saga else b"", saga=m.id, fence=m.fence, why=why,
                 up=True)
            for m in state.family(saga)
        ]  # fmt: skip

    await drive.commit(engine.log, decide)
    if made.id not in engine.state.sagas:
        return RollbackReport([], cause)
    report = await unwind(drive, engine, made.id, kit.reach(made))
    report.cause = cause
    if report.saga in engine.state.sagas:
        engine.resting[report.saga] = made
    return report


async def _stop_flying(made: Run) -> None:
    """Steps of the body that still run in other tasks are cancelled and waited for, within STOP_GRACE."""
    others = [task for task in _flying(made) if task is not None and task is not current_task()]
    others = [task for task in others if not task.get_loop().is_closed()]
    for task in others:
        task.get_loop().call_soon_threadsafe(task.cancel)
    here = [task for task in others if task.get_loop() is _this_loop()]
    if here:
        await asyncio.wait(here, timeout=STOP_GRACE)


def _this_loop() -> Any:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


# ---- handles ---------------------------------------------------------------------------------------------------------


class Handle:
    """What a body holds of its saga. `id` is the id that was given, or the one it was given."""

    def __init__(self, kit: AgentKit, made: Run, plan: Plan) -> None:
        self.kit, self._run, self._plan = kit, made, plan
        self._result = b""
        self._promised: list[TentativeResource] = []  # that an async body has still to await

    @property
    def id(self) -> str:
        return self._run.name

    saga_id = id

    @property
    def header_id(self) -> str:
        """The id in the log's headers."""
        return self._run.id

    @property
    def resumed(self) -> bool:
        """Whether steps of an earlier run are being served."""
        return bool(self._run.served) or self._run.finished

    def _prepare(
        self,
        tool: str,
        forward: Any,
        forward_kwargs: dict[str, Any] | None,
        options: dict[str, Any],
        more: tuple[Any, ...] = (),
    ) -> Call:
        if more or isinstance(forward, ActionSemantics):
            raise _other_order(tool)
        return prepare(self._run, tool, forward, forward_kwargs, options)

    def _hold(self, resource: str, metadata: dict[str, Any], **options: Any) -> TentativeResource:
        options["lock_timeout"] = _patience(options["lock_timeout"])
        call = call_of(self._run.engine, resource, metadata=metadata, **options)
        _encode_args(self._run, call, (), ())
        self._run.identify(call, call.resource)
        return TentativeResource(self._run, call)


def _other_order(tool: str) -> BadValue:
    return BadValue(
        f"execute({tool!r}, …) takes a tool, its forward and the forward's arguments by place, and the rest by name.",
        next="The order is execute(tool, forward, forward_kwargs, semantics=…, compensate=…).",
        code="other_order",
    )


_OPTIONS = {
    "semantics": None, "compensate": None, "undo": None, "verify": None, "probe": None, "settle": None,
    "timeout": None, "retry": None, "fallback": None, "key": None, "returns": None, "store_result": True,
    "secret": (), "apart": (), "tags": (), "locks": (), "lock_timeout": None, "provenance": None,
}  # fmt: skip


def prepare(made: Run, tool: str, forward: Any, forward_kwargs: dict[str, Any] | None, options: dict[str, Any]) -> Call:
    """Check a call before anything happens, encode its arguments and name the step. Raises BadValue, BadName."""
    check_name(tool, "tool")
    if not callable(forward):
        raise BadValue(
            f"execute({tool!r}, …): the second argument is the forward, not {type(forward).__name__}.",
            next="The order is execute(tool, forward, forward_kwargs, semantics=…).",
        )
    declared = declared_options(forward)
    fn = declared.pop("fn", forward)
    settings = {**_OPTIONS, **declared, **{name: value for name, value in options.items() if value is not None}}
    if len(settings) > len(_OPTIONS):
        unknown = sorted(set(settings) - set(_OPTIONS))
        raise BadValue(f"execute({tool!r}) does not know {', '.join(unknown)}.")
    if settings["semantics"] is None:
        raise BadValue(
            f"execute({tool!r}): semantics is missing.", next="State REVERSIBLE, COMPENSABLE or IRREVERSIBLE.",
            code="semantics_missing",
        )  # fmt: skip
    told = untag(dict(forward_kwargs or {}), settings["provenance"])
    kwargs = told.kwargs
    if not all(isinstance(name, str) for name in kwargs):
        raise BadValue(f"execute({tool!r}): the names in forward_kwargs are text.")
    call = Call(
        tool, semantics_of(settings["semantics"]), fn, kwargs,
        timeout=_seconds("timeout", settings["timeout"]), settle=_seconds("settle", settings["settle"]),
        retry=settings["retry"] or ONCE, verify=settings["verify"], probe=settings["probe"],
        compensate=settings["compensate"], undo=settings["undo"], fallback=settings["fallback"],
        returns=settings["returns"], store_result=bool(settings["store_result"]),
        tags=tags_of(settings["tags"]), locks=names_of(settings["locks"], kwargs),
        lock_timeout=_patience(settings["lock_timeout"]), provenance=told.tags, notes=told.notes,
    )  # fmt: skip
    wrong = misfit(fn, call.offered())
    if wrong:
        raise BadValue(f"execute({tool!r}): its forward cannot be called so: {wrong}.")
    secret, apart = (*settings["secret"], *secret_names(call.fn)), tuple(settings["apart"])
    call.secret = secret
    call.reread = lambda: _encode_args(made, call, secret, apart)
    call.reread()
    if b'"$":"secret"' in call.all_args:
        made.hidden.append((call.kwargs, secret))
    _check_options(call)
    key = settings["key"]
    call.named = key is not None
    made.identify(call, check_name(key, "key") if key is not None else "")
    return call


def _encode_args(made: Run, call: Call, secret: tuple[str, ...], apart: tuple[str, ...]) -> None:
    """Arguments as they are stored: secrets as fingerprints, those with a fate of their own in separate openings."""
    call.all_args = encode(call.kwargs, path="args", secret=secret, fingerprint=made.engine.fingerprint)
    lone = [name for name in apart if name in call.kwargs]
    if not lone:
        call.args = call.all_args
        return
    raw = msgspec.json.decode(call.all_args, type=dict[str, msgspec.Raw])
    call.apart = tuple([body(args=body(**{name: bytes(raw.pop(name))})) for name in lone])
    call.args = body(**{name: bytes(value) for name, value in raw.items()})


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e8:
        raise BadValue(f"{name}={value!r}: seconds above 0 are asked.")
    return float(value)


def _patience(value: Any) -> float | None:
    return 0.0 if type(value) in (int, float) and value == 0 else _seconds("lock_timeout", value)


def _check_options(call: Call) -> None:
    if not isinstance(call.retry, RetryPolicy):
        raise BadValue(f"retry={call.retry!r}: a RetryPolicy is asked.")
    for name, value in (("verify", call.verify), ("probe", call.probe)):
        if value is not None and not callable(value):
            raise BadValue(f"{name}={value!r}: a callable is asked.")
    for name, value in (("undo", call.undo), ("compensate", call.compensate)):
        if value is not None and not callable(value) and not isinstance(value, Compensation):
            raise BadValue(f"{name}={value!r}: a Compensation or a callable that makes one is asked.")
    if call.fallback is not None and not callable(call.fallback) and not isinstance(call.fallback, Fallback):
        raise BadValue(f"fallback={call.fallback!r}: a callable or a Fallback is asked.")
    if not SEMANTICS[call.sem].inverse and (call.undo is not None or call.compensate is not None):
        raise BadValue(
            f"{call.tool} is IRREVERSIBLE and declares an inverse.", next="State COMPENSABLE, or drop the inverse."
        )


class AsyncSaga(Handle):
    """The handle of `async with saga_scope()`."""

    def execute(
        self, tool: str, forward: Any = None, forward_kwargs: dict[str, Any] | None = None, *more: Any, **options: Any
    ) -> Awaitable[Any]:
        """Perform one step: `await saga.execute("stripe.charge", charge, {"amount_minor": 4200}, semantics=…, …)`.

        Named and checked at the call, before anything is awaited. Raises BadValue, Refused, or what the tool raised.
        """
        call = self._prepare(tool, forward, forward_kwargs, options, more)
        return execute(LOOPING, self._run, call)

    def tentative(
        self, resource: str, *, confirm: Compensation | Callable[..., Any] | None = None,
        cancel: Compensation | Callable[..., Any] | None = None, lock: bool = False,
        lock_timeout: float | None = None, **metadata: Any,
    ) -> TentativeResource:  # fmt: skip
        """Hold something provisionally, to be confirmed with this saga or cancelled with it; to be awaited.

        Raises BadValue here, and Refused (`lock_timeout` among them) where it is awaited.
        """
        made = self._hold(
            resource, metadata, confirm=confirm, cancel=cancel, lock=lock, lock_timeout=lock_timeout
        )  # fmt: skip
        self._promised.append(made)
        return made

    async def unlock(self, *names: str) -> None:
        """Let go of names before the saga is over: what it still has to undo under them is unprotected from then on.

        Raises Refused (`not_held`) for one that it does not hold.
        """
        await LOOPING.commit(self._run.engine.log, _freed(self._run, names))

    async def rollback(self) -> None:
        """Leave the scope badly."""
        raise RolledBack("The saga was rolled back on request.")

    async def continue_as_new(self, new_id: str | None = None) -> None:
        """End this saga and go on in a new one that keeps what must still be undone."""
        await _continue(LOOPING, self, new_id)


class SyncSaga(Handle):
    """The handle of `with saga_scope()`."""

    def execute(
        self, tool: str, forward: Any = None, forward_kwargs: dict[str, Any] | None = None, *more: Any, **options: Any
    ) -> Any:
        """Perform one step and return its result. Raises BadValue, Refused, or what the tool raised."""
        call = self._prepare(tool, forward, forward_kwargs, options, more)
        return run(execute(BLOCKING, self._run, call))

    def tentative(
        self, resource: str, *, confirm: Compensation | Callable[..., Any] | None = None,
        cancel: Compensation | Callable[..., Any] | None = None, lock: bool = False,
        lock_timeout: float | None = None, **metadata: Any,
    ) -> TentativeResource:  # fmt: skip
        """Hold something provisionally, to be confirmed with this saga or cancelled with it: PENDING when this returns.

        Raises BadValue, Refused (`lock_timeout` among them).
        """
        made = self._hold(
            resource, metadata, confirm=confirm, cancel=cancel, lock=lock, lock_timeout=lock_timeout
        )  # fmt: skip
        return run(made.mark(BLOCKING))

    def unlock(self, *names: str) -> None:
        """Let go of names before the saga is over: what it still has to undo under them is unprotected from then on.

        Raises Refused (`not_held`) for one that it does not hold.
        """
        run(BLOCKING.commit(self._run.engine.log, _freed(self._run, names)))

    def rollback(self) -> None:
        """Leave the scope badly."""
        raise RolledBack("The saga was rolled back on request.")

    def continue_as_new(self, new_id: str | None = None) -> None:
        """End this saga and go on in a new one that keeps what must still be undone."""
        run(_continue(BLOCKING, self, new_id))


def _freed(made: Run, names: Sequence[str]) -> Decide:
    """Names that the outermost saga lets go of."""
    owner = made.outermost
    hidden = {name: lock_id(name, made.engine.meter) for name in names}
    drafts = [owner.facts(fact("lock.freed", lock=lock)) for lock in hidden.values()]

    def decide(state: State, now: Now) -> Sequence[Draft]:
        for name, lock in hidden.items():
            held = state.locks.held.get(lock)
            if held is None or held.saga != owner.id:
                raise Refused(f"This saga does not hold {name!r}.", next="Name what it has claimed.", code="not_held")
        return [freed for draft in drafts for freed in draft(state, now)]

    return decide


class RolledBack(AmendsError):
    """Raised by `rollback()`: the scope's owner changed its mind."""

    code = "rolled_back"
    exit = 1


async def _continue(drive: Drive, handle: Handle, new_id: str | None) -> None:
    from .carry import carried

    old = handle._run
    engine = old.engine
    plan = handle._plan.continued(new_id or f"{old.id}/continued")
    if old.finished:  # it went on before: so does this run, in what it went on as
        handle._run = await _find_or_make(drive, plan, handle.kit, engine, old.parent)
        engine.runs[handle._run.id] = handle._run
        return
    await _wait_flying(drive, old)
    engine.log.flush()
    saga = old.saga(engine.state)
    family = engine.state.family(saga) if saga else []
    _refuse_unfinished(family)
    new = _fresh(plan, engine, _latest(engine, plan.id or "")[1], old.parent, old.id)
    assert new.opening is not None
    drafts = [new.opening, *carried(engine.log, family, new.id, 1)]
    ends = [old.facts(fact("saga.ended", out="continued"))]

    def decide(state: State, now: Now) -> Sequence[Draft]:
        if saga is not None:
            refuse_quarantined(state, saga, now)
        inner = [fact("saga.ended", saga=m.id, fence=m.fence, out="continued") for m in reversed(family[1:])]
        last = ends[0](state, now)
        old.over = True
        names = [fact("lock.taken", saga=new.id, fence=1, lock=held.lock, up=True) for held in state.locks.of(old.id)]
        return [*last[:-1], *inner, last[-1], *drafts, *names]

    await drive.commit(engine.log, decide)
    new.opening = None
    new.count = max((draft.fields.get("step", 0) for draft in drafts), default=0)
    for draft in drafts[1:]:
        _hand_down(old, new, draft, family)
    engine.runs.pop(old.id, None)
    engine.runs[new.id] = new
    handle._run = new


def _hand_down(old: Run, new: Run, draft: Draft, family: Sequence[Saga]) -> None:
    """What only this process can run of a carried step, under its new name."""
    number = next(s.number for m in family if m.id == draft.fields["of"] for s in m.steps.values()
                  if s.seq == draft.fields["ref"])  # fmt: skip
    before, after = (draft.fields["of"], number), (new.id, draft.fields["step"])
    if before in old.live:
        new.live[after] = old.live[before]
    if before in old.probes:
        new.probes[after] = old.probes[before]
    if before in old.refine:
        new.refine[after] = old.refine[before]
    if before in old.confirms:
        new.confirms[after] = old.confirms[before]


def _refuse_unfinished(family: Sequence[Saga]) -> None:
    for saga in family:
        if saga is not family[0] and saga.phase != JOINED:
            raise Refused("A saga inside it is still open.", next="Leave it first.", code="inner_saga_open")
        for step in saga.steps.values():
            if step.state in (INTENDED, WAITING):
                raise Refused(f"{step.tool} is not finished.", next="Await it first.", code="unsettled_step")


# ---- @saga -----------------------------------------------------------------------------------------------------------


def saga(fn: Callable[..., Any] | None = None, *, id: Any = None, **options: Any) -> Any:
    """Make a function a saga. id: text, or a callable over the function's arguments; then a second run returns the
    recorded result instead of running. Other options as `saga_scope`."""
    if fn is None:
        return functools.partial(saga, id=id, **options)
    function = fn
    options.setdefault("name", getattr(function, "__qualname__", None))

    def scope(args: tuple[Any, ...], kwargs: dict[str, Any]) -> saga_scope:
        chosen = id(*args, **kwargs) if callable(id) else id
        return saga_scope(chosen, **options)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            async with scope(args, kwargs) as handle:
                if handle._run.finished:
                    return _recorded(handle)
                result = await function(*args, **kwargs)
                handle._result = encode(result, path="result")
                return result

        return asynchronous

    @functools.wraps(function)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        with scope(args, kwargs) as handle:
            if handle._run.finished:
                return _recorded(handle)
            result = function(*args, **kwargs)
            handle._result = encode(result, path="result")
            return result

    return synchronous


def _recorded(handle: Handle) -> Any:
    """What a finished saga returned."""
    handle._run.served.clear()
    for record in reversed(list(whole(handle._run.engine.log.thread(handle.header_id)))):
        if record.entry.kind in _RETURNS:
            raw = raw_fields(record.blob).get("result")
            if raw or record.entry.kind != "saga.ended":  # one that was confirmed first said it then
                return decode(msgspec.json.decode(raw)) if raw else None
    return None


__all__ = ["AsyncSaga", "SagaAborted", "Secret", "SyncSaga", "saga", "saga_scope"]
