"""A dead process is known to be dead, and a live one is never robbed: not by sleep, SIGSTOP or a clock step.

Each driving process holds an exclusive lock on a file of its own, `run/<id>.lock`. The kernel frees the lock when
the process dies and at no other time, so "dead" needs no pid, no clock and no lease. The file is created under a
temporary name, locked, and only then linked into place: nobody ever sees it unlocked while its owner lives. Inside it
says who that is, for people; no rule reads that.

A forked child closes what it inherited and never unlocks: the lock belongs to the open file that parent and child
share, so LOCK_UN in the child would free the parent's. After a wait the path and the descriptor must be one file,
else somebody replaced it and the wait begins again.

Why not a lease with a heartbeat: a laptop that slept an hour would lose its work to whoever woke first.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from .clock import Clock, SystemClock

_ID = re.compile(r"[a-z2-7]{26}")
_LOOK_EVERY_S = 0.05
_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)

# ---- the port: three verbs over a descriptor ------------------------------------------------------------------------

if sys.platform == "win32":
    import msvcrt

    _FAR = 1 << 30  # a byte nobody writes, so that the text before it stays readable while it is locked

    def try_lock(fd: int, shared: bool = False) -> bool:
        """Take the lock of an open file without waiting; say whether it was taken. No shared locks here."""
        os.lseek(fd, _FAR, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            raise
        return True

    def wait_lock(fd: int, shared: bool = False) -> None:
        """Take the lock of an open file, waiting as long as it takes. No shared locks here."""
        while not try_lock(fd):
            time.sleep(_LOOK_EVERY_S)

    def _put_in_place(temporary: Path, final: Path) -> None:
        """An open file cannot be moved here: it was created under its final name (see `_first_name`)."""

    def _first_name(final: Path) -> Path:
        return final

else:
    import fcntl

    def try_lock(fd: int, shared: bool = False) -> bool:
        """Take the lock of an open file without waiting; say whether it was taken."""
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            raise
        return True

    def wait_lock(fd: int, shared: bool = False) -> None:
        """Take the lock of an open file, waiting as long as it takes."""
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def _put_in_place(temporary: Path, final: Path) -> None:
        """Raises FileExistsError if the name is taken."""
        try:
            os.link(temporary, final)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links; the name is random, so nothing is overwritten
            os.rename(temporary, final)
        else:
            os.unlink(temporary)

    def _first_name(final: Path) -> Path:
        return final.with_suffix(f".{os.getpid()}.{threading.get_ident()}.new")


# ---- descriptors that a forked child must let go of -----------------------------------------------------------------

_ours: set[int] = set()
_gate = threading.Lock()  # held across fork: no descriptor is open but unknown at that moment


def open_known(path: Path, flags: int) -> int:
    """Open a file (mode 0600 if created) that no forked child may keep: its lock would outlive us there."""
    with _gate:
        fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o600)
        _ours.add(fd)
    return fd


def close_known(fd: int) -> None:
    """Close what `open_known` opened; its lock is free then."""
    with _gate:
        _ours.discard(fd)
        os.close(fd)


def _in_child() -> None:
    for fd in _ours:
        os.close(fd)
    _ours.clear()
    _gate.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_in_child)


# ---- a held file ----------------------------------------------------------------------------------------------------


class _Held:
    """A lock file that this process holds. In a forked child it is held no longer."""

    __slots__ = ("id", "path", "_fd", "_pid")

    def __init__(self, id: str, path: Path | None, fd: int) -> None:
        self.id, self.path, self._fd, self._pid = id, path, fd, os.getpid()

    @property
    def held(self) -> bool:
        """Whether this very process holds it."""
        return self._fd >= 0 and self._pid == os.getpid()

    def release(self) -> None:
        """Remove the file, then let go. Harmless twice, and in a forked child."""
        if not self.held:
            return
        if self.path is not None and _one_file(self.path, self._fd):
            with suppress(FileNotFoundError, PermissionError):  # PermissionError: Windows, while others look at it
                os.unlink(self.path)
        self.abandon()

    def abandon(self) -> None:
        """Let go and leave the file, as death would."""
        if self.held:
            fd, self._fd = self._fd, -1
            close_known(fd)


class Driver(_Held):
    """A process that drives sagas, as others see it: alive while it holds `run/<id>.lock`."""

    __slots__ = ()

    @classmethod
    def start(cls, run_dir: Path | str, clock: Clock | None = None) -> Driver:
        """Become a driver under a new random id (26 characters of base32)."""
        run_dir = Path(run_dir)
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        id = _new_id()
        path = run_dir / f"{id}.lock"
        return cls(id, path, _create(path, clock or SystemClock()))


class Death(_Held):
    """Proof that a driver is dead: its lock, in our hands until released. Nobody else can come to the same conclusion
    meanwhile. `release` removes the file; `abandon` leaves it for the next who looks."""

    __slots__ = ()

    def __enter__(self) -> Death:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.release()
        else:
            self.abandon()


def alive(run_dir: Path | str, id: str) -> bool:
    """Whether somebody holds the lock of this driver. A missing file, or a name that is none, is dead."""
    path = _path(run_dir, id)
    if path is None:
        return False
    try:
        fd = open_known(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(fd, shared=True)  # shared: two who look at once do not take each other for the owner
    finally:
        close_known(fd)


def wait_dead(run_dir: Path | str, id: str, timeout: float | None = None) -> Death | None:
    """Wait on the lock until its owner is dead; return the lock, or None after `timeout` seconds.

    Without a timeout the calling thread sleeps in the kernel and wakes when the lock is freed.
    """
    path = _path(run_dir, id)
    if path is None:
        return Death(id, None, -1)
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            fd = open_known(path, os.O_RDWR)
        except FileNotFoundError:
            try:
                return Death(id, path, _create(path, SystemClock()))
            except FileExistsError:
                continue  # another came first: wait for that one
        try:
            taken = _take(fd, end)
            one = taken and _one_file(path, fd)
        except BaseException:
            close_known(fd)
            raise
        if one:
            return Death(id, path, fd)
        close_known(fd)
        if not taken:
            return None


def until_dead(run_dir: Path | str, id: str) -> None:
    """Sleep in the kernel until a driver is dead. Any number may wait for the same one, none is in another's way, and
    nothing is left behind: who only wants to know asks for a shared lock, and makes no file where there is none."""
    path = _path(run_dir, id)
    while path is not None:
        try:
            fd = open_known(path, os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            wait_lock(fd, shared=True)
            if _one_file(path, fd):
                return
        finally:
            close_known(fd)


def describe(run_dir: Path | str, id: str) -> dict[str, Any]:
    """For people: `pid boot command started_us` as the driver wrote them, `alive`, `stopped` (None: cannot tell)."""
    path = _path(run_dir, id)
    told: dict[str, Any] = {}
    if path is not None:
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            read = None  # gone, or half written by a process that died: nothing to tell
        told = read if isinstance(read, dict) else {}
    return {**told, "alive": alive(run_dir, id), "stopped": _stopped(told)}


def listed(run_dir: Path | str) -> list[str]:
    """The ids that have a lock file, alive or dead."""
    try:
        names = sorted(os.listdir(run_dir))
    except FileNotFoundError:
        return []
    return [name[:-5] for name in names if name.endswith(".lock") and _ID.fullmatch(name[:-5])]


def sweep(run_dir: Path | str, keep: Collection[str] = ()) -> list[str]:
    """Remove what dead processes left and nothing needs: lock files of ids not in `keep`, and unfinished ones.

    Call it with the drivers that any open saga names. Returns the ids removed.
    """
    removed = []
    for id in listed(run_dir):
        if id not in keep and (death := wait_dead(run_dir, id, 0)):
            death.release()
            removed.append(id)
    now = SystemClock().wall_us()
    for path in Path(run_dir).glob("*.new"):
        with suppress(FileNotFoundError):
            fd = open_known(path, os.O_RDWR)
            try:
                # younger than a minute may be created but not yet locked
                if os.fstat(fd).st_mtime_ns // 1000 < now - 60_000_000 and try_lock(fd):
                    os.unlink(path)
            finally:
                close_known(fd)
    return removed


# ---- below ----------------------------------------------------------------------------------------------------------


def _new_id() -> str:
    return base64.b32encode(os.urandom(17)).decode()[:26].lower()


def _path(run_dir: Path | str, id: str) -> Path | None:
    return Path(run_dir) / f"{id}.lock" if _ID.fullmatch(id) else None


def _create(path: Path, clock: Clock) -> int:
    """A new lock file, locked before it has its name. Raises FileExistsError."""
    temporary = _first_name(path)
    fd = open_known(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        if not try_lock(fd):
            raise FileExistsError(errno.EEXIST, "locked by another", str(path))
        os.write(fd, json.dumps(_self_portrait(clock)).encode() + b"\n")
        _put_in_place(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        close_known(fd)
        raise
    return fd


def _self_portrait(clock: Clock) -> dict[str, Any]:
    # No arguments: a command line may hold a token.
    command = [os.path.basename(part) for part in (sys.executable, sys.argv[0] if sys.argv else "") if part]
    return {
        "pid": os.getpid(),
        "boot": clock.boot_id(),
        "command": " ".join(command)[:200],
        "started_us": clock.wall_us(),
        "born": _proc_stat(os.getpid())[1],
    }


def _take(fd: int, end: float | None) -> bool:
    if end is None:
        wait_lock(fd)
        return True
    while not try_lock(fd):
        if time.monotonic() >= end and not try_lock(fd, shared=True):
            return False
        time.sleep(_LOOK_EVERY_S if time.monotonic() < end else 0)
    return True


def _one_file(path: Path, fd: int) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _stopped(told: dict[str, Any]) -> bool | None:
    pid = told.get("pid")
    if not isinstance(pid, int):
        return None
    state, born = _proc_stat(pid)
    if not state or born != told.get("born"):  # another process under that number, or another pid namespace
        return None
    return state in "Tt"


def _proc_stat(pid: int) -> tuple[str, int]:
    """State letter and start tick of a process, or ("", 0) where there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        return words[0].decode(), int(words[19])
    except (OSError, IndexError, ValueError):
        return "", 0
