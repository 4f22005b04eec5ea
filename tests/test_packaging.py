"""What is shipped: the wheel, the frozen entry, the unpacked form, the service units, and the door for developers."""

from __future__ import annotations

import importlib.util
import os
import plistlib
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from amends.cli import notify, unpacked
from amends.cli.service_units import UNITS, Daemon, unit
from amends.cli.version import VERSION, described
from amends.store.errors import YouErred

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("runtime", "mesh", "store", "cli")


def python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, cwd="/", timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- the wheel -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built in a copy so that the tree itself stays as it is."""
    pytest.importorskip("setuptools", "77", reason="building a wheel needs setuptools 77")
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "__init__.py", *ROOMS):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(folder)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [made] = folder.glob("*.whl")
    return made


@pytest.mark.promise("13")
def test_the_wheel_holds_every_file_of_the_rooms_and_nothing_else(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {"amends/__init__.py"}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            if path.suffix in {".py", ".sql"} or path.name == "py.typed" or path.parent.name == "static":
                wanted.add(f"amends/{path.relative_to(ROOT).as_posix()}")
    assert held == wanted


@pytest.mark.promise("13")
def test_the_wheel_imports_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    said = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import amends.cli.main as m; print(m.__file__)")
    assert said.startswith(str(tmp_path))


def test_the_rooms_are_importable_only_under_the_package(tmp_path: Path) -> None:
    said = python(
        "import importlib.util as u; print([n for n in ('store', 'cli', 'mesh', 'runtime') if u.find_spec(n)])"
    )
    assert said.strip() == "[]"


def test_importing_amends_stays_light() -> None:
    heavy = ("apsw", "nacl", "zstandard", "click", "asyncio", "ssl")
    said = python(f"import amends, sys; print([n for n in {heavy} if n in sys.modules])")
    assert said.strip() == "[]"


# -- the frozen entry ----------------------------------------------------------------------------------------


def enter(*args: str, code: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run packaging/entry.py as the frozen loader would."""
    command = [str(ROOT / "packaging/entry.py"), *args]
    if code:  # the same lines with another main, to look at what a command would see
        command = ["-c", f"import sys; sys.argv = ['amends']\n{entry_until_main()}\n{code}"]
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, cwd="/", timeout=60)


def entry_until_main() -> str:
    return (ROOT / "packaging/entry.py").read_text().split("if sys.argv")[0]


@pytest.mark.promise("13")
def test_children_of_the_frozen_file_do_not_inherit_its_loader() -> None:
    loader = {
        "LD_LIBRARY_PATH": "/tmp/_MEIx",
        "_PYI_ARCHIVE_FILE": "/x/amends",
        "_PYI_APPLICATION_HOME_DIR": "/tmp/_MEIx",
    }
    show = "print({n: v for n, v in os.environ.items() if n == 'LD_LIBRARY_PATH' or n.startswith('_PYI')})"
    assert enter(code=show, **loader).stdout.strip() == "{}"
    theirs = enter(code=show, **loader, LD_LIBRARY_PATH_ORIG="/usr/lib/theirs")
    assert theirs.stdout.strip() == "{'LD_LIBRARY_PATH': '/usr/lib/theirs'}"


@pytest.mark.promise("13")
def test_the_version_is_answered_before_anything_heavy_is_imported() -> None:
    done = enter("--version")
    assert done.stdout == f"amends {described()}\n"
    traced = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "packaging/entry.py"), "--version"],
        capture_output=True,
        text=True,
    )
    loaded = {line.split("|")[-1].strip() for line in traced.stderr.splitlines()}
    assert "amends.cli.version" in loaded and not loaded & {"click", "apsw", "msgspec", "nacl", "platformdirs"}


def test_a_build_note_beside_the_version_is_part_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import amends.cli.version as version

    assert version.described() == VERSION
    (tmp_path / "build.txt").write_text("b84ce6ecd5ea\n")
    monkeypatch.setattr(version, "__file__", str(tmp_path / "version.py"))
    assert version.described() == f"{VERSION} (b84ce6ecd5ea)"


# -- the unpacked form ---------------------------------------------------------------------------------------


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the loader leaves it, with a launcher that names itself."""
    folder = tmp_path / "_MEI"
    (folder / "lib").mkdir(parents=True)
    (folder / unpacked.LAUNCHER).write_text("#!/bin/sh\necho one\n")
    (folder / "lib/x.so").write_text("x")
    (folder / "link.so").symlink_to("lib/x.so")
    monkeypatch.setattr(sys, "_MEIPASS", str(folder), raising=False)
    return folder


@pytest.mark.promise("13")
def test_the_unpacked_form_outlives_the_folder_it_came_from(release: Path, tmp_path: Path) -> None:
    executable = unpacked.lay_out(tmp_path / "app")
    shutil.rmtree(release)
    assert subprocess.run([executable], capture_output=True, text=True).stdout == "one\n"
    assert executable == tmp_path / "app/current/amends"
    inner = executable.resolve().parent / "_internal"
    assert (inner / "link.so").is_symlink() and (inner / "link.so").read_text() == "x"
    assert not (inner / unpacked.LAUNCHER).exists()


@pytest.mark.promise("13")
def test_an_upgrade_lies_beside_the_old_one_and_current_moves(release: Path, tmp_path: Path) -> None:
    old = unpacked.lay_out(tmp_path / "app").resolve()
    assert unpacked.lay_out(tmp_path / "app").resolve() == old, "the same release is laid out once"
    (release / unpacked.LAUNCHER).write_text("#!/bin/sh\necho two\n")
    new = unpacked.lay_out(tmp_path / "app")
    assert new.resolve() != old and old.exists()
    assert subprocess.run([new], capture_output=True, text=True).stdout == "two\n"
    assert {path.name[0] for path in (tmp_path / "app").iterdir()} == {"0", "c"}, "no drafts are left"


def test_a_copy_that_breaks_off_leaves_no_release_behind(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            unpacked.lay_out(tmp_path / "app")
    assert not list((tmp_path / "app").iterdir())
    assert unpacked.lay_out(tmp_path / "app").exists()


def test_many_installers_at_once_agree(release: Path, tmp_path: Path) -> None:
    code = f"import sys; sys._MEIPASS = {str(release)!r}; from amends.cli.unpacked import lay_out"
    code += f"; print(lay_out({str(tmp_path / 'app')!r}))"
    racers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    said = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    assert said == {str(tmp_path / "app/current/amends")} and all(racer.returncode == 0 for racer in racers)


def test_outside_the_single_file_there_is_nothing_to_unpack(tmp_path: Path) -> None:
    with pytest.raises(YouErred, match="single-file") as refused:
        unpacked.lay_out(tmp_path)
    assert refused.value.code == "not_frozen" and refused.value.next
    assert not unpacked.is_single_file()


# -- service units -------------------------------------------------------------------------------------------

ODD = "odd dir 100% $HOME & <co> ü"


def odd_daemon(tmp_path: Path) -> Daemon:
    folder = tmp_path / ODD
    folder.mkdir()
    executable = folder / "amends"
    executable.write_text("#!/bin/sh\nexit 0\n")
    executable.chmod(0o755)
    env_file = folder / "handlers.env"
    env_file.write_text("TOKEN=x\n")
    return Daemon(executable, folder / "home", env_file, "PC\\a&b")


@pytest.mark.promise("13")
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_accepts_the_unit_whatever_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # systemd-analyze wants one, whatever is in it
    made = unit(odd_daemon(tmp_path), platform="linux")
    made.path.parent.mkdir(parents=True)
    made.path.write_bytes(made.content)
    done = subprocess.run(["systemd-analyze", "--user", "verify", str(made.path)], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "amends" in line]
    assert (done.returncode, ours) == (0, [])
    broken = made.content.replace(b'ExecStart="', b'ExecStart="/nowhere')
    made.path.write_bytes(broken)
    assert subprocess.run(["systemd-analyze", "--user", "verify", str(made.path)], capture_output=True).returncode != 0


@pytest.mark.promise("13")
def test_launchd_reads_back_what_was_meant(tmp_path: Path) -> None:
    daemon = odd_daemon(tmp_path)
    made = unit(daemon, platform="darwin", home=tmp_path)
    said = plistlib.loads(made.content)
    assert said["ProgramArguments"] == [str(daemon.executable), "recoverd"]
    assert said["EnvironmentVariables"] == {"AMENDS_HOME": str(daemon.home)}
    assert made.path == tmp_path / "Library/LaunchAgents/dev.amends.recovery.plist"


@pytest.mark.promise("13")
def test_the_windows_task_is_well_formed_and_names_the_executable(tmp_path: Path) -> None:
    daemon = odd_daemon(tmp_path)
    made = unit(daemon, platform="win32", home=tmp_path)
    task = ElementTree.fromstring(made.content)
    space = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    assert task.findtext(".//t:Command", namespaces=space) == str(daemon.executable)
    assert task.findtext(".//t:Arguments", namespaces=space) == f'--home "{daemon.home}" recoverd'
    assert task.findtext(".//t:LogonTrigger/t:UserId", namespaces=space) == "PC\\a&b"


@pytest.mark.parametrize("platform", sorted(UNITS))
def test_every_unit_can_be_installed_removed_and_looked_at(platform: str, tmp_path: Path) -> None:
    made = unit(odd_daemon(tmp_path), platform=platform, home=tmp_path)
    assert made.install and made.remove and made.status
    assert made.path.is_absolute() and made.content


def test_no_unit_is_written_that_its_supervisor_would_misread(tmp_path: Path) -> None:
    with pytest.raises(YouErred, match="no service unit for plan9"):
        unit(Daemon(tmp_path, tmp_path), platform="plan9")
    with pytest.raises(YouErred, match="control character"):
        unit(Daemon(tmp_path / "a\nExecStartPre=/bin/true", tmp_path), platform="linux")
    with pytest.raises(YouErred, match="a quote or a backslash"):
        unit(Daemon(tmp_path / 'a"b', tmp_path), platform="linux")


# -- the supervisor's ear ------------------------------------------------------------------------------------


@pytest.mark.promise("13")
@pytest.mark.parametrize(
    "abstract", [False, pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux"))]
)
def test_a_supervisor_hears_that_the_daemon_is_ready(
    abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"@amends-{os.getpid()}" if abstract else str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind("\0" + name[1:] if abstract else name)
        ear.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        sender = threading.Thread(target=notify.notify, args=(notify.READY, "STATUS=two sagas"))
        sender.start()
        assert ear.recv(100) == b"READY=1\nSTATUS=two sagas"
        sender.join()


def test_without_a_supervisor_nobody_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert notify.notify(notify.READY) is False
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert notify.notify(notify.STOPPING) is False, "a supervisor that is gone is no reason to stop"


@pytest.mark.parametrize(
    ("allowed", "watched", "period"),
    [("30000000", "self", 15.0), ("30000000", "", 15.0), ("30000000", "1", None), ("", "self", None), ("0", "", None)],
)
def test_pings_come_twice_as_often_as_asked_and_only_from_the_watched_process(
    allowed: str, watched: str, period: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", allowed)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if watched == "self" else watched)
    assert notify.watchdog_period() == period


# -- the door for developers ---------------------------------------------------------------------------------


@pytest.fixture
def door() -> ModuleType:
    spec = importlib.util.spec_from_file_location("do", ROOT / "packaging/do.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_door_says_what_it_can_do_to_whoever_asks_for_something_else() -> None:
    for word in ("", "install", "__init__"):
        done = subprocess.run([sys.executable, ROOT / "packaging/do.py", word], capture_output=True, text=True)
        assert done.returncode == 1 and "do.py demo" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run([sys.executable, ROOT / "packaging/do.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "do.py freeze" in done.stdout


def test_a_check_runs_every_step_and_names_the_failed_ones(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def run(*command: object, **more: str) -> int:
        asked.append(" ".join(map(str, command[1:])))
        return int("mypy" in asked[-1])

    monkeypatch.setattr(door, "run", run)
    assert door.check() == 1
    assert "failed: types" in capfd.readouterr().out
    assert len(asked) == 5 and not any("faults" in line for line in asked)
    assert door.check("--long") == 1
    assert any("--long" in line for line in asked) and any("promises.py faults" in line for line in asked)


def test_a_host_without_a_pip_that_can_fill_another_environment_is_told(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(door, "ENV", tmp_path / "env")
    for said, expected in (("print('pip 21.2 from x')", "has pip 21.2"), ("raise SystemExit(1)", "has no pip")):
        monkeypatch.setattr(door, "PIP", [sys.executable, "-c", said])
        with pytest.raises(SystemExit, match=expected):
            door.set_up()
    assert not (tmp_path / "env").exists()


def test_the_sources_digest_sees_an_edit_a_name_and_a_file(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (
        "__init__.py",
        "pyproject.toml",
        "packaging/entry.py",
        "packaging/amends.spec",
        "packaging/pins.txt",
        "store/a.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(door, "ROOT", tmp_path)
    monkeypatch.setattr(door, "PINS", tmp_path / "packaging/pins.txt")
    seen = {door.tree_digest()}
    (tmp_path / "store/a.py").write_text("y")
    seen.add(door.tree_digest())
    (tmp_path / "store/a.py").rename(tmp_path / "store/b.py")
    seen.add(door.tree_digest())
    (tmp_path / "store/c.py").write_text("")
    seen.add(door.tree_digest())
    assert len(seen) == 4


def test_the_build_script_asks_for_what_the_readme_says() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert "python3 packaging/do.py test" in script and "python3 packaging/do.py freeze" in script
    assert subprocess.run(["bash", "-n", ROOT / ".ci/run"]).returncode == 0
