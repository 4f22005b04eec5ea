"""Text that cannot bite: what comes from agents and other people's programs is shown with its control, bidirectional
and invisible characters as escapes, so that it can neither steer a terminal nor dress up as something else.
"""

from __future__ import annotations

import unicodedata

_HARMFUL = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def plain(text: object) -> str:
    """The text with what a reader cannot see, or would be misled by, as escapes."""
    said = str(text)
    if said.isascii() and said.isprintable():
        return said
    return "".join(_escaped(c) if unicodedata.category(c) in _HARMFUL else c for c in said)


def _escaped(character: str) -> str:
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def cut(text: str, most: int) -> str:
    """The text, or its beginning and how much is missing."""
    if len(text) <= most:
        return text
    missing = f"… ({len(text)} characters in all)"
    return text[: max(0, most - len(missing))] + missing
