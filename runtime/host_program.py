"""Your handlers run after a crash in your own interpreter, with your packages, in a process of their own.

This file is that process: the daemon hands its *text* to the recorded interpreter, which may be any Python from 3.8
on and need not have amends. So it uses the standard library only, imports nothing of ours, and is spoken to by JSON
lines alone; nothing but their shape couples the two versions.

    daemon → {"v":1,"files":[…],"modules":[…],"path":[…]}                      what to load, once
    host   → {"v":1,"hello":true,"python":[3,11,7],"handlers":["stripe.refund",…]}
    daemon → {"v":1,"id":1,"handler":"stripe.refund","purpose":"undo","kwargs":{…},"idempotency_key":"…",…}
    host   → {"id":1,"started":true}            from here on the effect may have happened
    host   → {"id":1,"outcome":"done","result":{…},"note":"","why":""}

A handler's `print` and `input` do not reach the protocol: it lives on copies of the first two descriptors, and the
originals point at standard error and at nothing. When the daemon dies, its end of the pipe closes and a handler in
flight is ended with its process: its answer would reach nobody, and whoever takes over asks again under the same key.

Why not import handlers into the daemon: a segfault, a hang or `sys.exit` of theirs would be the daemon's own.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import faulthandler
import importlib
import importlib.util
import inspect
import json
import math
import os
import queue
import signal
import sys
import threading
import traceback
import types
import uuid
from collections.abc import Callable
from typing import Any, BinaryIO

VERSION = 1
RESULT_MAX = 256 * 1024
TEXT_MAX = 2000
INTEGER_MAX = 1 << 53
DEPTH_MAX = 64
ANSWERS = {
    "undo": ("done", "already_done", "failed", "human"),
    "confirm": ("done", "already_done", "failed", "human"),
    "probe": ("present", "absent", "cannot_tell"),
    "verify": ("present", "absent", "cannot_tell"),
}
ASKS = ("probe", "verify")


# ---- values: the same tags as in the log (values.py) ----------------------------------------------------------------


class Record(types.SimpleNamespace):
    """A stored dataclass, Struct or model: `record.amount`, `record["amount"]`, `vars(record)`."""

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __contains__(self, name: object) -> bool:
        return name in vars(self)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(vars(self).items()))


def untag(raw: Any) -> Any:
    if isinstance(raw, list):
        return [untag(item) for item in raw]
    if not isinstance(raw, dict):
        return raw
    if "$" not in raw:
        return fields(raw)
    return UNTAG[raw["$"]](raw)


def fields(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: untag(item) for key, item in raw.items()}


def stored_secret(raw: Any) -> Any:
    raise ValueError("a secret was never stored; read it from the environment where it is used")


UNTAG: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda raw: base64.b64decode(raw["v"]),
    "date": lambda raw: datetime.date.fromisoformat(raw["v"]),
    "datetime": lambda raw: datetime.datetime.fromisoformat(raw["v"]).replace(fold=raw.get("fold", 0)),
    "decimal": lambda raw: decimal.Decimal(raw["v"]),
    "dict": lambda raw: fields(raw["v"]),
    "int": lambda raw: int(raw["v"]),
    "record": lambda raw: Record(**fields(raw["v"])),
    "secret": stored_secret,
    "set": lambda raw: {untag(item) for item in raw["v"]},
    "tuple": lambda raw: tuple(untag(item) for item in raw["v"]),
    "uuid": lambda raw: uuid.UUID(raw["v"]),
}


class Unstorable(Exception):
    """A result that the log cannot hold. The effect has happened all the same."""


def tag(value: Any, depth: int = DEPTH_MAX) -> Any:
    if depth < 0:
        raise Unstorable(f"nests more than {DEPTH_MAX} deep")
    kind = type(value)
    if kind in TAG:
        return TAG[kind](value, depth - 1)
    found = fields_of(value)
    if found is None:
        raise Unstorable(f"is a {kind.__module__}.{kind.__qualname__}")
    return {"$": "record", "t": kind.__name__, "v": tag_fields(found, depth - 1)}


def fields_of(value: Any) -> dict[str, Any] | None:
    kind = type(value)
    if kind is Record:
        return dict(vars(value))
    if dataclasses.is_dataclass(kind):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}
    for names in ("_fields", "__struct_fields__", "model_fields"):
        found = getattr(kind, names, None)
        if isinstance(found, (tuple, dict)):
            return {name: getattr(value, name) for name in found}
    return None


def tag_text(value: str, depth: int) -> str:
    value.encode()  # a lone surrogate is no text
    return value


def tag_int(value: int, depth: int) -> Any:
    return value if -INTEGER_MAX <= value <= INTEGER_MAX else {"$": "int", "v": str(value)}


def tag_number(value: Any, depth: int) -> Any:
    if not (math.isfinite(value) if isinstance(value, float) else value.is_finite()):
        raise Unstorable("is not a finite number")
    return value if isinstance(value, float) else {"$": "decimal", "v": str(value)}


def tag_datetime(value: datetime.datetime, depth: int) -> Any:
    tagged = {"$": "datetime", "v": value.isoformat()}
    return dict(tagged, fold=1) if value.fold else tagged


def tag_list(value: Any, depth: int) -> list[Any]:
    return [tag(item, depth) for item in value]


def tag_fields(value: dict[str, Any], depth: int) -> dict[str, Any]:
    if not all(type(key) is str for key in value):
        raise Unstorable("has a key that is not text")
    return {tag_text(key, depth): tag(item, depth) for key, item in value.items()}


def tag_dict(value: dict[str, Any], depth: int) -> dict[str, Any]:
    inner = tag_fields(value, depth)
    return {"$": "dict", "v": inner} if "$" in inner else inner


TAG: dict[type, Callable[[Any, int], Any]] = {
    type(None): lambda value, depth: value,
    bool: lambda value, depth: value,
    str: tag_text,
    int: tag_int,
    float: tag_number,
    decimal.Decimal: tag_number,
    list: tag_list,
    dict: tag_dict,
    tuple: lambda value, depth: {"$": "tuple", "v": tag_list(value, depth)},
    set: lambda value, depth: {"$": "set", "v": sorted(tag_list(value, depth), key=json.dumps)},
    bytes: lambda value, depth: {"$": "bytes", "v": base64.b64encode(value).decode()},
    datetime.datetime: tag_datetime,
    datetime.date: lambda value, depth: {"$": "date", "v": value.isoformat()},
    uuid.UUID: lambda value, depth: {"$": "uuid", "v": str(value)},
}


def result_of(value: Any) -> tuple[Any, str]:
    """The tagged result and an empty note, or None and why it could not be kept."""
    try:
        tagged = tag(value)
        size = len(json.dumps(tagged, allow_nan=False))
    except Exception as error:  # whatever reading it raises: the effect has happened, and that is what must be said
        return None, f"its result could not be kept: it {str(error) or type(error).__name__}"
    if size > RESULT_MAX:
        return None, f"its result could not be kept: it has {size} bytes, over the cap of {RESULT_MAX}"
    return tagged, ""


# ---- finding a handler ----------------------------------------------------------------------------------------------


class Unavailable(Exception):
    """No such handler here, or it does not load: nothing has been attempted."""


def load(config: dict[str, Any]) -> dict[str, Any]:
    """Import what the daemon names. A file's module is never called `__main__`, so its guarded part does not run."""
    sys.path[:0] = [entry for entry in config.get("path", ()) if entry not in sys.path]
    loaded: dict[str, Any] = {}
    for name in config.get("modules", ()):
        loaded[name] = importlib.import_module(name)
    for path in config.get("files", ()):
        name = module_name(path)
        if name not in loaded:
            loaded[name] = load_file(name, path)
    expected = config.get("expect", {})
    for name, path in expected.items():
        found = getattr(loaded.get(name), "__file__", None)
        if not found or os.path.realpath(found) != os.path.realpath(path):
            raise ImportError(f"module {name} was {path} when it was recorded, and is {found} now")
    return loaded


def module_name(path: str) -> str:
    stem = os.path.splitext(os.path.basename(path))[0]
    return stem if stem.isidentifier() and stem not in sys.modules else "amends_handlers_" + stem


def load_file(name: str, path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: it may import itself by way of others
    spec.loader.exec_module(module)
    return module


def registry() -> dict[str, Any]:
    """The compensators registered with amends, if the loaded files use it."""
    tools = sys.modules.get("amends.runtime.tools")
    return tools.registered() if tools is not None else {}


def reconciler_of(tool: str) -> Callable[..., Any]:
    """What was registered to ask about a tool. Never a function that merely has its name: that may be the tool."""
    tools = sys.modules.get("amends.runtime.tools")
    known = tools.reconcilers() if tools is not None else {}
    if tool not in known:
        raise Unavailable(f"no reconciler for {tool} here; there are: {', '.join(sorted(known)[:20]) or 'none'}")
    found: Callable[..., Any] = known[tool]
    return found


def names(loaded: dict[str, Any]) -> list[str]:
    public = [
        f"{module}:{name}"
        for module in loaded
        for name, value in vars(loaded[module]).items()
        if inspect.isfunction(value) and not name.startswith("_") and value.__module__ == module
    ]
    return sorted(set(registry()) | set(public))


def find(loaded: dict[str, Any], name: str, function: str) -> tuple[Callable[..., Any], bool]:
    """(callable, idempotent): the registered name, else the recorded function, else a function of that name."""
    handler = registry().get(name)
    if handler is not None:
        return handler.fn, bool(getattr(handler, "idempotent", False))
    for wanted in (function, name):
        module, colon, path = (wanted or "").rpartition(":")
        places = ([loaded[module]] if module in loaded else []) if colon else list(loaded.values())
        if not places and len(loaded) == 1 and wanted is function:
            places = list(loaded.values())  # the recorded file, under the name it has here
        for place in places:
            found = walk(place, path)
            if found is not None:
                return found, False
    here = ", ".join(names(loaded)[:20]) or "none"
    raise Unavailable(f"no handler {name} here; there are: {here}")


def walk(place: Any, path: str) -> Any:
    """`Class.method` or `function` in a module that was asked for. Not through it into modules it imports."""
    for part in path.split("."):
        if not part or part.startswith("_") or not isinstance(place, (types.ModuleType, type)):
            return None
        place = getattr(place, part, None)
        if isinstance(place, types.ModuleType):
            return None
    if isinstance(place, (type, types.BuiltinFunctionType)) or not callable(place):
        return None
    return place


def takes_key(function: Callable[..., Any]) -> bool:
    """Whether a callable names `idempotency_key`; **kwargs does not count."""
    try:
        parameter = inspect.signature(function).parameters.get("idempotency_key")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def parameters(function: Callable[..., Any]) -> tuple[list[str], list[str], bool]:
    """(names that can be passed, those without a default, whether it takes any other name)."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [], [], True
    named = [one for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    needed = [one.name for one in named if one.default is one.empty]
    return [one.name for one in named], needed, any(one.kind is one.VAR_KEYWORD for one in found)


# ---- running it -----------------------------------------------------------------------------------------------------


class Host:
    """Answers one message at a time."""

    def __init__(self, loaded: dict[str, Any], say: Callable[..., None]) -> None:
        self.loaded, self.say = loaded, say
        self.loop: Any = None
        self.busy = False

    def answer(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        try:
            name, function = message["handler"], message.get("function", "")
            if "verify" in (message["purpose"], message.get("of")):
                target, idempotent = reconciler_of(name), False
            else:
                target, idempotent = find(self.loaded, name, function)
            if message["purpose"] == "describe":
                takes, needs, any_name = parameters(target)
                about = {"takes": takes, "needs": needs, "any": any_name}
                self.say(id=number, outcome="known", keyed=takes_key(target), idempotent=idempotent, **about)
                return
            kwargs = {key: untag(value) for key, value in message["kwargs"].items()}
        except Exception as error:  # before the handler ran: this is the one kind of answer that is no attempt
            self.say(id=number, outcome="unavailable", why=said(error))
            return
        if takes_key(target) and "idempotency_key" not in kwargs and message.get("idempotency_key"):
            kwargs["idempotency_key"] = message["idempotency_key"]
        self.say(id=number, started=True)
        pid = os.getpid()
        reply = self.run(target, kwargs, message["purpose"])
        if os.getpid() != pid:
            os._exit(0)  # a fork that came back from the handler is not the one that is asked
        for stream in (sys.stdout, sys.stderr):
            flush(stream)
        self.say(id=number, **reply)

    def run(self, target: Callable[..., Any], kwargs: dict[str, Any], purpose: str) -> dict[str, Any]:
        try:
            returned = self.call(target, kwargs)
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a handler are its failure, not our end
            complain()
            return {"outcome": raised(error, purpose), "why": said(error)}
        return read_answer(returned, purpose)

    def call(self, target: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        if "asyncio" in sys.modules:
            self.own_loop()
        returned = target(**kwargs)
        if inspect.isawaitable(returned):
            loop = (
                returned.get_loop() if hasattr(returned, "get_loop") else self.own_loop()
            )  # a task has chosen its own
            returned = loop.run_until_complete(awaited(returned))
        return returned

    def own_loop(self) -> Any:
        """One loop for all calls: a client made in one is still good in the next."""
        import asyncio  # 20 ms that a host of plain functions need not spend

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        return self.loop


async def awaited(awaitable: Any) -> Any:
    return await awaitable


def read_answer(returned: Any, purpose: str) -> dict[str, Any]:
    outcome = getattr(returned, "amends_outcome", None)
    if outcome is None and purpose in ASKS and isinstance(returned, str):
        outcome = returned  # for handlers in an interpreter without amends
    if outcome is None and purpose in ("undo", "confirm"):
        result, note = result_of(returned)
        return {"outcome": "done", "result": result, "note": note}
    if outcome not in ANSWERS.get(purpose, ()):
        name = type(returned).__name__
        if purpose in ASKS:
            return {"outcome": "cannot_tell", "why": f"it answered {name}, not PRESENT, ABSENT or CANNOT_TELL"}
        return {"outcome": "failed", "why": f"it answered {outcome!r:.40}, which is no answer to {purpose}"}
    result, unkept = result_of(getattr(returned, "result", None))
    note = "; ".join(part for part in (printable(str(getattr(returned, "note", "") or "")), unkept) if part)
    reply = {"outcome": outcome, "result": result, "note": note}
    differs = getattr(returned, "differs", "")
    return dict(reply, differs=printable(str(differs))) if differs and purpose == "verify" else reply


def said(error: BaseException) -> str:
    """An exception as one text, whatever its `__str__` does."""
    try:
        text = str(error)
    except Exception as worse:
        text = f"its text cannot be had ({type(worse).__name__})"
    return printable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def printable(text: str) -> str:
    return text[:TEXT_MAX].encode(errors="replace").decode()


def complain() -> None:
    """The traceback, on descriptor 2 itself: a handler may have closed or replaced `sys.stderr`."""
    try:
        os.write(2, printable_traceback())
    except OSError:
        return  # nobody is to read it; the outcome says what happened


def printable_traceback() -> bytes:
    return traceback.format_exc().encode(errors="replace")


def raised(error: BaseException, purpose: str) -> str:
    """What an exception of a handler means: it may leave open whether its effect happened."""
    if purpose in ("undo", "confirm"):
        return "lost" if says_nothing(error) else "failed"
    return "cannot_tell" if purpose in ASKS else "failed"


KNOWN_OS_ERRORS = (ConnectionRefusedError, FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError,
                   IsADirectoryError)  # fmt: skip
UNSURE_NAMES = ("timeout", "connectionerror", "remoteprotocolerror", "readerror", "writeerror", "networkerror",
                "incompleteread", "disconnected")  # fmt: skip


def says_nothing(error: BaseException) -> bool:
    """The same rule as for a live saga's handlers (perform.py): broken connections and 5xx answers say nothing."""
    if isinstance(error, (TimeoutError, EOFError)) or not isinstance(error, Exception):
        return True
    status = status_of(error)
    if status is not None:
        return status >= 500 or status == 408
    inner = getattr(error, "reason", None)
    if isinstance(inner, OSError):
        return says_nothing(inner)
    if isinstance(error, KNOWN_OS_ERRORS):
        return False
    names = " ".join(kind.__name__ for kind in type(error).__mro__).lower()
    if "connecterror" in names or "connecttimeout" in names:
        return False
    return isinstance(error, OSError) or any(name in names for name in UNSURE_NAMES)


def status_of(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    for place, name in ((error, "code"), (error, "status"), (response, "status_code")):
        value = getattr(place, name, None)
        if type(value) is int and 100 <= value < 600:
            return value
    return None


def flush(stream: Any) -> None:
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):
        return  # a handler closed or replaced it: what it printed is not worth an outcome


def speak(out: BinaryIO) -> Callable[..., None]:
    """A function that writes one JSON line, whole."""

    def say(**message: Any) -> None:
        try:
            out.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            out.flush()
        except BrokenPipeError:
            leave()

    return say


def listen(incoming: BinaryIO, jobs: queue.SimpleQueue[bytes | None], host: Host) -> None:
    """Reader thread: lines to the queue; the daemon's death ends a handler in flight."""
    for line in incoming:
        jobs.put(line)
    jobs.put(None)
    if host.busy:
        leave()


def leave() -> None:
    """End this process and what its handlers have started, if the group is our own."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


def main(incoming: BinaryIO) -> None:
    """Load, say hello, answer until there is nobody to answer. `incoming` is a copy of standard input."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.environ["AMENDS_HANDLER_HOST"] = "1"
    faulthandler.enable()
    say = speak(out)
    try:
        loaded = load(json.loads(incoming.readline()))
    except BaseException as error:
        complain()
        say(v=VERSION, hello=False, why=said(error))
        return
    say(v=VERSION, hello=True, python=list(sys.version_info[:3]), handlers=names(loaded)[:1000])
    host = Host(loaded, say)
    jobs: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(incoming, jobs, host), daemon=True).start()
    while True:
        line = jobs.get()
        if line is None:
            return
        host.busy = True
        host.answer(json.loads(line))
        host.busy = False
