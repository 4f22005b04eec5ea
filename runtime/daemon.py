"""The same engine, for sagas that nobody drives any more.

A dead process is noticed by the kernel's release of its lock, with no timer in between: one thread waits on each
driver. Whoever gets the lock takes the dead driver's sagas under a higher fence and unwinds them in hosts; any number
of daemons and agents may race, one of them wins each saga. What needs a person is escalated and left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from ..store.driver import Death, alive, listed, wait_dead
from ..store.errors import AmendsError, Fenced
from .drive import BLOCKING, run
from .due import Rest, due
from .engine import Engine
from .reach import HostReach
from .saga import RUNNING, SUSPENDED, Saga
from .unwind import take, unwind

if TYPE_CHECKING:
    from .kit import AgentKit

SIDE_BY_SIDE = 8
"""Sagas unwound at once."""
WATCHERS = 64
LOOK = 0.05
IDLE = 1.0


class Swept(NamedTuple):
    """What one sweep did (PROMISES 12.1): recovered saga ids, escalated and skipped with the reason."""

    recovered: list[str]
    escalated: list[dict[str, Any]]
    skipped: list[dict[str, Any]]

    @property
    def exit(self) -> int:
        return 1 if self.escalated else 0


def ripe(kit: AgentKit, saga: Saga) -> str:
    """Why recovery leaves this root alone now; empty if it is to be taken."""
    if saga.id in kit.engine.runs or (saga.driver and kit.lives(saga.driver)):
        return "held by a live driver"
    if saga.on_crash == "resume" and saga.phase in (RUNNING, SUSPENDED):
        left = saga.within_ms - (kit.log.now().lived - saga.idle_lived)
        if left > 0:
            return f"waits to be resumed, {left // 1000} s left"
    family = kit.engine.state.family(saga)
    unwinding = [member for member in family if member.phase not in (RUNNING, SUSPENDED)]
    if saga in unwinding and isinstance(due(family, kit.log.now()), Rest):
        return "needs a person"
    return ""


def sweep(kit: AgentKit, hosts: Any = None, told: Callable[[str], None] | None = None) -> Swept:
    """Everything that is due now, settle waits included; what another live driver holds is skipped."""
    kit.log.refresh()
    swept = Swept([], [], [])
    todo: list[Saga] = []
    for saga in list(kit.engine.state.roots()):
        why = ripe(kit, saga)
        if not why:
            todo.append(saga)
        elif why == "needs a person":
            swept.escalated.extend(_escalations(kit, saga))
        else:
            swept.skipped.append({"saga": name_of(kit, saga.id), "reason": why})
    reach = HostReach(kit.engine, hosts or kit.hosts)
    with ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="amends-unwind") as pool:
        for saga, work in [(saga, pool.submit(_recover, kit, saga, reach)) for saga in todo]:
            _collect(kit, swept, saga, work)
    return swept


def recover_dead(kit: AgentKit) -> Swept:
    """What `AgentKit(recover=True)` does before the agent starts."""
    return sweep(kit)


def _recover(kit: AgentKit, saga: Saga, reach: HostReach) -> Any:
    """Take one dead saga and unwind it. Raises Fenced if somebody else was faster."""
    return recover_one(kit.engine, saga.id, saga.driver, reach, "crash" if saga.driver else "released")


def recover_one(engine: Engine, root: str, expected: str, reach: HostReach, why: str) -> Any:
    """Take a root from a dead driver (or from nobody) and unwind it on this thread."""
    engine.log.commit(take(engine, root, expected, why))
    engine.runs[root] = None  # type: ignore[assignment]  # ours while it is unwound
    try:
        return run(unwind(BLOCKING, engine, root, reach))
    finally:
        engine.runs.pop(root, None)


def _collect(kit: AgentKit, swept: Swept, saga: Saga, work: Future[Any]) -> None:
    name = name_of(kit, saga.id)
    try:
        report = work.result()
    except Fenced as lost:
        swept.skipped.append({"saga": name, "reason": lost.message})
        return
    if report.sagas[0].out:
        swept.recovered.append(name)
    else:
        swept.escalated.extend(_escalations(kit, report.sagas[0], report.sagas))


def _escalations(kit: AgentKit, root: Saga, family: Iterable[Saga] | None = None) -> Iterator[dict[str, Any]]:
    for saga in family or kit.engine.state.family(root):
        for step, why in saga.escalated.items():
            yield {"saga": name_of(kit, root.id), "step": step, "reason": why}


def name_of(kit: AgentKit, header: str) -> str:
    """The id the user gave, where it is known; the header id where it is not."""
    from .openings import opened_as

    return opened_as(kit.log, header)[0] or header


class Watch:
    """The daemon's life: wait on the locks of living drivers, sweep when one is freed, look for new drivers."""

    def __init__(self, kit: AgentKit, hosts: Any, told: Callable[[Swept], None]) -> None:
        self._kit, self._hosts, self._told = kit, hosts, told
        self._watched: dict[str, threading.Thread] = {}
        self._died = threading.Event()
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()
        self._died.set()

    def run(self, tick: Callable[[], None] = lambda: None) -> None:
        """Until `stop`. `tick` is called at each look, at least once a second (a supervisor's watchdog)."""
        while not self._stop.is_set():
            self._died.clear()
            swept = sweep(self._kit, self._hosts)
            if swept.recovered or swept.escalated:
                self._told(swept)
            self._tidy()
            size = self._kit.log.size
            while not self._stop.is_set() and not self._died.is_set():
                tick()
                self._watch_new()
                if self._kit.log.size != size and self._unowned():
                    break
                size = self._kit.log.size
                self._died.wait(LOOK if self._watched else IDLE)
                self._kit.log.refresh()
                if self._patience_over():
                    break

    def _unowned(self) -> bool:
        return any(not ripe(self._kit, saga) for saga in list(self._kit.engine.state.roots()))

    _looked = 0.0

    def _patience_over(self) -> bool:
        """Once a second: a resume that nobody took up in time, or a saga let go while nothing was appended."""
        now = time.monotonic()
        if now - self._looked < IDLE:
            return False
        self._looked = now
        return self._unowned()

    def _drivers(self) -> set[str]:
        own = self._kit.engine.driver
        return {saga.driver for saga in self._kit.engine.state.sagas.values() if saga.driver} - {own}

    def _watch_new(self) -> None:
        for driver in self._drivers() - set(self._watched):
            if len(self._watched) < WATCHERS:
                thread = threading.Thread(target=self._wait_for, args=(driver,), name="amends-watch", daemon=True)
                self._watched[driver] = thread
                thread.start()
            elif not alive(self._kit.home.run, driver):  # type: ignore[union-attr]
                self._died.set()

    def _wait_for(self, driver: str) -> None:
        assert self._kit.home is not None
        death: Death | None = None
        try:
            while death is None and not self._stop.is_set():
                death = wait_dead(self._kit.home.run, driver, None)
            if death is not None:
                death.abandon()  # the fact `saga.taken` decides who has it; the file goes when nothing needs it
        except AmendsError as error:
            import sys

            sys.stderr.write(f"amends: cannot wait for driver {driver}: {error}\n")
        finally:
            self._watched.pop(driver, None)
            self._died.set()

    def _tidy(self) -> None:
        """Lock files of dead drivers that no open saga names any more."""
        from ..store.driver import sweep as sweep_files

        assert self._kit.home is not None
        if listed(self._kit.home.run):
            sweep_files(self._kit.home.run, self._drivers())
