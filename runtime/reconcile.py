"""The world is asked, and not the log: is every effect there that the log says is there, and is every other one gone?

Each effect gets one of three answers. CONFIRMED: the world is as the log says. DRIFT: it is not. UNVERIFIABLE: nobody
could tell, be it that nothing was there to ask, that it raised, was too late, answered something else, or needs what
the log does not hold. Only where all are CONFIRMED is the answer clean. No effect is run, and no inverse.

Of an effect that the log knows nothing about (its answer, or that of its inverse, was lost with a process), the answer
settles the step as a probe does in an unwinding; what is due after that is done by whoever recovers. A saga that is
driven is left to its driver.

Questions (question.py) are put one after the other, each under a deadline, and their answers are facts (drift.py). Why
not many at once: they go to the same few far sides, and a reconciliation must not be what takes those down.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..store.chain import Decide, Draft
from ..store.clock import Now
from ..store.errors import AmendsError
from ..store.evidence import DatabaseError
from ..store.log import FILED
from . import step as life
from .carry import carry
from .config_file import BadConfig, current
from .drift import CONFIRMED, DONE, DRIFT, OBSERVED, UNVERIFIABLE, Turn, left_ms
from .facts import body, fact
from .gate.freeze import QUARANTINED, freeze
from .hosts import Hosts, Outcome
from .inverse import NONE
from .openings import known_as
from .plain import plain
from .question import Asked, Untold, question
from .saga import ENDED, RUNNING, SUSPENDED, Saga
from .state import State
from .step import may_land_for
from .story import StepStory, Stories, Story, Thread, thread_of
from .unwind import LOST, of, probed
from .values import encode, fitting

if TYPE_CHECKING:
    from .kit import AgentKit

TIMEOUT_S = 10.0
"""Seconds for one answer."""
PRESENT, ABSENT, EITHER = "present", "absent", "either"
UNSETTLED = frozenset({life.UNKNOWN, life.UNDO_LOST})
"""States in which the log does not know whether the effect stands."""
EXPECTED = {
    life.DONE: PRESENT, life.CONFIRMED: PRESENT, life.UNCONFIRMED: PRESENT, life.CONFIRMING: PRESENT,
    life.CONFIRM_LOST: PRESENT, life.STUCK: PRESENT, life.COMPENSATED: ABSENT, life.FAILED: ABSENT,
    life.UNKNOWN: EITHER, life.UNDO_LOST: EITHER, life.INTENDED: EITHER, life.UNDOING: EITHER,
}  # fmt: skip
"""What the log says of the world, by the state of a step that was performed."""

WHY = {
    "missing": "The log says that it stands, and it is not there.",
    "unexpected": "The log says that it does not stand, and it is there.",
    "differs": "It is there, and not as the log says.",
    "present": "It is there.",
    "absent": "It is not there.",
    "accepted": "It is not as the log says, which a person has accepted.",
    "no_reconciler": "Nothing is there to ask: no reconciler for its tool, and no probe that was recorded.",
    "cannot_tell": "What was asked could not tell.",
    "no_answer": "What was asked gave no answer.",
    "no_host": "What was to be asked could not be started.",
    "no_argument": "What was to be asked needs what the call did not have.",
    "secret": "What was to be asked needs a secret, of which the log holds a fingerprint only.",
    "unreadable": "What was to be asked needs what cannot be read from the log.",
    "may_land": "It may still change: an answer that was lost may be on its way.",
    "moved": "What the log says changed while the world was asked.",
    "unsettled": "The world says how it is, and the log was left as it is.",
}
"""What an answer means, by its code."""


class Verdict(NamedTuple):
    """What the world said of an effect: out is confirmed, drift or unverifiable, why a code of WHY, said the rest in
    words. saga: the id the user gave, else the header id. settled: the log did not know, and does now."""

    saga: str
    step: int
    tool: str
    expected: str
    out: str
    why: str
    said: str = ""
    host: str = ""
    settled: bool = False

    @property
    def reason(self) -> str:
        """All of it in one line."""
        return " ".join(filter(None, (WHY.get(self.why, self.why), self.said)))

    def to_json(self) -> dict[str, Any]:
        return {
            "saga": self.saga, "step": self.step, "tool": self.tool, "expected": self.expected, "why": self.why,
            "reason": self.reason, "host": self.host or None,
        }  # fmt: skip


class Reconciled:
    """What the world said of all of them. Of those that are confirmed, only the number is kept. running: effects of
    sagas that are driven, about which nobody was asked."""

    def __init__(self) -> None:
        self.confirmed = self.running = 0
        self.drift: list[Verdict] = []
        self.unverifiable: list[Verdict] = []
        self.settled: list[Verdict] = []

    def add(self, verdict: Verdict) -> None:
        """Take one in."""
        if verdict.settled:
            self.settled.append(verdict)
        if verdict.out == CONFIRMED:
            self.confirmed += 1
        else:
            (self.drift if verdict.out == DRIFT else self.unverifiable).append(verdict)

    @property
    def examined(self) -> int:
        return self.confirmed + len(self.drift) + len(self.unverifiable)

    @property
    def clean(self) -> bool:
        """Whether the world is known to be as the log says."""
        return not self.drift and not self.unverifiable

    @property
    def exit(self) -> int:
        """0 clean, 1 drift, 3 not known."""
        return 1 if self.drift else 3 if self.unverifiable else 0

    def counts(self) -> dict[str, int]:
        """How many of each, without those of which there is none."""
        told = {CONFIRMED: self.confirmed, DRIFT: len(self.drift), "examined": self.examined,
                UNVERIFIABLE: len(self.unverifiable)}  # fmt: skip
        return {name: count for name, count in told.items() if count}

    def to_json(self) -> dict[str, Any]:
        return {
            "clean": self.clean,
            "examined": self.examined,
            "confirmed": self.confirmed,
            "drift": [verdict.to_json() for verdict in self.drift],
            "unverifiable": [verdict.to_json() for verdict in self.unverifiable],
            "settled": [verdict.to_json() for verdict in self.settled],
            "running": self.running,
        }


# ---- which effects --------------------------------------------------------------------------------------------------


class Scope(NamedTuple):
    """What to ask about. sagas: header ids, none for all; since: microseconds, effects announced from then on."""

    sagas: frozenset[str] = frozenset()
    tool: str = ""
    since: int = 0

    def takes(self, one: StepStory) -> bool:
        """Whether a step is in it."""
        return self.tool in ("", one.step.tool) and one.step.at >= self.since


EVERYTHING = Scope()
RECENT_DAYS = 30
"""How far back is asked where nobody says otherwise: what stood for so long is settled on the far side too."""


def recent(kit: AgentKit) -> Scope:
    """What is asked about where nobody says otherwise."""
    return Scope(since=kit.log.now().at - RECENT_DAYS * 86_400 * 1_000_000)


class Effect(NamedTuple):
    """One effect, and what the log says of the world. saga: the id the user gave. state: of its step; held: fence and
    driver of the saga it stands in, as they were when it was looked at: the fold moves on."""

    one: StepStory
    expected: str
    saga: str
    state: str
    held: tuple[int, str]


def effects(kit: AgentKit, scope: Scope = EVERYTHING) -> Iterator[Effect | None]:
    """Every effect in scope, newest saga first; None for one whose saga is driven now."""
    rows = kit.log.sagas()
    there = {row.saga for row in rows}
    later: dict[str, list[Thread]] = {}
    for row in rows:
        if scope.since and not row.open and kit.log.record(row.head).entry.at < scope.since:
            continue
        thread = thread_of(kit, row.saga)
        if thread is None:
            continue
        if thread.saga.of and thread.carried:
            later.setdefault(thread.saga.of, []).insert(0, thread)
        story = Story(kit, thread, [], _after(thread, later), [])
        if not scope.sagas or scope.sagas & {member.saga.id for member in story.threads}:
            yield from _performed(kit, story, scope, there)


def _after(thread: Thread, later: Mapping[str, list[Thread]]) -> list[Thread]:
    """What followed a saga, and what followed that."""
    found = list(later.get(thread.saga.id, ()))
    for one in found:
        found += later.get(one.saga.id, ())
    return found


def _performed(kit: AgentKit, story: Story, scope: Scope, there: set[str]) -> Iterator[Effect | None]:
    told_elsewhere = {
        record.entry.step
        for record in story.root.records
        if record.entry.kind == "step.carried" and record.entry.ref and record.entry.of in there
    }
    name = ""
    for one in story.steps:
        expected = _expected(one) if one.step.attempts and scope.takes(one) else ""
        if not expected or one.step.number in told_elsewhere:
            continue
        name = name or _name(kit, story.saga.id)
        saga = one.now_in.saga
        held = (saga.fence, saga.driver)
        yield None if _driven(kit, saga) else Effect(one, expected, name, one.now.state, held)


def _name(kit: AgentKit, saga: str) -> str:
    try:
        return known_as(kit.log, saga)
    except AmendsError:  # what it was called cannot be read
        return saga


def _expected(one: StepStory) -> str:
    """What the log says of the world; empty for what was never performed."""
    step = one.now
    if step.state == life.ACCEPTED:  # in a person's name, who knew that it stands, or that nobody knows
        return PRESENT if step.ended_seq and not step.undo_attempts else EITHER
    return EXPECTED.get(step.state, "")


def _driven(kit: AgentKit, saga: Saga) -> bool:
    if saga.phase == ENDED:
        return False
    root = kit.engine.state.root(saga)
    return root.id in kit.engine.runs or bool(root.driver and kit.holds(root.driver))


# ---- asking ---------------------------------------------------------------------------------------------------------


class Asking:
    """One reconciliation of many effects. `stop` ends it between two questions."""

    def __init__(self, kit: AgentKit, hosts: Hosts, timeout: float, stop: threading.Event) -> None:
        self.kit, self.hosts, self.timeout, self.stop = kit, hosts, timeout, stop

    def about(self, effect: Effect) -> Verdict:
        """Ask the world about one effect, write down what it said, and settle what the log did not know."""
        self._lost_with_its_process(effect)
        asked = question(self.hosts, effect.one)
        if isinstance(asked, Untold):
            verdict = _verdict(effect, UNVERIFIABLE, asked.why, asked.said)
        else:
            verdict = self._heard(effect, asked)
        self._note(effect, verdict)
        return verdict

    def _lost_with_its_process(self, effect: Effect) -> None:
        """What a dead process was at is lost, and that is said before anybody is asked: it may land from now on."""
        saga, number, was = effect.one.now_in.saga, effect.one.now.number, effect.state
        if was not in LOST or left_alone(self.kit, saga):
            return

        def decide(state: State, now: Now) -> Sequence[Draft]:
            found = state.sagas.get(saga.id)
            if found is None or (found.fence, found.driver) != effect.held or found.steps[number].state != was:
                return ()
            return (of(found, LOST[was], step=number, why="died", up=True),)

        self.kit.log.commit(decide)

    def _heard(self, effect: Effect, asked: Asked) -> Verdict:
        said = asked.put(self.timeout)
        lands_s = self._may_land(effect)
        if lands_s and said.outcome == (PRESENT if effect.state in _UNDONE else ABSENT):
            if lands_s > self.timeout or self.stop.wait(lands_s):
                return _verdict(effect, UNVERIFIABLE, "may_land", host=asked.host)
            said = asked.put(self.timeout)
        if said.outcome in (PRESENT, ABSENT):
            return self._compared(effect, said._replace(host=asked.host))
        words = said.note or said.why
        return _verdict(
            effect, UNVERIFIABLE, _NO_ANSWER.get(said.outcome, "no_answer"), f"({words})" if words else "", asked.host
        )

    def _may_land(self, effect: Effect) -> float:
        """Seconds for which what nobody knows about may still happen."""
        saga = self.kit.engine.state.sagas.get(effect.one.now_in.saga.id)
        step = saga.steps.get(effect.one.now.number) if saga else None
        if step is None or step.state not in UNSETTLED:
            return 0.0
        return may_land_for(step, self.kit.log.now().lived) / 1000

    def _compared(self, effect: Effect, said: Outcome) -> Verdict:
        """What the world said beside what the log says."""
        out, words = said.outcome, said.differs or said.note
        by_hand = effect.state == life.STUCK and out == ABSENT  # its inverse failed, and somebody undid it
        if by_hand or (effect.expected == EITHER and effect.state != life.ACCEPTED):
            left = self._settle(effect, said)
            if left:
                return _verdict(effect, UNVERIFIABLE, "unsettled", left, said.host)
            settled = _verdict(effect, CONFIRMED, out, words, said.host)._replace(settled=True)
            return settled._replace(out=DRIFT, why="differs") if said.differs else settled
        why = "differs" if said.differs else ""
        if effect.expected not in (EITHER, out):
            why = "missing" if out == ABSENT else "unexpected"
        if not why:
            return _verdict(effect, CONFIRMED, out, words, said.host)
        if self.kit.engine.state.drifts.accounted(effect.one.step.seq, why):
            return _verdict(effect, CONFIRMED, "accepted", words, said.host)
        if self._moved(effect, why):
            return _verdict(effect, UNVERIFIABLE, "moved", host=said.host)
        return _verdict(effect, DRIFT, why, words, said.host)

    def _moved(self, effect: Effect, why: str) -> bool:
        """Whether the log says something else by now: somebody undid it, or took its saga up, while the world was
        asked. A drift that is known was found so before."""
        drifts, seq = self.kit.engine.state.drifts, effect.one.step.seq
        if drifts.waits(seq, why):
            return False
        self.kit.log.refresh()
        saga = self.kit.engine.state.past(effect.one.thread.saga.id)
        steps = Stories(self.kit).of(saga).steps if saga is not None else []
        now = next((one for one in steps if one.step.seq == seq), None)
        return now is None or _expected(now) != effect.expected or _driven(self.kit, now.now_in.saga)

    # -- writing ------------------------------------------------------------------------------------------------------

    def _settle(self, effect: Effect, said: Outcome) -> str:
        """Write what the world said of a step that the log knew nothing about; why not, where that is so."""
        saga, number = effect.one.now_in.saga, effect.one.now.number
        if saga.phase == ENDED:
            self.kit.log.commit(self._followed(effect, said))
            return ""
        if why := left_alone(self.kit, saga):
            return why
        wrote: list[str] = []

        def decide(state: State, now: Now) -> Sequence[Draft]:
            wrote.clear()
            found = state.sagas.get(saga.id)
            step = found.steps[number] if found else None
            if found is None or step is None or step.state not in _SETTLED_BY_IT:
                return ()
            if (found.fence, found.driver) != effect.held:
                return ()
            wrote.append(step.state)
            drafts = [probed(found, step, said, said.outcome, NONE)]
            if step.state == life.UNDO_LOST and said.outcome == ABSENT:
                drafts.append(of(found, "undo.done", step=number, out="already"))
            return drafts

        self.kit.log.commit(decide)
        return "" if wrote else "Somebody else has taken it up meanwhile."

    def _followed(self, effect: Effect, said: Outcome) -> Decide:
        """What nobody knew when its saga ended is settled in a follow-up saga. It ends at once, unless something is
        there that is to be undone: that is then due, as in any other saga that was let go."""
        past, step, out = effect.one.now_in.saga, effect.one.now, said.outcome
        new = self.kit.engine.hide(f"{past.id}\0observed\0{step.seq}")
        stands = past.out in ("committed", "continued")
        told = {"host": said.host, "note": said.note}
        opening = body(**{name: encode(fitting(text)) for name, text in told.items() if text})
        head: dict[str, Any] = {"saga": new, "fence": 1}
        drafts = [
            fact("saga.opened", **head, driver=self.kit.engine.driver, of=past.id, up=True),
            carry(self.kit.log, past, step, new, 1),
            fact("step.probed", opening, **head, step=step.number, out=out),
            fact("saga.concluding" if stands else "saga.unwinding", **head, why="" if stands else "observed", up=True),
            fact("saga.ended", **head, out="committed" if stands else "compensated")
            if stands or out == ABSENT
            else fact("saga.released", **head, up=True),
        ]
        return lambda state, now: () if state.past(new, derived=True) is not None else drafts

    def _note(self, effect: Effect, verdict: Verdict) -> None:
        """The answer as a fact, if the log does not say so yet."""
        ref, out, why = effect.one.step.seq, verdict.out, verdict.why
        told = {"host": verdict.host, "note": verdict.said}
        opening = body(**{name: encode(fitting(text)) for name, text in told.items() if text})
        draft = fact(
            OBSERVED, opening, of=effect.one.thread.saga.id, step=effect.one.step.number, out=out, ref=ref, why=why,
            up=True,
        )  # fmt: skip

        def decide(state: State, now: Now) -> Sequence[Draft]:
            return (draft,) if why != "accepted" and state.drifts.news(ref, out, why) else ()

        self.kit.log.commit(decide, FILED)


_NO_ANSWER = {"cannot_tell": "cannot_tell", "unavailable": "no_host"}
_UNDONE = frozenset({life.UNDO_LOST, life.UNDOING})
_SETTLED_BY_IT = UNSETTLED | {life.STUCK}


def _verdict(effect: Effect, out: str, why: str, said: str = "", host: str = "") -> Verdict:
    step = effect.one.step
    return Verdict(effect.saga, step.number, step.tool, effect.expected, out, why, said, host)


def left_alone(kit: AgentKit, saga: Saga) -> str:
    """Why an open saga is left as it is, whatever the world says; empty if it is not."""
    state = kit.engine.state
    found = state.sagas.get(saga.id)
    if found is None:
        return "Its saga has ended meanwhile."
    root = state.root(found)
    if freeze(state, state.family(root), kit.log.now()) == QUARANTINED:
        return "Its saga is quarantined."
    if root.on_crash == "resume" and root.phase in (RUNNING, SUSPENDED):
        return "Its saga waits to be run again, and settles it then."
    return ""


# ---- all of it ------------------------------------------------------------------------------------------------------


def reconcile(
    kit: AgentKit,
    scope: Scope = EVERYTHING,
    *,
    timeout: float = TIMEOUT_S,
    hosts: Hosts | None = None,
    stop: threading.Event | None = None,
    told: Callable[[int, Verdict], None] = lambda count, verdict: None,
) -> Reconciled:
    """Ask the world about every effect in scope, one after the other; told(count, verdict) hears of each.

    Writes what is news, and once at the end how many were asked about. Raises what the log raises.
    """
    kit.log.refresh()
    asking = Asking(kit, hosts or kit.hosts, timeout, stop or threading.Event())
    found = Reconciled()
    for effect in effects(kit, scope):
        if asking.stop.is_set():
            break
        if effect is None:
            found.running += 1
            continue
        verdict = asking.about(effect)
        found.add(verdict)
        told(found.examined, verdict)
    if found.examined:
        kit.log.commit(lambda state, now: (fact(DONE, use=found.counts(), up=True),), FILED)
    kit.engine.needs_people()
    return found


def would_ask(kit: AgentKit, scope: Scope, hosts: Hosts) -> Iterator[tuple[Effect, Asked | Untold]]:
    """Whom a reconciliation would ask about what; nobody is asked, and nothing is written."""
    for effect in effects(kit, scope):
        if effect is not None:
            yield effect, question(hosts, effect.one)


# ---- by the clock ---------------------------------------------------------------------------------------------------


class Schedule:
    """Asks about recent effects as often as config.toml says, once per device however many daemons run.

    It has no timer: whoever looks anyway calls `look`. The turn is claimed by a fact and counted in lived time, so time
    that the machine slept counts, and a clock that is set does not. A turn whose process dies is not made up for.
    """

    def __init__(self, kit: AgentKit, stop: threading.Event) -> None:
        self._kit, self._stop = kit, stop
        self._thread: threading.Thread | None = None
        self._every_s = 0.0

    def look(self) -> None:
        """Begin a turn on a thread of its own, if one is due and nobody else has it. Raises what the log raises."""
        every_ms = int(self._every() * 1000)
        if not every_ms or self._busy() or self._stop.is_set():
            return
        if left_ms(self._kit.engine.state, self._kit.log.now(), every_ms):
            return
        turn = Turn(every_ms)
        self._kit.log.commit(turn)
        if turn.ours:
            self._thread = threading.Thread(target=self._ask, name="amends-reconcile", daemon=True)
            self._thread.start()

    def _every(self) -> float:
        """Seconds between turns, as config.toml says now; of a broken file what it said before: whoever tells people
        says that it is broken."""
        if self._kit.home is not None:
            with suppress(BadConfig):
                self._every_s = current(self._kit.home.config).reconcile_s
        return self._every_s

    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _ask(self) -> None:
        try:
            found = reconcile(self._kit, recent(self._kit), stop=self._stop)
        except (AmendsError, DatabaseError) as error:
            if not self._stop.is_set():
                sys.stderr.write(f"amends: the world was not asked: {error} It is, at the next turn.\n")
            return
        if not found.clean:
            first = [*found.drift, *found.unverifiable][0]
            told = f"{len(found.drift)} drift, {len(found.unverifiable)} unverifiable, of {found.examined}; the first: "
            told += plain(f"{first.saga} step {first.step} {first.tool}. {first.reason}")
            sys.stderr.write(f"amends: the world was asked, and is not known to be as the log says: {told}\n")

    def close(self) -> None:
        """Wait for the question that is open; no other one is put once `stop` is set."""
        if self._thread is not None:
            self._thread.join()
