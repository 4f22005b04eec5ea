"""The switch: a person stops new effects, new sagas or one saga, and every process of the device sees it at its next
decision.

`halt` refuses new effects, `drain` refuses sagas begun after it and lets the others finish, `quarantine` freezes one
saga as it stands: no new step, and no rollback either. A scope is `*`, `tool:NAME`, `tool:PREFIX.*`, `tag:NAME` or
`saga:ID`; anything else is refused, since a scope that covers nothing looks like one that covers all. A halt leaves
rollbacks running unless it was set to include compensations: then the sagas that it covers wait, frozen. A time to
live runs on lived time. What is stopped is derived from facts; there is no flag that a process could read stale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...store.chain import Draft
from ...store.clock import Now
from ...store.entry import Entry
from ...store.errors import BadValue, Illegal, NotFound
from ..facts import body, fact
from ..openings import scope_known_as
from ..plain import blank, named
from ..saga import Saga, settled
from ..values import encode
from .limits import span
from .question import Question, Refusal

if TYPE_CHECKING:
    from ..kit import AgentKit
    from ..state import State

HALT, DRAIN, QUARANTINE = "halt", "drain", "quarantine"
MODES = {
    HALT: "new effects are refused",
    DRAIN: "no new saga may begin; those that run may finish",
    QUARANTINE: "the saga is frozen: no new step, and no rollback",
}
CODES = {HALT: "halted", DRAIN: "draining", QUARANTINE: "quarantined"}
GRAMMAR = "A scope is *, tool:NAME, tool:PREFIX.*, tag:NAME or saga:ID."
_NAME = re.compile(r"[!#-\[\]-~](?:[ !#-\[\]-~]*[!#-\[\]-~])?")


class Lever(msgspec.Struct, array_like=True, frozen=True):
    """One switch.set that was not lifted. within_ms 0: until it is lifted. undo: compensations are included."""

    seq: int
    mode: str
    target: str
    at: int
    lived: int
    within_ms: int
    undo: bool

    def left(self, now: Now) -> int | None:
        """Milliseconds for which it still holds; None for one without an end."""
        return max(0, self.lived + self.within_ms - now.lived) if self.within_ms else None

    def over(self, lived: int) -> bool:
        """Whether it has run out."""
        return bool(self.within_ms) and lived >= self.lived + self.within_ms


class Switches:
    """The levers that are set, in the order in which they were. One that has run out is dropped with a later fact."""

    KINDS = ("switch.set", "switch.lifted", "saga.ended")

    def __init__(self) -> None:
        self.levers: dict[int, Lever] = {}

    def check(self, entry: Entry, state: State) -> None:
        if entry.kind == "switch.lifted":
            if entry.ref not in self.levers:
                raise Illegal(f"There is no lever at record {entry.ref} to lift.")
        elif entry.kind == "switch.set" and (entry.out not in MODES or not _valid(entry.target, entry.out)):
            raise Illegal(f"{entry.out} {entry.target} is no lever. {GRAMMAR}")

    def fold(self, entry: Entry, lived: int, state: State) -> None:
        if not self.levers and entry.kind != "switch.set":
            return
        lifted = entry.ref if entry.kind == "switch.lifted" else 0
        # A new dict each time: other threads may be looking at the old one.
        left = {seq: lever for seq, lever in self.levers.items() if seq != lifted and not lever.over(lived)}
        if entry.kind == "switch.set":
            left[entry.seq] = Lever(
                entry.seq, entry.out, entry.target, entry.at, lived, entry.within_ms, bool(entry.undo)
            )
        self.levers = left

    def active(self, now: Now) -> list[Lever]:
        """The levers that hold now."""
        return [lever for lever in self.levers.values() if lever.left(now) != 0] if self.levers else []

    def dump(self) -> Any:
        return list(self.levers.values())

    def load(self, raw: Any) -> None:
        self.levers = {lever.seq: lever for lever in msgspec.convert(raw, list[Lever])}


def check_switch(state: State, question: Question, now: Now) -> Refusal | None:
    """Whether a lever stands in the way of a new effect."""
    for lever in state.switches.active(now):
        sagas = _sharing(state, question) if lever.mode == QUARANTINE else _sagas_of(state, question)
        if _covers(lever.target, question.tool, question.tags, sagas) and (
            lever.mode != DRAIN or _began_after(state, question, lever)
        ):
            return _refusal(lever, question, now)
    return None


def _sagas_of(state: State, question: Question) -> set[str]:
    """A saga and those around it."""
    found = {question.saga, question.root}
    saga = state.sagas.get(question.saga)
    while saga is not None and saga.parent:
        found.add(saga.parent)
        saga = state.sagas.get(saga.parent)
    return found


def _sharing(state: State, question: Question) -> set[str]:
    """All sagas that share its fate: a quarantine of one is one of all."""
    root = state.sagas.get(question.root)
    return {member.id for member in state.family(root)} if root is not None else set()


def _began_after(state: State, question: Question, lever: Lever) -> bool:
    root = state.sagas.get(question.root)
    return root is None or root.opened_seq > lever.seq


def _refusal(lever: Lever, question: Question, now: Now) -> Refusal:
    left, where = lever.left(now), lever.target
    if where.startswith("saga:"):  # its header id says nothing to whoever reads this
        where = "this saga" if where == f"saga:{question.saga}" else "the saga that this one belongs to"
    until = "until a person lifts it" if left is None else f"for {span(left)} more"
    return Refusal(
        CODES[lever.mode],
        f"{lever.mode.capitalize()} on {where}: {MODES[lever.mode]}, {until}.",
        "Do not try again before that; `amends status` says who set it and why.",
        {"mode": lever.mode, "scope": lever.target, "record": lever.seq, "retry_after_ms": left},
    )


def halts_unwinding(state: State, family: Sequence[Saga], now: Now) -> bool:
    """Whether a halt that includes compensations covers something that a family has left to undo."""
    including = [lever for lever in state.switches.active(now) if lever.mode == HALT and lever.undo]
    return any(_halts(lever, family) for lever in including)


def _halts(lever: Lever, family: Sequence[Saga]) -> bool:
    names = {saga.id for saga in family}
    left = [step for saga in family for step in saga.steps.values() if not settled(step)]
    return any(_covers(lever.target, step.tool, _split(step.tags), names) for step in left)


def _split(tags: str) -> tuple[str, ...]:
    return tuple(tags.split(",")) if tags else ()


def _covers(target: str, tool: str, tags: Iterable[str], sagas: Iterable[str]) -> bool:
    if target == "*":
        return True
    kind, _, name = target.partition(":")
    if kind == "tool":
        return tool.startswith(name[:-1]) if name.endswith(".*") else tool == name
    return name in (tags if kind == "tag" else sagas)


# ---- the grammar of scopes ------------------------------------------------------------------------------------------


def scope_of(text: str, mode: str = HALT) -> str:
    """The scope that a person wrote. Raises BadValue with the grammar."""
    if not isinstance(text, str) or not _valid(text, mode):
        wanted = "Quarantine takes one saga: saga:ID." if mode == QUARANTINE else GRAMMAR
        raise BadValue(f"{text!r} is no scope.", next=wanted, code="bad_scope")
    return text


def _valid(text: str, mode: str) -> bool:
    if text == "*":
        return mode != QUARANTINE
    kind, colon, name = text.partition(":")
    if not colon or len(text) > 256 or not _NAME.fullmatch(name) or (mode == QUARANTINE and kind != "saga"):
        return False
    if kind == "tool":
        stem = name[:-2] if name.endswith(".*") else name
        return bool(stem) and "*" not in stem
    return kind in ("tag", "saga") and not {"*", ","} & set(name)


def tags_of(tags: object) -> tuple[str, ...]:
    """The tags that a tool declares, sorted, each once. Raises BadValue for one that no scope could name."""
    if tags == ():
        return ()
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise BadValue(f"tags={tags!r}: a list of names is asked.", next='Write tags=("money",).')
    found = sorted(set(tags))
    for tag in found:
        if not isinstance(tag, str) or not _valid(f"tag:{tag}", HALT):
            raise BadValue(
                f"{tag!r} is no tag.", next="A tag is printable ASCII without quote, backslash, comma and *."
            )
    if len(",".join(found)) > 256:
        raise BadValue("The tags of a tool have 256 characters together.", next="Use fewer or shorter ones.")
    return tuple(found)


# ---- the decisions of people ----------------------------------------------------------------------------------------


class Set(NamedTuple):
    """What a person set: the record of the lever, and its scope as the log has it."""

    record: int
    mode: str
    scope: str


def set_switch(
    kit: AgentKit,
    mode: str,
    scope: str,
    *,
    by: str,
    reason: str,
    seconds: float | None = None,
    including_compensations: bool = False,
) -> Set:
    """Set a lever in a person's name; durable, and signed into the head, when it returns. Raises BadValue, NotFound."""
    if mode not in MODES:
        raise BadValue(f"{mode!r} is no lever.", next=f"One of {', '.join(MODES)}.")
    target = _resolved(kit, scope_of(scope, mode))
    draft = fact(
        "switch.set",
        *_told(kit, by, reason),
        out=mode,
        target=target,
        within_ms=_milliseconds(seconds),
        undo=int(including_compensations and mode == HALT),
        up=True,
    )
    [entry] = kit.log.commit(lambda state, now: (draft,))
    return Set(entry.seq, mode, target)


def lift(kit: AgentKit, scope: str | None, *, by: str, reason: str) -> list[Set]:
    """Lift every lever of a scope (None: all of them) in a person's name; one that has run out is left out. Raises
    NotFound if none holds there."""
    target = None if scope is None else _resolved(kit, scope_of(scope))
    opening = _told(kit, by, reason)
    lifted: list[Set] = []

    def decide(state: State, now: Now) -> Sequence[Draft]:
        lifted[:] = [
            Set(lever.seq, lever.mode, lever.target)
            for lever in state.switches.active(now)
            if target is None or lever.target == target
        ]
        return [fact("switch.lifted", *opening, ref=each.record, up=True) for each in lifted]

    kit.log.commit(decide)
    if not lifted:
        raise NotFound(
            f"Nothing is set on {scope or 'this device'}, or it has run out.",
            next="`amends status` lists what is set.",
            code="no_lever",
        )
    return lifted


def _resolved(kit: AgentKit, scope: str) -> str:
    """The same scope with the header id in place of a saga's name. An unknown name is one to come."""
    if not scope.startswith("saga:"):
        return scope
    from ..followup import resolve

    name = scope.removeprefix("saga:")
    try:
        return f"saga:{resolve(kit, name).id}"
    except NotFound:
        raise NotFound(f"There is no saga {name!r}.", next="`amends ps` lists them.") from None


def typed(kit: AgentKit, target: str) -> str:
    """The scope of a lever as a person can type it: with the id that its saga was given, where that is found by it."""
    shown = scope_known_as(kit.log, target)
    try:
        return shown if _resolved(kit, scope_of(shown)) == target else target
    except (BadValue, NotFound):
        return target


def _told(kit: AgentKit, by: str, reason: str) -> tuple[bytes, ...]:
    name = named(by)
    if blank(reason):
        raise BadValue("A lever needs a reason.", next="Pass --reason TEXT.")
    told = body(by=encode(name), reason=encode(reason.strip()))
    kit.log.refresh()
    return () if kit.log.shut else (told,)  # to stop things takes no key; who did, and why, cannot be kept then


def _milliseconds(seconds: float | None) -> int:
    if seconds is None:
        return 0
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0.001 <= seconds <= 10 * 365 * 86400:
        raise BadValue(f"{seconds!r}: a time from a millisecond to ten years is asked.", next="Write --for 2h.")
    return int(seconds * 1000)
