"""The power goes, or the disk says no, at the n-th call for n = 1, 2, 3 … until a run passes untouched.

Real SQLite over a disk that knows what was flushed (powerloss.py), with the device's own keys and anchors around it.
After each, the log is opened again: every acknowledged record is there, none that was not acknowledged is half there,
and `verify` is content.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from powerloss import ANYTHING, EVERYTHING, NOTHING, SECTOR, Disk, die, under

from amends.runtime.facts import fact
from amends.runtime.state import State
from amends.store import sqlite
from amends.store.audit import verify
from amends.store.entry import line_of
from amends.store.errors import AmendsError
from amends.store.home import Home
from amends.store.identity import open_log
from amends.store.log import BUFFERED, DURABLE, FILED


@pytest.fixture(autouse=True)
def _small_and_timeless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No clock decides when something is written, and checkpoints come often enough to be cut in two."""
    monkeypatch.setattr(sqlite, "IDLE_S", 3600.0)
    monkeypatch.setattr(sqlite, "LAZY_S", 3600.0)
    monkeypatch.setattr(sqlite, "SIGN_S", 3600.0)
    monkeypatch.setattr(sqlite, "WAL_BYTES", 0)
    monkeypatch.setattr(sqlite, "FULL_FRAMES", 24)
    monkeypatch.setattr(sqlite, "RESERVE_BYTES", 1 << 20)
    with under():
        yield


class Life:
    """One process with the log of one home: what it was told is safe, and what it tried."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder)
        self.home.create()
        self.acknowledged: dict[int, bytes] = {}
        self.errors: list[BaseException] = []
        self.log: Any = None

    def work(self) -> Life:
        """Sagas of a few commits each, at every level of safety, with large openings, a close and an open between."""
        for part in ("a", "b"):
            if self.open():
                for i in range(3):
                    self.saga(f"{part}{i}", b'"%b"' % (b"x" * (20_000 if i == 1 else 20)))
                self.close()
        return self

    def open(self) -> bool:
        for _ in range(2):  # the disk fails once; a person tries again
            try:
                self.log = open_log(self.home, State(), warn=lambda text: None)
                return True
            except (AmendsError, apsw.Error) as error:
                self.errors.append(error)
        return False

    def close(self) -> None:
        """What could not be closed well is left as a death leaves it."""
        self.log.close()

    def saga(self, name: str, value: bytes) -> None:
        """Two commits whose facts belong together, and one nobody waits for."""
        begun = self.commit(
            fact("saga.opened", saga=name, fence=1, driver="d", up=True),
            fact("step.intended", b'{"args":{"v":%b}}' % value, saga=name, step=1, fence=1, tool="t", sem="reversible"),
        )
        if begun:
            self.log.append(lambda state, now: [fact("step.attempted", saga=name, step=1, fence=1, attempt=2)])
            self.commit(fact("step.done", saga=name, step=1, fence=1), sync=FILED)
            last = FILED if name == "a2" else DURABLE
            self.commit(fact("saga.ended", saga=name, fence=1, out="committed"), sync=last)

    def commit(self, *drafts: Any, sync: int = DURABLE) -> bool:
        try:
            entries = self.log.commit(lambda state, now: drafts, sync)
        except (AmendsError, apsw.Error) as error:
            self.errors.append(error)
            return False
        if sync == DURABLE:
            # what is flushed is everything up to here
            self.acknowledged.update({entry.seq: line_of(entry) for entry in entries})
        return True


def check(folder: Path, life: Life) -> None:
    """What a device finds when the power is back."""
    log = open_log(Home(folder), State(), warn=lambda text: None)
    try:
        records = list(log.records())
        lines = {record.entry.seq: record.line for record in records}
        assert list(lines) == list(range(len(lines)))
        for seq, line in life.acknowledged.items():
            assert lines.get(seq) == line, f"record {seq} was acknowledged and is not there"
        threads: dict[str, list[str]] = {}
        for record in records:
            if record.entry.saga:
                threads.setdefault(record.entry.saga, []).append(record.entry.kind)
                assert len(record.entry.c) == (record.blob or b"").count(b"\n")
        for name, kinds in threads.items():
            assert kinds[:2] == ["saga.opened", "step.intended"], f"{name} is half there: {kinds}"
            later = iter(["step.attempted", "step.done", "saga.ended"])
            assert all(kind in later for kind in kinds[2:]), f"{name} is out of order: {kinds}"
        log.commit(lambda state, now: [fact("saga.opened", saga="after", fence=1, driver="d", up=True)])
    finally:
        log.close()
    verdict = verify(folder, view_factory=State)
    assert verdict.exit == 0, verdict.findings


def one_run(folder: Path, n: int, how: str, then: str, seed: int) -> tuple[Life, Disk]:
    """A life on a disk that fails at its n-th call, a cut at the end of it, and a look at what is left."""
    disk = Disk(folder, seed)
    disk.fail(n, how)
    life = Life(folder).work()
    if life.log is not None:
        die(life.log)
    after = disk.after_the_cut(then)
    check(folder, life)
    after.gone()
    return life, disk


@pytest.mark.promise("1.2")
@pytest.mark.parametrize("then", [NOTHING, ANYTHING, pytest.param(EVERYTHING, marks=pytest.mark.long)])
def test_a_cut_at_any_moment_loses_nothing_that_was_acknowledged(tmp_path: Path, then: str) -> None:
    fired = Counter(_until_untouched(tmp_path, "cut", then))
    assert {"cut in write", "cut in sync", "cut in open"} <= set(fired)
    assert sum(fired.values()) > 150


@pytest.mark.promise("1.2")
@pytest.mark.parametrize("how", ["ioerr", "full", "busy"])
def test_a_disk_that_says_no_once_at_any_moment_loses_nothing_that_was_acknowledged(tmp_path: Path, how: str) -> None:
    fired = Counter(_until_untouched(tmp_path, how, ANYTHING))
    calls = {"ioerr": {"read", "write", "sync", "open", "lock"}, "full": {"write"}, "busy": {"lock", "open"}}[how]
    assert {f"{how} in {call}" for call in calls} <= set(fired)


def _until_untouched(tmp_path: Path, how: str, then: str) -> Iterator[str]:
    """Fail at the first call, the second, the third …, until a run makes fewer calls than that."""
    n = 0
    while True:
        n += 1
        folder = tmp_path / f"{how}-{n}"
        folder.mkdir()
        try:
            life, disk = one_run(folder, n, how, then, seed=n)
        except BaseException as error:
            error.add_note(f"{how} at call {n}, then {then}, seed {n}")
            raise
        yield from disk.fired
        if disk.calls < n or (how == "cut" and not disk.fired):
            assert not life.errors and len(life.acknowledged) >= 15
            return


@pytest.mark.promise("1.2")
def test_an_acknowledged_record_is_on_the_disk_before_its_commit_returns(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    life = Life(tmp_path)
    assert life.open()
    for n, level in enumerate((DURABLE, FILED, DURABLE, BUFFERED)):
        before = disk.flushes
        life.commit(fact("saga.opened", saga=f"s{n}", fence=1, driver="d", up=True), sync=level)
        assert (disk.flushes > before) == (level == DURABLE), n
    die(life.log)
    disk.after_the_cut(NOTHING)
    log = open_log(Home(tmp_path), State(), warn=lambda text: None)
    assert set(log.view.sagas) == {"s0", "s1", "s2"}, "up to the last that was waited for"
    log.close()


def test_the_wal_of_full_size_survives_a_cut_here_and_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the -wal preallocated as it is in use."""
    monkeypatch.setattr(sqlite, "WAL_BYTES", 1 << 20)
    fired = 0
    for n in range(7, 1000, 61):
        folder = tmp_path / str(n)
        folder.mkdir()
        fired += len(one_run(folder, n, "cut", ANYTHING, n)[1].fired)
    assert fired > 5


def test_the_disk_loses_and_tears_what_was_not_flushed(tmp_path: Path) -> None:
    """The shim itself: without it every claim above would pass."""
    disk = Disk(tmp_path)
    db = apsw.Connection(str(tmp_path / "x.db"))
    db.pragma("journal_mode", "wal")
    db.pragma("synchronous", "NORMAL")
    db.execute("create table t(a)")
    db.pragma("wal_checkpoint")
    db.execute("insert into t values(1)")
    db.pragma("synchronous", "FULL")
    db.execute("insert into t values(2)")
    db.pragma("synchronous", "NORMAL")
    db.execute("insert into t values(3)")
    disk.cut()
    with pytest.raises(apsw.IOError):
        db.execute("insert into t values(4)")
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    db.close()
    disk.after_the_cut(NOTHING)
    assert apsw.Connection(str(tmp_path / "x.db")).execute("select a from t").fetchall() == [(1,), (2,)]
    torn = {len(disk._torn(SECTOR // 2, bytes(4 * SECTOR))) % SECTOR for _ in range(20)}
    assert torn == {SECTOR // 2} and random.Random(1).random() < 1


def test_a_half_written_page_is_what_a_full_disk_leaves(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    db = apsw.Connection(str(tmp_path / "x.db"))
    db.pragma("journal_mode", "wal")
    db.execute("create table t(a)")
    disk.fail(1, "full")
    with pytest.raises(apsw.FullError):
        db.execute("insert into t values(1)")
    assert disk.fired == ["full in write"]
    db.execute("insert into t values(2)")
    assert db.execute("select a from t").fetchall() == [(2,)]
    db.close()


@pytest.mark.promise("6.2")
@pytest.mark.parametrize("closed", [False, True])
def test_a_kill_and_then_a_cut_do_not_make_a_device_take_its_own_log_for_an_older_copy(
    tmp_path: Path, closed: bool
) -> None:
    """What only survives a kill is not remembered outside the file as if it survived a cut."""
    disk = Disk(tmp_path)
    life = Life(tmp_path)
    assert life.open()
    life.commit(
        fact("saga.opened", saga="s", fence=1, driver="d", up=True),
        fact("step.intended", saga="s", step=1, fence=1, tool="t", sem="compensable"),
    )
    life.commit(fact("saga.ended", saga="s", fence=1, out="committed"), sync=FILED)  # signed, and not flushed
    die(life.log)
    assert life.open()
    if closed:
        life.log.close()
    else:
        die(life.log)
    disk.after_the_cut(NOTHING)
    check(tmp_path, life)


@pytest.mark.promise("6.2")
def test_a_head_that_was_signed_without_a_flush_is_flushed_before_it_is_anchored(tmp_path: Path) -> None:
    """To write the same signature once more is no write for SQLite: its page stays clean, and nothing is flushed."""
    disk = Disk(tmp_path)
    life = Life(tmp_path)
    assert life.open()
    life.commit(fact("saga.opened", saga="s", fence=1, driver="d", up=True))
    life.commit(fact("saga.ended", saga="s", fence=1, out="committed"), sync=FILED)
    size = life.log.size
    life.log.close()
    assert life.log.anchored() == size
    disk.after_the_cut(NOTHING)
    log = open_log(Home(tmp_path), State(), warn=lambda text: None)
    assert log.size == size
    log.close()
