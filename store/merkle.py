"""A signed head covers every entry: the same entries give the same root, and a proof shows it in a few hashes.

The tree is RFC 6962's (leaf 0x00‖entry, node 0x01‖left‖right). A leaf is the chain hash of its entry (entry.leaf), so
no hash is stored twice. `Peaks` is what appending needs: the roots of the full subtrees, at most 64 of them. Proofs
and old roots ask a `HashReader` for leaves and for the roots of full runs of 256; all else is computed.

Why no stored tiles: leaves are recomputed from the lines, and a stored inner node would be a second truth to verify.
Source: RFC 6962 section 2.1; proof checks as RFC 9162 sections 2.1.3.2 and 2.1.4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Protocol

from .errors import Malformed

RUN_BITS = 8
RUN = 1 << RUN_BITS
EMPTY = sha256(b"").digest()
HASH_SIZE = 32


def node(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 ‖ left ‖ right)."""
    return sha256(b"\1" + left + right).digest()


class Peaks:
    """The growing edge of a tree: appends in constant time on average, tells its root at any moment.

    `runs` collects (n, root) of each full run of 256 leaves as it fills; whoever stores them clears the list.
    """

    __slots__ = ("_peaks", "runs", "size")

    def __init__(self) -> None:
        self.size = 0
        self.runs: list[tuple[int, bytes]] = []
        self._peaks: list[bytes] = []  # widest first; one per bit set in size

    @classmethod
    def restore(cls, run_roots: Sequence[bytes], tail: Sequence[bytes]) -> Peaks:
        """The edge over the given roots of full runs, followed by the leaf hashes after them. `runs` starts empty
        but for runs that the tail itself fills."""
        self = cls()
        for n, root in enumerate(run_roots):
            self._push(root, n)
        self.size = len(run_roots) << RUN_BITS
        self.extend(tail)
        return self

    def extend(self, hashes: Iterable[bytes]) -> None:
        """Append leaf hashes (32 bytes each)."""
        peaks, size = self._peaks, self.size
        for hash in hashes:
            rest, height = size, 0
            while rest & 1:
                hash = sha256(b"\1" + peaks.pop() + hash).digest()
                rest >>= 1
                height += 1
                if height == RUN_BITS:
                    self.runs.append((size >> RUN_BITS, hash))
            peaks.append(hash)
            size += 1
        self.size = size

    def skip(self, level: int, hash: bytes) -> None:
        """Append a whole subtree of 2**level leaves by its root; `size` must be a multiple of that."""
        size, height = self.size, level
        if size & ((1 << level) - 1):
            raise _malformed(f"a subtree of {1 << level} leaves does not begin at leaf {size}")
        if level == RUN_BITS:
            self.runs.append((size >> RUN_BITS, hash))
        while size >> height & 1:
            hash = node(self._peaks.pop(), hash)
            height += 1
            if height == RUN_BITS:
                self.runs.append((size >> RUN_BITS, hash))
        self._peaks.append(hash)
        self.size = size + (1 << level)

    def _push(self, hash: bytes, n: int) -> None:
        """Append the n-th subtree of one width, all before it being there."""
        while n & 1:
            hash = node(self._peaks.pop(), hash)
            n >>= 1
        self._peaks.append(hash)

    def root(self) -> bytes:
        """The root over all leaves so far; SHA-256 of nothing for none."""
        peaks = self._peaks
        if not peaks:
            return EMPTY
        root = peaks[-1]
        for left in peaks[-2::-1]:
            root = node(left, root)
        return root

    def copy(self) -> Peaks:
        """One that grows on its own; it takes the unstored `runs` along."""
        other = Peaks()
        other.size, other.runs, other._peaks = self.size, self.runs[:], self._peaks[:]
        return other


class HashReader(Protocol):
    """Where the hashes of a tree lie. Where leaves may have been removed it also has `gaps(low, high)`: of the removed
    subtrees (stubs.py) that have leaves among low <= i < high, in order, the first leaf, the level and the root."""

    def leaf(self, i: int) -> bytes:
        """The hash of leaf i, 32 bytes."""

    def run(self, n: int) -> bytes:
        """The root over leaves 256·n … 256·n+255, 32 bytes; asked only where all of them are below the size."""


# ---- making proofs --------------------------------------------------------------------------------------------------


def root_at(reader: HashReader, size: int) -> bytes:
    """The root over the first `size` leaves."""
    if size < 0:
        raise _malformed("a tree size below zero")
    return _span(reader, 0, size) if size else EMPTY


def inclusion_proof(reader: HashReader, index: int, size: int) -> list[bytes]:
    """The hashes, leaf side first, that lead from leaf `index` to the root at `size`."""
    if not 0 <= index < size:
        raise _malformed(f"leaf {index} is not in a tree of {size}")
    proof: list[bytes] = []
    low, high = 0, size
    while high - low > 1:
        middle = low + _split(high - low)
        if index < middle:
            proof.append(_span(reader, middle, high))
            high = middle
        else:
            proof.append(_span(reader, low, middle))
            low = middle
    return proof[::-1]


def consistency_proof(reader: HashReader, old: int, new: int) -> list[bytes]:
    """The hashes that show the tree of `old` leaves to be the beginning of the tree of `new`; none if 0 or equal."""
    if not 0 <= old <= new:
        raise _malformed(f"a tree of {old} is not the beginning of one of {new}")
    if old in (0, new):
        return []
    proof: list[bytes] = []
    low, high = 0, new
    while high != old:
        middle = low + _split(high - low)
        if old <= middle:
            proof.append(_span(reader, middle, high))
            high = middle
        else:
            proof.append(_span(reader, low, middle))
            low = middle
    if low:
        proof.append(_span(reader, low, high))
    return proof[::-1]


def _split(size: int) -> int:
    """The largest power of two below `size` (size > 1)."""
    return 1 << (size - 1).bit_length() - 1


def _span(reader: HashReader, low: int, high: int) -> bytes:
    """The hash over leaves low <= i < high, where low is a multiple of the largest power of two in high - low."""
    run, aligned = low >> RUN_BITS, low & (RUN - 1) == 0
    if aligned and high - low >= RUN:
        runs = [reader.run(n) for n in range(run, high >> RUN_BITS)]
        edge = Peaks.restore(runs, [])
        _walk(reader, edge, high & -RUN, high)
    else:
        edge = Peaks()
        _walk(reader, edge, low, high)
    return edge.root()


def _walk(reader: HashReader, edge: Peaks, low: int, high: int) -> None:
    """Append leaves low <= i < high; over a gap, the roots of its subtrees. One that is not wholly inside is asked for
    by its first leaf, which is not there."""
    gaps = getattr(reader, "gaps", None)
    for start, level, hash in gaps(low, high) if gaps and low < high else ():
        if start < low or start + (1 << level) > high:
            break
        edge.extend([reader.leaf(i) for i in range(low, start)])
        edge.skip(level, hash)
        low = start + (1 << level)
    edge.extend([reader.leaf(i) for i in range(low, high)])


# ---- checking proofs ------------------------------------------------------------------------------------------------


def check_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Whether `proof` leads from `leaf` at `index` to `root` of a tree of `size`.

    Raises Malformed (E_PROOF) for what cannot be a proof: index outside, wrong number or length of hashes.
    """
    if not 0 <= index < size:
        raise _malformed(f"leaf {index} is not in a tree of {size}")
    _hashes(leaf, root, *proof)
    inner = (index ^ (size - 1)).bit_length()  # below this height the path may turn either way, above it only right
    border = (index >> inner).bit_count()
    if len(proof) != inner + border:
        raise _malformed(f"{len(proof)} hashes where {inner + border} are asked")
    here = leaf
    for height, other in enumerate(proof[:inner]):
        here = node(other, here) if index >> height & 1 else node(here, other)
    for other in proof[inner:]:
        here = node(other, here)
    return here == root


def check_consistency(old: int, new: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Whether `proof` shows the tree of `old` leaves (root `old_root`) to be the beginning of that of `new`.

    Raises Malformed (E_PROOF) for what cannot be a proof: sizes in the wrong order, wrong number or length of hashes.
    """
    if not 0 <= old <= new:
        raise _malformed(f"a tree of {old} is not the beginning of one of {new}")
    _hashes(old_root, new_root, *proof)
    if old in (0, new):
        if proof:
            raise _malformed("no hash is asked between these sizes")
        return old_root == (EMPTY if old == 0 else new_root) and (new > 0 or new_root == EMPTY)
    shift = (old & -old).bit_length() - 1  # the last full subtree of the old tree is this high
    index = (old - 1) >> shift
    inner = (index ^ ((new - 1) >> shift)).bit_length()
    border = (index >> inner).bit_count()
    known = old == 1 << shift  # then the old root is itself the node to start at
    if len(proof) != inner + border + (not known):
        raise _malformed(f"{len(proof)} hashes where {inner + border + (not known)} are asked")
    start, path = (old_root, proof) if known else (proof[0], proof[1:])
    before = after = start
    for height, other in enumerate(path[:inner]):
        if index >> height & 1:
            before, after = node(other, before), node(other, after)
        else:
            after = node(after, other)
    for other in path[inner:]:
        before, after = node(other, before), node(other, after)
    return before == old_root and after == new_root


def _hashes(*hashes: bytes) -> None:
    for hash in hashes:
        if len(hash) != HASH_SIZE:
            raise _malformed(f"a hash of {len(hash)} bytes")


def _malformed(why: str) -> Malformed:
    return Malformed(f"This is not a proof: {why}.", finding="E_PROOF")
