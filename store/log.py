"""The log port: one way in (commit a decision), a few ways to read, and the same words for memory and for a file.

A decision runs against the fold of everything appended so far, inside the write transaction, and answers with facts.
When `commit` returns, they are in the log as durably as was asked. A decision that refuses leaves its neighbours alone.

`MemoryLog` keeps everything in this process and promises nothing beyond it. `Overlay` starts where another log
stands and writes only in memory: what a dry run needs. `sqlite.py` is the log in a file. One contract suite
(tests/log_contract.py) holds for all three.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from .cells import kept, present
from .chain import Chain, Decide, Draft, Row, Spoiled
from .clock import Clock, Now, SystemClock
from .entry import Entry, leaf
from .errors import Closed, NotFound
from .facts import COMPACTED, ERASED, GENESIS, REDACTED
from .fold import View
from .keeping import Keeping
from .pins import Erasure
from .stubs import inside

if TYPE_CHECKING:
    import asyncio  # 40 ms, for those who have a loop

T = TypeVar("T")

LISTED = "`amends log` lists what there is."
BUFFERED, FILED, DURABLE = 0, 1, 2
"""How safe a commit is when it returns: in this process's memory · in the file (survives a kill) · on the disk."""


class Record(NamedTuple):
    """An entry as read back: the entry, its line verbatim, its opening lines (None where there are none left).

    withheld: why openings that lie in the file under seal are not among them, a word of seal.WITHHELD; else empty.
    """

    entry: Entry
    line: bytes
    blob: bytes | None
    withheld: str = ""


class SagaRow(NamedTuple):
    """A saga as listed: seq of its first and newest entry, header id, whether it is open."""

    first: int
    head: int
    saga: str
    open: bool


class Log(Protocol):
    """One device's append-only log. `view` is the fold, current after any commit or `refresh`: ask for it each time,
    since a fold that was spoiled is replaced by a new one."""

    origin: str
    view: Any
    clock: Clock

    @property
    def size(self) -> int:
        """How many entries there are."""

    def commit(self, decide: Decide, sync: int = DURABLE) -> list[Entry]:
        """Run `decide` in the write transaction, block until its facts are as safe as `sync` says, return them.

        Raises whatever `decide` raised (nothing of it is written then), LogHeld, LogReplaced, DiskFull."""

    def acommit(self, decide: Decide, sync: int = DURABLE) -> asyncio.Future[list[Entry]]:
        """The same for a running event loop. A decision handed in is never withdrawn by cancelling its future."""

    def append(self, decide: Decide) -> None:
        """Hand in facts nobody waits for: they ride with the next commit, or are flushed within 20 ms. A refusal is
        said as a warning."""

    def flush(self) -> None:
        """Write what was appended."""

    def refresh(self) -> None:
        """Fold what other processes have appended. Raises Closed."""

    def glance(self) -> None:
        """The same where it costs next to nothing: not while somebody commits, who does it anyway, and without writing
        what was appended here."""

    def look(self, question: Callable[[Any, Now], T]) -> T:
        """Put a question to the fold as last read, with no fact half folded: for threads that read while others commit.
        Facts whose commit is still under way may be in it."""

    def now(self) -> Now:
        """The clocks as the next fact would see them."""

    def records(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Entries start <= seq < stop in order, read a page at a time: no reader pins the file."""

    def lines(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[Entry, bytes]]:
        """Entries and their lines as `records` gives them, without openings. Places that are left out were removed."""

    def record(self, seq: int) -> Record:
        """One entry. Raises NotFound; code `compacted` if it was removed."""

    def stands(self, seq: int, line: bytes) -> bool:
        """Whether what comes after this place says that this line stands there; True for the newest, of which nothing
        does."""

    def is_open(self, saga: str) -> bool:
        """Whether a saga has begun and not ended, as last read; inside a decision, as of now."""

    def settle(self) -> int:
        """Sign the head and remember it outside the log; the size of the newest that is remembered. Raises LogHeld."""

    def anchored(self) -> int:
        """The size of the newest head that this log is known to be remembered by."""

    def shrink(self, pages: int = 1024) -> int:
        """Give room that is not used any more back to the disk, so many pages of 4 KiB at a time; how many bytes."""

    def thread(self, saga: str, *, named: bool = False) -> list[Record]:
        """Every entry of a saga in order, open or ended; empty if unknown. named: only if its first entry has an
        opening, which an index answers; for others that have ended, every saga ever begun may have to be looked at."""

    def places(self, seq: int) -> tuple[int, ...]:
        """Which openings of a record are there, by their places in its `c`: it takes no key. Raises NotFound."""

    def sagas(self, *, open_only: bool = False, before: int | None = None, limit: int | None = None) -> list[SagaRow]:
        """Sagas, newest first; `before` is the `first` of the last row of the page before."""

    @property
    def keeping(self) -> Keeping:
        """Holds, seals, erasures and copies, as last read; inside a decision, as of now."""

    @property
    def shut(self) -> bool:
        """Whether the log is sealed and its key is not here: then no opening can be written."""

    def finish_erasing(self, patience: float = 0.0) -> Erasure:
        """See to it that nothing of what was destroyed is left where the log lies, say so in the log, and whether it is
        done; else who is in the way. Tries for `patience` seconds. Raises LogHeld, DiskFull, Closed."""

    def erasure(self) -> Erasure:
        """The same, as last read: nothing is tried."""

    def wait(self, size: int, timeout: float) -> bool:
        """Wait until there are more than `size` entries, at most `timeout` seconds; say whether there are. Raises
        Closed, also to whoever waits while the log is closed."""

    def image(self) -> tuple[bytes, bytes]:
        """The view and the chain as bytes, both of one moment (`View.dump`, `Chain.dump`)."""

    def close(self) -> None:
        """Sign the head, anchor it, let go."""


class MemoryLog:
    """A log that lives and dies with its process."""

    def __init__(
        self,
        view: View,
        *,
        clock: Clock | None = None,
        origin: str = "amends.local/memory",
    ) -> None:
        self.origin = origin
        self.clock: Clock = clock or SystemClock()
        self.warnings: list[str] = []
        self._lock = threading.RLock()
        self._grew = threading.Condition(self._lock)
        self._closed = self._deciding = False
        self._rows: list[Row | None] = []  # None: removed
        self._hashes: dict[int, bytes] = {}  # of removed rows, for the tree
        self._seqs: dict[str, list[int]] = {}  # saga -> seqs of its entries
        self._begin(view)
        self._base = self._chain.size
        if not self._base:
            with self._lock:
                self._run(lambda view, now: (Draft(GENESIS, {"v": 1}),))

    def _begin(self, view: View) -> None:
        """Stand where this log starts, with an empty view of its own."""
        self.view: Any = known(view, self)
        self._chain = Chain(self.view)

    @property
    def size(self) -> int:
        return self._base + len(self._rows)

    def commit(self, decide: Decide, sync: int = DURABLE) -> list[Entry]:
        with self._lock:
            if self._closed:
                raise Closed("This log is closed.")
            if self._deciding:
                raise Closed("A decision answers with facts; it does not commit them itself.", code="inside")
            rows, _ = self._chain.take_clock(self.clock)
            self._keep(rows)
            return self._run(decide)

    def _run(self, decide: Decide) -> list[Entry]:
        self._deciding = True
        try:
            rows, [(_, answer)] = self._chain.take([(decide, decide)], self._chain.now(self.clock))
        except Spoiled as spoiled:
            self._refold()
            raise spoiled.error from None
        except BaseException:
            self._refold()
            raise
        finally:
            self._deciding = False
        if isinstance(answer, BaseException):
            raise answer
        self._keep(rows)
        return list(answer)

    def _keep(self, rows: list[Row]) -> None:
        self._chain.stored()
        self._rows += rows
        for row in rows:
            if row.entry.saga:
                self._seqs.setdefault(row.entry.saga, []).append(row.entry.seq)
            if row.entry.kind == REDACTED:
                for seq, place in row.entry.places:
                    self._cut(seq, place)
            elif row.entry.kind == COMPACTED:
                self._remove(row.entry.runs)
        self._grew.notify_all()

    def _cut(self, seq: int, place: int) -> None:
        """Destroy an opening."""
        row = self._rows[seq - self._base]
        if row is not None:
            self._rows[seq - self._base] = row._replace(blob=kept(row.blob, row.entry.c, {place}))

    def _remove(self, runs: Sequence[tuple[int, int]]) -> None:
        for first, last in runs:
            for seq in range(max(first, self._base), last + 1):
                row, self._rows[seq - self._base] = self._rows[seq - self._base], None
                if row is not None:
                    self._hashes[seq] = row.hash
                    self._seqs.pop(row.entry.saga, None)

    def _refold(self) -> None:
        """After a half-folded decision: become what the kept rows say."""
        self._begin(fresh(self.view))
        chain, hashes = self._chain, []
        for seq, row in enumerate(self._rows, self._base):
            if row is not None:
                if seq > chain.size:
                    chain.skip(seq, row.entry.prev)
                chain.follow(row.entry, row.line)
            hashes.append(self._hashes[seq] if row is None else row.hash)
        chain.tree.extend(hashes)
        chain.stored()

    def acommit(self, decide: Decide, sync: int = DURABLE) -> asyncio.Future[list[Entry]]:
        import asyncio

        future: asyncio.Future[list[Entry]] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(self.commit(decide, sync))
        except Exception as error:
            future.set_exception(error)
        return future

    def append(self, decide: Decide) -> None:
        try:
            self.commit(decide)
        except Closed:
            raise
        except Exception as error:
            self.warnings.append(not_appended(error))

    def flush(self) -> None:
        pass

    def refresh(self) -> None:
        if self._closed:
            raise Closed("This log is closed.")

    glance = refresh

    def look(self, question: Callable[[Any, Now], T]) -> T:
        with self._lock:
            return question(self.view, self._chain.now(self.clock))

    def now(self) -> Now:
        with self._lock:
            return self._chain.now(self.clock)

    def records(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        with self._lock:
            end = len(self._rows) if stop is None else max(0, stop - self._base)
            rows = self._rows[max(0, start - self._base) : end]
        return (Record(row.entry, row.line, row.blob) for row in rows if row is not None)

    def lines(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[Entry, bytes]]:
        return ((record.entry, record.line) for record in self.records(start, stop))

    def record(self, seq: int) -> Record:
        for record in self.records(seq, seq + 1) if seq >= 0 else ():
            return record
        raise inside(seq) if 0 <= seq < self.size else NotFound(f"There is no record {seq}.", next=LISTED)

    def stands(self, seq: int, line: bytes) -> bool:
        for entry, _ in self.lines(seq + 1, seq + 2):
            return entry.prev == leaf(line).hex()
        return True  # nothing alters a removed row's neighbour here

    def is_open(self, saga: str) -> bool:
        return saga in self._chain.threads

    def settle(self) -> int:
        return self.size

    def anchored(self) -> int:
        return self.size

    def shrink(self, pages: int = 1024) -> int:
        return 0

    def places(self, seq: int) -> tuple[int, ...]:
        record = self.record(seq)
        return present(record.blob, record.entry.c)

    def thread(self, saga: str, *, named: bool = False) -> list[Record]:
        with self._lock:
            rows = [self._rows[seq - self._base] for seq in self._seqs.get(saga, ())]
        return [Record(row.entry, row.line, row.blob) for row in rows if row is not None]

    def sagas(self, *, open_only: bool = False, before: int | None = None, limit: int | None = None) -> list[SagaRow]:
        return chosen(self._saga_rows(), open_only, before, limit)

    def _saga_rows(self) -> list[SagaRow]:
        with self._lock:
            return [SagaRow(s[0], s[-1], saga, saga in self._chain.threads) for saga, s in self._seqs.items()]

    @property
    def keeping(self) -> Keeping:
        return self._chain.keeping

    @property
    def shut(self) -> bool:
        return False  # what lies in memory is never sealed

    def finish_erasing(self, patience: float = 0.0) -> Erasure:
        def decide(view: Any, now: Now) -> list[Draft]:
            keeping = self.keeping
            return [Draft(ERASED, {"upto": keeping.erasing}, up=True)] if keeping.unfinished else []

        self.commit(decide)
        return Erasure(True)

    def erasure(self) -> Erasure:
        return Erasure(not self.keeping.unfinished)

    def wait(self, size: int, timeout: float) -> bool:
        with self._grew:
            self._grew.wait_for(lambda: self.size > size or self._closed, timeout)
            self.refresh()  # of a closed log nothing is to be waited for, and whoever waits in a loop is to hear it
            return self.size > size

    def head(self) -> tuple[int, bytes]:
        """Size and RFC 6962 root."""
        with self._lock:
            return self.size, self._chain.tree.root()

    def image(self) -> tuple[bytes, bytes]:
        with self._lock:
            return self.view.dump(), self._chain.dump()

    def standing(self) -> bytes:
        """The chain as bytes."""
        return self.image()[1]

    def close(self) -> None:
        with self._grew:
            self._closed = True
            self._grew.notify_all()


class Overlay(MemoryLog):
    """What would happen if: starts at another log's head, folds and keeps its own facts in memory only.

    What the other log takes in later is not seen.
    """

    def __init__(self, base: Any) -> None:
        self._under = base
        self._image: tuple[bytes, bytes] = base.image()
        super().__init__(fresh(base.view), clock=base.clock, origin=base.origin)
        self._below: dict[int, set[int]] = {}  # what was destroyed here, of records of the other log
        self._opened_below = {saga: thread.head for saga, thread in self._chain.threads.items()}

    def _begin(self, view: View) -> None:
        view_image, chain_image = self._image
        view.load(view_image)
        super()._begin(view)
        self._chain.load(chain_image)

    def records(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        if start < self._base:
            under = self._under.records(start, self._base if stop is None else min(stop, self._base))
            yield from map(self._as_left, under)
        yield from super().records(max(start, self._base), stop)

    def thread(self, saga: str, *, named: bool = False) -> list[Record]:
        under = [record for record in self._under.thread(saga, named=named) if record.entry.seq < self._base]
        return [*map(self._as_left, under), *super().thread(saga)]

    def places(self, seq: int) -> tuple[int, ...]:
        if seq >= self._base:
            return super().places(seq)
        return tuple([place for place in self._under.places(seq) if place not in self._below.get(seq, ())])

    def _cut(self, seq: int, place: int) -> None:
        if seq >= self._base:
            return super()._cut(seq, place)
        self._below.setdefault(seq, set()).add(place)
        return None

    def _as_left(self, record: Record) -> Record:
        gone = self._below.get(record.entry.seq)
        return record._replace(blob=kept(record.blob, record.entry.c, gone)) if gone else record

    def _saga_rows(self) -> list[SagaRow]:
        own = {row.saga: row for row in super()._saga_rows()}
        rows = []
        for row in self._under.sagas():
            head = self._opened_below.get(row.saga)
            if row.first >= self._base:
                continue
            if head is not None and (row.open or row.head >= self._base):  # it has gone on since, or was open all along
                row = row._replace(head=head, open=True)
                if row.saga in own:
                    mine = own.pop(row.saga)
                    row = row._replace(head=mine.head, open=mine.open)
            rows.append(row)
        return [*rows, *own.values()]

    def settle(self) -> int:
        raise Closed("An overlay has no head that could be remembered, and removes nothing.", code="overlay")

    def head(self) -> tuple[int, bytes]:
        raise Closed("An overlay has no root: its facts are not in the log.", code="overlay")


def chosen(rows: list[SagaRow], open_only: bool, before: int | None, limit: int | None) -> list[SagaRow]:
    """The page of sagas that was asked for, newest first."""
    rows = [row for row in rows if (row.open or not open_only) and (before is None or row.first < before)]
    return sorted(rows, reverse=True)[:limit]


def fresh(view: Any) -> Any:
    """An empty view of the same kind."""
    make: Callable[[], Any] = getattr(view, "fresh", type(view))
    return make()


def known(view: Any, log: Any) -> Any:
    """The view, told which log to ask about sagas that have ended, if it asks."""
    if hasattr(view, "archive"):
        view.archive = log
    return view


def not_appended(error: BaseException) -> str:
    """What is said where nobody waits."""
    return f"A fact that nobody waited for was left out: {error}"
