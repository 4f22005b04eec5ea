"""What a step pays: how often the disk is waited for, counted where the commits are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from world import World, kinds

from amends import (
    COMPENSABLE,
    IRREVERSIBLE,
    REVERSIBLE,
    AgentKit,
    Compensation,
    SagaAborted,
    compensator,
    saga_scope,
)
from amends.runtime.gate.policy_file import Policy
from amends.runtime.gate.rules import PreFlightGate, Rule, Verdict, tool_is
from amends.store import sqlite
from amends.store.log import DURABLE, FILED


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentKit]:
    """A kit on a file whose idle work and lazy flushes do not come in between."""
    for name in ("IDLE_S", "SIGN_S", "LAZY_S", "FLUSH_S"):
        if hasattr(sqlite, name):
            monkeypatch.setattr(sqlite, name, 3600.0)
    kit = AgentKit(home=tmp_path / "home")
    with saga_scope("warm", kit=kit) as saga:
        saga.execute("t", lambda: None, {}, semantics=COMPENSABLE)
    yield kit
    kit.close()


def commits(kit: AgentKit, world: World, n: int, **options: Any) -> int:
    barriers = options.pop("barriers", "strict")
    before = kit.log.commits
    with saga_scope(kit=kit, barriers=barriers) as saga:
        for number in range(n):
            saga.execute("hotel", world.book, {"what": str(number)}, **options)
    return kit.log.commits - before


@pytest.mark.promise("1.2")
@pytest.mark.parametrize("n", [1, 3, 10])
def test_strict_barriers_are_two_commits_a_step_and_one_for_the_end(quiet: AgentKit, world: World, n: int) -> None:
    assert commits(quiet, world, n, semantics=COMPENSABLE, undo=world.undo) == 2 * n + 1


@pytest.mark.promise("1.2")
@pytest.mark.parametrize("n", [1, 3, 10])
def test_merged_barriers_are_one_commit_a_step_and_one_for_the_end(quiet: AgentKit, world: World, n: int) -> None:
    assert commits(quiet, world, n, semantics=COMPENSABLE, undo=world.undo, barriers="merged") == n + 1


@pytest.mark.promise("1.2")
def test_reversible_steps_do_not_wait_for_the_disk(quiet: AgentKit, world: World) -> None:
    assert commits(quiet, world, 10, semantics=REVERSIBLE, undo=world.undo) == 1


@pytest.mark.promise("1.2")
def test_the_intent_is_on_the_disk_before_the_effect_and_the_outcome_before_the_call_returns(
    quiet: AgentKit, world: World
) -> None:
    def book(what: str) -> str:
        on_disk.append(quiet.log.commits)
        assert kinds(quiet, saga.header_id)[-1] == "step.intended"
        return what

    on_disk: list[int] = []
    with saga_scope(kit=quiet) as saga:
        before = quiet.log.commits
        saga.execute("hotel", book, {"what": "a"}, semantics=COMPENSABLE)
        assert on_disk == [before + 1] and quiet.log.commits == before + 2
        assert kinds(quiet, saga.header_id)[-1] == "step.done"


@pytest.mark.promise("1.2")
def test_an_irreversible_outcome_never_rides_along(quiet: AgentKit, world: World) -> None:
    by_name = Rule("hotels", tool_is("hotel"), Verdict.ALLOW)
    quiet.engine.policy = Policy(gate=PreFlightGate((by_name,)))
    assert commits(quiet, world, 3, semantics=IRREVERSIBLE, barriers="merged") == 7


@pytest.mark.promise("1.2")
def test_an_outcome_that_rides_along_is_not_lost_when_the_scope_fails(quiet: AgentKit, world: World) -> None:
    with pytest.raises(Exception, match="Clean"), saga_scope(kit=quiet, barriers="merged") as saga:
        for what in "ab":
            saga.execute("hotel", world.book, {"what": what}, semantics=COMPENSABLE, compensate=world.compensate)
        raise ValueError
    assert world.undos == ["b", "a"]


@pytest.mark.promise("1.2")
def test_memory_is_what_one_asks_for_by_name(tmp_path: Path) -> None:
    with AgentKit.in_memory() as memory, AgentKit(home=tmp_path / "home") as device:
        assert memory.home is None and not memory.guarantees()["durable"]
        assert device.guarantees()["durable"] and (tmp_path / "home" / "amends.db").exists()


class Levels:
    """What each commit of a log was asked to survive, with the kinds of its facts."""

    def __init__(self, kit: AgentKit) -> None:
        self.seen: list[tuple[int, list[str]]] = []
        self._commit = kit.log.commit
        kit.log.commit = self  # type: ignore[method-assign]

    def __call__(self, decide: Any, sync: int = DURABLE) -> Any:
        entries = self._commit(decide, sync)
        self.seen.append((sync, [entry.kind for entry in entries]))
        return entries

    def of(self, kind: str) -> set[int]:
        return {sync for sync, kinds in self.seen if kind in kinds}


@pytest.mark.promise("1.2")
def test_intent_and_outcome_of_a_compensable_step_ask_for_the_disk(quiet: AgentKit, world: World) -> None:
    levels = Levels(quiet)
    with pytest.raises(SagaAborted), saga_scope(kit=quiet) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
        raise ValueError
    for kind in ("step.intended", "step.done", "saga.unwinding", "undo.intended", "undo.done", "saga.ended"):
        assert levels.of(kind) == {DURABLE}, kind


@pytest.mark.promise("1.2")
def test_a_reversible_step_asks_for_no_disk_and_one_with_a_named_inverse_for_the_file(
    quiet: AgentKit, world: World
) -> None:
    compensator("barriers.cancel")(world.cancel)
    levels = Levels(quiet)
    with saga_scope(kit=quiet) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=REVERSIBLE, undo=world.undo)
        assert levels.seen == []
        named = Compensation(handler="barriers.cancel", kwargs={"of": "b"})
        saga.execute("hotel", world.book, {"what": "b"}, semantics=REVERSIBLE, undo=named)
        assert {sync for sync, _ in levels.seen} == {FILED}
