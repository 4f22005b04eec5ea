"""Where the world is not as the log says, until the world says otherwise or a person accounts for it.

Whoever asks the world writes what it said (`effect.observed`): an effect is as the log says (`confirmed`), is not
(`drift`), or nobody can tell (`unverifiable`); a person's word about a drift is `accepted`. The fold keeps what waits
for a person and what was accepted, and of the rest the newest RECENT answers, so that asking again and hearing the same
writes nothing. It names effects by the record that announced them, and forgets those that a compaction removed.

Why not every answer: a device that is asked four times a day about everything would remember more of the asking than of
the work. What was asked how often stands in the log, as one `reconcile.done` for each time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..store.chain import Draft
from ..store.clock import Now
from ..store.entry import Entry
from ..store.errors import Illegal
from ..store.facts import COMPACTED
from .facts import fact

if TYPE_CHECKING:
    from .state import State

CONFIRMED, DRIFT, UNVERIFIABLE, ACCEPTED = "confirmed", "drift", "unverifiable", "accepted"
OUTS = frozenset({CONFIRMED, DRIFT, UNVERIFIABLE, ACCEPTED})
OBSERVED, BEGUN, DONE = "effect.observed", "reconcile.begun", "reconcile.done"
RECENT = 4096
"""How many answers about effects that are in order are remembered."""


class Drifted(msgspec.Struct, array_like=True):
    """An effect that is not as the log says. seq: the record that said so first; of, step: where it was performed;
    ref: the record that announced it. accepted: a person has accounted for it."""

    seq: int
    of: str
    step: int
    ref: int
    why: str
    accepted: bool = False


class Drifts:
    """known: by `ref`, what drifted. recent: by `ref`, the newest answer. begun: lived milliseconds of the newest turn
    of the schedule, -1 for none. closed: the places of the drifts that the newest fact has settled."""

    KINDS = (OBSERVED, BEGUN, COMPACTED)

    def __init__(self) -> None:
        self.known: dict[int, Drifted] = {}
        self.recent: dict[int, str] = {}
        self.begun = -1
        self.closed: tuple[int, ...] = ()

    def check(self, entry: Entry, state: State) -> None:
        """Raises Illegal for a fact that cannot follow."""
        if entry.kind == OBSERVED and entry.out not in OUTS:
            raise Illegal(f"{entry.kind} says {entry.out!r}, which is no answer.")
        if entry.out == ACCEPTED and entry.kind == OBSERVED and not self.waits(entry.ref, entry.why):
            raise Illegal(f"No drift of the effect at record {entry.ref} waits to be accepted.")

    def fold(self, entry: Entry, lived: int, state: State) -> None:
        _FOLDS[entry.kind](self, entry, lived)

    def _observed(self, entry: Entry, lived: int) -> None:
        ref, before = entry.ref, self.known.get(entry.ref)
        self.closed = ()
        self.recent.pop(ref, None)
        self.recent[ref] = answer(entry.out, entry.why)
        if len(self.recent) > RECENT:
            del self.recent[next(iter(self.recent))]
        if entry.out == DRIFT and before is not None and before.why == entry.why:
            return
        if entry.out == UNVERIFIABLE:
            return
        if before is not None and not before.accepted:
            self.closed = (before.seq,)
        if entry.out == DRIFT:
            self.known[ref] = Drifted(entry.seq, entry.of, entry.step, ref, entry.why)
        elif entry.out == ACCEPTED and before is not None:
            before.accepted = True
        else:
            self.known.pop(ref, None)

    def _begun(self, entry: Entry, lived: int) -> None:
        self.begun = lived

    def _compacted(self, entry: Entry, lived: int) -> None:
        gone = [ref for ref in self.known if _within(ref, entry.runs)]
        self.closed = tuple(self.known.pop(ref).seq for ref in gone)
        for ref in [ref for ref in self.recent if _within(ref, entry.runs)]:
            del self.recent[ref]

    @property
    def open(self) -> list[Drifted]:
        """What waits for a person."""
        return [one for one in list(self.known.values()) if not one.accepted]

    def waits(self, ref: int, why: str) -> bool:
        """Whether a drift of this effect, of this kind, waits for a person."""
        one = self.known.get(ref)
        return one is not None and not one.accepted and one.why == why

    def accounted(self, ref: int, why: str) -> bool:
        """Whether a person has accounted for this drift of this effect."""
        one = self.known.get(ref)
        return one is not None and one.accepted and one.why == why

    def news(self, ref: int, out: str, why: str) -> bool:
        """Whether this answer says something that the log does not say yet."""
        if out == DRIFT and ref in self.known and self.known[ref].why == why:
            return False
        if out == CONFIRMED and ref in self.known:
            return True
        return self.recent.get(ref) != answer(out, why)

    def dump(self) -> Any:
        return [[self.known[ref] for ref in sorted(self.known)], list(self.recent.items()), self.begun]

    def load(self, raw: Any) -> None:
        known, recent, self.begun = msgspec.convert(raw, tuple[list[Drifted], list[tuple[int, str]], int])
        self.known, self.recent, self.closed = {one.ref: one for one in known}, dict(recent), ()


_FOLDS = {OBSERVED: Drifts._observed, BEGUN: Drifts._begun, COMPACTED: Drifts._compacted}


def _within(ref: int, runs: Sequence[tuple[int, int]]) -> bool:
    at = bisect_right(runs, ref, key=lambda run: run[0]) - 1
    return at >= 0 and ref <= runs[at][1]


def answer(out: str, why: str) -> str:
    """An answer in one word."""
    return f"{out} {why}"


class Turn:
    """The decision to ask now because the schedule says so. `ours` is whether this process is to do it."""

    def __init__(self, every_ms: int) -> None:
        self.every_ms, self.ours = every_ms, False

    def __call__(self, state: State, now: Now) -> Sequence[Draft]:
        self.ours = left_ms(state, now, self.every_ms) == 0
        return (fact(BEGUN, within_ms=self.every_ms, up=True),) if self.ours else ()


def left_ms(state: State, now: Now, every_ms: int) -> int:
    """Milliseconds of lived time until the world is to be asked again."""
    begun = state.drifts.begun
    return 0 if begun < 0 else max(0, begun + every_ms - now.lived)
