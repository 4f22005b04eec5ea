"""Who let a step happen, or kept it from happening: the votes that counted, read back where the log names them.

A vote is not a record of its saga (it may come from another device); the step's intent names the votes that it spent,
a refusal the one that denied it, and while people are asked the fold knows those that were cast. Votes that came too
late are in the log and in no story: they decided nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..store.log import Record
from .gate.levels import LEVELS, NAMED
from .gate.signing import words_of
from .openings import raw_fields

if TYPE_CHECKING:
    from .kit import AgentKit


class Decision(NamedTuple):
    """One vote: by whom, what (approve, deny, break_glass), on which evidence, with which key (empty for a name)."""

    seq: int
    at: int
    step: int
    by: str
    verdict: str
    level: str
    key: str
    note: str

    @property
    def evidence(self) -> str:
        """What it rests on, in words."""
        return f"{self.level}, key {self.key}" if self.key else self.level


def votes_of(kit: AgentKit, saga: str, records: Sequence[Record]) -> list[Record]:
    """The votes that decided about the steps of a saga (header id, with its records), oldest first."""
    found = {seq for record in records for seq in _named(record)}
    for asked in kit.engine.state.approvals.open:
        if asked.saga == saga:
            found |= {vote.seq for vote in asked.votes}
    return [kit.log.record(seq) for seq in sorted(found)]


def _named(record: Record) -> list[int]:
    """The votes that a record of a saga names."""
    entry = record.entry
    if entry.kind == "step.refused" and entry.ref:
        return [entry.ref]
    if entry.kind != "step.intended" or not entry.request:
        return []
    raw = raw_fields(record.blob).get("votes")
    return msgspec.json.decode(raw, type=list[int]) if raw else []


def decision(record: Record) -> Decision:
    """A vote as it is told."""
    entry = record.entry
    by, note = words_of(record)
    level = LEVELS.get(entry.level, LEVELS[NAMED])[0]
    return Decision(entry.seq, entry.at, entry.step, by or "Somebody", entry.out, level, entry.credential, note)
