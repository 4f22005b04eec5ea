"""Sync and async users are equals: the engine is written once, against these few verbs, and driven in two ways.

The engine's functions are coroutines. `Looping` really awaits, on the caller's event loop. `Blocking` answers every
verb before it returns, so a coroutine driven by it never suspends and `run` takes it to its end on the caller's own
thread: no loop, no thread hop. What is left to a thread is what may block for longer than the caller allows.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from ..store.chain import Decide
from ..store.entry import Entry
from ..store.errors import TheyErred
from ..store.log import DURABLE, Log
from .pool import SHARED, Pool
from .tools import is_async

T = TypeVar("T")


class Ran(NamedTuple):
    """How a call of user code ended. error: what it raised. running: set if it is still going, past its deadline."""

    result: Any = None
    error: BaseException | None = None
    running: Future[Any] | None = None


class NeverStarted(TheyErred):
    """No thread of the pool was free before the deadline: the call was withdrawn, nothing has happened."""

    code = "pool_saturated"


class Drive(Protocol):
    """How the engine waits."""

    async def commit(self, log: Log, decide: Decide, sync: int = DURABLE) -> list[Entry]:
        """Append facts and wait until they are safe."""

    async def call(
        self, fn: Callable[..., Any], kwargs: Mapping[str, Any], timeout: float | None, urgent: bool = False
    ) -> Ran:
        """Run user code under a deadline in seconds. Never raises what it raised, except when *we* are cancelled.

        urgent: what settles or undoes others does not wait for a thread behind them.
        """

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    async def grown(self, log: Log, size: int, timeout: float) -> bool:
        """Wait until the log holds more than `size` entries, at most `timeout` seconds; say whether it does."""


def run(made: Coroutine[Any, Any, T]) -> T:
    """Take a coroutine that never suspends to its end."""
    try:
        made.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    made.close()
    raise RuntimeError("a blocking drive suspended")


class Blocking:
    """On the caller's thread. Async user code runs on one loop thread of ours; timed sync code runs in the pool."""

    def __init__(self, pool: Pool = SHARED) -> None:
        self._pool = pool

    async def commit(self, log: Log, decide: Decide, sync: int = DURABLE) -> list[Entry]:
        return log.commit(decide, sync)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def grown(self, log: Log, size: int, timeout: float) -> bool:
        return log.wait(size, timeout)

    async def call(
        self, fn: Callable[..., Any], kwargs: Mapping[str, Any], timeout: float | None, urgent: bool = False
    ) -> Ran:
        if is_async(fn):
            return _await_here(fn(**kwargs), timeout)
        if timeout is None:
            try:
                result = fn(**kwargs)
            except Exception as error:
                return Ran(error=error)
            return _await_here(result, None) if inspect.isawaitable(result) else Ran(result)
        future = self._pool.submit(contextvars.copy_context(), lambda: fn(**kwargs), urgent)
        ran = _result_of(future, timeout)
        return _await_here(ran.result, timeout) if inspect.isawaitable(ran.result) else ran


def _await_here(awaitable: Any, timeout: float | None) -> Ran:
    context = contextvars.copy_context()
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def start() -> None:
        task = loop.create_task(_plain(awaitable), context=context)
        task.add_done_callback(lambda done: _hand_over(done, future))
        tasks.append(task)

    tasks: list[asyncio.Task[Any]] = []
    loop = loop_thread()
    loop.call_soon_threadsafe(start)
    try:
        ran = _result_of(future, timeout)
    except BaseException:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
        raise
    if ran.running:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
        later = _result_of(future, CANCEL_GRACE)
        if later.running is None:  # what it raises when it is cancelled says nothing; a result does
            return later if later.error is None else ran._replace(running=None)
    return ran


CANCEL_GRACE = 0.25
"""Seconds that async user code gets to end after it was cancelled at its deadline."""


def _result_of(future: Future[Any], timeout: float | None) -> Ran:
    # Future.result raises TimeoutError both for ours and for the tool's own: ask `done` which it was.
    try:
        return Ran(future.result(timeout))
    except Exception as error:
        return Ran(error=error) if future.done() else _overdue(future)
    except BaseException as error:
        if future.done() and future.exception() is error:  # the tool raised SystemExit in its thread
            return Ran(error=error)
        error.amends_running = future  # type: ignore[attr-defined]  # Ctrl-C ends our wait, not the tool
        raise


def _overdue(future: Future[Any]) -> Ran:
    """Past its deadline: one that no thread has begun is withdrawn, and is known not to have happened."""
    if future.cancel():
        return Ran(error=NeverStarted("No thread was free for this call in time.", next="See `amends status`."))
    return Ran(error=TimeoutError(), running=future)


def _hand_over(task: asyncio.Task[Any], future: Future[Any]) -> None:
    if task.cancelled():
        future.set_exception(asyncio.CancelledError())
    elif task.exception() is not None:
        future.set_exception(task.exception())
    else:
        future.set_result(task.result())


async def _plain(awaitable: Any) -> Any:
    return await awaitable


class Looping:
    """On the caller's event loop. Sync user code runs in the pool, with the caller's context carried along."""

    def __init__(self, pool: Pool = SHARED) -> None:
        self._pool = pool

    async def commit(self, log: Log, decide: Decide, sync: int = DURABLE) -> list[Entry]:
        return await log.acommit(decide, sync)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def grown(self, log: Log, size: int, timeout: float) -> bool:
        # Bounded here as well: with every thread of the pool hung, the look at the log does not begin.
        waiting = asyncio.wrap_future(self._pool.submit(contextvars.Context(), lambda: log.wait(size, timeout)))
        done, _ = await asyncio.wait([waiting], timeout=timeout + 0.1)
        if not done:
            waiting.cancel()
        return log.size > size

    async def call(
        self, fn: Callable[..., Any], kwargs: Mapping[str, Any], timeout: float | None, urgent: bool = False
    ) -> Ran:
        if is_async(fn):
            return await self._task(fn(**kwargs), timeout)
        future = self._pool.submit(contextvars.copy_context(), lambda: fn(**kwargs), urgent)
        ran = await self._thread(future, timeout)
        return await self._task(ran.result, timeout) if inspect.isawaitable(ran.result) else ran

    async def _task(self, awaitable: Any, timeout: float | None) -> Ran:
        if timeout is None:
            return await self._untimed(awaitable)
        task = asyncio.ensure_future(_plain(awaitable))
        try:
            done, _ = await asyncio.wait([task], timeout=timeout)
            if not done:
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=CANCEL_GRACE)
                if not done:
                    return Ran(error=TimeoutError(), running=_later(task))
                if task.cancelled() or task.exception() is not None:  # what it raises when cancelled says nothing
                    return Ran(error=TimeoutError())
        except asyncio.CancelledError as cancelled:
            task.cancel()
            raise StillRunning(_later(task)) from cancelled
        if task.cancelled():
            return Ran(error=asyncio.CancelledError())
        error = task.exception()
        return Ran(error=error) if error else Ran(task.result())

    async def _untimed(self, awaitable: Any) -> Ran:
        ours = asyncio.current_task()
        before = ours.cancelling() if ours else 0
        try:
            return Ran(await awaitable)
        except Exception as error:
            if ours is not None and ours.cancelling() > before:  # it was told to stop: what it raises says nothing
                raise asyncio.CancelledError() from error
            return Ran(error=error)

    async def _thread(self, future: Future[Any], timeout: float | None) -> Ran:
        waiting = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([waiting], timeout=timeout)
        except asyncio.CancelledError as cancelled:
            raise StillRunning(future) from cancelled
        if not done:
            waiting.add_done_callback(_retrieved)
            return _overdue(future)
        error = waiting.exception()
        return Ran(error=error) if error else Ran(waiting.result())


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Look at the outcome, so that asyncio does not report it as never seen: the late callback tells it."""
    if not future.cancelled():
        future.exception()


class StillRunning(asyncio.CancelledError):
    """We were cancelled while the tool works on: `amends_running` tells how that ends."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self.amends_running = future


def _later(task: asyncio.Task[Any]) -> Future[Any]:
    """How a task ends that nobody waits for any more."""
    future: Future[Any] = Future()
    task.add_done_callback(lambda ended: _hand_over(ended, future))
    return future


def current_task() -> asyncio.Task[Any] | None:
    """The task that this code runs in; None on a thread without a running loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


_loop_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def loop_thread() -> asyncio.AbstractEventLoop:
    """The one event loop of ours in this process, on a daemonic thread, made when first needed."""
    with _loop_lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = asyncio.new_event_loop()
            _loops.clear()  # a parent's loop, after a fork, runs in no thread of ours
            _loops[os.getpid()] = loop
            threading.Thread(target=loop.run_forever, name="amends-loop", daemon=True).start()
        return loop


def _in_child() -> None:
    """After a fork: a thread that held the lock is the parent's, and never lets go of it here."""
    global _loop_lock
    _loop_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


BLOCKING, LOOPING = Blocking(), Looping()
