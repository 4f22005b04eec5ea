"""Recovery without anybody thinking of it: the machine's own supervisor runs `amends recoverd`.

`install` writes one unit file and makes it known, `uninstall` takes both back and leaves the home alone, `status` says
whether it runs. Where the user has no supervisor to talk to (a container, a bare session) nothing is written, and the
exact lines for somewhere else are printed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from ..runtime.hosts import Unavailable, environment
from ..store.errors import TheyErred, YouErred
from ..store.home import Home
from . import ui
from .device import home
from .service_units import Daemon, Unit, unit
from .unpacked import NAME, is_single_file, lay_out


class Answered(NamedTuple):
    """What a supervisor's command said: exit status and its words."""

    status: int
    words: str


@click.group(cls=ui.Verbs)
def service() -> None:
    """Let the machine's own supervisor run the recovery daemon."""


@service.command()
@click.option("--env-file", type=click.Path(path_type=Path), help="NAME=value lines for handlers; mode 0600.")
@click.option("--dry-run", is_flag=True, help="Print the unit and the commands; change nothing.")
def install(env_file: Path | None, dry_run: bool) -> int:
    """Install and start the daemon for this user and this home."""
    found = home()
    if env_file is None and not dry_run:
        env_file = _asked_for()
    if env_file is not None:
        env_file = Path(os.path.abspath(env_file.expanduser()))
        _check(env_file)
    if not dry_run:
        found.create()  # first: it refuses a place that is none, and makes the folder private before it is filled
    made = _unit(found, _executable(found, dry_run), env_file)
    if dry_run:
        return _show(made)
    gap = _unreachable(made)
    if gap:
        return _elsewhere(made, found, gap)
    made.path.parent.mkdir(parents=True, exist_ok=True)
    made.path.write_bytes(made.content)
    for command in made.install:
        answered = _ask(command)
        if answered.status:
            raise TheyErred(
                f"`{shlex.join(command)}` said: {answered.words or answered.status}.",
                next=f"The unit is {made.path}; `amends service uninstall` removes it.",
                code="supervisor_refused",
            )
    return _told("installed", made, True, f"The daemon runs, and starts when you log in. {made.hint}".strip())


@service.command()
def uninstall() -> int:
    """Stop the daemon and remove its unit. The home and its log stay."""
    made = _unit(home(), Path(NAME).absolute(), None)
    if not made.path.exists():
        return _told("uninstalled", made, False, "No unit was installed.")
    if not _unreachable(made):
        for command in made.remove:
            _ask(command)  # what was never started cannot be stopped; the file goes all the same
    made.path.unlink(missing_ok=True)
    if made.install[0][-1] == "daemon-reload" and not _unreachable(made):
        _ask(made.install[0])
    return _told("uninstalled", made, False, "The daemon is stopped and its unit removed; the home stays as it is.")


@service.command()
def status() -> int:
    """Say whether the daemon is installed and runs. Exit 0 if it runs, 1 if not."""
    made = _unit(home(), Path(NAME).absolute(), None)
    installed = made.path.exists()
    gap = _unreachable(made)
    answered = Answered(1, gap) if gap else _ask(made.status)
    active = installed and answered.status == 0
    words = "The daemon runs." if active else f"The daemon does not run. {gap}".strip()
    if not installed:
        words = "No unit is installed: what a dead agent leaves waits until somebody runs `amends recoverd`."
    return _told("status", made, active, words, answered.words if installed else "") or (0 if active else 1)


# ---- what is installed -----------------------------------------------------------------------------------------------


def _executable(found: Home, dry_run: bool) -> Path:
    """What the supervisor starts: the unpacked form of the single file, else the installed `amends`."""
    if is_single_file():
        return found.app / "current" / NAME if dry_run else lay_out(found.app)
    if getattr(sys, "frozen", False):
        return Path(sys.executable)
    beside = Path(sys.executable).with_name(NAME)
    there = beside if beside.exists() else shutil.which(NAME)
    if there is None:
        raise YouErred(
            "No installed `amends` was found for a supervisor to start.",
            next="Install it (`pip install amends`), or run this from the released single file.",
            code="no_executable",
        )
    return Path(os.path.abspath(there))


def _unit(found: Home, executable: Path, env_file: Path | None) -> Unit:
    anchors = found.anchors if os.environ.get("AMENDS_ANCHORS") else None
    return unit(Daemon(executable, found.path, env_file, anchors=anchors))


def _asked_for() -> Path | None:
    """The file a person names; nobody is asked where nobody can answer."""
    if ui.session().as_json or not sys.stdin.isatty():
        return None
    ui.say("A service has none of your environment: tokens that handlers need stand in a file of NAME=value lines.")
    said = click.prompt("That file, or nothing", default="", show_default=False).strip()
    return Path(said) if said else None


def _check(env_file: Path) -> None:
    """Raises YouErred where it is missing, open to others, or not NAME=value lines. Its content is never said."""
    try:
        environment((), str(env_file))
    except Unavailable as why:
        raise YouErred(f"{why}.", next="Nothing was installed.", code="env_file") from None


# ---- the supervisor --------------------------------------------------------------------------------------------------


def _ask(command: Sequence[str]) -> Answered:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment(), timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answered(127, str(error))
    return Answered(done.returncode, (done.stdout + done.stderr).strip())


def _unreachable(made: Unit) -> str:
    """Why the user's supervisor cannot be talked to; empty if it can."""
    program = made.status[0]
    if shutil.which(program) is None:
        return f"There is no {program} here."
    if program != "systemctl":
        return ""
    answered = _ask(("systemctl", "--user", "show-environment"))
    if not answered.status:
        return ""
    lines = answered.words.splitlines() or [f"exit {answered.status}"]
    return f"This user has no systemd to talk to (`systemctl --user`: {lines[0]})."


def _elsewhere(made: Unit, found: Home, gap: str) -> int:
    """Nothing was written: what to put where."""
    unit_lines = made.content.decode(errors="replace").splitlines()
    starts = [line.split("=", 1)[1].replace("%%", "%") for line in unit_lines if line.startswith("ExecStart=")]
    start = starts[0] if starts else "amends recoverd"
    anchors = f"AMENDS_ANCHORS={shlex.quote(str(found.anchors))} " if os.environ.get("AMENDS_ANCHORS") else ""
    line = f"AMENDS_HOME={shlex.quote(str(found.path))} {anchors}{start}"
    said = [
        f"{gap} No unit was written. Wherever programs are started on this machine, start this:",
        f"  {line}",
        "With cron (`crontab -e`), which does not start it again when it ends:",
        f"  @reboot {line}",
        "As a system unit: write what `amends service install --dry-run` prints to /etc/systemd/system/amends.service",
        f"with the line User={_user()} under [Service] and WantedBy=multi-user.target under [Install], then run:",
        "  systemctl enable --now amends.service",
        "In a container: `amends run -- CMD …` around the agent needs no service.",
    ]
    if ui.session().as_json:
        ui.emit({"error": {"code": "no_supervisor", "message": gap, "next": line}, "command": line})
    else:
        for text in said:
            ui.say(text)
    return 1


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return str(os.getuid()) if hasattr(os, "getuid") else "NAME"


def _show(made: Unit) -> int:
    text = made.content.decode("utf-16" if made.content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8")
    commands = [shlex.join(command) for command in made.install]
    if ui.session().as_json:
        ui.emit({"unit": str(made.path), "content": text, "commands": commands})
        return 0
    ui.say(f"# {made.path}")
    for line in text.splitlines():
        ui.say(line)
    ui.say("# then:")
    for command in commands:
        ui.say(f"#   {command}")
    return 0


def _told(did: str, made: Unit, active: bool, words: str, detail: str = "") -> int:
    if ui.session().as_json:
        ui.emit({"did": did, "unit": str(made.path), "installed": made.path.exists(), "active": active, "says": words})
        return 0
    ui.say(words)
    ui.say(f"Unit: {made.path}")
    for line in detail.splitlines()[:12]:
        ui.say(f"  {line}")
    return 0
