"""A secret that is passed to a tool is nowhere in the file: not as a value, not in an error, not in a fallback's."""

from pathlib import Path

import pytest
from approving import Asking
from world import eventually

from amends import COMPENSABLE, IRREVERSIBLE, tool
from amends.runtime.kit import AgentKit
from amends.runtime.scope import SagaAborted, saga_scope
from amends.runtime.tools import Fallback
from amends.runtime.values import Secret

TOKEN = "tok-8f3b-very-secret"


def _bytes_of(home: Path) -> bytes:
    return b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())


def refuses(api_key: str, order: str) -> None:
    raise ValueError(f"the key {api_key} is not valid for {order}")


def wrapped(api_key: Secret[str], order: str) -> None:
    raise ValueError(f"the key {api_key.reveal()} is not valid for {order}")


@pytest.mark.promise("14.2")
@pytest.mark.parametrize(
    ("forward", "value", "options"),
    [
        (refuses, TOKEN, {"secret": ("api_key",)}),
        (wrapped, Secret(TOKEN), {}),
        (refuses, TOKEN, {"secret": ("api_key",), "fallback": Fallback(refuses)}),
    ],
)
def test_a_secret_is_nowhere_in_the_home(tmp_path: Path, forward, value, options) -> None:
    home = tmp_path / "home"
    with AgentKit(home=home) as kit:
        with pytest.raises(SagaAborted) as aborted:
            with saga_scope(kit=kit) as saga:
                saga.execute("pay", forward, {"api_key": value, "order": "o-77"}, semantics="compensable", **options)
        assert aborted.value.report.clean
        assert TOKEN in str(aborted.value.__cause__)  # the caller is told everything; the file is not
    found = _bytes_of(home)
    assert b"o-77" in found  # the search finds what is there
    assert TOKEN.encode() not in found


def annotated(order: str, api_key: Secret[str] = TOKEN) -> str:  # type: ignore[assignment]
    return order


@tool("pay.other", semantics=COMPENSABLE, secret=("api_key",))
def declared(order: str, api_key: str = TOKEN) -> str:
    return order


def fails(order: str) -> str:
    raise ValueError(f"no room for {order}")


@pytest.mark.promise("14.2")
@pytest.mark.parametrize("fallback", [annotated, Fallback(annotated), declared], ids=["plain", "wrapped", "tool"])
def test_what_a_fallback_puts_in_by_default_is_asked_about_without_its_secrets(tmp_path: Path, fallback) -> None:
    home = tmp_path / "home"
    with AgentKit(home=home) as kit:
        waiting = Asking(kit, fails, {"order": "o-77"}, semantics=IRREVERSIBLE, fallback=fallback)
        first = waiting.seen()
        kit.approve(first.item, by="Ann")
        eventually(lambda: waiting.asked.request != first.digest)
        assert {field.label: field.value for field in waiting.seen().about}["defaults.api_key"] == "•••"
        kit.approve(waiting.seen().item, by="Ann")
        assert waiting.end() == "o-77"
    found = _bytes_of(home)
    assert b"o-77" in found and TOKEN.encode() not in found
