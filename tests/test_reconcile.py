"""The world is asked, and not the log: what is missing, what is there again, what nobody can tell, in every host."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from world import eventually, kinds
from worlds import World, kill

from amends import (
    ABSENT,
    CANNOT_TELL,
    COMPENSABLE,
    PRESENT,
    AgentKit,
    Compensation,
    Observation,
    Secret,
    reconciler,
)
from amends.runtime import tools
from amends.runtime.config_file import BadConfig
from amends.runtime.config_file import read as read_config
from amends.runtime.drift import RECENT, Drifted, Drifts, Turn, left_ms
from amends.runtime.facts import fact
from amends.runtime.host_program import ANSWERS as OTHER_ANSWERS
from amends.runtime.hosts import ANSWERS, ExecSpec, Hosts, PythonSpec, imported
from amends.runtime.openings import raw_fields
from amends.runtime.reconcile import EVERYTHING, Scope, Verdict, reconcile
from amends.store.entry import Entry
from amends.store.errors import BadName, BadValue, Illegal

SH = "/bin/sh"


@pytest.fixture(autouse=True)
def _no_reconcilers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_RECONCILERS", {})


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    (tmp_path / "look.py").write_text(LOOK)
    yield made
    made.close()


LOOK = '''"""Asks the ledger what stands."""
import json, os, urllib.request
from amends import ABSENT, PRESENT, reconciler

@reconciler("shop.charge")
def charged(item, idempotency_key):
    with urllib.request.urlopen(os.environ["LEDGER_URL"] + "/standing") as answer:
        there = [e for e in json.load(answer) if e["key"] == idempotency_key]
    return PRESENT if there and there[0]["body"]["item"] == item else ABSENT
'''


def ran(shop: World, body: str) -> None:
    """An agent, to its end."""
    agent = shop.agent(body)
    assert agent.wait(60) == 0, agent.communicate()


def asked(shop: World, *args: str, code: int | None = None, world: str = "look.py") -> dict[str, Any]:
    """`reconcile --json` with the shop's reconciler."""
    done = shop.amends("reconcile", "--json", *(["--import", world] if world else []), *args)
    assert done.returncode != 70 and code in (None, done.returncode), (done.returncode, done.stdout, done.stderr)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def told(shop: World, verb: str, *args: str) -> Any:
    return json.loads(shop.amends(verb, "--json", *args).stdout)


# ---- the world behind the log's back --------------------------------------------------------------------------------


@pytest.mark.promise("5.1")
def test_what_is_deleted_behind_the_logs_back_is_drift_and_restored_it_is_confirmed(shop: World) -> None:
    ran(shop, 'with saga_scope(id="order-1") as saga:\n    buy(saga, "book")\n    buy(saga, "pen")')
    first = asked(shop, code=0)
    assert (first["clean"], first["examined"], first["confirmed"], first["drift"]) == (True, 2, 2, [])

    before = list(shop.ledger.effects)
    shop.ledger.apply("refund", "somebody else", {"of": before[0]["key"]})
    found = asked(shop, code=1)
    [drift] = found["drift"]
    assert (drift["saga"], drift["step"], drift["tool"], drift["why"]) == ("order-1", 1, "shop.charge", "missing")
    assert not found["clean"] and found["confirmed"] == 1
    [item] = told(shop, "inbox")
    assert (item["kind"], item["saga"], item["step"]) == ("drift", "order-1", 1)
    assert any("amends accept" in line for line in item["commands"])
    assert any("amends undo order-1" in line for line in item["commands"])
    assert [step["drift"] for step in told(shop, "show", "order-1")["steps"]] == ["missing", None]
    [row] = told(shop, "ps")
    assert (row["drift"], row["clean"]) == (1, False)
    assert "0, 1 drift" in shop.amends("ps").stdout
    assert "drift: step 1 shop.charge" in shop.amends("show", "order-1").stdout

    shop.ledger.effects[:] = before
    assert asked(shop, code=0)["clean"]
    assert told(shop, "inbox") == [] and told(shop, "ps")[0]["drift"] == 0


@pytest.mark.promise("5.1")
def test_what_was_undone_or_failed_and_is_there_is_drift(shop: World) -> None:
    ran(
        shop,
        """
        try:
            with saga_scope(id="order-1") as saga:
                buy(saga, "book")
                buy(saga, "ink", "fail=before", undo=declared())
        except Exception:
            pass
        """,
    )
    shop.recover()
    found = asked(shop)
    assert found["drift"] == [] and found["examined"] == 2, found
    shop.ledger.effects[:] = [effect for effect in shop.ledger.effects if effect["kind"] != "refund"]
    found = asked(shop, code=1)
    assert [(one["step"], one["why"], one["expected"]) for one in found["drift"]] == [(1, "unexpected", "absent")]
    [item] = told(shop, "inbox")
    assert not any("undo" in line for line in item["commands"]), "it is undone already, as far as the log can do it"


@pytest.mark.promise("5.1")
def test_asked_again_it_says_the_same_and_writes_nothing_but_that_it_was_asked(shop: World) -> None:
    ran(shop, 'with saga_scope(id="order-1") as saga:\n    buy(saga, "book")\n    buy(saga, "pen")')
    shop.ledger.apply("refund", "somebody else", {"of": shop.ledger.effects[0]["key"]})
    first, entries = asked(shop, code=1), shop.log()
    [item] = told(shop, "inbox")
    assert asked(shop, code=1) == first
    assert [entry.kind for entry in shop.log()[len(entries) :]] == ["reconcile.done"]
    assert [one["id"] for one in told(shop, "inbox")] == [item["id"]]
    assert shop.log()[-1].use == {"examined": 2, "confirmed": 1, "drift": 1}


@pytest.mark.promise("5.1")
def test_a_person_accounts_for_a_drift_once(shop: World) -> None:
    ran(shop, 'with saga_scope(id="order-1") as saga:\n    buy(saga, "book")')
    shop.ledger.apply("refund", "somebody else", {"of": shop.ledger.effects[0]["key"]})
    asked(shop, code=1)
    [item] = told(shop, "inbox")
    accepting = ("accept", item["id"], "--by", "ann", "--reason", "refunded by phone", "--json")
    assert shop.amends(*accepting).returncode == 0
    assert told(shop, "inbox") == [] and asked(shop, code=0)["confirmed"] == 1
    again = shop.amends(*accepting)
    assert again.returncode == 1 and json.loads(again.stdout)["error"]["code"] == "decided"
    [said] = [entry for entry in shop.log() if entry.out == "accepted"]
    assert (said.kind, said.why, said.step) == ("effect.observed", "missing", 1)


# ---- what nobody knew ------------------------------------------------------------------------------------------------


@pytest.mark.promise("5.1")
@pytest.mark.parametrize(
    ("wish", "settle", "out", "then"), [("then=hang", 60, "present", ["book"]), ("delay_ms=60000", 0.3, "absent", [])]
)
def test_what_was_interrupted_by_a_kill_is_settled(
    shop: World, wish: str, settle: float, out: str, then: list[str]
) -> None:
    """Present is believed at once, absent only when nothing can land any more; what is due then is recovery's."""
    agent = shop.agent(
        f"""
        with saga_scope(id="order-1") as saga:
            buy(saga, "book", "{wish}", undo=declared(), settle={settle})
        """
    )
    shop.kill_at_open(agent)
    found = asked(shop, code=0)
    assert [(one["step"], one["why"], one["expected"]) for one in found["settled"]] == [(1, out, "either")]
    log = shop.log()
    assert [entry.out for entry in log if entry.kind == "step.probed"] == [out]
    assert [entry.why for entry in log if entry.kind == "step.lost"] == ["died"]
    assert not shop.effects("refund"), "it only asks"
    assert shop.recover()[1]["recovered"] == ["order-1"]
    assert shop.refunded() == then and shop.standing() == []
    assert asked(shop, code=0)["clean"]


@pytest.mark.promise("5.1")
def test_what_may_still_land_is_not_said_to_be_absent(shop: World) -> None:
    agent = shop.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book", "delay_ms=60000", undo=declared(), settle=600)
        """
    )
    shop.kill_at_open(agent)
    [unsure] = asked(shop, code=3)["unverifiable"]
    assert unsure["why"] == "may_land"
    assert not [entry for entry in shop.log() if entry.kind == "step.probed"]


@pytest.mark.promise("5.1")
def test_an_inverse_whose_answer_was_lost_is_settled_too(shop: World) -> None:
    agent = shop.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book", undo=declared("then=hang", "shop.refund_unkeyed"), settle=0.2)
            time.sleep(60)
        """
    )
    shop.until("the charge is recorded", lambda: "step.done" in shop.kinds())
    kill(agent)
    daemon = shop.daemon()
    shop.until_open(kind="refund")
    kill(daemon)
    found = asked(shop, code=0)
    assert [(one["step"], one["why"]) for one in found["settled"]] == [(1, "absent")]
    assert shop.kinds()[-5:].count("undo.done") == 1
    assert shop.recover()[1]["recovered"] == ["order-1"]
    assert len(shop.effects("refund")) == 1


@pytest.mark.promise("5.1")
def test_a_saga_that_waits_to_be_run_again_is_left_as_it_is(shop: World) -> None:
    agent = shop.agent(
        """
        with saga_scope(id="order-1", on_crash="resume") as saga:
            buy(saga, "book", "then=hang", undo=declared())
        """
    )
    shop.kill_at_open(agent)
    [unsure] = asked(shop, code=3)["unverifiable"]
    assert unsure["why"] == "unsettled" and "run again" in unsure["reason"]
    assert "step.lost" not in shop.kinds() and "step.probed" not in shop.kinds()


@pytest.mark.promise("5.1")
def test_a_quarantine_holds_nobody_up_who_asks_and_is_left_as_it_stands(shop: World) -> None:
    agent = shop.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "pen")
            buy(saga, "book", "then=hang", undo=declared())
        """
    )
    shop.kill_at_open(agent)
    assert shop.amends("quarantine", "order-1", "--by", "ann", "--reason", "odd").returncode == 0
    assert shop.amends("halt", "--by", "ann", "--reason", "all of it").returncode == 0
    found = asked(shop, code=3)
    assert (found["examined"], found["confirmed"]) == (2, 1)
    assert [one["why"] for one in found["unverifiable"]] == ["unsettled"]
    assert "step.probed" not in shop.kinds()


@pytest.mark.promise("5.1")
def test_effects_of_a_saga_that_is_driven_are_left_to_its_driver(shop: World) -> None:
    agent = shop.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "ink", "then=hang", undo=declared())
        """
    )
    shop.until_open()
    found = asked(shop, code=0)
    assert (found["examined"], found["running"]) == (0, 2)
    kill(agent)


@pytest.mark.promise("5.1")
def test_what_is_undone_while_it_is_asked_about_is_no_drift(memory: AgentKit) -> None:
    @tools.compensator("t.undo")
    def undo(idempotency_key: str) -> None:
        return None

    @reconciler("t.pay")
    def look() -> Any:
        if memory.log.size < before + 2:
            memory.undo("all", by="ann", reason="just then")
        return ABSENT

    performed(memory, ["pay"])
    before = memory.log.size
    assert [one.why for one in memory.reconcile().unverifiable] == ["moved"]
    assert memory.reconcile().confirmed == 1 and memory.inbox() == []


def _ended(kit: AgentKit, out: str) -> None:
    """A saga that ended while nobody knew about its one effect."""
    head: dict[str, Any] = {"saga": "a" * 26, "fence": 1}
    undo = kit.engine.fingerprint(b"x")
    kit.log.commit(
        lambda state, now: [
            fact("saga.opened", **head, driver=kit.engine.driver, up=True),
            fact("step.intended", **head, step=1, tool="bank.pay", sem="compensable", inv="declared",
                 handler="bank.back", key=undo, up=True),
            fact("step.lost", **head, step=1, why="died", up=True),
            fact("saga.ended", **head, out=out),
        ]
    )  # fmt: skip


@pytest.mark.promise("5.1")
@pytest.mark.parametrize(
    ("ended", "answer", "out", "open"),
    [("committed", PRESENT, "committed", False), ("committed", ABSENT, "committed", False),
     ("compensated", ABSENT, "compensated", False), ("compensated", PRESENT, "", True)],
)  # fmt: skip
def test_what_was_unknown_when_its_saga_ended_is_settled_in_a_follow_up(
    memory: AgentKit, ended: str, answer: Any, out: str, open: bool
) -> None:
    """What is there and was to be undone is then due, like in any other saga that was let go."""
    reconciler("bank.pay")(lambda: answer)
    _ended(memory, ended)
    found = memory.reconcile()
    assert found.clean and [one.why for one in found.settled] == [answer.amends_outcome]
    [later] = [row for row in memory.log.sagas() if row.saga != "a" * 26]
    assert later.open is open
    assert kinds(memory, later.saga)[:3] == ["saga.opened", "step.carried", "step.probed"]
    past = memory.engine.state.past(later.saga)
    assert past is not None and past.of == "a" * 26 and past.out == out
    size = memory.log.size
    again = memory.reconcile()
    assert again.examined == 1 and not again.settled
    assert [record.entry.kind for record in memory.log.records(size)] in (
        ["reconcile.done"], ["effect.observed", "reconcile.done"],
    )  # fmt: skip


# ---- every answer in every host --------------------------------------------------------------------------------------

PYTHON = {
    "present": "return PRESENT",
    "absent": "return ABSENT",
    "cannot_tell": 'return CANNOT_TELL("ask later")',
    "word": 'return "present"',
    "differs": 'return Observation("present", differs="it was 41")',
    "noted": 'return Observation("present", "seen in the ledger")',
    "true": "return True",
    "none": "return None",
    "done": "return ALREADY_DONE",
    "raises": 'raise ValueError("no such account")',
    "hangs": "time.sleep(60)",
    "dies": "os._exit(7)",
}
PROGRAM = {
    "present": 'echo \'{"outcome":"present"}\'',
    "absent": 'echo \'{"outcome":"absent"}\'',
    "cannot_tell": 'echo \'{"outcome":"cannot_tell","note":"ask later"}\'',
    "word": 'echo \'{"outcome":"present"}\'',
    "differs": 'echo \'{"outcome":"present","differs":"it was 41"}\'',
    "noted": 'echo \'{"outcome":"present","note":"seen in the ledger"}\'',
    "true": "echo true",
    "none": "exit 0",
    "done": 'echo \'{"outcome":"already_done"}\'',
    "raises": "echo no such account >&2; exit 1",
    "hangs": "sleep 60",
    "dies": "kill -KILL $$",
}
ANSWERED = {
    "present": ("confirmed", "present", ""),
    "absent": ("drift", "missing", ""),
    "cannot_tell": ("unverifiable", "cannot_tell", "ask later"),
    "word": ("confirmed", "present", ""),
    "differs": ("drift", "differs", "it was 41"),
    "noted": ("confirmed", "present", "seen in the ledger"),
    "true": ("unverifiable", "cannot_tell", ""),
    "none": ("unverifiable", "cannot_tell", ""),
    "done": ("unverifiable", "cannot_tell", ""),
    "raises": ("unverifiable", "cannot_tell", ""),
    "hangs": ("unverifiable", "no_answer", "no answer within"),
    "dies": ("unverifiable", None, ""),
    "nobody": ("unverifiable", "no_reconciler", ""),
}


def performed(kit: AgentKit, names: Any, **args: Any) -> None:
    """A committed saga with one effect of a tool for each name."""
    with kit.transaction(id="all") as saga:
        for name in names:
            saga.execute(f"t.{name}", _forward, args, semantics=COMPENSABLE, undo=_undo)


def _forward(**kwargs: Any) -> dict[str, Any]:
    return {"id": 7}


def _undo(**kwargs: Any) -> Compensation:
    return Compensation(handler="t.undo")


def _file(folder: Path) -> Path:
    path = folder / "world_of_answers.py"
    functions = "\n".join(
        f'@reconciler("t.{name}")\n{"async " if name == "noted" else ""}def _{name}():\n    {text}\n'
        for name, text in PYTHON.items()
    )
    names = "ABSENT, ALREADY_DONE, CANNOT_TELL, PRESENT, Observation, reconciler"
    path.write_text(f"import os, time\nfrom amends import {names}\n{functions}")
    return path


def _hosts(kind: str, folder: Path) -> Hosts:
    if kind == "exec":
        return Hosts(
            configured=[ExecSpec(name, (SH, "-c", text), verifies=(f"t.{name}",)) for name, text in PROGRAM.items()]
        )
    path = str(_file(folder))
    if kind == "import":
        return Hosts([imported([path])])
    return Hosts(configured=[PythonSpec("[python.t]", sys.executable, (path,), cwd=str(folder))])


@pytest.mark.promise("5.1")
@pytest.mark.parametrize("kind", ["import", "exec", "python", "here"])
def test_every_answer_means_the_same_in_every_host(memory: AgentKit, tmp_path: Path, kind: str) -> None:
    hosts = _hosts(kind, tmp_path) if kind != "here" else Hosts()
    if kind == "here":
        scope: dict[str, Any] = {}
        exec(compile(_file(tmp_path).read_text().replace("os._exit(7)", "raise SystemExit(7)"), "x", "exec"), scope)
    performed(memory, ANSWERED)
    heard: dict[str, Verdict] = {}
    found = reconcile(
        memory, EVERYTHING, timeout=2.0, hosts=hosts, told=lambda count, one: heard.update({one.tool[2:]: one})
    )
    hosts.close()
    assert heard.keys() == ANSWERED.keys()
    for name, (out, why, said) in ANSWERED.items():
        one = heard[name]
        assert one.out == out and why in (None, one.why) and said in one.reason, (name, one)
    assert not found.clean and found.exit == 1 and found.examined == len(ANSWERED)


def test_both_sides_of_a_host_know_the_same_answers() -> None:
    assert ANSWERS == OTHER_ANSWERS


@pytest.mark.promise("5.1")
def test_the_recorded_probe_is_asked_where_there_is_no_reconciler(shop: World) -> None:
    (shop.folder / "probes.py").write_text(
        "import json, os, urllib.request\nfrom amends import ABSENT, PRESENT\n"
        "def charged(item, idempotency_key, wish=''):\n"
        "    with urllib.request.urlopen(os.environ['LEDGER_URL'] + '/standing') as answer:\n"
        "        there = [e for e in json.load(answer) if e['key'] == idempotency_key]\n"
        "    return PRESENT(there[0]['id']) if there else ABSENT\n"
    )
    ran(
        shop,
        """
        import probes
        with saga_scope(id="order-1") as saga:
            buy(saga, "book", undo=declared(), probe=probes.charged)
        """,
    )
    assert asked(shop, world="", code=0)["confirmed"] == 1
    shop.ledger.apply("refund", "somebody else", {"of": shop.ledger.effects[0]["key"]})
    assert asked(shop, world="", code=1)["drift"][0]["why"] == "missing"


@pytest.mark.promise("5.1")
def test_a_reconciler_beside_the_compensation_is_found_where_that_was_recorded(shop: World) -> None:
    with (shop.folder / "shop.py").open("a") as file:
        file.write(LOOK.replace("\nfrom amends import ABSENT, PRESENT, reconciler\n", "\nfrom amends import *\n"))
    ran(shop, 'with saga_scope(id="order-1") as saga:\n    buy(saga, "book")')
    assert asked(shop, world="", code=0)["confirmed"] == 1


@pytest.mark.promise("5.1")
def test_a_program_is_told_the_call_and_its_result_and_asked_for_named_tools_only(
    memory: AgentKit, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    text = f'cat > {seen}; echo \'{{"outcome":"present"}}\''
    performed(memory, ["pay", "other"], amount=5, to="bo")
    hosts = Hosts(configured=[ExecSpec("t.other", (SH, "-c", text), verifies=("t.pay",))])
    found = reconcile(memory, hosts=hosts)
    request = json.loads(seen.read_text())
    assert (request["purpose"], request["handler"], request["tool"]) == ("verify", "t.pay", "t.pay")
    assert request["kwargs"] == {"amount": 5, "to": "bo"} and request["result"] == {"id": 7}
    assert request["withheld"] == [] and request["idempotency_key"]
    assert [one.tool for one in found.unverifiable] == ["t.other"], "a program that undoes is never asked unbidden"


@pytest.mark.promise("5.1")
def test_a_function_that_merely_has_the_tools_name_is_never_run(memory: AgentKit, tmp_path: Path) -> None:
    (tmp_path / "tools_file.py").write_text(f"def pay(**kwargs):\n    open({str(tmp_path / 'ran')!r}, 'w')\n")
    with memory.transaction() as saga:
        saga.execute("pay", _forward, {}, semantics=COMPENSABLE, undo=_undo)
    hosts = Hosts([imported([str(tmp_path / "tools_file.py")])])
    assert [one.why for one in reconcile(memory, hosts=hosts).unverifiable] == ["no_reconciler"]
    hosts.close()
    assert not (tmp_path / "ran").exists()


# ---- what it is given -----------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[Callable[..., Any], str]] = {
    "everything it names": (lambda amount, result, idempotency_key: _all(amount, result, idempotency_key), "confirmed"),
    "one of them": (lambda amount: PRESENT if amount == 5 else ABSENT, "confirmed"),
    "nothing": (lambda: PRESENT, "confirmed"),
    "all of them": (lambda **rest: PRESENT if rest == {"amount": 5, "to": "bo"} else ABSENT, "confirmed"),
    "the mapping": (lambda kwargs: PRESENT if kwargs == {"amount": 5, "to": "bo"} else ABSENT, "confirmed"),
    "a default": (lambda amount, currency="eur": PRESENT if currency == "eur" else ABSENT, "confirmed"),
    "what the call had not": (lambda amount, branch: PRESENT, "no_argument"),
}


def _all(amount: int, result: Any, idempotency_key: str) -> Any:
    return PRESENT if (amount, result) == (5, {"id": 7}) and idempotency_key else ABSENT


@pytest.mark.promise("5.1")
@pytest.mark.parametrize("name", SHAPES)
def test_a_reconciler_gets_what_it_names(memory: AgentKit, name: str) -> None:
    fn, expected = SHAPES[name]
    reconciler("t.pay")(fn)
    performed(memory, ["pay"], amount=5, to="bo")
    found = memory.reconcile()
    assert found.confirmed == 1 if expected == "confirmed" else [one.why for one in found.unverifiable] == [expected]


@pytest.mark.promise("5.1")
def test_an_async_reconciler_is_awaited_and_a_late_one_is_no_answer(memory: AgentKit) -> None:
    @reconciler("t.soon")
    async def soon(amount: int) -> Any:
        await asyncio.sleep(0)
        return PRESENT

    @reconciler("t.late")
    async def late(amount: int) -> Any:
        await asyncio.sleep(60)

    performed(memory, ["soon", "late"], amount=5)
    found = memory.reconcile(timeout=0.3)
    assert found.confirmed == 1 and [(one.tool, one.why) for one in found.unverifiable] == [("t.late", "no_answer")]


@pytest.mark.promise("5.1")
@pytest.mark.parametrize("where", ["here", "import"])
def test_a_secret_is_handed_to_nobody_and_who_gets_it_elsewhere_does_not_name_it(
    memory: AgentKit, tmp_path: Path, where: str
) -> None:
    text = (
        "from amends import PRESENT, reconciler\n"
        '@reconciler("t.names")\ndef names(amount, api_key):\n    return PRESENT\n'
        '@reconciler("t.does_not")\ndef does_not(amount):\n    return PRESENT\n'
        '@reconciler("t.default")\ndef default(amount, api_key=None):\n    return PRESENT if api_key is None else 1\n'
    )
    hosts = Hosts()
    if where == "here":
        exec(text, {})
    else:
        (tmp_path / "secrets_file.py").write_text(text)
        hosts = Hosts([imported([str(tmp_path / "secrets_file.py")])])
    performed(memory, ["names", "does_not", "default"], amount=5, api_key=Secret("sk_live_1"))
    found = reconcile(memory, hosts=hosts)
    hosts.close()
    assert found.confirmed == 2
    [one] = found.unverifiable
    assert (one.tool, one.why) == ("t.names", "secret") and "api_key" in one.reason


@pytest.mark.promise("5.1")
def test_what_the_log_does_not_hold_any_more_is_unverifiable_in_words(shop: World) -> None:
    ran(shop, 'with saga_scope(id="order-1") as saga:\n    buy(saga, "book")\n    buy(saga, "pen")')
    seq = next(entry.seq for entry in shop.log() if entry.kind == "step.intended")
    code = f"import apsw, sys; apsw.Connection(sys.argv[1]).execute('update entry set open = null where seq = {seq}')"
    subprocess.run([sys.executable, "-c", code, str(shop.home / "amends.db")], check=True)
    found = asked(shop, code=3)
    [one] = found["unverifiable"]
    assert (one["step"], one["why"]) == (1, "unreadable") and f"record {seq}" in one["reason"]
    assert found["confirmed"] == 1


# ---- the verb -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("5.1")
def test_what_cannot_be_imported_is_an_error_of_usage_in_one_sentence(shop: World) -> None:
    ran(shop, 'with saga_scope(id="order-1") as saga:\n    buy(saga, "book")')
    (shop.folder / "broken.py").write_text("import nowhere_to_be_found\n")
    size = len(shop.log())
    for name in ("no_such_module", "broken.py", "no_such_file.py"):
        error = asked(shop, world=name, code=2)["error"]
        assert error["code"] == "import_failed" and name in error["message"] and "\n" not in error["message"], error
        plain = shop.amends("reconcile", "--import", name)
        assert plain.returncode == 2 and "Traceback" not in plain.stderr
    assert len(shop.log()) == size


@pytest.mark.promise("5.1")
def test_without_anybody_to_ask_nothing_is_clean(shop: World) -> None:
    ran(shop, 'with saga_scope(id="order-1") as saga:\n    buy(saga, "book")')
    found = asked(shop, world="", code=3)
    assert not found["clean"] and [one["why"] for one in found["unverifiable"]] == ["no_reconciler"]
    assert told(shop, "inbox") == []


def test_sagas_tools_and_times_narrow_what_is_asked_about(shop: World) -> None:
    ran(
        shop,
        """
        for name in ("order-1", "order-2"):
            with saga_scope(id=name) as saga:
                buy(saga, "book")
        """,
    )
    assert asked(shop, code=0)["examined"] == asked(shop, "--all", code=0)["examined"] == 2
    assert asked(shop, "order-2", code=0)["examined"] == 1
    assert asked(shop, "--tool", "shop.charge", "order-1", code=0)["examined"] == 1
    assert asked(shop, "--tool", "shop.chrage", code=2)["error"]["code"] == "no_such_tool"
    assert asked(shop, "order-9", code=2)["error"]["code"] == "not_found"
    assert asked(shop, "--since", "1ms", code=0)["examined"] == 0
    assert asked(shop, "--since", "soon", code=2) and asked(shop, "--since", "1d", "--all", code=2)
    assert asked(shop, "--timeout", "0", code=2)


def test_a_dry_run_asks_nobody_and_writes_nothing(shop: World) -> None:
    ran(shop, 'with saga_scope(id="order-1") as saga:\n    buy(saga, "book")')
    shop.ledger.apply("refund", "somebody else", {"of": shop.ledger.effects[0]["key"]})
    size = len(shop.log())
    found = asked(shop, "--dry-run", code=0)
    assert found["dry_run"] and found["examined"] == 1
    [row] = found["would_ask"]
    assert (row["saga"], row["expected"], row["why"]) == ("order-1", "present", None) and "look.py" in row["host"]
    assert len(shop.log()) == size and "Nobody was asked" in shop.amends("reconcile", "--dry-run").stdout


def test_people_read_what_was_found(shop: World) -> None:
    ran(shop, 'with saga_scope(id="order-1") as saga:\n    buy(saga, "book")\n    buy(saga, "pen")')
    said = shop.amends("reconcile", "--import", "look.py")
    assert said.returncode == 0 and "clean: asked about 2 effects, 2 confirmed" in said.stdout
    shop.ledger.apply("refund", "somebody else", {"of": shop.ledger.effects[0]["key"]})
    said = shop.amends("reconcile", "--import", "look.py")
    assert said.returncode == 1 and "drift: order-1 step 1 shop.charge. The log says that it stands" in said.stdout
    assert "amends inbox" in said.stderr


# ---- by the clock ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("5.1")
def test_of_two_daemons_one_asks_and_people_are_told_of_a_drift_once(shop: World) -> None:
    with (shop.folder / "shop.py").open("a") as file:
        file.write(LOOK.replace("\nfrom amends import ABSENT, PRESENT, reconciler\n", "\nfrom amends import *\n"))
    ran(shop, 'with saga_scope(id="order-1") as saga:\n    buy(saga, "book")')
    shop.ledger.apply("refund", "somebody else", {"of": shop.ledger.effects[0]["key"]})
    heard, pager = shop.folder / "heard", shop.folder / "pager.sh"
    pager.write_text(f"#!{SH}\ncat >> {heard}\necho >> {heard}\n")
    pager.chmod(pager.stat().st_mode | stat.S_IXUSR)
    (shop.home / "config.toml").write_text(
        '[reconcile]\nevery = "1h"\n\n[[notify]]\nname = "ops"\nkind = "command"\n'
        f'command = ["{pager}"]\nevents = ["drift"]\n'
    )
    daemons = [shop.daemon(), shop.daemon()]
    shop.until("it is told", lambda: heard.exists() and heard.read_text().strip())
    shop.until("it was asked", lambda: "reconcile.done" in shop.kinds())
    shop.until("it is recorded that it was told", lambda: "notice.sent" in shop.kinds())
    time.sleep(2.5)  # two more looks of each
    assert shop.kinds().count("reconcile.begun") == shop.kinds().count("effect.observed") == 1
    [line] = [line for line in heard.read_text().splitlines() if line.strip()]
    message = json.loads(line)
    assert (message["event"], message["saga"], message["step"]) == ("drift", "order-1", 1)
    for daemon in daemons:
        daemon.terminate()
        assert daemon.wait(20) == 0
    later = shop.daemon()
    time.sleep(2.5)
    assert shop.kinds().count("reconcile.begun") == 1, "the time since the last turn outlives the daemons"
    (shop.home / "config.toml").write_text('[reconcile]\nevery = "1s"\n')
    shop.until("a shorter time holds at once", lambda: shop.kinds().count("reconcile.begun") >= 2)
    later.terminate()
    assert later.wait(20) == 0


@pytest.mark.promise("5.1")
def test_a_turn_is_claimed_by_one_of_many(kit: AgentKit) -> None:
    turns = [Turn(3_600_000) for _ in range(8)]
    threads = [threading.Thread(target=kit.log.commit, args=(turn,)) for turn in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(turn.ours for turn in turns) == 1
    kit.log.refresh()
    assert 0 < left_ms(kit.engine.state, kit.log.now(), 3_600_000) <= 3_600_000


@pytest.mark.parametrize(
    ("text", "why"),
    [('every = "0s"', "from \"1s\" up"), ('every = "100ms"', "from \"1s\" up"), ("every = 6", "from \"1s\" up"),
     ('evry = "6h"', "unknown key evry"), ('every = "6 h"', "like \"6h\"")],
)  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused_with_its_line(text: str, why: str) -> None:
    with pytest.raises(BadConfig) as refused:
        read_config(f"stuck_after_s = 9\n[reconcile]\n{text}\n", "/x/config.toml")
    assert why in refused.value.message and "config.toml, line 3:" in refused.value.message
    assert read_config('[reconcile]\nevery = "6h"', "/x").reconcile_s == 21600.0


# ---- the fold -------------------------------------------------------------------------------------------------------


def observed(seq: int, out: str, why: str, ref: int = 5) -> Entry:
    return Entry(seq=seq, prev="", at=1, kind="effect.observed", of="s", step=1, out=out, why=why, ref=ref)


def test_a_drift_stands_until_the_world_or_a_person_says_otherwise() -> None:
    view = Drifts()

    def tell(entry: Entry) -> None:
        view.check(entry, None)  # type: ignore[arg-type]
        view.fold(entry, 0, None)  # type: ignore[arg-type]

    tell(observed(10, "drift", "missing"))
    tell(observed(11, "unverifiable", "no_answer"))
    tell(observed(12, "drift", "missing"))
    assert view.open == [Drifted(10, "s", 1, 5, "missing")] and not view.closed
    with pytest.raises(Illegal):
        view.check(observed(13, "accepted", "unexpected"), None)  # type: ignore[arg-type]
    tell(observed(13, "accepted", "missing"))
    assert not view.open and view.closed == (10,) and view.accounted(5, "missing")
    tell(observed(14, "drift", "missing"))
    assert not view.open, "what was accepted is found again"
    tell(observed(15, "drift", "unexpected"))
    assert [one.seq for one in view.open] == [15], "and this is another one"
    tell(observed(16, "confirmed", "present"))
    assert not view.known and view.closed == (15,)


def test_the_fold_is_bounded_and_comes_back_as_it_was() -> None:
    view = Drifts()
    for seq in range(3 * RECENT):
        view.fold(observed(seq, "confirmed", "present", ref=seq), 0, None)  # type: ignore[arg-type]
    view.fold(observed(90_000, "drift", "missing", ref=9), 0, None)  # type: ignore[arg-type]
    assert len(view.recent) == RECENT and len(view.known) == 1
    import msgspec

    again = Drifts()
    again.load(msgspec.msgpack.decode(msgspec.msgpack.encode(view.dump())))
    assert (again.known, list(again.recent.items()), again.begun) == (view.known, list(view.recent.items()), view.begun)


def test_a_compaction_takes_what_is_known_of_the_effects_it_removes() -> None:
    view = Drifts()
    for ref in (5, 50):
        view.fold(observed(100 + ref, "drift", "missing", ref=ref), 0, None)  # type: ignore[arg-type]
    gone = Entry(seq=200, prev="", at=1, kind="compaction.made", runs=((3, 9), (20, 30)))
    view.fold(gone, 0, None)  # type: ignore[arg-type]
    assert list(view.known) == [50] and view.closed == (105,)


def test_an_answer_carries_the_host_and_the_words_in_its_opening(memory: AgentKit) -> None:
    reconciler("t.pay")(lambda: Observation("present", differs="it was 41"))
    performed(memory, ["pay"])
    memory.reconcile()
    [record] = [record for record in memory.log.records() if record.entry.kind == "effect.observed"]
    fields = {name: json.loads(value) for name, value in raw_fields(record.blob).items()}
    assert fields == {"host": "this process", "note": "it was 41"}
    assert (record.entry.out, record.entry.why, record.entry.of) == ("drift", "differs", memory.log.sagas()[0].saga)


def test_an_accepted_effect_that_nobody_knew_about_may_be_or_not(memory: AgentKit) -> None:
    """Whoever accepted it accounted for either."""

    def lost(idempotency_key: str) -> None:
        raise TimeoutError

    for answer in (PRESENT, ABSENT):
        reconciler("t.gone")(lambda answer=answer: answer)
        if not memory.log.sagas():
            with pytest.raises(Exception), memory.transaction(id="a") as saga:  # noqa: B017, PT011
                saga.execute("t.gone", lost, {}, semantics=COMPENSABLE, settle=0.05)
            eventually(lambda: memory.inbox())
            memory.accept(memory.inbox()[0]["id"], by="ann", reason="whatever it is")
        assert memory.reconcile().clean


@pytest.mark.parametrize(
    "wrong",
    [lambda: Observation("maybe"), lambda: Observation("absent", differs="x")],
    ids=["no word", "no such thing"],
)
def test_an_observation_is_one_of_three(wrong: Callable[[], Any]) -> None:
    with pytest.raises(BadValue):
        wrong()
    assert repr(Observation("cannot_tell")) == repr(CANNOT_TELL)


def test_a_reconciler_goes_by_the_name_of_a_tool() -> None:
    with pytest.raises(BadName):
        reconciler(lambda: PRESENT)  # type: ignore[arg-type]
    with pytest.raises(BadName):
        reconciler('bad "name"')
    assert Scope().tool == ""
