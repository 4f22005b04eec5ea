"""`@tool`: a function that knows what its effect means. Inside a saga a call is a step; outside it runs untouched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..store.errors import BadValue
from .current import current_saga
from .drive import BLOCKING, LOOPING, run
from .engine import execute
from .gate.provenance import untagged_call
from .semantics import semantics_of
from .tools import DECLARED, bound, check_name, is_async


def tool(
    name: str | Callable[..., Any] | None = None,
    *,
    semantics: Any = None,
    compensate: Any = None,
    undo: Any = None,
    verify: Any = None,
    probe: Any = None,
    settle: float | None = None,
    timeout: float | None = None,
    retry: Any = None,
    retry_policy: Any = None,
    fallback: Any = None,
    fallback_action: Any = None,
    returns: Any = None,
    store_result: bool | None = None,
    secret: tuple[str, ...] = (),
    apart: tuple[str, ...] = (),
    tags: tuple[str, ...] = (),
    locks: tuple[str, ...] = (),
    lock_timeout: float | None = None,
) -> Any:
    """Declare a function as a tool: `@tool("stripe.charge", semantics=COMPENSABLE, undo=…)`.

    The options are those of `execute`. An async function stays async, a sync one sync. Raises BadName, BadValue.
    """
    if callable(name):
        raise BadValue("@tool needs its semantics.", next='Write @tool("vendor.verb", semantics=…).')
    if semantics is None:
        raise BadValue(
            f"@tool({name!r}): semantics is missing.", next="State REVERSIBLE, COMPENSABLE or IRREVERSIBLE.",
            code="semantics_missing",
        )  # fmt: skip
    options = {
        "semantics": semantics_of(semantics), "compensate": compensate, "undo": undo, "verify": verify, "probe": probe,
        "settle": settle, "timeout": timeout, "retry": retry or retry_policy, "fallback": fallback or fallback_action,
        "returns": returns, "store_result": store_result, "secret": tuple(secret), "apart": tuple(apart),
        "tags": tags, "locks": locks, "lock_timeout": lock_timeout,
    }  # fmt: skip

    def declare(fn: Callable[..., Any]) -> Callable[..., Any]:
        return wrapped(fn, check_name(name or fn.__name__, "tool"), options)

    return declare


def wrapped(fn: Callable[..., Any], name: str, options: dict[str, Any]) -> Callable[..., Any]:
    """The function as a tool of that name."""
    given = {option: value for option, value in options.items() if value not in (None, ())}

    if is_async(fn):

        @functools.wraps(fn)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            saga = current_saga()
            if saga is None:
                args, kwargs = untagged_call(args, kwargs)
                return await fn(*args, **kwargs)
            return await execute(LOOPING, saga._run, saga._prepare(name, fn, bound(fn, args, kwargs), dict(given)))

        made: Callable[..., Any] = asynchronous
    else:

        @functools.wraps(fn)
        def synchronous(*args: Any, **kwargs: Any) -> Any:
            saga = current_saga()
            if saga is None:
                args, kwargs = untagged_call(args, kwargs)
                return fn(*args, **kwargs)
            return run(execute(BLOCKING, saga._run, saga._prepare(name, fn, bound(fn, args, kwargs), dict(given))))

        made = synchronous
    setattr(made, DECLARED, {"fn": fn, **given})
    return made
