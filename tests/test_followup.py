"""Undoing a committed saga later: as a saga of its own, youngest first, under the keys it had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from world import World, fold

from amends import COMPENSABLE, IRREVERSIBLE, AgentKit, Compensation, Refused, SagaAborted, compensator, saga_scope
from amends.runtime import tools, unwind
from amends.runtime.followup import built_on, followups, resolve
from amends.runtime.gate.policy_file import Policy
from amends.runtime.gate.rules import PreFlightGate, Rule, Verdict, tool_is
from amends.store.errors import BadValue, NotFound


@pytest.fixture
def desk(world: World) -> Iterator[Any]:
    """An `undo=` whose handler has a name, so that it is found after its saga has ended."""
    compensator("desk.cancel")(world.cancel)
    yield lambda what, idempotency_key: Compensation(handler="desk.cancel", kwargs={"of": idempotency_key})
    tools._HANDLERS.pop("desk.cancel")


def trip(kit: AgentKit, world: World, desk: Any, *whats: str, id: str = "trip") -> Any:
    with saga_scope(id, kit=kit) as saga:
        for what in whats:
            saga.execute("hotel", world.book, {"what": what}, semantics=COMPENSABLE, undo=desk)
    return saga


@pytest.mark.promise("1.20")
def test_a_committed_saga_is_taken_back_youngest_first_by_a_saga_that_follows_it(
    kit: AgentKit, world: World, desk: Any
) -> None:
    saga = trip(kit, world, desk, "a", "b", "c")
    report = kit.undo("trip", by="ann", reason="wrong day")
    assert report.clean and world.undos == ["c", "b", "a"] and not world.effects
    assert fold(kit, saga.header_id).out == "committed", "what was, was"
    [later] = followups(kit, fold(kit, saga.header_id))
    opening = kit.log.thread(later.id)[0]
    assert later.out == "compensated" and b"ann" in (opening.blob or b"") and b"wrong day" in (opening.blob or b"")


@pytest.mark.promise("1.20")
def test_the_inverse_has_the_key_it_would_have_had(kit: AgentKit, world: World, desk: Any) -> None:
    saga = trip(kit, world, desk, "a")
    kit.undo("trip", by="ann", reason="wrong day")
    from amends.runtime.inverse import idempotency_key

    assert list(world.undone) == [idempotency_key(saga.header_id, "hotel", "1", "undo")]


@pytest.mark.promise("1.20")
def test_twice_is_once(kit: AgentKit, world: World, desk: Any) -> None:
    trip(kit, world, desk, "a")
    kit.undo("trip", by="ann", reason="wrong day")
    with pytest.raises(Refused) as refused:
        kit.undo("trip", by="ann", reason="wrong day")
    assert refused.value.code == "nothing_to_undo" and world.undos == ["a"]


@pytest.mark.promise("1.20")
def test_one_step_then_the_rest(kit: AgentKit, world: World, desk: Any) -> None:
    trip(kit, world, desk, "a", "b", "c")
    kit.undo("trip", by="ann", reason="one too many", step=2)
    assert world.standing == ["a", "c"]
    kit.undo("trip", by="ann", reason="all of it")
    assert world.undos == ["b", "c", "a"]


@pytest.mark.promise("1.20")
@pytest.mark.promise("1.13")
def test_the_sagas_inside_it_go_with_it_once(kit: AgentKit, world: World, desk: Any) -> None:
    with saga_scope("trip", kit=kit) as outer:
        outer.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=desk)
        with saga_scope() as inner:
            inner.execute("hotel", world.book, {"what": "b"}, semantics=COMPENSABLE, undo=desk)
            inner.execute("hotel", world.book, {"what": "c"}, semantics=COMPENSABLE, undo=desk)
        outer.execute("hotel", world.book, {"what": "d"}, semantics=COMPENSABLE, undo=desk)
    assert kit.undo("trip", by="ann", reason="wrong day").clean
    assert world.undos == ["d", "c", "b", "a"]
    with pytest.raises(Refused):
        kit.undo("trip", by="ann", reason="wrong day")
    assert len(world.undos) == 4


@pytest.mark.promise("1.20")
@pytest.mark.promise("4.7")
def test_a_dry_run_tells_what_would_be_undone_and_what_would_stand_and_changes_nothing(
    kit: AgentKit, world: World, desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saga_scope("trip", kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=desk)
        saga.execute("post", world.book, {"what": "b"}, semantics=COMPENSABLE)
        saga.execute("taxi", world.book, {"what": "c"}, semantics=COMPENSABLE, undo=Compensation.human("phone them"))
    kit.log.flush()
    size, calls = kit.log.size, world.calls
    report = kit.undo("trip", by="ann", reason="maybe", dry_run=True)
    kit.log.flush()
    assert {step.tool: step.state for step in report.steps}["hotel"] == "compensated"
    assert not report.clean and {step.tool for step in report.unresolved} == {"post", "taxi"}
    assert (kit.log.size, world.calls) == (size, calls) and world.standing == ["a", "b", "c"]


@pytest.mark.promise("1.20")
@pytest.mark.promise("4.3")
def test_what_has_no_inverse_stands_and_goes_to_a_person(kit: AgentKit, world: World, desk: Any) -> None:
    with saga_scope("trip", kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=desk)
        saga.execute("post", world.book, {"what": "b"}, semantics=COMPENSABLE)
    report = kit.undo("trip", by="ann", reason="wrong day")
    assert not report.clean and world.standing == ["b"]
    [item] = kit.inbox()
    with pytest.raises(Refused) as busy:
        kit.undo("trip", by="bob", reason="me too")
    assert busy.value.code in ("saga_busy", "nothing_to_undo")
    kit.accept(item["id"], by="ann", reason="it is posted")
    assert kit.inbox() == []


@pytest.mark.promise("1.20")
@pytest.mark.promise("4.3")
def test_a_handler_that_lived_in_its_process_only_is_not_guessed_at(kit: AgentKit, world: World) -> None:
    with saga_scope("trip", kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
    assert not kit.undo("trip", by="ann", reason="wrong day").clean and world.standing == ["a"]
    assert [item["kind"] for item in kit.inbox()] == ["closure"]


@pytest.mark.promise("1.20")
def test_an_undo_that_failed_is_retried_from_the_inbox(
    kit: AgentKit, world: World, desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwind, "BACKOFF", 0.001)
    trip(kit, world, desk, "a", "b")
    world.refuse = [ValueError("down")] * unwind.ATTEMPTS
    report = kit.undo("trip", by="ann", reason="wrong day")
    assert not report.clean and world.standing == ["a", "b"]
    [item] = kit.inbox()
    assert kit.retry(item["id"], by="ann").clean and world.undos == ["b", "a"]


@pytest.mark.promise("1.20")
def test_only_a_committed_saga_is_undone_later_and_by_a_named_person_with_a_reason(
    kit: AgentKit, world: World, desk: Any
) -> None:
    with pytest.raises(SagaAborted), saga_scope("bad", kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=desk)
        raise ValueError
    with pytest.raises(Refused) as refused:
        kit.undo("bad", by="ann", reason="x")
    assert refused.value.code == "not_committed"
    trip(kit, world, desk, "a")
    for by, reason in (("", "x"), ("ann", ""), (" ", "x"), ("ann", "  ")):
        with pytest.raises(BadValue):
            kit.undo("trip", by=by, reason=reason)
    with saga_scope("open", kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "z"}, semantics=COMPENSABLE, undo=desk)
        with pytest.raises(Refused):
            kit.undo("open", by="ann", reason="x")
    assert world.standing == ["a", "z"]


@pytest.mark.promise("1.20")
def test_a_saga_is_found_by_name_by_header_and_by_prefix(kit: AgentKit, world: World, desk: Any) -> None:
    saga = trip(kit, world, desk, "a", id="order-1234")
    trip(kit, world, desk, "b", id="order-1299")
    for name in ("order-1234", saga.header_id, saga.header_id[:8], "order-123"):
        assert resolve(kit, name).id == saga.header_id
    for name in ("order-12", "nope", "ord"):
        with pytest.raises(NotFound):
            resolve(kit, name)


@pytest.mark.promise("1.20")
def test_an_irreversible_step_is_never_taken_back_later(kit: AgentKit, world: World) -> None:
    kit.engine.policy = Policy(gate=PreFlightGate((Rule("mail", tool_is("mail.send"), Verdict.ALLOW),)))
    with saga_scope("mail", kit=kit) as saga:
        saga.execute("mail.send", world.book, {"what": "a"}, semantics=IRREVERSIBLE)
    assert not kit.undo("mail", by="ann", reason="x").clean and world.standing == ["a"]
    assert [item["kind"] for item in kit.inbox()] == ["irreversible"]


@pytest.mark.promise("1.20")
def test_of_two_who_undo_the_same_saga_at_once_one_is_told(tmp_path) -> None:
    """Both have looked before either has written; the plan of the second is refused inside the transaction."""
    calls: list[str] = []
    compensator("race.refund")(lambda: calls.append("refund"))
    with AgentKit(home=tmp_path / "home") as kit:
        with saga_scope("order", kit=kit) as saga:
            saga.execute("pay", lambda: "p", {}, semantics="compensable",
                         undo=Compensation(handler="race.refund"))  # fmt: skip
        kept = kit.log.commit
        planned: list[Any] = []

        def both_have_looked(decide: Any, sync: int = 2) -> Any:
            if not planned:  # the first commit of the first undo: the second one plans and runs now
                planned.append(decide)
                kit.undo("order", by="Bea", reason="second")
            return kept(decide, sync)

        kit.log.commit = both_have_looked
        with pytest.raises(Refused) as refused:
            kit.undo("order", by="Ada", reason="first")
        assert refused.value.code == "saga_busy" and planned
    assert calls == ["refund"]


@pytest.mark.promise("1.20")
def test_a_dry_run_names_the_steps_that_were_built_on_it_since(memory: AgentKit) -> None:
    with saga_scope("book", kit=memory) as saga:
        booked = saga.execute("hotel.book", lambda: {"id": "res-481516"}, semantics=COMPENSABLE)
    with saga_scope("mail", kit=memory) as saga:
        saga.execute("mail.send", lambda text: None, {"text": f"see you, {booked['id']}"}, semantics=COMPENSABLE)
        saga.execute("bill.pay", lambda reservation: None, {"reservation": booked["id"]}, semantics=COMPENSABLE)
        saga.execute("taxi.order", lambda to: None, {"to": "the sea"}, semantics=COMPENSABLE)
    assert built_on(memory, resolve(memory, "book")) == [("mail", 2, "bill.pay")]
    assert built_on(memory, resolve(memory, "mail")) == []


@pytest.mark.promise("1.20")
def test_a_dead_saga_that_waits_to_be_run_again_can_be_given_up(tmp_path) -> None:
    """Its agent has died; nobody wants to wait for `resume_within`."""
    compensator("give.up")(lambda: calls.append("undone"))
    calls: list[str] = []
    pid = os.fork()
    if not pid:
        kit = AgentKit(home=tmp_path / "home")
        saga = saga_scope("order", on_crash="resume", kit=kit).__enter__()
        saga.execute("pay", lambda: 1, {}, semantics=COMPENSABLE, undo=Compensation(handler="give.up"))
        os._exit(0)
    os.waitpid(pid, 0)
    with AgentKit(home=tmp_path / "home") as kit:
        planned = kit.undo("order", by="Ada", reason="not needed", dry_run=True)
        assert [step.state for step in planned.steps] == ["compensated"] and calls == []
        report = kit.undo("order", by="Ada", reason="not needed")
        assert report.clean and calls == ["undone"]
        assert kit.engine.state.past(kit.engine.hide("order")).out == "compensated"
