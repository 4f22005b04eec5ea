"""What you pass in is what comes back, after any crash, or you are told before anything happens.

JSON types, bytes, datetime, date, Decimal, UUID, set and tuple round-trip exactly. Dataclasses, msgspec Structs,
pydantic models and named tuples come back as a `Record`: same fields, same names, no code of yours constructed.
Anything else is refused before the effect with its path and type: `args.lines[3].price is a float nan`.

How: what JSON cannot say is tagged, `{"$":"decimal","v":"4.20"}`, and a dict of yours that has the key `"$"` is itself
tagged `dict`, so a value can never pass for a tag. One walk checks; a value of plain JSON types (nearly every call)
is then encoded as it stands. Secrets are stored as a keyed fingerprint: it says which are equal, and no more.

Two things are not kept, on purpose: the name of a time zone (its offset is: the instant is exact) and the class of a
record (decoding never imports or constructs a class that a log names; `convert` takes the class from the caller).

Why not pickle: it runs what it reads. Why not a lossy default (`str(x)`): a refund computed from `"4.2"` that was a
Decimal is a wrong refund, found out after the crash.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
import typing
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from functools import partial
from hashlib import sha256
from types import FunctionType
from typing import Any, Generic, NoReturn, TypeVar
from uuid import UUID

import msgspec

from ..store.errors import BadValue, Malformed, TooNew

T = TypeVar("T")
Fingerprint = Callable[[bytes], str]

INTEGER_MAX = 1 << 53
"""Up to here every JSON reader agrees on an integer; beyond it is tagged."""
DEPTH_MAX = 64
INLINE_MAX = 256 * 1024
"""Bytes of one encoded value that lie in its opening; above, a manifest of chunks does."""
VALUE_MAX = 64 * 1024 * 1024
CHUNK = 64 * 1024
MANIFEST = b'{"$":"manifest",'
"""How the encoded stand-in of a value in chunks begins, and nothing else does."""
TEXT_MAX = 4000
_QUICK = 200_000  # nodes the quick look takes before it leaves the rest to the walk
_BITS_MAX = 14_000  # Python refuses to print integers of more than 4,300 digits
_PATH_MAX = 200

_encode = msgspec.json.Encoder().encode
_canonical = msgspec.json.Encoder(order="sorted").encode
_read = msgspec.json.Decoder().decode


class Record:
    """What a dataclass, Struct, model or named tuple comes back as: `record.amount`, `record["amount"]`, `vars()`.

    Immutable. Equal to a Record of the same type name and fields. Deliberately not iterable: a mapping would yield
    names where a named tuple yields values, and `lat, lon = record` must not be wrong in silence.
    """

    __slots__ = ("__dict__", "_record_type")
    __iter__ = None
    _record_type: str

    def __init__(self, type_name: str, fields: Mapping[str, Any], /) -> None:
        object.__setattr__(self, "_record_type", type_name)
        self.__dict__.update(fields)

    def __getitem__(self, name: str) -> Any:
        return self.__dict__[name]

    def __contains__(self, name: object) -> bool:
        return name in self.__dict__

    def __len__(self) -> int:
        return len(self.__dict__)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self._record_type} has no field {name}")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"A Record is what was stored: {name} cannot be set.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"A Record is what was stored: {name} cannot be deleted.")

    def __eq__(self, other: object) -> bool:
        if type(other) is not Record:
            return NotImplemented
        return self._record_type == other._record_type and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((self._record_type, frozenset(self.__dict__.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, (self._record_type, dict(self.__dict__))

    def __repr__(self) -> str:
        return f"{self._record_type}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


class Secret(Generic[T]):
    """A value that is used and never stored: `Secret("sk_live_…")`; `.reveal()` gives it, nothing shows it.

    In the log stands a keyed fingerprint. It does not travel: pickling it raises TypeError.
    """

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def reveal(self) -> T:
        """The value itself."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(…)"

    def __eq__(self, other: object) -> bool:
        return self._value == other._value if isinstance(other, Secret) else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __copy__(self) -> Secret[T]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Secret[T]:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Secret is not pickled: reveal it where it is used.")


class Masked:
    """What a secret reads as once stored: its keyed fingerprint. The value is not in the log and cannot be had."""

    __slots__ = ("fingerprint",)

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def __repr__(self) -> str:
        return f"<secret {self.fingerprint}>"

    def __eq__(self, other: object) -> bool:
        return self.fingerprint == other.fingerprint if isinstance(other, Masked) else NotImplemented

    def __hash__(self) -> int:
        return hash((Masked, self.fingerprint))


# ---- in -------------------------------------------------------------------------------------------------------------


def encode(
    value: Any, *, path: str = "args", secret: Collection[str] = (), fingerprint: Fingerprint | None = None
) -> bytes:
    """The JSON bytes of a value, tagged where JSON falls short.

    `secret` names keys and fields that are stored as fingerprints, at any depth; `fingerprint` is keyed.
    Raises BadValue (`facts`: path, type) for what would not come back, and for more than VALUE_MAX bytes.
    """
    if not secret and _plain(value, _QUICK, 16) >= 0:
        try:
            encoded = _encode(value)
        except UnicodeEncodeError:
            encoded = b""
        if encoded and len(encoded) <= VALUE_MAX:
            return encoded
    walk = _Walk(path, frozenset(secret), fingerprint)
    encoded = _encode(walk.tag(value))
    if len(encoded) > VALUE_MAX:
        walk.refuse_size()
    return encoded


def encode_fields(
    fields: Mapping[str, Any], *, secret: Collection[str] = (), fingerprint: Fingerprint | None = None
) -> bytes:
    """The body of an opening: a JSON object with sorted keys. A value that is a `msgspec.Raw` is encoded already."""
    parts = []
    for name in sorted(fields):
        value = fields[name]
        if type(value) is not msgspec.Raw:
            value = encode(value, path=name, secret=secret, fingerprint=fingerprint)
        parts.append(_encode(name) + b":" + bytes(value))
    return b"{" + b",".join(parts) + b"}"


def _plain(value: Any, left: int, depth: int) -> int:
    """What is left of a budget of nodes if the value is plain JSON that comes back as it is, else -1.

    It only ever says yes to what it has seen whole; all doubt (depth, size, tags) is the slow walk's to name.
    """
    kind = type(value)
    if kind is dict:
        if depth == 0 or "$" in value or not all(type(key) is str for key in value):
            return -1
        items: Iterable[Any] = value.values()
        left -= len(value)
    elif kind is list:
        if depth == 0:
            return -1
        items = value
        left -= len(value)
    else:
        items = (value,)
    if left < 0:
        return -1
    for item in items:
        kind = type(item)
        if kind is str or kind is bool or item is None:
            continue
        if kind is int:
            if -INTEGER_MAX <= item <= INTEGER_MAX:
                continue
            return -1
        if kind is float:
            if item - item == 0.0:  # neither NaN nor infinite
                continue
            return -1
        if kind is not dict and kind is not list:
            return -1
        left = _plain(item, left, depth - 1)
        if left < 0:
            return -1
    return left


class _Walk:
    """One pass over a value that tags, checks and knows where it stands."""

    def __init__(self, path: str, secret: frozenset[str], fingerprint: Fingerprint | None) -> None:
        self.root = path
        self.secret = secret
        self.fingerprint = fingerprint
        self.left = VALUE_MAX
        self.trail: list[str] = []
        self.inside: list[int] = []
        self.deepest = 0
        self.seen: dict[int, tuple[Any, Any, int, int]] = {}

    def tag(self, value: Any) -> Any:
        kind = type(value)
        self.left -= 1
        if self.left < 0:
            self.refuse_size()
        if kind in _TAGS:
            return _TAGS[kind](self, value)
        try:
            fields = fields_of(value)
        except Exception as error:  # a property of the caller's class: whatever it raises, the value cannot be read
            self.refuse(value, f"reading its fields raised {type(error).__name__}")
        if fields is None:
            self.refuse(value, _hint(value))
        return {"$": "record", "t": _record_name(value), "v": self.within(value, fields, self.mapping)}

    def within(self, value: Any, inner: Any, walk: Callable[[Any], Any]) -> Any:
        """Walk what a container holds, unless it holds itself or nests too deep.

        One that stands in several places is walked once and counted each time: sixty lists that each hold the next
        one twice are small in memory and endless on paper.
        """
        depth = len(self.inside)
        if id(value) in self.inside:
            self.refuse(value, "it contains itself")
        _, tagged, cost, height = self.seen.get(id(value), (None, None, 0, 0))
        if depth + max(height, 1) > DEPTH_MAX:
            self.refuse(value, f"it nests more than {DEPTH_MAX} deep")
        if height:
            self.left -= cost
            if self.left < 0:
                self.refuse_size()
            self.deepest = max(self.deepest, depth + height)
            return tagged
        before, outer, self.deepest = self.left, self.deepest, depth + 1
        self.inside.append(id(value))
        tagged = walk(inner)
        self.inside.pop()  # not on an error: the walk ends there
        self.seen[id(value)] = (value, tagged, before - self.left, self.deepest - depth)
        self.deepest = max(outer, self.deepest)
        return tagged

    def at(self, step: str, value: Any) -> Any:
        self.trail.append(step)
        tagged = self.tag(value)
        self.trail.pop()  # not on an error: the message needs the trail
        return tagged

    def mapping(self, value: Mapping[str, Any]) -> dict[str, Any]:
        out = {}
        for key, item in list(value.items()):
            if type(key) is not str:
                self.refuse(key, "keys are text in what is stored", f"a key of {self.where()}")
            self.text(key)
            step = f".{key}" if key.isidentifier() else f"[{ascii(key)}]"
            if key in self.secret:
                self.trail.append(step)
                out[key] = self.mask(item)
                self.trail.pop()
            else:
                out[key] = self.at(step, item)
        return out

    def sequence(self, value: Iterable[Any]) -> list[Any]:
        return [self.at(f"[{place}]", item) for place, item in enumerate(list(value))]

    def members(self, value: Iterable[Any]) -> list[Any]:
        tagged = sorted((self.at("{…}", item) for item in list(value)), key=_canonical)
        if any(type(item) is dict for item in tagged):
            try:
                distinct = len(set(map(decode, tagged)))
            except TypeError:
                distinct = -1
            if distinct != len(tagged):
                self.refuse(value, "read back, its members would not be hashable and distinct")
        return tagged

    def text(self, value: str) -> str:
        self.left -= len(value)
        if self.left < 0:
            self.refuse_size()
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                self.refuse(value, "it holds a lone surrogate, which is not text")
        return value

    def mask(self, value: Any) -> dict[str, str]:
        if isinstance(value, Masked):
            return {"$": "secret", "v": value.fingerprint}
        if isinstance(value, Secret):
            value = value.reveal()
        if self.fingerprint is None:
            self.refuse(value, "it is a secret, and there is no key here to fingerprint it with")
        walk = _Walk(self.where(), frozenset(), self.fingerprint)
        return {"$": "secret", "v": self.fingerprint(_canonical(walk.tag(value)))}

    def where(self) -> str:
        path = self.root + "".join(self.trail)
        return path if len(path) <= _PATH_MAX else path[: _PATH_MAX - 1] + "…"

    def refuse(self, value: Any, why: str, where: str = "") -> NoReturn:
        where, kind = where or self.where(), _type_name(value)
        raise BadValue(
            f"{where} is a {kind} and cannot be stored: {why}.",
            next="Nothing was done. Pass what can be read back: JSON types, bytes, datetime, date, Decimal, UUID, set, "
            "tuple, a dataclass, a Struct or a pydantic model.",
            path=where,
            type=kind,
        )

    def refuse_size(self) -> NoReturn:
        raise BadValue(
            f"{self.root} is over the cap of {VALUE_MAX // 1024 // 1024} MiB ({VALUE_MAX} bytes) for one value.",
            next="Nothing was done. Store the data elsewhere and pass a reference to it.",
            path=self.root,
            cap=VALUE_MAX,
        )


def _tag_int(walk: _Walk, value: int) -> Any:
    if -INTEGER_MAX <= value <= INTEGER_MAX:
        return value
    if value.bit_length() > _BITS_MAX:
        walk.refuse(value, "it has more than 4,200 digits")
    return {"$": "int", "v": str(value)}


def _tag_float(walk: _Walk, value: float) -> float:
    if not math.isfinite(value):
        walk.refuse(value, "NaN and infinity have no place in what is stored")
    return value


def _tag_decimal(walk: _Walk, value: Decimal) -> dict[str, str]:
    if not value.is_finite():
        walk.refuse(value, "NaN and infinity have no place in what is stored")
    return {"$": "decimal", "v": walk.text(str(value))}


def _tag_datetime(walk: _Walk, value: datetime) -> dict[str, Any]:
    if value.tzinfo is not None and value.utcoffset() is None:
        walk.refuse(value, "its time zone gives no offset")
    tagged: dict[str, Any] = {"$": "datetime", "v": value.isoformat()}
    if value.fold:
        tagged["fold"] = 1
    return tagged


def _tag_bytes(walk: _Walk, value: bytes) -> dict[str, str]:
    walk.left -= len(value)
    if walk.left < 0:
        walk.refuse_size()
    return {"$": "bytes", "v": base64.b64encode(value).decode()}


def _tag_dict(walk: _Walk, value: dict[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = walk.within(value, value, walk.mapping)
    return {"$": "dict", "v": inner} if "$" in inner else inner


_TAGS: dict[type, Callable[[_Walk, Any], Any]] = {
    type(None): lambda walk, value: value,
    bool: lambda walk, value: value,
    str: _Walk.text,
    int: _tag_int,
    float: _tag_float,
    dict: _tag_dict,
    list: lambda walk, value: walk.within(value, value, walk.sequence),
    tuple: lambda walk, value: {"$": "tuple", "v": walk.within(value, value, walk.sequence)},
    set: lambda walk, value: {"$": "set", "v": walk.within(value, value, walk.members)},
    bytes: _tag_bytes,
    datetime: _tag_datetime,
    date: lambda walk, value: {"$": "date", "v": value.isoformat()},
    Decimal: _tag_decimal,
    UUID: lambda walk, value: {"$": "uuid", "v": str(value)},
    Secret: _Walk.mask,
    Masked: _Walk.mask,
}


def fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of a Record, dataclass, Struct, pydantic model or named tuple; None for anything else."""
    kind = type(value)
    if kind is Record:
        return dict(value.__dict__)
    if dataclasses.is_dataclass(kind):
        return _picked(value, [field.name for field in dataclasses.fields(kind)])
    if isinstance(value, msgspec.Struct):
        return _picked(value, kind.__struct_fields__)
    if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
        return _picked(value, kind._fields)
    if isinstance(getattr(kind, "model_fields", None), Mapping) and hasattr(kind, "model_validate"):
        return _picked(value, kind.model_fields) | dict(getattr(value, "__pydantic_extra__", None) or {})
    return None


def _picked(value: Any, names: Iterable[str]) -> dict[str, Any]:
    missing = object()
    fields = {name: getattr(value, name, missing) for name in names}
    return {name: item for name, item in fields.items() if item is not missing}


def _record_name(value: Any) -> str:
    name: str = value._record_type if type(value) is Record else type(value).__name__
    return name


def _type_name(value: Any) -> str:
    kind = type(value)
    if kind is float and not math.isfinite(value) or kind is Decimal and not value.is_finite():
        return f"{kind.__name__} {value}"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_LOOSE = {
    frozenset: "it would come back as a set",
    bytearray: "it would come back as bytes",
    memoryview: "it would come back as bytes",
    complex: "JSON has no complex numbers",
}


def _hint(value: Any) -> str:
    kind = type(value)
    if kind in _LOOSE:
        return _LOOSE[kind]
    for plain in (str, bool, int, float, dict, list, tuple, set, bytes, datetime, date, Decimal, UUID):
        if isinstance(value, plain):
            return f"it would come back as a plain {plain.__name__}, so pass that"
    if hasattr(value, "__await__"):
        return "it was not awaited"
    return "a class of its own would have to be constructed to read it back"


# ---- out ------------------------------------------------------------------------------------------------------------


def decode(raw: Any) -> Any:
    """The value in a decoded JSON object of ours. Imports and constructs nothing that the object names.

    Raises Malformed for a tag whose content does not fit, TooNew for a tag this version does not know.
    """
    return _untag(raw, DEPTH_MAX + 1)


def decode_bytes(encoded: bytes) -> Any:
    """The value in what `encode` returned."""
    return decode(parse(encoded))


def parse(encoded: bytes) -> Any:
    """The JSON object in what `encode` returned, tags and all. Raises Malformed."""
    try:
        return _read(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"This is not a stored value: {error}.", finding="E_OPENING") from None


def _untag(raw: Any, depth: int) -> Any:
    kind = type(raw)
    if kind is not dict and kind is not list:
        return raw
    if depth == 0:
        raise Malformed(f"A stored value nests more than {DEPTH_MAX} deep.", finding="E_OPENING")
    if kind is list:
        return [_untag(item, depth - 1) for item in raw]
    if "$" not in raw:
        return {key: _untag(item, depth - 1) for key, item in raw.items()}
    tag = raw["$"]
    if type(tag) is not str or tag not in _UNTAGS:
        raise TooNew(
            f"A stored value has the tag {tag!r:.40}, which this version does not know.",
            next="Read it with the version that wrote it, or a newer one.",
        )
    try:
        return _UNTAGS[tag](raw, depth)
    except (ValueError, TypeError, KeyError, AttributeError, InvalidOperation, OverflowError) as error:
        raise Malformed(f"A stored {tag} cannot be read: {error}.", finding="E_OPENING") from None


def _text(raw: dict[str, Any]) -> str:
    if type(raw["v"]) is not str:
        raise TypeError("its content is not text")
    return str(raw["v"])


def _items(raw: dict[str, Any], depth: int) -> list[Any]:
    if type(raw["v"]) is not list:
        raise TypeError("its content is not a list")
    return [_untag(item, depth - 1) for item in raw["v"]]


def _fields(raw: dict[str, Any], depth: int) -> dict[str, Any]:
    return {key: _untag(item, depth - 1) for key, item in raw["v"].items()}


def _untag_decimal(raw: dict[str, Any], depth: int) -> Decimal:
    value = Decimal(_text(raw))
    if not value.is_finite():
        raise ValueError("it is not finite")
    return value


def _untag_record(raw: dict[str, Any], depth: int) -> Record:
    if type(raw["t"]) is not str:
        raise TypeError("its type is not text")
    return Record(raw["t"], _fields(raw, depth))


def _untag_manifest(raw: dict[str, Any], depth: int) -> NoReturn:
    raise ValueError("it is a manifest, join its chunks first")


_UNTAGS: dict[str, Callable[[dict[str, Any], int], Any]] = {
    "bytes": lambda raw, depth: base64.b64decode(_text(raw), validate=True),
    "date": lambda raw, depth: date.fromisoformat(_text(raw)),
    "datetime": lambda raw, depth: datetime.fromisoformat(_text(raw)).replace(fold=raw.get("fold", 0)),
    "decimal": _untag_decimal,
    "dict": _fields,
    "int": lambda raw, depth: int(_text(raw)),
    "manifest": _untag_manifest,
    "record": _untag_record,
    "secret": lambda raw, depth: Masked(_text(raw)),
    "set": lambda raw, depth: set(_items(raw, depth)),
    "tuple": lambda raw, depth: tuple(_items(raw, depth)),
    "uuid": lambda raw, depth: UUID(_text(raw)),
}


def convert(value: Any, kind: Any) -> Any:
    """A decoded value as the class its tool declared by `returns=`: the class is the caller's, never the log's.

    A named tuple is built at the top only, not inside another class. Raises BadValue if the fields do not fit.
    """
    try:
        if type(value) is Record and isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return kind(**_bare(value))
        if isinstance(kind, type) and hasattr(kind, "model_validate"):
            return kind.model_validate(_bare(value))
        return msgspec.convert(_bare(value), kind)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise BadValue(
            f"The stored result does not fit {name}: {error}.",
            next="Declare the class it was stored from, or leave returns= out to get a Record.",
            type=name,
        ) from None


def _bare(value: Any) -> Any:
    """Records as dicts, all the way down; an own class is built from names, not from positions."""
    if type(value) is Record:
        return {name: _bare(item) for name, item in value.__dict__.items()}
    if type(value) is dict:
        return {key: _bare(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_bare(item) for item in value)
    return value


# ---- the same, and large --------------------------------------------------------------------------------------------


def digest(encoded: bytes) -> str:
    """64 hex digits that are equal exactly for equal values: the order of a dict's or set's members does not count."""
    raw = _read(encoded)
    if b'"$":"set"' in encoded:
        raw = _sets_sorted(raw)
    return sha256(b"amends/value/1\0" + _canonical(raw)).hexdigest()


def _sets_sorted(raw: Any) -> Any:
    if type(raw) is list:
        return [_sets_sorted(item) for item in raw]
    if type(raw) is not dict:
        return raw
    if raw.get("$") == "dict":  # what looks like a tag in there is the user's own key
        return {"$": "dict", "v": {key: _sets_sorted(item) for key, item in raw["v"].items()}}
    out = {key: _sets_sorted(item) for key, item in raw.items()}
    if out.get("$") == "set":
        out["v"] = sorted(out["v"], key=_canonical)
    return out


def split(encoded: bytes) -> tuple[msgspec.Raw, list[bytes]]:
    """What goes into the opening (`encode_fields` takes it), and the chunks that go into openings of their own.

    Up to INLINE_MAX bytes that is the value and no chunk; above, a manifest and chunks of at most CHUNK bytes, each of
    them text: they are cut between characters.
    """
    if len(encoded) <= INLINE_MAX:
        return msgspec.Raw(encoded), []
    chunks = list(_cut(encoded))
    manifest = {"$": "manifest", "size": len(encoded), "chunks": len(chunks), "sha256": sha256(encoded).hexdigest()}
    return msgspec.Raw(_encode(manifest)), chunks


def _cut(encoded: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(encoded):
        end = start + CHUNK
        while end < len(encoded) and encoded[end] & 0xC0 == 0x80:  # in the middle of a character
            end -= 1
        yield encoded[start:end]
        start = end


def is_manifest(raw: Any) -> bool:
    """Whether a decoded JSON object stands for a value that lies in chunks."""
    return type(raw) is dict and raw.get("$") == "manifest"


def join(manifest: Mapping[str, Any], chunks: Collection[bytes]) -> bytes:
    """The encoded value of a manifest. Raises Malformed if the chunks are not its own."""
    size = manifest.get("size")
    if type(size) is not int or size > VALUE_MAX or sum(map(len, chunks)) != size:
        raise Malformed("The chunks of a value are not as long as its manifest says.", finding="E_OPENING")
    encoded = b"".join(chunks)
    if sha256(encoded).hexdigest() != manifest.get("sha256"):
        raise Malformed("The chunks of a value are not those of its manifest.", finding="E_OPENING")
    return encoded


# ---- secrets --------------------------------------------------------------------------------------------------------

# Lengths are bounded, so that a hostile text costs linear time.
_TOKENS = r"""(?x)
    \b(?:sk|rk|pk)_(?:live|test)_[0-9A-Za-z]{10}                                   # Stripe
  | \bwhsec_[0-9A-Za-z]{16}                                                        # webhook signing
  | \bsk-(?:ant-|proj-|svcacct-)?[0-9A-Za-z_-]{20}                                 # model providers
  | \bgh[pousr]_[0-9A-Za-z]{20} | \bgithub_pat_[0-9A-Za-z_]{22}                    # GitHub
  | \bglpat-[0-9A-Za-z_-]{16}                                                      # GitLab
  | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                                                  # AWS
  | \bAIza[0-9A-Za-z_-]{35} | \bya29\.[0-9A-Za-z_-]{20}                            # Google
  | \bxox[abeoprs]-[0-9A-Za-z-]{10} | \bxapp-[0-9A-Za-z-]{10}                      # Slack
  | \bSG\.[0-9A-Za-z_-]{16,80}\.[0-9A-Za-z_-]{16}                                  # SendGrid
  | \bnpm_[0-9A-Za-z]{30} | \bpypi-[0-9A-Za-z_-]{30}                               # registries
  | \bhf_[0-9A-Za-z]{30} | \bdop_v1_[0-9a-f]{40}                                   # Hugging Face, DigitalOcean
  | \b00D[0-9A-Za-z]{12,15}![0-9A-Za-z._]{40}                                      # Salesforce session
  | \beyJ[0-9A-Za-z_-]{8,300}\.eyJ[0-9A-Za-z_-]{8,2000}\.[0-9A-Za-z_-]{8}          # JWT
  | -----BEGIN\ (?:[A-Z]{1,12}\ ){0,3}PRIVATE\ KEY-----                            # PEM, OpenSSH
  | \bAGE-SECRET-KEY-1[0-9A-Z]{50}
  | (?i:\bbearer\s{1,4}[0-9a-z._~+/-]{20})
  | \b[a-z][a-z0-9+.-]{1,20}://[^\s/:@]{1,80}:[^\s/:@]{6,200}@                     # a password in a URL
"""


def looks_like_secret(text: str) -> bool:
    """Whether a text holds what looks like a token, a private key or a password in a URL. It can be wrong both ways."""
    return re.search(_TOKENS, text) is not None  # compiled when first asked: it costs 5 ms


def secret_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters a function annotates as `Secret[…]`, whether or not its caller wraps them."""
    while isinstance(function, partial):
        function = function.func
    try:
        return _SECRET_NAMES[function]
    except (KeyError, TypeError):  # not asked yet, or a callable that no weak reference holds
        pass
    try:
        hints: Mapping[str, Any] = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # a name that only a type checker sees: read it as written
        return _said_secret(getattr(function, "__annotations__", {}))
    found = _said_secret(hints)
    if type(function) is FunctionType:
        _SECRET_NAMES[function] = found  # asked at every step, and resolving annotations costs more than all the rest
    return found


_SECRET_NAMES: weakref.WeakKeyDictionary[Callable[..., Any], tuple[str, ...]] = weakref.WeakKeyDictionary()


def _said_secret(hints: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, hint in hints.items() if name != "return" and _says_secret(hint))


def _says_secret(hint: Any) -> bool:
    if isinstance(hint, str):
        return re.search(r"\bSecret\b", hint) is not None
    return hint is Secret or typing.get_origin(hint) is Secret or any(map(_says_secret, typing.get_args(hint)))


def hush(text: str, value: Any, secret: Collection[str] = ()) -> str:
    """A text (an error, say) without the secrets that are in `value`, which may be anything, storable or not."""
    found: set[str] = set()
    _gather(value, frozenset(secret), False, found, 0)
    for hidden in sorted(found, key=len, reverse=True):
        text = text.replace(hidden, "•••")
    return text


def fitting(text: str) -> str:
    """A text for people as an opening takes it: at most 4,000 characters, lone surrogates replaced."""
    return text[:TEXT_MAX].encode("utf-8", "replace").decode()


def _gather(value: Any, names: frozenset[str], hidden: bool, found: set[str], depth: int) -> None:
    if depth > DEPTH_MAX:
        return
    if isinstance(value, Secret):
        _gather(value.reveal(), names, True, found, depth + 1)
    elif isinstance(value, str | bytes | int | float | Decimal | UUID) and not isinstance(value, bool):
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        if hidden and len(text) >= 4:  # shorter ones would blot out the whole message
            found.add(text)
        return
    try:
        fields = value if isinstance(value, dict) else fields_of(value)
    except Exception:  # a property of the caller's class: a field that cannot be read is in no text either
        fields = None
    if fields is not None:
        for key, item in list(fields.items()):
            _gather(item, names, hidden or key in names, found, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in list(value):
            _gather(item, names, hidden, found, depth + 1)
