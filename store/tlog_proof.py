"""One record's place in a signed log, in the text that other people's tools read (C2SP tlog-proof).

    c2sp.org/tlog-proof@v1
    extra <base64>            whatever the writer wants beside it; there or not
    index 5
    <base64 of 32 bytes>      the hashes of the inclusion proof, leaf side first
                              an empty line, then the checkpoint, a signed note, to the end

It holds neither the record nor its hash: whoever checks it has the line, and asks whether it stands there.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from typing import NamedTuple

from .errors import Malformed
from .merkle import HASH_SIZE

_MAGIC = "c2sp.org/tlog-proof@v1"
_HASHES_MAX = 63
_DIGITS_MAX = 16


class TlogProof(NamedTuple):
    """Place of the record, proof, the checkpoint's note, and what the writer put beside it (None: nothing)."""

    seq: int
    proof: tuple[bytes, ...]
    checkpoint: bytes
    extra: bytes | None


def tlog_proof(seq: int, proof: Sequence[bytes], checkpoint: bytes, extra: bytes | None = None) -> bytes:
    """The text of a proof."""
    beside = [] if extra is None else [f"extra {base64_of(extra)}"]
    lines = [_MAGIC, *beside, f"index {seq}", *map(base64_of, proof), "", ""]
    return "\n".join(lines).encode() + checkpoint


def parse_tlog_proof(text: bytes) -> TlogProof:
    """The proof in a text. Raises Malformed (E_PROOF) for anything that could be read in another way."""
    head, blank, checkpoint = text.partition(b"\n\n")
    try:
        lines = head.decode().split("\n")
    except UnicodeDecodeError:
        raise _bad("not UTF-8") from None
    if lines.pop(0) != _MAGIC or not blank or not checkpoint:
        raise _bad("its first line, an empty line and a checkpoint are asked")
    extra = unbase64(lines.pop(0)[6:]) if lines and lines[0].startswith("extra ") else None
    word, _, digits = (lines.pop(0) if lines else "").partition(" ")
    if word != "index" or not (digits.isascii() and digits.isdigit()) or len(digits) > _DIGITS_MAX:
        raise _bad("the place of the leaf is asked")
    if str(int(digits)) != digits or len(lines) > _HASHES_MAX:
        raise _bad("the place has one spelling, and a tree is at most 63 high")
    return TlogProof(int(digits), tuple(map(hash_of, lines)), checkpoint, extra)


def hash_of(text: str) -> bytes:
    """The 32 bytes that a text encodes. Raises Malformed (E_PROOF)."""
    data = unbase64(text)
    if len(data) != HASH_SIZE:
        raise _bad(f"a hash of {len(data)} bytes")
    return data


def base64_of(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def unbase64(text: str) -> bytes:
    """The bytes that a text encodes in the one way (RFC 4648, padded, no stray bits). Raises Malformed (E_PROOF)."""
    try:
        data = binascii.a2b_base64(text.encode("ascii"))
    except ValueError:  # binascii.Error and UnicodeEncodeError are
        raise _bad("not base64") from None
    if base64_of(data) != text:
        raise _bad("base64 with another spelling")
    return data


def _bad(why: str) -> Malformed:
    return Malformed(f"This is not a proof of a record: {why}.", finding="E_PROOF")
