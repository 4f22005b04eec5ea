"""Who was asked whether a step may happen, and what each of them said: every vote, read back where the log names it.

A vote is not a record of its saga (it may come from another device): it names the saga and the request. While the saga
is open the fold knows those that came in time; of one that has ended, and of what came too late, the records behind the
question are looked through. A vote that decided nothing is told as well, and why it did not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..store.log import Record
from .gate.approvals import DENY, each
from .gate.levels import LEVELS, NAMED
from .gate.signing import dead_votes, words_of
from .openings import raw_fields, whole

if TYPE_CHECKING:
    from .kit import AgentKit

LATE = 20_000
"""How many records behind the last one of a saga are looked through for votes that came too late."""


class Decision(NamedTuple):
    """One vote: by whom, what (approve, deny, break_glass), on which evidence, with which key (empty for a name).

    void: why it did not count, empty if it did: what stood of the request when it came (`expired`, `denied` …),
    `not_used` for a yes that was in time, where the step started without it, `dead` where the key counts no more.
    """

    seq: int
    at: int
    step: int
    by: str
    verdict: str
    level: str
    key: str
    note: str
    request: str
    void: str

    @property
    def evidence(self) -> str:
        """What it rests on, in words."""
        return f"{self.level}, key {self.key}" if self.key else self.level


def votes_of(kit: AgentKit, saga: str, records: Sequence[Record]) -> list[Record]:
    """Every vote about the steps of a saga (header id, with its records), oldest first."""
    asked = [record.entry.seq for record in records if record.entry.kind == "step.asked"]
    if not asked:
        return []
    stop = records[-1].entry.seq + LATE if saga not in kit.engine.state.sagas else None
    found = (record for record in kit.log.records(asked[0], stop) if record.entry.kind == "vote.cast")
    return list(whole(record for record in found if record.entry.of == saga))


def decisions(kit: AgentKit, saga: str, votes: Sequence[Record], records: Sequence[Record]) -> list[Decision]:
    """The votes about a saga as they are told; records: those of the saga."""
    spent = {
        record.entry.request: _named(record)
        for record in records
        if record.entry.kind == "step.intended" and record.entry.request
    }
    waiting = [asked for asked in kit.engine.state.approvals.open if asked.saga == saga and asked.votes]
    dead = frozenset(seq for asked in waiting for seq in dead_votes(kit, asked))
    return [_decision(record, spent, dead) for record in votes]


def _named(record: Record) -> list[int]:
    """The votes that an intent spent."""
    raw = raw_fields(record.blob).get("votes")
    return msgspec.json.decode(raw, type=list[int]) if raw else []


def _decision(record: Record, spent: dict[str, list[int]], dead: frozenset[int]) -> Decision:
    entry = record.entry
    by, note = words_of(record)
    level = LEVELS.get(entry.level, LEVELS[NAMED])[0]
    unused = entry.out != DENY and entry.seq not in spent.get(entry.request, [entry.seq])
    return Decision(
        entry.seq, entry.at, entry.step, by or "Somebody", entry.out, level, entry.credential, note, entry.request,
        entry.why or ("not_used" if unused else "dead" if entry.seq in dead else ""),
    )  # fmt: skip


def asked_of(level: int, quorum: int) -> str:
    """Whom a question of this level asks, on which evidence, in words."""
    who = "a named person" if quorum <= 1 else f"{quorum} different people"
    if level <= NAMED:
        return who
    return f"{who}, {'each ' if quorum > 1 else ''}with {LEVELS.get(each(level), LEVELS[NAMED])[1]}"
