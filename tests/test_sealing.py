"""Openings under the owner's key: what a thief of the file reads, what a lost key costs, and what a crash leaves."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from amends import COMPENSABLE, AgentKit, Compensation, SagaAborted, compensator, saga_scope
from amends.cli.main import main
from amends.runtime import owner_key
from amends.runtime.adopted import carry_over
from amends.runtime.config_file import BadConfig, load, seal_key_of, with_seal_key
from amends.runtime.daemon import sweep
from amends.runtime.owner_key import NoKey, absolute, make_key_file, owner_from, owner_of
from amends.store import sealing, sqlite
from amends.store.chain import Draft
from amends.store.entry import Entry, parse
from amends.store.errors import AmendsError, DiskFull, Malformed, Refused, SealKey
from amends.store.facts import HELD
from amends.store.fold import NoView
from amends.store.home import Home
from amends.store.identity import adopt, open_log
from amends.store.keys import hkdf
from amends.store.seal import Owner, Part, is_sealed, join, parts, seal, unseal
from amends.store.sqlite import SqliteLog, copy_into

CHILD = Path(__file__).with_name("seal_child.py")
KEY, OTHER, THIRD = (Owner(bytes([n]) + bytes(range(31))) for n in (1, 2, 3))
SECRET = "PLAINTEXT"


def opened(saga: str, *bodies: str) -> Callable[..., Any]:
    said = tuple(json.dumps({"args": body}).encode() for body in bodies)
    return lambda view, now: [Draft("saga.opened", {"saga": saga}, said)]


def ended(saga: str) -> Callable[..., Any]:
    return lambda view, now: [Draft("saga.ended", {"saga": saga, "out": "committed"}, (b'{"result":"PLAINTEXT out"}',))]


def quiet(text: str) -> None:
    pass


def open_at(home: Path, owner: Owner | None = None, write: bool = True) -> SqliteLog:
    return open_log(home, NoView(), write=write, warn=quiet, owner=lambda: owner)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def log(home: Path) -> Iterator[SqliteLog]:
    """Three sagas in plain text, of which two have ended."""
    log = open_at(home, KEY)
    for n in range(3):
        log.commit(opened(f"saga{n}", f"{SECRET} {n}", f"{SECRET} {'long ' * 400}{n}"))
    for n in range(2):
        log.commit(ended(f"saga{n}"))
    yield log
    log.close()


def cells(home: Path) -> dict[int, bytes]:
    db = apsw.Connection(str(home / "amends.db"))
    try:
        return dict(db.execute("select seq, open from entry where open is not null"))
    finally:
        db.close()


def put(home: Path, sql: str, *bindings: Any) -> None:
    db = apsw.Connection(str(home / "amends.db"))
    try:
        db.execute(sql, bindings)
        assert db.changes() == 1
    finally:
        db.close()


def told(log: SqliteLog) -> list[tuple[bytes, bytes | None]]:
    return [(record.line, record.blob) for record in log.records()]


def in_files(home: Path, word: str | bytes = SECRET) -> int:
    """How often a word stands in the database and its -wal, counted by another process."""
    script = (
        "import pathlib, sys; word = bytes.fromhex(sys.argv[2])\n"
        "print(sum(path.read_bytes().count(word) for path in pathlib.Path(sys.argv[1]).glob('amends.db*')))"
    )
    asked = [sys.executable, "-c", script, str(home), (word.encode() if isinstance(word, str) else word).hex()]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


# ---- cells ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=17, max_size=60), max_size=32), st.data())
def test_a_cell_is_its_parts_and_nothing_that_is_cut_is_one(texts: list[bytes], data: st.DataObject) -> None:
    made = [Part(place, bytes([place]) * 24, text) for place, text in enumerate(texts)]
    cell = join(made)
    if cell is None:
        assert not texts
        return
    assert is_sealed(cell) and parts(cell) == made
    cut = data.draw(st.integers(0, len(cell) - 1))
    try:
        found = parts(cell[:cut])
    except Malformed as error:
        assert error.facts["finding"] == "E_OPENING"
    else:
        assert found == made[: len(found)] and len(found) < len(made)  # cut between two


NONCE, TWENTY = b"n" * 24, b"c" * 20


@pytest.mark.parametrize(
    "cell",
    [
        *(b"", b"\x01", b"["),
        join([Part(1, NONCE, TWENTY), Part(1, NONCE, TWENTY)]),
        join([Part(32, NONCE, TWENTY)]),
        join([Part(0, NONCE, TWENTY[:16])]),
    ],
)
def test_places_ascend_and_a_ciphertext_holds_something(cell: bytes) -> None:
    with pytest.raises(Malformed):
        parts(cell)


@pytest.mark.promise("6.5")
@settings(max_examples=60)
@given(st.lists(st.text(max_size=3000), min_size=1, max_size=5), st.data())
def test_an_opening_comes_back_and_any_flipped_bit_is_told(texts: list[str], data: st.DataObject) -> None:
    from amends.store.log import MemoryLog

    log = MemoryLog(NoView())
    [entry] = log.commit(opened("a", *texts))
    record = log.record(entry.seq)
    key = os.urandom(32)
    cell = seal(key, "origin", entry, enumerate(record.blob.splitlines(True)))
    assert b"".join(unseal(key, "origin", entry, part) for part in parts(cell)) == record.blob

    place = data.draw(st.integers(1, len(cell) - 1))
    bad = cell[:place] + bytes([cell[place] ^ (1 << data.draw(st.integers(0, 7)))]) + cell[place + 1 :]
    with pytest.raises(Malformed):
        for part in parts(bad):
            unseal(key, "origin", entry, part)
        assert len(parts(bad)) == len(entry.c)
        raise AssertionError("the flipped bit was not seen")


# ---- sealed and plain are one log -----------------------------------------------------------------------------------


@pytest.mark.promise("6.5")
@settings(max_examples=15)
@given(st.lists(st.lists(st.text(max_size=2000), max_size=4), min_size=1, max_size=12))
def test_a_log_is_the_same_sealed_and_in_plain_text(tmp_path_factory: Any, facts: list[list[str]]) -> None:
    home = tmp_path_factory.mktemp("sealed") / "home"
    log = open_at(home)
    for n, bodies in enumerate(facts):
        log.commit(opened(f"s{n}", *bodies))
    plain, (size, root) = told(log), log.head()
    sealing.begin(log, KEY, "ann")
    sealing.finish(log)
    assert told(log)[:size] == plain
    assert all(is_sealed(cell) for cell in cells(home).values())
    sealing.end(log, "ann")
    sealing.finish(log)
    assert told(log)[:size] == plain
    assert not any(is_sealed(cell) for cell in cells(home).values())
    from amends.store.merkle import Peaks

    tree = Peaks()
    from amends.store.entry import leaf

    tree.extend([leaf(line) for line, _ in plain])
    assert (tree.size, tree.root()) == (size, root)
    log.close()


@pytest.mark.promise("6.5")
def test_no_plain_byte_is_left_once_the_log_is_sealed(log: SqliteLog, home: Path) -> None:
    assert in_files(home)
    sealing.begin(log, KEY, "ann")
    sealing.finish(log)
    log.commit(opened("later", f"{SECRET} later"))
    assert log.finish_erasing(5.0).done
    log.commit(opened("latest", f"{SECRET} latest"))
    log.sign_head()
    assert in_files(home) == 0
    assert in_files(home, KEY._key) == 0 and in_files(home, KEY._key.hex()) == 0


@pytest.mark.promise("6.5")
def test_each_saga_has_a_key_of_its_own_and_the_device_has_one(log: SqliteLog, home: Path) -> None:
    sealing.begin(log, KEY, "ann")
    sealing.finish(log)
    db = apsw.Connection(str(home / "amends.db"))
    rows = list(db.execute("select saga, seal, wrapped from datakey"))
    db.close()
    assert {saga for saga, _, _ in rows} == {"", "saga0", "saga1", "saga2"}
    keys = {KEY.unwrap(log.origin, saga, wrapped) for saga, seal, wrapped in rows if seal == KEY.id}
    assert len(keys) == 4 and None not in keys


# ---- five different answers -----------------------------------------------------------------------------------------


@pytest.fixture
def sealed(log: SqliteLog) -> SqliteLog:
    sealing.begin(log, KEY, "ann")
    sealing.finish(log)
    return log


def answer(home: Path, owner: Owner | None, seq: int) -> str:
    """What a reader with this key hears of a record: a code, or empty."""
    reader = open_at(home, owner, write=False)
    try:
        record = reader.record(seq)
        assert (record.blob is None) == bool(record.withheld)
        return record.withheld
    except AmendsError as error:
        assert isinstance(error, Malformed) and error.facts["finding"] == "E_CIPHERTEXT"
        return error.code
    finally:
        reader.close()


@pytest.mark.promise("6.5")
def test_a_key_that_another_process_wrapped_anew_a_moment_ago_is_not_altered(sealed: SqliteLog, home: Path) -> None:
    owners = [KEY]
    late = open_log(home, NoView(), warn=quiet, owner=lambda: owners[-1])
    late.refresh()
    [places, *_] = [saga for saga in cells(home).items() if is_sealed(saga[1])]
    sealing.rotate(sealed, OTHER, "bob")
    assert late.record(places[0])[3] == "seal_key_rotated"
    late.close()


@pytest.mark.promise("6.5")
def test_missing_wrong_rotated_forgotten_and_altered_are_five_answers(sealed: SqliteLog, home: Path) -> None:
    assert answer(home, None, 3) == "seal_key_missing"
    assert answer(home, OTHER, 3) == "seal_key_wrong"
    assert answer(home, KEY, 3) == ""
    sealing.rotate(sealed, OTHER, "bob")
    assert answer(home, KEY, 3) == "seal_key_rotated"
    assert answer(home, OTHER, 3) == ""
    assert answer(home, THIRD, 3) == "seal_key_wrong"
    sealing.forget(sealed, ["saga0"], "carl", "he asked")
    assert answer(home, OTHER, 2) == "seal_forgotten" and answer(home, None, 2) == "seal_forgotten"
    cell = cells(home)[3]
    put(home, "update entry set open = ? where seq = 3", cell[:-1] + bytes([cell[-1] ^ 1]))
    assert answer(home, OTHER, 3) == "seal_altered"
    assert answer(home, None, 3) == "seal_key_missing"  # nobody without the key can tell


@pytest.mark.promise("6.5")
def test_a_ciphertext_in_anothers_place_is_altered(sealed: SqliteLog, home: Path) -> None:
    sealed.commit(lambda view, now: [Draft("step.intended", {"saga": "saga2", "step": 1}, (b'{"args":1}',))])
    sealed.commit(lambda view, now: [Draft("step.intended", {"saga": "saga2", "step": 2}, (b'{"args":1}',))])
    one, two = sealed.size - 2, sealed.size - 1
    there = cells(home)
    put(home, "update entry set open = ? where seq = ?", there[one], two)  # same saga, same key, same form
    assert answer(home, KEY, two) == "seal_altered" and answer(home, KEY, one) == ""
    swapped = parts(there[4])
    put(home, "update entry set open = ? where seq = 4", join([swapped[0]._replace(place=1)]))
    assert answer(home, KEY, 4) == "seal_altered"


@pytest.mark.promise("6.5")
def test_an_altered_data_key_is_no_wrong_owners_key(sealed: SqliteLog, home: Path) -> None:
    put(home, "update datakey set wrapped = zeroblob(72) where saga = 'saga1'")
    put(home, "update datakey set seal = '0123456789abcdef' where saga = 'saga2'")
    assert answer(home, KEY, 3) == "seal_altered" and answer(home, KEY, 4) == "seal_altered"
    assert answer(home, OTHER, 3) == "seal_key_wrong"
    assert answer(home, KEY, 2) == ""


@pytest.mark.promise("6.5")
def test_a_copy_without_the_sagas_keys_says_so(sealed: SqliteLog, home: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    copy_into(home / "amends.db", tmp_path / "copy" / "amends.db", keys=False)
    assert answer(tmp_path / "copy", KEY, 3) == "seal_key_left_out"


# ---- without the key nothing is gone on with ------------------------------------------------------------------------


@pytest.mark.promise("6.5")
@pytest.mark.parametrize(
    "owner, code", [(None, "seal_key_missing"), (OTHER, "seal_key_wrong"), (KEY, "seal_key_rotated")]
)
def test_who_writes_without_the_right_key_is_refused_at_the_door(
    sealed: SqliteLog, home: Path, owner: Owner | None, code: str
) -> None:
    if owner is KEY:
        sealing.rotate(sealed, OTHER, "bob")
    with pytest.raises(SealKey) as error:
        open_at(home, owner)
    assert error.value.code == code and error.value.exit == 3 and error.value.next


@pytest.mark.promise("6.5")
def test_a_log_that_is_open_seals_from_the_next_commit_on_or_is_refused(log: SqliteLog, home: Path) -> None:
    late: list[Owner] = []
    blind, seeing = open_at(home), open_log(home, NoView(), warn=quiet, owner=lambda: late[0] if late else None)
    for each in (blind, seeing):
        each.commit(opened(f"before{each is blind}", SECRET))
    late.append(KEY)
    sealing.begin(log, KEY, "ann")
    [entry] = seeing.commit(opened("after", f"{SECRET} after"))
    assert is_sealed(cells(home)[entry.seq]) and seeing.record(entry.seq).blob == log.record(entry.seq).blob
    with pytest.raises(SealKey) as error:
        blind.commit(opened("blind", f"{SECRET} blind"))
    assert error.value.code == "seal_key_missing"
    assert not log.thread("blind")
    blind.close()
    sealing.rotate(log, OTHER, "ann")
    with pytest.raises(SealKey) as error:
        seeing.commit(opened("again", SECRET))
    assert error.value.code == "seal_key_rotated"
    late[0] = THIRD  # said before it is so, as `--save` does
    sealing.rotate(log, THIRD, "ann")
    seeing.commit(opened("again", SECRET))
    seeing.close()
    assert all(is_sealed(cell) for seq, cell in cells(home).items() if seq > entry.seq)


@pytest.mark.promise("6.5")
def test_a_key_made_in_a_commit_that_failed_is_forgotten_with_it(sealed: SqliteLog, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise Refused("not now", code="not_now")

    monkeypatch.setitem(sealing.ACTS, "seal.rotated", fail)
    sealed.vault.offer(OTHER)

    def decide(view: Any, now: Any) -> list[Draft]:
        return [
            Draft("saga.opened", {"saga": "new"}, (b'{"args":1}',)),
            Draft("seal.rotated", {"seal": OTHER.id, "prior": KEY.id}, (), True),
        ]

    with pytest.raises(Refused):
        sealed.commit(decide)
    [entry] = sealed.commit(opened("new", "again"))
    sealed.vault.drop()
    assert b"again" in (sealed.record(entry.seq).blob or b"")


@pytest.mark.promise("6.5")
def test_what_another_sealed_anew_is_never_written_under_a_key_that_is_gone(log: SqliteLog, home: Path) -> None:
    other = open_at(home, KEY)
    sealing.begin(log, KEY, "ann")
    sealing.finish(log)
    other.commit(lambda view, now: [Draft("step.intended", {"saga": "saga2", "step": 1}, (b'{"args":1}',))])
    sealing.end(log, "ann")
    sealing.finish(log)
    other.record(4)
    sealing.begin(log, KEY, "ann")
    sealing.finish(log)
    [entry] = other.commit(lambda view, now: [Draft("step.intended", {"saga": "saga2", "step": 2}, (b'{"args":2}',))])
    other.close()
    assert answer(home, KEY, entry.seq) == ""


# ---- deaths ---------------------------------------------------------------------------------------------------------


def child(home: Path, what: str, keys: list[Path], n: int, when: str = "before") -> int:
    done = subprocess.run(
        [sys.executable, str(CHILD), str(home), what, *map(str, keys), "--", str(n), when],
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.fixture
def keys(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("one", "two")]
    for path in made:
        make_key_file(path)
    return made


@pytest.mark.promise("6.5")
@pytest.mark.slow
@pytest.mark.parametrize("what", ["seal", "unseal", "rotate"])
def test_a_death_at_any_commit_leaves_a_log_that_is_read_and_gone_on_with(
    what: str, tmp_path: Path, keys: list[Path]
) -> None:
    first, second = (owner_from(f"file:{key}") for key in keys)
    start = tmp_path / "start"
    log = open_at(start, first)
    for n in range(20):
        log.commit(opened(f"s{n}", f"{SECRET} {n}", "x" * 1500))
    plain = told(log)
    if what != "seal":
        sealing.begin(log, first, "ann")
        sealing.finish(log)
    log.close()
    deaths = 0
    for n in range(1, 12):
        for when in ("before", "after"):
            home = tmp_path / f"{n}{when}"
            shutil.copytree(start, home)
            shutil.rmtree(tmp_path / "anchors", ignore_errors=True)
            if child(home, what, keys, n, when) == 0:
                continue
            deaths += 1
            log = open_with_either(home, first, second)
            log.vault.offer(first)
            log.vault.offer(second)
            assert told(log)[: len(plain)] == plain
            sealing.finish(log)
            log.finish_erasing(2.0)
            there = {is_sealed(cell) for cell in cells(home).values()}
            assert there == {bool(log.keeping.seal)}
            assert told(log)[: len(plain)] == plain
            sealed_now = log.keeping.seal
            log.close()
            assert bool(in_files(home)) == (not sealed_now)
    print(what, deaths, "deaths")
    assert deaths >= (2 if what == "rotate" else 6)


def open_with_either(home: Path, first: Owner, second: Owner) -> SqliteLog:
    try:
        return open_at(home, first)
    except SealKey:
        return open_at(home, second)


@pytest.mark.promise("6.5")
def test_whoever_opens_next_goes_on_by_itself(home: Path, keys: list[Path]) -> None:
    from world import eventually

    owner = owner_from(f"file:{keys[0]}")
    log = open_at(home)
    for n in range(40):
        log.commit(opened(f"s{n}", f"{SECRET} {n}"))
    log.close()
    assert child(home, "seal", keys, 3, "after") == -signal.SIGKILL
    log = open_at(home, owner)
    assert sealing.left(log) > 0 or not log.marks()
    eventually(lambda: not log.marks(), 20)
    eventually(lambda: log.keeping.erased == log.keeping.erasing, 20)
    assert all(is_sealed(cell) for cell in cells(home).values())
    log.close()
    assert in_files(home) == 0


@pytest.mark.promise("6.5")
def test_what_was_altered_before_is_not_sealed_over(log: SqliteLog, home: Path) -> None:
    log.commit(opened("bad", "as it was"))
    seq = log.size - 1
    put(home, "update entry set open = ? where seq = ?", cells(home)[seq].replace(b"as it was", b"as it is "), seq)
    sealing.begin(log, KEY, "ann")
    with pytest.raises(Malformed, match=f"Record {seq}"):
        sealing.finish(log)
    assert sealing.left(log) == 1 and not is_sealed(cells(home)[seq]) and cells(home)[seq].startswith(b"[")


# ---- forgetting -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.5")
def test_a_forgotten_saga_is_forgotten_and_its_neighbours_are_not(sealed: SqliteLog, home: Path) -> None:
    wrapped = sealed.wrapped("saga0")
    before = told(sealed)
    assert wrapped is not None
    [entry] = sealing.forget(sealed, ["saga0"], "carl", "he asked")
    assert (entry.kind, entry.target) == ("seal.forgotten", "saga0") and sealed.wrapped("saga0") is None
    assert sealed.record(2).withheld == "seal_forgotten"
    after = told(sealed)
    assert [line for line, _ in after[: len(before)]] == [line for line, _ in before]
    assert [seq for seq, (old, new) in enumerate(zip(before, after, strict=False)) if old != new] == [2, 5]
    assert sealed.finish_erasing(5.0).done
    assert in_files(home, wrapped.wrapped[24:]) == 0
    with pytest.raises(Refused) as error:
        sealing.forget(sealed, ["saga0"], "carl", "again")
    assert error.value.code == "forgotten"


@pytest.mark.promise("6.5")
def test_another_process_forgets_it_too(sealed: SqliteLog, home: Path) -> None:
    other = open_at(home, KEY)
    assert other.record(2).blob
    sealing.forget(sealed, ["saga0"], "carl", "he asked")
    other.refresh()
    assert other.record(2).withheld == "seal_forgotten"
    other.close()


@pytest.mark.promise("6.5")
@pytest.mark.parametrize("link", ["parent", "of"])
def test_a_hold_on_a_saga_keeps_the_keys_of_what_is_inside_it_and_follows_it(log: SqliteLog, link: str) -> None:
    sealing.begin(log, KEY, "ann")
    said = (b'{"result":"PLAINTEXT inner"}',)
    log.commit(lambda view, now: [Draft("saga.opened", {"saga": "inner", link: "saga0"}, said)])
    log.commit(ended("inner"))
    log.commit(lambda view, now: [Draft(HELD, {"target": "saga0"}, (b'{"by":"ann"}',), True)])
    with pytest.raises(Refused) as error:
        sealing.forget(log, ["inner"], "carl", "he asked")
    assert error.value.code == "held" and log.thread("inner")[0].blob


@pytest.mark.promise("6.5")
def test_forgetting_is_refused_of_what_is_open_held_or_in_plain_text(log: SqliteLog) -> None:
    with pytest.raises(Refused) as error:
        sealing.forget(log, ["saga0"], "carl", "he asked")
    assert error.value.code == "not_sealed" and "redact" in error.value.next
    sealing.begin(log, KEY, "ann")
    for sagas, code in ((["saga2"], "open"), (["saga0", "saga2"], "open"), (["nobody"], "nothing_to_forget")):
        with pytest.raises(Refused) as error:
            sealing.forget(log, sagas, "carl", "he asked")
        assert error.value.code == code
    log.commit(lambda view, now: [Draft(HELD, {"target": "saga0"}, (b'{"by":"ann"}',), True)])
    with pytest.raises(Refused) as error:
        sealing.forget(log, ["saga0", "saga1"], "carl", "he asked")
    assert error.value.code == "held" and log.record(3).blob  # all of them or none
    sealing.forget(log, ["saga1"], "carl", "he asked")


@pytest.mark.promise("6.5")
def test_unsealing_leaves_what_is_forgotten(sealed: SqliteLog, home: Path) -> None:
    sealing.forget(sealed, ["saga0"], "carl", "he asked")
    sealing.end(sealed, "ann")
    sealing.finish(sealed)
    assert sealed.record(2).withheld == "seal_forgotten" and sealed.record(3).blob
    assert {seq for seq, cell in cells(home).items() if is_sealed(cell)} == {2, 5}


def test_the_verbs_refuse_what_is_so_already(log: SqliteLog) -> None:
    for do, code in (
        (lambda: sealing.end(log, "ann"), "not_sealed"),
        (lambda: sealing.rotate(log, KEY, "a"), "not_sealed"),
    ):
        with pytest.raises(Refused) as error:
            do()
        assert error.value.code == code
    sealing.begin(log, KEY, "ann")
    for do, code in (
        (lambda: sealing.begin(log, KEY, "ann"), "sealed"),
        (lambda: sealing.rotate(log, KEY, "a"), "same_key"),
    ):
        with pytest.raises(Refused) as error:
            do()
        assert error.value.code == code


# ---- the sources of a key -------------------------------------------------------------------------------------------

HEX = hkdf(b"seed" * 8, b"for tests").hex()
FORMS = [HEX, HEX.upper() + "\n", base64.b64encode(bytes.fromhex(HEX)).decode(),
         base64.urlsafe_b64encode(bytes.fromhex(HEX)).decode().rstrip("=") + "\n"]  # fmt: skip


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_key_is_taken_from_each_source(form: str, tmp_path: Path, monkeypatch: Any) -> None:
    right = Owner(bytes.fromhex(HEX)).id
    write(tmp_path / "key", form)
    program = write(tmp_path / "tell it", f"#!/bin/sh\ncat {tmp_path / 'key'}\n", 0o700)
    monkeypatch.setenv("OWN_KEY", form)

    class Ring:
        @staticmethod
        def get_password(service: str, name: str) -> str | None:
            return form if (service, name) == ("amends", "log") else None

    monkeypatch.setitem(sys.modules, "keyring", Ring)
    sources = [f"file:{tmp_path / 'key'}", "env:OWN_KEY", f"command:'{program}' --now", "keyring:amends/log"]
    assert [owner_from(source).id for source in sources] == [right] * 4
    assert owner_from("file:key", tmp_path).id == right
    with pytest.raises(NoKey, match="has no other"):
        owner_from("keyring:amends/other")


BAD = {
    "": "no source", "file": "no source", "file:": "no source", "vault:x": "no source",
    "file:/nowhere/at/all": "cannot be read", "file:.": "cannot be read", "env:NOBODY_SET_IT": "not set",
    "command:/nowhere/at/all": "cannot be run", "command:false": "failed with 1", "command:'": "cannot be read",
    "command: ": "no source", "command:printf 'a\\nb\\n'": "more than one line", "command:true": "is no key",
    "keyring:amends": "names no entry", HEX: "has no kind",
}  # fmt: skip


@pytest.mark.parametrize("source", BAD)
def test_a_source_that_gives_no_key_is_told_without_what_it_gave(source: str, monkeypatch: Any) -> None:
    with pytest.raises(NoKey, match=re.escape(BAD[source])) as error:
        owner_from(source)
    assert error.value.next and HEX not in str(error.value)


@pytest.mark.promise("6.5")
@pytest.mark.parametrize(
    "text", ["", "x", HEX[:-1], HEX + "0", "0" * 64, "A" * 43, HEX[:-1] + "g", HEX + "\n" + HEX, "\xff" * 43]
)
def test_what_is_no_key_is_refused_and_never_repeated(text: str, tmp_path: Path) -> None:
    write(tmp_path / "key", text)
    with pytest.raises(NoKey) as error:
        owner_from(f"file:{tmp_path / 'key'}")
    assert len(text) < 3 or text[:20] not in str(error.value) + repr(error.value.facts)


@pytest.mark.promise("6.5")
def test_a_key_file_that_others_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "key", HEX, 0o640)
    with pytest.raises(NoKey, match="by others") as error:
        owner_from(f"file:{tmp_path / 'key'}")
    assert error.value.next == f"chmod 600 {tmp_path / 'key'}"


def test_a_command_that_hangs_is_ended(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(owner_key, "COMMAND_S", 0.2)
    with pytest.raises(NoKey, match="was ended"):
        owner_from("command:sleep 60")


@pytest.mark.promise("6.5")
def test_a_command_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(owner_key, "COMMAND_S", 0.5)
    program = write(tmp_path / "hangs", f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/pid\nwait\n", 0o700)
    with pytest.raises(NoKey, match="was ended"):
        owner_from(f"command:{program}")
    pid = int((tmp_path / "pid").read_text())
    for _ in range(500):  # whoever adopted it reaps it when it likes: a zombie is ended
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
        except FileNotFoundError:
            break
        time.sleep(0.01)
    else:
        pytest.fail("what it had started runs on")


@pytest.mark.promise("6.5")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory a process took")
def test_of_a_command_that_prints_without_end_nothing_is_kept() -> None:
    """Before, all of it was, for ten seconds."""
    code = (
        "import resource\nfrom amends.runtime.owner_key import NoKey, owner_from\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: owner_from('command:yes')\nexcept NoKey as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, kept = done.stdout.strip().rsplit("\n", 1)
    assert "more than one line" in said and int(kept) < 20_000, done.stdout


@pytest.mark.promise("6.5")
@pytest.mark.parametrize("kind", ["file", "env", "command", "keyring", "hex", "key"])
def test_a_key_that_is_given_in_place_of_where_it_lies_is_not_repeated(kind: str) -> None:
    with pytest.raises(NoKey) as error:
        owner_from(f"{kind}:{HEX}")
    assert HEX not in str(error.value) + str(error.value.next) + repr(error.value.facts)


def test_the_environment_goes_before_config_and_what_is_said_before_both(tmp_path: Path, monkeypatch: Any) -> None:
    home = Home(tmp_path / "home")
    home.path.mkdir()
    assert owner_of(home)() is None
    write(home.path / "own", HEX)
    home.config.write_text('[seal]\nkey = "file:own"\n')
    right = Owner(bytes.fromhex(HEX)).id
    ask = owner_of(home)
    assert ask() and ask().id == right  # type: ignore[union-attr]
    write(tmp_path / "b", os.urandom(32).hex())
    monkeypatch.setenv("AMENDS_SEAL_KEY", f"file:{tmp_path / 'b'}")
    assert ask() and ask().id != right  # type: ignore[union-attr]
    said = owner_of(home, f"file:{home.path / 'own'}")()
    assert said and said.id == right
    assert load(home.config).channels == ()  # the rest of the file is read as before


@pytest.mark.parametrize("text, line", [("[seal]\nkey = 3\n", 2), ("[seal]\nkeys = 'file:x'\n", 2), ("seal = 1\n", 1),
                                        ("[seal]\nkey = 'x'\n", 2), ("[seal\n", 1)])  # fmt: skip
def test_a_misspelt_seal_section_is_told_with_its_line(text: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(BadConfig) as error:
        seal_key_of(path)
    assert error.value.facts["line"] == line


@pytest.mark.parametrize("text", ["", "stuck_after_s = 3", "[seal]\n",
                                  '[seal] # mine\nkey = "file:old"\n[ui]\nport = 1\n',
                                  '# words\n[ui]\nport = 1\n\n[[notify]]\nname = "a"\nkind = "desktop"\n'])  # fmt: skip
def test_a_source_is_put_into_config_and_all_else_stays(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    made = with_seal_key(text, 'file:/a "b"', path)
    path.write_text(made)
    assert seal_key_of(path) == 'file:/a "b"'
    assert [line for line in text.splitlines() if "key =" not in line and line] == [
        line for line in made.splitlines() if line and (line in text) and "key =" not in line
    ]


def test_a_relative_source_is_made_absolute_where_it_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("file:k") == f"file:{tmp_path / 'k'}" and absolute("command:./a b") == f"command:{tmp_path / 'a'} b"
    assert absolute("env:A") == "env:A" and absolute("command:pass show x") == "command:pass show x"


# ---- agents, the daemon and people ----------------------------------------------------------------------------------

UNDONE: list[str] = []


@compensator("sealing.refund", idempotent=True)
def refund(id: str) -> None:
    UNDONE.append(id)


def charge(id: str) -> dict[str, str]:
    return {"id": f"ch_{id}"}


def undoing(done: dict[str, str]) -> Compensation:
    return Compensation(handler="sealing.refund", kwargs={"id": done["id"]})


def perform(kit: AgentKit, name: str, secret: str = SECRET) -> None:
    with saga_scope(name, kit=kit) as saga:
        saga.execute("pay", charge, {"id": secret}, semantics=COMPENSABLE, compensate=undoing)


def run(*args: str, code: int | None = 0) -> Result:
    result = CliRunner().invoke(main, list(args), prog_name="amends")
    assert code is None or result.exit_code == code, result.output
    return result


AGENT = """
import os, signal, sys
from amends import COMPENSABLE, Compensation, compensator, saga_scope

@compensator("agent.refund", idempotent=True)
def refund(id):
    with open(os.environ["LEDGER"], "a") as ledger:
        ledger.write(id + "\\n")

def charge(id):
    return {"id": "ch_" + id}

if __name__ == "__main__":
    with saga_scope("order-1") as saga:
        saga.execute("pay", charge, {"id": "PLAINTEXT"}, semantics=COMPENSABLE,
                     compensate=lambda done: Compensation(handler="agent.refund", kwargs={"id": done["id"]}))
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.promise("6.5")
def test_whoever_has_no_key_may_stop_everything_and_writes_nothing_else(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    run("init")
    run("seal", "--new-key", str(key), "--by", "ann")
    halted = run("halt", "--by", "bob", "--reason", "it charges twice", "--json")
    assert json.loads(halted.stdout)["mode"] == "halt" and "cannot be kept" in halted.stderr
    with AgentKit("agent", home=home, seal_key=f"file:{key}") as kit:
        [lever] = kit.engine.state.switches.active(kit.log.now())
        assert not kit.log.record(lever.seq).entry.c, "no opening, and so nothing in plain text"
        with pytest.raises(SagaAborted) as aborted, kit.transaction(id="x") as saga:
            saga.execute("pay", lambda: 1, {}, semantics="REVERSIBLE")
        assert getattr(aborted.value.cause, "code", "") == "halted"
    assert json.loads(run("status", "--json", code=None).stdout)["switch"] == "HALTED"
    run("resume", "--by", "bob", "--reason", "it is over")
    with_key = run("halt", "--by", "bob", "--reason", "once more", "--key", f"file:{key}", "--json")
    assert "cannot be kept" not in with_key.stderr
    monkeypatch.setenv("AMENDS_SEAL_KEY", f"file:{key}")
    [told] = json.loads(run("status", "--json", code=None).stdout)["levers"]
    assert (told["by"], told["reason"]) == ("bob", "once more")
    monkeypatch.delenv("AMENDS_SEAL_KEY")
    for words in (("hold", "--all", "--reason", "r"), ("forget", "x", "--reason", "r"), ("unseal",)):
        refusal = run(*words, "--by", "bob", "--json", code=3)
        assert json.loads(refusal.stdout)["error"]["code"] == "seal_key_missing", words
    assert json.loads(run("verify", "--key", f"file:{key}", "--json").stdout)["verdict"] == "INTACT"


@pytest.mark.promise("6.5")
def test_a_dead_agents_work_is_undone_with_the_key_and_not_without_it(tmp_path: Path, home: Path) -> None:
    agent, ledger, key = tmp_path / "agent.py", tmp_path / "ledger", tmp_path / "key"
    agent.write_text(AGENT)
    run("init")
    run("seal", "--new-key", str(key), "--by", "ann")
    env = os.environ | {"LEDGER": str(ledger)}
    amends = [sys.executable, "-m", "amends.cli"]
    refused = subprocess.run([sys.executable, str(agent)], env=env, capture_output=True, text=True)
    assert refused.returncode == 1 and "no key was given" in refused.stderr
    given = env | {"AMENDS_SEAL_KEY": f"file:{key}"}
    assert subprocess.run([sys.executable, str(agent)], env=given).returncode == -signal.SIGKILL
    assert in_files(home) == 0

    without = subprocess.run([*amends, "recoverd", "--once", "--json"], env=env, capture_output=True, text=True)
    assert without.returncode == 3 and json.loads(without.stdout)["error"]["code"] == "seal_key_missing"
    assert not ledger.exists()
    Home(home).config.write_text(f'[seal]\nkey = "file:{key}"\n')
    done = subprocess.run([*amends, "recoverd", "--once", "--json"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recovered"] == ["order-1"] and ledger.read_text() == "ch_PLAINTEXT\n"
    assert in_files(home) == 0


@pytest.mark.promise("6.5")
def test_who_seals_again_with_the_same_key_hears_that_it_is_sealed(tmp_path: Path, home: Path) -> None:
    key = tmp_path / "key"
    run("init")
    run("seal", "--new-key", str(key), "--by", "ann")
    said = run("seal", "--key", f"file:{key}", "--by", "ann", "--save", "--json", code=6)
    assert json.loads(said.stdout)["error"]["code"] == "sealed"


@pytest.mark.promise("6.5")
def test_what_cannot_be_read_is_shown_as_sealed_and_said(tmp_path: Path, home: Path) -> None:
    kit = AgentKit(home=home)
    perform(kit, "order-1")
    header = next(row.saga for row in kit.log.sagas())
    kit.close()
    key = tmp_path / "key"
    run("seal", "--new-key", str(key), "--by", "ann")

    shown = run("show", header).output
    assert "pay(sealed)" in shown and "no key was given" in shown and SECRET not in shown
    assert "(sealed)" in run("ps").output and header in run("ps").output
    lines = [json.loads(line) for line in run("log", "--json").stdout.splitlines()]
    assert {line.get("withheld") for line in lines if "c" in line} == {"seal_key_missing"}
    assert run("show", "order-1", "--key", f"file:{key}").output.count(SECRET) >= 2
    assert run("verify").exit_code == 0
    assert run("doctor", code=1).output.count("no key was given") == 1
    assert json.loads(run("show", header, "--json").stdout)["withheld"] == {"seal_key_missing": 3}

    other = tmp_path / "other"
    make_key_file(other)
    assert "another key than the one given" in run("show", header, "--key", f"file:{other}").output
    new = tmp_path / "new"
    said = run("rotate", "--key", f"file:{key}", "--new-key", str(new), "--by", "bob", "--save").output
    assert "bob changed the key" in said and seal_key_of(Home(home).config) == f"file:{new}"
    assert "is an older one" in run("show", header, "--key", f"file:{key}").output
    assert SECRET in run("show", "order-1").output
    run("forget", "order-1", "--by", "carl", "--reason", "he asked")
    shown = json.loads(run("show", "order-1", "--json").stdout)["steps"]
    assert {step["compensation"]["state"] for step in shown} == {"redacted"}  # nothing is left that undoes it
    assert "it is forgotten" in run("show", "order-1").output
    assert (
        json.loads(run("forget", "order-1", "--by", "carl", "--reason", "x", "--json", code=6).stdout)["error"]["code"]
        == "forgotten"
    )
    run("unseal", "--by", "ann")
    assert json.loads(run("unseal", "--by", "ann", "--json", code=6).stdout)["error"]["code"] == "not_sealed"


@pytest.mark.promise("6.5")
def test_an_altered_record_is_told_apart_at_show(tmp_path: Path, home: Path) -> None:
    kit = AgentKit(home=home)
    perform(kit, "order-1")
    kit.close()
    key = tmp_path / "key"
    run("seal", "--new-key", str(key), "--by", "ann", "--save")
    seq, cell = next(iter(cells(home).items()))
    put(home, "update entry set open = ? where seq = ?", cell[:-1] + bytes([cell[-1] ^ 1]), seq)
    found = run("show", "order-1", "--json", code=7)
    assert json.loads(found.stdout)["error"]["code"] == "seal_altered"


@pytest.mark.promise("6.5")
def test_forgetting_takes_those_inside_and_those_that_followed_with_it(tmp_path: Path, home: Path) -> None:
    key = tmp_path / "key"
    make_key_file(key)
    with AgentKit(home=home, seal_key=f"file:{key}") as kit:
        sealing.begin(kit.log, owner_from(f"file:{key}"), "ann")
        with saga_scope("outer", kit=kit):
            perform(kit, "inner", "INNERWORD")
        kit.undo("outer", by="ann", reason="not wanted")
        assert UNDONE[-1] == "ch_INNERWORD"
        assert len(kit.log.sagas()) == 3
    said = json.loads(run("forget", "outer", "--key", f"file:{key}", "--by", "c", "--reason", "x", "--json").stdout)
    assert len(said["forgotten"]) == 3
    with AgentKit(home=home, seal_key=f"file:{key}") as kit:
        assert {r.withheld for r in kit.log.records() if r.entry.saga and r.entry.c} == {"seal_forgotten"}


@pytest.mark.promise("6.5")
def test_the_key_is_at_hand_to_whoever_saves_where_it_is(tmp_path: Path, home: Path) -> None:
    kit = AgentKit(home=home)  # an agent that runs meanwhile
    perform(kit, "before")
    run("seal", "--new-key", str(tmp_path / "key"), "--by", "ann", "--save")
    perform(kit, "after")
    run("rotate", "--new-key", str(tmp_path / "key2"), "--by", "ann", "--save")
    perform(kit, "last")
    assert not sweep(kit).recovered
    kit.close()
    assert all(is_sealed(cell) for cell in cells(home).values()) and in_files(home) == 0


@pytest.mark.promise("6.5")
def test_an_adopted_home_stays_sealed_and_its_open_sagas_are_carried_over(tmp_path: Path, home: Path) -> None:
    key = tmp_path / "key"
    make_key_file(key)
    kit = AgentKit(home=home, seal_key=f"file:{key}")
    sealing.begin(kit.log, owner_from(f"file:{key}"), "ann")
    old = kit.log.origin
    pid = os.fork()
    if not pid:
        child_kit = AgentKit(home=home, seal_key=f"file:{key}")
        opened = saga_scope("left", kit=child_kit).__enter__()
        undo = Compensation(handler="sealing.refund", kwargs={"id": SECRET})
        opened.execute("pay", charge, {"id": SECRET}, semantics=COMPENSABLE, undo=undo)
        child_kit.log.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    kit.close()
    shutil.copytree(home, tmp_path / "older")
    with AgentKit(home=home, seal_key=f"file:{key}") as kit:
        perform(kit, "lost")
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "older", home)

    adopt(Home(home), "Ada", "restored")
    with pytest.raises(SealKey):
        AgentKit(home=home, warn=quiet)
    with AgentKit(home=home, warn=quiet, seal_key=f"file:{key}") as kit:
        sealing.finish(kit.log)
        [saga] = carry_over(kit)
        assert kit.log.origin != old and kit.log.keeping.seal == owner_from(f"file:{key}").id
        assert any(SECRET.encode() in (r.blob or b"") for r in kit.log.thread(saga))
        sealing.rotate(kit.log, OTHER, "ann")
        assert kit.log.finish_erasing(5.0).done
    assert in_files(home) == 0 and all(is_sealed(cell) for cell in cells(home).values())
    db = apsw.Connection(str(home / "amends.db"))
    assert {seal for (seal,) in db.execute("select seal from datakey")} == {OTHER.id}
    assert list(db.execute("select count(*) from fentry where open is not null and substr(open,1,1) <> x'01'")) == [
        (0,)
    ]
    db.close()


def test_the_sealed_cell_of_the_page_is_opened() -> None:
    frozen = json.loads((Path(__file__).parent / "vectors" / "format.json").read_text(encoding="utf-8"))["sealed"]
    owner = Owner(bytes.fromhex(frozen["owner"]))
    assert owner.id == frozen["seal"]
    key = owner.unwrap(frozen["origin"], frozen["saga"], bytes.fromhex(frozen["wrapped"]))
    assert key is not None and key.hex() == frozen["key"]
    entry = Entry(seq=frozen["seq"], prev="", at=0, kind="", saga=frozen["saga"], c=tuple(frozen["c"]))
    found = parts(bytes.fromhex(frozen["cell"]))
    assert [part.place for part in found] == [0, 2]
    assert [unseal(key, frozen["origin"], entry, part).decode() for part in found] == frozen["openings"]


def test_a_sealed_opening_is_bound_to_what_the_page_says() -> None:
    """Made by hand as FORMAT.md tells it."""
    from nacl.bindings import crypto_aead_xchacha20poly1305_ietf_encrypt as encrypt

    line = b'["' + b"a" * 22 + b'",{"args":1}]\n'
    from hashlib import sha256

    digest = sha256(line).hexdigest()
    entry = parse(
        b'{"seq":7,"prev":"'
        + b"0" * 64
        + b'","at":1,"kind":"step.intended","saga":"s","n":1,"c":["'
        + digest.encode()
        + b'"]}\n'
    )
    key, nonce = bytes(range(32)), bytes(range(24))
    bound = b"amends/seal/1\0" + b"amends.local/x" + b"\0" + (7).to_bytes(8, "big") + digest.encode()
    cell = b"\x01\x00" + (len(line) + 17).to_bytes(4, "big") + nonce + encrypt(b"\0" + line, bound, nonce, key)
    assert [unseal(key, "amends.local/x", entry, part) for part in parts(cell)] == [line]
    names = b"amends/wrap/1\0amends.local/x\0s\0" + KEY.id.encode()
    wrapped = nonce + encrypt(key, names, nonce, bytes([1]) + bytes(range(31)))
    assert KEY.unwrap("amends.local/x", "s", wrapped) == key
    assert KEY.id == hkdf(bytes([1]) + bytes(range(31)), b"amends/seal/id", 8).hex()


@pytest.mark.promise("6.5")
def test_a_daemon_that_runs_meanwhile_finds_the_key_or_ends_in_words(tmp_path: Path, home: Path) -> None:
    from world import eventually

    agent, ledger, key = tmp_path / "agent.py", tmp_path / "ledger", tmp_path / "key"
    agent.write_text(AGENT)
    run("init")
    env = os.environ | {"LEDGER": str(ledger)}
    start = [sys.executable, "-m", "amends.cli", "recoverd"]
    blind = subprocess.Popen(start, env=env, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: json.loads(run("status", "--json", code=None).stdout)["readable"], 10)
        run("seal", "--new-key", str(key), "--by", "ann")
        given = env | {"AMENDS_SEAL_KEY": f"file:{key}"}
        assert subprocess.run([sys.executable, str(agent)], env=given).returncode == -signal.SIGKILL
        assert blind.wait(30) == 3
        assert blind.stderr is not None and "no key was given" in blind.stderr.read()
    finally:
        blind.kill()
        blind.wait()
    assert not ledger.exists()
    status = json.loads(run("status", "--json", code=None).stdout)["seal"]
    assert status["key"] == owner_from(f"file:{key}").id and not status["at_hand"] and not status["left"]
    assert "not at hand" in run("status", code=None).output
    Home(home).config.write_text(f'[seal]\nkey = "file:{key}"\n')
    seeing = subprocess.Popen(start, env=env)
    try:
        eventually(lambda: ledger.exists() and ledger.read_text() == "ch_PLAINTEXT\n", 30)
        assert json.loads(run("status", "--json", code=None).stdout)["seal"]["at_hand"]
    finally:
        seeing.terminate()
        assert seeing.wait(30) == 0


@pytest.mark.promise("6.5")
def test_no_copy_of_a_key_that_was_forgotten_is_left_in_the_room_of_a_page(tmp_path: Path) -> None:
    """Keys lie in the pages of an index, in whose unused room SQLite leaves whole rows behind, though rarely."""
    log = open_at(tmp_path / "home", KEY)
    sealing.begin(log, KEY, "ann")
    for n in range(20):
        log.commit(opened(f"saga{n}", SECRET))
        log.commit(ended(f"saga{n}"))
    dead = log.wrapped("saga7")
    assert dead is not None
    log.truncate()

    def leave_behind(db: Any) -> int:
        """What a move from page to page leaves: the bytes of a row in the room of a page with keys."""
        file = log._file(write=True)
        try:
            for number in range(1, file.xFileSize() // 4096):
                page = file.xRead(4096, number * 4096)
                at = page.find(dead.wrapped)
                listed, content = 8 + 2 * int.from_bytes(page[3:5], "big"), int.from_bytes(page[5:7], "big")
                if page[0] == 0x0A and at >= 0 and content - listed > len(dead.wrapped):
                    file.xWrite(dead.wrapped, number * 4096 + content - len(dead.wrapped))
                    return number
        finally:
            file.xClose()
        return 0

    assert log.rewrite(leave_behind), "no page had room for it: this test shows nothing"
    sealing.forget(log, ["saga7"], "ann", "asked")
    assert log.finish_erasing(2.0).done and log.rows("pragma integrity_check", ()) == [("ok",)]
    log.close()
    assert in_files(tmp_path / "home", dead.wrapped[24:]) == 0


@pytest.mark.promise("6.5")
@pytest.mark.parametrize("verb", ["seal", "unseal"])
def test_a_full_disk_in_the_middle_does_not_make_anybody_throw_the_key_away(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fact stood, and what was said was that nothing had been written."""
    log = open_at(tmp_path / "home", KEY)
    log.commit(opened("saga0", SECRET))
    log.close()
    key, source = tmp_path / "key", f"file:{tmp_path / 'key'}"
    if verb == "unseal":
        run("seal", "--new-key", str(key), "--by", "ann", "--save")

    def full(*args: Any) -> None:
        raise DiskFull("No space is left.", next="Free some.")

    monkeypatch.setattr(sealing, "step", full)
    words = ["--new-key", str(key)] if verb == "seal" else ["--key", source]
    done = CliRunner().invoke(main, [verb, *words, "--by", "ann", "--json"], prog_name="amends")
    error = json.loads(done.stdout)["error"]
    assert done.exit_code == 10 and error["code"] == "disk_full", done.output
    assert owner_from(source).id in error["message"] and "Record" in error["message"]


@pytest.mark.promise("6.5")
@pytest.mark.parametrize("table", ["sealing", "datakey"])
def test_a_table_that_is_dropped_between_two_looks_is_no_trouble(log: SqliteLog, home: Path, table: str) -> None:
    """The log's own thread, or another process, may have sealed or unsealed the last record just then."""
    sealing.begin(log, KEY, "ann")
    sealing.finish(log)
    put_table = f"create table if not exists {table}(origin text, at integer, upto integer)"
    log.rewrite(lambda db: db.run(put_table))
    rows, dropped = log.rows, []

    def raced(sql: str, bindings: Any, most: int = 1 << 62) -> Any:
        found = rows(sql, bindings, most)
        if "sqlite_schema" in sql and not dropped:
            dropped.append(log.rewrite(lambda db: db.run(f"drop table {table}")))
        return found

    log.rows = raced  # type: ignore[method-assign]
    assert (log.marks() if table == "sealing" else log.wrapped("saga0")) in ([], None)
    assert dropped
    del log.rows
    log.rewrite(lambda db: db.run(sqlite.DATA_KEYS))
