"""Who keeps old pages of the write-ahead log from going away: the processes that read, or stand still, in it.

SQLite's readers hold a shared lock on one of five bytes of the `-shm` (its read marks, from byte 123 on), its writer
and whoever checkpoints one on the bytes before them. Linux lists locks with their owners in /proc/locks. The file is
looked up and never opened: closing it would drop the locks of this very process. Elsewhere nobody can be named.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

WRITER, LAST_MARK = 120, 127
"""First and last of the bytes: writer, checkpointer, recovery, five read marks."""


class Pin(NamedTuple):
    """A process that stands in the way, and its command, as far as it may be told."""

    pid: int
    command: str


class Erasure(NamedTuple):
    """How far an erasure is. done: nothing of what was destroyed is left in the database and its -wal. Else `pins`:
    who is in the way, and `told`: whether this system can say that at all."""

    done: bool
    pins: tuple[Pin, ...] = ()
    told: bool = True


def pins_of(inode: int, device: tuple[int, int]) -> Erasure:
    """Who holds a lock on the -shm with this inode, on the device (major, minor)."""
    if sys.platform != "linux":
        return Erasure(False, (), told=False)
    try:
        text = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return Erasure(False, (), told=False)
    return Erasure(False, tuple(Pin(pid, _command(pid)) for pid in holders(text, inode, device)))


def holders(text: str, inode: int, device: tuple[int, int]) -> list[int]:
    """The processes that /proc/locks names for those bytes of that file; 0 is one of another container.

    Some file systems (btrfs, overlays) list another device than they tell: where the right one is not listed with this
    inode, the inode alone counts.
    """
    found: list[tuple[bool, int]] = []
    for line in text.splitlines():
        words = line.split()
        if "->" in words or len(words) < 8 or words[1] != "POSIX":
            continue  # who only waits holds nothing
        major, minor, number = words[5].split(":")
        if int(number) == inode and _overlap(words[6], words[7]):
            found.append(((int(major, 16), int(minor, 16)) == device, max(0, int(words[4]))))
    exact = any(right for right, _ in found)
    return sorted({pid for right, pid in found if right or not exact})


def _overlap(start: str, end: str) -> bool:
    return int(start) <= LAST_MARK and (end == "EOF" or int(end) >= WRITER)


def _command(pid: int) -> str:
    """The command of a process; empty where it may not be told."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode("utf-8", "replace").strip()[:200]
