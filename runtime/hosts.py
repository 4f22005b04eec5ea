"""Compensations run where they can: any program, or a Python function in the interpreter it was written for.

After a crash nobody holds the function any more, only its name, its arguments and the host recorded beside them.
An *exec host* starts a program per call: one JSON object in, one out, the exit code is the verdict. A *Python host*
is a process of the user's own interpreter that runs `host_program.py` and is asked by JSON lines; it starts when it is
first needed, in the recorded working folder, and is kept for the next call.

A call never raises for what a handler does. Its outcome is one of

    done  already_done  failed  human          what the handler said
    present  absent  cannot_tell               what a probe or a reconciler said
    again        nothing is known to be wrong, try later (exit 75, all processes busy)
    lost         it may have happened: the deadline passed, it crashed, it raised what leaves that open (a broken
                 connection, a 5xx answer, SystemExit), or its answer makes no sense
    unavailable  it was never started: no program, no interpreter, no such handler; this is no attempt

`lost` and `unavailable` are told apart by the host saying "started" before it runs anything.

At its deadline a handler's whole process group is killed. Environment: the runner's, minus what a frozen program's
loader put there; then `env_file` (private to its owner, never shown), then `env`. PYTHONHOME and PYTHONPATH are the
user's own and stay.

A handler whose file changed since it was recorded is run all the same, because people fix handlers after a crash;
the outcome's note says so. Why not refuse: the escalation would then have no way out but to restore the old bug.
"""

from __future__ import annotations

import os
import pkgutil
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from ..store.errors import AmendsError
from .values import Masked, decode, parse

VERSION = 1
START_MS = 30_000
STDERR_TAIL = 4096
OUTPUT_MAX = 1024 * 1024
PROCESSES = 4
IDLE_S = 60.0

ANSWERS: Mapping[str, tuple[str, ...]] = {
    "undo": ("done", "already_done", "failed", "human"),
    "confirm": ("done", "already_done", "failed", "human"),
    "probe": ("present", "absent", "cannot_tell"),
    "verify": ("present", "absent", "cannot_tell"),
}
"""What a handler may say, by what it was asked for; a test compares with host_program.py."""
ASKS = ("probe", "verify")
"""Purposes that ask and change nothing: a probe settles a step, a reconciler compares the world with the log."""
_BAD_NEWS = ("failed", "human", "cannot_tell")

_json = msgspec.json.Encoder().encode


class Outcome(NamedTuple):
    """outcome: one of the words above. result: decoded. why: what went wrong. stderr: its last 4 KB of this call.
    host: where it ran, for people. differs: how what a reconciler found is not what the log says."""

    outcome: str
    result: Any = None
    note: str = ""
    stderr: str = ""
    why: str = ""
    host: str = ""
    differs: str = ""


class Known(NamedTuple):
    """What a host says of a handler. keyed: it takes `idempotency_key`. why: the reason where it is not found.

    takes: the names it can be given, all without a default in `needs`; None for one that is given everything.
    """

    found: bool
    keyed: bool = False
    idempotent: bool = False
    why: str = ""
    takes: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()

    @property
    def again(self) -> str:
        """Why it may be attempted again after its answer was lost; empty if it may not."""
        return "keyed" if self.keyed else "idempotent" if self.idempotent else ""


class Host(Protocol):
    """Where handlers run. Safe to call from many threads; a call blocks until its outcome is known."""

    @property
    def name(self) -> str:
        """Which one, for people."""

    def call(
        self,
        handler: str,
        purpose: str,
        kwargs: Mapping[str, Any],
        idempotency_key: str,
        saga: str,
        step: int,
        attempt: int,
        deadline_ms: int,
        told: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Run a handler for `undo`, `confirm`, `probe` or `verify`; kwargs are tagged JSON values, as the opening holds
        them. told: what else a program is told in the same object."""

    def knows(self, handler: str, purpose: str = "undo") -> Known:
        """Whether it has the handler, and whether that may be attempted twice; for `verify`, whether it has a
        reconciler for the tool of that name."""

    def close(self) -> None:
        """End its idle processes."""


class ExecSpec(msgspec.Struct, frozen=True):
    """A program that is a handler. Seconds; 0 leaves the deadline to the caller. Paths are absolute.

    verifies: the tools about whose effects it may be asked.
    """

    name: str
    command: tuple[str, ...]
    timeout_s: float = 0
    idempotent: bool = False
    cwd: str = ""
    env: tuple[tuple[str, str], ...] = ()
    env_file: str = ""
    verifies: tuple[str, ...] = ()


class PythonSpec(msgspec.Struct, frozen=True):
    """An interpreter and what it loads. `expect`: (module, file) as recorded. Paths are absolute."""

    name: str
    interpreter: str
    files: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    cwd: str = ""
    env_file: str = ""
    expect: tuple[tuple[str, str], ...] = ()


Spec = ExecSpec | PythonSpec


class Unavailable(Exception):
    """A host cannot be started, or has no such handler: nothing was attempted."""


# ---- a child process ------------------------------------------------------------------------------------------------


def environment(env: Iterable[tuple[str, str]] = (), env_file: str = "") -> dict[str, str]:
    """The environment of a host's child. Raises Unavailable for an env_file that is missing, not private, or no such.

    What a frozen program's loader set is taken back: it would make another Python load our libraries.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("_PYI_", "_MEIPASS"))}
    clean.pop("__PYVENV_LAUNCHER__", None)
    unpacked = getattr(sys, "_MEIPASS", None)
    for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LIBPATH"):
        original = clean.pop(f"{name}_ORIG", None)
        if original is not None:
            clean[name] = original
        elif unpacked and unpacked in clean.get(name, "").split(os.pathsep):
            del clean[name]
    if env_file:
        clean |= _private(env_file)
    return clean | dict(env)


def _private(path: str) -> dict[str, str]:
    """NAME=value lines of a file that only its owner can read. Its content is in no message."""
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno())
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise Unavailable(f"env_file {path} cannot be read: {reason}") from None
    if os.name == "posix" and (mode.st_mode & 0o077 or mode.st_uid != os.geteuid()):
        raise Unavailable(f"env_file {path} can be read by others than you; run: chmod 600 {path}")
    found = {}
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name or "\0" in line:
            raise Unavailable(f"env_file {path} line {number}: NAME=value is expected")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found[name] = value
    return found


class _Child:
    """A process in a group of its own, its pipes without blocking, its standard error as a tail."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        if cwd and not os.path.isdir(cwd):
            raise Unavailable(f"its working folder {cwd} is not there")
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(env),
                cwd=cwd or None,
                start_new_session=True,
                bufsize=0,
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise Unavailable(f"{command[0]} cannot be started: {reason}") from None
        self.stdin, self.stdout, self.stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert self.stdin and self.stdout and self.stderr
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)
        self.unsent = b""
        self.out = bytearray()
        self.lost_output = False
        self.tail = bytearray()
        self.ended = False
        self.owner = os.getpid()
        self.idle_since = 0.0
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.stdout, selectors.EVENT_READ, self._read_out)
        self.selector.register(self.stderr, selectors.EVENT_READ, self._read_err)
        self.exit_fd = self._watch_exit()

    def _watch_exit(self) -> int:
        """A descriptor that wakes us when the process ends, even while a grandchild keeps its pipes open."""
        if not hasattr(os, "pidfd_open"):
            return -1
        try:
            fd = os.pidfd_open(self.process.pid)
        except OSError:  # a kernel without it: `pump` looks every 20 ms instead
            return -1
        self.selector.register(fd, selectors.EVENT_READ, lambda: None)
        return fd

    def send(self, data: bytes, *, last: bool) -> None:
        self.unsent, self.last = data, last
        assert self.stdin
        self.selector.register(self.stdin, selectors.EVENT_WRITE, self._write)

    def _write(self) -> None:
        assert self.stdin
        try:
            self.unsent = self.unsent[os.write(self.stdin.fileno(), self.unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it does not read; what it says or how it ends is what counts
            self.unsent, self.last = b"", True
        if not self.unsent:
            self.selector.unregister(self.stdin)
            if self.last:
                self.stdin.close()

    def _read_out(self) -> None:
        assert self.stdout
        data = self._read(self.stdout)
        room = OUTPUT_MAX - len(self.out)
        self.lost_output = self.lost_output or len(data) > room
        self.out += data[: max(room, 0)]

    def _read_err(self) -> None:
        assert self.stderr
        self.tail += self._read(self.stderr)
        del self.tail[:-STDERR_TAIL]

    def _read(self, pipe: Any) -> bytes:
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return b""
        if not data:
            self.selector.unregister(pipe)
            self.ended = self.ended or pipe is self.stdout
        return data

    def pump(self, seconds: float) -> bool:
        """Move what can be moved, wait at most so long for something to; whether anything was."""
        if self.exit_fd < 0:
            seconds = min(seconds, 0.02)
        ready = self.selector.select(max(seconds, 0))
        for key, _ in ready:
            key.data()
        return any(key.fd != self.exit_fd for key, _ in ready)

    def exited(self) -> bool:
        """Whether the process has ended. It is not reaped yet, so its group can still be killed safely."""
        if self.process.returncode is not None:
            return True
        if not hasattr(os, "waitid"):
            return self.process.poll() is not None
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody set SIGCHLD to be ignored: the kernel reaped it
            return True

    def drain(self) -> None:
        """Take what is in the pipes now, and not what a grandchild may yet write."""
        for _ in range(2 * OUTPUT_MAX // 65536 + 2):
            if self.selector.get_map() and not self.pump(0):
                return

    def kill(self) -> int:
        """End the group, leader and all; the leader's exit status (negative: the signal)."""
        self.end_group()
        return self.close()

    def end_group(self) -> None:
        if self.process.returncode is not None or self.owner != os.getpid():
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError, AttributeError):  # it is gone already; or Windows has no groups
            self.process.kill()

    def close(self) -> int:
        """Close our ends and reap; the exit status (negative: the signal)."""
        self.selector.close()
        for pipe in (self.stdin, self.stdout, self.stderr):
            assert pipe
            pipe.close()
        if self.exit_fd >= 0:
            os.close(self.exit_fd)
            self.exit_fd = -1
        try:
            return self.process.wait(5)
        except subprocess.TimeoutExpired:  # in the kernel's hands; it is reaped when it comes back
            return -signal.SIGKILL

    def stderr_text(self) -> str:
        return bytes(self.tail).decode(errors="replace")


class Ended(NamedTuple):
    """How a program ended. status: its exit code (negative: the signal), None if it was killed at its deadline.
    out: what it printed, `?` where that was too much to keep. stderr: the last 4 KB."""

    status: int | None
    out: bytes
    stderr: str


LEAVING_S = 0.1
"""Seconds between looks whether whoever runs a program is leaving."""


def run_program(
    command: Sequence[str], env: Mapping[str, str], cwd: str, data: bytes, deadline_s: float,
    leaving: Callable[[], bool] | None = None,
) -> Ended:  # fmt: skip
    """Run a program once, with `data` on its standard input; at the deadline, or once `leaving` says so, its process
    group is killed.

    Raises Unavailable if it cannot be started.
    """
    child = _Child(command, env, cwd)
    end = time.monotonic() + deadline_s
    child.send(data, last=True)
    while not child.exited():
        left = end - time.monotonic()
        if left <= 0 or (leaving is not None and leaving()):
            child.kill()
            return Ended(None, b"", child.stderr_text())
        child.pump(left if leaving is None else min(left, LEAVING_S))
    child.drain()
    status = child.close()
    return Ended(status, b"?" if child.lost_output else bytes(child.out), child.stderr_text())


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


# ---- answers --------------------------------------------------------------------------------------------------------


def _request(handler: str, purpose: str, kwargs: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"v": VERSION, "handler": handler, "purpose": purpose, "kwargs": _plain_kwargs(kwargs), **more}


def _plain_kwargs(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments by name, still tagged inside. Raises Unavailable for a secret, whose value is not in the log."""
    if kwargs.get("$") == "dict":
        kwargs = kwargs["v"]
    for name, value in kwargs.items():
        try:
            hidden = _holds_secret(decode(value))
        except AmendsError as error:
            raise Unavailable(f"its argument {name} cannot be read: {error.message}") from None
        if hidden:
            raise Unavailable(
                f"its argument {name} is a secret, which is never stored; let the handler read it from its environment "
                "(env_file in handlers.toml)"
            )
    return kwargs


def _holds_secret(value: Any) -> bool:
    if isinstance(value, Masked):
        return True
    if isinstance(value, dict):
        return any(map(_holds_secret, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_holds_secret, value))
    return any(map(_holds_secret, vars(value).values())) if hasattr(value, "_record_type") else False


def _answered(answer: Mapping[str, Any], stderr: str) -> Outcome:
    """An answer whose outcome is in order."""
    result, note = None, str(answer.get("note") or "")
    try:
        result = decode(answer.get("result"))
    except AmendsError as error:  # it has happened all the same
        note = "; ".join(part for part in (note, f"its result could not be kept: {error.message}") if part)
    said = Outcome(str(answer["outcome"]), result, note, stderr, str(answer.get("why") or ""))
    return said._replace(differs=str(answer["differs"])) if answer.get("differs") else said


def _verdict(status: int, output: bytes, purpose: str, key: str, stderr: str) -> Outcome:
    """What an exec handler's exit status and output say together."""
    unclear = "cannot_tell" if purpose in ASKS else "lost"
    failed = "cannot_tell" if purpose in ASKS else "failed"
    if status < 0:
        return Outcome(unclear, why=_ending(status), stderr=stderr)
    if status == 75:
        return Outcome("again", why="exit 75: try again", stderr=stderr)
    if not output.strip():
        if status:
            return Outcome(failed, why=_ending(status), stderr=stderr)
        return Outcome("cannot_tell", why="it printed no answer", stderr=stderr) if purpose in ASKS else (
            Outcome("done", stderr=stderr)
        )  # fmt: skip
    try:
        answer = parse(output)
    except AmendsError:
        answer = None
    if type(answer) is not dict or answer.get("outcome") not in ANSWERS[purpose]:
        expected = ", ".join(ANSWERS[purpose])
        why = f"{_ending(status)}, and what it printed is no answer: print nothing, or an outcome of {expected}"
        return Outcome(failed if status else unclear, why=why, stderr=stderr)
    if answer.get("idempotency_key", key) != key:
        return Outcome(unclear, why="it answered for another idempotency_key", stderr=stderr)
    if status and answer["outcome"] not in _BAD_NEWS:
        return Outcome(failed, why=f"it said {answer['outcome']}, but ended with {_ending(status)}", stderr=stderr)
    outcome = _answered(answer, stderr)
    return outcome if outcome.why or not status else outcome._replace(why=_ending(status))


# ---- exec -----------------------------------------------------------------------------------------------------------


class ExecHost:
    """Any program as a handler, started for each call. Never through a shell."""

    def __init__(self, spec: ExecSpec) -> None:
        self.spec = spec

    @property
    def name(self) -> str:
        return f"[exec.{self.spec.name}] {self.spec.command[0]}"

    def knows(self, handler: str, purpose: str = "undo") -> Known:
        """A program is handed the key; only its owner can say (`idempotent = true`) that twice is once, and for which
        tools it only asks (`verifies`): one that looks at no purpose would undo."""
        if purpose == "verify" and handler not in self.spec.verifies:
            return Known(False, why=f"[exec] {self.spec.name} does not verify {handler}")
        if purpose != "verify" and handler != self.spec.name:
            return Known(False, why=f"[exec] {self.spec.name} is another handler")
        return Known(True, idempotent=self.spec.idempotent)

    def close(self) -> None:
        """Nothing is kept between calls."""

    def call(
        self,
        handler: str,
        purpose: str,
        kwargs: Mapping[str, Any],
        idempotency_key: str,
        saga: str,
        step: int,
        attempt: int,
        deadline_ms: int,
        told: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """One run of the program."""
        if self.spec.timeout_s:
            deadline_ms = min(deadline_ms, int(self.spec.timeout_s * 1000))
        try:
            request = _request(
                handler,
                purpose,
                kwargs,
                idempotency_key=idempotency_key,
                saga=saga,
                step=step,
                attempt=attempt,
                deadline_ms=deadline_ms,
                **(told or {}),
            )
            env, data = environment(self.spec.env, self.spec.env_file), _json(request) + b"\n"
            ended = run_program(self.spec.command, env, self.spec.cwd, data, deadline_ms / 1000)
        except Unavailable as why:
            return Outcome("unavailable", why=str(why))
        if ended.status is None:
            late = f"no answer within {deadline_ms} ms; its process group was killed"
            return Outcome("lost", why=late, stderr=ended.stderr)
        return _verdict(ended.status, ended.out, purpose, idempotency_key, ended.stderr)


# ---- Python ---------------------------------------------------------------------------------------------------------

# The program comes by standard input, so that `ps` shows one line. It must not import from the working folder.
_BOOT = (
    "import os,sys;sys.path[:]=[p for p in sys.path if p];f=os.fdopen(os.dup(0),'rb');"
    "os.dup2(os.open(os.devnull,0),0);n={'__name__':'amends_handler_host'};"
    "exec(compile(f.read(int(sys.argv[1])),'<amends handler host>','exec'),n);n['main'](f)"
)


def _program() -> bytes:
    text = pkgutil.get_data(__package__ or "amends.runtime", "host_program.py")
    if text is None:
        raise Unavailable("the handler host's program is missing from this installation")
    return text


class _Process:
    """A running Python host: one call at a time."""

    def __init__(self, spec: PythonSpec) -> None:
        self.stamp = _stamp(spec)
        program = _program()
        command = [spec.interpreter, "-c", _BOOT, str(len(program))]
        self.child = _Child(command, environment((("AMENDS_HANDLER_HOST", "1"),), spec.env_file), spec.cwd)
        self.number = 0
        self.over = self.died = False  # it takes no other call; and that was not our doing
        config = {"v": VERSION, "files": spec.files, "modules": spec.modules, "path": spec.path}
        self.child.send(program + _json(config | {"expect": dict(spec.expect)}) + b"\n", last=False)
        hello = self.line(time.monotonic() + START_MS / 1000)
        said = self.child.stderr_text().strip()[-600:]
        if hello is None:
            ended = "did not say hello within 30 s" if not self.child.ended else None
            status = self.child.kill()
            raise Unavailable(f"{spec.interpreter} {ended or _ending(status)} before it said hello: {said}")
        if hello.get("v") != VERSION or hello.get("hello") is not True:
            self.child.kill()
            why = hello.get("why") or f"it speaks version {hello.get('v')}, and this amends {VERSION}"
            raise Unavailable(f"{spec.interpreter} could not load {spec.name}: {why}")
        self.python = tuple(hello.get("python") or ())
        self.handlers = tuple(hello.get("handlers") or ())

    def line(self, end: float) -> dict[str, Any] | None:
        """The next line it says; None when the time is up or it has ended (`child.ended`), or says what is no line."""
        while True:
            cut = self.child.out.find(b"\n")
            if cut >= 0:
                text = bytes(self.child.out[:cut])
                del self.child.out[: cut + 1]
                try:
                    message = parse(text)
                except AmendsError:
                    return None
                return message if type(message) is dict else None
            left = end - time.monotonic()
            if self.child.ended or self.child.lost_output or left <= 0:
                return None
            if self.child.exited():
                self.child.drain()
                self.child.ended = True
            else:
                self.child.pump(left)

    def ask(self, request: dict[str, Any], deadline_ms: int) -> tuple[dict[str, Any] | None, bool]:
        """Its reply, if there is one, and whether the handler was started."""
        end = time.monotonic() + deadline_ms / 1000
        self.number += 1
        self.child.tail.clear()
        self.child.send(_json(request | {"id": self.number}) + b"\n", last=False)
        started = False
        while True:
            reply = self.line(end)
            if reply is None and not self.over:
                self.died = self.child.ended
                self.over, end = True, 0.0
                self.child.end_group()
                self.child.drain()  # it may have said a last word: that it started, or even the answer
                continue
            if reply is None or reply.get("id") != self.number:
                return None, started
            if "outcome" in reply:
                self.child.drain()  # what it printed is in the pipe by now
                return reply, started
            started = True

    def usable(self, spec: PythonSpec) -> bool:
        """Whether it lives, and has loaded what lies in its files now."""
        return not self.child.ended and not self.child.exited() and self.stamp == _stamp(spec)


def _stamp(spec: PythonSpec) -> list[tuple[int, int]]:
    """Changes when a file of the host does: an idle process would go on with what it once loaded."""
    found = []
    for path in (*spec.files, *(file for _, file in spec.expect)):
        try:
            seen = os.stat(path)
        except OSError:
            found.append((0, 0))
        else:
            found.append((seen.st_mtime_ns, seen.st_size))
    return found


class PythonHost:
    """Handlers in an interpreter of the user's: a few processes, one call in each, kept while calls come.

    `function` and `digest` are a recorded handler's: `module:qualname`, and the SHA-256 of its file then.
    """

    def __init__(self, spec: PythonSpec, function: str = "", digest: str = "", pool: _Pool | None = None) -> None:
        self.spec, self.function, self.digest = spec, function, digest
        self.pool = pool or _Pool(spec)

    @property
    def name(self) -> str:
        return f"{self.spec.name} ({self.spec.interpreter})"

    def knows(self, handler: str, purpose: str = "undo") -> Known:
        """Asks a process; starts one if there is none. A handler that was found is not asked for again until a file
        of its host has changed: thirty sagas that are unwound at once would start thirty processes to ask."""
        verifies = purpose == "verify"
        pool, name = self.pool, (handler, "verify" if verifies else self.function)
        with pool.asking:
            stamp = _stamp(self.spec)
            if pool.stamp != stamp:
                pool.stamp = stamp
                pool.known.clear()
            if name not in pool.known:
                known = self._describe(handler, "verify" if verifies else "")
                if not known.found:
                    return known
                pool.known[name] = known
            return pool.known[name]

    def _describe(self, handler: str, of: str) -> Known:
        request = {"handler": handler, "function": self.function, "purpose": "describe", "of": of, "kwargs": {}}
        reply = self._ask(request, START_MS, counted=False)
        if isinstance(reply, Outcome):
            return Known(False, why=reply.why)
        if reply["outcome"] != "known":
            return Known(False, why=str(reply.get("why") or "no such handler"))
        takes = None if reply.get("any") is True else tuple(reply.get("takes") or ())
        needs = tuple(reply.get("needs") or ())
        return Known(True, reply.get("keyed") is True, reply.get("idempotent") is True, takes=takes, needs=needs)

    def loaded(self) -> str:
        """Why its files cannot be loaded; empty if they can, or if all its processes are busy with having done so."""
        try:
            process = self.pool.take(START_MS)
        except Unavailable as why:
            return str(why)
        if process is not None:
            self.pool.give(process, True)
        return ""

    def close(self) -> None:
        """End its idle processes."""
        self.pool.close()

    def call(
        self,
        handler: str,
        purpose: str,
        kwargs: Mapping[str, Any],
        idempotency_key: str,
        saga: str,
        step: int,
        attempt: int,
        deadline_ms: int,
        told: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """One run of the handler."""
        try:
            request = _request(
                handler,
                purpose,
                kwargs,
                function=self.function,
                idempotency_key=idempotency_key,
                saga=saga,
                step=step,
                attempt=attempt,
                deadline_ms=deadline_ms,
            )
        except Unavailable as why:
            return Outcome("unavailable", why=str(why))
        reply = self._ask(request, deadline_ms)
        outcome = reply if isinstance(reply, Outcome) else self._read(reply, purpose)
        changed = "" if outcome.outcome == "unavailable" else self._changed()
        return outcome._replace(note="; ".join(filter(None, (outcome.note, changed)))) if changed else outcome

    def _read(self, reply: dict[str, Any], purpose: str) -> Outcome:
        stderr = str(reply.pop("stderr", ""))
        if reply["outcome"] == "unavailable":
            return Outcome("unavailable", why=str(reply.get("why") or ""), stderr=stderr)
        if reply["outcome"] not in (*ANSWERS[purpose], "lost"):
            return Outcome("lost", why=f"it answered {reply['outcome']!r}, which is no answer", stderr=stderr)
        return _answered(reply, stderr)

    def _ask(self, request: dict[str, Any], deadline_ms: int, counted: bool = True) -> dict[str, Any] | Outcome:
        """The reply of a process, or what became of it. One that dies before it starts the handler is replaced once."""
        why = ""
        for _ in range(2):
            try:
                process = self.pool.take(deadline_ms, counted)
            except Unavailable as reason:
                return Outcome("unavailable", why=str(reason))
            if process is None:
                return Outcome("again", why=f"all {PROCESSES} host processes of {self.spec.name} are busy")
            kept = False
            try:
                reply, started = process.ask(request, deadline_ms)
                kept = not process.over and reply is not None
            finally:
                self.pool.give(process, kept, counted)
            stderr = process.child.stderr_text()
            if reply is not None:
                return reply | {"stderr": stderr}
            ended = process.died
            status = process.child.process.returncode
            why = _ending(-9 if status is None else status) if ended else f"no answer within {deadline_ms} ms"
            if started:
                killed = "the host process ended" if ended else "the host was killed"
                return Outcome("lost", why=f"{why}: {killed}", stderr=stderr)
            if not ended:
                return Outcome("again", why=f"the handler was not started within {deadline_ms} ms", stderr=stderr)
        return Outcome("unavailable", why=f"the host ends before it starts the handler: {why}")

    def _changed(self) -> str:
        if not self.digest:
            return ""
        file = (*self.spec.files, *(path for _, path in self.spec.expect))[0]
        now = _digest(file)
        if now == self.digest:
            return ""
        return f"{file} has changed since it was recorded (SHA-256 {self.digest[:12]} then, {now[:12]} now)"


class _Pool:
    """Processes of one spec, at most PROCESSES at once; an idle one is ended when the pool is next used."""

    def __init__(self, spec: PythonSpec) -> None:
        self.spec = spec
        self.slots = threading.BoundedSemaphore(PROCESSES)
        self.lock = threading.Lock()
        self.idle: list[_Process] = []
        self.asking = threading.Lock()
        self.known: dict[tuple[str, str], Known] = {}  # handlers that were found, as long as `stamp` holds
        self.stamp: list[tuple[int, int]] = []

    def take(self, deadline_ms: int, counted: bool = True) -> _Process | None:
        """A process for one call, None if all are busy for that long; a question is not counted. Raises Unavailable."""
        if counted and not self.slots.acquire(timeout=deadline_ms / 1000):
            return None
        try:
            return self._idle() or _Process(self.spec)
        except BaseException:
            if counted:
                self.slots.release()
            raise

    def _idle(self) -> _Process | None:
        with self.lock:
            here, self.idle = [p for p in self.idle if p.child.owner == os.getpid()], []
            now = time.monotonic()
            fresh = [p for p in here if now - p.child.idle_since < IDLE_S and p.usable(self.spec)]
            found = fresh.pop() if fresh else None
            self.idle = fresh
        for process in here:
            if process is not found and process not in fresh:
                process.child.kill()
        return found

    def give(self, process: _Process, kept: bool, counted: bool = True) -> None:
        """Back from a call. One that did not answer is killed, with all it started."""
        if kept:
            process.child.idle_since = time.monotonic()
            with self.lock:
                self.idle.append(process)
        else:
            process.child.kill()
        if counted:
            self.slots.release()

    def close(self) -> None:
        with self.lock:
            here, self.idle = self.idle, []
        for process in here:
            if process.child.owner == os.getpid():
                process.child.kill()


# ---- all hosts of a runner ------------------------------------------------------------------------------------------


class Checked(NamedTuple):
    """What `doctor --hosts` says of a host: its handlers, or why it does not start."""

    name: str
    handlers: tuple[str, ...]
    why: str


class Hosts:
    """Every place this runner may find a handler: what it imports, handlers.toml, then the recorded host."""

    def __init__(self, imports: Sequence[PythonSpec] = (), configured: Sequence[Spec] = ()) -> None:
        programs = [spec for spec in configured if isinstance(spec, ExecSpec)]
        pythons = [spec for spec in configured if isinstance(spec, PythonSpec)]
        self.programs = {spec.name: ExecHost(spec) for spec in programs}
        self.imports = [PythonHost(spec) for spec in imports]
        self.pythons = [PythonHost(spec) for spec in pythons]
        self.lock = threading.Lock()
        self.pools: dict[PythonSpec, _Pool] = {}

    def find(self, handler: str, recorded: Mapping[str, Any] | None = None) -> tuple[Host | None, Known]:
        """The host of a handler and what it says of it; else None, and every reason in `why`.

        Pass `recorded` only for a saga of this device: another's path is never run.
        """
        reasons = []
        for host in self._candidates(handler, recorded):
            known = host.knows(handler)
            if known.found:
                return host, known
            reasons.append(known.why)
        return None, Known(False, why="; ".join(reasons) or f"no host has {handler}, and none was recorded")

    def _candidates(self, handler: str, recorded: Mapping[str, Any] | None) -> Iterable[Host]:
        yield from self.imports
        if handler in self.programs:
            yield self.programs[handler]
        yield from self.pythons
        if recorded and {"interpreter", "file", "module", "function"} <= set(recorded):
            yield self.recorded(recorded)

    def recorded(self, host: Mapping[str, Any]) -> PythonHost:
        """The host an intent named; handlers of one file share its processes."""
        spec = recorded_spec(host)
        with self.lock:
            pool = self.pools.setdefault(spec, _Pool(spec))
        return PythonHost(spec, f"{host['module']}:{host['function']}", str(host.get("digest", "")), pool)

    def asks(self, tool: str, recorded: Iterable[Mapping[str, Any]] = ()) -> tuple[Host | None, Known]:
        """The host that has a reconciler for a tool, and what it says of it; else None, and every reason in `why`.

        recorded: hosts that were recorded with the effect, of this device only: a reconciler may lie in their files.
        """
        reasons = []
        for host in self._askers(recorded):
            known = host.knows(tool, "verify")
            if known.found:
                return host, known
            reasons.append(known.why)
        return None, Known(False, why="; ".join(reasons) or f"no host has a reconciler for {tool}")

    def _askers(self, recorded: Iterable[Mapping[str, Any]]) -> Iterable[Host]:
        yield from self.imports
        yield from (host for host in self.programs.values() if host.spec.verifies)
        yield from self.pythons
        seen = set()
        for one in recorded:
            if {"interpreter", "file", "module", "function"} <= set(one) and (spec := recorded_spec(one)) not in seen:
                seen.add(spec)
                yield self.recorded(one)

    def again(self, handler: str) -> str | None:
        """Why a handler configured here may be attempted twice ("" if it may not); None if none is configured."""
        known = self.find(handler)[1]
        return known.again if known.found else None

    def check(self) -> list[Checked]:
        """Start every host and look for every program."""
        found = []
        for python in (*self.imports, *self.pythons):
            try:
                process = python.pool.take(START_MS)
            except Unavailable as why:
                found.append(Checked(python.spec.name, (), str(why)))
                continue
            if process is not None:
                found.append(Checked(python.spec.name, process.handlers, ""))
                python.pool.give(process, True)
        return found + [Checked(name, (name,), _missing(host.spec)) for name, host in self.programs.items()]

    def close(self) -> None:
        """End every idle process."""
        for python in (*self.imports, *self.pythons):
            python.close()
        for pool in list(self.pools.values()):
            pool.close()


def _missing(spec: ExecSpec) -> str:
    import shutil

    try:
        env = environment(spec.env, spec.env_file)
    except Unavailable as why:
        return str(why)
    if spec.cwd and not os.path.isdir(spec.cwd):
        return f"its working folder {spec.cwd} is not there"
    program = spec.command[0]
    if os.path.dirname(program):
        program = os.path.join(spec.cwd, program)
    return "" if shutil.which(program, path=env.get("PATH")) else f"{spec.command[0]} is not found, or not executable"


def imported(targets: Sequence[str], interpreter: str = "") -> PythonSpec:
    """The host of `--import MODULE|FILE …`: this Python, or the first `python3` where this program is frozen."""
    import shutil

    if not interpreter:
        found = shutil.which("python3") or shutil.which("python") or "python3"
        interpreter = found if getattr(sys, "frozen", False) else sys.executable or found
    files = tuple(os.path.abspath(name) for name in targets if name.endswith(".py") or os.path.sep in name)
    modules = tuple(name for name in targets if not (name.endswith(".py") or os.path.sep in name))
    path = dict.fromkeys([*(os.path.dirname(file) for file in files), os.getcwd()])
    return PythonSpec("--import " + " ".join(targets), interpreter, files, modules, tuple(path), os.getcwd())


# ---- what an intent records -----------------------------------------------------------------------------------------

_SEEN: weakref.WeakKeyDictionary[Callable[..., Any], tuple[dict[str, Any] | None, str]] = weakref.WeakKeyDictionary()
_MAIN = ("__main__", "__mp_main__")


def recorded_host(fn: Callable[..., Any]) -> tuple[dict[str, Any] | None, str]:
    """Where a function can be found again after this process: (host, ""), or (None, the reason why not).

    Keys: interpreter, path (a `sys.path` entry, or ""), file, module, function, digest (SHA-256 of file), cwd, main.
    """
    try:
        host, reason = _SEEN[fn]
    except (KeyError, TypeError):  # not seen yet, or nothing that a weak reference holds
        host, reason = _look_for(fn)
    return (host | {"cwd": os.getcwd()} if host else None), reason


def _look_for(fn: Callable[..., Any]) -> tuple[dict[str, Any] | None, str]:
    import inspect
    import types

    target = inspect.unwrap(fn) if callable(fn) else fn
    if not isinstance(target, types.FunctionType):
        return None, f"it is a {type(fn).__name__}, not a function at the top level of a file"
    reason = _unreachable(target)
    found: tuple[dict[str, Any] | None, str] = (None, reason) if reason else (_host_of(target), "")
    if isinstance(fn, types.FunctionType) and "<" not in fn.__qualname__:  # a lambda or a closure is not seen again
        _SEEN[fn] = found
    return found


def recorded_spec(host: Mapping[str, Any]) -> PythonSpec:
    """The process a recorded host asks for; equal for all handlers of one file."""
    main = bool(host.get("main"))
    return PythonSpec(
        name=str(host["file"]),
        interpreter=str(host["interpreter"]),
        files=(str(host["file"]),) if main else (),
        modules=() if main else (str(host["module"]),),
        path=(str(host["path"]),) if host.get("path") else (),
        cwd=str(host.get("cwd", "")),
        expect=() if main else ((str(host["module"]), str(host["file"])),),
    )


def _unreachable(fn: Any) -> str:
    """Why a later process cannot find this function; empty if it can."""
    name: str = fn.__qualname__
    if getattr(sys, "frozen", False):
        return "this program is frozen and has no interpreter to name"
    if "<lambda>" in name:
        return "it is a lambda, which has no name to be found by"
    if "<locals>" in name:
        return f"it is defined inside a function ({name}), so nobody can import it"
    interpreter = os.path.basename(sys.executable or "").lower()
    if "python" not in interpreter and "pypy" not in interpreter:
        return f"this process runs in {sys.executable or 'an unnamed program'}, which is no Python interpreter"
    file = _file_of(fn)
    if not file:
        return "it was entered at a prompt or in a notebook, and lies in no file"
    if not file.endswith((".py", ".pyw")) or not os.path.isfile(file):
        return f"its file {file} is no Python source file"
    if fn.__module__ in _MAIN and not _guarded(file):
        return f'{file} has no `if __name__ == "__main__"` guard: importing it would run the agent again'
    return ""


def _file_of(fn: Any) -> str:
    module = sys.modules.get(fn.__module__ or "")
    file = getattr(module, "__file__", None)
    source = fn.__code__.co_filename
    if not file or source.startswith("<"):
        return ""
    if fn.__module__ in _MAIN and os.path.basename(source) != os.path.basename(file):
        return ""
    return os.path.abspath(str(file))


def _guarded(file: str) -> bool:
    import ast

    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.If) and _asks_for_main(node.test) for node in tree.body)


def _asks_for_main(test: Any) -> bool:
    import ast

    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    texts = {node.value for node in ast.walk(test) if isinstance(node, ast.Constant)}
    return "__name__" in names and "__main__" in texts


def _host_of(fn: Any) -> dict[str, Any]:
    file = _file_of(fn)
    module, path, main = fn.__module__, "", False
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if module in _MAIN and spec is not None and spec.name not in _MAIN:
        module = spec.name  # python -m package.module
    if module in _MAIN:
        main, module = True, Path(file).stem
        path = os.path.dirname(os.path.realpath(file))
    else:
        path = _root(file, module)
    return {
        "interpreter": sys.executable,
        "path": path,
        "file": file,
        "module": module,
        "function": fn.__qualname__,
        "digest": _digest(file),
        "main": main,
    }


def _root(file: str, module: str) -> str:
    """The folder from which a module is imported by its name; "" where the name does not follow the file."""
    parts = list(Path(file).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    names = module.split(".")
    if names[-1] == "__init__":
        names.pop()
    return str(Path(*parts[: -len(names)])) if parts[-len(names) :] == names else ""


_DIGESTS: dict[str, tuple[tuple[int, int, int], str]] = {}  # file -> what it looked like, and its digest then


def _digest(file: str) -> str:
    from hashlib import sha256

    try:
        seen = os.stat(file)
        look = (seen.st_mtime_ns, seen.st_size, seen.st_ino)
        if _DIGESTS.get(file, ((), ""))[0] != look:
            _DIGESTS[file] = (look, sha256(Path(file).read_bytes()).hexdigest())
        return _DIGESTS[file][1]
    except OSError:
        return ""
