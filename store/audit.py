"""`verify` names the first thing that does not add up, one finding a fault, and says what it did not prove.

It trusts nothing that the file says about itself. The records are examined one by one (examiner.py), every cache (run
roots, saga rows, memos) is made again and compared, the file must hold our tables and nothing else, and the head is
held against what was remembered outside the database (identity.py).

Whoever asks may bring notes that left the device before, a policy that says whose cosignatures count, and the owner's
key. The level that is printed is the strongest thing that was compared: none, chain, signed, local anchor, own quorum,
outside anchor. What a log cannot show is said each time: what was never written, whether what was written is true, and
what is younger than the last head that somebody else remembers. Memory is bounded by open sagas, holes and findings,
not by the log's length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from . import seal
from .anchor import Anchor
from .anchor import read_all as read_anchors
from .chain import OPENED, Thread
from .entry import Entry, parse
from .errors import Damaged, Malformed, TooNew, YouErred
from .evidence import NONE, DatabaseError, Evidence, Source, StoredMemo, Stub
from .examiner import CODES, EXITS, MALFORMED, ROLLED_BACK, Examiner, Finding, words, worst
from .home import Home
from .identity import identity_of
from .keys import Identity, origin_of
from .merkle import RUN_BITS, Peaks
from .note import ED25519, BadSignature, Key
from .sqlite import _view_name as view_name
from .trust import Brought, Cosigned, Policy, carried, cosigned

LEVELS = ("none", "chain", "signed", "local anchor", "own quorum", "outside anchor")
"""Each says more than the one before it."""
DEMANDS = ("signed", "anchored", "witnessed", "openings")
"""What may be required (`Terms.require`)."""


class Verdict(msgspec.Struct):
    """What `verify` says. level: one of LEVELS ("chain": whoever holds the file could have made it). root is hex."""

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
        return {
            "verdict": self.verdict,
            "level": self.level,
            "size": self.size,
            "root": self.root,
            "findings": [finding._asdict() for finding in self.findings],
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
                low = first if examiner.runs.touch(first, last) else None
                examiner.find("E_TILE", last, f"the root of run {n} (records {first} to {last}) {said}", low=low)
        examiner.tree.runs.clear()

    def stub(self, stub: Stub) -> None:
        """The roots of runs that a wide stub stands for are kept, and lead to it."""
        if stub.level <= RUN_BITS:
            return
        count, first = 1 << stub.level - RUN_BITS, stub.start >> RUN_BITS
        self._runs += count
        tree = Peaks()
        for n in range(first, first + count):
            root = self._evidence.stored_run(n)
            if root is None or len(root) != 32:
                return self._find("E_TILE", f"the root of run {n} is missing", (n + 1 << RUN_BITS) - 1)
            tree.skip(RUN_BITS, root)
        if tree.root() != stub.hash:
            why = f"the roots of runs {first} to {first + count - 1} do not lead to the hash that is kept of them"
            self._examiner.find("E_TILE", stub.start + (1 << stub.level) - 1, why, low=stub.start)

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
        except (ValueError, TypeError, RecursionError) as error:
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


# ---- what is asked --------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """What whoever asks brings along. anchors: notes that were kept elsewhere; since: one of them to begin from;
    require: what has to be shown (DEMANDS); policy: whose cosignatures count; owners: keys that openings are sealed
    under."""

    anchors: tuple[Brought, ...] = ()
    since: Brought | None = None
    require: tuple[str, ...] = ()
    policy: Policy | None = None
    owners: tuple[seal.Owner, ...] = ()


def verify(
    where: Home | Path | str,
    *,
    anchors: Sequence[Anchor] | None = None,
    view_factory: Callable[[], Any] | None = None,
    terms: Terms = Terms(),  # noqa: B008  (frozen)
) -> Verdict:
    """Examine a home (a folder), a database file by itself, a bundle or a disclosure. Changes nothing, needs no keys.

    `anchors` replaces those of the home; `view_factory` makes the view whose memo is compared. Raises YouErred where
    there is nothing to examine.
    """
    home = where if isinstance(where, Home) else None
    path = Path(where) if home is None else home.db  # type: ignore[arg-type]
    if home is None and path.is_dir():
        if (path / "manifest.json").exists() and not (path / "amends.db").exists():
            return _of_a_bundle(path, terms)
        home = Home(path)
        path = home.db
    identity = identity_of(home) if home else None
    notes: list[str] = []
    if anchors is None:
        anchors = []
        if isinstance(identity, Identity):
            anchors, notes = read_anchors(identity.home, identity)
    if not path.exists():
        return _gone(path, anchors, terms)
    if not path.is_file():  # a pipe would be waited for
        return _unreadable(f"{path} is no file")
    if home is None and (text := _disclosure(path)) is not None:
        return _of_a_disclosure(text, terms)
    verifier = _Verifier(lambda: Evidence(path), identity, list(anchors), notes, view_factory, terms)
    return verifier.run()


def _gone(path: Path, anchors: Sequence[Anchor], terms: Terms) -> Verdict:
    brought = [note.head.size for note in (*terms.anchors, *([terms.since] if terms.since else []))]
    known = max([0, *brought, *[anchor.size for anchor in anchors]])
    if not known:
        raise YouErred(f"There is no log at {path}.", next="Name another with --home.", code="no_home")
    finding = Finding("E_ROLLED_BACK", -1, f"the database is gone and this device signed {known} records")
    return Verdict(ROLLED_BACK, "none", 0, Peaks().root().hex(), [finding], [])


def _unreadable(why: str) -> Verdict:
    return Verdict(MALFORMED, "none", 0, Peaks().root().hex(), [Finding("E_FILE", -1, why)], [])


def _of_a_bundle(path: Path, terms: Terms) -> Verdict:
    from .bundle_evidence import BundleEvidence

    return _Verifier(lambda: BundleEvidence(path), None, [], [], None, terms).run()


def _disclosure(path: Path) -> bytes | None:
    """The text of a file that is no database and begins as a disclosure does. SQLite looks first: a database that is
    in use must not be opened behind its back."""
    try:
        Evidence(path).close()
        return None
    except (Damaged, Malformed, TooNew, DatabaseError):
        with open(path, "rb") as file:
            from .disclosure import FILE_MAX

            return file.read(FILE_MAX + 1) if file.read(1) == b"{" and not file.seek(0) else None


def _of_a_disclosure(text: bytes, terms: Terms) -> Verdict:
    from .disclosure import check

    notes = [*terms.anchors, *([terms.since] if terms.since else [])]
    said = check(text, anchors=notes, policy=terms.policy)
    hidden = said.openings[1]
    lacks = [demand for demand in terms.require if _lacks(demand, said.level, said.witnessed, bool(hidden))]
    wrong = [*said.findings, *[_required(demand, said.level, hidden) for demand in lacks]]
    return Verdict(worst(wrong), said.level, said.size, said.root, wrong, said.not_proved)


def _judged(policy: Policy, notes: Sequence[bytes], log: Key | None) -> tuple[str, list[Finding], list[str]]:
    """What a policy says of notes whose heads are the log's: a level or "", findings, what is not proved."""
    if policy.logs and log not in policy.logs:
        return "", [Finding("E_STRANGE", -1, "the policy names other logs, not this one")], []
    found = [cosigned(text, log, policy) for text in notes] if log is not None else []
    best = max(found, key=lambda one: len(one.witnesses), default=Cosigned(frozenset()))
    if any(policy.met(one.witnesses) for one in found):
        told = "That nobody but these witnesses was shown another history: only they have said what they saw."
        return ("own quorum", [], [told]) if policy.quorum else ("", [], [])
    if not policy.quorum:
        return "", [], []
    why = best.trouble or f"{len(best.witnesses)} of its witnesses have signed"
    return "", [Finding("E_QUORUM", -1, f"the quorum {policy.quorum} is not met: {why}")], []


def _lacks(demand: str, level: str, witnessed: bool, unread: bool) -> bool:
    """Whether what was demanded could not be shown. An outside anchor is no witness: only a policy says who is."""
    if demand == "openings":
        return unread
    if demand == "witnessed":
        return not witnessed
    least = "signed" if demand == "signed" else "local anchor"
    return LEVELS.index(level) < LEVELS.index(least)


def _required(demand: str, level: str, unread: int) -> Finding:
    if demand == "openings":
        return Finding("E_REQUIRED", -1, f"all openings were to be read, and {unread} could not be")
    return Finding("E_REQUIRED", -1, f"it was to be {demand}, and its level is {level}")


# ---- what is sealed -------------------------------------------------------------------------------------------------


class _Sealed:
    """Reads what one log has sealed, with the keys that were brought, and keeps count of the sagas' keys. own: origin
    of the file's own log, which names the keys of others by their origin."""

    def __init__(self, source: Any, owners: Sequence[seal.Owner], own: str, origin: str) -> None:
        self._source, self._own, self._origin = source, own, origin
        self._owners = {owner.id: owner for owner in owners}
        self._holds_keys = isinstance(source, Evidence)
        self.lost: dict[str, list[int]] = {}  # name of a key that is not there -> a record under it, how many openings
        self.wrong: dict[str, int] = {}  # id of an owner's key that was not brought -> openings
        self._key = lru_cache(256)(self._unwrapped)

    def unseal(self, entry: Entry, part: seal.Part) -> bytes | None:
        """The line of an opening; None if its key is not here. Raises Malformed for altered bytes."""
        if not self._holds_keys:
            return None
        key = self._key(entry.saga)
        if isinstance(key, bytes):
            return seal.unseal(key, self._origin, entry, part)
        if key:
            self.wrong[key] = self.wrong.get(key, 0) + 1
            return None
        name = self._named(entry.saga)
        if name in self.lost or len(self.lost) < _LOST_MAX:
            self.lost.setdefault(name, [entry.seq, 0])[1] += 1
        return None

    def _named(self, saga: str) -> str:
        return seal.named(self._own, self._origin, saga)

    def _unwrapped(self, saga: str) -> bytes | str:
        """A saga's key, or under which owner's key it lies, "" for nowhere. Raises Malformed for an altered one."""
        row = self._source.datakey(self._named(saga))
        if row is None or row[0] not in self._owners:
            return row[0] if row else ""
        key = self._owners[row[0]].unwrap(self._origin, saga, row[1])
        if key is None:
            raise Malformed("the key of its saga is not what was wrapped", finding="E_CIPHERTEXT")
        return key

    def forgotten(self, examiner: Examiner) -> set[str]:
        """Names of keys that this log says were destroyed."""
        return {name if " " in name else self._named(name) for name in examiner.destroyed()}

    def findings(self, examiner: Examiner, gone: set[str]) -> Iterator[Finding]:
        """Which keys are not there, now that the logs have told which were destroyed."""
        destroyed = sum(count for name, (_, count) in self.lost.items() if name in gone)
        examiner.unread -= destroyed
        examiner.forgotten += destroyed
        lost = {name: seq for name, (seq, _) in self.lost.items() if name not in gone}
        if lost and not self._source.datakeys():
            yield Finding("E_KEYS_ABSENT", min(lost.values()), "openings are sealed, and no saga's key is here")
            return
        for name, seq in lost.items():
            yield Finding("E_KEY_MISSING", seq, f"the key of {name or 'the device'} is gone and no record says why")
        if self._owners and (unread := sum(self.wrong.values())):
            ids = ", ".join(sorted(self.wrong))
            said = f"{unread} openings are sealed under {ids}, and the key given is {', '.join(self._owners)}"
            yield Finding("E_WRONG_KEY", -1, said)

    def rows(self, gone: set[str], seals: set[str]) -> Iterator[Finding]:
        """What is wrong with the keys that are there. seals: ids of owners' keys that the logs name."""
        for name, owner, wrapped in self._source.datakey_rows() if self._holds_keys else ():
            origin, space, saga = name.rpartition(" ")
            if name in gone:
                yield Finding("E_REDACT_INCOMPLETE", -1, f"the key of {name} was destroyed, says the log; it is there")
            elif owner not in seals or len(wrapped) != _WRAPPED_BYTES:
                yield Finding(
                    "E_CIPHERTEXT", -1, f"the key of {name or 'the device'} lies under none that the log names"
                )
            elif owner in self._owners:
                if self._owners[owner].unwrap(origin if space else self._own, saga, wrapped) is None:
                    yield Finding("E_CIPHERTEXT", -1, f"the key of {name or 'the device'} is not what was wrapped")


_LOST_MAX, _WRAPPED_BYTES = 100_000, 72


# ---- one examination ------------------------------------------------------------------------------------------------


class _Verifier:
    """One examination of one file or folder."""

    def __init__(
        self,
        source: Callable[[], Any],
        identity: Identity | None,
        anchors: list[Anchor],
        notes: list[str],
        view_factory: Callable[[], Any] | None,
        terms: Terms,
    ) -> None:
        self.source, self.identity, self.notes, self.terms = source, identity, notes, terms
        self.file_findings: list[Finding] = []
        self.foreign_findings: list[Finding] = []
        self.others: dict[str, Examiner] = {}
        self.shut: dict[str, _Sealed] = {}  # what these have sealed
        self.unseen: list[str] = []
        self.brought: list[tuple[Brought, Anchor]] = []  # notes of this log that its key signed
        self.carried: list[tuple[Brought, Anchor]] = []  # the same, out of a bundle
        self.elsewhere: list[Brought] = []  # of a log that this one followed
        self.quorum = 0  # up to which size the policy's witnesses have signed
        self.local = anchors
        self.has_anchors = bool(anchors or terms.anchors or terms.since)
        self.make_view = view_factory
        self.key = identity.log_key if identity else b""
        self.whole = True  # every opening is here that there is
        strange = [anchor for anchor in anchors if identity is not None and anchor.origin != identity.origin]
        for anchor in strange:
            self._file("E_IDENTITY", f"the anchor {anchor.path} belongs to another log ({anchor.origin})")
        self.ours = [anchor for anchor in anchors if anchor not in strange]
        self.examiner = Examiner(self.key, None, self.ours)

    def _file(self, code: str, reason: str) -> None:
        self.file_findings.append(Finding(code, -1, reason))

    def run(self) -> Verdict:
        try:
            with self.source() as source:
                self._examine(source)
        except (DatabaseError, Damaged) as error:
            self._file("E_FILE", words(error))
        except UnicodeDecodeError as error:
            self._file("E_TABLE", f"a text in it is none ({error})")
        except TooNew as error:
            self._file("E_VERSION", error.message)
        except Malformed as error:
            finding = str(error.facts.get("finding", ""))
            self._file(finding if finding in CODES else "E_TABLE", error.message)
        return self._verdict()

    def _examine(self, source: Any) -> None:
        if getattr(source, "empty", False):
            self.examiner.finish()
            if not self.examiner.findings:
                self._file("E_EMPTY", "the database holds nothing")
            return
        self.whole = source.payload != NONE
        began = self._begin(source)
        caches = None
        if isinstance(source, Evidence) and not began:
            caches = _Caches(source, self.examiner, _name_of(self.examiner.view))
        self._walk(source, caches, began)
        if isinstance(source, Evidence):
            self._beside(source, began)
            self._seals(began)
        else:
            self.file_findings += [Finding(code, -1, reason) for code, reason in source.troubles()]
        self._passed(began)
        self._judge()

    def _passed(self, began: int) -> None:
        """Heads at sizes that lie inside removed runs. The device keeps its newest; an older one is left behind."""
        for anchor in self.examiner.passed:
            why = f"{anchor.path}: its {anchor.size} records end inside a run that was removed since"
            if anchor.size <= began:
                continue
            if any(anchor == one for _, one in self.brought):
                self._file("E_ANCHOR", why)
            else:
                self.notes.append(f"What the anchor says of {why}.")

    def _begin(self, source: Source) -> int:
        """Make ready what the records are held against. Returns the place to begin at."""
        genesis = source.genesis()
        if not self.key and genesis is not None:
            self.key = _bytes(genesis.log)
        origin = origin_of(self.key) if self.key else ""
        others = source.origins() if isinstance(source, Evidence) else []
        for one in self.terms.anchors:
            self._bring(one, origin, others)
        self._carry(source, origin)
        since = self._bring(self.terms.since, origin, others) if self.terms.since else None
        self.sealed = _Sealed(source, self.terms.owners, origin, origin)
        view = self.make_view() if self.make_view and since is None else None
        extra = [anchor for _, anchor in (*self.brought, *self.carried)]
        tree = self._since(source, since) if since else None
        if since is not None and tree is None and self.make_view:
            view = self.make_view()
        self.examiner = Examiner(
            self.identity.log_key if self.identity else b"", view, [*self.ours, *extra],
            payload=source.payload, look=source.line, checkpoints=source.checkpoints(), unseal=self.sealed.unseal,
        )  # fmt: skip
        if tree is None:
            return 0
        self.examiner.genesis = genesis
        self.examiner.begin_at(tree, self.key, source.line(tree.size - 1))
        return tree.size

    def _bring(self, one: Brought, origin: str, others: Sequence[str]) -> Anchor | None:
        """A note that was kept elsewhere, if it says something about this log."""
        if one.head.origin != origin:
            if one.head.origin in others:
                self.elsewhere.append(one)
            else:
                self._file("E_IDENTITY", f"{one.name} is a note of another log ({one.head.origin})")
            return None
        try:
            anchor = one.anchor(Key(origin, ED25519, self.key))
        except (BadSignature, Malformed) as error:
            self._file("E_ANCHOR", f"{one.name}: {error.message}")
            return None
        self.brought.append((one, anchor))
        return anchor

    def _carry(self, source: Source, origin: str) -> None:
        """Notes that came along are held against the records too, and vouch for nothing by themselves."""
        for text in source.notes():
            try:
                one = carried("the bundle's checkpoint", text)
                if one.head.origin == origin:
                    self.carried.append((one, one.anchor(Key(origin, ED25519, self.key))))
                else:
                    self._file("E_IDENTITY", f"{one.name} is of another log ({one.head.origin})")
            except (BadSignature, Malformed) as error:
                self._file("E_SIGNATURE", f"the bundle's checkpoint: {error.message}")

    def _since(self, source: Source, anchor: Anchor) -> Peaks | None:
        """The tree at a note that is trusted; None where it cannot be had, and then all of the log is examined."""
        if not 0 < anchor.size <= source.size:
            return None
        try:
            tree = source.peaks(anchor.size)
        except (Damaged, Malformed):
            return None
        return tree if tree.root() == anchor.root else None

    def _walk(self, source: Source, caches: _Caches | None, began: int) -> None:
        examiner = self.examiner
        for row in source.stored(began):
            if isinstance(row, Stub):
                if examiner.take_stub(row) and caches:
                    caches.stub(row)
                continue
            entry = examiner.take(row)
            if caches:
                caches.after(entry)
        examiner.finish()
        if caches:
            caches.finish()
            self.unseen = caches.unseen

    def _beside(self, evidence: Evidence, began: int) -> None:
        """What else a database holds."""
        for reason in evidence.strangers():
            self._file("E_TABLE", reason)
        for reason in evidence.complaints() if not began else ():
            self._file("E_FILE", reason)
        genesis = self.examiner.genesis
        if genesis and self.identity and genesis.install != self.identity.install:
            reason = f"it belongs to install {genesis.install}, not {self.identity.install}"
            self.examiner.find("E_IDENTITY", 0, reason, low=0)
        for origin in evidence.origins() if not began else ():
            self._foreign(evidence, origin)
        self._follow(genesis if not began else None)

    def _seals(self, began: int) -> None:
        """Hold the keys that lie in a database against what all of its logs say of them."""
        logs = [(self.sealed, self.examiner), *[(sealed, self.others[origin]) for origin, sealed in self.shut.items()]]
        gone = set().union(*[sealed.forgotten(examiner) for sealed, examiner in logs])
        for sealed, examiner in logs:
            self.file_findings += sealed.findings(examiner, gone)
        seals = set().union(*[examiner.seals for _, examiner in logs])
        if not began:
            self.file_findings += self.sealed.rows(gone, seals)

    def _foreign(self, evidence: Evidence, origin: str) -> None:
        """Another log in the same file. Its unsigned tail is covered by whoever follows it."""
        sealed = self.shut[origin] = _Sealed(evidence, self.terms.owners, origin_of(self.key), origin)
        other = Examiner(
            anchors=self._anchors_of(evidence, origin),
            payload=evidence.payload,
            look=lambda seq: evidence.line_of(origin, seq),
            checkpoints=evidence.checkpoints_of(origin),
            unseal=sealed.unseal,
        )
        for row in evidence.stored_of(origin):
            other.take_stub(row) if isinstance(row, Stub) else other.take(row)
        other.finish()
        found = [finding for finding in other.result() if finding.code != "E_UNSIGNED"]
        if other.genesis is None or other.origin != origin:
            found.append(Finding("E_IDENTITY", 0, "it is not the log of the key that it names"))
        self.foreign_findings += [Finding(f.code, f.seq, f"{f.reason} (in {origin})") for f in found]
        self.others[origin] = other

    def _anchors_of(self, evidence: Evidence, origin: str) -> list[Anchor]:
        """Notes that were brought and are of another log in the file."""
        found = []
        for one in self.elsewhere:
            try:
                if one.head.origin == origin:
                    key = _bytes(parse(evidence.line_of(origin, 0) or b"").log)
                    found.append(one.anchor(Key(origin, ED25519, key)))
            except (BadSignature, Malformed) as error:
                self._file("E_ANCHOR", f"{one.name}: {error.message}")
        return found

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

    def _judge(self) -> None:
        """Put the policy to every note whose head the records agree with."""
        policy = self.terms.policy
        if policy is None:
            return
        agreed = set(self.examiner.matched)
        notes = [(one, anchor) for one, anchor in (*self.brought, *self.carried) if anchor in agreed]
        log = Key(origin_of(self.key), ED25519, self.key) if self.key else None
        level, findings, _ = _judged(policy, [one.text for one, _ in notes], log)
        self.file_findings += findings
        if level and log is not None:
            met = [anchor.size for one, anchor in notes if policy.met(cosigned(one.text, log, policy).witnesses)]
            self.quorum = max(met)

    # -- the answer ---------------------------------------------------------------------------------------------------

    def _verdict(self) -> Verdict:
        examiner = self.examiner
        level = self._level()
        findings = [*examiner.result(), *self.foreign_findings, *self.file_findings]
        unread = self._unread()
        lacks = [
            demand for demand in self.terms.require
            if _lacks(demand, level, bool(self.quorum), bool(unread or examiner.began))
        ]  # fmt: skip
        findings += [_required(demand, level, unread) for demand in lacks]
        verdict = worst(findings)
        return Verdict(verdict, level, examiner.size, examiner.tree.root().hex(), findings, self._not_proved())

    def _level(self) -> str:
        examiner = self.examiner
        matched = set(examiner.matched)
        if not examiner.size:
            return "none"
        if any(anchor in matched for _, anchor in self.brought):
            return "outside anchor"
        if self.quorum:
            return "own quorum"
        if any(anchor in matched for anchor in self.ours):
            return "local anchor"
        return "signed" if examiner.signed_size else "chain"

    def _unread(self) -> int:
        return sum(one.unread + one.withheld for one in (self.examiner, *self.others.values()))

    def _remembered(self) -> int:
        """Up to which size somebody outside the file remembers the log."""
        matched = set(self.examiner.matched)
        outside = [anchor.size for anchor in (*self.ours, *[one for _, one in self.brought]) if anchor in matched]
        return max([0, self.quorum, *outside])

    def _not_proved(self) -> list[str]:
        examiner = self.examiner
        told = list(self.notes)
        if examiner.began:
            told.append(
                f"The first {examiner.began} records: they are as they were when the note was made, and were not "
                "looked at; nor was what is kept beside them, nor what their openings hold."
            )
        if self.identity is None:
            told.append("That this device wrote it: the device's keys were not there to compare with the log's.")
        told += self._of_openings()
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
        anchored = self._remembered()
        if not anchored:
            which = "no anchor agrees with it" if self.has_anchors else "no anchor of this device was found"
            told.append(f"That nothing was cut from its end: {which}.")
        elif anchored < examiner.size:
            told.append(f"That nothing was cut after the first {anchored} records, which are anchored.")
        else:
            told.append("That nothing came after the newest record: what is younger than an anchor has none.")
        if examiner.view_trouble:
            told.append(f"The state after {examiner.view_trouble}: it could not be folded further.")
        for view in self.unseen:
            told.append(f"The memo of {view}: only the log knows how to make it again.")
        told.append(self._second_history())
        told.append("That what was written is true, and that everything was written.")
        return told

    def _second_history(self) -> str:
        level = self._level()
        if level == "outside anchor":
            return (
                "That there is no second history after the note that was given, nor one that whoever kept that note "
                "was never shown."
            )
        if level == "own quorum":
            return (
                f"That there is no second history after the first {self.quorum} records, or one that the witnesses "
                "took part in: whose they are, the policy knows."
            )
        return (
            "That there is no second history, and that no older copy was set back with its anchors: no other device "
            "was asked."
        )

    def _of_openings(self) -> list[str]:
        every, told = [self.examiner, *self.others.values()], []
        if unread := sum(one.unread for one in every):
            told.append(f"What {unread} openings hold: they are sealed and not readable here.")
        if withheld := self.examiner.withheld:
            told.append(f"What {withheld} openings hold: they are not in this bundle.")
        if forgotten := sum(one.forgotten for one in every):
            told.append(f"What {forgotten} openings held: the keys of their sagas were destroyed.")
        if named := sum(one.openings.named for one in every):
            told.append(f"What {named} openings held: they were redacted, as the log says.")
        if removed := sum(one.runs.count for one in every):
            told.append(f"What {removed} removed records said: their hashes lead to the roots that were signed.")
        return told


def _bytes(digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return b""


def _name_of(view: Any) -> str:
    """As the log names it in its memo."""
    return "" if view is None else view_name(view)
