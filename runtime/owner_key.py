"""The owner's key stays where its owner keeps it: amends is told the place, asks there, and writes the key nowhere.

    file:PATH               a file of yours alone (mode 0600); a relative path starts at the folder it is named in
    env:NAME                a variable of the environment
    command:PROGRAM ARGS    a program that prints it on one line within 10 s; no shell; a relative one as for file
    keyring:SERVICE/NAME    the keyring of the operating system (the extra `keyring`)

A key is 32 bytes, as 64 hex digits or as base64 (43 characters, or 44 with its `=`), plain or for URLs. Which place:
what was said with `--key` or to AgentKit, else AMENDS_SEAL_KEY, else `key` under `[seal]` in config.toml. What is wrong
is said with the place and without anything of what was found there. Why no passphrase: whoever copies the file could
try them all.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import secrets
import shlex
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

from ..store.errors import YouErred
from ..store.home import Home, replace_file
from ..store.seal import KEY, Owner
from .config_file import seal_key_of, with_seal_key
from .hosts import environment

VARIABLE = "AMENDS_SEAL_KEY"
COMMAND_S = 10.0
LONGEST = 4096
"""Bytes of a file or an answer that are looked at."""
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{43}=?")


class NoKey(YouErred):
    """A source that gives no key: it cannot be asked, or what it says is none."""

    code = "seal_key_source"


def owner_of(home: Home, said: str = "") -> Callable[[], Owner | None]:
    """Where the key of this home's log comes from, to be asked when it is needed; None if nobody has named a source."""

    def ask() -> Owner | None:
        if named := said or os.environ.get(VARIABLE, ""):
            return owner_from(named)
        named = seal_key_of(home.config)
        return owner_from(named, home.config.absolute().parent) if named else None

    return ask


def owner_from(source: str, base: Path | None = None) -> Owner:
    """The owner's key of a source. base: where its relative paths start. Raises NoKey."""
    kind, colon, place = source.partition(":")
    kinds = ", ".join(f"{name}:{shape}" for name, shape in _SHAPES.items())
    if kind in SOURCES and _HEX.fullmatch(place.strip()):
        raise NoKey("A key was given in place of where it lies.", next=f"It is not repeated here. Sources are {kinds}.")
    if not colon or kind not in SOURCES or not place.strip():
        if len(source) > 30 and kind not in SOURCES:  # perhaps the key itself: it is not repeated
            raise NoKey("What was given as a source of the key has no kind.", next=f"Sources are {kinds}.")
        raise NoKey(f"{source!r} is no source of a key.", next=f"Sources are {kinds}.")
    return Owner(_key_in(SOURCES[kind](place, base or Path.cwd()), source))


def _key_in(said: str, source: str) -> bytes:
    """The 32 bytes of a written key."""
    text = said.strip()
    if _HEX.fullmatch(text):
        key = bytes.fromhex(text)
    elif _BASE64.fullmatch(text):
        try:
            key = base64.b64decode(text.rstrip("=").replace("-", "+").replace("_", "/") + "=", validate=True)
        except binascii.Error:
            key = b""
    else:
        key = b""
    if len(key) != KEY or len(set(key)) < 8:
        weak = len(key) == KEY
        what = "is no random one" if weak else "is no key: 64 hex digits, or 43 characters of base64, are expected"
        raise NoKey(f"What {_place(source)} holds {what}.", next="`amends seal --new-key FILE` makes one.")
    return key


def _place(source: str) -> str:
    """A source as it is told: of a command only the program, since arguments may be secrets too."""
    kind, _, place = source.partition(":")
    if kind != "command":
        return source
    words = _words(place)
    return f"command:{words[0]}"


# ---- the sources ----------------------------------------------------------------------------------------------------


def _of_file(place: str, base: Path) -> str:
    path = base / Path(place).expanduser()
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise NoKey(f"{path} is no file.", next="Name the file that holds the key.")
            if os.name == "posix" and (found.st_mode & 0o077 or found.st_uid != os.geteuid()):
                raise NoKey(f"{path} can be read by others than you.", next=f"chmod 600 {shlex.quote(str(path))}")
            return file.read(LONGEST).decode("ascii", "replace")
    except OSError as error:
        raise NoKey(f"The key file {path} cannot be read: {error.strerror}.", next="Put it back.") from None


def _of_environment(place: str, base: Path) -> str:
    said = os.environ.get(place)
    if said is None:
        raise NoKey(f"The variable {place} that holds the key is not set.", next="Set it.")
    return said


def _of_command(place: str, base: Path) -> str:
    words = _words(place)
    program = words[0]
    if os.path.sep in program or program.startswith("~"):
        program = str(base / Path(program).expanduser())
    try:
        child = subprocess.Popen(
            [program, *words[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment(), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise NoKey(f"{program}, which gives the key, cannot be run: {error.strerror}.", next="Name another.") from None
    try:
        printed = _printed(child)
    except subprocess.TimeoutExpired:
        _end(child)
        raise NoKey(
            f"{program} gave no key within {COMMAND_S:.0f} s, and was ended.", next="Run it yourself."
        ) from None
    except BaseException:
        _end(child)
        raise
    said = printed.decode("ascii", "replace").strip()
    if "\n" in said or len(printed) > LONGEST:
        _end(child)
        raise NoKey(f"{program} printed more than one line, and a key is one.", next="Let it print the key alone.")
    if child.returncode:
        raise NoKey(f"{program}, which gives the key, failed with {child.returncode}.", next="Run it yourself.")
    return said


def _printed(child: subprocess.Popen[bytes]) -> bytes:
    """What a program prints until it ends, or a byte too much of it: not more is kept. Raises TimeoutExpired."""
    assert child.stdout is not None
    out, told, end = child.stdout, list[bytes](), monotonic() + COMMAND_S
    # on a thread: what the program has left behind may hold the pipe open for ever
    reader = threading.Thread(target=lambda: told.append(out.read(LONGEST + 1)), daemon=True)
    reader.start()
    reader.join(COMMAND_S)
    if not told:
        raise subprocess.TimeoutExpired(child.args, COMMAND_S)
    if len(told[0]) <= LONGEST:
        child.wait(max(0.0, end - monotonic()))
    out.close()
    return told[0]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a program with what it has started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError, AttributeError):  # it is gone already; or Windows has no groups
        child.kill()
    child.wait()


def _words(place: str) -> list[str]:
    try:
        words = shlex.split(place)
    except ValueError as error:
        raise NoKey(f"The command that gives the key cannot be read: {error}.", next="Close its quotes.") from None
    if not words:
        raise NoKey("The command that gives the key is empty.", next="Name a program.")
    return words


def _of_keyring(place: str, base: Path) -> str:
    service, slash, name = place.partition("/")
    if not slash or not service or not name:
        raise NoKey(f"keyring:{place} names no entry.", next="Write keyring:SERVICE/NAME.")
    try:
        keyring: Any = import_module("keyring")
        said: str | None = keyring.get_password(service, name)
    except ImportError:
        raise NoKey("The keyring of the system cannot be asked.", next="pip install 'amends[keyring]'") from None
    except Exception as error:  # each system's keyring has errors of its own
        raise NoKey(f"The keyring cannot be asked ({type(error).__name__}).", next="Unlock it.") from None
    if said is None:
        raise NoKey(f"The keyring has no {name} of {service}.", next=f"keyring set {service} {name}")
    return said


SOURCES: Mapping[str, Callable[[str, Path], str]] = {
    "file": _of_file, "env": _of_environment, "command": _of_command, "keyring": _of_keyring,
}  # fmt: skip
_SHAPES = {"file": "PATH", "env": "NAME", "command": "PROGRAM", "keyring": "SERVICE/NAME"}


def absolute(source: str) -> str:
    """A source that means the same wherever it is read."""
    kind, _, place = source.partition(":")
    if kind == "file":
        return f"file:{os.path.abspath(os.path.expanduser(place))}"
    words = _words(place) if kind == "command" else []
    if words and os.path.sep in words[0]:
        words[0] = os.path.abspath(words[0])
        return f"command:{shlex.join(words)}"
    return source


def save(home: Home, source: str) -> str:
    """Name this source in the home's config.toml; its text as it was before. Raises BadConfig, OSError."""
    try:
        before = home.config.read_text(encoding="utf-8")
    except FileNotFoundError:
        before = ""
    put(home, with_seal_key(before, source, home.config))
    return before


def put(home: Home, text: str) -> None:
    """Give the home's config.toml this text, all of it at once."""
    replace_file(home.config, text.encode())


def make_key_file(path: Path) -> None:
    """A new random key in a new file that is yours alone. Raises NoKey where there is one already."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise NoKey(f"{path} is there already, and is not written over.", next="Name another file.") from None
    except OSError as error:
        raise NoKey(f"{path} cannot be made: {error.strerror}.", next="Name another file.") from None
    with open(fd, "w") as file:
        file.write(secrets.token_hex(KEY) + "\n")
        file.flush()
        os.fsync(file.fileno())
