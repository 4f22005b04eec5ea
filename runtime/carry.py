"""What an ended saga leaves standing can be taken over by a later one: the *follow-up*.

Used by `continue_as_new`, by `undo` of a committed saga, and by an effect that lands after its saga has ended. The
follow-up refers to the ended saga, and each carried step to the intent it came from; its keys are the old ones, so
that the other side sees the same effect.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..store.chain import Draft
from ..store.log import Log
from .facts import body, fact
from .inverse import payload_of, read
from .saga import Saga
from .step import ACCEPTED, DONE, UNKNOWN, Step


def stands(step: Step) -> bool:
    """Whether there is something to carry."""
    return step.state in (DONE, UNKNOWN) and step.state != ACCEPTED


def carried(log: Log, saga: Saga, into: str, fence: int, only: Iterable[int] | None = None) -> list[Draft]:
    """`step.carried` facts for every step of a saga that stands, in the order in which they were completed."""
    chosen = set(saga.steps if only is None else only)
    steps = sorted((step for step in saga.steps.values() if stands(step)), key=lambda step: step.ended_seq or step.seq)
    return [carry(log, saga, step, into, fence) for step in steps if step.number in chosen]


def carry(log: Log, saga: Saga, step: Step, into: str, fence: int, *, late: bool = False) -> Draft:
    """One step as a fact of another saga. late: its compensation ran before it landed, so it is due under a new key."""
    recorded = read(log.record(step.inverse_seq).blob) if step.inverse_seq else None
    return fact(
        "step.carried",
        body(compensation=payload_of(recorded)) if recorded else b"",
        saga=into,
        fence=fence,
        step=step.number,
        tool=step.tool,
        sem=step.sem,
        inv=step.inv,
        handler=step.handler,
        key=step.key,
        again=step.again,
        settle_ms=step.settle_ms,
        of=saga.id,
        ref=step.seq,
        out="done" if step.state != UNKNOWN else "unknown",
        scope="undo/late" if late else "",
        up=True,
    )
