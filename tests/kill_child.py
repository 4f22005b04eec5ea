"""The program of the kill matrix: an agent, or a recovery, that sends itself SIGKILL where it is told to.

`kill_child.py` reads jobs as JSON lines, forks a process for each and answers with how it ended: a Python that is
warm, so that hundreds of processes can die in a minute. Each is a process of its own with a log of its own; the parent
opens none.

A job names one moment: `{"commit": n, "when": "before"|"after"}` counts COMMITs by standing in for apsw.Connection;
`{"call": "do t2"|"undo t2", "when": "before"|"sent"|"answered", "nth": 1}` is a moment of a call to the ledger.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
import traceback
from typing import Any
from urllib.parse import urlsplit

import apsw

from amends.runtime import tools
from amends.runtime.daemon import sweep
from amends.runtime.hosts import Hosts, Known, Outcome
from amends.runtime.kit import AgentKit
from amends.runtime.scope import SagaAborted, saga_scope
from amends.runtime.tools import ALREADY_DONE, Compensation, compensator
from amends.runtime.values import decode
from amends.store.errors import AmendsError

SETTLE = 0.6
LATE_MS = 150
"""How long after its caller's death a call still lands: well within SETTLE."""
_PLAN: dict[str, Any] = {}
_seen: dict[str, int] = {}


# ---- dying -----------------------------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def moment(name: str, when: str) -> None:
    """Die, if this is the moment."""
    seen = _seen[f"{name} {when}"] = _seen.get(f"{name} {when}", 0) + 1
    if (_PLAN.get("call"), _PLAN.get("when")) == (name, when) and seen == _PLAN.get("nth", 1):
        die()


class Cursor(apsw.Cursor):
    def execute(self, sql: Any, *args: Any, **named: Any) -> Any:
        if sql != "commit":
            return super().execute(sql, *args, **named)
        n = _seen["commit"] = _seen.get("commit", 0) + 1
        if n == _PLAN.get("commit") and _PLAN["when"] == "before":
            die()
        done = super().execute(sql, *args, **named)
        if n == _PLAN.get("commit"):
            die()
        return done


class Connection(apsw.Connection):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.cursor_factory = Cursor


# ---- the far side ----------------------------------------------------------------------------------------------------


def call(url: str, kind: str, body: dict[str, Any], key: str, name: str) -> tuple[int, dict[str, Any]]:
    """One call of the ledger. One that dies on its way lands late, if the plan says so."""
    moment(name, "before")
    late = _PLAN.get("late") and (_PLAN.get("call"), _PLAN.get("when")) == (name, "sent")
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    path = f"/{kind}?after_close_ms={LATE_MS}" if late else f"/{kind}"
    connection.request("POST", path, json.dumps(body), {"Idempotency-Key": key} if key else {})
    moment(name, "sent")
    answer = connection.getresponse()
    said = answer.status, json.loads(answer.read())
    connection.close()
    moment(name, "answered")
    return said


def charge(url: str, saga: str, thing: str, idempotency_key: str) -> dict[str, Any]:
    status, said = call(url, "charge", {"saga": saga, "thing": thing}, idempotency_key, f"do {thing}")
    if status != 200:
        raise ValueError(f"{thing}: {status}")
    return {"key": idempotency_key, **said}


def _refund(url: str, of: str, thing: str, key: str) -> Any:
    time.sleep(float(os.environ.get("KILL_CHILD_SLOW_S", "0")))
    status, _ = call(url, "refund", {"of": of}, key, f"undo {thing}")
    if status not in (200, 404):
        raise ValueError(f"{thing}: {status}")
    return ALREADY_DONE("nothing there") if status == 404 else None


@compensator("kill.keyed")
def refund_keyed(url: str, of: str, thing: str, idempotency_key: str) -> Any:
    return _refund(url, of, thing, idempotency_key)


@compensator("kill.plain")
def refund_plain(url: str, of: str, thing: str) -> Any:
    return _refund(url, of, thing, "")


@compensator("kill.idempotent", idempotent=True)
def refund_idempotent(url: str, of: str, thing: str) -> Any:
    return _refund(url, of, thing, f"of {of}")


def _resolve(verb: str, url: str, saga: str, of: str, key: str) -> None:
    status, _ = call(url, verb, {"saga": saga, "of": of}, key, f"{verb} {of}")
    if status != 200:
        raise ValueError(f"{verb} {of}: {status}")


@compensator("kill.confirm")
def confirm(url: str, saga: str, of: str, idempotency_key: str) -> None:
    _resolve("confirm", url, saga, of, idempotency_key)


@compensator("kill.cancel")
def cancel(url: str, saga: str, of: str, idempotency_key: str) -> None:
    _resolve("cancel", url, saga, of, idempotency_key)


# ---- the jobs --------------------------------------------------------------------------------------------------------


def agent(job: dict[str, Any]) -> None:
    """Steps of `inverse` (declared, derived or none) undone by `handler`; then it commits, or changes its mind."""
    kit = AgentKit(home=job["home"])
    url, name = job["url"], job["saga"]
    try:
        with saga_scope(id=name, kit=kit) as saga:
            for i in range(job["steps"]):
                thing = f"t{i + 1}"
                saga.execute(
                    thing, charge, {"url": url, "saga": name, "thing": thing}, semantics="COMPENSABLE", settle=SETTLE,
                    **_inverse(job, thing),
                )  # fmt: skip
            if not job["commits"]:
                raise ValueError("the agent changed its mind")
    except (SagaAborted, AmendsError):
        pass  # it was undone by the agent itself: the log says how
    kit.close()


def holder(job: dict[str, Any]) -> None:
    """Tentative resources, each locked; then it commits, or changes its mind."""
    kit = AgentKit(home=job["home"])
    url, name = job["url"], job["saga"]
    try:
        with saga_scope(id=name, kit=kit) as saga:
            for i in range(job["resources"]):
                kwargs = {"url": url, "saga": name, "of": f"r{i + 1}"}
                saga.tentative(
                    f"{name}/r{i + 1}", confirm=Compensation(handler="kill.confirm", kwargs=kwargs),
                    cancel=Compensation(handler="kill.cancel", kwargs=kwargs), lock=True,
                )  # fmt: skip
            if not job["commits"]:
                raise ValueError("the agent changed its mind")
    except (SagaAborted, AmendsError):
        pass
    kit.close()


def _inverse(job: dict[str, Any], thing: str) -> dict[str, Any]:
    url, handler = job["url"], f"kill.{job['handler']}"

    def made(of: str) -> Compensation:
        return Compensation(handler=handler, kwargs={"url": url, "of": of, "thing": thing})

    def declared(idempotency_key: str) -> Compensation:
        return made(idempotency_key)

    return {
        "declared": {"undo": declared},
        "derived": {"compensate": lambda result: made(result["key"])},
        "none": {},
    }[job["inverse"]]


class Here(Hosts):
    """Handlers in the recovering process itself, so that it dies inside a compensation."""

    name = "here"

    def find(self, handler: str, recorded: Any = None) -> tuple[Any, Known]:
        known = tools.find(handler)
        return (self, Known(True, known.keyed, known.idempotent)) if known else (None, Known(False))

    def call(self, handler: str, purpose: str, kwargs: Any, idempotency_key: str, *_: Any) -> Outcome:
        known = tools.find(handler)
        assert known is not None
        given = {name: decode(value) for name, value in kwargs.items()}
        if known.keyed:
            given["idempotency_key"] = idempotency_key
        try:
            said = known.fn(**given)
        except Exception as error:
            return Outcome("lost", why=repr(error))
        return Outcome("already_done" if said is not None else "done")


def recover(job: dict[str, Any]) -> None:
    """What `amends recoverd --once` does."""
    kit = AgentKit(home=job["home"])
    sweep(kit, None if job.get("hosted") else Here())
    kit.close()


def live(job: dict[str, Any]) -> None:
    _PLAN.update(job.get("kill") or {})
    apsw.Connection = Connection  # type: ignore[misc]
    {"agent": agent, "holder": holder, "recover": recover}[job["role"]](job)


# ---- programs of their own ------------------------------------------------------------------------------------------


def many(home: str, count: str, path: str) -> None:
    """Sagas of five steps until `count` steps are acknowledged; each is told in the file at `path` when it is."""
    kit = AgentKit(home=home)
    with open(path, "ab", buffering=0) as told:
        left = int(count)
        while left:
            with saga_scope(kit=kit) as saga:
                for i in range(1, min(5, left) + 1):
                    saga.execute("count", int, {}, semantics="COMPENSABLE", undo=Compensation(handler="kill.plain"))
                    told.write(b"%s %d\n" % (saga.header_id.encode(), i))
                    left -= 1
    kit.close()


def patient(home: str, url: str, path: str) -> None:
    """An agent whose second step, past its timeout, goes on until the file at `path` is there; then it commits."""

    def wait(idempotency_key: str) -> None:
        print("running", flush=True)
        while not os.path.exists(path):
            time.sleep(0.02)

    kit = AgentKit(home=home)
    with saga_scope(id="patient", kit=kit) as saga:
        job = {"inverse": "declared", "handler": "keyed", "url": url}
        saga.execute("t1", charge, {"url": url, "saga": "patient", "thing": "t1"}, semantics="COMPENSABLE",
                     timeout=5, **_inverse(job, "t1"))  # fmt: skip
        saga.execute("t2", wait, {}, semantics="COMPENSABLE", settle=0.1, **_inverse(job, "t2"))
    kit.close()


def main() -> None:
    if len(sys.argv) > 1:
        return {"many": many, "patient": patient}[sys.argv[1]](*sys.argv[2:])
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(os.open(job["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                live(job)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
