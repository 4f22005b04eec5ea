"""Rules: which calls happen, which are put to a person, and which never happen. The first rule that matches wins.

    PreFlightGate([
        Rule("never-drop", tool_is("db.drop"), Verdict.BLOCK, "nothing of ours drops a database"),
        Rule("large", tool_is("stripe.*") & arg_exceeds("amount", "100.00"), Verdict.REQUIRE_APPROVAL),
        Rule("newsletter", tool_is("mail.send"), Verdict.ALLOW),
    ], limits=[…])

A rule is asked of one call and of nothing else, before the transaction, on the caller's thread. One that raises blocks
the call, and so does an amount that is no number: what could not be judged is not let through. Numbers are compared
exactly; a float counts as the digits it prints. An IRREVERSIBLE tool needs a person whatever the rules say, unless an
ALLOW rule names that very tool: `always` and `semantics_is` are too easily written for something else. A risk scorer
can only make a person look at what would have been allowed, and it does when it fails.

Why no `approval_provider`: a function that answers True is nobody's signature.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any

from ...store.errors import BadValue
from ..semantics import SEMANTICS, ActionSemantics, semantics_of
from ..tools import check_name, is_async
from .breaker import BreakerPolicy, CircuitBreaker
from .digest import compiled, plain
from .levels import NAMED, QUORUM, level_named
from .limits import distinct
from .provenance import demands
from .question import ALLOW, ASK, REFUSE, GateCall, Refusal, Ruling, Tier

MISSING = object()
NO_MATCH = Ruling()


class Verdict(Enum):
    """What a rule says of a call that it matches."""

    ALLOW = "ALLOW"
    REQUIRE_APPROVAL = "REQUIRE_APPROVAL"
    BLOCK = "BLOCK"


class NoSuchArgument(BadValue):
    """A rule that names its tool asks about an argument that the call does not have."""

    code = "no_such_argument"


# ---- predicates ------------------------------------------------------------------------------------------------------


class Predicate:
    """A question about one call. `a & b` asks both, `~a` the opposite. facts: what it asks, as plain data."""

    __slots__ = ("facts", "_ask", "_tools")

    def __init__(
        self, facts: tuple[Any, ...], ask: Callable[[GateCall], Any], tools: frozenset[str] = frozenset()
    ) -> None:
        self.facts, self._ask, self._tools = facts, ask, tools

    def __call__(self, call: GateCall) -> bool:
        return answer(self._ask, call)

    def names(self, tool: str) -> bool:
        """Whether it only matches tools that it names, this very one among them."""
        return tool in self._tools

    def __and__(self, other: Callable[[GateCall], Any]) -> Predicate:
        first, second = self, predicate(other)
        return Predicate(
            ("both", first.facts, second.facts),
            lambda call: first(call) and second(call),
            first._tools | second._tools,
        )

    def __invert__(self) -> Predicate:
        return Predicate(("not", self.facts), lambda call: not self(call))

    def __repr__(self) -> str:
        return in_words(self.facts)


def answer(ask: Callable[[GateCall], Any], call: GateCall) -> bool:
    """What a predicate answers. Raises BadValue for one that is not finished, which would count as a yes."""
    said = ask(call)
    if inspect.isawaitable(said):
        if inspect.iscoroutine(said):
            said.close()
        raise BadValue("a predicate is a plain function, and this one has to be awaited")
    return bool(said)


def predicate(when: Callable[[GateCall], Any]) -> Predicate:
    """Any callable as a predicate. Raises BadValue."""
    if isinstance(when, Predicate):
        return when
    if not callable(when) or is_async(when):
        raise BadValue(f"{when!r} is no predicate: a plain function of a call is asked.")
    return Predicate(compiled(when), when)


always = Predicate(("always",), lambda call: True)
"""Matches every call."""


def semantics_is(*kinds: Any) -> Predicate:
    """Matches tools of these semantics."""
    wanted = tuple(semantics_of(kind) for kind in kinds)
    return Predicate(("semantics", *sorted(kind.value for kind in wanted)), lambda call: call.semantics in wanted)


def tool_is(*names: str) -> Predicate:
    """Matches these tools. `stripe.*` matches every tool whose name begins with `stripe.`, and names none of them."""
    for name in names:
        check_tool(name)
    exact = frozenset(name for name in names if not name.endswith(".*"))
    stems = tuple(name[:-1] for name in names if name.endswith(".*"))
    return Predicate(
        ("tool", *sorted(set(names))), lambda call: call.tool in exact or call.tool.startswith(stems), exact
    )  # fmt: skip


def tag_is(*tags: str) -> Predicate:
    """Matches tools that carry one of these tags."""
    wanted = frozenset(check_name(tag, "tag") for tag in tags)
    return Predicate(("tag", *sorted(wanted)), lambda call: not wanted.isdisjoint(call.tags))


def arg_exceeds(arg: str, threshold: Any, *, required: bool = False) -> Predicate:
    """Matches a call whose argument is above a number, compared exactly. A call without that argument does not match,
    or with `required` raises; an argument that is no number raises, and so blocks."""
    return _compared("over", arg, threshold, required, lambda value, limit: value > limit)


def arg_below(arg: str, threshold: Any, *, required: bool = False) -> Predicate:
    """Matches a call whose argument is below a number; as `arg_exceeds`."""
    return _compared("under", arg, threshold, required, lambda value, limit: value < limit)


def arg_in(arg: str, values: Iterable[Any], *, required: bool = False) -> Predicate:
    """Matches a call whose argument is one of these texts, numbers or booleans, of the same kind and exactly equal."""
    wanted = tuple(values)
    for value in wanted:
        if _key(value) == "":
            raise BadValue(f"{value!r} cannot be compared with an argument: text, a number or a boolean can.")
    keys = frozenset(map(_key, wanted))

    def ask(call: GateCall) -> bool:
        value = _argument(call, arg, required)
        return value is not MISSING and _key(value) in keys

    return Predicate(("in", arg, required, *sorted(map(_key, wanted))), ask)


def _compared(
    word: str, arg: str, threshold: Any, required: bool, holds: Callable[[Decimal, Decimal], bool]
) -> Predicate:
    limit = number(threshold)
    if limit is None:
        raise BadValue(f"{threshold!r} is no number to compare {arg} with.", next='Write it as text: "100.00".')

    def ask(call: GateCall) -> bool:
        value = _argument(call, arg, required)
        if value is MISSING:
            return False
        exact = number(value)
        if exact is None:
            raise BadValue(f"the argument {arg} is a {type(value).__name__} and no number")
        return holds(exact, limit)

    return Predicate((word, arg, required, plain_number(limit)), ask)


def has_arg(name: str) -> Predicate:
    """Matches a call that has this argument."""
    return Predicate(("has", name), lambda call: name in call.kwargs)


def either(one: Predicate, other: Predicate) -> Predicate:
    """Matches what one of two matches. It names no tool."""
    return Predicate(("either", one.facts, other.facts), lambda call: one(call) or other(call))


def _argument(call: GateCall, arg: str, required: bool) -> Any:
    value = call.kwargs.get(arg, MISSING)
    if value is MISSING and required:
        raise NoSuchArgument(f"the call has no argument {arg}")
    return value


_DIGITS = re.compile(r"-?[0-9]{1,32}(?:\.[0-9]{1,32})?")


def number(value: Any) -> Decimal | None:
    """A finite number as it prints, text in plain digits among it; None for anything else, a boolean among it."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return Decimal(value) if _DIGITS.fullmatch(value) else None
    if isinstance(value, int):
        return Decimal(int.__index__(value))
    if isinstance(value, float):
        value = Decimal(float.__repr__(value))
    return Decimal(value) if isinstance(value, Decimal) and value.is_finite() else None


def plain_number(value: Decimal) -> str:
    """A number in its one spelling: 100.00, 100 and 1E+2 are the same. Exact: no context rounds it."""
    sign, places, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    end = len(places)
    while end and not places[end - 1]:
        end -= 1
    if not end:
        return "0"
    short = Decimal((sign, places[:end], exponent + len(places) - end))
    return f"{short:f}" if abs(short.adjusted()) <= 40 else str(short)


def _key(value: Any) -> str:
    """What makes two arguments equal: kind and value. Empty for what is no text, number or boolean."""
    if isinstance(value, str):
        return repr(str.__str__(value))
    if isinstance(value, bool):
        return str(value).lower()
    exact = number(value)
    return "" if exact is None else plain_number(exact)


def check_tool(name: Any) -> str:
    """A tool's name or `PREFIX.*`. Raises BadName, BadValue."""
    check_name(name, "tool")
    if "*" in name and (not name.endswith(".*") or "*" in name[:-1] or name == ".*"):
        raise BadValue(f"{name!r} names no tool.", next='Name one exactly, or all that begin alike: "stripe.*".')
    return str(name)


# ---- what a predicate asks, in words ---------------------------------------------------------------------------------

_SAID: Mapping[str, Callable[..., str]] = {
    "always": lambda: "every call",
    "tool": lambda *names: _either(names),
    "tag": lambda *tags: f"tagged {_either(tags)}",
    "semantics": lambda *kinds: _either(kinds),
    "over": lambda arg, required, limit: f"{arg} over {limit}",
    "under": lambda arg, required, limit: f"{arg} under {limit}",
    "in": lambda arg, required, *values: f"{arg} is {_either(values)}",
    "has": lambda name: f"with {name}",
    "either": lambda one, other: f"{in_words(one)} or {in_words(other)}",
    "both": lambda first, second: f"{in_words(first)}, {in_words(second)}",
    "not": lambda inner: f"not ({in_words(inner)})",
    "code": lambda name, compiled: f"code of {name}",
}


def _either(words: Sequence[str]) -> str:
    return " or ".join(words) or "none"


def in_words(facts: tuple[Any, ...]) -> str:
    """What a predicate asks, for people."""
    return _SAID[facts[0]](*facts[1:])


def may_match(facts: tuple[Any, ...], tool: str, tags: frozenset[str], semantics: str) -> bool | None:
    """Whether a call of a tool matches: None where that depends on the call. semantics: empty if nobody has said."""
    kind, *said = facts
    if kind == "always":
        return True
    if kind == "tool":
        return any(tool.startswith(name[:-1]) if name.endswith(".*") else tool == name for name in said)
    if kind == "tag":
        return True if tags & set(said) else None  # the code may state more of them
    if kind == "semantics":
        return semantics in said if semantics else None
    inner = [may_match(one, tool, tags, semantics) for one in said] if kind in ("both", "either", "not") else []
    if kind == "not":
        return None if inner[0] is None else not inner[0]
    if kind == "both":
        return False if False in inner else None if None in inner else True
    if kind == "either":
        return True if True in inner else None if None in inner else False
    return None


# ---- rules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A name, a predicate, and what holds for the calls that match. Raises BadName, BadValue."""

    name: str
    when: Callable[[GateCall], Any]
    verdict: Verdict
    reason: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "rule")
        object.__setattr__(self, "when", predicate(self.when))
        object.__setattr__(self, "verdict", _verdict(self.verdict))
        if not isinstance(self.reason, str):
            raise BadValue(f"Rule {self.name}: its reason is text, not {type(self.reason).__name__}.")

    @property
    def asks(self) -> Predicate:
        """Its predicate."""
        return predicate(self.when)


def _verdict(said: Any) -> Verdict:
    if isinstance(said, Verdict):
        return said
    found = Verdict.__members__.get(str(said).upper()) if isinstance(said, str) else None
    if found is None:
        raise BadValue(f"{said!r} is no verdict.", next=f"One of {', '.join(Verdict.__members__)}.")
    return found


FLOOR = Rule(
    "irreversible-requires-human", semantics_is(ActionSemantics.IRREVERSIBLE), Verdict.REQUIRE_APPROVAL,
    "nothing automatic takes it back",
)  # fmt: skip
"""What holds whether or not a gate lists it, and is lifted by an ALLOW rule that names the tool."""
DEFAULT_RULES: tuple[Rule, ...] = (FLOOR,)

_RULED = {Verdict.ALLOW: ALLOW, Verdict.REQUIRE_APPROVAL: ASK, Verdict.BLOCK: REFUSE}
_ORDER = (ALLOW, ASK, REFUSE)
FLOOR_RULING = Ruling(ASK, FLOOR.name, FLOOR.reason)


def ruling(rules: Iterable[Rule], call: GateCall) -> Ruling:
    """What the first rule that matches says of a call; ALLOW without a name where none does. Never raises."""
    for rule in rules:
        try:
            matched = rule.when(call)
        except Exception as error:
            return _raised(rule, error)
        if matched:
            if rule is FLOOR:  # it is applied to the whole policy, so that a file may name what it allows
                return NO_MATCH
            named = rule.verdict is Verdict.ALLOW and rule.asks.names(call.tool)
            code = "blocked" if rule.verdict is Verdict.BLOCK else ""
            return Ruling(_RULED[rule.verdict], rule.name, rule.reason, named, code)
    return NO_MATCH


def _raised(rule: Rule, error: Exception) -> Ruling:
    if isinstance(error, NoSuchArgument):
        return Ruling(REFUSE, rule.name, f"{error.message}.", code=error.code)
    said = error.message if isinstance(error, BadValue) else told(error)
    return Ruling(REFUSE, rule.name, f"it could not be asked: {said}.", code="rule_raised")


def told(error: BaseException) -> str:
    """An error of somebody else's code, in one line; also one whose own text cannot be had."""
    try:
        said = str(error)
    except Exception as worse:
        said = f"and its text raised {type(worse).__name__}"
    said = " ".join(said.split()).rstrip(".")
    return f"{type(error).__name__}: {said[:500]}" if said else type(error).__name__


def strictest(*rulings: Ruling) -> Ruling:
    """Of several rulings the one that allows least, the first of equals; named if any of them names the tool."""
    worst = max(rulings, key=lambda one: _ORDER.index(one.verdict))
    if worst.verdict == ALLOW and not worst.named:
        return next((one for one in rulings if one.named), worst)
    return worst


def floored(said: Ruling, semantics: ActionSemantics) -> Ruling:
    """The ruling with what holds for every IRREVERSIBLE tool that no ALLOW rule names."""
    if SEMANTICS[semantics].asks and said.verdict == ALLOW and not said.named:
        return FLOOR_RULING
    return said


# ---- who is asked ----------------------------------------------------------------------------------------------------

DEADLINE_MAX = 7 * 24 * 3600.0


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise BadValue(f"{name}={value!r}: a tuple of names is asked.", next=f'Write {name}=("name",).')
    found = tuple(value)
    for one in found:
        if not isinstance(one, str) or not one.strip() or not one.isprintable():
            raise BadValue(f"{one!r} in {name} is no name.")
    return found


def _seconds(name: str, value: Any, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise BadValue(f"{name}={value!r}: seconds from {least:g} to {most:g} are asked.")


@dataclass(frozen=True)
class EscalationLevel:
    """Who is told when nobody has answered for that many seconds. Raises BadValue."""

    targets: tuple[str, ...] = ()
    after_seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", _texts("targets", self.targets))
        _seconds("after_seconds", self.after_seconds, 0, DEADLINE_MAX)


@dataclass(frozen=True)
class ApprovalPolicy:
    """What a person's yes takes. timeout: seconds after which it is a no, at most 7 days. levels: who is told and when.

    level: the lowest evidence (levels.py); None is a name until a key is enrolled, and then a touch. quorum: how many
    distinct people. roles: one of them is needed, if any is listed. Raises BadValue.
    """

    timeout: float = 24 * 3600.0
    levels: tuple[EscalationLevel, ...] = (EscalationLevel(),)
    level: str | None = None
    quorum: int = 1
    roles: tuple[str, ...] = ()
    allow_break_glass: bool = True

    def __post_init__(self) -> None:
        _seconds("timeout", self.timeout, 0.001, DEADLINE_MAX)
        object.__setattr__(self, "roles", _texts("roles", self.roles))
        object.__setattr__(self, "levels", _ascending(self.levels, self.timeout))
        if type(self.quorum) is not int or not 1 <= self.quorum <= 100:
            raise BadValue(f"quorum={self.quorum!r}: how many people, from 1 to 100, is asked.")
        if self.level is not None and level_named(self.level) == QUORUM and self.quorum < 2:
            raise BadValue("level='quorum' asks several people.", next="Say how many: quorum=2.")
        if type(self.allow_break_glass) is not bool:
            raise BadValue("allow_break_glass is True or False.")

    def tier(self) -> Tier:
        """The same as values for the gate: milliseconds and level numbers."""
        told = ((int(each.after_seconds * 1000), each.targets) for each in self.levels)
        return Tier(
            level=NAMED if self.level is None else level_named(self.level),
            quorum=self.quorum,
            roles=self.roles,
            within_ms=int(self.timeout * 1000),
            levels=tuple((after, targets) for after, targets in told if after or targets),
            break_glass=self.allow_break_glass,
            settled=self.level is not None,
        )


def _ascending(levels: Any, timeout: float) -> tuple[EscalationLevel, ...]:
    found = tuple(levels) if isinstance(levels, Iterable) else (levels,)
    last = -1.0
    for one in found:
        if not isinstance(one, EscalationLevel):
            raise BadValue(f"levels holds {one!r}: EscalationLevel(targets, after_seconds) is asked.")
        if not last < one.after_seconds < timeout:
            raise BadValue(
                f"levels are told at {last:g} s and then at {one.after_seconds:g} s, of {timeout:g} s.",
                next="Each is later than the one before it, and before the timeout.",
            )
        last = one.after_seconds
    return found


def stricter(one: Tier, other: Tier) -> Tier:
    """What satisfies both."""
    within = min(one.within_ms, other.within_ms)
    return Tier(
        level=max(one.level, other.level),
        quorum=max(one.quorum, other.quorum),
        roles=tuple(role for role in one.roles if role in other.roles) if one.roles and other.roles
        else one.roles or other.roles,
        within_ms=within,
        levels=tuple(told for told in one.levels or other.levels if told[0] < within),
        break_glass=one.break_glass and other.break_glass,
        settled=one.settled or other.settled,
    )  # fmt: skip


# ---- the gate in code ------------------------------------------------------------------------------------------------


class PreFlightGate:
    """What every call of a kit passes: `AgentKit(gate=PreFlightGate(rules, limits=…, approval=…))`.

    rules are asked in order. limits: BudgetLimit, RateLimit. breaker: a BreakerPolicy, or a CircuitBreaker with one.
    approval: what a yes takes. risk_scorer: a plain function of a call; at risk_threshold and above a person is asked.
    provenance: tool -> argument -> the tags it may have (see `provenance`). Raises BadValue, BadName.
    """

    def __init__(
        self,
        rules: Iterable[Rule] = DEFAULT_RULES,
        *,
        limits: Iterable[Any] = (),
        breaker: Any = None,
        approval: ApprovalPolicy | None = None,
        risk_scorer: Callable[[GateCall], Any] | None = None,
        risk_threshold: float = 0.7,
        provenance: Mapping[str, Mapping[str, Any]] | None = None,
        approval_provider: Any = None,
    ) -> None:
        if approval_provider is not None:
            raise BadValue(
                "PreFlightGate takes no approval_provider: a function that says yes is nobody's signature.",
                next="Leave it out; the call waits in `amends inbox` until a person answers with `amends approve`.",
                code="approval_provider",
            )
        if approval is not None and not isinstance(approval, ApprovalPolicy):
            raise BadValue(f"approval={approval!r}: an ApprovalPolicy is asked.")
        if risk_scorer is not None and (not callable(risk_scorer) or is_async(risk_scorer)):
            raise BadValue("risk_scorer is a plain function of a call that returns a number.")
        threshold = number(risk_threshold)
        if threshold is None:
            raise BadValue(f"risk_threshold={risk_threshold!r}: a number is asked.")
        self.rules, self.limits = _rules(rules), distinct(limits)
        self.breaker, self.approval = _breaker(breaker), approval
        self.risk_scorer, self.risk_threshold = risk_scorer, threshold
        self.provenance = {check_name(name, "tool"): demands(one) for name, one in (provenance or {}).items()}
        self._needed: dict[str, tuple[str, ...]] = {}

    def add_schema_rule(self, tool_name: str, required_fields: Sequence[str]) -> None:
        """Refuse calls of a tool (`schema`) that lack one of these arguments, or have None there."""
        check_name(tool_name, "tool")
        self._needed = self._needed | {tool_name: _texts("required_fields", required_fields)}

    def lacks(self, call: GateCall) -> Refusal | None:
        """Why a call lacks arguments that its tool must have."""
        missing = [name for name in self._needed.get(call.tool, ()) if call.kwargs.get(name) is None]
        if not missing:
            return None
        return Refusal(
            "schema",
            f"{call.tool} was called without {', '.join(missing)}.",
            "Call it again with every argument that it needs.",
            {"missing": missing},
        )

    def worry(self, call: GateCall) -> str:
        """Why the risk scorer wants a person to look at a call; empty if it does not. Never raises."""
        if self.risk_scorer is None:
            return ""
        try:
            said = self.risk_scorer(call)
            score = _score(said)
        except Exception as error:
            return f"the risk scorer raised {told(error)}"
        if score is None:
            return f"the risk scorer answered with a {type(said).__name__} that is no number"
        if score >= self.risk_threshold:
            threshold = plain_number(self.risk_threshold)
            return f"the risk scorer says {plain_number(score)}, and {threshold} is put to a person"
        return ""

    def described(self) -> Any:
        """Everything that it holds a call to, as plain data for the digest of a policy."""
        risk = [self.risk_scorer, plain_number(self.risk_threshold)] if self.risk_scorer else None
        return plain(
            {
                "rules": self.rules, "limits": self.limits, "breaker": self.breaker, "approval": self.approval,
                "risk": risk, "provenance": self.provenance, "schema": self._needed,
            }
        )  # fmt: skip


def _rules(rules: Any) -> tuple[Rule, ...]:
    found = tuple(rules) if isinstance(rules, Iterable) and not isinstance(rules, str) else (rules,)
    for rule in found:
        if not isinstance(rule, Rule):
            raise BadValue(f"{rule!r} is no rule.", next="Write Rule(name, when, Verdict.…).")
    return found


def _breaker(given: Any) -> BreakerPolicy | None:
    policy = given.policy if isinstance(given, CircuitBreaker) else given
    if policy is not None and not isinstance(policy, BreakerPolicy):
        raise BadValue(f"breaker={given!r}: a BreakerPolicy is asked.")
    return policy


def _score(said: Any) -> Decimal | None:
    """A scorer's answer as a number; that of another library counts, text does not."""
    if isinstance(said, str | bytes) or inspect.iscoroutine(said):
        return None
    return number(said if isinstance(said, int | float | Decimal) else float(said))
