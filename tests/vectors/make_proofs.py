"""Writes proofs.json beside it: decisions as keys sign them, and what a verifier has to say of each.

Nothing of amends is imported: JSON, SHA-256, base64 and an Ed25519 library are enough, so that whoever writes another
verifier, a page or a phone, has something to hold it against. The seeds are fixed and the result is frozen.
`python3 tests/vectors/make_proofs.py --check` says whether it still agrees.
"""

from __future__ import annotations

import base64
import json
import sys
from hashlib import sha256, sha512
from pathlib import Path
from typing import Any

from nacl.signing import SigningKey

TARGET = Path(__file__).with_name("proofs.json")
RP, ORIGIN = "amends.localhost", "http://amends.localhost:8799"
REQUEST = sha256(b'{"kind":"approval-request","nonce":"AAAA","tool":"wire.send","v":1}').hexdigest()
UP, UV, BE, BS, AT, ED = 1, 4, 8, 16, 64, 128


def b64u(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def string(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def decision(verdict: str) -> bytes:
    said = {"kind": "approval-decision", "request": REQUEST, "v": 1, "verdict": verdict}
    return b"amends/approval/1\0" + json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


APPROVE, DENY, GLASS = decision("approve"), decision("deny"), decision("break_glass")
PASSKEY, SSH, SK, RAW = (SigningKey(bytes([number]) * 32) for number in (1, 2, 3, 4))
NAME = b64u(bytes(range(16)))


# ---- keys -----------------------------------------------------------------------------------------------------------


def public(key: SigningKey) -> bytes:
    return bytes(key.verify_key)


def ssh_blob(application: bytes | None) -> bytes:
    if application is None:
        return string(b"ssh-ed25519") + string(public(SSH))
    return string(b"sk-ssh-ed25519@openssh.com") + string(public(SK)) + string(application)


def fingerprint(blob: bytes) -> str:
    return "SHA256:" + base64.b64encode(sha256(blob).digest()).rstrip(b"=").decode()


def credential(kind: str, application: str = "ssh:amends", **changed: Any) -> dict[str, Any]:
    blob = ssh_blob(application.encode() if kind == "ssh-sk" else None)
    held = {
        "webauthn": {"id": NAME, "public": b64u(public(PASSKEY)), "rp_id": RP},
        "ssh": {"id": fingerprint(blob), "public": b64u(blob)},
        "ssh-sk": {"id": fingerprint(blob), "public": b64u(blob), "application": application},
        "raw": {"id": sha256(public(RAW)).hexdigest()[:32], "public": b64u(public(RAW))},
    }[kind]
    return {"kind": kind, "alg": -8} | held | changed


# ---- proofs ---------------------------------------------------------------------------------------------------------


def passkey(
    signed: bytes = APPROVE, flags: int = UP | UV, counter: int = 1, tail: bytes = b"", rp: str = RP, **client: Any
) -> dict[str, str]:
    said = {
        "type": "webauthn.get", "challenge": b64u(sha256(signed).digest()), "origin": ORIGIN, "crossOrigin": False,
    }  # fmt: skip
    text = json.dumps(said | client, separators=(",", ":")).encode()
    data = sha256(rp.encode()).digest() + bytes([flags]) + counter.to_bytes(4, "big") + tail
    signature = PASSKEY.sign(data + sha256(text).digest()).signature
    return {
        "kind": "webauthn", "credential": NAME, "client_data": b64u(text), "authenticator_data": b64u(data),
        "signature": b64u(signature),
    }  # fmt: skip


def ssh(
    signed: bytes = APPROVE, namespace: bytes = b"approval@amends", application: bytes | None = None, flags: int = 1,
    counter: int = 1,
) -> dict[str, str]:  # fmt: skip
    outer = string(namespace) + string(b"") + string(b"sha512")
    message = b"SSHSIG" + outer + string(sha512(signed).digest())
    if application is None:
        answer = string(b"ssh-ed25519") + string(SSH.sign(message).signature)
    else:
        tail = bytes([flags]) + counter.to_bytes(4, "big")
        touched = sha256(application).digest() + tail + sha256(message).digest()
        answer = string(b"sk-ssh-ed25519@openssh.com") + string(SK.sign(touched).signature) + tail
    blob = ssh_blob(application)
    packed = b"SSHSIG" + (1).to_bytes(4, "big") + string(blob) + outer + string(answer)
    kind = "ssh" if application is None else "ssh-sk"
    return {"kind": kind, "credential": fingerprint(blob), "signature": b64u(packed)}


def raw(signed: bytes = APPROVE) -> dict[str, str]:
    name = sha256(public(RAW)).hexdigest()[:32]
    return {"kind": "raw", "credential": name, "signature": b64u(RAW.sign(signed).signature)}


# ---- cases ----------------------------------------------------------------------------------------------------------


def case(
    name: str, held: dict[str, Any], proof: dict[str, str], expect: str, shows: list[Any] | None = None,
    signed: bytes = APPROVE, **asked: Any,
) -> dict[str, Any]:  # fmt: skip
    """shows: whether somebody touched the key, whether it was verified who, and the counter."""
    usual = {"origins": [ORIGIN], "rp_id": RP, "algs": [-8], "counter": 0, "verification": False}
    made = {"name": name, "credential": held, "signed": signed.hex(), "asked": usual | asked, "proof": proof}
    return made | {"expect": expect} | ({"shows": shows} if shows else {})


def cases() -> list[dict[str, Any]]:
    key, plain, sk, file = (credential(kind) for kind in ("webauthn", "ssh", "ssh-sk", "raw"))
    app = b"ssh:amends"
    swapped = raw() | {"signature": passkey()["signature"]}
    return [
        case("touch and PIN", key, passkey(), "accepted", [True, True, 1], verification=True),
        case("touch", key, passkey(flags=UP), "accepted", [True, False, 1]),
        case("no counter", key, passkey(counter=0), "accepted", [True, True, 0]),
        case("the browser adds a member", key, passkey(other="x"), "accepted", [True, True, 1]),
        case("a deny", key, passkey(DENY), "accepted", [True, True, 1], signed=DENY),
        case("a broken glass", key, passkey(GLASS), "accepted", [True, True, 1], signed=GLASS),
        case("an approve is no broken glass", key, passkey(), "challenge_mismatch", signed=GLASS),
        case("a file's approve is no broken glass", file, raw(), "bad_signature", signed=GLASS),
        case("a broken glass is no approve", key, passkey(GLASS), "challenge_mismatch"),
        case("a deny is no approve", key, passkey(DENY), "challenge_mismatch"),
        case("another ceremony", key, passkey(type="webauthn.create"), "wrong_type"),
        case("another port", key, passkey(origin="http://amends.localhost:8800"), "origin_not_allowed"),
        case("in a frame", key, passkey(crossOrigin=True), "cross_origin"),
        case("below another page", key, passkey(topOrigin=ORIGIN), "cross_origin"),
        case("another site", key, passkey(rp="localhost"), "rp_mismatch"),
        case("nobody touched it", key, passkey(flags=UV), "user_not_present"),
        case("no PIN where one is a must", key, passkey(flags=UP), "user_not_verified", verification=True),
        case("reserved bit", key, passkey(flags=UP | UV | 2), "reserved_flags"),
        case("copied, though it cannot be", key, passkey(flags=UP | UV | BS), "backup_state_impossible"),
        case("became copyable", key, passkey(flags=UP | UV | BE), "backup_eligibility_changed"),
        case("unasked extension", key, passkey(flags=UP | UV | ED, tail=b"\xa0"), "extensions_unasked"),
        case("a byte left over", key, passkey(tail=b"\0"), "bad_authenticator_data"),
        case("the counter stands", key, passkey(counter=7), "counter_went_back", counter=7),
        case("an algorithm that is not allowed", key, passkey(), "alg_not_allowed", algs=[-7]),
        case("a key that signs for everybody", key | {"public": b64u(b"\1" + bytes(31))}, passkey(), "weak_key"),
        case("SSH, a file", plain, ssh(), "accepted", [False, False, 0]),
        case("SSH, another purpose", plain, ssh(namespace=b"keyring@amends"), "namespace_mismatch"),
        case("SSH, a deny is no approve", plain, ssh(DENY), "bad_signature"),
        case("SSH, touch", sk, ssh(application=app), "accepted", [True, False, 1]),
        case("SSH, touch and PIN", sk, ssh(application=app, flags=5), "accepted", [True, True, 1], verification=True),
        case("SSH, nobody touched it", sk, ssh(application=app, flags=0), "user_not_present"),
        case("SSH, a bit for extensions", sk, ssh(application=app, flags=0x81), "reserved_flags"),
        case("SSH, the counter fell", sk, ssh(application=app, counter=3), "counter_went_back", counter=4),
        case("SSH, made for another application", credential("ssh-sk", "ssh:"), ssh(application=b"ssh:"),
             "application_mismatch"),
        case("raw", file, raw(), "accepted", [False, False, 0]),
        case("raw, signed by another", file, swapped, "bad_signature"),
        case("a field too many", file, raw() | {"counter": "AA"}, "bad_proof"),
        case("padded", file, raw() | {"signature": raw()["signature"] + "=="}, "bad_base64url"),
        case("another key's name", file, ssh(), "other_credential"),
    ]  # fmt: skip


def made() -> str:
    page = {
        "about": "decisions as keys sign them; `expect`: `accepted`, or the code of the refusal; by make_proofs.py",
        "cases": cases(),
    }
    return json.dumps(page, indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        TARGET.write_text(made(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != made():
        sys.exit(f"{TARGET} is not what this script makes.")
