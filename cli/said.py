"""What a check of `doctor` answers with."""

from __future__ import annotations

from typing import NamedTuple


class Said(NamedTuple):
    """One finding: level `ok`, `warn` (worth knowing) or `bad` (needs you), a sentence, what to do about it."""

    level: str
    text: str
    next: str = ""
