"""A log belongs to one device, and a device notices when its past was swapped: old copy, clone, or another's file.

The keys come from `device/seed`, outside the database (keys.py). Each time the head of the log is safe on the disk, it
is also written to two *anchors* outside the database (anchor.py): one in `device/`, one in the user's state folder. At
open the database must be at least as long as each anchor says and have the root it had then. If not, it was restored
from an older copy, cut, or forked, and is opened for reading only: going on would sign two histories of one device.
`adopt` begins a new *incarnation* under new keys, and its first record says what it follows, who decided and why.

What this cannot see: database and both anchors restored together to the same old moment. Peers that remember a
head can (they are asked by the mesh).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol

import msgspec

from . import driver, foreign
from .anchor import Anchor
from .anchor import read_all as read_anchors
from .chain import Chain, Draft, Row
from .clock import Clock, SystemClock
from .entry import Entry, parse
from .errors import Damaged, HomeRefused, LogHeld, Malformed, YouErred
from .evidence import DatabaseError, Evidence, Stored
from .facts import SEALED
from .fold import NoView, View
from .home import SEED_BYTES, Home, Install, adopt_words, in_words, keys_missing, new_id, replace_file, sync_folder
from .keys import Follows, Identity, Reader, Warn, origin_of, say
from .merkle import EMPTY, HashReader, root_at
from .seal import Owner
from .sqlite import SqliteLog, open_read
from .stubs import Stub

FIRST_ANCHOR_S = 1.0
"""How long a log without any anchor is waited for, in seconds: whoever makes one anchors it at once."""

# ---- the guard ------------------------------------------------------------------------------------------------------


class Peek(HashReader, Protocol):
    """What the guard asks of a database before anybody writes to it."""

    @property
    def size(self) -> int:
        """How many entries it holds."""

    def genesis(self) -> Entry | None:
        """Its first entry, None if there is none."""


class Restored(msgspec.Struct, frozen=True):
    """What a restored home came from, kept in `device/restored` until it is adopted: id of the backup, origin and size
    of the log in it."""

    id: str
    origin: str
    size: int


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
    if genesis is not None and _restored(identity.home, genesis):
        yield Objection(
            "restored",
            "This home was restored from a backup. The device it was copied from may live on, and two homes that sign "
            "under one key are two histories of one device.",
        )
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
                "somebody changed them, or there are two histories, as when a copy of the home went its own way. "
                "`amends verify` tells which record does not add up.",
            )


def _restored(home: Home, genesis: Entry) -> bool:
    """Whether the log is the one that a backup brought here, and nobody has decided yet that it goes on."""
    try:
        mark = msgspec.json.decode(home.restored.read_bytes(), type=Restored)
    except FileNotFoundError:
        return False
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    return mark.origin == origin_of(bytes.fromhex(genesis.log))


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
    owner: Callable[[], Owner | None] | None = None,
    bare: bool = False,
) -> SqliteLog:
    """The device's log, created on first use; opened for reading only, with one warning per trouble, if not `write`.
    owner: asked for the key of a log that is sealed; bare: without it, facts that have no opening may be written.

    Raises HomeRefused (exit 4) if this home may not go on writing, and what opening the file raises.
    """
    home = home if isinstance(home, Home) else Home(home)
    with in_words(home.path):
        return _open_log(home, view, clock, write, say if warn is None else warn, owner, bare)


def _open_log(
    home: Home,
    view: View,
    clock: Clock | None,
    write: bool,
    warn: Warn,
    owner: Callable[[], Owner | None] | None,
    bare: bool,
) -> SqliteLog:
    home.check_whole()
    if write:
        home.create()
    with_keys = home.seed.exists()
    if write and not with_keys:
        raise keys_missing(home)
    if not write and not home.db.exists() and not with_keys:
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
                if write or not peek.size:  # a log that vanished is no home that nobody has made yet
                    raise objection.refusal()
                troubles.append(objection.message)
            fresh = not peek.size
            if fresh and not write:  # another process is just making it
                raise _nothing_here(home)
        finally:
            peek.close()
    except DatabaseError as error:
        raise Damaged(f"{home.db} cannot be read ({error}).", next="Run `amends verify`.") from error
    if write and isinstance(identity, Identity):
        troubles += _note_move(home, identity, bool(anchors) or (not fresh and _anchored_soon(home, identity)), fresh)
    for text in (*home.warnings, *troubles):
        warn(text)
    home.warnings.clear()
    return SqliteLog(
        home.db,
        view,
        identity,
        clock=clock,
        write=write,
        holder=lambda: holders(home),
        warn=warn,
        owner=owner,
        bare=bare,
    )


def _anchored_soon(home: Home, identity: Identity) -> bool:
    """Whether an anchor appears: of several that make a home at once, one has a log before it has anchored it."""
    end = monotonic() + FIRST_ANCHOR_S
    while not read_anchors(home, identity)[0]:
        if monotonic() > end:
            return False
        sleep(0.02)
    return True


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
            continue  # not every system has one, nor this file
    return ""


# ---- a new incarnation ----------------------------------------------------------------------------------------------


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
    home.check_whole()
    if not home.exists():
        raise _nothing_here(home)
    home.create()
    if alive := holders(home):
        raise LogHeld(f"The home is in use: {alive}.", next="End it, then adopt.")
    with home.locked():
        _settle_adoption(home)
        if _in_order(home):
            raise YouErred(
                "This home is in order: its log is the one that this device signed, and nothing needs adopting.",
                next="Go on using it.",
                code="nothing_to_adopt",
            )
        return _adopt(home, {"by": by, "reason": reason}, clock or SystemClock())


def _in_order(home: Home) -> bool:
    """Whether the log that lies here may go on as it is."""
    if not home.seed.exists() or not home.install.exists() or not home.db.exists():
        return False
    identity = Identity.load(home)
    peek = open_read(home.db)
    try:
        return peek.size > 0 and not list(objections(identity, read_anchors(home, identity)[0], peek))
    finally:
        peek.close()


def _adopt(home: Home, why: dict[str, Any], clock: Clock) -> list[Left]:
    home.device.mkdir(mode=0o700, exist_ok=True)
    if not home.seed.exists():
        replace_file(home.seed, os.urandom(SEED_BYTES))
    seed = home.load_seed()
    was = home.load_install() if home.install.exists() else Install("", 0)
    old = Identity(home, was, seed) if was.install else None
    origin, size, root, left, sealed = _followed(home)
    lost = _lost(home, old, size, root)
    given_up = dict.fromkeys([*was.left, *([old.origin] if old else []), *([origin] if origin else [])])
    install = Install(new_id(), was.incarnation + 1, synced_ok=was.synced_ok, left=list(given_up))
    identity = Identity(home, install, seed)
    follows = Follows(origin or (old.origin if old else "unknown"), size, root, why | lost)
    rows, root, signature = _first_rows(identity, follows, sealed, clock)
    home.save_install(install, next=True)
    foreign.retire(home.db, origin, rows, root + signature)
    _settle_adoption(home)
    identity.anchor(len(rows), root, signature, sync=True)
    home.restored.unlink(missing_ok=True)
    return left


def _followed(home: Home) -> tuple[str, int, bytes, list[Left], str]:
    """Origin, size, root, open sagas and seal of the log that lies there, followed from its first record to its
    last."""
    if _genesis(home) is None:
        return "", 0, EMPTY, [], ""
    chain = Chain(NoView())
    with Evidence(home.db) as evidence:
        genesis = evidence.genesis()
        for row in evidence.stored():
            try:
                _follow_row(chain, row)
            except (Damaged, Malformed) as error:
                raise Damaged(
                    f"What lies here does not add up at record {row[0]}, and is not followed: {error.message}",
                    next=f"`amends verify` says more. Move {home.db} away to begin without it.",
                    seq=row[0],
                ) from error
    if genesis is None:
        return "", 0, EMPTY, [], ""
    left = [Left(saga, thread.first, thread.head) for saga, thread in chain.threads.items()]
    return origin_of(bytes.fromhex(genesis.log)), chain.size, chain.tree.root(), left, chain.keeping.seal


def _follow_row(chain: Chain, row: Stored | Stub) -> None:
    if isinstance(row, Stub):  # of removed records
        chain.tree.skip(row.level, row.hash)
        return
    entry = parse(row.line)
    if chain.tree.size != entry.seq:
        raise Damaged("records before it are missing.")
    if entry.seq > chain.size:
        chain.skip(entry.seq, entry.prev)
    hash = chain.follow(entry, row.line)
    chain.tree.extend([hash])
    if row.sig is not None and row.sig[:32] not in (hash, chain.tree.root()):
        raise Damaged("it is not what was written there.")


def _lost(home: Home, old: Identity | None, size: int, root: bytes) -> dict[str, Any]:
    """The head that is remembered and is not there, as fields of the opening."""
    anchors = read_anchors(home, old)[0] if old else []
    if not anchors or (anchors[0].size, anchors[0].root) == (size, root):
        return {}
    anchor = anchors[0]
    return {"lost_origin": anchor.origin, "lost_root": anchor.root.hex(), "lost_size": anchor.size}


def _first_rows(identity: Identity, follows: Follows, sealed: str, clock: Clock) -> tuple[list[Row], bytes, bytes]:
    """The genesis; after a log that was sealed, also that this one is, under the same key: whoever decides need not
    have that, and nothing may be written without it."""
    chain = Chain(NoView())
    drafts = [identity.genesis(follows), *([Draft(SEALED, {"seal": sealed})] if sealed else [])]
    rows, [(_, answer)] = chain.take([(lambda view, now: drafts, None)], chain.now(clock))
    if isinstance(answer, BaseException):
        raise answer
    root = chain.tree.root()
    return rows, root, identity.sign(chain.size, root)


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


def identity_of(home: Home) -> Identity | None:
    """The keys that the log of a home goes by, changing nothing; None if they are not there."""
    try:
        identity = Identity.load(home)
    except HomeRefused:
        return None
    if home.next_install.exists():
        next = Identity(home, msgspec.json.decode(home.next_install.read_bytes(), type=Install), home.load_seed())
        try:
            genesis = _genesis(home)
        except (Damaged, Malformed, DatabaseError):
            return identity
        if genesis is not None and genesis.log == next.log_key.hex():
            return next
    return identity


def _genesis(home: Home) -> Entry | None:
    if not home.db.exists():
        return None
    peek = open_read(home.db)
    try:
        return peek.genesis()
    finally:
        peek.close()
