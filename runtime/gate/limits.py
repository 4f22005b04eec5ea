"""Limits: no more than so much money, or so many calls, in any stretch of time of one length.

A window slides: what was allowed counts until it is as old as the window is long. A call that several limits concern
debits all of them or none. What was allowed stays counted, also if the step then fails or is undone: nobody knows what
a lost call moved, and an agent that charges and refunds in a circle is what a limit is for.

A debit is a number in the `use` of the fact that announces the effect, and a meter is those numbers folded: there is no
counter beside the log that a restart could refill or another process could miss. So that the sum of a window costs the
same however much is in it, a meter keeps running sums beside the times and looks both ends up by bisection. It keeps
them in the finest scale that it was debited in: a limit that is declared with another one has used as much as before.

Money is exact. One limit reads every number the same way, whatever its type: in whole units (`12.5`, `"12.50"` and a
Decimal are the same), or with `minor=True` as integers of the smallest unit only. A reading that depended on the type
would count a model's `5000` as fifty where it counts its `5000.0` as five thousand.
"""

from __future__ import annotations

import re
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from decimal import Decimal
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import msgspec

from ...store.clock import Now
from ...store.entry import INTEGER_MAX, Entry
from ...store.errors import BadValue
from ...store.facts import COMPACTED
from ..tools import check_name, is_async
from .question import Debit, GateCall, Question, Reason, Refusal

if TYPE_CHECKING:
    from ..state import State

NAME_MAX = 200  # a meter is the name, a slash and 16 hex digits, in 256 characters
SCALE_MAX = 12
SCOPE_MAX = 4096


# ---- what a limit is keyed by ---------------------------------------------------------------------------------------

Scope = Callable[[GateCall], str]
"""Names the meter that a call draws on; calls with the same text share one. In the log it is its HMAC."""


def by_tool(call: GateCall) -> str:
    """A meter for each tool."""
    return call.tool


def by_arg(name: str) -> Scope:
    """A meter for each value of an argument: text, a whole number, true or false, or a UUID. A call without it is
    refused: a shared meter for those who leave it out would be a way around."""
    if not isinstance(name, str) or not name:
        raise BadValue(f"by_arg({name!r}): the name of an argument is asked.", code="bad_limit")

    def scope(call: GateCall) -> str:
        value = call.kwargs.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # a model writes 42.0 for 42, and means the same customer
        if not isinstance(value, (str, int, UUID)):
            said = "missing" if value is None else f"{type(value).__name__}, which names nothing"
            raise BadValue(
                f"its argument {name!r} is {said}", next=f"Pass {name!r} as text or number.", code="no_such_argument"
            )
        return _composed(value) if isinstance(value, str) else str(value)

    return scope


def combine(*scopes: Scope) -> Scope:
    """A meter for each combination: `combine(by_tool, by_arg("customer"))`."""
    if not scopes or not all(callable(scope) for scope in scopes):
        raise BadValue(
            "combine(...) takes scopes.", next='Write combine(by_tool, by_arg("customer")).', code="bad_limit"
        )

    def scope(call: GateCall) -> str:
        return msgspec.json.encode([_text(each(call)) for each in scopes]).decode()

    return scope


def _text(key: object) -> str:
    if not isinstance(key, str) or len(key) > SCOPE_MAX:
        raise TypeError("a scope answers with text")
    return key


def _composed(text: str) -> str:
    """The same text however its accents are spelled."""
    if text.isascii():
        return str.__str__(text)
    from unicodedata import normalize

    return normalize("NFC", text)


# ---- declaring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BudgetLimit:
    """At most max_total of what calls have in the argument `arg`, in any `window` (seconds; None: for ever).

    Amounts and max_total are in whole units with at most `scale` digits after the point, or with minor=True integers
    of 10**-scale. It concerns the calls for which `applies` says so, by default those that have the argument. Raises
    BadValue.
    """

    name: str
    _: KW_ONLY
    arg: str = "amount"
    max_total: Any
    window: float | timedelta | None
    scope: Scope | None = None
    applies: Callable[[GateCall], Any] | None = None
    unit: str = "eur"
    scale: int = 2
    minor: bool = False
    escalate_to_human: bool = False
    cap: int = field(init=False, repr=False)
    window_ms: int = field(init=False, repr=False)
    velocity = False

    def __post_init__(self) -> None:
        _check(self)
        if not isinstance(self.arg, str) or not self.arg:
            raise _bad(self, f"arg={self.arg!r}: the name of the argument that holds the amount is asked")
        if type(self.scale) is not int or not 0 <= self.scale <= SCALE_MAX:
            raise _bad(self, f"scale={self.scale!r}: 0 to {SCALE_MAX} digits after the point are asked")
        if self.unit:
            check_name(self.unit, "unit")
        _keep(self, amount_in(self.max_total, self.scale, self.minor), "max_total")

    def amount(self, call: GateCall) -> int | Refusal | None:
        """What a call takes, why that cannot be told, or None if it is not concerned."""
        if not (self.arg in call.kwargs if self.applies is None else self.applies(call)):
            return None
        given = call.kwargs.get(self.arg)
        read: int | str = "is missing" if given is None else amount_in(given, self.scale, self.minor)
        if isinstance(read, int):
            return read
        return Refusal(
            "bad_amount",
            f"Limit {self.name} counts {self.arg!r} of {call.tool}, which {read}.",
            "Pass a whole number of minor units." if self.minor else f"Pass it with at most {self.scale} decimals.",
            {"limit": self.name, "argument": self.arg},
        )


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most max_calls calls in any `window` (seconds; None: for ever), each attempt of a retry being one. It concerns
    the calls for which `applies` says so, by default all. Raises BadValue."""

    name: str
    _: KW_ONLY
    max_calls: int
    window: float | timedelta | None
    scope: Scope | None = None
    applies: Callable[[GateCall], Any] | None = None
    escalate_to_human: bool = False
    cap: int = field(init=False, repr=False)
    window_ms: int = field(init=False, repr=False)
    unit = "calls"
    scale = 0
    velocity = True

    def __post_init__(self) -> None:
        _check(self)
        _keep(self, amount_in(self.max_calls, 0, True), "max_calls")

    def amount(self, call: GateCall) -> int | Refusal | None:
        """One call, or None if it is not concerned."""
        return 1 if self.applies is None or self.applies(call) else None


Limit = BudgetLimit | RateLimit


def _check(limit: Limit) -> None:
    """Raise for what both kinds refuse."""
    check_name(limit.name, "limit")
    if len(limit.name) > NAME_MAX or "/" in limit.name:
        raise _bad(limit, f"its name has no slash and at most {NAME_MAX} characters")
    for name, value in (("scope", limit.scope), ("applies", limit.applies)):
        if value is not None and (not callable(value) or is_async(value)):
            raise _bad(limit, f"{name}={value!r}: a plain function of the call is asked")


def _keep(limit: Limit, cap: int | str, said: str) -> None:
    """The cap and the window in the units that they are counted in."""
    if isinstance(cap, str):
        raise _bad(limit, f"{said} {cap}")
    if not cap:
        raise _bad(limit, f"{said} would refuse every call")
    object.__setattr__(limit, "cap", cap)
    object.__setattr__(limit, "window_ms", _milliseconds(limit))


def _milliseconds(limit: Limit) -> int:
    window = limit.window
    if window is None:
        return 0
    seconds = window.total_seconds() if isinstance(window, timedelta) else window
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0.001 <= seconds <= INTEGER_MAX / 1000:
        raise _bad(limit, f"window={window!r}: seconds above zero, a timedelta, or None for ever is asked")
    return round(seconds * 1000)


def _bad(limit: Limit, why: str) -> BadValue:
    return BadValue(f"{type(limit).__name__} {limit.name!r}: {why}.", code="bad_limit")


def distinct(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """The limits, no two of which share a name and differ in what that name stands for. Raises BadValue."""
    known: dict[str, tuple[Any, ...]] = {}
    kept = tuple(limits)
    for limit in kept:
        if not isinstance(limit, Limit):
            raise BadValue(f"{limit!r} is no limit.", next="Pass BudgetLimit(...) or RateLimit(...).", code="bad_limit")
        declared = (limit.cap, limit.window_ms, limit.unit, limit.scale, limit.velocity)
        if known.setdefault(limit.name, declared) != declared:
            raise _bad(limit, "another limit of that name has another cap, window or unit")
    return kept


# ---- amounts --------------------------------------------------------------------------------------------------------

_DIGITS = re.compile(r"[0-9]{1,16}(?:\.[0-9]{1,32})?")


def amount_in(value: object, scale: int, minor: bool = False) -> int | str:
    """An amount in units of 10**-scale, exactly; or in words what is wrong with it."""
    if isinstance(value, bool):
        return "is true or false, and no amount"
    if minor:
        return _fitting(int.__index__(value), scale) if isinstance(value, int) else "is no whole number of minor units"
    if isinstance(value, int):
        return _fitting(int.__index__(value) * 10**scale, scale)
    if isinstance(value, float):
        return _scaled(Decimal(float.__repr__(value)), scale) if isfinite(value) else "is not a finite number"
    if isinstance(value, Decimal):
        return _scaled(Decimal(value), scale) if value.is_finite() else "is not a finite number"
    if isinstance(value, str):
        return _scaled(Decimal(value), scale) if _DIGITS.fullmatch(value) else "is no number in plain digits"
    return "is no number"


def _scaled(value: Decimal, scale: int) -> int | str:
    """The same in integers. Works on the digits alone, so that no context rounds and no exponent takes long."""
    if value < 0:
        return "is below zero"
    if value and value.adjusted() + scale > len(str(INTEGER_MAX)):
        return _fitting(INTEGER_MAX + 1, scale)
    _, digits, exponent = value.as_tuple()
    shift = int(exponent) + scale
    if not value or shift >= 0:
        return _fitting(_number(digits) * 10 ** (shift if value else 0), scale)
    if any(digits[shift:]):
        return f"has more than {scale} digits after the point" if scale else "is no whole number"
    return _fitting(_number(digits[:shift]), scale)


def _number(digits: Sequence[int]) -> int:
    return int("".join(map(str, digits)) or "0")


def _fitting(number: int, scale: int) -> int | str:
    if number < 0:
        return "is below zero"
    return number if number <= INTEGER_MAX else f"is above {shown(INTEGER_MAX, scale)}"


def shown(amount: int, scale: int, unit: str = "") -> str:
    """An amount for people: `480.00 eur`."""
    whole, rest = divmod(amount, 10**scale)
    return f"{whole}{f'.{rest:0{scale}}' if scale else ''} {unit}".rstrip()


# ---- asked of the call alone ----------------------------------------------------------------------------------------


def prepare(limits: Iterable[Limit], call: GateCall, meter: Callable[[str], str]) -> tuple[Debit, ...] | Refusal:
    """What a call takes from each limit that concerns it, or why that cannot be told: then it may not happen.

    meter(text) is the 16 hex digits that stand for a scope. Runs the user's `applies` and `scope`."""
    debits: list[Debit] = []
    for limit in limits:
        found = _debit(limit, call, meter)
        if isinstance(found, Refusal):
            return found
        if found is not None:
            debits.append(found)
    if len(debits) > 1 and max(_summed(debits).values()) > INTEGER_MAX:
        return Refusal("bad_amount", f"{call.tool} asks one limit for more than it can count.", "Ask for less.")
    return tuple(debits)


def _debit(limit: Limit, call: GateCall, meter: Callable[[str], str]) -> Debit | Refusal | None:
    try:
        amount = limit.amount(call)
        if not isinstance(amount, int):
            return amount
        name = limit.name if limit.scope is None else f"{limit.name}/{meter(_text(limit.scope(call)))}"
    except Exception as error:
        return _untold(limit, call, error)
    return Debit(
        limit.name, name, amount, limit.cap, limit.window_ms, limit.unit, limit.scale, limit.velocity,
        limit.escalate_to_human,
    )  # fmt: skip


def _untold(limit: Limit, call: GateCall, error: Exception) -> Refusal:
    """A limit that cannot tell what a call takes, or from which meter, does not let it pass."""
    facts = {"limit": limit.name}
    if isinstance(error, BadValue) and error.code == "no_such_argument":
        return Refusal(error.code, f"Limit {limit.name} needs to know whom {call.tool} is for: {error.message}.",
                       error.next, facts)  # fmt: skip
    return Refusal(
        "rule_raised",
        f"Limit {limit.name} could not tell what {call.tool} takes: its function raised {type(error).__name__}.",
        "Whoever wrote the limit has to look at it; another attempt changes nothing.",
        facts,
    )


# ---- asked of the state ---------------------------------------------------------------------------------------------


def check_limits(state: State, question: Question, now: Now) -> tuple[Refusal | None, tuple[Reason, ...]]:
    """Whether everything that a call takes is there: why not, or for which reasons a person is asked. Strictly over a
    cap refuses. For a retry only what counts attempts is asked, and nobody can be asked in the middle of a step."""
    asks: tuple[Reason, ...] = ()
    taken: dict[str, int] = {}
    for debit in _due(question):
        if other := _other_unit(state, question, debit):
            return other, ()
        before = taken.get(debit.meter, 0)  # by another debit of this very call
        taken[debit.meter] = before + debit.amount
        used = state.meters.used(debit.meter, debit.window_ms, now.lived, debit.scale) + before
        if used + debit.amount <= debit.cap:
            continue
        over = _over(state, question, debit, used, before, now)
        if not debit.ask or question.attempt > 1:
            return over, ()
        asks += (Reason(f"limit {debit.limit}", over.said),)
    return None, asks


def uses(question: Question) -> dict[str, int]:
    """What the announcing fact carries: meter -> amount."""
    return {meter: amount for meter, amount in _summed(_due(question)).items() if amount}


def declares(state: State, question: Question) -> list[dict[str, Any]]:
    """The headers of `limit.set` for limits that are not yet declared as this call knows them."""
    found: dict[str, dict[str, Any]] = {}
    for debit in _due(question):
        if state.meters.declared(debit.limit) != (debit.cap, debit.unit, debit.scale, debit.window_ms):
            found[debit.limit] = {
                "limit": debit.limit, "cap": debit.cap, "unit": debit.unit, "scale": debit.scale,
                "within_ms": debit.window_ms,
            }  # fmt: skip
    return list(found.values())


def _due(question: Question) -> Sequence[Debit]:
    if question.attempt == 1:
        return question.debits
    return [debit for debit in question.debits if debit.velocity]


def _summed(debits: Iterable[Debit]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for debit in debits:
        sums[debit.meter] = sums.get(debit.meter, 0) + debit.amount
    return sums


def _other_unit(state: State, question: Question, debit: Debit) -> Refusal | None:
    """A limit keeps its unit: what was used in one says nothing in another, and forgetting it would be a refill."""
    declared = state.meters.declared(debit.limit)
    if declared is None or declared[1] == debit.unit:
        return None
    was, now = declared[1] or "no unit", debit.unit or "no unit"
    return Refusal(
        "unit_changed",
        f"Limit {debit.limit} has counted {was}, and {question.tool} would be counted there in {now}.",
        "Give the limit in the other unit a name of its own.",
        {"limit": debit.limit, "was": was, "unit": now},
    )


def _over(state: State, question: Question, debit: Debit, used: int, before: int, now: Now) -> Refusal:
    """Why not; what would fit, and when this would."""
    left = max(0, debit.cap - used)
    wait = None
    if before + debit.amount <= debit.cap:
        more = used + debit.amount - debit.cap
        wait = state.meters.frees(debit.meter, debit.window_ms, now.lived, more, debit.scale)
    money = (debit.scale, debit.unit)
    within = f" in the last {span(debit.window_ms)}" if debit.window_ms else ""
    options = [f"ask for at most {shown(left, *money)}"] if left and not debit.velocity else []
    options += [f"try again in {span(wait)}"] if wait is not None else []
    options += ["have a person raise the limit"] if not options else []
    return Refusal(
        "over_limit",
        f"Limit {debit.limit}: {shown(used, debit.scale)} of {shown(debit.cap, *money)} used{within}, "
        f"and {question.tool} asks for {shown(debit.amount, debit.scale)}.",
        f"{options[0][0].upper()}{', or '.join(options)[1:]}.",
        {
            "limit": debit.limit, "used": used, "asked": debit.amount, "cap": debit.cap, "left": left,
            "unit": debit.unit, "scale": debit.scale, "window_ms": debit.window_ms, "retry_after_ms": wait,
        },
    )  # fmt: skip


def span(ms: int) -> str:
    """A time for people, never told shorter than it is: `90 s`, `24 h 1 min`, `7 d`. Every text tells times so."""
    seconds = -(-ms // 1000)
    minutes, hours = -(-seconds // 60), -(-seconds // 3600)
    if ms < 1000:
        return f"{ms} ms"
    if minutes < 120 and minutes != 60:
        return f"{seconds} s" if seconds < 120 and seconds != 60 else f"{minutes} min"
    if minutes < 48 * 60 and minutes != 24 * 60:
        return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
    return f"{hours // 24} d" + (f" {hours % 24} h" if hours % 24 else "")


# ---- the view -------------------------------------------------------------------------------------------------------

TOP = (1 << 63) - 1


def _at(amount: int, scale: int, wanted: int) -> int:
    """An amount in units of another scale, rounded up where those are coarser."""
    finer = int(10 ** abs(wanted - scale))
    return amount * finer if wanted >= scale else -(-amount // finer)


class Meter:
    """What was taken, and when (lived milliseconds), oldest first; `sums` are running sums, `gone` what the sum was
    before the first that is kept. total: all that was ever taken. All in units of 10**-scale. The first `start` places
    are dropped already."""

    __slots__ = ("times", "sums", "start", "gone", "total", "scale")

    def __init__(self, scale: int = 0) -> None:
        self.times, self.sums = array("q"), array("q")
        self.start = self.gone = self.total = 0
        self.scale = scale

    def take(self, lived: int, amount: int, scale: int, kept_ms: int) -> None:
        """Take in a debit of any scale. The finer one is kept, so that nothing is rounded, while 64 bits have room."""
        if scale != self.scale:
            finer = max(scale, self.scale)
            fits = _at(self.total, self.scale, finer) + _at(amount, scale, finer) <= TOP
            self._rescale(finer if fits else min(scale, self.scale))
            amount = _at(amount, scale, self.scale)
        self.add(lived, amount, kept_ms)

    def _rescale(self, scale: int) -> None:
        if scale == self.scale:
            return
        self._rebase()
        before = last = 0
        for place, each in enumerate(self.sums):
            last, before = last + _at(each - before, self.scale, scale), each
            self.sums[place] = last
        total = TOP if self.total == TOP else _at(self.total, self.scale, scale)  # of what was too much nobody knows
        self.total, self.scale = max(total, last), scale

    def add(self, lived: int, amount: int, kept_ms: int) -> None:
        """Take in a debit and drop what is older than kept_ms; kept_ms 0 keeps the total only."""
        self.total = min(self.total + amount, TOP)
        if not kept_ms:
            return
        self._drop(lived - kept_ms)
        live = self.start < len(self.times)
        last = self.sums[-1] if live else self.gone
        if last + amount > TOP:
            self._rebase()
            last = self.sums[-1] if live else 0
            amount = min(amount, TOP - last)
        if live and self.times[-1] == lived:
            self.sums[-1] = last + amount
        else:
            self.times.append(lived)
            self.sums.append(last + amount)

    def _drop(self, until: int) -> None:
        first = bisect_right(self.times, until, self.start)
        if first > self.start:
            self.gone, self.start = self.sums[first - 1], first
        if self.start >= 32 and 2 * self.start >= len(self.times):  # each place is moved once: constant on average
            del self.times[: self.start], self.sums[: self.start]
            self.start = 0

    def age(self, until: int) -> bool:
        """Drop what is older, also from the total; say whether anything is left."""
        self._drop(until)
        self._rebase()
        self.total = self.sums[-1] if self.sums else 0
        return bool(self.times)

    def _rebase(self) -> None:
        """Count from the first that is kept, before a sum leaves 64 bits."""
        del self.times[: self.start], self.sums[: self.start]
        self.sums = array("q", [each - self.gone for each in self.sums])
        self.start = self.gone = 0

    def used(self, window_ms: int, lived: int) -> int:
        """What counts in a window that ends now; window_ms 0: for ever."""
        if not window_ms:
            return self.total
        first = bisect_right(self.times, lived - window_ms, self.start)
        return self.sums[-1] - self._before(first) if first < len(self.times) else 0

    def frees(self, window_ms: int, lived: int, amount: int) -> int | None:
        """Milliseconds until so much has fallen out of the window; None if it never does."""
        first = bisect_right(self.times, lived - window_ms, self.start)
        place = bisect_left(self.sums, self._before(first) + amount, first)
        return self.times[place] + window_ms - lived if window_ms and place < len(self.times) else None

    def _before(self, place: int) -> int:
        return self.sums[place - 1] if place > self.start else self.gone

    @property
    def newest(self) -> int:
        return self.times[-1] if self.start < len(self.times) else -1

    def dump(self) -> tuple[int, int, int, bytes, bytes]:
        return self.scale, self.total, self.gone, _bytes(self.times[self.start :]), _bytes(self.sums[self.start :])

    @classmethod
    def loaded(cls, scale: int, total: int, gone: int, times: bytes, sums: bytes) -> Meter:
        meter = cls(scale)
        meter.total, meter.gone, meter.times, meter.sums = total, gone, _numbers(times), _numbers(sums)
        return meter


def _bytes(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _numbers(raw: bytes) -> array[int]:
    numbers = array("q", raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class Account:
    """One limit as last declared, and its meters, the one that was used last at the end.

    kept_ms: the longest window that it ever had, for so long a debit is kept. for_ever: it once had no end, so no meter
    is ever forgotten.
    """

    __slots__ = ("declared", "kept_ms", "for_ever", "meters")

    def __init__(self) -> None:
        self.declared: tuple[int, str, int, int] | None = None  # cap, unit, scale, window_ms
        self.kept_ms, self.for_ever = 0, False
        self.meters: OrderedDict[str, Meter] = OrderedDict()

    def declare(self, entry: Entry) -> None:
        self.declared = (entry.cap, entry.unit, entry.scale, entry.within_ms)
        self.kept_ms = max(self.kept_ms, entry.within_ms)
        self.for_ever = self.for_ever or not entry.within_ms

    @property
    def scale(self) -> int:
        return self.declared[2] if self.declared is not None else 0

    def take(self, name: str, amount: int, lived: int) -> None:
        meter = self.meters.get(name)
        if meter is None:
            meter = self.meters[name] = Meter(self.scale)
        self.meters.move_to_end(name)
        meter.take(lived, amount, self.scale, self.kept_ms)
        if self.kept_ms and not self.for_ever:
            self._forget(lived - self.kept_ms)

    def age(self, lived: int) -> None:
        """Records were removed: drop what no window looks back to, so that the fold is the same without them. A limit
        that is declared without an end from then on has used what is left."""
        if self.for_ever or not self.kept_ms:
            return
        for name, meter in list(self.meters.items()):
            if not meter.age(lived - self.kept_ms):
                del self.meters[name]

    def counts(self, lived: int, now: int) -> bool:
        """Whether what was debited then counts still, or will where the limit has no end."""
        return self.for_ever or not self.kept_ms or lived > now - self.kept_ms

    def _forget(self, until: int) -> None:
        """Drop the meters in which nothing counts any more: a limit by customer does not keep every customer."""
        while next(iter(self.meters.values())).newest <= until:  # the one in hand is younger
            self.meters.popitem(last=False)


class Left(NamedTuple):
    """What is left of a limit, for people: amounts in units of 10**-scale. meter: 16 hex digits, empty for a limit
    without a scope. frees_ms: milliseconds until the oldest that counts falls out; None if nothing does."""

    limit: str
    meter: str
    used: int
    cap: int
    left: int
    unit: str
    scale: int
    window_ms: int
    frees_ms: int | None


class Meters:
    """What every limit was debited, folded from `use`. Old debits are dropped when new ones are folded in, never when
    somebody looks, so that a dump depends on the log alone."""

    KINDS = (COMPACTED, "limit.set", "step.attempted", "step.intended")

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}

    def fold(self, entry: Entry, lived: int, state: State) -> None:
        if entry.kind == "limit.set":
            self._account(entry.limit).declare(entry)
            return
        if entry.kind == COMPACTED:
            for account in self.accounts.values():
                account.age(lived)
            return
        for meter, amount in entry.use.items():
            if amount > 0:  # nothing gives back
                self._account(meter.partition("/")[0]).take(meter, amount, lived)

    def _account(self, limit: str) -> Account:
        account = self.accounts.get(limit)
        if account is None:
            account = self.accounts[limit] = Account()
        return account

    def _meter(self, name: str) -> Meter | None:
        account = self.accounts.get(name.partition("/")[0])
        return account.meters.get(name) if account is not None else None

    def declared(self, limit: str) -> tuple[int, str, int, int] | None:
        """Cap, unit, scale and window as last declared; None for a limit that never was."""
        account = self.accounts.get(limit)
        return account.declared if account is not None else None

    def used(self, meter: str, window_ms: int, lived: int, scale: int) -> int:
        """What counts now, in units of 10**-scale; window_ms 0: for ever."""
        found = self._meter(meter)
        return _at(found.used(window_ms, lived), found.scale, scale) if found is not None else 0

    def frees(self, meter: str, window_ms: int, lived: int, amount: int, scale: int) -> int | None:
        """Milliseconds until so much has fallen out of the window; None if it never does."""
        found = self._meter(meter)
        if found is None:
            return None
        used = found.used(window_ms, lived)
        stays = _at(used, found.scale, scale) - amount
        return found.frees(window_ms, lived, used + _at(-stays, scale, found.scale))  # what may stay, rounded down

    def dump(self) -> Any:
        return [
            (limit, account.declared, account.kept_ms, account.for_ever,
             [(name, *meter.dump()) for name, meter in account.meters.items()])
            for limit, account in self.accounts.items()
        ]  # fmt: skip

    def load(self, raw: Any) -> None:
        self.accounts = {}
        for limit, declared, kept_ms, for_ever, meters in raw:
            account = self.accounts[limit] = Account()
            account.declared = tuple(declared) if declared is not None else None
            account.kept_ms, account.for_ever = kept_ms, for_ever
            account.meters = OrderedDict((name, Meter.loaded(*dumped)) for name, *dumped in meters)


def left(state: State, now: Now) -> list[Left]:
    """What is left of every limit that was ever debited, by name; of its meters the fullest first."""
    return [
        row
        for limit, account in sorted(state.meters.accounts.items())
        if account.declared is not None
        for row in _rows(limit, account, now.lived)
    ]


def _rows(limit: str, account: Account, lived: int) -> list[Left]:
    assert account.declared is not None
    cap, unit, scale, window_ms = account.declared
    rows = []
    for name, meter in list(account.meters.items()):  # others may commit meanwhile
        if used := _at(meter.used(window_ms, lived), meter.scale, scale):
            frees = meter.frees(window_ms, lived, 1)
            scope = name[len(limit) + 1 :]
            rows.append(Left(limit, scope, used, cap, max(0, cap - used), unit, scale, window_ms, frees))
    if not rows:
        return [Left(limit, "", 0, cap, cap, unit, scale, window_ms, None)]
    return sorted(rows, key=lambda row: (-row.used, row.meter))
