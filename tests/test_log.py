"""The log in memory and the overlay over another log: the contract, and what is theirs alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from log_contract import Keys, Ledger, LogContract, done, ended, facts, intended, kinds, opened

from amends.store.chain import Chain, Draft
from amends.store.clock import Now
from amends.store.entry import read
from amends.store.errors import Damaged, Illegal
from amends.store.fold import Timeline
from amends.store.log import MemoryLog, Overlay
from amends.store.sqlite import SqliteLog


class TestMemoryLog(LogContract):
    @pytest.fixture
    def log(self) -> MemoryLog:
        return MemoryLog(Ledger())


class TestOverlayOverMemory(LogContract):
    @pytest.fixture
    def log(self) -> Overlay:
        return Overlay(MemoryLog(Ledger()))


class TestOverlayOverAFile(LogContract):
    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[Overlay]:
        base = SqliteLog(tmp_path / "amends.db", Ledger(), Keys())
        yield Overlay(base)
        base.close()


@pytest.fixture(params=["memory", "file"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    log: Any = MemoryLog(Ledger())
    if request.param == "file":
        log = SqliteLog(tmp_path / "amends.db", Ledger(), Keys())
    yield log
    log.close()


@pytest.mark.promise("4.7")
def test_an_overlay_changes_nothing_below_it(base: Any) -> None:
    base.commit(facts(opened("a"), intended("a", use={"eur": 1})))
    before = (base.size, kinds(base), base.image())
    overlay = Overlay(base)
    overlay.commit(facts(done("a"), ended("a"), opened("b")))
    assert (base.size, kinds(base), base.image()) == before
    assert [r.entry.n for r in overlay.thread("a")] == [1, 2, 3, 4]
    assert [(r.saga, r.open) for r in overlay.sagas()] == [("b", True), ("a", False)]
    assert kinds(overlay)[-3:] == ["step.done", "saga.ended", "saga.opened"]


def test_an_overlay_does_not_see_what_its_base_takes_in_later(base: Any) -> None:
    base.commit(facts(opened("a"), opened("e"), ended("e")))
    overlay = Overlay(base)
    base.commit(facts(intended("a"), opened("late"), ended("a")))
    assert overlay.view.open == {"a": []}
    assert [(r.saga, r.open, r.first == r.head) for r in overlay.sagas()] == [("e", False, False), ("a", True, True)]
    assert [r.entry.n for r in overlay.thread("a")] == [1]
    assert overlay.thread("late") == []
    assert len(list(overlay.records())) == overlay.size


def test_an_overlay_that_was_spoiled_stands_where_it_began_even_if_its_base_has_moved(base: Any) -> None:
    base.commit(facts(opened("a")))
    overlay = Overlay(base)
    overlay.commit(facts(intended("a", 1, use={"eur": 1})))
    base.commit(facts(intended("a", 5, use={"eur": 100})))
    with pytest.raises(Illegal):
        overlay.commit(facts(intended("a", 2, use={"eur": 10}), done("a", 9)))
    assert overlay.view.spent == {"eur": 1}
    overlay.commit(facts(done("a", 1)))
    assert [r.entry.step for r in overlay.thread("a")] == [0, 1, 1]


def test_an_overlay_may_stand_on_an_overlay() -> None:
    base = MemoryLog(Ledger())
    base.commit(facts(opened("a")))
    first = Overlay(base)
    first.commit(facts(intended("a")))
    second = Overlay(first)
    second.commit(facts(done("a")))
    assert [len(log.thread("a")) for log in (base, first, second)] == [1, 2, 3]


class StepClock:
    """Clocks that move when told to."""

    def __init__(self) -> None:
        self.wall, self.boot, self.name = 1_000_000_000_000, 5_000, "boot-1"

    def wall_us(self) -> int:
        return self.wall

    def boot_ms(self) -> int:
        return self.boot

    def boot_id(self) -> str:
        return self.name


@pytest.mark.promise("1.8")
def test_lived_time_is_the_smaller_of_wall_and_boot_clock_and_never_goes_back() -> None:
    clock = StepClock()
    log = MemoryLog(Ledger(), clock=clock)

    def at(wall_s: float, boot_s: float) -> int:
        clock.wall, clock.boot = 1_000_000_000_000 + int(wall_s * 1e6), 5_000 + int(boot_s * 1e3)
        log.commit(facts(Draft("note", {}, up=True)))
        return log.view.lived

    at(0, 0)
    assert at(10, 10) == pytest.approx(10_000, abs=5)
    assert at(86_410, 11) == pytest.approx(11_000, abs=5)  # the wall was set a day ahead
    assert at(86_420, 21) == pytest.approx(21_000, abs=5)
    assert at(20, 31) == pytest.approx(31_000, abs=5)  # and set right again: nobody waits for a day
    assert at(25, 36) == pytest.approx(36_000, abs=5)
    assert at(86_430, 86_441) == pytest.approx(86_441_000, abs=5)  # the wall has overtaken the log
    assert at(86_450, 86_442) == pytest.approx(86_442_000, abs=5)
    clock.name = "boot-2"
    assert at(86_460, 0) == pytest.approx(86_452_000, abs=5)
    assert kinds(log).count("clock.stepped") == 3


@pytest.mark.promise("1.8")
def test_the_boot_clock_alone_does_not_make_lived_time_run_ahead() -> None:
    clock = StepClock()
    log = MemoryLog(Ledger(), clock=clock)
    log.commit(facts(opened("a")))
    for _ in range(10):  # each below what counts as a step
        clock.wall += 1_000_000
        clock.boot += 2_500
        log.commit(facts(Draft("note", {}, up=True)))
    assert log.view.lived == pytest.approx(10_000, abs=5)


@pytest.mark.parametrize("by", [-86_400, 86_400])
def test_a_step_of_the_wall_clock_while_nobody_looked_is_recorded(by: int) -> None:
    clock = StepClock()
    log = MemoryLog(Ledger(), clock=clock)
    log.commit(facts(opened("a")))
    clock.wall, clock.boot = clock.wall + (by + 60) * 1_000_000, clock.boot + 60_000
    log._refold()  # as a process does that opens it
    log.commit(facts(intended("a")))
    log.commit(facts(done("a")))
    assert kinds(log)[-3:] == ["clock.stepped", "step.intended", "step.done"]
    assert log.view.lived == pytest.approx(60_000, abs=5)


def test_times_in_the_log_only_rise_though_the_wall_is_set_back() -> None:
    clock = StepClock()
    log = MemoryLog(Ledger(), clock=clock)
    log.commit(facts(opened("a")))
    clock.wall -= 10**9
    log.commit(facts(intended("a"), done("a")))
    times = [r.entry.at for r in log.records()]
    assert times == sorted(set(times))


def test_each_boot_is_named_once() -> None:
    clock = StepClock()
    log = MemoryLog(Ledger(), clock=clock)
    log.commit(facts(opened("a")))
    clock.name = "boot-2"
    log.commit(facts(intended("a")))
    log.commit(facts(done("a")))
    assert kinds(log) == ["log.opened", "log.booted", "saga.opened", "log.booted", "step.intended", "step.done"]


def test_an_entry_that_does_not_follow_is_named() -> None:
    log = MemoryLog(Ledger())
    log.commit(facts(opened("a"), intended("a")))
    lines = [r.line for r in log.records()]
    for wrong in ([0, 2], [0, 1, 3], [1]):
        chain = Chain(Ledger())
        with pytest.raises(Damaged) as caught:
            for place in wrong:
                chain.follow(read(lines[place]), lines[place])
        assert caught.value.facts["seq"] == wrong.index(wrong[-1])


def test_a_chain_comes_back_from_its_dump() -> None:
    log = MemoryLog(Ledger())
    log.commit(facts(opened("a"), intended("a")))
    chain = Chain(Ledger())
    chain.load(log.standing())
    assert chain.dump() == log.standing()
    assert chain.threads["a"].n == 2


def test_a_timeline_refuses_a_boot_it_does_not_know() -> None:
    log = MemoryLog(Ledger())
    log.commit(facts(opened("a")))
    entry = log.record(1).entry
    line = Timeline([], 0, 0, (0, 0))
    for up in ((2, 5), (0, 5), ()):
        entry.up = up
        with pytest.raises(Illegal):
            line.at_entry(entry)


def test_now_is_above_every_time_in_the_log() -> None:
    log = MemoryLog(Ledger())
    seen: list[Now] = []
    log.commit(lambda view, now: (seen.append(now), (opened("a"),))[1])
    assert seen[0].at > log.record(log.size - 2).entry.at
