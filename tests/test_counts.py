"""What speed rests on, counted and not timed: commits and flushes a step, records a commit, rows an idle look reads,
modules a start imports, timers that are left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from powerloss import Disk, under
from world import eventually

from amends import COMPENSABLE, REVERSIBLE, AgentKit, Compensation, compensator, saga_scope
from amends.runtime.daemon import sweep
from amends.store import sqlite

STEPS, TASKS = 5, 32


@compensator("counts.take_back")
def take_back(n: int, idempotency_key: str = "") -> None:
    return None


async def act(n: int) -> dict[str, int]:
    return {"n": n}


def named(result: dict[str, int]) -> Compensation:
    return Compensation(take_back, {"n": result["n"]}, handler="counts.take_back")


def here(result: dict[str, int]) -> Compensation:
    return Compensation(lambda: None)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with under():
        yield Disk(tmp_path / "home")


@pytest.fixture
def kit(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentKit]:
    """On a file whose flushes are counted. Nothing is tidied meanwhile, and the disk never counts as slow."""
    monkeypatch.setattr(sqlite, "IDLE_S", 3600.0)
    monkeypatch.setattr(sqlite.SqliteLog, "_measure", lambda log, seconds: None)
    with AgentKit(home=tmp_path / "home") as kit:
        kit.log.commit(lambda state, now: ())  # the boot is told first
        yield kit


class Counts:
    """What happened since it was made, or since `again`."""

    def __init__(self, kit: AgentKit, disk: Disk) -> None:
        self.log: Any = kit.log
        self.disk = disk
        self.again()

    def again(self) -> None:
        self._from = self._now()

    def _now(self) -> tuple[int, int, int]:
        return self.log.commits, self.log.records_written, self.disk.flushes

    @property
    def commits(self) -> int:
        return self.log.commits - self._from[0]

    @property
    def records(self) -> int:
        return self.log.records_written - self._from[1]

    @property
    def flushes(self) -> int:
        return self.disk.flushes - self._from[2]


async def a_saga(
    kit: AgentKit, counts: Counts | None = None, semantics: Any = COMPENSABLE, **options: Any
) -> list[int]:
    """One saga of STEPS steps; commits so far after each step."""
    undo = options.pop("undo", named)
    seen = []
    async with saga_scope(kit=kit, **options) as saga:
        for n in range(STEPS):
            await saga.execute("counts.act", act, {"n": n}, semantics=semantics, compensate=undo)
            seen.append(counts.commits if counts else 0)
    return seen


# ---- commits and flushes --------------------------------------------------------------------------------------------


@pytest.mark.promise("1.2")
def test_strict_barriers_are_two_commits_a_step_and_one_for_the_end(kit: AgentKit, disk: Disk) -> None:
    counts = Counts(kit, disk)
    assert asyncio.run(a_saga(kit, counts)) == [2, 4, 6, 8, 10]
    assert counts.commits == 2 * STEPS + 1
    assert counts.flushes == counts.commits, "each commit is flushed once, and nothing else is"


@pytest.mark.promise("1.17")
def test_a_sync_caller_pays_the_same(kit: AgentKit, disk: Disk) -> None:
    counts = Counts(kit, disk)
    with saga_scope(kit=kit) as saga:
        for n in range(STEPS):
            saga.execute("counts.act", lambda n: {"n": n}, {"n": n}, semantics=COMPENSABLE, compensate=named)
    assert (counts.commits, counts.flushes) == (2 * STEPS + 1, 2 * STEPS + 1)


@pytest.mark.promise("1.2")
def test_merged_barriers_are_one_commit_a_step_and_one_for_the_end(kit: AgentKit, disk: Disk) -> None:
    counts = Counts(kit, disk)
    asyncio.run(a_saga(kit, barriers="merged"))
    assert (counts.commits, counts.flushes) == (STEPS + 1, STEPS + 1)
    assert counts.records == 2 * STEPS + 2, "the saga's first fact rides with its first intent"


@pytest.mark.promise("1.2")
def test_a_reversible_step_waits_for_no_flush(kit: AgentKit, disk: Disk) -> None:
    async def all_of_it() -> tuple[int, int]:
        async with saga_scope(kit=kit) as saga:
            for n in range(STEPS):
                await saga.execute("counts.act", act, {"n": n}, semantics=REVERSIBLE, compensate=named)
            kept = counts.flushes
            for n in range(STEPS):
                await saga.execute("counts.act", act, {"n": n}, semantics=REVERSIBLE, compensate=here)
            return kept, counts.flushes

    counts = Counts(kit, disk)
    assert asyncio.run(all_of_it()) == (0, 0)


@pytest.mark.promise("1.2")
def test_an_inverse_that_outlives_us_is_in_the_file_and_one_that_does_not_is_one_fact(
    kit: AgentKit, disk: Disk
) -> None:
    counts = Counts(kit, disk)
    seen = asyncio.run(a_saga(kit, counts, semantics=REVERSIBLE))
    assert seen == [1, 2, 3, 4, 5] and counts.records == STEPS + 2
    counts.again()
    seen = asyncio.run(a_saga(kit, counts, semantics=REVERSIBLE, undo=here))
    assert seen == [0] * STEPS and counts.commits == 1, "all of it is written with the end"
    assert counts.records == STEPS + 2, "intent and outcome are told by one fact each"


def test_nothing_to_write_is_no_commit_and_no_flush(kit: AgentKit, disk: Disk) -> None:
    log = kit.log
    log.flush()
    counts = Counts(kit, disk)
    assert log.commit(lambda state, now: ()) == []
    log.flush()
    log.refresh()
    with saga_scope(kit=kit):
        pass
    assert (counts.commits, counts.records, counts.flushes) == (0, 0, 0)


@pytest.mark.promise("1.12")
def test_tasks_side_by_side_share_their_commits(kit: AgentKit, disk: Disk) -> None:
    """One commit for all intents (each with its saga's first fact), one for all outcomes, one for all ends."""
    sizes: list[int] = []
    landed: Callable[..., None] = kit.log._landed  # type: ignore[attr-defined]

    def counted(rows: list[Any], *rest: Any) -> None:
        sizes.append(len(rows))
        landed(rows, *rest)

    kit.log._landed = counted  # type: ignore[attr-defined]
    counts = Counts(kit, disk)

    async def one(n: int) -> None:
        async with saga_scope(kit=kit) as saga:
            await saga.execute("counts.act", act, {"n": n}, semantics=COMPENSABLE, compensate=named)

    async def main() -> None:
        await asyncio.gather(*[one(n) for n in range(TASKS)])

    asyncio.run(main())
    assert sizes == [2 * TASKS, TASKS, TASKS]
    assert counts.flushes == 3


# ---- looking --------------------------------------------------------------------------------------------------------


class Rows:
    """Rows that statements return, and steps that they take through a table without an index."""

    def __init__(self, log: Any) -> None:
        self.rows = self.scanned = 0
        self.statements: Counter[str] = Counter()
        self._log = log
        log.record(0)  # opens the connection that reads
        self.connections = [log._db.db, log._reader.db]
        for connection in self.connections:
            connection.trace_v2(apsw.SQLITE_TRACE_PROFILE | apsw.SQLITE_TRACE_ROW, self._seen)

    def _seen(self, event: dict[str, Any]) -> None:
        if event["code"] == apsw.SQLITE_TRACE_ROW:
            self.rows += 1
        else:
            self.statements[event["sql"]] += 1
            self.scanned += event["stmt_status"]["SQLITE_STMTSTATUS_FULLSCAN_STEP"]

    def close(self) -> None:
        for connection in self.connections:
            connection.trace_v2(0, None)


def idle_look(kit: AgentKit) -> Rows:
    seen = Rows(kit.log)
    assert sweep(kit) == ([], [], [])
    seen.close()
    return seen


@pytest.mark.promise("4.1")
def test_a_sweep_with_nothing_to_do_reads_as_little_in_a_long_log_as_in_a_short_one(kit: AgentKit) -> None:
    asyncio.run(a_saga(kit))
    short = idle_look(kit)

    async def more() -> None:
        for _ in range(10):
            await asyncio.gather(*[a_saga(kit) for _ in range(20)])

    asyncio.run(more())
    assert kit.log.size > 2000
    long = idle_look(kit)
    assert long.statements == short.statements and long.rows == short.rows <= 2
    assert long.scanned == 0, "no table is walked"


@pytest.mark.promise("4.1")
def test_opening_a_log_that_was_closed_folds_only_what_came_after_its_memo(
    kit: AgentKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def many() -> None:
        await asyncio.gather(*[a_saga(kit) for _ in range(20)])

    asyncio.run(many())
    size = kit.log.size
    kit.close()
    followed: list[int] = []
    follow = sqlite.Chain.follow
    monkeypatch.setattr(sqlite.Chain, "follow", lambda chain, *a: followed.append(1) or follow(chain, *a))
    with AgentKit(home=tmp_path / "home") as again:
        assert again.log.size >= size > 200
    assert len(followed) <= 2


# ---- starting -------------------------------------------------------------------------------------------------------


def imported(code: str) -> set[str]:
    """The modules a new interpreter has after some code."""
    told = "import sys\nsys.stdout = sys.stderr\n" + code + "\nsys.__stdout__.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"apsw", "msgspec", "nacl", "zstandard", "asyncio", "ssl", "inspect", "importlib.metadata"}


def test_importing_amends_imports_nothing_of_it() -> None:
    before, after = imported(""), imported("import amends")
    assert {name for name in after - before if name.startswith("amends")} == {"amends"}
    assert not HEAVY & (after - before)


@pytest.mark.promise("12")
def test_asking_for_the_version_needs_no_database_and_no_loop() -> None:
    code = "sys.argv = ['amends', '--version']\nfrom amends.cli.main import main\ntry: main()\nexcept SystemExit: pass"
    heavy = {
        "apsw",
        "msgspec",
        "nacl",
        "zstandard",
        "asyncio",
        "importlib.metadata",
        "amends.runtime",
        "amends.store.log",
    }
    assert not heavy & imported(code)


# ---- waiting --------------------------------------------------------------------------------------------------------


def test_a_step_leaves_no_timer_on_the_loop(kit: AgentKit) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        timers = []
        call_at = loop.call_at
        loop.call_at = lambda when, *rest, **named: timers.append(when) or call_at(when, *rest, **named)
        await a_saga(kit)
        assert timers == []

    asyncio.run(main())


def test_a_log_at_rest_wakes_nobody(tmp_path: Path) -> None:
    with AgentKit(home=tmp_path / "home") as kit:
        log: Any = kit.log
        asyncio.run(a_saga(kit))
        eventually(lambda: log._parked)
        ticks = []
        tick = log._tick
        log._tick = lambda: ticks.append(1) or tick()
        threading.Event().wait(0.2)
        assert ticks == []
        assert [thread.name for thread in threading.enumerate() if thread.name == "amends-log"] == ["amends-log"]
