"""The work that both sides do: the same three arguments, the same answer, a compensation made from the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

ARGS = {"customer_id": "cus_acme_42", "amount": 49900, "currency": "usd"}
WARM = 200
STEPS_A_SAGA = 3  # of a made log: begin, three intents, three outcomes, end

Step = Callable[[], Awaitable[Any]]


async def noop(customer_id: str, amount: int, currency: str) -> dict[str, str]:
    return {"id": "rec_1"}


def percentiles(nanoseconds: Sequence[int]) -> dict[str, float]:
    """p50, p95 and p99 in microseconds."""
    held = sorted(nanoseconds)
    return {f"p{p}": held[min(len(held) - 1, len(held) * p // 100)] / 1e3 for p in (50, 95, 99)}


async def timed(step: Step, count: int) -> list[int]:
    """Nanoseconds of each of `count` steps, one after the other."""
    took = []
    for _ in range(count):
        began = time.perf_counter_ns()
        await step()
        took.append(time.perf_counter_ns() - began)
    return took


async def hog(stop: asyncio.Event, seconds: float) -> list[int]:
    """Keep the loop busy in slices of `seconds`; nanoseconds that each yield between them took."""
    lags = []
    while not stop.is_set():
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        began = time.perf_counter_ns()
        await asyncio.sleep(0)
        lags.append(time.perf_counter_ns() - began)
    return lags
