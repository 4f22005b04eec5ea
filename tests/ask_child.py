"""The program of the approval worlds: one who asks, one who answers, one who recovers, each killed where it is told to.

Jobs and moments as in `kill_child.py`, whose machinery this is. `asker` runs a saga with one step to undo and one that
waits for people; `voter` waits for its question and answers it; `racer` waits for all that are to race, and then tries.
"""

from __future__ import annotations

import os
import time
from typing import Any

import kill_child
from kill_child import SETTLE, call, recover

from amends import COMPENSABLE, IRREVERSIBLE, Compensation
from amends.runtime.gate.approvals import PENDING, standing
from amends.runtime.gate.rules import ApprovalPolicy, EscalationLevel, PreFlightGate
from amends.runtime.inbox import item_id
from amends.runtime.kit import AgentKit
from amends.runtime.scope import SagaAborted, saga_scope
from amends.store.errors import Refused

PATIENCE_S = 20.0


def wire(url: str, saga: str, amount: int, idempotency_key: str) -> dict[str, Any]:
    return _wire(url, saga, amount, idempotency_key)


def wire_once(url: str, saga: str, amount: int) -> dict[str, Any]:
    return _wire(url, saga, amount, "")


def _wire(url: str, saga: str, amount: int, key: str) -> dict[str, Any]:
    status, said = call(url, "wire", {"saga": saga, "amount": amount}, key, "do wire")
    if status != 200:
        raise ValueError(str(status))
    return said


def asker(job: dict[str, Any]) -> None:
    """Charges, asks, wires, commits; what it raised is undone by its scope, or left to whoever recovers."""
    policy = ApprovalPolicy(timeout=job["timeout_s"], levels=(EscalationLevel(("team",), 0),))
    kit = AgentKit(home=job["home"], gate=PreFlightGate(approval=policy))
    url, name = job["url"], job["saga"]
    inverse = Compensation(handler="kill.keyed", kwargs={"url": url, "of": f"{name}/t1", "thing": "t1"})
    tool = wire if job["keyed"] else wire_once
    try:
        with saga_scope(id=name, kit=kit, on_crash=job["on_crash"], resume_within=60) as saga:
            first = {"url": url, "saga": name, "thing": "t1", "idempotency_key": f"{name}/t1"}
            saga.execute("t1", kill_child.charge, first, semantics=COMPENSABLE, settle=SETTLE, undo=inverse)
            second = {"url": url, "saga": name, "amount": job["amount"]}
            saga.execute("wire", tool, second, semantics=IRREVERSIBLE, settle=SETTLE)
    except (SagaAborted, Refused):
        pass  # denied, expired, or nobody knows: the log says which
    kit.close()


def voter(job: dict[str, Any]) -> None:
    """Answers each question of a saga until the file at `stop` is there."""
    kit = AgentKit(home=job["home"])
    header, end = kit.engine.hide(job["saga"]), time.monotonic() + PATIENCE_S
    while not os.path.exists(job["stop"]) and time.monotonic() < end:
        size = kit.log.size
        kit.log.refresh()
        view = kit.engine.state.approvals
        for asked in view.open:
            if asked.saga == header and standing(view, asked.request, kit.log.now().lived) == PENDING:
                _answer(kit, job, item_id("approval", kit.log.record(asked.seq).line))
        kit.log.wait(size, 0.05)
    kit.close()


def _answer(kit: AgentKit, job: dict[str, Any], item: str) -> None:
    try:
        (kit.approve if job["verdict"] == "approve" else kit.deny)(item, by="Ann")
    except Refused:
        pass  # it was withdrawn, or went past its deadline, in between: whoever is late is told so


def live(job: dict[str, Any]) -> None:
    kill_child._PLAN.update(job.get("kill") or {})
    kill_child.apsw.Connection = kill_child.Connection  # type: ignore[misc]
    {"asker": asker, "voter": voter, "recover": recover}[job["role"]](job)


if __name__ == "__main__":
    kill_child.live = live
    kill_child.main()
