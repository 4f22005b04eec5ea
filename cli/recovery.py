"""What a dead agent left is undone: now (`recoverd --once`), from now on (`recoverd`), or around one agent (`run`).

Handlers never run in these processes: they run in hosts, which may hang, crash or be killed without harm to anybody
else. SIGTERM and SIGINT end the daemon between two compensations; what it was at goes on where it stands.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from ..runtime.daemon import LIVE, Swept, Watch, sweep
from ..runtime.gate.policy_file import Policy
from ..runtime.hosts import environment
from ..runtime.kit import AgentKit
from ..runtime.owner_key import owner_of
from ..runtime.report import REASONS
from ..runtime.state import State
from ..store.errors import AmendsError
from ..store.home import Home
from ..store.identity import open_log
from . import ui
from .device import home, hosts, imports_option, key_option, looking
from .notify import ALIVE, READY, STOPPING, notify, watchdog_period

FIRST_S = 10.0
"""Seconds that an agent waits for what earlier ones left; after that both go on side by side."""
LAST_S = 15.0
"""Seconds that a running handler gets to end once the daemon is asked to stop; a supervisor kills after 20."""
HEAR_S = 1.0
"""Seconds after which a signal is heard that did not wake the main thread."""
TWICE_S = 0.5
"""Within so many seconds a signal is the same one: one Ctrl-C reaches the single-file executable from the terminal, and
again from its loader, which hands on what it gets."""


def program() -> list[str]:
    """How a process of ours starts another one: the frozen executable itself, else this Python."""
    return [sys.executable] if getattr(sys, "frozen", False) else [sys.executable, "-m", "amends.cli"]


class Recovering(AgentKit):
    """A kit that drives nothing of its own: it takes over, through hosts only. Makes the home where there is none."""

    def __init__(self, home: Home, imports: Sequence[str] = (), warn: Callable[[str], None] = ui.warn) -> None:
        self.name, self.on_behalf_of, self.home, self.dead = "recoverd", "", home, []
        found = hosts(home, imports)
        log = open_log(home, State(), warn=warn, owner=owner_of(home, ui.session().key))
        identity: Any = log.identity
        self._hold(log, identity, found, Policy.watching(home.policy))


@click.command(cls=ui.Verb)
@click.option("--once", is_flag=True, help="Undo everything that is due now, settle waits included, and end.")
@click.option("--dry-run", is_flag=True, help="Tell what --once would do, and change nothing.")
@imports_option
@key_option
def recoverd(once: bool, dry_run: bool, imports: tuple[str, ...]) -> int:
    """Undo what dead agents left. Without --once: wait for the next death, and undo it at once.

    Exit 0: nothing needs a person; 1: something does (`amends inbox`); 4, 7: the log may not be used, or cannot be
    read, and nothing was done.
    """
    if dry_run:
        return _rehearse()
    kit = Recovering(home(), imports)
    try:
        return _once(kit) if once else _wait(kit)
    finally:
        kit.close()


def _rehearse() -> int:
    from ..runtime.rehearsal import rehearse

    with looking() as kit:
        plan = rehearse(kit)
    if ui.session().as_json:
        ui.emit(plan.to_json())
        return plan.exit
    for line in plan.lines():
        ui.say(line)
    return plan.exit


def _once(kit: AgentKit) -> int:
    stop = threading.Event()
    with on_signal(stop.set, signal.SIGTERM, signal.SIGINT):
        swept = sweep(kit, stop=stop)
    if ui.session().as_json:
        ui.emit(swept.to_json())
    else:
        for line in _lines(swept) or ["Nothing was left by a dead agent."]:
            ui.say(line)
    return swept.exit


def _lines(swept: Swept) -> list[str]:
    told = [f"Undone: {saga}." for saga in swept.recovered]
    for one in swept.escalated:
        why = REASONS.get(one["reason"], (one["reason"], ()))[0]
        told.append(f"Needs a person: {one['saga']}, step {one['step']}. {why}")
    told += [f"Left alone: {one['saga']}, {one['reason']}." for one in swept.skipped]
    return told + (["Run `amends inbox`."] if swept.escalated else [])


# ---- waiting ---------------------------------------------------------------------------------------------------------


def _wait(kit: AgentKit) -> int:
    """The daemon. The watch runs on a thread of its own, so that a signal is heard at once."""
    watch = Watch(kit, kit.hosts, _told)
    trouble: list[BaseException] = []
    ready, ended = _ready_once(), threading.Event()

    def work() -> None:
        try:
            watch.run(ready)
        except BaseException as error:  # whatever it is, it is this process's end, and said on the main thread
            trouble.append(error)
        finally:
            ended.set()

    with on_signal(watch.stop, signal.SIGTERM, signal.SIGINT):
        thread = threading.Thread(target=work, name="amends-recoverd", daemon=True)
        thread.start()
        # A signal may reach the process by another thread: its handler runs on this one, but only once it wakes.
        while not watch.stopping.wait(HEAR_S) and not ended.is_set():
            pass
        notify(STOPPING)
        if not ended.wait(LAST_S):
            ui.warn("a handler still runs; its answer is lost, and the next daemon goes on from there")
            os._exit(0)
    if trouble:
        raise trouble[0]
    return 0


def _ready_once() -> Callable[[], None]:
    """What the watch calls at each look: the supervisor hears READY at the first, and a sign of life in time."""
    period = watchdog_period()
    last: list[float] = []

    def tick() -> None:
        now = time.monotonic()
        if not last:
            if not notify(READY) and os.environ.get("NOTIFY_SOCKET"):
                ui.warn("the supervisor that wants to hear of it cannot be reached; recovery goes on")
            last.append(now)
        elif period is not None and now - last[0] >= min(period, 1.0):
            notify(ALIVE)
            last[0] = now

    return tick


def _told(swept: Swept) -> None:
    if ui.session().as_json:
        ui.emit(swept.to_json(), line=True)
        return
    for line in _lines(swept):
        ui.say(line)


@contextmanager
def on_signal(act: Callable[[], None], *numbers: int) -> Iterator[dict[int, float]]:
    """Call `act` at the first of these signals; a later one of its kind has its own force again. Yields what came."""
    heard: dict[int, float] = {}

    def caught(number: int, frame: Any) -> None:
        now = time.monotonic()
        if number not in heard:
            heard[number] = now
            act()
        elif now - heard[number] >= TWICE_S:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    before = {number: signal.signal(number, caught) for number in numbers}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            # Once heard, this process is about to end, and the signal may come a second time: from the terminal and
            # from the loader of the single file. Python puts a handler of its own back to the default as it goes down.
            signal.signal(number, signal.SIG_IGN if number in heard else handler)


# ---- around an agent -------------------------------------------------------------------------------------------------


@click.command(cls=ui.Verb, context_settings={"allow_interspersed_args": False})
@imports_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def run(imports: tuple[str, ...], command: tuple[str, ...]) -> int:
    """Run an agent with this home; if it dies, undo at once what it left.

    What earlier agents left is undone first. The exit code is the command's own, or 128 + the signal it died of; what
    recovery did is said on standard error.
    """
    kit = Recovering(home(), imports)
    try:
        return _run(kit, command)
    finally:
        kit.close()


def _run(kit: AgentKit, command: Sequence[str]) -> int:
    stop = threading.Event()
    told: set[str] = set()
    first = threading.Thread(target=_recover, args=(kit, stop, told), name="amends-first", daemon=True)
    with on_signal(stop.set, signal.SIGINT, signal.SIGTERM) as heard:
        first.start()
        first.join(FIRST_S)
        if heard:  # the agent was not started
            first.join(LAST_S)
            return 128 + min(heard)
    if first.is_alive():
        ui.warn("what earlier agents left takes longer to undo; it goes on beside this one")
    code = _child(kit, command)
    with on_signal(stop.set, signal.SIGINT, signal.SIGTERM):
        first.join()
        _recover(kit, stop, told)
    return code


def _recover(kit: AgentKit, stop: threading.Event, told: set[str]) -> None:
    """Undo what dead agents left and say so, except what was `told` already; trouble is said too, and is no reason not
    to run the agent."""
    try:
        swept = sweep(kit, stop=stop)
    except AmendsError as error:
        ui.warn(str(error))
        return
    waiting = [one for one in swept.skipped if one["reason"] != LIVE]  # that others live is no news to this agent
    for line in _lines(swept._replace(skipped=waiting)):
        if line not in told:
            told.add(line)
            ui.warn(line)


def _child(kit: AgentKit, command: Sequence[str]) -> int:
    """Run the command on this terminal, hand signals on to it, wait for its end."""
    assert kit.home is not None
    env = environment((("AMENDS_HOME", str(kit.home.path)),))
    child: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        # Ctrl-C on a terminal reaches the child by itself: a second one would abandon its rollback.
        if number in _BY_TERMINAL and _in_front():
            return
        if child:
            child[0].send_signal(number)
        else:
            early.append(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        child.append(subprocess.Popen(command, env=env))
        for number in early:
            child[0].send_signal(number)
        return _code(child[0].wait())
    except FileNotFoundError:
        ui.warn(f"{command[0]}: there is no such command")
        return 127
    except OSError as error:
        ui.warn(f"{command[0]} cannot be started: {error.strerror}")
        return 126
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _numbers(*names: str) -> list[int]:
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


_BY_TERMINAL = _numbers("SIGINT", "SIGQUIT")
_PASSED_ON = [*_BY_TERMINAL, *_numbers("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")]


def _in_front() -> bool:
    """Whether a terminal sends its signals to this process's group, and so to the child as well."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except (OSError, AttributeError):
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _code(status: int) -> int:
    return status if status >= 0 else 128 - status
