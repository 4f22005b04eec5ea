"""`reconcile` asks the world whether effects are as the log says, and says what it could not find out.

It only asks: no effect is run and no inverse. A halt or a quarantine does not hold it up, since what is frozen is asked
about all the same.
"""

from __future__ import annotations

import signal
import threading
import time

import click

from ..runtime.followup import resolve
from ..runtime.hosts import Hosts
from ..runtime.kit import AgentKit
from ..runtime.question import Untold
from ..runtime.reconcile import RECENT_DAYS, TIMEOUT_S, Reconciled, Scope, Verdict, would_ask
from ..runtime.reconcile import reconcile as ask_the_world
from ..store.errors import NotFound, YouErred
from . import ui
from .device import acting, existing, hosts, imports_option, key_option, looking
from .levers import duration
from .recovery import on_signal

TELL_S = 5.0
"""Seconds between words about how far it is."""


@click.command(cls=ui.Verb, name="reconcile")
@click.argument("sagas", nargs=-1, metavar="[SAGA]...")
@click.option("--tool", default="", metavar="NAME", help="Only effects of this tool.")
@click.option(
    "--since", metavar="TIME", callback=duration,
    help=f"Only effects that were begun in the last TIME: 90s, 30m, 2h, 1d; {RECENT_DAYS}d where no saga is named.",
)  # fmt: skip
@click.option("--all", "every", is_flag=True, help="All effects, however old.")
@click.option(
    "--timeout", type=click.FloatRange(0.001, 3600), default=TIMEOUT_S, show_default="10", metavar="SECONDS",
    help="For one answer.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Tell whom it would ask about what; ask nobody, write nothing.")
@imports_option
@key_option
def reconcile(
    sagas: tuple[str, ...], tool: str, since: float | None, every: bool, timeout: float, dry_run: bool,
    imports: tuple[str, ...],
) -> int:  # fmt: skip
    """Ask the world whether effects are as the log says: SAGAs, or everything of the last 30 days.

    Exit 0: all are; 1: some are not (`amends inbox`); 2: usage, also handlers that cannot be imported; 3: of some
    nobody could tell.
    """
    if every and since is not None:
        raise click.UsageError("--all and --since contradict each other.")
    if dry_run:
        with looking() as kit:
            kit.hosts = _loaded(hosts(existing(), imports))
            return _rehearsed(kit, _scope(kit, sagas, tool, since, every))
    with acting(imports) as kit:
        _loaded(kit.hosts)
        scope = _scope(kit, sagas, tool, since, every)
        stop = threading.Event()
        with on_signal(stop.set, signal.SIGTERM, signal.SIGINT):
            found = ask_the_world(kit, scope, timeout=timeout, stop=stop, told=Progress())
        if tool and not found.examined and not found.running:
            raise NotFound(
                f"No effect of a tool {tool!r} is among what was to be asked about.",
                next="`amends log` names the tools; --all looks further back.", code="no_such_tool",
            )  # fmt: skip
        return _told(found, stopped=stop.is_set())


def _scope(kit: AgentKit, sagas: tuple[str, ...], tool: str, since: float | None, every: bool) -> Scope:
    meant = frozenset(resolve(kit, saga).id for saga in sagas)
    if since is None and not every and not meant:
        since = RECENT_DAYS * 86_400.0
    return Scope(meant, tool, max(0, kit.log.now().at - int(since * 1e6)) if since is not None else 0)


def _loaded(found: Hosts) -> Hosts:
    """The hosts, once what was named to be imported could be. Raises YouErred."""
    for host in found.imports:
        why = host.loaded()
        if why:
            raise YouErred(
                f"{host.spec.name} cannot be loaded: {why}", next="Nobody was asked. Correct the name or the file.",
                code="import_failed",
            )  # fmt: skip
    return found


class Progress:
    """Says now and then how far it is, on standard error."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, count: int, verdict: Verdict) -> None:
        if time.monotonic() - self._said >= TELL_S:
            self._said = time.monotonic()
            ui.warn(f"asked about {ui.count(count, 'effect')} so far, last {verdict.saga} step {verdict.step}")


def _told(found: Reconciled, stopped: bool) -> int:
    code = found.exit or (3 if stopped else 0)
    if ui.session().as_json:
        ui.emit({**found.to_json(), "clean": found.clean and not stopped, "stopped": stopped})
        return code
    for verdict in found.settled:
        ui.say(ui.Word("settled: ", "good"), _of(verdict), verdict.reason)
    for verdict in found.drift:
        ui.say(ui.Word("drift: ", "bad"), _of(verdict), verdict.reason)
    for verdict in found.unverifiable:
        ui.say(ui.Word("unverifiable: ", "ask"), _of(verdict), verdict.reason)
    ui.say(
        ui.Word("clean" if found.clean and not stopped else "not clean", "good" if found.clean else "bad"),
        f": asked about {ui.count(found.examined, 'effect')}, {found.confirmed} confirmed, {len(found.drift)} drift, "
        f"{len(found.unverifiable)} unverifiable.",
    )
    if found.running:
        ui.say(f"{ui.count(found.running, 'effect')} of sagas that run now: nobody was asked about them.")
    if stopped:
        ui.warn("it was interrupted, and not everything was asked about")
    if found.drift:
        ui.say("`amends inbox` says what settles a drift.", err=True)
    if any(verdict.why == "no_reconciler" for verdict in found.unverifiable):
        ui.say("A `@reconciler` (--import FILE) or a program's `verifies` in handlers.toml can be asked.", err=True)
    if found.settled:
        ui.say("What is due after what was settled is done by recovery: `amends recoverd --once`.", err=True)
    return code


def _of(verdict: Verdict) -> str:
    return f"{verdict.saga} step {verdict.step} {verdict.tool}. "


def _rehearsed(kit: AgentKit, scope: Scope) -> int:
    rows = []
    for effect, asked in would_ask(kit, scope, kit.hosts):
        step = effect.one.step
        whom = {"host": None, "why": asked.why} if isinstance(asked, Untold) else {"host": asked.host, "why": None}
        rows.append({"saga": effect.saga, "step": step.number, "tool": step.tool, "expected": effect.expected, **whom})
    if ui.session().as_json:
        ui.emit({"dry_run": True, "examined": len(rows), "would_ask": rows})
        return 0
    for row in rows:
        said = f"would ask {row['host']}" if row["host"] else f"nobody can be asked ({row['why']})"
        ui.say(f"{row['saga']} step {row['step']} {row['tool']}, expected {row['expected']}: {said}")
    ui.say("Nobody was asked." if rows else "There is nothing to ask about.")
    return 0
