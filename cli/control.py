"""Verbs about the device: make its home, and say how it is.

`init` is optional, since whoever comes first makes the home; it is the place to adopt one that was restored or copied.
`status` says what runs, what waits and what died, and how every part of the gate stands: what is stopped by whom, what
is left of each limit and why, which tool is left alone. Where it cannot read it says that, and never that all is well.
"""

from __future__ import annotations

from typing import Any

import click

from ..runtime.adopted import carry_over
from ..runtime.gate.limits import span
from ..runtime.levers import RUNNING, UNKNOWN
from ..runtime.openings import known_as
from ..runtime.state import State
from ..store.errors import AmendsError, YouErred
from ..store.home import Home
from ..store.identity import adopt, open_log
from . import ui
from .device import acting, home, looking

_TOLD = " Whoever starts tells nobody; whoever runs goes on as before."
SHOWN = 20
"""Rows of a kind that are shown to people."""


@click.command(cls=ui.Verb, name="init")
@click.option("--adopt", "adopted", is_flag=True, help="Go on with a restored or copied home, as a new incarnation.")
@click.option("--by", default="", metavar="NAME", help="With --adopt: who decides.")
@click.option("--reason", default="", metavar="TEXT", help="With --adopt: why.")
@click.option("--i-know", is_flag=True, help="Allow a folder that a service keeps in step with other machines.")
def init(adopted: bool, by: str, reason: str, i_know: bool) -> None:
    """Make the home folder, its keys and its log. Harmless when they are there."""
    if not adopted and (by or reason):
        raise YouErred("--by and --reason belong to --adopt.", next="Say --adopt as well, or leave them out.")
    found = Home(home().path, i_know=i_know)
    if adopted:
        adopt(found, by, reason)
    before = found.db.exists()
    if not before:
        open_log(found, State(), warn=ui.warn).close()
    with acting() as kit:
        document = {
            "home": str(found.path), "origin": kit.log.origin, "created": not before, "adopted": adopted,
            "left": (left := carry_over(kit)), "records": kit.log.size,
        }  # fmt: skip
    if ui.session().as_json:
        return ui.emit(document)
    if adopted:
        ui.say(f"A new incarnation goes on in {found.path} as {document['origin']}.")
        for saga in left:
            ui.say(f"left open in the old log, and now for you to decide: {saga}; see `amends inbox`")
    else:
        ui.say(f"{'There is a' if before else 'Made a'} home at {found.path} ({document['origin']}).")
    ui.say("Next: run your agent under `amends run -- CMD`, or `amends service install` to have recovery at hand.")
    return None


@click.command(cls=ui.Verb, name="status")
def status() -> int:
    """Say what runs, what waits, what died, and what is stopped or used up. Exit 1 if something needs you, 3 if it
    could not be read."""
    try:
        with looking() as kit:
            document = kit.status() | {"guarantees": dict(kit.guarantees()), "origin": kit.log.origin}
            for name in ("dead", "frozen"):
                document[name] = [known_as(kit.log, saga) for saga in document.get(name, ())]
    except YouErred:
        raise
    except AmendsError as error:
        document = {
            "readable": False, "switch": UNKNOWN, "home": str(home().path), "error": error.message, "next": error.next,
        }  # fmt: skip
    code = 3 if not document["readable"] else 1 if document["waiting"] or document["dead"] else 0
    if ui.session().as_json:
        ui.emit(document)
    elif code == 3:
        ui.say(ui.Word("The log could not be read, and so nobody knows what is stopped: ", "bad"), document["error"])
        if document.get("next"):
            ui.say(document["next"])
    else:
        _told(document)
    return code


def _told(document: dict[str, Any]) -> None:
    switch = document["switch"]
    ui.say("switch    ", ui.Word(switch, "good" if switch == RUNNING else "bad"))
    for lever in document["levers"]:
        ui.say("          ", *_lever(lever))
    policy = document["policy"]
    if policy["broken"]:
        ui.say("policy    ", ui.Word("BROKEN: no new step starts. ", "bad"), policy["broken"])
    if document["config"]["broken"]:
        ui.say("config    ", ui.Word("BROKEN: ", "bad"), document["config"]["broken"], _TOLD)
    ui.say(f"home      {document['home']}")
    ui.say(f"survives  {document['guarantees']['survives']}")
    ui.say(f"records   {document['records']}")
    escalated = f", of which {document['escalated']} escalated" if document["escalated"] else ""
    ui.say(f"open      {ui.count(document['open'], 'saga')}{escalated}")
    dead = document["dead"]
    next = f"; `amends recoverd --once` undoes {'it' if len(dead) == 1 else 'them'}" if dead else ""
    ui.say("dead      ", ui.Word(str(len(dead)), "bad" if dead else ""), next)
    if document["frozen"]:
        ui.say("frozen    ", ", ".join(document["frozen"]))
    waiting = document["waiting"]
    next = "; see `amends inbox`" if waiting else ""
    ui.say("inbox     ", ui.Word(str(waiting), "ask" if waiting else ""), next)
    for title, say, rows in (
        ("asked", _asked, document["approvals"]), ("limits", _limit, document["limits"]),
        ("breakers", _breaker, document["breakers"]), ("locks", _lock, document["locks"]),
        ("untold", _untold, document["notices"]),
    ):  # fmt: skip
        _listed(title, [say(row) for row in rows])
    if not policy["broken"]:
        ui.say("policy    ", policy["digest"] or "none: irreversible steps need a person, nothing else is asked")
    ui.say("keys      ", *_keys(document["keyring"]))
    if document["seal"]["key"] or document["seal"]["left"]:
        ui.say("seal      ", *_seal(document["seal"]))


def _seal(seal: dict[str, Any]) -> list[object]:
    left = ui.Word(f"; {ui.count(seal['left'], 'record')} still to be gone through" if seal["left"] else "", "ask")
    if not seal["key"]:
        return ["it has ended", left]
    missing = (
        "" if seal["at_hand"] else ", which is not at hand: what records hold cannot be read, and nothing is undone"
    )
    return [f"under key {seal['key']}", ui.Word(missing, "bad"), left]


def _listed(title: str, rows: list[list[object]]) -> None:
    """The first rows of a kind, the title before the first of them."""
    for place, row in enumerate(rows[:SHOWN]):
        ui.say(f"{title if not place else '':<10}", *row)
    if len(rows) > SHOWN:
        ui.say(f"{'':<10}and {len(rows) - SHOWN} more; --json lists all")


def _lever(lever: dict[str, Any]) -> list[object]:
    left = lever["left_ms"]
    until = "until it is lifted" if left is None else f"for another {span(left)}"
    wide = ", compensations too" if lever["including_compensations"] else ""
    return [
        ui.Word(f"{lever['mode']} on {lever['scope']}", "bad"),
        f"{wide}, {until}; by {lever['by']} at {lever['since'][:19].replace('T', ' ')}Z: {lever['reason']}",
    ]


def _asked(asked: dict[str, Any]) -> list[object]:
    left = f", {span(asked['left_ms'])} left" if asked["left_ms"] is not None else ""
    told = f", level {asked['told_level']} was told" if asked["told_level"] else ""
    have = f"{asked['have']} of {asked['need']} ({asked['level']})"
    return [f"{asked['tool']}, step {asked['step']} of {asked['saga']}: {asked['standing']}, {have}{left}{told}"]


def _limit(limit: dict[str, Any]) -> list[object]:
    said, spent = limit["said"], not limit["left"]
    name = f"{limit['limit']}/{limit['meter']}" if limit["meter"] else limit["limit"]
    window = f" in {span(limit['window_ms'])}" if limit["window_ms"] else ""
    frees = limit["frees_ms"]
    why = f"; the oldest of it counts for another {span(frees)}" if frees is not None and limit["used"] else ""
    left = ui.Word(f"{said['left']} left", "bad" if spent else "")
    return [f"{name}: ", left, f", {said['used']} of {said['cap']} used{window}{why}"]


def _breaker(breaker: dict[str, Any]) -> list[object]:
    state = ui.Word(breaker["state"], "good" if breaker["state"] == "closed" else "bad")
    again = f"; again in {span(breaker['retry_after_ms'])}" if breaker["retry_after_ms"] else ""
    return [f"{breaker['tool']}: ", state, f", {breaker['failed']} of the last {breaker['calls']} calls failed{again}"]


def _lock(lock: dict[str, Any]) -> list[object]:
    return [f"{lock['lock']}: held by {lock['saga']} since {lock['since'][:19].replace('T', ' ')}Z"]


def _untold(told: dict[str, Any]) -> list[object]:
    return [ui.Word(f"{told['channel']} could not be told of {told['item']}", "bad"), f", attempt {told['attempt']}"]


def _keys(keyring: dict[str, Any]) -> list[object]:
    if keyring["frozen"]:
        return [ui.Word(f"frozen: {keyring['frozen']}", "bad")]
    if not keyring["founded"]:
        return ["none enrolled: whoever sits here decides by name"]
    parts = [f"{ui.count(keyring['keys'], 'key')} of {ui.count(keyring['people'], 'person', 'people')}"]
    parts += [f", {keyring['quarantined']} quarantined"] if keyring["quarantined"] else []
    return [*parts, *([ui.Word("; a recovery waits", "ask")] if keyring["recovering"] else [])]
