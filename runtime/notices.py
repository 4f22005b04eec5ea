"""Whoever is to be told is told once per device, however many processes watch the same queue.

Before a message leaves, a fact claims it (`notice.claimed`: this item, this channel, this level of escalation), decided
against the fold in the write transaction, so that two processes cannot both have it; what became of it is a second fact
(`notice.sent`). A claim whose process died lapses after the time it was given, and somebody else tries again; a failed
message is tried again a few times, later each time. After a crash in between a message may come twice: better than
never.

The view forgets an item when it is over: its saga ended, its step went on, its review was closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..store.chain import Decide, Draft
from ..store.clock import Now
from ..store.entry import Entry
from ..store.facts import COMPACTED
from .drift import DRIFT, OBSERVED
from .facts import body, fact
from .values import encode

if TYPE_CHECKING:
    from .state import State

ATTEMPTS = 5
"""How often one message is tried, over all processes."""
AGAIN_MS = (5_000, 20_000, 80_000, 320_000)
"""Lived milliseconds from one failure to the next attempt."""
CLAIMED, SENT, FAILED = "claimed", "sent", "failed"

_STEP_OVER = frozenset({
    "step.intended", "step.refused", "step.accepted", "step.probed", "step.landed", "undo.done", "confirm.done",
})  # fmt: skip
"""What takes a step off the list of those that need a person."""
_OPENS = frozenset({
    "step.asked", "approval.escalated", "vote.cast", "saga.escalated", "saga.suspended", "saga.released",
    "switch.set", "key.added", "key.quarantined", "key.recovered", "key.recovering", "key.revoked", "key.rotated",
    "key.vetoed",
})  # fmt: skip
"""What may put something before a person, or before other people than so far."""


class Address(NamedTuple):
    """Which message: about which item of the inbox, through which channel, at which level of escalation.

    of, step, ref: the saga, the step and the record that the item is about, by which the log knows when it is over.
    """

    item: str
    channel: str
    level: int = 0
    of: str = ""
    step: int = 0
    ref: int = 0


class Told(msgspec.Struct, array_like=True):
    """One message as far as it came. lived: milliseconds at its newest fact. within_ms: for how long a claim holds."""

    item: str
    channel: str
    level: int
    of: str
    step: int
    ref: int
    attempt: int
    out: str
    lived: int
    within_ms: int


def _same_step(told: Told, entry: Entry) -> bool:
    return told.of == entry.saga and told.step == entry.step


def _taken_up(told: Told, entry: Entry) -> bool:
    """A retry without a step is about all that was escalated; any other change of hands about the saga itself."""
    return _same_step(told, entry) or (told.of == entry.saga and not entry.step and entry.why in _AGAIN)


_IS_OVER: dict[str, Callable[[Told, Entry], bool]] = {
    "review.closed": lambda told, entry: not told.of and told.ref == entry.ref,
    "saga.ended": lambda told, entry: told.of == entry.saga,
    "saga.taken": _taken_up,
}
_AGAIN = frozenset({"retry", "resume", "undo"})


class Notices:
    """Messages about items that are not over. raised: for open requests, the levels of escalation that were told, each
    with the record that names its targets. `news` grows with every fact that may call for another look."""

    KINDS = tuple(sorted(
        {"notice.claimed", "notice.sent", "saga.ended", "saga.taken", "review.closed", OBSERVED, COMPACTED}
        | _STEP_OVER | _OPENS
    ))  # fmt: skip

    def __init__(self) -> None:
        self.told: dict[tuple[str, str, int], Told] = {}
        self.raised: dict[str, list[tuple[int, int]]] = {}  # request -> (level, record)
        # What is about each saga, or about none, so that a fact of one does not look at those of the others.
        self._of: dict[str, dict[tuple[str, str, int], None]] = {}
        self._asked: dict[str, list[str]] = {}
        self.news = 0

    def fold(self, entry: Entry, lived: int, state: State) -> None:
        if entry.kind in _OPENS:
            self.news += 1
            if entry.kind == "approval.escalated":
                self._raise(entry, state)
        elif entry.kind == "notice.claimed":
            self._claim(Told(
                entry.item, entry.channel, entry.level, entry.of, entry.step, entry.ref,
                entry.attempt, CLAIMED, lived, entry.within_ms,
            ))  # fmt: skip
        elif entry.kind == "notice.sent":
            self._outcome(entry, lived)
        elif entry.kind in (OBSERVED, COMPACTED):
            self.news += entry.out == DRIFT
            self._settled(state.drifts.closed)
        elif self.told or self.raised:
            self._forget(entry, state)

    def _raise(self, entry: Entry, state: State) -> None:
        if entry.request not in self.raised:
            self._asked.setdefault(state.approvals.requests[entry.request].saga, []).append(entry.request)
        self.raised.setdefault(entry.request, []).append((entry.level, entry.seq))

    def _claim(self, told: Told) -> None:
        key = (told.item, told.channel, told.level)
        if key in self.told:
            del self._of[self.told[key].of][key]
        self.told[key] = told
        self._of.setdefault(told.of, {})[key] = None

    def _outcome(self, entry: Entry, lived: int) -> None:
        """What became of a claim. A message that went out is told, also where its claim had lapsed."""
        told = self.told.get((entry.item, entry.channel, entry.level))
        if told is not None and (entry.out == SENT or (entry.attempt == told.attempt and told.out == CLAIMED)):
            told.out, told.lived = entry.out, lived

    def _forget(self, entry: Entry, state: State) -> None:
        over, about = _IS_OVER.get(entry.kind, _same_step), self._of.get(entry.saga, {})
        for key in [key for key in about if over(self.told[key], entry)]:
            del self.told[key], about[key]
        if not about:
            self._of.pop(entry.saga, None)
        asked = state.approvals.requests
        for request in self._asked.pop(entry.saga, ()):
            if request not in asked or asked[request].over:
                del self.raised[request]
            else:
                self._asked.setdefault(entry.saga, []).append(request)

    def _settled(self, places: Sequence[int]) -> None:
        """Drifts that are none any more: their messages are about no saga, as those of reviews."""
        about = self._of.get("", {})
        for key in [key for key in about if places and self.told[key].ref in places]:
            del self.told[key], about[key]
        if not about:
            self._of.pop("", None)

    def due_in(self, item: str, channel: str, level: int, now: Now) -> int | None:
        """Milliseconds until the message is to be tried: 0 now, None never (again)."""
        told = self.told.get((item, channel, level))
        if told is None:
            return 0
        if told.out == SENT or told.attempt >= ATTEMPTS:
            return None
        wait = told.within_ms if told.out == CLAIMED else AGAIN_MS[told.attempt - 1]
        return max(0, told.lived + wait - now.lived)

    def failing(self) -> list[Told]:
        """Messages whose last attempt failed."""
        return [told for told in list(self.told.values()) if told.out == FAILED]

    def dump(self) -> Any:
        raised = [(name, saga, self.raised[name]) for saga, names in self._asked.items() for name in names]
        return [[self.told[key] for key in sorted(self.told)], sorted(raised)]

    def load(self, raw: Any) -> None:
        told, raised = msgspec.convert(raw, tuple[list[Told], list[tuple[str, str, list[tuple[int, int]]]]])
        self.told, self.raised, self._of, self._asked = {}, {}, {}, {}
        for one in told:
            self._claim(one)
        for request, saga, levels in raised:
            self.raised[request] = levels
            self._asked.setdefault(saga, []).append(request)


class Claim:
    """The decision to send one message now. `attempt` is which it became, 0 if it is not ours to send."""

    def __init__(self, address: Address, within_ms: int, still: Callable[[State], bool]) -> None:
        self.address, self.within_ms, self._still = address, within_ms, still
        self.attempt = 0

    def __call__(self, state: State, now: Now) -> Sequence[Draft]:
        self.attempt = 0
        address, notices = self.address, state.notices
        told = notices.told.get((address.item, address.channel, address.level))
        if not self._still(state) or notices.due_in(address.item, address.channel, address.level, now) != 0:
            return ()
        self.attempt = told.attempt + 1 if told else 1
        return (fact("notice.claimed", **address._asdict(), attempt=self.attempt, within_ms=self.within_ms, up=True),)


def outcome(address: Address, attempt: int, why: str) -> Decide:
    """What became of a claimed message: sent, or why not."""
    draft = fact(
        "notice.sent", body(error=encode(why)) if why else b"",
        **address._asdict(), attempt=attempt, out=FAILED if why else SENT, up=True,
    )  # fmt: skip
    return lambda state, now: (draft,)
