"""`amends service` writes one unit, says what it did, and where nobody supervises says what to start instead."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import PROGRAM

SYSTEMD = Path("/lib/systemd/systemd")


class Machine:
    """A user's account: a home folder, an installed `amends`, and a supervisor or none."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin dir"
        self.bin.mkdir()
        self.amends = self.bin / "amends"
        self.amends.write_text(f'#!/bin/sh\nexec {sys.executable} -m amends.cli "$@"\n')
        self.amends.chmod(0o755)
        self.calls = folder / "calls"
        self.unit = folder / "config/systemd/user/amends.service"
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_RUNTIME_DIR": str(folder / "no-runtime"),
            "DBUS_SESSION_BUS_ADDRESS": f"unix:path={folder}/no-bus",
            "AMENDS_HOME": str(folder / "my home"),
            "AMENDS_ANCHORS": str(folder / "anchors"),
        }

    def supervised(self) -> None:
        """A systemctl that says yes to everything and writes down what it was asked."""
        fake = self.bin / "systemctl"
        fake.write_text(f'#!/bin/sh\necho "$@" >> "{self.calls}"\nexit 0\n')
        fake.chmod(0o755)

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, "service", *args], env=self.env, text=True, capture_output=True, timeout=60,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def json(self, *args: str) -> dict[str, object]:
        said: dict[str, object] = json.loads(self.run(*args, "--json").stdout)
        return said


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.promise("13")
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of this system is not systemd's")
def test_install_status_and_uninstall_say_what_is(machine: Machine) -> None:
    machine.supervised()
    assert machine.json("status")["installed"] is False and machine.run("status").returncode == 1
    installed = machine.run("install")
    assert installed.returncode == 0, installed
    text = machine.unit.read_text()
    beside = Path(sys.executable).with_name("amends")  # the one of this very environment comes before PATH's
    assert f'ExecStart="{beside if beside.exists() else machine.amends}" recoverd' in text
    assert f"AMENDS_HOME={machine.folder}/my home" in text and f"AMENDS_ANCHORS={machine.folder}/anchors" in text
    assert machine.calls.read_text().splitlines()[-3:] == [
        "--user daemon-reload", "--user enable amends.service", "--user restart amends.service",
    ]  # fmt: skip
    assert (machine.run("status").returncode, machine.json("status")["active"]) == (0, True)
    assert machine.run("uninstall").returncode == 0
    assert not machine.unit.exists() and (machine.folder / "my home").exists(), "the home stays"
    assert "--user disable --now amends.service" in machine.calls.read_text().splitlines()
    assert machine.run("uninstall").returncode == 0, "twice is once"


@pytest.mark.promise("4.4")
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of this system is not systemd's")
def test_a_services_env_file_is_private_or_nothing_is_installed(machine: Machine) -> None:
    machine.supervised()
    tokens = machine.folder / "tokens.env"
    tokens.write_text("TOKEN=hush\n")
    tokens.chmod(0o644)
    refused = machine.run("install", "--env-file", str(tokens))
    assert refused.returncode == 2 and "chmod 600" in refused.stderr
    assert not machine.unit.exists()
    tokens.chmod(0o600)
    assert machine.run("install", "--env-file", str(tokens)).returncode == 0
    assert f"EnvironmentFile={tokens}" in machine.unit.read_text() and "hush" not in machine.unit.read_text()


@pytest.mark.promise("13")
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of this system is not systemd's")
def test_where_nobody_supervises_the_exact_line_for_elsewhere_is_said(machine: Machine) -> None:
    ran = machine.run("install")
    assert ran.returncode == 1 and not machine.unit.exists()
    line = next(line.strip() for line in ran.stdout.splitlines() if line.strip().startswith("AMENDS_HOME="))
    shell = ["/bin/sh", "-c", f"{line} --once"]
    once = subprocess.run(shell, env=machine.env, text=True, capture_output=True, timeout=60)
    assert once.returncode == 0, once
    assert (machine.folder / "my home/amends.db").exists(), "the line works as it stands"


@pytest.mark.promise("13")
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")
def test_a_dry_run_prints_a_unit_that_systemd_accepts_and_writes_nothing(machine: Machine) -> None:
    before = sorted(machine.folder.rglob("*"))
    said = machine.json("install", "--dry-run")
    assert sorted(machine.folder.rglob("*")) == before
    path = machine.folder / "amends.service"
    path.write_text(str(said["content"]))
    env = {**machine.env, "XDG_RUNTIME_DIR": str(machine.folder)}
    done = subprocess.run(["systemd-analyze", "--user", "verify", str(path)], env=env, capture_output=True, text=True)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "amends" in line]) == (0, [])


REAL = """
set -u
mount -t tmpfs tmpfs /run || exit 75
mkdir -p /run/systemd/system "/run/user/$(id -u)"; chmod 700 "/run/user/$(id -u)"
export XDG_RUNTIME_DIR=/run/user/$(id -u)
unset DBUS_SESSION_BUS_ADDRESS
"$SYSTEMD" --user --log-target=null >/dev/null 2>&1 & MANAGER=$!
end() { systemctl --user stop amends; kill $MANAGER; sleep .2; kill -9 $MANAGER; }  # else it may take minutes
trap 'end >/dev/null 2>&1' EXIT
for _ in $(seq 100); do systemctl --user show-environment >/dev/null 2>&1 && break; sleep .05; done
systemctl --user show-environment >/dev/null 2>&1 || exit 75
pid() { systemctl --user show -p MainPID --value amends; }
active() {
    for _ in $(seq 300); do
        [ "$(systemctl --user is-active amends)" = active ] && [ "$(pid)" != "$1" ] && return 0
        sleep .05
    done
    return 1
}
python -m amends.cli service install || exit 1
active 0 || { systemctl --user status amends; exit 2; }
P=$(pid); kill -9 "$P"; active "$P" || exit 3
python -m amends.cli service status || exit 4
P=$(pid); systemctl --user stop amends; [ "$(systemctl --user show -p Result --value amends)" = success ] || exit 5
python -m amends.cli service uninstall || exit 6
exit 0
"""


@pytest.mark.promise("13")
@pytest.mark.slow
@pytest.mark.skipif(
    not SYSTEMD.exists() or not shutil.which("unshare") or not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="a systemd of its own needs root, unshare and /lib/systemd/systemd",
)
def test_a_real_systemd_starts_restarts_and_stops_the_daemon(machine: Machine) -> None:
    env = {**machine.env, "SYSTEMD": str(SYSTEMD), "PATH": f"{Path(sys.executable).parent}:{machine.env['PATH']}"}
    ran = subprocess.run(["unshare", "-m", "bash", "-c", REAL], env=env, text=True, capture_output=True, timeout=90)
    if ran.returncode == 75:
        pytest.skip("no systemd of our own can be started here")
    assert ran.returncode == 0, ran
