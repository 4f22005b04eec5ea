"""Sixteen digits that say which policy was in force, the same in every process that has the same one.

They are of the settings as plain data: rules in their order, limits, approvals, what a file says of each tool. Comments
and spelling of the file are not in it. A function of yours counts by what it was compiled to and by the plain values it
closes over; what it reads elsewhere (globals, files, a database) is not seen, and neither is another Python version's
compiler the same.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from enum import Enum
from functools import partial
from hashlib import sha256
from types import CodeType
from typing import Any

DEPTH_MAX = 8
LENGTH_MAX = 1000


def digest(settings: Any) -> str:
    """The first 16 hex digits of the SHA-256 of plain data."""
    return sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Settings as plain data that JSON can say: the same ones give the same data."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, int | float | Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, set | frozenset):  # their order is another one in each process
        return sorted(json.dumps(plain(one), sort_keys=True) for one in value)
    if callable(value) and not hasattr(value, "facts"):
        return list(compiled(value))
    return [type(value).__qualname__, *([name, plain(getattr(value, name))] for name in _names(value))]


def _names(value: Any) -> tuple[str, ...]:
    kind = type(value)
    found = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", None)
    if found is None:
        found = ("facts",) if hasattr(value, "facts") else sorted(getattr(value, "__dict__", ()))
    return tuple(found)


def compiled(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """A function as data: its name, and 16 hex digits of what it was compiled to."""
    name = str(getattr(fn, "__qualname__", type(fn).__qualname__))
    return "code", name, sha256(repr(_settled(fn, DEPTH_MAX)).encode(errors="backslashreplace")).hexdigest()[:16]


def _settled(value: Any, depth: int) -> Any:
    if value is None or value is ... or isinstance(value, str | bytes | int | float | complex | Decimal):
        return repr(value)
    if depth == 0:
        return type(value).__qualname__
    if isinstance(value, CodeType):
        return value.co_code.hex(), value.co_names, [_settled(one, depth - 1) for one in value.co_consts]
    if isinstance(value, tuple | list):
        return [len(value), *(_settled(one, depth - 1) for one in value[:LENGTH_MAX])]
    if isinstance(value, set | frozenset):
        return sorted(repr(_settled(one, depth - 1)) for one in value)
    if isinstance(value, partial):
        return [_settled(one, depth - 1) for one in (value.func, value.args, sorted(value.keywords.items()))]
    return _of_function(value, depth - 1)


def _of_function(value: Any, depth: int) -> Any:
    code = getattr(value, "__code__", None)
    if code is None:
        own = inspect.getattr_static(type(value), "__call__", None)
        return [type(value).__qualname__, _settled(own, depth) if inspect.isfunction(own) else ""]
    cells = [_held(cell) for cell in getattr(value, "__closure__", None) or ()]
    return [_settled(one, depth) for one in (code, getattr(value, "__defaults__", None), cells)]


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is bound later
        return None
