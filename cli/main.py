"""The command line of amends: one verb, one answer, one exit code that means the same for every verb.

A verb lives in a file of its family and is imported when it is called, so that `amends --version` and a completion
cost nothing of the log. A verb returns its exit code; an error of ours is said in a sentence with what to do next and
leaves with the code of its class (core: store/errors.py; the table is in COMMANDS.md). Anything else that is raised is
a bug of ours: exit 70, and the traceback only under AMENDS_DEBUG=1.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from ..store.errors import AmendsError
from . import ui
from .version import described

COMMANDS = {
    "demo": (".demo", "demo", "See an agent die halfway and the device make amends, in 20 seconds, offline."),
    "init": (".control", "init", "Make the home folder, its keys and its log. Harmless when they are there."),
    "run": (".recovery", "run", "Run an agent, and undo what it left if it dies."),
    "ps": (".sagas", "ps", "List sagas and what became of them."),
    "show": (".sagas", "show", "Tell one saga's story."),
    "log": (".sagas", "log", "Print the records, and follow them."),
    "inbox": (".sagas", "inbox", "List everything that needs a person."),
    "approve": (".approvals", "approve", "Show what is asked, and let it happen."),
    "deny": (".approvals", "deny", "Keep a step from happening."),
    "keys": (".keys", "keys", "Say whose keys decide: init, enrol, list, revoke, rotate, recover."),
    "undo": (".sagas", "undo", "Undo a committed saga, or one step of it."),
    "retry": (".sagas", "retry", "Try an escalated saga again from where it stopped."),
    "accept": (".sagas", "accept", "Account for what stands, in a person's name."),
    "halt": (".levers", "halt", "Stop new effects at once: all of them, a tool's, a tag's or a saga's."),
    "drain": (".levers", "drain", "Let what runs finish, and begin nothing new."),
    "quarantine": (".levers", "quarantine", "Freeze one saga as it stands."),
    "resume": (".levers", "resume", "Lift what halt, drain and quarantine have set."),
    "status": (".control", "status", "Say what runs, what waits, what died and what is stopped."),
    "policy": (".policy", "policy", "Say what the policy file holds agents to, and what is wrong with it."),
    "recoverd": (".recovery", "recoverd", "Undo what dead agents left."),
    "ui": (".serve", "page", "Open the local page: inbox, approvals, keys, sagas."),
    "reconcile": (".reconcile", "reconcile", "Ask the world whether effects are as the log says."),
    "verify": (".verify", "verify", "Check that the log is what was written: a home, a file, a bundle, a disclosure."),
    "certify": (".certify", "certify", "Say, signed, whether every effect is accounted for."),
    "export": (".export", "export", "Hand out the log: a bundle to check, or CSV, JSON, OTLP, OCSF."),
    "prove": (".proofs", "prove", "Disclose one saga, with proof that nothing of it is withheld."),
    "check-proof": (".proofs", "check_proof", "Check what prove handed out."),
    "redact": (".redact", "redact", "Destroy what a saga's records hold, and keep the records."),
    "hold": (".redact", "hold", "Forbid to redact, compact or forget, or lift that."),
    "compact": (".compact", "compact", "Remove records of settled sagas that are past retention."),
    "seal": (".sealing", "seal", "Encrypt what records hold, under a key of yours."),
    "unseal": (".sealing", "unseal", "Decrypt it again, in place."),
    "rotate": (".sealing", "rotate", "Wrap the sagas' keys under another key of yours."),
    "forget": (".sealing", "forget", "Destroy a saga's key: nobody can read it in any copy."),
    "backup": (".backup", "backup", "Copy the home into one file, while agents run."),
    "restore": (".backup", "restore", "Make a home of a backup, as a new incarnation."),
    "doctor": (".doctor", "doctor", "Look for what could go wrong on this device."),
    "service": (".service", "service", "Let the machine's own supervisor run the recovery daemon."),
    "completions": (".completions", "completions", "Print the completion script of a shell."),
}
"""verb -> (its module, its name there, what it does)"""

BUG, INTERRUPTED = 70, 130
FULL = (errno.ENOSPC, errno.EDQUOT)

ONLY_SAY = frozenset(
    {"ps", "show", "log", "inbox", "status", "verify", "check-proof", "doctor", "policy", "completions", ""}
)
"""Verbs whose work is done when it has been read: with nothing written they have not done it. Of any other the work is
done, and its exit code says so whatever became of the words."""


class Program(click.Group):
    """A group whose verbs are imported when they are called, and whose errors speak."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[name]
        command: click.Command = getattr(import_module(module, __package__), attribute)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            context.fail(f"There is no verb {args[0]!r}{_meant(args[0])}.")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])

    def shell_complete(self, context: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        items = [
            CompletionItem(name, help=text) for name, (_, _, text) in COMMANDS.items() if name.startswith(incomplete)
        ]
        return items + click.Command.shell_complete(self, context, incomplete)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run the command line and leave the process with the exit code of the verb."""
        said = list(sys.argv[1:] if args is None else args)
        ui.begin()
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks is no error
        extra["standalone_mode"] = False
        try:
            code = super().main(said, prog_name=prog_name or "amends", **extra)
        except Exception as error:
            code = _told(error, ui.wants_json(said))
        except SystemExit:  # click's own way to end when nobody reads its help to the end
            code = 0
        ui.finish()
        code = _heard(code if isinstance(code, int) else 0)
        ui.finish()
        sys.exit(code)


def _heard(code: int) -> int:
    """The exit code, given what became of the output. Whoever stops reading has read enough."""
    lost = ui.unsaid()
    if lost is None or isinstance(lost, BrokenPipeError):
        return code
    ui.warn(f"Standard output could not be written: {lost.strerror or lost}. What is missing there was not said.")
    return code if code or ui.verb() not in ONLY_SAY else 10 if lost.errno in FULL else 3


def _meant(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, COMMANDS, 1)
    return f"; `amends {close[0]}` is one" if close else ""


def _told(error: Exception, as_json: bool) -> int:
    """Say what went wrong; the exit code."""
    if isinstance(error, click.Abort):
        return INTERRUPTED
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and not as_json:
        ui.put(error.format_message())
        return 0
    if isinstance(error, click.ClickException):
        ui.fail(as_json, "usage", " ".join(error.format_message().split()), _help_of(error))
        return 2
    if isinstance(error, AmendsError):
        ui.fail(as_json, error.code, error.message, error.next)
        return error.exit if error.exit != BUG else _bug_exit(error)
    if isinstance(error, OSError):
        what = f"{error.filename}: " if error.filename else ""
        full = error.errno in FULL
        ui.fail(as_json, "disk_full" if full else "os_error", f"{what}{error.strerror or error}.", "")
        return 10 if full else 3
    apsw = sys.modules.get("apsw")
    if apsw is not None and isinstance(error, apsw.Error):
        ui.fail(as_json, "damaged", f"The log cannot be read ({error}).", "Run `amends verify`.")
        return 7
    next = "Please report it on the project's issue tracker; AMENDS_DEBUG=1 shows where it happened."
    ui.fail(as_json, "bug", f"This is a bug of amends: {type(error).__name__}: {error}", next)
    return _bug_exit(error)


def _bug_exit(error: Exception) -> int:
    if os.environ.get("AMENDS_DEBUG") == "1":
        import traceback

        ui.put("".join(traceback.format_exception(error)), err=True)
    return BUG


def _help_of(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f"Run `{context.command_path if context else 'amends'} --help`."


def _version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        ui.emit({"version": described()}) if ui.session(context).as_json else ui.say("amends ", described())
        context.exit()


@click.command(
    cls=Program,
    params=[
        *ui.options(),
        click.Option(["--version"], is_flag=True, expose_value=False, callback=_version, help="The version."),
    ],
    context_settings={"help_option_names": ["-h", "--help"]},
)
def main() -> None:
    """Let an agent's work be undone, also when the agent died halfway."""
