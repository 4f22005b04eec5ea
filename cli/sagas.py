"""Verbs about sagas: what became of them, their story, what needs a person, and the decisions of one.

A saga is named by the id it was given, by its header id, or by a beginning of either of at least four characters. What
needs a person goes by its id in the inbox, or by its saga where that has only one thing to decide.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

from ..runtime.config_file import LISTENED
from ..runtime.daemon import left_alone
from ..runtime.drift import DRIFT
from ..runtime.follow import event_of
from ..runtime.followup import Use, built_on, resolve
from ..runtime.inbox import Item, commands, find, items, queue
from ..runtime.kit import AgentKit
from ..runtime.openings import known_as, redacted, when
from ..runtime.report import REASONS, RollbackReport, StepView
from ..runtime.saga import Saga
from ..runtime.step import ACCEPTED
from ..runtime.story import StepStory, Stories, Story, step_fields, text_of
from ..store.entry import Entry
from ..store.errors import AmendsError
from ..store.log import Record
from . import telling, ui
from .device import acting, imports_option, key_option, looking

NOTHING, SOMETHING = 0, 1
"""Exit codes: nothing needs you, something does."""
FAR = 1 << 53
"""A place that no log reaches."""
NAMED = 5
"""How many dead sagas one line names."""


def _sagas(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Completion of a saga's id; nothing where there is no log to ask."""
    try:
        with looking() as kit:
            stories = itertools.islice(Stories(kit), 100)
            return [story.id for story in stories if story.id.startswith(incomplete)]
    except AmendsError:
        return []


saga_argument = click.argument("saga", shell_complete=_sagas)
by_option = click.option("--by", metavar="NAME", required=True, help="Who decides.")


# ---- looking --------------------------------------------------------------------------------------------------------


@click.command(cls=ui.Verb, name="ps")
@click.option("--all", "every", is_flag=True, help="Also those inside others, and those that followed others.")
@click.option(
    "--limit", type=click.IntRange(0), default=1000, show_default="1000", metavar="N",
    help="At most so many, newest first; 0 for all.",
)  # fmt: skip
@key_option
def ps(every: bool, limit: int) -> None:
    """List sagas, newest first, and what became of them."""
    with looking() as kit:
        kit.log.refresh()
        stories: Iterator[Story] = Stories(kit).everything() if every else iter(Stories(kit))
        shown = list(itertools.islice(stories, min(limit, sys.maxsize) or None))
        rows = [story.row() for story in shown]
        sealed = {story.id for story in shown if story.root.records[0].withheld}
        if limit and len(rows) == limit and next(stories, None) is not None:
            ui.warn(f"older ones than these {limit} are not shown; --limit 0 shows all")
        dead = _warn_of_the_dead(kit)
        if ui.session().as_json:
            return ui.emit(rows)
        if not rows:
            return ui.say("No saga has run on this device.")
        ui.table(
            ("SAGA", "OUTCOME", "STEPS", "STANDING", "STARTED", "NAME"),
            [
                (row["saga"], ui.word(row["outcome"]), row["steps"],
                 _standing(row), _seconds(row["started_at"]),
                 telling.SEALED if row["saga"] in sealed else row["name"] if row["name"] != row["saga"] else "")
                for row in rows
            ],
        )  # fmt: skip
        if not dead and any(row["outcome"] in ("escalated", "waiting") or row["drift"] for row in rows):
            ui.say("`amends inbox` says what needs a person.", err=True)


def _standing(row: dict[str, Any]) -> ui.Word:
    drift = f", {row['drift']} drift" if row["drift"] else ""
    return ui.Word(f"{row['standing']}{drift}", "bad" if row["standing"] or drift else "")


def _warn_of_the_dead(kit: AgentKit) -> list[str]:
    """Whoever looks is told, in one line, which sagas nobody drives any more, and what undoes them."""
    roots = kit.engine.state.roots()
    dead = [known_as(kit.log, saga.id) for saga in roots if not left_alone(kit, saga, kit.holds)]
    if dead:
        more = f" and {len(dead) - NAMED} more" if len(dead) > NAMED else ""
        waits = "waits" if len(dead) == 1 else "wait"
        ui.warn(f"nobody drives {', '.join(dead[:NAMED])}{more}, which {waits} to be undone: `amends recoverd --once`")
    return dead


def _seconds(time: str) -> str:
    """RFC 3339 without its fraction, easier on the eye."""
    return f"{time[:19].replace('T', ' ')}Z"


@click.command(cls=ui.Verb, name="show")
@saga_argument
@click.option("--why", is_flag=True, help="For each step what decided: semantics, person, handler, host.")
@key_option
def show(saga: str, why: bool) -> None:
    """Tell one saga's story: what was done, what was unknown, what was undone and by whom, and what stands."""
    with looking() as kit:
        story = Stories(kit).of(resolve(kit, saga))
        if ui.session().as_json:
            document = story.document()
            if why:
                for step, told in zip(document["steps"], story.steps, strict=True):
                    step["reasons"] = telling.reasons(told)
            return ui.emit(document)
        _headline(story)
        if why:
            for one in story.steps:
                ui.say(f"step {one.step.number}  ", ui.Word(one.step.tool, "bold"), "  ", ui.word(one.state))
                for reason in telling.reasons(one):
                    ui.say("    ", reason)
            return None
        _steps(story)
        ui.say()
        for at, place, sentence in telling.events(story):
            ui.say(ui.Word(at[11:23], "dim"), "  ", f"{place}: " if place else "", sentence)
        _stands(kit, story)
        _drifts(kit, story)
        for line in telling.withheld(story.withheld):
            ui.say(ui.Word("sealed: ", "ask"), line)
    return None


def _headline(story: Story) -> None:
    label = f" ({story.root.label})" if story.root.label else ""
    clean = "" if not story.clean else ", accounted for" if _accepted(story) else ", clean"
    ui.say(ui.Word(story.id, "bold"), label, "  ", ui.word(story.outcome), clean)
    ended = f", ended {_seconds(story.ended_at)}" if story.ended_at else ""
    began = _seconds(when(story.saga.opened_at))
    ui.say(ui.Word(f"began {began}{ended}  ({story.saga.id} on {story.kit.log.origin})", "dim"))
    if cause := story.cause():
        ui.say("undone because: ", cause)


def _accepted(story: Story) -> list[StepStory]:
    """The steps that stand because a person accepted it."""
    return [one for one in story.steps if one.now.state == ACCEPTED]


def _steps(story: Story) -> None:
    rows = []
    for one in story.steps:
        rows.append((_number(story, one), one.step.tool, ui.word(one.state), one.step.sem, _compensation(one)))
    if rows:
        ui.table(("STEP", "TOOL", "STATE", "SEMANTICS", "COMPENSATION"), rows)


def _compensation(one: StepStory) -> str:
    if one.now.inv in ("", "none"):
        return "none"
    who = "a person" if one.now.inv == "human" else one.now.handler or "its own process"
    tries = f", {one.undo_attempts} attempts" if one.undo_attempts > 1 else ""
    return f"{who} ({one.undo_state}{tries})"


def _number(story: Story, one: StepStory) -> str:
    inside = "" if one.thread is story.root else f"{one.thread.label or one.thread.name or one.thread.saga.id}/"
    return f"{inside}{one.step.number}"


def _drifts(kit: AgentKit, story: Story) -> None:
    """What the world was found to say otherwise, with what settles it."""
    for item in [item for item in _items_of(kit, story) if item.kind == DRIFT] if story.drifted else ():
        place = f"step {item.step.number} {item.step.tool}. " if item.step else ""
        ui.say(ui.Word("drift: ", "bad"), place, item.reason)
        ui.say(ui.Word("needs you: ", "ask"), " or ".join(f"`{c}`" for c in commands(item)[:-1]))


def _stands(kit: AgentKit, story: Story) -> None:
    if not story.standing and story.outcome not in ("waiting", "escalated"):
        accepted = [f"step {_number(story, one)} by {text_of(one.field('by', 'step.accepted'))}"
                    for one in _accepted(story)]  # fmt: skip
        if accepted:
            ui.say("Nothing stands unaccounted for; accepted: ", ", ".join(accepted), ".")
        elif story.outcome in ("compensated", "refused"):
            ui.say("Nothing stands.")
        return
    for one in story.standing:
        ui.say(ui.Word("stands: ", "bad"), f"step {_number(story, one)} {one.step.tool}, {one.state}")
    for item in [item for item in _items_of(kit, story) if item.kind != DRIFT]:
        ui.say(ui.Word("needs you: ", "ask"), item.reason, " ", " or ".join(f"`{c}`" for c in commands(item)))
    if story.outcome == "interrupted" and not story.frozen:
        ui.say(telling.death(story))
        ui.say("next: `amends recoverd --once` undoes it.")


def _items_of(kit: AgentKit, story: Story) -> list[Item]:
    family = {thread.saga.id for thread in story.threads}
    return [item for item in queue(kit) if item.saga is not None and item.saga.id in family]


# ---- the records ----------------------------------------------------------------------------------------------------


@click.command(cls=ui.Verb, name="log")
@click.argument("saga", required=False, shell_complete=_sagas)
@click.option("--follow", "-f", is_flag=True, help="Go on with what is appended, until interrupted.")
@click.option("--since", type=click.IntRange(0), default=0, metavar="SEQ", help="Begin at this record.")
@key_option
def log(saga: str | None, follow: bool, since: int) -> None:
    """Print the records, oldest first; with --json one object a line, each with its openings."""
    with looking() as kit:
        about = About(Stories(kit).of(resolve(kit, saga))) if saga else None
        size = min(since, FAR)
        while not ui.unsaid():
            for record in kit.log.records(size):
                size = record.entry.seq + 1
                if about is None or about.takes(record.entry):
                    _print(record)
                if ui.unsaid():
                    break
            if not follow:
                return
            while not kit.log.wait(size, 1.0):
                continue


class About:
    """What of the log is about one saga: the records of it, of those inside it and behind it, and those that only name
    it: votes, messages to people, escalations of its questions, and the review of a broken glass."""

    def __init__(self, story: Story) -> None:
        self._sagas = {thread.saga.id for thread in story.threads}
        records = [record.entry for thread in story.threads for record in thread.records]
        self._requests = {entry.request for entry in records if entry.kind == "step.asked"}
        self._glasses = {vote.entry.seq for thread in story.threads for vote in thread.votes}

    def takes(self, entry: Entry) -> bool:
        """Whether a record belongs to it; called with each in order, since later ones hang on earlier ones."""
        if entry.of in self._sagas and entry.kind == "saga.opened":
            self._sagas.add(entry.saga)
        if entry.saga in self._sagas and entry.kind == "step.asked":
            self._requests.add(entry.request)
        if entry.of in self._sagas and entry.kind == "vote.cast":
            self._glasses.add(entry.seq)
        named = entry.saga in self._sagas or entry.of in self._sagas
        asked = entry.kind == "approval.escalated" and entry.request in self._requests
        return named or asked or (entry.kind == "review.closed" and entry.ref in self._glasses)


def _print(record: Record) -> None:
    import msgspec

    if ui.session().as_json:
        openings = [msgspec.json.decode(line)[1] for line in (record.blob or b"").splitlines()]
        held: dict[str, Any] = {"withheld": record.withheld} if record.withheld else {}
        held |= {"redacted": True} if redacted(record) else {}
        return ui.emit({**msgspec.json.decode(record.line), "openings": openings, **held}, line=True)
    entry = record.entry
    part = "part {} of {}".format(*entry.part) if entry.part else ""
    lacks = telling.SEALED if record.withheld else telling.REDACTED if redacted(record) else ""
    parts = [entry.tool, entry.handler, entry.out, entry.why, part, lacks]
    ui.say(
        ui.Word(f"{entry.seq:>6}  {when(entry.at)}  ", "dim"), f"{entry.kind:<15} ",
        f"{(entry.saga or entry.of)[:8]:<8} ", f"{entry.step or '':>3} ", " ".join(filter(None, parts)),
    )  # fmt: skip
    return None


# ---- what needs a person --------------------------------------------------------------------------------------------


def _kinds(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> frozenset[str]:
    """What was asked for: kinds of items as --json says them, or events as channels know them. Raises
    click.BadParameter."""
    for kind in value:
        if kind not in LISTENED and kind not in REASONS:
            raise click.BadParameter(f"{kind!r} is no kind; {', '.join(LISTENED)} are.", context, parameter)
    return frozenset(value)


def _wanted(kit: AgentKit, kinds: frozenset[str]) -> list[dict[str, Any]]:
    return [item for item in items(kit) if not kinds or {item["kind"], event_of(item["kind"])} & kinds]


@click.command(cls=ui.Verb, name="inbox")
@click.option("--wait", is_flag=True, help="Wait until something needs a person.")
@click.option("--timeout", type=float, callback=ui.seconds, metavar="SECONDS", help="With --wait: at most so long.")
@click.option(
    "--kind", "kinds", multiple=True, metavar="KIND", callback=_kinds,
    help="Only these: approval, escalated, stuck, review, resume, frozen, drift, keys, or a kind as --json says it. "
    "Repeatable.",
)  # fmt: skip
@key_option
def inbox(wait: bool, timeout: float | None, kinds: frozenset[str]) -> int:
    """List everything that needs a person, oldest first, with the commands that settle it. Exit 1 if there is any, 0 if
    there is nothing, also after --wait --timeout."""
    with looking() as kit:
        found = _wanted(kit, kinds)
        end = None if timeout is None else time.monotonic() + timeout
        while wait and not found and (end is None or time.monotonic() < end):
            kit.log.wait(kit.log.size, 1.0 if end is None else max(0.0, min(1.0, end - time.monotonic())))
            found = _wanted(kit, kinds)
        dead = _warn_of_the_dead(kit)
        if ui.session().as_json:
            ui.emit(found)
            return SOMETHING if found else NOTHING
        if not found:
            ui.say("Nothing waits for a decision." if dead else "Nothing needs you.")
        for item in found:
            step = f" step {item['step']} {item['tool']}" if item["step"] else ""
            whose = item["saga"] or "the keyring"
            ui.say(ui.Word(item["id"], "bold"), f"  {whose}{step}, since {_seconds(item['since'])}")
            for line in telling.item(item):
                ui.say("    ", line)
    return SOMETHING if found else NOTHING


@click.command(cls=ui.Verb, name="accept")
@click.argument("item")
@by_option
@click.option("--reason", required=True, metavar="TEXT", help="Why it may stand.")
@imports_option
@key_option
def accept(item: str, by: str, reason: str, imports: tuple[str, ...]) -> None:
    """Account for what stands, in a person's name, and go on with what waited behind it. ITEM is its id in the inbox,
    or its saga."""
    with acting(imports) as kit:
        found = find(kit, item, "accept")
        kit.accept(found.id, by=by, reason=reason)
        left = items(kit)
        if ui.session().as_json:
            return ui.emit({"item": found.id, "decision": "accepted", "by": by, "left": len(left)})
        more = f"{len(left)} more in the inbox." if left else "Nothing else needs you."
        ui.say(f"{by} accepted {_which(kit, found)}. ", more)
    return None


def _which(kit: AgentKit, item: Item) -> str:
    """An item in the words of a person."""
    step = f", step {item.step.number} {item.step.tool}" if item.step else ""
    return f"{item.id} ({known_as(kit.log, item.saga.id)}{step})" if item.saga else item.id


@click.command(cls=ui.Verb, name="retry")
@click.argument("item")
@by_option
@imports_option
@key_option
def retry(item: str, by: str, imports: tuple[str, ...]) -> int:
    """Try an escalated saga again from where it stopped. ITEM is its id in the inbox, or its saga. Exit 1 if it still
    needs a person."""
    with acting(imports) as kit:
        found = find(kit, item, "retry")
        before = kit.log.size
        report = kit.retry(found.id, by=by)
        return _reported(kit, report, dry_run=False, since=before)


# ---- undoing --------------------------------------------------------------------------------------------------------


@click.command(cls=ui.Verb, name="undo")
@saga_argument
@click.option("--step", type=click.IntRange(1), metavar="N", help="Only this step.")
@click.option("--dry-run", is_flag=True, help="Tell what would run and what would stand; change nothing.")
@click.option("--by", default="", metavar="NAME", help="Who decides.")
@click.option("--reason", default="", metavar="TEXT", help="Why.")
@imports_option
@key_option
def undo(saga: str, step: int | None, dry_run: bool, by: str, reason: str, imports: tuple[str, ...]) -> int:
    """Undo a committed saga, youngest step first. Exit 1 if something of it stands afterwards."""
    if dry_run:
        with looking() as kit:
            report = kit.undo(saga, by=by or "dry run", reason=reason or "dry run", step=step, dry_run=True)
            return _reported(kit, report, dry_run=True, later=built_on(kit, resolve(kit, saga)))
    with acting(imports) as kit:
        report = kit.undo(saga, by=by, reason=reason, step=step)
        return _reported(kit, report, dry_run=False)


def _reported(
    kit: AgentKit, report: RollbackReport, *, dry_run: bool, later: Sequence[Use] = (), since: int = 0
) -> int:
    """Say what a rollback did from record `since` on, or would do."""
    family = report.sagas
    undone = sorted(
        ((saga, step) for saga in family for step in saga.steps.values()
         if step.state == "compensated" and step.undone_seq >= since),
        key=lambda pair: pair[1].undone_seq,
    )  # fmt: skip
    standing = report.unresolved
    if ui.session().as_json:
        ui.emit({
            "saga": _named(kit, report),
            "dry_run": dry_run,
            "clean": report.clean,
            "undone": [{"step": step.number, "tool": step.tool, "handler": step.handler} for _, step in undone],
            "standing": [
                {"step": view.step, "tool": view.tool, "state": view.state, "reason": _stands_why(family, view) or None}
                for view in standing
            ],
            "built_on": [use._asdict() for use in later],
        })  # fmt: skip
        return NOTHING if report.clean else SOMETHING
    would = "would be undone by" if dry_run else "was undone by"
    for _, step in undone:
        ui.say(f"step {step.number} {step.tool} {would} {step.handler or 'its own process'}")
    for view in standing:
        would = "would stand: " if dry_run else "stands: "
        why = REASONS.get(_stands_why(family, view), ("",))[0]
        error = "" if dry_run else text_of(step_fields(kit, view.saga, view.step).get("error"))
        said = f"{view.state}. {telling.because(why, error)}"
        ui.say(ui.Word(would, "bad"), f"step {view.step} {view.tool}, {said}")
    for use in later:
        ui.say(f"built on it since: {use.saga}, step {use.step} {use.tool}")
    if dry_run:
        ui.say("Nothing was changed.")
    else:
        ui.say(report.summary(), "" if report.clean else " `amends inbox` says what needs you.")
    return NOTHING if report.clean else SOMETHING


def _stands_why(family: list[Saga], view: StepView) -> str:
    """The reason code of what stands after a rollback, or would."""
    step = next(saga for saga in family if saga.id == view.saga).steps[view.step]
    if view.why:
        return view.why
    if step.inv in ("", "none"):
        return "irreversible" if step.sem == "irreversible" else "orphaned"
    return "human_task" if step.inv == "human" else "" if step.handler else "closure"


def _named(kit: AgentKit, report: RollbackReport) -> str:
    """The id the user gave to the saga that a report is about, or that it undoes."""
    return known_as(kit.log, report.sagas[0].id)
