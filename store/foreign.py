"""Logs of other origins lie in the same file, under their own names, and are never appended to.

The first to come here is a device's own past: when a home is adopted, the log of the incarnation that was given up
moves over as it is, and the new incarnation's genesis takes its place, in one transaction.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from . import gaps, sqlite
from .chain import Row
from .errors import LogHeld
from .sealing import from_the_start

SCHEMA = (
    """create table fentry(origin text not null, seq integer not null, line blob not null, back integer not null,
       open blob, sig blob, primary key(origin, seq)) strict, without rowid""",
)
GAPS = (
    """create table fstub(origin text not null, start integer not null, level integer not null, hash blob not null,
       primary key(origin, start)) strict, without rowid""",
    """create table fcheckpoint(origin text not null, size integer not null, sig blob not null,
       primary key(origin, size)) strict, without rowid""",
)

_MOVE = "insert into fentry select ?, seq, line, back, open, sig from entry order by seq"


def retire(path: str | os.PathLike[str], origin: str, first: Sequence[Row], sig: bytes) -> None:
    """Move the file's own log under `origin` ("": there is none) and begin a log with the `first` rows; all of it or
    nothing. Of a log that is sealed the keys move along, and what lies in plain text is to be sealed.

    Raises LogHeld if another process keeps the file for 30 s.
    """
    db = sqlite._write_db(os.fspath(path))
    try:
        if not db.begin(sqlite.HELD_S):
            raise LogHeld("Another process keeps writing to the log.", next="End it, then adopt again.")
        if not db.one("select count(*) from sqlite_schema where name = 'fentry'"):
            for table in SCHEMA:
                db.run(table)
        if origin:
            db.run(_MOVE, (origin,))
        for table in ("entry", "tile", "saga", "memo", "pack"):
            db.run(f"delete from {table}")
        for row in first:
            last = sig if row is first[-1] else None
            db.run(sqlite._ENTRY, (row.entry.seq, row.line, row.back, sqlite._cell(row.blob), last))
        _move_gaps(db, origin)
        _move_keys(db, origin)
        if first[-1].entry.seal:
            from_the_start(db, None, first[-1].entry)
        db.run("commit")
    finally:
        db.rollback()
        db.close()


def _move_gaps(db: Any, origin: str) -> None:
    """What is left of the records that were removed before goes with the others, else its root could not be told."""
    if not gaps.there(db):
        return
    if not db.one("select count(*) from sqlite_schema where name = 'fstub'"):
        for table in GAPS:
            db.run(table)
    db.run("insert into fstub select ?, start, level, hash from stub", (origin,))
    db.run("insert into fcheckpoint select ?, size, sig from checkpoint", (origin,))
    db.run("delete from stub")
    db.run("delete from checkpoint")


def _move_keys(db: Any, origin: str) -> None:
    """The wrapped keys of the log that was given up go by its origin; how far it was sealed is looked at anew."""
    if db.one("select count(*) from sqlite_schema where name = 'sealing'"):
        db.run("drop table sealing")
    if db.one("select count(*) from sqlite_schema where name = 'datakey'"):
        db.run("update datakey set saga = ? || ' ' || saga where instr(saga, ' ') = 0", (origin,))
