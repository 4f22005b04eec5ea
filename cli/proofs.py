"""`prove` hands one saga out so that a stranger can check it, and `check-proof` is what the stranger runs.

What a disclosure is, and why nothing can be left out of a saga unseen, says store/disclosure.py. Here it is decided
what belongs to the saga, under which head it is handed out (one that is remembered outside the log), and that the log
says so before any opening leaves. `check-proof` asks no home and makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..runtime.followup import family_of, followups, resolve
from ..runtime.kit import AgentKit
from ..runtime.openings import known_as, when
from ..runtime.saga import ENDED, Saga
from ..store import disclosure
from ..store.bundle import in_words
from ..store.disclosure import Checked, Disclosure
from ..store.entry import read_opening
from ..store.errors import Malformed, NotFound, Refused, YouErred
from ..store.facts import COMPACTED
from ..store.note import Key, parse_vkey
from ..store.sqlite import open_read
from ..store.trust import brought, read_policy
from . import ui
from .device import key_option, looking, steering
from .leaving import in_plain, opening, read_file, refuse_existing, write_new
from .sagas import saga_argument

FILE = click.Path(path_type=Path)
NOTE_MAX = 1_000_000


# ---- prove ----------------------------------------------------------------------------------------------------------


@click.command(cls=ui.Verb, name="prove")
@saga_argument
@click.option("--out", type=FILE, metavar="FILE", help="Where to; else standard output.")
@click.option("--open", "fields", multiple=True, metavar="FIELD", help="Show this field (args, result …). Repeatable.")
@click.option("--closed", is_flag=True, help="Show no field at all: what was done, and not with what.")
@click.option("--alone", is_flag=True, help="Only name the sagas inside it and those that took it up.")
@click.option("--with-votes", "votes", is_flag=True, help="With the decisions of people on its steps.")
@click.option("--since", type=FILE, metavar="NOTE", help="An older signed head: prove that the log has only grown.")
@click.option("--tlog-proofs", "folder", type=FILE, metavar="DIR", help="Each record's proof for C2SP tools as well.")
@click.option("--to", default="", metavar="NAME", help="For whom; the log keeps it.")
@click.option("--by", default="", metavar="NAME", help="Who hands it out; the log keeps it.")
@key_option
def prove(
    saga: str, out: Path | None, fields: tuple[str, ...], closed: bool, alone: bool, votes: bool, since: Path | None,
    folder: Path | None, to: str, by: str,
) -> None:  # fmt: skip
    """Disclose one saga, with proof that it is in the signed log and that no record of it is withheld."""
    if closed and fields:
        raise YouErred("--closed and --open exclude each other.", next="Give one of them.")
    _free(out)
    asked = Asked(saga, () if closed else fields or None, alone, votes, read_file(since, NOTE_MAX) if since else b"")
    _free(out)
    given = (closed and _looked(asked)) or _acted(asked, to, by)
    if folder is not None:
        _write_all(folder, given.made)
    if out is not None:
        write_new(out, given.made.text)
    _said(given, out)
    _beyond(given.made, fields)


class Asked(NamedTuple):
    """What is to be handed out. fields: None for all, empty for none; since: an older note, or empty."""

    saga: str
    fields: Sequence[str] | None
    alone: bool
    votes: bool
    since: bytes


class Given(NamedTuple):
    """A disclosure, by which name people know its saga, and which sagas are in it, or only named."""

    made: Disclosure
    name: str
    sagas: list[str]
    left_out: list[str]


def _looked(asked: Asked) -> Given | None:
    """Without a field nothing leaves that the log would have to be told of, so it is only looked at, and no key of a
    sealed one is needed. None if its newest head is not anchored so far: then it has to be signed."""
    with looking() as kit:
        try:
            return _given(kit, asked)
        except Refused as error:
            if error.code != "not_anchored":
                raise
            return None


def _acted(asked: Asked, to: str, by: str) -> Given:
    """The same by a device that signs its head first, and tells its log of what leaves."""
    with steering() as kit:
        destroyed = kit.log.keeping.erasing
        kit.log.sign_head()  # type: ignore[attr-defined]
        given = _given(kit, asked)
        if given.made.shown:
            made, told = given.made, opening(to, by)
            kit.log.commit(lambda state, now: in_plain(kit.log, destroyed, "disclosure", made.id, made.head.size, told))
        return given


def _given(kit: AgentKit, asked: Asked) -> Given:
    found, others = _family(kit, _found(kit, asked.saga), asked.alone)
    sagas, left_out = [one.id for one in found], [one.id for one in others]
    return Given(_proved(kit.log, sagas, left_out, asked), known_as(kit.log, sagas[0]), sagas, left_out)


def _found(kit: AgentKit, name: str) -> Saga:
    """The saga. Raises NotFound, which names the compaction where one may have removed it."""
    try:
        return resolve(kit, name)
    except NotFound as error:
        raise _gone(kit, error) from None


def _gone(kit: AgentKit, error: NotFound) -> NotFound:
    """The same error, or where sagas were compacted one that says so: which ones they were, nothing tells any more."""
    removed = [record.entry for record in kit.log.records() if record.entry.kind == COMPACTED]
    if not removed:
        return error
    told = ", ".join(f"{entry.count} records by record {entry.seq}" for entry in removed[-3:])
    return NotFound(
        f"{error.message} Sagas were compacted ({told}): of those the log keeps hashes, and nothing to disclose.",
        next="A bundle or backup made before has them; certificates count them.",
        code="compacted",
    )


def _family(kit: AgentKit, saga: Saga, alone: bool) -> tuple[list[Saga], list[Saga]]:
    """The saga and those that belong to it, inside or after it: the ones to disclose, and the ones only to name."""
    members = [saga]
    for member in members:  # grows on the way
        near = [*family_of(kit, member), *followups(kit, member)]
        members += [one for one in near if one.id not in {known.id for known in members}]
    shown = [one for one in members if one is saga or (one.phase == ENDED and not alone)]
    return shown, [one for one in members if one not in shown]


def _proved(log: Any, sagas: list[str], left_out: list[str], asked: Asked) -> Disclosure:
    """The disclosure under the newest head that is remembered outside the log."""
    anchor = log.identity.anchored()
    if anchor is None:
        raise Refused(
            "No signed head of this log is remembered outside it, so there is none to prove anything under.",
            next="`amends doctor` says why the anchor cannot be written.",
            code="not_anchored",
        )
    checkpoint = log.identity.note(anchor.size, anchor.root, anchor.signature)
    reader = open_read(log.path)
    try:
        return disclosure.prove(
            log, reader, checkpoint, sagas, open=asked.fields, left_out=left_out, votes=asked.votes, since=asked.since
        )
    finally:
        reader.close()


def _free(out: Path | None) -> None:
    if out is not None:
        refuse_existing(out)
    if out is not None and not out.absolute().parent.is_dir():
        raise YouErred(f"There is no folder {out.absolute().parent}.", next="Name another file.")


def _write_all(folder: Path, made: Disclosure) -> None:
    with in_words(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for seq, line, proof in disclosure.tlog_proofs(made.document):
        write_new(folder / f"{seq}.entry", line)
        write_new(folder / f"{seq}.tlog-proof", proof)


def _said(given: Given, out: Path | None) -> None:
    made, name, sagas, left_out = given
    document = made.document
    if out is None:
        ui.put(made.text[:-1])
    elif ui.session().as_json:
        ui.emit({
            "out": str(out), "saga": name, "sagas": sagas, "not_disclosed": left_out, "records": len(document.entries),
            "beside": len(document.beside),
            "openings": {"shown": made.shown, "hidden": made.hidden, "destroyed": made.destroyed},
            "origin": made.head.origin, "size": made.head.size, "root": made.head.root.hex(),
            "bytes": len(made.text), "id": made.id,
        })  # fmt: skip
    more = f" and {ui.count(len(sagas) - 1, 'saga')} that {'belongs' if len(sagas) == 2 else 'belong'} to it"
    ui.say(
        f"Saga {name}{more if len(sagas) > 1 else ''}: {ui.count(len(document.entries), 'record')}, ",
        f"{ui.count(made.shown, 'opening')} shown, {made.hidden} not shown, {made.destroyed} destroyed; under a head ",
        f"of {ui.count(made.head.size, 'record')} of {made.head.origin}.",
        err=True,
    )
    for one in left_out:
        ui.say(f"Saga {one} belongs to it, and is named and not disclosed.", err=True)
    if not document.consistency:
        ui.say("Send the file; whoever gets it runs `amends check-proof FILE`, or check_amends.py.", err=True)


def _beyond(made: Disclosure, fields: Sequence[str]) -> None:
    """Say what is shown beside what was asked for: fields of one opening share one fate."""
    if not fields:
        return
    shown: set[str] = set()
    for item in (*made.document.entries, *made.document.beside):
        shown |= {name for line in item.open for name in read_opening(line.encode())}
    if more := sorted(shown - set(fields) - {"at", "chunk", "of"}):
        ui.warn(f"{', '.join(more)} stand in the same openings as what was asked for, and are shown with them")


# ---- check-proof ----------------------------------------------------------------------------------------------------


@click.command(cls=ui.Verb, name="check-proof")
@click.argument("file", type=FILE)
@click.option(
    "--anchor", "anchors", type=FILE, multiple=True, metavar="NOTE", help="A signed head that you had before."
)
@click.option("--policy", type=FILE, metavar="FILE", help="Whose signatures you trust (C2SP tlog-policy).")
@click.option("--key", default="", metavar="VKEY", help="The log's key as you know it, or a file that holds it.")
def check_proof(file: Path, anchors: tuple[str, ...], policy: Path | None, key: str) -> int:
    """Check what `prove` handed out. Needs no home."""
    checked = disclosure.check(
        read_file(file, disclosure.FILE_MAX + 1),
        anchors=[brought(anchor) for anchor in anchors],
        key=_key(key) if key else None,
        policy=read_policy(policy) if policy else None,
    )
    if ui.session().as_json:
        ui.emit(checked.to_json())
    else:
        tell(checked)
    return checked.exit


def _key(said: str) -> Key:
    """The key that is meant. Raises YouErred."""
    text = said if "+" in said else read_file(Path(said), NOTE_MAX).decode("utf-8", "replace").strip()
    try:
        return parse_vkey(text)
    except Malformed as error:
        raise YouErred(error.message, next="Give name+hash+key, as in a bundle's manifest.", code="bad_key") from None


def tell(checked: Checked) -> None:
    """What a check says, for people."""
    shown, hidden, destroyed = checked.openings
    ui.say(
        ui.Word(checked.verdict, "good" if not checked.exit else "bad"),
        f"  saga {checked.saga or '?'}: {ui.count(len(checked.records), 'record')}, openings: {shown} shown, ",
        f"{hidden} not shown, {destroyed} destroyed; level: {checked.level}, {checked.size} records, ",
        f"root {checked.root[:16]}…",
    )
    for finding in checked.findings:
        where = f"record {finding.seq}: " if finding.seq >= 0 else ""
        ui.say(ui.Word(f"{finding.code} ", "bad"), where, finding.reason)
    if not checked.exit:
        ui.table(
            ("RECORD", "TIME", "KIND", "STEP", "TOOL", "OUT"),
            [(e.seq, when(e.at)[:19] + "Z", e.kind, e.step or "", e.tool, e.out) for e in checked.records],
        )
        if checked.since:
            ui.say(f"The first {checked.since} records are those of the older head that came along.")
    for text in checked.not_proved:
        ui.say(ui.Word("not proved: ", "dim"), text)
