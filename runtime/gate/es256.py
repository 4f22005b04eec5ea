"""Platform passkeys sign with ES256, and only the extra `passkeys` can check that; without it nothing is approved.

The one room that knows `cryptography`. Its signatures can be rewritten without the key (r, n - s), so that the bytes of
one are never used to tell two decisions apart.
"""

from __future__ import annotations

from typing import Any

from .unproven import Unproven


def check_point(point: bytes) -> None:
    """Raises Unproven: bad_key if it is no point of P-256 (04 ‖ x ‖ y), es256_extra_missing if nobody here can tell."""
    _key(point)


def check(point: bytes, message: bytes, signature: bytes) -> None:
    """Raises Unproven: bad_signature, bad_key, es256_extra_missing."""
    key = _key(point)
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        key.verify(signature, message, ec.ECDSA(SHA256()))
    except InvalidSignature:
        raise Unproven("bad_signature") from None


def _key(point: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise Unproven("es256_extra_missing") from None
    if len(point) != 65 or point[0] != 4:
        raise Unproven("bad_key")
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
    except ValueError:
        raise Unproven("bad_key") from None
