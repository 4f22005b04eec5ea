"""A dead driver is known to be dead, a live one is never robbed: tried with real processes and real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from amends.store import driver
from amends.store.driver import Driver, alive, describe, listed, sweep, wait_dead

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals")

OWNER = """
import sys, time
from amends.store.driver import Driver
d = Driver.start(sys.argv[1])
print(d.id, flush=True)
time.sleep(600)
"""


class Owner:
    """Another process that drives."""

    def __init__(self, run: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", OWNER, str(run)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.id = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


@pytest.fixture
def owner(tmp_path):
    owner = Owner(tmp_path)
    yield owner
    owner.kill()


@pytest.mark.promise("4.1")
def test_kill_9_frees_the_lock_and_wakes_the_waiter(tmp_path, owner):
    assert alive(tmp_path, owner.id)
    found: list[object] = []
    waiter = threading.Thread(target=lambda: found.append(wait_dead(tmp_path, owner.id)), daemon=True)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive() and not found
    owner.process.kill()
    waiter.join(10)
    assert found and found[0]
    assert alive(tmp_path, owner.id), "whoever found the death holds the lock now"
    found[0].release()
    assert not alive(tmp_path, owner.id)
    assert listed(tmp_path) == []


@pytest.mark.promise("4.2")
def test_a_stopped_owner_is_alive_and_is_said_to_be_stopped(tmp_path, owner):
    os.kill(owner.process.pid, signal.SIGSTOP)
    for _ in range(200):
        if describe(tmp_path, owner.id)["stopped"]:
            break
        time.sleep(0.01)
    told = describe(tmp_path, owner.id)
    assert told["stopped"] is True and told["alive"] is True and told["pid"] == owner.process.pid
    assert wait_dead(tmp_path, owner.id, 0.3) is None
    os.kill(owner.process.pid, signal.SIGCONT)
    assert alive(tmp_path, owner.id)


@pytest.mark.promise("4.2")
@pytest.mark.promise("14.7")
def test_a_forked_child_neither_holds_nor_frees_the_parents_lock(tmp_path):
    mine = Driver.start(tmp_path)
    gate_r, gate_w = os.pipe()
    ready_r, ready_w = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gate_w)
        os.write(ready_w, b"x")
        code = 0 if not mine.held and not os.path.exists(f"/proc/self/fd/{mine._fd}") else 1
        mine.release()  # harmless here: neither unlinks nor unlocks
        os.read(gate_r, 1)
        os._exit(code)
    os.close(gate_r)
    os.read(ready_r, 1)
    assert alive(tmp_path, mine.id)
    path = mine.path
    mine.abandon()
    # the child lives on; it must not keep the lock of a parent that let go
    assert not alive(tmp_path, mine.id)
    os.close(gate_w)
    assert os.waitpid(child, 0)[1] == 0
    assert path.exists()


@pytest.mark.promise("4.2")
def test_the_death_of_a_forked_child_does_not_free_the_parents_lock(tmp_path):
    mine = Driver.start(tmp_path)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert alive(tmp_path, mine.id)
    assert wait_dead(tmp_path, mine.id, 0) is None
    mine.release()


@pytest.mark.promise("14.7")
def test_a_forked_child_becomes_a_driver_of_its_own(tmp_path):
    mine = Driver.start(tmp_path)
    child = os.fork()
    if child == 0:
        own = Driver.start(tmp_path)
        os._exit(0 if own.held and own.id != mine.id and alive(tmp_path, own.id) and alive(tmp_path, mine.id) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(listed(tmp_path)) == 2
    assert len(sweep(tmp_path)) == 1
    assert listed(tmp_path) == [mine.id]
    mine.release()


@pytest.mark.promise("14.7")
def test_exec_ends_the_driver_though_the_process_lives(tmp_path):
    script = (
        "import os, sys\nfrom amends.store.driver import Driver\nd = Driver.start(sys.argv[1])\n"
        "print(d.id, flush=True)\nos.execvp('sleep', ['sleep', '600'])"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        id = process.stdout.readline().strip()
        death = wait_dead(tmp_path, id, 10)
        assert death and process.poll() is None
        death.release()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.promise("4.2")
def test_a_file_replaced_under_a_waiter_is_noticed(tmp_path, owner):
    """The waiter sleeps on the old file; a new one with a living owner takes its name; then the old owner dies."""
    path = tmp_path / f"{owner.id}.lock"
    found: list[object] = []
    waiter = threading.Thread(target=lambda: found.append(wait_dead(tmp_path, owner.id)), daemon=True)
    waiter.start()
    waiter.join(0.2)
    os.unlink(path)
    other = driver._create(path, driver.SystemClock())
    owner.kill()
    waiter.join(0.5)
    assert waiter.is_alive() and not found, "the lock of the old file is not the lock of this driver"
    driver.close_known(other)
    waiter.join(10)
    assert found and found[0]
    found[0].release()


@pytest.mark.promise("4.1")
def test_of_many_who_find_a_death_one_holds_it(tmp_path):
    owner = Owner(tmp_path)
    owner.kill()
    found: list[object] = []

    def race() -> None:
        death = wait_dead(tmp_path, owner.id, 0)
        if death:
            found.append(death)

    racers = [threading.Thread(target=race) for _ in range(16)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(found) == 1
    found[0].release()


def test_a_missing_file_is_a_death_that_one_can_hold(tmp_path):
    id = "a" * 26
    assert not alive(tmp_path, id)
    with wait_dead(tmp_path, id, 0) as death:
        assert death.held and alive(tmp_path, id)
        assert wait_dead(tmp_path, id, 0) is None
    assert listed(tmp_path) == []


def test_a_recovery_that_raises_leaves_the_file_for_the_next(tmp_path):
    owner = Owner(tmp_path)
    owner.kill()
    with pytest.raises(RuntimeError), wait_dead(tmp_path, owner.id, 0):
        raise RuntimeError
    assert listed(tmp_path) == [owner.id] and not alive(tmp_path, owner.id)


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 26, "a" * 25, "a" * 26 + "\n"])
def test_a_name_that_is_no_id_reaches_no_file(tmp_path, name):
    assert not alive(tmp_path, name)
    death = wait_dead(tmp_path, name, 0)
    assert death is not None and death.path is None
    death.release()
    assert list(tmp_path.iterdir()) == []


def test_release_removes_the_file_and_the_portrait_holds_no_arguments(tmp_path):
    mine = Driver.start(tmp_path)
    told = describe(tmp_path, mine.id)
    assert told["pid"] == os.getpid() and told["alive"] and told["stopped"] is False and told["boot"]
    assert all(argument not in told["command"] for argument in sys.argv[1:] if len(argument) > 3)
    assert mine.path.stat().st_mode & 0o777 == 0o600
    mine.release()
    mine.release()
    assert list(tmp_path.iterdir()) == []
    assert describe(tmp_path, mine.id) == {"alive": False, "stopped": None}


def test_sweep_keeps_the_living_and_what_is_needed(tmp_path):
    living, needed, idle = Owner(tmp_path), Owner(tmp_path), Owner(tmp_path)
    needed.kill()
    idle.kill()
    (tmp_path / "half.1.2.new").write_bytes(b"")
    os.utime(tmp_path / "half.1.2.new", (1, 1))
    assert sweep(tmp_path, keep={needed.id}) == [idle.id]
    assert sorted(listed(tmp_path)) == sorted([living.id, needed.id])
    assert not list(tmp_path.glob("*.new"))
    living.kill()
