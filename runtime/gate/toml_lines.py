"""On which line each key of a TOML text stands, and on which it is no TOML, so that a complaint can point at it.

`tomllib` reads the values and says no word about lines once it is content. `lines_of` reads the same text a second
time, for the places alone: it knows strings, comments, tables, arrays and inline tables, and understands no value. It
is only shown text that tomllib has accepted.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

Path = tuple[str | int, ...]
"""Keys and, inside an array, positions from 0: ("rules", 1, "when", "arg")."""

_GAP = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})|' r"'''.*?'''(?:'{0,2})|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'", re.DOTALL
)
_ATOM = re.compile(r"[^,\]}#\n]*")
_TOO_LONG = re.compile(r"[0-9_]{4000}")


class NoToml(ValueError):
    """A text that is no TOML: on which line, and why."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(line, what)
        self.line, self.what = line, what


def text_of(raw: bytes) -> str:
    """The text in the bytes of a file. Raises NoToml."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise NoToml(raw.count(b"\n", 0, error.start) + 1, "it is not UTF-8") from None


def parsed(text: str, number: Callable[[str], Any] = float) -> dict[str, Any]:
    """What a text says. number: reads what has a fraction or an exponent. Raises NoToml."""
    try:
        return tomllib.loads(text, parse_float=number)
    except RecursionError:
        raise NoToml(1, "it nests too deep") from None
    except ValueError as error:
        raise _no_toml(text, error) from None


def _no_toml(text: str, error: ValueError) -> NoToml:
    place = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)", str(error))
    if place is not None:
        line = int(place[1]) if place[1] else text.rstrip("\n").count("\n") + 1
        return NoToml(line, f"it is not TOML: {str(error)[: place.start()]}")
    long = _TOO_LONG.search(text)  # Python reads no integer of that many digits, and says so without a line
    return NoToml(text.count("\n", 0, long.start()) + 1 if long else 1, "a number is too long")


def lines_of(text: str) -> Mapping[Path, int]:
    """The line, from 1, on which each table, key and array element begins. The text is valid TOML."""
    return _Places(text.replace("\r\n", "\n")).found


class _Places:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.breaks = [place for place, letter in enumerate(text) if letter == "\n"]
        self.found: dict[Path, int] = {(): 1}
        self.lengths: dict[Path, int] = {}  # of arrays of tables
        self.document()

    def document(self) -> None:
        here: Path = ()
        while self.skip() < len(self.text):
            start = self.at
            if self.text[start] == "[":
                here = self.header(start)
            else:
                self.assignment(here)

    def header(self, start: int) -> Path:
        double = self.text.startswith("[[", start)
        self.at += 1 + double
        self.skip()
        path = self.through(self.key(), double)
        self.skip()
        self.at += 1 + double
        self.note(path, start)
        return path

    def through(self, key: tuple[str, ...], double: bool) -> Path:
        """The path of a header: a name of an array of tables means its last one, or with [[ ]] a new one."""
        path: Path = ()
        for place, part in enumerate(key, 1):
            path = (*path, part)
            if double and place == len(key):
                self.note(path, self.at)
                self.lengths[path] = self.lengths.get(path, 0) + 1
            if path in self.lengths:
                path = (*path, self.lengths[path] - 1)
        return path

    def assignment(self, here: Path) -> None:
        start = self.at
        path = (*here, *self.key())
        self.note(path, start)
        self.skip()
        self.at += 1  # =
        self.value(path)

    def key(self) -> tuple[str, ...]:
        parts = []
        while True:
            quoted = _STRING.match(self.text, self.at)
            found = quoted or _BARE_KEY.match(self.text, self.at)
            if found is None:  # not TOML after all
                raise ValueError(f"no key at {self.at}")
            parts.append(_unquoted(found[0]) if quoted else found[0])
            self.at = found.end()
            dot = _DOT.match(self.text, self.at)
            if dot is None:
                return tuple(parts)
            self.at = dot.end()

    def value(self, path: Path) -> None:
        self.skip()
        self.note(path, self.at)
        string = _STRING.match(self.text, self.at)
        if string is not None:
            self.at = string.end()
        elif self.text.startswith("[", self.at):
            self.several("]", path)
        elif self.text.startswith("{", self.at):
            self.several("}", path)
        else:
            self.at = _ATOM.match(self.text, self.at).end()  # type: ignore[union-attr]  # matches nothing at least

    def several(self, end: str, path: Path) -> None:
        """An array or an inline table, up to its end."""
        self.at += 1
        count = 0
        while self.skip() < len(self.text) and self.text[self.at] != end:
            if end == "]":
                self.value((*path, count))
            else:
                self.assignment(path)
            count += 1
            if self.skip() < len(self.text) and self.text[self.at] == ",":
                self.at += 1
        self.at += 1

    def skip(self) -> int:
        """Go past blanks, line ends and comments."""
        self.at = _GAP.match(self.text, self.at).end()  # type: ignore[union-attr]  # matches nothing at least
        return self.at

    def note(self, path: Path, place: int) -> None:
        """Where a path begins, and what it goes through, if that has not begun before."""
        line = bisect_right(self.breaks, place - 1) + 1
        for length in range(len(path), 0, -1):
            if self.found.setdefault(path[:length], line) != line:
                return


def _unquoted(key: str) -> str:
    return next(iter(tomllib.loads(f"{key} = 0"))) if "\\" in key else key[1:-1]
