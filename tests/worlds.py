"""Real processes for tests: a ledger over HTTP, agents in a child, kills at a chosen moment, and the daemon's own verb.

`World` is one home with one ledger. An agent is the text of a Python file; it finds the ledger in `LEDGER_URL` and the
shop's handlers in `shop.py` beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from amends.cli.ledger import Service

PROGRAM = [sys.executable, "-m", "amends.cli"]
PATIENCE_S = 30.0

SHOP = '''"""Tools and inverses of a shop that lives behind HTTP."""
import json, os, urllib.error, urllib.request
from amends import ALREADY_DONE, compensator

def post(path, body, key="", timeout=20):
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Idempotency-Key"] = key
    request = urllib.request.Request(os.environ["LEDGER_URL"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)

def charge(item, wish="", idempotency_key=""):
    return post("/charge" + ("?" + wish if wish else ""), {"item": item}, idempotency_key)

def keyless_charge(item, wish=""):
    return post("/charge" + ("?" + wish if wish else ""), {"item": item})

@compensator("shop.refund")
def refund(of, wish="", idempotency_key=""):
    try:
        return post("/refund" + ("?" + wish if wish else ""), {"of": of}, idempotency_key)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ALREADY_DONE("there is no such charge")
        raise

@compensator("shop.refund_unkeyed")
def refund_unkeyed(of, wish=""):
    return post("/refund" + ("?" + wish if wish else ""), {"of": of})
'''

AGENT = '''"""An agent: {doc}"""
import os, sys, time
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from amends import AgentKit, COMPENSABLE, IRREVERSIBLE, REVERSIBLE, Compensation, saga_scope
import shop

def declared(wish="", handler="shop.refund"):
    """An undo that is known before the effect: it names the charge by the charge's own key."""
    def undo(item, idempotency_key, **rest):
        return Compensation(handler=handler, kwargs=dict(of=idempotency_key, **(dict(wish=wish) if wish else dict())))
    return undo

def derived(result):
    return Compensation(handler="shop.refund", kwargs=dict(of=result["id"]))

def buy(saga, item, wish="", **options):
    if not options:
        options = dict(undo=declared())
    return saga.execute("shop.charge", shop.charge, dict(item=item, wish=wish) if wish else dict(item=item),
                        semantics=COMPENSABLE, settle=options.pop("settle", 0.5), **options)

def main():
{body}

if __name__ == "__main__":
    main()
'''


class World:
    """A home, a ledger, and everything started here is ended by `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.service = Service().start()
        self.ledger = self.service.ledger
        self.children: list[subprocess.Popen[str]] = []
        (folder / "shop.py").write_text(SHOP)
        self.env = {
            **os.environ,
            "AMENDS_HOME": str(self.home),
            "AMENDS_ANCHORS": str(folder / "anchors"),
            "LEDGER_URL": self.service.url,
            "AMENDS_DEBUG": "1",
        }

    def close(self) -> None:
        for child in self.children:
            child.kill()
        self.service.stop()
        for child in self.children:
            _last_words(child)

    # -- processes ----------------------------------------------------------------------------------------------------

    def start(self, command: list[str], **more: Any) -> subprocess.Popen[str]:
        """A child of this test, its output in pipes."""
        env = {**self.env, **more.pop("env", {})}
        child = subprocess.Popen(
            command, env=env, cwd=more.pop("cwd", self.folder), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
        )  # fmt: skip
        self.children.append(child)
        return child

    def script(self, body: str, name: str = "agent") -> Path:
        """An agent's file; `body` is what its `main` does."""
        path = self.folder / f"{name}.py"
        lines = body.strip("\n").splitlines()
        indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
        inside = "\n".join(f"    {line[indent:]}" for line in lines)
        path.write_text(AGENT.replace("{doc}", name).replace("{body}", inside))
        return path

    def agent(self, body: str, name: str = "agent", **more: Any) -> subprocess.Popen[str]:
        """Start an agent."""
        return self.start([sys.executable, str(self.script(body, name))], **more)

    def amends(self, *args: str, timeout: float = 60, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end."""
        env = {**self.env, **more.pop("env", {})}
        return subprocess.run(
            [*PROGRAM, *args], env=env, cwd=more.pop("cwd", self.folder), text=True, capture_output=True,
            timeout=timeout, stdin=subprocess.DEVNULL, **more,
        )  # fmt: skip

    def recover(self, *args: str, **more: Any) -> tuple[int, dict[str, Any]]:
        """`recoverd --once --json`: its exit code and its answer."""
        ran = self.amends("recoverd", "--once", "--json", *args, **more)
        try:
            said = json.loads(ran.stdout)
        except ValueError:
            raise AssertionError(f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}") from None
        assert ran.returncode != 70, ran.stderr
        return ran.returncode, said

    def daemon(self, *args: str, **more: Any) -> subprocess.Popen[str]:
        """`recoverd`, waiting."""
        return self.start([*PROGRAM, "recoverd", *args], **more)

    # -- moments ------------------------------------------------------------------------------------------------------

    def until(self, what: str, true: Callable[[], Any], patience: float = PATIENCE_S) -> Any:
        """Wait until something holds; the failure says what, and what every child said."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            found = true()
            if found:
                return found
            time.sleep(0.01)
        said = []
        for child in self.children:
            child.kill()
            said.append(f"{child.args}: {_last_words(child)}")
        raise AssertionError("\n".join([f"this never came true: {what}", *said, f"{self.ledger.attempts}"]))

    def until_open(self, count: int = 1, kind: str = "charge") -> None:
        """Wait until so many calls of a kind that asked to be kept waiting wait in the ledger."""

        def enough() -> bool:
            waiting = [a for a in self.attempts() if a["kind"] == kind and a["state"] == "open" and a["wish"]]
            return len(waiting) >= count

        self.until(f"{count} open {kind}", enough)

    def kill_at_open(self, child: subprocess.Popen[str], count: int = 1, kind: str = "charge") -> None:
        """SIGKILL a child in the middle of a call."""
        self.until_open(count, kind)
        kill(child)

    # -- the ledger, asked over its own door --------------------------------------------------------------------------

    def ask(self, word: str) -> Any:
        with urllib.request.urlopen(f"{self.service.url}/{word}", timeout=10) as answer:
            return json.load(answer)

    def attempts(self) -> list[dict[str, Any]]:
        return self.ledger.told("attempts")

    def effects(self, kind: str = "") -> list[dict[str, Any]]:
        return [effect for effect in self.ask("effects") if kind in ("", effect["kind"])]

    def refunded(self) -> list[str]:
        """Items whose charges were taken back, in that order."""
        items = {effect["id"]: effect["body"]["item"] for effect in self.effects() if effect["kind"] == "charge"}
        return [items[effect["of"]] for effect in self.effects("refund")]

    def standing(self) -> list[str]:
        """Items whose charges stand."""
        return [effect["body"]["item"] for effect in self.ask("standing")]

    def one_effect_per_key(self) -> bool:
        """Whether no key took effect twice."""
        return all(count["effects"] <= 1 for count in self.ask("counts").values())

    # -- the log ------------------------------------------------------------------------------------------------------

    def log(self) -> list[Any]:
        """Every entry, read from the file; none while there is no log."""
        from amends.runtime.state import State
        from amends.store.errors import YouErred
        from amends.store.identity import open_log

        with self._own_environment():
            try:
                log = open_log(self.home, State(), write=False, warn=lambda text: None)
            except YouErred as none:
                assert none.code == "no_home", none
                return []
            try:
                return [record.entry for record in log.records()]
            finally:
                log.close()

    def kinds(self) -> list[str]:
        return [entry.kind for entry in self.log()]

    @contextlib.contextmanager
    def _own_environment(self) -> Iterator[None]:
        before = os.environ.get("AMENDS_ANCHORS")
        os.environ["AMENDS_ANCHORS"] = self.env["AMENDS_ANCHORS"]
        try:
            yield
        finally:
            if before is None:
                del os.environ["AMENDS_ANCHORS"]
            else:
                os.environ["AMENDS_ANCHORS"] = before


def kill(child: subprocess.Popen[str]) -> None:
    """SIGKILL, and wait until the kernel is done with it."""
    child.send_signal(signal.SIGKILL)
    child.wait()


def _last_words(child: subprocess.Popen[str]) -> tuple[str, str]:
    """What it printed. A grandchild may hold its pipes open: that is not waited for."""
    try:
        return child.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        return "", "(its pipes are still open)"
    except ValueError:  # read already
        return "", ""
