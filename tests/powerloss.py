"""A disk that can lose power: an apsw VFS under real SQLite that knows which bytes were flushed and which were not.

Writes go to real files, and beside them into a book: what a flush has confirmed, and what is pending since. `cut()`
is the moment the power goes; `after_the_cut()` puts in the files' place what a disk may then hold: everything that
was flushed, and of the rest nothing, everything, or any part of it, torn inside a write at a sector's edge.

`fail(n, how)` makes the n-th call of the disk fail once: IOERR, FULL (half of the write is there) or BUSY; or it is
the moment of the cut. The product knows nothing of it: `under()` puts a subclass in apsw.Connection's place, which
names the VFS of the disk that holds the file.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import apsw

SECTOR = 512
NOTHING, EVERYTHING, ANYTHING = "nothing", "everything", "anything"

_numbers = count(1)
_Connection = apsw.Connection
_disks: dict[str, Disk] = {}  # folder -> the disk that holds it


class PowerCut(apsw.IOError):
    """The disk has no power: every call fails."""


class Image:
    """One file: what is on the platter, and the writes (offset, bytes) and cuts (length, None) since the flush."""

    __slots__ = ("flushed", "pending")

    def __init__(self) -> None:
        self.flushed = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []

    def write(self, offset: int, data: bytes) -> None:
        _put(self.flushed, offset, data)

    def flush(self) -> None:
        for change in self.pending:
            _apply(self.flushed, change)
        self.pending.clear()


def _put(into: bytearray, offset: int, data: bytes) -> None:
    if len(into) < offset:
        into.extend(bytes(offset - len(into)))
    into[offset : offset + len(data)] = data


def _apply(into: bytearray, change: tuple[int, bytes | None]) -> None:
    offset, data = change
    if data is None:
        del into[offset:]
    else:
        _put(into, offset, data)


class Disk:
    """A folder on a disk of its own. `calls` counts what SQLite asked of it; `fired` tells what we made go wrong."""

    def __init__(self, folder: Path | str, seed: int = 0) -> None:
        self.folder = os.path.realpath(folder)
        self.name = f"powerloss-{next(_numbers)}"
        self.random = random.Random(seed)
        self.images: dict[str, Image] = {}
        self.calls = 0
        self.fired: list[str] = []
        self.without_power = False
        self.flushes = 0
        self._at, self._how = 0, ""
        self._vfs = _Vfs(self)
        _disks[self.folder] = self

    def fail(self, n: int, how: str) -> None:
        """Let the n-th call from now on fail, of those that can fail so: `ioerr`, `full`, `busy`, or `cut`."""
        self._at, self._how = self.calls + n, how

    def image(self, path: str) -> Image:
        return self.images.setdefault(path, Image())

    # -- as the files see it

    def asked(self, call: str) -> str:
        """One more call; says how it is to fail, or nothing."""
        if self.without_power:
            if call == "lock":  # of the kernel, not of the disk
                return ""
            raise PowerCut("no power")
        how = self._how
        if call not in _CAN.get(how, _ALL):
            return ""
        self.calls += 1
        if self.calls != self._at:
            return ""
        if how == "cut":
            self.fired.append(f"cut in {call}")
            self.cut()
            raise PowerCut("no power")
        self.fired.append(f"{how} in {call}")
        if how != "full" or call != "write":
            raise apsw.exception_for(_CODES[how, call] if (how, call) in _CODES else _CODES[how])
        return how

    # -- as the world sees it

    def cut(self) -> None:
        """The power goes. What the process still tries to write goes nowhere."""
        self.without_power = True

    def after_the_cut(self, what: str = NOTHING) -> Disk:
        """The disk as it comes up again: the flushed bytes and, of the pending ones, nothing, everything or anything.

        Close every connection to the old one first."""
        self.cut()
        apsw.unregister_vfs(self.name)
        for path, image in self.images.items():
            content = self._survived(image, what)
            if content or os.path.exists(path):
                Path(path).write_bytes(content)
        for name in os.listdir(self.folder):
            if name.endswith("-shm"):
                os.unlink(os.path.join(self.folder, name))  # it never was on the disk
        fresh = Disk(self.folder, self.random.randrange(1 << 30))
        for path in self.images:
            if os.path.exists(path):
                fresh.image(path).flushed = bytearray(Path(path).read_bytes())
        return fresh

    def _survived(self, image: Image, what: str) -> bytes:
        content = bytearray(image.flushed)
        for change in image.pending:
            if what == NOTHING or (what == ANYTHING and self.random.random() < 0.5):
                continue
            offset, data = change
            if what == ANYTHING and data and self.random.random() < 0.4:
                change = (offset, self._torn(offset, data))
            _apply(content, change)
        return bytes(content)

    def _torn(self, offset: int, data: bytes) -> bytes:
        """A write of which the first sectors arrived and the others did not."""
        edges = range(SECTOR - offset % SECTOR, len(data), SECTOR)
        return data[: self.random.choice(edges)] if edges else b""

    def gone(self) -> None:
        """Nobody needs it any more."""
        _disks.pop(self.folder, None)
        if self.name in apsw.vfs_names():
            apsw.unregister_vfs(self.name)


_ALL = frozenset({"read", "write", "sync", "truncate", "delete", "open", "lock"})
_CAN = {"full": frozenset({"write", "truncate"}), "busy": frozenset({"lock", "open"}), "cut": _ALL - {"lock"}}
_CODES: dict[Any, int] = {
    "ioerr": apsw.SQLITE_IOERR,
    "full": apsw.SQLITE_FULL,
    "busy": apsw.SQLITE_BUSY,
    ("ioerr", "write"): apsw.SQLITE_IOERR_WRITE,
    ("ioerr", "read"): apsw.SQLITE_IOERR_READ,
    ("ioerr", "sync"): apsw.SQLITE_IOERR_FSYNC,
    ("ioerr", "truncate"): apsw.SQLITE_IOERR_TRUNCATE,
    ("ioerr", "lock"): apsw.SQLITE_IOERR_LOCK,
    ("ioerr", "open"): apsw.SQLITE_CANTOPEN,
}


class _Vfs(apsw.VFS):
    def __init__(self, disk: Disk) -> None:
        super().__init__(disk.name, "")
        self.disk = disk

    def xOpen(self, name: Any, flags: list[int]) -> Any:  # noqa: N802
        if name is None or not (flags[0] & _OURS):
            return apsw.VFSFile("", name, flags)  # a temporary file is nobody's memory
        self.disk.asked("open")
        return _File(self.disk, name, flags)

    def xDelete(self, name: str, syncdir: bool) -> None:  # noqa: N802
        self.disk.asked("delete")
        super().xDelete(name, syncdir)
        self.disk.images.pop(name, None)


_OURS = apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self.disk = disk
        self.path: str = name.filename() if isinstance(name, apsw.URIFilename) else name
        self.image = disk.image(self.path)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        if self.disk.asked("write"):
            half = data[: len(data) // 2]
            super().xWrite(half, offset)
            self.image.pending.append((offset, half))
            raise apsw.exception_for(apsw.SQLITE_FULL)
        super().xWrite(data, offset)
        self.image.pending.append((offset, bytes(data)))

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        self.disk.asked("read")
        return super().xRead(amount, offset)

    def xTruncate(self, size: int) -> None:  # noqa: N802
        self.disk.asked("truncate")
        super().xTruncate(size)
        self.image.pending.append((size, None))

    def xSync(self, flags: int) -> None:  # noqa: N802
        self.disk.asked("sync")  # no real flush: the book is the platter
        self.disk.flushes += 1
        self.image.flush()

    def xLock(self, level: int) -> None:  # noqa: N802
        self.disk.asked("lock")
        super().xLock(level)


class _Shimmed(_Connection):
    """A Connection on the disk that holds its file; the machine's own where none of ours does."""

    def __init__(self, filename: str, *args: Any, **named: Any) -> None:
        disk = _disks.get(os.path.dirname(os.path.realpath(filename)))
        if disk is not None:
            named["vfs"] = disk.name
        super().__init__(filename, *args, **named)


@contextmanager
def under() -> Iterator[None]:
    """Databases in the folder of a Disk are opened through it."""
    apsw.Connection = _Shimmed  # type: ignore[misc]
    try:
        yield
    finally:
        apsw.Connection = _Connection  # type: ignore[misc]
        for disk in list(_disks.values()):
            disk.gone()


def die(log: Any) -> None:
    """The process of a SqliteLog ends without closing anything well; the kernel closes what it held open."""
    log._queue.clear()
    log._stale = True  # so that nothing is signed or written on the way out
    log.close()
