"""Every awkward way to leave a scope: the world is asked afterwards what stands, and the report must agree."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from world import World, eventually, fold, kinds

from amends import (
    ABSENT,
    ALREADY_DONE,
    CANNOT_TELL,
    COMPENSABLE,
    PRESENT,
    REVERSIBLE,
    AgentKit,
    Compensation,
    Fallback,
    RetryPolicy,
    SagaAborted,
    UnstorableResult,
    current_saga,
    saga_scope,
)
from amends.runtime import reach, unwind
from amends.runtime.inverse import NoInverse
from amends.store.errors import BadValue

SOON = 0.05  # seconds: short deadlines and settle times


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwind, "BACKOFF", 0.001)
    monkeypatch.setattr(reach, "UNDO_TIMEOUT", 0.3)


def agree(world: World, report: Any) -> None:
    """`clean` is what the world says."""
    assert report.clean == (not world.effects), (report, world.effects)


# ---- an exception ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.7")
@pytest.mark.parametrize("semantics", [REVERSIBLE, COMPENSABLE])
@pytest.mark.parametrize("named", ["undo", "compensate"])
def test_an_exception_undoes_youngest_first(kit: AgentKit, world: World, semantics: Any, named: str) -> None:
    inverse = {named: getattr(world, named)}
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        for what in "abc":
            saga.execute("hotel", world.book, {"what": what}, semantics=semantics, **inverse)
        raise ValueError("no")
    assert world.undos == ["c", "b", "a"]
    agree(world, aborted.value.report)
    assert isinstance(aborted.value.cause, ValueError) and aborted.value.__cause__ is aborted.value.cause
    assert len(aborted.value.report.compensated) == 3


@pytest.mark.promise("1.7")
async def _async_body(kit: AgentKit, world: World) -> SagaAborted:
    with pytest.raises(SagaAborted) as aborted:
        async with saga_scope(kit=kit) as saga:
            for what in "abc":
                await saga.execute("hotel", world.abook, {"what": what}, semantics=COMPENSABLE, undo=world.undo)
            raise ValueError("no")
    return aborted.value


@pytest.mark.promise("1.7")
def test_an_exception_undoes_youngest_first_on_a_loop(kit: AgentKit, world: World) -> None:
    aborted = asyncio.run(_async_body(kit, world))
    assert world.undos == ["c", "b", "a"]
    agree(world, aborted.report)


@pytest.mark.promise("1.6")
def test_each_outcome_is_written_before_the_next_inverse_starts(kit: AgentKit, world: World) -> None:
    seen: list[int] = []

    def cancel(of: str, idempotency_key: str) -> None:
        facts = kinds(kit, saga.header_id)
        seen.append(facts.count("undo.intended") - facts.count("undo.done"))
        assert current_saga() is None
        world.cancel(of, idempotency_key)

    with pytest.raises(SagaAborted), saga_scope(kit=kit) as saga:
        for what in "ab":
            saga.execute(
                "hotel", world.book, {"what": what}, semantics=COMPENSABLE,
                compensate=lambda result: Compensation(cancel, {"of": result["key"]}),
            )  # fmt: skip
        raise ValueError
    assert seen == [1, 1] and not world.effects


@pytest.mark.promise("1.6")
def test_a_tool_that_raised_is_failed_and_nothing_of_it_is_undone(kit: AgentKit, world: World) -> None:
    world.refuse = [ValueError("sold out")]
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
    assert [step.state for step in aborted.value.report.steps] == ["failed"]
    assert world.log == []
    agree(world, aborted.value.report)


@pytest.mark.promise("1.6")
def test_a_swallowed_exception_of_a_step_lets_the_saga_commit(kit: AgentKit, world: World) -> None:
    world.refuse = [ValueError("sold out")]
    with saga_scope(kit=kit) as saga:
        with pytest.raises(ValueError, match="sold out"):
            saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
        saga.execute("hotel", world.book, {"what": "b"}, semantics=COMPENSABLE, undo=world.undo)
    assert world.standing == ["b"]
    assert fold(kit, saga.header_id).out == "committed"


@pytest.mark.promise("1.7")
def test_a_rollback_on_request(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
        saga.rollback()
    assert aborted.value.cause.code == "rolled_back" and not world.effects


@pytest.mark.promise("1.7")
def test_a_scope_without_steps_that_fails_is_clean_and_leaves_no_trace(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit):
        raise ValueError
    assert aborted.value.report.clean and aborted.value.report.outcome == "compensated"
    with saga_scope(kit=kit):
        pass
    kit.log.flush()
    assert kit.log.sagas() == []


def test_bad_arguments_are_refused_before_anything_happens(kit: AgentKit, world: World) -> None:
    with saga_scope(kit=kit) as saga:
        for wrong in ({"whta": "a"}, {}, {"what": "a", "more": 1}, {"what": float("nan")}, {"what": object()}):
            with pytest.raises(BadValue):
                saga.execute("hotel", world.book, wrong, semantics=COMPENSABLE)
    assert world.calls == 0 and kinds(kit, saga.header_id) == []


# ---- leaving as oneself ----------------------------------------------------------------------------------------------


@pytest.mark.promise("1.7")
@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_what_is_no_exception_unwinds_and_leaves_as_itself(kit: AgentKit, world: World, stop: type) -> None:
    with pytest.raises(stop) as left, saga_scope(kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
        raise stop()
    agree(world, left.value.saga_report)
    assert left.value.saga_report.clean


@pytest.mark.promise("1.6")
@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt])
def test_a_stop_inside_a_tool_leaves_its_step_unknown_until_it_is_settled(
    kit: AgentKit, world: World, stop: type
) -> None:
    def book(what: str, idempotency_key: str) -> None:
        world.act(what, idempotency_key)
        raise stop()

    with pytest.raises(stop) as left, saga_scope(kit=kit) as saga:
        saga.execute("hotel", book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo, settle=SOON)
    assert "step.lost" in kinds(kit, saga.header_id)
    agree(world, left.value.saga_report)


@pytest.mark.promise("1.7")
def test_the_first_ctrl_c_unwinds_and_says_so(
    memory: AgentKit, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), saga_scope("trip", kit=memory) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
        signal.raise_signal(signal.SIGINT)
    assert not world.effects and "undoing saga trip" in capsys.readouterr().err


@pytest.mark.promise("1.7")
@pytest.mark.parametrize("nested", [False, True])
def test_a_second_ctrl_c_leaves_the_rest_to_the_daemon(kit: AgentKit, world: World, nested: bool) -> None:
    def cancel(of: str, idempotency_key: str) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.5)

    def body(saga: Any) -> None:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
        saga.execute(
            "car", world.book, {"what": "b"}, semantics=COMPENSABLE,
            compensate=lambda result: Compensation(cancel, {"of": "b"}),
        )  # fmt: skip
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), saga_scope("trip", kit=kit) as saga:
        if nested:
            with saga_scope(kit=kit) as inner:
                body(inner)
        else:
            body(saga)
    kit.log.flush()
    found = fold(kit, saga.header_id)
    assert found.driver == "" and world.standing == ["a", "b"]
    assert not kit.engine.runs


SCRIPT = """
import asyncio, os, signal, sys, threading, time
from pathlib import Path
from amends import AgentKit, saga_scope, COMPENSABLE, Compensation
folder = Path(sys.argv[1])
def note(text): (folder / "notes").open("a").write(text + "\\n")
async def book(what): note("do " + what)
async def cancel(what):
    note("undoing " + what)
    if "slow" in sys.argv: await asyncio.sleep(30)
    note("undo " + what)
async def main():
    async with saga_scope("trip") as saga:
        for what in "ab":
            await saga.execute("hotel", book, {"what": what}, semantics=COMPENSABLE,
                               undo=lambda what: Compensation(cancel, {"what": what}))
        note("ready")
        await asyncio.sleep(30)
asyncio.run(main())
"""


def run_script(tmp: Path, *options: str) -> subprocess.Popen[bytes]:
    script = tmp / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "AMENDS_HOME": str(tmp / "home")}
    return subprocess.Popen([sys.executable, str(script), str(tmp), *options], env=env, stderr=subprocess.PIPE)


def notes(tmp: Path) -> list[str]:
    path = tmp / "notes"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.promise("1.7")
def test_ctrl_c_under_asyncio_run_unwinds_in_a_real_process(tmp_path: Path) -> None:
    child = run_script(tmp_path)
    eventually(lambda: "ready" in notes(tmp_path))
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert notes(tmp_path)[-4:] == ["undoing b", "undo b", "undoing a", "undo a"], errors.decode()
    assert b"KeyboardInterrupt" in errors


@pytest.mark.promise("1.7")
def test_a_second_ctrl_c_under_asyncio_run_lets_go_in_a_real_process(tmp_path: Path) -> None:
    child = run_script(tmp_path, "slow")
    eventually(lambda: "ready" in notes(tmp_path))
    child.send_signal(signal.SIGINT)
    eventually(lambda: "undoing b" in notes(tmp_path))
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert "undo b" not in notes(tmp_path), errors.decode()
    with AgentKit(home=tmp_path / "home") as kit:
        found = fold(kit, kit.engine.hide("trip"))
        assert found.phase == "unwinding" and found.driver == "", errors.decode()


@pytest.mark.promise("1.7")
def test_sigterm_unwinds_where_it_is_asked_for(memory: AgentKit, world: World) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, saga_scope(kit=memory, unwind_on_sigterm=True) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 128 + signal.SIGTERM and not world.effects
    assert signal.getsignal(signal.SIGTERM) is before


# ---- cancellation on a loop ------------------------------------------------------------------------------------------


def cancelled_at(kit: AgentKit, world: World, point: str, **options: Any) -> asyncio.CancelledError:
    """Cancel a task that is before, in (with the effect made or not) or after its second step."""
    here = asyncio.Event

    async def main() -> asyncio.CancelledError:
        reached = here()

        async def book(what: str, idempotency_key: str) -> Any:
            if what == "b" and point == "early":
                reached.set()
                await asyncio.sleep(20)
            made = world.act(what, idempotency_key)
            if what == "b" and point == "late":
                reached.set()
                await asyncio.sleep(20)
            return made

        async def work() -> None:
            async with saga_scope("trip", kit=kit) as saga:
                await saga.execute("hotel", book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
                if point == "before":
                    reached.set()
                    await asyncio.sleep(20)
                await saga.execute("hotel", book, {"what": "b"}, semantics=COMPENSABLE, settle=SOON, **options)
                reached.set()
                await asyncio.sleep(20)

        task = asyncio.create_task(work())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as left:
            await task
        return left.value

    return asyncio.run(main())


@pytest.mark.promise("1.6")
@pytest.mark.parametrize("point", ["before", "early", "late", "after"])
def test_a_cancelled_task_is_unwound_wherever_it_is(kit: AgentKit, world: World, point: str) -> None:
    left = cancelled_at(kit, world, point, undo=world.undo)
    agree(world, left.saga_report)
    assert left.saga_report.clean and not world.effects


@pytest.mark.promise("1.6")
def test_a_cancelled_step_without_an_inverse_is_not_called_clean(kit: AgentKit, world: World) -> None:
    left = cancelled_at(kit, world, "late")
    assert not left.saga_report.clean and [step.tool for step in left.saga_report.unknown] == ["hotel"]
    assert world.standing == ["b"]


@pytest.mark.promise("1.14")
@pytest.mark.parametrize(("point", "state"), [("early", "failed"), ("late", "compensated")])
def test_a_probe_settles_a_cancelled_step_before_anything_is_undone(
    kit: AgentKit, world: World, point: str, state: str
) -> None:
    asked: list[Any] = []

    async def probe(what: str, idempotency_key: str) -> Any:
        asked.append(current_saga())
        assert not world.undone
        return PRESENT if world.has(idempotency_key) else ABSENT

    left = cancelled_at(kit, world, point, undo=world.undo, probe=probe)
    assert set(asked) == {None}
    assert [step.state for step in left.saga_report.steps] == ["compensated", state]
    agree(world, left.saga_report)


@pytest.mark.promise("1.7")
def test_cancelling_again_and_again_does_not_abandon_the_unwinding(kit: AgentKit, world: World) -> None:
    async def main() -> None:
        undoing = asyncio.Event()

        async def cancel(of: str, idempotency_key: str) -> None:
            undoing.set()
            await asyncio.sleep(0.05)
            world.cancel(of, idempotency_key)

        async def work() -> None:
            async with saga_scope(kit=kit) as saga:
                for what in "ab":
                    await saga.execute(
                        "hotel", world.abook, {"what": what}, semantics=COMPENSABLE,
                        compensate=lambda result: Compensation(cancel, {"of": result["key"]}),
                    )  # fmt: skip
                raise ValueError

        task = asyncio.create_task(work())
        await undoing.wait()
        for _ in range(5):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises((SagaAborted, asyncio.CancelledError)):
            await task

    asyncio.run(main())
    assert world.undos == ["b", "a"]


@pytest.mark.promise("1.6")
def test_a_failing_sibling_in_gather_leaves_the_other_to_be_settled(kit: AgentKit, world: World) -> None:
    async def main() -> SagaAborted:
        started = asyncio.Event()

        async def slow(what: str, idempotency_key: str) -> Any:
            made = world.act(what, idempotency_key)
            started.set()
            await asyncio.sleep(20)
            return made

        async def fail(what: str) -> None:
            await started.wait()
            raise ValueError(what)

        with pytest.raises(SagaAborted) as aborted:
            async with saga_scope(kit=kit) as saga:
                await asyncio.gather(
                    saga.execute("hotel", slow, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo, settle=SOON),
                    saga.execute("car", fail, {"what": "b"}, semantics=COMPENSABLE),
                )
        return aborted.value

    aborted = asyncio.run(main())
    assert {step.tool: step.state for step in aborted.report.steps} == {"hotel": "compensated", "car": "failed"}
    agree(world, aborted.report)


@pytest.mark.promise("1.6")
def test_a_task_group_that_fails_is_undone_whole(kit: AgentKit, world: World) -> None:
    async def main() -> SagaAborted:
        async def fail() -> None:
            await asyncio.sleep(0.02)
            raise ValueError

        with pytest.raises(SagaAborted) as aborted:
            async with saga_scope(kit=kit) as saga, asyncio.TaskGroup() as group:
                for what in "abc":
                    group.create_task(
                        saga.execute("hotel", world.abook, {"what": what}, semantics=COMPENSABLE, undo=world.undo)
                    )
                group.create_task(fail())
        return aborted.value

    aborted = asyncio.run(main())
    assert len(aborted.report.compensated) == 3 and isinstance(aborted.cause, ExceptionGroup)
    agree(world, aborted.report)


@pytest.mark.promise("1.6")
def test_asyncio_timeout_around_a_scope_is_a_cancellation(kit: AgentKit, world: World) -> None:
    async def main() -> None:
        async with asyncio.timeout(0.05):
            async with saga_scope(kit=kit) as saga:
                await saga.execute("hotel", world.abook, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
                await asyncio.sleep(20)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert not world.effects and world.undos == ["a"]


@pytest.mark.promise("1.6")
def test_a_tool_that_turns_its_cancellation_into_an_error_is_not_taken_at_its_word(kit: AgentKit, world: World) -> None:
    async def book(what: str, idempotency_key: str) -> None:
        world.act(what, idempotency_key)
        reached.set()
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            raise ValueError("aborted") from None

    async def main() -> Any:
        global reached
        reached = asyncio.Event()

        async def work() -> None:
            async with saga_scope(kit=kit) as saga:
                await saga.execute("hotel", book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo, settle=SOON)

        task = asyncio.create_task(work())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as left:
            await task
        return left.value.saga_report

    report = asyncio.run(main())
    agree(world, report)
    assert not world.effects


@pytest.mark.promise("1.6")
def test_a_step_that_nobody_awaited_is_waited_for_and_kept(kit: AgentKit, world: World) -> None:
    async def slow(what: str, idempotency_key: str) -> Any:
        await asyncio.sleep(0.1)
        return world.act(what, idempotency_key)

    async def main() -> Any:
        async with saga_scope("trip", kit=kit) as saga:
            task = asyncio.create_task(
                saga.execute("hotel", slow, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
            )
            await asyncio.sleep(0.01)
        return await task

    assert asyncio.run(main())["what"] == "a"
    found = fold(kit, kit.engine.hide("trip"))
    assert found.out == "committed" and found.steps[1].state == "done" and world.standing == ["a"]


@pytest.mark.promise("1.6")
@pytest.mark.parametrize("semantics", [REVERSIBLE, COMPENSABLE])
def test_a_step_that_outlives_its_scope_does_not_open_it_again(
    kit: AgentKit, world: World, semantics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from amends.runtime import scope

    monkeypatch.setattr(scope, "STOP_GRACE", 0.1)

    async def stubborn(what: str, idempotency_key: str) -> Any:
        for _ in range(40):
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                pass  # it will not be stopped
        return world.act(what, idempotency_key)

    async def main() -> SagaAborted:
        with pytest.raises(SagaAborted) as aborted:
            async with saga_scope("trip", kit=kit) as saga:
                task = asyncio.create_task(
                    saga.execute("hotel", stubborn, {"what": "a"}, semantics=semantics, undo=world.undo, settle=SOON)
                )
                await asyncio.sleep(0.02)
        await asyncio.wait([task])
        assert isinstance(task.exception(), Exception)
        await asyncio.get_running_loop().run_in_executor(None, eventually, lambda: world.log and not world.effects)
        return aborted.value

    aborted = asyncio.run(main())
    assert aborted.cause.code == "unsettled_step"
    found = fold(kit, kit.engine.hide("trip"))
    assert found.out == "compensated" and not world.effects


@pytest.mark.promise("1.6")
@pytest.mark.parametrize("semantics", [REVERSIBLE, COMPENSABLE])
def test_no_step_starts_after_the_scope(kit: AgentKit, world: World, semantics: Any) -> None:
    for fails in (False, True):
        try:
            with saga_scope(kit=kit) as saga:
                saga.execute("hotel", world.book, {"what": "a"}, semantics=semantics, undo=world.undo)
                if fails:
                    raise ValueError
        except SagaAborted:
            pass
        calls, size = world.calls, kit.log.size
        with pytest.raises(Exception, match="no longer open"):
            saga.execute("hotel", world.book, {"what": "b"}, semantics=semantics, undo=world.undo)
        kit.log.flush()
        assert (world.calls, kit.log.size) == (calls, size)


# ---- deadlines and late landings -------------------------------------------------------------------------------------


@pytest.mark.promise("1.8")
@pytest.mark.parametrize("driven", ["sync", "async"])
@pytest.mark.parametrize("before", [True, False], ids=["effect-before", "effect-after-the-deadline"])
def test_a_sync_tool_that_lands_while_its_saga_still_runs_has_its_true_outcome_recorded(
    kit: AgentKit, world: World, driven: str, before: bool
) -> None:
    gate = threading.Event()
    options = {"semantics": COMPENSABLE, "compensate": world.compensate, "timeout": SOON}
    slow = world.slow_book(gate, before)

    def landed() -> None:
        gate.set()
        eventually(lambda: "step.landed" in kinds(kit, header))

    def sync() -> None:
        nonlocal header
        with saga_scope(kit=kit) as saga:
            header = saga.header_id
            with pytest.raises(TimeoutError):
                saga.execute("hotel", slow, {"what": "a"}, **options)
            landed()

    async def on_a_loop() -> None:
        nonlocal header
        async with saga_scope(kit=kit) as saga:
            header = saga.header_id
            with pytest.raises(TimeoutError):
                await saga.execute("hotel", slow, {"what": "a"}, **options)
            landed()

    header = ""
    sync() if driven == "sync" else asyncio.run(on_a_loop())
    found = fold(kit, header)
    assert found.out == "committed" and found.steps[1].state == "done" and world.standing == ["a"]


@pytest.mark.promise("1.8")
@pytest.mark.parametrize("driven", ["sync", "async"])
def test_what_lands_during_the_unwinding_is_undone_in_it(kit: AgentKit, world: World, driven: str) -> None:
    gate = threading.Event()
    options = {"semantics": COMPENSABLE, "compensate": world.compensate, "timeout": SOON, "settle": 5}
    slow = world.slow_book(gate, before=False)
    threading.Timer(0.3, gate.set).start()

    def sync() -> None:
        with saga_scope(kit=kit) as saga:
            saga.execute("hotel", slow, {"what": "a"}, **options)

    async def on_a_loop() -> None:
        async with saga_scope(kit=kit) as saga:
            await saga.execute("hotel", slow, {"what": "a"}, **options)

    with pytest.raises(SagaAborted) as aborted:
        sync() if driven == "sync" else asyncio.run(on_a_loop())
    assert isinstance(aborted.value.cause, TimeoutError)
    assert world.undos == ["a"] and not world.effects
    agree(world, aborted.value.report)


@pytest.mark.promise("1.8")
@pytest.mark.parametrize("driven", ["sync", "async"])
def test_what_lands_after_its_saga_was_undone_is_undone_once_more_under_a_key_of_its_own(
    kit: AgentKit, world: World, driven: str
) -> None:
    gate = threading.Event()
    options = {"semantics": COMPENSABLE, "undo": world.undo, "timeout": SOON, "settle": SOON}
    slow = world.slow_book(gate, before=False)

    def sync() -> None:
        with saga_scope("trip", kit=kit) as saga:
            saga.execute("hotel", slow, {"what": "a"}, **options)

    async def on_a_loop() -> None:
        async with saga_scope("trip", kit=kit) as saga:
            await saga.execute("hotel", slow, {"what": "a"}, **options)

    with pytest.raises(SagaAborted):
        sync() if driven == "sync" else asyncio.run(on_a_loop())
    assert world.undos == ["nothing"]  # the inverse that ran too early
    gate.set()
    eventually(lambda: len(world.undone) == 2)
    assert not world.effects
    eventually(lambda: not list(kit.engine.state.roots()))


@pytest.mark.promise("1.8")
def test_what_lands_after_an_escalation_is_undone_and_leaves_the_inbox(kit: AgentKit, world: World) -> None:
    gate = threading.Event()
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute(
            "hotel", world.slow_book(gate), {"what": "a"}, semantics=COMPENSABLE, compensate=world.compensate,
            timeout=SOON, settle=SOON,
        )  # fmt: skip
    assert not aborted.value.report.clean and [item["kind"] for item in kit.inbox()] == ["unknown_without_inverse"]
    gate.set()
    eventually(lambda: fold(kit, saga.header_id).out == "compensated")
    assert not world.effects and kit.inbox() == []


@pytest.mark.promise("1.8")
def test_a_late_failure_is_recorded_as_one(kit: AgentKit, world: World) -> None:
    gate = threading.Event()

    def slow(what: str) -> None:
        assert gate.wait(20)
        raise ValueError("sold out")

    with saga_scope(kit=kit) as saga:
        with pytest.raises(TimeoutError):
            saga.execute("hotel", slow, {"what": "a"}, semantics=COMPENSABLE, timeout=SOON)
        gate.set()
        eventually(lambda: "step.landed" in kinds(kit, saga.header_id))
    assert fold(kit, saga.header_id).steps[1].state == "failed"


@pytest.mark.promise("1.6")
@pytest.mark.parametrize("driven", ["sync", "async"])
def test_an_async_tool_past_its_deadline_is_unknown_and_undone(kit: AgentKit, world: World, driven: str) -> None:
    async def slow(what: str, idempotency_key: str) -> None:
        world.act(what, idempotency_key)
        await asyncio.sleep(20)

    options = {"semantics": COMPENSABLE, "undo": world.undo, "timeout": SOON, "settle": SOON}

    def sync() -> None:
        with saga_scope(kit=kit) as saga:
            saga.execute("hotel", slow, {"what": "a"}, **options)

    async def on_a_loop() -> None:
        async with saga_scope(kit=kit) as saga:
            await saga.execute("hotel", slow, {"what": "a"}, **options)

    with pytest.raises(SagaAborted) as aborted:
        sync() if driven == "sync" else asyncio.run(on_a_loop())
    agree(world, aborted.value.report)
    assert isinstance(aborted.value.cause, TimeoutError) and not world.effects


@pytest.mark.promise("1.8")
@pytest.mark.parametrize("driven", ["sync", "async"])
def test_an_async_tool_that_will_not_be_stopped_is_noticed_when_it_lands(
    kit: AgentKit, world: World, driven: str
) -> None:
    async def stubborn(what: str, idempotency_key: str) -> Any:
        for _ in range(30):
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                pass  # it will not be stopped
        return world.act(what, idempotency_key)

    options = {"semantics": COMPENSABLE, "undo": world.undo, "timeout": SOON, "settle": SOON}

    def sync() -> None:
        with saga_scope(kit=kit) as saga:
            saga.execute("hotel", stubborn, {"what": "a"}, **options)

    async def on_a_loop() -> None:
        with pytest.raises(SagaAborted):
            async with saga_scope(kit=kit) as saga:
                await saga.execute("hotel", stubborn, {"what": "a"}, **options)
        while ("do", "a") not in world.log or world.effects:
            await asyncio.sleep(0.01)

    if driven == "sync":
        with pytest.raises(SagaAborted):
            sync()
    else:
        asyncio.run(on_a_loop())
    eventually(lambda: ("do", "a") in world.log and not world.effects)


# ---- leaving well over an unknown ------------------------------------------------------------------------------------


@pytest.mark.promise("1.6")
def test_a_saga_cannot_commit_over_an_unknown_step(kit: AgentKit, world: World) -> None:
    world.lose = [ConnectionResetError()]
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        with pytest.raises(ConnectionResetError):
            saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo, settle=SOON)
    assert aborted.value.cause.code == "unsettled_step"
    agree(world, aborted.value.report)
    assert not world.effects


@pytest.mark.promise("1.14")
@pytest.mark.parametrize("present", [True, False])
def test_a_probe_lets_a_scope_be_left_well_with_what_the_world_says(kit: AgentKit, world: World, present: bool) -> None:
    answers = [CANNOT_TELL, PRESENT if present else ABSENT]

    def probe(what: str) -> Any:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    with saga_scope(kit=kit) as saga:
        world.lose = [TimeoutError()] if present else []
        world.refuse = [] if present else [TimeoutError()]
        with pytest.raises(TimeoutError):
            saga.execute(
                "hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo, probe=probe, settle=SOON
            )
    found = fold(kit, saga.header_id)
    assert found.out == "committed" and found.steps[1].state == ("done" if present else "failed")
    assert world.standing == (["a"] if present else [])


@pytest.mark.promise("1.14")
def test_a_probe_that_cannot_tell_calls_a_person_and_nothing_older_is_touched(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute("car", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
        world.lose = [TimeoutError()]
        saga.execute(
            "hotel", world.book, {"what": "b"}, semantics=COMPENSABLE, undo=world.undo, probe=lambda what: CANNOT_TELL
        )
    assert world.standing == ["a", "b"] and not aborted.value.report.clean
    assert [item["kind"] for item in kit.inbox()] == ["cannot_tell"]


@pytest.mark.promise("1.14")
def test_what_verify_does_not_confirm_is_not_done(kit: AgentKit, world: World) -> None:
    seen: list[Any] = []

    def verify(result: Any) -> bool:
        seen.append((result["what"], current_saga()))
        return False

    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute(
            "hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo, verify=verify, settle=SOON
        )
    assert seen == [("a", None)]
    assert "step.done" not in kinds(kit, saga.header_id)
    agree(world, aborted.value.report)


# ---- retries and fallbacks -------------------------------------------------------------------------------------------

BRISK = RetryPolicy(3, "constant", 0.001)


@pytest.mark.promise("1.9")
@pytest.mark.parametrize("more", [{"retry": RetryPolicy(2, "constant", 0.0)}, {"fallback": Fallback(print)}])
def test_what_a_tool_made_of_its_arguments_is_not_sent_in_their_place(kit: AgentKit, world: World, more: Any) -> None:
    seen = []

    def takes_its_own(what: list[str]) -> None:
        seen.append(what.pop())
        raise ValueError("no")

    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute("hotel", takes_its_own, {"what": ["a", "b"]}, semantics=COMPENSABLE, undo=world.undo, **more)
    assert aborted.value.cause.code == "arguments_changed" and seen == ["b"]  # type: ignore[attr-defined]


@pytest.mark.promise("1.9")
def test_retries_after_lost_answers_leave_one_effect_under_one_key(kit: AgentKit, world: World) -> None:
    world.lose = [ConnectionResetError(), TimeoutError()]
    with saga_scope(kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo, retry=BRISK)
    assert world.standing == ["a"] and world.calls == 3
    assert kinds(kit, saga.header_id).count("step.attempted") == 2
    assert fold(kit, saga.header_id).steps[1].attempts == 3


@pytest.mark.promise("1.9")
def test_retries_that_run_out_leave_the_step_unknown_if_any_attempt_may_have_landed(
    kit: AgentKit, world: World
) -> None:
    world.lose = [ConnectionResetError()]

    def book(what: str, idempotency_key: str) -> Any:
        if world.calls:
            raise ValueError("over quota")
        return world.act(what, idempotency_key)

    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute("hotel", book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo, retry=BRISK, settle=SOON)
    assert "step.lost" in kinds(kit, saga.header_id)
    agree(world, aborted.value.report)
    assert not world.effects


@pytest.mark.promise("1.9")
def test_only_chosen_errors_are_retried(memory: AgentKit, world: World) -> None:
    picky = RetryPolicy(3, "constant", 0.0, retry_on=(OSError,), exclude_exceptions=(FileNotFoundError,))
    for error, calls in ((ValueError(), 1), (FileNotFoundError(), 1), (ConnectionRefusedError(), 2)):
        world.calls, world.refuse = 0, [error]
        with saga_scope(kit=memory) as saga:
            try:
                saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo, retry=picky)
            except type(error):
                pass
        assert world.calls == calls


@pytest.mark.promise("1.9")
def test_a_fallback_after_a_landed_primary_leaves_the_primary_to_be_settled(kit: AgentKit, world: World) -> None:
    def primary(what: str, idempotency_key: str) -> Any:
        world.act(f"primary {what}", idempotency_key)
        raise ConnectionResetError

    def other(what: str, idempotency_key: str) -> Any:
        return world.act(f"other {what}", idempotency_key)

    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        result = saga.execute(
            "hotel", primary, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo, settle=SOON,
            fallback=Fallback(other, compensate=world.compensate),
        )  # fmt: skip
        assert result["what"] == "other a"
        assert world.standing == ["other a", "primary a"]
    assert aborted.value.cause.code == "unsettled_step"
    assert sorted(world.undos) == ["other a", "primary a"]
    agree(world, aborted.value.report)


@pytest.mark.promise("1.9")
def test_a_fallback_after_a_primary_that_failed_commits_with_its_own_inverse(kit: AgentKit, world: World) -> None:
    def primary(what: str) -> None:
        raise ValueError

    for fails in (False, True):
        try:
            with saga_scope(kit=kit) as saga:
                saga.execute(
                    "hotel", primary, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo,
                    fallback=Fallback(world.book, compensate=world.compensate),
                )  # fmt: skip
                if fails:
                    raise ValueError
        except SagaAborted as aborted:
            assert [step.state for step in aborted.report.steps] == ["failed", "compensated"]
    assert world.standing == ["a"] and world.undos == ["a"]


# ---- compensations that misbehave ------------------------------------------------------------------------------------


@pytest.mark.promise("1.7")
def test_a_raising_compensation_halts_and_waits_for_a_person_who_can_retry(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        for what in "ab":
            saga.execute("hotel", world.book, {"what": what}, semantics=COMPENSABLE, undo=world.undo)
        world.refuse = [ValueError("down")] * unwind.ATTEMPTS
        raise ValueError
    report = aborted.value.report
    assert world.standing == ["a", "b"] and [step.step for step in report.failed] == [2]
    agree(world, report)
    [item] = kit.inbox()
    assert kit.retry(item["id"], by="ann").clean
    assert not world.effects and kit.inbox() == []


@pytest.mark.promise("1.7")
def test_a_raising_compensation_can_be_told_to_go_on(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit, on_compensation_failure="continue") as saga:
        for what in "ab":
            saga.execute("hotel", world.book, {"what": what}, semantics=COMPENSABLE, undo=world.undo)
        world.refuse = [ValueError("down")] * unwind.ATTEMPTS
        raise ValueError
    assert world.standing == ["b"]
    agree(world, aborted.value.report)


@pytest.mark.promise("4.1")
def test_a_compensation_whose_answer_is_lost_is_repeated_under_the_same_key(kit: AgentKit, world: World) -> None:
    lost = [ConnectionResetError()]
    keys: list[str] = []

    def cancel(of: str, idempotency_key: str) -> None:
        keys.append(idempotency_key)
        world.cancel(of, idempotency_key)
        if lost:
            raise lost.pop()

    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute(
            "hotel", world.book, {"what": "a"}, semantics=COMPENSABLE,
            compensate=lambda result: Compensation(cancel, {"of": result["key"]}),
        )  # fmt: skip
        raise ValueError
    assert len(keys) == 2 and len(set(keys)) == 1 and world.undos == ["a"]
    agree(world, aborted.value.report)


@pytest.mark.promise("4.1")
@pytest.mark.parametrize("driven", ["sync", "async"])
def test_a_hanging_compensation_that_may_not_be_repeated_goes_to_a_person(
    kit: AgentKit, world: World, driven: str
) -> None:
    gate, calls = threading.Event(), []

    def cancel(of: str) -> None:
        calls.append(of)
        gate.wait(20)

    options = {"semantics": COMPENSABLE, "compensate": lambda result: Compensation(cancel, {"of": result["key"]})}

    def sync() -> None:
        with saga_scope(kit=kit) as saga:
            saga.execute("hotel", world.book, {"what": "a"}, **options)
            raise ValueError

    async def on_a_loop() -> None:
        async with saga_scope(kit=kit) as saga:
            await saga.execute("hotel", world.book, {"what": "a"}, **options)
            raise ValueError

    with pytest.raises(SagaAborted) as aborted:
        sync() if driven == "sync" else asyncio.run(on_a_loop())
    gate.set()
    assert len(calls) == 1 and not aborted.value.report.clean
    [item] = kit.inbox()
    assert item["kind"] == "undo_answer_lost"
    kit.retry(item["id"], by="ann")  # a person says: it is still there
    assert len(calls) == 2 and kit.inbox() == []


@pytest.mark.promise("1.15")
def test_a_compensation_that_finds_nothing_left_counts_with_its_note(kit: AgentKit, world: World) -> None:
    def cancel(of: str) -> Any:
        world.cancel(of, "by hand")
        return ALREADY_DONE("cancelled at the desk")

    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute(
            "hotel", world.book, {"what": "a"}, semantics=COMPENSABLE,
            compensate=lambda result: Compensation(cancel, {"of": result["key"]}),
        )  # fmt: skip
        raise ValueError
    agree(world, aborted.value.report)
    assert aborted.value.report.clean
    last = [record for record in kit.log.thread(saga.header_id) if record.entry.kind == "undo.done"][0]
    assert last.entry.out == "already" and b"cancelled at the desk" in (last.blob or b"")


@pytest.mark.promise("1.15")
def test_a_person_is_asked_to_undo_and_the_saga_is_escalated(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute("car", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
        saga.execute("hotel", world.book, {"what": "b"}, semantics=COMPENSABLE, undo=Compensation.human("call them"))
        raise ValueError
    assert world.standing == ["b"], "what is older and can be undone, is"
    agree(world, aborted.value.report)
    [item] = kit.inbox()
    assert item["kind"] == "human_task" and fold(kit, saga.header_id).out == ""
    kit.accept(item["id"], by="ann", reason="called them")
    assert fold(kit, saga.header_id).out == "compensated"


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.4")
def test_a_result_that_lacks_what_its_inverse_needs_is_heard_at_that_step(kit: AgentKit, world: World) -> None:
    after: list[str] = []
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute(
            "hotel", world.book, {"what": "a"}, semantics=COMPENSABLE,
            compensate=lambda result: Compensation(world.cancel, {"of": result["nope"]}),
        )  # fmt: skip
        after.append("another")
    assert isinstance(aborted.value.cause, NoInverse) and isinstance(aborted.value.cause.__cause__, KeyError)
    assert not after and world.standing == ["a"]
    assert [step.tool for step in aborted.value.report.orphaned] == ["hotel"]
    agree(world, aborted.value.report)
    assert [item["kind"] for item in kit.inbox()] == ["orphaned"]


@pytest.mark.promise("1.3")
def test_where_the_result_cannot_say_the_declared_inverse_is_used(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute(
            "hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo,
            compensate=lambda result: Compensation(world.cancel, {"of": result["nope"]}),
        )  # fmt: skip
    assert isinstance(aborted.value.cause, NoInverse)
    agree(world, aborted.value.report)
    assert not world.effects


@pytest.mark.promise("1.3")
def test_a_factory_is_called_once_with_a_real_result_and_never_with_a_made_up_none(kit: AgentKit, world: World) -> None:
    seen: list[Any] = []

    def compensate(result: dict[str, Any]) -> Compensation:
        seen.append(result)
        return world.compensate(result)

    world.lose = [TimeoutError()]
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute("car", world.book, {"what": "b"}, semantics=COMPENSABLE, undo=world.undo, compensate=compensate,
                     probe=lambda what: PRESENT)  # fmt: skip
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, compensate=compensate)
        raise ValueError
    assert [result["what"] for result in seen] == ["a"]
    agree(world, aborted.value.report)
    assert world.undos == ["a", "b"]


@pytest.mark.promise("1.18")
@pytest.mark.parametrize("semantics", [REVERSIBLE, COMPENSABLE])
def test_a_result_that_cannot_be_stored_still_gets_its_compensation(
    kit: AgentKit, world: World, semantics: Any
) -> None:
    def book(what: str, idempotency_key: str) -> Any:
        return {**world.act(what, idempotency_key), "socket": object()}

    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute("hotel", book, {"what": "a"}, semantics=semantics, compensate=world.compensate)
    cause = aborted.value.cause
    assert isinstance(cause, UnstorableResult) and "result.socket" in str(cause)
    assert cause.facts["result"]["what"] == "a"
    assert not world.effects and world.undos == ["a"]
    agree(world, aborted.value.report)


@pytest.mark.promise("1.1")
def test_a_step_without_an_inverse_stands_and_is_listed(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute("car", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
        saga.execute("hotel", world.book, {"what": "b"}, semantics=COMPENSABLE)
        raise ValueError
    assert world.standing == ["b"] and [step.tool for step in aborted.value.report.orphaned] == ["hotel"]
    agree(world, aborted.value.report)
    [item] = kit.inbox()
    kit.accept(item["id"], by="ann", reason="we keep it")
    assert fold(kit, saga.header_id).out == "compensated" and world.standing == ["b"]


@pytest.mark.promise("1.8")
@pytest.mark.parametrize("declared", [False, True], ids=["letting-go", "ending"])
def test_what_lands_in_the_moment_an_unwinding_stops_is_not_left(kit: AgentKit, world: World, declared: bool) -> None:
    """The late fact gets into the log between the last look and the last commit."""
    gate = threading.Event()
    commit, moments = kit.log.commit, []

    def slow_commit(decide: Any, *more: Any) -> Any:
        if "_last" in getattr(decide, "__qualname__", "") and not moments:
            moments.append(1)
            gate.set()
            eventually(lambda: "step.landed" in kinds(kit, saga.header_id))
        return commit(decide, *more)

    kit.log.commit = slow_commit  # type: ignore[method-assign]
    inverse = {"undo": world.undo} if declared else {"compensate": world.compensate}
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute(
            "hotel", world.slow_book(gate, before=False), {"what": "a"}, semantics=COMPENSABLE, timeout=SOON,
            settle=SOON, **inverse,
        )  # fmt: skip
    assert moments and "step.landed" in kinds(kit, saga.header_id)
    assert aborted.value.report.clean and not world.effects and not kit.engine.state.sagas


@pytest.mark.promise("1.14")
def test_what_a_probe_finds_is_undone_by_what_its_answer_derives(memory: AgentKit) -> None:
    """Only a derived inverse, a lost answer, and a probe that tells the result: the effect is not an orphan."""
    stands: list[str] = []

    def book() -> dict[str, str]:
        stands.append("r-1")
        raise TimeoutError("no answer")

    looks: list[int] = []

    def look() -> Any:
        looks.append(1)
        return CANNOT_TELL if len(looks) == 1 else PRESENT({"id": "r-1"})

    def cancel(id: str) -> None:
        stands.remove(id)

    with pytest.raises(SagaAborted) as aborted, memory.transaction() as saga:
        saga.execute(
            "hotel", book, {}, semantics=COMPENSABLE, probe=look, settle=0.05,
            compensate=lambda result: Compensation(cancel, {"id": result["id"]}),
        )  # fmt: skip
    assert stands == [] and aborted.value.report.clean
