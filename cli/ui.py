"""What the command line says, and how: one line for people, one document for scripts, nothing that a log could forge.

Every text that is printed goes through `clean`: names, arguments and errors come from agents and from other people's
programs, and a terminal obeys the escapes in them. Colours are ours, put on after the cleaning, and only on a terminal
(NO_COLOR is honoured). `--json` prints one JSON document on standard output, ASCII only; progress and warnings go to
standard error. `--home` and `--json` are taken before the verb and after it.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import click


class Session:
    """What was said before the verb or after it. parsed: whether all of it has been read."""

    home: str | None = None
    as_json: bool = False
    parsed: bool = False


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
    global _latest
    _latest = Session()


def _take_home(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    said = session(context)
    if value is not None:
        said.home = value


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
        session(ctx).parsed = True
        return super().invoke(ctx)


class Verbs(click.Group):
    """A command of commands, each of which takes `--home` and `--json`."""

    command_class = Verb

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.params += options()


# ---- text that cannot bite ------------------------------------------------------------------------------------------

_HARMFUL = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def clean(text: object) -> str:
    """A text without control, bidirectional and invisible characters: they are written as escapes."""
    said = str(text)
    if said.isascii() and said.isprintable():
        return said
    return "".join(_escaped(c) if unicodedata.category(c) in _HARMFUL else c for c in said)


_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _escaped(character: str) -> str:
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


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
    click.echo("".join(painted(part, colour) for part in parts), err=err, color=colour)


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
    click.echo(json.dumps(document, ensure_ascii=True, indent=None if line else 2, allow_nan=False))


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
        return
    say(Word("amends: ", "bad"), message, err=True)
    if next:
        say("        ", next, err=True)
