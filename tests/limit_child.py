"""A process that spends: `limit_child.py HOME LEDGER CAP PAUSE_S`.

Says `ready`, waits for a line, then charges until a charge of one is refused; each effect is a line of the ledger file
before it is a line of its own output.
"""

from __future__ import annotations

import os
import random
import sys
import time

from amends import COMPENSABLE, AgentKit, Compensation, Refused, saga_scope
from amends.runtime.gate.limits import BudgetLimit, RateLimit
from amends.runtime.gate.rules import PreFlightGate


def gate(cap: int) -> PreFlightGate:
    """A cap in cents that no window refills while a test runs, and a rate that is never in the way."""
    budget = BudgetLimit("cap", max_total=cap, window=3600, minor=True)
    return PreFlightGate([], limits=[budget, RateLimit("calls", max_calls=10**6, window=3600)])


def charge(amount: int, ledger: str, pause: float) -> int:
    time.sleep(pause)
    descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{amount}\n".encode())
    os.close(descriptor)
    return amount


def nothing(idempotency_key: str) -> None:
    return None


def spend(saga: object, amount: int, ledger: str, pause: float) -> bool:
    """Whether a charge was let through."""
    try:
        saga.execute(  # type: ignore[attr-defined]
            "charge", charge, {"amount": amount, "ledger": ledger, "pause": pause}, semantics=COMPENSABLE,
            undo=Compensation(nothing, {}, "nothing"),
        )  # fmt: skip
    except Refused as refused:
        assert refused.code == "over_limit", refused
        return False
    return True


def main(home: str, ledger: str, cap: str, pause: str) -> None:
    kit = AgentKit(home=home, gate=gate(int(cap)))
    print("ready", flush=True)
    sys.stdin.readline()
    with saga_scope(kit=kit) as saga:
        amount = random.randrange(1, 6)
        for _ in range(int(cap) + 10):  # each takes one at least, so that a cap that does not hold ends as well
            done = spend(saga, amount, ledger, float(pause))
            print("spent" if done else "refused", amount, flush=True)
            if not done and amount == 1:
                break
            amount = random.randrange(1, 6) if done else 1
    print("over", flush=True)
    kit.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
