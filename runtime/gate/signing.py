"""One door for every signer: what is shown and what is to be signed are made of the same bytes, and a decision counts
only by these rules.

`review` reads the request back from the log and draws everything from it: headline, arguments, who asks, until when.
`vote` takes a decision back and asks in order: is the request known and open, whose key is it, may that person, what
does the proof show, did the key count on. Then it appends the vote inside a transaction that asks once more whatever
could have changed. Whoever comes second is told who was first; whoever comes too late is recorded, and never used.

A no needs a name and no key: it is the safe direction. A yes needs what the request asks. Breaking the glass sets aside
how strong the evidence is, which role, and how many people; it never does without a key where a keyring is founded, and
it leaves a review for somebody else.

`weigh` holds every rule that a decision can be asked by itself. It is asked when one is handed in, and again, of the
vote's own record, when the approval is spent: what is written into the log past this door is worth no more for it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from ...store.chain import Draft
from ...store.clock import Now
from ...store.entry import unfinished
from ...store.errors import BadValue, Malformed, NotFound, Refused
from ...store.log import Log, Record
from ..facts import body, fact
from ..openings import blob_at, known_as, raw_fields, when
from ..plain import blank, named, plain
from ..values import decode, encode
from . import ceremonies, keyring
from .approvals import (
    APPROVE,
    APPROVED,
    BREAK_GLASS,
    DENIED,
    DENY,
    EXPIRED,
    PENDING,
    SAID,
    SPENT,
    SUPERSEDED,
    VOTES_MAX,
    WITHDRAWN,
    Approvals,
    Asked,
    each,
    left_ms,
    persons,
    plain_name,
    same_person,
    standing,
)
from .cast import check_decision, counts, proof_in
from .clock import SLACK_US, behind_us
from .keyring import Ring, header_id
from .levels import FILE, LEVELS, NAMED, VERIFIED
from .proof import Credential, Unproven, Verified, level_of
from .shown import PARTIES, Field, about, fields_of, headline
from .statement import check_code, decision, request_digest

if TYPE_CHECKING:
    from ..engine import Engine
    from ..inbox import Item
    from ..kit import AgentKit
    from ..state import State

APPROVER = "approver"
SEEN_BEFORE = 5_000
"""So many of the newest records are looked through for earlier calls of the same tool."""
KEPT = 100
"""Of so many requests a process remembers what is new about them."""
AGAIN = 8
"""How often a decision is checked anew because the keyring moved while it was."""


class Review(NamedTuple):
    """A request as a person has to see it. fields: the arguments; about: everything else that is signed. need: how many
    people, have: how many have said yes; approve, deny, glass: the bytes to sign. Times: microseconds, `left_ms` lived.
    """

    item: str
    saga: str
    step: int
    tool: str
    request: bytes
    digest: str
    code: str
    headline: str
    fields: tuple[Field, ...]
    about: tuple[Field, ...]
    remarks: tuple[str, ...]
    created: int
    expires: int
    left_ms: int
    have: int
    need: int
    level: int
    level_word: str
    roles: tuple[str, ...]
    credentials: tuple[Credential, ...]
    voted: tuple[tuple[str, str, str], ...]
    approve: bytes
    deny: bytes
    glass: bytes
    requester: str
    on_behalf_of: str
    break_glass: bool
    standing: str


class Receipt(NamedTuple):
    """A decision that was recorded: by whom, on which evidence, at which record, and what stands of the request now."""

    item: str
    saga: str
    step: int
    tool: str
    verdict: str
    by: str
    level: int
    credential: str
    seq: int
    standing: str
    have: int
    need: int


# ---- reading back ---------------------------------------------------------------------------------------------------


def request_text(log: Log, asked: Asked) -> bytes | None:
    """The canonical request, as it was hashed; None where its opening is gone."""
    raw = raw_fields(blob_at(log, asked.seq)).get("request")
    text = decode(msgspec.json.decode(raw)).encode() if raw else None
    return text if text is not None and request_digest(text) == asked.request else None


def vote_told(log: Log, seq: int) -> tuple[str, str]:
    """Who cast a vote, and what they said to it; empty where that is gone."""
    return words_of(log.record(seq))


def words_of(record: Record) -> tuple[str, str]:
    """The same for a vote at hand."""
    fields = raw_fields(record.blob)
    said = {name: decode(msgspec.json.decode(fields[name])) for name in ("by", "note", "reason") if name in fields}
    return str(said.get("by", "")), str(said.get("note") or said.get("reason") or "")


def person_id(engine: Engine, name: str) -> str:
    """A person in headers: 16 hex digits that this device alone can make of a name."""
    return engine.meter("person\0" + plain_name(name))


# ---- evidence -------------------------------------------------------------------------------------------------------


def able(ring: Ring, level: int, roles: Collection[str]) -> bool:
    """Whether any enrolled key could give a yes at this level in one of these roles."""
    return not ring.frozen and bool(allowed(ring, level, roles))


def allowed(ring: Ring, level: int, roles: Collection[str]) -> tuple[Credential, ...]:
    """The enrolled keys that could."""
    return tuple(
        key for key in ring.credentials.values() if _best(key) >= level and _has_role(ring, key, roles)
    )  # fmt: skip


def _best(credential: Credential) -> int:
    """The strongest evidence that a key can ever give."""
    return level_of(credential, Verified(credential.id, True, True, 0))


def _has_role(ring: Ring, credential: Credential, roles: Collection[str]) -> bool:
    return any(ring.may(credential, role) for role in roles or (APPROVER,))


def verified(engine: Engine, ring: Ring, asked: Asked, text: bytes) -> frozenset[int]:
    """The votes for a request whose evidence holds against the keyring of now, by record."""
    if ring.frozen:
        return frozenset()
    request = json.loads(text)
    votes = [vote for vote in asked.votes if vote.out != DENY]
    return frozenset(vote.seq for vote in votes if _holds(engine, ring, asked, request, vote.seq))


def _holds(engine: Engine, ring: Ring, asked: Asked, request: Mapping[str, Any], seq: int) -> bool:
    """One vote, from its record: a decision that the door would take now, and whose header says what it shows."""
    record = engine.log.record(seq)
    entry = record.entry
    try:
        claim = _claim_in(record)
        weighed = weigh(ring, asked, request, claim)
    except (Refused, BadValue, Malformed, msgspec.MsgspecError) as wrong:
        if isinstance(wrong, Unproven) and wrong.code == "es256_extra_missing":
            raise
        return False
    shown = (person_id(engine, weighed.name), weighed.credential_id, weighed.level)
    return bool(claim.by) and shown == (entry.person, entry.credential, entry.level)


def _claim_in(record: Record) -> Claim:
    """A decision as its record has it. Whoever names a key without a proof shows an empty one."""
    fields, entry = raw_fields(record.blob), record.entry
    by, reason = (_text_in(fields.get(name)) for name in ("by", "reason"))
    return Claim(entry.out, by, proof_in(record) or ({} if entry.credential else None), reason)


def _text_in(raw: bytes | None) -> str:
    said = decode(msgspec.json.decode(raw)) if raw is not None else ""
    return said if isinstance(said, str) else ""


class Claim(NamedTuple):
    """A decision as somebody hands it in, or as a record has it. out: one of VERDICTS; proof: None where no key
    signed; by may be left out where one did."""

    out: str
    by: str
    proof: Mapping[str, Any] | None
    reason: str = ""


class Weighed(NamedTuple):
    """A decision that may count: whose it is, by which key (None: a name), how strong, and how far the key counted."""

    name: str
    credential: Credential | None
    level: int
    counter: int

    @property
    def credential_id(self) -> str:
        """The key as headers have it; empty for none."""
        return header_id(self.credential.id) if self.credential else ""


def weigh(ring: Ring, asked: Asked, request: Mapping[str, Any], claim: Claim) -> Weighed:
    """Whether a decision may count, by every rule but what others have decided and how far the key had counted before.

    Raises BadValue, Unproven, and Refused: credential_unknown, other_person, ring_frozen, requester, no_break_glass,
    role_missing, level_too_low.
    """
    if claim.out == BREAK_GLASS and blank(claim.reason):
        raise BadValue("Breaking the glass needs a reason.", next="Pass --reason TEXT.")
    credential = _credential(ring, claim.proof) if claim.proof is not None else None
    name = _person(credential, claim.by)
    if claim.out != DENY:
        _may_say_yes(ring, credential, request, name, claim.out)
    return _evidence(ring, asked, request, claim, name, credential)


def _role_fits(ring: Ring, credential: Credential, request: Mapping[str, Any]) -> bool:
    return _has_role(ring, credential, request.get("roles") or ())


def _requester(request: Mapping[str, Any], by: str) -> bool:
    return any(same_person(by, str(request.get(name, ""))) for name in ("requester", "on_behalf_of"))


# ---- what a person sees ---------------------------------------------------------------------------------------------


class Subject(NamedTuple):
    """The request that a decision is about."""

    item: str
    asked: Asked
    text: bytes

    @property
    def request(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found


def review(kit: AgentKit, item: Item | str) -> Review:
    """A request as it is signed, for people. Raises NotFound, Refused (decided, wrong_verb)."""
    subject = _subject(kit, item)
    asked, request = subject.asked, subject.request
    ring = keyring.read(kit.log)
    dead = _dead(kit.engine, ring, subject)
    lived = kit.log.now().lived
    roles = tuple(request.get("roles") or ())
    return Review(
        item=subject.item,
        saga=known_as(kit.log, asked.saga),
        step=asked.step,
        tool=plain(request["tool"]),
        request=subject.text,
        digest=asked.request,
        code=check_code(asked.request),
        headline=headline(request),
        fields=tuple(fields_of(request["args"])),
        about=tuple(about(request)),
        remarks=_remarks(kit.log, asked, request),
        created=asked.at,
        expires=asked.at + asked.within_ms * 1000,
        left_ms=left_ms(asked, lived),
        have=len(persons(asked, dead)),
        need=asked.quorum,
        level=each(asked.level),
        level_word=LEVELS[each(asked.level)][0],
        roles=roles,
        credentials=allowed(ring, max(FILE, each(asked.level)), roles),
        voted=tuple(_voted(kit.log, asked, frozenset() if asked.over else dead)),
        approve=decision(asked.request, APPROVE),
        deny=decision(asked.request, DENY),
        glass=decision(asked.request, BREAK_GLASS),
        requester=plain(request.get("requester", "")),
        on_behalf_of=plain(request.get("on_behalf_of", "")),
        break_glass=bool(request.get("break_glass", True)),
        standing=standing(kit.engine.state.approvals, asked.request, lived, dead)
        if asked.request in kit.engine.state.approvals.requests
        else asked.over or WITHDRAWN,  # of a saga that has ended
    )


def _dead(engine: Engine, ring: Ring, subject: Subject) -> frozenset[int]:
    """The votes that do not count any more."""
    try:
        good = verified(engine, ring, subject.asked, subject.text)
    except Unproven:  # this device lacks what it would take to check one of them
        good = frozenset()
    return frozenset(vote.seq for vote in subject.asked.votes if vote.out != DENY) - good


def dead_votes(kit: AgentKit, asked: Asked) -> frozenset[int]:
    """The votes for a request that do not count against the keyring of now."""
    text = request_text(kit.log, asked)
    if text is None:
        return frozenset(vote.seq for vote in asked.votes if vote.out != DENY)
    return _dead(kit.engine, keyring.read(kit.log), Subject("", asked, text))


def _voted(log: Log, asked: Asked, dead: frozenset[int]) -> Iterator[tuple[str, str, str]]:
    for vote in asked.votes:
        if vote.seq not in dead:
            yield plain(vote_told(log, vote.seq)[0]), vote.out, LEVELS[vote.level][0]


_remarked: WeakKeyDictionary[Log, dict[str, tuple[str, ...]]] = WeakKeyDictionary()


def _remarks(log: Log, asked: Asked, request: Mapping[str, Any]) -> tuple[str, ...]:
    """What is new about it. What came before it stays as it is: a page that looks every second reads that once."""
    kept = _remarked.setdefault(log, {})
    found = kept.get(asked.request)
    if found is None:
        for old in list(kept)[: max(0, len(kept) - KEPT + 1)]:
            kept.pop(old, None)
        found = kept[asked.request] = tuple(_new_in(log, asked, request))
    return found


def _new_in(log: Log, asked: Asked, request: Mapping[str, Any]) -> Iterator[str]:
    """What is new about it, against the calls of the same tool that this device knows."""
    before = _earlier(log, asked)
    if not before:
        yield f"The first call of {plain(asked.tool)} among the newest {SEEN_BEFORE} records."
        return
    now, then = _scalars(request["args"]), [_scalars(args) for args in before]
    for name, value in now.items():
        values = [one[name] for one in then if name in one]
        if isinstance(value, str) and name in PARTIES and values and value not in values:
            yield f"A new {plain(name)}: no earlier call of {plain(asked.tool)} has it."
        numbers = [one for one in values if type(one) is int]
        if type(value) is int and numbers and value > max(numbers):
            yield f"The largest {plain(name)} so far: {max(numbers)} was the most."


def _scalars(args: Any) -> dict[str, Any]:
    named = args if isinstance(args, dict) else {}
    return {name: value for name, value in named.items() if type(value) in (int, str)}


def _earlier(log: Log, asked: Asked) -> list[Any]:
    """The arguments of earlier calls of the tool that were let start."""
    found = []
    for record in log.records(max(0, asked.seq - SEEN_BEFORE), asked.seq):
        if record.entry.kind == "step.intended" and record.entry.tool == asked.tool:
            raw = raw_fields(record.blob).get("args")
            found.append(json.loads(raw) if raw else {})
    return found


# ---- which request --------------------------------------------------------------------------------------------------


def _subject(kit: AgentKit, item: Item | str, verb: str = "") -> Subject:
    """The request behind an item of the inbox, open or over. Raises NotFound, Refused (wrong_verb)."""
    from ..inbox import find

    kit.log.refresh()
    asked = _known(kit, item) if isinstance(item, str) else _asked_of(kit, item)
    if asked is None:
        asked = _asked_of(kit, find(kit, str(item), verb or APPROVE))
    text = request_text(kit.log, asked)
    if text is None:
        raise NotFound(
            f"The text of this request of {asked.tool} is not in the log any more: nobody can say what it was.",
            next="Let it expire, or undo its saga.",
        )
    return Subject(_item(kit, asked.seq), asked, text)


def _item(kit: AgentKit, seq: int) -> str:
    from ..inbox import item_id

    return item_id("approval", kit.log.record(seq).line)


def _asked_of(kit: AgentKit, item: Item) -> Asked:
    asked = None
    if item.kind == "approval" and item.saga is not None and item.step is not None:
        asked = kit.engine.state.approvals.of(item.saga.id, item.step.number)
    if asked is None:
        raise Refused(
            f"There is nothing to approve in {item.id}: {item.reason}", next="Run `amends inbox`.", code="wrong_verb"
        )
    return asked


def _known(kit: AgentKit, name: str) -> Asked | None:
    """The request that goes by an inbox id, or by a beginning of one: of the open sagas, else of the newest records."""
    from ..inbox import RECENT, is_id

    if not is_id(name):
        return None
    live = list(kit.engine.state.approvals.requests.values())
    found = [asked for asked in live if _item(kit, asked.seq).startswith(name)]
    if len(found) > 1:
        raise NotFound(f"{len(found)} items go by {name!r}.", next="Name one of them in full.", code="ambiguous")
    if found:
        return found[0]
    for record in kit.log.records(max(0, kit.log.size - RECENT)):
        if record.entry.kind == "step.asked" and _item(kit, record.entry.seq).startswith(name):
            return _past(kit, record)
    return None


def _past(kit: AgentKit, record: Record) -> Asked:
    """A request of a saga that has ended, folded once more from its own records."""
    view, asked = Approvals(), record.entry
    for later in kit.log.records(asked.seq):
        entry = later.entry
        mine = (entry.saga, entry.step) == (asked.saga, asked.step) and entry.kind in ("step.intended", "step.refused")
        if not unfinished(entry) and (mine or entry.request == asked.request) and not view.over(asked.request):
            view.fold_alone(entry)
    return view.requests[asked.request]


# ---- deciding -------------------------------------------------------------------------------------------------------


class Ballot(NamedTuple):
    """A decision that was checked against the keyring with this head. dead: votes before it that do not count; counted:
    how far headers say that its key had counted; known: the votes that were looked at."""

    subject: Subject
    out: str
    by: str
    person: str
    level: int
    credential: str
    counter: int
    counted: int
    head: str
    dead: frozenset[int]
    known: frozenset[int]
    openings: tuple[bytes, ...]


class Moved(Refused):
    """The keyring, or what else its person or its key has said, changed while a decision was checked."""

    code = "keyring_moved"


def vote(
    kit: AgentKit,
    item: Item | str,
    verdict: str,
    *,
    by: str = "",
    proof: Mapping[str, Any] | None = None,
    note: str = "",
    reason: str = "",
    break_glass: bool = False,
) -> Receipt:
    """Record a person's approve or deny. by: who, where no key tells. proof: what a key signed (proof.py).

    Raises BadValue, NotFound, Unproven, and Refused: decided, expired, withdrawn, superseded (somebody or something was
    first), requester, other_person, level_too_low, role_missing, credential_unknown, ring_frozen, clock_went_back,
    no_break_glass, already_voted, too_many_votes.
    """
    out = _verdict(verdict, break_glass)
    subject = _subject(kit, item, verdict)
    for _ in range(AGAIN):
        ring = keyring.read(kit.log)
        dead = _dead(kit.engine, ring, _current(kit, subject))
        late = _late(kit, subject, out, dead)
        try:
            ballot = _checked(kit, _current(kit, subject), ring, dead, Claim(out, by, proof, reason), note)
        except (Refused, BadValue) as wrong:
            if late is not None:
                raise late from None
            if wrong.code == "counter_went_back" and proof is not None:
                _went_back(kit, _current(kit, subject), ring, dead, out, proof, wrong)
            raise
        try:
            return _cast(kit, ballot)
        except Moved:
            kit.log.refresh()
    raise Refused("The log keeps changing.", next="Decide again in a moment.", code="keyring_moved")


def _current(kit: AgentKit, subject: Subject) -> Subject:
    """The subject with its votes of now."""
    return subject._replace(asked=kit.engine.state.approvals.requests.get(subject.asked.request, subject.asked))


def _verdict(verdict: str, break_glass: bool) -> str:
    if verdict not in (APPROVE, DENY):
        raise BadValue(f"{verdict!r} is no decision.", next="approve or deny.")
    if not break_glass:
        return verdict
    if verdict == DENY:
        raise BadValue("The glass is broken to let something happen; a no needs none of it.", next="Deny it plainly.")
    return BREAK_GLASS


def _checked(
    kit: AgentKit, subject: Subject, ring: Ring, dead: frozenset[int], claim: Claim, note: str
) -> Ballot:  # fmt: skip
    """A decision that may count, by the rules in their order."""
    asked, proof, reason = subject.asked, claim.proof, claim.reason.strip() if claim.reason else ""
    if claim.out != DENY:
        _not_before(kit)
    weighed = weigh(ring, asked, subject.request, claim)
    person, known = person_id(kit.engine, weighed.name), frozenset(vote.seq for vote in asked.votes)
    _not_again(asked, person, weighed.name, claim.out, dead)
    counted = kit.engine.state.keys.counters.get(weighed.credential_id, 0)
    if weighed.credential is not None:
        keyring.check_counter(kit.log, ring, weighed.credential, weighed.counter)
    openings = (
        body(proof=encode(dict(proof))) if proof is not None else b"",
        body(by=encode(weighed.name), note=encode(note) if note else b"", reason=encode(reason) if reason else b""),
    )
    return Ballot(
        subject, claim.out, weighed.name, person, weighed.level, weighed.credential_id, weighed.counter, counted,
        ring.head, dead, known, openings,
    )  # fmt: skip


def _not_before(kit: AgentKit) -> None:
    """By a clock that was set back, what was asked is yet to come, and what is over may seem open."""
    if behind_us(kit.engine.state.clock, kit.log.now()) > SLACK_US:
        raise Refused(
            "The clock stands behind the newest time in the log: nobody can say what is in time.",
            next="Set the clock; if it is right, say so: `amends doctor --accept-clock --by NAME --reason TEXT`.",
            code="clock_went_back",
        )


def _credential(ring: Ring, proof: Mapping[str, Any]) -> Credential:
    """The live key that a proof names."""
    credential = ring.credentials.get(str(proof.get("credential", ""))) if isinstance(proof, Mapping) else None
    if credential is None:
        raise Refused(
            "This key is not in the keyring, or not any more.",
            next="`amends keys list` names those that count.",
            code="credential_unknown",
        )
    return credential


def _person(credential: Credential | None, by: str) -> str:
    """Whose decision it is. A key says so itself."""
    if credential is None:
        return named(by)
    if by and not same_person(by, credential.person):
        raise Refused(
            f"This key is {credential.person}'s, not {by}'s.", next="Leave --by out: the key names its person.",
            code="other_person",
        )  # fmt: skip
    return credential.person


def _may_say_yes(ring: Ring, credential: Credential | None, request: Mapping[str, Any], name: str, out: str) -> None:
    if ring.frozen:
        raise Refused(
            f"The keyring is frozen: {ring.frozen}.", next="`amends keys list` says what has to be settled.",
            code="ring_frozen",
        )  # fmt: skip
    if _requester(request, name):
        raise Refused(
            f"{name} asks for this, and whoever asks does not approve.", next="Another person decides.",
            code="requester",
        )  # fmt: skip
    if out == BREAK_GLASS and not request.get("break_glass", True):
        raise Refused(
            f"The policy lets nobody break the glass for {request['tool']}.", next="Approve it as the policy asks.",
            code="no_break_glass",
        )  # fmt: skip
    if out == APPROVE and credential is not None and not _role_fits(ring, credential, request):
        wanted = " or ".join(request.get("roles") or (APPROVER,))
        raise Refused(f"This key has not the role {wanted}.", next="Use one that has.", code="role_missing")


def _not_again(asked: Asked, person: str, name: str, out: str, dead: frozenset[int]) -> None:
    """A person decides once; a vote that does not hold is none of theirs. Asked before how far the key has counted: an
    answer that is handed in twice is no sign of a copied key."""
    if asked.voted(person, out, dead):
        raise Refused(
            f"{name} has decided on this already.", next="Another person decides.", code="already_voted"
        )  # fmt: skip
    if out != DENY and asked.full(person):
        raise Refused(
            f"{VOTES_MAX} votes that do not hold stand under the name {name} already.",
            next="Find out who writes them: `amends doctor`. Deny this, and ask again.",
            code="too_many_votes",
        )


def _evidence(
    ring: Ring, asked: Asked, request: Mapping[str, Any], claim: Claim, name: str, credential: Credential | None
) -> Weighed:
    """What a decision rests on. Raises Unproven, Refused."""
    out, proof = claim.out, claim.proof
    least = each(asked.level) if out == APPROVE else FILE if out == BREAK_GLASS and ring.founded else NAMED
    if credential is None or proof is None:
        if out != DENY and (least > NAMED or (out == APPROVE and request.get("roles"))):
            raise _too_low(asked, least, NAMED)
        return Weighed(name, None, NAMED, 0)
    shown = check_decision(credential, ring.settings, proof, asked.request, out, least >= VERIFIED)
    level = level_of(credential, shown)
    if level < least:
        raise _too_low(asked, least, level)
    return Weighed(name, credential, level, shown.counter)


def _too_low(asked: Asked, least: int, level: int) -> Refused:
    ways = {
        FILE: "Sign with a key of the keyring: `amends approve ITEM --ssh KEY`.",
        NAMED: "Sign with a key that has the role.",
    }
    touch = "Sign with a hardware key: `amends approve ITEM --usb`, `--page`, or `--ssh` with an sk key."
    return Refused(
        f"{asked.tool} asks for {LEVELS[least][1]}; this is {LEVELS[level][1]}.",
        next=ways.get(least, touch),
        code="level_too_low",
        needed=LEVELS[least][0],
        given=LEVELS[level][0],
    )


def _went_back(
    kit: AgentKit, subject: Subject, ring: Ring, dead: frozenset[int], out: str, proof: Mapping[str, Any],
    wrong: Refused | BadValue,
) -> None:  # fmt: skip
    """A key that counted back has been copied, and is not asked any more; but for an answer that it may have given
    earlier, and that was only brought back late."""
    credential = _credential(ring, proof)
    kit.log.refresh()
    person = person_id(kit.engine, credential.person)
    _not_again(_current(kit, subject).asked, person, credential.person, out, dead)  # handed in twice at once
    if not _signed_earlier(kit, subject.asked, ring, credential, proof, out):
        ceremonies.quarantine(kit, credential.id, wrong.message)


def _signed_earlier(
    kit: AgentKit, asked: Asked, ring: Ring, credential: Credential, proof: Mapping[str, Any], out: str
) -> bool:
    """Whether a key can have made this proof before its newest votes: it had counted less far when it was asked, and
    has shown this very count nowhere else. What it signed of the keyring is taken for earlier."""
    before, since = max(credential.counter, ring.counters.get(credential.id, 0)), {0}  # 0: it does not count
    for seq, counter in counts(kit.log, credential, ring.settings):
        if seq < asked.seq:
            before = max(before, counter)
        else:
            since.add(counter)
    shown = check_decision(credential, ring.settings, proof, asked.request, out)
    return shown.counter > before and shown.counter not in since


# ---- committing it --------------------------------------------------------------------------------------------------


def _takes(out: str, said: str) -> bool:
    """Whether a decision still changes anything: a yes while it is asked for, a no until the approval is spent."""
    return said == PENDING or (out == DENY and said == APPROVED)


def _cast(kit: AgentKit, ballot: Ballot) -> Receipt:
    """Append the vote. What could have changed since it was checked is asked again inside the transaction."""
    asked = ballot.subject.asked
    told: list[str] = []

    def decide(state: State, now: Now) -> Sequence[Draft]:
        if state.keys.head != ballot.head:
            raise Moved("The keyring changed.")
        current = state.approvals.requests.get(asked.request)
        said = standing(state.approvals, asked.request, now.lived, ballot.dead) if current else asked.over or WITHDRAWN
        counts = current is not None and _takes(ballot.out, said)
        if current is not None and counts and _said_since(current, ballot):
            raise Moved("The person has said something else.")
        counted = state.keys.counters.get(ballot.credential, 0)
        if counted != ballot.counted and ballot.counter <= counted:
            raise Moved("The key has counted on.")  # whether it has, its votes tell, outside
        told[:] = ["" if counts else said]
        return [_draft(ballot, told[0])]

    [entry] = kit.log.commit(decide)
    if told[0]:
        late = _late(kit, ballot.subject, ballot.out, ballot.dead)
        raise late or Refused("It was decided already.", next="Run `amends inbox`.", code="decided")
    return _receipt(kit, ballot, entry.seq)


def _said_since(asked: Asked, ballot: Ballot) -> bool:
    """Whether there is a vote under this person's name that nobody has looked at."""
    return any(vote.person == ballot.person and vote.seq not in ballot.known for vote in asked.votes)


def _draft(ballot: Ballot, late: str) -> Draft:
    asked = ballot.subject.asked
    return fact(
        "vote.cast",
        *ballot.openings,
        of=asked.saga,
        step=asked.step,
        request=asked.request,
        out=ballot.out,
        person=ballot.person,
        level=ballot.level,
        credential=ballot.credential,
        counter=ballot.counter,
        why=late,
        up=True,
    )


def _receipt(kit: AgentKit, ballot: Ballot, seq: int) -> Receipt:
    asked, view = ballot.subject.asked, kit.engine.state.approvals
    current = view.requests.get(asked.request)
    return Receipt(
        ballot.subject.item, known_as(kit.log, asked.saga), asked.step, asked.tool, ballot.out, ballot.by,
        ballot.level, ballot.credential, seq,
        standing(view, asked.request, kit.log.now().lived, ballot.dead),
        len(persons(current, ballot.dead)) if current else 0, asked.quorum,
    )  # fmt: skip


def _late(kit: AgentKit, subject: Subject, out: str, dead: frozenset[int]) -> Refused | None:
    """What whoever comes too late is told: who was first, or what ended the question."""
    view = kit.engine.state.approvals
    asked = view.requests.get(subject.asked.request) or subject.asked
    known = asked.request in view.requests
    said = standing(view, asked.request, kit.log.now().lived, dead) if known else asked.over or WITHDRAWN
    if known and _takes(out, said):
        return None
    show = f"`amends show {quote(known_as(kit.log, asked.saga))}` tells the rest."
    first = first_words(kit.log, asked, said, frozenset() if asked.over else dead)
    if first:
        return Refused(first, next=show, code="decided")
    return Refused(_ENDED[said], next=show, code=said if said in _ENDED else "decided")


_ENDED = {
    EXPIRED: "It was not answered in time: your answer is recorded and changes nothing.",
    WITHDRAWN: "It is not asked any more: its saga was given up.",
    SUPERSEDED: "It was asked anew in another form; this one is not asked any more.",
}


def first_words(log: Log, asked: Asked, said: str, dead: frozenset[int] = frozenset()) -> str:
    """Who was first, where a person was; empty where the question ended in another way."""
    outs = {DENIED: (DENY,), APPROVED: (APPROVE, BREAK_GLASS), SPENT: (APPROVE, BREAK_GLASS)}.get(said, ())
    decisive = [vote for vote in asked.votes if vote.out in outs and vote.seq not in dead]
    if not decisive:
        return ""
    vote = decisive[0] if said == DENIED else decisive[-1]
    verb = SAID[vote.out]
    sent = ", and it was sent" if said == SPENT else ""
    by = vote_told(log, vote.seq)[0] or "Somebody"
    return f"{by} {verb} it already ({when(vote.at)[:19].replace('T', ' ')} UTC){sent}."


# ---- after the glass ------------------------------------------------------------------------------------------------


def close_review(kit: AgentKit, seq: int, by: str, reason: str) -> None:
    """Say, in another person's name, that a broken glass (the vote in this record) was looked at. Raises Refused."""
    name = named(by)
    if blank(reason):
        raise BadValue("Closing a review needs a reason.", next="Pass --reason TEXT.")
    person = person_id(kit.engine, name)

    def decide(state: State, now: Now) -> Sequence[Draft]:
        found = state.approvals.reviews.get(seq)
        if found is None:
            raise Refused("It was looked at already.", next="Run `amends inbox`.", code="decided")
        if found.person == person:
            raise Refused(f"{name} broke the glass; another person looks at it.", code="own_review")
        opening = body(by=encode(name), reason=encode(reason.strip()))
        return [fact("review.closed", opening, ref=seq, person=person, up=True)]

    kit.log.commit(decide)
