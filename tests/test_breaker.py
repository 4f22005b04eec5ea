"""The breaker: what counts as a failure, when it opens, who may probe, and that nothing of it is stored as a flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_limits import Hand

from amends import COMPENSABLE, AgentKit, Refused, RetryPolicy, saga_scope
from amends.runtime.facts import fact
from amends.runtime.gate.breaker import (
    CLOSED,
    HALF_OPEN,
    KEPT,
    OPEN,
    BreakerPolicy,
    CircuitBreaker,
    Trip,
    check_breaker,
    played,
    standing,
)
from amends.runtime.gate.limits import RateLimit, left
from amends.runtime.gate.question import Question
from amends.runtime.gate.rules import PreFlightGate
from amends.runtime.state import State
from amends.store.chain import Draft
from amends.store.clock import Now
from amends.store.errors import BadValue
from amends.store.log import MemoryLog

DEFAULT = BreakerPolicy()


class Line:
    """Calls of one tool on a log in memory: each is judged and announced in one commit, and comes back or does not."""

    def __init__(self, policy: BreakerPolicy = DEFAULT) -> None:
        self.policy, self.clock, self.step = policy, Hand(), 0
        self.log = MemoryLog(State(), clock=self.clock)
        self.open("s")
        self.clock.us = 500

    def open(self, saga: str) -> None:
        self.write("saga.opened", saga=saga, driver="d", fence=1)

    def write(self, kind: str, **fields: Any) -> None:
        draft = fact(kind, up=True, **{"saga": "s", "fence": 1, **fields})
        self.log.commit(lambda state, now: (draft,))

    def wait(self, seconds: float) -> None:
        self.clock.ms += round(seconds * 1000)

    def ask(self, tool: str = "pay", attempt: int = 1) -> Any:
        question = Question(tool, "compensable", "s", "s", breaker=self.policy, attempt=attempt)
        return self.log.look(lambda state, now: check_breaker(state, question, now))

    def begin(self, tool: str = "pay", saga: str = "s", scope: str = "") -> int:
        """A call into the air; its step. Raises if the breaker refuses it."""
        question = Question(tool, "compensable", saga, saga, breaker=self.policy)
        number = self.step + 1

        def decide(state: State, now: Now) -> Sequence[Draft]:
            refusal = check_breaker(state, question, now)
            assert refusal is None, refusal
            fields = {"saga": saga, "fence": 1, "step": number, "tool": tool, "sem": "compensable", "scope": scope}
            return (fact("step.intended", up=True, **fields),)

        self.log.commit(decide)
        self.step = number
        return number

    def end(self, step: int, kind: str = "step.done", **fields: Any) -> None:
        inverse = {"inv": "declared", "handler": "h"} if kind == "step.done" else {}
        self.write(kind, step=step, **inverse, **fields)

    def run(self, outcomes: str, tool: str = "pay", gap: float = 0.0) -> None:
        """One call after another: + succeeds, - fails, ? is lost to a timeout."""
        kinds = {"+": ("step.done", {}), "-": ("step.failed", {"why": "ValueError"}),
                 "?": ("step.lost", {"why": "TimeoutError"})}  # fmt: skip
        for outcome in outcomes:
            self.wait(gap)
            kind, fields = kinds[outcome]
            self.end(self.begin(tool), kind, **fields)

    def state(self, tool: str = "pay") -> str:
        rows = self.log.look(lambda state, now: standing(state, self.policy, now))
        [row] = [row for row in rows if row.tool == tool]
        return row.state

    def restart(self) -> None:
        """The state as its memo has it, and as the log alone tells it: the same."""
        memo = State()
        memo.load(self.log.view.dump())
        told = MemoryLog(State(), clock=self.clock)
        told._rows.clear()
        told._begin(State())
        for record in self.log.records():
            told._chain.follow(record.entry, record.line)
        assert told.view.dump() == self.log.view.dump() == memo.dump()
        self.log.view = self.log._chain.view = memo


# ---- opening and closing --------------------------------------------------------------------------------------------


@pytest.mark.promise("2.3")
def test_failures_in_a_row_open_it() -> None:
    line = Line()
    line.run("----")
    assert (line.ask(), line.state()) == (None, CLOSED)
    line.run("-")
    refusal = line.ask()
    assert (refusal.code, line.state()) == ("breaker_open", OPEN)
    assert refusal.said == "pay failed 5 times in a row; it is left alone for 30 s more."
    assert refusal.facts == {"retry_after_ms": 30_000, "failures": 5}
    line.wait(10)
    assert line.ask().facts["retry_after_ms"] == 20_000


@pytest.mark.promise("2.3")
def test_a_success_in_between_begins_the_row_anew() -> None:
    line = Line(BreakerPolicy(failure_rate=1.0))
    line.run("----+----")
    assert line.ask() is None
    line.run("-")
    assert line.ask().code == "breaker_open"


@pytest.mark.promise("2.3")
def test_a_share_of_failures_opens_it_once_there_are_enough_calls() -> None:
    line = Line()
    line.run("-+-+")
    assert line.ask() is None, "four calls say nothing yet"
    line.run("-")
    assert line.ask().said == "pay failed 3 of 5 times in 1 min; it is left alone for 30 s more."
    calm = Line()
    calm.run("++-++-++-++-++-")
    assert calm.ask() is None, "a third is less than half"


@pytest.mark.promise("2.3")
def test_what_is_older_than_the_window_has_no_share() -> None:
    line = Line()
    line.run("-+-+", gap=20)
    line.run("-", gap=20)
    assert line.ask() is None
    row = line.log.look(lambda state, now: standing(state, DEFAULT, now))[0]
    assert (row.failed, row.calls, row.streak) == (2, 3, 1)


@pytest.mark.promise("2.3")
def test_a_timeout_is_a_failure() -> None:
    line = Line()
    line.run("?????")
    assert line.ask().code == "breaker_open"


def test_each_tool_has_its_own() -> None:
    line = Line()
    line.run("-----")
    assert line.ask("ship") is None
    line.run("+", "ship")
    assert (line.state("pay"), line.state("ship")) == (OPEN, CLOSED)


# ---- probes ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.3")
def test_after_the_cool_down_one_call_probes_and_its_success_closes_it() -> None:
    line = Line()
    line.run("-----")
    line.wait(29.999)
    assert line.ask().code == "breaker_open"
    line.wait(0.001)
    assert line.state() == HALF_OPEN
    probe = line.begin()
    refusal = line.ask()
    assert refusal.code == "breaker_probing"
    assert refusal.facts == {"retry_after_ms": 30_000, "failures": 5, "probes": 1}
    line.end(probe)
    assert (line.ask(), line.state()) == (None, CLOSED)
    line.run("----")
    assert line.ask() is None, "it begins with a clean slate, though the old failures are in the window"


@pytest.mark.promise("2.3")
def test_a_probe_that_fails_leaves_it_open_for_another_cool_down() -> None:
    line = Line()
    line.run("-----")
    line.wait(30)
    line.run("-")
    assert line.ask().facts == {"retry_after_ms": 30_000, "failures": 6}
    line.wait(30)
    line.run("+")
    assert line.state() == CLOSED


@pytest.mark.promise("2.3")
def test_as_many_probe_as_the_policy_says() -> None:
    line = Line(BreakerPolicy(half_open_probes=3))
    line.run("-----")
    line.wait(30)
    for _ in range(3):
        line.begin()
    assert line.ask().said == "pay kept failing; 3 calls are trying whether it works again."


@pytest.mark.promise("2.3")
@pytest.mark.parametrize(
    "ends",
    [
        ("step.failed", {"why": "not_started"}),
        ("step.lost", {"why": "CancelledError"}),
        ("step.lost", {"why": "KeyboardInterrupt"}),
        ("step.lost", {"why": "SystemExit"}),
        ("saga.taken", {"why": "died", "step": 0, "fence": 2}),
        ("saga.taken", {"why": "retry", "step": 1, "fence": 2}),
    ],
)
def test_a_probe_that_says_nothing_gives_its_place_back(ends: tuple[str, dict[str, Any]]) -> None:
    line = Line()
    line.run("-----")
    line.wait(30)
    line.open("other")
    probe = line.begin(saga="other")
    assert line.ask().code == "breaker_probing"
    line.write(ends[0], **{"saga": "other", "step": probe, **ends[1]})
    assert (line.ask(), line.state()) == (None, HALF_OPEN)
    line.restart()


@pytest.mark.promise("2.3")
def test_a_probe_of_a_dead_process_holds_its_place_for_a_cool_down_and_no_longer() -> None:
    line = Line()
    line.run("-----")
    line.wait(30)
    line.begin()
    line.restart()
    line.wait(29.999)
    assert line.ask().code == "breaker_probing"
    line.wait(0.001)
    assert line.ask() is None


def test_calls_that_were_under_way_before_are_no_probes_and_their_success_proves_nothing_yet() -> None:
    line = Line()
    early = [line.begin(), line.begin()]
    line.run("-----")
    line.wait(1)
    line.end(early[0])
    assert line.ask().code == "breaker_open"
    line.wait(29)
    assert (line.ask(), line.state()) == (None, HALF_OPEN)
    line.end(early[1])
    assert line.state() == CLOSED


@pytest.mark.promise("2.3")
def test_a_probe_does_not_retry() -> None:
    line = Line()
    line.run("-----")
    line.wait(30)
    line.begin()
    assert line.ask(attempt=2).code == "breaker_open"


# ---- what counts ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.3")
@pytest.mark.parametrize(
    "why", ["halted", "over_limit", "blocked", "denied", "expired", "breaker_open", "lock_timeout"]
)
def test_refusals_and_denials_never_count(why: str) -> None:
    line = Line()
    for _ in range(20):
        line.step += 1
        line.write("step.refused", step=line.step, tool="pay", sem="compensable", why=why)
    assert line.ask() is None and line.log.view.breakers.circuits == {}


@pytest.mark.promise("2.3")
def test_compensations_never_count_and_are_never_asked() -> None:
    line = Line()
    for _ in range(6):
        line.run("+")
    line.write("saga.unwinding", why="aborted")
    for step in range(6, 0, -1):
        line.write("undo.intended", step=step, key="k", handler="h")
        line.write("undo.failed", step=step, why="ValueError")
    assert line.state() == CLOSED
    open_ = Line(BreakerPolicy(failure_rate=1.0))
    step = open_.begin()
    open_.end(step)
    open_.run("-----")
    open_.write("saga.unwinding", why="aborted")
    open_.write("undo.intended", step=step, key="k", handler="h")
    assert open_.ask().code == "breaker_open", "and the compensation was written all the same"


@pytest.mark.promise("2.3")
def test_each_attempt_of_a_retry_counts_and_only_once() -> None:
    line = Line(BreakerPolicy(failure_threshold=3))
    step = line.begin()
    line.write("step.attempted", step=step, attempt=2, why="ValueError")
    line.write("step.attempted", step=step, attempt=3, why="ValueError")
    assert line.ask() is None
    line.end(step, "step.failed", why="ValueError")
    assert line.ask().facts["failures"] == 3


@pytest.mark.promise("2.3")
def test_a_failure_that_a_fallback_hides_counts_and_the_fallback_does_not() -> None:
    line = Line()
    for _ in range(5):
        line.run("-")
        line.policy = BreakerPolicy(failure_threshold=KEPT, min_volume=KEPT)  # a fallback is not judged by the breaker
        line.end(line.begin(scope="fallback"))
        line.policy = DEFAULT
    assert line.ask().facts["failures"] == 5
    lonely = Line()
    for _ in range(9):
        lonely.end(lonely.begin(scope="fallback"), "step.failed", why="ValueError")
    assert lonely.ask() is None


def test_what_lands_late_was_counted_when_it_was_lost() -> None:
    line = Line()
    for _ in range(4):
        step = line.begin()
        line.end(step, "step.lost", why="TimeoutError")
        line.write("step.landed", step=step, out="failed")
    assert line.ask() is None
    line.run("?")
    line.write("step.landed", step=line.step, out="done")
    assert line.ask().facts["failures"] == 5


def test_a_step_told_in_one_fact_counts_as_a_success() -> None:
    line = Line(BreakerPolicy(failure_rate=1.0))
    line.run("----")
    line.step += 1
    line.write("step.done", step=line.step, tool="pay", sem="reversible")
    line.run("----")
    assert line.ask() is None
    line.step += 1
    line.write("step.done", step=line.step, tool="ship", sem="reversible", scope="fallback")
    assert "ship" not in line.log.view.breakers.circuits


def test_nothing_stays_in_the_air_when_its_saga_has_ended() -> None:
    line = Line()
    line.run("+-?")
    line.write("saga.ended", out="committed")
    assert line.log.view.breakers.dump()[1] == []


# ---- played from what is kept ---------------------------------------------------------------------------------------


def mark(seconds: float, succeeded: bool) -> int:
    return 2 * round(seconds * 1000) + succeeded


def reference(outcomes: list[tuple[int, bool]], policy: BreakerPolicy) -> Trip | None:
    """The same machine, slow and plain: every count made from the list."""
    window, cool = round(policy.window * 1000), round(policy.cool_down * 1000)
    open_: Trip | None = None
    history: list[tuple[int, bool]] = []
    streak = 0
    for at, succeeded in outcomes:
        history.append((at, succeeded))
        streak = 0 if succeeded else streak + 1
        if succeeded:
            if open_ is not None and at >= open_.lived + cool:
                open_, history = None, []
            continue
        recent = [good for when, good in history if when > at - window]
        failed = recent.count(False)
        often = len(recent) >= policy.min_volume and failed >= policy.failure_rate * len(recent)
        if open_ is not None or streak >= policy.failure_threshold or often:
            open_ = Trip(at, streak, failed, len(recent))
    return open_


POLICIES = st.builds(
    BreakerPolicy,
    failure_threshold=st.integers(1, 6),
    window=st.sampled_from([0.01, 0.03, 0.1]),
    min_volume=st.integers(1, 8),
    failure_rate=st.sampled_from([0.2, 0.5, 0.9, 1.0]),
    cool_down=st.sampled_from([0.005, 0.02, 0.08]),
)


@given(st.lists(st.tuples(st.integers(0, 25), st.booleans()), max_size=120), POLICIES)
def test_it_is_open_when_a_plain_machine_says_so(steps: list[tuple[int, bool]], policy: BreakerPolicy) -> None:
    now, told = 0, []
    for wait, succeeded in steps:
        now += wait
        told.append((now, succeeded))
    assert played([2 * at + good for at, good in told], policy) == reference(told, policy)


@given(
    st.lists(
        st.sampled_from(["begin", "done", "failed", "lost", "cancelled", "attempted", "taken"]) | st.integers(0, 40),
        max_size=60,
    ),
    st.randoms(use_true_random=False),
)
@pytest.mark.promise("2.3")
def test_a_restart_changes_nothing_and_probes_never_exceed_their_number(moves: list[Any], rng: Any) -> None:
    policy = BreakerPolicy(failure_threshold=2, min_volume=KEPT, cool_down=0.05, half_open_probes=2)
    line, air, fence = Line(policy), dict[int, int](), 1
    kinds = {"done": ("step.done", ""), "failed": ("step.failed", "ValueError"), "lost": ("step.lost", "TimeoutError"),
             "cancelled": ("step.lost", "CancelledError")}  # fmt: skip
    for move in moves:
        if isinstance(move, int):
            line.clock.ms += move
        elif move == "begin":
            trip = line.log.view.breakers.trip("pay", policy)
            refusal = line.ask()
            now = line.log.now().lived
            if trip is None:
                assert refusal is None
            elif now < trip.lived + 50:
                assert refusal.code == "breaker_open"
            else:
                probes = [at for at in air.values() if at >= trip.lived + 50 and at > now - 50]
                assert (refusal is not None) == (len(probes) >= 2)
            if refusal is None:
                line.step += 1
                line.write("step.intended", step=line.step, fence=fence, tool="pay", sem="compensable")
                air[line.step] = now
        elif move == "taken":
            fence += 1
            line.write("saga.taken", fence=fence, driver="d", why="resume")
            for step in air:
                line.write("step.lost", fence=fence, step=step, why="died")
            air.clear()
        elif air:
            step = rng.choice(sorted(air))
            if move == "attempted":
                line.write("step.attempted", step=step, fence=fence, attempt=2, why="ValueError")
                air[step] = line.log.now().lived
            else:
                kind, why = kinds[move]
                line.write(kind, step=step, fence=fence, why=why)
                del air[step]
        line.restart()


def test_only_the_newest_outcomes_are_kept_and_a_busy_tool_agrees_after_a_restart() -> None:
    line = Line()
    line.run("+" * 300 + "-" + "+" * 300 + "-" + "+" * 100)
    circuit = line.log.view.breakers.circuits["pay"]
    assert len(circuit.outcomes) == KEPT and circuit.quiet == 100
    line.restart()
    assert line.log.view.breakers.circuits["pay"].quiet == 100
    line.run("+" * KEPT)
    assert line.log.view.breakers.circuits["pay"].spotless


# ---- through a kit --------------------------------------------------------------------------------------------------


def kit_with(policy: BreakerPolicy, clock: Hand) -> AgentKit:
    return AgentKit.in_memory(gate=PreFlightGate([], breaker=policy), clock=clock)


def refused(saga: Any, work: Callable[[], Any], **options: Any) -> str:
    """The code that the gate refused a call with, the name of what its tool raised, or nothing."""
    try:
        saga.execute("pay", work, semantics=COMPENSABLE, **options)
    except Refused as error:
        return error.code
    except Exception as error:
        return type(error).__name__
    return ""


def fails() -> None:
    raise ValueError("no")


@pytest.mark.promise("2.3")
def test_in_one_long_saga_the_cool_down_begins_when_the_tool_failed_last() -> None:
    clock = Hand()
    with kit_with(BreakerPolicy(failure_threshold=3), clock) as kit, saga_scope(kit=kit) as saga:

        def hangs_and_fails() -> None:
            clock.ms += 20_000
            fails()

        assert [refused(saga, hangs_and_fails) for _ in range(4)] == ["ValueError"] * 3 + ["breaker_open"]
        clock.ms += 29_000
        assert refused(saga, fails) == "breaker_open"
        clock.ms += 1_001

        def probe() -> None:
            within.append(refused(saga, fails))

        within: list[str] = []
        assert (refused(saga, probe), within) == ("", ["breaker_probing"])
        assert refused(saga, lambda: None) == ""


@pytest.mark.promise("2.3")
def test_an_open_breaker_ends_the_attempts_and_the_alternative_of_a_failing_tool_is_not_left_alone() -> None:
    tried: list[int] = []

    def fails_and_tells() -> None:
        tried.append(1)
        fails()

    with kit_with(BreakerPolicy(failure_threshold=2), Hand()) as kit, saga_scope(kit=kit) as saga:
        retry = RetryPolicy(max_retries=9, base_delay=0.0)
        assert refused(saga, fails_and_tells, retry=retry, fallback=lambda: 1) == ""
        assert len(tried) == 3, "two that were counted, and the one under way"
        assert refused(saga, fails) == "breaker_open"


@pytest.mark.promise("2.3")
def test_a_call_that_the_breaker_refuses_costs_no_budget() -> None:
    gate = PreFlightGate([], limits=[RateLimit("fast", max_calls=2, window=60)], breaker=BreakerPolicy(1))
    with AgentKit.in_memory(gate=gate) as kit, saga_scope(kit=kit) as saga:
        assert [refused(saga, fails) for _ in range(5)] == ["ValueError"] + ["breaker_open"] * 4
        assert [row.used for row in kit.log.look(left)] == [1]


# ---- declaring ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"failure_threshold": 0}, {"failure_threshold": 257}, {"failure_threshold": True}, {"failure_threshold": 2.0},
        {"window": 0}, {"window": "1m"}, {"window": float("nan")}, {"window": float("inf")}, {"min_volume": 0},
        {"min_volume": 1000}, {"failure_rate": 0}, {"failure_rate": 1.1}, {"failure_rate": True}, {"cool_down": 0},
        {"cool_down": -1}, {"cool_down": None}, {"half_open_probes": 0}, {"half_open_probes": 1.0},
    ],
    ids=repr,
)  # fmt: skip
def test_nonsense_is_refused_where_it_is_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadValue) as caught:
        BreakerPolicy(**wrong)
    assert caught.value.code == "bad_breaker"


def test_a_breaker_holds_its_policy_and_nothing_else() -> None:
    assert CircuitBreaker().policy == BreakerPolicy(5, 60.0, 5, 0.5, 30.0, 1)
    assert CircuitBreaker(BreakerPolicy(failure_threshold=3)).policy.failure_threshold == 3
    with pytest.raises(BadValue):
        CircuitBreaker(5)  # type: ignore[arg-type]
