"""The compensation of the benched tool, in a file of its own: a recovery of ours finds it again in another process."""

from __future__ import annotations

from amends import compensator


@compensator("bench.noop")
async def put_back(record_id: str, idempotency_key: str = "") -> None:
    return None
