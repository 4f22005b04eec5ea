"""However a program multiplies, restarts or is typed in cells, each process drives its own sagas and no others."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from world import World as Vendor
from world import eventually, fold, killed
from worlds import World, kill

from amends import COMPENSABLE, REVERSIBLE, AgentKit, Refused, SagaAborted, current_saga, saga_scope
from amends.runtime import drive
from amends.runtime.pool import SHARED
from amends.runtime.state import State
from amends.store.audit import verify

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
TOOL = {"semantics": COMPENSABLE}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[AgentKit]:
    kit = AgentKit(home=tmp_path / "home")
    yield kit
    kit.close()


def forked(work: Callable[[], Any]) -> int:
    """Run it in a forked child that ends as prefork workers do, without the interpreter's exit; its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def book(saga: Any, vendor: Vendor, what: str) -> Any:
    return saga.execute("hotel", vendor.book, {"what": what}, undo=vendor.undo, **TOOL)


def drivers(kit: AgentKit) -> dict[str, str]:
    """Who opened each saga, by header id."""
    kit.log.refresh()
    return {r.entry.saga: r.entry.driver for r in kit.log.records() if r.entry.kind == "saga.opened"}


def intact(kit: AgentKit) -> bool:
    kit.log.flush()
    assert kit.home is not None
    verdict = verify(kit.home, view_factory=State)
    return (verdict.exit, verdict.findings) == (0, [])


# ---- prefork --------------------------------------------------------------------------------------------------------


@needs_fork
@pytest.mark.promise("14.7")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_prefork_server_drive_sagas_of_their_own_beside_their_parents(device: AgentKit) -> None:
    def worker(n: int) -> None:
        assert current_saga() is None
        with pytest.raises(Refused, match="is being run by process"), saga_scope("parent", kit=device):
            raise AssertionError("a child took its parent's saga")
        for turn in range(3):
            vendor = Vendor()
            with saga_scope(f"w{n}-{turn}", kit=device) as saga:
                book(saga, vendor, "a")
            with contextlib.suppress(SagaAborted), saga_scope(f"w{n}-{turn}-undone", kit=device) as saga:
                book(saga, vendor, "b")
                raise ValueError
            assert vendor.standing == ["a"] and vendor.undos == ["b"]

    vendor = Vendor()
    with saga_scope("before", kit=device) as saga:
        book(saga, vendor, "warm")
    with saga_scope("parent", kit=device) as saga:
        book(saga, vendor, "one")
        workers = [forked(lambda n=n: worker(n)) for n in range(3)]
        book(saga, vendor, "two")
        assert [ended(pid) for pid in workers] == [0, 0, 0]
        book(saga, vendor, "three")
    assert vendor.standing == ["one", "three", "two", "warm"]
    who = drivers(device)
    assert len(who) == 2 + 3 * 6 and len(set(who.values())) == 4, "one driver for each process"
    outs = [fold(device, saga).out for saga in who]
    assert (outs.count("committed"), outs.count("compensated")) == (11, 9)
    assert intact(device)


@needs_fork
@pytest.mark.promise("14.7")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_worker_leaves_its_own_saga_and_neither_its_parents_nor_its_siblings(device: AgentKit) -> None:
    def hangs(write: int) -> None:
        with saga_scope("hung", kit=device) as saga:
            book(saga, Vendor(), "a")
            os.write(write, b".")
            signal.pause()

    read, write = os.pipe()
    vendor = Vendor()
    with saga_scope("parent", kit=device) as saga:
        book(saga, vendor, "one")
        pid = forked(lambda: hangs(write))
        assert os.read(read, 1) == b"."
        device.log.refresh()
        hung = device.engine.hide("hung")
        assert device.status()["dead"] == []
        with pytest.raises(Refused, match=f"process {pid}"), saga_scope("hung", kit=device):
            raise AssertionError("a parent took its child's saga")
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        assert device.status()["dead"] == [hung], "dead at once, though its parent lives and had the same files open"
        book(saga, vendor, "two")
    assert fold(device, device.engine.hide("parent")).out == "committed" and vendor.standing == ["one", "two"]
    os.close(read), os.close(write)


@needs_fork
@pytest.mark.promise("14.7")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_inside_a_scope_that_falls_out_of_it_undoes_nothing_of_its_parents(device: AgentKit) -> None:
    """The careless fork: the child runs on through the `with` block of its parent, and raises in it."""
    vendor = Vendor()
    read, write = os.pipe()
    pid = -1
    try:
        with saga_scope("parent", kit=device) as saga:
            book(saga, vendor, "one")
            pid = os.fork()
            if pid == 0:
                raise RuntimeError("the child's own trouble")
            assert ended(pid) == 0
            book(saga, vendor, "two")
    except BaseException as error:
        if pid:
            raise
        with contextlib.suppress(OSError):
            os.write(write, f"{type(error).__name__} {vendor.undos}".encode())
        os._exit(0)
    told = os.read(read, 1000).decode()
    assert told.endswith("[]"), f"the child undid its parent's work: {told}"
    assert vendor.standing == ["one", "two"] and fold(device, device.engine.hide("parent")).out == "committed"
    os.close(read), os.close(write)


@needs_fork
@pytest.mark.promise("14.7")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_holds_a_lock_of_ours_leaves_the_child_free_to_go_on(device: AgentKit) -> None:
    def child() -> None:
        signal.alarm(20)
        vendor = Vendor()
        with contextlib.suppress(SagaAborted), saga_scope(kit=device) as saga:
            saga.execute("hotel", vendor.abook, {"what": "a"}, undo=vendor.undo, timeout=10, **TOOL)
            saga.execute("hotel", vendor.book, {"what": "b"}, undo=vendor.undo, timeout=10, **TOOL)
            raise ValueError
        assert vendor.undos == ["b", "a"]

    def holds() -> None:
        with AgentKit._lock, AgentKit._lock_driver, drive._loop_lock, SHARED._more:
            held.set()
            assert forked_by_now.wait(20)

    held, forked_by_now = threading.Event(), threading.Event()
    thread = threading.Thread(target=holds)
    thread.start()
    assert held.wait(20)
    pid = forked(child)
    forked_by_now.set()
    assert ended(pid) == 0
    thread.join()


# ---- multiprocessing ------------------------------------------------------------------------------------------------


def in_a_worker(n: int) -> tuple[int, str, list[str]]:
    """Runs in a process of its own that multiprocessing made: the device's default kit, a saga each."""
    vendor = Vendor()
    with contextlib.suppress(SagaAborted), saga_scope(f"undone-{n}") as saga:
        book(saga, vendor, "b")
        raise ValueError
    with saga_scope(f"trip-{n}") as saga:
        saga.execute("note", vendor.book, {"what": "n"}, semantics=REVERSIBLE, undo=vendor.undo)
        book(saga, vendor, "a")
    return os.getpid(), AgentKit.default().engine.driver, vendor.undos


@pytest.mark.promise("14.7")
@pytest.mark.slow
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_pool_of_processes_works_however_they_are_started(method: str) -> None:
    kit = AgentKit.default()
    vendor = Vendor()
    with saga_scope("parent") as saga:
        book(saga, vendor, "one")
        with multiprocessing.get_context(method).Pool(2) as pool:
            told = pool.map(in_a_worker, range(6), chunksize=1)
            pool.close()
            pool.join()
        book(saga, vendor, "two")
    assert all(undos == ["b"] for _, _, undos in told)
    assert len({(pid, driver) for pid, driver, _ in told}) == len({pid for pid, _, _ in told})
    assert kit.engine.driver not in {driver for _, driver, _ in told}
    outs = [fold(kit, kit.engine.hide(f"{kind}-{n}")).out for kind in ("trip", "undone") for n in range(6)]
    assert outs == ["committed"] * 6 + ["compensated"] * 6 and kit.status()["open"] == 0
    assert fold(kit, kit.engine.hide("parent")).out == "committed" and intact(kit)
    kit.close()


SPAWNED = """
import multiprocessing, os, sys, time
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from amends import COMPENSABLE, Compensation, saga_scope
import shop

def refund_here(of, idempotency_key):
    return shop.refund(of, idempotency_key=idempotency_key)

def work(name):
    with saga_scope(id=name) as saga:
        saga.execute("shop.charge", shop.charge, {"item": "book"}, semantics=COMPENSABLE,
                     compensate=lambda result: Compensation(refund_here, {"of": result["id"]}))
        print("charged", os.getpid(), flush=True)
        time.sleep(60)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work, args=("order-1",))
    child.start()
    child.join()
    print("ended", child.exitcode, flush=True)
    sys.stdin.read()
    time.sleep(60)
"""


@needs_fork
@pytest.mark.promise("14.7", "4.4")
def test_a_spawned_worker_that_is_killed_is_undone_by_a_function_of_its_main_script(world: World) -> None:
    script = world.folder / "server.py"
    script.write_text(SPAWNED)
    server = world.start([sys.executable, str(script)])
    assert server.stdout is not None
    word, pid = server.stdout.readline().split()
    assert word == "charged" and world.standing() == ["book"]
    os.kill(int(pid), signal.SIGKILL)
    assert server.stdout.readline().split() == ["ended", "-9"]
    code, said = world.recover()
    assert server.poll() is None, "the worker's parent lives"
    assert (code, said["recovered"]) == (0, ["order-1"]) and world.refunded() == ["book"]


# ---- exec -----------------------------------------------------------------------------------------------------------

AGAIN = """
import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from amends import AgentKit, COMPENSABLE, Compensation, saga_scope
import shop

def undo(item, idempotency_key):
    return Compensation(handler="shop.refund", kwargs={"of": idempotency_key})

def buy(item):
    saga.execute("shop.charge", shop.charge, {"item": item}, semantics=COMPENSABLE, undo=undo)

if __name__ == "__main__":
    print(os.getpid(), flush=True)
    home = os.path.realpath(os.environ["AMENDS_HOME"])
    if len(sys.argv) == 1:
        with saga_scope(id="order-1") as saga:
            buy("book")
            os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), "again"])
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    print([name for name in opened if name.startswith(home)], flush=True)
    with saga_scope(id="order-2") as saga:
        buy("pen")
        print(AgentKit.default().status()["dead"], flush=True)
        AgentKit.default().log.flush()
        sys.stdin.read()
        import time
        time.sleep(60)
"""


@pytest.mark.promise("14.7")
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_program_that_replaces_itself_is_another_driver_and_takes_no_lock_along(world: World) -> None:
    script = world.folder / "again.py"
    script.write_text(AGAIN)
    agent = world.start([sys.executable, str(script)])
    assert agent.stdout is not None
    first, second = agent.stdout.readline(), agent.stdout.readline()
    assert first == second, "the same process"
    assert agent.stdout.readline().strip() == "[]", "no file of the home is open across exec"
    assert agent.stdout.readline().count("'") == 2, "what the former image left is dead, though its process lives"
    code, said = world.recover()
    assert agent.poll() is None
    assert (code, said["recovered"]) == (0, ["order-1"]), "and only that"
    assert world.standing() == ["pen"] and world.refunded() == ["book"]
    kill(agent)
    assert world.recover()[1]["recovered"] == ["order-2"] and world.standing() == []


@pytest.mark.promise("14.7")
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_program_that_was_started_with_everything_open_holds_no_lock_of_the_agent(world: World) -> None:
    body = """
        import subprocess
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.DEVNULL)
            print(child.pid, flush=True)
            time.sleep(60)
    """
    agent = world.agent(body)
    assert agent.stdout is not None
    left = int(agent.stdout.readline())
    try:
        kill(agent)
        assert world.recover()[1]["recovered"] == ["order-1"] and world.standing() == []
    finally:
        os.kill(left, signal.SIGKILL)


# ---- notebooks and loops --------------------------------------------------------------------------------------------


CONSOLE = [sys.executable, "-m", "asyncio"]
"""Cells typed one after another into one namespace, with an event loop between them, as notebooks have."""

CELLS = """
import sys, time
from amends import AgentKit, COMPENSABLE, Compensation, SagaAborted, saga_scope
made, undone = [], []
def book(what):
    made.append(what)
    return what

async def abook(what):
    made.append(what)
    return what

def cancel(what):
    undone.append(what)

def inverse(result):
    return Compensation(cancel, {"what": result})

options = dict(semantics=COMPENSABLE, compensate=inverse)
"""

NOTEBOOK = (
    CELLS
    + """
async with saga_scope("one") as saga:
    await saga.execute("hotel", abook, {"what": "a"}, **options)

with saga_scope("two") as saga:
    kept = saga.execute("hotel", abook, {"what": "b"}, **options)

scope = saga_scope("three")
saga = await scope.__aenter__()
kept = await saga.execute("hotel", book, {"what": "c"}, **options)
def cancel(what):
    undone.append(what + " by the corrected cell")

kept = await saga.execute("hotel", abook, {"what": "d"}, **options)
try:
    await scope.__aexit__(ValueError, ValueError("no"), None)
except SagaAborted as error:
    print(error.report.clean, made, undone, AgentKit.default().status()["open"])

"""
)

KERNEL = (
    CELLS
    + """
scope = saga_scope("trip")
saga = scope.__enter__()
kept = saga.execute("hotel", book, {"what": "a"}, **options)
print("ready", flush=True)
time.sleep(60)
"""
)


@pytest.mark.promise("14.7")
def test_cells_of_a_notebook_share_the_device_and_a_saga_may_stay_open_between_them(world: World) -> None:
    typed = subprocess.run(CONSOLE, input=NOTEBOOK, env=world.env, text=True, capture_output=True, timeout=60)
    lines = [line for line in typed.stdout.splitlines() if "True" in line]
    assert lines, typed.stderr
    assert lines[-1].endswith("True ['a', 'b', 'c', 'd'] ['d by the corrected cell', 'c'] 0"), (
        "each step as it was given"
    )
    assert "Traceback" not in typed.stderr and typed.stderr.count("a sync saga on a thread with a running") == 1
    ends = [entry.out for entry in world.log() if entry.kind == "saga.ended"]
    assert ends == ["committed", "committed", "compensated"]


@pytest.mark.promise("14.7", "4.3")
def test_a_notebook_whose_kernel_died_says_which_inverse_died_with_it(world: World) -> None:
    (world.folder / "cells").write_text(KERNEL)
    with (world.folder / "cells").open() as cells:
        kernel = subprocess.Popen(CONSOLE, stdin=cells, stdout=subprocess.PIPE, env=world.env, text=True)
    assert kernel.stdout is not None
    with kernel.stdout as told:
        assert any("ready" in line for line in told)
        kill(kernel)
    code, said = world.recover()
    assert code == 1 and said["escalated"] == [{"saga": "trip", "step": 1, "reason": "closure"}]
    assert "prompt or in a notebook" in world.amends("show", "trip", "--why").stdout


@pytest.mark.promise("14.7")
def test_loops_come_and_go_over_one_file_and_what_one_left_in_the_air_is_settled(device: AgentKit) -> None:
    vendor, gate = Vendor(), threading.Event()

    async def commits(n: int) -> None:
        async with saga_scope(f"trip-{n}", kit=device) as saga:
            calls = [
                saga.execute("hotel", vendor.abook, {"what": f"{n}{k}"}, undo=vendor.undo, **TOOL) for k in range(5)
            ]
            await asyncio.gather(*calls)

    async def leaves() -> None:
        async with saga_scope("left", kit=device) as saga:
            slow = vendor.slow_book(gate, before=False)
            await saga.execute("hotel", slow, {"what": "late"}, undo=vendor.undo, timeout=0.05, settle=0.05, **TOOL)

    asyncio.run(commits(0))
    with pytest.raises(SagaAborted):
        asyncio.run(leaves())
    threads = [threading.Thread(target=asyncio.run, args=(commits(n),)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    asyncio.run(commits(3))
    for thread in threads:
        thread.join(20)
    gate.set()  # its loop is closed by now
    eventually(lambda: "late" in vendor.undos)
    asyncio.run(commits(4))
    assert vendor.standing == sorted(f"{n}{k}" for n in range(5) for k in range(5))
    assert fold(device, device.engine.hide("left")).out == "compensated" and "late" in vendor.undos
    assert intact(device)


# ---- identity -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.12")
def test_a_step_is_counted_when_it_is_called_and_not_when_it_is_awaited(kit: AgentKit) -> None:
    vendor = Vendor()

    async def run(order: tuple[int, int], die: bool) -> list[Any]:
        scope = saga_scope("trip", kit=kit, on_crash="resume")
        saga = await scope.__aenter__()
        calls = [saga.execute("hotel", vendor.abook, {"what": what}, undo=vendor.undo, **TOOL) for what in "ab"]
        got = {n: await calls[n] for n in order}
        if not die:
            await scope.__aexit__(None, None, None)
        return [got[0]["what"], got[1]["what"]]

    assert asyncio.run(run((0, 1), die=True)) == ["a", "b"]
    killed(kit)
    assert asyncio.run(run((1, 0), die=False)) == ["a", "b"] and vendor.calls == 2
