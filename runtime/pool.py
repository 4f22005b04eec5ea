"""Threads for tools that block, bounded and daemonic: a hung tool never holds the exit of its process.

`concurrent.futures` joins its threads at interpreter exit, so a tool that never returns would keep a finished agent
alive; these do not. Saturation (calls that had to wait for a thread) is counted and shown by `status()`.
"""

from __future__ import annotations

import collections
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Job = tuple["Future[Any]", contextvars.Context, Callable[[], Any]]


class Pool:
    """At most `most` threads, made when needed and kept."""

    def __init__(self, most: int = 32) -> None:
        self.most = most
        self.saturated = 0
        self._empty()

    def _empty(self) -> None:
        self._pid = os.getpid()
        self._jobs: collections.deque[Job] = collections.deque()
        self._more = threading.Condition()
        self._idle = self._threads = 0

    def submit(self, context: contextvars.Context, run: Callable[[], Any], urgent: bool = False) -> Future[Any]:
        """Run in a pool thread inside `context`; the future tells how it ended.

        urgent goes first and may have a thread beyond `most`, up to twice as many: hung tools are what is undone.
        """
        if self._pid != os.getpid():  # a fork leaves the threads, and whatever lock they held, behind
            self._empty()
        future: Future[Any] = Future()
        with self._more:
            (self._jobs.appendleft if urgent else self._jobs.append)((future, context, run))
            if self._idle >= len(self._jobs):
                self._more.notify()
            elif self._threads < self.most * (1 + urgent):
                self._threads += 1
                threading.Thread(target=self._work, name="amends-tool", daemon=True).start()
            else:
                self.saturated += 1
        return future

    def _work(self) -> None:
        while True:
            with self._more:
                self._idle += 1
                while not self._jobs:
                    self._more.wait()
                self._idle -= 1
                future, context, run = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(context.run(run))
                except StopIteration as error:  # no future of asyncio takes one, and its waiter would wait for ever
                    future.set_exception(RuntimeError(f"the tool raised {error!r}"))
                except BaseException as error:  # whatever a tool raises belongs to whoever waits for it
                    future.set_exception(error)
            del future, context, run


SHARED = Pool()
