"""What a log that was set back left open is left to a person, with what it takes to undo it."""

import os
import shutil
from pathlib import Path

import pytest

from amends.runtime.adopted import carry_over
from amends.runtime.kit import AgentKit
from amends.runtime.scope import saga_scope
from amends.runtime.tools import Compensation, compensator
from amends.store.errors import HomeRefused
from amends.store.home import Home
from amends.store.identity import adopt

WORLD: list[tuple[str, str]] = []


@compensator("adopted.refund")
def refund(id: str, idempotency_key: str) -> None:
    WORLD.append((id, idempotency_key))


def charge(id: str) -> str:
    return id


def _agent_that_dies(home: Path, saga: str) -> None:
    """In a child: two charges, then death without a word."""
    pid = os.fork()
    if not pid:
        kit = AgentKit(home=home)
        scope = saga_scope(saga, kit=kit)
        opened = scope.__enter__()
        for name in ("a", "b"):
            undo = Compensation(handler="adopted.refund", kwargs={"id": name})
            opened.execute("pay", charge, {"id": name}, semantics="compensable", undo=undo)
        kit.log.flush()
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.promise("6.2")
def test_sagas_of_a_log_that_was_set_back_are_for_a_person_to_decide(tmp_path: Path) -> None:
    home = tmp_path / "home"
    _agent_that_dies(home, "order-1")
    shutil.copytree(home, tmp_path / "older")
    AgentKit(home=home).close()
    with AgentKit(home=home) as kit, saga_scope("later", kit=kit) as saga:
        saga.execute("pay", charge, {"id": "c"}, semantics="compensable")
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "older", home)

    with pytest.raises(HomeRefused):
        AgentKit(home=home)

    adopt(Home(home), "Ada", "restored from a backup")
    WORLD.clear()
    with AgentKit(home=home, warn=lambda text: None) as kit:
        [new] = carry_over(kit)
        assert carry_over(kit) == []  # done once
        items = kit.inbox()
        assert [item["kind"] for item in items] == ["adopted", "adopted"]
        assert WORLD == []  # nothing is undone by itself
        kit.accept(items[0]["id"], by="Ada", reason="it was delivered")
        [left] = kit.inbox()
        report = kit.retry(left["id"], by="Ada")
        assert not report.unresolved and [name for name, _ in WORLD] == ["b"]
        assert kit.engine.state.past(new).out == "compensated"
