"""What a person sees of a request is drawn from the signed text and from nothing else.

Everything in it is shown, and nothing is cut: each argument has a line with the place where it stands, and so has what
is signed beside them. Text of agents and other people's programs has its control, bidirectional and invisible
characters as escapes, so that it can neither draw over what stands beside it nor look like something else.
The headline repeats amounts and parties; whoever reads only that has read no line that is not there again.

Pure: what is new about a request is asked in signing.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..openings import when
from ..plain import plain


class Field(NamedTuple):
    """One value for the eye: where it stands, its text with everything invisible escaped, what sort of thing it is
    (text, number, flag, nothing, secret, large) and a word about it. Never cut."""

    label: str
    value: str
    kind: str = "text"
    note: str = ""


AMOUNTS = ("amount", "amount_minor", "total", "sum", "price", "quantity", "value")
PARTIES = ("to", "payee", "recipient", "recipients", "iban", "account", "customer", "email", "address", "path", "url")


def headline(request: Mapping[str, Any]) -> str:
    """What is about to happen, in a line: the tool, how much, to whom. All of it stands in the fields again."""
    found = {field.label: field.value for field in fields_of(request["args"])}
    much = [f"{name} {found[name]}" for name in (*AMOUNTS, "currency") if name in found]
    whom = [f"{name} {found[name]}" for name in PARTIES if name in found]
    told = ", ".join(much + whom)
    return plain(request["tool"]) + (f": {told}" if told else "")


def fields_of(args: Any, path: str = "") -> Iterator[Field]:
    """Every value in the signed arguments, with where it stands."""
    if isinstance(args, dict) and isinstance(args.get("$"), str):
        yield from _tagged(args, path)
    elif isinstance(args, dict) and args:
        yield from _members(args.items(), path)
    elif isinstance(args, list) and args:
        for place, value in enumerate(args):
            yield from fields_of(value, f"{path}[{place}]")
    else:
        yield _leaf(args, path)


def _members(pairs: Iterable[tuple[Any, Any]], path: str) -> Iterator[Field]:
    for name, value in pairs:
        said = plain(name) if isinstance(name, str) else next(_tagged(name, "")).value
        yield from fields_of(value, f"{path}.{said}" if path else said)


def _leaf(value: Any, path: str) -> Field:
    if isinstance(value, str):
        return Field(path, plain(value) if value else "(empty text)", "text" if value else "nothing")
    if isinstance(value, bool):
        return Field(path, "true" if value else "false", "flag")
    if value is None or value in ({}, []):
        return Field(path, {"None": "nothing", "{}": "(no entries)", "[]": "(empty list)"}[str(value)], "nothing")
    return Field(path, str(value), "number")


def _tagged(value: Mapping[str, Any], path: str) -> Iterator[Field]:
    """What JSON cannot say by itself (values.py, and `bound` in approvals.py)."""
    tag: str = value["$"]
    held: Any = value.get("v")
    if tag in ("record", "list", "set", "tuple"):
        note = f"a {plain(value['t'])}" if tag == "record" else f"a {tag}"
        for field in fields_of(held, path):
            yield field._replace(note=field.note or note)
    elif tag == "dict":  # its names are the caller's: a "$" among them is no tag
        yield from _members(held.items(), path)
    elif tag == "pairs":
        yield from _members(held, path)
    elif tag == "large":
        said = f"{value['size']} bytes, not shown; SHA-256 {value['sha256']}"
        yield Field(path, said, "large", f"a large {value['type']}")
    elif tag == "secret":
        yield Field(path, "•••", "secret", "a secret: not in the log, and not shown")
    elif tag == "escaped":
        yield Field(path, str(held), "text", "text in a form that looks like another; spelled out")
    elif isinstance(held, dict):  # a number that is longer than any
        yield from (field._replace(note=f"{tag}, {field.note}") for field in fields_of(held, path))
    else:
        yield Field(path, plain(held if isinstance(held, str) else json.dumps(held)), _TAGS.get(tag, "text"), tag)


_TAGS = {"decimal": "number", "int": "number", "float": "number"}


def about(request: Mapping[str, Any]) -> Iterator[Field]:
    """Everything that is signed beside the arguments."""
    for name, value in sorted(request.items()):
        if name == "args" or value in ([], ""):
            continue
        if name == "defaults":
            yield from (field._replace(note=field.note or "the tool's default") for field in fields_of(value, name))
        elif name in ("created", "expires"):
            yield Field(name, when(value * 1000), "number")
        else:
            yield Field(name, plain(value if isinstance(value, str) else json.dumps(value)), "text")
