"""How strong the evidence of a decision is: a higher level needs more than every lower one (PROMISES 3.4)."""

from __future__ import annotations

from ...store.errors import BadValue

NAMED, FILE, PRESENT, VERIFIED, SECOND_DEVICE, QUORUM = range(1, 7)
LEVELS = {
    NAMED: ("named", "a name, typed by whoever sat there"),
    FILE: ("file", "a signature of a key that lies in a file"),
    PRESENT: ("presence", "a signature of a hardware key that somebody touched"),
    VERIFIED: ("verification", "a touch, and a PIN or a fingerprint"),
    SECOND_DEVICE: ("second-device", "the same, decided on another device than the one that acts"),
    QUORUM: ("quorum", "several distinct people"),
}
WORDS = {word: level for level, (word, _) in LEVELS.items()}


def level_named(word: object) -> int:
    """The level of a word. Raises BadValue."""
    if word not in WORDS:
        raise BadValue(f"{word!r} is no evidence level.", next=f"One of {', '.join(WORDS)}.", code="unknown_level")
    return WORDS[str(word)]
