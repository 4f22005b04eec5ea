"""What a tool's author declares: what undoes an effect, what asks the world about it, and how often to try.

A handler is a *name* that lives in the log; the function behind it is looked up by whoever runs it, today or after a
crash. A `Compensation` that only holds a closure can be undone by its own process and by nobody else, and says so.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from ..store.entry import STRING_MAX
from ..store.errors import BadName, BadValue

F = TypeVar("F", bound=Callable[..., Any])


class Answer:
    """What a handler or probe says of the world; call it to add a note or a result."""

    __slots__ = ("amends_outcome", "note", "result")

    def __init__(self, outcome: str, note: str = "", result: Any = None) -> None:
        self.amends_outcome, self.note, self.result = outcome, note, result

    def __call__(self, detail: Any = None) -> Answer:
        if self.amends_outcome == "present":
            return Answer("present", result=detail)
        return Answer(self.amends_outcome, note="" if detail is None else str(detail))

    def __repr__(self) -> str:
        return self.amends_outcome.upper()


ALREADY_DONE = Answer("already_done")
PRESENT = Answer("present")
ABSENT = Answer("absent")
CANNOT_TELL = Answer("cannot_tell")


class Observation(Answer):
    """What a reconciler saw of an effect: `present`, `absent` or `cannot_tell`. differs: how what is there is not what
    the log says, in words. Raises BadValue for anything else."""

    __slots__ = ("differs",)

    def __init__(self, outcome: str, note: str = "", *, differs: str = "") -> None:
        if outcome not in ("present", "absent", "cannot_tell"):
            raise BadValue(f"Observation({outcome!r}): present, absent or cannot_tell is asked.")
        if differs and outcome != "present":
            raise BadValue("Only what is present can differ.", next="Leave `differs` out.")
        super().__init__(outcome, note)
        self.differs = differs


class Handler(NamedTuple):
    """A registered compensation. keyed: it takes `idempotency_key`; idempotent: its author says twice is once."""

    name: str
    fn: Callable[..., Any]
    keyed: bool
    idempotent: bool

    @property
    def again(self) -> str:
        """Why it may be attempted again after its answer was lost; empty if it may not."""
        return "keyed" if self.keyed else "idempotent" if self.idempotent else ""


_HANDLERS: dict[str, Handler] = {}


def compensator(name: str, *, idempotent: bool = False) -> Callable[[F], F]:
    """Register a compensation under a name that the log can carry.

    Take `idempotency_key` and pass it on: then it can be attempted again when its answer was lost. A later
    registration of the same name replaces the earlier one. Raises BadName.
    """
    if callable(name):
        raise BadName("@compensator needs a name.", next='Write @compensator("vendor.refund").')
    check_name(name, "handler")

    def register(fn: F) -> F:
        _HANDLERS[name] = Handler(name, fn, takes_key(fn), idempotent)
        warn_if_lost_at_death(name, fn)
        return fn

    return register


def find(name: str) -> Handler | None:
    """The handler registered under a name in this process."""
    return _HANDLERS.get(name)


def registered_as(fn: Callable[..., Any]) -> Handler | None:
    """The handler that this very function is registered as, the first if there are several."""
    return next((handler for handler in _HANDLERS.values() if handler.fn is fn), None)


def registered() -> dict[str, Handler]:
    """All handlers of this process by name."""
    return dict(_HANDLERS)


_RECONCILERS: dict[str, Callable[..., Any]] = {}


def reconciler(name: str) -> Callable[[F], F]:
    """Register what asks the world about the effects of a tool, for `amends reconcile`.

    It takes by name what it needs of the call's arguments, `result` and `idempotency_key`, and answers PRESENT, ABSENT,
    CANNOT_TELL or an Observation. It must change nothing. Raises BadName.
    """
    if callable(name):
        raise BadName("@reconciler needs the name of a tool.", next='Write @reconciler("vendor.charge").')
    check_name(name, "tool")

    def register(fn: F) -> F:
        _RECONCILERS[name] = fn
        return fn

    return register


def reconcilers() -> dict[str, Callable[..., Any]]:
    """All reconcilers of this process, by the name of their tool."""
    return dict(_RECONCILERS)


_WARNED: set[str] = set()


def warn_if_lost_at_death(name: str, fn: Callable[..., Any]) -> str:
    """Why a daemon could not bring this handler back, said once on standard error; empty if it could."""
    from .hosts import recorded_host

    reason = recorded_host(fn)[1]
    if reason and name not in _WARNED:
        _WARNED.add(name)
        import sys

        sys.stderr.write(f"amends: handler {name} cannot be run after a crash: {reason}\n")
    return reason


class Compensation:
    """What undoes an effect: a named handler or a function, and its arguments.

    handler: a name known to `@compensator`, `handlers.toml` or a host. fn: a function; one at the top level of an
    importable file is found again after a crash, a closure is not. idempotent: running it twice is running it once.
    """

    __slots__ = ("handler", "kwargs", "fn", "description", "idempotent", "person")

    def __init__(
        self,
        fn: Callable[..., Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        description: str = "",
        *,
        handler: str = "",
        idempotent: bool = False,
    ) -> None:
        if isinstance(fn, str):
            raise BadValue("Compensation(fn) takes a function.", next="Write Compensation(handler=…, kwargs=…).")
        if fn is None and not handler:
            raise BadValue("A Compensation needs a handler or a function.", next="Write Compensation(handler=…).")
        if handler:
            check_name(handler, "handler")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise BadValue(f"Compensation(kwargs) takes a mapping, not {type(kwargs).__name__}.")
        self.handler, self.fn, self.kwargs = handler, fn, dict(kwargs or {})
        self.description, self.idempotent, self.person = description, idempotent, False

    @classmethod
    def human(cls, what: str) -> Compensation:
        """Undone by a person: the saga ends escalated and `what` is shown in the inbox."""
        made = cls(handler="human")
        made.description, made.person = what, True
        return made

    def __repr__(self) -> str:
        return f"Compensation(handler={self.handler or getattr(self.fn, '__name__', '')!r}, kwargs={self.kwargs!r})"


class Fallback:
    """A recorded alternative to a forward that failed, with its own inverse: declared (`undo`) or derived."""

    __slots__ = ("fn", "undo", "compensate")

    def __init__(self, fn: Callable[..., Any], *, undo: Any = None, compensate: Any = None) -> None:
        self.fn, self.undo, self.compensate = fn, undo, compensate


class RetryPolicy:
    """Attempts of one step after the first. Delays in seconds; `retry_on` and `exclude_exceptions` are classes.

    Raises BadValue at construction for values that mean nothing.
    """

    def __init__(
        self,
        max_retries: int = 3,
        backoff_type: str = "exponential",
        base_delay: float = 1.0,
        max_delay: float = 60.0,
        retry_on: Iterable[type[BaseException]] = (Exception,),
        exclude_exceptions: Iterable[type[BaseException]] = (),
        *,
        jitter: float = 0.1,
    ) -> None:
        if type(max_retries) is not int or not 0 <= max_retries <= 1000:
            raise BadValue(f"max_retries={max_retries!r}: a whole number from 0 to 1000 is asked.")
        if backoff_type not in ("linear", "exponential", "constant"):
            raise BadValue(f"backoff_type={backoff_type!r}: linear, exponential or constant is asked.")
        for name, value in (("base_delay", base_delay), ("max_delay", max_delay), ("jitter", jitter)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
                raise BadValue(f"{name}={value!r}: seconds from 0 up are asked.")
        self.retry_on, self.exclude_exceptions = tuple(retry_on), tuple(exclude_exceptions)
        for kind in (*self.retry_on, *self.exclude_exceptions):
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise BadValue(f"{kind!r} is not an exception class.")
        self.max_retries, self.backoff_type = max_retries, backoff_type
        self.base_delay, self.max_delay, self.jitter = float(base_delay), float(max_delay), float(jitter)

    def wants(self, error: BaseException) -> bool:
        """Whether another attempt may follow this error."""
        return isinstance(error, self.retry_on) and not isinstance(error, self.exclude_exceptions)

    def delay(self, attempt: int, chance: float) -> float:
        """Seconds before attempt + 1; `chance` in [0, 1) spreads it by `jitter`."""
        steps = {"constant": 1.0, "linear": float(attempt), "exponential": 2.0 ** min(attempt - 1, 60)}
        return min(self.max_delay, self.base_delay * steps[self.backoff_type]) * (1 + self.jitter * (2 * chance - 1))


ONCE = RetryPolicy(0)


DECLARED = "__amends_tool__"


def declared_options(forward: Any) -> dict[str, Any]:
    """What `@tool` declared about a function, with the plain function as `fn`; empty for any other callable."""
    return dict(getattr(forward, DECLARED, {}))


def check_name(name: object, what: str) -> str:
    """A tool, handler or key name: printable ASCII without quote and backslash, 1 to 256. Raises BadName."""
    if not isinstance(name, str) or not 0 < len(name) <= STRING_MAX:
        raise BadName(f"A {what} name has 1 to {STRING_MAX} characters; this is {name!r}.")
    if not name.isascii() or not name.isprintable() or '"' in name or "\\" in name:
        raise BadName(f"The {what} name {name!r} may hold printable ASCII without quote and backslash only.")
    return name


def takes_key(fn: Callable[..., Any]) -> bool:
    """Whether a callable names `idempotency_key`; **kwargs does not count."""
    return "idempotency_key" in names(fn)


def names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of a callable that can be passed by name, in order; none for one that hides its signature."""
    if type(fn) is FunctionType and not hasattr(fn, "__wrapped__") and not hasattr(fn, "__signature__"):
        code = fn.__code__
        return tuple(code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount])
    return tuple(parameters(fn))  # a method, a partial, a decorated function: inspect knows, and takes its time


def misfit(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> str:
    """Why a call by name does not fit a callable; empty if it does, or if nobody can tell."""
    if type(fn) is FunctionType and not hasattr(fn, "__wrapped__") and not fn.__kwdefaults__:
        code = fn.__code__
        free = code.co_argcount - len(fn.__defaults__ or ())
        if not code.co_posonlyargcount and not code.co_flags & inspect.CO_VARKEYWORDS:
            asked = code.co_varnames[:free] + code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
            if kwargs.keys() >= set(asked) and kwargs.keys() <= set(names(fn)):
                return ""
    try:
        inspect.signature(fn).bind(**kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:
        return ""  # it hides its signature
    return ""


def parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters that `names` names, with their annotations."""
    try:
        named = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}
    return {n: p for n, p in named.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def defaults(fn: Callable[..., Any]) -> dict[str, Any]:
    """What a callable puts in where a call leaves an argument out, and what partials hold of it already; nothing for
    one that hides its signature. Raises BadValue for a partial with an argument whose name nobody can tell."""
    if type(fn) is FunctionType and not hasattr(fn, "__wrapped__") and not hasattr(fn, "__signature__"):
        given, count = fn.__defaults__ or (), fn.__code__.co_argcount
        return {**dict(zip(fn.__code__.co_varnames[count - len(given) : count], given, strict=True)),
                **(fn.__kwdefaults__ or {})}  # fmt: skip
    if isinstance(fn, partial):
        return {**defaults(fn.func), **_by_place(fn), **fn.keywords}
    return {name: each.default for name, each in parameters(fn).items() if each.default is not each.empty}


def _by_place(fn: partial[Any]) -> dict[str, Any]:
    """What a partial holds without a name, by the names of the parameters that take it."""
    if not fn.args:
        return {}
    try:
        declared = [*inspect.signature(fn.func).parameters.values()]
    except (TypeError, ValueError):
        declared = []
    takes = [each for each in declared if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    shared = any(each.kind is each.VAR_KEYWORD for each in declared)  # which may hold another argument of that name
    if len(takes) < len(fn.args) or shared and any(each.kind is each.POSITIONAL_ONLY for each in takes[: len(fn.args)]):
        raise BadValue(
            "A functools.partial holds an argument by its place, and nobody can tell which one it is.",
            next="Bind it by keyword, functools.partial(fn, name=value), or pass it with the call.",
            code="unnamed_argument",
        )
    return {each.name: value for each, value in zip(takes, fn.args, strict=False)}


def is_async(fn: Any) -> bool:
    """Whether calling it makes a coroutine (functions, partials, and objects with an async __call__)."""
    if type(fn) is FunctionType and not fn.__dict__:  # nobody has marked or wrapped it
        return bool(fn.__code__.co_flags & inspect.CO_COROUTINE)
    while hasattr(fn, "func") and not inspect.isfunction(fn):
        fn = fn.func
    if isinstance(fn, type):  # calling a class makes an instance, whatever that can do
        return False
    return asyncio.iscoroutinefunction(fn) or asyncio.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def bound(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, defaults and the key that will be offered left out. Raises BadValue for a call
    that does not fit, before it runs."""
    ours = False
    try:
        signature = inspect.signature(fn)
        ours = takes_key(fn) and "idempotency_key" not in signature.bind_partial(*args, **kwargs).arguments
        made = signature.bind(*args, **({**kwargs, "idempotency_key": ""} if ours else kwargs))
    except TypeError as error:
        raise BadValue(f"{getattr(fn, '__name__', 'The tool')} cannot be called so: {error}.") from None
    except ValueError:
        if args:
            raise BadValue("This tool hides its signature; call it with keyword arguments.") from None
        return dict(kwargs)
    named: dict[str, Any] = {}
    for name, value in made.arguments.items():
        kind = made.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise BadValue(f"{getattr(fn, '__name__', 'The tool')} takes arguments without names.", next="Name them.")
        elif not (ours and name == "idempotency_key"):
            named[name] = value
    return named
