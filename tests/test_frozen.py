"""The one-file executable alone: no checkout, no packages, nothing on PATH.

It is found at AMENDS_FROZEN or dist/amends, and refused when it was frozen from other sources than these. Without one
these tests are skipped by name; with AMENDS_FROZEN set that is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def sources_now() -> str:
    spec = importlib.util.spec_from_file_location("do", ROOT / "packaging/do.py")
    assert spec and spec.loader
    door = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(door)
    return str(door.tree_digest())


@pytest.fixture(scope="session")
def frozen() -> Path:
    """The executable, frozen from these sources."""
    asked = os.environ.get("AMENDS_FROZEN")
    path = (ROOT / (asked or "dist/amends")).resolve()
    no = pytest.fail if asked else pytest.skip
    if not path.is_file():
        no(f"there is no executable at {path}: run python3 packaging/do.py freeze")
    stamp = path.with_name("amends.tree")
    if not stamp.exists() or stamp.read_text() != sources_now():
        no(f"{path} was frozen from other sources: run python3 packaging/do.py freeze")
    return path


class Bare:
    """A machine that has the executable and nothing else: an empty PATH, a home of its own, no Python variables."""

    def __init__(self, executable: Path, folder: Path) -> None:
        self.executable, self.folder = executable, folder
        (folder / "bin").mkdir()
        (folder / "tmp").mkdir()
        self.env = {
            "PATH": str(folder / "bin"),
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "AMENDS_HOME": str(folder / "home"),
            "AMENDS_ANCHORS": str(folder / "anchors"),
        }

    def run(self, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.executable, *args], env=self.env | more, cwd=self.folder, capture_output=True, text=True, timeout=60
        )


@pytest.fixture
def bare(frozen: Path, tmp_path: Path) -> Bare:
    return Bare(frozen, tmp_path)


@pytest.mark.promise("13")
def test_the_version_names_the_commit_it_was_frozen_from(bare: Bare) -> None:
    from amends.cli.version import VERSION

    done = bare.run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"amends {VERSION} (") and done.stdout.endswith(")\n")


@pytest.mark.promise("13")
def test_help_is_there_and_nothing_is_left_in_the_temporary_folder(bare: Bare) -> None:
    done = bare.run("--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: amends" in done.stdout and len(done.stdout.splitlines()) > 4
    assert not list((bare.folder / "tmp").iterdir())


@pytest.mark.promise("13")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mount options are asked of Linux")
def test_a_temporary_folder_that_may_not_execute_has_a_way_around(bare: Bare) -> None:
    """`unshare` gives the command a mount namespace of its own, so that nothing outside sees the mount."""

    def mounted(command: str) -> subprocess.CompletedProcess[str]:
        script = f"mount -t tmpfs -o noexec,size=64m none {bare.folder}/tmp && {command}"
        env = bare.env | {"PATH": os.defpath}
        return subprocess.run(["unshare", "-m", "sh", "-c", script], env=env, capture_output=True, text=True)

    possible = mounted("true")
    if possible.returncode:
        pytest.skip(f"no mount namespaces here: {possible.stderr.strip()}")
    (bare.folder / "elsewhere").mkdir()
    assert mounted(f"exec {bare.executable} --version").returncode != 0, "the fault did not fire"
    around = mounted(f"TMPDIR={bare.folder}/elsewhere exec {bare.executable} --version")
    assert around.returncode == 0 and around.stdout.startswith("amends ")
