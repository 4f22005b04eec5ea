"""Tells a saga's story in plain words, in the order in which it was written: what was done, what nobody knew, how a
process died, who took over, every compensation with its attempts and its key, and what stands.

One table leads from the kind of a record to its sentence. Nothing is told that no record says. Long values are cut for
the eye; `--json` has them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..runtime.decisions import Decision, asked_of
from ..runtime.gate.approvals import SAID
from ..runtime.gate.levels import LEVELS, NAMED
from ..runtime.gate.limits import span
from ..runtime.inverse import Recorded, read
from ..runtime.openings import raw_fields, redacted, when
from ..runtime.report import REASONS
from ..runtime.step import ACCEPTED
from ..runtime.story import CAUSES, StepStory, Story, Thread, text_of, value_of
from ..runtime.values import Masked, Record, decode, is_manifest
from ..store.entry import Entry
from ..store.seal import FORGOTTEN, WITHHELD

WIDE = 100
"""Characters of a value that a line shows."""


class Told(NamedTuple):
    """One record of a story, ready to be told."""

    story: Story
    thread: Thread
    entry: Entry
    fields: Mapping[str, bytes]
    inverse: Recorded | None
    withheld: str = ""
    redacted: bool = False

    def text(self, field: str) -> str:
        return cut(text_of(self.fields.get(field))).removesuffix(": ")

    @property
    def tool(self) -> str:
        step = self.thread.saga.steps.get(self.entry.step)
        return self.entry.tool or (step.tool if step else "")

    @property
    def goes_on(self) -> bool:
        """Whether its saga goes on where another one stopped, as against undoing what it left."""
        before = self.story.kit.engine.state.past(self.thread.saga.of) if self.thread.saga.of else None
        return before is not None and before.out == "continued"

    @property
    def main(self) -> bool:
        """Whether it is about the saga itself: what its family shares is told once."""
        return self.thread not in self.story.inner


def events(story: Story) -> Iterator[tuple[str, str, str]]:
    """(time, whose step, sentence) of everything that is to be told, oldest first."""
    threads = [*story.earlier, story.root, *story.inner, *story.later]
    told = sorted(
        (Told(story, thread, record.entry, raw_fields(record.blob), read(record.blob), record.withheld,
              redacted(record))
         for thread in threads for record in [*thread.records, *thread.votes]),
        key=lambda one: one.entry.seq,
    )  # fmt: skip
    for one in told:
        sentence = SENTENCES.get(one.entry.kind, _unknown_kind)(one)
        if one.redacted and REDACTED not in sentence:
            sentence = f"{sentence} {REDACTED}".strip()
        if sentence:
            yield when(one.entry.at), _place(one), sentence


def _place(one: Told) -> str:
    """Whose step it is: a number, with the name of its saga where that is not the one asked about."""
    step = f"step {one.entry.step}" if one.entry.step else ""
    if one.thread in one.story.inner or (one.thread in one.story.later and one.goes_on):
        return f"{one.thread.label or one.thread.name or one.thread.saga.id} {step}".strip()
    return f"undo, {step}" if one.thread in one.story.later and step else step


# ---- values ---------------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """A value for the eye."""
    if isinstance(value, Masked):
        return "•••"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    if isinstance(value, Record):
        return f"{type(value).__name__}({_pairs(vars(value))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple | set):
        return "[" + ", ".join(map(shown, value)) + "]"
    return {None: "nothing", True: "true", False: "false"}.get(value, str(value)) if _plain(value) else str(value)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in values.items())


def call(name: str, kwargs: Any) -> str:
    """`name(a=1, b="x")`."""
    return f"{name}({cut(_pairs(kwargs)) if isinstance(kwargs, Mapping) else cut(shown(kwargs))})"


def cut(text: str, width: int = WIDE) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


SHORT, FEW = 60, 12
"""Characters of one argument, and how many arguments, that a list of items shows: none hides behind a long one."""


def brief(name: str, kwargs: Any) -> str:
    """A call in which every argument has its own room."""
    if not isinstance(kwargs, Mapping):
        return call(name, kwargs)
    said = [f"{key}={cut(shown(value), SHORT)}" for key, value in list(kwargs.items())[:FEW]]
    more = [f"and {len(kwargs) - FEW} more"] if len(kwargs) > FEW else []
    return f"{name}({', '.join(said + more)})"


def because(reason: str, error: str) -> str:
    """A reason with the error that is known for it."""
    return f"{reason.removesuffix('.')}: {cut(error, 2 * WIDE)}" if error else reason


def item(told: Mapping[str, Any]) -> Iterator[str]:
    """One item of the inbox: what was called, what came of it, why it needs a person, and the commands."""
    if told["tool"]:
        result = f" returned {cut(shown(_decoded(told['result'])))}" if told["result"] is not None else ""
        yield brief(told["tool"], _decoded(told["args"] or {})) + result
    yield because(told["reason"], told["error"] or "")
    if "approval" in told:
        yield _asks(told["approval"])
    inverse = told["compensation"]
    confirms = told.get("confirmation")
    if confirms and told["kind"].startswith("confirm_"):
        yield f"what confirms it: {_inverse(confirms)}"
    elif inverse and told["kind"] != "approval":
        yield f"what undoes it: {_inverse(inverse)}"
    if told["behind"]:
        steps = ", ".join(f"step {one['step']} {one['tool']}" for one in told["behind"][:FEW])
        more = f" and {len(told['behind']) - FEW} more" if len(told["behind"]) > FEW else ""
        yield f"behind it {'waits' if len(told['behind']) == 1 else 'wait'}: {steps}{more}"
    if told.get("waiting"):
        yield f"waiting for what it holds: {', '.join(told['waiting'])}"
    yield from told["commands"]
    if told["show"]:
        yield told["show"]


def _asks(approval: Mapping[str, Any]) -> str:
    """How far a question is, and how long it is open."""
    have = f"{approval['have']} of {approval['need']} have said yes; " if approval["need"] > 1 else ""
    left = f"open for {span(approval['left_ms'])} more"
    return f"{have}evidence: {approval['level']}; {left if approval['agent_lives'] else _NOBODY_WAITS}"


_NOBODY_WAITS = "nobody waits for the answer now"


def _decoded(value: Any) -> Any:
    return f"(redacted: a value of {value.get('size')} bytes)" if is_manifest(value) else decode(value)


def _inverse(inverse: Mapping[str, Any]) -> str:
    if inverse["handler"] == "human" or not inverse["handler"]:
        who = "a person" if inverse["handler"] == "human" else "a function that only its process had"
        return f"{who}: {cut(inverse['description'])}" if inverse["description"] else who
    return brief(inverse["handler"], decode(inverse["kwargs"] or {}))


def handler_call(name: str, recorded: Recorded | None) -> str:
    """The compensation as a call; for a person's task, what it says."""
    if recorded is None:
        return name or "a compensation that cannot be read"
    if recorded.handler == "human":
        return f"a person: {recorded.description}"
    if not recorded.handler:
        return recorded.description or "a function that only its process had"
    return call(recorded.handler, {key: decode(value) for key, value in recorded.kwargs.items()})


def _args(one: Told) -> str:
    if one.withheld:
        return f"{one.tool}{SEALED}"
    if one.redacted and "args" not in one.fields:
        return f"{one.tool}{REDACTED}"
    return call(one.tool, value_of(one.fields["args"]) if "args" in one.fields else {})


def withheld(codes: Mapping[str, int]) -> Iterator[str]:
    """What of a story cannot be read here, by the word that says why: how many records, why, and what to do."""
    for code, count in codes.items():
        held = f"{count} records hold" if count > 1 else "one record holds"
        yield f"What {held} cannot be read: {WITHHELD[code]}{'' if code == FORGOTTEN else f'. {_SAY_KEY}'}"


SEALED, REDACTED = "(sealed)", "(redacted)"
_SAY_KEY = "--key SOURCE names the key"


# ---- sentences ------------------------------------------------------------------------------------------------------


def _opened(one: Told) -> str:
    if one.thread in one.story.later:
        by = one.text("by")
        if by:
            return f"{by} asked to undo it: {one.text('reason')}"
        return "It went on here." if one.goes_on else "An effect landed after the end; it was to be undone."
    name = one.thread.name or one.thread.label or one.thread.saga.id
    if one.thread in one.story.inner:
        return "A saga inside it began."
    if one.text("by"):
        return f"{one.text('by')} had it run again: {one.text('reason') or 'no reason given'}"
    by = _who(one.story, one.entry.driver)
    return f"{name} began{f' in {by}' if by else ''}."


def _who(story: Story, driver: str) -> str:
    """The process that drives, or drove; empty where nobody knows its number any more."""
    from ..store.driver import describe

    told = describe(story.kit.home.run, driver) if story.kit.home else {}
    state = " (stopped)" if told.get("stopped") else "" if told.get("alive") else " (gone)"
    return f"process {told['pid']}{state}" if told.get("pid") else ""


def death(story: Story) -> str:
    """Of a saga that nobody drives: which process had it, and when that wrote its last record of it."""
    by = _who(story, story.saga.driver).removesuffix(" (gone)")
    last = max(record.entry.at for thread in story.threads for record in thread.records)
    ago = max(0, story.kit.log.clock.wall_us() - last) // 1_000_000
    had = f"Its {by or 'process'} died" if story.saga.driver else "Nobody has it"
    return f"{had}; its last record is from {when(last)[11:19]}Z, {span(max(1, ago) * 1000)} ago."


_TAKEN = {
    "crash": "Its process died. Another one took it over",
    "released": "Nobody had it any more. A process took it over",
    "resume": "It was run again, and taken up where it had stopped",
    "retry": "It was taken over to try again",
    "beside": "It was taken over with the saga in which something is tried again",
    "accepted": "It was taken over to go on behind what was accepted",
    "landed": "An effect landed late, and it was taken over again",
}


def _taken(one: Told) -> str:
    if not one.main:
        return ""
    said = _TAKEN.get(one.entry.why, f"It was taken over ({one.entry.why})")
    by = f", because {one.text('by')} asked for it" if one.text("by") else ""
    who = _who(one.story, one.entry.driver)
    return f"{said}{by} ({f'{who}; ' if who else ''}fence {one.entry.fence})."


_RELEASED = {
    "quarantined": "it is quarantined, and stays as it stands until that is lifted",
    "halted": "a halt that covers the rest of it holds until it is lifted",
    "died": "it waits to be run again",
}


def _released(one: Told) -> str:
    if not one.main:
        return ""
    return f"Its process let go of it; {_RELEASED.get(one.entry.why, 'the rest needs a person')}."


def _suspended(one: Told) -> str:
    return "It was suspended: what ran it again was other code than what it began with."


_UNWINDING = {
    "undo": "",  # the opening has said it
    "landed": "",
    "adopted": "It was open in a log that was set back, so a person decides about each effect that stands.",
}


def _unwinding(one: Told) -> str:
    if not one.main or one.entry.why in _UNWINDING:
        return _UNWINDING.get(one.entry.why, "") if one.main else ""
    if one.entry.why in CAUSES:
        return f"It was to be undone, because {one.text('cause') or CAUSES[one.entry.why]}"
    return f"It failed and was to be undone: {one.text('cause') or one.entry.why}"


def _concluding(one: Told) -> str:
    return "It was to stand, and what was held provisionally in it to be confirmed." if one.main else ""


def _joined(one: Told) -> str:
    return "The inner saga was done, and shares the fate of the outer one."


def _escalated(one: Told) -> str:
    said = REASONS.get(one.entry.why, (one.entry.why, ()))[0]
    detail = one.text("error")
    return f"It needs a person. {said}{f' ({detail})' if detail else ''}"


_ENDED = {
    "committed": "It was committed.",
    "continued": "It ended, to go on in another saga.",
    "compensated": "It ended, and all that could be undone was.",
    "refused": "It ended: it was refused, and nothing had happened.",
}


def _ended(one: Told) -> str:
    if not one.main:
        return ""
    if one.thread in one.story.later and not one.goes_on:
        return "The undoing ended."
    if one.entry.out == "compensated" and any(step.state == ACCEPTED for step in one.thread.saga.steps.values()):
        return "It ended: what could be undone was, and a person answers for what stands."
    return _ENDED.get(one.entry.out, one.entry.out)


_REFUSED = {
    "withdrawn": "was not asked about any more: its saga was given up.",
    "expired": "was not answered in time, and did not happen.",
    "denied": "did not happen.",
}


def _refused(one: Told) -> str:
    said = one.text("reason") or one.entry.why
    return f"{one.tool} {_REFUSED.get(one.entry.why, f'was refused ({one.entry.why}): {said}')}"


def _asked(one: Told) -> str:
    many = asked_of(one.entry.level, one.entry.quorum)
    why = ": it is irreversible." if one.entry.sem == "irreversible" else "."
    return f"{_args(one)} waited for {many}{why}"


def _voted(one: Told) -> str:
    said = next(said for said in one.thread.decisions if said.seq == one.entry.seq)
    note = cut(said.note).removesuffix(": ")
    return f"{said.by} {SAID[said.verdict]} it ({said.evidence}){_void(said)}{f': {note}' if note else '.'}"


def _void(said: Decision) -> str:
    """What became of a vote that did not count."""
    if said.void == "not_used":
        return ", which did not count: the step started without it"
    if said.void == "dead":
        return ", which does not count: its evidence does not hold against the keyring of now"
    return f", too late: it was {'asked anew' if said.void == 'superseded' else said.void} already" if said.void else ""


def _carried(one: Told) -> str:
    late = ", once more, because it landed after its first compensation" if one.entry.scope == "undo/late" else ""
    if one.goes_on:
        return f"What {one.tool} did was taken along, to be undone if this fails."
    if one.thread.saga.why == "adopted":
        return f"What {one.tool} did was taken over from the old log."
    return f"What {one.tool} did was to be undone{late}."


def _intended(one: Told) -> str:
    alternative = " instead" if one.entry.scope == "fallback" else ""
    undone = f"; to undo it: {handler_call(one.entry.handler, one.inverse)}" if one.inverse else ""
    if one.entry.resource:
        return f"{_args(one)}: held provisionally{undone}"
    return f"{_args(one)} was called{alternative}, key {one.entry.key}{undone}"


def _attempted(one: Told) -> str:
    error = one.text("error")
    return f"Attempt {one.entry.attempt}{f', after {error}' if error else ''}."


def _done(one: Told) -> str:
    if one.thread.saga.steps[one.entry.step].resource:
        return ""  # that it is held has been said
    result = f" and returned {cut(shown(value_of(one.fields['result'])))}" if "result" in one.fields else ""
    undone = f"; to undo it: {handler_call(one.entry.handler, one.inverse)}" if one.inverse else ""
    flaw = f". But: {one.text('error')}" if one.text("error") else ""
    what = _args(one) if one.entry.tool else one.tool
    asked = " (its probe said so)" if one.entry.out == "present" else ""
    return f"{what} happened{asked}{result}{undone}{flaw}"


def _failed(one: Told) -> str:
    if one.entry.why == "not_started":
        return f"{one.tool} was not started."
    error = one.text("error")
    return f"{one.tool} did not happen{f': {error}' if error else '.'}"


def _lost(one: Told) -> str:
    if one.entry.why in ("died", "gone"):
        return f"{one.tool} was in flight when its process died: nobody knew whether it had happened."
    return f"{one.tool} gave no answer ({one.text('error') or one.entry.why}): nobody knew whether it had happened."


_PROBED = {
    "present": "was there",
    "absent": "was not there",
    "cannot_tell": "might be there: the probe cannot tell",
}


def _probed(one: Told) -> str:
    said, note = _PROBED.get(one.entry.out, one.entry.out), one.text("note") or one.text("error")
    return f"The world was asked: what {one.tool} does {said}{f' ({note})' if note else '.'}"


def _landed(one: Told) -> str:
    if one.entry.out == "failed":
        return f"{one.tool} ended after all: it had not happened ({one.text('error')})."
    return f"{one.tool} landed late, after everybody had stopped waiting: it had happened."


def _accepted(one: Told) -> str:
    return f"{one.text('by')} accepted that it stands: {one.text('reason')}"


def _undo_intended(one: Told) -> str:
    step = one.thread.saga.steps[one.entry.step]
    recorded = _recorded(one.thread, step.inverse_seq, one.entry.seq)
    tried = f", attempt {one.entry.attempt}" if one.entry.attempt > 1 else ""
    late = ", once more because the effect landed after the first" if one.entry.scope == "undo/late" else ""
    said = handler_call(one.entry.handler, recorded)
    return f"To undo {one.tool}, {said} was called{tried}{late}, key {one.entry.key}"


def _recorded(thread: Thread, seq: int, before: int) -> Recorded | None:
    for record in thread.records:
        if record.entry.seq == seq and seq < before:
            return read(record.blob)
    return None


def _undo_done(one: Told) -> str:
    note = f" ({one.text('note')})" if one.text("note") else ""
    note += f", in {one.text('host')}" if one.text("host") else ""
    if one.entry.out == "nothing":
        return "What was held provisionally was let go of; nothing had to run."
    return f"There was nothing left to undo{note}." if one.entry.out == "already" else f"{one.tool} was undone{note}."


def _undo_failed(one: Told) -> str:
    why = one.text("error") or one.text("note") or one.entry.why
    return f"The compensation of {one.tool} failed: {why}"


def _undo_lost(one: Told) -> str:
    if one.entry.why in ("died", "gone"):
        return f"The process died while {one.tool} was being undone: nobody knew whether it had been."
    return f"The compensation of {one.tool} gave no answer: {one.text('error') or one.entry.why}"


def _confirm_intended(one: Told) -> str:
    step = one.thread.saga.steps[one.entry.step]
    recorded = next((read(r.blob, "confirmation") for r in one.thread.records if r.entry.seq == step.seq), None)
    tried = f", attempt {one.entry.attempt}" if one.entry.attempt > 1 else ""
    return f"To confirm it, {handler_call(one.entry.handler, recorded)} was called{tried}, key {one.entry.key}"


def _confirm_done(one: Told) -> str:
    note = f" ({one.text('note')})" if one.text("note") else ""
    note += f", in {one.text('host')}" if one.text("host") else ""
    said = {"nothing": "It is final; nothing had to run", "already": f"It was confirmed already{note}"}
    return f"{said.get(one.entry.out, f'It was confirmed{note}')}."


def _confirm_failed(one: Told) -> str:
    return f"Its confirmation failed: {one.text('error') or one.text('note') or one.entry.why}"


def _confirm_lost(one: Told) -> str:
    if one.entry.why in ("died", "gone"):
        return "The process died while it was being confirmed: nobody knew whether it had been."
    return f"Its confirmation gave no answer: {one.text('error') or one.entry.why}"


def _unknown_kind(one: Told) -> str:
    return f"{one.entry.kind}, which this version does not know."


SENTENCES: dict[str, Callable[[Told], str]] = {
    "saga.opened": _opened,
    "saga.taken": _taken,
    "saga.released": _released,
    "saga.suspended": _suspended,
    "saga.unwinding": _unwinding,
    "saga.concluding": _concluding,
    "saga.joined": _joined,
    "saga.escalated": _escalated,
    "saga.ended": _ended,
    "step.refused": _refused,
    "step.asked": _asked,
    "vote.cast": _voted,
    "step.carried": _carried,
    "step.intended": _intended,
    "step.attempted": _attempted,
    "step.done": _done,
    "step.failed": _failed,
    "step.lost": _lost,
    "step.probed": _probed,
    "step.landed": _landed,
    "step.accepted": _accepted,
    "undo.intended": _undo_intended,
    "undo.done": _undo_done,
    "undo.failed": _undo_failed,
    "undo.lost": _undo_lost,
    "confirm.intended": _confirm_intended,
    "confirm.done": _confirm_done,
    "confirm.failed": _confirm_failed,
    "confirm.lost": _confirm_lost,
    "lock.taken": lambda one: "It claimed a name.",
    "lock.awaited": lambda one: "It waited for a name that another saga had claimed.",
    "lock.freed": lambda one: "It let go of a name.",
}


# ---- what decided ---------------------------------------------------------------------------------------------------

_STARTS = {
    "reversible": "its author says that its inverse restores what was",
    "compensable": "its author says that its inverse offsets it; its intent was on the disk first",
    "irreversible": "its author says that nothing takes it back",
}

_AGAIN = {
    "keyed": "it takes the idempotency key, so it may be asked again when its answer was lost",
    "idempotent": "it is declared idempotent, so it may be asked again when its answer was lost",
    "": "it takes no key and is not declared idempotent: a lost answer goes to a person",
}

_INVERSES = {
    "": "none was declared",
    "none": "none was declared",
    "declared": "declared with the call",
    "derived": "derived from the result",
    "both": "declared with the call, refined by the result",
    "human": "a person's task",
}


def reasons(one: StepStory) -> list[str]:
    """Why a step was let start, what was to undo it and where, and who settled it: one line each."""
    told = [f"start: {one.step.sem}: {_STARTS.get(one.step.sem, '')}; {_whom(one)}"]
    told += [f"person: {said}" for said in _people(one)]
    inverse = _INVERSES.get(one.now.inv, one.now.inv)
    if one.now.inv in ("", "none"):
        told.append(f"inverse: {inverse}")
    else:
        recorded = one.compensation()
        told.append(f"inverse: {inverse}: {handler_call(one.now.handler, recorded)}")
        if one.now.handler:
            told.append(f"again: {_AGAIN.get(one.now.again, one.now.again)}")
        told += [f"host: {where}" for where in _hosts(one, recorded)]
    if one.step.probe:
        told.append("unknown: its probe settles it")
    elif one.step.settle_ms:
        told.append(f"unknown: it may land for {one.step.settle_ms / 1000:g} s after its caller died")
    if one.why:
        told.append(f"stopped: {REASONS.get(one.why, (one.why, ()))[0]}")
    return told


def _whom(one: StepStory) -> str:
    """Who was asked about it, and on which evidence."""
    asked = one.asked
    if asked is None:
        return "nobody was asked"
    least = LEVELS.get(asked.entry.level, LEVELS[NAMED])[0]
    return f"it takes a yes of {asked_of(asked.entry.level, asked.entry.quorum)} (level {least})"


def _people(one: StepStory) -> Iterator[str]:
    for said in one.decisions:
        note = f": {said.note}" if said.note else ""
        yield f"{said.by} {SAID[said.verdict]} it{note} ({said.evidence}; {when(said.at)}){_void(said)}"
    places = {(thread.saga.id, step.number): thread for thread, step in ((one.thread, one.step), (one.now_in, one.now))}
    for (_, number), thread in places.items():
        for record in thread.records:
            if record.entry.step == number and record.entry.kind == "step.accepted":
                fields = raw_fields(record.blob)
                note = text_of(fields.get("note") or fields.get("reason"))
                yield f"{text_of(fields.get('by'))} accepted it{f': {note}' if note else ''} ({when(record.entry.at)})"


def _hosts(one: StepStory, recorded: Recorded | None) -> Iterator[str]:
    """Where the compensation ran, as far as that was recorded; else where it was to be found."""
    ran = list(dict.fromkeys(
        text_of(fields["host"])
        for record in one.now_in.records
        if record.entry.step == one.now.number and record.entry.kind in ("undo.done", "undo.failed", "undo.lost")
        for fields in [raw_fields(record.blob)]
        if "host" in fields
    ))  # fmt: skip
    yield from (f"it ran in {place}" for place in ran)
    if not ran and recorded is not None and recorded.host:
        host = recorded.host
        yield f"{host.get('function')} in {host.get('file')}, run by {host.get('interpreter')}"
    if recorded is not None and recorded.unreachable:
        yield f"only the process that made it: {recorded.unreachable}"
