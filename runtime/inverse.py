"""What undoes an effect, as the log carries it: a handler's name, encoded arguments, its keys, and where it lives.

The name and whether it may be attempted again are header; the rest is an opening that whoever performs reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from ..store.entry import STRING_MAX
from ..store.errors import BadValue
from .drive import Drive
from .hosts import recorded_host
from .openings import raw_fields
from .tools import Compensation, Handler, find, is_async, names, parameters, registered_as, takes_key
from .values import VALUE_MAX, decode, encode, is_manifest

Encoder = Callable[..., bytes]


_LETTERS = bytes.maketrans(bytes(range(32)), b"abcdefghijklmnopqrstuvwxyz234567")


def _halves(bits: int) -> tuple[int, int, int]:
    """Masks of the lower and the upper halves, `bits` wide each, of numbers in lanes; and how far the upper ones move
    for each half to have a lane of its own, 8 bits for 5."""
    width = bits * 8 // 5
    low = sum(((1 << bits) - 1) << lane for lane in range(0, 256, 2 * width))
    return low, low << bits, width - bits


_SPREAD = [_halves(bits) for bits in (80, 40, 20, 10, 5)]


def idempotency_key(saga: str, tool: str, identity: str, scope: str) -> str:
    """base32(SHA-256("amends/key/1" ‖ saga ‖ tool ‖ identity ‖ scope))[:32]: the same for every attempt.

    Parts are separated by a NUL, so that no two calls share a preimage. The 160 bits are spread to five a byte by
    halving: three keys are made for every step, and `base64.b32encode` would cost more than the rest of it.
    """
    parts = "\0".join(("amends/key/1", saga, tool, identity, scope))
    bits = int.from_bytes(sha256(parts.encode()).digest()[:20], "big")
    for low, high, far in _SPREAD:
        bits = (bits & high) << far | bits & low
    return bits.to_bytes(32, "big").translate(_LETTERS).decode()


def own_key(kwargs: Mapping[str, Any]) -> str:
    """The caller's own idempotency key, which is then the one that is sent and recorded; empty if there is none that a
    header can hold."""
    own = kwargs.get("idempotency_key")
    fits = isinstance(own, str) and 0 < len(own) <= STRING_MAX and own.isascii() and own.isprintable()
    return str(own) if fits and not set('"\\') & set(str(own)) else ""


class Inverse(NamedTuple):
    """A compensation ready for the log. live: the object itself, for the process that made it."""

    inv: str
    handler: str
    again: str
    payload: bytes
    live: Compensation | None


NONE = Inverse("none", "", "", b"", None)


def written(made: Compensation, inv: str, keys: dict[str, str], known: Callable[[str], str | None]) -> Inverse:
    """A Compensation as header and opening. `known(name)` says why a handler configured here may run again, or None.

    Raises BadValue for arguments that cannot be stored, unless only this process could run it anyway.
    """
    if made.person:
        return Inverse("human", "", "", _payload("human", b"{}", keys, made.description, None), made)
    own = own_key(made.kwargs)
    keys = {**keys, "key": own} if own else keys
    handler = _registered(made)
    name, fn = (handler.name, handler.fn) if handler else (made.handler, made.fn)
    host, reason = recorded_host(fn) if fn is not None else (None, "")
    if fn is not None and host is None and not made.handler and not handler:
        name = ""
    elif not name and host is not None:
        name = f"{host['module']}:{host['function']}"
    again = handler.again if handler else (known(made.handler) or "") if made.handler else ""
    if not again and fn is not None:
        again = "keyed" if takes_key(fn) else ""
    if not again and made.idempotent:
        again = "idempotent"
    try:
        kwargs = encode(made.kwargs, path="compensation.kwargs")
    except BadValue:
        if name:
            raise
        kwargs = b"{}"  # a closure's live arguments stay in this process, like the closure
    return Inverse(inv, name, again, _payload(name, kwargs, keys, made.description, host, reason), made)


def _registered(made: Compensation) -> Handler | None:
    if made.handler:
        return find(made.handler)
    return registered_as(made.fn) if made.fn is not None else None


def _payload(
    handler: str, kwargs: bytes, keys: dict[str, str], description: str, host: dict[str, Any] | None, reason: str = ""
) -> bytes:
    fields: dict[str, Any] = {"handler": handler, "kwargs": msgspec.Raw(kwargs), **keys}
    if description:
        fields["description"] = description
    if host:
        fields["host"] = host
    if reason:
        fields["unreachable"] = reason
    payload = msgspec.json.encode(dict(sorted(fields.items())))
    if len(payload) > VALUE_MAX:
        raise BadValue(f"The compensation is over the cap of {VALUE_MAX // 1024 // 1024} MiB for one value.")
    return payload


class Recorded(NamedTuple):
    """A compensation as read back. kwargs are encoded JSON-able values; host is None where none was recorded."""

    handler: str
    kwargs: dict[str, Any]
    key: str
    late_key: str
    description: str
    host: dict[str, Any] | None
    unreachable: str


def read(blob: bytes | None, field: str = "compensation") -> Recorded | None:
    """The compensation (or `confirmation`) in the openings of a fact; None if it is not there (redacted, or never
    was)."""
    raw = raw_fields(blob).get(field)
    found = msgspec.json.decode(raw) if raw else None
    if not isinstance(found, dict) or is_manifest(found):
        return None
    return Recorded(
        str(found.get("handler", "")),
        found.get("kwargs") or {},
        str(found.get("key", "")),
        str(found.get("late_key", "")),
        str(found.get("description", "")),
        found.get("host"),
        str(found.get("unreachable", "")),
    )


def arguments(recorded: Recorded) -> dict[str, Any]:
    """The handler's arguments as Python values."""
    return {name: decode(value) for name, value in recorded.kwargs.items()}


def payload_of(recorded: Recorded) -> bytes:
    """The same compensation for another entry."""
    return _payload(
        recorded.handler,
        json.dumps(recorded.kwargs, separators=(",", ":"), ensure_ascii=False).encode(),
        {"key": recorded.key, **({"late_key": recorded.late_key} if recorded.late_key else {})},
        recorded.description,
        recorded.host,
        recorded.unreachable,
    )


class NoInverse(BadValue):
    """The result lacks what the compensation factory needs: the effect stands without the inverse it should have."""

    code = "no_inverse"


async def declared_by(drive: Drive, undo: Any, kwargs: dict[str, Any], key: str) -> Compensation | None:
    """The Compensation that an `undo=` declares for this call; a factory is called with the call's own arguments.

    Raises what the factory raised: nothing has happened yet.
    """
    if undo is None or isinstance(undo, Compensation):
        return undo
    return _checked(await _made(drive, undo, _fitting(undo, kwargs, key)), "undo")


async def derived_by(drive: Drive, compensate: Any, result: Any) -> Compensation | None:
    """The Compensation that a `compensate=` derives from a real result. Raises NoInverse with the factory's error."""
    if compensate is None or isinstance(compensate, Compensation):
        return compensate
    try:
        return _checked(await _made(drive, compensate, {next(iter(names(compensate)), "result"): result}), "compensate")
    except Exception as error:
        raise NoInverse(
            f"The compensation cannot be derived from the result: {type(error).__name__}: {error}.",
            next="The effect stands; see `amends inbox`.",
        ) from error


def takes_nothing(compensate: Any) -> bool:
    """Whether a factory says, by `result | None`, that it can do without a result."""
    for parameter in parameters(compensate).values() if callable(compensate) else ():
        return "None" in str(parameter.annotation)
    return False


async def _made(drive: Drive, factory: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    if not is_async(factory):
        return factory(**kwargs)  # on the caller's own thread: it only looks at values
    ran = await drive.call(factory, kwargs, None)
    if ran.error is not None:
        raise ran.error
    return ran.result


def _fitting(factory: Callable[..., Any], kwargs: dict[str, Any], key: str) -> dict[str, Any]:
    """A factory takes the call's arguments by name, those it names; **kwargs takes them all."""
    import inspect

    named = parameters(factory)
    try:
        open_ended = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        open_ended = True
    given = dict(kwargs) if open_ended else {name: value for name, value in kwargs.items() if name in named}
    if "idempotency_key" in named and "idempotency_key" not in given:
        given["idempotency_key"] = key
    return given


def _checked(made: Any, what: str) -> Compensation | None:
    if made is None or isinstance(made, Compensation):
        return made
    raise BadValue(
        f"{what} returned {type(made).__name__}, not a Compensation.", next="Return Compensation(handler=…, kwargs=…)."
    )
