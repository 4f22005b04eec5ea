"""Writes and reads openings: what a fold never looks at, and whoever serves, shows or performs does.

A value above 256 KiB stands in its field as a manifest; its chunks are openings of their own behind the others, and
where an entry has no room for all of them, the fact is told in several entries (parts). `whole` and `blob_at` give such
a fact as one record; `raw_fields` gives its values as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from ..store.entry import read_opening, unfinished
from ..store.errors import SealKey
from ..store.log import Log, Record
from ..store.seal import MISSING, ROTATED, WITHHELD, WRONG
from .values import INLINE_MAX, MANIFEST, decode, encode_fields, join, split

Served = dict[tuple[str, str, str], tuple[int, bytes, bytes | None]]
Fields = dict[str, msgspec.Raw]


class Records(Protocol):
    """Where a record is had by its place."""

    def record(self, seq: int) -> Record:
        """One record. Raises NotFound."""


# ---- in -------------------------------------------------------------------------------------------------------------


def spread(openings: Sequence[bytes]) -> tuple[bytes, ...]:
    """The same openings, each value above INLINE_MAX as a manifest, and behind them the chunks of those."""
    kept: list[bytes] = []
    chunks: dict[str, list[bytes]] = {}  # by hash: equal values share them
    for opening in openings:
        if len(opening) > INLINE_MAX:
            fields = msgspec.json.decode(opening, type=Fields)
            for name, raw in fields.items():
                fields[name], parts = split(bytes(raw))
                if parts:
                    of = msgspec.json.decode(fields[name])["sha256"]
                    chunks[of] = [_chunk(part, place, of) for place, part in enumerate(parts)]
            opening = encode_fields(fields)
        kept.append(opening)
    return (*kept, *(line for lines in chunks.values() for line in lines))


def _chunk(part: bytes, place: int, of: str) -> bytes:
    return msgspec.json.encode({"at": place, "chunk": part.decode(), "of": of})


# ---- out ------------------------------------------------------------------------------------------------------------


def whole(records: Iterable[Record]) -> Iterator[Record]:
    """Each fact as one record: one told in parts is its last entry, with the openings of all of them."""
    early: list[bytes] = []
    for record in records:
        if unfinished(record.entry):
            early.append(record.blob or b"")
            continue
        if early:
            record = record._replace(blob=(record.blob or b"") + b"".join(early))
            early = []
        yield record


def blob_at(log: Records, seq: int) -> bytes | None:
    """The openings of the fact whose last (mostly its only) entry stands at `seq`. Raises NotFound."""
    record = log.record(seq)
    if not record.entry.part:
        return record.blob
    parts = [log.record(place) for place in range(seq - record.entry.part[1] + 1, seq)]
    return next(whole([*parts, record])).blob


def redacted(record: Record) -> bool:
    """Whether openings that a record had are there no more. Of a fact in parts, `whole` cannot tell."""
    return not record.withheld and (record.blob or b"").count(b"\n") < len(record.entry.c)


def needed_at(log: Records, seq: int) -> bytes | None:
    """The same for whoever is about to act on it: without a key that its owner has, nothing is done by halves. Raises
    SealKey. What is gone for good (redacted, forgotten, not in this copy) is None, for a person to settle."""
    refuse_sealed(log.record(seq))
    return blob_at(log, seq)


def refuse_sealed(record: Record) -> None:
    """Raise SealKey for a record whose openings only lack the owner's key."""
    if record.withheld in KEYS:
        raise SealKey(
            f"What record {record.entry.seq} holds cannot be read: {WITHHELD[record.withheld]}.",
            next="Name the key's source with --key, in AMENDS_SEAL_KEY, or as key under [seal] in config.toml.",
            code=record.withheld,
        )


KEYS = (MISSING, WRONG, ROTATED)


def raw_fields(blob: bytes | None) -> dict[str, bytes]:
    """The fields of a fact's openings, encoded; maps that stand in several openings are joined.

    A value whose chunks are not all there (erased, or not asked for) stays a manifest. Raises Malformed for wrong ones.
    """
    lines = (blob or b"").splitlines(True)
    for line in lines:
        read_opening(line)
    return _gathered(msgspec.json.decode(line, type=tuple[str, Fields])[1] for line in lines)


def fields_of(openings: Iterable[bytes]) -> dict[str, bytes]:
    """The same for the openings of a draft, which have no salt yet."""
    return _gathered(msgspec.json.decode(opening, type=Fields) for opening in openings)


def _gathered(openings: Iterable[Fields]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    kept: list[Fields] = []
    chunks: dict[str, dict[int, bytes]] = {}
    for fields in openings:
        if "chunk" in fields:
            at, chunk, of = (msgspec.json.decode(fields[name]) for name in ("at", "chunk", "of"))
            chunks.setdefault(of, {})[at] = chunk.encode()
        else:
            kept.append(fields)
    for fields in kept:
        for name, raw in fields.items():
            value = _joined(bytes(raw), chunks)
            if name in found and value[:1] == b"{" and found[name][:1] == b"{":
                value = b"{" + b",".join(part for part in (found[name][1:-1], value[1:-1]) if part) + b"}"
            found[name] = value
    return found


def _joined(value: bytes, chunks: dict[str, dict[int, bytes]]) -> bytes:
    if not value.startswith(MANIFEST):
        return value
    manifest = msgspec.json.decode(value)
    parts = chunks.get(manifest["sha256"], {})
    if len(parts) != manifest["chunks"]:
        return value
    return join(manifest, [parts[place] for place in sorted(parts)])


def served_steps(log: Log, saga: str) -> Served:
    """What the log knows of a saga's steps: (tool, scope, identity) -> (number, encoded args, encoded result)."""
    names: dict[int, tuple[str, str, str]] = {}
    args: dict[int, bytes] = {}
    results: dict[int, bytes | None] = {}
    for record in whole(log.thread(saga)):
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


def opened_as(log: Log, saga: str) -> tuple[str, str]:
    """(id the user gave, label) of a saga; empty where they were not given, are sealed or redacted."""
    found = log.view.sagas.get(saga)  # an open one: its first record is known, and read without waiting for a commit
    for record in [log.record(found.opened_seq)] if found else log.thread(saga)[:1]:
        fields = raw_fields(record.blob)
        return tuple(_text(fields.get(name)) for name in ("name", "label"))  # type: ignore[return-value]
    return "", ""


def known_as(log: Log, saga: str) -> str:
    """The id by which a person knows a saga: the one it was given, else that of the saga which it follows or is inside
    of; the header id where nobody gave any."""
    place = saga
    while place:
        name = opened_as(log, place)[0]
        if name:
            return name
        first = log.thread(place)[:1]
        place = (first[0].entry.of or first[0].entry.parent) if first else ""
    return saga


def scope_known_as(log: Log, scope: str) -> str:
    """A lever's scope with the id by which a person knows its saga."""
    kind, _, saga = scope.partition(":")
    return f"saga:{known_as(log, saga)}" if kind == "saga" else scope


def _text(raw: bytes | None) -> str:
    return str(decode(msgspec.json.decode(raw))) if raw else ""


def when(at: int) -> str:
    """RFC 3339 UTC of microseconds since 1970."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
