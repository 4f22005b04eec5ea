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
    "ApprovalPolicy": "runtime.gate.rules",
    "BreakerPolicy": "runtime.gate.breaker",
    "BudgetLimit": "runtime.gate.limits",
    "CANNOT_TELL": "runtime.tools",
    "CircuitBreaker": "runtime.gate.breaker",
    "Compensation": "runtime.tools",
    "DEFAULT_RULES": "runtime.gate.rules",
    "EscalationLevel": "runtime.gate.rules",
    "Fallback": "runtime.tools",
    "KillSwitch": "runtime.levers",
    "Observation": "runtime.tools",
    "PRESENT": "runtime.tools",
    "PreFlightGate": "runtime.gate.rules",
    "RateLimit": "runtime.gate.limits",
    "Record": "runtime.values",
    "Refused": "store.errors",
    "ResumeConflict": "runtime.engine",
    "RetryPolicy": "runtime.tools",
    "RollbackReport": "runtime.report",
    "Rule": "runtime.gate.rules",
    "SagaAborted": "runtime.scope",
    "Secret": "runtime.values",
    "TentativeStatus": "runtime.tentative",
    "Unconfirmed": "runtime.scope",
    "UnstorableResult": "runtime.engine",
    "Verdict": "runtime.gate.rules",
    "always": "runtime.gate.rules",
    "arg_below": "runtime.gate.rules",
    "arg_exceeds": "runtime.gate.rules",
    "arg_in": "runtime.gate.rules",
    "by_arg": "runtime.gate.limits",
    "by_tool": "runtime.gate.limits",
    "combine": "runtime.gate.limits",
    "compensator": "runtime.tools",
    "current_saga": "runtime.current",
    "derived": "runtime.gate.provenance",
    "model": "runtime.gate.provenance",
    "model_outcome": "runtime.report",
    "reconciler": "runtime.tools",
    "saga": "runtime.scope",
    "saga_scope": "runtime.scope",
    "semantics_is": "runtime.gate.rules",
    "sourced": "runtime.gate.provenance",
    "tag_is": "runtime.gate.rules",
    "tentative": "runtime.tentative",
    "tentative_status": "runtime.tentative",
    "tool": "runtime.wrap",
    "tool_is": "runtime.gate.rules",
    "user": "runtime.gate.provenance",
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
