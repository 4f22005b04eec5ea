"""What a seal costs: microseconds per opening, written and read, beside the same log in plain text.

    python3 bench/sealing.py [OPENINGS]

A saga each 20 records, one opening of 300 bytes each; commits of 100 records to the file (not to the disk), so that the
difference is the seal's. Processor time, the least of five.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from amends.store import sealing
from amends.store.chain import Draft
from amends.store.fold import NoView
from amends.store.identity import open_log
from amends.store.log import FILED
from amends.store.seal import Owner

BODY = b'{"args":"%s"}' % (b"x" * 290)
EACH = 100


def written(log: object, openings: int, round: int) -> float:
    """Seconds to write so many openings."""
    began = process_time()
    for place in range(0, openings, EACH):
        drafts = []
        for n in range(place, place + EACH):
            saga = f"{round}.{n // 20}"
            drafts.append(Draft("saga.opened" if n % 20 == 0 else "step.done", {"saga": saga}, (BODY,)))
        log.commit(lambda view, now, drafts=drafts: drafts, FILED)  # type: ignore[attr-defined]
    return process_time() - began


def read(log: object) -> float:
    began = process_time()
    for _ in log.records():  # type: ignore[attr-defined]
        continue
    return process_time() - began


def main() -> None:
    openings = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AMENDS_ANCHORS"] = f"{folder}/anchors"
        log = open_log(Path(folder) / "home", NoView(), warn=lambda text: None)
        plain = min(written(log, openings, n) for n in range(5))
        plain_read = min(read(log) for _ in range(5)) / (log.size / openings)
        began = perf_counter()
        sealing.begin(log, Owner(os.urandom(32)), "bench")
        sealing.finish(log)
        converted = (perf_counter() - began) / log.size
        sealed = min(written(log, openings, 5 + n) for n in range(5))
        sealed_read = min(read(log) for _ in range(5)) / (log.size / openings)
        log.close()
    us = 1e6 / openings
    for what, before, after in (("written", plain, sealed), ("read", plain_read, sealed_read)):
        more = f"+{(after - before) * us:.1f} us an opening"
        print(f"{what:<9} plain {before * us:6.1f} us   sealed {after * us:6.1f} us   {more}")
    print(f"older openings are sealed at {1 / converted:,.0f} a second")


if __name__ == "__main__":
    main()
