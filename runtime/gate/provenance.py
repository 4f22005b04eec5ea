"""Where an argument comes from: an agent may not move money on a number it made up.

    charge(amount=user(4200), order=sourced("A-17", "orders.csv#17"), memo="thanks")

`user`: a person's own words. `sourced`: from a document, with a receipt that says where. `derived`: computed, with a
note that says how. `model`: the model wrote it, and so is everything that carries no tag. A policy says per tool and
argument which tags it takes (`amount = ["user", "sourced"]`) or refuses (`memo = {prohibit = ["model"]}`).

The tag is taken off before anything else happens: the tool, the log and the step's identity see the plain value. A tag
inside a list or a dict speaks for that part; an argument made of parts is `model` if any part is, has the tag that all
its parts have, and is `derived` otherwise. Tags deeper inside objects are refused like any value that cannot be stored.

Why no check of the receipt: it is kept beside the step for whoever looks; the tag is the word of the code that set it,
not of the model, which cannot write one into JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ...store.errors import BadValue
from ..values import DEPTH_MAX, encode
from .question import GateCall, Refusal

USER, SOURCED, DERIVED, MODEL = TAGS = ("user", "sourced", "derived", "model")


class Tagged:
    """A value and where it comes from. It is unwrapped before a tool sees it."""

    __slots__ = ("value", "tag", "note")
    __hash__ = None  # type: ignore[assignment]  # no member of a set, where it could not be found again
    any = False  # whether this process has made one: as long as not, there is none to look for

    def __init__(self, value: Any, tag: str, note: Any = None) -> None:
        self.value, self.tag, self.note = value, tag, note
        Tagged.any = True

    def __repr__(self) -> str:
        return f"{self.tag}({self.value!r})"


def user(value: Any) -> Tagged:
    """A value that a person said."""
    return Tagged(_untagged(value), USER)


def sourced(value: Any, receipt: Any) -> Tagged:
    """A value from a document. receipt: where it stands there, as text or a mapping. Raises BadValue without one."""
    if not (isinstance(receipt, str) and receipt.strip()) and not (isinstance(receipt, Mapping) and receipt):
        raise BadValue(
            "sourced(value, receipt) needs a receipt.", next="Say where it stands: a path and a place in it."
        )
    encode(dict(receipt) if isinstance(receipt, Mapping) else receipt, path="receipt")
    return Tagged(_untagged(value), SOURCED, receipt)


def derived(value: Any, note: str) -> Tagged:
    """A computed value. note: how. Raises BadValue without one."""
    if not isinstance(note, str) or not note.strip():
        raise BadValue("derived(value, note) needs a note.", next='Say how it was computed: "sum of the lines".')
    encode(note, path="note")
    return Tagged(value, DERIVED, note)


def model(value: Any) -> Tagged:
    """A value that the model wrote: the same as no tag."""
    return Tagged(_untagged(value), MODEL)


def _untagged(value: Any) -> Any:
    if isinstance(value, Tagged):
        raise BadValue(f"The value is tagged {value.tag} already.", next="Tag it once, where it comes from.")
    return value


# ---- taking the tags off ---------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """The arguments as the tool gets them, the tag of each that has one, and receipts and notes by path."""

    kwargs: dict[str, Any]
    tags: dict[str, str]
    notes: dict[str, Any]


NOTHING: dict[str, Any] = {}


def untag(kwargs: dict[str, Any], stated: Mapping[str, str] | None = None) -> Told:
    """Take the tags off a call's arguments. stated: `provenance=` of the call, argument -> tag. Raises BadValue.

    The same dict comes back where nothing is tagged. Containers that hold tags are copied, others are not.
    """
    if not Tagged.any and not stated:
        return Told(kwargs, NOTHING, NOTHING)
    walk = _Walk()
    plain = {name: walk.bare(value, name if type(name) is str else "") for name, value in kwargs.items()}
    tags = {name: _together(found) for name, (_, found) in plain.items() if found - UNTAGGED}
    for name, tag in _stated(stated, kwargs):
        if tags.setdefault(name, tag) != tag:
            raise BadValue(f"provenance says {tag} of {name}, and its value is tagged {tags[name]}.", next="Say one.")
    return Told({name: value for name, (value, _) in plain.items()}, tags, walk.notes)


def untagged_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call outside any saga, as the tool gets them."""
    if not Tagged.any:
        return args, kwargs
    walk = _Walk()
    return tuple(walk.bare(one, "")[0] for one in args), {name: walk.bare(one, "")[0] for name, one in kwargs.items()}


Bare = tuple[Any, frozenset[str]]
"""A value without tags, and the tag of each of its parts, "" for one without."""
UNTAGGED = frozenset({""})


class _Walk:
    """One pass over the arguments of a call. What stands in several places is walked once: sixty lists that each hold
    the next one twice are small in memory and endless on paper."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}
        self.seen: dict[int, Bare] = {}

    def bare(self, value: Any, path: str, depth: int = DEPTH_MAX) -> Bare:
        kind = type(value)
        if kind is Tagged:
            return self.tagged(value, path, depth)
        if kind not in (dict, list, tuple) or not value or depth == 0:
            return value, UNTAGGED
        if id(value) not in self.seen:
            self.seen[id(value)] = value, UNTAGGED  # for one that holds itself, which is refused when it is encoded
            self.seen[id(value)] = self.container(value, path, depth)
        return self.seen[id(value)]

    def tagged(self, value: Tagged, path: str, depth: int) -> Bare:
        if value.note is not None:
            self.notes[path] = {"tag": value.tag, "note": value.note}
        bare, inner = self.bare(value.value, path, depth)
        return bare, (inner - UNTAGGED) | {value.tag}

    def container(self, value: Any, path: str, depth: int) -> Bare:
        before = list(value.items() if type(value) is dict else enumerate(value))
        parts = [(key, self.bare(one, f"{path}.{key}" if type(key) in (str, int) else path, depth - 1))
                 for key, one in before]  # fmt: skip
        found = frozenset().union(*(tags for _, (_, tags) in parts))
        if found == UNTAGGED:
            return value, found
        bare = {key: one for key, (one, _) in parts}
        return bare if type(value) is dict else type(value)(bare.values()), found


def _together(found: frozenset[str]) -> str:
    if found & {"", MODEL}:
        return MODEL
    return next(iter(found)) if len(found) == 1 else DERIVED


def _stated(stated: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if stated is None:
        return
    if not isinstance(stated, Mapping):
        raise BadValue(f"provenance={stated!r}: a mapping of arguments to tags is asked.")
    for name, tag in stated.items():
        if name not in kwargs:
            raise BadValue(f"provenance names {name!r}, which the call does not have.")
        yield name, tag_named(tag)


def tag_named(tag: Any) -> str:
    """One of the four tags. Raises BadValue."""
    if not isinstance(tag, str) or tag not in TAGS:
        raise BadValue(f"{tag!r} is no provenance.", next=f"One of {', '.join(TAGS)}.")
    return tag


# ---- what a policy demands -------------------------------------------------------------------------------------------


class Demand(NamedTuple):
    """The tags that an argument may have; prohibits: said by naming those that it may not."""

    allowed: tuple[str, ...]
    prohibits: bool = False


Demands = Mapping[str, Demand]
"""Argument -> what its provenance has to be."""


def demand(said: Any) -> Demand:
    """A demand as people write it: a list of the tags that are taken, or {"prohibit": [tags]}. Raises BadValue."""
    if isinstance(said, Demand):
        return said
    prohibits = isinstance(said, Mapping)
    if prohibits and set(said) != {"prohibit"}:
        raise BadValue("This is neither a list of tags nor {prohibit = [tags]}.")
    listed = _tags(said["prohibit"] if prohibits else said)
    if not listed or len(set(listed)) == len(TAGS):
        raise BadValue("A demand that takes every tag, or none, says nothing.", next=f"The tags: {', '.join(TAGS)}.")
    return Demand(tuple(tag for tag in TAGS if (tag in listed) != prohibits), prohibits)


def _tags(said: Any) -> tuple[str, ...]:
    if isinstance(said, str):
        return (tag_named(said),)
    if not isinstance(said, Iterable) or isinstance(said, Mapping):
        raise BadValue(f"{said!r} is no list of tags.", next=f"The tags are {', '.join(TAGS)}.")
    return tuple(tag_named(tag) for tag in said)


def demands(said: Mapping[str, Any]) -> dict[str, Demand]:
    """Argument -> demand, for one tool. Raises BadValue."""
    if not isinstance(said, Mapping):
        raise BadValue(f"provenance={said!r}: a mapping of arguments to tags is asked.")
    return {str(name): demand(one) for name, one in said.items()}


def check_provenance(wanted: Demands, call: GateCall) -> Refusal | None:
    """Why the arguments of a call do not come from where they must; every one of them is named at once."""
    wrong: list[dict[str, Any]] = []
    for name, one in wanted.items():
        has = call.provenance.get(name, "")
        if name in call.kwargs and (has or MODEL) not in one.allowed:
            wrong.append({"argument": name, "has": has or MODEL, "wants": list(one.allowed), "tagged": bool(has)})
    if not wrong:
        return None
    prohibited = any(wanted[one["argument"]].prohibits for one in wrong)
    said = "; ".join(f"{one['argument']} has to be {_wants(one)} and is {_has(one)}" for one in wrong)
    return Refusal(
        "provenance_prohibited" if prohibited else "provenance_missing",
        f"{call.tool} is refused for where its arguments come from: {said}.",
        "Take the values from the user or a document, and tag them where they come in.",
        {"arguments": wrong},
    )


def _wants(wrong: Mapping[str, Any]) -> str:
    return " or ".join(wrong["wants"])


def _has(wrong: Mapping[str, Any]) -> str:
    return str(wrong["has"]) if wrong["tagged"] else "untagged, which counts as model"
