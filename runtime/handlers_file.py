"""`handlers.toml` says where handlers live: programs, and Python files with the interpreter that runs them.

    version = 1

    [python.shop]
    interpreter = "/home/me/shop/.venv/bin/python"
    files = ["refunds.py"]                # or modules = ["shop.refunds"], found by `path`
    env_file = "shop.env"                 # NAME=value lines, mode 0600; a service has no environment of yours

    [exec."mail.unsend"]
    command = ["/usr/local/bin/unsend", "--json"]
    timeout_s = 30
    idempotent = true                     # twice is once: it may be asked again when its answer was lost
    verifies = ["mail.send"]              # for purpose "verify" it only asks about the effects of these tools

Relative paths start at the folder of the file; `~` is the home of whoever runs recovery. The reading is strict: an
unknown key is an error with its line, because a misspelt `timeout` that is skipped is a deadline nobody has.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..store.entry import STRING_MAX
from ..store.errors import YouErred
from .hosts import ExecSpec, PythonSpec, Spec
from .toml_file import complaint, document_in, written

VERSION = 1


class BadHandlersFile(YouErred):
    """handlers.toml cannot be used. `facts`: path, line."""

    code = "bad_handlers_file"


class Handlers(NamedTuple):
    """The hosts of a handlers.toml, in its order."""

    specs: tuple[Spec, ...] = ()


_error = complaint(BadHandlersFile, "Nothing was run. Correct the file.")


def load(path: Path | str) -> Handlers:
    """The hosts a file declares; none if there is no file. Raises BadHandlersFile with file, line and expectation."""
    text = written(path, _error)
    return Handlers() if text is None else read(text, path)


def read(text: str, path: Path | str) -> Handlers:
    """The hosts in the text of a handlers.toml that lies at `path`. Raises BadHandlersFile."""
    return _Reader(Path(path), text).document(document_in(text, path, _error))


# ---- what each key takes: (description, test) -----------------------------------------------------------------------

Test = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_text, value))


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 86_400


def is_env(value: Any) -> bool:
    if not isinstance(value, dict) or not all(is_text(name) and "=" not in name for name in value):
        return False
    return all(isinstance(item, str) and "\0" not in item for item in value.values())


_TEXT = ("text", is_text)
_TEXTS = ("a list of texts, not empty", is_texts)
_PYTHON: Mapping[str, tuple[str, Test]] = {
    "interpreter": _TEXT,
    "files": _TEXTS,
    "modules": _TEXTS,
    "path": _TEXTS,
    "cwd": _TEXT,
    "env_file": _TEXT,
}
_EXEC: Mapping[str, tuple[str, Test]] = {
    "command": ("a list of texts, the program first", is_texts),
    "timeout_s": ("seconds above 0, at most a day", _is_seconds),
    "idempotent": ("true or false", lambda value: isinstance(value, bool)),
    "cwd": _TEXT,
    "env": ("a table of texts", is_env),
    "env_file": _TEXT,
    "verifies": _TEXTS,
}


class _Reader:
    """A parsed file beside its text, so that an error names its line."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.base = path.absolute().parent
        self.lines = text.splitlines()

    def document(self, document: dict[str, Any]) -> Handlers:
        version = document.get("version")
        if "version" not in document:
            self.refuse((), "", f"it must begin with version = {VERSION}")
        if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
            self.refuse((), "version", f"it has version {version}, and this amends reads version {VERSION}")
        if version != VERSION or isinstance(version, bool):
            self.refuse((), "version", f"version = {VERSION} is expected")
        for key in document:
            if key not in ("version", "python", "exec"):
                self.refuse((), key, f"unknown key {key}; expected are version, [python.NAME] and [exec.NAME]")
        pythons = [self.python(name, table) for name, table in self.tables(document, "python")]
        programs = [self.exec(name, table) for name, table in self.tables(document, "exec")]
        return Handlers((*programs, *pythons))

    def tables(self, document: dict[str, Any], family: str) -> list[tuple[str, dict[str, Any]]]:
        found = document.get(family, {})
        if not isinstance(found, dict):
            self.refuse((), family, f"[{family}.NAME] tables are expected")
        for name, table in found.items():
            if not isinstance(table, dict):
                self.refuse((family,), name, f"[{family}.{name}] is expected to be a table")
            if not 0 < len(name) <= STRING_MAX or not (name.isascii() and name.isprintable()) or set(name) & set('"\\'):
                self.refuse((family, name), "", "a name is printable ASCII without quote and backslash, 1 to 256")
        return list(found.items())

    def checked(self, family: str, name: str, table: dict[str, Any], keys: Mapping[str, tuple[str, Test]]) -> None:
        for key, value in table.items():
            if key not in keys:
                self.refuse((family, name), key, f"unknown key {key}; expected are {', '.join(keys)}")
            expected, fits = keys[key]
            if not fits(value):
                self.refuse((family, name), key, f"{key} is expected to be {expected}")

    def python(self, name: str, table: dict[str, Any]) -> PythonSpec:
        self.checked("python", name, table, _PYTHON)
        if "interpreter" not in table:
            self.refuse(("python", name), "", "interpreter is missing: the Python that runs these handlers")
        if not ("files" in table or "modules" in table):
            self.refuse(("python", name), "", "files or modules is missing: what the interpreter loads")
        return PythonSpec(
            name=f"[python.{name}]",
            interpreter=self.program(table["interpreter"]),
            files=tuple(map(self.place, table.get("files", ()))),
            modules=tuple(table.get("modules", ())),
            path=tuple(dict.fromkeys(self.place(entry) for entry in table.get("path", ["."]))),
            cwd=self.place(table.get("cwd", ".")),
            env_file=self.place(table["env_file"]) if "env_file" in table else "",
        )

    def exec(self, name: str, table: dict[str, Any]) -> ExecSpec:
        self.checked("exec", name, table, _EXEC)
        if "command" not in table:
            self.refuse(("exec", name), "", "command is missing: the program and its arguments, as a list")
        program, *arguments = table["command"]
        return ExecSpec(
            name=name,
            command=(self.program(program), *arguments),
            timeout_s=float(table.get("timeout_s", 0)),
            idempotent=table.get("idempotent", False),
            cwd=self.place(table.get("cwd", ".")),
            env=tuple(table.get("env", {}).items()),
            env_file=self.place(table["env_file"]) if "env_file" in table else "",
            verifies=tuple(table.get("verifies", ())),
        )

    def place(self, path: str) -> str:
        return os.path.normpath(self.base / os.path.expanduser(path))

    def program(self, name: str) -> str:
        """A bare name is looked up on PATH when it is started; anything with a slash is a path."""
        if os.path.sep not in name and not name.startswith("~"):
            return name
        return os.path.normpath(self.base / os.path.expanduser(name))

    def refuse(self, table: tuple[str, ...], key: str, what: str) -> NoReturn:
        label = f"[{'.'.join(table)}] " if table else ""
        raise _error(self.path, self.line_of(table, key), label + what)

    def line_of(self, table: tuple[str, ...], key: str) -> int:
        """The line of a key in a table, of the table's header where the key is not found, else 1."""
        here: tuple[str, ...] = ()
        header = 0 if table else 1
        for number, line in enumerate(self.lines, 1):
            path = _header(line)
            if path is not None:
                here = path
                if here[: len(table)] == table and not header:
                    header = number
                if here[: len(table) + 1] == (*table, key):
                    return number
            written = _key(line)
            if written and key and (*here, *written)[: len(table) + 1] == (*table, key):
                return number
            if written and (*here, *written)[: len(table)] == table and not header:
                header = number
        return header or 1


_BARE = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_ASSIGNED = re.compile(rf"\s*({_BARE}(?:\s*\.\s*{_BARE})*)\s*=")


def _header(line: str) -> tuple[str, ...] | None:
    """The dotted path of a `[table]` line."""
    if not line.lstrip().startswith("["):
        return None
    return _path(line)


def _key(line: str) -> tuple[str, ...] | None:
    """The dotted path that a `key = value` line assigns to, as far as one line says."""
    name = _ASSIGNED.match(line)
    return _path(f"{name[1]} = 0") if name else None


def _path(line: str) -> tuple[str, ...] | None:
    try:
        found: Any = tomllib.loads(line)
    except (tomllib.TOMLDecodeError, RecursionError):  # a line of some longer value
        return None
    path = []
    while isinstance(found, dict | list) and found:
        if isinstance(found, list):
            found = found[0]
            continue
        name, found = next(iter(found.items()))
        path.append(name)
    return tuple(path) or None
