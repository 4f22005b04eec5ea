"""What lies beside a record in the file can be destroyed opening by opening, and says itself which are left.

A cell holds opening lines as they are, compressed (squeeze.py) or each of them sealed (seal.py). Which of an entry's
commitments a line answers to, its hash says; a sealed one carries its place, so that nobody needs a key to destroy it.
What is left stays in order; a cell of which nothing is left is no cell.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256

from .errors import Malformed
from .squeeze import shut, unshut

_SEALED = b"\x01"  # seal.SEALED, for a room that mostly does without the cryptography behind it


def present(cell: bytes | None, c: tuple[str, ...]) -> tuple[int, ...]:
    """The places in `c` whose openings are there. Raises Malformed (E_OPENING) for a cell that was altered."""
    if not cell:
        return ()
    if cell[:1] == _SEALED:
        from .seal import parts

        return tuple([part.place for part in parts(cell)])
    return tuple([_place(line, c) for line in unshut(cell).splitlines(True)])


def without(cell: bytes | None, c: tuple[str, ...], gone: Collection[int]) -> bytes | None:
    """The cell without the openings at these places, None if none is left. Raises Malformed (E_OPENING)."""
    if not cell:
        return None
    if cell[:1] == _SEALED:
        from .seal import join, parts

        return join(part for part in parts(cell) if part.place not in gone)
    lines = kept(unshut(cell), c, gone)
    return shut(lines) if lines else None


def kept(lines: bytes | None, c: tuple[str, ...], gone: Collection[int]) -> bytes | None:
    """The opening lines without those at these places, None if none is left. Raises Malformed (E_OPENING)."""
    return b"".join([line for line in (lines or b"").splitlines(True) if _place(line, c) not in gone]) or None


def _place(line: bytes, c: tuple[str, ...]) -> int:
    digest = sha256(line).hexdigest()
    if digest not in c:
        raise Malformed("A record holds what it does not commit to.", next="Run `amends verify`.", finding="E_OPENING")
    return c.index(digest)
