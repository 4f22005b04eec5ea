"""A folder that an auditor checks with tools of others: the log as it was signed, and nothing of ours is needed.

    README.txt  manifest.json  SHA256SUMS  SHA256SUMS.sig  SHA256SUMS.minisig  checkpoint  checkpoints/<size>
    entries/000000.ndjson …    65,536 lines each, the very bytes that were hashed        stubs.tsv  (of removed records)
    openings/ or openings.sealed/     only if asked for                                  keys/  check_amends.py  tile/…

It is a cut: everything up to a head that is remembered outside the database, out of one snapshot of the file, while
agents write on. The tree is grown anew on the way out, and a root that is not the signed one ends the writing. A bundle
is made under a name of its own beside the target and renamed when it is whole: half a bundle never has the name.

Why no archive file: every tool reads folders, and a segment can be fetched without the rest. Why not the database: its
reader would be ours. Memory is bounded by the number of files (one in 128 records), not by their size.
Formats: C2SP signed-note, tlog-checkpoint and tlog-tiles; OpenBSD signify; minisign; RFC 8410; FORMAT.md 13.
"""

from __future__ import annotations

import base64
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from . import note, seal
from .chain import Draft
from .entry import Entry, leaf, parse
from .errors import Damaged, DiskFull, LogHeld, TheyErred, YouErred
from .evidence import NONE, PLAIN, SEALED, Evidence, Stored, Stub
from .facts import COPIED, REDACTED
from .readme import readme
from .signify import key_files, minisign_signature, signify_signature
from .sqlite import SIGNATURE, Head, SqliteLog
from .squeeze import unshut
from .tiles import Tiles

FORMAT = "amends/bundle/1"
SEGMENT = 65_536
PAYLOADS = (NONE, PLAIN, SEALED)
OPENINGS = {PLAIN: "openings", SEALED: "openings.sealed"}
BROKEN = "-BROKEN"
README, MANIFEST, CHECKPOINT, STUBS = "README.txt", "manifest.json", "checkpoint", "stubs.tsv"
SUMS, SIGNIFY, MINISIGN = "SHA256SUMS", "SHA256SUMS.sig", "SHA256SUMS.minisig"
CHECKER, CERTIFICATE = "check_amends.py", "certificate.dsse.json"
UNLISTED = (SUMS, SIGNIFY, MINISIGN)
"""What SHA256SUMS cannot list: itself, and what signs it."""

_CUTS = 10


class Content(NamedTuple):
    """What a bundle is made of. head: the signed head that it goes up to, None for a log that does not verify;
    export_seed: None where nothing is signed; read: the lines of a cell, for the payload "plain"; verdict: what
    `verify` said, as its JSON; certificate: a DSSE envelope, empty for none."""

    origin: str
    log_key: bytes
    export_key: bytes
    export_seed: bytes | None
    head: Head | None
    verdict: dict[str, Any]
    tool: str
    payload: str = NONE
    read: Callable[[Entry, bytes], bytes | None] = lambda entry, cell: unshut(cell)
    certificate: bytes = b""


class Made(NamedTuple):
    """A bundle: where it is, the SHA-256 of its manifest, how many records and openings it holds, how many records it
    says were removed, its root in hex."""

    path: Path
    id: str
    size: int
    openings: int
    removed: int
    root: str


# ---- a cut of a log that others write -------------------------------------------------------------------------------


@contextmanager
def cut(log: SqliteLog) -> Iterator[tuple[Evidence, Head]]:
    """A snapshot of the log's file and the newest anchored head in it, with nothing destroyed after that head: what a
    bundle lacks is then explained in it. Raises LogHeld where others destroy faster than one can look."""
    identity: Any = log.identity
    for _ in range(_CUTS):
        log.sign_head()
        anchor = identity.anchored()
        evidence = Evidence(log.path)
        try:
            log.refresh()  # after the snapshot: whatever is in that one is folded now
            if anchor is not None and log.keeping.erasing <= anchor.size <= evidence.size:
                yield evidence, Head(anchor.size, anchor.root, anchor.signature)
                return
        finally:
            evidence.close()
    raise LogHeld("Records are being destroyed all the time: no moment to copy was found.", next="Try again later.")


def copied(made: Made, payload: str, openings: tuple[bytes, ...] = ()) -> Draft:
    """The fact that a bundle was made; by its id and size it is told which openings it carries."""
    fields = {"out": "bundle", "event": made.id, "upto": made.size, "payload": payload}
    return Draft(COPIED, fields, openings, True)


# ---- writing --------------------------------------------------------------------------------------------------------


def write(
    folder: Path | str, evidence: Any, content: Content, record: Callable[[Made], None] = lambda made: None
) -> Made:
    """Write a bundle; `record(made)` is called when it is on the disk and before it gets its name, and what that raises
    ends it. Raises YouErred (`exists`), Damaged if the records are not those of the head, DiskFull, TheyErred."""
    target = Path(os.path.abspath(folder))
    if content.head is None and not target.name.endswith(BROKEN):
        target = target.with_name(target.name + BROKEN)
    if os.path.lexists(target):
        raise YouErred(f"{target} is there already.", next="Name another folder.", code="exists")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    with in_words(target):
        os.mkdir(part, 0o700)
    try:
        with in_words(target):
            made = _Writer(_Folder(part), evidence, content).write(target)
            _to_disk()
        record(made)
        with in_words(target):
            if os.path.lexists(target):
                raise YouErred(f"{target} has come to be meanwhile.", next="Name another folder.", code="exists")
            os.rename(part, target)
            _to_disk()
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return made


@contextmanager
def in_words(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"No space is left for {target}: nothing was left there.", next="Free some.") from None
        raise TheyErred(
            f"{target} could not be written: {error.strerror or error}.",
            next="Name a folder that can be written.",
            code="not_written",
        ) from None


def _to_disk() -> None:
    """Everything at once: a flush for each of thousands of tiles would take longer than writing them."""
    if hasattr(os, "sync"):
        os.sync()


class _Folder:
    """Files under one folder, each with its SHA-256, bytes and lines as they were written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sums: dict[str, tuple[str, int, int]] = {}
        self._made: set[str] = set()

    def open(self, name: str) -> IO[bytes]:
        above = name.rpartition("/")[0]
        if above and above not in self._made:
            os.makedirs(self.path / above, 0o700, exist_ok=True)
            self._made.add(above)
        return open(self.path / name, "xb")  # noqa: SIM115  (whoever asks closes it)

    def put(self, name: str, data: bytes) -> None:
        with self.open(name) as file:
            file.write(data)
        self.sums[name] = (sha256(data).hexdigest(), len(data), data.count(b"\n"))


class _Rows:
    """A row of files of up to 65,536 entries each, written as they come."""

    def __init__(self, folder: _Folder, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._file: IO[bytes] | None = None
        self._number = 0

    def begin(self) -> None:
        self.end()
        self._name = self._pattern % self._number
        self._number += 1
        self._file = self._folder.open(self._name)
        self._hash, self._bytes, self._lines = sha256(), 0, 0

    def write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)
        self._lines += data.count(b"\n")

    def end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._folder.sums[self._name] = (self._hash.hexdigest(), self._bytes, self._lines)


FRONT = re.compile(rb'\{"seq":(\d{1,16}),"prev":"[0-9a-f]{64}","at":\d+,"kind":"([^"]*)"')


class Tally:
    """What a manifest says about the records, counted as they pass; the tree grows along."""

    def __init__(self, emit: Callable[[str, bytes], None], runs: Callable[[int], bytes | None]) -> None:
        self.tiles = Tiles(emit, runs)
        self.counts = {"entries": 0, "openings": 0, "removed": 0, "runs": 0, "redacted": 0}
        self.kinds: dict[str, int] = {}
        self.head = ""
        self._gap = -1

    def stub(self, stub: Stub) -> None:
        self.tiles.stub(stub.level, stub.hash)
        self.counts["removed"] += 1 << stub.level
        self.counts["runs"] += stub.start != self._gap
        self._gap = stub.start + (1 << stub.level)

    def entry(self, line: bytes) -> None:
        hash = leaf(line)
        self.head = hash.hex()
        self.tiles.entry(line, hash)
        self.counts["entries"] += 1
        front = FRONT.match(line)
        kind = front[2].decode("latin-1") if front else ""
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if kind == REDACTED:
            self.counts["redacted"] += len(parse(line).places)

    def told(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        return {
            "root": self.tiles.root().hex(),
            "head": self.head,
            "counts": self.counts | {"kinds": dict(sorted(self.kinds.items()))},
        }


class _Writer:
    """One bundle, from its records to the signatures over its list of files."""

    def __init__(self, folder: _Folder, evidence: Any, content: Content) -> None:
        self.folder, self.evidence, self.content = folder, evidence, content
        self.stop: int = content.head.size if content.head else evidence.size
        self.tally = Tally(folder.put if content.head else lambda name, data: None, evidence.stored_run)
        name = OPENINGS.get(content.payload)
        self.entries = _Rows(folder, "entries/%06d.ndjson")
        self.openings = _Rows(folder, f"{name}/%06d.ndjson") if name else None
        self.places = _Rows(folder, "openings/%06d.tsv") if content.payload == PLAIN else None
        self._rows = [row for row in (self.entries, self.openings, self.places) if row is not None]
        self._key = note.Key(content.origin, note.ED25519, content.log_key)

    def write(self, target: Path) -> Made:
        with self.folder.open(STUBS) as stubs:
            self._records(stubs)
        for row in self._rows:
            row.end()
        self._check_root()
        self._beside()
        manifest = self._manifest()
        self.folder.put(MANIFEST, manifest)
        self._sums()
        counts, id = self.tally.counts, sha256(manifest).hexdigest()
        return Made(target, id, self.stop, counts["openings"], counts["removed"], self.tally.tiles.root().hex())

    # -- records ------------------------------------------------------------------------------------------------------

    def _records(self, stubs: IO[bytes]) -> None:
        hash = sha256()
        count = size = 0
        for row in self.evidence.stored():
            if (row.start if isinstance(row, Stub) else row.seq) >= self.stop:
                break
            if isinstance(row, Stub):
                self.tally.stub(row)
                line = b"%d\t%d\t%s\n" % (row.start, row.level, row.hash.hex().encode())
                stubs.write(line)
                hash.update(line)
                count, size = count + 1, size + len(line)
            else:
                self._entry(row)
        self.tally.tiles.finish()
        self.folder.sums[STUBS] = (hash.hexdigest(), size, count)

    def _entry(self, row: Stored) -> None:
        if self.tally.counts["entries"] % SEGMENT == 0:
            for rows in self._rows:
                rows.begin()
        self.tally.entry(row.line)
        self.entries.write(row.line)
        if row.blob is not None and self.openings is not None:
            self._openings(row.seq, row.line, row.blob)
        if row.sig is not None and len(row.sig) == SIGNATURE:
            self._checkpoint(row.seq + 1, row.sig)

    def _openings(self, seq: int, line: bytes, cell: bytes) -> None:
        assert self.openings is not None
        if self.places is None:
            lines = _sealed_lines(seq, cell)
        else:
            entry = parse(line)
            lines = (self.content.read(entry, cell) or b"").splitlines(True)
            place = {hash: place for place, hash in enumerate(entry.c)}
            for opening in lines:
                self.places.write(b"%d\t%d\n" % (seq, place.get(sha256(opening).hexdigest(), len(entry.c))))
        self.tally.counts["openings"] += len(lines)
        self.openings.write(b"".join(lines))

    def _checkpoint(self, size: int, signature: bytes) -> None:
        """A signed head that the file keeps."""
        if size <= self.stop:
            self.folder.put(f"checkpoints/{size}", _note(self._key, size, signature[:32], signature[32:]))

    def _check_root(self) -> None:
        head, tiles = self.content.head, self.tally.tiles
        if head is not None and (tiles.size, tiles.root()) != (head.size, head.root):
            raise Damaged("The records are not those of the signed head.", next="Run `amends verify`.")

    # -- beside them --------------------------------------------------------------------------------------------------

    def _beside(self) -> None:
        content, put = self.content, self.folder.put
        for size, signature in self.evidence.checkpoints():
            self._checkpoint(size, signature)
        if content.head is not None:
            put(CHECKPOINT, _note(self._key, *content.head))
        for name, data in key_files(content.log_key, content.export_key).items() if content.log_key else ():
            put(name, data)
        if content.certificate and content.head:
            put(CERTIFICATE, content.certificate)
        put(CHECKER, checker())
        put(README, self._readme())

    def _readme(self) -> bytes:
        content = self.content
        verdict = str(content.verdict["verdict"])
        broken = content.head is None
        return readme(content.origin, FORMAT, content.tool, verdict, content.payload, self.tally.counts, broken)

    def _manifest(self) -> bytes:
        content, sums = self.content, self.folder.sums
        told = {
            "format": FORMAT,
            "tool": content.tool,
            "origin": content.origin,
            "log_key": note.vkey(content.origin, content.log_key) if note.is_sound(content.log_key) else "",
            "export_key": content.export_key.hex(),
            "size": self.stop,
            "payload": content.payload,
            **self.tally.told(),
            **{key: content.verdict[key] for key in ("verdict", "level", "findings", "not_proved")},
            "files": {
                name: {"sha256": sums[name][0], "bytes": sums[name][1], "lines": sums[name][2]}
                for name in sorted(sums)
                if not name.startswith("tile/")
            },
            "tiles": sum(name.startswith("tile/") for name in sums),
        }
        return msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n"

    def _sums(self) -> None:
        sums, seed = self.folder.sums, self.content.export_seed
        listed = "".join(f"{sums[name][0]}  {name}\n" for name in sorted(sums)).encode()
        self.folder.put(SUMS, listed)
        if seed is not None and self.content.head is not None:
            self.folder.put(SIGNIFY, signify_signature(seed, listed))
            comment = f"a bundle of {self.content.origin}, {self.stop} records"
            self.folder.put(MINISIGN, minisign_signature(seed, listed, comment))


def _sealed_lines(seq: int, cell: bytes) -> list[bytes]:
    """The sealed openings of an entry as they lie: place, entry, nonce and ciphertext."""
    if not seal.is_sealed(cell):
        raise YouErred(
            f"The openings of record {seq} lie in plain text, so that there is nothing sealed to hand out.",
            next="Run `amends seal` to its end, or export with another --payload.",
            code="not_sealed",
        )
    return [
        b'[%d,%d,"%s"]\n' % (seq, part.place, base64.b64encode(part.nonce + part.ciphertext))
        for part in seal.parts(cell)
    ]


def _note(key: note.Key, size: int, root: bytes, signature: bytes) -> bytes:
    body = note.checkpoint_body(key.name, size, root)
    return note.note_of(body, [note.signature_line(key, signature)])


def checker() -> bytes:
    """The program that checks a bundle with nothing but Python."""
    return (files(__package__) / CHECKER).read_bytes()
