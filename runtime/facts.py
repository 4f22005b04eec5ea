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
    "saga.concluding": "its fate is decided: it stands, and what is tentative is to be confirmed",
    "saga.joined": "an inner saga is done and shares the fate of the outer one",
    "saga.escalated": "a step needs a person, with the reason",
    "saga.ended": "the last fact of a saga: nothing can follow",
    "step.refused": "the gate said no, or the question was withdrawn or expired: nothing happened",
    "step.asked": "a step waits for a person: the request that a vote is about",
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
    "confirm.intended": "what is tentative may be confirmed now",
    "confirm.done": "it is confirmed, and final",
    "confirm.failed": "its confirmation failed for good",
    "confirm.lost": "the answer of its confirmation was lost",
    "switch.set": "a person stops new effects, new sagas, or one saga, for a scope and a time",
    "switch.lifted": "a person lifts what a switch.set stopped",
    "limit.set": "a limit as it is declared from now on: cap, unit and window",
    "lock.taken": "a saga claims a name; nobody else does until it is freed",
    "lock.awaited": "a call waits for a name that another saga has claimed",
    "lock.freed": "a saga lets go of a name before it ends",
    "vote.cast": "a person decided on a request: approve, deny or break_glass",
    "approval.escalated": "nobody answered in time: the next level is told",
    "review.closed": "a person has looked at what was decided by breaking the glass",
    "key.founded": "a keyring begins, with two keys and a recovery key",
    "key.added": "a key, its person and roles join the keyring",
    "key.revoked": "a key is dead from here on",
    "key.rotated": "a key takes the place of another one",
    "key.recovering": "the recovery key wants to replace all keys, after a delay",
    "key.vetoed": "a live key stopped a recovery",
    "key.recovered": "a recovery came into force: all former keys are dead",
    "key.quarantined": "a key answered as only a copy would: it counts no more until an admin says so",
    "key.released": "an admin says that a key in quarantine is no copy: it counts again",
    "notice.claimed": "a process is about to tell somebody of something that needs a person; no other one does",
    "notice.sent": "somebody was told of something that needs a person, or could not be",
    "effect.observed": "the world was asked about an effect: confirmed, drift, unverifiable, or accepted by a person",
    "reconcile.begun": "the world is about to be asked because the schedule says so; no other process does",
    "reconcile.done": "the world was asked: about how many effects, and what it said",
    "clock.accepted": "a person says that the clock is right, though it stands behind the log",
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
