"""What is settled and old may be removed, by a rule that a person wrote down; what anything still needs stays.

    [retention]
    keep = "90d"          # settled sagas are kept for so long; that is also what holds where nothing is said
    auto = true           # the daemon removes what is older, once a day; left out: only `amends compact` does
    max_size = "2GB"      # doctor warns from 80 % on; a full log begins no new saga

A saga may go when it and every saga that it belongs to, goes on from or was carried into have ended for as long as
`keep` says; when each of its effects is accounted for, by the rules of the certificate; when no hold, question, review,
drift or limit that still counts is about it, and nothing that is known of a person's key rests on it. What was said
about it from outside (votes, messages, reviews, what the world said) goes with it, and it is as young as the newest
word of a person. Age is lived time: a wall clock that is set forward makes nothing older.
Before anything is removed a certificate is made that covers it, and kept in the home: what is gone counts by that.

Why nothing is removed unless somebody said so: how long such records must be kept is a matter of law in many places.
"""

from __future__ import annotations

import errno
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..store.compact import Compacted, compact, together
from ..store.companions import Companions
from ..store.entry import Entry, unfinished
from ..store.errors import AmendsError, DiskFull, Refused, YouErred
from ..store.evidence import DatabaseError
from ..store.facts import BOOTED
from ..store.fold import Timeline
from ..store.gaps import KEPT as YOUNGEST
from ..store.home import Home, in_words
from ..store.sqlite import SqliteLog
from .certificate import Certificate, certify, copied, keep
from .certify import ABSENT, APPROVED, COMMITTED, GLASS, KEPT, PERSON, TAKEN_BACK, Certifier
from .config_file import BadConfig, Retention, retention_of
from .drift import ACCEPTED, OBSERVED
from .gate import keyring
from .gate.breaker import LOOKED_BACK_MS
from .gate.limits import span

if TYPE_CHECKING:
    from .kit import AgentKit
    from .state import State

DAY_MS = 86_400_000
KEEP_MS = 90 * DAY_MS
"""How long settled sagas are kept where nothing else is said."""
WARN = 0.8
"""The share of `max_size` from which on a person should know."""

YOUNG, OPEN, HELD, UNACCOUNTED, NEEDED, NEWEST = (
    "younger than the retention", "not ended", "held", "not accounted for", "needed by the gate", "among the newest",
)  # fmt: skip
"""Why a saga stays."""


WORDS = frozenset({"vote.cast", "review.closed"})
"""Kinds of what people say about a saga outside of it; beside them, that they account for a drift."""


class Plan(NamedTuple):
    """Header ids of the sagas that may go, oldest first, with what they had done; how many records that is; why the
    others stay, and how many."""

    sagas: dict[str, dict[str, int]]
    entries: int
    stay: dict[str, int]


class Removed(NamedTuple):
    """What came of it: the plan, what was removed, the certificate (its id, "" for none)."""

    plan: Plan
    done: Compacted
    cert: str


class _Seen:
    """What is known of one saga while the log is read."""

    __slots__ = ("entries", "ended", "first", "last", "named", "needed", "said", "votes")

    def __init__(self, first: int) -> None:
        self.first = self.last = first
        self.entries = 0
        self.ended = -1  # lived milliseconds, once it has
        self.named: set[str] = set()  # sagas that it belongs to or goes on from
        self.needed = False  # a limit counts it, or what is known of a key rests on it
        self.said = -1  # lived milliseconds, when a person said something about it
        self.votes: list[int] = []  # that a key signed


# ---- what may go ----------------------------------------------------------------------------------------------------


def plan(kit: AgentKit, keep_ms: int) -> Plan:
    """What a compaction would remove now. Reads every line once, and no opening. Raises YouErred (`bad_retention`)."""
    if keep_ms < LOOKED_BACK_MS:
        raise YouErred(
            f"{span(keep_ms)} is too short: breakers and recovery look back {span(LOOKED_BACK_MS)}.",
            next=f"Keep settled sagas for {span(LOOKED_BACK_MS)} or longer.",
            code="bad_retention",
        )
    log = kit.log
    log.refresh()
    state, now, top = kit.engine.state, log.now().lived, log.size
    tally = _Tally()
    seen = dict(_read(log, state, now, tally))
    wrong = tally.unaccounted()
    busy = _busy(state)
    groups = together({saga: known.named for saga, known in seen.items()})
    _mark_recovery(kit.log, seen)
    going: dict[str, dict[str, int]] = {}
    stay: Counter[str] = Counter()
    for group in sorted(groups, key=lambda group: min(seen[saga].first for saga in group)):
        why = _why(group, seen, log, wrong, busy, now - keep_ms, top - YOUNGEST)
        if why:
            stay[why] += len(group)
        else:
            going.update({saga: tally.use(saga) for saga in group})
    return Plan(going, sum(seen[saga].entries for saga in going), dict(stay))


def _read(log: Any, state: State, now: int, tally: _Tally) -> Iterator[tuple[str, _Seen]]:
    seen: dict[str, _Seen] = {}
    line, companions = Timeline([], 0, 0, (0, 0)), Companions(seen)
    for entry, _ in log.lines():
        if entry.up or entry.kind == BOOTED:
            line.fold(entry, line.at_entry(entry))
        if not unfinished(entry):
            tally.take(entry)
        if entry.saga and entry.saga not in seen:
            seen[entry.saga] = _Seen(entry.seq)
        saga = companions.whose(entry)
        if saga and entry.saga:
            _note(seen[saga], entry, state, line.lived, now)
        elif saga:
            _heard(seen[saga], entry, state, line.lived)
    yield from seen.items()


def _note(known: _Seen, entry: Entry, state: State, lived: int, now: int) -> None:
    known.entries += 1
    known.last = entry.seq
    known.named.update(name for name in (entry.of, entry.parent) if name)
    if entry.kind == "saga.ended":
        known.ended = lived
    for meter, amount in entry.use.items():
        account = state.meters.accounts.get(meter.partition("/")[0])
        known.needed = known.needed or (amount > 0 and account is not None and account.counts(lived, now))


def _heard(known: _Seen, entry: Entry, state: State, lived: int) -> None:
    """What is said about a saga outside of it."""
    known.entries += 1
    known.last = max(known.last, entry.seq)
    if entry.kind in WORDS or (entry.kind == OBSERVED and entry.out == ACCEPTED):
        known.said = lived
    if entry.kind == "vote.cast" and entry.credential:
        known.votes.append(entry.seq)
        known.needed = known.needed or state.keys.rests_on(entry)


def _mark_recovery(log: Any, seen: Mapping[str, _Seen]) -> None:
    """Who may sign can rest on a vote that stopped a recovery: without all of these it must be the same."""
    voted = [known for known in seen.values() if known.votes and not known.needed]
    told = keyring.history(log)
    if not keyring.same_without(told, {seq for known in voted for seq in known.votes}):
        since = keyring.first_recovering(told)
        for known in voted:
            known.needed = known.votes[-1] > since


def _busy(state: State) -> set[str]:
    """Sagas that something open is about."""
    approvals = state.approvals
    return {asked.saga for asked in approvals.open} | {review.saga for review in approvals.reviews.values()}


def _why(
    group: Iterable[str], seen: Mapping[str, _Seen], log: Any, wrong: set[str], busy: set[str], lived: int, size: int
) -> str:
    """Why a group stays; empty if it may go. lived: who ended later is too young; size: who is beyond is too new."""
    members = [(saga, seen[saga]) for saga in group]
    reasons = {
        OPEN: any(one.ended < 0 for _, one in members),
        YOUNG: any(max(one.ended, one.said) > lived for _, one in members),
        HELD: any(log.keeping.held(saga) is not None for saga, _ in members),
        UNACCOUNTED: any(saga in wrong for saga, _ in members),
        NEEDED: any(one.needed or saga in busy for saga, one in members),
        NEWEST: any(one.last >= size for _, one in members),
    }
    return next((why for why, is_so in reasons.items() if is_so), "")


class _Tally(Certifier):
    """The certificate's rules, with the effects of each saga kept apart: 8 bytes each."""

    def __init__(self) -> None:
        super().__init__()
        self._effects: dict[str, array[int]] = {}
        self._settling = array("q")

    def _settle(self, saga: Any, inside: bool) -> None:
        self._settling = self._effects[saga.id] = array("q")
        super()._settle(saga, inside)

    def _put(self, seq: int, fate: str, mark: Any, inside: bool) -> None:
        super()._put(seq, fate, mark, inside)
        self._settling.append(seq)

    def unaccounted(self) -> set[str]:
        """Sagas of which not every effect is accounted for, or of which the world says otherwise."""
        self.finish(lambda cert: None)
        found = {one.saga for one in (*self._found.values(), *self._drifted.values(), *self._claimed.values())}
        return found | {saga for _, saga, _ in self._glass.values()}

    def use(self, saga: str) -> dict[str, int]:
        """What a compaction says of a saga. An effect that a later saga took over counts there."""
        told = Counter(_WORDS[fate] for fate in map(self._fate, self._effects[saga]) if fate in _WORDS)
        told["effects"] = told.total()
        told["sagas"] = 1
        return {word: told[word] for word in KEPT if told[word]}


_WORDS = {COMMITTED: COMMITTED, TAKEN_BACK: TAKEN_BACK, PERSON: PERSON, APPROVED: APPROVED, GLASS: APPROVED, ABSENT: ""}
"""Fate -> what a compaction counts it as; one that never happened is among the effects only."""


# ---- removing it ----------------------------------------------------------------------------------------------------


def remove(kit: AgentKit, keep_ms: int, *, by: str = "", tool: str = "") -> Removed:
    """Remove what may go, under a certificate that covers it and is kept in the home. Raises NotVerified for a log that
    does not verify, Refused, LogHeld."""
    log, home = kit.log, kit.home
    if home is None or not isinstance(log, SqliteLog):
        raise Refused("A log in memory keeps nothing beyond its process.", code="in_memory")
    planned = plan(kit, keep_ms)
    if not planned.sagas:  # what a reader held up last time is gone on with
        return Removed(planned, Compacted(0, 0, log.shrink(), [], log.finish_erasing().done), "")
    made = certify(log, tool)
    with in_words(home.path):
        _keep(log, home, made)
    log.commit(lambda view, now: [copied(made)])
    done = compact(log, planned.sagas, within_ms=keep_ms, use=planned.sagas.__getitem__, by=by, cert=made.id)
    return Removed(planned, done, made.id)


def _keep(log: SqliteLog, home: Home, made: Certificate) -> None:
    """On a full disk the reserve gives way: without the certificate no room could be freed."""
    try:
        keep(home, made)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        log.use_reserve()
        keep(home, made)


class Turns:
    """Removes what may go once a day, where config.toml says `auto`; on a thread of its own, so that recovery never
    waits for it. Two daemons that come together do no harm: one of them finds nothing left."""

    def __init__(self, kit: AgentKit, stop: threading.Event) -> None:
        self._kit, self._stop = kit, stop
        self._next = 0  # of the boot clock, milliseconds
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin a turn if one is due. It has no timer: whoever looks anyway calls it."""
        now = self._kit.log.now().up
        if now < self._next or self._stop.is_set() or self._busy():
            return
        self._next = now + DAY_MS
        if self._says().auto:
            self._thread = threading.Thread(target=self.turn, name="amends-retention", daemon=True)
            self._thread.start()

    def turn(self) -> None:
        """Remove what may go now, if config.toml says `auto`; what is in the way is said on standard error."""
        said = self._says()
        if not said.auto:
            return
        try:
            remove(self._kit, said.keep_ms or KEEP_MS, by="config.toml", tool="amends")
        except (AmendsError, DatabaseError) as error:
            if not self._stop.is_set():
                sys.stderr.write(f"amends: nothing was removed by retention: {error} It is tried again tomorrow.\n")

    def _says(self) -> Retention:
        home = self._kit.home
        try:
            return retention_of(home.config) if home is not None else Retention()
        except BadConfig:
            return Retention()  # whoever tells people says that it is broken

    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Wait for the turn that is under way: each of its transactions is complete by itself."""
        if self._thread is not None:
            self._thread.join()


# ---- how large it is ------------------------------------------------------------------------------------------------


class Growth(NamedTuple):
    """Bytes of the log's files; of them free pages; bytes a day over the days that `days` says (0: too young to say);
    share of max_size, 0 where none is set."""

    bytes: int
    free: int
    a_day: int
    days: float
    share: float


def capped(log: SqliteLog, config: Path) -> Callable[[], None]:
    """What is asked before a saga begins: raises DiskFull (`size_cap`) for a log at its `max_size`. What config.toml
    says is what it said when this process began; a broken one caps nothing, and is said by whoever tells people."""
    try:
        most = retention_of(config).max_bytes
    except BadConfig:
        most = 0

    def room() -> None:
        if most and log.bytes() >= most:
            raise DiskFull(
                f"The log has reached the {most // 1_000_000} MB that config.toml allows: no new saga begins.",
                next="Run `amends compact`, or raise max_size under [retention].",
                code="size_cap",
            )

    return room


def growth(log: SqliteLog, policy: Retention) -> Growth:
    """How the log grows: by the records of its last days, at most 30."""
    size, _, free = log.room()
    newest, first = log.now().at, next(iter(log.lines()), None)
    start = max(first[0].at if first else newest, newest - 30 * DAY_MS * 1000)
    days = (newest - start) / (DAY_MS * 1000)
    each = (size - free) / max(1, log.size)
    a_day = int(each * _since(log, start) / days) if days >= 1 else 0
    share = size / policy.max_bytes if policy.max_bytes else 0.0
    return Growth(size, free, a_day, days, share)


def older(log: SqliteLog, keep_ms: int) -> tuple[int, float]:
    """How many records are older than this, settled or not, and their share of all."""
    before = log.size - _since(log, log.now().at - keep_ms * 1000)
    there = log.rows("select count(*) from entry where seq < ?", (before,))[0][0]
    return there, there / max(1, log.size)


def _since(log: SqliteLog, at: int) -> int:
    """How many records there are since a time (microseconds): found by halving, since times only grow."""
    low, high = 0, log.size
    while low < high:
        middle = (low + high) // 2
        found = next(iter(log.lines(middle)), None)
        if found is None or found[0].at >= at:
            high = middle
        else:
            low = found[0].seq + 1
    return log.size - low
