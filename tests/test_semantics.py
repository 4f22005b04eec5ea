"""SEMANTICS.md draws from the tables: what a step may become, how it is shown, what a semantics means, the reasons."""

from __future__ import annotations

import re
from pathlib import Path

from amends.runtime.report import _SHOWN, REASONS
from amends.runtime.semantics import SEMANTICS
from amends.runtime.step import BY_OUT, OUT, TABLE

PAGE = (Path(__file__).resolve().parents[1] / "runtime/SEMANTICS.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def became(state: str) -> str:
    """What a state may become, as the page writes it."""
    told = []
    for kind, there in TABLE[state].items():
        states = list(dict.fromkeys(OUT[kind][state].values())) if there == BY_OUT else [there]
        *some, last = states
        told.append((", ".join(some) + " or " if some else "") + f"{last} by `{kind}`")
    return " · ".join(told)


def test_the_page_has_every_way_that_a_step_may_go() -> None:
    should = [[state or "(new)", _SHOWN.get(state, ""), became(state)] for state in TABLE]
    told = rows("1. The life of a step")
    assert [[state, shown.removesuffix(", or orphaned"), text] for state, shown, text in told] == should


def test_the_page_has_every_semantics_and_who_is_asked() -> None:
    told = {row[0]: row[3] for row in rows("2. Three semantics")}
    assert told == {sem.name: "yes" if meaning.asks else "no" for sem, meaning in SEMANTICS.items()}


def test_the_page_has_every_reason_for_which_a_person_is_asked() -> None:
    [listed] = re.findall(r"with one of these reasons: ([^.]*)\.", PAGE)
    assert re.findall(r"`(\w+)`", listed) == list(REASONS)
