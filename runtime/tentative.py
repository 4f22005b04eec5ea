"""Tentative: what a saga holds provisionally, and what becomes of it is the saga's own fate.

    with saga_scope() as saga:
        saga.tentative("account:usr_123", confirm=capture, cancel=release, lock=True)

It is PENDING, durably, before the call returns, and whoever cares can ask (`tentative_status`). When the outermost saga
ends well, `confirm` runs and it is COMMITTED; when the saga is undone, `cancel` runs in its place among the other
inverses and it is ROLLED_BACK. Each runs under an idempotency key of its own. That the saga stands is a fact of its own
(`saga.concluding`), before the first confirmation: from there on whoever is left goes on confirming, and nothing of
that saga is undone any more, whatever dies. A confirmation that fails goes to a person; the saga stays open until then.

It is a step without a forward, intent and outcome in one commit: so what undoes, shows, carries and takes over steps
need not know of it, and no crash leaves one of which nobody knows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from ..store.errors import BadValue, NotFound
from .drive import LOOPING, Drive
from .engine import Engine, Run, mark
from .perform import Call
from .saga import Saga
from .semantics import ActionSemantics
from .step import ACCEPTED, COMPENSATED, CONFIRMED, Step
from .tools import Compensation

if TYPE_CHECKING:
    from .kit import AgentKit
    from .scope import AsyncSaga, SyncSaga

TOOL = "tentative"
PAGE = 2_000


class TentativeStatus(enum.Enum):
    """What became of something tentative."""

    PENDING = "PENDING"
    COMMITTED = "COMMITTED"
    ROLLED_BACK = "ROLLED_BACK"
    ACCEPTED = "ACCEPTED"
    """It could not be resolved, and a named person accounts for it as it is."""


_STATUS = {CONFIRMED: TentativeStatus.COMMITTED, COMPENSATED: TentativeStatus.ROLLED_BACK,
           ACCEPTED: TentativeStatus.ACCEPTED}  # fmt: skip


def status_of(step: Step) -> TentativeStatus:
    """The status of a tentative step."""
    return _STATUS.get(step.state, TentativeStatus.PENDING)


class TentativeResource:
    """Something that a saga holds provisionally. `status` is asked of the log each time. In an async saga, await it."""

    def __init__(self, made: Run, call: Call) -> None:
        self._run, self._call = made, call
        self.resource_id = str(call.kwargs["resource"])
        self.metadata = {name: value for name, value in call.kwargs.items() if name != "resource"}

    async def mark(self, drive: Drive) -> TentativeResource:
        """Mark it, once: it is pending, durably, when this returns. Raises Refused, Fenced."""
        if not self.marked:
            await mark(drive, self._run, self._call)
        return self

    def __await__(self) -> Generator[Any, None, TentativeResource]:
        return self.mark(LOOPING).__await__()

    @property
    def marked(self) -> bool:
        """Whether it is; in an async saga it is not before it is awaited."""
        return self._step() is not None

    def _step(self) -> Step | None:
        saga: Saga | None = self._run.engine.state.past(self._run.id)
        return saga.steps.get(self._call.number) if saga is not None else None

    @property
    def saga_id(self) -> str:
        """The id of the saga that holds it."""
        return self._run.name

    @property
    def status(self) -> TentativeStatus:
        """What became of it. Raises NotFound before it is awaited."""
        engine = self._run.engine
        engine.log.refresh()
        saga: Saga | None = engine.state.past(self._run.id)
        step = self._step()
        if saga is None or step is None:
            raise NotFound(f"{self.resource_id} is not marked yet.", next="Await saga.tentative(…).")
        if saga.out == "continued":  # it went along into the saga after this one
            step = _newest(engine, self._call.resource) or step
        return status_of(step)

    @property
    def is_pending(self) -> bool:
        return self.status is TentativeStatus.PENDING

    @property
    def resolved(self) -> bool:
        return not self.is_pending

    @property
    def recoverable(self) -> bool:
        """Whether another process, after a crash, finds what confirms and cancels it."""
        step = self._step()
        return step is not None and not (
            (step.confirm == "declared" and not step.confirmer) or (step.inv == "declared" and not step.handler)
        )

    def __repr__(self) -> str:
        return f"<TentativeResource {self.resource_id!r}>"


def call_of(
    engine: Engine, resource: object, confirm: object, cancel: object, lock: bool, lock_timeout: float | None,
    metadata: Mapping[str, Any],
) -> Call:  # fmt: skip
    """The step that marks a resource; its arguments are still to be encoded. Raises BadValue."""
    if not isinstance(resource, str) or not 0 < len(resource) <= 1024:
        raise BadValue(f"A tentative resource is text of 1 to 1024 characters; this is {repr(resource)[:80]}.")
    if "resource" in metadata:
        raise BadValue("The metadata of a tentative resource has no `resource`: that is its id.")
    return Call(
        TOOL, ActionSemantics.COMPENSABLE, _nothing, {"resource": resource, **metadata}, named=True, settle=0.001,
        undo=_handler("cancel", cancel), store_result=False, resource=engine.meter(f"{TOOL}\0{resource}"),
        confirm=_handler("confirm", confirm), locks=(resource,) if lock else (), lock_timeout=lock_timeout,
    )  # fmt: skip


def _nothing() -> None:
    """What a tentative step does: that it is marked is all."""


def _handler(name: str, given: object) -> Compensation | None:
    if given is None or isinstance(given, Compensation):
        return given
    if callable(given):
        return Compensation(given)
    raise BadValue(f"{name}={given!r}: a Compensation or a function is asked.", next="Write Compensation(handler=…).")


def tentative(
    saga: SyncSaga | AsyncSaga,
    resource_id: str,
    *,
    on_commit: Compensation | Callable[..., Any] | None = None,
    on_rollback: Compensation | Callable[..., Any] | None = None,
    rollback_handler: str | None = None,
    rollback_kwargs: Mapping[str, Any] | None = None,
    lock: bool = False,
    lock_timeout: float | None = None,
    **metadata: Any,
) -> Any:
    """`saga.tentative(…)` in the words of other saga libraries; in an async saga, await it.

    rollback_handler names what cancels it, in place of on_rollback. Raises BadValue, Refused (`lock_timeout`).
    """
    if rollback_handler is not None:
        if on_rollback is not None:
            raise BadValue(
                "on_rollback and rollback_handler both cancel it.",
                next="Name the handler alone: it runs in this process too.",
            )
        on_rollback = Compensation(handler=rollback_handler, kwargs=rollback_kwargs)
    return saga.tentative(
        resource_id, confirm=on_commit, cancel=on_rollback, lock=lock, lock_timeout=lock_timeout, **metadata
    )


# ---- what became of it -----------------------------------------------------------------------------------------------


def tentative_status(kit: AgentKit, resource: str) -> TentativeStatus | None:
    """What became of a resource when it was tentative last; None if this device never had it so.

    The newest saga that marked it is looked for from the end of the log: what was marked long ago takes a while.
    """
    kit.log.refresh()
    found = _newest(kit.engine, kit.meter(f"{TOOL}\0{resource}"))
    return status_of(found) if found is not None else None


def _newest(engine: Engine, resource: str) -> Step | None:
    """The newest step that marked a resource, which is given as it stands in headers."""
    log, state = engine.log, engine.state
    open_ones = [
        step for saga in list(state.sagas.values()) for step in list(saga.steps.values()) if step.resource == resource
    ]
    best = max(open_ones, key=lambda step: step.seq, default=None)
    stop = log.size
    least = best.seq if best is not None else -1
    while stop > least + 1:
        start = max(least + 1, stop - PAGE)
        for record in reversed(list(log.records(start, stop))):
            if record.entry.resource == resource:
                saga: Saga | None = state.past(record.entry.saga)
                return saga.steps[record.entry.step] if saga is not None else None
        stop = start
    return best
