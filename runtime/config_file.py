"""`config.toml` says who is told: one `[[notify]]` table per channel; and where the key of a sealed log is.

    stuck_after_s = 900                    # a saga without progress for so long is stuck; 0 never tells

    [seal]
    key = "file:/media/stick/amends.key"   # or env, command, keyring: owner_key.py

    [reconcile]
    every = "6h"                           # the daemon asks the world about recent effects; left out: never

    [retention]
    keep = "90d"                           # settled sagas stay for so long: retention.py
    auto = true                            # the daemon removes older ones; left out: only `amends compact` does
    max_size = "2GB"                       # warned of from 80 % on; a full log begins no new saga

    [[notify]]
    name = "ops"
    kind = "slack"                         # or command, webhook, teams, discord, desktop
    url_env = "SLACK_URL"                  # the variable that holds the URL, from env_file or the environment
    env_file = "notify.env"                # NAME=value lines, mode 0600
    events = ["approval", "escalated"]     # left out: all of them

    [[notify]]
    name = "pager"
    kind = "command"
    command = ["/usr/local/bin/page"]      # one JSON object on standard input; exit 0 is told
    targets = ["on-call"]                  # of approvals, only those at a level that names it
    include_args = true

Relative paths start at the folder of the file. The reading is strict, since a misspelt key is a message nobody gets:
what is wrong is named with its line. A broken file stops no saga, it stops the messages, and is said.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..store.errors import YouErred
from .channels import EVENTS, KINDS, TIMEOUT_S, WEBHOOKS, Channel, address_flaw
from .gate.policy_reader import duration
from .gate.toml_lines import lines_of
from .handlers_file import is_env, is_text, is_texts
from .toml_file import complaint, document_in, written

STUCK_S = 900.0
PORT = 8799
"""Where the local page is, unless [ui] says otherwise: passkeys are bound to it."""
TABLE = "notify"
TOP = ("version", "stuck_after_s", "reconcile", "retention", "ui", "seal", TABLE)
"""What stands at the top of the file; [ui] is read by `port_of`, [seal] by `seal_key_of`, [retention] by
`retention_of`."""
LISTENED = tuple(event for event in EVENTS if event != "test")


class BadConfig(YouErred):
    """config.toml cannot be used. `facts`: path, line."""

    code = "bad_config"


class Config(NamedTuple):
    """Who is told, and after how many seconds without progress a saga is stuck (0: never).

    reconcile_s: seconds from one question to the world to the next, 0 for none.
    """

    channels: tuple[Channel, ...] = ()
    stuck_after_s: float = STUCK_S
    reconcile_s: float = 0.0


_error = complaint(BadConfig, "Until it is corrected, whoever starts tells nobody, and whoever runs goes on as before.")


def load(path: Path | str) -> Config:
    """The channels a file declares; none if there is no file. Raises BadConfig with file, line and expectation."""
    return read(written(path, _error) or "", path)


def current(path: Path | str) -> Config:
    """The same, read again only where the file has changed since. Raises BadConfig."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return Config()
    except OSError as error:
        raise _error(path, 0, f"it cannot be read: {error.strerror}") from None
    return _at(str(path), (found.st_mtime_ns, found.st_size, found.st_ino))


@lru_cache(8)
def _at(path: str, stamp: tuple[int, int, int]) -> Config:
    return load(path)


def read(text: str, path: Path | str) -> Config:
    """The channels in the text of a config.toml that lies at `path`. Raises BadConfig."""
    return _Reader(Path(path), text).document(document_in(text, path, _error))


def port_of(path: Path | str) -> int:
    """The port of the local page under [ui]; PORT where nothing is said. What is said of channels is not looked at: a
    misspelt one does not close the page. Raises BadConfig."""
    text = written(path, _BAD_PORT) or ""
    section = document_in(text, path, _BAD_PORT).get("ui", {})
    port = section.get("port", PORT) if isinstance(section, dict) else None
    if type(port) is not int or not 0 < port < 65536:
        raise _BAD_PORT(path, lines_of(text).get(("ui", "port"), 1), "port under [ui] is expected to be a port")
    return port


def seal_key_of(path: Path | str) -> str:
    """The source of the owner's key under [seal]; empty where none is named. What is said of channels is not looked at.
    Raises BadConfig."""
    text = written(path, _BAD_SEAL) or ""
    section = document_in(text, path, _BAD_SEAL).get("seal", {})
    if not isinstance(section, dict):
        raise _BAD_SEAL(path, lines_of(text).get(("seal",), 1), "[seal] is expected to be a table")
    for name in section:
        if name != "key":
            raise _BAD_SEAL(path, lines_of(text).get(("seal", name), 1), f"unknown key {name}; under [seal] is key")
    key = section.get("key", "")
    if not isinstance(key, str) or ("key" in section and ":" not in key):
        raise _BAD_SEAL(path, lines_of(text).get(("seal", "key"), 1), "key under [seal] is expected to be a source")
    return key


def with_seal_key(text: str, source: str, path: Path | str) -> str:
    """The text of a config.toml with this source under [seal], and all else as it was. Raises BadConfig."""
    line = f"key = {json.dumps(source, ensure_ascii=False)}"
    places = lines_of(text)
    lines = text.splitlines()
    if ("seal", "key") in places:
        lines[places["seal", "key"] - 1] = line
    elif ("seal",) in places:
        lines.insert(places["seal",], line)
    else:
        lines += ["", "[seal]", line] if lines else ["[seal]", line]
    made = "\n".join(lines) + "\n"
    if document_in(made, path, _BAD_SEAL).get("seal", {}).get("key") != source:
        raise _BAD_SEAL(path, places.get(("seal",), 0), f"{line} cannot be put there; do it by hand")
    return made


class Retention(NamedTuple):
    """[retention]: how long settled sagas are kept, in milliseconds (0: not said), whether the daemon removes older
    ones, and how many bytes the log may have (0: any number)."""

    keep_ms: int = 0
    auto: bool = False
    max_bytes: int = 0


def retention_of(path: Path | str) -> Retention:
    """What is said under [retention]. What is said of channels is not looked at. Raises BadConfig."""
    text = written(path, _BAD_RETENTION) or ""
    section = document_in(text, path, _BAD_RETENTION).get("retention", {})
    lines = lines_of(text)

    def refuse(key: str, what: str) -> NoReturn:
        raise _BAD_RETENTION(path, lines.get(("retention", key)) or lines.get(("retention",), 1), what)

    if not isinstance(section, dict):
        refuse("", "a table [retention] is expected")
    for key in section:
        if key not in ("keep", "auto", "max_size"):
            refuse(key, f"[retention] unknown key {key}; expected are keep, auto, max_size")
    keep = duration(section["keep"]) if "keep" in section else 0.0
    if keep is None or ("keep" in section and keep < 7 * 86_400):
        refuse("keep", '[retention] keep is expected to be a time from "7d" up, like "90d"')
    auto = section.get("auto", False)
    if not isinstance(auto, bool):
        refuse("auto", "[retention] auto is expected to be true or false")
    size = bytes_in(section["max_size"]) if "max_size" in section else 0
    if size is None:
        refuse("max_size", '[retention] max_size is expected to be a size from "64MB" up, like "2GB"')
    return Retention(int(keep * 1000), auto, size)


def bytes_in(text: Any) -> int | None:
    """Bytes in a size like "2GB" or "512MB"; None for anything else, or less than 64 MB."""
    found = re.fullmatch(r"([0-9]{1,6}) ?(MB|GB|TB)", text) if isinstance(text, str) else None
    size = int(found[1]) * {"MB": 10**6, "GB": 10**9, "TB": 10**12}[found[2]] if found else 0
    return size if size >= 64 * 10**6 else None


_BAD_RETENTION = complaint(BadConfig, "Until it is corrected, nothing is removed.")
_BAD_SEAL = complaint(BadConfig, 'Correct it, `key = "file:PATH"` for one, or pass --key.')
_BAD_PORT = complaint(BadConfig, f"Correct it, `port = {PORT}` for one, or pass --port.")

# ---- what each key takes: (description, test) -----------------------------------------------------------------------

Test = Callable[[Any], bool]


def _is_name(value: Any) -> bool:
    return (
        is_text(value) and len(value) <= 64 and value.isascii() and value.isprintable() and not set(value) & set('"\\')
    )


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_events(value: Any) -> bool:
    return is_texts(value) and set(value) <= set(LISTENED)


_KEYS: Mapping[str, tuple[str, Test]] = {
    "name": ("printable ASCII without quote and backslash, 1 to 64 characters", _is_name),
    "kind": (f"one of {', '.join(KINDS)}", lambda value: value in KINDS),
    "url": ("an https URL, or http to this machine", lambda value: is_text(value) and not address_flaw(value)),
    "url_env": ("the name of a variable", lambda value: _is_name(value) and "=" not in value),
    "command": ("a list of texts, the program first", is_texts),
    "cwd": ("text", is_text),
    "env": ("a table of texts", is_env),
    "env_file": ("text", is_text),
    "events": (f"a list of some of {', '.join(LISTENED)}", _is_events),
    "targets": ("a list of texts, not empty", is_texts),
    "include_args": ("true or false", lambda value: isinstance(value, bool)),
    "timeout_s": ("seconds from 0.1 to 60", lambda value: _is_number(value, 0.1, 60)),
}
_NEEDS: Mapping[str, tuple[str, ...]] = {"command": ("command",), **dict.fromkeys(WEBHOOKS, ("url", "url_env"))}
"""Kind -> what it needs one of, and no more than one."""


class _Reader:
    """A parsed file beside its text, so that an error names its line."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.base = path, path.absolute().parent
        self.lines = lines_of(text)

    def document(self, document: dict[str, Any]) -> Config:
        for key in document:
            if key not in TOP:
                self.refuse(0, key, f"unknown key {key}; expected are {', '.join(TOP)}")
        version = document.get("version", 1)
        if version != 1 or isinstance(version, bool):
            self.refuse(0, "version", f"it has version {version!r}, and this amends reads version 1")
        stuck = document.get("stuck_after_s", STUCK_S)
        if not _is_number(stuck, 0, 366 * 86400):
            self.refuse(0, "stuck_after_s", "stuck_after_s is expected to be seconds, 0 for never")
        tables = document.get(TABLE, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self.refuse(0, TABLE, "[[notify]] tables are expected, with two brackets")
        channels = [self.channel(place, table) for place, table in enumerate(tables, 1)]
        for place, channel in enumerate(channels, 1):
            if channel.name in {other.name for other in channels[: place - 1]}:
                self.refuse(place, "name", f"another channel is named {channel.name} already")
        return Config(tuple(channels), float(stuck), self.reconciling(document.get("reconcile", {})))

    def reconciling(self, table: Any) -> float:
        """Seconds between reconciliations, of the table [reconcile]."""
        if not isinstance(table, dict):
            self.refuse(0, "reconcile", "a table [reconcile] is expected")
        for key in table:
            if key != "every":
                self.refuse(("reconcile",), key, f"[reconcile] unknown key {key}; expected is every")
        seconds = duration(table["every"]) if "every" in table else 0.0
        if seconds is None or 0 < seconds < 1:
            self.refuse(("reconcile",), "every", '[reconcile] every is expected to be a time from "1s" up, like "6h"')
        return seconds

    def channel(self, place: int, table: dict[str, Any]) -> Channel:
        for key, value in table.items():
            if key not in _KEYS:
                self.refuse(place, key, f"unknown key {key}; expected are {', '.join(_KEYS)}")
            expected, fits = _KEYS[key]
            if not fits(value):
                self.refuse(place, key, f"{key} is expected to be {expected}")
        for key in ("name", "kind"):
            if key not in table:
                self.refuse(place, "", f"{key} is missing: {_KEYS[key][0]}")
        self.fitting(place, table)
        command = table.get("command", ())
        return Channel(
            table["name"], table["kind"], table.get("url", ""), table.get("url_env", ""),
            (self.program(command[0]), *command[1:]) if command else (),
            cwd=self.path_of(table.get("cwd", ".")),
            env=tuple(table.get("env", {}).items()),
            env_file=self.path_of(table["env_file"]) if "env_file" in table else "",
            events=tuple(table.get("events", ())), targets=tuple(table.get("targets", ())),
            include_args=table.get("include_args", False), timeout_s=float(table.get("timeout_s", TIMEOUT_S)),
        )  # fmt: skip

    def fitting(self, place: int, table: dict[str, Any]) -> None:
        """Where the message goes is said once, and by a key that belongs to the kind."""
        kind = table["kind"]
        wanted = _NEEDS.get(kind, ())
        for key in ("url", "url_env", "command"):
            if key in table and key not in wanted:
                self.refuse(place, key, f"{key} says nothing for kind {kind}")
        given = [key for key in wanted if key in table]
        if wanted and not given:
            self.refuse(place, "", f"{' or '.join(wanted)} is missing: where messages of kind {kind} go")
        if len(given) > 1:
            self.refuse(place, given[1], f"{' and '.join(given)} both say where messages go; one of them is asked")

    def path_of(self, path: str) -> str:
        return os.path.normpath(self.base / os.path.expanduser(path))

    def program(self, name: str) -> str:
        """A bare name is looked up on PATH when it is started; anything with a slash is a path."""
        return name if os.path.sep not in name and not name.startswith("~") else self.path_of(name)

    def refuse(self, place: int | tuple[str, ...], key: str, what: str) -> NoReturn:
        label = f"[[notify]] {place}: " if isinstance(place, int) and place else ""
        raise _error(self.path, self.line_of(place, key), label + what)

    def line_of(self, place: int | tuple[str, ...], key: str) -> int:
        """The line of a key in the place-th [[notify]] table (0: above all tables) or in one by its path, else that of
        the table."""
        table = place if isinstance(place, tuple) else (TABLE, place - 1) if place else ()
        return self.lines.get((*table, key)) or self.lines.get(table, 1)
