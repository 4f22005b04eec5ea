"""The newest head of a log, remembered outside its database: one block, written in place, only to a larger size.

    amends-anchor/1 <install id>
    <the head as a signed note (note.py)>
    zeros up to byte 503, CRC-32 of all that as 8 hex digits, LF: 512 bytes

Written in place because a rename and its fsync cost more than the commit they follow; a block that a power cut tore
fails its CRC and says nothing, and the second one, in another folder, still does.
"""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple, Protocol

from . import driver, note
from .errors import Malformed
from .home import Home, open_regular, replace_file

BLOCK = 512
_MAGIC = b"amends-anchor/1 "
_PATIENCE_S = 0.25


class Owner(Protocol):
    """Whose anchors they are (keys.py)."""

    @property
    def install(self) -> str: ...

    @property
    def origin(self) -> str: ...

    @property
    def left(self) -> tuple[str, ...]:
        """Origins that were given up."""

    def signed(self, size: int, root: bytes, signature: bytes) -> bool: ...


class Anchor(NamedTuple):
    """A head remembered outside the database."""

    path: Path
    install: str
    origin: str
    size: int
    root: bytes
    signature: bytes


def pack(install: str, text: bytes) -> bytes:
    """The block: magic, install id, LF, the note, zeros, CRC-32 of all that as 8 hex digits, LF. 512 bytes."""
    front = (_MAGIC + install.encode() + b"\n" + text).ljust(BLOCK - 9, b"\0")
    return front + b"%08x\n" % binascii.crc32(front)


def _unpack(path: Path, block: bytes) -> Anchor | None:
    """None if the block is torn, or not one of ours."""
    front, crc = block[: BLOCK - 9], block[BLOCK - 9 :]
    if len(block) != BLOCK or not front.startswith(_MAGIC) or crc != b"%08x\n" % binascii.crc32(front):
        return None
    install, _, text = front[len(_MAGIC) :].rstrip(b"\0").partition(b"\n")
    body, _, line = text.rpartition(b"\n\n")
    try:
        head = note.parse_checkpoint(body + b"\n")
        signature = base64.b64decode(line.split(b" ")[-1].strip(), validate=True)[4:]
    except (Malformed, ValueError):
        return None
    return Anchor(path, install.decode("ascii", "replace"), *head, signature)


def write(path: Path, block: bytes, owner: Owner, size: int, sync: bool) -> bool:
    """In place, under the file's own lock, only to a larger size. False: another process holds the lock too long."""
    try:
        fd = driver.open_known(path, os.O_RDWR)
    except FileNotFoundError:
        replace_file(path, block)
        return True
    try:
        if not _lock_soon(fd):
            return False
        os.lseek(fd, 0, os.SEEK_SET)
        there = _unpack(path, os.read(fd, BLOCK + 1))
        if there and there.origin == owner.origin and there.size >= size:
            return True
        if there and there.origin != owner.origin and there.origin not in owner.left:
            return False  # another device's: the guard at open has words for it
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, block)
        if sync:
            os.fsync(fd)
        return True
    finally:
        driver.close_known(fd)


def _lock_soon(fd: int) -> bool:
    """Whoever holds it writes 512 bytes; only a stopped process holds it longer, and nobody waits for that."""
    end = monotonic() + _PATIENCE_S
    while not driver.try_lock(fd):
        if monotonic() > end:
            return False
        sleep(0.002)
    return True


def read_all(home: Home, owner: Owner) -> tuple[list[Anchor], list[str]]:
    """The anchors of this device, largest first, and what is to be said about those that cannot be used.

    An anchor of an incarnation that was given up is none; one of another origin is returned, for the guard to refuse.
    """
    anchors, troubles = [], []
    for path in (home.anchor, home.anchors / owner.install):
        try:
            anchor = _read(path)
        except FileNotFoundError:
            continue  # never written, or removed: the other one may be there
        except OSError as error:
            troubles.append(f"The anchor {path} cannot be read ({error.strerror or error}).")
            continue
        if anchor is None:
            troubles.append(f"The anchor {path} is damaged and says nothing.")
        elif anchor.origin in owner.left:
            continue
        elif anchor.origin == owner.origin and not owner.signed(anchor.size, anchor.root, anchor.signature):
            troubles.append(f"The anchor {path} is not signed by this device and says nothing.")
        else:
            anchors.append(anchor)
    return sorted(anchors, key=lambda anchor: -anchor.size), troubles


def _read(path: Path) -> Anchor | None:
    for _ in range(3):  # a look while somebody writes may see half of each
        with open_regular(path) as file:
            anchor = _unpack(path, file.read(BLOCK + 1))
        if anchor is not None:
            return anchor
    return None
