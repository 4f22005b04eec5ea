"""amends beside agent-saga: equal records, equal durability, the same tool, in turn on this machine.

    python3 packaging/do.py bench [all] [NAME...] [--rounds N] [--dir FOLDER]

Without names: what README quotes, within six minutes. `all` adds the slow ones. No test reads a clock; what can be
counted is counted in tests/test_counts.py. README.md beside this file says how to read the tables.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import machine
from rounds import (
    HERE,
    Figures,
    Variant,
    child,
    column,
    compare,
    fresh,
    middle,
    ratios,
    shown,
)

THEIRS = Variant("agent-saga", "theirs.py")
OURS = Variant("amends", "ours.py")
MERGED = Variant("amends merged", "ours.py", {"barriers": "merged"})
THREAD = Variant("amends, thread", "ours.py", {"thread": True})


class Row(NamedTuple):
    """One line of a table: a figure of some work, the goal for its ratio to the first variant (or to `under`)."""

    label: str
    work: str
    name: str
    unit: str
    goal: str = ""
    only: str = ""  # the one variant that has it


class Bench(NamedTuple):
    """A family of measurements."""

    title: str
    run: Callable[[Path, int], None]
    first: bool  # part of the default run


def table(title: str, variants: list[Variant], rows: list[Row], folder: Path, rounds: int) -> None:
    """Run the work of the rows and print them."""
    works = list(dict.fromkeys(row.work for row in rows))
    found = compare(variants, rounds, lambda variant: child(variant, fresh(folder), ",".join(works)))
    heading(title, f"{rounds} rounds")
    for row in rows:
        base = column(found, variants[0].name, row.work, row.name)
        for variant in variants:
            if row.only and variant.name not in (row.only, variants[0].name):
                continue
            held = column(found, variant.name, row.work, row.name)
            against = "" if variant is variants[0] or not any(base) else f"{ratios(held, base)} x"
            goal = f"   goal {row.goal}" if row.goal and variant is not variants[0] else ""
            say(row.label, variant.name, f"{shown(middle(held))} {row.unit}", against + goal)


def say(label: str, variant: str, figure: str, rest: str = "") -> None:
    print(f"  {label:32s} {variant:16s} {figure:>18s}   {rest}".rstrip(), flush=True)


def heading(title: str, method: str) -> None:
    print(f"\n{title}  ({method}; ratio to the first, in one round: min/median/max)", flush=True)


# ---- the hot path ---------------------------------------------------------------------------------------------------


def durable(folder: Path, rounds: int) -> None:
    """G1, and the floor under it: two bare commits of the same rows."""
    variants = [THEIRS, OURS]
    works = "raw2,dur"
    found = compare(variants, rounds, lambda variant: child(variant, fresh(folder), works))
    heading("Durable step, one saga", f"{rounds} rounds")
    theirs, ours = (column(found, v.name, "dur", "p50") for v in variants)
    for p in ("p50", "p95", "p99"):
        base, mine = (column(found, v.name, "dur", p) for v in variants)
        say(p, THEIRS.name, f"{shown(middle(base))} us")
        say(p, OURS.name, f"{shown(middle(mine))} us", ratios(mine, base) + " x" + "   goal <= 0.50" * (p == "p50"))
    say("flushes a step", THEIRS.name, shown(middle(column(found, THEIRS.name, "dur", "commits_per_step"))))
    say("commits a step", OURS.name, shown(middle(column(found, OURS.name, "dur", "commits_per_step"))))
    for variant, mine in ((THEIRS, theirs), (OURS, ours)):
        floor = column(found, variant.name, "raw2", "p50")
        what = "two raw appends + fsync" if variant is THEIRS else "two raw SQLite commits"
        goal = "" if variant is THEIRS else "   goal <= 1.6"
        say(what, variant.name, f"{shown(middle(floor))} us", f"a step is {ratios(mine, floor)} x{goal}")


def merged(folder: Path, rounds: int) -> None:
    table(
        "Merged barriers, and whole sagas of five steps",
        [THEIRS, OURS, MERGED],
        [
            Row("step p50", "dur", "p50", "us", "<= 0.30", MERGED.name),
            Row("five-step saga p50", "saga5", "p50", "us", "<= 0.30 merged"),
            Row("commits a saga", "saga5", "commits_per_saga", "", "6 merged, 11 strict: counted"),
        ],
        folder,
        rounds,
    )


def throughput(folder: Path, rounds: int) -> None:
    goals = {1: "1.6 (core 2)", 16: "2.4 (core 3)", 64: "2.8 (core 3.5)", 256: "3.2 (core 4)"}
    rows = [Row(f"{n} sagas side by side", str(n), "steps_s", "steps/s", f">= {goals[n]}") for n in goals]
    rows.append(Row("records a commit, 64 sagas", "64", "records_a_commit", ""))
    table("Steps per second", [THEIRS, OURS, MERGED], rows, folder, rounds)


def reversible(folder: Path, rounds: int) -> None:
    kept = Variant("amends, kept", "ours.py", {"kept": True})
    table(
        "Reversible step (kept: its named inverse is in the file before the effect, and survives a kill)",
        [THEIRS, OURS, kept],
        [
            Row("p50", "rev", "p50", "us", "<= 0.15"),
            Row("rate until all is in the file", "reva", "steps_s", "steps/s", ">= 5"),
        ],
        folder,
        rounds,
    )


def busy(folder: Path, rounds: int) -> None:
    table(
        "A loop kept busy in slices of 1 ms, 64 sagas",
        [THEIRS, OURS],
        [
            Row("p99", "busy", "p99", "us", "<= 0.10"),
            Row("rate", "busy", "steps_s", "steps/s", ">= 10"),
            Row("loop lag p99", "busy", "lag99", "us"),
        ],
        folder,
        rounds,
    )


def thread(folder: Path, rounds: int) -> None:
    table(
        "Where commits never run on the caller's thread (a slow disk)",
        [THEIRS, THREAD],
        [Row("durable p50", "dur", "p50", "us", "<= 0.70")],
        folder,
        rounds,
    )


def size(folder: Path, rounds: int) -> None:
    table(
        "Bytes on disk",
        [THEIRS, OURS],
        [Row("a record", "size", "bytes_a_record", "B", "<= 0.80")],
        folder,
        1,
    )


# ---- logs that a dead process left ----------------------------------------------------------------------------------

SIZES = (10_000, 100_000)
LEASE_S = 6.0  # agent-saga leaves a saga alone until its lease of 5 s has run out


def left_behind(folder: Path, records: int) -> tuple[dict[str, Path], str]:
    """A log of each side, made by a process that then died with a tenth of its sagas open."""
    made, told = {}, []
    for variant in (THEIRS, OURS):
        made[variant.name] = place = fresh(folder / variant.name / "kept")
        figures = child(variant, place.parent / "log", f"make{records}", fails=(9,))["made"]
        shutil.rmtree(place)
        os.replace(place.parent / "log", place)
        told.append(f"{variant.name} {figures['records']:.0f} records, {figures['dangling']:.0f} sagas open")
    return made, "; ".join(told)


def put(kept: Path) -> Path:
    """The log as it was left, at the place where it was made."""
    place = kept.parent / "log"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(kept, place)
    return place


def on(kept: dict[str, Path], work: str) -> Callable[[Variant], Figures]:
    """That work, each time on the log as it was left."""
    return lambda variant: child(variant, put(kept[variant.name]), work)


def sweep(folder: Path, rounds: int) -> None:
    rounds = min(rounds, 3)
    for records in SIZES:
        kept, told = left_behind(fresh(folder), records)
        time.sleep(LEASE_S)
        found = compare([THEIRS, OURS], rounds, on(kept, "sweep"))
        heading(f"Recovery of a log of {records:,} records", f"{rounds} rounds")
        print(f"  {told}; three compensations each")
        base, mine = (column(found, v.name, "sweep", "s") for v in (THEIRS, OURS))
        say("sweep", THEIRS.name, f"{middle(base) * 1e3:,.0f} ms")
        say("sweep", OURS.name, f"{middle(mine) * 1e3:,.0f} ms", f"{ratios(base, mine)} x faster   goal >= 10")
        base, mine = (column(found, v.name, "sweep", "idle_ms") for v in (THEIRS, OURS))
        say("the next one, nothing to do", THEIRS.name, f"{shown(middle(base))} ms")
        say("the next one, nothing to do", OURS.name, f"{shown(middle(mine))} ms", "goal <= 1 ms at any size")
        say("of it opening the home", OURS.name, f"{shown(middle(column(found, OURS.name, 'sweep', 'open_ms')))} ms")
        for variant in (THEIRS, OURS):
            count = middle(column(found, variant.name, "sweep", "recovered"))
            say("sagas recovered", variant.name, shown(count))


def verify(folder: Path, rounds: int, records: int = 100_000) -> None:
    kept, _ = left_behind(fresh(folder), records)
    found = compare([THEIRS, OURS], rounds, on(kept, "verify"))
    heading(f"Verify a log of {records:,} records", f"{rounds} rounds")
    base, mine = (column(found, v.name, "verify", "records_s") for v in (THEIRS, OURS))
    say("rate", THEIRS.name, f"{shown(middle(base))} records/s")
    say(
        "rate, everything checked", OURS.name, f"{shown(middle(mine))} records/s", f"{ratios(mine, base)} x   goal >= 5"
    )
    for variant in (THEIRS, OURS):
        goal = "goal <= 64 MB" if variant is OURS else ""
        say("peak memory", variant.name, f"{middle(column(found, variant.name, 'verify', 'rss_mb')):.0f} MB", goal)


def verify_million(folder: Path, rounds: int) -> None:
    verify(folder, 1, 1_000_000)


AUDIT = (
    ("verify", "everything checked"), ("certify", "the rules, on top of verify"),
    ("export", "a bundle with openings and tiles, on top of verify"),
)  # fmt: skip


def audit(folder: Path, rounds: int) -> None:
    """The same records, 100,000 and a million of them, for every verb that reads the whole log, and a proof."""
    for records, times in ((100_000, rounds), (1_000_000, 1)):
        kept, told = left_behind(fresh(folder), records)
        heading(f"Audit of a log of {records:,} records", f"{times} rounds")
        print(f"  {told}")
        for work, about in AUDIT:
            found = compare([THEIRS, OURS], times, on(kept, work))
            base, mine = (column(found, v.name, work, "records_s") for v in (THEIRS, OURS))
            say(work, THEIRS.name, f"{shown(middle(base))} records/s")
            say(f"{work}, {about}", OURS.name, f"{shown(middle(mine))} records/s", f"{ratios(mine, base)} x")
            for variant in (THEIRS, OURS):
                peak = middle(column(found, variant.name, work, "rss_mb"))
                say("peak memory", variant.name, f"{peak:.0f} MB", "goal <= 64 MB" if variant is OURS else "")
        found = compare([OURS], times, on(kept, "prove"))
        for name, about in (("prove_ms", "prove a saga in the middle"), ("check_ms", "check that")):
            say(about, OURS.name, f"{shown(middle(column(found, OURS.name, 'prove', name)))} ms")


def judge(folder: Path, rounds: int) -> None:
    """A call that every limit concerns; debits in windows are spread over the limits."""
    rounds = min(rounds, 3)
    heading("Judging a call", f"{rounds} rounds")
    for limits, facts in ((0, 1_000_000), (10, 1000), (10, 1_000_000), (100, 1000), (100, 1_000_000)):
        config = {"limits": limits, "facts": facts}
        pair = [Variant(THEIRS.name, THEIRS.script, config), Variant(OURS.name, OURS.script, config)]
        found = compare(pair, rounds, lambda variant: child(variant, fresh(folder), "judge"))
        base, mine = (column(found, variant.name, "judge", "p50") for variant in pair)
        label = f"{limits} limits, {facts:,} debits"
        say(label, THEIRS.name, f"{shown(middle(base))} us")
        say(label, OURS.name, f"{shown(middle(mine))} us", f"{ratios(base, mine)} x faster   goal: flat in debits")
        for variant in pair:
            say("  peak memory", variant.name, f"{middle(column(found, variant.name, 'judge', 'rss_mb')):.0f} MB")
        if limits:
            fold, mb, ms = (
                middle(column(found, OURS.name, "judge", name)) for name in ("fold_us", "memo_mb", "memo_ms")
            )
            say("  to fold one, the memo of all", OURS.name, f"{shown(fold)} us", f"{shown(mb)} MB in {shown(ms)} ms")


# ---- starting -------------------------------------------------------------------------------------------------------


def start(folder: Path, rounds: int) -> None:
    """Whole processes, started in turn; each as its user starts it."""
    fresh(folder)
    os.environ["AMENDS_HOME"], os.environ["AMENDS_ANCHORS"] = str(folder / "home"), str(folder / "anchors")
    peer = os.environ.get("AMENDS_BENCH_PEER", sys.executable)
    code = "import sys; sys.argv = ['amends', '--version']; from amends.cli.main import main; main()"
    script = Path(sys.executable).with_name("amends")
    theirs = Path(peer).with_name("agent-saga")
    frozen = HERE.parent / "dist" / "amends"
    command = [str(script), "--version"] if script.exists() else [sys.executable, "-c", code]
    kit = "from amends import AgentKit; AgentKit().close()"
    asked: list[tuple[str, str, list[str], str]] = [
        ("--version", "agent-saga", [str(theirs), "--version"], ""),
        ("--version", "amends", command, "0.40"),
        ("import", "agent-saga", [peer, "-c", "import agent_saga"], ""),
        ("import", "amends", [sys.executable, "-c", "import amends"], "0.50"),
        ("import, and open a kit", "amends", [sys.executable, "-c", kit], ""),
        ("nothing at all", "python", [sys.executable, "-c", "pass"], ""),
    ]  # fmt: skip
    if frozen.exists():
        asked.insert(2, ("--version", "amends, one file", [str(frozen), "--version"], "0.40"))
    times = 10
    took: dict[tuple[str, str], list[float]] = {(label, name): [] for label, name, _, _ in asked}
    for i in range(times):
        for label, name, command, _ in asked if i % 2 == 0 else asked[::-1]:
            began = time.perf_counter()
            done = subprocess.run(command, capture_output=True, check=False, cwd=folder)
            took[label, name].append((time.perf_counter() - began) * 1e3)
            if done.returncode:
                sys.exit(f"{command}: {done.stderr.decode()[-2000:]}")
    heading("Starting", f"{times} times, in turn")
    for label, name, _, goal in asked:
        base = took.get((label, "agent-saga"))
        mine = took[label, name]
        against = f"{ratios(mine, base)} x   goal <= {goal}" if goal and base else ""
        say(label, name, f"{middle(mine):.0f} ms", against)


def compaction(folder: Path, rounds: int) -> None:
    heading("Removing most of a log of a million records, while it is open", "one round each")
    subprocess.run([sys.executable, HERE / "compaction.py", "1000000", str(fresh(folder))], check=True)


def sealing(folder: Path, rounds: int) -> None:
    heading("What a seal costs an opening", "processor time, the least of five")
    subprocess.run([sys.executable, HERE / "sealing.py"], check=True)


BENCHES = {
    "durable": Bench("G1", durable, True),
    "merged": Bench("G2", merged, True),
    "throughput": Bench("G3", throughput, True),
    "reversible": Bench("G4", reversible, True),
    "sweep": Bench("G6", sweep, True),
    "start": Bench("G10", start, True),
    "busy": Bench("G5", busy, False),
    "verify": Bench("G7", verify, False),
    "size": Bench("G11", size, False),
    "thread": Bench("G13", thread, False),
    "judge": Bench("the gate", judge, False),
    "audit": Bench("6", audit, False),
    "million": Bench("G9", verify_million, False),
    "compaction": Bench("6.4", compaction, False),
    "sealing": Bench("6.5", sealing, False),
}


def main(argv: list[str]) -> int:
    rounds, folder = 5, HERE.parent / "build" / "bench"
    names: list[str] = []
    rest = iter(argv)
    for word in rest:
        if word == "--rounds":
            rounds = int(next(rest))
        elif word == "--dir":
            folder = Path(next(rest)).resolve()
        elif word in BENCHES:
            names.append(word)
        elif word == "all":
            names += list(BENCHES)
        else:
            print(__doc__)
            print("Names: " + ", ".join(BENCHES))
            return 0 if word in ("-h", "--help") else 2
    names = names or [name for name, bench in BENCHES.items() if bench.first]
    began = time.perf_counter()
    print(machine.line())
    print(machine.versions(os.environ.get("AMENDS_BENCH_PEER", sys.executable)))
    print(machine.disk(fresh(folder)))
    for name in dict.fromkeys(names):
        BENCHES[name].run(folder / name, rounds)
        shutil.rmtree(folder / name, ignore_errors=True)
    print(f"\n{time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
