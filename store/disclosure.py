"""One saga is handed out in one file, with proof that it stands in the signed log and that no record of it is withheld.

    {"format":"amends/disclosure/1","checkpoint":"<signed note>","saga":"<header id>",
     "genesis":{"line":"…","proof":[…]},"entries":[{"line":"…","proof":["<base64>",…],"open":["…"]},…],
     "beside":[…],"consistency":{"note":"<an older signed note>","proof":[…]}}

Each record comes verbatim with its inclusion proof. A saga's records are numbered from 1 in the signed lines and the
last one is `saga.ended`, so a record that is left out leaves a number out: that is what an inclusion proof alone cannot
show. The genesis names the log's key, whose hash is the log's name. Which openings are shown is the holder's choice;
one that was destroyed comes with the record that says so. An older note ties the file to what somebody else remembers.

`check` trusts nothing but the hashes, the signature, and what is given to it from outside; it needs no home. Whatever
is in the file is either under the signed root or refused: there is no room for a remark.

Why not a bundle: that shows everybody's sagas. Why not a zip of proofs: nobody would see what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from . import note, seal
from .chain import ENDED, OPENED, Parted, after_part, misplaced
from .entry import VERSION, Entry, leaf, parse, parse_opening, read_opening, unfinished
from .errors import BadValue, Malformed, NotFound, Refused
from .examiner import EXITS, INTACT, Finding, worst
from .facts import FORGOTTEN, GENESIS, REDACTED
from .keys import origin_of
from .log import Log, Record
from .merkle import HashReader, check_consistency, check_inclusion, consistency_proof, inclusion_proof
from .note import BadSignature, Checkpoint, Key
from .tlog_proof import base64_of, hash_of, tlog_proof
from .trust import Brought, Policy, cosigned

FORMAT = "amends/disclosure/1"
VOTE = "vote.cast"
FILE_MAX = 256 << 20
RECORDS_MAX = 100_000
FINDINGS_MAX = 1000
SIGNED, QUORUM, OUTSIDE = "signed", "own quorum", "outside anchor"


class Item(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """A record as disclosed: its line, the hashes that lead from it to the root, the openings that are shown."""

    line: str
    proof: tuple[str, ...]
    open: tuple[str, ...] = ()


class Older(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An older signed note of the same log, and the proof that its tree is the beginning of the newer one."""

    note: str
    proof: tuple[str, ...]


class Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """A disclosure as it is written. entries: of the saga and of others that belong to it, in order of place; beside:
    votes on it, redactions of it, and the first record of each that belongs to it and is not disclosed."""

    format: str
    checkpoint: str
    saga: str
    genesis: Item
    entries: tuple[Item, ...]
    beside: tuple[Item, ...] = ()
    consistency: Older | None = None


# ---- proving --------------------------------------------------------------------------------------------------------


class Disclosure(NamedTuple):
    """What is handed out. text: the file; head: the signed head it stands under; openings: how many are shown, not
    shown, and destroyed."""

    text: bytes
    document: Document
    head: Checkpoint
    shown: int
    hidden: int
    destroyed: int

    @property
    def id(self) -> str:
        """The SHA-256 that names this copy."""
        return sha256(self.text).hexdigest()


def prove(
    log: Log,
    reader: HashReader,
    checkpoint: bytes,
    sagas: Sequence[str],
    *,
    open: Collection[str] | None = None,
    left_out: Sequence[str] = (),
    votes: bool = False,
    since: bytes = b"",
) -> Disclosure:
    """Disclose ended sagas (header ids; the first is the one that is asked for, the others belong to it).

    `checkpoint` is a signed note over all of them that others may remember: an anchored one. `open` names the fields to
    show, None for all, empty for none. `left_out` are sagas that belong to it and are only named. `since` is an older
    note of this log. Raises NotFound, Refused (`saga_open`, `not_anchored`), BadValue, Malformed.
    """
    head = _claimed(checkpoint)
    records = [record for saga in sagas for record in _ended(log, saga, head)]
    records.sort(key=lambda record: record.entry.seq)
    beside = [log.record(_first(log, saga)) for saga in left_out]
    beside += _votes(log, records, set(sagas), head) if votes else []
    beside += _erasures(log, [*records, *beside], head)
    first, last = log.record(0), max(record.entry.seq for record in (*records, *beside))
    if last >= head.size:
        raise _not_anchored(last, head)
    chosen = _Chosen(open, records)
    make = _Prover(reader, head.size, chosen)
    document = Document(
        FORMAT,
        checkpoint.decode(),
        sagas[0],
        make.item(first, ()),
        tuple(make.item(record) for record in records),
        tuple(make.item(record) for record in sorted(beside, key=lambda record: record.entry.seq)),
        _older(reader, head, since) if since else None,
    )
    return Disclosure(msgspec.json.encode(document) + b"\n", document, head, make.shown, make.hidden, make.destroyed)


def tlog_proofs(document: Document) -> Iterator[tuple[int, bytes, bytes]]:
    """For each record of a disclosure that was made here: its place, its line, its proof for other people's tools."""
    checkpoint = document.checkpoint.encode()
    for item in (document.genesis, *document.entries, *document.beside):
        line = item.line.encode()
        seq = parse(line).seq
        yield seq, line, tlog_proof(seq, [hash_of(text) for text in item.proof], checkpoint)


def _ended(log: Log, saga: str, head: Checkpoint) -> list[Record]:
    """Every record of a saga that has ended under the head."""
    thread = log.thread(saga)
    if not thread:
        raise NotFound(f"There is no saga {saga} in this log.", next="`amends ps` lists them.")
    last = thread[-1].entry
    if last.kind != ENDED or unfinished(last):
        raise Refused(
            f"Saga {saga} is open: what is still to come would be missing, and nothing would show that.",
            next="Prove it when it has ended; `amends show` tells how it stands.",
            code="saga_open",
        )
    if last.seq >= head.size:
        raise _not_anchored(last.seq, head)
    if [record.entry.n for record in thread] != list(range(1, len(thread) + 1)):
        raise Refused(
            f"Records of saga {saga} are not in this log any more.", next="Run `amends verify`.", code="incomplete"
        )
    return thread


def _not_anchored(seq: int, head: Checkpoint) -> Refused:
    return Refused(
        f"Record {seq} is younger than the newest head that is remembered outside the log, of {head.size} records.",
        next="Run it again as the user who owns the home, so that the head can be signed and anchored.",
        code="not_anchored",
    )


def _first(log: Log, saga: str) -> int:
    thread = log.thread(saga)
    if not thread:
        raise NotFound(f"There is no saga {saga} in this log.", next="`amends ps` lists them.")
    return thread[0].entry.seq


def _votes(log: Log, records: list[Record], sagas: set[str], head: Checkpoint) -> list[Record]:
    """Decisions of people on steps of these sagas. They carry no saga, so the log is gone through."""
    after = log.records(records[0].entry.seq, head.size)
    return [record for record in after if record.entry.kind == VOTE and record.entry.of in sagas]


def _erasures(log: Log, records: list[Record], head: Checkpoint) -> list[Record]:
    """The records that say that openings of these were destroyed, or their saga's key."""
    lost = {record.entry.saga for record in records if record.withheld == seal.FORGOTTEN}
    gone = {
        (record.entry.seq, place)
        for record in records
        for place, line in (() if record.withheld else _openings(record))
        if line is None
    }
    if not gone and not lost:
        return []
    after = list(log.records(records[0].entry.seq, head.size))
    found = [record for record in after if record.entry.kind == REDACTED and gone & set(record.entry.places)]
    if unsaid := gone.difference(*(record.entry.places for record in found)):
        raise Refused(
            f"What record {min(unsaid)[0]} held was destroyed, and no record under the anchored head says so yet.",
            next="Run it again; if that says the same, run `amends verify`.",
            code="not_anchored",
        )
    return found + [record for record in after if record.entry.kind == FORGOTTEN and record.entry.target in lost]


def _openings(record: Record) -> list[tuple[int, bytes | None]]:
    """Each place among the commitments with its opening line; None for one that is not there, or cannot be read."""
    lines = {sha256(line).hexdigest(): line for line in (record.blob or b"").splitlines(True)}
    return [(place, lines.get(hash)) for place, hash in enumerate(record.entry.c)]


def _older(reader: HashReader, head: Checkpoint, since: bytes) -> Older:
    old = _claimed(since)
    if old.origin != head.origin:
        raise BadValue(f"The older note is of another log ({old.origin}).", next=f"Take one of {head.origin}.")
    if old.size > head.size:
        raise BadValue(f"The older note is over {old.size} records and the newest anchored head over {head.size}.")
    proof = consistency_proof(reader, old.size, head.size)
    return Older(since.decode(), tuple(map(base64_of, proof)))


class _Chosen:
    """Which opening lines are shown. Fields of one opening are shown together, and the chunks of a large value with the
    opening that names it."""

    def __init__(self, fields: Collection[str] | None, records: Iterable[Record]) -> None:
        self._fields = fields
        self.any = fields is None or bool(fields)
        self._manifests: set[str] = set()
        if not fields:
            return
        known: set[str] = set()
        for record in records:
            for line in (record.blob or b"").splitlines(True):
                opened = read_opening(line)
                known |= opened.keys()
                if not opened.keys().isdisjoint(fields):
                    self._manifests |= {v["sha256"] for v in opened.values() if _is_manifest(v)}
        if missing := sorted(set(fields) - known):
            raise BadValue(
                f"No record of this saga has a field {', '.join(missing)}.",
                next=f"Fields it has: {', '.join(sorted(known - {'at', 'chunk'})) or 'none'}.",
            )

    def shows(self, line: bytes) -> bool:
        if not self._fields:
            return self._fields is None
        opened = read_opening(line)
        return not opened.keys().isdisjoint(self._fields) or ("chunk" in opened and opened.get("of") in self._manifests)


def _is_manifest(value: Any) -> bool:
    return type(value) is dict and value.get("$") == "manifest" and type(value.get("sha256")) is str


class _Prover:
    """Makes items under one head and counts what they show."""

    def __init__(self, reader: HashReader, size: int, chosen: _Chosen) -> None:
        self._reader, self._size, self._chosen = reader, size, chosen
        self.shown = self.hidden = self.destroyed = 0

    def item(self, record: Record, openings: Sequence[bytes] | None = None) -> Item:
        proof = inclusion_proof(self._reader, record.entry.seq, self._size)
        lines = self._shown(record) if openings is None else openings
        return Item(record.line.decode(), tuple(map(base64_of, proof)), tuple(line.decode() for line in lines))

    def _shown(self, record: Record) -> list[bytes]:
        self._readable(record)
        there = [line for _, line in _openings(record)]
        lines = [line for line in there if line is not None and self._chosen.shows(line)]
        gone = there.count(None) if record.withheld in ("", seal.FORGOTTEN) else 0
        self.shown += len(lines)
        self.destroyed += gone
        self.hidden += len(there) - gone - len(lines)
        return lines

    def _readable(self, record: Record) -> None:
        """Nothing that was asked for is passed over in silence."""
        if record.withheld and record.withheld != seal.FORGOTTEN and self._chosen.any:
            raise Refused(
                f"Record {record.entry.seq} cannot be opened: {seal.WITHHELD.get(record.withheld, record.withheld)}.",
                next="Give the key, or prove it with --closed.",
                code=record.withheld,
            )


# ---- checking -------------------------------------------------------------------------------------------------------


class Checked(msgspec.Struct):
    """What a check says: the keys of `verify` (root is hex), and which log, saga and records it is about. openings:
    how many are shown, not shown, and destroyed by a record that came along. since: the size of the older note.
    witnessed: whether a policy's quorum signed a head that it stands under."""

    verdict: str
    level: str
    size: int
    root: str
    findings: list[Finding]
    not_proved: list[str]
    origin: str = ""
    saga: str = ""
    records: list[Entry] = []
    openings: tuple[int, int, int] = (0, 0, 0)
    since: int = 0
    witnessed: bool = False

    @property
    def exit(self) -> int:
        return EXITS[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """The stable keys of `check-proof --json`."""
        shown, hidden, destroyed = self.openings
        return {
            "verdict": self.verdict,
            "level": self.level,
            "size": self.size,
            "root": self.root,
            "findings": [finding._asdict() for finding in self.findings],
            "not_proved": self.not_proved,
            "origin": self.origin,
            "saga": self.saga,
            "records": len(self.records),
            "openings": {"shown": shown, "hidden": hidden, "destroyed": destroyed},
            "since": self.since,
        }


def check(
    text: bytes, *, anchors: Sequence[Brought] = (), key: Key | None = None, policy: Policy | None = None
) -> Checked:
    """Check a disclosure. `anchors` are signed notes of the same log that came another way, `key` is the one that the
    log must have, `policy` says whose cosignatures count. Raises nothing for whatever the text is."""
    checker = _Checker()
    try:
        checker.document = document_of(text)
        checker.run()
    except (Malformed, BadSignature) as error:
        checker.find(str(error.facts["finding"]), -1, error.message)
    else:
        checker.from_outside(key, anchors, policy)
    return checker.checked(key is not None or bool(policy and policy.logs))


def document_of(text: bytes) -> Document:
    """The document in a text from anywhere. Raises Malformed (E_DISCLOSURE)."""
    if len(text) > FILE_MAX:
        raise _bad(f"it has more than {FILE_MAX >> 20} MiB")
    try:
        msgspec.json.decode(text, type=Document)  # first by its shape: what has another is never built
        raw = json.loads(text.decode(), object_pairs_hook=_names_once, parse_constant=_none, parse_float=_none)
        document = msgspec.convert(raw, Document)
    except (ValueError, RecursionError) as error:  # msgspec's and Unicode's errors are ValueErrors
        raise _bad(str(error)) from None
    if document.format != FORMAT:
        raise _bad(f"its format is not {FORMAT}")
    if len(document.entries) + len(document.beside) > RECORDS_MAX or not document.entries:
        raise _bad(f"it has no record, or more than {RECORDS_MAX}")
    return document


def _names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _none(digits: str) -> None:
    raise ValueError(f"{digits} stands where none can")


def _bad(why: str) -> Malformed:
    return Malformed(f"This is not a disclosure: {why}.", finding="E_DISCLOSURE")


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _bad("it holds half a character") from None


class _Checker:
    """One check of one document."""

    document: Document

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.head = Checkpoint("", 0, b"")
        self.key: Key | None = None
        self.level, self.since, self.witnessed = "none", 0, False
        self.told: list[str] = []
        self.records: list[Entry] = []
        self.beside: list[Entry] = []
        self.shown: set[tuple[int, int]] = set()

    def find(self, code: str, seq: int, reason: str) -> None:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(code, seq, reason))

    # -- the file by itself -------------------------------------------------------------------------------------------

    def run(self) -> None:
        document = self.document
        genesis = self._genesis(document.genesis)
        self._head(genesis, _bytes(document.checkpoint))
        self._included(genesis, document.genesis)
        self.records = self._items(document.entries, {GENESIS})
        self.beside = self._items(document.beside, {ENDED, GENESIS})
        self._chained()
        self._complete()
        self._belongs()
        self._older()

    def _genesis(self, item: Item) -> Entry:
        genesis = parse(_bytes(item.line))
        if genesis.kind != GENESIS or genesis.seq or item.open:
            raise Malformed("The first record of the log is not its genesis.", finding="E_GENESIS")
        if genesis.v > VERSION:
            raise Malformed(f"It was written by a newer version (format {genesis.v}).", finding="E_VERSION")
        return genesis

    def _head(self, genesis: Entry, text: bytes) -> None:
        """The key that the genesis names has this name, and signed this head."""
        try:
            public = bytes.fromhex(genesis.log)
        except ValueError:
            public = b""
        if not note.is_sound(public):
            raise Malformed("The genesis names no key.", finding="E_GENESIS")
        self.key = Key(origin_of(public), note.ED25519, public)
        head = _claimed(text)
        if head.origin != self.key.name:
            raise BadSignature(f"The signed head is of another log ({head.origin}).", finding="E_IDENTITY")
        note.open_note(text, [self.key])
        self.head = head
        self.level = SIGNED

    def _included(self, entry: Entry, item: Item) -> None:
        try:
            proof = [hash_of(text) for text in item.proof]
            if not check_inclusion(leaf(_bytes(item.line)), entry.seq, self.head.size, proof, self.head.root):
                self.find("E_PROOF", entry.seq, "its proof does not lead to the signed root")
        except Malformed as error:
            self.find("E_PROOF", entry.seq, error.message)

    def _items(self, items: Sequence[Item], never: Collection[str]) -> list[Entry]:
        entries: list[Entry] = []
        before = 0
        for item in items:
            entry = parse(_bytes(item.line))
            if entry.seq <= before:
                self.find("E_ORDER", entry.seq, "records are not in order, or one is there twice")
            if entry.kind in never:
                self.find("E_ENDED" if entry.kind == ENDED else "E_GENESIS", entry.seq, f"{entry.kind} cannot be here")
            before = entry.seq
            self._included(entry, item)
            self._openings(entry, [_bytes(line) for line in item.open])
            entries.append(entry)
        return entries

    def _openings(self, entry: Entry, lines: Sequence[bytes]) -> None:
        place = -1
        for line in lines:
            hash = sha256(line).hexdigest()
            if hash not in entry.c:
                self.find("E_OPENING", entry.seq, "an opening is not one that the record commits to")
                continue
            try:
                parse_opening(line)
            except Malformed as error:
                self.find("E_OPENING", entry.seq, error.message)
            if (here := entry.c.index(hash)) <= place:
                self.find("E_OPENING_EXTRA", entry.seq, "openings are not in order, or one is there twice")
            place = max(place, here)
            self.shown.add((entry.seq, here))

    def _chained(self) -> None:
        """Where two records of the log stand next to each other, one names the other; and time goes on."""
        items = sorted(
            zip((*self.records, *self.beside), (*self.document.entries, *self.document.beside), strict=True),
            key=lambda pair: pair[0].seq,
        )
        for (one, item), (two, _) in zip(items, items[1:], strict=False):
            if two.seq == one.seq + 1 and two.prev != leaf(_bytes(item.line)).hex():
                self.find("E_CHAIN", two.seq, "it does not follow the record before it")
            if two.at <= one.at and two.seq > one.seq:
                self.find("E_TIME", two.seq, "time stands still or goes back")

    # -- nothing is withheld ------------------------------------------------------------------------------------------

    def _threads(self) -> dict[str, list[Entry]]:
        threads: dict[str, list[Entry]] = {}
        for entry in self.records:
            threads.setdefault(entry.saga, []).append(entry)
        return threads

    def _complete(self) -> None:
        """Each saga's records are numbered from 1 without a gap, the first opens it and the last ends it."""
        for saga, entries in self._threads().items():
            if not saga:
                self.find("E_ORDINAL", entries[0].seq, "a record that belongs to no saga")
                continue
            for n, entry in enumerate(entries, 1):
                if entry.n != n:
                    self.find("E_ORDINAL", entry.seq, f"record {n} of saga {saga} is withheld, or there twice")
                    break
            if entries[0].kind != OPENED:
                self.find("E_ENDED", entries[0].seq, f"the beginning of saga {saga} is withheld")
            last = entries[-1]
            if last.kind != ENDED or unfinished(last):
                self.find("E_ENDED", last.seq, f"the end of saga {saga} is withheld, or it was open")
            if any(entry.kind == ENDED and not unfinished(entry) for entry in entries[:-1]):
                self.find("E_ENDED", last.seq, f"saga {saga} goes on after its end")
            self._parts(entries)

    def _parts(self, entries: list[Entry]) -> None:
        due: Parted | None = None
        for entry in entries:
            if wrong := misplaced(due, entry):
                self.find("E_PART", entry.seq, wrong)
            due = after_part(entry)

    def _belongs(self) -> None:
        """Every saga but the one that was asked for hangs on another that is disclosed; and so does what is beside."""
        sagas = self._threads()
        if self.document.saga not in sagas:
            self.find("E_ENDED", -1, f"no record of saga {self.document.saga} is here")
        for saga, entries in sagas.items():
            if saga != self.document.saga and not _hangs_on(entries[0], sagas):
                self.find("E_REF", entries[0].seq, f"saga {saga} does not belong to {self.document.saga}")
        places = self._every()
        for entry in self.beside:
            opens = entry.kind == OPENED and entry.saga not in sagas and _hangs_on(entry, sagas)
            votes = entry.kind == VOTE and entry.of in sagas
            redacts = entry.kind == REDACTED and not places.isdisjoint(entry.places)
            forgets = entry.kind == FORGOTTEN and entry.target in sagas
            if not (opens or votes or redacts or forgets):
                self.find("E_REF", entry.seq, f"{entry.kind} is about nothing that is disclosed")
        for seq, place in sorted(self._destroyed() & self.shown):
            self.find("E_REDACT_INCOMPLETE", seq, f"opening {place} is here, and a record says that it was destroyed")

    def _older(self) -> None:
        if (older := self.document.consistency) is not None and self.key is not None:
            old = note.parse_checkpoint(note.open_note(_bytes(older.note), [self.key]).body)
            self.since = old.size
            self._grown(old, [hash_of(text) for text in older.proof])

    def _grown(self, old: Checkpoint, proof: Sequence[bytes]) -> None:
        head = self.head
        if old.origin != head.origin:
            self.find("E_IDENTITY", -1, f"the older head is of another log ({old.origin})")
        elif old.size == head.size and old.root != head.root:
            self.find("E_FORKED", -1, f"two signed heads of {old.size} records have different roots")
        elif not check_consistency(old.size, head.size, old.root, head.root, proof):
            self.find("E_PROOF", -1, f"the older head, of {old.size} records, is not the beginning of this one")

    # -- what came another way ----------------------------------------------------------------------------------------

    def from_outside(self, key: Key | None, anchors: Sequence[Brought], policy: Policy | None) -> None:
        assert self.key is not None
        if key is not None and (key.name, key.public) != (self.key.name, self.key.public):
            self.find("E_IDENTITY", -1, f"it is the log {self.key.name}, not that of the key {key.name}")
        tied = [_bytes(self.document.checkpoint)]
        tied += [anchor.text for anchor in anchors if self._anchored(self.key, anchor)]
        if policy is not None:
            self._trusted(self.key, tied, policy)

    def _anchored(self, key: Key, anchor: Brought) -> bool:
        """Whether what somebody kept is this log's, and the head here has grown from it."""
        head, older = anchor.head, self.document.consistency
        if head.origin != key.name:
            self.find("E_IDENTITY", -1, f"{anchor.name} is of another log ({head.origin})")
            return False
        try:
            anchor.anchor(key)
        except (BadSignature, Malformed) as error:
            self.find("E_ANCHOR", -1, f"{anchor.name}: {error.message}")
            return False
        if head.size == self.head.size:
            root = self.head.root
        elif older is not None and head.size == self.since:
            root = _head_of(older).root
        else:
            self.find("E_ANCHOR", -1, f"{anchor.name} {_not_tied(head.size, self.head.size)}")
            return False
        if head.root != root:
            self.find("E_FORKED", -1, f"{anchor.name} has another root at {head.size} records")
            return False
        self.level = OUTSIDE
        return True

    def _trusted(self, key: Key, notes: Sequence[bytes], policy: Policy) -> None:
        if policy.logs and key not in policy.logs:
            self.find("E_STRANGE", -1, f"the policy does not name the log {key.name}")
        signers: set[Key] = set()
        for text in notes:
            signed = cosigned(text, key, policy)
            signers |= signed.witnesses
            if signed.trouble:
                self.find("E_SIGNATURE", -1, signed.trouble)
        if not policy.met(signers):
            self.find("E_QUORUM", -1, f"{len(signers)} of the policy's witnesses signed, which is not enough")
        elif policy.quorum:
            self.witnessed = True
            self.level = QUORUM if self.level == SIGNED else self.level

    # -- the answer ---------------------------------------------------------------------------------------------------

    def checked(self, key_given: bool) -> Checked:
        verdict = worst(self.findings)
        counts = self._counted()
        level = self.level if verdict == INTACT or self.level == "none" else SIGNED
        saga = self.document.saga if hasattr(self, "document") else ""
        origin, size, root = self.head
        told = [*self.told, *self._not_proved(key_given, counts)] if verdict == INTACT else []
        return Checked(
            verdict, level, size, root.hex(), self.findings, told, origin, saga, self.records, counts, self.since,
            self.witnessed and verdict == INTACT,
        )  # fmt: skip

    def _every(self) -> set[tuple[int, int]]:
        """The places of all openings of the records that are here."""
        return {(entry.seq, place) for entry in (*self.records, *self.beside) for place in range(len(entry.c))}

    def _destroyed(self) -> set[tuple[int, int]]:
        """Those that records here say were destroyed. A key that is forgotten opens what its holder had opened before,
        so what it hid counts only as far as it is not shown."""
        named = {place for entry in self.beside if entry.kind == REDACTED for place in entry.places}
        return named & self._every()

    def _forgotten(self) -> set[tuple[int, int]]:
        lost = {entry.target for entry in self.beside if entry.kind == FORGOTTEN}
        return {(entry.seq, place) for entry in self.records if entry.saga in lost for place in range(len(entry.c))}

    def _counted(self) -> tuple[int, int, int]:
        every, destroyed = self._every(), self._destroyed() | self._forgotten() - self.shown
        return len(self.shown), len(every - self.shown - destroyed), len(destroyed)

    def _not_proved(self, key_given: bool, counts: tuple[int, int, int]) -> Iterator[str]:
        _, hidden, destroyed = counts
        if not key_given and self.level == SIGNED:
            yield f"Whose log it is: compare {self.head.origin} with what you know, or give --key or --anchor."
        if hidden:
            yield f"What {hidden} openings hold that are not shown: who handed this out has chosen."
        if destroyed:
            by = ", ".join(str(entry.seq) for entry in self.beside if entry.kind in (REDACTED, FORGOTTEN))
            yield f"What {destroyed} openings held: they were destroyed, as record {by} says."
        for entry in self.beside:
            if entry.kind == OPENED:
                yield f"What saga {entry.saga} did, which belongs to it: it is not disclosed."
        if any(entry.kind == VOTE for entry in self.beside):
            yield "That all votes are here: they have no number in the saga."
        elif any(entry.kind == "step.asked" for entry in self.records):
            yield "Who decided on what was asked: votes are not in it."
        yield "That no other saga belongs to it: one that took it up later, or ran inside it, could have been left out."
        if self.level == SIGNED:
            yield "That this log has no second history: its head was compared with nobody else's."
        yield "That what was written is true, and that everything was written."


def _hangs_on(opened: Entry, sagas: Collection[str]) -> bool:
    """Whether a saga ran inside one of these, or took one of them up."""
    return opened.parent in sagas or opened.of in sagas


def _not_tied(kept: int, size: int) -> str:
    if kept > size:
        return f"is over {kept} records, and the file over {size}: ask for a newer one"
    return f"is over {kept} records, and nothing leads from there to the {size} here: ask for one made with --since"


def _claimed(text: bytes) -> Checkpoint:
    """The head that a note claims, whoever signed it. Raises Malformed."""
    return note.parse_checkpoint(text[: text.rfind(b"\n\n") + 1])


def _head_of(older: Older) -> Checkpoint:
    return _claimed(_bytes(older.note))
