"""A saga that a person has frozen stays as it stands, whoever leaves it, dies or recovers, until that is lifted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import worlds
from kill_child import Here
from world import fold, killed, kinds

from amends import COMPENSABLE, AgentKit, Compensation, Refused, SagaAborted, compensator, saga_scope, tentative_status
from amends.runtime import unwind
from amends.runtime.daemon import Swept, sweep
from amends.runtime.gate.switch import DRAIN, HALT, QUARANTINE, lift, set_switch
from amends.runtime.rehearsal import rehearse
from amends.runtime.scope import Unconfirmed
from amends.runtime.step import DONE
from amends.runtime.story import Stories
from amends.runtime.tentative import TentativeStatus

WORD = {"by": "ada", "reason": "a refund is disputed"}


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwind, "BACKOFF", 0.001)
    UNDONE.clear()
    THEN.clear()


UNDONE: list[str] = []
THEN: list[Any] = []  # what happens while a handler runs


@compensator("frozen.undo")
def take_back(what: str, idempotency_key: str) -> None:
    UNDONE.append(what)
    if THEN:
        THEN.pop()()


def undo(what: str) -> Compensation:
    return Compensation(handler="frozen.undo", kwargs={"what": what})


def book(made: Any, what: str, tool: str = "hotel.book", **more: Any) -> None:
    made.execute(tool, lambda: 1, semantics=COMPENSABLE, undo=undo(what), **more)


def abandoned(kit: AgentKit, name: str, *whats: str) -> str:
    """A saga of a process that died; its header id."""
    scope = saga_scope(name, kit=kit)
    made = scope.__enter__()
    for what in whats:
        book(made, what)
    kit.log.flush()
    killed(kit)
    return str(made.header_id)


def set_on(kit: AgentKit, mode: str, scope: str, **more: Any) -> None:
    set_switch(kit, mode, scope, **WORD, **more)


def swept(kit: AgentKit) -> Swept:
    """What `recoverd --once` does, with the handlers of this process."""
    return sweep(kit, Here())


# ---- a live saga -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.2")
def test_a_quarantined_saga_makes_no_step_and_is_not_undone_when_it_is_left(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted, match=r"frozen \(quarantined\)") as left, saga_scope("order", kit=kit) as made:
        book(made, "a")
        set_on(kit, QUARANTINE, "saga:order")
        book(made, "b")
    assert isinstance(left.value.cause, Refused) and left.value.cause.code == "quarantined"
    assert UNDONE == [] and not left.value.report.clean and left.value.report.frozen == "quarantined"
    assert left.value.report.outcome == "quarantined"
    told = kinds(kit, made.header_id)
    assert told[-1] == "saga.released" and not {"undo.intended", "saga.ended"} & set(told)

    story = Stories(kit).of(fold(kit, made.header_id))
    assert (story.outcome, story.clean, story.row()["frozen"]) == ("quarantined", False, "quarantined")
    assert kit.status()["frozen"] == [made.header_id]
    assert swept(kit).skipped == [{"saga": "order", "reason": "quarantined"}] and UNDONE == []
    assert rehearse(kit).skipped == [{"saga": "order", "reason": "quarantined"}]
    assert kinds(kit, made.header_id) == told, "nothing at all is written in it"

    lift(kit, "saga:order", **WORD)
    assert swept(kit).recovered == ["order"] and UNDONE == ["a"]
    assert kit.status()["frozen"] == [] and fold(kit, made.header_id).out == "compensated"
    assert "Refused" not in story.cause() and "quarantine" in story.cause().lower()


@pytest.mark.promise("2.2")
def test_a_quarantined_saga_that_is_left_well_is_neither_committed_nor_undone(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted) as left, saga_scope("order", kit=kit) as made:
        book(made, "a")
        set_on(kit, QUARANTINE, "saga:order")
    assert left.value.report.frozen == "quarantined" and UNDONE == []
    assert "saga.ended" not in kinds(kit, made.header_id)
    lift(kit, "saga:order", **WORD)
    assert swept(kit).recovered == ["order"] and UNDONE == ["a"], "its caller was told that it was aborted"


@pytest.mark.promise("2.2")
def test_a_saga_whose_quarantine_is_lifted_while_its_owner_lives_goes_on(kit: AgentKit) -> None:
    with saga_scope("order", kit=kit) as made:
        book(made, "a")
        set_on(kit, QUARANTINE, "saga:order")
        assert Stories(kit).of(fold(kit, made.header_id)).outcome == "quarantined"
        assert swept(kit).recovered == []
        lift(kit, "saga:order", **WORD)
        book(made, "b")
    assert fold(kit, made.header_id).out == "committed" and UNDONE == []


@pytest.mark.promise("2.2")
def test_a_saga_that_goes_on_as_another_may_not_slip_out_of_its_quarantine(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted), saga_scope("order", kit=kit) as made:
        book(made, "a")
        set_on(kit, QUARANTINE, "saga:order")
        made.continue_as_new("page-2")
    assert fold(kit, made.header_id).steps[1].state == DONE and UNDONE == []


@pytest.mark.promise("2.2")
@pytest.mark.parametrize("which", ["outer", "inner"])
def test_a_quarantine_of_one_saga_freezes_all_that_share_its_fate(kit: AgentKit, which: str) -> None:
    with pytest.raises(SagaAborted) as left, saga_scope("outer", kit=kit) as outer:
        book(outer, "a")
        with saga_scope("inner", kit=kit) as inner:
            book(inner, "b")
        set_on(kit, QUARANTINE, f"saga:{which}")
        raise ValueError("no")
    assert left.value.report.frozen == "quarantined" and UNDONE == []
    assert all(not saga.driver for saga in kit.engine.state.sagas.values())
    assert swept(kit).recovered == []
    lift(kit, f"saga:{which}", **WORD)
    assert swept(kit).recovered == ["outer"] and UNDONE == ["b", "a"]
    assert fold(kit, inner.header_id).out == fold(kit, outer.header_id).out == "compensated"


@pytest.mark.promise("2.2")
def test_no_step_is_made_by_any_saga_that_shares_the_fate_of_a_quarantined_one(kit: AgentKit) -> None:
    with saga_scope("outer", kit=kit) as outer:
        with saga_scope("inner", kit=kit) as inner:
            book(inner, "b")
        set_on(kit, QUARANTINE, "saga:inner")
        with pytest.raises(Refused) as refused:
            book(outer, "a")
        assert refused.value.code == "quarantined"
        with pytest.raises(SagaAborted) as left, saga_scope("third", kit=kit) as third:
            book(third, "c")
        assert isinstance(left.value.cause, Refused) and left.value.cause.code == "quarantined"
        lift(kit, "saga:inner", **WORD)
        book(outer, "a")
    assert UNDONE == [] and fold(kit, outer.header_id).out == "committed"


@pytest.mark.promise("2.2")
def test_an_inner_saga_that_fails_in_a_frozen_family_is_left_to_the_outer_one(kit: AgentKit) -> None:
    with saga_scope("outer", kit=kit) as outer:
        book(outer, "a")
        with pytest.raises(SagaAborted) as left, saga_scope("inner", kit=kit) as inner:
            book(inner, "b")
            set_on(kit, QUARANTINE, "saga:outer")
            raise ValueError("no")
        assert left.value.report.frozen == "quarantined" and UNDONE == []
        assert fold(kit, inner.header_id).driver, "the outer one holds it still"
        lift(kit, "saga:outer", **WORD)
        book(outer, "c")
    assert UNDONE == ["b"] and fold(kit, outer.header_id).out == "committed"
    assert fold(kit, inner.header_id).out == "compensated"


# ---- halts -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.2")
@pytest.mark.parametrize("scope", ["*", "tool:hotel.*", "tool:hotel.book", "tag:money", "saga:order"])
def test_a_halt_stops_new_effects_and_never_a_rollback(kit: AgentKit, scope: str) -> None:
    with pytest.raises(SagaAborted) as left, saga_scope("order", kit=kit) as made:
        book(made, "a", tags=("money",))
        set_on(kit, HALT, scope)
        book(made, "b", tags=("money",))
    assert isinstance(left.value.cause, Refused) and left.value.cause.code == "halted"
    assert UNDONE == ["a"] and left.value.report.clean and not left.value.report.frozen
    abandoned(kit, "dead", *())  # nothing happened in it
    assert kit.status()["frozen"] == []


@pytest.mark.promise("2.2")
def test_a_halt_leaves_recovery_running(kit: AgentKit) -> None:
    abandoned(kit, "dead", "a", "b")
    set_on(kit, HALT, "*")
    assert swept(kit).recovered == ["dead"] and UNDONE == ["b", "a"]


@pytest.mark.promise("2.2")
@pytest.mark.parametrize("scope", ["*", "tool:hotel.*", "tool:hotel.book", "tag:money", "saga:order"])
def test_a_halt_that_includes_compensations_has_the_sagas_under_it_wait_frozen_and_listed(
    kit: AgentKit, scope: str
) -> None:
    with pytest.raises(SagaAborted) as left, saga_scope("order", kit=kit) as made:
        book(made, "a", tags=("money",))
        book(made, "b", "plane.book")
        set_on(kit, HALT, scope, including_compensations=True)
        raise ValueError("no")
    assert left.value.report.frozen == "halted" and UNDONE == [] and not left.value.report.clean
    row = Stories(kit).of(fold(kit, made.header_id)).row()
    assert (row["outcome"], row["frozen"], row["standing"]) == ("interrupted", "halted", 2)
    assert swept(kit).skipped == [{"saga": "order", "reason": "frozen by a halt"}] and UNDONE == []
    lift(kit, scope, **WORD)
    assert swept(kit).recovered == ["order"] and UNDONE == ["b", "a"]


@pytest.mark.promise("2.2")
def test_a_halt_that_includes_compensations_leaves_what_it_does_not_cover_alone(kit: AgentKit) -> None:
    set_on(kit, HALT, "tool:stripe.*", including_compensations=True)
    set_on(kit, HALT, "tag:money", including_compensations=True)
    with pytest.raises(SagaAborted) as left, saga_scope("order", kit=kit) as made:
        book(made, "a")
        raise ValueError("no")
    assert left.value.report.clean and UNDONE == ["a"]


@pytest.mark.promise("2.2")
def test_a_dead_saga_is_taken_once_and_then_left_while_a_halt_covers_its_compensations(kit: AgentKit) -> None:
    header = abandoned(kit, "dead", "a")
    set_on(kit, HALT, "*", including_compensations=True)
    plan = rehearse(kit)
    assert [(deed.does, deed.why) for deed in plan.deeds] == [("freeze", "halted")] and "stay as it stands" in str(
        plan.lines()
    )
    assert swept(kit).skipped == [{"saga": "dead", "reason": "frozen by a halt"}]
    told = kinds(kit, header)
    assert told[-3:] == ["saga.taken", "saga.unwinding", "saga.released"]
    assert swept(kit).skipped == [{"saga": "dead", "reason": "frozen by a halt"}] and kinds(kit, header) == told
    lift(kit, "*", **WORD)
    assert swept(kit).recovered == ["dead"] and UNDONE == ["a"]


# ---- in the middle of an unwinding -----------------------------------------------------------------------------------


@pytest.mark.promise("2.2")
@pytest.mark.parametrize("mode", [QUARANTINE, HALT])
def test_an_unwinding_stops_between_two_compensations(kit: AgentKit, mode: str) -> None:
    THEN.append(lambda: set_on(kit, mode, "saga:order", including_compensations=True))
    with pytest.raises(SagaAborted) as left, saga_scope("order", kit=kit) as made:
        for what in "abc":
            book(made, what)
        raise ValueError("no")
    assert UNDONE == ["c"] and [step.state for step in left.value.report.steps] == ["done", "done", "compensated"]
    lift(kit, "saga:order", **WORD)
    assert swept(kit).recovered == ["order"] and UNDONE == ["c", "b", "a"]
    assert kinds(kit, made.header_id).count("undo.intended") == 3


@pytest.mark.promise("2.2")
def test_a_lever_is_asked_again_in_the_commit_that_announces_a_compensation(
    kit: AgentKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process sets it after the plan was made and before the announcement is written."""
    announced = unwind._announced

    def late(*args: Any) -> Any:
        if not kit.engine.state.switches.levers:
            set_on(kit, QUARANTINE, "saga:order")
        return announced(*args)

    monkeypatch.setattr(unwind, "_announced", late)
    with pytest.raises(SagaAborted) as left, saga_scope("order", kit=kit) as made:
        book(made, "a")
        raise ValueError("no")
    assert UNDONE == [] and left.value.report.frozen == "quarantined"
    assert "undo.intended" not in kinds(kit, made.header_id)


# ---- taking it over --------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.2")
def test_nobody_takes_a_quarantined_saga_over(tmp_path: Path) -> None:
    with AgentKit(home=tmp_path / "home") as dead:
        scope = saga_scope("order", kit=dead, on_crash="resume")
        book(scope.__enter__(), "a")
        killed(dead)
    with AgentKit(home=tmp_path / "home") as kit:
        _nobody_takes_it(kit)


def _nobody_takes_it(kit: AgentKit) -> None:
    set_on(kit, QUARANTINE, "saga:order")
    size = kit.log.size
    with pytest.raises(Refused) as refused, saga_scope("order", kit=kit, on_crash="resume"):
        raise AssertionError("it was resumed")
    assert refused.value.code == "quarantined" and "amends resume saga:" in refused.value.next
    with pytest.raises(Refused) as refused:
        kit.undo("order", by="ada", reason="give it up")
    assert refused.value.code == "quarantined"
    assert swept(kit).skipped == [{"saga": "order", "reason": "quarantined"}]
    assert kit.log.size == size and UNDONE == []
    lift(kit, "saga:order", **WORD)
    with saga_scope("order", kit=kit, on_crash="resume") as made:
        book(made, "a")
    assert fold(kit, made.header_id).out == "committed"


@pytest.mark.promise("2.2")
def test_a_person_s_retry_waits_for_the_lever_and_an_acceptance_is_kept(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted), saga_scope("order", kit=kit) as made:
        book(made, "a")
        made.execute("mail.send", lambda: 1, semantics=COMPENSABLE, undo=Compensation(handler="frozen.nobody"))
        raise ValueError("no")
    [item] = kit.inbox()
    set_on(kit, QUARANTINE, "saga:order")
    with pytest.raises(Refused) as refused:
        kit.retry(item["id"], by="ada")
    assert refused.value.code == "quarantined"
    kit.accept(item["id"], by="ada", reason="seen to")
    assert [left["kind"] for left in kit.inbox()] == ["frozen"] and UNDONE == []
    lift(kit, "saga:order", **WORD)
    assert swept(kit).recovered == ["order"] and UNDONE == ["a"]


# ---- what is tentative -----------------------------------------------------------------------------------------------


@pytest.mark.promise("2.2", "2.6")
def test_a_confirmation_is_a_new_effect_and_waits_for_a_halt_to_be_lifted(kit: AgentKit) -> None:
    with pytest.raises(Unconfirmed, match="it is frozen") as left, saga_scope("order", kit=kit) as made:
        book(made, "a")
        made.tentative("seat", confirm=undo("confirmed"), cancel=undo("cancelled"), lock=True)
        set_on(kit, HALT, "tool:tentative")
    assert left.value.report.frozen == "halted" and UNDONE == []
    assert tentative_status(kit, "seat") is TentativeStatus.PENDING and kit.engine.state.locks.held
    assert swept(kit).skipped == [{"saga": "order", "reason": "frozen by a halt"}]
    lift(kit, "tool:tentative", **WORD)
    assert swept(kit).recovered == ["order"] and UNDONE == ["confirmed"]
    assert fold(kit, made.header_id).out == "committed" and not kit.engine.state.locks.held


@pytest.mark.promise("2.2", "2.6")
def test_what_runs_may_be_confirmed_while_a_device_is_drained(kit: AgentKit) -> None:
    with saga_scope("order", kit=kit) as made:
        made.tentative("seat", confirm=undo("confirmed"))
        set_on(kit, DRAIN, "*")
    assert UNDONE == ["confirmed"]


@pytest.mark.promise("2.2", "2.6")
def test_a_quarantine_between_two_confirmations_leaves_the_rest_pending(kit: AgentKit) -> None:
    THEN.append(lambda: set_on(kit, QUARANTINE, "saga:order"))
    with pytest.raises(Unconfirmed), saga_scope("order", kit=kit) as made:
        made.tentative("a", confirm=undo("a"), cancel=undo("no a"))
        made.tentative("b", confirm=undo("b"), cancel=undo("no b"))
    assert UNDONE == ["a"] and tentative_status(kit, "b") is TentativeStatus.PENDING
    assert Stories(kit).of(fold(kit, made.header_id)).outcome == "quarantined"
    lift(kit, "saga:order", **WORD)
    assert swept(kit).recovered == ["order"] and UNDONE == ["a", "b"]


# ---- time ------------------------------------------------------------------------------------------------------------


class Clock:
    """Clocks that a test moves."""

    def __init__(self) -> None:
        self.ms = 1_764_460_800_000

    def wall_us(self) -> int:
        return self.ms * 1000

    def boot_ms(self) -> int:
        return self.ms - 1_764_460_000_000

    def boot_id(self) -> str:
        return "boot"


@pytest.mark.promise("2.2")
@pytest.mark.parametrize(("mode", "scope"), [(QUARANTINE, "saga:dead"), (HALT, "*")])
def test_a_lever_with_a_time_thaws_a_saga_when_that_has_passed(mode: str, scope: str) -> None:
    clock = Clock()
    kit = AgentKit.in_memory(clock=clock)
    abandoned(kit, "dead", "a")
    set_on(kit, mode, scope, seconds=60, including_compensations=True)
    clock.ms += 59_000
    assert swept(kit).recovered == [] and UNDONE == []
    clock.ms += 2_000
    assert swept(kit).recovered == ["dead"] and UNDONE == ["a"]
    kit.close()


# ---- real processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path) -> Iterator[worlds.World]:
    made = worlds.World(tmp_path)
    yield made
    made.close()


@pytest.fixture
def person(real: worlds.World, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentKit]:
    """Somebody who pulls levers, in a process of their own: this one."""
    monkeypatch.setenv("AMENDS_ANCHORS", real.env["AMENDS_ANCHORS"])
    with AgentKit(home=real.home, warn=lambda text: None) as kit:
        yield kit


@pytest.mark.promise("2.2")
def test_a_waiting_daemon_leaves_a_quarantined_saga_and_finishes_it_when_that_is_lifted(
    real: worlds.World, person: AgentKit
) -> None:
    agent = real.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "ink", "then=hang", undo=declared(), settle=0.3)
        """
    )
    other = real.agent(
        """
        with saga_scope(id="order-2") as saga:
            buy(saga, "pen")
            buy(saga, "cup", "then=hang", undo=declared(), settle=0.3)
        """,
        name="other",
    )
    real.until_open(2)
    person.log.refresh()
    set_on(person, QUARANTINE, "saga:order-1")
    real.daemon()
    worlds.kill(agent)
    worlds.kill(other)
    real.until("the other saga has ended", lambda: "saga.ended" in real.kinds())
    assert sorted(real.refunded()) == ["cup", "pen"] and sorted(real.standing()) == ["book", "ink"]
    person.log.refresh()
    story = Stories(person).of(person.engine.state.past(person.engine.hide("order-1")))
    assert story.outcome == "quarantined" and "saga.taken" not in kinds(person, person.engine.hide("order-1"))
    lift(person, "saga:order-1", **WORD)
    real.until("both have ended", lambda: real.kinds().count("saga.ended") == 2)
    assert real.standing() == [] and real.refunded()[2:] == ["ink", "book"] and real.one_effect_per_key()


@pytest.mark.promise("2.2")
def test_a_saga_of_another_living_process_is_frozen_and_goes_on_when_that_is_lifted(
    real: worlds.World, person: AgentKit
) -> None:
    agent = real.agent(
        """
        import pathlib
        from amends import Refused
        def until(name):
            while not pathlib.Path(name).exists():
                time.sleep(0.01)
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            until("frozen")
            try:
                buy(saga, "pen")
            except Refused as refused:
                pathlib.Path("refused").write_text(refused.code)
            until("lifted")
            buy(saga, "ink")
        """
    )
    real.until("the first charge", lambda: "step.done" in real.kinds())
    person.log.refresh()
    set_on(person, QUARANTINE, "saga:order-1")
    (real.folder / "frozen").touch()
    real.until("a refusal", lambda: (real.folder / "refused").exists() and (real.folder / "refused").read_text())
    assert (real.folder / "refused").read_text() == "quarantined"
    lift(person, "saga:order-1", **WORD)
    (real.folder / "lifted").touch()
    assert agent.wait(timeout=worlds.PATIENCE_S) == 0, agent.communicate()
    assert real.standing() == ["book", "ink"] and real.refunded() == []
