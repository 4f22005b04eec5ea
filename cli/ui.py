"""What the command line says, and how: one line for people, one document for scripts, nothing that a log could forge.

Every text that is printed goes through `clean`: names, arguments and errors come from agents and from other people's
programs, and a terminal obeys the escapes in them. Colours are ours, put on after the cleaning, and only on a terminal
(NO_COLOR is honoured). `--json` prints one JSON document on standard output, ASCII only; progress and warnings go to
standard error. `--home` and `--json` are taken before the verb and after it.

An output that is closed, full or read no further stops no verb in the middle of its work: what could not be said is
remembered (`unsaid`), and main.py decides what the exit code is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import click


class Session:
    """What was said before the verb or after it. parsed: whether all of it has been read; verb: "" where there is none
    to run, as for --help; key: where the key of a sealed log is, "" where that was not said."""

    home: str | None = None
    key: str = ""
    as_json: bool = False
    parsed: bool = False
    verb: str = ""


_unsaid: OSError | None = None
_latest = Session()  # for other threads of this invocation: click knows its context on the main thread only


def session(context: click.Context | None = None) -> Session:
    """The session of this invocation, on any thread of it."""
    global _latest
    here = context or click.get_current_context(silent=True)
    if here is None:
        return _latest
    root = here.find_root()
    if not isinstance(root.obj, Session):
        root.obj = _latest = Session()
    return root.obj


def begin() -> None:
    """Forget the invocation before, in a process that has several."""
    global _latest, _unsaid
    _latest, _unsaid = Session(), None
    for fd in range(3):  # closed ones are opened, lest a file of ours takes the place of an output
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  (as long as the process)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _take_home(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    said = session(context)
    if value is not None:
        said.home = utf8(value, context, parameter)


def _take_json(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    said = session(context)
    said.as_json = said.as_json or value


def options() -> list[click.Parameter]:
    """`--home` and `--json`, for the program and for each verb."""
    return [
        click.Option(
            ["--home"], metavar="PATH", expose_value=False, callback=_take_home, is_eager=True,
            help="The home folder; else AMENDS_HOME, else the user's data folder.",
        ),
        click.Option(
            ["--json"], is_flag=True, expose_value=False, callback=_take_json, is_eager=True,
            help="One JSON document on standard output.",
        ),
    ]  # fmt: skip


class Verb(click.Command):
    """A command that also takes `--home` and `--json`. It returns its exit code, None for 0."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.params += options()

    def invoke(self, ctx: click.Context) -> Any:
        said = session(ctx)
        said.parsed, said.verb = True, ctx.find_root().invoked_subcommand or ""
        for parameter in self.params:
            value = ctx.params.get(parameter.name or "")
            if isinstance(value, str):
                ctx.params[parameter.name or ""] = utf8(value, ctx, parameter)
            elif isinstance(value, tuple) and parameter.type is not click.UNPROCESSED:
                ctx.params[parameter.name or ""] = tuple(utf8(one, ctx, parameter) for one in value)
        return super().invoke(ctx)


def utf8(value: str, context: click.Context, parameter: click.Parameter) -> str:
    """A text of the command line, whatever the locale took its bytes for. Raises click.BadParameter if they are not
    UTF-8: the log could not keep it."""
    try:
        return os.fsencode(value).decode()
    except UnicodeError:
        raise click.BadParameter(f"{value!r} is not UTF-8.", context, parameter) from None


def seconds(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """A time to wait. Raises click.BadParameter for one that is negative or no number."""
    if value is not None and not value >= 0:
        raise click.BadParameter(f"{value} is no time to wait.", context, parameter)
    return value


class Verbs(click.Group):
    """A command of commands, each of which takes `--home` and `--json`."""

    command_class = Verb

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.params += options()


# ---- text that cannot bite ------------------------------------------------------------------------------------------


def clean(text: object) -> str:
    """A text without control, bidirectional and invisible characters: they are written as escapes."""
    said = str(text)
    if said.isascii() and said.isprintable():
        return said
    from ..runtime.plain import plain  # not for those who only ask for the version

    return plain(said)


class Word(NamedTuple):
    """A text with a style: good, bad, ask, dim or bold."""

    text: str
    style: str = ""


_STYLES = {"good": "32", "bad": "31", "ask": "33", "dim": "2", "bold": "1"}

STYLE_OF = {
    "committed": "good", "compensated": "good", "done": "good", "accepted": "good", "running": "bold",
    "waiting": "ask", "unwinding": "ask", "suspended": "ask", "interrupted": "bad", "escalated": "bad",
    "refused": "dim", "failed": "dim", "unknown": "ask", "orphaned": "bad", "compensation_failed": "bad",
    "intended": "ask", "ok": "good", "warn": "ask", "INTACT": "good",
}  # fmt: skip
"""The style of a word of outcome or state."""


def word(text: str) -> Word:
    """A word of outcome or state, in its own style."""
    return Word(text, STYLE_OF.get(text, ""))


def coloured(err: bool = False) -> bool:
    """Whether the stream is a terminal that may have colours."""
    stream = sys.stderr if err else sys.stdout
    terminal = hasattr(stream, "isatty") and stream.isatty()
    return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(part: object, colour: bool) -> str:
    """A part of a line as it is printed."""
    if isinstance(part, Word):
        text = clean(part.text)
        return f"\x1b[{_STYLES[part.style]}m{text}\x1b[0m" if colour and part.style else text
    return clean(part)


def say(*parts: object, err: bool = False) -> None:
    """One line for people, made of parts: texts, cleaned, and Words in colour."""
    colour = coloured(err)
    put("".join(painted(part, colour) for part in parts), err=err, colour=colour)


def put(text: str | bytes, *, err: bool = False, colour: bool | None = None) -> None:
    """A text as it is, and a line feed. What standard output does not take is remembered; what standard error does not
    take can be said nowhere."""
    global _unsaid
    try:
        click.echo(text, err=err, color=colour)
    except OSError as error:
        if not err:
            _unsaid = _unsaid or error


def verb() -> str:
    """The verb that was run, "" for none."""
    return _latest.verb


def unsaid() -> OSError | None:
    """Why something could not be written to standard output, None if all was."""
    return _unsaid


def finish() -> None:
    """Write out what the streams still hold; what they do not take is given up, and is no error of Python's at exit."""
    global _unsaid
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if stream is sys.stdout:
                _unsaid = _unsaid or error
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def count(number: int, one: str, many: str = "") -> str:
    """`1 saga`, `2 sagas`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def warn(text: str) -> None:
    """One line on standard error."""
    say("amends: ", text, err=True)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as their widest cell; the last one runs free."""
    cells = [[Word(title, "dim") for title in head], *[[_cell(value) for value in row] for row in rows]]
    widths = [max(len(clean(row[column].text)) for row in cells) for column in range(len(head))]
    for row in cells:
        parts: list[object] = []
        for column, cell in enumerate(row):
            parts.append(cell)
            if column + 1 < len(row):
                parts.append(" " * (widths[column] - len(clean(cell.text)) + 2))
        say(*parts)


def _cell(value: object) -> Word:
    return value if isinstance(value, Word) else Word(str(value))


# ---- for scripts ----------------------------------------------------------------------------------------------------


def emit(document: Any, *, line: bool = False) -> None:
    """One JSON document on standard output; `line` for one of many, each on its own line."""
    put(json.dumps(document, ensure_ascii=True, indent=None if line else 2, allow_nan=False))


def wants_json(args: Sequence[str]) -> bool:
    """Whether an error is to be said as JSON, also of a command line that could not be parsed."""
    if _latest.parsed:
        return _latest.as_json
    own = args[: args.index("--")] if "--" in args else args
    return "--json" in own


def fail(as_json: bool, code: str, message: str, next: str) -> None:
    """An error, where whoever asked looks for it: a JSON document on standard output, or words on standard error."""
    if as_json:
        emit({"error": {"code": code, "message": message, "next": next}})
        if _unsaid is None:
            return
    say(Word("amends: ", "bad"), message, err=True)
    if next:
        say("        ", next, err=True)
