"""Somebody with SQLite, the file and no respect: edits a log's database in a process of their own, never through ours.

`Forger` is worse: it has the device's key as well, and writes what no writer of ours would.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from amends.store import seal
from amends.store.entry import Entry, leaf, line_of, opening, parse
from amends.store.home import Home
from amends.store.keys import Identity
from amends.store.merkle import Peaks
from amends.store.note import checkpoint_body, sign_note
from amends.store.squeeze import unshut
from amends.store.stubs import cover

_LOOP = """
import ast, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("pragma synchronous=off")
db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
for line in sys.stdin:
    work = ast.literal_eval(line)  # literals only: nothing of it can be run
    try:
        before = db.total_changes
        rows = [db.execute(sql, bindings).fetchall() for sql, bindings in work]
        answer = (rows[-1] if rows else [], db.total_changes - before, "")
    except sqlite3.Error as error:
        if db.in_transaction:
            db.execute("rollback")
        answer = ([], 0, f"{type(error).__name__}: {error}")
    print(ascii(answer), flush=True)
"""


class Refused(Exception):
    """SQLite itself said no."""


class Outsider:
    """The file in another process."""

    def __init__(self, path: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", _LOOP, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def all(self, work: Sequence[tuple[str, Sequence[Any]]]) -> tuple[list[Any], int]:
        """Run statements; the last one's rows, and how many rows changed."""
        assert self._child.stdin and self._child.stdout
        self._child.stdin.write(ascii([(sql, tuple(bindings)) for sql, bindings in work]) + "\n")
        self._child.stdin.flush()
        rows, changed, error = ast.literal_eval(self._child.stdout.readline())
        if error:
            raise Refused(error)
        return rows, changed

    def run(self, sql: str, *bindings: Any) -> list[Any]:
        return self.all([(sql, bindings)])[0]

    def change(self, sql: str, *bindings: Any) -> None:
        """A change that must change something: a fault that did not fire shows nothing."""
        assert self.all([(sql, bindings)])[1] > 0, f"nothing was changed by {sql}"

    def line(self, seq: int) -> bytes:
        return bytes(self.run("select line from entry where seq = ?", seq)[0][0])

    def close(self) -> None:
        assert self._child.stdin and self._child.stdout
        self._child.stdin.close()
        self._child.wait(20)
        self._child.stdout.close()


TABLES = (
    "create table stub(start integer primary key, level integer not null, hash blob not null) strict",
    "create table checkpoint(size integer primary key, sig blob not null) strict",
    """create table datakey(saga text primary key, seal text not null, wrapped blob not null)
       strict, without rowid""",
)


class Forger:
    """A log in memory, row by row, with the device's own key to sign whatever it is made into."""

    def __init__(self, home: Home, db: Outsider) -> None:
        self.home, self.db = home, db
        self.mine = Identity.load(home)
        rows = db.run("select seq, line, back, open, sig from entry order by seq")
        self.rows: dict[int, list[Any]] = {row[0]: list(row[1:]) for row in rows}
        self.hashes = [leaf(row[1]) for row in rows]
        self.stubs: list[tuple[int, int, bytes]] = []
        self.checkpoints: dict[int, bytes] = {}
        self.keys: dict[str, tuple[str, bytes]] = {}
        self.saga_rows = {row[0]: row for row in db.run("select first, saga, head, open, named from saga")}

    @property
    def size(self) -> int:
        return len(self.hashes)

    def entry(self, seq: int) -> Entry:
        return parse(self.rows[seq][0])

    def entries(self) -> list[Entry]:
        return [parse(row[0]) for _, row in sorted(self.rows.items())]

    def root(self, size: int) -> bytes:
        tree = Peaks()
        tree.extend(self.hashes[:size])
        return tree.root()

    def signed(self, size: int) -> bytes:
        return self.root(size) + self.mine.sign(size, self.root(size))

    def note(self, size: int) -> bytes:
        """The head at a size as it leaves the device."""
        key = self.mine
        return sign_note(checkpoint_body(key.origin, size, self.root(size)), key.origin, key.log_seed)

    def append(self, kind: str, *bodies: bytes, up: bool = True, **fields: Any) -> int:
        """A fact at the end, in the right form, whatever it says; signed."""
        last = self.entry(max(self.rows))
        lines = [opening(b"%022d" % (self.size * 10 + i), body) for i, body in enumerate(bodies)]
        ups = [one.up for one in self.entries() if one.up]
        if up:
            fields["up"] = (ups[-1][0], ups[-1][1] + 1)
        if lines:
            fields["c"] = tuple(sha256_hex(line) for line in lines)
        else:
            fields["salt"] = "A" * 22
        entry = Entry(self.size, self.hashes[-1].hex(), last.at + 1, kind, **fields)
        line = line_of(entry)
        self.hashes.append(leaf(line))
        self.rows[entry.seq] = [line, -1, b"".join(lines) or None, None]
        self.rows[entry.seq][3] = self.signed(self.size)
        return entry.seq

    def sign(self, seq: int) -> None:
        """Keep a signature beside this record."""
        self.rows[seq][3] = self.signed(seq + 1)

    # -- what honest writers do, by hand ------------------------------------------------------------------------------

    def cut(self, places: Sequence[tuple[int, int]]) -> None:
        """Take openings out of their cells."""
        for seq, place in places:
            cell, c = self.rows[seq][2], self.entry(seq).c
            if seal.is_sealed(cell):
                cell = seal.join(part for part in seal.parts(cell) if part.place != place)
            else:
                left = [line for line in unshut(cell).splitlines(True) if sha256_hex(line) != c[place]]
                cell = b"".join(left) or None
            self.rows[seq][2] = cell

    def redact(self, *places: tuple[int, int]) -> int:
        self.cut(places)
        return self.append("redaction.made", places=tuple(sorted(places)), basis="GDPR-17")

    def remove(self, runs: Sequence[tuple[int, int]]) -> None:
        """Delete rows and keep stubs."""
        for first, last in runs:
            cuts = [seq + 1 for seq in range(first, last) if len(self.rows[seq][3] or b"") == 96]
            for seq in range(first, last + 1):
                if len(self.rows[seq][3] or b"") == 96:
                    self.checkpoints[seq + 1] = self.rows[seq][3]
                del self.rows[seq]
                self.saga_rows.pop(seq, None)
            for start, level in cover(first, last + 1, cuts):
                tree = Peaks()
                tree.extend(self.hashes[start : start + (1 << level)])
                self.stubs.append((start, level, tree.root()))

    def compact(self, *runs: tuple[int, int]) -> int:
        self.remove(runs)
        count = sum(last - first + 1 for first, last in runs)
        return self.append("compaction.made", runs=tuple(runs), count=count, cert="ab" * 32, within_ms=1)

    def seal(self, owner: seal.Owner, sagas: Sequence[str]) -> int:
        """Seal what these sagas have said."""
        at = self.append("seal.begun", seal=owner.id)
        for saga in sagas:
            key = sha256_hex(saga.encode()).encode()[:32]
            self.keys[saga] = (owner.id, owner.wrap(self.mine.origin, saga, key))
            for row in self.rows.values():
                entry = parse(row[0])
                if entry.saga == saga and row[2]:
                    lines = seal.placed(entry, unshut(row[2]))
                    row[2] = seal.seal(key, self.mine.origin, entry, lines)
        return at

    def forget(self, saga: str) -> int:
        del self.keys[saga]
        return self.append("seal.forgotten", target=saga)

    # -- into the file ------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Make the file hold exactly this. Memos are left out: any log may lack them."""
        tree = Peaks()
        tree.extend(self.hashes)
        work: list[tuple[str, Sequence[Any]]] = [("begin", ())]
        here = {row[0] for row in self.db.run("select name from sqlite_schema")}
        work += [(sql, ()) for sql in TABLES if sql.split("(")[0].split()[-1] not in here]
        for table in ("entry", "stub", "checkpoint", "datakey", "saga", "tile", "memo"):
            work.append((f"delete from {table}", ()))
        work += [("insert into entry values(?,?,?,?,?)", (seq, *row)) for seq, row in sorted(self.rows.items())]
        work += [("insert into stub values(?,?,?)", stub) for stub in self.stubs]
        work += [("insert into checkpoint values(?,?)", one) for one in self.checkpoints.items()]
        work += [("insert into datakey values(?,?,?)", (saga, *row)) for saga, row in self.keys.items()]
        work += [("insert into saga values(?,?,?,?,?)", row) for row in self.saga_rows.values()]
        work += [("insert into tile values(1,?,?)", run) for run in tree.runs]
        work.append(("commit", ()))
        self.db.all(work)


def sha256_hex(data: bytes) -> str:
    return sha256(data).hexdigest()


def flipped(value: Any, bit: int) -> Any:
    """A cell with one bit turned, of its own type; None where its type does not hold that."""
    if isinstance(value, int):
        new = value ^ (1 << bit)
        return new if new < 1 << 63 else None
    data = bytearray(value.encode() if isinstance(value, str) else value)
    data[bit // 8] ^= 1 << (bit % 8)
    if isinstance(value, bytes):
        return bytes(data)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def bits(value: Any) -> int:
    """How many bits a cell has."""
    if value is None:
        return 0
    return 63 if isinstance(value, int) else len(value.encode() if isinstance(value, str) else value) * 8


def altered(entry: Entry, **fields: Any) -> bytes:
    return line_of(msgspec.structs.replace(entry, **fields))
