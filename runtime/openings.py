"""Reads openings: what a fold never looks at, and whoever serves, shows or performs does."""

from __future__ import annotations

import msgspec

from ..store.entry import read_opening
from ..store.log import Log
from .values import decode

Served = dict[tuple[str, str, str], tuple[int, bytes, bytes | None]]


def served_steps(log: Log, saga: str) -> Served:
    """What the log knows of a saga's steps: (tool, scope, identity) -> (number, encoded args, encoded result)."""
    names: dict[int, tuple[str, str, str]] = {}
    args: dict[int, bytes] = {}
    results: dict[int, bytes | None] = {}
    for record in log.thread(saga):
        entry = record.entry
        if not entry.step:
            continue
        fields = raw_fields(record.blob)
        if entry.tool and "identity" in fields:
            names[entry.step] = (entry.tool, entry.scope or "do", decode(msgspec.json.decode(fields["identity"])))
            args[entry.step] = fields.get("args", b"{}")
            results.setdefault(entry.step, None)
        if "result" in fields:
            results[entry.step] = fields["result"]
    return {names[step]: (step, args[step], results[step]) for step in names}


def raw_fields(blob: bytes | None) -> dict[str, bytes]:
    """The fields of an entry's openings, encoded; maps that stand in several openings are joined."""
    found: dict[str, bytes] = {}
    for line in (blob or b"").splitlines(True):
        read_opening(line)
        for name, raw in msgspec.json.decode(line, type=tuple[str, dict[str, msgspec.Raw]])[1].items():
            value = bytes(raw)
            if name in found and value[:1] == b"{" and found[name][:1] == b"{":
                value = b"{" + b",".join(part for part in (found[name][1:-1], value[1:-1]) if part) + b"}"
            found[name] = value
    return found


def opened_as(log: Log, saga: str) -> tuple[str, str]:
    """(id the user gave, label) of a saga; empty where they were not given, are sealed or redacted."""
    found = log.view.sagas.get(saga)  # an open one: its first record is known, and read without waiting for a commit
    for record in [log.record(found.opened_seq)] if found else log.thread(saga)[:1]:
        fields = raw_fields(record.blob)
        return tuple(_text(fields.get(name)) for name in ("name", "label"))  # type: ignore[return-value]
    return "", ""


def _text(raw: bytes | None) -> str:
    return str(decode(msgspec.json.decode(raw))) if raw else ""


def when(at: int) -> str:
    """RFC 3339 UTC of microseconds since 1970."""
    from datetime import datetime, timezone

    return datetime.fromtimestamp(at / 1e6, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
