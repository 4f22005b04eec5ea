"""What a person can type to decide a request, or to sign for the keyring: only what would be taken.

The inbox, messages, the page and a bare `amends approve ID` all say it from here, by the evidence that is asked and the
keys that are enrolled: a command that is handed out and then refused costs more trust than none.
"""

from __future__ import annotations

from collections.abc import Iterable

from .approvals import DENY
from .levels import NAMED
from .proof import Credential

_SIGNS = {"webauthn": ("--usb", "--page"), "ssh-sk": ("--ssh KEY",), "ssh": ("--ssh KEY",), "raw": ("--key FILE",)}
"""Kind of key -> how it signs, best first; the page is for requests only."""


def deciding(item: str, verdict: str, level: int, roles: Iterable[str], keys: Iterable[Credential]) -> tuple[str, ...]:
    """The commands that decide a request. level: the evidence that each person's yes needs; keys: those that could give
    it. Where there is none, the command that shows the keyring."""
    start = f"amends {verdict} {item}"
    if verdict == DENY or (level == NAMED and not tuple(roles)):
        return (f"{start} --by NAME",)
    kinds = {key.kind for key in keys}
    found = [f"{start} {way}" for kind, ways in _SIGNS.items() if kind in kinds for way in ways]
    return tuple(dict.fromkeys(found)) or ("amends keys list",)


def signing(command: str, keys: Iterable[Credential], name: str = "") -> tuple[str, ...]:
    """A command about the keyring (about the key `name`, if one is given) with each way in which these keys sign."""
    about = f" -- {name}" if name.startswith("-") else f" {name}" if name else ""
    kinds = {key.kind for key in keys}
    ways = dict.fromkeys(ways[0] for kind, ways in _SIGNS.items() if kind in kinds)
    return tuple(f"{command} {way}{about}" for way in ways) or (f"{command}{about}",)
