"""The planner: given a family that unwinds and the time, what must happen next. By example, and for any family."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amends.runtime import due as d
from amends.runtime import step as s
from amends.runtime.saga import CONCLUDING, UNWINDING, Saga, orphaned, settled
from amends.store.clock import Now

NOW = Now(1, 1, 1_000, 1_000)


def step(number: int, state: str, **fields: Any) -> s.Step:
    defaults: dict[str, Any] = {"seq": number * 10, "inv": "derived", "handler": "h", "key": f"k{number}"}
    if state not in (s.INTENDED, s.UNKNOWN, s.WAITING):
        defaults["ended_seq"] = number * 10 + 5
    return s.Step(number, "t", fields.pop("sem", "compensable"), state, **{**defaults, **fields})


def family(*steps: s.Step, on_failure: str = "", escalated: dict[int, str] | None = None) -> list[Saga]:
    saga = Saga("x", 1, 1, 1, "d", UNWINDING, on_failure=on_failure, escalated=escalated or {})
    saga.steps = {each.number: each for each in steps}
    return [saga]


def next_of(*steps: s.Step, **more: Any) -> d.Action:
    return d.due(family(*steps, **more), NOW)


def test_nothing_left_is_the_end() -> None:
    assert isinstance(next_of(), d.End)
    settled_ones = [s.COMPENSATED, s.FAILED, s.ACCEPTED, s.REFUSED]
    assert isinstance(next_of(*(step(number, state) for number, state in enumerate(settled_ones, 1))), d.End)


@pytest.mark.promise("1.7")
def test_the_youngest_goes_first_by_completion() -> None:
    early = step(2, s.DONE, ended_seq=90)
    action = next_of(step(1, s.DONE), early, step(3, s.DONE, ended_seq=40))
    assert isinstance(action, d.Undo) and action.step is early


@pytest.mark.promise("1.14")
def test_what_nobody_knows_is_settled_before_anything_is_undone() -> None:
    action = next_of(step(1, s.UNKNOWN, probe=1), step(2, s.DONE))
    assert isinstance(action, d.Probe) and action.step.number == 1


@pytest.mark.promise("1.8")
def test_an_inverse_waits_until_a_lost_effect_has_had_time_to_land() -> None:
    lost = step(1, s.UNKNOWN, lost_lived=400, settle_ms=2_000)
    action = d.due(family(lost), NOW)
    assert action == d.Wait(2_400)
    assert isinstance(d.due(family(lost), Now(1, 1, 1, 2_400)), d.Undo)


@pytest.mark.parametrize(
    ("given_step", "why"),
    [
        (step(1, s.DONE, inv="none"), "orphaned"),
        (step(1, s.DONE, inv="none", sem="irreversible"), "irreversible"),
        (step(1, s.DONE, inv="human"), "human_task"),
        (step(1, s.UNKNOWN, inv="none"), "unknown_without_inverse"),
        (step(1, s.UNKNOWN, probe=1, settled="cannot_tell"), "cannot_tell"),
        (step(1, s.UNDO_LOST), "undo_answer_lost"),
    ],
)
@pytest.mark.promise("4.3")
def test_what_cannot_be_undone_safely_goes_to_a_person(given_step: s.Step, why: str) -> None:
    action = next_of(given_step)
    assert isinstance(action, d.Escalate) and action.why == why


@pytest.mark.promise("4.1")
def test_an_inverse_whose_answer_was_lost_is_repeated_only_if_that_is_safe() -> None:
    assert isinstance(next_of(step(1, s.UNDO_LOST, again="keyed")), d.Undo)
    assert isinstance(next_of(step(1, s.UNDO_LOST, again="idempotent")), d.Undo)
    assert isinstance(next_of(step(1, s.UNDO_LOST, probe=1)), d.Probe)
    assert isinstance(next_of(step(1, s.UNDO_LOST, probe=1, settled="present")), d.Undo)
    assert isinstance(next_of(step(1, s.UNDO_LOST, probe=1, settled="cannot_tell")), d.Escalate)


@pytest.mark.promise("1.7")
def test_a_failed_inverse_halts_what_is_older_unless_told_to_go_on() -> None:
    older, stuck = step(1, s.DONE), step(2, s.STUCK)
    assert isinstance(next_of(older, stuck, escalated={2: "compensation_failed"}), d.Rest)
    action = next_of(older, stuck, escalated={2: "compensation_failed"}, on_failure="continue")
    assert isinstance(action, d.Undo) and action.step is older


@pytest.mark.parametrize("held_up", [step(2, s.DONE, inv="none"), step(2, s.DONE, inv="human")])
def test_a_step_that_nothing_can_undo_holds_nobody_up(held_up: s.Step) -> None:
    action = next_of(step(1, s.DONE), held_up, escalated={2: "orphaned"})
    assert isinstance(action, d.Undo) and action.step.number == 1


def test_questions_are_withdrawn_and_lost_work_is_said() -> None:
    assert isinstance(next_of(step(1, s.WAITING)), d.Withdraw)
    lost, undoing = next_of(step(1, s.INTENDED)), next_of(step(1, s.UNDOING))
    assert isinstance(lost, d.Lost) and lost.kind == "step.lost"
    assert isinstance(undoing, d.Lost) and undoing.kind == "undo.lost"


@pytest.mark.promise("1.8")
def test_a_late_one_is_undone_under_its_own_key() -> None:
    action = next_of(step(1, s.DONE, late=True))
    assert isinstance(action, d.Undo) and action.scope == "undo/late"


# ---- what is frozen, and what is tentative ---------------------------------------------------------------------------


@pytest.mark.promise("2.2")
@pytest.mark.parametrize("state", [state for state in s.TABLE if state])
@pytest.mark.parametrize("phase", [UNWINDING, CONCLUDING])
def test_nothing_is_due_in_a_family_that_is_frozen(state: str, phase: str) -> None:
    whole = family(step(1, state, resource="r", confirm="declared"))
    whole[0].phase = phase
    action = d.due(whole, NOW, "quarantined")
    assert isinstance(action, d.Frozen) and action.why == "quarantined"


def to_confirm(*steps: s.Step, escalated: dict[int, str] | None = None) -> d.Action:
    whole = family(*steps, escalated=escalated)
    whole[0].phase = CONCLUDING
    return d.due(whole, NOW)


def tentative(number: int, state: str = s.DONE, **fields: Any) -> s.Step:
    return step(number, state, **{"resource": "00ff", "confirm": "declared", "confirmer": "c", **fields})


@pytest.mark.promise("2.6")
def test_what_is_tentative_is_confirmed_in_order_of_completion_and_nothing_else_is_touched() -> None:
    action = to_confirm(step(1, s.DONE), tentative(3), tentative(2, ended_seq=99), step(4, s.DONE, inv="none"))
    assert isinstance(action, d.Confirm) and action.step.number == 3
    assert isinstance(to_confirm(step(1, s.DONE), tentative(2, s.CONFIRMED), tentative(3, s.ACCEPTED)), d.End)


class Compared(int):
    """A number that counts how often it is compared."""

    count = 0

    def __lt__(self, other: int) -> bool:
        Compared.count += 1
        return int(self) < int(other)


def test_the_oldest_that_is_tentative_is_found_without_sorting_the_others() -> None:
    rng = random.Random(7)
    ages = rng.sample(range(1, 1000), 200)
    steps = [tentative(number, ended_seq=Compared(age)) for number, age in enumerate(ages, 1)]
    escalated = {number: "confirm_failed" for number in rng.sample(range(1, 201), 50)}
    Compared.count = 0
    action = to_confirm(*steps, escalated=escalated)
    left = [each for each in steps if each.number not in escalated]
    assert Compared.count < len(steps) and isinstance(action, d.Confirm)
    assert action.step.ended_seq == sorted(each.ended_seq for each in left)[0]


@pytest.mark.promise("2.6")
def test_a_confirmation_whose_answer_was_lost_is_repeated_only_if_that_is_safe() -> None:
    dead = to_confirm(tentative(1, s.CONFIRMING))
    assert isinstance(dead, d.Lost) and dead.kind == "confirm.lost"
    assert isinstance(to_confirm(tentative(1, s.CONFIRM_LOST, confirm_again="keyed")), d.Confirm)
    action = to_confirm(tentative(1, s.CONFIRM_LOST))
    assert isinstance(action, d.Escalate) and action.why == "confirm_answer_lost"
    assert isinstance(to_confirm(tentative(1, s.CONFIRM_LOST, settled="present")), d.Confirm)  # a person's word


@pytest.mark.promise("2.6")
def test_a_confirmation_that_needs_a_person_holds_up_no_other_and_keeps_the_saga_open() -> None:
    failed = tentative(1, s.UNCONFIRMED)
    action = to_confirm(failed, tentative(2), escalated={1: "confirm_failed"})
    assert isinstance(action, d.Confirm) and action.step.number == 2
    assert isinstance(to_confirm(failed, tentative(2, s.CONFIRMED), escalated={1: "confirm_failed"}), d.Rest)
    assert isinstance(to_confirm(failed), d.Confirm)  # tried again
    by_hand = to_confirm(tentative(1, confirm="human"))
    assert isinstance(by_hand, d.Escalate) and by_hand.why == "confirm_by_hand"


@pytest.mark.promise("2.6")
def test_where_nothing_has_to_run_the_fate_of_what_is_tentative_is_written_down() -> None:
    confirmed = to_confirm(tentative(1, confirm=""))
    assert isinstance(confirmed, d.Resolve) and confirmed.kind == "confirm.done"
    cancelled = next_of(tentative(1, inv="none"))
    assert isinstance(cancelled, d.Resolve) and cancelled.kind == "undo.done"
    assert isinstance(next_of(tentative(1)), d.Undo)


@pytest.mark.promise("1.13")
def test_a_family_is_undone_as_one() -> None:
    outer = family(step(1, s.DONE, ended_seq=10), step(2, s.DONE, ended_seq=50))[0]
    inner = Saga("y", 20, 1, 1, "d", UNWINDING, parent="x", steps={1: step(1, s.DONE, ended_seq=30)})
    order = [(saga.id, each.number) for saga, each in d.unwinding_order([outer, inner])]
    assert order == [("x", 2), ("y", 1), ("x", 1)]


ONLY_CONFIRMED = {s.CONFIRMING, s.CONFIRM_LOST, s.UNCONFIRMED, s.CONFIRMED}
"""States of a step whose saga is to stand."""

STEPS = st.builds(
    lambda number, state, inv, again, probe, settled_, settle, late: step(
        number,
        state,
        inv=inv,
        again=again,
        probe=probe,
        settled=settled_,
        settle_ms=settle,
        late=late and state in (s.DONE, s.UNDOING, s.UNDO_LOST),
    ),  # fmt: skip
    st.integers(1, 6),
    st.sampled_from([state for state in s.TABLE if state and state not in ONLY_CONFIRMED]),
    st.sampled_from(["none", "declared", "derived", "human"]),
    st.sampled_from(["", "keyed", "idempotent"]),
    st.integers(0, 1),
    st.sampled_from(["", "cannot_tell"]),
    st.sampled_from([0, 10_000]),
    st.booleans(),
)


@given(st.lists(STEPS, unique_by=lambda each: each.number), st.sampled_from(["", "continue"]), st.data())
def test_for_any_family_the_plan_ends_skips_nothing_and_never_undoes_what_is_settled(
    steps: list[s.Step], on_failure: str, data: st.DataObject
) -> None:
    """Play the plan with answers drawn at random; it comes to an end, and then nothing stands unsaid."""
    whole = family(*steps, on_failure=on_failure)
    saga, now = whole[0], NOW
    for _ in range(200):
        action = d.due(whole, now)
        if isinstance(action, (d.End, d.Rest)):
            break
        if isinstance(action, d.Wait):
            assert action.until > now.lived
            now = now._replace(lived=action.until)
            continue
        each = action.step
        assert not settled(each) and each.state != s.ACCEPTED
        if isinstance(action, d.Lost):
            each.state = s.UNKNOWN if action.kind == "step.lost" else s.UNDO_LOST
        elif isinstance(action, d.Withdraw):
            each.state = s.REFUSED
        elif isinstance(action, d.Probe):
            each.settled = data.draw(st.sampled_from(["present", "absent", "cannot_tell"]))
            if each.settled == "absent":
                each.state, each.late = (s.FAILED if each.state == s.UNKNOWN else s.COMPENSATED), False
            elif each.settled == "present" and each.state == s.UNKNOWN:
                each.state, each.ended_seq = s.DONE, each.seq + 1
        elif isinstance(action, d.Escalate):
            assert each.number not in saga.escalated
            saga.escalated[each.number] = action.why
        else:
            assert each.inv in ("declared", "derived") or each.state in (s.UNDO_LOST, s.STUCK, s.COMPENSATED)
            if data.draw(st.booleans()):
                each.state, each.late = s.COMPENSATED, False
            else:
                each.state = s.STUCK
                saga.escalated[each.number] = "compensation_failed"
    else:
        raise AssertionError("the plan does not end")
    left = [each for each in steps if not settled(each) and each.state != s.ACCEPTED]
    if isinstance(action, d.End):
        assert not left
    else:
        assert saga.escalated
        if on_failure == "continue":
            assert all(each.number in saga.escalated for each in left)
        elif any(each.number not in saga.escalated for each in left):  # halted at one that could be undone
            assert any(not orphaned(saga.steps[n]) and saga.steps[n].inv != "human" for n in saga.escalated)


@pytest.mark.promise("1.7")
def test_the_youngest_is_the_first_of_the_order_whatever_a_family_has_gone_through() -> None:
    """The quick look and the whole order are one rule."""
    draw = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    states = [*s.TABLE][1:]
    seen = 0
    for _ in range(300):
        family = [
            Saga(f"s{n}", n, 0, 1, "d", steps={
                k: s.Step(k, "t", "compensable", draw.choice(states), seq=draw.randrange(99) * 2 + n % 2,
                        ended_seq=draw.randrange(9), late=draw.random() < 0.2, provisional=draw.random() < 0.3)
                for k in range(draw.randrange(6))
            })
            for n in range(draw.randrange(1, 4))
        ]  # fmt: skip
        order = d.unwinding_order(family)
        assert d._youngest(family) == (order[0] if order else None)
        seen += bool(order)
    assert seen > 100
