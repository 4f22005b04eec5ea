"""The only planner: given a family whose fate is decided and the time, what must happen next.

Live rollback, crash recovery, the dry run and the human queue ask this one pure function. Order of an unwinding: what
nobody knows is settled first, youngest first; then what stands is undone in reverse order of completion. A step behind
an unsettled or failed one waits. A step that nothing can undo holds nobody up: there is no order to break by it. A
family that is to stand has its tentative steps confirmed in order of completion, each on its own. One that a person
has frozen is left as it is.
"""

from __future__ import annotations

from typing import NamedTuple

from ..store.clock import Now
from .saga import CONCLUDING, OVER, Saga, orphaned, pending, settled
from .step import (
    ACCEPTED,
    COMPENSATED,
    CONFIRM_LOST,
    CONFIRMING,
    DONE,
    INTENDED,
    STUCK,
    UNCONFIRMED,
    UNDO_LOST,
    UNDOING,
    UNKNOWN,
    WAITING,
    Step,
    may_land_for,
)


class Lost(NamedTuple):
    """Whoever performed it is gone: write that nobody knows (`undo.lost` or `confirm.lost` for a handler's answer)."""

    saga: Saga
    step: Step
    kind: str


class Withdraw(NamedTuple):
    """A question nobody waits for any more."""

    saga: Saga
    step: Step


class Probe(NamedTuple):
    """Ask the world whether the effect is there."""

    saga: Saga
    step: Step


class Undo(NamedTuple):
    """Run its compensation under `scope` (`undo`, or `undo/late` for one that landed after its first)."""

    saga: Saga
    step: Step
    scope: str


class Confirm(NamedTuple):
    """Run what confirms a tentative step."""

    saga: Saga
    step: Step


class Resolve(NamedTuple):
    """Nothing has to run for a tentative step: its fate is written down (`undo.done` or `confirm.done`)."""

    saga: Saga
    step: Step
    kind: str


class Wait(NamedTuple):
    """Nothing before this many lived milliseconds: a lost effect may still land."""

    until: int


class Escalate(NamedTuple):
    """A person has to look: `why` is one of REASONS (report.py)."""

    saga: Saga
    step: Step
    why: str


class Rest(NamedTuple):
    """Everything left needs a person, and has been said."""


class Frozen(NamedTuple):
    """A person has frozen it: nothing is done until that is lifted. why: `quarantined` or `halted`."""

    why: str


class End(NamedTuple):
    """Nothing is left: the family may end."""


Action = Lost | Withdraw | Probe | Undo | Confirm | Resolve | Wait | Escalate | Rest | Frozen | End


def due(family: list[Saga], now: Now, frozen: str = "") -> Action:
    """The next thing to do for a family whose fate is decided (family[0] is its root). frozen: why it is left as it is,
    if it is."""
    if frozen:
        return Frozen(frozen)
    if family[0].phase == CONCLUDING:
        return _to_confirm(family)
    return _to_undo(family, now)


def _to_undo(family: list[Saga], now: Now) -> Action:
    youngest = _youngest(family)  # nearly always the one; a saga of ten thousand steps is not sorted for each of them
    if youngest is not None and youngest[1].number not in youngest[0].escalated:
        action = _next(*youngest, now)
        if action is not None:
            return action
    halt = family[0].on_failure != "continue"
    waiting = False
    for saga, step in unwinding_order(family):
        if step.number in saga.escalated:
            waiting = True
            if halt and holds_up(step):
                return Rest()
            continue
        action = _next(saga, step, now)
        if action is not None:
            return action
    return Rest() if waiting else End()


def holds_up(step: Step) -> bool:
    """Whether what is older waits until a person has settled this step: an effect that was never to be undone by a
    handler holds up nothing."""
    return not orphaned(step) and step.inv != "human"


def unwinding_order(family: list[Saga]) -> list[tuple[Saga, Step]]:
    """Steps with something left to settle, youngest first: unknown ones by intent, before the others by completion."""
    left = [
        (saga, step) for saga in family for step in saga.steps.values() if not settled(step) and step.state != ACCEPTED
    ]
    return sorted(left, key=lambda pair: _age(pair[1]), reverse=True)


def _youngest(family: list[Saga]) -> tuple[Saga, Step] | None:
    """The first of `unwinding_order`; None if nothing is left."""
    found: tuple[Saga, Step] | None = None
    highest = (False, -1)
    for saga in family:
        for step in saga.steps.values():
            if (step.state in OVER and not step.late) or step.state == ACCEPTED:
                continue
            age = _age(step)
            if found is None or age > highest:
                found, highest = (saga, step), age
    return found


def _age(step: Step) -> tuple[bool, int]:
    unsettled = step.state in (INTENDED, UNKNOWN, WAITING) or (step.provisional and not step.ended_seq)
    return (unsettled, step.seq if unsettled else step.ended_seq)


def _next(saga: Saga, step: Step, now: Now) -> Action | None:
    return _NEXT[step.state](saga, step, now)


def _question(saga: Saga, step: Step, now: Now) -> Action:
    return Withdraw(saga, step)


def _intended(saga: Saga, step: Step, now: Now) -> Action:
    return Lost(saga, step, "step.lost")


def _undoing(saga: Saga, step: Step, now: Now) -> Action:
    return Lost(saga, step, "undo.lost")


def _unknown(saga: Saga, step: Step, now: Now) -> Action:
    if step.probe and not step.settled:
        return Probe(saga, step)
    if step.settled == "cannot_tell":
        return Escalate(saga, step, "cannot_tell")
    left = may_land_for(step, now.lived)
    if left:
        return Wait(now.lived + left)
    if step.inv in ("", "none"):
        return Escalate(saga, step, "unknown_without_inverse")
    return _done(saga, step, now)


def _done(saga: Saga, step: Step, now: Now) -> Action:
    if step.resource and step.inv in ("", "none"):
        return Resolve(saga, step, "undo.done")
    if step.inv in ("", "none"):
        return Escalate(saga, step, "irreversible" if step.sem == "irreversible" else "orphaned")
    if step.inv == "human":
        return Escalate(saga, step, "human_task")
    return Undo(saga, step, "undo/late" if step.late else "undo")


def _undo_lost(saga: Saga, step: Step, now: Now) -> Action:
    if step.again:
        return Undo(saga, step, "undo/late" if step.undo_attempts > 1 and step.late else "undo")
    if step.probe and not step.settled:
        return Probe(saga, step)
    if step.settled == "present":
        return Undo(saga, step, "undo")
    return Escalate(saga, step, "undo_answer_lost")


def _stuck(saga: Saga, step: Step, now: Now) -> Action:
    return Undo(saga, step, "undo")


def _compensated(saga: Saga, step: Step, now: Now) -> Action:
    return Undo(saga, step, "undo/late")


_NEXT = {
    WAITING: _question,
    INTENDED: _intended,
    UNKNOWN: _unknown,
    DONE: _done,
    UNDOING: _undoing,
    UNDO_LOST: _undo_lost,
    STUCK: _stuck,
    COMPENSATED: _compensated,
}


# ---- what stands, and what is tentative in it ------------------------------------------------------------------------


def _to_confirm(family: list[Saga]) -> Action:
    waiting = False
    oldest: tuple[Saga, Step] | None = None  # not sorted for it: it is asked once for each of them
    for saga in family:
        for step in saga.steps.values():
            if not pending(step):
                continue
            if step.number in saga.escalated:
                waiting = True
            elif oldest is None or step.ended_seq < oldest[1].ended_seq:
                oldest = (saga, step)
    if oldest is not None:
        return _CONFIRM[oldest[1].state](*oldest)
    return Rest() if waiting else End()


def _unconfirmed(saga: Saga, step: Step) -> Action:
    if not step.confirm:
        return Resolve(saga, step, "confirm.done")
    return Escalate(saga, step, "confirm_by_hand") if step.confirm == "human" else Confirm(saga, step)


def _confirming(saga: Saga, step: Step) -> Action:
    return Lost(saga, step, "confirm.lost")


def _confirm_lost(saga: Saga, step: Step) -> Action:
    if step.confirm_again or step.settled == "present":
        return Confirm(saga, step)
    return Escalate(saga, step, "confirm_answer_lost")


_CONFIRM = {
    DONE: _unconfirmed,
    CONFIRMING: _confirming,
    CONFIRM_LOST: _confirm_lost,
    UNCONFIRMED: _unconfirmed,
}
