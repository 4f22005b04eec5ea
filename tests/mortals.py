"""A ledger in a process of its own, and processes that die where they are told to: what tests of deaths stand on.

The fixtures `ledger` and `mortals` (conftest.py) make one of each, and end them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KILLED = -signal.SIGKILL


class Ledger:
    """The far side, in a process of its own."""

    def __init__(self) -> None:
        code = "from amends.cli.ledger import Service; s = Service(); print(s.url, flush=True); s.serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )  # a caller that is killed resets its connection, which the server says
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def told(self, word: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/{word}", timeout=30) as answer:
            return json.load(answer)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Mortals:
    """Processes that die on request, forked from one warm Python."""

    def __init__(self, errors: Path, program: str = "kill_child.py") -> None:
        self.errors = errors
        self.parent = subprocess.Popen(
            [sys.executable, str(HERE / program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.kills: Counter[str] = Counter()

    def run(self, **job: Any) -> int:
        """How the process ended: 0, or -9 where it killed itself. Anything else is a failure, with what it said."""
        assert self.parent.stdin is not None and self.parent.stdout is not None
        self.parent.stdin.write(json.dumps({**job, "errors": str(self.errors)}) + "\n")
        self.parent.stdin.flush()
        code = int(self.parent.stdout.readline())
        assert code in (0, KILLED), f"{job} ended with {code}: {self.errors.read_text()[-3000:]}"
        if code == KILLED:
            kill = job["kill"]
            what = "commit" if "commit" in kill else kill["call"].split()[0]
            self.kills[f"{job['role']}: {kill['when']} {what}"] += 1
        return code

    def close(self) -> None:
        assert self.parent.stdin is not None
        self.parent.stdin.close()
        self.parent.wait(timeout=30)
