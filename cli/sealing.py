"""Verbs about the owner's key: seal the log, unseal it, change the key, and forget a saga by destroying its own.

Agents may go on meanwhile. Each of them finds the key at its next commit, or is refused in words: so where the key is
belongs into config.toml, which `--save` sees to. What is said at the end is what was done, and which copies it reaches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..runtime.followup import family_of, followups, resolve
from ..runtime.kit import AgentKit
from ..runtime.openings import known_as
from ..runtime.owner_key import absolute, make_key_file, owner_from, put, save
from ..runtime.plain import named
from ..runtime.saga import Saga
from ..store import sealing
from ..store.entry import Entry
from ..store.errors import AmendsError, Refused, YouErred
from ..store.seal import Owner
from ..store.sqlite import SqliteLog
from . import ui
from .device import key_option, steering
from .sagas import by_option, saga_argument

ERASE_S = 2.0
"""So long is waited for whoever still reads what was destroyed."""

_SOURCE = "file:PATH, env:NAME, command:PROGRAM, keyring:SERVICE/NAME"
save_option = click.option("--save", "saved", is_flag=True, help="Put the source into config.toml.")


new_key_option = click.option(
    "--new-key", type=click.Path(path_type=Path), metavar="FILE", help="Make a new key in FILE, and take that."
)


@click.command(cls=ui.Verb, name="seal")
@click.option("--key", "source", metavar="SOURCE", help=f"Where your key is: {_SOURCE}.")
@new_key_option
@by_option
@save_option
def seal(source: str | None, new_key: Path | None, by: str, saved: bool) -> None:
    """Encrypt what records hold, those that are there too, under a key of yours. Without it nobody reads arguments,
    results and names again, and no agent goes on: keep a copy of it elsewhere."""
    person = named(by)
    if source is not None:
        ui.session().key = absolute(source)  # which opens a log that is sealed already
    with steering() as kit:
        log = _file(kit)
        if log.keeping.seal:
            raise Refused(
                f"The log is sealed already, under key {log.keeping.seal}.",
                next="`amends rotate` changes the key; where it is, `key` under [seal] in config.toml says.",
                code="sealed",
            )
        source, owner = _chosen(source, new_key, "--key")
        with _saving(kit, source, saved):
            entry = sealing.begin(log, owner, person)
        with _begun(entry, f"The log is sealed under key {owner.id}: keep it.", _line(source)):
            sealing.finish(log, _progress("to be sealed"))
        erased = log.finish_erasing(ERASE_S).done
        document = {"record": entry.seq, "seal": owner.id, "left": sealing.left(log), "erased": erased,
                    "config": _line(source), "saved": saved}  # fmt: skip
        if ui.session().as_json:
            return ui.emit(document)
        ui.say(f"{person} sealed the log under key {owner.id}. Record {entry.seq}.")
        _say_erased(erased)
        _say_config(document)
    return None


@click.command(cls=ui.Verb, name="unseal")
@key_option
@by_option
def unseal(by: str) -> None:
    """Decrypt what records hold, in place."""
    person = named(by)
    with steering() as kit:
        entry = sealing.end(_file(kit), person)
        with _begun(entry, f"The log is no more sealed, and needs key {entry.prior} until all is read.", ""):
            sealing.finish(_file(kit), _progress("to be unsealed"))
        if ui.session().as_json:
            return ui.emit({"record": entry.seq, "prior": entry.prior, "left": sealing.left(_file(kit))})
        ui.say(f"{person} unsealed the log. Record {entry.seq}. What records hold lies in plain text again.")
    return None


@click.command(cls=ui.Verb, name="rotate")
@key_option
@click.option("--to", "source", metavar="SOURCE", help=f"Where the new key is: {_SOURCE}.")
@new_key_option
@by_option
@save_option
def rotate(source: str | None, new_key: Path | None, by: str, saved: bool) -> None:
    """Wrap the sagas' keys under another key of yours; the old one opens nothing here any more."""
    person = named(by)
    with steering() as kit:
        source, owner = _chosen(source, new_key, "--to")
        with _saving(kit, source, saved):
            entry = sealing.rotate(_file(kit), owner, person)
        erased = kit.log.finish_erasing(ERASE_S).done
        kept = [copy for copy in kit.log.keeping.copies if copy.out == "backup" and copy.payload == "plain"]
        document = {"record": entry.seq, "prior": entry.prior, "seal": entry.seal, "erased": erased,
                    "config": _line(source), "saved": saved,
                    "not_reached": [{"copy": copy.out, "id": copy.id} for copy in kept]}  # fmt: skip
        if ui.session().as_json:
            return ui.emit(document)
        ui.say(f"{person} changed the key from {entry.prior} to {entry.seal}. Record {entry.seq}.")
        _say_erased(erased)
        for copy in kept:
            ui.say(ui.Word("not reached: ", "ask"), f"backup {copy.id[:16]}… carries keys; the old key opens it.")
        _say_config(document)
    return None


@click.command(cls=ui.Verb, name="forget")
@saga_argument
@key_option
@by_option
@click.option("--reason", metavar="TEXT", required=True, help="Why.")
def forget(saga: str, by: str, reason: str) -> None:
    """Destroy the key of a saga that is over, with those inside it and those that followed it: what its records hold
    can be read nowhere any more. The records stay."""
    person, why = named(by), named(reason)
    with steering() as kit:
        found = resolve(kit, saga)
        name, family = known_as(kit.log, found.id), _kin(kit, found)
        entries = sealing.forget(_file(kit), [one.id for one in family], person, why)
        erased = kit.log.finish_erasing(ERASE_S).done
        copies = list({copy.id: copy for one in family for copy in kit.log.keeping.reaching(one.opened_seq)}.values())
        document = {
            "saga": name, "forgotten": [entry.target for entry in entries], "records": [e.seq for e in entries],
            "erased": erased,
            "reached": [{"copy": c.out, "id": c.id} for c in copies if c.payload == "sealed"],
            "not_reached": [{"copy": c.out, "id": c.id} for c in copies if c.payload != "sealed"],
        }  # fmt: skip
        if ui.session().as_json:
            return ui.emit(document)
        more = f" and {ui.count(len(entries) - 1, 'saga')} that belong to it" if len(entries) > 1 else ""
        ui.say(f"{person} forgot {name}{more}. Record {entries[-1].seq}.")
        _say_erased(erased)
        for copy in copies:
            reached = copy.payload == "sealed"
            word = ui.Word("reached: ", "good") if reached else ui.Word("not reached: ", "bad")
            how = "is sealed, and carries no keys" if reached else "can be read without this device's keys"
            how += ", if it shows this saga" if copy.out == "disclosure" else ""
            ui.say(word, f"{copy.out} {copy.id[:16]}… {how}.")
        ui.say("Votes, messages and decisions of people about it are the device's own records, and are not forgotten.")
    return None


# ---- what they share ------------------------------------------------------------------------------------------------


def _file(kit: AgentKit) -> SqliteLog:
    assert isinstance(kit.log, SqliteLog)
    return kit.log


def _chosen(source: str | None, new_key: Path | None, option: str) -> tuple[str, Owner]:
    """The source that was named, and its key."""
    if (source is None) == (new_key is None):
        raise YouErred("Which key?", next=f"Say {option} SOURCE, or --new-key FILE to make one; not both.")
    if new_key is not None:
        make_key_file(new_key)
        source = f"file:{new_key}"
    assert source is not None
    said = absolute(source)
    return said, owner_from(said)


@contextmanager
def _saving(kit: AgentKit, source: str, wanted: bool) -> Iterator[None]:
    """The source stands in config.toml before the fact does, so that whoever runs finds it."""
    if not wanted:
        yield
        return
    assert kit.home is not None
    before = save(kit.home, source)
    try:
        yield
    except BaseException:
        put(kit.home, before)
        raise


@contextmanager
def _begun(entry: Entry, said: str, line: str) -> Iterator[None]:
    """Whatever stops what follows, the fact stands: nobody is to take it for undone and throw the key away."""
    try:
        yield
    except AmendsError as error:
        error.message = f"{said} Record {entry.seq} says so; older records are not done yet: {error.message}"
        error.next = (
            f"{error.next or ''} It goes on by itself where the key is known{': ' + line if line else ''}.".strip()
        )
        raise


def _kin(kit: AgentKit, saga: Saga) -> list[Saga]:
    """A saga, those inside it, and those that took over something of any of them."""
    found: dict[str, Saga] = {}
    wanted = [saga]
    while wanted:
        one = wanted.pop()
        if one.id not in found:
            found[one.id] = one
            wanted += [*family_of(kit, one), *followups(kit, one)]
    return sorted(found.values(), key=lambda one: one.opened_seq)


def _progress(what: str) -> Callable[[int], None]:
    def told(left: int) -> None:
        if left:
            ui.warn(f"{ui.count(left, 'record')} {what}")

    return told


def _line(source: str) -> str:
    return f"[seal]\nkey = {json.dumps(source, ensure_ascii=False)}"


def _say_erased(erased: bool) -> None:
    if not erased:
        ui.say(
            ui.Word("not yet: ", "ask"), "somebody still reads what was there before; it leaves the file after that."
        )


def _say_config(document: dict[str, Any]) -> None:
    if document["saved"]:
        ui.say("config.toml says where the key is.")
        return
    ui.say("Agents and the daemon are refused until they know where the key is. Put this into config.toml:")
    for line in document["config"].splitlines():
        ui.say("    ", line)
