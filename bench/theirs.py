"""agent-saga doing the benched work, as its own bench does it. A child: `theirs.py '{"dir": …}' dur,saga5,64,sweep`.

Prints one JSON object: work -> figures, with the same names as ours.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from agent_saga import ActionSemantics, AsyncWAL, Compensation, SagaContext, compensator
from load import ARGS, STEPS_A_SAGA, WARM, hog, noop, percentiles, timed

logging.disable(logging.CRITICAL)

CONFIG: dict[str, Any] = json.loads(sys.argv[1])
LOG = os.path.join(CONFIG["dir"], "log.jsonl")


@compensator("bench.noop")
async def put_back(record_id: str) -> None:
    return None


def undo(result: dict[str, str]) -> Compensation:
    return Compensation(fn=put_back, handler="bench.noop", kwargs={"record_id": result["id"]}, description="noop")


def step_of(saga: SagaContext, semantics: str) -> Callable[[], Awaitable[Any]]:
    kind = ActionSemantics[semantics.upper()]
    return lambda: saga.execute(
        tool="stripe.charge", semantics=kind, forward=noop, forward_kwargs=ARGS, compensate=undo
    )


async def steps(wal: AsyncWAL, semantics: str, count: int) -> dict[str, float]:
    saga = SagaContext(wal=wal)
    await saga.begin()
    step = step_of(saga, semantics)
    await timed(step, WARM)
    flushes = wal.flush_cycles
    took = await timed(step, count)
    flushes = wal.flush_cycles - flushes
    await saga.finish()
    return {**percentiles(took), "commits_per_step": flushes / count}


async def durable(wal: AsyncWAL) -> dict[str, float]:
    return await steps(wal, "compensable", 800)


async def reversible(wal: AsyncWAL) -> dict[str, float]:
    return await steps(wal, "reversible", 6000)


async def amortised(wal: AsyncWAL) -> dict[str, float]:
    count = 6000
    step = step_of(SagaContext(wal=wal), "reversible")
    began = time.perf_counter()
    for i in range(count):
        await step()
        if i % 50 == 0:
            await asyncio.sleep(0)
    await wal.barrier()
    return {"steps_s": count / (time.perf_counter() - began)}


async def sagas(wal: AsyncWAL) -> dict[str, float]:
    took = []
    flushes = wal.flush_cycles
    for _ in range(150):
        began = time.perf_counter_ns()
        saga = SagaContext(wal=wal)
        await saga.begin()
        step = step_of(saga, "compensable")
        for _ in range(5):
            await step()
        await saga.finish()
        took.append(time.perf_counter_ns() - began)
    return {**percentiles(took), "commits_per_saga": (wal.flush_cycles - flushes) / 150}


async def together(wal: AsyncWAL, tasks: int, each: int) -> dict[str, float]:
    took: list[int] = []

    async def work() -> None:
        took.extend(await timed(step_of(SagaContext(wal=wal), "compensable"), each))

    records, flushes = wal._seq, wal.flush_cycles
    began = time.perf_counter()
    await asyncio.gather(*[work() for _ in range(tasks)])
    ended = time.perf_counter()
    return {
        "steps_s": tasks * each / (ended - began),
        **percentiles(took),
        "records_a_commit": (wal._seq - records) / max(1, wal.flush_cycles - flushes),
    }


async def concurrent(wal: AsyncWAL, tasks: int) -> dict[str, float]:
    return await together(wal, tasks, 800 if tasks == 1 else max(8000 // tasks, 20))


async def busy(wal: AsyncWAL) -> dict[str, float]:
    stop = asyncio.Event()
    hogging = asyncio.ensure_future(hog(stop, 0.001))
    figures = await together(wal, 64, 12)
    stop.set()
    return {**figures, "lag99": percentiles(await hogging)["p99"]}


async def raw(wal: AsyncWAL) -> dict[str, float]:
    """Two bare appends of a line of its size, each with fsync."""
    took = []
    line = b"x" * 553 + b"\n"
    with open(os.path.join(CONFIG["dir"], "raw.bin"), "ab", buffering=0) as file:
        for _ in range(800):
            began = time.perf_counter_ns()
            for _ in range(2):
                file.write(line)
                os.fsync(file.fileno())
            took.append(time.perf_counter_ns() - began)
    return percentiles(took)


async def size(wal: AsyncWAL) -> dict[str, float]:
    records = wal._seq
    bytes_before = os.path.getsize(LOG)
    await concurrent(wal, 64)
    await wal.barrier()
    return {"bytes_a_record": (os.path.getsize(LOG) - bytes_before) / (wal._seq - records)}


# ---- logs that a dead process left ----------------------------------------------------------------------------------


async def make(wal: AsyncWAL, records: int) -> None:
    numbers = iter(range(records // (2 * STEPS_A_SAGA + 2)))
    dangling = []

    async def work() -> None:
        for number in numbers:
            saga = SagaContext(wal=wal)
            await saga.begin()
            step = step_of(saga, "compensable")
            for _ in range(STEPS_A_SAGA):
                await step()
            if number % 10:
                await saga.finish()
            else:
                dangling.append(saga)

    await asyncio.gather(*[work() for _ in range(256)])
    await wal.barrier()
    print(json.dumps({"made": {"records": wal._seq, "dangling": len(dangling)}}), flush=True)
    os._exit(9)


def sweep() -> dict[str, Any]:
    from agent_saga.recovery import RecoveryDaemon

    async def both() -> dict[str, Any]:
        began = time.perf_counter()
        outcomes = await RecoveryDaemon(LOG, daemon_id="bench").recover_all()
        done = time.perf_counter()
        await RecoveryDaemon(LOG, daemon_id="bench").recover_all()
        again = time.perf_counter()
        recovered = sum(1 for outcome in outcomes if outcome.compensated)
        return {"s": done - began, "idle_ms": (again - done) * 1e3, "recovered": recovered}

    return asyncio.run(both())


def verify() -> dict[str, float]:
    from agent_saga.integrity import verify as examine

    began = time.perf_counter()
    records = _records()
    report = examine(records)
    if not report.intact:
        sys.exit(f"verify says {report.summary()}")
    return _told(len(records), began)


def _records() -> list[dict[str, Any]]:
    with open(LOG, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _told(count: int, began: float) -> dict[str, float]:
    took = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
    return {"records_s": count / took, "s": took, "rss_mb": peak}


def certify() -> dict[str, float]:
    from agent_saga.certify import certify_rollback_safety

    began = time.perf_counter()
    records = _records()
    certify_rollback_safety(records)
    return _told(len(records), began)


def export() -> dict[str, float]:
    """Its bundle, after its own check of the chain, as its command does."""
    from agent_saga.integrity import export_worm

    began = time.perf_counter()
    records = _records()
    export_worm(records, os.path.join(os.path.dirname(LOG), "bundle"))
    return _told(len(records), began)


def judge() -> dict[str, float]:
    """One call put to the limits, as its gate does it, with so many debits in their windows."""
    from types import SimpleNamespace

    from agent_saga.limits import BudgetLimit, InProcessLimitStore, plan

    count, facts = CONFIG["limits"], CONFIG["facts"]
    limits = [BudgetLimit(f"limit-{i}", arg="amount", max_total=1e12, window=86_400) for i in range(count)]
    store, call, took = InProcessLimitStore(), SimpleNamespace(tool="stripe.charge", kwargs=ARGS), []
    keys = [request.key for _, request in plan(limits, call)]
    now = time.time()
    for place in range(facts if keys else 0):
        store._log.setdefault(keys[place % count], []).append((now, 100.0, f"{now:.6f}-1-{place}"))
    for _ in range(20):  # each adds to the windows
        began = time.perf_counter_ns()
        store.reserve([request for _, request in plan(limits, call)])
        took.append(time.perf_counter_ns() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
    return {**percentiles(took), "rss_mb": peak}


ALONE: dict[str, Callable[[], dict[str, Any]]] = {
    "sweep": sweep, "verify": verify, "judge": judge, "certify": certify, "export": export,
}  # fmt: skip
WORK: dict[str, Callable[[AsyncWAL], Awaitable[dict[str, float]]]] = {
    "dur": durable, "raw2": raw, "rev": reversible, "reva": amortised, "saga5": sagas, "busy": busy, "size": size,
}  # fmt: skip


async def main(work: str) -> dict[str, Any]:
    wal = AsyncWAL(LOG)
    await wal.start()
    if work.startswith("make"):
        await make(wal, int(work[4:]))
    figures = {}
    for name in work.split(","):
        figures[name] = await (WORK[name](wal) if name in WORK else concurrent(wal, int(name)))
    await wal.close()
    return figures


if __name__ == "__main__":
    os.makedirs(CONFIG["dir"], exist_ok=True)
    asked = sys.argv[2]
    print(json.dumps({asked: ALONE[asked]()} if asked in ALONE else asyncio.run(main(asked))))
