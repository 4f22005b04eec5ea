"""What a record holds can be destroyed for good, and the record stays: its hash, its place, who did what and when.

An opening is what goes or stays: its salt and all its fields. So nobody can check afterwards whether a guess at what it
held is right. A fact of the log says which openings are gone, on what basis, and who decided; it and the destruction
are one transaction. Refused: what is gone already, the records of control, what is under a hold, and what belongs to a
saga that is still open, or whose follow-up is: what undoes its effects is in there.

Whoever chooses reads openings and asks no rule; whoever decides (`redacting`) sees places only, inside the transaction.
Why not field by field: a field alone could not be destroyed without its neighbours' salt being known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from .chain import Decide, Draft
from .clock import Now
from .companions import controls
from .entry import Entry, read_opening, unfinished
from .errors import BadValue, NotFound, Refused
from .facts import HELD, LIFTED, REDACTED
from .keeping import EVERYTHING, Copy
from .log import Log, Record
from .seal import placed

PLACES = 400
"""Openings that one fact names."""
AT_ONCE = 2000
"""Openings of one transaction: others are not kept from writing for longer."""

_VOTE = "vote.cast"
_REQUEST = "request"
_BASIS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}")
_WHERE = re.compile(r"([^=~]+)([=~])(.+)", re.DOTALL)
_DEEP = 60
"""Levels of a value that are searched; what lies deeper counts with the level above."""

Place = tuple[int, int]
"""A record and the place of an opening among its commitments."""


# ---- choosing --------------------------------------------------------------------------------------------------------


class Opening(NamedTuple):
    """An opening that is there. fields: what it holds, values in chunks joined; None under a seal without a key.
    chunks: the places of the openings that carry its long values."""

    seq: int
    place: int
    entry: Entry
    fields: dict[str, Any] | None
    chunks: tuple[Place, ...] = ()


class Where(NamedTuple):
    """`FIELD=VALUE` or `FIELD~TEXT` (contains, in any case)."""

    field: str
    contains: bool
    text: str


def where(text: str) -> Where:
    """A condition as it is typed. Raises BadValue."""
    found = _WHERE.fullmatch(text)
    if found is None:
        raise BadValue(f"{text!r} is no condition.", next="Write FIELD=VALUE, or FIELD~TEXT for a part of it.")
    return Where(found[1].strip(), found[2] == "~", found[3])


def place_of(text: str) -> Place:
    """`SEQ:PLACE` as it is typed. Raises BadValue."""
    if not re.fullmatch(r"[0-9]{1,16}:[0-9]{1,2}", text):
        raise BadValue(f"{text!r} is no opening.", next="Write SEQ:PLACE, as `amends redact --dry-run` lists them.")
    seq, place = text.split(":")
    return int(seq), int(place)


def openings_of(log: Log, records: Iterable[Record]) -> Iterator[Opening]:
    """The openings of these records that are there and may go, each once; those that carry parts of a long value go
    with the one that it belongs to. Records that are parts of one fact must follow each other. Raises Malformed
    (E_OPENING) for one that was altered."""
    fact: list[tuple[Entry, int, bytes | None]] = []
    for record in records:
        entry, lines = record.entry, dict(placed(record.entry, record.blob or b""))
        fact += [(entry, place, lines.get(place)) for place in log.places(entry.seq) if not control(entry, place)]
        if not unfinished(entry):
            yield from _told(fact)
            fact = []
    yield from _told(fact)


def _told(fact: list[tuple[Entry, int, bytes | None]]) -> Iterator[Opening]:
    chunks: dict[str, dict[int, tuple[Place, str]]] = {}
    whole = []
    for entry, place, line in fact:
        fields = read_opening(line) if line is not None else None
        if fields is not None and fields.keys() == {"at", "chunk", "of"}:
            chunks.setdefault(fields["of"], {})[fields["at"]] = (entry.seq, place), fields["chunk"]
        else:
            whole.append((entry, place, fields))
    for entry, place, fields in whole:
        carried: list[Place] = []
        joined = {name: _joined(value, chunks, carried) for name, value in (fields or {}).items()}
        yield Opening(entry.seq, place, entry, joined if fields is not None else None, tuple(carried))
    owned = {
        manifest["sha256"] for _, _, fields in whole for manifest in (fields or {}).values() if _manifest(manifest)
    }
    for of, parts in chunks.items():
        if of not in owned:  # what it belonged to is gone, or cannot be read
            yield from (Opening(*pair, _entry_at(fact, pair), {"chunk": text}) for pair, text in parts.values())


def _entry_at(fact: list[tuple[Entry, int, bytes | None]], pair: Place) -> Entry:
    return next(entry for entry, place, _ in fact if (entry.seq, place) == pair)


def _manifest(value: Any) -> bool:
    return type(value) is dict and value.get("$") == "manifest"


def _joined(value: Any, chunks: dict[str, dict[int, tuple[Place, str]]], carried: list[Place]) -> Any:
    if not _manifest(value):
        return value
    parts = chunks.get(value["sha256"], {})
    carried += [pair for pair, _ in parts.values()]
    text = "".join([parts[at][1] for at in sorted(parts)])
    try:
        return msgspec.json.decode(text)
    except ValueError:  # not all of it is there
        return text


class Choice(NamedTuple):
    """What would go. left: openings of the same records that stay; with: fields that share the fate of what was asked
    for, by opening; unread: openings that nobody could look into."""

    gone: list[Opening]
    also: dict[Place, list[str]]
    unread: list[Opening]

    @property
    def places(self) -> list[Place]:
        """Every place, those of long values included, in order."""
        return sorted({pair for one in self.gone for pair in ((one.seq, one.place), *one.chunks)})


def choose(openings: Iterable[Opening], fields: Sequence[str] = (), conditions: Sequence[Where] = ()) -> Choice:
    """The openings that hold one of the fields and meet every condition; without either, all of them.

    A field is named by its path (`args.email`) or by the end of it (`email`)."""
    choice = Choice([], {}, [])
    for one in openings:
        if not fields and not conditions:
            choice.gone.append(one)
        elif one.fields is None:
            choice.unread.append(one)
        else:
            held = _unfolded(one.fields)
            asked = [path for path, _ in walk(held) if any(_ends(path, name) for name in fields)]
            if (asked or not fields) and all(_meets(held, condition) for condition in conditions):
                choice.gone.append(one)
                choice.also[one.seq, one.place] = _others(held, asked) if fields else []
    return choice


def _unfolded(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as they are searched: what people were asked about is a text, in which the arguments stand again."""
    said = fields.get(_REQUEST)
    if not isinstance(said, str):
        return fields
    try:
        return fields | {_REQUEST: _untagged(msgspec.json.decode(said))}
    except (ValueError, TypeError, KeyError, RecursionError):  # no request of ours
        return fields


def _untagged(value: Any) -> Any:
    """What a request says, by its names: FORMAT.md 11 has the tags of what JSON's composed text cannot hold."""
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag, inner = value.get("$"), value.get("v")
    if tag == "pairs" and isinstance(inner, list):
        return {_text(name): _untagged(item) for name, item in inner}
    if tag in ("escaped", "int", "float"):
        return _text(value)
    return {name: _untagged(item) for name, item in value.items()}


def _text(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    said = str(value.get("v", value.get("sha256", "")))
    return str(msgspec.json.decode(f'"{said}"')) if value["$"] == "escaped" else said


def walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value in a map, with its path; a tagged one (`{"$":…,"v":…}`) and what it stands for share a path."""
    if len(path) > _DEEP:
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        inner = path if isinstance(value, dict) and "$" in value else (*path, str(key))
        yield inner, item
        yield from walk(item, inner)


def _ends(path: tuple[str, ...], name: str) -> bool:
    words = tuple(name.split("."))
    return path[-len(words) :] == words


def _meets(fields: dict[str, Any], condition: Where) -> bool:
    return any(_fits(value, condition) for path, value in walk(fields) if _ends(path, condition.field))


def _fits(value: Any, condition: Where) -> bool:
    said = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if condition.contains:
        return condition.text.casefold() in said.casefold()
    return said == condition.text


def _others(fields: dict[str, Any], asked: list[tuple[str, ...]]) -> list[str]:
    """The fields that go with what was asked for: those beside it by two words, others by one."""
    own = {path[:2] for path in asked}
    beside = {path[0] for path in asked}
    return sorted(
        {".".join(path[: 1 + (path[0] in beside)]) for path, _ in walk(fields) if path[:2] not in own} - beside
    )


def control(entry: Entry, place: int) -> bool:
    """Whether an opening is one of those that say who may do what, or proves it: they are never destroyed."""
    if controls(entry.kind):
        return True
    return entry.kind == _VOTE and bool(entry.credential) and place == 0


def about(entry: Entry) -> str:
    """The saga that a record is of, or is about: a vote, a message."""
    return entry.saga or entry.of


# ---- deciding --------------------------------------------------------------------------------------------------------


def redact(
    log: Log, places: Sequence[Place], *, basis: str, by: str, note: str = "", done: Callable[[int], None] | None = None
) -> list[Entry]:
    """Destroy the openings at these places, in transactions of at most AT_ONCE, each complete by itself. The bytes are
    gone from the file when `finish_erasing` says so.

    Raises Refused (`redacted_already`, `opening_missing`, `control_record`, `held`, `saga_open`), NotFound, BadValue:
    nothing of that transaction is destroyed then.
    """
    if not _BASIS.fullmatch(basis):
        raise BadValue(f"{basis!r} is no basis.", next="Name it in one word, as GDPR-17: letters, digits and ._:/-")
    if not by.strip():
        raise BadValue("Who decides has a name.", next="Pass --by NAME.")
    wanted = sorted(set(places))
    if not wanted:
        raise Refused("Nothing was chosen.", next="With --dry-run and no --field it lists what there is.",
                      code="nothing_chosen")  # fmt: skip
    facts: list[Entry] = []
    for first in range(0, len(wanted), AT_ONCE):
        try:
            facts += log.commit(redacting(log, wanted[first : first + AT_ONCE], basis, by, note))
        except Refused as refused:
            raise _with_history(log, refused) from None
        if done is not None:
            done(min(first + AT_ONCE, len(wanted)))
    return facts


def redacting(log: Log, places: Sequence[Place], basis: str, by: str, note: str) -> Decide:
    """The decision: sorted places, each once."""

    def decide(view: Any, now: Now) -> list[Draft]:
        check(log, places)
        words = [msgspec.json.encode({"by": by}), *([msgspec.json.encode({"note": note})] if note else [])]
        return [
            Draft(REDACTED, {"places": tuple(places[at : at + PLACES]), "basis": basis}, tuple(words), up=True)
            for at in range(0, len(places), PLACES)
        ]

    return decide


def check(log: Log, places: Sequence[Place]) -> None:
    """Raise what a redaction of these places would be refused with."""
    busy: dict[str, str] | None = None
    seen: dict[str, None] = {}
    there: dict[int, tuple[int, ...]] = {}
    for seq, place in places:
        entry = log.record(seq).entry
        if control(entry, place):
            raise _refused("control_record", f"Record {seq} ({entry.kind}) says who decided what: it is kept as it is.")
        if place >= len(entry.c):
            raise NotFound(f"Record {seq} has {len(entry.c)} openings: there is none at place {place}.")
        saga = about(entry)
        if saga not in seen:
            seen[saga] = None
            _not_held(log, saga)
            busy = _busy(log) if busy is None and saga else busy
            if saga and (saga in (busy or {}) or log.is_open(saga)):
                raise _refused("saga_open", (busy or {}).get(saga) or _OPEN.format(saga),
                               "Redact it once it has ended; `amends inbox` says what it waits for.")  # fmt: skip
        if seq not in there:
            there[seq] = log.places(seq)
        if place not in there[seq]:
            raise _refused("redacted_already", f"Opening {seq}:{place} is not there any more.", seq=seq, place=place)


def able(log: Log, places: Iterable[Place]) -> tuple[list[Place], dict[str, str]]:
    """Those of the places that may be redacted by their sagas, and the other sagas (header ids) with the reason:
    `saga_open`, `held`. For a choice over the whole log, where some of it has to wait."""
    busy, left, seen, kept = _busy(log), {}, set(), []
    for seq, place in places:
        saga = about(log.record(seq).entry)
        if saga not in seen:
            seen.add(saga)
            if saga and (saga in busy or log.is_open(saga)):
                left[saga] = "saga_open"
            elif held_over(log, saga) is not None:
                left[saga] = "held"
        if saga not in left:
            kept.append((seq, place))
    return kept, left


_OPEN = "Saga {} is still open: what undoes its effects is in its records."


Near = Mapping[str, Collection[str]]
"""By saga, those that it is inside of or follows (header ids)."""


def near(entry: Entry) -> set[str]:
    """What the first record of a saga says of that."""
    return {entry.of, entry.parent} - {""}


def held_over(log: Log, saga: str, known: Near = MappingProxyType({})) -> int | None:
    """The place of a hold on a saga (header id), or on one that it is inside of or follows; None if there is none.
    known: sagas that need not be looked up for it."""
    seen: set[str] = set()
    waiting = [saga]
    while log.keeping.holds and waiting:
        saga = waiting.pop()
        hold = log.keeping.held(saga)
        if hold is not None:
            return hold
        seen.add(saga)
        named = known[saga] if saga in known else set().union(*(near(one.entry) for one in log.thread(saga)[:1]))
        waiting += set(named) - seen
    return None


def _not_held(log: Log, saga: str) -> None:
    hold = held_over(log, saga)
    if hold is None:
        return
    told = held_by(log, hold)
    what = "Everything" if log.keeping.holds[hold] == EVERYTHING else f"Saga {told['name'] or saga}"
    raise _refused(
        "held",
        f"{what} is under the hold of record {hold}, placed by {told['by']} at {told['at']}: {told['reason']}",
        f"Whoever may lift it: amends hold --lift {hold} --by NAME",
        hold=hold,
    )


def _busy(log: Log) -> dict[str, str]:
    """Sagas of which something is still going on elsewhere, and how that is said."""
    found: dict[str, str] = {}
    for row in log.sagas(open_only=True):
        first = log.record(row.first).entry
        found[row.saga] = _OPEN.format(row.saga)
        if first.of:
            found[first.of] = f"Saga {first.of} is still at work in its follow-up {row.saga}."
        if first.parent:
            found[first.parent] = f"Saga {first.parent} is still at work in the saga inside it, {row.saga}."
    return found


def _refused(code: str, said: str, next: str = "", **facts: object) -> Refused:
    return Refused(said, next=next, code=code, **facts)


def _with_history(log: Log, refused: Refused) -> Refused:
    """Of an opening that is gone: who destroyed it. One that no fact of the log explains is another thing."""
    seq, place = refused.facts.get("seq"), refused.facts.get("place")
    if refused.code != "redacted_already" or not isinstance(seq, int) or not isinstance(place, int):
        return refused
    for record in log.records(seq + 1):
        if record.entry.kind == REDACTED and (seq, place) in record.entry.places:
            by = text(record, "by") or "somebody"
            said = (
                f"Opening {seq}:{place} was redacted already: record {record.entry.seq}, by {by}, {record.entry.basis}."
            )
            return _refused("redacted_already", said, seq=seq, place=place, by=record.entry.seq)
    return _refused("opening_missing", f"Opening {seq}:{place} is not there, and no record says why.",
                    "Run `amends verify`.", seq=seq, place=place)  # fmt: skip


def reached_by(log: Log, places: Sequence[Place]) -> list[Copy]:
    """The copies that were handed out with these openings in them: no redaction here reaches them."""
    lowest = min((seq for seq, _ in places), default=0)
    return list(log.keeping.reaching(lowest))


# ---- holds -----------------------------------------------------------------------------------------------------------


def hold(log: Log, target: str, *, by: str, reason: str, name: str = "") -> Entry:
    """Forbid to redact, compact or forget a saga (header id; its name for whoever reads it), or EVERYTHING. Several
    holds may stand on one saga, each with its own reason. Raises BadValue."""
    words = _words(by=by, reason=reason, name=name)

    def decide(view: Any, now: Now) -> list[Draft]:
        return [Draft(HELD, {} if target == EVERYTHING else {"target": target}, words, up=True)]

    return log.commit(decide)[0]


def lift(log: Log, seq: int, *, by: str, reason: str = "") -> Entry:
    """Lift the hold at this place. Raises NotFound (`no_hold`), BadValue."""
    words = _words(by=by, reason=reason or "no reason given")

    def decide(view: Any, now: Now) -> list[Draft]:
        if seq not in log.keeping.holds:
            raise NotFound(f"Record {seq} is no hold that stands.", next="`amends hold --list` says.", code="no_hold")
        return [Draft(LIFTED, {"ref": seq}, words, up=True)]

    return log.commit(decide)[0]


def _words(*, by: str, reason: str, name: str = "") -> tuple[bytes]:
    if not by.strip() or not reason.strip():
        raise BadValue("A hold has somebody who decides and a reason.", next="Pass --by NAME and --reason TEXT.")
    said = {"by": by, "name": name, "reason": reason}
    return (msgspec.json.encode({key: value for key, value in said.items() if value}),)


def held_by(log: Log, seq: int) -> dict[str, Any]:
    """A hold as it is told: record, target (header id or `*`), name, by, reason, at."""
    record = log.record(seq)
    return {
        "record": seq,
        "target": record.entry.target or EVERYTHING,
        "name": text(record, "name") or None,
        "by": text(record, "by") or "somebody",
        "reason": text(record, "reason") or "no reason can be read",
        "at": _when(record.entry.at),
    }


def text(record: Record, field: str) -> str:
    """A text of a record's openings; empty where it is not there, or sealed."""
    for line in (record.blob or b"").splitlines(True):
        found = read_opening(line).get(field)
        if isinstance(found, str):
            return found
    return ""


def _when(at: int) -> str:
    return datetime.fromtimestamp(at / 1e6, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
