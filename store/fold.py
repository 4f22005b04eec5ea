"""State is a fold of the log: a View takes in one entry after another, and everything else asks it.

A view checks before it changes anything, so that one illegal draft can be left out of a batch. What it keeps is
disposable: `dump` and `load` carry it as a memo that names the position and chain hash it stands at, and a memo
that disagrees with the log is dropped.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from .clock import Now
from .entry import Entry
from .errors import Illegal
from .facts import BOOTED, STEPPED


class View(Protocol):
    """What a log folds its entries into. `version` changes whenever the meaning of `dump` does."""

    version: int

    def fold(self, entry: Entry, lived: int) -> None:
        """Take in one entry (lived: milliseconds of lived time at it); raise Illegal and change nothing if the
        tables do not allow it. Of a fact told in parts only the last entry is handed over: the others mean nothing."""

    def dump(self) -> bytes:
        """The whole view as bytes."""

    def load(self, blob: bytes) -> None:
        """Become the view that was dumped."""


class NoView:
    """For a log whose facts mean nothing to the reader: a foreign one, or one being verified for bytes only."""

    version = 0

    def fold(self, entry: Entry, lived: int) -> None:
        pass

    def dump(self) -> bytes:
        return b""

    def load(self, blob: bytes) -> None:
        pass


CARRIED_MS = 50  # the boot clocks of some systems tick every 16 ms


class Timeline(msgspec.Struct):
    """Boots and lived time, folded from `log.booted` and from every `up`.

    Lived time: within one boot it advances by the smaller of wall and boot-clock progress,
    across boots by wall progress, never back. After a wall clock was set (`clock.stepped`) its entries say nothing
    about progress until it has overtaken the times in the log; the boot clock alone counts for so long.
    What a clock is ahead by, less than a few ticks (`carried`: microseconds of the wall, milliseconds of the boot
    clock), counts at the next fact: in a log that takes in several a millisecond, time would stand still without it.
    """

    boots: list[str] = []
    lived: int = 0
    at: int = 0
    up: tuple[int, int] = (0, 0)
    stepped: bool = False
    carried: tuple[int, int] = (0, 0)

    def at_entry(self, entry: Entry) -> int:
        """Lived milliseconds at an entry that carries a look at the clocks. Raises Illegal; changes nothing."""
        if len(entry.up) != 2:
            raise Illegal(f"{entry.kind} without a boot and a boot clock.")
        boot, up = entry.up
        first, last = 1, len(self.boots)
        if entry.kind == BOOTED:
            first = last = last + 1
        if not first <= boot <= last:
            raise Illegal("A boot is out of order, or one that the log does not know.")
        return self.progress(entry.at, boot, up, self.stepped or entry.kind == STEPPED)

    def fold(self, entry: Entry, lived: int) -> None:
        """Take in the clocks of an entry, lived milliseconds at it being what `at_entry` said."""
        if entry.kind == BOOTED:
            self.boots.append(entry.boot)
        boot, up = entry.up
        self.carried = self._uncounted(entry, lived - self.lived)
        since = up - self.up[1]
        if entry.kind == STEPPED:
            self.stepped = True
        elif boot != self.up[0] or 0 < since <= (entry.at - self.at) // 1000:
            self.stepped = False
        self.lived, self.at, self.up = lived, entry.at, (boot, up)

    def progress(self, at: int, boot: int, up: int, stepped: bool) -> int:
        """Lived milliseconds at a look at the clocks after the last fact that carried one; `stepped`: the wall clock
        says nothing."""
        if not self.at:
            return self.lived
        wall, since = self._ahead(at, up)
        if boot != self.up[0]:
            return self.lived + wall // 1000
        return self.lived + (since if stepped else min(wall // 1000, since))

    def _ahead(self, at: int, up: int) -> tuple[int, int]:
        """How far the clocks are ahead of what was counted: microseconds, milliseconds."""
        return max(0, at - self.at) + self.carried[0], max(0, up - self.up[1]) + self.carried[1]

    def _uncounted(self, entry: Entry, counted: int) -> tuple[int, int]:
        """What is carried on after an entry that counts so many milliseconds; nothing over a boot or a set clock."""
        boot, up = entry.up
        if boot != self.up[0] or self.stepped or entry.kind == STEPPED:
            return 0, 0
        wall, since = self._ahead(entry.at, up)
        return min(wall - counted * 1000, CARRIED_MS * 1000), min(since - counted, CARRIED_MS)

    def seen(self, wall: int, up: int, last_at: int, stepped: bool = False) -> Now:
        """One look at both clocks (microseconds, milliseconds) as the next fact will see it. stepped: the wall clock
        was set, which no fact says yet."""
        boot = len(self.boots)
        # `at` may have been pushed above the wall by a step back: progress is measured on the wall itself.
        at = wall if wall > last_at else last_at + 1
        return Now(
            at, boot, up, self.progress(max(wall, self.at), boot, up, self.stepped or stepped) if boot else 0, wall
        )
