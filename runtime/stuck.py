"""A saga that makes no progress is noticed: its process lives and does nothing, or died and nobody undoes it.

Stuck is a saga without a new record for `stuck_after_s` (config.toml; 15 minutes), that no person was asked about and
none has frozen. It is a guess about time, so nothing is done about it but to say so: a tool may simply take long. Both
clocks have to agree, since a wall clock that was set makes every record look old.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .config_file import STUCK_S, BadConfig, current
from .gate.freeze import freeze
from .saga import RUNNING, SUSPENDED, Saga
from .step import WAITING

if TYPE_CHECKING:
    from .kit import AgentKit


class Stuck(NamedTuple):
    """A saga without progress since record `seq`. alive: its process is."""

    saga: Saga
    seq: int
    alive: bool
    reason: str


def stuck(kit: AgentKit) -> Iterator[Stuck]:
    """The outermost sagas that are stuck now."""
    after_s, now = patience(kit), kit.log.now()
    families = [kit.engine.state.family(root) for root in kit.engine.state.roots()] if after_s else []
    quiet = [family for family in families if not _taken_up_since(family, now.lived - after_s * 1000)]
    heads = {row.saga: row.head for row in kit.log.sagas(open_only=True)} if quiet else {}
    for family in quiet:
        root = family[0]
        seq = max((heads[member.id] for member in family if member.id in heads), default=root.opened_seq)
        idle_s = (now.at - kit.log.record(seq).entry.at) // 1_000_000
        if idle_s >= after_s and not _a_persons(family) and not freeze(kit.engine.state, family, now):
            alive = bool(root.driver) and kit.holds(root.driver)
            yield Stuck(root, seq, alive, _in_words(kit, root, alive, idle_s))


def patience(kit: AgentKit) -> float:
    """Seconds without progress after which a saga is stuck; 0 for never."""
    try:
        return current(kit.home.config).stuck_after_s if kit.home is not None else STUCK_S
    except BadConfig:  # whoever tells people says so
        return STUCK_S


def _taken_up_since(family: list[Saga], lived: float) -> bool:
    """Whether somebody began or took over any of it since then: most sagas of a busy device."""
    return max(member.idle_lived for member in family) > lived


def _a_persons(family: list[Saga]) -> bool:
    """Whether it waits for a person, or to be run again: each is an item of its own."""
    root = family[0]
    if root.on_crash == "resume" and not root.driver and root.phase in (RUNNING, SUSPENDED):
        return True
    return any(member.escalated for member in family) or any(
        step.state == WAITING for member in family for step in list(member.steps.values())
    )


def _in_words(kit: AgentKit, root: Saga, alive: bool, idle_s: int) -> str:
    minutes = f"{idle_s // 60} min" if idle_s >= 120 else f"{idle_s} s"
    if alive:
        return f"Nothing has happened in it for {minutes}, though {kit.who(root.driver)} still drives it."
    return f"Nobody drives it, and for {minutes} nothing has undone it: no recovery daemon seems to run."
