"""What a tool's author promises about its effect. Nothing infers it.

REVERSIBLE: restored exactly. COMPENSABLE: offset by an inverse, a trace remains. IRREVERSIBLE: no automated undo;
a named person decides before it happens.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from ..store.errors import BadValue


class ActionSemantics(StrEnum):
    REVERSIBLE = "reversible"
    COMPENSABLE = "compensable"
    IRREVERSIBLE = "irreversible"


class Meaning(NamedTuple):
    """durable: intent and outcome are on the disk around the effect. asks: a person decides first.
    inverse: an inverse may be named. merge: its outcome may share the next intent's commit."""

    durable: bool
    asks: bool
    inverse: bool
    merge: bool


SEMANTICS = {
    ActionSemantics.REVERSIBLE: Meaning(durable=False, asks=False, inverse=True, merge=True),
    ActionSemantics.COMPENSABLE: Meaning(durable=True, asks=False, inverse=True, merge=True),
    ActionSemantics.IRREVERSIBLE: Meaning(durable=True, asks=True, inverse=False, merge=False),
}


def semantics_of(value: object) -> ActionSemantics:
    """The member for a member or its name in any case. Raises BadValue."""
    if type(value) is ActionSemantics:
        return value
    try:
        return ActionSemantics(str(getattr(value, "value", value)).lower())
    except ValueError:
        raise BadValue(
            f"semantics={value!r} is none of REVERSIBLE, COMPENSABLE, IRREVERSIBLE.",
            next="State what the tool's effect is; nothing infers it.",
            code="semantics_unknown",
        ) from None
