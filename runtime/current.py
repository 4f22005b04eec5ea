"""Which saga the running code is in, carried by contextvars through tasks and pool threads.

Compensations, probes and verifiers run outside any saga: what they do is settled by whoever runs them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("amends_saga", default=None)


def current_saga() -> Any:
    """The handle of the saga that this code runs in, or None."""
    return CURRENT.get()


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Run the block outside any saga."""
    token = CURRENT.set(None)
    try:
        yield
    finally:
        CURRENT.reset(token)
