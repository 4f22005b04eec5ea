"""A supervisor that asks is told when the daemon is ready, and that its loop still turns.

This is systemd's notification protocol: one datagram of `KEY=value` lines to the socket it names. Outside such a
supervisor nothing is sent. Ping from the loop that does the work: a blocked loop is what the watchdog must see.
Source: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import os
import socket

READY, STOPPING, ALIVE = "READY=1", "STOPPING=1", "WATCHDOG=1"


def notify(*lines: str) -> bool:
    """Send the lines (`READY=1`, `STATUS=two sagas`); say whether anybody was told.

    A supervisor that is gone, or hears nothing for a second, is no reason to stop what it supervises.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.settimeout(1)
        try:
            door.connect("\0" + address[1:] if address[0] == "@" else address)
            door.sendall("\n".join(lines).encode())
        except OSError:
            return False
    return True


def watchdog_period() -> float | None:
    """Seconds between two pings (half of what the supervisor allows), or None when nobody watches this process."""
    allowed, watched = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not allowed.isdigit() or int(allowed) == 0:
        return None
    if watched and watched != str(os.getpid()):
        return None
    return int(allowed) / 2_000_000
