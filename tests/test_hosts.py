"""Handlers run in processes of their own, and whatever they do there comes back as an outcome."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest

from amends.runtime import host_program, hosts
from amends.runtime.hosts import ExecHost, ExecSpec, Hosts, Outcome, PythonHost, PythonSpec, recorded_host
from amends.runtime.values import Masked, decode, encode, parse

pytestmark = pytest.mark.promise("4.4")

SH = "/bin/sh"
LONG = 20_000


def ask(host: Any, handler: str, deadline_ms: int = LONG, purpose: str = "undo", **kwargs: Any) -> Outcome:
    raw = parse(encode(kwargs))
    answer: Outcome = host.call(handler, purpose, raw, "key-1", "saga-1", 2, 3, deadline_ms)
    return answer


def running(pid: int) -> bool:
    """Whether a process lives (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(claim: Callable[[], bool]) -> bool:
    for _ in range(500):
        if claim():
            return True
        time.sleep(0.02)
    return False


# ---- exec -----------------------------------------------------------------------------------------------------------


def script(text: str, name: str = "x", **more: Any) -> ExecHost:
    return ExecHost(ExecSpec(name, (SH, "-c", text), **more))


def test_a_program_gets_one_json_object_and_its_answer_is_read(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    answer = '{"outcome":"already_done","note":"gone","result":{"$":"decimal","v":"4.2"}}'
    host = script(f"cat > {seen}; echo '{answer}'")
    outcome = ask(host, "x", amount=4200, who=("a", b"b"))
    assert (outcome.outcome, outcome.note, str(outcome.result)) == ("already_done", "gone", "4.2")
    assert seen.read_text().count("\n") == 1
    assert json.loads(seen.read_text()) == {
        "v": 1,
        "handler": "x",
        "purpose": "undo",
        "kwargs": json.loads(encode({"amount": 4200, "who": ("a", b"b")})),
        "idempotency_key": "key-1",
        "saga": "saga-1",
        "step": 2,
        "attempt": 3,
        "deadline_ms": LONG,
    }


VERDICTS = {
    "exit 0 without output": ("exit 0", "undo", "done", ""),
    "exit 0 with an empty line": ("echo", "undo", "done", ""),
    "exit 1": ("exit 1", "undo", "failed", "exit 1"),
    "exit 127": ("exit 127", "undo", "failed", "exit 127"),
    "exit 75": ("exit 75", "undo", "again", "exit 75"),
    "exit 75 after output": ('echo \'{"outcome":"done"}\'; exit 75', "undo", "again", "exit 75"),
    "killed by a signal": ("kill -SEGV $$", "undo", "lost", "SIGSEGV"),
    "done": ('echo \'{"outcome":"done","result":[1]}\'', "undo", "done", ""),
    "failed": ('echo \'{"outcome":"failed","why":"no such order"}\'', "undo", "failed", "no such order"),
    "failed, with its exit code": ('echo \'{"outcome":"failed"}\'; exit 3', "undo", "failed", "exit 3"),
    "human": ('echo \'{"outcome":"human","note":"call them"}\'; exit 1', "undo", "human", "exit 1"),
    "done and exit 1": ('echo \'{"outcome":"done"}\'; exit 1', "undo", "failed", "ended with exit 1"),
    "an answer that is no answer": ("echo hello", "undo", "lost", "no answer"),
    "an answer of another purpose": ('echo \'{"outcome":"present"}\'', "undo", "lost", "no answer"),
    "an error page and exit 0": ("echo '{\"error\":500}'", "undo", "lost", "no answer"),
    "two lines": ('echo \'{"outcome":"done"}\'; echo \'{"outcome":"done"}\'', "undo", "lost", "no answer"),
    "no answer and exit 2": ("echo hello; exit 2", "undo", "failed", "exit 2"),
    "the key comes back": ('echo \'{"outcome":"done","idempotency_key":"key-1"}\'', "undo", "done", ""),
    "another key comes back": ('echo \'{"outcome":"done","idempotency_key":"k"}\'', "undo", "lost", "another"),
    "present": ('echo \'{"outcome":"present","result":7}\'', "probe", "present", ""),
    "absent": ('echo \'{"outcome":"absent"}\'', "probe", "absent", ""),
    "a silent probe": ("exit 0", "probe", "cannot_tell", "no answer"),
    "a failing probe": ("exit 1", "probe", "cannot_tell", "exit 1"),
    "a crashing probe": ("kill -KILL $$", "probe", "cannot_tell", "SIGKILL"),
    "a probe that says done": ('echo \'{"outcome":"done"}\'', "probe", "cannot_tell", "no answer"),
    "present and exit 1": ('echo \'{"outcome":"present"}\'; exit 1', "probe", "cannot_tell", "exit 1"),
    "a silent reconciler": ("exit 0", "verify", "cannot_tell", "no answer"),
    "a failing reconciler": ("exit 1", "verify", "cannot_tell", "exit 1"),
    "a reconciler that says done": ('echo \'{"outcome":"done"}\'', "verify", "cannot_tell", "no answer"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_exit_status_and_output_are_one_verdict(name: str) -> None:
    text, purpose, outcome, why = VERDICTS[name]
    found = ask(script(text), "x", purpose=purpose)
    assert found.outcome == outcome and why in found.why


def test_a_result_that_cannot_be_read_does_not_undo_the_undoing() -> None:
    outcome = ask(script("""echo '{"outcome":"done","result":{"$":"decimal","v":"x"}}'"""), "x")
    assert outcome.outcome == "done" and outcome.result is None and "could not be kept" in outcome.note


def test_at_the_deadline_the_whole_process_group_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    outcome = ask(script(f"sleep 60 & echo $! > {pids}; echo $$ >> {pids}; wait"), "x", deadline_ms=400)
    assert outcome.outcome == "lost" and "400 ms" in outcome.why
    found = [int(line) for line in pids.read_text().split()]
    assert len(found) == 2 and eventually(lambda: not any(map(running, found)))


def test_the_shorter_of_both_deadlines_counts() -> None:
    assert "200 ms" in ask(script("sleep 60", timeout_s=0.2), "x").why
    assert "200 ms" in ask(script("sleep 60", timeout_s=50), "x", deadline_ms=200).why


def test_an_answer_counts_though_a_grandchild_keeps_the_pipes_open(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    began = time.monotonic()
    outcome = ask(script(f"""sleep 60 & echo $! > {pid}; echo '{{"outcome":"done"}}'"""), "x", deadline_ms=40_000)
    assert outcome.outcome == "done" and time.monotonic() - began < 30
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_huge_output_on_both_sides_ends_in_an_outcome_with_the_last_4_kb() -> None:
    flood = "head -c 5000000 /dev/zero | tr '\\0' x; head -c 3000000 /dev/zero | tr '\\0' y >&2; echo end >&2"
    outcome = ask(script(flood), "x")
    assert outcome.outcome == "lost" and len(outcome.stderr) == 4096 and outcome.stderr.endswith("yyy" + "end\n")


def test_an_answer_that_was_cut_off_is_not_taken_for_a_whole_one() -> None:
    text = """echo '{"outcome":"done"}'; head -c 1200000 /dev/zero | tr '\\0' ' '; echo and more"""
    assert ask(script(text), "x").outcome == "lost"


def test_a_program_that_does_not_read_a_large_request_is_heard() -> None:
    assert ask(script("exit 0"), "x", blob="x" * 200_000).outcome == "done"
    assert ask(script("sleep 0.2; exec cat >/dev/null"), "x", blob="x" * 200_000).outcome == "done"


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (ExecSpec("x", ("/no/such/program",)), "/no/such/program cannot be started: No such file"),
        (ExecSpec("x", ("no-such-program-anywhere",)), "No such file"),
        (ExecSpec("x", ("/etc/passwd",)), "Permission denied"),
        (ExecSpec("x", (SH, "-c", "exit 0"), cwd="/no/such/folder"), "working folder /no/such/folder is not there"),
        (ExecSpec("x", (SH,), env_file="/no/such.env"), "env_file /no/such.env cannot be read"),
        (ExecSpec("x", (SH, "a\0b")), "cannot be started"),
    ],
)
def test_what_cannot_be_started_is_no_attempt(spec: ExecSpec, why: str) -> None:
    outcome = ask(ExecHost(spec), "x")
    assert outcome.outcome == "unavailable" and why in outcome.why


def test_arguments_of_the_command_meet_no_shell(tmp_path: Path) -> None:
    seen, trap = tmp_path / "seen", tmp_path / "trap"
    hostile = f"$(touch {trap}); `touch {trap}` && touch {trap}"
    program = tmp_path / "program"
    program.write_text(f'#!{SH}\nprintf %s "$1" > {seen}\n')
    program.chmod(0o755)
    assert ask(ExecHost(ExecSpec("x", (str(program), hostile))), "x").outcome == "done"
    assert seen.read_text() == hostile and not trap.exists()


@pytest.mark.promise("14.2")
def test_a_stored_secret_is_never_handed_on_as_if_it_were_the_value() -> None:
    kwargs = parse(encode({"deep": [{"token": Masked("abc")}]}))
    for host in (script("exit 0"), PythonHost(PythonSpec("p", sys.executable, files=("/nowhere.py",)))):
        outcome = host.call("x", "undo", kwargs, "k", "s", 1, 1, LONG)
        assert outcome.outcome == "unavailable" and "argument deep is a secret" in outcome.why


def test_an_argument_named_dollar_reaches_the_program() -> None:
    kwargs = parse(encode({"$": "decimal", "v": 1}))
    outcome = script("""grep -q '"kwargs":{"[$]":"decimal","v":1}'""").call("x", "undo", kwargs, "k", "s", 1, 1, LONG)
    assert outcome.outcome == "done"


class Ledger(BaseHTTPRequestHandler):
    """Keeps what is posted to it."""

    posted: list[Any] = []

    def do_POST(self) -> None:
        self.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(500 if self.path == "/broken" else 204)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None: ...


@pytest.mark.skipif(not os.path.exists("/usr/bin/curl"), reason="there is no /usr/bin/curl here")
def test_curl_alone_is_a_handler_without_any_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    server = HTTPServer(("127.0.0.1", 0), Ledger)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    curl = ["/usr/bin/curl", "--silent", "--fail", "--noproxy", "*", "--data-binary", "@-"]
    url = f"http://127.0.0.1:{server.server_port}"
    done = ask(ExecHost(ExecSpec("x", (*curl, f"{url}/refund"))), "x", charge="ch_1")
    broken = ask(ExecHost(ExecSpec("x", (*curl, f"{url}/broken"))), "x", charge="ch_1")
    server.shutdown()
    server.server_close()
    assert done.outcome == "done" and broken.outcome == "failed" and "exit 22" in broken.why
    assert [(p["kwargs"], p["idempotency_key"]) for p in Ledger.posted] == [({"charge": "ch_1"}, "key-1")] * 2


# ---- environment ----------------------------------------------------------------------------------------------------


def test_the_loaders_variables_do_not_reach_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_MEIPASS", "/tmp/_MEI123", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/tmp/_MEI123")
    monkeypatch.setenv("LD_LIBRARY_PATH_ORIG", "/opt/user/lib")
    monkeypatch.setenv("DYLD_LIBRARY_PATH", "/tmp/_MEI123")
    monkeypatch.setenv("_PYI_ARCHIVE_FILE", "/x")
    monkeypatch.setenv("_MEIPASS2", "/x")
    monkeypatch.setenv("PYTHONPATH", "/my/own")
    outcome = ask(script("env >&2", env=(("GIVEN", "1"),)), "x")
    env = dict(line.split("=", 1) for line in outcome.stderr.splitlines() if "=" in line)
    assert env["LD_LIBRARY_PATH"] == "/opt/user/lib" and env["GIVEN"] == "1" and env["PYTHONPATH"] == "/my/own"
    assert not [name for name in env if name.startswith(("_PYI", "_MEI", "DYLD")) or name.endswith("_ORIG")]


def test_a_users_own_library_path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/user/lib")
    assert hosts.environment()["LD_LIBRARY_PATH"] == "/opt/user/lib"


def test_an_env_file_adds_and_env_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "runner")
    file = tmp_path / "x.env"
    file.write_text("# note\n\nONE=file\nexport TWO = 'a b'\nTHREE=\nFOUR=x=y\n")
    file.chmod(0o600)
    env = hosts.environment((("TWO", "spec"),), str(file))
    assert (env["ONE"], env["TWO"], env["THREE"], env["FOUR"]) == ("file", "spec", "", "x=y")


def test_an_env_file_that_others_can_read_is_refused_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "x.env"
    file.write_text("TOKEN=hunter2\n")
    file.chmod(0o640)
    outcome = ask(script("exit 0", env_file=str(file)), "x")
    assert outcome.outcome == "unavailable" and f"chmod 600 {file}" in outcome.why and "hunter2" not in str(outcome)
    file.write_text("hunter2 without an equals sign\n")
    file.chmod(0o600)
    outcome = ask(script("exit 0", env_file=str(file)), "x")
    assert outcome.outcome == "unavailable" and "line 1" in outcome.why and "hunter2" not in str(outcome)


# ---- the Python host ------------------------------------------------------------------------------------------------

HANDLERS = """
import ctypes, os, subprocess, sys, time
from dataclasses import dataclass

LOADED_AS = __name__
COUNT = 0


@dataclass
class Receipt:
    id: str
    amount: object


class Answer:
    def __init__(self, outcome, note="", result=None):
        self.amends_outcome, self.note, self.result = outcome, note, result


def echo(**kwargs): return kwargs
def kinds(**kwargs): return {name: type(value).__name__ for name, value in kwargs.items()}
def field(record): return [record.amount, record["amount"]]
def receipt(amount): return Receipt("re_1", amount)
def keyed(amount, idempotency_key): return idempotency_key
def keyed_only(*, idempotency_key=None): return idempotency_key
def open_ended(**kwargs): return sorted(kwargs)
def own(idempotency_key): return idempotency_key
def loaded_as(): return [LOADED_AS, os.environ.get("AMENDS_HANDLER_HOST"), os.getcwd(), sys.path[0]]
def noisy():
    print('{"id":1,"outcome":"done"}'); os.write(1, b"raw\\n"); print("on stderr", file=sys.stderr)
    return subprocess.run(["sh", "-c", "echo from a child"]).returncode
def reads(): return [sys.stdin.read(), input.__name__]
def boom(): raise ValueError("no such order")
def odd_error():
    class Odd(Exception):
        def __str__(self): raise RuntimeError("worse")
    raise Odd
def surrogate_error(): raise ValueError("x\\ud800")
def leaves(): sys.exit(3)
def disconnects(): raise ConnectionResetError
def refused(): raise ConnectionRefusedError
def interrupts(): raise KeyboardInterrupt
async def later():
    import asyncio
    await asyncio.sleep(0.01)
    return "async"
def returns_awaitable(): return later()
def returns_task():
    import asyncio
    return asyncio.ensure_future(later())
async def loop_id():
    import asyncio
    return id(asyncio.get_running_loop())
def hang(): time.sleep(60)
def hang_with_child(pid_file):
    child = subprocess.Popen(["sleep", "60"])
    open(pid_file, "w").write("%d %d" % (child.pid, os.getpid()))
    time.sleep(60)
def segfault():
    print("last words", file=sys.stderr)
    ctypes.string_at(0)
def vanishes(): os._exit(0)
def vanishes_leaving_a_fork(pid_file):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    open(pid_file, "w").write(str(child))
    os._exit(0)
def forks():
    if os.fork() == 0:
        return "child"
    os.wait()
    return "parent"
def closes_everything(): sys.stdout.close(); sys.stderr.close(); sys.stdin.close(); return 1
def floods():
    for _ in range(200): sys.stderr.write("y" * 20000)
    print("the end")
    return "x" * 100_000
def too_large(): return "x" * 300_000
def unstorable(): return {"f": open}
def not_finite(): return float("nan")
def surrogate(): return "x\\ud800"
def count():
    global COUNT
    COUNT += 1
    return COUNT
def pid(): return os.getpid()
def already(): return Answer("already_done", "404")
def human(): return Answer("human", "call them")
def present(): return Answer("present", result={"id": 7})
def absent(): return "absent"
def unclear(): return None
def yes(result): return result == 1
def slow(): time.sleep(0.3); return os.getpid()
def _private(): return 1


class Group:
    @staticmethod
    def member(): return "member"


if __name__ == "__main__":
    raise SystemExit("the agent itself was run")
"""


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[PythonHost]:
    file = tmp_path / "shop.py"
    file.write_text(HANDLERS)
    host = PythonHost(PythonSpec("shop", sys.executable, files=(str(file),), path=(str(tmp_path),), cwd=str(tmp_path)))
    yield host
    host.close()


def test_arguments_and_results_keep_their_types(shop: PythonHost) -> None:
    values = {
        "a": Decimal("4.20"), "b": b"\xff", "c": datetime(2025, 1, 1, tzinfo=UTC), "d": date(2025, 1, 1),
        "e": (1, [2]), "f": {1, "x"},
        "g": UUID(int=7), "h": 10**30, "i": {"$": "x"}, "j": None, "k": 1.5, "l": True, "m": "é", "n": -0.0,
    }  # fmt: skip
    assert ask(shop, "echo", **values).result == values
    kinds = ask(shop, "kinds", **values).result
    assert kinds == {name: type(value).__name__ for name, value in values.items()}


def test_a_record_goes_there_and_comes_back(shop: PythonHost) -> None:
    back = ask(shop, "receipt", amount=7).result
    assert vars(back) == {"id": "re_1", "amount": 7}
    assert ask(shop, "field", record=back).result == [7, 7]


def test_the_key_goes_to_a_parameter_of_that_name_and_nowhere_else(shop: PythonHost) -> None:
    assert ask(shop, "keyed", amount=1).result == "key-1"
    assert ask(shop, "keyed_only").result == "key-1"
    assert ask(shop, "open_ended", a=1).result == ["a"]
    assert ask(shop, "own", idempotency_key="mine").result == "mine"


def test_a_file_is_loaded_once_and_never_as_main(shop: PythonHost, tmp_path: Path) -> None:
    name, flag, cwd, first = ask(shop, "loaded_as").result
    assert (name, flag, cwd, first) == ("shop", "1", str(tmp_path), str(tmp_path))
    assert [ask(shop, "count").result for _ in range(3)] == [1, 2, 3]


def test_prints_cannot_break_the_protocol_and_are_kept(shop: PythonHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    outcome = ask(shop, "noisy")
    assert outcome.outcome == "done" and outcome.result == 0
    for printed in ('{"id":1,"outcome":"done"}', "raw", "on stderr", "from a child"):
        assert printed in outcome.stderr
    assert ask(shop, "count").stderr == ""


def test_a_handler_cannot_eat_the_next_request(shop: PythonHost) -> None:
    assert ask(shop, "reads").result == ["", "input"]
    assert ask(shop, "count").result == 1


FAILURES = {
    "boom": ("failed", "ValueError: no such order"),
    "odd_error": ("failed", "Odd: its text cannot be had"),
    "surrogate_error": ("failed", "ValueError: x?"),
    "leaves": ("lost", "SystemExit: 3"),
    "interrupts": ("lost", "KeyboardInterrupt"),
    "disconnects": ("lost", "ConnectionResetError"),
    "refused": ("failed", "ConnectionRefusedError"),
}


@pytest.mark.parametrize("handler", FAILURES)
def test_what_a_handler_raises_is_its_failure_and_not_the_hosts_end(shop: PythonHost, handler: str) -> None:
    first = ask(shop, "pid").result
    expected, why = FAILURES[handler]
    outcome = ask(shop, handler)
    assert outcome.outcome == expected and why in outcome.why and "Traceback" in outcome.stderr
    assert ask(shop, "pid").result == first


def test_a_probe_that_raises_cannot_tell(shop: PythonHost) -> None:
    outcome = ask(shop, "boom", purpose="probe")
    assert outcome.outcome == "cannot_tell" and "no such order" in outcome.why


def test_async_handlers_and_returned_awaitables_are_awaited_on_one_loop(shop: PythonHost) -> None:
    assert ask(shop, "later").result == "async"
    assert ask(shop, "returns_awaitable").result == "async"
    assert ask(shop, "returns_task").result == ask(shop, "returns_task").result == "async"
    assert ask(shop, "loop_id").result == ask(shop, "loop_id").result


ANSWERED = {
    "already": ("undo", "already_done", None, "404"),
    "human": ("undo", "human", None, "call them"),
    "present": ("probe", "present", {"id": 7}, ""),
    "absent": ("probe", "absent", None, ""),
    "unclear": ("probe", "cannot_tell", None, ""),
    "already in a probe": ("probe", "cannot_tell", None, ""),
    "present in an undo": ("undo", "failed", None, ""),
}


@pytest.mark.parametrize("case", ANSWERED)
def test_answers_are_told_from_results(shop: PythonHost, case: str) -> None:
    purpose, *expected = ANSWERED[case]
    outcome = ask(shop, case.split()[0], purpose=purpose)
    assert [outcome.outcome, outcome.result, outcome.note] == expected


def test_nothing_that_merely_has_the_name_is_asked_to_verify(shop: PythonHost) -> None:
    outcome = ask(shop, "present", purpose="verify")
    assert outcome.outcome == "unavailable" and "no reconciler for present" in outcome.why
    assert not shop.knows("present", "verify").found and shop.knows("present").found


@pytest.mark.parametrize(("handler", "why"), [("too_large", "over the cap"), ("unstorable", "builtin_function"),
                                              ("not_finite", "finite"), ("surrogate", "surrogates")])  # fmt: skip
def test_a_result_that_cannot_be_kept_is_still_done(shop: PythonHost, handler: str, why: str) -> None:
    outcome = ask(shop, handler)
    assert outcome.outcome == "done" and outcome.result is None
    assert "could not be kept" in outcome.note and why in outcome.note


@pytest.mark.promise("1.8")
def test_a_hanging_handler_is_lost_and_its_whole_group_is_killed(shop: PythonHost, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    outcome = ask(shop, "hang_with_child", deadline_ms=1500, pid_file=str(pids))
    assert outcome.outcome == "lost" and "no answer within 1500 ms" in outcome.why
    assert eventually(lambda: not any(running(int(pid)) for pid in pids.read_text().split()))
    assert ask(shop, "count").result == 1


def test_a_segfault_is_lost_with_its_signal_and_last_words(shop: PythonHost) -> None:
    outcome = ask(shop, "segfault")
    assert outcome.outcome == "lost" and "SIGSEGV" in outcome.why
    assert "last words" in outcome.stderr and "Fatal Python error" in outcome.stderr
    assert ask(shop, "count").result == 1


def test_a_host_that_ends_inside_a_handler_is_lost_whatever_its_exit(shop: PythonHost) -> None:
    outcome = ask(shop, "vanishes")
    assert outcome.outcome == "lost" and "exit 0" in outcome.why


def test_the_end_of_a_host_is_seen_though_a_fork_holds_its_pipes(shop: PythonHost, tmp_path: Path) -> None:
    outcome = ask(shop, "vanishes_leaving_a_fork", pid_file=str(tmp_path / "pid"))
    assert outcome.outcome == "lost" and "exit 0" in outcome.why
    assert eventually(lambda: not running(int((tmp_path / "pid").read_text())))


def test_a_handler_that_started_in_the_last_moment_is_lost_and_not_merely_late(
    shop: PythonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(shop, "count").result == 1
    line, calls = hosts._Process.line, []

    def overslept(self: Any, end: float) -> Any:
        calls.append(end)
        if len(calls) == 1:
            self.child.pump(0)  # the request goes out
            time.sleep(0.5)  # the host says that it started; nobody looks before the time is up
            return None
        return line(self, end)

    monkeypatch.setattr(hosts._Process, "line", overslept)
    assert ask(shop, "hang").outcome == "lost"


def test_a_fork_that_comes_back_from_a_handler_answers_nothing(shop: PythonHost) -> None:
    assert ask(shop, "forks").result == "parent"
    assert ask(shop, "count").result == 1


def test_a_handler_that_closes_its_streams_is_heard(shop: PythonHost) -> None:
    assert ask(shop, "closes_everything").result == 1
    assert ask(shop, "boom").outcome == "failed"
    assert ask(shop, "count").result == 1


def test_a_flood_on_standard_error_ends_in_an_outcome_with_the_last_4_kb(shop: PythonHost) -> None:
    outcome = ask(shop, "floods")
    assert outcome.outcome == "done" and len(outcome.result) == 100_000
    assert len(outcome.stderr) == 4096 and outcome.stderr.endswith("the end\n")


def test_a_host_killed_between_calls_is_replaced_and_no_attempt_is_lost(shop: PythonHost) -> None:
    first = ask(shop, "pid").result
    os.kill(first, signal.SIGKILL)
    second = ask(shop, "pid")
    assert second.outcome == "done" and second.result != first


def test_a_host_that_dies_before_it_starts_the_handler_is_replaced(
    shop: PythonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(shop, "pid").result
    monkeypatch.setattr(hosts._Process, "usable", lambda self, spec: True)  # it dies just after it was looked at
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: not running(first))
    assert ask(shop, "count") == Outcome("done", 1)


def test_an_idle_host_ends_when_its_daemon_does(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    file = tmp_path / "shop.py"
    file.write_text(HANDLERS)
    daemon = f"""
import os, sys, threading, time
from amends.runtime.hosts import PythonHost, PythonSpec
def host(): return PythonHost(PythonSpec("shop", sys.executable, files=({str(file)!r},)))
idle, busy = host(), host()
pid = idle.call("pid", "undo", {{}}, "k", "s", 1, 1, 20000).result
open({str(pids)!r} + ".idle", "w").write(str(pid))
busy.call("hang_with_child", "undo", {{"pid_file": {str(pids)!r}}}, "k", "s", 1, 1, 60000)
"""
    child = subprocess.Popen([sys.executable, "-c", daemon])
    assert eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    everyone = [int(pid) for pid in pids.read_text().split() + Path(f"{pids}.idle").read_text().split()]
    assert all(map(running, everyone))
    child.kill()
    child.wait()
    assert eventually(lambda: not any(map(running, everyone)))


def test_calls_of_many_threads_share_a_few_processes(shop: PythonHost) -> None:
    found: list[Outcome] = []
    threads = [threading.Thread(target=lambda: found.append(ask(shop, "slow"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outcome.outcome for outcome in found] == ["done"] * 8
    assert 1 < len({outcome.result for outcome in found}) <= hosts.PROCESSES


def test_a_handler_that_was_corrected_is_loaded_anew(shop: PythonHost, tmp_path: Path) -> None:
    assert ask(shop, "boom").outcome == "failed"
    file = tmp_path / "shop.py"
    file.write_text(HANDLERS.replace('raise ValueError("no such order")', 'return "corrected"'))
    assert ask(shop, "boom").result == "corrected"


NO_HANDLERS = ["nothing", "_private", "shop:_private", "os:system", "os.system", "shop:os.system", "Receipt",
               "subprocess.run", "sys.exit", "", ":", "shop:", "__builtins__"]  # fmt: skip


@pytest.mark.parametrize("name", NO_HANDLERS)
def test_only_handlers_are_found(shop: PythonHost, name: str) -> None:
    outcome = ask(shop, name)
    assert outcome.outcome == "unavailable" and "no handler" in outcome.why
    assert not shop.knows(name).found


@pytest.mark.parametrize("name", ["pid", "shop:pid", "Group.member", "shop:Group.member"])
def test_handlers_are_found_by_function_and_by_module_and_function(shop: PythonHost, name: str) -> None:
    assert ask(shop, name).outcome == "done" and shop.knows(name).found


def test_arguments_that_do_not_fit_are_a_failure_of_the_handler(shop: PythonHost) -> None:
    outcome = ask(shop, "keyed", wrong=1)
    assert outcome.outcome == "failed" and "TypeError" in outcome.why


BROKEN = {
    "syntax": ("def f(:", "SyntaxError"),
    "import": ("import no_such_package", "ModuleNotFoundError"),
    "raising": ("raise RuntimeError('half')", "RuntimeError: half"),
    "exiting": ("import sys; sys.exit(5)", "SystemExit: 5"),
    "dying": ("import os; os._exit(7)", "exit 7 before it said hello"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_does_not_load_is_no_attempt(tmp_path: Path, name: str) -> None:
    text, why = BROKEN[name]
    file = tmp_path / "broken.py"
    file.write_text(text)
    host = PythonHost(PythonSpec("broken", sys.executable, files=(str(file),)))
    outcome = ask(host, "f")
    assert outcome.outcome == "unavailable" and why in outcome.why
    file.write_text("def f(): return 1\n")
    assert ask(host, "f").result == 1
    host.close()


@pytest.mark.parametrize(
    ("interpreter", "why"),
    [("/no/such/python", "No such file"), ("/bin/cat", "before it said hello"), ("/bin/true", "before it said hello")],
)
def test_an_interpreter_that_is_none_is_no_attempt(tmp_path: Path, interpreter: str, why: str) -> None:
    file = tmp_path / "shop.py"
    file.write_text(HANDLERS)
    outcome = ask(PythonHost(PythonSpec("shop", interpreter, files=(str(file),))), "pid")
    assert outcome.outcome == "unavailable" and why in outcome.why


def test_a_host_of_another_version_is_refused(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f'#!{SH}\necho \'{{"v":2,"hello":true}}\'\nexec cat >/dev/null\n')
    fake.chmod(0o755)
    outcome = ask(PythonHost(PythonSpec("shop", str(fake), files=("x.py",))), "pid")
    assert outcome.outcome == "unavailable" and "speaks version 2, and this amends 1" in outcome.why


def test_nothing_is_imported_from_the_working_folder_by_accident(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "json.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "shop.py").write_text(HANDLERS)
    spec = PythonSpec("shop", sys.executable, files=(str(tmp_path / "shop.py"),), cwd=str(tmp_path / "work"))
    host = PythonHost(spec)
    assert ask(host, "pid").outcome == "done"
    host.close()


def interpreters() -> list[str]:
    found = sorted(Path.home().glob(".pyenv/versions/*/bin/python3.*[0-9]"))
    return [str(path) for path in found if path.name in ("python3.8", "python3.9", "python3.12", "python3.13")]


@pytest.mark.parametrize("interpreter", interpreters() or [""])
def test_other_pythons_run_the_same_host(tmp_path: Path, interpreter: str) -> None:
    if not interpreter:
        pytest.skip("no other Python interpreter is installed here")
    file = tmp_path / "shop.py"
    file.write_text(HANDLERS)
    host = PythonHost(PythonSpec("shop", interpreter, files=(str(file),)))
    values = {"a": Decimal("4.20"), "b": datetime(2025, 1, 1, 2, 3, 4, 5, tzinfo=UTC), "c": (1, {2}), "d": b"x"}
    assert ask(host, "echo", **values).result == values
    assert ask(host, "later").result == "async"
    assert ask(host, "keyed", amount=1).result == "key-1"
    assert ask(host, "boom").outcome == "failed"
    host.close()


# ---- registered names -----------------------------------------------------------------------------------------------

REGISTERED = """
from amends.runtime.tools import ALREADY_DONE, PRESENT, compensator


@compensator("vendor.refund")
def refund(charge, idempotency_key):
    return [charge, idempotency_key]


@compensator("vendor.void", idempotent=True)
async def anything(charge):
    return ALREADY_DONE("gone")


@compensator("vendor.plain")
def plain(charge):
    return None


def find_charge(charge):
    return PRESENT({"id": charge})
"""


def test_registered_names_are_resolved_and_say_whether_they_may_run_twice(tmp_path: Path) -> None:
    file = tmp_path / "shop.py"
    file.write_text(REGISTERED)
    host = PythonHost(PythonSpec("shop", sys.executable, files=(str(file),)))
    assert ask(host, "vendor.refund", charge="ch_1").result == ["ch_1", "key-1"]
    outcome = ask(host, "vendor.void", charge="ch_1")
    assert (outcome.outcome, outcome.note) == ("already_done", "gone")
    outcome = ask(host, "find_charge", purpose="probe", charge="ch_1")
    assert (outcome.outcome, outcome.result) == ("present", {"id": "ch_1"})
    assert [host.knows(name).again for name in ("vendor.refund", "vendor.void", "vendor.plain")] == [
        "keyed", "idempotent", ""]  # fmt: skip
    host.close()


def test_hosts_are_asked_in_order_and_every_reason_is_kept(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(REGISTERED)
    (tmp_path / "broken.py").write_text("import no_such_package")
    broken = PythonSpec("[python.broken]", sys.executable, files=(str(tmp_path / "broken.py"),))
    shop = PythonSpec("[python.shop]", sys.executable, files=(str(tmp_path / "shop.py"),))
    program = ExecSpec("mail.unsend", (SH, "-c", "exit 0"), idempotent=True)
    every = Hosts([broken], [program, shop])
    host, known = every.find("vendor.refund")
    assert isinstance(host, PythonHost) and host.spec is shop and known.again == "keyed"
    host, known = every.find("mail.unsend")
    assert isinstance(host, ExecHost) and known.again == "idempotent"
    host, known = every.find("vendor.unknown")
    assert host is None and "no_such_package" in known.why and "no handler vendor.unknown" in known.why
    assert every.again("vendor.plain") == "" and every.again("vendor.unknown") is None
    checked = {item.name: item for item in every.check()}
    assert "no_such_package" in checked["[python.broken]"].why
    assert "vendor.refund" in checked["[python.shop]"].handlers and checked["mail.unsend"].why == ""
    every.close()


def test_nothing_configured_is_said_in_words() -> None:
    assert Hosts().find("x") == (None, hosts.Known(False, why="no host has x, and none was recorded"))


# ---- recorded hosts -------------------------------------------------------------------------------------------------

AGENT = """
import json, os, sys
from amends.runtime.hosts import recorded_host
import helper_module
from package import inner


def refund(charge, idempotency_key):
    return [__name__, charge, idempotency_key]


class Vendor:
    @staticmethod
    def refund(charge):
        return "by class"

    def method(self):
        return None


def local():
    def closure():
        return None
    return closure


GUARD
    what = {"refund": refund, "static": Vendor.refund, "other": helper_module.undo, "inner": inner.undo,
            "lambda": lambda: None, "closure": local(), "method": Vendor().method, "builtin": len}
    print(json.dumps({name: recorded_host(fn) for name, fn in what.items()}))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "a project"
    (folder / "package").mkdir(parents=True)
    (folder / "helper_module.py").write_text("def undo(): return __name__\n")
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "inner.py").write_text("def undo(): return __name__\n")
    (folder / "agent.py").write_text(AGENT.replace("GUARD", 'if __name__ == "__main__":'))
    (folder / "unguarded.py").write_text(AGENT.replace("GUARD", "if True:"))
    return folder


def recorded_by(project: Path, *arguments: str) -> dict[str, Any]:
    run = subprocess.run([sys.executable, *arguments], cwd=project, capture_output=True, text=True, check=True)
    return {name: tuple(found) for name, found in json.loads(run.stdout).items()}


@pytest.mark.promise("4.1")
def test_a_recorded_handler_runs_after_its_process_is_gone(project: Path) -> None:
    found = recorded_by(project, "agent.py")
    host, reason = found["refund"]
    assert reason == "" and host == {
        "interpreter": sys.executable,
        "path": str(project),
        "file": str(project / "agent.py"),
        "module": "agent",
        "function": "refund",
        "digest": host["digest"],
        "main": True,
        "cwd": str(project),
    }
    every = Hosts()
    for name, handler, kwargs, result in [
        ("refund", "agent:refund", {"charge": "c"}, ["agent", "c", "key-1"]),
        ("static", "whatever.name", {"charge": "c"}, "by class"),
        ("other", "helper_module:undo", {}, "helper_module"),
        ("inner", "package.inner:undo", {}, "package.inner"),
    ]:
        place, known = every.find(handler, json.loads(json.dumps(found[name][0])))
        assert place is not None, known.why
        assert ask(place, handler, **kwargs) == Outcome("done", result)
    assert len(every.pools) == 3  # the two of agent.py share their processes
    every.close()


def test_what_cannot_be_found_again_is_said_with_its_reason(project: Path) -> None:
    found = recorded_by(project, "agent.py")
    for name, why in [
        ("lambda", "it is a lambda"),
        ("closure", "defined inside a function (local.<locals>.closure)"),
        ("method", "it is a method"),
        ("builtin", "it is a builtin_function_or_method"),
    ]:
        host, reason = found[name]
        assert host is None and why in reason


def test_an_agent_without_a_guard_is_not_imported_again(project: Path) -> None:
    found = recorded_by(project, "unguarded.py")
    host, reason = found["refund"]
    assert host is None and "no `if __name__ ==" in reason and "unguarded.py" in reason
    assert found["other"][0] is not None


def test_a_module_run_with_m_is_recorded_by_its_name(project: Path) -> None:
    host, reason = recorded_by(project, "-m", "agent")["refund"]
    assert host["module"] == "agent" and host["main"] is False and host["path"] == str(project)
    place, known = Hosts().find("agent:refund", host)
    assert place is not None, known.why
    assert ask(place, "agent:refund", charge="c").result == ["agent", "c", "key-1"]
    place.close()


def test_a_function_typed_at_a_prompt_is_in_no_file(project: Path) -> None:
    code = "from amends.runtime.hosts import recorded_host\nimport json\n"
    code += "def f(): pass\nprint(json.dumps({'f': recorded_host(f)}))"
    host, reason = recorded_by(project, "-c", code)["f"]
    assert host is None and "prompt" in reason


def test_a_frozen_program_names_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh() -> None: ...

    fresh.__qualname__ = "fresh"
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    host, reason = recorded_host(fresh)
    assert host is None and "frozen" in reason


def test_a_file_that_changed_is_run_and_the_outcome_says_so(project: Path) -> None:
    host, _ = recorded_by(project, "agent.py")["refund"]
    agent = project / "agent.py"
    agent.write_text(agent.read_text().replace("return [__name__, charge, idempotency_key]", "return 'corrected'"))
    every = Hosts()
    place, _ = every.find("agent:refund", host)
    outcome = ask(place, "agent:refund", charge="c")
    assert outcome.outcome == "done" and outcome.result == "corrected"
    assert "agent.py has changed since it was recorded" in outcome.note
    every.close()


def test_a_module_that_is_another_file_now_is_not_run(project: Path, tmp_path: Path) -> None:
    host, _ = recorded_by(project, "agent.py")["other"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(project / "helper_module.py", elsewhere / "helper_module.py")
    every = Hosts()
    place, known = every.find("helper_module:undo", {**host, "path": str(elsewhere)})
    assert place is None and "when it was recorded" in known.why
    every.close()


@pytest.mark.parametrize("missing", ["interpreter", "file", "cwd"])
def test_a_recorded_place_that_is_gone_is_unavailable(project: Path, missing: str) -> None:
    host, _ = recorded_by(project, "agent.py")["refund"]
    place, known = Hosts().find("agent:refund", {**host, missing: f"/gone/{missing}"})
    assert place is None and f"/gone/{missing}" in known.why


def test_a_recorded_host_that_makes_no_sense_is_not_tried() -> None:
    assert Hosts().find("x", {"interpreter": "/bin/sh"})[0] is None


def test_imports_of_the_command_line_are_files_and_modules(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    every = Hosts([hosts.imported(["agent.py", "helper_module"])])
    place, known = every.find("helper_module:undo")
    assert place is not None, known.why
    assert ask(place, "helper_module:undo").result == "helper_module"
    assert ask(place, "agent:refund", charge="c").result == ["agent", "c", "key-1"]
    every.close()


# ---- both ends ------------------------------------------------------------------------------------------------------


def test_both_ends_agree_on_what_a_handler_may_say() -> None:
    assert {**hosts.ANSWERS} == host_program.ANSWERS and hosts.VERSION == host_program.VERSION


class ReadTimeout(Exception): ...


class ConnectTimeout(ReadTimeout): ...


def test_a_hosts_errors_mean_what_a_live_sagas_errors_mean() -> None:
    from urllib.error import HTTPError, URLError

    from amends.runtime.perform import says_nothing

    every = [
        ValueError(),
        TimeoutError(),
        EOFError(),
        SystemExit(404),
        KeyboardInterrupt(),
        OSError(),
        FileNotFoundError(),
        ConnectionResetError(),
        ConnectionRefusedError(),
        ReadTimeout(),
        ConnectTimeout(),
        URLError(TimeoutError()),
        URLError(ConnectionRefusedError()),
        *(HTTPError("u", code, "", None, None) for code in (404, 408, 500)),
    ]
    said = [host_program.says_nothing(error) for error in every]  # type: ignore[arg-type]
    assert said == [says_nothing(error) for error in every] and set(said) == {True, False}


def test_both_ends_agree_on_the_tags() -> None:
    @dataclass
    class Receipt:
        charge: str
        amount: Decimal

    class Point(NamedTuple):
        lat: float
        lon: float

    every = [1, 1 << 60, 1.5, "é", None, True, b"x", Decimal("4.20"), date(2025, 1, 1), datetime(2025, 1, 1, fold=1),
             UUID(int=7), {1, "a", (2,)}, (1, (2,)), {"$": 1, "a": [()]}, Receipt("c", Decimal(1)),
             Point(1, 2)]  # fmt: skip
    for value in every:
        theirs = host_program.tag(value)
        assert msgspec.json.encode(theirs) == encode(value)
        back = host_program.untag(theirs)
        assert getattr(back, "__dict__", back) == getattr(decode(theirs), "__dict__", decode(theirs))


def test_the_program_of_the_host_needs_nothing_but_the_standard_library() -> None:
    source = Path(host_program.__file__).read_text()
    subprocess.run([sys.executable, "-S", "-I", "-c", source], check=True, cwd="/")
