"""A fact that code hands in past every door is refused, or does no harm to whoever reads the log afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from amends import REVERSIBLE, AgentKit
from amends.runtime.state import State
from amends.store.audit import verify
from amends.store.chain import Draft
from amends.store.errors import BadValue, Illegal


def hand_in(kit: AgentKit, kind: str, **fields: Any) -> None:
    kit.log.commit(lambda view, now: [Draft(kind, fields, up=True)])


@pytest.mark.promise("6.2")
@pytest.mark.parametrize(
    "fields",
    [
        {"step": -1}, {"within_ms": -5}, {"level": -1}, {"attempt": 1.5}, {"key": 5}, {"step": "x"}, {"cap": 1 << 60},
        {"runs": ((1, -2),)}, {"places": ((1,),)},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_would_not_be_read_back_is_not_written(tmp_path: Path, fields: dict[str, Any]) -> None:
    kit = AgentKit("agent", home=tmp_path / "home")
    with pytest.raises(BadValue):
        hand_in(kit, "notes.kept", **fields)
    assert "notes.kept" not in {record.entry.kind for record in kit.log.records()}
    with kit.transaction(id="next") as saga:
        saga.execute("note", lambda: 1, {}, semantics=REVERSIBLE)
    kit.close()
    found = verify(tmp_path / "home", view_factory=State)
    assert found.verdict == "INTACT", found.findings


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("redaction.made", {"places": ((999_999, 0),), "basis": "x"}),
        ("redaction.made", {"places": ((1, 40),), "basis": "x"}),
        ("copy.made", {"out": "bundle", "event": "ab" * 32, "upto": 9_999_999, "payload": "none"}),
        ("saga.opened", {"saga": "a" * 26, "fence": 1, "driver": "d", "parent": "a" * 26}),
        ("saga.opened", {"saga": "a" * 26, "fence": 1, "driver": "d", "of": "a" * 26}),
    ],
)
def test_what_cannot_be_is_refused_and_the_next_saga_goes_on(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    kit = AgentKit("agent", home=tmp_path / "home")
    with pytest.raises(Illegal):
        hand_in(kit, kind, **fields)
    with kit.transaction(id="next") as saga:
        saga.execute("note", lambda: 1, {}, semantics=REVERSIBLE)
    kit.close()
    found = verify(tmp_path / "home", view_factory=State)
    assert found.verdict == "INTACT", found.findings


@pytest.mark.parametrize("openings", [(b"[1,2]",), (b'{"a":1',), (b'{"a":\n1}',), (b"",)], ids=str)
def test_an_opening_that_is_no_object_is_not_written(tmp_path: Path, openings: tuple[bytes, ...]) -> None:
    kit = AgentKit("agent", home=tmp_path / "home")
    with pytest.raises(BadValue):
        kit.log.commit(lambda view, now: [Draft("notes.kept", {}, openings)])
    kit.close()
    assert verify(tmp_path / "home", view_factory=State).verdict == "INTACT"


@pytest.mark.parametrize("saga", [{}, {"saga": "a" * 26}])
def test_a_fact_that_is_told_by_half_is_left_out_and_the_next_saga_goes_on(
    tmp_path: Path, saga: dict[str, Any]
) -> None:
    kit = AgentKit("agent", home=tmp_path / "home")
    if saga:
        hand_in(kit, "saga.opened", fence=1, driver="d", **saga)
    with pytest.raises(BadValue):
        kit.log.commit(lambda view, now: [Draft("notes.kept", {"part": (1, 2), **saga}, (b'{"a":1}',))])
    with kit.transaction(id="next") as made:
        made.execute("note", lambda: 1, {}, semantics=REVERSIBLE)
    kit.close()
    found = verify(tmp_path / "home", view_factory=State)
    assert found.verdict == "INTACT", found.findings


def test_two_sagas_inside_each_other_hang_nobody(tmp_path: Path) -> None:
    kit = AgentKit("agent", home=tmp_path / "home")
    for one, other in (("a", "b"), ("b", "a")):
        hand_in(kit, "saga.opened", saga=one * 26, fence=1, driver="d", parent=other * 26)
    state = kit.engine.state
    for name in ("a" * 26, "b" * 26):
        assert state.root(state.sagas[name]).id in state.sagas
        assert len(state.family(state.sagas[name])) == 2
    kit.close()
