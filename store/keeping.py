"""What a device has done with its own log: holds, seals, erasures and copies, folded beside the sagas.

It is what a redaction, a compaction or a key that is forgotten has to be asked against, on any floor: a hold forbids
them, a copy that was handed out is out of their reach and is named, and an erasure is not done before the bytes are out
of the file and its -wal (`erasure.done`).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .entry import COMMITMENTS_MAX, Entry
from .errors import Illegal
from .facts import COMPACTED, COPIED, ERASED, FORGOTTEN, HELD, LIFTED, REDACTED, ROTATED, SEALED, UNSEALED

EVERYTHING = "*"
"""The target of a hold on the whole log."""

ERASES = frozenset({REDACTED, COMPACTED, FORGOTTEN, SEALED, ROTATED})
"""Kinds after which bytes have to leave the file."""

KINDS = frozenset({REDACTED, HELD, LIFTED, COMPACTED, SEALED, ROTATED, UNSEALED, FORGOTTEN, ERASED, COPIED})


class Copy(msgspec.Struct, array_like=True, frozen=True):
    """A copy that left: place of its fact, what it is (bundle, dump, backup, disclosure, certificate), its id, of how
    many records, what it carries of their openings (none, plain, sealed)."""

    seq: int
    out: str
    id: str
    size: int
    payload: str


class Keeping(msgspec.Struct):
    """holds: place of a hold -> the header id of a saga, or EVERYTHING. seal: id of the owner's key in force, empty for
    plain text; former: ids of those that were. forgotten: header ids of sagas. erasing: size of the log after the
    newest fact that destroyed something; erased: up to which size that is done. compacted: size of the log after the
    newest compaction."""

    holds: dict[int, str] = {}
    seal: str = ""
    forgotten: list[str] = []
    copies: list[Copy] = []
    erasing: int = 0
    erased: int = 0
    former: list[str] = []
    compacted: int = 0

    def check(self, entry: Entry) -> None:
        """Raise Illegal for a fact that cannot follow; change nothing."""
        kind = entry.kind
        if kind == LIFTED and entry.ref not in self.holds:
            raise Illegal(f"Record {entry.ref} is no hold that stands.")
        if kind == SEALED and (self.seal or not entry.seal):
            raise Illegal("A log is sealed once, under a key with an id.")
        if kind == ROTATED and (not self.seal or entry.prior != self.seal or not entry.seal):
            raise Illegal("A seal is rotated from the key in force to another one.")
        if kind == UNSEALED and (not self.seal or entry.prior != self.seal):
            raise Illegal("A seal ends that is in force.")
        if kind == FORGOTTEN and (not self.seal or not entry.target):
            raise Illegal("A saga is forgotten of a log that is sealed.")
        if kind == ERASED and not self.erased < entry.upto <= self.erasing:
            raise Illegal("An erasure is done once, and of what was destroyed before.")
        if kind in (REDACTED, COMPACTED) and not (entry.places or entry.runs):
            raise Illegal(f"{kind} names nothing.")
        if any(seq >= entry.seq or place >= COMMITMENTS_MAX for seq, place in entry.places):
            raise Illegal(f"{kind} names a place that no record before it has.")
        if kind == COPIED and entry.upto > entry.seq:
            raise Illegal(f"A copy of {entry.upto} records, where there are {entry.seq}.")

    def fold(self, entry: Entry) -> None:
        """Take in a fact that was checked."""
        kind = entry.kind
        if kind in (ROTATED, UNSEALED):
            self.former.append(entry.prior)
        if kind == HELD:
            self.holds[entry.seq] = entry.target or EVERYTHING
        elif kind == LIFTED:
            del self.holds[entry.ref]
        elif kind in (SEALED, ROTATED):
            self.seal = entry.seal
        elif kind == UNSEALED:
            self.seal = ""
        elif kind == FORGOTTEN and entry.target not in self.forgotten:
            self.forgotten.append(entry.target)
        elif kind == COPIED:
            self.copies.append(Copy(entry.seq, entry.out, entry.event, entry.upto, entry.payload))
        elif kind == ERASED:
            self.erased = entry.upto
        elif kind == COMPACTED:
            self.compacted = entry.seq + 1
        if kind in ERASES:
            self.erasing = entry.seq + 1

    @property
    def unfinished(self) -> bool:
        """Whether something was destroyed that may still be found in the file."""
        return self.erasing > self.erased

    def held(self, saga: str) -> int | None:
        """The place of a hold that forbids to take from a saga; None if none does."""
        return next((seq for seq, target in self.holds.items() if target in (saga, EVERYTHING)), None)

    def reaching(self, seq: int) -> Iterator[Copy]:
        """The copies that carry the openings of the record at this place."""
        return (copy for copy in self.copies if copy.size > seq and copy.payload != "none")
