"""What the figures were measured on: processor, versions, file system, and what one flush to this disk costs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from load import percentiles


def line() -> str:
    held = [f"{platform.system()} {platform.release()}", f"{os.cpu_count()} cores", _processor()]
    if hasattr(os, "getloadavg"):
        held.append(f"load {os.getloadavg()[0]:.1f}")
    return ", ".join(part for part in held if part)


def _processor() -> str:
    try:
        for text in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    except OSError:
        return platform.processor()
    return platform.machine()


def versions(peer: str) -> str:
    import apsw

    told = [f"CPython {platform.python_version()}", f"SQLite {apsw.sqlite_lib_version()}"]
    told += [f"{name} {importlib.metadata.version(name)}" for name in ("apsw", "msgspec", "pynacl")]
    ask = "import importlib.metadata as m; print(m.version('agent-saga'))"
    found = subprocess.run([peer, "-c", ask], capture_output=True, text=True, check=False)
    return ", ".join([*told, f"agent-saga {found.stdout.strip() or 'missing'}"])


def disk(folder: Path) -> str:
    """Microseconds of a write of 4 KB and fdatasync, appended and over blocks that were written before."""
    flush = getattr(os, "fdatasync", os.fsync)
    path = folder / "disk.bin"
    block = os.urandom(4096)
    appended, over = [], []
    with open(path, "wb", buffering=0) as file:
        for _ in range(200):
            began = time.perf_counter_ns()
            file.write(block)
            flush(file.fileno())
            appended.append(time.perf_counter_ns() - began)
        file.seek(0)
        for _ in range(200):
            began = time.perf_counter_ns()
            file.write(block)
            flush(file.fileno())
            over.append(time.perf_counter_ns() - began)
    path.unlink()
    a, b = percentiles(appended), percentiles(over)
    return (
        f"{_file_system(folder)}: 4 KB + {flush.__name__} p50 {a['p50']:.0f} us appended, "
        f"{b['p50']:.0f} us overwritten (p95 {a['p95']:.0f}, {b['p95']:.0f})"
    )


def _file_system(folder: Path) -> str:
    if sys.platform != "linux":
        return str(folder)
    held = ("", "?")
    for text in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, where, kind = text.split()[:3]
        if (str(folder) + "/").startswith(where.rstrip("/") + "/") and len(where) > len(held[0]):
            held = (where, kind)
    return f"{held[1]} at {held[0]}"
