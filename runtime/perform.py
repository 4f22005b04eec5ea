"""One effect: attempts, deadlines, verification and the question to the world. Returns an outcome, never raises.

A timeout is *lost*, not failed: the effect may have happened, or may yet. So are errors that say nothing about the
other side (a reset connection, a server's 5xx). Any other exception of a tool says that it did not happen; a tool
for which that is not true declares a `probe`, which is then asked after every error.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .current import outside
from .drive import Drive
from .semantics import ActionSemantics
from .tools import CANNOT_TELL, ONCE, Answer, RetryPolicy, names, takes_key


@dataclass(slots=True)
class Call:
    """A prepared call of a tool: what is done, under which key, and everything its author declared about it.

    args are encoded without secrets (all_args with what `apart` keeps in openings of its own); kwargs are the live
    objects. named: the caller chose the identity; repeated: and did before. Seconds throughout; settle is None for
    the default. locks: names that its saga claims; provenance: argument -> where its value came from (notes: how).
    reread() encodes the live arguments anew; secret: the names of those that are stored as fingerprints.
    resource: what is tentative by it, as it stands in headers; confirm: what confirms it, confirmed: the same, written.
    """

    tool: str
    sem: ActionSemantics
    fn: Callable[..., Any]
    kwargs: dict[str, Any]
    args: bytes = b""
    all_args: bytes = b""
    apart: tuple[bytes, ...] = ()
    named: bool = False
    identity: str = ""
    key: str = ""
    number: int = 0
    scope: str = "do"
    timeout: float | None = None
    settle: float | None = None
    retry: RetryPolicy = ONCE
    verify: Callable[..., Any] | None = None
    probe: Callable[..., Any] | None = None
    compensate: Any = None
    undo: Any = None
    fallback: Any = None
    returns: Any = None
    store_result: bool = True
    declared: Any = None
    repeated: bool = False
    approved: bool = False
    reread: Callable[[], None] | None = None
    secret: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()
    lock_timeout: float | None = None
    resource: str = ""
    confirm: Any = None
    confirmed: Any = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    keyed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.keyed = takes_key(self.fn)

    def offered(self) -> dict[str, Any]:
        """The live arguments, with the idempotency key for a forward that names it and was not given one."""
        if self.keyed and "idempotency_key" not in self.kwargs:
            return {**self.kwargs, "idempotency_key": self.key}
        return self.kwargs


class Outcome(NamedTuple):
    """state: done, failed or lost. running: a late effect, still going. probed: what the world said, if asked."""

    state: str
    result: Any = None
    error: BaseException | None = None
    running: Future[Any] | None = None
    probed: str = ""
    attempts: int = 1


Note = Callable[[int, BaseException | None], Awaitable[Exception | None]]


async def perform(drive: Drive, call: Call, note: Note) -> Outcome:
    """Run the forward, at most as often as its RetryPolicy says. `note(attempt, error)` records the next attempt, or
    hands back why there may be none."""
    unsure = False
    attempt = 1
    while True:
        ran = await drive.call(call.fn, call.offered(), call.timeout)
        error = ran.error
        if error is None and call.verify is not None:
            error = await _unconfirmed(drive, call, ran.result)
            unsure = unsure or error is not None
        if error is None:
            return Outcome("done", ran.result, attempts=attempt)
        unsure = unsure or ran.running is not None or says_nothing(error)
        # An effect that may still be going is tried again only if the other side can tell it is the same one.
        # And what a person said yes to is sent twice only if the other side can tell.
        doubtful = ran.running is not None or (call.approved and unsure)
        again = call.retry.wants(error) and (call.keyed or not doubtful)
        if attempt > call.retry.max_retries or not again:
            break
        await drive.sleep(call.retry.delay(attempt, random.random()))
        refusal = await note(attempt + 1, error)
        if refusal is not None:
            refusal.__cause__, error = error, refusal
            break
        attempt += 1
    if call.probe is not None:
        return await _settle(drive, call, error, ran.running, attempt, unsure)
    return Outcome("lost" if unsure else "failed", None, error, ran.running, attempts=attempt)


async def _settle(
    drive: Drive, call: Call, error: BaseException, running: Future[Any] | None, attempts: int, unsure: bool
) -> Outcome:
    """Ask the world. That it is absent is the last word only where nothing can be on its way any more."""
    said = await ask(drive, call.probe, call.kwargs, call.key)
    if said.amends_outcome == "present":
        return Outcome("done", said.result, None, running, "present", attempts)
    if said.amends_outcome == "absent" and not unsure:
        return Outcome("failed", None, error, None, "absent", attempts)
    return Outcome("lost", None, error, running, said.amends_outcome, attempts)


PROBE_TIMEOUT = 10.0


async def ask(drive: Drive, probe: Any, kwargs: Mapping[str, Any], key: str) -> Answer:
    """What the world says: PRESENT, ABSENT or CANNOT_TELL. An error, a timeout or another answer is CANNOT_TELL."""
    given = {**kwargs, "idempotency_key": key} if takes_key(probe) and "idempotency_key" not in kwargs else dict(kwargs)
    with outside():
        ran = await drive.call(probe, given, PROBE_TIMEOUT, urgent=True)
    if ran.error is not None:
        return CANNOT_TELL(f"{type(ran.error).__name__}: {ran.error}")
    if getattr(ran.result, "amends_outcome", "") not in ("present", "absent", "cannot_tell"):
        return CANNOT_TELL(f"the probe answered {type(ran.result).__name__}")
    answer: Answer = ran.result
    return answer


class Unconfirmed(Exception):
    """`verify` did not confirm the effect: the step is not done."""


async def _unconfirmed(drive: Drive, call: Call, result: Any) -> BaseException | None:
    assert call.verify is not None
    with outside():
        ran = await drive.call(call.verify, _as_argument(call.verify, result), PROBE_TIMEOUT)
    if ran.error is None and ran.result is True:
        return None
    why = f"verify raised {ran.error!r}" if ran.error else f"verify returned {ran.result!r}, not True"
    return Unconfirmed(f"{call.tool} is not confirmed: {why}")


def _as_argument(fn: Callable[..., Any], value: Any) -> dict[str, Any]:
    name = next(iter(names(fn)), "result")
    return {name: value}


_KNOWN_OS_ERRORS = (ConnectionRefusedError, FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError,
                    IsADirectoryError)  # fmt: skip
_UNSURE_NAMES = ("timeout", "connectionerror", "remoteprotocolerror", "readerror", "writeerror", "networkerror",
                 "incompleteread", "disconnected")  # fmt: skip


def says_nothing(error: BaseException) -> bool:
    """Whether an error leaves open if the effect happened.

    Timeouts, broken connections and 5xx or 408 answers do; a refused connection and a 4xx answer do not. Classes of
    HTTP libraries that are not imported here are told by their names.
    """
    if isinstance(error, (Unconfirmed, TimeoutError, EOFError)) or not isinstance(error, Exception):
        return True
    status = _status(error)
    if status is not None:
        return status >= 500 or status == 408
    inner = getattr(error, "reason", None)  # urllib wraps the OSError it met
    if isinstance(inner, OSError):
        return says_nothing(inner)
    if isinstance(error, _KNOWN_OS_ERRORS):
        return False
    names = " ".join(kind.__name__ for kind in type(error).__mro__).lower()
    if "connecterror" in names or "connecttimeout" in names:
        return False
    return isinstance(error, OSError) or any(name in names for name in _UNSURE_NAMES)


def _status(error: BaseException) -> int | None:
    for value in (
        getattr(error, "code", None),
        getattr(error, "status", None),
        getattr(getattr(error, "response", None), "status_code", None),
    ):
        if type(value) is int and 100 <= value < 600:
            return value
    return None
