"""What people are told is what holds: every vote of a question, commands that are taken, whether it goes on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from approving import Asking, People
from click.testing import CliRunner, Result
from world import eventually

from amends import AgentKit, AmendsError, KillSwitch, PreFlightGate, Refused, SagaAborted, saga_scope
from amends.cli.main import main
from amends.runtime.config_file import BadConfig, load
from amends.runtime.follow import Follower
from amends.runtime.gate import ceremonies
from amends.runtime.gate.levels import FILE, NAMED, PRESENT
from amends.runtime.gate.proof import Credential
from amends.runtime.gate.rules import ApprovalPolicy, EscalationLevel
from amends.runtime.gate.ways import deciding, signing

BROKEN = 'version = 1\n[tols."bank.wire"]\nallow = true\n'
AGENT = """
from amends import IRREVERSIBLE, saga_scope

def wire():
    pass

with saga_scope("dead one", on_crash="ON_CRASH") as saga:
    saga.execute("bank.wire", wire, {}, semantics=IRREVERSIBLE)
"""


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args), prog_name="amends")


def asked(*args: str) -> Any:
    return json.loads(run(*args, "--json").stdout)


def wire(amount: int = 1) -> str:
    return "wired"


@pytest.fixture
def kit() -> Iterator[AgentKit]:
    with AgentKit("shop-agent", gate=PreFlightGate(approval=ApprovalPolicy(quorum=2))) as kit:
        yield kit


@pytest.fixture
def plain() -> Iterator[AgentKit]:
    with AgentKit("shop-agent") as kit:
        yield kit


@pytest.fixture
def dead(request: pytest.FixtureRequest) -> Iterator[str]:
    """The id of a question whose agent was killed; how its saga was to be taken up is the test's."""
    script = AGENT.replace("ON_CRASH", getattr(request, "param", "unwind"))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: run("inbox").stdout.count("bank.wire") > 0)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    [item] = [item for item in asked("inbox") if item["kind"] == "approval"]
    yield item["id"]


def said_of(name: str) -> list[tuple[str, str, bool]]:
    [step] = asked("show", name)["steps"]
    return [(one["by"], one["decision"], one["counted"]) for one in step["decisions"]]


def voted_in_the_log(name: str) -> list[str]:
    lines = [json.loads(line) for line in run("log", name, "--json").stdout.splitlines()]
    return [line["out"] for line in lines if line["kind"] == "vote.cast"]


# ---- every vote -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("12.1")
def test_a_yes_before_a_no_is_told_with_it(kit: AgentKit) -> None:
    asking = Asking(kit, wire, {"amount": 7}, id="rent")
    item = asking.seen().item
    kit.approve("rent", by="Ann")
    kit.deny("rent", by="Bob", note="too much")
    assert isinstance(asking.end(), BaseException)
    late = run("approve", item, "--by", "Cem")
    assert late.exit_code == 1 and "Bob denied it already" in late.stderr
    assert said_of("rent") == [("Ann", "approve", True), ("Bob", "deny", True), ("Cem", "approve", False)]
    story = run("show", "rent").stdout
    assert "Ann approved it (named)." in story and "Bob denied it (named): too much" in story
    assert "Cem approved it (named), too late: it was " in story
    assert voted_in_the_log("rent") == ["approve", "deny", "approve"]


@pytest.mark.promise("12.1")
def test_the_votes_of_a_step_that_a_halt_refused_are_told(kit: AgentKit) -> None:
    asking = Asking(kit, wire, {"amount": 7}, id="rent")
    assert asking.asked
    kit.approve("rent", by="Ann")
    KillSwitch(kit).halt(by="Eve", reason="stop")
    said = run("approve", "rent", "--by", "Bob")
    assert "It goes on." not in said.stdout and "does not go on now" in said.stdout, said.output
    assert "Halt on *" in said.stdout.splitlines()[-1]
    assert isinstance(asking.end(), BaseException)
    assert said_of("rent") == [("Ann", "approve", True), ("Bob", "approve", True)]


@pytest.mark.promise("12.1")
def test_the_log_of_a_committed_saga_has_its_votes(plain: AgentKit) -> None:
    asking = Asking(plain, wire, {"amount": 7}, id="rent")
    assert asking.asked
    said = run("approve", "rent", "--by", "Ann")
    assert "It goes on." in said.stdout.splitlines()[-1] and "" in said.stdout.splitlines()[-3:]
    assert asking.end() == "wired"
    assert voted_in_the_log("rent") == ["approve"] and said_of("rent") == [("Ann", "approve", True)]


@pytest.mark.promise("12.1")
def test_the_log_of_a_saga_has_what_followed_its_votes() -> None:
    policy = ApprovalPolicy(levels=(EscalationLevel(("team",), 0),))
    with AgentKit("shop-agent", gate=PreFlightGate(approval=policy)) as kit:
        asking = Asking(kit, wire, {"amount": 7}, id="rent")
        item = asking.seen().item
        eventually(lambda: "approval.escalated" in run("log", "rent").stdout)
        assert run("approve", item, "--by", "Ann", "--break-glass", "--reason", "fire").exit_code == 0
        assert asking.end() == "wired"
        assert run("accept", "rent", "--by", "Bob", "--reason", "seen").exit_code == 0
        said = run("log", "rent").stdout
        assert all(kind in said for kind in ("approval.escalated", "vote.cast", "review.closed"))


@pytest.mark.promise("12.1")
def test_a_question_that_is_over_says_so_first_and_counts_nothing_down(plain: AgentKit) -> None:
    asking = Asking(plain, wire, {"amount": 7}, id="rent")
    item = asking.seen().item
    plain.approve("rent", by="Ann")
    assert asking.end() == "wired"
    said = run("approve", item)
    assert said.exit_code == 1 and "Ann approved it already" in said.stdout.splitlines()[0]
    assert "time left" not in said.stdout and "needs  " not in said.stdout


@pytest.mark.promise("12.1")
def test_why_says_how_many_people_and_on_which_evidence(kit: AgentKit) -> None:
    People(kit)
    asking = Asking(kit, wire, {"amount": 7}, id="rent")
    assert asking.asked
    why = run("show", "rent", "--why").stdout
    assert "2 different people, each with a signature of a hardware key that somebody touched (level presence)" in why
    kit.deny("rent", by="Bob")
    asking.end()


# ---- commands that are taken ----------------------------------------------------------------------------------------


def key(kind: str) -> Credential:
    return Credential("id", kind, -8, "")


@pytest.mark.parametrize(
    ("level", "roles", "kinds", "ways"),
    [
        (NAMED, (), (), ["--by NAME"]),
        (NAMED, ("cfo",), ("raw",), ["--key FILE"]),
        (FILE, (), ("ssh", "raw"), ["--ssh KEY", "--key FILE"]),
        (PRESENT, (), ("webauthn", "ssh-sk"), ["--usb", "--page", "--ssh KEY"]),
    ],
)
def test_what_decides_a_request_is_told_by_its_level(
    level: int, roles: tuple[str, ...], kinds: tuple[str, ...], ways: list[str]
) -> None:
    found = deciding("abcd", "approve", level, roles, [key(kind) for kind in kinds])
    assert found == tuple(f"amends approve abcd {way}" for way in ways)
    assert deciding("abcd", "deny", level, roles, ()) == ("amends deny abcd --by NAME",)


def test_a_request_that_no_key_could_decide_hands_out_no_command_that_is_refused() -> None:
    assert deciding("abcd", "approve", FILE, (), ()) == ("amends keys list",)


def test_a_ceremony_is_told_with_a_way_to_sign_also_for_a_key_that_looks_like_an_option() -> None:
    assert signing("amends keys veto", [key("webauthn"), key("raw")]) == (
        "amends keys veto --usb", "amends keys veto --key FILE",
    )  # fmt: skip
    assert signing("amends keys revoke", [key("ssh")], "-x9") == ("amends keys revoke --ssh KEY -- -x9",)


@pytest.mark.promise("12.1")
def test_the_inbox_hands_out_what_a_bare_approve_hints_at(plain: AgentKit) -> None:
    People(plain)
    asking = Asking(plain, wire, {"amount": 7}, id="rent")
    item = asking.seen().item
    [told] = asked("inbox")
    hinted = [line.strip() for line in run("approve", item).stdout.splitlines() if line.startswith("    amends ")]
    assert [one for one in told["commands"] if " approve " in one] == hinted == [
        f"amends approve {item} --usb", f"amends approve {item} --page",
    ]  # fmt: skip
    assert told["commands"][-1] == f"amends deny {item} --by NAME"
    plain.deny("rent", by="Bob")
    asking.end()


@pytest.mark.promise("12.1")
@pytest.mark.parametrize("name", ["rent for june", "müller", "a;b"])
def test_the_command_that_lifts_a_lever_can_be_pasted(plain: AgentKit, name: str) -> None:
    asking = Asking(plain, wire, {"amount": 7}, id=name)
    assert asking.asked
    KillSwitch(plain).quarantine(asking.asked.saga, by="Eve", reason="look")
    [frozen] = [item for item in asked("inbox") if item["kind"] == "frozen"]
    words = shlex.split(frozen["commands"][0])
    assert words[:2] == ["amends", "resume"] and run(*words[1:]).exit_code == 0, words
    if name.isascii():
        assert words[2] == f"saga:{name}", "by the name that it was given"
    plain.deny(name, by="Bob")
    asking.end()


def test_a_halt_of_everything_is_lifted_by_a_quoted_star(plain: AgentKit) -> None:
    asking = Asking(plain, wire, {"amount": 7}, id="rent")
    assert asking.asked
    KillSwitch(plain).halt(by="Eve", reason="look", including_compensations=True, ttl=7200)
    plain.deny("rent", by="Bob")
    said = run("status").stdout
    assert "for another 2 h;" in said, said
    asking.end()
    for item in asked("inbox"):
        assert all("resume *" not in command for command in item["commands"])


def test_what_is_about_the_keyring_says_so_where_there_is_no_saga(plain: AgentKit) -> None:
    people = People(plain)
    found = ceremonies.quarantine(plain, next(iter(ceremonies.ring_now(plain).credentials)), "copied")
    assert found is not None and people.keys
    said = run("inbox").stdout
    assert "  the keyring, since " in said and "amends keys release --usb " in said, said


# ---- whether it goes on ---------------------------------------------------------------------------------------------


@pytest.mark.promise("12.1")
def test_the_question_of_a_dead_agent_says_that_nobody_waits_for_the_answer(dead: str) -> None:
    [item] = asked("inbox")
    assert item["reason"].startswith("Its agent died") and not item["approval"]["agent_lives"]
    assert item["commands"] == ["amends recoverd --once"]
    said = run("inbox").stdout
    assert "nobody waits for the answer now" in said and "open for" not in said
    yes = run("approve", dead, "--by", "Ann")
    assert yes.exit_code == 0 and "It goes on." not in yes.stdout and "Its agent died" in yes.stdout.splitlines()[-1]
    assert run("recoverd", "--once").exit_code == 0
    assert said_of("dead one") == [("Ann", "approve", True)]


@pytest.mark.parametrize("dead", ["resume"], indirect=True)
def test_an_answer_to_a_saga_that_will_be_run_again_is_said_to_count_then(dead: str) -> None:
    [item] = [item for item in asked("inbox") if item["kind"] == "approval"]
    assert "once the saga is run again" in item["reason"] and any(" approve " in one for one in item["commands"])


@pytest.mark.promise("12.1")
def test_an_approval_under_a_broken_policy_says_that_it_does_not_go_on(plain: AgentKit) -> None:
    asking = Asking(plain, wire, {"amount": 7}, id="rent")
    assert asking.asked and plain.home is not None
    plain.home.policy.write_text(BROKEN)
    said = run("approve", "rent", "--by", "Ann")
    assert "does not go on now" in said.stdout and "policy.toml:2" in said.stdout
    assert asked("status")["policy"]["broken"]
    assert isinstance(asking.end(), BaseException)
    assert said_of("rent") == [("Ann", "approve", True)]


# ---- files that are wrong -------------------------------------------------------------------------------------------


@pytest.mark.promise("12.1")
def test_a_broken_policy_is_named_by_doctor_and_by_status(plain: AgentKit) -> None:
    assert plain.home is not None
    plain.home.policy.write_text(BROKEN)
    found = [one for one in asked("doctor")["checks"] if one["check"] == "policy"]
    assert [one["level"] for one in found] == ["bad"] and "policy.toml:2" in found[0]["text"]
    status = run("status")
    assert status.exit_code == 0 and "BROKEN: no new step starts." in status.stdout and "policy.toml:2" in status.stdout


def test_an_agent_that_starts_with_a_broken_policy_is_told_in_words_that_nothing_begins(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "policy.toml").write_text(BROKEN)
    with pytest.raises(AmendsError) as wrong, saga_scope("rent", kit=AgentKit(home=tmp_path / "home")):
        pass
    assert wrong.value.code == "bad_policy_file" and not isinstance(wrong.value, SagaAborted | Refused)
    assert "policy.toml:2: unknown key tols" in str(wrong.value) and "No agent starts" in str(wrong.value)


def test_a_broken_config_says_who_is_told_and_who_is_not(plain: AgentKit) -> None:
    assert plain.home is not None
    said: list[str] = []
    running, fresh = Follower(plain, said.append), Follower(plain, said.append)
    plain.home.config.write_text('[[notify]]\nname = "ops"\nkind = "command"\ncommand = ["true"]\n')
    assert [channel.name for channel in running.channels()] == ["ops"]
    plain.home.config.write_text('[[notify]]\nnam = "ops"\nkind = "command"\n')
    assert [channel.name for channel in running.channels()] == ["ops"] and fresh.channels() == ()
    assert "where they went before" in said[0] and "Nobody is told" not in said[0]
    assert "Nobody is told from here" in said[1] and "before." not in said[1]
    assert "config    BROKEN" in run("status").stdout and asked("status")["config"]["broken"]
    with pytest.raises(BadConfig):
        load(plain.home.config)


def test_a_record_of_another_saga_is_not_taken_for_one_of_this(kit: AgentKit) -> None:
    first, second = Asking(kit, wire, {"amount": 7}, id="one"), Asking(kit, wire, {"amount": 8}, id="two")
    eventually(lambda: len(asked("inbox")) == 2)
    kit.approve("one", by="Ann")
    kit.deny("two", by="Bob")
    kit.deny("one", by="Bob")
    first.end()
    second.end()
    assert voted_in_the_log("one") == ["approve", "deny"] and voted_in_the_log("two") == ["deny"]
