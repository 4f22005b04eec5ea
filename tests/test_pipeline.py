"""The order of the gate: whoever objects first is heard alone; a refused call has taken nothing and woken nobody."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from approving import Asking, Facts
from simulation import Clock
from world import World, eventually

from amends import (
    COMPENSABLE,
    IRREVERSIBLE,
    REVERSIBLE,
    AgentKit,
    Compensation,
    KillSwitch,
    Refused,
    SagaAborted,
    saga_scope,
)
from amends.runtime import admission
from amends.runtime.facts import fact
from amends.runtime.gate.breaker import BreakerPolicy
from amends.runtime.gate.limits import BudgetLimit, RateLimit
from amends.runtime.gate.pipeline import CHECKS, EACH_ATTEMPT, judge
from amends.runtime.gate.question import ALLOW, ASK, REFUSE, Debit, Question, Refusal, Ruling
from amends.runtime.gate.rules import PreFlightGate, Rule, Verdict, arg_exceeds, tool_is
from amends.runtime.state import State
from amends.store.clock import Now

WINDOW = 3600
BREAKER = BreakerPolicy(failure_threshold=1, cool_down=600.0)


class Gate:
    """A kit in which every part of the gate has a say in one call: a limit that it fits, a rule by which people are
    asked, a name that is free. Each objection is raised by what it reads; `call` is what tries to pass."""

    def __init__(self, world: World) -> None:
        self.world, self.clock = world, Clock()
        rules = (
            Rule("never", arg_exceeds("fee", 0), Verdict.BLOCK, "no fees"),
            Rule("look", tool_is("bank.wire"), Verdict.REQUIRE_APPROVAL, "wires are looked at"),
        )
        self.kit = AgentKit.in_memory(clock=self.clock, gate=PreFlightGate(rules, breaker=BREAKER, limits=(
            BudgetLimit("day", max_total=100, window=WINDOW), RateLimit("rate", max_calls=5, window=WINDOW),
            BudgetLimit("tips", arg="tip", max_total=1, window=WINDOW),
        )))  # fmt: skip
        self.kwargs = {"amount": 10, "fee": 0}
        self.kit.engine.needs_people = lambda: self.woken.append("somebody")
        self.woken: list[str] = []
        self._other("stands by")

    def _other(self, name: str, *facts: Any) -> None:
        opened = fact("saga.opened", fence=1, driver="d" * 26, up=True)
        for draft in (opened, *facts):
            draft.fields.update(saga=name.replace(" ", "-").ljust(26, "x"), fence=1)
        self.kit.log.commit(lambda state, now: (opened, *facts))

    def switch(self) -> None:
        KillSwitch(self.kit).halt("tool:bank.*", by="Ann", reason="it looks odd")

    def breaker(self) -> None:
        begun = fact("step.intended", step=1, tool="bank.wire", sem="compensable", up=True)
        self._other("it fails", begun, fact("step.failed", step=1, why="ValueError", up=True))

    def limits(self) -> None:
        self.kwargs["tip"] = 2

    def rules(self) -> None:
        self.kwargs["fee"] = 1

    def locks(self) -> None:
        name = self.kit.engine.meter("lock\0account:7")
        self._other("it works", fact("lock.taken", lock=name, up=True))

    def approvals(self) -> None:
        self.clock.set_us -= 3600 * 10**6

    def call(self) -> str:
        """The code of what was said to the call; "" if it went through."""

        def send(amount: int, fee: int, tip: int = 0) -> Any:
            return self.world.act("wire", "k")

        with pytest.raises(SagaAborted) as aborted, saga_scope("pay", kit=self.kit) as saga:
            self.saga = saga.header_id
            saga.execute(
                "bank.wire", send, self.kwargs, semantics=IRREVERSIBLE, locks=("account:7", "account:8"), lock_timeout=0
            )
        cause = aborted.value.cause
        assert isinstance(cause, Refused) and cause.next, "it says what would do"
        return cause.code


SAYS = {
    "switch": "halted", "breaker": "breaker_open", "limits": "over_limit", "rules": "blocked", "locks": "lock_held",
    "approvals": "clock_went_back",
}  # fmt: skip


@pytest.mark.promise("2.1")
@pytest.mark.parametrize(
    "objections", [(name,) for name in SAYS] + list(combinations(SAYS, 2)) + [tuple(SAYS)], ids=" ".join
)
def test_of_two_objections_the_earlier_is_what_is_said_and_nothing_is_taken(
    world: World, objections: tuple[str, ...]
) -> None:
    gate = Gate(world)
    for name in objections:
        getattr(gate, name)()
    log, state = gate.kit.log, gate.kit.engine.state
    before = log.size
    assert gate.call() == SAYS[objections[0]]
    facts = [record.entry for record in log.records()][before:]
    assert not world.calls and not gate.woken
    told = [entry.kind for entry in facts if not entry.kind.startswith(("saga.", "clock."))]
    assert told == ["step.refused"], "no intent, no name, no question, no limit: one refusal"
    [refusal] = [entry for entry in facts if entry.kind == "step.refused"]
    assert (refusal.why, refusal.saga, refusal.tool) == (SAYS[objections[0]], gate.saga, "bank.wire")
    assert state.meters.accounts == {} and not state.approvals.requests and not state.notices.told
    assert all(held.saga != gate.saga for held in state.locks.held.values())


@pytest.mark.promise("2.1")
def test_the_order_is_the_one_that_is_promised() -> None:
    assert [name for name, _ in CHECKS] == list(SAYS)


@pytest.mark.promise("2.1")
def test_without_an_objection_a_person_is_asked_and_everything_is_taken_at_once(world: World) -> None:
    gate = Gate(world)
    waiting = Asking(gate.kit, lambda amount, fee: world.act("wire", "k"), gate.kwargs, locks=("account:8",))
    item = waiting.seen().item
    assert gate.woken and gate.kit.engine.state.meters.accounts == {} and not gate.kit.engine.state.locks.held
    gate.kit.approve(item, by="Ann")
    waiting.end()
    [intent] = [record.entry for record in gate.kit.log.records() if record.entry.kind == "step.intended"]
    assert intent.use == {"day": 1000, "rate": 1} and intent.request


# ---- retries --------------------------------------------------------------------------------------------------------

SAGA = "s" * 26
NOW = Now(10**9, 1, 0, 0)


def asked(**fields: Any) -> Question:
    return Question("bank.wire", "irreversible", SAGA, SAGA, **fields)


def failing(facts: Facts) -> None:
    facts.tell("saga.opened", saga="o" * 26, n=1, fence=1, driver="d" * 26)
    facts.tell("step.intended", saga="o" * 26, step=1, fence=1, tool="bank.wire", sem="compensable")
    facts.tell("step.failed", saga="o" * 26, step=1, fence=1, why="ValueError")


RETRIED: list[tuple[str, Callable[[Facts], Any], Question, bool]] = [
    ("switch", lambda facts: facts.tell("switch.set", out="halt", target="*"), asked(), True),
    ("breaker", failing, asked(breaker=BREAKER), True),
    ("a limit on calls", Facts, asked(debits=(Debit("rate", "rate", 2, 1, 1000, velocity=True),)), True),
    ("a limit on money", Facts, asked(debits=(Debit("day", "day", 2, 1, 1000),)), False),
    ("rules", Facts, asked(ruling=Ruling(REFUSE, "never")), False),
    ("people", Facts, asked(ruling=Ruling(ASK, "look")), False),
    ("the keyring", Facts, asked(ring=Refusal("ring_frozen", "no", "wait")), False),
]  # fmt: skip


@pytest.mark.promise("2.1")
@pytest.mark.parametrize("raised, question, again", [row[1:] for row in RETRIED], ids=[row[0] for row in RETRIED])
def test_a_retry_asks_the_switch_the_breaker_and_what_counts_calls_once_more(
    raised: Callable[[Facts], Any], question: Question, again: bool
) -> None:
    facts = Facts()
    if raised is not Facts:
        raised(facts)
    assert judge(facts.state, question, NOW).verdict in (REFUSE, ASK)
    assert judge(facts.state, question._replace(attempt=2), NOW).verdict == (REFUSE if again else ALLOW)


def test_what_a_retry_asks_comes_first() -> None:
    assert EACH_ATTEMPT == tuple(name for name, _ in CHECKS)[:3]


# ---- without a transaction ------------------------------------------------------------------------------------------


@pytest.mark.promise("2.1")
def test_what_is_judged_on_the_log_as_last_read_is_named_among_what_is_not_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kit = AgentKit.in_memory()
    assert any("judged on the log as its process last read it" in said for said in kit.guarantees()["not_claimed"])
    judged: list[str] = []

    def judging(state: State, question: Question, now: Now) -> Any:
        judged.append(question.tool)
        return judge(state, question, now)

    monkeypatch.setattr(admission, "judge", judging)
    with saga_scope(kit=kit) as saga:
        saga.execute("plain", lambda: 1, {}, semantics=REVERSIBLE)
        saga.execute("claims", lambda: 1, {}, semantics=REVERSIBLE, locks=("note",))
        saga.execute("durable", lambda: 1, {}, semantics=COMPENSABLE)
    assert judged == ["claims", "durable"]


# ---- limits that ask a person ---------------------------------------------------------------------------------------


def soft(*limits: BudgetLimit) -> AgentKit:
    return AgentKit.in_memory(gate=PreFlightGate((), limits=limits))


def cap(name: str, most: int) -> BudgetLimit:
    return BudgetLimit(name, max_total=most, window=WINDOW, escalate_to_human=True)


def used(kit: AgentKit, limit: str) -> int:
    return kit.engine.state.meters.used(limit, WINDOW * 1000, kit.log.now().lived, 2)


def pays(kit: AgentKit, world: World, amount: int, name: str) -> Asking:
    return Asking(
        kit, lambda amount: world.act(f"{amount}", name), {"amount": amount}, id=name, semantics=COMPENSABLE,
        undo=Compensation.human("call the bank"),
    )  # fmt: skip


@pytest.mark.promise("2.4")
@pytest.mark.parametrize("yes", [True, False], ids=["yes", "no"])
def test_over_a_soft_cap_a_person_decides_and_only_a_yes_is_debited(world: World, yes: bool) -> None:
    kit = soft(cap("day", 10))
    assert pays(kit, world, 10, "fits").end() and used(kit, "day") == 1000
    waiting = pays(kit, world, 1, "more")
    seen = waiting.seen()
    request = json.loads(seen.request)
    assert request["asked_by"] == ["limit day"] and "asks for 1.00" in request["reasons"][0]
    assert used(kit, "day") == 1000 and not waiting.done, "to ask takes nothing"
    if yes:
        kit.approve(seen.item, by="Ann")
        assert waiting.end() and used(kit, "day") == 1100 and world.standing == ["1", "10"]
    else:
        kit.deny(seen.item, by="Ann")
        assert waiting.code() == "denied" and used(kit, "day") == 1000 and world.standing == ["10"]


@pytest.mark.promise("3.2")
def test_a_yes_is_not_spent_over_a_second_limit_that_nobody_was_told_of(world: World) -> None:
    kit = soft(cap("day", 10), cap("week", 15))
    waiting = pays(kit, world, 11, "large")
    first = waiting.seen()
    assert json.loads(first.request)["asked_by"] == ["limit day"]
    assert pays(kit, world, 8, "small").end(), "meanwhile somebody else comes near the cap of the week"
    kit.approve(first.item, by="Ann")
    eventually(lambda: waiting.done or waiting.asked.request != first.digest)
    assert not waiting.done and world.standing == ["8"]
    second = waiting.seen()
    assert json.loads(second.request)["asked_by"] == ["limit day", "limit week"]
    kit.approve(second.item, by="Ann")
    assert waiting.end() and (used(kit, "day"), used(kit, "week")) == (1900, 1900)


@pytest.mark.promise("3.2")
def test_a_limit_that_people_were_told_of_does_not_ask_again_with_every_cent(world: World) -> None:
    kit = soft(cap("day", 10))
    waiting = pays(kit, world, 11, "large")
    seen = waiting.seen()
    assert pays(kit, world, 8, "small").end()
    kit.approve(seen.item, by="Ann")
    assert waiting.end() and used(kit, "day") == 1900
    assert [record.entry.kind for record in kit.log.records()].count("step.asked") == 1


def test_two_calls_over_one_soft_cap_are_two_questions(world: World) -> None:
    kit = soft(cap("day", 1))
    both = [pays(kit, world, 2, name) for name in ("one", "two")]
    eventually(lambda: len(kit.inbox()) == 2)
    for item in kit.inbox():
        kit.approve(item["id"], by="Ann")
    assert all(waiting.end() for waiting in both) and used(kit, "day") == 400
