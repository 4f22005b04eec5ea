"""The log in a file: the contract, and what a file, several processes, kills and forks ask besides."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from log_contract import Keys, Ledger, LogContract, done, ended, facts, intended, kinds, opened, spend

from amends.store import sqlite
from amends.store.chain import Chain, Draft
from amends.store.entry import leaf, read
from amends.store.errors import (
    Closed,
    Damaged,
    DiskFull,
    HomeRefused,
    Illegal,
    LogHeld,
    LogReplaced,
    Malformed,
    Refused,
    TheyErred,
    TooNew,
)
from amends.store.log import DURABLE, FILED
from amends.store.merkle import EMPTY, Peaks, root_at
from amends.store.sqlite import SqliteLog, open_read

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")


def make(path: Path, keys: Keys | None = None, **more: Any) -> SqliteLog:
    return SqliteLog(path / "amends.db", Ledger(), keys or Keys(), **more)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SqliteLog]:
    log = make(tmp_path)
    yield log
    log.close()


@pytest.fixture
def never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a commit leaves in its rows, before the idle thread tidies."""
    monkeypatch.setattr(sqlite, "IDLE_S", 3600.0)
    monkeypatch.setattr(sqlite, "SIGN_S", 3600.0)


def eventually(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.005)


def signatures(log: SqliteLog) -> dict[int, bytes]:
    return {seq: sig for seq, sig in raw(log, "select seq, sig from entry where sig is not null order by seq")}


def raw(log: SqliteLog, sql: str, *bindings: Any) -> list[Any]:
    with log._lock:
        return log._db.run(sql, bindings).fetchall()


def child(path: Path, body: str, *args: str) -> subprocess.Popen[str]:
    """Another process with the same log open as `log`."""
    code = (
        "import sys, os\nfrom pathlib import Path\nfrom log_contract import *\nfrom test_sqlite import make\n"
        f"log = make(Path(sys.argv[1]))\n{body}\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path), *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def healthy(log: SqliteLog) -> None:
    """The file says one thing: chain, fold, tree, cells and caches."""
    chain = Chain(Ledger())
    hashes = [chain.follow(r.entry, r.line) for r in log.records()]
    tree = Peaks()
    tree.extend(hashes)
    assert log.head() == (len(hashes), tree.root())
    assert raw(log, "select n, data from tile where level = 1 order by n") == tree.runs
    for seq, sig in signatures(log).items():
        if len(sig) == 32:
            assert sig == hashes[seq]
        else:
            edge = Peaks()
            edge.extend(hashes[: seq + 1])
            assert sig == edge.root() + Keys().sign(seq + 1, edge.root())
    assert chain.dump() == log.standing() and chain.view.dump() == log.view.dump()
    assert raw(log, "pragma integrity_check") == [("ok",)]


class TestSqliteLog(LogContract):
    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[SqliteLog]:
        log = make(tmp_path)
        yield log
        if not log._closed:
            healthy(log)
        log.close()


class TestSqliteLogOnASlowDisk(LogContract):
    """The same when the writer thread does the commits."""

    @pytest.fixture
    def log(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteLog]:
        log = make(tmp_path)
        monkeypatch.setattr(log, "_probing", lambda: False)
        monkeypatch.setattr(log, "_measure", lambda seconds: None)
        log._slow = True
        yield log
        log.close()


# ---- it is there afterwards -----------------------------------------------------------------------------------------


@pytest.mark.promise("1.2")
def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.commit(facts(opened("a", b'{"name":"x"}'), intended("a", use={"eur": 3})))
    records, image, head = list(log.records()), log.image(), log.head()
    log.close()
    log = make(tmp_path)
    assert (list(log.records()), log.image(), log.head()) == (records, image, head)
    assert log.warnings == []
    log.commit(facts(done("a")))
    healthy(log)
    log.close()


@pytest.mark.promise("1.2")
def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    for sync in (DURABLE, FILED):
        body = f"""
log.commit(facts(opened("s{sync}")))
for step in range(1, 10**6):
    log.commit(facts(intended("s{sync}", step)), {sync})
    print(step, flush=True)
"""
        process = child(tmp_path, body)
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(300)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout.read().splitlines() if line.strip()]
        process.wait()
        log = make(tmp_path)
        steps = [r.entry.step for r in log.thread(f"s{sync}")][1:]
        assert steps[: len(acknowledged)] == acknowledged
        assert len(steps) <= len(acknowledged) + 1
        healthy(log)
        log.close()


@pytest.mark.promise("6.2")
def test_a_tail_left_by_a_crash_is_checked_signed_and_said(tmp_path: Path, never_idle: None) -> None:
    process = child(tmp_path, KILL_AFTER_TWO)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    db = apsw.Connection(str(tmp_path / "amends.db"))
    size = db.execute("select max(seq) + 1 from entry").get
    assert db.execute("select max(seq) + 1 from entry where length(sig) = 96").get < size

    class Later(sqlite.SystemClock):
        def wall_us(self) -> int:
            return super().wall_us() + 60_000_000

    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("amends.db", "amends.db-wal"):
        shutil.copy(tmp_path / name, copy / name)
    log = make(tmp_path, clock=Later())
    assert log.signed() is not None and log.signed().size == size  # type: ignore[union-attr]
    assert "were not signed" in log.warnings[0]
    healthy(log)
    log.close()

    tampered = apsw.Connection(str(copy / "amends.db"))
    line = tampered.execute("select line from entry where seq = ?", (size - 1,)).get
    tampered.execute("update entry set line = ? where seq = ?", (line.replace(b'"step":2', b'"step":3'), size - 1))
    tampered.close()
    with pytest.raises(Damaged) as caught:
        make(copy)
    assert caught.value.facts["seq"] == size - 1
    db.close()


KILL_AFTER_TWO = """
from amends.store import sqlite
sqlite.SIGN_S = sqlite.IDLE_S = 3600.0
log.commit(facts(opened("a"), intended("a", 1)))
log.commit(facts(intended("a", 2)))
os.kill(os.getpid(), 9)
"""


def test_what_nobody_waited_for_is_in_the_file_soon(log: SqliteLog, tmp_path: Path) -> None:
    log.commit(facts(opened("a")))
    log.append(facts(intended("a")))
    other = make(tmp_path, write=False)
    assert other.wait(log.size, 30)
    assert kinds(other)[-1] == "step.intended"
    other.close()


def test_what_was_appended_is_written_at_close(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.commit(facts(opened("a")))
    for step in range(1, 100):
        log.append(facts(intended("a", step)))
    log.close()
    log = make(tmp_path)
    assert len(log.thread("a")) == 100
    log.close()


def test_a_program_that_just_ends_loses_nothing_it_appended(tmp_path: Path) -> None:
    process = child(tmp_path, 'log.commit(facts(opened("a")))\nlog.append(facts(intended("a")))')
    assert process.wait() == 0
    log = make(tmp_path)
    assert len(log.thread("a")) == 2
    assert log.signed().size == log.size  # type: ignore[union-attr]
    log.close()


def test_the_buffer_is_bounded(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "QUEUE_SOFT", 16)
    log.commit(facts(opened("a")))
    longest = 0
    for step in range(1, 200):
        log.append(facts(intended("a", step)))
        longest = max(longest, len(log._queue))
    assert longest <= 16
    log.flush()
    assert len(log.thread("a")) == 200


# ---- one committer --------------------------------------------------------------------------------------------------


def test_one_commit_takes_every_task_that_is_ready(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, never_idle: None
) -> None:
    log.commit(facts(opened("a")))

    async def work(base: int) -> None:
        for step in range(base, base + 5):
            await log.acommit(facts(intended("a", step)))

    async def main() -> None:
        await asyncio.gather(*[work(base * 10) for base in range(1, 65)])

    monkeypatch.setattr(log, "_measure", lambda seconds: None)
    commits, records = log.commits, log.records_written
    asyncio.run(main())
    assert log.records_written - records == 320
    assert log.commits - commits == 5


def test_a_single_task_pays_one_commit_a_fact_and_no_thread_is_asked(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, never_idle: None
) -> None:
    monkeypatch.setattr(log, "_measure", lambda seconds: None)  # however slow the disk of this machine is
    log.commit(facts(opened("a")))
    threads = set()

    def decide(view: Any, now: Any) -> tuple[Draft, ...]:
        threads.add(threading.get_ident())
        return (Draft("note", {}),)

    async def main() -> None:
        for _ in range(20):
            await log.acommit(decide)

    commits = log.commits
    asyncio.run(main())
    assert log.commits - commits == 20 and threads == {threading.get_ident()}


def test_a_slow_disk_is_left_to_the_writer_thread_and_tried_again(log: SqliteLog) -> None:
    log.commit(facts(opened("a")))
    for _ in range(100):
        log._measure(0.02)
    assert log._slow
    threads = []

    def decide(view: Any, now: Any) -> tuple[Draft, ...]:
        threads.append(threading.get_ident())
        return (Draft("note", {}),)

    async def main() -> None:
        log._probe_at = time.monotonic() + 3600
        log._measure = lambda seconds: None  # type: ignore[method-assign]
        await log.acommit(decide)
        log._probe_at = 0.0
        await log.acommit(decide)
        del log._measure

    asyncio.run(main())
    assert threads[0] == log._thread.ident and threads[1] == threading.get_ident()  # type: ignore[union-attr]
    log._measure(0.0001)
    for _ in range(50):
        log._measure(0.0001)
    assert not log._slow


def test_refused_and_illegal_decisions_leave_their_neighbours_alone(log: SqliteLog) -> None:
    log.commit(facts(opened("a")))

    def refuse(view: Any, now: Any) -> tuple[Draft, ...]:
        raise Refused("no")

    async def main() -> list[Any]:
        batch = [
            facts(intended("a", 1, use={"eur": 1})),
            refuse,
            facts(intended("a", 2, use={"eur": 10}), done("a", 9)),
            facts(Draft("step.failed", {"saga": "a", "step": 1})),
            facts(intended("a", 3, use={"eur": 100})),
        ]
        return await asyncio.gather(*[log.acommit(decide) for decide in batch], return_exceptions=True)

    commits = log.commits
    answers = asyncio.run(main())
    assert [type(answer) for answer in answers] == [list, Refused, Illegal, ZeroDivisionError, list]
    assert log.view.spent == {"eur": 101} and log.commits == commits + 1
    assert [r.entry.step for r in log.thread("a")] == [0, 1, 3]
    healthy(log)


def test_a_decision_that_was_refused_writes_nothing_and_costs_no_commit(log: SqliteLog) -> None:
    log.commit(facts(opened("a")))
    commits = log.commits
    with pytest.raises(Refused):
        log.commit(spend("a", 5, 1))
    assert log.commits == commits


def test_what_was_handed_in_is_written_though_its_loop_died(log: SqliteLog) -> None:
    log.commit(facts(opened("a")))
    loop = asyncio.new_event_loop()

    async def hand_in() -> None:
        log.acommit(facts(intended("a")))
        loop.stop()

    loop.create_task(hand_in())
    loop.run_forever()
    loop.close()
    eventually(lambda: len(log.thread("a")) == 2)


def test_a_loop_that_never_turns_again_does_not_stop_the_others(log: SqliteLog) -> None:
    log.commit(facts(opened("a")))
    loop = asyncio.new_event_loop()
    loop.call_soon(lambda: None)
    asyncio.set_event_loop(None)

    async def hand_in() -> None:
        log.acommit(facts(intended("a")))

    loop.run_until_complete(hand_in())  # its flush is scheduled, and this loop rests now
    assert asyncio.run(_one(log))[0].kind == "note"
    loop.close()


async def _one(log: SqliteLog) -> Any:
    return await asyncio.wait_for(log.acommit(facts(Draft("note", {}))), 30)


@pytest.mark.parametrize("where", ["_guard", "_pay"])
@pytest.mark.promise("1.6")
def test_an_interrupt_after_the_commit_leaves_the_facts_and_wakes_everyone(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    log.commit(facts(opened("a")))
    original = getattr(log, where)

    def interrupted() -> None:
        monkeypatch.setattr(log, where, original)
        raise KeyboardInterrupt

    async def main() -> list[Any]:
        futures = [log.acommit(facts(intended("a", step))) for step in (1, 2)]
        monkeypatch.setattr(log, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            log._serve(1.0)
        return [future.result()[0].step for future in futures]

    assert asyncio.run(main()) == [1, 2]
    assert [r.entry.step for r in log.thread("a")] == [0, 1, 2]
    healthy(log)


def test_an_interrupt_before_the_commit_leaves_the_facts_to_the_next(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.commit(facts(opened("a")))
    original = log._insert

    def interrupted(rows: Any) -> bool:
        monkeypatch.setattr(log, "_insert", original)
        original(rows)
        raise KeyboardInterrupt

    async def main() -> Any:
        future = log.acommit(facts(intended("a", 1)))
        monkeypatch.setattr(log, "_insert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log._serve(1.0)
        return await asyncio.wait_for(future, 30)

    assert asyncio.run(main())[0].step == 1
    assert len(log.thread("a")) == 2
    healthy(log)


class Bite(BaseException):
    """An interrupt that may strike between any two instructions of the main thread."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no interval timer")
@pytest.mark.promise("1.6")
def test_interrupts_at_any_instruction_neither_lose_nor_double_a_fact_nor_stop_the_others(log: SqliteLog) -> None:
    log.commit(facts(opened("a")))
    stop, others = threading.Event(), []

    async def beside() -> None:
        while not stop.is_set():
            (entry,) = await asyncio.wait_for(log.acommit(facts(Draft("note", {}))), 30)
            others.append(entry.seq)

    def bite(*_: Any) -> None:
        raise Bite

    dice, told, bitten = random.Random(7), [], 0
    before = signal.signal(signal.SIGALRM, bite)
    thread = threading.Thread(target=asyncio.run, args=(beside(),))
    thread.start()
    try:
        for step in range(1, 600):
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-6, 1e-3))
                log.commit(facts(intended("a", step)), dice.choice((FILED, DURABLE)))
                told.append(step)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Bite:
                bitten += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stop.set()
        thread.join(60)
    assert bitten > 50, "the fault did not fire often enough to mean anything"
    assert not thread.is_alive()
    log.flush()
    steps = [r.entry.step for r in log.thread("a")][1:]
    assert len(steps) == len(set(steps)) and set(told) <= set(steps)
    assert {seq for seq in others} <= {r.entry.seq for r in log.records() if r.entry.kind == "note"}
    log.commit(facts(done("a", steps[-1])))
    healthy(log)


def test_an_error_of_the_file_is_told_and_the_fold_goes_back(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.commit(facts(opened("a")))
    image = log.image()
    original = log._insert

    def fails(rows: Any) -> bool:
        original(rows)
        raise apsw.IOError("disk I/O error")

    monkeypatch.setattr(log, "_insert", fails)
    with pytest.raises(TheyErred) as caught:
        log.commit(facts(intended("a", use={"eur": 9})))
    assert caught.value.code == "log_failed"
    monkeypatch.undo()
    assert log.image() == image
    log.commit(facts(intended("a")))
    healthy(log)


def test_threads_and_loops_together_lose_no_wake_up(log: SqliteLog) -> None:
    log.commit(facts(opened("a")))

    def by_thread(base: int) -> None:
        for step in range(base, base + 100):
            log.commit(facts(intended("a", step)), FILED)

    async def task(base: int) -> None:
        for step in range(base, base + 50):
            await log.acommit(facts(intended("a", step)), step % 2 + 1)

    async def by_loop(base: int) -> None:
        await asyncio.gather(task(base), task(base + 50))

    threads = [threading.Thread(target=by_thread, args=(n * 1000,)) for n in (1, 2, 3)]
    threads += [threading.Thread(target=asyncio.run, args=(by_loop(n * 1000),)) for n in (4, 5, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    steps = [r.entry.step for r in log.thread("a")][1:]
    assert sorted(steps) == sorted(n * 1000 + k for n in range(1, 7) for k in range(100))
    healthy(log)


def test_the_logs_thread_sleeps_when_nothing_is_pending(log: SqliteLog) -> None:
    log.commit(facts(opened("a")))
    eventually(lambda: log._parked and not log._dirty)
    ticks = []
    tick = log._tick
    log._tick = lambda: (ticks.append(1), tick())[1]  # type: ignore[method-assign]
    time.sleep(0.2)
    assert ticks == []
    log.commit(facts(intended("a")))
    eventually(lambda: ticks and log._parked and not log._dirty)


def test_a_log_that_is_let_go_takes_its_thread_along(tmp_path: Path) -> None:
    thread = _used_and_let_go(tmp_path)
    eventually(lambda: gc.collect() >= 0 and not thread.is_alive())


def _used_and_let_go(path: Path) -> threading.Thread:
    log = make(path)
    log.commit(facts(opened("a")))
    assert log._thread is not None
    return log._thread


# ---- several processes ----------------------------------------------------------------------------------------------


def test_eight_processes_that_write_at_once_lose_nothing_and_overdraw_nothing(tmp_path: Path) -> None:
    make(tmp_path).close()
    body = """
import asyncio
me = sys.argv[2]
log.commit(facts(opened(me)))
async def task(k):
    for i in range(15):
        await log.acommit(facts(intended(me, k * 100 + i)))
async def main():
    await asyncio.gather(*[task(k) for k in (1, 2)])
asyncio.run(main())
won = 0
for i in range(30):
    try:
        log.commit(spend(me, 1, 100), 1 + i % 2)
        won += 1
    except Refused:
        pass
print(won)
log.close()
"""
    processes = [child(tmp_path, body, f"p{n}") for n in range(8)]
    won = [int(process.communicate(timeout=100)[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sum(won) == 100
    log = make(tmp_path)
    assert log.view.spent == {"eur": 100}
    for n in range(8):
        assert len(log.thread(f"p{n}")) == 31 + won[n]
    healthy(log)
    log.close()


@pytest.mark.parametrize("writers", [2, 3])
def test_runs_that_another_process_filled_are_stored_once(tmp_path: Path, writers: int) -> None:
    logs = [make(tmp_path) for _ in range(writers)]
    logs[0].commit(facts(opened("a")))
    for turn in range(60):
        log = logs[turn % writers]
        log.commit(facts(*[intended("a", turn * 20 + k) for k in range(17)]))
    for log in logs:
        log.refresh()
    assert len({log.head() for log in logs}) == 1
    healthy(logs[-1])
    for log in logs:
        log.close()


def test_a_decision_sees_what_another_process_wrote_just_before(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    first.commit(facts(opened("a"), intended("a", use={"eur": 9})))
    with pytest.raises(Refused):
        second.commit(spend("a", 2, 10))
    assert second.commit(spend("a", 1, 10))[0].n == 3
    first.refresh()
    assert first.view.spent == {"eur": 10}
    first.close()
    second.close()


def test_a_busy_file_is_waited_for_and_never_surfaces(log: SqliteLog, tmp_path: Path) -> None:
    log.commit(facts(opened("a")))
    other = apsw.Connection(str(tmp_path / "amends.db"))
    other.set_busy_timeout(5000)  # the log's own idle work may be at it
    other.execute("begin immediate")
    release = threading.Timer(0.3, lambda: other.execute("rollback"))
    release.start()
    log.commit(facts(intended("a", 1)))
    release.join()

    async def main() -> int:
        other.execute("begin immediate")
        future = log.acommit(facts(intended("a", 2)))
        turns = 0
        while turns < 50:
            await asyncio.sleep(0.002)  # this loop is not held up
            turns += 1
            assert not future.done()
        other.execute("rollback")
        await asyncio.wait_for(future, 30)
        return turns

    assert asyncio.run(main()) == 50
    assert len(log.thread("a")) == 3
    other.close()


def test_after_half_a_minute_the_holder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make(tmp_path, holder=lambda: "pid 4711 (agent.py), stopped")
    log.commit(facts(opened("a")))
    eventually(lambda: log._parked)
    monkeypatch.setattr(sqlite, "HELD_S", 0.2)
    other = apsw.Connection(str(tmp_path / "amends.db"))
    other.set_busy_timeout(5000)  # the log's own idle work may be at it
    other.execute("begin immediate")
    with pytest.raises(LogHeld) as caught:
        log.commit(facts(intended("a", 1)))
    assert "pid 4711 (agent.py), stopped" in str(caught.value) and caught.value.exit == 9

    async def main() -> None:
        with pytest.raises(LogHeld):
            await asyncio.wait_for(log.acommit(facts(intended("a", 2))), 30)

    asyncio.run(main())
    log.append(facts(intended("a", 3)))  # nobody waits: it stays until the file is free
    other.execute("rollback")
    other.close()
    eventually(lambda: [r.entry.step for r in log.thread("a")] == [0, 3])
    log.close()


@needs_fork
@pytest.mark.promise("14.7")
def test_a_forked_child_and_its_parent_both_go_on(log: SqliteLog, tmp_path: Path) -> None:
    log.commit(facts(opened("a")))
    list(log.records())
    pid = os.fork()
    if not pid:
        status = 1
        try:
            log.commit(facts(intended("a", 1)))
            if sys.platform == "linux":
                held = [line.split() for line in open("/proc/locks") if f" {os.getpid()} " in line]
                assert sorted(line[-2] for line in held) == ["1073741826", "128"], held
            grandchild = os.fork()
            if not grandchild:
                log.commit(facts(intended("a", 2)))
                log.close()
                os._exit(0)
            assert os.waitpid(grandchild, 0)[1] == 0
            log.refresh()
            assert len(log.thread("a")) == 3
            log.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    log.commit(facts(intended("a", 3)))
    assert [r.entry.step for r in log.thread("a")] == [0, 1, 2, 3]
    healthy(log)


@needs_fork
@pytest.mark.promise("14.7")
def test_a_child_that_outlives_its_parent_keeps_the_file_in_use(tmp_path: Path) -> None:
    body = """
log.commit(facts(opened("a")))
if os.fork():
    os._exit(0)
log.commit(facts(intended("a", 1)))
for word in sys.stdin:
    log.commit(facts(intended("a", 2)))
    print(log.size, flush=True)
print(log.size, flush=True)
log.close()
os._exit(0)
"""
    process = child(tmp_path, body)
    assert process.stdin is not None and process.stdout is not None
    assert process.wait() == 0  # the parent; its child goes on
    shm = tmp_path / "amends.db-shm"
    eventually(lambda: log_size(tmp_path) == 4)
    size = shm.stat().st_size
    for _ in range(3):
        log = make(tmp_path)  # would take the file for unused, and empty what the child has mapped
        log.commit(facts(Draft("note", {})))
        log.close()
        assert shm.stat().st_size == size
    process.stdin.write("go on\n")
    process.stdin.close()
    assert int(process.stdout.readline()) == log.size + 1 == int(process.stdout.readline())
    log = make(tmp_path)
    assert [r.entry.step for r in log.thread("a")] == [0, 1, 2]
    healthy(log)
    log.close()


def log_size(path: Path) -> int:
    peek = open_read(path / "amends.db")
    try:
        return peek.size
    finally:
        peek.close()


@needs_fork
def test_a_fork_while_other_threads_commit_leaves_the_child_free_to_go_on(log: SqliteLog) -> None:
    log.commit(facts(opened("a")))
    stop = threading.Event()

    def work(base: int) -> None:
        step = base
        while not stop.is_set():
            step += 1
            log.commit(facts(intended("a", step)), FILED)

    threads = [threading.Thread(target=work, args=(n * 10**6,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                asyncio.run(_one(log))
                log.commit(facts(Draft("note", {})))
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
    stop.set()
    for thread in threads:
        thread.join(30)
    log.refresh()
    assert kinds(log).count("note") == 10
    healthy(log)


# ---- guards ---------------------------------------------------------------------------------------------------------


def test_a_replaced_wal_is_noticed_before_anyone_is_told(log: SqliteLog, tmp_path: Path) -> None:
    log.commit(facts(opened("a")))
    wal = tmp_path / "amends.db-wal"
    shutil.copy(wal, tmp_path / "copy")
    os.replace(tmp_path / "copy", wal)
    with pytest.raises(LogReplaced):
        log.commit(facts(intended("a", 1)))
    log.commit(facts(intended("a", 2)))  # opened anew
    assert [r.entry.step for r in log.thread("a")] == [0, 2]
    healthy(log)


def test_a_log_that_lost_what_was_acknowledged_is_not_written_again(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.commit(facts(opened("a")))
    log.truncate()
    log.commit(facts(intended("a", 1)))
    eventually(lambda: log._parked)
    os.unlink(tmp_path / "amends.db-wal")
    for _ in range(3):
        with pytest.raises(LogReplaced):
            log.commit(facts(intended("a", 2)))
    log.close()


def test_a_newer_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.commit(facts(opened("a")))
    eventually(lambda: log._parked)
    other = apsw.Connection(str(tmp_path / "amends.db"))
    other.set_busy_timeout(5000)  # the log's own idle work may be at it
    other.execute("pragma user_version = 99")
    before = other.execute("select count(*) from entry").get
    for _ in range(2):  # a live process that was overtaken by a migration
        with pytest.raises(TooNew):
            log.commit(facts(intended("a")))
    with pytest.raises(TooNew):
        log.refresh()
    log.close()
    assert other.execute("select count(*) from entry").get == before
    other.pragma("wal_checkpoint(truncate)")
    other.close()
    bytes_before = (tmp_path / "amends.db").read_bytes()
    for write in (True, False):
        with pytest.raises(TooNew):
            make(tmp_path, write=write)
    assert (tmp_path / "amends.db").read_bytes() == bytes_before


def test_another_programs_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "amends.db"
    other = apsw.Connection(str(path))
    other.set_busy_timeout(5000)  # the log's own idle work may be at it
    other.execute("create table theirs(x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(Malformed):
        make(tmp_path)
    assert path.read_bytes() == before
    path.write_bytes(b"not a database at all" * 1000)
    with pytest.raises(Damaged):
        make(tmp_path)


def test_an_sqlite_that_can_corrupt_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.2")
    with pytest.raises(TheyErred) as caught:
        make(tmp_path)
    assert caught.value.code == "old_sqlite" and not (tmp_path / "amends.db").exists()


def test_the_file_is_set_up_as_the_format_says(log: SqliteLog, tmp_path: Path) -> None:
    def ask(name: str) -> Any:
        return raw(log, f"pragma {name}")[0][0]

    assert (ask("journal_mode"), ask("synchronous"), ask("secure_delete")) == ("wal", 2, 1)
    assert (ask("auto_vacuum"), ask("page_size"), ask("mmap_size")) == (2, 4096, 0)
    assert (ask("application_id"), ask("user_version")) == (sqlite.APPLICATION_ID, sqlite.SCHEMA_VERSION)
    assert raw(log, "select name from pragma_table_list where schema = 'main' and type = 'table' and not strict") == [
        ("sqlite_schema",)
    ]
    wal = tmp_path / "amends.db-wal"
    assert wal.stat().st_size >= sqlite.WAL_BYTES
    log.commit(facts(opened("a")))
    log.truncate()
    assert wal.stat().st_size >= sqlite.WAL_BYTES
    log.commit(facts(intended("a")))
    log.close()
    assert wal.exists()


def test_a_log_opened_for_reading_follows_and_writes_nothing(log: SqliteLog, tmp_path: Path) -> None:
    log.commit(facts(opened("a")))
    reader = make(tmp_path, write=False)
    assert reader.head() == log.head()
    log.commit(facts(intended("a", use={"eur": 1})))
    reader.refresh()
    assert reader.view.spent == {"eur": 1} and reader.size == log.size
    for write in (reader.commit, reader.append):
        with pytest.raises(HomeRefused):
            write(facts(intended("a")))
    reader.close()
    with pytest.raises(HomeRefused):
        make(tmp_path / "nowhere", write=False)


def test_the_guard_at_open_can_look_before_anyone_writes(log: SqliteLog, tmp_path: Path) -> None:
    log.commit(facts(opened("a"), *[intended("a", step) for step in range(1, 700)]))
    peek = open_read(tmp_path / "amends.db")
    assert peek.size == log.size and peek.genesis() == log.record(0).entry
    assert root_at(peek, log.size) == log.head()[1]
    assert peek.leaf(5) == leaf(log.record(5).line)
    with pytest.raises(Damaged):
        peek.leaf(10**6)
    peek.close()
    apsw.Connection(str(tmp_path / "empty.db")).close()
    peek = open_read(tmp_path / "empty.db")
    assert (peek.size, peek.genesis(), root_at(peek, 0)) == (0, None, EMPTY)
    peek.close()


# ---- signatures and anchors -----------------------------------------------------------------------------------------


def signs(log: SqliteLog, *drafts: Draft) -> bool:
    (*_, last) = log.commit(facts(*drafts))
    cell = signatures(log)[last.seq]
    assert len(cell) == 96 or cell == leaf(log.record(last.seq).line)
    return len(cell) == 96


@pytest.mark.promise("6.1")
def test_a_commit_signs_what_must_not_be_denied_later(log: SqliteLog, never_idle: None) -> None:
    assert len(signatures(log)[0]) == 96 or 1 in signatures(log)
    signs(log, Draft("note", {}))
    assert not signs(log, opened("a"))
    assert not signs(log, intended("a", 1, sem="compensable"), done("a", 1))
    assert signs(log, intended("a", 2, sem="irreversible"))
    assert not signs(log, Draft("step.done", {"saga": "a", "step": 2, "sem": "irreversible"}))
    for kind in ("vote.cast", "review.closed", "switch.set", "key.added", "hold.placed"):
        assert signs(log, Draft(kind, {}), Draft("note", {})), kind
    redaction = Draft("redaction.made", {"places": ((3, 0),), "basis": "x"})
    assert signs(log, redaction, Draft("note", {}))
    assert all(sqlite._signs[kind] for kind in ("compaction.made", "seal.begun", "copy.made"))
    assert not signs(log, Draft("note", {}))
    assert signs(log, ended("a"))
    assert not signs(log, *[Draft("note", {}) for _ in range(999)])
    assert signs(log, Draft("note", {}))
    log._signed_at -= 7200
    assert signs(log, Draft("note", {}))
    healthy(log)


def test_the_newest_signature_is_kept_and_one_per_thousand(log: SqliteLog, never_idle: None) -> None:
    for _ in range(25):
        log.commit(facts(*[Draft("note", {}) for _ in range(99)], Draft("vote.cast", {})))
    sizes = [seq + 1 for seq, cell in signatures(log).items() if len(cell) == 96]
    assert [size // 1000 for size in sizes] == [0, 1, 2] and sizes[-1] == log.size
    assert sizes[0] > 900 and sizes[1] > 1900
    healthy(log)


@pytest.mark.promise("6.2")
def test_an_irreversible_intent_is_anchored_before_anyone_hears_of_it(tmp_path: Path, never_idle: None) -> None:
    keys = Keys()
    log = make(tmp_path, keys)
    log.commit(facts(opened("a")))
    told: list[int] = []
    original = log._pay
    log._pay = lambda: (told.append(keys.anchored[-1][0]), original())[1]  # type: ignore[method-assign, func-returns-value]
    for step in (1, 2, 3):
        (entry,) = log.commit(facts(intended("a", step, sem="irreversible")))
        assert told[-1] == entry.seq + 1
    log.commit(facts(done("a", 1)))
    assert keys.anchored[-1][0] == log.size - 1  # at most once a second for the rest
    log.close()
    assert keys.anchored[-1][:2] == log_head(tmp_path)


def log_head(path: Path) -> tuple[int, bytes]:
    log = make(path, write=False)
    head = log.head()
    log.close()
    return head


def test_only_what_is_on_the_disk_is_anchored(tmp_path: Path, never_idle: None) -> None:
    keys = Keys()
    log = make(tmp_path, keys)
    log._anchored_at = 0.0
    before = len(keys.anchored)
    log.commit(facts(opened("a"), ended("a")), FILED)
    assert log.signed().size == log.size and len(keys.anchored) == before  # type: ignore[union-attr]
    log.commit(facts(Draft("note", {})), DURABLE)
    assert keys.anchored[-1][0] == log.size - 1
    log.close()


def test_an_anchor_that_cannot_be_written_is_said_and_stops_nobody(tmp_path: Path) -> None:
    class Broken(Keys):
        def anchor(self, size: int, root: bytes, signature: bytes) -> bool:
            raise PermissionError(13, "Permission denied")

    log = make(tmp_path, Broken())
    log.commit(facts(opened("a"), intended("a", sem="irreversible")))
    assert any("anchor could not be written" in text for text in log.warnings)
    log.close()


def test_an_idle_log_signs_its_head(tmp_path: Path) -> None:
    keys = Keys()
    log = make(tmp_path, keys)
    log.commit(facts(opened("a")))
    log.commit(facts(intended("a")))
    eventually(lambda: log.signed().size == log.size and keys.anchored[-1][0] == log.size)  # type: ignore[union-attr]
    healthy(log)
    log.close()


def test_a_head_that_another_process_signed_is_not_signed_again(tmp_path: Path, never_idle: None) -> None:
    first, second = make(tmp_path), make(tmp_path)
    first.commit(facts(opened("a")))
    first.sign_head()
    cells = signatures(first)
    second.sign_head()
    assert signatures(second) == cells and second.signed() == first.signed()
    first.close()
    second.close()


def test_records_under_a_signature_that_were_changed_are_noticed_at_open(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.commit(facts(opened("a"), intended("a", 1), done("a", 1)))
    log.close()
    db = apsw.Connection(str(tmp_path / "amends.db"))
    db.execute("update entry set sig = cast(zeroblob(32) || substr(sig, 33) as blob) where length(sig) = 96")
    db.close()
    with pytest.raises(Damaged):
        make(tmp_path)


def test_run_roots_that_do_not_fit_are_computed_anew(tmp_path: Path) -> None:
    for spoil in ("update tile set data = zeroblob(32) where n = 0", "delete from tile where n = 1"):
        log = make(tmp_path)
        log.commit(facts(*[Draft("note", {}) for _ in range(700)]))
        log.close()
        db = apsw.Connection(str(tmp_path / "amends.db"))
        db.execute(spoil)
        db.close()
        log = make(tmp_path)
        assert any("run roots" in text for text in log.warnings)
        healthy(log)
        log.close()


# ---- memo -----------------------------------------------------------------------------------------------------------


def followed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seqs: list[int] = []
    original = Chain.follow

    def follow(self: Chain, entry: Any, line: bytes) -> bytes:
        seqs.append(entry.seq)
        return original(self, entry, line)

    monkeypatch.setattr(Chain, "follow", follow)
    return seqs


def with_memo(path: Path) -> int:
    log = make(path)
    log.commit(facts(opened("a"), *[intended("a", step, use={"eur": 1}) for step in range(1, 400)]))
    log.close()
    return log.size


def test_opening_folds_only_what_came_after_the_memo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = with_memo(tmp_path)
    seqs = followed(monkeypatch)
    log = make(tmp_path)
    assert seqs == [] and log.view.spent == {"eur": 399}
    log.commit(facts(done("a", 1)))
    log.close()
    log = make(tmp_path)
    assert seqs == [size]
    healthy(log)
    log.close()


@pytest.mark.parametrize(
    "spoil",
    ["update memo set h = zeroblob(32)", "update memo set seq = seq - 1", "update memo set seq = 10000", "blob"],
)
def test_a_memo_that_disagrees_is_dropped_and_said(tmp_path: Path, spoil: str) -> None:
    with_memo(tmp_path)
    db = apsw.Connection(str(tmp_path / "amends.db"))
    db.execute("update memo set blob = substr(blob, 1, 40)" if spoil == "blob" else spoil)
    db.close()
    log = make(tmp_path)
    assert "memo of ledger was dropped" in log.warnings[0]
    assert log.view.spent == {"eur": 399}
    healthy(log)
    log.close()


def test_a_memo_of_another_version_of_the_view_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = with_memo(tmp_path)
    seqs = followed(monkeypatch)
    monkeypatch.setattr(Ledger, "version", 2)
    log = make(tmp_path)
    assert len(seqs) == size and log.warnings == [] and log.view.spent == {"eur": 399}
    log.close()


def test_a_long_batch_of_facts_leaves_a_memo_while_it_goes_on(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "IDLE_S", 3600.0)
    log.commit(facts(opened("a")))
    for _ in range(5):
        log.commit(facts(*[Draft("note", {}) for _ in range(1000)]), FILED)
    eventually(lambda: raw(log, "select seq from memo") and raw(log, "select seq from memo")[0][0] > 4000)


# ---- no space left --------------------------------------------------------------------------------------------------


def test_with_no_space_left_only_outcomes_are_written_until_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make(tmp_path)
    log.commit(facts(opened("a"), intended("a", 1), intended("a", 2)))
    eventually(lambda: (tmp_path / "reserve").exists())
    assert (tmp_path / "reserve").stat().st_size == sqlite.RESERVE_BYTES
    eventually(lambda: log._parked)
    pages = raw(log, "pragma page_count")[0][0]
    raw(log, f"pragma max_page_count = {pages}")

    def free() -> None:
        os.unlink(tmp_path / "reserve")
        raw(log, "pragma max_page_count = 1000000")

    monkeypatch.setattr(log, "_free_reserve", free)
    monkeypatch.setattr(log, "_keep_reserve", lambda: False)
    big = b'{"args":"' + os.urandom(10_000).hex().encode() + b'"}'  # that does not pack well
    with pytest.raises(DiskFull) as caught:
        log.commit(facts(Draft("step.intended", {"saga": "a", "step": 3}, (big,))))
    assert caught.value.exit == 10 and not (tmp_path / "reserve").exists()
    with pytest.raises(DiskFull):
        log.commit(facts(opened("b")))
    log.commit(facts(done("a", 1), Draft("saga.unwinding", {"saga": "a"}), Draft("undo.done", {"saga": "a"})))
    log.commit(facts(Draft("switch.set", {})))
    monkeypatch.undo()
    log._full_at = 0.0
    log.commit(facts(opened("b")))
    assert (tmp_path / "reserve").exists()
    assert any("No space" in text for text in log.warnings)
    healthy(log)
    log.close()


def test_a_halt_that_does_not_fit_is_not_said_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make(tmp_path)
    monkeypatch.setattr(log, "_keep_reserve", lambda: False)
    eventually(lambda: log._parked)
    raw(log, f"pragma max_page_count = {raw(log, 'pragma page_count')[0][0]}")
    big = b'{"args":"' + os.urandom(10_000).hex().encode() + b'"}'  # that does not pack well
    with pytest.raises(DiskFull, match="nothing could be written") as caught:
        log.commit(facts(Draft("switch.set", {}, (big,))))
    assert caught.value.exit == 10 and "do it again" in caught.value.next
    log.close()


def test_an_outcome_that_meets_the_full_disk_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make(tmp_path)
    log.commit(facts(opened("a"), intended("a", 1)))
    eventually(lambda: log._parked)
    raw(log, f"pragma max_page_count = {raw(log, 'pragma page_count')[0][0]}")
    monkeypatch.setattr(log, "_free_reserve", lambda: raw(log, "pragma max_page_count = 1000000"))
    big = b'{"result":"' + os.urandom(10_000).hex().encode() + b'"}'
    (entry,) = log.commit(facts(Draft("step.done", {"saga": "a", "step": 1}, (big,))))
    assert log.record(entry.seq).blob is not None
    healthy(log)
    log.close()


# ---- reading --------------------------------------------------------------------------------------------------------


def test_a_reader_that_stops_half_way_does_not_pin_the_file(log: SqliteLog, tmp_path: Path) -> None:
    log.commit(facts(opened("a"), *[intended("a", step) for step in range(1, 1000)]))
    reading = log.records()
    next(reading)
    log.truncate()  # would raise LogHeld over a pinned snapshot
    log.commit(facts(intended("a", 1000)))
    assert sum(1 for _ in reading) == log.size - 1


def test_entries_of_a_batch_in_the_making_are_seen_by_its_later_decisions_only(log: SqliteLog) -> None:
    log.commit(facts(opened("a"), opened("b")))
    seen: list[list[str]] = []

    def look(view: Any, now: Any) -> tuple[Draft, ...]:
        seen.append([r.entry.kind for r in view.archive.thread("a")])
        reader = threading.Thread(target=lambda: seen.append([r.entry.kind for r in log._walk("a", False, False)]))
        reader.start()
        reader.join()
        return ()

    async def main() -> None:
        await asyncio.gather(log.acommit(facts(intended("a"), ended("a"))), log.acommit(look))

    asyncio.run(main())
    assert seen == [["saga.opened", "step.intended", "saga.ended"], ["saga.opened"]]


def test_a_reused_name_reads_as_its_newest_saga(log: SqliteLog) -> None:
    log.commit(facts(opened("a", b'{"name":"x"}'), ended("a")))
    log.commit(facts(opened("a", b'{"name":"x"}'), intended("a"), ended("a")))
    assert len(log.thread("a")) == 3


def test_a_closed_log_cannot_be_read(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.close()
    with pytest.raises(Closed):
        list(log.records())


def test_a_commit_that_comes_too_late_does_not_open_the_log_again(tmp_path: Path) -> None:
    log = make(tmp_path)
    log._usable = log.close  # type: ignore[method-assign]
    with pytest.raises(Closed):
        log.commit(facts(opened("a")))
    assert log._db is None


def test_lines_read_back_are_the_bytes_that_were_hashed(log: SqliteLog) -> None:
    log.commit(facts(opened("a")))
    for seq, line in raw(log, "select seq, line from entry"):
        assert read(line) == log.record(seq).entry


def test_with_no_space_left_everything_an_unwinding_writes_is_still_accepted() -> None:
    """Every kind that exists, but for those that begin something new, and what people and messages say of others."""
    from amends.runtime.facts import KINDS
    from amends.store.sqlite import OUTCOME_FAMILIES, OUTCOMES

    begins = {"saga.opened", "step.asked", "step.intended", "step.attempted", "confirm.intended"}
    takes = {"limit.set", "lock.taken", "lock.awaited"}
    says = {"vote.cast", "approval.escalated", "review.closed", "clock.accepted", "notice.claimed", "notice.sent"}
    says |= {"effect.observed", "reconcile.begun", "reconcile.done"}
    left = {kind for kind in KINDS if kind not in OUTCOMES and not kind.startswith((*OUTCOME_FAMILIES, "key."))}
    assert left == begins | takes | says
    for kind in ("redaction.made", "erasure.done", "hold.placed", "hold.lifted", "compaction.made", "copy.made"):
        assert kind.startswith(OUTCOME_FAMILIES), "who must destroy something need not make room first"


@pytest.mark.promise("1.2")
@pytest.mark.parametrize("replace", [False, True])
def test_a_database_that_vanished_or_was_replaced_acknowledges_nothing(log: SqliteLog, replace: bool) -> None:
    log.commit(facts(opened("a")))
    path = Path(log.path)
    moved = path.with_name("moved.db")
    if replace:
        moved.write_bytes(b"")
        os.replace(moved, path)
    else:
        path.unlink()
    for _ in range(3):
        with pytest.raises((LogReplaced, Damaged, Malformed, HomeRefused)):
            log.commit(facts(intended("a", 1)))
    assert replace or not path.exists()  # and no new log was begun in its place


def test_a_record_that_another_threads_commit_is_just_writing_is_waited_for(log: SqliteLog) -> None:
    """It is in the fold already, and whoever asks for it is not told that there is none."""
    log.commit(facts(opened("a")))
    started, go = threading.Event(), threading.Event()
    insert = log._insert

    def slowly(rows: Any) -> Any:
        started.set()
        go.wait(10)
        return insert(rows)

    log._insert = slowly  # type: ignore[method-assign]
    writer = threading.Thread(target=lambda: log.commit(facts(intended("a"))))
    writer.start()
    assert started.wait(10)
    seq = log._chain.size - 1
    threading.Timer(0.1, go.set).start()
    assert log.record(seq).entry.kind == "step.intended"
    writer.join(10)
