"""`verify` says no to every altered bit and to every way of rewriting a log, each by its name, one finding a fault."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from amends.store.audit import verify
from amends.store.chain import Draft
from amends.store.entry import leaf, line_of, parse
from amends.store.errors import Illegal
from amends.store.evidence import _expected
from amends.store.examiner import CODES, EXITS
from amends.store.home import Home
from amends.store.identity import adopt, open_log
from amends.store.keys import Identity
from amends.store.merkle import Peaks
from amends.store.squeeze import MAGIC, unshut

OPEN_SAGAS = 2


class Tally:
    """A view with a memo: how many entries there were of each kind, and which sagas are open."""

    name = "tally"
    version = 3

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        self.open: dict[str, int] = {}
        self.archive: Any = None

    def fold(self, entry: Any, lived: int) -> None:
        if entry.kind == "saga.opened" and entry.saga in self.open:
            raise Illegal("open already")
        self.kinds[entry.kind] = self.kinds.get(entry.kind, 0) + 1
        if entry.kind == "saga.opened":
            self.open[entry.saga] = entry.seq
        elif entry.kind == "saga.ended":
            self.open.pop(entry.saga, None)

    def dump(self) -> bytes:
        return msgspec.msgpack.encode((self.kinds, self.open))

    def load(self, blob: bytes) -> None:
        self.kinds, self.open = msgspec.msgpack.decode(blob, type=tuple[dict[str, int], dict[str, int]])


def quiet(text: str) -> None:
    pass


def saga(log: Any, name: str, steps: int = 2, end: bool = True) -> None:
    def commit(*drafts: Draft) -> Any:
        return log.commit(lambda view, now: drafts)[-1]

    opened = Draft(
        "saga.opened", {"saga": name, "fence": 1}, (b'{"name":"order"}',) if name.endswith("n") else (), True
    )
    commit(opened)
    for step in range(1, steps + 1):
        fields = {"saga": name, "step": step, "fence": 1, "tool": "stripe.charge", "sem": "compensable"}
        intent = commit(
            Draft("step.intended", fields, (b'{"args":{"amount_minor":%d}}' % step, b'{"email":"a@b"}'), True)
        )
        commit(Draft("step.done", {"saga": name, "step": step, "ref": intent.seq}, (b'{"result":{"id":"ch_1"}}',)))
    if end:
        commit(Draft("saga.ended", {"saga": name, "out": "committed"}))


def large(log: Any, name: str) -> None:
    """A saga with an opening that lies compressed, and with a fact in two parts."""
    fields = {"saga": name, "step": 1, "fence": 1}
    drafts = [
        Draft("saga.opened", {"saga": name, "fence": 1}, (), True),
        Draft("step.intended", {**fields, "tool": "mail.send"}, (b'{"args":{"text":"%s"}}' % (b"pack my box " * 120),)),
        Draft("step.done", fields, tuple(b'{"at":%d}' % n for n in range(40))),
        Draft("saga.ended", {"saga": name, "out": "committed"}),
    ]
    for draft in drafts:
        log.commit(lambda view, now, draft=draft: (draft,))


def build(path: Path, entries: int = 300) -> Home:
    home = Home(path)
    log = open_log(home, Tally(), warn=quiet)
    number = 0
    while log.size < entries:
        if number == 14:
            large(log, "large")
        saga(log, f"s{number}{'n' if number % 3 == 0 else ''}")
        number += 1
    for number in range(OPEN_SAGAS):
        saga(log, f"open{number}n", steps=1, end=False)
    log.sign_head()
    log.truncate()
    log.close()
    return home


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A log of 300 entries: a full run, a memo, ended and open sagas; and where its anchors lie."""
    folder = tmp_path_factory.mktemp("template")
    was = os.environ.get("AMENDS_ANCHORS")
    os.environ["AMENDS_ANCHORS"] = str(folder / "anchors")
    try:
        home = build(folder / "home")
        saga_free = verify(home, view_factory=Tally)
        assert saga_free.exit == 0, saga_free.findings
    finally:
        os.environ.pop("AMENDS_ANCHORS") if was is None else os.environ.__setitem__("AMENDS_ANCHORS", was)
    return folder


@pytest.fixture
def home(template, tmp_path) -> Home:
    shutil.copytree(template / "home", tmp_path / "home")
    shutil.copytree(template / "anchors", tmp_path / "anchors")
    return Home(tmp_path / "home")


class Raw:
    """The file, as somebody who knows SQLite and nothing of us would open it."""

    def __init__(self, home: Home) -> None:
        self.db = apsw.Connection(str(home.db))
        self.db.pragma("synchronous", "off")

    def run(self, sql: str, *bindings: Any) -> list[Any]:
        return self.db.execute(sql, bindings).fetchall()

    def change(self, sql: str, *bindings: Any) -> None:
        """A change that must change something: a fault that did not fire shows nothing."""
        before = self.db.total_changes()
        self.db.execute(sql, bindings)
        assert self.db.total_changes() > before, f"nothing was changed by {sql}"

    def line(self, seq: int) -> bytes:
        return self.run("select line from entry where seq = ?", seq)[0][0]

    def close(self) -> None:
        self.db.close()


@pytest.fixture
def raw(home):
    raw = Raw(home)
    yield raw
    raw.close()


def examine(home: Home) -> Any:
    return verify(home, view_factory=Tally)


def codes(verdict: Any) -> list[str]:
    return [finding.code for finding in verdict.findings]


# ---- an honest log --------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.1")
def test_an_honest_log_is_intact_and_what_was_not_proved_is_said(home):
    verdict = examine(home)
    assert verdict.exit == 0 and verdict.findings == [] and verdict.level == "local anchor"
    assert len(verdict.root) == 64 and any("no other device" in text for text in verdict.not_proved)
    assert list(verdict.to_json()) == ["verdict", "level", "size", "root", "findings", "not_proved"]


@pytest.mark.promise("6.1")
def test_a_file_by_itself_is_signed_and_no_more(home):
    verdict = verify(home.db, view_factory=Tally)
    assert verdict.exit == 0 and verdict.level == "signed"
    told = " ".join(verdict.not_proved)
    assert "no anchor" in told and "keys were not there" in told


@pytest.mark.promise("6.1")
def test_verify_while_the_log_is_written_and_after_a_kill(home):
    log = open_log(home, Tally(), warn=quiet)
    for number in range(20):
        saga(log, f"late{number}")
        assert examine(home).exit == 0
    pid = os.fork()
    if pid == 0:
        mine = open_log(home, Tally(), warn=quiet)
        saga(mine, "killed", end=False)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    verdict = examine(home)
    assert verdict.exit == 0, verdict.findings
    log.close()


def test_nothing_is_changed_by_looking(home):
    def digests() -> dict[Path, str]:
        files = [path for path in home.path.rglob("*") if path.is_file() and not path.name.endswith("-shm")]
        return {path: sha256(path.read_bytes()).hexdigest() for path in files}

    before = digests()
    examine(home)
    assert digests() == before


def test_every_code_has_a_verdict_with_an_exit():
    assert {verdict for verdict, _ in CODES.values()} <= set(EXITS)
    assert EXITS == {
        "INTACT": 0,
        "TAMPERED": 1,
        "UNVERIFIED": 3,
        "ROLLED-BACK": 4,
        "FORKED": 5,
        "POLICY": 6,
        "MALFORMED": 7,
    }


# ---- every bit ------------------------------------------------------------------------------------------------------


def flipped(value: Any, bit: int) -> Any:
    if isinstance(value, int):
        return value ^ (1 << bit)
    data = bytearray(value.encode() if isinstance(value, str) else value)
    data[bit // 8] ^= 1 << (bit % 8)
    return bytes(data)


def bits(value: Any) -> int:
    if value is None:
        return 0
    return 63 if isinstance(value, int) else len(value.encode() if isinstance(value, str) else value) * 8


def flip_in_all(home: Home, raw: Raw, column: str, seqs: list[int], places: list[int] | None = None) -> int:
    """Flip the n-th bit of a column in all of these rows at once, for every n; each row must be found each time."""
    cells = {seq: raw.run(f"select {column} from entry where seq = ?", seq)[0][0] for seq in seqs}
    cells = {seq: value for seq, value in cells.items() if value is not None}
    tried = 0
    for bit in range(max(map(bits, cells.values()), default=0)) if places is None else places:
        hit = {seq: flipped(value, bit) for seq, value in cells.items() if bit < bits(value)}
        hit = {seq: value for seq, value in hit.items() if not isinstance(value, int) or value < 1 << 63}
        if not hit:
            continue
        raw.run("begin")
        for seq, value in hit.items():
            raw.change(f"update entry set {column} = ? where seq = ?", value, seq)
        raw.run("commit")
        verdict = examine(home)
        found = Counter(finding.seq for finding in verdict.findings)
        assert verdict.exit != 0
        assert set(hit) <= set(found), f"{column} bit {bit}: not found in {sorted(set(hit) - set(found))}"
        extra = [finding for finding in verdict.findings if finding.seq not in hit]
        assert not extra, f"{column} bit {bit}: {extra}"
        tried += len(hit)
        raw.run("begin")
        for seq in hit:
            raw.change(f"update entry set {column} = ? where seq = ?", cells[seq], seq)
        raw.run("commit")
    assert examine(home).exit == 0
    return tried


def one_of_each(raw: Raw) -> list[int]:
    """Rows of every kind and of the places that matter, at least three apart: genesis, run's end, last but three."""
    last = raw.run("select max(seq) from entry")[0][0]
    chosen = [0, 255, last - 3, last]
    seen: set[str] = set()
    for (line,) in raw.run("select line from entry order by seq"):
        entry = parse(line)
        if entry.kind not in seen and all(abs(entry.seq - other) >= 3 for other in chosen):
            seen.add(entry.kind)
            chosen.append(entry.seq)
    return sorted(chosen)


@pytest.mark.promise("6.2")
@pytest.mark.parametrize(("column", "step"), [("line", 4), ("open", 2), ("sig", 2), ("back", 1)])
def test_the_bits_of_a_record_of_every_kind_are_watched(home, raw, column, step):
    """Of the longer cells every second or fourth bit, beginning at random; `--long` leaves out none."""
    seqs = one_of_each(raw)
    assert len(seqs) >= 7
    longest = max(bits(raw.run(f"select {column} from entry where seq = ?", seq)[0][0]) for seq in seqs)
    print("start", start := random.randrange(step))
    assert flip_in_all(home, raw, column, seqs, list(range(start, longest, step))) > 300


def compressed(raw: Raw) -> list[int]:
    rows = raw.run("select seq, open from entry where open is not null order by seq")
    return [seq for seq, cell in rows if cell[:4] == MAGIC]


@pytest.mark.promise("6.2")
def test_the_bits_of_a_compressed_opening_are_watched(home, raw):
    """Those too that a decoder overlooks. Every second one, beginning at random; `--long` leaves out none."""
    seq = compressed(raw)[0]
    [(cell,)] = raw.run("select open from entry where seq = ?", seq)
    assert len(cell) < 200 < len(unshut(cell))
    print("start", start := random.randrange(2))
    assert flip_in_all(home, raw, "open", [seq], list(range(start, bits(cell), 2))) > 300


@pytest.mark.promise("6.1")
@pytest.mark.parametrize(
    "hurt",
    [lambda cell: cell[:-1], lambda cell: cell + cell, lambda cell: cell[4:], lambda cell: unshut(cell)[:-9] + b"x"],
    ids=["cut", "doubled", "without its magic", "another text"],
)
def test_a_compressed_opening_that_cannot_be_read_is_one_finding(home, raw, hurt):
    seq = compressed(raw)[0]
    [(cell,)] = raw.run("select open from entry where seq = ?", seq)
    raw.change("update entry set open = ? where seq = ?", hurt(cell), seq)
    verdict = examine(home)
    assert [(finding.code, finding.seq) for finding in verdict.findings] == [("E_OPENING", seq)]
    raw.change("update entry set open = ? where seq = ?", unshut(cell), seq)
    assert examine(home).exit == 0, "how it lies in the file is nobody's business"


@pytest.mark.long
@pytest.mark.promise("6.2")
@pytest.mark.parametrize("phase", [0, 1, 2])
@pytest.mark.parametrize("column", ["line", "open", "sig", "back"])
def test_every_bit_of_every_record_is_watched(home, raw, column, phase):
    last = raw.run("select max(seq) from entry")[0][0]
    flip_in_all(home, raw, column, [seq for seq in range(last + 1) if seq % 3 == phase])


@pytest.mark.promise("6.2")
def test_random_bits_of_all_records_are_watched(home, raw):
    last = raw.run("select max(seq) from entry")[0][0]
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    print("seed", seed)
    for phase in range(3):
        flip_in_all(
            home, raw, "line", [seq for seq in range(last + 1) if seq % 3 == phase], draw.sample(range(1600), 12)
        )


def every_flip(raw: Raw, table: str, key: str) -> Any:
    """(column, rowkey, old, new) for every bit of every cell of a table."""
    columns = [row[1] for row in raw.run(f"pragma table_info({table})")]
    keys = key.split(",")
    for row in raw.run(f"select {','.join(columns)} from {table}"):
        cell = dict(zip(columns, row, strict=True))
        for column, value in cell.items():
            for bit in range(bits(value)):
                new = flipped(value, bit)
                if isinstance(new, int) and new >= 1 << 63:
                    continue
                yield column, "cast(? as text)" if isinstance(value, str) else "?", [cell[k] for k in keys], value, new


@pytest.mark.promise("6.2")
@pytest.mark.parametrize(("table", "key", "step"), [("tile", "level,n", 1), ("saga", "first", 37), ("memo", "view", 5)])
def test_the_bits_of_every_other_table_are_watched(home, raw, table, key, step):
    """Of the longer ones every n-th bit, beginning at random; `--long` leaves out none."""
    flip_in_table(home, raw, table, key, step)


@pytest.mark.long
@pytest.mark.promise("6.2")
@pytest.mark.parametrize(("table", "key"), [("saga", "first"), ("memo", "view")])
def test_every_bit_of_every_other_table_is_watched(home, raw, table, key):
    flip_in_table(home, raw, table, key, 1)


def flip_in_table(home: Home, raw: Raw, table: str, key: str, step: int) -> None:
    print("start", start := random.randrange(step))
    texts = {row[1] for row in raw.run(f"pragma table_info({table})") if row[2] == "TEXT"}
    where = " and ".join(f"{name} = {'cast(? as text)' if name in texts else '?'}" for name in key.split(","))
    tried = 0
    for column, slot, keys, old, new in list(every_flip(raw, table, key))[start::step]:
        try:
            raw.change(f"update {table} set {column} = {slot} where {where}", new, *keys)
        except apsw.ConstraintError:
            continue  # another row has that key
        verdict = examine(home)
        assert verdict.exit != 0, f"{table}.{column} {old!r} -> {new!r}"
        moved = [new if name == column else value for name, value in zip(key.split(","), keys, strict=True)]
        raw.change(f"update {table} set {column} = {slot} where {where}", old, *moved)
        tried += 1
    assert tried > 100
    assert examine(home).exit == 0


@pytest.mark.promise("6.2")
def test_every_bit_of_a_place_is_watched(home, raw):
    for seq in (0, 7, 255, 300):
        for bit in range(0, 40):
            new = seq ^ (1 << bit)
            if raw.run("select 1 from entry where seq = ?", new):
                continue
            raw.change("update entry set seq = ? where seq = ?", new, seq)
            assert examine(home).exit == 1
            raw.change("update entry set seq = ? where seq = ?", seq, new)
    assert examine(home).exit == 0


@pytest.mark.promise("6.2")
def test_every_bit_is_watched_after_a_kill_with_no_clean_close(home):
    """What lies in the -wal counts as the file does."""
    pid = os.fork()
    if pid == 0:
        log = open_log(home, Tally(), warn=quiet)
        for number in range(3):
            saga(log, f"k{number}")
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert examine(home).exit == 0
    raw = Raw(home)
    last = raw.run("select max(seq) from entry")[0][0]
    flip_in_all(home, raw, "line", [last - 7, last - 3, last], list(range(0, 1600, 11)))
    flip_in_all(home, raw, "sig", [last - 7, last - 3, last], list(range(0, 256, 5)))
    raw.close()


@pytest.mark.promise("6.2")
def test_the_files_own_numbers_and_tables_are_watched(home, raw):
    for pragma in ("application_id", "user_version"):
        was = raw.db.pragma(pragma)
        for bit in range(31):
            raw.db.pragma(pragma, was ^ (1 << bit))
            assert examine(home).exit in (1, 7), f"{pragma} bit {bit}"
        raw.db.pragma(pragma, was)
    for sql, undo in (
        ("create table stranger(x)", "drop table stranger"),
        ("create index another on entry(back)", "drop index another"),
        ("create view looks as select 1", "drop view looks"),
        ("create trigger t after insert on entry begin select 1; end", "drop trigger t"),
        ("alter table entry add column more text", "alter table entry drop column more"),
        ("drop index saga_open", "create index saga_open on saga(first) where open = 1"),
    ):
        raw.run(sql)
        verdict = examine(home)
        assert verdict.exit == 1 and set(codes(verdict)) == {"E_TABLE"}, sql
        raw.run(undo)
    raw.change("insert into pack values(0, x'00', null)")
    assert codes(examine(home)) == ["E_PACK"]
    raw.change("delete from pack")
    assert examine(home).exit == 0


@pytest.mark.promise("6.2")
def test_a_rotten_page_is_noticed(home):
    raw = Raw(home)
    used = {page for (page,) in raw.run("select pageno from dbstat")}
    raw.close()
    data = home.db.read_bytes()
    for page in sorted(used):
        start = (page - 1) * 4096 + 100 * (page == 1)  # after the header of the file
        home.db.write_bytes(data[:start] + bytes(byte ^ 0x55 for byte in data[start : start + 64]) + data[start + 64 :])
        assert examine(home).exit != 0, f"page {page}"
    home.db.write_bytes(data)
    assert examine(home).exit == 0


# ---- the ways to rewrite a log --------------------------------------------------------------------------------------


def swap(raw: Raw) -> None:
    one, two = (raw.run("select line, back, open, sig from entry where seq = ?", seq)[0] for seq in (20, 21))
    for seq, row in ((20, two), (21, one)):
        raw.change("update entry set line = ?, back = ?, open = ?, sig = ? where seq = ?", *row, seq)


def insert(raw: Raw) -> None:
    last = raw.run("select max(seq) from entry")[0][0]
    raw.change("update entry set seq = -seq where seq > 20")
    raw.change("update entry set seq = 1 - seq where seq < 0")
    raw.change("insert into entry select 21, line, back, open, sig from entry where seq = 11")
    assert raw.run("select max(seq) from entry")[0][0] == last + 1


def delete(raw: Raw) -> None:
    raw.change("delete from entry where seq = 20")


def delete_many(raw: Raw) -> None:
    raw.change("delete from entry where seq between 20 and 29")


def delete_and_close_up(raw: Raw) -> None:
    raw.change("delete from entry where seq = 20")
    raw.change("update entry set seq = -seq where seq > 20")
    raw.change("update entry set seq = -seq - 1 where seq < 0")


def duplicate(raw: Raw) -> None:
    raw.change("update entry set seq = -seq where seq > 20")
    raw.change("update entry set seq = 1 - seq where seq < 0")
    raw.change("insert into entry select 21, line, back, open, sig from entry where seq = 20")


def cut(raw: Raw) -> None:
    raw.change("delete from entry where seq > 200")
    raw.change("delete from tile")
    raw.change("delete from memo")
    raw.change("delete from saga where first > 200")


def cut_one(raw: Raw) -> None:
    raw.change("delete from entry where seq = (select max(seq) from entry)")


def strip(raw: Raw) -> None:
    raw.change("update entry set sig = null")


def strip_signatures(raw: Raw) -> None:
    for seq, line in raw.run("select seq, line from entry where length(sig) = 96"):
        raw.change("update entry set sig = ? where seq = ?", leaf(line), seq)


def forget_an_opening(raw: Raw) -> None:
    seq = raw.run("select seq from entry where open is not null and seq > 30 limit 1")[0][0]
    raw.change("update entry set open = null where seq = ?", seq)


def forget_the_first_of_two(raw: Raw) -> None:
    seq, blob = raw.run(
        "select seq, open from entry where seq > 30 and instr(line, x'737465702e696e74656e646564') limit 1"
    )[0]
    lines = blob.splitlines(keepends=True)
    assert len(lines) == 2
    raw.change("update entry set open = ? where seq = ?", lines[1], seq)


def swap_openings(raw: Raw) -> None:
    rows = raw.run("select seq, open from entry where seq > 30 and instr(line, x'737465702e646f6e65') limit 2")
    (one, first), (two, second) = rows
    raw.change("update entry set open = ? where seq = ?", second, one)
    raw.change("update entry set open = ? where seq = ?", first, two)


def add_an_opening(raw: Raw) -> None:
    seq = raw.run("select min(seq) from entry where open is not null")[0][0]
    raw.change("update entry set open = cast(open || open as blob) where seq = ?", seq)


def rechain(raw: Raw, seal: Any = lambda size, root, sig: root + sig[32:]) -> None:
    """Change a record and make every later line, hash and cache agree with it. What cannot be made is a signature."""
    prev, tree = "", Peaks()
    for seq, line, sig in raw.run("select seq, line, sig from entry order by seq"):
        entry = parse(line)
        if seq == 20:
            entry = msgspec.structs.replace(entry, at=entry.at + 1)
        if seq > 20:
            entry = msgspec.structs.replace(entry, prev=prev)
        line = line_of(entry)
        hash = leaf(line)
        prev = hash.hex()
        tree.extend([hash])
        if sig is not None:
            sig = hash if len(sig) == 32 else seal(seq + 1, tree.root(), sig)
        raw.change("update entry set line = ?, sig = ? where seq = ?", line, sig, seq)
    for n, root in tree.runs:
        raw.change("update tile set data = ? where n = ?", root, n)
    raw.change("delete from memo")


def rechain_and_keep_the_signatures(raw: Raw) -> None:
    rechain(raw, lambda size, root, sig: sig)


def splice(raw: Raw) -> None:
    """The records of one log up to 99, and of another from there on."""
    other = Home(Path(raw.db.filename).parent.parent / "other")
    build(other.path, 200)
    raw.run("attach ? as other", str(other.db))
    raw.change("delete from entry where seq >= 100")
    raw.change("insert into entry select seq, line, back, open, sig from other.entry where seq >= 100")
    raw.change("delete from saga")
    raw.change("insert into saga select * from other.saga")
    raw.change("delete from tile")
    raw.change("delete from memo")
    raw.run("detach other")


ATTACKS = {
    "swap": (swap, 1, ["E_ORDER"]),
    "insert": (insert, 1, ["E_ORDER"]),
    "delete": (delete, 1, ["E_GAP"]),
    "delete many": (delete_many, 1, ["E_GAP"]),
    "delete and close up": (delete_and_close_up, 1, ["E_ORDER"]),
    "duplicate": (duplicate, 1, ["E_ORDER"]),
    "cut": (cut, 1, ["E_ROLLED_BACK"]),
    "cut one": (cut_one, 1, ["E_ROLLED_BACK"]),
    "strip": (strip, 1, ["E_UNSIGNED"]),
    "strip signatures": (strip_signatures, 1, ["E_UNSIGNED"]),
    "forget an opening": (forget_an_opening, 1, ["E_OPENING_MISSING"]),
    "forget the first of two": (forget_the_first_of_two, 1, ["E_OPENING_MISSING"]),
    "swap openings": (swap_openings, 1, ["E_OPENING"]),
    "add an opening": (add_an_opening, 1, ["E_OPENING_EXTRA"]),
    "re-chain": (rechain, 1, ["E_SIGNATURE"]),
    "re-chain and keep the signatures": (rechain_and_keep_the_signatures, 1, ["E_ROOT"]),
    "splice": (splice, 1, ["E_CHAIN"]),
}


@pytest.mark.promise("6.2")
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_called_by_its_name(home, raw, name):
    attack, exit, names = ATTACKS[name]

    def state() -> list[Any]:
        return raw.run(
            "select group_concat(seq || hex(line) || hex(open) || hex(sig)) from (select * from entry order by seq)"
        )

    before = state()
    assert examine(home).exit == 0
    attack(raw)
    assert state() != before, "the fault did not fire"
    verdict = examine(home)
    print(*verdict.findings, sep="\n")
    assert set(names) <= set(codes(verdict)), verdict.findings
    assert verdict.exit == exit
    assert len(verdict.findings) <= 4, "one finding a fault, and the caches it broke"


@pytest.mark.promise("6.2")
def test_a_rewrite_with_the_key_is_a_fork_where_an_anchor_remembers(home, raw):
    mine = Identity.load(home)
    rechain(raw, lambda size, root, sig: root + mine.sign(size, root))
    verdict = examine(home)
    assert codes(verdict) == ["E_FORKED"] and verdict.exit == 5
    assert verify(home, anchors=(), view_factory=Tally).exit == 0, "without an anchor nothing tells"
    assert any("no anchor" in text for text in verify(home, anchors=(), view_factory=Tally).not_proved)


@pytest.mark.promise("6.2")
def test_a_clean_cut_at_a_signed_head_is_a_rollback_where_an_anchor_remembers(home, raw, tmp_path):
    cut(raw)
    mine = Identity.load(home)
    tree = Peaks()
    lines = [line for (line,) in raw.run("select line from entry order by seq")]
    tree.extend([leaf(line) for line in lines])
    last = len(lines) - 1
    raw.change("update entry set sig = ? where seq = ?", tree.root() + mine.sign(len(lines), tree.root()), last)
    for first, name in raw.run("select first, saga from saga"):
        members = [seq for seq, line in enumerate(lines) if parse(line).saga == name]
        ended = parse(lines[members[-1]]).kind == "saga.ended"
        raw.run("update saga set head = ?, open = ? where first = ?", members[-1] if ended else first, not ended, first)
    verdict = examine(home)
    assert codes(verdict) == ["E_ROLLED_BACK"] and verdict.exit == 4
    assert verify(home, anchors=(), view_factory=Tally).exit == 0, "without an anchor nothing tells"


@pytest.mark.promise("6.1")
def test_four_edits_are_four_findings_and_the_first_leads(home, raw):
    for seq in (20, 41, 42, 200):
        raw.change("update entry set line = ? where seq = ?", flipped(raw.line(seq), 8 * 110), seq)
    verdict = examine(home)
    assert [(finding.code, finding.seq) for finding in verdict.findings] == [("E_CHAIN", n) for n in (20, 41, 42, 200)]
    assert str(verdict.findings[0]).startswith("TAMPERED E_CHAIN seq 20: ")


@pytest.mark.promise("6.1")
def test_a_saga_that_is_continued_after_its_end_is_found_though_it_is_signed(tmp_path):
    """A writer with the keys and a bug: what the fold refuses, the examination refuses too."""
    home = build(tmp_path / "home", 20)
    mine = Identity.load(home)
    raw = Raw(home)
    lines = [line for (line,) in raw.run("select line from entry order by seq")]
    ended = next(parse(line) for line in lines if parse(line).kind == "saga.ended")
    last = parse(lines[-1])
    more = msgspec.structs.replace(
        ended,
        seq=last.seq + 1,
        prev=leaf(lines[-1]).hex(),
        at=last.at + 1,
        kind="step.done",
        n=ended.n + 1,
        out="",
        ref=10**6,
    )
    tree = Peaks()
    tree.extend([leaf(line) for line in [*lines, line_of(more)]])
    sig = tree.root() + mine.sign(tree.size, tree.root())
    raw.change("insert into entry values(?,?,?,null,?)", more.seq, line_of(more), -1, sig)
    raw.close()
    verdict = verify(home, view_factory=Tally)
    assert set(codes(verdict)) == {"E_ENDED", "E_REF"} and verdict.exit == 1


@pytest.mark.promise("6.1")
@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([(1, 2), (2, 2)], []),
        ([(1, 3), (2, 3)], [1]),
        ([(1, 2)], [0]),
        ([(2, 2)], [0]),
        ([(1, 1)], [0]),
        ([(1, 3), (3, 3)], [1]),
        ([(1, 2), ()], [1]),
        ([(1, 2), (2, 3)], [1, 1]),
    ],
)
def test_parts_of_one_fact_that_are_not_together_are_found_though_they_are_signed(tmp_path, parts, found):
    home = build(tmp_path / "home", 20)
    mine = Identity.load(home)
    raw = Raw(home)
    lines = [line for (line,) in raw.run("select line from entry order by seq")]
    last, back = parse(lines[-1]), len(lines) - 1
    first = len(lines)
    tree = Peaks()
    tree.extend([leaf(line) for line in lines])
    for part in parts:
        last = msgspec.structs.replace(
            last, seq=len(lines), prev=leaf(lines[-1]).hex(), at=last.at + 1, n=last.n + 1, ref=0, part=part
        )
        lines.append(line_of(last))
        tree.extend([leaf(lines[-1])])
        sig = tree.root() + mine.sign(tree.size, tree.root())
        raw.change("insert into entry values(?,?,?,?,?)", last.seq, lines[-1], back, openings_of(raw, back), sig)
        back = last.seq
    raw.close()
    verdict = verify(home, view_factory=Tally)
    assert [(f.code, f.seq - first) for f in verdict.findings] == [("E_PART", seq) for seq in sorted(set(found))]


def openings_of(raw: Raw, seq: int) -> Any:
    return raw.run("select open from entry where seq = ?", seq)[0][0]


@pytest.mark.promise("6.1")
def test_a_memo_of_another_version_is_said_and_not_believed(home):
    class Later(Tally):
        version = 4

    verdict = verify(home, view_factory=Later)
    assert codes(verdict) == ["E_MEMO"] and verdict.exit == 3
    verdict = verify(home)
    assert verdict.exit == 0 and any("memo of tally" in text for text in verdict.not_proved)


@pytest.mark.promise("6.2")
def test_a_followed_log_is_examined_too(home, raw, monkeypatch):
    monkeypatch.setattr("amends.store.identity._in_order", lambda home: False)
    adopt(home, "ada", "for the test")
    verdict = verify(home, view_factory=Tally)
    assert verdict.exit == 0, verdict.findings
    assert raw.run("select count(*) from fentry")[0][0] > 300
    seq, line = raw.run("select seq, line from fentry where seq = 77")[0]
    raw.change("update fentry set line = ? where seq = ?", flipped(line, 8 * 110), seq)
    verdict = verify(home, view_factory=Tally)
    assert codes(verdict) == ["E_CHAIN"] and "amends.local/" in verdict.findings[0].reason and verdict.exit == 1
    raw.change("update fentry set line = ? where seq = ?", line, seq)
    draw = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    for seq in draw.sample(range(300), 20):
        for column in ("line", "open", "sig", "back"):
            value = raw.run(f"select {column} from fentry where seq = ?", seq)[0][0]
            if value is not None:
                new = flipped(value, draw.randrange(min(bits(value), 60) if column == "back" else bits(value)))
                raw.change(f"update fentry set {column} = ? where seq = ?", new, seq)
                assert verify(home, view_factory=Tally).exit != 0
                raw.change(f"update fentry set {column} = ? where seq = ?", value, seq)
    assert verify(home, view_factory=Tally).exit == 0
    raw.change("delete from fentry where seq > 290")
    assert codes(verify(home, view_factory=Tally)) == ["E_ROOT"]
    raw.change("delete from fentry")
    verdict = verify(home, view_factory=Tally)
    assert codes(verdict) == ["E_ROOT"] and "gone" in verdict.findings[0].reason


@pytest.mark.promise("6.1")
def test_a_log_with_nothing_right_is_told_in_a_thousand_findings(home, raw):
    raw.change("update entry set line = x'00', open = null")
    verdict = examine(home)
    assert verdict.exit != 0 and len(verdict.findings) <= 1010


@pytest.mark.promise("6.1")
def test_random_rubbish_in_any_cell_never_raises(home, raw):
    draw = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    for _ in range(60):
        raw.run("savepoint rubbish")
        for _ in range(draw.randrange(1, 6)):
            seq = draw.randrange(300)
            raw.run("update or ignore entry set line = ? where seq = ?", draw.randbytes(draw.randrange(400)), seq)
            raw.run("update or ignore entry set open = ? where seq = ?", draw.randbytes(draw.randrange(90)), seq + 1)
            raw.run(
                "update or ignore entry set sig = ? where seq = ?", draw.randbytes(draw.choice([0, 5, 32, 96])), seq + 2
            )
            raw.run(
                "update memo set blob = ?, h = ?, seq = ?", draw.randbytes(40), draw.randbytes(9), draw.randrange(400)
            )
            raw.run("update saga set head = ?, open = ? where first > ?", draw.randrange(9), draw.randrange(3), seq)
        raw.run("release rubbish")
        assert examine(home).exit == 1


def test_verifying_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The expected shape of the tables is asked of a database in memory, and of no file."""
    from amends import AgentKit

    with AgentKit(home=tmp_path / "home"):
        pass
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    _expected.cache_clear()
    assert verify(tmp_path / "home" / "amends.db").exit in (0, 3)
    assert list(empty.iterdir()) == []
