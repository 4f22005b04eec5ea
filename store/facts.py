"""The log's own kinds: what a device says about itself, not about its sagas. One row each in FORMAT.md."""

from __future__ import annotations

KINDS = {
    "log.opened": "the genesis: format version, keys and install id; for a new incarnation also what it follows",
    "log.booted": "gives a boot of the machine its ordinal, so that boot-clock times can be compared",
    "clock.stepped": "the wall clock jumped by more than two seconds against the boot clock",
}

GENESIS, BOOTED, STEPPED = KINDS
