"""All views of a device, composed: what every decision is asked against.

Adding a feature is adding its view here. The log folds entries in; `archive` is that log, for the one question a
fold of open things cannot answer: what an ended saga was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..store.entry import Entry
from ..store.errors import Illegal
from .drift import Drifts
from .gate.approvals import Approvals
from .gate.breaker import Breakers
from .gate.clock import Accepted
from .gate.keyring import Keys
from .gate.limits import Meters
from .gate.locks import Locks
from .gate.switch import Switches
from .notices import Notices
from .saga import ENDED, Saga, apply, opened, replay

VIEWS = {
    "switches": Switches,
    "breakers": Breakers,
    "meters": Meters,
    "locks": Locks,
    "approvals": Approvals,
    "clock": Accepted,
    "keys": Keys,
    "drifts": Drifts,
    "notices": Notices,
}
"""Every view beside that of sagas. It checks (`check`) before any of them changes (`fold`), in this order: what is told
to people looks at what has become of the drift it was about."""


class Kept(msgspec.Struct):
    sagas: dict[str, Saga]
    views: dict[str, Any]


class State:
    """The open sagas of one device and the way to the ended ones; what the gate and the human queue ask beside them."""

    version = 5

    switches: Switches
    breakers: Breakers
    meters: Meters
    locks: Locks
    approvals: Approvals
    clock: Accepted
    keys: Keys
    drifts: Drifts
    notices: Notices

    def __init__(self) -> None:
        self.sagas: dict[str, Saga] = {}
        self.inside: dict[str, list[str]] = {}  # parent -> the open sagas inside it, oldest first
        self.archive: Any = None
        self._checks: dict[str, list[Callable[..., None]]] = {}
        self._folds: dict[str, list[Callable[..., None]]] = {}
        for name, make in VIEWS.items():
            view: Any = make()
            setattr(self, name, view)
            for kind in view.KINDS:
                self._folds.setdefault(kind, []).append(view.fold)
                if hasattr(view, "check"):
                    self._checks.setdefault(kind, []).append(view.check)

    def fresh(self) -> State:
        state = State()
        state.archive = self.archive
        return state

    def fold(self, entry: Entry, lived: int) -> None:
        if entry.kind == "saga.opened" and entry.saga in (entry.parent, entry.of):
            raise Illegal("A saga is not inside of itself, and does not follow itself.")
        if entry.kind in self._checks:
            for check in self._checks[entry.kind]:
                check(entry, self)
        if entry.saga:
            self._fold_saga(entry, lived)
        if entry.kind in self._folds:
            for fold in self._folds[entry.kind]:
                fold(entry, lived, self)

    def _fold_saga(self, entry: Entry, lived: int) -> None:
        saga = self.sagas.get(entry.saga)
        if saga is None:
            self.sagas[entry.saga] = opened(entry, lived)
            if entry.parent:
                self.inside.setdefault(entry.parent, []).append(entry.saga)
            return
        apply(saga, entry, lived)
        if saga.phase == ENDED:
            del self.sagas[entry.saga]
            self.inside.pop(entry.saga, None)
            if saga.parent in self.inside:
                self.inside[saga.parent].remove(entry.saga)

    def family(self, saga: Saga) -> list[Saga]:
        """A saga and the open ones inside it, outermost first."""
        family = [saga]
        seen = {saga.id}
        for member in family:
            inside = [name for name in self.inside.get(member.id, ()) if name not in seen]
            seen.update(inside)
            family.extend(self.sagas[name] for name in inside)
        return family

    def root(self, saga: Saga) -> Saga:
        """The outermost open saga whose fate this one shares."""
        seen = {saga.id}
        while saga.parent in self.sagas and saga.parent not in seen:
            saga = self.sagas[saga.parent]
            seen.add(saga.id)
        return saga

    def roots(self) -> Iterator[Saga]:
        """Open sagas that decide their own fate."""
        # A snapshot: another thread's commit may fold a new saga in while the caller looks.
        return (saga for saga in list(self.sagas.values()) if not (saga.parent and saga.parent in self.sagas))

    def past(self, name: str, *, derived: bool = False) -> Saga | None:
        """A saga by header id, open or ended; None if this device never had it. derived: the id was made from a name,
        and whoever opened such a saga wrote that name beside it, so an index knows it."""
        found = self.sagas.get(name)
        if found is None and self.archive is not None:
            found = replay(record.entry for record in self.archive.thread(name, named=derived))
        return found

    def dump(self) -> bytes:
        return msgspec.msgpack.encode(Kept(self.sagas, {name: getattr(self, name).dump() for name in VIEWS}))

    def load(self, blob: bytes) -> None:
        kept = msgspec.msgpack.decode(blob, type=Kept)
        self.sagas = kept.sagas
        for name, raw in kept.views.items():
            getattr(self, name).load(raw)
        self.inside = {}
        for saga in self.sagas.values():
            if saga.parent:
                self.inside.setdefault(saga.parent, []).append(saga.id)
