"""A log is sealed, unsealed, given another owner's key, and made to forget a saga, while agents go on writing.

Each is one fact, and what the file does with it happens in the transaction that writes the fact. Only the openings
that were there before are too many for one transaction: `sealing` says how far they are, and whoever has the log open
for writing goes on, a page at a time, until none is left. A crash at any moment leaves a log that can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from .chain import Decide, Draft
from .entry import Entry, read
from .errors import Malformed, Refused
from .facts import FORGOTTEN, ROTATED, SEALED, UNSEALED
from .redact import held_over
from .seal import Owner, is_sealed, placed
from .sqlite import ACTS, DATA_KEYS, HELD_S, SqliteLog, _cell, _plain

PAGE, PAGE_BYTES = 256, 1 << 18
SEALING = """create table if not exists sealing(origin text primary key, at integer not null, upto integer not null)
       strict, without rowid"""
"""Per log of the file ("": the device's own): from where up to where openings are still to be sealed, or unsealed."""

# ---- the facts ------------------------------------------------------------------------------------------------------


def begin(log: SqliteLog, owner: Owner, by: str) -> Entry:
    """Seal the log under an owner's key from here on. Raises Refused (`sealed`)."""
    log.vault.offer(owner)
    finish(log)

    def decide(view: Any, now: Any) -> Sequence[Draft]:
        _settled(log)
        if log.keeping.seal:
            raise Refused(
                f"The log is sealed already, under key {log.keeping.seal}.",
                next="`amends rotate` changes the key.",
                code="sealed",
            )
        return (_draft(SEALED, by=by, seal=owner.id),)

    return _only(log, decide)


def end(log: SqliteLog, by: str) -> Entry:
    """Keep openings in plain text again. Raises Refused (`not_sealed`)."""
    finish(log)

    def decide(view: Any, now: Any) -> Sequence[Draft]:
        _settled(log)
        return (_draft(UNSEALED, by=by, prior=_in_force(log)),)

    return _only(log, decide)


def rotate(log: SqliteLog, owner: Owner, by: str) -> Entry:
    """Wrap the sagas' keys under another owner's key. Raises Refused (`not_sealed`, `same_key`)."""
    log.vault.offer(owner)

    def decide(view: Any, now: Any) -> Sequence[Draft]:
        prior = _in_force(log)
        if prior == owner.id:
            raise Refused("That is the key it is sealed under.", next="Name another one with --to.", code="same_key")
        return (_draft(ROTATED, by=by, prior=prior, seal=owner.id),)

    return _only(log, decide)


def forget(log: SqliteLog, sagas: Iterable[str], by: str, reason: str) -> list[Entry]:
    """Destroy the keys of sagas (header ids) that have ended: none of their openings can be read again, in no copy.

    Raises Refused: `not_sealed`, `held`, `open`, `forgotten`, `nothing_to_forget`. All of them or none.
    """
    finish(log)
    wanted = list(sagas)

    def decide(view: Any, now: Any) -> Sequence[Draft]:
        _settled(log)
        keeping = log.keeping
        if not keeping.seal:
            raise Refused(
                "The log is not sealed, so no saga has a key that could be destroyed.",
                next="`amends redact` destroys what records hold.",
                code="not_sealed",
            )
        for saga in wanted:
            if (hold := held_over(log, saga)) is not None:
                raise Refused(
                    f"Record {hold} holds it, or what it belongs to: nothing of it may be destroyed.",
                    next="`amends hold --lift` ends a hold.",
                    code="held",
                )
            if log.is_open(saga):
                raise Refused(
                    "It is open: what undoes it would be gone.", next="Let it end, or settle it first.", code="open"
                )
        # one that is forgotten and has a key is another saga, begun under its id once the first was removed
        left = [saga for saga in wanted if saga not in keeping.forgotten or log.wrapped(saga) is not None]
        if not left:
            raise Refused("It is forgotten already.", next="`amends show` says since when.", code="forgotten")
        there = [saga for saga in left if log.wrapped(saga) is not None]
        if not there:
            raise Refused("No record of it holds anything.", code="nothing_to_forget")
        return [_draft(FORGOTTEN, by=by, reason=reason, target=saga) for saga in there]

    return log.commit(decide)


def _draft(kind: str, *, by: str, reason: str = "", **fields: Any) -> Draft:
    said = {"by": by, "reason": reason} if reason else {"by": by}
    return Draft(kind, fields, (msgspec.json.encode(said, order="sorted"),), up=True)


def _only(log: SqliteLog, decide: Decide) -> Entry:
    return log.commit(decide)[-1]


def _in_force(log: SqliteLog) -> str:
    if not log.keeping.seal:
        raise Refused("The log is not sealed.", next="`amends seal --key SOURCE --by NAME` does.", code="not_sealed")
    return log.keeping.seal


def _settled(log: SqliteLog) -> None:
    """Nothing of an earlier sealing is half done. Inside a decision."""
    if log.marks():
        raise Refused("Older openings are still being sealed or unsealed.", next="Try again.", code="sealing")


# ---- what the file does in the same transaction ---------------------------------------------------------------------


def from_the_start(db: Any, log: SqliteLog | None, entry: Entry) -> None:
    """Everything before this fact is to be gone through, logs of other origins too. log: None while it is adopted."""
    if entry.kind == SEALED:
        db.run(DATA_KEYS)
    db.run(SEALING)
    db.run("insert into sealing values('', 0, ?)", (entry.seq,))
    if db.one("select count(*) from sqlite_schema where name = 'fentry'"):
        db.run("insert into sealing select origin, 0, max(seq) + 1 from fentry group by origin")
    if log is not None:
        log.converting = True


def _wrap_anew(db: Any, log: SqliteLog, entry: Entry) -> None:
    old, new = log.vault.owner(entry.prior), log.vault.owner(entry.seal)
    anew = []
    for name, wrapped in db.run("select saga, wrapped from datakey where seal = ?", (old.id,)).fetchall():
        origin, saga = _origin_and_saga(log, name)
        key = old.unwrap(origin, saga, wrapped)
        if key is None:
            raise Malformed(
                f"The data key of {saga or 'the device'} is not what was wrapped: nothing was changed.",
                next="Run `amends verify`.",
                code="seal_altered",
                finding="E_CIPHERTEXT",
            )
        anew.append((new.id, new.wrap(origin, saga, key), name))
    db.many("update datakey set seal = ?, wrapped = ? where saga = ?", anew)


def _origin_and_saga(log: SqliteLog, name: str) -> tuple[str, str]:
    origin, space, saga = name.rpartition(" ")
    return (origin if space else log.origin), saga


def _destroy(db: Any, log: SqliteLog, entry: Entry) -> None:
    db.run("delete from datakey where saga = ?", (entry.target,))


ACTS.update({SEALED: from_the_start, UNSEALED: from_the_start, ROTATED: _wrap_anew, FORGOTTEN: _destroy})

# ---- what was there before ------------------------------------------------------------------------------------------


class Mark(NamedTuple):
    """How far the openings of a log are: from `at` up to `upto` they are still to be gone through."""

    origin: str
    at: int
    upto: int


def step(log: SqliteLog, patience: float = HELD_S) -> int:
    """Seal, or unseal, a page of older openings; how many marks are left. Raises SealKey, LogHeld, Malformed for an
    opening that was altered: it is left as it is."""
    return log.rewrite(lambda db: _page(db, log), patience)


def finish(log: SqliteLog, told: Callable[[int], None] = lambda left: None) -> None:
    """The same until nothing is left. told: how many openings are left, now and then."""
    if not log.marks():
        return
    while step(log):
        told(left(log))


def left(log: SqliteLog) -> int:
    """How many openings lie otherwise than the log says they do: in plain text in one that is sealed, or sealed in one
    that is not."""
    wrong = "<>" if log.keeping.seal else "="
    count = 0
    for mark in log.marks():
        table, which = _where(mark)
        sql = (
            f"select count(*) from {table} where {which} and seq >= ? and seq < ? and substr(open, 1, 1) {wrong} x'01'"
        )
        count += log.rows(sql, (mark.origin, mark.at, mark.upto))[0][0]
    return count


def _where(mark: Mark) -> tuple[str, str]:
    return ("fentry", "origin = ?") if mark.origin else ("entry", "'' = ?")


def _page(db: Any, log: SqliteLog) -> int:
    marks = log.marks()
    if not marks:
        log.converting = False
        return 0
    mark, convert = marks[0], _sealed if log.keeping.seal else _unsealed
    table, which = _where(mark)
    page = db.page(
        f"select seq, line, open from {table} where {which} and seq >= ? and seq < ? and open is not null"
        f" order by seq limit {PAGE}",
        (mark.origin, mark.at, mark.upto),
        PAGE_BYTES,
    )
    changed: list[tuple[bytes | None, str, int]] = []
    for place, (seq, line, cell) in enumerate(page):
        try:
            new = convert(log, mark.origin or log.origin, read(line), cell)
        except Malformed:
            if not place:
                raise
            del page[place:]  # what is before it is done first
            break
        if new != cell:
            changed.append((new, mark.origin, seq))
    db.many(f"update {table} set open = ? where {which} and seq = ?", changed)
    if page:
        db.run("update sealing set at = ? where origin = ?", (page[-1][0] + 1, mark.origin))
        return len(marks)
    db.run("delete from sealing where origin = ?", (mark.origin,))
    if len(marks) == 1:
        _done(db, log)
    return len(marks) - 1


def _sealed(log: SqliteLog, origin: str, entry: Entry, cell: bytes) -> bytes | None:
    return cell if is_sealed(cell) else log.seal_cell(origin, entry, placed(entry, _plain(cell) or b""))


def _unsealed(log: SqliteLog, origin: str, entry: Entry, cell: bytes) -> bytes | None:
    """What can be opened; what is forgotten, or lacks its key in this copy, stays as it is."""
    if not is_sealed(cell):
        return cell
    blob, why = log.open_cell(origin, entry, cell)
    return cell if why else _cell(blob)


def _done(db: Any, log: SqliteLog) -> None:
    db.run("drop table sealing")
    if not log.keeping.seal:
        db.run("drop table datakey")
        log.vault.drop()
    log.converting = False
