"""A saga with all that belongs to it: the sagas inside it, and what happened after its end, in one outcome.

What is undone or lands after the end of a saga is a follow-up saga of its own in the log. People ask about the first
one, so its steps are looked up where they went: a carried step refers to the intent it came from. A restart under the
same name is the newer saga's story; the older ones are told with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..store.errors import NotFound
from ..store.log import Record
from ..store.seal import FORGOTTEN
from .decisions import Decision, decisions, votes_of
from .gate.freeze import freeze
from .inverse import Recorded, read
from .openings import raw_fields, redacted, when, whole
from .report import outcome, stands, step_view
from .saga import CONCLUDING, ENDED, Saga, replay
from .step import (
    ACCEPTED,
    COMPENSATED,
    CONFIRM_LOST,
    CONFIRMED,
    CONFIRMING,
    DONE,
    FAILED,
    REFUSED,
    STUCK,
    UNCONFIRMED,
    UNDO_LOST,
    UNDOING,
    WAITING,
    Step,
)
from .tentative import status_of
from .values import decode, is_manifest

if TYPE_CHECKING:
    from .kit import AgentKit

FINAL = ("committed", "compensated", "refused")
GONE = (COMPENSATED, FAILED, REFUSED, ACCEPTED)
PAGE = 500


@dataclass(frozen=True)
class Thread:
    """One saga of the log: as folded, with its records and the texts of its opening."""

    kit: AgentKit = field(repr=False, compare=False)
    saga: Saga
    records: list[Record]
    name: str
    label: str

    @cached_property
    def votes(self) -> list[Record]:
        """The votes about its steps, looked for when they are told: a list of many sagas needs none."""
        return votes_of(self.kit, self.saga.id, self.records)

    @cached_property
    def decisions(self) -> list[Decision]:
        """The same as they are told."""
        return decisions(self.kit, self.saga.id, self.votes, self.records)

    @property
    def carried(self) -> dict[tuple[str, int], Step]:
        """Steps taken over from another saga, by that saga and the record of the intent there."""
        return {
            (record.entry.of, record.entry.ref): self.saga.steps[record.entry.step]
            for record in self.records
            if record.entry.kind == "step.carried"
        }


def thread_of(kit: AgentKit, header: str) -> Thread | None:
    """A saga by header id, with its records; None if the device never had it."""
    records = list(whole(kit.log.thread(header)))
    saga = kit.engine.state.sagas.get(header) or replay(record.entry for record in records)
    if saga is None or not records:
        return None
    fields = raw_fields(records[0].blob)
    return Thread(kit, saga, records, text_of(fields.get("name")), text_of(fields.get("label")))


def step_fields(kit: AgentKit, saga: str, number: int) -> dict[str, bytes]:
    """What the log holds of a step, each field as it was told last; of a carried one also what it was carried from."""
    found: dict[str, bytes] = {}
    place = saga
    while place:
        origin, step = "", number
        for record in reversed(list(whole(kit.log.thread(place)))):
            if record.entry.step == step:
                found = raw_fields(record.blob) | found
                if record.entry.kind == "step.carried" and record.entry.ref:
                    with suppress(NotFound):  # removed since
                        origin, number = record.entry.of, kit.log.record(record.entry.ref).entry.step
        place = origin
    return found


def text_of(raw: bytes | None) -> str:
    """The text in an opening's field; empty if it is not there."""
    return str(value_of(raw)) if raw else ""


def value_of(raw: bytes) -> Any:
    """The value in an opening's field, as Python has it; a large one as the words that say so."""
    found = msgspec.json.decode(raw)
    return f"(redacted: a value of {found.get('size')} bytes)" if is_manifest(found) else decode(found)


class StepStory(NamedTuple):
    """A step of a story. thread, step: where it was performed; now_in, now: where it stands (perhaps a follow-up)."""

    thread: Thread
    step: Step
    now_in: Thread
    now: Step

    @property
    def state(self) -> str:
        """A word of PROMISES 12.1."""
        return step_view(self.now_in.saga, self.now).state

    @property
    def why(self) -> str:
        """The reason code of its escalation; empty if it needs nobody."""
        return self.now_in.saga.escalated.get(self.now.number, "")

    @property
    def decisions(self) -> list[Decision]:
        """Everybody who said something to it: who let it happen, or did not, and whose word did not count."""
        return [said for said in self.thread.decisions if said.step == self.step.number]

    @property
    def asked(self) -> Record | None:
        """The newest question to people about it; None if nobody was asked."""
        mine = (record for record in reversed(self.thread.records) if record.entry.step == self.step.number)
        return next((record for record in mine if record.entry.kind == "step.asked"), None)

    @property
    def drift(self) -> str:
        """How the world is found not to be as the log says, as a code; empty if it is not, or a person accepted it."""
        known = self.thread.kit.engine.state.drifts.known.get(self.step.seq)
        return known.why if known is not None and not known.accepted else ""

    @property
    def undo_attempts(self) -> int:
        return self.step.undo_attempts + (self.now.undo_attempts if self.now is not self.step else 0)

    @property
    def undo_state(self) -> str:
        """What became of its compensation."""
        if self.now.state == COMPENSATED:
            return "already_done" if self.now.note == "already" else "done"
        saga = self.now_in.saga
        if self.now.state == DONE and (saga.out in ("committed", "continued") or saga.phase == CONCLUDING):
            if self.now.resource and saga.out != "continued":
                return "not_needed"
            return "redacted" if self._inverse_is_gone() else "available"
        return _UNDO_STATE.get(self.now.state, "pending")

    def _inverse_is_gone(self) -> bool:
        inverse = [r for thread, step in ((self.now_in, self.now), (self.thread, self.step))
                   for r in thread.records if step.inverse_seq and r.entry.seq == step.inverse_seq]  # fmt: skip
        gone = bool(inverse) and (redacted(inverse[0]) or inverse[0].withheld == FORGOTTEN)
        return gone and self.compensation() is None

    @property
    def confirm_state(self) -> str:
        """What became of its confirmation."""
        return _CONFIRM_STATE.get(self.now.state, "pending")

    @property
    def redacted(self) -> bool:
        """Whether something that its records held was redacted."""
        return any(
            redacted(record) and record.entry.step == step.number
            for thread, step in {(self.thread.saga.id, self.step.number): (self.thread, self.step),
                                 (self.now_in.saga.id, self.now.number): (self.now_in, self.now)}.values()
            for record in thread.records
        )  # fmt: skip

    def field(self, name: str, *kinds: str) -> bytes | None:
        """The newest value of an opening's field among the records of this step, of these kinds or of any."""
        for thread, step in ((self.now_in, self.now), (self.thread, self.step)):
            for record in reversed(thread.records):
                if record.entry.step == step.number and (not kinds or record.entry.kind in kinds):
                    fields = raw_fields(record.blob)
                    if name in fields:
                        return fields[name]
        return None

    def compensation(self) -> Recorded | None:
        """What undoes it, as recorded."""
        for thread, step in ((self.now_in, self.now), (self.thread, self.step)):
            for record in thread.records:
                if step.inverse_seq and record.entry.seq == step.inverse_seq:
                    return read(record.blob)
        return None

    def confirmation(self) -> Recorded | None:
        """What confirms it, as recorded."""
        for record in self.now_in.records:
            if record.entry.seq == self.now.seq:
                return read(record.blob, "confirmation")
        return None


_UNDO_STATE = {
    UNDOING: "running", UNDO_LOST: "lost", STUCK: "failed", ACCEPTED: "accepted", FAILED: "not_needed",
    REFUSED: "not_needed", CONFIRMING: "not_needed", CONFIRM_LOST: "not_needed", UNCONFIRMED: "not_needed",
    CONFIRMED: "not_needed",
}  # fmt: skip
_CONFIRM_STATE = {
    CONFIRMING: "running", CONFIRM_LOST: "lost", UNCONFIRMED: "failed", CONFIRMED: "done", ACCEPTED: "accepted",
    COMPENSATED: "not_needed", UNDOING: "not_needed", UNDO_LOST: "not_needed", STUCK: "not_needed",
}  # fmt: skip

OUTCOMES = ("step.done", "step.failed", "step.lost", "step.landed")


class Story:
    """One saga, those inside it (`inner`), what followed its end (`later`), and what it restarted (`earlier`)."""

    def __init__(
        self, kit: AgentKit, root: Thread, inner: list[Thread], later: list[Thread], earlier: list[Thread]
    ) -> None:
        self.kit, self.root, self.inner, self.later, self.earlier = kit, root, inner, later, earlier

    @property
    def saga(self) -> Saga:
        return self.root.saga

    @property
    def threads(self) -> list[Thread]:
        """The sagas whose fate it tells: itself, those inside it and what followed its end."""
        return [self.root, *self.inner, *self.later]

    @property
    def id(self) -> str:
        """The id the user gave; the header id where there is none."""
        return self.root.name or self.saga.id

    @property
    def name(self) -> str:
        return self.root.label or self.id

    @cached_property
    def steps(self) -> list[StepStory]:
        """Every step of the saga and of those inside it, in order of intent."""
        moved: dict[tuple[str, int], tuple[Thread, Step]] = {}
        for thread in self.later:
            for origin, step in thread.carried.items():
                moved[origin] = (thread, step)
        told = []
        for thread in (self.root, *self.inner):
            for step in thread.saga.steps.values():
                now_in, now = thread, step
                while (then := moved.get((now_in.saga.id, now.seq))) is not None:
                    now_in, now = then
                told.append(StepStory(thread, step, now_in, now))
        return sorted(told, key=lambda one: one.step.seq or one.step.asked_seq)

    @property
    def followups(self) -> list[Thread]:
        """What followed its end on its own behalf: not a saga that goes on where this one stopped."""
        return [] if self.saga.out == "continued" else self.later

    def lives(self, saga: Saga) -> bool:
        """Whether somebody drives it."""
        return bool(saga.driver) and self.kit.holds(saga.driver)

    @cached_property
    def outcome(self) -> str:
        """The word of PROMISES 12.1, follow-ups included."""
        if self.saga.phase != ENDED:
            return self._open_outcome(self.saga, [self.root, *self.inner])
        for thread in self.followups:
            if thread.saga.phase != ENDED:
                return self._open_outcome(thread.saga, [thread])
        if self.saga.out not in ("committed", "continued"):
            return self.saga.out
        undone = any(one.now.state == COMPENSATED and one.now is not one.step for one in self.steps)
        return "compensated" if undone and all(one.now.state in GONE for one in self.steps) else "committed"

    def _open_outcome(self, root: Saga, family: list[Thread]) -> str:
        lives, frozen = self.lives(root), self._frozen(family)
        if not lives and not frozen and any(thread.saga.escalated for thread in family):
            return "escalated"
        said = outcome(root, lives=lives, frozen=frozen)
        waiting = any(step.state == WAITING for thread in family for step in thread.saga.steps.values())
        return "waiting" if said == "running" and waiting else said

    @property
    def withheld(self) -> dict[str, int]:
        """How many records cannot be read here, by the word that says why (seal.WITHHELD)."""
        return dict(Counter(r.withheld for thread in self.threads for r in thread.records if r.withheld))

    @cached_property
    def frozen(self) -> str:
        """Why what is open of it is left as it stands: `quarantined`, `halted`, or empty."""
        if self.saga.phase != ENDED:
            return self._frozen([self.root, *self.inner])
        return next((why for thread in self.followups if (why := self._frozen([thread]))), "")

    def _frozen(self, family: list[Thread]) -> str:
        return freeze(self.kit.engine.state, [thread.saga for thread in family], self.kit.log.now())

    def _stands(self, one: StepStory) -> bool:
        saga = one.now_in.saga
        root = self.root.saga if one.now_in in (self.root, *self.inner) else saga
        return stands(saga, one.now, lives=self.lives(root))

    @cached_property
    def standing(self) -> list[StepStory]:
        """Effects that stand, or may, without being accounted for."""
        return [one for one in self.steps if self._stands(one)]

    @property
    def clean(self) -> bool:
        """It is over, nothing stands unaccounted for, and the world was not found to be otherwise."""
        return not self.standing and self.outcome in FINAL and not self.drifted

    @property
    def drifted(self) -> list[StepStory]:
        """Effects of which the world says otherwise than the log."""
        return [one for one in self.steps if one.drift] if self.kit.engine.state.drifts.known else []

    @property
    def ended_at(self) -> str | None:
        """When the last of it ended; None while something is open."""
        sagas = [self.saga, *(thread.saga for thread in self.followups)]
        if any(saga.phase != ENDED for saga in sagas):
            return None
        return when(max(saga.ended_at for saga in sagas))

    def cause(self) -> str:
        """Why it was undone; empty if it was not."""
        for thread in (self.root, *self.later):
            for record in thread.records:
                if record.entry.kind == "saga.unwinding":
                    return text_of(raw_fields(record.blob).get("cause")) or self._reason(thread, record.entry.why)
        return ""

    def _reason(self, thread: Thread, why: str) -> str:
        if why == "undo":
            asked = raw_fields(thread.records[0].blob)
            return f"{text_of(asked.get('by'))} asked to undo it: {text_of(asked.get('reason'))}"
        return CAUSES.get(why, why)

    def row(self) -> dict[str, Any]:
        """One element of `ps --json`."""
        return {
            "saga": self.id,
            "name": self.name,
            "outcome": self.outcome,
            "clean": self.clean,
            "started_at": when(self.saga.opened_at),
            "ended_at": self.ended_at,
            "device": self.kit.log.origin,
            "steps": len(self.steps),
            "standing": len(self.standing),
            "drift": len(self.drifted),
            "frozen": self.frozen or None,
            "id": self.saga.id,
        }

    def document(self) -> dict[str, Any]:
        """`show --json`."""
        row = self.row()
        steps = [self._step(one) for one in self.steps]
        first = {name: row.pop(name) for name in ("saga", "name", "outcome", "clean")}
        held = {"withheld": self.withheld} if self.withheld else {}
        return first | {"cause": self.cause() or None} | row | held | {"steps": steps}

    def _step(self, one: StepStory) -> dict[str, Any]:
        error = one.field("error", *OUTCOMES)
        return {
            "step": one.step.number,
            "tool": one.step.tool,
            "semantics": one.step.sem,
            "state": one.state,
            "attempts": one.step.attempts,
            "idempotency_key": one.step.key,
            "args": _raw(one.field("args")),
            "result": _raw(one.field("result")),
            "error": text_of(error) or None,
            "compensation": _compensation(one),
            "tentative": status_of(one.now).value if one.now.resource else None,
            "confirmation": _confirmation(one),
            "why": one.why or None,
            "drift": one.drift or None,
            "redacted": one.redacted,
            "decisions": [_decided(said) for said in one.decisions],
            "saga": one.thread.name or one.thread.saga.id,
        }


CAUSES = {
    "crash": "its process died",
    "released": "its process let go of it",
    "landed": "an effect landed after the saga had ended",
    "refused": "it was refused",
    "observed": "the world was asked after it had ended, and something of it was there",
    "adopted": "its log was set back, and nobody knows what became of it since",
}


def _raw(encoded: bytes | None) -> Any:
    """A value as the log has it: what JSON lacks is tagged."""
    return msgspec.json.decode(encoded) if encoded else None


def _decided(said: Decision) -> dict[str, Any]:
    return {
        "by": said.by, "decision": said.verdict, "level": said.level, "key": said.key or None,
        "note": said.note or None, "at": when(said.at), "record": said.seq, "request": said.request,
        "counted": not said.void, "void": said.void or None,
    }  # fmt: skip


def _compensation(one: StepStory) -> dict[str, Any] | None:
    if one.now.inv in ("", "none"):
        return None
    recorded = one.compensation()
    return {
        "handler": one.now.handler,
        "kwargs": recorded.kwargs if recorded else None,
        "state": one.undo_state,
        "attempts": one.undo_attempts,
        "idempotency_key": one.now.undo_key or (recorded.key if recorded else ""),
        "kind": one.now.inv,
        "description": recorded.description if recorded else "",
    }


def _confirmation(one: StepStory) -> dict[str, Any] | None:
    """What confirms a tentative step; None where nothing has to."""
    if not one.now.confirm:
        return None
    recorded = one.confirmation()
    return {
        "handler": one.now.confirmer,
        "kwargs": recorded.kwargs if recorded else None,
        "state": one.confirm_state,
        "attempts": one.now.confirm_attempts,
        "idempotency_key": recorded.key if recorded else "",
        "kind": one.now.confirm,
        "description": recorded.description if recorded else "",
    }


# ---- finding them ---------------------------------------------------------------------------------------------------


class Stories:
    """The stories of a device, newest first, in one pass over its sagas: what belongs to one is always younger."""

    def __init__(self, kit: AgentKit) -> None:
        self.kit = kit
        self._inner: dict[str, list[Thread]] = {}
        self._later: dict[str, list[Thread]] = {}
        self._restarted: set[str] = set()

    def __iter__(self) -> Iterator[Story]:
        for thread in self._threads(0):
            story = self._placed(thread)
            if story is not None:
                yield story

    def everything(self) -> Iterator[Story]:
        """Every saga by itself, those inside others and those that followed others too."""
        for thread in self._threads(0):
            yield Story(self.kit, thread, [], self._take_later(thread), [])
            if thread.saga.of:
                self._later.setdefault(thread.saga.of, []).insert(0, thread)

    def of(self, saga: Saga) -> Story:
        """The story that a saga is told in: for one that followed another, the other's."""
        top = saga
        while top.parent and (outer := self.kit.engine.state.past(top.parent)) is not None:
            top = outer
        origin = self._first_of(top)
        if origin is not top:
            return self.of(origin)
        for thread in self._threads(top.opened_seq):
            story = self._placed(thread)
            if thread.saga.id == top.id:
                found = story or self._story(thread)
                return found if saga is top else self._inner_story(found, saga)
        raise LookupError(saga.id)

    def _first_of(self, saga: Saga) -> Saga:
        """The saga on whose behalf this one runs; itself for one with a life of its own."""
        thread = thread_of(self.kit, saga.id) if saga.of else None
        past = self.kit.engine.state.past(saga.of) if saga.of else None
        if thread is None or past is None or not thread.carried or past.out == "continued":
            return saga
        return past

    def _inner_story(self, outer: Story, saga: Saga) -> Story:
        inner = {thread.saga.id: thread for thread in outer.inner}
        if saga.id not in inner:
            return outer
        below = [thread for thread in outer.inner if thread.saga.parent == saga.id]
        return Story(self.kit, inner[saga.id], below, outer.later, [])

    def _threads(self, down_to: int) -> Iterator[Thread]:
        before: int | None = None
        while rows := self.kit.log.sagas(before=before, limit=PAGE):
            for row in rows:
                if row.first < down_to:
                    return
                thread = thread_of(self.kit, row.saga)
                if thread is not None:
                    yield thread
            before = rows[-1].first

    def _placed(self, thread: Thread) -> Story | None:
        """The story of a saga of its own; None for one that belongs to an older one, and is kept for it."""
        saga = thread.saga
        follows = saga.of and bool(thread.carried)
        if follows:
            self._later.setdefault(saga.of, []).insert(0, thread)
        elif saga.of:
            self._restarted.add(saga.of)
        if saga.parent:
            self._inner.setdefault(saga.parent, []).insert(0, thread)
            return None
        if follows and not self._continues(saga):
            return None
        story = self._story(thread)
        return None if saga.id in self._restarted and not story.standing else story

    def _continues(self, saga: Saga) -> bool:
        past = self.kit.engine.state.past(saga.of)
        return past is not None and past.out == "continued"

    def _story(self, thread: Thread) -> Story:
        inner = [thread]
        for member in inner:
            inner += self._inner.get(member.saga.id, [])
        later = [found for member in inner for found in self._take_later(member)]
        for found in later:
            later += [more for more in self._take_later(found) if more not in later]
        return Story(self.kit, thread, inner[1:], later, self._earlier(thread))

    def _take_later(self, thread: Thread) -> list[Thread]:
        return list(self._later.get(thread.saga.id, ()))

    def _earlier(self, thread: Thread) -> list[Thread]:
        found: list[Thread] = []
        while thread.saga.of and not thread.carried:
            before = thread_of(self.kit, thread.saga.of)
            if before is None:
                break
            found.insert(0, before)
            thread = before
        return found
