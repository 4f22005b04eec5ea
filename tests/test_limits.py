"""Limits: amounts by table, windows against a model that keeps every debit in a list, and what a restart remembers."""

from __future__ import annotations

import enum
import functools
import random
from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amends import COMPENSABLE, AgentKit, Compensation, Refused, SagaAborted, saga_scope
from amends.runtime.facts import fact
from amends.runtime.gate.limits import (
    TOP,
    BudgetLimit,
    Meter,
    RateLimit,
    amount_in,
    by_arg,
    by_tool,
    check_limits,
    combine,
    declares,
    distinct,
    left,
    prepare,
    shown,
    span,
    uses,
)
from amends.runtime.gate.question import Debit, GateCall, Question, Reason, Refusal
from amends.runtime.gate.rules import PreFlightGate
from amends.runtime.semantics import ActionSemantics
from amends.runtime.state import State
from amends.runtime.tools import defaults
from amends.store.audit import verify
from amends.store.chain import Draft
from amends.store.clock import Now
from amends.store.entry import INTEGER_MAX
from amends.store.errors import BadName, BadValue
from amends.store.log import MemoryLog


class Hand:
    """Clocks that a test moves."""

    def __init__(self) -> None:
        self.ms, self.set_s, self.boot = 10**10, 0, "boot-1"
        self.us = 0  # set once the log has begun: facts of one moment are told a microsecond apart

    def wall_us(self) -> int:
        return self.ms * 1000 + self.us + self.set_s * 1_000_000

    def boot_ms(self) -> int:
        return self.ms

    def boot_id(self) -> str:
        return self.boot


def meter(text: str) -> str:
    """Stands for a device's HMAC: 16 hex digits, another one for another text."""
    return f"{sum(ord(letter) * 257**place for place, letter in enumerate(text)) % 2**64:016x}"


def call(tool: str = "charge", **kwargs: Any) -> GateCall:
    return GateCall(tool, ActionSemantics.COMPENSABLE, kwargs)


class Till:
    """One saga on a log in memory that asks its limits before each step, and writes what they say in one commit."""

    def __init__(self, *limits: Any) -> None:
        self.limits = limits
        self.clock = Hand()
        self.log = MemoryLog(State(), clock=self.clock)
        self.log.commit(lambda state, now: (fact("saga.opened", saga="s", fence=1, driver="d", up=True),))
        self.step, self.clock.us = 0, 500

    def ask(self, tool: str = "charge", *, attempt: int = 1, **kwargs: Any) -> Any:
        """What came of a call: a Refusal, the reasons to ask a person, or None for done."""
        debits = prepare(self.limits, call(tool, **kwargs), meter)
        if isinstance(debits, Refusal):
            return debits
        return self.take(debits, tool, attempt)

    def take(self, debits: Sequence[Debit], tool: str = "charge", attempt: int = 1) -> Any:
        question = Question(tool, "compensable", "s", "s", debits=tuple(debits), attempt=attempt)
        answer: list[Any] = []

        def decide(state: State, now: Now) -> Sequence[Draft]:
            refusal, asks = check_limits(state, question, now)
            answer[:] = [refusal or asks or None]
            if answer[0] is not None:
                return ()
            more = {"attempt": attempt} if attempt > 1 else {"tool": tool, "sem": "compensable"}
            kind = "step.attempted" if attempt > 1 else "step.intended"
            self.step += attempt == 1
            intent = fact(kind, saga="s", fence=1, step=self.step, use=uses(question), up=True, **more)
            return (*[fact("limit.set", **each, up=True) for each in declares(state, question)], intent)

        self.log.commit(decide)
        return answer[0]

    def wait(self, seconds: float) -> None:
        self.clock.ms += round(seconds * 1000)

    def restart(self) -> None:
        """Another process: the state as its memo has it, and as the log alone tells it; both must be the same."""
        memo, log = State(), self.log
        memo.load(log.view.dump())
        told = MemoryLog(State(), clock=self.clock)
        told._rows.clear()
        told._begin(State())
        for record in log.records():
            told._chain.follow(record.entry, record.line)
        assert told.view.dump() == log.view.dump() == memo.dump()
        log.view = log._chain.view = memo

    def left(self) -> list[tuple[str, int, int]]:
        return [(row.limit, row.used, row.left) for row in self.log.look(left)]


def budget(cap: Any = 100, window: Any = 60, **more: Any) -> BudgetLimit:
    return BudgetLimit("daily", max_total=cap, window=window, **more)


# ---- amounts --------------------------------------------------------------------------------------------------------


class Five(enum.IntEnum):
    FIVE = 5


GOOD = [
    (0, 0), (-0.0, 0), (5, 500), (5.0, 500), ("5", 500), ("5.00", 500), (Decimal(5), 500), (Decimal("5.000"), 500),
    (0.1, 10), (4.35, 435), (1.1, 110), (1e3, 100_000), (2.675e2, 26_750), (1e-2, 1), ("0.07", 7),
    (Decimal("1E+2"), 10_000), (Decimal("0E-999999"), 0), (Decimal("0E+999999"), 0), (Decimal("1.10"), 110),
    (Five.FIVE, 500), (90071992547409, 9007199254740900), ("90071992547409.92", INTEGER_MAX),
]  # fmt: skip

BAD = [
    -1, -0.01, Decimal("-1"), "-1", Decimal("-1E+999999"), True, False, float("nan"), float("inf"), float("-inf"),
    Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity"), "NaN", "inf", "", " ", " 5", "5 ", "5\n", "1e3", "1_000",
    "1,5", "1.", ".5", "+5", "0x10", "five", "٥", "5€", None, b"5",
    [5], {"amount": 5}, (5,), 5j, Fraction(1, 2), object(),
    0.1 + 0.2, 1.005, "1.005", Decimal("0.001"), Decimal("1E-999999"), 1e-7, 5e-324, Decimal(1) / 3,
    90071992547410, 1e16, 1e300, Decimal("1E+999999"), Decimal("90071992547409.93"), 10**5000, -(10**5000), "9" * 17,
    "0." + "0" * 40, lambda: 5, timedelta(5), int,
]  # fmt: skip


@pytest.mark.promise("2.4")
@pytest.mark.parametrize(("given_", "minor"), GOOD, ids=repr)
def test_an_amount_is_read_exactly_and_the_same_whatever_its_type(given_: Any, minor: int) -> None:
    assert amount_in(given_, 2) == minor
    assert type(amount_in(given_, 2)) is int


@pytest.mark.promise("2.4")
@pytest.mark.parametrize("given_", BAD, ids=[f"{place}-{type(bad).__name__}" for place, bad in enumerate(BAD)])
def test_what_is_no_amount_is_refused_and_nothing_is_debited(given_: Any) -> None:
    assert isinstance(amount_in(given_, 2), str)
    till = Till(budget(10**12))
    refusal = till.ask(amount=given_)
    assert (refusal.code, refusal.facts["argument"]) == ("bad_amount", "amount")
    assert till.left() == [] and "step.intended" not in [record.entry.kind for record in till.log.records()]


@pytest.mark.promise("2.4")
@pytest.mark.parametrize("given_", [0, 4200, Five.FIVE, INTEGER_MAX], ids=repr)
def test_minor_units_are_whole_numbers(given_: int) -> None:
    assert amount_in(given_, 2, minor=True) == given_


@pytest.mark.promise("2.4")
@pytest.mark.parametrize("given_", [42.0, "42", Decimal(42), True, -1, INTEGER_MAX + 1, None, 0.5], ids=repr)
def test_what_may_be_meant_in_whole_units_is_no_amount_in_minor_ones(given_: Any) -> None:
    assert isinstance(amount_in(given_, 2, minor=True), str)
    assert Till(budget(10**6, minor=True)).ask(amount=given_).code == "bad_amount"


@given(st.integers(0, INTEGER_MAX), st.integers(0, 12))
def test_any_decimal_text_is_read_as_the_integer_it_shows(minor: int, scale: int) -> None:
    text = shown(minor, scale)
    assert (
        amount_in(text, scale)
        == amount_in(Decimal(text), scale)
        == amount_in(Decimal(text + "0" * scale), scale)
        == minor
    )


@given(st.floats(0, 1e12), st.integers(0, 6))
def test_a_float_is_what_it_prints(value: float, scale: int) -> None:
    read = amount_in(value, scale)
    exact = Decimal(repr(value)) * 10**scale
    assert read == exact if exact == int(exact) and exact <= INTEGER_MAX else isinstance(read, str)


@given(st.integers() | st.floats() | st.decimals() | st.text() | st.none() | st.booleans() | st.binary())
def test_whatever_is_handed_over_is_an_amount_or_a_sentence(value: Any) -> None:
    read = amount_in(value, 2)
    assert isinstance(read, str) or 0 <= read <= INTEGER_MAX


class Sly(float):
    def __repr__(self) -> str:
        return "0.01"


def test_a_number_does_not_choose_what_it_is_read_as() -> None:
    assert amount_in(Sly(900.0), 2) == 90_000


@pytest.mark.promise("2.4")
def test_a_model_that_leaves_out_the_point_spends_the_same() -> None:
    till = Till(budget("5000.00"))
    assert till.ask(amount=5000) is None
    assert till.ask(amount=0.01).code == "over_limit"


def test_an_amount_is_shown_with_its_digits() -> None:
    assert (shown(48000, 2, "eur"), shown(5, 2), shown(7, 0, "calls"), shown(1, 8)) == (
        "480.00 eur", "0.05", "7 calls", "0.00000001",
    )  # fmt: skip


def test_a_time_is_never_told_shorter_than_it_is() -> None:
    told = [span(ms) for ms in (1, 999, 1000, 60_000, 90_000, 121_000, 3_600_000, 5_400_000, 86_400_000, 200_000_000)]
    assert told == ["1 ms", "999 ms", "1 s", "1 min", "90 s", "3 min", "1 h", "90 min", "1 d", "2 d 8 h"]
    told = [span(ms) for ms in (7_199_990, 7_200_000, 7_260_000, 86_399_999, 86_400_001, 172_799_999)]
    assert told == ["2 h", "2 h", "2 h 1 min", "1 d", "24 h 1 min", "2 d"], "what has just begun is told as it was set"


# ---- declaring ------------------------------------------------------------------------------------------------------


async def late(call: GateCall) -> bool:
    return False


NONSENSE = [
    {"max_total": 0}, {"max_total": -1}, {"max_total": True}, {"max_total": "many"}, {"max_total": 10.005},
    {"max_total": float("inf")}, {"max_total": None}, {"max_total": 10**20}, {"window": 0}, {"window": -1},
    {"window": True}, {"window": float("nan")}, {"window": float("inf")}, {"window": "1h"}, {"window": 0.0001},
    {"window": 1e300}, {"window": timedelta(0)}, {"arg": ""}, {"arg": 3}, {"scale": -1}, {"scale": 13}, {"scale": 2.0},
    {"scale": True}, {"scope": "by_tool"}, {"applies": "charge"}, {"applies": late},
    {"scope": late}, {"minor": True, "max_total": 10.0},
]  # fmt: skip


@pytest.mark.parametrize("wrong", NONSENSE, ids=[f"{place}-{next(iter(each))}" for place, each in enumerate(NONSENSE)])
def test_nonsense_is_refused_where_it_is_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadValue) as caught:
        BudgetLimit("x", **{"max_total": 10, "window": 60, **wrong})
    assert caught.value.code == "bad_limit" and "'x'" in caught.value.message


@pytest.mark.parametrize("calls", [0, -1, True, 1.0, "3", None])
def test_a_rate_counts_whole_calls(calls: Any) -> None:
    with pytest.raises(BadValue, match="max_calls"):
        RateLimit("x", max_calls=calls, window=60)


@pytest.mark.parametrize("name", ["", "a/b", "a" * 201, 'a"b', "ü", "a\n", None, 3])
def test_a_limit_has_a_name_that_a_meter_can_carry(name: Any) -> None:
    with pytest.raises((BadValue, BadName)):
        RateLimit(name, max_calls=1, window=60)


def test_what_agent_saga_calls_it_is_what_it_is_called() -> None:
    limit = BudgetLimit("daily-charges", arg="amount", max_total=50_000, window=86_400, scope=by_tool)
    assert (limit.cap, limit.window_ms) == (5_000_000, 86_400_000)
    rate = RateLimit("velocity", max_calls=20, window=60, scope=combine(by_tool, by_arg("customer")))
    assert (rate.cap, rate.window_ms, rate.velocity) == (20, 60_000, True)
    assert BudgetLimit("w", max_total=1, window=timedelta(hours=1)).window_ms == 3_600_000
    assert BudgetLimit("w", max_total=1, window=None).window_ms == 0


def test_one_name_is_one_limit() -> None:
    a, b = budget(100), BudgetLimit("daily", arg="fee", max_total=100, window=60)
    assert distinct([a, b]) == (a, b)
    for other in (
        budget(101),
        budget(100, 61),
        budget(100, unit="usd"),
        RateLimit("daily", max_calls=10_000, window=60),
    ):
        with pytest.raises(BadValue, match="another cap"):
            distinct([a, other])
    with pytest.raises(BadValue, match="no limit"):
        distinct([a, "daily"])  # type: ignore[list-item]


# ---- which calls, which meter ---------------------------------------------------------------------------------------


def test_without_applies_a_budget_is_for_the_calls_that_have_its_argument() -> None:
    till = Till(budget(10))
    assert till.ask("send_email", to="x") is None and till.left() == []
    assert till.ask(amount=10) is None and till.left() == [("daily", 1000, 0)]


@pytest.mark.promise("2.4")
def test_a_missing_amount_is_refused_where_the_limit_says_that_it_applies() -> None:
    till = Till(budget(10, applies=lambda call: call.tool == "charge"))
    assert till.ask("send_email", amount=99) is None
    for kwargs in ({}, {"amount": None}):
        refusal = till.ask("charge", **kwargs)
        assert refusal.code == "bad_amount" and "missing" in refusal.said
    assert till.left() == []


def boom(call: GateCall) -> Any:
    raise KeyError("region")


@pytest.mark.promise("2.4")
@pytest.mark.parametrize(
    "broken",
    [
        budget(applies=boom), budget(scope=boom), budget(scope=lambda call: 7), budget(scope=lambda call: "x" * 5000),
        budget(scope=combine(by_tool, boom)), budget(scope=combine(by_tool, lambda call: None)),
        RateLimit("daily", max_calls=1, window=1, applies=boom), budget(scope=lambda call: {}["x"]),
    ],
)  # fmt: skip
def test_a_limit_that_cannot_tell_does_not_let_the_call_pass(broken: Any) -> None:
    till = Till(RateLimit("before", max_calls=9, window=60), broken)
    refusal = till.ask(amount=1)
    assert refusal.code == "rule_raised" and refusal.facts == {"limit": "daily"}
    assert till.left() == []


@pytest.mark.promise("2.4")
@pytest.mark.parametrize("kwargs", [{}, {"customer": None}, {"customer": 1.5}, {"customer": ["c"]}, {"customer": b"c"}])
def test_a_call_that_names_nobody_gets_no_meter_of_its_own(kwargs: dict[str, Any]) -> None:
    for scope in (by_arg("customer"), combine(by_tool, by_arg("customer"))):
        refusal = Till(budget(scope=scope)).ask(amount=1, **kwargs)
        assert refusal.code == "no_such_argument" and "'customer'" in refusal.said and refusal.next


def test_each_scope_has_a_meter_of_its_own() -> None:
    till = Till(budget(10, scope=combine(by_tool, by_arg("customer"))))
    for tool in ("charge", "pay"):
        for customer in ("c1", "c2", UUID(int=7)):
            assert till.ask(tool, amount=10, customer=customer) is None
            assert till.ask(tool, amount=10, customer=customer).code == "over_limit"
    assert [row[1:] for row in till.left()] == [(1000, 0)] * 6


@pytest.mark.parametrize("same", [("42", 42, 42.0), ("é", "e\u0301")])
def test_one_customer_spelled_in_several_ways_is_one_customer(same: tuple[Any, ...]) -> None:
    till = Till(budget(10, scope=by_arg("customer")))
    assert till.ask(amount=10, customer=same[0]) is None
    assert all(till.ask(amount=1, customer=each).code == "over_limit" for each in same)


def test_a_combination_cannot_be_forged_from_its_parts() -> None:
    scope = combine(by_arg("a"), by_arg("b"))
    assert scope(call(a='x","y', b="z")) != scope(call(a="x", b='y","z'))


def test_scopes_that_are_none_are_refused_where_they_are_written() -> None:
    for make in (lambda: by_arg(""), lambda: by_arg(3), lambda: combine(), lambda: combine("x")):  # type: ignore[arg-type]
        with pytest.raises(BadValue):
            make()


# ---- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.4")
def test_a_window_slides_and_the_cap_itself_is_free() -> None:
    till = Till(budget(100, 60))
    assert till.ask(amount=60) is None
    till.wait(30)
    assert till.ask(amount=40) is None
    assert till.ask(amount=0.01).code == "over_limit"
    till.wait(29.999)
    assert till.ask(amount=0.01).code == "over_limit"
    till.wait(0.001)
    assert till.left() == [("daily", 4000, 6000)]
    assert till.ask(amount=60.01).code == "over_limit" and till.ask(amount=60) is None


@pytest.mark.promise("2.4")
def test_a_limit_without_a_window_never_gives_back() -> None:
    till = Till(budget(100, None))
    assert till.ask(amount=99) is None
    till.wait(10 * 365 * 86_400)
    till.restart()
    refusal = till.ask(amount=2)
    assert refusal.facts["retry_after_ms"] is None and refusal.next == "Ask for at most 1.00 eur."
    assert till.ask(amount=1) is None
    assert till.ask(amount=1).next == "Have a person raise the limit."


def test_a_refusal_says_what_would_fit_and_when() -> None:
    till = Till(budget(500, 24 * 3600))
    till.ask(amount=300)
    till.wait(3600)
    till.ask(amount=180)
    till.wait(3600)
    refusal = till.ask("charge", amount=50)
    assert refusal.said == "Limit daily: 480.00 of 500.00 eur used in the last 1 d, and charge asks for 50.00."
    assert refusal.next == "Ask for at most 20.00 eur, or try again in 22 h."
    assert refusal.facts == {
        "limit": "daily", "used": 48000, "asked": 5000, "cap": 50000, "left": 2000, "unit": "eur", "scale": 2,
        "window_ms": 86_400_000, "retry_after_ms": 22 * 3_600_000,
    }  # fmt: skip
    assert till.ask(amount=501).facts["retry_after_ms"] is None, "more than the cap never fits"
    rate = Till(RateLimit("fast", max_calls=1, window=60))
    rate.ask()
    assert rate.ask().next == "Try again in 1 min."


@pytest.mark.promise("2.4")
def test_several_limits_debit_all_or_none() -> None:
    till = Till(budget(100), RateLimit("fast", max_calls=9, window=60), BudgetLimit("tight", max_total=50, window=60))
    assert till.ask(amount=40) is None
    assert till.ask(amount=40).facts["limit"] == "tight"
    assert till.left() == [("daily", 4000, 6000), ("fast", 1, 8), ("tight", 4000, 1000)]


@pytest.mark.promise("2.4")
def test_two_debits_of_one_call_share_their_meter() -> None:
    till = Till(budget(100), BudgetLimit("daily", arg="fee", max_total=100, window=60))
    assert till.ask(amount=60, fee=41).code == "over_limit" and till.left() == []
    assert till.ask(amount=60, fee=40) is None and till.left() == [("daily", 10000, 0)]
    huge = Till(budget("90071992547409", 60), BudgetLimit("daily", arg="fee", max_total="90071992547409", window=60))
    assert huge.ask(amount="90071992547409", fee="90071992547409").code == "bad_amount"


def test_over_the_cap_a_person_is_asked_if_the_limit_says_so() -> None:
    soft = budget(100, escalate_to_human=True)
    till = Till(soft)
    assert till.ask(amount=100) is None
    said = "Limit daily: 100.00 of 100.00 eur used in the last 1 min, and charge asks for 1.00."
    assert till.ask(amount=1) == (Reason("limit daily", said),)
    hard = Till(soft, BudgetLimit("hard", max_total=200, window=60))
    assert hard.ask(amount=201).code == "over_limit", "nobody is asked for what cannot be"


@pytest.mark.promise("2.4")
def test_a_retry_counts_as_a_call_and_not_as_money() -> None:
    till = Till(budget(100), RateLimit("fast", max_calls=2, window=60, escalate_to_human=True))
    assert till.ask(amount=100) is None
    assert till.ask(amount=100, attempt=2) is None
    assert till.left() == [("daily", 10000, 0), ("fast", 2, 0)]
    assert till.ask(amount=100, attempt=3).code == "over_limit", "nobody is asked in the middle of a step"


@pytest.mark.promise("2.4")
def test_what_was_allowed_stays_counted_when_the_step_fails_or_is_undone() -> None:
    till = Till(budget(100))
    for end in (("step.failed",), ("step.done", "saga.unwinding", "undo.intended", "undo.done")):
        assert till.ask(amount=50) is None
        for kind in end:
            step = {} if kind.startswith("saga") else {"step": till.step}
            draft = fact(
                kind, saga="s", fence=1, **step, **({"inv": "declared"} if kind == "step.done" else {}), up=True
            )
            till.log.commit(lambda state, now, draft=draft: (draft,))
    assert till.left() == [("daily", 10000, 0)]


def test_a_limit_is_declared_when_it_is_first_debited_and_when_it_changes() -> None:
    till = Till(budget(100))
    till.ask(amount=1)
    till.ask(amount=1)
    till.limits = (budget(200),)
    till.ask(amount=1)
    told = [record.entry for record in till.log.records() if record.entry.kind == "limit.set"]
    assert [(entry.limit, entry.cap, entry.unit, entry.scale, entry.within_ms) for entry in told] == [
        ("daily", 10_000, "eur", 2, 60_000),
        ("daily", 20_000, "eur", 2, 60_000),
    ]


def test_a_nothing_is_debited_nowhere() -> None:
    till = Till(budget(100))
    assert till.ask(amount=0) is None
    assert till.left() == [("daily", 0, 10_000)]


def test_a_shorter_window_forgets_and_a_longer_one_counts_what_is_still_known() -> None:
    till = Till(budget(100, 60))
    till.ask(amount=80)
    till.wait(30)
    till.limits = (budget(100, 10),)
    assert till.ask(amount=90) is None
    till.limits = (budget(300, 60),)
    till.wait(10)
    assert till.ask(amount=1) is None and till.left() == [("daily", 17100, 12900)]
    till.limits = (budget(1000, None),)
    assert till.ask(amount=1) is None and till.left() == [("daily", 17200, 82800)]


def test_a_limit_by_customer_does_not_keep_every_customer() -> None:
    till = Till(budget(10, 60, scope=by_arg("customer")))
    for number in range(300):
        assert till.ask(amount=10, customer=number) is None
        till.wait(1)
    assert len(till.log.view.meters.accounts["daily"].meters) == 60
    till.restart()


def test_the_fullest_meter_is_listed_first_with_when_it_gets_room() -> None:
    till = Till(budget(10, 60, scope=by_arg("customer")))
    for number in (1, 7, 3):
        till.ask(amount=number, customer=number)
        till.wait(5)
    rows = till.log.look(left)
    assert [(row.used, row.left, row.frees_ms) for row in rows] == [
        (700, 300, 50_000), (300, 700, 55_000), (100, 900, 45_000),
    ]  # fmt: skip
    assert all(len(row.meter) == 16 for row in rows)
    till.wait(100)
    assert [row[:5] for row in till.log.look(left)] == [("daily", "", 0, 1000, 1000)]


@pytest.mark.promise("2.4")
def test_a_clock_that_is_set_refills_no_window() -> None:
    till = Till(budget(100, 60))
    till.ask(amount=100)
    for till.clock.set_s in (3600, -3600, 0):
        assert till.ask(amount=1).code == "over_limit"
        till.wait(1)
    till.wait(57)
    assert till.ask(amount=1) is None


@pytest.mark.promise("2.4")
def test_a_boot_that_comes_up_in_the_past_refills_no_window() -> None:
    till = Till(budget(100, 60))
    till.ask(amount=100)
    till.clock.boot, till.clock.ms = "boot-2", 500
    assert till.ask(amount=1).code == "over_limit"


class Flowing:
    """Clocks that go on by the microsecond; the boot clock tells every `tick` milliseconds."""

    def __init__(self, tick: int = 1) -> None:
        self.us, self.tick = 0, tick

    def wall_us(self) -> int:
        return 10**15 + self.us

    def boot_ms(self) -> int:
        return self.us // (1000 * self.tick) * self.tick

    def boot_id(self) -> str:
        return "boot"


@pytest.mark.promise("2.4")
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=200), st.sampled_from([1, 16]))
def test_in_a_busy_log_time_goes_by_as_in_an_idle_one(steps: list[int], tick: int) -> None:
    clock = Flowing(tick)
    log = MemoryLog(State(), clock=clock)
    log.commit(lambda state, now: ())
    for step in steps * 5:
        clock.us += step
        log.commit(lambda state, now: (Draft("note", {}, (), True),))
    gone = clock.us / 1000
    assert gone - tick - 1 <= log.now().lived <= gone


# ---- through a kit --------------------------------------------------------------------------------------------------


def charges(amount: Any = 30) -> Any:
    return amount


@pytest.mark.promise("2.4")
def test_what_a_call_leaves_out_counts_with_its_default() -> None:
    with AgentKit.in_memory(gate=PreFlightGate([], limits=[budget(100)])) as kit, saga_scope(kit=kit) as saga:
        assert [saga.execute("charge", charges, {}, semantics=COMPENSABLE) for _ in range(3)] == [30, 30, 30]
        with pytest.raises(Refused, match="90.00 of 100.00 eur used") as refused:
            saga.execute("charge", functools.partial(charges), {}, semantics=COMPENSABLE)
    assert (refused.value.code, refused.value.facts["left"]) == ("over_limit", 1000)


@pytest.mark.promise("2.4")
def test_what_a_partial_holds_counts_however_it_holds_it() -> None:
    def any_names(**more: Any) -> Any:
        return more["amount"]

    holding = [functools.partial(charges, 60), functools.partial(charges, amount=60),
               functools.partial(functools.partial(charges), 60), functools.partial(any_names, amount=60)]  # fmt: skip
    for held in holding:
        with AgentKit.in_memory(gate=PreFlightGate([], limits=[budget(100)])) as kit, saga_scope(kit=kit) as saga:
            assert saga.execute("charge", held, {}, semantics=COMPENSABLE) == 60
            with pytest.raises(Refused, match="60.00 of 100.00 eur used"):
                saga.execute("charge", held, {}, semantics=COMPENSABLE)


@pytest.mark.promise("2.4")
def test_a_partial_with_an_argument_that_nobody_can_name_is_refused_before_the_effect() -> None:
    done: list[Any] = []

    def rest(*amounts: Any) -> None:
        done.append(amounts)

    def shared(amount: Any, /, **more: Any) -> None:
        done.append(amount)

    with AgentKit.in_memory(gate=PreFlightGate([], limits=[budget(100)])) as kit, saga_scope(kit=kit) as saga:
        for held in (functools.partial(rest, 1), functools.partial(shared, 1), functools.partial(dict, [])):
            with pytest.raises(BadValue) as refused:
                saga.execute("charge", held, {}, semantics=COMPENSABLE)
            assert refused.value.code == "unnamed_argument" and "by keyword" in refused.value.next
    assert not done


def test_what_a_callable_puts_in_is_known_however_it_is_made() -> None:
    def plain(a: int, /, b: int = 2, *rest: int, c: int, d: int = 4, **more: int) -> None: ...

    assert defaults(plain) == {"b": 2, "d": 4}
    assert defaults(functools.partial(plain, c=3)) == {"b": 2, "c": 3, "d": 4}
    assert defaults(charges) == {"amount": 30} and defaults(lambda: 1) == {} and defaults(print) != {"amount": 30}


@pytest.mark.promise("2.4")
def test_a_refused_call_leaves_its_reason_and_no_debit() -> None:
    gate = PreFlightGate([], limits=[RateLimit("fast", max_calls=9, window=60), budget(100)])
    with AgentKit.in_memory(gate=gate) as kit:
        with saga_scope(kit=kit) as saga:
            for amount, code in ((101, "over_limit"), (-5, "bad_amount"), (True, "bad_amount")):
                with pytest.raises(Refused) as refused:
                    saga.execute("charge", charges, {"amount": amount}, semantics=COMPENSABLE)
                assert refused.value.code == code
        told = [record.entry for record in kit.log.records()]
        assert [entry.why for entry in told if entry.kind == "step.refused"] == [
            "over_limit",
            "bad_amount",
            "bad_amount",
        ]
        assert not any(entry.use for entry in told) and kit.log.look(left) == []


@pytest.mark.promise("2.4")
def test_an_undone_saga_gives_nothing_back() -> None:
    gate = PreFlightGate([], limits=[budget(100)])
    with AgentKit.in_memory(gate=gate) as kit:
        with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
            saga.execute("charge", charges, {"amount": 100}, semantics=COMPENSABLE, undo=Compensation(lambda: None))
            raise ValueError("no")
        assert aborted.value.report.clean
        assert [(row.used, row.left) for row in kit.log.look(left)] == [(10000, 0)]


@pytest.mark.promise("2.4")
def test_a_home_that_is_opened_again_remembers_what_was_spent(tmp_path: Path) -> None:
    gate = PreFlightGate([], limits=[budget(100, 3600, scope=by_arg("customer"))])
    for remembered in (0, 3000, 6000):
        with AgentKit(home=tmp_path / "home", gate=gate) as kit:
            assert sum(row.used for row in kit.log.look(left)) == remembered
            with saga_scope(kit=kit) as saga:
                saga.execute(
                    "charge", lambda amount, customer: 1, {"amount": 30, "customer": "c1"}, semantics=COMPENSABLE
                )
    assert kit.home is not None and verify(kit.home, view_factory=State).findings == []


# ---- declared anew --------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.4")
def test_another_scale_is_no_refill() -> None:
    till = Till(budget(100, 5))
    assert till.ask(amount=100) is None
    for scale in (4, 6, 0, 2, 12):
        till.limits = (budget(100, 5, scale=scale),)
        refusal = till.ask(amount=1)
        assert (refusal.code, refusal.facts["used"], refusal.facts["left"]) == ("over_limit", 100 * 10**scale, 0)
        assert refusal.facts["retry_after_ms"] == 5000
        till.restart()
    till.limits = (budget(101, 5, scale=4),)
    assert till.ask(amount=1) is None, "and is declared so now"
    (row,) = left(till.log.view, till.log.now())
    assert (row.used, row.left, row.scale) == (1010000, 0, 4)


@pytest.mark.promise("2.4")
def test_what_was_used_in_finer_units_is_rounded_up_once() -> None:
    till = Till(budget(1, 5, scale=3))
    for _ in range(11):
        assert till.ask(amount="0.001") is None
        till.wait(0.1)
    till.limits = (budget(1, 5, scale=2),)
    assert till.ask(amount="0.99").facts["used"] == 2
    assert till.ask(amount="0.99").facts["retry_after_ms"] == 3900, "when the first is gone, a hundredth is left"
    assert till.ask(amount="0.98") is None
    till.limits = (budget(1, 5, scale=3),)
    assert till.ask(amount="0.010").facts["left"] == 9, "nothing was lost on the way"


@pytest.mark.promise("2.4")
def test_a_limit_keeps_its_unit() -> None:
    till = Till(budget(100, 5, unit="eur"))
    assert till.ask(amount=1) is None
    till.limits = (budget(100, 5, unit="jpy"),)
    refusal = till.ask(amount=1)
    assert refusal.code == "unit_changed"
    assert "has counted eur" in refusal.said and "in jpy" in refusal.said
    till.limits = (RateLimit(budget(1).name, max_calls=5, window=5),)
    assert till.ask().code == "unit_changed"
    till.limits = (budget(100, 5, unit="eur"),)
    assert till.ask(amount=99) is None


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.sampled_from((0, 2, 3, 12))), max_size=60),
    st.sampled_from((0, 2, 3, 12)),
)
def test_a_meter_of_many_scales_is_the_sum_of_its_debits(debits: list[tuple[int, int, int]], scale: int) -> None:
    state, told, now = State(), [], 0
    account = state.meters._account("b")
    for wait, amount, each in debits:
        now += wait
        account.declared, account.kept_ms = (1, "eur", each, 50), 50
        account.take("b", amount, now)
        told.append((now, Fraction(amount, 10**each)))
        again = State()
        again.load(state.dump())
        assert again.dump() == state.dump()
        for look in (now, now + 25):
            live = sum((money for at, money in told if at > look - 50), Fraction(0))
            assert state.meters.used("b", 50, look, scale) == ceil(live * 10**scale)


def test_scales_that_64_bits_cannot_hold_together_count_upwards() -> None:
    meter_ = Meter(2)
    meter_.take(1, INTEGER_MAX, 2, 10)
    meter_.take(2, 1, 12, 10)
    assert (meter_.scale, meter_.used(10, 2)) == (2, INTEGER_MAX + 1)
    full = Meter(12)
    for at in range(2000):
        full.take(at, INTEGER_MAX, 12, 10)
    full.take(2000, 1, 0, 10)
    assert (full.scale, full.used(0, 2000)) == (0, TOP), "what was too much to count stays so"


# ---- against a model ------------------------------------------------------------------------------------------------

MOVES = st.lists(
    st.tuples(st.just("spend"), st.integers(0, 60), st.integers(0, 2))
    | st.tuples(st.just("wait"), st.integers(0, 90), st.just(0))
    | st.tuples(st.just("restart"), st.just(0), st.just(0))
    | st.tuples(st.just("look"), st.integers(0, 500), st.just(0))
    | st.tuples(st.just("declare"), st.integers(10, 100), st.integers(1, 90)),
    max_size=60,
)


@pytest.mark.promise("2.4")
@given(MOVES)
def test_a_window_says_what_a_list_of_all_debits_says(moves: list[tuple[str, int, int]]) -> None:
    """Milliseconds and minor units of one, so that edges are met often. What is older than the longest window so far is
    forgotten when its meter, or a younger one, takes in another debit."""
    cap, window, longest = 100, 60, 0
    scope = by_arg("who")

    def limit() -> BudgetLimit:
        return budget(cap, window / 1000, minor=True, scope=scope)

    till = Till(limit())
    told: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}  # who -> when, how much
    for move, number, other in moves:
        now = till.clock.ms
        if move == "wait":
            till.clock.ms += number
        elif move == "restart":
            till.restart()
        elif move == "look":
            before = till.log.view.dump()
            later = till.log.now()._replace(lived=till.log.now().lived + number)
            left(till.log.view, later)
            assert till.log.view.dump() == before
        elif move == "declare":
            cap, window = number, other
            till.limits = (limit(),)
        else:
            counted = [(at, amount) for at, amount in told[other] if at > now - window]
            used = sum(amount for _, amount in counted)
            refusal = till.ask(amount=number, who=other)
            assert (refusal is None) == (used + number <= cap)
            if refusal is None:
                longest = max(longest, window)
                if number:
                    told[other] = [(at, amount) for at, amount in told[other] if at > now - longest] + [(now, number)]
                    told = {who: held if held and held[-1][0] > now - longest else [] for who, held in told.items()}
                continue
            assert refusal.facts["used"] == used
            fits = [at + window - now for at, _ in counted if _after(counted, at) + number <= cap]
            assert refusal.facts["retry_after_ms"] == (fits[0] if fits and number <= cap else None)


def _after(counted: list[tuple[int, int]], at: int) -> int:
    return sum(amount for when, amount in counted if when > at)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, INTEGER_MAX)), max_size=300), st.integers(1, 2000))
def test_a_meter_is_exact_far_beyond_64_bits(debits: list[tuple[int, int]], window: int) -> None:
    meter_, told, now = Meter(), [], 0
    for wait, amount in debits:
        now += wait
        meter_.add(now, amount, window)
        told.append((now, amount))
        for look in (now, now + window // 2):
            live = sum(amount for at, amount in told if at > look - window)
            assert meter_.used(window, look) == live or live > TOP >> 1
        assert meter_.used(0, now) == min(TOP, sum(amount for _, amount in told))
        again = Meter.loaded(*meter_.dump())
        assert again.dump() == meter_.dump()


def test_a_meter_that_is_full_of_the_largest_amounts_goes_on() -> None:
    meter_ = Meter()
    for at in range(3000):
        meter_.add(at, INTEGER_MAX, 2000)
    assert meter_.used(2000, 3000) > INTEGER_MAX
    assert meter_.used(0, 3000) == TOP


@pytest.mark.promise("2.4")
def test_processes_that_began_at_different_records_agree_to_the_byte() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    till = Till(budget(10**6, 5, scope=by_arg("who")), RateLimit("fast", max_calls=10**6, window=2))
    for _ in range(400):
        till.ask(amount=rng.randrange(1, 100), who=rng.randrange(20))
        till.wait(rng.random())
    whole = State()
    others: list[State] = []
    log = MemoryLog(whole, clock=till.clock)
    log._rows.clear()
    log._begin(whole)
    for record in till.log.records():
        entry, chain = record.entry, log._chain
        lived = chain.timeline.at_entry(entry) if entry.up else chain.timeline.lived
        for other in others:
            other.fold(entry, lived)
        chain.follow(entry, record.line)
        if rng.random() < 0.02:
            others.append(State())
            others[-1].load(chain.view.dump())
    assert others
    assert {other.dump() for other in others} == {till.log.view.dump()}
