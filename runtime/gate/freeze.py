"""Frozen: a saga that a person has stopped as it stands. It is not undone, not confirmed, not ended and not taken over;
it is listed, and goes on when the lever is lifted or its time has run out.

A quarantine of any saga of a family freezes the whole of it, since they share a fate. A halt that includes
compensations freezes an unwinding that has something left under it. A confirmation is a new effect, so any halt
freezes a saga that is to stand while something tentative in it falls under that halt. Derived from the facts of the
levers each time it is asked: a freeze that were a fact of its own could outlive its lever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...store.clock import Now
from ...store.errors import Refused
from ..saga import CONCLUDING, ENDED, Saga, pending
from .question import Question
from .switch import CODES, HALT, QUARANTINE, check_switch, halts_unwinding

if TYPE_CHECKING:
    from ..state import State

QUARANTINED, HALTED = CODES[QUARANTINE], CODES[HALT]


def freeze(state: State, family: Sequence[Saga], now: Now) -> str:
    """Why a family (its root first) is left as it is: `quarantined`, `halted`, or empty."""
    root = family[0]
    if not state.switches.levers or root.phase == ENDED:
        return ""
    if quarantined(state, root, now):
        return QUARANTINED
    if root.phase == CONCLUDING:
        return _unconfirmed(state, family, now)
    return HALTED if halts_unwinding(state, family, now) else ""


def _unconfirmed(state: State, family: Sequence[Saga], now: Now) -> str:
    for saga in family:
        for step in saga.steps.values():
            tags = tuple(step.tags.split(",")) if step.tags else ()
            asked = Question(step.tool, step.sem, saga.id, family[0].id, tags)
            refusal = check_switch(state, asked, now) if pending(step) and step.confirm else None
            if refusal is not None:
                return refusal.code
    return ""


def quarantined(state: State, saga: Saga, now: Now) -> bool:
    """Whether a saga, or one that shares its fate, is quarantined."""
    targets = {lever.target for lever in state.switches.active(now) if lever.mode == QUARANTINE}
    return bool(targets) and any(f"saga:{member.id}" in targets for member in state.family(state.root(saga)))


def refuse_quarantined(state: State, saga: Saga, now: Now) -> None:
    """Raises Refused for a saga that nobody may take over, end or go on with."""
    if quarantined(state, saga, now):
        raise Refused(
            f"Saga {saga.id} is quarantined: it stays as it stands until a person lifts that.",
            next=f"Run `amends resume saga:{saga.id}`.",
            code=QUARANTINED,
        )
