"""Text that cannot bite: what comes from agents and other people's programs is shown with its control, bidirectional
and invisible characters as escapes, so that it can neither steer a terminal nor dress up as something else. The page
(cli/web/static/dom.js) escapes the same ones.
"""

from __future__ import annotations

import unicodedata

from ..store.errors import BadValue

HARMFUL = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Categories: control, format (bidirectional ones among them), surrogate, private and unassigned, separators."""
UNSEEN = frozenset(
    chr(code)
    for first, last in (
        (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
        (0x34F, 0x34F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x2800, 0x2800), (0x3164, 0x3164),
        (0xFE00, 0xFE0F), (0xFFA0, 0xFFA0), (0x16FE4, 0x16FE4), (0x1D159, 0x1D159), (0xE0100, 0xE01EF),
    )
    for code in range(first, last + 1)
)  # fmt: skip
"""Every space but the plain one, and letters and marks that show as nothing."""
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def plain(text: object) -> str:
    """The text with what a reader cannot see, or would be misled by, as escapes."""
    said = str(text)
    if said.isascii() and said.isprintable():
        return said
    return "".join(_escaped(c) if hidden(c) else c for c in said)


def hidden(character: str) -> bool:
    """Whether a reader cannot see it, or would be misled by it."""
    return unicodedata.category(character) in HARMFUL or character in UNSEEN


def blank(text: object) -> bool:
    """Whether a text says nothing that anybody can see."""
    return not isinstance(text, str) or all(c.isspace() or hidden(c) for c in text)


def named(by: object) -> str:
    """A person's name, as given. Raises BadValue for none, and (bad_name) for one that holds what nobody sees."""
    if not isinstance(by, str) or not by.strip():
        raise BadValue("A named person decides.", next="Pass --by NAME.")
    name = by.strip()
    if plain(name) != name:
        raise BadValue(
            f"{plain(name)} is no person's name: it holds a character that cannot be seen.", next="Type it plainly.",
            code="bad_name",
        )  # fmt: skip
    return name


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
