"""The circuit breaker: a tool that keeps failing is left alone for a while, and then tried with one call before the
rest.

A call counts once it has run: an attempt that raised, timed out or was not confirmed is a failure, also where a retry
or a fallback hides it from the caller. What never ran does not count: refusals, denials, cancellations, the death of
our own process. Compensations are neither counted nor asked: when a tool fails, undoing is what there is to do.

There is no stored state that says open or closed. The view keeps the newest outcomes of each tool; whether the breaker
is open is played from them when a call is judged, by the policy of whoever asks. A probe is a call in the air that
was let through after the cool-down, so its place is free again when it ends in any way, when its saga ends or changes
hands, and at the latest after another cool-down. If the view knows nothing, calls go through: a breaker protects the
far side, not the money.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from ...store.clock import Now
from ...store.entry import Entry
from ...store.errors import BadValue
from ...store.facts import COMPACTED
from .limits import span
from .question import Question, Refusal

if TYPE_CHECKING:
    from ..state import State

KEPT = 256
"""Outcomes of a tool that are kept, the newest ones."""
LOOKED_BACK_MS = 7 * 86_400_000
"""Lived milliseconds after which an outcome says nothing any more, once records are removed: windows and cool-downs are
a day at most."""


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """Opens after failure_threshold failures in a row, or when of at least min_volume calls within `window` seconds the
    share failure_rate failed. After cool_down seconds without another failure half_open_probes calls may try; the first
    that succeeds closes it. Raises BadValue."""

    failure_threshold: int = 5
    window: float = 60.0
    min_volume: int = 5
    failure_rate: float = 0.5
    cool_down: float = 30.0
    half_open_probes: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            value, (least, most) = getattr(self, each.name), _BOUNDS[each.name]
            wanted = (int,) if each.type == "int" else (int, float)
            if type(value) not in wanted or not least <= value <= most:
                said = "whole number" if wanted == (int,) else "number"
                raise BadValue(f"{each.name}={value!r}: a {said} from {least} to {most} is asked.", code="bad_breaker")


_BOUNDS = {
    "failure_threshold": (1, KEPT),
    "window": (0.001, 86_400),
    "min_volume": (1, KEPT),
    "failure_rate": (0.001, 1),
    "cool_down": (0.001, 86_400),
    "half_open_probes": (1, 1000),
}


class CircuitBreaker:
    """One breaker for each tool, all by one policy. It holds nothing else: what happened is in the log."""

    def __init__(self, policy: BreakerPolicy | None = None) -> None:
        if policy is not None and not isinstance(policy, BreakerPolicy):
            raise BadValue(f"{policy!r} is no BreakerPolicy.", next="Write CircuitBreaker(BreakerPolicy(...)).")
        self.policy = policy or BreakerPolicy()


# ---- the view -------------------------------------------------------------------------------------------------------

NEVER_RAN = frozenset({"CancelledError", "GeneratorExit", "KeyboardInterrupt", "SystemExit", "died", "not_started"})
"""`why` of a step that ended without a word of its tool: it was stopped, by us."""


class InTheAir(NamedTuple):
    """A call that was announced and has not come back: its tool, and when its newest attempt began (lived ms)."""

    tool: str
    lived: int


class Circuit:
    """One tool's newest outcomes, oldest first: each is one number, twice its lived milliseconds, plus one if the call
    succeeded. quiet: how many succeeded since the last that failed."""

    __slots__ = ("quiet", "_numbers")

    def __init__(self, outcomes: Sequence[int] = ()) -> None:
        self._numbers = array("q", outcomes)
        self.quiet = next((age for age, outcome in enumerate(reversed(outcomes)) if not outcome & 1), len(outcomes))

    def add(self, lived: int, succeeded: bool) -> None:
        self._numbers.append(2 * lived + succeeded)
        self.quiet = self.quiet + 1 if succeeded else 0
        if len(self._numbers) >= 2 * KEPT:  # each is moved once: constant on average
            del self._numbers[:-KEPT]

    @property
    def outcomes(self) -> array[int]:
        return self._numbers[-KEPT:]

    @property
    def streak(self) -> int:
        """Failures in a row, up to the newest outcome."""
        outcomes = self.outcomes
        return next((age for age, outcome in enumerate(reversed(outcomes)) if outcome & 1), len(outcomes))

    @property
    def spotless(self) -> bool:
        """Whether nothing that is kept failed."""
        return self.quiet >= min(len(self._numbers), KEPT)


class Breakers:
    """The newest outcomes of each tool and the calls in the air."""

    KINDS = (
        COMPACTED,
        "saga.ended",
        "saga.taken",
        "step.attempted",
        "step.done",
        "step.failed",
        "step.intended",
        "step.lost",
    )

    def __init__(self) -> None:
        self.circuits: dict[str, Circuit] = {}
        self._air: dict[str, dict[int, InTheAir]] = {}  # saga -> step -> call

    def fold(self, entry: Entry, lived: int, state: State) -> None:
        _FOLDS[entry.kind](self, entry, lived)

    def _began(self, entry: Entry, lived: int) -> None:
        if entry.scope != FALLBACK:
            self._air.setdefault(entry.saga, {})[entry.step] = InTheAir(entry.tool, lived)

    def _tried_again(self, entry: Entry, lived: int) -> None:
        call = self._air.get(entry.saga, {}).get(entry.step)
        if call is not None:
            self._count(call.tool, lived, False)
            self._air[entry.saga][entry.step] = InTheAir(call.tool, lived)

    def _came_back(self, entry: Entry, lived: int) -> None:
        calls = self._air.get(entry.saga, {})
        call = calls.pop(entry.step, None)
        if call is not None and not calls:
            del self._air[entry.saga]
        tool = call.tool if call is not None else entry.tool if entry.scope != FALLBACK else ""
        if tool and entry.why not in NEVER_RAN:  # a tool in the header: intent and outcome in one
            self._count(tool, lived, entry.kind == "step.done")

    def _let_go(self, entry: Entry, lived: int) -> None:
        self._air.pop(entry.saga, None)

    def _aged(self, entry: Entry, lived: int) -> None:
        """What no policy looks back to is dropped when records are removed, so that the fold is the same without."""
        for tool, circuit in list(self.circuits.items()):
            young = [outcome for outcome in circuit.outcomes if outcome >= 2 * (lived - LOOKED_BACK_MS)]
            if young:
                self.circuits[tool] = Circuit(young)
            else:
                del self.circuits[tool]

    def _count(self, tool: str, lived: int, succeeded: bool) -> None:
        circuit = self.circuits.get(tool)
        if circuit is None:
            circuit = self.circuits[tool] = Circuit()
        circuit.add(lived, succeeded)

    def trip(self, tool: str, policy: BreakerPolicy) -> Trip | None:
        """Why the breaker of a tool is not closed; None if it is."""
        circuit = self.circuits.get(tool)
        return None if circuit is None or circuit.spotless else played(circuit.outcomes, policy)

    def begun(self, tool: str, lived: int) -> list[int]:
        """When the calls in the air began that began then or later, lived milliseconds."""
        calls = [call for saga in list(self._air.values()) for call in list(saga.values())]
        return [call.lived for call in calls if call.tool == tool and call.lived >= lived]

    def dump(self) -> Any:
        circuits = [(tool, circuit.outcomes.tolist()) for tool, circuit in self.circuits.items()]
        return [circuits, [(saga, list(calls.items())) for saga, calls in self._air.items()]]

    def load(self, raw: Any) -> None:
        circuits, air = raw
        self.circuits = {tool: Circuit(outcomes) for tool, outcomes in circuits}
        self._air = {saga: {step: InTheAir(*call) for step, call in calls} for saga, calls in air}


FALLBACK = "fallback"  # the scope of a step that is another function under the same name

_FOLDS = {
    COMPACTED: Breakers._aged,
    "saga.ended": Breakers._let_go,
    "saga.taken": Breakers._let_go,
    "step.attempted": Breakers._tried_again,
    "step.done": Breakers._came_back,
    "step.failed": Breakers._came_back,
    "step.intended": Breakers._began,
    "step.lost": Breakers._came_back,
}


# ---- asked of the state ---------------------------------------------------------------------------------------------


class Trip(NamedTuple):
    """Why a breaker is not closed: when the newest failure was (lived milliseconds), how many there were in a row, and
    how many of how many calls in the window before it."""

    lived: int
    streak: int
    failed: int
    calls: int


def played(outcomes: Sequence[int], policy: BreakerPolicy) -> Trip | None:
    """Play the outcomes: failures open it, each later one renews the cool-down, a success after it closes it and starts
    the count anew. A success before the cool-down is over is that of a call that was under way: it proves nothing."""
    window, cool_down = _ms(policy.window), _ms(policy.cool_down)
    trip: Trip | None = None
    since = streak = 0
    failures: list[int] = []
    for place, outcome in enumerate(outcomes):
        lived = outcome >> 1
        if outcome & 1:
            streak = 0
            if trip is not None and lived >= trip.lived + cool_down:
                trip, since = None, place + 1
            continue
        streak += 1
        failures.append(place)
        first = bisect_right(outcomes, 2 * (lived - window) + 1, since, place)
        failed, calls = len(failures) - bisect_left(failures, first), place - first + 1
        often = calls >= policy.min_volume and failed >= policy.failure_rate * calls
        if trip is not None or often or streak >= policy.failure_threshold:
            trip = Trip(lived, streak, failed, calls)
    return trip


def check_breaker(state: State, question: Question, now: Now) -> Refusal | None:
    """Whether the tool is left alone for now."""
    policy: BreakerPolicy = question.breaker
    trip = state.breakers.trip(question.tool, policy)
    if trip is None:
        return None
    cool_down = _ms(policy.cool_down)
    ready = trip.lived + cool_down
    if question.attempt > 1 and now.lived >= ready:  # it was the probe, and has just failed
        return _open(question, trip, policy, cool_down)
    if now.lived < ready:
        return _open(question, trip, policy, ready - now.lived)
    probes = _probes(state, question.tool, trip, policy, now)
    if len(probes) < policy.half_open_probes:
        return None
    wait = min(probes) + cool_down - now.lived
    return Refusal(
        "breaker_probing",
        f"{question.tool} kept failing; {_calls(len(probes))} trying whether it works again.",
        f"Try again in {span(wait)}, or do without it.",
        {"retry_after_ms": wait, "failures": trip.streak, "probes": len(probes)},
    )


def _probes(state: State, tool: str, trip: Trip, policy: BreakerPolicy, now: Now) -> list[int]:
    """When the calls began that are trying now. One that nobody heard of for a whole cool-down holds no place."""
    cool_down = _ms(policy.cool_down)
    begun = state.breakers.begun(tool, trip.lived + cool_down)
    return [lived for lived in begun if lived + cool_down > now.lived]


def _open(question: Question, trip: Trip, policy: BreakerPolicy, wait: int) -> Refusal:
    how = f"{trip.streak} times in a row"
    if trip.streak < policy.failure_threshold:
        how = f"{trip.failed} of {trip.calls} times in {span(_ms(policy.window))}"
    return Refusal(
        "breaker_open",
        f"{question.tool} failed {how}; it is left alone for {span(wait)} more.",
        "Try again after that, or do without it.",
        {"retry_after_ms": wait, "failures": trip.streak},
    )


def _calls(count: int) -> str:
    return "a call is" if count == 1 else f"{count} calls are"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"


class Standing(NamedTuple):
    """A breaker for people. streak: failures in a row; failed of calls: in the window that ends now. retry_after_ms:
    while it is open. probes: calls that are trying now."""

    tool: str
    state: str
    streak: int
    failed: int
    calls: int
    retry_after_ms: int | None
    probes: int


def standing(state: State, policy: BreakerPolicy, now: Now) -> list[Standing]:
    """Every tool that was called lately, by name."""
    return [_standing(state, tool, policy, now) for tool in sorted(state.breakers.circuits)]


def _standing(state: State, tool: str, policy: BreakerPolicy, now: Now) -> Standing:
    outcomes = state.breakers.circuits[tool].outcomes
    recent = outcomes[bisect_right(outcomes, 2 * (now.lived - _ms(policy.window)) + 1) :]
    failed = sum(not outcome & 1 for outcome in recent)
    streak = state.breakers.circuits[tool].streak
    trip = state.breakers.trip(tool, policy)
    if trip is None:
        return Standing(tool, CLOSED, streak, failed, len(recent), None, 0)
    wait = trip.lived + _ms(policy.cool_down) - now.lived
    if wait > 0:
        return Standing(tool, OPEN, streak, failed, len(recent), wait, 0)
    return Standing(tool, HALF_OPEN, streak, failed, len(recent), None, len(_probes(state, tool, trip, policy, now)))
