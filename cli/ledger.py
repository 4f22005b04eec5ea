"""The other side, as a service one can ask: it counts every attempt by idempotency key, and each key acts once.

It serves the demo and the tests alike, over HTTP on this machine only, and misbehaves as real services do, on request
of the call itself (query parameters; milliseconds):

    after_close_ms=N   do nothing until the caller hangs up (or dies), then take effect N later; nobody is answered
    then=hang          take effect, then never answer
    answer_ms=N        take effect, answer N later
    delay_ms=N         take effect N later, then answer
    fail=before|after  answer 500 without, or after, taking effect

`POST /charge`, `/mail`, any other word: an effect of that kind. `POST /refund` and `/undo` with `{"of": …}` take back
the effect of that id or that key; one that is not there is answered 404. A key whose effect or refusal stands is
answered the same again, and with another body 409. Without a key each call is an effect of its own.
What an exec handler is handed may be posted as it is (`curl --data-binary @-`): its `kwargs` are the body, its
`idempotency_key` the key.
`GET /effects`, `/attempts`, `/standing`, `/counts` tell what happened.

Why a service and not a fake in the test's process: a killed agent must leave a real connection behind.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TAKES_BACK = ("refund", "undo")
PATIENCE_S = 60.0
"""How long a call that waits for its caller to hang up, or hangs, is kept."""


class Ledger:
    """What happened, under one lock. Times are seconds since the ledger began."""

    def __init__(self) -> None:
        self.attempts: list[dict[str, Any]] = []
        self.effects: list[dict[str, Any]] = []
        self._said: dict[tuple[str, str], tuple[str, int, dict[str, Any]]] = {}
        self._began = time.monotonic()
        self.changed = threading.Condition()

    def now(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def attempt(self, kind: str, key: str, body: dict[str, Any], wish: str) -> dict[str, Any]:
        """Count a call. `wish`: the query it came with. `state`: open, then answered, or gone (the caller hung up);
        closed_us is wall time."""
        with self.changed:
            made = {"n": len(self.attempts) + 1, "kind": kind, "key": key, "body": body, "wish": wish,
                    "at": self.now(), "state": "open", "status": 0, "closed_us": 0}  # fmt: skip
            self.attempts.append(made)
            self.changed.notify_all()
            return made

    def close(self, attempt: dict[str, Any], state: str, status: int = 0) -> None:
        with self.changed:
            attempt["state"], attempt["status"], attempt["closed_us"] = state, status, time.time_ns() // 1000
            self.changed.notify_all()

    def apply(self, kind: str, key: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Take effect once per key; the answer (status, body) is the same for the same key."""
        with self.changed:
            asked = json.dumps(body, sort_keys=True)
            known = self._said.get((kind, key)) if key else None
            if known is not None:
                return known[1:] if known[0] == asked else (409, {"error": "this key came with another body"})
            answer = self._apply(kind, key, body)
            if key:
                self._said[kind, key] = (asked, *answer)
            self.changed.notify_all()
            return answer

    def _apply(self, kind: str, key: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        of = ""
        if kind in TAKES_BACK:
            found = self._find(str(body.get("of", "")))
            if found is None:
                return 404, {"error": f"nothing here goes by {body.get('of')!r}"}
            of = found["id"]
        effect = {"id": f"{kind[:2]}_{len(self.effects) + 1}", "kind": kind, "key": key, "of": of, "body": body,
                  "at": self.now()}  # fmt: skip
        self.effects.append(effect)
        return 200, {"id": effect["id"]}

    def _find(self, name: str) -> dict[str, Any] | None:
        for effect in self.effects:
            if effect["kind"] not in TAKES_BACK and name and name in (effect["id"], effect["key"]):
                return effect
        return None

    def standing(self) -> list[dict[str, Any]]:
        """Effects that nothing took back."""
        with self.changed:
            gone = {effect["of"] for effect in self.effects}
            return [e for e in self.effects if e["kind"] not in TAKES_BACK and e["id"] not in gone]

    def counts(self) -> dict[str, dict[str, int]]:
        """`{kind/key: {attempts, effects}}`, calls without a key left out."""
        with self.changed:
            found: dict[str, dict[str, int]] = {}
            for word in ("attempts", "effects"):
                for one in getattr(self, word):
                    if one["key"]:
                        name = f"{one['kind']}/{one['key']}"
                        found.setdefault(name, {"attempts": 0, "effects": 0})[word] += 1
            return found

    def told(self, word: str) -> Any:
        """What `GET /word` answers; None for no such word."""
        if word in ("effects", "attempts"):
            with self.changed:
                return [dict(one) for one in getattr(self, word)]
        return {"standing": self.standing, "counts": self.counts}[word]() if word in ("standing", "counts") else None


class Service:
    """A ledger that listens on 127.0.0.1. `url` has no slash at its end."""

    def __init__(self, port: int = 0) -> None:
        self.ledger = Ledger()
        self._server = _Server(("127.0.0.1", port), _Call)
        self._server.ledger = self.ledger
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> Service:
        """Serve on a thread of its own."""
        threading.Thread(target=self.serve, name="amends-ledger", daemon=True).start()
        return self

    def serve(self) -> None:
        """Serve on this thread until `stop`."""
        self._server.serve_forever(poll_interval=0.05)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    ledger: Ledger


class _Call(BaseHTTPRequestHandler):
    """One connection."""

    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """The attempts are the log."""

    def do_GET(self) -> None:  # noqa: N802  (the name that http.server calls)
        told = self.server.ledger.told(urlsplit(self.path).path.strip("/"))
        self._answer(404 if told is None else 200, {"error": "no such page"} if told is None else told)

    def do_POST(self) -> None:  # noqa: N802
        address = urlsplit(self.path)
        wish = {name: values[-1] for name, values in parse_qs(address.query).items()}
        kind, key = address.path.strip("/"), self.headers.get("Idempotency-Key", "")
        try:
            length = int(self.headers.get("Content-Length") or 0)
            sent = self.rfile.read(length)
            if len(sent) < length:  # its caller died in the middle of asking: that is no attempt
                self.close_connection = True
                return None
            body = json.loads(sent or b"{}")
            waits = {name: int(value) / 1000 for name, value in wish.items() if name.endswith("_ms")}
        except ValueError:
            return self._answer(400, {"error": "a JSON object and whole milliseconds are expected"})
        if not kind.isidentifier() or not isinstance(body, dict):
            return self._answer(400, {"error": "POST /word with a JSON object"})
        if not key and isinstance(body.get("kwargs"), dict) and isinstance(body.get("idempotency_key"), str):
            key, body = body["idempotency_key"], body["kwargs"]
        self._serve(self.server.ledger.attempt(kind, key, body, address.query), wish, waits)

    def _serve(self, attempt: dict[str, Any], wish: dict[str, str], waits: dict[str, float]) -> None:
        ledger = self.server.ledger
        if "after_close_ms" in waits:
            self._until_gone()
            ledger.close(attempt, "gone")
            time.sleep(waits["after_close_ms"])
            ledger.apply(attempt["kind"], attempt["key"], attempt["body"])
            self.close_connection = True
            return
        if wish.get("fail") == "before":
            return self._reply(attempt, 500, {"error": "it did not happen"})
        time.sleep(waits.get("delay_ms", 0))
        status, said = ledger.apply(attempt["kind"], attempt["key"], attempt["body"])
        if wish.get("fail") == "after":
            return self._reply(attempt, 500, {"error": "it happened, and this answer does not say so"})
        if wish.get("then") == "hang":
            self._until_gone()
            ledger.close(attempt, "gone")
            self.close_connection = True
            return
        time.sleep(waits.get("answer_ms", 0))
        self._reply(attempt, status, said)

    def _reply(self, attempt: dict[str, Any], status: int, said: Any) -> None:
        """The books are closed before the caller hears of it: whoever has an answer finds it in the ledger."""
        self.server.ledger.close(attempt, "answered", status)
        self._answer(status, said)

    def _answer(self, status: int, said: Any) -> None:
        data = json.dumps(said).encode() + b"\n"
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the caller is gone: what it asked for has happened all the same
            self.close_connection = True

    def _until_gone(self) -> None:
        """Wait until the caller hangs up, at most PATIENCE_S."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            ready, _, _ = select.select([self.connection], [], [], 0.5)
            try:
                if ready and not self.connection.recv(1, socket.MSG_PEEK):
                    return
            except OSError:
                return
            if ready:
                time.sleep(0.01)  # it talks on: not gone
