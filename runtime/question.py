"""Whom to ask about an effect, and with what: its tool's reconciler, else the probe that was recorded with the step.

A reconciler is found where handlers live: in this process, `--import`, `handlers.toml`, and the files that were
recorded with the step. It is given by name what it takes of the call's arguments, `result` and `idempotency_key`, or
`kwargs` for all arguments in one; a program is given everything. What the log holds a fingerprint of, or nothing any
more, is given to nobody: who needs it cannot be asked, and who gets it elsewhere does not name it.

Why never a function that merely has the tool's name: that is the tool, and asking it would do it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..store.errors import AmendsError
from ..store.log import Record
from ..store.seal import WITHHELD
from .current import outside
from .drive import BLOCKING, run
from .hosts import ANSWERS, Host, Hosts, Known, Outcome
from .inverse import read
from .openings import raw_fields, redacted
from .story import StepStory
from .tools import parameters, reconcilers, takes_key
from .values import Masked, decode, is_manifest


class Asked(NamedTuple):
    """A question that can be put. put(seconds): the answer, in the words of a host."""

    host: str
    put: Callable[[float], Outcome]


class Untold(NamedTuple):
    """Why a question cannot be put: a code of WHY, and the rest in words."""

    why: str
    said: str = ""


class Given(NamedTuple):
    """What the log still holds of a call, tagged. withheld: by name, the code of why something is handed to nobody.
    lost: in words, what of the record of the call cannot be read; empty if all can."""

    args: dict[str, Any]
    result: Any
    withheld: Mapping[str, str]
    fields: Mapping[str, bytes]
    lost: str


def given(one: StepStory) -> Given:
    """The arguments and the result of a step, as far as they can be had."""
    fields, lost = _opened(one.thread.records, lambda entry: entry.seq == one.step.seq)
    told, gone = _opened(
        one.thread.records, lambda entry: entry.step == one.step.number and entry.kind in _RESULTS and entry.c
    )
    args, withheld = _readable(fields.get("args"))
    result: Any = None
    if "result" in told:
        result, hidden = _readable_value(told["result"])
        withheld = {**withheld, **({"result": hidden} if hidden else {})}
    elif gone:
        withheld = {**withheld, "result": "unreadable"}
    return Given(args, result, withheld, fields, lost)


_RESULTS = ("step.done", "step.landed", "step.probed")


def _opened(records: Sequence[Record], wanted: Callable[[Any], Any]) -> tuple[dict[str, bytes], str]:
    """The fields of the newest record that is wanted, and why some of them are missing; empty if none are."""
    for record in reversed(records):
        if not wanted(record.entry):
            continue
        try:
            fields = raw_fields(record.blob)
        except AmendsError as error:
            return {}, error.message
        if record.withheld:
            return fields, f"What record {record.entry.seq} holds cannot be read: {WITHHELD[record.withheld]}."
        cut = is_manifest(msgspec.json.decode(fields.get("args", b"{}")))
        gone = cut or (not record.entry.part and redacted(record))
        return fields, f"What record {record.entry.seq} held is not there any more." if gone else ""
    return {}, ""


def _readable(raw: bytes | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments by name, tagged, and the names of those that are not to be had, each with the code of why."""
    found = msgspec.json.decode(raw) if raw else {}
    if is_manifest(found):
        return {}, {}
    if found.get("$") == "dict":
        found = found["v"]
    hidden = {name: why for name, value in found.items() if (why := _hidden(value))}
    return {name: value for name, value in found.items() if name not in hidden}, hidden


def _readable_value(raw: bytes) -> tuple[Any, str]:
    value = msgspec.json.decode(raw)
    why = _hidden(value)
    return (None, why) if why else (value, "")


def _hidden(value: Any) -> str:
    """Why a tagged value cannot be handed over; empty if it can."""
    try:
        return "secret" if _masked(decode(value)) else "unreadable" if is_manifest(value) else ""
    except AmendsError:
        return "unreadable"


def _masked(value: Any) -> bool:
    if isinstance(value, Masked):
        return True
    if isinstance(value, dict):
        return any(map(_masked, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_masked, value))
    return any(map(_masked, vars(value).values())) if hasattr(value, "_record_type") else False


def question(hosts: Hosts, one: StepStory) -> Asked | Untold:
    """Whom to ask about the effect of a step, and with what; nobody is asked yet."""
    held = given(one)
    fn = reconcilers().get(one.step.tool)
    if fn is not None:
        named = parameters(fn)
        needs = tuple(name for name, each in named.items() if each.default is each.empty)
        return _asked_here(fn, Known(True, takes=_takes(fn, tuple(named)), needs=needs), held, one)
    host, known = hosts.asks(one.step.tool, _recorded(one, held))
    if host is not None:
        return _asked_there(host, known, held, one)
    return _probe(hosts, held, one) or Untold("no_reconciler", "" if not known.why else f"({known.why})")


def _takes(fn: Callable[..., Any], named: tuple[str, ...]) -> tuple[str, ...] | None:
    try:
        open_ended = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        open_ended = True
    return None if open_ended else named


def _recorded(one: StepStory, held: Given) -> list[Mapping[str, Any]]:
    """The hosts that were recorded with a step: that of its probe, and that of what undoes it."""
    found: list[Mapping[str, Any]] = []
    if "probe" in held.fields:
        found.append(msgspec.json.decode(held.fields["probe"]))
    for record in reversed(one.thread.records):
        if record.entry.step != one.step.number:
            continue
        try:
            compensation = read(record.blob)
        except AmendsError:  # it names no host that could be read
            continue
        if compensation is not None and compensation.host:
            return [*found, compensation.host]
    return found


def _fitting(known: Known, held: Given) -> dict[str, Any] | Untold:
    """The arguments for what is asked, by the names that it takes; all there are for one that takes any."""
    there = {"kwargs": {"$": "dict", "v": held.args}, "result": held.result} | held.args
    if held.lost and (known.takes is None or not set(known.takes) - {"idempotency_key"} <= set(there)):
        return Untold("unreadable", held.lost)
    for name in held.withheld:
        there.pop(name, None)
    wanted = known.takes if known.takes is not None else (*held.args, *known.needs)
    for name in known.needs:
        if name in held.withheld:
            return Untold(held.withheld[name], f"({name})")
        if name not in there and name != "idempotency_key":
            return Untold("no_argument", f"({name})")
    return {name: there[name] for name in wanted if name in there}


def _asked_here(fn: Callable[..., Any], known: Known, held: Given, one: StepStory) -> Asked | Untold:
    kwargs = _fitting(known, held)
    if isinstance(kwargs, Untold):
        return kwargs
    values = {name: decode(value) for name, value in kwargs.items()}
    if takes_key(fn) and "idempotency_key" not in values:
        values["idempotency_key"] = one.step.key

    def put(seconds: float) -> Outcome:
        with outside():
            ran = run(BLOCKING.call(fn, values, seconds, urgent=True))
        if ran.running is not None:
            ran.running.add_done_callback(lambda done: None if done.cancelled() else done.exception() and None)
        if isinstance(ran.error, TimeoutError):
            return Outcome("lost", why=f"no answer within {seconds:g} s")
        if ran.error is not None:
            return Outcome("cannot_tell", why=f"{type(ran.error).__name__}: {ran.error}")
        said = getattr(ran.result, "amends_outcome", ran.result)
        if said not in ANSWERS["verify"]:
            return Outcome("cannot_tell", why=f"it answered {type(ran.result).__name__}")
        note, differs = getattr(ran.result, "note", ""), getattr(ran.result, "differs", "")
        return Outcome(said, note=note, differs=differs)

    return Asked("this process", put)


def _asked_there(host: Host, known: Known, held: Given, one: StepStory) -> Asked | Untold:
    kwargs = _fitting(known, held)
    if isinstance(kwargs, Untold):
        return kwargs
    told = {"tool": one.step.tool, "result": held.result, "withheld": sorted(held.withheld)}
    return _put(host, one.step.tool, "verify", kwargs, one, told)


def _probe(hosts: Hosts, held: Given, one: StepStory) -> Asked | Untold | None:
    """The probe that was recorded with the step; it takes all arguments of the call."""
    if "probe" not in held.fields:
        return None
    recorded = msgspec.json.decode(held.fields["probe"])
    name = f"{recorded['module']}:{recorded['function']}"
    host, known = hosts.find(name, recorded)
    if host is None:
        return Untold("no_host", f"({known.why})")
    if held.lost:
        return Untold("unreadable", held.lost)
    for argument, why in held.withheld.items():
        if argument != "result":
            return Untold(why, f"({argument})")
    return _put(host, name, "probe", held.args, one)


def _put(
    host: Host, handler: str, purpose: str, kwargs: Mapping[str, Any], one: StepStory, told: Mapping[str, Any] = {}
) -> Asked:  # noqa: B006  (it is only read)
    def put(seconds: float) -> Outcome:
        step, saga = one.step, one.thread.saga
        deadline_ms = max(1, int(seconds * 1000))
        return host.call(handler, purpose, kwargs, step.key, saga.id, step.number, 1, deadline_ms, told)

    return Asked(host.name, put)
