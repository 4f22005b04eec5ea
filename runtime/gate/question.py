"""A call as the gate sees it: everything that can be asked of the call alone, asked beforehand, as values.

Predicates, scorers and getters are the user's code: they run on the caller's thread before the transaction, and what
they answered is in the `Question`. What needs state is ours and pure, and runs inside (`pipeline.judge`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from ..semantics import ActionSemantics


@dataclass(frozen=True, slots=True)
class GateCall:
    """What a predicate, a scorer or a getter is shown. provenance: argument -> user, sourced, derived or model."""

    tool: str
    semantics: ActionSemantics
    kwargs: Mapping[str, Any]
    tags: frozenset[str] = frozenset()
    saga: str = ""
    agent: str = ""
    on_behalf_of: str = ""
    provenance: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


class Refusal(NamedTuple):
    """Why not: a stable code, what was refused, what would make it acceptable, and plain facts for a model."""

    code: str
    said: str
    next: str
    facts: Mapping[str, Any] = MappingProxyType({})


class Debit(NamedTuple):
    """What a call takes from one limit. amount and cap in units of 10**-scale; meter: the limit's name, with a scope
    `name/<16 hex>`. velocity: counted again for each attempt. ask: over the cap a person is asked."""

    limit: str
    meter: str
    amount: int
    cap: int
    window_ms: int
    unit: str = ""
    scale: int = 0
    velocity: bool = False
    ask: bool = False


class Tier(NamedTuple):
    """The approval that a call needs: the lowest evidence level (levels.py), how many distinct people with which of the
    roles, until when (milliseconds), and after how many milliseconds each escalation level is told."""

    level: int
    quorum: int = 1
    roles: tuple[str, ...] = ()
    within_ms: int = 24 * 3600 * 1000
    levels: tuple[tuple[int, tuple[str, ...]], ...] = ()  # (after_ms, targets)
    break_glass: bool = True
    settled: bool = False  # level was stated by name; else an enrolled key raises it


ALLOW, ASK, REFUSE = "allow", "ask", "refuse"


class Ruling(NamedTuple):
    """What the rules say of a call: allow, ask or refuse; named: a rule that allows this very tool by its name."""

    verdict: str = ALLOW
    rule: str = ""
    reason: str = ""
    named: bool = False
    code: str = ""


class Question(NamedTuple):
    """One call put to the gate. saga and root are header ids; locks are 16 hex digits; policy is the digest of the
    policy in force, 16 hex digits, or empty. refused: what was wrong with the call before any state was looked at.
    ring: why the keyring counts for nothing, asked for what is irreversible."""

    tool: str
    sem: str
    saga: str
    root: str
    tags: tuple[str, ...] = ()
    ruling: Ruling = Ruling()
    debits: tuple[Debit, ...] = ()
    locks: tuple[str, ...] = ()
    breaker: Any = None
    tier: Tier | None = None
    policy: str = ""
    refused: Refusal | None = None
    ring: Refusal | None = None
    attempt: int = 1
    begins: bool = False  # the saga is not open yet: its first step

    @property
    def metered(self) -> bool:
        """Whether it has to be judged inside the write transaction."""
        return bool(self.debits or self.locks or self.breaker or self.refused) or self.ruling.verdict != ALLOW


class Reason(NamedTuple):
    """Why a person is asked. by: the limit or the rule that asks, the same however its words change."""

    by: str
    said: str


class Verdict(NamedTuple):
    """allow, ask or refuse. asks: why a person is asked."""

    verdict: str
    refusal: Refusal | None = None
    asks: tuple[Reason, ...] = ()
