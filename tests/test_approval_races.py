"""Two people answer one question at the same moment, from two processes: one of them wins, and the other is told.

The question is a real saga's, which waits in a third process (this one) on the same home. The two racers meet at a
barrier before each question, and each tells when it began and when it had its answer; only rounds in which those times
overlap are counted.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from approving import Asking
from world import World

from amends import AgentKit, Refused, SagaAborted

MOST = 3000
"""Rounds that are run at most, to have enough that overlap."""
PATIENCE_S = 60.0


class Ran(NamedTuple):
    """How one racer fared: `won`, or the code and the words it was refused with; nanoseconds of its attempt."""

    said: str
    words: str
    began: int
    ended: int


def racer(home: str, barrier: Any, pipe: Connection) -> None:
    """Answers what it is handed: (item, verdict, by, seconds to wait first), None to end."""
    kit = AgentKit(home=home)
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        item, verdict, by, later_s = job
        kit.log.refresh()
        barrier.wait(PATIENCE_S)
        time.sleep(later_s)
        began, said, words = time.monotonic_ns(), "won", ""
        try:
            (kit.approve if verdict == "approve" else kit.deny)(item, by=by)
        except Refused as refused:
            said, words = refused.code, refused.message
        pipe.send(Ran(said, words, began, time.monotonic_ns()))
    kit.close()


class Race:
    """Two racers on one home."""

    def __init__(self, home: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        barrier = spawn.Barrier(2)
        self.pipes = []
        self.racers = []
        for _ in range(2):
            ours, theirs = spawn.Pipe()
            child = spawn.Process(target=racer, args=(str(home), barrier, theirs), daemon=True)
            child.start()
            self.pipes.append(ours)
            self.racers.append(child)
        for pipe in self.pipes:
            assert pipe.poll(PATIENCE_S) and pipe.recv() == "ready"

    def run(self, *jobs: tuple[str, str, str, float]) -> list[Ran]:
        for pipe, job in zip(self.pipes, jobs, strict=True):
            pipe.send(job)
        answers = []
        for pipe in self.pipes:
            assert pipe.poll(PATIENCE_S), "a racer does not come back"
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for pipe, child in zip(self.pipes, self.racers, strict=True):
            pipe.send(None)
            child.join(20)
            child.kill()


def overlap(one: Ran, other: Ran) -> bool:
    return one.began < other.ended and other.began < one.ended


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[AgentKit]:
    made = AgentKit(home=tmp_path / "home")
    yield made
    made.close()


@pytest.fixture
def race(kit: AgentKit) -> Iterator[Race]:
    assert kit.home is not None
    made = Race(kit.home.path)
    yield made
    made.close()


def outcome(asking: Asking) -> str:
    done = asking.end()
    if isinstance(done, SagaAborted):
        return str(getattr(done.cause, "code", ""))
    return "sent" if done == "sent" else repr(done)


def votes(kit: AgentKit, request: str) -> list[tuple[str, str]]:
    kit.log.refresh()
    entries = [record.entry for record in kit.log.records(max(0, kit.log.size - 200))]
    return [(e.out, e.why) for e in entries if e.kind == "vote.cast" and e.request == request]


@pytest.mark.promise("3.1")
@pytest.mark.slow
@pytest.mark.parametrize("rounds, against", [(500, "deny"), (150, "approve")], ids=["yes-against-no", "two-yes"])
def test_two_answers_at_once_have_one_winner(kit: AgentKit, race: Race, rounds: int, against: str) -> None:
    world, counted, came = World(), 0, Counter[str]()
    for number in range(MOST):
        asking = Asking(kit, lambda n: world.act(str(n), f"k{n}") and "sent", {"n": number}, id=f"pay-{number}")
        item, request = asking.seen().item, asking.asked.request
        ran = race.run((item, "approve", "Ann", 0.0), (item, against, "Bob", 0.0))
        said, cast = outcome(asking), votes(kit, request)
        where = f"round {number}: {ran} {said} {cast}"
        assert (str(number) in world.standing) == (said == "sent") and said in ("sent", "denied"), where
        won = [verdict for verdict, one in zip(("approve", against), ran, strict=True) if one.said == "won"]
        assert [out for out, why in cast if not why] == won and len(cast) == 2, where
        # A no wins as long as the yes is not spent: where both were taken, the no came later, and nothing was sent.
        assert won == (["approve"] if said == "sent" else won[:-1] + ["deny"]), where
        assert all(one.said == "won" or (one.said == "decided" and "already" in one.words) for one in ran), where
        if overlap(*ran):
            counted += 1
            came[f"{' and '.join(won)}: {said}"] += 1
        if counted == rounds:
            break
    print(f"{counted} rounds overlapped: {dict(came)}")
    assert counted == rounds, f"only {counted} rounds overlapped"


@pytest.mark.promise("3.2")
@pytest.mark.slow
def test_a_no_against_the_sending_has_one_winner(kit: AgentKit, race: Race) -> None:
    """The no comes at about the time at which the approval is spent: what was sent cannot be denied any more."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance, world, came, met = random.Random(seed), World(), Counter[str](), 0
    spread = 0.004
    for number in range(200):
        sent: list[int] = []

        def act(n: int, sent: list[int] = sent) -> str:
            sent.append(time.monotonic_ns())
            world.act(str(n), f"k{n}")
            return "sent"

        asking = Asking(kit, act, {"n": number}, id=f"pay-{number}")
        item = asking.seen().item
        yes, no = race.run((item, "approve", "Ann", 0.0), (item, "deny", "Bob", spread * 2 * chance.random()))
        said = outcome(asking)
        where = f"seed {seed}, round {number}: {yes} {no} {said}"
        assert (str(number) in world.standing) == (said == "sent") == bool(sent), where
        assert (no.said == "won") == (said == "denied"), where
        assert said == "denied" or "sent" in no.words, where
        came[said] += 1
        met += bool(sent) and no.began < sent[0] < no.ended
        spread *= 0.9 if said == "sent" else 1.1  # towards the moment at which either may win
    print(f"{dict(came)}; in {met} rounds it was sent while somebody was about to say no")
    assert came["sent"] >= 20 and came["denied"] >= 20, came
