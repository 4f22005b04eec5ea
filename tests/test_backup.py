"""A backup taken while agents run is a whole one, and a home that is made of it asks before it goes on."""

from __future__ import annotations

import contextvars
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from amends import COMPENSABLE, AgentKit, Compensation
from amends.cli.main import main
from amends.store import backup as store_backup
from amends.store.audit import verify
from amends.store.errors import HomeRefused
from amends.store.home import Home
from amends.store.identity import open_log
from amends.store.keys import Identity
from amends.store.sqlite import SqliteLog

MAIN = "from amends.cli.main import main; main()"
WRITER = """
import sys
from amends import COMPENSABLE, AgentKit, Compensation
def charge(amount: int) -> str:
    return "ch"
def refund(amount: int) -> None:
    pass
kit = AgentKit("writer", home=sys.argv[1])
for n in range(100_000):
    with kit.transaction(id=f"{sys.argv[2]}-{n}") as saga:
        saga.execute("pay.charge", charge, {"amount": n}, semantics=COMPENSABLE,
                     undo=Compensation(refund, {"amount": n}))
    print(n, flush=True)
"""


def charge(amount: int, card: str = "") -> str:
    return "ch"


def refund(amount: int) -> None:
    """Give it back."""


def pay(kit: AgentKit, name: str, amount: int = 4200, card: str = "4242-plainly-here") -> None:
    with kit.transaction(id=name) as saga:
        saga.execute(
            "pay.charge", charge, {"amount": amount, "card": card},
            semantics=COMPENSABLE, undo=Compensation(refund, {"amount": amount}),
        )  # fmt: skip


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="amends")


def asked(*words: str | Path, code: int = 0) -> Any:
    said = call(*words, "--json")
    assert said.exit_code == code, said.output
    return json.loads(said.stdout)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with three sagas in it."""
    kit = AgentKit("agent", home=tmp_path / "home")
    for n in range(3):
        pay(kit, f"order-{n}")
    kit.close()
    return tmp_path / "home"


def database(file: Path, into: Path) -> Path:
    with tarfile.open(file) as tar:
        inside: Any = tar.extractfile("amends.db")
        into.write_bytes(inside.read())
    return into


@pytest.mark.promise("14.1")
def test_a_backup_taken_while_agents_write_is_whole_and_holds_all_that_was_acknowledged(
    home: Path, tmp_path: Path
) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, home, name], stdout=subprocess.PIPE, text=True)
        for name in ("a", "b", "c")
    ]
    try:
        acknowledged = []
        for name, writer in zip("abc", writers, strict=True):
            assert writer.stdout is not None
            for _ in range(5):
                acknowledged.append(f"{name}-{writer.stdout.readline().strip()}")
        document = asked("backup", tmp_path / "copy.tar")
        assert all(writer.poll() is None for writer in writers), "they write on"
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert document["verdict"] == "INTACT" and document["size"] > 0
    asked("restore", tmp_path / "copy.tar", "--home", tmp_path / "new", "--by", "Ann", "--reason", "the disk died")
    there = _sagas(tmp_path / "new")
    assert {Identity.load(Home(home)).hide(name) for name in acknowledged} <= there


def _sagas(home: Path) -> set[str]:
    """Header ids of every saga in a home's file, the adopted log's too."""
    script = (
        "import sys, apsw\n"
        "db = apsw.Connection(sys.argv[1], flags=apsw.SQLITE_OPEN_READWRITE)\n"
        "import json\n"
        "lines = [json.loads(l) for (l,) in db.cursor().execute('select line from fentry')]\n"
        "print(json.dumps(sorted({l['saga'] for l in lines if 'saga' in l})))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, home / "amends.db"], capture_output=True, text=True)
    found: set[str] = set(json.loads(done.stdout))
    return found


@pytest.mark.promise("14.1")
def test_keys_are_in_a_backup_only_where_they_were_asked_for(home: Path, tmp_path: Path) -> None:
    seed = (home / "device" / "seed").read_bytes()
    asked("backup", tmp_path / "bare.tar")
    asked("backup", tmp_path / "keyed.tar", "--with-keys")
    assert seed not in (tmp_path / "bare.tar").read_bytes()
    assert seed in (tmp_path / "keyed.tar").read_bytes()
    assert {os.stat(tmp_path / name).st_mode & 0o777 for name in ("bare.tar", "keyed.tar")} == {0o600}


@pytest.mark.promise("14.1")
@pytest.mark.parametrize("keys", [(), ("--with-keys",)])
def test_a_backup_of_a_sealed_log_is_a_sound_one_also_without_keys(
    home: Path, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    key = tmp_path / "owner.key"
    asked("--home", home, "seal", "--new-key", key, "--by", "ann")
    told = asked("--home", home, "backup", tmp_path / "copy.tar", "--key", f"file:{key}", *keys)
    assert (told["verdict"], told["keys"]) == ("INTACT", bool(keys))


@pytest.mark.promise("14.1")
def test_who_verifies_a_backup_as_it_is_hears_what_can_be_verified(home: Path, tmp_path: Path) -> None:
    asked("--home", home, "backup", tmp_path / "copy.tar")
    asked("--home", tmp_path / "copy.tar", "verify", code=2)
    over = asked("--home", tmp_path / "copy.tar", "restore", tmp_path / "copy.tar", code=2)
    assert over["error"]["code"] == "exists"
    said = call("verify", tmp_path / "copy.tar")
    assert said.exit_code == 7 and "amends restore" in said.output


@pytest.mark.promise("14.1")
def test_a_backup_is_recorded_by_what_names_it(home: Path, tmp_path: Path) -> None:
    document = asked("backup", tmp_path / "copy.tar", "--by", "Ann")
    log = open_log(home, _view(), write=False)
    (copy,) = log.keeping.copies
    assert (copy.out, copy.id, copy.size, copy.payload) == ("backup", document["id"], document["size"], "plain")
    assert b'"by":"Ann"' in (log.record(copy.seq).blob or b"")
    log.close()


def _view() -> Any:
    from amends.runtime.state import State

    return State()


@pytest.mark.promise("14.1")
@pytest.mark.parametrize("keys", [False, True])
def test_a_restored_home_is_read_at_once_and_written_only_as_a_new_incarnation(
    home: Path, tmp_path: Path, keys: bool
) -> None:
    asked("backup", tmp_path / "copy.tar", *(["--with-keys"] if keys else []))
    document = asked("restore", tmp_path / "copy.tar", "--home", tmp_path / "new")
    assert not document["adopted"] and bool(document["missing"]) is not keys
    assert len(asked("ps", "--all", "--home", tmp_path / "new")) == 3
    with pytest.raises(HomeRefused) as refused:
        AgentKit("agent", home=tmp_path / "new")
    assert refused.value.code == ("restored" if keys else "keys_missing") and "--adopt" in refused.value.next
    asked("init", "--adopt", "--by", "Ann", "--reason", "the disk died", "--home", tmp_path / "new")
    kit = AgentKit("agent", home=tmp_path / "new")
    pay(kit, "order-9")
    assert kit.log.record(0).entry.follows == document["origin"]
    kit.close()
    found = verify(tmp_path / "new", view_factory=_view)
    assert found.verdict == "INTACT", found.findings
    assert verify(home, view_factory=_view).verdict == "INTACT", "the one it was copied from is as it was"


@pytest.mark.promise("14.1")
def test_what_was_open_when_it_was_copied_is_for_a_person_to_decide(tmp_path: Path) -> None:
    kit = AgentKit("agent", home=tmp_path / "home")
    saga = contextvars.Context().run(kit.transaction(id="half").__enter__)
    saga.execute("pay.charge", charge, {"amount": 1}, semantics=COMPENSABLE, undo=Compensation(refund, {"amount": 1}))
    log = kit.log
    assert isinstance(log, SqliteLog)
    asked("backup", tmp_path / "copy.tar", "--with-keys")
    document = asked(
        "restore", tmp_path / "copy.tar", "--home", tmp_path / "new", "--by", "Ann", "--reason", "the disk died"
    )
    assert len(document["left"]) == 1
    assert [item["kind"] for item in asked("inbox", "--home", tmp_path / "new", code=1)]
    kit.close()


@pytest.mark.promise("14.1")
def test_what_the_files_of_a_home_point_to_and_is_not_there_is_named(home: Path, tmp_path: Path) -> None:
    (home / "handlers.toml").write_text(
        'version = 1\n[exec."mail.unsend"]\ncommand = ["/nowhere/unsend"]\nenv_file = "secrets.env"\n'
    )
    (home / "config.toml").write_text('[[notify]]\nname = "p"\nkind = "command"\ncommand = ["/nowhere/page"]\n')
    asked("backup", tmp_path / "copy.tar", "--with-keys")
    lacks = asked("restore", tmp_path / "copy.tar", "--home", tmp_path / "new")["missing"]
    assert [what.partition(",")[0] for what in lacks] == [
        str(tmp_path / "new" / "secrets.env"), "/nowhere/unsend", "/nowhere/page",
    ]  # fmt: skip


@pytest.mark.promise("14.1")
@pytest.mark.parametrize(
    "where, code", [("there.tar", "exists"), ("home/copy.tar", "inside_home"), ("no/x", "no_folder")]
)
def test_a_backup_goes_over_nothing_and_into_no_home(home: Path, tmp_path: Path, where: str, code: str) -> None:
    (tmp_path / "there.tar").write_bytes(b"mine")
    said = call("backup", tmp_path / where, "--json")
    assert (said.exit_code, json.loads(said.stdout)["error"]["code"]) == (2, code)
    assert (tmp_path / "there.tar").read_bytes() == b"mine"


@pytest.mark.promise("14.1")
def test_a_restore_goes_over_nothing(home: Path, tmp_path: Path) -> None:
    asked("backup", tmp_path / "copy.tar")
    said = call("restore", tmp_path / "copy.tar", "--home", home, "--json")
    assert (said.exit_code, json.loads(said.stdout)["error"]["code"]) == (2, "exists")


@pytest.mark.promise("14.1")
def test_a_backup_that_was_altered_restores_nothing_or_all_of_it(home: Path, tmp_path: Path) -> None:
    """Flipped bytes anywhere, a cut, and another file in its place."""
    asked("backup", tmp_path / "copy.tar")
    whole = (tmp_path / "copy.tar").read_bytes()
    seed = random.randrange(1 << 32)
    print("seed", seed)
    r = random.Random(seed)
    refused = 0
    places = [r.randrange(len(whole)) for _ in range(60)] + [r.randrange(2048) for _ in range(40)]
    for n, place in enumerate(places):
        broken = bytearray(whole)
        broken[place] ^= 1 << r.randrange(8)
        (tmp_path / "bad.tar").write_bytes(broken)
        refused += _restores_or_not(tmp_path / "bad.tar", tmp_path / f"new-{n}")
    assert refused >= 40, refused
    for n, cut in enumerate((b"", whole[:100], whole[: len(whole) // 2], b"not a tar at all" * 100)):
        (tmp_path / "bad.tar").write_bytes(cut)
        assert _restores_or_not(tmp_path / "bad.tar", tmp_path / f"cut-{n}")


def _restores_or_not(file: Path, home: Path) -> bool:
    """Whether it was refused, with nothing left; else what came of it is what was backed up."""
    said = call("restore", file, "--home", home, "--json")
    if said.exit_code:
        assert said.exit_code == 7, said.output
        assert json.loads(said.stdout)["error"]["message"]
        assert not home.exists()
        return True
    assert verify(home / "amends.db").verdict == "INTACT"
    shutil.rmtree(home)
    return False


@pytest.mark.promise("14.1")
def test_a_member_that_is_a_link_or_points_elsewhere_is_refused(home: Path, tmp_path: Path) -> None:
    asked("backup", tmp_path / "copy.tar")
    with tarfile.open(tmp_path / "copy.tar") as tar:
        inside: Any = tar.extractfile("manifest.json")
        manifest = inside.read()
    for name, kind in (("../evil", tarfile.REGTYPE), ("amends.db", tarfile.SYMTYPE), ("/etc/evil", tarfile.REGTYPE)):
        with tarfile.open(tmp_path / "evil.tar", "w") as tar:
            first = tarfile.TarInfo("manifest.json")
            first.size = len(manifest)
            import io

            tar.addfile(first, io.BytesIO(manifest))
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        assert _restores_or_not(tmp_path / "evil.tar", tmp_path / "new")
        assert not (tmp_path / "evil").exists()


@pytest.mark.promise("14.1")
def test_a_backup_that_is_killed_leaves_nothing_under_its_name(home: Path, tmp_path: Path) -> None:
    """Killed at a moment of its work that is seen to have come: its own part file was there."""
    kit = AgentKit("agent", home=home)
    for n in range(200):
        pay(kit, f"more-{n}", card="x" * 2000 + str(random.random()))
    kit.close()
    fired = 0
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", MAIN, "backup", str(tmp_path / "copy.tar")], stdout=subprocess.DEVNULL
        )
        end = time.monotonic() + 30
        while child.poll() is None and not list(tmp_path.glob(".copy.tar.*")) and time.monotonic() < end:
            pass
        child.send_signal(signal.SIGKILL)
        if child.wait() == -signal.SIGKILL and not (tmp_path / "copy.tar").exists():
            fired += 1
        (tmp_path / "copy.tar").unlink(missing_ok=True)
    assert fired >= 3
    assert asked("backup", tmp_path / "copy.tar")["verdict"] == "INTACT"
    found = verify(home, view_factory=_view)
    assert found.verdict == "INTACT", found.findings


@pytest.mark.promise("14.1")
def test_a_home_in_a_synced_folder_is_not_restored_into_unless_somebody_knows(home: Path, tmp_path: Path) -> None:
    asked("backup", tmp_path / "copy.tar")
    said = call("restore", tmp_path / "copy.tar", "--home", tmp_path / "Dropbox" / "amends", "--json")
    assert json.loads(said.stdout)["error"]["code"] == "synced_folder"
    asked("restore", tmp_path / "copy.tar", "--home", tmp_path / "Dropbox" / "amends", "--i-know")


def test_who_and_why_belong_together(home: Path, tmp_path: Path) -> None:
    asked("backup", tmp_path / "copy.tar")
    assert call("restore", tmp_path / "copy.tar", "--by", "Ann", "--home", tmp_path / "new").exit_code == 2
    assert not Home(tmp_path / "new").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from amends.store import backup
from amends.store.home import Home
left, copy = int(sys.argv[1]), backup._copy
def killed(*args):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return copy(*args)
backup._copy = killed
backup.restore(Path(sys.argv[2]), Home(Path(sys.argv[3])))
"""


@pytest.mark.promise("14.1")
@pytest.mark.parametrize("whole", range(5))
def test_a_restore_that_is_killed_leaves_no_home_that_anybody_goes_on_with(
    whole: int, home: Path, tmp_path: Path
) -> None:
    """It could be adopted, without the policy that came last, and its agents ran without their limits."""
    for name in ("config.toml", "policy.toml"):
        (home / name).write_text("version = 1\n" if name == "policy.toml" else "")
    asked("--home", home, "backup", tmp_path / "b.tar", "--with-keys")
    half = tmp_path / "half"
    done = subprocess.run([sys.executable, "-c", KILLED, str(whole), str(tmp_path / "b.tar"), str(half)])
    assert done.returncode == -signal.SIGKILL and not (half / "policy.toml").exists()
    os.environ["AMENDS_ANCHORS"] = str(tmp_path / "elsewhere")
    for words in (["init"], ["init", "--adopt", "--by", "Ann", "--reason", "it was lost"]):
        error = asked("--home", half, *words, code=4)["error"]
        assert error["code"] == "half_restored" and "again" in error["next"], error
    with pytest.raises(HomeRefused):
        AgentKit("agent", home=half)
    assert asked("--home", half, "restore", tmp_path / "b.tar", code=4)["error"]["code"] == "half_restored"
    shutil.rmtree(half)
    asked("--home", half, "restore", tmp_path / "b.tar", "--by", "Ann", "--reason", "it was lost")
    assert (half / "policy.toml").exists() and verify(half).verdict == "INTACT"


@pytest.mark.promise("14.1")
def test_settings_that_change_while_a_backup_is_made_do_not_spoil_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "config.toml").write_text("# as it was\n")
    write = store_backup._write

    def changed(*args: Any) -> None:
        (home / "config.toml").write_text("# somebody has just changed it, and it is longer\n")
        write(*args)

    monkeypatch.setattr(store_backup, "_write", changed)
    asked("--home", home, "backup", tmp_path / "b.tar")
    asked("--home", tmp_path / "other", "restore", tmp_path / "b.tar")
    assert (tmp_path / "other" / "config.toml").read_text() == "# as it was\n"


@pytest.mark.promise("14.1")
def test_certificates_that_removed_records_count_by_go_along(home: Path, tmp_path: Path) -> None:
    (home / "certificates").mkdir()
    name = "certificates/" + "ab" * 32 + ".json"
    (home / name).write_text("{}")
    (home / "certificates" / "notes.txt").write_text("mine")
    asked("backup", tmp_path / "copy.tar")
    asked("restore", tmp_path / "copy.tar", "--home", tmp_path / "new")
    assert [path.name for path in (tmp_path / "new" / "certificates").iterdir()] == [name.partition("/")[2]]


def test_what_is_no_file_is_no_backup(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("pipe", "nothing", "."):
        assert asked("restore", tmp_path / path, "--home", tmp_path / "new", code=2)["error"]["code"] == "no_file"
