"""A key that is 32 bytes in a file, or letters on paper: for an air gap, and for the day when all others are lost.

It proves that somebody has the file, and no more: nobody need be there. The file is its owner's alone; whoever finds it
open to others is told, and it does not sign.

    amends-raw-key-1 <43 base64url characters> LF
    ezhj irhz mpjb ph2f cua5 a7vp zp2c 6t6p rqyg hok3 5bpe pvwh fpal kbxa       the same on paper, with a checksum
"""

from __future__ import annotations

import base64
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..runtime.gate.proof import Credential, Unproven, base64url, raw_credential, raw_id, unbase64url
from ..store import note
from ..store.errors import YouErred

MARK = "amends-raw-key-1"
SEED_BYTES, CHECK_BYTES, GROUP = 32, 3, 4


def sign(seed: bytes, signed: bytes) -> dict[str, Any]:
    """The proof of a key over these bytes."""
    return {"kind": "raw", "credential": raw_id(note.public_of(seed)), "signature": base64url(note.sign(seed, signed))}


def public(seed: bytes) -> Credential:
    """The key as the keyring knows it, nobody's yet."""
    return raw_credential(note.public_of(seed))


# ---- in a file ------------------------------------------------------------------------------------------------------


def read(file: Path) -> bytes:
    """The secret in a key's file. Raises YouErred: no_key_file, key_file_open, not_a_key."""
    if not file.is_file():
        raise YouErred(f"There is no key at {file}.", next="`amends keys new FILE` makes one.", code="no_key_file")
    mode = file.stat().st_mode
    if os.name != "nt" and mode & 0o077:
        raise YouErred(
            f"{file} can be read by others (mode {mode & 0o777:o}).",
            next=f"Run `chmod 600 {file}`; make another key if somebody may have read it.",
            code="key_file_open",
        )
    words = file.read_bytes()[:1024].decode("ascii", "replace").split()
    try:
        seed = unbase64url(words[1]) if len(words) == 2 and words[0] == MARK else b""
    except Unproven:
        seed = b""
    if len(seed) != SEED_BYTES:
        raise YouErred(f"{file} is no raw key.", next="`amends keys new FILE` makes one.", code="not_a_key")
    return seed


def write(file: Path, seed: bytes) -> None:
    """A new file that only its owner can read. Raises YouErred (file_exists)."""
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise YouErred(f"{file} is there already.", next="Name another file.", code="file_exists") from None
    with os.fdopen(handle, "w", encoding="ascii") as made:
        made.write(f"{MARK} {base64url(seed)}\n")
        made.flush()
        os.fsync(made.fileno())


# ---- on paper -------------------------------------------------------------------------------------------------------


def on_paper(seed: bytes) -> str:
    """14 groups of four letters and digits."""
    text = base64.b32encode(seed + _checksum(seed)).decode().lower()
    return " ".join(text[at : at + GROUP] for at in range(0, len(text), GROUP))


def from_paper(text: str) -> bytes:
    """The same key, however the groups were typed. Raises YouErred (not_a_key) for one letter too few, or another."""
    typed = "".join(letter for letter in text.upper() if letter.isalnum())
    try:
        raw = base64.b32decode(typed.replace("0", "O").replace("1", "I").replace("8", "B"))
    except ValueError:
        raw = b""
    if len(raw) != SEED_BYTES + CHECK_BYTES or raw[SEED_BYTES:] != _checksum(raw[:SEED_BYTES]):
        raise YouErred(
            "This is no recovery key: a letter is missing or wrong.",
            next="Type the 14 groups again as they were written down.",
            code="not_a_key",
        )
    return raw[:SEED_BYTES]


def _checksum(seed: bytes) -> bytes:
    return sha256(b"amends/paper/1\0" + seed).digest()[:CHECK_BYTES]
