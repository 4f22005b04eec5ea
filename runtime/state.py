"""All views of a device, composed: what every decision is asked against.

Adding a feature is adding its view here. The log folds entries in; `archive` is that log, for the one question a
fold of open things cannot answer: what an ended saga was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ..store.entry import Entry
from .saga import ENDED, Saga, apply, opened, replay


class Kept(msgspec.Struct):
    sagas: dict[str, Saga]


class State:
    """The open sagas of one device, and the way to the ended ones."""

    version = 1

    def __init__(self) -> None:
        self.sagas: dict[str, Saga] = {}
        self.inside: dict[str, list[str]] = {}  # parent -> the open sagas inside it, oldest first
        self.archive: Any = None

    def fresh(self) -> State:
        state = State()
        state.archive = self.archive
        return state

    def fold(self, entry: Entry, lived: int) -> None:
        if not entry.saga:
            return
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
        for member in family:
            family.extend(self.sagas[name] for name in self.inside.get(member.id, ()))
        return family

    def root(self, saga: Saga) -> Saga:
        """The outermost open saga whose fate this one shares."""
        while saga.parent and saga.parent in self.sagas:
            saga = self.sagas[saga.parent]
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
        return msgspec.msgpack.encode(Kept(self.sagas))

    def load(self, blob: bytes) -> None:
        self.sagas = msgspec.msgpack.decode(blob, type=Kept).sagas
        self.inside = {}
        for saga in self.sagas.values():
            if saga.parent:
                self.inside.setdefault(saga.parent, []).append(saga.id)
