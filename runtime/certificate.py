"""The verdict of certify.py as a statement that others can check without us: whose log, which root, by which rules.

The subject is the root of the log at a head that is signed and anchored, so that a certificate says the same of the
same records for ever. It is made only over a log that verifies, and whoever holds the log, or a bundle of it, can work
it out again (`check`): the signature by the key that the log's genesis names, the root, and each count and finding.

What a compaction removed is not there to be judged: it counts by the certificate that covered it, whose SHA-256 the
compaction names. Such certificates are kept in `certificates/` of the home, or given.

Why the export key and not the log key: whoever may hand out a statement need not be able to sign heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from ..store import dsse, note
from ..store.audit import verify
from ..store.bundle import cut
from ..store.chain import Draft
from ..store.entry import Entry, read
from ..store.errors import Damaged, Malformed, Refused, YouErred
from ..store.evidence import Source, Stored
from ..store.facts import COPIED
from ..store.home import Home, replace_file
from ..store.keys import origin_of
from ..store.sqlite import Head, SqliteLog
from .certify import EXITS, RULES, Finding, Judged, Prior, judge
from .state import State

PREDICATE = "https://amends.dev/rollback-safety/v1"
TIMELESS = ("time", "tool")
"""What may differ between two certificates about the same records."""

NOT_CLAIMED = (
    "That what was written is true, and that everything was written.",
    "That an inverse restored what its author said it restores.",
    "Effects that landed after everybody stopped waiting, at tools without a probe, and that nobody has looked for.",
    "Reversible effects that only their own process could undo, if it died before they were written.",
    "Who the named people are: their names lie in openings, which are not read.",
    "Other logs: those of other devices, and one that this log follows.",
)


class NotVerified(Refused):
    """Nothing is certified about a log that does not verify. `facts['findings']` are (code, seq, reason)."""

    code = "not_verified"


class Certificate(NamedTuple):
    """A certificate: the envelope (a file), its SHA-256 in hex, what it states, and what that was judged from."""

    envelope: bytes
    id: str
    statement: dict[str, Any]
    judged: Judged

    @property
    def exit(self) -> int:
        return EXITS[self.judged.verdict]


# ---- making one -----------------------------------------------------------------------------------------------------


def certify(log: SqliteLog, tool: str, *, priors: Iterable[bytes] = (), since: int = 0) -> Certificate:
    """A certificate over the newest anchored head of a device's log. priors: envelopes; those in the home's
    `certificates/` are found. Raises NotVerified, YouErred (`since`), Malformed, BadSignature (priors), LogHeld."""
    identity: Any = log.identity
    with cut(log) as (evidence, head):
        refuse_unverified(identity.home)
        now = datetime.fromtimestamp(log.clock.wall_us() / 1_000_000, UTC)
        return draw(evidence, head, identity, tool, now, Given(evidence, priors, identity.home), since)


def draw(
    source: Source, head: Head, identity: Any, tool: str, now: datetime, priors: Given, since: int = 0
) -> Certificate:
    """A certificate over a head of records that were verified. identity: whose export and log key sign."""
    if not 0 <= since <= head.size:
        raise YouErred(f"The log has {head.size} records that are signed and anchored.", next="Say a smaller --since.")
    judged = judge(entries_of(source), head.size, since=since, priors=priors)
    text = identity.note(head.size, head.root, head.signature).decode()
    told = predicate(source, judged, head.size, head.root, text, since, priors.used)
    told |= {"time": now.strftime("%Y-%m-%dT%H:%M:%SZ"), "tool": tool}
    payload = dsse.statement(identity.origin, head.root.hex(), PREDICATE, told)
    envelope = dsse.seal(payload, identity.export_seed)
    return Certificate(envelope, sha256(envelope).hexdigest(), dsse.read_statement(payload), judged)


def predicate(
    source: Source, judged: Judged, size: int, root: bytes, text: str, since: int, prior: list[str]
) -> dict[str, Any]:
    """What is stated, but for when and by which program."""
    genesis = _genesis(source)
    follows = {"origin": genesis.follows, "size": genesis.follows_size, "root": genesis.follows_root}
    return {
        "log": {"origin": origin_of(bytes.fromhex(genesis.log)), "size": size, "root": root.hex(), "note": text},
        "window": [since, size],
        "rules": RULES,
        "verdict": judged.verdict,
        "counts": judged.counts._asdict(),
        "findings": [finding._asdict() for finding in judged.findings],
        "more": judged.more,
        "prior": prior,
        "not_claimed": list(NOT_CLAIMED),
    } | ({"follows": follows} if genesis.follows else {})


def copied(made: Certificate, opening: bytes = b"") -> Draft:
    """The fact that a certificate was handed out."""
    fields = {"out": "certificate", "event": made.id, "upto": made.statement["predicate"]["log"]["size"]}
    return Draft(COPIED, fields | {"payload": "none"}, (opening,) if len(opening) > 2 else (), True)


def refuse_unverified(where: Home | Path) -> None:
    """Raises NotVerified."""
    verdict = verify(where, view_factory=State)
    if verdict.exit:
        codes = ", ".join(dict.fromkeys(f"{found.code} at record {found.seq}" for found in verdict.findings[:3]))
        raise NotVerified(
            f"This log does not verify ({verdict.verdict}: {codes}), and nothing is certified about it.",
            next="Run `amends verify`.",
            findings=[(found.code, found.seq, found.reason) for found in verdict.findings],
        )


def entries_of(source: Source) -> Iterator[Entry]:
    """The headers of every record that is there."""
    return (read(row.line) for row in source.stored() if isinstance(row, Stored))


# ---- certificates from before ---------------------------------------------------------------------------------------


def folder(home: Home) -> Path:
    """Where certificates that compactions name are kept."""
    return home.path / "certificates"


def keep(home: Home, made: Certificate) -> Path:
    """Keep a certificate in the home, on the disk, by its SHA-256."""
    folder(home).mkdir(mode=0o700, exist_ok=True)
    path = folder(home) / f"{made.id}.json"
    replace_file(path, made.envelope)
    return path


class Given:
    """Certificates about the log of a source, by their SHA-256: those that were given, each checked at once (signature,
    and the root at its size), and those in a home's folder, looked at when they are asked for. used: which were."""

    def __init__(self, source: Source, envelopes: Iterable[bytes] = (), home: Home | None = None) -> None:
        self._source, self._home = source, home
        self._known = {sha256(envelope).hexdigest(): _prior(envelope, source) for envelope in envelopes}
        self._used: set[str] = set()

    def __call__(self, cert: str) -> Prior | None:
        found = self._known.get(cert) or self._kept(cert)
        if found is not None:
            self._used.add(cert)
        return found

    @property
    def used(self) -> list[str]:
        return sorted(self._used)

    def _kept(self, cert: str) -> Prior | None:
        path = folder(self._home) / f"{cert}.json" if self._home is not None else None
        if path is None or not path.is_file() or path.stat().st_size > dsse.ENVELOPE_MAX:
            return None
        envelope = path.read_bytes()
        return _prior(envelope, self._source) if sha256(envelope).hexdigest() == cert else None


def _prior(envelope: bytes, source: Source) -> Prior:
    told = read_certificate(envelope, _genesis(source))["predicate"]
    size, verdict = told["log"]["size"], told["verdict"]
    if size > source.size or source.peaks(size).root().hex() != told["log"]["root"]:
        raise Malformed("A certificate that was given is about other records than this log has.", finding="E_ROOT")
    return Prior(size, verdict, tuple(Finding(**finding) for finding in told["findings"]), told["more"])


# ---- reading one ----------------------------------------------------------------------------------------------------


def read_certificate(envelope: bytes, genesis: Entry) -> dict[str, Any]:
    """The statement in an envelope, if it is a certificate about the log of this genesis, signed by the export key that
    it names. Raises Malformed (E_DSSE, E_IDENTITY, E_CERTIFICATE), BadSignature."""
    if not genesis.export:
        raise Malformed("The log names no key that could have signed a certificate.", finding="E_IDENTITY")
    stated = dsse.read_statement(dsse.unseal(envelope, bytes.fromhex(genesis.export)))
    told, subject = stated["predicate"], stated["subject"][0]
    if stated["predicateType"] != PREDICATE or not _shaped(told):
        raise Malformed("This is a signed statement, and no certificate.", finding="E_CERTIFICATE")
    origin, head = origin_of(bytes.fromhex(genesis.log)), told["log"]
    if (origin, origin, head["root"]) != (head["origin"], subject["name"], subject["digest"]["sha256"]):
        raise Malformed("This certificate is about another log.", finding="E_IDENTITY")
    signed = note.open_note(head["note"].encode(), [note.Key(origin, note.ED25519, bytes.fromhex(genesis.log))])
    if signed.body != note.checkpoint_body(origin, head["size"], bytes.fromhex(head["root"])):
        raise Malformed("The head in this certificate is not the one that its note signs.", finding="E_CERTIFICATE")
    return stated


_SHAPE = {
    "log": dict, "window": list, "rules": str, "verdict": str, "counts": dict, "findings": list, "more": int,
    "prior": list, "not_claimed": list, "time": str, "tool": str,
}  # fmt: skip
_HEAD = {"origin": str, "size": int, "root": str, "note": str}
_FOUND = {"seq": int, "saga": str, "step": int, "code": str, "text": str}


def _shaped(told: Mapping[str, Any]) -> bool:
    if not _has(told, _SHAPE) or not _has(told["log"], _HEAD) or set(told) - set(_SHAPE) - {"follows"}:
        return False
    try:
        root = bytes.fromhex(told["log"]["root"])
    except ValueError:
        return False
    return (
        told["verdict"] in EXITS
        and len(root) == 32
        and len(told["window"]) == 2
        and all(isinstance(name, str) for name in told["prior"])
        and all(_number(place) for place in told["window"])
        and all(isinstance(found, dict) and _has(found, _FOUND) and len(found) == 5 for found in told["findings"])
    )


def _has(value: Mapping[str, Any], shape: Mapping[str, type]) -> bool:
    return all(
        _number(value.get(name)) if kind is int else isinstance(value.get(name), kind) for name, kind in shape.items()
    )


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= note.SIZE_MAX


def _genesis(source: Source) -> Entry:
    genesis = source.genesis()
    if genesis is None:
        raise Damaged("The first record of the log cannot be read.", next="Run `amends verify`.", seq=0)
    return genesis


# ---- checking one ---------------------------------------------------------------------------------------------------


class Checked(NamedTuple):
    """A certificate held against the records. troubles: why it does not hold; unknown: why it could not be worked out
    again, empty where it was."""

    id: str
    statement: dict[str, Any]
    troubles: tuple[str, ...]
    unknown: str

    @property
    def exit(self) -> int:
        if self.troubles:
            return 1
        return EXITS["INDETERMINATE"] if self.unknown else EXITS[self.statement["predicate"]["verdict"]]


def check(envelope: bytes, source: Source, priors: Given) -> Checked:
    """Hold a certificate against records that were verified: signature, root, and everything worked out again.

    Raises Malformed, BadSignature for what is no certificate of this log."""
    stated = read_certificate(envelope, _genesis(source))
    told, made = stated["predicate"], sha256(envelope).hexdigest()
    head = told["log"]
    size, since = head["size"], told["window"][0]
    if told["rules"] != RULES:
        return Checked(made, stated, (), f"it goes by rules {told['rules']}, and this version knows {RULES}")
    if size > source.size:
        return Checked(made, stated, (), f"it is about {size} records, and {source.size} are here")
    if source.peaks(size).root().hex() != head["root"]:
        return Checked(made, stated, ("the records here are not those that it is about",), "")
    if removed := _removed_since(source, size):
        return Checked(made, stated, (), f"{removed} of its records were removed since")
    if lacking := [name for name in told["prior"] if priors(name) is None]:
        return Checked(made, stated, (), f"it rests on certificate {lacking[0][:16]}…, which was not given")
    judged = judge(entries_of(source), size, since=since, priors=lambda c: priors(c) if c in told["prior"] else None)
    again = predicate(source, judged, size, bytes.fromhex(head["root"]), head["note"], since, told["prior"])
    said = {name: value for name, value in told.items() if name not in TIMELESS}
    wrong = sorted(name for name in said.keys() | again.keys() if said.get(name) != again.get(name))
    return Checked(made, stated, tuple(f"its {name} is not what the records say" for name in wrong), "")


def _removed_since(source: Source, size: int) -> int:
    """Records below a size that a compaction behind it has removed."""
    return sum(
        min(last, size - 1) - first + 1
        for entry in entries_of(source)
        if entry.seq >= size
        for first, last in entry.runs
        if first < size
    )
