"""A fact about one saga costs what that saga has, however much the others have in the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
from approving import OTHER, REQUEST, SAGA, Facts

from amends.runtime.state import State

BUSY = "b" * 26
"""Another saga, with a question, a name and messages of its own."""


class Unread(dict[Any, Any]):
    """A dict that nobody may go through; to look one thing up is free."""

    def _no(self, *_: Any) -> NoReturn:
        raise AssertionError("this looks at everything there is")

    __iter__ = keys = values = items = copy = _no


def claims(facts: Facts, saga: str, item: str, step: int = 1, channel: str = "ops") -> None:
    facts.tell("notice.claimed", item=item, channel=channel, of=saga, step=step, attempt=1, within_ms=1000)


def busy() -> Facts:
    """Two sagas: each has asked twice, was escalated, claims a name, and somebody is told of it."""
    facts = Facts()
    for saga, one, two in ((SAGA, REQUEST, OTHER), (BUSY, "c" * 64, "d" * 64)):
        facts.tell("saga.opened", saga=saga, n=1, fence=1, driver="d" * 26)
        for step, request in ((1, one), (2, two)):
            facts.tell(
                "step.asked", saga=saga, step=step, fence=1, tool="bank.wire", sem="irreversible", key=f"k{step}",
                request=request, level=1, quorum=1, within_ms=1000,
            )  # fmt: skip
            facts.tell("approval.escalated", request=request, level=1)
            claims(facts, saga, f"{saga[0]}{step}", step)
        facts.tell("lock.taken", saga=saga, fence=1, lock=saga[:16])
    claims(facts, "", "keyring", 0)
    return facts


def views(state: State) -> Iterator[tuple[Any, str]]:
    yield from ((state.approvals, "requests"), (state.approvals, "steps"), (state.approvals, "sagas"))
    yield from ((state.locks, "held"), (state.notices, "told"), (state.notices, "raised"))


def ends(facts: Facts) -> None:
    facts.tell("saga.unwinding", saga=SAGA, fence=1, why="failed")
    for step in (1, 2):
        facts.refuse("withdrawn", step)
    facts.tell("saga.ended", saga=SAGA, fence=1, out="refused")


def goes_on(facts: Facts) -> None:
    facts.vote("approve", "ann")
    facts.intend()
    facts.tell("step.failed", saga=SAGA, step=1, fence=1)


def test_a_fact_of_one_saga_looks_at_nothing_of_the_others() -> None:
    facts = busy()
    for view, name in list(views(facts.state)):
        setattr(view, name, Unread(getattr(view, name)))
    goes_on(facts)
    ends(facts)
    for view, name in list(views(facts.state)):
        setattr(view, name, dict(dict.items(getattr(view, name))))
    state = facts.state
    assert {asked.saga for asked in state.approvals.requests.values()} == {BUSY}
    assert set(state.approvals.steps) == {(BUSY, 1), (BUSY, 2)} and set(state.approvals.sagas) == {BUSY}
    assert {held.saga for held in state.locks.held.values()} == {BUSY} and state.locks.of(SAGA) == []
    assert {told.of for told in state.notices.told.values()} == {BUSY, ""}
    assert set(state.notices.raised) == {"c" * 64, "d" * 64}


@pytest.mark.parametrize("first", [lambda facts: None, goes_on, ends], ids=["nothing", "one step", "one saga"])
def test_a_state_that_was_loaded_goes_on_as_the_one_that_was_folded(first: Callable[[Facts], Any]) -> None:
    folded, loaded = busy(), busy()
    first(folded)
    first(loaded)
    loaded.state = State()
    loaded.state.load(folded.state.dump())
    for facts in (folded, loaded):
        claims(facts, BUSY, "b1")  # told once more, and of the same thing
        facts.tell("step.refused", saga=BUSY, step=1, fence=1, why="halted")
        facts.tell("lock.freed", saga=BUSY, fence=1, lock=BUSY[:16])
        facts.tell("saga.unwinding", saga=BUSY, fence=1, why="failed")
    assert loaded.state.dump() == folded.state.dump()
    assert "b1" not in {told.item for told in folded.state.notices.told.values()}
    for facts in (folded, loaded):
        facts.tell("step.refused", saga=BUSY, step=2, fence=1, why="withdrawn")
        facts.tell("saga.ended", saga=BUSY, fence=1, out="refused")
    assert loaded.state.dump() == folded.state.dump() and not folded.state.approvals.of(BUSY, 1)


def test_a_message_that_changes_what_it_is_about_is_forgotten_with_its_newest() -> None:
    facts = busy()
    claims(facts, BUSY, "moves", 0)
    claims(facts, SAGA, "moves", 0)
    ends(facts)
    assert "moves" not in {told.item for told in facts.state.notices.told.values()}
