"""A box without a clock wakes in 1970 and is told the time later: what it did stays in order, and nothing is late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from world import World

from amends import COMPENSABLE, AgentKit, saga_scope
from amends.runtime.scope import SagaAborted
from amends.runtime.state import State
from amends.store.audit import verify
from amends.store.chain import Draft
from amends.store.clock import SystemClock
from amends.store.home import Home
from amends.store.identity import open_log
from amends.store.log import MemoryLog

FIFTY_YEARS = 50 * 365 * 24 * 3600


class Unset(SystemClock):
    """The machine's boot clock, and a wall clock that began with it until somebody sets it."""

    set_s = 0

    def wall_us(self) -> int:
        return self.boot_ms() * 1000 + self.set_s * 1_000_000


@pytest.mark.promise("14.9")
def test_a_box_in_1970_runs_and_undoes_and_setting_its_clock_makes_nothing_late(world: World) -> None:
    clock = Unset()
    with AgentKit.in_memory(clock=clock) as kit:
        with saga_scope("before", kit=kit) as saga:
            saga.execute("hotel", world.book, {"what": "room"}, semantics=COMPENSABLE, undo=world.undo)
            lived = kit.log.now().lived
            clock.set_s = FIFTY_YEARS
            saga.execute("car", world.book, {"what": "car"}, semantics=COMPENSABLE, undo=world.undo)
        assert kit.log.now().lived - lived < 60_000, "setting a clock is no time that went by"
        with pytest.raises(SagaAborted), saga_scope("after", kit=kit) as saga:
            saga.execute("train", world.book, {"what": "train"}, semantics=COMPENSABLE, undo=world.undo)
            clock.set_s = 0
            raise ValueError("no")
        entries = [record.entry for record in kit.log.records()]
    assert world.standing == ["car", "room"] and world.undos == ["train"]
    assert entries[0].at < FIFTY_YEARS * 1_000_000 < entries[-1].at
    assert [entry.at for entry in entries] == sorted({entry.at for entry in entries})
    assert [entry.kind for entry in entries].count("clock.stepped") == 2


@pytest.mark.promise("14.9")
def test_a_file_that_was_begun_in_1970_is_intact_when_the_clock_is_set(tmp_path: Path) -> None:
    home, clock = Home(tmp_path / "home"), Unset()
    for clock.set_s in (0, FIFTY_YEARS, 0):
        log = open_log(home, State(), clock=clock, warn=lambda text: None)
        log.commit(lambda state, now: (Draft("note", {}, (), True),))
        log.close()
    verdict = verify(home, view_factory=State)
    assert (verdict.exit, verdict.findings) == (0, [])


class Told:
    """Clocks that say what a test says."""

    wall_s, up_s, boot = 1_700_000_000, 100, "3f2a0000-0000-4000-8000-000000000001"

    def wall_us(self) -> int:
        return self.wall_s * 1_000_000

    def boot_ms(self) -> int:
        return self.up_s * 1000

    def boot_id(self) -> str:
        return self.boot

    def pass_by(self, seconds: int) -> None:
        self.wall_s, self.up_s = self.wall_s + seconds, self.up_s + seconds


def in_memory(path: Path, clock: Any) -> Any:
    return MemoryLog(State(), clock=clock)


def in_a_file(path: Path, clock: Any) -> Any:
    return open_log(Home(path / "home"), State(), clock=clock, warn=lambda text: None)


@pytest.mark.promise("3.1")
@pytest.mark.parametrize("opened", [in_memory, in_a_file])
def test_whoever_only_looks_sees_time_go_by_after_the_clock_was_set_back(
    opened: Callable[[Path, Any], Any], tmp_path: Path
) -> None:
    clock = Told()
    log = opened(tmp_path, clock)
    timed = lambda state, now: (Draft("note", {}, (), True),)  # noqa: E731
    log.commit(timed)
    size, began = log.size, log.now().lived
    clock.pass_by(1)
    clock.wall_s -= 60
    seen = []
    for _ in range(5):
        seen.append(log.now().lived - began)
        clock.pass_by(1)
    assert seen == [1000, 2000, 3000, 4000, 5000] and log.size == size, "nobody wrote anything"
    assert log.look(lambda state, now: now.lived) - began == 6000
    log.commit(timed)
    assert log.now().lived - began == 6000 and log.size == size + 2, "told once, and counted once"
    clock.wall_s += 3600
    clock.pass_by(1)
    assert log.now().lived - began == 7000, "and forward it is no time at all"
    log.close()
