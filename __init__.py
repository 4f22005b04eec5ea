"""amends: the runtime that lets an agent take it back, and prove it.

The public names, handed out when first asked for, so that `import amends` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "ABSENT": "runtime.tools",
    "ALREADY_DONE": "runtime.tools",
    "ActionSemantics": "runtime.semantics",
    "AgentKit": "runtime.kit",
    "AmendsError": "store.errors",
    "CANNOT_TELL": "runtime.tools",
    "Compensation": "runtime.tools",
    "Fallback": "runtime.tools",
    "PRESENT": "runtime.tools",
    "Record": "runtime.values",
    "Refused": "store.errors",
    "ResumeConflict": "runtime.engine",
    "RetryPolicy": "runtime.tools",
    "RollbackReport": "runtime.report",
    "SagaAborted": "runtime.scope",
    "Secret": "runtime.values",
    "UnstorableResult": "runtime.engine",
    "compensator": "runtime.tools",
    "current_saga": "runtime.current",
    "model_outcome": "runtime.report",
    "saga": "runtime.scope",
    "saga_scope": "runtime.scope",
    "tool": "runtime.wrap",
}
_MEMBERS = {"REVERSIBLE", "COMPENSABLE", "IRREVERSIBLE"}

__all__ = [*_NAMES, *sorted(_MEMBERS)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _MEMBERS:
        found = getattr(import_module(".runtime.semantics", __name__).ActionSemantics, name)
    elif name in _NAMES:
        found = getattr(import_module(f".{_NAMES[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
