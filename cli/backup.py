"""`backup` copies the home into one file while agents run; `restore` makes a home of it that asks before it goes on.

What a restore cannot bring back is named, and so is everything outside the home that its files point to and that is not
there on this machine: a handler that is missing is found now, and not when something has to be undone.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from ..runtime.adopted import carry_over
from ..runtime.config_file import load as read_config
from ..runtime.handlers_file import load as read_handlers
from ..runtime.hosts import PythonSpec
from ..store.backup import Manifest, missing
from ..store.backup import backup as back_up
from ..store.backup import restore as lay_out
from ..store.errors import AmendsError, YouErred
from ..store.home import Home
from ..store.identity import adopt
from ..store.sqlite import SqliteLog
from . import ui
from .device import acting, home, key_option, steering


@click.command(cls=ui.Verb, name="backup")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--with-keys", is_flag=True, help="With the device's seed and the sagas' keys: whoever has it is you.")
@click.option("--by", default="", metavar="NAME", help="Who makes it; recorded.")
@key_option
def backup(file: Path, with_keys: bool, by: str) -> int:
    """Copy the home into FILE while agents run. Exit 1 if what was copied does not verify."""
    with steering() as kit:
        log = kit.log
        assert isinstance(log, SqliteLog)
        made = back_up(log, home(), file, keys=with_keys, by=by)
    sound = made.manifest.verdict == "INTACT"
    document = {
        "file": str(made.path), "id": made.id, "bytes": made.bytes, "size": made.manifest.size,
        "root": made.manifest.root, "keys": with_keys, "verdict": made.manifest.verdict,
    }  # fmt: skip
    if ui.session().as_json:
        ui.emit(document)
        return 0 if sound else 1
    ui.say(f"{made.path}: {ui.count(made.manifest.size, 'record')}, {made.bytes} bytes, id {made.id[:16]}")
    if not sound:
        ui.say(ui.Word(f"The log in it is {made.manifest.verdict}", "bad"), "; `amends verify` tells more.")
    if with_keys:
        ui.say("It holds the keys: whoever reads it can sign as this device. Keep it where the keys may be.")
    else:
        ui.say("It holds no keys; `--with-keys` takes them along.")
    return 0 if sound else 1


@click.command(cls=ui.Verb, name="restore")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--by", default="", metavar="NAME", help="Who decides that this home goes on.")
@click.option("--reason", default="", metavar="TEXT", help="Why.")
@click.option("--i-know", is_flag=True, help="Allow a folder that a service keeps in step with other machines.")
def restore(file: Path, by: str, reason: str, i_know: bool) -> None:
    """Make a new home of the backup FILE. With --by and --reason it goes on at once, as a new incarnation; without,
    it can be read and asks for that."""
    if bool(by) != bool(reason):
        raise YouErred("--by and --reason belong together.", next="Say who decides, and why.", code="no_name")
    found = Home(home().path, i_know=i_know)
    manifest = lay_out(file, found)
    lacks = [*missing(manifest), *_pointed_to(found)]
    left: list[str] = []
    if by:
        adopt(found, by, reason)
        with acting() as kit:
            left = carry_over(kit)
    document = {
        "home": str(found.path), "origin": manifest.origin, "size": manifest.size, "adopted": bool(by),
        "missing": lacks, "left": left,
    }  # fmt: skip
    if ui.session().as_json:
        return ui.emit(document)
    _say(found, manifest, lacks)
    if by:
        ui.say("It goes on as a new incarnation.")
        for saga in left:
            ui.say(f"left open in the old log, and now for you to decide: {saga}; see `amends inbox`")
    else:
        ui.say("It can be read as it is. Does the device that it was copied from live on? If this home is to go on:")
        ui.say(f"  amends --home {shlex.quote(str(found.path))} init --adopt --by NAME --reason TEXT")
    return None


def _say(found: Home, manifest: Manifest, lacks: list[str]) -> None:
    ui.say(f"Restored {ui.count(manifest.size, 'record')} of {manifest.origin} to {found.path}.")
    for what in lacks:
        ui.say(ui.Word("missing ", "ask"), what)


def _pointed_to(found: Home) -> Iterator[str]:
    """What handlers.toml and config.toml name and this machine does not have."""
    for name, load in (("handlers.toml", _handlers), ("config.toml", _channels)):
        try:
            paths = list(load(found))
        except AmendsError as error:
            yield f"{name} cannot be used here: {error.message}"
            continue
        yield from (f"{path}, which {name} names" for path in dict.fromkeys(paths) if path and not Path(path).exists())


def _handlers(found: Home) -> Iterator[str]:
    for spec in read_handlers(found.handlers).specs:
        yield spec.env_file
        yield spec.cwd
        if isinstance(spec, PythonSpec):
            yield from (spec.interpreter, *spec.files, *spec.path)
        else:
            yield spec.command[0] if "/" in spec.command[0] else ""


def _channels(found: Home) -> Iterator[str]:
    for channel in read_config(found.config).channels:
        yield from (channel.env_file, channel.cwd)
        yield channel.command[0] if channel.command and "/" in channel.command[0] else ""
