"""A clock that was set back starts nothing irreversible: what has a deadline could be spent after it.

The newest time in the log is a mark that the wall clock has passed once. While it stands more than two minutes behind
that mark, irreversible calls are refused (`clock_went_back`), those too that nobody has to approve. Either the clock is
set right, or a person says that it is right and the mark is wrong; from then on the mark is the time that they accepted
and what was lived since, until the clock has overtaken the log.

Everything else goes on: windows and deadlines run on lived time, which no clock moves back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...store.chain import Draft
from ...store.clock import Now
from ...store.entry import Entry
from ...store.errors import BadValue, Refused
from ..facts import body, fact
from ..openings import when
from ..plain import blank, named
from ..semantics import ActionSemantics
from ..values import encode
from .question import Question, Refusal

if TYPE_CHECKING:
    from ..kit import AgentKit
    from ..state import State

SLACK_US = 120 * 1_000_000
"""So far behind the mark the wall clock may stand."""


class Accepted:
    """The last time that a person accepted the clock: `at` of the record (microseconds), by how many milliseconds the
    clock stood behind it, and lived milliseconds then. Zeros if nobody ever did."""

    KINDS = ("clock.accepted",)

    def __init__(self) -> None:
        self.at, self.by_ms, self.lived = 0, 0, 0

    def fold(self, entry: Entry, lived: int, state: State) -> None:
        self.at, self.by_ms, self.lived = entry.at, entry.by_ms, lived

    def dump(self) -> Any:
        return [self.at, self.by_ms, self.lived]

    def load(self, raw: Any) -> None:
        self.at, self.by_ms, self.lived = raw


def behind_us(accepted: Accepted, now: Now) -> int:
    """Microseconds by which the wall clock stands behind the mark; 0 where nobody looked at it."""
    if not now.wall:
        return 0
    if accepted.at and now.at - accepted.at < SLACK_US:  # each record moves `at` by a microsecond while it is behind
        return accepted.at - accepted.by_ms * 1000 + (now.lived - accepted.lived) * 1000 - now.wall
    return now.at - now.wall


def check_clock(state: State, question: Question, now: Now) -> Refusal | None:
    """Whether the clock lets an irreversible call start."""
    if question.sem != ActionSemantics.IRREVERSIBLE:
        return None
    behind = behind_us(state.clock, now)
    if behind <= SLACK_US:
        return None
    return Refusal(
        "clock_went_back",
        f"The clock stands {behind // 1_000_000} s behind the newest time in the log: nothing irreversible starts.",
        "Set the clock; if it is right, say so: `amends doctor --accept-clock --by NAME --reason TEXT`.",
        {"behind_s": behind // 1_000_000},
    )


class AcceptedNow(NamedTuple):
    """That the clock was accepted: at which record, what it said then, and by how many seconds it stood behind."""

    record: int
    wall: str
    behind_s: int


def accept_clock(kit: AgentKit, *, by: str, reason: str) -> AcceptedNow:
    """Say in a person's name that the clock is right, though it stands behind the log. Raises BadValue; Refused if it
    does not."""
    name = named(by)
    if blank(reason):
        raise BadValue("Accepting the clock needs a reason.", next="Pass --reason TEXT.")
    wall = kit.log.clock.wall_us()
    said = body(by=encode(name), reason=encode(reason.strip()), wall=encode(when(wall)))

    def decide(state: State, now: Now) -> Sequence[Draft]:
        if behind_us(state.clock, now) <= SLACK_US:
            raise Refused(
                "The clock does not stand behind the log: there is nothing to accept.",
                next="`amends doctor` says how it stands.",
                code="clock_is_right",
            )
        return [fact("clock.accepted", said, by_ms=max(0, (now.at - now.wall) // 1000), up=True)]

    [entry] = kit.log.commit(decide)
    return AcceptedNow(entry.seq, when(wall), entry.by_ms // 1000)
