"""Finds where a handler lives, and runs it there.

A live saga runs its own handlers in its own process: the object it made, then the registry. Everything else, and
everything after a crash, is reached through hosts: `--import`, `handlers.toml`, the recorded host. A recorded host is
used for sagas of this device only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from .current import outside
from .drive import Drive, Ran
from .engine import Engine, Run
from .hosts import Hosts, Outcome
from .inverse import NONE, Inverse, Recorded, arguments
from .openings import needed_at, raw_fields
from .perform import ask, says_nothing
from .saga import Saga
from .step import Step
from .tools import Answer, find, takes_key

CALL_MS = 60_000
UNDO_TIMEOUT = 30.0
"""Seconds a compensation of a live saga may take; a host gets CALL_MS."""


class HostReach:
    """Through hosts only: what the daemon has."""

    def __init__(self, engine: Engine, hosts: Hosts) -> None:
        self._engine, self._hosts = engine, hosts

    def missing(self, saga: Saga, step: Step, recorded: Recorded, purpose: str) -> tuple[str, str] | None:
        if not recorded.handler:
            return "closure", recorded.unreachable or "It lived only in the process that made it."
        host, known = self._hosts.find(recorded.handler, recorded.host)
        if host is not None:
            return None
        return "no_handler", "; ".join(filter(None, (known.why, recorded.unreachable)))

    async def perform(
        self, drive: Drive, saga: Saga, step: Step, recorded: Recorded, key: str, purpose: str
    ) -> Outcome:
        host, known = self._hosts.find(recorded.handler, recorded.host)
        if host is None:
            return Outcome("unavailable", why=known.why)
        # its announcement has counted this one
        attempt = step.undo_attempts if purpose == "undo" else step.confirm_attempts

        def called() -> Outcome:
            return host.call(recorded.handler, purpose, recorded.kwargs, key, saga.id, step.number, attempt, CALL_MS)

        return (await _hosted(drive, called))._replace(host=host.name)

    async def probe(self, drive: Drive, saga: Saga, step: Step) -> Outcome:
        """A probe that was recorded by name is asked in its host; one that only its process had cannot tell."""
        found = _probe_of(self._engine, step)
        if found is None:
            return Outcome("cannot_tell", why="Its probe lived only in the process that made it.")
        name, host_record, kwargs = found
        host, known = self._hosts.find(name, host_record)
        if host is None:
            return Outcome("cannot_tell", why=known.why)

        def called() -> Outcome:
            return host.call(name, "probe", kwargs, step.key, saga.id, step.number, 1, CALL_MS)

        return await _hosted(drive, called)

    async def refined(self, drive: Drive, saga: Saga, step: Step, result: Any) -> Inverse:
        """The factory lived in the process that died."""
        return NONE


def _probe_of(engine: Engine, step: Step) -> tuple[str, Mapping[str, Any] | None, Mapping[str, Any]] | None:
    """(name, recorded host, call arguments) of a step's probe, from its intent's opening."""
    fields = raw_fields(needed_at(engine.log, step.seq))
    if "probe" not in fields:
        return None
    host = msgspec.json.decode(fields["probe"])
    kwargs = msgspec.json.decode(fields.get("args", b"{}"))
    return f"{host['module']}:{host['function']}", host, kwargs


async def _hosted(drive: Drive, called: Callable[[], Outcome]) -> Outcome:
    """A host enforces its own deadline, so none is set here."""
    ran = await drive.call(called, {}, None, urgent=True)
    if ran.error is not None:
        return Outcome("lost", why=f"{type(ran.error).__name__}: {ran.error}")
    outcome: Outcome = ran.result
    return outcome


class LiveReach(HostReach):
    """In this process where it can, through hosts where it cannot."""

    def __init__(self, engine: Engine, hosts: Hosts, run: Run | None) -> None:
        super().__init__(engine, hosts)
        self._run = run

    def _here(
        self, saga: Saga, step: Step, recorded: Recorded, purpose: str
    ) -> tuple[Callable[..., Any], dict[str, Any]] | None:
        made = None
        if self._run is not None:
            live = self._run.live if purpose == "undo" else self._run.confirms
            made = live.get((saga.id, step.number))
        if made is not None and made.fn is not None:
            return made.fn, made.kwargs
        handler = find(recorded.handler)
        if handler is not None:
            return handler.fn, made.kwargs if made is not None else arguments(recorded)
        return None

    def missing(self, saga: Saga, step: Step, recorded: Recorded, purpose: str) -> tuple[str, str] | None:
        here = self._here(saga, step, recorded, purpose)
        return None if here else super().missing(saga, step, recorded, purpose)

    async def perform(
        self, drive: Drive, saga: Saga, step: Step, recorded: Recorded, key: str, purpose: str
    ) -> Outcome:
        here = self._here(saga, step, recorded, purpose)
        if here is None:
            return await super().perform(drive, saga, step, recorded, key, purpose)
        fn, kwargs = here
        given = {**kwargs, "idempotency_key": key} if takes_key(fn) and "idempotency_key" not in kwargs else kwargs
        with outside():
            said = _said(await drive.call(fn, given, UNDO_TIMEOUT, urgent=True))
            why = self._run.hush(said.why) if self._run else said.why
            return said._replace(host="the saga's own process", why=why)

    async def probe(self, drive: Drive, saga: Saga, step: Step) -> Outcome:
        mine = self._run.probes.get((saga.id, step.number)) if self._run else None
        if mine is None:
            return await super().probe(drive, saga, step)
        said = await ask(drive, *mine)
        return Outcome(said.amends_outcome, said.result, said.note)

    async def refined(self, drive: Drive, saga: Saga, step: Step, result: Any) -> Inverse:
        refine = self._run.refine.get((saga.id, step.number)) if self._run else None
        if refine is None:
            return NONE
        return await refine(drive, result)


def _said(ran: Ran) -> Outcome:
    """A handler of this process, in the words of a host."""
    error = ran.error
    if ran.running is not None:
        _forget(ran.running)
        return Outcome("lost", why=f"no answer within {UNDO_TIMEOUT:g} s")
    if error is not None:
        why = f"{type(error).__name__}: {error}"
        return Outcome("lost" if says_nothing(error) else "failed", why=why)
    if isinstance(ran.result, Answer) and ran.result.amends_outcome == "already_done":
        return Outcome("already_done", note=ran.result.note)
    return Outcome("done")


def _forget(running: Future[Any]) -> None:
    """Nobody waits for it; look at its exception so that nothing is reported as never seen."""
    running.add_done_callback(lambda done: None if done.cancelled() else done.exception() and None)
