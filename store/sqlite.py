"""The log in one file: what was acknowledged is there after a kill, and as durably as was asked after a power cut.

All writes of a process go through one committer. It takes everything that is queued into one transaction, runs each
decision against the fold (caught up with every other process first), leaves out what refuses, and answers after the
COMMIT. It works on the thread of whoever asks while the disk is fast, else on one thread of its own; there is no
batching window. Whoever holds the lock looks at the queue again after letting go, and a parked thread is rung
whenever something is handed in, so nothing queued is ever forgotten.

Why apsw only, no second connection that checkpoints, no stat of the `-wal` for its times, no index on the log:
DECISIONS.md 3 and bench/README.md. A second SQLite library in one process, or a raw open and close of one of
the files, drops this process's locks; the guard after each COMMIT notices the worst of it, a replaced `-wal`.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context
from copy import copy
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import apsw
import msgspec

from . import gaps
from .cells import present, without
from .chain import ENDED, OPENED, Chain, Decide, Draft, Row, Spoiled
from .clock import Clock, Now, SystemClock
from .entry import Entry, leaf, read
from .errors import (
    AmendsError,
    Closed,
    Damaged,
    DiskFull,
    HomeRefused,
    Illegal,
    LogHeld,
    LogReplaced,
    Malformed,
    NotFound,
    Refused,
    TheyErred,
    TooNew,
)
from .facts import COMPACTED, ERASED, REDACTED
from .fold import View
from .keeping import Keeping
from .log import DURABLE, FILED, LISTED, Record, SagaRow, fresh, known, not_appended
from .merkle import EMPTY, RUN, Peaks, root_at
from .pages import cleaned, mapped, suspect
from .pins import Erasure, pins_of
from .seal import ABSENT, Owner, Vault, Wrapped, is_sealed, parts, seal, unseal
from .squeeze import LEAST, shut, unshut
from .stubs import Stub, bridged, inside

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

SCHEMA_VERSION = 1
APPLICATION_ID = 0x616D6E64  # "amnd"
OLDEST_SQLITE = (3, 51, 3)  # older ones can corrupt a database when the -wal is reset

EMPTY_S = 0.05  # so long the write lock is held for readers of old pages to go
ERASE_FIRST_S, ERASE_LAST_S = 0.2, 5.0  # from one try to finish an erasure to the next
ERASE_TRIES = 20  # others may write between emptying the -wal and saying so
LAZY_S = 0.02  # an appended fact is in the file after this
IDLE_S = 0.05  # quiet for so long: sign, checkpoint, write the memo
SIGN_S, SIGN_ENTRIES, ANCHOR_S = 1.0, 1000, 1.0
UPSETS = 3  # batches that are kept in a row though something that is not about the file was raised in their commit
HELD_S, LOOP_PATIENCE_S, POLL_S = 30.0, 0.002, 0.05
BATCH, QUEUE_SOFT, QUEUE_HARD, TURNS = 1024, 1024, 8192, 4
PAGE, PAGE_BYTES = 256, 1 << 20
SLOW_S, FAST_S, PROBE_S = 0.001, 0.0007, 0.25  # of one COMMIT, on average
ROW_S = 3e-6  # of it, what each row costs wherever it is done: many rows make no slow disk
IDLE_FRAMES, FULL_FRAMES = 200, 1000
WAL_BYTES, RESERVE_BYTES = 4 << 20, 8 << 20
PAGE_SIZE, PAGES_READ, PAGES_MOST = 4096, 256, 0x02000000
"""PAGES_MOST: of a larger file, a page of a table could be taken for one that goes on with a long row (pages.py)."""
MEMO_EACH, MEMO_IDLE, MEMO_CLOSE = 4096, 512, 128
SIGNATURE = 96  # root and signature; a shorter cell is the entry's own hash

_SCHEMA = (
    """create table entry(seq integer primary key, line blob not null, back integer not null, open blob, sig blob)
       strict""",
    """create table tile(level integer not null, n integer not null, data blob not null, primary key(level, n))
       strict, without rowid""",
    """create table saga(first integer primary key, saga text not null, head integer not null, open integer not null,
       named integer not null) strict""",
    "create index saga_open on saga(first) where open = 1",
    "create index saga_named on saga(saga) where named = 1",
    """create table memo(view text primary key, version integer not null, seq integer not null, h blob not null,
       blob blob not null) strict, without rowid""",
    "create table pack(n integer primary key, lines blob not null, opens blob) strict",
)

DATA_KEYS = """create table if not exists datakey(saga text primary key, seal text not null, wrapped blob not null)
       strict, without rowid"""
"""The sagas' keys, wrapped by the owner's: of a log that is sealed."""

_ENTRY = "insert into entry values(?,?,?,?,?)"
_SAGA_BEGUN = "insert into saga values(?,?,?,1,?)"
_SAGA_ENDED = "update saga set head = ?, open = 0 where first = ?"
_TILE = "insert into tile values(1,?,?)"
_SIGN = "update entry set sig = ? where seq = ?"
_LINES = "select line from entry where seq >= ? order by seq limit ?"

_SIGNED_KINDS = {ENDED}
_SIGNED_FAMILIES = ("vote.", "review.", "switch.", "key.", "redaction.", "compaction.", "hold.", "seal.", "copy.")
_INTENDED, _FOR_GOOD = "step.intended", "irreversible"

ACTS: dict[str, Callable[[Any, Any, Entry], None]] = {}
"""kind -> what the file does in the transaction that writes such a fact: act(db, log, entry)."""


# With no space left only this may be written: what tells how things stand, unwinds them, or stops more.
OUTCOMES = frozenset(
    "step.done step.failed step.lost step.landed step.probed step.accepted step.refused step.carried "
    "confirm.done confirm.failed confirm.lost lock.freed saga.unwinding saga.concluding "
    "saga.escalated saga.ended saga.joined saga.released saga.suspended saga.taken".split()
)
OUTCOME_FAMILIES = ("undo.", "switch.", "hold.", "redaction.", "erasure.", "compaction.", "copy.")


class Keys(Protocol):
    """The device behind a log (identity.py)."""

    origin: str

    def genesis(self) -> Draft:
        """The first fact."""

    def sign(self, size: int, root: bytes) -> bytes:
        """The signature over this head, 64 bytes."""

    def anchor(self, size: int, root: bytes, signature: bytes, /) -> Any:
        """Remember this head outside the file."""


class Head(NamedTuple):
    """A signed head."""

    size: int
    root: bytes
    signature: bytes


class Room(NamedTuple):
    """Bytes of the database and its -wal, of the -wal alone, and of the database's free pages."""

    bytes: int
    wal: int
    free: int


# ---- the files ------------------------------------------------------------------------------------------------------

_ONE = ctypes.c_int(1)
_BUFFER = 256
_statx: Any = None
if sys.platform == "linux":
    _statx = getattr(ctypes.PyDLL(None), "statx", None)  # PyDLL: a GIL given away here would be lost to a busy loop
if _statx is not None:
    _statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)


def _inode(path: bytes, buffer: Any = None) -> bytes:
    """Device and inode of a file, empty if it is not there. A buffer may be lent by whoever asks often.

    Never asks for times: on Linux 6.13 and newer that makes the next write stamp the inode, and each commit 1.4x.
    """
    if _statx is None:
        try:
            stat = os.stat(path)
        except OSError:
            return b""
        return b"%d:%d" % (stat.st_dev, stat.st_ino)
    buffer = buffer or ctypes.create_string_buffer(_BUFFER)
    if _statx(-100, path, 0, 0x100, buffer):  # AT_FDCWD, STATX_INO
        return b""
    return cast(bytes, buffer[32:40]) + cast(bytes, buffer[136:144])


def _size(path: bytes) -> int:
    """Bytes of a file, without asking for its times."""
    if _statx is None:
        return os.stat(path).st_size
    buffer = ctypes.create_string_buffer(_BUFFER)
    if _statx(-100, path, 0, 0x200, buffer):  # STATX_SIZE
        return 0
    return int.from_bytes(buffer.raw[40:48], sys.byteorder)


_open_dbs: weakref.WeakSet[_Db] = weakref.WeakSet()


class _Db:
    """One connection with our pragmas, and how long it may wait for another process."""

    def __init__(self, path: str, write: bool, patience: float = HELD_S) -> None:
        if tuple(map(int, apsw.sqlite_lib_version().split("."))) < OLDEST_SQLITE:
            raise TheyErred(
                f"SQLite {apsw.sqlite_lib_version()} can corrupt a log.",
                next=f"Install an apsw with SQLite {'.'.join(map(str, OLDEST_SQLITE))} or newer.",
                code="old_sqlite",
            )
        self.path = path
        self.frames = 0
        self.deadline = monotonic() + patience
        if _inherited:
            _own_locks(path)
        if write:
            _make_private(path)
        flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if write else 0)
        try:
            self.db = apsw.Connection(path, flags=flags)
        except apsw.CantOpenError:
            raise HomeRefused(f"{path} cannot be opened.", next="Look at its folder and its modes.") from None
        self.db.set_busy_handler(self._busy)
        self.db.set_wal_hook(self._wrote)  # in place of SQLite's own autocheckpoint; see `SqliteLog._tidy`
        # The -wal outlives its last connection: nobody pays again for its blocks, and its inode stays what it was.
        self.db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self.db.file_control("main", apsw.SQLITE_FCNTL_PERSIST_WAL, ctypes.addressof(_ONE))
        self.run: Callable[..., Any] = self.db.cursor().execute
        self.many: Callable[..., Any] = self.db.cursor().executemany
        try:
            self._accept()
        except BaseException:
            self.db.close()
            raise
        _open_dbs.add(self)

    def _accept(self) -> None:
        """Refuse what is not ours or too new before anything is changed."""
        try:
            # Tables first: they and the number come in one transaction, which may end between these two looks.
            tables = self.one("select count(*) from sqlite_schema")
            ours, version = self.pragma("application_id"), self.pragma("user_version")
        except (apsw.NotADBError, apsw.CorruptError) as error:
            raise Damaged("This is not a database, or a damaged one.", next="Run `amends verify`.") from error
        if ours not in (0, APPLICATION_ID) or (not ours and tables):
            raise Malformed("This is a database of another program.", finding="E_APPLICATION")
        too_new(version)

    def _busy(self, tries: int) -> bool:
        if monotonic() >= self.deadline:
            return False
        sleep(random.uniform(0.0002, 0.001 if tries < 200 else 0.01))  # noqa: S311
        return True

    def _wrote(self, _db: apsw.Connection, _name: str, frames: int) -> int:
        self.frames = frames
        return 0

    def one(self, sql: str, bindings: Sequence[Any] = ()) -> Any:
        """The first column of the only row, None if there is none. A half-read statement would pin its snapshot."""
        rows = self.run(sql, bindings).fetchall()
        return rows[0][0] if rows else None

    def page(self, sql: str, bindings: Sequence[Any], most: int) -> list[Any]:
        """Rows until the last column has given `most` bytes; the statement is over then in any case."""
        cursor = self.db.cursor()
        rows, size = [], 0
        try:
            for row in cursor.execute(sql, bindings):
                rows.append(row)
                if type(row[-1]) is bytes:
                    size += len(row[-1])
                    if size >= most:
                        break
        finally:
            cursor.close()
        return rows

    def pragma(self, name: str, value: Any = None) -> Any:
        return self.db.pragma(name, value) if value is not None else self.db.pragma(name)

    def begin(self, patience: float) -> bool:
        """BEGIN IMMEDIATE; False if another process kept the write lock for so long."""
        self.deadline = monotonic() + patience
        try:
            self.run("begin immediate")
        except (apsw.BusyError, apsw.ProtocolError):
            return False
        return True

    def rollback(self) -> None:
        if self.db.in_transaction:
            self.run("rollback")

    def close(self) -> None:
        self.db.close()


def engine_version() -> str:
    """The version of SQLite that is at work here."""
    version: str = apsw.sqlite_lib_version()
    return version


def too_new(version: int) -> None:
    """Raise TooNew for a file that a newer amends has migrated."""
    if version > SCHEMA_VERSION:
        raise TooNew(
            f"This log has schema version {version}; this amends knows {SCHEMA_VERSION}.", next="Use the newer amends."
        )


def _write_db(path: str) -> _Db:
    """A connection that writes; makes the tables of a new file."""
    db = _Db(path, True)
    try:
        db.pragma("auto_vacuum", 2)  # of a new file only, and first: INCREMENTAL
        db.pragma("page_size", 4096)
        _become_wal(db)
        db.pragma("synchronous", "FULL")
        db.pragma("secure_delete", 1)
        db.pragma("cache_size", -8000)
        if sys.platform == "darwin":
            db.pragma("fullfsync", 1)
        if not db.pragma("application_id"):
            _make_tables(db)
        too_new(db.pragma("user_version"))
    except BaseException:
        db.close()
        raise
    return db


def _make_private(path: str) -> None:
    """A new file is its owner's alone, and SQLite gives -wal and -shm the same mode.

    It is made under a name that nobody opens and then linked: a descriptor of ours that was closed while another
    thread has the file open would drop that thread's locks.
    """
    if os.path.exists(path):
        return
    draft = f"{path}.{os.getpid()}.{threading.get_ident()}.new"
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT, 0o600))
        try:
            os.link(draft, path)
        finally:
            os.unlink(draft)
    except FileExistsError:
        return  # another process made it
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space() from error
        return  # no links, or no such folder: SQLite makes the file, or says why not


def _become_wal(db: _Db) -> None:
    """SQLite does not ask the busy handler here, so two processes that make one file need this loop."""
    end = monotonic() + HELD_S
    while True:
        try:
            if db.pragma("journal_mode", "wal") == "wal":
                return
            raise HomeRefused("This file system does not carry a write-ahead log.", next="Move the home elsewhere.")
        except apsw.BusyError:
            if monotonic() > end:
                raise
            sleep(random.uniform(0.0005, 0.005))  # noqa: S311


def _make_tables(db: _Db) -> None:
    if not db.begin(HELD_S):
        raise LogHeld("Another process is making this log and does not finish.", next="Look for a stopped process.")
    try:
        if not db.pragma("application_id"):
            for table in _SCHEMA:
                db.run(table)
            db.pragma("application_id", APPLICATION_ID)
            db.pragma("user_version", SCHEMA_VERSION)
        db.run("commit")
    finally:
        db.rollback()


def _preallocate(db: _Db, wal: bytes) -> None:
    """Write 4 MB of -wal that never count (rolled back): overwriting a block is 0.6x the fsync of appending one."""
    if _size(wal) >= WAL_BYTES:
        return
    db.pragma("cache_size", 64)  # so small that the rows spill into the -wal
    try:
        if db.begin(HELD_S):
            db.run("create table padding(bytes blob)")
            for _ in range(WAL_BYTES // 500_000 + 1):
                db.run("insert into padding values(zeroblob(500000))")
    except apsw.FullError:
        return  # it will do without
    finally:
        db.rollback()
        db.pragma("cache_size", -8000)


# ---- waiting --------------------------------------------------------------------------------------------------------


class _Waiter:
    """One who waits: a future on its own loop, or a thread on a bell of its own."""

    __slots__ = ("answer", "bell", "future", "loop", "since", "sync")

    def __init__(self, sync: int, loop: Any = None, future: Any = None) -> None:
        self.sync, self.loop, self.future = sync, loop, future
        self.bell: Any = None
        self.answer: Any = None
        self.since = monotonic()


_Job = tuple[Decide, _Waiter | None]


def _settle(future: Any, answer: Any) -> None:
    if future.done():  # cancelled: the facts stand all the same
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class _Bell:
    """Rings once however often it is struck; who waits for it may also wake by time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            return  # it rings already

    def wait(self, seconds: float | None) -> None:
        self._lock.acquire(timeout=-1 if seconds is None else seconds)


def _rings(bell: _Bell) -> Callable[[Any], None]:
    """For a weak reference: the thread learns that its log is gone."""
    return lambda _: bell.ring()


class _Signs(dict[str, bool]):
    """Kind -> whether its commit signs."""

    def __missing__(self, kind: str) -> bool:
        answer = self[kind] = kind in _SIGNED_KINDS or kind.startswith(_SIGNED_FAMILIES)
        return answer


_signs = _Signs()
_BARE = Context()  # decisions see no caller's context variables


def _running_loop() -> Any:
    """The event loop of this thread, without importing asyncio for those who have none."""
    events = sys.modules.get("asyncio.events")
    look = getattr(events, "_get_running_loop", None)
    return look() if look else None


# ---- the log --------------------------------------------------------------------------------------------------------


class SqliteLog:
    """The `Log` port over one SQLite file.

    `identity` signs and anchors; it may be anything when `write` is False. `owner()` is asked for the key of a log that
    is sealed: without it nothing is written (`bare`: only facts without openings), and openings are withheld.
    `holder()` names who holds the file, for LogHeld. `warn` is told what a person should know; it is kept in `warnings`
    as well. `commits` and `records_written` count for tests and benches.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        view: View,
        identity: Any,
        *,
        clock: Clock | None = None,
        write: bool = True,
        holder: Callable[[], str] | None = None,
        warn: Callable[[str], None] | None = None,
        reserve: str | os.PathLike[str] | None = None,
        owner: Callable[[], Owner | None] | None = None,
        bare: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        self._bare = bare
        self.identity: Keys = identity
        self.vault = Vault(identity.origin, owner)
        self.origin: str = identity.origin
        self.clock: Clock = clock or SystemClock()
        self.view: Any = known(view, self)
        self.warnings: list[str] = []
        self.commits = self.records_written = 0
        self._warn, self._holder, self._write = warn, holder or (lambda: ""), write
        self._reserve = os.fspath(reserve) if reserve is not None else str(Path(self.path).parent / "reserve")
        self._main = os.fsencode(self.path)
        self._wal = self._main + b"-wal"
        self._stat = ctypes.create_string_buffer(_BUFFER)  # of the guard, used under the commit lock
        self._chain = Chain(self.view)
        self._size = self._memo_at = 0  # _size, _hash: the head as acknowledged; the chain may be ahead of it
        self._hash = ""
        self._signed: Head | None = None
        self._signed_at = self._anchored_at = 0.0
        self._anchored = 0
        self._remembered: set[int] = set()  # sizes of heads that are remembered outside the file, as last looked up
        self._full = self.converting = False
        self._full_at = 0.0
        self._closed = False
        self._db: _Db | None = None
        self._reader: _Db | None = None
        self._pending: tuple[list[Row], list[tuple[_Waiter | None, Any]], bool, int] | None = None
        self._fresh_locks()
        with self._lock, _speaking():
            self._open()
        _logs.add(self)
        if write and self._chain.keeping.unfinished:
            self._wake()

    def _fresh_locks(self) -> None:
        """Everything that threads share: made at the start, and anew in a forked child."""
        self._lock = threading.RLock()
        self._read_lock = threading.RLock()
        self._fold_lock = threading.RLock()  # taken inside the commit lock, never while the disk is waited for
        self._queue: deque[_Job] = deque()
        self._urgent = FILED
        self._due: set[Any] = set()
        self._owed: deque[tuple[_Waiter | None, Any]] = deque()
        self._bell = _Bell()
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.RLock()
        self._parked = True
        self._seen: Any = None
        self._dirty = False
        self._quiet_since = 0.0
        self._grew = threading.Condition(threading.Lock())
        self._waiting = 0
        self._average = 0.0
        self._slow = False
        self._probe_at = 0.0
        self._upsets = UPSETS
        self._stale = False
        self._erase_at = self._erase_after = 0.0
        self._erase_upto = 0

    # -- opening ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Connect, fold, check the tail. The lock is held. For a new file: write the genesis."""
        try:
            self._connect()
        except apsw.Error as error:
            if not self._write or self._full or not _is_full(error):
                raise
            self._is_full_now()
            self._connect()
        self._average = 0.0

    def _connect(self) -> None:
        self._close_connections()
        self._db = db = _write_db(self.path) if self._write else _Db(self.path, False)
        self._level, self._checkpoint_at = DURABLE, FULL_FRAMES
        if not self._write:
            db.pragma("query_only", 1)
            db.run("begin")  # one moment: others write on between two statements
            try:
                self._version = db.pragma("data_version")
                self._refold()
            finally:
                db.run("rollback")
            self._stand()
            if not self._is_open_to_us():
                self.vault.ask(self._seal_in_force())
                if self.vault.trouble is not None:
                    self._say(self.vault.trouble.message)
            return
        _preallocate(db, self._wal)
        if not db.begin(HELD_S):
            self._close_connections()
            raise self._held()
        try:
            self._wal_inode, self._db_inode = _inode(self._wal), _inode(self._main)
            self._version = db.one("pragma data_version")
            self._refold()
            self.look_for_more()
            if self.shut:  # where the key comes from may take its time: nobody is kept waiting for it
                db.run("rollback")
                if self._bare:
                    self.vault.ask(self._seal_in_force())
                if not self._begin(HELD_S):
                    raise self._held()
            if not self._chain.size:
                self._begin_log()
            else:
                self._of_our_key()
                self._sign_tail()
            db.run("commit")
        except BaseException:
            self._close_connections()
            raise
        self._stand()
        self._guard()
        self._anchor_now()

    def _begin_log(self) -> None:
        chain = self._chain
        rows, [(_, answer)] = chain.take([(lambda view, now: (self.identity.genesis(),), self)], chain.now(self.clock))
        if isinstance(answer, BaseException):
            raise answer
        self._insert(rows)

    def _of_our_key(self) -> None:
        """Nothing is signed in a log that another incarnation has begun."""
        assert self._db is not None
        first = read(self._db.one("select line from entry where seq = 0"))
        if first.log != self.identity.genesis().fields.get("log", ""):
            raise LogReplaced(
                f"The log at {self.path} was begun under another key than this device's.",
                next="`amends verify` tells more.",
            )

    def _sign_tail(self) -> None:
        """What a crash left unsigned is checked against the hash in its row, signed, and said."""
        unsigned = self._chain.size - (self._signed.size if self._signed else 0)
        if not unsigned:
            return
        quiet = self.clock.wall_us() - self._chain.at
        self._sign_last()
        if quiet > 2_000_000:  # a live process would have signed by now
            self._say(f"The last {unsigned} records were not signed when the log was last left; they are now.")

    def _say(self, text: str) -> None:
        self.warnings.append(text)
        if self._warn:
            self._warn(text)

    def _held(self) -> LogHeld:
        who = self._holder()
        return LogHeld(
            f"Another process has held the log's write lock for {HELD_S:.0f} s{': ' + who if who else ''}.",
            next="If it is stopped, continue it (`kill -CONT`) or end it; nothing is lost.",
        )

    def _stand(self) -> None:
        self._size, self._hash = self._chain.size, self._chain.prev
        if self.vault.follow(self._chain.keeping) and self._write:
            self.look_for_more()

    # -- the fold -----------------------------------------------------------------------------------------------------

    def _refold(self) -> None:
        """Become what the file says, in a view of its own, and then put it in the place of the old."""
        view = known(fresh(self.view), self)
        chain, old = Chain(view), self._chain
        self._chain = chain
        try:
            chain = self._from_memo(chain)
            self._memo_at = chain.size
            self._catch_up(anew=True)
            self._plant()
        except BaseException:
            self._chain = old
            raise
        self.view, self._stale = chain.view, False

    def _from_memo(self, chain: Chain) -> Chain:
        assert self._db is not None
        name = view_name(chain.view)
        rows = self._db.run("select version, seq, h, blob from memo where view = ?", (name,)).fetchall()
        row = rows[0] if rows else None
        if row is None or row[0] != chain.view.version:
            return chain
        line = self._db.one("select line from entry where seq = ?", (row[1] - 1,))
        try:
            if line is None or leaf(line) != row[2]:
                raise ValueError("it stands at a record that the log does not have")
            if gaps.stubs(self._db, row[1], 1 << 62):
                raise ValueError("records after it were removed")
            image = msgspec.msgpack.decode(row[3], type=tuple[bytes, bytes])
            chain.view.load(image[0])
            chain.load(image[1])
            if chain.size != row[1] or chain.prev != row[2].hex():
                raise ValueError("it does not stand where it says")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._say(f"The memo of {name} was dropped and the log folded from its start: {error}.")
            if self._write and self._db.db.in_transaction:
                self._db.run("delete from memo where view = ?", (name,))
            chain = self._chain = Chain(known(fresh(self.view), self))
        return chain

    def _catch_up(self, anew: bool = False) -> bool:
        """Fold what others have written. Their runs were stored by them. False: of what comes next some was removed,
        perhaps of sagas that are open in this fold, which has to be made anew."""
        assert self._db is not None
        chain = self._chain
        while True:
            page = [(read(line), line) for (line,) in self._db.run(_LINES, (chain.size, BATCH)).fetchall()]
            if page and page[-1][0].seq != chain.size + len(page) - 1 and not anew:
                return False
            hashes = []
            for entry, line in page:
                if entry.seq > chain.size:
                    self._skip(entry)
                hashes.append(chain.follow(entry, line))
            if not anew:  # else it is planted afterwards
                chain.tree.extend(hashes)
            if len(page) < BATCH:
                break
        chain.stored()
        return True

    def _skip(self, entry: Entry) -> None:
        """Go on behind removed records, if what the tree needs of each was kept."""
        here = self._chain.size
        if not bridged(gaps.stubs(self._db, here, entry.seq), here, entry.seq):
            raise Damaged(f"Record {here} is missing.", next="Run `amends verify`.", seq=here)
        self._chain.skip(entry.seq, entry.prev)

    def _plant(self) -> None:
        """Rebuild the edge of the tree from run roots and the lines after them; check it against the newest signature,
        and the hashes that stand in unsigned rows."""
        self._signed = signed = self._newest_signature()
        at = signed.size if signed else 0
        roots = self._stored_runs(at // RUN)
        if len(roots) < at // RUN or not self._grow(roots, at):
            self._say("The stored run roots do not fit the newest signature: they were computed anew.")
            if not self._grow([], at):
                raise Damaged(
                    f"The first {at} records are not those that were signed.", next="Run `amends verify`.", seq=at - 1
                )
            if self._write and self._db is not None and self._db.db.in_transaction:
                if not gaps.there(self._db):  # else some cannot be computed any more
                    self._db.run("delete from tile where level = 1")
                self._db.many("insert or replace into tile values(1,?,?)", self._chain.tree.runs)
        self._chain.tree.runs.clear()

    def _stored_runs(self, runs: int) -> list[bytes]:
        assert self._db is not None
        rows = self._db.run("select n, data from tile where level = 1 and n < ? order by n", (runs,)).fetchall()
        return [bytes(data) for place, (n, data) in enumerate(rows) if n == place and len(data) == len(EMPTY)]

    def _grow(self, roots: list[bytes], at: int) -> bool:
        """A tree over the roots of full runs and the lines after them. False: not the one signed at size `at`."""
        assert self._db is not None
        tree = Peaks.restore(roots, [])
        hashes: list[bytes] = []
        sig = None
        stubs = deque(gaps.stubs(self._db, tree.size, at))
        for seq, line, sig in self._db.run(
            "select seq, line, sig from entry where seq >= ? order by seq", (tree.size,)
        ):
            while stubs and stubs[0].start < seq:
                tree.extend(hashes)
                hashes.clear()
                stub = stubs.popleft()
                if stub.start != tree.size:
                    return False
                tree.skip(stub.level, stub.hash)
            if seq == at and not self._is_signed(tree, hashes):
                return False
            hashes.append(leaf(line))
            if seq >= at and sig is not None and sig != hashes[-1]:
                raise Damaged(f"Record {seq} is not what was written.", next="Run `amends verify`.", seq=seq)
            if len(hashes) == BATCH:
                tree.extend(hashes)
                hashes.clear()
        if self._chain.size and sig is None and tree.size + len(hashes) > at:
            raise Damaged("The last record lost its hash.", next="Run `amends verify`.", seq=self._chain.size - 1)
        if tree.size + len(hashes) == at and not self._is_signed(tree, hashes):
            return False
        tree.extend(hashes)
        self._chain.tree = tree
        return True

    def _is_signed(self, tree: Peaks, hashes: list[bytes]) -> bool:
        """Whether the newest signature is over these entries. The hashes move into the tree."""
        tree.extend(hashes)
        hashes.clear()
        return self._signed is None or (tree.size, tree.root()) == self._signed[:2]

    def _newest_signature(self) -> Head | None:
        assert self._db is not None
        rows = self._db.run(
            "select seq, sig from entry where seq < ? and length(sig) = ? order by seq desc limit 1",
            (self._chain.size, SIGNATURE),
        ).fetchall()
        return next((Head(seq + 1, sig[:32], sig[32:]) for seq, sig in rows), None)

    # -- handing in ---------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self._size

    def commit(self, decide: Decide, sync: int = DURABLE) -> list[Entry]:
        self._usable()
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise Closed(
                "A decision, or a signal handler that interrupts a commit, cannot commit.",
                next="Answer with facts, or commit afterwards.",
                code="inside",
            )
        waiter = _Waiter(sync)
        bell = waiter.bell = threading.Lock()
        bell.acquire()
        try:
            self._hand_in(decide, waiter)
            self._serve(HELD_S)
        except BaseException:  # handed in is handed in, and somebody must see to it
            self._wake()
            raise
        while waiter.answer is None and not bell.acquire(timeout=POLL_S):
            self._serve(HELD_S)  # never needed, unless whoever held the lock was interrupted on its way out
        if isinstance(waiter.answer, BaseException):
            raise waiter.answer
        entries: list[Entry] = waiter.answer
        return entries

    def acommit(self, decide: Decide, sync: int = DURABLE) -> asyncio.Future[list[Entry]]:
        loop = _running_loop()
        if loop is None:
            raise RuntimeError("acommit needs a running event loop; commit does not.")
        self._usable()
        future: asyncio.Future[list[Entry]] = loop.create_future()
        self._hand_in(decide, _Waiter(sync, loop, future))
        if self._parked:  # this loop may end before it turns again
            self._wake()
        if self._slow and not self._probing():
            self._bell.ring()
        elif loop not in self._due:
            self._due.add(loop)
            loop.call_soon(self._on_loop, loop, context=_BARE)
        return future

    def append(self, decide: Decide) -> None:
        self._usable()
        self._hand_in(decide, None)
        if self._parked:
            self._wake()
        if len(self._queue) >= QUEUE_SOFT and not self._lock._is_owned():  # type: ignore[attr-defined]
            self._serve(LOOP_PATIENCE_S if _running_loop() else HELD_S)
            if len(self._queue) >= QUEUE_HARD:  # memory is bounded, even at the price of this thread waiting
                self.flush()

    def _hand_in(self, decide: Decide, waiter: _Waiter | None) -> None:
        if waiter is not None and waiter.sync > self._urgent:
            self._urgent = waiter.sync
        self._queue.append((decide, waiter))

    def _usable(self) -> None:
        if self._closed:
            raise Closed("This log is closed.")
        if not self._write:
            raise HomeRefused("This log was opened for reading only.", code="read_only")

    def _on_loop(self, loop: Any) -> None:
        self._due.discard(loop)
        self._serve(LOOP_PATIENCE_S)

    def _probing(self) -> bool:
        """On a slow disk: whether it is time to try this thread again."""
        now = monotonic()
        if now < self._probe_at:
            return False
        self._probe_at = now + PROBE_S
        return True

    def flush(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return
        left = len(self._queue)
        while left and not self._closed:
            with self._holding():
                self._batch(HELD_S)
            if len(self._queue) >= left:  # it cannot be written now; what failed was said to whoever waits
                return
            left = len(self._queue)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """The commit lock, for anything but a commit. Who was turned away meanwhile is served."""
        try:
            with self._lock:
                yield
        finally:
            if self._queue and not self._lock._is_owned():  # type: ignore[attr-defined]
                self._serve(LOOP_PATIENCE_S)

    # -- committing ---------------------------------------------------------------------------------------------------

    def _serve(self, patience: float, turns: int = TURNS) -> None:
        """Commit what is queued. If somebody else is at it, leave it to them: they look again after letting go."""
        for _ in range(turns):
            if not self._queue:
                return
            done = self._if_free(lambda: self._batch(patience))
            if done is None:
                return
            if not done:
                break
        if self._queue:
            self._slow_down()

    def _if_free(self, work: Callable[[], bool]) -> bool | None:
        """Do it with the commit lock; None if somebody else has that.

        An interrupt may strike between any two instructions: ask who owns the lock and not what we remember, and have
        an outer net under the inner one.
        """
        lock = self._lock
        try:
            try:
                return work() if lock.acquire(False) else None
            finally:
                if lock._is_owned():  # type: ignore[attr-defined]
                    lock.release()
        except BaseException:
            if lock._is_owned():  # type: ignore[attr-defined]
                lock.release()
            raise

    def _slow_down(self) -> None:
        """This thread has done its share, or may not wait longer: the log's own thread goes on."""
        self._seen = self._queue[0] if self._queue else None
        self._wake()
        self._bell.ring()

    def _batch(self, patience: float) -> bool:
        """One transaction for what is queued. The lock is held. False: another process kept the file all the time."""
        batch: list[_Job] = []
        self._pending = None
        try:
            db = self._ready()
            if self._owed:
                self._pay()
            level = self._urgent
            if level != self._level:
                db.run("pragma synchronous=FULL" if level == DURABLE else "pragma synchronous=NORMAL")
                self._level = level
            if not self._begin(patience):
                self._give_up()
                return False
            with self._fold_lock:
                self._take(batch, level)
                rows, answers = self._link(batch)
            if not rows:
                self._pending = ([], answers, False, level)
                db.run("rollback")
                self._landed(*self._pending)
                return True
            must = self._insert(rows)
            self._pending = (rows, answers, must, level)
            began = monotonic()
            db.run("commit")
            if level == DURABLE:
                self._measure(monotonic() - began - ROW_S * len(rows))
            self._landed(*self._pending)
        except BaseException as error:
            meant_for_us = self._failed(batch, error)
            if not meant_for_us:
                raise
        return True

    def _begin(self, patience: float) -> bool:
        """A transaction that stands on what others have written since, and that may write what it writes under seal.

        False: another process kept the file all the time. Raises SealKey. The key is asked for outside of it."""
        assert self._db is not None
        for again in (True, False):
            if not self._db.begin(patience):
                return False
            with self._fold_lock:
                self._meet()
            if self._is_open_to_us():
                return True
            self._db.run("rollback")
            if again:
                self.vault.ask(self._seal_in_force())
        raise self.vault.refusal(self._seal_in_force(), self._chain.keeping)

    def _is_open_to_us(self) -> bool:
        return self._bare or not self.shut

    @property
    def shut(self) -> bool:
        """Whether the log is sealed and its key is not here: then no opening can be written."""
        in_force = self._seal_in_force()
        return bool(in_force) and not self.vault.has(in_force)

    def _seal_in_force(self) -> str:
        """Id of the owner's key that it takes to go on with this log: also until the last opening is in plain text
        again. Empty where it takes none."""
        keeping = self._chain.keeping
        return keeping.seal or (keeping.former[-1] if self.converting and keeping.former else "")

    def look_for_more(self) -> None:
        """Whether older openings are still to be sealed, or unsealed: the log's own thread goes on with that."""
        assert self._db is not None
        self.converting = bool(self._db.one("select count(*) from sqlite_schema where name = 'sealing'"))
        if self.converting:
            self._dirty = True
            self._wake()

    def _ready(self) -> _Db:
        if self._closed:
            raise Closed("This log is closed.")
        if self._db is None or self._stale:
            self._reopen()
        if self._full and monotonic() - self._full_at > 1:
            self._full_at = monotonic()
            self._full = not self._keep_reserve()
        assert self._db is not None
        return self._db

    def _still_ours(self) -> None:
        """What we folded is still there: the home was not adopted, nor the log set back, under an open log."""
        assert self._db is not None
        chain = self._chain
        if chain.size and not self._stands(chain.size, chain.prev, chain.tree.root):
            self._stale = True
            raise LogReplaced(
                f"The log at {self.path} no longer holds what was acknowledged: it was adopted or set back meanwhile.",
                next="End this program; `amends verify` tells more.",
            )

    def _stands(self, size: int, head: str, root: Callable[[], bytes] | None = None) -> bool:
        """Whether the file begins with these records. Of a head that was removed since, the root tells, where that can
        be told."""
        assert self._db is not None
        line = self._db.one("select line from entry where seq = ?", (size - 1,))
        if line is not None:
            return leaf(line).hex() == head
        if not gaps.removed(self._db, size - 1):
            return False
        try:
            return root is None or root_at(_Leaves(self._db), size) == root()
        except NotFound:
            return True

    def _meet(self) -> None:
        """Inside a transaction: fold what other processes have written since."""
        assert self._db is not None
        version = self._db.one("pragma data_version")
        if version != self._version:
            too_new(self._db.one("pragma user_version"))
            self._still_ours()
            if not self._catch_up():
                self._refold()
            self._version = version
            self._stand()

    def _take(self, batch: list[_Job], level: int) -> None:
        """Move jobs into the batch. An interrupt may leave one in both places, and never in neither."""
        queue = self._queue
        while queue and len(batch) < BATCH:
            job = queue[0]
            waiter = job[1]
            if waiter is not None:
                if waiter.sync > level:  # handed in since; it asks for more than this commit gives
                    self._urgent = waiter.sync
                    return
                if waiter.answer is not None:  # told already, that it waited too long
                    queue.popleft()
                    continue
            batch.append(job)
            queue.popleft()
        if not queue:
            self._urgent = FILED

    def _link(self, batch: list[_Job]) -> tuple[list[Row], list[tuple[_Waiter | None, Any]]]:
        """Fold the batch; what spoils the fold is left out and the rest run again on a new one."""
        batch = batch[:] if not self._full else [(_outcomes_only(decide), waiter) for decide, waiter in batch]
        refused: list[tuple[_Waiter | None, Any]] = []
        while True:
            chain = self._chain
            try:
                first, now = chain.take_clock(self.clock)
                rows, answers = chain.take(batch, now)
                return (first + rows if first else rows), (answers + refused if refused else answers)
            except Spoiled as spoiled:
                refused.append((batch.pop(spoiled.place)[1], spoiled.error))
                self._refold()

    def _insert(self, rows: list[Row]) -> bool:
        """Write the rows, the sagas that began and ended, full runs, and the signature or hash of the last entry.

        Says whether the head must be anchored before anyone is told.
        """
        assert self._db is not None
        chain, many, signed = self._chain, self._db.many, self._signed
        for_good, acting = False, []
        signs = signed is None or chain.size - signed.size >= SIGN_ENTRIES or monotonic() - self._signed_at >= SIGN_S
        for row in rows:
            kind = row[0].kind
            if kind == _INTENDED:
                for_good = for_good or row[0].sem == _FOR_GOOD
            elif _signs[kind]:
                signs = True
                if kind in ACTS:
                    acting.append(row[0])
        sig = self._seal() if signs or for_good else rows[-1][4]
        first = chain.size - len(rows)
        cell = self._sealed_cell if chain.keeping.seal else _row_cell
        self.vault.follow(chain.keeping)
        cells: list[tuple[Any, ...]] = [(first + i, row[1], row[2], cell(row), None) for i, row in enumerate(rows)]
        cells[-1] = (*cells[-1][:4], sig)
        many(_ENTRY, cells)
        if chain.begun:
            many(_SAGA_BEGUN, [(seq, saga, seq, named) for seq, saga, named in chain.begun])
        if chain.ended:
            many(_SAGA_ENDED, chain.ended)
        if chain.tree.runs:
            many(_TILE, chain.tree.runs)
        for entry in acting:
            ACTS[entry.kind](self._db, self, entry)
        return for_good

    def _seal(self) -> bytes:
        """Root and signature of the head as it stands; an older signature of the same thousand is covered by it."""
        chain, old = self._chain, self._signed
        root = chain.tree.root()
        new = self._signed = Head(chain.size, root, self.identity.sign(chain.size, root))
        self._signed_at = monotonic()
        if old and old.size // SIGN_ENTRIES == new.size // SIGN_ENTRIES and old.size < new.size:
            self._cover(old.size - 1)
        return root + new.signature

    def _cover(self, seq: int) -> None:
        assert self._db is not None
        line = self._db.one("select line from entry where seq = ?", (seq,))
        if line is not None:
            self._db.run(_SIGN, (leaf(line), seq))

    def _sign_last(self) -> None:
        """Sign the head in the row that is there already. Inside a transaction."""
        assert self._db is not None
        self._db.run(_SIGN, (self._seal(), self._chain.size - 1))

    def _landed(self, rows: list[Row], answers: list[tuple[_Waiter | None, Any]], must: bool, level: int) -> None:
        """The transaction is over. Its facts stand, whatever happens here; run twice, it tells nobody twice."""
        if rows:
            self._guard()
            self._stand()
            self._chain.stored()
            self.vault.landed()
            self.commits += 1
            self.records_written += len(rows)
            self._upsets = UPSETS
            self._quiet_since = now = monotonic()
            self._dirty = True
            if self._parked:
                self._wake()
            if level == DURABLE and (must or now - self._anchored_at >= ANCHOR_S):
                self._anchor_now()
        self._owed.extend(answers)
        self._pay()
        self._pending = None
        assert self._db is not None
        if self._db.frames >= self._checkpoint_at:  # here and not inside the commit: everyone has been told
            self._checkpoint()

    def _guard(self) -> None:
        """The files under us are those that were opened, or nothing is acknowledged."""
        wal = _inode(self._wal, self._stat) != self._wal_inode
        if wal or _inode(self._main, self._stat) != self._db_inode:
            self._stale = True
            raise LogReplaced(
                f"{'The write-ahead log of ' * wal}{self.path} was replaced or removed while it was open.",
                next="Find the program that did it; what was not acknowledged may be lost.",
            )

    def _anchor_now(self) -> None:
        signed = self._signed
        if signed is None or signed.size <= self._anchored:
            return
        self._anchored_at = monotonic()
        try:
            self.identity.anchor(*signed)
        except OSError as error:  # the facts are durable; what is lost is notice of an older copy put in their place
            self._say(f"The anchor could not be written ({error.strerror or error}).")
        else:
            self._anchored = signed.size

    def _pay(self) -> None:
        """Tell each waiter, on its own loop. What an interrupt leaves over is told by whoever comes next; who was told
        is not told again."""
        owed, here = self._owed, _running_loop()
        away: dict[Any, list[tuple[Any, Any]]] = {}
        count = len(owed)
        for place in range(count):
            waiter, answer = owed[place]
            if waiter is None:
                if isinstance(answer, BaseException):
                    self._say(not_appended(answer))
            elif waiter.loop is None:
                if waiter.answer is None:
                    waiter.answer = answer
                    waiter.bell.release()
            else:
                waiter.answer = answer
                if waiter.loop is here:
                    _settle(waiter.future, answer)
                else:
                    away.setdefault(waiter.loop, []).append((waiter.future, answer))
        for loop, answers in away.items():
            try:
                loop.call_soon_threadsafe(_settle_all, answers)
            except RuntimeError:
                continue  # the loop is closed: nobody is left to be told, and the facts stand
        for _ in range(count):
            owed.popleft()
        self._told_waiting()

    def _measure(self, seconds: float) -> None:
        """Where commits run: with the caller while they are fast. Checkpoints run after this look and do not count."""
        # Counted as twice the limit at most: every second commit must be slow, not one in five that met a busy core.
        self._average = average = self._average + 0.1 * (min(max(seconds, 0.0), 2 * SLOW_S) - self._average)
        if self._slow and (average < FAST_S or seconds < FAST_S and _running_loop()):
            self._slow, self._average = False, min(average, FAST_S)
        elif average > SLOW_S and not self._slow:
            self._slow, self._probe_at = True, monotonic() + PROBE_S

    def _checkpoint(self) -> None:
        """Move frames into the database file. One that a reader holds up is tried again only when the -wal has grown
        as much once more."""
        assert self._db is not None
        self._db.deadline, self._checkpoint_at = 0.0, self._db.frames + FULL_FRAMES
        try:
            there, moved = self._db.db.wal_checkpoint("main", apsw.SQLITE_CHECKPOINT_PASSIVE)
        except (apsw.BusyError, apsw.LockedError):
            return  # another process is at it
        except apsw.Error as error:
            self._say(f"A checkpoint failed ({error}); the log goes on in its -wal.")
            return
        if there == moved:
            self._db.frames, self._checkpoint_at = 0, FULL_FRAMES

    def _failed(self, batch: list[_Job], error: BaseException) -> bool:
        """Finish, if the transaction was over before the interrupt; else roll back. Nobody is left waiting.
        False: it was meant for somebody else, and has to be raised."""
        pending, self._pending = self._pending, None
        if pending and self._did_land(pending[0]):
            self._landed(*pending)
            return _is_about_the_file(error)
        about_the_file = True
        try:
            self._restore()
        finally:
            about_the_file = self._excuse(batch, error)
        return about_the_file

    def _excuse(self, batch: list[_Job], error: BaseException) -> bool:
        """What becomes of a batch that was not written: again in the next commit, or told. Says whether it was about
        the file; what a signal handler raises goes on to whoever it struck, a few times in a row at the most."""
        if not _is_about_the_file(error) and (self._upsets or not isinstance(error, Exception)):
            self._upsets -= isinstance(error, Exception)
            self._again(batch)
            self._slow_down()
            return False
        elif isinstance(error, (apsw.BusyError, apsw.LockedError)):
            self._again(batch)
            self._give_up()
        elif _is_full(error) and not self._full:
            self._is_full_now()
            self._again(batch)
        else:
            spoken = error if isinstance(error, AmendsError) else _spoken(error)
            self._owed.extend((waiter, copy(spoken)) for _, waiter in batch)
            if batch:
                self._pay()
            else:  # it could not even begin
                self._give_up(spoken)
        return True

    def _did_land(self, rows: list[Row]) -> bool:
        """Whether a transaction that we do not remember ending is in the file."""
        if self._db is None or self._stale:
            return False
        if not rows:
            return True
        try:
            if self._db.db.in_transaction:
                return False
            last = rows[-1]
            return bool(self._db.one("select line from entry where seq = ?", (last.entry.seq,)) == last.line)
        except apsw.Error:
            self._stale = True
            return False

    def _restore(self) -> None:
        """Roll back and make the fold what the file says again. Should that fail too, the next use opens anew, and
        says what is wrong."""
        if self._db is None or self._stale:
            return
        self._stale = True
        with suppress(AmendsError, apsw.Error):
            self.vault.rolled_back()
            self._db.rollback()
            self._refold()
            self._stand()

    def _again(self, batch: list[_Job]) -> None:
        if batch and self._queue and self._queue[0] is batch[-1]:
            batch = batch[:-1]
        self._queue.extendleft(reversed(batch))
        self._urgent = max([self._urgent, *(waiter.sync for _, waiter in batch if waiter is not None)])

    def _give_up(self, error: AmendsError | None = None) -> None:
        """Tell those in the queue who wait: with no error given, who has waited 30 s for another process. Appended
        facts stay; so do the others' places in the queue, which `_take` passes over."""
        edge = monotonic() - HELD_S
        for place in range(len(self._queue)):  # others only add
            waiter = self._queue[place][1]
            if waiter is not None and waiter.answer is None and (error or waiter.since <= edge):
                self._owed.append((waiter, copy(error or self._held())))
        self._pay()

    # -- no space -----------------------------------------------------------------------------------------------------

    def use_reserve(self) -> None:
        """Give the reserve up for what must lie beside the log before room can be freed in it."""
        with self._holding():
            self._is_full_now()

    def _is_full_now(self) -> None:
        self._full, self._full_at = True, monotonic()
        self._free_reserve()
        self._say(_NO_SPACE)

    def _free_reserve(self) -> None:
        try:
            os.unlink(self._reserve)
        except FileNotFoundError:
            return

    def _keep_reserve(self) -> bool:
        """Write the reserve if it is not there; say whether it is."""
        part = f"{self._reserve}.{os.getpid()}"
        try:
            if os.path.getsize(self._reserve) >= RESERVE_BYTES:
                return True
        except FileNotFoundError:
            pass  # that is what we are here for
        try:
            with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
                block = bytes(1 << 20)
                for _ in range(RESERVE_BYTES >> 20):
                    file.write(block)
            os.replace(part, self._reserve)
        except OSError as error:
            if os.path.exists(part):
                os.unlink(part)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False
            raise
        return True

    # -- reopening ----------------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        """After a fork, a replaced -wal or a fold that could not be made: connect anew. What was acknowledged must be
        there, else this device would go on to write a second history."""
        size, head = self._size, self._hash
        if size and not os.path.exists(self.path):  # opening would make a new one
            raise LogReplaced(
                f"The log at {self.path} is gone.",
                next="End this program; put the file back; `amends verify` tells more.",
            )
        self._close_connections()
        self._open()
        assert self._db is not None
        if size:
            if not self._stands(size, head):
                self._size, self._hash, self._stale = size, head, True
                raise LogReplaced(
                    f"The log at {self.path} no longer holds what was acknowledged.",
                    next="End this program; `amends verify` tells more.",
                )

    def _close_connections(self) -> None:
        db, reader, self._db, self._reader = self._db, self._reader, None, None
        for each in (db, reader):
            if each is not None:
                each.close()

    # -- the log's own thread -----------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._parked = False
        if self._thread is None or not self._thread.is_alive():
            # While the interpreter ends no thread starts any more: `close` writes what is left.
            with self._thread_lock, suppress(RuntimeError):
                if self._thread is None or not self._thread.is_alive():
                    ref = weakref.ref(self, _rings(self._bell))
                    thread = threading.Thread(target=_keep, args=(self._bell, ref), name="amends-log", daemon=True)
                    thread.start()
                    self._thread = thread
        self._bell.ring()

    def _tick(self) -> float | None:
        """What is due now; seconds until the next look, None if nothing is pending."""
        if self._queue:
            try:
                head = self._queue[0]
            except IndexError:
                return 0.0
            if self._slow or head is self._seen:
                self._seen = None
                self._serve(HELD_S, sys.maxsize)
                return 0.001 if self._queue else LAZY_S
            self._seen = head
            return LAZY_S
        if self._dirty:
            left = self._quiet_since + IDLE_S - monotonic()
            if left > 0 and self._size - self._memo_at < MEMO_EACH:
                return min(left, LAZY_S)
            if not self._rest():
                return LAZY_S
        pause = self._finish()
        self._parked = True
        if self._queue or self._dirty:  # handed in while we lay down
            self._parked = False
            return LAZY_S
        return pause

    def _rest(self) -> bool:
        """Sign, anchor, write memo and reserve, checkpoint. False: not now, try again."""
        if not self._lock.acquire(timeout=LAZY_S):
            return False
        try:
            if self._owed:
                self._pay()
            self._dirty = False
            if self._closed or self._db is None or self._stale:
                return True
            facts = self._chain.size - self._memo_at
            busy = monotonic() - self._quiet_since < IDLE_S
            self._dirty = busy
            if not self._sign(LAZY_S, memo=facts >= (MEMO_EACH if busy else MEMO_IDLE)):
                self._dirty = True
                return False
            if self._db.frames > IDLE_FRAMES and not busy:
                self._checkpoint()
            if not self._full:
                self._full = not self._keep_reserve()
            if self.converting and not busy:
                self._dirty = self._convert()
        except Exception as error:
            self._say(f"Tidying up while idle failed: {error}")
        finally:
            self._lock.release()
            self._serve(HELD_S)
        return True

    def _sign(self, patience: float, memo: bool) -> bool:
        """Catch up, sign the head if it is not signed, write the memo, anchor. The lock is held."""
        assert self._db is not None
        db = self._db
        if self._level != DURABLE:
            db.run("pragma synchronous=FULL")
            self._level = DURABLE
        if not db.begin(patience):
            return False
        before = self._signed
        try:
            with self._fold_lock:
                self._meet()
            if self._signed is None or self._signed.size < self._chain.size:
                newest = self._newest_signature()
                if newest and newest.size == self._chain.size:
                    self._signed = newest  # another process did
                    self._touch(newest)
                else:
                    self._sign_last()
            elif self._signed.size > self._anchored:
                self._touch(self._signed)
            elif not memo:
                db.run("rollback")
                return True
            if memo:
                self._write_memo()
            db.run("commit")
        except BaseException:
            db.rollback()
            self._signed = before
            raise
        self._stand()
        self._guard()
        self._anchor_now()
        return True

    def _touch(self, signed: Head) -> None:
        """Write a signature again, so that this commit brings it to the disk: only then may it be anchored."""
        assert self._db is not None
        # Not with one statement: SQLite leaves a page alone whose content stays the same, and then flushes nothing.
        self._db.run(_SIGN, (None, signed.size - 1))
        self._db.run(_SIGN, (signed.root + signed.signature, signed.size - 1))

    def _write_memo(self) -> None:
        assert self._db is not None
        chain = self._chain
        image = msgspec.msgpack.encode((chain.view.dump(), chain.dump()))
        self._db.run(
            "insert or replace into memo values(?,?,?,?,?)",
            (view_name(chain.view), chain.view.version, chain.size, bytes.fromhex(chain.prev), image),
        )
        self._memo_at = chain.size

    # -- reading ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Fold what other processes have appended. On an event loop's thread: unless somebody is committing, who does
        that anyway."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return
        if _running_loop() is None:
            with self._holding():
                self._refresh()
        else:
            self._if_free(self._refresh)
            self._serve(LOOP_PATIENCE_S)

    def glance(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return
        queue = self._queue
        last = queue[-1] if queue else None
        self._if_free(self._refresh)
        if queue and queue[-1] is not last:  # somebody may have been turned away meanwhile
            self._serve(LOOP_PATIENCE_S)

    def look(self, question: Callable[[Any, Now], T]) -> T:
        with self._fold_lock:
            return question(self.view, self._chain.now(self.clock))

    def _refresh(self) -> bool:
        if self._closed:
            raise Closed("This log is closed.")
        with _speaking():
            db = self._ready()
            db.deadline = monotonic() + HELD_S
            version = db.one("pragma data_version")
            if version == self._version:
                return True
            too_new(db.one("pragma user_version"))
            with self._fold_lock:
                self._stale = True  # until the last entry is folded
                if self._catch_up():
                    self._version, self._stale = version, False
                else:
                    self._reopen()
        self._stand()
        self._told_waiting()
        if self._write and self._parked and self._chain.keeping.unfinished:
            self._wake()
        return True

    def _told_waiting(self) -> None:
        if self._waiting:
            with self._grew:
                self._grew.notify_all()

    def rows(self, sql: str, bindings: Sequence[Any], most: int = 1 << 62) -> list[Any]:
        """A page, in a transaction of its own; inside a decision, from the transaction it runs in. It ends early once
        its last column has given `most` bytes."""
        if self._lock._is_owned() and self._db is not None:  # type: ignore[attr-defined]
            return self._db.page(sql, bindings, most)
        with self._read_lock, _speaking():
            if self._closed:
                raise Closed("This log is closed.")
            if self._reader is None:
                self._reader = _Db(self.path, False)
                self._reader.pragma("query_only", 1)
            self._reader.deadline = monotonic() + HELD_S
            return self._reader.page(sql, bindings, most)

    # -- under seal ---------------------------------------------------------------------------------------------------

    def _sealed_cell(self, row: Row) -> bytes | None:
        if row.blob is None:
            return None
        return self.seal_cell(self.origin, row.entry, enumerate(row.blob.splitlines(True)))

    def seal_cell(self, origin: str, entry: Entry, lines: Iterable[tuple[int, bytes]]) -> bytes | None:
        """The cell of an entry's openings under the seal in force. Inside a transaction."""
        keeping = self._chain.keeping
        key = self.vault.data_key(origin, entry.saga, self, keeping.seal, keeping)
        return seal(key, origin, entry, lines)

    def _read(self, line: bytes, cell: bytes | None) -> Record:
        entry = read(line)
        if cell is None or not is_sealed(cell):
            return Record(entry, line, _plain(cell))
        blob, why = self.open_cell(self.origin, entry, cell)
        return Record(entry, line, blob, why)

    def open_cell(self, origin: str, entry: Entry, cell: bytes) -> tuple[bytes | None, str]:
        """The opening lines of a sealed cell, and empty; else None, and why they are withheld. Raises Malformed."""
        key = self._key_of(origin, entry.saga)
        if not isinstance(key, bytes):
            key = self._once_more(origin, entry.saga, key)
        if not isinstance(key, bytes):
            return None, key
        return b"".join([unseal(key, origin, entry, part) for part in parts(cell)]), ""

    def _key_of(self, origin: str, saga: str) -> bytes | str:
        was = self._chain.keeping.seal
        try:
            return self.vault.key_of(origin, saga, self, self._chain.keeping)
        except Malformed:  # nothing was altered where another process has wrapped it anew since this one last looked
            self.refresh()
            if self._chain.keeping.seal == was:
                raise
            return self.vault.key_of(origin, saga, self, self._chain.keeping)

    def _once_more(self, origin: str, saga: str, why: str) -> bytes | str:
        """Another process may have destroyed the key a moment ago, or its owner named it meanwhile."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return why
        self.refresh() if why == ABSENT else self.vault.ask(self._chain.keeping.seal)
        return self.vault.key_of(origin, saga, self, self._chain.keeping)

    def wrapped(self, name: str) -> Wrapped | None:
        """A wrapped data key by its name (seal.named); None if it is not in this file."""
        found = self._rows_of("datakey", "select seal, wrapped from datakey where saga = ?", (name,))
        return next((Wrapped(*row) for row in found), None)

    def _rows_of(self, table: str, sql: str, bindings: Sequence[Any] = ()) -> list[Any]:
        """Rows of a table that is there only while there is something in it."""
        is_there = "select 1 from sqlite_schema where name = ?"
        try:
            return self.rows(sql, bindings) if self.rows(is_there, (table,)) else []
        except (TheyErred, apsw.SQLError):
            if self.rows(is_there, (table,)):
                raise
            return []  # somebody else has dropped it between the two

    def marks(self) -> list[Any]:
        """How far older openings are sealed, or unsealed (sealing.Mark); empty where there is nothing left to do."""
        found = self._rows_of("sealing", "select origin, at, upto from sealing order by origin")
        if not found:
            return []
        from .sealing import Mark

        return [Mark(*row) for row in found]

    def keep(self, name: str, row: Wrapped) -> None:
        """Keep a wrapped data key. Inside a transaction."""
        assert self._db is not None
        self._db.run(DATA_KEYS)
        self._db.run("insert into datakey values(?,?,?)", (name, *row))

    def _convert(self) -> bool:
        """Seal, or unseal, some of what is to be; whether that is to be gone on with."""
        from .sealing import step

        try:
            return step(self, LAZY_S) > 0
        except LogHeld:
            return True
        except AmendsError as error:
            self.converting = False
            self._say(f"Older openings are not all sealed as they should be: {error}")
            return False

    def rewrite(self, work: Callable[[Any], T], patience: float = HELD_S) -> T:
        """One transaction of the file that adds no fact: work(db). Raises LogHeld, SealKey."""
        self._usable()
        with self._holding(), _speaking():
            db = self._ready()
            if self._level != DURABLE:
                db.run("pragma synchronous=FULL")
                self._level = DURABLE
            if not self._begin(patience):
                raise self._held()
            try:
                done = work(db)
                db.run("commit")
            except BaseException:
                self.vault.rolled_back()
                db.rollback()
                raise
            self.vault.landed()
            self._guard()
            if db.frames >= self._checkpoint_at:
                self._checkpoint()
            return done

    # -- records ------------------------------------------------------------------------------------------------------

    def records(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        seq, end = max(0, start), 1 << 62 if stop is None else stop
        while seq < end:
            page = self.rows(
                "select line, open from entry where seq >= ? and seq < ? order by seq limit ?",
                (seq, end, PAGE),
                PAGE_BYTES,
            )
            if not page:
                return
            for line, blob in page:
                record = self._read(line, blob)
                yield record
            seq = record.entry.seq + 1

    def lines(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[Entry, bytes]]:
        """Entries and their lines as `records` gives them, without openings."""
        seq, end = max(0, start), 1 << 62 if stop is None else stop
        sql = "select line from entry where seq >= ? and seq < ? order by seq limit ?"
        while page := self.rows(sql, (seq, end, PAGE)) if seq < end else []:
            for (line,) in page:
                entry = read(line)
                yield entry, line
            seq = entry.seq + 1

    def stands(self, seq: int, line: bytes) -> bool:
        hash = leaf(line)
        for entry, _ in self.lines(seq + 1, seq + 2):
            return entry.prev == hash.hex()
        start = seq & -RUN
        stubs = [Stub(*row) for row in self.rows(*gaps.overlapping(start, start + RUN))] if self._has_gaps() else []
        if not any(stub.start <= seq + 1 < stub.stop for stub in stubs):
            return seq >= self._size - 1
        # the next one was removed: the root of the full run that this one is in covers both
        leaves = [Stub(entry.seq, 0, hash if entry.seq == seq else leaf(there))
                  for entry, there in self.lines(start, start + RUN)]  # fmt: skip
        edge = Peaks()
        for part in sorted([*leaves, *(stub for stub in stubs if stub.start >= start)]):
            edge.skip(part.level, part.hash)
        return [(edge.root(),)] == self.rows("select data from tile where level = 1 and n = ?", (seq // RUN,))

    def _has_gaps(self) -> bool:
        return bool(self.rows("select count(*) from sqlite_schema where name = 'stub'", ())[0][0])

    def record(self, seq: int) -> Record:
        for _ in range(4000):
            size = self._size
            for record in self.records(seq, seq + 1) if seq >= 0 else ():
                return record
            if 0 <= seq < size:
                raise inside(seq)
            if not size <= seq < max(self._size, self._chain.size) or self._lock._is_owned():  # type: ignore[attr-defined]
                break
            sleep(0.0005)  # folded already, and another thread's commit is under way, or just over
        raise NotFound(f"There is no record {seq}.", next=LISTED)

    def places(self, seq: int) -> tuple[int, ...]:
        rows = self.rows("select line, open from entry where seq = ?", (seq,))
        if not rows:
            raise NotFound(f"There is no record {seq}.", next=LISTED)
        inside = self._lock._is_owned()  # type: ignore[attr-defined]
        going = {pair for row in self._chain.rows if inside for pair in row.entry.places if row.entry.kind == REDACTED}
        return tuple([place for place in present(rows[0][1], read(rows[0][0]).c) if (seq, place) not in going])

    def thread(self, saga: str, *, named: bool = False) -> list[Record]:
        inside: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        if not inside:
            self.refresh()
        for _ in range(1000):
            found = self._walk(saga, inside, named)
            if found is not None:
                return found
            sleep(0.0005)  # a commit of another thread came in between
        raise TheyErred(f"The records of {saga} could not be read while others kept writing.", code="busy")

    def _walk(self, saga: str, inside: bool, named: bool) -> list[Record] | None:
        """From the saga's newest entry back. Outside a decision, what is being committed is not there yet."""
        chain, size = self._chain, self._size
        own = [row for row in chain.rows if row.entry.saga == saga and row.entry.seq >= size]
        thread = chain.threads.get(saga)
        rows: list[Record] = []
        if own:
            seq = own[0].back
            rows = [Record(row.entry, row.line, row.blob) for row in reversed(own)] if inside else []
        elif thread is not None:
            seq = thread.head
        else:
            seq = self._ended_head(saga, chain.size if inside else size, named)
        while seq >= 0:
            found = self.rows("select line, back, open from entry where seq = ?", (seq,))
            if not found:
                return None
            line, seq, blob = found[0]
            rows.append(self._read(line, blob))
        return rows[::-1]

    def _ended_head(self, saga: str, size: int, named_only: bool) -> int:
        # Names have an index; other ids are random, and an index over those would cost every saga.
        for named in (1,) if named_only else (1, 0):
            sql = f"select head from saga where saga = ? and named = {named} and open = 0 and head < ?"
            for (head,) in self.rows(sql + " order by first desc limit 1", (saga, size)):
                return int(head)
        return -1

    def sagas(self, *, open_only: bool = False, before: int | None = None, limit: int | None = None) -> list[SagaRow]:
        self.refresh()
        sql = f"select first, head, saga, open from saga where {'open = 1 and ' if open_only else ''}first < ?"
        bounds = (1 << 62 if before is None else before, -1 if limit is None else limit)
        page = self.rows(sql + " order by first desc limit ?", bounds)
        threads = self._chain.threads
        rows = []
        for first, head, saga, is_open in page:
            thread = threads.get(saga) if is_open else None
            rows.append(SagaRow(first, thread.head if thread else head, saga, bool(is_open)))
        return rows

    def wait(self, size: int, timeout: float) -> bool:
        end = monotonic() + timeout
        with self._grew:
            self._waiting += 1
        try:
            while True:
                self.refresh()
                left = end - monotonic()
                if self._size > size or left <= 0:
                    return self._size > size
                with self._grew:
                    if self._size <= size:
                        self._grew.wait(min(left, POLL_S))
        finally:
            with self._grew:
                self._waiting -= 1

    def now(self) -> Now:
        return self._chain.now(self.clock)

    def head(self) -> tuple[int, bytes]:
        """Size and RFC 6962 root, as last read."""
        with self._holding():
            return self._chain.size, self._chain.tree.root()

    def signed(self) -> Head | None:
        """The newest signed head in the file: size, root, signature."""
        with self._holding():
            return self._newest_signature()

    @property
    def keeping(self) -> Keeping:
        """Holds, seals, erasures and copies, as last read; inside a decision, as of now."""
        return self._chain.keeping

    def anchored(self) -> int:
        """Up to which size this process has anchored the head."""
        return self._anchored

    def image(self) -> tuple[bytes, bytes]:
        with self._holding():
            return self.view.dump(), self._chain.dump()

    def standing(self) -> bytes:
        """The chain as bytes."""
        return self.image()[1]

    def sign_head(self) -> None:
        """Sign the head now, on the disk, and anchor it. Raises LogHeld."""
        self._usable()
        self.flush()
        with self._holding(), _speaking():
            self._ready()
            if not self._sign(HELD_S, memo=False):
                raise self._held()

    def is_open(self, saga: str) -> bool:
        return saga in self._chain.threads

    def settle(self) -> int:
        self.sign_head()
        sizes = getattr(self.identity, "remembered", None)  # a device that remembers heads in several places
        self._remembered = set(sizes()) if sizes else set()
        return self._anchored

    def shrink(self, pages: int = 1024) -> int:
        self._usable()
        self.flush()
        before = self.bytes()
        while self._shrinks(pages):
            pass
        return max(0, before - self.bytes())

    def bytes(self) -> int:
        """Of the file and its -wal."""
        return _size(self._main) + _size(self._wal)

    def room(self) -> Room:
        """How large the files are."""
        free = self.rows("pragma freelist_count", ())[0][0]
        return Room(self.bytes(), _size(self._wal), free * self.rows("pragma page_size", ())[0][0])

    def _shrinks(self, pages: int) -> bool:
        """One piece: move that many pages from the end of the file into its holes, and cut it off. False: there are no
        more holes, or somebody reads what was before, and the -wal would only grow."""
        with self._holding(), _speaking():
            db = self._ready()
            db.deadline = monotonic() + HELD_S
            holes = db.pragma("freelist_count")
            if holes:
                db.run(f"pragma incremental_vacuum({pages})").fetchall()
            self._checkpoint()
            return 0 < db.pragma("freelist_count") < holes and not db.frames

    def truncate(self) -> None:
        """Move everything into the database file and leave nothing in the -wal. Raises LogHeld."""
        self._usable()
        self.flush()
        with self._holding(), _speaking():
            db = self._ready()
            db.deadline = monotonic() + HELD_S
            try:
                db.db.wal_checkpoint("main", apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except apsw.BusyError:
                raise self._held() from None
            _preallocate(db, self._wal)

    # -- finishing an erasure -----------------------------------------------------------------------------------------

    def finish_erasing(self, patience: float = 0.0) -> Erasure:
        self._usable()
        self.flush()
        self.refresh()
        end = monotonic() + patience
        while True:
            said = self._try_to_erase()
            if said.done or monotonic() >= end:
                return said
            sleep(0.02)

    def _finish(self) -> float | None:
        """On the log's own thread: seconds until the next try to finish an erasure; None if there is none."""
        keeping = self._chain.keeping
        if not self._write or self._closed or self._stale or not keeping.unfinished:
            return None
        if keeping.erasing != self._erase_upto:  # more may come directly after it
            self._erase_upto, self._erase_after = keeping.erasing, ERASE_FIRST_S
            self._erase_at = monotonic() + ERASE_FIRST_S
        pause = self._erase_at - monotonic()
        if pause > 0:
            return pause
        self._erase_after = min(2 * self._erase_after, ERASE_LAST_S)
        self._erase_at = monotonic() + self._erase_after
        self._try_to_erase()
        return self._erase_after

    def _try_to_erase(self) -> Erasure:
        """Once: empty the -wal, look through the pages, and say so in the transaction that finds the -wal still empty:
        of what is cached anywhere nothing outlives that commit."""
        with self._holding(), _speaking():  # what another thread is still committing is not done
            upto = self._chain.keeping.erasing
            if not self._chain.keeping.unfinished:
                return Erasure(True)
            emptied = not self._converts() and self._emptied()
        suspects = self._suspects() if emptied else []
        for _ in range(ERASE_TRIES if emptied else 0):
            waiter = _Waiter(DURABLE)
            waiter.bell = threading.Lock()
            waiter.bell.acquire()
            with self._holding(), _speaking():
                if not self._emptied():
                    break
                self._queue.appendleft((self._erased(upto, suspects), waiter))
                self._urgent = DURABLE
                self._batch(HELD_S)
                assert self._db is not None
                _preallocate(self._db, self._wal)
            if isinstance(waiter.answer, list):
                return Erasure(True)
            if waiter.answer is None:
                break
            if not isinstance(waiter.answer, _WroteOn):
                raise waiter.answer
        return self.erasure()

    def _emptied(self) -> bool:
        """Whether the -wal is empty now. The lock is held. Where old pages are read this is seen without keeping others
        from writing; whoever reads the newest ones is waited for a moment."""
        db = self._ready()
        db.deadline = 0.0
        try:
            there, moved = db.db.wal_checkpoint("main", apsw.SQLITE_CHECKPOINT_PASSIVE)
            if there != moved:
                return False
            db.deadline = monotonic() + EMPTY_S
            db.db.wal_checkpoint("main", apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except (apsw.BusyError, apsw.LockedError):
            return False
        db.frames, self._checkpoint_at = 0, FULL_FRAMES
        return True

    def _converts(self) -> bool:
        """Whether older openings still lie as they did before they are sealed."""
        assert self._db is not None
        return bool(self._db.one("select count(*) from sqlite_schema where name = 'sealing'"))

    def _erased(self, upto: int, suspects: list[int]) -> Decide:
        """Says that an erasure is done, if nobody has written since the -wal was emptied: then nobody moves pages while
        this transaction lasts, and those that still hold something are cleaned in their place."""

        def decide(view: Any, now: Now) -> Sequence[Draft]:
            assert self._db is not None
            if self._chain.keeping.erased >= upto:
                return ()
            if _size(self._wal):
                raise _WroteOn("Others wrote on.")
            if suspects:
                self._clean(suspects)
                self._db.run("pragma shrink_memory")  # what we have at hand of them is from before
            return (Draft(ERASED, {"upto": upto}, up=True),)

        return decide

    def _file(self, *, write: bool) -> apsw.VFSFile:
        """The database file beneath SQLite, opened by SQLite's own layer, which keeps this process's locks."""
        vfs = self._db.db.open_vfs if self._db is not None else ""
        flags = apsw.SQLITE_OPEN_MAIN_DB | (apsw.SQLITE_OPEN_READWRITE if write else apsw.SQLITE_OPEN_READONLY)
        return apsw.VFSFile(vfs, self.path, [flags, 0])

    def _suspects(self) -> list[int]:
        """The pages that may hold what was destroyed in their unused room. Others may write on meanwhile."""
        file, found = self._file(write=False), []
        try:
            pages = file.xFileSize() // PAGE_SIZE
            if pages >= PAGES_MOST:
                return []
            for first in range(0, pages, PAGES_READ):
                block = file.xRead(min(PAGES_READ, pages - first) * PAGE_SIZE, first * PAGE_SIZE)
                for place in range(0, len(block), PAGE_SIZE):
                    number = first + place // PAGE_SIZE
                    if not mapped(number) and suspect(block[place : place + PAGE_SIZE], not number):
                        found.append(number)
        finally:
            file.xClose()
        return found

    def _clean(self, numbers: list[int]) -> None:
        """Write zeros into the unused room of these pages. A power cut in the middle leaves some of it as it was."""
        file = self._file(write=True)
        try:
            for number in numbers:
                clean = cleaned(file.xRead(PAGE_SIZE, number * PAGE_SIZE), not number)
                if clean is not None:
                    file.xWrite(clean, number * PAGE_SIZE)
            file.xSync(apsw.SQLITE_SYNC_FULL)
        finally:
            file.xClose()

    def erasure(self) -> Erasure:
        with self._holding():
            if not self._chain.keeping.unfinished:
                return Erasure(True)
        return self.pinned()

    def pinned(self) -> Erasure:
        """Who reads, or writes, at this moment, and so keeps the -wal from being emptied."""
        file = _inode(self._main + b"-shm")
        if _statx is None or len(file) != 16:
            return Erasure(False, (), told=False)
        order: Any = sys.byteorder
        inode, major, minor = (int.from_bytes(file[at : at + wide], order) for at, wide in ((0, 8), (8, 4), (12, 4)))
        return pins_of(inode, (major, minor))

    def close(self) -> None:
        if self._closed:
            return
        if self._write and self._db is not None:
            self.flush()
            if self._chain.keeping.unfinished and not self._stale:
                with suppress(AmendsError, apsw.Error):
                    self.finish_erasing()
        with self._lock:
            self._closed = True
            try:
                if self._write and self._db is not None and not self._stale:
                    if not self._sign(1.0, memo=self._chain.size - self._memo_at >= MEMO_CLOSE):
                        self._say("Another process keeps the log: its head was left unsigned.")
            except Exception as error:
                self._say(f"The head could not be signed at the end: {error}")
            finally:
                gone = Closed("This log was closed.")
                self._owed.extend((waiter, copy(gone)) for _, waiter in self._queue)
                self._queue.clear()
                self._pay()
                with self._read_lock:
                    self._close_connections()
        self._bell.ring()
        self._told_waiting()


class _WroteOn(Refused):
    """Somebody wrote between emptying the -wal and saying so."""


def _cut(db: Any, log: Any, entry: Entry) -> None:
    """Destroy the openings that a redaction names: each lies in the row of its record."""
    gone: dict[int, set[int]] = {}
    for seq, place in entry.places:
        gone.setdefault(seq, set()).add(place)
    for seq, places in gone.items():
        [(line, cell)] = db.run("select line, open from entry where seq = ?", (seq,)).fetchall()
        db.run("update entry set open = ? where seq = ?", (without(cell, read(line).c, places), seq))


ACTS[REDACTED] = _cut


def _compacts(db: Any, log: Any, entry: Entry) -> None:
    """A compaction takes its runs out of the file. No memo may stand on them, nor before them."""
    taken = gaps.examine(log, entry.runs, log._anchored)
    if len(taken.hashes) != entry.count:
        raise Illegal(f"{entry.kind} removes {len(taken.hashes)} records and says {entry.count}.")
    _drop_keys(db, log, taken.firsts)
    gaps.remove(db, entry.runs, taken, log._remembered | {copy.size for copy in log.keeping.copies})
    db.run("delete from memo")
    log._write_memo()
    log._checkpoint_at = 0  # directly after the commit: the file is to become smaller, and not its -wal larger


def _drop_keys(db: Any, log: Any, firsts: Iterable[int]) -> None:
    """No key is left under the id of a saga that was forgotten: another one by that id had one, until it went too."""
    if log.keeping.forgotten and db.one("select count(*) from sqlite_schema where name = 'datakey'"):
        sagas = {saga for first in firsts for (saga,) in db.run("select saga from saga where first = ?", (first,))}
        db.many("delete from datakey where saga = ?", [(saga,) for saga in sagas.intersection(log.keeping.forgotten)])


ACTS[COMPACTED] = _compacts


def _row_cell(row: Row) -> bytes | None:
    return _cell(row[3])


def _cell(blob: bytes | None) -> bytes | None:
    """Opening lines as they lie in the file."""
    return blob if blob is None or len(blob) < LEAST else shut(blob)


def _plain(cell: bytes | None) -> bytes | None:
    """Opening lines from their cell. Raises Malformed for one that was altered."""
    return cell if cell is None or cell[:1] == b"[" else unshut(cell)


def view_name(view: Any) -> str:
    """The name its memo goes by."""
    return str(getattr(view, "name", "") or type(view).__name__.lower())


_view_name = view_name


def _outcomes_only(decide: Decide) -> Decide:
    """The decision, if it tells how things stand; with no space left nothing new is begun."""

    def decide_with_no_space(state: Any, now: Any) -> Sequence[Draft]:
        drafts = decide(state, now)
        for draft in drafts:
            follows_up = draft.kind == OPENED and draft.fields.get("of")  # a saga that only undoes what another left
            if draft.kind not in OUTCOMES and not draft.kind.startswith(OUTCOME_FAMILIES) and not follows_up:
                raise _no_space()
        return drafts

    return decide_with_no_space


_NO_SPACE = (
    "No space is left on the disk: only outcomes, unwinding and halts are written until there is, as far as they fit."
)


def _no_space() -> DiskFull:
    return DiskFull(_NO_SPACE, next="Free some; it goes on by itself.")


def _no_space_at_all() -> DiskFull:
    """Where the reserve never fitted, or is used up."""
    return DiskFull(
        "No space is left on the disk, not even in reserve: nothing could be written, and this was not.",
        next="Free some, and do it again.",
    )


def _spoken(error: BaseException) -> AmendsError:
    """What SQLite said, as one of our errors."""
    if _is_full(error):
        spoken: AmendsError = _no_space_at_all()
    elif isinstance(error, (apsw.BusyError, apsw.LockedError)):
        spoken = LogHeld("Another process keeps the log's file.", next="Look for a stopped process; nothing is lost.")
    elif isinstance(error, (apsw.CorruptError, apsw.NotADBError)):
        spoken = Damaged(f"The database is damaged: {error}.", next="Run `amends verify`.")
    else:
        spoken = TheyErred(f"The log could not be written: {error!r}.", next="Run `amends doctor`.", code="log_failed")
    spoken.__cause__ = error
    return spoken


def _is_about_the_file(error: BaseException) -> bool:
    """Whether an error came from writing, and not from a signal handler or an interrupt that struck meanwhile."""
    if isinstance(error, OSError):
        return error.errno is not None  # a handler's own TimeoutError has none
    return isinstance(error, (AmendsError, apsw.Error, MemoryError))


def _is_full(error: BaseException) -> bool:
    shm = isinstance(error, apsw.IOError) and getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE
    return shm or isinstance(error, apsw.FullError)


@contextmanager
def _speaking() -> Iterator[None]:
    """Errors of SQLite leave as ours."""
    try:
        yield
    except apsw.Error as error:
        raise _spoken(error) from error


def _settle_all(answers: list[tuple[Any, Any]]) -> None:
    for future, answer in answers:
        _settle(future, answer)


def _keep(bell: _Bell, ref: Callable[[], SqliteLog | None]) -> None:
    """The log's own thread: asleep until rung or until something is due; ends with the log."""
    pause: float | None = 0.0
    while True:
        bell.wait(pause)
        log = ref()
        if log is None or log._closed:
            return
        try:
            pause = log._tick()
        except Exception as error:
            log._say(f"The log's thread met an error and goes on: {error!r}")
            pause = 1.0
        del log


# ---- reading before anyone may write --------------------------------------------------------------------------------


class _Leaves:
    """The hashes of a log's tree, as its file holds them."""

    def __init__(self, db: _Db) -> None:
        self._db = db

    def leaf(self, i: int) -> bytes:
        line = self._db.one("select line from entry where seq = ?", (i,))
        if line is None:
            if gaps.removed(self._db, i):
                raise inside(i)
            raise Damaged(f"Record {i} is missing.", next="Run `amends verify`.", seq=i)
        return leaf(line)

    def run(self, n: int) -> bytes:
        root = self._db.one("select data from tile where level = 1 and n = ?", (n,))
        if root is None:
            raise Damaged(f"The root of run {n} is missing.", next="Run `amends verify`.", seq=n * RUN)
        return bytes(root)

    def gaps(self, low: int, high: int) -> list[Stub]:
        return gaps.stubs(self._db, low, high)


class Peek(_Leaves):
    """A database as the guard at open sees it: sizes and hashes, nothing folded, nothing written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(_Db(os.fspath(path), False))
        self._db.pragma("query_only", 1)
        self._empty = not self._db.pragma("application_id")

    @property
    def size(self) -> int:
        return 0 if self._empty else (self._db.one("select coalesce(max(seq), -1) from entry") or 0) + 1

    def genesis(self) -> Entry | None:
        line = None if self._empty else self._db.one("select line from entry where seq = 0")
        return read(line) if line is not None else None

    def close(self) -> None:
        self._db.close()


def open_read(path: str | os.PathLike[str]) -> Peek:
    """Look at a log's file. Raises Malformed, TooNew, Damaged, HomeRefused; close it."""
    return Peek(path)


def copy_into(path: str | os.PathLike[str], target: str | os.PathLike[str], *, keys: bool) -> None:
    """Copy one snapshot of a log's file into the empty file `target`, while others write on; without the sagas' keys
    unless `keys`. Raises DiskFull, LogHeld, Damaged."""
    with _speaking():
        db = _Db(os.fspath(path), False)
        try:
            db.run("vacuum into ?", (os.fspath(target),))
        finally:
            db.close()
        copy = _Db(os.fspath(target), False)
        try:
            copy.pragma("secure_delete", 1)
            if not keys and copy.one("select count(*) from sqlite_schema where name = 'datakey'"):
                copy.run("delete from datakey")
        finally:
            copy.close()


# ---- forking and leaving --------------------------------------------------------------------------------------------

_logs: weakref.WeakSet[SqliteLog] = weakref.WeakSet()
_stopped = threading.local()  # the logs that a fork by this thread has stopped
_parked: list[Any] = []  # the parent's connections, never closed in a child
_inherited: set[bytes] = set()  # inodes of databases that the parent had open
_kept: list[int] = []  # descriptors that carry a child's own locks; closing one would drop them


def _before_fork() -> None:
    """No connection of ours is in use while the process doubles."""
    _stopped.logs = logs = []
    for log in sorted(_logs, key=id):
        if log._lock.acquire(timeout=5):
            if log._read_lock.acquire(timeout=5):
                logs.append(log)
            else:
                log._lock.release()


def _after_fork_in_parent() -> None:
    for log in _stopped.logs:
        log._read_lock.release()
        log._lock.release()
        if log._queue and not log._lock._is_owned():
            log._slow_down()
    _stopped.logs = []


def _after_fork_in_child() -> None:
    _stopped.logs = []
    for db in list(_open_dbs):
        _parked.append(db)
        _inherited.add(_inode(os.fsencode(db.path)))
    _open_dbs.clear()
    for log in list(_logs):
        log._db = log._reader = None
        log._fresh_locks()


def _own_locks(path: str) -> None:
    """Give this child the locks that SQLite believes it holds.

    SQLite keeps one record of locks per file and process. A child inherits the record with the parent's connections
    but not the locks, so a new connection takes none; once the parent is gone, another process would take the file
    for unused and reset what this one has mapped. The two standing locks of a -wal connection (file format, "locking")
    are therefore taken here, on descriptors that stay open.
    """
    if _inode(os.fsencode(path)) not in _inherited:
        return
    import fcntl

    try:
        for name, start, length in ((path + "-shm", 128, 1), (path, 0x40000002, 510)):
            fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
            _kept.append(fd)
            fcntl.lockf(fd, fcntl.LOCK_SH, length, start)
    except FileNotFoundError:
        raise LogReplaced(f"The files of {path} are gone.", next="Open it in a new process.") from None
    _inherited.discard(_inode(os.fsencode(path)))


def _close_all() -> None:
    for log in list(_logs):
        log.close()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
