"""What was destroyed is not left behind in the unused room of a page.

With `secure_delete` SQLite overwrites a row that it removes. But where rows were moved from page to page before (a page
that ran empty is joined with its neighbours), a copy may stay in the room between the list of cells and the cells, and
nothing that is removed later reaches it. So whoever finishes an erasure looks at that room in every page that
holds rows, and writes zeros where there is anything else. Keys of sagas lie in a table `without rowid`, whose pages are
those of an index. SQLite gives no meaning to those bytes.

Format of a page: https://www.sqlite.org/fileformat2.html#b_tree_pages.
"""

from __future__ import annotations

HEADS = {0x0D: 8, 0x0A: 8, 0x02: 12}
"""Kinds of pages that hold what is in rows, and how long their headers are: leaves of tables, and leaves and inner
pages of indexes, which tables `without rowid` are as well."""
_MAPPED = 4096 // 5 + 1
"""Every so many pages, from the second on, is one of the map of pointers."""
_FIRST_HEAD = 100
"""The first page begins with the header of the file."""


def mapped(number: int) -> bool:
    """Whether the page with this number, from 0, is one of the map of pointers: it may begin as one with rows does."""
    return number % _MAPPED == 1


def suspect(page: bytes, first: bool = False) -> bool:
    """Whether a page that others may be writing just now has to be looked at again, when nobody is."""
    head = _FIRST_HEAD if first else 0
    return page[head] in HEADS and (_unused(page, head) is None or cleaned(page, first) is not None)


def cleaned(page: bytes, first: bool = False) -> bytes | None:
    """The page with zeros in its unused room; None for one that has no other bytes there, or holds no rows."""
    head = _FIRST_HEAD if first else 0
    if page[head] not in HEADS:
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

    listed, content = head + HEADS[page[head]] + 2 * at(head + 3), at(head + 5) or 65536
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
