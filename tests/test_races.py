"""Daemons, agents and clocks that race: nobody is robbed, nothing is undone twice, nothing acknowledged is lost.

Real processes on one home. What a race did is read from the log and from the ledger, a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kill_child import SETTLE
from mortals import HERE, KILLED, Ledger, Mortals
from simulation import Clock
from test_kill_matrix import Matrix

from amends.runtime.daemon import sweep
from amends.runtime.kit import AgentKit
from amends.runtime.scope import saga_scope
from amends.runtime.state import State
from amends.runtime.tools import Compensation
from amends.store.audit import verify
from amends.store.chain import Draft
from amends.store.errors import Fenced
from amends.store.identity import open_log
from amends.store.log import MemoryLog

CHILD = str(HERE / "kill_child.py")
DAY_US = 86_400_000_000


def recoverd(home: Path | str, *before: str, **env: str) -> subprocess.Popen[str]:
    """`amends recoverd --once --json` as a process of its own."""
    command = [*before, sys.executable, "-m", "amends.cli", "recoverd", "--once", "--json"]
    return subprocess.Popen(
        command, env={**os.environ, "AMENDS_HOME": str(home), **env}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def kinds(home: Path | str) -> list[str]:
    log = open_log(str(home), State(), write=False)
    try:
        return [record.entry.kind for record in log.records()]
    finally:
        log.close()


# ---- many daemons ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("4.1")
@pytest.mark.slow
def test_five_daemons_over_twenty_dead_sagas_run_each_inverse_once(
    tmp_path: Path, ledger: Ledger, mortals: Mortals
) -> None:
    matrix = Matrix(tmp_path / "home", ledger, mortals, seed=5)
    script = {"steps": 3, "inverse": "declared", "handler": "keyed", "commits": True}
    for _ in range(20):
        assert matrix._agent(script, {"call": "do t3", "when": "before"}) == KILLED
    time.sleep(SETTLE)
    daemons = [recoverd(matrix.home, KILL_CHILD_SLOW_S="0.2") for _ in range(5)]
    told = [json.loads(daemon.communicate(timeout=120)[0]) for daemon in daemons]
    recovered = [saga for one in told for saga in one["recovered"]]
    assert sorted(recovered) == sorted(matrix.sagas)
    assert not [saga for one in told for saga in one["escalated"]]
    attempts = Counter(a["key"] for a in ledger.told("attempts") if a["kind"] == "refund")
    assert len(attempts) >= 40 and set(attempts.values()) == {1}
    assert ledger.told("standing") == []
    matrix.judge()


# ---- a living owner --------------------------------------------------------------------------------------------------


@pytest.mark.promise("4.2")
@pytest.mark.slow
def test_an_agent_that_is_stopped_past_every_timeout_is_not_robbed(tmp_path: Path, ledger: Ledger) -> None:
    home, gate = tmp_path / "home", tmp_path / "gate"
    agent = subprocess.Popen([sys.executable, CHILD, "patient", str(home), ledger.url, str(gate)],
                             stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert agent.stdout is not None and agent.stdout.readline() == "running\n"
    time.sleep(0.5)  # what its log does when idle is done: who is stopped in a transaction holds the file
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        for before in ((), _faked("+1d", tmp_path) or (), _faked("-1d", tmp_path) or ()):
            out, _ = (daemon := recoverd(home, *before)).communicate(timeout=60)
            assert daemon.returncode == 0 and json.loads(out)["recovered"] == [], out
            assert [one["saga"] for one in json.loads(out)["skipped"]] == ["patient"]
    finally:
        gate.touch()
        os.kill(agent.pid, signal.SIGCONT)
    assert agent.wait(timeout=30) == 0
    assert "saga.taken" not in kinds(home) and kinds(home)[-1] == "saga.ended"
    assert [effect["body"]["thing"] for effect in ledger.told("standing")] == ["t1"]
    assert not [a for a in ledger.told("attempts") if a["kind"] == "refund"]


@pytest.mark.promise("4.2")
def test_who_was_taken_for_dead_and_lives_is_refused_and_starts_no_effect(tmp_path: Path) -> None:
    first, second = AgentKit(home=tmp_path / "home"), AgentKit(home=tmp_path / "home")
    done: list[str] = []
    with pytest.raises(Fenced), saga_scope(id="stale", kit=first) as saga:
        undo = Compensation(lambda: done.append("undone"))
        saga.execute("one", lambda: done.append("one"), {}, semantics="COMPENSABLE", undo=undo)
        assert first._driver is not None
        first._driver.abandon()  # as if its lock had been lost
        swept = sweep(second)
        assert [one["reason"] for one in swept.escalated] == ["closure"]
        saga.execute("two", lambda: done.append("two"), {}, semantics="COMPENSABLE", undo=undo)
    assert done == ["one"]
    assert not [e for e in kinds(tmp_path / "home") if e.startswith("undo.")]
    first.close()
    second.close()


# ---- clocks ----------------------------------------------------------------------------------------------------------


def _faked(offset: str, folder: Path) -> tuple[str, ...] | None:
    """The command that sets the wall clock of a process, and leaves its boot clock alone; None where there is none."""
    if shutil.which("faketime") is None:
        return None
    # libfaketime refuses `clock_nanosleep` to a deadline when it leaves the boot clock alone: sleep by other means.
    patch = "import threading, time\ntime.sleep = lambda seconds: threading.Event().wait(seconds) and None\n"
    (folder / "sitecustomize.py").write_text(patch)
    return ("env", f"PYTHONPATH={folder}", "FAKETIME_DONT_FAKE_MONOTONIC=1", "faketime", "-f", offset)


@pytest.mark.promise("1.8")
@pytest.mark.slow
@pytest.mark.parametrize("offset", ["+1d", "-1d"])
def test_a_clock_that_is_a_day_off_neither_skips_a_settle_wait_nor_makes_it_last_a_day(
    tmp_path: Path, ledger: Ledger, mortals: Mortals, offset: str
) -> None:
    before = _faked(offset, tmp_path)
    if before is None:
        pytest.skip("faketime is not installed; the clock is set in process in the other tests")
    matrix = Matrix(tmp_path / "home", ledger, mortals, seed=6)
    script = {"steps": 2, "inverse": "declared", "handler": "keyed", "commits": True}
    assert matrix._agent(script, {"call": "do t2", "when": "sent", "late": True}) == KILLED
    daemon = recoverd(matrix.home, *before)
    out, errors = daemon.communicate(timeout=60)
    assert daemon.returncode == 0, (out, errors)
    assert json.loads(out)["recovered"] == list(matrix.sagas)
    assert ledger.told("standing") == []
    assert "clock.stepped" in kinds(matrix.home)
    matrix.judge()


@pytest.mark.promise("1.8")
@pytest.mark.parametrize("days", [-1, 1])
@pytest.mark.parametrize("boots", [False, True])
def test_lived_time_goes_on_with_the_boot_clock_when_the_wall_was_set(days: int, boots: bool) -> None:
    """A box that comes up a day behind its log waits for two seconds and not for a day; one ahead waits them too."""
    clock = Clock()
    log = MemoryLog(State(), clock=clock)
    log.commit(lambda state, now: [])
    clock.advance(10)
    clock.set_us += days * DAY_US
    if boots:
        clock.reboot()
    log.commit(lambda state, now: [Draft("saga.opened", {"saga": "s", "fence": 1, "driver": "d"}, (), True)])
    began = log.now().lived
    clock.advance(2)
    assert 1990 <= log.now().lived - began <= 2000
    log.commit(lambda state, now: [Draft("saga.released", {"saga": "s", "fence": 1}, (), True)])
    clock.advance(3)
    assert 4990 <= log.now().lived - began <= 5000


# ---- many writers ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.2")
@pytest.mark.slow
def test_eight_writers_of_which_one_is_killed_each_second_lose_nothing_and_hear_of_no_lock(tmp_path: Path) -> None:
    home, steps = tmp_path / "home", 200
    AgentKit(home=home).close()
    writers = [_Writer(tmp_path, home, n, steps) for n in range(8)]
    chance, kills, next_kill = random.Random(8), 0, time.monotonic() + 1
    end = time.monotonic() + 120
    while any(not writer.finished() for writer in writers):
        assert time.monotonic() < end, [writer.acknowledged() for writer in writers]
        time.sleep(0.02)
        running = [writer for writer in writers if not writer.finished()]
        if running and time.monotonic() >= next_kill:
            next_kill = time.monotonic() + 1
            kills += chance.choice(running).kill()
    assert kills >= 2
    told = [line for writer in writers for line in writer.lines()]
    assert len(told) == len(set(told)) >= 8 * steps
    log = open_log(home, State(), write=False)
    done = Counter(f"{r.entry.saga} {r.entry.step}" for r in log.records() if r.entry.kind == "step.done")
    log.close()
    assert set(told) <= set(done) and set(done.values()) == {1}
    said = "".join(writer.errors.read_text() for writer in writers)
    assert "locked" not in said.lower() and "Traceback" not in said
    assert verify(home, view_factory=State).exit == 0


class _Writer:
    """A process that writes its share of steps, started again where it was killed."""

    def __init__(self, folder: Path, home: Path, number: int, steps: int) -> None:
        self.home, self.steps = home, steps
        self.told, self.errors = folder / f"told-{number}", folder / f"errors-{number}"
        self.told.touch()
        self._start()

    def _start(self) -> None:
        left = self.steps - self.acknowledged()
        with open(self.errors, "ab") as errors:
            self.process: Any = subprocess.Popen(
                [sys.executable, CHILD, "many", str(self.home), str(left), str(self.told)], stderr=errors
            )

    def lines(self) -> list[str]:
        return self.told.read_text().splitlines()

    def acknowledged(self) -> int:
        return len(self.lines())

    def finished(self) -> bool:
        code = self.process.poll()
        assert code in (None, 0, KILLED), self.errors.read_text()
        if code == KILLED and self.acknowledged() < self.steps:
            self._start()
            return False
        return code is not None

    def kill(self) -> int:
        if self.process.poll() is not None:
            return 0
        self.process.kill()
        return 1
