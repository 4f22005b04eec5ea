"""What the tests of approvals share: facts of a question by hand, a keyring with people in it, a question in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from soft_keys import SoftPasskey, SoftRaw
from world import eventually

from amends import IRREVERSIBLE, AgentKit
from amends.runtime.gate import ceremonies
from amends.runtime.gate.approvals import Asked
from amends.runtime.gate.proof import base64url
from amends.runtime.gate.signing import Review, review
from amends.runtime.state import State
from amends.store.entry import Entry

SAGA, REQUEST, OTHER = "s" * 26, "a" * 64, "b" * 64


class Facts:
    """A state that is told facts by hand, each with the next place in the log. lived: milliseconds, set by the test."""

    def __init__(self) -> None:
        self.state, self.seq, self.lived, self.n = State(), 0, 0, 0

    def tell(self, kind: str, **fields: Any) -> Entry:
        """Fold one more fact. Raises Illegal."""
        self.seq += 1
        entry = Entry(self.seq, "0" * 64, self.seq * 1000, kind, up=(1, self.lived), **fields)
        self.state.fold(entry, self.lived)
        return entry

    def ask(self, request: str = REQUEST, step: int = 1, **fields: Any) -> Entry:
        """A question in a saga of its own, which is opened first."""
        if SAGA not in self.state.sagas:
            self.tell("saga.opened", saga=SAGA, n=1, fence=1, driver="d" * 26)
        given: dict[str, Any] = dict(
            tool="bank.wire", sem="irreversible", key="k1", request=request, level=1, quorum=1, within_ms=1000,
        )  # fmt: skip
        return self.tell("step.asked", saga=SAGA, step=step, fence=1, **(given | fields))

    def vote(self, out: str, person: str, request: str = REQUEST, step: int = 1, **fields: Any) -> Entry:
        given: dict[str, Any] = dict(level=1)
        return self.tell("vote.cast", of=SAGA, step=step, request=request, out=out, person=person, **(given | fields))

    def intend(self, request: str = REQUEST, step: int = 1, **fields: Any) -> Entry:
        given: dict[str, Any] = dict(tool="bank.wire", sem="irreversible", key="k1", request=request)
        return self.tell("step.intended", saga=SAGA, step=step, fence=1, **(given | fields))

    def refuse(self, why: str, step: int = 1, **fields: Any) -> Entry:
        return self.tell("step.refused", saga=SAGA, step=step, fence=1, why=why, **fields)


class People:
    """A keyring in a kit: each person has a key of software; Ann and Bob are admins and approvers."""

    def __init__(self, kit: AgentKit, **roles: tuple[str, ...]) -> None:
        self.kit = kit
        both = ("admin", "approver")
        named = {"Ann": both, "Bob": both} | roles
        self.keys = {
            name: SoftPasskey(bytes([place + 1]) * 32, credential=bytes([place + 1]) * 16)
            for place, name in enumerate(named)
        }
        credentials = tuple(self.keys[name].enrolled(person=name, roles=named[name]) for name in named)
        self.recovery = SoftRaw(b"\77" * 32)
        event = ceremonies.begin(
            kit, "founded", keys=credentials, recovery=base64url(self.recovery.public), settings=ceremonies.Settings()
        )
        ceremonies.submit(kit, event, [key.get(event.signed) for key in self.keys.values()])

    def yes(self, name: str, seen: Review, **lies: Any) -> dict[str, Any]:
        """What the key of a person makes of an approve."""
        return self.keys[name].get(seen.approve, **lies)

    def no(self, name: str, seen: Review) -> dict[str, Any]:
        return self.keys[name].get(seen.deny)

    def revoke(self, name: str, by: str) -> None:
        event = ceremonies.begin(self.kit, "revoked", credential=base64url(self.keys[name].credential))
        ceremonies.submit(self.kit, event, [self.keys[by].get(event.signed)])


class Asking:
    """A saga on a thread that wants one irreversible step. done: its result, or what it raised."""

    def __init__(self, kit: AgentKit, effect: Callable[..., Any], kwargs: dict[str, Any], **options: Any) -> None:
        self.kit, self.done = kit, []
        self._known = {asked.request for asked in kit.engine.state.approvals.open}
        scope = {name: options.pop(name) for name in ("id", "on_crash", "resume_within") if name in options}
        self._work = lambda: self._go(scope, effect, kwargs, options)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _go(self, scope: dict[str, Any], effect: Callable[..., Any], kwargs: Any, options: dict[str, Any]) -> None:
        try:
            with self.kit.transaction(**scope) as saga:
                options.setdefault("semantics", IRREVERSIBLE)
                self.done.append(saga.execute("bank.wire", effect, kwargs, **options))
        except BaseException as error:
            self.done.append(error)

    @property
    def asked(self) -> Asked:
        """Its newest request, once there is one."""
        eventually(lambda: self.done or self._open())
        assert not self.done, self.done
        return self._open()[-1]

    def _open(self) -> list[Asked]:
        self.kit.log.refresh()
        return [asked for asked in self.kit.engine.state.approvals.open if asked.request not in self._known]

    def seen(self) -> Review:
        """The request as a person sees it."""
        from amends.runtime.inbox import item_id

        return review(self.kit, item_id("approval", self.kit.log.record(self.asked.seq).line))

    def end(self) -> Any:
        """What came of it."""
        self.thread.join(20)
        assert not self.thread.is_alive(), "it waits still"
        return self.done[0]

    def code(self) -> str:
        """The code of the refusal that came of it."""
        error = self.end()
        cause: Any = getattr(error, "cause", error)
        return str(getattr(cause, "code", repr(cause)))
