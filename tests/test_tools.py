"""What a tool's author declares, and what is refused while it is being written."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
from world import World, fold

from amends import (
    COMPENSABLE,
    IRREVERSIBLE,
    REVERSIBLE,
    AgentKit,
    Compensation,
    Fallback,
    RetryPolicy,
    SagaAborted,
    Secret,
    compensator,
    current_saga,
    saga_scope,
    tool,
)
from amends.runtime import tools
from amends.runtime.inverse import idempotency_key
from amends.runtime.openings import raw_fields
from amends.store.errors import AmendsError, BadName, BadValue


def stored(kit: AgentKit, saga: str) -> bytes:
    """Every byte that the log has of a saga."""
    kit.log.flush()
    return b"".join(record.line + (record.blob or b"") for record in kit.log.thread(saga))


# ---- declaring -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.1")
def test_nothing_is_guessed_from_a_name_the_semantics_are_stated(memory: AgentKit) -> None:
    with pytest.raises(BadValue, match="semantics"):
        tool("files.delete")
    with pytest.raises(BadValue, match="semantics"):
        tool(lambda: None)
    with pytest.raises(BadValue, match="is none of"):
        tool("files.delete", semantics="UNDOABLE")
    with saga_scope(kit=memory) as saga, pytest.raises(BadValue, match="semantics is missing"):
        saga.execute("refund_everything", lambda: None, {})


@pytest.mark.promise("1.1")
def test_an_irreversible_tool_declares_no_inverse(memory: AgentKit) -> None:
    with saga_scope(kit=memory) as saga, pytest.raises(BadValue, match="IRREVERSIBLE"):
        saga.execute("mail.send", lambda: None, {}, semantics=IRREVERSIBLE, undo=Compensation(print))


@pytest.mark.parametrize("name", ["", "a" * 257, 'a"b', "a\\b", "naïve", "a\nb", None, 7])
def test_names_outside_the_grammar_are_refused(memory: AgentKit, name: Any) -> None:
    with pytest.raises(BadName):
        compensator(name)(lambda: None)
    with saga_scope(kit=memory) as saga, pytest.raises(BadName):
        saga.execute(name, lambda: None, {}, semantics=COMPENSABLE)


def test_the_order_of_arguments_of_other_libraries_is_refused_in_words(memory: AgentKit) -> None:
    with saga_scope(kit=memory) as saga:
        with pytest.raises(BadValue, match="order is execute"):
            saga.execute("hotel", {"what": "a"}, lambda what: what, semantics=COMPENSABLE)
        with pytest.raises(BadValue, match="order is execute"):
            saga.execute("hotel", semantics=COMPENSABLE)
    with pytest.raises(BadValue, match="takes a function"):
        Compensation("vendor.refund", {"id": 1})


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": 0}, {"timeout": -1}, {"timeout": "5"}, {"timeout": True}, {"timeout": float("nan")}, {"settle": 0},
        {"retry": 3}, {"verify": 7}, {"probe": "x"}, {"undo": 7}, {"compensate": "refund"}, {"fallback": 7},
        {"timeuot": 5}, {"key": ""}, {"key": 'k"'},
    ],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused_before_anything_happens(
    memory: AgentKit, world: World, wrong: dict[str, Any]
) -> None:
    with saga_scope(kit=memory) as saga, pytest.raises(AmendsError):
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, **wrong)
    assert world.calls == 0


@pytest.mark.promise("1.9")
@pytest.mark.parametrize(
    "wrong",
    [
        {"max_retries": -1}, {"max_retries": 1.5}, {"max_retries": True}, {"max_retries": 10**6}, {"max_retries": "3"},
        {"backoff_type": "random"}, {"base_delay": -1}, {"base_delay": float("nan")}, {"base_delay": float("inf")},
        {"max_delay": -0.1}, {"max_delay": "1"}, {"jitter": -1}, {"retry_on": (7,)}, {"retry_on": ("ValueError",)},
        {"exclude_exceptions": (int,)},
    ],
)  # fmt: skip
def test_a_retry_policy_that_means_nothing_is_refused_where_it_is_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadValue):
        RetryPolicy(**wrong)


@pytest.mark.promise("1.9")
def test_delays_grow_as_asked_and_are_capped() -> None:
    def delays(kind: str) -> list[float]:
        return [RetryPolicy(9, kind, 1.0, 5.0, jitter=0).delay(n, 0.5) for n in range(1, 5)]

    assert delays("constant") == [1, 1, 1, 1] and delays("linear") == [1, 2, 3, 4]
    assert delays("exponential") == [1, 2, 4, 5]
    assert RetryPolicy(9, "constant", 10, jitter=0.1).delay(1, 0.0) == 9.0


# ---- @tool -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.19")
def test_outside_a_saga_a_tool_runs_as_if_it_were_not_wrapped(memory: AgentKit) -> None:
    got: list[Any] = []

    @tool("notes.keep", semantics=REVERSIBLE, secret=("token",))
    def keep(*things: Any, token: str = "", **more: Any) -> Any:
        "Keeps."
        got.append((things, token, more))
        return things

    @tool("notes.akeep", semantics=REVERSIBLE)
    async def akeep(thing: Any) -> Any:
        return thing

    odd = object()
    size = memory.log.size
    assert keep(odd, float, token="t", x=odd) == (odd, float) and got == [((odd, float), "t", {"x": odd})]
    assert asyncio.run(akeep(odd)) is odd and asyncio.iscoroutinefunction(akeep)
    assert (keep.__name__, keep.__doc__) == ("keep", "Keeps.") and memory.log.size == size
    with pytest.raises(TypeError):
        asyncio.run(akeep())


@pytest.mark.promise("1.5")
@pytest.mark.parametrize("way", ["execute", "safe_tool", "tool", "execute-a-tool"])
def test_whichever_way_it_is_called_all_of_it_is_in_the_log(kit: AgentKit, world: World, way: str) -> None:
    options = {"semantics": COMPENSABLE, "undo": world.undo}
    wrapped = tool("hotel.book", **options)(world.book)
    safe = kit.safe_tool(world.book, name="hotel.book", **options)
    with saga_scope(kit=kit) as saga:
        if way == "execute":
            saga.execute("hotel.book", world.book, {"what": "a"}, **options)
        elif way == "execute-a-tool":
            saga.execute("hotel.book", wrapped, {"what": "a"})
        else:
            assert {"safe_tool": safe, "tool": wrapped}[way]("a")["what"] == "a"
        world.refuse = [ValueError("sold out")]
        with pytest.raises(ValueError, match="sold out"):
            saga.execute("hotel.book", world.book, {"what": "b"}, **options)
    first, second = [record for record in kit.log.thread(saga.header_id) if record.entry.step == 1]
    fields = raw_fields(first.blob)
    assert first.entry.tool == "hotel.book" and fields["args"] == b'{"what":"a"}'
    assert b"kwargs" in fields["compensation"]
    assert b'"what":"a"' in raw_fields(second.blob)["result"]
    errors = [raw_fields(r.blob).get("error") for r in kit.log.thread(saga.header_id) if r.entry.kind == "step.failed"]
    assert errors == [b'"ValueError: sold out"']


def test_a_call_of_a_tool_that_does_not_fit_is_refused_before_it_runs(memory: AgentKit, world: World) -> None:
    book = tool("hotel", semantics=COMPENSABLE)(world.book)
    positional = tool("odd", semantics=COMPENSABLE)(lambda a, /: a)
    with saga_scope(kit=memory):
        for call in (lambda: book(), lambda: book("a", "k", "x"), lambda: book(wat=1), lambda: positional(1)):
            with pytest.raises(BadValue):
                call()
    assert world.calls == 0


def test_arguments_are_stored_by_name_however_they_are_passed(memory: AgentKit) -> None:
    @tool("t", semantics=REVERSIBLE)
    def t(a: int, b: int = 2, *, c: int = 3, **more: int) -> None:
        pass

    with saga_scope(kit=memory) as saga:
        t(1, b=5, d=6)
    assert b'"args":{"a":1,"b":5,"d":6}' in stored(memory, saga.header_id)


@pytest.mark.promise("1.18")
def test_a_class_comes_back_where_the_tool_says_so(kit: AgentKit) -> None:
    @dataclass
    class Booking:
        price: Decimal

    def book() -> Booking:
        return Booking(Decimal("4.20"))

    with saga_scope("trip", kit=kit) as saga:
        saga.execute("a", book, {}, semantics=COMPENSABLE, returns=Booking)
        saga.execute("b", book, {}, semantics=COMPENSABLE)
    with saga_scope("trip", kit=kit) as saga:
        assert saga.execute("a", book, {}, semantics=COMPENSABLE, returns=Booking) == Booking(Decimal("4.20"))
        assert saga.execute("b", book, {}, semantics=COMPENSABLE).price == Decimal("4.20")


@pytest.mark.promise("1.9")
def test_a_tool_can_be_the_fallback_of_another_with_what_it_declared(memory: AgentKit, world: World) -> None:
    other = tool("other", semantics=COMPENSABLE, compensate=world.compensate)(world.book)
    world.refuse = [ValueError()]
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=memory) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, fallback=other)
        assert list(fold(memory, saga.header_id).steps) == [1, 2], "no step within the step"
        raise ValueError
    assert aborted.value.report.clean and world.undos == ["a"]
    assert Fallback(world.book, undo=world.undo).undo == world.undo


# ---- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("14.2")
def test_a_secret_is_never_in_the_log_and_reaches_the_tool(kit: AgentKit) -> None:
    seen: list[Any] = []

    @tool("vendor.login", semantics=REVERSIBLE, secret=("api_key",))
    def login(user: str, api_key: str, pin: Secret[str], extra: dict[str, Any]) -> str:
        seen.extend([api_key, pin])
        return "in"

    with saga_scope(kit=kit) as saga:
        login("ann", "sk-hunter2", "hunter3", {"nested": Secret("hunter4")})
        saga.execute(
            "vendor.durable", lambda user, api_key: user, {"user": "ann", "api_key": "sk-hunter5"},
            semantics=COMPENSABLE, secret=("api_key",),
        )  # fmt: skip
    text = stored(kit, saga.header_id)
    assert b"ann" in text and b"hunter" not in text
    assert seen[0] == "sk-hunter2"


@pytest.mark.promise("1.5")
def test_a_result_is_kept_out_where_asked(kit: AgentKit) -> None:
    with saga_scope(kit=kit) as saga:
        saga.execute("t", lambda: "private words", {}, semantics=COMPENSABLE, store_result=False)
    assert b"private words" not in stored(kit, saga.header_id)


# ---- looking at callables --------------------------------------------------------------------------------------------


class Callable_:
    async def __call__(self, a: int, idempotency_key: str = "") -> None:
        pass

    def method(self, a: int, *, b: int, idempotency_key: str = "") -> None:
        pass


@pytest.mark.promise("1.10")
def test_only_a_named_parameter_takes_the_key() -> None:
    def named(idempotency_key: str) -> None: ...

    def keyword(*, idempotency_key: str = "") -> None: ...

    def open_ended(**kwargs: Any) -> None: ...

    def positional(idempotency_key: str, /) -> None: ...

    takes = [named, keyword, Callable_().method, Callable_(), functools.partial(named),
             functools.wraps(named)(lambda *args, **kwargs: None)]  # fmt: skip
    assert all(map(tools.takes_key, takes))
    assert not any(map(tools.takes_key, [open_ended, positional, print, int, lambda: None]))


def test_async_is_seen_through_partials_and_objects() -> None:
    async def a() -> None: ...

    assert all(map(tools.is_async, [a, functools.partial(a), Callable_(), functools.partial(functools.partial(a))]))
    assert not any(map(tools.is_async, [print, lambda: None, Callable_, functools.partial(print)]))


@pytest.mark.parametrize("kwargs", [{}, {"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, {"b": 1}, {"z": 1}])
def test_whether_a_call_fits_is_judged_as_python_does(kwargs: dict[str, Any]) -> None:
    fns: list[Any] = [
        lambda: 0, lambda a: 0, lambda a, b=2: 0, lambda a, *, b: 0, lambda a, *, b=1: 0, lambda **k: 0,
        lambda a, **k: 0, lambda *a: 0, lambda a, /: 0, Callable_().method, functools.partial(lambda a, b: 0, 1),
    ]  # fmt: skip
    for fn in fns:
        try:
            fn(**kwargs)
        except TypeError:
            fits = False
        else:
            fits = True
        assert (tools.misfit(fn, kwargs) == "") == fits, (fn, kwargs)


def test_keys_of_different_calls_differ() -> None:
    keys = {
        idempotency_key(*parts)
        for parts in [("a", "b", "c", "d"), ("ab", "", "c", "d"), ("a", "bc", "", "d"), ("a", "b", "c", "undo")]
    }
    assert len(keys) == 4 and all(len(key) == 32 and key.isalnum() for key in keys)
    assert current_saga() is None


@pytest.mark.promise("1.10")
def test_a_key_of_the_callers_own_is_what_is_sent_and_what_is_recorded(memory: AgentKit) -> None:
    sent: list[str] = []

    def pay(idempotency_key: str) -> None:
        sent.append(idempotency_key)

    def refund(idempotency_key: str) -> None:
        sent.append(idempotency_key)

    with pytest.raises(SagaAborted) as aborted, memory.transaction() as saga:
        undo = Compensation(refund, {"idempotency_key": "theirs-undo"})
        saga.execute("pay", pay, {"idempotency_key": "theirs"}, semantics=COMPENSABLE, undo=undo)
        raise ValueError("no")
    assert sent == ["theirs", "theirs-undo"]
    assert [step.idempotency_key for step in aborted.value.report.steps] == ["theirs"]
    keys = [r.entry.key for r in memory.log.records() if r.entry.kind in ("step.intended", "undo.intended")]
    assert keys == sent


def test_the_other_order_is_refused_with_ours(memory: AgentKit) -> None:
    with memory.transaction() as saga:
        for args in (
            ("pay", COMPENSABLE, lambda: 1),
            ("pay", COMPENSABLE, lambda: 1, {}),
            ("pay", COMPENSABLE, lambda: 1, {}, lambda result: None),
        ):
            with pytest.raises(BadValue, match="The order is"):
                saga.execute(*args)
