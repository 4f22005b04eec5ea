"""What is gone from a log, sealed in it, or kept elsewhere: `verify` says no to whatever is not as the log says."""

from __future__ import annotations

import os
import random
import shutil
from typing import Any

import msgspec
import pytest
from disclosing import order
from outsider import Forger, Outsider, Refused, bits, flipped
from test_verify import Tally, build, codes, quiet, saga

from amends import AgentKit
from amends.runtime.state import State
from amends.store import seal, sealing
from amends.store.audit import LEVELS, Terms, verify
from amends.store.compact import compact
from amends.store.entry import leaf, line_of, parse
from amends.store.evidence import Evidence
from amends.store.home import Home
from amends.store.identity import open_log
from amends.store.note import COSIGNATURE, ED25519, Key, cosign, public_of, vkey
from amends.store.redact import redact
from amends.store.seal import Owner
from amends.store.trust import Brought, carried, parse_policy

OWNER = Owner(bytes(range(32)))
ANOTHER = Owner(bytes(range(1, 33)))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A small honest log of ended sagas, and where its anchors lie."""
    folder = tmp_path_factory.mktemp("template")
    was = os.environ.get("AMENDS_ANCHORS")
    os.environ["AMENDS_ANCHORS"] = str(folder / "anchors")
    try:
        build(folder / "home", 60)
    finally:
        os.environ.pop("AMENDS_ANCHORS") if was is None else os.environ.__setitem__("AMENDS_ANCHORS", was)
    return folder


@pytest.fixture
def home(template, tmp_path) -> Home:
    shutil.copytree(template / "home", tmp_path / "home")
    shutil.copytree(template / "anchors", tmp_path / "anchors")
    return Home(tmp_path / "home")


@pytest.fixture
def raw(home):
    raw = Outsider(home.db)
    yield raw
    raw.close()


@pytest.fixture
def forger(home, raw) -> Forger:
    return Forger(home, raw)


def examine(home: Home, **terms: Any) -> Any:
    return verify(home, view_factory=Tally, terms=Terms(**terms))


def found(verdict: Any) -> list[tuple[str, int]]:
    return [(finding.code, finding.seq) for finding in verdict.findings]


def members(forger: Forger, name: str) -> tuple[int, int]:
    """First and last record of a saga; nothing lies between them that is not its own."""
    seqs = [entry.seq for entry in forger.entries() if entry.saga == name]
    assert seqs == list(range(seqs[0], seqs[-1] + 1))
    return seqs[0], seqs[-1]


def with_openings(forger: Forger, name: str, least: int = 1) -> list[int]:
    return [entry.seq for entry in forger.entries() if entry.saga == name and len(entry.c) >= least]


def kept(forger: Forger) -> dict[str, Any]:
    """Everything that may lawfully be gone or shut in one log: two gaps, openings redacted, sealed and forgotten."""
    s1, s3 = members(forger, "s1"), members(forger, "s3n")
    for seq in (s1[0], s1[1] - 2, s3[1]):
        forger.sign(seq)
    plain, sealed = with_openings(forger, "s2", 2)[0], with_openings(forger, "s4", 2)[0]
    forger.redact((plain, 0))
    forger.compact(s1, s3)
    forger.seal(OWNER, ["s4", "s5"])
    forger.forget("s5")
    forger.redact((plain, 1), (sealed, 1))
    forger.append("saga.opened", saga="later", n=1, fence=1)
    forger.saga_rows[forger.size - 1] = (forger.size - 1, "later", forger.size - 1, 1, 0)
    forger.write()
    return {"runs": [s1, s3], "plain": plain, "sealed": sealed}


# ---- what is gone, as the log says ----------------------------------------------------------------------------------


@pytest.mark.promise("6.1")
def test_a_log_with_holes_that_it_explains_is_intact_and_the_holes_are_told(home, forger):
    kept(forger)
    verdict = examine(home)
    assert verdict.exit == 0, verdict.findings
    told = " ".join(verdict.not_proved)
    assert "3 openings held: they were redacted" in told and "sealed and not readable here" in told
    assert "removed records said" in told
    assert verdict.level == "local anchor"
    verdict = examine(home, owners=(OWNER,))
    assert verdict.exit == 0, verdict.findings
    assert verdict.root == forger.root(forger.size).hex()


@pytest.mark.promise("6.1")
def test_every_old_signed_head_is_still_compared_after_records_were_removed(home, forger, raw):
    runs = kept(forger)["runs"]
    assert forger.checkpoints, "no signature lay inside the removed runs"
    for size in forger.checkpoints:
        note = carried("kept", forger.note(size))
        verdict = examine(home, anchors=(note,))
        assert verdict.exit == 0 and verdict.level == "outside anchor", verdict.findings
    inside = next(size for size in range(runs[0][0] + 1, runs[0][1] + 1) if not splits(forger, size))
    verdict = examine(home, anchors=(carried("kept", forger.note(inside)),))
    assert codes(verdict) == ["E_ANCHOR"] and verdict.exit == 3


@pytest.mark.promise("6.1")
def test_an_anchor_that_was_left_behind_inside_a_removed_run_is_said_and_spoils_nothing(home, forger):
    first, last = members(forger, "s3n")
    forger.compact((first, last))
    inside = next(size for size in range(first + 1, last + 1) if not splits(forger, size))
    forger.write()
    stale = noted(forger, inside).anchor(Key(forger.mine.origin, ED25519, forger.mine.log_key))
    newest = noted(forger, forger.size).anchor(Key(forger.mine.origin, ED25519, forger.mine.log_key))
    verdict = verify(home, anchors=(stale, newest), view_factory=Tally)
    assert verdict.exit == 0 and verdict.level == "local anchor", verdict.findings
    verdict = verify(home, anchors=(stale,), view_factory=Tally)
    assert verdict.exit == 0 and verdict.level == "signed"
    assert any("inside a run that was removed" in text for text in verdict.not_proved)


def splits(forger: Forger, size: int) -> bool:
    """Whether a root over so many records can still be computed."""
    return all(not start < size < start + (1 << level) for start, level, _ in forger.stubs)


# ---- fakes ----------------------------------------------------------------------------------------------------------


def cut_without_a_fact(forger: Forger) -> list[str]:
    forger.cut([(with_openings(forger, "s2")[0], 0)])
    return ["E_OPENING_MISSING"]


def fact_without_a_cut(forger: Forger) -> list[str]:
    forger.append("redaction.made", places=((with_openings(forger, "s2")[0], 0),), basis="x")
    return ["E_REDACT_INCOMPLETE"]


def redacted_twice(forger: Forger) -> list[str]:
    seq = with_openings(forger, "s2")[0]
    forger.redact((seq, 0))
    forger.append("redaction.made", places=((seq, 0),), basis="x")
    return ["E_ILLEGAL"]


def redacted_what_never_was(forger: Forger) -> list[str]:
    forger.append("redaction.made", places=((with_openings(forger, "s2")[0], 9),), basis="x")
    return ["E_ILLEGAL"]


def redacted_what_comes_later(forger: Forger) -> list[str]:
    forger.append("redaction.made", places=((forger.size + 5, 0),), basis="x")
    return ["E_ILLEGAL"]


def redacted_a_control_record(forger: Forger) -> list[str]:
    seq = forger.append("switch.set", b'{"reason":"stop"}', level=1)
    forger.redact((seq, 0))
    return ["E_ILLEGAL"]


def redacted_a_votes_proof(forger: Forger) -> list[str]:
    seq = forger.append("vote.cast", b'{"proof":{}}', credential="k", of="s2", out="approve")
    forger.redact((seq, 0))
    return ["E_ILLEGAL"]


def redacted_a_redaction(forger: Forger) -> list[str]:
    first = forger.append("redaction.made", b'{"by":"ada"}', places=((with_openings(forger, "s2")[0], 0),), basis="x")
    forger.cut([(with_openings(forger, "s2")[0], 0)])
    forger.redact((first, 0))
    return ["E_ILLEGAL"]


def redacted_under_a_hold(forger: Forger) -> list[str]:
    forger.append("hold.placed", target="s2")
    forger.redact((with_openings(forger, "s2")[0], 0))
    return ["E_ILLEGAL"]


def redacted_under_a_hold_on_everything(forger: Forger) -> list[str]:
    forger.append("hold.placed")
    forger.redact((with_openings(forger, "s2")[0], 0))
    return ["E_ILLEGAL"]


def compacted_under_a_hold_on_everything(forger: Forger) -> list[str]:
    forger.append("hold.placed")
    forger.compact(members(forger, "s1"))
    return ["E_ILLEGAL"]


def forgotten_under_a_hold(forger: Forger) -> list[str]:
    forger.seal(OWNER, ["s2"])
    forger.append("hold.placed", target="s2")
    forger.forget("s2")
    return ["E_ILLEGAL"]


def gap_without_a_fact(forger: Forger) -> list[str]:
    forger.remove([members(forger, "s1")])
    return ["E_GAP"]


def gap_without_stubs(forger: Forger) -> list[str]:
    forger.compact(members(forger, "s1"))
    forger.stubs.clear()
    forger.checkpoints.clear()
    return ["E_GAP"]


def gap_larger_than_the_fact(forger: Forger) -> list[str]:
    one, two = members(forger, "s1"), members(forger, "s2")
    forger.remove([(one[0], two[1])])
    forger.append("compaction.made", runs=(one,), count=one[1] - one[0] + 1, cert="ab" * 32)
    return ["E_GAP"]


def gap_smaller_than_the_fact(forger: Forger) -> list[str]:
    one, two = members(forger, "s1"), members(forger, "s2")
    forger.remove([one])
    forger.append("compaction.made", runs=((one[0], two[1]),), count=two[1] - one[0] + 1, cert="ab" * 32)
    return ["E_COMPACT_INCOMPLETE"]


def fact_without_a_gap(forger: Forger) -> list[str]:
    one = members(forger, "s1")
    forger.append("compaction.made", runs=(one,), count=one[1] - one[0] + 1, cert="ab" * 32)
    return ["E_COMPACT_INCOMPLETE"]


def compacted_twice(forger: Forger) -> list[str]:
    one = members(forger, "s1")
    forger.compact(one)
    forger.append("compaction.made", runs=(one,), count=one[1] - one[0] + 1, cert="ab" * 32)
    return ["E_ILLEGAL"]


def counted_wrong(forger: Forger) -> list[str]:
    one = members(forger, "s1")
    forger.remove([one])
    forger.append("compaction.made", runs=(one,), count=1, cert="ab" * 32)
    return ["E_ILLEGAL"]


def the_first_record_removed(forger: Forger) -> list[str]:
    forger.compact((0, members(forger, "s1")[1]))
    return ["E_STUB"]


def half_a_saga_removed(forger: Forger) -> list[str]:
    first, last = members(forger, "s1")
    forger.compact((first + 1, last - 1))
    return ["E_ORDINAL"]


def a_sagas_beginning_removed(forger: Forger) -> list[str]:
    first, last = members(forger, "s1")
    forger.remove([(first, last - 1)])
    forger.append("compaction.made", runs=((first, last - 1),), count=last - first, cert="ab" * 32)
    return ["E_ENDED"]


def a_stub_flipped(forger: Forger) -> list[str]:
    forger.compact(members(forger, "s1"))
    start, level, hash = forger.stubs[0]
    forger.stubs[0] = (start, level, flipped(hash, 5))
    return ["E_STUB"]


def a_stub_missing(forger: Forger) -> list[str]:
    forger.compact(members(forger, "s1"))
    del forger.stubs[-1]
    return ["E_GAP"]


def a_stub_over_records(forger: Forger) -> list[str]:
    forger.stubs.append((20, 0, forger.hashes[20]))
    return ["E_STUB"]


def a_stub_at_no_place(forger: Forger) -> list[str]:
    forger.compact(members(forger, "s1"))
    start, level, hash = next(stub for stub in forger.stubs)
    forger.stubs[0] = (start, level + 1, hash)
    return ["E_STUB"]


def a_stub_past_the_end(forger: Forger) -> list[str]:
    forger.stubs.append((forger.size, 0, bytes(32)))
    return ["E_GAP"]


def an_old_signature_altered(forger: Forger) -> list[str]:
    forger.sign(members(forger, "s1")[0] + 2)
    forger.compact(members(forger, "s1"))
    size = min(forger.checkpoints)
    forger.checkpoints[size] = flipped(forger.checkpoints[size], 700)
    return ["E_SIGNATURE"]


def an_old_signature_over_too_many(forger: Forger) -> list[str]:
    forger.checkpoints[forger.size + 10] = bytes(96)
    return ["E_STUB"]


def a_sealed_opening_cut(forger: Forger) -> list[str]:
    forger.seal(OWNER, ["s2"])
    forger.cut([(with_openings(forger, "s2", 2)[0], 1)])
    return ["E_OPENING_MISSING"]


def a_sealed_cell_cut_short(forger: Forger) -> list[str]:
    forger.seal(OWNER, ["s2"])
    seq = with_openings(forger, "s2", 2)[0]
    forger.rows[seq][2] = forger.rows[seq][2][:-3]
    return ["E_OPENING"]


def a_sealed_opening_of_no_commitment(forger: Forger) -> list[str]:
    forger.seal(OWNER, ["s2"])
    seq = with_openings(forger, "s2")[0]
    *parts, last = seal.parts(forger.rows[seq][2])
    forger.rows[seq][2] = seal.join([*parts, last, last._replace(place=31)])
    return ["E_OPENING_EXTRA"]


def a_sagas_key_gone(forger: Forger) -> list[str]:
    forger.seal(OWNER, ["s2", "s4"])
    del forger.keys["s4"]
    return ["E_KEY_MISSING"]


def a_forgotten_key_still_there(forger: Forger) -> list[str]:
    forger.seal(OWNER, ["s2", "s4"])
    key = forger.keys["s4"]
    forger.forget("s4")
    forger.keys["s4"] = key
    return ["E_REDACT_INCOMPLETE"]


def a_key_under_a_stranger(forger: Forger) -> list[str]:
    forger.seal(OWNER, ["s2", "s4"])
    forger.keys["s4"] = (ANOTHER.id, forger.keys["s4"][1])
    return ["E_CIPHERTEXT"]


FAKES = [
    cut_without_a_fact, fact_without_a_cut, redacted_twice, redacted_what_never_was, redacted_what_comes_later,
    redacted_a_control_record, redacted_a_votes_proof,
    redacted_a_redaction, redacted_under_a_hold, redacted_under_a_hold_on_everything,
    compacted_under_a_hold_on_everything, forgotten_under_a_hold, gap_without_a_fact, gap_without_stubs,
    gap_larger_than_the_fact, gap_smaller_than_the_fact, fact_without_a_gap, compacted_twice, counted_wrong,
    the_first_record_removed, half_a_saga_removed, a_sagas_beginning_removed, a_stub_flipped, a_stub_missing,
    a_stub_over_records, a_stub_at_no_place, a_stub_past_the_end, an_old_signature_altered,
    an_old_signature_over_too_many, a_sealed_opening_cut, a_sealed_cell_cut_short, a_sealed_opening_of_no_commitment,
    a_sagas_key_gone, a_forgotten_key_still_there, a_key_under_a_stranger,
]  # fmt: skip


@pytest.mark.promise("6.2")
@pytest.mark.parametrize("fake", FAKES, ids=lambda fake: fake.__name__)
def test_a_fake_is_called_by_its_name_though_the_key_signed_it(home, forger, fake):
    """Each is written with the device's key, so that no signature tells."""
    assert examine(home).exit == 0
    expected = fake(forger)
    forger.write()
    verdict = examine(home)
    print(*verdict.findings, sep="\n")
    assert set(expected) <= set(codes(verdict)), verdict.findings
    assert verdict.exit == 1
    assert len(verdict.findings) <= 3, "one finding a fault, and what it broke"


@pytest.mark.promise("6.1")
def test_what_our_own_writers_take_away_and_shut_is_explained(tmp_path):
    """The file is written by a device that redacts, compacts, seals, forgets, and never by hand."""
    kit = AgentKit("shop", home=tmp_path / "home")
    for number in range(140):
        with kit.transaction(f"read-{number}"):
            pass
    order(kit, "order-1")
    order(kit, "order-2")
    log = kit.log
    sagas = [row.saga for row in reversed(log.sagas())]
    seq = next(entry.seq for entry, _ in log.lines() if entry.saga == sagas[-1] and entry.c)
    redact(log, [(seq, 0)], basis="GDPR-17", by="ada")
    log.vault.offer(OWNER)
    sealing.begin(log, OWNER, "ada")
    sealing.finish(log)
    sealing.forget(log, [sagas[-2]], "ada", "asked for")
    log.sign_head()
    removed = compact(log, sagas[:10], within_ms=1, use=lambda records: {})
    gone = sum(last - first + 1 for entry, _ in log.lines() for first, last in entry.runs)
    assert gone, f"nothing was removed: {removed}"
    log.sign_head()
    kit.close()
    for owners in ((), (OWNER,)):
        verdict = verify(Home(tmp_path / "home"), view_factory=State, terms=Terms(owners=owners))
        assert verdict.exit == 0 and verdict.level == "local anchor", verdict.findings
        told = " ".join(verdict.not_proved)
        assert "1 openings held: they were redacted" in told and "their sagas were destroyed" in told
        assert f"What {gone} removed records said" in told
        assert bool(owners) != ("not readable here" in told)


# ---- under seal -----------------------------------------------------------------------------------------------------


def shut(forger: Forger) -> tuple[int, int]:
    """Two sagas sealed; two of their records that each hold one opening."""
    forger.seal(OWNER, ["s2", "s4"])
    return with_openings(forger, "s2")[0], with_openings(forger, "s2")[1]


@pytest.mark.promise("6.1")
def test_without_the_key_what_is_sealed_is_counted_and_whoever_demands_it_hears_no(home, forger):
    shut(forger)
    forger.write()
    sealed = sum(len(seal.parts(row[2])) for row in forger.rows.values() if seal.is_sealed(row[2]))
    verdict = examine(home)
    assert verdict.exit == 0 and any(f"What {sealed} openings hold" in text for text in verdict.not_proved)
    verdict = examine(home, require=("openings",))
    assert codes(verdict) == ["E_REQUIRED"] and verdict.exit == 3 and str(sealed) in verdict.findings[0].reason
    verdict = examine(home, require=("openings",), owners=(OWNER,))
    assert verdict.exit == 0 and not any("sealed" in text for text in verdict.not_proved)


@pytest.mark.promise("6.1")
def test_another_key_is_told_from_altered_bytes(home, forger):
    shut(forger)
    forger.write()
    verdict = examine(home, owners=(ANOTHER,))
    assert codes(verdict) == ["E_WRONG_KEY"] and verdict.exit == 3
    assert OWNER.id in verdict.findings[0].reason and ANOTHER.id in verdict.findings[0].reason
    forger.keys.clear()
    forger.write()
    verdict = examine(home, owners=(OWNER,))
    assert codes(verdict) == ["E_KEYS_ABSENT"] and verdict.exit == 3


def alter_a_sealed_opening(forger: Forger, one: int, two: int) -> None:
    forger.rows[one][2] = flipped(forger.rows[one][2], 8 * 60)


def swap_two_sealed_openings(forger: Forger, one: int, two: int) -> None:
    """Each as it was sealed, with the same key, in the other's place."""
    cells = seal.parts(forger.rows[one][2]), seal.parts(forger.rows[two][2])
    first, second = cells[0][0], cells[1][0]
    forger.rows[one][2] = seal.join([second._replace(place=first.place), *cells[0][1:]])
    forger.rows[two][2] = seal.join([first._replace(place=second.place), *cells[1][1:]])


def swap_two_places(forger: Forger, one: int, two: int) -> None:
    seq = with_openings(forger, "s2", 2)[0]
    first, second = seal.parts(forger.rows[seq][2])
    forger.rows[seq][2] = seal.join([second._replace(place=0), first._replace(place=1)])


def alter_a_sagas_key(forger: Forger, one: int, two: int) -> None:
    owner, wrapped = forger.keys["s2"]
    forger.keys["s2"] = (owner, flipped(wrapped, 300))


def give_a_saga_anothers_key(forger: Forger, one: int, two: int) -> None:
    forger.keys["s2"] = forger.keys["s4"]


@pytest.mark.promise("6.2")
@pytest.mark.parametrize(
    "attack",
    [
        alter_a_sealed_opening,
        swap_two_sealed_openings,
        swap_two_places,
        alter_a_sagas_key,
        give_a_saga_anothers_key,
    ],
    ids=lambda attack: attack.__name__,
)
def test_what_is_altered_or_moved_under_seal_is_found_with_the_key(home, forger, attack):
    attack(forger, *shut(forger))
    forger.write()
    verdict = examine(home, owners=(OWNER,))
    assert set(codes(verdict)) == {"E_CIPHERTEXT"} and verdict.exit == 1, verdict.findings


# ---- every bit of it ------------------------------------------------------------------------------------------------


def cells(raw: Outsider) -> list[tuple[str, str, str, tuple[str, ...], tuple[Any, ...], Any, int]]:
    """Every bit of every cell of every table: table, column, its slot, the row's key columns and values, value, bit.

    But not what is sealed under a key that was destroyed: nobody can read it, and nobody can tell."""
    keys = {
        "entry": ("seq",), "stub": ("start",), "checkpoint": ("size",), "datakey": ("saga",),
        "tile": ("level", "n"), "saga": ("first",), "memo": ("view",),
    }  # fmt: skip
    out = []
    for table, key in keys.items():
        columns = [(row[1], row[2]) for row in raw.run(f"pragma table_info({table})")]
        for row in raw.run(f"select * from {table}"):
            cell = dict(zip([name for name, _ in columns], row, strict=True))
            gone = table == "entry" and b'"saga":"s5"' in cell["line"]
            for column, type in columns:
                if gone and column == "open":
                    continue
                slot = "cast(? as text)" if type == "TEXT" else "?"
                for bit in range(bits(cell[column])):
                    out.append((table, column, slot, key, tuple(cell[name] for name in key), cell[column], bit))
    return out


def flip_and_examine(home: Home, raw: Outsider, chosen: list[Any]) -> int:
    tried = 0
    for table, column, slot, key, where, value, bit in chosen:
        new = flipped(value, bit)
        if new is None:
            continue
        match = " and ".join(f"{name} = ?" for name in key)
        try:
            raw.change(f"update {table} set {column} = {slot} where {match}", new, *where)
        except Refused:
            continue  # another row has that key
        verdict = examine(home, owners=(OWNER,))
        assert verdict.exit in (1, 4, 5, 7), f"{table}.{column} of {where}, bit {bit}: {verdict.verdict}"
        moved = tuple(new if name == column else old for name, old in zip(key, where, strict=True))
        raw.change(f"update {table} set {column} = {slot} where {match}", value, *moved)
        tried += 1
    assert examine(home, owners=(OWNER,)).exit == 0, "the file is not as it was"
    return tried


@pytest.mark.promise("6.2")
def test_bits_of_a_log_with_openings_redacted_sealed_and_records_removed_are_watched(home, forger, raw):
    """A sample; `--long` leaves out none."""
    kept(forger)
    seed = random.randrange(1 << 32)
    print("seed", seed)
    everything = cells(raw)
    draw = random.Random(seed)
    chosen = draw.sample(everything, 150)
    for table in ("stub", "checkpoint", "datakey", "tile"):
        own = [one for one in everything if one[0] == table]
        chosen += draw.sample(own, min(len(own), 60))
    assert flip_and_examine(home, raw, chosen) > 250


def is_new(one: Any, forger: Forger) -> bool:
    """Whether a bit is of what redaction, sealing and removal put there: the rest is of a kind with any other log."""
    table, column, _, _, where, value, _ = one
    if table == "entry":
        return not forger.entry(where[0]).saga or column == "open" and seal.is_sealed(value)
    return table in ("stub", "checkpoint", "datakey", "tile")


@pytest.mark.long
@pytest.mark.promise("6.2")
@pytest.mark.parametrize("part", range(8))
def test_every_bit_of_what_redacts_seals_and_removes_is_watched(home, forger, raw, part):
    """And every sixteenth of the rest, beginning at random."""
    kept(forger)
    everything = cells(raw)
    new = [one for one in everything if is_new(one, forger)]
    print("start", start := random.randrange(16))
    rest = [one for one in everything if not is_new(one, forger)][start::16]
    assert flip_and_examine(home, raw, [*new[part::8], *rest[part::8]]) > 1000


@pytest.mark.promise("6.1")
def test_random_rubbish_in_what_is_kept_of_the_removed_and_the_sealed_never_raises(home, forger, raw):
    kept(forger)
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)

    def number() -> int:
        return draw.choice([-1, 0, 1, 8, draw.randrange(80), draw.randrange(1 << 53), (1 << 63) - 1, -(1 << 63)])

    def blob() -> bytes:
        return draw.choice([b"", b"\x01", draw.randbytes(32), b"\x01" + draw.randbytes(draw.randrange(90))])

    for _ in range(120):
        work: list[tuple[str, tuple[Any, ...]]] = [
            ("insert or replace into stub values(?,?,?)", (number(), number(), blob())),
            ("update stub set level = ?, hash = ? where start = (select max(start) from stub)", (number(), blob())),
            ("insert or replace into checkpoint values(?,?)", (number(), draw.choice([blob(), draw.randbytes(96)]))),
            ("insert or replace into datakey values(?,?,?)", (draw.choice(["", "s4", "x y"]), "0" * 16, blob())),
            ("update entry set open = ? where seq = ?", (blob(), draw.randrange(60))),
            ("update or ignore stub set start = ? where start = (select min(start) from stub)", (number(),)),
            ("delete from stub where start = (select max(start) from stub)", ()),
        ]
        raw.all([("savepoint rubbish", ()), *draw.sample(work, draw.randrange(1, 4)), ("release rubbish", ())])
        assert examine(home, owners=(OWNER,)).exit in (0, 1, 3, 4, 5, 7)
        if draw.random() < 0.3:
            forger.write()


# ---- what is brought along ------------------------------------------------------------------------------------------


def noted(forger: Forger, size: int) -> Brought:
    return carried("the auditor's note", forger.note(size))


def rewritten(forger: Forger) -> None:
    """Another history from record 20 on, signed with the key."""
    for seq in range(20, forger.size):
        entry = parse(forger.rows[seq][0])
        fields = {"at": entry.at + 1} if seq == 20 else {"prev": forger.hashes[seq - 1].hex()}
        line = line_of(msgspec.structs.replace(entry, **fields))
        forger.hashes[seq] = leaf(line)
        forger.rows[seq][0] = line
    for seq in range(forger.size):
        sig = forger.rows[seq][3]
        if sig is not None:
            forger.rows[seq][3] = forger.signed(seq + 1) if len(sig) == 96 else forger.hashes[seq]
    forger.write()


@pytest.mark.promise("6.1")
def test_a_note_that_was_kept_elsewhere_is_the_highest_level(home, forger):
    for size in (1, 17, forger.size):
        verdict = verify(home.db, view_factory=Tally, terms=Terms(anchors=(noted(forger, size),)))
        assert verdict.exit == 0 and verdict.level == "outside anchor", verdict.findings
        if size < forger.size:
            assert any(f"after the first {size} records" in text for text in verdict.not_proved)


@pytest.mark.promise("6.2")
def test_a_rewrite_with_the_key_and_the_anchors_is_a_fork_where_somebody_kept_a_note(home, forger, tmp_path):
    old = noted(forger, 40)
    rewritten(forger)
    shutil.rmtree(tmp_path / "anchors")
    home.anchor.unlink()
    assert examine(home).exit == 0, "nothing on the device tells"
    verdict = examine(home, anchors=(old,))
    assert codes(verdict) == ["E_FORKED"] and verdict.exit == 5
    verdict = examine(home, since=old)
    assert codes(verdict) == ["E_FORKED"] and verdict.exit == 5


@pytest.mark.promise("6.2")
def test_a_note_over_more_records_than_there_are_is_a_rollback(home, forger, tmp_path):
    more = forger.size
    for _ in range(3):
        forger.append("switch.lifted")
    later = noted(forger, forger.size)
    assert more < forger.size
    for terms in ({"anchors": (later,)}, {"since": later}):
        verdict = verify(home.db, view_factory=Tally, terms=Terms(**terms))
        assert codes(verdict) == ["E_ROLLED_BACK"] and verdict.exit == 4


@pytest.mark.promise("6.2")
def test_an_older_copy_that_is_set_back_is_a_rollback(home, tmp_path):
    shutil.copytree(home.path, tmp_path / "copy")
    log = open_log(home, Tally(), warn=quiet)
    saga(log, "later")
    log.sign_head()
    log.close()
    for name in ("amends.db", "amends.db-wal", "amends.db-shm"):
        (home.path / name).unlink(missing_ok=True)
        if (tmp_path / "copy" / name).exists():
            shutil.copy(tmp_path / "copy" / name, home.path / name)
    verdict = examine(home)
    assert codes(verdict) == ["E_ROLLED_BACK"] and verdict.exit == 4


@pytest.mark.promise("6.2")
def test_a_copied_device_that_went_another_way_is_a_fork(home, tmp_path, monkeypatch):
    """Home and anchors copied whole, both went on: the head of one does not lead to the other."""
    shutil.copytree(home.path, tmp_path / "twin")
    shutil.copytree(tmp_path / "anchors", tmp_path / "twins")
    twin = Home(tmp_path / "twin")
    for one, anchors, name in ((home, "anchors", "here"), (twin, "twins", "there")):
        monkeypatch.setenv("AMENDS_ANCHORS", str(tmp_path / anchors))
        log = open_log(one, Tally(), warn=quiet)
        saga(log, name)
        log.sign_head()
        log.close()
    raw = Outsider(twin.db)
    theirs = Forger(twin, raw)
    note = noted(theirs, theirs.size)
    raw.close()
    monkeypatch.setenv("AMENDS_ANCHORS", str(tmp_path / "anchors"))
    assert examine(home).exit == 0
    verdict = examine(home, anchors=(note,))
    assert codes(verdict) == ["E_FORKED"] and verdict.exit == 5


@pytest.mark.promise("6.2")
def test_a_note_of_another_log_or_of_nobody_vouches_for_nothing(home, forger, tmp_path):
    forged = forger.note(10).replace(b"\n10\n", b"\n11\n")
    verdict = examine(home, anchors=(carried("forged", forged),))
    assert codes(verdict) == ["E_ANCHOR"] and verdict.exit == 3 and verdict.level == "local anchor"
    other = build(tmp_path / "other", 20)
    raw = Outsider(other.db)
    note = noted(Forger(other, raw), 10)
    raw.close()
    verdict = examine(home, anchors=(note,))
    assert codes(verdict) == ["E_IDENTITY"] and verdict.exit == 4


class Counting(Evidence):
    """Counts what is handed out."""

    handed = 0

    def stored(self, start: int = 0) -> Any:
        for row in super().stored(start):
            type(self).handed += 1
            yield row


@pytest.mark.promise("6.1")
def test_since_a_note_only_what_came_after_it_is_looked_at_and_that_is_said(home, monkeypatch, forger, raw):
    kept(forger)
    monkeypatch.setattr("amends.store.audit.Evidence", Counting)
    for size in (forger.size, forger.size - 3, 40):
        Counting.handed = 0
        verdict = examine(home, since=noted(forger, size))
        assert verdict.exit == 0 and verdict.level == "outside anchor", verdict.findings
        assert Counting.handed <= (forger.size - size) + size % 256
        assert verdict.root == forger.root(forger.size).hex()
        assert any(f"The first {size} records" in text and "not looked at" in text for text in verdict.not_proved)
    raw.change("update entry set line = ? where seq = 3", flipped(raw.line(3), 8 * 110))
    assert examine(home).exit == 1
    old = noted(forger, forger.size - 2)
    raw.change("update entry set line = ? where seq = ?", flipped(raw.line(forger.size - 2), 8 * 110), forger.size - 2)
    assert "E_CHAIN" in codes(examine(home, since=old))


@pytest.mark.promise("6.1")
def test_since_a_note_the_whole_runs_before_it_are_not_read(tmp_path, monkeypatch):
    home = build(tmp_path / "long", 700)
    raw = Outsider(home.db)
    forger = Forger(home, raw)
    raw.close()
    monkeypatch.setattr("amends.store.audit.Evidence", Counting)
    for size in (512, 600):
        Counting.handed = 0
        verdict = examine(home, since=noted(forger, size))
        assert verdict.exit == 0, verdict.findings
        assert Counting.handed <= forger.size - size + size % 256


# ---- the policy -----------------------------------------------------------------------------------------------------

SEEDS = {name: bytes([n]) * 32 for n, name in enumerate("ABC", 1)}


def policy_text(forger: Forger, quorum: str = "two") -> str:
    lines = [f"log {vkey(forger.mine.origin, forger.mine.log_key)}"]
    lines += [f"witness {n} {vkey(f'w.example/{n}', public_of(s), COSIGNATURE)}" for n, s in SEEDS.items()]
    lines += ["# two of three", "group two 2 A B C", f"quorum {quorum}"]
    return "\n".join(lines) + "\n"


def witnessed(forger: Forger, size: int, names: str) -> Brought:
    text = forger.note(size)
    body = text[: text.rfind(b"\n\n") + 1]
    more = b"".join(cosign(body, f"w.example/{name}", SEEDS[name], 1_700_000_000) for name in names)
    return carried("the note", text + more)


@pytest.mark.promise("6.1")
def test_a_policys_quorum_is_met_by_its_own_witnesses_and_by_nobody_else(home, forger):
    policy = parse_policy(policy_text(forger))
    verdict = examine(home, policy=policy, anchors=(witnessed(forger, 40, "AB"),), require=("witnessed",))
    assert verdict.exit == 0, verdict.findings
    for names in ("", "A"):
        verdict = examine(home, policy=policy, anchors=(witnessed(forger, 40, names),))
        assert codes(verdict) == ["E_QUORUM"] and verdict.exit == 6
    verdict = examine(home, policy=policy)
    assert codes(verdict) == ["E_QUORUM"] and verdict.exit == 6
    doubled = witnessed(forger, 40, "AA")
    assert examine(home, policy=policy, anchors=(doubled,)).exit == 6, "one witness twice is one"
    spoiled = doubled._replace(text=doubled.text[:-8] + b"AAAAAA=\n")
    assert examine(home, policy=policy, anchors=(spoiled,)).exit != 0
    nobody = examine(home, policy=parse_policy(policy_text(forger, "none")), require=("witnessed",))
    assert codes(nobody) == ["E_REQUIRED"] and nobody.exit == 3


@pytest.mark.promise("6.1")
def test_a_policy_that_names_other_logs_is_not_met(home, forger):
    text = policy_text(forger, "none").replace(
        vkey(forger.mine.origin, forger.mine.log_key), vkey("other.example/log", public_of(b"o" * 32))
    )
    verdict = examine(home, policy=parse_policy(text))
    assert codes(verdict) == ["E_STRANGE"] and verdict.exit == 6


# ---- what is claimed ------------------------------------------------------------------------------------------------


def unsigned_file(home: Home, forger: Forger) -> Any:
    for row in forger.rows.values():
        row[3] = row[3] and leaf(row[0])
    forger.write()
    return verify(home.db, view_factory=Tally)


def a_file(home: Home, forger: Forger) -> Any:
    return verify(home.db, view_factory=Tally)


def a_home(home: Home, forger: Forger) -> Any:
    return examine(home)


def a_quorum(home: Home, forger: Forger) -> Any:
    """The cosigned note lies beside the log, as in a bundle: nobody brought it."""
    note = witnessed(forger, 40, "AC")
    real = Evidence.notes
    try:
        Evidence.notes = lambda self: [note.text]  # type: ignore[method-assign]
        return examine(home, policy=parse_policy(policy_text(forger)))
    finally:
        Evidence.notes = real  # type: ignore[method-assign]


def a_note(home: Home, forger: Forger) -> Any:
    return verify(home.db, view_factory=Tally, terms=Terms(anchors=(noted(forger, 40),)))


NOBODY = "no other device was asked"
CUT = "nothing was cut from its end"
LEVEL_TOLD = [
    (unsigned_file, "chain", ["Who wrote it", CUT, NOBODY, "keys were not"]),
    (a_file, "signed", [CUT, NOBODY, "keys were not"]),
    (a_home, "local anchor", [NOBODY]),
    (a_quorum, "own quorum", ["after the first 40 records", "the policy knows"]),
    (a_note, "outside anchor", ["after the first 40 records", "after the note that was", "keys were not"]),
]


@pytest.mark.promise("6.1")
@pytest.mark.parametrize(("made", "level", "told"), LEVEL_TOLD, ids=[row[1] for row in LEVEL_TOLD])
def test_nothing_claims_more_than_its_level(home, forger, made, level, told):
    verdict = made(home, forger)
    said = " ".join(verdict.not_proved)
    assert verdict.level == level, verdict.findings
    for text in (*told, "That what was written is true"):
        assert text in said
    for _, other, texts in LEVEL_TOLD:
        if LEVELS.index(other) < LEVELS.index(level):
            assert not [text for text in texts if text in said and text not in told], f"said of {other}"


@pytest.mark.promise("6.1")
@pytest.mark.parametrize("demand", ["signed", "anchored", "witnessed", "openings"])
@pytest.mark.parametrize("where", ["file", "home"])
def test_a_demand_that_is_not_met_is_unverified(home, where, demand):
    path = home if where == "home" else home.db
    verdict = verify(path, view_factory=Tally, terms=Terms(require=(demand,)))
    met = {"file": {"signed", "openings"}, "home": {"signed", "anchored", "openings"}}[where]
    assert (verdict.exit, codes(verdict)) == ((0, []) if demand in met else (3, ["E_REQUIRED"]))


# ---- memory ---------------------------------------------------------------------------------------------------------


def held_by(examiner: Any) -> int:
    """Items in whatever an examiner keeps, but its findings."""
    kept = [value for name, value in vars(examiner).items() if isinstance(value, (list, dict, set))]
    return sum(map(len, kept)) + len(examiner.tree.runs) + len(examiner.tree._peaks)


@pytest.mark.promise("6.1")
def test_what_is_kept_in_memory_does_not_grow_with_the_log(tmp_path, monkeypatch):
    from amends.store import audit

    seen: list[Any] = []

    class Watched(audit.Examiner):
        def finish(self) -> None:
            seen.append((self.size, held_by(self)))
            super().finish()

    monkeypatch.setattr(audit, "Examiner", Watched)
    for number, entries in enumerate((300, 1200)):
        assert examine(build(tmp_path / f"home{number}", entries)).exit == 0
    (small, few), (large, many) = seen
    print("records", small, large, "held", few, many)
    assert large > 3 * small and many - few <= 520, "a batch of hashes at most"
