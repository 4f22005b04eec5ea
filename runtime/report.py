"""What became of a saga, as a function of its state: every step in one bucket, and clean only if nothing stands.

The same words serve the exception that leaves a scope, `show`, `ps` and the inbox.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..store.errors import AmendsError, Refused, YouErred
from .saga import CONCLUDING, ENDED, JOINED, RUNNING, SUSPENDED, UNWINDING, Saga, orphaned, pending
from .step import (
    ACCEPTED,
    COMPENSATED,
    CONFIRM_LOST,
    CONFIRMED,
    CONFIRMING,
    DONE,
    FAILED,
    INTENDED,
    MAY_STAND,
    REFUSED,
    STUCK,
    UNCONFIRMED,
    UNDO_LOST,
    UNDOING,
    UNKNOWN,
    WAITING,
    Step,
)

REASONS = {
    "orphaned": ("It stands, and nothing that was declared can undo it.", ("accept",)),
    "irreversible": ("It is irreversible and stands.", ("accept",)),
    "human_task": ("A person has to undo it.", ("accept",)),
    "unknown_without_inverse": ("Nobody knows whether it happened, and no inverse was declared.", ("accept",)),
    "cannot_tell": ("Its probe cannot tell whether it happened.", ("retry", "accept")),
    "compensation_failed": ("Its compensation failed.", ("retry", "accept")),
    "undo_answer_lost": ("The answer of its compensation was lost, and it may not be run twice.", ("accept", "retry")),
    "no_handler": ("No host on this device can run what undoes or confirms it.", ("retry", "accept")),
    "closure": ("What undoes or confirms it lived only in the process that died.", ("accept",)),
    "adopted": ("Its log was set back; nobody knows what happened to it since.", ("retry", "accept")),
    "unreadable": ("What undoes or confirms it cannot be read from the log.", ("accept",)),
    "confirm_failed": ("Its saga stands, but what is tentative could not be confirmed.", ("retry", "accept")),
    "confirm_answer_lost": (
        "The answer of its confirmation was lost, and it may not be run twice.", ("accept", "retry"),
    ),
    "confirm_by_hand": ("Its saga stands, and a person has to confirm it.", ("accept",)),
}  # fmt: skip
"""Why a step needs a person, and the verbs that settle it."""


class StepView(NamedTuple):
    """One step for people: `state` is one of the words of PROMISES 12.1."""

    saga: str
    step: int
    tool: str
    semantics: str
    state: str
    attempts: int
    idempotency_key: str
    handler: str
    why: str = ""


_SHOWN = {
    WAITING: "waiting", INTENDED: "intended", DONE: "done", FAILED: "failed", UNKNOWN: "unknown",
    REFUSED: "refused", UNDOING: "done", UNDO_LOST: "done", COMPENSATED: "compensated",
    STUCK: "compensation_failed", ACCEPTED: "accepted", CONFIRMING: "done", CONFIRM_LOST: "done",
    UNCONFIRMED: "done", CONFIRMED: "done",
}  # fmt: skip


def step_view(saga: Saga, step: Step) -> StepView:
    """A step in the words of the report; what stands without an inverse in a saga that unwinds is `orphaned`."""
    shown = _SHOWN[step.state]
    why = saga.escalated.get(step.number, "")
    if saga.phase in (UNWINDING, ENDED) and saga.out != "committed" and step.state == DONE and orphaned(step):
        shown = "orphaned"
    elif why == "undo_answer_lost":
        shown = "compensation_failed"
    return StepView(saga.id, step.number, step.tool, step.sem, shown, step.attempts, step.key, step.handler, why)


def stands(saga: Saga, step: Step, *, lives: bool) -> bool:
    """Whether an effect stands, or may, without being accounted for: in a committed saga what nobody knows about, in
    one that runs (lives: somebody drives it) nothing yet."""
    if saga.out in ("committed", "continued"):
        return step.state == UNKNOWN
    if saga.phase in (RUNNING, JOINED) and lives:
        return False
    if saga.phase == CONCLUDING:  # the rest of it is to stand
        return pending(step) and (not lives or step.number in saga.escalated)
    return step.state in MAY_STAND or step.late


class RollbackReport:
    """What a rollback did, or a confirmation. Buckets are lists of StepView; `clean` is true only if nothing stands
    unaccounted for. frozen: why it was left as it stands, `quarantined` or `halted`; empty if it was not."""

    def __init__(self, family: Iterable[Saga], cause: str = "", frozen: str = "") -> None:
        self.sagas = list(family)
        self.saga = self.sagas[0].id if self.sagas else ""
        self.cause, self.frozen = cause, frozen
        pairs = [(saga, step) for saga in self.sagas for step in saga.steps.values()]
        self.steps = [step_view(saga, step) for saga, step in sorted(pairs, key=lambda pair: pair[1].seq)]
        self._standing = [step for saga, step in pairs if stands(saga, step, lives=True)]

    def _in(self, *states: str) -> list[StepView]:
        return [step for step in self.steps if step.state in states]

    @property
    def done(self) -> list[StepView]:
        """Happened and stands: left for later because an unwinding halted before it, or committed."""
        return self._in("done")

    @property
    def compensated(self) -> list[StepView]:
        return self._in("compensated")

    @property
    def failed(self) -> list[StepView]:
        """Compensations that failed."""
        return self._in("compensation_failed")

    @property
    def not_happened(self) -> list[StepView]:
        return self._in("failed", "refused")

    @property
    def orphaned(self) -> list[StepView]:
        return self._in("orphaned")

    @property
    def unknown(self) -> list[StepView]:
        return self._in("unknown", "intended")

    @property
    def accepted(self) -> list[StepView]:
        return self._in("accepted")

    @property
    def unresolved(self) -> list[StepView]:
        """Everything that still stands or may: done, failed compensations, orphans, unknowns."""
        return [*self.done, *self.failed, *self.orphaned, *self.unknown]

    @property
    def halted(self) -> bool:
        """Whether the unwinding stopped at a step that needs a person."""
        return any(saga.escalated for saga in self.sagas)

    @property
    def clean(self) -> bool:
        return not self._standing and not self.accepted and not self.frozen

    @property
    def outcome(self) -> str:
        if not self.sagas:
            return "compensated"
        return self.sagas[0].out or outcome(self.sagas[0], lives=True, frozen=self.frozen)

    def summary(self) -> str:
        """One line for people."""
        counts = [
            (len(self.compensated), "compensated"),
            (len(self.not_happened), "never happened"),
            (len(self.accepted), "accepted"),
            (len(self.failed), "compensation failed"),
            (len(self.orphaned), "standing without an inverse"),
            (len(self.unknown), "unknown"),
            (len(self.done), "left standing"),
        ]
        told = ", ".join(f"{count} {what}" for count, what in counts if count)
        frozen = f" It is frozen ({self.frozen}) and goes on when that is lifted." if self.frozen else ""
        return f"{'Clean' if self.clean else 'Not clean'}: {told or 'nothing had happened'}.{frozen}"

    def __repr__(self) -> str:
        return f"<RollbackReport {self.summary()}>"


class ModelOutcome(NamedTuple):
    """What code that asks on behalf of a model hands it: one of OUTCOMES, a code that never changes, what to do."""

    outcome: str
    code: str
    message: str
    next: str


OUTCOMES = {
    "committed": "It stands.",
    "compensated": "It was undone. Explain it; do not try again.",
    "pending_human": "A person has to look first: `amends inbox`. Do not try again.",
    "refused": "Nothing happened.",
}


def model_outcome(error: BaseException | None = None) -> ModelOutcome:
    """How a saga or a call ended, for a model: pass what it raised, or nothing if it went well.

    Refused says with `code` and `next` what would make the call acceptable. Raises an error back that tells nothing.
    """
    if error is None:
        return ModelOutcome("committed", "", "", OUTCOMES["committed"])
    report = getattr(error, "report", None) or getattr(error, "saga_report", None)
    cause = getattr(error, "cause", error)
    code = cause.code if isinstance(cause, AmendsError) else type(cause).__name__
    if isinstance(report, RollbackReport) and not report.clean:
        return ModelOutcome("pending_human", code, report.summary(), OUTCOMES["pending_human"])
    if isinstance(cause, (Refused, YouErred)):
        return ModelOutcome("refused", code, cause.message, cause.next or OUTCOMES["refused"])
    if isinstance(report, RollbackReport):
        return ModelOutcome("compensated", code, str(cause), OUTCOMES["compensated"])
    raise error


def outcome(saga: Saga, *, lives: bool, frozen: str = "") -> str:
    """The word of PROMISES 12.1 for a saga. lives: whether the lock of its driver is held. frozen: as `freeze` says."""
    if saga.phase == ENDED:
        return "committed" if saga.out == "continued" else saga.out
    if frozen == "quarantined":
        return frozen
    if saga.phase == SUSPENDED:
        return "suspended"
    if saga.escalated and not (lives and saga.driver):
        return "escalated"
    if saga.driver and not lives:
        return "interrupted"
    if saga.phase == UNWINDING:
        return "unwinding" if saga.driver else "interrupted"
    if not saga.driver:
        return "interrupted"
    return "waiting" if any(step.state == WAITING for step in saga.steps.values()) else "running"
