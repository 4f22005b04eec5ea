"""Which records may be removed, and what the file does when they are.

Only whole sagas that have ended go, so that nothing that is left names a thread that is half there, and with them what
is about them and about nothing else (companions.py). Only records below a head that is signed and anchored go, so that
no older copy of the tree's edge needs them; never the newest 256, which every opening reads; nothing under a hold; and
no look at the clocks on which the next boot or step of the clock builds.
`examine` says no before anything is changed, and once more in the transaction that changes it.

Rows and saga rows are deleted; the stubs (stubs.py), the signatures of removed rows, and a memo at the head are written
beside it, all in the transaction of the fact that names the runs (`compaction.made`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .chain import ENDED
from .companions import Companions
from .entry import Entry, leaf, unfinished
from .errors import Illegal, Refused
from .facts import BOOTED, STEPPED
from .redact import Near, held_over, near
from .stubs import Stub, merged

if TYPE_CHECKING:
    from .log import Log

KEPT = 256
"""So many of the newest records are never removed."""

SCHEMA = (
    "create table stub(start integer primary key, level integer not null, hash blob not null) strict",
    "create table checkpoint(size integer primary key, sig blob not null) strict",
)
_OVERLAPPING = """select start, level, hash from stub where start < ? and start >=
    coalesce((select max(start) from stub where start <= ?), 0) order by start"""
_BEFORE = "select start, level, hash from stub where start < ? order by start desc limit 1"
_AT = "select start, level, hash from stub where start = ?"

Runs = Sequence[tuple[int, int]]


# ---- what may go ----------------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """What runs hold. firsts: the first record of each saga; hashes: of every record, in order."""

    firsts: list[int]
    hashes: list[bytes]


def examine(log: Log, runs: Runs, anchored: int) -> Taken:
    """What would be removed. anchored: size of the newest signed head that is remembered outside the file.

    Raises Refused: one code for each reason."""
    _check_places(log, runs, anchored)
    firsts: list[int] = []
    hashes: list[bytes] = []
    told: dict[str, int] = {}  # saga -> records of it so far, 0 once it is whole
    around: dict[str, set[str]] = {}  # saga -> those that it is inside of or follows
    companions = Companions(told)
    for first, last in runs:
        place, clocks = first, False
        for entry, line in log.lines(first, last + 1):
            if entry.seq != place:
                raise _no("removed", place, "was removed already")
            place += 1
            clocks = clocks or bool(entry.up)
            hashes.append(leaf(line))
            if _begins(entry, told):
                firsts.append(entry.seq)
                around[entry.saga] = near(entry)
            if not companions.whose(entry):
                raise _no("no_saga", entry.seq, f"({entry.kind}) is about no saga that goes")
        if place != last + 1:
            raise _no("removed", place, "was removed already")
        if clocks:
            _check_clock(log, runs, last)
    _check_sagas(log, told, around)
    return Taken(firsts, hashes)


def _check_places(log: Log, runs: Runs, anchored: int) -> None:
    before = -1
    for first, last in runs:
        if not before < first <= last:
            raise Illegal("Runs are told in order, and none of them twice.")
        before = last
    if before >= anchored - 1:
        raise _no("not_anchored", before, f"is not below the newest anchored head, which is over {anchored}")
    if before >= log.size - KEPT:
        raise _no("too_new", before, f"is among the newest {KEPT}")


def _begins(entry: Entry, told: dict[str, int]) -> bool:
    """Take in one record; say whether a saga begins with it."""
    saga = entry.saga
    if not saga:
        return False
    before = told.get(saga, 0)
    if entry.n != before + 1:
        raise _no("split_saga", entry.seq, f"is number {entry.n} of saga {saga}, of which {before} would go before it")
    told[saga] = 0 if entry.kind == ENDED and not unfinished(entry) else entry.n
    return not before


def _check_sagas(log: Log, told: dict[str, int], around: Near) -> None:
    for saga, so_far in told.items():
        if so_far:
            raise Refused(f"Saga {saga} would be removed in part, or has not ended.", code="split_saga")
        if log.is_open(saga):
            raise Refused(f"Saga {saga} is open.", code="open_saga")
        hold = held_over(log, saga, around)
        if hold is not None:
            raise Refused(
                f"Saga {saga}, or what it belongs to, is held (record {hold}).",
                next="`amends hold --lift` ends a hold.",
                code="held",
            )


def _check_clock(log: Log, runs: Runs, last: int) -> None:
    """The look at the clocks that comes next must not build on one that goes."""
    gone = iter(runs)
    run = next(gone, None)
    for entry, _ in log.lines(last + 1):
        while run is not None and run[1] < entry.seq:
            run = next(gone, None)
        if run is not None and run[0] <= entry.seq:
            continue
        if entry.kind in (BOOTED, STEPPED):
            raise _no("clock", last, f"is needed for the clocks of record {entry.seq} ({entry.kind})")
        if entry.up:
            return
    raise _no("clock", last, "is the last but for those without a look at the clocks")


def _no(code: str, seq: int, why: str) -> Refused:
    return Refused(f"Record {seq} cannot be removed: it {why}.", code=code)


# ---- reading over them ----------------------------------------------------------------------------------------------


def there(db: Any) -> bool:
    """Whether anything was ever removed from this file."""
    return bool(db.one("select count(*) from sqlite_schema where name = 'stub'"))


def overlapping(low: int, high: int) -> tuple[str, tuple[int, int]]:
    """What asks for the stubs among low <= seq < high; the first may end before."""
    return _OVERLAPPING, (high, low)


def stubs(db: Any, low: int, high: int) -> list[Stub]:
    """Those that have records among low <= seq < high, in order."""
    if not there(db):
        return []
    found = [Stub(start, level, bytes(hash)) for start, level, hash in db.run(*overlapping(low, high)).fetchall()]
    return [stub for stub in found if stub.stop > low]


def removed(db: Any, seq: int) -> bool:
    """Whether a record was removed."""
    return bool(stubs(db, seq, seq + 1))


# ---- removing -------------------------------------------------------------------------------------------------------


def remove(db: Any, runs: Runs, taken: Taken, sizes: set[int]) -> None:
    """Delete the rows of these runs and keep what the tree needs. sizes: whose roots must come out beside those of
    stored signatures. Inside a transaction."""
    if not there(db):
        for table in SCHEMA:
            db.run(table)
    hashes = iter(taken.hashes)
    for first, last in runs:
        bounds = (first, last)
        db.run("insert or ignore into checkpoint select seq + 1, sig from entry where seq between ? and ? "
               "and length(sig) = 96", bounds)  # fmt: skip
        leaves = [Stub(seq, 0, next(hashes)) for seq in range(first, last + 1)]
        _keep(db, leaves, sizes)
        db.run("delete from entry where seq between ? and ?", bounds)
    db.many("delete from saga where first = ?", [(first,) for first in taken.firsts])


def _keep(db: Any, leaves: list[Stub], sizes: set[int]) -> None:
    first, last = leaves[0].start, leaves[-1].start
    parts = [*reversed(list(_touching(db, first, _BEFORE, sizes))), *leaves]
    parts += _touching(db, last + 1, _AT, sizes)
    low, high = parts[0].start, parts[-1].stop
    kept = db.run("select size from checkpoint where size > ? and size < ?", (low, high)).fetchall()
    db.run("delete from stub where start >= ? and start < ?", (low, high))
    db.many("insert into stub values(?,?,?)", merged(parts, sizes.union(size for (size,) in kept)))


def _touching(db: Any, edge: int, sql: str, sizes: set[int]) -> Iterator[Stub]:
    """The stubs that touch a place on one side, outwards, up to a size that is kept: nothing merges over that."""
    while edge not in sizes and not db.one("select count(*) from checkpoint where size = ?", (edge,)):
        rows = db.run(sql, (edge,)).fetchall()
        stub = Stub._make(rows[0]) if rows else None
        if stub is None or (sql is _BEFORE and stub.stop != edge):
            return
        yield stub
        edge = stub.start if sql is _BEFORE else stub.stop
