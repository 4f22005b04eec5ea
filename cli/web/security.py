"""What reaches the page was sent by the page, from this machine, by whoever came in; everything else is turned away.

`turned_away` is the rule: a table of checks over one request, in order, the first that objects answers. The host name
must be ours to the letter (a name that an attacker points at 127.0.0.1 is not ours), whatever carries an origin must
carry ours, a question needs cookie and key, and an answer is a small JSON document. `Guard` puts the rule around an
application, reads the body up to its bound and no further, and puts the same headers on everything that leaves.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any, NamedTuple

from .access import Access, Session

HOST = "amends.localhost"
KEY_HEADER = "x-amends-key"
BODY_BYTES = 64 * 1024
"""An answer is a signature and a few words."""
BODY_S = 10.0
"""Seconds that a body may take to arrive."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "publickey-credentials-get=(self), publickey-credentials-create=(self)",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""On everything that leaves. No inline script, no foreign resource, no frame, nothing kept."""

DOCUMENT, DOOR, OPEN, ENTRY, API = "document", "door", "open", "entry", "api"
"""What is asked for: a page (cookie) · the page for who is not in yet · a file of the page's own, without any data ·
the way in (a link) · a question or an answer (cookie and key)."""


class Asked(NamedTuple):
    """What of a request decides. headers: lower-case names, each with its values as often as it came."""

    method: str
    path: str
    headers: Mapping[str, tuple[str, ...]]

    def one(self, name: str) -> str | None:
        """The only value of a header; None where it is missing, empty where it came twice."""
        values = self.headers.get(name, ())
        return None if not values else values[0] if len(values) == 1 else ""


class Turned(NamedTuple):
    """Why not."""

    status: int
    code: str
    message: str
    next: str


_PLACES = {"/enter": DOOR, "/api/enter": ENTRY}


def kind_of(path: str) -> str:
    if path in _PLACES:
        return _PLACES[path]
    if path.startswith("/static/"):
        return OPEN
    return API if path.startswith("/api/") else DOCUMENT


class Rule:
    """The rule for one port and those who came in."""

    def __init__(self, port: int, access: Access) -> None:
        self.host = HOST if port == 80 else f"{HOST}:{port}"
        self.origin = f"http://{self.host}"
        self.cookie_name = f"amends-{port}"
        self.access = access

    def session(self, asked: Asked) -> Session | None:
        """The session that the request's cookie names."""
        try:
            cookies = SimpleCookie("; ".join(asked.headers.get("cookie", ())))
        except CookieError:
            return None
        found = cookies.get(self.cookie_name)
        return self.access.session(found.value) if found else None

    def turned_away(self, asked: Asked) -> Turned | None:
        """The first objection, None if there is none."""
        for check in CHECKS:
            turned = check(self, asked)
            if turned is not None:
                return turned
        return None


def _host(rule: Rule, asked: Asked) -> Turned | None:
    if asked.one("host") == rule.host:
        return None
    return Turned(421, "wrong_host", "This is not the host of the page.", f"Open {rule.origin} instead.")


def _method(rule: Rule, asked: Asked) -> Turned | None:
    if asked.method in ("GET", "HEAD") or (asked.method == "POST" and asked.path.startswith("/api/")):
        return None
    return Turned(405, "wrong_method", f"{asked.method[:16]} is not answered here.", "")


def _origin(rule: Rule, asked: Asked) -> Turned | None:
    """Whatever carries an origin carries ours, and an answer always carries one."""
    said = asked.one("origin")
    if said == rule.origin or (said is None and asked.method != "POST"):
        return None
    return Turned(403, "wrong_origin", "This was not sent by the page.", f"Open {rule.origin} itself.")


def _site(rule: Rule, asked: Asked) -> Turned | None:
    """What the browser says of where a request began. A link from elsewhere may open a page, and nothing more."""
    said = asked.one("sec-fetch-site")
    if said in (None, "same-origin") or kind_of(asked.path) in (DOCUMENT, DOOR):
        return None
    if said == "none" and kind_of(asked.path) == OPEN:  # a person who looks at the file itself
        return None
    return Turned(403, "wrong_origin", "This was not sent by the page.", f"Open {rule.origin} itself.")


def _known(rule: Rule, asked: Asked) -> Turned | None:
    if kind_of(asked.path) in (DOOR, OPEN, ENTRY):
        return None
    session = rule.session(asked)
    key = asked.one(KEY_HEADER) or ""
    if session and (kind_of(asked.path) == DOCUMENT or hmac.compare_digest(session.key.encode(), key.encode())):
        return None
    return Turned(401, "not_in", "Nobody has come in here.", "Run `amends ui` again and open the link that it prints.")


def _type(rule: Rule, asked: Asked) -> Turned | None:
    if asked.method != "POST" or asked.one("content-type") == "application/json":
        return None
    return Turned(415, "wrong_type", "An answer is a JSON document.", "")


def _length(rule: Rule, asked: Asked) -> Turned | None:
    said = asked.one("content-length")
    if said is None or (said.isdecimal() and int(said[:12]) <= BODY_BYTES):
        return None
    return _too_large()


def _too_large() -> Turned:
    return Turned(413, "too_large", f"An answer holds {BODY_BYTES // 1024} KiB at most.", "")


CHECKS: tuple[Callable[[Rule, Asked], Turned | None], ...] = (_host, _method, _origin, _site, _known, _type, _length)

# ---- around an application -------------------------------------------------------------------------------------------

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class Guard:
    """An ASGI application that lets through what the rule lets through. door: the page for who has not come in."""

    def __init__(self, app: Application, rule: Rule, door: bytes) -> None:
        self.app, self.rule, self.door = app, rule, door

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        asked = _asked(scope)
        turned = self.rule.turned_away(asked)
        body = b""
        if turned is None and asked.method == "POST":
            found = await _body(receive)
            turned, body = (found, b"") if isinstance(found, Turned) else (None, found)
        if turned is not None:
            return await self._answer(asked, turned, send)
        scope["amends.session"] = self.rule.session(asked)
        await self.app(scope, _replayed(body, receive), _dressed(send))

    async def _answer(self, asked: Asked, turned: Turned, send: Send) -> None:
        if turned.status == 401 and kind_of(asked.path) == DOCUMENT:
            body, kind = self.door, b"text/html; charset=utf-8"
        else:
            error = {"code": turned.code, "message": turned.message, "next": turned.next}
            body, kind = json.dumps({"error": error}).encode(), b"application/json"
        head: list[tuple[bytes, bytes]] = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        if turned.status == 413:
            head.append((b"connection", b"close"))  # what is left of it is not read
        await _dressed(send)({"type": "http.response.start", "status": turned.status, "headers": head})
        await send({"type": "http.response.body", "body": b"" if asked.method == "HEAD" else body})


def _asked(scope: Message) -> Asked:
    headers: dict[str, tuple[str, ...]] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        headers[key] = (*headers.get(key, ()), value.decode("latin-1"))
    return Asked(scope["method"], scope["path"], headers)


async def _body(receive: Receive) -> bytes | Turned:
    """The whole body, never more than BODY_BYTES of it."""
    read = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                read += message.get("body", b"")
                if len(read) > BODY_BYTES:
                    return _too_large()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return bytes(read)
    except TimeoutError:
        return Turned(408, "too_slow", "The answer did not arrive in time.", "Send it again.")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then whatever comes after it."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _dressed(send: Send) -> Send:
    """The same, with our headers in place of any of theirs."""
    ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def dressed(message: Message) -> None:
        if message["type"] == "http.response.start":
            theirs = [pair for pair in message.get("headers", ()) if pair[0].decode("latin-1").lower() not in HEADERS]
            message["headers"] = [*theirs, *ours]
        await send(message)

    return dressed
