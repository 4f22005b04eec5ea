"""Records go, and everything that was ever signed, counted or acknowledged is still there."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_contract import Keys, Ledger, done, ended, facts, intended, opened
from test_worlds import STEP, perform
from world import World

from amends import AgentKit, saga_scope
from amends.store import gaps
from amends.store.audit import verify
from amends.store.chain import Draft
from amends.store.compact import Compacted, compact, runs_of
from amends.store.entry import leaf
from amends.store.errors import AmendsError, Closed, Damaged, NotFound, Refused
from amends.store.evidence import Evidence
from amends.store.home import Home
from amends.store.identity import adopt
from amends.store.log import MemoryLog, Overlay
from amends.store.merkle import check_consistency, check_inclusion, consistency_proof, inclusion_proof, root_at
from amends.store.sqlite import SqliteLog, open_read
from amends.store.stubs import Stub, bridged, cover, merged


def make(folder: Path, keys: Keys | None = None, view: Any = None, **more: Any) -> SqliteLog:
    return SqliteLog(folder / "amends.db", view or Ledger(), keys or Keys(), **more)


def saga(name: str, steps: int = 1) -> list[Draft]:
    drafts = [opened(name, b'{"name":"x"}')]
    for step in range(1, steps + 1):
        drafts += [intended(name, step), done(name, step)]
    return [*drafts, ended(name)]


def filled(log: Any, sagas: int, seed: int = 0, rest: int = 300) -> list[str]:
    """So many sagas, side by side, and then enough others for them to be old."""
    dice = random.Random(seed)
    names = [f"s{number}" for number in range(sagas)]
    waiting = [saga(name, dice.randint(0, 3)) for name in names]
    going: list[list[Draft]] = []
    while waiting or going:
        while waiting and len(going) < 4:
            going.append(waiting.pop(0))
        one = dice.choice(going)
        log.commit(facts(one.pop(0)))
        going = [left for left in going if left]
    for number in range(rest // 4):
        log.commit(facts(*saga(f"z{number}")))
    return names


def pressed(log: Any, names: list[str]) -> Compacted:
    return compact(log, names, within_ms=1, use=lambda name: {"sagas": 1}, by="Ada")


def naive(hashes: list[bytes]) -> bytes:
    """RFC 6962 section 2.1, word for word."""
    if len(hashes) < 2:
        return hashes[0] if hashes else sha256(b"").digest()
    half = 1 << (len(hashes) - 1).bit_length() - 1
    return sha256(b"\1" + naive(hashes[:half]) + naive(hashes[half:])).digest()


def seqs(log: Any) -> list[int]:
    return [record.entry.seq for record in log.records()]


def raw(log: SqliteLog, sql: str, *bindings: Any) -> list[Any]:
    with log._lock:
        return log._db.run(sql, bindings).fetchall()


# ---- the cover ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.4")
@given(st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_a_cover_gives_every_root_that_ends_outside_a_gap_or_at_a_cut(size: int, seed: int) -> None:
    dice = random.Random(seed)
    hashes = [sha256(b"%d" % i).digest() for i in range(size)]
    gone = [dice.random() < 0.6 for _ in range(size)]
    cuts = {cut for cut in range(size + 1) if dice.random() < 0.1}
    reader = Holey(hashes, [])
    for first, last in runs_of([place for place in range(size) if gone[place]]):
        pieces = [Stub(i, 0, hashes[i]) for i in range(first, last + 1)]
        middle = dice.randint(1, len(pieces))
        early = merged(pieces[:middle], cuts)
        stubs = merged([*early, *pieces[middle:]], cuts)
        assert stubs == merged(pieces, cuts), "what touches is merged as if it had gone at once"
        assert bridged(stubs, first, last + 1)
        reader.stubs += stubs
    for n in range(size + 1):
        if n in cuts or n == size or not gone[n] or not n or not gone[n - 1]:
            assert root_at(reader, n) == naive(hashes[:n])
    for kept in [place for place in range(size) if not gone[place]]:
        proof = inclusion_proof(reader, kept, size)
        assert check_inclusion(hashes[kept], kept, size, proof, naive(hashes))
    for old in [cut for cut in cuts if cut]:
        proof = consistency_proof(reader, old, size)
        assert check_consistency(old, size, naive(hashes[:old]), naive(hashes), proof)


class Holey:
    """Hashes of which some are gone."""

    def __init__(self, hashes: list[bytes], stubs: list[Stub]) -> None:
        self.hashes, self.stubs = hashes, stubs

    def leaf(self, i: int) -> bytes:
        if any(stub.start <= i < stub.stop and stub.level for stub in self.stubs):
            raise NotFound("gone")
        return self.hashes[i]

    def run(self, n: int) -> bytes:
        return naive(self.hashes[n << 8 : (n + 1) << 8])

    def gaps(self, low: int, high: int) -> list[Stub]:
        return [stub for stub in self.stubs if stub.start < high and stub.stop > low]


def test_a_cover_is_as_small_as_can_be() -> None:
    assert list(cover(0, 8, ())) == [(0, 3)]
    assert list(cover(1, 8, ())) == [(1, 0), (2, 1), (4, 2)]
    assert list(cover(0, 8, (6,))) == [(0, 2), (4, 1), (6, 1)]


def test_what_does_not_join_is_said() -> None:
    with pytest.raises(Damaged):
        merged([Stub(2, 0, bytes(32)), Stub(4, 0, bytes(32))], ())


# ---- every log ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "file"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    log: Any = MemoryLog(Ledger()) if request.param == "memory" else make(tmp_path)
    yield log
    log.close()


@pytest.mark.promise("6.4")
def test_whole_sagas_go_and_nothing_else_changes(log: Any) -> None:
    names = filled(log, 40)
    before = {record.entry.seq: record for record in log.records()}
    spent, threads = dict(log.view.open), dict(log._chain.threads)
    gone = names[::2]
    done = pressed(log, gone)
    assert (done.sagas, done.left, done.erased) == (20, [], True)
    after = {record.entry.seq: record for record in log.records()}
    there = {seq: record for seq, record in before.items() if record.entry.saga not in gone}
    assert {seq: after[seq] for seq in there} == there
    assert done.entries == len(before) - len(there)
    assert all(record.entry.saga not in gone for record in after.values())
    assert {row.saga for row in log.sagas()}.isdisjoint(gone)
    assert all(log.thread(name) == [] for name in gone)
    assert all(log.thread(name) for name in names[1::2])
    assert (log.view.open, log._chain.threads) == (spent, threads)
    [fact] = [record for record in after.values() if record.entry.kind == "compaction.made"]
    named = {seq for first, last in fact.entry.runs for seq in range(first, last + 1)}
    assert named == before.keys() - there.keys()
    assert (fact.entry.count, fact.entry.use, fact.entry.within_ms) == (done.entries, {"sagas": 20}, 1)
    assert b'"by":"Ada"' in fact.blob


def test_a_record_that_was_removed_is_told_from_one_that_never_was(log: Any) -> None:
    names = filled(log, 4)
    place = log.thread(names[1])[0].entry.seq
    pressed(log, names[:3])
    with pytest.raises(NotFound) as gone:
        log.record(place)
    assert gone.value.code == "compacted"
    with pytest.raises(NotFound) as never:
        log.record(log.size)
    assert never.value.code == "not_found"


def test_the_tree_and_the_head_go_on_as_if_nothing_had_been_removed(log: Any) -> None:
    names = filled(log, 20)
    hashes = [leaf(record.line) for record in log.records()]
    pressed(log, names)
    hashes += [leaf(record.line) for record in log.records(len(hashes))]
    assert log.head() == (len(hashes), naive(hashes))
    with pytest.raises(ZeroDivisionError):  # a spoiled fold is made anew, over the gap
        log.commit(facts(*saga("b")[:-1], Draft("step.failed", {"saga": "b", "step": 1})))
    log.commit(facts(*saga("c")))
    hashes += [leaf(record.line) for record in log.records(len(hashes))]
    assert log.head() == (len(hashes), naive(hashes))


def test_what_is_removed_twice_is_passed_over(log: Any) -> None:
    names = filled(log, 10)
    assert pressed(log, names).sagas == 10
    again = pressed(log, names)
    assert (again.sagas, again.entries) == (0, 0)


@pytest.mark.promise("6.4")
def test_what_is_new_open_or_held_stays(log: Any) -> None:
    names = filled(log, 6)
    log.commit(facts(opened("open")))
    filled(log, 0)
    size = log.size
    with pytest.raises(Refused) as refused:
        pressed(log, [names[0], "open"])
    assert refused.value.code in ("split_saga", "open_saga")
    log.commit(facts(Draft("hold.placed", {"target": names[1]}, up=True)))
    with pytest.raises(Refused) as refused:
        pressed(log, names[:2])
    assert refused.value.code == "held"
    assert pressed(log, ["z74"]).left == ["z74"]
    assert log.size == size + 1 and seqs(log) == list(range(size + 1))
    assert pressed(log, names[2:]).sagas == 4


@pytest.mark.promise("6.4")
def test_a_fact_that_removes_what_may_not_go_is_not_written(log: Any) -> None:
    names = filled(log, 6)
    thread = [record.entry.seq for record in log.thread(names[0])]
    log.settle()
    wrong = {
        "split_saga": [(thread[0], thread[0])],
        "no_saga": [(0, thread[0])],
        "too_new": [(log.size - 10, log.size - 10)],
    }
    size = log.size
    for code, runs in wrong.items():
        with pytest.raises(Refused) as refused:
            gaps.examine(log, runs, log.anchored())
        assert refused.value.code == code
    with pytest.raises(Refused):
        gaps.examine(log, [(thread[0], thread[-1])], thread[-1] + 1)
    if isinstance(log, SqliteLog):
        for runs in wrong.values():
            with pytest.raises(AmendsError):
                log.commit(facts(Draft("compaction.made", {"runs": tuple(runs), "count": 1}, up=True)))
        log.commit(facts(opened("goes-on")))
        assert seqs(log) == list(range(size + 1))


class Ticks:
    """Both clocks tick as they are told."""

    def __init__(self, boot: str = "b1", at: int = 2_000_000_000_000_000, up: int = 1000) -> None:
        self.boot, self.at, self.up = boot, at, up

    def go(self, wall_ms: int, up_ms: int) -> None:
        self.at, self.up = self.at + wall_ms * 1000, self.up + up_ms

    def wall_us(self) -> int:
        return self.at

    def boot_ms(self) -> int:
        return self.up

    def boot_id(self) -> str:
        return self.boot


def timed(name: str) -> list[Draft]:
    return [Draft("saga.opened", {"saga": name}, up=True), ended(name)]


@pytest.mark.promise("6.4")
def test_a_saga_whose_look_at_the_clocks_others_build_on_stays(log: Any) -> None:
    log.clock = clock = Ticks()
    log.commit(facts(*timed("first")))
    moves = {
        "w": (60, 50),
        "d": (900, 400),
        "x": (1, 1),
        "e": (400, 900),
        "f": (1, 1),
        "a": (500, 500),
        "c": (700, 700),
    }
    for name, (wall, up) in moves.items():
        clock.go(wall, up)
        log.commit(facts(*timed(name)))
    log.clock = clock = Ticks("b2", clock.at + 5_000_000, 10)
    for number in range(80):
        log.commit(facts(*saga(f"z{number}")))
    log.commit(facts(*timed("last")))
    lived = log.now().lived
    made = pressed(log, list("adxefc"))
    # c: the next look at the clocks is a boot's. d, x and e: clocks that run apart by more than is carried over count
    # other milliseconds together than one after the other.
    assert "c" in made.left and not {"a", "f"} & set(made.left)
    assert {"d", "x", "e"} & set(made.left)
    assert log.now().lived == lived


# ---- the file -------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SqliteLog]:
    log = make(tmp_path)
    yield log
    log.close()


def reopened(log: SqliteLog, keys: Keys | None = None, **more: Any) -> SqliteLog:
    return SqliteLog(log.path, type(log.view)(), keys or log.identity, **more)


@pytest.mark.promise("6.4")
def test_it_opens_with_and_without_its_memo_and_is_the_same(file: SqliteLog) -> None:
    names = filled(file, 40)
    pressed(file, names[5:35])
    for memo in (True, False):
        image, head = file.image(), file.head()
        file.close()
        other = reopened(file)
        assert (other.image(), other.head(), other.warnings) == (image, head, [])
        if memo:
            raw(other, "delete from memo")
        file = other
    file.close()


@pytest.mark.promise("6.4")
@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_every_kept_root_comes_out_whatever_is_removed(seed: int) -> None:
    import tempfile

    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        keys = Keys()
        log = make(Path(folder), keys)
        names = filled(log, 60, seed)
        hashes = [leaf(record.line) for record in log.records()]
        kept = {size for (size,) in raw(log, "select seq + 1 from entry where length(sig) = 96")}
        copies = {dice.randrange(1, len(hashes)) for _ in range(4)}
        for size in copies:
            log.commit(facts(Draft("copy.made", {"out": "bundle", "event": "0" * 64, "upto": size, "payload": "none"})))
        dice.shuffle(names)
        while names:
            count = dice.randint(1, 30)
            some, names = names[:count], names[count:]
            pressed(log, some)
            if dice.random() < 0.5:
                log.close()
                log = make(Path(folder), keys)
                assert log.warnings == []
        hashes += [leaf(record.line) for record in log.records(len(hashes))]
        head = log.head()
        stubs = [Stub(*row) for row in raw(log, "select start, level, hash from stub order by start")]
        checkpoints = dict(raw(log, "select size, sig from checkpoint"))
        log.close()
        assert head[1] == naive(hashes)
        peek = open_read(log.path)
        for size in kept | copies | {anchor[0] for anchor in keys.anchored[-1:]}:
            assert root_at(peek, size) == naive(hashes[:size]), (seed, size)
        peek.close()
        for size, sig in checkpoints.items():
            assert sig == naive(hashes[:size]) + keys.sign(size, naive(hashes[:size]))
        cuts = set(checkpoints) | copies
        for one, two in zip(stubs, stubs[1:], strict=False):
            wider = one.level == two.level and one.start >> one.level + 1 == two.start >> one.level + 1
            assert not (one.stop == two.start and wider) or one.stop in cuts, "they would have merged"


# ---- others at the same time ----------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys, time
sys.path[:0] = {paths!r}
from test_compaction import *
path, arg = Path(sys.argv[1]), int(sys.argv[2])
"""

WRITER = """
log = make(path)
print("ready", flush=True)
made = 0
while not (path / "stop").exists():
    for entry in log.commit(facts(*saga(f"w{arg}.{made}"))):
        pass
    made += 1
    print(f"w{arg}.{made - 1}", flush=True)
    if made % 40 == 0:  # a reader that has to go over the gaps
        assert len(list(log.lines(0, 500))) <= 500
log.close()
"""

COMPACTOR = """
log = make(path)
log.settle()
seen = [0]
def count(cursor, sql, bindings):
    seen[0] += 1
    if seen[0] == arg:
        print("dying", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return True
log._db.db.exec_trace = count
made = pressed(log, [f"s{number}" for number in range(30)])
print("whole", made.sagas, flush=True)
os._exit(0)
"""


def start(folder: Path, body: str, arg: int) -> subprocess.Popen[str]:
    code = CHILD.format(paths=[str(Path(__file__).parent)]) + body
    return subprocess.Popen([sys.executable, "-c", code, str(folder), str(arg)], stdout=subprocess.PIPE, text=True)


@pytest.mark.promise("6.4")
def test_writers_in_other_processes_lose_nothing_and_go_on(tmp_path: Path) -> None:
    log = make(tmp_path)
    names = filled(log, 120, rest=400)
    children = [start(tmp_path, WRITER, number) for number in range(3)]
    for child in children:
        assert child.stdout and child.stdout.readline() == "ready\n"
    removed: set[str] = set()
    for at in range(0, 120, 20):
        assert pressed(log, names[at : at + 20]).sagas == 20
        removed |= set(names[at : at + 20])
    log.refresh()
    theirs = [row.saga for row in log.sagas() if row.saga.startswith("w") and not row.open][::-1]
    theirs = theirs[: len(theirs) // 2]
    made = pressed(log, theirs)
    removed |= set(theirs) - set(made.left)
    (tmp_path / "stop").touch()
    told = {line.strip() for child in children for line in child.communicate(timeout=60)[0].splitlines()}
    assert [child.returncode for child in children] == [0, 0, 0]
    log.refresh()
    there = {row.saga for row in log.sagas()}
    assert told - removed <= there and told, "acknowledged, and not removed by us"
    assert there.isdisjoint(removed)
    head, image = log.head(), log.image()
    log.close()
    for forget in (False, True):
        again = make(tmp_path)
        assert (again.head()[1], again.view.open) == (head[1], {}) if again.size == head[0] else True
        if forget:
            raw(again, "delete from memo")
        assert again.image()[0] == image[0]
        again.close()


@pytest.mark.promise("6.4")
def test_a_kill_anywhere_leaves_all_or_nothing_of_a_piece(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    log = make(made)
    filled(log, 30)
    before = {record.entry.seq: record.line for record in log.records()}
    log.close()
    deaths, finished, nothing, everything = 0, False, 0, 0
    at = 1
    while not finished:
        home = tmp_path / str(at)
        shutil.copytree(made, home)
        child = start(home, COMPACTOR, at)
        said = child.communicate(timeout=60)[0].split()
        finished = "whole" in said
        if not finished:
            assert (child.returncode, said) == (-signal.SIGKILL, ["dying"])
            deaths += 1
        log = make(home)
        after = {record.entry.seq: record.line for record in log.records()}
        facts_there = [record.entry for record in log.records() if record.entry.kind == "compaction.made"]
        gone = before.keys() - after.keys()
        named = {seq for fact in facts_there for first, last in fact.runs for seq in range(first, last + 1)}
        assert gone == named, at
        assert all(after[seq] == line for seq, line in before.items() if seq not in gone)
        nothing, everything = nothing + (not gone), everything + bool(gone)
        assert pressed(log, [f"s{number}" for number in range(30)]).sagas == (0 if gone else 30)
        log.close()
        shutil.rmtree(home)
        at += 1 if at < 12 else 7
    assert deaths > 15 and nothing and everything > 1


@pytest.mark.promise("6.4")
def test_who_slept_while_what_it_had_seen_was_removed_goes_on(tmp_path: Path) -> None:
    keys = Keys()
    asleep = make(tmp_path, keys)
    asleep.commit(facts(*saga("early")[:-1]))  # open, when it falls asleep
    size = asleep.size
    awake = make(tmp_path, keys)
    awake.commit(facts(ended("early")))
    names = filled(awake, 10)
    assert pressed(awake, ["early", *names]).sagas == 11
    with pytest.raises(NotFound):
        awake.record(size - 1)
    asleep.commit(facts(*saga("late")))
    awake.refresh()
    assert asleep.image() == awake.image() and asleep.head() == awake.head()
    assert "early" not in asleep._chain.threads
    asleep.close()
    awake.close()


def test_a_gap_that_nothing_bridges_is_not_folded_over(tmp_path: Path) -> None:
    log = make(tmp_path)
    names = filled(log, 20)
    pressed(log, names[:10])
    raw(log, "delete from memo")
    start = raw(log, "select min(start) from stub")[0][0]
    log.close()
    edited(log, f"delete from stub where start = {start}")
    with pytest.raises(Damaged) as damaged:
        make(tmp_path)
    assert damaged.value.facts["seq"] == start


@pytest.mark.promise("6.2")
def test_a_stub_that_was_changed_does_not_open(tmp_path: Path) -> None:
    log = make(tmp_path)
    names = filled(log, 20, rest=256)
    pressed(log, names)
    log.close()
    edited(log, "delete from memo", "delete from tile", "update stub set hash = zeroblob(32) where level < 2")
    with pytest.raises(Damaged):
        make(tmp_path)


def edited(log: SqliteLog, *statements: str) -> None:
    code = "import sys, apsw\ndb = apsw.Connection(sys.argv[1])\nfor sql in sys.argv[2:]: db.execute(sql)"
    subprocess.run([sys.executable, "-c", code, log.path, *statements], check=True)


# ---- room -----------------------------------------------------------------------------------------------------------

ROOMY = """
log = make(path)
body = b'{"args":{"text":"' + b"x" * 600 + b'"}}'
names = [f"s{number}" for number in range(4800)]
for at in range(0, 4800, 40):
    drafts = [draft for name in names[at : at + 40] for draft in saga(name)]
    for draft in drafts:
        if draft.openings:
            draft.openings = (b'{"args":"' + os.urandom(150).hex().encode() + b'"}',)
    log.commit(facts(*drafts))
for number in range(300):
    log.commit(facts(*saga(f"z{number}")))
log.close()
log = make(path)
log.truncate()
size = lambda: sum(os.path.getsize(log.path + end) for end in ("", "-wal"))
begun, most, db = size(), 0, os.path.getsize(log.path)
run, many = log._db.run, log._db.many
def watched(call):
    def look(*args):
        global most
        try:
            return call(*args)
        finally:
            most = max(most, size())
    return look
log._db.run, log._db.many = watched(run), watched(many)
made = pressed(log, [name for number, name in enumerate(names) if number % 10 >= arg])
log.truncate()
print(begun, max(most, size()), db, os.path.getsize(log.path), made.entries, made.bytes, log.size, made.erased)
log.close()
"""


@pytest.mark.promise("6.4")
@pytest.mark.parametrize("kept", [0, 3])
def test_the_file_shrinks_to_what_is_left_and_never_needs_twice_its_size(tmp_path: Path, kept: int) -> None:
    child = start(tmp_path, ROOMY, kept)
    said = child.communicate(timeout=250)[0].split()
    assert child.returncode == 0
    begun, most, before, after, entries, freed, size = map(int, said[:-1])
    assert entries > 18_000 * (10 - kept) // 10 and size > 19_000
    assert most <= 1.25 * begun, (begun, most)
    assert after <= before * (2 * kept / 10 + 0.12), "pages of which something is left may stay half full"
    assert freed > 0 and said[-1] == "True"


# ---- what the runtime folds -----------------------------------------------------------------------------------------


@pytest.mark.promise("6.4")
@settings(max_examples=15)
@given(st.lists(st.tuples(st.lists(STEP, max_size=3), st.booleans()), min_size=2, max_size=8), st.integers(0, 999))
def test_whatever_went_on_the_state_without_the_sagas_that_went_is_the_same(
    tales: list[tuple[list[dict[str, Any]], bool]], seed: int
) -> None:
    world, kit = World(), AgentKit.in_memory()
    for number, (plans, fails) in enumerate(tales):
        with suppress(AmendsError, ValueError, OSError, KeyError), saga_scope(f"it{number}", kit=kit) as saga:
            perform(saga, world, plans)
            if fails:
                raise ValueError("the body")
    for number in range(150):
        with saga_scope(f"later{number}", kit=kit):
            pass
    log, dice = kit.log, random.Random(seed)
    settled = [row.saga for row in log.sagas() if not row.open]
    went = 0
    for _ in range(3):
        dice.shuffle(settled)
        some, settled = settled[: len(settled) // 2], settled[len(settled) // 2 :]
        made = pressed(log, some)
        view, standing = log.image()
        open_ones = dict(log.view.sagas)
        log._refold()
        assert log.image()[1] == standing
        assert msgspec.msgpack.decode(log.image()[0]) == msgspec.msgpack.decode(view)
        assert log.view.sagas.keys() == open_ones.keys()
        assert made.sagas + len(made.left) == len(some)
        went += made.sagas
    assert went or len(tales) < 3
    kit.close()


# ---- a whole home ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.4")
def test_a_home_that_was_compacted_verifies_and_is_adopted_with_its_gaps(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with AgentKit(home=home) as kit:
        for number in range(300):
            with saga_scope(f"it{number}", kit=kit):
                pass
        settled = [row.saga for row in kit.log.sagas() if not row.open][::-1]
        assert pressed(kit.log, settled[:20]).sagas == 20
        assert all(kit.log.stands(record.entry.seq, record.line) for record in kit.log.records())
        open_one = kit.log.record(next(iter(kit.log.lines(5)))[0].seq)
        assert not kit.log.stands(open_one.entry.seq, open_one.line.replace(b'"at":1', b'"at":2'))
    assert verify(home).verdict == "INTACT", verify(home).findings
    with AgentKit(home=home) as kit:  # nothing is said on the way, and more can go
        assert kit.log.warnings == []
        assert pressed(kit.log, settled[10:50]).sagas == 30
        root = kit.log.head()[1]
    said = verify(home)
    assert said.verdict == "INTACT", said.findings
    shutil.copytree(home, tmp_path / "older")
    with AgentKit(home=home) as kit, saga_scope("later", kit=kit):
        pass
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "older", home)
    adopt(Home(home), "Ada", "set back")
    with AgentKit(home=home, warn=lambda text: None) as kit:
        assert kit.log.record(0).entry.follows_root == root.hex()
    said = verify(home)
    assert said.verdict == "INTACT", said.findings
    with Evidence(Home(home).db) as evidence:
        [origin] = evidence.origins()
        places = [row for row in evidence.stored_of(origin) if isinstance(row, Stub)]
        assert places and not evidence.count("stub")


@pytest.mark.promise("6.2")
def test_a_record_beside_a_gap_that_was_altered_is_not_taken_for_what_was_written(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.commit(facts(*saga("first")))
    log.commit(facts(Draft("note", {})))
    beside = log.size - 1
    names = filled(log, 10)
    pressed(log, names)
    record = log.record(beside)
    with pytest.raises(NotFound):
        log.record(beside + 1)
    assert log.stands(beside, record.line)
    assert not log.stands(beside, record.line.replace(b'"kind":"note"', b'"kind":"nope"'))
    log.close()


@pytest.mark.promise("6.2")
@pytest.mark.parametrize(
    "sql",
    [
        "delete from stub where start = (select max(start) from stub)",
        "update stub set hash = zeroblob(32) where start = (select min(start) from stub)",
        "delete from entry where seq = (select min(start) - 1 from stub)",
        "update checkpoint set sig = zeroblob(96)",
        "insert into stub values(2, 0, zeroblob(32))",
    ],
)
def test_a_gap_that_was_made_or_altered_by_hand_is_found(tmp_path: Path, sql: str) -> None:
    home = tmp_path / "home"
    with AgentKit(home=home) as kit:
        for number in range(800):
            with saga_scope(f"it{number}", kit=kit):
                pass
        settled = [row.saga for row in kit.log.sagas() if not row.open][::-1]
        pressed(kit.log, settled[5:600])
        path = kit.log.path
        assert raw(kit.log, "select count(*) from checkpoint")[0][0]
    assert verify(home).verdict == "INTACT"
    subprocess.run(
        [sys.executable, "-c", "import sys, apsw\napsw.Connection(sys.argv[1]).execute(sys.argv[2])", path, sql]
    )
    assert verify(home).verdict != "INTACT"


def test_what_an_open_saga_goes_back_to_is_left(log: Any) -> None:
    names = filled(log, 6)
    log.commit(facts(Draft("saga.opened", {"saga": "later", "of": names[0]})))
    assert pressed(log, names[:3]).left == [names[0]]
    log.commit(facts(ended("later")))
    assert pressed(log, names[:3]).sagas == 1


def test_an_overlay_removes_nothing(tmp_path: Path) -> None:
    log = make(tmp_path)
    names = filled(log, 6)
    with pytest.raises(Closed):
        pressed(Overlay(log), names)
    assert len(seqs(log)) == log.size
    log.close()


# ---- what is said about a saga outside of it ------------------------------------------------------------------------


def about(kind: str, **fields: Any) -> Draft:
    return Draft(kind, fields, up=True)


@pytest.mark.promise("6.4")
def test_what_is_about_a_saga_and_nothing_else_goes_with_it_whatever_its_kind(log: Any) -> None:
    ask, other = "a" * 64, "b" * 64
    step = Draft("step.asked", {"saga": "one", "step": 1, "request": ask})
    log.commit(facts(opened("one"), step, opened("two"), Draft("step.asked", {"saga": "two", "request": other})))
    [vote] = log.commit(facts(about("vote.cast", of="one", request=ask)))
    log.commit(facts(ended("one"), ended("two")))
    gone = [about("new.kind", of="one"), about("told.more", request=ask), about("looked.at", ref=vote.seq)]
    places = {vote.seq} | {log.commit(facts(draft))[0].seq for draft in gone}
    places.add(log.commit(facts(about("of.that", ref=max(places))))[0].seq)
    stays = [
        about("vote.cast", of="two", request=other), about("vote.cast", of="one", request=other),
        about("other", of="two"), about("hold.placed", target="two"), about("key.said", of="one"),
        about("switch.said", ref=vote.seq), about("by.place", ref=step_of(log, "two")), about("none"),
    ]  # fmt: skip
    log.commit(facts(*stays))
    names = filled(log, 4)
    log.settle()
    for draft in stays:
        place = next(r.entry.seq for r in log.records() if r.entry.kind == draft.kind and fits(r.entry, draft))
        with pytest.raises(Refused) as refused:
            gaps.examine(log, runs_of(sorted(own(log, "one") | {vote.seq, place})), log.anchored())
        assert refused.value.code == "no_saga", draft.kind
    before, going = set(seqs(log)), places | own(log, "one") | own(log, names[0])
    done = pressed(log, ["one", names[0]])
    assert done.left == [] and before - set(seqs(log)) == going and done.entries == len(going)


def fits(entry: Any, draft: Draft) -> bool:
    return all(getattr(entry, name) == value for name, value in draft.fields.items())


def own(log: Any, name: str) -> set[int]:
    return {record.entry.seq for record in log.thread(name)}


def step_of(log: Any, name: str) -> int:
    return int(log.thread(name)[1].entry.seq)


@pytest.mark.promise("6.4")
@pytest.mark.parametrize("link", ["parent", "of"])
def test_a_hold_on_a_saga_covers_what_is_inside_it_and_follows_it(log: Any, link: str) -> None:
    log.commit(facts(opened("outer"), Draft("saga.opened", {"saga": "inner", link: "outer"}), ended("inner")))
    log.commit(facts(ended("outer")))
    names = filled(log, 4)
    [hold] = log.commit(facts(about("hold.placed", target="outer")))
    with pytest.raises(Refused) as refused:
        pressed(log, ["inner", names[0]])
    assert refused.value.code == "held" and own(log, "inner") and own(log, names[0])
    log.commit(facts(about("hold.lifted", ref=hold.seq)))
    assert pressed(log, ["inner"]).sagas == 1
