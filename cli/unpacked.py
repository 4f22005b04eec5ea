"""The daemon runs from files that no exit and no cleaner removes.

The single-file executable unpacks itself into a temporary folder at each start, and that folder goes with its
process or with whatever tidies /tmp. A daemon must not stand on it. So the release carries a second launcher, and
`lay_out` copies what lies unpacked already into a folder named after its content: an upgrade lays the new one beside
the old one and moves the link `current`, and a daemon that still runs the old one keeps its files.

A supervisor also sees one process instead of two there, which its readiness and watchdog protocol needs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

from ..store.errors import YouErred
from ..store.home import sync_folder
from .version import VERSION

LAUNCHER = "amends-unpacked"  # among the single file's data, laid there by the build
NAME = "amends"


def is_single_file() -> bool:
    """Whether this process is the single-file executable, which has an unpacked form to lay out."""
    return (_unpacked_here() / LAUNCHER).is_file()


def lay_out(app: str | Path) -> Path:
    """Make `app`/<version>-<digest> hold this release and `app`/current lead to it; return the executable to start.

    Does nothing twice, and two callers at once may both do it. Raises YouErred outside the single-file executable.
    """
    source = _unpacked_here()
    if not is_single_file():
        raise YouErred(
            "Only the single-file executable has an unpacked form, and this is not it.",
            next="Run the command from the released file `amends`, or let the service start the installed `amends`.",
            code="not_frozen",
        )
    app = Path(app).absolute()
    digest = hashlib.sha256((source / LAUNCHER).read_bytes()).hexdigest()  # it holds every line of our code
    release = app / f"{VERSION}-{digest[:12]}"
    if not release.exists():
        _copy(source, release)
    return _current(release)


def _unpacked_here() -> Path:
    return Path(getattr(sys, "_MEIPASS", os.devnull))


def _copy(source: Path, release: Path) -> None:
    """Copy beside, put on the disk, then rename: a folder of that name is whole, also after a power cut."""
    release.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = release.with_name(f".{release.name}.{os.getpid()}")
    try:
        shutil.copytree(source, draft / "_internal", symlinks=True, ignore=shutil.ignore_patterns(LAUNCHER))
        shutil.copyfile(source / LAUNCHER, draft / NAME)
        (draft / NAME).chmod(0o755)
        for path in draft.rglob("*"):
            if path.is_file() and not path.is_symlink():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
        for folder in (draft, *draft.rglob("*")):
            if folder.is_dir() and not folder.is_symlink():
                sync_folder(folder)
        draft.rename(release)
        sync_folder(release.parent)
    except OSError:
        if not release.exists():  # else somebody else laid out the same content meanwhile
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _current(release: Path) -> Path:
    """Move the link in one step. Where links need a privilege (Windows) the release's own path is the answer."""
    if os.name == "nt":
        return release / f"{NAME}.exe"
    draft = release.with_name(f".current.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(release.name)
    current = release.with_name("current")
    os.replace(draft, current)
    return current / NAME
