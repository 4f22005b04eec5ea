"""A world outside: a vendor that keeps what it did by idempotency key, so that tests ask it and not our own log.

`World` is in memory. A call under a key that it knows already answers as it did before, as vendors do. What it can be
told to do on the way: lose the answer, hang, take its time, refuse.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amends import AgentKit, Compensation


class World:
    """`effects`: what stands, by key of the forward. `log`: every call that took effect, in order."""

    def __init__(self) -> None:
        self.effects: dict[str, dict[str, Any]] = {}
        self.undone: dict[str, str] = {}  # key of the inverse -> key of what it took back
        self.log: list[tuple[str, str]] = []
        self.calls = 0
        self.lose: list[Exception] = []  # answers to be lost: the effect happens, the error is raised
        self.refuse: list[Exception] = []
        self.lock = threading.Lock()

    # -- the vendor's side ----------------------------------------------------------------------------------------

    def act(self, what: str, key: str) -> dict[str, Any]:
        with self.lock:
            self.calls += 1
            if self.refuse:
                raise self.refuse.pop(0)
            if key not in self.effects:
                self.effects[key] = {"id": f"e{len(self.log)}", "what": what}
                self.log.append(("do", what))
            answer = dict(self.effects[key], key=key)
            if self.lose:
                raise self.lose.pop(0)
            return answer

    def take_back(self, of: str, key: str) -> None:
        """Takes back the effect made under the key `of`; twice under the same key is once."""
        with self.lock:
            self.calls += 1
            if self.refuse:
                raise self.refuse.pop(0)
            if key in self.undone:
                return
            self.undone[key] = of
            gone = self.effects.pop(of, None)
            self.log.append(("undo", gone["what"] if gone else "nothing"))

    def has(self, key: str) -> bool:
        return key in self.effects

    # -- what a test asks -----------------------------------------------------------------------------------------

    @property
    def standing(self) -> list[str]:
        return sorted(effect["what"] for effect in self.effects.values())

    @property
    def undos(self) -> list[str]:
        """What was taken back, in order."""
        return [what for verb, what in self.log if verb == "undo"]

    # -- tools ----------------------------------------------------------------------------------------------------

    def book(self, what: str, idempotency_key: str) -> dict[str, Any]:
        return self.act(what, idempotency_key)

    async def abook(self, what: str, idempotency_key: str) -> dict[str, Any]:
        await asyncio.sleep(0)
        return self.act(what, idempotency_key)

    def slow_book(self, gate: threading.Event, before: bool = True) -> Callable[..., Any]:
        """A sync tool whose effect comes when the gate opens (or came before it)."""

        def slow(what: str, idempotency_key: str) -> dict[str, Any]:
            made = self.act(what, idempotency_key) if before else None
            assert gate.wait(20)
            return made or self.act(what, idempotency_key)

        return slow

    def cancel(self, of: str, idempotency_key: str) -> None:
        self.take_back(of, idempotency_key)

    async def acancel(self, of: str, idempotency_key: str) -> None:
        await asyncio.sleep(0)
        self.take_back(of, idempotency_key)

    def undo(self, what: str, idempotency_key: str) -> Compensation:
        """`undo=`: known beforehand, by the key of the forward."""
        return Compensation(self.cancel, {"of": idempotency_key})

    def compensate(self, result: dict[str, Any]) -> Compensation:
        """`compensate=`: from the result."""
        return Compensation(self.cancel, {"of": result["key"]})


def eventually(true: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to be so"
        time.sleep(0.01)


def kinds(kit: AgentKit, saga: str) -> list[str]:
    """The kinds of a saga's facts, in order."""
    kit.log.flush()
    return [record.entry.kind for record in kit.log.thread(saga)]


def killed(kit: AgentKit) -> None:
    """Forget, as a death would, what this process drives: only the log and the world remain."""
    from amends.runtime.current import CURRENT

    kit.engine.runs.clear()
    kit.engine.resting.clear()
    CURRENT.set(None)


def fold(kit: AgentKit, saga: str) -> Any:
    """The saga as the log tells it."""
    found = kit.engine.state.past(saga)
    assert found is not None
    return found


def home_kit(tmp: Path) -> AgentKit:
    return AgentKit(home=tmp / "home")
