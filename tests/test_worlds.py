"""Many worlds: random sagas with random faults, and a death at every commit. The vendor's ledger has the last word.

Whatever happens, a report that says clean leaves nothing standing, a saga that committed has each effect once, and
what is left after a death is finished by whoever comes next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from world import World, fold, killed

from amends import (
    ABSENT,
    CANNOT_TELL,
    COMPENSABLE,
    PRESENT,
    REVERSIBLE,
    AgentKit,
    Compensation,
    Fallback,
    RetryPolicy,
    SagaAborted,
    compensator,
    saga_scope,
)
from amends.runtime import tools, unwind
from amends.runtime.current import CURRENT
from amends.runtime.drive import BLOCKING, run
from amends.runtime.unwind import take
from amends.store.errors import AmendsError

STEP = st.fixed_dictionaries(
    {
        "fault": st.sampled_from(["", "", "", "refused", "lost", "lost twice"]),
        "inverse": st.sampled_from(["undo", "compensate", "both", "none", "human", "broken"]),
        "probe": st.sampled_from(["", "", "true", "cannot_tell"]),
        "semantics": st.sampled_from([REVERSIBLE, COMPENSABLE]),
        "retry": st.booleans(),
        "fallback": st.booleans(),
        "swallow": st.booleans(),
        "undo_fault": st.sampled_from(["", "", "", "once", "for good"]),
        "inner": st.booleans(),
    }
)


class Faults:
    """One step's tools, misbehaving as they are told to."""

    def __init__(self, world: World, plan: dict[str, Any]) -> None:
        self.world, self.plan = world, plan
        self.lose = {"lost": 1, "lost twice": 2}.get(plan["fault"], 0)
        self.fail_undo = {"once": 1, "for good": 99}.get(plan["undo_fault"], 0)

    def forward(self, what: str, idempotency_key: str) -> Any:
        if self.plan["fault"] == "refused":
            raise ValueError("refused")
        made = self.world.act(what, idempotency_key)
        if self.lose:
            self.lose -= 1
            raise ConnectionResetError
        return made

    def cancel(self, of: str, idempotency_key: str) -> None:
        if self.fail_undo:
            self.fail_undo -= 1
            raise ValueError("down")
        self.world.cancel(of, idempotency_key)

    def probe(self, what: str, idempotency_key: str) -> Any:
        if self.plan["probe"] == "cannot_tell":
            return CANNOT_TELL
        return PRESENT if self.world.has(idempotency_key) else ABSENT

    def options(self) -> dict[str, Any]:
        plan, options = self.plan, {"semantics": self.plan["semantics"], "settle": 0.001}
        if plan["inverse"] in ("undo", "both", "broken"):
            options["undo"] = lambda what, idempotency_key: Compensation(self.cancel, {"of": idempotency_key})
        if plan["inverse"] in ("compensate", "both"):
            options["compensate"] = lambda result: Compensation(self.cancel, {"of": result["key"]})
        if plan["inverse"] == "broken":
            options["compensate"] = lambda result: Compensation(self.cancel, {"of": result["no such thing"]})
        if plan["inverse"] == "human":
            options["undo"] = Compensation.human("by hand")
        if plan["probe"]:
            options["probe"] = self.probe
        if plan["retry"]:
            options["retry"] = RetryPolicy(1, "constant", 0.0)
        if plan["fallback"]:
            options["fallback"] = Fallback(
                self.world.book, compensate=lambda result: Compensation(self.world.cancel, {"of": result["key"]})
            )
        return options


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwind, "BACKOFF", 0.0)


def perform(saga: Any, world: World, plans: list[dict[str, Any]]) -> None:
    for number, plan in enumerate(plans):
        faults = Faults(world, plan)
        try:
            if plan["inner"]:
                with saga_scope() as inner:
                    inner.execute("t", faults.forward, {"what": str(number)}, **faults.options())
            else:
                saga.execute("t", faults.forward, {"what": str(number)}, **faults.options())
        except Exception:
            if not plan["swallow"]:
                raise


@pytest.mark.promise("1.6")
@given(
    st.lists(STEP, max_size=5),
    st.booleans(),
    st.sampled_from(["strict", "merged"]),
    st.sampled_from(["halt", "continue"]),
)
def test_whatever_goes_wrong_the_report_says_what_the_world_says(
    plans: list[dict[str, Any]], fails: bool, barriers: str, on_failure: str
) -> None:
    world, kit = World(), AgentKit.in_memory()
    try:
        with saga_scope("it", kit=kit, barriers=barriers, on_compensation_failure=on_failure) as saga:
            perform(saga, world, plans)
            if fails:
                raise ValueError("the body")
    except SagaAborted as aborted:
        report = aborted.report
        if report.clean:
            assert not world.effects, "clean, and something stands"
            assert kit.inbox() == [] and not kit.engine.state.sagas
        else:
            assert kit.inbox(), "not clean, and nobody is asked"
        buckets = [report.done, report.compensated, report.failed, report.not_happened, report.orphaned,
                   report.unknown, report.accepted]  # fmt: skip
        assert sorted(each for bucket in buckets for each in bucket) == sorted(report.steps)
        for item in kit.inbox():  # people settle it, and then it is over
            try:
                kit.accept(item["id"], by="ann", reason="so be it")
            except AmendsError:
                assert not any(each["id"] == item["id"] for each in kit.inbox())
        while kit.inbox():
            kit.accept(kit.inbox()[0]["id"], by="ann", reason="so be it")
        assert not kit.engine.state.sagas
    else:
        found = kit.engine.state.past(kit.engine.hide("it"))
        states = [step.state for step in found.steps.values()] if found else []
        assert set(states) <= {"done", "failed"} and not kit.engine.state.sagas
    assert not kit.engine.runs and CURRENT.get() is None
    assert len({what for verb, what in world.log if verb == "do"}) >= len(world.effects)
    kit.close()


# ---- a death at every commit -----------------------------------------------------------------------------------------


class Death(BaseException):
    """A kill: nothing of this process runs after it."""


class Mortal:
    """Kills the process at the n-th commit of its log: before it is written, or after."""

    def __init__(self, kit: AgentKit, n: int, after: bool) -> None:
        self.left, self.after, self.fired = n, after, False
        self.commit = kit.log.commit
        kit.log.commit = self  # type: ignore[method-assign]

    def __call__(self, *given: Any, **more: Any) -> Any:
        if self.fired:
            return self.commit(*given, **more)
        self.left -= 1
        if self.left == 0 and not self.after:
            self.fired = True
            raise Death
        made = self.commit(*given, **more)
        if self.left == 0:
            self.fired = True
            raise Death
        return made


@pytest.fixture
def desk(world: World) -> Iterator[Any]:
    compensator("worlds.cancel")(world.cancel)
    yield lambda what, idempotency_key: Compensation(handler="worlds.cancel", kwargs={"of": idempotency_key})
    tools._HANDLERS.pop("worlds.cancel")


def body(saga: Any, world: World, desk: Any, merged: bool) -> None:
    saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=desk, settle=0.001)
    with saga_scope() as inner:
        inner.execute("car", world.book, {"what": "b"}, semantics=COMPENSABLE, undo=desk, settle=0.001)
    saga.execute("hotel", world.book, {"what": "c"}, semantics=COMPENSABLE, undo=desk, settle=0.001)


def live_until_killed(kit: AgentKit, world: World, desk: Any, n: int, after: bool, fails: bool, **options: Any) -> bool:
    """Run the body in a process that dies at its n-th commit; say whether it did. Nothing of it unwinds then."""
    mortal = Mortal(kit, n, after)
    scope = saga_scope("it", kit=kit, **options)
    saga = scope.__enter__()
    try:
        outer = saga
        outer.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=desk, settle=0.001)
        inner_scope = saga_scope()
        inner = inner_scope.__enter__()
        inner.execute("car", world.book, {"what": "b"}, semantics=COMPENSABLE, undo=desk, settle=0.001)
        inner_scope.__exit__(None, None, None)
        outer.execute("hotel", world.book, {"what": "c"}, semantics=COMPENSABLE, undo=desk, settle=0.001)
        scope.__exit__(ValueError, ValueError(), None) if fails else scope.__exit__(None, None, None)
    except Death:
        pass
    except SagaAborted:
        assert not mortal.fired
    kit.log.commit = mortal.commit  # type: ignore[method-assign]
    kit.log.flush()
    killed(kit)
    return mortal.fired


@pytest.mark.promise("4.1")
@pytest.mark.parametrize("after", [False, True], ids=["before-it-is-written", "after"])
@pytest.mark.parametrize("fails", [False, True], ids=["going-well", "unwinding"])
@pytest.mark.parametrize("barriers", ["strict", "merged"])
def test_wherever_it_dies_recovery_leaves_all_or_nothing(
    world: World, desk: Any, after: bool, fails: bool, barriers: str
) -> None:
    deaths = 0
    for n in range(1, 40):
        world.effects.clear()
        world.undone.clear()
        world.log.clear()
        kit = AgentKit.in_memory()
        died = live_until_killed(kit, world, desk, n, after, fails, barriers=barriers)
        deaths += died
        for root in list(kit.engine.state.roots()):
            kit.log.commit(take(kit.engine, root.id, root.driver, "crash"))
            report = run(unwind.unwind(BLOCKING, kit.engine, root.id, kit.reach()))
            assert report.clean, (n, report)
        found = kit.engine.state.past(kit.engine.hide("it"))
        if found is not None and found.out == "committed":
            assert world.standing == ["a", "b", "c"], n
        else:
            assert world.standing == [], (n, world.log)
        assert not kit.engine.state.sagas
        kit.close()
        if not died:
            break
    assert deaths > 5 and not died, "it never died, or never stopped dying"


@pytest.mark.promise("1.11")
@pytest.mark.parametrize("after", [False, True], ids=["before-it-is-written", "after"])
@pytest.mark.parametrize("barriers", ["strict", "merged"])
def test_wherever_it_dies_a_rerun_finishes_with_one_effect_each(
    world: World, desk: Any, after: bool, barriers: str
) -> None:
    deaths = 0
    for n in range(1, 40):
        world.effects.clear()
        world.log.clear()
        kit = AgentKit.in_memory()
        options = {"barriers": barriers, "on_crash": "resume"}
        died = live_until_killed(kit, world, desk, n, after, False, **options)
        deaths += died
        with saga_scope("it", kit=kit, **options) as saga:
            body(saga, world, desk, barriers == "merged")
        assert [what for _, what in world.log] == ["a", "b", "c"], n
        assert fold(kit, saga.header_id).out == "committed"
        kit.close()
        if not died:
            break
    assert deaths > 5 and not died


@pytest.mark.promise("1.7")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_at_any_commit_leaves_nothing_that_nobody_looks_after(
    world: World, desk: Any, after: bool
) -> None:
    """Ctrl-C in the middle of writing: the scope unwinds, or lets go of what a daemon then finishes."""
    interrupts = 0
    for n in range(1, 40):
        world.effects.clear()
        world.undone.clear()
        world.log.clear()
        kit = AgentKit.in_memory()
        mortal = Mortal(kit, n, after)
        committed = False
        try:
            with saga_scope("it", kit=kit) as saga:
                body(saga, world, desk, False)
                if n % 2:
                    raise ValueError
            committed = True
        except (Death, SagaAborted):
            pass
        kit.log.commit = mortal.commit  # type: ignore[method-assign]
        interrupts += mortal.fired
        assert not kit.engine.runs and CURRENT.get() is None
        for root in list(kit.engine.state.roots()):
            assert root.driver == "" or not kit.engine.runs
            kit.log.commit(take(kit.engine, root.id, root.driver, "crash"))
            assert run(unwind.unwind(BLOCKING, kit.engine, root.id, kit.reach())).clean
        found = kit.engine.state.past(kit.engine.hide("it"))
        if committed or (found is not None and found.out == "committed"):
            assert world.standing == ["a", "b", "c"], n
        else:
            assert world.standing == [], (n, world.log)
        kit.close()
        if not mortal.fired and n % 2 == 0:
            break
    assert interrupts > 5


# ---- a cancellation at every suspension ------------------------------------------------------------------------------


@pytest.mark.promise("1.6")
@pytest.mark.promise("1.7")
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("place", ["memory", "file"])
def test_wherever_a_task_is_cancelled_all_of_it_stands_or_nothing(
    world: World, times: int, place: str, tmp_path: Path
) -> None:
    async def slow(what: str, idempotency_key: str) -> Any:
        await asyncio.sleep(0)
        made = world.act(what, idempotency_key)
        await asyncio.sleep(0)
        return made

    async def undo(what: str, idempotency_key: str) -> Compensation:
        await asyncio.sleep(0)
        return Compensation(world.acancel, {"of": idempotency_key})

    async def body(kit: AgentKit, name: str) -> str:
        options = {"undo": undo, "settle": 0.001}
        async with saga_scope(name, kit=kit) as saga:
            await saga.execute("hotel", slow, {"what": "a"}, semantics=COMPENSABLE, **options)
            await asyncio.gather(
                *(saga.execute("car", slow, {"what": what}, semantics=REVERSIBLE, **options) for what in "bc")
            )
            async with saga_scope() as inner:
                await inner.execute("taxi", slow, {"what": "d"}, semantics=COMPENSABLE, timeout=5, **options)
        return "through"

    async def cancelled_after(kit: AgentKit, turns: int) -> bool:
        name = f"it-{turns}"
        task = asyncio.create_task(body(kit, name))
        for _ in range(turns):
            await asyncio.sleep(0)
        through = task.done()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task])
        found = kit.engine.state.past(kit.engine.hide(name))
        out = found.out if found else ""
        assert world.standing == (["a", "b", "c", "d"] if out == "committed" else []), (turns, out, world.log)
        while kit.engine.state.sagas or kit.engine.runs:  # one that landed after the end is followed up on a thread
            assert not any(each.parent or each.phase != "unwinding" for each in list(kit.engine.state.sagas.values()))
            await asyncio.sleep(0.001)
        if not task.cancelled() and task.exception() is None:
            assert out == "committed"
        world.effects.clear()
        return through

    async def main() -> int:
        kit = AgentKit.in_memory() if place == "memory" else AgentKit(home=tmp_path / "home")
        with kit:
            for turns in range(400):
                if await cancelled_after(kit, turns):
                    return turns
        raise AssertionError("it never got through")

    assert asyncio.run(main()) > 10
