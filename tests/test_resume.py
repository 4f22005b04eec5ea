"""A saga with an id can be run again: what is finished is served, what differs is refused, one run at a time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from world import World, fold, killed, kinds

from amends import (
    ABSENT,
    COMPENSABLE,
    PRESENT,
    REVERSIBLE,
    AgentKit,
    Compensation,
    Fallback,
    Refused,
    ResumeConflict,
    RetryPolicy,
    SagaAborted,
    saga,
    saga_scope,
)
from amends.runtime import scope, unwind
from amends.runtime.inverse import idempotency_key
from amends.store.errors import BadValue


def book(handle: Any, world: World, what: str, tool: str = "hotel", **options: Any) -> Any:
    options = {"semantics": COMPENSABLE, "undo": world.undo, **options}
    return handle.execute(tool, world.book, {"what": what}, **options)


class Death(BaseException):
    """Stands in for a kill: the scope is not left, it just stops being."""


def run_and_die(kit: AgentKit, world: World, *whats: str, id: str = "trip", **options: Any) -> None:
    handle = saga_scope(id, kit=kit, on_crash="resume").__enter__()
    for what in whats:
        book(handle, world, what, **options)
    kit.log.flush()
    killed(kit)


def state_of(kit: AgentKit, id: str = "trip") -> Any:
    return fold(kit, kit.engine.hide(id))


# ---- what is finished ------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.11")
def test_after_success_a_second_run_performs_nothing_and_gets_the_same_results(kit: AgentKit, world: World) -> None:
    results = []
    for _ in range(3):
        with saga_scope("trip", kit=kit) as handle:
            results.append([book(handle, world, "a"), book(handle, world, "b")])
    assert results[0] == results[1] == results[2] and world.calls == 2


@pytest.mark.promise("1.11")
def test_a_finished_saga_takes_no_new_step_and_stays_finished(kit: AgentKit, world: World) -> None:
    with saga_scope("trip", kit=kit) as handle:
        book(handle, world, "a")
    with pytest.raises(Refused) as refused, saga_scope("trip", kit=kit) as handle:
        book(handle, world, "a")
        book(handle, world, "b")
    assert refused.value.code == "saga_finished" and world.standing == ["a"]
    assert state_of(kit).out == "committed"


@pytest.mark.promise("1.11")
def test_after_it_was_undone_it_refuses_unless_a_named_person_lets_it_run_again(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted), saga_scope("trip", kit=kit) as handle:
        book(handle, world, "a")
        raise ValueError
    with pytest.raises(Refused) as refused, saga_scope("trip", kit=kit):
        pass
    assert refused.value.code == "saga_compensated" and "restart" in refused.value.next
    for nobody in ("", " "):
        with pytest.raises(BadValue):
            saga_scope("trip", kit=kit, restart=nobody)
    with saga_scope("trip", kit=kit, restart="ann", restart_reason="paid") as handle:
        again = book(handle, world, "a")
    assert world.standing == ["a"] and again["id"] != "e0"
    first = kit.log.thread(handle.header_id)[0]
    assert first.entry.of == kit.engine.hide("trip") and b"ann" in (first.blob or b"")
    with saga_scope("trip", kit=kit) as handle:  # the newest generation answers
        assert book(handle, world, "a") == again


@pytest.mark.promise("1.11")
def test_a_crashed_id_is_recoverys_by_default(kit: AgentKit, world: World) -> None:
    handle = saga_scope("trip", kit=kit).__enter__()
    book(handle, world, "a")
    killed(kit)
    with pytest.raises(Refused) as refused, saga_scope("trip", kit=kit):
        pass
    assert refused.value.code == "saga_crashed"


# ---- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.11")
@pytest.mark.parametrize("semantics", [REVERSIBLE, COMPENSABLE])
def test_work_goes_on_where_a_crash_ended_it(kit: AgentKit, world: World, semantics: Any) -> None:
    run_and_die(kit, world, "a", "b", semantics=semantics)
    with saga_scope("trip", kit=kit, on_crash="resume") as handle:
        assert handle.resumed
        assert book(handle, world, "a", semantics=semantics)["id"] == "e0"
        assert book(handle, world, "b", semantics=semantics)["id"] == "e1"
        assert book(handle, world, "c", semantics=semantics)["id"] == "e2"
    assert world.calls == 3 and state_of(kit).out == "committed"


@pytest.mark.promise("1.11")
def test_a_resumed_saga_that_fails_undoes_what_was_done_before_the_crash(kit: AgentKit, world: World) -> None:
    run_and_die(kit, world, "a")
    with pytest.raises(SagaAborted) as aborted, saga_scope("trip", kit=kit, on_crash="resume") as handle:
        book(handle, world, "a")
        book(handle, world, "b")
        raise ValueError
    # the inverse of `a` lived in the process that died: it is not guessed at
    assert world.undos == ["b"] and not aborted.value.report.clean
    assert [item["kind"] for item in kit.inbox()] == ["closure"]


def die_in_the_middle(kit: AgentKit, world: World, happened: bool, **options: Any) -> None:
    def dies(what: str, idempotency_key: str) -> None:
        if happened:
            world.act(what, idempotency_key)
        raise Death

    handle = saga_scope("trip", kit=kit, on_crash="resume").__enter__()
    run = handle._run
    with pytest.raises(Death):
        handle.execute("hotel", dies, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo, **options)
    assert run.saga(kit.engine.state).steps[1].state in ("intended", "unknown")
    killed(kit)


@pytest.mark.promise("1.11")
@pytest.mark.parametrize("happened", [True, False])
def test_an_unknown_step_goes_again_under_its_key(kit: AgentKit, world: World, happened: bool) -> None:
    die_in_the_middle(kit, world, happened)
    with saga_scope("trip", kit=kit, on_crash="resume") as handle:
        book(handle, world, "a")
    assert world.standing == ["a"] and [verb for verb, _ in world.log] == ["do"]


@pytest.mark.promise("1.14")
@pytest.mark.parametrize("happened", [True, False])
def test_an_unknown_step_that_takes_no_key_asks_its_probe(kit: AgentKit, world: World, happened: bool) -> None:
    die_in_the_middle(kit, world, happened, settle=0.05)
    performed: list[str] = []

    def plain(what: str) -> str:
        performed.append(what)
        return what

    probe = lambda what: PRESENT("there") if world.effects else ABSENT  # noqa: E731
    with saga_scope("trip", kit=kit, on_crash="resume") as handle:
        result = handle.execute("hotel", plain, {"what": "a"}, semantics=COMPENSABLE, probe=probe)
    assert (result, performed) == (("there", []) if happened else ("a", ["a"]))


@pytest.mark.promise("1.11")
def test_an_unknown_step_without_key_and_probe_is_not_repeated(kit: AgentKit, world: World) -> None:
    die_in_the_middle(kit, world, True, settle=0.05)
    performed: list[str] = []
    with pytest.raises(SagaAborted) as aborted, saga_scope("trip", kit=kit, on_crash="resume") as handle:
        handle.execute("hotel", lambda what: performed.append(what), {"what": "a"}, semantics=COMPENSABLE, settle=0.05)
    assert aborted.value.cause.code == "unsettled_step" and not performed
    assert not aborted.value.report.clean and world.standing == ["a"]


@pytest.mark.promise("1.11")
def test_a_fallback_that_was_taken_is_served_and_its_primary_left_alone(kit: AgentKit, world: World) -> None:
    calls: list[str] = []

    def primary(what: str) -> None:
        calls.append(what)
        raise ValueError

    def step(handle: Any) -> Any:
        fallback = Fallback(world.book, compensate=world.compensate)
        return handle.execute("hotel", primary, {"what": "a"}, semantics=COMPENSABLE, fallback=fallback)

    handle = saga_scope("trip", kit=kit, on_crash="resume").__enter__()
    first = step(handle)
    killed(kit)
    with saga_scope("trip", kit=kit, on_crash="resume") as handle:
        assert step(handle) == first
    assert calls == ["a"] and world.calls == 1


# ---- other code ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.11")
def test_other_arguments_stop_it_name_both_and_leave_it_resumable(kit: AgentKit, world: World) -> None:
    run_and_die(kit, world, "a", "b")
    with pytest.raises(ResumeConflict) as conflict, saga_scope("trip", kit=kit, on_crash="resume") as handle:
        book(handle, world, "a")
        book(handle, world, "x")
    assert conflict.value.facts["old"][:12] in str(conflict.value)
    assert conflict.value.facts["new"][:12] in str(conflict.value)
    assert world.standing == ["a", "b"] and state_of(kit).phase == "suspended"
    with saga_scope("trip", kit=kit, on_crash="resume") as handle:
        book(handle, world, "a")
        book(handle, world, "b")
    assert world.calls == 2 and state_of(kit).out == "committed"


@pytest.mark.promise("1.11")
@pytest.mark.parametrize("wrapped", [False, True], ids=["raised", "wrapped-by-a-framework"])
def test_another_step_stops_it_before_it_is_performed(kit: AgentKit, world: World, wrapped: bool) -> None:
    run_and_die(kit, world, "a", "b")
    with pytest.raises(RuntimeError if wrapped else ResumeConflict), saga_scope("trip", kit=kit) as handle:
        book(handle, world, "a")
        try:
            book(handle, world, "c", tool="car")
        except ResumeConflict as conflict:
            assert conflict.facts["old"] == "hotel" and conflict.facts["new"] == "car"
            if not wrapped:
                raise
            raise RuntimeError("tool failed") from conflict
    assert world.standing == ["a", "b"] and state_of(kit).phase == "suspended"


@pytest.mark.promise("1.11")
def test_a_conflict_that_was_swallowed_is_raised_when_the_scope_is_left(kit: AgentKit, world: World) -> None:
    run_and_die(kit, world, "a", "b")
    with pytest.raises(ResumeConflict), saga_scope("trip", kit=kit, on_crash="resume") as handle:
        with pytest.raises(ResumeConflict):
            book(handle, world, "x")
        with pytest.raises(ResumeConflict):
            book(handle, world, "b")
    assert state_of(kit).phase == "suspended"


@pytest.mark.promise("1.11")
def test_code_that_leaves_a_step_out_is_other_code(kit: AgentKit, world: World) -> None:
    run_and_die(kit, world, "a", "b")
    with pytest.raises(ResumeConflict), saga_scope("trip", kit=kit, on_crash="resume") as handle:
        book(handle, world, "a")
    assert world.standing == ["a", "b"] and state_of(kit).phase == "suspended"


@pytest.mark.promise("1.11")
def test_a_conflict_inside_an_inner_saga_suspends_the_outer_one_with_it(kit: AgentKit, world: World) -> None:
    def body(last: str) -> None:
        with saga_scope("trip", kit=kit, on_crash="resume") as handle:
            book(handle, world, "a")
            with saga_scope(kit=kit) as inner:
                book(inner, world, last)
            raise Death

    outer = saga_scope("trip", kit=kit, on_crash="resume").__enter__()
    book(outer, world, "a")
    with saga_scope(kit=kit) as inner:
        book(inner, world, "b")
    killed(kit)
    with pytest.raises(ResumeConflict):
        body("x")
    assert state_of(kit).phase == "suspended" and world.standing == ["a", "b"]
    with saga_scope("trip", kit=kit, on_crash="resume") as handle:
        book(handle, world, "a")
        with saga_scope(kit=kit) as inner:
            book(inner, world, "b")
        book(handle, world, "c")
    assert world.calls == 3 and state_of(kit).out == "committed"


# ---- identity --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.12")
def test_siblings_keep_their_identity_by_the_order_they_were_called_in(kit: AgentKit, world: World) -> None:
    async def run(delays: list[float], die: bool) -> list[Any]:
        async def slow(what: str, delay: float, idempotency_key: str) -> Any:
            await asyncio.sleep(waits.pop(what))
            return world.act(what, idempotency_key)

        waits = dict(zip("abc", delays, strict=True))
        scope_ = saga_scope("trip", kit=kit, on_crash="resume")
        handle = await scope_.__aenter__()
        got = await asyncio.gather(
            *(
                handle.execute("hotel", slow, {"what": what, "delay": 0.0}, semantics=COMPENSABLE, undo=world.undo)
                for what in "abc"
            )
        )
        if not die:
            await scope_.__aexit__(None, None, None)
        return got

    first = asyncio.run(run([0.05, 0.02, 0.0], die=True))
    killed(kit)
    second = asyncio.run(run([0.0, 0.02, 0.05], die=False))
    assert [each["what"] for each in first] == ["a", "b", "c"] and second == first and world.calls == 3


@pytest.mark.promise("1.12")
def test_siblings_that_await_first_are_told_apart_by_key(kit: AgentKit, world: World) -> None:
    async def run(order: str, die: bool) -> dict[str, Any]:
        scope_ = saga_scope("trip", kit=kit, on_crash="resume")
        handle = await scope_.__aenter__()

        async def sibling(what: str) -> Any:
            await asyncio.sleep(0.02 * order.index(what))
            return await handle.execute(
                "hotel", world.abook, {"what": what}, semantics=COMPENSABLE, undo=world.undo, key=f"for {what}"
            )

        got = dict(zip("abc", await asyncio.gather(*map(sibling, "abc")), strict=True))
        if not die:
            await scope_.__aexit__(None, None, None)
        return got

    first = asyncio.run(run("abc", die=True))
    killed(kit)
    assert asyncio.run(run("cba", die=False)) == first and world.calls == 3


@pytest.mark.promise("1.10")
def test_the_same_key_with_other_arguments_shows_both_digests(kit: AgentKit, world: World) -> None:
    with saga_scope(kit=kit) as handle:
        book(handle, world, "a", key="k")
        with pytest.raises(BadValue) as reused:
            book(handle, world, "b", key="k")
    assert reused.value.code == "key_reused"
    assert reused.value.facts["old"][:12] in str(reused.value) and reused.value.facts["new"][:12] in str(reused.value)
    assert world.calls == 1


@pytest.mark.promise("1.10")
@pytest.mark.parametrize("semantics", [REVERSIBLE, COMPENSABLE])
def test_the_same_key_with_the_same_arguments_is_the_same_step(kit: AgentKit, world: World, semantics: Any) -> None:
    with saga_scope(kit=kit) as handle:
        first = book(handle, world, "a", key="k", semantics=semantics)
        assert book(handle, world, "a", key="k", semantics=semantics) == first
    assert world.calls == 1


@pytest.mark.promise("1.10")
def test_a_step_that_failed_may_be_called_again_by_its_key(kit: AgentKit, world: World) -> None:
    world.lose = [ConnectionResetError()]
    with saga_scope(kit=kit) as handle:
        with pytest.raises(ConnectionResetError):
            book(handle, world, "a", key="k")
        book(handle, world, "a", key="k")
    assert world.standing == ["a"] and world.calls == 2 and list(fold(kit, handle.header_id).steps) == [1]


@pytest.mark.promise("1.10")
def test_the_key_follows_from_saga_step_and_direction_and_never_from_the_attempt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwind, "BACKOFF", 0.001)
    seen: dict[str, list[str]] = {"do": [], "undo": [], "open": []}

    def forward(what: str, idempotency_key: str) -> Any:
        seen["do"].append(idempotency_key)
        if len(seen["do"]) < 3:
            raise ConnectionError("once more")
        return world.act(what, idempotency_key)

    def back(what: str, idempotency_key: str) -> None:
        seen["undo"].append(idempotency_key)
        if len(seen["undo"]) < 3:
            raise ConnectionError("once more")

    retry = RetryPolicy(2, base_delay=0.0)
    kit = AgentKit.in_memory()
    with pytest.raises(SagaAborted), saga_scope("trip", kit=kit) as handle:
        for what in "ab":
            inverse = Compensation(back, {"what": what})
            handle.execute("hotel", forward, {"what": what}, semantics=COMPENSABLE, undo=inverse, retry=retry)
        handle.execute("hotel", forward, {"what": "c", "idempotency_key": "mine"}, semantics=COMPENSABLE)
        handle.execute("bar", lambda **kwargs: seen["open"].append(str(kwargs)), {"x": 1}, semantics=COMPENSABLE)
        raise ValueError

    def key(step: str, scope: str) -> str:
        return idempotency_key(handle.header_id, "hotel", step, scope)

    assert seen["do"] == [key("1", "do")] * 3 + [key("2", "do"), "mine"], "a value of the caller's own is kept"
    assert seen["undo"] == [key("2", "undo")] * 3 + [key("1", "undo")]
    assert len({*seen["do"], *seen["undo"]}) == 5, "doing and undoing, and each step, have keys of their own"
    assert seen["open"] == ["{'x': 1}"], "it is not pushed through **kwargs"


# ---- one at a time ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.17")
def test_a_saga_that_is_running_is_refused_with_who_has_it(kit: AgentKit, world: World) -> None:
    with saga_scope("trip", kit=kit) as handle:
        book(handle, world, "a")
        refused: list[Refused] = []

        def other() -> None:
            try:
                saga_scope("trip", kit=kit).__enter__()
            except Refused as error:
                refused.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert [error.code for error in refused] == ["saga_busy"] and "this process" in refused[0].message


HOLDER = """
import sys, time
from amends import saga_scope, COMPENSABLE
with saga_scope("trip", on_crash="resume") as saga:
    saga.execute("hotel", lambda what: what, {"what": "a"}, semantics=COMPENSABLE)
    print("held", flush=True)
    sys.stdin.readline()
    __import__("os")._exit(9)
"""


@pytest.mark.promise("1.17")
@pytest.mark.promise("1.11")
def test_another_process_that_lives_keeps_its_saga_and_one_that_died_leaves_it_to_be_resumed(tmp_path: Path) -> None:
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    env = {**os.environ, "AMENDS_HOME": str(tmp_path / "home")}
    child = subprocess.Popen(
        [sys.executable, str(script)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with AgentKit(home=tmp_path / "home") as kit:
        with pytest.raises(Refused) as refused, saga_scope("trip", kit=kit, on_crash="resume"):
            pass
        assert refused.value.code == "saga_busy" and str(child.pid) in refused.value.message
        child.communicate("\n", timeout=20)
        with saga_scope("trip", kit=kit, on_crash="resume") as handle:
            assert handle.execute("hotel", lambda what: 1 / 0, {"what": "a"}, semantics=COMPENSABLE) == "a"
        assert state_of(kit).out == "committed"


# ---- @saga -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.11")
def test_a_saga_function_returns_its_recorded_result(kit: AgentKit, world: World) -> None:
    ran: list[str] = []

    @saga(id=lambda what: f"trip-{what}", kit=kit)
    def trip(what: str) -> Any:
        from amends import current_saga

        ran.append(what)
        return {"got": book(current_saga(), world, what), "n": (1, 2)}

    assert trip("a") == trip("a") and ran == ["a"]
    assert trip("b")["got"]["what"] == "b" and ran == ["a", "b"]


@pytest.mark.promise("1.11")
def test_an_async_saga_function_returns_its_recorded_result(kit: AgentKit, world: World) -> None:
    ran: list[str] = []

    @saga(id="trip", kit=kit)
    async def trip() -> str:
        ran.append("once")
        return "done"

    assert asyncio.run(trip()) == asyncio.run(trip()) == "done" and ran == ["once"]


@pytest.mark.promise("1.11")
def test_a_saga_function_without_id_runs_each_time_and_is_undone_when_it_fails(kit: AgentKit, world: World) -> None:
    @saga(kit=kit)
    def trip(fail: bool) -> int:
        from amends import current_saga

        book(current_saga(), world, "a")
        if fail:
            raise ValueError
        return world.calls

    assert trip(False) == 1 and trip(False) == 2
    with pytest.raises(SagaAborted):
        trip(True)
    assert len(world.effects) == 2 and world.undos == ["a"]


def test_what_a_scope_is_asked_to_be_is_checked_when_it_is_written() -> None:
    for wrong in (
        {"on_crash": "maybe"}, {"barriers": "none"}, {"on_compensation_failure": "shrug"}, {"id": ""}, {"id": 7},
        {"on_crash": "resume"},
    ):  # fmt: skip
        with pytest.raises(BadValue):
            saga_scope(**wrong)
    assert scope.RESUME_WITHIN > 0


def test_the_same_scope_is_not_left_twice(memory: AgentKit) -> None:
    once = saga_scope(kit=memory)
    with once:
        pass
    with pytest.raises(BadValue):
        once.__exit__(None, None, None)


@pytest.mark.promise("1.11")
def test_a_first_run_writes_the_facts_of_a_step_once(kit: AgentKit, world: World) -> None:
    run_and_die(kit, world, "a")
    with saga_scope("trip", kit=kit, on_crash="resume") as handle:
        book(handle, world, "a")
    told = kinds(kit, handle.header_id)
    assert told == ["saga.opened", "step.intended", "step.done", "saga.taken", "saga.ended"]


@pytest.mark.promise("1.17")
def test_a_saga_without_a_step_yet_is_running_all_the_same(kit: AgentKit, world: World) -> None:
    with saga_scope("trip", kit=kit) as handle:
        opened: list[Any] = []
        work = lambda: _code_of(lambda: saga_scope("trip", kit=kit).__enter__())  # noqa: E731
        thread = threading.Thread(target=lambda: opened.append(work()))
        thread.start()
        thread.join()
        assert opened == ["saga_busy"]
        book(handle, world, "a")


def _code_of(work: Any) -> str:
    try:
        work()
    except Refused as refused:
        return refused.code
    return "it worked"


@pytest.mark.promise("1.11")
@pytest.mark.parametrize("ended", [False, True])
def test_of_two_processes_that_want_the_same_saga_whoever_commits_first_has_it(
    tmp_path: Path, world: World, ended: bool
) -> None:
    import contextvars

    with AgentKit(home=tmp_path / "home") as one, AgentKit(home=tmp_path / "home") as two:
        first, second = saga_scope("trip", kit=one), saga_scope("trip", kit=two)
        slow = contextvars.copy_context()
        late = slow.run(second.__enter__)
        with first as handle:
            book(handle, world, "a")
            if not ended:
                with pytest.raises(Refused):
                    slow.run(book, late, world, "b")
        if ended:
            with pytest.raises(Refused) as refused:
                slow.run(book, late, world, "b")
            slow.run(second.__exit__, type(refused.value), refused.value, None)
        assert world.standing == ["a"] and fold(one, handle.header_id).out == "committed"


@pytest.mark.promise("1.11")
def test_a_finished_saga_is_read_by_many_at_once(kit: AgentKit, world: World) -> None:
    with saga_scope("trip", kit=kit) as handle:
        first = book(handle, world, "a")
        with saga_scope() as inner:
            second = book(inner, world, "b")

    async def read() -> Any:
        async with saga_scope("trip", kit=kit) as handle:
            await asyncio.sleep(0.01)
            outer = await handle.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
            async with saga_scope() as inner:
                return outer, await inner.execute(
                    "hotel", world.book, {"what": "b"}, semantics=COMPENSABLE, undo=world.undo
                )

    async def many() -> list[Any]:
        return await asyncio.gather(*(read() for _ in range(3)))

    assert asyncio.run(many()) == [(first, second)] * 3 and world.calls == 2


@pytest.mark.promise("1.11")
@pytest.mark.parametrize("id", ["order-1\x001", "\ud800", "a\nb", "x" * 1025, "", 5])
def test_an_id_that_could_pass_for_another_or_cannot_be_said_is_refused(memory: AgentKit, id: Any) -> None:
    with pytest.raises(BadValue) as refused:
        saga_scope(id, kit=memory)
    assert refused.value.code == "bad_saga_id" and len(str(refused.value)) < 300
    if id is not None and id != 5:
        with pytest.raises(BadValue):
            saga_scope("fine", name=id, kit=memory)
