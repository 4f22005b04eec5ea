"""What a vote says of its key is believed only where the key signed it.

Everybody who can write the log can write a `vote.cast` that names any key, with any counter. So whatever a vote does to
a key, stop a recovery or show how far it has counted, is read from the proof in the vote's own record, over the bytes
of that request and that verdict. The header only tells where to look.

Why not in the fold: no signature is in a header.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from ...store.errors import Malformed
from ...store.log import Log, Record
from ..openings import raw_fields
from .keyevent import Settings
from .proof import Credential, Unproven, Verified, verify
from .statement import decision

HEADER_MAX = 128


class Cast(NamedTuple):
    """A vote that names a key, as its record tells it. credential: as `header_id`."""

    seq: int
    credential: str
    request: str
    out: str
    proof: Mapping[str, Any]

    @property
    def answer(self) -> tuple[str, str, str]:
        """What was signed by whom: written down twice it is one answer still."""
        return self.credential, self.request, self.out


def header_id(id: str) -> str:
    """A credential in a header: its id, or the hash of one that is longer than a header may hold."""
    return id if len(id) <= HEADER_MAX else f"sha256:{sha256(id.encode()).hexdigest()[:48]}"


def casts(log: Log) -> Iterator[Cast]:
    """Every vote in a log that names a key, and has a proof. Reads all of it: ask only where a vote would matter."""
    for record in log.records(0):
        entry = record.entry
        if entry.kind == "vote.cast" and entry.credential:
            proof = proof_in(record)
            if proof is not None:
                yield Cast(entry.seq, entry.credential, entry.request, entry.out, proof)


def proof_in(record: Record) -> Mapping[str, Any] | None:
    """The proof in a vote's opening; None where there is none, or nothing that could be one."""
    try:
        said = msgspec.json.decode(raw_fields(record.blob)["proof"])
    except (KeyError, Malformed, msgspec.MsgspecError):
        return None
    return said if isinstance(said, dict) else None


def check_decision(
    key: Credential,
    settings: Settings,
    proof: Mapping[str, Any],
    request: str,
    verdict: str,
    verification: bool = False,
) -> Verified:
    """What a proof shows of one verdict on one request. Raises Unproven."""
    return verify(
        key, proof, decision(request, verdict), origins=frozenset(settings.origins), rp_id=settings.rp_id,
        algs=frozenset(settings.algs), verification=verification,
    )  # fmt: skip


def shown(cast: Cast, key: Credential, settings: Settings) -> Verified | None:
    """What a vote shows if this key signed it; None if it did not. Raises Unproven where this device cannot tell."""
    if cast.credential != header_id(key.id) or cast.proof.get("credential") != key.id:
        return None
    try:
        return check_decision(key, settings, cast.proof, cast.request, cast.out)
    except Unproven as error:
        if error.code == "es256_extra_missing":
            raise
        return None


def counts(log: Log, key: Credential, settings: Settings) -> list[tuple[int, int]]:
    """How far a key had counted in each vote that it signed: record, counter."""
    found = ((cast.seq, shown(cast, key, settings)) for cast in casts(log))
    return [(seq, one.counter) for seq, one in found if one is not None]
