"""What the guide shows for other languages works as shown: its handlers.toml is read, its program is run."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from amends import COMPENSABLE, AgentKit
from amends.runtime.handlers_file import _EXEC, _PYTHON, read
from amends.runtime.hosts import ExecHost, ExecSpec, Outcome, PythonSpec
from amends.store.errors import HomeRefused
from amends.store.home import Home
from amends.store.identity import adopt

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "runtime/GUIDE.md").read_text(encoding="utf-8")

CONTRACT = pytest.mark.promise("4.4")


def block(language: str) -> str:
    """The only block of that language."""
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    return str(found)


def example(home: Path) -> tuple[ExecSpec, PythonSpec]:
    """The hosts of the guide's handlers.toml, as if it lay in `home`."""
    program, python = read(block("toml"), home / "handlers.toml").specs
    assert isinstance(program, ExecSpec) and isinstance(python, PythonSpec)
    return program, python


@pytest.fixture
def unsend(tmp_path: Path) -> ExecHost:
    """The guide's program behind the guide's entry, with an outbox of this test's own."""
    script = tmp_path / "unsend.sh"
    script.write_text(block("sh"), encoding="utf-8")
    script.chmod(0o755)
    (tmp_path / "mail.env").touch(mode=0o600)
    program, _ = example(tmp_path)
    assert program.command == (str(script),)
    return ExecHost(ExecSpec(**{name: getattr(program, name) for name in program.__struct_fields__}
                             | {"env": (("OUTBOX", str(tmp_path / "outbox")),)}))  # fmt: skip


def undo(host: ExecHost, mail: str) -> Outcome:
    return host.call("mail.unsend", "undo", {"mail_id": mail}, "key-1", "saga-1", 2, 1, 20_000)


@CONTRACT
def test_the_handlers_file_of_the_guide_is_read_and_names_every_key(tmp_path: Path) -> None:
    assert not [key for key in {*_PYTHON, *_EXEC} if f"{key} = " not in block("toml")]
    program, python = example(tmp_path)
    assert program.name == "mail.unsend" and program.timeout_s == 30 and program.idempotent
    assert program.env == (("OUTBOX", "/var/spool/outbox"),) and program.env_file == str(tmp_path / "mail.env")
    assert python.files == (str(tmp_path / "shop/refunds.py"),) and python.path == (str(tmp_path / "shop"),)
    assert python.interpreter == "/home/me/shop/.venv/bin/python" and python.env_file == str(tmp_path / "shop.env")


@CONTRACT
def test_the_program_of_the_guide_undoes_once_and_then_says_so(unsend: ExecHost, tmp_path: Path) -> None:
    (tmp_path / "outbox").mkdir()
    (tmp_path / "outbox" / "m-1").touch()
    done = undo(unsend, "m-1")
    assert done.outcome == "done" and not os.listdir(tmp_path / "outbox")
    assert done.stderr.strip() == "unsending m-1 under key-1"
    again = undo(unsend, "m-1")
    assert (again.outcome, again.note) == ("already_done", "it was not there")


@CONTRACT
def test_the_program_of_the_guide_asks_to_be_tried_again_and_refuses_nonsense(unsend: ExecHost, tmp_path: Path) -> None:
    assert undo(unsend, "m-1").outcome == "again", "there is no outbox"
    (tmp_path / "outbox").mkdir()
    failed = undo(unsend, "../m-1")
    assert (failed.outcome, failed.why) == ("failed", "this is no mail id")


@CONTRACT
def test_the_program_of_the_guide_only_looks_when_it_is_asked_to_verify(unsend: ExecHost, tmp_path: Path) -> None:
    def asked() -> str:
        told = {"tool": "mail.send", "result": {"mail_id": "m-1"}, "withheld": []}
        assert unsend.knows("mail.send", "verify").found and not unsend.knows("mail.other", "verify").found
        return unsend.call("mail.send", "verify", {"to": "bo"}, "key-1", "saga-1", 2, 1, 20_000, told).outcome

    assert asked() == "again", "there is no outbox"
    (tmp_path / "outbox").mkdir()
    assert asked() == "absent"
    (tmp_path / "outbox" / "m-1").touch()
    assert asked() == "present" and os.listdir(tmp_path / "outbox") == ["m-1"]


ENDS = [
    ("exit 0", "done"),
    ('echo \'{"outcome":"already_done"}\'', "already_done"),
    ('echo \'{"outcome":"human"}\'', "human"),
    ('echo \'{"outcome":"failed"}\'; exit 3', "failed"),
    ("echo ok; exit 75", "again"),
    ("exit 3", "failed"),
    ("echo ok; exit 3", "failed"),
    ("echo ok", "lost"),
    ("kill -9 $$", "lost"),
    ('echo \'{"outcome":"done","idempotency_key":"another"}\'', "lost"),
    ("sleep 60", "lost"),
]


@CONTRACT
@pytest.mark.parametrize(("said", "outcome"), ENDS, ids=[said for said, _ in ENDS])
def test_a_program_ends_as_the_guide_says(said: str, outcome: str) -> None:
    host = ExecHost(ExecSpec("mail.unsend", ("/bin/sh", "-c", said), timeout_s=0.3 if "sleep" in said else 20))
    assert undo(host, "m-1").outcome == outcome


@CONTRACT
def test_a_program_is_told_what_the_guide_lists(tmp_path: Path) -> None:
    host = ExecHost(ExecSpec("mail.unsend", ("/bin/sh", "-c", f"cat > {tmp_path}/asked")))
    assert undo(host, "m-1").outcome == "done"
    asked = (tmp_path / "asked").read_text()
    table = GUIDE.split("### The contract of a program")[1].split("| it ends with")[0]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert asked.count("\n") == 1 and set(json.loads(asked)) == listed


def charge_once(home: Path, id: str) -> str:
    """The key under which a saga of that id charged in this home."""
    keys: list[str] = []

    def charge(idempotency_key: str) -> None:
        keys.append(idempotency_key)

    with AgentKit(home=home) as kit, kit.transaction(id) as saga:
        saga.execute("shop.charge", charge, {}, semantics=COMPENSABLE)
    return keys[0] if keys else ""


@pytest.mark.promise("1.10")
def test_after_a_restore_a_finished_id_runs_again_under_the_key_it_had(tmp_path: Path) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    key = charge_once(home, "order-1")
    assert key and charge_once(home, "order-1") == "", "an id runs once"
    shutil.copytree(home, copy)  # the whole folder, while nothing runs
    charge_once(home, "order-2")
    shutil.rmtree(home)
    shutil.copytree(copy, home)
    with pytest.raises(HomeRefused):
        AgentKit(home=home)
    adopt(Home(home), "Ann", "restored from a backup")
    assert charge_once(home, "order-1") == key


def test_a_copy_of_the_database_alone_is_not_written_to(tmp_path: Path) -> None:
    charge_once(tmp_path / "home", "order-1")
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "home" / "amends.db", tmp_path / "alone")
    with pytest.raises(HomeRefused) as refused:
        AgentKit(home=tmp_path / "alone")
    assert refused.value.code == "keys_missing"
