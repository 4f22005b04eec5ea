"""Errors speak to someone: what was refused, and what to do next.

Every error of amends has a `code` that never changes, an `exit` status for the command line
(one table: README, "Commands") and, where there is one, the `next` step.
Two families, because the remedy differs: `YouErred` means the caller can fix it, `TheyErred` means the world did it.
"""

from __future__ import annotations

LOST_RACES = frozenset({"decided", "expired", "fenced", "saga_busy"})
"""Codes that say that somebody was faster or the time was over: exit 1, whatever else their class says."""


class AmendsError(Exception):
    """The root of the family. `code` is stable, `next` is one sentence that says what to do, `facts` are details."""

    code = "error"
    exit = 70

    def __init__(self, message: str, *, next: str = "", code: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.next = next
        self.code = code or type(self).code
        if self.code in LOST_RACES:
            self.exit = 1
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.message} {self.next}".strip()


class YouErred(AmendsError):
    """The caller asked for something that cannot be: nothing was done, and nothing is lost."""

    code = "usage"
    exit = 2


class TheyErred(AmendsError):
    """The world did something: a disk, another process, a damaged file."""

    code = "world"
    exit = 3


class BadValue(YouErred):
    """A value cannot be stored. The message names the path to it and its type."""

    code = "bad_value"


class BadName(YouErred):
    """A tool, handler or key name is outside the grammar: printable ASCII without quote and backslash, 1 to 256."""

    code = "bad_name"


class NotFound(YouErred):
    """No saga, step or item goes by that name or prefix, or more than one does."""

    code = "not_found"


class Refused(AmendsError):
    """The gate or the state of the log said no. Nothing happened. `code` says why, `next` what would change it."""

    code = "refused"
    exit = 6


class Fenced(Refused):
    """Somebody else drives this saga now: a fact made under an older fence may not be written."""

    code = "fenced"


class Illegal(AmendsError):
    """A fact that the tables do not allow after what is written. A bug of ours, or a damaged log."""

    code = "illegal_fact"
    exit = 70


class Malformed(TheyErred):
    """Bytes outside the grammar. `facts['finding']` is the verifier's code."""

    code = "malformed"
    exit = 7


class TooNew(TheyErred):
    """Written by a newer amends. Left untouched."""

    code = "too_new"
    exit = 7


class Damaged(TheyErred):
    """The log does not add up at a record that is needed. `facts['seq']` names it."""

    code = "damaged"
    exit = 7


class HomeRefused(TheyErred):
    """This home may not be written: rolled back, cloned, of another device, or on a file system that cannot lock."""

    code = "home_refused"
    exit = 4


class SealKey(TheyErred):
    """The log is sealed, and its owner's key was not given, or is another one. Nothing was written."""

    code = "seal_key_missing"
    exit = 3


class LogHeld(TheyErred):
    """Another process has held the file's write lock for 30 s. The message names it and whether it is stopped."""

    code = "log_held"
    exit = 9


class LogReplaced(TheyErred):
    """The file under us is no longer the one that was opened. Nothing unsaid is acknowledged."""

    code = "log_replaced"
    exit = 4


class DiskFull(TheyErred):
    """No space left. Only outcomes, unwinding and halts are accepted until there is."""

    code = "disk_full"
    exit = 10


class Closed(YouErred):
    """The log was closed, or belongs to the process we were forked from."""

    code = "log_closed"
