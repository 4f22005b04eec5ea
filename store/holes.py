"""What is gone from a log is held against the facts that say why: whoever finds a hole finds the reason beside it.

An opening that is missing is an open question until a later `redaction.made` names its place, and a run of records
that is missing until the `compaction.made` facts cover it, exactly. What is named and still there is a finding too.

Memory: 9 bytes for a missing opening, 16 for a gap and for a named run, in flat arrays.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from heapq import merge
from typing import NamedTuple

from .entry import COMMITMENTS_MAX

_OPEN, _CONTROL, _NAMED = 0, 1, 2

NAMED, TWICE, CONTROL, ABSENT = "named", "twice", "control", "absent"
"""What naming a place comes to: it was missing and is explained now; explained before; not to be taken; not missing."""


class Span(NamedTuple):
    """Records first to last, both included."""

    first: int
    last: int


class Openings:
    """Openings that are not there, in order of record and place."""

    def __init__(self) -> None:
        self._keys, self._marks = array("Q"), bytearray()
        self.named = 0

    def __len__(self) -> int:
        return len(self._keys)

    def missing(self, seq: int, place: int, control: bool) -> None:
        """An opening is not there; called in order."""
        self._keys.append(seq * COMMITMENTS_MAX + place)
        self._marks.append(_CONTROL if control else _OPEN)

    def name(self, seq: int, place: int) -> str:
        """A redaction names it."""
        key = seq * COMMITMENTS_MAX + place
        i = bisect_left(self._keys, key) if place < COMMITMENTS_MAX and key < 1 << 64 else len(self._keys)
        if i == len(self._keys) or self._keys[i] != key:
            return ABSENT
        was, self._marks[i] = self._marks[i], _NAMED
        self.named += was == _OPEN
        return (NAMED, CONTROL, TWICE)[was]

    def unexplained(self) -> Iterator[tuple[int, int]]:
        """(record, place) of those that nothing has named."""
        return (divmod(key, COMMITMENTS_MAX) for key, mark in zip(self._keys, self._marks, strict=True) if mark < 2)


class Runs:
    """Records that are not there, as they were passed over, and as compactions name them."""

    def __init__(self) -> None:
        self._first, self._last = array("Q"), array("Q")
        self._named: list[array[int]] = []
        self.count = 0

    def gap(self, first: int, last: int) -> None:
        """Records are missing and stubs stand for them; called in order."""
        self.count += last - first + 1
        if self._last and self._last[-1] + 1 == first:
            self._last[-1] = last
        else:
            self._first.append(first)
            self._last.append(last)

    def __contains__(self, seq: int) -> bool:
        i = bisect_right(self._first, seq) - 1
        return i >= 0 and seq <= self._last[i]

    def touch(self, first: int, last: int) -> bool:
        """Whether any of these records is missing."""
        i = bisect_right(self._first, last) - 1
        return i >= 0 and self._last[i] >= first

    @property
    def gaps(self) -> Iterator[Span]:
        return map(Span, self._first, self._last)

    def name(self, runs: Iterable[Span]) -> None:
        """One fact names these, sorted and disjoint."""
        flat = array("Q")
        for run in runs:
            flat.extend(run)
        self._named.append(flat)

    def doubled(self) -> Iterator[Span]:
        """What two facts name both."""
        before = -1
        for first, last in self._sorted():
            if first <= before:
                yield Span(first, min(last, before))
            before = max(before, last)

    def unexplained(self) -> Iterator[Span]:
        """Gaps, or pieces of them, that no fact names."""
        return _without(self.gaps, _joined(self._sorted()))

    def unremoved(self) -> Iterator[Span]:
        """Named runs, or pieces of them, that are there."""
        return _without(_joined(self._sorted()), self.gaps)

    def _sorted(self) -> Iterator[Span]:
        return merge(*[map(Span, flat[::2], flat[1::2]) for flat in self._named])


def _joined(spans: Iterator[Span]) -> Iterator[Span]:
    """Sorted spans, those that touch or overlap as one."""
    held: Span | None = None
    for span in spans:
        if held is None or span.first > held.last + 1:
            if held is not None:
                yield held
            held = span
        else:
            held = Span(held.first, max(held.last, span.last))
    if held is not None:
        yield held


def _without(spans: Iterator[Span], cover: Iterator[Span]) -> Iterator[Span]:
    """What of sorted disjoint spans sorted disjoint covers leave."""
    over = next(cover, None)
    for first, last in spans:
        while over is not None and over.last < first:
            over = next(cover, None)
        while over is not None and over.first <= last:
            if first < over.first:
                yield Span(first, over.first - 1)
            first = over.last + 1
            if over.last > last:
                break
            over = next(cover, None)
        if first <= last:
            yield Span(first, last)
