"""A request and its answer on a stick, on paper or through a camera: who decides needs no network and no log.

`--export FILE` writes the exact bytes to sign, for anything that can sign: ssh-keygen, openssl, this program. Beside
them lie `FILE.txt`, the request as a person has to see it, and `FILE.json`, which another amends shows and
answers (`--request`). What comes back is an SSH signature, 64 bytes of Ed25519, or a decision of another amends.

As a QR code, or as a line of text that can be pasted, both are deflated JSON in base45: `AMENDS1:….`
Nothing here decides: an answer is checked like any other (gate/signing.py), against what this device itself asked.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..runtime.gate.proof import Credential, Unproven, base64url, ssh_proof, verify
from ..runtime.gate.statement import APPROVE, BREAK_GLASS, DENY, decision, request_digest
from ..store.errors import BadValue, Refused, YouErred

REQUEST, DECISION = "amends-request", "amends-decision"
MARK, END = "AMENDS1:", "."
SIZE_MAX = 256 * 1024
VERSION_MAX = 20
"""The largest QR code that a phone still reads from a screen."""
_BASE45 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ $%*+-./:"


class Request(NamedTuple):
    """A request that another device asks. usb: the WebAuthn credentials that it would take an answer from."""

    text: bytes
    usb: tuple[str, ...]

    @property
    def digest(self) -> str:
        return request_digest(self.text)

    @property
    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found


# ---- as JSON --------------------------------------------------------------------------------------------------------


def request_document(text: bytes, credentials: Iterable[Credential]) -> dict[str, Any]:
    """A request for another device to show and answer."""
    usb = [one.id for one in credentials if one.kind == "webauthn"]
    return {"kind": REQUEST, "v": 1, "request": text.decode(), "usb": usb}


def decision_document(digest: str, verdict: str, proof: Mapping[str, Any]) -> dict[str, Any]:
    """An answer for the device that asked."""
    return {"kind": DECISION, "v": 1, "request": digest, "verdict": verdict, "proof": dict(proof)}


def read_request(content: bytes) -> Request:
    """A request from another device. Raises BadValue (bad_request)."""
    said = _document(content)
    if said is None or said.get("kind") != REQUEST or said.get("v") != 1:
        raise BadValue(
            "This is no request of amends.", next="`--export FILE` makes one: FILE.json.", code="bad_request"
        )
    text, usb = said.get("request"), said.get("usb")
    if not isinstance(text, str) or not isinstance(usb, list) or not all(isinstance(one, str) for one in usb):
        raise BadValue("This request is damaged.", next="Bring it over again.", code="bad_request")
    found = Request(text.encode("utf-8", "surrogatepass"), tuple(usb))
    _check_request(found)
    return found


def _check_request(found: Request) -> None:
    """Whether it is one in its one spelling: what is shown is read from it, what is signed is its hash."""
    from ..runtime.gate.statement import canonical

    try:
        fields = json.loads(found.text)
        sound = canonical(fields) == found.text and isinstance(fields, dict) and fields["kind"] == "approval-request"
        sound = sound and fields["v"] == 1 and isinstance(fields["tool"], str) and "args" in fields
    except (ValueError, KeyError, BadValue, RecursionError):
        sound = False
    if not sound:
        raise BadValue("This request is damaged.", next="Bring it over again.", code="bad_request")


def _document(content: bytes) -> dict[str, Any] | None:
    """The JSON object in a file or a line of text; None for anything else."""
    try:
        text = content.decode().strip("\r\n\t")
        raw = unpack(text) if text.lstrip().startswith(MARK) else text.encode()
        said = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


# ---- an answer ------------------------------------------------------------------------------------------------------


def read_answer(content: bytes, digest: str, verdict: str, credentials: Iterable[Credential]) -> dict[str, Any]:
    """The proof in what came back. credentials: all that count, to find whose raw signature it is.

    Raises BadValue (bad_answer), Refused (other_request, other_verdict), Unproven.
    """
    if len(content) > SIZE_MAX:
        raise _no_answer()
    if content.startswith(b"-----BEGIN SSH SIGNATURE"):
        return ssh_proof(content.decode("latin-1"))
    if len(content) == 64:
        return _raw_answer(content, decision(digest, verdict), credentials)
    said = _document(content)
    if said is None or said.get("kind") != DECISION or said.get("v") != 1 or not isinstance(said.get("proof"), dict):
        raise _no_answer()
    if said.get("request") != digest:
        raise Refused("This answers another request.", next="`amends inbox` lists what is asked.", code="other_request")
    if said.get("verdict") != verdict:
        raise _other_verdict(said.get("verdict"))
    proof: dict[str, Any] = said["proof"]
    return proof


_TAKES = {
    APPROVE: "approve ITEM", DENY: "deny ITEM", BREAK_GLASS: "approve ITEM --break-glass --reason TEXT",
}  # fmt: skip
"""verdict -> the verb that takes it"""


def _other_verdict(other: object) -> Refused:
    verb = _TAKES.get(other) if isinstance(other, str) else None
    return Refused(
        f"This answer says {str(other).replace('_', ' ') if verb else 'neither'}.",
        next=f"`amends {verb} --import FILE` takes it." if verb else "Ask again.",
        code="other_verdict",
    )


def _raw_answer(signature: bytes, signed: bytes, credentials: Iterable[Credential]) -> dict[str, Any]:
    """Sixty-four bytes say nothing of who made them: the raw key is looked for whose signature they are."""
    for one in credentials:
        proof = {"kind": "raw", "credential": one.id, "signature": base64url(signature)}
        if one.kind == "raw" and _holds(one, proof, signed):
            return proof
    raise Refused(
        "No raw key of the keyring made this signature, of this request and this verdict.",
        next="`amends keys list` shows the keys; sign the exported file itself.",
        code="credential_unknown",
    )


def _holds(credential: Credential, proof: Mapping[str, Any], signed: bytes) -> bool:
    try:
        verify(credential, proof, signed)
    except Unproven:
        return False
    return True


def _no_answer() -> BadValue:
    return BadValue(
        "This is no answer: an SSH signature, 64 bytes of Ed25519, or a decision of amends is.",
        next="Sign the exported file, or answer it with `amends approve --request FILE.json`.",
        code="bad_answer",
    )


# ---- files ----------------------------------------------------------------------------------------------------------


def export(path: Path, signed: bytes, seen: str, document: Mapping[str, Any]) -> list[Path]:
    """Write what is to be signed, how it looks, and the request for another amends. Overwrites nothing."""
    made = [path, Path(f"{path}.txt"), Path(f"{path}.json")]
    contents = (signed, seen.encode(), json.dumps(document, ensure_ascii=False).encode() + b"\n")
    taken = next((one for one in made if one.exists()), None)
    if taken is not None:
        raise YouErred(f"{taken} is there already.", next="Name another file.", code="file_exists")
    for one, content in zip(made, contents, strict=True):
        write(one, content)
    return made


def write(path: Path, content: bytes) -> None:
    """A new file, for its owner alone. Raises YouErred (file_exists)."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    except FileExistsError:
        raise YouErred(f"{path} is there already.", next="Name another file.", code="file_exists") from None
    with os.fdopen(fd, "wb") as file:
        file.write(content)


# ---- as one line, and as a picture ----------------------------------------------------------------------------------


def pack(document: Mapping[str, Any]) -> str:
    """A document as one line of QR's own alphabet."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    return f"{MARK}{base45(zlib.compress(text, 9))}{END}"


def unpack(line: str) -> bytes:
    """The JSON in such a line. Raises ValueError; never takes more memory than SIZE_MAX."""
    text = line.strip("\r\n\t")
    if not text.startswith(MARK) or not text.endswith(END) or len(text) > SIZE_MAX:
        raise ValueError("not a line of amends")
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(unbase45(text[len(MARK) : -len(END)]), SIZE_MAX)
    except zlib.error:
        raise ValueError("a line of amends that was damaged") from None
    if not inflate.eof or inflate.unused_data:
        raise ValueError("a line of amends that was damaged")
    return raw


def base45(data: bytes) -> str:
    """RFC 9285: two bytes are three letters, a last one is two."""
    out = []
    for at in range(0, len(data), 2):
        number = int.from_bytes(data[at : at + 2], "big")
        for _ in range(3 if at + 1 < len(data) else 2):
            number, letter = divmod(number, 45)
            out.append(_BASE45[letter])
    return "".join(out)


def unbase45(text: str) -> bytes:
    """The bytes, in their one spelling. Raises ValueError."""
    digits = [_BASE45.index(letter) for letter in text]
    out = bytearray()
    for at in range(0, len(digits), 3):
        group = digits[at : at + 3]
        number = sum(digit * 45**place for place, digit in enumerate(group))
        if len(group) == 1 or number >= 1 << 8 * (len(group) - 1):
            raise ValueError("not base45")
        out += number.to_bytes(len(group) - 1, "big")
    return bytes(out)


def qr(document: Mapping[str, Any], colour: bool) -> Sequence[str]:
    """The QR code in half blocks, dark on light, with its quiet zone. Raises YouErred (extra_missing), Refused."""
    try:
        import segno
    except ImportError:
        raise YouErred(
            "A QR code needs segno, which is not installed.", next="Run `pip install 'amends[qr]'`, or --export FILE.",
            code="extra_missing",
        ) from None  # fmt: skip
    try:
        code = segno.make_qr(pack(document), error="l", mode="alphanumeric", boost_error=False)
        large = int(code.version) > VERSION_MAX
    except segno.DataOverflowError:
        large = True
    if large:
        raise Refused("This is too much for a QR code.", next="Bring it over by --export FILE.", code="too_large")
    return _drawn([bytes(row) for row in code.matrix_iter(border=4)], colour)


def _drawn(rows: Sequence[bytes], colour: bool) -> list[str]:
    """Two rows of modules a line. Without colours light is what is printed, as on a dark terminal."""
    blocks = {(0, 0): "█", (0, 1): "▀", (1, 0): "▄", (1, 1): " "}
    if colour:
        blocks = {(0, 0): " ", (0, 1): "▄", (1, 0): "▀", (1, 1): "█"}
    rows = [*rows, bytes(len(rows[0]))] if len(rows) % 2 else rows
    lines = [
        "".join(blocks[upper, lower] for upper, lower in zip(rows[at], rows[at + 1], strict=True))
        for at in range(0, len(rows), 2)
    ]
    return [f"\x1b[30;107m{line}\x1b[0m" for line in lines] if colour else lines
