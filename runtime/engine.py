"""Commit, perform, settle: the one way an effect happens, for whoever drives a saga.

An effect starts only after the fact that announces it is durable; its outcome and what undoes it are durable before
the call returns. Every fact is made under a fence: whoever has lost the saga is refused inside the same transaction.
The functions are coroutines over a Drive, so sync and async callers, the daemon and the dry run share every line.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from shlex import quote
from typing import Any

import msgspec

from ..store.chain import Decide, Draft
from ..store.clock import Now
from ..store.entry import Entry
from ..store.errors import AmendsError, BadValue, Fenced, Refused
from ..store.log import BUFFERED, DURABLE, FILED, Log
from .admission import admit, at_once, attempt
from .drive import BLOCKING, Drive, current_task, run
from .facts import body, fact
from .gate import keyring
from .gate.policy_file import Policy, unruled
from .gate.question import GateCall, Question
from .hosts import recorded_host
from .inverse import NONE, Inverse, NoInverse, declared_by, derived_by, idempotency_key, own_key, takes_nothing, written
from .openings import served_steps
from .perform import Call, Outcome, ask, perform, says_nothing
from .pool import SHARED
from .saga import RUNNING, Saga
from .semantics import SEMANTICS
from .state import State
from .step import DONE, FAILED, INTENDED, REFUSED, UNKNOWN, may_land_for
from .tools import Compensation, declared_options, defaults
from .values import convert, decode_bytes, digest, encode, fitting, hush, secret_names

NEW_EFFECTS = frozenset({"step.asked", "step.intended", "saga.joined"})
DEFAULT_SETTLE = 2.0


class UnstorableResult(BadValue):
    """The effect happened and is recorded; its result cannot be. `facts['result']` is the live object."""

    code = "unstorable_result"


class ResumeConflict(Refused):
    """A resumed saga met other code or other arguments than its log. It stays resumable."""

    code = "resume_conflict"


class Engine:
    """One process's hold on one log: who it is as a driver, how names are hidden in headers, and which policy it asks.

    known(handler) tells why a handler configured on this device may be run again (`keyed`, `idempotent`), or None.
    meter(text) is the header name of what a limit or a lock is keyed by. agent asks, on behalf of somebody or nobody.
    """

    def __init__(
        self,
        log: Log,
        *,
        driver: Callable[[], str],
        hide: Callable[[str], str],
        fingerprint: Callable[[bytes], str],
        known: Callable[[str], str | None] = lambda name: None,
        meter: Callable[[str], str],
        policy: Policy,
        agent: str = "agent",
        on_behalf_of: str = "",
    ) -> None:
        self.log, self.hide, self.fingerprint, self.known = log, hide, fingerprint, known
        self.meter, self.policy = meter, policy
        self.agent, self.on_behalf_of = agent, on_behalf_of
        self._driver = driver
        self.runs: dict[str, Run] = {}  # sagas this process drives, by header id
        self.resting: dict[str, Run] = {}  # those that wait for a person, with the inverses only this process has
        self.after_landing: Callable[[Run, Call, Draft | None], None] | None = None
        self.needs_people: Callable[[], None] = _nobody_follows  # called when it is durable, and answers at once
        self.room: Callable[[], None] = _nobody_follows  # asked before a saga begins; raises DiskFull

    @property
    def driver(self) -> str:
        """This process as the log knows it: an id whose lock it holds. Another one after a fork."""
        return self._driver()

    @property
    def state(self) -> State:
        state: State = self.log.view
        return state


def _nobody_follows() -> None:
    """For a kit without followers."""


Refine = Callable[[Drive, Any], Awaitable[Inverse]]
"""What undoes an effect that a probe says is there, from the result it tells; NONE leaves what was declared."""


class Run:
    """A saga that this process drives: what only memory holds of it. Everything else is in the fold."""

    def __init__(
        self,
        engine: Engine,
        saga: str,
        name: str,
        *,
        opening: Draft | None,
        parent: Run | None = None,
        fence: int = 1,
        merged: bool = False,
        found: Saga | None = None,
    ) -> None:
        self.engine, self.id, self.name, self.parent = engine, saga, name, parent
        self.opening, self.fence, self.merged = opening, fence, merged
        self.count = max(found.steps, default=0) if found else 0
        self.calls: dict[str, int] = {}
        self.served: dict[tuple[str, str, str], tuple[int, bytes, bytes | None]] = {}
        self.finished = False  # every step is served; a new one is refused
        # what only this process can run, by saga and step; shared by a family, which has one fate
        self.live: dict[tuple[str, int], Compensation] = parent.live if parent else {}
        self.confirms: dict[tuple[str, int], Compensation] = parent.confirms if parent else {}
        self.probes: dict[tuple[str, int], tuple[Callable[..., Any], dict[str, Any], str]] = (
            parent.probes if parent else {}
        )
        self.refine: dict[tuple[str, int], Refine] = parent.refine if parent else {}
        self.hidden: list[tuple[dict[str, Any], tuple[str, ...]]] = parent.hidden if parent else []
        self.flying: dict[tuple[str, int], Any] = parent.flying if parent else {}  # effects in the air and their tasks
        self.keys: dict[tuple[str, str], str] = {}  # identities that the caller chose, and digests of their arguments
        self.named = bool(opening is not None and opening.openings)
        self.broken: AmendsError | None = None
        self.looked = 0  # how long the log was when it had no saga of this name; 0 for a name that nobody else can have
        self.over = False  # its fate is decided: it is not opened (again)
        self.lock = threading.Lock()

    @property
    def gone(self) -> bool:
        """Whether its fate, or that of a saga it is inside of, has been decided."""
        return self.over or (self.parent is not None and self.parent.gone)

    def identify(self, call: Call, key: str) -> None:
        """Name the step, before anything is awaited: tool and how often it was called, or the caller's own key."""
        with self.lock:
            self.calls[call.tool] = k = self.calls.get(call.tool, 0) + 1
            call.identity = key or str(k)
            if key:
                self._same_key(call)
        call.key = own_key(call.kwargs) or idempotency_key(self.id, call.tool, call.identity, "do")

    def _same_key(self, call: Call) -> None:
        """A key that the caller used before names the step that it named then."""
        new = digest(call.all_args)
        call.repeated = (call.tool, call.identity) in self.keys
        old = self.keys.setdefault((call.tool, call.identity), new)
        if old != new:
            raise BadValue(
                f"{call.tool} was called with key={call.identity!r} and other arguments before "
                f"({old[:12]} then, {new[:12]} now).",
                next="Use another key for another step.",
                code="key_reused",
                old=old,
                new=new,
            )

    def hush(self, text: str) -> str:
        """A text without the secrets that were passed to any step of this family."""
        for kwargs, secret in self.hidden:
            text = hush(text, kwargs, secret)
        return text

    def number(self) -> int:
        with self.lock:
            self.count += 1
            return self.count

    def facts(self, *drafts: Draft) -> Decide:
        """These facts, if we still drive the saga; its first fact rides along with them."""
        return Guarded(self, drafts)

    def saga(self, state: State) -> Saga | None:
        return state.sagas.get(self.id)

    @property
    def outermost(self) -> Run:
        """The run whose fate this one shares."""
        run = self
        while run.parent is not None:
            run = run.parent
        return run


class Guarded:
    """A decision to append facts of one saga under the fence they were made under."""

    __slots__ = ("run", "drafts")

    def __init__(self, run: Run, drafts: Sequence[Draft]) -> None:
        self.run, self.drafts = run, drafts
        for draft in drafts:
            draft.fields["saga"], draft.fields["fence"] = run.id, run.fence

    def __call__(self, state: State, now: Now) -> Sequence[Draft]:
        run = self.run
        saga = state.sagas.get(run.id)
        if saga is None:
            if run.opening is None:
                raise Fenced(f"Saga {run.name} is no longer open.", next="See `amends show`.", code="saga_ended")
            return (*_chain_of_openings(run, state), *self.drafts)
        if saga.fence != run.fence or saga.driver != run.engine.driver:
            raise _taken(run)
        if saga.phase != RUNNING and any(draft.kind in NEW_EFFECTS for draft in self.drafts):
            raise Refused(f"Saga {run.name} is {saga.phase}; no new step may start in it.", code="saga_not_running")
        return self.drafts


def _taken(run: Run) -> Fenced:
    return Fenced(
        f"Saga {run.name} was taken over by another process.", next=f"Run `amends show {quote(run.name)} --why`."
    )


def _chain_of_openings(run: Run | None, state: State) -> list[Draft]:
    """The openings that are not in the log yet, the outermost saga's first."""
    drafts: list[Draft] = []
    while run is not None and run.id not in state.sagas:
        if run.opening is None or run.over:
            raise Fenced(f"Saga {run.name} is no longer open.", next="See `amends show`.", code="saga_ended")
        if run.looked and run.engine.log.size != run.looked and state.past(run.id, derived=True) is not None:
            run.over = True
            raise Fenced(f"Another run of saga {run.name} was faster.", next="Run it again.", code="saga_ended")
        drafts.insert(0, run.opening)
        run = run.parent
    return drafts


class Early:
    """A reversible step whose intent nobody waits for: if its outcome comes first, one fact tells both.

    The intent is put together only if it is written after all; what it holds was encoded when it was handed in.
    """

    __slots__ = ("_decide", "_intent", "_run", "_sealed", "_lock")

    def __init__(self, run: Run, intent: Callable[[], Draft]) -> None:
        self._run, self._intent = run, intent
        self._decide: Decide | None = None
        self._sealed = False
        self._lock = threading.Lock()

    def __call__(self, state: State, now: Now) -> Sequence[Draft]:
        with self._lock:
            self._sealed = True
            if self._decide is None:
                self._decide = self._run.facts(self._intent())
        return self._decide(state, now)

    def replace(self, outcome: Draft) -> bool:
        """Put the outcome in the intent's place; False if the intent is on its way already."""
        with self._lock:
            if self._sealed:
                return False
            self._decide = self._run.facts(outcome)
            return True

    @property
    def written(self) -> bool:
        """Whether the intent is on its way: then its outcome is a fact of its own."""
        return self._sealed


# ---- one step -------------------------------------------------------------------------------------------------------


async def execute(drive: Drive, run: Run, call: Call) -> Any:
    """Perform one step of a saga and return its result. Raises what the tool raised, Refused, Fenced, BadValue."""
    if run.broken is not None:
        raise run.broken
    ready, result = await _serve(drive, run, call)
    if ready:
        return result
    call.number = call.number or run.number()
    inverse = await _declare(drive, run, call) if call.undo is not None else NONE
    question = _question(run, call)
    early = await _intend(drive, run, call, inverse, question)
    run.flying[run.id, call.number] = current_task()
    try:
        if call.approved and _changed(call):  # by another thread, since the answer was spent
            outcome = Outcome("failed", None, _other_arguments(call))
        else:
            outcome = await perform(drive, call, _noter(drive, run, call, question))
    except BaseException as stop:
        _abandon(run, call, stop)
        raise
    finally:
        run.flying.pop((run.id, call.number), None)
    return await _settle(drive, run, call, inverse, early, outcome)


async def mark(drive: Drive, run: Run, call: Call) -> None:
    """A step without a forward, for what is tentative: intent and outcome in one commit. Raises Refused, Fenced."""
    if run.broken is not None:
        raise run.broken
    inverse = await _declare(drive, run, call) if call.undo is not None else NONE
    if call.confirm is not None:
        keys = {"key": idempotency_key(run.id, call.tool, call.identity, "confirm")}
        call.confirmed = written(call.confirm, "declared", keys, run.engine.known)
    ready, _ = await _serve(drive, run, call)
    call.number = call.number or run.number()
    if inverse.live is not None:
        run.live[run.id, call.number] = inverse.live
    if call.confirm is not None:
        run.confirms[run.id, call.number] = call.confirm
    if not ready:
        done = fact("step.done", step=call.number)
        await admit(
            drive, run, call, _question(run, call), lambda: _intent(call, inverse), DURABLE, (done,),
            anew=lambda: _question(run, call),
        )  # fmt: skip


def _question(run: Run, call: Call) -> Question:
    """The call as the gate is asked about it, with what is wrong with the keyring where nothing may start then."""
    question = _ruled(run, call)
    if not SEMANTICS[call.sem].asks or not run.engine.state.keys.head:
        return question
    return question._replace(ring=keyring.check_ring(keyring.read(run.engine.log)))


def _ruled(run: Run, call: Call) -> Question:
    """What the policy says of a call; predicates and scorers of the user run here."""
    engine = run.engine
    if engine.policy.silent:
        return unruled(call.tool, call.sem, run.id, run.outermost.id, call.tags, call.locks, engine.meter)
    given = defaults(call.fn)  # what a call leaves out takes effect as well
    given.pop("idempotency_key", None)
    asked = GateCall(
        call.tool, call.sem, {**given, **call.kwargs}, frozenset(call.tags), run.name, engine.agent,
        engine.on_behalf_of, call.provenance,
    )  # fmt: skip
    question = engine.policy.prepare(
        asked, meter=engine.meter, saga=run.id, root=run.outermost.id, locks=call.locks,
    )  # fmt: skip
    # The tool that keeps failing is the primary: its alternative is not left alone with it.
    return question._replace(breaker=None) if call.scope == "fallback" else question


async def _declare(drive: Drive, run: Run, call: Call) -> Inverse:
    """The inverse that is known before the effect."""
    call.declared = await declared_by(drive, call.undo, call.kwargs, call.key)
    if call.declared is None:
        return NONE
    return written(call.declared, "declared", _keys(run, call), run.engine.known)


def _keys(run: Run, call: Call) -> dict[str, str]:
    scope = "" if call.scope == "do" else f"{call.scope}/"
    return {
        "key": idempotency_key(run.id, call.tool, call.identity, f"{scope}undo"),
        "late_key": idempotency_key(run.id, call.tool, call.identity, f"{scope}undo/late"),
    }


def _intent(call: Call, inverse: Inverse) -> Draft:
    settle = call.settle if call.settle is not None else call.timeout if call.timeout else DEFAULT_SETTLE
    return fact(
        "step.intended",
        body(
            args=call.args,
            compensation=inverse.payload,
            confirmation=call.confirmed.payload if call.confirmed else b"",
            identity=encode(call.identity),
            probe=_probe(call),
            provenance=_provenance(call),
        ),
        *call.apart,
        step=call.number,
        tool=call.tool,
        sem=call.sem.value,
        inv=inverse.inv,
        handler=inverse.handler,
        key=call.key,
        again=inverse.again,
        probe=int(call.probe is not None),
        scope="" if call.scope == "do" else call.scope,
        settle_ms=int(settle * 1000),
        **_tentative(call),
    )


def _tentative(call: Call) -> dict[str, Any]:
    """What the header says of a step that is tentative."""
    if not call.resource or call.confirmed is None:
        return {"resource": call.resource}
    made: Inverse = call.confirmed
    return {
        "resource": call.resource, "confirm": made.inv, "confirmer": made.handler, "confirm_again": made.again,
    }  # fmt: skip


def _probe(call: Call) -> bytes:
    """Where the probe of a step can be found after a crash; nothing for one that only this process has."""
    host = recorded_host(call.probe)[0] if call.probe is not None else None
    return msgspec.json.encode(dict(sorted(host.items()))) if host else b""


def _provenance(call: Call) -> bytes:
    """Where the arguments came from, as far as the call says."""
    return encode({"tags": dict(call.provenance), "notes": dict(call.notes)}) if call.provenance else b""


async def _intend(drive: Drive, run: Run, call: Call, inverse: Inverse, question: Question) -> Early | None:
    """Announce the effect, as safely as its semantics ask. None if the intent is written."""
    if inverse.live is not None:
        run.live[run.id, call.number] = inverse.live
    if call.probe is not None:
        run.probes[run.id, call.number] = (call.probe, call.kwargs, call.key)
        run.refine[run.id, call.number] = lambda drive, result: _found(drive, run, call, result)
    log = run.engine.log
    saga = run.saga(run.engine.state)
    repeated = saga is not None and call.number in saga.steps  # after a resume: no single fact tells both then
    if SEMANTICS[call.sem].durable or inverse.handler or repeated or question.metered:
        sync = DURABLE if SEMANTICS[call.sem].durable else FILED
        try:
            intent, anew = (lambda: _intent(call, inverse)), (lambda: _question(run, call))
            await admit(drive, run, call, question, intent, sync, anew=anew)
        except asyncio.CancelledError:
            # The intent may be written, the effect was not started: that is known.
            log.append(_if_step(run, call.number, INTENDED, fact("step.failed", step=call.number, why="not_started")))
            raise
        return None
    _may_start(run)
    await at_once(drive, run, call, question)
    early = Early(run, lambda: _intent(call, inverse))
    log.append(early)
    return early


def _may_start(run: Run) -> None:
    """What the decision will ask when it is written, asked before the effect of a step that does not wait for it."""
    saga = run.saga(run.engine.state)
    if saga is None and run.gone:
        raise Fenced(f"Saga {run.name} is no longer open.", next="See `amends show`.", code="saga_ended")
    if saga is not None and (saga.fence != run.fence or saga.driver != run.engine.driver):
        raise _taken(run)
    if saga is not None and saga.phase != RUNNING:
        raise Refused(f"Saga {run.name} is {saga.phase}; no new step may start in it.", code="saga_not_running")


def _if_step(run: Run, number: int, state: str, draft: Draft) -> Decide:
    """A fact about a step, only where the step is in that state."""
    guarded = run.facts(draft)

    def decide(view: State, now: Now) -> Sequence[Draft]:
        saga = view.sagas.get(run.id)
        step = saga.steps.get(number) if saga else None
        return guarded(view, now) if step is not None and step.state == state else ()

    return decide


def _noter(drive: Drive, run: Run, call: Call, question: Question) -> Callable[[int, BaseException | None], Any]:
    put_in = _put_in(run, call) if call.retry.max_retries else {}

    async def note(number: int, error: BaseException | None) -> Refused | None:
        if _changed(call) or _put_in(run, call) != put_in:
            return _other_arguments(call)
        told = body(error=encode(_told(error, run)))
        draft = fact("step.attempted", told, step=call.number, attempt=number, why=_code(error))
        return await attempt(drive, run, question, draft, DURABLE if SEMANTICS[call.sem].durable else BUFFERED)

    return note


def _changed(call: Call) -> bool:
    """Whether the live arguments are not those that were recorded any more: a tool may have worked on what it got."""
    if call.reread is None:
        return False
    recorded = call.args, call.all_args, call.apart
    try:
        call.reread()
        return call.all_args != recorded[1]
    except BadValue:
        return True
    finally:
        call.args, call.all_args, call.apart = recorded


def _put_in(run: Run, call: Call) -> dict[str, bytes]:
    """What the tool adds to the call, as far as it can be told apart."""

    def stored(value: Any) -> bytes:
        try:
            return encode(value, secret=call.secret, fingerprint=run.engine.fingerprint)
        except BadValue:
            return b""

    try:
        given = defaults(call.fn)
    except BadValue:
        return {}
    return {name: stored(value) for name, value in given.items() if name not in call.kwargs}


def _other_arguments(call: Call) -> Refused:
    return Refused(
        f"The arguments of {call.tool} are not those that were recorded any more, and are not sent.",
        next="Let the tool leave what it is given as it is, or work on a copy.",
        code="arguments_changed",
    )


def _told(error: BaseException | None, run: Run) -> str:
    """An error for people, without the secrets that were passed in."""
    if error is None:
        return ""
    return fitting(run.hush(f"{type(error).__name__}: {error}"))


def _code(error: BaseException | None) -> str:
    if isinstance(error, Refused):
        return error.code
    name = type(error).__name__ if error else ""
    return name if name.isascii() and name.isprintable() and len(name) <= 100 else "error"


def _abandon(run: Run, call: Call, stop: BaseException) -> None:
    """We are told to stop in the middle of an effect: nobody knows, and the rollback will settle it."""
    lost = fact("step.lost", body(error=encode(_told(stop, run))), step=call.number, why=_code(stop), up=True)
    run.engine.log.append(_if_step(run, call.number, INTENDED, lost))
    running: Future[Any] | None = getattr(stop, "amends_running", None)
    if running is not None:
        _watch(run, call, running)


async def _settle(drive: Drive, run: Run, call: Call, inverse: Inverse, early: Early | None, outcome: Outcome) -> Any:
    if _given_up(run, call):
        raise _land(run, call, outcome)
    try:
        if outcome.state == "done":
            return await _done(drive, run, call, inverse, early, outcome)
        await _write(drive, run, call, early, outcome, _not_done(run, call, outcome))
    finally:
        if outcome.running is not None:  # only now: before its fact is written, a late landing has nothing to follow
            _watch(run, call, outcome.running)
    assert outcome.error is not None
    if call.fallback is not None and isinstance(outcome.error, Exception):
        if _changed(call):
            raise _other_arguments(call) from outcome.error
        return await _fall_back(drive, run, call)
    raise outcome.error


def _given_up(run: Run, call: Call) -> bool:
    """Whether the unwinding went on without this step: its outcome is a late landing then."""
    saga = run.saga(run.engine.state)
    if saga is None:
        return run.gone
    step = saga.steps.get(call.number)
    return saga.fence != run.fence or (step is not None and step.state != INTENDED)


def _land(run: Run, call: Call, outcome: Outcome) -> Refused:
    """See to an outcome that comes after its saga was given up; what its caller is told."""
    if outcome.running is not None:
        _watch(run, call, outcome.running)
    else:
        ended: Future[Any] = Future()
        if outcome.error is None:
            ended.set_result(outcome.result)
        else:
            ended.set_exception(outcome.error)
        _watch(run, call, ended)
    saga = run.saga(run.engine.state)
    if saga is not None and saga.fence != run.fence:
        return _taken(run)
    return Refused(
        f"{call.tool} came to its end after saga {run.name} was given up; what it did is undone.",
        next=f"See `amends show {quote(run.name)}`.",
        code="saga_not_running",
    )


def _not_done(run: Run, call: Call, outcome: Outcome) -> Draft:
    kind = "step.failed" if outcome.state == "failed" else "step.lost"
    return fact(
        kind,
        body(error=encode(_told(outcome.error, run))),
        step=call.number,
        out=outcome.probed,
        why=_code(outcome.error),
        up=True,  # what waits out a lost effect, or a failing tool, begins here
    )


async def _fall_back(drive: Drive, run: Run, call: Call) -> Any:
    """The recorded alternative: a step of its own, with its own inverse. The primary stays to be settled."""
    fallback = call.fallback
    fn = getattr(fallback, "fn", fallback)
    declared = declared_options(fn)
    other = Call(
        call.tool, call.sem, declared.pop("fn", fn), call.kwargs, call.args, call.all_args, call.apart, call.named,
        call.identity, scope="fallback", timeout=call.timeout, settle=call.settle, returns=call.returns,
        store_result=call.store_result,
        undo=getattr(fallback, "undo", declared.get("undo")),
        compensate=getattr(fallback, "compensate", declared.get("compensate")),
    )  # fmt: skip
    other.repeated = call.repeated
    other.tags, other.locks, other.lock_timeout = call.tags, call.locks, call.lock_timeout
    other.provenance = call.provenance
    other.secret = (*call.secret, *declared.get("secret", ()), *secret_names(other.fn))  # people see its defaults
    other.reread = lambda: _reread(call, other)
    other.key = idempotency_key(run.id, call.tool, call.identity, "fallback")
    return await execute(drive, run, other)


def _reread(call: Call, other: Call) -> None:
    """An alternative has the arguments of its primary, also as the caller changes them while people think."""
    if call.reread is not None:
        call.reread()
    other.args, other.all_args, other.apart = call.args, call.all_args, call.apart


async def _done(drive: Drive, run: Run, call: Call, inverse: Inverse, early: Early | None, outcome: Outcome) -> Any:
    flaw: AmendsError | None = None
    result, shown = outcome.result, b""
    try:
        if call.store_result:
            shown = encode(result, path="result")
    except BadValue as error:
        flaw = UnstorableResult(
            f"{call.tool} happened, but its result cannot be stored: {error.message}",
            next="Return plain values, or pass store_result=False.",
            result=result,
        )
    derived = inverse
    try:
        derived = await _derive(drive, run, call, inverse, outcome)
    except AmendsError as error:
        flaw = error
    if derived.live is not None:
        run.live[run.id, call.number] = derived.live
    if early is not None and not early.written and early.replace(_at_once(call, derived, shown, flaw, outcome)):
        if derived.handler:
            await drive.commit(run.engine.log, lambda state, now: (), FILED)
    else:
        draft = _outcome(call, inverse, derived, shown, flaw, outcome)
        await _write(drive, run, call, early, outcome, draft, recoverable=bool(derived.handler))
    if flaw is not None:
        raise flaw from flaw.__cause__
    return result


async def _derive(drive: Drive, run: Run, call: Call, inverse: Inverse, outcome: Outcome) -> Inverse:
    if call.compensate is None:
        return inverse
    if outcome.result is None and outcome.probed and not takes_nothing(call.compensate):
        return inverse  # the world says it is there and not what it returned: the declared one stands
    made = await derived_by(drive, call.compensate, outcome.result)
    if made is None:
        return inverse
    inv = "both" if inverse.inv == "declared" else "derived"
    try:
        return written(made, inv, _keys(run, call), run.engine.known)
    except BadValue as error:
        raise NoInverse(
            f"{call.tool} happened, but its compensation cannot be stored: {error.message}",
            next="The effect stands; see `amends inbox`.",
        ) from error


def _outcome(
    call: Call, declared: Inverse, derived: Inverse, shown: bytes, flaw: AmendsError | None, outcome: Outcome
) -> Draft:
    changed = derived is not declared
    return fact(
        "step.done",
        body(
            result=shown,
            error=encode(str(flaw)) if flaw else b"",
            compensation=derived.payload if changed else b"",
        ),
        step=call.number,
        inv=derived.inv if changed else "",
        handler=derived.handler if changed else "",
        again=derived.again if changed else "",
        out=outcome.probed,
        why=flaw.code if flaw else "",
    )


async def _write(
    drive: Drive, run: Run, call: Call, early: Early | None, outcome: Outcome, draft: Draft, recoverable: bool = False
) -> None:
    """Record an outcome as safely as its semantics ask."""
    log = run.engine.log
    meaning = SEMANTICS[call.sem]
    if early is not None:
        sync = FILED if recoverable else BUFFERED
    elif meaning.durable:
        sync = BUFFERED if run.merged and meaning.merge and draft.kind == "step.done" else DURABLE
    else:
        sync = FILED
    if sync == BUFFERED:
        log.append(run.facts(draft))
    elif not await drive.commit(log, _if_step(run, call.number, INTENDED, draft), sync):
        raise _land(run, call, outcome)


def _at_once(call: Call, inverse: Inverse, shown: bytes, flaw: AmendsError | None, outcome: Outcome) -> Draft:
    """Intent and outcome of a reversible step as one `step.done`."""
    inv, handler, again, payload, _ = inverse if inverse is not NONE else ("", "", "", b"", None)
    return fact(
        "step.done",
        body(
            args=call.args,
            compensation=payload,
            error=encode(str(flaw)) if flaw else b"",
            identity=encode(call.identity),
            probe=_probe(call),
            provenance=_provenance(call),
            result=shown,
        ),
        *call.apart,
        step=call.number,
        tool=call.tool,
        sem=call.sem.value,
        inv=inv,
        handler=handler,
        key=call.key,
        again=again,
        out=outcome.probed,
        probe=int(call.probe is not None),
        scope="" if call.scope == "do" else call.scope,
        why=flaw.code if flaw else "",
    )


# ---- serving a resumed saga ------------------------------------------------------------------------------------------


async def _serve(drive: Drive, run: Run, call: Call) -> tuple[bool, Any]:
    """A finished step of a resumed saga, from the log. (False, None) if the step has to be performed."""
    if call.repeated and (call.tool, call.scope, call.identity) not in run.served:
        _serve_again(run, call)
    known = run.served.pop((call.tool, call.scope, call.identity), None)
    if known is None:
        if run.served and not call.named:
            await _differs(drive, run, call)
        if run.finished:
            raise Refused(
                f"Saga {run.name} is finished; {call.tool} is not one of its steps.",
                next="Use another id, or restart=NAME.",
                code="saga_finished",
            )
        return False, None
    number, args, result = known
    if digest(args) != digest(call.all_args):
        return await _conflict(drive, run, call, args)
    call.number = number
    saga = run.saga(run.engine.state)
    if run.finished:
        return True, _returned(call, result)
    step = saga.steps[number] if saga else None
    if step is None or step.state == DONE:
        return True, _returned(call, result)
    if step.state == INTENDED:
        raise Refused(f"{call.tool} with key={call.identity!r} is in the air.", next="Wait for it.", code="in_the_air")
    if call.fallback is not None and (call.tool, "fallback", call.identity) in run.served:
        return True, await _fall_back(drive, run, call)
    if step.state == UNKNOWN:
        return await _unknown_again(drive, run, call)
    if step.state in (FAILED, REFUSED):
        call.number = 0 if step.state == REFUSED else number
    return False, None


def _serve_again(run: Run, call: Call) -> None:
    """A key that was used before in this very run: the step it named is served from the log."""
    run.engine.log.flush()
    saga = run.saga(run.engine.state)
    name = (call.tool, call.scope, call.identity)
    if saga is not None:
        found = served_steps(run.engine.log, run.id).get(name)
        if found is not None:
            run.served[name] = found


SIBLINGS = 5
"""Turns of the event loop that siblings of a resumed step get to come forward; then a new step is other code."""


async def _differs(drive: Drive, run: Run, call: Call) -> None:
    """A new step while steps of the log have not been asked for: other code, unless siblings are about to ask."""
    for _ in range(SIBLINGS):
        await drive.sleep(0)
        if not unserved(run):
            return
    tool, _, identity = unserved(run)[0]
    await suspend(
        drive,
        run,
        ResumeConflict(
            f"Saga {run.name}: the log has step {tool} {identity} where this run calls {call.tool} {call.identity}.",
            next="Run it with the code it began with, or pass key= to name steps that run side by side.",
            old=tool,
            new=call.tool,
        ),
    )


def unserved(run: Run) -> list[tuple[str, str, str]]:
    """Steps that took effect and that this run has not asked for."""
    saga = run.saga(run.engine.state)
    return [
        name
        for name, (number, _, _) in run.served.items()
        if run.finished or (saga is not None and saga.steps[number].state in (DONE, UNKNOWN))
    ]


async def suspend(drive: Drive, run: Run, conflict: ResumeConflict) -> None:
    """Let go of a saga, and of those it is inside of, until a run fits. Raises the conflict."""
    whole = [run]
    while whole[-1].parent is not None:
        whole.append(whole[-1].parent)
    for each in whole:
        each.broken = conflict
    root = whole[-1]

    def decide(state: State, now: Now) -> Sequence[Draft]:
        found = state.sagas.get(root.id)
        if found is None or found.fence != root.fence:
            return ()
        return [
            fact("saga.suspended", saga=m.id, fence=m.fence, why="resume_conflict")
            for m in state.family(found)
            if m.phase == RUNNING
        ]

    if not run.finished:
        await drive.commit(run.engine.log, decide)
    raise conflict


async def _unknown_again(drive: Drive, run: Run, call: Call) -> tuple[bool, Any]:
    """A step whose caller died: ask the world, or go again under the same key if the tool takes one."""
    if call.probe is not None:
        said = await ask(drive, call.probe, call.kwargs, call.key)
        saga = run.saga(run.engine.state)
        left = may_land_for(saga.steps[call.number], run.engine.log.now().lived) if saga else 0
        if left and said.amends_outcome == "absent":  # it may still be on its way
            await drive.sleep(left / 1000)
            said = await ask(drive, call.probe, call.kwargs, call.key)
        present = said.amends_outcome == "present"
        inverse = await _found(drive, run, call, said.result) if present else NONE
        refined = inverse is not NONE
        draft = fact(
            "step.probed",
            body(
                result=encode(said.result, path="result") if said.result is not None else b"",
                compensation=inverse.payload,
            ),
            step=call.number,
            out=said.amends_outcome,
            inv=inverse.inv if refined else "",
            handler=inverse.handler,
            again=inverse.again,
        )
        await drive.commit(run.engine.log, run.facts(draft))
        if present:
            return True, said.result
        if said.amends_outcome == "absent":
            return False, None
    if call.keyed:
        return False, None
    raise Refused(
        f"Nobody knows whether {call.tool} happened before the crash, and it takes no idempotency_key.",
        next=f"See `amends inbox`, or declare probe= for {call.tool}.",
        code="unsettled_step",
    )


async def _found(drive: Drive, run: Run, call: Call, result: Any) -> Inverse:
    """What undoes an effect that the world says is there, as far as the call says; NONE leaves what was declared."""
    declared = await _declare(drive, run, call) if call.undo is not None else NONE
    if declared.live is not None:
        run.live[run.id, call.number] = declared.live
    derived = await _derive(drive, run, call, declared, Outcome("done", result, probed="present"))
    if derived is declared:
        return NONE
    if derived.live is not None:
        run.live[run.id, call.number] = derived.live
    return derived


async def _conflict(drive: Drive, run: Run, call: Call, args: bytes) -> tuple[bool, Any]:
    await suspend(
        drive,
        run,
        ResumeConflict(
            f"Saga {run.name}: step {call.tool} {call.identity} was called with other arguments than before "
            f"({digest(args)[:12]} in the log, {digest(call.all_args)[:12]} now).",
            next="Run it with the code and arguments it began with, or pass key= to name steps.",
            old=digest(args),
            new=digest(call.all_args),
        ),
    )
    return False, None


def _returned(call: Call, result: bytes | None) -> Any:
    value = decode_bytes(result) if result else None
    return convert(value, call.returns) if call.returns is not None and value is not None else value


# ---- what lands late -------------------------------------------------------------------------------------------------


def _watch(run: Run, call: Call, running: Future[Any]) -> None:
    """When an effect that nobody waits for ends after all, record how, and undo it if its saga is unwound."""
    running.add_done_callback(
        lambda done: SHARED.submit(contextvars.Context(), lambda: _landed(run, call, done)) and None
    )


def _landed(run: Run, call: Call, ended: Future[Any]) -> None:
    """On a pool thread, where nobody waits: what goes wrong is said."""
    try:
        landed(run, call, ended)
    except Exception as error:
        sys.stderr.write(f"amends: {call.tool} of saga {run.name} landed late, and that is not settled: {error}\n")


def landed(run: Run, call: Call, ended: Future[Any]) -> None:
    """Record the true outcome of a late effect, then see to it."""
    error = None if ended.cancelled() else ended.exception()
    if ended.cancelled() or (error is not None and says_nothing(error)):
        return
    draft = _landing(run, call, None if error else ended.result(), error)
    written_now: list[Entry] = run.engine.log.commit(_if_unsettled(run, call.number, draft))
    if run.engine.after_landing is not None:
        run.engine.after_landing(run, call, None if written_now else draft)


def _landing(run: Run, call: Call, result: Any, error: BaseException | None) -> Draft:
    if error is not None:
        return fact("step.landed", body(error=encode(_told(error, run))), step=call.number, out="failed")
    inverse, shown, flaw = NONE, b"", ""
    try:
        shown = encode(result, path="result") if call.store_result else b""
        made = _run_derive(run, call, result)
        inverse = made or NONE
    except AmendsError as problem:
        flaw = str(problem)
    return fact(
        "step.landed",
        body(result=shown, error=encode(flaw) if flaw else b"", compensation=inverse.payload),
        step=call.number,
        out="done",
        inv=inverse.inv if inverse is not NONE else "",
        handler=inverse.handler,
        again=inverse.again,
    )


def _run_derive(run_: Run, call: Call, result: Any) -> Inverse | None:
    if call.compensate is None:
        return None
    made = run(derived_by(BLOCKING, call.compensate, result))
    if made is None:
        return None
    run_.live[run_.id, call.number] = made
    return written(made, "both" if call.declared else "derived", _keys(run_, call), run_.engine.known)


def _if_unsettled(run_: Run, number: int, draft: Draft) -> Decide:
    """A landing is told without a fence: whoever holds the saga now needs to know."""
    draft.fields["saga"] = run_.id

    def decide(state: State, now: Now) -> Sequence[Draft]:
        saga = state.sagas.get(run_.id)
        step = saga.steps.get(number) if saga else None
        if step is None or step.state in (INTENDED, DONE, REFUSED):
            return ()
        return (draft,)

    return decide
