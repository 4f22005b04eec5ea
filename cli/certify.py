"""`certify` says whether every effect in the log is accounted for, and hands that out as a signed statement.

Exit 0 SAFE, 1 UNSAFE (each finding names its record, saga and step), 3 INDETERMINATE. A log that does not verify is
refused (6). `--check` holds such a statement against a log or a bundle and works it out again. What is written as a
page for people is made from the statement alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..runtime import certificate
from ..runtime.certificate import Certificate, Checked, Given, NotVerified, check, copied, refuse_unverified
from ..runtime.certify import INDETERMINATE, SAFE
from ..runtime.facts import body
from ..runtime.plain import named
from ..runtime.values import encode
from ..store import dsse
from ..store.bundle import MANIFEST
from ..store.bundle_evidence import BundleEvidence
from ..store.errors import Damaged, HomeRefused, YouErred
from ..store.evidence import Evidence
from ..store.home import Home
from ..store.note import parse_vkey
from ..store.trust import brought
from . import ui
from .certificate_page import page, text
from .device import existing, key_option, steering
from .leaving import read_file, write_new
from .version import VERSION

_FILE = click.Path(path_type=Path)
_HTML = (".html", ".htm")


@click.command(cls=ui.Verb, name="certify")
@click.argument("path", required=False, type=_FILE)
@click.option("--out", type=_FILE, metavar="FILE", help="Write the signed certificate to FILE.")
@click.option("--page", "paged", type=_FILE, metavar="FILE", help="Write it for people: FILE.html or FILE.txt.")
@click.option("--by", metavar="NAME", help="With --out: for whom it is made; kept in the log.")
@click.option("--since", metavar="N|NOTE", help="Leave out sagas that had ended before record N, or a signed head.")
@click.option(
    "--prior", "priors", multiple=True, type=_FILE, metavar="FILE", help="An earlier certificate. Repeatable."
)
@click.option("--check", "checked", type=_FILE, metavar="FILE", help="Check a certificate against the log, or PATH.")
@key_option
def certify(
    path: Path | None, out: Path | None, paged: Path | None, by: str | None, since: str | None,
    priors: tuple[str, ...], checked: Path | None,
) -> int:  # fmt: skip
    """Say, signed, whether every effect is accounted for. PATH, with --check: a home, a database file, a bundle.

    Exit 0 SAFE, 1 UNSAFE or (with --check) it does not hold, 3 INDETERMINATE, 6 the log does not verify."""
    try:
        if paged is not None and paged.suffix not in (*_HTML, ".txt"):
            raise YouErred(f"{paged} is neither FILE.html nor FILE.txt.", next="Name the page by one of these endings.")
        if checked is not None:
            if out or by or since:
                raise YouErred("--check makes no certificate.", next="Leave out --out, --by and --since.")
            return _check(checked, path, _read_all(priors), paged)
        if path is not None:
            raise YouErred(
                "PATH goes with --check: only this device signs for its log.", next="Name the home by --home."
            )
        try:
            return _make(out, paged, by, since, _read_all(priors))
        except (HomeRefused, Damaged):
            refuse_unverified(existing())  # which says what it is that does not add up
            raise
    except NotVerified as refused:
        found: Any = refused.facts["findings"]
        for code, seq, reason in found:
            ui.say(ui.Word(f"{code} ", "bad"), f"record {seq}: " if seq >= 0 else "", reason, err=True)
        raise


def _make(out: Path | None, paged: Path | None, by: str | None, since: str | None, priors: Sequence[bytes]) -> int:
    if by and out is None:
        raise YouErred("--by says for whom a certificate is handed out.", next="Say --out FILE as well.")
    person = named(by) if by else ""
    with steering() as kit:
        log: Any = kit.log
        made = certificate.certify(log, f"amends {VERSION}", priors=priors, since=_place(since, kit.log))
        if out is not None:
            write_new(out, made.envelope)
            opening = body(by=encode(person)) if person else b""
            kit.log.commit(lambda state, now: [copied(made, opening)])
    _written(paged, made.statement, made.id)
    _say(made, out, paged)
    return made.exit


def _place(since: str | None, log: Any) -> int:
    """The record that a window begins at: a number, or the size in a signed head (or a file of one)."""
    if since is None:
        return 0
    if since.isascii() and since.isdigit() and len(since) <= 16:
        return int(since)
    return brought(since).anchor(parse_vkey(log.identity.log_vkey)).size


def _say(made: Certificate, out: Path | None, paged: Path | None) -> None:
    told = made.statement["predicate"]
    if ui.session().as_json:
        files = {"file": str(out) if out else "", "page": str(paged) if paged else ""}
        ui.emit(told | {"id": made.id} | files)
        return
    _say_verdict(told)
    if out is not None:
        ui.say(f"Written to {out}, SHA-256 {made.id}.")
    if paged is not None:
        ui.say(f"The page for people is {paged}.")
    if told["verdict"] != SAFE:
        ui.say("Next: `amends inbox` lists what a person can settle, `amends show SAGA` tells what happened.", err=True)


def _say_verdict(told: dict[str, Any]) -> None:
    style = {SAFE: "good", INDETERMINATE: "ask"}.get(told["verdict"], "bad")
    head, counts = told["log"], told["counts"]
    ui.say(ui.Word(told["verdict"], style), f"  {head['size']} records, root {head['root'][:16]}…")
    told_of = [f"{counts[word]} {word.replace('_', ' ')}" for word in _TOLD if counts[word]]
    ui.say(ui.count(counts["effects"], "effect"), f" of {ui.count(counts['sagas'], 'saga')}", *_listed(told_of))
    settled = [f"{counts[f'by_{word}']} by {word}" for word in _BASES if counts[f"by_{word}"]]
    if settled:
        ui.say("Nobody knew, and it was settled: ", ", ".join(settled))
    for found in told["findings"]:
        where = f"record {found['seq']}" + (f", saga {found['saga']}" if found["saga"] else "")
        where += f", step {found['step']}" if found["step"] else ""
        ui.say(ui.Word(found["code"], "bad"), f"  {where}: {found['text']}")
    if told["more"]:
        ui.say(f"{told['more']} more are not listed.")


_TOLD = ("committed", "approved", "compensated", "accepted", "not_happened", "unaccounted")
_BASES = ("probe", "compensation", "person", "answer")


def _listed(words: Sequence[str]) -> list[str]:
    return [": ", ", ".join(words)] if words else []


# ---- checking -------------------------------------------------------------------------------------------------------


def _check(file: Path, path: Path | None, priors: Sequence[bytes], paged: Path | None) -> int:
    envelope = _read(file)
    where: Home | Path = existing() if path is None else path
    refuse_unverified(where)
    with _source(where) as (source, home):
        found = check(envelope, source, Given(source, priors, home))
    _written(paged, found.statement, found.id)
    _say_checked(found)
    return found.exit


@contextmanager
def _source(where: Home | Path) -> Iterator[tuple[Any, Home | None]]:
    if isinstance(where, Path) and (where / MANIFEST).is_file():
        with BundleEvidence(where) as bundle:
            yield bundle, None
        return
    home = where if isinstance(where, Home) else Home(where) if where.is_dir() else None
    with Evidence(home.db if home is not None else str(where)) as evidence:
        yield evidence, home


def _say_checked(found: Checked) -> None:
    told = found.statement["predicate"]
    if ui.session().as_json:
        ui.emit(
            {"holds": not found.troubles, "troubles": list(found.troubles), "unknown": found.unknown, "id": found.id}
            | told
        )
        return
    for trouble in found.troubles:
        ui.say(ui.Word("It does not hold: ", "bad"), trouble, ".")
    if found.unknown:
        ui.say(ui.Word("It could not be worked out again: ", "ask"), found.unknown, ".")
    if not found.troubles:
        ui.say("Its signature and its root hold" + ("." if found.unknown else ", and the records say the same."))
        _say_verdict(told)


# ---- files ----------------------------------------------------------------------------------------------------------


def _read_all(paths: Sequence[Path | str]) -> list[bytes]:
    return [_read(Path(path)) for path in paths]  # ui.Verb hands on texts


def _read(path: Path) -> bytes:
    return read_file(path, dsse.ENVELOPE_MAX)


def _written(paged: Path | None, statement: dict[str, Any], id: str) -> None:
    if paged is not None:
        write_new(paged, (page if paged.suffix in _HTML else text)(statement, id).encode())
