"""Only the person who started the page gets in: a link that works once, then a cookie and a key that belong together.

`amends ui` prints a link. Its part behind the `#` never leaves the browser by itself; the page hands it in once and
gets a session: a cookie, which scripts cannot read, and a key, which the page keeps for its own origin and sends as a
header. Every question and every answer needs both. Why not the cookie alone: a browser sends it to any port of the
same host name, so another program on this machine could collect it there; the key it never gets.

Whoever can read the run folder of the home can make another link (`link_of`): a second `amends ui` does.
"""

from __future__ import annotations

import base64
import hmac
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

SESSIONS = 16
"""How many browsers may be in at once; the one that came first has to go when another comes."""
LINKS = 4096
"""How many links of one run are remembered as used. Only who knows the secret makes one, so this many is nobody."""
NONCE_CHARS = 22


class Session(NamedTuple):
    """What a browser has after it came in."""

    cookie: str
    key: str


def random_text(size: int = 16) -> str:
    return _text(os.urandom(size))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def link_of(secret: str, nonce: str) -> str:
    """The part behind the `#` of a link that works once."""
    return f"{nonce}.{_text(hmac.digest(secret.encode(), f'link {nonce}'.encode(), 'sha256'))}"


def link_to(origin: str, link: str, at: str = "/") -> str:
    """The whole address: the page takes what is behind the `#` apart again."""
    return f"{origin}/enter#{link}{f'~{at}' if at != '/' else ''}"


class Access:
    """Who may come in during one run."""

    def __init__(self, secret: str, random: Callable[[], str] = random_text) -> None:
        self.secret = secret
        self._random = random
        self._used: dict[str, str] = {}  # nonce -> the cookie that it became
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def link(self) -> str:
        """A fresh link's part behind the `#`."""
        return link_of(self.secret, self._random())

    def enter(self, link: str) -> Session | None:
        """Use a link up. None if it is none of ours, or was used: then whoever came in by it has to go as well, since
        one of the two is not the person that it was printed for."""
        nonce = link.partition(".")[0]
        if len(nonce) != NONCE_CHARS or not _same(link, link_of(self.secret, nonce)):
            return None
        if nonce in self._used or len(self._used) >= LINKS:
            self.leave(self._used.get(nonce, ""))
            return None
        session = Session(self._random(), self._random())
        self._used[nonce] = session.cookie
        self._sessions[session.cookie] = session
        while len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def session(self, cookie: str) -> Session | None:
        """The session that a cookie belongs to."""
        return next((one for one in self._sessions.values() if _same(one.cookie, cookie)), None)

    def leave(self, cookie: str) -> None:
        """End a session."""
        self._sessions.pop(cookie, None)


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode("utf-8", "replace"))
