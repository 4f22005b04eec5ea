"""One queue for people: an irreversible step waits for a yes, what stands waits for a name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from world import World, eventually, fold, kinds

from amends import COMPENSABLE, IRREVERSIBLE, AgentKit, Compensation, Refused, SagaAborted, saga_scope
from amends.runtime import unwind
from amends.runtime.gate.rules import ApprovalPolicy, PreFlightGate
from amends.runtime.gate.switch import lift, set_switch
from amends.store.errors import BadValue, NotFound


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwind, "BACKOFF", 0.001)


def send(kit: AgentKit, world: World, what: str = "a", id: str = "mail") -> Any:
    with saga_scope(id, kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "room"}, semantics=COMPENSABLE, undo=world.undo)
        return saga.execute("mail.send", world.book, {"what": what}, semantics=IRREVERSIBLE)


def beside(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run it on a thread; its answer or its error."""
    answers: list[Any] = []

    def go() -> None:
        try:
            answers.append(work())
        except BaseException as error:
            answers.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    return thread, answers


def asked(kit: AgentKit) -> dict[str, Any]:
    eventually(lambda: [item for item in kit.inbox() if item["kind"] == "approval"])
    return kit.inbox()[0]


@pytest.mark.promise("1.1")
def test_an_irreversible_step_waits_and_happens_after_a_named_person_said_yes(kit: AgentKit, world: World) -> None:
    thread, answers = beside(lambda: send(kit, world))
    item = asked(kit)
    assert world.standing == ["room"] and item["tool"] == "mail.send" and item["saga"] == "mail"
    assert any(item["id"] in command and "approve" in command for command in item["commands"])
    with pytest.raises(BadValue):
        kit.approve(item["id"], by=" ")
    kit.approve(item["id"], by="ann", note="fine")
    thread.join(10)
    assert answers[0]["what"] == "a" and world.standing == ["a", "room"] and kit.inbox() == []
    blobs = b"".join(record.blob or b"" for record in kit.log.records() if record.entry.kind == "vote.cast")
    assert b'"ann"' in blobs and b'"fine"' in blobs


@pytest.mark.promise("1.1")
def test_a_no_keeps_it_from_happening_and_undoes_the_rest(kit: AgentKit, world: World) -> None:
    thread, answers = beside(lambda: send(kit, world))
    kit.deny(asked(kit)["id"], by="ann")
    thread.join(10)
    assert isinstance(answers[0], SagaAborted) and answers[0].cause.code == "denied"
    assert not world.effects and answers[0].report.clean and world.undos == ["room"]


@pytest.mark.promise("1.1")
def test_the_first_decision_wins(kit: AgentKit, world: World) -> None:
    thread, _ = beside(lambda: send(kit, world))
    item = asked(kit)
    kit.deny(item["id"], by="ann")
    with pytest.raises((Refused, NotFound)):
        kit.approve(item["id"], by="bob")
    thread.join(10)
    assert not world.effects


@pytest.mark.promise("1.1")
def test_a_question_on_a_loop_does_not_block_it_and_is_withdrawn_when_nobody_waits(kit: AgentKit, world: World) -> None:
    async def main() -> None:
        async def ask() -> None:
            async with saga_scope("mail", kit=kit) as saga:
                await saga.execute("mail.send", world.abook, {"what": "a"}, semantics=IRREVERSIBLE)

        task = asyncio.create_task(ask())
        while not kit.inbox():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as left:
            await task
        assert left.value.saga_report.clean

    asyncio.run(main())
    assert kit.inbox() == [] and world.calls == 0
    found = fold(kit, kit.engine.hide("mail"))
    assert found.steps[1].state == "refused"


@pytest.mark.promise("1.1")
def test_an_approval_on_a_loop_lets_it_happen(kit: AgentKit, world: World) -> None:
    async def main() -> Any:
        async def ask() -> Any:
            async with saga_scope("mail", kit=kit) as saga:
                return await saga.execute("mail.send", world.abook, {"what": "a"}, semantics=IRREVERSIBLE)

        task = asyncio.create_task(ask())
        while not kit.inbox():
            await asyncio.sleep(0.01)
        kit.approve(kit.inbox()[0]["id"][:4], by="ann")
        return await task

    assert asyncio.run(main())["what"] == "a"


def test_a_question_expires_in_lived_time(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(timeout=0.05)))
    with pytest.raises(SagaAborted) as aborted:
        send(kit, world)
    assert aborted.value.cause.code == "expired" and not world.effects and kit.inbox() == []


@pytest.mark.promise("1.6")
def test_what_was_approved_and_then_lost_stands_or_may_and_is_said(
    kit: AgentKit, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.lose = []

    def book(what: str) -> None:
        world.act(what, "k")
        raise ConnectionResetError

    def work() -> None:
        with saga_scope("mail", kit=kit) as saga:
            saga.execute("mail.send", book, {"what": "a"}, semantics=IRREVERSIBLE, settle=0.05)

    thread, answers = beside(work)
    kit.approve(asked(kit)["id"], by="ann")
    thread.join(10)
    report = answers[0].report
    assert not report.clean and [step.state for step in report.steps] == ["unknown"]
    [item] = kit.inbox()
    kit.accept(item["id"], by="ann", reason="the customer has it")
    found = fold(kit, kit.engine.hide("mail"))
    assert found.steps[1].state == "accepted" and found.out == "compensated" and kit.inbox() == []


def stuck(kit: AgentKit, world: World, **options: Any) -> Any:
    """A saga whose second step's inverse fails; the first waits behind it."""
    with pytest.raises(SagaAborted) as aborted, saga_scope("trip", kit=kit, **options) as saga:
        for what in "abc":
            saga.execute("hotel", world.book, {"what": what}, semantics=COMPENSABLE, undo=world.undo)
        world.refuse = [ValueError("down")] * unwind.ATTEMPTS
        raise ValueError
    return aborted.value.report


@pytest.mark.promise("4.3")
def test_accepting_what_stands_lets_what_waited_behind_it_be_undone(kit: AgentKit, world: World) -> None:
    stuck(kit, world)
    [item] = kit.inbox()
    for by, reason in (("", "x"), ("ann", ""), ("ann", " ")):
        with pytest.raises(BadValue):
            kit.accept(item["id"], by=by, reason=reason)
    kit.accept(item["id"], by="ann", reason="refunded by hand")
    assert world.undos == ["b", "a"] and world.standing == ["c"]
    found = fold(kit, kit.engine.hide("trip"))
    assert (found.out, found.steps[3].state) == ("compensated", "accepted")
    from amends import RollbackReport

    assert not RollbackReport([found]).clean, "it was accounted for, and it stands"


@pytest.mark.promise("4.3")
def test_retrying_one_thing_leaves_the_others_to_their_own_decision(kit: AgentKit, world: World) -> None:
    calls: dict[str, int] = {}

    def cancel(of: str) -> None:
        calls[of] = calls.get(of, 0) + 1
        if calls[of] == 1:
            raise ConnectionResetError

    with pytest.raises(SagaAborted), saga_scope("trip", kit=kit, on_compensation_failure="continue") as saga:
        for what in "ab":
            saga.execute("hotel", lambda what: what, {"what": what}, semantics=COMPENSABLE,
                         compensate=lambda result: Compensation(cancel, {"of": result}))  # fmt: skip
        raise ValueError
    assert calls == {"a": 1, "b": 1} and len(kit.inbox()) == 2
    first = next(item for item in kit.inbox() if item["step"] == 1)
    kit.retry(first["id"], by="ann")
    assert calls == {"a": 2, "b": 1} and [item["step"] for item in kit.inbox()] == [2]
    kit.retry(kit.inbox()[0]["id"], by="ann")
    assert calls == {"a": 2, "b": 2} and kit.inbox() == []


@pytest.mark.promise("1.14")
def test_retrying_what_a_probe_could_not_tell_asks_it_again(kit: AgentKit, world: World) -> None:
    from amends import CANNOT_TELL, PRESENT

    answers = [CANNOT_TELL, CANNOT_TELL, PRESENT]
    world.lose = [TimeoutError()]
    with pytest.raises(SagaAborted), saga_scope("trip", kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo,
                     probe=lambda what: answers.pop(0))  # fmt: skip
    [item] = kit.inbox()
    assert kit.retry(item["id"], by="ann").clean
    assert not answers and not world.effects


def test_the_wrong_verb_and_an_unknown_item_are_refused_in_words(kit: AgentKit, world: World) -> None:
    stuck(kit, world)
    [item] = kit.inbox()
    with pytest.raises(Refused) as wrong:
        kit.approve(item["id"], by="ann")
    assert wrong.value.code == "wrong_verb" and "accept" in wrong.value.next
    for name in ("zzzzzz", item["id"][:3]):
        with pytest.raises(NotFound):
            kit.accept(name, by="ann", reason="x")


def test_an_item_that_was_settled_is_gone(kit: AgentKit, world: World) -> None:
    stuck(kit, world)
    [item] = kit.inbox()
    kit.retry(item["id"], by="ann")
    assert not world.effects
    with pytest.raises(NotFound):
        kit.accept(item["id"], by="ann", reason="x")
    assert kinds(kit, kit.engine.hide("trip"))[-1] == "saga.ended"


def test_what_died_and_waits_to_be_resumed_is_listed(kit: AgentKit, world: World) -> None:
    from world import killed

    handle = saga_scope("trip", kit=kit, on_crash="resume").__enter__()
    handle.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
    kit.log.flush()
    killed(kit)
    if kit._driver is not None:  # the lock went with the process
        kit._driver.release()
        kit._driver = None
    kit._memory_driver = "another"
    assert [item["kind"] for item in kit.inbox()] == ["resume"]


@pytest.mark.promise("4.6")
def test_one_queue_has_everything_that_needs_a_person_and_what_settles_it(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2)))
    stuck(kit, world)
    thread, answers = beside(lambda: send(kit, world, "x", "first"))
    first = asked_of(kit, "first")
    kit.approve(first["id"], by="ann", break_glass=True, reason="urgent")
    thread.join(10)
    thread, more = beside(lambda: send(kit, world, "y", "second"))
    question = asked_of(kit, "second")
    kit.approve(question["id"], by="ann")
    frozen = saga_scope("frozen", kit=kit).__enter__()
    frozen.execute("hotel", world.book, {"what": "z"}, semantics=COMPENSABLE, undo=world.undo)
    set_switch(kit, "quarantine", "saga:frozen", by="ann", reason="odd")

    found = {item["kind"]: item for item in kit.inbox()}
    assert set(found) == {"compensation_failed", "approval", "review", "frozen"}
    assert [item["since"] for item in kit.inbox()] == sorted(item["since"] for item in kit.inbox())
    assert question["id"] == found["approval"]["id"], "an id stays the same, whatever becomes of the others"
    waiting = found["approval"]["approval"]
    assert (waiting["have"], waiting["need"], waiting["level"]) == (1, 2, "named") and 0 < waiting[
        "left_ms"
    ] <= 86_400_000
    for kind, command in (("approval", "amends approve"), ("review", "amends accept"), ("frozen", "amends resume"),
                          ("compensation_failed", "amends retry")):  # fmt: skip
        assert any(said.startswith(command) for said in found[kind]["commands"]), kind
        assert found[kind]["reason"].endswith(".") and found[kind]["saga"]
    assert kit.status()["waiting"] == 4
    kit.approve("second", by="bob")
    thread.join(10)
    assert more[0]["what"] == "y" and {item["kind"] for item in kit.inbox()} == set(found) - {"approval"}
    lift(kit, "saga:frozen", by="ann", reason="it is fine")
    kit.accept(found["review"]["id"], by="bob", reason="it was right")
    assert [item["kind"] for item in kit.inbox()] == ["compensation_failed"]
    for verb, item in ((kit.approve, question), (kit.deny, question)):
        with pytest.raises(Refused) as late:
            verb(item["id"], by="cid")
        assert "bob approved it already" in late.value.message
    with pytest.raises(Refused, match="bob accepted it already"):
        kit.accept(found["review"]["id"], by="cid", reason="x")


def asked_of(kit: AgentKit, saga: str) -> dict[str, Any]:
    def of() -> list[dict[str, Any]]:
        return [item for item in kit.inbox() if (item["kind"], item["saga"]) == ("approval", saga)]

    eventually(of)
    return of()[0]


@pytest.mark.promise("4.6")
def test_the_queue_has_what_is_wrong_with_the_keyring(kit: AgentKit) -> None:
    from approving import People

    from amends.runtime.gate import ceremonies

    people = People(kit)
    ceremonies.quarantine(kit, people.keys["Ann"].enrolled().id, "it counted back")
    [item] = kit.inbox()
    assert (item["kind"], item["saga"], item["step"]) == ("key_quarantined", "", 0) and item["commands"]
    with pytest.raises((Refused, NotFound)):
        kit.approve(item["id"], by="bob")
