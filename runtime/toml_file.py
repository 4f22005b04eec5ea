"""A TOML file that people write is read in one way, and what is wrong with it is told with its line.

What a complaint is called and what is to be done about it is the file's own: `complaint`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..store.errors import YouErred
from .gate.toml_lines import NoToml, parsed, text_of

Wrong = Callable[[Path | str, int, str], YouErred]
"""The error that says what is wrong on a line of a file; line 0 is none in particular."""


def complaint(kind: type[YouErred], next: str) -> Wrong:
    """How one sort of file complains. `facts` of the errors: path, line."""

    def wrong(path: Path | str, line: int, what: str) -> YouErred:
        where = f"{path}, line {line}" if line else f"{path}"
        return kind(f"{where}: {what}.", next=next, path=str(path), line=line)

    return wrong


def written(path: Path | str, wrong: Wrong) -> str | None:
    """The text of a file; None if there is none. Raises what `wrong` makes."""
    try:
        return text_of(Path(path).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise wrong(path, 0, f"it cannot be read: {error.strerror}") from None
    except NoToml as none:
        raise wrong(path, none.line, none.what) from None


def document_in(text: str, path: Path | str, wrong: Wrong) -> dict[str, Any]:
    """What the text of a file at `path` says. Raises what `wrong` makes."""
    try:
        return parsed(text)
    except NoToml as none:
        raise wrong(path, none.line, none.what) from None
