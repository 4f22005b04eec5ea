"""Variants are run in turn, A B C then C B A, each as a process of its own; what counts is their ratio in one round.

Between rounds the same code differs by a factor of two on a shared machine; within a round far less. So a figure is
the median of all rounds, for orientation, and beside it stands the ratio to the first variant: [min/median/max].
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
PATIENCE_S = 120

Figures = dict[str, dict[str, float]]  # work -> name -> value


class Variant(NamedTuple):
    """One way to do the work: a script of this folder, and what it is told."""

    name: str
    script: str
    config: Mapping[str, Any] = {}

    @property
    def python(self) -> str:
        """The peer may live in an environment of its own."""
        return os.environ.get("AMENDS_BENCH_PEER", sys.executable) if self.script == "theirs.py" else sys.executable


def child(variant: Variant, folder: Path, work: str, fails: Sequence[int] = ()) -> Figures:
    """Run one child; what it printed last. {} if it did not end in PATIENCE_S. Leaves with its words if it fails."""
    config = json.dumps({**variant.config, "dir": str(folder)})
    try:
        done = subprocess.run(
            [variant.python, str(HERE / variant.script), config, work], capture_output=True, text=True,
            timeout=PATIENCE_S + 600 * work.startswith("make"), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {}
    if done.returncode not in (0, *fails):
        sys.exit(f"{variant.name}, {work}: exit {done.returncode}\n{done.stderr[-3000:]}")
    made: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return made


def turns(variants: Sequence[Variant], rounds: int) -> list[list[Variant]]:
    return [list(variants) if i % 2 == 0 else list(variants)[::-1] for i in range(rounds)]


def compare(
    variants: Sequence[Variant], rounds: int, measure: Callable[[Variant], Figures]
) -> list[dict[str, Figures]]:
    """One table of figures per round: variant name -> its figures."""
    table = []
    for turn in turns(variants, rounds):
        table.append({variant.name: measure(variant) for variant in turn})
    return table


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


# ---- reading a table ------------------------------------------------------------------------------------------------


def column(table: Sequence[dict[str, Figures]], variant: str, work: str, name: str) -> list[float]:
    """One figure over the rounds; nan where the child did not answer."""
    return [round_[variant].get(work, {}).get(name, float("nan")) for round_ in table]


def ratios(over: Sequence[float], under: Sequence[float]) -> str:
    """`[min/median/max]` of the pairs that both answered."""
    held = sorted(a / b for a, b in zip(over, under, strict=True) if a == a and b == b and b)
    if not held:
        return "[no answer]"
    return f"[{held[0]:.2f}/{statistics.median(held):.2f}/{held[-1]:.2f}]"


def middle(values: Sequence[float]) -> float:
    held = [value for value in values if value == value]
    return statistics.median(held) if held else float("nan")


def shown(value: float) -> str:
    if value != value:
        return "no answer"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
