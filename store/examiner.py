"""One log, row by row: whether each record is what was written, where it was written, and may stand there.

Every line is parsed by the strict grammar and hashed, every opening is hashed against its commitment, the tree is
grown again and compared at every stored root, every signature is checked, and every saga is followed from its first
record to its last. Pure: it is handed rows and keeps findings.

What is not there has to be explained: an opening by a later redaction, a run of records by compactions and by the
stubs that the tree needs of it. What is sealed is read if whoever examines has the key, and is counted if not.

After a break it goes on from what the next record says the hash was, so that one edited record is one finding and the
next edit is still seen. Which of two records was edited is told by the one after them. What another finding explains
is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from . import note, seal
from .anchor import Anchor
from .chain import ENDED, OPENED, Parted, Standing, Thread, after_part, misplaced
from .entry import INTEGER_MAX, VERSION, ZERO, Entry, leaf, parse, parse_opening, unfinished
from .errors import Illegal, Malformed
from .evidence import NONE, Stored, Stub
from .facts import BOOTED, COMPACTED, FORGOTTEN, GENESIS, REDACTED
from .fold import Timeline
from .holes import ABSENT, CONTROL, TWICE, Openings, Runs, Span
from .keeping import EVERYTHING, Keeping
from .keeping import KINDS as KEPT
from .keys import origin_of
from .merkle import Peaks
from .redact import about, control
from .squeeze import unshut

INTACT, TAMPERED, UNVERIFIED, ROLLED_BACK, FORKED, POLICY, MALFORMED = (
    "INTACT",
    "TAMPERED",
    "UNVERIFIED",
    "ROLLED-BACK",
    "FORKED",
    "POLICY",
    "MALFORMED",
)
EXITS = {INTACT: 0, TAMPERED: 1, UNVERIFIED: 3, ROLLED_BACK: 4, FORKED: 5, POLICY: 6, MALFORMED: 7}
WORST = (TAMPERED, FORKED, ROLLED_BACK, MALFORMED, POLICY, UNVERIFIED, INTACT)

CODES = {
    "E_CHAIN": (TAMPERED, "a record was edited after it was written"),
    "E_ORDER": (TAMPERED, "records were inserted, moved or renumbered"),
    "E_GAP": (TAMPERED, "records are missing"),
    "E_GENESIS": (TAMPERED, "the first record is not a genesis, or a later one is"),
    "E_ORDINAL": (TAMPERED, "a saga's records do not count up"),
    "E_ENDED": (TAMPERED, "a saga has a record after its end, or before its beginning"),
    "E_PART": (TAMPERED, "the parts of one fact are not together"),
    "E_REF": (TAMPERED, "a record refers to one that is not before it"),
    "E_TIME": (TAMPERED, "time stands still or goes back"),
    "E_CLOCK": (TAMPERED, "a record names a boot that the log does not know"),
    "E_ILLEGAL": (TAMPERED, "a record that the tables do not allow where it stands"),
    "E_BACK": (TAMPERED, "a pointer to a saga's previous record is wrong"),
    "E_OPENING": (TAMPERED, "an opening is not the one that was committed to"),
    "E_OPENING_MISSING": (TAMPERED, "an opening is gone and no record says why"),
    "E_OPENING_EXTRA": (TAMPERED, "an opening that nothing commits to"),
    "E_ROOT": (TAMPERED, "the records are not the ones that were signed"),
    "E_SIGNATURE": (TAMPERED, "a signature does not hold"),
    "E_HEAD": (TAMPERED, "the hash kept beside a record is not its own"),
    "E_UNSIGNED": (TAMPERED, "signatures are missing where they must be"),
    "E_TILE": (TAMPERED, "a stored run root is not the root of its records"),
    "E_CACHE": (TAMPERED, "a derived table is not what the records fold to"),
    "E_TABLE": (TAMPERED, "the file holds something that is not ours"),
    "E_PACK": (TAMPERED, "a packed run is not what was packed"),
    "E_STUB": (TAMPERED, "what is kept of removed records does not fit the log"),
    "E_COMPACT_INCOMPLETE": (TAMPERED, "a compaction names records that are still there"),
    "E_REDACT_INCOMPLETE": (TAMPERED, "what a record says was destroyed is still there"),
    "E_KEY_MISSING": (TAMPERED, "the key of a saga is gone and no record says why"),
    "E_CIPHERTEXT": (TAMPERED, "a sealed opening or a saga's key was altered, or lies in another's place"),
    "E_BUNDLE": (TAMPERED, "a bundle's files are not the ones that it names"),
    "E_PROOF": (TAMPERED, "a proof does not lead from a record, or an older head, to the signed root"),
    "E_FORKED": (FORKED, "two histories of one device"),
    "E_ROLLED_BACK": (ROLLED_BACK, "the log is shorter than this device remembers"),
    "E_IDENTITY": (ROLLED_BACK, "the log, the keys and the anchors are not of one device"),
    "E_GRAMMAR": (MALFORMED, "a record was written outside the grammar"),
    "E_NONCANONICAL": (MALFORMED, "a record was written in other bytes than its fields have"),
    "E_RANGE": (MALFORMED, "a value outside its range"),
    "E_VERSION": (MALFORMED, "written by a newer version"),
    "E_FILE": (MALFORMED, "the file cannot be read as a database"),
    "E_DISCLOSURE": (MALFORMED, "a disclosure was written outside its grammar"),
    "E_NOTE": (MALFORMED, "a signed note was written outside its grammar"),
    "E_CHECKPOINT": (MALFORMED, "a signed text is no head of a log"),
    "E_EMPTY": (UNVERIFIED, "there is no record"),
    "E_MEMO": (UNVERIFIED, "a memo of another version cannot be made again here"),
    "E_ANCHOR": (UNVERIFIED, "a note that was given says nothing about this log"),
    "E_WRONG_KEY": (UNVERIFIED, "the key that was given is not the one that openings are sealed under"),
    "E_KEYS_ABSENT": (UNVERIFIED, "openings are sealed and no saga's key is there"),
    "E_REQUIRED": (UNVERIFIED, "what was demanded cannot be shown"),
    "E_QUORUM": (POLICY, "too few of the witnesses that the policy trusts have signed"),
    "E_STRANGE": (POLICY, "the log is not one that the policy names"),
}
"""code -> (verdict, what it means). A finding's reason says the rest."""

_CAUSES = frozenset(("E_CHAIN", "E_ORDER", "E_GAP", "E_GRAMMAR", "E_NONCANONICAL", "E_RANGE", "E_PACK"))

ROOT_BYTES, SIGNED_BYTES = 32, 96
FINDINGS_MAX = 1000  # memory is bounded, however broken a log is
UNSIGNED_MAX = 1000  # a commit that takes the unsigned tail this far signs
LEVEL_MAX = 53  # of a stub

Unseal = Callable[[Entry, "seal.Part"], bytes | None]
"""unseal(entry, part) -> the opening's line, None if it cannot be read here. Raises Malformed for altered bytes."""


class Finding(NamedTuple):
    """One thing that does not add up; seq: the record it was found at, -1 for the file as a whole."""

    code: str
    seq: int
    reason: str

    def __str__(self) -> str:
        where = f"seq {self.seq}" if self.seq >= 0 else "the file"
        return f"{CODES[self.code][0]} {self.code} {where}: {self.reason}"


def worst(findings: Sequence[Finding]) -> str:
    """The verdict over all of these: INTACT for none."""
    verdicts = {CODES[finding.code][0] for finding in findings} or {INTACT}
    return next(verdict for verdict in WORST if verdict in verdicts)


class _Link:
    """A record whose hash is computed and waits for the next record to confirm it."""

    __slots__ = ("seq", "hash", "sig", "claim", "bad", "suspect")

    def __init__(self, seq: int, hash: bytes, sig: bytes | None, claim: bytes | None, bad: Finding | None) -> None:
        self.seq, self.hash, self.sig, self.claim, self.bad = seq, hash, sig, claim, bad
        self.suspect = False  # its `prev` is not the hash of the record before: one of the two was edited


class Examiner:
    """Takes in the rows of one log in order and keeps what does not add up."""

    def __init__(
        self,
        key: bytes = b"",
        view: Any = None,
        anchors: Sequence[Anchor] = (),
        *,
        payload: str = "",
        look: Callable[[int], bytes | None] = lambda seq: None,
        checkpoints: Iterable[tuple[int, bytes]] = (),
        unseal: Unseal = lambda entry, part: None,
    ) -> None:
        self.findings: list[Finding] = []
        self.more = 0  # findings beyond those
        self._codes: set[str] = set()
        self.size, self.at = 0, -1
        self.genesis: Entry | None = None
        self.tree = Peaks()
        self.tree_known = True
        self.signed_size = 0  # of the newest good signature
        self.unsigned: list[str] = []  # kinds after it that a commit signs for
        self.view, self.view_trouble = view, ""
        self.timeline = Timeline([], 0, 0, (0, 0))
        self.keeping = Keeping({}, "", [], [])
        self._anew: set[str] = set()  # begun under the id of one that was forgotten, and then removed
        self.threads: dict[str, Thread] = {}
        self.sagas = 0
        self.anchored = 0
        self.matched: list[Anchor] = []  # anchors that the tree agreed with
        self.passed: list[Anchor] = []  # anchors at sizes whose root cannot be computed any more
        self.began = 0  # at which place: what lies before is taken as given
        self.openings, self.runs = Openings(), Runs()
        self.read = self.unread = self.withheld = self.forgotten = 0  # openings
        self.seals: set[str] = set()  # ids of owners' keys that the log names
        self._payload, self._look, self._unseal = payload, look, unseal
        self._checkpoints: Iterator[tuple[int, bytes]] = iter(checkpoints)
        self._next_checkpoint = next(self._checkpoints, None)
        self._stop = 0  # the size at which the tree is to be compared next
        self._stubbed = -1  # first place of the stubs that no good root has covered yet
        self._ends_in_stub = False
        self._unfit = False  # a stub or record was left out, and nothing has been taken since
        self._bare = False  # nothing is kept beside the records
        self._after: bytes | None = None  # the hash that the next record must name, where a stub tells it
        self._key = key
        self._origin = origin_of(key) if key else ""
        self._anchors = sorted(anchors, key=lambda anchor: anchor.size)
        self._low: list[int] = []  # beside findings: where the cause of each could lie
        self._shift = 0
        self._held: list[_Link] = []
        self._leaves: list[bytes] = []
        self._root_bad = self._signature_bad = False
        self._parted: Parted | None = None
        self._hole = -1  # newest place after which a saga's count is taken as it comes

    # -- findings -----------------------------------------------------------------------------------------------------

    def find(self, code: str, seq: int, reason: str, low: int | None = None) -> None:
        """Keep a finding; low: a cause at or after it explains this one away. Beyond a thousand they are counted."""
        if len(self.findings) >= FINDINGS_MAX and code in self._codes:
            self.more += 1
            return
        self._codes.add(code)
        self.findings.append(Finding(code, seq, reason))
        self._low.append(seq + 1 if low is None else low)

    def result(self) -> list[Finding]:
        """What was found, in order, without what another finding explains."""
        causes = [f.seq for f in self.findings if f.code in _CAUSES]
        stubs = [f.seq for f in self.findings if f.code == "E_STUB"]
        kept: dict[tuple[str, int], Finding] = {}
        for finding, low in zip(self.findings, self._low, strict=True):
            why = causes if finding.code == "E_STUB" else causes + stubs
            explained = finding.code not in _CAUSES and any(low <= cause <= finding.seq for cause in why)
            if not explained:
                kept.setdefault((finding.code, finding.seq), finding)
        return sorted(kept.values(), key=lambda finding: finding.seq if finding.seq >= 0 else 1 << 60)

    # -- one row ------------------------------------------------------------------------------------------------------

    def begin_at(self, tree: Peaks, key: bytes, before: bytes | None) -> None:
        """Take the first records as given: their tree, the log's key, the newest one's line. What they began is not
        known."""
        self.tree, self.began = tree, tree.size
        self._key, self._origin = key, origin_of(key)
        self.size, self._hole = tree.size, tree.size - 1
        self.signed_size = tree.size
        self._after = leaf(before) if before is not None else None
        while self._next_checkpoint and self._next_checkpoint[0] < tree.size:
            self._next_checkpoint = next(self._checkpoints, None)
        self._compare()

    def take_stub(self, stub: Stub) -> bool:
        """What is kept of removed records, in order of places. False for what is none."""
        start, level, hash = stub
        if not 0 <= level <= LEVEL_MAX or len(hash) != ROOT_BYTES or start < 0 or start & ((1 << level) - 1):
            self._no_stub(max(0, start), "it is no stub: a place that its width divides, and a hash, are asked")
            return False
        if start < self.size:
            self._no_stub(start, "a stub stands for records that are there, or that another one stands for")
            return False
        if start > self.size:
            self._missing(self.size, start, None)
        self._settle()
        self._grow()
        if start == 0:
            self.find("E_STUB", 0, "the first record is never removed")
        if self._parted:
            self.find("E_PART", start, f"part {self._parted[2]} of {self._parted[3]} is missing", low=start - 1)
            self._parted = None
        if self.tree_known:
            self.tree.skip(level, hash)
        self._stubbed = start if self._stubbed < 0 else self._stubbed
        self._after = hash if level == 0 else None
        self.size = start + (1 << level)
        self.runs.gap(start, self.size - 1)
        self._ends_in_stub = True
        if self.tree_known and self.size >= self._stop:
            self._compare()
        return True

    def _no_stub(self, seq: int, why: str) -> None:
        """The tree cannot be grown past it. One is told of those that lie together."""
        if not self._unfit:
            self.find("E_STUB", seq, why)
        self._unfit, self.tree_known = True, False

    def take(self, row: Stored) -> Entry | None:
        """One row, in order of places. Returns its entry if its line has the grammar."""
        seq, line = row.seq, row.line
        if not 0 <= seq <= INTEGER_MAX:
            self.find("E_TABLE", -1, f"a record at place {seq}")
            return None
        if seq < self.size:
            self._no_stub(seq, "a stub stands for a record that is there")
            return None
        self._ends_in_stub = self._unfit = False
        self._bare = row.back is None
        entry: Entry | None = None
        bad = None
        try:
            entry = parse(line)
        except Malformed as error:
            bad = Finding(str(error.facts["finding"]), seq, error.message)
            self._hole = seq
        claim = bytes.fromhex(entry.prev) if entry else None
        link = _Link(seq, leaf(line), row.sig, claim, bad)
        self._place(link, entry)
        if entry is None:
            return None
        self._openings(entry, row)
        self._events(entry, row)
        return entry

    def _place(self, link: _Link, entry: Entry | None) -> None:
        seq, expected = link.seq, self.size
        shift = seq - entry.seq if entry else self._shift
        after, self._after = self._after, None
        self.size = seq + 1
        if seq > expected:
            self._missing(expected, seq, link.claim)
        elif after is not None and link.claim not in (None, after):
            self.find("E_STUB", seq, "it names another record before it than what is kept of that one", low=seq)
            self.tree_known = False
        elif shift != self._shift and entry and not self._follows(link):
            if self._shift == 0:
                self.find("E_ORDER", seq, f"at place {seq} lies a record that says it is {entry.seq}")
            self._break(seq)
        elif self._held:
            if entry and shift != self._shift:  # where it belongs by its hash, so its number was edited, or written so
                link.bad = Finding("E_ORDER", seq, f"at place {seq} lies a record that says it is {entry.seq}")
            self._join(link)
            return
        elif link.claim is not None and seq == 0 and link.claim.hex() != ZERO:
            link.suspect = True
        self._shift = shift
        self._held.append(link)

    def _follows(self, link: _Link) -> bool:
        return bool(self._held) and link.claim == self._held[-1].hash

    def _missing(self, expected: int, seq: int, claim: bytes | None) -> None:
        """Nothing lies where the next record is expected, up to this place."""
        missing = seq - expected
        what = f"record {expected} is" if missing == 1 else f"records {expected} to {seq - 1} are"
        self.find("E_GAP", expected, f"{what} missing")
        self.runs.gap(expected, seq - 1)
        self._settle()
        if missing == 1 and claim is not None:
            self._leaf(claim)
        else:
            self.tree_known = False
        self._hole = seq

    def _break(self, seq: int) -> None:
        self._settle()
        self.tree_known, self._hole = False, seq

    def _join(self, link: _Link) -> None:
        """The next link says what the hash of the one before was."""
        before = self._held[-1]
        if link.claim is None:
            if before.suspect:
                self._settle()
            self._held.append(link)
        elif link.claim == before.hash and not before.suspect and not before.bad and len(self._held) == 1:
            self._leaf(before.hash)
            if before.sig is not None:
                self._check_head(before)
            self._held = [link]
        elif link.claim == before.hash:
            if before.bad:
                self.find(*before.bad)
            self._confirm()
            self._flush()
            self._held = [link]
        elif before.suspect or before.bad:
            reason = before.bad.reason if before.bad else _differs(before, link.claim)
            self.find("E_CHAIN", before.seq, f"edited after it was written: {reason}")
            self._hole = max(self._hole, before.seq)
            self._and_the_one_before()
            before.suspect, before.hash = False, link.claim
            self._flush()
            self._held = [link]
        else:
            link.suspect = True
            self._held.append(link)

    def _and_the_one_before(self) -> None:
        """The newest held link was edited. Whether the one before it was too is told by the hash beside that one."""
        if len(self._held) < 2:
            return
        edited, newest = self._held[-2:]
        kept = edited.sig
        if kept is not None and len(kept) == ROOT_BYTES and kept != edited.hash and newest.claim in (None, kept):
            self.find("E_CHAIN", edited.seq, f"edited after it was written: {_differs(edited, kept)}")
            edited.hash = kept

    def _confirm(self) -> None:
        """The newest held link is as it was written; if it disagrees with the one before, that one was edited."""
        newest = self._held[-1]
        if newest.suspect:
            newest.suspect = False
            if len(self._held) > 1:
                edited = self._held[-2]
                assert newest.claim is not None
                self.find("E_CHAIN", edited.seq, f"edited after it was written: {_differs(edited, newest.claim)}")
                self._hole = max(self._hole, edited.seq)
                edited.hash = newest.claim
            else:
                self.find("E_CHAIN", newest.seq, "the first record names one before it")

    def _settle(self) -> None:
        """No next record will tell: go by the hash or root kept beside the newest, else blame the newest."""
        if not self._held:
            return
        newest = self._held[-1]
        if newest.suspect and newest.sig is not None and len(newest.sig) == ROOT_BYTES and newest.sig == newest.hash:
            self._confirm()
        elif newest.suspect and self._root_says_newest_is_good(newest):
            self._confirm()
        elif newest.suspect or (newest.bad and newest.sig is not None and newest.sig != newest.hash):
            reason = newest.bad.reason if newest.bad else "it does not name the record before it"
            self.find("E_CHAIN", newest.seq, f"edited after it was written: {reason}")
            self.tree_known = False
        elif newest.bad:
            self.find(*newest.bad)
        self._flush()
        self._held = []

    def _root_says_newest_is_good(self, newest: _Link) -> bool:
        if newest.sig is None or len(newest.sig) != SIGNED_BYTES or newest.claim is None or len(self._held) < 2:
            return False
        self._grow()
        tree = self.tree.copy()
        tree.extend([newest.claim, newest.hash])
        return tree.root() == newest.sig[:ROOT_BYTES]

    def _flush(self) -> None:
        """What is held is decided: its hashes go into the tree, and what lies beside them is checked."""
        for link in self._held:
            self._leaf(link.hash)
            if link.sig is not None:
                self._check_head(link)

    def _leaf(self, hash: bytes) -> None:
        leaves = self._leaves
        leaves.append(hash)
        if len(leaves) >= 512 or self.tree.size + len(leaves) >= self._stop:
            self._grow()

    def _grow(self) -> None:
        self.tree.extend(self._leaves)
        self._leaves = []
        self._compare()

    def _compare(self) -> None:
        """Hold the tree as it stands against the anchors and signatures of this very size."""
        size = self.tree.size
        while self._next_checkpoint and self._next_checkpoint[0] <= size:
            at, sig = self._next_checkpoint
            if at < size or at <= 0 and self.tree_known:
                self.find("E_STUB", size - 1, f"a signature over {at} records lies where the tree has no such size")
            elif len(sig) != SIGNED_BYTES:
                self.find("E_SIGNATURE", at - 1, f"{len(sig)} bytes where a signed root belongs")
            else:
                self._check_root(at, sig)
            self._next_checkpoint = next(self._checkpoints, None)
        while self._anchors and self._anchors[0].size <= size:
            self._check_anchor(self._anchors.pop(0))
        anchor = self._anchors[0].size if self._anchors else 1 << 62
        self._stop = min(anchor, self._next_checkpoint[0]) if self._next_checkpoint else anchor

    def _check_anchor(self, anchor: Anchor) -> None:
        size = anchor.size
        if not self.tree_known:
            return
        if size < self.tree.size:
            self.passed.append(anchor)
        elif self.tree.root() != anchor.root:
            whose = f"this device signed another history of the first {size} records ({anchor.path})"
            self.find("E_FORKED", size - 1, whose)
        else:
            self.anchored = max(self.anchored, size)
            self.matched.append(anchor)

    # -- heads --------------------------------------------------------------------------------------------------------

    def _check_head(self, link: _Link) -> None:
        sig, seq = link.sig, link.seq
        assert sig is not None
        if len(sig) == ROOT_BYTES:
            if sig != link.hash:
                self.find("E_HEAD", seq, f"the hash kept beside it is {sig.hex()[:16]}…, not {link.hash.hex()[:16]}…")
            return
        if len(sig) != SIGNED_BYTES:
            self.find("E_SIGNATURE", seq, f"{len(sig)} bytes where a hash or a signed root belongs")
            return
        self._grow()
        self._check_root(seq + 1, sig)

    def _check_root(self, size: int, sig: bytes) -> None:
        """Hold a signed root against the tree, which stands at its size."""
        root, seq = sig[:ROOT_BYTES], size - 1
        sound = note.verify(self._key, note.checkpoint_body(self._origin, size, root), sig[ROOT_BYTES:])
        right = not self.tree_known or self.tree.root() == root
        if not right and not self._root_bad and self._stubbed >= 0:
            first = self._stubbed
            self.find(
                "E_STUB", first, f"records and stubs from {first} to {seq} are not what was signed for", low=first
            )
            self.tree_known = False
        elif not right and not self._root_bad:
            self.find("E_ROOT", seq, f"the first {size} records do not have the root that {_by(sound)} them")
        elif right and not sound and not self._signature_bad:
            self.find("E_SIGNATURE", seq, f"the signature over the first {size} records does not hold", low=0)
        self._root_bad, self._signature_bad = not right, not sound
        if right and sound and self.tree_known:
            self.signed_size = max(size, self.signed_size)
            self.unsigned, self._stubbed = [], -1

    # -- one entry ----------------------------------------------------------------------------------------------------

    def _openings(self, entry: Entry, row: Stored) -> None:
        if self._payload == NONE and row.blob is None:
            self.withheld += len(entry.c)
        elif seal.is_sealed(row.blob):
            self._sealed(entry, row)
        else:
            self._plain(entry, row)

    def _plain(self, entry: Entry, row: Stored) -> None:
        try:
            lines = _lines(unshut(row.blob)) if row.blob is not None else []
        except Malformed as error:
            self.find("E_OPENING" if entry.c else "E_OPENING_EXTRA", row.seq, error.message, low=row.seq)
            return
        if row.blob == b"":
            self.find("E_OPENING_EXTRA", row.seq, "an empty opening lies beside it", low=row.seq)
        place = 0
        for i, commitment in enumerate(entry.c):
            line = lines[place] if place < len(lines) else None
            if line is not None and sha256(line).hexdigest() == commitment:
                place += 1
                self.read += 1
                self._opening_grammar(line, row.seq)
            elif line is None or sha256(line).hexdigest() in entry.c[i + 1 :]:
                self.openings.missing(row.seq, i, control(entry, i))
            else:
                place += 1
                self.find("E_OPENING", row.seq, f"opening {i} is not the one that was committed to", low=row.seq)
        if place < len(lines):
            self.find("E_OPENING_EXTRA", row.seq, f"{len(lines) - place} openings that nothing commits to", low=row.seq)

    def _sealed(self, entry: Entry, row: Stored) -> None:
        """Without the key: whether they are shaped as sealed openings are, and which are there."""
        assert row.blob is not None
        try:
            parts = {part.place: part for part in seal.parts(row.blob)}
        except Malformed as error:
            self.find("E_OPENING" if entry.c else "E_OPENING_EXTRA", row.seq, error.message, low=row.seq)
            return
        for i in range(len(entry.c)):
            if i in parts:
                self._sealed_one(entry, row.seq, parts.pop(i))
            else:
                self.openings.missing(row.seq, i, control(entry, i))
        if parts:
            self.find("E_OPENING_EXTRA", row.seq, f"{len(parts)} openings that nothing commits to", low=row.seq)

    def _sealed_one(self, entry: Entry, seq: int, part: seal.Part) -> None:
        try:
            line = self._unseal(entry, part)
        except Malformed as error:
            self.find("E_CIPHERTEXT", seq, f"opening {part.place}: {error.message}", low=seq)
            return
        if line is None:
            self.unread += 1
        elif sha256(line).hexdigest() != entry.c[part.place]:
            self.find("E_OPENING", seq, f"opening {part.place} is not the one that was committed to", low=seq)
        else:
            self.read += 1
            self._opening_grammar(line, seq)

    def _opening_grammar(self, line: bytes, seq: int) -> None:
        try:
            parse_opening(line)
        except Malformed as error:
            self.find("E_GRAMMAR", seq, error.message)

    def _events(self, entry: Entry, row: Stored) -> None:
        seq = row.seq
        if entry.at <= self.at:
            self.find("E_TIME", seq, f"its time {entry.at} is not after the one before it, {self.at}", low=seq - 1)
        self.at = entry.at
        if entry.ref and entry.ref >= entry.seq:
            self.find("E_REF", seq, f"it refers to record {entry.ref}, which is not before it", low=seq)
        if (seq == 0) != (entry.kind == GENESIS):
            self.find("E_GENESIS", seq, f"a {entry.kind} record at place {seq}", low=seq)
        if seq == 0:
            self._begin(entry)
        self._parts(entry, seq)
        back = self._thread(entry, seq) if entry.saga else -1
        if back is not None and row.back is not None and row.back != back:
            self.find("E_BACK", seq, f"its saga's previous record is {back}, the pointer says {row.back}", low=back)
        self._fold(entry, seq)

    def _begin(self, entry: Entry) -> None:
        self.genesis = entry
        if entry.v > VERSION:
            self.find("E_VERSION", 0, f"format {entry.v}; this program knows up to {VERSION}")
        try:
            key = bytes.fromhex(entry.log)
        except ValueError:
            key = b""
        if not self._key:
            self._key = key
            self._origin = origin_of(key)
        elif key != self._key:
            self.find("E_IDENTITY", 0, "the first record names another key than this device has", low=0)
            self._key, self._origin, self._anchors = key, origin_of(key), []

    def _parts(self, entry: Entry, seq: int) -> None:
        """A fact in several entries is told without anything in between."""
        due, self._parted = self._parted, after_part(entry)
        wrong = misplaced(due, entry)
        if wrong and self._hole < seq - 1:
            self.find("E_PART", seq, wrong, low=seq - 1)

    def _thread(self, entry: Entry, seq: int) -> int | None:
        """Follow a saga; return the place of its previous record, None if a hole hides it."""
        place = seq - self._shift
        thread = self.threads.get(entry.saga)
        hidden = self._hole >= 0 and (thread is None or thread.head <= self._hole)
        if thread is None and (entry.kind != OPENED or entry.n != 1):
            if not hidden:
                self.find("E_ENDED", seq, f"{entry.kind} of a saga that is not open", low=0)
        elif thread is not None and entry.kind == OPENED:
            self.find("E_ENDED", seq, "a saga is opened that is open already", low=0)
        elif thread is not None and entry.n != thread.n + 1 and not hidden:
            self.find("E_ORDINAL", seq, f"record {entry.n} of its saga follows record {thread.n}", low=thread.head)
        back: int | None = thread.head if thread else -1
        if thread is None:
            self.sagas += entry.kind == OPENED
            if entry.saga in self.keeping.forgotten:
                self._anew.add(entry.saga)
            thread = self.threads[entry.saga] = Thread(place if entry.kind == OPENED else -1, 0, 0)
        thread.head, thread.n = place, entry.n
        if entry.kind == ENDED and not unfinished(entry):
            del self.threads[entry.saga]
            self.unsigned.append(entry.kind)
            self.ended(entry.saga, thread)
        return None if hidden else back

    def ended(self, saga: str, thread: Thread) -> None:
        """Called at a saga's last record, for whoever compares what is kept about it."""

    def _fold(self, entry: Entry, seq: int) -> None:
        timeline = self.timeline
        lived = timeline.lived
        if (entry.up or entry.kind == BOOTED) and not self.began:
            try:
                lived = timeline.at_entry(entry)
                timeline.fold(entry, lived)
            except Illegal as error:
                self.find("E_CLOCK", seq, error.message, low=0)
                return
        if entry.kind in KEPT and not self._keep(entry, seq):
            return
        if self.view is None or self.view_trouble or unfinished(entry):
            return
        try:
            self.view.fold(entry, lived)
        except Exception as error:  # whatever a record from anywhere makes a fold do, it is a finding about the record
            self.view_trouble = f"record {seq}"
            self.find("E_ILLEGAL", seq, f"{entry.kind} cannot follow what stands before it: {words(error)}", low=0)

    def _keep(self, entry: Entry, seq: int) -> bool:
        """What the log does with itself. From a later start on, what stood before is not known, and not judged."""
        if entry.kind == REDACTED:
            self._redacted(entry, seq)
        elif entry.kind == COMPACTED:
            self._compacted(entry, seq)
        if entry.seal:
            self.seals.add(entry.seal)
        if self.began:
            return True
        try:
            self.keeping.check(entry)
            self._allowed(entry)
        except Illegal as error:
            self.find("E_ILLEGAL", seq, error.message, low=0)
            return False
        self.keeping.fold(entry)
        self._anew.discard(entry.target if entry.kind == FORGOTTEN else "")
        return True

    def destroyed(self) -> frozenset[str]:
        """The sagas of which no key is to be there, by header id."""
        return frozenset(self.keeping.forgotten) - self._anew

    def _allowed(self, entry: Entry) -> None:
        """Raise Illegal for what a hold forbids."""
        target = entry.target if entry.kind == FORGOTTEN else EVERYTHING if entry.kind == COMPACTED else ""
        hold = self.keeping.held(target) if target else None
        if hold is not None:
            raise Illegal(f"{entry.kind} while the hold of record {hold} stands.")

    def _redacted(self, entry: Entry, seq: int) -> None:
        for at, place in entry.places:
            if at >= entry.seq:
                self.find("E_ILLEGAL", seq, f"it names record {at}, which is not before it", low=seq)
            elif at >= self.began and at not in self.runs:
                self._redacted_one(seq, at, place)

    def _redacted_one(self, seq: int, at: int, place: int) -> None:
        said = self.openings.name(at, place) if self._payload != NONE else ""
        if said == TWICE:
            self.find("E_ILLEGAL", seq, f"opening {place} of record {at} is redacted a second time", low=0)
        elif said == CONTROL:
            self.find("E_ILLEGAL", seq, f"record {at} is one that nobody may redact", low=0)
        elif said == ABSENT:
            self._not_redacted(seq, at, place)
        if self.keeping.holds and (hold := self._held_at(at)) is not None:
            self.find("E_ILLEGAL", seq, f"record {at} is redacted while the hold of record {hold} stands", low=0)

    def _not_redacted(self, seq: int, at: int, place: int) -> None:
        entry = self._entry_at(at)
        if entry is not None and place < len(entry.c):
            self.find(
                "E_REDACT_INCOMPLETE", at, f"record {seq} says that opening {place} was destroyed; it is there", low=at
            )
        elif entry is not None:
            self.find("E_ILLEGAL", seq, f"record {at} never had an opening {place}", low=0)

    def _held_at(self, at: int) -> int | None:
        entry = self._entry_at(at)
        return self.keeping.held(about(entry)) if entry else None

    def _entry_at(self, seq: int) -> Entry | None:
        line = self._look(seq)
        try:
            return parse(line) if line is not None else None
        except Malformed:
            return None  # a finding already

    def _compacted(self, entry: Entry, seq: int) -> None:
        runs = [Span(*run) for run in entry.runs]
        before = 0
        for run in runs:
            if not before < run.first <= run.last < entry.seq:
                self.find("E_ILLEGAL", seq, "the runs that it names are not sorted, apart and before it", low=seq)
                return
            before = run.last
        if sum(run.last - run.first + 1 for run in runs) != entry.count:
            self.find("E_ILLEGAL", seq, "it counts other than the records that it names", low=seq)
        self.runs.name([Span(max(run.first, self.began), run.last) for run in runs if run.last >= self.began])

    @property
    def origin(self) -> str:
        """Of the key that the signatures were checked with."""
        return self._origin

    @property
    def newest_hash(self) -> bytes:
        """Of the line taken last."""
        return self._held[-1].hash if self._held else b""

    def standing(self) -> Standing:
        """What a memo at this place must say about open sagas and clocks."""
        return Standing(self.size, self.newest_hash.hex(), self.at, self.threads, self.timeline, self.keeping)

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        last = self._held[-1] if self._held else None
        self._settle()
        self._grow()
        if self._parted:
            self.find("E_PART", self.size - 1, f"part {self._parted[2]} of {self._parted[3]} is missing", low=0)
        if self._ends_in_stub:
            self.find("E_STUB", self.size - 1, "the newest record is never removed", low=0)
        self._missed_anchors()
        self._unexplained_openings()
        self._unexplained_runs()
        self._signed(last)

    def _missed_anchors(self) -> None:
        end = max(0, self.size - 1)
        for anchor in self._anchors:
            if anchor.size > self.size:
                reason = f"there are {self.size} records and this device signed {anchor.size} ({anchor.path})"
                self.find("E_ROLLED_BACK", end, reason)
                break
        if self._next_checkpoint and self.tree_known:
            size = self._next_checkpoint[0]
            self.find("E_STUB", end, f"a signature over {size} records lies beside {self.size}", low=0)

    def _unexplained_openings(self) -> None:
        gone = self.destroyed()
        for seq, place in self.openings.unexplained():
            entry = self._entry_at(seq) if gone else None
            if entry is not None and entry.saga in gone:
                self.forgotten += 1
            else:
                self.find("E_OPENING_MISSING", seq, f"opening {place} is gone and no record says why", low=seq)

    def _unexplained_runs(self) -> None:
        for first, last in self.runs.unexplained():
            self.find("E_GAP", first, f"records {first} to {last} were removed and no record says why")
        for first, last in self.runs.unremoved():
            self.find("E_COMPACT_INCOMPLETE", first, f"records {first} to {last} are there, and are said to be removed")
        for first, last in self.runs.doubled():
            self.find("E_ILLEGAL", first, f"records {first} to {last} are said to be removed twice", low=first)

    def _signed(self, last: _Link | None) -> None:
        if last is not None and last.sig is None and not self._bare:
            self.find(
                "E_UNSIGNED", last.seq, "the last record has neither a signature nor its hash beside it", low=last.seq
            )
        if self.size and self.tree_known and not self._root_bad and not self._signature_bad:
            tail = self.size - self.signed_size
            if not self.signed_size:
                self.find("E_UNSIGNED", 0, "no record of this log is under a signature", low=0)
            elif tail > UNSIGNED_MAX or tail and self._bare:
                self.find("E_UNSIGNED", self.size - 1, f"the last {tail} records are under no signature", low=0)
            elif self.unsigned:
                self.find("E_UNSIGNED", self.size - 1, "a saga's end is under no signature", low=0)


def _by(sound: bool) -> str:
    return "was signed for" if sound else "is kept for"


def _differs(link: _Link, claim: bytes) -> str:
    return f"the record after it says its hash was {claim.hex()[:16]}…, it is {link.hash.hex()[:16]}…"


def _lines(blob: bytes) -> list[bytes]:
    """Split at LF only."""
    parts = blob.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def words(error: Exception) -> str:
    """What an error says."""
    return str(getattr(error, "message", "") or error or type(error).__name__)
