"""`amends service install` writes what this machine's own supervisor reads, and nothing else starts anything.

One table leads from the platform to a unit: where its file lies, what it says, and the supervisor's own commands that
install, remove and show it. systemd (Linux, per user), launchd (macOS) and Task Scheduler (Windows); only the first
has been run. A true Windows service would need a dependency of its own and gain little.

The unit starts the unpacked executable: systemd hears readiness and watchdog pings only from the process it started.
"""

from __future__ import annotations

import os
import plistlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from ..store.errors import YouErred

LABEL = "dev.amends.recovery"


class Daemon(NamedTuple):
    """What the supervisor is to start. env_file: NAME=value lines for handlers, or None; user: for Windows; anchors:
    the folder of second anchors, where it is not the user's own."""

    executable: Path
    home: Path
    env_file: Path | None = None
    user: str = ""
    anchors: Path | None = None


class Unit(NamedTuple):
    """A file for a supervisor and the commands (argv lists) that make it known, take it away and show it."""

    path: Path
    content: bytes
    install: tuple[tuple[str, ...], ...]
    remove: tuple[tuple[str, ...], ...]
    status: tuple[str, ...]
    hint: str = ""


def unit(daemon: Daemon, *, platform: str = sys.platform, home: Path | None = None) -> Unit:
    """The unit for a platform (`sys.platform`'s words); `home` is the user's home folder. Raises YouErred."""
    make = UNITS.get(platform)
    if make is None:
        raise YouErred(
            f"There is no service unit for {platform}.",
            next="Let your supervisor run `amends recoverd` and restart it when it ends.",
            code="no_supervisor",
        )
    for path in (daemon.executable, daemon.home, daemon.env_file, daemon.anchors):
        if path is not None and any(ord(c) < 32 for c in str(path)):
            raise YouErred(f"The path {str(path)!r} holds a control character, which no unit file can carry.")
    return make(daemon, home or Path.home())


def _systemd(daemon: Daemon, home: Path) -> Unit:
    if set('"\\') & set(str(daemon.executable)):
        raise YouErred(
            f"systemd starts no executable whose path holds a quote or a backslash: {daemon.executable}",
            next="Choose another home: the executable is laid out below it.",
        )
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    env_file = f"EnvironmentFile={_escaped(daemon.env_file)}\n" if daemon.env_file else ""
    anchors = f'Environment="AMENDS_ANCHORS={_quoted(daemon.anchors)}"\n' if daemon.anchors else ""
    text = f"""[Unit]
Description=Amends recovery daemon
StartLimitIntervalSec=60
StartLimitBurst=10

[Service]
Type=notify
NotifyAccess=main
ExecStart="{_quoted(daemon.executable)}" recoverd
Environment="AMENDS_HOME={_quoted(daemon.home)}"
{anchors}{env_file}Restart=always
RestartSec=100ms
WatchdogSec=30
TimeoutStopSec=20
KillMode=mixed
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""
    control = ("systemctl", "--user")
    return Unit(
        config / "systemd/user/amends.service",
        text.encode(),
        ((*control, "daemon-reload"), (*control, "enable", "amends.service"), (*control, "restart", "amends.service")),
        ((*control, "disable", "--now", "amends.service"),),
        (*control, "status", "--no-pager", "amends.service"),
        "It stops when you log out, unless `loginctl enable-linger` has been run once.",
    )


def _quoted(path: Path) -> str:
    """A path inside double quotes of a systemd unit. Source: systemd.syntax(7), systemd.unit(5) on specifiers."""
    return str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def _escaped(path: Path) -> str:
    """EnvironmentFile takes the rest of the line as it is, specifiers apart; a missing file stops the start."""
    return str(path).replace("%", "%%")


def _launchd(daemon: Daemon, home: Path) -> Unit:
    path = home / "Library/LaunchAgents" / f"{LABEL}.plist"
    domain = f"gui/{os.getuid() if hasattr(os, 'getuid') else 0}"
    settings: dict[str, object] = {
        "Label": LABEL,
        "ProgramArguments": [str(daemon.executable), "recoverd"],
        "EnvironmentVariables": {"AMENDS_HOME": str(daemon.home)}
        | ({"AMENDS_ANCHORS": str(daemon.anchors)} if daemon.anchors else {}),
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": 1,
        "ProcessType": "Background",
        "Umask": 0o077,
        "StandardErrorPath": str(home / "Library/Logs/amends.log"),
    }
    return Unit(
        path,
        plistlib.dumps(settings),
        (("launchctl", "bootstrap", domain, str(path)),),
        (("launchctl", "bootout", f"{domain}/{LABEL}"),),
        ("launchctl", "print", f"{domain}/{LABEL}"),
        "launchd reads no environment file: give handlers theirs by env_file in handlers.toml."
        if daemon.env_file
        else "",
    )


def _windows(daemon: Daemon, home: Path) -> Unit:
    path = home / "AppData/Local/amends/recovery.xml"
    user = daemon.user or os.environ.get("USERNAME", "")
    text = f"""<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <Triggers><LogonTrigger><Enabled>true</Enabled><UserId>{escape(user)}</UserId></LogonTrigger></Triggers>
  <Principals>
    <Principal id="Author">
      <UserId>{escape(user)}</UserId><LogonType>InteractiveToken</LogonType><RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure><Interval>PT1M</Interval><Count>999</Count></RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{escape(str(daemon.executable))}</Command>
      <Arguments>--home "{escape(str(daemon.home))}" recoverd</Arguments>
    </Exec>
  </Actions>
</Task>
"""
    return Unit(
        path,
        text.encode("utf-16"),
        (("schtasks", "/Create", "/F", "/TN", "Amends", "/XML", str(path)), ("schtasks", "/Run", "/TN", "Amends")),
        (("schtasks", "/End", "/TN", "Amends"), ("schtasks", "/Delete", "/F", "/TN", "Amends")),
        ("schtasks", "/Query", "/V", "/FO", "LIST", "/TN", "Amends"),
    )


UNITS: dict[str, Callable[[Daemon, Path], Unit]] = {"linux": _systemd, "darwin": _launchd, "win32": _windows}
