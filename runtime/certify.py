"""Every effect is accounted for, or the certificate names the one that is not: by record, saga and step.

An effect is accounted for if it was taken back, if its saga was committed, if a named person accepted it, if people had
said yes to it before it began and could not be undone, or if it is known never to have happened. What nobody knew
counts once it was settled, and by what is counted: by a probe, by a compensation that the other side answered, by a
named person, or by its own answer after all. An effect that a later saga took over is followed there.

The rules are the tables below, over the headers of the entries and nothing else: no opening is read, so the verdict is
the same after everything was redacted, and whoever has the lines can work it out again (SEMANTICS.md 10 has the rules
in words). The fold is the one that everything else is worked out by (saga.py); memory is that of the open sagas, one
byte a record, and two places for each effect that was taken over.

Why one byte a record: an effect that a later saga takes over must not count twice, however long ago it was counted.
Why two places: what the world says is about the record that announced the effect first, wherever that counts now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..store.entry import Entry
from ..store.facts import COMPACTED
from .gate.approvals import each
from .saga import CONCLUDING, ENDED, Saga, apply, opened
from .step import (
    ACCEPTED,
    COMPENSATED,
    CONFIRM_LOST,
    CONFIRMED,
    CONFIRMING,
    DONE,
    FAILED,
    INTENDED,
    REFUSED,
    STUCK,
    UNCONFIRMED,
    UNDO_LOST,
    UNDOING,
    UNKNOWN,
    WAITING,
    Step,
)

RULES = "1"
SAFE, UNSAFE, INDETERMINATE = "SAFE", "UNSAFE", "INDETERMINATE"
EXITS = {SAFE: 0, UNSAFE: 1, INDETERMINATE: 3}
LISTED = 1000
"""So many findings are listed; the others are counted."""

CODES = {
    "unknown": (UNSAFE, "nobody knows whether it happened"),
    "standing": (UNSAFE, "it stands, and its saga does not"),
    "lost_then_failed": (UNSAFE, "it was lost, and a later attempt said no: nobody knows about the one before"),
    "orphaned": (UNSAFE, "it stands, its saga does not, and nothing that was declared can undo it"),
    "compensation_failed": (UNSAFE, "its compensation failed"),
    "undo_unknown": (UNSAFE, "nobody knows whether its compensation took effect"),
    "tentative": (UNSAFE, "it is tentative, neither confirmed nor cancelled"),
    "fallback_hidden": (UNSAFE, "it happened, or may have, and its saga reports what the fallback did"),
    "left_behind": (UNSAFE, "its saga went on as another one, which did not take it over"),
    "not_approved": (UNSAFE, "it is irreversible and stands, and nobody had said yes to it"),
    "unnamed": (UNSAFE, "it was accepted by nobody"),
    "drift": (UNSAFE, "the world was asked about it, and is not as the log says"),
    "running": (INDETERMINATE, "its saga goes on: what it did so far has no fate yet"),
    "review_open": (INDETERMINATE, "it was let happen by breaking the glass, and no second person has looked at that"),
    "nowhere": (INDETERMINATE, "it was taken over from a place where no effect is known"),
    "compacted": (INDETERMINATE, "records were removed, and no certificate that covers them was given"),
    "missing": (INDETERMINATE, "records are missing, and no record says why"),
}
"""Code of a finding -> the verdict that it leads to, and what it says. UNSAFE goes before INDETERMINATE."""


class Finding(NamedTuple):
    """What is not accounted for: at which record, of which saga and step (empty and 0 where it is about neither)."""

    seq: int
    saga: str
    step: int
    code: str
    text: str


class Counts(NamedTuple):
    """effects is the sum of committed, approved, compensated, accepted, not_happened and unaccounted. open: sagas.
    approved: irreversible ones that people said yes to; break_glass: how many of those by breaking the glass. carried:
    taken over by a later saga, and counted there. by_…: what settled those that nobody had known about. compacted:
    records that were removed; what their sagas had done is in the other counts."""

    sagas: int
    open: int
    effects: int
    committed: int
    approved: int
    compensated: int
    accepted: int
    not_happened: int
    unaccounted: int
    carried: int
    break_glass: int
    by_probe: int
    by_compensation: int
    by_person: int
    by_answer: int
    compacted: int


class Judged(NamedTuple):
    """What the records up to a size say. more: findings that are not listed. certs: what compactions name."""

    verdict: str
    counts: Counts
    findings: tuple[Finding, ...]
    more: int
    certs: tuple[str, ...]


class Prior(NamedTuple):
    """A certificate that was given, and holds: over how many records, its verdict, what it found."""

    size: int
    verdict: str
    findings: tuple[Finding, ...]
    more: int = 0


Priors = Callable[[str], Prior | None]
"""A certificate by its SHA-256 (64 hex digits), if it is there and holds."""


# ---- the rules ------------------------------------------------------------------------------------------------------

NOTHING, COMMITTED, APPROVED, TAKEN_BACK, PERSON, ABSENT = (
    "", "committed", "approved", "compensated", "accepted", "not_happened",
)  # fmt: skip
GLASS, OPEN, MOVED = "glass", "unaccounted", "moved"

ALWAYS = {
    COMPENSATED: TAKEN_BACK, ACCEPTED: PERSON, FAILED: ABSENT, REFUSED: NOTHING, WAITING: NOTHING,
    INTENDED: "unknown", UNKNOWN: "unknown", STUCK: "compensation_failed",
    UNDOING: "undo_unknown", UNDO_LOST: "undo_unknown",
    CONFIRMING: "tentative", CONFIRM_LOST: "tentative", UNCONFIRMED: "tentative",
}  # fmt: skip
"""Whatever became of its saga: the state of a step -> its fate, or the code of a finding."""

BY_SAGA = {
    "committed": {DONE: COMMITTED, CONFIRMED: COMMITTED},
    "continued": {DONE: "left_behind", UNKNOWN: "left_behind", CONFIRMED: COMMITTED},
    "": {DONE: "standing", CONFIRMED: "standing"},  # undone, refused, or open
}
"""The same where it depends on what became of the saga. One that concludes is committed but for what is tentative."""


class Mark(NamedTuple):
    """What the fold of a step does not keep. unknown: nobody knew about it once; basis: what settled that; hidden: a
    fallback was tried for it; said: how people had said yes (APPROVED, GLASS); glass: the votes that broke it;
    nameless: it was accepted, and by nobody; again: it was sent more than once."""

    unknown: bool = False
    basis: str = ""
    hidden: bool = False
    said: str = ""
    glass: tuple[int, ...] = ()
    nameless: bool = False
    again: bool = False


UNMARKED = Mark()

LOSES = frozenset({"step.lost", "undo.lost", "confirm.lost"})
SETTLES = {
    "step.done": "answer", "step.landed": "answer", "confirm.done": "answer", "undo.done": "compensation",
    "step.accepted": "person",
}  # fmt: skip
"""A no is not among them (`step.failed`): it says nothing of a call before it."""
BASES = ("", "probe", "compensation", "person", "answer")


def _basis(entry: Entry, mark: Mark) -> str | None:
    """What this fact settles an unknown by; None if it does not."""
    if entry.kind == "step.probed":
        return "probe" if entry.out in ("present", "absent") else None
    if entry.kind == "step.landed" and entry.out == "failed" and mark.again:
        return None  # which of its calls failed?
    if entry.kind == "undo.done" and mark.basis == "probe":
        return None  # the probe had said so before
    return SETTLES.get(entry.kind)


def fate_of(saga: Saga, step: Step, mark: Mark) -> str:
    """What became of an effect: a fate, or the code of a finding."""
    out = "committed" if saga.phase == CONCLUDING else saga.out
    found = BY_SAGA[out if out in BY_SAGA else ""].get(step.state) or ALWAYS[step.state]
    for holds, code in REFINED:
        if holds(found, step, mark):
            return code if code != APPROVED else mark.said
    return found


REFINED: tuple[tuple[Callable[[str, Step, Mark], bool], str], ...] = (
    (lambda found, step, mark: found in (COMMITTED, "standing") and bool(step.resource) and step.state == DONE,
     "tentative"),
    (lambda found, step, mark: found in (COMMITTED, "unknown") and mark.hidden, "fallback_hidden"),
    (lambda found, step, mark: found == COMMITTED and mark.unknown and not mark.basis, "unknown"),
    (lambda found, step, mark: found == ABSENT and mark.unknown and not mark.basis, "lost_then_failed"),
    (lambda found, step, mark: found == COMMITTED and step.sem == "irreversible" and not mark.said, "not_approved"),
    (lambda found, step, mark: found == COMMITTED and step.sem == "irreversible", APPROVED),
    (lambda found, step, mark: found == PERSON and mark.nameless, "unnamed"),
    (lambda found, step, mark: found == "standing" and step.inv in ("", "none"), "orphaned"),
)  # fmt: skip
"""What the state alone does not tell: the first line that holds. APPROVED stands for how people said yes."""

_FATES = (NOTHING, COMMITTED, APPROVED, TAKEN_BACK, PERSON, ABSENT, OPEN, MOVED, GLASS)
_OUTSIDE = 0x80  # of a byte of fate: not counted, its saga is outside the window


# ---- what people had said -------------------------------------------------------------------------------------------


class _Asked:
    """A request of an open saga, and what was said in time."""

    def __init__(self, entry: Entry) -> None:
        self.of, self.level, self.quorum = (entry.saga, entry.step), entry.level, entry.quorum
        self.votes: list[Entry] = []

    def said(self) -> tuple[str, tuple[int, ...]]:
        """APPROVED, or GLASS with the votes that broke it, or nothing."""
        if any(vote.out == "deny" for vote in self.votes):
            return NOTHING, ()
        least = each(self.level)
        yes = {vote.person for vote in self.votes if vote.out == "approve" and vote.level >= least}
        if len(yes) >= max(1, self.quorum):
            return APPROVED, ()
        broken = tuple(vote.seq for vote in self.votes if vote.out == "break_glass")
        return (GLASS, broken) if broken else (NOTHING, ())


# ---- the fold -------------------------------------------------------------------------------------------------------


class Certifier:
    """Takes the entries in one after the other; `finish` judges. since: sagas that had ended before this record are not
    counted."""

    def __init__(self, since: int = 0) -> None:
        self._since = since
        self._sagas: dict[str, Saga] = {}
        self._marks: dict[str, dict[int, Mark]] = {}
        self._asked: dict[str, _Asked] = {}
        self._requests: dict[str, list[str]] = {}
        self._fates = bytearray()
        self._tally = dict.fromkeys((*_FATES, *(f"by_{basis}" for basis in BASES[1:])), 0)
        self._counted = {"sagas": 0, "open": 0, "carried": 0, "compacted": 0}
        self._found: dict[int, Finding] = {}  # by the record that announced the effect
        self._left: dict[int, Mark] = {}  # what a saga that went on as another left for it
        self._claimed: dict[int, Finding] = {}  # taken over from where no effect is known (yet)
        self._later: dict[int, int] = {}  # record of an effect that was taken over -> the one that took it
        self._drifted: dict[int, Finding] = {}
        # votes that broke a glass and that nobody has reviewed -> record of the effect (-1: none yet), saga, step
        self._glass: dict[int, tuple[int, str, int]] = {}
        self._compactions: list[Entry] = []
        self._next = 0
        self._gaps: list[tuple[int, int]] = []

    def take(self, entry: Entry) -> None:
        """Take in the next entry."""
        if entry.seq > self._next:
            self._gaps.append((self._next, entry.seq - 1))
        self._next = entry.seq + 1
        if entry.saga:
            self._of_saga(entry)
        elif entry.kind in _ALONE:
            _ALONE[entry.kind](self, entry)

    def after(self, entry: Entry) -> None:
        """Take in an entry behind the size that is judged: it may explain what was removed before it."""
        if entry.kind == COMPACTED:
            self._compactions.append(entry)

    def _of_saga(self, entry: Entry) -> None:
        saga = self._sagas.get(entry.saga)
        if saga is None:
            self._sagas[entry.saga] = opened(entry, 0)
            return
        apply(saga, entry, 0)
        if entry.step and (mark := _MARKS.get(entry.kind)) is not None:
            mark(self, entry, saga.steps[entry.step])
        if saga.phase == ENDED:
            self._ended(saga, entry.seq)

    def _ended(self, saga: Saga, seq: int) -> None:
        inside = seq >= self._since
        self._settle(saga, inside)
        self._counted["sagas"] += inside
        del self._sagas[saga.id]
        self._marks.pop(saga.id, None)
        for request in self._requests.pop(saga.id, ()):
            self._asked.pop(request, None)

    # -- what a fact of a step leaves ----------------------------------------------------------------------------------

    def _mark(self, entry: Entry, **changed: Any) -> None:
        marks = self._marks.setdefault(entry.saga, {})
        marks[entry.step] = marks.get(entry.step, UNMARKED)._replace(**changed)

    def _of(self, entry: Entry) -> Mark:
        return self._marks.get(entry.saga, {}).get(entry.step, UNMARKED)

    def _was_lost(self, entry: Entry, step: Step) -> None:
        self._mark(entry, unknown=True, basis="")

    def _was_settled(self, entry: Entry, step: Step) -> None:
        mark = self._of(entry)
        basis = _basis(entry, mark)
        if mark.unknown and basis is not None:
            self._mark(entry, basis=basis)
        if entry.kind == "step.accepted":
            self._mark(entry, nameless=not entry.c)

    def _was_sent_again(self, entry: Entry, step: Step) -> None:
        self._mark(entry, again=True)

    def _was_declared(self, entry: Entry, step: Step) -> None:
        if self._of(entry).unknown:
            self._was_sent_again(entry, step)
        if entry.scope == "fallback":
            self._hide(entry)
        asked = self._asked.get(entry.request) if entry.request else None
        if asked is not None and asked.of == (entry.saga, entry.step):
            said, glass = asked.said()
            self._mark(entry, said=said, glass=glass)
            for vote in glass:
                self._glass[vote] = (-1, entry.saga, entry.step)

    def _hide(self, entry: Entry) -> None:
        """A fallback begins: whatever of its tool came to nothing, or nobody knows of, may be what it stands in for."""
        for number, step in self._sagas[entry.saga].steps.items():
            if number != entry.step and step.tool == entry.tool and step.state in (FAILED, UNKNOWN):
                marks = self._marks.setdefault(entry.saga, {})
                marks[number] = marks.get(number, UNMARKED)._replace(hidden=True)

    def _was_done(self, entry: Entry, step: Step) -> None:
        if entry.tool:  # a reversible step that is told in one
            self._was_declared(entry, step)
        self._was_settled(entry, step)

    def _was_carried(self, entry: Entry, step: Step) -> None:
        self._counted["carried"] += entry.seq >= self._since
        mark = self._left.pop(entry.ref, UNMARKED) if entry.ref else UNMARKED
        if entry.out == "unknown":
            mark = mark._replace(unknown=True, basis="")
        if mark is not UNMARKED:
            self._marks.setdefault(entry.saga, {})[entry.step] = mark
        if not entry.ref:
            return  # from a log that this one follows
        self._later[entry.ref] = entry.seq
        if not self._move(entry.ref):
            self._claimed[entry.ref] = _finding(entry.seq, entry.saga, entry.step, "nowhere")

    def _was_asked(self, entry: Entry, step: Step) -> None:
        self._asked[entry.request] = _Asked(entry)
        self._requests.setdefault(entry.saga, []).append(entry.request)

    # -- what is said outside of sagas ---------------------------------------------------------------------------------

    def _voted(self, entry: Entry) -> None:
        asked = self._asked.get(entry.request)
        if asked is not None and not entry.why and asked.of == (entry.of, entry.step):
            asked.votes.append(entry)

    def _reviewed(self, entry: Entry) -> None:
        self._glass.pop(entry.ref, None)

    def _observed(self, entry: Entry) -> None:
        if entry.out == "drift":
            self._drifted[entry.ref] = _finding(entry.seq, entry.of, entry.step, "drift")
        elif entry.out == "confirmed" or (entry.out == "accepted" and entry.c):
            self._drifted.pop(entry.ref, None)
        counted = self._counts_at(entry.ref)
        found = self._found.get(counted)
        if entry.out == "confirmed" and found is not None and found.code == "lost_then_failed":
            self._count(self._fates[counted], -1)
            self._put(counted, ABSENT, Mark(unknown=True, basis="probe"), not self._fates[counted] & _OUTSIDE)
            del self._found[counted]

    def _counts_at(self, ref: int) -> int:
        """The record at which an effect counts now: sagas that took it over lead there."""
        while self._later.get(ref, 0) > ref:
            ref = self._later[ref]
        return ref

    def _compacted(self, entry: Entry) -> None:
        self._compactions.append(entry)

    # -- fates ---------------------------------------------------------------------------------------------------------

    def _settle(self, saga: Saga, inside: bool) -> None:
        for step in saga.steps.values():
            mark = self._marks.get(saga.id, {}).get(step.number, UNMARKED)
            if step.seq in self._claimed:
                del self._claimed[step.seq]
                self._put(step.seq, MOVED, UNMARKED, inside)
                continue
            fate = fate_of(saga, step, mark)
            if fate in CODES:
                self._find(saga, step, fate, mark, inside)
            elif fate:
                self._put(step.seq, fate, mark, inside)
                for vote in mark.glass if fate == GLASS else ():
                    if vote in self._glass:
                        self._glass[vote] = (step.seq, saga.id, step.number)

    def _find(self, saga: Saga, step: Step, code: str, mark: Mark, inside: bool) -> None:
        self._put(step.seq, OPEN, mark, inside)
        goes_along = mark if saga.out == "continued" else UNMARKED
        if step.state in (UNKNOWN, INTENDED):
            goes_along = goes_along._replace(unknown=True, basis="")
        if saga.phase == ENDED and goes_along is not UNMARKED:
            self._left[step.seq] = goes_along
        self._found[step.seq] = _finding(step.seq, saga.id, step.number, code, step.tool)

    def _put(self, seq: int, fate: str, mark: Mark, inside: bool) -> None:
        basis = BASES.index(mark.basis) if mark.unknown and fate not in (OPEN, MOVED) else 0
        if seq >= len(self._fates):
            self._fates.extend(bytes(seq + 1 - len(self._fates)))
        self._fates[seq] = _FATES.index(fate) | basis << 4 | (0 if inside else _OUTSIDE)
        self._count(self._fates[seq], 1)

    def _count(self, byte: int, by: int) -> None:
        if byte & _OUTSIDE:
            return
        self._tally[_FATES[byte & 15]] += by
        if byte >> 4:
            self._tally[f"by_{BASES[byte >> 4]}"] += by

    def _fate(self, seq: int) -> str:
        return _FATES[self._fates[seq] & 15] if seq < len(self._fates) else NOTHING

    def _move(self, seq: int) -> bool:
        """A later saga took an effect over: it counts there. False if none is known at this record."""
        if self._fate(seq) == NOTHING:
            return False
        byte = self._fates[seq]
        self._count(byte, -1)
        self._fates[seq] = _FATES.index(MOVED) | byte & _OUTSIDE
        self._count(self._fates[seq], 1)
        self._found.pop(seq, None)
        return True

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self, priors: Priors) -> Judged:
        """The verdict over what was taken in."""
        for saga in list(self._sagas.values()):
            self._still_open(saga)
        outside = {seq for seq in self._found if self._fates[seq] & _OUTSIDE}
        found = [finding for seq, finding in self._found.items() if seq not in outside]
        found += [one for ref, one in self._drifted.items() if self._drifts(ref)]
        found += [
            _finding(vote, saga, step, "review_open")
            for vote, (seq, saga, step) in self._glass.items()
            if seq >= 0 and self._fate(seq) == GLASS and not self._fates[seq] & _OUTSIDE
        ]
        runs = [run for entry in self._compactions for run in entry.runs]
        found += [one for ref, one in self._claimed.items() if not _within(ref, runs)]
        found += self._removed(priors, runs)
        return self._judged(sorted(found))

    def _still_open(self, saga: Saga) -> None:
        """What an open saga has done: unaccounted for; and nobody can say yet, while somebody drives it and no person
        is asked about it."""
        self._counted["sagas"] += 1
        self._counted["open"] += 1
        self._settle(saga, True)
        going = [
            step for step in saga.steps.values()
            if step.seq in self._found and saga.driver and step.number not in saga.escalated
        ]  # fmt: skip
        for step in going:
            del self._found[step.seq]
        if going:
            first = min(going, key=lambda step: step.seq)
            told = _finding(first.seq, saga.id, first.number, "running")
            self._found[first.seq] = told._replace(text=f"{told.text} ({len(going)} effects)")

    def _drifts(self, ref: int) -> bool:
        counted = self._counts_at(ref)
        return self._fate(counted) not in (NOTHING, MOVED) and not self._fates[counted] & _OUTSIDE

    def _removed(self, priors: Priors, runs: list[tuple[int, int]]) -> list[Finding]:
        """What was removed counts only by a certificate that covers it and found nothing there."""
        found = [_finding(low, "", 0, "missing") for low, high in self._gaps if not _covered(low, high, runs)]
        for entry in self._compactions:
            if entry.runs[-1][1] < self._since:
                continue
            self._counted["compacted"] += entry.count
            prior = priors(entry.cert)
            if prior is None or prior.size <= entry.runs[-1][1] or prior.more:
                found.append(_finding(entry.seq, "", 0, "compacted"))
            else:
                found += [one for one in prior.findings if _within(one.seq, list(entry.runs))]
        return found

    def _judged(self, found: list[Finding]) -> Judged:
        worst = {CODES[finding.code][0] for finding in found}
        verdict = next((word for word in (UNSAFE, INDETERMINATE) if word in worst), SAFE)
        certs = dict.fromkeys(entry.cert for entry in self._compactions)
        found.sort(key=lambda finding: (CODES[finding.code][0] != UNSAFE, finding))
        return Judged(verdict, self._counts(), tuple(found[:LISTED]), max(0, len(found) - LISTED), tuple(certs))

    def _counts(self) -> Counts:
        tally, counted = self._tally, self._counted
        use = [entry.use for entry in self._compactions if entry.runs[-1][1] >= self._since]
        gone = {word: sum(one.get(word, 0) for one in use) for word in KEPT}
        known = {word: tally[word] + gone[word] for word in (COMMITTED, TAKEN_BACK, PERSON)}
        approved = tally[APPROVED] + tally[GLASS] + gone[APPROVED]
        absent = tally[ABSENT] + gone["effects"] - sum(gone[word] for word in KEPT[2:])
        effects = sum(known.values()) + approved + absent + tally[OPEN]
        told = {word: tally[f"by_{word}"] for word in BASES[1:]}
        return Counts(
            sagas=counted["sagas"] + gone["sagas"],
            open=counted["open"],
            effects=effects,
            committed=known[COMMITTED],
            approved=approved,
            compensated=known[TAKEN_BACK],
            accepted=known[PERSON],
            not_happened=absent,
            unaccounted=tally[OPEN],
            carried=counted["carried"],
            break_glass=tally[GLASS],
            compacted=counted["compacted"],
            **{f"by_{word}": count for word, count in told.items()},
        )


KEPT = ("sagas", "effects", COMMITTED, TAKEN_BACK, PERSON, APPROVED)
"""What a compaction says of the sagas that it removes (`use`)."""

_MARKS: dict[str, Callable[[Certifier, Entry, Step], None]] = {
    **dict.fromkeys(LOSES, Certifier._was_lost),
    **dict.fromkeys((*SETTLES, "step.probed"), Certifier._was_settled),
    "step.done": Certifier._was_done,
    "step.intended": Certifier._was_declared,
    "step.attempted": Certifier._was_sent_again,
    "step.carried": Certifier._was_carried,
    "step.asked": Certifier._was_asked,
}
_ALONE: dict[str, Callable[[Certifier, Entry], None]] = {
    "vote.cast": Certifier._voted,
    "review.closed": Certifier._reviewed,
    "effect.observed": Certifier._observed,
    COMPACTED: Certifier._compacted,
}


def _finding(seq: int, saga: str, step: int, code: str, tool: str = "") -> Finding:
    said = CODES[code][1]
    return Finding(seq, saga, step, code, f"{tool}: {said}" if tool else said)


def _within(seq: int, runs: list[tuple[int, int]]) -> bool:
    return any(first <= seq <= last for first, last in runs)


def _covered(low: int, high: int, runs: list[tuple[int, int]]) -> bool:
    """Whether every record of a gap is named by some run."""
    for first, last in sorted(runs):
        if first <= low <= last:
            low = last + 1
    return low > high


def judge(
    entries: Iterable[Entry],
    size: int | None = None,
    *,
    since: int = 0,
    priors: Priors = lambda cert: None,
) -> Judged:
    """The verdict over the first `size` entries (all, if not said). Later ones may be handed in as well: what they say
    of records that were removed is heard. Raises Illegal for a history that the tables do not allow."""
    certifier = Certifier(since)
    for entry in entries:
        if size is None or entry.seq < size:
            certifier.take(entry)
        else:
            certifier.after(entry)
    return certifier.finish(priors)
