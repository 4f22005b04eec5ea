"""Levers as people pull them: in one process, and every other one is stopped at its next decision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from approving import Asking, People
from click.testing import CliRunner, Result
from test_follow import Clock
from world import World, eventually, kinds

from amends import COMPENSABLE, AgentKit, KillSwitch, Refused, SagaAborted, saga_scope
from amends.cli.main import main
from amends.runtime.gate import signing
from amends.runtime.gate.limits import BudgetLimit
from amends.runtime.gate.rules import ApprovalPolicy, PreFlightGate
from amends.runtime.inbox import items
from amends.store.errors import AmendsError, BadValue, NotFound

AGENT = """
import os, sys
from amends import COMPENSABLE, Compensation, Refused, SagaAborted, compensator, saga_scope

LEDGER = os.environ["LEDGER"]


def told(word):
    with open(LEDGER, "a") as ledger:
        ledger.write(word + "\\n")


@compensator("shop.refund")
def refund(who, n, idempotency_key):
    told(f"{who} undo {n}")


def charge(who, n):
    told(f"{who} do {n}")


if __name__ == "__main__":
    name, tool = sys.argv[1:]
    print("ready", flush=True)
    for line in sys.stdin:  # a saga for each word, a step for each number in it
        try:
            with saga_scope(f"{name}-{line.strip()}") as saga:
                n = 0
                while sys.stdin.readline().strip() == "step":
                    n += 1
                    saga.execute(tool, charge, {"who": name, "n": n}, semantics=COMPENSABLE, tags=("money",),
                                 undo=Compensation(handler="shop.refund", kwargs={"who": name, "n": n}))
                    print(f"done {n}", flush=True)
            print("committed", flush=True)
        except (Refused, SagaAborted) as error:
            cause = getattr(error, "cause", error)
            frozen = getattr(getattr(error, "report", None), "frozen", "")
            print(f"refused {getattr(cause, 'code', cause)} {frozen}".strip(), flush=True)
"""


class Agent:
    """An agent in a process of its own, led by the line."""

    def __init__(self, folder: Path, name: str = "run", tool: str = "shop.charge") -> None:
        self.ledger, self.name = folder / "ledger", name
        script = folder / "agent.py"
        script.write_text(AGENT)
        self.process = subprocess.Popen(
            [sys.executable, script, name, tool], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.hear() == "ready"

    def say(self, word: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def step(self) -> str:
        self.say("step")
        return self.hear()

    def told(self) -> list[str]:
        lines = self.ledger.read_text().splitlines()
        return [line.removeprefix(f"{self.name} ") for line in lines if line.startswith(f"{self.name} ")]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    """Starts agents on a home that is there. Whoever undoes has the same ledger in its environment."""
    monkeypatch.setenv("LEDGER", str(tmp_path / "ledger"))
    (tmp_path / "ledger").touch()
    AgentKit(home=tmp_path / "home").close()
    started: list[Agent] = []

    def start(*args: str) -> Agent:
        started.append(Agent(tmp_path, *args))
        return started[-1]

    yield start
    for one in started:
        one.end()


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args), prog_name="amends")


def asked(*args: str, code: int = 0) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def pull(*args: str) -> Any:
    """A verb in a process of its own, as a person would run it."""
    done = subprocess.run(
        [sys.executable, "-m", "amends.cli", *args, "--by", "ada", "--reason", "an incident", "--json"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


# ---- one process stops another --------------------------------------------------------------------------------------


@pytest.mark.promise("2.2")
def test_a_halt_stops_the_next_step_of_another_process_and_its_rollback_goes_on(agents: Any) -> None:
    agent = agents()
    agent.say("one")
    assert agent.step() == "done 1"
    pull("halt")
    assert agent.step() == "refused halted"
    assert agent.told() == ["do 1", "undo 1"], "nothing new happened, and what had was taken back"
    agent.say("two")
    assert agent.step() == "refused halted"
    assert [lever["scope"] for lever in pull("resume")["lifted"]] == ["*"]
    agent.say("three")
    assert agent.step() == "done 1"


@pytest.mark.promise("2.2")
def test_no_effect_of_any_process_is_announced_after_the_record_of_a_halt(tmp_path: Path, agents: Any) -> None:
    runners = [agents(f"run-{n}") for n in range(4)]
    stop = threading.Event()

    def work(agent: Agent) -> None:
        for number in range(10_000):
            agent.say(f"s{number}")
            while not stop.is_set():
                if agent.step().startswith("refused"):
                    return

    threads = [threading.Thread(target=work, args=(runner,)) for runner in runners]
    for thread in threads:
        thread.start()
    eventually(lambda: all(len(runner.told()) > 3 for runner in runners), 60)
    halted = pull("halt")["record"]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it was never refused"
    stop.set()
    with AgentKit(home=tmp_path / "home") as kit:
        records = [record.entry for record in kit.log.records()]
    late = [entry.seq for entry in records if entry.kind == "step.intended" and entry.seq > halted]
    before = [entry.seq for entry in records if entry.kind == "step.intended" and entry.seq < halted]
    assert not late and len(before) >= 12
    assert len([entry for entry in records if entry.kind == "step.refused" and entry.why == "halted"]) == 4


@pytest.mark.promise("2.2")
def test_a_drain_lets_what_runs_finish_and_begins_nothing(agents: Any) -> None:
    agent, other = agents(), agents("other")
    agent.say("one")
    assert agent.step() == "done 1"
    pull("drain")
    other.say("one")
    assert other.step() == "refused draining"
    assert agent.step() == "done 2"
    agent.say("end")
    assert agent.hear() == "committed"
    agent.say("two")
    assert agent.step() == "refused draining"
    assert agent.told() == ["do 1", "do 2"] and other.told() == []


@pytest.mark.promise("2.2")
def test_a_scope_stops_what_it_names_and_nothing_else(agents: Any) -> None:
    shop, mail = agents("shop", "shop.charge"), agents("mail", "mail.send")
    for agent in (shop, mail):
        agent.say("one")
        assert agent.step() == "done 1"
    pull("halt", "tool:shop.*")
    assert shop.step() == "refused halted" and mail.step() == "done 2"
    pull("halt", "tag:money")
    assert mail.step() == "refused halted"
    status = asked("status")
    assert status["switch"] == "RESTRICTED"
    assert [lever["scope"] for lever in status["levers"]] == ["tool:shop.*", "tag:money"]


@pytest.mark.promise("2.2")
def test_a_quarantined_saga_is_neither_driven_nor_undone_until_a_person_says_so(agents: Any) -> None:
    agent, other = agents(), agents("other")
    for each in (agent, other):
        each.say("one")
        assert each.step() == "done 1"
    assert pull("quarantine", "run-one")["scope"] == "saga:run-one"
    assert agent.step() == "refused quarantined quarantined"
    assert agent.told() == ["do 1"], "not undone"
    assert other.step() == "done 2", "another saga goes on"
    agent.end()
    swept = asked("recoverd", "--once")
    assert swept["recovered"] == [] and agent.told() == ["do 1"]
    assert {row["saga"]: row["outcome"] for row in asked("ps")}["run-one"] == "quarantined"
    assert asked("status", code=1)["frozen"] == ["run-one"]
    pull("resume", "run-one")
    assert asked("recoverd", "--once")["recovered"] == ["run-one"]
    assert agent.told() == ["do 1", "undo 1"]


@pytest.mark.promise("2.2")
def test_a_halt_may_hold_rollbacks_too(agents: Any) -> None:
    agent = agents()
    agent.say("one")
    assert agent.step() == "done 1"
    pull("halt", "--including-compensations")
    assert agent.step() == "refused halted halted"
    assert agent.told() == ["do 1"]
    agent.end()
    assert asked("recoverd", "--once")["recovered"] == []
    pull("resume", "--all")
    assert asked("recoverd", "--once")["recovered"] == ["run-one"] and agent.told() == ["do 1", "undo 1"]


@pytest.mark.promise("2.2")
def test_a_halt_with_a_time_lifts_itself(agents: Any) -> None:
    agent = agents()
    pull("halt", "--for", "1s")
    words = []

    def passed() -> bool:
        agent.say(f"try-{len(words)}")
        words.append(agent.step())
        return words[-1].startswith("done")

    eventually(passed, 30)
    assert set(words[:-1]) <= {"refused halted"}
    assert asked("status")["switch"] == "RUNNING"


# ---- in one process, by the class that others know ------------------------------------------------------------------


def charged(kit: AgentKit, world: World, tool: str = "shop.charge", name: str | None = None, **options: Any) -> None:
    with saga_scope(name, kit=kit) as saga:
        saga.execute(tool, world.book, {"what": tool}, semantics=COMPENSABLE, undo=world.undo, **options)


def refusal(kit: AgentKit, world: World, **options: Any) -> str:
    """The code with which a call is refused now, empty if it is not."""
    try:
        charged(kit, world, **options)
    except Refused as refused:
        return refused.code
    except SagaAborted as aborted:
        assert isinstance(aborted.cause, Refused)
        return aborted.cause.code
    return ""


@pytest.mark.promise("2.2")
@pytest.mark.parametrize(
    ("scope", "stopped"),
    [
        ("*", True), ("tool:shop.charge", True), ("tool:shop.*", True), ("tag:money", True), ("saga:mine", True),
        ("tool:shop", False), ("tool:shop.charge.*", False), ("tool:sho.*", False), ("tag:mone", False),
        ("tool:mail.*", False),
    ],
)  # fmt: skip
def test_scopes_by_table(kit: AgentKit, world: World, scope: str, stopped: bool) -> None:
    switch = KillSwitch(kit)
    with saga_scope("mine", kit=kit) as saga:
        saga.execute("look.up", world.book, {"what": "x"}, semantics=COMPENSABLE, undo=world.undo)
        kit.log.flush()
        switch.halt(scope, by="ada", reason="why")
        assert bool(switch.stops("shop.charge", ("money",), "mine")) == stopped
        call = {"semantics": COMPENSABLE, "undo": world.undo, "tags": ("money",)}
        if stopped:
            with pytest.raises(Refused) as refused:
                saga.execute("shop.charge", world.book, {"what": "y"}, **call)
            assert (
                refused.value.code == "halted"
                and refused.value.facts["scope"] == switch.status()["levers"][0]["scope"]
                or scope.startswith("saga:")
            )
        else:
            saga.execute("shop.charge", world.book, {"what": "y"}, **call)
        switch.resume(scope, by="ada", reason="over")


def test_the_class_does_what_its_users_know(kit: AgentKit, world: World) -> None:
    switch = KillSwitch(kit)
    assert switch.status() == {"readable": True, "switch": "RUNNING", "levers": []}
    switch.halt(scope="tool:shop.*", reason="double charges", by="ada", ttl=3600)
    assert switch.status()["switch"] == "RESTRICTED"
    switch.halt(reason="everything", by="ada")
    assert switch.status()["switch"] == "HALTED" and refusal(kit, world) == "halted"
    switch.resume(by="ada", reason="over")
    switch.halt(reason="a deploy", by="ada", drain=True)
    assert switch.status()["switch"] == "DRAINING" and refusal(kit, world, tool="mail.send") == "draining"
    switch.resume(None, by="ada", reason="over")
    assert switch.status()["switch"] == "RUNNING" and refusal(kit, world) == ""
    with saga_scope("odd", kit=kit) as saga:
        saga.execute("look.up", world.book, {"what": "x"}, semantics=COMPENSABLE, undo=world.undo)
        kit.log.flush()
        switch.quarantine("odd", by="ada", reason="looks wrong")
        assert switch.is_quarantined("odd") and not switch.is_quarantined("unheard")
        switch.release("odd", by="ada", reason="was fine")
        assert not switch.is_quarantined("odd")


@pytest.mark.promise("2.2")
def test_a_lever_runs_out_on_lived_time(world: World) -> None:
    clock = Clock()
    kit = AgentKit.in_memory(clock=clock)
    KillSwitch(kit).halt(by="ada", reason="an hour", ttl=3600)
    assert refusal(kit, world) == "halted"
    clock.ahead_s = 3599
    assert refusal(kit, world) == "halted"
    clock.ahead_s = 3601
    assert refusal(kit, world) == "" and KillSwitch(kit).status()["levers"] == []


@pytest.mark.parametrize("what", ["set", "lifted", "ended"])
def test_a_lever_that_has_run_out_is_dropped_and_is_not_lifted_once_more(world: World, what: str) -> None:
    clock = Clock()
    kit = AgentKit.in_memory(clock=clock)
    switch = KillSwitch(kit)
    for _ in range(3):
        switch.halt("tool:shop.*", by="ada", reason="an hour", ttl=3600)
    stays = switch.halt("tag:money", by="ada", reason="until I say so")
    assert len(kit.engine.state.switches.levers) == 4
    clock.ahead_s = 3601
    with pytest.raises(NotFound) as gone:
        switch.resume("tool:shop.*", by="ada", reason="over")
    assert gone.value.code == "no_lever" and "has run out" in gone.value.message
    assert "switch.lifted" not in [record.entry.kind for record in kit.log.records()]
    if what == "set":
        stays = switch.halt("tag:money", by="bob", reason="me too")
    elif what == "ended":
        assert refusal(kit, world) == ""
    else:
        assert [lever.scope for lever in switch.resume(None, by="ada", reason="over")] == ["tag:money"]
        assert kit.engine.state.switches.levers == {}, "nothing is looked at for each call any more"
        return
    levers = kit.engine.state.switches.levers
    assert stays.record in levers and {lever.target for lever in levers.values()} == {"tag:money"}


class SetForward(Clock):
    """A wall clock that somebody sets; the boot clock goes on."""

    def boot_ms(self) -> int:
        return self._true.boot_ms()


def test_setting_the_wall_clock_lifts_nothing(world: World) -> None:
    clock = SetForward()
    kit = AgentKit.in_memory(clock=clock)
    KillSwitch(kit).halt(by="ada", reason="an hour", ttl=3600)
    clock.ahead_s = 86_400
    assert refusal(kit, world) == "halted"


def test_a_refused_call_of_a_halted_device_has_no_intent(kit: AgentKit, world: World) -> None:
    KillSwitch(kit).halt(by="ada", reason="why")
    assert refusal(kit, world, name="mine") == "halted"
    kit.log.flush()
    assert world.calls == 0 and "step.intended" not in kinds(kit, kit.engine.hide("mine"))


BAD = [
    "",
    " ",
    "tool:",
    "tool:*",
    "tool:.*",
    "tol:x",
    "tag:",
    "saga:",
    "tool:a*",
    "*.x",
    "tag:a,b",
    "shop.charge",
    "tool: x",
    "tool:x\n",
]


@pytest.mark.promise("2.2")
@pytest.mark.parametrize("scope", BAD)
def test_a_typing_error_halts_nothing_and_says_the_grammar(memory: AgentKit, scope: str) -> None:
    with pytest.raises(BadValue) as wrong:
        KillSwitch(memory).halt(scope, by="ada", reason="why")
    assert wrong.value.code == "bad_scope" and "tool:NAME" in wrong.value.next
    assert KillSwitch(memory).status()["levers"] == []


@pytest.mark.parametrize("who", [{"by": "", "reason": "x"}, {"by": "ada", "reason": " "}])
def test_a_lever_has_a_name_and_a_reason(memory: AgentKit, who: dict[str, str]) -> None:
    with pytest.raises(BadValue):
        KillSwitch(memory).halt(**who)
    with pytest.raises(BadValue):
        KillSwitch(memory).resume(**who)


@pytest.mark.parametrize("ttl", [-1, float("nan"), float("inf"), True, "1h"])
def test_a_time_that_is_none_is_refused(memory: AgentKit, ttl: Any) -> None:
    with pytest.raises(BadValue):
        KillSwitch(memory).halt(by="ada", reason="x", ttl=ttl)
    assert KillSwitch(memory).status()["switch"] == "RUNNING"


def test_there_is_nothing_to_lift_where_nothing_is_set(memory: AgentKit) -> None:
    with pytest.raises(NotFound) as nothing:
        KillSwitch(memory).resume(by="ada", reason="x")
    assert nothing.value.code == "no_lever"


# ---- the verbs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def device(tmp_path: Path) -> Path:
    with AgentKit(home=tmp_path / "home"):
        return tmp_path / "home"


def test_a_lever_is_told_with_what_lifts_it(device: Path) -> None:
    said = run("halt", "tool:stripe.*", "--by", "ada", "--reason", "x", "--for", "2h")
    assert said.exit_code == 0 and "amends resume 'tool:stripe.*' --by NAME --reason TEXT" in said.stdout
    [lever] = asked("status")["levers"]
    assert {"mode": "halt", "scope": "tool:stripe.*", "by": "ada", "reason": "x"}.items() <= lever.items()
    assert 0 < lever["left_ms"] <= 7_200_000 and lever["since"].endswith("Z") and not lever["including_compensations"]
    assert "halt on tool:stripe.*" in run("status").stdout


@pytest.mark.parametrize(
    ("args", "code", "error"),
    [
        (("halt",), 2, "usage"),
        (("halt", "--by", "a", "--reason", "x", "--for", "soon"), 2, "usage"),
        (("halt", "--by", "a", "--reason", "x", "--for", "\u0663s"), 2, "usage"),
        (("halt", "--by", "a\u200b", "--reason", "x"), 2, "bad_name"),
        (("halt", "--by", "a", "--reason", "\u200b"), 2, "bad_value"),
        (("halt", "tol:x", "--by", "a", "--reason", "x"), 2, "bad_scope"),
        (("quarantine", "nobody", "--by", "a", "--reason", "x"), 2, "not_found"),
        (("resume", "--by", "a", "--reason", "x"), 2, "no_lever"),
        (("resume", "nobody", "--by", "a", "--reason", "x"), 2, "not_found"),
        (("resume", "*", "--all", "--by", "a", "--reason", "x"), 2, "usage"),
    ],
)
def test_mistakes_are_said_with_their_code(device: Path, args: tuple[str, ...], code: int, error: str) -> None:
    assert asked(*args, code=code)["error"]["code"] == error
    assert asked("status")["switch"] == "RUNNING"


def test_a_verb_makes_no_home(tmp_path: Path) -> None:
    assert asked("halt", "--by", "a", "--reason", "x", code=2)["error"]["code"] == "no_home"
    assert not (tmp_path / "home").exists()


@pytest.mark.promise("2.2")
@pytest.mark.parametrize("file", ["policy.toml", "handlers.toml", "config.toml"])
def test_a_halt_works_whatever_is_wrong_with_the_files_beside_the_log(device: Path, file: str) -> None:
    (device / file).write_text("this is [[ no TOML\n")
    assert pull("halt")["mode"] == "halt"
    assert asked("status")["switch"] == "HALTED"
    pull("resume", "--all")


def test_resume_all_lifts_everything(device: Path) -> None:
    for scope in ("*", "tool:a", "tag:b"):
        run("halt", scope, "--by", "ada", "--reason", "x")
    run("drain", "--by", "ada", "--reason", "x")
    lifted = asked("resume", "--all", "--by", "ada", "--reason", "x")["lifted"]
    assert [(one["mode"], one["scope"]) for one in lifted] == [
        ("halt", "*"), ("halt", "tool:a"), ("halt", "tag:b"), ("drain", "*"),
    ]  # fmt: skip
    assert asked("status")["levers"] == []


# ---- status ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("2.2")
def test_status_never_says_running_when_it_could_not_read(device: Path) -> None:
    for name in ("amends.db-wal", "amends.db-shm"):
        (device / name).unlink(missing_ok=True)
    (device / "amends.db").write_bytes(os.urandom(8192))
    said = run("status", "--json")
    assert said.exit_code in (3, 4, 7) and "RUNNING" not in said.stdout
    assert "RUNNING" not in run("status").output


@pytest.mark.promise("2.2")
def test_a_status_that_raises_is_unknown(kit: AgentKit, monkeypatch: Any) -> None:
    def fail() -> None:
        raise AmendsError("the disk is gone")

    monkeypatch.setattr(kit.log, "refresh", fail)
    assert kit.status()["switch"] == "UNKNOWN" and kit.status()["readable"] is False
    assert KillSwitch(kit).status()["switch"] == "UNKNOWN" and KillSwitch(kit).is_quarantined("any")


def test_status_tells_limits_with_what_is_left_and_why(tmp_path: Path, world: World) -> None:
    gate = PreFlightGate(limits=[BudgetLimit("spend", max_total="100.00", window=3600, unit="EUR")])
    with AgentKit(home=tmp_path / "home", gate=gate) as kit, saga_scope("mine", kit=kit) as saga:
        saga.execute("shop.charge", lambda amount: 1, {"amount": "40.50"}, semantics=COMPENSABLE, undo=None)
        [row] = kit.status()["limits"]
        assert (row["limit"], row["said"]["left"], row["said"]["used"]) == ("spend", "59.50 EUR", "40.50 EUR")
        assert 0 < row["frees_ms"] <= 3_600_000
    assert "59.50 EUR left" in run("status").stdout


def test_status_tells_what_is_locked_and_asked(tmp_path: Path, world: World) -> None:
    with AgentKit(home=tmp_path / "home") as kit, saga_scope("mine", kit=kit) as saga:
        saga.execute("shop.ship", world.book, {"what": "x"}, semantics=COMPENSABLE, undo=world.undo, locks=("order:7",))
        [lock] = kit.status()["locks"]
        assert lock["saga"] == "mine" and len(lock["lock"]) == 16
        assert "held by mine" in run("status").stdout
    assert asked("status")["locks"] == []
    assert set(asked("status")) >= {
        "readable", "switch", "levers", "limits", "breakers", "locks", "approvals", "reviews", "keyring", "policy",
        "notices", "dead", "frozen", "open", "waiting",
    }  # fmt: skip


@pytest.mark.promise("4.5")
def test_status_counts_the_votes_that_the_inbox_counts(world: World) -> None:
    kit = AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=2)))
    people = People(kit, Cem=("admin", "approver"))
    waiting = Asking(kit, lambda to: "sent", {"to": "ann"}, id="pay")
    seen = waiting.seen()
    signing.vote(kit, seen.item, "approve", proof=people.yes("Ann", seen))
    people.revoke("Ann", by="Cem")
    [told], [row] = kit.inbox(), kit.status()["approvals"]
    assert (told["approval"]["have"], row["have"], row["standing"]) == (0, 0, "pending")
    kit.deny(seen.item, by="Bob")
    waiting.end()


# ---- inbox --wait ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("14.6")
def test_inbox_wait_ends_when_something_needs_a_person(device: Path, world: World) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-m", "amends.cli", "inbox", "--wait", "--kind", "escalated", "--json"], stdout=subprocess.PIPE
    )
    with AgentKit(home=device) as kit:
        with pytest.raises(SagaAborted), saga_scope("stands", kit=kit) as saga:
            saga.execute("shop.charge", world.book, {"what": "x"}, semantics=COMPENSABLE)
            raise RuntimeError("no")
        out, _ = waiting.communicate(timeout=60)
        assert waiting.returncode == 1
        [item] = json.loads(out)
        assert (item["saga"], item["tool"]) == ("stands", "shop.charge") and item["commands"]
        assert asked("inbox", "--kind", "approval") == []
        assert asked("inbox", "--kind", item["kind"], code=1)[0]["id"] == item["id"]


@pytest.mark.promise("14.6")
def test_inbox_wait_sees_what_comes_after_it_has_looked(device: Path, monkeypatch: Any) -> None:
    looked = threading.Event()

    def look(kit: AgentKit) -> list[dict[str, Any]]:
        found = items(kit)
        looked.set()
        return found

    def fail() -> None:
        assert looked.wait(20)
        with AgentKit(home=device) as kit, suppress(SagaAborted), saga_scope("stands", kit=kit) as saga:
            saga.execute("shop.charge", lambda: 1, {}, semantics=COMPENSABLE)
            raise RuntimeError("no")

    monkeypatch.setattr("amends.cli.sagas.items", look)
    later = threading.Thread(target=fail)
    later.start()
    [item] = asked("inbox", "--wait", "--timeout", "60", code=1)
    later.join(20)
    assert item["saga"] == "stands"


@pytest.mark.promise("14.6")
def test_inbox_wait_with_nothing_ends_well_at_its_time(device: Path) -> None:
    assert asked("inbox", "--wait", "--timeout", "0.2") == []
    assert asked("inbox", "--wait", "--timeout", "0") == []


def test_a_kind_that_is_none_is_said(device: Path) -> None:
    assert asked("inbox", "--kind", "aproval", code=2)["error"]["code"] == "usage"
