"""The kinds of sagas, steps and inverses. A kind is never re-meant: new meaning, new kind.

What a fold needs is in the header of the entry; arguments, results, errors and handler addresses are openings
(store/FORMAT.md lists the keys of each kind). `store/facts.py` has the log's own kinds.
"""

from __future__ import annotations

from typing import Any

from ..store.chain import Draft
from .openings import spread
from .values import INLINE_MAX

KINDS = {
    "saga.opened": "a saga begins: who drives it, what it belongs to, who gets it after a crash",
    "saga.taken": "somebody else drives it now; the fence rises and stale drivers are refused",
    "saga.released": "its driver lets go of it while it is still open",
    "saga.suspended": "a resume met other code or other arguments: nothing runs until a resume fits",
    "saga.unwinding": "its fate is decided: what stands is to be undone",
    "saga.joined": "an inner saga is done and shares the fate of the outer one",
    "saga.escalated": "a step needs a person, with the reason",
    "saga.ended": "the last fact of a saga: nothing can follow",
    "step.refused": "the gate said no, or the question was withdrawn or expired: nothing happened",
    "step.asked": "an irreversible step waits for a named person",
    "step.answered": "a named person decided",
    "step.carried": "an effect of an earlier saga, taken over by this one with what undoes it",
    "step.intended": "an effect may start now: what it is, its key and its declared inverse",
    "step.attempted": "another attempt of the same step, under the same key",
    "step.done": "it happened: the result and the inverse derived from it",
    "step.failed": "it is known not to have happened",
    "step.lost": "nobody knows whether it happened",
    "step.probed": "the world was asked: present, absent or cannot_tell",
    "step.landed": "it happened (or failed) after everybody stopped waiting for it",
    "step.accepted": "a named person accounts for what stands",
    "undo.intended": "its compensation may start now",
    "undo.done": "its compensation took effect, or found the effect gone already",
    "undo.failed": "its compensation failed for good",
    "undo.lost": "the answer of its compensation was lost",
}


def fact(kind: str, *openings: bytes, up: bool = False, **header: Any) -> Draft:
    """A draft of one fact. Header keys with an empty value are left out; an opening is a `body`, of any size."""
    kept = tuple([opening for opening in openings if len(opening) > 2])
    if kept and max(map(len, kept)) > INLINE_MAX:
        kept = spread(kept)
    return Draft(kind, {key: value for key, value in header.items() if value}, kept, up)


def body(**encoded: bytes) -> bytes:
    """The JSON object of an opening from values that are encoded already; empty ones are left out."""
    fields = [b'"%b":%b' % (key.encode(), encoded[key]) for key in sorted(encoded) if encoded[key]]
    return b"{" + b",".join(fields) + b"}"
