"""A question to people is a fact, and so is every answer: what stands of it is worked out, never stored.

A request says in one canonical text what is about to happen and for how long the question is open. Votes name it by its
SHA-256, so that an answer can never be carried to another call, another saga or a second time. Who has answered enough
is a table over the facts (`standing`): a no wins until the approval is spent, the first valid decision wins otherwise,
several people are counted by person and not by key. The intent spends the approval: the step's own announcement names
the request, in the same commit. What comes later is kept as evidence and never used.

Why not a status column: two processes that read it and then write it both win.
"""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...store.entry import Entry
from ...store.errors import Illegal
from ..plain import hidden
from ..step import WAITING
from .levels import NAMED, PRESENT, QUORUM, VERIFIED
from .question import Question, Tier
from .statement import VERDICTS, canonical

if TYPE_CHECKING:
    from ..state import State

PENDING, APPROVED, DENIED, EXPIRED, SPENT, WITHDRAWN, SUPERSEDED = STANDINGS = (
    "pending", "approved", "denied", "expired", "spent", "withdrawn", "superseded",
)  # fmt: skip
APPROVE, DENY, BREAK_GLASS = VERDICTS
SAID = {APPROVE: "approved", DENY: "denied", BREAK_GLASS: "broke the glass for"}
_DIGEST = re.compile(r"[0-9a-f]{64}")

VOTES_MAX = 16
"""So many votes are kept of one person about one request: one that does not hold does not keep out one that does."""
HARD_CAP_MS = 7 * 24 * 3600 * 1000
"""No question is open for longer, whatever a policy says."""


# ---- the view -------------------------------------------------------------------------------------------------------


class Vote(msgspec.Struct, array_like=True, frozen=True):
    """A decision that came in time: by whom (16 hex digits), on which evidence, at which record."""

    seq: int
    out: str
    person: str
    level: int
    credential: str
    at: int


class Asked(msgspec.Struct, array_like=True):
    """A request as folded. over: how it ended, empty while it is open; by: the record that ended it.

    level: the evidence that it asks (levels.py); reached: the escalation level that was told. Times: lived
    milliseconds, `at` microseconds.
    """

    request: str
    saga: str
    step: int
    seq: int
    at: int
    lived: int
    level: int
    quorum: int
    within_ms: int
    policy: str
    tool: str
    sem: str
    key: str
    votes: list[Vote] = []
    reached: int = 0
    over: str = ""
    by: int = 0

    def voted(self, person: str, out: str, dead: Collection[int] = ()) -> bool:
        """Whether a person has decided already, but for the votes that do not count. Whoever said yes may still say
        no."""
        said = {vote.out for vote in self.votes if vote.person == person and vote.seq not in dead}
        return bool(said) and (out != DENY or DENY in said)

    def full(self, person: str) -> bool:
        """Whether no more votes are kept under a name. Anybody may write one; which of them hold is asked of their
        proofs, elsewhere."""
        return sum(vote.person == person for vote in self.votes) >= VOTES_MAX


class Glass(msgspec.Struct, array_like=True, frozen=True):
    """A glass that was broken and that nobody else has looked at yet; seq: the vote."""

    seq: int
    request: str
    saga: str
    step: int
    tool: str
    person: str
    at: int


class Approvals:
    """The questions of open sagas, and the reviews that are due."""

    KINDS = (
        "step.asked", "vote.cast", "approval.escalated", "step.intended", "step.refused", "saga.unwinding",
        "saga.ended", "review.closed",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests: dict[str, Asked] = {}
        self.steps: dict[tuple[str, int], str] = {}  # the newest request of a step
        self.sagas: dict[str, list[str]] = {}  # the requests of a saga, oldest first
        self.reviews: dict[int, Glass] = {}

    def of(self, saga: str, step: int) -> Asked | None:
        """The newest request of a step, open or over; None if nobody was asked, or its saga has ended."""
        return self.requests.get(self.steps.get((saga, step), ""))

    @property
    def open(self) -> list[Asked]:
        """Requests that no fact has ended, oldest first. Some may be denied or past their deadline: ask `standing`."""
        return [asked for asked in list(self.requests.values()) if not asked.over]

    def check(self, entry: Entry, state: State) -> None:
        check = _CHECKS.get(entry.kind)
        if check is not None:
            check(self, entry, state)

    def fold(self, entry: Entry, lived: int, state: State) -> None:
        _FOLDS[entry.kind](self, entry, lived)

    def fold_alone(self, entry: Entry) -> None:
        """Take in a record of a request whose saga has ended, read again by itself."""
        _FOLDS[entry.kind](self, entry, 0)

    def over(self, request: str) -> bool:
        """Whether a fact has ended a request."""
        asked = self.requests.get(request)
        return asked is not None and bool(asked.over)

    def dump(self) -> Any:
        return [list(self.requests.values()), list(self.reviews.values())]

    def load(self, raw: Any) -> None:
        requests, reviews = raw
        self.requests = {asked.request: asked for asked in msgspec.convert(requests, list[Asked])}
        self.steps = {(asked.saga, asked.step): asked.request for asked in self.requests.values()}
        self.sagas = {}
        for asked in self.requests.values():
            self.sagas.setdefault(asked.saga, []).append(asked.request)
        self.reviews = {glass.seq: glass for glass in msgspec.convert(reviews, list[Glass])}


def _check_asked(view: Approvals, entry: Entry, state: State) -> None:
    if not _DIGEST.fullmatch(entry.request) or not entry.level or not entry.quorum or not entry.within_ms:
        raise Illegal("A question names its request, the evidence it asks, how many people, and until when.")
    if entry.request in view.requests:
        raise Illegal("A request is asked once.")


def _check_vote(view: Approvals, entry: Entry, state: State) -> None:
    if entry.out not in VERDICTS or not entry.person or not entry.level or not _DIGEST.fullmatch(entry.request):
        raise Illegal("A vote has a verdict, a person, a level of evidence and a request.")
    if entry.why:
        return  # it came late, and says so
    asked = view.requests.get(entry.request)
    if asked is None or asked.over:
        raise Illegal("A vote that counts is about an open request.")
    if (asked.saga, asked.step) != (entry.of, entry.step):
        raise Illegal("A vote names the saga and the step of its request.")
    if any(vote.out == DENY and vote.person == entry.person for vote in asked.votes):
        raise Illegal("Whoever said no has decided.")
    if entry.out != DENY and asked.full(entry.person):
        raise Illegal("No more votes of this person are kept.")


def _check_escalated(view: Approvals, entry: Entry, state: State) -> None:
    asked = view.requests.get(entry.request)
    if asked is None or asked.over or entry.level != asked.reached + 1:
        raise Illegal("Levels are told one after the other, while the question is open.")


def _check_intended(view: Approvals, entry: Entry, state: State) -> None:
    """An intent spends the approval of its own step, and a step that waits for one does not start without."""
    asked = view.of(entry.saga, entry.step)
    if entry.request:
        if asked is None or asked.request != entry.request or asked.over:
            raise Illegal("An intent spends the open request of its own step, once.")
        if (asked.tool, asked.key) != (entry.tool, entry.key) or asked.policy != entry.policy:
            raise Illegal("An approval is spent on the call that it was given for.")
        if _denied(asked, 0, ()) or not _enough(asked, 0, ()):
            raise Illegal("The people whose yes is needed have not given it.")
        return
    saga = state.sagas.get(entry.saga)
    step = saga.steps.get(entry.step) if saga else None
    if step is not None and step.state == WAITING:
        raise Illegal("A step that waits for people starts with their answer.")


def _check_closed(view: Approvals, entry: Entry, state: State) -> None:
    glass = view.reviews.get(entry.ref)
    if glass is None or not entry.person or glass.person == entry.person:
        raise Illegal("A review is closed once, by another person than the one who broke the glass.")


_CHECKS: dict[str, Callable[[Approvals, Entry, State], None]] = {
    "step.asked": _check_asked,
    "vote.cast": _check_vote,
    "approval.escalated": _check_escalated,
    "step.intended": _check_intended,
    "review.closed": _check_closed,
}


def _fold_asked(view: Approvals, entry: Entry, lived: int) -> None:
    before = view.of(entry.saga, entry.step)
    if before is not None and not before.over:
        _end(before, SUPERSEDED, entry)
    view.requests[entry.request] = Asked(
        entry.request, entry.saga, entry.step, entry.seq, entry.at, lived, entry.level, entry.quorum, entry.within_ms,
        entry.policy, entry.tool, entry.sem, entry.key, [],
    )  # fmt: skip
    view.steps[entry.saga, entry.step] = entry.request
    view.sagas.setdefault(entry.saga, []).append(entry.request)


def _fold_vote(view: Approvals, entry: Entry, lived: int) -> None:
    asked = view.requests.get(entry.request)
    if entry.why or asked is None or asked.over or _overdue(asked, lived, ()):
        return
    asked.votes.append(Vote(entry.seq, entry.out, entry.person, entry.level, entry.credential, entry.at))
    if entry.out == BREAK_GLASS:
        view.reviews[entry.seq] = Glass(
            entry.seq, entry.request, asked.saga, asked.step, asked.tool, entry.person, entry.at
        )


def _fold_escalated(view: Approvals, entry: Entry, lived: int) -> None:
    view.requests[entry.request].reached = entry.level


def _fold_intended(view: Approvals, entry: Entry, lived: int) -> None:
    if entry.request:
        _end(view.requests[entry.request], SPENT, entry)


def _fold_refused(view: Approvals, entry: Entry, lived: int) -> None:
    asked = view.of(entry.saga, entry.step)
    if asked is not None and not asked.over:
        _end(asked, entry.why if entry.why in STANDINGS else WITHDRAWN, entry)


def _fold_unwinding(view: Approvals, entry: Entry, lived: int) -> None:
    for asked in [view.requests[name] for name in view.sagas.get(entry.saga, ())]:
        if not asked.over:
            _end(asked, WITHDRAWN, entry)


def _fold_ended(view: Approvals, entry: Entry, lived: int) -> None:
    for name in view.sagas.pop(entry.saga, ()):
        asked = view.requests.pop(name)
        view.steps.pop((asked.saga, asked.step), None)


def _fold_closed(view: Approvals, entry: Entry, lived: int) -> None:
    view.reviews.pop(entry.ref, None)


_FOLDS: dict[str, Callable[[Approvals, Entry, int], None]] = {
    "step.asked": _fold_asked,
    "vote.cast": _fold_vote,
    "approval.escalated": _fold_escalated,
    "step.intended": _fold_intended,
    "step.refused": _fold_refused,
    "saga.unwinding": _fold_unwinding,
    "saga.ended": _fold_ended,
    "review.closed": _fold_closed,
}


def _end(asked: Asked, how: str, entry: Entry) -> None:
    asked.over, asked.by = how, entry.seq


# ---- what stands of a request ---------------------------------------------------------------------------------------

Dead = Collection[int]
"""Votes (by record) that do not count: their evidence does not hold against the keyring of now."""


def standing(view: Approvals, request: str, lived: int, dead: Dead = ()) -> str:
    """One of STANDINGS for a request at a lived time. One that the fold has forgotten (its saga ended) is withdrawn."""
    asked = view.requests.get(request)
    if asked is None:
        return WITHDRAWN
    return asked.over or next(word for word, holds in ORDER if holds(asked, lived, dead))


def _denied(asked: Asked, lived: int, dead: Dead) -> bool:
    return any(vote.out == DENY for vote in asked.votes)


def _overdue(asked: Asked, lived: int, dead: Dead) -> bool:
    return lived - asked.lived > asked.within_ms


def _enough(asked: Asked, lived: int, dead: Dead) -> bool:
    return len(persons(asked, dead)) >= asked.quorum or any(
        vote.out == BREAK_GLASS and vote.seq not in dead for vote in asked.votes
    )


def _always(asked: Asked, lived: int, dead: Dead) -> bool:
    return True


ORDER: tuple[tuple[str, Callable[[Asked, int, Dead], bool]], ...] = (
    (DENIED, _denied),
    (EXPIRED, _overdue),
    (APPROVED, _enough),
    (PENDING, _always),
)
"""What stands of a request that no fact has ended: the first line that holds."""


def persons(asked: Asked, dead: Dead = ()) -> frozenset[str]:
    """The distinct people whose yes counts; two keys of one person are one."""
    least = each(asked.level)
    return frozenset(
        vote.person for vote in asked.votes
        if vote.out == APPROVE and vote.level >= least and vote.seq not in dead
    )  # fmt: skip


def each(level: int) -> int:
    """The evidence that one person's vote needs: where several people are the level, a touch and a PIN of each."""
    return VERIFIED if level == QUORUM else level


def left_ms(asked: Asked, lived: int) -> int:
    """Milliseconds until its deadline."""
    return max(0, asked.lived + asked.within_ms - lived)


def due_level(asked: Asked, tier: Tier, lived: int) -> int:
    """The escalation level that should have been told by now."""
    return sum(1 for after_ms, _ in tier.levels if lived - asked.lived >= after_ms)


# ---- what is asked --------------------------------------------------------------------------------------------------


def tier_of(question: Question, founded: bool) -> Tier:
    """How the people are asked about a call. An enrolled key raises what was not stated by name to a touch."""
    tier = question.tier or Tier(NAMED)
    level = tier.level if tier.settled or not founded else max(tier.level, PRESENT)
    quorum = max(tier.quorum, 2 if level == QUORUM else 1)
    return tier._replace(level=level, quorum=quorum, within_ms=max(1, min(tier.within_ms, HARD_CAP_MS)))


def request_of(fields: Mapping[str, Any], args: bytes) -> bytes:
    """The canonical text of a request. fields: what it says beside the arguments; args: these as the log has them.

    Raises BadValue for what cannot be signed.
    """
    kept = {name: value for name, value in fields.items() if value not in ("", None, {})}
    return canonical({**kept, "v": 1, "kind": "approval-request", "args": bound(args)})


BOUND = (
    "ledger_id", "executor", "saga", "step", "tool", "effect", "args", "account", "idempotency_key", "requester",
    "on_behalf_of", "policy", "quorum", "level", "roles", "break_glass", "defaults",
)  # fmt: skip
"""What has to be equal for an answer to be about a call. The rest of a request makes it one question of its own."""


def binds(text: bytes, other: bytes) -> bool:
    """Whether two requests are about the same call, under the same rules."""
    return _call_in(text) == _call_in(other)


def _call_in(text: bytes) -> bytes:
    """What a request binds, as bytes: to Python 1 and true are equal."""
    found = json.loads(text)
    return canonical({name: found.get(name) for name in BOUND})


def reasons_in(text: bytes) -> frozenset[str]:
    """The limits and rules for which a request asks people."""
    return frozenset(json.loads(text).get("asked_by", ()))


class Room(NamedTuple):
    """Up to here a value stands in the request; above, its SHA-256 and its size do. text: characters; list: bytes of
    JSON of a list (0: as large as it is)."""

    text: int
    list: int = 0


KIB = 1024
ROOMS = (
    Room(16 * KIB), Room(8 * KIB), Room(4 * KIB), Room(2 * KIB), Room(KIB),
    Room(KIB, 64 * KIB), Room(KIB, 16 * KIB), Room(KIB, 4 * KIB), Room(KIB, KIB),
)  # fmt: skip
"""The first of these is taken in which the arguments have no more than ARGS_SHOWN, else the last one."""
ARGS_SHOWN, BYTES_SHOWN = 64 * KIB, 96
"""Bytes of JSON of all arguments; bytes of a value that is bytes."""


def bound(args: bytes) -> Any:
    """Arguments in the form that is signed: what JSON cannot say in one way only is tagged, as in the log.

    Of arguments that are too large together, the longest texts go first, and then the longest lists. An object never
    does, so that nobody hides an amount behind five long remarks.
    """
    value = made = json.loads(args)
    for room in ROOMS:
        made = _bound(value, room)
        if len(_json(made)) <= ARGS_SHOWN:
            break
    return made


def _bound(value: Any, room: Room) -> Any:
    if isinstance(value, str):
        return _bound_text(value, room)
    if isinstance(value, float):
        return {"$": "float", "v": repr(value)}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 53:
        return {"$": "int", "v": str(value)}
    if isinstance(value, dict):
        return _bound_object(value, room)
    return _bound_list(value, room) if isinstance(value, list) else value


def _bound_object(value: dict[str, Any], room: Room) -> Any:
    if value.get("$") == "bytes":
        long = len(value["v"]) > BYTES_SHOWN * 4 // 3
        return _large("bytes", base64.b64decode(value["v"])) if long else value
    if value.get("$") == "dict":  # its names are the caller's: a "$" among them is no tag
        members = _members(value["v"], room)
        return _paired(members) or {"$": "dict", "v": dict(members)}
    members = _members(value, room)
    return _paired(members) or dict(members)


def _members(value: dict[str, Any], room: Room) -> list[tuple[Any, Any]]:
    return [(_bound_text(name, room), _bound(one, room)) for name, one in value.items()]


def _paired(members: list[tuple[Any, Any]]) -> dict[str, Any] | None:
    """An object one of whose names cannot stand as a name; None for any other."""
    if all(isinstance(name, str) for name, _ in members):
        return None
    return {"$": "pairs", "v": [list(pair) for pair in members]}


def _bound_text(text: str, room: Room) -> Any:
    """Text as it is, if it looks in one way only; else spelled in ASCII."""
    if len(text) > room.text:
        return _large("text", text.encode())
    if text.isascii() or unicodedata.is_normalized("NFC", text):
        return text
    return {"$": "escaped", "v": json.dumps(text)[1:-1]}


def _bound_list(value: list[Any], room: Room) -> Any:
    made = [_bound(one, room) for one in value]
    text = _json(made) if room.list else b""
    return _large("list", text) if len(text) > room.list else made


def _json(made: Any) -> bytes:
    return json.dumps(made, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _large(kind: str, content: bytes) -> dict[str, Any]:
    return {"$": "large", "sha256": sha256(content).hexdigest(), "size": len(content), "type": kind}


def same_person(one: str, other: str) -> bool:
    """Whether two names are one: case, spaces and ways to write a letter make no second person."""
    return bool(plain_name(one)) and plain_name(one) == plain_name(other)


def plain_name(name: str) -> str:
    """A name without what does not make it another: letters that nobody sees among it."""
    seen = "".join(letter for letter in unicodedata.normalize("NFKC", name) if letter.isspace() or not hidden(letter))
    return " ".join(unicodedata.normalize("NFKC", seen.casefold()).split())
