"""How the log itself is: how it grows and what retention would free, how old its newest head is, and who stands in the
way of its file; for `doctor`.

Each answer costs a few reads, however long the log is: a check that takes a minute is not made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from ..runtime.config_file import retention_of
from ..runtime.gate.limits import span
from ..runtime.retention import KEEP_MS, WARN, growth, older
from ..store.errors import AmendsError
from ..store.home import Home
from ..store.sqlite import SqliteLog
from . import ui
from .said import Said

MEGABYTE = 1_000_000
LONG_WAL = 32 * MEGABYTE
"""A -wal beyond this is one that a reader has kept from being used anew."""
STALE_MS = 3_600_000
"""A head that is signed and anchored is this old at most while anything is written."""


def grows(home: Home, log: SqliteLog) -> Iterator[Said]:
    """How large it is, how fast it grows, how much of it is free, and how long the disk lasts."""
    try:
        policy = retention_of(home.config)
    except AmendsError as error:
        yield Said("bad", error.message, error.next)
        return
    now = growth(log, policy)
    free = f", {now.free / MEGABYTE:.1f} MB of it free pages" if now.free else ""
    said = f"{now.bytes / MEGABYTE:.1f} MB{free}"
    if not now.a_day:
        yield Said("ok", f"{said}; how fast it grows can be told after a day")
    else:
        disk = shutil.disk_usage(home.path).free
        lasts = f"the disk has room for {_days(disk / now.a_day)} of that"
        level = "warn" if disk < 30 * now.a_day else "ok"
        yield Said(level, f"{said}; {now.a_day / MEGABYTE:.2f} MB a day, {lasts}")
    if now.share >= WARN:
        said = f"The log has {now.share:.0%} of the {policy.max_bytes / MEGABYTE:.0f} MB that config.toml allows"
        full = "" if now.share < 1 else ": no new saga begins"
        yield Said(
            "bad" if full else "warn", f"{said}{full}.", "Run `amends compact`, or raise max_size under [retention]."
        )
    yield from _retention(log, policy.keep_ms or KEEP_MS, policy.auto)


def _retention(log: SqliteLog, keep_ms: int, auto: bool) -> Iterator[Said]:
    count, share = older(log, keep_ms)
    if not count:
        yield Said("ok", f"retention {span(keep_ms)}: nothing is older")
        return
    bytes = log.bytes() * share
    said = f"retention {span(keep_ms)}: {ui.count(count, 'record')} (about {bytes / MEGABYTE:.1f} MB) are older"
    if auto:
        yield Said("ok", f"{said}; the daemon removes what is settled")
    else:
        yield Said("ok", said, "`amends compact --dry-run` says which may go; `auto = true` lets the daemon do it.")


def _days(days: float) -> str:
    return "years" if days > 3650 else ui.count(int(days), "day")


def heads(log: SqliteLog) -> Iterator[Said]:
    """How old the newest signed head is, and who else has seen one."""
    signed = log.signed()
    if signed is None:
        yield Said("warn", "No head of the log is signed yet.")
        return
    now, newest = log.now().at, log.record(log.size - 1).entry.at
    behind = log.size - signed.size
    at = log.record(signed.size - 1).entry.at if not behind else _at(log, signed.size)
    age = f"the newest signed head is over {signed.size} of {log.size} records, {span((now - at) // 1000)} old"
    late = behind and newest - at > STALE_MS * 1000
    yield Said("warn" if late else "ok", age)
    copies = [copy for copy in log.keeping.copies if copy.out != "certificate"]
    if copies:
        newest_copy = max(copies, key=lambda copy: copy.size)
        yield Said("ok", f"the newest head that was handed out is over {newest_copy.size} ({newest_copy.out})")
    else:
        yield Said("ok", "no head was handed out: nobody else can tell if this log was rewritten")


def _at(log: SqliteLog, size: int) -> int:
    found = next(iter(log.lines(size - 1)), None)
    return found[0].at if found else log.now().at


def readers(log: SqliteLog) -> Iterator[Said]:
    """Who stands in the way of the -wal, and whether it has grown for that."""
    now, wal = log.pinned(), log.room().wal
    others = [f"pid {pin.pid} {ui.clean(pin.command)}".strip() for pin in now.pins if pin.pid != os.getpid()]
    if not now.told:
        yield Said("ok", "this system does not say who reads the file")
    elif others and wal > LONG_WAL:
        said = f"the -wal has grown to {wal / MEGABYTE:.0f} MB; the file is in use by {', '.join(others)}"
        yield Said("warn", said, "A transaction that is left open keeps it from being used anew: end that program.")
    elif others:
        yield Said("ok", f"in use at this moment by {', '.join(others)}")
    else:
        yield Said("ok", "nobody holds up the -wal")
