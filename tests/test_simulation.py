"""A process that dies anywhere, and the ones that recover after it, leave nothing behind that the report does not name.

Seeded worlds (simulation.py): each seed is a saga, a far side, and deaths at chosen points; each runs on the log in a
file, over a disk that loses power, and on the log in memory, and both must tell the same story. Whatever fails prints
its seed and deaths; `play_both(seed, deaths)` has it again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from powerloss import under
from simulation import Clock, InMemory, OnDisk, Run, Scenario, Spec, play, scenario

from amends.runtime.due import Rest, due
from amends.runtime.gate.locks import Held
from amends.runtime.report import RollbackReport
from amends.runtime.saga import CONCLUDING, ENDED, UNWINDING, pending
from amends.runtime.state import State
from amends.runtime.step import ACCEPTED, COMPENSATED, CONFIRMED, DONE, FAILED, REFUSED
from amends.store import sqlite
from amends.store.chain import Chain
from amends.store.entry import Entry

SETTLED = (COMPENSATED, FAILED, REFUSED)


@pytest.fixture(autouse=True)
def _no_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is decided by the machine's clock; a -wal is not preallocated for a life of milliseconds."""
    for name, value in (("IDLE_S", 3600.0), ("LAZY_S", 3600.0), ("SIGN_S", 3600.0), ("WAL_BYTES", 0)):
        monkeypatch.setattr(sqlite, name, value)
    with under():
        yield


@contextmanager
def named(seed: int, deaths: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"play_both({seed}, {list(deaths)})")
        raise


def play_both(seed: int, deaths: Sequence[int], script: Scenario | None = None) -> Run:
    """One scenario on both logs; what is asked of every run is asked of both. Returns the run in memory."""
    script = script or scenario(seed)
    with named(seed, deaths):
        clock = Clock()
        disk = OnDisk(clock, seed)
        try:
            filed = play(script, disk, clock, deaths)
            judge(filed)
            told = story(filed.log)
        finally:
            disk.gone()
        clock = Clock()
        kept = play(script, InMemory(clock, disk.cuts), clock, deaths)
        assert story(kept.log) == told
        assert kept.world.attempts == filed.world.attempts
        judge(kept)
        return kept


def story(log: Any) -> list[tuple[str, int, str]]:
    """The facts without times and ids."""
    return [(record.entry.kind, record.entry.step, record.entry.out) for record in log.records()]


# ---- what is asked of every run --------------------------------------------------------------------------------------


def judge(run: Run) -> None:
    entries = [record.entry for record in run.log.records()]
    every_prefix_folds(run)
    nothing_is_left_to_do(run)
    effects_are_announced(run, entries)
    for saga, number in {(entry.saga, entry.step) for entry in entries if entry.step}:
        compensations_are_attempted_as_promised(run, [e for e in entries if (e.saga, e.step) == (saga, number)])
    nothing_stands_that_is_called_clean(run)
    what_is_tentative_has_the_fate_of_its_saga(run, entries)
    names_are_claimed_for_as_long_as_their_saga_is_open(run)
    if run.script.golden:
        no_person_was_needed(run, entries)
    assert not run.world.doubled, f"taken back twice: {run.world.doubled}"


def every_prefix_folds(run: Run) -> None:
    """And of every prefix one can say what is due and what stands."""
    chain = Chain(State())
    for record in run.log.records():
        chain.follow(record.entry, record.line)
        view = chain.view
        for saga in view.roots():
            family = view.family(saga)
            RollbackReport(family).summary()
            if saga.phase in (UNWINDING, CONCLUDING):
                due(family, chain.now(run.world.clock))
    fresh = State()
    fresh.load(chain.view.dump())
    assert fresh.dump() == chain.view.dump() == run.log.view.dump()


def nothing_is_left_to_do(run: Run) -> None:
    """Every saga has ended, or waits for a person and says for what."""
    view = run.log.view
    for saga in view.roots():
        family = view.family(saga)
        assert any(member.escalated for member in family), f"{saga.phase} and nobody is asked"
        assert saga.phase in (UNWINDING, CONCLUDING) and isinstance(due(family, run.log.now()), Rest)


def effects_are_announced(run: Run, entries: list[Entry]) -> None:
    """A compensable or irreversible effect was attempted only with its intent on the disk."""
    intents = {(e.tool, e.scope == "fallback") for e in entries if e.kind == "step.intended"}
    sems = {spec.tool: spec.sem for spec in run.script.steps}
    for attempt in run.world.attempts:
        tool, _, fallback = attempt.thing.partition(".")
        if attempt.what == "do" and sems[tool] != "reversible":
            assert (tool, bool(fallback)) in intents, f"{attempt.thing} was attempted and is not in the log"


def compensations_are_attempted_as_promised(run: Run, told: list[Entry]) -> None:
    """Told: the entries of one step. Each attempt was announced; none follows an outcome; a lost one is tried again
    under the same key, and only if that is safe."""
    first = next((e for e in told if e.tool), None)
    thing = first.tool + (".fallback" if first.scope == "fallback" else "") if first else ""
    attempts = [a for a in run.world.attempts if a.what == "undo" and a.thing == thing]
    intents = [e for e in told if e.kind == "undo.intended"]
    announced = [e.seq for e in intents]
    for attempt in attempts:
        before = [seq for seq in announced if seq < attempt.size]
        assert before, f"the compensation of {thing} was attempted and not announced"
        announced.remove(before[-1])
        assert not [e for e in told if before[-1] < e.seq < attempt.size and e.kind.startswith("undo.")]
    for word in ("undo", "undo/late"):
        keys = {e.key for e in intents if e.scope == word}
        assert len(keys) <= 1 and (word == "undo" or len([e for e in intents if e.scope == word]) < 4)
        sent = {a.key for a in attempts if a.key}
        assert sent <= {e.key for e in intents}
    again = _again(told)
    state = "open"
    for entry in told:
        if entry.kind == "undo.intended":
            assert state != "undone" or entry.scope == "undo/late", f"{thing} was undone already"
            assert state != "lost" or again, f"{thing}: its answer was lost, and it may not be attempted again"
        state = {"undo.done": "undone", "undo.lost": "lost", "undo.intended": "open"}.get(entry.kind, state)
        if entry.kind == "step.probed" and entry.out == "present":
            state = "open"


def _again(told: list[Entry]) -> str:
    found = ""
    for entry in told:
        found = entry.again if entry.inv else found
    return found


def nothing_stands_that_is_called_clean(run: Run) -> None:
    world = run.world
    names = dict.fromkeys(record.entry.saga for record in run.log.records() if record.entry.saga)
    for name in names:
        saga = run.log.view.past(name)
        clean = RollbackReport([saga]).clean
        for step in saga.steps.values():
            if step.resource:  # of those there is a claim of its own
                continue
            thing = step.tool + (".fallback" if _is_fallback(run, saga.id, step.number) else "")
            if saga.phase == ENDED and saga.out == "committed":
                assert (step.state == DONE) == (world.standing[thing] > 0), f"committed, and {thing} is {step.state}"
            elif step.state in SETTLED and not step.late and not _died_with_its_process(run, thing):
                assert not world.standing[thing], f"{thing} is told as {step.state} and stands"
            if clean and saga.phase == ENDED and saga.out != "committed":
                assert step.state in (*SETTLED, ACCEPTED)


def what_is_tentative_has_the_fate_of_its_saga(run: Run, entries: list[Entry]) -> None:
    """Never both ends, each at most once, and the one that was decided."""
    resolved = run.world.resolved
    assert all(count == 1 for count in resolved.values()), resolved
    stands = any(entry.kind == "saga.concluding" for entry in entries)
    wrong = "cancel" if stands else "confirm"
    assert not [thing for verb, thing in resolved if verb == wrong], (wrong, resolved)
    for name in dict.fromkeys(entry.saga for entry in entries if entry.resource):
        saga = run.log.view.past(name)
        marked = [step for step in saga.steps.values() if step.resource]
        for thing, step in zip(run.script.held, marked, strict=False):
            if step.state == CONFIRMED:
                assert resolved["confirm", thing] == 1 and stands
            if step.state == COMPENSATED:
                assert resolved["cancel", thing] == 1 and not stands
            assert not pending(step) or saga.phase != ENDED, f"{thing} is pending in a saga that has ended"


def names_are_claimed_for_as_long_as_their_saga_is_open(run: Run) -> None:
    view = run.log.view
    marked = {saga.id: [s for s in saga.steps.values() if s.resource] for saga in view.roots()}
    assert Counter(held.saga for held in view.locks.held.values()) == {
        saga: len(steps) for saga, steps in marked.items() if steps
    }


def _died_with_its_process(run: Run, thing: str) -> bool:
    """A reversible effect whose intent was in a dead process's memory, or in a file that was not flushed (1.2)."""
    spec = next(spec for spec in run.script.steps if spec.tool == thing.partition(".")[0])
    filed = spec.inverse in ("declared", "both") and not run.script.power
    dead = [a for a in run.world.attempts if a.what == "do" and a.thing == thing and not run.lives[a.life].alive]
    return spec.sem == "reversible" and not filed and bool(dead)


def _is_fallback(run: Run, saga: str, number: int) -> bool:
    return any(
        r.entry.kind == "step.intended" and r.entry.step == number and r.entry.scope == "fallback"
        for r in run.log.thread(saga)
    )


def no_person_was_needed(run: Run, entries: list[Entry]) -> None:
    """Declared inverses and keyed handlers: whatever dies, nobody is asked."""
    assert not [e.why for e in entries if e.kind == "saga.escalated"]
    assert not list(run.log.view.roots())
    assert all(count == 1 for count in run.world.done.values())


# ---- the runs --------------------------------------------------------------------------------------------------------


def points(seed: int) -> list[str]:
    """The points of an agent's life without a death."""
    clock = Clock()
    return play(scenario(seed), InMemory(clock), clock, []).lives[0].points


def every_death(seeds: Sequence[int], twice: int) -> Counter[str]:
    """Each point of each seed, and after every `twice`-th a death at each point of the recovery as well."""
    fired: Counter[str] = Counter()
    for seed in seeds:
        r = random.Random(seed)
        for n in range(1, len(points(seed)) + 1):
            run = play_both(seed, [n])
            fired.update(run.faults)
            fired["runs"] += 2
            second = len(run.lives[1].points)
            chosen = range(1, second + 1) if r.random() < 1 / twice else r.sample(range(1, second + 1), min(1, second))
            for m in chosen:
                again = play_both(seed, [n, m, r.randint(1, 12) if r.random() < 0.3 else 0])
                fired.update(again.faults)
                fired["again in recovery"] += len([life for life in again.lives[1:] if not life.alive])
                fired["runs"] += 2
    return fired


@pytest.mark.promise("4.1")
@pytest.mark.promise("1.7")
@pytest.mark.slow
@pytest.mark.parametrize("seeds, runs", [((3, 4, 5, 7, 8, 12, 14, 15), 1400), ((1, 2, 6, 9, 10, 11, 13), 600)])
def test_a_death_at_every_point_of_the_agent_and_of_its_recovery_leaves_nothing_unsaid(
    seeds: tuple[int, ...], runs: int
) -> None:
    """Two groups that may run side by side; 2,000 runs together."""
    fired = every_death(seeds, twice=12)
    print(seeds, dict(fired))
    assert fired["runs"] >= runs
    for fault in ("commit asked", "commit returned", "do begins", "do sent", "do landed", "undo begins", "undo sent",
                  "undo landed", "probe", "power cut", "wall clock set", "again in recovery"):  # fmt: skip
        assert fired[fault] >= 3, f"{fault} fired {fired[fault]} times"


@pytest.mark.promise("4.1")
@pytest.mark.long
def test_many_more_deaths_leave_nothing_unsaid() -> None:
    fired = every_death(range(1000, 1400), twice=3)
    assert fired["runs"] >= 20_000 and fired["again in recovery"] >= 2000


def test_the_judge_turns_red_for_a_compensation_that_runs_twice() -> None:
    """The check itself: a run that passes does not pass with one more attempt, or with something left standing."""
    seed = next(s for s in range(50) if _undone(scenario_run(s)))
    run = scenario_run(seed)
    judge(run)
    thing = _undone(run)
    run.world.standing[thing] = 1
    with pytest.raises(AssertionError, match="stands"):
        judge(run)
    run.world.standing[thing] = 0
    last = [a for a in run.world.attempts if a.what == "undo" and a.thing == thing][-1]
    run.world.attempts.append(last._replace(size=run.log.size))
    with pytest.raises(AssertionError):
        judge(run)


def test_the_judge_turns_red_for_what_is_confirmed_twice_or_cancelled_too() -> None:
    script = one_step(ends_well=True)
    script.held = ("h1",)
    clock = Clock()
    run = play(script, InMemory(clock), clock, [])
    judge(run)
    for wrong in ({("confirm", "h1"): 2}, {("confirm", "h1"): 1, ("cancel", "h1"): 1}, {}):
        run.world.resolved = Counter(wrong)
        with pytest.raises(AssertionError):
            judge(run)
    run.world.resolved = Counter({("confirm", "h1"): 1})
    run.log.view.locks.held["00ff"] = Held("00ff", "somebody", 1, 1)
    with pytest.raises(AssertionError):
        names_are_claimed_for_as_long_as_their_saga_is_open(run)


def scenario_run(seed: int) -> Run:
    clock = Clock()
    return play(scenario(seed), InMemory(clock), clock, [])


def _undone(run: Run) -> str:
    """A thing that this run took back for good."""
    for record in run.log.records():
        if record.entry.kind == "undo.done" and record.entry.out == "done":
            saga = run.log.view.past(record.entry.saga)
            tool = saga.steps[record.entry.step].tool
            if saga.phase == ENDED and not _is_fallback(run, saga.id, record.entry.step):
                return str(tool)
    return ""


# ---- what the worlds found, as small as it gets ----------------------------------------------------------------------


def one_step(*, fate: str = "never", ends_well: bool = False, on_crash: str = "unwind", words: Any = None,
             **spec: Any) -> Scenario:  # fmt: skip
    """A saga of one step; what is on its way when its caller dies lands as `fate` says."""
    given = {"sem": "compensable", "keyed": True, "inverse": "declared", "handler": "sim.keyed", "probe": False} | spec
    script = Scenario(
        0, [Spec("t1", retry=0, swallowed=False, fallback=False, **given)], (0, 0), ends_well, on_crash, "halt", False,
        False, False, words or {},
    )  # fmt: skip
    script.in_flight = lambda n: fate  # type: ignore[method-assign]
    return script


def killed(script: Scenario, moment: str) -> Run:
    """The agent dies at the first such moment."""
    clock = Clock()
    names = play(script, InMemory(clock), clock, []).lives[0].points
    return play_both(0, [names.index(moment) + 1], script)


@pytest.mark.promise("2.6")
@pytest.mark.slow
@pytest.mark.parametrize("power", [False, True])
def test_a_death_at_every_point_around_the_two_ends_of_what_is_tentative(power: bool) -> None:
    """And at one more of the recovery after it, with answers that are lost on the way."""
    fired: Counter[str] = Counter()
    chance = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    lost = {"confirm h1": ["lost after", "lost before"], "cancel h2": ["lands late"], "confirm h2": ["refused"]}
    for ends_well in (True, False):
        script = one_step(fate="now", ends_well=ends_well, words=lost)
        script.held, script.power, script.golden = ("h1", "h2"), power, True
        clock = Clock()
        for n in range(1, len(play(script, InMemory(clock), clock, []).lives[0].points) + 1):
            run = play_both(0, [n], script)
            fired.update(run.faults)
            if run.lives[1].points:
                fired.update(play_both(0, [n, chance.randint(1, len(run.lives[1].points))], script).faults)
    for verb in ("confirm", "cancel"):
        for moment in ("begins", "sent", "landed"):
            assert fired[f"{verb} {moment}"] >= 3, fired


@pytest.mark.promise("1.14")
def test_an_effect_that_lands_after_its_probe_was_asked_is_undone() -> None:
    run = killed(one_step(probe=True, fate="later"), "do sent")
    assert run.world.done["t1"] == 1 and not run.world.standing["t1"]
    assert [e for e in story(run.log) if e[0] in ("step.probed", "undo.done")] == [
        ("step.probed", 1, "present"), ("undo.done", 1, "done"),
    ]  # fmt: skip


@pytest.mark.promise("1.14")
def test_a_lost_answer_whose_probe_says_absent_too_early_is_not_told_as_failed() -> None:
    script = one_step(probe=True, words={"do t1": ["lands late"]})
    run = play_both(0, [], script)
    assert run.world.done["t1"] == 1 and not run.world.standing["t1"]


@pytest.mark.promise("4.1")
def test_a_compensation_that_may_still_land_is_not_run_again_because_its_probe_sees_the_effect() -> None:
    script = one_step(handler="sim.plain", probe=True, fate="later")
    run = killed(script, "undo sent")
    assert len([a for a in run.world.attempts if a.what == "undo"]) == 1
    assert not run.world.standing["t1"] and not run.world.doubled
    assert ("undo.done", 1, "already") in story(run.log)


@pytest.mark.promise("1.11")
def test_a_reversible_step_that_nobody_knows_of_is_performed_again_after_a_resume_and_told() -> None:
    script = one_step(sem="reversible", inverse="derived", on_crash="resume", ends_well=True,
                      words={"do t1": ["lost after", "ok"]})  # fmt: skip
    clock = Clock()
    names = play(script, InMemory(clock), clock, []).lives[0].points
    for n in range(1, len(names) + 1):
        run = play_both(0, [n], script)
        assert not any(kind == "step.landed" for kind, _, _ in story(run.log))


@pytest.mark.promise("1.11")
def test_an_approved_step_whose_process_died_is_not_asked_for_again_when_it_is_resumed() -> None:
    script = one_step(sem="irreversible", inverse="none", on_crash="resume", ends_well=True, fate="now")
    run = killed(script, "do sent")
    assert [kind for kind, _, _ in story(run.log)].count("step.asked") == 1
    assert ("saga.ended", 0, "committed") in story(run.log) and run.world.done["t1"] == 1
