"""Verbs that stop things: everything, a tool, a tag or one saga; and the one that lets them go on.

A lever holds in every process of the device from its next decision on. Each is set and lifted in a person's name, with
a reason, and both are in the log. A scope is `*`, `tool:NAME`, `tool:PREFIX.*`, `tag:NAME` or `saga:ID`; a typing error
halts nothing and says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import quote
from typing import Any

import click

from ..runtime.gate.limits import span
from ..runtime.gate.switch import DRAIN, HALT, MODES, QUARANTINE, Set, lift, scope_of, set_switch, typed
from ..runtime.kit import AgentKit
from ..runtime.levers import of_saga
from ..runtime.openings import scope_known_as
from ..store.errors import BadValue, NotFound, YouErred
from . import ui
from .device import key_option, levering
from .sagas import saga_argument

_TIME = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(ms|s|m|min|h|d|w)")
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def duration(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Seconds of `90s`, `30m`, `2h`, `1d`. Raises click.BadParameter."""
    if value is None:
        return None
    found = _TIME.fullmatch(value.strip().lower())
    if found is None:
        raise click.BadParameter(f"{value!r} is no time; write 90s, 30m, 2h or 1d.", context, parameter)
    return float(found[1]) * _UNITS[found[2]]


by_option = click.option("--by", metavar="NAME", required=True, help="Who decides.")
reason_option = click.option("--reason", metavar="TEXT", required=True, help="Why.")
for_option = click.option(
    "--for", "seconds", metavar="TIME", callback=duration, help="Lift it by itself after so long: 90s, 30m, 2h, 1d."
)


@click.command(cls=ui.Verb, name="halt")
@key_option
@click.argument("scope", default="*")
@by_option
@reason_option
@for_option
@click.option("--including-compensations", is_flag=True, help="Rollbacks under the scope wait too, frozen.")
def halt(scope: str, by: str, reason: str, seconds: float | None, including_compensations: bool) -> None:
    """Refuse new effects at once, in every process: all of them, or those under SCOPE. Rollbacks go on."""
    _set(HALT, scope, by, reason, seconds, including_compensations)


@click.command(cls=ui.Verb, name="drain")
@key_option
@click.argument("scope", default="*")
@by_option
@reason_option
@for_option
def drain(scope: str, by: str, reason: str, seconds: float | None) -> None:
    """Let the sagas that run finish, and begin no new ones."""
    _set(DRAIN, scope, by, reason, seconds)


@click.command(cls=ui.Verb, name="quarantine")
@key_option
@saga_argument
@by_option
@reason_option
@for_option
def quarantine(saga: str, by: str, reason: str, seconds: float | None) -> None:
    """Freeze one saga as it stands: no new step, and no rollback, until it is resumed."""
    _set(QUARANTINE, of_saga(saga), by, reason, seconds)


@click.command(cls=ui.Verb, name="resume")
@key_option
@click.argument("scope", required=False)
@by_option
@reason_option
@click.option("--all", "every", is_flag=True, help="Lift every lever of the device.")
def resume(scope: str | None, by: str, reason: str, every: bool) -> None:
    """Lift what halt, drain and quarantine have set: on SCOPE, on one saga, or everything."""
    if every and scope is not None:
        raise YouErred("A scope and --all exclude each other.", next="Leave one of them out.")
    with levering() as kit:
        lifted = lift(kit, None, by=by, reason=reason) if every else _lift(kit, scope or "*", by, reason)
        if ui.session().as_json:
            return ui.emit({"lifted": [_document(kit, one) for one in lifted], "by": by})
        for one in lifted:
            ui.say(f"{by} lifted {one.mode} on {scope_known_as(kit.log, one.scope)}.")
    return None


def _lift(kit: AgentKit, scope: str, by: str, reason: str) -> Sequence[Set]:
    """Lift a scope; a word that is none may be a saga's id."""
    try:
        scope = scope_of(scope)
    except BadValue as no_scope:
        if ":" in scope:
            raise
        try:
            return lift(kit, of_saga(scope), by=by, reason=reason)
        except NotFound as unknown:
            if unknown.code != "not_found":
                raise
            raise NotFound(f"{scope!r} is no scope and no saga.", next=no_scope.next) from None
    return lift(kit, scope, by=by, reason=reason)


def _set(
    mode: str, scope: str, by: str, reason: str, seconds: float | None, including_compensations: bool = False
) -> None:
    with levering() as kit:
        made = set_switch(
            kit, mode, scope, by=by, reason=reason, seconds=seconds, including_compensations=including_compensations
        )
        if ui.session().as_json:
            return ui.emit({**_document(kit, made), "by": by, "within_s": seconds})
        shown = scope_known_as(kit.log, made.scope)
        until = f"for {span(round(seconds * 1000))}" if seconds else "until it is lifted"
        ui.say(ui.Word(f"{mode} on {shown}", "bad"), f" {until}: {MODES[mode]}.")
        ui.say(f"To lift it: amends resume {quote(typed(kit, made.scope))} --by NAME --reason TEXT")
    return None


def _document(kit: AgentKit, made: Set) -> dict[str, Any]:
    return {"record": made.record, "mode": made.mode, "scope": scope_known_as(kit.log, made.scope)}
