"""See it with your own eyes: an agent is killed in the middle of a payment, and the device makes amends.

Four processes of this same program: a ledger that takes payments over HTTP and counts every attempt, an agent that
books a journey of three payments, the recovery daemon, and the narrator, who kills the agent with SIGKILL during the
third payment and tells what came of it. Every figure that is told is read back from the log or asked of the ledger.

It happens in a folder of its own, touches no other home, and needs no network: the handlers are exec handlers of this
program, named in the `handlers.toml` of that folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from . import ui

SAGA = "journey-to-lisbon"
LANDS_MS = 400
"""How long after its caller's death the third payment still takes effect."""
SETTLE_S = 1.0
KNOWN_S = 1.1
"""A daemon that has nothing to watch looks once a second: after this it knows of the agent and waits for its death."""
PATIENCE_S = 15.0
"""How long the narrator waits for each thing on a busy machine; the whole takes about four seconds."""


@click.command(cls=ui.Verb)
@click.option("--keep", is_flag=True, help="Leave the folder, to look around in it.")
@click.option("--role", type=click.Choice(["ledger", "agent", "handler"]), hidden=True)
def demo(keep: bool, role: str | None) -> int:
    """See an agent die halfway and the device make amends: a few seconds, offline, in a folder of its own."""
    if role is not None:
        return _ROLES[role]()
    folder = Path(tempfile.mkdtemp(prefix="amends-demo-"))
    stage = Stage(folder)
    try:
        return stage.play(keep)
    finally:
        stage.end()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


# ---- the other three processes ---------------------------------------------------------------------------------------


def _ledger() -> int:
    """Serve until the narrator closes our standard input, or dies."""
    from .ledger import Service

    service = Service().start()
    sys.stdout.write(service.url + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    service.stop()
    return 0


def _post(path: str, body: dict[str, Any], key: str) -> Any:
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    request = urllib.request.Request(os.environ["AMENDS_DEMO_LEDGER"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _pay(what: str, amount_minor: int, idempotency_key: str, wish: str = "") -> Any:
    return _post("/charge" + wish, {"what": what, "amount_minor": amount_minor}, idempotency_key)


def _agent() -> int:
    """Three payments, one fate. The first inverse is declared, the second derived from the result, the third both."""
    from ..runtime.scope import saga_scope
    from ..runtime.semantics import ActionSemantics
    from ..runtime.tools import Compensation

    def declared(idempotency_key: str, **call: Any) -> Compensation:
        return Compensation(handler="demo.refund", kwargs={"of": idempotency_key})

    def derived(result: dict[str, Any]) -> Compensation:
        return Compensation(handler="demo.refund", kwargs={"of": result["id"]})

    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    common: dict[str, Any] = {"semantics": ActionSemantics.COMPENSABLE, "settle": SETTLE_S}
    with saga_scope(SAGA) as saga:
        saga.execute("train.pay", _pay, {"what": "train", "amount_minor": 8900}, undo=declared, **common)
        saga.execute("hotel.pay", _pay, {"what": "hotel", "amount_minor": 21000}, compensate=derived, **common)
        flight = {"what": "flight", "amount_minor": 14500, "wish": f"?after_close_ms={LANDS_MS}"}
        saga.execute("flight.pay", _pay, flight, undo=declared, compensate=derived, **common)
    return 0


def _handler() -> int:
    """An exec handler: one JSON object in, one out. A payment that is not there needs no refund."""
    asked = json.loads(sys.stdin.read())
    try:
        said = _post("/refund", asked["kwargs"], asked["idempotency_key"])
        answer: dict[str, Any] = {"outcome": "done", "result": said}
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        answer = {"outcome": "already_done", "note": "there is no such payment"}
    sys.stdout.write(json.dumps(answer))
    return 0


_ROLES: dict[str, Callable[[], int]] = {"ledger": _ledger, "agent": _agent, "handler": _handler}


# ---- the narrator ----------------------------------------------------------------------------------------------------


class Trouble(Exception):
    """The demo did not come to its end."""


class Stage:
    """The folder of one demo and the processes in it."""

    def __init__(self, folder: Path) -> None:
        from ..runtime.hosts import environment

        self.folder, self.home, self.anchors = folder, folder / "home", folder / "anchors"
        os.environ["AMENDS_ANCHORS"] = str(self.anchors)  # this process reads the log, too
        os.environ["AMENDS_HOME"] = str(self.home)
        self.env = environment()
        self.env.pop("NOTIFY_SOCKET", None)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.url = ""

    def play(self, keep: bool) -> int:
        try:
            self._act()
            told = self._read_back(keep)
        except Trouble as trouble:
            ui.warn(f"the demo did not come to its end: {trouble}")
            for name in self.children:
                ui.warn(f"{name} said: {self._said(name)}")
            return 1
        if ui.session().as_json:
            ui.emit(told)
        else:
            for line in _story(told):
                ui.say(line)
        return 0 if told["ok"] else 1

    def start(self, name: str, *args: str, **more: Any) -> subprocess.Popen[bytes]:
        """Another process of this program; what it says on standard error is kept in the folder."""
        from .recovery import program

        with open(self.folder / f"{name}.txt", "ab") as said:
            settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": said, **more}
            child: subprocess.Popen[bytes] = subprocess.Popen(
                [*program(), *args], env=self.env, stderr=said, **settings
            )
        self.children[name] = child
        return child

    def _said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text(errors="replace").strip()[-600:] or "nothing"

    def _act(self) -> None:
        ledger = self.start("ledger", "demo", "--role", "ledger", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert ledger.stdout
        self.url = self.env["AMENDS_DEMO_LEDGER"] = ledger.stdout.readline().decode().strip()
        if not self.url:
            raise Trouble("the ledger did not start")
        self._make_home()
        self.start("daemon", "recoverd")
        agent = self.start("agent", "demo", "--role", "agent", stdout=subprocess.PIPE)
        assert agent.stdout
        pid = agent.stdout.readline().decode().strip()
        if not pid.isdigit():
            raise Trouble("the agent did not start")
        self._until("the third payment is under way", self._third_is_open)
        time.sleep(KNOWN_S)
        # Its own process: of the single-file executable, what we started is only the loader.
        os.kill(int(pid), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        agent.wait(PATIENCE_S)
        self._until("the log tells the end", lambda: self._entries() and self._entries()[-1].kind == "saga.ended")
        self._stop("daemon")

    def _make_home(self) -> None:
        """A home whose handlers.toml names our own refund."""
        from ..store.home import Home
        from .recovery import program

        home = Home(self.home)
        home.create()
        command = json.dumps([*program(), "demo", "--role", "handler"])  # a TOML list of texts is written like JSON
        home.handlers.write_text(
            f'version = 1\n\n[exec."demo.refund"]\ncommand = {command}\nidempotent = true\n'
            f"env = {{ AMENDS_DEMO_LEDGER = {json.dumps(self.url)} }}\n",
            encoding="utf-8",
        )

    def _third_is_open(self) -> bool:
        agent = self.children["agent"]
        if agent.poll() is not None:
            raise Trouble("the agent ended by itself")
        return any(a["body"].get("what") == "flight" and a["state"] == "open" for a in self.ask("attempts"))

    def _until(self, what: str, true: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > end:
                raise Trouble(f"within {PATIENCE_S:g} s it did not come true that {what}")
            time.sleep(0.03)

    def ask(self, word: str) -> Any:
        """What the ledger says."""
        with urllib.request.urlopen(f"{self.url}/{word}", timeout=10) as answer:
            return json.load(answer)

    def _entries(self) -> list[Any]:
        """The log as it is in the file."""
        from ..runtime.state import State
        from ..store.home import Home
        from ..store.identity import open_log

        log = open_log(Home(self.home), State(), write=False, warn=lambda text: None)
        try:
            return [record.entry for record in log.records()]
        finally:
            log.close()

    def _stop(self, name: str) -> None:
        child = self.children[name]
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def end(self) -> None:
        """Nothing of the demo outlives it."""
        for name, child in self.children.items():
            self._stop(name)
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()

    # -- reading back -------------------------------------------------------------------------------------------------

    def _read_back(self, keep: bool) -> dict[str, Any]:
        """What happened, from the log and from the ledger; `ok` if the two agree and nothing stands."""
        from ..runtime.state import State
        from ..store.audit import verify
        from ..store.home import Home

        entries, attempts, effects = self._entries(), self.ask("attempts"), self.ask("effects")
        checked = verify(Home(self.home), view_factory=State)
        counts = self.ask("counts").values()
        tools = {entry.step: entry.tool for entry in entries if entry.kind == "step.intended"}
        what = {effect["id"]: effect["body"].get("what") for effect in effects}
        flight = next(a for a in attempts if a["body"].get("what") == "flight")
        taken = next(entry for entry in entries if entry.kind == "saga.taken")
        log = {
            "records": len(entries),
            "outcome": entries[-1].out,
            "known_done": [tools[e.step] for e in entries if e.kind == "step.done"],
            "lost": [tools[e.step] for e in entries if e.kind == "step.lost"],
            "undone": [tools[e.step] for e in entries if e.kind == "undo.done"],
            "taken_over_after_ms": max(0, (taken.at - flight["closed_us"]) // 1000),
        }
        landed = next((e["at"] for e in effects if e["body"].get("what") == "flight"), None)
        ledger = {
            "attempts": len(attempts),
            "charges": sum(effect["kind"] == "charge" for effect in effects),
            "refunds": sum(effect["kind"] == "refund" for effect in effects),
            "refunded": [what[effect["of"]] for effect in effects if effect["kind"] == "refund"],
            "standing": len(self.ask("standing")),
            "keys": len(counts),
            "most_effects_of_one_key": max(count["effects"] for count in counts),
            "landed_after_death": landed is not None and flight["state"] == "gone",
        }
        agree = [f"{name}.pay" for name in ledger["refunded"]] == log["undone"] and not ledger["standing"]
        ok = agree and log["outcome"] == "compensated" and ledger["most_effects_of_one_key"] == 1 and not checked.exit
        return {
            "ok": ok,
            "saga": SAGA,
            "log": log,
            "ledger": ledger,
            "verify": {"verdict": checked.verdict, "level": checked.level, "size": checked.size},
            "home": str(self.home) if keep else None,
            "anchors": str(self.anchors) if keep else None,
            "look": _where(self.home, self.anchors) if keep else [],
        }


def _where(home: Path, anchors: Path) -> list[str]:
    """The commands that show it again, for a shell."""
    from shlex import quote

    prefix = f"AMENDS_ANCHORS={quote(str(anchors))} {_amends()} --home {quote(str(home))}"
    return [f"{prefix} {verb}" for verb in (f"show {SAGA}", "log", "verify")]


def _amends() -> str:
    """What to type for this very program in a shell: `amends` may not be installed where the demo runs."""
    from shlex import join

    from .recovery import program

    return join(program()) if getattr(sys, "frozen", False) or not shutil.which("amends") else "amends"


def _story(told: dict[str, Any]) -> list[str]:
    log, ledger, checked = told["log"], told["ledger"], told["verify"]
    lines = [
        f"An agent began the saga {told['saga']}: three payments over HTTP that share one fate.",
        f"  The log knew {len(log['known_done'])} of them as done: {', '.join(log['known_done'])}.",
        f"  Then the agent was killed (SIGKILL) in the middle of {', '.join(log['lost'])}:",
        "  nobody knew whether that one happened.",
    ]
    if ledger["landed_after_death"]:
        lines.append("  It did: the ledger took that payment after its caller was dead.")
    return lines + [
        "",
        "The recovery daemon, another process, took the saga over "
        f"{log['taken_over_after_ms']} ms after the ledger saw the connection break,",
        f"  waited until nothing could land any more, and undid, youngest first: {', '.join(log['undone'])}.",
        f"  The log says: {log['outcome']}.",
        "",
        f"The ledger, asked directly: {ledger['attempts']} attempts under {ledger['keys']} idempotency keys, "
        f"{ledger['charges']} payments, {ledger['refunds']} refunds,",
        f"  at most {ledger['most_effects_of_one_key']} effect per key, {ledger['standing']} payments left standing.",
        f"The log, checked from its first byte: {checked['verdict']}, {checked['size']} records ({checked['level']}).",
        "",
        "Log and ledger agree: nothing is left standing." if told["ok"] else "Log and ledger do NOT agree.",
        *(["", "Look around:", *(f"  {line}" for line in told["look"]),
           "  (the ledger is gone; the folder is yours to delete)"]
          if told["look"] else [f"Run `{_amends()} demo --keep` to look around in the log afterwards."]),
    ]  # fmt: skip
