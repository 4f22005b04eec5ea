"""SIGKILL at every durable boundary and inside every effect and compensation, again during recovery, by real processes.

A ledger in a process of its own (HTTP on loopback) counts every attempt by its key. Agents and recoveries kill
themselves at one named moment each (kill_child.py), and recoveries go on until one of them is not killed. Then the
ledger is asked, and asked once more when everything that was on its way has landed.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from kill_child import SETTLE
from mortals import KILLED, Ledger, Mortals

from amends.runtime.report import RollbackReport
from amends.runtime.saga import ENDED
from amends.runtime.state import State
from amends.runtime.step import COMPENSATED, FAILED, REFUSED
from amends.store.audit import verify
from amends.store.entry import Entry
from amends.store.identity import open_log

# ---- one home, many dead sagas ---------------------------------------------------------------------------------------


class Matrix:
    """Sagas that die in one home, recoveries that die over them, and what is asked of the log and the ledger then."""

    def __init__(self, home: Path, ledger: Ledger, mortals: Mortals, seed: int) -> None:
        self.home, self.ledger, self.mortals = str(home), ledger, mortals
        self.random = random.Random(seed)
        self.sagas: dict[str, dict[str, Any]] = {}

    def agents(self, steps: int, inverse: str, handler: str, commits: bool, every: int = 1) -> None:
        """The same agent again and again, killed at each of its moments in turn, until one lives."""
        script = {"steps": steps, "inverse": inverse, "handler": handler, "commits": commits}
        for kill in self._moments(script, every):
            self._agent(script, kill)
        n = 1 + self.random.randrange(every)
        while self._agent(script, {"commit": n, "when": self.random.choice(("before", "after"))}) == KILLED:
            n += every

    def _moments(self, script: dict[str, Any], every: int) -> list[dict[str, Any]]:
        words = ["do"] if script["commits"] or script["inverse"] == "none" else ["do", "undo"]
        moments = [
            {"call": f"{word} t{i + 1}", "when": when, "late": late}
            for i in range(script["steps"])
            for word in words
            for when, late in (("before", False), ("sent", False), ("sent", True), ("answered", False))
        ]
        return moments[self.random.randrange(every) :: every]

    def _agent(self, script: dict[str, Any], kill: dict[str, Any]) -> int:
        name = f"{os.path.basename(self.home)}-{len(self.sagas)}"
        self.sagas[name] = script
        return self.mortals.run(role="agent", home=self.home, url=self.ledger.url, saga=name, kill=kill, **script)

    def recover(self, most: int, *, hosted: bool = False) -> None:
        """Recoveries that die at one moment each; after `most` of them, one that does not."""
        things = [f"undo t{i + 1}" for i in range(5)]
        for _ in range(most):
            pick = self.random.choice
            kill: dict[str, Any] = {"commit": self.random.randint(1, 7), "when": pick(("before", "after"))}
            if self.random.random() < 0.4:
                kill = {"call": pick(things), "when": pick(("before", "sent", "answered")), "late": pick((True, False))}
            if self.mortals.run(role="recover", home=self.home, kill=kill) != KILLED:
                break
        assert self.mortals.run(role="recover", home=self.home, kill={}, hosted=hosted) == 0

    def judge(self) -> None:
        log = open_log(self.home, State(), write=False)
        try:
            entries = [record.entry for record in log.records()]
            time.sleep(SETTLE)  # what the last of the dead had on its way has landed by then
            before = self.ledger.told("effects")
            time.sleep(SETTLE)
            effects = self.ledger.told("effects")
            assert effects == before, "something landed after the recovery was done"
            self._judge(log, entries, effects, self.ledger.told("attempts"), self.ledger.told("standing"))
        finally:
            log.close()
        verdict = verify(self.home, view_factory=State)
        assert verdict.exit == 0, verdict.findings

    def _judge(self, log: Any, entries: list[Entry], effects: Any, attempts: Any, standing: Any) -> None:
        mine = [e for e in effects if e["body"].get("saga", "") in self.sagas]
        keys = {e.key for e in entries if e.kind == "step.intended"}
        assert {e["key"] for e in mine} <= keys, "an effect whose intent is not in the log"
        assert max(Counter(e["key"] for e in mine).values()) == 1, "two effects under one key"
        stands = {e["key"] for e in standing}
        names = {log.identity.hide(name): name for name in self.sagas}
        for header in {e.saga for e in entries if e.saga}:
            told = [e for e in entries if e.saga == header]
            saga, script = log.view.past(header), self.sagas[names[header]]
            report = RollbackReport([saga])
            for step in saga.steps.values():
                of_step = [e for e in told if e.step == step.number]
                self._judge_step(of_step, step.key, effects, attempts)
                if step.state in (COMPENSATED, FAILED, REFUSED):
                    assert step.key not in stands, f"{header} step {step.number} is {step.state} and stands"
            if saga.phase == ENDED and saga.out != "committed":
                assert report.clean and not [s for s in saga.steps.values() if s.key in stands]
            if saga.phase != ENDED:
                assert saga.escalated and not report.clean, f"{header} is {saga.phase} and nobody is asked"
            if script["inverse"] == "declared" and script["handler"] in ("keyed", "idempotent"):
                assert saga.phase == ENDED, f"{header} needs a person: {saga.escalated}"
                assert not [e for e in told if e.kind == "saga.escalated"]

    def _judge_step(self, told: list[Entry], key: str, effects: Any, attempts: Any) -> None:
        intents = [e for e in told if e.kind == "undo.intended"]
        sent = [a for a in attempts if a["kind"] == "refund" and a["body"]["of"] == key]
        refunds = [e for e in effects if e["kind"] == "refund" and e["body"]["of"] == key]
        assert len(sent) <= len(intents), "a compensation was attempted that the log does not announce"
        assert len(refunds) <= 1, f"{key} was taken back twice"
        undone, lost, again = False, False, ""
        for entry in told:
            again = entry.again if entry.inv else again
            if entry.kind == "undo.intended":
                assert not undone, "a compensation was attempted again after its outcome was in the log"
                assert not lost or again, "a lost compensation was attempted again, and it may not be"
            undone = undone or entry.kind == "undo.done"
            lost = entry.kind == "undo.lost" or (lost and entry.kind != "undo.failed")
        assert len({e.key for e in intents}) <= 1, "another key for another attempt"


# ---- the matrix ------------------------------------------------------------------------------------------------------

HANDLERS = {"declared": ("keyed", "plain", "idempotent"), "derived": ("keyed", "plain"), "none": ("keyed",)}


@pytest.mark.promise("4.1")
@pytest.mark.slow
def test_no_kill_anywhere_leaves_an_effect_unsaid_or_taken_back_twice(
    tmp_path: Path, ledger: Ledger, mortals: Mortals
) -> None:
    for number, (inverse, handlers) in enumerate(HANDLERS.items()):
        matrix = Matrix(tmp_path / f"home-{inverse}", ledger, mortals, seed=number)
        for steps in range(1, 6):
            handler = handlers[steps % len(handlers)]
            matrix.agents(steps, inverse, handler, commits=False, every=1 if steps < 3 else steps)
            matrix.agents(steps, inverse, handlers[0], commits=steps % 2 == 0, every=2 + steps)
        matrix.recover(most=30, hosted=inverse == "derived")
        matrix.judge()
    kills = mortals.kills
    assert sum(kills.values()) >= 300, kills
    for moment in ("before commit", "after commit", "before undo", "sent undo", "answered undo"):
        assert kills[f"agent: {moment}"] >= 3 and kills[f"recover: {moment}"] >= 1, kills
    assert min(kills[f"agent: {when} do"] for when in ("before", "sent", "answered")) >= 10, kills


@pytest.mark.promise("4.1")
@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_two_thousand_kills_leave_nothing_unsaid(tmp_path: Path, ledger: Ledger, mortals: Mortals, part: int) -> None:
    """In eight parts of at least 250."""
    number = 0
    while sum(mortals.kills.values()) < 250:
        for inverse, handlers in HANDLERS.items():
            number += 1
            handler = handlers[(part + number) % len(handlers)]
            matrix = Matrix(tmp_path / f"part-{part}-{number}", ledger, mortals, seed=1000 * part + number)
            steps = 1 + (part + number) % 5
            matrix.agents(steps, inverse, handler, commits=False)
            matrix.agents(steps, inverse, handler, commits=True, every=3)
            matrix.recover(most=100, hosted=number % 3 == 0)
            matrix.judge()


@pytest.mark.promise("4.1")
def test_a_process_that_is_to_die_dies_and_one_that_is_not_lives(
    tmp_path: Path, ledger: Ledger, mortals: Mortals
) -> None:
    """The harness itself: without kills every claim above would pass."""
    matrix = Matrix(tmp_path / "home", ledger, mortals, seed=1)
    script = {"steps": 1, "inverse": "declared", "handler": "keyed", "commits": True}
    assert matrix._agent(script, {}) == 0
    assert matrix._agent(script, {"call": "do t1", "when": "sent"}) == KILLED
    assert matrix._agent(script, {"commit": 3, "when": "after"}) == KILLED
    time.sleep(SETTLE)
    matrix.recover(most=0)
    matrix.judge()
    assert [e["body"]["saga"] for e in ledger.told("standing") if e["body"]["saga"] in matrix.sagas] == ["home-0"]


def test_a_call_whose_caller_dies_in_the_middle_of_asking_is_no_attempt(ledger: Ledger) -> None:
    """Else the ledger would remember the refusal of half a request under the key of a whole one."""
    before = len(ledger.told("attempts"))
    address = urlsplit(ledger.url)
    with socket.create_connection((address.hostname, address.port)) as line:
        line.sendall(b"POST /refund HTTP/1.1\r\nHost: x\r\nIdempotency-Key: half\r\nContent-Length: 50\r\n\r\n")
    time.sleep(0.1)
    assert len(ledger.told("attempts")) == before
