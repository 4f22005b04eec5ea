"""The same engine, for sagas that nobody drives any more.

A dead process is noticed by the kernel's release of its lock, with no timer in between: one thread waits on each
driver. Whoever commits `saga.taken` first has a dead saga, under a higher fence, as a whole family; it is unwound in
hosts, and an unwinding that was interrupted goes on where it stopped; one whose fate was to stand is confirmed to its
end. Any number of daemons and agents may race. What needs a person is escalated and left, what a person has frozen is
left as it stands until that is lifted, what a live driver holds is not touched, and nothing is done at all while a
record that is needed does not add up.

Why the looks and the work are apart: a handler may take a minute and a settle wait longer; the next dead process is
noticed meanwhile, and a supervisor's watchdog hears from the loop that looks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from ..store.chain import Draft
from ..store.clock import Now
from ..store.driver import alive, listed, until_dead
from ..store.driver import sweep as sweep_files
from ..store.errors import AmendsError, Damaged, DiskFull, LogHeld, Malformed, Refused, SealKey
from ..store.evidence import DatabaseError
from ..store.log import Log
from .adopted import carry_over
from .drive import Blocking, Drive, run
from .due import Rest, due
from .facts import fact
from .gate.freeze import HALTED, QUARANTINED, freeze
from .hosts import Hosts, Outcome
from .inverse import Recorded
from .openings import known_as, refuse_sealed
from .reach import HostReach
from .reconcile import Schedule
from .report import RollbackReport
from .retention import Turns
from .saga import ENDED, RUNNING, SUSPENDED, Saga
from .state import State
from .step import Step
from .unwind import held, of, take, unwind

if TYPE_CHECKING:
    from .kit import AgentKit

SIDE_BY_SIDE = 32
"""Sagas unwound at once: most of them wait."""
WATCHERS = 64
LOOK = 0.05
IDLE = 1.0
BLINK, LAST_LOOKS = 0.01, 20
"""Seconds between the last looks at lock files, and how many: somebody else may be looking at one just then."""

LIVE, PERSON, RESUME = "held by a live driver", "needs a person", "waits to be resumed"
FROZEN = {QUARANTINED: "quarantined", HALTED: "frozen by a halt"}
"""Why a saga is left as it stands, by what `freeze` says."""


class Swept(NamedTuple):
    """What one sweep did (PROMISES 12.1): recovered saga ids, escalated and skipped with the reason."""

    recovered: list[str]
    escalated: list[dict[str, Any]]
    skipped: list[dict[str, Any]]

    @property
    def exit(self) -> int:
        return 1 if self.escalated else 0

    def to_json(self) -> dict[str, Any]:
        """The stable keys of `recoverd --once --json`."""
        return self._asdict()


# ---- what is to be done ----------------------------------------------------------------------------------------------


def left_alone(kit: AgentKit, saga: Saga, lives: Callable[[str], bool]) -> str:
    """Why recovery leaves this root alone now; empty if it is to be taken."""
    if saga.id in kit.engine.runs or (saga.driver and lives(saga.driver)):
        return LIVE
    now, state = kit.log.now(), kit.engine.state
    family = state.family(saga)
    frozen = freeze(state, family, now)
    if frozen == QUARANTINED:
        return FROZEN[frozen]
    if saga.on_crash == "resume" and saga.phase in (RUNNING, SUSPENDED) and not _too_late(saga, now):
        return RESUME
    if saga.driver or saga.phase in (RUNNING, SUSPENDED):
        return ""
    if frozen:
        return FROZEN[frozen]
    return PERSON if isinstance(due(family, now), Rest) else ""


def _too_late(saga: Saga, now: Now) -> bool:
    """Whether nobody took it up in time, since it was let go. One whose death is news has all of its time left."""
    return not saga.driver and now.lived - saga.idle_lived >= saga.within_ms


def check(log: Log, saga: Saga, family: Sequence[Saga]) -> None:
    """Every record of a family is what the chain says it is, and every opening what its record commits to.

    Raises Damaged, which names the record; an opening that is no longer there is no damage.
    """
    for member in family:
        seq = member.opened_seq
        try:
            for record in log.thread(member.id):
                seq = record.entry.seq
                _check_place(log, seq, record.line)
                refuse_sealed(record)
                for line in (record.blob or b"").splitlines(True):
                    if sha256(line).hexdigest() not in record.entry.c:
                        raise Damaged(f"Record {seq}: what it holds is not what it commits to.", seq=seq)
        except (Damaged, SealKey):
            raise
        except (Malformed, DatabaseError, ValueError) as error:
            seq = _first_unreadable(log, member.opened_seq)
            raise Damaged(
                f"Record {seq} of saga {saga.id} cannot be read ({error}).",
                next="Nothing was undone. Run `amends verify`.",
                seq=seq,
            ) from error


def _check_place(log: Log, seq: int, line: bytes) -> None:
    """The record's hash is what the next record names; the newest one was checked when the log was opened."""
    if not log.stands(seq, line):
        raise Damaged(
            f"Record {seq} is not the one that was written: what comes after it names another hash.",
            next="Nothing was undone. Run `amends verify`.",
            seq=seq,
        )


def _first_unreadable(log: Log, start: int) -> int:
    for seq in range(start, log.size):
        try:
            log.record(seq)
        except (AmendsError, DatabaseError, ValueError) as error:
            if getattr(error, "code", "") != "compacted":
                return seq
    return start


# ---- doing it --------------------------------------------------------------------------------------------------------


class Stopped(AmendsError):
    """We were asked to stop before this saga was done: it was let go, and goes on where it stands."""

    code = "stopped"
    exit = 0


class _Patient(Blocking):
    """Waits, but not once it is asked to stop."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop

    async def sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Stopped("Recovery was asked to stop.")

    async def grown(self, log: Log, size: int, timeout: float) -> bool:
        if self._stop.is_set():
            raise Stopped("Recovery was asked to stop.")
        return await super().grown(log, size, timeout)


class _Reach(HostReach):
    """Hosts, for as long as nobody asks to stop: no new handler is announced after that."""

    def __init__(self, kit: AgentKit, hosts: Hosts, stop: threading.Event) -> None:
        super().__init__(kit.engine, hosts)
        self._stop = stop

    def missing(self, saga: Saga, step: Step, recorded: Recorded, purpose: str) -> tuple[str, str] | None:
        if self._stop.is_set():
            raise Stopped("Recovery was asked to stop.")
        return super().missing(saga, step, recorded, purpose)

    async def probe(self, drive: Drive, saga: Saga, step: Step) -> Outcome:
        if self._stop.is_set():
            raise Stopped("Recovery was asked to stop.")
        return await super().probe(drive, saga, step)


class Recovery:
    """Takes dead sagas and unwinds them side by side. `stop` ends it between two compensations."""

    def __init__(self, kit: AgentKit, hosts: Hosts | None = None, stop: threading.Event | None = None) -> None:
        self._kit = kit
        self.stop = stop or threading.Event()
        self._reach = _Reach(kit, hosts or kit.hosts, self.stop)
        self._drive = _Patient(self.stop)
        self._pool = ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="amends-unwind")
        self._work: dict[str, Future[RollbackReport]] = {}
        self._names: dict[str, str] = {}

    @property
    def busy(self) -> bool:
        return bool(self._work)

    def look(self, lives: Callable[[str], bool], ended: Callable[[], None] = lambda: None) -> dict[str, str]:
        """Start on everything that is ripe; what was left alone, by root, with the reason.

        `ended` is called (on another thread) whenever one is done. Raises Damaged before anything is started.
        """
        kit = self._kit
        left: dict[str, str] = {}
        ripe: list[Saga] = []
        for saga in kit.engine.state.roots():
            if saga.id in self._work:
                continue
            why = left_alone(kit, saga, lives)
            if not why:
                ripe.append(saga)
                continue
            left[saga.id] = why
            if why == RESUME and saga.driver:
                self._let_lie(saga)
        for saga in ripe:
            check(kit.log, saga, kit.engine.state.family(saga))
        for saga in ripe:
            self._names[saga.id] = name_of(kit, saga.id)
            self._work[saga.id] = self._pool.submit(self._recover, saga.id, saga.driver)
            self._work[saga.id].add_done_callback(lambda done: ended())
        return left

    def _recover(self, root: str, driver: str) -> RollbackReport:
        """Take one dead saga and unwind it. Raises Fenced if somebody else was faster, Stopped."""
        if self.stop.is_set():
            raise Stopped("Recovery was asked to stop.")
        engine = self._kit.engine
        engine.log.commit(take(engine, root, driver, "crash" if driver else "released"))
        try:
            return run(unwind(self._drive, engine, root, self._reach))
        except Stopped:
            saga = engine.state.sagas.get(root)
            if saga is not None:
                family = engine.state.family(saga)
                engine.log.commit(held(engine, family, [of(member, "saga.released", up=True) for member in family]))
            raise

    def _let_lie(self, saga: Saga) -> None:
        """A saga that waits to be run again: its time begins when its death is noticed."""
        dead = saga.driver

        def decide(state: State, now: Now) -> Sequence[Draft]:
            found = state.sagas.get(saga.id)
            if found is None or found.driver != dead:
                return ()
            return [
                fact("saga.released", saga=member.id, fence=member.fence, why="died", up=True)
                for member in state.family(found)
            ]

        self._kit.log.commit(decide)

    def done(self, *, wait: bool = False) -> Swept:
        """What has been finished since the last call. Raises what stopped one of them, after noting the others."""
        swept, trouble = Swept([], [], []), None
        for root, work in list(self._work.items()):
            if not wait and not work.done():
                continue
            try:
                self._note(swept, root, work.result())
            except (Refused, Stopped) as lost:  # somebody was faster, or froze it
                swept.skipped.append({"saga": self._names[root], "reason": lost.message})
            except CancelledError:
                swept.skipped.append({"saga": self._names[root], "reason": "Recovery was asked to stop."})
            except Exception as error:
                trouble = trouble or error
            finally:
                del self._work[root]
        if trouble is not None:
            raise trouble
        return swept

    def _note(self, swept: Swept, root: str, report: RollbackReport) -> None:
        if report.sagas[0].phase == ENDED:
            swept.recovered.append(self._names[root])
        elif report.frozen:
            swept.skipped.append({"saga": self._names[root], "reason": FROZEN[report.frozen]})
        else:
            swept.escalated.extend(_escalations(self._names[root], report.sagas))

    def close(self) -> None:
        """Begin nothing more, and wait for what has begun: a log that is closed under it would lose its answers."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _escalations(name: str, family: Iterable[Saga]) -> list[dict[str, Any]]:
    return [
        {"saga": name, "step": step, "reason": why} for saga in family for step, why in sorted(saga.escalated.items())
    ]


def name_of(kit: AgentKit, header: str) -> str:
    """The id by which a person knows it."""
    return known_as(kit.log, header)


def sweep(kit: AgentKit, hosts: Hosts | None = None, stop: threading.Event | None = None) -> Swept:
    """Everything that is due now, settle waits included; what another live driver holds is skipped.

    Raises Damaged before anything is done, and what the log raises.
    """
    carry_over(kit)
    recovery = Recovery(kit, hosts, stop)

    total = Swept([], [], [])
    left: dict[str, str] = {}
    try:
        while not recovery.stop.is_set():
            kit.log.refresh()
            left = recovery.look(kit.lives)
            if not recovery.busy:
                break
            swept = recovery.done(wait=True)
            total.recovered.extend(swept.recovered)
            total.skipped.extend(swept.skipped)
    except BaseException:
        recovery.stop.set()
        raise
    finally:
        recovery.close()
    _add_left(kit, total, left)
    Turns(kit, recovery.stop).turn()
    tidy_at_last(kit)
    return total


def _add_left(kit: AgentKit, total: Swept, left: dict[str, str]) -> None:
    """What was found, or came, to need a person, and what is others' to finish."""
    faster = {one["saga"]: one for one in total.skipped}
    total.skipped.clear()
    for root, why in left.items():
        name, saga = name_of(kit, root), kit.engine.state.sagas.get(root)
        if saga is None:
            continue
        faster.pop(name, None)
        if why == PERSON:
            total.escalated.extend(_escalations(name, kit.engine.state.family(saga)))
        else:
            total.skipped.append({"saga": name, "reason": _in_words(kit, saga, why)})
    total.skipped.extend(one for name, one in faster.items() if name not in total.recovered)


def _in_words(kit: AgentKit, saga: Saga, why: str) -> str:
    if why != RESUME:
        return why
    seconds = (saga.within_ms - (kit.log.now().lived - saga.idle_lived)) // 1000
    return f"{why} for another {max(0, seconds)} s, then it is undone"


def recover_dead(kit: AgentKit) -> Swept:
    """What `AgentKit(recover=True)` does before the agent starts."""
    return sweep(kit)


def drivers(kit: AgentKit) -> set[str]:
    """The drivers that open sagas name."""
    return {saga.driver for saga in list(kit.engine.state.sagas.values()) if saga.driver}


def tidy(kit: AgentKit) -> bool:
    """Remove the lock files of dead drivers that no open saga names any more; say whether all of them are gone."""
    if kit.home is None or not listed(kit.home.run):
        return True
    kit.log.refresh()
    named = drivers(kit)
    sweep_files(kit.home.run, named)
    # Somebody else may have been looking at one of them at that very moment.
    return all(driver in named or kit.holds(driver) for driver in listed(kit.home.run))


def tidy_at_last(kit: AgentKit) -> None:
    """Tidy before leaving: whoever else looks at a lock file just now looks for a moment only."""
    for _ in range(LAST_LOOKS):
        if tidy(kit):
            return
        time.sleep(BLINK)


# ---- waiting for the next death --------------------------------------------------------------------------------------


class Watch:
    """The daemon's life: wait on the locks of living drivers, recover when one is freed, look for new drivers.

    told(swept) is called with what was done. While no driver lives nothing wakes more often than once a second.
    """

    def __init__(self, kit: AgentKit, hosts: Hosts | None, told: Callable[[Swept], None]) -> None:
        self._kit, self._told = kit, told
        self._woken = threading.Event()
        self.stopping = self._stop = threading.Event()
        self._recovery = Recovery(kit, hosts, self._stop)
        self._asks = Schedule(kit, self._stop)
        self._removes = Turns(kit, self._stop)
        self._watched: dict[str, threading.Thread] = {}
        self._crowd: set[str] = set()
        self._untidy = True

    def stop(self) -> None:
        """Ask to stop; safe in a signal handler. What is unwound is let go between two compensations."""
        self._stop.set()
        self._woken.set()

    def run(self, tick: Callable[[], None] = lambda: None) -> None:
        """Until `stop`. `tick` is called at each look, at least once a second (a supervisor's watchdog).

        Raises Damaged and the like; a log that is held, or a full disk, is said and tried again.
        """
        try:
            while not self._stop.is_set():
                tick()
                self._woken.wait(self._turn())
        finally:
            self._stop.set()
            self._recovery.close()
            self._asks.close()
            self._removes.close()
        self._say(self._recovery.done(wait=True))
        tidy_at_last(self._kit)

    def _turn(self) -> float:
        try:
            self._woken.clear()
            self._kit.log.refresh()
            self._say(self._recovery.done())
            if not self._carried:
                carry_over(self._kit)
                self._carried = True
            if self._news():
                self._watch_new()  # first: who dies after this is noticed, who died before it is found by the look
                self._recovery.look(self._kit.lives, self._woken.set)
                self._kit.engine.needs_people()  # also for what others asked and could not tell, and for what is stuck
                if self._untidy and not self._recovery.busy:
                    self._untidy = not tidy(self._kit)
                self._asks.look()
                self._removes.look()
        except (LogHeld, DiskFull) as error:
            sys.stderr.write(f"amends: {error} Recovery tries again.\n")
            return IDLE
        return LOOK if self._watched or self._crowd else IDLE

    _carried = False
    _size = -1
    _looked = 0.0

    def _news(self) -> bool:
        """Whether something may have become ripe: records came, a driver died, or a second has gone."""
        size, now = self._kit.log.size, time.monotonic()
        freed, self._freed = self._freed, False
        died = freed or any(not alive(self._kit.home.run, driver) for driver in self._crowd)  # type: ignore[union-attr]
        if size == self._size and not died and now - self._looked < IDLE:
            return False
        self._size, self._looked = size, now
        self._untidy = self._untidy or died
        return True

    _freed = False

    def _say(self, swept: Swept) -> None:
        if swept.recovered or swept.escalated:
            self._untidy = True
            self._told(swept)

    def _watch_new(self) -> None:
        """Wait on every driver that lives. One that is dead needs no waiting: the next look finds its sagas."""
        self._crowd = set()
        for driver in sorted(drivers(self._kit) - set(self._watched)):
            if not self._kit.lives(driver):
                continue
            if len(self._watched) >= WATCHERS:
                self._crowd.add(driver)
                continue
            thread = threading.Thread(target=self._wait_for, args=(driver,), name="amends-watch", daemon=True)
            self._watched[driver] = thread
            thread.start()

    def _wait_for(self, driver: str) -> None:
        """Sleep in the kernel until the driver is dead, and say so: the fact `saga.taken` decides who has its sagas."""
        assert self._kit.home is not None
        try:
            until_dead(self._kit.home.run, driver)
        except OSError as error:
            sys.stderr.write(f"amends: cannot wait for driver {driver}: {error}\n")
        finally:
            self._watched.pop(driver, None)
            self._freed = True
            self._woken.set()
