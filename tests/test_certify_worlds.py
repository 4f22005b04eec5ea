"""A certificate says SAFE exactly when the far side's own book shows nothing that is not accounted for.

Seeded worlds (simulation.py): sagas of all sorts, answers that are lost or come late, fallbacks, deaths and recoveries,
and afterwards people who accept, or undo what was committed. The book is the far side's: what stands there, and what
its callers heard. From the log it takes only who decided what: which sagas stand, and what a person accepted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import certify_alone
import pytest
from simulation import (
    NAME,
    Clock,
    Heard,
    Held,
    HostReach,
    InMemory,
    Process,
    Run,
    SimDrive,
    Spec,
    kit_over,
    living,
    play,
    scenario,
)

from amends.runtime.certify import INDETERMINATE, SAFE, UNSAFE, Judged, judge
from amends.runtime.drive import run as run_now
from amends.runtime.facts import body, fact
from amends.runtime.followup import undo_committed
from amends.runtime.unwind import take, unwind
from amends.runtime.values import encode
from amends.store.entry import Entry
from amends.store.errors import AmendsError

PEOPLE = ("nobody", "accept", "undo", "undo and accept")


class Lived(NamedTuple):
    run: Run
    seed: int
    people: str
    deaths: list[int]

    def __str__(self) -> str:
        return f"lived({self.seed}): deaths {self.deaths}, {self.people}"


def lived(seed: int) -> Lived:
    """The world of a seed."""
    r = random.Random(f"certify {seed}")
    script = scenario(seed)
    while script.golden and r.random() < 0.6:
        script = scenario(r.randrange(1 << 30))
    script.power = False
    if r.random() < 0.3:
        script.ends_well = True
    if not script.golden:
        script.steps = [_harder(r, spec) for spec in script.steps]
    deaths = [r.randint(1, 40) for _ in range(r.choice((0, 0, 1, 2)))]
    clock = Clock()
    run = play(script, InMemory(clock), clock, deaths)
    people = r.choice(PEOPLE)
    if "undo" in people:
        _afterwards(run, _undo)
    if "accept" in people:
        _afterwards(run, _accept)
    return Lived(run, seed, people, deaths)


def _harder(r: random.Random, spec: Spec) -> Spec:
    """More fallbacks, and fewer inverses, than the simulation has."""
    if spec.sem == "compensable" and r.random() < 0.3:
        return replace(spec, fallback=True, swallowed=r.random() < 0.7)
    return replace(spec, inverse="none") if r.random() < 0.15 else spec


def _afterwards(run: Run, act: Any) -> None:
    process = Process(run.world, len(run.lives), 0)
    run.lives.append(process)
    process.log = Held(run.log, process)
    kit = kit_over(process.log, process.number)
    with living(process, kit):
        act(kit)
    run.world.clock.advance(60)


def _undo(kit: Any) -> None:
    with suppress(AmendsError):  # it was not committed, or nothing of it can be undone
        run_now(undo_committed(SimDrive(), kit, NAME, by="ann", reason="a customer asked"))  # type: ignore[arg-type]


def _accept(kit: Any) -> None:
    """A person accounts for all that needs one, until nothing does."""
    for _ in range(20):
        asked = [(s, number) for s in kit.engine.state.sagas.values() for number in s.escalated]
        if not asked:
            return
        for saga, number in asked:
            opening = body(by=encode("ann"), reason=encode("seen"))
            draft = fact("step.accepted", opening, saga=saga.id, step=number, up=True)
            kit.log.commit(lambda state, now, draft=draft: [draft])
        for root in list(kit.engine.state.roots()):
            if not root.driver:
                kit.log.commit(take(kit.engine, root.id, "", "accepted"))
                run_now(unwind(SimDrive(), kit.engine, root.id, HostReach(kit.engine, kit.hosts)))  # type: ignore[arg-type]


# ---- the far side's book ---------------------------------------------------------------------------------------------


def unaccounted(run: Run) -> list[str]:
    """What is not accounted for, by the far side's book and by what people and sagas decided."""
    entries = [record.entry for record in run.log.records()]
    about = _things(run, entries)
    stands = {e.saga for e in entries if e.kind == "saga.concluding" or (e.kind, e.out) == ("saga.ended", "committed")}
    decided: dict[str, str] = {}
    announced: dict[str, list[int]] = {}
    told: dict[str, list[Entry]] = {}
    for entry in entries:
        thing = about.get((entry.saga, entry.step), "")
        if thing and (entry.kind in ("step.carried", "step.accepted") or entry.kind in ANNOUNCES and entry.tool):
            decided[thing] = "accepted" if entry.kind == "step.accepted" else entry.saga
        told.setdefault(thing, []).append(entry)
        if thing and (entry.kind == "step.attempted" or entry.kind in ANNOUNCES and entry.tool):
            announced.setdefault(thing, []).append(entry.seq)
    heard = {thing: _heard(run, thing, places, told[thing]) for thing, places in announced.items()}
    return [
        thing for thing, saga in decided.items() if saga != "accepted" and _open(run, thing, saga in stands, heard)
    ]  # fmt: skip


ANNOUNCES = ("step.intended", "step.done")


def _heard(run: Run, thing: str, announced: Sequence[int], told: Sequence[Entry]) -> list[Heard]:
    """What was heard about a thing, without reversible effects that died with their process before they were written: a
    certificate says that it does not see those. What a process had heard and not written died with it. First of all
    nothing, where more was announced than was ever sent."""
    heard = [one for one in run.world.heard if one.thing == thing]
    dead = [one for one in heard if one.said == "nothing" and not run.lives[one.life].alive]
    written = [one for one in heard if one not in dead or min(announced) < one.size]
    sent = len([one for one in written if one.what == "do"])
    never = [Heard("do", thing, "nothing", 0, 0)] if sent < len(announced) else []
    return never + [one if _survived(run, one, told) else one._replace(said="nothing") for one in written]


def _survived(run: Run, one: Heard, told: Sequence[Entry]) -> bool:
    after = next((entry for entry in told if entry.seq >= one.size), None)
    return run.lives[one.life].alive or (after is not None and after.why != "died")


def _things(run: Run, entries: Sequence[Entry]) -> dict[tuple[str, int], str]:
    """What each step is about; a step that was carried is about what it was about before."""
    found: dict[tuple[str, int], str] = {}
    places: dict[int, str] = {}
    marked = 0
    for entry in entries:
        if entry.kind == "step.carried":
            found[entry.saga, entry.step] = places[entry.ref]
        elif entry.kind in ("step.intended", "step.done") and entry.tool:
            if entry.resource and (entry.saga, entry.step) not in found:
                found[entry.saga, entry.step] = run.script.held[marked]
                marked += 1
            elif not entry.resource:
                found[entry.saga, entry.step] = entry.tool + (".fallback" if entry.scope == "fallback" else "")
        if (entry.saga, entry.step) in found and entry.tool:
            places[entry.seq] = found[entry.saga, entry.step]
    return found


def _open(run: Run, thing: str, stands: bool, heard: dict[str, list[Heard]]) -> bool:
    if thing in run.script.held:
        ends = [one for one in heard[thing] if one.what in ("confirm", "cancel")]
        return not ends or ends[-1].said != "answer" or (ends[-1].what == "confirm") != stands
    if run.world.standing[thing]:
        other = heard.get(f"{thing}.fallback", ())
        return not stands or any((one.what, one.said) == ("do", "answer") for one in other)
    said = [one.said for one in heard[thing] if one.said != "no"]  # a no says nothing of a call before it
    return bool(said) and said[-1] == "nothing"


# ---- the worlds ------------------------------------------------------------------------------------------------------


def agree(world: Lived) -> Judged:
    entries = [record.entry for record in world.run.log.records()]
    judged = judge(entries)
    expected = unaccounted(world.run)
    assert (judged.verdict == SAFE) == (not expected), f"{world}: {judged.findings} and {expected}"
    counts = judged.counts
    parts = (counts.committed, counts.approved, counts.compensated, counts.accepted, counts.not_happened)
    assert counts.effects == sum(parts) + counts.unaccounted, f"{world}: {counts}"
    alone(judged, [record.line for record in world.run.log.records()], str(world))
    return judged


def alone(judged: Judged, lines: Sequence[bytes], world: str) -> None:
    """The program that knows nothing of amends says the same."""
    told = certify_alone.verdict(lines)
    assert told.verdict == judged.verdict, world
    assert sorted(told.findings) == sorted((f.seq, f.saga, f.step, f.code) for f in judged.findings), world
    ours = judged.counts._asdict()
    wrong = {name: (ours[name], told.counts.get(name, 0)) for name in ours if ours[name] != told.counts.get(name, 0)}
    assert not {name: pair for name, pair in wrong.items() if name not in ("open", "compacted")}, (world, wrong)


FOUND = (
    "unknown", "standing", "orphaned", "compensation_failed", "undo_unknown", "tentative", "fallback_hidden",
)  # fmt: skip


@pytest.mark.promise("6.7")
def test_in_a_few_worlds_a_certificate_and_the_far_sides_book_agree() -> None:
    first = random.Random().randrange(1 << 20)
    print("seeds from", first)
    assert {agree(lived(seed)).verdict for seed in range(first, first + 150)} == {SAFE, UNSAFE}


@pytest.mark.promise("6.7")
@pytest.mark.slow
def test_a_certificate_is_safe_exactly_when_the_far_sides_book_shows_nothing_unaccounted() -> None:
    first, many = random.Random().randrange(1 << 20), 2200
    print("seeds from", first)
    verdicts: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    worlds: Counter[str] = Counter()
    for seed in range(first, first + many):
        world = lived(seed)
        judged = agree(world)
        verdicts[judged.verdict] += 1
        codes.update(finding.code for finding in judged.findings)
        worlds.update(["died"] * bool(world.run.faults) + [world.people])
        worlds["carried"] += judged.counts.carried > 0
        worlds["accepted"] += judged.counts.accepted > 0
        for name in ("by_probe", "by_compensation", "by_person", "by_answer", "approved"):
            worlds[name] += judged.counts._asdict()[name] > 0
    print(dict(verdicts), dict(codes), dict(worlds))
    assert verdicts[SAFE] >= many // 5 and verdicts[UNSAFE] >= many // 5 and not verdicts[INDETERMINATE]
    for seen in ("died", "carried", "accepted", "by_probe", "by_compensation", "by_person", "by_answer", "approved"):
        assert worlds[seen] >= 3, f"{seen}: {worlds[seen]} worlds"
    for code in FOUND:
        assert codes[code] >= 1, f"{code} was never found"
