"""What policy is in force: that of the home's policy.toml and that of the gate in code, both.

A call meets both, and the stricter answer wins: of two rulings the one that allows less, of two approvals what
satisfies both, of limits all. The file is looked at again for every call (one `stat`) and read again when it has
changed. A file that is wrong when it is opened is an error in words; one that goes wrong or goes away later refuses
every new step with `policy_unreadable` until it is put right, since nobody meant to have no policy. What undoes is
never asked.

Everything that runs code of the user's (predicates, `applies`, scopes, the risk scorer) runs here, before the
transaction; what comes out is a `Question`, and its `policy` says by a digest what was in force.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ...store.errors import BadValue
from ..semantics import ActionSemantics
from .digest import digest
from .limits import Limit, prepare
from .locks import lock_id, names_of
from .provenance import check_provenance
from .question import ALLOW, ASK, GateCall, Question, Refusal, Ruling, Tier
from .rules import NO_MATCH, PreFlightGate, floored, ruling, stricter, strictest

if TYPE_CHECKING:
    from .policy_reader import PolicyFile, ToolPolicy

Stamp = tuple[int, int, int, int]
MeterName = Callable[[str], str]


class Held(NamedTuple):
    """The policy as it was last read. stamp: None where there is no file. broken: why no new step may start."""

    stamp: Stamp | None
    file: PolicyFile | None
    digest: str
    limits: tuple[Limit, ...] = ()
    breaker: Any = None
    broken: Refusal | None = None


class Policy:
    """The policy in force. path: the policy.toml, or None where none is looked for. Raises BadPolicyFile."""

    def __init__(self, path: Path | str | None = None, gate: PreFlightGate | None = None) -> None:
        self.path = None if path is None else str(path)
        if gate is not None and not isinstance(gate, PreFlightGate):
            raise BadValue(f"gate={gate!r}: a PreFlightGate is asked.", next="Write gate=PreFlightGate(rules).")
        self.gate = gate
        self._tiers: tuple[Held | None, dict[str, Tier | None]] = (None, {})
        self._held = self._read()

    @classmethod
    def watching(cls, path: Path | str) -> Policy:
        """The policy of a file that may be wrong already: then every new step is refused, as when it goes wrong later.
        For whoever looks, decides or undoes, and should not be held up by a typing error."""
        made = cls()
        made.path = str(path)
        return made

    @property
    def digest(self) -> str:
        """16 hex digits that say which policy is in force; empty where there is neither file nor gate."""
        return self.now().digest

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Every limit in force."""
        return self.now().limits

    def prepare(self, call: GateCall, *, meter: MeterName, saga: str, root: str, locks: Iterable[str] = ()) -> Question:
        """A call as the gate is asked about it. meter(text): the 16 hex digits that stand for a scope or a lock; saga
        and root: header ids; locks: names that the code claims. Runs the user's predicates; never raises for them."""
        held = self.now()
        if self._says_nothing(held):
            return unruled(call.tool, call.semantics, saga, root, tuple(sorted(call.tags)), locks, meter)
        if held.broken is not None:
            return Question(call.tool, call.semantics.value, saga, root, tuple(sorted(call.tags)), refused=held.broken)
        return self._asked(held, call, meter, saga, root, locks)

    @property
    def silent(self) -> bool:
        """Whether there is neither file nor gate: then `unruled` is all that there is to say of a call."""
        return self._says_nothing(self.now())

    def _says_nothing(self, held: Held) -> bool:
        return held.file is None and self.gate is None and held.broken is None

    # -- which policy that is

    def now(self) -> Held:
        """The policy as it is now: read again if its file has changed."""
        held = self._held
        if self.path is None:
            return held
        try:
            seen = stamp(os.stat(self.path))
        except OSError:  # it is not there, or out of reach; reading it tells
            seen = None
        if seen != held.stamp:  # threads that see it at once each read it, and come to the same
            held = self._held = self._again(held, seen)
        return held

    def _again(self, held: Held, seen: Stamp | None) -> Held:
        from .policy_reader import BadPolicyFile

        try:
            made = self._read()
        except BadPolicyFile as error:
            why = error.message
        else:
            if made.stamp is not None:
                return made
            seen, why = None, f"{self.path} is gone."
        return held._replace(stamp=seen, file=None, broken=_unreadable(why))

    def _read(self) -> Held:
        """The file and the gate together. Raises BadPolicyFile."""
        file, read = None, None
        if self.path is not None and os.path.lexists(self.path):
            from .policy_reader import load

            try:
                file, found = load(self.path)
                read = stamp(found)
            except FileNotFoundError:  # gone since
                file = None
        gate = self.gate
        if file is None:
            limits, breaker = (gate.limits, gate.breaker) if gate else ((), None)
        else:
            limits, breaker = _both(file, gate)
        return Held(read, file, digest_of(file, gate), limits, breaker)

    # -- what it says of a call

    def _asked(
        self, held: Held, call: GateCall, meter: MeterName, saga: str, root: str, locks: Iterable[str]
    ) -> Question:
        tool = held.file.tools.get(call.tool) if held.file else None
        seen = replace(
            call, kwargs=MappingProxyType(dict(call.kwargs)), tags=call.tags | set(tool.tags) if tool else call.tags
        )
        ruling = self._ruling(held, seen)
        refused = self._unfit(held, seen)
        debits = prepare(held.limits, seen, meter) if refused is None else ()
        names, lacking = _names(tool, seen, locks)
        if isinstance(debits, Refusal):
            refused, debits = debits, ()
        refused = refused or lacking
        if ruling.verdict == ALLOW and refused is None and self.gate is not None:
            ruling = _worried(ruling, self.gate.worry(seen))
        return Question(
            call.tool, call.semantics.value, saga, root, tuple(sorted(seen.tags)), ruling, debits,
            _hidden(names, meter), held.breaker, self._tier(held, call.tool), held.digest, refused,
        )  # fmt: skip

    def _ruling(self, held: Held, call: GateCall) -> Ruling:
        said = [ruling(self.gate.rules, call)] if self.gate else []
        said += [ruling(held.file.rules, call)] if held.file else []
        return floored(strictest(*said), call.semantics)

    def _unfit(self, held: Held, call: GateCall) -> Refusal | None:
        """What is wrong with a call before any limit is asked."""
        tool = held.file.tools.get(call.tool) if held.file else None
        if tool is not None and tool.semantics is not None and tool.semantics is not call.semantics:
            return _differ(call, tool.semantics, self.path)
        if len(",".join(call.tags)) > 256:
            return Refusal("schema", f"The tags of {call.tool} have more than 256 characters.", "Use fewer of them.")
        lacks = self.gate.lacks(call) if self.gate else None
        if lacks is not None:
            return lacks
        wanted = (tool.provenance if tool else {}, self.gate.provenance.get(call.tool, {}) if self.gate else {})
        return next((found for one in wanted if one and (found := check_provenance(one, call))), None)

    def _tier(self, held: Held, tool: str) -> Tier | None:
        """What a yes for this tool takes: the tool's own table over the file's defaults, and the gate's beside them."""
        of, tiers = self._tiers
        if of is not held:
            tiers = {}
            self._tiers = (held, tiers)
        if tool not in tiers:
            own = held.file.tools.get(tool) if held.file else None
            said = (own.approval if own else None) or (held.file.approvals if held.file else None)
            code = self.gate.approval if self.gate else None
            both = [one.tier() for one in (said, code) if one is not None]
            if len(tiers) >= 10_000:  # names of tools are the caller's: they do not fill the memory
                tiers.clear()
            tiers[tool] = stricter(*both) if len(both) == 2 else both[0] if both else None
        return tiers[tool]


def digest_of(file: PolicyFile | None, gate: PreFlightGate | None = None) -> str:
    """Which policy a file and a gate are together; empty for neither."""
    if file is None and gate is None:
        return ""
    return digest([file.settings if file else None, gate.described() if gate else None])


def stamp(found: os.stat_result) -> Stamp:
    """What changes when a file is written, replaced or made readable."""
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _both(file: PolicyFile, gate: PreFlightGate | None) -> tuple[tuple[Limit, ...], Any]:
    """The limits and the breaker of a file beside a gate. Raises BadPolicyFile where they contradict each other."""
    from .policy_reader import Complaint, bad_file, line_at

    if gate is None:
        return file.limits, file.breaker
    coded = {limit.name for limit in gate.limits}
    wrong = [
        Complaint(
            line_at(file.lines, ("limits", place, "name")), f"{limit.name} is the name of a limit in code already"
        )
        for place, limit in enumerate(file.limits)
        if limit.name in coded
    ]
    wanted = gate.approval.roles if gate.approval else ()
    said = [(("tools", name, "approval", "roles"), one.approval) for name, one in file.tools.items()]
    for at, approval in [(("approvals", "roles"), file.approvals), *said]:
        if wanted and approval and approval.roles and not set(wanted) & set(approval.roles):
            line = line_at(file.lines, at)
            wrong.append(Complaint(line, f"none of the roles is one that the gate in code takes: {', '.join(wanted)}"))
    if wrong:
        raise bad_file(file.path, sorted(set(wrong)))
    return (*gate.limits, *file.limits), file.breaker or gate.breaker


def _names(tool: ToolPolicy | None, call: GateCall, locks: Iterable[str]) -> tuple[tuple[str, ...], Refusal | None]:
    """The names that a call claims, and why those of the file cannot be told."""
    if tool is None or not tool.locks:
        return tuple(locks), None
    try:
        return (*locks, *names_of(tool.locks, call.kwargs)), None
    except BadValue as error:
        return tuple(locks), Refusal(error.code, error.message, error.next)


def unruled(
    tool: str, sem: ActionSemantics, saga: str, root: str, tags: tuple[str, ...], locks: Iterable[str], meter: MeterName
) -> Question:
    """A call as it is asked about where no policy says anything: an irreversible one needs a person."""
    return Question(
        tool, sem.value, saga, root, tags, floored(NO_MATCH, sem), locks=_hidden(locks, meter) if locks else ()
    )


def _hidden(locks: Iterable[str], meter: MeterName) -> tuple[str, ...]:
    return tuple(sorted({lock_id(name, meter) for name in locks}))


def _worried(said: Ruling, worry: str) -> Ruling:
    return Ruling(ASK, "risk_scorer", worry) if worry else said


def _differ(call: GateCall, stated: ActionSemantics, path: str | None) -> Refusal:
    return Refusal(
        "semantics_differ",
        f"The code says that {call.tool} is {call.semantics.value}, and {path} says that it is {stated.value}.",
        "Whoever answers for the tool corrects one of the two; nothing was done.",
        {"in_code": call.semantics.value, "in_file": stated.value},
    )


def _unreadable(why: str) -> Refusal:
    return Refusal(
        "policy_unreadable",
        f"The policy of this device cannot be read. {why}",
        "Put the file right; `amends policy check` says what is wrong. No new step starts before that.",
    )
