"""`amends policy`: what policy.toml says, in words, and everything that is wrong with it, by line.

`check` reads a file as an agent would, before one does. `show` says what is in force in this home, or what of it is
about one tool. Neither opens the log. A gate that an agent has in code comes on top, and is not seen from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..runtime.gate.levels import LEVELS
from ..runtime.gate.limits import Limit, RateLimit, shown, span
from ..runtime.gate.policy_file import digest_of
from ..runtime.gate.policy_reader import BadPolicyFile, PolicyFile, ToolPolicy, load
from ..runtime.gate.question import Tier
from ..runtime.gate.rules import Rule, Verdict, may_match
from ..store.errors import NotFound
from . import ui
from .device import home

VERDICTS = {
    Verdict.ALLOW: ui.Word("allowed", "good"),
    Verdict.REQUIRE_APPROVAL: ui.Word("a person is asked", "ask"),
    Verdict.BLOCK: ui.Word("blocked", "bad"),
}


@click.group(cls=ui.Verbs)
def policy() -> None:
    """Say what the policy file holds agents to, and what is wrong with it."""


@policy.command()
@click.argument("file", required=False)
def check(file: str | None) -> int:
    """Read a policy file, by default that of this home. Exit 2 if there is anything wrong with it."""
    path = Path(file) if file is not None else home().policy
    try:
        found = load(path)[0]
    except FileNotFoundError:
        if file is not None:
            raise _missing(path) from None
        return _nothing(path)
    except BadPolicyFile as error:
        return _wrong(str(path), error.facts["complaints"])
    return _told(found, _document(found), f"{found.path} is sound; its digest is {digest_of(found)}.")


@policy.command()
@click.argument("tool", required=False)
def show(tool: str | None) -> int:
    """Say what this home's policy file holds agents to, or what of it is about one tool."""
    path = home().policy
    try:
        found = load(path)[0]
    except FileNotFoundError:
        return _nothing(path)
    if tool is None:
        return _told(found, _document(found), f"{found.path} is in force; its digest is {digest_of(found)}.")
    found = _about(found, tool)
    return _told(found, _document(found), f"What {found.path} says of {tool}:")


def _missing(path: Path) -> NotFound:
    return NotFound(f"There is no file {path}.", next="Name a policy file, or none for that of this home.")


def _nothing(path: Path) -> int:
    if ui.session().as_json:
        ui.emit({"file": str(path), "ok": True, "digest": "", "complaints": []})
    else:
        ui.say(f"There is no {path}: irreversible tools ask a person, everything else is allowed.")
    return 0


def _wrong(path: str, complaints: Any) -> int:
    if ui.session().as_json:
        told = [{"line": one.line, "what": one.what} for one in complaints]
        ui.emit({"file": path, "ok": False, "digest": "", "complaints": told})
        return 2
    for one in complaints:
        ui.say(f"{path}:{one.line}: ", ui.Word(one.what, "bad"))
    return 2


def _about(found: PolicyFile, tool: str) -> PolicyFile:
    """The part of a policy that can concern a call of one tool."""
    own = found.tools.get(tool, ToolPolicy())
    tags, semantics = frozenset(own.tags), own.semantics.value if own.semantics else ""

    def concerns(facts: Any) -> bool:
        return may_match(facts, tool, tags, semantics) is not False

    return found._replace(
        tools={tool: own},
        rules=tuple(rule for rule in found.rules if concerns(rule.asks.facts)),
        limits=tuple(limit for limit in found.limits if concerns(getattr(limit.applies, "facts", ("always",)))),
    )


# ---- in words --------------------------------------------------------------------------------------------------------


def _told(found: PolicyFile, document: Mapping[str, Any], head: str) -> int:
    if ui.session().as_json:
        ui.emit(document)
        return 0
    ui.say(head)
    _section("tools", ((name, _tool(one)) for name, one in sorted(found.tools.items())))
    _section("rules, of which the first that matches wins", map(_rule, found.rules))
    _section("limits", ((limit.name, _limit(limit, found)) for limit in found.limits))
    if found.approvals is not None:
        _section("approvals, where nothing else is said", [("", tier_in_words(found.approvals.tier()))])
    if found.breaker is not None:
        said = ", ".join(
            f"{name} {value:g}{' s' if name in ('window', 'cool_down') else ''}"
            for name, value in asdict(found.breaker).items()
        )
        _section("breaker", [("", said)])
    return 0


def _section(title: str, rows: Any) -> None:
    listed = list(rows)
    if listed:
        ui.say("")
        ui.say(ui.Word(title, "bold"))
        width = max(len(ui.clean(row[0])) for row in listed)
        for name, *parts in listed:
            ui.say("  ", name, " " * (width - len(ui.clean(name)) + 2 if width else 0), *parts)


def _tool(one: ToolPolicy) -> str:
    return "; ".join(_of_tool(one)) or "nothing but what is below"


def _of_tool(one: ToolPolicy) -> Iterator[str]:
    if one.semantics is not None:
        yield one.semantics.value
    if one.tags:
        yield f"tagged {', '.join(one.tags)}"
    if one.allow:
        yield "blocked" if one.allow == "block" else "allowed by name"
    if one.approval is not None:
        yield f"a yes takes {tier_in_words(one.approval.tier())}"
    for name, demand in one.provenance.items():
        yield f"{name} is {' or '.join(demand.allowed)}"
    if one.locks:
        yield f"claims {', '.join(one.locks)}"


def _rule(rule: Rule) -> tuple[object, ...]:
    return rule.name, f"{rule.asks!r}: ", VERDICTS[rule.verdict], f" ({rule.reason})" if rule.reason else ""


def _limit(limit: Limit, found: PolicyFile) -> str:
    within = f"in {span(limit.window_ms)}" if limit.window_ms else "for ever"
    cap = shown(limit.cap, limit.scale, limit.unit)
    what = f"{cap} {within}" if isinstance(limit, RateLimit) else f"{cap} of {limit.arg} {within}"
    facts = getattr(limit.applies, "facts", None)
    where = f", of calls to {limit.applies!r}" if facts else ""
    [said] = [one for one in found.settings["limits"] if one["name"] == limit.name]
    scope = "".join(f", per {each}" for each in _scopes(said.get("scope", [])))
    return f"at most {what}{scope}{where}{'; over it a person is asked' if limit.escalate_to_human else ''}"


def _scopes(said: Any) -> list[str]:
    parts = said if isinstance(said, list) else [said]
    return [one if isinstance(one, str) else one["arg"] for one in parts]


def tier_in_words(tier: Tier) -> str:
    """What a yes takes, for people."""
    who = f"{tier.quorum} people" if tier.quorum > 1 else "a person"
    role = f" ({_either(tier.roles)})" if tier.roles else ""
    evidence = f"by {LEVELS[tier.level][0]}" if tier.settled else "by name, or by touch once a key is enrolled"
    told = "".join(f", {', '.join(targets)} told after {span(after)}" for after, targets in tier.levels)
    glass = "" if tier.break_glass else ", no breaking the glass"
    return f"{who}{role} {evidence} within {span(tier.within_ms)}{told}{glass}"


def _either(words: Sequence[str]) -> str:
    return " or ".join(words)


def _document(found: PolicyFile) -> dict[str, Any]:
    """The same for scripts."""
    return {
        "file": found.path,
        "ok": True,
        "digest": digest_of(found),
        "complaints": [],
        "tools": {name: _tool_document(one) for name, one in found.tools.items()},
        "rules": [
            {"name": rule.name, "when": repr(rule.asks), "verdict": rule.verdict.value, "reason": rule.reason}
            for rule in found.rules
        ],
        "limits": [{"name": limit.name, "says": _limit(limit, found)} for limit in found.limits],
        "approvals": _approval(found.approvals),
        "breaker": asdict(found.breaker) if found.breaker else None,
    }


def _tool_document(one: ToolPolicy) -> dict[str, Any]:
    return {
        "semantics": one.semantics.value if one.semantics else None,
        "tags": list(one.tags),
        "allow": one.allow or None,
        "approval": _approval(one.approval),
        "provenance": {name: list(demand.allowed) for name, demand in one.provenance.items()},
        "locks": list(one.locks),
    }


def _approval(one: Any) -> dict[str, Any] | None:
    if one is None:
        return None
    tier = one.tier()
    return {
        "level": LEVELS[tier.level][0] if tier.settled else None,
        "quorum": tier.quorum,
        "roles": list(tier.roles),
        "within_ms": tier.within_ms,
        "escalate": [{"after_ms": after, "targets": list(targets)} for after, targets in tier.levels],
        "break_glass": tier.break_glass,
    }
