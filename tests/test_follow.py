"""Who is told of what: once per device whoever follows, never from inside the work, and never with a say in it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_channels import Server, program
from world import eventually

from amends import COMPENSABLE, IRREVERSIBLE, REVERSIBLE, AgentKit, Compensation, Refused, SagaAborted, saga_scope
from amends.runtime.channels import EVENTS, Channel
from amends.runtime.follow import Due, Follower, address_of, event_of, meant, tell
from amends.runtime.gate.rules import ApprovalPolicy, EscalationLevel, PreFlightGate
from amends.runtime.inbox import queue
from amends.runtime.notices import AGAIN_MS, ATTEMPTS, Address, Claim, outcome
from amends.runtime.report import REASONS
from amends.runtime.state import State
from amends.store.clock import SystemClock

AGENT = """
import os, sys, time
from amends import COMPENSABLE, IRREVERSIBLE, Compensation, compensator, saga_scope


@compensator("shop.refund")
def refund():
    raise ValueError("the vendor said no")


if __name__ == "__main__":
    mode, name = sys.argv[1:]
    with saga_scope(name) as saga:
        saga.execute("shop.charge", lambda: 1, semantics=COMPENSABLE, undo=Compensation(handler="shop.refund"))
        if mode == "ask":
            saga.execute("mail.send", lambda: 1, semantics=IRREVERSIBLE)
        if mode == "hang":
            print("hanging", flush=True)
            time.sleep(600)
        if mode == "die":
            os._exit(9)
        raise RuntimeError("no")
"""


QUIET = """
from amends import COMPENSABLE, Compensation, SagaAborted, saga_scope

if __name__ == "__main__":
    for name in ("left", "another"):
        try:
            with saga_scope(name) as saga:
                saga.execute("shop.charge", lambda: 1, semantics=COMPENSABLE, undo=Compensation.human("call them"))
                raise RuntimeError("no")
        except SagaAborted:
            continue
    with saga_scope("fine") as saga:
        saga.execute("shop.charge", lambda: 1, semantics=COMPENSABLE)
    print("settled")
"""


class Clock:
    """The machine's clocks, and a hand to move them both."""

    def __init__(self) -> None:
        self._true, self.ahead_s = SystemClock(), 0.0

    def wall_us(self) -> int:
        return self._true.wall_us() + int(self.ahead_s * 1e6)

    def boot_ms(self) -> int:
        return self._true.boot_ms() + int(self.ahead_s * 1e3)

    def boot_id(self) -> str:
        return self._true.boot_id()


class Pager:
    """A real program that writes what it is told, a line each, and can be told to fail."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file, self.broken = folder, folder / "told", folder / "broken"
        text = (
            f"import os, sys, time\nsaid = sys.stdin.read()\nbroken = {str(self.broken)!r}\n"
            "if os.path.exists(broken):\n    how = open(broken).read()\n"
            "    time.sleep(600) if how == 'hang' else sys.exit('broken')\n"
            f"os.write(os.open({str(self.file)!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT), said.encode())\n"
        )
        self.command = program(folder, text, "pager")

    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def table(self, name: str = "pager", **more: Any) -> str:
        keys = {"name": name, "kind": "command", "command": list(self.command), **more}
        return "[[notify]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())


@pytest.fixture
def pager(tmp_path: Path) -> Pager:
    return Pager(tmp_path)


def home(tmp_path: Path, *tables: str, top: str = "") -> Path:
    """A home folder whose config.toml has these tables."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "config.toml").write_text(top + "\n".join(tables))
    return folder


@contextmanager
def asking(kit: AgentKit, name: str = "order-17", **kwargs: Any) -> Iterator[threading.Thread]:
    """A saga on a thread of its own that asks for an approval; denied in the end if nobody decided."""

    def work() -> None:
        with suppress(Refused, SagaAborted), saga_scope(name, kit=kit) as saga:
            saga.execute("mail.send", lambda **given: 1, kwargs or {"to": "ann"}, semantics=IRREVERSIBLE)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        eventually(lambda: kit.inbox() or not thread.is_alive())
        for item in kit.inbox():
            kit.deny(item["id"], by="ada")
        thread.join(20)
        assert not thread.is_alive()


def noticed(kit: AgentKit, kind: str = "notice.sent") -> list[Any]:
    kit.log.refresh()
    return [record.entry for record in kit.log.records() if record.entry.kind == kind]


def dues(kit: AgentKit, *channels: Channel) -> list[Due]:
    kit.log.refresh()
    return list(Follower(kit).due(channels))


def escalated(kit: AgentKit, name: str = "stands") -> None:
    with pytest.raises(SagaAborted), saga_scope(name, kit=kit) as saga:
        saga.execute("shop.charge", lambda: 1, semantics=COMPENSABLE, undo=Compensation.human("call the bank"))
        raise RuntimeError("no")


# ---- told, and of what ----------------------------------------------------------------------------------------------


@pytest.mark.promise("14.6")
def test_a_question_reaches_a_program_with_what_to_run_next(tmp_path: Path, pager: Pager) -> None:
    with AgentKit(home=home(tmp_path, pager.table())) as kit, asking(kit) as thread:
        eventually(pager.told)
        [said], [item] = pager.told(), kit.inbox()
        assert (said["event"], said["item"], said["saga"], said["step"], said["tool"]) == (
            "approval", item["id"], "order-17", 1, "mail.send"
        )  # fmt: skip
        assert said["commands"][0].startswith(f"amends approve {item['id']}") and said["left"]
        assert "args" not in said, "arguments stay at home"
        kit.approve(item["id"], by="ada")
        thread.join(20)
        eventually(lambda: noticed(kit))
        [claimed], [sent] = noticed(kit, "notice.claimed"), noticed(kit)
        assert claimed.seq < sent.seq and (sent.out, sent.attempt, sent.channel) == ("sent", 1, "pager")


def test_arguments_go_out_only_where_the_channel_asks_for_them(tmp_path: Path, pager: Pager) -> None:
    channels = pager.table("a"), pager.table("b", include_args=True)
    with AgentKit(home=home(tmp_path, *channels)) as kit, asking(kit, to="ann@example.org"):
        eventually(lambda: len(pager.told()) == 2)
        assert sorted("args" in said for said in pager.told()) == [False, True]
        assert [json.loads(said["args"]) for said in pager.told() if "args" in said] == [{"to": "ann@example.org"}]


@pytest.mark.promise("14.6")
def test_what_is_told_cannot_bite(tmp_path: Path, pager: Pager) -> None:
    folder = home(tmp_path, pager.table(include_args=True))
    with AgentKit(home=folder) as kit, asking(kit, "order\u202e71", to="\u202eann\u200b"):
        eventually(pager.told)
        [said] = pager.told()
        assert said["saga"] == "order\\u202e71" and "\\u202eann\\u200b" in said["args"]


@pytest.mark.promise("14.6")
def test_an_escalated_saga_is_told_of_and_not_approvals_only(tmp_path: Path, pager: Pager) -> None:
    with AgentKit(home=home(tmp_path, pager.table(events=["escalated"]))) as kit:
        escalated(kit)
        eventually(pager.told)
        [said], [item] = pager.told(), kit.inbox()
        assert (said["event"], said["item"], said["tool"]) == ("escalated", item["id"], "shop.charge")
        assert any(command.startswith("amends accept") for command in said["commands"])


@pytest.mark.promise("14.6")
def test_an_agent_that_ends_at_once_has_told_what_it_left_standing(tmp_path: Path, pager: Pager) -> None:
    folder = home(tmp_path, pager.table())
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    done = subprocess.run([sys.executable, script, "fail", "left"], env={**os.environ, "AMENDS_HOME": str(folder)},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 1 and "SagaAborted" in done.stderr
    assert [said["event"] for said in pager.told()] == ["escalated"]


@pytest.mark.promise("14.6")
def test_an_agent_that_left_something_standing_says_so_in_its_last_line(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(QUIET)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    last = "amends: left standing, for a person to settle: left, another; run `amends inbox`"
    assert done.stderr.splitlines()[-1] == last
    assert done.stdout == "settled\n"


@pytest.mark.parametrize("shape", ["webhook", "slack", "teams", "discord"])
def test_a_webhook_hears_of_a_real_question(tmp_path: Path, shape: str) -> None:
    server = Server()
    try:
        table = f'[[notify]]\nname = "hook"\nkind = "{shape}"\nurl = "{server.url()}"\n'
        with AgentKit(home=home(tmp_path, table)) as kit, asking(kit):
            eventually(lambda: server.heard)
            [item] = kit.inbox()
            assert item["id"] in json.dumps(server.heard[0][1]) and "mail.send" in json.dumps(server.heard[0][1])
    finally:
        server.close()


def test_nobody_configured_means_no_thread_and_no_fact(tmp_path: Path) -> None:
    with AgentKit(home=home(tmp_path)) as kit:
        escalated(kit)
        assert not [t for t in threading.enumerate() if t.name == "amends-follow"]
        assert not noticed(kit, "notice.claimed")


def test_the_thread_ends_when_everything_is_told(tmp_path: Path, pager: Pager) -> None:
    with AgentKit(home=home(tmp_path, pager.table())) as kit:
        escalated(kit)
        eventually(lambda: noticed(kit))
        eventually(lambda: not [t for t in threading.enumerate() if t.name == "amends-follow"])
        escalated(kit, "another")
        eventually(lambda: len(pager.told()) == 2)


def test_a_fold_that_moves_while_it_is_looked_at_is_looked_at_again(
    tmp_path: Path, pager: Pager, monkeypatch: Any
) -> None:
    from amends.runtime import follow

    moved = [KeyError("a saga that ended meanwhile"), RuntimeError("dictionary changed size during iteration")]

    def look(kit: AgentKit) -> list[Any]:
        if moved:
            raise moved.pop()
        return queue(kit)

    monkeypatch.setattr(follow, "queue", look)
    with AgentKit(home=home(tmp_path, pager.table())) as kit:
        escalated(kit)
        eventually(pager.told)
        assert not moved


@pytest.mark.promise("14.6")
def test_a_look_that_never_succeeds_is_said_once_and_taken_less_and_less_often(
    tmp_path: Path, pager: Pager, monkeypatch: Any
) -> None:
    from amends.runtime import follow

    broken = True

    def look(kit: AgentKit) -> list[Any]:
        if broken:
            raise KeyError("a saga that is never there")
        return queue(kit)

    monkeypatch.setattr(follow, "queue", look)
    said: list[str] = []
    with AgentKit(home=home(tmp_path, pager.table())) as kit:
        follower = Follower(kit, said.append)
        waits = [follower._turn() for _ in range(40)]
        assert waits == sorted(waits) and waits[0] == follow.MOVED_S and waits[-1] == follow.LOOK_S
        assert len(said) == 1 and "KeyError" in said[0] and "bug of amends" in said[0]
        broken = False
        follower._turn()
        broken, follower._again = True, 0.0
        assert [follower._turn(), follower._moved] == [follow.MOVED_S, 1], "it is counted anew"
        follower.nudge()
        follower._turn()
        assert len(said) == 1


# ---- once -----------------------------------------------------------------------------------------------------------

FOLLOWER = """
import sys, time
from amends import AgentKit
from amends.runtime.follow import Follower, tell

kit = AgentKit()
follower = Follower(kit)
print("ready", flush=True)
sys.stdin.readline()
for due in follower.due(follower.channels()):
    tell(kit, due)
kit.close()
"""


@pytest.mark.promise("14.6")
def test_processes_that_follow_at_once_tell_once(tmp_path: Path, pager: Pager) -> None:
    folder = home(tmp_path)
    with AgentKit(home=folder) as kit:
        for number in range(6):
            escalated(kit, f"saga-{number}")
    home(tmp_path, pager.table(), pager.table("second"))
    env = {**os.environ, "AMENDS_HOME": str(folder)}
    racers = [
        subprocess.Popen([sys.executable, "-c", FOLLOWER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    for racer in racers:
        assert racer.stdout and racer.stdout.readline() == b"ready\n"
    for racer in racers:
        assert racer.stdin
        racer.stdin.write(b"go\n")
        racer.stdin.flush()
    for racer in racers:
        racer.communicate(timeout=60)
        assert racer.returncode == 0
    with AgentKit(home=folder) as kit:
        claims = [(claim.item, claim.channel) for claim in noticed(kit, "notice.claimed")]
        assert len(claims) == len(set(claims)) == 12
        assert {sent.out for sent in noticed(kit)} == {"sent"}
    assert len(pager.told()) == 12, "each item once through each channel, whoever was first"


def test_two_kits_of_one_home_tell_once(tmp_path: Path, pager: Pager) -> None:
    folder = home(tmp_path, pager.table())
    with AgentKit(home=folder) as one, AgentKit(home=folder) as other:
        escalated(one)
        for _ in range(20):
            one.engine.needs_people()
            other.log.refresh()
            other.engine.needs_people()
        eventually(lambda: noticed(one))
    assert len(pager.told()) == 1


def test_what_was_told_before_a_restart_is_not_told_again(tmp_path: Path, pager: Pager) -> None:
    folder = home(tmp_path, pager.table())
    with AgentKit(home=folder) as kit:
        escalated(kit)
        eventually(lambda: noticed(kit))
    with AgentKit(home=folder) as kit:
        assert dues(kit, *Follower(kit).channels()) == []


# ---- a broken channel -----------------------------------------------------------------------------------------------


@pytest.mark.promise("14.6")
@pytest.mark.parametrize("how", ["fail", "hang"])
def test_a_broken_notifier_approves_nothing_and_fails_nothing(tmp_path: Path, pager: Pager, how: str) -> None:
    pager.broken.write_text(how)
    with AgentKit(home=home(tmp_path, pager.table(timeout_s=0.5))) as kit, asking(kit) as thread:
        eventually(lambda: noticed(kit))
        [failed] = noticed(kit)
        assert (failed.out, failed.attempt) == ("failed", 1)
        assert thread.is_alive() and [item["kind"] for item in kit.inbox()] == ["approval"]
        assert kit.status()["notices"][0]["channel"] == "pager"
        kit.approve(kit.inbox()[0]["id"], by="ada")
        thread.join(20)
        assert not thread.is_alive()
        assert [record.entry.out for record in kit.log.records() if record.entry.kind == "saga.ended"] == ["committed"]


def test_a_hanging_channel_holds_up_no_other(tmp_path: Path, pager: Pager) -> None:
    stuck = program(tmp_path, "import time\ntime.sleep(600)\n", "stuck")
    table = f'[[notify]]\nname = "stuck"\nkind = "command"\ncommand = ["{stuck[0]}"]\ntimeout_s = 20\n'
    with AgentKit(home=home(tmp_path, table, pager.table())) as kit:
        escalated(kit, "one")
        escalated(kit, "two")
        eventually(lambda: len(noticed(kit)) == 2)
        assert [sent.channel for sent in noticed(kit)] == ["pager", "pager"] and len(pager.told()) == 2


@pytest.mark.promise("14.6")
def test_the_end_of_a_process_does_not_wait_for_a_hanging_program_and_leaves_none_behind(tmp_path: Path) -> None:
    number = tmp_path / "number"
    text = f"import os, time\nopen({str(number)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    stuck = program(tmp_path, text, "stuck")
    table = f'[[notify]]\nname = "stuck"\nkind = "command"\ncommand = ["{stuck[0]}"]\ntimeout_s = 60\n'
    kit = AgentKit(home=home(tmp_path, table))
    escalated(kit)
    eventually(lambda: number.exists() and number.read_text())
    assert kit._follower is not None
    kit._follower.close(0.1)
    kit.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)
    with AgentKit(home=tmp_path / "home") as later:
        assert [(sent.out, sent.attempt) for sent in noticed(later)] == [("failed", 1)], "somebody tells it again"


def in_memory(clock: Clock) -> tuple[AgentKit, Channel]:
    kit = AgentKit.in_memory(clock=clock)
    escalated(kit)
    return kit, Channel("pager", "command", command=("false",))


@pytest.mark.promise("14.6")
def test_a_failed_message_is_tried_again_later_each_time_and_not_for_ever() -> None:
    clock = Clock()
    kit, channel = in_memory(clock)
    attempts = 0
    for wait_ms in (0, *AGAIN_MS):
        if wait_ms:
            [due] = dues(kit, channel)
            assert 0 < due.in_s <= wait_ms / 1000, "not before its time"
            assert tell(kit, due) is None, "nobody sends it before its time"
            clock.ahead_s += wait_ms / 1000
        [due] = dues(kit, channel)
        assert due.in_s == 0 and tell(kit, due)
        attempts += 1
    clock.ahead_s += 10 * 86400
    assert attempts == ATTEMPTS == len(noticed(kit)) and dues(kit, channel) == []
    assert [sent.attempt for sent in noticed(kit)] == [1, 2, 3, 4, 5]


def test_a_claim_whose_process_died_lapses() -> None:
    clock = Clock()
    kit, channel = in_memory(clock)
    [due] = dues(kit, channel)
    claim = Claim(address_of(due), 30_000, lambda state: True)
    kit.log.commit(claim)
    assert claim.attempt == 1 and tell(kit, due) is None, "another one has it"
    [due] = dues(kit, channel)
    assert 29 < due.in_s <= 30
    clock.ahead_s += 30
    [due] = dues(kit, channel)
    assert due.in_s == 0 and tell(kit, due) is not None
    kit.log.commit(outcome(address_of(due), 1, ""))  # the first one was only slow, and it was told after all
    assert dues(kit, channel) == []


def test_an_item_that_is_over_is_not_told(tmp_path: Path, pager: Pager) -> None:
    with AgentKit(home=home(tmp_path)) as kit:
        escalated(kit)
        channel = Channel("pager", "command", command=pager.command)
        [due] = dues(kit, channel)
        kit.accept(due.item.id, by="ada", reason="seen to")
        assert tell(kit, due) is None
        assert not pager.told() and not noticed(kit, "notice.claimed")


def test_a_process_without_the_secret_leaves_it_to_others_for_a_while(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    table = '[[notify]]\nname = "hook"\nkind = "slack"\nurl_env = "HOOK"\n'
    with AgentKit(home=home(tmp_path, table)) as kit:
        escalated(kit)
        follower = kit._follower
        assert follower is not None
        eventually(lambda: follower._seen)
        assert not noticed(kit, "notice.claimed")
        for place in follower._seen:
            follower._seen[place] -= 3600
        follower._again = 0.0
        follower.nudge()
        eventually(lambda: noticed(kit))
        [failed] = noticed(kit)
        assert failed.out == "failed"


def test_a_broken_config_is_said_once_and_stops_no_saga(tmp_path: Path, capsys: Any) -> None:
    with AgentKit(home=home(tmp_path, "[[notify]]\nname = 'x'\nkind = 'pigeon'\n")) as kit:
        escalated(kit, "one")
        escalated(kit, "two")
        said = capsys.readouterr().err
        assert said.count("config.toml, line 3") == 1 and "kind is expected to be one of" in said


# ---- who hears of which level ---------------------------------------------------------------------------------------

OPS, BOSS, BOTH = Channel("ops", "desktop"), Channel("x", "desktop", targets=("boss",)), ((0, ()), (1, ("boss",)))


@pytest.mark.parametrize(
    ("channel", "event", "reached", "level"),
    [
        (OPS, "approval", ((0, ()),), 0),
        (OPS, "approval", BOTH, 0),
        (BOSS, "approval", ((0, ()),), None),
        (BOSS, "approval", BOTH, 1),
        (Channel("boss", "desktop"), "approval", BOTH, 1),
        (BOSS, "approval", (*BOTH, (2, ("ceo",))), 1),
        (BOSS, "approval", (*BOTH, (2, ("boss", "ceo"))), 2),
        (BOSS, "escalated", ((0, ()),), 0),
        (Channel("x", "desktop", events=("approval",)), "escalated", ((0, ()),), None),
        (Channel("x", "desktop", events=("stuck",)), "stuck", ((0, ()),), 0),
    ],
)
def test_a_channel_hears_of_the_levels_that_name_it(channel: Channel, event: str, reached: Any, level: Any) -> None:
    assert meant(channel, event, reached) == level


def test_every_event_begins_a_message() -> None:
    assert {event_of(kind) for kind in (*REASONS, "approval", "review", "resume", "stuck", "fork")} <= set(EVENTS)


def test_the_next_level_is_told_when_nobody_answers(tmp_path: Path, pager: Pager) -> None:
    gate = PreFlightGate(approval=ApprovalPolicy(levels=(EscalationLevel(targets=("boss",), after_seconds=0.2),)))
    folder = home(tmp_path, pager.table("ops"), pager.table("pager", targets=["boss"]))
    with AgentKit(home=folder, gate=gate) as kit, asking(kit):
        eventually(lambda: len(noticed(kit)) == 2)
        assert [(sent.channel, sent.level) for sent in noticed(kit)] == [("ops", 0), ("pager", 1)]
    assert kit.engine.state.notices.raised == {}


# ---- the daemon -----------------------------------------------------------------------------------------------------


class Daemon:
    """`amends recoverd` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        env = {**os.environ, "AMENDS_HOME": str(folder), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen([sys.executable, "-m", "amends.cli", "recoverd"], env=env,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=60)[0].decode()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[[Path], Daemon]]:
    started: list[Daemon] = []

    def start(folder: Path) -> Daemon:
        started.append(Daemon(folder))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def agent(folder: Path, tmp_path: Path, mode: str, name: str) -> subprocess.Popen[bytes]:
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    return subprocess.Popen([sys.executable, script, mode, name], env={**os.environ, "AMENDS_HOME": str(folder)},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


@pytest.mark.promise("14.6")
def test_the_daemon_tells_of_what_it_had_to_escalate(tmp_path: Path, pager: Pager, daemon: Any) -> None:
    folder = home(tmp_path, pager.table())
    one = agent(folder, tmp_path, "die", "died")
    one.communicate(timeout=60)
    assert one.returncode == 9
    watch = daemon(folder)
    eventually(pager.told, 30)
    assert [(said["event"], said["saga"]) for said in pager.told()] == [("escalated", "died")]
    watch.stop()
    assert len(pager.told()) == 1


@pytest.mark.promise("14.6")
def test_a_question_whose_asker_could_not_tell_is_told_by_the_daemon(
    tmp_path: Path, daemon: Any, monkeypatch: Any
) -> None:
    server = Server()
    try:
        folder = home(tmp_path, '[[notify]]\nname = "hook"\nkind = "webhook"\nurl_env = "HOOK"\n')
        monkeypatch.delenv("HOOK", raising=False)
        one = agent(folder, tmp_path, "ask", "silent")  # it has no HOOK, and leaves the message to others
        with AgentKit(home=folder) as kit:
            eventually(lambda: kit.inbox(), 30)
            monkeypatch.setenv("HOOK", server.url())
            daemon(folder)
            eventually(lambda: server.heard, 30)
            [(_, said)] = server.heard
            assert (said["event"], said["saga"]) == ("approval", "silent")
            kit.deny(kit.inbox()[0]["id"], by="ada")
            one.communicate(timeout=60)
    finally:
        server.close()


@pytest.mark.promise("14.6")
def test_a_saga_without_progress_is_stuck_and_the_daemon_tells(tmp_path: Path, pager: Pager, daemon: Any) -> None:
    folder = home(tmp_path, pager.table(), top="stuck_after_s = 1\n")
    one = agent(folder, tmp_path, "hang", "hangs")
    try:
        assert one.stdout and one.stdout.readline() == b"hanging\n"
        os.kill(one.pid, signal.SIGSTOP)
        daemon(folder)
        eventually(pager.told, 30)
        [said] = pager.told()
        assert (said["event"], said["saga"]) == ("stuck", "hangs") and str(one.pid) in said["reason"]
        assert any(command.startswith("amends quarantine ") for command in said["commands"])
    finally:
        one.kill()
        one.communicate()


def test_a_saga_that_waits_for_a_person_is_not_stuck(tmp_path: Path) -> None:
    folder = home(tmp_path, top="stuck_after_s = 0.001\n")
    with AgentKit(home=folder) as kit, asking(kit):
        eventually(kit.inbox)
        eventually(lambda: kit.log.now().lived > queue(kit)[0].saga.idle_lived + 10)
        assert [item["kind"] for item in kit.inbox()] == ["approval"]


def test_a_clock_that_was_set_makes_no_saga_stuck() -> None:
    class Wall(Clock):
        def boot_ms(self) -> int:
            return self._true.boot_ms()

    clock = Wall()
    kit = AgentKit.in_memory(clock=clock)
    with saga_scope("busy", kit=kit) as saga:
        saga.execute("look", lambda: 1, semantics=REVERSIBLE)
        clock.ahead_s = 86400.0
        assert kit.inbox() == []
    clock = Clock()
    kit = AgentKit.in_memory(clock=clock)
    with saga_scope("busy", kit=kit) as saga:
        saga.execute("look", lambda: 1, semantics=REVERSIBLE)
        kit.log.flush()
        clock.ahead_s = 86400.0
        assert [item["kind"] for item in kit.inbox()] == ["stuck"]


# ---- the view -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("14.6")
def test_what_is_over_is_forgotten(tmp_path: Path, pager: Pager) -> None:
    with AgentKit(home=home(tmp_path, pager.table())) as kit:
        escalated(kit, "one")
        escalated(kit, "two")
        eventually(lambda: len(noticed(kit)) == 2)
        assert len(kit.engine.state.notices.told) == 2
        for item in kit.inbox():
            kit.accept(item["id"], by="ada", reason="seen to")
        assert kit.engine.state.notices.told == {}


def test_the_view_comes_back_from_its_dump(tmp_path: Path, pager: Pager) -> None:
    with AgentKit(home=home(tmp_path, pager.table())) as kit:
        escalated(kit)
        eventually(lambda: noticed(kit))
        state = State()
        state.load(kit.engine.state.dump())
        assert state.notices.told == kit.engine.state.notices.told and state.dump() == kit.engine.state.dump()


@given(
    st.lists(st.tuples(st.sampled_from(["claim", "sent", "failed", "wait", "stale"]), st.integers(0, 400)), max_size=40)
)
def test_no_order_of_facts_sends_a_message_twice_once_it_is_told(steps: list[tuple[str, int]]) -> None:
    """A model with one message: who may send is whoever the view lets, and nobody after it was told."""
    clock = Clock()
    kit = AgentKit.in_memory(clock=clock)
    address, mine, told = Address("abcdefgh23", "pager"), 0, False
    for what, amount in steps:
        if what == "wait":
            clock.ahead_s += amount
        elif what == "claim":
            claim = Claim(address, 10_000, lambda state: True)
            kit.log.commit(claim)
            assert not (claim.attempt and told), "it was told already"
            assert claim.attempt <= ATTEMPTS
            mine = claim.attempt or mine
        elif mine:
            number = mine if what != "stale" else random.Random(amount).randint(1, mine)
            kit.log.commit(outcome(address, number, "" if what == "sent" else "no"))
            told = told or what == "sent"
