"""Sync and async callers are equals: in every mix, on any thread, and a hung tool holds up nobody's exit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from world import World, eventually, fold

from amends import COMPENSABLE, REVERSIBLE, AgentKit, Compensation, SagaAborted, current_saga, saga_scope, tool
from amends.runtime import drive, pool, reach, scope
from amends.runtime.drive import Blocking, Looping, NeverStarted, run
from amends.runtime.pool import Pool

TOOL = {"semantics": COMPENSABLE}


@pytest.mark.promise("1.17")
@pytest.mark.parametrize("timeout", [None, 5])
@pytest.mark.parametrize("scope_kind", ["sync", "async"])
@pytest.mark.parametrize("tool_kind", ["sync", "async"])
def test_every_mix_of_scope_tool_and_deadline_commits_and_is_undone(
    kit: AgentKit, world: World, scope_kind: str, tool_kind: str, timeout: float | None
) -> None:
    fn = world.book if tool_kind == "sync" else world.abook
    options = {"semantics": COMPENSABLE, "undo": world.undo, "timeout": timeout}

    def sync(fails: bool) -> None:
        with saga_scope(kit=kit) as saga:
            assert saga.execute("hotel", fn, {"what": "a"}, **options)["what"] == "a"
            if fails:
                raise ValueError

    async def on_a_loop(fails: bool) -> None:
        async with saga_scope(kit=kit) as saga:
            assert (await saga.execute("hotel", fn, {"what": "a"}, **options))["what"] == "a"
            if fails:
                raise ValueError

    def go(fails: bool) -> None:
        sync(fails) if scope_kind == "sync" else asyncio.run(on_a_loop(fails))

    go(False)
    assert world.standing == ["a"]
    with pytest.raises(SagaAborted):
        go(True)
    assert world.standing == ["a"] and world.undos == ["a"]


@pytest.mark.promise("1.17")
@pytest.mark.parametrize("scope_kind", ["sync", "async"])
def test_async_factories_probes_and_compensations_work_in_either(kit: AgentKit, world: World, scope_kind: str) -> None:
    from amends import PRESENT, Compensation

    async def undo(what: str, idempotency_key: str) -> Compensation:
        return Compensation(world.acancel, {"of": idempotency_key})

    async def probe(what: str) -> Any:
        return PRESENT

    async def verify(result: Any) -> bool:
        return True

    def sync() -> None:
        with saga_scope(kit=kit) as saga:
            saga.execute("hotel", world.book, {"what": "a"}, undo=undo, verify=verify, **TOOL)
            world.lose = [TimeoutError()]
            saga.execute("hotel", world.book, {"what": "b"}, undo=undo, probe=probe, **TOOL)
            raise ValueError

    async def on_a_loop() -> None:
        async with saga_scope(kit=kit) as saga:
            await saga.execute("hotel", world.book, {"what": "a"}, undo=undo, verify=verify, **TOOL)
            world.lose = [TimeoutError()]
            await saga.execute("hotel", world.book, {"what": "b"}, undo=undo, probe=probe, **TOOL)
            raise ValueError

    with pytest.raises(SagaAborted) as aborted:
        sync() if scope_kind == "sync" else asyncio.run(on_a_loop())
    assert aborted.value.report.clean and world.undos == ["b", "a"]


@pytest.mark.promise("1.17")
def test_sync_scopes_on_many_threads_do_not_mix(kit: AgentKit, world: World) -> None:
    def work(n: int) -> str:
        assert current_saga() is None
        try:
            with saga_scope(f"trip-{n}", kit=kit) as saga:
                for what in "ab":
                    assert current_saga() is saga
                    saga.execute("hotel", world.book, {"what": f"{n}{what}"}, undo=world.undo, **TOOL)
                if n % 2:
                    raise ValueError
        except SagaAborted as aborted:
            assert aborted.report.clean
        return saga.header_id

    with ThreadPoolExecutor(8) as threads:
        headers = list(threads.map(work, range(16)))
    assert world.standing == sorted(f"{n}{what}" for n in range(0, 16, 2) for what in "ab")
    assert [fold(kit, header).out for header in headers] == ["committed", "compensated"] * 8
    assert not kit.engine.runs


@pytest.mark.promise("1.17")
def test_several_threads_drive_one_saga_and_each_step_has_a_number_of_its_own(kit: AgentKit, world: World) -> None:
    with saga_scope(kit=kit) as saga:

        def work(n: int) -> Any:
            return saga.execute("hotel", world.book, {"what": str(n)}, undo=world.undo, **TOOL)

        with ThreadPoolExecutor(8) as threads:
            contexts = [copy_context() for _ in range(24)]
            results = list(threads.map(lambda n: contexts[n].run(work, n), range(24)))
    assert len({result["key"] for result in results}) == 24 and len(world.effects) == 24
    assert sorted(fold(kit, saga.header_id).steps) == list(range(1, 25))


@pytest.mark.promise("1.17")
def test_several_loops_drive_one_saga(kit: AgentKit, world: World) -> None:
    async def main() -> str:
        async with saga_scope(kit=kit) as saga:

            async def elsewhere(n: int) -> None:
                await saga.execute("hotel", world.abook, {"what": f"x{n}"}, undo=world.undo, **TOOL)

            await saga.execute("hotel", world.abook, {"what": "a"}, undo=world.undo, **TOOL)
            await asyncio.gather(*(asyncio.to_thread(lambda n=n: asyncio.run(elsewhere(n))) for n in range(4)))
            raise ValueError
        return saga.header_id

    with pytest.raises(SagaAborted) as aborted:
        asyncio.run(main())
    assert aborted.value.report.clean and len(world.undos) == 5 and world.undos[-1] == "a"


@pytest.mark.promise("1.17")
@pytest.mark.promise("14.7")
def test_asyncio_run_several_times_in_one_process(kit: AgentKit, world: World) -> None:
    async def main(n: int) -> None:
        async with saga_scope(f"trip-{n}", kit=kit) as saga:
            await saga.execute("hotel", world.abook, {"what": str(n)}, undo=world.undo, **TOOL)
            await saga.execute("hotel", world.book, {"what": f"{n}s"}, undo=world.undo, **TOOL)

    for n in range(4):
        asyncio.run(main(n))
    assert len(world.effects) == 8


@pytest.mark.promise("1.5")
def test_tools_know_their_saga_in_threads_tasks_and_groups(kit: AgentKit, world: World) -> None:
    @tool("hotel.sync", semantics=COMPENSABLE, compensate=world.compensate)
    def book(what: str, idempotency_key: str = "outside") -> Any:
        return world.act(what, idempotency_key)

    @tool("hotel.async", semantics=COMPENSABLE, compensate=world.compensate)
    async def abook(what: str, idempotency_key: str = "outside") -> Any:
        return world.act(what, idempotency_key)

    async def main() -> None:
        async with saga_scope(kit=kit):
            await abook("a")
            book("b")
            await asyncio.to_thread(book, "c")
            await asyncio.gather(abook("d"), abook("e"))
            async with asyncio.TaskGroup() as group:
                group.create_task(abook("f"))
            raise ValueError

    with pytest.raises(SagaAborted) as aborted:
        asyncio.run(main())
    assert len(aborted.value.report.compensated) == 6 and not world.effects


@pytest.mark.promise("1.17")
def test_a_sync_scope_on_a_running_loop_works_and_warns_once(
    kit: AgentKit, world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scope, "_WARNED_LOOP", False)

    async def main() -> None:
        for _ in range(2):
            with saga_scope(kit=kit) as saga:
                saga.execute("hotel", world.book, {"what": "a"}, undo=world.undo, **TOOL)
                saga.execute("hotel", world.abook, {"what": "b"}, undo=world.undo, **TOOL)

    asyncio.run(main())
    assert len(world.effects) == 4 and capsys.readouterr().err.count("async with") == 1


@pytest.mark.promise("1.17")
def test_a_step_that_blocks_its_loop_keeps_its_saga(kit: AgentKit, world: World) -> None:
    async def blocks(what: str, idempotency_key: str) -> Any:
        time.sleep(0.3)
        return world.act(what, idempotency_key)

    async def main() -> None:
        async with saga_scope("trip", kit=kit) as saga:
            await saga.execute("hotel", blocks, {"what": "a"}, undo=world.undo, **TOOL)

    asyncio.run(main())
    found = fold(kit, kit.engine.hide("trip"))
    assert found.out == "committed" and found.fence == 1


# ---- the pool --------------------------------------------------------------------------------------------------------


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A pool of two threads in the place of the shared one."""
    small = Pool(2)
    monkeypatch.setattr(drive.BLOCKING, "_pool", small)
    monkeypatch.setattr(drive.LOOPING, "_pool", small)
    return small


@pytest.mark.promise("1.17")
def test_more_calls_than_threads_wait_their_turn_and_are_counted(kit: AgentKit, world: World, narrow: Pool) -> None:
    busy: list[int] = []
    most: list[int] = []

    def slow(what: str, idempotency_key: str) -> Any:
        busy.append(1)
        most.append(len(busy))
        time.sleep(0.01)
        busy.pop()
        return world.act(what, idempotency_key)

    async def main() -> None:
        async with saga_scope(kit=kit) as saga:
            await asyncio.gather(
                *(saga.execute("hotel", slow, {"what": str(n)}, undo=world.undo, **TOOL) for n in range(8))
            )

    asyncio.run(main())
    assert len(world.effects) == 8 and max(most) <= 2 and narrow.saturated > 0


@pytest.mark.promise("1.17")
@pytest.mark.parametrize("scope_kind", ["sync", "async"])
def test_a_call_that_no_thread_has_begun_by_its_deadline_is_known_not_to_have_happened(
    kit: AgentKit, world: World, narrow: Pool, scope_kind: str
) -> None:
    gate = threading.Event()
    for _ in range(2):
        narrow.submit(copy_context(), lambda: gate.wait(20))
    options = {"undo": world.undo, "timeout": 0.05, **TOOL}

    def sync() -> None:
        with saga_scope(kit=kit) as saga:
            saga.execute("hotel", world.book, {"what": "a"}, **options)

    async def on_a_loop() -> None:
        async with saga_scope(kit=kit) as saga:
            await saga.execute("hotel", world.book, {"what": "a"}, **options)

    with pytest.raises(SagaAborted) as aborted:
        sync() if scope_kind == "sync" else asyncio.run(on_a_loop())
    gate.set()
    assert isinstance(aborted.value.cause, NeverStarted) and aborted.value.report.clean
    assert [step.state for step in aborted.value.report.steps] == ["failed"]
    eventually(lambda: not narrow._jobs)
    assert world.calls == 0


@pytest.mark.promise("1.17")
def test_hung_tools_in_every_thread_do_not_hold_up_an_unwinding_that_waits(
    kit: AgentKit, world: World, narrow: Pool
) -> None:
    gate = threading.Event()

    async def main() -> None:
        async with saga_scope(kit=kit) as saga:
            await saga.execute("car", world.abook, {"what": "c"}, undo=None, compensate=None, semantics=REVERSIBLE)
            for what in "ab":
                try:
                    await saga.execute(
                        "hotel", world.slow_book(gate), {"what": what}, timeout=0.03, settle=0.05, **TOOL
                    )
                except TimeoutError:
                    pass
            raise ValueError

    with pytest.raises(SagaAborted) as aborted:
        asyncio.run(main())
    gate.set()
    assert len(aborted.value.report.unknown) == 2


def test_a_tool_that_raises_stop_iteration_hangs_nobody(kit: AgentKit) -> None:
    def stops() -> None:
        raise StopIteration

    async def main() -> None:
        async with saga_scope(kit=kit) as saga:
            await saga.execute("t", stops, {}, **TOOL)

    with pytest.raises(SagaAborted) as aborted:
        asyncio.run(main())
    assert isinstance(aborted.value.cause, RuntimeError)


HANGS = """
import asyncio, sys, threading
from amends import saga_scope, COMPENSABLE
def hang(): threading.Event().wait()
async def ahang():
    while True:
        try: await asyncio.sleep(60)
        except asyncio.CancelledError: pass
try:
    if sys.argv[1] == "sync":
        with saga_scope() as saga:
            saga.execute("t", hang, {}, semantics=COMPENSABLE, timeout=0.1, settle=0.1)
    elif sys.argv[1] == "async-tool":
        with saga_scope() as saga:
            saga.execute("t", ahang, {}, semantics=COMPENSABLE, timeout=0.1, settle=0.1)
    else:
        async def main():
            async with saga_scope() as saga:
                await saga.execute("t", hang, {}, semantics=COMPENSABLE, timeout=0.1, settle=0.1)
        asyncio.run(main())
except Exception as error:
    print(type(error).__name__, error.report.unknown[0].tool)
"""


@pytest.mark.promise("1.17")
@pytest.mark.parametrize("kind", ["sync", "async-tool", "async-scope"])
def test_a_hung_tool_does_not_hold_the_exit_of_its_program(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    env = {**os.environ, "AMENDS_HOME": str(tmp_path / "home")}
    ended = subprocess.run([sys.executable, str(script), kind], env=env, capture_output=True, text=True, timeout=20)
    assert ended.stdout == "SagaAborted t\n", ended.stderr
    assert ended.returncode == 0


# ---- the two drives --------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.17")
def test_the_two_drives_tell_the_same_of_the_same_call() -> None:
    def boom() -> None:
        raise ValueError("x")

    async def aboom() -> None:
        raise ValueError("x")

    def exits() -> None:
        raise SystemExit(3)

    async def both(fn: Any, timeout: float | None) -> list[Any]:
        blocking = await asyncio.to_thread(lambda: run(Blocking().call(fn, {}, timeout)))
        looping = await Looping().call(fn, {}, timeout)
        return [(each.result, type(each.error), each.running is not None) for each in (blocking, looping)]

    cases: list[tuple[Any, float | None]] = [
        (lambda: 7, None), (lambda: 7, 1), (boom, None), (boom, 1), (aboom, None), (aboom, 1), (exits, 1),
        (lambda: time.sleep(0.2), 0.02), (lambda: asyncio.sleep(0, 7), None), (lambda: asyncio.sleep(0, 7), 1),
    ]  # fmt: skip
    for fn, timeout in cases:
        blocking, looping = asyncio.run(both(fn, timeout))
        assert blocking == looping, (fn, timeout)


@pytest.mark.promise("1.8")
@pytest.mark.parametrize("made", [Blocking, Looping])
def test_a_result_that_comes_in_the_moment_of_cancelling_is_kept_and_an_error_says_nothing(made: Any) -> None:
    async def answers() -> int:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            return 7
        return 0

    async def breaks() -> int:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            raise ValueError from None
        return 0

    def call(fn: Any) -> Any:
        return run(made().call(fn, {}, 0.02)) if made is Blocking else asyncio.run(made().call(fn, {}, 0.02))

    assert call(answers).result == 7 and call(answers).error is None
    assert isinstance(call(breaks).error, TimeoutError)


@pytest.mark.promise("14.7")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_forked_child_is_in_no_saga_and_has_a_pool_of_its_own(kit: AgentKit, world: World) -> None:
    with saga_scope("trip", kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, undo=world.undo, timeout=5, **TOOL)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                fine = current_saga() is None and not kit.engine.runs
                done = pool.SHARED.submit(copy_context(), lambda: 7).result(5) == 7
                code = 0 if fine and done else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        saga.execute("hotel", world.book, {"what": "b"}, undo=world.undo, **TOOL)
    assert world.standing == ["a", "b"]


@pytest.mark.promise("1.7")
@pytest.mark.parametrize("scope_kind", ["sync", "async"])
def test_hung_tools_in_every_thread_do_not_keep_others_from_being_undone(
    kit: AgentKit, world: World, narrow: Pool, scope_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "UNDO_TIMEOUT", 1.0)
    gate = threading.Event()

    def sync() -> None:
        with saga_scope(kit=kit) as saga:
            saga.execute("hotel", world.abook, {"what": "a"}, undo=world.undo, **TOOL)
            hang_all()
            raise ValueError

    async def on_a_loop() -> None:
        async with saga_scope(kit=kit) as saga:
            await saga.execute("hotel", world.abook, {"what": "a"}, undo=world.undo, **TOOL)
            hang_all()
            raise ValueError

    def hang_all() -> None:
        for _ in range(5):  # two hang, three wait behind them
            narrow.submit(copy_context(), lambda: gate.wait(20))

    with pytest.raises(SagaAborted) as aborted:
        sync() if scope_kind == "sync" else asyncio.run(on_a_loop())
    assert aborted.value.report.clean and world.undos == ["a"]
    gate.set()


@pytest.mark.promise("1.7")
def test_what_is_in_flight_when_a_scope_fails_is_stopped_before_anything_is_undone(kit: AgentKit, world: World) -> None:
    told: list[str] = []

    async def slow(what: str, idempotency_key: str) -> Any:
        told.append("begun")
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            told.append("stopped")
            raise
        return world.act(what, idempotency_key)

    async def main() -> None:
        async with saga_scope(kit=kit) as saga:
            back = Compensation(lambda: told.append("undone"))
            await saga.execute("hotel", world.abook, {"what": "a"}, undo=back, **TOOL)
            task = asyncio.ensure_future(saga.execute("car", slow, {"what": "b"}, settle=0.01, undo=world.undo, **TOOL))
            while not told:
                await asyncio.sleep(0)
            assert not task.done()
            raise ValueError

    with pytest.raises(SagaAborted) as aborted:
        asyncio.run(main())
    assert told == ["begun", "stopped", "undone"] and aborted.value.report.clean and "b" not in world.standing
