"""A cap under threads, tasks and processes at once, and under a process that is killed again and again: what is debited
is the cap to the cent, and what happened outside is never more."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from limit_child import gate, spend

from amends import COMPENSABLE, AgentKit, Refused, saga_scope
from amends.runtime.gate.limits import left
from amends.runtime.state import State
from amends.store.audit import verify

CHILD = str(Path(__file__).parent / "limit_child.py")
CAP = 400


def spent(ledger: Path) -> int:
    return sum(map(int, ledger.read_text().split())) if ledger.exists() else 0


def used(kit: AgentKit) -> dict[str, int]:
    kit.log.refresh()
    return {row.limit: row.used for row in kit.log.look(left)}


def intents(kit: AgentKit) -> list[Any]:
    return [record.entry for record in kit.log.records() if record.entry.kind == "step.intended"]


def switches(owners: list[str]) -> int:
    """How often another one than before was at it: 0 if they came one after the other, whole."""
    return sum(a != b for a, b in zip(owners, owners[1:], strict=False)) - (len(set(owners)) - 1)


def check(kit: AgentKit, ledger: Path) -> None:
    """The cap to the cent, and one call in the other limit for each call that the cap let through."""
    entries = intents(kit)
    assert spent(ledger) == sum(entry.use["cap"] for entry in entries) == CAP
    assert used(kit) == {"cap": CAP, "calls": len(entries)}
    assert switches([entry.saga for entry in entries]) > 0, "nobody raced"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[AgentKit]:
    with AgentKit(home=tmp_path / "home", gate=gate(CAP)) as kit:
        yield kit


@pytest.mark.promise("2.4")
def test_fifty_threads_spend_a_cap_to_the_cent(kit: AgentKit, ledger: Path) -> None:
    start = threading.Barrier(50)

    def work() -> None:
        with saga_scope(kit=kit) as saga:
            start.wait()
            while any(spend(saga, amount, str(ledger), 0.0) for amount in (3, 1)):
                pass

    threads = [threading.Thread(target=work) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(kit, ledger)


@pytest.mark.promise("2.4")
def test_fifty_tasks_spend_a_cap_to_the_cent(kit: AgentKit, ledger: Path) -> None:
    async def charge(amount: int) -> int:
        await asyncio.sleep(0)
        with ledger.open("a") as file:
            file.write(f"{amount}\n")
        return amount

    async def work() -> None:
        async with saga_scope(kit=kit) as saga:
            amount = 3
            while amount:
                try:
                    await saga.execute("charge", charge, {"amount": amount}, semantics=COMPENSABLE)
                except Refused as refused:
                    assert refused.code == "over_limit"
                    amount = 1 if amount > 1 else 0

    async def race() -> None:
        await asyncio.gather(*[work() for _ in range(50)])

    asyncio.run(race())
    check(kit, ledger)


class Spender:
    """A process that spends."""

    def __init__(self, home: Path, ledger: Path, cap: int, pause: float) -> None:
        command = [sys.executable, CHILD, str(home), str(ledger), str(cap), str(pause)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.said() == "ready", self.process.stderr.read()  # type: ignore[union-attr]

    def said(self) -> str:
        return self.process.stdout.readline().strip()  # type: ignore[union-attr]

    def go(self) -> None:
        self.process.stdin.write("go\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]

    def ended(self) -> int:
        """Its exit code, all it said having been read."""
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode == 0 or not err, err
        assert "over" in out
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def spender(kit: AgentKit, ledger: Path) -> Iterator[Callable[..., Spender]]:
    """Starts processes that spend, and leaves none behind."""
    begun: list[Spender] = []

    def begin(cap: int, pause: float = 0.0) -> Spender:
        assert kit.home is not None
        begun.append(Spender(kit.home.path, ledger, cap, pause))
        return begun[-1]

    yield begin
    for each in begun:
        if each.process.poll() is None:
            each.kill()


@pytest.mark.slow
@pytest.mark.promise("2.4")
def test_eight_processes_spend_a_cap_to_the_cent(kit: AgentKit, ledger: Path, spender: Callable[..., Spender]) -> None:
    assert kit.home is not None
    racers = [spender(CAP) for _ in range(8)]
    for racer in racers:
        racer.go()
    assert [racer.ended() for racer in racers] == [0] * 8
    check(kit, ledger)
    kit.log.flush()
    assert verify(kit.home, view_factory=State).findings == []


@pytest.mark.slow
@pytest.mark.promise("2.4")
def test_a_process_that_is_killed_and_started_again_gets_no_new_budget(
    kit: AgentKit, ledger: Path, spender: Callable[..., Spender]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    assert kit.home is not None
    cap, killed_while_it_spent = 100, 0
    for _ in range(20):
        racer = spender(cap, 0.002)
        racer.go()
        said = [racer.said() for _ in range(rng.randrange(1, 5))]
        time.sleep(rng.random() * 0.006)  # anywhere in a step
        racer.kill()
        killed_while_it_spent += said[-1].startswith("spent")
        assert spent(ledger) <= used(kit)["cap"] <= cap
    assert killed_while_it_spent >= 3, "the kills came too late to matter"
    last = spender(cap)
    last.go()
    last.ended()
    assert used(kit)["cap"] == cap
    assert 0 <= cap - spent(ledger) <= 5 * 20, "a debit whose process died before its effect stays"
    kit.log.flush()
    assert verify(kit.home, view_factory=State).findings == []
