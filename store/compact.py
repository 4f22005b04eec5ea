"""Records of old sagas can be removed for good, and everything else still adds up, to the bit.

Which sagas may go is decided elsewhere, by policy. Here they are removed: whole, in pieces of about a thousand records,
each of them one transaction and one fact (`compaction.made`) that names its runs, and complete by itself; after a crash
the next call removes what is left. Before the first piece it is tried in memory: the log is folded without those sagas,
and what the others left behind must be the same to the last number. What was said about them from outside, votes and
messages, goes with them (companions.py). So a limit whose window still counts a debit, a
question that a vote names, a clock that something builds on, keep their saga, whoever asked. Sagas that refer to each
other go in one piece.

In the end the file is made smaller, piece by piece under live writers, and the erasure finished.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from .chain import Chain, Decide, Draft
from .clock import Now
from .companions import Companions
from .errors import Damaged, Illegal, Refused
from .facts import COMPACTED
from .gaps import examine
from .log import Log, fresh, known

AT_ONCE = 1000
"""Records of one transaction, unless what belongs together is more: others are not kept from writing for longer."""
RUNS = 700
"""Runs that one fact names."""
RUNS_TEXT = 13_000
"""Bytes of them in its line, at most."""
SURELY = min(6 * RUNS, RUNS_TEXT)
"""Bytes of runs up to which a fact can name them: each takes six at least."""
TOLD = 400
"""Of them, those that any line has room for."""
TRIES = 24
"""So often the log is folded anew to find out which sagas are still needed; what is unknown after that stays."""

Run = tuple[int, int]
Use = Callable[[str], Mapping[str, int]]
"""A saga's counts, by its header id: sagas, effects, committed, compensated, accepted, approved."""


class Compacted(NamedTuple):
    """What was removed: records, sagas, bytes given back to the disk. left: sagas that had to stay. erased: nothing of
    it is left in the file."""

    entries: int
    sagas: int
    bytes: int
    left: list[str]
    erased: bool


class _Fact(NamedTuple):
    """What a fact says beside its runs."""

    within_ms: int
    use: Use
    by: str
    cert: str


class Piece(NamedTuple):
    """Sagas that go together, and the places of their records, sorted."""

    sagas: list[str]
    places: list[int]


def compact(log: Log, sagas: Iterable[str], *, within_ms: int, use: Use, by: str = "", cert: str = "") -> Compacted:
    """Remove the records of sagas that have ended, by header id; those that are not there (any more) are passed over.

    within_ms: the retention that let them go. cert: SHA-256, in hex, of the certificate that covers them. Raises
    Refused for a saga that is open or held, and removes nothing then; LogHeld. Those that may go later, or are still
    needed, are left.
    """
    anchored = log.settle()
    seen = log.keeping.compacted
    wanted = set(sagas)
    groups, early = _ripe(log, _together(log, wanted), wanted, anchored)
    groups, left = _unneeded(log, groups)
    entries = count = 0
    for piece in _pieces(groups):
        [made] = log.commit(_removing(log, piece, _Fact(within_ms, use, by, cert), seen))
        seen = made.seq + 1
        entries += made.count
        count += len(piece.sagas)
    freed = log.shrink()
    return Compacted(entries, count, freed, early + left, log.finish_erasing().done)


def runs_of(places: Sequence[int]) -> list[Run]:
    """Sorted places as runs, both ends included."""
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][1] == place - 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    return [(first, last) for first, last in runs]


# ---- what goes together ---------------------------------------------------------------------------------------------


def _together(log: Log, wanted: set[str]) -> Iterator[Piece]:
    """The sagas that are there, each with what is about it, and with those that it refers to or that refer to it,
    oldest first. An open one is among them, unasked, if it goes back to one that is."""
    places: dict[str, list[int]] = {}
    others: dict[str, set[str]] = {}
    companions = Companions(places)
    for entry, _ in log.lines():
        if entry.saga in wanted or (entry.saga and log.is_open(entry.saga) and {entry.of, entry.parent} & wanted):
            places.setdefault(entry.saga, [])
            others.setdefault(entry.saga, set()).update((entry.of, entry.parent))
        if saga := companions.whose(entry):
            places[saga].append(entry.seq)
    for group in together(others):
        yield Piece(group, sorted(seq for saga in group for seq in places[saga]))


def together(named: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Sagas in the order given, those in one group that refer to each other; named: by saga, those that it names."""
    of = {saga: saga for saga in named}

    def root(saga: str) -> str:
        while of[saga] != saga:
            saga = of[saga] = of[of[saga]]
        return saga

    for saga, others in named.items():
        for other in of.keys() & set(others):
            of[root(saga)] = root(other)
    groups: dict[str, list[str]] = {}
    for saga in named:
        groups.setdefault(root(saga), []).append(saga)
    return list(groups.values())


def _pieces(groups: Iterable[Piece]) -> Iterator[Piece]:
    """Groups put together to transactions."""
    now, text = Piece([], []), 0
    for group in groups:
        text += _text(group)  # merged it is less, which takes longer to find out
        both = Piece(now.sagas + group.sagas, now.places + group.places)
        if now.places and (len(both.places) > AT_ONCE or (text > SURELY and not _fits(both))):
            yield now._replace(places=sorted(now.places))
            both, text = group, _text(group)
        now = both
    if now.places:
        yield now._replace(places=sorted(now.places))


def _fits(piece: Piece) -> bool:
    """Whether one fact can name it."""
    return len(runs_of(sorted(piece.places))) <= RUNS and _text(piece) <= RUNS_TEXT


def _text(piece: Piece) -> int:
    """Bytes of its runs in a line."""
    return sum(len(f"[{first},{last}],") for first, last in runs_of(sorted(piece.places)))


_LATER = frozenset({"not_anchored", "too_new", "clock"})


def _ripe(log: Log, groups: Iterable[Piece], wanted: set[str], anchored: int) -> tuple[list[Piece], list[str]]:
    """The groups whose records may go by their places, and the sagas of the others."""
    ripe: list[Piece] = []
    early: list[str] = []
    for group in groups:
        if not wanted.issuperset(group.sagas):
            early += wanted.intersection(group.sagas)
            continue
        try:
            examine(log, runs_of(group.places), anchored)
            ripe.append(group)
        except Refused as error:
            if error.code not in _LATER:
                raise
            early += group.sagas
    return ripe, early


# ---- trying it ------------------------------------------------------------------------------------------------------


def _unneeded(log: Log, groups: list[Piece]) -> tuple[list[Piece], list[str]]:
    """The groups without which the log says the same, and the sagas of the others."""
    going: list[Piece] = []
    left = [group for group in groups if not _fits(group)]
    asked = [[group for group in groups if _fits(group)]]
    tries = 0
    while asked:
        some = asked.pop()
        tries += 1
        if not some or (tries <= TRIES and says_the_same(log, going + some)):
            going += some
        elif len(some) == 1 or tries > TRIES:
            left += some
        else:
            half = len(some) // 2
            asked += [some[half:], some[:half]]
    return sorted(going, key=lambda group: group.places[0]), [saga for group in left for saga in group.sagas]


def says_the_same(log: Log, groups: Iterable[Piece]) -> bool:
    """Whether the log folds to the same state without these sagas, once it has taken in that something was removed:
    then a view may drop what nobody asks for any more."""
    gone = {place for group in groups for place in group.places}
    view, standing = log.image()
    told = Chain(known(fresh(log.view), log))
    told.view.load(view)
    told.load(standing)
    without = Chain(known(fresh(log.view), log))
    try:
        for entry, line in log.lines(0, told.size):
            if entry.seq not in gone:
                if entry.seq > without.size:
                    without.skip(entry.seq, entry.prev)
                without.follow(entry, line)
    except (Illegal, Damaged):
        return False
    runs, now = runs_of(sorted(gone)), log.now()
    return _equal(told.dump(), without.dump()) and _equal(_aged(told, runs, now), _aged(without, runs, now))


def _aged(chain: Chain, runs: Sequence[Run], now: Now) -> bytes:
    """The view behind the compaction of these runs."""
    some = [tuple(runs[at : at + TOLD]) for at in range(0, len(runs), TOLD)] or [((1, 1),)]
    facts = [Draft(COMPACTED, {"runs": each, "count": 1}, up=True) for each in some]
    _, [(_, answer)] = chain.take([(lambda view, now: facts, facts)], now)
    if isinstance(answer, BaseException):
        raise answer
    image: bytes = chain.view.dump()
    return image


def _equal(one: bytes, other: bytes) -> bool:
    """Order in a map says nothing."""
    return one == other or (bool(one) and bool(other) and _plain(one) == _plain(other))


def _plain(image: bytes) -> Any:
    return msgspec.msgpack.decode(image, strict=False)


# ---- doing it -------------------------------------------------------------------------------------------------------


def _removing(log: Log, piece: Piece, fact: _Fact, seen: int) -> Decide:
    """seen: size of the log after the newest compaction that was there when this was tried."""
    runs, counts = runs_of(piece.places), _summed(fact.use(saga) for saga in piece.sagas)
    fields: dict[str, Any] = {
        "runs": tuple(runs), "count": len(piece.places), "within_ms": fact.within_ms,
        **({"use": counts} if counts else {}), **({"cert": fact.cert} if fact.cert else {}),
    }  # fmt: skip
    openings = (msgspec.json.encode({"by": fact.by}),) if fact.by else ()

    def decide(view: Any, now: Now) -> Sequence[Draft]:
        if log.keeping.compacted != seen:
            raise Refused("Another compaction came in between.", next="Do it again.", code="compacting")
        examine(log, runs, log.anchored())
        return [Draft(COMPACTED, fields, openings, up=True)]

    return decide


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            sums[name] = sums.get(name, 0) + count
    return {name: sums[name] for name in sorted(sums) if sums[name]}
