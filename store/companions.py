"""What is said about a saga outside of it goes when the saga goes: votes, messages, reviews, what the world said.

Such a record is in no saga, so that it can be written when its saga has ended. It names what it is about: a saga
(`of`), a question that one asked (`request`), or, if it names neither, another record of this sort (`ref`). That is all
that is asked here, whatever its kind is called. The records of control never go: they are about the log and its keys,
also where they name a saga. One that names a saga and a question of another one is about both, and stays.
"""

from __future__ import annotations

from collections.abc import Container

from .entry import Entry
from .facts import KINDS

CONTROL = frozenset(KINDS)
CONTROL_FAMILIES = ("key.", "switch.")


def controls(kind: str) -> bool:
    """Whether records of this kind say who may do what, or what was done with the log."""
    return kind in CONTROL or kind.startswith(CONTROL_FAMILIES)


class Companions:
    """Whose the records of some sagas are, and those that are about one of them. sagas: header ids, of which there may
    be more while it goes on."""

    def __init__(self, sagas: Container[str]) -> None:
        self._sagas = sagas
        self._requests: dict[str, str] = {}  # -> the saga that asked; empty if two did
        self._places: dict[int, str] = {}  # of companions

    def whose(self, entry: Entry) -> str:
        """The saga that a record is of, or that it is about and nothing else; empty if it is none of these. Called with
        each record in order, since later ones hang on earlier ones."""
        saga = entry.saga or self._about(entry)
        if saga not in self._sagas:
            return ""
        if not entry.saga:
            self._places[entry.seq] = saga
        elif entry.request and self._requests.setdefault(entry.request, saga) != saga:
            self._requests[entry.request] = ""
        return saga

    def _about(self, entry: Entry) -> str:
        if entry.part or controls(entry.kind):
            return ""
        asker = self._requests.get(entry.request, "") if entry.request else entry.of
        if entry.of or entry.request:
            return asker if entry.of in ("", asker) else ""
        return self._places.get(entry.ref, "")
