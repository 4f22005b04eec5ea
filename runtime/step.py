"""The life of a step, as a table. A fact that is not in the table of the state it meets is illegal and is not written.

Every step ends in exactly one bucket; *orphaned* (standing, nothing can undo it) is folded from `done` and the
inverse, never stored.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..store.entry import Entry
from ..store.errors import Illegal

WAITING, INTENDED, DONE, FAILED, UNKNOWN, REFUSED = (
    "waiting", "intended", "done", "failed", "unknown", "refused",
)  # fmt: skip
UNDOING, UNDO_LOST, COMPENSATED, STUCK, ACCEPTED = (
    "undoing", "undo_lost", "compensated", "compensation_failed", "accepted",
)  # fmt: skip
CONFIRMING, CONFIRM_LOST, UNCONFIRMED, CONFIRMED = "confirming", "confirm_lost", "unconfirmed", "confirmed"

BY_OUT = "?"  # the next state depends on `out`

TABLE: dict[str, dict[str, str]] = {
    "": {
        "step.refused": REFUSED, "step.asked": WAITING, "step.intended": INTENDED, "step.carried": BY_OUT,
        "step.done": DONE,  # a reversible step whose outcome came before its intent was written
    },
    # What people have answered is not in the step: `gate/approvals.py` works it out, and lets the intent stand or not.
    WAITING: {
        "step.intended": INTENDED, "step.refused": REFUSED, "step.asked": WAITING,
        "step.landed": BY_OUT,  # an attempt that had failed, before people were asked anew
    },
    INTENDED: {
        "step.attempted": INTENDED, "step.done": DONE, "step.failed": FAILED, "step.lost": UNKNOWN,
    },
    UNKNOWN: {
        "step.probed": BY_OUT, "step.landed": BY_OUT, "undo.intended": UNDOING, "step.accepted": ACCEPTED,
        "step.intended": INTENDED,  # again after a resume, under the same key
        "step.refused": UNKNOWN,  # the gate did not let it be tried again
    },
    DONE: {
        "undo.intended": UNDOING, "step.accepted": ACCEPTED, "step.landed": DONE,
        "confirm.intended": CONFIRMING,
        "undo.done": BY_OUT, "confirm.done": BY_OUT,  # of what is tentative, where nothing has to run for it
    },
    UNDOING: {
        "undo.done": COMPENSATED, "undo.failed": STUCK, "undo.lost": UNDO_LOST, "step.landed": UNDOING,
    },
    UNDO_LOST: {
        "undo.intended": UNDOING, "undo.done": COMPENSATED, "step.probed": UNDO_LOST, "step.accepted": ACCEPTED,
        "step.landed": UNDO_LOST,
    },
    STUCK: {
        "undo.intended": UNDOING, "undo.done": COMPENSATED, "step.probed": BY_OUT, "step.accepted": ACCEPTED,
        "step.landed": STUCK,
    },
    COMPENSATED: {"step.landed": BY_OUT},
    FAILED: {"step.landed": BY_OUT, "step.intended": INTENDED, "step.refused": FAILED, "step.asked": WAITING},
    ACCEPTED: {"step.landed": ACCEPTED},
    REFUSED: {},
    CONFIRMING: {"confirm.done": CONFIRMED, "confirm.failed": UNCONFIRMED, "confirm.lost": CONFIRM_LOST},
    CONFIRM_LOST: {"confirm.intended": CONFIRMING, "step.accepted": ACCEPTED},
    UNCONFIRMED: {"confirm.intended": CONFIRMING, "step.accepted": ACCEPTED},
    CONFIRMED: {},
}  # fmt: skip

OUT: dict[str, dict[str, dict[str, str]]] = {
    "step.carried": {"": {"done": DONE, "unknown": UNKNOWN}},
    "step.probed": {
        UNKNOWN: {"present": DONE, "absent": FAILED, "cannot_tell": UNKNOWN},
        STUCK: {"present": STUCK, "absent": COMPENSATED, "cannot_tell": STUCK},
    },
    "step.landed": {
        UNKNOWN: {"done": DONE, "failed": FAILED},
        COMPENSATED: {"done": DONE, "failed": COMPENSATED},
        FAILED: {"done": DONE, "failed": FAILED},
        WAITING: {"done": DONE, "failed": WAITING},
    },
    "undo.done": {DONE: {"nothing": COMPENSATED}},
    "confirm.done": {DONE: {"nothing": CONFIRMED}},
}


MAY_STAND = frozenset({INTENDED, DONE, UNKNOWN, UNDOING, UNDO_LOST, STUCK, CONFIRMING, CONFIRM_LOST, UNCONFIRMED})
"""States in which an effect stands, or may."""


class Step(msgspec.Struct, array_like=True):
    """One step as folded. `*_seq` are positions in the log, 0 where there is none; times are lived milliseconds.

    inverse_seq is the entry whose opening holds the newest compensation. settled: what a probe said last.
    late: its compensation is due once more because the forward landed after it. resource: what is tentative by it, as
    16 hex digits; confirm is then `declared` or `human`, or empty if nothing has to run to confirm it, confirmer the
    name of the handler that does, confirm_again why that may be repeated.
    """

    number: int
    tool: str
    sem: str
    state: str
    seq: int = 0
    ended_seq: int = 0
    inv: str = ""
    handler: str = ""
    key: str = ""
    again: str = ""
    probe: int = 0
    settle_ms: int = 0
    inverse_seq: int = 0
    attempts: int = 0
    undo_attempts: int = 0
    undo_key: str = ""
    lost_lived: int = 0
    settled: str = ""
    provisional: bool = False
    late: bool = False
    asked_seq: int = 0
    asked_lived: int = 0
    at: int = 0
    undone_seq: int = 0
    note: str = ""
    tags: str = ""
    resource: str = ""
    confirm: str = ""
    confirmer: str = ""
    confirm_again: str = ""
    confirm_attempts: int = 0


def next_state(state: str, entry: Entry) -> str:
    """Where the fact leads. Raises Illegal."""
    there = TABLE[state].get(entry.kind)
    if there == BY_OUT:
        there = OUT[entry.kind][state].get(entry.out)
    if there is None:
        raise Illegal(f"{entry.kind} {entry.out} cannot follow {state or 'nothing'} in step {entry.step}.")
    return there


def advance(step: Step | None, entry: Entry, lived: int) -> Step:
    """The step after a fact. A new one where `step` is None; else the same object, changed after the check."""
    there = next_state(step.state if step else "", entry)
    kind = entry.kind
    if step is None:
        step = Step(entry.step, entry.tool, entry.sem, "", seq=entry.seq, at=entry.at)
    before, step.state = step.state, there
    if kind in _DECLARES or (kind == "step.done" and not before):  # the latter tells intent and outcome in one
        _declare(step, entry, lived)
    elif entry.inv:
        _derive(step, entry)
    note = NOTES.get(kind)
    if note is not None:
        note(step, entry, lived, before)
    return step


def _over(step: Step, entry: Entry, lived: int, before: str) -> None:
    step.ended_seq = entry.seq


def _landed(step: Step, entry: Entry, lived: int, before: str) -> None:
    step.ended_seq = entry.seq
    if entry.out != "done":
        return
    if step.provisional:  # it was undone, or is being undone, before anybody knew that it was there
        step.late = step.late or before in (COMPENSATED, UNDOING, UNDO_LOST, STUCK)
    elif before == COMPENSATED:
        step.state = COMPENSATED


def _probed(step: Step, entry: Entry, lived: int, before: str) -> None:
    step.settled = entry.out
    if step.state != UNKNOWN:
        step.ended_seq = entry.seq


def _asked(step: Step, entry: Entry, lived: int, before: str) -> None:
    step.asked_seq, step.asked_lived = entry.seq, lived


def _attempted(step: Step, entry: Entry, lived: int, before: str) -> None:
    step.attempts = entry.attempt


def _lost(step: Step, entry: Entry, lived: int, before: str) -> None:
    step.lost_lived = lived


def _undo_intended(step: Step, entry: Entry, lived: int, before: str) -> None:
    step.undo_attempts += 1
    step.undo_key, step.settled = entry.key, ""
    step.provisional = step.provisional or before == UNKNOWN
    step.late = step.late and entry.scope != "undo/late"


def _confirm_intended(step: Step, entry: Entry, lived: int, before: str) -> None:
    step.confirm_attempts += 1
    step.settled = ""


def _undo_done(step: Step, entry: Entry, lived: int, before: str) -> None:
    step.undone_seq, step.note = entry.seq, entry.out
    if step.late:  # it landed while its provisional compensation ran: due once more
        step.state = DONE


NOTES: dict[str, Callable[[Step, Entry, int, str], None]] = {
    "confirm.intended": _confirm_intended,
    "step.asked": _asked,
    "step.attempted": _attempted,
    "step.done": _over,
    "step.failed": _over,
    "step.landed": _landed,
    "step.lost": _lost,
    "step.probed": _probed,
    "undo.done": _undo_done,
    "undo.intended": _undo_intended,
    "undo.lost": _lost,
}
"""What a fact leaves in a step beside its state; `before` is the state it met."""


def may_land_for(step: Step, lived: int) -> int:
    """Milliseconds for which a call of it that nobody hears of any more may still take effect."""
    return max(0, step.lost_lived + step.settle_ms - lived)


def again(step: Step) -> None:
    """A person wants it tried once more: its probe is asked anew; without one, the person's word is that it stands."""
    if step.settled == "cannot_tell":
        step.settled = ""
    if step.state == CONFIRM_LOST or (step.state == UNDO_LOST and not step.probe):
        step.settled = "present"


_DECLARES = frozenset({"step.intended", "step.carried"})


def _declare(step: Step, entry: Entry, lived: int) -> None:
    """An effect may stand from here on: what it is and what undoes it."""
    step.seq, step.tool, step.sem, step.attempts = entry.seq, entry.tool, entry.sem, 1
    step.inv, step.handler, step.key, step.again = entry.inv, entry.handler, entry.key, entry.again
    step.probe, step.settle_ms, step.at, step.tags = entry.probe, entry.settle_ms, entry.at, entry.tags
    step.settled = ""  # what a probe said of an attempt before says nothing of this one
    step.inverse_seq = entry.seq if entry.inv not in ("", "none") else 0
    step.resource, step.confirm = entry.resource, entry.confirm
    step.confirmer, step.confirm_again = entry.confirmer, entry.confirm_again
    if entry.kind == "step.carried":
        step.ended_seq, step.late = entry.seq, entry.scope == "undo/late"
        step.lost_lived = lived


def _derive(step: Step, entry: Entry) -> None:
    """The result refined what undoes it."""
    step.inv = entry.inv
    if entry.inv == "none":
        step.handler, step.again, step.inverse_seq = "", "", 0
    elif entry.inv != "declared":
        step.handler, step.again, step.inverse_seq = entry.handler, entry.again, entry.seq
    if not step.key:
        step.key = entry.key
