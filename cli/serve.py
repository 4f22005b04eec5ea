"""The local page: `amends ui` serves approvals, keys and sagas to a browser on this machine, and to nobody else.

One server per home. Whoever calls it again gets a fresh link into the one that runs: the port and the secret of the run
lie in the home's run folder, in a file that the server keeps locked, so that a dead one's is known to be dead. Whoever
takes the lock empties the file first: what a dead run left there is never handed out as the living one's.

The link is what lets a browser in, and it works once. It passes through the command line of the browser, which other
users of the machine may be able to read; used twice, it lets neither of them stay. `--no-open` only prints it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ..runtime.config_file import PORT, port_of
from ..store import driver
from ..store.errors import TheyErred, YouErred
from . import ui
from .device import acting, existing
from .web.access import Access, link_to, random_text
from .web.security import HOST

if TYPE_CHECKING:
    from .web.server import Server

NEEDS = ("starlette", "uvicorn", "anyio", "h11")


class Run(msgspec.Struct):
    """What a running server leaves for the next call: where it listens, and what its links are made with."""

    port: int
    secret: str


@click.command(cls=ui.Verb, name="ui")
@click.option("--port", type=click.IntRange(1, 65535), metavar="N", help=f"Instead of config.toml's, or {PORT}.")
@click.option("--no-open", is_flag=True, help="Print the link, and open no browser.")
def page(port: int | None, no_open: bool) -> None:
    """Serve the local page to this machine's browser until interrupted: inbox, approvals, keys, sagas."""
    show(port=port, no_open=no_open)


def show(at: str = "/", *, port: int | None = None, no_open: bool = False) -> None:
    """The same, beginning at a page of it: `/approve/ITEM`, `/keys`. Where a server runs already, a link into that."""
    web = _web()
    home = existing()
    with _held(home.run / "ui.lock") as (fd, other):
        if other is not None:
            return _said(_link_into(other, at), other.port, no_open, again=True)
        secret = random_text(32)
        sockets = web.listen(port or port_of(home.config))
        with acting() as kit:
            server = web.Server(kit, sockets, Access(secret))
            _write(fd, Run(server.port, secret))
            _until_stopped(server, lambda: _said(server.link(at), server.port, no_open))
    return None


def _web() -> Any:
    """The server's module. Raises YouErred where its libraries are not installed."""
    try:
        from .web import server
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in NEEDS:
            raise
        raise YouErred(
            "The page needs starlette and uvicorn, which are not installed.",
            next="Run `pip install 'amends[ui]'`; the single-file executable has them inside.",
            code="extra_missing",
        ) from None
    return server


# ---- one per home ----------------------------------------------------------------------------------------------------


@contextmanager
def _held(path: Path) -> Iterator[tuple[int, Run | None]]:
    """The lock of the server of this home, or what the one that has it left there."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fd = driver.open_known(path, os.O_RDWR | os.O_CREAT)
    try:
        other = None if driver.try_lock(fd) else _read(path)
        if other is None:
            os.truncate(fd, 0)
        yield fd, other
    finally:
        driver.close_known(fd)


def _write(fd: int, run: Run) -> None:
    os.lseek(fd, 0, os.SEEK_SET)
    os.truncate(fd, 0)
    os.write(fd, msgspec.json.encode(run))


def _read(path: Path) -> Run:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Run)
    except (msgspec.ValidationError, msgspec.DecodeError):
        raise TheyErred(
            "Another `amends ui` of this home is about to start.", next="Call again in a moment.", code="starting"
        ) from None


def _link_into(run: Run, at: str) -> str:
    """A fresh link into the server that runs."""
    return link_to(f"http://{HOST}:{run.port}", Access(run.secret).link(), at)


# ---- until it is stopped ---------------------------------------------------------------------------------------------


def _said(link: str, port: int, no_open: bool, *, again: bool = False) -> None:
    if ui.session().as_json:
        ui.emit({"link": link, "port": port, "running": again})
    else:
        ui.say("The page runs already. " if again else "", "Open this link; it works once:")
        ui.say("    ", ui.Word(link, "bold"))
        if not again:
            ui.say("Another `amends ui` prints another one. Ctrl-C ends it.")
    ui.finish()
    if not no_open:
        import webbrowser

        webbrowser.open(link)


def _until_stopped(server: Server, tell: Any) -> None:
    """Serve on a thread of its own, so that a signal is heard at once; `tell` is called when it listens."""
    trouble: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            server.serve()
        except BaseException as error:  # whatever it is, it is this process's end, and said on the main thread
            trouble.append(error)
        finally:
            server.ready.set()
            ended.set()

    before = {number: signal.signal(number, lambda *_: server.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        threading.Thread(target=work, name="amends-ui", daemon=True).start()
        server.ready.wait()
        if not trouble:
            tell()
        while not ended.wait(1.0):  # a signal may strike on another thread, and is heard when this one wakes
            continue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if trouble:
        raise trouble[0]
