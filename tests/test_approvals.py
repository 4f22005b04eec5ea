"""A question to people as a machine: what stands of it after which facts, what may follow, and what a vote needs."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from approving import OTHER, REQUEST, SAGA, Asking, Facts, People
from hypothesis import given
from hypothesis import strategies as st
from simulation import Clock
from soft_keys import SoftPasskey
from world import World, eventually

from amends import COMPENSABLE, IRREVERSIBLE, AgentKit, RetryPolicy, Secret
from amends.runtime import asking
from amends.runtime.asking import Answered, spend
from amends.runtime.facts import body, fact
from amends.runtime.gate import ceremonies, keyring, signing
from amends.runtime.gate.approvals import (
    APPROVED,
    DENIED,
    EXPIRED,
    ORDER,
    PENDING,
    SPENT,
    STANDINGS,
    SUPERSEDED,
    VOTES_MAX,
    WITHDRAWN,
    Approvals,
    binds,
    bound,
    due_level,
    plain_name,
    request_of,
    same_person,
    standing,
    tier_of,
)
from amends.runtime.gate.clock import accept_clock, check_clock
from amends.runtime.gate.levels import FILE, LEVELS, NAMED, PRESENT, QUORUM, SECOND_DEVICE, VERIFIED
from amends.runtime.gate.proof import base64url
from amends.runtime.gate.question import ALLOW, ASK, Question, Reason, Tier
from amends.runtime.gate.question import Verdict as Judged
from amends.runtime.gate.rules import ApprovalPolicy, EscalationLevel, PreFlightGate, Rule, Verdict, tool_is
from amends.runtime.gate.shown import fields_of, headline
from amends.runtime.gate.statement import canonical, challenge, check_code, decision, request_digest
from amends.runtime.values import encode
from amends.store.clock import Now
from amends.store.errors import BadValue, Illegal, NotFound, Refused

# ---- what stands of a request ---------------------------------------------------------------------------------------

Tell = Callable[[Facts], Any]


def asks(**fields: Any) -> Tell:
    return lambda facts: facts.ask(**fields)


def yes(person: str, **fields: Any) -> Tell:
    return lambda facts: facts.vote("approve", person, **fields)


def no(person: str, **fields: Any) -> Tell:
    return lambda facts: facts.vote("deny", person, **fields)


def glass(person: str) -> Tell:
    return lambda facts: facts.vote("break_glass", person)


def refused(why: str) -> Tell:
    return lambda facts: facts.refuse(why)


def later(ms: int) -> Tell:
    return lambda facts: setattr(facts, "lived", facts.lived + ms)


def unwinds(facts: Facts) -> None:
    facts.tell("saga.unwinding", saga=SAGA, fence=1, why="failed")


def ends(facts: Facts) -> None:
    unwinds(facts)
    facts.refuse("withdrawn")
    facts.tell("saga.ended", saga=SAGA, fence=1, out="refused")


TABLE: list[tuple[str, list[Tell], str]] = [
    ("nobody has said anything", [asks()], PENDING),
    ("one yes of one", [asks(), yes("ann")], APPROVED),
    ("one yes of two", [asks(quorum=2), yes("ann")], PENDING),
    ("one person who says it twice", [asks(quorum=2), yes("ann"), yes("ann")], PENDING),
    ("two people of two", [asks(quorum=2), yes("ann"), yes("bob")], APPROVED),
    ("a yes on weaker evidence than was asked", [asks(level=PRESENT), yes("ann", level=FILE)], PENDING),
    ("a yes on stronger evidence", [asks(level=PRESENT), yes("ann", level=VERIFIED)], APPROVED),
    ("several people are the level: each needs a PIN", [asks(level=QUORUM, quorum=2), yes("a", level=4),
                                                        yes("b", level=3)], PENDING),
    ("several people are the level, each with one", [asks(level=QUORUM, quorum=2), yes("a", level=4),
                                                     yes("b", level=4)], APPROVED),
    ("a no", [asks(), no("ann")], DENIED),
    ("a no on weaker evidence counts all the same", [asks(level=PRESENT), no("ann", level=NAMED)], DENIED),
    ("a no after a yes, before it is spent", [asks(), yes("ann"), no("bob")], DENIED),
    ("a yes after a no", [asks(), no("ann"), yes("bob")], DENIED),
    ("a no among many", [asks(quorum=3), yes("ann"), no("bob"), yes("cid")], DENIED),
    ("whoever said yes says no", [asks(quorum=2), yes("ann"), no("ann")], DENIED),
    ("at the deadline it is still open", [asks(within_ms=1000), later(1000)], PENDING),
    ("past the deadline", [asks(within_ms=1000), later(1001)], EXPIRED),
    ("approved, and never spent in time", [asks(within_ms=1000), yes("ann"), later(1001)], EXPIRED),
    ("denied, and past the deadline", [asks(within_ms=1000), no("ann"), later(1001)], DENIED),
    ("a yes past the deadline", [asks(within_ms=1000), later(1001), yes("ann")], EXPIRED),
    ("a no past the deadline", [asks(within_ms=1000), later(1001), no("ann")], EXPIRED),
    ("the glass is broken where three are asked", [asks(quorum=3, level=VERIFIED), glass("ann")], APPROVED),
    ("the glass is broken, and somebody says no", [asks(quorum=3), glass("ann"), no("bob")], DENIED),
    ("spent", [asks(), yes("ann"), Facts.intend], SPENT),
    ("a no after it was spent", [asks(), yes("ann"), Facts.intend, no("bob", why="spent")], SPENT),
    ("the no is written down", [asks(), no("ann"), refused("denied")], DENIED),
    ("the deadline is written down", [asks(), refused("expired")], EXPIRED),
    ("the gate refuses it while it waits", [asks(), refused("halted")], WITHDRAWN),
    ("its saga is given up", [asks(), unwinds], WITHDRAWN),
    ("its saga is given up after a yes", [asks(), yes("ann"), unwinds], WITHDRAWN),
    ("a late yes to what was withdrawn", [asks(), unwinds, yes("ann", why="withdrawn")], WITHDRAWN),
    ("its saga has ended", [asks(), ends], WITHDRAWN),
    ("it was asked anew", [asks(), yes("ann"), asks(request=OTHER)], SUPERSEDED),
]  # fmt: skip


@pytest.mark.promise("3.1")
@pytest.mark.parametrize("told, expected", [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_what_stands_of_a_request_follows_from_its_facts(told: list[Tell], expected: str) -> None:
    facts = Facts()
    for tell in told:
        tell(facts)
        again = Approvals()
        again.load(facts.state.approvals.dump())
        assert again.dump() == facts.state.approvals.dump() and again.steps == facts.state.approvals.steps
    assert standing(facts.state.approvals, REQUEST, facts.lived) == expected


@pytest.mark.promise("3.1")
@given(
    votes=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["approve", "deny", "break_glass"]),
                             st.integers(1, 4), st.integers(0, 400)), max_size=12),
    quorum=st.integers(1, 3), level=st.integers(1, 4), end=st.integers(0, 400),
)  # fmt: skip
def test_any_order_of_votes_stands_as_a_plain_reading_of_the_rules_says(
    votes: list[tuple[str, str, int, int]], quorum: int, level: int, end: int
) -> None:
    facts, counted = Facts(), []
    facts.ask(quorum=quorum, level=level, within_ms=1000)
    for person, out, shown, wait in votes:
        facts.lived += wait
        said = [v for v in counted if v[0] == person]
        if any(v[1] == "deny" for v in said):
            with pytest.raises(Illegal):
                facts.vote(out, person, level=shown)
            if facts.lived <= 1000:
                continue
        elif facts.lived <= 1000:
            facts.vote(out, person, level=shown)
            counted.append((person, out, shown))
    facts.lived += end
    people = {person for person, out, shown in counted if out == "approve" and shown >= level}
    if any(out == "deny" for _, out, _ in counted):
        expected = DENIED
    elif facts.lived > 1000:
        expected = EXPIRED
    else:
        broken = any(out == "break_glass" for _, out, _ in counted)
        expected = APPROVED if broken or len(people) >= quorum else PENDING
    assert standing(facts.state.approvals, REQUEST, facts.lived) == expected


ILLEGAL: list[tuple[str, list[Tell], Tell]] = [
    ("a question without a request", [], asks(request="")),
    ("a question without a deadline", [], asks(within_ms=0)),
    ("the same request twice", [asks()], asks()),
    ("more votes under one name than are kept", [asks(quorum=2), *[yes("ann")] * VOTES_MAX], yes("ann")),
    ("a yes by whoever said no", [asks(quorum=2), no("ann")], yes("ann")),
    ("a no twice", [asks(quorum=2), no("ann")], no("ann")),
    ("a vote about no request of ours, that would count", [asks()], yes("ann", request=OTHER)),
    ("a vote about another step", [asks()], yes("ann", step=2)),
    ("a vote after it was spent, that would count", [asks(), yes("ann"), Facts.intend], no("bob")),
    ("a vote of nobody", [asks()], yes("")),
    ("a vote without evidence", [asks()], yes("ann", level=0)),
    ("a vote that says something else", [asks()], lambda facts: facts.vote("maybe", "ann")),
    ("a step that starts while people are asked", [asks()], lambda facts: facts.intend("")),
    ("a step that starts on too few", [asks(quorum=2), yes("ann")], Facts.intend),
    ("a step that starts on weak evidence", [asks(level=PRESENT), yes("ann", level=NAMED)], Facts.intend),
    ("a step that starts on a no", [asks(), yes("ann"), no("bob")], Facts.intend),
    ("a step that starts on another one's yes", [asks(), yes("ann"), asks(request=OTHER, step=2)],
     lambda facts: facts.intend(step=2)),
    ("a step that starts on a yes that was withdrawn", [asks(), yes("ann"), asks(request=OTHER)], Facts.intend),
    ("another tool on the same yes", [asks(), yes("ann")], lambda facts: facts.intend(tool="bank.close")),
    ("another key on the same yes", [asks(), yes("ann")], lambda facts: facts.intend(key="k2")),
    ("another policy on the same yes", [asks(), yes("ann")], lambda facts: facts.intend(policy="f" * 16)),
    ("a yes that is spent twice", [asks(), yes("ann"), Facts.intend,
                                   lambda facts: facts.tell("step.lost", saga=SAGA, step=1, fence=1)], Facts.intend),
    ("a level that is skipped", [asks()], lambda f: f.tell("approval.escalated", request=REQUEST, level=2)),
    ("a level of a question that is over", [asks(), refused("expired")],
     lambda f: f.tell("approval.escalated", request=REQUEST, level=1)),
    ("a review of nothing", [asks()], lambda f: f.tell("review.closed", ref=3, person="bob")),
    ("a review by whoever broke the glass", [asks(), glass("ann")],
     lambda f: f.tell("review.closed", ref=f.seq, person="ann")),
]  # fmt: skip


@pytest.mark.promise("3.2")
@pytest.mark.parametrize("told, wrong", [row[1:] for row in ILLEGAL], ids=[row[0] for row in ILLEGAL])
def test_what_cannot_have_happened_is_not_folded_and_changes_nothing(told: list[Tell], wrong: Tell) -> None:
    facts = Facts()
    for tell in told:
        tell(facts)
    before = facts.state.dump()
    with pytest.raises(Illegal):
        wrong(facts)
    if told:
        assert facts.state.dump() == before


def test_the_order_of_the_rules_is_that_of_the_page() -> None:
    page = (Path(signing.__file__).parents[1] / "SEMANTICS.md").read_text(encoding="utf-8")
    rows = page.split("| stands | when |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    ended, *ruled = [row.split("|")[1].strip() for row in rows]
    assert ruled == [word for word, _ in ORDER]
    assert set(ended.split(", ")) == set(STANDINGS) - {APPROVED, PENDING}


def test_a_question_that_is_over_is_forgotten_with_its_saga_and_a_review_is_not() -> None:
    facts = Facts()
    facts.ask(quorum=2)
    facts.vote("break_glass", "ann")
    facts.intend()
    facts.tell("step.done", saga=SAGA, step=1, fence=1)
    facts.tell("saga.ended", saga=SAGA, fence=1, out="committed")
    view = facts.state.approvals
    assert not view.requests and not view.steps and [glass.person for glass in view.reviews.values()] == ["ann"]
    facts.tell("review.closed", ref=next(iter(view.reviews)), person="bob")
    assert not view.reviews


def test_a_level_is_due_when_its_time_has_come_and_is_told_once() -> None:
    facts = Facts()
    facts.ask()
    asked = facts.state.approvals.requests[REQUEST]
    tier = Tier(NAMED, levels=((0, ("team",)), (300, ("lead",)), (600, ())))
    assert [due_level(asked, tier, lived) for lived in (0, 299, 300, 599, 600, 5000)] == [1, 1, 2, 2, 3, 3]


# ---- spending -------------------------------------------------------------------------------------------------------


class Driven(NamedTuple):
    id: str


def question(**changed: Any) -> Question:
    return Question("bank.wire", "irreversible", SAGA, SAGA)._replace(**changed)


def now(lived: int = 0, **changed: Any) -> Now:
    return Now(10**9, 1, lived, lived)._replace(**changed)


def approved() -> Facts:
    facts = Facts()
    facts.ask()
    facts.vote("approve", "ann")
    return facts


RULE, LIMIT = Reason("rule wires", "wires are looked at"), Reason("limit daily", "90 of 100 used")
ASKED = Judged(ASK, None, (RULE,))
ANSWER = Answered(REQUEST, (3,), "", 1, frozenset({RULE.by}))
SPENDS: list[tuple[str, dict[str, Any], str]] = [
    ("as it was answered", {}, ALLOW),
    ("another keyring than the votes were checked against", {"answered": ANSWER._replace(head="f" * 64)}, ASK),
    ("a vote whose evidence does not hold any more", {"answered": ANSWER._replace(votes=())}, ASK),
    ("another request than the newest", {"answered": ANSWER._replace(request=OTHER)}, ASK),
    ("another step", {"answered": ANSWER._replace(step=2)}, ASK),
    ("past the deadline", {"now": now(1001)}, ASK),
    ("another tool", {"question": question(tool="bank.close")}, ASK),
    ("another policy", {"question": question(policy="f" * 16)}, ASK),
    ("other semantics", {"question": question(sem="compensable")}, ASK),
    ("a policy that asks stronger evidence by now", {"question": question(tier=Tier(PRESENT, settled=True))}, ASK),
    ("a policy that asks more people by now", {"question": question(tier=Tier(NAMED, 2))}, ASK),
    ("nothing was asked, and the step was never let go", {"answered": Answered("", step=1)}, ASK),
    ("a limit that nobody was told of", {"verdict": Judged(ASK, None, (RULE, LIMIT))}, ASK),
    ("the same rule in other words", {"verdict": Judged(ASK, None, (RULE._replace(said="look closely"),))}, ALLOW),
    ("nobody would be asked by now", {"verdict": Judged(ASK)}, ALLOW),
]


@pytest.mark.promise("3.2")
@pytest.mark.parametrize("changed, expected", [row[1:] for row in SPENDS], ids=[row[0] for row in SPENDS])
def test_an_answer_is_spent_on_exactly_what_it_was_given_for(changed: dict[str, Any], expected: str) -> None:
    given: dict[str, Any] = {"question": question(), "verdict": ASKED, "answered": ANSWER, "now": now()} | changed
    run: Any = Driven(SAGA)
    said = spend(approved().state, run, **given)
    assert said.verdict == expected and (expected == ALLOW or said.asks == given["verdict"].asks)


@pytest.mark.promise("3.2")
def test_an_answer_is_not_spent_after_a_no_nor_twice_nor_by_another_saga() -> None:
    run: Any = Driven(SAGA)
    denied = approved()
    denied.vote("deny", "bob")
    assert spend(denied.state, run, question(), ASKED, ANSWER, now()).verdict == ASK
    spent = approved()
    spent.intend()
    assert spend(spent.state, run, question(), ASKED, ANSWER, now()).verdict == ASK
    other: Any = Driven("t" * 26)
    assert spend(approved().state, other, question(), ASKED, ANSWER, now()).verdict == ASK


@pytest.mark.promise("3.2")
@pytest.mark.parametrize("end, expected", [("step.lost", ALLOW), ("step.failed", ASK)])
def test_a_step_that_was_let_go_and_lost_goes_on_without_a_second_answer(end: str, expected: str) -> None:
    facts = approved()
    facts.intend()
    facts.tell(end, saga=SAGA, step=1, fence=1)
    run: Any = Driven(SAGA)
    assert spend(facts.state, run, question(), ASKED, Answered("", step=1), now()).verdict == expected


@pytest.mark.promise("3.4")
def test_an_enrolled_key_raises_what_was_not_stated_by_name() -> None:
    rows = [
        (None, False, NAMED), (None, True, PRESENT),
        (Tier(NAMED), True, PRESENT), (Tier(NAMED, settled=True), True, NAMED),
        (Tier(FILE, settled=True), True, FILE), (Tier(VERIFIED), True, VERIFIED), (Tier(VERIFIED), False, VERIFIED),
    ]  # fmt: skip
    for tier, founded, expected in rows:
        assert tier_of(question(tier=tier), founded).level == expected, (tier, founded)
    assert tier_of(question(tier=Tier(QUORUM)), True).quorum == 2
    assert tier_of(question(tier=Tier(NAMED, within_ms=10**12)), False).within_ms == 7 * 24 * 3600 * 1000


# ---- the clock ------------------------------------------------------------------------------------------------------

AT = 10**15


@pytest.mark.promise("3.2")
def test_a_clock_behind_the_log_starts_nothing_irreversible_until_a_person_accepts_it() -> None:
    facts = Facts()
    facts.ask()

    def said(behind_s: float, lived: int = 0, **changed: Any) -> str:
        found = now(lived, at=AT, wall=AT - int(behind_s * 10**6))
        refusal = check_clock(facts.state, question(**changed), found)
        return refusal.code if refusal else ""

    assert [said(0), said(119), said(121)] == ["", "", "clock_went_back"]
    assert said(121, sem="compensable") == ""
    facts.seq = (AT - 1000) // 1000
    facts.tell("clock.accepted", by_ms=3_600_000)  # an hour behind at that moment
    assert said(3600) == said(3700) == ""
    assert said(3721) == "clock_went_back", "it went back once more"
    assert said(3600, lived=200_000) == "clock_went_back", "200 s were lived, and the clock stands where it stood"


@pytest.mark.promise("3.2")
def test_what_was_approved_is_not_sent_while_the_clock_stands_behind_the_log(world: World) -> None:
    clock = Clock()
    kit = AgentKit.in_memory(clock=clock)
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen = waiting.seen()
    clock.set_us -= 3600 * 10**6
    assert code_of(lambda: kit.approve(seen.item, by="Ann")) == "clock_went_back", (
        "by this clock, it is yet to be asked"
    )
    assert Asking(kit, wire(world), dict(PAY), id="other").code() == "clock_went_back" and not world.effects
    said = accept_clock(kit, by="Ann", reason="the time server was wrong")
    assert 3590 < said.behind_s <= 3601
    assert code_of(lambda: accept_clock(kit, by="Ann", reason="again")) == "clock_is_right"
    for by, reason in (("", "x"), ("Ann", " ")):
        with pytest.raises(BadValue):
            accept_clock(kit, by=by, reason=reason)
    later = Asking(kit, wire(world), {"amount": 1, "to": "DE89"}, id="later")
    kit.approve(later.seen().item, by="Ann")
    assert later.end() == "sent" and world.standing == ["1 to DE89"]
    kit.deny(seen.item, by="Ann")
    waiting.end()


def test_without_a_look_at_the_clock_nothing_is_said_of_it() -> None:
    assert check_clock(Facts().state, question(), now(at=AT)) is None


# ---- what is signed -------------------------------------------------------------------------------------------------

FIELDS: dict[str, Any] = {
    "ledger_id": "0" * 64, "executor": "amends.local/x", "saga": SAGA, "step": 1, "tool": "bank.wire",
    "effect": "irreversible", "idempotency_key": "k", "requester": "agent", "policy": "f" * 16, "quorum": 1,
    "level": "named", "roles": ["approver"], "created": 1, "expires": 2, "nonce": "n", "break_glass": True,
}  # fmt: skip
ARGS = encode({"amount": 4200, "to": "DE89", "lines": [{"n": 1}]})


@pytest.mark.promise("3.2")
@pytest.mark.parametrize("changed", [
    {"executor": "amends.local/y"}, {"saga": "t" * 26}, {"step": 2}, {"tool": "bank.wires"}, {"quorum": 2},
    {"idempotency_key": "k2"}, {"policy": "e" * 16}, {"level": "presence"}, {"roles": ["admin"]}, {"account": "x"},
    {"requester": "other"}, {"on_behalf_of": "cid"}, {"effect": "compensable"}, {"ledger_id": "1" * 64},
    {"break_glass": False},
], ids=str)  # fmt: skip
def test_a_request_binds_the_call_and_the_rules(changed: dict[str, Any]) -> None:
    text = request_of(FIELDS, ARGS)
    assert binds(text, request_of({**FIELDS, "nonce": "m", "created": 7, "expires": 8, "supersedes": "x"}, ARGS))
    assert not binds(text, request_of({**FIELDS, **changed}, ARGS))


@pytest.mark.promise("3.2")
@pytest.mark.parametrize("args", [
    {"amount": 4201, "to": "DE89", "lines": [{"n": 1}]}, {"amount": 4200.0, "to": "DE89", "lines": [{"n": 1}]},
    {"amount": "4200", "to": "DE89", "lines": [{"n": 1}]}, {"amount": 4200, "to": "DE89\u200b", "lines": [{"n": 1}]},
    {"amount": 4200, "to": "DE89", "lines": [{"n": 2}]}, {"amount": 4200, "to": "DE89"},
    {"amount": 4200, "to": "DE89", "lines": [{"n": True}]},
], ids=str)  # fmt: skip
def test_one_changed_digit_is_another_request(args: dict[str, Any]) -> None:
    one, other = request_of(FIELDS, ARGS), request_of(FIELDS, encode(args))
    assert not binds(one, other) and request_digest(one) != request_digest(other)


def test_text_that_only_looks_the_same_is_told_apart_and_large_values_stand_as_their_hash() -> None:
    composed, decomposed = encode({"to": "Jos\u00e9"}), encode({"to": "Jose\u0301"})
    assert bound(composed) == {"to": "Jos\u00e9"}
    assert bound(decomposed) == {"to": {"$": "escaped", "v": "Jose\\u0301"}}
    for value, kind in (("x" * 20_000, "text"), (b"\0" * 500, "bytes"), ([1] * 40_000, "list")):
        found = bound(encode({"v": value}))["v"]
        assert (found["$"], found["type"]) == ("large", kind) and len(found["sha256"]) == 64
    assert bound(encode({"v": {"$": "large"}}))["v"] != {"$": "large"}, "a value cannot pass for a hash"
    assert request_of(FIELDS, encode({"Jose\u0301": 1})), "names are kept apart too"


@pytest.mark.promise("3.7")
def test_a_name_too_long_to_be_shown_is_shown_as_its_hash() -> None:
    args = bound(encode({"memo": {"k" * 20_000: 1, "Jose\u0301": 2}}))
    [long, escaped] = fields_of(args)
    assert long.label.startswith("memo.20000 bytes, not shown; SHA-256 ") and long.value == "1"
    assert (escaped.label, escaped.value) == ("memo.Jose\\u0301", "2")


@pytest.mark.promise("3.7")
def test_a_value_of_the_callers_cannot_pass_for_one_that_is_not_shown() -> None:
    args = {"to": {"$": "large", "size": 9, "sha256": "a" * 64, "type": "text"}, "$": "secret", "Jose\u0301": 1}
    shown = {field.label: field.value for field in fields_of(bound(encode(args)))}
    assert shown["to.$"] == "large" and shown["to.size"] == "9" and shown["$"] == "secret" and len(shown) == 6
    assert [field.value for field in fields_of(bound(encode({"v": {"$": "bytes", "v": "x" * 200}})))] == [
        "bytes", "x" * 200
    ]  # fmt: skip


PADS: dict[str, Any] = {
    "texts": {f"memo{n}": "x" * 14_000 for n in range(5)},
    "many texts": {f"memo{n}": "x" * 1_500 for n in range(80)},
    "lists": {f"list{n}": [1] * 20_000 for n in range(5)},
    "small ones": {f"n{n}": "small" for n in range(9_000)},
}


@pytest.mark.promise("3.7")
@pytest.mark.parametrize("pad", PADS.values(), ids=PADS)
def test_amount_and_payee_cannot_be_hidden_behind_what_is_large(pad: dict[str, Any]) -> None:
    all = pad | {"amount": 4200, "payee": "DE89"}
    for args in (all, all | {"$": 1}, {"order": all}, {"order": all} | pad):
        found = {field.label.removeprefix("order."): field.value for field in fields_of(bound(encode(args)))}
        assert (found["amount"], found["payee"]) == ("4200", "DE89")
    assert headline({"tool": "pay", "args": bound(encode(all))}) == "pay: amount 4200, payee DE89"


def test_a_number_too_long_to_be_shown_is_one_that_is_not_shown() -> None:
    [field] = fields_of(bound(encode({"n": Decimal("1" * 20_000)})))
    assert field.kind == "large" and "20000 bytes" in field.value and field.note.startswith("decimal")


def test_requests_and_decisions_are_those_of_the_vectors() -> None:
    told = json.loads((Path(__file__).parent / "vectors" / "format.json").read_text())["approval"]
    text = told["request"].encode()
    assert canonical(json.loads(text)) == text and request_digest(text) == told["digest"]
    assert check_code(told["digest"]) == told["code"]
    for verdict in ("approve", "deny", "break_glass"):
        signed = decision(told["digest"], verdict)
        assert signed.hex() == told["signed"][verdict] and challenge(signed).hex() == told["challenge"][verdict]
    args = {"to": "Zoë", "amount": Decimal("42.00"), "rate": 1.5}
    fields = {name: value for name, value in json.loads(text).items() if name not in ("args", "kind", "v")}
    assert request_of(fields, encode(args)) == text


@pytest.mark.promise("3.7")
@given(st.dictionaries(
    st.text("abcé_", min_size=1, max_size=4),
    st.recursive(
        st.one_of(st.integers(-10**6, 10**6), st.text(max_size=12), st.decimals(allow_nan=False, allow_infinity=False),
                  st.dates(), st.binary(max_size=9), st.floats(allow_nan=False, allow_infinity=False)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner),
        max_leaves=8,
    ), max_size=4,
))  # fmt: skip
def test_every_value_that_is_signed_is_shown_and_nothing_in_it_can_bite(args: dict[str, Any]) -> None:
    from amends.runtime.plain import plain

    signed = json.loads(request_of(FIELDS, encode(args)))["args"]
    shown = " ".join(f"{field.label} {field.value}" for field in fields_of(signed))
    assert shown == plain(shown)
    for _, value in _values(signed):
        assert plain(value) in shown


def _values(value: Any) -> Iterator[tuple[str, str]]:
    """Every leaf of a bound value, tags left out."""
    if isinstance(value, dict):
        for name, one in value.items():
            if name not in ("$", "t", "type"):
                yield from _values(one)
    elif isinstance(value, list):
        for one in value:
            yield from _values(one)
    elif isinstance(value, str):
        yield "", value
    elif value is not None:
        yield "", {"True": "true", "False": "false"}.get(str(value), str(value))


@pytest.mark.promise("3.7")
def test_what_an_agent_writes_cannot_dress_up() -> None:
    args = {"amount": 4200, "to": "Ann\u202e\u0000\x1b[2J", "memo": "line\nline"}
    request = json.loads(request_of(FIELDS, encode(args)))
    assert headline(request) == "bank.wire: amount 4200, to Ann\\u202e\\x00\\x1b[2J"
    assert [(f.label, f.value, f.kind) for f in fields_of(request["args"])] == [
        ("amount", "4200", "number"), ("memo", "line\\nline", "text"), ("to", "Ann\\u202e\\x00\\x1b[2J", "text"),
    ]  # fmt: skip


def test_names_are_one_however_they_are_written() -> None:
    assert same_person("Ann  Lee", " ann lee") and same_person("José", "Jose\u0301")
    assert not same_person("Ann", "Anna") and not same_person("", "")


# ---- votes through the one door -------------------------------------------------------------------------------------


def wire(world: World) -> Callable[..., Any]:
    def send(amount: int, to: str) -> str:
        world.act(f"{amount} to {to}", f"{amount}{to}{world.calls}")
        return "sent"

    return send


PAY = {"amount": 4200, "to": "DE89"}


@pytest.fixture
def waiting(kit: AgentKit, world: World) -> Asking:
    return Asking(kit, wire(world), dict(PAY), id="pay")


def code_of(work: Callable[[], Any]) -> str:
    with pytest.raises((Refused, BadValue, NotFound)) as refused:
        work()
    assert refused.value.message, "it says what was refused"
    return refused.value.code


@pytest.mark.promise("3.7")
def test_a_review_says_everything_and_the_bytes_to_sign_are_made_of_it(kit: AgentKit, waiting: Asking) -> None:
    seen = waiting.seen()
    request = json.loads(seen.request)
    assert request_digest(seen.request) == seen.digest == waiting.asked.request
    assert (seen.approve, seen.deny) == (decision(seen.digest, "approve"), decision(seen.digest, "deny"))
    assert request["args"] == PAY and request["requester"] == kit.name and len(request["nonce"]) == 43
    assert {field.label: field.value for field in seen.fields} == {"amount": "4200", "to": "DE89"}
    assert {field.label for field in seen.about} == {
        name for name, value in request.items() if name != "args" and value
    }
    assert (seen.have, seen.need, seen.level_word, seen.standing) == (0, 1, "named", PENDING)
    assert seen.code.replace("-", "").lower() == seen.digest[:20]
    assert any("first call" in remark for remark in seen.remarks)
    kit.deny(seen.item, by="ann")
    waiting.end()


@pytest.mark.promise("3.7")
def test_what_is_new_about_a_call_is_said_in_words(kit: AgentKit, world: World) -> None:
    def remarks(number: int, **changed: Any) -> tuple[str, ...]:
        waiting = Asking(kit, wire(world), {**PAY, **changed}, id=f"pay-{number}")
        seen = waiting.seen()
        kit.approve(seen.item, by="Ann")
        assert waiting.end() == "sent"
        return seen.remarks

    assert remarks(1)[0].startswith("The first call of bank.wire")
    assert remarks(2) == ()
    assert remarks(3, to="XX00") == ("A new to: no earlier call of bank.wire has it.",)
    assert remarks(4, amount=4201) == ("The largest amount so far: 4200 was the most.",)


@pytest.mark.promise("3.7")
def test_what_is_new_about_a_call_is_looked_for_once(
    kit: AgentKit, waiting: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = waiting.seen().remarks
    monkeypatch.setattr(signing, "_earlier", None)
    assert waiting.seen().remarks == told != ()


def test_what_the_tool_puts_in_by_default_is_shown_and_signed_too(kit: AgentKit) -> None:
    def send(amount: int, currency: str = "EUR", api_key: str = "sk_live_1", via: Any = object) -> str:
        return currency

    waiting = Asking(kit, send, {"amount": 1}, id="pay", secret=("api_key",))
    seen = waiting.seen()
    assert {f.label: f.value for f in seen.about if f.label.startswith("defaults.")} == {
        "defaults.currency": "EUR", "defaults.api_key": "•••", "defaults.via": "type",
    }  # fmt: skip
    assert b"sk_live_1" not in seen.request
    kit.approve(seen.item, by="Ann")
    assert waiting.end() == "EUR"


@pytest.mark.promise("3.2")
def test_what_a_partial_holds_is_shown_and_signed_too(kit: AgentKit) -> None:
    def send(to: str, pin: Secret[str], amount: int, unit: str = "EUR") -> str:
        return to

    waiting = Asking(kit, functools.partial(functools.partial(send, "DE66"), "1234", unit="USD"), {"amount": 1}, id="p")
    seen = waiting.seen()
    assert {f.label: f.value for f in seen.about if f.label.startswith("defaults.")} == {
        "defaults.to": "DE66", "defaults.pin": "•••", "defaults.unit": "USD",
    }  # fmt: skip
    assert b"1234" not in seen.request
    kit.approve(seen.item, by="Ann")
    assert waiting.end() == "DE66"


@pytest.mark.promise("3.2")
@pytest.mark.parametrize("how", ["argument", "default"])
def test_one_yes_sends_what_was_approved_and_nothing_else_at_a_later_attempt(kit: AgentKit, how: str) -> None:
    sent: list[str] = []

    def send(to: list[str], more: list[str] = []) -> None:  # noqa: B006  (that is what goes wrong)
        sent.append(",".join([*to, *more]))
        (to if how == "argument" else more).append(f"another-{len(sent)}")
        raise ValueError("no")

    waiting = Asking(kit, send, {"to": ["DE66"]}, id="pay", retry=RetryPolicy(3, "constant", 0.0))
    kit.approve(waiting.seen().item, by="Ann")
    assert waiting.code() == "arguments_changed" and sent == ["DE66"]
    told = [r.entry.why for r in kit.log.records() if r.entry.kind in ("step.attempted", "step.failed")]
    assert told == ["arguments_changed"]


@pytest.mark.promise("3.1")
def test_the_first_decision_wins_and_whoever_comes_later_is_told_and_recorded(kit: AgentKit, waiting: Asking) -> None:
    item = waiting.seen().item
    kit.approve(item, by="Ann")
    assert waiting.end() == "sent"
    for by, decide in (("Bob", kit.approve), ("Cid", kit.deny)):
        with pytest.raises(Refused) as late:
            decide(item, by=by)
        assert late.value.code == "decided" and "Ann approved it already" in late.value.message
        assert "sent" in late.value.message and late.value.exit == 1
    votes = [record.entry for record in kit.log.records() if record.entry.kind == "vote.cast"]
    assert [(vote.out, vote.why) for vote in votes] == [("approve", ""), ("approve", "spent"), ("deny", "spent")]


@pytest.mark.promise("3.1")
def test_an_answer_after_the_deadline_is_recorded_and_never_used(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(timeout=0.2)))
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    item = waiting.seen().item
    assert waiting.code() == "expired" and not world.effects
    assert code_of(lambda: kit.approve(item, by="Ann")) == "expired"
    [vote] = [record.entry for record in kit.log.records() if record.entry.kind == "vote.cast"]
    assert vote.why == "expired"
    refusal = next(r.entry for r in kit.log.records() if r.entry.kind == "step.refused")
    assert refusal.why == "expired" and not world.effects


@pytest.mark.promise("3.1")
def test_each_level_is_told_once_in_its_time_with_those_it_names(world: World) -> None:
    levels = (EscalationLevel(("team",), 0), EscalationLevel(("lead", "cfo"), 0.15), EscalationLevel(("all",), 30))
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(timeout=60, levels=levels)))
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    item = waiting.seen().item

    def told() -> list[Any]:
        return [r for r in kit.log.records() if r.entry.kind == "approval.escalated"]

    eventually(lambda: len(told()) == 2)
    assert [(r.entry.level, r.entry.request) for r in told()] == [(n, waiting.asked.request) for n in (1, 2)]
    assert [json.loads(r.blob)[1]["targets"] for r in told()] == [["team"], ["lead", "cfo"]]
    assert kit.inbox()[0]["approval"]["escalated"] == 2
    kit.approve(item, by="Ann")
    assert waiting.end() == "sent" and len(told()) == 2


@pytest.mark.promise("3.1")
def test_a_no_wins_until_the_approval_is_spent(kit: AgentKit) -> None:
    """Two people are asked; one says yes, one no: nothing happens, whoever says yes after that."""
    facts = Facts()
    facts.ask()
    facts.vote("approve", "ann")
    facts.vote("deny", "bob")
    assert standing(facts.state.approvals, REQUEST, 0) == DENIED


def two(world: World, **policy: Any) -> tuple[AgentKit, Asking]:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2, **policy)))
    return kit, Asking(kit, wire(world), dict(PAY), id="pay")


@pytest.mark.promise("3.4")
def test_two_people_are_two_people_and_not_two_names_of_one(world: World) -> None:
    kit, waiting = two(world)
    item = waiting.seen().item
    kit.approve(item, by="Ann Lee")
    assert kit.inbox()[0]["approval"] | {"left_ms": 0} == {
        "request": waiting.asked.request, "have": 1, "need": 2, "level": "named", "left_ms": 0, "escalated": 0,
        "agent_lives": True,
    }  # fmt: skip
    assert code_of(lambda: kit.approve(item, by=" ann  LEE ")) == "already_voted"
    assert not waiting.done and not world.effects
    kit.approve(item, by="Bob")
    assert waiting.end() == "sent"


@pytest.mark.promise("3.1")
def test_whoever_said_yes_may_still_say_no(world: World) -> None:
    kit, waiting = two(world)
    item = waiting.seen().item
    kit.approve(item, by="Ann")
    kit.deny(item, by="Ann", note="I misread it")
    assert waiting.code() == "denied" and not world.effects
    assert code_of(lambda: kit.approve(item, by="Bob")) == "decided"


@pytest.mark.promise("3.3")
@pytest.mark.parametrize("by", ["agent", "Agent", " AGENT ", "Cid", "cid"])
def test_whoever_asks_does_not_approve_nor_does_the_one_it_is_for(world: World, by: str) -> None:
    kit = AgentKit.in_memory(on_behalf_of="Cid")
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    item = waiting.seen().item
    assert code_of(lambda: kit.approve(item, by=by)) == "requester"
    assert code_of(lambda: kit.approve(item, by=by, break_glass=True, reason="x")) == "requester"
    assert not waiting.done
    kit.deny(item, by=by)  # a no is the safe direction
    assert waiting.code() == "denied" and not world.effects


@pytest.mark.promise("3.3")
@pytest.mark.parametrize("by", ["", " ", "\t"])
def test_somebody_decides_by_name(kit: AgentKit, waiting: Asking, by: str) -> None:
    item = waiting.seen().item
    for decide in (kit.approve, kit.deny):
        with pytest.raises(BadValue):
            decide(item, by=by)
    assert not waiting.done
    kit.deny(item, by="Ann")
    waiting.end()


@pytest.mark.promise("3.3")
def test_breaking_the_glass_has_a_reason_is_told_apart_and_is_looked_at_by_somebody_else(world: World) -> None:
    kit, waiting = two(world)
    item = waiting.seen().item
    assert code_of(lambda: kit.approve(item, by="Ann", break_glass=True)) == "bad_value"
    assert code_of(lambda: signing.vote(kit, item, "deny", by="Ann", break_glass=True, reason="x")) == "bad_value"
    kit.approve(item, by="Ann", break_glass=True, reason="the customer waits at the gate")
    assert waiting.end() == "sent"
    [vote] = [record.entry for record in kit.log.records() if record.entry.kind == "vote.cast"]
    assert vote.out == "break_glass"
    [found] = kit.inbox()
    assert (found["kind"], found["tool"], found["saga"]) == ("review", "bank.wire", "pay")
    assert code_of(lambda: kit.accept(found["id"], by="ann", reason="fine")) == "own_review"
    with pytest.raises(BadValue):
        kit.accept(found["id"], by="Bob", reason=" ")
    kit.accept(found["id"], by="Bob", reason="it was urgent")
    assert kit.inbox() == []
    assert code_of(lambda: kit.accept(found["id"], by="Cid", reason="late")) == "decided"


@pytest.mark.promise("3.3")
def test_a_policy_may_leave_no_glass_to_break(world: World) -> None:
    kit, waiting = two(world, allow_break_glass=False)
    item = waiting.seen().item
    assert code_of(lambda: kit.approve(item, by="Ann", break_glass=True, reason="x")) == "no_break_glass"
    kit.deny(item, by="Ann")
    waiting.end()


NOBODY_SEES = "\u200b\u00ad\ufe0f\u202e\u2062\u3164\u2060\u034f\0\u0378"


@pytest.mark.promise("3.3")
@pytest.mark.parametrize("hidden", NOBODY_SEES, ids=lambda one: f"{ord(one):04x}")
def test_letters_that_nobody_sees_make_no_other_person(world: World, hidden: str) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2)), on_behalf_of="Cid")
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    item = waiting.seen().item
    kit.approve(item, by="Ann")
    for by in (f"An{hidden}n", hidden, f"ag{hidden}ent", f"Ci{hidden}d", f"{hidden}Ann"):
        assert code_of(lambda by=by: kit.approve(item, by=by)) == "bad_name", ascii(by)
        assert code_of(lambda by=by: kit.deny(item, by=by)) == "bad_name", ascii(by)
    assert code_of(lambda: kit.approve(item, by="Bob", break_glass=True, reason=hidden)) == "bad_value"
    with pytest.raises(BadValue):
        AgentKit.in_memory(on_behalf_of=f"Ci{hidden}d")
    assert plain_name(f"A{hidden}nn {hidden}LEE") == plain_name("ann lee") and not same_person(hidden, "")
    assert not waiting.done
    kit.deny(item, by="Ann")
    assert waiting.code() == "denied" and not world.effects


# ---- with keys ------------------------------------------------------------------------------------------------------


def signed_by(kit: AgentKit, waiting: Asking, people: People, name: str, **options: Any) -> signing.Receipt:
    seen = waiting.seen()
    return signing.vote(kit, seen.item, "approve", proof=people.yes(name, seen), **options)


@pytest.mark.promise("3.4")
def test_once_a_key_is_enrolled_a_name_is_not_enough(kit: AgentKit, world: World) -> None:
    people = People(kit)
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen = waiting.seen()
    assert seen.level_word == "presence" and {key.person for key in seen.credentials} == {"Ann", "Bob"}
    with pytest.raises(Refused) as low:
        kit.approve(seen.item, by="Ann")
    assert low.value.code == "level_too_low" and low.value.facts["needed"] == "presence"
    receipt = signing.vote(kit, seen.item, "approve", proof=people.yes("Ann", seen), note="fine")
    assert (receipt.by, receipt.standing, LEVELS[receipt.level][0]) == ("Ann", APPROVED, "verification")
    assert waiting.end() == "sent"
    told = next(iter(_stories(kit))).document()["steps"][0]["decisions"]
    assert [(one["by"], one["decision"], one["level"], one["note"]) for one in told] == [
        ("Ann", "approve", "verification", "fine")
    ]
    assert told[0]["key"] == people.keys["Ann"].enrolled().id


def _stories(kit: AgentKit) -> Any:
    from amends.runtime.story import Stories

    return Stories(kit)


@pytest.mark.promise("3.4")
def test_a_no_needs_a_name_and_no_key(kit: AgentKit, world: World) -> None:
    People(kit)
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    kit.deny(waiting.seen().item, by="whoever saw it")
    assert waiting.code() == "denied" and not world.effects


LIES: list[tuple[str, dict[str, Any], str]] = [
    ("a deny is no approve", {"signed": "deny"}, "challenge_mismatch"),
    ("another request", {"signed": "other"}, "challenge_mismatch"),
    ("nobody touched the key", {"flags": 4}, "user_not_present"),
    ("no PIN where it is asked", {"flags": 1}, "user_not_verified"),
    ("another page", {"origin": "http://amends.localhost.evil:8799"}, "origin_not_allowed"),
    ("another port", {"origin": "http://amends.localhost:8800"}, "origin_not_allowed"),
    ("another site", {"rp": "localhost"}, "rp_mismatch"),
    ("a signature that does not hold", {"signature": "AAAA"}, "bad_signature"),
    ("a key nobody enrolled", {"credential": "AAAA"}, "credential_unknown"),
    ("somebody else's name beside it", {"by": "Bob"}, "other_person"),
]


@pytest.mark.promise("3.4")
@pytest.mark.parametrize("lie, code", [row[1:] for row in LIES], ids=[row[0] for row in LIES])
def test_a_vote_that_proves_something_else_is_refused_and_recorded_nowhere(
    world: World, lie: dict[str, Any], code: str
) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(level="verification")))
    people = People(kit)
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen, by = waiting.seen(), lie.pop("by", "") if "by" in (lie := dict(lie)) else ""
    signed = {"deny": seen.deny, "other": decision(OTHER, "approve")}.get(lie.pop("signed", ""), seen.approve)
    size = kit.log.size
    proof = people.keys["Ann"].get(signed, **lie)
    assert code_of(lambda: signing.vote(kit, seen.item, "approve", by=by, proof=proof)) == code
    assert kit.log.size == size and not waiting.done
    kit.deny(seen.item, by="Bob")
    assert waiting.code() == "denied" and not world.effects


# ---- what is written past the door ----------------------------------------------------------------------------------

Forged = tuple[str, dict[str, Any] | None, str]
"""by, proof, reason"""
STRICT: dict[str, Any] = {"level": "verification", "roles": ("approver",)}
FORGED: list[tuple[str, dict[str, Any], str, Callable[[People, Any], Forged], str]] = [
    ("a signed approve is no broken glass", {}, "break_glass",
     lambda p, seen: ("Ann", p.yes("Ann", seen), "x"), "challenge_mismatch"),
    ("nor is one that was not even touched with a PIN", {}, "break_glass",
     lambda p, seen: ("Ann", p.yes("Ann", seen, flags=1), "x"), "challenge_mismatch"),
    ("a signed broken glass is no approve", {}, "approve",
     lambda p, seen: ("Ann", p.keys["Ann"].get(seen.glass), ""), "challenge_mismatch"),
    ("a signed deny is no approve", {}, "approve",
     lambda p, seen: ("Ann", p.no("Ann", seen), ""), "challenge_mismatch"),
    ("a signed deny is no broken glass", {}, "break_glass",
     lambda p, seen: ("Ann", p.no("Ann", seen), "x"), "challenge_mismatch"),
    ("another request", {}, "approve",
     lambda p, seen: ("Ann", p.keys["Ann"].get(decision(OTHER, "approve")), ""), "challenge_mismatch"),
    ("no glass is to be broken", {"allow_break_glass": False}, "break_glass",
     lambda p, seen: ("Ann", p.keys["Ann"].get(seen.glass), "x"), "no_break_glass"),
    ("a broken glass without a reason", {}, "break_glass",
     lambda p, seen: ("Ann", p.keys["Ann"].get(seen.glass), ""), "bad_value"),
    ("a broken glass with a reason that nobody sees", {}, "break_glass",
     lambda p, seen: ("Ann", p.keys["Ann"].get(seen.glass), "\u200b "), "bad_value"),
    ("a broken glass without a key", {}, "break_glass", lambda p, seen: ("Ann", None, "x"), "level_too_low"),
    ("a broken glass by whoever asks", {}, "break_glass",
     lambda p, seen: ("agent", p.keys["agent"].get(seen.glass), "x"), "requester"),
    ("a broken glass by a key nobody enrolled", {}, "break_glass",
     lambda p, seen: ("Ann", SoftPasskey(b"\x66" * 32, credential=b"\x66" * 16).get(seen.glass), "x"),
     "credential_unknown"),
    ("whoever asks", {}, "approve", lambda p, seen: ("agent", p.yes("agent", seen), ""), "requester"),
    ("a name", {}, "approve", lambda p, seen: ("Ann", None, ""), "level_too_low"),
    ("nobody touched the key", {}, "approve",
     lambda p, seen: ("Ann", p.yes("Ann", seen, flags=4), ""), "user_not_present"),
    ("no PIN", {}, "approve", lambda p, seen: ("Ann", p.yes("Ann", seen, flags=1), ""), "user_not_verified"),
    ("without the role", {}, "approve", lambda p, seen: ("Cid", p.yes("Cid", seen), ""), "role_missing"),
    ("somebody else's name", {}, "approve", lambda p, seen: ("Bob", p.yes("Ann", seen), ""), "other_person"),
    ("a revoked key", {}, "approve",
     lambda p, seen: ("Bob", (p.yes("Bob", seen), p.revoke("Bob", "Ann"))[0], ""), "credential_unknown"),
]  # fmt: skip


def forge(
    kit: AgentKit, asked: Any, out: str, by: str, proof: dict[str, Any] | None, reason: str = "", **header: Any
) -> int:
    """Write a vote past the door, its header as good as can be. Its record."""
    told = body(by=encode(by), reason=encode(reason)) if reason else body(by=encode(by))
    given: dict[str, Any] = dict(
        of=asked.saga, step=asked.step, request=asked.request, out=out, person=signing.person_id(kit.engine, by),
        level=VERIFIED if proof else NAMED, credential=proof["credential"] if proof else "", up=True,
    )  # fmt: skip
    draft = fact("vote.cast", body(proof=encode(proof)) if proof else b"", told, **(given | header))
    [entry] = kit.log.commit(lambda state, now: [draft])
    return int(entry.seq)


@pytest.mark.promise("3.4")
@pytest.mark.parametrize("policy, out, made, code", [row[1:] for row in FORGED], ids=[row[0] for row in FORGED])
def test_what_the_door_refuses_is_worth_nothing_when_it_is_written_past_it(
    world: World, policy: dict[str, Any], out: str, made: Callable[[People, Any], Forged], code: str
) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(**(STRICT | policy))))
    people = People(kit, Cid=("admin",), agent=("admin", "approver"))
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen, asked = waiting.seen(), waiting.asked
    by, proof, reason = made(people, seen)
    given: dict[str, Any] = {"by": by, "proof": proof, "break_glass": out == "break_glass", "reason": reason}
    assert code_of(lambda: signing.vote(kit, seen.item, "approve", **given)) == code
    for level in (VERIFIED, FILE, NAMED):
        seq = forge(kit, asked, out, by, proof, reason, level=level)
        assert seq not in signing.verified(kit.engine, keyring.read(kit.log), asked, seen.request)
    assert signing.review(kit, seen.item).standing == PENDING and not waiting.done
    kit.deny(seen.item, by="Ann")
    assert waiting.code() == "denied" and not world.effects


@pytest.mark.promise("3.3")
@pytest.mark.parametrize(
    "by, code", [("agent", "requester"), ("An\u200bn", "bad_name"), ("\u200b", "bad_name")], ids=ascii
)
def test_a_name_that_the_door_refuses_is_worth_nothing_past_it(
    kit: AgentKit, waiting: Asking, world: World, by: str, code: str
) -> None:
    seen = waiting.seen()
    assert code_of(lambda: kit.approve(seen.item, by=by)) == code
    for out in ("approve", "break_glass"):
        seq = forge(kit, waiting.asked, out, by, None, "x")
        assert seq not in signing.verified(kit.engine, keyring.read(kit.log), waiting.asked, seen.request)
    kit.deny(seen.item, by="Ann")
    assert waiting.code() == "denied" and not world.effects


@pytest.mark.promise("3.3")
def test_a_broken_glass_is_signed_as_one_and_counts(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2, **STRICT)))
    people = People(kit)
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen = waiting.seen()
    proof = people.keys["Ann"].get(seen.glass)
    receipt = signing.vote(kit, seen.item, "approve", proof=proof, break_glass=True, reason="the line is down")
    assert receipt.verdict == "break_glass" and waiting.end() == "sent"


@pytest.mark.promise("3.6")
def test_a_counter_that_nobody_signed_costs_no_key(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2)))
    people = People(kit)
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen = waiting.seen()
    ann = base64url(people.keys["Ann"].credential)
    old = people.yes("Ann", seen)
    forge(kit, waiting.asked, "deny", "x", None, credential=ann, counter=1 << 52, why="late")
    forge(kit, waiting.asked, "approve", "x", old | {"signature": "AAAA"}, counter=1 << 51, why="late")
    assert signing.vote(kit, seen.item, "approve", proof=people.yes("Ann", seen)).have == 1
    event = ceremonies.begin(kit, "revoked", credential=base64url(people.keys["Bob"].credential))
    forge(kit, waiting.asked, "deny", "x", None, credential=ann, counter=1 << 52, why="late")
    with pytest.raises(Refused) as last:  # its counter is asked before whether it may
        ceremonies.submit(kit, event, [])
    assert last.value.code == "not_admin"
    ceremonies.submit(kit, event, [people.keys["Ann"].get(event.signed)])
    assert not quarantined(kit)
    kit.deny(seen.item, by="Ann")
    again = Asking(kit, wire(world), dict(PAY), id="again").seen()
    lie = people.yes("Ann", again, counter=2)  # a copy is found out all the same
    assert code_of(lambda: signing.vote(kit, again.item, "approve", proof=lie)) == "counter_went_back"
    assert quarantined(kit)
    kit.deny(again.item, by="Bob")


@pytest.mark.promise("3.1")
def test_a_vote_that_does_not_hold_keeps_nobody_from_voting(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2)))
    people = People(kit)
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen = waiting.seen()
    for _ in range(3):
        forge(kit, waiting.asked, "approve", "Ann", None, level=VERIFIED)
    assert signing.review(kit, seen.item).voted == ()
    assert signing.vote(kit, seen.item, "approve", proof=people.yes("Ann", seen)).have == 1
    assert code_of(lambda: signed_by(kit, waiting, people, "Ann")) == "already_voted"
    signing.vote(kit, seen.item, "approve", proof=people.yes("Bob", seen))
    assert waiting.end() == "sent"


@pytest.mark.promise("3.1")
def test_whoever_voted_by_a_key_that_is_revoked_since_votes_by_another(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2)))
    people = People(kit)
    second = SoftPasskey(b"\x55" * 32, credential=b"\x55" * 16)
    event = ceremonies.begin(kit, "added", key=second.enrolled(person="Ann"))
    ceremonies.submit(kit, event, [second.get(event.signed), people.keys["Ann"].get(event.signed)])
    cid = SoftPasskey(b"\x56" * 32, credential=b"\x56" * 16)
    event = ceremonies.begin(kit, "added", key=cid.enrolled(person="Cid", roles=("admin", "approver")))
    ceremonies.submit(kit, event, [cid.get(event.signed), people.keys["Ann"].get(event.signed)])
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen = waiting.seen()
    signed_by(kit, waiting, people, "Ann")
    people.revoke("Ann", "Bob")
    assert signing.review(kit, seen.item).have == 0
    assert signing.vote(kit, seen.item, "approve", proof=second.get(seen.approve)).have == 1
    signed_by(kit, waiting, people, "Bob")
    assert waiting.end() == "sent"


@pytest.mark.promise("3.4")
def test_a_name_under_which_too_much_is_written_is_told_so(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2)))
    people = People(kit)
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    for _ in range(VOTES_MAX):
        forge(kit, waiting.asked, "approve", "Ann", None, level=VERIFIED)
    assert code_of(lambda: signed_by(kit, waiting, people, "Ann")) == "too_many_votes"
    kit.deny(waiting.seen().item, by="Ann")
    assert waiting.code() == "denied"


@pytest.mark.promise("3.4")
def test_a_key_that_counts_back_is_not_asked_again(kit: AgentKit, world: World) -> None:
    people = People(kit)
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen = waiting.seen()
    lie = people.yes("Ann", seen, counter=1)  # it has counted that already, when the keyring was founded
    assert code_of(lambda: signing.vote(kit, seen.item, "approve", proof=lie)) == "counter_went_back"
    assert any(record.entry.kind == "key.quarantined" for record in kit.log.records())
    honest = people.yes("Ann", seen)
    assert code_of(lambda: signing.vote(kit, seen.item, "approve", proof=honest)) == "credential_unknown"
    assert any(item["kind"] == "key_quarantined" for item in kit.inbox())
    signing.vote(kit, seen.item, "approve", proof=people.yes("Bob", seen))
    assert waiting.end() == "sent"


def quarantined(kit: AgentKit) -> bool:
    kit.log.refresh()
    return any(record.entry.kind == "key.quarantined" for record in kit.log.records())


@pytest.mark.promise("3.6")
def test_an_answer_that_is_handed_in_twice_costs_nobody_a_key(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2)))
    people = People(kit)
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen = waiting.seen()
    yes = people.yes("Ann", seen)
    assert signing.vote(kit, seen.item, "approve", proof=yes).have == 1
    assert code_of(lambda: signing.vote(kit, seen.item, "approve", proof=yes)) == "already_voted"
    assert not quarantined(kit) and signing.review(kit, seen.item).have == 1
    signing.vote(kit, seen.item, "approve", proof=people.yes("Bob", seen))
    assert waiting.end() == "sent"


@pytest.mark.promise("3.6")
@pytest.mark.parametrize("which", ["the count of another answer", "a request that is newer than its last answer"])
def test_a_key_is_quarantined_for_an_answer_that_it_cannot_have_given_earlier_and_for_no_other(
    world: World, which: str
) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2)))
    people = People(kit)
    first = Asking(kit, wire(world), dict(PAY), id="one").seen()
    second = Asking(kit, wire(world), dict(PAY, to="DE90"), id="two").seen()
    late, early = people.yes("Ann", first, counter=7), people.yes("Ann", second, counter=8)
    signing.vote(kit, second.item, "approve", proof=early)
    assert code_of(lambda: signing.vote(kit, first.item, "approve", proof=late)) == "counter_went_back"
    assert not quarantined(kit), "it was signed first, and brought back second"
    if which == "the count of another answer":
        seen, proof = first, people.yes("Ann", first, counter=8)
    else:
        seen = Asking(kit, wire(world), dict(PAY, to="DE91"), id="three").seen()
        proof = people.yes("Ann", seen, counter=7)
    assert code_of(lambda: signing.vote(kit, seen.item, "approve", proof=proof)) == "counter_went_back"
    assert quarantined(kit)
    for item in [one["id"] for one in kit.inbox() if one["kind"] == "approval"]:
        kit.deny(item, by="Bob")


@pytest.mark.promise("3.4")
def test_two_keys_of_one_person_are_one_vote(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2)))
    people = People(kit)
    second = people.keys["Ann"].__class__(b"\x55" * 32, credential=b"\x55" * 16)
    event = ceremonies.begin(kit, "added", key=second.enrolled(person="Ann"))
    ceremonies.submit(kit, event, [second.get(event.signed), people.keys["Ann"].get(event.signed)])
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen = waiting.seen()
    signing.vote(kit, seen.item, "approve", proof=people.yes("Ann", seen))
    assert code_of(lambda: signing.vote(kit, seen.item, "approve", proof=second.get(seen.approve))) == "already_voted"
    assert not waiting.done
    signing.vote(kit, seen.item, "approve", proof=people.yes("Bob", seen))
    assert waiting.end() == "sent"


@pytest.mark.promise("3.4")
def test_a_key_without_the_role_is_refused(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(roles=("approver",))))
    people = People(kit, Cid=("admin",))
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen = waiting.seen()
    assert {key.person for key in seen.credentials} == {"Ann", "Bob"}
    assert code_of(lambda: signed_by(kit, waiting, people, "Cid")) == "role_missing"
    signed_by(kit, waiting, people, "Bob")
    assert waiting.end() == "sent"


@pytest.mark.promise("3.4")
@pytest.mark.parametrize(
    "policy", [{"level": "presence"}, {"level": "second-device"}, {"roles": ("approver",)}], ids=str
)
def test_a_question_that_no_enrolled_key_can_answer_is_refused_at_once(world: World, policy: dict[str, Any]) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(**policy)))
    assert Asking(kit, wire(world), dict(PAY), id="pay").code() == "no_approver" and not world.effects
    assert "step.asked" not in [record.entry.kind for record in kit.log.records()]


@pytest.mark.promise("3.2")
def test_a_key_that_is_revoked_between_yes_and_sending_does_not_count(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2)))
    people = People(kit, Cid=("approver",))
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    signed_by(kit, waiting, people, "Ann")
    assert waiting.seen().have == 1
    people.revoke("Ann", by="Bob")
    assert waiting.seen().have == 0 and kit.inbox()[0]["approval"]["have"] == 0
    signed_by(kit, waiting, people, "Bob")
    assert not waiting.done, "one of two has said yes whose key still counts"
    signed_by(kit, waiting, people, "Cid")
    assert waiting.end() == "sent"
    intent = next(r for r in kit.log.records() if r.entry.kind == "step.intended")
    counted = json.loads(intent.blob.splitlines()[-1])[1]["votes"]
    assert len(counted) == 2 and all(kit.log.record(seq).entry.kind == "vote.cast" for seq in counted)


@pytest.mark.promise("3.1")
def test_a_yes_whose_key_is_revoked_does_not_keep_the_next_level_from_being_told(world: World) -> None:
    levels = (EscalationLevel(("lead",), 0.3),)
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(timeout=60, levels=levels)))
    people = People(kit)
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    touched = people.yes("Ann", waiting.seen())
    held = threading.Event()

    def look(*args: Any) -> bytes | None:  # the asking process is slow: it comes to see the yes after the revocation
        assert held.wait(20)
        return signing.request_text(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "request_text", look)
        signing.vote(kit, waiting.seen().item, "approve", proof=touched)
        people.revoke("Ann", by="Bob")
        held.set()
        eventually(lambda: [r for r in kit.log.records() if r.entry.kind == "approval.escalated"])
    assert not waiting.done and not world.effects
    signed_by(kit, waiting, people, "Bob")
    assert waiting.end() == "sent"


@pytest.mark.promise("3.4")
def test_founding_a_keyring_asks_anew_what_was_asked_of_a_name(kit: AgentKit, world: World) -> None:
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    before = waiting.asked.request
    people = People(kit)
    eventually(lambda: waiting.asked.request != before)
    seen = waiting.seen()
    assert seen.level_word == "presence" and json.loads(seen.request)["supersedes"] == before
    signing.vote(kit, seen.item, "approve", proof=people.yes("Ann", seen))
    assert waiting.end() == "sent"


@pytest.mark.promise("3.3")
def test_the_glass_is_broken_with_a_key_where_there_are_keys(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2, level="verification")))
    people = People(kit, Cid=("admin",))
    waiting = Asking(kit, wire(world), dict(PAY), id="pay")
    seen = waiting.seen()
    given: dict[str, Any] = {"break_glass": True, "reason": "the line is down"}
    assert code_of(lambda: signing.vote(kit, seen.item, "approve", by="Cid", **given)) == "level_too_low"
    touched = people.keys["Cid"].get(seen.glass, flags=1)  # no PIN, no such role, alone: that is what is set aside
    signing.vote(kit, seen.item, "approve", proof=touched, **given)
    assert waiting.end() == "sent" and [item["kind"] for item in kit.inbox()] == ["review"]


# ---- asking anew ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("3.2")
def test_arguments_that_change_while_people_think_are_asked_anew(kit: AgentKit, world: World) -> None:
    kwargs: dict[str, Any] = {"amount": 4200, "to": ["DE89"]}
    waiting = Asking(kit, lambda amount, to: world.act(f"{amount} to {to[0]}", "k"), kwargs, id="pay")
    first = waiting.seen()
    kwargs["to"][0] = "XX99"
    kit.approve(first.item, by="Ann")
    eventually(lambda: waiting.asked.request != first.digest)
    assert not world.effects
    second = waiting.seen()
    assert json.loads(second.request)["args"]["to"] == ["XX99"]
    assert code_of(lambda: kit.approve(first.item, by="Bob")) == "superseded"
    kit.approve(second.item, by="Ann")
    waiting.end()
    assert world.standing == ["4200 to XX99"]


@pytest.mark.promise("3.2")
@pytest.mark.parametrize("verdict", ["require_approval", "allow", "block"])
def test_a_policy_that_changes_while_people_think_is_asked_anew(tmp_path: Path, world: World, verdict: str) -> None:
    with AgentKit(home=tmp_path / "home") as kit:
        waiting = Asking(kit, wire(world), dict(PAY), id="pay")
        first = waiting.seen()
        assert kit.home is not None
        rule = f'version = 1\n[[rules]]\nname = "wires"\ntools = ["bank.wire"]\nverdict = "{verdict}"\n'
        kit.home.policy.write_text(rule)
        kit.approve(first.item, by="Ann")
        if verdict == "block":
            assert waiting.code() == "blocked" and not world.effects
            return
        eventually(lambda: waiting.asked.request != first.digest)
        assert not world.effects and json.loads(waiting.seen().request)["policy"]
        kit.approve(waiting.seen().item, by="Ann")
        assert waiting.end() == "sent" and len(world.effects) == 1


@pytest.mark.promise("3.2")
@pytest.mark.parametrize("second", [dict(PAY), {"amount": 4201, "to": "DE89"}], ids=["identical", "one digit"])
def test_a_second_call_asks_again(kit: AgentKit, world: World, second: dict[str, Any]) -> None:
    answers: list[Any] = []

    def both(amount: int, to: str) -> str:
        answers.append(wire(world)(amount, to))
        return "sent"

    waiting = Asking(kit, both, dict(PAY), id="one")
    first = waiting.asked.request
    kit.approve(waiting.seen().item, by="Ann")
    assert waiting.end() == "sent"
    again = Asking(kit, both, second, id="two")
    assert again.asked.request != first and not again.done and len(answers) == 1
    kit.deny(again.seen().item, by="Ann")
    assert again.code() == "denied" and len(answers) == 1


@pytest.mark.promise("3.2")
def test_a_second_identical_call_in_the_same_saga_asks_again(kit: AgentKit, world: World) -> None:
    sent: list[Any] = []

    def work(amount: int, to: str) -> str:
        sent.append(amount)
        return "sent"

    def go() -> None:
        with kit.transaction("pay") as saga:
            for _ in range(2):
                saga.execute("bank.wire", work, dict(PAY), semantics=IRREVERSIBLE)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    for count in (1, 2):
        eventually(lambda count=count: [i for i in kit.inbox() if i["step"] == count])
        assert len(sent) == count - 1
        kit.approve(kit.inbox()[0]["id"], by="Ann")
    thread.join(10)
    assert len(sent) == 2
    spent = [r.entry.request for r in kit.log.records() if r.entry.kind == "step.intended"]
    assert len(set(spent)) == 2


@pytest.mark.promise("3.2")
def test_a_step_that_failed_is_asked_about_again_also_under_its_own_key(kit: AgentKit, world: World) -> None:
    """It takes an idempotency key and is called once more under the same one: that is a second sending all the same."""
    tried: list[str] = []

    def send(amount: int, to: str, idempotency_key: str) -> str:
        tried.append(idempotency_key)
        if len(tried) == 1:
            raise ValueError("the far side says no")
        return "sent"

    def go() -> None:
        with kit.transaction("pay") as saga:
            for _ in range(2):
                with suppress(ValueError):
                    saga.execute("bank.wire", send, dict(PAY), semantics=IRREVERSIBLE, key="k")

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    for count in (1, 2):
        eventually(lambda count=count: kit.inbox() or len(tried) >= count)
        assert len(tried) == count - 1, "nobody said yes to this sending"
        kit.approve(kit.inbox()[0]["id"], by="Ann")
        eventually(lambda count=count: len(tried) == count)
    thread.join(10)
    requests = [r.entry.request for r in kit.log.records() if r.entry.kind == "step.intended"]
    assert len(set(tried)) == 1 and len(set(requests)) == 2 and all(requests)


def test_a_compensable_step_may_be_asked_about_too(world: World) -> None:
    rule = Rule("wires", tool_is("bank.wire"), Verdict.REQUIRE_APPROVAL)
    kit = AgentKit.in_memory(gate=PreFlightGate((rule,)))
    waiting = Asking(kit, wire(world), dict(PAY), id="pay", semantics=COMPENSABLE)
    assert waiting.asked and kit.inbox()[0]["reason"] == "A step waits for a named person."
    kit.approve(waiting.seen().item, by="Ann")
    assert waiting.end() == "sent"


def test_the_hard_cap_and_the_look_are_what_they_are() -> None:
    assert asking.LOOK <= 1.0 and SECOND_DEVICE < QUORUM
