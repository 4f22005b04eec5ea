"""The page of this device: served to this machine alone, over the same kit that an agent has.

One thread asks the kit, one question after the other, so that a page never sees half a fact; the event loop only moves
bytes. The files of the page are read once, when the server starts. The server listens on 127.0.0.1 and, where the
machine has it, on ::1: a browser that looks `amends.localhost` up may try either, and on the one that we do not hold
another program could answer in our name.

Why uvicorn's own waiting is replaced: it wakes ten times a second to look at a clock that this page does not show.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...runtime.kit import AgentKit
from ...store.errors import TheyErred
from .. import ui
from .access import Access, link_to
from .live import Live
from .routes import application
from .security import Guard, Rule

P = ParamSpec("P")
R = TypeVar("R")

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONNECTIONS = 128
LAST_S = 2
"""Seconds that an answer under way gets once the server is asked to stop."""


class File(NamedTuple):
    """A file of the page."""

    type: str
    data: bytes


def static_files() -> Mapping[str, File]:
    """The files of the page, by name."""
    return {path.name: File(TYPES[path.suffix], path.read_bytes()) for path in STATIC.iterdir() if path.suffix in TYPES}


class Desk:
    """The one thread that asks the kit."""

    def __init__(self, kit: AgentKit) -> None:
        self.kit = kit
        self._thread = ThreadPoolExecutor(1, "amends-page")

    async def ask(self, question: Callable[P, R], *args: P.args, **more: P.kwargs) -> R:
        """Put a question to the kit, on its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: question(*args, **more))

    async def grown(self) -> int:
        """The size of the log now."""

        def look() -> int:
            self.kit.log.refresh()
            return self.kit.log.size

        return await self.ask(look)

    def close(self) -> None:
        self._thread.shutdown()


class _Trouble(logging.Handler):
    """What went wrong inside, in one line; where it went wrong only under AMENDS_DEBUG=1."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        ui.warn(f"this is a bug of amends: {type(error).__name__}: {error}")
        if os.environ.get("AMENDS_DEBUG") == "1":
            ui.put("".join(traceback.format_exception(error)), err=True)


class _Uvicorn(uvicorn.Server):
    """Sleeps until it is asked to stop."""

    def __init__(self, config: uvicorn.Config, live: Live) -> None:
        super().__init__(config)
        self.live = live
        self.asked = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.asked.wait()
        self.live.end()


class Server:
    """A server on a port of its own; `serve` blocks until `stop`, which any thread may call."""

    def __init__(self, kit: AgentKit, sockets: list[socket.socket], access: Access) -> None:
        self.port: int = sockets[0].getsockname()[1]
        self.rule = Rule(self.port, access)
        self.ready = threading.Event()
        self._sockets, self._desk = sockets, Desk(kit)
        self._stop: Callable[[], object] = lambda: None
        self._stopped = False

    @property
    def origin(self) -> str:
        return self.rule.origin

    def link(self, at: str = "/") -> str:
        """A link that lets a browser in, once, and leads to a page."""
        return link_to(self.origin, self.rule.access.link(), at)

    def serve(self) -> None:
        """Answer until stopped."""
        try:
            asyncio.run(self._serve())
        finally:
            self._desk.close()

    async def _serve(self) -> None:
        logger = logging.getLogger("uvicorn.error")
        logger.handlers, logger.propagate = [_Trouble(logging.ERROR)], False
        files = static_files()
        live = Live(self._desk.grown)
        app = Guard(application(self._desk, live, self.rule, files), self.rule, files["enter.html"].data)
        config = uvicorn.Config(
            app, http=H11Protocol, ws="none", lifespan="off", interface="asgi3", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, date_header=False, limit_concurrency=CONNECTIONS,
            h11_max_incomplete_event_size=16 * 1024, timeout_graceful_shutdown=LAST_S,
        )  # fmt: skip
        inner = _Uvicorn(config, live)
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(inner.asked.set)
        if self._stopped:
            inner.asked.set()
        self.ready.set()
        await inner.serve(self._sockets)

    def stop(self) -> None:
        """Let what is under way end, then stop."""
        self._stopped = True
        self._stop()


def listen(port: int) -> list[socket.socket]:
    """The sockets of this machine alone. Port 0: one that is free. Raises TheyErred (`port_taken`)."""
    first = _bound(socket.AF_INET, "127.0.0.1", port)
    try:
        return [first, _bound(socket.AF_INET6, "::1", first.getsockname()[1])]
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # no IPv6 here: nobody else can listen there
            return [first]
        first.close()
        raise _taken(port) from error
    except TheyErred:
        first.close()
        raise


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, port))
        made.listen(64)
        made.setblocking(False)
    except OSError as error:
        made.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise _taken(port) from error
        raise
    return made


def _taken(port: int) -> TheyErred:
    return TheyErred(
        f"Port {port} of this machine is taken by another program.",
        next="End that one, or choose another port: --port N, or `port` under [ui] in config.toml. Keep to one: "
        "passkeys are bound to the address of the page.",
        code="port_taken",
    )
