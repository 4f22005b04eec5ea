"""The only policy: may this call happen, now, given everything that every process of this device has written?

The order is switch, breaker, limits, rules, locks, approvals. The first that objects ends it: a halted device spends no
budget on deciding to refuse, and nobody is woken for a call that cannot proceed. Reasons to ask a person are gathered
and asked at once. It is pure and runs inside the write transaction, on the fold of everything committed before, so that
what it checked and what its facts debit cannot come apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...store.clock import Now
from .breaker import check_breaker
from .clock import check_clock
from .limits import check_limits
from .locks import check_locks
from .question import ALLOW, ASK, REFUSE, Question, Reason, Refusal, Verdict
from .switch import check_switch

if TYPE_CHECKING:
    from ..state import State

Answer = tuple[Refusal | None, tuple[Reason, ...]]
"""Why not, or for which reasons a person is asked."""


def _switch(state: State, question: Question, now: Now) -> Answer:
    return check_switch(state, question, now), ()


def _breaker(state: State, question: Question, now: Now) -> Answer:
    return check_breaker(state, question, now) if question.breaker is not None else None, ()


def _limits(state: State, question: Question, now: Now) -> Answer:
    if question.refused is not None:
        return question.refused, ()
    return check_limits(state, question, now) if question.debits else (None, ())


def _rules(state: State, question: Question, now: Now) -> Answer:
    ruling = question.ruling
    if ruling.verdict == REFUSE:
        return Refusal(
            ruling.code or "blocked",
            f"{question.tool} is blocked by rule {ruling.rule}" + (f": {ruling.reason}" if ruling.reason else "."),
            "Do something else; the same call will be refused again.",
            {"rule": ruling.rule},
        ), ()
    asks = (Reason(f"rule {ruling.rule}", ruling.reason or ruling.rule),) if ruling.verdict == ASK else ()
    return None, asks


def _locks(state: State, question: Question, now: Now) -> Answer:
    return check_locks(state, question, now) if question.locks else None, ()


def _approvals(state: State, question: Question, now: Now) -> Answer:
    """People are asked outside the transaction (asking.py), and nobody is where no signature counts or no deadline
    could be trusted."""
    return question.ring or check_clock(state, question, now), ()


CHECKS: tuple[tuple[str, Callable[[State, Question, Now], Answer]], ...] = (
    ("switch", _switch),
    ("breaker", _breaker),
    ("limits", _limits),
    ("rules", _rules),
    ("locks", _locks),
    ("approvals", _approvals),
)
"""In this order."""

EACH_ATTEMPT = ("switch", "breaker", "limits")
"""What a retry asks again."""


def judge(state: State, question: Question, now: Now) -> Verdict:
    """Allow, ask or refuse a call. Changes nothing."""
    asks: tuple[Reason, ...] = ()
    for name, check in CHECKS:
        if question.attempt > 1 and name not in EACH_ATTEMPT:
            continue
        refusal, reasons = check(state, question, now)
        if refusal is not None:
            return Verdict(REFUSE, refusal)
        asks += reasons
    return Verdict(ASK, None, asks) if asks and question.attempt == 1 else Verdict(ALLOW)
