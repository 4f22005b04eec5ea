"""Who signed which head: checkpoints as C2SP signed notes, checked so strictly that every verifier agrees.

    amends.local/k3…          body: origin, size, root, one line each
    42
    <base64 of 32 bytes>
                              a blank line, then one line per signature
    — amends.local/k3… <base64 of 4 bytes key id ‖ signature>

A known key with a bad signature spoils the whole note; lines of unknown keys are left alone, so that other algorithms
and witnesses can be added. Ed25519 is checked for what libraries differ in (encodings, small order) before any of them
is asked, at enrolment of a key too: a small-order key "verifies" messages that nobody signed.

Why a text format of others: openssl, Go's sumdb tools and public witnesses read it as it is.
Sources: C2SP signed-note, tlog-checkpoint, tlog-cosignature; RFC 8032; RFC 4648.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from nacl import bindings
from nacl.exceptions import BadSignatureError

from .errors import Malformed, TheyErred

ED25519, COSIGNATURE = 1, 4
NOTE_MAX = 1_000_000
LINES_MAX = 100
SIZE_MAX = 1 << 53

_DASH = "— "
_P = (1 << 255) - 19
_L = (1 << 252) + 27742317777372353535851937790883648493
_Y8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
# y of the eight points whose order divides 8; each stands for both signs of x.
_SMALL_ORDER = frozenset((0, 1, _P - 1, _Y8, _P - _Y8))


class BadSignature(TheyErred):
    """A key that we know did not sign this, or nobody whom we know did. `facts['finding']` says which."""

    code = "bad_signature"
    exit = 1


class Key(NamedTuple):
    """A key that may sign notes: its name, algorithm (1 Ed25519, 4 cosignature) and 32 public bytes."""

    name: str
    type: int
    public: bytes

    @property
    def id(self) -> bytes:
        return key_id(self.name, self.public, self.type)


class Checkpoint(NamedTuple):
    """The head of a log: whose, how many entries, RFC 6962 root."""

    origin: str
    size: int
    root: bytes


class Signature(NamedTuple):
    """A verified signature; time: seconds since 1970 that a witness vouches for, 0 for a plain one."""

    key: Key
    time: int


class Note(NamedTuple):
    """A note whose known signatures hold; `unknown` counts the lines that nobody here can check."""

    body: bytes
    signatures: tuple[Signature, ...]
    unknown: int


# ---- Ed25519 --------------------------------------------------------------------------------------------------------


def public_of(seed: bytes) -> bytes:
    """The public key, 32 bytes, of a 32-byte seed."""
    public: bytes = bindings.crypto_sign_seed_keypair(seed)[0]
    return public


def sign(seed: bytes, message: bytes) -> bytes:
    """The Ed25519 signature, 64 bytes (RFC 8032: the same each time)."""
    secret = bindings.crypto_sign_seed_keypair(seed)[1]
    signature: bytes = bindings.crypto_sign(message, secret)[:64]
    return signature


def verify(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the signature holds: lengths, S < L, A and R canonical and not of small order, then the equation."""
    if len(signature) != 64 or not is_sound(public) or not is_sound(signature[:32]):
        return False
    if int.from_bytes(signature[32:], "little") >= _L:
        return False
    try:
        bindings.crypto_sign_open(signature + message, public)
    except BadSignatureError:
        return False
    return True


def is_sound(point: bytes) -> bool:
    """Whether 32 bytes encode a point in the one canonical way and it is not of small order. (Not: on the curve.)"""
    if len(point) != 32:
        return False
    y = int.from_bytes(point, "little") & ((1 << 255) - 1)
    return y < _P and y not in _SMALL_ORDER


# ---- keys as text ---------------------------------------------------------------------------------------------------


def key_id(name: str, public: bytes, type: int = ED25519) -> bytes:
    """SHA-256(name ‖ LF ‖ type ‖ key)[:4]."""
    return sha256(name.encode() + b"\n" + bytes([type]) + public).digest()[:4]


def vkey(name: str, public: bytes, type: int = ED25519) -> str:
    """`name+<8 hex>+<base64 of type ‖ key>`. Raises Malformed (E_KEY) for what could not be read back."""
    text = f"{name}+{key_id(name, public, type).hex()}+{_base64(bytes([type]) + public)}"
    parse_vkey(text)
    return text


def parse_vkey(text: str) -> Key:
    """The key in a vkey. Raises Malformed (E_KEY): grammar, id, an unknown algorithm, a weak or non-canonical key."""
    name, _, rest = text.partition("+")
    digits, _, encoded = rest.partition("+")
    raw = _unbase64(encoded)
    if not is_name(name) or raw is None or len(raw) != 33 or raw[0] not in (ED25519, COSIGNATURE):
        raise Malformed("This is not a verifier key.", finding="E_KEY")
    key = Key(name, raw[0], raw[1:])
    if digits != key.id.hex():
        raise Malformed("This verifier key has the id of another.", finding="E_KEY")
    if not is_sound(key.public):
        raise Malformed("This verifier key is weak: messages that nobody signed would pass.", finding="E_KEY")
    return key


def is_name(name: str) -> bool:
    """Whether a key or origin may be called so: printable, no space, no plus."""
    return bool(name) and "+" not in name and not any(letter.isspace() or letter < " " for letter in name)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def checkpoint_body(origin: str, size: int, root: bytes) -> bytes:
    """`origin LF size LF base64(root) LF`: what is signed."""
    return f"{origin}\n{size}\n{_base64(root)}\n".encode()


def parse_checkpoint(body: bytes) -> Checkpoint:
    """The head in a checkpoint body. Raises Malformed (E_CHECKPOINT) for anything but exactly those three lines."""
    try:
        lines = body.decode().split("\n")
    except UnicodeDecodeError:
        lines = []
    if len(lines) == 4:
        origin, digits, encoded = lines[:3]
        if digits.isascii() and digits.isdigit() and len(digits) <= 16 and is_name(origin):
            head = Checkpoint(origin, int(digits), _unbase64(encoded) or b"")
            if head.size <= SIZE_MAX and len(head.root) == 32 and checkpoint_body(*head) == body:
                return head
    raise Malformed("This is not a checkpoint: origin, size and root are asked.", finding="E_CHECKPOINT")


# ---- notes ----------------------------------------------------------------------------------------------------------


def signature_line(key: Key, signature: bytes, time: int = 0) -> bytes:
    """A signature as it stands in a note; `time` is part of a cosignature."""
    stamp = time.to_bytes(8, "big") if key.type == COSIGNATURE else b""
    return f"{_DASH}{key.name} {_base64(key.id + stamp + signature)}\n".encode()


def note_of(body: bytes, lines: Iterable[bytes]) -> bytes:
    """The note: body, blank line, signature lines."""
    return body + b"\n" + b"".join(lines)


def sign_note(body: bytes, name: str, seed: bytes) -> bytes:
    """The note with one Ed25519 signature, under a name."""
    return note_of(body, [signature_line(Key(name, ED25519, public_of(seed)), sign(seed, body))])


def cosign(body: bytes, name: str, seed: bytes, time: int) -> bytes:
    """The signature line of a witness: it saw this body at `time` (seconds since 1970), consistent with all before."""
    key = Key(name, COSIGNATURE, public_of(seed))
    return signature_line(key, sign(seed, _signed(COSIGNATURE, body, time)), time)


def open_note(text: bytes, vkeys: Sequence[str | Key]) -> Note:
    """The note, if at least one of the keys signed it and none of them signed it badly.

    Raises Malformed (E_NOTE) outside the grammar, BadSignature (E_SIGNATURE, E_UNSIGNED) otherwise.
    """
    body, lines = _split(text)
    keys = [parse_vkey(key) if isinstance(key, str) else key for key in vkeys]
    known = {(key.name, key.id): key for key in keys}
    found: dict[Key, Signature] = {}
    unknown = 0
    for name, payload in [_parse_line(line) for line in lines]:
        key = known.get((name, payload[:4]))
        if key is None:
            unknown += 1
            continue
        time = _check(key, body, payload[4:])
        found.setdefault(key, Signature(key, time))
    if not found:
        raise BadSignature("None of the known keys signed this note.", finding="E_UNSIGNED")
    return Note(body, tuple(found.values()), unknown)


def _split(text: bytes) -> tuple[bytes, list[str]]:
    """Body and signature lines, at the last blank line."""
    at = text.rfind(b"\n\n")
    if len(text) > NOTE_MAX or at < 0 or len(text) == at + 2 or text[-1:] != b"\n":
        raise _bad("a body, a blank line and whole signature lines are asked")
    if text.translate(None, bytes(range(0x20)).replace(b"\n", b"")) != text:
        raise _bad("control characters")
    try:
        text.decode()
    except UnicodeDecodeError:
        raise _bad("not UTF-8") from None
    lines = text[at + 2 : -1].decode().split("\n")
    if len(lines) > LINES_MAX:
        raise _bad(f"more than {LINES_MAX} signatures")
    return text[: at + 1], lines


def _parse_line(line: str) -> tuple[str, bytes]:
    name, _, encoded = line.removeprefix(_DASH).partition(" ")
    payload = _unbase64(encoded)
    if not line.startswith(_DASH) or not is_name(name) or payload is None or len(payload) < 5:
        raise _bad("a signature line is a dash, a name and base64")
    return name, payload


def _check(key: Key, body: bytes, payload: bytes) -> int:
    """The time in a signature by this key, 0 for a plain one; raises BadSignature."""
    stamp, signature = (payload[:8], payload[8:]) if key.type == COSIGNATURE else (b"", payload)
    time = int.from_bytes(stamp, "big")
    if not verify(key.public, _signed(key.type, body, time), signature):
        raise BadSignature(f"The signature by {key.name} does not hold.", finding="E_SIGNATURE", key=key.name)
    return time


def _signed(type: int, body: bytes, time: int) -> bytes:
    """The bytes that a key of this type signs for a body."""
    return b"cosignature/v1\ntime %d\n" % time + body if type == COSIGNATURE else body


def _bad(why: str) -> Malformed:
    return Malformed(f"This is not a signed note: {why}.", finding="E_NOTE")


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _unbase64(text: str) -> bytes | None:
    """The bytes, None unless this is their one encoding (RFC 4648 with padding; no spaces, no stray bits)."""
    try:
        data = binascii.a2b_base64(text.encode("ascii"))
    except (ValueError, UnicodeEncodeError):  # binascii.Error is a ValueError
        return None
    return data if data and _base64(data) == text else None
