"""Why a proof proves nothing: one code for each rule that it broke, and what whoever signed can do about it.

Every rule of the verifiers (webauthn.py, sshsig.py, proof.py) refuses with a code of this table and with no other, so
that a test, a script and a person can tell a wrong address from a key that nobody touched.
"""

from __future__ import annotations

from ...store.errors import Refused

_AGAIN = "Sign this request again."
_ATTACK = "If you signed exactly this, something between you and the key changed it: look before you sign again."
_TOUCH = "Sign again, and touch the key when it blinks."
_VERSION = "Use `ssh-keygen -Y sign` of OpenSSH 8.2 or newer, unchanged."

REASONS: dict[str, tuple[str, str]] = {
    "bad_proof": ("the proof lacks a field, has one too many, or is too long", _AGAIN),
    "bad_base64url": ("a field of the proof is not base64url without padding", _AGAIN),
    "other_credential": ("it was made by another key than it names", _AGAIN),
    "alg_not_allowed": ("the keyring does not allow this key's algorithm", "Enrol an Ed25519 key."),
    "es256_extra_missing": (
        "this key signs with ES256, and this device cannot check that",
        "Install `amends[passkeys]` here, or use an Ed25519 key.",
    ),
    "weak_key": ("the key is one for which anybody can make signatures", "Enrol another key."),
    "bad_key": ("the public key is not one of its kind", "Enrol another key."),
    "bad_signature": ("the signature does not hold", _ATTACK),
    "counter_went_back": (
        "the key's counter did not rise since it last signed: there may be a copy of it",
        "Use another key. An admin decides about this one: `amends keys list`.",
    ),
    # WebAuthn, in the order in which they are asked
    "bad_client_data": ("what the browser says it signed is not a plain JSON object", _AGAIN),
    "wrong_type": ("it is a signature for another ceremony", _AGAIN),
    "challenge_mismatch": ("another request, or another verdict, was signed", _ATTACK),
    "origin_not_allowed": (
        "it was signed at an address that the keyring does not list",
        "Use the page of this device.",
    ),
    "cross_origin": ("it was signed inside a frame of another page", "Open the page by itself."),
    "bad_authenticator_data": ("what the key says it signed has the wrong length", _AGAIN),
    "rp_mismatch": ("the key signed for another site", "Use the page of this device."),
    "reserved_flags": ("the key set flags that have no meaning yet", _AGAIN),
    "user_not_present": ("nobody touched the key", _TOUCH),
    "user_not_verified": ("the key did not ask for a PIN or a fingerprint", "Set a PIN on the key, and sign again."),
    "backup_state_impossible": ("the key says that it was copied and that it cannot be", "Use another key."),
    "backup_eligibility_changed": ("the key can be copied now, or could be when it was enrolled", "Use another key."),
    "attested_data_unasked": ("the key enrolled itself instead of signing", _AGAIN),
    "extensions_unasked": ("the key answered what it was not asked", _AGAIN),
    # enrolling one
    "credential_missing": ("the key did not say who it is", "Enrol it again."),
    "bad_credential_id": ("the key's name is empty or longer than 1023 bytes", "Enrol another key."),
    "bad_cbor": ("the key does not write canonical CBOR", "Enrol another key."),
    "synced_key_not_allowed": (
        "this passkey is copied to other devices by its provider",
        "Enrol a key that stays where it is.",
    ),
    "credential_known": ("this key is enrolled already, or was", "Enrol another key."),
    # SSH
    "bad_sshsig": ("this is not an SSH signature as ssh-keygen writes it", _VERSION),
    "namespace_mismatch": ("it was signed for another purpose", "Sign with `-n` and the namespace that was shown."),
    "application_mismatch": (
        "the key was made for another application",
        "Make one: `ssh-keygen -t ed25519-sk -O application=ssh:amends -O verify-required`.",
    ),
}
"""code -> (what is wrong, what to do)"""


class Unproven(Refused):
    """A proof that proves nothing: `code` is one of REASONS."""

    code = "unproven"

    def __init__(self, code: str, detail: str = "", **facts: object) -> None:
        said, next = REASONS[code]
        more = f" ({detail})" if detail else ""
        super().__init__(f"This does not count: {said}{more}.", next=next, code=code, **facts)
