"""A page that is open sees what happens, and one that nobody looks at costs nothing.

One follower asks the log how long it is, and only while somebody watches. What a watcher gets is that number: it asks
again for what it shows. So a watcher that does not read holds one number back, not a queue, and there are WATCHERS at
most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from ...store.errors import Refused

WATCHERS = 32
LOOK_S = 0.1
"""Seconds between two looks at the log, while somebody watches."""
BEAT_S = 15.0
"""A watcher that nothing happens for hears a sign of life this often."""


class _Watcher:
    def __init__(self, seen: int) -> None:
        self.seen = seen
        self.news = asyncio.Event()


class Live:
    """Tells watchers how far the log has grown. grown: waits for nothing, answers the log's size, may raise."""

    def __init__(self, grown: Callable[[], Awaitable[int]]) -> None:
        self._grown = grown
        self._watchers: set[_Watcher] = set()
        self._follower: asyncio.Task[None] | None = None
        self._size = 0
        self._ended = False
        self._trouble: Exception | None = None

    @property
    def following(self) -> bool:
        """Whether the log is being looked at."""
        return self._follower is not None and not self._follower.done()

    async def sizes(self, seen: int = -1) -> AsyncIterator[int | None]:
        """The size of the log whenever it is another one than `seen`; None as a sign of life. Raises Refused where too
        many watch, and what the log raised when it could not be read."""
        if len(self._watchers) >= WATCHERS:
            raise Refused("Too many pages are open.", next="Close some.", code="too_many_pages")
        me = _Watcher(seen)
        self._watchers.add(me)
        try:
            self._follow()
            while not self._ended:
                if self._trouble is not None:
                    raise self._trouble
                if me.seen != self._size and self._size:
                    me.seen = self._size
                    yield me.seen
                    continue
                me.news.clear()
                if not await _heard(me.news):
                    yield None
        finally:
            self._watchers.discard(me)

    def end(self) -> None:
        """Let every watcher go, for good."""
        self._ended = True
        self._ring()

    def _follow(self) -> None:
        if not self.following:
            self._trouble = None
            self._follower = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while self._watchers and not self._ended:
            try:
                size = await self._grown()
            except Exception as error:  # whatever it is, whoever watches is told
                self._trouble = error
                return self._ring()
            if size != self._size:
                self._size = size
                self._ring()
            await asyncio.sleep(LOOK_S)

    def _ring(self) -> None:
        for watcher in self._watchers:
            watcher.news.set()


async def _heard(news: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(BEAT_S):
            await news.wait()
    except TimeoutError:
        return False
    return True
