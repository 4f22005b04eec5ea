"""`verify` names the first thing that does not add up, one finding a fault, and says what it did not prove.

It trusts nothing that the file says about itself. The records are examined one by one (examiner.py), every cache (run
roots, saga rows, memos) is made again and compared, the file must hold our tables and nothing else, and the head is
held against what was remembered outside the database (identity.py).

What a log cannot show is said each time: what was never written, whether what was written is true, and what is
younger than the last head that somebody else remembers. Memory is bounded by open sagas, not by the log's length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .anchor import Anchor
from .anchor import read_all as read_anchors
from .chain import OPENED, Thread
from .entry import Entry
from .errors import Damaged, Malformed, TooNew, YouErred
from .evidence import DatabaseError, Evidence, StoredMemo
from .examiner import CODES, EXITS, INTACT, ROLLED_BACK, WORST, Examiner, Finding, words
from .home import Home
from .identity import identity_of
from .keys import Identity
from .merkle import RUN_BITS, Peaks
from .sqlite import _view_name as view_name


class Verdict(msgspec.Struct):
    """What `verify` says. level: "none", "chain" (whoever holds the file could have made it), "signed", "local anchor".
    root is hex."""

    verdict: str
    level: str
    size: int
    root: str
    findings: list[Finding]
    not_proved: list[str]

    @property
    def exit(self) -> int:
        return EXITS[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """The stable keys of `verify --json`."""
        findings = [{"code": f.code, "seq": f.seq, "reason": f.reason} for f in self.findings]
        return {
            "verdict": self.verdict,
            "level": self.level,
            "size": self.size,
            "root": self.root,
            "findings": findings,
            "not_proved": self.not_proved,
        }


# ---- what is kept beside a log --------------------------------------------------------------------------------------


class _Caches:
    """Holds run roots, saga rows and memos of a file against what its records fold to."""

    def __init__(self, evidence: Evidence, examiner: Examiner, view_name: str) -> None:
        self._evidence, self._examiner, self._view_name = evidence, examiner, view_name
        self._memos = sorted(evidence.memos(), key=lambda memo: memo.size)
        self._named: dict[int, bool] = {}
        self._runs = 0
        self.unseen: list[str] = []  # memos of views that were not given
        examiner.ended = self.ended  # type: ignore[method-assign]

    def after(self, entry: Entry | None) -> None:
        """Look at what stands at this very place."""
        examiner = self._examiner
        if entry is not None and entry.kind == OPENED:
            self._named[entry.seq] = bool(entry.c)
        while self._memos and self._memos[0].size <= examiner.size:
            self._memo(self._memos.pop(0))
        if examiner.tree.runs:
            self._check_runs()

    def ended(self, saga: str, thread: Thread) -> None:
        self._saga(saga, thread, 0)

    def finish(self) -> None:
        examiner, evidence = self._examiner, self._evidence
        self._check_runs()
        for saga, thread in examiner.threads.items():
            self._saga(saga, thread, 1)
        for memo in self._memos:
            self._wrong_memo(memo, f"it stands at {memo.size} records, there are {examiner.size}")
        if (there := evidence.count("saga")) != examiner.sagas:
            self._find("E_CACHE", f"there are {there} saga rows for {examiner.sagas} sagas")
        if (there := evidence.count("tile")) != self._runs and examiner.tree_known:
            self._find("E_TILE", f"there are {there} run roots for {self._runs} full runs")
        if there := evidence.count("pack"):
            self._find("E_PACK", f"{there} packed runs, which this version does not write")

    def _find(self, code: str, reason: str, seq: int | None = None) -> None:
        at = self._examiner.size - 1 if seq is None else seq
        self._examiner.find(code, at, reason, low=0)

    def _check_runs(self) -> None:
        examiner = self._examiner
        for n, root in examiner.tree.runs:
            self._runs += 1
            stored = self._evidence.stored_run(n)
            if examiner.tree_known and stored != root:
                said = "is missing" if stored is None else "is not the root of its records"
                first, last = n << RUN_BITS, (n + 1 << RUN_BITS) - 1
                examiner.find("E_TILE", last, f"the root of run {n} (records {first} to {last}) {said}")
        examiner.tree.runs.clear()

    def _saga(self, saga: str, thread: Thread, open: int) -> None:
        """The row is written when a saga begins and when it ends, so an open one's newest place is its first."""
        if thread.first < 0:
            return  # its beginning was a finding already
        head, named = thread.first if open else thread.head, int(self._named.pop(thread.first, 0))
        should = (thread.first, saga, head, open, named)
        row = self._evidence.saga(thread.first)
        if row != should:
            said = "is missing" if row is None else f"says {tuple(row[2:])} and should say {should[2:]}"
            said = said if row is None or row.saga == saga else "names another saga"
            self._examiner.find("E_CACHE", thread.head, f"the row of the saga begun at {thread.first} {said}", low=0)

    def _memo(self, memo: StoredMemo) -> None:
        examiner = self._examiner
        if memo.size != examiner.size:
            return self._wrong_memo(memo, f"it stands at {memo.size} records, where none can")
        if memo.hash != examiner.newest_hash:
            return self._wrong_memo(memo, f"it names another record {memo.size - 1} than the log has")
        try:
            folded, standing = msgspec.msgpack.decode(memo.image, type=tuple[bytes, bytes])
            if msgspec.msgpack.encode((folded, standing)) != memo.image:
                return self._wrong_memo(memo, "its bytes are not those of what it says")
            if not _same(standing, msgspec.msgpack.encode(examiner.standing())):
                return self._wrong_memo(memo, "the open sagas or clocks in it are not those of the log")
            return self._memo_of_view(memo, folded)
        except (ValueError, TypeError, msgspec.MsgspecError) as error:
            return self._wrong_memo(memo, f"it cannot be read ({error})")

    def _memo_of_view(self, memo: StoredMemo, folded: bytes) -> None:
        view = self._examiner.view
        if not self._view_name:
            self.unseen.append(memo.view)
        elif memo.view != self._view_name or memo.version != view.version:
            self._find("E_MEMO", f"the memo of {memo.view} version {memo.version} cannot be made again here")
        elif not self._examiner.view_trouble and not _same(folded, view.dump()):
            self._wrong_memo(memo, "the state in it is not what the records fold to")

    def _wrong_memo(self, memo: StoredMemo, why: str) -> None:
        self._find("E_CACHE", f"the memo of {memo.view}: {why}")


def _same(stored: bytes, made: bytes) -> bool:
    """Equal, or equal but for the order of maps and in the one way to write it."""
    if stored == made:
        return True
    try:
        told = msgspec.msgpack.decode(stored)
    except (ValueError, msgspec.MsgspecError):
        return False
    return bool(told == msgspec.msgpack.decode(made)) and msgspec.msgpack.encode(told) == stored


# ---- verify ---------------------------------------------------------------------------------------------------------


def verify(
    where: Home | Path | str,
    *,
    anchors: Sequence[Anchor] | None = None,
    view_factory: Callable[[], Any] | None = None,
) -> Verdict:
    """Examine a home (a folder), or a database file by itself. Changes nothing and needs no keys.

    `anchors` replaces those of the home; `view_factory` makes the view whose memo is compared. Raises YouErred where
    there is nothing to examine.
    """
    home = where if isinstance(where, Home) else None
    path = Path(where) if home is None else home.db  # type: ignore[arg-type]
    if home is None and path.is_dir():
        home = Home(path)
        path = home.db
    identity = identity_of(home) if home else None
    notes: list[str] = []
    if anchors is None:
        anchors = []
        if isinstance(identity, Identity):
            anchors, notes = read_anchors(identity.home, identity)
    if not path.exists():
        return _gone(path, anchors)
    return _Verifier(path, identity, list(anchors), notes, view_factory).run()


def _gone(path: Path, anchors: Sequence[Anchor]) -> Verdict:
    known = max((anchor.size for anchor in anchors), default=0)
    if not known:
        raise YouErred(f"There is no log at {path}.", next="Name another with --home.", code="no_home")
    finding = Finding("E_ROLLED_BACK", -1, f"the database is gone and this device signed {known} records")
    return Verdict(ROLLED_BACK, "none", 0, Peaks().root().hex(), [finding], [])


class _Verifier:
    """One examination of one file."""

    def __init__(
        self,
        path: Path,
        identity: Identity | None,
        anchors: list[Anchor],
        notes: list[str],
        view_factory: Callable[[], Any] | None,
    ) -> None:
        self.path, self.identity, self.notes = path, identity, notes
        self.file_findings: list[Finding] = []
        self.foreign_findings: list[Finding] = []
        self.others: dict[str, Examiner] = {}
        self.unseen: list[str] = []
        self.has_anchors = bool(anchors)
        self.make_view = view_factory
        strange = [anchor for anchor in anchors if identity is not None and anchor.origin != identity.origin]
        for anchor in strange:
            self._file("E_IDENTITY", f"the anchor {anchor.path} belongs to another log ({anchor.origin})")
        ours = [anchor for anchor in anchors if anchor not in strange]
        view = view_factory() if view_factory else None
        self.examiner = Examiner(identity.log_key if identity else b"", view, ours)

    def _file(self, code: str, reason: str) -> None:
        self.file_findings.append(Finding(code, -1, reason))

    def run(self) -> Verdict:
        try:
            with Evidence(self.path) as evidence:
                self._examine(evidence)
        except (DatabaseError, Damaged) as error:
            self._file("E_FILE", words(error))
        except UnicodeDecodeError as error:
            self._file("E_TABLE", f"a text in it is none ({error})")
        except TooNew as error:
            self._file("E_VERSION", error.message)
        except Malformed as error:
            self._file("E_TABLE", error.message)
        return self._verdict()

    def _examine(self, evidence: Evidence) -> None:
        if evidence.empty:
            self.examiner.finish()
            if not self.examiner.findings:
                self._file("E_EMPTY", "the database holds nothing")
            return
        for reason in evidence.strangers():
            self._file("E_TABLE", reason)
        for reason in evidence.complaints():
            self._file("E_FILE", reason)
        examiner = self.examiner
        caches = _Caches(evidence, examiner, _name_of(examiner.view))
        for row in evidence.stored():
            if row.seq < examiner.size:
                self._file("E_TABLE", f"a record at place {row.seq}")
                continue
            caches.after(examiner.take(row))
        examiner.finish()
        caches.finish()
        self.unseen = caches.unseen
        genesis = examiner.genesis
        if genesis and self.identity and genesis.install != self.identity.install:
            reason = f"it belongs to install {genesis.install}, not {self.identity.install}"
            examiner.find("E_IDENTITY", 0, reason, low=0)
        for origin in evidence.origins():
            self._foreign(evidence, origin)
        self._follow(genesis)

    def _foreign(self, evidence: Evidence, origin: str) -> None:
        """Another log in the same file. Its unsigned tail is covered by whoever follows it."""
        other = Examiner()
        for row in evidence.stored_of(origin):
            other.take(row)
        other.finish()
        found = [finding for finding in other.result() if finding.code != "E_UNSIGNED"]
        if other.genesis is None or other.origin != origin:
            found.append(Finding("E_IDENTITY", 0, "it is not the log of the key that it names"))
        self.foreign_findings += [Finding(f.code, f.seq, f"{f.reason} (in {origin})") for f in found]
        self.others[origin] = other

    def _follow(self, genesis: Entry | None) -> None:
        """From incarnation to incarnation: what a genesis says it follows is here, with the size and root it names."""
        seen: set[str] = set()
        while genesis is not None and genesis.follows_size and genesis.follows not in seen:
            seen.add(genesis.follows)
            other = self.others.get(genesis.follows)
            if other is None:
                self._file("E_ROOT", f"the log that was followed is gone ({genesis.follows})")
                return
            if (genesis.follows_size, genesis.follows_root) != (other.size, other.tree.root().hex()):
                self._file("E_ROOT", f"{genesis.follows} is not the log that was followed")
            genesis = other.genesis

    def _verdict(self) -> Verdict:
        examiner = self.examiner
        findings = [*examiner.result(), *self.foreign_findings, *self.file_findings]
        verdicts = {CODES[finding.code][0] for finding in findings} or {INTACT}
        verdict = next(verdict for verdict in WORST if verdict in verdicts)
        level = "local anchor" if examiner.anchored else "signed" if examiner.signed_size else "chain"
        if not examiner.size:
            level = "none"
        return Verdict(verdict, level, examiner.size, examiner.tree.root().hex(), findings, self._not_proved())

    def _not_proved(self) -> list[str]:
        examiner = self.examiner
        told = list(self.notes)
        if self.identity is None:
            told.append("That this device wrote it: the device's keys were not there to compare with the log's.")
        if not examiner.signed_size:
            told.append("Who wrote it: whoever holds the file could have made it.")
        elif examiner.signed_size < examiner.size:
            told.append(
                f"Records {examiner.signed_size} to {examiner.size - 1}: they are younger than the newest signature; "
                "whoever can write the file could have altered them."
            )
        if more := sum(one.more for one in (examiner, *self.others.values())):
            told.append(f"{more} further findings are not listed.")
        if not examiner.tree_known:
            told.append("Signatures and run roots after the first break: the tree cannot be grown past it.")
        if not self.has_anchors:
            told.append("That nothing was cut from its end: no anchor of this device was found.")
        elif examiner.anchored < examiner.size:
            told.append(f"That nothing was cut after the first {examiner.anchored} records, which are anchored.")
        else:
            told.append("That nothing came after the newest record: what is younger than an anchor has none.")
        if examiner.view_trouble:
            told.append(f"The state after {examiner.view_trouble}: it could not be folded further.")
        for view in self.unseen:
            told.append(f"The memo of {view}: only the log knows how to make it again.")
        told.append(
            "That there is no second history, and that no older copy was set back with its anchors: no other device "
            "was asked."
        )
        told.append("That what was written is true, and that everything was written.")
        return told


def _name_of(view: Any) -> str:
    """As the log names it in its memo."""
    return "" if view is None else view_name(view)
