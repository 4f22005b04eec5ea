"""`verify` asks whether the log is what was written, and says how far that goes and what it cannot know.

PATH is a home folder, a database file, the folder of a bundle, or a disclosure file; which one it is is seen from what
lies there. Nothing is changed, and of the device's keys none is needed. The answer grows stronger by what you bring: a
note that left the device before (`--anchor`, `--since`), a policy that says whose cosignatures count, a key to unseal.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import click

from ..runtime.owner_key import NoKey, owner_from, owner_of
from ..runtime.state import State
from ..store.audit import DEMANDS, Terms, Verdict
from ..store.audit import verify as verify_log
from ..store.errors import YouErred
from ..store.seal import Owner
from ..store.trust import brought, read_policy
from . import ui
from .device import home


@click.command(cls=ui.Verb, name="verify")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--anchor", "anchors", multiple=True, metavar="NOTE", help="A signed head kept elsewhere. Repeatable.")
@click.option("--since", metavar="NOTE", help="A signed head that you trust: look only at what came after it.")
@click.option(
    "--require", "demands", type=click.Choice(DEMANDS), multiple=True, help="Exit 3 unless it is. Repeatable."
)
@click.option("--policy", metavar="FILE", type=click.Path(path_type=Path), help="Whose signatures count (tlog-policy).")
@click.option("--key", metavar="SOURCE", help="Where the key is that openings are sealed under, to look into them.")
def verify(
    path: Path | None,
    anchors: tuple[str, ...],
    since: str | None,
    demands: tuple[str, ...],
    policy: Path | None,
    key: str | None,
) -> int:
    """Check that the log is what was written. PATH is a home, a database file, a bundle or a disclosure; the home by
    default."""
    if path is None and home().path.is_file():
        raise YouErred(
            f"{home().path} is a file, and a home is a folder.", next="`amends verify FILE` looks at a file.",
            code="no_home",
        )  # fmt: skip
    terms = Terms(
        tuple(brought(said) for said in anchors),
        brought(since) if since else None,
        demands,
        read_policy(policy) if policy else None,
        _owners(path, key),
    )
    verdict = verify_log(path if path is not None else home(), view_factory=State, terms=terms)
    if ui.session().as_json:
        ui.emit(verdict.to_json())
    else:
        _say(verdict)
        _next(verdict, path)
    return verdict.exit


def _owners(path: Path | None, said: str | None) -> tuple[Owner, ...]:
    """The owner's key: what is said has to be there; what the home is configured with may be away."""
    if said:
        return (owner_from(said),)
    try:
        owner = owner_of(home())() if path is None else None
    except NoKey as error:
        ui.warn(error.message)
        return ()
    return (owner,) if owner else ()


def _say(verdict: Verdict) -> None:
    ui.say(
        ui.Word(verdict.verdict, "good" if not verdict.exit else "bad"),
        f"  {verdict.size} records, level: {verdict.level}, root {verdict.root[:16]}…",
    )
    for finding in verdict.findings:
        where = f"record {finding.seq}: " if finding.seq >= 0 else ""
        ui.say(ui.Word(f"{finding.code} ", "bad"), where, finding.reason)
    for text in verdict.not_proved:
        ui.say(ui.Word("not proved: ", "dim"), text)


def _next(verdict: Verdict, path: Path | None) -> None:
    unreadable = bool(verdict.findings) and verdict.findings[0].code == "E_FILE"
    if path is not None and unreadable and path.is_file() and tarfile.is_tarfile(path):  # nobody waits for a pipe
        ui.say(f"Next: it looks like a backup; `amends restore {path} --home NEW` makes a home to verify.", err=True)
    elif verdict.exit in (3, 6):
        ui.say("Next: bring what is missing, or ask for less.", err=True)
    elif verdict.exit:
        ui.say("Next: keep the file as it is, and compare it with a copy or a peer that you trust.", err=True)
