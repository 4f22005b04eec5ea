"""What recovery would do, told without doing it: the same planner over an overlay of the log.

Nothing is written, no saga is taken, no host is started and nobody is called. Where the world would be asked, the
story goes on as if it answered *present*, and every inverse is taken to succeed: what really comes may differ, and the
lines say where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..store.chain import Decide, Draft
from ..store.clock import Now
from ..store.log import Overlay
from .daemon import PERSON, check, left_alone, name_of
from .due import Action, Confirm, End, Escalate, Frozen, Lost, Probe, Resolve, Rest, Undo, Wait, Withdraw, due
from .engine import Engine
from .gate.freeze import freeze
from .inverse import read
from .openings import needed_at
from .report import REASONS
from .saga import CONCLUDING, Saga
from .state import State
from .step import CONFIRM_LOST, UNDO_LOST, may_land_for
from .unwind import FACTS, of, take

if TYPE_CHECKING:
    from .kit import AgentKit


class Deed(NamedTuple):
    """One thing that would be done. does: wait, probe, undo, confirm, withdraw, escalate, end, freeze or rest; step 0:
    the saga."""

    saga: str
    step: int
    tool: str
    does: str
    handler: str
    why: str


class Plan(NamedTuple):
    """What would be done, and what would be left alone (the keys of `recoverd --once`)."""

    deeds: list[Deed]
    skipped: list[dict[str, Any]]
    waiting: list[dict[str, Any]]

    @property
    def exit(self) -> int:
        return 1 if self.escalated else 0

    @property
    def escalated(self) -> list[dict[str, Any]]:
        made = [{"saga": d.saga, "step": d.step, "reason": d.why} for d in self.deeds if d.does == "escalate"]
        return self.waiting + made

    def to_json(self) -> dict[str, Any]:
        """As `recoverd --once --json`, with `plan`; `recovered` are the sagas that would come to their end."""
        ended = [deed.saga for deed in self.deeds if deed.does == "end"]
        return {
            "dry_run": True,
            "recovered": ended,
            "escalated": self.escalated,
            "skipped": self.skipped,
            "plan": [deed._asdict() for deed in self.deeds],
        }

    def lines(self) -> list[str]:
        """The story, one line a deed."""
        told = [_WORDS[deed.does].format(**deed._asdict()) for deed in self.deeds]
        told += ["{saga}, step {step}, needs a person already ({reason}).".format(**one) for one in self.waiting]
        told += ["{saga} would be left alone: {reason}.".format(**one) for one in self.skipped]
        return [
            *(told or ["Nothing was left by a dead agent."]),
            "Nothing was changed, and no host was started: `amends doctor --hosts` says whether handlers are found.",
        ]


_WORDS = {
    "wait": "{saga}, step {step} ({tool}): would wait {why} ms, since it may still land.",
    "probe": "{saga}, step {step} ({tool}): would ask its probe; the rest takes it to be there.",
    "undo": "{saga}, step {step} ({tool}): would run {handler}{why}.",
    "confirm": "{saga}, step {step} ({tool}): would be confirmed by {handler}{why}.",
    "withdraw": "{saga}, step {step} ({tool}): would withdraw its question.",
    "escalate": "{saga}, step {step} ({tool}): would be put before a person ({why}).",
    "end": "{saga}: would be {why}.",
    "freeze": "{saga}: would stay as it stands ({why}) until a person lifts that.",
    "rest": "{saga}: would rest there until a person has decided.",
}


def rehearse(kit: AgentKit) -> Plan:
    """What a sweep would do now. Raises Damaged as a sweep would."""
    kit.log.refresh()
    plan = Plan([], [], [])
    for saga in kit.engine.state.roots():
        why, name, family = left_alone(kit, saga, kit.lives), name_of(kit, saga.id), kit.engine.state.family(saga)
        if why == PERSON:
            found = [(step, told) for member in family for step, told in sorted(member.escalated.items())]
            plan.waiting.extend({"saga": name, "step": step, "reason": told} for step, told in found)
        elif why:
            plan.skipped.append({"saga": name, "reason": why})
        else:
            check(kit.log, saga, family)
            plan.deeds.extend(_story(kit, saga, name))
    return plan


def _story(kit: AgentKit, saga: Saga, name: str) -> list[Deed]:
    overlay = Overlay(kit.log)
    real = kit.engine
    engine = Engine(
        overlay, driver=lambda: "rehearsal", hide=real.hide, fingerprint=real.fingerprint, meter=real.meter,
        policy=real.policy,
    )  # fmt: skip
    overlay.commit(take(engine, saga.id, saga.driver, "crash" if saga.driver else "released"))
    return imagine(overlay, saga.id, name)[0]


def imagine(overlay: Overlay, root: str, name: str) -> tuple[list[Deed], list[Saga]]:
    """The deeds of unwinding a family on an overlay, and the family as it would be after them."""
    state: State = overlay.view
    deeds: list[Deed] = []
    now = overlay.now()
    deed: Deed | None
    while not (deeds and deeds[-1].does in ("end", "freeze", "rest")):
        family = state.family(state.sagas[root])
        action = due(family, now, freeze(state, family, now))
        if isinstance(action, Wait):
            deed, now = _waited(name, family, now, action), now._replace(lived=action.until)
        elif isinstance(action, (End, Frozen, Rest)):
            deed = _over(name, family[0], action)
        else:
            deed, drafts = _imagined(overlay, name, action)
            overlay.commit(_exactly(drafts))
        if deed is not None:
            deeds.append(deed)
    return deeds, state.family(state.sagas[root])


def _exactly(drafts: list[Draft]) -> Decide:
    return lambda state, now: drafts


def _waited(name: str, family: Sequence[Saga], now: Now, action: Wait) -> Deed:
    steps = (step for saga in family for step in saga.steps.values())
    step = next((step for step in steps if may_land_for(step, now.lived) == action.until - now.lived), None)
    left = str(action.until - now.lived)
    return Deed(name, step.number if step else 0, step.tool if step else "", "wait", "", left)


def _over(name: str, root: Saga, action: End | Frozen | Rest) -> Deed:
    """Where the story comes to its end."""
    if isinstance(action, Frozen):
        return Deed(name, 0, "", "freeze", "", action.why)
    ends = "committed" if root.phase == CONCLUDING else "compensated"
    return Deed(name, 0, "", "end", "", ends) if isinstance(action, End) else Deed(name, 0, "", "rest", "", "")


def _imagined(overlay: Overlay, name: str, action: Action) -> tuple[Deed | None, list[Draft]]:
    """An action as a deed, and the facts that it would leave."""
    assert isinstance(action, (Lost, Withdraw, Probe, Undo, Confirm, Resolve, Escalate))
    saga, step = action.saga, action.step

    def deed(does: str, handler: str = "", why: str = "") -> Deed:
        return Deed(name, step.number, step.tool, does, handler, why)

    if isinstance(action, (Lost, Resolve)):
        return None, [FACTS[type(action)](action)]
    if isinstance(action, Withdraw):
        return deed("withdraw"), [FACTS[Withdraw](action)]
    if isinstance(action, Probe):
        return deed("probe"), [of(saga, "step.probed", step=step.number, out="present")]
    verb = "confirm" if isinstance(action, Confirm) else "undo"
    handler = step.confirmer if verb == "confirm" else step.handler
    why = action.why if isinstance(action, Escalate) else ""
    if isinstance(action, (Undo, Confirm)):
        place, field = (step.seq, "confirmation") if verb == "confirm" else (step.inverse_seq, "compensation")
        recorded = read(needed_at(overlay, place), field)
        if recorded is None or not recorded.handler:
            why = "unreadable" if recorded is None else "closure"
    if why:
        assert why in REASONS
        return deed("escalate", handler, why), [of(saga, "saga.escalated", step=step.number, why=why, up=True)]
    lost = step.state in (UNDO_LOST, CONFIRM_LOST)
    again = " once more, under the same key: its answer was lost" if lost else ""
    return deed(verb, handler, again), [
        of(saga, f"{verb}.intended", step=step.number, handler=handler, key="rehearsal"),
        of(saga, f"{verb}.done", step=step.number, out="done"),
    ]
