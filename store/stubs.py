"""Records are removed, and every root that was signed over them still comes out: their place in the tree is kept.

A gap keeps, instead of its leaves, the roots of the largest whole subtrees that it consists of: about two for each
doubling of its length. They are split at every size of which a signed root is kept, since a root over the first n
records is made of subtrees that end at n or before. Gaps that come to touch are merged: the maximal cover of both is
made of the covers of each.

Why not one digest over what was removed: nobody could check it against anything. A wrong stub changes every later root.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from .errors import Damaged, NotFound
from .merkle import Peaks


class Stub(NamedTuple):
    """What is kept of 2**level removed records from `start` on, a multiple of that: the root of their subtree."""

    start: int
    level: int
    hash: bytes

    @property
    def stop(self) -> int:
        return self.start + (1 << self.level)


def cover(first: int, stop: int, cuts: Collection[int]) -> Iterator[tuple[int, int]]:
    """(start, level) of the largest aligned subtrees that are first <= i < stop together, none of them over a cut."""
    for edge in [*sorted(cut for cut in set(cuts) if first < cut < stop), stop]:
        while first < edge:
            level = (edge - first).bit_length() - 1
            if first:
                level = min(level, (first & -first).bit_length() - 1)
            yield first, level
            first += 1 << level


def merged(parts: Sequence[Stub], cuts: Collection[int]) -> list[Stub]:
    """The cover of an unbroken run, from the stubs that it consists of (a leaf is one of level 0), left to right.

    A cut inside a part is none: what could tell the root there is gone already."""
    starts = {part.start for part in parts}
    left = iter(parts)
    return [_joined(start, level, left) for start, level in cover(parts[0].start, parts[-1].stop, starts & set(cuts))]


def _joined(start: int, level: int, parts: Iterator[Stub]) -> Stub:
    edge = Peaks()
    while edge.size < 1 << level:
        part = next(parts, None)
        if part is None or part.start != start + edge.size or part.stop > start + (1 << level):
            raise Damaged(f"What is kept of removed records does not join at record {start + edge.size}.", seq=start)
        edge.skip(part.level, part.hash)
    return Stub(start, level, edge.root())


def bridged(stubs: Iterable[Stub], first: int, stop: int) -> bool:
    """Whether the stubs are the records first <= i < stop, each once, and nothing else."""
    for stub in stubs:
        if stub.start != first:
            return False
        first = stub.stop
    return first == stop


def inside(seq: int) -> NotFound:
    """The answer to whoever asks for a hash or a record that was removed."""
    return NotFound(
        f"Record {seq} is inside a compacted run: it was removed, and only what the tree needs of it was kept.",
        code="compacted",
        seq=seq,
    )
