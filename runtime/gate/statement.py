"""What is signed is one string of bytes that says everything, so that nothing can be shown which is not signed.

A statement is canonical JSON: keys sorted by code point, no spaces, no floats, integers that every reader agrees on,
text in Unicode's composed form. What a key signs begins with a tag that says what sort of statement it is, so that a
signature under an approval can never add a key, nor one under another product approve anything here.

    amends/approval/1 NUL {"kind":"approval-decision","request":"<64 hex>","v":1,"verdict":"approve"}

The verdict stands inside: a signed "deny" is not an "approve" in other hands, nor is an "approve" a "break_glass". The
request stands inside by its hash, and its nonce with it, so that no two requests are ever signed by the same bytes. SSH
and raw keys sign the bytes as they are; a WebAuthn key signs their SHA-256 as its challenge, which is computed here and
never taken from the client.

Why not normalise what is not canonical: an argument that was changed on the way to the signature is another argument.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from ...store.errors import BadValue

APPROVAL_TAG = b"amends/approval/1\0"
KEYRING_TAG = b"amends/keyring/1\0"
APPROVE, DENY, BREAK_GLASS = VERDICTS = ("approve", "deny", "break_glass")

INTEGER_MAX = (1 << 53) - 1
DEPTH_MAX = 64
_DIGEST = re.compile(r"[0-9a-f]{64}")


def canonical(value: object) -> bytes:
    """The one encoding of a value of plain JSON types. Raises BadValue, with the path, for anything else."""
    _check(value, "$", 0)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _check(value: object, path: str, depth: int) -> None:
    if depth > DEPTH_MAX:
        raise _unfit(path, f"is nested deeper than {DEPTH_MAX}")
    if type(value) is str:
        _check_text(value, path)
    elif type(value) is int:
        if abs(value) > INTEGER_MAX:
            raise _unfit(path, "is an integer beyond 2^53", "Write it as text.")
    elif type(value) is list:
        for place, one in enumerate(value):
            _check(one, f"{path}[{place}]", depth + 1)
    elif type(value) is dict:
        for key, one in value.items():
            if type(key) is not str:
                raise _unfit(path, f"has a key of type {type(key).__name__}")
            _check_text(key, f"{path}, a key of it,")
            _check(one, f"{path}.{key}", depth + 1)
    elif value is not None and type(value) is not bool:
        advice = "Write it as text: the digits that are meant." if type(value) is float else ""
        raise _unfit(path, f"is of type {type(value).__name__}", advice)


def _check_text(text: str, path: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _unfit(path, "holds half of a surrogate pair")
    if not text.isascii() and not unicodedata.is_normalized("NFC", text):
        advice = 'Pass `unicodedata.normalize("NFC", text)`: two spellings that look the same cannot be told apart.'
        raise _unfit(path, "is text in a decomposed form of Unicode", advice)


def _unfit(path: str, what: str, next: str = "") -> BadValue:
    return BadValue(f"{path[:200]} {what}, which cannot be signed.", next=next)


def request_digest(text: bytes) -> str:
    """What names a request: SHA-256 of its canonical text, 64 hex digits."""
    return sha256(text).hexdigest()


def decision(request: str, verdict: str) -> bytes:
    """The bytes to sign for a verdict, one of VERDICTS, on the request with this digest. Raises BadValue."""
    if not isinstance(request, str) or not _DIGEST.fullmatch(request):
        raise BadValue(f"{request!r} is no digest of a request: 64 hex digits are.")
    if verdict not in VERDICTS:
        raise BadValue(f"{verdict!r} is no verdict.", next=f"One of {', '.join(VERDICTS)}.")
    return signed(APPROVAL_TAG, {"kind": "approval-decision", "request": request, "v": 1, "verdict": verdict})


def signed(tag: bytes, statement: Mapping[str, Any]) -> bytes:
    """The bytes to sign for a statement: its tag, then its canonical text."""
    return tag + canonical(dict(statement))


def challenge(signed: bytes) -> bytes:
    """What a WebAuthn key is asked to sign, 32 bytes."""
    return sha256(signed).digest()


def check_code(digest: str) -> str:
    """Five groups of four letters of a digest, for people to compare on two screens: `3F2A-91C0-77DE-0B14-A5E2`."""
    return "-".join(digest[at : at + 4] for at in range(0, 20, 4)).upper()
