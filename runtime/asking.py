"""An irreversible step waits for people, and starts on exactly what they said yes to.

The question is a fact before anybody is told of it. While it is open the asking process sleeps on the log: an answer, a
level that is due and the deadline wake it. When enough people have said yes, the evidence of each vote is checked once
more against the keyring as it is now, outside the transaction; `spend` then compares, inside the transaction that
announces the effect, that the keyring, the votes, the deadline, the call and why people are asked are still those.
Whatever differs asks again. A yes that was never spent is withdrawn with its saga, or spent by whoever resumes it.

Why not check the votes only when they are cast: a key that was revoked since then must not count.
"""

from __future__ import annotations

import base64
import os
import unicodedata
from collections.abc import Collection, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from ..store.chain import Draft
from ..store.clock import Now
from ..store.entry import leaf
from ..store.errors import BadValue, Fenced, Refused
from .drive import Drive
from .facts import body, fact
from .gate import keyring
from .gate.approvals import (
    APPROVED,
    DENIED,
    EXPIRED,
    PENDING,
    Asked,
    binds,
    bound,
    due_level,
    each,
    left_ms,
    reasons_in,
    request_of,
    standing,
    tier_of,
)
from .gate.levels import LEVELS, NAMED
from .gate.question import ALLOW, Question, Reason, Refusal, Tier, Verdict
from .gate.signing import able, request_text, verified, vote_told
from .state import State
from .step import DONE, FAILED, REFUSED, UNKNOWN, WAITING, Step
from .tools import defaults
from .values import encode, fitting

if TYPE_CHECKING:
    from .engine import Run
    from .perform import Call

LOOK = 1.0
"""Seconds after which a waiting process looks at the log even if nothing woke it."""


class Answered(NamedTuple):
    """What people said to one request. votes: the records whose evidence holds against the keyring with this head;
    asked_by: the limits and rules that they were told of.

    request is empty for a step of a resumed saga that was let go before it was lost: it goes on under its own key.
    """

    request: str
    votes: tuple[int, ...] = ()
    head: str = ""
    step: int = 0
    asked_by: frozenset[str] = frozenset()


async def ask(drive: Drive, run: Run, call: Call, question: Question, verdict: Verdict) -> Answered:
    """Wait until people have let a step happen. Raises Refused (denied, expired, withdrawn, no_approver), which is
    recorded then; Fenced if the saga was taken over; BadValue for arguments that cannot be signed."""
    log = run.engine.log
    while True:
        size = log.size
        log.refresh()
        step = _mine(run, call)
        if _goes_on(call, step):
            return Answered("", step=call.number)
        if step is not None and step.state == DONE:
            raise Refused(
                f"{call.tool} happened after all: an earlier attempt landed while people were asked about another.",
                next=f"See `amends show {run.name}`.", code="landed",
            )  # fmt: skip
        asked = run.engine.state.approvals.of(run.id, call.number)
        if step is None or step.state == FAILED or asked is None:
            await _open(drive, run, call, question, verdict, asked)
            continue
        said = standing(run.engine.state.approvals, asked.request, log.now().lived)
        if asked.over or said in (DENIED, EXPIRED):
            await _close(drive, run, call, question, asked, said)
        text = request_text(log, asked)
        if said == APPROVED and call.reread is not None:
            call.reread()  # what a caller changed while it waited is another call
        if text is None or not binds(text, _request(run, call, question)) or _more(verdict.asks, reasons_in(text)):
            await _open(drive, run, call, question, verdict, asked)
            continue
        dead: frozenset[int] = frozenset()
        if said == APPROVED:
            answered = _counted(run, call, asked, text)
            dead = _dead(asked, answered)
            if standing(run.engine.state.approvals, asked.request, log.now().lived, dead) == APPROVED:
                return answered
        await _escalate(drive, run, question, asked, dead)
        await drive.grown(log, size, _nap(run, question, asked))


def spend(state: State, run: Run, question: Question, verdict: Verdict, answered: Answered, now: Now) -> Verdict:
    """Whether the answer may be spent on the call that is about to start; if not, people are asked again, or are heard.

    Pure: runs inside the transaction that announces the effect. verdict: why people are to be asked, by now.
    """
    saga = state.sagas.get(run.id)
    step = saga.steps.get(answered.step) if saga else None
    if not answered.request:
        return Verdict(ALLOW) if step is not None and step.state == UNKNOWN else verdict
    asked = state.approvals.of(run.id, answered.step)
    if asked is None or asked.request != answered.request or asked.over:
        return verdict
    dead = _dead(asked, answered)
    tier = tier_of(question, bool(state.keys.head))
    holds = (
        state.keys.head == answered.head
        and standing(state.approvals, asked.request, now.lived, dead) == APPROVED
        and (asked.tool, asked.sem, asked.policy) == (question.tool, question.sem, question.policy)
        and (asked.level, asked.quorum) == (tier.level, tier.quorum)
        and not _more(verdict.asks, answered.asked_by)
    )
    return Verdict(ALLOW) if holds else verdict


def _more(asks: Sequence[Reason], told: Collection[str]) -> bool:
    """Whether there is a reason to ask that people were not told of."""
    return any(reason.by not in told for reason in asks)


def _dead(asked: Asked, answered: Answered) -> frozenset[int]:
    """The votes whose evidence does not hold any more."""
    return frozenset(vote.seq for vote in asked.votes) - frozenset(answered.votes)


def waiting(state: State, saga: str, number: int) -> bool:
    """Whether people have been asked about a step, and it has not started."""
    found = state.sagas.get(saga)
    step = found.steps.get(number) if found else None
    return step is not None and step.state == WAITING


# ---- whose step it is -----------------------------------------------------------------------------------------------


def _mine(run: Run, call: Call) -> Step | None:
    """The step as the log has it. Raises Fenced if somebody else drives its saga."""
    saga = run.saga(run.engine.state)
    if saga is None:
        if run.gone or run.opening is None:
            raise Fenced(f"Saga {run.name} is no longer open.", next=f"Run `amends show {quote(run.name)}`.")
        return None
    if saga.fence != run.fence:
        raise Fenced(f"Saga {run.name} was taken over while it waited.", next=f"Run `amends show {quote(run.name)}`.")
    return saga.steps.get(call.number)


def _goes_on(call: Call, step: Step | None) -> bool:
    """Whether its approval was spent on a sending whose answer was lost, and its key makes twice once. What is known
    not to have happened is asked about again."""
    return step is not None and step.state == UNKNOWN and call.keyed


# ---- the question ---------------------------------------------------------------------------------------------------


def _request(run: Run, call: Call, question: Question, **fields: Any) -> bytes:
    """The canonical request for a call as it stands."""
    engine = run.engine
    tier = tier_of(question, bool(engine.state.keys.head))
    told = {
        "ledger_id": leaf(engine.log.record(0).line).hex(),
        "executor": engine.log.origin,
        "saga": run.id,
        "saga_name": _composed(run.name),
        "step": call.number,
        "tool": call.tool,
        "effect": call.sem.value,
        "idempotency_key": call.key,
        "requester": _composed(engine.agent),
        "on_behalf_of": _composed(engine.on_behalf_of),
        "policy": question.policy,
        "quorum": tier.quorum,
        "level": LEVELS[tier.level][0],
        "roles": sorted(_composed(role) for role in tier.roles),
        "defaults": _defaults(call),
        "break_glass": tier.break_glass,
    }
    return request_of({**told, **fields}, call.all_args)


def _defaults(call: Call) -> dict[str, Any]:
    """What the call leaves to the tool takes effect as well, and is shown. A default that the log could not hold is
    named by its type."""
    left = {name: value for name, value in defaults(call.fn).items() if name not in call.kwargs}
    left.pop("idempotency_key", None)
    return {name: {"$": "secret"} if name in call.secret else _shown(value) for name, value in left.items()}


def _shown(value: Any) -> Any:
    try:
        return bound(encode(value))
    except BadValue:
        return {"$": "object", "v": type(value).__name__}


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


async def _open(drive: Drive, run: Run, call: Call, question: Question, verdict: Verdict, before: Asked | None) -> None:
    """Ask: the request is durable when this returns."""
    engine = run.engine
    tier = tier_of(question, bool(engine.state.keys.head))
    await _refuse_if_nobody_can(drive, run, call, question, tier)
    now = engine.log.now()
    created = (now.wall or now.at) // 1000
    saga = run.saga(engine.state)
    step = saga.steps.get(call.number) if saga else None
    text = _request(
        run, call, question,
        attempt=step.attempts + 1 if step else 1,
        created=created,
        expires=created + tier.within_ms,
        nonce=base64.urlsafe_b64encode(os.urandom(32)).decode().rstrip("="),
        keyring_head=engine.state.keys.head,
        reasons=[_composed(reason.said) for reason in verdict.asks if reason.said],
        asked_by=[reason.by for reason in verdict.asks],
        supersedes=before.request if before is not None and not before.over else "",
    )  # fmt: skip
    await drive.commit(engine.log, run.facts(_asked(call, question, tier, text)))
    engine.needs_people()


def _asked(call: Call, question: Question, tier: Tier, text: bytes) -> Draft:
    from .gate.statement import request_digest

    return fact(
        "step.asked",
        body(args=call.args, identity=encode(call.identity)),
        body(request=encode(text.decode())),  # by itself: it repeats what may stand apart, and may go before the rest
        *call.apart,
        step=call.number,
        tool=call.tool,
        sem=call.sem.value,
        key=call.key,
        request=request_digest(text),
        level=tier.level,
        quorum=tier.quorum,
        within_ms=tier.within_ms,
        policy=question.policy,
        up=True,
    )


async def _refuse_if_nobody_can(drive: Drive, run: Run, call: Call, question: Question, tier: Tier) -> None:
    """A question that no enrolled key can answer is refused at once, and nobody is woken."""
    refusal = _unanswerable(call, tier, keyring.read(run.engine.log))
    if refusal is not None:
        await drive.commit(run.engine.log, run.facts(refused(run, question, call.number, refusal.code, refusal.said)))
        raise Refused(refusal.said, next=refusal.next, code=refusal.code)


def _unanswerable(call: Call, tier: Tier, ring: keyring.Ring) -> Refusal | None:
    frozen = keyring.check_ring(ring)
    if frozen is not None or (tier.level == NAMED and not tier.roles) or able(ring, each(tier.level), tier.roles):
        return frozen
    role = f" of {' or '.join(tier.roles)}" if tier.roles else ""
    return Refusal(
        "no_approver",
        f"{call.tool} needs a key{role} that can show {LEVELS[each(tier.level)][1]}, and none is enrolled.",
        "Enrol one: `amends keys enrol`; `amends keys list` shows those there are.",
    )


def refused(run: Run, question: Question, number: int, why: str, said: str, ref: int = 0) -> Draft:
    """The fact of a refusal, without the secrets that were passed in. ref: the record of a no."""
    return fact(
        "step.refused",
        body(reason=encode(fitting(run.hush(said)))),
        step=number,
        tool=question.tool,
        sem=question.sem,
        ref=ref,
        why=why,
        policy=question.policy,
        up=True,
    )


# ---- while it is open -----------------------------------------------------------------------------------------------


def _nap(run: Run, question: Question, asked: Asked) -> float:
    """Seconds until something is due without anybody having written."""
    lived = run.engine.log.now().lived
    tier = tier_of(question, bool(run.engine.state.keys.head))
    moments = [left_ms(asked, lived) + 1]
    moments += [asked.lived + after_ms - lived for after_ms, _ in tier.levels[asked.reached :]]
    return max(0.001, min(LOOK, min(moments) / 1000))


async def _escalate(drive: Drive, run: Run, question: Question, asked: Asked, dead: frozenset[int]) -> None:
    """Say that the next level is told, once, inside the transaction that an answer would have to come before."""
    tier = tier_of(question, bool(run.engine.state.keys.head))
    if due_level(asked, tier, run.engine.log.now().lived) <= asked.reached:
        return

    def decide(state: State, now: Now) -> Sequence[Draft]:
        saga, found = state.sagas.get(run.id), state.approvals.requests.get(asked.request)
        if saga is None or saga.fence != run.fence or found is None:
            return ()
        if standing(state.approvals, asked.request, now.lived, dead) != PENDING:
            return ()
        levels = range(found.reached + 1, due_level(found, tier, now.lived) + 1)
        return [
            fact(
                "approval.escalated", body(targets=encode(list(tier.levels[level - 1][1]))), request=asked.request,
                level=level, up=True,
            )
            for level in levels
        ]  # fmt: skip

    await drive.commit(run.engine.log, decide)
    run.engine.needs_people()


def _counted(run: Run, call: Call, asked: Asked, text: bytes) -> Answered:
    """What people said, with the votes whose evidence holds against the keyring of now."""
    ring = keyring.read(run.engine.log)
    votes = verified(run.engine, ring, asked, text)
    return Answered(asked.request, tuple(sorted(votes)), ring.head, call.number, reasons_in(text))


async def _close(drive: Drive, run: Run, call: Call, question: Question, asked: Asked, said: str) -> None:
    """The question is over without a yes: record it where that is still to be done, and raise it."""
    no = _no(run, call, asked, said)
    deny = next((vote.seq for vote in asked.votes if vote.out == "deny"), 0) if said == DENIED else 0
    guarded = run.facts(refused(run, question, call.number, said, no.message, deny))

    def decide(state: State, now: Now) -> Sequence[Draft]:
        saga = state.sagas.get(run.id)
        step = saga.steps.get(call.number) if saga else None
        if step is None or step.state != WAITING or standing(state.approvals, asked.request, now.lived) != said:
            return ()
        return guarded(state, now)

    saga = run.saga(run.engine.state)
    step = saga.steps.get(call.number) if saga else None
    if step is not None and step.state != REFUSED and not asked.over:
        await drive.commit(run.engine.log, decide)
    raise no


def _no(run: Run, call: Call, asked: Asked, said: str) -> Refused:
    show = f"Run `amends show {quote(run.name)}`."
    if said == DENIED:
        by, note = vote_told(run.engine.log, next(vote for vote in asked.votes if vote.out == "deny").seq)
        note = f": {note.rstrip('.')}" if note else ""
        return Refused(f"{by or 'Somebody'} denied {call.tool}{note}.", next=show, code=DENIED)
    if said == EXPIRED:
        return Refused(f"{call.tool} was not answered in time.", next="Ask again.", code=EXPIRED)
    return Refused(f"{call.tool} is not asked about any more: its saga was given up.", next=show, code="withdrawn")
