"""Stop everything, one tool or one saga, from code; and ask what is stopped, what is used up and what is waited for.

`KillSwitch(kit).halt("tool:stripe.*", by="ada", reason="double charges")` holds in every process of the device at its
next decision, since it is a fact that every decision is asked against. `standing` says how every part of the gate
stands, from the same fold that decides. What cannot be read is said; it is never taken for running.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..store.clock import Now
from ..store.errors import AmendsError, NotFound
from .config_file import BadConfig, current
from .followup import resolve
from .gate import breaker, keyring
from .gate.approvals import EXPIRED, PENDING, left_ms, persons
from .gate.approvals import standing as standing_of
from .gate.levels import LEVELS
from .gate.limits import left, shown
from .gate.question import Question
from .gate.signing import dead_votes
from .gate.switch import DRAIN, HALT, QUARANTINE, Lever, Set, check_switch, lift, set_switch
from .openings import known_as, raw_fields, scope_known_as, when
from .semantics import ActionSemantics
from .story import text_of

if TYPE_CHECKING:
    from .kit import AgentKit

RUNNING, HALTED, DRAINING, RESTRICTED, UNKNOWN = "RUNNING", "HALTED", "DRAINING", "RESTRICTED", "UNKNOWN"
"""What the switch says of the device as a whole; RESTRICTED: something narrower is stopped."""


class KillSwitch:
    """The levers of a device. Times in seconds; each lever has a name and a reason beside it in the log.

    Raises BadValue for a scope outside the grammar, NotFound where there is nothing to lift.
    """

    def __init__(self, kit: AgentKit | None = None) -> None:
        if kit is None:
            from .kit import AgentKit

            kit = AgentKit.default()
        self._kit = kit

    def halt(
        self,
        scope: str = "*",
        *,
        by: str,
        reason: str,
        ttl: float | None = None,
        drain: bool = False,
        including_compensations: bool = False,
    ) -> Set:
        """Refuse new effects under a scope: `*`, `tool:NAME`, `tool:PREFIX.*`, `tag:NAME`, `saga:ID`. Rollbacks go on
        unless compensations are included. drain: only new sagas are refused."""
        return set_switch(
            self._kit, DRAIN if drain else HALT, scope, by=by, reason=reason, seconds=ttl or None,
            including_compensations=including_compensations,
        )  # fmt: skip

    def drain(self, scope: str = "*", *, by: str, reason: str, ttl: float | None = None) -> Set:
        """Refuse sagas that begin from now on; those that run may finish."""
        return self.halt(scope, by=by, reason=reason, ttl=ttl, drain=True)

    def quarantine(self, saga_id: str, *, by: str, reason: str, ttl: float | None = None) -> Set:
        """Freeze one saga as it stands: no new step, and no rollback."""
        return set_switch(self._kit, QUARANTINE, of_saga(saga_id), by=by, reason=reason, seconds=ttl or None)

    def resume(self, scope: str | None = "*", *, by: str, reason: str) -> list[Set]:
        """Lift every lever of a scope; None lifts all of them."""
        return lift(self._kit, scope, by=by, reason=reason)

    def release(self, saga_id: str, *, by: str, reason: str) -> list[Set]:
        """Lift what is set on one saga."""
        return lift(self._kit, of_saga(saga_id), by=by, reason=reason)

    def is_quarantined(self, saga_id: str) -> bool:
        """Whether a saga is frozen. One that cannot be read is taken for frozen."""
        try:
            self._kit.log.refresh()
            target = f"saga:{resolve(self._kit, saga_id.removeprefix('saga:')).id}"
        except NotFound:
            return False
        except AmendsError:
            return True
        return any(lever.mode == QUARANTINE and lever.target == target for lever in self._active())

    def stops(self, tool: str, tags: Iterable[str] = (), saga_id: str = "") -> str:
        """Why a call would be refused now, as `halted`, `draining` or `quarantined`; "" if no lever is in its way."""
        kit = self._kit
        kit.log.refresh()
        saga = resolve(kit, saga_id).id if saga_id else ""
        asked = Question(tool, ActionSemantics.COMPENSABLE.value, saga, saga, tuple(sorted(set(tags))))
        refusal = check_switch(kit.engine.state, asked, kit.log.now())
        return refusal.code if refusal else ""

    def status(self) -> dict[str, Any]:
        """`switch` (RUNNING, HALTED, DRAINING, RESTRICTED; UNKNOWN where it could not be read) and every lever."""
        try:
            self._kit.log.refresh()
            return {"readable": True, **_switch(self._kit, self._kit.log.now())}
        except AmendsError as error:
            return {"readable": False, "switch": UNKNOWN, "levers": [], "error": error.message}

    def _active(self) -> list[Lever]:
        return self._kit.engine.state.switches.active(self._kit.log.now())


def of_saga(saga: str) -> str:
    """The scope of one saga, by its id."""
    return saga if saga.startswith("saga:") else f"saga:{saga}"


# ---- how the gate stands --------------------------------------------------------------------------------------------


def standing(kit: AgentKit) -> dict[str, Any]:
    """Every lever, limit, breaker and lock, the keyring, and what people are asked. Raises what reading raises."""
    state, now = kit.engine.state, kit.log.now()
    return {
        **_switch(kit, now),
        "limits": [_limit(row._asdict()) for row in left(state, now)],
        "breakers": _breakers(kit, now),
        "locks": [
            {"lock": held.lock, "saga": known_as(kit.log, held.saga), "record": held.seq, "since": when(held.at)}
            for held in list(state.locks.held.values())
        ],
        "approvals": list(_approvals(kit, now)),
        "reviews": len(state.approvals.reviews),
        "keyring": _keyring(kit),
        "policy": _policy(kit),
        "config": _config(kit),
        "notices": [
            {"item": told.item, "channel": told.channel, "level": told.level, "attempt": told.attempt}
            for told in state.notices.failing()
        ],
    }


def _switch(kit: AgentKit, now: Now) -> dict[str, Any]:
    active = kit.engine.state.switches.active(now)
    return {"switch": _word(active), "levers": [_lever(kit, lever, now) for lever in active]}


def _word(active: Iterable[Lever]) -> str:
    """One word for the device: the widest lever speaks."""
    found = [(lever.target, lever.mode) for lever in active]
    if ("*", HALT) in found:
        return HALTED
    return DRAINING if ("*", DRAIN) in found else RESTRICTED if found else RUNNING


def _lever(kit: AgentKit, lever: Lever, now: Now) -> dict[str, Any]:
    fields = raw_fields(kit.log.record(lever.seq).blob)
    return {
        "record": lever.seq,
        "mode": lever.mode,
        "scope": scope_known_as(kit.log, lever.target),
        "by": text_of(fields.get("by")),
        "reason": text_of(fields.get("reason")),
        "since": when(lever.at),
        "left_ms": lever.left(now),
        "including_compensations": lever.undo,
    }


def _limit(row: dict[str, Any]) -> dict[str, Any]:
    """What is left of a limit, and why: so much of so much is used, and when the oldest of it no longer counts."""
    said = {name: shown(row[name], row["scale"], row["unit"]) for name in ("used", "cap", "left")}
    return {**row, "said": said}


def _breakers(kit: AgentKit, now: Now) -> list[dict[str, Any]]:
    """How the breaker of each tool stands, where one is in force."""
    policy = kit.engine.policy.now().breaker
    return [row._asdict() for row in breaker.standing(kit.engine.state, policy, now)] if policy else []


def _policy(kit: AgentKit) -> dict[str, Any]:
    held = kit.engine.policy.now()
    return {"digest": held.digest, "broken": held.broken.said if held.broken else ""}


def _config(kit: AgentKit) -> dict[str, Any]:
    """Whether config.toml can be used: of a broken one nobody new is told anything."""
    try:
        if kit.home is not None:
            current(kit.home.config)
    except BadConfig as bad:
        return {"broken": bad.message}
    return {"broken": ""}


def _approvals(kit: AgentKit, now: Now) -> Iterable[dict[str, Any]]:
    view = kit.engine.state.approvals
    for asked in list(view.open):
        dead = dead_votes(kit, asked) if asked.votes else frozenset()
        said = standing_of(view, asked.request, now.lived, dead)
        yield {
            "saga": known_as(kit.log, asked.saga), "step": asked.step, "tool": asked.tool, "since": when(asked.at),
            "standing": said, "level": LEVELS[asked.level][0], "have": len(persons(asked, dead)), "need": asked.quorum,
            "left_ms": left_ms(asked, now.lived) if said in (PENDING, EXPIRED) else None, "told_level": asked.reached,
        }  # fmt: skip


def _keyring(kit: AgentKit) -> dict[str, Any]:
    ring = keyring.read(kit.log)
    return {
        "founded": ring.founded,
        "frozen": ring.frozen,
        "keys": len(ring.credentials),
        "people": len({credential.person for credential in ring.credentials.values()}),
        "quarantined": len(ring.quarantined),
        "recovering": ring.recovery is not None,
    }
