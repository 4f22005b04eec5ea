"""What somebody hands over to be checked is read as what it is: it ends, it fits into memory, and it draws nothing."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from handing import home_of_work

PROGRAM = [sys.executable, "-m", "amends.cli"]
SCRIPT = [sys.executable, "-W", "error", str(Path(__file__).resolve().parents[1] / "store" / "check_amends.py")]
MEMORY = 900 << 20
WAITED_S = 60

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pipes, links and limits of memory are those of POSIX")


@pytest.fixture(scope="module")
def handed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a home, a bundle of it, and a disclosure."""
    folder = tmp_path_factory.mktemp("handed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMENDS_HOME", str(folder / "home"))
        patch.setenv("AMENDS_ANCHORS", str(folder / "anchors"))
        home_of_work(folder / "home", 40)
        return _handed_out(folder)


def _handed_out(folder: Path) -> Path:
    for command in (["export", "--out", "bundle", "--payload", "plain"], ["prove", "order-0", "--out", "proof.json"]):
        done = subprocess.run([*PROGRAM, "--home", "home", *command], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder


def asked(command: list[str], cwd: Path) -> str:
    """What it says of something hostile: no crash, no wait, within its memory, and nothing that a terminal obeys."""

    def narrow() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    done = subprocess.run(command, cwd=cwd, capture_output=True, preexec_fn=narrow, timeout=WAITED_S,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    said = (done.stdout + done.stderr).decode()
    assert done.returncode in (1, 2, 7), (done.returncode, said[-2000:])
    assert "Traceback" not in said and "bug of amends" not in said, said[-2000:]
    assert "\x1b" not in said and "\u202e" not in said
    return said


def flood(path: Path, chunk: bytes, times: int) -> None:
    with path.open("ab") as file:
        for _ in range(times):
            file.write(chunk)


def instead(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


FRONT = b'{"format":"amends/bundle/1","x":'
FILES = ["manifest.json", "SHA256SUMS", "stubs.tsv", "checkpoint", "entries/000000.ndjson", "openings/000000.ndjson"]
BUNDLES: dict[str, Callable[[Path], Any]] = {
    "a deep manifest": lambda at: (at / "manifest.json").write_bytes(FRONT + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "a manifest of lists": lambda at: (at / "manifest.json").write_bytes(FRONT + b"[" + b"[]," * 9_000_000 + b"0]}"),
    "a list of nothing": lambda at: flood(at / "SHA256SUMS", b"\n" * 1_000_000, 80),
    "stubs of nothing": lambda at: flood(at / "stubs.tsv", b"\n" * 1_000_000, 80),
    "a line without an end": lambda at: flood(at / "entries/000000.ndjson", b"a" * 1_000_000, 500),
    "a name to draw with": lambda at: (at / "entries" / "\x1b[31m\n\u202e").write_bytes(b""),
    **{f"a pipe for {name}": lambda at, name=name: instead(at / name, os.mkfifo) for name in FILES},
    **{f"/dev/zero for {name}": lambda at, name=name: instead(at / name, to_zero) for name in FILES},
}


@pytest.mark.promise("6.1")
@pytest.mark.parametrize("hostile", BUNDLES.values(), ids=BUNDLES)
def test_no_bundle_hangs_a_check_or_eats_the_memory(
    handed: Path, tmp_path: Path, hostile: Callable[[Path], Any]
) -> None:
    shutil.copytree(handed / "bundle", tmp_path / "bundle")
    hostile(tmp_path / "bundle")
    asked([*PROGRAM, "verify", "bundle"], tmp_path)
    asked([*SCRIPT, "bundle"], tmp_path)
    shutil.rmtree(tmp_path / "bundle")


def _longer(text: str, path: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, 4 << 30)


PROOFS: dict[str, Callable[[str, Path], Any]] = {
    "of lists": lambda text, at: at.write_bytes(
        b'{"format":"amends/disclosure/1","x":[' + b"[]," * 20_000_000 + b"0]}"
    ),
    "of quotes without an end": lambda text, at: at.write_bytes(b'{"' + b'\\"' * 5_000_000),
    "deep": lambda text, at: at.write_bytes(b'{"format":' + b"[" * 300_000),
    "without an end": _longer,
    "to draw with": lambda text, at: at.write_text(text.replace(json.loads(text)["saga"], "\\u001b[31m\\n\\u202e", 1)),
    "with half a character": lambda text, at: at.write_text(text.replace(json.loads(text)["saga"], "\\ud800", 1)),
}


@pytest.mark.promise("6.8")
@pytest.mark.parametrize("hostile", PROOFS.values(), ids=PROOFS)
def test_no_disclosure_hangs_a_check_or_eats_the_memory(
    handed: Path, tmp_path: Path, hostile: Callable[[str, Path], Any]
) -> None:
    hostile((handed / "proof.json").read_text(), tmp_path / "p.json")
    for command in ([*PROGRAM, "check-proof"], [*PROGRAM, "verify"], SCRIPT):
        asked([*command, "p.json"], tmp_path)
    (tmp_path / "p.json").unlink()


# ---- databases ------------------------------------------------------------------------------------------------------


def loose(table: str, columns: str, *then: str) -> list[str]:
    """Statements that make a table of the same name anew, which takes values of any type."""
    return [f"create table loose({columns})", f"insert into loose select * from {table}", f"drop table {table}",
            f"alter table loose rename to {table}", *then]  # fmt: skip


ENTRY = "seq integer primary key, line, back, open, sig"
ENDLESS = (
    "create view entry as with recursive c(x) as (select 0 union all select x + 1 from c) "
    "select x as seq, x'00' as line, -1 as back, null as open, null as sig from c"
)
DATABASES: dict[str, list[str]] = {
    "a view without an end": ["alter table entry rename to other", ENDLESS],
    "a line that is text": loose("entry", ENTRY, "update entry set line = 'a' where seq = 5"),
    "an opening that is a number": loose("entry", ENTRY, "update entry set open = 7 where seq = 5"),
    "a memo of numbers": loose("memo", "view, version, seq, h, blob", "update memo set seq = 'x', view = 1"),
    "a stub of words": ["create table stub(start, level, hash)", "insert into stub values('a', 'b', 3)"],
    "a key of numbers": ["create table datakey(saga, seal, wrapped)", "insert into datakey values(1, 2, 3)"],
    "a line of a gigabyte": ["update entry set line = zeroblob(900000000) where seq = 5"],
    "a deep memo": [f"update memo set blob = x'92c40291{'91'}c6000186a0{'91' * 100_000}'"],
}


@pytest.mark.promise("6.2")
@pytest.mark.parametrize("statements", DATABASES.values(), ids=DATABASES)
def test_no_database_hangs_a_check_or_eats_the_memory(handed: Path, tmp_path: Path, statements: list[str]) -> None:
    shutil.copytree(handed / "home", tmp_path / "home")
    db = sqlite3.connect(tmp_path / "home" / "amends.db", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()
    asked([*PROGRAM, "verify", "home"], tmp_path)


@pytest.mark.promise("6.2")
def test_values_of_another_type_under_a_table_of_the_right_shape_are_found(handed: Path, tmp_path: Path) -> None:
    shutil.copytree(handed / "home", tmp_path / "home")
    db = sqlite3.connect(tmp_path / "home" / "amends.db", isolation_level=None)
    [(ours,)] = db.execute("select sql from sqlite_schema where name = 'entry'").fetchall()
    for statement in loose("entry", ENTRY, "update entry set line = 'a' where seq = 5", "pragma writable_schema = 1"):
        db.execute(statement)
    db.execute("update sqlite_schema set sql = ? where name = 'entry'", (ours,))
    db.close()
    said = asked([*PROGRAM, "verify", "home"], tmp_path)
    assert "E_TABLE" in said or "E_FILE" in said


@pytest.mark.promise("6.1")
def test_a_pipe_in_the_place_of_a_file_is_no_file(handed: Path, tmp_path: Path) -> None:
    shutil.copytree(handed / "home", tmp_path / "home")
    instead(tmp_path / "home" / "device" / "anchor", os.mkfifo)
    done = subprocess.run([*PROGRAM, "--home", "home", "verify"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=WAITED_S)  # fmt: skip
    assert done.returncode == 0 and "device/anchor cannot be read (it is no file)" in done.stdout, done
    instead(tmp_path / "home" / "amends.db", os.mkfifo)
    assert "E_FILE" in asked([*PROGRAM, "verify", "home"], tmp_path)
    assert "E_FILE" in asked([*PROGRAM, "verify", "home/amends.db"], tmp_path)
    assert "larger than" in asked([*PROGRAM, "verify", "bundle", "--policy", "/dev/zero"], handed)
