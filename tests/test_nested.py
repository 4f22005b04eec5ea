"""A saga inside a saga shares its fate; `continue_as_new` hands on what may still have to be undone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from world import World, fold, killed

from amends import (
    COMPENSABLE,
    PRESENT,
    REVERSIBLE,
    AgentKit,
    Compensation,
    Refused,
    SagaAborted,
    compensator,
    current_saga,
    saga_scope,
    tool,
)
from amends.runtime import unwind


def book(handle: Any, world: World, what: str, **options: Any) -> Any:
    options = {"semantics": COMPENSABLE, "undo": world.undo, **options}
    return handle.execute("hotel", world.book, {"what": what}, **options)


@pytest.mark.promise("1.13")
def test_an_inner_saga_that_committed_is_undone_with_the_outer_one_in_order(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope("trip", kit=kit) as outer:
        book(outer, world, "a")
        with saga_scope() as inner:
            book(inner, world, "b")
            with saga_scope() as innermost:
                book(innermost, world, "c")
            book(inner, world, "d")
        book(outer, world, "e")
        raise ValueError
    assert world.undos == ["e", "d", "c", "b", "a"] and aborted.value.report.clean
    assert not list(kit.engine.state.sagas)


@pytest.mark.promise("1.13")
def test_a_family_that_commits_ends_in_one_commit_the_outer_one_last(kit: AgentKit, world: World) -> None:
    with saga_scope("trip", kit=kit) as outer:
        book(outer, world, "a")
        with saga_scope() as inner:
            book(inner, world, "b")
        assert fold(kit, inner.header_id).phase == "joined"
    ends = [record.entry.saga for record in kit.log.records() if record.entry.kind == "saga.ended"]
    assert ends == [inner.header_id, outer.header_id] and world.standing == ["a", "b"]


@pytest.mark.promise("1.13")
def test_an_inner_saga_that_fails_undoes_itself_and_the_outer_one_may_go_on(kit: AgentKit, world: World) -> None:
    with saga_scope("trip", kit=kit) as outer:
        book(outer, world, "a")
        with pytest.raises(SagaAborted), saga_scope() as inner:
            book(inner, world, "b")
            raise ValueError
        book(outer, world, "c")
    assert world.standing == ["a", "c"] and world.undos == ["b"]
    assert fold(kit, inner.header_id).out == "compensated" and fold(kit, outer.header_id).out == "committed"


@pytest.mark.promise("1.13")
def test_an_inner_saga_that_waits_for_a_person_keeps_the_outer_one_from_committing(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope("trip", kit=kit) as outer:
        book(outer, world, "a")
        with pytest.raises(SagaAborted), saga_scope() as inner:
            book(inner, world, "b", undo=None)
            raise ValueError
    assert aborted.value.cause.code == "inner_saga_open"
    assert world.standing == ["b"] and not aborted.value.report.clean
    [item] = kit.inbox()
    kit.accept(item["id"], by="ann", reason="kept")
    assert not list(kit.engine.state.sagas) and kit.inbox() == []


@pytest.mark.promise("1.7")
def test_an_inner_escalation_does_not_stop_the_outer_unwinding(
    kit: AgentKit, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwind, "BACKOFF", 0.001)
    go_on = {"on_compensation_failure": "continue"}
    with pytest.raises(SagaAborted) as aborted, saga_scope("trip", kit=kit, **go_on) as outer:
        book(outer, world, "a")
        with saga_scope() as inner:
            book(inner, world, "b")
            world.refuse = [ValueError("down")] * unwind.ATTEMPTS
            raise ValueError
    assert world.standing == ["b"] and world.undos == ["a"]
    assert {step.state for step in aborted.value.report.steps} == {"compensated", "compensation_failed"}
    [item] = kit.inbox()
    assert kit.retry(item["id"], by="ann").clean and not world.effects


@pytest.mark.promise("1.13")
def test_an_inner_scope_still_open_in_another_task_shares_the_fate_of_the_outer_one(
    kit: AgentKit, world: World
) -> None:
    async def main() -> list[Any]:
        opened, go_on = asyncio.Event(), asyncio.Event()

        async def side() -> None:
            async with saga_scope() as inner:
                await inner.execute("hotel", world.abook, {"what": "b"}, semantics=COMPENSABLE, undo=world.undo)
                opened.set()
                await go_on.wait()
                await inner.execute("hotel", world.abook, {"what": "c"}, semantics=COMPENSABLE, undo=world.undo)

        with pytest.raises(SagaAborted) as aborted:
            async with saga_scope("trip", kit=kit) as outer:
                await outer.execute("hotel", world.abook, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
                task = asyncio.create_task(side())
                await opened.wait()
                raise ValueError
        assert aborted.value.report.clean and not world.effects
        go_on.set()
        await asyncio.wait([task])
        return [task.exception()]

    [error] = asyncio.run(main())
    assert isinstance(error, Refused) and world.undos == ["b", "a"]
    assert not world.effects and not list(kit.engine.state.sagas)


@pytest.mark.promise("1.13")
def test_an_outer_scope_is_not_left_well_while_an_inner_one_is_open(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope("trip", kit=kit):
        inner = saga_scope()
        book(inner.__enter__(), world, "a")
    assert aborted.value.cause.code == "inner_saga_open" and not world.effects


@pytest.mark.promise("1.13")
def test_compensations_probes_verifiers_run_outside_any_saga(kit: AgentKit, world: World) -> None:
    seen: dict[str, Any] = {}

    @tool("notes.drop", semantics=REVERSIBLE)
    def drop() -> None:
        seen["compensation"] = current_saga()

    def probe(what: str) -> Any:
        seen["probe"] = current_saga()
        return PRESENT

    def verify(result: Any) -> bool:
        seen["verify"] = current_saga()
        return True

    with pytest.raises(SagaAborted), saga_scope("outermost", kit=kit):
        with saga_scope() as handle:
            book(handle, world, "a", verify=verify)
            world.lose = [TimeoutError()]
            book(handle, world, "b", probe=probe, undo=Compensation(drop))
            raise ValueError
    assert seen == {"verify": None, "probe": None, "compensation": None}


@pytest.mark.promise("1.13")
def test_undoing_from_inside_a_saga_makes_no_steps_of_it(kit: AgentKit, world: World) -> None:
    seen: list[Any] = []

    @compensator("nested.note")
    def note() -> None:
        seen.append(current_saga())

    with saga_scope("past", kit=kit) as handle:
        book(handle, world, "a", undo=Compensation(handler="nested.note"))
    with saga_scope("now", kit=kit):
        assert kit.undo("past", by="ann", reason="wrong day").clean
    assert seen == [None]


@pytest.mark.promise("1.13")
def test_a_crash_takes_the_inner_saga_with_it_and_a_resume_serves_it(kit: AgentKit, world: World) -> None:
    outer = saga_scope("trip", kit=kit, on_crash="resume").__enter__()
    book(outer, world, "a")
    with saga_scope() as inner:
        book(inner, world, "b")
    half = saga_scope().__enter__()
    book(half, world, "c")
    killed(kit)
    with saga_scope("trip", kit=kit, on_crash="resume") as outer:
        book(outer, world, "a")
        with saga_scope() as inner:
            book(inner, world, "b")
        with saga_scope() as inner:
            book(inner, world, "c")
            book(inner, world, "d")
    assert world.calls == 4 and fold(kit, outer.header_id).out == "committed"


@pytest.mark.promise("1.13")
def test_an_inner_saga_cannot_be_resumed_without_the_outer_one(kit: AgentKit, world: World) -> None:
    outer = saga_scope("trip", kit=kit, on_crash="resume").__enter__()
    book(outer, world, "a")
    with saga_scope("leg", kit=kit) as inner:
        book(inner, world, "b")
    killed(kit)
    with pytest.raises(Refused) as refused, saga_scope("leg", kit=kit):
        pass
    assert refused.value.code == "saga_inside"


@pytest.mark.promise("1.13")
def test_a_saga_of_its_own_that_is_resumed_inside_another_keeps_its_own_fate(kit: AgentKit, world: World) -> None:
    alone = saga_scope("order", kit=kit, on_crash="resume").__enter__()
    book(alone, world, "a")
    killed(kit)
    with pytest.raises(SagaAborted), saga_scope("trip", kit=kit) as outer:
        book(outer, world, "b")
        with saga_scope("order", on_crash="resume") as alone:
            book(alone, world, "a")
        raise ValueError
    assert fold(kit, alone.header_id).out == "committed" and world.standing == ["a"]


# ---- continue_as_new -------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.13")
def test_what_went_on_as_new_is_undone_with_what_came_before(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope("month-1", kit=kit) as handle:
        book(handle, world, "a")
        with saga_scope() as inner:
            book(inner, world, "b")
        book(handle, world, "c")
        handle.continue_as_new("month-2")
        book(handle, world, "d")
        handle.continue_as_new("month-3")
        book(handle, world, "e")
        assert handle.id == "month-3"
        raise ValueError
    assert world.undos == ["e", "d", "c", "b", "a"] and aborted.value.report.clean
    outs = [fold(kit, kit.engine.hide(f"month-{n}")).out for n in (1, 2, 3)]
    assert outs == ["continued", "continued", "compensated"] and not list(kit.engine.state.sagas)


@pytest.mark.promise("1.13")
def test_going_on_as_new_on_a_loop_and_leaving_well_keeps_everything(kit: AgentKit, world: World) -> None:
    async def main() -> None:
        async with saga_scope(kit=kit) as handle:
            await handle.execute("hotel", world.abook, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
            await handle.continue_as_new()
            await handle.execute("hotel", world.abook, {"what": "b"}, semantics=COMPENSABLE, undo=world.undo)

    asyncio.run(main())
    assert world.standing == ["a", "b"] and not list(kit.engine.state.sagas)


@pytest.mark.promise("1.13")
@pytest.mark.promise("1.20")
def test_a_saga_that_went_on_is_undone_by_its_heir_only(kit: AgentKit, world: World) -> None:
    compensator("nested.cancel")(world.cancel)

    def undo(what: str, idempotency_key: str) -> Compensation:
        return Compensation(handler="nested.cancel", kwargs={"of": idempotency_key})

    with saga_scope("month-1", kit=kit) as handle:
        book(handle, world, "a", undo=undo)
        handle.continue_as_new("month-2")
        book(handle, world, "b", undo=undo)
    with pytest.raises(Refused) as refused:
        kit.undo("month-1", by="ann", reason="wrong")
    assert refused.value.code == "continued" and "month-2" in str(refused.value)
    assert kit.undo("month-2", by="ann", reason="wrong").clean and world.undos == ["b", "a"]


@pytest.mark.promise("1.11")
@pytest.mark.promise("1.13")
def test_a_rerun_follows_a_saga_into_what_it_went_on_as(kit: AgentKit, world: World) -> None:
    def body() -> None:
        with saga_scope("month-1", kit=kit) as handle:
            book(handle, world, "a")
            handle.continue_as_new("month-2")
            book(handle, world, "b")

    body()
    body()
    assert world.calls == 2 and fold(kit, kit.engine.hide("month-2")).out == "committed"
