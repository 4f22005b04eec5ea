"""Names that sagas claim: one saga at a time works under a name, and it is free when that saga is over, not earlier."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import worlds
from kill_child import Here
from world import eventually, fold, killed, kinds

from amends import (
    COMPENSABLE,
    REVERSIBLE,
    AgentKit,
    Compensation,
    Refused,
    SagaAborted,
    TentativeStatus,
    compensator,
    saga_scope,
    tentative_status,
)
from amends.runtime import unwind
from amends.runtime.adopted import carry_over
from amends.runtime.daemon import sweep
from amends.runtime.facts import fact
from amends.runtime.gate.locks import lock_id
from amends.store.errors import BadValue, Illegal
from amends.store.home import Home
from amends.store.identity import adopt


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwind, "BACKOFF", 0.001)
    FAILING.clear()


FAILING: list[Exception] = []


@compensator("locks.undo")
def take_back(idempotency_key: str) -> None:
    if FAILING:
        raise FAILING.pop()


UNDO = Compensation(handler="locks.undo")


def work(made: Any, *locks: str, within: float = 0, **more: Any) -> None:
    """A step that needs these names, and is refused at once (or after `within` seconds) where another saga has one."""
    options = {"semantics": COMPENSABLE, "undo": UNDO} | more
    made.execute("work", lambda order="7": 1, {"order": "7"}, locks=locks, lock_timeout=within, **options)


def hashed(kit: AgentKit, name: str) -> str:
    """A name as it stands in headers."""
    return lock_id(name, kit.meter)


def held(kit: AgentKit) -> dict[str, str]:
    """Who holds what: the name in headers -> the saga."""
    return {name: one.saga for name, one in kit.engine.state.locks.held.items()}


def beside(body: Callable[[], Any]) -> Any:
    """What a body raises, or None, on a thread that is in no saga."""
    found: list[Any] = []

    def go() -> None:
        try:
            body()
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join(20)
    return found[0]


def other(kit: AgentKit, *locks: str) -> str:
    """The code with which another saga is refused these names; empty if it gets them."""

    def body() -> None:
        with saga_scope(kit=kit) as made:
            work(made, *locks)

    refused = beside(body)
    assert refused is None or isinstance(refused, SagaAborted)
    return "" if refused is None else str(refused.cause.code)  # type: ignore[attr-defined]


# ---- one at a time ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.6")
def test_a_name_is_claimed_with_the_intent_that_needs_it_and_by_one_saga_at_a_time(kit: AgentKit) -> None:
    with saga_scope("first", kit=kit) as made:
        work(made, "order:{order}")
        assert held(kit) == {hashed(kit, "order:7"): made.header_id}
        assert kinds(kit, made.header_id) == ["saga.opened", "lock.taken", "step.intended", "step.done"]
        assert other(kit, "order:7") in ("lock_held", "lock_timeout") and other(kit, "order:8") == ""
        work(made, "order:7")  # its own
        assert kinds(kit, made.header_id).count("lock.taken") == 1
    assert held(kit) == {} and other(kit, "order:7") == ""


@pytest.mark.promise("2.6")
def test_a_name_stands_in_the_log_as_its_hash(kit: AgentKit) -> None:
    with saga_scope(kit=kit) as made:
        work(made, "patient:jane.doe")
    lines = b"".join(record.line for record in kit.log.records())
    assert b"jane.doe" not in lines and hashed(kit, "patient:jane.doe").encode() in lines


@pytest.mark.promise("2.6")
def test_whoever_waits_for_a_name_gets_it_when_its_saga_is_over(kit: AgentKit) -> None:
    claimed, go = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        with saga_scope("first", kit=kit) as made:
            work(made, "a")
            claimed.set()
            assert go.wait(20)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert claimed.wait(20)
    threading.Timer(0.05, go.set).start()
    with saga_scope("second", kit=kit) as made:
        work(made, "a", within=20)
        order.append("second")
    thread.join()
    assert order == ["first", "second"]


@pytest.mark.promise("2.6")
def test_a_call_that_is_refused_a_name_has_taken_none_of_the_others_and_done_nothing(kit: AgentKit) -> None:
    ran: list[int] = []
    with saga_scope("first", kit=kit) as made:
        work(made, "b")

        def body() -> None:
            with saga_scope("second", kit=kit) as second:
                work(second, "a", "b", "c")
                ran.append(1)

        refused = beside(body)
        assert isinstance(refused, SagaAborted) and isinstance(refused.cause, Refused) and ran == []
        assert list(held(kit)) == [hashed(kit, "b")]


@pytest.mark.promise("2.6")
def test_a_reversible_step_without_a_barrier_claims_its_name_all_the_same(kit: AgentKit) -> None:
    with saga_scope(kit=kit) as made:
        work(made, "a", semantics=REVERSIBLE, undo=Compensation(lambda: None))
        assert held(kit) == {hashed(kit, "a"): made.header_id}
    assert held(kit) == {}


@pytest.mark.promise("2.6")
def test_a_name_that_means_nothing_is_refused_before_anything_happens(memory: AgentKit) -> None:
    with saga_scope(kit=memory) as made:
        for locks in ("order:7", [7], [""], ["order:{missing}"]):
            with pytest.raises(BadValue):
                made.execute("work", lambda: 1, {}, semantics=COMPENSABLE, undo=UNDO, locks=locks)
        with pytest.raises(BadValue, match="lock_timeout"):
            made.execute("work", lambda: 1, {}, semantics=COMPENSABLE, undo=UNDO, locks=["a"], lock_timeout=-1)
    assert memory.log.size <= 2


# ---- every way out ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.6")
def test_an_undone_saga_lets_go_of_its_names_with_its_end_and_not_before(kit: AgentKit) -> None:
    seen: list[bool] = []
    with pytest.raises(SagaAborted), saga_scope(kit=kit) as made:
        work(made, "a", undo=Compensation(lambda: seen.append(bool(held(kit)))))
        raise ValueError("no")
    assert seen == [True] and held(kit) == {}


@pytest.mark.promise("2.6")
def test_a_refused_and_a_cancelled_saga_let_go_as_well(kit: AgentKit) -> None:
    for stop in (Refused("no"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises((SagaAborted, type(stop))), saga_scope(kit=kit) as made:
            work(made, "a")
            raise stop
        assert held(kit) == {}


@pytest.mark.promise("1.13", "2.6")
@pytest.mark.parametrize("well", [True, False])
def test_an_inner_saga_s_names_are_the_outermost_one_s_until_that_is_over(kit: AgentKit, well: bool) -> None:
    try:
        with saga_scope("outer", kit=kit) as outer:
            with saga_scope("inner", kit=kit) as inner:
                work(inner, "a")
            assert held(kit) == {hashed(kit, "a"): outer.header_id} and other(kit, "a")
            work(outer, "a")
            with pytest.raises(SagaAborted), saga_scope("undone", kit=kit) as undone:
                work(undone, "b")
                raise ValueError("no")
            assert set(held(kit).values()) == {outer.header_id} and len(held(kit)) == 2
            if not well:
                raise ValueError("no")
    except SagaAborted:
        assert not well
    assert held(kit) == {}


@pytest.mark.promise("2.6")
def test_an_escalated_saga_keeps_its_names_until_it_is_settled(kit: AgentKit) -> None:
    FAILING[:] = [ValueError("no")] * 3
    with pytest.raises(SagaAborted), saga_scope("order", kit=kit) as made:
        work(made, "a")
        raise ValueError("no")
    assert held(kit) == {hashed(kit, "a"): made.header_id} and not fold(kit, made.header_id).driver
    assert other(kit, "a") and sweep(kit, Here()).recovered == []
    [item] = [item for item in kit.inbox() if item["kind"] == "compensation_failed"]
    kit.retry(item["id"], by="ada")
    assert held(kit) == {} and other(kit, "a") == ""


@pytest.mark.promise("2.6")
def test_a_person_sees_who_waits_for_what_an_escalated_saga_holds(kit: AgentKit) -> None:
    FAILING[:] = [ValueError("no")] * 3
    with pytest.raises(SagaAborted), saga_scope("order", kit=kit) as made:
        work(made, "a")
        raise ValueError("no")

    def waits() -> None:
        with saga_scope("waiter", kit=kit) as waiter:
            work(waiter, "a", within=20)

    thread = threading.Thread(target=waits)
    thread.start()
    eventually(lambda: kit.inbox()[0]["waiting"] == ["waiter"])
    [item] = kit.inbox()
    assert item["locks"] == [hashed(kit, "a")] and other(kit, "a") == "lock_held"
    assert kit.inbox()[0]["waiting"] == ["waiter"], "whoever would not wait is not in it"
    kit.retry(item["id"], by="ada")
    thread.join(20)
    assert held(kit) == {} and kit.engine.state.locks.waits == []


@pytest.mark.promise("2.6")
def test_nobody_is_told_of_who_has_stopped_waiting(kit: AgentKit) -> None:
    with saga_scope("first", kit=kit) as made:
        work(made, "a")

        def body() -> None:
            with saga_scope("second", kit=kit) as second:
                work(second, "a", within=0.05)

        refused = beside(body)
        assert isinstance(refused, SagaAborted) and refused.cause.code == "lock_timeout"  # type: ignore[attr-defined]
        assert kit.engine.state.locks.waits == []
        awaited = [r.entry.lock for r in kit.log.records() if r.entry.kind == "lock.awaited"]
        assert awaited == [hashed(kit, "a")], "it is told once"


@pytest.mark.promise("2.6")
def test_an_acceptance_settles_a_saga_and_frees_its_names(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted), saga_scope("order", kit=kit) as made:
        work(made, "a", undo=None)
        raise ValueError("no")
    assert held(kit) == {hashed(kit, "a"): made.header_id}
    [item] = [item for item in kit.inbox() if item["kind"] == "orphaned"]
    kit.accept(item["id"], by="ada", reason="seen to")
    assert held(kit) == {}


@pytest.mark.promise("2.6")
def test_a_saga_that_waits_to_be_resumed_keeps_its_names_and_has_them_when_it_is(tmp_path: Path) -> None:
    with AgentKit(home=tmp_path / "home") as dead:
        made = saga_scope("order", kit=dead, on_crash="resume").__enter__()
        work(made, "a")
        killed(dead)
    with AgentKit(home=tmp_path / "home") as kit:
        sweep(kit, Here())
        assert list(held(kit)) == [hashed(kit, "a")] and other(kit, "a")
        with saga_scope("order", kit=kit, on_crash="resume") as made:
            work(made, "a")
            work(made, "a", "b")
            assert set(held(kit).values()) == {made.header_id}
        assert held(kit) == {}


@pytest.mark.promise("2.6")
def test_a_dead_saga_s_name_stays_with_it_until_it_is_unwound(kit: AgentKit) -> None:
    work(saga_scope("order", kit=kit).__enter__(), "a")
    killed(kit)
    assert other(kit, "a")
    assert sweep(kit, Here()).recovered == ["order"]
    assert held(kit) == {} and other(kit, "a") == ""


@pytest.mark.promise("2.6")
def test_the_next_page_of_a_saga_has_its_names(kit: AgentKit) -> None:
    with saga_scope("page-1", kit=kit) as made:
        work(made, "a")
        first = made.header_id
        made.continue_as_new("page-2")
        assert held(kit) == {hashed(kit, "a"): made.header_id} and made.header_id != first and other(kit, "a")
    assert held(kit) == {}


@pytest.mark.promise("2.6")
def test_a_saga_may_let_go_of_its_own_names_early_and_of_no_others(kit: AgentKit) -> None:
    with saga_scope("first", kit=kit) as first:
        work(first, "a", "b")
        with saga_scope("inner", kit=kit) as inner:
            inner.unlock("a")
        assert set(held(kit)) == {hashed(kit, "b")} and other(kit, "a") == ""

        def body() -> None:
            with saga_scope("second", kit=kit) as second:
                work(second, "c")
                second.unlock("b")

        refused = beside(body)
        assert isinstance(refused, SagaAborted) and refused.cause.code == "not_held"  # type: ignore[attr-defined]
        with pytest.raises(Refused, match="does not hold"):
            first.unlock("a")

    async def later() -> None:
        async with saga_scope(kit=kit) as made:
            await made.execute("work", lambda: 1, {}, semantics=COMPENSABLE, undo=UNDO, locks=["a"])
            await made.unlock("a")
            assert held(kit) == {}

    asyncio.run(later())


@pytest.mark.promise("2.6")
def test_only_its_owner_frees_a_name(kit: AgentKit) -> None:
    with saga_scope("first", kit=kit) as first, saga_scope("inner", kit=kit) as inner:
        work(first, "a")
        work(inner, "b")
        name = hashed(kit, "a")
        theirs = fact("lock.freed", saga=inner.header_id, fence=1, lock=name)
        with pytest.raises(Illegal):
            kit.log.commit(lambda state, now: [theirs])
        twice = fact("lock.taken", saga=inner.header_id, fence=1, lock=name)
        with pytest.raises(Illegal):
            kit.log.commit(lambda state, now: [twice])
        stale = fact("lock.freed", saga=first.header_id, fence=2, lock=name)
        with pytest.raises(Illegal):
            kit.log.commit(lambda state, now: [stale])
        own = fact("lock.freed", saga=first.header_id, fence=1, lock=name)
        kit.log.commit(lambda state, now: [own])
        assert name not in held(kit)


@pytest.mark.promise("2.6")
def test_what_a_log_that_was_set_back_had_claimed_stays_with_what_it_left(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with AgentKit(home=home) as dead:
        made = saga_scope("order", kit=dead).__enter__()
        work(made, "a", "b")
        made.tentative("seat", cancel=UNDO)
        killed(dead)
    shutil.copytree(home, tmp_path / "older")
    with AgentKit(home=home) as kit, saga_scope("later", kit=kit) as later:
        work(later, "c")
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "older", home)
    adopt(Home(home), "ada", "restored from a backup")
    with AgentKit(home=home, warn=lambda text: None) as kit:
        with saga_scope("faster", kit=kit) as faster:
            work(faster, "b")
            [new] = carry_over(kit)
            assert held(kit) == {hashed(kit, "a"): new, hashed(kit, "b"): faster.header_id} and other(kit, "a")
        assert tentative_status(kit, "seat") is TentativeStatus.PENDING
        for item in kit.inbox():
            kit.retry(item["id"], by="ada")
        assert held(kit) == {} and tentative_status(kit, "seat") is TentativeStatus.ROLLED_BACK


@pytest.mark.promise("2.6")
def test_what_is_claimed_and_who_waits_outlives_a_memo(kit: AgentKit) -> None:
    with saga_scope(kit=kit) as made:
        work(made, "a")
        ahead = fact("lock.awaited", saga=made.header_id, fence=1, lock=hashed(kit, "b"))
        kit.log.commit(lambda state, now: [ahead])
        view = kit.engine.state.fresh()
        view.load(kit.engine.state.dump())
        assert view.dump() == kit.engine.state.dump() and view.locks.held == kit.engine.state.locks.held
        assert view.locks.awaiting(hashed(kit, "b")) == [made.header_id]


# ---- real processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path) -> Iterator[worlds.World]:
    made = worlds.World(tmp_path)
    yield made
    made.close()


CROSSED = """
import pathlib
def until(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.005)
from amends import SagaAborted
try:
    with saga_scope(id="{me}") as saga:
        buy(saga, "{me}-1", undo=declared(), locks=["{mine}"])
        pathlib.Path("{me}.has").touch()
        until("{them}.has")
        buy(saga, "{me}-2", undo=declared(), locks=["{theirs}"], lock_timeout={patience})
    print("done")
except SagaAborted as aborted:
    print(aborted.cause.code, aborted.report.clean)
"""


@pytest.mark.promise("2.6")
def test_two_processes_that_wait_for_each_other_end_by_their_timeouts(real: worlds.World) -> None:
    left = real.agent(CROSSED.format(me="left", them="right", mine="A", theirs="B", patience=1), name="left")
    right = real.agent(CROSSED.format(me="right", them="left", mine="B", theirs="A", patience=20), name="right")
    said = [child.communicate(timeout=worlds.PATIENCE_S)[0].strip() for child in (left, right)]
    assert said == ["lock_timeout True", "done"], "the impatient one is undone, and the other has its name then"
    assert sorted(real.standing()) == ["right-1", "right-2"] and real.refunded() == ["left-1"]
    entries = real.log()
    ended = next(e.seq for e in entries if e.kind == "saga.ended" and e.out == "compensated")
    taken = [e.seq for e in entries if e.kind == "lock.taken"]
    assert len(taken) == 3 and max(taken) > ended


@pytest.mark.promise("2.6")
def test_a_dead_process_s_name_is_free_once_recovery_has_undone_its_saga_and_not_by_any_timer(
    real: worlds.World,
) -> None:
    dead = real.agent(
        """
        with saga_scope(id="dead") as saga:
            buy(saga, "book", undo=declared(), locks=["A"])
            buy(saga, "ink", "then=hang", undo=declared(), settle=0.3)
        """,
        name="dead",
    )
    real.kill_at_open(dead)
    waits = """
    from amends import SagaAborted
    try:
        with saga_scope(id="{me}") as saga:
            buy(saga, "{me}", undo=declared(), locks=["A"], lock_timeout={patience})
        print("done")
    except SagaAborted as aborted:
        print(aborted.cause.code)
    """
    hasty = real.agent(waits.format(me="hasty", patience=0.5), name="hasty")
    assert hasty.communicate(timeout=worlds.PATIENCE_S)[0].strip() == "lock_timeout"
    patient = real.agent(waits.format(me="patient", patience=25), name="patient")
    real.until("it was opened", lambda: patient.poll() is None and len(real.log()) > 0)
    assert real.recover()[1]["recovered"] == ["dead"]
    assert patient.communicate(timeout=worlds.PATIENCE_S)[0].strip() == "done"
    entries = real.log()
    ended = next(e.seq for e in entries if e.kind == "saga.ended" and e.out == "compensated")
    assert [e.seq > ended for e in entries if e.kind == "lock.taken"] == [False, True]
    assert real.standing() == ["patient"] and sorted(real.refunded()) == ["book", "ink"]
