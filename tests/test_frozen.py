"""One executable holds all of it: the story from that file alone, on an otherwise empty PATH and with no Python at all.

These tests need dist/amends, frozen from these very sources (`python3 packaging/do.py freeze`). They are skipped by
name where it is not there, and fail instead where AMENDS_FROZEN says that it must be.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_service import REAL, SYSTEMD
from worlds import World, kill

from amends.cli.main import COMMANDS
from amends.cli.service import service
from amends.cli.version import VERSION
from amends.store import sqlite

ROOT = Path(__file__).resolve().parents[1]
CURL = shutil.which("curl")
SSH_KEYGEN = shutil.which("ssh-keygen")
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux is asked")
BY_CURL = pytest.mark.skipif(CURL is None, reason="curl is not here")
BY_SSH = pytest.mark.skipif(SSH_KEYGEN is None, reason="ssh-keygen is not installed")

pytestmark = pytest.mark.slow


def door() -> ModuleType:
    """packaging/do.py, as a module of this test's own."""
    spec = importlib.util.spec_from_file_location("do", ROOT / "packaging/do.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def frozen() -> Path:
    """The executable, frozen from these sources."""
    asked = os.environ.get("AMENDS_FROZEN")
    path = (ROOT / (asked or "dist/amends")).resolve()
    no = pytest.fail if asked else pytest.skip
    if not path.is_file():
        no(f"there is no executable at {path}: run python3 packaging/do.py freeze")
    stamp = path.with_name("amends.tree")
    if not stamp.exists() or stamp.read_text() != door().tree_digest():
        no(f"{path} was frozen from other sources: run python3 packaging/do.py freeze")
    return path


class Bare(World):
    """A machine that has the executable and nothing else: an empty PATH, no Python variables, a ledger far away.

    Agents are run by the Python of this test, at its absolute path, in the same environment.
    """

    def __init__(self, executable: Path, folder: Path) -> None:
        super().__init__(folder)
        self.executable = executable
        self.bin, self.tmp = folder / "bin", folder / "tmp"
        self.bin.mkdir()
        self.tmp.mkdir()
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "TMPDIR": str(self.tmp),
            "AMENDS_HOME": str(self.home),
            "AMENDS_ANCHORS": str(folder / "anchors"),
            "AMENDS_DEBUG": "1",
            "LEDGER_URL": self.service.url,
        }

    def amends(self, *args: str, timeout: float = 60, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a verb of the executable to its end. `with_env`: more variables; `by`: another executable of ours."""
        env = self.env | more.pop("with_env", {})
        return subprocess.run(
            [more.pop("by", self.executable), *args], env=env, cwd=self.folder, text=True, capture_output=True,
            timeout=timeout, stdin=subprocess.DEVNULL, **more,
        )  # fmt: skip

    def said(self, *args: str, code: int = 0) -> Any:
        """What a verb answers with --json, having ended with `code`."""
        ran = self.amends(*args, "--json")
        assert ran.returncode == code, ran
        return json.loads(ran.stdout)

    def daemon(self, *args: str, **more: Any) -> subprocess.Popen[str]:
        return self.start([str(more.pop("by", self.executable)), "recoverd", *args], **more)

    def ready(self, **more: Any) -> subprocess.Popen[str]:
        """A daemon that has said that it is at work."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear, tempfile.TemporaryDirectory() as folder:
            ear.bind(f"{folder}/ear")  # not below the test's folder, whose name is too long for a socket
            ear.settimeout(60)
            daemon = self.daemon(env={"NOTIFY_SOCKET": f"{folder}/ear"}, **more)
            assert ear.recv(100) == b"READY=1"
        return daemon  # its supervisor is gone from now on, which is no reason to stop

    def unpacked(self) -> Path:
        """The executable of the unpacked form, laid out by the executable itself."""
        self.amends("service", "install")
        return self.home / "app/current/amends"

    def left(self) -> list[str]:
        """What is in the folder for temporary files."""
        return sorted(path.name for path in self.tmp.iterdir())

    def handlers(self, text: str) -> None:
        """A home whose handlers.toml says `text`."""
        assert self.amends("init").returncode == 0
        (self.home / "handlers.toml").write_text(f"version = 1\n{text}")

    def killed(self, *sagas: str, handler: str = "shop.refund") -> None:
        """Agents that were killed in the middle of their second payment, which took place all the same."""
        agents = [
            self.agent(
                f"""
                with saga_scope(id={saga!r}) as saga:
                    buy(saga, {saga + "-book"!r}, undo=declared(handler={handler!r}))
                    buy(saga, {saga + "-ink"!r}, "then=hang", undo=declared(handler={handler!r}))
                """,
                name=saga.replace("-", "_"),
            )
            for saga in sagas
        ]
        self.until_open(len(agents))
        self.until("it took effect", lambda: len(self.effects("charge")) == 2 * len(agents))
        for agent in agents:
            kill(agent)


@pytest.fixture
def bare(frozen: Path, tmp_path: Path) -> Iterator[Bare]:
    made = Bare(frozen, tmp_path)
    yield made
    made.close()


# ---- what is in it --------------------------------------------------------------------------------------------------


@pytest.mark.promise("13")
def test_the_version_names_the_commit_it_was_frozen_from(bare: Bare) -> None:
    done = bare.amends("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"amends {VERSION} (") and done.stdout.endswith(")\n")
    assert bare.said("--version") == {"version": done.stdout.strip().removeprefix("amends ")}
    assert not bare.home.exists() and bare.left() == []


@pytest.mark.promise("13")
def test_every_verb_has_its_help_in_the_file(bare: Bare) -> None:
    verbs = [(), *((verb,) for verb in COMMANDS), *(("service", verb) for verb in service.commands)]
    for verb in verbs:
        done = bare.amends(*verb, "--help")
        assert (done.returncode, done.stderr) == (0, ""), verb
        assert done.stdout.startswith(" ".join(["Usage: amends", *verb])), verb
        assert len(done.stdout.splitlines()) > 4, f"{verb}: docstrings were stripped"
    assert not bare.home.exists() and bare.left() == []


@pytest.mark.promise("13")
def test_the_demo_runs_from_the_file_alone(bare: Bare) -> None:
    told = bare.said("demo")
    assert told["ok"] is True and told["log"]["outcome"] == "compensated"
    assert told["ledger"]["refunded"] == ["flight", "hotel", "train"] and told["ledger"]["standing"] == 0
    spoken = bare.amends("demo")
    assert spoken.returncode == 0 and "nothing is left standing" in spoken.stdout, spoken
    assert not bare.home.exists() and bare.left() == []


@LINUX
@pytest.mark.promise("13")
def test_it_brings_its_own_libraries_and_one_sqlite(bare: Bare) -> None:
    inner = bare.unpacked().parent / "_internal"
    held = {path.name.split(".")[0] for path in inner.rglob("*.so*")}
    assert {"_ssl", "libssl", "_hashlib", "libcrypto", "_cffi_backend", "backend_c", "libgcc_s"} <= held, sorted(held)
    assert not held & {"_sqlite3", "libsqlite3", "_tkinter", "readline"}, "a second SQLite would drop our locks"
    text = (inner / "amends/runtime/host_program.py").read_text()
    assert text == (ROOT / "runtime/host_program.py").read_text(), "it is handed to other interpreters as text"


@pytest.mark.promise("11.1")
@pytest.mark.promise("13")
def test_the_page_is_served_from_the_file_alone(bare: Bare) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    assert bare.amends("init").returncode == 0
    page = bare.start([str(bare.executable), "ui", "--no-open", "--json", "--port", str(port)])
    assert page.stdout is not None
    told = json.loads("".join(iter(page.stdout.readline, "}\n")) + "}")
    headers = {"Host": f"amends.localhost:{port}", "Origin": f"http://amends.localhost:{port}"}

    def asked(path: str, body: Any = None, **more: str) -> Any:
        said = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers | more)
        if body is not None:
            said.data = json.dumps(body).encode()
            said.add_header("Content-Type", "application/json")
        return urllib.request.urlopen(said, timeout=30)

    for file in sorted((ROOT / "cli/web/static").iterdir()):
        assert asked(f"/static/{file.name}").read() == file.read_bytes(), file.name
    entered = asked("/api/enter", {"link": told["link"].partition("#")[2]})
    inside = {"Cookie": entered.headers["set-cookie"].split(";")[0], "X-Amends-Key": json.load(entered)["key"]}
    assert json.load(asked("/api/inbox", **inside))["items"] == []
    assert json.load(asked("/api/keys", **inside))["founded"] is False
    assert b"text/event-stream" in asked("/api/live", **inside).headers["content-type"].encode()
    page.send_signal(signal.SIGTERM)
    assert page.wait(30) == 0 and bare.left() == []


# ---- the story, with a Python for the handlers ----------------------------------------------------------------------


@pytest.mark.promise("4.1")
@pytest.mark.promise("13")
def test_a_killed_agent_is_unwound_through_the_interpreter_it_ran_in(bare: Bare) -> None:
    bare.killed("order-1")
    assert bare.standing() == ["order-1-book", "order-1-ink"]
    assert bare.recover() == (0, {"recovered": ["order-1"], "escalated": [], "skipped": []})
    assert bare.refunded() == ["order-1-ink", "order-1-book"]
    assert bare.standing() == [] and bare.one_effect_per_key()
    assert bare.recover() == (0, {"recovered": [], "escalated": [], "skipped": []})
    assert [saga["outcome"] for saga in bare.said("ps")] == ["compensated"]
    assert bare.said("inbox") == []
    assert bare.said("verify")["verdict"] == "INTACT"
    steps = bare.said("show", "order-1")["steps"]
    assert [(step["tool"], step["state"]) for step in steps] == [("shop.charge", "compensated")] * 2
    assert "shop.charge" in bare.amends("show", "order-1", "--why").stdout
    assert "handlers" in bare.amends("doctor", "--hosts").stdout
    assert bare.left() == []


@pytest.mark.promise("4.4")
@pytest.mark.promise("13")
def test_run_undoes_at_once_what_its_agent_left_and_passes_its_end_on(bare: Bare) -> None:
    agent = bare.script(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            os.kill(os.getpid(), 9)
        """
    )
    ran = bare.amends("run", "--", sys.executable, str(agent))
    assert (ran.returncode, ran.stdout) == (137, ""), ran
    assert "Undone: order-1." in ran.stderr
    assert bare.refunded() == ["book"] and bare.standing() == [] and bare.left() == []
    quiet = bare.amends("run", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (7, "", "")
    assert bare.amends("run", "--", "python3", "-c", "").returncode == 127, "there is none on this PATH"


@pytest.mark.promise("4.4")
def test_run_hands_a_signal_on_and_undoes_what_the_agent_left(bare: Bare) -> None:
    runner = bare.start([str(bare.executable), "run", "--", sys.executable, str(bare.script(BOOK_THEN_SLEEP))])
    bare.until("the payment is known", lambda: bare.kinds().count("step.done") == 1)
    runner.terminate()
    out, err = runner.communicate(timeout=60)
    assert (runner.returncode, out) == (128 + signal.SIGTERM, "") and "Undone: order-1." in err, (out, err)
    assert bare.refunded() == ["book"] and bare.left() == []


@pytest.mark.promise("4.4")
def test_imported_handlers_run_in_the_first_python_on_the_path(bare: Bare) -> None:
    python = moved_environment(bare.folder / "python")
    (bare.folder / "mine.py").write_text(
        "import os, sys\nimport shop\nfrom amends import compensator\n"
        "@compensator('shop.elsewhere')\ndef refund(of, idempotency_key):\n"
        "    open('ran', 'w').write(sys.executable)\n    return shop.refund(of, '', idempotency_key)\n"
    )
    bare.killed("order-1", handler="shop.elsewhere")
    code, said = bare.recover("--import", "mine.py")
    assert code == 1 and said["escalated"], "there is no Python on this PATH"
    item = bare.said("inbox", code=1)[0]["id"]
    path = f"{python.parent}:{bare.bin}"
    retried = bare.amends("retry", item, "--by", "Ada", "--import", "mine.py", with_env={"PATH": path})
    assert retried.returncode == 0, retried
    assert bare.refunded() == ["order-1-ink", "order-1-book"]
    assert (bare.folder / "ran").read_text() == str(python.with_name("python3"))


@pytest.mark.promise("13")
def test_a_committed_saga_is_undone_on_request(bare: Bare) -> None:
    agent = bare.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "pen", compensate=derived)
        """
    )
    assert agent.wait(30) == 0
    rehearsed = bare.amends("undo", "order-1", "--by", "Ada", "--reason", "wrong customer", "--dry-run")
    assert rehearsed.returncode == 0 and bare.effects("refund") == []
    done = bare.amends("undo", "order-1", "--by", "Ada", "--reason", "wrong customer")
    assert done.returncode == 0, done
    assert bare.refunded() == ["pen", "book"] and bare.standing() == []
    assert bare.said("verify")["verdict"] == "INTACT"


@pytest.mark.promise("13")
def test_what_needs_a_python_that_is_not_there_goes_to_a_person_in_words(bare: Bare) -> None:
    """The agent's own interpreter is gone, and PATH has none."""
    python = moved_environment(bare.folder / "python")
    agent = bare.start([str(python), str(bare.script(BOOK_THEN_SLEEP))])
    bare.until("the payment is known", lambda: bare.kinds().count("step.done") == 1)
    kill(agent)
    (bare.folder / "python").rename(bare.folder / "elsewhere")
    code, said = bare.recover()
    assert code == 1 and [one["saga"] for one in said["escalated"]] == ["order-1"], said
    assert bare.standing() == ["book"]
    story = bare.amends("show", "order-1", "--why").stdout
    assert str(python) in story, "which interpreter is missing is said"
    item = bare.said("inbox", code=1)[0]["id"]
    (bare.folder / "elsewhere").rename(bare.folder / "python")
    assert bare.amends("retry", item, "--by", "Ada").returncode == 0
    assert bare.standing() == [] and bare.said("inbox") == []


def moved_environment(folder: Path) -> Path:
    """The environment of this test's Python at another place, where it can be taken away."""
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(os.path.realpath(sys.executable))
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder)
    return folder / "bin/python"


BOOK_THEN_SLEEP = """
with saga_scope(id="order-1") as saga:
    buy(saga, "book")
    time.sleep(60)
"""


# ---- the story, with no Python at all -------------------------------------------------------------------------------


def by_curl(url: str) -> str:
    """handlers.toml: curl itself is the handler; the ledger takes what a handler is handed as it is."""
    command = [CURL, "--fail", "-sS", "-o", "/dev/null", "-H", "content-type: application/json", "--data-binary", "@-"]
    return f'[exec."bank.refund"]\ncommand = {json.dumps([*command, url + "/refund"])}\nidempotent = true\n'


@BY_CURL
@pytest.mark.promise("4.4")
@pytest.mark.promise("13")
def test_an_exec_handler_that_is_curl_undoes_the_payments(bare: Bare) -> None:
    bare.handlers(by_curl(bare.service.url))
    bare.killed("order-1", handler="bank.refund")
    assert bare.recover() == (0, {"recovered": ["order-1"], "escalated": [], "skipped": []})
    assert bare.refunded() == ["order-1-ink", "order-1-book"]
    assert bare.standing() == [] and bare.one_effect_per_key()
    assert bare.left() == []


SCRIPT = f"""#!/bin/sh
# Everything this needs is built into the shell, but for two programs at their absolute paths.
/usr/bin/env >> "$SEEN"
status=$({CURL} -sS -o /dev/null -w '%{{http_code}}' --data-binary @- "$LEDGER_URL/refund") || exit 75
case "$status" in
    200) echo '{{"outcome": "done"}}' ;;
    404) echo '{{"outcome": "already_done", "note": "there is no such payment"}}' ;;
    *) echo "the ledger answered $status" >&2; exit 1 ;;
esac
"""


@BY_CURL
@pytest.mark.promise("4.4")
@pytest.mark.promise("13")
def test_a_shell_script_is_a_handler_and_sees_a_clean_environment(bare: Bare) -> None:
    script = bare.folder / "refund.sh"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    seen = bare.folder / "seen"
    bare.handlers(
        f'[exec."bank.refund"]\ncommand = ["{script}"]\nidempotent = true\n'
        f'env = {{ LEDGER_URL = "{bare.service.url}", SEEN = "{seen}" }}\n'
    )
    agent = bare.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book", undo=declared(handler="bank.refund"))
            buy(saga, "ink", "delay_ms=60000", undo=declared(handler="bank.refund"))
        """
    )
    bare.kill_at_open(agent)
    assert bare.recover() == (0, {"recovered": ["order-1"], "escalated": [], "skipped": []})
    assert bare.refunded() == ["book"], "the second payment never took place, and its refund found nothing to do"
    states = [step["compensation"]["state"] for step in bare.said("show", "order-1")["steps"]]
    assert states == ["done", "already_done"]
    assert not [line for line in seen.read_text().splitlines() if line.startswith(("LD_LIBRARY_PATH", "_PYI_", "_MEI"))]


def libraries(program: str) -> set[str]:
    """The shared libraries that a program asks the system for."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True).stdout.split()
    return {word for word in said if word.startswith("/") and os.path.exists(word)}


@pytest.fixture
def island(bare: Bare) -> list[str]:
    """A command that runs another one where there is no Python: a root with the executable, curl and their libraries.

    The folder of the test lies at its own path in there, and the network is the same.
    """
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    found = {name: shutil.which(name, path=path) for name in ("unshare", "sh", "mount", "chroot", "ldd")}
    if not sys.platform.startswith("linux") or os.geteuid() or not all(found.values()):
        pytest.skip(f"a root of its own needs Linux, root, and {', '.join(found)}")
    root = bare.folder / "island"
    programs = [CURL] if CURL else []
    inner = bare.unpacked().parent / "_internal"
    wanted = {str(bare.executable), *programs}.union(*map(libraries, [str(bare.executable), *programs]))
    wanted |= {name for name in libraries(str(next(inner.glob("libpython*.so*")))) if "python" not in name}
    for name in wanted:
        (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, root / name[1:])
    for folder in ("dev", "proc", str(bare.folder)[1:]):
        (root / folder).mkdir(parents=True, exist_ok=True)
    within = (
        f"{found['mount']} --bind /dev {root}/dev && {found['mount']} -t proc proc {root}/proc && "
        f'{found["mount"]} --bind {bare.folder} {root}{bare.folder} && exec {found["chroot"]} {root} "$@"'
    )
    command = [str(found["unshare"]), "-m", str(found["sh"]), "-c", within, "island"]
    tried = subprocess.run([*command, str(bare.executable), "--version"], env=bare.env, capture_output=True, text=True)
    if "Operation not permitted" in tried.stderr or "ermission denied" in tried.stderr:
        pytest.skip(f"no mount namespaces here: {tried.stderr.strip()}")
    assert tried.returncode == 0, tried
    return command


@pytest.mark.promise("13")
def test_the_demo_runs_on_a_machine_without_python(bare: Bare, island: list[str]) -> None:
    command = [*island, str(bare.executable), "demo", "--json"]
    ran = subprocess.run(command, env=bare.env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and json.loads(ran.stdout)["ok"] is True, ran


@BY_CURL
@pytest.mark.promise("13")
def test_the_story_is_told_to_its_end_on_a_machine_without_python(bare: Bare, island: list[str]) -> None:
    bare.handlers(by_curl(bare.service.url))
    bare.killed("order-1", handler="bank.refund")

    def there(*args: str) -> Any:
        command = [*island, str(bare.executable), *args, "--json"]
        ran = subprocess.run(command, env=bare.env, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran
        return json.loads(ran.stdout)

    assert there("recoverd", "--once") == {"recovered": ["order-1"], "escalated": [], "skipped": []}
    assert bare.refunded() == ["order-1-ink", "order-1-book"] and bare.standing() == []
    assert there("verify")["verdict"] == "INTACT"
    assert [saga["outcome"] for saga in there("ps")] == ["compensated"]


# ---- people decide, with the file alone -----------------------------------------------------------------------------

PAYS = """
with saga_scope(id="order-1") as saga:
    print(saga.execute("shop.charge", shop.charge, dict(item="book"), semantics=IRREVERSIBLE)["id"])
"""


def keyring(bare: Bare) -> dict[str, str]:
    """A keyring of two keys that ssh-keygen made, and the variables with which the file finds that program again."""
    here = {"PATH": str(Path(str(SSH_KEYGEN)).parent)}
    for name in ("one", "two"):
        command = [str(SSH_KEYGEN), "-q", "-t", "ed25519", "-N", "", "-f", str(bare.folder / name)]
        subprocess.run(command, check=True, timeout=60)
    assert bare.amends("init").returncode == 0
    founded = bare.amends(
        "keys", "init", "--person", "ada", "--ssh", "one", "--ssh", "two", "--recovery-out", "paper", with_env=here
    )
    assert founded.returncode == 0 and "key.founded" in founded.stdout, founded
    assert [(key["person"], key["level"]) for key in bare.said("keys", "list")["keys"]] == [("ada", "file")] * 2
    return here


@BY_SSH
@pytest.mark.promise("3.5")
@pytest.mark.promise("13")
def test_a_waiting_agent_is_let_go_on_once_by_an_ssh_key_and_the_file(bare: Bare) -> None:
    here = keyring(bare)
    (bare.home / "policy.toml").write_text(
        'version = 1\n[tools."shop.charge"]\nsemantics = "irreversible"\napproval = { level = "file" }\n'
    )
    checked = bare.amends("policy", "check")
    assert checked.returncode == 0 and "shop.charge" in checked.stdout, checked
    agent = bare.agent(PAYS)
    bare.until("people are asked", lambda: "step.asked" in bare.kinds())
    [item] = bare.said("inbox", code=1)
    alone = bare.amends("approve", item["id"])
    assert alone.returncode == 2 and "Nothing was decided" in alone.stdout and "check code" in alone.stdout, alone
    assert bare.attempts() == []
    yes = bare.amends("approve", item["id"], "--ssh", "two", with_env=here)
    assert yes.returncode == 0 and "ada approved" in yes.stdout, yes
    out, err = agent.communicate(timeout=60)
    assert agent.returncode == 0 and out.strip(), err
    assert len(bare.effects("charge")) == 1 and len(bare.attempts()) == 1
    late = bare.amends("approve", item["id"], "--ssh", "one", with_env=here)
    assert late.returncode == 1 and "ada approved it already" in late.stderr, late
    assert bare.said("verify")["verdict"] == "INTACT" and bare.said("inbox") == []
    assert len(bare.attempts()) == 1 and bare.left() == []


@pytest.mark.promise("2.2")
@pytest.mark.promise("13")
def test_a_halt_by_the_file_holds_an_agent_of_python_until_it_is_lifted(bare: Bare) -> None:
    assert bare.amends("init").returncode == 0
    halted = bare.amends("halt", "tool:shop.*", "--by", "ada", "--reason", "an audit")
    assert halted.returncode == 0, halted
    buys = """
    with saga_scope(id="order-1") as saga:
        buy(saga, "book")
    """
    stopped = bare.agent(buys)
    out, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 1 and "Halt on tool:shop.*" in err, err
    assert "an audit" in bare.amends("status").stdout and bare.attempts() == []
    assert bare.said("status")["switch"] == "RESTRICTED"
    assert bare.amends("resume", "tool:shop.*", "--by", "ada", "--reason", "done").returncode == 0
    again = bare.agent(buys.replace("order-1", "order-2"))
    assert again.wait(60) == 0 and len(bare.effects("charge")) == 1


@pytest.mark.promise("2.5")
@pytest.mark.promise("13")
def test_a_policy_that_is_wrong_is_told_with_its_line(bare: Bare) -> None:
    policy = bare.folder / "policy.toml"
    policy.write_text('version = 1\n[[limits]]\nname = "a day"\nkind = "budget"\narg = "amount"\ncpa = "5.00"\n')
    wrong = bare.amends("policy", "check", str(policy))
    assert wrong.returncode == 2 and "policy.toml:6:" in wrong.stdout + wrong.stderr, wrong
    assert not bare.home.exists()


# ---- the daemon, unpacked -------------------------------------------------------------------------------------------


@LINUX
@pytest.mark.promise("13")
def test_a_service_is_told_to_start_the_unpacked_form(bare: Bare) -> None:
    dry = bare.said("service", "install", "--dry-run")
    assert f'ExecStart="{bare.home}/app/current/amends" recoverd' in dry["content"].splitlines()
    assert not bare.home.exists(), "a dry run writes nothing"
    installed = bare.amends("service", "install")
    assert installed.returncode == 1 and "There is no systemctl here" in installed.stdout, installed
    assert oct((bare.home).stat().st_mode & 0o777) == "0o700"
    line = next(line.strip() for line in installed.stdout.splitlines() if line.strip().startswith("AMENDS_HOME="))
    once = bare.amends("-c", f"{line} --once", by="/bin/sh", with_env={"AMENDS_HOME": "", "AMENDS_ANCHORS": ""})
    assert (once.returncode, once.stdout) == (0, "Nothing was left by a dead agent.\n"), once
    assert bare.left() == []


@pytest.mark.promise("13")
def test_the_unpacked_form_is_one_process_that_needs_nothing_in_tmp(bare: Bare) -> None:
    unpacked = bare.unpacked()
    assert bare.amends("--version", by=unpacked).stdout == bare.amends("--version").stdout
    assert bare.amends("recoverd", "--once", by=unpacked).returncode == 0
    daemon = bare.daemon(by=unpacked)
    bare.killed("order-1")
    bare.until("the log tells the end", lambda: "saga.ended" in bare.kinds())
    assert bare.refunded() == ["order-1-ink", "order-1-book"] and bare.standing() == []
    assert bare.left() == []
    if sys.platform.startswith("linux"):
        assert os.readlink(f"/proc/{daemon.pid}/exe") == str(unpacked.resolve()), "no loader stands between"
        threads = Path(f"/proc/{daemon.pid}/task").iterdir()
        programs = [p for t in threads for p in (t / "children").read_text().split()]
        assert not [p for p in programs if os.readlink(f"/proc/{p}/exe") == str(unpacked.resolve())]
    daemon.terminate()
    assert daemon.wait(30) == 0


@pytest.mark.promise("13")
@pytest.mark.parametrize("form", ["one file", "unpacked"])
def test_a_daemon_that_is_asked_to_stop_ends_well_and_leaves_nothing(bare: Bare, form: str) -> None:
    daemon = bare.ready(by=bare.unpacked() if form == "unpacked" else bare.executable)
    daemon.terminate()
    out, err = daemon.communicate(timeout=30)
    assert (daemon.returncode, out, err) == (0, "", "")
    assert bare.left() == []


@pytest.mark.promise("4.1")
def test_two_daemons_of_the_file_undo_each_payment_once(bare: Bare) -> None:
    daemons = [bare.ready(), bare.ready()]
    sagas = [f"order-{n}" for n in range(1, 5)]
    bare.killed(*sagas)
    bare.until("every saga has ended", lambda: bare.kinds().count("saga.ended") == len(sagas))
    assert len(bare.effects("refund")) == 8 and bare.standing() == []
    assert bare.one_effect_per_key()
    tried = [attempt["body"]["of"] for attempt in bare.attempts() if attempt["kind"] == "refund"]
    assert len(tried) == len(set(tried)), "nobody was asked twice"
    for daemon in daemons:
        daemon.terminate()
    assert [daemon.wait(30) for daemon in daemons] == [0, 0]
    assert bare.said("verify")["verdict"] == "INTACT"
    assert bare.left() == []


@pytest.mark.promise("4.1")
def test_a_daemon_that_is_killed_in_the_middle_is_followed_by_the_next(bare: Bare) -> None:
    unpacked = bare.unpacked()
    agent = bare.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "pen", undo=declared("answer_ms=1500"))
            time.sleep(60)
        """
    )
    bare.until("both payments are known", lambda: bare.kinds().count("step.done") == 2)
    first = bare.daemon(by=unpacked)
    kill(agent)
    bare.until("the first refund is under way", lambda: len(bare.effects("refund")) == 1)
    kill(first)
    assert bare.recover()[1]["recovered"] == ["order-1"]
    assert bare.refunded() == ["pen", "book"] and bare.standing() == [] and bare.one_effect_per_key()


@pytest.mark.promise("13")
@pytest.mark.skipif(
    not SYSTEMD.exists() or not shutil.which("unshare") or not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="a systemd of its own needs root, unshare and /lib/systemd/systemd",
)
def test_a_real_systemd_starts_restarts_and_stops_the_unpacked_daemon(bare: Bare) -> None:
    script = REAL.replace("python -m amends.cli", str(bare.executable))
    env = bare.env | {"SYSTEMD": str(SYSTEMD), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
    command = ["unshare", "-m", "bash", "-c", script]
    ran = subprocess.run(command, env=env, cwd=bare.folder, text=True, capture_output=True, timeout=90)
    if ran.returncode == 75:
        pytest.skip("no systemd of our own can be started here")
    assert ran.returncode == 0, ran


# ---- where it lives -------------------------------------------------------------------------------------------------


@LINUX
@pytest.mark.promise("13")
def test_children_inherit_nothing_of_the_loader(bare: Bare) -> None:
    def seen(by: Path, **env: str) -> dict[str, str]:
        ran = bare.amends("run", "--", "/usr/bin/env", by=by, with_env=env)
        assert ran.returncode == 0, ran
        return dict(line.split("=", 1) for line in ran.stdout.splitlines())

    for form in (bare.executable, bare.unpacked()):
        assert seen(form) == bare.env
        theirs = {"LD_LIBRARY_PATH": "/usr/lib/theirs"}
        assert seen(form, **theirs) == bare.env | theirs


@LINUX
@pytest.mark.promise("13")
def test_a_temporary_folder_that_may_not_execute_has_two_ways_around(bare: Bare) -> None:
    """`unshare` gives the command a mount namespace of its own, so that nothing outside sees the mount."""
    unpacked = bare.unpacked()

    def mounted(command: str) -> subprocess.CompletedProcess[str]:
        script = f"mount -t tmpfs -o noexec,size=64m none {bare.tmp} && {command}"
        env = bare.env | {"PATH": f"{os.defpath}:/usr/sbin:/sbin"}
        return subprocess.run(["unshare", "-m", "sh", "-c", script], env=env, capture_output=True, text=True)

    possible = mounted("true")
    if possible.returncode:
        pytest.skip(f"no mount namespaces here: {possible.stderr.strip()}")
    (bare.folder / "elsewhere").mkdir()
    assert mounted(f"exec {bare.executable} --version").returncode != 0, "the fault did not fire"
    around = mounted(f"TMPDIR={bare.folder}/elsewhere exec {bare.executable} --version")
    assert around.returncode == 0 and around.stdout.startswith("amends ")
    assert mounted(f"exec {unpacked} recoverd --once").returncode == 0


@pytest.mark.promise("13")
def test_a_file_of_a_newer_amends_is_refused_in_words_and_left_alone(bare: Bare) -> None:
    bare.killed("order-1")
    path = bare.home / "amends.db"
    db = sqlite.apsw.Connection(str(path))
    db.execute("pragma wal_checkpoint(truncate)").fetchall()
    db.execute(f"pragma user_version = {sqlite.SCHEMA_VERSION + 1}")
    db.execute("pragma wal_checkpoint(truncate)").fetchall()
    db.close()
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    for verb in ("ps", "recoverd --once", "show order-1", "inbox", "init", "run -- /bin/true"):
        ran = bare.amends(*verb.split())
        assert ran.returncode == 7 and "newer" in ran.stderr and "Traceback" not in ran.stderr, (verb, ran)
    assert bare.said("ps", code=7)["error"]["code"] == "too_new"
    assert bare.amends("verify").returncode == 7
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert bare.effects("refund") == []


# ---- doors ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("12")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_are_scripts_that_their_shell_reads(bare: Bare, shell: str) -> None:
    script = bare.amends("completions", shell)
    assert script.returncode == 0 and "amends" in script.stdout, script
    program = shutil.which(shell)
    if program:
        assert subprocess.run([program, "-n"], input=script.stdout, text=True).returncode == 0
    asked = {"_AMENDS_COMPLETE": f"{shell}_complete", "COMP_WORDS": "amends reco", "COMP_CWORD": "1"}
    offered = bare.amends(with_env=asked | ({"COMP_CWORD": "reco"} if shell == "fish" else {}))
    assert offered.returncode == 0 and "recoverd" in offered.stdout and "inbox" not in offered.stdout, offered


@pytest.mark.promise("12")
def test_exit_codes_are_those_of_the_table(bare: Bare) -> None:
    for verb in (("ps",), ("nonsense",), ("recoverd", "--no-such"), ("completions", "tcsh"), ("run",)):
        refused = bare.amends(*verb)
        assert (refused.returncode, refused.stdout) == (2, ""), (verb, refused)
        assert "Traceback" not in refused.stderr
    assert not bare.home.exists(), "none of these makes a home"
    assert bare.amends("init").returncode == 0
    assert bare.amends("show", "no-such-saga").returncode == 2
    for verb in ("ps", "inbox", "status", "verify"):
        assert bare.amends(verb).returncode == 0, verb
    (bare.home / "handlers.toml").write_text("version = 1\n[exec.x]\ncomand = ['x']\n")
    misspelt = bare.amends("recoverd", "--once")
    assert misspelt.returncode == 2 and "line 3" in misspelt.stderr, misspelt
    (bare.home / "handlers.toml").unlink()
    shutil.rmtree(bare.home / "device")
    assert bare.amends("recoverd", "--once").returncode == 4, "a database without its keys"


@pytest.mark.promise("13")
def test_ctrl_c_ends_a_daemon_as_sigterm_does(bare: Bare) -> None:
    daemon = bare.ready(start_new_session=True)
    os.killpg(daemon.pid, signal.SIGINT)  # a terminal sends it to the whole group, loader included
    assert daemon.wait(30) == 0
    assert bare.left() == []


# ---- how it is made -------------------------------------------------------------------------------------------------


@pytest.mark.promise("13")
def test_the_same_tree_freezes_to_the_same_bytes_in_another_folder(
    frozen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = door()
    if not again.PYTHON.exists():
        pytest.skip("the environment of packaging/do.py is not set up here")
    tree = tmp_path / "another checkout"
    unwanted = (".venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*unwanted))
    monkeypatch.setattr(again, "ROOT", tree)
    monkeypatch.setattr(again, "SITE", tree / "build/site")
    monkeypatch.setattr(again, "PINS", tree / "packaging/pins.txt")
    assert again.freeze() == 0
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (frozen, tree / "dist/amends")]
    assert digests[0] == digests[1]
