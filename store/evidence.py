"""What lies there, handed out row by row to somebody who trusts nothing in it: a database file, or a bundle.

`Source` is what whoever examines asks for. `Evidence` is a database, in one snapshot: the log (sqlite.py) reads what it
needs and believes its caches; here every row of every table is handed out, with the file's own complaints, and nothing
is interpreted. A look holds a read transaction: others go on writing, and the -wal is not emptied meanwhile. A bundle
(bundle_evidence.py) is a source too, without caches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

from . import foreign, gaps, sqlite
from .entry import Entry, leaf, parse
from .errors import Damaged, Malformed
from .merkle import RUN, Peaks
from .squeeze import MOST
from .stubs import Stub, inside

__all__ = [
    "ALL",
    "NONE",
    "PLAIN",
    "SEALED",
    "DatabaseError",
    "Evidence",
    "Source",
    "Stored",
    "StoredMemo",
    "StoredSaga",
    "Stub",
    "in_order",
]

DatabaseError = sqlite.apsw.Error  # type: ignore[attr-defined]  # one door to apsw: sqlite.py


class Stored(NamedTuple):
    """An entry's row. back: place of its saga's previous entry or -1, None where nothing is kept beside a record (in a
    bundle); blob: the cell of its openings (plain, compressed or sealed); sig: root and signature, or its hash, or
    None."""

    seq: int
    line: bytes
    back: int | None
    blob: bytes | None
    sig: bytes | None


ALL, PLAIN, SEALED, NONE = "all", "plain", "sealed", "none"


class Source(Protocol):
    """Where the records of one log come from."""

    payload: str
    """Which openings come along: "all" there are (a database), "plain", "sealed", or "none" (missing ones then mean
    nothing)."""

    @property
    def size(self) -> int:
        """How many records there are, removed ones included."""

    def genesis(self) -> Entry | None:
        """The first entry; None if there is none that can be read."""

    def stored(self, start: int = 0) -> Iterator[Stored | Stub]:
        """Records from place `start` on and the stubs of removed ones, in order of place. Raises Malformed, Damaged."""

    def line(self, seq: int) -> bytes | None:
        """One record's bytes; None if it is not there. Asked for few: what a redaction names wrongly, or holds keep."""

    def peaks(self, size: int) -> Peaks:
        """The tree over the first `size` records. Raises Damaged where it cannot be grown; its root proves it."""

    def checkpoints(self) -> Iterator[tuple[int, bytes]]:
        """(size, root and signature) of signatures that lie beside the records, in order of size."""

    def notes(self) -> list[bytes]:
        """Signed notes that came along, with their cosignatures. None of them is trusted."""

    def troubles(self) -> list[tuple[str, str]]:
        """(code of a finding, reason): what is wrong with the file or folder as such."""


_ROW = (int, bytes, int, (bytes, type(None)), (bytes, type(None)))
_STUB = (int, int, bytes)
_SIGNED = (int, bytes)
_MEMO = (str, int, int, bytes, bytes)
_KEY = (str, str, bytes)


def _typed(row: Sequence[Any], types: Sequence[Any]) -> Sequence[Any]:
    """A row whose values are what the table says. Raises Malformed (E_TABLE): whoever can write the file can put any
    value anywhere."""
    if not all(isinstance(value, type) for value, type in zip(row, types, strict=True)):
        raise Malformed("A row in it holds another sort of value than its table does.", finding="E_TABLE")
    return row


class StoredSaga(NamedTuple):
    """A saga's row: place of its first entry, header id, newest place as last written, whether open, whether named."""

    first: int
    saga: str
    head: int
    open: int
    named: int


class StoredMemo(NamedTuple):
    """A memo: of which view, its version, how many entries it has taken in, the hash of the last of them, the image."""

    view: str
    version: int
    size: int
    hash: bytes
    image: bytes


LARGEST = MOST + (1 << 20)
"""Bytes of one value that are read: a cell's, and some for what is beside the openings in it."""


class Evidence:
    """A snapshot of one file. Raises Malformed, Damaged or TooNew if it is not a log that this version knows."""

    payload = ALL

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._db = sqlite._Db(os.fspath(path), False)
        except DatabaseError as error:
            raise Damaged(f"{path} cannot be read ({error}).", next="Run `amends verify`.") from None
        try:
            self._db.pragma("query_only", 1)
            self._db.db.limit(sqlite.apsw.SQLITE_LIMIT_LENGTH, LARGEST)  # type: ignore[attr-defined]
            self._db.run("begin")
            # a file that lost its -wal before anything was moved over: nothing is in it, not even a table
            self.empty = not self._db.pragma("application_id") and not self.count("sqlite_schema")
            self._shaped()
            last = None if self.empty else self._db.one("select max(seq) from entry")
        except sqlite.apsw.SQLError as error:  # type: ignore[attr-defined]
            self.close()
            raise Malformed(f"{path} holds no log ({error}).", finding="E_TABLE") from None
        except DatabaseError as error:
            self.close()
            raise Damaged(f"{path} cannot be read ({error}).", next="Run `amends verify`.") from None
        except BaseException:
            self.close()
            raise
        self.size: int = 0 if last is None else last + 1

    def _shaped(self) -> None:
        """Nothing is read from a view, or from a table of another shape: it could be of any length, or of any type."""
        ours = {name: (kind, shape) for (kind, name), shape in _expected().items() if kind == "table"}
        for (kind, name), shape in _schema(self._db).items():
            if name in ours and ours[name] != (kind, shape):
                raise Malformed(f"The {kind} {name} has another shape than a log's.", finding="E_TABLE")

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Evidence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the log ------------------------------------------------------------------------------------------------------

    def genesis(self) -> Entry | None:
        """The first entry; None if there is none that can be read."""
        line = self._db.one("select line from entry where seq = 0")
        try:
            return None if line is None else parse(line)
        except Malformed:
            return None

    def stored(self, start: int = 0) -> Iterator[Stored | Stub]:
        """Every row of the log from `start` on, and the stubs, in order of place."""
        sql = "select seq, line, back, open, sig from entry where seq >= ? order by seq"
        rows = self._rows(sql, (start or -(1 << 63),))
        return in_order(rows, self.stubs(start)) if self._has("stub") else rows

    def stubs(self, start: int = 0) -> Iterator[Stub]:
        """What is kept of removed records, in order."""
        if not self._has("stub"):
            return iter(())
        sql = "select start, level, hash from stub where start >= ? order by start"
        return self._stubs(sql, (start or -(1 << 63),))

    def _rows(self, sql: str, bindings: tuple[Any, ...]) -> Iterator[Stored]:
        return (Stored._make(_typed(row, _ROW)) for row in self._db.db.cursor().execute(sql, bindings))

    def _stubs(self, sql: str, bindings: tuple[Any, ...]) -> Iterator[Stub]:
        return (Stub._make(_typed(row, _STUB)) for row in self._db.db.cursor().execute(sql, bindings))

    def _signed(self, sql: str, bindings: tuple[Any, ...] = ()) -> Iterator[tuple[int, bytes]]:
        for row in self._db.db.cursor().execute(sql, bindings):
            size, sig = _typed(row, _SIGNED)
            yield size, sig

    def line(self, seq: int) -> bytes | None:
        line: bytes | None = self._db.one("select line from entry where seq = ?", (seq,))
        return line

    def peaks(self, size: int) -> Peaks:
        """From the stored roots of full runs and what lies after them."""
        runs = size // RUN
        sql = "select n, data from tile where level = 1 and n < ? order by n"
        found = self._db.run(sql, (runs,)).fetchall()
        if [n for n, _ in found] != list(range(runs)) or any(len(data) != 32 for _, data in found):
            raise Damaged(f"The roots of the first {runs} runs are not all there.", next="Run `amends verify`.")
        tree = Peaks.restore([data for _, data in found], [])
        for row in self.stored(runs * RUN) if size % RUN else ():
            if isinstance(row, Stub):
                place, width = row.start, 1 << row.level if 0 <= row.level < 8 else RUN
            else:
                place, width = row.seq, 1
            if place != tree.size or place + width > size:
                break
            tree.skip(row.level, row.hash) if isinstance(row, Stub) else tree.extend([leaf(row.line)])
            if tree.size == size:
                break
        if tree.size != size:
            raise Damaged(f"The tree of the first {size} records cannot be grown: some are removed.", seq=tree.size)
        tree.runs.clear()
        return tree

    def checkpoints(self) -> Iterator[tuple[int, bytes]]:
        """Signatures of removed records, in order of the size that they are over."""
        if not self._has("checkpoint"):
            return iter(())
        return self._signed("select size, sig from checkpoint order by size")

    def notes(self) -> list[bytes]:
        return []

    def troubles(self) -> list[tuple[str, str]]:
        return [("E_TABLE", reason) for reason in self.strangers()] + [
            ("E_FILE", reason) for reason in self.complaints()
        ]

    def gaps(self, low: int, high: int) -> list[Stub]:
        """The stubs that have records among low <= seq < high."""
        return gaps.stubs(self._db, low, high)

    def leaf(self, i: int) -> bytes:
        """The hash of entry i, made from its line."""
        line = self._db.one("select line from entry where seq = ?", (i,))
        if line is None and gaps.removed(self._db, i):
            raise inside(i)
        if line is None:
            raise Damaged(f"Record {i} is missing.", next="Run `amends verify`.", seq=i)
        return leaf(line)

    def run(self, n: int) -> bytes:
        """The stored root of the n-th full run of 256."""
        data = self.stored_run(n)
        if data is None or len(data) != 32:
            raise Damaged(f"Run {n} of the tree is missing.", next="Run `amends verify`.", seq=n * 256)
        return data

    # -- beside the log -----------------------------------------------------------------------------------------------

    def stored_run(self, n: int) -> bytes | None:
        data: bytes | None = self._db.one("select data from tile where level = 1 and n = ?", (n,))
        return data

    def count(self, table: str) -> int:
        """How many rows one of our tables has."""
        rows: int = self._db.one(f'select count(*) from "{table}"')
        return rows

    def saga(self, first: int) -> StoredSaga | None:
        row = self._db.run("select first, saga, head, open, named from saga where first = ?", (first,)).fetchone()
        return StoredSaga(*row) if row else None

    def datakey(self, saga: str) -> tuple[str, bytes] | None:
        """Under which owner's key a saga's own key lies here, and its wrapped bytes."""
        if not self._has("datakey"):
            return None
        row = self._db.run("select seal, wrapped from datakey where saga = ?", (saga,)).fetchone()
        if row is None:
            return None
        owner, wrapped = _typed(row, _KEY[1:])
        return owner, wrapped

    def datakeys(self) -> int:
        """How many sagas' keys lie here."""
        return self.count("datakey") if self._has("datakey") else 0

    def datakey_rows(self) -> Iterator[tuple[str, str, bytes]]:
        """Every one of them: saga, id of the owner's key, wrapped bytes."""
        if not self._has("datakey"):
            return
        for row in self._db.db.cursor().execute("select saga, seal, wrapped from datakey order by saga"):
            saga, seal, wrapped = _typed(row, _KEY)
            yield saga, seal, wrapped

    def line_of(self, origin: str, seq: int) -> bytes | None:
        """One record of another log."""
        line: bytes | None = self._db.one("select line from fentry where origin = ? and seq = ?", (origin, seq))
        return line

    def memos(self) -> list[StoredMemo]:
        rows: list[Any] = self._db.run("select view, version, seq, h, blob from memo").fetchall()
        return [StoredMemo(*_typed(row, _MEMO)) for row in rows]

    def origins(self) -> list[str]:
        """Whose logs lie here beside the device's own."""
        if not self._has("fentry"):
            return []
        return [str(row[0]) for row in self._db.run("select distinct origin from fentry order by origin").fetchall()]

    def stored_of(self, origin: str) -> Iterator[Stored | Stub]:
        """Every row of another log, and its stubs, in order of place."""
        sql = "select seq, line, back, open, sig from fentry where origin = ? order by seq"
        rows = self._rows(sql, (origin,))
        if not self._has("fstub"):
            return rows
        sql = "select start, level, hash from fstub where origin = ? order by start"
        return in_order(rows, self._stubs(sql, (origin,)))

    def checkpoints_of(self, origin: str) -> Iterator[tuple[int, bytes]]:
        """Signatures of another log's removed records."""
        if not self._has("fcheckpoint"):
            return iter(())
        sql = "select size, sig from fcheckpoint where origin = ? order by size"
        return self._signed(sql, (origin,))

    @cached_property
    def _tables(self) -> frozenset[str]:
        return frozenset(str(row[0]) for row in self._db.run("select name from sqlite_schema").fetchall())

    def _has(self, table: str) -> bool:
        return table in self._tables

    # -- the file -----------------------------------------------------------------------------------------------------

    def strangers(self) -> list[str]:
        """What the file holds that is not ours, or lacks, or has in another shape."""
        wrong = []
        if (ours := self._db.pragma("application_id")) != sqlite.APPLICATION_ID:
            wrong.append(f"its application id is {ours}")
        if (version := self._db.pragma("user_version")) != sqlite.SCHEMA_VERSION:
            wrong.append(f"its schema version is {version}")
        here = _schema(self._db)
        wrong += [f"{kind} {name} is not ours" for kind, name in sorted(here.keys() - _expected().keys())]
        for (kind, name), sql in _expected().items():
            if name not in _OPTIONAL and (kind, name) not in here:
                wrong.append(f"{kind} {name} is missing")
            elif (kind, name) in here and here[kind, name] != sql:
                wrong.append(f"{kind} {name} has another shape")
        return wrong

    def complaints(self) -> list[str]:
        """What SQLite itself says about its pages, rows and indexes."""
        return [str(row[0]) for row in self._db.run("pragma integrity_check(10)").fetchall() if row[0] != "ok"]


_OPTIONAL = ("fentry", "fstub", "fcheckpoint", "stub", "checkpoint", "datakey", "sealing")


def in_order(rows: Iterable[Stored], stubs: Iterator[Stub]) -> Iterator[Stored | Stub]:
    """Records and stubs, each in order, as one in order of place; a stub before a record of the same place."""
    stub = next(stubs, None)
    for row in rows:
        while stub is not None and stub.start <= row.seq:
            yield stub
            stub = next(stubs, None)
        yield row
    while stub is not None:
        yield stub
        stub = next(stubs, None)


def _schema(db: Any) -> dict[tuple[str, str], tuple[str, str]]:
    rows = db.run("select type, name, tbl_name, coalesce(sql, '') from sqlite_schema").fetchall()
    return {(kind, name): (table, sql) for kind, name, table, sql in rows}


@cache
def _expected() -> dict[tuple[str, str], tuple[str, str]]:
    from .sealing import SEALING  # made when they are first needed, and looked at only here

    db = sqlite._Db(":memory:", False)  # not as a writer, who would first make a file of that name
    try:
        for table in (*sqlite._SCHEMA, *foreign.SCHEMA, *foreign.GAPS, *gaps.SCHEMA, sqlite.DATA_KEYS, SEALING):
            db.run(table)
        return _schema(db)
    finally:
        db.close()
