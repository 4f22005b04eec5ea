"""Linking: a draft becomes the next entry of the log, or is left out, and nothing in between.

`Chain` is the pure part of every log: it gives a draft its place, time, ordinal, salt and commitments, lets the
view judge the finished entry, and only then moves its head. The logs (log.py, sqlite.py) differ in where the
finished rows go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from .clock import Clock, Now
from .entry import (
    COMMITMENTS_MAX,
    INTEGER_MAX,
    LINE_MAX,
    STRING_MAX,
    UNREADABLE,
    ZERO,
    Entry,
    Salts,
    decode,
    leaf,
    line_of,
    opening,
    unfinished,
)
from .errors import AmendsError, BadValue, Damaged, Illegal
from .facts import BOOTED, GENESIS, STEPPED
from .fold import Timeline, View
from .keeping import KINDS as KEPT
from .keeping import Keeping
from .merkle import Peaks

OPENED, ENDED = "saga.opened", "saga.ended"  # a thread of the log begins and ends with these; the rest is not read here

STEP_US = 2_000_000  # a wall clock that moves by more against the boot clock was set
_LONG_STRING = re.compile(rb'(?<=[{,:[])"[^"]{%d,}"' % (STRING_MAX + 1))


class Draft:
    """A fact to be: its kind, its header fields, and its openings as encoded JSON objects with sorted keys.

    Encoded when handed in, so that a caller may reuse its objects. `up=True` asks for the boot clock in the entry.
    With more than 32 openings it becomes several entries, parts of one fact (FORMAT.md 3).
    """

    __slots__ = ("kind", "fields", "openings", "up")

    def __init__(self, kind: str, fields: dict[str, Any], openings: tuple[bytes, ...] = (), up: bool = False) -> None:
        self.kind, self.fields, self.openings, self.up = kind, fields, openings, up


Decide = Callable[[Any, Now], Sequence[Draft]]
"""decide(state, now) -> drafts: pure, runs inside the write transaction, raises Refused to leave itself out."""


class Row(NamedTuple):
    """A linked entry on its way to the file. back: seq of its saga's previous entry, -1 if none."""

    entry: Entry
    line: bytes
    back: int
    blob: bytes | None
    hash: bytes


class Thread(msgspec.Struct, array_like=True):
    """An open saga as the store sees it: seq of its first entry, seq of its newest, how many."""

    first: int
    head: int
    n: int


class Spoiled(Exception):
    """Decision `place` of a batch failed when facts of it had been folded: the fold must be made anew before it goes
    on, and the batch run again without that decision."""

    def __init__(self, place: int, error: BaseException) -> None:
        super().__init__(place, error)
        self.place, self.error = place, error


class Standing(msgspec.Struct):
    """What a memo of a chain holds."""

    size: int
    prev: str
    at: int
    threads: dict[str, Thread]
    timeline: Timeline
    keeping: Keeping


class Chain:
    """The head of a log and what it is folded into.

    `rows` are those of the batch in hand. `begun` (first, saga, named) and `ended` (head, first) collect the sagas
    that began and ended, for whoever stores them, who then clears the lists.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.size, self.prev, self.at = 0, ZERO, 0
        self.threads: dict[str, Thread] = {}
        self.timeline = Timeline([], 0, 0, (0, 0))
        self.keeping = Keeping({}, "", [], [])
        self.tree = Peaks()
        self.rows: list[Row] = []
        self.begun: list[tuple[int, str, bool]] = []
        self.ended: list[tuple[int, int]] = []
        self._salts = Salts()
        self._folding = False
        self._parted: Parted | None = None
        self._offset: int | None = None  # of the wall clock against the boot clock, when last looked at, microseconds

    def now(self, clock: Clock) -> Now:
        """The clocks as the next fact will see them: that the wall clock was set counts before anybody has told it,
        since whoever only waits tells nothing."""
        line, wall, up = self.timeline, clock.wall_us(), clock.boot_ms()
        here = bool(line.boots) and line.boots[-1] == clock.boot_id()
        return line.seen(wall, up, self.at, here and self._was_set(wall - up * 1000))

    def _was_set(self, offset: int) -> bool:
        """Whether the wall clock was set since the clocks were last looked at for a fact: here, or as the log says."""
        line, base = self.timeline, self._offset
        if base is None:
            if line.stepped or line.up[0] != len(line.boots):
                return False
            base = line.at - line.up[1] * 1000
        return not -STEP_US <= offset - base <= STEP_US

    def take_clock(self, clock: Clock) -> tuple[list[Row], Now]:
        """What is to be told of the clocks before anything else (a new boot, a wall clock that was set), and the
        moment of the decisions that follow."""
        line, boot, wall, up = self.timeline, clock.boot_id(), clock.wall_us(), clock.boot_ms()
        if not line.boots or line.boots[-1] != boot:
            drafts = [Draft(BOOTED, {"boot": boot}, up=True)]
            if wall + STEP_US < self.at:  # it came up behind the log: until it has caught up it tells nothing
                drafts.append(Draft(STEPPED, {}, up=True))
            now = line.seen(wall, up, self.at)._replace(boot=len(line.boots) + 1)
        else:
            offset = wall - up * 1000
            was_set, self._offset = self._was_set(offset), offset
            now = line.seen(wall, up, self.at)
            if not was_set:
                return [], now
            drafts = [Draft(STEPPED, {}, up=True)]
        rows, [(_, answer)] = self.take([(lambda view, now: drafts, drafts)], now)
        if isinstance(answer, BaseException):
            raise answer
        return rows, self.now(clock)

    def take(self, batch: Sequence[tuple[Decide, Any]], now: Now) -> tuple[list[Row], list[tuple[Any, Any]]]:
        """Run each decision in order; return the rows to write and, per waiter, its entries or its error.

        Raises Spoiled if a decision failed after one of its facts had been folded.
        """
        rows: list[Row] = []
        answers: list[tuple[Any, Any]] = []
        self.rows = rows
        view, link = self.view, self._link
        for place, (decide, waiter) in enumerate(batch):
            before, size = len(rows), self.size
            try:
                for draft in decide(view, now):
                    if len(draft.openings) > COMMITMENTS_MAX:
                        rows += [link(part, now) for part in _parts(draft)]
                    else:
                        rows.append(link(draft, now))
                if self._parted is not None:  # nothing could follow, from anybody
                    raise BadValue(f"{self._parted[0]} is told in parts, and part {self._parted[2]} does not come.")
            except Exception as error:
                # A view may promise to check first, and have a bug: what it raised but Illegal came from its middle.
                # And what is not one of our errors may be a signal handler's: it strikes between any two instructions.
                ours = isinstance(error, AmendsError)
                if not ours or self.size > size or self._folding and not isinstance(error, Illegal):
                    raise Spoiled(place, error) from error
                self._folding = False
                answers.append((waiter, error))
            else:
                answers.append((waiter, [row[0] for row in rows[before:]] if waiter is not None else None))
        self.tree.extend([row[4] for row in rows])
        return rows, answers

    def _link(self, draft: Draft, now: Now) -> Row:
        fields = draft.fields
        saga = fields.get("saga", "")
        thread = self.threads.get(saga)
        at = now.at if now.at > self.at else self.at + 1
        blob, salt = None, ""
        c: tuple[str, ...] = ()
        if draft.openings:
            for body in draft.openings:
                if body[:1] != b"{" or body[-1:] != b"}" or b"\n" in body:
                    raise BadValue(f"An opening of the {draft.kind} entry is no JSON object on one line.")
            lines = [opening(self._salts.take(), body) for body in draft.openings]
            blob = lines[0] if len(lines) == 1 else b"".join(lines)
            c = tuple([sha256(line).hexdigest() for line in lines])
        else:
            salt = self._salts.take().decode()
        up = (now.boot or 1, now.up) if draft.up else ()
        n = thread.n + 1 if thread else +bool(saga)
        entry = Entry(self.size, self.prev, at, draft.kind, n=n, up=up, salt=salt, c=c, **fields)
        line = line_of(entry)
        # What would not be read back is not written. Quotes, backslashes and controls come out of the encoder escaped;
        # the shortest line with a string that is too long has 405 bytes.
        if not line.isascii() or b"\\" in line or len(line) > 400:
            _check(entry, line)
        if entry.use:
            _check_use(entry)
        try:
            decode(line)  # a header of another type or range would be read by nobody, and the log by nobody after it
        except UNREADABLE as error:
            raise BadValue(f"The {entry.kind} entry would not be read back: {error}.") from None
        self._folding = True
        back = self._fold(entry, thread)
        self._folding = False
        digest = leaf(line)
        self.size, self.prev, self.at = entry.seq + 1, digest.hex(), at
        return Row(entry, line, back, blob, digest)

    def _fold(self, entry: Entry, thread: Thread | None) -> int:
        """Let the view and the threads take in an entry; return the seq of its saga's previous one, or -1.

        Raises Illegal with nothing changed.
        """
        saga, kind = entry.saga, entry.kind
        if (kind == GENESIS) != (entry.seq == 0):
            raise Illegal("A log begins with log.opened, and has no other.")
        if entry.part or self._parted:
            if wrong := misplaced(self._parted, entry):
                raise Illegal(wrong)
        if saga and (thread is None) != (kind == OPENED):
            raise Illegal(f"{kind} for a saga that is {'open already' if thread else 'not open'}.")
        if kind in KEPT:
            self.keeping.check(entry)
        if entry.up or kind == BOOTED:
            lived = self.timeline.at_entry(entry)
            self.view.fold(entry, lived)
            self.timeline.fold(entry, lived)
        elif not unfinished(entry):
            self.view.fold(entry, self.timeline.lived)
        if entry.part or self._parted:
            self._parted = after_part(entry)
        if not saga:
            if kind in KEPT:
                self.keeping.fold(entry)
            return -1
        if thread is None:
            self.threads[saga] = Thread(entry.seq, entry.seq, 1)
            self.begun.append((entry.seq, saga, bool(entry.c)))
            return -1
        back, thread.head, thread.n = thread.head, entry.seq, entry.n
        if kind == ENDED and not unfinished(entry):
            del self.threads[saga]
            self.ended.append((entry.seq, thread.first))
        return back

    def follow(self, entry: Entry, line: bytes) -> bytes:
        """Take in an entry that is written already (at open, or by another process); return its hash."""
        if entry.seq != self.size or entry.prev != self.prev:
            raise _damaged(self.size, "does not follow the one before it")
        thread = self.threads.get(entry.saga) if entry.saga else None
        if entry.n != (thread.n + 1 if thread else +bool(entry.saga)):
            raise _damaged(entry.seq, "is out of order in its saga")
        try:
            self._fold(entry, thread)
        except Illegal as error:
            raise _damaged(entry.seq, f"({entry.kind}) cannot follow what stands before it: {error.message}") from error
        digest = leaf(line)
        self.size, self.prev, self.at = entry.seq + 1, digest.hex(), entry.at
        return digest

    def skip(self, size: int, prev: str) -> None:
        """Go on behind records that were removed: whole sagas that had ended, of which no fold keeps anything. prev:
        the hash that the next entry names; the tree covers both."""
        self.size, self.prev = size, prev

    def stored(self) -> None:
        """What was collected for whoever stores it has been stored, by them or by another process."""
        self.rows = []
        self.begun.clear()
        self.ended.clear()
        self.tree.runs.clear()

    # -- memo ---------------------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """Everything but the tree (which is rebuilt from run roots and at most 255 lines) and the view."""
        return msgspec.msgpack.encode(
            Standing(self.size, self.prev, self.at, self.threads, self.timeline, self.keeping)
        )

    def load(self, blob: bytes) -> None:
        standing = msgspec.msgpack.decode(blob, type=Standing)
        self.size, self.prev, self.at = standing.size, standing.prev, standing.at
        self.threads, self.timeline, self.keeping = standing.threads, standing.timeline, standing.keeping


Parted = tuple[str, str, int, int]
"""Kind and saga of a fact in parts, and the part [i, of k] that must come next."""


def _parts(draft: Draft) -> list[Draft]:
    """A draft with more openings than an entry has room for, as parts of one fact. Raises BadValue for a genesis or the
    beginning of a saga.

    Header and first openings stand in the last part, so that the fact is there when it is whole, and not before.
    """
    if draft.kind in (GENESIS, OPENED):
        raise BadValue(f"{draft.kind} has {len(draft.openings)} openings; it has at most {COMMITMENTS_MAX}.")
    openings = draft.openings
    groups = [openings[at : at + COMMITMENTS_MAX] for at in range(0, len(openings), COMMITMENTS_MAX)]
    saga = {"saga": draft.fields["saga"]} if "saga" in draft.fields else {}
    count = len(groups)
    early = [Draft(draft.kind, {**saga, "part": (i, count)}, groups[i]) for i in range(1, count)]
    return [*early, Draft(draft.kind, {**draft.fields, "part": (count, count)}, groups[0], draft.up)]


def misplaced(due: Parted | None, entry: Entry) -> str:
    """Why an entry may not stand where `due` is to come (None: no fact is half told); empty if it may."""
    if due is not None and (entry.kind, entry.saga, *entry.part) != due:
        return f"part {due[2]} of {due[3]} of {due[0]} is missing"
    if unfinished(entry) and (entry.up or entry.kind in (GENESIS, OPENED, BOOTED)):
        return f"{entry.kind} is told in one entry, and a part but the last has no clock"
    if due is None and entry.part and (entry.part[0] != 1 or entry.part[1] < 2):
        return f"part {entry.part[0]} of {entry.part[1]} of {entry.kind} has no beginning"
    return ""


def after_part(entry: Entry) -> Parted | None:
    """What must come after this entry; None if anything may."""
    return (entry.kind, entry.saga, entry.part[0] + 1, entry.part[1]) if unfinished(entry) else None


def _check(entry: Entry, line: bytes) -> None:
    """Raise BadValue for a line that the grammar would not take back."""
    if len(line) > LINE_MAX:
        raise BadValue(f"The {entry.kind} entry would be {len(line)} bytes; an entry holds at most {LINE_MAX}.")
    if not line.isascii() or b"\\" in line or b"\x7f" in line:
        raise BadValue(f"The {entry.kind} entry would hold a quote, a backslash, or what is not printable ASCII.")
    if _LONG_STRING.search(line):
        raise BadValue(f"The {entry.kind} entry would hold a string of more than {STRING_MAX} characters.")
    if len(entry.c) > COMMITMENTS_MAX:
        raise BadValue(f"The {entry.kind} entry would have {len(entry.c)} openings; it has at most {COMMITMENTS_MAX}.")


def _check_use(entry: Entry) -> None:
    use = entry.use
    if len(use) > 1 and list(use) != sorted(use) or max(map(abs, use.values())) > INTEGER_MAX:
        raise BadValue(f"What the {entry.kind} entry uses is not sorted, or an amount is beyond 2^53.")


def _damaged(seq: int, why: str) -> Damaged:
    return Damaged(f"Record {seq} {why}.", next="Run `amends verify`.", seq=seq)
