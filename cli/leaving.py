"""What leaves the device: its log is told first, nothing leaves that was destroyed meanwhile, no file is replaced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import msgspec

from ..store.bundle import in_words
from ..store.chain import Draft
from ..store.errors import Refused, YouErred
from ..store.facts import COPIED
from ..store.home import replace_file


def opening(to: str, by: str) -> tuple[bytes, ...]:
    """For whom and by whom, as the opening of `copy.made`; none where nobody is named."""
    told = {name: text for name, text in (("by", by), ("to", to)) if text}
    return (msgspec.json.encode(told, order="sorted"),) if told else ()


def in_plain(log: Any, destroyed: int, out: str, id: str, size: int, openings: tuple[bytes, ...]) -> list[Draft]:
    """The fact that openings leave in plain text, inside a decision. destroyed: `keeping.erasing` before they were
    read. Raises Refused (`meanwhile`) if some were destroyed since."""
    if log.keeping.erasing != destroyed:
        raise meanwhile()
    return [Draft(COPIED, {"out": out, "event": id, "upto": size, "payload": "plain"}, openings, True)]


def meanwhile() -> Refused:
    """What is said where something that was read for a copy is gone by now."""
    return Refused(
        "Something was destroyed in the log meanwhile: nothing was handed out.", next="Run it again.", code="meanwhile"
    )


def refuse_existing(path: Path) -> None:
    """Raises YouErred (`exists`)."""
    if os.path.lexists(path):
        raise YouErred(f"{path} is there already.", next="Name another file.", code="exists")


def write_new(path: Path, data: bytes) -> None:
    """A new file for its owner alone, whole or not at all. Raises YouErred (`exists`), DiskFull, TheyErred
    (`not_written`)."""
    refuse_existing(path)
    with in_words(path):
        replace_file(path, data)


def read_file(path: Path, most: int) -> bytes:
    """A file of `most` bytes at the most, from `-` standard input. Raises YouErred (`no_file`)."""
    try:
        with click.open_file(str(path), "rb") as file:
            data: bytes = file.read(most + 1)
    except OSError as error:
        raise YouErred(
            f"{path} cannot be read ({error.strerror or error}).", next="Name another file.", code="no_file"
        ) from None
    if len(data) > most:
        raise YouErred(f"{path} is larger than {most} bytes.", next="Name the file that is meant.", code="no_file")
    return data
