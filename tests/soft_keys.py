"""Keys of software, for tests: each makes an honest proof, or one that lies in exactly the place it is told to.

    key = SoftPasskey()
    proof = key.get(signed)                      # holds
    proof = key.get(signed, flags=0x04)          # signed by the same key: nobody touched it

What is changed is changed *before* it is signed, so that one rule is at stake and never the signature.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from nacl.signing import SigningKey

from amends.runtime.gate import sshsig
from amends.runtime.gate.proof import Credential, base64url, raw_id
from amends.runtime.gate.statement import challenge

RP, ORIGIN = "amends.localhost", "http://amends.localhost:8799"
ORIGINS = frozenset((ORIGIN, "http://amends.localhost"))
UP, UV, BE, BS, AT, ED = 1, 4, 8, 16, 64, 128


class SoftPasskey:
    """A WebAuthn key, its browser, and whatever they may say that is not so."""

    def __init__(self, seed: bytes = b"\7" * 32, alg: int = -8, credential: bytes = b"\1" * 16) -> None:
        self.alg, self.credential, self.count = alg, credential, 0
        if alg == -8:
            self._key: Any = SigningKey(seed)
            self.public = bytes(self._key.verify_key)
        else:
            from cryptography.hazmat.primitives.asymmetric import ec

            self._key = ec.derive_private_key(int.from_bytes(seed, "big"), ec.SECP256R1())
            numbers = self._key.public_key().public_numbers()
            self.public = b"\4" + numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")

    def sign(self, message: bytes) -> bytes:
        if self.alg == -8:
            return bytes(self._key.sign(message).signature)
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256

        return bytes(self._key.sign(message, ec.ECDSA(SHA256())))

    def cose(self) -> bytes:
        if self.alg == -8:
            return bytes.fromhex("a4010103272006215820") + self.public
        return bytes.fromhex("a5010203262001215820") + self.public[1:33] + bytes.fromhex("225820") + self.public[33:]

    def enrolled(self, **changed: Any) -> Credential:
        """The credential as the keyring holds it."""
        held: dict[str, Any] = dict(
            id=base64url(self.credential), kind="webauthn", alg=self.alg, public=base64url(self.public), rp_id=RP,
            person="a" * 16, roles=("approver",),
        )  # fmt: skip
        return Credential(**(held | changed))

    def create(
        self, challenge: bytes, *, client: Any = None, raw: bytes | None = None, flags: int = UP | UV | AT,
        credential: bytes | None = None, cose: bytes | None = None, tail: bytes = b"", rp: str = RP,
        aaguid: bytes = bytes(16), origin: str = ORIGIN,
    ) -> dict[str, Any]:  # fmt: skip
        """The answer to `register`."""
        name = self.credential if credential is None else credential
        attested = aaguid + len(name).to_bytes(2, "big") + name + (self.cose() if cose is None else cose)
        said = _client("webauthn.create", challenge, client, raw, origin)
        data = _authenticator(rp, flags, self.count, attested if flags & AT else b"", tail)
        return {"client_data": base64url(said), "authenticator_data": base64url(data)}

    def get(
        self, signed: bytes, *, client: Any = None, raw: bytes | None = None, flags: int = UP | UV,
        counter: int | None = None, tail: bytes = b"", rp: str = RP, data: bytes | None = None, origin: str = ORIGIN,
        **changed: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """A proof. client: members beside, or instead of, the honest ones (None removes one)."""
        self.count += 1
        said = _client("webauthn.get", challenge(signed), client, raw, origin)
        if data is None:
            data = _authenticator(rp, flags, self.count if counter is None else counter, b"", tail)
        signature = self.sign(data + sha256(said).digest())
        made = {
            "kind": "webauthn", "credential": base64url(self.credential), "client_data": base64url(said),
            "authenticator_data": base64url(data), "signature": base64url(signature),
        }  # fmt: skip
        return {name: value for name, value in (made | changed).items() if value is not None}


def _client(type: str, challenge: bytes, changed: Any, raw: bytes | None, origin: str) -> bytes:
    if raw is not None:
        return raw
    said = {"type": type, "challenge": base64url(challenge), "origin": origin, "crossOrigin": False} | (changed or {})
    return json.dumps({k: v for k, v in said.items() if v is not None}, separators=(",", ":")).encode()


def _authenticator(rp: str, flags: int, counter: int, attested: bytes, tail: bytes) -> bytes:
    return sha256(rp.encode()).digest() + bytes([flags]) + counter.to_bytes(4, "big") + attested + tail


class SoftSsh:
    """An SSH key, plain or on a security key, and the program that makes signature files with it."""

    def __init__(self, seed: bytes = b"\11" * 32, *, application: str | None = None) -> None:
        self._key = SigningKey(seed)
        self.sk, self.count = application is not None, 0
        type = sshsig.TOUCHED if self.sk else sshsig.PLAIN
        self.key = sshsig.Key(type, bytes(self._key.verify_key), application or "")
        self.blob = sshsig.key_blob(self.key)

    @property
    def line(self) -> str:
        """As in a `.pub` file."""
        import base64

        return f"{self.key.type} {base64.b64encode(self.blob).decode()} soft"

    def enrolled(self, **changed: Any) -> Credential:
        held: dict[str, Any] = dict(
            id=sshsig.fingerprint(self.blob), kind="ssh-sk" if self.sk else "ssh", alg=-8, public=base64url(self.blob),
            application=self.key.application, person="b" * 16, roles=("approver",),
        )  # fmt: skip
        return Credential(**(held | changed))

    def answer(self, message: bytes, flags: int = 1, counter: int | None = None) -> bytes:
        """What an agent returns for the bytes that ssh-keygen lets it sign."""
        if not self.sk:
            return _text(self.key.type.encode()) + _text(bytes(self._key.sign(message).signature))
        self.count += 1
        tail = bytes([flags]) + (self.count if counter is None else counter).to_bytes(4, "big")
        data = sha256(self.key.application.encode()).digest() + tail + sha256(message).digest()
        return _text(self.key.type.encode()) + _text(bytes(self._key.sign(data).signature)) + tail

    def blob_of(
        self, signed: bytes, *, namespace: str = sshsig.APPROVAL, hash: str = "sha512", version: int = 1,
        reserved: bytes = b"", flags: int = 1, counter: int | None = None, key: bytes | None = None,
        answer: bytes | None = None, tail: bytes = b"", magic: bytes = b"SSHSIG",
    ) -> bytes:  # fmt: skip
        """The blob in a signature file."""
        import hashlib

        digest = hashlib.new(hash, signed).digest()
        outer = b"".join(map(_text, (namespace.encode(), reserved, hash.encode())))
        made = self.answer(b"SSHSIG" + outer + _text(digest), flags, counter) if answer is None else answer
        head = magic + version.to_bytes(4, "big") + _text(self.blob if key is None else key)
        return head + outer + _text(made) + tail

    def get(self, signed: bytes, **lies: Any) -> dict[str, Any]:
        """A proof."""
        named = {"kind": "ssh-sk" if self.sk else "ssh", "credential": sshsig.fingerprint(self.blob)}
        return named | {"signature": base64url(self.blob_of(signed, **lies))}


class SoftRaw:
    """32 bytes in a file."""

    def __init__(self, seed: bytes = b"\13" * 32) -> None:
        self._key = SigningKey(seed)
        self.public = bytes(self._key.verify_key)

    @staticmethod
    def name(public: bytes) -> str:
        return sha256(public).digest()[:16].hex()

    def enrolled(self, **changed: Any) -> Credential:
        held: dict[str, Any] = dict(
            id=raw_id(self.public), kind="raw", alg=-8, public=base64url(self.public), person="c" * 16,
            roles=("approver",),
        )  # fmt: skip
        return Credential(**(held | changed))

    def get(self, signed: bytes, **changed: Any) -> dict[str, Any]:
        made = {
            "kind": "raw",
            "credential": raw_id(self.public),
            "signature": base64url(self._key.sign(signed).signature),
        }
        return made | changed


def _text(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
