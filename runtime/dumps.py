"""The log in shapes that other programs read: CSV, JSON, OpenTelemetry traces, OCSF events. They prove nothing.

Each is a stream of lines, made while the records are read once; memory is that of the open sagas. What is not asked for
is not in them: arguments and results come only in plain text and by choice (`payload`). A secret stands as the
fingerprint that the log holds, what was destroyed or is sealed as the word that says so.

    csv    a row per record; a cell that a spreadsheet would take for a formula begins with an apostrophe
    json   one array, a record a line: its header, its hash, and its openings if asked for
    otlp   a line per saga, each an OTLP/JSON export request: one trace, a span for the saga and one for each step
    ocsf   a line per outcome of an effect: API Activity (6003) with the profile ai_operation, of the version below

Ids follow from the log's name and the record, so that two exports of one log tell the same traces and events.
Sources: OpenTelemetry protocol (JSON encoding), semantic conventions for generative AI (in development); OCSF schema.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from ..store.entry import Entry, leaf, unfinished
from ..store.errors import YouErred
from ..store.log import Record
from .openings import raw_fields, when
from .report import step_view
from .saga import Saga, apply, opened
from .step import Step

OCSF_VERSION = "1.9.0-dev"  # the first that knows ai_agent
SCOPE = "amends"


class Chosen(NamedTuple):
    """Which records: those before `size`, of one saga by header id, or of all; `since` <= their time < `until`, in
    microseconds since 1970, 0 for no bound."""

    size: int
    saga: str = ""
    since: int = 0
    until: int = 0

    def has(self, at: int) -> bool:
        return at >= self.since and (not self.until or at < self.until)


class Told(NamedTuple):
    """What a dump is of: the log's origin, whether openings are told, which records."""

    origin: str
    plain: bool
    chosen: Chosen


def moment(text: str) -> int:
    """Microseconds since 1970 of an RFC 3339 time or date; 0 for none. Raises YouErred."""
    if not text:
        return 0
    try:
        found = datetime.fromisoformat(text)
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        return max(1, round(found.timestamp() * 1_000_000))
    except (ValueError, OverflowError):
        raise YouErred(f"{text!r} is no time.", next="Write it as 2026-10-12T09:14:00Z.", code="usage") from None


# ---- rows -----------------------------------------------------------------------------------------------------------


def _openings(record: Record) -> dict[str, Any]:
    """The openings of a record as they lie there, and what is not among them."""
    lines = (record.blob or b"").splitlines(True)
    told: dict[str, Any] = {}
    if lines:
        told["openings"] = [msgspec.json.decode(line)[1] for line in lines]
    if record.withheld:
        told["withheld"] = record.withheld
    elif len(lines) < len(record.entry.c):
        told["destroyed"] = len(record.entry.c) - len(lines)
    return told


def _chosen(records: Iterable[Record], told: Told) -> Iterator[Record]:
    for record in records:
        if told.chosen.has(record.entry.at):
            yield record


def json_lines(records: Iterable[Record], told: Told) -> Iterator[str]:
    """One array, a record a line."""
    before = "["
    for record in _chosen(records, told):
        row = {"hash": leaf(record.line).hex(), "time": when(record.entry.at), **msgspec.json.decode(record.line)}
        yield before + _json(row | (_openings(record) if told.plain else {}))
        before = ","
    yield "]" if before == "," else "[]"


COLUMNS = (
    "seq time kind saga n step tool sem inv handler out why ref use key of parent attempt level person up hash".split()
)
"""Of a CSV; with the payload also openings, withheld and destroyed."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")


def csv_lines(records: Iterable[Record], told: Told) -> Iterator[str]:
    """A head, then a row per record."""
    yield _row([*COLUMNS, *(("openings", "withheld", "destroyed") if told.plain else ())])
    for record in _chosen(records, told):
        header = msgspec.json.decode(record.line)
        header |= {"time": when(record.entry.at), "hash": leaf(record.line).hex()}
        cells = [header.get(column, "") for column in COLUMNS]
        if told.plain:
            extra = _openings(record)
            cells += [extra.get(name, "") for name in ("openings", "withheld", "destroyed")]
        yield _row(cells)


def _row(cells: Iterable[Any]) -> str:
    """One row, without its line feed; a text that a spreadsheet would run is kept a text."""
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow([_cell(cell) for cell in cells])
    return out.getvalue()


def _cell(cell: Any) -> str:
    text = cell if isinstance(cell, str) else str(cell) if isinstance(cell, int) else _json(cell)
    return f"'{text}" if text.lstrip(" ").startswith(_FORMULA) else text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


# ---- sagas as they pass ---------------------------------------------------------------------------------------------


class _Passing:
    """A saga while its records pass: as folded, and what is told of it."""

    def __init__(self, entry: Entry) -> None:
        self.saga: Saga = opened(entry, 0)
        self.records: list[Record] = []


def _sagas(records: Iterable[Record], keep: bool) -> Iterator[tuple[_Passing, Record | None]]:
    """Each record of a saga with its saga as it stands then; after the last one (None) of each saga that still goes on,
    in the order of their beginnings. keep: with the records of the saga so far."""
    passing: dict[str, _Passing] = {}
    for record in records:
        entry = record.entry
        if not entry.saga:
            continue
        one = passing.get(entry.saga)
        if one is None:
            one = passing[entry.saga] = _Passing(entry)
        else:
            apply(one.saga, entry, 0)
        if keep:
            one.records.append(record)
        if not unfinished(entry):
            yield one, record
        if entry.kind == "saga.ended":
            del passing[entry.saga]
    for one in passing.values():
        yield one, None


def _id(told: Told, *names: object, size: int) -> str:
    text = "\0".join(["amends/dump/1", told.origin, *map(str, names)])
    return sha256(text.encode()).hexdigest()[: 2 * size]


# ---- OpenTelemetry --------------------------------------------------------------------------------------------------

_INTERNAL, _CLIENT = 1, 3  # SpanKind
_UNSET, _OK, _ERROR = 0, 1, 2  # StatusCode
_STEP_STATUS = {
    "done": _OK, "accepted": _OK, "compensated": _UNSET, "intended": _UNSET, "waiting": _UNSET,
}  # fmt: skip


def otlp_lines(records: Iterable[Record], told: Told) -> Iterator[str]:
    """A line per saga that began in the time: one ExportTraceServiceRequest. One that goes on has the span of what it
    has done so far."""
    for one, record in _sagas(records, keep=True):
        last = record is None or record.entry.kind == "saga.ended"
        if last and told.chosen.has(one.saga.opened_at):
            yield _json(_request(one, told))


def _request(one: _Passing, told: Told) -> dict[str, Any]:
    resource = _attributes({"service.name": "amends", "amends.log.origin": told.origin})
    spans = [_saga_span(one, told), *[_step_span(one, step, told) for step in one.saga.steps.values()]]
    scope = {"scope": {"name": SCOPE}, "spans": spans}
    return {"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": [scope]}]}


def _saga_span(one: _Passing, told: Told) -> dict[str, Any]:
    saga, first, last = one.saga, one.records[0].entry, one.records[-1].entry
    attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.conversation.id": saga.id,
        "gen_ai.agent.id": first.driver,
        "amends.saga.outcome": saga.out or saga.phase,
        "amends.record.first": saga.opened_seq,
        "amends.record.last": last.seq,
    }
    ended = saga.ended_at or last.at
    status = _OK if saga.out == "committed" else _ERROR if saga.out else _UNSET
    links = [_link(told, other) for other in (saga.parent, saga.of) if other]
    events = [_event(record, told) for record in one.records if not record.entry.step]
    return _span(told, saga.id, 0, f"saga {saga.id}", _INTERNAL, saga.opened_at, ended, status, attributes) | {
        "events": events,
        "links": links,
    }


def _step_span(one: _Passing, step: Step, told: Told) -> dict[str, Any]:
    mine = [record for record in one.records if record.entry.step == step.number]
    view = step_view(one.saga, step)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": step.tool,
        "gen_ai.tool.call.id": step.key,
        "gen_ai.conversation.id": one.saga.id,
        "amends.step": step.number,
        "amends.step.state": view.state,
        "amends.step.semantics": step.sem,
        "amends.step.attempts": step.attempts,
        "amends.step.compensation": step.handler,
    }
    if told.plain:
        attributes |= _payload(mine)
    ended = next((r.entry.at for r in reversed(mine) if r.entry.seq == step.ended_seq), mine[-1].entry.at)
    status = _STEP_STATUS.get(view.state, _ERROR)
    span = _span(
        told,
        one.saga.id,
        step.number,
        f"execute_tool {step.tool}",
        _CLIENT,
        mine[0].entry.at,
        ended,
        status,
        attributes,
    )
    return span | {
        "parentSpanId": _id(told, "span", one.saga.id, 0, size=8),
        "events": [_event(record, told) for record in mine],
    }


_PAYLOAD = {"args": "gen_ai.tool.call.arguments", "result": "gen_ai.tool.call.result", "error": "amends.step.error"}


def _payload(records: list[Record]) -> dict[str, Any]:
    """What it was given and what it returned, as JSON; what is withheld or destroyed, as a word."""
    told: dict[str, Any] = {}
    for record in records:
        fields = raw_fields(record.blob)
        told |= {name: fields[field].decode() for field, name in _PAYLOAD.items() if field in fields}
        if record.withheld:
            told["amends.payload"] = record.withheld
        elif "destroyed" in _openings(record):
            told["amends.payload"] = "destroyed"
    return told


def _span(
    told: Told,
    saga: str,
    number: int,
    name: str,
    kind: int,
    start: int,
    end: int,
    status: int,
    attributes: dict[str, Any],
) -> dict[str, Any]:
    return {
        "traceId": _id(told, "trace", saga, size=16),
        "spanId": _id(told, "span", saga, number, size=8),
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(start * 1000),
        "endTimeUnixNano": str(end * 1000),
        "attributes": _attributes(attributes),
        "status": {"code": status} if status else {},
    }


def _link(told: Told, saga: str) -> dict[str, Any]:
    return {"traceId": _id(told, "trace", saga, size=16), "spanId": _id(told, "span", saga, 0, size=8)}


def _event(record: Record, told: Told) -> dict[str, Any]:
    entry = record.entry
    attributes = {"amends.record": entry.seq, "amends.out": entry.out, "amends.why": entry.why}
    return {"timeUnixNano": str(entry.at * 1000), "name": entry.kind, "attributes": _attributes(attributes)}


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    """OTLP's list; 64-bit integers are strings in its JSON. What says nothing is left out."""
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in values.items()
        if value != ""
    ]


# ---- OCSF -----------------------------------------------------------------------------------------------------------

_CLASS, _OTHER = 6003, 99
_SUCCESS, _FAILURE, _NOBODY_KNOWS = 1, 2, 0  # status_id
_INFORMATIONAL, _MEDIUM, _HIGH = 1, 3, 4  # severity_id
_EVENTS: dict[str, tuple[str, int, int]] = {
    "step.done": ("Perform", _SUCCESS, _INFORMATIONAL),
    "step.failed": ("Perform", _FAILURE, _INFORMATIONAL),
    "step.lost": ("Perform", _NOBODY_KNOWS, _MEDIUM),
    "step.landed": ("Land", _SUCCESS, _MEDIUM),
    "step.refused": ("Refuse", _FAILURE, _INFORMATIONAL),
    "step.accepted": ("Accept", _SUCCESS, _INFORMATIONAL),
    "step.probed": ("Probe", _SUCCESS, _INFORMATIONAL),
    "undo.done": ("Compensate", _SUCCESS, _INFORMATIONAL),
    "undo.failed": ("Compensate", _FAILURE, _HIGH),
    "undo.lost": ("Compensate", _NOBODY_KNOWS, _HIGH),
    "confirm.done": ("Confirm", _SUCCESS, _INFORMATIONAL),
    "confirm.failed": ("Confirm", _FAILURE, _HIGH),
    "confirm.lost": ("Confirm", _NOBODY_KNOWS, _HIGH),
}
"""Kind -> what was done, how it ended, how severe that is."""


def ocsf_lines(records: Iterable[Record], told: Told) -> Iterator[str]:
    """A line per outcome: one event."""
    for one, record in _sagas(records, keep=False):
        if record is not None and record.entry.kind in _EVENTS and told.chosen.has(record.entry.at):
            yield _json(_ocsf(one.saga, record, told))


def _ocsf(saga: Saga, record: Record, told: Told) -> dict[str, Any]:
    entry = record.entry
    activity, status, severity = _EVENTS[entry.kind]
    step = saga.steps[entry.step]
    event: dict[str, Any] = {
        "activity_id": _OTHER,
        "activity_name": activity,
        "category_uid": 6,
        "category_name": "Application Activity",
        "class_uid": _CLASS,
        "class_name": "API Activity",
        "type_uid": _CLASS * 100 + _OTHER,
        "type_name": f"API Activity: {activity}",
        "time": entry.at // 1000,
        "severity_id": severity,
        "status_id": status,
        "metadata": {
            "version": OCSF_VERSION,
            "profiles": ["ai_operation"],
            "product": {"name": "amends", "vendor_name": "amends"},
            "uid": leaf(record.line).hex(),
            "sequence": entry.seq,
            "log_name": told.origin,
            "correlation_uid": saga.id,
        },
        "actor": {"app_name": "amends", "app_uid": saga.driver or told.origin},
        "ai_agent": {"uid": told.origin, "instance_uid": saga.id, "type_id": 0},
        "api": {"operation": step.tool, "request": {"uid": step.key or f"{saga.id}/{step.number}"}},
        "src_endpoint": {"uid": told.origin, "name": "amends"},
        "unmapped": {
            "kind": entry.kind, "saga": saga.id, "step": step.number, "semantics": step.sem,
            "state": step_view(saga, step).state, "attempts": step.attempts,
        },
    }  # fmt: skip
    if entry.why or entry.out:
        event["status_code"] = entry.why or entry.out
    if told.plain:
        event["unmapped"] |= _openings(record)
    return event


FORMATS: dict[str, Callable[[Iterable[Record], Told], Iterator[str]]] = {
    "csv": csv_lines,
    "json": json_lines,
    "otlp": otlp_lines,
    "ocsf": ocsf_lines,
}
