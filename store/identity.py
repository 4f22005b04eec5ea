"""A log belongs to one device, and a device notices when its past was swapped: old copy, clone, or another's file.

The keys come from `device/seed`, outside the database, one key for one job. Each time the head of the log is safe on
the disk, it is also written to two *anchors* outside the database: a fixed block in `device/` and one in the user's
state folder. At open the database must be at least as long as each anchor says and have the root it had then. If not,
it was restored from an older copy, cut, or forked, and is opened for reading only: going on would sign two histories
of one device. `adopt` begins a new *incarnation* under new keys, and its first record says what it follows, who
decided and why.

What this cannot see: database and both anchors restored together to the same old moment. Peers that remember a
head can (they are asked by the mesh).

Keys: HKDF-SHA-256 (RFC 5869) over the seed. All but the id key also depend on install id and incarnation, so that a
copied seed does not make one key of two devices.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol

import msgspec
from nacl import bindings

from . import driver, foreign, note
from .chain import Chain, Draft, Row
from .clock import Clock, SystemClock
from .entry import VERSION, Entry, parse
from .errors import Damaged, HomeRefused, LogHeld, Malformed, YouErred
from .evidence import DatabaseError, Evidence
from .fold import NoView, View
from .home import SEED_BYTES, Home, Install, adopt_words, keys_missing, new_id, replace_file, sync_folder
from .merkle import EMPTY, HashReader, root_at
from .sqlite import SqliteLog, open_read

BLOCK = 512
_MAGIC = b"amends-anchor/1 "
_PATIENCE_S = 0.25
_JOBS = ("log", "witness", "export", "noise")  # of one incarnation
_STANDING_JOBS = ("id", "fingerprint")  # of the device, whatever its incarnation

Warn = Callable[[str], None]


# ---- keys -----------------------------------------------------------------------------------------------------------


def hkdf(seed: bytes, info: bytes, length: int = 32) -> bytes:
    """HKDF-SHA-256 without salt (RFC 5869), up to 255 * 32 bytes."""
    key = hmac.digest(bytes(32), seed, "sha256")
    block = out = b""
    counter = 0
    while len(out) < length:
        counter += 1
        block = hmac.digest(key, block + info + bytes([counter]), "sha256")
        out += block
    return out[:length]


def origin_of(public: bytes) -> str:
    """`amends.local/` and 26 characters of base32(SHA-256(log key)): the name of a log."""
    return "amends.local/" + _base32(sha256(public).digest())


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode()[:26].lower()


class Identity:
    """What this device signs and names things with. Any process that may read `device/seed` is this device."""

    def __init__(self, home: Home, install: Install, seed: bytes, warn: Warn | None = None) -> None:
        self.home, self.install, self.incarnation = home, install.install, install.incarnation
        self.left = tuple(install.left)
        self._warn: Warn = say if warn is None else warn
        self._second_works = True
        own = {job: hkdf(seed, f"amends/1/{job}/{install.install}/{install.incarnation}".encode()) for job in _JOBS}
        self._id_key, self._fingerprint_key = (hkdf(seed, f"amends/1/{job}".encode()) for job in _STANDING_JOBS)
        self.log_seed, self.witness_seed, self.export_seed, self.noise_secret = (own[job] for job in _JOBS)
        self.log_key, self._log_secret = bindings.crypto_sign_seed_keypair(self.log_seed)
        self.witness_key, self.export_key = note.public_of(self.witness_seed), note.public_of(self.export_seed)
        self.noise_key: bytes = bindings.crypto_scalarmult_base(self.noise_secret)
        self.origin = origin_of(self.log_key)
        self.log_vkey = note.vkey(self.origin, self.log_key)
        self._note_key = note.Key(self.origin, note.ED25519, self.log_key)

    @classmethod
    def load(cls, home: Home, warn: Warn | None = None) -> Identity:
        """The identity of a home. Raises HomeRefused (`keys_missing`), Malformed for an unreadable install file."""
        return cls(home, home.load_install(), home.load_seed(), warn)

    def genesis(self, follows: Follows | None = None) -> Draft:
        """`log.opened`: the format, this device's public keys, and for a later incarnation what it follows."""
        fields: dict[str, Any] = {
            "v": VERSION,
            "log": self.log_key.hex(),
            "witness": self.witness_key.hex(),
            "export": self.export_key.hex(),
            "noise": self.noise_key.hex(),
            "install": self.install,
        }
        if follows is None:
            return Draft("log.opened", fields)
        fields |= {"follows": follows.origin, "follows_size": follows.size, "follows_root": follows.root.hex()}
        return Draft("log.opened", fields, (msgspec.json.encode(follows.why, order="sorted"),))

    def sign(self, size: int, root: bytes) -> bytes:
        """The log key's signature, 64 bytes, over the checkpoint of this head."""
        body = note.checkpoint_body(self.origin, size, root)
        signature: bytes = bindings.crypto_sign(body, self._log_secret)[:64]
        return signature

    def signed(self, size: int, root: bytes, signature: bytes) -> bool:
        """Whether the log key made this signature over this head."""
        return note.verify(self.log_key, note.checkpoint_body(self.origin, size, root), signature)

    def note(self, size: int, root: bytes, signature: bytes) -> bytes:
        """The head as a C2SP signed note."""
        body = note.checkpoint_body(self.origin, size, root)
        return note.note_of(body, [note.signature_line(self._note_key, signature)])

    def anchor(self, size: int, root: bytes, signature: bytes, *, sync: bool = False) -> bool:
        """Remember this head outside the database, if it is larger than what is remembered; say whether it, or a
        larger one, now is. Call it only when the commit is on the disk. `sync` waits for the disk."""
        block = _pack(self.install, self.note(size, root, signature))
        kept = _write_anchor(self.home.anchor, block, self, size, sync)
        if self._second_works:
            try:
                self.home.anchors.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write_anchor(self.home.anchors / self.install, block, self, size, sync)
            except OSError as error:
                self._second_works = False
                self._warn(
                    f"The second anchor in {self.home.anchors} cannot be written ({error.strerror or error}): "
                    "restoring the whole home to an older copy will not be noticed by this device alone."
                )
        return kept

    def anchored(self) -> Anchor | None:
        """The newest head that is remembered outside the database."""
        anchors, _ = read_anchors(self.home, self)
        return max(anchors, key=lambda anchor: anchor.size, default=None)

    def hide(self, name: str) -> str:
        """The header id of a name the user gave, 26 characters: names may be personal, and headers are not erased."""
        return _base32(hmac.digest(self._id_key, name.encode(), "sha256"))

    def meter(self, name: str) -> str:
        """The header name of what a limit or a lock is keyed by, 16 hex characters."""
        return hmac.digest(self._id_key, b"meter\0" + name.encode(), "sha256").hex()[:16]

    def fingerprint(self, value: bytes) -> str:
        """What stands in the log for a secret: equal values have equal ones on this device, and nothing leads back."""
        return _base32(hmac.digest(self._fingerprint_key, value, "sha256"))


class Reader:
    """Stands in for an identity where the keys are missing or the log is another's: everything can be read."""

    def __init__(self, home: Home, genesis: Entry | None) -> None:
        self.home = home
        self.log_key = bytes.fromhex(genesis.log) if genesis else b""
        self.install = genesis.install if genesis else ""
        self.incarnation, self.left = 0, ()
        self.origin = origin_of(self.log_key) if genesis else "amends.local/unknown"
        self.log_vkey = note.vkey(self.origin, self.log_key) if genesis else ""

    def signed(self, size: int, root: bytes, signature: bytes) -> bool:
        return note.verify(self.log_key, note.checkpoint_body(self.origin, size, root), signature)

    def genesis(self, follows: Follows | None = None) -> Draft:
        raise keys_missing(self.home)

    def sign(self, size: int, root: bytes) -> bytes:
        raise keys_missing(self.home)

    def anchor(self, size: int, root: bytes, signature: bytes, *, sync: bool = False) -> bool:
        return False

    def anchored(self) -> Anchor | None:
        return None

    def hide(self, name: str) -> str:
        """No saga goes by it: the key that would say which is missing."""
        return ""

    meter = hide

    def fingerprint(self, value: bytes) -> str:
        raise keys_missing(self.home)


# ---- anchors --------------------------------------------------------------------------------------------------------


class Anchor(NamedTuple):
    """A head remembered outside the database."""

    path: Path
    install: str
    origin: str
    size: int
    root: bytes
    signature: bytes


def _pack(install: str, text: bytes) -> bytes:
    """The block: magic, install id, LF, the note, zeros, CRC-32 of all that as 8 hex digits, LF. 512 bytes."""
    front = (_MAGIC + install.encode() + b"\n" + text).ljust(BLOCK - 9, b"\0")
    return front + b"%08x\n" % binascii.crc32(front)


def _unpack(path: Path, block: bytes) -> Anchor | None:
    """None if the block is torn, or not one of ours."""
    front, crc = block[: BLOCK - 9], block[BLOCK - 9 :]
    if len(block) != BLOCK or not front.startswith(_MAGIC) or crc != b"%08x\n" % binascii.crc32(front):
        return None
    install, _, text = front[len(_MAGIC) :].rstrip(b"\0").partition(b"\n")
    body, _, line = text.rpartition(b"\n\n")
    try:
        head = note.parse_checkpoint(body + b"\n")
        signature = base64.b64decode(line.split(b" ")[-1].strip(), validate=True)[4:]
    except (Malformed, ValueError):
        return None
    return Anchor(path, install.decode("ascii", "replace"), *head, signature)


def _write_anchor(path: Path, block: bytes, identity: Identity, size: int, sync: bool) -> bool:
    """In place, under the file's own lock, only to a larger size. False: another process holds the lock too long."""
    try:
        fd = driver.open_known(path, os.O_RDWR)
    except FileNotFoundError:
        replace_file(path, block)
        return True
    try:
        if not _lock_soon(fd):
            return False
        there = _unpack(path, os.pread(fd, BLOCK + 1, 0))
        if there and there.origin == identity.origin and there.size >= size:
            return True
        if there and there.origin != identity.origin and there.origin not in identity.left:
            return False  # another device's: the guard at open has words for it
        os.pwrite(fd, block, 0)
        if sync:
            os.fsync(fd)
        return True
    finally:
        driver.close_known(fd)


def _lock_soon(fd: int) -> bool:
    """Whoever holds it writes 512 bytes; only a stopped process holds it longer, and nobody waits for that."""
    end = monotonic() + _PATIENCE_S
    while not driver.try_lock(fd):
        if monotonic() > end:
            return False
        sleep(0.002)
    return True


def read_anchors(home: Home, identity: Identity | Reader) -> tuple[list[Anchor], list[str]]:
    """The anchors of this device, largest first, and what is to be said about those that cannot be used.

    An anchor of an incarnation that was given up is none; one of another origin is returned, for the guard to refuse.
    """
    anchors, troubles = [], []
    for path in (home.anchor, home.anchors / identity.install):
        try:
            anchor = _read_anchor(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            troubles.append(f"The anchor {path} cannot be read ({error.strerror or error}).")
            continue
        if anchor is None:
            troubles.append(f"The anchor {path} is damaged and says nothing.")
        elif anchor.origin in identity.left:
            continue
        elif anchor.origin == identity.origin and not identity.signed(anchor.size, anchor.root, anchor.signature):
            troubles.append(f"The anchor {path} is not signed by this device and says nothing.")
        else:
            anchors.append(anchor)
    return sorted(anchors, key=lambda anchor: -anchor.size), troubles


def _read_anchor(path: Path) -> Anchor | None:
    for _ in range(3):  # a look while somebody writes may see half of each
        with open(path, "rb") as file:
            anchor = _unpack(path, file.read(BLOCK + 1))
        if anchor is not None:
            return anchor
    return None


# ---- the guard ------------------------------------------------------------------------------------------------------


class Peek(HashReader, Protocol):
    """What the guard asks of a database before anybody writes to it."""

    @property
    def size(self) -> int:
        """How many entries it holds."""

    def genesis(self) -> Entry | None:
        """Its first entry, None if there is none."""


class Objection(NamedTuple):
    """Why a home may not be written. `code` as in HomeRefused, `forked` where `verify` says 5 and not 4."""

    code: str
    message: str

    def refusal(self) -> HomeRefused:
        return HomeRefused(
            self.message,
            next=f"`amends log` and `amends verify` still read it. If this is meant to go on, {adopt_words()}",
            code=self.code,
        )


def objections(identity: Identity | Reader, anchors: list[Anchor], peek: Peek) -> Iterator[Objection]:
    """What speaks against going on with this log, worst first. Read the anchors before opening `peek`: the database
    is then never behind them by honest means."""
    genesis = peek.genesis()
    if genesis is not None and genesis.log != identity.log_key.hex():
        yield Objection(
            "foreign_log",
            "This database was written under the keys of another device or incarnation "
            f"({genesis.install or 'unknown'}; this one is {identity.install}).",
        )
        return
    if genesis is not None and genesis.install != identity.install:
        yield Objection(
            "other_device", f"This database belongs to install {genesis.install}, and these keys to {identity.install}."
        )
        return
    for anchor in anchors:
        if anchor.origin != identity.origin:
            yield Objection(
                "other_device",
                f"The anchor {anchor.path} belongs to another log ({anchor.origin}, not {identity.origin}).",
            )
        elif anchor.size > peek.size:
            yield Objection("rolled_back", _behind(anchor, peek.size))
        elif root_at(peek, anchor.size) != anchor.root:
            yield Objection(
                "forked",
                f"The first {anchor.size} records are not the ones this device signed (anchor {anchor.path}): "
                "there are two histories, as when a copy of the home went its own way.",
            )


def _behind(anchor: Anchor, size: int) -> str:
    holds = f"holds {size} records" if size else "is empty or gone"
    return (
        f"The database {holds} and this device signed {anchor.size} (anchor {anchor.path}): it was restored from an "
        "older copy, is a copy whose original went on, or its -wal file was removed."
    )


def open_log(
    home: Home | Path | str,
    view: View,
    *,
    clock: Clock | None = None,
    write: bool = True,
    warn: Warn | None = None,
) -> SqliteLog:
    """The device's log, created on first use; opened for reading only, with one warning per trouble, if not `write`.

    Raises HomeRefused (exit 4) if this home may not go on writing, and what opening the file raises.
    """
    home = home if isinstance(home, Home) else Home(home)
    warn = say if warn is None else warn
    if write:
        home.create()
    with_keys = home.seed.exists()
    if write and not with_keys:
        raise keys_missing(home)
    if not write and not home.db.exists():
        raise _nothing_here(home)
    identity: Identity | Reader
    if with_keys:
        _finish_adoption(home)
        identity = Identity.load(home, warn)
        anchors, troubles = read_anchors(home, identity)
    else:
        anchors, troubles = [], [keys_missing(home).message]
    try:
        peek = open_read(home.db) if home.db.exists() else _Nothing()
        try:
            genesis = peek.genesis()
            if not with_keys or (not write and genesis is not None and genesis.log != identity.log_key.hex()):
                identity = Reader(home, genesis)
            for objection in objections(identity, anchors, peek):
                if write:
                    raise objection.refusal()
                troubles.append(objection.message)
            fresh = not peek.size
        finally:
            peek.close()
    except DatabaseError as error:
        raise Damaged(f"{home.db} cannot be read ({error}).", next="Run `amends verify`.") from error
    if write and isinstance(identity, Identity):
        troubles += _note_move(home, identity, bool(anchors), fresh)
    for text in (*home.warnings, *troubles):
        warn(text)
    home.warnings.clear()
    return SqliteLog(home.db, view, identity, clock=clock, write=write, holder=lambda: holders(home), warn=warn)


def holders(home: Home) -> str:
    """The living drivers of a home, in words: who may be holding the file."""
    told = [driver.describe(home.run, id) for id in driver.listed(home.run)]
    return ", ".join(
        f"{one.get('command', 'a process')} (pid {one.get('pid', '?')}{', stopped' if one['stopped'] else ''})"
        for one in told
        if one["alive"]
    )


class _Nothing:
    """A database that is not there yet, or is gone."""

    size = 0

    def genesis(self) -> Entry | None:
        return None

    def leaf(self, i: int) -> bytes:
        raise IndexError(i)

    run = leaf

    def close(self) -> None:
        pass


def _nothing_here(home: Home) -> YouErred:
    return YouErred(
        f"There is no log at {home.path}.", next="`amends init` makes one, or name another with --home.", code="no_home"
    )


def _note_move(home: Home, identity: Identity, anchored: bool, fresh: bool) -> list[str]:
    """What changed around the home since it was last written: said once, recorded, never refused."""
    with home.locked():
        was = home.load_install()
        now = msgspec.structs.replace(
            was,
            path=str(home.path),
            machine=_machine(identity.install),
            inode=home.device.stat().st_ino,
            second=True,
        )
        if now != was:
            home.save_install(now)
    said = []
    moved = [
        word
        for word, old, new in (
            (f"it was at {was.path}", was.path, now.path),
            ("the machine has another id", was.machine, now.machine),
            ("its folder was copied", was.inode, now.inode),
        )
        if old and new and old != new
    ]
    if moved:
        said.append(
            f"This home was moved ({', '.join(moved)}). That is fine if the old one is not used any more; two copies "
            "that both go on are two histories of one device."
        )
    if was.second and not anchored and not fresh:
        said.append("No anchor of this device was found; whether the database was set back cannot be told this once.")
    return said


def _machine(install: str) -> str:
    """A name for this machine that says nothing elsewhere; "" where it has none."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            with open(path, "rb") as file:
                return sha256(install.encode() + file.read().strip()).hexdigest()[:16]
        except OSError:
            continue
    return ""


def say(text: str) -> None:
    """One line on standard error."""
    print(f"amends: {text}", file=sys.stderr)


# ---- a new incarnation ----------------------------------------------------------------------------------------------


class Follows(NamedTuple):
    """What a new incarnation goes on from: origin, size and root of the old head, and who decided, why, and what was
    lost (an opening)."""

    origin: str
    size: int
    root: bytes
    why: dict[str, Any]


class Left(NamedTuple):
    """A saga that was open when its incarnation was given up: header id, places of its first and newest record."""

    saga: str
    first: int
    head: int


def adopt(home: Home | Path | str, by: str, reason: str, *, clock: Clock | None = None) -> list[Left]:
    """Go on with what lies here as a new incarnation, with new keys, an install id of its own and a new log whose
    genesis names the old head, what was lost, who decided and why. Returns the sagas that were open in the old log.

    Raises YouErred (nothing to adopt, no name or reason), LogHeld while any driver lives, Damaged if the old log does
    not add up: then it must be moved away first, and is not followed.
    """
    home = home if isinstance(home, Home) else Home(home)
    if not by.strip() or not reason.strip():
        raise YouErred("An adoption is somebody's decision.", next="Say --by NAME and --reason TEXT.", code="no_name")
    if not home.exists():
        raise _nothing_here(home)
    home.create()
    if alive := holders(home):
        raise LogHeld(f"The home is in use: {alive}.", next="End it, then adopt.")
    with home.locked():
        _settle_adoption(home)
        return _adopt(home, {"by": by, "reason": reason}, clock or SystemClock())


def _adopt(home: Home, why: dict[str, Any], clock: Clock) -> list[Left]:
    home.device.mkdir(mode=0o700, exist_ok=True)
    if not home.seed.exists():
        replace_file(home.seed, os.urandom(SEED_BYTES))
    seed = home.load_seed()
    was = home.load_install() if home.install.exists() else Install("", 0)
    old = Identity(home, was, seed) if was.install else None
    origin, size, root, left = _followed(home)
    lost = _lost(home, old, size, root)
    given_up = dict.fromkeys([*was.left, *([old.origin] if old else []), *([origin] if origin else [])])
    install = Install(new_id(), was.incarnation + 1, synced_ok=was.synced_ok, left=list(given_up))
    identity = Identity(home, install, seed)
    follows = Follows(origin or (old.origin if old else "unknown"), size, root, why | lost)
    row, root, signature = _first_row(identity, follows, clock)
    home.save_install(install, next=True)
    foreign.retire(home.db, origin, row, root + signature)
    _settle_adoption(home)
    identity.anchor(1, root, signature, sync=True)
    return left


def _followed(home: Home) -> tuple[str, int, bytes, list[Left]]:
    """Origin, size, root and open sagas of the log that lies there, followed from its first record to its last."""
    if _genesis(home) is None:
        return "", 0, EMPTY, []
    chain = Chain(NoView())
    with Evidence(home.db) as evidence:
        genesis = evidence.genesis()
        for row in evidence.stored():
            try:
                hash = chain.follow(parse(row.line), row.line)
                chain.tree.extend([hash])
                if row.sig is not None and row.sig[:32] not in (hash, chain.tree.root()):
                    raise Damaged("it is not what was written there.")
            except (Damaged, Malformed) as error:
                raise Damaged(
                    f"What lies here does not add up at record {row.seq}, and is not followed: {error.message}",
                    next=f"`amends verify` says more. Move {home.db} away to begin without it.",
                    seq=row.seq,
                ) from error
    if genesis is None:
        return "", 0, EMPTY, []
    left = [Left(saga, thread.first, thread.head) for saga, thread in chain.threads.items()]
    return origin_of(bytes.fromhex(genesis.log)), chain.size, chain.tree.root(), left


def _lost(home: Home, old: Identity | None, size: int, root: bytes) -> dict[str, Any]:
    """The head that is remembered and is not there, as fields of the opening."""
    anchors = read_anchors(home, old)[0] if old else []
    if not anchors or (anchors[0].size, anchors[0].root) == (size, root):
        return {}
    anchor = anchors[0]
    return {"lost_origin": anchor.origin, "lost_root": anchor.root.hex(), "lost_size": anchor.size}


def _first_row(identity: Identity, follows: Follows, clock: Clock) -> tuple[Row, bytes, bytes]:
    chain = Chain(NoView())
    rows, [(_, answer)] = chain.take([(lambda view, now: (identity.genesis(follows),), None)], chain.now(clock))
    if isinstance(answer, BaseException):
        raise answer
    root = chain.tree.root()
    return rows[0], root, identity.sign(chain.size, root)


def _finish_adoption(home: Home) -> None:
    """An adoption that was interrupted has reached the database or has not: make the folder agree with it."""
    if home.next_install.exists():
        with home.locked():
            _settle_adoption(home)


def _settle_adoption(home: Home) -> None:
    if not home.next_install.exists():
        return
    next = msgspec.json.decode(home.next_install.read_bytes(), type=Install)
    identity = Identity(home, next, home.load_seed())
    genesis = _genesis(home)
    if genesis is None or genesis.log != identity.log_key.hex():
        home.next_install.unlink()
        return
    os.replace(home.next_install, home.install)
    sync_folder(home.device)


def _genesis(home: Home) -> Entry | None:
    if not home.db.exists():
        return None
    peek = open_read(home.db)
    try:
        return peek.genesis()
    finally:
        peek.close()
