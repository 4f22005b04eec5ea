"""Tools of others prove what is in a log from its tiles: the hashes of the tree, 256 to a file.

C2SP tlog-tiles, as folders of files: `tile/<L>/<N>` holds 256 hashes of the tree at height 8·L, `tile/entries/<N>` the
lines under `tile/0/<N>`, each with its length before it; the last of a row ends in `.p/<W>`. Names are cut in threes
(`x001/x234/067`).

Where records were removed, only the hashes that cover them are left: a tile that would need more is not there, and
whoever asks for it is told so; every other proof goes on working. Memory is one tile a row.
"""

from __future__ import annotations

from collections.abc import Callable

from .merkle import EMPTY, RUN, RUN_BITS, node

ENTRIES = -1

Emit = Callable[[str, bytes], None]
Runs = Callable[[int], bytes | None]
"""The root of the n-th full run of 256, from wherever it lies; it is believed only if it folds to a hash that is."""


def tile_name(level: int, n: int, partial: int = 0) -> str:
    """Where a tile lies in its log."""
    groups = [f"{n % 1000:03d}"]
    while n >= 1000:
        n //= 1000
        groups.insert(0, f"x{n % 1000:03d}")
    row = "entries" if level == ENTRIES else str(level)
    return f"tile/{row}/{'/'.join(groups)}{f'.p/{partial}' if partial else ''}"


class _Row:
    """The tile that is being filled on one height; None stands for what is not known."""

    def __init__(self, level: int, emit: Emit) -> None:
        self.level, self.emit = level, emit
        self.full = 0
        self.parts: list[bytes | None] = []

    def add(self, part: bytes | None, count: int = 1) -> None:
        while count:
            some = min(count, RUN - len(self.parts))
            self.parts += [part] * some
            count -= some
            if len(self.parts) == RUN:
                self.write()
                self.full += 1
                self.parts = []

    def write(self, partial: int = 0) -> None:
        known = [part for part in self.parts if part is not None]
        if len(known) == len(self.parts) > 0:
            self.emit(tile_name(self.level, self.full, partial), b"".join(known))


class Tiles:
    """Grows a tree from lines and stubs, hands each tile to `emit(name, bytes)` once it is full, knows the root."""

    def __init__(self, emit: Emit, runs: Runs = lambda n: None) -> None:
        self.size = 0
        self._emit, self._runs = emit, runs
        self._peaks: list[bytes] = []  # widest first; one per bit set in size
        self._lines = _Row(ENTRIES, emit)
        self._rows: list[_Row] = []

    def entry(self, line: bytes, hash: bytes) -> None:
        """The next line and its leaf hash."""
        self._lines.add(len(line).to_bytes(2, "big") + line if len(line) < 1 << 16 else None)
        self._push(0, hash)

    def stub(self, level: int, hash: bytes) -> None:
        """The hash that covers the next 2^level entries, which are gone."""
        self._lines.add(None, 1 << level)
        roots = self._roots(level, hash)
        for root in roots:
            self._row(0).add(None, RUN)
            self._push(RUN_BITS, root)
        if not roots:
            for row in range(-(-level // RUN_BITS)):
                self._row(row).add(None, 1 << level - RUN_BITS * row)
            self._push(level, hash)

    def _roots(self, level: int, hash: bytes) -> list[bytes]:
        """The roots of the runs under a stub; none where it covers less than a run, or where they are not to be had."""
        first = self.size >> RUN_BITS
        roots = [self._runs(n) or b"" for n in range(first, first + (1 << level >> RUN_BITS))]
        above = roots
        while len(above) > 1:
            above = [node(left, right) for left, right in zip(above[::2], above[1::2], strict=True)]
        return roots if above == [hash] else []

    def _push(self, height: int, hash: bytes) -> None:
        """Append a full subtree of this height; all before it is there."""
        place = self.size >> height
        self.size += 1 << height
        self._note(height, hash)
        while place & 1:
            hash = node(self._peaks.pop(), hash)
            height, place = height + 1, place >> 1
            self._note(height, hash)
        self._peaks.append(hash)

    def _note(self, height: int, hash: bytes) -> None:
        if height % RUN_BITS == 0:
            self._row(height // RUN_BITS).add(hash)

    def _row(self, level: int) -> _Row:
        while len(self._rows) <= level:
            self._rows.append(_Row(len(self._rows), self._emit))
        return self._rows[level]

    def root(self) -> bytes:
        """The root over everything so far."""
        if not self._peaks:
            return EMPTY
        root = self._peaks[-1]
        for left in self._peaks[-2::-1]:
            root = node(left, root)
        return root

    def finish(self) -> None:
        """Hand out the tiles that are not full."""
        for row in (self._lines, *self._rows):
            row.write(len(row.parts))
