"""Where arguments come from: a tag speaks for its value, is gone before the tool runs, and no tag counts as model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amends import COMPENSABLE, REVERSIBLE, AgentKit, Refused, SagaAborted, tool
from amends.runtime.gate.policy_file import Policy
from amends.runtime.gate.provenance import (
    TAGS,
    Demand,
    Tagged,
    check_provenance,
    demand,
    demands,
    derived,
    model,
    sourced,
    untag,
    untagged_call,
    user,
)
from amends.runtime.gate.question import GateCall
from amends.runtime.gate.rules import PreFlightGate
from amends.runtime.semantics import ActionSemantics
from amends.runtime.values import Secret
from amends.store.errors import BadValue

PROMISE = pytest.mark.promise("2.7")


@pytest.fixture(autouse=True)
def _nobody_has_tagged_anything(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Tagged, "any", False)
    yield


def orders(count: int) -> Any:
    """Of one value, all the ways to tag it."""
    return (user(count), sourced(count, "a.csv#3"), derived(count, "a sum"), model(count))


# -- taking tags off -----------------------------------------------------------------------------------------------


@PROMISE
def test_a_tag_is_taken_off_and_told() -> None:
    told = untag(dict(zip("abcd", orders(5), strict=True)) | {"e": 5})
    assert told.kwargs == dict.fromkeys("abcde", 5)
    assert told.tags == dict(zip("abcd", TAGS, strict=True))
    assert told.notes == {"b": {"tag": "sourced", "note": "a.csv#3"}, "c": {"tag": "derived", "note": "a sum"}}


PARTS = [
    ([user(1), user(2)], [1, 2], "user"),
    ((sourced(1, "r"),), (1,), "sourced"),
    ({"a": user(1), "b": {"c": user(2)}}, {"a": 1, "b": {"c": 2}}, "user"),
    ([user(1), 2], [1, 2], "model"),
    ([user(1), model(2)], [1, 2], "model"),
    ([user(1), []], [1, []], "model"),
    ([user(1), sourced(2, "r")], [1, 2], "derived"),
    ([user(1), derived(2, "n")], [1, 2], "derived"),
    (user([1, {"a": 2}]), [1, {"a": 2}], "user"),
    (user([1, model(2)]), [1, 2], "model"),
    (user([1, sourced(2, "r")]), [1, 2], "derived"),
    (derived([user(1), user(2)], "sum"), [1, 2], "derived"),
    (derived([user(1), model(2)], "sum"), [1, 2], "model"),
    (derived(user(1), "doubled"), 1, "derived"),
    (derived(model(1), "doubled"), 1, "model"),
    (user([]), [], "user"),
    ([1, [2]], [1, [2]], None),
    ([], [], None),
]


@PROMISE
@pytest.mark.parametrize(("given", "plain", "tag"), PARTS, ids=[f"{n} {row[0]!r}" for n, row in enumerate(PARTS)])
def test_an_argument_made_of_parts_is_no_better_than_its_parts(given: Any, plain: Any, tag: str | None) -> None:
    Tagged.any = True
    told = untag({"x": given})
    assert told.kwargs == {"x": plain} and told.tags.get("x") == tag


def test_notes_say_which_part_they_are_about() -> None:
    lines = [{"price": sourced(1, {"file": "a.csv", "row": 3})}, {"price": derived(2, "doubled")}]
    told = untag({"lines": lines})
    assert told.notes == {
        "lines.0.price": {"tag": "sourced", "note": {"file": "a.csv", "row": 3}},
        "lines.1.price": {"tag": "derived", "note": "doubled"},
    }


def test_what_is_not_tagged_is_not_copied() -> None:
    plain: dict[str, Any] = {"a": [1, {"b": 2}], "c": 3}
    assert untag(plain).kwargs is plain, "nobody has tagged anything in this process"
    lines = [user(1)]
    told = untag(plain | {"d": lines})
    assert told.kwargs["a"] is plain["a"] and isinstance(lines[0], Tagged), "the caller's list is left alone"


PLAIN = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    | st.lists(inner, max_size=2).map(tuple),
    max_leaves=12,
)  # fmt: skip


@st.composite
def tagged(draw: Any, value: Any) -> Any:
    """The value with tags strewn over it."""
    if isinstance(value, dict):
        made: Any = {key: draw(tagged(one)) for key, one in value.items()}
    elif isinstance(value, list | tuple):
        made = type(value)(draw(tagged(one)) for one in value)
    else:
        made = value
    wrap = draw(st.sampled_from([None, user, lambda v: sourced(v, "r"), lambda v: derived(v, "n"), model]))
    return made if wrap is None else wrap(made)


def bare(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return not isinstance(value, Tagged) and all(map(bare, inner))


@PROMISE
@given(st.data(), PLAIN)
def test_the_tool_sees_the_value_that_was_tagged(data: st.DataObject, value: Any) -> None:
    made = data.draw(tagged(value))
    kept = copy.deepcopy(value)
    told = untag({"x": made})
    assert told.kwargs == {"x": value} == {"x": kept} and bare(told.kwargs["x"])
    assert type(told.kwargs["x"]) is type(value)
    assert told.tags.get("x", "model") in TAGS


def test_what_holds_itself_or_is_small_on_paper_only_ends() -> None:
    user(1)
    loop: list[Any] = [1]
    loop.append(loop)
    assert untag({"x": loop}).kwargs["x"] is loop
    wide: Any = [user(1)]
    for _ in range(50):
        wide = [wide, wide]
    told = untag({"x": wide})
    assert told.tags == {"x": "user"}
    inner = told.kwargs["x"]
    while isinstance(inner, list):
        inner = inner[0]
    assert inner == 1


@PROMISE
def test_a_call_outside_any_saga_gets_plain_values() -> None:
    assert untagged_call((user(1), [user(2)]), {"x": model(3)}) == ((1, [2]), {"x": 3})

    @tool("t.add", semantics=REVERSIBLE)
    def add(a: int, b: int) -> int:
        return a + b

    assert add(user(1), b=user(2)) == 3


# -- what is refused -----------------------------------------------------------------------------------------------

MISUSE = [
    ("a source without a receipt", lambda: sourced(1, "")),
    ("a source with a receipt of nothing", lambda: sourced(1, {})),
    ("a receipt that cannot be kept", lambda: sourced(1, {"a": object()})),
    ("a receipt that is none", lambda: sourced(1, None)),
    ("a computation without a note", lambda: derived(1, " ")),
    ("a computation with half a character", lambda: derived(1, "\ud800")),
    ("a tag on a tag", lambda: user(sourced(1, "r"))),
    ("a tag on the model's", lambda: sourced(model(1), "r")),
    ("tags that are no mapping", lambda: untag({"a": 1}, "user")),  # type: ignore[arg-type]
    ("a tag that nobody knows", lambda: untag({"a": 1}, {"a": "human"})),
    ("a tag for nothing", lambda: untag({"a": 1}, {"b": "user"})),
    ("two tags for one value", lambda: untag({"a": model(1)}, {"a": "user"})),
    ("a demand for everything", lambda: demand(list(TAGS))),
    ("a demand for nothing", lambda: demand([])),
    ("a demand in other words", lambda: demand({"refuse": ["model"]})),
    ("a demand for a number", lambda: demand(5)),
    ("a demand for what nobody knows", lambda: demand(["human"])),
    ("demands that are a list", lambda: demands(["amount"])),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("what", "make"), MISUSE, ids=[row[0] for row in MISUSE])
def test_nonsense_is_refused_in_a_sentence(what: str, make: Any) -> None:
    with pytest.raises(BadValue) as refused:
        make()
    assert refused.value.message and refused.value.exit == 2


def test_a_tag_may_also_be_stated_beside_the_arguments() -> None:
    told = untag({"a": 1, "b": user(2)}, {"a": "sourced", "b": "user"})
    assert told.tags == {"a": "sourced", "b": "user"} and told.kwargs == {"a": 1, "b": 2}


def test_a_tag_is_in_no_set_and_in_no_key() -> None:
    with pytest.raises(TypeError):
        {user(1)}  # noqa: B018
    assert repr(user(1)) == "user(1)"


# -- what a policy demands -----------------------------------------------------------------------------------------

DEMANDS = [
    (["user"], {"user"}, False),
    ("user", {"user"}, False),
    (["sourced", "user"], {"user", "sourced"}, False),
    ({"prohibit": ["model"]}, {"user", "sourced", "derived"}, True),
    ({"prohibit": ["model", "derived"]}, {"user", "sourced"}, True),
]


@PROMISE
@pytest.mark.parametrize(("said", "allowed", "prohibits"), DEMANDS, ids=[str(row[0]) for row in DEMANDS])
@pytest.mark.parametrize("tag", [*TAGS, None])
def test_a_demand_takes_what_it_says(said: Any, allowed: set[str], prohibits: bool, tag: str | None) -> None:
    assert demand(demand(said)) == Demand(tuple(one for one in TAGS if one in allowed), prohibits)
    call = GateCall("t", ActionSemantics.COMPENSABLE, {"a": 1}, provenance={"a": tag} if tag else {})
    refused = check_provenance({"a": demand(said)}, call)
    if (tag or "model") in allowed:
        assert refused is None
    else:
        assert refused is not None
        assert refused.code == ("provenance_prohibited" if prohibits else "provenance_missing")
        assert ("untagged, which counts as model" in refused.said) == (tag is None)


@PROMISE
def test_every_argument_that_is_wrong_is_named_at_once() -> None:
    call = GateCall(
        "t", ActionSemantics.COMPENSABLE, {"a": 1, "b": 2, "c": 3}, provenance={"b": "derived", "c": "user"}
    )
    refused = check_provenance(demands({"a": "user", "b": ["user"], "c": ["user"], "d": ["user"]}), call)
    assert refused is not None and [one["argument"] for one in refused.facts["arguments"]] == ["a", "b"]
    assert "a has to be user" in refused.said and "b has to be user and is derived" in refused.said


# -- through a step ------------------------------------------------------------------------------------------------

GATE = PreFlightGate(provenance={"bank.pay": {"amount": ["user", "sourced"]}})


def pay(amount: Any, memo: str = "") -> Any:
    assert type(amount) is not Tagged
    return {"paid": amount}


@PROMISE
@pytest.mark.parametrize("semantics", [REVERSIBLE, COMPENSABLE])
def test_an_amount_that_the_model_made_up_is_not_paid(semantics: Any) -> None:
    paid: list[Any] = []
    with AgentKit.in_memory(gate=GATE) as kit:
        for amount in (5, model(5), derived(5, "a guess")):
            with pytest.raises(SagaAborted) as aborted, kit.transaction() as saga:
                saga.execute("bank.pay", lambda amount: paid.append(amount), {"amount": amount}, semantics=semantics)
            assert isinstance(aborted.value.cause, Refused) and aborted.value.cause.code == "provenance_missing"
        assert paid == []
        with kit.transaction() as saga:
            for amount in (user(5), sourced(5, "invoice.pdf#2")):
                assert saga.execute("bank.pay", pay, {"amount": amount}, semantics=semantics) == {"paid": 5}
            stated = {"amount": "user"}
            saga.execute("bank.pay", pay, {"amount": 5}, semantics=semantics, provenance=stated)


def test_a_resumed_step_is_the_same_step_whatever_its_tags() -> None:
    with AgentKit.in_memory(gate=GATE) as kit:
        for amount in (user(5), sourced(5, "invoice.pdf#2")):
            with kit.transaction(id="order-1") as saga:
                assert saga.execute("bank.pay", pay, {"amount": amount}, semantics=COMPENSABLE) == {"paid": 5}


@dataclass
class Line:
    price: Any


@pytest.mark.parametrize("hidden", [Line(user(5)), Secret(user(5)), {1: user(5)}], ids=repr)
def test_a_tag_where_it_is_not_looked_for_never_reaches_the_tool(hidden: Any) -> None:
    with AgentKit.in_memory() as kit, kit.transaction() as saga, pytest.raises(BadValue):
        saga.execute("bank.pay", pay, {"amount": hidden}, semantics=COMPENSABLE)


def test_without_a_demand_tags_change_nothing() -> None:
    question = Policy(None).prepare(
        GateCall("t", ActionSemantics.REVERSIBLE, {"a": 1}, provenance={"a": "model"}), meter=str, saga="s", root="r"
    )
    assert question.refused is None and question.ruling.verdict == "allow"
