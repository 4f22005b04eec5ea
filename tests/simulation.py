"""A world in one process: sagas against a far side that counts, on a clock of its own, in processes that die anywhere.

A *scenario* (made from a seed) is a saga of 1 to 5 steps and what the far side does at each attempt. A *process* runs
it, or recovers it, and dies at the n-th of its points: around every commit, and before, inside and after every effect,
compensation and probe. The next process opens the same log, and may die too. What a dead process still tries is
refused, and what it had only in memory is gone; after a power cut, so is what was not flushed.

Nothing of the product is replaced but the outermost doors: the clock, how the engine waits (`Drive`), and where
handlers live (`Hosts`). Everything is decided by the seed, so that a run can be had again, and on another log.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from base64 import b32encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from log_contract import Keys
from powerloss import ANYTHING, Disk, die

from amends.runtime import scope, tools
from amends.runtime.daemon import RESUME, check, left_alone
from amends.runtime.drive import Ran, run
from amends.runtime.gate.policy_file import Policy
from amends.runtime.hosts import Hosts, Known, Outcome
from amends.runtime.kit import AgentKit
from amends.runtime.reach import HostReach
from amends.runtime.saga import RUNNING, SUSPENDED
from amends.runtime.scope import SagaAborted, saga_scope
from amends.runtime.state import State
from amends.runtime.tools import ABSENT, ALREADY_DONE, CANNOT_TELL, PRESENT, Compensation, RetryPolicy, compensator
from amends.runtime.unwind import take, unwind
from amends.runtime.values import decode
from amends.store.errors import AmendsError, Fenced
from amends.store.log import DURABLE, MemoryLog
from amends.store.sqlite import SqliteLog

SETTLE = 2.0
LATEST = 1.5
"""Seconds after which nothing of a call that was given up lands any more: less than SETTLE."""
NAME = "the-saga"


class Crash(BaseException):
    """The process is no more."""


# ---- the clock and the far side --------------------------------------------------------------------------------------


class Clock:
    """Time passes when somebody waits. The wall may be set; a boot begins at zero."""

    def __init__(self) -> None:
        self.true_ms = 0
        self.set_us = 1_764_460_800_000_000
        self.boot = 1
        self.booted_ms = 0
        self.ticks: list[Callable[[], None]] = []

    def wall_us(self) -> int:
        return self.set_us + self.true_ms * 1000

    def boot_ms(self) -> int:
        return 5000 + self.true_ms - self.booted_ms

    def boot_id(self) -> str:
        return f"boot-{self.boot}"

    def advance(self, seconds: float) -> None:
        self.true_ms += max(1, round(seconds * 1000))
        for tick in self.ticks:
            tick()

    def reboot(self) -> None:
        self.advance(5)
        self.boot, self.booted_ms = self.boot + 1, self.true_ms


class Attempt(NamedTuple):
    """One call that reached the far side. size: how long the caller's log was, of which so much was flushed."""

    what: str
    thing: str
    key: str
    size: int
    flushed: int
    life: int


class Heard(NamedTuple):
    """What the caller of one call heard: `answer`, `no` or `nothing`. size: how long its log was."""

    what: str
    thing: str
    said: str
    size: int
    life: int


class World:
    """The far side: what stands, and every call that reached it.

    It honours idempotency keys: one effect each, and nothing on its way lands once the key was refused."""

    def __init__(self, clock: Clock, scenario: Scenario) -> None:
        self.clock, self.scenario = clock, scenario
        self.standing: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.undone: Counter[str] = Counter()
        self.resolved: Counter[tuple[str, str]] = Counter()  # confirm or cancel, and what
        self.keys: set[str] = set()
        self.attempts: list[Attempt] = []
        self.heard: list[Heard] = []
        self.landing: list[tuple[int, str, Callable[[], None]]] = []
        self.words = {name: list(words) for name, words in scenario.words.items()}
        self.doubled: list[str] = []
        clock.ticks.append(self.tick)

    def tick(self) -> None:
        due = [effect for effect in self.landing if effect[0] <= self.clock.true_ms]
        self.landing = [effect for effect in self.landing if effect[0] > self.clock.true_ms]
        for _, _, land in due:
            land()

    def later(self, land: Callable[[], None], key: str) -> None:
        self.landing.append((self.clock.true_ms + round(LATEST * 1000), key, land))

    def word(self, name: str) -> str:
        words = self.words.get(name)
        return words.pop(0) if words else "ok"

    def do(self, thing: str, key: str) -> None:
        if key and self._seen(key):
            return
        self.done[thing] += 1
        self.standing[thing] += 1

    def undo(self, thing: str, key: str, kind: str) -> bool:
        """Take it back; False if there is nothing (any more)."""
        if key and self._seen(key):
            return True
        if kind == "plain" and self.undone[thing] and self.undone[thing] >= self.done[thing]:
            self.doubled.append(thing)
        if not self.standing[thing]:
            return False
        self.standing[thing] -= 1
        self.undone[thing] += 1
        return True

    def resolve(self, verb: str, thing: str, key: str) -> None:
        if not self._seen(key):
            self.resolved[verb, thing] += 1

    def refuse(self, key: str) -> bool:
        """Say no, unless this key was answered otherwise before."""
        if key and key in self.keys:
            return False
        self.landing = [effect for effect in self.landing if not key or effect[1] != key]
        return True

    def _seen(self, key: str) -> bool:
        seen = key in self.keys
        self.keys.add(key)
        return seen


# ---- a process -------------------------------------------------------------------------------------------------------


class Process:
    """A life: it dies at its n-th point. `points` says what each was."""

    def __init__(self, world: World, number: int, dies_at: int) -> None:
        self.world, self.number, self.dies_at = world, number, dies_at
        self.points: list[str] = []
        self.alive = True
        self.log: Any = None

    def point(self, what: str) -> None:
        """A moment at which one can die."""
        self.living()
        self.points.append(what)
        if len(self.points) == self.dies_at:
            self.alive = False
            raise Crash(what)

    def living(self) -> None:
        if not self.alive:
            raise Crash("what a dead process does")


class Held:
    """The log as one process holds it. What was appended and not flushed dies with the process."""

    def __init__(self, inner: Any, process: Process) -> None:
        self._inner, self._process = inner, process
        self._queue: list[Any] = []
        self.flushed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def commit(self, decide: Any, sync: int = DURABLE) -> Any:
        self._process.point("commit asked")
        self.flush()
        entries = self._inner.commit(decide, sync)
        if sync == DURABLE and entries:
            self.flushed = self._inner.size
        self._process.point("commit returned")
        return entries

    def append(self, decide: Any) -> None:
        self._process.living()
        self._queue.append(decide)

    def flush(self) -> None:
        self._process.living()
        queue, self._queue = self._queue, []
        for decide in queue:
            self._inner.append(decide)
        self._inner.flush()

    def close(self) -> None:
        if self._process.alive:
            self.flush()


class SimDrive:
    """How the engine waits in a world without time."""

    async def commit(self, log: Any, decide: Any, sync: int = DURABLE) -> Any:
        return log.commit(decide, sync)

    async def call(self, fn: Any, kwargs: Mapping[str, Any], timeout: float | None, urgent: bool = False) -> Ran:
        try:
            return Ran(fn(**kwargs))
        except Exception as error:
            return Ran(error=error)

    async def sleep(self, seconds: float) -> None:
        here().living()
        here().world.clock.advance(seconds)

    async def grown(self, log: Any, size: int, timeout: float) -> bool:
        here().living()
        here().world.clock.advance(timeout)
        for ask in _asked:
            ask()
        grew: bool = log.size > size
        return grew


_here: list[Process] = []
_asked: list[Callable[[], None]] = []


def here() -> Process:
    return _here[-1]


@contextmanager
def living(process: Process, kit: AgentKit) -> Iterator[None]:
    """Code in this block is the process's."""

    def answer() -> None:
        for item in kit.inbox():
            if item["kind"] == "approval":
                kit.approve(item["id"], by="ann")

    before = scope.BLOCKING
    scope.BLOCKING = SimDrive()  # type: ignore[assignment]
    _here.append(process)
    _asked.append(answer)
    try:
        yield
    finally:
        scope.BLOCKING = before
        _here.pop()
        _asked.pop()
        scope.CURRENT.set(None)


# ---- tools, compensations and probes ---------------------------------------------------------------------------------


class LostAnswer(ConnectionError):
    """The line broke: it may have happened."""


def _reach(what: str, thing: str, key: str, land: Callable[[], Any], word: str) -> Any:
    """One call, and what its caller hears: an answer, a no, or nothing."""
    process, size = here(), here().log.size
    heard = "nothing"
    try:
        said = _call(what, thing, key, land, word)
        heard = "answer"
    except ValueError:
        heard = "no"
        raise
    finally:
        process.world.heard.append(Heard(what, thing, heard, size, process.number))
    return said


def _call(what: str, thing: str, key: str, land: Callable[[], Any], word: str) -> Any:
    """The far side takes effect now, later, or never; the caller hears of it, or not, or is dead."""
    process = here()
    world = process.world
    process.point(f"{what} begins")
    log = process.log
    world.attempts.append(Attempt(what, thing, key, log.size, log.flushed, process.number))
    try:
        process.point(f"{what} sent")
    except Crash:
        fate = world.scenario.in_flight(len(world.attempts))
        if fate == "now":
            land()
        elif fate == "later":
            world.later(land, key)
        raise
    if word == "refused" and world.refuse(key):
        raise ValueError(f"{thing} is refused")
    if word == "lost before":
        raise LostAnswer(thing)
    if word == "lands late":
        world.later(land, key)
        raise LostAnswer(thing)
    said = land()
    process.point(f"{what} landed")
    if word == "lost after":
        raise LostAnswer(thing)
    return said


def _do(thing: str, key: str) -> dict[str, Any]:
    world = here().world
    _reach("do", thing, key, lambda: world.do(thing, key), world.word(f"do {thing}"))
    return {"thing": thing}


def do_keyed(thing: str, idempotency_key: str) -> dict[str, Any]:
    return _do(thing, idempotency_key)


def do_plain(thing: str) -> dict[str, Any]:
    return _do(thing, "")


def _undo(thing: str, key: str, kind: str) -> Any:
    world = here().world
    there = _reach("undo", thing, key, lambda: world.undo(thing, key, kind), world.word(f"undo {thing}"))
    return None if there else ALREADY_DONE("nothing there")


@compensator("sim.keyed")
def undo_keyed(thing: str, idempotency_key: str) -> Any:
    return _undo(thing, idempotency_key, "keyed")


@compensator("sim.plain")
def undo_plain(thing: str) -> Any:
    return _undo(thing, "", "plain")


@compensator("sim.idempotent", idempotent=True)
def undo_idempotent(thing: str) -> Any:
    return _undo(thing, "", "idempotent")


@compensator("sim.gone")
def undo_gone(thing: str, idempotency_key: str) -> Any:
    """A handler that no host has after a crash."""
    return _undo(thing, idempotency_key, "keyed")


@compensator("sim.confirm")
def confirm(thing: str, idempotency_key: str) -> None:
    _resolve("confirm", thing, idempotency_key)


@compensator("sim.cancel")
def cancel(thing: str, idempotency_key: str) -> None:
    _resolve("cancel", thing, idempotency_key)


def _resolve(verb: str, thing: str, key: str) -> None:
    world = here().world
    _reach(verb, thing, key, lambda: world.resolve(verb, thing, key), world.word(f"{verb} {thing}"))


def probe(thing: str) -> Any:
    process = here()
    process.point("probe")
    cannot = process.world.word(f"probe {thing}") == "cannot tell"
    heard = "nothing" if cannot else "answer"
    process.world.heard.append(Heard("probe", thing, heard, process.log.size, process.number))
    if cannot:
        return CANNOT_TELL
    return PRESENT({"thing": thing}) if process.world.standing[thing] else ABSENT


class SimHosts(Hosts):
    """Hosts of the recovering process: every registered handler but one, and the recorded probe."""

    name = "simulated"

    def find(self, handler: str, recorded: Any = None) -> tuple[Any, Known]:
        if handler.endswith(":probe"):
            return self, Known(True)
        known = tools.find(handler)
        if known is None or handler == "sim.gone":
            return None, Known(False, why=f"no host has {handler}")
        return self, Known(True, known.keyed, known.idempotent)

    def call(
        self, handler: str, purpose: str, kwargs: Mapping[str, Any], idempotency_key: str, saga: str, step: int,
        attempt: int, deadline_ms: int,
    ) -> Outcome:  # fmt: skip
        given = {name: decode(value) for name, value in kwargs.items()}
        if purpose == "probe":
            said = probe(**given)
            return Outcome(said.amends_outcome, said.result)
        known = tools.find(handler)
        assert known is not None
        if known.keyed:
            given["idempotency_key"] = idempotency_key
        try:
            said = known.fn(**given)
        except LostAnswer as error:
            return Outcome("lost", why=str(error))
        except Exception as error:
            return Outcome("failed", why=str(error))
        return Outcome("done" if said is None else "already_done")


# ---- scenarios -------------------------------------------------------------------------------------------------------


@dataclass
class Spec:
    """One step: tool (and thing) name, and what its author declared."""

    tool: str
    sem: str
    keyed: bool
    inverse: str
    handler: str
    probe: bool
    retry: int
    swallowed: bool
    fallback: bool


@dataclass
class Scenario:
    """A saga and what the far side does. golden: declared inverses and keyed handlers only. held: what is tentative in
    it, marked before its first step."""

    seed: int
    steps: list[Spec]
    inner: tuple[int, int]
    ends_well: bool
    on_crash: str
    on_failure: str
    merged: bool
    golden: bool
    power: bool
    words: dict[str, list[str]]
    steps_wall: list[int] = field(default_factory=list)
    held: tuple[str, ...] = ()

    def in_flight(self, n: int) -> str:
        """What becomes of the n-th call if its caller dies while it is on its way."""
        return random.Random(self.seed * 1000 + n).choice(("never", "now", "later"))


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    r = random.Random(seed)
    golden = r.random() < 0.4
    steps = [_spec(r, f"t{i}", golden) for i in range(1, r.randint(1, 5) + 1)]
    words: dict[str, list[str]] = {}
    for spec in steps:
        words[f"do {spec.tool}"] = [_do_word(r) for _ in range(2)] if r.random() < 0.4 else []
        kinds = ["lost before", "lost after", "lands late"] if golden else _UNDO_WORDS
        words[f"undo {spec.tool}"] = [r.choice(kinds) for _ in range(r.randint(1, 2))] if r.random() < 0.35 else []
        words[f"probe {spec.tool}"] = ["cannot tell"] if not golden and r.random() < 0.15 else []
    held = _held(random.Random(f"held {seed}"), golden, words)
    inner = (0, 0)
    if len(steps) > 1 and r.random() < 0.3:
        first = r.randrange(len(steps))
        inner = (first, r.randint(first + 1, len(steps)))
    return Scenario(
        seed, steps, inner, ends_well=r.random() < 0.35, on_crash="resume" if r.random() < 0.2 else "unwind",
        on_failure="continue" if r.random() < 0.2 else "halt", merged=r.random() < 0.2, golden=golden,
        power=r.random() < 0.4, words=words, steps_wall=[r.choice((-1, 1)) * 86400] if r.random() < 0.2 else [],
        held=held,
    )  # fmt: skip


def _held(r: random.Random, golden: bool, words: dict[str, list[str]]) -> tuple[str, ...]:
    """What is tentative, and what the far side does when it is confirmed or cancelled."""
    held = tuple(f"h{i + 1}" for i in range(r.choice((0, 0, 0, 1))))
    for thing in held:
        for verb in ("confirm", "cancel"):
            kinds = ["lost before", "lost after", "lands late"] if golden else _UNDO_WORDS
            words[f"{verb} {thing}"] = [r.choice(kinds) for _ in range(r.randint(1, 3))] if r.random() < 0.4 else []
    return held


_UNDO_WORDS = ["refused", "refused", "lost before", "lost after", "lands late"]


def _do_word(r: random.Random) -> str:
    return r.choice(["refused", "refused", "lost before", "lost after", "lands late", "ok"])


def _spec(r: random.Random, tool: str, golden: bool) -> Spec:
    keyed = golden or r.random() < 0.6
    if golden:
        return Spec(tool, r.choice(("compensable", "compensable", "reversible")), True, r.choice(("declared", "both")),
                    "sim.keyed", r.random() < 0.3, r.choice((0, 0, 1)), r.random() < 0.3, False)  # fmt: skip
    sem = r.choice(("compensable", "compensable", "compensable", "reversible", "irreversible"))
    inverse = r.choice(("declared", "declared", "derived", "both", "none", "closure", "human"))
    if sem == "irreversible":
        inverse = "none"
    handler = r.choice(("sim.keyed", "sim.keyed", "sim.plain", "sim.plain", "sim.idempotent", "sim.gone"))
    return Spec(tool, sem, keyed, inverse, handler, r.random() < 0.35, r.choice((0, 1)) if keyed else 0,
                r.random() < 0.4, sem == "compensable" and r.random() < 0.15)  # fmt: skip


# ---- lives -----------------------------------------------------------------------------------------------------------


def agent(kit: AgentKit, script: Scenario) -> str:
    """Run the saga of a scenario. How it ended: committed, aborted, refused."""
    try:
        with saga_scope(
            id=NAME, kit=kit, on_crash=script.on_crash, on_compensation_failure=script.on_failure,
            barriers="merged" if script.merged else "strict",
        ) as saga:  # fmt: skip
            for thing in script.held:
                saga.tentative(thing, confirm=_end("sim.confirm", thing), cancel=_end("sim.cancel", thing), lock=True)
            first, last = script.inner
            _perform(saga, script.steps[:first])
            if last:
                with saga_scope(name="inner", kit=kit) as inner:
                    _perform(inner, script.steps[first:last])
            _perform(saga, script.steps[last:])
            if not script.ends_well:
                raise ValueError("the agent changed its mind")
    except SagaAborted:
        return "aborted"
    except AmendsError:
        return "refused"
    return "committed"


def _end(handler: str, thing: str) -> Compensation:
    return Compensation(handler=handler, kwargs={"thing": thing})


def _perform(saga: Any, steps: Sequence[Spec]) -> None:
    for spec in steps:
        try:
            saga.execute(spec.tool, do_keyed if spec.keyed else do_plain, {"thing": spec.tool}, **_options(spec))
        except (ValueError, LostAnswer):
            if not spec.swallowed:
                raise


def _options(spec: Spec) -> dict[str, Any]:
    options: dict[str, Any] = {"semantics": spec.sem, "settle": SETTLE}
    made = _inverse(spec, spec.tool)
    if spec.inverse in ("declared", "both", "closure", "human"):
        options["undo"] = made
    if spec.inverse in ("derived", "both"):
        options["compensate"] = lambda result: _inverse(spec, result["thing"])
    if spec.probe:
        options["probe"] = probe
    if spec.retry:
        options["retry"] = RetryPolicy(spec.retry, "constant", 0.1, jitter=0)
    if spec.fallback:
        options["fallback"] = tools.Fallback(
            _Other(spec.tool), undo=Compensation(handler="sim.keyed", kwargs={"thing": f"{spec.tool}.fallback"})
        )
    return options


class _Other:
    """The forward of a fallback: another thing."""

    def __init__(self, thing: str) -> None:
        self.thing = f"{thing}.fallback"

    def __call__(self, thing: str, idempotency_key: str) -> Any:
        return _do(self.thing, idempotency_key)


def _inverse(spec: Spec, thing: str) -> Compensation:
    if spec.inverse == "human":
        return Compensation.human(f"take back {thing}")
    if spec.inverse == "closure":
        return Compensation(lambda: _undo(thing, "", "plain"))
    return Compensation(handler=spec.handler, kwargs={"thing": thing})


def recover(kit: AgentKit) -> int:
    """What a daemon's sweep does, one saga after another on this thread. How many it took."""
    taken = 0
    kit.log.refresh()
    for saga in list(kit.engine.state.roots()):
        if left_alone(kit, saga, kit.lives):
            continue
        check(kit.log, saga, kit.engine.state.family(saga))
        taken += 1
        with suppress(Fenced):
            kit.log.commit(take(kit.engine, saga.id, saga.driver, "crash" if saga.driver else "released"))
            run(unwind(SimDrive(), kit.engine, saga.id, HostReach(kit.engine, kit.hosts)))
    return taken


def resumable(kit: AgentKit) -> bool:
    """Whether the saga waits to be run again."""
    return any(
        saga.on_crash == "resume" and saga.phase in (RUNNING, SUSPENDED) and left_alone(kit, saga, kit.lives) == RESUME
        for saga in kit.engine.state.roots()
    )


# ---- logs that outlive a process -------------------------------------------------------------------------------------


class InMemory:
    """What a MemoryLog kept, handed from one process to the next. cuts: how much of it each power cut left."""

    def __init__(self, clock: Clock, cuts: Sequence[int] = ()) -> None:
        self.clock, self.cuts = clock, list(cuts)
        self.log: MemoryLog | None = None

    def open(self) -> MemoryLog:
        old, view = self.log, State()
        view.archive = self.log = log = MemoryLog(view, clock=self.clock)
        if old is not None:
            log._rows = list(old._rows)
            log._seqs = {saga: list(seqs) for saga, seqs in old._seqs.items()}
            log._refold()
        return log

    def killed(self) -> None:
        pass

    def cut(self, at_least: int) -> None:
        assert self.log is not None
        left = self.cuts.pop(0)
        del self.log._rows[left:]
        for seqs in self.log._seqs.values():
            seqs[:] = [seq for seq in seqs if seq < left]
        self.log._seqs = {saga: seqs for saga, seqs in self.log._seqs.items() if seqs}

    def gone(self) -> None:
        pass


class OnDisk:
    """A SqliteLog on a disk that loses power. cuts: how many entries each cut left."""

    def __init__(self, clock: Clock, seed: int) -> None:
        self.clock = clock
        self.folder = Path(tempfile.mkdtemp(prefix="amends-sim-", dir=SHM))
        self.disk = Disk(self.folder, seed)
        self.cuts: list[int] = []
        self.log: SqliteLog | None = None
        self._owed: int | None = None
        self._flushed = 0

    def open(self) -> SqliteLog:
        view = State()
        self.log = SqliteLog(self.folder / "amends.db", view, Keys(), clock=self.clock)
        if self._owed is not None:
            size = self.log.size
            assert size >= self._owed, "an acknowledged record was lost"
            self.cuts.append(size)
            self._owed = None
        return self.log

    def killed(self) -> None:
        """The process ends without closing anything: the kernel does that."""
        log, self.log = self.log, None
        if log is not None:
            die(log)

    def cut(self, at_least: int) -> None:
        self.disk.cut()
        self.killed()
        self.disk = self.disk.after_the_cut(ANYTHING)
        self._owed = max(at_least, self._flushed)
        self._flushed = self._owed

    def gone(self) -> None:
        self.killed()
        self.disk.gone()
        shutil.rmtree(self.folder, ignore_errors=True)


SHM = "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else None


# ---- a run -----------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """What one run left: its world, its log (open), its processes, and the faults that fired."""

    script: Scenario
    world: World
    log: Any
    lives: list[Process]
    faults: list[str]


def hide(name: str) -> str:
    return b32encode(sha256(b"sim" + name.encode()).digest()).decode().lower()[:26]


class SimNames:
    """The same names in headers for every process of a world."""

    def hide(self, name: str) -> str:
        return hide(name)

    def meter(self, name: str) -> str:
        return sha256(b"sim meter" + name.encode()).hexdigest()[:16]

    def fingerprint(self, value: bytes) -> str:
        return ""


def kit_over(log: Any, number: int) -> AgentKit:
    kit = AgentKit.__new__(AgentKit)
    kit.name, kit.on_behalf_of, kit.home, kit.dead = "sim", "", None, []
    kit._hold(log, SimNames(), SimHosts(), Policy(None, None))
    kit._memory_driver = f"driver-{number}"
    return kit


def play(script: Scenario, store: Any, clock: Clock, deaths: Sequence[int]) -> Run:
    """The agent's life, then recoveries, each dying at the point `deaths` names (0: not), until one lives."""
    world = World(clock, script)
    lives: list[Process] = []
    faults: list[str] = []
    for number, dies_at in enumerate([*deaths, 0, 0]):
        process = Process(world, number, dies_at)
        lives.append(process)
        log = store.open()
        process.log = Held(log, process)
        process.log.flushed = 0
        kit = kit_over(process.log, number)
        try:
            with living(process, kit):
                if number == 0 or resumable(kit):
                    agent(kit, script)
                else:
                    recover(kit)
        except Crash:
            faults.append(process.points[-1])
        if not process.alive:
            if script.power:
                faults.append("power cut")
                store.cut(process.log.flushed)
                clock.reboot()
            else:
                store.killed()
                clock.advance(0.05)
        elif number < len(deaths) + 1:
            store.killed()
        for step in script.steps_wall[number : number + 1]:
            faults.append("wall clock set")
            clock.set_us += step * 1_000_000
    clock.advance(60)
    return Run(script, world, log, lives, faults)
