"""A statement that anybody can check: an in-toto Statement in a DSSE envelope, signed with Ed25519.

    {"payload":"<base64>","payloadType":"application/vnd.in-toto+json",
     "signatures":[{"keyid":"<64 hex>","sig":"<base64>"}]}            (in truth one line)

What is signed is `DSSEv1 <len> <type> <len> <payload>`, so a payload can never be taken for one of another type. The
payload is JSON with sorted names, without blanks, ASCII only: the same statement is the same bytes. A key is named by
the SHA-256 of its 32 bytes. Signatures of keys that are not asked about are left alone; a known key's bad one spoils
the whole.

Why not a format of our own: cosign, in-toto and policy engines read this one.
Sources: secure-systems-lab/dsse protocol.md 1.0; in-toto Statement v1.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NoReturn

from . import note
from .errors import Malformed
from .note import BadSignature

IN_TOTO = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
ENVELOPE_MAX = 16 << 20


def canonical(value: Any) -> bytes:
    """JSON with sorted names, no blanks, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def pae(kind: str, payload: bytes) -> bytes:
    """The bytes that are signed for a payload of this type."""
    name = kind.encode()
    return b"DSSEv1 %d %b %d %b" % (len(name), name, len(payload), payload)


def key_name(public: bytes) -> str:
    """What an envelope calls a key."""
    return sha256(public).hexdigest()


def statement(name: str, digest: str, predicate_type: str, predicate: Mapping[str, Any]) -> bytes:
    """An in-toto Statement about one subject (its SHA-256 in hex), as bytes."""
    subject = [{"name": name, "digest": {"sha256": digest}}]
    made = {"_type": STATEMENT, "subject": subject, "predicateType": predicate_type, "predicate": dict(predicate)}
    return canonical(made)


def seal(payload: bytes, seed: bytes, kind: str = IN_TOTO) -> bytes:
    """The envelope of a payload, one line, signed by the key of this seed."""
    signature = {"keyid": key_name(note.public_of(seed)), "sig": _base64(note.sign(seed, pae(kind, payload)))}
    return canonical({"payload": _base64(payload), "payloadType": kind, "signatures": [signature]}) + b"\n"


def unseal(envelope: bytes, public: bytes, kind: str = IN_TOTO) -> bytes:
    """The payload, if this key signed it. Raises Malformed (E_DSSE) outside the grammar, BadSignature (E_SIGNATURE,
    E_UNSIGNED) otherwise."""
    payload, said, signatures = _read(envelope)
    if said != kind:
        _bad(f"its payload is of type {said}")
    signed = False
    for keyid, signature in signatures:
        if keyid not in ("", key_name(public)):
            continue
        if note.verify(public, pae(kind, payload), signature):
            signed = True
        elif keyid:
            raise BadSignature("The signature under this statement does not hold.", finding="E_SIGNATURE")
    if not signed:
        raise BadSignature("The key that is asked for did not sign this statement.", finding="E_UNSIGNED")
    return payload


def read_statement(payload: bytes) -> dict[str, Any]:
    """A Statement about one subject with a SHA-256, written in the one way. Raises Malformed (E_DSSE)."""
    value = _json(payload)
    if canonical(value) != payload or set(value) != {"_type", "subject", "predicateType", "predicate"}:
        _bad("it holds no statement in the one way to write it")
    subject = value["subject"]
    if value["_type"] != STATEMENT or not isinstance(subject, list) or len(subject) != 1:
        _bad("a Statement v1 about one subject is asked")
    one = subject[0]
    digest = one.get("digest") if isinstance(one, dict) and set(one) == {"name", "digest"} else None
    if not isinstance(digest, dict) or not all(isinstance(text, str) for text in (one["name"], digest.get("sha256"))):
        _bad("its subject has a name and a SHA-256")
    if not isinstance(value["predicate"], dict) or not isinstance(value["predicateType"], str):
        _bad("its predicate is an object of a named type")
    return value


def _read(envelope: bytes) -> tuple[bytes, str, list[tuple[str, bytes]]]:
    value = _json(envelope)
    if set(value) != {"payload", "payloadType", "signatures"} or not isinstance(value["payloadType"], str):
        _bad("payload, payloadType and signatures are asked")
    signatures = value["signatures"]
    if not isinstance(signatures, list) or not 0 < len(signatures) <= note.LINES_MAX:
        _bad(f"1 to {note.LINES_MAX} signatures are asked")
    return _unbase64(value["payload"]), value["payloadType"], [_signature(one) for one in signatures]


def _signature(value: Any) -> tuple[str, bytes]:
    if not isinstance(value, dict) or not {"sig"} <= set(value) <= {"sig", "keyid"}:
        _bad("a signature is sig and keyid")
    keyid = value.get("keyid", "")
    if not isinstance(keyid, str):
        _bad("a keyid is text")
    return keyid, _unbase64(value["sig"])


def _json(text: bytes) -> dict[str, Any]:
    if len(text) > ENVELOPE_MAX:
        _bad("it is larger than 16 MiB")
    try:
        value = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_bad)
    except (ValueError, RecursionError):
        _bad("it is not JSON")
    if not isinstance(value, dict):
        _bad("an object is asked")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        _bad("a name stands twice in one object")
    return dict(pairs)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unbase64(text: Any) -> bytes:
    """Bytes from their one encoding with padding."""
    try:
        data = binascii.a2b_base64(text.encode("ascii")) if isinstance(text, str) else b""
    except ValueError:  # binascii.Error and UnicodeEncodeError are ValueErrors
        data = b""
    if not data or _base64(data) != text:
        _bad("base64 with padding is asked")
    return data


def _bad(why: str) -> NoReturn:
    raise Malformed(f"This is not a signed statement: {why}.", finding="E_DSSE")
