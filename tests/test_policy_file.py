"""policy.toml is read strictly, every complaint has a line, and what it says holds beside the gate in code."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from amends import AgentKit, Compensation, Refused, SagaAborted
from amends.cli.main import main
from amends.runtime.gate.breaker import BreakerPolicy
from amends.runtime.gate.limits import BudgetLimit, RateLimit
from amends.runtime.gate.policy_file import Policy, digest_of
from amends.runtime.gate.policy_reader import (
    APPROVAL,
    BREAKER,
    CONDITION,
    ESCALATION,
    LIMIT,
    RULE,
    SIZE_MAX,
    TOOL,
    BadPolicyFile,
    PolicyFile,
    ToolPolicy,
    load,
    read,
    read_bytes,
)
from amends.runtime.gate.provenance import Demand
from amends.runtime.gate.question import ALLOW, ASK, REFUSE, GateCall, Question, Tier
from amends.runtime.gate.rules import (
    ApprovalPolicy,
    EscalationLevel,
    PreFlightGate,
    Rule,
    Verdict,
    always,
    arg_exceeds,
    ruling,
    tool_is,
)
from amends.runtime.gate.toml_lines import lines_of
from amends.runtime.semantics import ActionSemantics
from amends.store.errors import YouErred

PROMISE = pytest.mark.promise("2.5")
ROOT = Path(__file__).resolve().parents[1]
REVERSIBLE, COMPENSABLE, IRREVERSIBLE = ActionSemantics

GOOD = """\
version = 1

[approvals]
level = "presence"
deadline = "12h"

[tools."stripe.charge"]
semantics = "compensable"
tags = ["money"]
approval = { quorum = 2, roles = ["approver"], escalate = [{ after = "1h", targets = ["@on"] }], break_glass = false }
provenance = { amount = ["user", "sourced"], memo = { prohibit = ["model"] } }
locks = ["customer:{customer}"]

[tools."wire.send"]
allow = true

[tools."db.drop"]
allow = "block"
reason = "nobody drops a database from here"

[[rules]]
name = "large"
tools = ["stripe.*"]
when = { arg = "amount", over = "100.00" }
verdict = "require_approval"
reason = "a large charge"

[[rules]]
name = "known payees"
tools = ["wire.send"]
tags = ["money"]
semantics = ["irreversible", "compensable"]
when = [{ arg = "to", not_in = ["DE12", "DE13"] }, { arg = "amount", under = 5000 }]
verdict = "block"

[[limits]]
name = "a day"
kind = "budget"
arg = "amount"
cap = 500.10
window = "24h"
unit = "eur"
scale = 2
minor = false
scope = [{ arg = "customer" }, "tool"]
tools = ["stripe.*"]
escalate_to_human = true

[[limits]]
name = "velocity"
kind = "rate"
cap = 20
window = "1m"
tags = ["money"]

[breaker]
failure_threshold = 3
window = "2m"
min_volume = 4
failure_rate = 0.25
cool_down = "500ms"
half_open_probes = 2
"""


def meter(text: str) -> str:
    return text.encode().hex().ljust(16, "0")[:16]


def call(tool: str, sem: ActionSemantics = COMPENSABLE, *tags: str, **kwargs: Any) -> GateCall:
    return GateCall(tool, sem, kwargs, frozenset(tags), provenance=dict.fromkeys(kwargs, "user"))


def ask(policy: Policy, asked: GateCall) -> Question:
    return policy.prepare(asked, meter=meter, saga="s", root="r")


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.toml"
    path.write_text(text, encoding="utf-8")
    return path


def policy(text: str, folder: Path, gate: PreFlightGate | None = None) -> Policy:
    return Policy(written(folder, f"version = 1\n{text}"), gate)


# -- reading -------------------------------------------------------------------------------------------------------


@PROMISE
def test_every_key_is_read() -> None:
    found = read(GOOD, "policy.toml")
    assert found.approvals == ApprovalPolicy(timeout=12 * 3600, level="presence")
    assert found.breaker == BreakerPolicy(3, 120.0, 4, 0.25, 0.5, 2)
    charge = found.tools["stripe.charge"]
    assert charge == ToolPolicy(
        COMPENSABLE,
        ("money",),
        ApprovalPolicy(12 * 3600, (EscalationLevel(("@on",), 3600),), "presence", 2, ("approver",), False),
        ("customer:{customer}",),
        {"amount": Demand(("user", "sourced")), "memo": Demand(("user", "sourced", "derived"), prohibits=True)},
    )
    assert [(rule.name, repr(rule.asks), rule.verdict.name, rule.reason) for rule in found.rules] == [
        ("tools.db.drop", "db.drop", "BLOCK", "nobody drops a database from here"),
        ("large", "stripe.*, amount over 100", "REQUIRE_APPROVAL", "a large charge"),
        (
            "known payees",
            "wire.send, tagged money, compensable or irreversible, not (to is 'DE12' or 'DE13'), amount under 5000",
            "BLOCK",
            "",
        ),
        ("tools.wire.send", "wire.send", "ALLOW", ""),
    ]
    day, velocity = found.limits
    assert isinstance(day, BudgetLimit) and (day.cap, day.window_ms, day.unit, day.scale) == (
        50010,
        86_400_000,
        "eur",
        2,
    )
    assert day.escalate_to_human and day.applies is not None and day.scope is not None
    assert isinstance(velocity, RateLimit) and (velocity.cap, velocity.window_ms) == (20, 60_000)
    for keys in (APPROVAL, ESCALATION, TOOL, RULE, CONDITION, LIMIT, BREAKER):
        assert not [key for key in keys if not re.search(rf"\b{key} = ", GOOD) and key not in ("over", "is", "in")]


def test_a_rate_may_have_no_end_and_an_amount_may_be_whole() -> None:
    text = 'version = 1\n[[limits]]\nname = "a"\nkind = "{}"\ncap = {}\nwindow = "forever"\n'
    assert read(text.format("rate", "5"), "p").limits[0].window_ms == 0
    assert read(text.format("budget", "5"), "p").limits[0].cap == 500
    assert read(text.format("budget", '"5.5"'), "p").limits[0].cap == 550
    assert read(text.format("budget", "1e2"), "p").limits[0].cap == 10000
    assert read(text.format("budget", "5\nminor = true"), "p").limits[0].cap == 5


def edited(old: str, new: str) -> str:
    assert GOOD.count(old) >= 1
    return GOOD.replace(old, new, 1)


def line_of(text: str) -> int:
    return GOOD[: GOOD.index(text)].count("\n") + 1


CAP = line_of("cap = 500.10")
CHARGE = line_of('[tools."stripe.charge"]')
WIRE = line_of('[tools."wire.send"]')
LARGE = line_of('name = "large"')
FAULTS = {
    "no version": (edited("version = 1", ""), 1, "must begin with version = 1"),
    "an empty file": ("", 1, "must begin with version = 1"),
    "a newer version": (edited("version = 1", "version = 2"), 1, "version 2, and this amends reads version 1"),
    "a version that is true": (edited("version = 1", "version = true"), 1, "version = 1 is expected"),
    "a version in words": (edited("version = 1", 'version = "1"'), 1, "version = 1 is expected"),
    "not toml": (edited("[breaker]", "[breaker"), line_of("[breaker]"), "it is not TOML: Expected ']'"),
    "not closed": (GOOD + 'x = """\n\n', GOOD.count("\n") + 1, "it is not TOML: Unterminated string"),
    "the same key twice": (edited('deadline = "12h"', 'level = "file"'), 5, "it is not TOML: Cannot overwrite"),
    "an unknown table": (edited("[breaker]", "[braker]"), line_of("[breaker]"), "braker; did you mean breaker?"),
    "an unknown key at the top": (edited("version = 1", "version = 1\nhosts = 3"), 2, "hosts; expected are"),
    "a misspelt key": (edited("cap = 500.10", "kap = 500.10"), CAP, "kap in [[limits]] 1; did you mean cap?"),
    "a missing key": (edited("cap = 500.10", ""), line_of("[[limits]]"), "[[limits]] 1 lacks cap: a number"),
    "a cap in words": (edited("cap = 500.10", 'cap = "lots"'), CAP, "cap is no number in plain digits"),
    "a cap that is true": (edited("cap = 500.10", "cap = true"), CAP, "cap is expected to be a number"),
    "a cap of nothing": (edited("cap = 500.10", "cap = 0"), CAP, "would refuse every call"),
    "a cap below nothing": (edited("cap = 500.10", "cap = -1"), CAP, "is below zero"),
    "a cap that is no number": (edited("cap = 500.10", "cap = nan"), CAP, "cap is expected to be a number"),
    "a cap beyond all numbers": (edited("cap = 500.10", "cap = 1e99999999999999999999"), CAP, "cap is expected"),
    "a cap of too many digits": (edited("500.10", "500.105"), CAP, "has more than 2 digits after the point"),
    "a cap of far too many digits": (edited("500.10", "9" * 5000), CAP, "a number is too long"),
    "half a call": (edited("cap = 20", "cap = 20.5"), line_of("cap = 20"), "is no whole number"),
    "a rate of an argument": (edited("cap = 20", "cap = 20\narg = \"x\""), line_of("cap = 20") + 1, "counts calls"),
    "a window without unit": (edited('"24h"', '"24"'), CAP + 1, 'window is expected to be a time like "90s"'),
    "a window that is a number": (edited('"24h"', "24"), CAP + 1, "window is expected to be a time like"),
    "a window of nothing": (edited('"24h"', '"0h"'), CAP + 1, "it is nothing"),
    "a scale out of bounds": (edited("scale = 2", "scale = 99"), CAP + 3, "after the point, 0 to 12"),
    "a unit that is no name": (edited('unit = "eur"', 'unit = "€"'), CAP + 2, "unit name"),
    "a limit named like a meter": (edited('name = "a day"', 'name = "a/day"'), CAP - 3, "no slash"),
    "a kind that nobody knows": (edited('kind = "budget"', 'kind = "budgets"'), CAP - 2, "did you mean budget?"),
    "a scope of nothing": (edited('[{ arg = "customer" }, "tool"]', "[]"), line_of("scope = "), "scope is expected"),
    "a scope that nobody knows": (edited('{ arg = "customer" }, ', '"saga", '), line_of("scope = "), "scope.1 is"),
    "a limit twice": (edited('name = "velocity"', 'name = "a day"'), line_of('name = "velocity"'), "is the name of"),
    "a rule twice": (edited('name = "known payees"', 'name = "large"'), line_of('name = "known'), f"line {LARGE - 1}"),
    "a rule without a name": (edited('name = "large"\n', ""), LARGE - 1, "[[rules]] 1 lacks name"),
    "a rule without a verdict": (edited('verdict = "block"\n', ""), line_of('name = "known') - 1, "lacks verdict"),
    "a verdict in other words": (edited('"require_approval"', '"require-approval"'), LARGE + 3, "require_approval?"),
    "a tool that is a pattern": (edited('"stripe.*"', '"*.charge"'), LARGE + 1, 'exact or like "stripe.*"'),
    "tools that are none": (edited('["stripe.*"]', "[]"), LARGE + 1, "a list of tools"),
    "tools that are text": (edited('["stripe.*"]', '"stripe.*"'), LARGE + 1, "a list of tools"),
    "a condition without an operator": (edited(', over = "100.00"', ""), LARGE + 2, "one of over, under, is"),
    "a condition with two": (edited('over = "100.00"', "over = 1, under = 2"), LARGE + 2, "one of over, under"),
    "a condition on nothing": (edited('arg = "amount", over', "over"), LARGE + 2, "when lacks arg"),
    "a condition against words": (edited('"100.00"', '"a lot"'), LARGE + 2, "when.over is expected to be a number"),
    "a condition on text": (edited('{ arg = "amount", over = "100.00" }', '"amount"'), LARGE + 2, "to be a table"),
    "a list that is none": (edited('["DE12", "DE13"]', '"DE12"'), line_of("not_in"), "when.1.not_in is expected"),
    "a list of tables": (edited('["DE12", "DE13"]', '[{ a = 1 }]'), line_of("not_in"), "cannot be compared"),
    "semantics that nobody knows": (edited('"compensable"\n', '"compensible"\n'), CHARGE + 1, "mean compensable?"),
    "a tag that no scope can name": (edited('["money"]', '["mo*ney"]'), CHARGE + 2, "is no tag"),
    "a level that nobody knows": (edited('level = "presence"', 'level = "presense"'), 4, "did you mean presence?"),
    "an approval that is no table": (edited("{ quorum = 2,", "{ quorum = 0,"), CHARGE + 3, "how many people"),
    "levels after the end": (edited('after = "1h"', 'after = "13h"'), CHARGE + 3, "Each is later than the one before"),
    "an escalation without targets": (edited(', targets = ["@on"]', ""), CHARGE + 3, "escalate.1 lacks targets"),
    "an escalation that is no list": (edited('[{ after = "1h", targets = ["@on"] }]', "3"), CHARGE + 3, "escalate is"),
    "an escalation after a month": (edited('"1h"', '"30d"'), CHARGE + 3, "seconds from 0 to 604800"),
    "glass that is no yes or no": (edited("break_glass = false", 'break_glass = "no"'), CHARGE + 3, "true or false"),
    "a provenance that nobody knows": (edited('["user", "sourced"]', '["usr"]'), CHARGE + 4, "'usr' is no provenance"),
    "a provenance of everything": (edited('["user", "sourced"]', "[]"), CHARGE + 4, "every tag, or none"),
    "a provenance that is no table": (edited("memo = { prohibit", "memo = { refuse"), CHARGE + 4, "provenance.memo is"),
    "a lock that is no list": (edited('["customer:{customer}"]', '"x"'), CHARGE + 5, "locks is expected to be a list"),
    "an allow that is false": (edited("allow = true", "allow = false"), line_of("allow = true"), 'true or "block"'),
    "a table for several tools": (edited('[tools."wire.send"]', '[tools."wire.*"]'), WIRE, "one tool"),
    "a tool outside the grammar": (edited('[tools."wire.send"]', '[tools."\\u00e9"]'), WIRE, "ASCII"),
    "a tool without quotes": (edited('[tools."wire.send"]', "[tools.wire.send]"), WIRE, "key send"),
    "a tool that is no table": ("version = 1\ntools.a = 3\n", 2, "[tools.a] is expected to be a table"),
    "tools that are no tables": ("version = 1\ntools = 3\n", 2, '[tools."NAME"] tables are expected'),
    "rules that are a table": ("version = 1\n[rules]\nname = 3\n", 2, "[[rules]] tables are expected"),
    "rules that are numbers": ("version = 1\nrules = [\n  1,\n]\n", 3, "[[rules]] 1 is expected to be a table"),
    "limits that are text": ('version = 1\nlimits = "none"\n', 2, "[[limits]] tables are expected"),
    "a breaker that is a number": ("version = 1\nbreaker = 3\n", 2, "[breaker] is expected to be a table"),
    "approvals that are a list": ("version = 1\napprovals = []\n", 2, "[approvals] is expected to be a table"),
    "a share above one": (edited("0.25", "1.5"), line_of("failure_rate"), "a share above 0, at most 1"),
    "a share of nothing": (edited("0.25", "0.0000001"), line_of("failure_rate"), "from 0.001 to 1"),
    "no failures at all": (edited("failure_threshold = 3", "failure_threshold = 0"), line_of("failure_t"), "from 1"),
    "a name over two lines": (edited('name = "large"', 'name = "la\\nrge"'), LARGE, "name is expected to be text"),
    "a date": (edited('reason = "a large charge"', "reason = 2026-01-01"), LARGE + 4, "reason is expected to be text"),
    "too deep": ("version = 1\na = " + "[" * 5000, 1, "nests too deep"),
    "a multi-line string before": ('version = 1\n[breaker]\nwindow = """\n[x]\ny = 1\n"""\ncool = 3\n', 7, "key cool"),
    "a comment that looks like a key": ("version = 1\n# hosts = 1\nhosts = 2\n", 3, "unknown key hosts"),
    "an escaped key": ('version = 1\n"h\\u006fsts" = 2\n', 2, "unknown key hosts"),
    "line ends of Windows": ("version = 1\r\n\r\nhosts = 2\r\n", 3, "unknown key hosts"),
    "a mark of UTF-8": ("\ufeffversion = 1\nhosts = 2\n", 2, "unknown key hosts"),
}  # fmt: skip


@PROMISE
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_by_file_and_line(tmp_path: Path, name: str) -> None:
    text, line, what = FAULTS[name]
    path = tmp_path / "policy.toml"
    path.write_bytes(text.encode())
    with pytest.raises(BadPolicyFile) as refusal:
        load(path)
    told = refusal.value.facts["complaints"]
    assert [one for one in told if one.line == line and what in one.what], told
    assert f"{path}:{told[0].line}: " in refusal.value.message and refusal.value.exit == 2


@PROMISE
def test_everything_that_is_wrong_is_told_at_once() -> None:
    text = edited("cap = 20", "cap = true").replace('"require_approval"', '"ask"').replace("failure_rate", "rate")
    with pytest.raises(BadPolicyFile) as refusal:
        read(text, "policy.toml")
    lines = [one.line for one in refusal.value.facts["complaints"]]
    assert lines == [LARGE + 3, line_of("cap = 20"), line_of("failure_rate")]
    assert "And 2 more." in refusal.value.message


def test_bytes_that_are_no_text_and_files_that_are_none_are_named(tmp_path: Path) -> None:
    for raw, line, what in (
        (b"version = 1\n# caf\xe9\n", 2, "UTF-8"),
        (b"#" * (SIZE_MAX + 1), 1, "larger than 256 KiB"),
    ):
        with pytest.raises(BadPolicyFile, match=what) as refusal:
            read_bytes(raw, "policy.toml")
        assert refusal.value.facts["line"] == line
    (tmp_path / "policy.toml").mkdir()
    with pytest.raises(BadPolicyFile, match="cannot be read|is no file"):
        load(tmp_path / "policy.toml")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadPolicyFile, match="it is no file"):
        load(tmp_path / "pipe")


# -- lines, and any tree at all ------------------------------------------------------------------------------------

KEYS = st.sampled_from([
    "version", "tools", "rules", "limits", "approvals", "breaker", "name", "kind", "cap", "window", "when", "arg",
    "over", "in", "scope", "semantics", "tags", "approval", "provenance", "locks", "allow", "level", "quorum",
    "escalate", "after", "targets", "stripe.charge", "a b", "é", 'q"u', "back\\slash", "",
]) | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=3)  # fmt: skip
ATOMS = (
    st.booleans() | st.integers(-(10**30), 10**30) | st.floats()
    | st.sampled_from(["budget", "rate", "1h", "block", "allow", "tool", "presence", "stripe.*", "amount", "100.00"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.datetimes() | st.dates()
)  # fmt: skip
TREES = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=25
)
DOCUMENTS = st.dictionaries(KEYS, TREES, max_size=6)


class Writer:
    """A TOML writer that remembers on which line it put what, in every way in which TOML lets one write it."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.lines: list[str] = [""]
        self.placed: dict[tuple[str | int, ...], int] = {}

    def put(self, text: str) -> None:
        first, *rest = text.split("\n")
        self.lines[-1] += first
        self.lines += rest

    def gap(self) -> None:
        self.put(self.draw(st.sampled_from(["", " ", "", "\t"])))

    def place(self, path: tuple[str | int, ...]) -> None:
        self.placed.setdefault(path, len(self.lines))

    def key(self, key: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9_-]+", key) and self.draw(st.booleans()):
            return key
        if "'" not in key and self.draw(st.booleans()):
            return f"'{key}'"
        return json.dumps(key, ensure_ascii=self.draw(st.booleans()) and key.isascii())

    def document(self, document: dict[str, Any]) -> str:
        plain = {key: value for key, value in document.items() if not self.as_table(value)}
        tables = {key: value for key, value in document.items() if key not in plain}
        self.assignments((), plain)
        for key, value in tables.items():
            self.table((key,), value)
        return "\n".join(self.lines)

    def as_table(self, value: Any) -> bool:
        several = isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
        return (isinstance(value, dict) or several) and bool(self.draw(st.booleans()))

    def table(self, path: tuple[str | int, ...], value: Any) -> None:
        for place, one in enumerate(value if isinstance(value, list) else [value]):
            self.put(self.draw(st.sampled_from(["", "# [no] table = 1\n", "\n"])))
            head = ".".join(self.key(part) for part in path if isinstance(part, str))
            here = (*path, place) if isinstance(value, list) else path
            self.place(path)
            self.place(here)
            self.put(f"[[{head}]]" if isinstance(value, list) else f"[{head}]")
            self.put(self.draw(st.sampled_from(["\n", " # c\n"])))
            self.assignments(here, one)

    def assignments(self, path: tuple[str | int, ...], table: dict[str, Any]) -> None:
        for key, value in table.items():
            self.gap()
            self.assign(path, key, value, "\n")
            self.put(self.draw(st.sampled_from(["\n", " # x = 1\n", "\n\n"])))

    def assign(self, path: tuple[str | int, ...], key: str, value: Any, end: str) -> None:
        self.place((*path, key))
        if isinstance(value, dict) and len(value) == 1 and self.draw(st.booleans()):  # a dotted key
            [(inner, value)] = value.items()
            self.put(f"{self.key(key)}.")
            self.assign((*path, key), inner, value, end)
            return
        self.put(f"{self.key(key)} = ")
        self.value((*path, key), value)

    def value(self, path: tuple[str | int, ...], value: Any) -> None:
        self.place(path)
        if isinstance(value, dict):
            self.put("{")
            for count, (key, one) in enumerate(value.items()):
                self.put(", " if count else " ")
                self.assign(path, key, one, "")
            self.put(" }")
        elif isinstance(value, list):
            self.put("[")
            for count, one in enumerate(value):
                self.put(self.draw(st.sampled_from(["", "\n", " # ]\n  "])))
                self.value((*path, count), one)
                self.put(",")
            self.put("]")
        else:
            self.put(self.atom(value))

    def atom(self, value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int | float):
            return repr(value)
        if not isinstance(value, str):
            return str(value.isoformat())
        if self.draw(st.booleans()) and "'''" not in value and "\r" not in value and value.isprintable():
            return f"'''{value} '''"
        said = json.dumps(value).replace("\x7f", "\\u007f")
        if "\\ud" in said:  # JSON's pairs of surrogates are no escapes of TOML
            said = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        return f'"""\n{said[1:-1]}"""' if self.draw(st.booleans()) else said


@st.composite
def texts(draw: Any) -> tuple[str, dict[tuple[str | int, ...], int]]:
    writer = Writer(draw)
    return writer.document(draw(DOCUMENTS)), writer.placed


@given(texts())
def test_every_key_of_any_document_is_found_on_its_line(made: tuple[str, dict[tuple[str | int, ...], int]]) -> None:
    text, placed = made
    tomllib.loads(text)
    found = lines_of(text)
    assert {path: found.get(path) for path in placed} == placed
    assert set(found) - {()} == {path[:length] for path in placed for length in range(1, len(path) + 1)}


def in_bounds(text: str, raw: bytes) -> PolicyFile | None:
    """Read it; a complaint is on a line of the text."""
    try:
        return read_bytes(raw, "policy.toml")
    except BadPolicyFile as error:
        told = error.facts["complaints"]
        assert told and all(1 <= one.line <= text.count("\n") + 1 and one.what for one in told), told
        return None


@PROMISE
@given(texts())
def test_any_tree_is_read_or_refused_with_a_line(made: tuple[str, Any]) -> None:
    for text in (made[0], f"version = 1\n{re.sub(r'(?m)^.?version.? = .*$', '', made[0])}"):
        in_bounds(text, text.encode())


@st.composite
def mutated(draw: Any) -> str:
    """The good file with some of its pieces taken out, doubled, swapped or replaced by something else."""
    pieces = re.findall(r'"[^"]*"|[\w.]+|\s+|.', GOOD)
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(pieces) - 1))
        other = draw(st.integers(0, len(pieces) - 1))
        new = st.sampled_from(
            [[], [pieces[place]] * 2, [pieces[other]], ["-1"], ["true"], ["nan"], ['""'], ["[]"], ["{}"]]
        )
        pieces[place : place + 1] = draw(new | st.text(max_size=4).map(lambda text: [text]))
    return "".join(pieces)


@PROMISE
@given(mutated())
def test_a_damaged_file_is_read_or_refused_with_a_line(text: str) -> None:
    raw = text.encode(errors="surrogatepass")
    found = in_bounds(text, raw)
    if found is not None:
        digest_of(found)
        ruling(found.rules, call("stripe.charge", amount=5))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_with_a_line(raw: bytes) -> None:
    in_bounds(raw.decode("latin-1"), raw)


# -- what it says of a call ----------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> Policy:
    return Policy(written(tmp_path, GOOD))


@PROMISE
def test_a_call_is_prepared_by_the_file(good: Policy) -> None:
    asked = ask(good, call("stripe.charge", amount=150, customer="c1", memo="x"))
    assert asked.refused is None and asked.policy == good.digest != "" and asked.tags == ("money",)
    assert (asked.ruling.verdict, asked.ruling.rule, asked.ruling.reason) == (ASK, "large", "a large charge")
    assert asked.tier == Tier(3, 2, ("approver",), 12 * 3_600_000, ((3_600_000, ("@on",)),), False, True)
    assert [(debit.limit, debit.amount, debit.ask) for debit in asked.debits] == [
        ("a day", 15000, True),
        ("velocity", 1, False),
    ]
    assert asked.locks == (meter("lock\0customer:c1"),) and asked.breaker == BreakerPolicy(3, 120.0, 4, 0.25, 0.5, 2)
    assert ask(good, call("stripe.charge", amount=100, customer="c1")).ruling.verdict == ALLOW


VERDICTS = [
    ("the table allows it by name", call("wire.send", IRREVERSIBLE, amount=5), ALLOW, ""),
    ("nothing is said of it", call("mail.send", IRREVERSIBLE), ASK, ""),
    ("nothing is said of it and it can be undone", call("mail.send"), ALLOW, ""),
    ("the table blocks it", call("db.drop", REVERSIBLE), REFUSE, "blocked"),
    ("the payee is not on the list", call("wire.send", IRREVERSIBLE, "money", to="XX", amount=9), REFUSE, "blocked"),
    ("the payee is on the list", call("wire.send", IRREVERSIBLE, "money", to="DE12", amount=9), ALLOW, ""),
    ("the payee is missing", call("wire.send", IRREVERSIBLE, "money", amount=9), REFUSE, "no_such_argument"),
    ("the amount is no number", call("stripe.refund", amount="lots"), REFUSE, "rule_raised"),
    ("one of many has no amount", call("stripe.refund"), ALLOW, ""),
]


@PROMISE
@pytest.mark.parametrize(("what", "asked", "verdict", "code"), VERDICTS, ids=[row[0] for row in VERDICTS])
def test_what_the_file_says_of_a_call(good: Policy, what: str, asked: GateCall, verdict: str, code: str) -> None:
    said = ask(good, asked).ruling
    assert (said.verdict, said.code) == (verdict, code)


OPERATORS = [
    ('over = "1.10"', ["1.11", 2, 1.2], ["1.10", 1.1, Decimal("1.1")]),
    ("over = 1.10", ["1.11", 2, 1.2], ["1.10", 1.1, Decimal("1.1")]),
    ("under = 3", [2, -1, 2.999], [3, 3.0, 4]),
    ('is = "eur"', ["eur"], ["EUR", 5, None]),
    ("is = 5", [5, 5.0, Decimal(5)], ["5", 6, True]),
    ("is = true", [True], [1, "true", False]),
    ('in = ["a", 5]', ["a", 5], ["b", "5", None]),
    ('not_in = ["a", 5]', ["b", "5", None], ["a", 5]),
]


@pytest.mark.parametrize(("condition", "yes", "no"), OPERATORS, ids=[row[0] for row in OPERATORS])
def test_a_condition_is_exact(tmp_path: Path, condition: str, yes: list[Any], no: list[Any]) -> None:
    text = f'[[rules]]\nname = "x"\nwhen = {{ arg = "a", {condition} }}\nverdict = "require_approval"\n'
    found = policy(text, tmp_path)
    assert [value for value in yes if ask(found, call("t", a=value)).ruling.verdict != ASK] == []
    assert [value for value in no if ask(found, call("t", a=value)).ruling.verdict != ALLOW] == []


@PROMISE
def test_a_block_in_a_tools_table_comes_before_every_rule_and_an_allow_after_them(tmp_path: Path) -> None:
    text = '[tools."a.x"]\nallow = {}\n[[rules]]\nname = "all"\nverdict = "{}"\n'
    assert ask(policy(text.format('"block"', "allow"), tmp_path), call("a.x")).ruling.verdict == REFUSE
    assert ask(policy(text.format("true", "block"), tmp_path), call("a.x")).ruling.verdict == REFUSE
    assert (
        ask(policy(text.format("true", "require_approval"), tmp_path), call("a.x", IRREVERSIBLE)).ruling.rule == "all"
    )


@PROMISE
def test_semantics_that_code_and_file_do_not_agree_on_are_refused_with_both(good: Policy) -> None:
    refused = ask(good, call("stripe.charge", REVERSIBLE, amount=5, customer="c")).refused
    assert refused is not None and refused.code == "semantics_differ"
    assert "reversible" in refused.said and "compensable" in refused.said
    assert refused.facts == {"in_code": "reversible", "in_file": "compensable"}


@pytest.mark.promise("2.7")
def test_the_file_says_where_arguments_come_from(good: Policy) -> None:
    def charge(**tags: str) -> Any:
        asked = GateCall("stripe.charge", COMPENSABLE, {"amount": 5, "customer": "c", "memo": "m"}, provenance=tags)
        return ask(good, asked).refused

    assert charge(amount="user", memo="derived") is None
    assert charge(amount="sourced", memo="user") is None
    assert charge(memo="user").code == "provenance_missing"
    assert charge(amount="derived", memo="user").code == "provenance_missing"
    assert charge(amount="user").code == "provenance_prohibited", "untagged counts as model"


def test_a_lock_that_lacks_its_argument_is_refused(good: Policy) -> None:
    refused = ask(good, call("stripe.charge", amount=5)).refused
    assert refused is not None and refused.code == "no_such_argument"


@PROMISE
def test_a_limit_on_named_tools_needs_the_amount_and_one_on_many_takes_those_that_have_it(tmp_path: Path) -> None:
    text = '[[limits]]\nname = "x"\nkind = "budget"\ncap = 5\nwindow = "1h"\ntools = ["a.pay", "b.*"]\n'
    found = policy(text, tmp_path)
    refused = ask(found, call("a.pay")).refused
    assert refused is not None and refused.code == "bad_amount"
    assert ask(found, call("b.list")).debits == () and ask(found, call("b.list")).refused is None
    assert [debit.amount for debit in ask(found, call("b.pay", amount="1.25")).debits] == [125]
    assert ask(found, call("c.pay", amount=1)).debits == ()


# -- beside the gate in code ---------------------------------------------------------------------------------------

FILE_RULE = '[[rules]]\nname = "file"\nverdict = "{}"\n'
CODE_RULE = {verdict.value.lower(): Rule("code", always, verdict) for verdict in Verdict}
STRICT = {"allow": 0, "require_approval": 1, "block": 2}


@PROMISE
@pytest.mark.parametrize("code", STRICT)
@pytest.mark.parametrize("file", STRICT)
def test_of_file_and_code_the_stricter_holds(tmp_path: Path, file: str, code: str) -> None:
    said = ask(policy(FILE_RULE.format(file), tmp_path, PreFlightGate([CODE_RULE[code]])), call("t")).ruling
    assert [ALLOW, ASK, REFUSE].index(said.verdict) == max(STRICT[file], STRICT[code])


@PROMISE
def test_the_file_may_name_what_the_default_rules_in_code_ask_about(tmp_path: Path) -> None:
    named = '[tools."mail.send"]\nallow = true\n'
    assert ask(policy(named, tmp_path, PreFlightGate()), call("mail.send", IRREVERSIBLE)).ruling.verdict == ALLOW
    assert ask(policy(named, tmp_path, PreFlightGate()), call("mail.drop", IRREVERSIBLE)).ruling.verdict == ASK
    gate = PreFlightGate([Rule("code", tool_is("mail.send"), Verdict.ALLOW)])
    assert ask(policy("", tmp_path, gate), call("mail.send", IRREVERSIBLE)).ruling.verdict == ALLOW
    assert ask(policy(FILE_RULE.format("allow"), tmp_path), call("mail.send", IRREVERSIBLE)).ruling.verdict == ASK


LIMITED = '[[limits]]\nname = "{}"\nkind = "rate"\ncap = 5\nwindow = "1h"\n'


@PROMISE
def test_the_limits_of_both_hold_and_no_two_share_a_name(tmp_path: Path) -> None:
    gate = PreFlightGate(limits=[RateLimit("code", max_calls=9, window=60)])
    found = policy(LIMITED.format("file"), tmp_path, gate)
    assert [(debit.limit, debit.cap) for debit in ask(found, call("t")).debits] == [("code", 9), ("file", 5)]
    assert [limit.name for limit in found.limits] == ["code", "file"]
    with pytest.raises(BadPolicyFile, match=":3: code is the name of a limit in code"):
        policy(LIMITED.format("code"), tmp_path, gate)


@PROMISE
def test_an_approval_satisfies_both(tmp_path: Path) -> None:
    gate = PreFlightGate(approval=ApprovalPolicy(timeout=3600, level="file", roles=("admin",)))
    text = '[approvals]\nlevel = "verification"\nroles = {}\n[tools.a]\napproval = {{ quorum = 3 }}\n'
    found = policy(text.format('["approver", "admin"]'), tmp_path, gate)
    assert ask(found, call("b")).tier == Tier(4, 1, ("admin",), 3_600_000, settled=True)
    assert ask(found, call("a")).tier == Tier(4, 3, ("admin",), 3_600_000, settled=True)
    with pytest.raises(BadPolicyFile, match=":4: none of the roles") as refusal:
        policy(text.format('["approver"]'), tmp_path, gate)
    assert refusal.value.facts["line"] == 4


def test_the_breaker_is_that_of_the_file_where_it_has_one(tmp_path: Path) -> None:
    gate = PreFlightGate(breaker=BreakerPolicy(failure_threshold=9))
    assert ask(policy("", tmp_path, gate), call("t")).breaker == BreakerPolicy(failure_threshold=9)
    assert ask(policy("[breaker]\nfailure_threshold = 2\n", tmp_path, gate), call("t")).breaker.failure_threshold == 2
    assert ask(policy("", tmp_path), call("t")).breaker is None


def test_tags_of_code_and_file_are_one_set(tmp_path: Path) -> None:
    text = '[tools.a]\ntags = ["money"]\n[[rules]]\nname = "x"\ntags = ["mail"]\nverdict = "block"\n'
    gate = PreFlightGate([Rule("code", lambda asked: "money" in asked.tags, Verdict.REQUIRE_APPROVAL)])
    said = ask(policy(text, tmp_path, gate), call("a", COMPENSABLE, "mail"))
    assert said.tags == ("mail", "money") and said.ruling.verdict == REFUSE
    assert ask(policy(text, tmp_path, gate), call("a")).ruling.rule == "code"
    long = ask(policy(text, tmp_path), call("a", COMPENSABLE, "m" * 256))
    assert long.refused is not None and long.refused.code == "schema"


@PROMISE
def test_a_verdict_carries_the_digest_of_the_policy_in_force(tmp_path: Path) -> None:
    gate = PreFlightGate([Rule("code", arg_exceeds("a", 5), Verdict.BLOCK)])
    text = '[[rules]]\nname = "x"\nwhen = {{ arg = "a", over = {} }}\nverdict = "block"\n'
    digests = [
        ask(Policy(None), call("t")).policy,
        ask(Policy(tmp_path / "none.toml"), call("t")).policy,
        ask(Policy(None, gate), call("t")).policy,
        ask(policy(text.format("5"), tmp_path), call("t")).policy,
        ask(policy(text.format("6"), tmp_path), call("t")).policy,
        ask(policy(text.format("5"), tmp_path, gate), call("t")).policy,
        ask(policy("", tmp_path), call("t")).policy,
    ]
    assert digests[:2] == ["", ""] and len(set(digests[1:])) == 6
    spelled = policy(text.format("5") + "# a comment\n", tmp_path)
    assert ask(spelled, call("t")).policy == digests[3]


def test_no_policy_costs_no_look_at_the_call(tmp_path: Path) -> None:
    class Untouchable(dict[str, Any]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("looked at")

    asked = GateCall("t", REVERSIBLE, Untouchable(a=1))
    for found in (Policy(None), Policy(tmp_path / "none.toml")):
        assert ask(found, asked) == Question("t", "reversible", "s", "r")


# -- a file that changes -------------------------------------------------------------------------------------------

BLOCK = "version = 1\n" + FILE_RULE.format("block")
FREE = "version = 1\n" + FILE_RULE.format("allow")


@PROMISE
def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, FREE)
    found = Policy(path)
    before = found.digest
    assert ask(found, call("t")).ruling.verdict == ALLOW
    path.write_text(BLOCK)
    assert ask(found, call("t")).ruling.verdict == REFUSE and found.digest != before
    other = tmp_path / "new.toml"
    other.write_text(FREE)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    os.replace(other, path)
    assert ask(found, call("t")).ruling.verdict == ALLOW and found.digest == before


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Policy(written(tmp_path, BLOCK))
    monkeypatch.setattr("amends.runtime.gate.policy_reader.load", None)
    assert ask(found, call("t")).ruling.verdict == REFUSE


@PROMISE
def test_a_file_that_comes_later_counts_from_then_on(tmp_path: Path) -> None:
    found = Policy(tmp_path / "policy.toml")
    assert ask(found, call("t")).ruling.verdict == ALLOW and found.digest == ""
    written(tmp_path, BLOCK)
    assert ask(found, call("t")).ruling.verdict == REFUSE and found.digest


SPOILED = {
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to(path.parent / "nothing")),
    "broken": lambda path: path.write_text("version = 1\ntoolz = 3\n"),
    "cut short": lambda path: path.write_text(""),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "no text": lambda path: path.write_bytes(b"\xff"),
}


@PROMISE
@pytest.mark.parametrize("how", SPOILED)
def test_a_file_that_goes_wrong_refuses_every_new_step_until_it_is_put_right(tmp_path: Path, how: str) -> None:
    path = written(tmp_path, FREE)
    found = Policy(path, PreFlightGate())
    before = found.digest
    SPOILED[how](path)
    for _ in range(2):
        refused = ask(found, call("t")).refused
        assert refused is not None and refused.code == "policy_unreadable" and str(path) in refused.said
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_text(FREE)
    assert ask(found, call("t")).refused is None and found.digest == before


@PROMISE
def test_a_file_that_is_wrong_when_it_is_opened_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(BadPolicyFile, match=r"policy\.toml:2: unknown key toolz; did you mean tools\?"):
        Policy(written(tmp_path, "version = 1\ntoolz = 3\n"))
    assert issubclass(BadPolicyFile, YouErred)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_no_empty_policy(tmp_path: Path) -> None:
    path = written(tmp_path, BLOCK)
    found = Policy(path)
    path.chmod(0)
    assert ask(found, call("t")).refused is not None
    path.chmod(0o600)
    assert ask(found, call("t")).ruling.verdict == REFUSE


# -- through a kit -------------------------------------------------------------------------------------------------


def spoken(kit: AgentKit, kind: str) -> list[Any]:
    return [record.entry for record in kit.log.records() if record.entry.kind == kind]


@PROMISE
def test_what_the_file_says_holds_for_steps_and_is_recorded_with_its_digest(home: Path) -> None:
    called: list[str] = []
    written(home, GOOD)
    with AgentKit(home=home) as kit, kit.transaction() as saga:
        saga.execute("wire.send", lambda: called.append("wire"), semantics=IRREVERSIBLE)
        for tool, sem, code in (
            ("db.drop", COMPENSABLE, "blocked"),
            ("stripe.charge", IRREVERSIBLE, "semantics_differ"),
            ("stripe.charge", COMPENSABLE, "provenance_missing"),
        ):
            with pytest.raises(Refused) as refused:
                saga.execute(tool, lambda amount=5: called.append("never"), {"amount": 5}, semantics=sem)
            assert refused.value.code == code
        digest = kit.engine.policy.digest
        assert called == ["wire"] and digest
        assert [entry.why for entry in spoken(kit, "step.refused")] == [
            "blocked",
            "semantics_differ",
            "provenance_missing",
        ]
        assert {entry.policy for kind in ("step.refused", "step.intended") for entry in spoken(kit, kind)} == {digest}


@PROMISE
def test_a_file_that_went_wrong_stops_new_steps_and_no_undoing(home: Path) -> None:
    undone: list[str] = []
    with AgentKit(home=home) as kit:
        with pytest.raises(SagaAborted) as aborted, kit.transaction() as saga:
            saga.execute("a.b", dict, semantics=COMPENSABLE, undo=Compensation(lambda: undone.append("a.b")))
            written(home, "version = 1\ntoolz = 1\n")
            saga.execute("a.c", dict, semantics=REVERSIBLE)
        assert isinstance(aborted.value.cause, Refused) and aborted.value.cause.code == "policy_unreadable"
        assert undone == ["a.b"] and aborted.value.report.clean
        written(home, "version = 1\n")
        with kit.transaction() as saga:
            saga.execute("a.c", dict, semantics=REVERSIBLE)


@PROMISE
def test_an_agent_does_not_start_on_a_file_that_is_wrong(home: Path) -> None:
    written(home, "version = 1\ntoolz = 1\n")
    with pytest.raises(BadPolicyFile, match=r":2: unknown key toolz"):
        AgentKit(home=home)
    written(home, "version = 1\n")
    AgentKit(home=home).close()


# -- the command line ----------------------------------------------------------------------------------------------


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(args))
    return done.exit_code, done.stdout


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def test_check_says_what_a_file_holds_agents_to(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    code, said = run("policy", "check", str(path))
    assert code == 0 and f"{path} is sound; its digest is {digest_of(load(path)[0])}." in said
    for line in (
        "compensable; tagged money; a yes takes 2 people (approver) by presence within 12 h, @on told after 1 h, "
        "no breaking the glass; amount is user or sourced; memo is user or sourced or derived; "
        "claims customer:{customer}",
        "large            stripe.*, amount over 100: a person is asked (a large charge)",
        "tools.db.drop    db.drop: blocked (nobody drops a database from here)",
        "a day     at most 500.10 eur of amount in 1 d, per customer, per tool, of calls to stripe.*, with amount; "
        "over it a person is asked",
        "velocity  at most 20 calls in 1 min, of calls to tagged money",
        "a person by presence within 12 h",
        "failure_threshold 3, window 120 s, min_volume 4, failure_rate 0.25, cool_down 0.5 s, half_open_probes 2",
    ):
        assert line in said


@PROMISE
def test_check_says_everything_that_is_wrong_by_line_and_leaves_with_2(tmp_path: Path) -> None:
    path = written(tmp_path, 'version = 1\n[[limits]]\nname = "a\x7f"\n[brake]\n')
    code, said = run("policy", "check", str(path))
    assert code == 2 and said.count(f"{path}:") == said.count("\n") >= 1
    path = written(tmp_path, 'version = 1\n[[limits]]\nnaem = "a"\n[brake]\n')
    code, said = run("policy", "check", str(path))
    assert code == 2 and f"{path}:3: unknown key naem in [[limits]] 1; did you mean name?\n" in said
    assert f"{path}:4: unknown key brake; did you mean breaker?\n" in said
    code, said = run("policy", "check", "--json", str(path))
    document = json.loads(said)
    assert code == 2 and document["ok"] is False and {one["line"] for one in document["complaints"]} == {2, 3, 4}


def test_check_reads_the_file_of_the_home_and_says_when_there_is_none(home: Path) -> None:
    code, said = run("policy", "check")
    assert code == 0 and "There is no" in said and "irreversible tools ask a person" in said
    assert json.loads(run("policy", "check", "--json")[1])["digest"] == ""
    written(home, GOOD)
    code, said = run("policy", "check", "--json")
    document = json.loads(said)
    assert code == 0 and document["ok"] and document["complaints"] == []
    assert document["tools"]["stripe.charge"]["approval"] == {
        "level": "presence", "quorum": 2, "roles": ["approver"], "within_ms": 43_200_000, "break_glass": False,
        "escalate": [{"after_ms": 3_600_000, "targets": ["@on"]}],
    }  # fmt: skip
    assert [rule["verdict"] for rule in document["rules"]] == ["BLOCK", "REQUIRE_APPROVAL", "BLOCK", "ALLOW"]
    assert document["breaker"]["cool_down"] == 0.5 and document["approvals"]["quorum"] == 1


def test_a_file_that_is_not_there_is_usage_where_it_was_named(tmp_path: Path) -> None:
    assert run("policy", "check", str(tmp_path / "none.toml"))[0] == 2


def test_show_says_what_is_about_one_tool(home: Path) -> None:
    assert run("policy", "show")[0] == 0
    written(home, GOOD)
    code, said = run("policy", "show")
    assert code == 0 and "is in force; its digest is" in said
    code, said = run("policy", "show", "mail.send")
    assert code == 0 and "large" not in said and "a day" not in said and "velocity" in said
    code, said = run("policy", "show", "stripe.charge")
    assert code == 0 and "large" in said and "a day" in said and "db.drop" not in said and "known payees" not in said
    written(home, "version = 2\n")
    assert run("policy", "show")[0] == 2
    assert json.loads(run("policy", "show", "--json")[1])["error"]["code"] == "bad_policy_file"


def test_looking_at_a_policy_makes_no_home(tmp_path: Path) -> None:
    run("policy", "check")
    run("policy", "show", "x")
    assert not (tmp_path / "home").exists()


def test_what_a_file_says_reaches_the_terminal_without_its_escapes(tmp_path: Path) -> None:
    path = written(tmp_path, 'version = 1\n"\\u001b[2J" = 1\n[tools.a]\nreason = "\\u202e"\n')
    code, said = run("policy", "check", str(path))
    assert code == 2 and "\x1b" not in said and "\u202e" not in said and "\\x1b[2J" in said


# -- the guide -----------------------------------------------------------------------------------------------------


@PROMISE
def test_the_policy_file_of_the_guide_is_read_and_names_every_key() -> None:
    guide = (ROOT / "runtime/GUIDE.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```toml policy\.toml\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    found = read(block, "policy.toml")
    assert found.tools and found.rules and found.limits and found.breaker and found.approvals
    keys = {*APPROVAL, *ESCALATION, *TOOL, *RULE, *CONDITION, *LIMIT, *BREAKER}
    assert not [key for key in keys if not re.search(rf"\b{key}\b", block)]
