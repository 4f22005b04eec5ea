"""What was destroyed is not left behind in the unused room of a page.

With `secure_delete` SQLite overwrites a row that it removes. But where rows were moved from page to page before (a page
that ran empty is joined with its neighbours), a copy may stay in the room between the list of cells and the cells, and
nothing that is removed later reaches it. So whoever finishes an erasure looks at that room in every page of a table,
and writes zeros where there is anything else. SQLite gives no meaning to those bytes.

Format of a page: https://www.sqlite.org/fileformat2.html#b_tree_pages.
"""

from __future__ import annotations

LEAF, HEAD = 0x0D, 8
_FIRST_HEAD = 100
"""The first page begins with the header of the file."""


def suspect(page: bytes, first: bool = False) -> bool:
    """Whether a page that others may be writing just now has to be looked at again, when nobody is."""
    head = _FIRST_HEAD if first else 0
    return page[head] == LEAF and (_unused(page, head) is None or cleaned(page, first) is not None)


def cleaned(page: bytes, first: bool = False) -> bytes | None:
    """The page with zeros in its unused room; None for one that has no other bytes there, or is no leaf of a table."""
    head = _FIRST_HEAD if first else 0
    if page[head : head + 1] != bytes((LEAF,)):
        return None
    spans = _unused(page, head)
    if spans is None or not any(page[start:end].strip(b"\0") for start, end in spans):
        return None
    made = bytearray(page)
    for start, end in spans:
        made[start:end] = bytes(end - start)
    return bytes(made)


def _unused(page: bytes, head: int) -> list[tuple[int, int]] | None:
    """The room between the list of cells and the cells, and the inside of every free block; None for what is no such
    page: an overflow page may begin with any byte."""

    def at(place: int) -> int:
        return int.from_bytes(page[place : place + 2], "big")

    listed, content = head + HEAD + 2 * at(head + 3), at(head + 5) or 65536
    if not listed <= content <= len(page):
        return None
    spans, block = [(listed, content)], at(head + 1)
    while block:
        following, size = at(block), at(block + 2)
        if block < content or size < 4 or block + size > len(page) or (following and following < block + size):
            return None
        spans.append((block + 4, block + size))
        block = following
    return spans
