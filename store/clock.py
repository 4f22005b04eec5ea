"""The one door to the clocks. Everything else receives `now` as a value; tests inject a clock here.

Wall time can be stepped, so no rule of ours waits on it alone: windows and deadlines run on *lived* time
(fold.py), which advances by the smaller of wall and boot-clock progress. The boot clock counts sleep too.
"""

from __future__ import annotations

import sys
import time
import uuid
from typing import NamedTuple, Protocol


class Now(NamedTuple):
    """One look at the clocks, as a decision sees it.

    at: microseconds since 1970, above every earlier entry. boot: ordinal of this boot in the log.
    up: milliseconds of the boot clock. lived: milliseconds of lived time (fold.py). wall: microseconds as the wall
    clock says, which may stand behind the log; 0 where nobody looked.
    """

    at: int
    boot: int
    up: int
    lived: int
    wall: int = 0


class Clock(Protocol):
    def wall_us(self) -> int:
        """Microseconds since 1970; may jump either way."""

    def boot_ms(self) -> int:
        """Milliseconds since boot, sleep included; never goes back within one boot."""

    def boot_id(self) -> str:
        """Names this boot; another boot has another name."""


class SystemClock:
    """The machine's clocks."""

    def __init__(self) -> None:
        self._boot = _boot_id()
        self._source = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    def boot_ms(self) -> int:
        if self._source is None:
            return time.monotonic_ns() // 1_000_000
        return time.clock_gettime_ns(self._source) // 1_000_000

    def boot_id(self) -> str:
        return self._boot


def _boot_id() -> str:
    if sys.platform == "linux":
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                return file.read().strip()
        except OSError:
            pass  # a sandbox without /proc: fall through to the name below
    # No kernel name for this boot: derive one from when it began, to the minute.
    began = (time.time() - time.monotonic()) // 60
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"amends boot {uuid.getnode()} {began}"))
