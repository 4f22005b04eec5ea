"""Try, confirm, cancel: what a saga holds provisionally has the saga's fate, each end once, whoever dies and when."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mortals import KILLED, Ledger, Mortals
from world import World, fold, killed, kinds

from amends import (
    COMPENSABLE,
    AgentKit,
    Compensation,
    Refused,
    SagaAborted,
    TentativeStatus,
    compensator,
    current_saga,
    model_outcome,
    saga,
    saga_scope,
    tentative,
    tentative_status,
)
from amends.runtime import unwind
from amends.runtime.daemon import sweep
from amends.runtime.openings import raw_fields
from amends.runtime.rehearsal import rehearse
from amends.runtime.saga import ENDED
from amends.runtime.scope import Unconfirmed
from amends.runtime.state import State
from amends.runtime.story import Stories
from amends.store.audit import verify
from amends.store.errors import BadValue, NotFound
from amends.store.identity import open_log

PENDING, COMMITTED, ROLLED_BACK = TentativeStatus.PENDING, TentativeStatus.COMMITTED, TentativeStatus.ROLLED_BACK


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwind, "BACKOFF", 0.001)
    CALLS.clear()
    FAILING.clear()


CALLS: list[tuple[str, str, str]] = []  # verb, what, idempotency key
FAILING: list[Exception] = []


@compensator("tentative.confirm")
def confirm_by_name(what: str, idempotency_key: str) -> None:
    if FAILING:
        raise FAILING.pop()
    CALLS.append(("confirm", what, idempotency_key))


@compensator("tentative.cancel")
def cancel_by_name(what: str, idempotency_key: str) -> None:
    if FAILING:
        raise FAILING.pop()
    CALLS.append(("cancel", what, idempotency_key))


@compensator("tentative.unkeyed")
def confirm_unkeyed(what: str) -> None:
    raise TimeoutError("no answer")


def ends(what: str) -> dict[str, Compensation]:
    """What confirms and what cancels it."""
    return {
        "confirm": Compensation(handler="tentative.confirm", kwargs={"what": what}),
        "cancel": Compensation(handler="tentative.cancel", kwargs={"what": what}),
    }


def called(verb: str) -> list[str]:
    return [what for word, what, _ in CALLS if word == verb]


# ---- both ends -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.6")
def test_what_is_tentative_is_pending_until_its_saga_ends_well_and_then_committed(kit: AgentKit) -> None:
    with saga_scope("order", kit=kit) as made:
        held = made.tentative("account:usr_123", **ends("a"), note="half")
        assert held.is_pending and not held.resolved and held.recoverable
        assert tentative_status(kit, "account:usr_123") is PENDING
        made.tentative("seat:14c", **ends("b"))
        assert CALLS == []
    assert [what for verb, what, _ in CALLS] == ["a", "b"] and called("cancel") == []
    assert held.status is COMMITTED and tentative_status(kit, "account:usr_123") is COMMITTED
    assert tentative_status(kit, "account:usr_124") is None
    assert held.metadata == {"note": "half"} and held.resource_id == "account:usr_123" and held.saga_id == "order"
    told = kinds(kit, made.header_id)
    assert told[-6:] == [
        "saga.concluding", "confirm.intended", "confirm.done", "confirm.intended", "confirm.done", "saga.ended",
    ]  # fmt: skip
    assert fold(kit, made.header_id).out == "committed"


@pytest.mark.promise("2.6")
def test_what_is_tentative_is_cancelled_in_its_place_when_its_saga_is_undone(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as left, saga_scope("order", kit=kit) as made:
        made.execute("hotel", world.book, {"what": "x"}, semantics=COMPENSABLE, undo=world.undo)
        held = made.tentative("seat:14c", **ends("a"))
        made.execute("hotel", world.book, {"what": "y"}, semantics=COMPENSABLE, undo=world.undo)
        raise ValueError("no")
    assert called("cancel") == ["a"] and called("confirm") == []
    assert held.status is ROLLED_BACK and left.value.report.clean and world.standing == []
    undone = [r.entry.step for r in kit.log.thread(made.header_id) if r.entry.kind == "undo.done"]
    assert undone == [3, 2, 1]


@pytest.mark.promise("2.6")
def test_each_end_has_a_key_of_its_own_and_the_same_for_every_attempt(kit: AgentKit) -> None:
    FAILING[:] = [ConnectionError("reset"), ConnectionError("reset")]
    with saga_scope("order", kit=kit) as made:
        made.tentative("seat:14c", **ends("a"))
    keys = [r.entry.key for r in kit.log.thread(made.header_id) if r.entry.kind == "confirm.intended"]
    assert len(keys) == 3 and len(set(keys)) == 1 and CALLS == [("confirm", "a", keys[0])]
    [intent] = [r for r in kit.log.thread(made.header_id) if r.entry.kind == "step.intended"]
    fields = {name: json.loads(raw) for name, raw in raw_fields(intent.blob).items()}
    assert fields["confirmation"]["key"] == keys[0] and fields["compensation"]["key"] not in ("", keys[0])


@pytest.mark.promise("2.6")
def test_the_words_of_other_libraries_are_understood(memory: AgentKit) -> None:
    done: list[str] = []
    with saga_scope(kit=memory) as made:
        first = tentative(made, "account:usr_123", on_commit=lambda: done.append("yes"), lock=True, amount=5)
        second = tentative(made, "b", rollback_handler="tentative.cancel", rollback_kwargs={"what": "b"})
        assert not first.recoverable and second.recoverable and memory.engine.state.locks.held
        with pytest.raises(BadValue, match="both cancel it"):
            tentative(made, "c", on_rollback=lambda: None, rollback_handler="tentative.cancel")
        with pytest.raises(BadValue, match="a Compensation or a function"):
            tentative(made, "c", on_commit="tentative.confirm")  # type: ignore[arg-type]
        with pytest.raises(BadValue, match="1 to 1024 characters"):
            tentative(made, "")
    assert done == ["yes"] and first.status is second.status is COMMITTED and not memory.engine.state.locks.held


@pytest.mark.promise("2.6")
def test_where_nothing_has_to_run_only_the_status_changes(kit: AgentKit) -> None:
    with saga_scope(kit=kit) as made:
        held = made.tentative("a")
    assert held.status is COMMITTED and "confirm.intended" not in kinds(kit, made.header_id)
    with pytest.raises(SagaAborted) as left, saga_scope(kit=kit) as made:
        held = made.tentative("a")
        raise ValueError("no")
    assert held.status is ROLLED_BACK and left.value.report.clean
    assert "undo.intended" not in kinds(kit, made.header_id)


@pytest.mark.promise("2.6")
def test_a_resource_that_is_marked_twice_in_a_saga_is_marked_once(memory: AgentKit) -> None:
    with saga_scope(kit=memory) as made:
        made.tentative("a", **ends("a"))
        made.tentative("a", **ends("a"))
        with pytest.raises(BadValue, match="other arguments before"):
            made.tentative("a", **ends("a"), amount=5)
    assert called("confirm") == ["a"]


# ---- async -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.6")
def test_an_async_saga_awaits_it_and_one_that_does_not_aborts(memory: AgentKit) -> None:
    done: list[str] = []

    async def confirmed() -> None:
        await asyncio.sleep(0)
        done.append("confirmed")

    async def body(wait: bool) -> Any:
        async with saga_scope(kit=memory) as made:
            held = made.tentative("a", confirm=confirmed, lock=True)
            with pytest.raises(NotFound, match="not marked yet"):
                print(held.status)
            if wait:
                assert await held is held and held.is_pending and (await held).is_pending
        return held

    assert asyncio.run(body(True)).status is COMMITTED and done == ["confirmed"]
    with pytest.raises(SagaAborted, match="was not awaited"):
        asyncio.run(body(False))
    assert done == ["confirmed"] and not memory.engine.state.locks.held


# ---- nested, continued, resumed --------------------------------------------------------------------------------------


@pytest.mark.promise("1.13", "2.6")
@pytest.mark.parametrize("well", [True, False])
def test_an_inner_saga_s_resources_are_resolved_with_the_outermost_one(memory: AgentKit, well: bool) -> None:
    with pytest.raises(SagaAborted) if not well else saga_scope(kit=memory), saga_scope("outer", kit=memory) as outer:
        with saga_scope("inner", kit=memory) as inner:
            held = inner.tentative("a", **ends("a"))
        assert held.is_pending and CALLS == []
        outer.tentative("b", **ends("b"))
        if not well:
            raise ValueError("no")
    assert held.status is (COMMITTED if well else ROLLED_BACK)
    assert called("confirm") == (["a", "b"] if well else []) and called("cancel") == ([] if well else ["b", "a"])
    assert fold(memory, inner.header_id).out == ("committed" if well else "compensated")


@pytest.mark.promise("1.13", "2.6")
def test_a_saga_that_goes_on_as_another_takes_what_is_tentative_along(kit: AgentKit) -> None:
    done: list[str] = []
    with saga_scope("first", kit=kit) as made:
        held = made.tentative("a", **ends("a"), lock=True)
        other = made.tentative("b", confirm=lambda: done.append("b"))
        made.continue_as_new("second")
        assert held.is_pending and tentative_status(kit, "a") is PENDING and CALLS == []
        assert [one.saga for one in kit.engine.state.locks.held.values()] == [made.header_id]
    assert called("confirm") == ["a"] and done == ["b"]
    assert held.status is other.status is COMMITTED and not kit.engine.state.locks.held


@pytest.mark.promise("1.11", "2.6")
def test_a_resumed_saga_marks_nothing_twice_and_confirms_what_it_marked_before(tmp_path: Path) -> None:
    with AgentKit(home=tmp_path / "home") as kit:
        scope = saga_scope("order", kit=kit, on_crash="resume")
        before = scope.__enter__().tentative("a", confirm=lambda: CALLS.append(("lost", "a", "")), lock=True)
        assert before.is_pending
        kit.log.flush()
        killed(kit)
    with AgentKit(home=tmp_path / "home") as kit:
        with saga_scope("order", kit=kit, on_crash="resume") as made:
            again = made.tentative("a", confirm=lambda: CALLS.append(("confirm", "a", "")), lock=True)
            assert again.is_pending
        told = kinds(kit, made.header_id)
        assert told.count("step.intended") == 1 and told.count("lock.taken") == 1
        assert CALLS == [("confirm", "a", "")] and again.status is COMMITTED


@pytest.mark.promise("1.11", "2.6")
def test_a_saga_function_returns_its_result_though_it_was_confirmed_later(tmp_path: Path) -> None:
    runs: list[int] = []

    def body(kit: AgentKit) -> int:
        @saga(id="order", kit=kit)
        def order() -> int:
            runs.append(1)
            tentative(current_saga(), "a", on_commit=Compensation(handler="tentative.confirm", kwargs={"what": "a"}))
            return 42

        result: int = order()
        return result

    with AgentKit(home=tmp_path / "home") as kit:
        FAILING[:] = [ValueError("no")] * 3
        with pytest.raises(Unconfirmed):
            body(kit)
        with pytest.raises(Refused, match="being confirmed"):
            body(kit)
        kit.retry(kit.inbox()[0]["id"], by="ada")
        assert body(kit) == 42 and runs == [1] and called("confirm") == ["a"]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.6")
def test_a_confirmation_that_fails_goes_to_a_person_and_is_never_rolled_back(kit: AgentKit, world: World) -> None:
    FAILING[:] = [ValueError("declined")] * 3
    with pytest.raises(Unconfirmed, match="needs a person") as left, saga_scope("order", kit=kit) as made:
        made.execute("hotel", world.book, {"what": "x"}, semantics=COMPENSABLE, undo=world.undo)
        made.tentative("a", **ends("a"), lock=True)
        made.tentative("b", **ends("b"))
    assert called("confirm") == ["b"], "one that fails holds up no other"
    assert world.standing == ["x"] and called("cancel") == []
    assert tentative_status(kit, "a") is PENDING and tentative_status(kit, "b") is COMMITTED
    report = left.value.report
    assert not report.clean and report.outcome == "escalated" and report.halted
    assert model_outcome(left.value).outcome == "pending_human"
    [item] = kit.inbox()
    assert (item["kind"], item["saga"], item["step"], item["behind"]) == ("confirm_failed", "order", 2, [])
    assert [one.saga for one in kit.engine.state.locks.held.values()] == [made.header_id], "it keeps its name till then"
    story = Stories(kit).of(fold(kit, made.header_id))
    assert (story.outcome, story.clean, [one.step.number for one in story.standing]) == ("escalated", False, [2])
    assert sweep(kit).escalated == [{"saga": "order", "step": 2, "reason": "confirm_failed"}]

    assert kit.retry(item["id"], by="ada").clean
    assert called("confirm") == ["b", "a"] and tentative_status(kit, "a") is COMMITTED
    assert kit.inbox() == [] and not kit.engine.state.locks.held
    document = Stories(kit).of(fold(kit, made.header_id)).document()
    assert (document["outcome"], document["clean"]) == ("committed", True)
    told = document["steps"][1]
    assert (told["state"], told["tentative"]) == ("done", "COMMITTED")
    assert (told["confirmation"]["state"], told["confirmation"]["attempts"]) == ("done", 4)
    assert told["compensation"]["state"] == "not_needed"


@pytest.mark.promise("2.6")
def test_a_person_may_account_for_what_could_not_be_confirmed(kit: AgentKit) -> None:
    with pytest.raises(Unconfirmed), saga_scope("order", kit=kit) as made:
        made.tentative("a", confirm=Compensation.human("post the letter"), **{"cancel": ends("a")["cancel"]})
    [item] = kit.inbox()
    assert item["kind"] == "confirm_by_hand"
    kit.accept(item["id"], by="ada", reason="posted")
    assert tentative_status(kit, "a") is TentativeStatus.ACCEPTED
    assert fold(kit, made.header_id).out == "committed" and called("cancel") == []


@pytest.mark.promise("2.6")
def test_a_lost_answer_is_asked_for_again_only_under_a_key(kit: AgentKit) -> None:
    with pytest.raises(Unconfirmed), saga_scope("order", kit=kit) as made:
        made.tentative("a", confirm=Compensation(handler="tentative.unkeyed", kwargs={"what": "a"}))
    told = kinds(kit, made.header_id)
    assert told.count("confirm.intended") == 1 and told[-2:] == ["saga.escalated", "saga.released"]
    assert [item["kind"] for item in kit.inbox()] == ["confirm_answer_lost"]


@pytest.mark.promise("2.6")
def test_undoing_a_committed_saga_later_says_that_what_was_confirmed_stands(kit: AgentKit) -> None:
    with saga_scope("order", kit=kit) as made:
        made.execute("hotel", lambda: 1, semantics=COMPENSABLE, undo=ends("x")["cancel"])
        made.tentative("a", **ends("a"))
        made.tentative("b")
    report = kit.undo("order", by="ada", reason="changed her mind")
    assert called("cancel") == ["x"] and not report.clean
    assert [step.tool for step in report.orphaned] == ["tentative"]
    assert tentative_status(kit, "a") is COMMITTED


@pytest.mark.promise("2.6")
def test_a_refused_mark_holds_nothing(kit: AgentKit) -> None:
    with saga_scope("first", kit=kit) as first:
        first.tentative("a", lock=True)
        outcome: list[BaseException] = []

        def other() -> None:
            try:
                with saga_scope("second", kit=kit) as second:
                    second.tentative("a", **ends("a"), lock=True, lock_timeout=0)
            except SagaAborted as aborted:
                outcome.append(aborted)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    [aborted] = outcome
    assert isinstance(aborted, SagaAborted) and isinstance(aborted.cause, Refused) and CALLS == []
    assert tentative_status(kit, "a") is COMMITTED, "the refused one is none"


# ---- the fold itself -------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.6")
def test_nothing_is_undone_after_the_decision_to_stand_nor_confirmed_before_it(kit: AgentKit) -> None:
    from amends.runtime.facts import fact
    from amends.store.errors import Illegal

    FAILING[:] = [ValueError("no")] * 3
    with pytest.raises(Unconfirmed), saga_scope("order", kit=kit) as made:
        made.execute("hotel", lambda: 1, semantics=COMPENSABLE, undo=ends("x")["cancel"])
        made.tentative("a", **ends("a"))
        early = fact("confirm.intended", saga=made.header_id, fence=1, step=2)
        with pytest.raises(Illegal):
            kit.log.commit(lambda state, now: [early])
    for kind, more in (("undo.intended", {"step": 1}), ("undo.intended", {"step": 2}), ("saga.unwinding", {}),
                       ("undo.done", {"step": 2, "out": "nothing"}), ("step.intended", {"step": 3})):  # fmt: skip
        late = fact(kind, saga=made.header_id, fence=1, **more)
        with pytest.raises(Illegal):
            kit.log.commit(lambda state, now, late=late: [late])


# ---- a death at every point ------------------------------------------------------------------------------------------


class Deaths:
    """Sagas with tentative resources that die in one home, recoveries that die over them, and what is asked then."""

    def __init__(self, home: Path, ledger: Ledger, mortals: Mortals, seed: int) -> None:
        self.home, self.ledger, self.mortals = str(home), ledger, mortals
        self.random = random.Random(seed)
        self.sagas: dict[str, dict[str, Any]] = {}

    def agents(self, resources: int, commits: bool, every: int) -> None:
        script = {"resources": resources, "commits": commits}
        verb = "confirm" if commits else "cancel"
        for i in range(resources):
            for when in ("before", "sent", "answered"):
                self._agent(script, {"call": f"{verb} r{i + 1}", "when": when})
        n = 1 + self.random.randrange(every)
        while self._agent(script, {"commit": n, "when": self.random.choice(("before", "after"))}) == KILLED:
            n += every

    def _agent(self, script: dict[str, Any], kill: dict[str, Any]) -> int:
        name = f"{os.path.basename(self.home)}-{len(self.sagas)}"
        self.sagas[name] = script
        return self.mortals.run(role="holder", home=self.home, url=self.ledger.url, saga=name, kill=kill, **script)

    def recover(self, most: int) -> None:
        for n in range(most):
            pick = self.random.choice
            sure = n < 3  # its first commit comes whatever is left to do
            kill: dict[str, Any] = {
                "commit": 1 if sure else self.random.randint(1, 7),
                "when": pick(("before", "after")),
            }
            if not sure and self.random.random() < 0.5:
                kill = {"call": f"{pick(('confirm', 'cancel'))} r{pick((1, 2))}", "when": pick(("before", "answered"))}
            if self.mortals.run(role="recover", home=self.home, kill=kill) != KILLED:
                break
        assert self.mortals.run(role="recover", home=self.home, kill={}) == 0

    def judge(self) -> Counter[str]:
        """How many sagas ended which way. Every effect is asked of the ledger, not of the log."""
        log = open_log(self.home, State(), write=False)
        try:
            return self._judge(log)
        finally:
            log.close()
            assert verify(self.home, view_factory=State).exit == 0

    def _judge(self, log: Any) -> Counter[str]:
        effects, attempts = self.ledger.told("effects"), self.ledger.told("attempts")
        ways: Counter[str] = Counter()
        for name, script in self.sagas.items():
            told = [record.entry for record in log.thread(log.identity.hide(name))]
            if not told:
                continue
            found = log.view.past(log.identity.hide(name))
            decided = any(entry.kind == "saga.concluding" for entry in told)
            assert found.phase == ENDED and found.out == ("committed" if decided else "compensated"), (name, script)
            ways["died before the decision" if script["commits"] and not decided else found.out] += 1
            marked = [step for step in found.steps.values() if step.resource]
            assert not decided or len(marked) == script["resources"]
            for step in marked:
                mine = [e["kind"] for e in effects if e["body"] == {"saga": name, "of": f"r{step.number}"}]
                assert mine == ["confirm" if decided else "cancel"], (name, step.number, mine)
                intents = [e for e in told if e.step == step.number and e.kind in ("confirm.intended", "undo.intended")]
                tried = [a for a in attempts if a["body"] == {"saga": name, "of": f"r{step.number}"}]
                assert len(tried) <= len(intents) and len({e.key for e in intents}) == 1
        assert log.view.locks.held == {}, "a saga that has ended holds no name"
        assert log.view.sagas == {}
        return ways


@pytest.mark.promise("2.6")
@pytest.mark.slow
def test_no_kill_anywhere_leaves_a_resource_pending_or_resolved_twice(
    tmp_path: Path, ledger: Ledger, mortals: Mortals
) -> None:
    deaths = Deaths(tmp_path / "home", ledger, mortals, seed := random.randrange(1 << 32))
    print("seed", seed)
    deaths.agents(2, commits=True, every=1)
    deaths.agents(2, commits=False, every=1)
    deaths.agents(1, commits=True, every=1)
    deaths.recover(most=20)
    ways = deaths.judge()
    assert ways["committed"] >= 10 and ways["compensated"] >= 10 and ways["died before the decision"] >= 1, ways
    for moment in ("before commit", "after commit", "before confirm", "sent confirm", "answered confirm",
                   "before cancel", "sent cancel", "answered cancel"):  # fmt: skip
        assert mortals.kills[f"holder: {moment}"] >= 1, mortals.kills
    assert sum(count for what, count in mortals.kills.items() if what.startswith("recover")) >= 3, mortals.kills


@pytest.mark.promise("2.6", "4.7")
def test_a_dry_run_tells_what_recovery_would_confirm(tmp_path: Path, ledger: Ledger, mortals: Mortals) -> None:
    deaths = Deaths(tmp_path / "home", ledger, mortals, seed=0)
    assert deaths._agent({"resources": 2, "commits": True}, {"call": "confirm r1", "when": "answered"}) == KILLED
    with AgentKit(home=deaths.home) as kit:
        size = kit.log.size
        plan = rehearse(kit)
        assert [(deed.does, deed.step) for deed in plan.deeds] == [("confirm", 1), ("confirm", 2), ("end", 0)]
        assert "once more, under the same key" in plan.lines()[0] and "would be committed" in plan.lines()[2]
        assert json.loads(json.dumps(plan.to_json()))["recovered"] == ["home-0"] and kit.log.size == size
    deaths.recover(most=0)
    assert deaths.judge() == {"committed": 1}
