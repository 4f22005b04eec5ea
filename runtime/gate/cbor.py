"""The CBOR that security keys write, and nothing else: each value has one encoding, and any other is refused.

CTAP2's canonical form: shortest lengths, no indefinite ones, map keys sorted and each of them once, four levels
at most. Integers, bytes, text, arrays, maps, true, false and null are all that a key's answer holds: no tags or floats.

Why not a library: what it accepts besides decides what two devices disagree about.
Source: CTAP 2.1 section 8 (message encoding); RFC 8949.
"""

from __future__ import annotations

from typing import Any

from .unproven import Unproven

DEPTH_MAX = 4
_SIMPLE = {20: False, 21: True, 22: None}


def read(data: bytes, at: int = 0) -> tuple[Any, int]:
    """The value that begins at a place, and the place behind it. Raises Unproven (bad_cbor)."""
    return _value(data, at, 0)


def _value(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    major, number, at = _head(data, at)
    if major == 7:
        return _SIMPLE[number], at
    if major < 2:
        return (number if major == 0 else -1 - number), at
    if major < 4:
        return _bytes(data, at, number, text=major == 3)
    if depth == DEPTH_MAX:
        raise _bad("nested too deep")
    if number > len(data) - at:  # each item takes a byte: what cannot be there is not looked for
        raise _bad("cut short")
    return (_array if major == 4 else _map)(data, at, number, depth + 1)


def _head(data: bytes, at: int) -> tuple[int, int, int]:
    """Major type, the number in its head, the place behind."""
    (initial,), at = _take(data, at, 1)
    major, info = initial >> 5, initial & 31
    if major == 6 or info > 27 or (major == 7 and info not in _SIMPLE):
        raise _bad("a tag, a float or an indefinite length")
    if info < 24:
        return major, info, at
    width = 1 << (info - 24)
    raw, at = _take(data, at, width)
    number = int.from_bytes(raw, "big")
    if number < (24 if width == 1 else 1 << (4 * width)):
        raise _bad("a number that is written longer than it is")
    return major, number, at


def _take(data: bytes, at: int, count: int) -> tuple[bytes, int]:
    if count > len(data) - at:
        raise _bad("cut short")
    return data[at : at + count], at + count


def _bytes(data: bytes, at: int, count: int, text: bool) -> tuple[Any, int]:
    raw, at = _take(data, at, count)
    try:
        return (raw.decode() if text else raw), at
    except UnicodeDecodeError:
        raise _bad("text that is not UTF-8") from None


def _array(data: bytes, at: int, count: int, depth: int) -> tuple[list[Any], int]:
    items = []
    for _ in range(count):
        item, at = _value(data, at, depth)
        items.append(item)
    return items, at


def _map(data: bytes, at: int, count: int, depth: int) -> tuple[dict[Any, Any], int]:
    """CTAP2's order: major type of the key first, then its length, then its bytes."""
    items: dict[Any, Any] = {}
    before: tuple[int, int, bytes] | None = None
    for _ in range(count):
        start = at
        key, at = _value(data, at, depth)
        encoded = data[start:at]
        place = (encoded[0] >> 5, len(encoded), encoded)
        if place[0] > 3 or (before is not None and place <= before):
            raise _bad("map keys out of order, or of an odd kind")
        before = place
        items[key], at = _value(data, at, depth)
    return items, at


def _bad(why: str) -> Unproven:
    return Unproven("bad_cbor", why)
