"""Keys and signatures in the forms that openssl, signify and minisign read, so that a list of files needs none of ours.

All are Ed25519. signify signs the file itself, minisign its BLAKE2b-512, and with it a comment that is then trusted; a
number of eight bytes tells keys apart. What is checked here is checked to the byte: one signature, one way to write it.
Sources: OpenBSD signify(1); minisign, "signature format"; RFC 8410.
"""

from __future__ import annotations

import base64
from hashlib import blake2b, sha256

from . import note

_SPKI = bytes.fromhex("302a300506032b6570032100")  # RFC 8410: the DER before the 32 bytes of an Ed25519 key


def pem(public: bytes) -> bytes:
    """An Ed25519 public key for openssl."""
    return b"-----BEGIN PUBLIC KEY-----\n" + base64.b64encode(_SPKI + public) + b"\n-----END PUBLIC KEY-----\n"


def key_files(log_key: bytes, export_key: bytes) -> dict[str, bytes]:
    """The device's public keys as files, by name. They tell nothing that the log's first record does not."""
    return {
        "keys/device.pem": pem(log_key),
        "keys/minisign.pub": minisign_key(export_key),
        "keys/signify.pub": signify_key(export_key),
    }


def _number(public: bytes) -> bytes:
    """The 8 bytes by which signify and minisign tell keys apart."""
    return sha256(public).digest()[:8]


def _commented(comment: str, data: bytes) -> bytes:
    return b"untrusted comment: " + comment.encode() + b"\n" + base64.b64encode(data) + b"\n"


def signify_key(public: bytes) -> bytes:
    return _commented("amends export public key", b"Ed" + _number(public) + public)


def signify_signature(seed: bytes, message: bytes) -> bytes:
    public = note.public_of(seed)
    return _commented("verify with signify.pub", b"Ed" + _number(public) + note.sign(seed, message))


def minisign_key(public: bytes) -> bytes:
    number = _number(public)
    return _commented(f"minisign public key {number[::-1].hex().upper()}", b"Ed" + number + public)


def minisign_signature(seed: bytes, message: bytes, trusted: str) -> bytes:
    """Over BLAKE2b-512 of the message, and over that signature with the trusted comment."""
    signature = note.sign(seed, blake2b(message).digest())
    both = note.sign(seed, signature + trusted.encode())
    front = _commented("verify with minisign.pub", b"ED" + _number(note.public_of(seed)) + signature)
    return front + f"trusted comment: {trusted}\n".encode() + base64.b64encode(both) + b"\n"


def _payload_of(text: bytes, line: int = 1) -> bytes:
    """The bytes on a base64 line of a signature file; empty if it is not one."""
    lines = text.split(b"\n")
    try:
        return base64.b64decode(lines[line], validate=True) if len(lines) > line else b""
    except ValueError:
        return b""


def signify_holds(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether a file is exactly the signature that this key makes."""
    data = _payload_of(signature)
    head = b"Ed" + _number(public)
    exact = signature == _commented("verify with signify.pub", data)
    return exact and data[:10] == head and note.verify(public, message, data[10:])


def minisign_holds(public: bytes, signature: bytes, message: bytes) -> bool:
    """The same for minisign, whatever its trusted comment says."""
    data, both = _payload_of(signature), _payload_of(signature, 3)
    lines = signature.split(b"\n")
    trusted = lines[2].removeprefix(b"trusted comment: ") if len(lines) == 5 else b""
    front = _commented("verify with minisign.pub", data)
    exact = signature == front + b"trusted comment: " + trusted + b"\n" + base64.b64encode(both) + b"\n"
    good = data[:10] == b"ED" + _number(public) and note.verify(public, blake2b(message).digest(), data[10:])
    return exact and good and note.verify(public, data[10:] + trusted, both)
