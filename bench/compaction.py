"""Most records of a large log are removed while it stays open: how long, how large meanwhile, and what is left.

    python bench/compaction.py [RECORDS] [FOLDER]

One row a share that is kept: none of the old sagas, every tenth of them, ten in a row out of a hundred. Sizes are of
the database and its -wal; the largest is looked at after every statement.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amends import AgentKit
from amends.runtime.facts import body, fact
from amends.store.compact import compact

STEPS = 2
A_SAGA = 2 + 2 * STEPS
SHARES: dict[str, Callable[[int], bool]] = {
    "nothing kept": lambda number: False,
    "every tenth saga kept": lambda number: number % 10 == 0,
    "ten of a hundred kept": lambda number: number % 100 < 10,
}


def saga(name: str) -> list[Any]:
    """Two compensable steps with arguments and results of usual size."""
    drafts = [fact("saga.opened", body(label=b'"order"'), saga=name, fence=1, driver="bench", up=True)]
    for step in range(1, STEPS + 1):
        args = b'{"amount_minor":4200,"customer":"%b"}' % os.urandom(16).hex().encode()
        drafts.append(fact(
            "step.intended", body(args=args), saga=name, step=step, fence=1, tool="stripe.charge", sem="compensable",
            inv="declared", handler="stripe.refund", key=name, up=True,
        ))  # fmt: skip
        result = b'{"id":"ch_%b"}' % os.urandom(12).hex().encode()
        drafts.append(fact("step.done", body(result=result), saga=name, step=step, fence=1, up=True))
    return [*drafts, fact("saga.ended", saga=name, fence=1, out="committed")]


def made(folder: Path, records: int) -> list[str]:
    """A home with so many records."""
    names = [f"{number:026d}" for number in range(records // A_SAGA)]
    with AgentKit(home=folder) as kit:
        for at in range(0, len(names), 50):
            drafts = [draft for name in names[at : at + 50] for draft in saga(name)]
            kit.log.commit(lambda state, now, drafts=drafts: drafts)
    return names[: -1000 // A_SAGA]


def measured(folder: Path, names: list[str], kept: Callable[[int], bool]) -> str:
    with AgentKit(home=folder, warn=lambda text: None) as kit:
        log: Any = kit.log
        log.truncate()
        begun = most = size(log)

        def watched(call: Callable[..., Any]) -> Callable[..., Any]:
            def look(*args: Any) -> Any:
                nonlocal most
                try:
                    return call(*args)
                finally:
                    most = max(most, size(log))

            return look

        log._db.run, log._db.many = watched(log._db.run), watched(log._db.many)
        going = [name for number, name in enumerate(names) if not kept(number)]
        since = time.perf_counter()
        done = compact(log, going, within_ms=1, use=lambda name: {"sagas": 1})
        took = time.perf_counter() - since
        log.truncate()
        mb = 1 << 20
        return (
            f"{done.entries:,} of {log.size:,} records in {took:.1f} s; {begun / mb:.1f} MB, at most {most / mb:.1f} "
            f"({most / begun:.2f} x), then {size(log) / mb:.1f} ({size(log) / begun:.2f} x); {len(done.left)} left"
        )


def size(log: Any) -> int:
    return sum(os.path.getsize(log.path + end) for end in ("", "-wal"))


def main(records: int, folder: Path) -> int:
    os.environ["AMENDS_ANCHORS"] = str(folder / "anchors")
    names = made(folder / "kept", records)
    for share, kept in SHARES.items():
        home = folder / "home"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(folder / "kept", home)
        print(f"  {share:24s} {measured(home, names, kept)}", flush=True)
        shutil.rmtree(folder / "anchors")
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as place:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000, Path(place)))
