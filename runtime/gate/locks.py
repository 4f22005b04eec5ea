"""Semantic locks: a saga claims a name, and until it is over no other saga works under that name.

Claimed in the commit that announces the step which needs it, and freed by fact: when the saga ends, or when its owner
lets go. A dead owner's lock stays with its saga until that is unwound, an escalated saga keeps it until it is settled,
and no timer ever frees one. A nested saga's lock belongs to the outermost saga, whose fate it shares. Two sagas that
wait for each other end by their own timeouts: whoever runs out of time is refused and unwinds. Whoever begins to wait
says so by a fact, so that a person who keeps a lock waiting sees for whom. In the log a name is its HMAC (core: names
may be personal).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ...store.clock import Now
from ...store.entry import Entry
from ...store.errors import BadValue, Illegal
from .question import Question, Refusal

if TYPE_CHECKING:
    from ..state import State


LOCK_HELD, LOCK_TIMEOUT = "lock_held", "lock_timeout"
"""Why a call is refused: it would not wait for a name, or it has waited as long as it would."""


class Held(msgspec.Struct, array_like=True, frozen=True):
    """A name that is claimed: by which outermost saga, since which record, and since when (microseconds)."""

    lock: str
    saga: str
    seq: int
    at: int


class Wait(msgspec.Struct, array_like=True, frozen=True):
    """A saga that waits for a name, since when (microseconds)."""

    lock: str
    saga: str
    at: int


class Locks:
    """The names that are claimed, by their 16 hex digits, and who waits for one."""

    KINDS = (
        "lock.taken", "lock.freed", "lock.awaited", "step.refused", "saga.taken", "saga.released", "saga.ended",
    )  # fmt: skip

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.waits: list[Wait] = []
        self._of: dict[str, dict[str, None]] = {}  # the names of each saga, for what concerns one saga alone

    def check(self, entry: Entry, state: State) -> None:
        if entry.kind not in ("lock.taken", "lock.freed"):
            return
        held = self.held.get(entry.lock)
        if entry.kind == "lock.taken" and held is not None:
            raise Illegal(f"{entry.lock} is claimed already, by saga {held.saga}.")
        if entry.kind == "lock.freed" and (held is None or held.saga != entry.saga):
            raise Illegal(f"Only its owner frees {entry.lock}.")

    def fold(self, entry: Entry, lived: int, state: State) -> None:
        if entry.kind == "lock.taken":
            self.held[entry.lock] = Held(entry.lock, entry.saga, entry.seq, entry.at)
            self._of.setdefault(entry.saga, {})[entry.lock] = None
        elif entry.kind == "lock.freed":
            del self.held[entry.lock]
            del self._of[entry.saga][entry.lock]
        elif entry.kind == "lock.awaited":
            self.waits.append(Wait(entry.lock, entry.saga, entry.at))
        elif entry.kind == "saga.ended":
            for name in self._of.pop(entry.saga, ()):
                del self.held[name]
        if self.waits:
            self.waits = [wait for wait in self.waits if not _is_over(wait, entry, state)]

    def awaiting(self, lock: str) -> list[str]:
        """The sagas that wait for a name, those that have waited longest first."""
        return list(dict.fromkeys(wait.saga for wait in self.waits if wait.lock == lock))

    def of(self, saga: str) -> list[Held]:
        """What a saga holds."""
        return [self.held[name] for name in list(self._of.get(saga, ())) if name in self.held]

    def dump(self) -> Any:
        return list(self.held.values()), self.waits

    def load(self, raw: Any) -> None:
        held, self.waits = msgspec.convert(raw, tuple[list[Held], list[Wait]])
        self.held = {each.lock: each for each in held}
        self._of = {}
        for each in held:
            self._of.setdefault(each.saga, {})[each.lock] = None


def _is_over(wait: Wait, entry: Entry, state: State) -> bool:
    """Whether a fact ends a wait: its saga has the name now, was refused, or is not driven by whoever waited."""
    if entry.kind == "lock.taken":
        saga = state.sagas.get(wait.saga)
        return wait.lock == entry.lock and saga is not None and state.root(saga).id == entry.saga
    return wait.saga == entry.saga and entry.kind not in ("lock.awaited", "lock.freed")


def check_locks(state: State, question: Question, now: Now) -> Refusal | None:
    """Whether another saga holds a name that the call needs."""
    for lock in question.locks:
        held = state.locks.held.get(lock)
        if held is not None and held.saga != question.root:
            return Refusal(
                LOCK_HELD,
                f"Saga {held.saga} holds what {question.tool} needs.",
                "Wait until that saga is over; `amends inbox` says whether it waits for a person.",
                {"saga": held.saga, "record": held.seq, "lock": lock},
            )
    return None


def overdue(refusal: Refusal) -> Refusal:
    """The refusal of a call that has waited for a name as long as it would."""
    return refusal._replace(code=LOCK_TIMEOUT, said=f"{refusal.said[:-1]}, and did not let go of it in time.")


def wanted(state: State, question: Question) -> list[str]:
    """The names that the call needs and its saga does not hold yet."""
    return [lock for lock in question.locks if lock not in state.locks.held]


def lock_id(name: str, meter: Callable[[str], str]) -> str:
    """A name as it stands in headers, 16 hex digits."""
    return meter(f"lock\0{name}")


_PLACE = re.compile(r"\{([^{}]*)\}")


def names_of(locks: object, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The names that a call claims, sorted, so that two calls of one list never wait for each other. `{name}` in one
    stands for that argument. Raises BadValue."""
    if locks == ():
        return ()
    if isinstance(locks, str) or not isinstance(locks, Iterable):
        raise BadValue(f"locks={locks!r}: a list of names is asked.", next='Write locks=("order:{order_id}",).')
    return tuple(sorted({_filled(lock, kwargs) for lock in locks}))


def _filled(lock: object, kwargs: Mapping[str, Any]) -> str:
    if not isinstance(lock, str) or not lock:
        raise BadValue(f"{lock!r} is no name to claim.", next='Write locks=("order:{order_id}",).')

    def value(place: re.Match[str]) -> str:
        name = place[1]
        if type(kwargs.get(name)) not in (str, int):
            raise BadValue(
                f"The lock {lock!r} needs the argument {name!r} as text or a whole number.",
                next="Name an argument that the call has.",
                code="no_such_argument",
            )
        return str(kwargs[name])

    return _PLACE.sub(value, lock)
