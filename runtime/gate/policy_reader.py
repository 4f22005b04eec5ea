"""`policy.toml`: tools, rules, limits and approvals for those who do not write Python.

    version = 1

    [tools."stripe.charge"]
    semantics = "compensable"                     # what the code must say too
    tags = ["money"]
    approval = { level = "presence", quorum = 2, deadline = "4h" }
    provenance = { amount = ["user", "sourced"] }

    [[rules]]                                     # the first that matches wins
    name = "large charges"
    tools = ["stripe.*"]
    when = { arg = "amount", over = "100.00" }
    verdict = "require_approval"

    [[limits]]
    name = "a day"
    kind = "budget"
    arg = "amount"
    cap = "500.00"
    window = "24h"
    scope = [{ arg = "customer" }, "tool"]

The reading is strict, and every complaint has a line: an unknown key is an error, because a misspelt `cap` that is
skipped is a limit nobody has. All complaints are told at once. Numbers are exact: `0.1` is one tenth.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from functools import partial, reduce
from operator import and_
from pathlib import Path as File
from shlex import quote
from types import MappingProxyType
from typing import Any, NamedTuple

from ...store.errors import AmendsError, BadValue, YouErred
from ..semantics import ActionSemantics
from ..tools import check_name
from .breaker import BreakerPolicy
from .levels import WORDS
from .limits import SCALE_MAX, BudgetLimit, Limit, RateLimit, Scope, amount_in, by_arg, by_tool, combine
from .locks import names_of
from .provenance import TAGS, Demand, demand
from .rules import (
    ApprovalPolicy,
    EscalationLevel,
    Predicate,
    Rule,
    Verdict,
    always,
    arg_below,
    arg_exceeds,
    arg_in,
    check_tool,
    either,
    has_arg,
    number,
    plain_number,
    semantics_is,
    tag_is,
    tool_is,
)
from .switch import tags_of
from .toml_lines import NoToml, Path, lines_of, parsed, text_of

VERSION = 1
SIZE_MAX = 256 * 1024


class Complaint(NamedTuple):
    """What is wrong on a line, and what was expected there."""

    line: int
    what: str


class BadPolicyFile(YouErred):
    """A policy.toml cannot be used. `facts`: path, line (of the first complaint), complaints."""

    code = "bad_policy_file"


def bad_file(path: str, complaints: Sequence[Complaint]) -> BadPolicyFile:
    """The error that tells the first complaint and counts the others."""
    first, more = complaints[0], len(complaints) - 1
    others = f" And {more} more." if more else ""
    stop = "" if first.what.endswith(("?", ".")) else "."
    return BadPolicyFile(
        f"{path}:{first.line}: {first.what}{stop}{others}",
        next=f"No agent starts until it is corrected: `amends policy check {quote(path)}` says all that is wrong.",
        path=path,
        line=first.line,
        complaints=tuple(complaints),
    )


class ToolPolicy(NamedTuple):
    """What a file says of one tool. allow: "", "allow" or "block". approval: None where the file says nothing."""

    semantics: ActionSemantics | None = None
    tags: tuple[str, ...] = ()
    approval: ApprovalPolicy | None = None
    locks: tuple[str, ...] = ()
    provenance: Mapping[str, Demand] = MappingProxyType({})
    allow: str = ""
    reason: str = ""


class PolicyFile(NamedTuple):
    """A policy.toml as values. rules: in the order in which they are asked. settings: what its digest is made of."""

    path: str
    tools: Mapping[str, ToolPolicy]
    rules: tuple[Rule, ...]
    limits: tuple[Limit, ...]
    breaker: BreakerPolicy | None
    approvals: ApprovalPolicy | None
    settings: Any
    lines: Mapping[Path, int]


# ---- from bytes to values --------------------------------------------------------------------------------------------


def load(path: File | str) -> tuple[PolicyFile, os.stat_result]:
    """The policy that a file states, and what the file was when read. Raises FileNotFoundError, BadPolicyFile."""
    said = str(path)
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(fd, "rb") as stream:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise bad_file(said, [Complaint(1, "it is no file")])
            raw = stream.read(SIZE_MAX + 1)
    except FileNotFoundError:
        if os.path.islink(path):
            raise bad_file(said, [Complaint(1, "it is a link to nothing")]) from None
        raise
    except OSError as error:
        raise bad_file(said, [Complaint(1, f"it cannot be read: {error.strerror}")]) from None
    return read_bytes(raw, said), found


def read_bytes(raw: bytes, path: str) -> PolicyFile:
    """The policy in the bytes of a policy.toml. Raises BadPolicyFile."""
    if len(raw) > SIZE_MAX:
        raise bad_file(path, [Complaint(1, f"it is larger than {SIZE_MAX // 1024} KiB")])
    try:
        return read(text_of(raw), path)
    except NoToml as none:
        raise bad_file(path, [Complaint(none.line, none.what)]) from None


def read(text: str, path: str) -> PolicyFile:
    """The policy in the text of a policy.toml. Raises BadPolicyFile with every complaint."""
    text = text.removeprefix("\ufeff")
    try:
        document = parsed(text, _exact)
    except NoToml as none:
        raise bad_file(path, [Complaint(none.line, none.what)]) from None
    reader = _Reader(lines_of(text))
    found = reader.document(document, path)
    if reader.complaints:
        raise bad_file(path, sorted(set(reader.complaints)))
    return found


def _exact(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent beyond all numbers: as a value it is refused wherever a number is asked
        return Decimal("NaN")


# ---- what a key takes ------------------------------------------------------------------------------------------------


class Unfit(Exception):
    """A value is not what its key takes. args: what more there is to say, if anything."""


class Key(NamedTuple):
    """What a key is expected to be, in words, and how it is read: it raises Unfit."""

    expected: str
    take: Callable[[Any], Any]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise Unfit
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise Unfit
    return tuple(map(_text, value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unfit
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 1 << 53:
        raise Unfit
    return value


_DURATION = re.compile(r"([0-9]{1,9})(ms|s|m|h|d|w)")
TIME_MAX = 100 * 365 * 86_400
_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}


def _seconds(value: Any) -> float:
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise Unfit
    seconds = int(found[1]) * _MS[found[2]] / 1000
    if not 0 < seconds <= TIME_MAX:
        raise Unfit("it is nothing" if not seconds else "it is more than a century")
    return seconds


def duration(value: Any) -> float | None:
    """Seconds of `90s`, `6h`, `30d`, for other files that say times as this one does; None for anything else."""
    try:
        return _seconds(value)
    except Unfit:
        return None


def _window(value: Any) -> float | None:
    return None if value == "forever" else _seconds(value)


def _scale(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= SCALE_MAX:
        raise Unfit
    return value


def _amount(value: Any) -> Any:
    if isinstance(value, Decimal) and number(value) is not None:
        return plain_number(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Unfit
    return value


def _share(value: Any) -> float:
    exact = number(value)
    if exact is None or not 0 < exact <= 1:
        raise Unfit
    return float(exact)


def _one_of(words: Sequence[str]) -> Key:
    def take(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise Unfit(_meant(value, words))
        return value

    return Key(f"one of {', '.join(words)}", take)


def _names(check: Callable[[str], Any]) -> Callable[[Any], tuple[str, ...]]:
    def take(value: Any) -> tuple[str, ...]:
        for name in _texts(value):
            check(name)
        return tuple(value)

    return take


def _semantics(value: Any) -> tuple[ActionSemantics, ...]:
    said = value if isinstance(value, list) and value else [value]
    if not all(isinstance(one, str) and one in SEMANTICS for one in said):
        raise Unfit(_meant(value, SEMANTICS))
    return tuple(map(ActionSemantics, said))


def _locks(value: Any) -> tuple[str, ...]:
    found = _texts(value)
    for lock in found:  # a name that lacks its argument is told when a call lacks it; this tells what never works
        names_of([lock], _Anything())
    return found


class _Anything(dict[str, str]):
    """Arguments of which none is missing."""

    def get(self, key: str, default: Any = None) -> Any:
        return "x"

    def __missing__(self, key: str) -> str:
        return "x"


def _allow(value: Any) -> str:
    if value is not True and value != "block":
        raise Unfit("false says less than it seems to" if value is False else "")
    return "allow" if value is True else "block"


SEMANTICS = tuple(kind.value for kind in ActionSemantics)
VERDICTS = {"allow": Verdict.ALLOW, "require_approval": Verdict.REQUIRE_APPROVAL, "block": Verdict.BLOCK}
DURATION = 'a time like "90s", "30m", "24h" or "7d"'
_NUMBER = 'a number, exact: 100.00 or "100.00"'
_TOOLS = Key('a list of tools, each exact or like "stripe.*"', _names(check_tool))
_TAGS = Key("a list of tags", lambda value: tags_of(_texts(value)))

APPROVAL = {
    "level": _one_of(tuple(WORDS)),
    "quorum": Key("how many people, from 1", _whole),
    "roles": Key("a list of roles", _texts),
    "deadline": Key(DURATION, _seconds),
    "escalate": Key('a list of {after = "1h", targets = ["@oncall"]}', lambda value: value),
    "break_glass": Key("true or false", _flag),
}
ESCALATION = {"after": Key(DURATION, _seconds), "targets": Key("a list of names", _texts)}
TOOL = {
    "semantics": _one_of(SEMANTICS),
    "tags": _TAGS,
    "approval": Key('a table like { level = "presence", quorum = 2 }', lambda value: value),
    "locks": Key('a list of names like "order:{order_id}"', _locks),
    "provenance": Key('a table like { amount = ["user", "sourced"] }', lambda value: value),
    "allow": Key('true or "block"', _allow),
    "reason": Key("text", _text),
}
RULE = {
    "name": Key("text", lambda value: check_name(_text(value), "rule")),
    "tools": _TOOLS,
    "tags": _TAGS,
    "semantics": Key(f"one of {', '.join(SEMANTICS)}, or a list of them", _semantics),
    "when": Key('a table like { arg = "amount", over = "100.00" }, or a list of them', lambda value: value),
    "verdict": _one_of(tuple(VERDICTS)),
    "reason": Key("text", _text),
}
OPERATORS: Mapping[str, tuple[str, Callable[[str, Any, bool], Predicate]]] = {
    "over": (_NUMBER, lambda arg, value, required: arg_exceeds(arg, value, required=required)),
    "under": (_NUMBER, lambda arg, value, required: arg_below(arg, value, required=required)),
    "is": ("text, a number, true or false", lambda arg, value, required: arg_in(arg, [value], required=required)),
    "in": ("a list of texts and numbers", lambda arg, value, required: arg_in(arg, value, required=required)),
    "not_in": ("a list of texts and numbers", lambda arg, value, required: ~arg_in(arg, value, required=required)),
}
CONDITION = {"arg": Key("the name of an argument", _text)} | {
    word: Key(expected, lambda value: value) for word, (expected, _) in OPERATORS.items()
}
LIMIT = {
    "name": Key("text", lambda value: check_name(_text(value), "limit")),
    "kind": _one_of(("budget", "rate")),
    "arg": Key("the name of an argument", _text),
    "cap": Key(_NUMBER, _amount),
    "window": Key(f'{DURATION}, or "forever"', _window),
    "unit": Key("text", lambda value: check_name(_text(value), "unit")),
    "scale": Key(f"how many digits after the point, 0 to {SCALE_MAX}", _scale),
    "minor": Key("true or false", _flag),
    "scope": Key('"tool", { arg = "customer" }, or a list of these', lambda value: value),
    "tools": _TOOLS,
    "tags": _TAGS,
    "escalate_to_human": Key("true or false", _flag),
}
OF_BUDGETS = ("arg", "unit", "scale", "minor")
BREAKER = {
    "failure_threshold": Key("a whole number from 1", _whole),
    "window": Key(DURATION, _seconds),
    "min_volume": Key("a whole number from 1", _whole),
    "failure_rate": Key("a share above 0, at most 1", _share),
    "cool_down": Key(DURATION, _seconds),
    "half_open_probes": Key("a whole number from 1", _whole),
}
assert set(BREAKER) == {each.name for each in fields(BreakerPolicy)}
TOP = ("version", "approvals", "tools", "rules", "limits", "breaker")


# ---- the tables ------------------------------------------------------------------------------------------------------


class _Reader:
    """A parsed document beside the lines of its keys. It reads on after a complaint, so that all are told at once."""

    def __init__(self, lines: Mapping[Path, int]) -> None:
        self.lines = lines
        self.complaints: list[Complaint] = []

    def complain(self, at: Path, what: str) -> None:
        self.complaints.append(Complaint(line_at(self.lines, at), what))

    def document(self, document: dict[str, Any], path: str) -> PolicyFile:
        nothing = PolicyFile(path, {}, (), (), None, None, None, self.lines)
        if not self.version(document):
            return nothing
        for key in document:
            if key not in TOP:
                self.unknown((key,), key, "", TOP)
        defaults = self.approval(("approvals",), document.get("approvals", {}), {})
        tools = {name: self.tool(name, table, defaults) for name, table in self.tables(document)}
        rules = self.each(document, "rules", self.rule)
        limits = self.each(document, "limits", self.limit)
        breaker = self.breaker(document["breaker"]) if "breaker" in document else None
        approvals = self.policy(("approvals",), defaults) if defaults else None
        if self.complaints:
            return nothing
        ordered = (*_tables(tools, "block"), *rules, *_tables(tools, "allow"))
        return PolicyFile(path, tools, ordered, limits, breaker, approvals, settings_of(document), self.lines)

    def version(self, document: dict[str, Any]) -> bool:
        said = document.get("version")
        if "version" not in document:
            self.complain((), f"it must begin with version = {VERSION}")
        elif type(said) is int and said > VERSION:
            self.complain(("version",), f"it has version {said}, and this amends reads version {VERSION}")
        elif type(said) is not int or said != VERSION:
            self.complain(("version",), f"version = {VERSION} is expected")
        return not self.complaints

    def tables(self, document: dict[str, Any]) -> list[tuple[str, Any]]:
        found = document.get("tools", {})
        if not isinstance(found, dict):
            self.complain(("tools",), '[tools."NAME"] tables are expected')
            return []
        return list(found.items())

    def each(self, document: dict[str, Any], family: str, make: Callable[[Path, Any], Any]) -> tuple[Any, ...]:
        """What an array of tables holds, no two of one name."""
        found = document.get(family, [])
        if not isinstance(found, list):
            self.complain((family,), f"[[{family}]] tables are expected")
            return ()
        made = [make((family, place), table) for place, table in enumerate(found)]
        seen: dict[str, int] = {}
        for place, one in enumerate(made):
            if one is not None and (first := seen.setdefault(one.name, place)) != place:
                line = line_at(self.lines, (family, first))
                self.complain((family, place, "name"), f"{one.name} is the name of the one on line {line} already")
        return tuple(made)

    def fields(self, at: Path, table: Any, keys: Mapping[str, Key], needed: Sequence[str] = ()) -> dict[str, Any]:
        """What a table says, key by key; what is wrong with it is complained of and left out."""
        found: dict[str, Any] = {}
        if not isinstance(table, dict):
            self.complain(at, f"{_shown(at)} is expected to be a table")
            return found
        for key, value in table.items():
            if key not in keys:
                self.unknown((*at, key), key, f" in {_shown(at)}", tuple(keys))
                continue
            try:
                found[key] = keys[key].take(value)
            except (Unfit, AmendsError) as why:
                self.unfit((*at, key), keys[key].expected, value, why)
        for key in needed:
            if key not in table:
                self.complain(at, f"{_shown(at)} lacks {key}: {keys[key].expected}")
        return found

    def unknown(self, at: Path, key: str, where: str, keys: Sequence[str]) -> None:
        expected = f"; expected are {', '.join(keys)}"
        self.complain(at, f"unknown key {_bare(key)}{where}{_meant(key, keys) or expected}")

    def unfit(self, at: Path, expected: str, value: Any, why: Exception) -> None:
        said = why.message.rstrip(".") if isinstance(why, AmendsError) else str(why).removeprefix("; ")
        more = f" ({said})" if said else ""
        self.complain(at, f"{_shown(at)} is expected to be {expected}, and is {_brief(value)}{more}")

    # -- approvals and tools

    def approval(self, at: Path, table: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """What a table of approvals says, over what holds by default."""
        found = self.fields(at, table, APPROVAL)
        if "escalate" in found:
            found["escalate"] = self.escalations((*at, "escalate"), found["escalate"])
        return {**defaults, **found}

    def escalations(self, at: Path, said: Any) -> tuple[EscalationLevel, ...]:
        if not isinstance(said, list):
            self.unfit(at, APPROVAL["escalate"].expected, said, Unfit())
            return ()
        made = []
        for place, one in enumerate(said):
            found = self.fields((*at, place), one, ESCALATION, ("after", "targets"))
            if len(found) == 2:
                made += self.made((*at, place), partial(EscalationLevel, found["targets"], found["after"]))
        return tuple(made)

    def made(self, at: Path, make: Callable[[], Any]) -> list[Any]:
        """What is made, in a list; an empty one and a complaint where that is refused."""
        try:
            return [make()]
        except AmendsError as error:
            self.complain(at, f"{_shown(at)}: {error}".rstrip("."))
            return []

    def policy(self, at: Path, found: Mapping[str, Any]) -> ApprovalPolicy | None:
        names = {"deadline": "timeout", "escalate": "levels", "break_glass": "allow_break_glass"}
        given = {names.get(key, key): value for key, value in found.items()}
        return next(iter(self.made(at, lambda: ApprovalPolicy(**given))), None)

    def tool(self, name: str, table: Any, defaults: Mapping[str, Any]) -> ToolPolicy:
        at = ("tools", name)
        try:
            check_tool(name)
            if name.endswith(".*"):
                raise BadValue('a table is for one tool; [[rules]] and [[limits]] take several with tools = ["a.*"]')
        except AmendsError as error:
            self.complain(at, f"{_shown(at)}: {error}".rstrip("."))
        found = self.fields(at, table, TOOL)
        if "approval" in found:
            own = self.approval((*at, "approval"), found["approval"], defaults)
            found["approval"] = self.policy((*at, "approval"), own)
        if "provenance" in found:
            found["provenance"] = self.provenance((*at, "provenance"), found["provenance"])
        if "semantics" in found:
            found["semantics"] = ActionSemantics(found["semantics"])
        return ToolPolicy(**found)

    def provenance(self, at: Path, table: Any) -> dict[str, Demand]:
        expected = f"a list of {', '.join(TAGS)}, or {{ prohibit = […] }}"
        names = table if isinstance(table, dict) else {}
        return self.fields(at, table, {name: Key(expected, demand) for name in names})

    # -- rules

    def rule(self, at: Path, table: Any) -> Rule | None:
        before = len(self.complaints)
        found = self.fields(at, table, RULE, ("name", "verdict"))
        exact = all(not name.endswith(".*") for name in found.get("tools", ("*.*",)))
        asked = self.filters(found)
        if "semantics" in found:
            asked.append(semantics_is(*found["semantics"]))
        asked += self.conditions((*at, "when"), found["when"], exact) if "when" in found else []
        if len(self.complaints) > before:
            return None
        return Rule(found["name"], _all(asked), VERDICTS[found["verdict"]], found.get("reason", ""))

    def filters(self, found: Mapping[str, Any]) -> list[Predicate]:
        tools = [tool_is(*found["tools"])] if "tools" in found else []
        return tools + ([tag_is(*found["tags"])] if "tags" in found else [])

    def conditions(self, at: Path, said: Any, required: bool) -> list[Predicate]:
        if not isinstance(said, list):
            return self.condition(at, said, required)
        if not said:
            self.unfit(at, RULE["when"].expected, said, Unfit())
        return [asked for place, one in enumerate(said) for asked in self.condition((*at, place), one, required)]

    def condition(self, at: Path, table: Any, required: bool) -> list[Predicate]:
        """required: the rule names its tools, so that a call without the argument is blocked and not passed over."""
        found = self.fields(at, table, CONDITION, ("arg",))
        words = [word for word in OPERATORS if word in found]
        if isinstance(table, dict) and len(words) != 1:
            self.complain(at, f"{_shown(at)} is expected to have one of {', '.join(OPERATORS)}")
        if len(words) != 1 or "arg" not in found:
            return []
        [word] = words
        expected, make = OPERATORS[word]
        value = found[word]
        try:
            if word.endswith("in") and (not isinstance(value, list) or not value):
                raise Unfit
            return [make(found["arg"], value, required)]
        except (Unfit, BadValue) as error:
            self.unfit((*at, word), expected, value, error)
            return []

    # -- limits and the breaker

    def limit(self, at: Path, table: Any) -> Limit | None:
        before = len(self.complaints)
        found = self.fields(at, table, LIMIT, ("name", "kind", "cap", "window"))
        if found.get("kind") == "rate":
            for key in OF_BUDGETS:
                if key in found:
                    self.complain((*at, key), f"a rate counts calls: {key} is of a budget")
        scope = self.scope((*at, "scope"), found["scope"]) if "scope" in found else None
        if len(self.complaints) > before or not self.cap(at, found):
            return None
        return next(iter(self.made((*at, "name"), lambda: _limit(found, scope, self.filters(found)))), None)

    def cap(self, at: Path, found: Mapping[str, Any]) -> bool:
        """Whether the cap can be counted."""
        rate = found["kind"] == "rate"
        read = amount_in(found["cap"], 0 if rate else found.get("scale", 2), rate or found.get("minor", False))
        if read and not isinstance(read, str):
            return True
        why = read if isinstance(read, str) else "is nothing, and would refuse every call"
        self.complain((*at, "cap"), f"{_shown(at)} cap {why}")
        return False

    def scope(self, at: Path, said: Any) -> Scope | None:
        parts = said if isinstance(said, list) else [said]
        made = [self.part((*at, place) if isinstance(said, list) else at, one) for place, one in enumerate(parts)]
        if not made:
            self.unfit(at, LIMIT["scope"].expected, said, Unfit())
        known = [one for one in made if one is not None]
        return (combine(*known) if len(known) > 1 else known[0]) if known else None

    def part(self, at: Path, said: Any) -> Scope | None:
        if said == "tool":
            return by_tool
        if isinstance(said, dict):
            found = self.fields(at, said, {"arg": CONDITION["arg"]}, ("arg",))
            return by_arg(found["arg"]) if found else None
        self.unfit(at, LIMIT["scope"].expected, said, Unfit())
        return None

    def breaker(self, table: Any) -> BreakerPolicy | None:
        at = ("breaker",)
        found = self.fields(at, table, BREAKER)
        try:
            return BreakerPolicy(**found)
        except AmendsError as error:
            key = next(key for key in found if error.message.startswith(f"{key}="))
            self.complain((*at, key), f"{_shown(at)}: {error}".rstrip("."))
            return None


def _tables(tools: Mapping[str, ToolPolicy], allow: str) -> list[Rule]:
    """What the tables of tools say as rules: a block is asked before every [[rules]], an allow after all of them."""
    verdict = VERDICTS[allow]
    return [
        Rule(f"tools.{name}"[:256], tool_is(name), verdict, one.reason or (f"policy.toml blocks {name}" if verdict is
             Verdict.BLOCK else "")) for name, one in tools.items() if one.allow == allow
    ]  # fmt: skip


def _all(asked: Sequence[Predicate]) -> Predicate:
    return reduce(and_, asked) if asked else always


def _limit(found: dict[str, Any], scope: Scope | None, filters: Sequence[Predicate]) -> Limit:
    """A limit as code would declare it. A tool that is named exactly must have the argument, one of many need not."""
    shared = {"window": found["window"], "scope": scope, "escalate_to_human": found.get("escalate_to_human", False)}
    applies = _all(filters) if filters else None
    if found["kind"] == "rate":
        return RateLimit(found["name"], max_calls=found["cap"], applies=applies, **shared)
    arg = found.get("arg", "amount")
    if applies is not None:
        exact = [name for name in found.get("tools", ()) if not name.endswith(".*")]
        applies = applies & (either(tool_is(*exact), has_arg(arg)) if exact else has_arg(arg))
    own = {key: found[key] for key in OF_BUDGETS if key in found}
    return BudgetLimit(found["name"], max_total=found["cap"], applies=applies, **{"arg": arg} | own, **shared)


# ---- in words --------------------------------------------------------------------------------------------------------


def line_at(lines: Mapping[Path, int], at: Path) -> int:
    """The line of a key, or of the innermost table around it that is written down."""
    while at not in lines:
        at = at[:-1]
    return lines[at]


def settings_of(value: Any) -> Any:
    """The values of a document as plain data."""
    if isinstance(value, dict):
        return {key: settings_of(one) for key, one in value.items()}
    if isinstance(value, list):
        return [settings_of(one) for one in value]
    return {"decimal": plain_number(value)} if isinstance(value, Decimal) else value


def _bare(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else f'"{key[:80]}"'


def _shown(at: Path) -> str:
    """A path as the file has it: `[tools."stripe.charge"] approval.level`, `[[rules]] 2 when`."""
    if at[0] == "tools":
        head, rest = f"[tools.{'.'.join(_bare(str(one)) for one in at[1:2])}]", at[2:]
    elif len(at) > 1 and isinstance(at[1], int):
        head, rest = f"[[{at[0]}]] {at[1] + 1}", at[2:]
    else:
        head, rest = f"[{at[0]}]", at[1:]
    return f"{head} {'.'.join(str(one + 1) if isinstance(one, int) else _bare(one) for one in rest)}".rstrip()


def _brief(value: Any) -> str:
    said = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return said if len(said) <= 60 else f"{said[:59]}…"


def _meant(value: Any, words: Sequence[str]) -> str:
    close = get_close_matches(value.lower(), words, 1) if isinstance(value, str) else []
    return f"; did you mean {close[0]}?" if close else ""
