"""A WebAuthn answer counts only if a person touched an enrolled key, here, for exactly this.

The client (a browser, or our own terminal) says what it asked of the key, the key says what it did, and the signature
covers both. Each rule refuses with its own code, in the order in which they stand in `check_client` and `check_flags`;
whatever is unknown, reserved, doubled or left over refuses too. The challenge is computed by whoever calls, never taken
from the answer.

Why our own: the verifiers at hand let pass frames of other pages, reserved flags, keys that became copyable, doubled
JSON keys and keys that sign for everybody.
Source: W3C Web Authentication Level 3, sections 6.1, 7.1 and 7.2.
"""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Collection
from hashlib import sha256
from typing import Any, NamedTuple

from . import cbor
from .unproven import Unproven

EDDSA, ES256 = -8, -7
CREATE, GET = "webauthn.create", "webauthn.get"

PRESENT, VERIFIED, COPYABLE, COPIED, ATTESTED, EXTENDED = 1, 4, 8, 16, 64, 128
_RESERVED = 2 | 32

CLIENT_DATA_MAX = 8192
AUTHENTICATOR_DATA_MAX = 4096
ID_MAX = 1023
_FIXED = 37  # SHA-256 of the RP ID, flags, counter
_COSE = {
    EDDSA: ({1: 1, 3: EDDSA, -1: 6}, (-2,)),
    ES256: ({1: 2, 3: ES256, -1: 1}, (-2, -3)),
}
"""alg -> what its COSE key says, and under which labels its coordinates lie"""


class AuthenticatorData(NamedTuple):
    """What the key says it did. credential, cose: of a key that has just been made, else empty."""

    rp_hash: bytes
    flags: int
    counter: int
    credential: bytes = b""
    cose: Any = None
    extensions: Any = None


# ---- what the client says -------------------------------------------------------------------------------------------


def check_client(raw: bytes, type: str, challenge: bytes, origins: Collection[str]) -> None:
    """Whether the client asked the key for this ceremony, of this challenge, at one of these addresses."""
    said = _client_data(raw)
    if said.get("type") != type:
        raise Unproven("wrong_type", repr(said.get("type"))[:60])
    signed = said.get("challenge")
    if not isinstance(signed, str) or not hmac.compare_digest(_escaped(signed), base64url(challenge).encode()):
        raise Unproven("challenge_mismatch")
    origin = said.get("origin")
    if not isinstance(origin, str) or origin not in origins:
        raise Unproven("origin_not_allowed", repr(origin)[:120])
    if said.get("crossOrigin", False) is not False or "topOrigin" in said:
        raise Unproven("cross_origin")


def _client_data(raw: bytes) -> dict[str, Any]:
    """The object. Browsers add members at will, so that it is parsed and never compared with a template."""
    if len(raw) > CLIENT_DATA_MAX:
        raise Unproven("bad_client_data", f"longer than {CLIENT_DATA_MAX} bytes")
    try:
        said = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_single, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Unproven("bad_client_data", "not JSON") from None
    if not isinstance(said, dict):
        raise Unproven("bad_client_data", "not an object")
    return said


def _single(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Unproven("bad_client_data", "a key stands there twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _escaped(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# ---- what the key says ----------------------------------------------------------------------------------------------


def parse(raw: bytes) -> AuthenticatorData:
    """The parts of authenticator data, which end where it ends. Raises Unproven."""
    if not _FIXED <= len(raw) <= AUTHENTICATOR_DATA_MAX:
        raise Unproven("bad_authenticator_data")
    said = AuthenticatorData(raw[:32], raw[32], int.from_bytes(raw[33:37], "big"))
    at = _FIXED
    if said.flags & ATTESTED:
        credential, at = _credential_id(raw, at + 16)  # the model's name, which nobody vouches for, is passed over
        cose, at = cbor.read(raw, at)
        said = said._replace(credential=credential, cose=cose)
    if said.flags & EXTENDED:
        extensions, at = cbor.read(raw, at)
        said = said._replace(extensions=extensions)
    if at != len(raw):
        raise Unproven("bad_authenticator_data", "bytes are left over")
    return said


def _credential_id(raw: bytes, at: int) -> tuple[bytes, int]:
    end = at + 2 + int.from_bytes(raw[at : at + 2], "big")
    if end > len(raw):
        raise Unproven("bad_authenticator_data", "cut short")
    if not 1 <= end - at - 2 <= ID_MAX:
        raise Unproven("bad_credential_id")
    return raw[at + 2 : end], end


def check_flags(said: AuthenticatorData, rp_id: str, verification: bool) -> None:
    """Whether the key signed for this site, with a person there."""
    if not hmac.compare_digest(said.rp_hash, sha256(rp_id.encode()).digest()):
        raise Unproven("rp_mismatch")
    if said.flags & _RESERVED:
        raise Unproven("reserved_flags")
    if not said.flags & PRESENT:
        raise Unproven("user_not_present")
    if verification and not said.flags & VERIFIED:
        raise Unproven("user_not_verified")
    if said.flags & COPIED and not said.flags & COPYABLE:
        raise Unproven("backup_state_impossible")


def check_answer(said: AuthenticatorData, copyable: bool) -> None:
    """Whether the key is what it was when it was enrolled, and answers nothing else."""
    if bool(said.flags & COPYABLE) != copyable:
        raise Unproven("backup_eligibility_changed")
    if said.flags & ATTESTED:
        raise Unproven("attested_data_unasked")
    if said.flags & EXTENDED:
        raise Unproven("extensions_unasked")


def check_enrolment(said: AuthenticatorData, copyable: bool, extensions: Collection[str]) -> None:
    """Whether a new key said who it is, may be of its sort, and answered only what it was asked."""
    if not said.flags & ATTESTED:
        raise Unproven("credential_missing")
    if said.flags & COPYABLE and not copyable:
        raise Unproven("synced_key_not_allowed")
    if said.flags & EXTENDED and not (isinstance(said.extensions, dict) and set(said.extensions) <= set(extensions)):
        raise Unproven("extensions_unasked")


def public_key(cose: Any) -> tuple[int, bytes]:
    """Algorithm and public key (32 bytes, or 04 ‖ x ‖ y) of a COSE key. Raises Unproven: alg_not_allowed, bad_key."""
    if not isinstance(cose, dict):
        raise Unproven("bad_key")
    alg = cose.get(3)
    if not isinstance(alg, int) or alg not in _COSE:
        raise Unproven("alg_not_allowed", f"COSE algorithm {alg!r}"[:60])
    says, labels = _COSE[alg]
    coordinates = [one for label in labels if isinstance(one := cose.get(label), bytes) and len(one) == 32]
    rest = {label: value for label, value in cose.items() if label not in labels}
    if len(coordinates) != len(labels) or rest != says or any(isinstance(value, bool) for value in rest.values()):
        raise Unproven("bad_key")
    return alg, (b"" if alg == EDDSA else b"\x04") + b"".join(coordinates)


def message(client_data: bytes, authenticator_data: bytes) -> bytes:
    """What the key signed."""
    return authenticator_data + sha256(client_data).digest()


# ---- base64url, as WebAuthn writes it -------------------------------------------------------------------------------


def base64url(data: bytes) -> str:
    """Without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unbase64url(text: object) -> bytes:
    """The bytes, if the text is their one encoding. Raises Unproven (bad_base64url)."""
    if not isinstance(text, str) or not text.isascii():
        raise Unproven("bad_base64url")
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        raise Unproven("bad_base64url") from None
    if base64url(data) != text:
        raise Unproven("bad_base64url")
    return data
