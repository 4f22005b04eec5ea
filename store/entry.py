r"""An entry is one line, written once: what is hashed is what is stored, and nothing is ever re-serialised.

An example, and its opening beside it (in truth one line each):

    {"seq":7,"prev":"<64 hex>","at":1764460800000000,"kind":"step.intended","saga":"k3…","n":2,"step":1,"fence":1,
     "tool":"stripe.charge","sem":"compensable","key":"mf…","c":["<64 hex>"]}
    ["<22 base64url characters>",{"args":{"amount_minor":4200}}]

One Struct is the grammar for writer and verifier: decode, encode, compare bytes. What a Struct cannot say
(digests, pairs, which alphabet) is checked beside it. A line with a key or a kind that this version does not know
is read by the open rule: same order, same bytes, its unknown keys kept in the line and out of the Struct.

Why not canonical JSON: two parsers that disagree on one byte string are a hole; here there is one byte string.
Source of the grammar: FORMAT.md.
"""

from __future__ import annotations

import binascii
import json
import os
import re
from hashlib import sha256
from typing import Annotated, Any, NoReturn

import msgspec

from .errors import BadValue, Malformed

VERSION = 1
LINE_MAX = 16 * 1024
STRING_MAX = 256
INTEGER_MAX = 1 << 53
COMMITMENTS_MAX = 32
OPENING_DEPTH_MAX = 200
ZERO = "0" * 64

_PRINTABLE = bytes(b for b in range(0x20, 0x7F) if b != 0x5C)
_LONG_STRING = re.compile(rb'"[^"]{257,}')  # or a long way from one string to the next: `_long` tells
_LONG_FROM = 390  # no shorter line has room for a string above STRING_MAX
_HEX64 = re.compile(r"[0-9a-f]{64}")
_SALT = re.compile(r"[A-Za-z0-9_-]{22}")
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"')
_WORDS = re.compile(rb"[\[\]{},:]")
_DIGIT = re.compile("[1-9]")
_URLSAFE = bytes.maketrans(b"+/", b"-_")

Count = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
Amount = Annotated[int, msgspec.Meta(ge=-INTEGER_MAX, le=INTEGER_MAX)]
Text = Annotated[str, msgspec.Meta(max_length=STRING_MAX)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=STRING_MAX)]
Pair = Annotated[tuple[Count, ...], msgspec.Meta(max_length=2)]
Pairs = tuple[tuple[Count, Count], ...]


class Entry(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One fact of the log. Declaration order is key order; a default is an absent key (FORMAT.md 2).

    Times are microseconds (`at`) or milliseconds (`*_ms`, `up[1]`); `ref` is the `seq` of an earlier entry.
    """

    seq: Count
    prev: Text
    at: Count
    kind: Text
    saga: Text = ""
    n: Count = 0
    step: Count = 0
    fence: Count = 0
    tool: Text = ""
    sem: Text = ""
    inv: Text = ""
    handler: Text = ""
    key: Text = ""
    out: Text = ""
    ref: Count = 0
    use: dict[Name, Amount] = {}
    up: Pair = ()
    # a kind's own keys, sorted
    again: Text = ""
    attempt: Count = 0
    basis: Text = ""
    boot: Text = ""
    by_ms: Count = 0
    cap: Amount = 0
    cert: Text = ""
    channel: Text = ""
    confirm: Text = ""
    confirm_again: Text = ""
    confirmer: Text = ""
    count: Count = 0
    counter: Count = 0
    credential: Text = ""
    driver: Text = ""
    event: Text = ""
    export: Text = ""
    follows: Text = ""
    follows_root: Text = ""
    follows_size: Count = 0
    install: Text = ""
    item: Text = ""
    level: Count = 0
    limit: Text = ""
    lock: Text = ""
    log: Text = ""
    noise: Text = ""
    of: Text = ""
    on_crash: Text = ""
    on_failure: Text = ""
    parent: Text = ""
    part: Pair = ()
    payload: Text = ""
    person: Text = ""
    places: Pairs = ()
    policy: Text = ""
    prior: Text = ""
    probe: Count = 0
    quorum: Count = 0
    request: Text = ""
    resource: Text = ""
    runs: Pairs = ()
    scale: Count = 0
    scope: Text = ""
    seal: Text = ""
    settle_ms: Count = 0
    tags: Text = ""
    target: Text = ""
    undo: Count = 0
    unit: Text = ""
    upto: Count = 0
    v: Count = 0
    why: Text = ""
    within_ms: Count = 0
    witness: Text = ""
    # last
    salt: Text = ""
    c: tuple[str, ...] = ()


KEYS = tuple(Entry.__struct_fields__)


def unfinished(entry: Entry) -> bool:
    """Whether it is a part of a fact that a later entry completes: it holds openings and means nothing by itself."""
    return len(entry.part) == 2 and entry.part[0] < entry.part[1]


_HEAD = KEYS[: KEYS.index("again")]
_ORDER = {key: place for place, key in enumerate(_HEAD)} | {"salt": 1 << 30, "c": (1 << 30) + 1}
_REQUIRED = ("seq", "prev", "at", "kind")

decode = msgspec.json.Decoder(Entry).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="deterministic").encode  # an Entry: keys as declared, `use` sorted
_encode_any = msgspec.json.Encoder().encode  # anything else: keys as they stand
UNREADABLE = (ValueError, OverflowError, RecursionError)  # msgspec's and the codecs' errors are ValueErrors


def line_of(entry: Entry) -> bytes:
    """The bytes of an entry, LF included. Raises BadValue for text that no reader of ours would take back."""
    line = _encode(entry)
    if line.translate(None, _PRINTABLE) or (len(line) > _LONG_FROM and _long(line)):
        raise BadValue(
            f"The {entry.kind} entry holds text that is not 1 to {STRING_MAX} printable ASCII characters without "
            "quote and backslash."
        )
    return line + b"\n"


def leaf(line: bytes) -> bytes:
    """h = SHA-256(0x00 ‖ line): chain hash, RFC 6962 leaf hash and identity of the entry, 32 bytes."""
    return sha256(b"\0" + line).digest()


def read(line: bytes) -> Entry:
    """The entry in a line that this program wrote and checked before. For anything else use `parse`."""
    try:
        return decode(line)
    except UNREADABLE:
        return parse(line)


def parse(line: bytes) -> Entry:
    """The entry in a line from anywhere. Raises Malformed (`finding` E_GRAMMAR, E_NONCANONICAL, E_RANGE)."""
    if len(line) > LINE_MAX or line[-1:] != b"\n":
        raise _bad("E_GRAMMAR", "an entry is one line of at most 16384 bytes that ends in LF")
    if line[:-1].translate(None, _PRINTABLE):
        raise _bad("E_GRAMMAR", "an entry holds printable ASCII without backslash only")
    if len(line) > _LONG_FROM and _long(line):
        raise _bad("E_RANGE", f"a string is longer than {STRING_MAX}")
    try:
        entry = decode(line)
        same = _encode(entry) == line[:-1]
    except UNREADABLE:
        return _parse_open(line)
    if not same:
        raise _bad("E_NONCANONICAL", "the line is not what its own fields encode to")
    _check(entry)
    return entry


def _long(line: bytes) -> bool:
    """Whether a string is too long. No escapes exist, so every second piece between quotes is one."""
    return bool(_LONG_STRING.search(line)) and any(len(text) > STRING_MAX for text in line.split(b'"')[1::2])


def _parse_open(line: bytes) -> Entry:
    """The open rule: unknown keys stand sorted among a kind's own, hold text, integers, lists and maps of them."""
    try:
        raw = _decode_any(line)
        same = _encode_any(raw) == line[:-1]
    except UNREADABLE as error:
        raise _bad("E_GRAMMAR", f"not JSON ({error})") from None
    if type(raw) is not dict or tuple(raw)[:4] != _REQUIRED:
        raise _bad("E_GRAMMAR", "an entry starts with seq, prev, at, kind")
    if not same:
        raise _bad("E_NONCANONICAL", "the line is not what its own fields encode to")
    places = [(_ORDER.get(key, 1 << 20), "" if key in _ORDER else key) for key in raw]
    if places != sorted(places):
        raise _bad("E_NONCANONICAL", "keys stand out of order")
    if not all(_plain(value, 3) for value in raw.values()):
        raise _bad("E_RANGE", "a value is not text, an integer within 2^53, or a sorted map or a list of them")
    if any(raw[key] in (0, "", [], {}) for key in raw if key not in _REQUIRED):
        raise _bad("E_NONCANONICAL", "an empty key is written as an absent one")
    try:
        entry = msgspec.convert({key: value for key, value in raw.items() if key in KEYS}, Entry)
    except UNREADABLE as error:
        raise _bad("E_GRAMMAR", str(error)) from None
    _check(entry)
    return entry


def _plain(value: Any, depth: int) -> bool:
    if type(value) is str:
        return len(value) <= STRING_MAX
    if type(value) is int:
        return -INTEGER_MAX <= value <= INTEGER_MAX
    if depth and type(value) is list:
        return all(_plain(item, depth - 1) for item in value)
    if depth and type(value) is dict:
        return list(value) == sorted(value) and all(_plain(item, depth - 1) for item in value.values())
    return False


def _check(entry: Entry) -> None:
    """What the Struct cannot say."""
    if not _HEX64.fullmatch(entry.prev) or not entry.kind:
        raise _bad("E_GRAMMAR", "prev is 64 hex digits, kind is not empty")
    if bool(entry.c) == bool(entry.salt):
        raise _bad("E_GRAMMAR", "an entry has commitments or a salt, and not both")
    if entry.salt and not _SALT.fullmatch(entry.salt):
        raise _bad("E_GRAMMAR", "a salt is 22 base64url characters")
    if len(entry.c) > COMMITMENTS_MAX or not all(map(_HEX64.fullmatch, entry.c)):
        raise _bad("E_GRAMMAR", "commitments are at most 32 times 64 hex digits")
    if len(entry.up) == 1 or len(entry.part) == 1:
        raise _bad("E_GRAMMAR", "up and part are pairs")
    if bool(entry.saga) != bool(entry.n):
        raise _bad("E_GRAMMAR", "n counts the entries of a saga, from 1")


def _bad(finding: str, why: str) -> Malformed:
    return Malformed(f"This is not an entry: {why}.", finding=finding)


# ---- openings -------------------------------------------------------------------------------------------------------


class Salts:
    """22 random base64url characters each (132 bits), drawn in bulk, used once, never decoded."""

    __slots__ = ("_ready",)

    def __init__(self) -> None:
        self._ready: list[bytes] = []

    def take(self) -> bytes:
        if not self._ready:
            text = binascii.b2a_base64(os.urandom(33 * 64), newline=False).translate(_URLSAFE)
            self._ready = [text[i : i + 22] for i in range(0, 22 * 128, 22)]
        return self._ready.pop()


def opening(salt: bytes, body: bytes) -> bytes:
    """The line that a commitment commits to: `["<salt>",<body>]` LF, body an encoded JSON object."""
    return b'["' + salt + b'",' + body + b"]\n"


def read_opening(line: bytes) -> dict[str, Any]:
    """The fields of an opening that this program wrote and checked before. For anything else use `parse_opening`."""
    try:
        fields: dict[str, Any] = _decode_any(line)[1]
    except (*UNREADABLE, TypeError, LookupError):
        return parse_opening(line)
    return fields


def parse_opening(line: bytes) -> dict[str, Any]:
    """The fields of an opening from anywhere. Raises Malformed (E_OPENING) for anything that can be read two ways.

    A salt and an object with sorted names on one line; in it JSON without blanks, names twice in one object, lone
    surrogates, integers beyond 2^53, numbers that no float holds, or more than 200 levels.
    """
    if line[:2] != b'["' or line[24:27] != b'",{' or line[-3:] != b"}]\n":
        _no_opening("a salt and an object on one line are asked")
    if not _SALT.fullmatch(line[2:24].decode("latin-1")):
        _no_opening("a salt is 22 base64url characters")
    body = line[26:-2]
    try:
        fields: dict[str, Any] = _decode_any(body)
        same = _encode_any(fields) == body
    except UNREADABLE as error:
        _no_opening(str(error))
    if not same:  # escapes or numbers spelled otherwise than we spell them; or a name twice, or a number that is lost
        _read_once(body)
    if list(fields) != sorted(fields):
        _no_opening("its fields are not sorted")
    if not _definite(fields, OPENING_DEPTH_MAX):
        _no_opening("text that is not Unicode, an integer beyond 2^53 or more than 200 levels")
    return fields


def _read_once(body: bytes) -> None:
    """Refuse JSON that readers disagree on, spelled in any way."""
    bare = _STRINGS.sub(b"", body)
    if bare.split() != [bare]:
        _no_opening("blanks between its values")
    try:
        json.loads(body.decode(), object_pairs_hook=_names_once, parse_float=_held)
    except (ValueError, RecursionError) as error:
        _no_opening(str(error))
    if b"-0" in _WORDS.split(bare):
        _no_opening("minus zero is no integer")


def _names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return dict(pairs)


def _held(digits: str) -> float:
    """The float, if it is one: not infinite, and zero only where zero is written."""
    value = float(digits)
    if value in (float("inf"), float("-inf")) or (not value and _DIGIT.search(digits.lower().split("e")[0])):
        raise ValueError("a number that no float holds")
    return value


def _definite(value: Any, depth: int) -> bool:
    """Whether every reader sees the same in a decoded list or map."""
    if depth == 0:
        return False
    for item in value.values() if type(value) is dict else value:
        kind = type(item)
        if kind is int:
            if not -INTEGER_MAX <= item <= INTEGER_MAX:
                return False
        elif (kind is dict or kind is list) and not _definite(item, depth - 1):
            return False
    return True


def _no_opening(why: str) -> NoReturn:
    raise Malformed(f"This is not an opening: {why}.", finding="E_OPENING")
