"""Whose keys count is a history that anyone can check: every event names those it follows and is signed by those who
may bring it about.

The ring is computed from the statements and signatures in the openings of the `key.*` facts, and kept while nothing of
that changes; the fold knows only where those facts are. It is a function of the *set* of facts:

- An event counts if those who signed it might, by the keys that stood where it says it stands (`prior`). That is asked
  first: what nobody signed who may is passed over, and can neither change nor freeze anything.
- Revocations made side by side all hold. Any other two events side by side exclude each other, and the ring is frozen:
  keys that either of them took away are gone, keys that only one of them brought are not there, and no signature
  counts until the recovery key settles it.
- A recovery is announced by the recovery key and waits. Whatever a live key signs meanwhile ends it. After the wait it
  may be put in force; then all older keys are dead, and what they say of the time before is not heard any more.
- A key in quarantine is not asked about what comes later in this log, until an admin lets it out.
- An event of a newer version that an admin had signed when it was written freezes the ring, until the recovery key
  begins anew: it may have ended a key. One that no admin signed is passed over.

The order of the log matters for the last three and for nothing else. Why not keep the ring in the fold: what decides
would then be headers, and no signature is in a header.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import msgspec

from ...store.entry import Entry
from ...store.errors import Illegal, Malformed, Refused
from ...store.log import Log
from ..openings import blob_at, raw_fields
from .cast import Cast, casts, counts, header_id, shown
from .keyevent import (
    ADMIN,
    NOTHING,
    REFUSALS,
    ROLES,
    Event,
    Settings,
    Signed,
    Standing,
    apply,
    check_bytes,
    founded,
    judge,
    parse,
    position,
    refuse,
    signed_by,
)
from .proof import Credential, Unproven
from .question import Refusal
from .statement import KEYRING_TAG

if TYPE_CHECKING:
    from ..state import State

__all__ = [
    "ROLES", "Keys", "Read", "Recovery", "Ring", "Settings", "Told", "admit", "check_counter", "check_ring",
    "header_id", "read",
]  # fmt: skip

T = TypeVar("T")

KINDS = (
    "key.founded", "key.added", "key.revoked", "key.rotated", "key.released", "key.recovering", "key.vetoed",
    "key.recovered", "key.quarantined",
)  # fmt: skip
MOVES = frozenset(("added", "revoked", "rotated", "released"))
"""Events that others follow. The rest are remarks about a position and take none."""
HEX = frozenset("0123456789abcdef")
FAR = 1 << 53
"""A place that no log reaches."""


# ---- where the facts are --------------------------------------------------------------------------------------------


class Keys:
    """Where the facts about keys are, one name for all of them, and which keys have voted.

    places: seq and lived milliseconds of each. head: 64 hex digits, another one whenever there is another fact, in
    whatever order they came; empty for none. heard, counters: by `header_id`, seq of its last vote and highest counter,
    as headers claim them: nothing follows from these before the proofs were looked at (cast.py).
    """

    KINDS = (*KINDS, "vote.cast")

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self.events: list[str] = []
        self.head = ""
        self.heard: dict[str, int] = {}
        self.counters: dict[str, int] = {}

    @property
    def seqs(self) -> list[int]:
        return [seq for seq, _ in self.places]

    def check(self, entry: Entry, state: State) -> None:
        if entry.kind == "vote.cast":
            return
        if not _digest(entry.event) or (entry.kind == "key.founded") != (entry.prior == ""):
            raise Illegal(f"{entry.kind} without the event that it records, or the one that this follows.")
        if not (entry.prior == "" or _digest(entry.prior)) or not entry.c or len(entry.up) != 2:
            raise Illegal(f"{entry.kind} without a statement, a time, or a place in the history.")

    def fold(self, entry: Entry, lived: int, state: State) -> None:
        if entry.kind == "vote.cast":
            if entry.credential:
                self.heard[entry.credential] = entry.seq
                self.counters[entry.credential] = max(entry.counter, self.counters.get(entry.credential, 0))
            return
        self.places.append((entry.seq, lived))
        self.events.append(entry.event)
        self.head = sha256("\n".join(sorted(self.events)).encode()).hexdigest()

    def rests_on(self, vote: Entry) -> bool:
        """Whether what is known of a key rests on this vote: it is its newest, or the one where it had counted
        furthest."""
        newest = self.heard.get(vote.credential) == vote.seq
        return newest or bool(vote.counter and vote.counter == self.counters.get(vote.credential))

    def dump(self) -> Any:
        return [self.places, self.events, sorted(self.heard.items()), sorted(self.counters.items())]

    def load(self, raw: Any) -> None:
        places, self.events, heard, counters = raw
        self.places = [(seq, lived) for seq, lived in places]
        self.heard, self.counters = dict(heard), dict(counters)
        self.head = sha256("\n".join(sorted(self.events)).encode()).hexdigest() if self.events else ""


def _digest(text: str) -> bool:
    return len(text) == 64 and HEX.issuperset(text)


# ---- what they say --------------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """An event as one record tells it, with the proofs of that record. seq, lived: where and when (lived ms)."""

    seq: int
    lived: int
    event: Event
    proofs: tuple[Mapping[str, Any], ...]


class Newer(NamedTuple):
    """An event of a version that is not known here, with the proofs of its record. kind: as its header says."""

    seq: int
    kind: str
    text: bytes
    proofs: tuple[Mapping[str, Any], ...]


def _no_votes() -> tuple[Cast, ...]:
    return ()


class History(NamedTuple):
    """Every event that is told, in the order of the log. heard: claims of headers; votes: what those votes say
    themselves, read where it matters. lost: records whose openings are gone. junk: records that are no event."""

    told: tuple[Told, ...]
    heard: Mapping[str, int] = {}
    head: str = ""
    lost: tuple[int, ...] = ()
    junk: tuple[int, ...] = ()
    newer: tuple[Newer, ...] = ()
    votes: Callable[[], tuple[Cast, ...]] = _no_votes


def history(log: Log) -> History:
    """The events of a log's key facts, read and not yet judged."""
    places, heard, head = log.look(
        lambda state, now: (tuple(state.keys.places), dict(state.keys.heard), state.keys.head)
    )
    told: list[Told] = []
    lost: list[int] = []
    junk: list[int] = []
    newer: list[Newer] = []
    for seq, lived in places:
        entry, blob = log.record(seq).entry, blob_at(log, seq)
        gone = blob is None or blob.count(b"\n") < len(entry.c)
        found = None if gone else told_by(seq, lived, entry.kind, entry.event, entry.prior, blob or b"")
        if gone:
            lost.append(seq)
        elif isinstance(found, Told):
            told.append(found)
        elif isinstance(found, Newer):
            newer.append(found)
        else:
            junk.append(seq)
    return History(tuple(told), heard, head, tuple(lost), tuple(junk), tuple(newer), _votes_of(log))


def _votes_of(log: Log) -> Callable[[], tuple[Cast, ...]]:
    held = ref(log)  # what is kept of a log does not keep the log

    @cache
    def read() -> tuple[Cast, ...]:
        there = held()
        return tuple(casts(there)) if there is not None else ()

    return read


def told_by(seq: int, lived: int, kind: str, digest: str, prior: str, blob: bytes) -> Told | Newer | None:
    """The event in a record's openings, if it is the one that its header says."""
    try:
        fields = raw_fields(blob)
        text = msgspec.json.decode(fields["event"], type=str).encode()
        proofs = msgspec.json.decode(fields["proofs"], type=list[dict[str, Any]])
        event = parse(text)
    except (KeyError, msgspec.MsgspecError, UnicodeError, Malformed):
        return None
    except Refused as error:
        same = error.code == "newer_event" and sha256(text).hexdigest() == digest
        return Newer(seq, kind, text, tuple(proofs)) if same else None
    if (event.digest, event.kind, position(event.said.prior)) != (digest, kind, prior):
        return None
    return Told(seq, lived, event, tuple(proofs))


# ---- what follows from them -----------------------------------------------------------------------------------------


class Epoch:
    """What follows from a founding, or from a recovery that came into force.

    `past` has each event that counts, with all that it follows back to the root; nothing else can be followed.
    """

    def __init__(self, root: Told, standing: Standing, told: Sequence[Told], counters: Mapping[str, int]) -> None:
        self.root, self.standing, self.told = root, standing, told
        self.past: dict[str, frozenset[str]] = {root.event.digest: frozenset()}
        self.events: dict[str, Told] = {}
        self.counters = dict(counters)
        self._stood: dict[frozenset[str], Standing] = {frozenset(): standing}
        self._rivals: dict[frozenset[str], frozenset[str]] = {}
        self._grow([one for one in told if one.event.said.kind in MOVES])

    def _grow(self, waiting: list[Told]) -> None:
        """Judge each event once all that it follows counts. Each record is judged by its own proofs."""
        while ready := [one for one in waiting if all(prior in self.past for prior in one.event.said.prior)]:
            places = {one.seq for one in ready}
            waiting = [one for one in waiting if one.seq not in places]
            for one in ready:
                digest = one.event.digest
                if digest not in self.past and allowed(self.check, one):
                    self.events[digest] = one
                    self.past[digest] = self.before(one) | {digest}

    # -- positions ----------------------------------------------------------------------------------------------------

    def before(self, one: Told) -> frozenset[str]:
        """Everything that an event follows."""
        return frozenset().union(*(self.past[prior] for prior in one.event.said.prior))

    @property
    def everything(self) -> frozenset[str]:
        return frozenset(self.events)

    def tips(self, events: frozenset[str]) -> tuple[str, ...]:
        """Those that no other follows, sorted; the root if there is none."""
        followed = frozenset().union(*(self.past[digest] - {digest} for digest in events))
        return tuple(sorted(events - followed)) or (self.root.event.digest,)

    def rivals(self, events: frozenset[str]) -> frozenset[str]:
        """Those that stand beside another and exclude it."""
        if events not in self._rivals:
            found = (one for one in events if any(self._rival(one, other) for other in events))
            self._rivals[events] = frozenset(found)
        return self._rivals[events]

    def disputed(self, events: frozenset[str]) -> frozenset[str]:
        """Those that are rivals, or rest on some."""
        rivals = self.rivals(events)
        return frozenset(digest for digest in events if self.past[digest] & rivals)

    def _rival(self, one: str, other: str) -> bool:
        if one in self.past[other] or other in self.past[one]:
            return False
        return {self.events[one].event.said.kind, self.events[other].event.said.kind} != {"revoked"}

    def stood(self, events: frozenset[str]) -> Standing:
        """The keys after these events: what they agree on, without any key that one of them took away."""
        if events not in self._stood:
            self._stood[events] = self._add_up(events)
        return self._stood[events]

    def _add_up(self, events: frozenset[str]) -> Standing:
        disputed, standing = self.disputed(events), self.standing
        for digest in sorted(events, key=lambda digest: (len(self.past[digest]), digest)):
            said = self.events[digest].event.said
            standing = apply(standing, msgspec.structs.replace(said, key=None) if digest in disputed else said)
        return standing

    # -- judging ------------------------------------------------------------------------------------------------------

    def signed(self, one: Told, standing: Standing) -> Signed:
        by = signed_by(one.event, one.proofs, standing)
        for id, counter in by.counters.items():
            self.counters[id] = max(counter, self.counters.get(id, 0))
        return by

    def check(self, one: Told) -> bool:
        """Whether those who signed an event that moves the ring might: True. Raises Unauthorised."""
        before = self.before(one)
        if not one.event.said.prior or self.tips(before) != one.event.said.prior:
            refuse("bad_event", "what it follows")
        if one.event.said.kind != "revoked" and self.rivals(before):
            refuse("ring_frozen")
        standing = self.stood(before)
        judge(standing, one.event, self.signed(one, standing), self.barred(one.seq, before))
        if one.event.said.kind == "released":
            self._check_release(one)
        return True

    def _check_release(self, one: Told) -> None:
        said = one.event.said
        held = {q.event.digest for q in self._quarantines() if q.event.said.credential == said.credential}
        if not set(said.of) <= held:
            refuse("not_quarantined")

    def _quarantines(self) -> list[Told]:
        return [one for one in self.told if one.event.said.kind == "quarantined"]

    def barred(self, seq: int, events: frozenset[str]) -> frozenset[str]:
        """The keys in quarantine at a place of the log, given what was released."""
        sure = events - self.disputed(events)
        released = {of for digest in sure for of in self.events[digest].event.said.of}
        return frozenset(
            one.event.said.credential
            for one in self._quarantines()
            if one.seq < seq and one.event.digest not in released
        )

    # -- recovery -----------------------------------------------------------------------------------------------------

    def check_remark(self, one: Told) -> Standing:
        """Whether an event that takes no position might be said of the newest one. Raises Unauthorised."""
        everything = self.everything
        if one.event.said.prior != self.tips(everything):
            refuse("stale_event")
        standing = self.stood(everything)
        judge(standing, one.event, self.signed(one, standing), self.barred(one.seq, everything))
        return standing

    def remarks(self, kind: str) -> list[Told]:
        """Those of a kind that count, each once, as it was first said by those who may."""
        found: dict[str, Told] = {}
        for one in self.told:
            new = one.event.said.kind == kind and one.event.digest not in found
            if new and allowed(self.check_remark, one) is not None:
                found[one.event.digest] = one
        return list(found.values())

    def waiting(self, known: History, before: int = FAR) -> list[Told]:
        """The recoveries that wait, at a place of the log, and that nobody has stopped."""
        stopped = {of for veto in self.remarks("vetoed") for of in veto.event.said.of}
        return [
            one
            for one in self.remarks("recovering")
            if one.event.digest not in stopped and not self._voted_since(one.seq, known, before)
        ]

    def _voted_since(self, since: int, known: History, before: int) -> bool:
        """Whether a live key has signed an answer since a place of the log, and not only before it."""
        live = self.stood(self.everything).live
        if not any(known.heard.get(header_id(id), -1) > since for id in live):
            return False
        votes = known.votes()
        return any(self._new(cast, since, votes) for cast in votes if since < cast.seq < before)

    def _new(self, cast: Cast, since: int, votes: Sequence[Cast]) -> bool:
        settings = self.standing.settings
        key = next((key for id, key in self.counted(cast.seq).items() if header_id(id) == cast.credential), None)
        if key is None or shown(cast, key, settings) is None:
            return False
        same = [one for one in votes if one.seq <= since and one.answer == cast.answer]
        return not any(shown(one, key, settings) for one in same)

    def counted(self, seq: int) -> dict[str, Credential]:
        """The live keys that are asked, at a place of the log."""
        barred = self.barred(seq, self.everything)
        return {id: key for id, key in self.stood(self.everything).live.items() if id not in barred}

    def recovered(self, one: Told, known: History) -> tuple[Standing, Mapping[str, int]]:
        """The keys, and how far they had counted, after a recovery that comes into force. Raises Unauthorised."""
        said = one.event.said
        found = [each for each in self.waiting(known, one.seq) if (each.event.digest,) == said.of]
        if not found or said.prior != found[0].event.said.prior:
            refuse("nothing_recovering")
        standing = founded(self.stood(self.everything), found[0].event.said)
        left = found[0].lived + self.standing.settings.delay_ms - one.lived
        if left > 0:
            refuse("too_early", f"{-(-left // 60_000)} minutes")
        by = signed_by(one.event, one.proofs, standing)
        judge(standing, one.event, by)
        first = self.signed(found[0], self.stood(self.everything)).counters
        return standing, {id: max(first.get(id, 0), by.counters.get(id, 0)) for id in standing.live}


def allowed(check: Callable[..., T], *of: Any) -> T | None:
    """What a check answers, None if it refuses. Where this device cannot tell (es256_extra_missing), that is raised."""
    try:
        return check(*of)
    except Refused as error:
        if error.code == "es256_extra_missing":
            raise
        return None


def epoch_of(known: History) -> Epoch | None:
    """The epoch that holds now; None where no ring was founded. The first founding of this log is the one."""
    told = sorted(known.told, key=lambda one: one.seq)
    root = next((one for one in told if one.event.said.kind == "founded" and allowed(check_founding, one)), None)
    if root is None:
        return None
    by = signed_by(root.event, root.proofs, NOTHING)
    epoch = Epoch(root, founded(NOTHING, root.event.said), told, by.counters)
    for one in told:
        if one.event.said.kind == "recovered":
            epoch = _after(epoch, one, told, known)
    return epoch


def check_founding(one: Told) -> bool:
    """Whether those in it signed a founding: True. Raises Unauthorised."""
    judge(NOTHING, one.event, signed_by(one.event, one.proofs, NOTHING))
    return True


def _after(epoch: Epoch, one: Told, told: Sequence[Told], known: History) -> Epoch:
    """The epoch that a recovery begins; the same one if it may not. What is written later does not undo it."""
    before = Epoch(epoch.root, epoch.standing, [each for each in told if each.seq < one.seq], epoch.counters)
    found = allowed(before.recovered, one, known)
    return epoch if found is None else Epoch(one, found[0], told, found[1])


# ---- the ring -------------------------------------------------------------------------------------------------------


class Recovery(NamedTuple):
    """A recovery that waits. since, until: lived milliseconds. keys: the ids of those that would be there after it."""

    event: str
    since: int
    until: int
    keys: tuple[str, ...]


class Ring(NamedTuple):
    """Whose keys count.

    credentials: by id, those that may decide now. quarantined, dead: those that may not, or never again. head: the
    `Keys.head` that this follows from; tips: the events that the next one follows. frozen: why no signature counts, as
    the end of a sentence, or empty. recovery: one that waits. ignored: records that changed nothing, since nobody who
    may has signed them.
    """

    founded: bool = False
    head: str = ""
    credentials: Mapping[str, Credential] = {}
    quarantined: Mapping[str, Credential] = {}
    dead: Mapping[str, Credential] = {}
    settings: Settings = Settings()
    frozen: str = ""
    recovery: Recovery | None = None
    recovery_key: str = ""
    tips: tuple[str, ...] = ()
    ignored: tuple[int, ...] = ()
    counters: Mapping[str, int] = {}

    def may(self, credential: Credential, role: str) -> bool:
        """Whether a key counts now, in a role."""
        held = self.credentials.get(credential.id)
        return held is not None and role in held.roles

    def counter(self, id: str, keys: Keys) -> int:
        """How far a key has counted in everything that it signed here."""
        held = self.credentials.get(id) or self.quarantined.get(id)
        enrolled = held.counter if held else 0
        return max(enrolled, self.counters.get(id, 0), keys.counters.get(header_id(id), 0))


class Read(NamedTuple):
    """What was read of a log: the events, the epoch that follows from them (None: none was founded, or this device
    cannot tell), and the ring. unread: events of a newer version that an admin signed."""

    known: History
    epoch: Epoch | None
    ring: Ring
    unread: tuple[int, ...] = ()


def ring_of(known: History) -> Ring:
    """The ring that follows from these events."""
    return judged(known).ring


def judged(known: History) -> Read:
    """The same, with what it follows from."""
    if known.lost:
        return Read(known, None, Ring(True, known.head, frozen=_unreadable(known.lost, "gone")))
    try:
        epoch = epoch_of(known)
        if epoch is None:
            return _without_ring(known)
        unread = tuple(one.seq for one in known.newer if _vouched(epoch, one))
        return Read(known, epoch, _ring(epoch, known, unread), unread)
    except Unproven as error:  # this device lacks what others may have
        return Read(
            known, None, Ring(True, known.head, frozen=f"This device cannot check its keyring. {error.message}")
        )


def _unreadable(places: Sequence[int], why: str) -> str:
    return f"what is said about keys in record {', '.join(map(str, places[:5]))} cannot be read: it is {why}"


NEWER = "written by a newer amends"


def _without_ring(known: History) -> Read:
    """Where none was founded. One that a newer version founded may be there: a name is not enough then."""
    unread = tuple(one.seq for one in known.newer if one.kind == "key.founded")
    frozen = _unreadable(unread, NEWER) if unread else ""
    return Read(known, None, Ring(bool(unread), known.head, frozen=frozen), unread)


def _vouched(epoch: Epoch, one: Newer) -> bool:
    """Whether a key that was an admin when it was written signed an event that this version cannot read."""
    standing = epoch.stood(epoch.everything)
    by = [key.id for key in (*standing.live.values(), *standing.dead.values()) if _signed(key, one, standing.settings)]
    if not by or one.seq < epoch.root.seq:
        return False
    before = Epoch(epoch.root, epoch.standing, [told for told in epoch.told if told.seq < one.seq], {})
    then = before.stood(before.everything).live
    return any(id in then for id in by)


def _signed(key: Credential, one: Newer, settings: Settings) -> bool:
    signatures = (proof for proof in one.proofs if ADMIN in key.roles and proof.get("credential") == key.id)
    return any(allowed(check_bytes, KEYRING_TAG + one.text, proof, key, settings) for proof in signatures)


def _ring(epoch: Epoch, known: History, unread: tuple[int, ...]) -> Ring:
    everything = epoch.everything
    standing, counted, rivals = epoch.stood(everything), epoch.counted(FAR), epoch.rivals(everything)
    delay = standing.settings.delay_ms
    waits = [
        Recovery(one.event.digest, one.lived, one.lived + delay, tuple(key.id for key in one.event.said.keys))
        for one in epoch.waiting(known)
    ]
    return Ring(
        True,
        known.head,
        counted,
        {id: key for id, key in standing.live.items() if id not in counted},
        standing.dead,
        standing.settings,
        _frozen(epoch, rivals) or (_unreadable(unread, NEWER) if unread else ""),
        min(waits, key=lambda one: one.until, default=None),
        standing.recovery,
        epoch.tips(everything),
        _ignored(epoch, known, unread),
        epoch.counters,
    )


def _frozen(epoch: Epoch, rivals: frozenset[str]) -> str:
    if not rivals:
        return ""
    said = ", ".join(f"{one.event.kind} in record {one.seq}" for one in sorted(map(epoch.events.__getitem__, rivals)))
    return f"events that exclude each other were both signed by those who may: {said}"


def _ignored(epoch: Epoch, known: History, unread: tuple[int, ...]) -> tuple[int, ...]:
    """Records of this epoch that would move the ring and did not, and those that are no event."""
    moves = (one for one in known.told if one.event.said.kind in MOVES and one.seq > epoch.root.seq)
    newer = {one.seq for one in known.newer if one.seq > epoch.root.seq} - set(unread)
    return tuple(sorted({one.seq for one in moves if one.event.digest not in epoch.events} | set(known.junk) | newer))


def check_ring(ring: Ring) -> Refusal | None:
    """Whether a signature counts at all."""
    if not ring.frozen:
        return None
    next = REFUSALS["ring_frozen"][1]
    return Refusal("ring_frozen", f"The keyring is frozen: {ring.frozen}.", next)


_kept: WeakKeyDictionary[Any, Read] = WeakKeyDictionary()


def read(log: Log) -> Ring:
    """The ring of a log as last folded, every signature checked. Outside a transaction only: compare `head` inside."""
    return read_all(log).ring


def first_recovering(known: History) -> int:
    """The record of the first recovery that anybody began; FAR if nobody has."""
    return min((one.seq for one in known.told if one.event.said.kind == "recovering"), default=FAR)


def same_without(known: History, votes: Set[int]) -> bool:
    """Whether the ring would be the same without these votes (by record): one of them may be what stopped a recovery
    that somebody went on with all the same."""
    if first_recovering(known) == FAR:
        return True
    left = tuple(cast for cast in known.votes() if cast.seq not in votes)
    return judged(known).ring == judged(known._replace(votes=lambda: left)).ring


def read_all(log: Log) -> Read:
    """The ring, and what it follows from."""
    kept = _kept.get(log)
    if kept is None or not _stands(kept, log.view.keys):
        kept = _kept[log] = judged(history(log))
    return kept


def _stands(kept: Read, keys: Keys) -> bool:
    """Whether nothing was said since: no fact of a key, and no vote where one would end a recovery."""
    known = kept.known
    told = sum(map(len, (known.told, known.lost, known.junk, known.newer)))
    same = known.head == keys.head and told == len(keys.places)
    return same and (kept.ring.recovery is None or known.heard == keys.heard)


def check_counter(log: Log, ring: Ring, key: Credential, shown: int) -> None:
    """Raise Unproven if a key has counted no further than in what it signed here. Where a header says so, the votes
    themselves are asked: anybody can write a header."""
    if not _behind(shown, max(key.counter, ring.counter(key.id, log.view.keys))):
        return
    signed = [counter for _, counter in counts(log, key, ring.settings)]
    highest = max(key.counter, ring.counters.get(key.id, 0), *signed, 0)
    if _behind(shown, highest):
        raise Unproven("counter_went_back", f"{shown} after {highest}", credential=key.id)


def _behind(shown: int, counter: int) -> bool:
    """A key that does not count shows 0 for ever."""
    return bool(shown or counter) and shown <= counter


# ---- one event more -------------------------------------------------------------------------------------------------


def standing_for(epoch: Epoch | None, event: Event) -> Standing:
    """The keys that an event is judged by, if it comes next. Raises Unauthorised."""
    if event.said.kind == "founded":
        return NOTHING if epoch is None else refuse("keyring_exists")
    if epoch is None:
        refuse("no_keyring")
    if event.said.kind != "recovered":
        return epoch.stood(epoch.everything)
    found = [one for one in epoch.remarks("recovering") if (one.event.digest,) == event.said.of]
    return founded(epoch.stood(epoch.everything), found[0].event.said) if found else refuse("nothing_recovering")


def admit(read: Read, one: Told) -> None:
    """Raise Unauthorised if an event that comes next may not come about. Asking leaves no trace: a key has counted on
    only once what it signed is in the log."""
    counters = dict(read.epoch.counters) if read.epoch else {}
    try:
        _admit(read, one)
    finally:
        if read.epoch:
            read.epoch.counters.clear()
            read.epoch.counters.update(counters)


def _admit(read: Read, one: Told) -> None:
    epoch, said = read.epoch, one.event.said
    if read.ring.founded and (epoch is None or (read.unread and said.kind in MOVES)):
        refuse("ring_frozen", read.ring.frozen)
    standing_for(epoch, one.event)
    if epoch is None:
        check_founding(one)
    elif said.prior != read.ring.tips:
        refuse("stale_event")
    elif said.kind == "recovered":
        epoch.recovered(one, read.known)
    elif said.kind in MOVES:
        epoch.check(one)
    else:
        epoch.check_remark(one)
