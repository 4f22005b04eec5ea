"""`redact` destroys what records hold, for good; `hold` forbids that, and whatever else takes from the log.

Nobody is told that something is gone before it is: the fact is written at once, with the openings cut out in the same
transaction, and the state is `erasing` until no page of the database and its -wal holds them any more. Whoever reads
old pages just then is named; the daemon, or whoever writes next, finishes by itself. What no redaction reaches is said
with it: the copies that were handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click

from ..runtime.followup import resolve
from ..runtime.kit import AgentKit
from ..runtime.openings import known_as
from ..runtime.plain import named
from ..runtime.story import Stories, Story
from ..store import redact as redaction
from ..store.entry import COMMITMENTS_MAX, Entry
from ..store.errors import NotFound, Refused, YouErred
from ..store.keeping import EVERYTHING
from ..store.log import Record
from ..store.pins import Erasure
from ..store.redact import Choice, Opening, Place
from . import ui
from .device import key_option, looking, steering
from .sagas import _sagas, by_option

DONE, ERASING = 0, 3
PATIENCE_S = 3.0
"""So long the bytes are waited for; after that somebody else finishes."""
SHOWN = 40


@click.command(cls=ui.Verb, name="redact")
@key_option
@click.argument("sagas", nargs=-1, metavar="[SAGA]...", shell_complete=_sagas)
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME",
    help="Only openings that hold this field: a path (args.email) or its end (email). Repeatable.",
)
@click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Only openings in which a field has this value, or with FIELD~TEXT holds this text. Repeatable.",
)
@click.option(
    "--opening", "openings", multiple=True, metavar="SEQ:PLACE", help="This opening of this record. Repeatable."
)
@click.option("--all", "every", is_flag=True, help="Every saga: what --field and --where name, wherever it is.")
@click.option("--basis", required=True, metavar="TOKEN", help="On what basis, in one word, as GDPR-17.")
@by_option
@click.option("--note", default="", metavar="TEXT", help="Kept with the record of it.")
@click.option("--dry-run", is_flag=True, help="List what would go, and change nothing.")
def redact(
    sagas: tuple[str, ...], fields: tuple[str, ...], conditions: tuple[str, ...], openings: tuple[str, ...],
    every: bool, basis: str, by: str, note: str, dry_run: bool,
) -> int:  # fmt: skip
    """Destroy what the records of sagas hold: arguments, results, errors, names. The records stay, and say so.

    Exit 0: the bytes are gone from the database and its -wal; 3: they are being erased, and somebody is in the way.
    """
    if every and (sagas or openings or not (fields or conditions)):
        raise YouErred("--all goes with --field or --where, and with nothing else.", next="Say what is meant.")
    if not sagas and not openings and not every:
        raise YouErred("Nothing is named.", next="Name sagas, or openings with --opening SEQ:PLACE, or --all.")
    by = named(by)
    asked = [redaction.where(text) for text in conditions]
    named_ones = [redaction.place_of(text) for text in openings]
    with looking() if dry_run else steering() as kit:
        stories = [Stories(kit).of(resolve(kit, saga)) for saga in sagas]
        found = (one for story in stories for one in redaction.openings_of(kit.log, _records(kit, story)))
        choice = redaction.choose(_everywhere(kit) if every else _once(found), fields, asked)
        places = sorted({*choice.places, *named_ones})
        left: dict[str, str] = {}
        if every:
            places, left = redaction.able(kit.log, places)
            choice.gone[:] = [one for one in choice.gone if redaction.about(one.entry) not in left]
        told = _document(kit, stories, choice, places) | {"basis": basis, "by": by}
        told["left"] = [{"saga": known_as(kit.log, saga), "why": why} for saga, why in left.items()]
        if every and not places:
            return _say(told | {"records": [], "state": "done", "pins": [], "pins_told": True})
        if not places and not fields and not asked:
            raise Refused("Everything that may be redacted in it is gone already.", code="redacted_already")
        if dry_run:
            redaction.check(kit.log, places)
            return _say(told | {"state": "dry_run"})
        facts = redaction.redact(kit.log, places, basis=basis, by=by, note=note)
        erasure = kit.log.finish_erasing(PATIENCE_S)
        return _say(told | {"records": [entry.seq for entry in facts]} | _state(erasure))


def _records(kit: AgentKit, story: Story) -> Iterable[Record]:
    """Every record of a story, and those that are about it: votes, messages, reviews."""
    threads = [*story.earlier, *story.threads]
    own = {thread.saga.id for thread in threads}
    first = min(thread.saga.opened_seq for thread in threads)
    requests: set[str] = set()
    votes: set[int] = set()

    def takes(entry: Entry) -> bool:
        if redaction.about(entry) in own:
            requests.update({entry.request} - {""})
            if entry.kind == "vote.cast":
                votes.add(entry.seq)
            return True
        asked = entry.kind == "approval.escalated" and entry.request in requests
        return asked or (entry.kind == "review.closed" and entry.ref in votes)

    return [record for record in kit.log.records(first) if takes(record.entry)]


def _everywhere(kit: AgentKit) -> Iterable[Opening]:
    """What every record holds that may be redacted at all."""
    kit.log.refresh()
    there = (record for record in kit.log.records() if not redaction.control(record.entry, COMMITMENTS_MAX))
    return (one for one in redaction.openings_of(kit.log, there) if not redaction.control(one.entry, one.place))


def _once(openings: Iterable[Opening]) -> list[Opening]:
    return list({(one.seq, one.place): one for one in openings}.values())


# ---- telling ---------------------------------------------------------------------------------------------------------


def _document(kit: AgentKit, stories: Sequence[Story], choice: Choice, places: Sequence[Place]) -> dict[str, Any]:
    return {
        "openings": [_opening(kit, one, choice) for one in choice.gone]
        + [{"opening": f"{seq}:{place}"} for seq, place in places if (seq, place) not in set(choice.places)],
        "unread": [f"{one.seq}:{one.place}" for one in choice.unread],
        "no_undo": [one for story in stories for one in _undoable(story, set(choice.places))],
        "copies": [
            {"record": copy.seq, "kind": copy.out, "id": copy.id, "records": copy.size, "payload": copy.payload}
            for copy in redaction.reached_by(kit.log, places)
        ],
    }


def _opening(kit: AgentKit, one: Opening, choice: Choice) -> dict[str, Any]:
    return {
        "opening": f"{one.seq}:{one.place}",
        "kind": one.entry.kind,
        "saga": redaction.about(one.entry) or None,
        "step": one.entry.step or None,
        "fields": sorted(one.fields) if one.fields is not None else None,
        "also": choice.also.get((one.seq, one.place), []),
        "parts": len(one.chunks),
    }


def _undoable(story: Story, places: set[Place]) -> list[dict[str, Any]]:
    """Effects that `amends undo` could take back so far, and cannot any more."""
    seqs = {seq for seq, _ in places}
    return [
        {"saga": one.thread.name or one.thread.saga.id, "step": one.step.number, "tool": one.step.tool}
        for one in story.steps
        if one.undo_state == "available" and {one.step.inverse_seq, one.now.inverse_seq} & seqs
    ]


def _state(erasure: Erasure) -> dict[str, Any]:
    return {
        "state": "done" if erasure.done else "erasing",
        "pins": [pin._asdict() for pin in erasure.pins],
        "pins_told": erasure.told,
    }


def _say(told: dict[str, Any]) -> int:
    code = ERASING if told["state"] == "erasing" else DONE
    if ui.session().as_json:
        ui.emit(told)
        return code
    for one in told["openings"][:SHOWN]:
        _say_opening(one)
    if len(told["openings"]) > SHOWN:
        ui.say(f"and {len(told['openings']) - SHOWN} more; --json lists all")
    if told["unread"]:
        ui.warn(f"{ui.count(len(told['unread']), 'opening')} could not be looked into, and stays: no key opens it")
    for one in told["left"]:
        what = "it is still open" if one["why"] == "saga_open" else "a hold forbids it"
        ui.say(ui.Word("left: ", "ask"), f"{one['saga']}, since {what}.")
    for one in told["no_undo"]:
        ui.say(ui.Word("no undo: ", "ask"), f"{one['saga']} step {one['step']} {one['tool']} stands, and cannot ",
               "be taken back by amends after this.")  # fmt: skip
    for one in told["copies"]:
        sealed = "; sealed, so `amends forget SAGA` reaches it" if one["payload"] == "sealed" else ""
        sealed += ", if it shows this" if one["kind"] == "disclosure" else ""
        ui.say(
            ui.Word("not reached: ", "ask"), f"the {one['kind']} {one['id'][:16]} of record {one['record']}{sealed}."
        )
    _say_state(told)
    return code


def _say_opening(one: dict[str, Any]) -> None:
    fields = ", ".join(one.get("fields") or []) or "what it holds"
    also = f" (in one with it, and gone too: {', '.join(one['also'])})" if one.get("also") else ""
    step = f" step {one['step']}" if one.get("step") else ""
    ui.say(ui.Word(f"{one['opening']:>8}  ", "dim"), f"{one.get('kind', '')}{step}  {fields}{also}")


def _say_state(told: dict[str, Any]) -> None:
    count = ui.count(len(told["openings"]), "opening")
    if told["state"] == "dry_run":
        return ui.say(f"{count} would be destroyed. Nothing was changed.")
    if told["state"] == "done":
        return ui.say(f"{count} destroyed on the basis of {told['basis']}: ", ui.Word("done", "good"), ".")
    ui.say(f"{count} cut out; ", ui.Word("erasing", "ask"), f": {in_the_way(told)}. It is finished as soon as they ",
           "are gone, by the daemon or whoever writes next; `amends doctor` says when.")  # fmt: skip


def in_the_way(told: dict[str, Any]) -> str:
    """Who keeps old pages: `pid 4711 (python agent.py)`."""
    if not told["pins_told"]:
        return "somebody reads old pages, and this system does not say who"
    who = [f"pid {pin['pid']}{f' ({pin_command})' if (pin_command := pin['command']) else ''}" for pin in told["pins"]]
    return f"old pages are read by {', '.join(who)}" if who else "others keep writing"


# ---- holds -----------------------------------------------------------------------------------------------------------


@click.command(cls=ui.Verb, name="hold")
@key_option
@click.argument("saga", required=False, shell_complete=_sagas)
@click.option("--all", "every", is_flag=True, help="Hold everything.")
@click.option("--lift", "lifted", type=click.IntRange(0), metavar="ID", help="Lift the hold with this record number.")
@click.option("--list", "listed", is_flag=True, help="List the holds that stand.")
@click.option("--by", metavar="NAME", help="Who decides.")
@click.option("--reason", metavar="TEXT", default="", help="Why.")
def hold(saga: str | None, every: bool, lifted: int | None, listed: bool, by: str | None, reason: str) -> None:
    """Forbid to redact, compact or forget a saga, or anything, until it is lifted. Several holds may stand on one."""
    if sum((saga is not None, every, lifted is not None, listed)) != 1:
        raise YouErred(
            "One of SAGA, --all, --lift ID and --list is asked.", next="`amends hold --list` changes nothing."
        )
    if listed:
        return _list()
    if by is None:
        raise YouErred("Who decides has a name.", next="Pass --by NAME.")
    with steering() as kit:
        if lifted is not None:
            told = redaction.held_by(kit.log, _standing(kit, lifted))
            record = redaction.lift(kit.log, lifted, by=named(by), reason=reason).seq
            told |= {"lifted": record, "lifted_by": by}
        else:
            found = resolve(kit, saga) if saga is not None else None
            target, name = (found.id, known_as(kit.log, found.id)) if found is not None else (EVERYTHING, "")
            made = redaction.hold(kit.log, target, by=named(by), reason=reason, name=name)
            told = redaction.held_by(kit.log, made.seq)
    if ui.session().as_json:
        return ui.emit(told)
    what = told["name"] or ("everything" if told["target"] == EVERYTHING else told["target"])
    if lifted is not None:
        return ui.say(f"{by} lifted the hold of record {lifted} on {what}.")
    ui.say(f"{by} holds {what}: nothing of it is redacted, compacted or forgotten. Record {told['record']}.")
    return ui.say(f"To lift it: amends hold --lift {told['record']} --by NAME")


def _standing(kit: AgentKit, seq: int) -> int:
    kit.log.refresh()
    if seq not in kit.log.keeping.holds:
        raise NotFound(f"Record {seq} is no hold that stands.", next="`amends hold --list` says.", code="no_hold")
    return seq


def _list() -> None:
    with looking() as kit:
        kit.log.refresh()
        holds = [redaction.held_by(kit.log, seq) for seq in sorted(kit.log.keeping.holds)]
        if ui.session().as_json:
            return ui.emit(holds)
        if not holds:
            return ui.say("Nothing is held.")
        rows = [
            (one["record"], one["name"] or ("everything" if one["target"] == EVERYTHING else one["target"]), one["by"],
             one["at"], one["reason"]) for one in holds
        ]  # fmt: skip
        return ui.table(("RECORD", "WHAT", "BY", "SINCE", "REASON"), rows)
