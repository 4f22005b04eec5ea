"""handlers.toml is read strictly: what is wrong is named by file, line and expectation."""

from __future__ import annotations

from pathlib import Path

import pytest

from amends.runtime.handlers_file import BadHandlersFile, load
from amends.runtime.hosts import ExecSpec, Hosts, PythonSpec

pytestmark = pytest.mark.promise("4.4")

GOOD = """\
version = 1

[python.shop]
interpreter = "/usr/bin/python3"
files = ["refunds.py", "/abs/more.py"]
path = ["lib"]
cwd = "work"
env_file = "shop.env"

[python.other]
interpreter = "python3"
modules = ["shop.refunds"]

[exec."mail.unsend"]
command = ["./unsend", "--json", "a b"]
timeout_s = 2.5
idempotent = true
cwd = "/srv"
env = { LANG = "C" }
env_file = "/srv/secret.env"

[exec.plain]
command = ["curl"]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "handlers.toml"
    path.write_text(text)
    return path


def test_every_key_is_read(tmp_path: Path) -> None:
    handlers = load(written(tmp_path, GOOD))
    unsend, plain, shop, other = handlers.specs
    assert shop == PythonSpec(
        "[python.shop]",
        "/usr/bin/python3",
        files=(str(tmp_path / "refunds.py"), "/abs/more.py"),
        path=(str(tmp_path / "lib"),),
        cwd=str(tmp_path / "work"),
        env_file=str(tmp_path / "shop.env"),
    )
    assert other == PythonSpec(
        "[python.other]", "python3", modules=("shop.refunds",), path=(str(tmp_path),), cwd=str(tmp_path)
    )
    assert unsend == ExecSpec(
        "mail.unsend",
        (str(tmp_path / "unsend"), "--json", "a b"),
        timeout_s=2.5,
        idempotent=True,
        cwd="/srv",
        env=(("LANG", "C"),),
        env_file="/srv/secret.env",
    )
    assert plain == ExecSpec("plain", ("curl",), cwd=str(tmp_path))


def test_a_program_comes_before_python_hosts(tmp_path: Path) -> None:
    hosts = Hosts(configured=load(written(tmp_path, GOOD)).specs)
    pythons = ["[python.shop]", "[python.other]"]
    for name, asked in (("mail.unsend", ["[exec.mail.unsend]", *pythons]), ("anything", pythons)):
        assert [host.name.split(" ")[0] for host in hosts._candidates(name, None)] == asked


def test_no_file_declares_nothing(tmp_path: Path) -> None:
    assert load(tmp_path / "handlers.toml").specs == ()


def test_a_tilde_is_the_home_of_whoever_runs_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (spec,) = load(written(tmp_path, 'version = 1\n[exec.x]\ncommand = ["~/bin/x"]\ncwd = "~"\n')).specs
    assert isinstance(spec, ExecSpec) and spec.command == ("/home/me/bin/x",) and spec.cwd == "/home/me"


def edited(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


FAULTS = {
    "no version": (edited("version = 1", ""), 1, "must begin with version = 1"),
    "a newer version": (edited("version = 1", "version = 2"), 1, "version 2, and this amends reads version 1"),
    "a version that is true": (edited("version = 1", "version = true"), 1, "version = 1 is expected"),
    "not toml": (edited("[exec.plain]", "[exec.plain"), 22, "not TOML"),
    "the same key twice": (edited('cwd = "work"', 'path = ["x"]'), 7, "not TOML"),
    "an unknown key at the top": (edited("version = 1", "version = 1\nhandler = 3"), 2, "unknown key handler"),
    "an unknown table": (edited("[exec.plain]", "[mcp.plain]"), 22, "unknown key mcp"),
    "a misspelt key": (edited("timeout_s = 2.5", "timeout = 2.5"), 16, "[exec.mail.unsend] unknown key timeout"),
    "a key of the other family": (edited('cwd = "work"', "idempotent = true"), 7, "[python.shop] unknown key"),
    "a command that is text": (edited('["curl"]', '"curl -X"'), 23, "command is expected to be a list of texts"),
    "an empty command": (edited('["curl"]', "[]"), 23, "command is expected to be a list of texts"),
    "a command of numbers": (edited('["curl"]', "[1]"), 23, "command is expected to be a list of texts"),
    "no command": (edited('command = ["curl"]', "timeout_s = 1"), 22, "command is missing"),
    "no interpreter": (edited('interpreter = "python3"\n', ""), 10, "interpreter is missing"),
    "neither files nor modules": (edited('modules = ["shop.refunds"]', ""), 10, "files or modules is missing"),
    "files that are text": (edited('["refunds.py", "/abs/more.py"]', '"refunds.py"'), 5, "files is expected to be"),
    "a deadline of nothing": (edited("timeout_s = 2.5", "timeout_s = 0"), 16, "timeout_s is expected to be seconds"),
    "a deadline that is no number": (edited("timeout_s = 2.5", "timeout_s = nan"), 16, "timeout_s is expected"),
    "a deadline that is true": (edited("timeout_s = 2.5", "timeout_s = true"), 16, "timeout_s is expected"),
    "idempotent in words": (edited("idempotent = true", 'idempotent = "yes"'), 17, "idempotent is expected to be true"),
    "an environment of numbers": (edited('{ LANG = "C" }', "{ LANG = 1 }"), 19, "env is expected to be a table"),
    "an environment as a table of its own": (GOOD + "[exec.plain.env]\nN = 1\n", 24, "env is expected to be a table"),
    "a family that is no table": ("version = 1\nexec = 3\n", 2, "[exec.NAME] tables are expected"),
    "a host that is no table": ("version = 1\n[exec]\nx = 3\n", 3, "[exec.x] is expected to be a table"),
    "a name outside the grammar": (edited("[exec.plain]", '[exec."\\u00e9"]'), 22, "printable ASCII"),
    "dotted keys": ("version = 1\nexec.x.command = ['a']\nexec.x.tmeout = 3\n", 3, "unknown key tmeout"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_by_line(tmp_path: Path, name: str) -> None:
    text, line, what = FAULTS[name]
    path = written(tmp_path, text)
    with pytest.raises(BadHandlersFile) as refusal:
        load(path)
    assert what in refusal.value.message
    assert refusal.value.facts == {"path": str(path), "line": line}
    assert f"{path}, line {line}:" in refusal.value.message and refusal.value.exit == 2


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "handlers.toml"
    path.write_bytes(b"version = 1\n# caf\xe9\n")
    with pytest.raises(BadHandlersFile, match="line 2: it is not UTF-8"):
        load(path)


def test_a_file_that_cannot_be_read_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "handlers.toml").mkdir()
    with pytest.raises(BadHandlersFile, match="cannot be read"):
        load(tmp_path / "handlers.toml")
