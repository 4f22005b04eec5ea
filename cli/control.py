"""Verbs about the device: make its home, and say how it is.

`init` is optional, since whoever comes first makes the home; it is the place to adopt one that was restored or copied.
`status` says what runs, what waits and what died; where it cannot read it says that, and never that all is well.
"""

from __future__ import annotations

from typing import Any

import click

from ..runtime.adopted import carry_over
from ..runtime.openings import known_as
from ..runtime.state import State
from ..store.errors import AmendsError, YouErred
from ..store.home import Home
from ..store.identity import adopt, open_log
from . import ui
from .device import acting, home, looking


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
    """Say what runs, what waits and what died. Exit 1 if something needs you, 3 if it could not be read."""
    try:
        with looking() as kit:
            document = kit.status() | {"guarantees": dict(kit.guarantees()), "origin": kit.log.origin}
            document["dead"] = [known_as(kit.log, saga) for saga in document.get("dead", ())]
    except YouErred:
        raise
    except AmendsError as error:
        document = {"readable": False, "home": str(home().path), "error": error.message, "next": error.next}
    code = 3 if not document["readable"] else 1 if document["waiting"] or document["dead"] else 0
    if ui.session().as_json:
        ui.emit(document)
    elif code == 3:
        ui.say(ui.Word("The log could not be read: ", "bad"), document["error"], " ", document.get("next", ""))
    else:
        _told(document)
    return code


def _told(document: dict[str, Any]) -> None:
    ui.say(f"home      {document['home']}")
    ui.say(f"survives  {document['guarantees']['survives']}")
    ui.say(f"records   {document['records']}")
    escalated = f", of which {document['escalated']} escalated" if document["escalated"] else ""
    ui.say(f"open      {ui.count(document['open'], 'saga')}{escalated}")
    dead = document["dead"]
    next = f"; `amends recoverd --once` undoes {'it' if len(dead) == 1 else 'them'}" if dead else ""
    ui.say("dead      ", ui.Word(str(len(dead)), "bad" if dead else ""), next)
    waiting = document["waiting"]
    next = "; see `amends inbox`" if waiting else ""
    ui.say("inbox     ", ui.Word(str(waiting), "ask" if waiting else ""), next)
