"""`compact` removes what is settled and older than the retention, and says why the rest stays.

The records go for good, in every table; what the tree needs of them is kept, so that every head that was handed out
still adds up. A certificate over what goes is made first and lies in the home's `certificates/`.
"""

from __future__ import annotations

from typing import Any

import click

from ..runtime.config_file import retention_of
from ..runtime.gate.limits import span
from ..runtime.gate.policy_reader import duration
from ..runtime.retention import KEEP_MS, Plan, plan, remove
from ..store.errors import YouErred
from . import ui
from .device import home, key_option, looking, steering
from .version import described


@click.command(cls=ui.Verb, name="compact")
@click.option("--keep", metavar="TIME", help='Keep what ended within this time, like "90d"; at least "7d".')
@click.option("--by", default="", metavar="NAME", help="Who decides.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and why the rest stays.")
@key_option
def compact(keep: str | None, by: str, dry_run: bool) -> int:
    """Remove the records of settled sagas past retention. Exit 3 if bytes of them are left in the file for now."""
    keep_ms = _keep(keep)
    if dry_run:
        with looking() as kit:
            return _say(plan(kit, keep_ms), keep_ms, None)
    if not by.strip():
        raise YouErred("To remove records is somebody's decision.", next="Say --by NAME.", code="no_name")
    with steering() as kit:
        removed = remove(kit, keep_ms, by=by, tool=described())
    done = removed.done
    told = {
        "cert": removed.cert, "removed": done.entries, "removed_sagas": done.sagas, "bytes": done.bytes,
        "left": done.left, "state": "done" if done.erased else "erasing",
    }  # fmt: skip
    return _say(removed.plan, keep_ms, told)


def _keep(said: str | None) -> int:
    if said is None:
        return retention_of(home().config).keep_ms or KEEP_MS
    seconds = duration(said)
    if seconds is None:
        raise YouErred(f"--keep {said!r} is no time.", next='Write it like "90d".', code="bad_retention")
    return int(seconds * 1000)


def _say(planned: Plan, keep_ms: int, told: dict[str, Any] | None) -> int:
    document = {
        "keep_ms": keep_ms, "sagas": len(planned.sagas), "entries": planned.entries, "stay": planned.stay,
        "dry_run": told is None, **(told or {}),
    }  # fmt: skip
    erasing = told is not None and told["state"] == "erasing"
    if ui.session().as_json:
        ui.emit(document)
        return 3 if erasing else 0
    word = "would go" if told is None else "may go"
    sagas, entries = ui.count(len(planned.sagas), "saga"), ui.count(planned.entries, "record")
    ui.say(f"Settled and older than {span(keep_ms)}: {sagas} of {entries} {word}.")
    for why, count in sorted(planned.stay.items()):
        ui.say(f"  stay, {why}: {count}")
    if told is not None:
        _done(told)
    return 3 if erasing else 0


def _done(told: dict[str, Any]) -> None:
    if not told["removed"]:
        ui.say("Nothing was removed.")
    else:
        ui.say(f"Removed {ui.count(told['removed'], 'record')}; {told['bytes']} bytes were given back to the disk.")
    if told["left"]:
        ui.say(f"{ui.count(len(told['left']), 'saga')} of them stay, since something needs them still.")
    if told["cert"]:
        ui.say(f"What went counts by certificate {told['cert'][:16]}, kept in certificates/ of the home.")
    if told["state"] == "erasing":
        ui.say(ui.Word("erasing: ", "ask"), "somebody reads the file as it was; `amends doctor` tells who.")
