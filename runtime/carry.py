"""What an ended saga leaves standing can be taken over by a later one: the *follow-up*.

Used by `continue_as_new`, by `undo` of a committed saga, and by an effect that lands after its saga has ended. The
follow-up refers to the ended saga, and each carried step to the intent it came from; its keys are the old ones, so
that the other side sees the same effect.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from ..store.chain import Draft
from ..store.log import Log
from .facts import body, fact
from .inverse import payload_of, read
from .openings import Records, needed_at, raw_fields
from .saga import Saga
from .step import CONFIRMED, DONE, UNKNOWN, Step


def stands(step: Step) -> bool:
    """Whether there is something to carry; of what was tentative, if it was confirmed by a handler."""
    return step.state in (DONE, UNKNOWN) or (step.state == CONFIRMED and step.confirm != "")


def carried(log: Log, family: Iterable[Saga], into: str, fence: int, only: Container[int] | None = None) -> list[Draft]:
    """`step.carried` facts for every step of a family that stands, in the order in which they were completed.

    only: the seqs of the intents that are meant. The outermost saga's steps keep their numbers, others get new ones.
    """
    pairs = [
        (saga, step)
        for saga in family
        for step in saga.steps.values()
        if stands(step) and (only is None or step.seq in only)
    ]
    numbers: dict[int, int] = {}  # by intent
    highest = max((step.number for _, step in pairs), default=0)
    for _, step in pairs:
        if step.number not in numbers.values():
            numbers[step.seq] = step.number
        else:
            numbers[step.seq] = highest = highest + 1
    drafts = []
    for saga, step in sorted(pairs, key=lambda pair: completed(pair[1])):
        draft = carry(log, saga, step, into, fence)
        draft.fields["step"] = numbers[step.seq]
        drafts.append(draft)
    return drafts


def completed(step: Step) -> int:
    """Where in the log a step was completed, or begun if nobody knows that."""
    return step.ended_seq or step.seq


def carry(log: Records, saga: Saga, step: Step, into: str, fence: int, *, late: bool = False) -> Draft:
    """One step as a fact of another saga. late: its compensation ran before it landed, so it is due under a new key.

    What is tentative stays so. Once it was to be confirmed it is an effect that nothing undoes.
    """
    final = bool(step.resource) and step.state != DONE
    recorded = read(needed_at(log, step.inverse_seq)) if step.inverse_seq and not final else None
    asked = raw_fields(needed_at(log, step.seq)) if step.probe or step.resource else {}
    pending = {"resource": step.resource, "confirm": step.confirm, "confirmer": step.confirmer,
               "confirm_again": step.confirm_again} if step.resource and not final else {}  # fmt: skip
    return fact(
        "step.carried",
        body(
            compensation=payload_of(recorded) if recorded else b"",
            confirmation=asked.get("confirmation", b"") if pending else b"",
            args=asked.get("args", b""),
            probe=asked.get("probe", b""),
        ),
        saga=into,
        fence=fence,
        step=step.number,
        tool=step.tool,
        sem=step.sem,
        inv="none" if final else step.inv,
        handler="" if final else step.handler,
        key=step.key,
        again="" if final else step.again,
        probe=step.probe,
        settle_ms=step.settle_ms,
        of=saga.id,
        ref=step.seq,
        out="done" if step.state != UNKNOWN else "unknown",
        scope="undo/late" if late else "",
        tags=step.tags,
        **pending,
        up=True,
    )
