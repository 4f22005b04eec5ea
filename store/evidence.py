"""One database file as it lies there, in one snapshot, read by somebody who trusts nothing in it.

The log (sqlite.py) reads what it needs and believes its caches; here every row of every table is handed out, with the
file's own complaints, and nothing is interpreted. A look holds a read transaction: others go on writing, and the -wal
is not emptied meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from . import foreign, sqlite
from .entry import Entry, leaf, parse
from .errors import Damaged, Malformed

DatabaseError = sqlite.apsw.Error  # type: ignore[attr-defined]  # one door to apsw: sqlite.py


class Stored(NamedTuple):
    """An entry's row. back: place of its saga's previous entry or -1; blob: the cell of its openings (`squeeze.unshut`
    reads it); sig: root and signature, or its hash, or None."""

    seq: int
    line: bytes
    back: int
    blob: bytes | None
    sig: bytes | None


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


class Evidence:
    """A snapshot of one file. Raises Malformed, Damaged or TooNew if it is not a log that this version knows."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._db = sqlite._Db(os.fspath(path), False)
        except DatabaseError as error:
            raise Damaged(f"{path} cannot be read ({error}).", next="Run `amends verify`.") from None
        try:
            self._db.pragma("query_only", 1)
            self._db.run("begin")
            # a file that lost its -wal before anything was moved over: nothing is in it, not even a table
            self.empty = not self._db.pragma("application_id") and not self.count("sqlite_schema")
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

    def stored(self) -> Iterator[Stored]:
        """Every row of the log in order of its place."""
        sql = "select seq, line, back, open, sig from entry order by seq"
        return map(Stored._make, self._db.db.cursor().execute(sql))

    def leaf(self, i: int) -> bytes:
        """The hash of entry i, made from its line."""
        line = self._db.one("select line from entry where seq = ?", (i,))
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

    def memos(self) -> list[StoredMemo]:
        rows: list[Any] = self._db.run("select view, version, seq, h, blob from memo").fetchall()
        return [StoredMemo(*row) for row in rows]

    def origins(self) -> list[str]:
        """Whose logs lie here beside the device's own."""
        if not self._db.one("select count(*) from sqlite_schema where name = 'fentry'"):
            return []
        return [str(row[0]) for row in self._db.run("select distinct origin from fentry order by origin").fetchall()]

    def stored_of(self, origin: str) -> Iterator[Stored]:
        """Every row of another log, in order of its place."""
        sql = "select seq, line, back, open, sig from fentry where origin = ? order by seq"
        return map(Stored._make, self._db.db.cursor().execute(sql, (origin,)))

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


_OPTIONAL = ("fentry",)


def _schema(db: Any) -> dict[tuple[str, str], tuple[str, str]]:
    rows = db.run("select type, name, tbl_name, coalesce(sql, '') from sqlite_schema").fetchall()
    return {(kind, name): (table, sql) for kind, name, table, sql in rows}


@cache
def _expected() -> dict[tuple[str, str], tuple[str, str]]:
    db = sqlite._Db(":memory:", False)  # not as a writer, who would first make a file of that name
    try:
        for table in (*sqlite._SCHEMA, *foreign.SCHEMA):
            db.run(table)
        return _schema(db)
    finally:
        db.close()
