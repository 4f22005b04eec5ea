"""A decision counts only if a key of the keyring signed exactly it: what cannot be proved here is refused.

One door for every sort of key: WebAuthn (a page, or a USB key from the terminal), SSH (plain, or on a security key),
raw Ed25519. `verify` and the ceremonies of the keyring see the same bytes, the same rules and the same refusals; each
refusal has a code of its own (unproven.py). Ed25519 is checked with libsodium and no other library, so that two devices
never disagree about a signature; ES256 needs an extra, and a device without it says so.

Pure: which keys are alive, who has voted and when a request expires is asked elsewhere, inside the transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
from nacl import bindings

from ...store import note
from . import es256, sshsig, webauthn
from .levels import FILE, PRESENT, VERIFIED
from .sshsig import APPROVAL, KEYRING
from .statement import challenge
from .unproven import REASONS, Unproven
from .webauthn import EDDSA, ES256, base64url, unbase64url

__all__ = [
    "ALGORITHMS", "APPROVAL", "EDDSA", "ES256", "KEYRING", "REASONS", "Credential", "Unproven", "Verified", "base64url",
    "check_key", "level_of", "raw_credential", "register", "ssh_credential", "ssh_proof", "unbase64url", "verify",
]  # fmt: skip

ALGORITHMS = frozenset((EDDSA, ES256))
WEBAUTHN, SSH, SSH_SK, RAW = KINDS = ("webauthn", "ssh", "ssh-sk", "raw")
SIGNATURE_MAX = 256
_FIELDS = {
    WEBAUTHN: ("client_data", "authenticator_data", "signature"),
    SSH: ("signature",),
    SSH_SK: ("signature",),
    RAW: ("signature",),
}
"""kind -> the fields of its proof beside kind and credential, each base64url"""


class Credential(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public key of a person.

    id: base64url of the WebAuthn credential id; `SHA256:…` of an SSH key; 32 hex digits of a raw one.
    kind: webauthn, ssh, ssh-sk or raw. alg: -8 Ed25519, -7 ES256.
    public: base64url of 32 bytes, of 04 ‖ x ‖ y, or of the whole SSH key blob.
    counter: how far the key had counted when it was enrolled.
    """

    id: str
    kind: str
    alg: int
    public: str
    person: str = ""
    roles: tuple[str, ...] = ()
    rp_id: str = ""
    application: str = ""
    backup_eligible: bool = False
    label: str = ""
    counter: int = 0


class Verified(NamedTuple):
    """What a proof has shown: by which key, whether somebody touched it, and showed that it is theirs; its counter."""

    credential: str
    present: bool
    verified: bool
    counter: int


# ---- one decision ---------------------------------------------------------------------------------------------------


def verify(
    credential: Credential,
    proof: Mapping[str, Any],
    signed: bytes,
    *,
    origins: Collection[str] = frozenset(),
    rp_id: str = "",
    namespace: str = APPROVAL,
    algs: Collection[int] = frozenset((EDDSA,)),
    counter: int = 0,
    verification: bool = False,
) -> Verified:
    """What a proof shows about these signed bytes. Raises Unproven.

    counter: the highest that this key has shown. verification: whether a PIN or a fingerprint is a must.
    """
    fields = _fields(credential, proof)
    if credential.alg not in algs:
        raise Unproven("alg_not_allowed", f"COSE algorithm {credential.alg}")
    check_key(credential)
    if credential.kind == WEBAUTHN:
        shown = _verify_webauthn(credential, fields, signed, origins, rp_id, verification)
    elif credential.kind == RAW:
        shown = _verify_raw(credential, fields["signature"], signed, verification)
    else:
        shown = _verify_ssh(credential, fields["signature"], signed, namespace, verification)
    if (shown.counter or counter) and shown.counter <= counter:
        raise Unproven("counter_went_back", f"{shown.counter} after {counter}", credential=credential.id)
    return shown


def _fields(credential: Credential, proof: Mapping[str, Any]) -> dict[str, bytes]:
    """The bytes of a proof that is meant for this key and has exactly the fields of its kind."""
    if credential.kind not in _FIELDS or not isinstance(proof, Mapping):
        raise Unproven("bad_proof")
    if proof.get("kind") != credential.kind or proof.get("credential") != credential.id:
        raise Unproven("other_credential")
    names = _FIELDS[credential.kind]
    if set(proof) != {"kind", "credential", *names}:
        raise Unproven("bad_proof")
    return {name: unbase64url(proof[name]) for name in names}


def _verify_webauthn(
    credential: Credential, fields: Mapping[str, bytes], signed: bytes, origins: Collection[str], rp_id: str,
    verification: bool,
) -> Verified:  # fmt: skip
    client, authenticator = fields["client_data"], fields["authenticator_data"]
    webauthn.check_client(client, webauthn.GET, challenge(signed), origins)
    said = webauthn.parse(authenticator)
    if credential.rp_id != rp_id:
        raise Unproven("rp_mismatch")
    webauthn.check_flags(said, rp_id, verification)
    webauthn.check_answer(said, credential.backup_eligible)
    _check_signature(
        credential.alg, unbase64url(credential.public), webauthn.message(client, authenticator), fields["signature"]
    )
    return Verified(credential.id, True, bool(said.flags & webauthn.VERIFIED), said.counter)


def _verify_ssh(credential: Credential, blob: bytes, message: bytes, namespace: str, verification: bool) -> Verified:
    key = unbase64url(credential.public)
    signature = sshsig.parse(blob)
    sshsig.check(signature, key=key, namespace=namespace, verification=verification)
    if verification and credential.kind == SSH:
        raise Unproven("user_not_verified")
    _check_signature(EDDSA, sshsig.parse_key(key).public, sshsig.signed(signature, message), signature.raw)
    return Verified(credential.id, signature.present, signature.verified, signature.counter)


def _verify_raw(credential: Credential, signature: bytes, signed: bytes, verification: bool) -> Verified:
    if verification:
        raise Unproven("user_not_verified")
    _check_signature(EDDSA, unbase64url(credential.public), signed, signature)
    return Verified(credential.id, False, False, 0)


def _check_signature(alg: int, public: bytes, message: bytes, signature: bytes) -> None:
    if alg == ES256:
        if len(signature) > SIGNATURE_MAX:
            raise Unproven("bad_signature")
        es256.check(public, message, signature)
    elif not note.verify(public, message, signature):
        raise Unproven("bad_signature")


# ---- keys -----------------------------------------------------------------------------------------------------------


def register(
    answer: Mapping[str, Any],
    *,
    challenge: bytes,
    origins: Collection[str],
    rp_id: str,
    algs: Collection[int] = frozenset((EDDSA,)),
    known: Collection[str] = frozenset(),
    synced: bool = False,
    verification: bool = True,
    extensions: Collection[str] = frozenset(("credProtect",)),
    person: str = "",
    roles: tuple[str, ...] = (),
    label: str = "",
) -> Credential:
    """The credential that a key made when it was asked to, by WebAuthn. Raises Unproven.

    answer: {client_data, authenticator_data}, each base64url. challenge: 32 random bytes that we gave, used once.
    algs: the algorithms that we asked for. known: the ids of all credentials, also of dead ones. synced: whether a key
    that its provider copies may be enrolled. The public key is read from what the authenticator said, never from what a
    page made of it. Attestation is neither asked for nor believed.
    """
    client, authenticator = (unbase64url(answer.get(name)) for name in ("client_data", "authenticator_data"))
    webauthn.check_client(client, webauthn.CREATE, challenge, origins)
    said = webauthn.parse(authenticator)
    webauthn.check_flags(said, rp_id, verification)
    webauthn.check_enrolment(said, synced, extensions)
    alg, public = webauthn.public_key(said.cose)
    if alg not in algs:
        raise Unproven("alg_not_allowed", f"COSE algorithm {alg}")
    copyable = bool(said.flags & webauthn.COPYABLE)
    made = Credential(
        base64url(said.credential), WEBAUTHN, alg, base64url(public), person, roles, rp_id, "", copyable, label,
        said.counter,
    )  # fmt: skip
    return _new(made, known)


def ssh_credential(
    line: str,
    *,
    person: str = "",
    roles: tuple[str, ...] = (),
    label: str = "",
    known: Collection[str] = frozenset(),
) -> Credential:
    """The credential of a line as in a `.pub` file. Raises Unproven. Whether an sk key asks for a touch shows only when
    it signs: a proof of possession belongs to every enrolment."""
    blob = sshsig.parse_line(line)
    key = sshsig.parse_key(blob)
    kind = SSH_SK if key.type == sshsig.TOUCHED else SSH
    made = Credential(
        sshsig.fingerprint(blob), kind, EDDSA, base64url(blob), person, roles, "", key.application, False, label
    )
    return _new(made, known)


def raw_credential(
    public: bytes,
    *,
    person: str = "",
    roles: tuple[str, ...] = (),
    label: str = "",
    known: Collection[str] = frozenset(),
) -> Credential:
    """The credential of 32 bytes of Ed25519. Raises Unproven."""
    made = Credential(raw_id(public), RAW, EDDSA, base64url(public), person, roles, label=label)
    return _new(made, known)


def raw_id(public: bytes) -> str:
    """What names a raw key: the first 16 bytes of its SHA-256, 32 hex digits."""
    return sha256(public).hexdigest()[:32]


def _new(made: Credential, known: Collection[str]) -> Credential:
    check_key(made)
    if made.id in known:
        raise Unproven("credential_known")
    return made


def check_key(credential: Credential) -> None:
    """Whether the public key is one that only its owner can sign for, and the id is its own. Raises Unproven."""
    public = unbase64url(credential.public)
    if credential.alg == ES256 and credential.kind == WEBAUTHN:
        return es256.check_point(public)
    if credential.alg != EDDSA or credential.kind not in KINDS:
        raise Unproven("alg_not_allowed", f"COSE algorithm {credential.alg}")
    if credential.kind in (SSH, SSH_SK):
        public = _ssh_public(credential, public)
    elif credential.kind == RAW and credential.id != raw_id(public):
        raise Unproven("bad_key", "its id is that of another")
    if len(public) != 32:
        raise Unproven("bad_key")
    if not note.is_sound(public) or not bindings.crypto_core_ed25519_is_valid_point(public):
        raise Unproven("weak_key")
    return None


def _ssh_public(credential: Credential, blob: bytes) -> bytes:
    key = sshsig.parse_key(blob)
    if (key.type == sshsig.TOUCHED) != (credential.kind == SSH_SK) or credential.id != sshsig.fingerprint(blob):
        raise Unproven("bad_key", "its id or its kind is that of another")
    if credential.kind == SSH_SK and not key.application == credential.application == sshsig.APPLICATION:
        raise Unproven("application_mismatch", key.application[:80])
    return key.public


def level_of(credential: Credential, verified: Verified) -> int:
    """How strong the evidence is (levels.py). A key that is copied to other devices is no more than a file."""
    if credential.kind in (SSH, RAW) or credential.backup_eligible or not verified.present:
        return FILE
    return VERIFIED if verified.verified else PRESENT


def ssh_proof(text: str) -> dict[str, str]:
    """The proof in a `.sig` file of ssh-keygen. Raises Unproven."""
    blob = sshsig.unarmour(text)
    key = sshsig.parse(blob).key
    kind = SSH_SK if sshsig.parse_key(key).type == sshsig.TOUCHED else SSH
    return {"kind": kind, "credential": sshsig.fingerprint(key), "signature": base64url(blob)}
