"""The command line as people and scripts meet it: transcripts over real logs, and real processes where one must die."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from amends import (
    COMPENSABLE,
    IRREVERSIBLE,
    AgentKit,
    Compensation,
    Refused,
    SagaAborted,
    compensator,
    saga_scope,
)
from amends.cli import main as main_module
from amends.cli import ui
from amends.cli.main import COMMANDS, main

AGENT = """
import json, os, signal, sys
from amends import COMPENSABLE, IRREVERSIBLE, Compensation, compensator, saga_scope

LEDGER = os.environ["LEDGER"]


def told(*words):
    with open(LEDGER, "a") as ledger:
        ledger.write(json.dumps(words) + "\\n")


@compensator("shop.refund")
def refund(charge, idempotency_key):
    told("refund", charge, idempotency_key)


def charge(amount_minor, idempotency_key):
    told("charge", amount_minor, idempotency_key)
    return {"id": f"ch_{amount_minor}"}


def send(to):
    told("send", to)


if __name__ == "__main__":
    name, mode = sys.argv[1:]
    with saga_scope(name, name="order") as saga:
        for amount in (100, 200):
            saga.execute("shop.charge", charge, {"amount_minor": amount}, semantics=COMPENSABLE,
                         compensate=lambda done: Compensation(handler="shop.refund", kwargs={"charge": done["id"]}))
        if mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "ask":
            saga.execute("mail.send", send, {"to": "ann@example.org"}, semantics=IRREVERSIBLE)
"""

REFUNDS: list[str] = []


@compensator("cli.refund")
def refund(charge: str, idempotency_key: str) -> None:
    if charge == "refuses" and "refuses" not in REFUNDS:
        raise ValueError("the vendor said no")
    REFUNDS.append(idempotency_key)


def charge(n: Any = 1) -> Any:
    return n


def declines(n: int = 1) -> None:
    raise ValueError("declined")


def undo(charge: str = "one") -> Compensation:
    return Compensation(handler="cli.refund", kwargs={"charge": charge})


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args), prog_name="amends")


def asked(*args: str, code: int = 0) -> Any:
    """The document that a verb answers on --json."""
    result = run(*args, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[AgentKit]:
    REFUNDS.clear()
    with AgentKit(home=tmp_path / "home") as kit:
        yield kit


def committed(kit: AgentKit, name: str = "order-17", steps: int = 2) -> None:
    with saga_scope(name, kit=kit) as saga:
        for n in range(steps):
            saga.execute("shop.charge", charge, {"n": n}, semantics=COMPENSABLE, undo=undo(f"ch_{n}"))


def failed(kit: AgentKit, name: str, **options: Any) -> None:
    with pytest.raises(SagaAborted), saga_scope(name, kit=kit) as saga:
        saga.execute("shop.charge", charge, {"n": 1}, semantics=COMPENSABLE, **options)
        saga.execute("shop.ship", declines, {"n": 2}, semantics=COMPENSABLE)


class Agent:
    """An agent in a process of its own, with a ledger that can be asked what really happened."""

    def __init__(self, folder: Path) -> None:
        self.script, self.ledger = folder / "agent.py", folder / "ledger"
        self.script.write_text(AGENT)
        self.env = {**os.environ, "LEDGER": str(self.ledger)}

    def start(self, name: str, mode: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(self.script), name, mode], env=self.env, stderr=subprocess.PIPE)

    def run(self, name: str, mode: str) -> int:
        process = self.start(name, mode)
        process.communicate(timeout=60)
        return process.returncode

    def told(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.ledger.read_text().splitlines()]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    made = Agent(tmp_path)
    monkeypatch.setenv("LEDGER", str(made.ledger))
    return made


def until(said: Callable[[], Any]) -> Any:
    """What `said` says once it says something."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        found = said()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it never came")


# ---- looking --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("12")
@pytest.mark.parametrize("verb", ["ps", "show x", "log", "inbox", "status", "doctor", "verify", "approve x --by A",
                                  "undo x --by A --reason B", "retry x --by A",
                                  "accept x --by A --reason B"])  # fmt: skip
def test_a_missing_home_is_said_with_how_to_begin_and_is_not_made(verb: str, tmp_path: Path) -> None:
    result = run(*verb.split())
    assert result.exit_code == 2
    assert "There is no log at" in result.stderr and str(tmp_path / "home") in result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.promise("12.1")
def test_an_error_on_json_is_one_object_on_standard_output_with_the_same_exit_code(kit: AgentKit) -> None:
    for args in (["show", "nothing"], ["nonsense"], ["ps", "--nonsense"], ["approve", "abcd", "--by", "A"], ["undo"]):
        plain, as_json = run(*args), run(*args, "--json")
        assert plain.exit_code == as_json.exit_code == 2
        error = json.loads(as_json.stdout)["error"]
        assert error.keys() == {"code", "message", "next"} and error["message"] and error["next"]
        assert error["message"].split()[0] in plain.stderr and plain.stdout == ""


@pytest.mark.promise("12")
def test_home_and_json_are_taken_before_the_verb_and_after_it(kit: AgentKit, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(kit)
    path = str(kit.home.path)
    monkeypatch.setenv("AMENDS_HOME", "/nonexistent")
    said = [
        json.loads(run(*args).stdout)[0]["saga"]
        for args in (
            ["--home", path, "--json", "ps"],
            ["ps", "--json", "--home", path],
            ["--json", "ps", "--home", path],
        )
    ]
    assert said == ["order-17"] * 3


@pytest.mark.promise("12.1")
def test_ps_has_its_stable_keys_and_a_committed_saga_is_clean(kit: AgentKit) -> None:
    committed(kit)
    [row] = asked("ps")
    assert row.keys() >= {
        "saga", "name", "outcome", "clean", "started_at", "ended_at", "device", "steps", "standing",
    }  # fmt: skip
    assert (row["saga"], row["outcome"], row["clean"], row["steps"], row["standing"]) == (
        "order-17", "committed", True, 2, 0,
    )  # fmt: skip
    assert (
        row["device"].startswith("amends.local/") and row["started_at"].endswith("Z") and row["ended_at"].endswith("Z")
    )


@pytest.mark.promise("12.1")
def test_show_has_its_stable_keys_with_arguments_result_and_inverse(kit: AgentKit) -> None:
    failed(kit, "order-9", undo=undo())
    told = asked("show", "order-9")
    assert told.keys() >= {"saga", "name", "outcome", "clean", "cause", "steps"}
    assert told["outcome"] == "compensated" and told["clean"] is True and told["cause"] == "ValueError: declined"
    first, second = told["steps"]
    assert first.keys() >= {
        "step", "tool", "semantics", "state", "attempts", "idempotency_key", "args", "result", "error", "compensation",
    }  # fmt: skip
    assert (first["step"], first["tool"], first["state"], first["args"], first["result"]) == (
        1, "shop.charge", "compensated", {"n": 1}, 1,
    )  # fmt: skip
    assert first["compensation"].keys() >= {"handler", "kwargs", "state", "attempts"}
    assert first["compensation"]["kwargs"] == {"charge": "one"} and first["compensation"]["attempts"] == 1
    assert first["compensation"]["idempotency_key"] == REFUNDS[0]
    assert (second["state"], second["error"], second["compensation"]) == ("failed", "ValueError: declined", None)


@pytest.mark.promise("12")
def test_a_saga_goes_by_a_beginning_of_four_characters_that_only_it_has(kit: AgentKit) -> None:
    committed(kit, "order-17")
    committed(kit, "order-29")
    header = asked("show", "order-17")["id"]
    assert asked("show", "order-1")["saga"] == asked("show", header)["saga"] == asked("show", header[:8])["saga"]
    for name in ("order", "ord", "nobody"):
        assert run("show", name).exit_code == 2
    assert "2 sagas begin with" in run("show", "order").stderr


@pytest.mark.promise("12")
@given(st.text())
def test_no_control_or_invisible_character_is_ever_printed(text: str) -> None:
    said = ui.clean(text)
    assert all(one.isprintable() or unicodedata.category(one) == "Zs" for one in said)  # Zs: blanks of any script
    assert not {"\x1b", "\n", "\r", "\x9b", "\u202e", "\u2066", "\u200b"} & set(said)


@pytest.mark.promise("12")
def test_escapes_in_names_arguments_and_errors_do_not_reach_the_terminal(kit: AgentKit) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    with pytest.raises(SagaAborted), saga_scope("a\u202eb", name="\u202ec", kit=kit) as saga:
        saga.execute("shop.charge", charge, {"n": {evil: evil}}, semantics=COMPENSABLE, undo=undo(evil))
        raise ValueError(evil)
    header = asked("ps")[0]["id"]
    for args in (
        ["ps"],
        ["show", header],
        ["show", header, "--why"],
        ["log"],
        ["ps", "--json"],
        ["show", header, "--json"],
    ):
        result = run(*args)
        assert result.exit_code == 0
        assert not {"\x1b", "\x07", "\u202e"} & set(result.output), args
    assert "\\x1b]0;owned" in run("show", header).output


@pytest.mark.promise("12")
@pytest.mark.parametrize("no_colour", ["", "1"])
def test_colours_are_for_terminals_and_no_color_takes_them_away(kit: AgentKit, no_colour: str) -> None:
    committed(kit)
    env = {**os.environ, "NO_COLOR": no_colour, "TERM": "xterm"}
    command = [sys.executable, "-m", "amends.cli", "ps"]
    assert "\x1b" not in subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, env=env, stdout=theirs, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    os.close(theirs)
    said = _drained(ours, process)
    assert b"order-17" in said and (b"\x1b[" in said) == (not no_colour)


def _drained(fd: int, process: subprocess.Popen[bytes]) -> bytes:
    said = b""
    try:
        while True:
            said += os.read(fd, 4096)
    except OSError:  # how Linux says that the other end is closed
        process.wait(timeout=60)
        os.close(fd)
        return said


@pytest.mark.promise("12")
def test_whoever_only_looks_needs_no_keys_and_writes_nothing(kit: AgentKit) -> None:
    committed(kit)
    home = kit.home.path
    kit.close()
    for name in ("seed", "install", "anchor"):
        (home / "device" / name).unlink()
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*") if "-shm" not in path.name}
    [row] = asked("ps")
    assert (row["saga"], row["outcome"]) == ("order-17", "committed")
    assert asked("show", row["id"])["steps"][0]["state"] == "done"
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*") if "-shm" not in path.name} == before
    refused = run("undo", row["id"], "--by", "Ann", "--reason", "no")
    assert refused.exit_code == 4 and "keys" in refused.stderr


@pytest.mark.promise("12")
def test_the_version_is_answered_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys\nfrom amends.cli.main import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as end: print({'apsw', 'nacl', 'asyncio', 'msgspec'} & set(sys.modules), end.code)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("amends ") and said.splitlines()[1] == "set() 0"


@pytest.mark.promise("12")
def test_a_bug_of_ours_is_called_one_and_shows_its_traceback_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(context: Any, name: str) -> Any:
        raise RuntimeError("never thought of that")

    monkeypatch.setattr(main_module.Program, "get_command", lambda self, context, name: broken(context, name))
    result = run("ps")
    assert result.exit_code == 70 and "bug of amends" in result.stderr and "Traceback" not in result.stderr
    monkeypatch.setenv("AMENDS_DEBUG", "1")
    assert "Traceback" in run("ps").stderr
    assert json.loads(run("ps", "--json").stdout)["error"]["code"] == "bug"


@pytest.mark.promise("12")
def test_a_misspelt_verb_is_told_the_one_that_was_meant() -> None:
    result = run("shwo")
    assert result.exit_code == 2 and "`amends show`" in result.stderr


def test_every_verb_of_the_table_is_there_and_the_bare_command_lists_them() -> None:
    result = run()
    assert result.exit_code == 0 and all(name in result.stdout for name in COMMANDS)
    for name in COMMANDS:
        assert run(name, "--help").exit_code == 0


@pytest.mark.promise("12")
def test_completion_scripts_and_the_ids_of_sagas(kit: AgentKit) -> None:
    for shell in ("bash", "zsh", "fish"):
        result = run("completions", shell)
        assert result.exit_code == 0 and "_AMENDS_COMPLETE" in result.stdout
    committed(kit)
    env = {**os.environ, "_AMENDS_COMPLETE": "bash_complete", "COMP_WORDS": "amends show ord", "COMP_CWORD": "2"}
    said = subprocess.run([sys.executable, "-m", "amends.cli"], env=env, capture_output=True, text=True, timeout=60)
    assert "order-17" in said.stdout


# ---- a death --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("4.5")
@pytest.mark.promise("12.1")
def test_a_killed_agent_is_interrupted_then_undone_and_everything_agrees(agent: Agent) -> None:
    assert agent.run("order-17", "die") == -signal.SIGKILL
    [row] = asked("ps")
    assert (row["outcome"], row["standing"], row["clean"], row["ended_at"]) == ("interrupted", 2, False, None)
    assert asked("status", code=1)["dead"] == ["order-17"]
    assert "recoverd --once" in run("show", "order-17").stdout

    swept = asked("recoverd", "--once")
    assert swept == {"recovered": ["order-17"], "escalated": [], "skipped": []}
    [row] = asked("ps")
    assert (row["outcome"], row["standing"], row["clean"]) == ("compensated", 0, True)
    assert [told[:2] for told in agent.told()] == [
        ["charge", 100],
        ["charge", 200],
        ["refund", "ch_200"],
        ["refund", "ch_100"],
    ]
    told = asked("show", "order-17")
    keys = {step["compensation"]["idempotency_key"] for step in told["steps"]}
    assert keys == {key for verb, _, key in agent.told() if verb == "refund"}
    assert told["cause"] == "its process died"
    assert asked("verify")["verdict"] == "INTACT" and asked("inbox") == []


@pytest.mark.promise("14.10")
def test_show_tells_the_story_and_why_names_the_host_that_undid_it(agent: Agent) -> None:
    agent.run("order-17", "die")
    run("recoverd", "--once")
    story = run("show", "order-17").stdout
    first = story.index("shop.charge(amount_minor=100) was called")
    died = story.index("Its process died")
    undone = story.index('To undo shop.charge, shop.refund(charge="ch_200") was called')
    assert (
        first
        < died
        < undone
        < story.index('shop.refund(charge="ch_100") was called, key')
        < story.index("Nothing stands.")
    )
    why = run("show", "order-17", "--why").stdout
    assert f"it ran in {agent.script}" in why and "derived from the result" in why and "nobody was asked" in why
    assert all(len(step["reasons"]) >= 3 for step in asked("show", "order-17", "--why")["steps"])


@pytest.mark.promise("12.1")
def test_a_live_agent_runs_and_one_that_asks_waits(agent: Agent) -> None:
    process = agent.start("order-17", "ask")
    try:
        [item] = until(lambda: _inbox())
        assert item.keys() >= {"id", "kind", "saga", "step", "tool", "since", "reason", "commands"}
        assert (item["kind"], item["saga"], item["step"], item["tool"]) == ("approval", "order-17", 3, "mail.send")
        [row] = asked("ps")
        assert (row["outcome"], row["standing"], row["clean"]) == ("waiting", 0, False)
        assert asked("show", "order-17")["steps"][2]["state"] == "waiting"
        assert run("approve", item["id"][:5], "--by", "Ann", "--note", "looks right").exit_code == 0
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
    assert agent.told()[-1] == ["send", "ann@example.org"]
    second = run("deny", item["id"], "--by", "Bob")
    assert second.exit_code == 1 and "Ann approved it already" in second.stderr
    assert "Ann approved it: looks right" in run("show", "order-17", "--why").stdout


def _inbox() -> Any:
    found = run("inbox", "--json")
    return json.loads(found.stdout) if found.exit_code == 1 else None


def test_a_denied_step_never_happens_and_the_saga_is_undone(agent: Agent) -> None:
    process = agent.start("order-17", "ask")
    try:
        until(lambda: _inbox())
        assert run("deny", "order-17", "--by", "Ann").exit_code == 0
        assert process.wait(30) != 0
    finally:
        process.kill()
        process.communicate()
    assert [told[0] for told in agent.told()] == ["charge", "charge", "refund", "refund"]
    told = asked("show", "order-17")
    assert told["outcome"] == "compensated" and [step["state"] for step in told["steps"]][2] == "refused"


def test_inbox_wait_ends_when_something_needs_a_person(agent: Agent) -> None:
    run("init")
    assert run("inbox", "--wait", "--timeout", "0.1").exit_code == 0
    command = [sys.executable, "-m", "amends.cli", "inbox", "--wait", "--json"]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE)
    process = agent.start("order-17", "ask")
    try:
        said, _ = waiting.communicate(timeout=60)
        assert waiting.returncode == 1 and json.loads(said)[0]["tool"] == "mail.send"
    finally:
        for one in (waiting, process):
            one.kill()
            one.communicate()


# ---- undoing --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.20")
def test_an_undone_committed_saga_is_one_outcome_with_its_follow_up(kit: AgentKit) -> None:
    committed(kit)
    result = run("undo", "order-17", "--by", "Ann", "--reason", "wrong customer")
    assert result.exit_code == 0 and len(REFUNDS) == 2
    [row] = asked("ps")
    assert (row["saga"], row["outcome"], row["clean"], row["steps"]) == ("order-17", "compensated", True, 2)
    told = asked("show", "order-17")
    assert told["cause"] == "Ann asked to undo it: wrong customer"
    assert [step["state"] for step in told["steps"]] == ["compensated", "compensated"]
    assert [step["compensation"]["idempotency_key"] for step in told["steps"]] == REFUNDS[::-1]
    assert len(asked("ps", "--all")) == 2
    followup = next(row["id"] for row in asked("ps", "--all") if row["saga"] != "order-17")
    assert asked("show", followup)["saga"] == "order-17"
    again = run("undo", "order-17", "--by", "Ann", "--reason", "again")
    assert again.exit_code == 6 and "left to undo" in again.stderr


@pytest.mark.promise("1.20")
def test_a_step_undone_alone_leaves_its_saga_committed(kit: AgentKit) -> None:
    committed(kit)
    assert run("undo", "order-17", "--step", "1", "--by", "Ann", "--reason", "one too many").exit_code == 0
    told = asked("show", "order-17")
    assert told["outcome"] == "committed" and [step["state"] for step in told["steps"]] == ["compensated", "done"]
    assert run("undo", "order-17", "--by", "Ann", "--reason", "the rest").exit_code == 0
    assert asked("ps")[0]["outcome"] == "compensated" and len(REFUNDS) == 2


@pytest.mark.promise("4.7")
def test_a_dry_run_tells_what_would_be_undone_and_changes_nothing(kit: AgentKit) -> None:
    committed(kit)
    kit.close()
    before = (asked("status")["records"], sorted(os.listdir(kit.home.run)))
    would = asked("undo", "order-17", "--dry-run")
    assert would["dry_run"] is True and [step["step"] for step in would["undone"]] == [2, 1]
    assert "Nothing was changed" in run("undo", "order-17", "--dry-run").stdout
    assert (asked("status")["records"], sorted(os.listdir(kit.home.run))) == before and not REFUNDS


@pytest.mark.promise("4.7")
def test_a_dry_run_says_what_would_stand_and_why(kit: AgentKit) -> None:
    with saga_scope("order-9", kit=kit) as saga:
        saga.execute("note.pin", charge, {"n": 1}, semantics=COMPENSABLE)
        saga.execute("letter.post", charge, {"n": 2}, semantics=COMPENSABLE, undo=Compensation.human("fetch it back"))
        saga.execute("lamp.on", charge, {"n": 3}, semantics=COMPENSABLE, undo=Compensation(fn=lambda: None))
        saga.execute("shop.charge", charge, {"n": 4}, semantics=COMPENSABLE, undo=undo())
    would = asked("undo", "order-9", "--dry-run", code=1)
    assert [step["tool"] for step in would["undone"]] == ["shop.charge"]
    assert {step["tool"]: step["reason"] for step in would["standing"]} == {
        "note.pin": "orphaned", "letter.post": "human_task", "lamp.on": "closure",
    }  # fmt: skip


def test_undoing_is_somebodys_decision(kit: AgentKit) -> None:
    committed(kit)
    for args in (["--by", "Ann"], ["--reason", "because"]):
        assert run("undo", "order-17", *args).exit_code == 2
    assert asked("ps")[0]["outcome"] == "committed"


# ---- what needs a person --------------------------------------------------------------------------------------------


@pytest.mark.promise("4.3")
def test_what_stands_without_an_inverse_is_accepted_by_a_named_person(kit: AgentKit) -> None:
    failed(kit, "order-9")
    [row] = asked("ps")
    assert (row["outcome"], row["standing"], row["clean"]) == ("escalated", 1, False)
    assert asked("show", "order-9")["steps"][0]["state"] == "orphaned"
    [item] = asked("inbox", code=1)
    assert item["commands"] == [f"amends accept {item['id']} --by NAME --reason TEXT"]
    assert run("accept", "order-9", "--by", "Ann").exit_code == 2
    assert run("accept", "order-9", "--by", "Ann", "--reason", "a gift").exit_code == 0
    [row] = asked("ps")
    assert (row["outcome"], row["standing"], row["clean"]) == ("compensated", 0, True)
    assert asked("show", "order-9")["steps"][0]["state"] == "accepted"
    assert "Ann accepted" in run("show", "order-9", "--why").stdout and asked("inbox") == []


def test_a_saga_with_two_things_to_settle_asks_which(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted), saga_scope("order-9", kit=kit) as saga:
        saga.execute("note.pin", charge, {"n": 1}, semantics=COMPENSABLE)
        saga.execute("letter.post", charge, {"n": 2}, semantics=COMPENSABLE, undo=Compensation.human("fetch it back"))
        raise ValueError("no")
    result = run("accept", "order-9", "--by", "Ann", "--reason", "fine")
    items = asked("inbox", code=1)
    assert "what undoes it: a person: fetch it back" in run("inbox").stdout
    assert result.exit_code == 2 and all(item["id"] in result.stderr for item in items)
    for item in items:
        assert run("accept", item["id"], "--by", "Ann", "--reason", "fine").exit_code == 0
    assert asked("ps")[0]["outcome"] == "compensated"


def test_retry_goes_on_from_the_compensation_that_failed(kit: AgentKit) -> None:
    failed(kit, "order-9", undo=undo("refuses"))
    [row] = asked("ps")
    assert (row["outcome"], row["standing"]) == ("escalated", 1)
    told = asked("show", "order-9")["steps"][0]
    assert (told["state"], told["compensation"]["state"], told["compensation"]["attempts"]) == (
        "compensation_failed", "failed", 3,
    )  # fmt: skip
    assert run("retry", "order-9", "--by", "Ann").exit_code == 1
    REFUNDS.append("refuses")  # the vendor has changed its mind
    assert run("retry", "order-9", "--by", "Ann").exit_code == 0
    assert asked("ps")[0]["outcome"] == "compensated" and len(set(REFUNDS)) == 2


class Question:
    """A saga that asks for a named person, in a thread of this process; `error` is what its scope was left by."""

    def __init__(self, kit: AgentKit, name: str, args: dict[str, Any]) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._ask, args=(kit, name, args))
        self.thread.start()
        [self.item] = until(lambda: _inbox())

    def _ask(self, kit: AgentKit, name: str, args: dict[str, Any]) -> None:
        try:
            with saga_scope(name, kit=kit) as saga:
                saga.execute("bank.wire", wire, args, semantics=IRREVERSIBLE)
        except SagaAborted as aborted:
            self.error = aborted

    def decided(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive()


def wire(**to: Any) -> str:
    return "wired"


@pytest.mark.promise("12.1")
def test_the_inbox_says_what_is_to_be_approved_and_where_the_whole_story_is(kit: AgentKit) -> None:
    asks = Question(kit, "rent for june", {"memo": "\x1b[2J" + "x" * 5000, "amount": 4200, "to": "DE12"})
    assert asks.item["args"]["to"] == "DE12" and len(asks.item["args"]["memo"]) == 5004
    said = run("inbox")
    assert said.exit_code == 1 and "rent for june step 1 bank.wire" in said.stdout
    assert "amount=4200" in said.stdout and 'to="DE12"' in said.stdout, "nothing hides behind a long argument"
    assert "\\x1b[2J" in said.stdout and "\x1b" not in said.stdout and max(map(len, said.stdout.splitlines())) < 300
    assert "amends show 'rent for june'" in said.stdout and asks.item["show"] == "amends show 'rent for june'"
    assert run("approve", "rent for june", "--by", "Ann").exit_code == 0
    asks.decided()
    assert asks.error is None


@pytest.mark.promise("1.1")
def test_whoever_decides_second_is_told_who_was_first_by_item_and_by_saga(kit: AgentKit) -> None:
    asks = Question(kit, "irr-1", {"to": "DE12"})
    assert "irr-1, step 1 bank.wire" in run("deny", "irr-1", "--by", "Ann", "--note", "too much").stdout
    asks.decided()
    for name in ("irr-1", asks.item["id"], asks.item["id"][:5]):
        for verb in ("approve", "deny"):
            second = run(verb, name, "--by", "Bob")
            assert second.exit_code == 1 and "Ann denied it already" in second.stderr, (name, second.stderr)
            assert "`amends show irr-1`" in second.stderr and ".1" not in second.stderr
    with pytest.raises(Refused) as late:
        kit.approve("irr-1", by="Bob")
    assert late.value.code == "decided"


@pytest.mark.promise("1.1")
def test_a_denial_is_told_with_the_name_and_the_note_and_not_with_itself_as_advice(kit: AgentKit) -> None:
    asks = Question(kit, "irr-2", {"to": "DE12"})
    kit.deny("irr-2", by="Ann", note="too much")
    asks.decided()
    assert str(asks.error) == "Ann denied bank.wire: too much. Clean: 1 never happened."
    assert asked("show", "irr-2")["cause"] == "Ann denied bank.wire: too much."
    story = run("show", "irr-2").stdout
    assert "undone because: Ann denied bank.wire: too much." in story and "amends show irr-2" not in story


@pytest.mark.promise("4.3")
def test_the_inbox_tells_the_error_of_a_compensation_and_what_waits_behind_it(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted), saga_scope("order-9", kit=kit) as saga:
        saga.execute("shop.reserve", charge, {"n": 1}, semantics=COMPENSABLE, undo=undo("fine"))
        saga.execute("shop.charge", charge, {"n": 2}, semantics=COMPENSABLE, undo=undo("refuses"))
        raise ValueError("no")
    [item] = asked("inbox", code=1)
    assert (item["args"], item["result"], item["error"]) == ({"n": 2}, 2, "ValueError: the vendor said no")
    assert item["compensation"]["kwargs"] == {"charge": "refuses"}
    assert item["behind"] == [{"step": 1, "tool": "shop.reserve"}]
    said = run("inbox").stdout
    assert "shop.charge(n=2) returned 2" in said and "compensation failed: ValueError: the vendor said no" in said
    assert 'what undoes it: cli.refund(charge="refuses")' in said and "waits: step 1 shop.reserve" in said
    again = run("retry", "order-9", "--by", "Ann")
    assert again.exit_code == 1 and "compensation failed: ValueError: the vendor said no" in again.stdout


@pytest.mark.promise("1.20")
def test_what_an_undo_left_is_named_by_the_saga_that_a_person_knows(kit: AgentKit) -> None:
    with saga_scope("paid-1", kit=kit) as saga:
        saga.execute("shop.charge", charge, {"n": 7}, semantics=COMPENSABLE)
    assert run("undo", "paid-1", "--by", "Ann", "--reason", "wrong").exit_code == 1
    [item] = asked("inbox", code=1)
    assert (item["saga"], item["step"], item["args"], item["result"]) == ("paid-1", 1, {"n": 7}, 7)
    assert "paid-1 step 1 shop.charge" in run("inbox").stdout
    kit.accept("paid-1", by="Ann", reason="a gift")
    assert asked("inbox") == []


@pytest.mark.promise("4.3")
def test_a_retry_of_what_nothing_can_undo_is_refused_and_every_item_keeps_its_id(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted), saga_scope("order-9", kit=kit) as saga:
        saga.execute("shop.charge", charge, {"n": 1}, semantics=COMPENSABLE, undo=undo())
        saga.execute("note.pin", charge, {"n": 2}, semantics=COMPENSABLE)
        saga.execute("shop.charge", charge, {"n": 3}, semantics=COMPENSABLE, undo=undo("refuses"))
        raise ValueError("no")
    [failed] = asked("inbox", code=1)
    REFUNDS.append("refuses")
    assert run("retry", failed["id"], "--by", "Ann").exit_code == 1, "the note still stands"
    [orphan] = asked("inbox", code=1)
    records = asked("status", code=1)["records"]
    for name in (orphan["id"], "order-9"):
        refused = run("retry", name, "--by", "Ann")
        assert refused.exit_code == 6 and f"amends accept {orphan['id']}" in refused.stderr
        assert "was undone" not in refused.output
    assert asked("status", code=1)["records"] == records and asked("inbox", code=1) == [orphan]


def test_the_ids_of_the_others_stay_when_one_item_is_tried_again(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted), saga_scope("order-9", kit=kit, on_compensation_failure="continue") as saga:
        saga.execute("note.pin", charge, {"n": 1}, semantics=COMPENSABLE)
        saga.execute("shop.charge", charge, {"n": 2}, semantics=COMPENSABLE, undo=undo("refuses"))
        raise ValueError("no")
    before = {item["tool"]: item["id"] for item in asked("inbox", code=1)}
    assert run("retry", "order-9", "--by", "Ann").exit_code == 1
    after = {item["tool"]: item["id"] for item in asked("inbox", code=1)}
    assert before.keys() == after.keys() == {"note.pin", "shop.charge"} and before["note.pin"] == after["note.pin"]


def test_a_retry_tells_only_what_it_did_itself(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted), saga_scope("order-9", kit=kit) as saga:
        saga.execute("shop.charge", charge, {"n": 1}, semantics=COMPENSABLE, undo=undo("refuses"))
        saga.execute("shop.reserve", charge, {"n": 2}, semantics=COMPENSABLE, undo=undo())
        raise ValueError("no")
    REFUNDS.append("refuses")
    said = run("retry", "order-9", "--by", "Ann")
    assert said.exit_code == 0 and "step 1 shop.charge was undone" in said.stdout and "step 2" not in said.stdout


@pytest.mark.promise("4.3")
def test_what_a_person_accepted_is_never_said_not_to_stand(kit: AgentKit) -> None:
    failed(kit, "order-9")
    assert run("accept", "order-9", "--by", "Ann", "--reason", "paid by cheque").exit_code == 0
    story = run("show", "order-9").stdout
    assert "Nothing stands unaccounted for; accepted: step 1 by Ann." in story and "Nothing stands.\n" not in story
    assert "compensated, accounted for" in story and "all that could be undone was" not in story
    second = run("accept", "order-9", "--by", "Bob", "--reason", "me too")
    assert second.exit_code == 1 and "Ann accepted it already" in second.stderr


@pytest.mark.promise("4.1")
def test_whoever_looks_is_told_in_one_line_what_died(agent: Agent) -> None:
    agent.run("order-17", "die")
    for verb in ("inbox", "ps"):
        plain, as_json = run(verb), run(verb, "--json")
        for result in (plain, as_json):
            [line] = result.stderr.splitlines()
            assert result.exit_code == 0 and "order-17" in line and "amends recoverd --once" in line
        assert isinstance(json.loads(as_json.stdout), list) and "Nothing needs you" not in plain.stdout
    run("recoverd", "--once")
    assert run("inbox").stderr == run("ps").stderr == "" and "Nothing needs you." in run("inbox").stdout


def test_show_names_the_process_that_died_and_when_it_was_last_heard_of(agent: Agent) -> None:
    process = agent.start("order-17", "die")
    process.communicate(timeout=60)
    said = run("show", "order-17").stdout
    assert f"order-17 began in process {process.pid} (gone)." in said
    assert f"Its process {process.pid} died; its last record is from " in said and " s ago." in said
    run("recoverd", "--once")
    assert "driver" not in run("show", "order-17").stdout


# ---- one outcome ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("1.13")
def test_a_saga_inside_another_is_counted_and_told_with_it(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted), saga_scope("trip", kit=kit) as outer:
        outer.execute("flight.book", charge, {"n": 1}, semantics=COMPENSABLE, undo=undo("flight"))
        with saga_scope("hotel", kit=kit) as inner:
            inner.execute("room.book", charge, {"n": 2}, semantics=COMPENSABLE, undo=undo("room"))
        outer.execute("car.rent", declines, {"n": 3}, semantics=COMPENSABLE)
    [row] = asked("ps")
    assert (row["saga"], row["outcome"], row["steps"], row["standing"]) == ("trip", "compensated", 3, 0)
    told = asked("show", "trip")
    assert [(step["saga"], step["tool"]) for step in told["steps"]] == [
        ("trip", "flight.book"), ("hotel", "room.book"), ("trip", "car.rent"),
    ]  # fmt: skip
    assert [step["tool"] for step in asked("show", "hotel")["steps"]] == ["room.book"]
    assert {row["saga"] for row in asked("ps", "--all")} == {"trip", "hotel"}


def test_what_goes_on_in_a_new_saga_is_followed_there(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted), saga_scope("long-1", kit=kit) as saga:
        saga.execute("a", charge, {"n": 1}, semantics=COMPENSABLE, undo=undo("a"))
        saga.continue_as_new("long-2")
        saga.execute("b", charge, {"n": 2}, semantics=COMPENSABLE, undo=undo("b"))
        raise ValueError("late")
    rows = {row["saga"]: row for row in asked("ps")}
    assert {name: row["outcome"] for name, row in rows.items()} == {"long-1": "compensated", "long-2": "compensated"}
    assert asked("show", "long-1")["steps"][0]["state"] == "compensated"
    assert len(asked("show", "long-2")["steps"]) == 2


def test_a_restarted_saga_is_one_row_and_its_first_run_is_told_with_it(kit: AgentKit) -> None:
    failed(kit, "order-9", undo=undo())
    with saga_scope("order-9", kit=kit, restart="Ann", restart_reason="fixed") as saga:
        saga.execute("shop.charge", charge, {"n": 1}, semantics=COMPENSABLE, undo=undo())
    [row] = asked("ps")
    assert (row["saga"], row["outcome"], row["steps"]) == ("order-9", "committed", 1)
    story = run("show", "order-9").stdout
    assert story.index("ValueError: declined") < story.index("Ann had it run again: fixed") < story.index("committed.")


@pytest.mark.promise("1.8")
def test_an_effect_that_lands_late_is_told_with_its_second_compensation(kit: AgentKit) -> None:
    def slow(n: int) -> int:
        time.sleep(0.6)
        return n

    with pytest.raises(SagaAborted), saga_scope("late-1", kit=kit) as saga:
        saga.execute("slow", slow, {"n": 1}, semantics=COMPENSABLE, undo=undo(), timeout=0.1, settle=0.05)
    until(lambda: len(REFUNDS) == 2)
    until(lambda: asked("ps")[0]["ended_at"])
    [row] = asked("ps")
    assert (row["saga"], row["outcome"], row["clean"], row["steps"]) == ("late-1", "compensated", True, 1)
    assert asked("show", "late-1")["steps"][0]["compensation"]["attempts"] == 2
    assert "once more because the effect landed after the first" in run("show", "late-1").stdout


def test_ps_shows_as_many_as_are_asked_for_and_says_that_there_are_more(kit: AgentKit) -> None:
    for n in range(4):
        committed(kit, f"order-{n}", steps=1)
    result = run("ps", "--limit", "2", "--json")
    assert [row["saga"] for row in json.loads(result.stdout)] == ["order-3", "order-2"] and "--limit 0" in result.stderr
    assert len(asked("ps", "--limit", "4")) == len(asked("ps", "--limit", "0")) == 4


def test_a_running_saga_is_called_so(kit: AgentKit) -> None:
    with saga_scope("order-1", kit=kit) as saga:
        saga.execute("shop.charge", charge, {"n": 1}, semantics=COMPENSABLE, undo=undo())
        [row] = asked("ps")
        assert (row["outcome"], row["standing"], row["clean"], row["ended_at"]) == ("running", 0, False, None)


# ---- the records ----------------------------------------------------------------------------------------------------


def test_log_prints_records_and_their_openings_and_can_be_narrowed_to_a_saga(kit: AgentKit) -> None:
    committed(kit, "order-17")
    committed(kit, "order-29")
    lines = [json.loads(line) for line in run("log", "--json").stdout.splitlines()]
    assert [line["seq"] for line in lines] == list(range(len(lines))) and lines[0]["kind"] == "log.opened"
    mine = [json.loads(line) for line in run("log", "order-29", "--json").stdout.splitlines()]
    assert {line["saga"] for line in mine} == {asked("show", "order-29")["id"]}
    assert any("args" in opening for line in mine for opening in line["openings"])
    assert len(run("log", "--since", str(len(lines) - 2)).stdout.splitlines()) == 2


def test_log_follow_goes_on_with_what_other_processes_append(kit: AgentKit) -> None:
    command = [sys.executable, "-u", "-m", "amends.cli", "log", "--follow", "--json"]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)  # select sees what is not buffered here
    try:
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["kind"] == "log.opened"
        committed(kit)
        seen = []
        while "saga.ended" not in seen:
            assert select.select([following.stdout], [], [], 30)[0]
            seen.append(json.loads(following.stdout.readline())["kind"])
    finally:
        following.send_signal(signal.SIGINT)
        following.communicate(timeout=30)
    assert following.returncode == 130


@pytest.mark.promise("6.1")
def test_verify_says_what_it_did_not_prove_and_finds_one_edited_byte(kit: AgentKit) -> None:
    import apsw

    committed(kit)
    kit.close()
    told = asked("verify")
    assert told.keys() >= {"verdict", "level", "size", "root", "findings", "not_proved"}
    assert told["verdict"] == "INTACT" and told["findings"] == [] and told["not_proved"]
    database = apsw.Connection(str(kit.home.db))
    line = bytes(next(database.execute("select line from entry where seq = 3"))[0])
    database.execute("update entry set line = ? where seq = 3", (line.replace(b"shop", b"slop"),))
    database.close()
    told = asked("verify", code=1)
    assert told["verdict"] == "TAMPERED" and told["findings"][0]["seq"] == 3
    assert asked("verify", str(kit.home.db), code=1)["verdict"] == "TAMPERED"
    plain = run("verify")
    assert plain.exit_code == 1 and "TAMPERED" in plain.stdout and "record 3" in plain.stdout


# ---- the device -----------------------------------------------------------------------------------------------------


def test_init_is_harmless_twice_and_adoption_is_somebodys_decision(tmp_path: Path) -> None:
    first, second = asked("init"), asked("init")
    assert (first["created"], second["created"]) == (True, False) and first["origin"] == second["origin"]
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
    assert run("init", "--adopt").exit_code == 2 and run("init", "--by", "Ann").exit_code == 2
    healthy = run("init", "--adopt", "--by", "Ann", "--reason", "restored")
    assert healthy.exit_code == 2 and "in order" in healthy.stderr  # it would put a history out of reach for nothing
    for name in ("amends.db", "amends.db-wal", "amends.db-shm"):
        (tmp_path / "home" / name).unlink()
    third = asked("init", "--adopt", "--by", "Ann", "--reason", "restored")
    assert third["adopted"] and third["origin"] != first["origin"]
    assert asked("verify")["verdict"] == "INTACT"


def test_status_of_a_log_that_cannot_be_read_never_says_that_all_is_well(kit: AgentKit) -> None:
    committed(kit)
    kit.close()
    assert asked("status")["readable"] is True
    for path in kit.home.path.glob("amends.db*"):
        path.unlink()
    kit.home.db.write_bytes(b"not a database, and long enough to be looked at" * 100)
    told = asked("status", code=3)
    assert told["readable"] is False and told["error"]
    plain = run("status")
    assert plain.exit_code == 3 and "could not be read" in plain.stdout
    assert run("ps").exit_code == 7 and run("doctor").exit_code == 1


@pytest.mark.promise("14.2")
def test_doctor_names_a_field_that_holds_a_token_and_not_the_token(kit: AgentKit) -> None:
    token = "sk_live_" + "a1b2c3d4" * 3
    with saga_scope("order-1", kit=kit) as saga:
        saga.execute("http.post", charge, {"n": {"headers": [f"Bearer {token}"]}}, semantics=COMPENSABLE, undo=undo())
    result = run("doctor")
    assert result.exit_code == 1 and "http.post: args.n.headers.0" in result.stdout and token not in result.output


@pytest.mark.promise("4.1")
@pytest.mark.promise("4.4")
def test_doctor_says_what_died_what_has_no_host_and_that_no_daemon_is_installed(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    agent.run("order-17", "die")
    assert "1 saga of a dead agent waits to be undone" in run("doctor").stdout and "1 sagas" not in run("status").stdout
    levels = {(check["check"], check["level"]) for check in asked("doctor", code=1)["checks"]}
    assert {("sagas", "bad"), ("handlers", "ok"), ("service", "warn")} <= levels
    agent.script.unlink()
    found = [check for check in asked("doctor", code=1)["checks"] if check["check"] == "handlers"]
    assert [check["level"] for check in found] == ["bad", "bad"] and "shop.refund" in found[0]["text"]


@pytest.mark.promise("4.4")
def test_doctor_hosts_starts_every_host_and_says_what_it_lacks(kit: AgentKit, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("from amends import compensator\n\n@compensator('x.undo')\ndef undo(): pass\n")
    kit.home.handlers.write_text(
        f'version = 1\n[python.good]\ninterpreter = "{sys.executable}"\nfiles = ["{tmp_path}/good.py"]\n'
        f'[python.bad]\ninterpreter = "{sys.executable}"\nmodules = ["no_such_module_here"]\n'
        '[exec."mail.unsend"]\ncommand = ["/nonexistent/unsend"]\n'
    )
    hosts = {check["text"].split(":")[0]: check for check in asked("doctor", "--hosts", code=1)["checks"]
             if check["check"] == "hosts"}  # fmt: skip
    assert hosts["[python.good]"]["level"] == "ok" and "x.undo" in hosts["[python.good]"]["text"]
    assert hosts["[python.bad]"]["level"] == "bad" and "no_such_module_here" in hosts["[python.bad]"]["text"]
    assert hosts["mail.unsend"]["level"] == "bad"


@pytest.mark.promise("14.8")
def test_doctor_paths_lists_every_file_there_is(kit: AgentKit) -> None:
    committed(kit)
    kit.close()
    listed = {Path(told["path"]) for told in asked("doctor", "--paths").values()}
    home, anchors = kit.home.path, kit.home.anchors
    for path in [*home.rglob("*"), *anchors.rglob("*")]:
        assert any(path == one or one in path.parents for one in listed - {home}) or path.name.startswith(
            "amends.db"
        ), path
    assert {home, kit.home.db, anchors} <= listed


def test_a_healthy_device_needs_nothing(kit: AgentKit) -> None:
    committed(kit)
    result = run("doctor")
    assert result.exit_code == 0 and "fdatasync" in result.stdout
    assert "a day" not in result.stdout.replace("after a day", ""), "a log of some seconds tells nothing about days"
    assert not [path for path in kit.home.path.iterdir() if path.name.startswith(".doctor")]


@pytest.mark.promise("12")
def test_an_irreversible_step_shows_that_nothing_takes_it_back(kit: AgentKit) -> None:
    def answer() -> None:
        until(lambda: _inbox())
        assert run("approve", "order-1", "--by", "Ann").exit_code == 0

    person = threading.Thread(target=answer)
    person.start()
    with saga_scope("order-1", kit=kit) as saga:
        saga.execute("mail.send", charge, {"n": 1}, semantics=IRREVERSIBLE)
    person.join()
    [step] = asked("show", "order-1")["steps"]
    assert (step["semantics"], step["state"], step["compensation"]) == ("irreversible", "done", None)
    assert "it takes a yes of a named person (level named)" in run("show", "order-1", "--why").stdout


@pytest.mark.promise("6.2")
@pytest.mark.parametrize("vanish", [lambda db: db.unlink(), lambda db: db.write_bytes(b"")])
def test_a_log_that_vanished_is_not_a_home_that_nobody_has_made(tmp_path, vanish) -> None:
    from amends import AgentKit, saga_scope

    home = tmp_path / "home"
    with AgentKit(home=home) as kit, saga_scope("order", kit=kit) as saga:
        saga.execute("pay", lambda: 1, {}, semantics="compensable")
    for name in ("amends.db-wal", "amends.db-shm"):
        (home / name).unlink()
    vanish(home / "amends.db")
    for verb in ("ps", "status", "log", "inbox"):
        done = subprocess.run(
            [sys.executable, "-m", "amends.cli", "--home", str(home), verb], capture_output=True, text=True
        )
        told = done.stdout + done.stderr
        assert (done.returncode in (4, 3)) and "no_home" not in told and "gone" in told, (verb, told)


# ---- outputs that do not take it, and words that are none ------------------------------------------------------------


def shell(line: str, home: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `amends` is the program and `$1`… are `words`."""
    program = f'amends() {{ "{sys.executable}" -m amends.cli "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", program, "bash", *words], env={**os.environ, "AMENDS_HOME": str(home), **env},
        capture_output=True, text=True, timeout=60, errors="surrogateescape",
    )  # fmt: skip


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full, a disk without room, is not there")
UNTAKEN = [
    ("verify --json >/dev/full", 10),
    ("ps >/dev/full", 10),
    ("ps --json >/dev/full", 10),
    ("log >/dev/full", 10),
    ("--help >/dev/full", 10),
    ("show nope --json >/dev/full", 2),
    ("recoverd --once >/dev/full", 0),
    ("nosuch 2>/dev/full", 2),
    ("show nope 2>/dev/full", 2),
    ("run -- sh -c 'exit 7' >/dev/full 2>/dev/full", 7),
]


@FULL
@pytest.mark.promise("12.1")
@pytest.mark.parametrize(("words", "code"), UNTAKEN)
def test_a_full_output_is_a_full_disk_to_whoever_reads_and_spoils_no_other_code(
    kit: AgentKit, words: str, code: int
) -> None:
    committed(kit)
    done = shell(f"amends {words}", kit.home.path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if code == 10:
        assert "No space left on device" in done.stderr
    if code == 2 and "2>" not in words:
        assert "There is no saga 'nope'" in done.stderr, "an error that its document cannot hold is said in words"


@pytest.mark.promise("12.1")
@pytest.mark.parametrize(
    ("words", "code"),
    [("ps >&-", 0), ("recoverd --once >&-", 0), ("verify --json >&-", 0), ("--version >&-", 0), ("nosuch 2>&-", 2),
     ("run -- sh -c 'exit 7' >&- 2>&- <&-", 7), ("inbox >&- 2>&- <&-", 0)],
)  # fmt: skip
def test_a_closed_output_changes_no_exit_code(kit: AgentKit, words: str, code: int) -> None:
    committed(kit)
    done = shell(f"amends {words}", kit.home.path)
    assert done.returncode == code and "bug" not in done.stderr, done.stderr


@pytest.mark.promise("12.1")
def test_whoever_stops_reading_has_read_enough(kit: AgentKit) -> None:
    committed(kit, steps=400)
    done = shell("amends log | head -1; exit ${PIPESTATUS[0]}", kit.home.path)
    assert done.returncode == 0 and "log.opened" in done.stdout and not done.stderr, done.stderr
    follow = shell("amends log -f | head -1; exit ${PIPESTATUS[0]}", kit.home.path)
    assert follow.returncode == 0, "following for nobody has an end"


@pytest.mark.promise("12")
@pytest.mark.parametrize(
    "words",
    [r"show $'\xff\xfe'", r"undo order-17 --by $'\xff' --reason x", r"approve $'\xff' --by Ann", r"log $'\xff'",
     r"--home $'/tmp/\xff' ps", r"init --home $'/tmp/\xff'", "log --since -1", "ps --limit -1",
     "inbox --wait --timeout nan", "inbox --wait --timeout -1", "undo order-17 --by Ann --reason x --step 99"],
)  # fmt: skip
def test_a_word_or_number_that_is_none_is_a_mistake_of_yours(kit: AgentKit, words: str) -> None:
    committed(kit)
    done = shell(f"amends {words}", kit.home.path)
    assert done.returncode == 2 and done.stderr.startswith("amends: ") and "bug" not in done.stderr, done.stderr
    if "99" in words:
        assert "no step 99" in done.stderr and "1 shop.charge, 2 shop.charge" in done.stderr


@pytest.mark.promise("12")
def test_numbers_beyond_any_log_and_names_beyond_the_locale_are_understood(kit: AgentKit) -> None:
    committed(kit, "é😀")
    assert shell("amends log --since 99999999999999999999", kit.home.path).returncode == 0
    assert shell("amends ps --limit 99999999999999999999", kit.home.path).returncode == 0
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert shell('amends show "$1"', kit.home.path, "é😀", **plain).returncode == 0


@pytest.mark.promise("1.1")
def test_whoever_settles_what_was_tried_again_meanwhile_has_lost_a_race(kit: AgentKit) -> None:
    failed(kit, "order-9", undo=undo("refuses"))
    [item] = _inbox()
    REFUNDS.append("refuses")
    assert run("retry", item["id"], "--by", "Ann").exit_code == 0
    for second in (("retry",), ("accept", "--reason", "fine")):
        late = run(second[0], item["id"], "--by", "Bob", *second[1:])
        assert late.exit_code == 1 and "settled already" in late.stderr, late.stderr


@pytest.mark.promise("14.2")
def test_doctor_says_which_values_are_too_long_to_be_looked_through(kit: AgentKit) -> None:
    with saga_scope("order-1", kit=kit) as saga:
        saga.execute("doc.put", charge, {"n": "sk_live_" + "a1b2c3d4" * 10_000}, semantics=COMPENSABLE, undo=undo())
    said = [check["text"] for check in asked("doctor")["checks"] if check["check"] == "secrets"]
    assert "not looked through" in said[0] and "64 KiB" in said[0]


@pytest.mark.promise("12")
def test_a_read_only_home_is_found_by_doctor_and_refused_in_words_elsewhere(kit: AgentKit, tmp_path: Path) -> None:
    committed(kit)
    kit.close()
    home, agent = kit.home.path, tmp_path / "agent.py"
    agent.write_text("from amends import saga_scope\nwith saga_scope('later'): pass\n")

    def mounted(words: str) -> subprocess.CompletedProcess[str]:
        script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && eval "$2"'
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", script, "sh", str(home), words],
            env={**os.environ, "AMENDS_HOME": str(home)}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    if sys.platform != "linux" or (possible := mounted("true")).returncode:
        pytest.skip(f"no mount namespaces here: {possible.stderr if sys.platform == 'linux' else sys.platform}")
    told = mounted(f"{sys.executable} -m amends.cli doctor")
    assert told.returncode == 1 and "Read-only file system" in told.stdout and "growth" in told.stdout, told.stderr
    for verb in ("init", "run -- true", "recoverd --once"):
        refused = mounted(f"{sys.executable} -m amends.cli {verb}")
        assert refused.returncode == 4 and "Make it writable" in refused.stderr, (verb, refused.stderr)
    assert "HomeRefused: Nothing can be written" in mounted(f"{sys.executable} {agent}").stderr
    assert mounted(f"{sys.executable} -m amends.cli ps").returncode == 0
