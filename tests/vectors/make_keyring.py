"""Writes keyring.json beside it: events of a keyring, made from FORMAT.md alone and not by the code under test.

Nothing of amends is imported: JSON, SHA-256, base64 and an Ed25519 library are enough.
`python3 tests/vectors/make_keyring.py --check` says whether the file still agrees.
"""

from __future__ import annotations

import base64
import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from nacl.signing import SigningKey

TARGET = Path(__file__).with_name("keyring.json")
TAG = b"amends/keyring/1\0"
HOUR = 3600 * 1000


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def secret(name: str) -> SigningKey:
    return SigningKey(sha256(name.encode()).digest())


def public(name: str) -> bytes:
    return bytes(secret(name).verify_key)


def named(name: str) -> str:
    return sha256(public(name)).hexdigest()[:32]


def credential(name: str, person: str, *roles: str) -> dict[str, Any]:
    return {"id": named(name), "kind": "raw", "alg": -8, "public": b64(public(name)), "person": person,
            "roles": list(roles), "rp_id": "", "application": "", "backup_eligible": False, "label": name,
            "counter": 0}  # fmt: skip


class Book:
    """Events in the order in which they are recorded. head: what comes next follows."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def add(self, kind: str, *by: str, lived: int = 0, prior: tuple[str, ...] = (), **fields: Any) -> str:
        said = {"v": 1, "kind": kind, "nonce": sha256(f"{kind} {len(self.told)}".encode()).hexdigest(), **fields}
        if prior:
            said["prior"] = sorted(prior)
        text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        digest = sha256(text).hexdigest()
        names = sorted(prior)
        together = sha256("\n".join(names).encode()).hexdigest() if len(names) > 1 else "".join(names)
        proofs = [{"kind": "raw", "credential": named(name), "signature": b64(secret(name).sign(TAG + text).signature)}
                  for name in by]  # fmt: skip
        self.told.append({
            "kind": f"key.{kind}", "lived": lived, "event": digest, "prior": together, "text": text.decode(),
            "proofs": proofs, "challenge": sha256(TAG + text).hexdigest(),
        })  # fmt: skip
        return digest


def settings(delay_hours: int = 72) -> dict[str, Any]:
    return {"algs": [-8], "rp_id": "amends.localhost", "synced": False, "quorum": 1, "delay_ms": delay_hours * HOUR,
            "origins": ["http://amends.localhost", "http://amends.localhost:8799"]}  # fmt: skip


def made() -> dict[str, Any]:
    book = Book()
    both = ("admin", "approver")
    root = book.add(
        "founded", "first", "spare", keys=[credential("first", "Zoë", *both), credential("spare", "Zoë", *both)],
        recovery=b64(public("paper")), settings=settings(),
    )  # fmt: skip
    added = book.add("added", "first", "joins", prior=(root,), key=credential("joins", "Ben", "admin"))
    book.add("added", "thief", prior=(root,), key=credential("thief", "Eve", *both))
    one = book.add("revoked", "joins", prior=(added,), credential=named("first"), reason="lost")
    two = book.add("revoked", "spare", prior=(added,), credential=named("joins"))
    book.add("quarantined", prior=(one, two), credential=named("spare"), reason="its counter went back")
    asked = book.add(
        "recovering", "fresh", "other", "paper", prior=(one, two), lived=5 * HOUR, recovery=b64(public("paper 2")),
        keys=[credential("fresh", "Zoë", *both), credential("other", "Ben", *both)], settings=settings(24),
    )  # fmt: skip
    after = [{"live": [named("spare")], "quarantined": True, "recovering": asked, "tips": sorted((one, two))}]
    done = book.add("recovered", "other", prior=(one, two), lived=77 * HOUR, of=[asked])
    after.append({"live": sorted((named("fresh"), named("other"))), "tips": [done]})
    return {"about": "FORMAT.md 10; seeds are SHA-256 of the labels", "tag": TAG.hex(), "told": book.told,
            "before_the_last": after[0], "after_all": after[1]}  # fmt: skip


if __name__ == "__main__":
    text = json.dumps(made(), indent=1, ensure_ascii=False) + "\n"
    if "--check" in sys.argv:
        sys.exit(0 if TARGET.read_text(encoding="utf-8") == text else "keyring.json is not what this makes")
    TARGET.write_text(text, encoding="utf-8")
