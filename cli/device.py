"""How a verb holds the device: one that only looks writes nothing, creates nothing and needs no keys.

A verb that acts opens the same kit that an agent has. Neither makes a home where there is none: a mistyped path would
answer "nothing needs you". Only `init`, `run`, `recoverd` and agents make one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from ..runtime.gate.policy_file import Policy
from ..runtime.handlers_file import load
from ..runtime.hosts import Hosts, imported
from ..runtime.kit import AgentKit
from ..runtime.owner_key import owner_of
from ..runtime.state import State
from ..store.errors import YouErred
from ..store.home import Home
from ..store.identity import open_log
from . import ui

imports_option = click.option(
    "--import", "imports", multiple=True, metavar="MODULE|FILE",
    help="Handlers, in a process of their own; looked at before handlers.toml and what is recorded. Repeatable.",
)  # fmt: skip


def _take_key(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        ui.session(context).key = ui.utf8(value, context, parameter)


key_option = click.option(
    "--key", metavar="SOURCE", expose_value=False, callback=_take_key,
    help="Where the key of a sealed log is: file:PATH, env:NAME, command:PROGRAM, keyring:SERVICE/NAME.",
)  # fmt: skip


def home() -> Home:
    """The home that this invocation is about, whether or not it exists."""
    return Home(Home.find(ui.session().home))


def existing() -> Home:
    """The home, if there is a log in it. Raises YouErred (`no_home`)."""
    found = home()
    if not found.exists():
        raise YouErred(
            f"There is no log at {found.path}.",
            next="An agent's first saga makes one, and so does `amends init`; --home names another.",
            code="no_home",
        )
    return found


class Looking(AgentKit):
    """A kit that reads the log and never writes: no driver, no lock file, no host is started for it."""

    def __init__(self, home: Home, warn: Callable[[str], None] = ui.warn) -> None:
        self.name, self.on_behalf_of, self.home, self.dead = "amends", "", home, []
        log = open_log(home, State(), write=False, warn=warn, owner=owner_of(home, ui.session().key))
        identity: Any = log.identity
        self._hold(log, identity, Hosts(), Policy.watching(home.policy))

    def _drives(self) -> str:
        return self._memory_driver


class Acting(AgentKit):
    """A kit for what people decide. It judges no call, so a policy.toml that is wrong does not hold it up."""

    def _rules(self, home: Home, gate: Any) -> Policy:
        return Policy.watching(home.policy)


class Steering(Acting):
    """A kit that runs nothing at all: a lever works whatever is wrong with the files beside the log."""

    def _handlers(self, home: Home) -> Hosts:
        return Hosts()


class Levering(Steering):
    """The same for the levers alone: they work without the key of a sealed log as well."""

    _bare = True


def hosts(home: Home, imports: Sequence[str] = ()) -> Hosts:
    """Where this invocation finds handlers: `imports`, then the home's handlers.toml. Raises BadHandlersFile."""
    return Hosts([imported(imports)] if imports else [], load(home.handlers).specs)


@contextmanager
def looking() -> Iterator[Looking]:
    """The device's log, to look at."""
    kit = Looking(existing())
    try:
        yield kit
    finally:
        kit.close()


@contextmanager
def acting(imports: Sequence[str] = ()) -> Iterator[AgentKit]:
    """The device's log, to write to; handlers of `imports` (modules or files) are found first."""
    found = existing()
    kit = Acting("amends", home=found.path, warn=ui.warn, seal_key=ui.session().key)
    try:
        if imports:
            kit.hosts = hosts(found, imports)
        yield kit
    finally:
        kit.close()


@contextmanager
def beginning() -> Iterator[AgentKit]:
    """The device's log, to write to; made if there is none yet."""
    kit = Acting("amends", home=home().path, warn=ui.warn)
    try:
        yield kit
    finally:
        kit.close()


@contextmanager
def levering() -> Iterator[AgentKit]:
    """The device's log, to set and lift levers."""
    kit = Levering("amends", home=existing().path, warn=ui.warn, seal_key=ui.session().key)
    try:
        if kit.log.shut:
            ui.warn("The log is sealed and its key is not here: who decides this, and why, cannot be kept.")
        yield kit
    finally:
        kit.close()


@contextmanager
def steering() -> Iterator[AgentKit]:
    """The device's log, to write to while nothing is run."""
    kit = Steering("amends", home=existing().path, warn=ui.warn, seal_key=ui.session().key)
    try:
        yield kit
    finally:
        kit.close()
