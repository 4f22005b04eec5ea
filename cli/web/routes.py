"""Which path answers what: pages, the way in, questions about the log, and the few answers a person may give.

An error of ours leaves as `{"error": {"code", "message", "next"}}`, as on the command line; anything else that is
raised is a bug of ours and says no more than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...store.errors import AmendsError, BadValue, NotFound, Refused, YouErred
from . import views
from .ceremony import Ceremony
from .live import Live
from .security import Message, Receive, Rule, Send

if TYPE_CHECKING:
    from .server import Desk, File

T = TypeVar("T")

PAGES = ("/", "/inbox", "/approve/{item}", "/keys", "/sagas", "/sagas/{saga:path}")
USED = YouErred("This link was used, or is of an earlier run.", next="Run `amends ui` again.", code="not_in")
BUG = AmendsError("This is a bug of amends.", next="The terminal says more.", code="bug")
SEND_S = 20.0
"""Seconds that a watcher may leave a message unread."""


class Enter(msgspec.Struct, forbid_unknown_fields=True):
    link: str


class Vote(msgspec.Struct, forbid_unknown_fields=True):
    item: str
    digest: str
    verdict: str
    by: str = ""
    note: str = ""
    proof: dict[str, str] | None = None


class Wanted(msgspec.Struct, forbid_unknown_fields=True):
    person: str
    es256: bool = False
    besides: list[str] = []


class Made(msgspec.Struct, forbid_unknown_fields=True):
    answer: dict[str, str]
    challenge: str
    person: str
    roles: list[str]
    label: str = ""
    es256: bool = False


class Found(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[str]
    recovery: str
    es256: bool = False


class Add(msgspec.Struct, forbid_unknown_fields=True):
    key: str


class About(msgspec.Struct, forbid_unknown_fields=True):
    credential: str


class Revoke(About, forbid_unknown_fields=True):
    reason: str = ""


class Signed(msgspec.Struct, forbid_unknown_fields=True):
    event: str
    proofs: list[dict[str, str]]


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


def _ceremony(made: Ceremony) -> dict[str, tuple[type[Any], Callable[[Any], Any]]]:
    """Step of a ceremony -> what the page sends, and what answers it."""
    return {
        "options": (Wanted, lambda said: made.options(said.person, said.es256, said.besides)),
        "made": (
            Made,
            lambda said: made.made(said.answer, said.challenge, said.person, said.roles, said.label, said.es256),
        ),
        "recovery": (Nothing, lambda said: made.recovery_key()),
        "found": (Found, lambda said: made.found(said.keys, said.recovery, said.es256)),
        "add": (Add, lambda said: made.add(said.key)),
        "revoke": (Revoke, lambda said: made.revoke(said.credential, said.reason)),
        "release": (About, lambda said: made.release(said.credential)),
        "veto": (Nothing, lambda said: made.veto()),
        "missing": (Signed, lambda said: {"missing": made.missing(said.event, said.proofs)}),
        "submit": (Signed, lambda said: made.submit(said.event, said.proofs)),
    }


class Answers:
    """What each route answers."""

    def __init__(self, desk: Desk, rule: Rule, files: Mapping[str, File]) -> None:
        self.desk, self.rule, self.files = desk, rule, files
        self.ceremony = Ceremony(desk.kit, rule.origin)
        self.steps = _ceremony(self.ceremony)

    def _file(self, name: str) -> Response:
        found = self.files.get(name)
        if found is None:
            raise NotFound("There is no such file.")
        return Response(found.data, media_type=found.type)

    async def page(self, request: Request) -> Response:
        return self._file("index.html")

    async def door(self, request: Request) -> Response:
        return self._file("enter.html")

    async def static(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    async def enter(self, request: Request) -> Response:
        session = self.rule.access.enter((await said(request, Enter)).link)
        if session is None:
            return _json(_told(USED), 401)
        made = _json({"key": session.key})
        made.set_cookie(self.rule.cookie_name, session.cookie, path="/", httponly=True, samesite="strict")
        return made

    async def leave(self, request: Request) -> Response:
        self.rule.access.leave(request.scope["amends.session"].cookie)
        return _json({})

    async def inside(self, request: Request) -> Response:
        return _json(await self.desk.ask(views.inside, self.desk.kit))

    async def inbox(self, request: Request) -> Response:
        return _json(await self.desk.ask(views.inbox, self.desk.kit))

    async def review(self, request: Request) -> Response:
        return _json(await self.desk.ask(views.review, self.desk.kit, request.path_params["item"]))

    async def vote(self, request: Request) -> Response:
        it, ask, kit = await said(request, Vote), self.desk.ask, self.desk.kit
        return _json(await ask(views.vote, kit, it.item, it.digest, it.verdict, it.by, it.note, it.proof))

    async def keys(self, request: Request) -> Response:
        return _json(await self.desk.ask(self.ceremony.ring))

    async def step(self, request: Request) -> Response:
        if request.path_params["step"] not in self.steps:
            raise NotFound("There is no such step.")
        kind, act = self.steps[request.path_params["step"]]
        return _json(await self.desk.ask(act, await said(request, kind)))

    async def sagas(self, request: Request) -> Response:
        return _json(await self.desk.ask(views.sagas, self.desk.kit, _number(request, "limit", 50)))

    async def saga(self, request: Request) -> Response:
        return _json(await self.desk.ask(views.saga, self.desk.kit, request.path_params["saga"]))


ROUTES: tuple[tuple[str, str, Callable[[Answers, Request], Awaitable[Response]]], ...] = (
    ("GET", "/enter", Answers.door),
    ("GET", "/static/{name}", Answers.static),
    ("POST", "/api/enter", Answers.enter),
    ("POST", "/api/leave", Answers.leave),
    ("GET", "/api/inside", Answers.inside),
    ("GET", "/api/inbox", Answers.inbox),
    ("GET", "/api/review/{item}", Answers.review),
    ("POST", "/api/vote", Answers.vote),
    ("GET", "/api/keys", Answers.keys),
    ("POST", "/api/keys/{step}", Answers.step),
    ("GET", "/api/sagas", Answers.sagas),
    ("GET", "/api/sagas/{saga:path}", Answers.saga),
)
"""Method, path, and what answers it. Beside them: PAGES, which are one file, and /api/live."""


def application(desk: Desk, live: Live, rule: Rule, files: Mapping[str, File]) -> Starlette:
    """The routes, over one kit."""
    answers = Answers(desk, rule, files)
    routes = [
        *(Route(path, answers.page) for path in PAGES),
        Route("/api/live", Watching(live)),
        *(Route(path, partial(answer, answers), methods=[method]) for method, path, answer in ROUTES),
    ]
    return Starlette(
        routes=routes, exception_handlers={AmendsError: _refused, 404: _nothing, 405: _nothing, Exception: _bug}
    )


async def said(request: Request, kind: type[T]) -> T:
    """The body, as what is asked for. Raises BadValue."""
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadValue(f"This is not what the page sends ({error}).", code="bad_request") from None


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else default


# ---- answers ---------------------------------------------------------------------------------------------------------


def _json(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document, enc_hook=str), status, media_type="application/json")


def _told(error: AmendsError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message, "next": error.next}}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, AmendsError)
    statuses = {NotFound: 404, BadValue: 400, YouErred: 400, Refused: 409}
    status = next((statuses[kind] for kind in type(error).__mro__ if kind in statuses), 503)
    return _json(_told(error), status)


async def _nothing(request: Request, error: Exception) -> Response:
    return _json(_told(NotFound("There is no such page.", next="The inbox is at /.")), 404)


async def _bug(request: Request, error: Exception) -> Response:
    return _json(_told(BUG), 500)


# ---- live ------------------------------------------------------------------------------------------------------------


class _Deaf(Exception):
    """Who watches does not read."""


class Watching:
    """Server-sent events: `grown` with the size of the log, `trouble` with an error. Who does not read has to go.

    An error that is none of ours is told too, and goes on to whoever runs the server."""

    def __init__(self, live: Live) -> None:
        self.live = live

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_gone(receive))
        work = asyncio.create_task(self._tell(send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)
        trouble = None if work.cancelled() else work.exception()
        if trouble is not None and not isinstance(trouble, _Deaf):
            raise trouble

    async def _tell(self, send: Send) -> None:
        began = False

        async def put(text: str, more: bool = True) -> None:
            nonlocal began
            if not began:
                began = True
                head = [(b"content-type", b"text/event-stream; charset=utf-8")]
                await send({"type": "http.response.start", "status": 200, "headers": head})
            try:
                async with asyncio.timeout(SEND_S):
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
            except TimeoutError:
                raise _Deaf from None

        async def trouble(error: AmendsError) -> None:
            await put(f"event: trouble\ndata: {msgspec.json.encode(_told(error)['error']).decode()}\n\n")

        try:
            await put(":\n\n")
            async for size in self.live.sizes():
                await put(":\n\n" if size is None else f'event: grown\ndata: {{"size":{size}}}\n\n')
        except AmendsError as error:
            await trouble(error)
        except _Deaf:
            raise
        except Exception:
            await trouble(BUG)
            await put("", more=False)
            raise
        await put("", more=False)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
