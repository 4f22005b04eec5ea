"""amends doing the benched work, through its public door. A child: `ours.py '{"dir": …}' dur,saga5,64,sweep`.

Prints one JSON object: work -> figures. `barriers`: strict or merged. `thread`: commits never run on the caller.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from handlers import put_back
from load import ARGS, STEPS_A_SAGA, WARM, hog, noop, percentiles, timed

from amends import AgentKit, Compensation, saga_scope

CONFIG: dict[str, Any] = json.loads(sys.argv[1]) if __name__ == "__main__" else {}
HOME = os.path.join(CONFIG.get("dir", "."), "home")
BARRIERS = CONFIG.get("barriers", "strict")


def undo(result: dict[str, str]) -> Compensation:
    return Compensation(put_back, {"record_id": result["id"]}, "noop", handler="bench.noop")


def undo_here(result: dict[str, str]) -> Compensation:
    """An inverse that lives in this process only: the step is buffered, as every reversible one of the peer is."""

    def back() -> None:
        return None

    return Compensation(back, {}, "noop")


def open_kit() -> AgentKit:
    kit = AgentKit(home=HOME)
    if CONFIG.get("thread"):
        log: Any = kit.log
        log._slow, log._measure, log._probing = True, lambda seconds: None, lambda: False
    return kit


def step_of(saga: Any, semantics: str) -> Callable[[], Awaitable[Any]]:
    factory = undo_here if semantics == "reversible" and not CONFIG.get("kept") else undo
    return lambda: saga.execute("stripe.charge", noop, ARGS, semantics=semantics, compensate=factory)


def scope(kit: AgentKit) -> saga_scope:
    return saga_scope(kit=kit, barriers=BARRIERS)


async def steps(kit: AgentKit, semantics: str, count: int) -> dict[str, float]:
    log: Any = kit.log
    async with scope(kit) as saga:
        step = step_of(saga, semantics)
        await timed(step, WARM)
        commits = log.commits
        took = await timed(step, count)
        commits = log.commits - commits
    return {**percentiles(took), "commits_per_step": commits / count}


async def durable(kit: AgentKit) -> dict[str, float]:
    return await steps(kit, "compensable", 800)


async def reversible(kit: AgentKit) -> dict[str, float]:
    return await steps(kit, "reversible", 6000)


async def amortised(kit: AgentKit) -> dict[str, float]:
    """Reversible steps until all of them are in the file."""
    count = 6000
    async with scope(kit) as saga:
        step = step_of(saga, "reversible")
        began = time.perf_counter()
        for i in range(count):
            await step()
            if i % 50 == 0:
                await asyncio.sleep(0)
        kit.log.flush()
        took = time.perf_counter() - began
    return {"steps_s": count / took}


async def sagas(kit: AgentKit) -> dict[str, float]:
    """Whole sagas of five steps, begin and end included."""
    took = []
    log: Any = kit.log
    commits = log.commits
    for _ in range(150):
        began = time.perf_counter_ns()
        async with scope(kit) as saga:
            step = step_of(saga, "compensable")
            for _ in range(5):
                await step()
        took.append(time.perf_counter_ns() - began)
    return {**percentiles(took), "commits_per_saga": (log.commits - commits) / 150}


async def together(kit: AgentKit, tasks: int, each: int) -> tuple[dict[str, float], list[int]]:
    """Steps per second of so many sagas side by side."""
    took: list[int] = []
    left, over = tasks, asyncio.Event()
    ended = 0.0
    log: Any = kit.log
    commits, records = log.commits, log.records_written
    grouped = 0.0

    async def work() -> None:
        nonlocal left, ended, grouped
        async with scope(kit) as saga:
            took.extend(await timed(step_of(saga, "compensable"), each))
            left -= 1
            if not left:
                ended = time.perf_counter()
                grouped = (log.records_written - records) / (log.commits - commits)
                over.set()
            await over.wait()

    began = time.perf_counter()
    await asyncio.gather(*[work() for _ in range(tasks)])
    return {"steps_s": tasks * each / (ended - began), **percentiles(took), "records_a_commit": grouped}, took


async def concurrent(kit: AgentKit, tasks: int) -> dict[str, float]:
    return (await together(kit, tasks, 800 if tasks == 1 else max(8000 // tasks, 20)))[0]


async def busy(kit: AgentKit) -> dict[str, float]:
    stop = asyncio.Event()
    hogging = asyncio.ensure_future(hog(stop, 0.001))
    figures, _ = await together(kit, 64, 12)
    stop.set()
    return {**figures, "lag99": percentiles(await hogging)["p99"]}


async def raw(kit: AgentKit) -> dict[str, float]:
    """Two bare commits of one row each, same schema and pragmas, in a file of their own: what the disk asks."""
    from amends.store.sqlite import _preallocate, _write_db

    path = os.path.join(CONFIG["dir"], "raw.db")
    db = _write_db(path)
    _preallocate(db, os.fsencode(path) + b"-wal")
    took = []
    line, opening, hash = b"x" * 330, b"y" * 120, bytes(32)
    for i in range(800):
        began = time.perf_counter_ns()
        for seq in (2 * i, 2 * i + 1):
            db.run("begin immediate")
            db.run("insert into entry values(?,?,?,?,?)", (seq, line, i, opening, hash))
            db.run("commit")
        took.append(time.perf_counter_ns() - began)
    db.close()
    return percentiles(took)


async def size(kit: AgentKit) -> dict[str, float]:
    log: Any = kit.log
    await concurrent(kit, 64)
    log.truncate()
    return {"bytes_a_record": os.path.getsize(kit.home.db) / log.size}  # type: ignore[union-attr]


# ---- logs that a dead process left ----------------------------------------------------------------------------------


async def make(kit: AgentKit, records: int) -> None:
    """Sagas of three steps, every tenth left open; the process then dies where it stands."""
    count = records // (2 * STEPS_A_SAGA + 2)
    numbers = iter(range(count))
    dangling: list[saga_scope] = []

    async def work() -> None:
        for number in numbers:
            await asyncio.create_task(one(number))

    async def one(number: int) -> None:
        opened = scope(kit)
        step = step_of(await opened.__aenter__(), "compensable")
        for _ in range(STEPS_A_SAGA):
            await step()
        if number % 10:
            await opened.__aexit__(None, None, None)
        else:
            dangling.append(opened)

    await asyncio.gather(*[work() for _ in range(256)])
    kit.log.flush()
    time.sleep(0.3)  # as any agent that pauses: head signed, memo written
    print(json.dumps({"made": {"records": kit.log.size, "dangling": len(dangling)}}), flush=True)
    os._exit(9)


def sweep() -> dict[str, Any]:
    from amends.runtime.daemon import sweep as recover

    began = time.perf_counter()
    kit = open_kit()
    opened = time.perf_counter()
    swept = recover(kit)
    done = time.perf_counter()
    recover(kit)
    again = time.perf_counter()
    kit.close()
    return {
        "s": done - began,
        "open_ms": (opened - began) * 1e3,
        "idle_ms": (again - done) * 1e3,
        "recovered": len(swept.recovered),
    }


def verify() -> dict[str, float]:
    from amends.store.audit import verify as examine

    began = time.perf_counter()
    verdict = examine(HOME)
    took = time.perf_counter() - began
    if verdict.exit:
        sys.exit(f"verify says {verdict.verdict}: {verdict.findings[:3]}")
    return {"records_s": verdict.size / took, "s": took, "rss_mb": rss()}


def certify() -> dict[str, float]:
    """Only the rules: what a certificate adds to `verify`, over the same records."""
    from amends.runtime.certificate import entries_of
    from amends.runtime.certify import judge as certified
    from amends.store.evidence import Evidence

    with Evidence(os.path.join(HOME, "amends.db")) as evidence:
        began = time.perf_counter()
        said = certified(entries_of(evidence))
        took = time.perf_counter() - began
        return {"records_s": evidence.size / took, "s": took, "rss_mb": rss(), "effects": said.counts.effects}


def export() -> dict[str, float]:
    """Only the writing of a bundle, openings and tiles included: what it adds to `verify` and `certify`."""
    from amends.store import bundle

    kit = open_kit()
    log: Any = kit.log
    key, told = log.identity, {"verdict": "INTACT", "level": "", "findings": [], "not_proved": []}
    with bundle.cut(log) as (evidence, head):
        content = bundle.Content(key.origin, key.log_key, key.export_key, key.export_seed, head, told, "bench", "plain")
        began = time.perf_counter()
        made = bundle.write(os.path.join(HOME, "bundle"), evidence, content)
        took = time.perf_counter() - began
    kit.close()
    return {"records_s": made.size / took, "s": took, "rss_mb": rss()}


def prove() -> dict[str, float]:
    """One saga in the middle of the log, with its proofs, and the check of it: milliseconds."""
    from amends.store import disclosure
    from amends.store.sqlite import open_read

    kit = open_kit()
    log: Any = kit.log
    log.settle()
    head = log.signed()
    text = log.identity.note(*head)
    first = next(entry for entry, _ in log.lines(head.size // 2) if entry.kind == "saga.ended")
    took: dict[str, list[float]] = {"prove": [], "check": []}
    reader = open_read(os.path.join(HOME, "amends.db"))
    for _ in range(20):
        began = time.perf_counter()
        made = disclosure.prove(log, reader, text, [first.saga])
        took["prove"].append(time.perf_counter() - began)
        began = time.perf_counter()
        checked = disclosure.check(made.text)
        took["check"].append(time.perf_counter() - began)
        if checked.exit:
            sys.exit(f"check-proof says {checked.verdict}")
    reader.close()
    kit.close()
    return {**{f"{what}_ms": sorted(each)[10] * 1e3 for what, each in took.items()}, "rss_mb": rss()}


def judge() -> dict[str, float]:
    """One call put to the gate, with so many limits that concern it and so many debits in their windows."""
    from amends.runtime.gate.limits import BudgetLimit, prepare
    from amends.runtime.gate.pipeline import judge as put
    from amends.runtime.gate.question import GateCall, Question
    from amends.runtime.semantics import ActionSemantics
    from amends.runtime.state import State
    from amends.store.clock import Now
    from amends.store.entry import ZERO, Entry

    count, facts = CONFIG["limits"], CONFIG["facts"]
    limits = [BudgetLimit(f"limit-{i}", max_total=10**9, window=86_400, minor=True) for i in range(count)]
    state = State()
    for limit in limits:
        told = Entry(0, ZERO, 1, "limit.set", limit=limit.name, cap=limit.cap, within_ms=limit.window_ms)
        state.meters.fold(told, 0, state)
    entries = [Entry(0, ZERO, 1, "step.intended", use={limit.name: 100}) for limit in limits]
    began = time.perf_counter()
    for place in range(facts if entries else 0):
        state.meters.fold(entries[place % count], place, state)
    folded = time.perf_counter() - began
    call, now, took = GateCall("stripe.charge", ActionSemantics.COMPENSABLE, ARGS), Now(1, 1, facts, facts), []
    for _ in range(2000):
        began_ns = time.perf_counter_ns()
        debits = prepare(limits, call, str)
        verdict = put(state, Question("stripe.charge", "compensable", "s", "s", debits=debits), now)
        took.append(time.perf_counter_ns() - began_ns)
        assert verdict.verdict == "allow"
    resident = rss()
    began = time.perf_counter()
    memo = state.dump()
    dumped = time.perf_counter() - began
    return {**percentiles(took), "fold_us": folded / facts * 1e6, "memo_mb": len(memo) / 1e6, "memo_ms": dumped * 1e3,
            "rss_mb": resident}  # fmt: skip


def rss() -> float:
    """Peak resident memory of this process, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


ALONE: dict[str, Callable[[], dict[str, Any]]] = {
    "sweep": sweep,
    "verify": verify,
    "certify": certify,
    "export": export,
    "prove": prove,
    "judge": judge,
}
WORK: dict[str, Callable[[AgentKit], Awaitable[dict[str, float]]]] = {
    "dur": durable, "raw2": raw, "rev": reversible, "reva": amortised, "saga5": sagas, "busy": busy, "size": size,
}  # fmt: skip


async def main(work: str) -> dict[str, Any]:
    kit = open_kit()
    if work.startswith("make"):
        await make(kit, int(work[4:]))
    figures = {}
    for name in work.split(","):
        figures[name] = await (WORK[name](kit) if name in WORK else concurrent(kit, int(name)))
    kit.close()
    return figures


if __name__ == "__main__":
    os.makedirs(CONFIG["dir"], exist_ok=True)
    os.environ["AMENDS_ANCHORS"] = os.path.join(CONFIG["dir"], "anchors")
    asked = sys.argv[2]
    print(json.dumps({asked: ALONE[asked]()} if asked in ALONE else asyncio.run(main(asked))))
