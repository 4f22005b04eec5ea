"""Openings lie sealed under the owner's key: who has the file and not the key reads headers, and no argument.

Each saga has a data key of its own (and the device's own records share one), which lies in the file wrapped by the
owner's key. So another owner's key is taken on by wrapping the data keys anew, and a saga is forgotten in every copy by
destroying its data key. What is committed to are the plain bytes: hashes, order and signatures are the same sealed or
not, and are checked without any key.

Why not SQLite's file encryption: a record could not be forgotten, and nobody without the key could check the order.

A sealed cell starts with byte 1; then per opening: its place in `c` (1 byte), the length of its ciphertext (4 bytes,
big-endian), a nonce (24 bytes), the ciphertext. Places ascend. FORMAT.md 7 has the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from time import monotonic
from typing import NamedTuple, Protocol

from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_decrypt as _decrypt,
)
from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_encrypt as _encrypt,
)
from nacl.exceptions import CryptoError

from .entry import COMMITMENTS_MAX, Entry
from .errors import AmendsError, Malformed, SealKey
from .keeping import Keeping
from .squeeze import LEAST, framed, unframed

SEALED = b"\x01"
KEY, NONCE, TAG = 32, 24, 16
_HEAD = 1 + 4 + NONCE
_PLAIN, _ZSTD = b"\x00", b"\x01"
CACHED = 4096
"""Data keys that a process keeps at hand."""
ASKED_S = 1.0
"""A source that did not give the right key is not asked again for so long."""

# ---- cells ----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """One sealed opening: which commitment of the entry it answers to, and its bytes."""

    place: int
    nonce: bytes
    ciphertext: bytes


def is_sealed(cell: bytes | None) -> bool:
    """Whether a cell holds sealed openings."""
    return cell is not None and cell[:1] == SEALED


def parts(cell: bytes) -> list[Part]:
    """The sealed openings of a cell, in order. Raises Malformed (E_OPENING) for bytes outside the grammar."""
    if cell[:1] != SEALED or len(cell) == 1:
        raise _unreadable("it holds no sealed opening")
    found: list[Part] = []
    at, before = 1, -1
    while at < len(cell):
        place, length = cell[at], int.from_bytes(cell[at + 1 : at + 5], "big")
        end = at + _HEAD + length
        if end > len(cell) or length <= TAG:
            raise _unreadable("it is cut")
        if not before < place < COMMITMENTS_MAX:
            raise _unreadable("its places are out of order")
        found.append(Part(place, cell[at + 5 : at + _HEAD], cell[at + _HEAD : end]))
        at, before = end, place
    return found


def join(found: Iterable[Part]) -> bytes | None:
    """The cell of these sealed openings; None for none."""
    cell = b"".join(
        bytes((part.place,)) + len(part.ciphertext).to_bytes(4, "big") + part.nonce + part.ciphertext for part in found
    )
    return SEALED + cell if cell else None


def _unreadable(why: str) -> Malformed:
    return Malformed(f"Sealed openings cannot be read from their place in the file: {why}.", finding="E_OPENING")


# ---- openings -------------------------------------------------------------------------------------------------------


def placed(entry: Entry, blob: bytes) -> Iterator[tuple[int, bytes]]:
    """Each opening line with its place among the commitments. Raises Malformed (E_OPENING) for one that was altered."""
    for line in blob.splitlines(True):
        digest = sha256(line).hexdigest()
        if digest not in entry.c:
            raise Malformed(
                f"Record {entry.seq} holds what it does not commit to; it is left as it is.", finding="E_OPENING"
            )
        yield entry.c.index(digest), line


def seal(key: bytes, origin: str, entry: Entry, lines: Iterable[tuple[int, bytes]]) -> bytes | None:
    """The cell of opening lines with their places; None for none."""
    bound = _bound(origin, entry.seq)
    sealed = []
    for place, line in lines:
        plain = _PLAIN + line if len(line) < LEAST else _ZSTD + framed(line)
        nonce = os.urandom(NONCE)
        sealed.append(Part(place, nonce, _encrypt(plain, bound + entry.c[place].encode(), nonce, key)))
    return join(sealed)


def unseal(key: bytes, origin: str, entry: Entry, part: Part) -> bytes:
    """The opening line of a sealed part. Raises Malformed (E_CIPHERTEXT) for one that was altered, or lies elsewhere
    than it was sealed for."""
    if part.place >= len(entry.c):
        raise altered(entry)
    try:
        plain = _decrypt(part.ciphertext, _bound(origin, entry.seq) + entry.c[part.place].encode(), part.nonce, key)
        line = plain[1:] if plain[:1] == _PLAIN else unframed(plain[1:])
    except (CryptoError, Malformed):
        raise altered(entry) from None
    if sha256(line).hexdigest() != entry.c[part.place]:
        raise altered(entry)
    return line


def _bound(origin: str, seq: int) -> bytes:
    """What a ciphertext is bound to, before the commitment: nobody can move it to another place."""
    return b"amends/seal/1\0" + origin.encode() + b"\0" + seq.to_bytes(8, "big")


def altered(entry: Entry) -> Malformed:
    """What is said of sealed openings that are not what was sealed."""
    return Malformed(
        f"Record {entry.seq}: what it holds under seal is not what was sealed there; the key is the right one.",
        next="Run `amends verify`.",
        code=ALTERED,
        finding="E_CIPHERTEXT",
    )


# ---- keys -----------------------------------------------------------------------------------------------------------

MISSING, WRONG, ROTATED = "seal_key_missing", "seal_key_wrong", "seal_key_rotated"
ABSENT, FORGOTTEN, ALTERED = "seal_key_left_out", "seal_forgotten", "seal_altered"

WITHHELD = {
    MISSING: "it is sealed, and no key was given",
    WRONG: "it is sealed, under another key than the one given",
    ROTATED: "it is sealed, and the key given is an older one",
    ABSENT: "it is sealed, and its key is not in this copy",
    FORGOTTEN: "its key was destroyed: it is forgotten",
}
"""Why openings that lie in the file are not handed out."""


class Owner:
    """The owner's key. What it is leaves this object in nothing but what it wraps; `id` says which one it is."""

    __slots__ = ("_key", "id")

    def __init__(self, key: bytes) -> None:
        from .keys import hkdf

        if len(key) != KEY:
            raise ValueError("an owner's key has 32 bytes")
        self._key = key
        self.id = hkdf(key, b"amends/seal/id", 8).hex()

    def __repr__(self) -> str:
        return f"<owner's key {self.id}>"

    def wrap(self, origin: str, saga: str, key: bytes) -> bytes:
        """A saga's data key, wrapped: a nonce and 48 bytes."""
        nonce = os.urandom(NONCE)
        return nonce + bytes(_encrypt(key, self._names(origin, saga), nonce, self._key))

    def unwrap(self, origin: str, saga: str, wrapped: bytes) -> bytes | None:
        """The data key; None if it was not wrapped so, by this key."""
        with suppress(CryptoError, ValueError, TypeError):
            key = bytes(_decrypt(wrapped[NONCE:], self._names(origin, saga), wrapped[:NONCE], self._key))
            return key if len(key) == KEY else None
        return None

    def _names(self, origin: str, saga: str) -> bytes:
        return b"amends/wrap/1\0" + b"\0".join((origin.encode(), saga.encode(), self.id.encode()))


class Wrapped(NamedTuple):
    """A data key as it lies in the file: id of the owner's key that wraps it, and its bytes."""

    seal: str
    wrapped: bytes


class Rows(Protocol):
    """Where wrapped data keys lie, by name (`named`)."""

    def wrapped(self, name: str) -> Wrapped | None:
        """The row of that name; None if there is none."""

    def keep(self, name: str, row: Wrapped) -> None:
        """A new row, in the transaction that is under way."""


def named(own: str, origin: str, saga: str) -> str:
    """The name of a data key: the saga's header id; of a log of another origin with that before it."""
    return saga if origin == own else f"{origin} {saga}"


class Vault:
    """The keys of one log that a process holds. ask: where the owner's key comes from, None for nowhere.

    Threads share it: whoever commits and whoever reads.
    """

    def __init__(self, origin: str, ask: Callable[[], Owner | None] | None = None) -> None:
        self.origin = origin
        self.trouble: AmendsError | None = None
        self._ask, self._asked = ask, ("", 0.0)
        self._owners: dict[str, Owner] = {}
        self._keys: dict[str, bytes] = {}  # replaced as a whole: who is late keeps a key in one that is gone
        self._made: list[str] = []
        self._followed: tuple[str, int, int] = ("", 0, 0)

    # -- the owner's ---------------------------------------------------------------------------------------------------

    def ask(self, seal: str) -> None:
        """Ask for the owner's key with this id, which may take its source some time; not again directly after."""
        asked_for, at = self._asked
        if self._ask is None or (seal == asked_for and monotonic() - at < ASKED_S):
            return
        self.trouble = None
        try:
            owner = self._ask()
        except AmendsError as error:
            self.trouble, owner = error, None
        self._asked = seal, monotonic()
        if owner is not None:
            self.offer(owner)

    def offer(self, owner: Owner) -> None:
        """Hold an owner's key beside those that are held."""
        self._owners[owner.id] = owner

    def has(self, seal: str) -> bool:
        """Whether the owner's key with this id is held."""
        return seal in self._owners

    def owner(self, seal: str) -> Owner:
        """The owner's key with this id, which is held."""
        return self._owners[seal]

    def why(self, keeping: Keeping) -> str:
        """Why a log cannot be read with what is held: none, an older one, another one."""
        if not self._owners:
            return MISSING
        return ROTATED if self._owners.keys() & set(keeping.former) else WRONG

    def refusal(self, seal: str, keeping: Keeping) -> AmendsError:
        """What whoever wants to write hears: a log is not gone on with by halves."""
        code = self.why(keeping)
        if code == MISSING and self.trouble is not None:
            said = f"The log is sealed under key {seal}, which cannot be had: {self.trouble.message}"
            return SealKey(said, next=self.trouble.next or _SAY_KEY, code=code)
        said = {
            MISSING: f"The log is sealed under key {seal}, and no key was given.",
            WRONG: f"The log is sealed under key {seal}, and the key given is {', '.join(self._owners)}.",
            ROTATED: f"The key given was replaced: the log is sealed under key {seal} now.",
        }[code]
        return SealKey(f"{said} Nothing was written.", next=_SAY_KEY, code=code)

    # -- the sagas' ----------------------------------------------------------------------------------------------------

    def data_key(self, origin: str, saga: str, rows: Rows, seal: str, keeping: Keeping) -> bytes:
        """The key to seal a saga's openings with; made, and wrapped under `seal`, where there is none. Raises SealKey,
        Malformed (E_CIPHERTEXT), in a transaction."""
        name, keys = named(self.origin, origin, saga), self._keys
        key = keys.get(name)
        if key is not None:
            return key
        row = rows.wrapped(name)
        if row is not None:
            key = self._unwrapped(origin, saga, row, seal, keeping)
            return _remember(keys, name, key)
        if seal not in self._owners:
            raise self.refusal(seal, keeping)
        key = os.urandom(KEY)
        rows.keep(name, Wrapped(seal, self._owners[seal].wrap(origin, saga, key)))
        self._made.append(name)
        return _remember(keys, name, key)

    def key_of(self, origin: str, saga: str, rows: Rows, keeping: Keeping) -> bytes | str:
        """The key that opens a saga's openings, or why there is none: a word of WITHHELD. Raises Malformed
        (E_CIPHERTEXT) for one that was altered."""
        name, keys = named(self.origin, origin, saga), self._keys
        key = keys.get(name)
        if key is not None:
            return key
        row = rows.wrapped(name)
        if row is None:
            return FORGOTTEN if saga in keeping.forgotten else ABSENT
        try:
            return _remember(keys, name, self._unwrapped(origin, saga, row, keeping.seal, keeping))
        except SealKey as error:
            return error.code

    def _unwrapped(self, origin: str, saga: str, row: Wrapped, seal: str, keeping: Keeping) -> bytes:
        owner = self._owners.get(row.seal)
        if owner is None and seal not in self._owners:
            raise self.refusal(row.seal, keeping)
        key = owner.unwrap(origin, saga, row.wrapped) if owner is not None else None
        if key is None:
            raise Malformed(
                f"The data key of {saga or 'the device'} is not what was wrapped; the owner's key is the right one.",
                next="Run `amends verify`.",
                code=ALTERED,
                finding="E_CIPHERTEXT",
            )
        return key

    def landed(self) -> None:
        """The transaction is over: what was made in it is there."""
        self._made.clear()

    def rolled_back(self) -> None:
        """What was made in the transaction is not there."""
        for name in self._made:
            self._keys.pop(name, None)
        self._made.clear()

    def follow(self, keeping: Keeping) -> bool:
        """Let go of what was at hand if a saga was forgotten since, or the owner's key was another one; say whether."""
        now = (keeping.seal, len(keeping.former), keeping.erasing)  # after each key that is destroyed, too
        if now == self._followed:
            return False
        self._followed = now
        self.drop()
        return True

    def drop(self) -> None:
        """Keep no data key at hand."""
        self._keys = {}


def _remember(keys: dict[str, bytes], name: str, key: bytes) -> bytes:
    if len(keys) >= CACHED:
        keys.clear()
    keys[name] = key
    return key


_SAY_KEY = "Name its source in AMENDS_SEAL_KEY, as key under [seal] in config.toml, or with --key where a verb has it."
