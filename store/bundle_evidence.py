"""A bundle's folder as it lies there, read by somebody who trusts nothing in it, and its list of files least of all.

Names, sizes and hashes are held against the list and the manifest, the manifest and the tiles against what the records
come to, the list's signatures against the key that the first record names. So whoever may sign the list, and may not
sign heads, can alter nothing that tells of the records. What the records themselves are is examined elsewhere
(examiner.py). Files are read line by line; links, pipes and devices are not followed.
"""

from __future__ import annotations

import base64
import errno
import os
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import msgspec

from . import note, seal
from .bundle import (
    CHECKPOINT,
    FORMAT,
    FRONT,
    MANIFEST,
    MINISIGN,
    OPENINGS,
    PAYLOADS,
    SIGNIFY,
    STUBS,
    SUMS,
    UNLISTED,
    Tally,
)
from .entry import LINE_MAX, Entry, leaf, parse
from .errors import AmendsError, Damaged, Malformed, TooNew
from .evidence import NONE, PLAIN, Stored, Stub, in_order
from .home import open_regular
from .keys import origin_of
from .merkle import RUN, Peaks
from .signify import key_files, minisign_holds, signify_holds
from .squeeze import MOST
from .tiles import tile_name

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_SUM = re.compile(rb"([0-9a-f]{64})  ([!-~]{1,200})\n")
_STUB = re.compile(rb"(0|[1-9]\d{0,15})\t(\d|[1-4]\d)\t([0-9a-f]{64})\n")
_PLACE = re.compile(rb"(0|[1-9]\d{0,15})\t(\d|[12]\d|3[01])\n")
_SEALED = re.compile(rb'\[(0|[1-9]\d{0,15}),(\d|[12]\d|3[01]),"([A-Za-z0-9+/=]+)"\]\n')
_SMALL = 64 * 1024 * 1024
_MANIFEST = 8 * 1024 * 1024
"""A manifest of 600 million records has half of that; what is decoded as a whole takes many times its size."""
_BLOCK = 1 << 20
_FEW = 20
"""Troubles that are listed of one sort."""

NAMES, SIGNED_BY, EXTRA, MISPLACED = "E_BUNDLE", "E_SIGNATURE", "E_OPENING_EXTRA", "E_GRAMMAR"


class BundleEvidence:
    """A bundle's folder as it lies there, a source for whoever examines (evidence.py). Nothing in it is believed: what
    a list or a manifest says is held against what is there. Raises Malformed (E_BUNDLE) for what is no bundle, TooNew.

    Ask for `troubles` last: they come out of the pass over the records, and take one more if there was none.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.manifest: dict[str, Any] = msgspec.json.decode(self._small(MANIFEST, _MANIFEST))
            told = str(self.manifest["format"])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, TypeError, KeyError, RecursionError) as error:
            raise Malformed(f"{path} holds no bundle: manifest.json ({error}).", finding=NAMES) from None
        if told != FORMAT:
            if told.startswith("amends/bundle/"):
                raise TooNew(
                    f"This bundle has format {told}; this amends knows {FORMAT}.", next="Use the newer amends."
                )
            raise Malformed(f"{path} holds no bundle, it says {told!r}.", finding=NAMES)
        size, payload = self.manifest.get("size"), self.manifest.get("payload")
        self.size: int = size if type(size) is int and 0 <= size <= note.SIZE_MAX else 0
        self.payload: str = payload if payload in PAYLOADS else NONE
        self._troubles: dict[str, list[tuple[str, str]]] = {}
        self._more: dict[str, int] = {}  # how many beyond those
        self._seen: dict[str, tuple[str, int, int]] = {}
        self._tiles: dict[str, str] | None = None
        self._tally: Tally | None = None
        self._segments = self._numbered("entries", "ndjson")

    def close(self) -> None:
        """Nothing is kept open."""

    def __enter__(self) -> BundleEvidence:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    # -- files --------------------------------------------------------------------------------------------------------

    def _open(self, name: str) -> IO[bytes]:
        """A regular file of ours; links and devices are not followed. Raises OSError."""
        return open_regular(self.path / name, getattr(os, "O_NOFOLLOW", 0))

    def _small(self, name: str, most: int = _SMALL) -> bytes:
        with self._open(name) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise OSError(errno.EFBIG, "it is too large", name)
        return data

    def _numbered(self, folder: str, ending: str) -> list[str]:
        """The files of a row that are there, in order: from 0 up to the first that is missing."""
        names: list[str] = []
        while os.path.lexists(self.path / (name := f"{folder}/{len(names):06d}.{ending}")):
            names.append(name)
        return names

    def _lines(self, name: str, most: int) -> Iterator[bytes]:
        """The lines of a file; one that is too long comes cut, and is the last. What was read to the end is remembered
        with its SHA-256, bytes and lines."""
        hash, size, count = sha256(), 0, 0
        try:
            with self._open(name) as file:
                while line := file.readline(most + 1):
                    if len(line) > most:
                        yield line
                        return
                    hash.update(line)
                    size += len(line)
                    count += line[-1:] == b"\n"
                    yield line
        except OSError as error:
            self._trouble("files", NAMES, f"{name} cannot be read ({error.strerror or error})")
            return
        self._seen[name] = (hash.hexdigest(), size, count)

    def _digest(self, name: str) -> None:
        """Remember a file's SHA-256, bytes and lines, if it was not read yet; lines of any length, or of none."""
        if name in self._seen:
            return
        hash, size, count = sha256(), 0, 0
        try:
            with self._open(name) as file:
                while block := file.read(_BLOCK):
                    hash.update(block)
                    size += len(block)
                    count += block.count(b"\n")
        except OSError as error:
            self._trouble("files", NAMES, f"{name} cannot be read ({error.strerror or error})")
            return
        self._seen[name] = (hash.hexdigest(), size, count)

    def _trouble(self, sort: str, code: str, reason: str) -> None:
        """The first of each sort are listed, the others counted: a file may hold a billion of them."""
        some = self._troubles.setdefault(sort, [])
        if (code, reason) in some or len(some) >= _FEW:
            self._more[sort] = self._more.get(sort, 0) + ((code, reason) not in some)
        else:
            some.append((code, reason))

    # -- the records --------------------------------------------------------------------------------------------------

    def genesis(self) -> Entry | None:
        line = self.line(0)
        try:
            return None if line is None else parse(line)
        except Malformed:
            return None

    def stored(self, start: int = 0) -> Iterator[Stored | Stub]:
        if start:
            yield from (row for row in in_order(self._rows(), self._stubs()) if _place(row) >= start)
            return
        self._tiles = {}
        tally = Tally(self._tile, self._run_of)
        try:
            for row in in_order(self._rows(), self._stubs()):
                if isinstance(row, Stub):
                    if row.start == tally.tiles.size and row.start % (1 << row.level) == 0:
                        tally.stub(row)
                else:
                    tally.entry(row.line)
                    tally.counts["openings"] += 0 if row.blob is None else _openings_in(row.blob)
                yield row
            tally.tiles.finish()
            self._tally = tally
        except Malformed as error:  # a record of the log's own that cannot be read: whoever examines says so too
            self._trouble("manifest", NAMES, error.message)

    def _tile(self, name: str, data: bytes) -> None:
        assert self._tiles is not None
        self._tiles[name] = sha256(data).hexdigest()

    def _run_of(self, n: int) -> bytes | None:
        """A run's root as a tile says it."""
        level_1 = self.size // RUN
        first, place = n - n % RUN, n % RUN
        partial = level_1 - first if first + RUN > level_1 else 0
        try:
            data = self._small(tile_name(1, n // RUN, partial))
        except OSError:
            return None
        return data[place * 32 : place * 32 + 32] or None

    def _rows(self) -> Iterator[Stored]:
        """The records with their openings. A line stands at the place that it names, if that can be."""
        place = 0
        for number, name in enumerate(self._segments):
            openings = _Openings(self, number)
            for line in self._lines(name, LINE_MAX):
                front = FRONT.match(line)
                seq = max(place, int(front[1])) if front else place
                yield Stored(seq, line, None, openings.of(seq), None)
                place = seq + 1
            openings.finish()

    def _stubs(self) -> Iterator[Stub]:
        for line in self._lines(STUBS, 200):
            found = _STUB.fullmatch(line)
            if found is None:
                self._trouble("stubs", NAMES, f"{STUBS} has a line that is no stub")
                return
            yield Stub(int(found[1]), int(found[2]), bytes.fromhex(found[3].decode()))

    def line(self, seq: int) -> bytes | None:
        for number, name in enumerate(self._segments):
            after = self._segments[number + 1 : number + 2]
            if after and self._first(after[0]) <= seq:
                continue
            try:
                with self._open(name) as file:
                    while line := file.readline(LINE_MAX + 1):
                        front = FRONT.match(line)
                        if front and int(front[1]) >= seq:
                            return line if int(front[1]) == seq else None
            except OSError:
                return None
        return None

    def _first(self, name: str) -> int:
        """The place that the first line of a segment names."""
        try:
            with self._open(name) as file:
                front = FRONT.match(file.readline(LINE_MAX + 1))
        except OSError:
            front = None
        return int(front[1]) if front else note.SIZE_MAX

    def peaks(self, size: int) -> Peaks:
        """From the tiles where they are all there, and what lies after them."""
        roots = [self._run_of(n) for n in range(size // RUN)]
        known = [root for root in roots if root is not None and len(root) == 32]
        tree = Peaks.restore(known if len(known) == len(roots) else [], [])
        for row in self.stored(tree.size) if tree.size else in_order(self._rows(), self._stubs()):
            if tree.size == size:
                break
            if _place(row) != tree.size:
                break
            if isinstance(row, Stub):
                if tree.size + (1 << row.level) > size:
                    break
                tree.skip(row.level, row.hash)
            else:
                tree.extend([leaf(row.line)])
        tree.runs.clear()
        if tree.size != size:
            raise Damaged(f"The tree of the first {size} records cannot be grown from this bundle.", seq=tree.size)
        return tree

    # -- signatures ---------------------------------------------------------------------------------------------------

    def checkpoints(self) -> Iterator[tuple[int, bytes]]:
        genesis = self.genesis()
        if genesis is None:
            return
        log_key = bytes.fromhex(genesis.log)
        key = note.Key(origin_of(log_key), note.ED25519, log_key)
        heads: dict[int, bytes] = {}
        for name in [*self._checkpoint_names(), CHECKPOINT]:
            if os.path.lexists(self.path / name):
                head = self._head(name, key)
                if head is not None:
                    heads[head[0]] = head[1]
        yield from sorted(heads.items())

    def _checkpoint_names(self) -> list[str]:
        try:
            names = os.listdir(self.path / "checkpoints")
        except OSError:
            return []
        return [f"checkpoints/{name}" for name in names if name.isascii() and name.isdigit()]

    def _head(self, name: str, key: note.Key) -> tuple[int, bytes] | None:
        """Size, root and the device's signature in a note; others may have signed below it."""
        try:
            text = self._small(name)
            body, _, below = text.partition(b"\n\n")
            head = note.parse_checkpoint(body + b"\n")
            signature = base64.b64decode(below.split(b"\n")[0].rpartition(b" ")[2])[4:]
            ours = note.signature_line(key, signature)
            if head.origin == key.name and below.startswith(ours) and name in (CHECKPOINT, f"checkpoints/{head.size}"):
                return head.size, head.root + signature
            reason = "it is not a head of this log under this name"
        except (OSError, ValueError, AmendsError) as error:
            reason = str(error)
        self._trouble("checkpoints", NAMES, f"{name}: {reason}")
        return None

    def notes(self) -> list[bytes]:
        try:
            return [self._small(CHECKPOINT)]
        except OSError:
            return []

    # -- what is wrong with the folder --------------------------------------------------------------------------------

    def troubles(self) -> list[tuple[str, str]]:
        if self._tally is None and "manifest" not in self._troubles:
            for _ in self.stored():
                pass
        self._troubles.pop("sums", None)
        self._more.pop("sums", None)
        listed = self._listed()
        self._names(listed)
        self._sums(listed)
        self._signatures()
        self._compare()
        found: list[tuple[str, str]] = []
        for sort, some in self._troubles.items():
            found += some
            if more := self._more.get(sort):
                found.append((some[0][0], f"and {more} more of that sort"))
        return list(dict.fromkeys(found))

    def _listed(self) -> dict[str, str]:
        """Name -> SHA-256 in hex, as listed."""
        sums: dict[str, str] = {}
        before = b""
        try:
            self._small(SUMS)
        except OSError as error:
            self._trouble("sums", NAMES, f"{SUMS} cannot be read ({error.strerror or error})")
            return sums
        for line in self._lines(SUMS, 300):
            found = _SUM.fullmatch(line)
            name = found[2].decode() if found else ""
            if found is None or not _NAME.fullmatch(name) or name in UNLISTED or found[2] <= before:
                self._trouble("sums", NAMES, f"{SUMS} has a line that lists nothing, or lists out of order")
                continue
            before = found[2]
            sums[name] = found[1].decode()
        if not sums:
            self._trouble("sums", NAMES, f"{SUMS} lists nothing")
        return sums

    def _names(self, listed: dict[str, str]) -> None:
        """Exactly the files that are listed are there, as files."""
        missing = dict.fromkeys([*listed, SUMS])
        folders = {name.rpartition("/")[0] for name in listed}
        folders |= {folder.rpartition("/")[0] for one in list(folders) for folder in _above(one)} | set(folders)
        for name, kind in self._walk(""):
            if kind == "folder":
                if name not in folders:
                    self._trouble("names", NAMES, f"{ascii(name)} is a folder that is not of the bundle")
            elif kind != "file":
                self._trouble("names", NAMES, f"{ascii(name)} is no file but {kind}")
                missing.pop(name, None)
            elif name in missing:
                del missing[name]
            elif name not in UNLISTED:
                self._trouble("names", NAMES, f"{ascii(name)} is not listed")
        for name in missing:
            self._trouble("names", NAMES, f"{name} is missing")

    def _walk(self, folder: str) -> Iterator[tuple[str, str]]:
        try:
            with os.scandir(self.path / folder) as found:
                items = sorted(found, key=lambda item: item.name)
        except OSError as error:
            self._trouble("names", NAMES, f"{ascii(folder)} cannot be listed ({error.strerror or error})")
            return
        for item in items:
            name = f"{folder}/{item.name}" if folder else item.name
            if item.is_symlink():
                yield name, "a link"
            elif item.is_dir(follow_symlinks=False):
                yield name, "folder"
                yield from self._walk(name)
            else:
                yield name, "file" if item.is_file(follow_symlinks=False) else "something else"

    def _sums(self, listed: dict[str, str]) -> None:
        told = self.manifest.get("files")
        files: dict[str, Any] = told if isinstance(told, dict) else {}
        for name, hash in listed.items():
            self._digest(name)
            seen = self._seen.get(name)
            if seen is not None and seen[0] != hash:
                self._trouble("files", NAMES, f"{name} is not the file that is listed")
            says = {"sha256": seen[0], "bytes": seen[1], "lines": seen[2]} if seen else None
            if seen is not None and not name.startswith("tile/") and name != MANIFEST and files.get(name) != says:
                self._trouble("manifest", NAMES, f"{name} is not the file of which {MANIFEST} tells")
        for name in files.keys() - listed.keys():
            self._trouble("manifest", NAMES, f"{MANIFEST} tells of {ascii(name)}, which is not listed")
        self._compare_tiles({name: hash for name, hash in listed.items() if name.startswith("tile/")})

    def _compare_tiles(self, listed: dict[str, str]) -> None:
        """A tile is the hashes of these records, whoever has signed its sum."""
        if self._tally is None or self._tiles is None or self.broken:
            return
        for name in sorted(self._tiles.keys() | listed.keys()):
            if listed.get(name) != self._tiles.get(name):
                self._trouble("tiles", NAMES, f"{name} is not the tile of these records")

    @property
    def broken(self) -> bool:
        """Whether it was exported though it did not verify."""
        return self.manifest.get("verdict") != "INTACT"

    def _signatures(self) -> None:
        """The list is signed by the key that the first record names, in both forms."""
        if self.broken:
            verdict = ascii(self.manifest.get("verdict"))
            self._trouble("signed", NAMES, f"it was exported though it did not verify ({verdict}); nobody signed it")
            return
        genesis = self.genesis()
        if genesis is None:
            return
        try:
            log_key, export_key = bytes.fromhex(genesis.log), bytes.fromhex(genesis.export)
            message = self._small(SUMS)
            for name, holds in ((SIGNIFY, signify_holds), (MINISIGN, minisign_holds)):
                if not holds(export_key, self._small(name), message):
                    self._trouble("signed", SIGNED_BY, f"{name} is no signature of the device's export key over {SUMS}")
            for name, data in key_files(log_key, export_key).items():
                if self._small(name) != data:
                    self._trouble("signed", NAMES, f"{name} is not the key that record 0 names")
        except (OSError, ValueError) as error:
            self._trouble("signed", SIGNED_BY, f"{SUMS} cannot be told to be signed ({error})")

    def _compare(self) -> None:
        """What the manifest says of the records is what they are."""
        if self._tally is None:
            return
        told = self._tally.told() | {"size": self._tally.tiles.size, "tiles": len(self._tiles or {})}
        if self.broken:
            told.pop("tiles")
        genesis = self.genesis()
        if genesis is not None:
            log_key = bytes.fromhex(genesis.log)
            origin = origin_of(log_key)
            told |= {"origin": origin, "log_key": note.vkey(origin, log_key), "export_key": genesis.export}
        for key, value in told.items():
            if self.manifest.get(key) != value:
                self._trouble("manifest", NAMES, f"{MANIFEST} says otherwise about `{key}` than its records")
        if not self.broken:
            self._compare_head(told["size"], told["root"])

    def _compare_head(self, size: int, root: str) -> None:
        try:
            head = note.parse_checkpoint(self._small(CHECKPOINT).partition(b"\n\n")[0] + b"\n")
        except (OSError, Malformed) as error:
            self._trouble("checkpoints", NAMES, f"{CHECKPOINT} cannot be read ({error})")
            return
        if (head.size, head.root.hex()) != (size, root):
            self._trouble("checkpoints", NAMES, f"{CHECKPOINT} is not the head of these records")


def _place(row: Stored | Stub) -> int:
    return row.start if isinstance(row, Stub) else row.seq


def _above(folder: str) -> Iterator[str]:
    """The folder and those that it is in, each with a name below it."""
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]


def _openings_in(cell: bytes) -> int:
    return len(seal.parts(cell)) if seal.is_sealed(cell) else cell.count(b"\n")


class _Openings:
    """The openings beside one segment, handed to the records they belong to, as cells."""

    def __init__(self, bundle: BundleEvidence, number: int) -> None:
        self._bundle, self._name = bundle, ""
        self._next: tuple[int, int, bytes] | None = None
        folder = OPENINGS.get(bundle.payload)
        self._lines: Iterator[tuple[int, int, bytes]] = iter(())
        if folder:
            self._name = f"{folder}/{number:06d}.ndjson"
            self._lines = self._plain(number) if bundle.payload == PLAIN else self._sealed()
        self._advance()

    def _plain(self, number: int) -> Iterator[tuple[int, int, bytes]]:
        lines = self._bundle._lines(self._name, MOST)
        places = self._bundle._lines(f"openings/{number:06d}.tsv", 64)
        while True:
            line, place = next(lines, None), next(places, None)
            if line is None and place is None:
                return
            found = _PLACE.fullmatch(place or b"")
            if line is None or found is None:
                self._stray("a line has no place, or a place no line")
                return
            yield int(found[1]), int(found[2]), line

    def _sealed(self) -> Iterator[tuple[int, int, bytes]]:
        for line in self._bundle._lines(self._name, MOST):
            found = _SEALED.fullmatch(line)
            try:
                data = base64.b64decode(found[3], validate=True) if found else b""
            except ValueError:
                data = b""
            if found is None or len(data) <= seal.NONCE + seal.TAG:
                self._stray("a line is no sealed opening")
                return
            yield int(found[1]), int(found[2]), data

    def _advance(self) -> None:
        self._next = next(self._lines, None)

    def of(self, seq: int) -> bytes | None:
        """The cell of the record at this place, None where it has no opening here."""
        mine: list[tuple[int, bytes]] = []
        while self._next is not None and self._next[0] <= seq:
            at, place, data = self._next
            if at < seq or (mine and place <= mine[-1][0]):
                self._stray(f"an opening stands at record {at}, place {place}, where none can")
            else:
                mine.append((place, data))
            self._advance()
        if not mine:
            return None
        if self._bundle.payload == PLAIN:
            return b"".join(data for _, data in mine)
        return seal.join(seal.Part(place, data[: seal.NONCE], data[seal.NONCE :]) for place, data in mine)

    def finish(self) -> None:
        while self._next is not None:
            self._stray(f"an opening of record {self._next[0]}, which is not in this segment")
            self._advance()

    def _stray(self, reason: str) -> None:
        self._bundle._trouble("openings", EXTRA, f"{self._name}: {reason}")
