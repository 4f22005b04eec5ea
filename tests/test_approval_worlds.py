"""Between a question and its effect a process may die at any moment: nothing is sent unallowed, and nothing twice.

Askers and voters are processes of their own that kill themselves (SIGKILL) at one named moment each; the far side is a
ledger in a process of its own. Each world is made by its seed, which a failure prints. Then log and ledger are asked.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from approving import Asking
from kill_child import SETTLE
from mortals import KILLED, Ledger, Mortals
from simulation import Clock
from world import World as Vendor
from world import killed

from amends import AgentKit, Refused
from amends.runtime import admission, scope
from amends.runtime.gate.approvals import EXPIRED, standing
from amends.runtime.gate.rules import ApprovalPolicy, PreFlightGate
from amends.runtime.saga import ENDED
from amends.runtime.state import State
from amends.store.audit import verify
from amends.store.identity import open_log

LONG_S, SHORT_S = 600.0, 0.3


class Crowd:
    """One home, askers and voters that die in it, and what is asked of log and ledger then."""

    def __init__(self, tmp: Path, ledger: Ledger, seed: int) -> None:
        print(f"seed {seed}")
        self.home, self.ledger, self.seed, self.tmp = str(tmp / "home"), ledger, seed, tmp
        self.random = random.Random(seed)
        self.askers, self.voters = (Mortals(tmp / f"{name}-errors", "ask_child.py") for name in ("asker", "voter"))
        self.sagas: dict[str, dict[str, Any]] = {}
        self.died: Counter[str] = Counter()

    def close(self) -> None:
        self.askers.close()
        self.voters.close()

    def begin(self, **script: Any) -> str:
        name = f"w{self.seed}-{len(self.sagas)}"
        self.sagas[name] = {"timeout_s": LONG_S, "amount": 4200, **script}
        return name

    def run(self, name: str, kill: dict[str, Any], voter_kill: dict[str, Any] | None = None) -> int:
        """The asker once, with a voter beside it for as long as it lives; how the asker ended."""
        script = self.sagas[name]
        stop = self.tmp / f"{name}-{time.monotonic_ns()}"
        vote = {"role": "voter", "home": self.home, "saga": name, "stop": str(stop), "verdict": script["verdict"]}
        beside = threading.Thread(target=lambda: self._vote(vote, voter_kill))
        if script["verdict"] != "nobody":
            beside.start()
        code = self.askers.run(role="asker", home=self.home, url=self.ledger.url, saga=name, kill=kill, **script)
        stop.touch()
        if script["verdict"] != "nobody":
            beside.join(60)
            assert not beside.is_alive()
        if code == KILLED:
            self._note(name)
        return code

    def _vote(self, job: dict[str, Any], kill: dict[str, Any] | None) -> None:
        if kill and self.voters.run(**job, kill=kill) == KILLED:
            self.died["voter"] += 1
            kill = None
            self.voters.run(**job, kill={})  # somebody else comes by
        elif not kill:
            self.voters.run(**job, kill={})

    def _note(self, name: str) -> None:
        """Where in the life of its question an asker died."""
        log = open_log(self.home, State(), write=False)
        try:
            header = log.identity.hide(name)
            asked = [a for a in log.view.approvals.requests.values() if a.saga == header]
            state = (
                "spent"
                if any(a.over == "spent" for a in asked)
                else "answered"
                if any(a.votes for a in asked)
                else "asked"
            )
            self.died[state if asked else "before"] += 1
        finally:
            log.close()

    def recover(self) -> None:
        assert self.askers.run(role="recover", home=self.home, kill={}) == 0

    def judge(self) -> None:
        time.sleep(2 * SETTLE)
        effects = self.ledger.told("effects")
        log = open_log(self.home, State(), write=False)
        try:
            records = list(log.records())
            for name, script in self.sagas.items():
                wires = [e for e in effects if e["kind"] == "wire" and e["body"]["saga"] == name]
                self._judge(log, [r.entry for r in records], log.identity.hide(name), script, wires)
        finally:
            log.close()
        assert verify(self.home, view_factory=State).exit == 0

    def _judge(self, log: Any, entries: list[Any], header: str, script: dict[str, Any], wires: list[Any]) -> None:
        where = f"seed {self.seed}, {script}"
        asked = [e for e in entries if e.kind == "step.asked" and e.saga == header]
        spent = [e for e in entries if e.kind == "step.intended" and e.saga == header and e.request]
        votes = [e for e in entries if e.kind == "vote.cast" and e.of == header]
        assert len(wires) <= 1, f"{where}: sent {len(wires)} times"
        assert len({e.request for e in spent}) == len(spent) <= 1, f"{where}: an approval was spent twice"
        for intent in spent:
            said = [v for v in votes if v.request == intent.request and v.seq < intent.seq and not v.why]
            assert [v.out for v in said] == ["approve"], f"{where}: spent on {said}"
        if wires:
            assert spent and script["verdict"] == "approve", f"{where}: sent, and nobody had allowed it"
        saga = log.view.past(header)
        step = saga.steps.get(2) if saga is not None else None
        if script["on_crash"] == "unwind" and saga is not None:
            assert not [a for a in log.view.approvals.open if a.saga == header], f"{where}: a question is left open"
            assert saga.phase == ENDED or saga.escalated, f"{where}: {saga.phase}"
        if script.get("finished"):
            assert len(asked) <= 1, f"{where}: what was answered was asked again"
            if script["verdict"] == "approve":
                assert len(wires) == 1 or (not script["keyed"] and step.state in ("unknown", "failed")), where
            elif step is not None:
                assert step.state == "refused", f"{where}: {step.state}"


@pytest.fixture
def crowd(tmp_path: Path, ledger: Ledger) -> Iterator[Any]:
    made: list[Crowd] = []

    def make(seed: int) -> Crowd:
        made.append(Crowd(tmp_path / f"{seed}", ledger, seed))
        (tmp_path / f"{seed}").mkdir(exist_ok=True)
        return made[-1]

    yield make
    for one in made:
        one.close()


MOMENTS = [{"call": "do wire", "when": when} for when in ("before", "sent", "answered")]


@pytest.mark.promise("3.2")
@pytest.mark.promise("3.1")
@pytest.mark.slow
@pytest.mark.parametrize("on_crash, keyed", [("unwind", True), ("unwind", False), ("resume", True), ("resume", False)])
def test_whoever_asks_dies_at_each_moment_and_nothing_is_sent_unallowed_or_twice(
    crowd: Any, on_crash: str, keyed: bool
) -> None:
    world: Crowd = crowd(10 + ["unwind", "resume"].index(on_crash) * 2 + keyed)
    lived = False
    moments = MOMENTS + [{"commit": n, "when": when} for n in range(1, 14) for when in ("before", "after")]
    for kill in moments:
        name = world.begin(on_crash=on_crash, keyed=keyed, verdict="approve")
        lived = world.run(name, kill) != KILLED
        if lived:
            break
        if on_crash == "resume":
            world.run(name, {})
            world.sagas[name]["finished"] = True
    assert lived, "no commit was left to die at: there must be more of them"
    if on_crash == "unwind":
        world.recover()
    world.judge()
    assert world.died["asked"] and world.died["answered"] and world.died["spent"], world.died


@pytest.mark.promise("3.1")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_seeded_worlds_of_askers_and_voters_that_die(crowd: Any, seed: int) -> None:
    world: Crowd = crowd(1000 + seed)
    pick = world.random.choice
    for _ in range(5):
        verdict = pick(["approve", "approve", "deny", "nobody"])
        on_crash = pick(["unwind", "resume"])
        name = world.begin(
            on_crash=on_crash, keyed=pick([True, False]), verdict=verdict,
            timeout_s=SHORT_S if verdict == "nobody" else LONG_S,
        )  # fmt: skip
        kill = pick([*MOMENTS, *({"commit": n, "when": w} for n in range(2, 9) for w in ("before", "after"))])
        voter = pick([None, None, {"commit": pick([1, 2, 3]), "when": pick(["before", "after"])}])
        code = world.run(name, kill, voter)
        if code == KILLED and on_crash == "resume":
            world.run(name, {})
            world.sagas[name]["finished"] = True
    world.recover()
    world.judge()


# ---- the deadline, from both sides -----------------------------------------------------------------------------------


@pytest.fixture
def vendor() -> Vendor:
    return Vendor()


def waiting(vendor: Vendor, ms: int = 1000) -> tuple[AgentKit, Clock, Asking]:
    clock = Clock()
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(timeout=ms / 1000)), clock=clock)
    asking = Asking(kit, lambda amount: vendor.act(str(amount), "k"), {"amount": 1}, id="pay")
    assert asking.asked
    return kit, clock, asking


@pytest.mark.promise("3.1")
def test_at_its_deadline_a_question_is_answered_and_the_answer_is_spent(vendor: Vendor) -> None:
    kit, clock, asking = waiting(vendor)
    seen = asking.seen()
    clock.advance(1.0)
    kit.approve(seen.item, by="Ann")
    asking.end()
    assert vendor.standing == ["1"]


@pytest.mark.promise("3.1")
def test_past_its_deadline_it_is_a_no_on_both_sides(vendor: Vendor) -> None:
    kit, clock, asking = waiting(vendor)
    seen, request = asking.seen(), asking.asked.request
    clock.advance(1.002)
    assert standing(kit.engine.state.approvals, request, kit.log.now().lived) == EXPIRED
    with pytest.raises(Refused) as late:
        kit.approve(seen.item, by="Ann")
    assert late.value.code == "expired"
    assert asking.code() == "expired" and not vendor.effects


class Died(BaseException):
    """Stands for the death of whoever asked."""


@pytest.mark.promise("3.2")
@pytest.mark.parametrize("late", [False, True])
def test_a_yes_survives_the_one_who_asked_and_is_spent_in_time_or_never(
    vendor: Vendor, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """It died between the yes and the sending, and is run again before or after the deadline."""
    clock, gate = Clock(), PreFlightGate(approval=ApprovalPolicy(timeout=100))
    kit = AgentKit.in_memory(gate=gate, clock=clock)
    sent = {"effect": lambda amount: vendor.act(str(amount), "k"), "kwargs": {"amount": 1}, "id": "pay"}

    def die(*_: Any) -> Any:
        raise Died

    with monkeypatch.context() as dying:
        dying.setattr(admission, "spend", die)
        dying.setattr(scope, "roll_back", die)  # a dead process undoes nothing
        first = Asking(kit, on_crash="resume", **sent)
        request = first.asked.request
        kit.approve(first.seen().item, by="Ann")
        assert isinstance(first.end(), Died) and not vendor.effects
    killed(kit)
    kit._memory_driver = "another"
    if late:
        clock.advance(101)
    again = Asking(kit, on_crash="resume", **sent)
    if late:
        assert again.code() == "expired" and not vendor.effects
    else:
        again.end()
        assert vendor.standing == ["1"]
    asked = [record.entry.request for record in kit.log.records() if record.entry.kind == "step.asked"]
    assert asked == [request], "what was answered was not asked again"
