"""The view of sagas: steps, owner and fence, family and fate, folded from their facts and from nothing else.

Open sagas live in the fold; ended ones are folded again from their own entries when somebody asks (`replay`).
A saga and the sagas inside it are a *family* with one fate: the root's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ..store.entry import Entry, unfinished
from ..store.errors import Illegal
from .step import (
    COMPENSATED,
    CONFIRM_LOST,
    CONFIRMED,
    CONFIRMING,
    DONE,
    FAILED,
    REFUSED,
    UNCONFIRMED,
    UNKNOWN,
    Step,
    advance,
    again,
)

RUNNING, SUSPENDED, UNWINDING, JOINED, ENDED = "running", "suspended", "unwinding", "joined", "ended"
CONCLUDING = "concluding"  # it is to stand: what is tentative in it is being confirmed


class Saga(msgspec.Struct, array_like=True):
    """One saga as folded. driver "" means that nobody drives it. escalated: step number (0 the saga) -> reason.

    opened_seq, opened_at (microseconds): its first fact. idle_lived: lived milliseconds of its last change of hands.
    """

    id: str
    opened_seq: int
    opened_at: int
    fence: int
    driver: str
    phase: str = RUNNING
    parent: str = ""
    of: str = ""
    on_crash: str = ""
    on_failure: str = ""
    within_ms: int = 0
    why: str = ""
    out: str = ""
    idle_lived: int = 0
    ended_at: int = 0
    steps: dict[int, Step] = {}
    escalated: dict[int, str] = {}


def opened(entry: Entry, lived: int) -> Saga:
    """The saga that its first fact opens."""
    return Saga(
        entry.saga, entry.seq, entry.at, entry.fence, entry.driver, RUNNING, entry.parent, entry.of,
        entry.on_crash, entry.on_failure, entry.within_ms, idle_lived=lived, steps={}, escalated={},
    )  # fmt: skip


def _taken(saga: Saga, entry: Entry, lived: int) -> None:
    if entry.fence != saga.fence + 1:
        raise Illegal(f"A takeover raises the fence by one: {saga.fence} to {entry.fence}.")
    saga.fence, saga.driver, saga.idle_lived = entry.fence, entry.driver, lived
    if entry.why == "resume":
        saga.phase = RUNNING
    if entry.why in ("retry", "resume", "undo"):
        for number in [entry.step] if entry.step else list(saga.escalated):
            saga.escalated.pop(number, None)
            if number in saga.steps:
                again(saga.steps[number])


def _released(saga: Saga, entry: Entry, lived: int) -> None:
    saga.driver, saga.idle_lived = "", lived


def _suspended(saga: Saga, entry: Entry, lived: int) -> None:
    _from(saga, entry, RUNNING)
    saga.phase, saga.driver, saga.idle_lived, saga.why = SUSPENDED, "", lived, entry.why


def _unwinding(saga: Saga, entry: Entry, lived: int) -> None:
    _from(saga, entry, RUNNING, SUSPENDED, JOINED, UNWINDING)
    if saga.phase != UNWINDING:
        saga.why = entry.why
    saga.phase = UNWINDING


def _concluding(saga: Saga, entry: Entry, lived: int) -> None:
    _from(saga, entry, RUNNING, JOINED)
    saga.phase = CONCLUDING


def _joined(saga: Saga, entry: Entry, lived: int) -> None:
    _from(saga, entry, RUNNING)
    if not saga.parent:
        raise Illegal("Only a saga inside another one joins.")
    saga.phase = JOINED


def _escalated(saga: Saga, entry: Entry, lived: int) -> None:
    if entry.step and entry.step not in saga.steps:
        raise Illegal(f"There is no step {entry.step} to escalate.")
    saga.escalated[entry.step] = entry.why


def _ended(saga: Saga, entry: Entry, lived: int) -> None:
    saga.phase, saga.out, saga.ended_at, saga.driver = ENDED, entry.out, entry.at, ""


def _from(saga: Saga, entry: Entry, *phases: str) -> None:
    if saga.phase not in phases:
        raise Illegal(f"{entry.kind} cannot follow {saga.phase}.")


HANDS: dict[str, Callable[[Saga, Entry, int], None]] = {
    "saga.taken": _taken,
    "saga.released": _released,
    "saga.suspended": _suspended,
    "saga.unwinding": _unwinding,
    "saga.concluding": _concluding,
    "saga.joined": _joined,
    "saga.escalated": _escalated,
    "saga.ended": _ended,
}

_EFFECTS = frozenset({"step.asked", "step.intended", "step.attempted", "saga.joined"})
"""What only a running saga may do."""

_DECIDED = ("undo.", "confirm.")
"""What follows from the fate of a saga: one that is to stand is confirmed and never undone, any other the reverse."""

_SETTLES = frozenset({"step.accepted", "step.probed", "step.landed", "undo.done"})
"""What takes a step off the list of those that need a person."""


def apply(saga: Saga, entry: Entry, lived: int) -> None:
    """Take one later fact into its saga; raises Illegal and changes nothing if the tables do not allow it."""
    if saga.phase == ENDED:
        raise Illegal("Nothing follows the end of a saga.")
    if unfinished(entry):
        return
    hand = HANDS.get(entry.kind)
    if entry.fence and entry.fence != saga.fence and entry.kind != "saga.taken":
        raise Illegal(f"A fact made under fence {entry.fence} meets fence {saga.fence}.")
    if hand:
        hand(saga, entry, lived)
    elif entry.step:
        if entry.kind in _EFFECTS and saga.phase != RUNNING:
            raise Illegal(f"No new effect in a saga that is {saga.phase}.")
        if entry.kind.startswith(_DECIDED) and (saga.phase == CONCLUDING) != entry.kind.startswith("confirm."):
            raise Illegal(f"{entry.kind} cannot follow in a saga that is {saga.phase}: its fate is another.")
        saga.steps[entry.step] = advance(saga.steps.get(entry.step), entry, lived)
        if entry.kind in _SETTLES:
            saga.escalated.pop(entry.step, None)


def replay(entries: Iterable[Entry]) -> Saga | None:
    """The saga that its own entries tell, ended ones included; None if there are none."""
    saga: Saga | None = None
    for entry in entries:
        if saga is None:
            saga = opened(entry, 0)
        else:
            apply(saga, entry, 0)
    return saga


def orphaned(step: Step) -> bool:
    """It happened (or may have), and nothing that is declared can undo it. A tentative one has no effect by itself."""
    return step.state in (DONE, UNKNOWN) and step.inv in ("", "none") and not step.resource


def pending(step: Step) -> bool:
    """Whether it is tentative and not yet resolved."""
    return bool(step.resource) and step.state in (DONE, CONFIRMING, CONFIRM_LOST, UNCONFIRMED)


OVER = frozenset({COMPENSATED, FAILED, REFUSED, CONFIRMED})
"""States in which a step leaves nothing to settle, unless it landed late."""


def settled(step: Step) -> bool:
    """Nothing of it is left to undo or to confirm, for all we know and can know."""
    return step.state in OVER and not step.late
