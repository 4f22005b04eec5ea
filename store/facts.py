"""The log's own kinds: what a device says about itself, not about its sagas. One row each in FORMAT.md."""

from __future__ import annotations

KINDS = {
    "log.opened": "the genesis: format version, keys and install id; for a new incarnation also what it follows",
    "log.booted": "gives a boot of the machine its ordinal, so that boot-clock times can be compared",
    "clock.stepped": "the wall clock jumped by more than two seconds against the boot clock",
    "redaction.made": "openings were destroyed: which, on what basis, and who decided",
    "hold.placed": "a person forbids to redact, compact or forget a saga, or anything",
    "hold.lifted": "a person lifts a hold",
    "compaction.made": "records of settled sagas were removed; the hashes that the tree needs of them were kept",
    "seal.begun": "openings are sealed from here on, under the owner's key with this id",
    "seal.rotated": "the keys of the sagas are wrapped under another owner's key",
    "seal.ended": "openings lie in plain text again",
    "seal.forgotten": "the key of a saga was destroyed: its openings cannot be read in any copy",
    "erasure.done": "what was destroyed before is in no page of the database and its -wal any more",
    "copy.made": "a copy left (bundle, dump, backup, disclosure, certificate): of how many records, with which payload",
}

GENESIS, BOOTED, STEPPED = list(KINDS)[:3]
REDACTED, HELD, LIFTED, COMPACTED = list(KINDS)[3:7]
SEALED, ROTATED, UNSEALED, FORGOTTEN = list(KINDS)[7:11]
ERASED, COPIED = list(KINDS)[11:]
