"""An SSH signature counts only if it was made for this purpose, by this very key, and touched where the key can ask.

`ssh-keygen -Y sign` makes one with any OpenSSH 8.2 or newer and no package of ours. Plain Ed25519 keys and keys on a
security key (sk) are read, and nothing else.

    "SSHSIG" ‖ u32 1 ‖ str key ‖ str namespace ‖ str reserved ‖ str hash ‖ str signature
    signed:       "SSHSIG" ‖ str namespace ‖ str reserved ‖ str hash ‖ str H(message)
    sk signs:     SHA-256(application) ‖ flags ‖ u32 counter ‖ SHA-256(signed)

Why never `ssh-keygen -Y verify`: it calls a signature good that nobody touched the key for.
Sources: OpenSSH PROTOCOL.sshsig, PROTOCOL.u2f.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import NamedTuple

from .unproven import Unproven

PLAIN, TOUCHED = "ssh-ed25519", "sk-ssh-ed25519@openssh.com"
APPLICATION = "ssh:amends"
APPROVAL, KEYRING = "approval@amends", "keyring@amends"
"""Namespaces: what a signature is for."""
BLOB_MAX = 8192

_PRESENT, _VERIFIED = 1, 4
_HASHES = {b"sha512": hashlib.sha512, b"sha256": hashlib.sha256}
_ARMOUR = re.compile(
    r"-----BEGIN SSH SIGNATURE-----\r?\n((?:[A-Za-z0-9+/=]{1,76}\r?\n)+)-----END SSH SIGNATURE-----(?:\r?\n)?"
)


class Key(NamedTuple):
    """A public key: its type, its 32 bytes, and for an sk key its application."""

    type: str
    public: bytes
    application: str = ""


class Signature(NamedTuple):
    """A signature that was read and not yet checked. flags, counter: of an sk key."""

    namespace: bytes
    key: bytes
    hash: bytes
    raw: bytes
    flags: int = 0
    counter: int = 0

    @property
    def present(self) -> bool:
        return bool(self.flags & _PRESENT)

    @property
    def verified(self) -> bool:
        return bool(self.flags & _VERIFIED)


# ---- reading --------------------------------------------------------------------------------------------------------


def unarmour(text: str) -> bytes:
    """The blob in a `.sig` file. Raises Unproven (bad_sshsig)."""
    found = _ARMOUR.fullmatch(text) if len(text) <= 2 * BLOB_MAX else None
    if found is None:
        raise _bad("its frame")
    encoded = "".join(found[1].split())
    try:
        blob = base64.b64decode(encoded, validate=True)
    except ValueError:
        raise _bad("its base64") from None
    if base64.b64encode(blob).decode() != encoded:
        raise _bad("its base64")
    return blob


def armour(blob: bytes) -> str:
    """The `.sig` file of a blob, as ssh-keygen writes it."""
    encoded = base64.b64encode(blob).decode()
    lines = "\n".join(encoded[at : at + 70] for at in range(0, len(encoded), 70))
    return f"-----BEGIN SSH SIGNATURE-----\n{lines}\n-----END SSH SIGNATURE-----\n"


def parse(blob: bytes) -> Signature:
    """The parts of a signature, by either type of key. Raises Unproven."""
    if len(blob) > BLOB_MAX:
        raise _bad("its length")
    rest = _Reader(blob)
    if rest.take(6) != b"SSHSIG" or rest.number() != 1:
        raise _bad("its version")
    key, namespace, reserved, hash, signature = (rest.text() for _ in range(5))
    rest.end()
    if reserved or hash not in _HASHES:
        raise _bad("its hash, or a field that is reserved")
    type = parse_key(key).type
    inner = _Reader(signature)
    if inner.text() != type.encode():
        raise _bad("a key of one type, a signature of another")
    raw = inner.text()
    flags, counter = (inner.take(1)[0], inner.number()) if type == TOUCHED else (0, 0)
    inner.end()
    return Signature(namespace, key, hash, raw, flags, counter)


def parse_key(blob: bytes) -> Key:
    """The public key in a key blob. Raises Unproven: alg_not_allowed, bad_key."""
    rest = _Reader(blob, "bad_key")
    type = rest.text()
    if type not in (PLAIN.encode(), TOUCHED.encode()):
        raise Unproven("alg_not_allowed", repr(type)[2:-1][:60])
    public = rest.text()
    application = rest.text() if type == TOUCHED.encode() else b""
    rest.end()
    if len(public) != 32 or not application.isascii():
        raise Unproven("bad_key")
    return Key(type.decode(), public, application.decode())


def parse_line(line: str) -> bytes:
    """The key blob of a line as it stands in a `.pub` file. Raises Unproven: alg_not_allowed, bad_key."""
    words = line.split()
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (IndexError, ValueError):
        raise Unproven("bad_key", "a line of a .pub file is asked") from None
    if parse_key(blob).type != words[0]:
        raise Unproven("bad_key", "it is not of the type that stands before it")
    return blob


def fingerprint(blob: bytes) -> str:
    """`SHA256:…`, as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).rstrip(b"=").decode()


class _Reader:
    """Length-prefixed strings, one after the other, to the end."""

    def __init__(self, data: bytes, code: str = "bad_sshsig") -> None:
        self._data, self._at, self._code = data, 0, code

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise Unproven(self._code, "cut short")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self) -> int:
        return int.from_bytes(self.take(4), "big")

    def text(self) -> bytes:
        return self.take(self.number())

    def end(self) -> None:
        if self._at != len(self._data):
            raise Unproven(self._code, "bytes are left over")


# ---- what was signed ------------------------------------------------------------------------------------------------


def check(signature: Signature, *, key: bytes, namespace: str, verification: bool) -> None:
    """Whether it is for this purpose, by this key, with a person there. The signature itself is checked afterwards."""
    if signature.namespace != namespace.encode():
        raise Unproven("namespace_mismatch", repr(signature.namespace)[1:80])
    if signature.key != key:
        raise Unproven("other_credential")
    if parse_key(key).type == PLAIN:
        return
    if signature.flags & ~(_PRESENT | _VERIFIED):
        raise Unproven("reserved_flags")
    if not signature.present:
        raise Unproven("user_not_present")
    if verification and not signature.verified:
        raise Unproven("user_not_verified")


def signed(signature: Signature, message: bytes) -> bytes:
    """What the key signed, if it signed this message."""
    digest = _HASHES[signature.hash](message).digest()
    plain = b"SSHSIG" + b"".join(map(_text, (signature.namespace, b"", signature.hash, digest)))
    key = parse_key(signature.key)
    if key.type == PLAIN:
        return plain
    application = hashlib.sha256(key.application.encode()).digest()
    return (
        application + bytes([signature.flags]) + signature.counter.to_bytes(4, "big") + hashlib.sha256(plain).digest()
    )


def key_blob(key: Key) -> bytes:
    """A public key as SSH writes it."""
    parts = [key.type.encode(), key.public, *([key.application.encode()] if key.type == TOUCHED else [])]
    return b"".join(map(_text, parts))


def _text(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _bad(what: str) -> Unproven:
    return Unproven("bad_sshsig", what)
