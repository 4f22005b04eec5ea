"""What a device signs and names things with: keys drawn from one seed outside the database, one key for one job.

HKDF-SHA-256 (RFC 5869) over `device/seed`. All keys but those that hide names also depend on install id and
incarnation, so that a copied seed does not make one key of two devices. Whoever may read the seed is this device;
without it a log can be read (`Reader`) and not written.
"""

from __future__ import annotations

import base64
import hmac
import sys
from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
from nacl import bindings

from . import anchor as anchors
from . import note
from .anchor import Anchor
from .chain import Draft
from .entry import VERSION, Entry
from .facts import GENESIS
from .home import Home, Install, keys_missing

_JOBS = ("log", "witness", "export", "noise")  # of one incarnation
_STANDING_JOBS = ("id", "fingerprint")  # of the device, whatever its incarnation

Warn = Callable[[str], None]


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


class Follows(NamedTuple):
    """What a new incarnation goes on from: origin, size and root of the old head, and who decided, why, and what was
    lost (an opening)."""

    origin: str
    size: int
    root: bytes
    why: dict[str, Any]


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
            return Draft(GENESIS, fields)
        fields |= {"follows": follows.origin, "follows_size": follows.size, "follows_root": follows.root.hex()}
        return Draft(GENESIS, fields, (msgspec.json.encode(follows.why, order="sorted"),))

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
        block = anchors.pack(self.install, self.note(size, root, signature))
        kept = anchors.write(self.home.anchor, block, self, size, sync)
        if self._second_works:
            try:
                self.home.anchors.mkdir(mode=0o700, parents=True, exist_ok=True)
                anchors.write(self.home.anchors / self.install, block, self, size, sync)
            except OSError as error:
                self._second_works = False
                self._warn(
                    f"The second anchor in {self.home.anchors} cannot be written ({error.strerror or error}): "
                    "restoring the whole home to an older copy will not be noticed by this device alone."
                )
        return kept

    def anchored(self) -> Anchor | None:
        """The newest head that is remembered outside the database."""
        known, _ = anchors.read_all(self.home, self)
        return known[0] if known else None

    def remembered(self) -> set[int]:
        """The sizes of all heads that are remembered outside the database."""
        return {anchor.size for anchor in anchors.read_all(self.home, self)[0]}

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


def say(text: str) -> None:
    """One line on standard error."""
    print(f"amends: {text}", file=sys.stderr)
