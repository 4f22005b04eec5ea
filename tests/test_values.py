"""Values come back as they went in, or are refused by path and type before anything happens."""

from __future__ import annotations

import copy
import enum
import json
import pickle
import string
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from http import HTTPStatus
from typing import Any, NamedTuple
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amends.runtime import values
from amends.runtime.values import Masked, Record, Secret, decode, decode_bytes, digest, encode, encode_fields
from amends.store.errors import BadValue, Malformed, TooNew

pytestmark = pytest.mark.promise("1.18")


@dataclass
class Receipt:
    charge: str
    amount: Decimal
    items: list[Any] = field(default_factory=list)


class Refund(msgspec.Struct):
    id: str
    at: datetime


class Point(NamedTuple):
    lat: float
    lon: float


class Model:
    """The face of a pydantic model, as far as it is looked at."""

    model_fields = {"name": None, "tags": None}

    def __init__(self, name: str, tags: set[str]) -> None:
        self.name, self.tags = name, tags

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> Model:
        return cls(**fields)


def fingerprint(value: bytes) -> str:
    return f"fp{len(value)}{sum(value)}"


# ---- round trips ----------------------------------------------------------------------------------------------------

texts = st.text(max_size=12)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(1 << 200), max_value=1 << 200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
    | st.binary(max_size=12)
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.uuids()
    | st.dates()
    | st.datetimes(timezones=st.none() | st.just(UTC) | st.just(timezone(timedelta(seconds=-12345))))
)
keys = texts | st.sampled_from(["$", "v", "t", "set", "dict"])
hashables = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
anything = st.recursive(
    scalars | st.sets(hashables, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.builds(Record, texts, st.dictionaries(keys, inner, max_size=3))
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal, and of equal types all the way down (1, 1.0 and True are not the same; nor are 0.0 and -0.0)."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Record):
        return one._record_type == other._record_type and same(vars(one), vars(other))
    if isinstance(one, set):
        return one == other and sorted(map(repr, one)) == sorted(map(repr, other))
    if isinstance(one, datetime):
        return one == other and one.utcoffset() == other.utcoffset() and one.fold == other.fold
    return repr(one) == repr(other)


@settings(max_examples=400, deadline=None)
@given(anything)
def test_what_goes_in_comes_back(value: Any) -> None:
    encoded = encode(value)
    assert same(decode_bytes(encoded), value)
    assert b"\n" not in encoded
    json.loads(encoded)  # any JSON reader can read it


@settings(max_examples=200, deadline=None)
@given(anything)
def test_a_value_read_back_encodes_to_the_same_digest(value: Any) -> None:
    encoded = encode(value)
    assert digest(encode(decode_bytes(encoded))) == digest(encoded)


def shuffled(value: Any, turn: int) -> Any:
    if isinstance(value, dict):
        pairs = [(key, shuffled(item, turn)) for key, item in value.items()]
        turn = turn % (len(pairs) or 1)
        return dict(pairs[turn:] + pairs[:turn])
    if isinstance(value, list):
        return [shuffled(item, turn) for item in value]
    return value


@settings(max_examples=200, deadline=None)
@given(anything, st.integers(1, 5))
def test_the_order_of_keys_does_not_change_the_digest(value: Any, turn: int) -> None:
    assert digest(encode(shuffled(value, turn))) == digest(encode(value))


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), ("1", 1), ([1], (1,)), ({"a": 1}, {"a": 2}), (0.0, -0.0), ("4.20", Decimal("4.20")),
     (Decimal("4.2"), Decimal("4.20")), ({"$": "set", "v": [2, 1]}, {"$": "set", "v": [1, 2]}), (b"a", "a")],
)  # fmt: skip
def test_different_values_have_different_digests(one: Any, other: Any) -> None:
    assert digest(encode(one)) != digest(encode(other))


def test_the_digest_of_a_set_does_not_depend_on_the_order_it_was_written_in() -> None:
    assert digest(b'{"$":"set","v":[1,2,"a"]}') == digest(b'{"$":"set","v":["a",2,1]}') == digest(encode({1, 2, "a"}))


@pytest.mark.parametrize("integer", [(1 << 53) - 1, 1 << 53, (1 << 53) + 1, -(1 << 53) - 1, 10**4000])
def test_integers_beyond_2_to_the_53_come_back_exactly(integer: int) -> None:
    assert decode_bytes(encode({"n": integer})) == {"n": integer}
    assert (b'"$"' in encode(integer)) == (abs(integer) > 1 << 53)


@pytest.mark.parametrize(
    ("written", "kind"),
    [(b"x\xff", "bytes"), (Decimal("4.20"), "decimal"), (uuid4(), "uuid"), (date(2025, 1, 2), "date"),
     (datetime(2025, 1, 2, 3), "datetime"), ({1}, "set"), ((1,), "tuple"), (1 << 60, "int"),
     (Receipt("c", Decimal(1)), "record"), ({"$": 1}, "dict")],
)  # fmt: skip
def test_each_kind_has_its_tag(written: Any, kind: str) -> None:
    assert json.loads(encode(written))["$"] == kind


def test_a_decimal_is_written_as_the_format_says() -> None:
    assert encode(Decimal("4.20")) == b'{"$":"decimal","v":"4.20"}'


def test_a_zone_keeps_its_instant_and_offset_but_not_its_name() -> None:
    there = datetime(2025, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    back = decode_bytes(encode(there))
    assert back == there and back.utcoffset() == timedelta(hours=2)


def test_the_second_of_two_equal_wall_clock_hours_is_kept() -> None:
    assert decode_bytes(encode(datetime(2025, 10, 26, 2, 30, fold=1))).fold == 1


def test_a_users_dict_that_looks_like_a_tag_stays_a_dict() -> None:
    forged = {"$": "secret", "v": "x", "deep": {"$": "bytes", "v": {"$": "nonsense"}}}
    assert decode_bytes(encode(forged)) == forged
    assert decode_bytes(encode({"manifest": {"$": "manifest"}})) == {"manifest": {"$": "manifest"}}


# ---- records --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "fields"),
    [
        (Receipt("ch_1", Decimal("4.20"), [1]), {"charge": "ch_1", "amount": Decimal("4.20"), "items": [1]}),
        (Refund("re_1", datetime(2025, 1, 1, tzinfo=UTC)), {"id": "re_1", "at": datetime(2025, 1, 1, tzinfo=UTC)}),
        (Point(1.5, 2.5), {"lat": 1.5, "lon": 2.5}),
        (Model("n", {"a"}), {"name": "n", "tags": {"a"}}),
    ],
)
def test_an_object_comes_back_as_a_record_with_its_fields(value: Any, fields: dict[str, Any]) -> None:
    record = decode_bytes(encode(value))
    assert record == Record(type(value).__name__, fields)
    assert vars(record) == fields
    assert all(getattr(record, name) == record[name] == item for name, item in fields.items())


def test_a_record_becomes_the_class_that_the_caller_names() -> None:
    for value in (Receipt("ch_1", Decimal("4.20"), [{"a": 1}]), Refund("r", datetime(2025, 1, 1)), Point(1.0, 2.0)):
        assert values.convert(decode_bytes(encode(value)), type(value)) == value
    assert values.convert(decode_bytes(encode(Model("n", {"a"}))), Model).tags == {"a"}
    refunds = [Refund("r", datetime(2025, 1, 1))]
    assert values.convert(decode_bytes(encode(refunds)), list[Refund]) == refunds


def test_a_record_that_does_not_fit_the_named_class_is_refused() -> None:
    with pytest.raises(BadValue, match="does not fit Refund"):
        values.convert(decode_bytes(encode(Point(1.0, 2.0))), Refund)


def test_a_record_cannot_be_changed() -> None:
    record = Record("Point", {"lat": 1})
    with pytest.raises(AttributeError, match="lat cannot be set"):
        record.lat = 2
    with pytest.raises(AttributeError):
        del record.lat
    with pytest.raises(AttributeError, match="Point has no field lon"):
        _ = record.lon
    assert copy.deepcopy(record) == pickle.loads(pickle.dumps(record)) == record
    assert record != Record("Other", {"lat": 1}) and record != {"lat": 1} and "lat" in record and len(record) == 1


def test_a_record_does_not_pretend_to_be_the_tuple_it_was() -> None:
    with pytest.raises(TypeError):
        lat, lon = decode_bytes(encode(Point(1.0, 2.0)))


def test_a_field_may_be_called_as_methods_are() -> None:
    record = decode_bytes(encode(Receipt("c", Decimal(1), ["x"])))
    assert record.items == ["x"]


# ---- refusals -------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Text(str):
    pass


class Nowhere(tzinfo):
    def utcoffset(self, dt: datetime | None) -> None:
        return None


class Opaque:
    __hash__ = object.__hash__


@dataclass(eq=False)
class ById:
    items: list[int]


class Explosive(msgspec.Struct):
    pass


@dataclass
class Raising:
    x: int = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "x":
            raise RuntimeError("boom")
        return object.__getattribute__(self, name)


async def coroutine() -> None:
    pass


nan, inf = float("nan"), float("inf")
REFUSED = {
    "nan": ({"a": [0, nan]}, "args.a[1]", "float nan"),
    "infinity": ({"a": {"b": inf}}, "args.a.b", "float inf"),
    "negative infinity": ((-inf,), "args[0]", "float -inf"),
    "nan in a plain list": ([nan], "args[0]", "float nan"),
    "decimal nan": ([Decimal("NaN")], "args[0]", "Decimal NaN"),
    "decimal signalling nan": ([Decimal("sNaN")], "args[0]", "Decimal sNaN"),
    "decimal infinity": ([Decimal("-Infinity")], "args[0]", "Decimal -Infinity"),
    "lone surrogate": ({"a": "x\ud800"}, "args.a", "str"),
    "lone surrogate in a key": ({"\udfff": 1}, "args", "str"),
    "integer key": ({"a": {1: 2}}, "a key of args.a", "int"),
    "bytes key": ({b"k": 1}, "a key of args", "bytes"),
    "none key": ({None: 1}, "a key of args", "NoneType"),
    "key of a str subclass": ({Text("k"): 1}, "a key of args", "test_values.Text"),
    "enum": ([Colour.RED], "args[0]", "test_values.Colour"),
    "int enum": ([HTTPStatus.OK], "args[0]", "http.HTTPStatus"),
    "str subclass": ({"odd key": Text("x")}, "args['odd key']", "test_values.Text"),
    "ordered dict": (OrderedDict(a=1), "args", "collections.OrderedDict"),
    "frozenset": ({"a": frozenset({1})}, "args.a", "frozenset"),
    "bytearray": ([bytearray(b"x")], "args[0]", "bytearray"),
    "timedelta": ([timedelta(1)], "args[0]", "datetime.timedelta"),
    "complex": ([1j], "args[0]", "complex"),
    "function": ([print], "args[0]", "builtin_function_or_method"),
    "class": ([Receipt], "args[0]", "type"),
    "unknown class": ({"a": {"b": Opaque()}}, "args.a.b", "test_values.Opaque"),
    "unknown class in a dataclass": (Receipt("c", Decimal(1), [Opaque()]), "args.items[0]", "test_values.Opaque"),
    "unknown class in a set": ([{Opaque()}], "args[0]{…}", "test_values.Opaque"),
    "set of objects told apart by identity": ([{ById([]), ById([])}], "args[0]", "set"),
    "a zone without an offset": ([datetime(2025, 1, 1, tzinfo=Nowhere())], "args[0]", "datetime.datetime"),
    "a field that raises": ([Raising()], "args[0]", "test_values.Raising"),
    "an integer too long to print": ([10**5000], "args[0]", "int"),
    "a secret without a key": ({"token": Secret("x")}, "args.token", "str"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_value_is_refused_by_path_and_type(name: str) -> None:
    value, path, kind = REFUSED[name]
    with pytest.raises(BadValue) as refusal:
        encode(value)
    assert refusal.value.facts["path"] == path
    assert str(refusal.value.facts["type"]).endswith(kind.replace("test_values.", ""))
    assert path in refusal.value.message and kind.split(".")[-1] in refusal.value.message
    assert refusal.value.next


def test_something_not_awaited_is_named_as_that() -> None:
    pending = coroutine()
    with pytest.raises(BadValue, match="not awaited"):
        encode({"x": pending})
    pending.close()


def test_a_cycle_is_refused() -> None:
    loop: dict[str, Any] = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(BadValue, match=r"args\.a\[0\] is a dict .* contains itself"):
        encode(loop)
    receipt = Receipt("c", Decimal(1))
    receipt.items.append((receipt,))
    with pytest.raises(BadValue, match="contains itself"):
        encode(receipt)


def nested(depth: int, core: Any = 1) -> Any:
    for _ in range(depth):
        core = [core]
    return core


def test_nesting_is_refused_beyond_64_levels_and_not_before() -> None:
    assert decode_bytes(encode(nested(64))) == nested(64)
    assert decode_bytes(encode(nested(63, (Decimal(1),))))
    for deep in (nested(65), nested(64, (1,)), nested(100_000)):
        with pytest.raises(BadValue, match="nests more than 64 deep"):
            encode(deep)


def test_a_shared_list_counts_at_its_deepest_place() -> None:
    shared = nested(60, (1,))
    assert encode([shared, [shared, [shared]]])
    with pytest.raises(BadValue, match="nests more than 64 deep"):
        encode([shared, nested(5, shared)])


def test_a_small_value_that_is_endless_on_paper_is_refused_at_once() -> None:
    for kind in (list, tuple):
        bomb: Any = kind([1])
        for _ in range(50):
            bomb = kind([bomb, bomb])
        with pytest.raises(BadValue, match="over the cap"):
            encode(bomb)


def test_a_value_over_the_cap_is_refused_with_the_cap() -> None:
    half = "x" * (values.VALUE_MAX // 2)
    for large in (half + half, [half, half], {"a": half, "b": (half,)}, b"x" * values.VALUE_MAX):
        with pytest.raises(BadValue, match="over the cap of 64 MiB") as refusal:
            encode(large)
        assert refusal.value.facts["cap"] == values.VALUE_MAX


def test_a_refusal_shows_no_value() -> None:
    with pytest.raises(BadValue) as refusal:
        encode({"a": Text("hunter2")})
    assert "hunter2" not in str(refusal.value)


# ---- damaged and foreign bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    ['{"$":"bytes","v":"*"}', '{"$":"bytes","v":1}', '{"$":"decimal","v":"x"}', '{"$":"decimal","v":"NaN"}',
     '{"$":"uuid","v":"x"}', '{"$":"date","v":"2025-13-01"}', '{"$":"datetime","v":null}', '{"$":"set","v":[[1]]}',
     '{"$":"set","v":"ab"}', '{"$":"tuple"}', '{"$":"record","v":{}}', '{"$":"record","t":1,"v":{}}',
     '{"$":"record","t":"R","v":[]}', '{"$":"dict","v":1}', '{"$":"int","v":"1' + "0" * 5000 + '"}',
     '{"$":"manifest","size":1}', "[" * 66 + "]" * 66, '{"$":"datetime","v":"2025-01-01","fold":7}'],
)  # fmt: skip
def test_a_tag_whose_content_does_not_fit_is_malformed(raw: str) -> None:
    with pytest.raises(Malformed):
        decode(json.loads(raw))


@pytest.mark.parametrize("raw", ['{"$":"object","v":"os.system"}', '{"$":7}', '{"$":null}', '{"$":["set"]}'])
def test_an_unknown_tag_is_left_to_a_newer_version(raw: str) -> None:
    with pytest.raises(TooNew):
        decode(json.loads(raw))


def test_decoding_constructs_no_class_that_the_log_names() -> None:
    record = decode(json.loads('{"$":"record","t":"subprocess.Popen","v":{"args":["false"],"__class__":"x"}}'))
    assert type(record) is Record and record.args == ["false"]


@pytest.mark.parametrize("damage", [b"", b"{", b"nul", b'"\xff"', b"[" * 100_000])
def test_bytes_that_are_no_json_are_malformed(damage: bytes) -> None:
    with pytest.raises(Malformed):
        decode_bytes(damage)


# ---- openings and large values --------------------------------------------------------------------------------------


def test_fields_of_an_opening_stand_sorted_and_take_what_is_encoded_already() -> None:
    body = encode_fields({"result": (1,), "args": {"b": 1}, "error": msgspec.Raw(encode("x"))})
    assert body == b'{"args":{"b":1},"error":"x","result":{"$":"tuple","v":[1]}}'
    with pytest.raises(BadValue, match=r"result\[0\]"):
        encode_fields({"args": 1, "result": [object()]})


@settings(max_examples=20, deadline=None)
@given(st.integers(-3, 3), st.integers(1, 6))
def test_a_value_around_the_inline_cap_comes_back(near: int, times: int) -> None:
    encoded = encode("é" * ((values.INLINE_MAX * times - 2 + near) // 2))
    inline, chunks = values.split(encoded)
    raw = json.loads(bytes(inline))
    assert bool(chunks) == (len(encoded) > values.INLINE_MAX) == values.is_manifest(raw)
    assert all(len(chunk) <= values.CHUNK for chunk in chunks)
    assert (values.join(raw, chunks) if chunks else bytes(inline)) == encoded
    encode_fields({"args": inline})


def test_chunks_of_another_value_are_not_joined() -> None:
    inline, chunks = values.split(encode("x" * 300_000))
    manifest = json.loads(bytes(inline))
    other = [chunks[0][:-1] + b"y", *chunks[1:]]
    for wrong in (chunks[1:], [*chunks, b"x"], list(reversed(chunks)), other, []):
        with pytest.raises(Malformed):
            values.join(manifest, wrong)


# ---- secrets --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("14.2")
def test_a_secret_is_stored_as_a_fingerprint_only() -> None:
    args = {"to": "a@b.c", "api_key": "sk_live_abc", "deep": [{"api_key": {"x": 1}}], "wrapped": Secret("hunter2")}
    encoded = encode(args, secret=("api_key",), fingerprint=fingerprint)
    assert b"sk_live" not in encoded and b"hunter2" not in encoded and b"a@b.c" in encoded
    back = decode_bytes(encoded)
    assert back["api_key"] == Masked(fingerprint(b'"sk_live_abc"')) and type(back["wrapped"]) is Masked
    assert type(back["deep"][0]["api_key"]) is Masked
    assert encode(back) == encoded  # a fingerprint read back is written as it stands


@pytest.mark.promise("14.2")
def test_equal_secrets_are_seen_to_be_equal_however_they_were_passed() -> None:
    one = encode({"k": Secret("s")}, fingerprint=fingerprint)
    assert one == encode({"k": "s"}, secret=["k"], fingerprint=fingerprint)
    assert one != encode({"k": Secret("t")}, fingerprint=fingerprint)


@pytest.mark.promise("14.2")
def test_a_secret_never_shows_itself() -> None:
    secret = Secret("hunter2")
    shown = f"{secret} {secret!r} {[secret]} %s" % secret + format(secret)
    assert "hunter2" not in shown and secret.reveal() == "hunter2"
    assert copy.deepcopy(secret) is secret and secret == Secret("hunter2") and not hasattr(secret, "__dict__")
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    with pytest.raises(BadValue) as refusal:
        encode({"k": Secret(Text("hunter2"))}, fingerprint=fingerprint)
    assert "hunter2" not in str(refusal.value) and "args.k" in str(refusal.value)


@pytest.mark.promise("14.2")
def test_an_error_text_loses_the_secrets_of_its_call() -> None:
    args = {"api_key": "sk_live_abcdef", "who": Secret("hunter2"), "amount": 4200, "nested": {"pin": 12345}}
    text = values.hush("401 for sk_live_abcdef by hunter2, 4200, pin 12345", args, ("api_key", "pin"))
    assert text == "401 for ••• by •••, 4200, pin •••"


def keyed(api_key: Secret[str], to: str, token: Secret[bytes] | None = None) -> None: ...


def test_annotated_parameters_are_known_to_be_secret() -> None:
    assert values.secret_names(keyed) == ("api_key", "token")


def _token(prefix: str, length: int, alphabet: str = string.ascii_letters) -> str:
    return prefix + (alphabet * length)[:length]


@pytest.mark.promise("14.2")
@pytest.mark.parametrize(
    "text",
    [_token("sk_live_", 24), _token("ghp_", 36), _token("AKIA", 16, string.ascii_uppercase), _token("xoxb-", 30),
     _token("github_pat_", 40), _token("sk-ant-", 40), 
     "eyJhbGciOiJIUzI1NiJ9" ".eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
     "-----BEGIN RSA PRIVATE KEY-----", "-----BEGIN OPENSSH PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----",
     "Authorization: Bearer abcdefghij0123456789abcd", "postgres://app:correcthorse@db/prod"],
)  # fmt: skip
def test_what_looks_like_a_token_is_noticed(text: str) -> None:
    assert values.looks_like_secret(f"before {text} after")


@pytest.mark.promise("14.2")
@pytest.mark.parametrize(
    "text",
    ["ch_3OabcDEF", "https://example.com/a:b@c", "sk_live_", "a plain sentence about bearer bonds", str(UUID(int=7)),
     "ask-for-a-refund-of-the-whole-order", "-----BEGIN PUBLIC KEY-----", "AKIA"],
)  # fmt: skip
def test_what_is_no_token_is_left_alone(text: str) -> None:
    assert not values.looks_like_secret(text)


@pytest.mark.promise("14.2")
@pytest.mark.parametrize("piece", ["a", "eyJ-", "SG.", "a://b:", "-----BEGIN A ", "bearer ", "eyJaaaaaaaa.eyJ!"])
def test_a_hostile_text_does_not_hold_the_doctor_up(piece: str) -> None:
    assert not values.looks_like_secret(piece * (400_000 // len(piece)))


@pytest.mark.promise("14.2")
def test_looking_for_secrets_survives_any_value() -> None:
    loop: list[Any] = [Secret("hunter2")]
    loop.append(loop)
    assert values.hush("hunter2", [Raising(), loop, Opaque(), Point(1.0, 2.0)]) == "•••"


def test_a_namedtuple_of_the_old_kind_is_a_record_too() -> None:
    Pair = namedtuple("Pair", "a b")
    assert decode_bytes(encode(Pair(1, 2))) == Record("Pair", {"a": 1, "b": 2})
