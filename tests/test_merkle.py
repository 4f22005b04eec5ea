"""The tree: the same entries give the same root, and a proof shows it, by the published vectors and by property."""

from __future__ import annotations

import base64
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amends.store.errors import Malformed
from amends.store.merkle import (
    EMPTY,
    RUN,
    Peaks,
    check_consistency,
    check_inclusion,
    consistency_proof,
    inclusion_proof,
    node,
    root_at,
)
from amends.store.note import open_note, parse_checkpoint

VECTORS = Path(__file__).parents[1].parent / "shared" / "vectors"


def published(name: str) -> str:
    if not (VECTORS / name).exists():
        pytest.skip(f"published vectors {name} are not here")
    return (VECTORS / name).read_text()


def leaf(data: bytes) -> bytes:
    return sha256(b"\0" + data).digest()


def by_definition(hashes: list[bytes]) -> bytes:
    """RFC 6962 section 2.1, word for word."""
    if not hashes:
        return sha256(b"").digest()
    if len(hashes) == 1:
        return hashes[0]
    k = 1
    while k * 2 < len(hashes):
        k *= 2
    return sha256(b"\1" + by_definition(hashes[:k]) + by_definition(hashes[k:])).digest()


class Leaves:
    """A reader over a list that notes what was asked."""

    def __init__(self, hashes: list[bytes]) -> None:
        self.hashes, self.asked = hashes, 0

    def leaf(self, i: int) -> bytes:
        self.asked += 1
        return self.hashes[i]

    def run(self, n: int) -> bytes:
        self.asked += 1
        run = self.hashes[n * RUN : (n + 1) * RUN]
        assert len(run) == RUN
        return by_definition(run)


MANY = [leaf(b"%d" % i) for i in range(1300)]
SIZES = [0, 1, 2, 3, 7, 8, 9, 255, 256, 257, 511, 512, 513, 767, 768, 1024, 1025, 1300]


def edge(hashes: list[bytes]) -> Peaks:
    peaks = Peaks()
    peaks.extend(hashes)
    return peaks


# ---- published vectors ----------------------------------------------------------------------------------------------


@pytest.mark.promise("6.2")
def test_roots_are_those_of_rfc_6962() -> None:
    known = json.loads(published("rfc6962-tree8.json"))
    hashes = [leaf(bytes.fromhex(data)) for data in known["inputs_hex"]]
    assert EMPTY.hex() == known["empty_root"] and leaf(b"").hex() == known["empty_leaf"]
    assert node(known["node"]["l"].encode(), known["node"]["r"].encode()).hex() == known["node"]["hash"]
    assert leaf(known["leaf"]["input"].encode()).hex() == known["leaf"]["hash"]
    for size, root in enumerate(known["roots_hex"], 1):
        assert edge(hashes[:size]).root().hex() == root == root_at(Leaves(hashes), size).hex()


def cases(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in published(name).splitlines()]


def unbase64(text: str | None) -> bytes:
    return base64.b64decode(text or "")


def holds(check: Any, *arguments: Any) -> bool:
    try:
        return bool(check(*arguments))
    except Malformed:
        return False


@pytest.mark.promise("6.2")
def test_inclusion_is_judged_as_published() -> None:
    for case in (rows := cases("merkle-inclusion.ndjson")):
        proof = [unbase64(hash) for hash in case["proof"] or []]
        asked = (unbase64(case["leafHash"]), case["leafIdx"], case["treeSize"], proof, unbase64(case["root"]))
        assert holds(check_inclusion, *asked) is not case["wantErr"], case["_path"]
    assert len(rows) == 98


def test_inclusion_in_an_aligned_part_is_judged_as_published() -> None:
    for case in (rows := cases("merkle-subtreeinclusion.ndjson")):
        start, end = case["start"], case["end"]
        aligned = 0 <= start < end and start & ((1 << (end - start - 1).bit_length()) - 1) == 0
        proof = [unbase64(hash) for hash in case["proof"] or []]
        asked = (unbase64(case["leafHash"]), case["leafIdx"] - start, end - start, proof, unbase64(case["root"]))
        assert (aligned and holds(check_inclusion, *asked)) is not case["wantErr"], case["_path"]
    assert len(rows) == 204


# Two "roots" of 12 bytes that are equal: others look no further at equal sizes, we ask for hashes of 32 bytes.
STRICTER = {"testdata/consistency/additional/sizes-are-equal-one-and-proof-is-empty.json"}


@pytest.mark.promise("6.2")
def test_consistency_is_judged_as_published() -> None:
    other = set()
    for case in (rows := cases("merkle-consistency.ndjson")):
        proof = [unbase64(hash) for hash in case["proof"] or []]
        asked = (case["size1"], case["size2"], unbase64(case["root1"]), unbase64(case["root2"]), proof)
        if holds(check_consistency, *asked) is case["wantErr"]:
            other.add(case["_path"])
            assert not case["wantErr"], "more lenient than published"
    assert other == STRICTER and len(rows) == 98


@pytest.mark.promise("6.2")
def test_the_signed_heads_of_another_log_are_recomputed_and_consistent() -> None:
    log = json.loads(published("tessera-log15.json"))
    files = {name: base64.b64decode(data) for name, data in log["files_b64"].items()}
    reader = Leaves([leaf(data.encode()) for data in log["leaves"]])
    assert b"".join(reader.hashes) == files["tile/0/000.p/15"]
    heads = [parse_checkpoint(open_note(files[f"checkpoint.{size}"], [log["vkey"]]).body) for size in range(16)]
    for new in heads:
        assert new.root == root_at(reader, new.size) == edge(reader.hashes[: new.size]).root()
        for old in heads[: new.size + 1]:
            proof = consistency_proof(reader, old.size, new.size)
            assert check_consistency(old.size, new.size, old.root, new.root, proof)
            if 0 < old.size < new.size:
                assert not check_consistency(old.size, new.size, EMPTY, new.root, proof)
                assert not check_consistency(old.size, new.size, old.root, EMPTY, proof)


# ---- the growing edge -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_edge_reader_and_definition_agree(size: int) -> None:
    assert edge(MANY[:size]).root() == by_definition(MANY[:size]) == root_at(Leaves(MANY), size)


@given(st.lists(st.integers(0, 300), max_size=8))
def test_it_does_not_matter_in_which_pieces_leaves_arrive(pieces: list[int]) -> None:
    peaks, size = Peaks(), 0
    for piece in pieces:
        peaks.extend(MANY[size : size + piece])
        size = min(len(MANY), size + piece)
    assert (peaks.size, peaks.root()) == (size, by_definition(MANY[:size]))
    assert [n for n, _ in peaks.runs] == list(range(size // RUN))


@given(st.integers(0, 1300))
def test_an_edge_restored_from_run_roots_grows_like_the_first(size: int) -> None:
    first = edge(MANY[:size])
    again = Peaks.restore([root for _, root in first.runs], MANY[size // RUN * RUN : size])
    assert again.runs == [] and (again.size, again.root()) == (first.size, first.root())
    first.runs.clear()
    for peaks in (first, again):
        peaks.extend(MANY[size:] + MANY[:300])
    assert (first.root(), first.runs) == (again.root(), again.runs)


def test_full_runs_are_told_with_their_place_and_root_until_cleared() -> None:
    peaks = edge(MANY[:600])
    assert peaks.runs == [(0, by_definition(MANY[:256])), (1, by_definition(MANY[256:512]))]
    peaks.runs.clear()
    peaks.extend(MANY[600:800])
    assert peaks.runs == [(2, by_definition(MANY[512:768]))]


def test_a_copy_grows_on_its_own() -> None:
    first = edge(MANY[:255])
    second = first.copy()
    second.extend(MANY[255:300])
    assert (first.size, first.runs, first.root()) == (255, [], by_definition(MANY[:255]))
    assert (second.size, len(second.runs), second.root()) == (300, 1, by_definition(MANY[:300]))


# ---- proofs ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_a_true_proof_holds_and_any_change_to_it_does_not(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 1300))
    index = data.draw(st.integers(0, size - 1))
    reader, root = Leaves(MANY), root_at(Leaves(MANY), size)
    proof = inclusion_proof(reader, index, size)
    assert len(proof) <= 11 and reader.asked <= 2 * RUN + size // RUN
    assert check_inclusion(MANY[index], index, size, proof, root)
    assert not holds(check_inclusion, MANY[index - 1], index, size, proof, root) or size == 1
    assert not holds(check_inclusion, MANY[index], index ^ 1, size, proof, root)
    assert not holds(check_inclusion, MANY[index], index, size, [*proof, EMPTY], root)
    if proof:
        place = data.draw(st.integers(0, len(proof) - 1))
        bit = data.draw(st.integers(0, 255))
        changed = (int.from_bytes(proof[place], "big") ^ 1 << bit).to_bytes(32, "big")
        assert not check_inclusion(MANY[index], index, size, [*proof[:place], changed, *proof[place + 1 :]], root)
        with pytest.raises(Malformed):
            check_inclusion(MANY[index], index, size, proof[:-1], root)
        with pytest.raises(Malformed):
            check_inclusion(MANY[index], index, size, [*proof[:-1], proof[-1][:31]], root)


@settings(max_examples=60)
@given(st.integers(0, 1300), st.integers(0, 1300), st.integers(0, 10), st.integers(0, 255))
def test_growth_is_shown_and_a_rewritten_past_is_not(a: int, b: int, place: int, bit: int) -> None:
    old, new = sorted((a, b))
    reader = Leaves(MANY)
    before, after = root_at(reader, old), root_at(reader, new)
    proof = consistency_proof(reader, old, new)
    assert check_consistency(old, new, before, after, proof)
    if 0 < old < new:
        other = edge([*MANY[: old - 1], leaf(b"rewritten")]).root()
        assert not check_consistency(old, new, other, after, proof)
        place %= len(proof)
        changed = (int.from_bytes(proof[place], "big") ^ 1 << bit).to_bytes(32, "big")
        assert not check_consistency(old, new, before, after, [*proof[:place], changed, *proof[place + 1 :]])
        with pytest.raises(Malformed):
            check_consistency(old, new, before, after, proof[:-1])


def test_what_cannot_be_a_proof_is_malformed() -> None:
    reader = Leaves(MANY)
    for ask in (
        lambda: inclusion_proof(reader, 5, 5),
        lambda: inclusion_proof(reader, -1, 5),
        lambda: consistency_proof(reader, 6, 5),
        lambda: consistency_proof(reader, -1, 5),
        lambda: root_at(reader, -1),
        lambda: check_inclusion(MANY[0], 0, 0, [], EMPTY),
        lambda: check_inclusion(MANY[0], -1, 4, [], EMPTY),
        lambda: check_inclusion(b"", 0, 1, [], b""),
        lambda: check_consistency(0, 0, b"", b"", []),
        lambda: check_consistency(0, 3, EMPTY, EMPTY, [EMPTY]),
        lambda: check_consistency(3, 3, EMPTY, EMPTY, [EMPTY]),
        lambda: check_consistency(-1, 3, EMPTY, EMPTY, []),
    ):
        with pytest.raises(Malformed) as refused:
            ask()
        assert refused.value.facts["finding"] == "E_PROOF"


def test_an_empty_beginning_has_the_empty_root_only() -> None:
    root = root_at(Leaves(MANY), 3)
    assert check_consistency(0, 3, EMPTY, root, [])
    assert not check_consistency(0, 3, root, root, [])
    assert not check_consistency(0, 0, EMPTY, root, [])
    assert not check_consistency(0, 0, root, root, [])
