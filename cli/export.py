"""`export` hands out the log: a bundle that a stranger can check, or the records in shapes that other programs read.

A bundle is evidence, and made only of a log that verifies; the log keeps that it was made. The other formats are for
looking: nothing in them proves anything.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ..runtime import dumps
from ..runtime.certificate import Given, draw
from ..runtime.followup import resolve
from ..runtime.kit import AgentKit
from ..runtime.state import State
from ..store import bundle
from ..store.audit import Verdict
from ..store.audit import verify as verify_log
from ..store.bundle import PAYLOADS, Content, Made
from ..store.chain import Draft
from ..store.entry import Entry
from ..store.errors import Malformed, TheyErred, YouErred
from ..store.evidence import NONE, PLAIN, SEALED, Evidence
from ..store.home import Home
from ..store.keys import origin_of
from ..store.log import Record
from ..store.seal import FORGOTTEN, WITHHELD, is_sealed
from ..store.sqlite import Head
from ..store.squeeze import unshut
from . import ui
from .device import existing, key_option, looking, steering
from .leaving import in_plain, meanwhile, opening, refuse_existing
from .version import described

BUNDLE = "bundle"


@click.command(cls=ui.Verb, name="export")
@click.option("--format", "format", type=click.Choice([BUNDLE, *dumps.FORMATS]), default=BUNDLE, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), metavar="PATH",
              help="The folder of the bundle, or the file; a file's default is standard output.")  # fmt: skip
@click.option("--payload", type=click.Choice(PAYLOADS), default=NONE, show_default=True,
              help="Arguments, results and the like: none of them, in plain text, or sealed as they lie.")  # fmt: skip
@click.option("--allow-broken", is_flag=True, help="A bundle also of a log that does not verify; it is labelled so.")
@click.option("--saga", default="", metavar="SAGA", help="Only this saga (not for a bundle).")
@click.option("--since", default="", metavar="TIME", help="Only from this time on, RFC 3339 (not for a bundle).")
@click.option("--until", default="", metavar="TIME", help="Only before this time (not for a bundle).")
@key_option
@click.option("--to", default="", metavar="NAME", help="For whom; the log keeps it.")
@click.option("--by", default="", metavar="NAME", help="Who hands it out; the log keeps it.")
def export(
    format: str, out: Path | None, payload: str, allow_broken: bool, saga: str, since: str, until: str,
    to: str, by: str,
) -> None:  # fmt: skip
    """Hand out the log: a bundle to check with sha256sum, openssl and minisign, or CSV, JSON, OTLP, OCSF."""
    if format != BUNDLE:
        if allow_broken or payload == SEALED:
            raise YouErred(f"--allow-broken and --payload sealed are for bundles, not for {format}.")
        _dump(format, out, payload, saga, dumps.moment(since), dumps.moment(until), opening(to, by))
        return
    if saga or since or until:
        raise YouErred("A bundle is the whole log.", next="`amends prove SAGA` discloses one saga, with proof.")
    if out is None:
        raise YouErred("A bundle is a folder.", next="Say --out FOLDER.", code="usage")
    _bundle(out, payload, allow_broken, opening(to, by))


# ---- bundles --------------------------------------------------------------------------------------------------------


def _bundle(out: Path, payload: str, allow_broken: bool, told: tuple[bytes, ...]) -> None:
    home = existing()
    verdict = _verified(home)
    if not verdict.exit:
        with steering() as kit:
            _say(_sound(kit, out, payload, verdict, told), verdict)
        return
    if not allow_broken:
        raise _does_not_verify(verdict)
    made = _broken(home, out, payload, verdict)
    ui.warn("This log does not verify: the bundle says so, nothing in it is signed, and the log was not told of it.")
    _say(made, verdict)


def _verified(home: Home) -> Verdict:
    """What `verify` says; a memo by another version is no part of a bundle and no reason to refuse one."""
    verdict = verify_log(home, view_factory=State)
    return verify_log(home) if {finding.code for finding in verdict.findings} == {"E_MEMO"} else verdict


def _does_not_verify(verdict: Verdict) -> TheyErred:
    first = verdict.findings[0]
    where = f" at record {first.seq}" if first.seq >= 0 else ""
    error = TheyErred(
        f"The log does not verify ({verdict.verdict}, {first.code}{where}): it is not handed out as evidence.",
        next="`amends verify` says more; --allow-broken copies it as it lies, and labels it.",
        code="not_intact",
    )
    error.exit = verdict.exit
    return error


def _sound(kit: AgentKit, out: Path, payload: str, verdict: Verdict, told: tuple[bytes, ...]) -> Made:
    log: Any = kit.log
    identity = log.identity
    if payload == SEALED and not log.keeping.seal:
        raise YouErred("This log is not sealed.", next="`amends seal` seals it; or --payload plain.", code="not_sealed")
    with bundle.cut(log) as (evidence, head):
        tool = f"amends {described()}"
        now = datetime.fromtimestamp(log.clock.wall_us() / 1_000_000, UTC)
        certificate = draw(evidence, head, identity, tool, now, Given(evidence, (), identity.home))
        content = Content(
            identity.origin, identity.log_key, identity.export_key, identity.export_seed, head, verdict.to_json(),
            tool, payload, _Reader(log, head).read, certificate.envelope,
        )  # fmt: skip
        return bundle.write(out, evidence, content, lambda made: _record(log, made, head, payload, told))


def _record(log: Any, made: Made, head: Head, payload: str, told: tuple[bytes, ...]) -> None:
    """Tell the log, unless something was destroyed since that the bundle still holds."""

    def decide(state: Any, now: Any) -> list[Draft]:
        if payload != NONE and log.keeping.erasing > head.size:
            raise meanwhile()
        return [bundle.copied(made, payload, told)]

    log.commit(decide)


class _Reader:
    """Opens the cells of a log for a bundle in plain text."""

    def __init__(self, log: Any, head: Head) -> None:
        self._log, self._head = log, head

    def read(self, entry: Entry, cell: bytes) -> bytes | None:
        """The opening lines; none of a saga that was forgotten. Raises what says why they cannot be had."""
        if not is_sealed(cell):
            return unshut(cell)
        lines, why = self._log.open_cell(self._log.origin, entry, cell)
        if lines is not None:
            return bytes(lines)
        if why == FORGOTTEN:
            if self._log.keeping.erasing > self._head.size:
                raise meanwhile()
            return None
        raise YouErred(
            f"What record {entry.seq} holds cannot be handed out in plain text: {WITHHELD[why]}.",
            next="Give the key, or export with --payload sealed or none.",
            code=why,
        )


def _broken(home: Home, out: Path, payload: str, verdict: Verdict) -> Made:
    with Evidence(home.db) as evidence:
        genesis = evidence.genesis()
        log_key = bytes.fromhex(genesis.log) if genesis else b""
        origin = origin_of(log_key) if genesis else "unknown"
        content = Content(
            origin, log_key, bytes.fromhex(genesis.export) if genesis else b"", None, None, verdict.to_json(),
            f"amends {described()}", payload, _as_it_lies,
        )  # fmt: skip
        return bundle.write(out, evidence, content)


def _as_it_lies(entry: Entry, cell: bytes) -> bytes | None:
    """What can be read of a cell without keys."""
    with suppress(Malformed):
        return None if is_sealed(cell) else unshut(cell)
    return None


def _say(made: Made, verdict: Verdict) -> None:
    if ui.session().as_json:
        ui.emit({
            "format": BUNDLE, "out": str(made.path), "id": made.id, "size": made.size, "root": made.root,
            "openings": made.openings, "removed": made.removed, "verdict": verdict.verdict,
        })  # fmt: skip
        return
    ui.say(ui.word(verdict.verdict), f"  {made.path}: {ui.count(made.size, 'record')}, root {made.root[:16]}…")
    held = f"{ui.count(made.openings, 'opening')} in it" if made.openings else "no arguments and results in it"
    ui.say(f"Its README.txt says how to check it with other people's tools; {held}.")


# ---- the other formats ----------------------------------------------------------------------------------------------


def _dump(
    format: str, out: Path | None, payload: str, saga: str, since: int, until: int, told: tuple[bytes, ...]
) -> None:
    if payload == PLAIN and out is None:
        raise YouErred(
            "What leaves in plain text goes into a file, so that the log can say what left.",
            next="Say --out FILE.",
            code="usage",
        )
    with steering() if payload == PLAIN else looking() as kit:
        chosen = dumps.Chosen(kit.log.size, _header_id(kit, saga), since, until)
        destroyed = kit.log.keeping.erasing
        lines = dumps.FORMATS[format](_records(kit, chosen), dumps.Told(kit.log.origin, payload == PLAIN, chosen))
        if out is None:
            _print(lines)
            return
        _file(kit, out, lines, payload, destroyed, chosen.size, told)
    if ui.session().as_json:
        ui.emit({"format": format, "out": str(out), "size": chosen.size, "payload": payload})
    else:
        ui.say(f"{out}: {format}, of the first {ui.count(chosen.size, 'record')}. It proves nothing; a bundle does.")


def _print(lines: Iterator[str]) -> None:
    """On standard output, as long as somebody reads. Raises OSError for an output that takes no more."""
    for line in lines:
        ui.put(line)
        if (lost := ui.unsaid()) is not None:
            if isinstance(lost, BrokenPipeError):
                return
            raise lost


def _header_id(kit: AgentKit, saga: str) -> str:
    return resolve(kit, saga).id if saga else ""


def _records(kit: AgentKit, chosen: dumps.Chosen) -> Iterable[Record]:
    return kit.log.thread(chosen.saga) if chosen.saga else kit.log.records(0, chosen.size)


def _file(
    kit: AgentKit, out: Path, lines: Iterator[str], payload: str, destroyed: int, size: int, told: tuple[bytes, ...]
) -> None:
    """Write it under a name of its own, tell the log, rename it."""
    target = Path(os.path.abspath(out))
    refuse_existing(target)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    hash = hashlib.sha256()
    try:
        with bundle.in_words(target):
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                for line in lines:
                    data = line.encode() + b"\n"
                    hash.update(data)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
        if payload == PLAIN:
            kit.log.commit(lambda state, now: in_plain(kit.log, destroyed, "dump", hash.hexdigest(), size, told))
        with bundle.in_words(target):
            os.rename(part, target)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)
