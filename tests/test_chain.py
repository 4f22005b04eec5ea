"""Linking: what is written follows what stands, or is not written; and the frozen bytes of FORMAT.md."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amends.runtime.openings import spread, whole
from amends.runtime.values import encode
from amends.store.chain import Chain, Draft, Spoiled
from amends.store.clock import Now
from amends.store.entry import LINE_MAX, ZERO, Entry, leaf, line_of, parse, parse_opening
from amends.store.errors import BadValue, Damaged, Illegal, Refused
from amends.store.fold import NoView
from amends.store.log import Record
from amends.store.merkle import Peaks, check_consistency, check_inclusion, consistency_proof, inclusion_proof, root_at
from amends.store.note import open_note, parse_checkpoint, sign_note
from amends.store.squeeze import unshut

FROZEN = Path(__file__).parent / "vectors" / "format.json"
NOW = Now(1_764_460_800_000_000, 1, 1000, 0)


def opened(saga: str = "s", **more: Any) -> Draft:
    return Draft("saga.opened", {"saga": saga, "fence": 1, **more})


def step(saga: str = "s", *openings: bytes) -> Draft:
    return Draft("step.done", {"saga": saga, "step": 1}, openings)


def decides(*drafts: Draft) -> Any:
    return lambda view, now: drafts


def refuses(view: Any, now: Now) -> Any:
    raise Refused("no")


class Picky(NoView):
    """Objects to one kind."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def fold(self, entry: Entry, lived: int) -> None:
        if entry.kind == "never.allowed":
            raise Illegal("never")
        self.seen.append(entry.kind)


def begun(view: Any = None) -> Chain:
    """A chain with its genesis."""
    chain = Chain(view or NoView())
    taken(chain, decides(Draft("log.opened", {"v": 1})))
    return chain


def taken(chain: Chain, *decisions: Any, now: Now = NOW) -> tuple[list[Any], list[Any]]:
    rows, answers = chain.take([(decide, place) for place, decide in enumerate(decisions)], now)
    return rows, [answer for _, answer in answers]


# ---- linking --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.2")
def test_each_entry_names_the_hash_of_the_one_before() -> None:
    chain = Chain(NoView())
    rows, _ = taken(chain, decides(Draft("log.opened", {"v": 1}), opened(), step("s", b'{"result":1}')))
    before = ZERO
    for seq, row in enumerate(rows):
        assert (row.entry.seq, row.entry.prev) == (seq, before)
        assert parse(row.line) == row.entry and row.hash == leaf(row.line)
        before = row.hash.hex()
    assert (chain.size, chain.prev) == (3, before)
    edge = Peaks()
    edge.extend([row.hash for row in rows])
    assert chain.tree.root() == edge.root()


def test_what_a_draft_opens_is_committed_and_salted_and_an_entry_without_has_a_salt() -> None:
    rows, _ = taken(begun(), decides(opened(), step("s", b'{"result":1}', b'{"approver":"Ada"}')))
    assert rows[0].entry.salt and not rows[0].entry.c and rows[0].blob is None
    lines = rows[1].blob.splitlines(keepends=True)
    assert [parse_opening(line) for line in lines] == [{"result": 1}, {"approver": "Ada"}]
    assert tuple(sha256(line).hexdigest() for line in lines) == rows[1].entry.c and not rows[1].entry.salt
    assert lines[0][2:24] != lines[1][2:24]


def many(count: int, kind: str = "step.done", **fields: Any) -> Draft:
    """A draft with that many openings."""
    return Draft(kind, {"saga": "s", "step": 1, **fields}, tuple(b'{"at":%d}' % n for n in range(count)))


@pytest.mark.promise("1.18")
@pytest.mark.parametrize(("count", "sizes"), [(32, [32]), (33, [1, 32]), (64, [32, 32]), (70, [32, 6, 32])])
def test_a_fact_with_many_openings_is_told_in_parts_and_seen_once(count: int, sizes: list[int]) -> None:
    view = Picky()
    rows, _ = taken(begun(view), decides(opened(), many(count), step()))
    parts = rows[1:-1]
    assert [len(row.entry.c) for row in parts] == sizes
    if len(sizes) > 1:
        assert [row.entry.part for row in parts] == [(i, len(sizes)) for i in range(1, len(sizes) + 1)]
    assert [row.entry.step for row in parts] == [0] * (len(sizes) - 1) + [1]
    assert [row.entry.n for row in rows] == list(range(1, len(rows) + 1))
    told = [line for row in (parts[-1], *parts[:-1]) for line in row.blob.splitlines(keepends=True)]
    assert [parse_opening(line) for line in told] == [{"at": n} for n in range(count)]
    assert view.seen == ["log.opened", "saga.opened", "step.done", "step.done"]


def test_a_saga_ends_with_the_last_part_and_begins_in_one() -> None:
    chain = begun()
    taken(chain, decides(opened()))
    rows, _ = taken(chain, decides(many(70, "saga.ended")))
    assert len(rows) == 3 and not chain.threads
    _, [error] = taken(chain, decides(many(33, "saga.opened")))
    assert isinstance(error, BadValue) and chain.size == rows[-1].entry.seq + 1


@pytest.mark.promise("6.2")
@pytest.mark.parametrize("change", ["without the first", "without the middle", "with another between"])
def test_parts_that_are_not_together_are_named(change: str) -> None:
    chain = begun()
    rows, _ = taken(chain, decides(opened(), many(70), step()))
    entries = [row.entry for row in rows]
    parts = {"without the first": [0, 2, 3], "without the middle": [0, 1, 3], "with another between": [0, 1, 4, 2, 3]}
    follower = begun()
    with pytest.raises(Damaged, match="part"):
        for n, place in enumerate(parts[change], 1):
            entry = msgspec.structs.replace(entries[place], seq=follower.size, prev=follower.prev, n=n)
            follower.follow(entry, line_of(entry))


def test_equal_contents_have_unequal_commitments() -> None:
    rows, _ = taken(begun(), decides(opened(), step("s", b"{}"), step("s", b"{}")))
    assert rows[1].entry.c != rows[2].entry.c


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20))
def test_time_in_the_log_only_grows_however_the_wall_is_stepped(steps: list[int]) -> None:
    chain, at = begun(), NOW.at
    times = [chain.at]
    for by in steps:
        at += by
        rows, _ = taken(chain, decides(Draft("x.y", {}), Draft("x.y", {})), now=NOW._replace(at=at))
        times += [row.entry.at for row in rows]
    assert times == sorted(set(times)) and times[0] == NOW.at


@pytest.mark.promise("6.2")
def test_entries_of_a_saga_are_counted_and_point_back() -> None:
    rows, _ = taken(begun(), decides(opened("a"), opened("b"), step("a"), step("b"), step("a")))
    assert [(row.entry.saga, row.entry.n, row.back) for row in rows] == [
        ("a", 1, -1), ("b", 1, -1), ("a", 2, 1), ("b", 2, 2), ("a", 3, 3),
    ]  # fmt: skip


def test_a_refused_decision_leaves_its_neighbours_alone() -> None:
    chain = begun()
    rows, answers = taken(chain, decides(opened("a")), refuses, decides(opened("b")))
    assert [row.entry.saga for row in rows] == ["a", "b"] and chain.size == 3
    assert isinstance(answers[1], Refused)
    assert [entry.seq for entry in answers[0] + answers[2]] == [1, 2]


def test_what_is_not_one_of_our_errors_may_have_struck_anywhere_and_spoils_the_fold() -> None:
    """A signal handler's exception may strike between a saga's count and the head; only a new fold is sure."""

    def struck(view: Any, now: Now) -> Any:
        raise ZeroDivisionError

    with pytest.raises(Spoiled) as spoiled:
        taken(begun(), struck)
    assert isinstance(spoiled.value.error, ZeroDivisionError)


@pytest.mark.parametrize(
    "illegal",
    [
        decides(Draft("log.opened", {"v": 1})),
        decides(step("unknown")),
        decides(Draft("never.allowed", {})),
        decides(opened("open")),
        decides(Draft("x.y", {"tool": 'say "hi"'})),
        decides(Draft("x.y", {"tool": "t" * 300})),
        decides(Draft("x.y", {"use": {f"{place:03}" + "m" * 200: 1 for place in range(LINE_MAX // 200)}})),
    ],
)
def test_what_may_not_follow_is_not_written(illegal: Any) -> None:
    chain = begun(Picky())
    taken(chain, decides(opened("open")))
    before = (chain.size, chain.prev, chain.at, chain.tree.root(), dict(chain.threads))
    _, answers = taken(chain, illegal)
    assert isinstance(answers[0], Illegal | BadValue)
    assert (chain.size, chain.prev, chain.at, chain.tree.root(), chain.threads) == before
    rows, _ = taken(chain, decides(step("open")))
    assert rows[0].entry.prev == before[1]


def test_a_decision_that_is_half_folded_when_refused_is_named() -> None:
    bad = decides(opened(), Draft("never.allowed", {}))
    with pytest.raises(Spoiled) as spoiled:
        begun(Picky()).take([(decides(opened("a")), 0), (bad, 1)], NOW)
    assert spoiled.value.place == 1 and isinstance(spoiled.value.error, Illegal)


def test_nothing_follows_the_end_of_a_saga() -> None:
    chain = begun()
    taken(chain, decides(opened(), Draft("saga.ended", {"saga": "s", "out": "committed"})))
    _, answers = taken(chain, decides(step()))
    assert isinstance(answers[0], Illegal) and chain.size == 3 and not chain.threads


# ---- following ------------------------------------------------------------------------------------------------------


def written() -> list[Any]:
    genesis = Draft("log.opened", {"v": 1})
    rows, _ = taken(Chain(NoView()), decides(genesis, opened("a"), step("a", b"{}"), opened("b"), step("a"), step("b")))
    return rows


def follow(rows: list[Any], view: Any = None) -> Chain:
    chain = Chain(view or NoView())
    chain.tree.extend([chain.follow(parse(row.line), row.line) for row in rows])
    return chain


def test_who_follows_stands_where_the_writer_stood() -> None:
    rows = written()
    writer, reader = Chain(NoView()), follow(rows)
    for row in rows:
        writer.follow(row.entry, row.line)
    assert reader.dump() == writer.dump() and reader.prev == rows[-1].hash.hex()
    again = Chain(NoView())
    again.load(reader.dump())
    assert (again.size, again.prev, again.at, again.threads) == (reader.size, reader.prev, reader.at, reader.threads)


@pytest.mark.promise("6.2")
@pytest.mark.parametrize("change", ["swap", "drop", "double", "first"])
def test_a_reordered_cut_or_doubled_entry_is_named(change: str) -> None:
    rows = written()
    changed = {
        "swap": [*rows[:2], rows[3], rows[2], *rows[4:]],
        "drop": [*rows[:2], *rows[3:]],
        "double": [*rows[:3], rows[2], *rows[3:]],
        "first": rows[1:],
    }[change]
    with pytest.raises(Damaged) as damaged:
        follow(changed)
    assert damaged.value.facts["seq"] == {"swap": 2, "drop": 2, "double": 3, "first": 0}[change]


@pytest.mark.promise("6.2")
def test_an_edited_entry_is_named_by_the_next_one() -> None:
    rows = written()
    entry = parse(rows[2].line.replace(b'"step":1', b'"step":2'))
    chain = follow(rows[:2])
    chain.follow(entry, line_of(entry))
    with pytest.raises(Damaged) as damaged:
        chain.follow(rows[3].entry, rows[3].line)
    assert damaged.value.facts["seq"] == 3


def test_a_rehashed_entry_out_of_order_in_its_saga_is_named() -> None:
    rows = written()
    chain = follow(rows[:5])
    forged = Entry(5, chain.prev, chain.at + 1, "step.done", saga="b", n=9, salt="A" * 22)
    with pytest.raises(Damaged) as damaged:
        chain.follow(forged, line_of(forged))
    assert damaged.value.facts["seq"] == 5


# ---- the frozen bytes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frozen() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(FROZEN.read_text())
    return told


@pytest.fixture(scope="module")
def lines(frozen: dict[str, Any]) -> list[bytes]:
    """All 520 lines: those told, then those told by rule."""
    lines = [told["line"].encode() for told in frozen["entries"]]
    for seq in range(len(lines), 520):
        salt = base64.urlsafe_b64encode(sha256(b"entry %d" % seq).digest()).decode()[:22]
        at = 1_764_460_800_000_000 + 1000 * seq
        lines.append(line_of(Entry(seq, leaf(lines[-1]).hex(), at, "clock.stepped", up=(1, seq), salt=salt)))
    return lines


class Reader:
    def __init__(self, lines: list[bytes]) -> None:
        self.hashes = [leaf(line) for line in lines]

    def leaf(self, i: int) -> bytes:
        return self.hashes[i]

    def run(self, n: int) -> bytes:
        edge = Peaks()
        edge.extend(self.hashes[n * 256 : n * 256 + 256])
        return edge.root()


def test_the_frozen_bytes_are_what_the_page_says() -> None:
    maker = FROZEN.with_name("make_format.py")
    assert subprocess.run([sys.executable, maker, "--check"], check=False).returncode == 0


@pytest.mark.promise("6.2")
def test_every_frozen_line_is_read_and_written_to_the_byte(frozen: dict[str, Any]) -> None:
    for told in frozen["entries"]:
        line = told["line"].encode()
        entry = parse(line)
        assert line_of(entry) == line and leaf(line).hex() == told["h"]
        assert [sha256(opening.encode()).hexdigest() for opening in told["openings"]] == list(entry.c)
        assert all(parse_opening(opening.encode()) for opening in told["openings"])


@pytest.mark.promise("6.2")
def test_the_frozen_log_has_the_frozen_roots_runs_and_proofs(frozen: dict[str, Any], lines: list[bytes]) -> None:
    chain, reader = Chain(NoView()), Reader(lines)
    for size in range(len(lines) + 1):
        if str(size) in frozen["roots"]:
            assert chain.tree.root().hex() == root_at(reader, size).hex() == frozen["roots"][str(size)]
        if size < len(lines):
            chain.tree.extend([chain.follow(parse(lines[size]), lines[size])])
    assert [(n, root.hex()) for n, root in chain.tree.runs] == list(enumerate(frozen["runs"]))
    assert len(frozen["roots"]) > 40
    for told in frozen["inclusion"]:
        index, size, proof = told["index"], told["size"], [bytes.fromhex(hash) for hash in told["proof"]]
        assert inclusion_proof(reader, index, size) == proof
        assert check_inclusion(reader.leaf(index), index, size, proof, root_at(reader, size))
    for told in frozen["consistency"]:
        old, new, proof = told["old"], told["new"], [bytes.fromhex(hash) for hash in told["proof"]]
        assert consistency_proof(reader, old, new) == proof
        assert check_consistency(old, new, root_at(reader, old), root_at(reader, new), proof)


@pytest.mark.promise("6.2")
def test_the_frozen_checkpoint_is_signed_and_opened_to_the_byte(frozen: dict[str, Any], lines: list[bytes]) -> None:
    told = frozen["checkpoint"]
    note = open_note(told["note"].encode(), [told["vkey"]])
    head = parse_checkpoint(note.body)
    assert head == (frozen["origin"], 300, root_at(Reader(lines), 300)) and note.body == told["body"].encode()
    assert sign_note(note.body, frozen["origin"], bytes.fromhex(frozen["seed"])) == told["note"].encode()


@pytest.mark.promise("1.18")
def test_a_frozen_fact_in_parts_is_followed_and_read_in_its_order(frozen: dict[str, Any]) -> None:
    chain, records = Chain(NoView()), []
    for told in frozen["parts"]:
        entry, line = parse(told["line"].encode()), told["line"].encode()
        assert chain.follow(entry, line).hex() == told["h"] and line_of(entry) == line
        assert [sha256(opening.encode()).hexdigest() for opening in told["openings"]] == list(entry.c)
        records.append(Record(entry, line, "".join(told["openings"]).encode() or None))
    [one] = [record for record in whole(records) if record.entry.part]
    assert one.entry.tool == "file.put"
    assert [parse_opening(line) for line in one.blob.splitlines(True)] == [{"at": n} for n in range(34)]  # type: ignore


@pytest.mark.promise("1.18")
def test_a_frozen_large_value_is_cut_as_the_page_says(frozen: dict[str, Any]) -> None:
    told = frozen["large"]
    first, *chunks = spread((b'{"args":' + encode("x" + "é" * 150_000) + b"}",))
    assert first == b'{"args":' + told["manifest"].encode() + b"}"
    assert [len(json.loads(chunk)["chunk"].encode()) for chunk in chunks] == told["sizes"]
    assert [sha256(chunk).hexdigest() for chunk in chunks] == told["bodies"]


@pytest.mark.promise("6.2")
def test_the_frozen_cell_is_read(frozen: dict[str, Any]) -> None:
    assert unshut(bytes.fromhex(frozen["cell"]["cell"])) == frozen["cell"]["plain"].encode()


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="sha256sum is not here")
def test_plain_tools_compute_the_same_hashes(frozen: dict[str, Any], lines: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "E").write_bytes(b"".join(lines))
    (tmp_path / "O").write_text(frozen["entries"][4]["openings"][0])
    shell = ["/bin/sh", "-c", "(printf '\\0'; sed -n 45p E) | sha256sum; sha256sum < O"]
    out = subprocess.run(shell, cwd=tmp_path, check=True, capture_output=True, env=os.environ).stdout.split()
    assert out[0].decode() == leaf(lines[44]).hex() and out[2].decode() == parse(lines[4]).c[0]


def test_the_example_on_the_page_is_a_vector(frozen: dict[str, Any]) -> None:
    page = (Path(__file__).parents[1] / "store" / "FORMAT.md").read_text(encoding="utf-8")
    told = frozen["entries"][4]
    for part in (told["line"], told["openings"][0], told["h"], frozen["checkpoint"]["note"]):
        assert part in page


def table_of_kinds() -> dict[str, set[str]]:
    page = (Path(__file__).parents[1] / "store" / "FORMAT.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.split("## 6.")[1].split("## 7.")[0].splitlines() if line.startswith("| `")]
    bare = str.maketrans("`()", "   ")
    return {row[1].strip(" `"): set(row[3].split("[")[0].translate(bare).split()) for row in rows}


def test_every_kind_on_the_page_has_a_vector_that_keeps_to_its_keys(frozen: dict[str, Any]) -> None:
    allowed, seen = table_of_kinds(), set()
    for told in frozen["entries"]:
        entry = json.loads(told["line"])
        common = {"seq", "prev", "at", "kind", "salt", "c"} | ({"saga", "n", "fence"} if "saga" in entry else set())
        assert set(entry) - common <= allowed[entry["kind"]], entry["kind"]
        seen.add(entry["kind"])
    assert seen == set(allowed)


def test_every_key_of_an_entry_is_on_the_page() -> None:
    page = (Path(__file__).parents[1] / "store" / "FORMAT.md").read_text(encoding="utf-8")
    named = {word for piece in page.split("`")[1::2] for word in piece.split()}
    assert set(Entry.__struct_fields__) <= named
