"""Judged and announced in one transaction: the gate's verdict, what it debits and the intent are one commit, or the
refusal is.

A call that no limit, lock, breaker or approval touches and whose inverse lives in memory is judged on the fold as last
read, without a transaction (HOUSE 6). Everything else is decided where it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..store.chain import Draft
from ..store.clock import Now
from ..store.errors import Refused
from ..store.log import FILED
from .asking import Answered, ask, refused, spend, waiting
from .drive import Drive
from .facts import body, fact
from .gate.limits import declares, uses
from .gate.locks import LOCK_HELD, overdue, wanted
from .gate.pipeline import judge
from .gate.question import ALLOW, ASK, REFUSE, Question, Refusal, Verdict
from .gate.switch import check_switch
from .state import State
from .values import encode

if TYPE_CHECKING:
    from .engine import Run
    from .perform import Call

LOCK_TIMEOUT = 30.0
"""Seconds that a call waits for a name that another saga holds, unless it says otherwise."""
LOOK = 1.0


class Admission:
    """The decision about one call: its intent with all that the gate takes for it, the refusal, or nothing yet.

    `verdict` is what was decided when it last ran. intent() makes the announcing fact anew each time. answered: what
    people have answered, if they were asked. patient: a name that another saga holds is no reason to refuse yet.
    then: facts of the same saga that follow the intent in its commit.
    """

    def __init__(
        self, run: Run, question: Question, number: int, intent: Callable[[], Draft], then: Sequence[Draft] = ()
    ) -> None:
        self.run, self.question, self.number, self.intent, self.then = run, question, number, intent, then
        self.answered: Answered | None = None
        self.patient = self.waited = False
        self.verdict = Verdict(ALLOW)

    def __call__(self, state: State, now: Now) -> Sequence[Draft]:
        question = self.question
        self.verdict = verdict = judge(state, question, now)
        if verdict.verdict == ALLOW and waiting(state, self.run.id, self.number):
            self.verdict = verdict = Verdict(ASK)  # whoever was asked is heard, also if nobody would be asked by now
        if verdict.verdict == ASK and self.answered is not None:
            self.verdict = verdict = spend(state, self.run, question, verdict, self.answered, now)
        if verdict.verdict == REFUSE:
            refusal = verdict.refusal
            assert refusal is not None
            if question.attempt > 1:
                return ()
            if refusal.code == LOCK_HELD:
                if self.patient:
                    return self._waits(state, now, refusal)
                if self.waited:
                    refusal = overdue(refusal)
                    self.verdict = verdict._replace(refusal=refusal)
            return self.run.facts(refused(self.run, question, self.number, refusal.code, refusal.said))(state, now)
        return () if verdict.verdict == ASK else self._allowed(state, now)

    def _waits(self, state: State, now: Now, refusal: Refusal) -> Sequence[Draft]:
        """That it waits is told once."""
        if self.waited:
            return ()
        self.waited = True
        return self.run.facts(fact("lock.awaited", lock=refusal.facts["lock"], up=True))(state, now)

    def _allowed(self, state: State, now: Now) -> Sequence[Draft]:
        """The intent and what it takes: limits as they are declared now, names, debits, the approval."""
        begun = self.run.facts(self._intent())(state, now)
        limits = [fact("limit.set", **header, up=True) for header in declares(state, self.question)]
        owner = self.run.outermost
        names = [
            fact("lock.taken", saga=owner.id, fence=owner.fence, lock=name, up=True)
            for name in wanted(state, self.question)
        ]
        then = self.run.facts(*self.then)(state, now)[-len(self.then) :] if self.then else ()
        return [*limits, *begun[:-1], *names, begun[-1], *then] if limits or names or then else begun

    def _intent(self) -> Draft:
        question, intent = self.question, self.intent()
        fields = intent.fields
        use = uses(question) if question.debits else {}
        if use:
            fields["use"] = dict(sorted(use.items()))
        if question.policy:
            fields["policy"] = question.policy
        if question.tags:
            fields["tags"] = ",".join(question.tags)
        openings = intent.openings
        if self.answered is not None and self.answered.request:
            fields["request"] = self.answered.request
            openings = (*openings, body(votes=encode(list(self.answered.votes))))
        timed = bool(use) or question.breaker is not None  # it counts in a window
        return Draft(intent.kind, fields, openings, intent.up or timed)


def said(refusal: Refusal) -> Refused:
    """A refusal as its caller hears it."""
    facts: Mapping[str, Any] = refusal.facts
    return Refused(refusal.said, next=refusal.next, code=refusal.code, **facts)


async def at_once(drive: Drive, run: Run, call: Call, question: Question) -> None:
    """Judge a call that takes nothing on the fold as last read. Raises Refused, and has recorded it then."""
    log = run.engine.log
    log.glance()
    state: State = run.engine.state
    refusal = check_switch(state, question, log.now()) if state.switches.levers else None
    if refusal is not None:
        await drive.commit(log, run.facts(refused(run, question, call.number, refusal.code, refusal.said)), FILED)
        raise said(refusal)


async def admit(
    drive: Drive, run: Run, call: Call, question: Question, intent: Callable[[], Draft], sync: int,
    then: Sequence[Draft] = (), *, anew: Callable[[], Question],
) -> None:  # fmt: skip
    """Announce a call if the gate lets it, asking people where it must. Raises Refused, and has recorded it then.

    then: what follows in the same commit. anew(): the question as it is by now, since people take their time.
    """
    log = run.engine.log
    admission = Admission(run, question, call.number, intent, then)
    deadline = log.now().up + int(1000 * (LOCK_TIMEOUT if call.lock_timeout is None else call.lock_timeout))
    while True:
        admission.patient = bool(question.locks) and log.now().up < deadline
        size = log.size
        await drive.commit(log, admission, sync)
        verdict = admission.verdict
        if verdict.verdict == ALLOW:
            call.approved = admission.answered is not None
            return
        if verdict.verdict == ASK:
            admission.answered = await ask(drive, run, call, question, verdict)
            admission.question = question = anew()
            continue
        assert verdict.refusal is not None
        if not (admission.patient and verdict.refusal.code == LOCK_HELD):
            raise said(verdict.refusal)
        await drive.grown(log, size, max(0.001, min(LOOK, (deadline - log.now().up) / 1000)))


async def attempt(drive: Drive, run: Run, question: Question, draft: Draft, sync: int) -> Refused | None:
    """Announce another attempt of a step that is under way. A refusal is handed back: it ends the attempts, and how
    the step stands is for their outcome to say."""
    number = draft.fields["step"]
    admission = Admission(run, question._replace(attempt=draft.fields["attempt"]), number, lambda: draft)
    await drive.commit(run.engine.log, admission, sync)
    refusal = admission.verdict.refusal
    return said(refusal) if refusal is not None else None
