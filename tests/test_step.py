"""The life of a step: the table allows what it allows, in every state and for every kind, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amends.runtime import step as s
from amends.runtime.facts import KINDS
from amends.runtime.saga import orphaned, settled
from amends.store.entry import Entry
from amends.store.errors import Illegal

OUTS = ["", "done", "failed", "present", "absent", "cannot_tell", "approved", "denied", "unknown", "already", "nothing"]
STEP_KINDS = sorted(kind for kind in KINDS if kind.startswith(("step.", "undo.", "confirm.")))


def entry(kind: str, seq: int = 10, **fields: Any) -> Entry:
    defaults = {"tool": "t", "sem": "compensable"} if kind in ("step.intended", "step.carried", "step.asked") else {}
    return Entry(seq, "0" * 64, seq, kind, saga="x", n=1, step=1, **{**defaults, **fields})


def in_state(state: str, **fields: Any) -> s.Step | None:
    return s.Step(1, "t", "compensable", state, seq=1, **fields) if state else None


def leads_to(state: str, kind: str, out: str) -> str | None:
    there = s.TABLE[state].get(kind)
    return s.OUT[kind][state].get(out) if there == s.BY_OUT else there


@pytest.mark.parametrize("kind", STEP_KINDS)
@pytest.mark.parametrize("state", list(s.TABLE))
def test_a_fact_that_is_not_in_the_table_is_illegal_and_changes_nothing(state: str, kind: str) -> None:
    for out in OUTS:
        step = in_state(state, inv="declared", inverse_seq=1, key="k")
        before = copy.deepcopy(step)
        expected = leads_to(state, kind, out)
        if expected is None:
            with pytest.raises(Illegal):
                s.advance(step, entry(kind, out=out), 0)
            assert step == before
        else:
            after = s.advance(step, entry(kind, out=out), 0)
            assert after.state in s.TABLE
            if kind != "step.landed":
                assert after.state == expected


def test_every_kind_of_a_step_has_a_place_in_the_table_and_every_state_is_reached() -> None:
    assert {kind for row in s.TABLE.values() for kind in row} == set(STEP_KINDS)
    reached = {there for row in s.TABLE.values() for there in row.values()} - {s.BY_OUT}
    reached |= {there for rows in s.OUT.values() for row in rows.values() for there in row.values()}
    assert reached | {""} == set(s.TABLE)


def test_every_by_out_row_says_where_each_out_leads() -> None:
    for state, row in s.TABLE.items():
        for kind, there in row.items():
            assert (there != s.BY_OUT) or s.OUT[kind][state]


@pytest.mark.promise("1.6")
def test_nothing_happens_to_a_refused_step() -> None:
    assert s.TABLE[s.REFUSED] == {}


def walk(*facts: tuple[str, dict[str, Any]]) -> s.Step:
    step: s.Step | None = None
    for seq, (kind, fields) in enumerate(facts, 1):
        step = s.advance(step, entry(kind, seq, **fields), seq)
    assert step is not None
    return step


INTENDED = ("step.intended", {"inv": "declared", "handler": "h", "key": "k", "settle_ms": 5})
LOST = ("step.lost", {})
UNDO = ("undo.intended", {"key": "u"})
UNDONE = ("undo.done", {"out": "done"})


@pytest.mark.promise("1.3")
def test_a_result_refines_what_was_declared_and_a_failure_to_derive_leaves_it() -> None:
    refined = walk(INTENDED, ("step.done", {"inv": "both", "handler": "better"}))
    assert (refined.inv, refined.handler, refined.inverse_seq) == ("both", "better", 2)
    left = walk(INTENDED, ("step.done", {}))
    assert (left.inv, left.handler, left.inverse_seq) == ("declared", "h", 1)


def test_one_fact_for_intent_and_outcome_declares_what_undoes_it() -> None:
    step = walk(("step.done", {"tool": "t", "sem": "reversible", "inv": "declared", "handler": "h", "key": "k"}))
    assert (step.state, step.inv, step.handler, step.key, step.inverse_seq) == (s.DONE, "declared", "h", "k", 1)
    assert not orphaned(step) and step.attempts == 1


@pytest.mark.promise("1.8")
def test_what_lands_after_a_provisional_undo_is_due_once_more() -> None:
    step = walk(INTENDED, LOST, UNDO, UNDONE, ("step.landed", {"out": "done"}))
    assert step.state == s.DONE and step.late and not settled(step)
    s.advance(step, entry("undo.intended", 6, key="late", scope="undo/late"), 6)
    s.advance(step, entry("undo.done", 7, out="done"), 7)
    assert settled(step)


@pytest.mark.promise("1.8")
def test_what_lands_during_a_provisional_undo_is_due_once_more() -> None:
    step = walk(INTENDED, LOST, UNDO, ("step.landed", {"out": "done"}), UNDONE)
    assert step.state == s.DONE and step.late


@pytest.mark.promise("1.8")
def test_an_effect_that_was_known_before_its_undo_is_not_undone_twice_when_its_caller_returns() -> None:
    step = walk(INTENDED, LOST, ("step.probed", {"out": "present"}), UNDO, UNDONE, ("step.landed", {"out": "done"}))
    assert step.state == s.COMPENSATED and settled(step)


@pytest.mark.promise("1.8")
def test_a_late_failure_settles_an_unknown_and_leaves_a_compensated_one() -> None:
    assert walk(INTENDED, LOST, ("step.landed", {"out": "failed"})).state == s.FAILED
    assert settled(walk(INTENDED, LOST, UNDO, UNDONE, ("step.landed", {"out": "failed"})))


@pytest.mark.promise("1.14")
def test_a_probe_settles_an_unknown() -> None:
    assert walk(INTENDED, LOST, ("step.probed", {"out": "absent"})).state == s.FAILED
    assert walk(INTENDED, LOST, ("step.probed", {"out": "present"})).state == s.DONE
    unsure = walk(INTENDED, LOST, ("step.probed", {"out": "cannot_tell"}))
    assert (unsure.state, unsure.settled) == (s.UNKNOWN, "cannot_tell")


def test_a_person_who_retries_has_the_probe_asked_anew_or_gives_their_word() -> None:
    unsure = walk(INTENDED, LOST, ("step.probed", {"out": "cannot_tell"}))
    s.again(unsure)
    assert unsure.settled == ""
    lost = walk(INTENDED, ("step.done", {}), UNDO, ("undo.lost", {}))
    s.again(lost)
    assert lost.settled == "present"


@given(st.lists(st.tuples(st.sampled_from(STEP_KINDS), st.sampled_from(OUTS)), max_size=12))
def test_whatever_is_tried_a_step_is_where_the_table_says(tries: list[tuple[str, str]]) -> None:
    step: s.Step | None = None
    for seq, (kind, out) in enumerate(tries, 1):
        state = step.state if step else ""
        try:
            step = s.advance(step, entry(kind, seq, out=out), seq)
        except Illegal:
            assert leads_to(state, kind, out) is None
        else:
            assert leads_to(state, kind, out) is not None
            assert step.late <= step.provisional or step.state != s.COMPENSATED


def test_what_a_probe_said_of_an_attempt_says_nothing_of_the_next_one() -> None:
    """Else an attempt that was lost after it is never asked about, and goes to a person."""
    step = in_state(s.UNKNOWN, probe=1)
    for fact in (entry("step.probed", out="absent"), entry("step.intended", 11, probe=1), entry("step.lost", 12)):
        step = s.advance(step, fact, 0)
    assert (step.state, step.settled) == (s.UNKNOWN, "")
