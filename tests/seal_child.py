"""A process that seals, unseals, rotates or writes, and sends itself SIGKILL around its n-th COMMIT.

`seal_child.py HOME WHAT KEYFILE... -- N before|after`: WHAT is seal, unseal, rotate or write. The first key file is the
key in force (or to be), the second the new one of a rotation. N 0: it lives.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import apsw

from amends.runtime.owner_key import owner_from
from amends.store import sealing
from amends.store.chain import Draft
from amends.store.fold import NoView
from amends.store.identity import open_log

_PLAN = {"n": 0, "when": "before", "seen": 0}


def _perhaps(when: str) -> None:
    if _PLAN["n"] and _PLAN["seen"] == _PLAN["n"] and _PLAN["when"] == when:
        os.kill(os.getpid(), signal.SIGKILL)


class Cursor(apsw.Cursor):
    def execute(self, sql: Any, *args: Any, **named: Any) -> Any:
        if sql != "commit":
            return super().execute(sql, *args, **named)
        _PLAN["seen"] += 1
        _perhaps("before")
        done = super().execute(sql, *args, **named)
        _perhaps("after")
        return done


class Connection(apsw.Connection):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.cursor_factory = Cursor


def main() -> None:
    home, what, *rest = sys.argv[1:]
    keys, (n, when) = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    first, *others = [owner_from(f"file:{key}") for key in keys]
    apsw.Connection = Connection  # type: ignore[misc]
    sealing.PAGE = 7  # so that few records are several transactions
    log = open_log(Path(home), NoView(), owner=lambda: first, warn=lambda text: None)
    _PLAN.update(n=int(n), when=when, seen=0)
    if what == "seal":
        sealing.begin(log, first, "ann")
        sealing.finish(log)
    elif what == "unseal":
        sealing.end(log, "ann")
        sealing.finish(log)
    elif what == "rotate":
        sealing.rotate(log, others[0], "ann")
    else:
        log.commit(lambda view, now: [Draft("saga.opened", {"saga": "late"}, (b'{"args":"PLAINTEXT late"}',))])
    log.finish_erasing(2.0)
    log.close()


if __name__ == "__main__":
    main()
