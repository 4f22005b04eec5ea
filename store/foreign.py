"""Logs of other origins lie in the same file, under their own names, and are never appended to.

The first to come here is a device's own past: when a home is adopted, the log of the incarnation that was given up
moves over as it is, and the new incarnation's genesis takes its place, in one transaction.
"""

from __future__ import annotations

import os

from . import sqlite
from .chain import Row
from .errors import LogHeld

SCHEMA = (
    """create table fentry(origin text not null, seq integer not null, line blob not null, back integer not null,
       open blob, sig blob, primary key(origin, seq)) strict, without rowid""",
)

_MOVE = "insert into fentry select ?, seq, line, back, open, sig from entry order by seq"


def retire(path: str | os.PathLike[str], origin: str, genesis: Row, sig: bytes) -> None:
    """Move the file's own log under `origin` ("": there is none) and begin the log of `genesis`; all of it or nothing.

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
        db.run(sqlite._ENTRY, (0, genesis.line, genesis.back, sqlite._cell(genesis.blob), sig))
        db.run("commit")
    finally:
        db.rollback()
        db.close()
