"""Redaction: what a record held is gone from every byte of the file, the record stays, and nobody says so too early."""

from __future__ import annotations

import contextvars
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from log_contract import facts, opened
from powerloss import ANYTHING, EVERYTHING, NOTHING, Disk, die, under
from test_sqlite import make
from world import eventually

from amends import COMPENSABLE, IRREVERSIBLE, AgentKit, Compensation, Refused, compensator, saga_scope
from amends.cli.main import main
from amends.runtime.daemon import Watch
from amends.runtime.state import State
from amends.store import pages, pins, redact, seal, sealing, sqlite
from amends.store.audit import verify
from amends.store.chain import Draft
from amends.store.errors import AmendsError, BadValue, Malformed, NotFound
from amends.store.home import Home
from amends.store.identity import open_log
from amends.store.keeping import EVERYTHING as ALL
from amends.store.redact import choose, openings_of, where
from amends.store.seal import Owner

PIN = "4711"
MAIL = "zelda@example.org"
LONG = "Linköping " * 40_000

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who holds a lock")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")


@compensator("redact.cancel")
def cancel(of: str) -> None:
    return None


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[AgentKit]:
    kit = AgentKit(home=tmp_path / "home", warn=lambda text: None)
    yield kit
    kit.close()


def order(kit: AgentKit, name: str = "order-1", **more: Any) -> str:
    """A committed saga whose records hold a PIN, an address and a long text; its header id."""
    with saga_scope(name, kit=kit, name=f"for {MAIL}") as made:
        undo = Compensation(handler="redact.cancel", kwargs={"of": MAIL})
        made.execute("pay", lambda pin, to: {"to": to}, {"pin": PIN, "to": MAIL}, semantics=COMPENSABLE, undo=undo)
        made.execute("write", lambda text: 1, {"text": LONG}, semantics=COMPENSABLE, undo=undo, **more)
    kit.log.flush()
    return kit.log.sagas()[0].saga


def everything(log: Any, saga: str) -> list[redact.Place]:
    return choose(openings_of(log, log.thread(saga))).places


def gone(log: Any, saga: str, places: list[redact.Place] | None = None) -> list[int]:
    """Redact all of a saga, or these places; the records that say so."""
    return [e.seq for e in redact.redact(log, places or everything(log, saga), basis="GDPR-17", by="Ada", note="asked")]


def lies_in(folder: Path, *needles: bytes) -> list[str]:
    """In which of a home's files the bytes are; asked of another process: closing them here drops locks."""
    code = (
        "import sys, pathlib\nneedles = [bytes.fromhex(x) for x in sys.argv[2:]]\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('amends.db*')):\n"
        "    data = path.read_bytes()\n"
        "    if any(n in data for n in needles): print(path.name)\n"
    )
    words = [sys.executable, "-c", code, str(folder), *(needle.hex() for needle in needles)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def salts(log: Any, saga: str) -> list[bytes]:
    return [line[2:24] for record in log.thread(saga) for line in (record.blob or b"").splitlines()]


# ---- the bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.3")
def test_payload_and_salt_are_in_no_byte_of_the_file_and_the_record_stays(kit: AgentKit, tmp_path: Path) -> None:
    saga = order(kit)
    other = order(kit, "order-2")
    lines = [record.line for record in kit.log.thread(saga)]
    needles = [*salts(kit.log, saga), b"Link\xc3\xb6ping " * 3]
    assert "amends.db-wal" in lies_in(tmp_path / "home", *needles)
    [fact] = gone(kit.log, saga)
    gone(kit.log, other)  # the same texts lay there as well
    assert kit.log.finish_erasing(10).done
    assert lies_in(tmp_path / "home", *needles, MAIL.encode(), b'"pin":"' + PIN.encode()) == []
    assert [record.line for record in kit.log.thread(saga)] == lines
    assert not any(record.blob for record in kit.log.thread(saga))
    told = kit.log.record(fact)
    assert (told.entry.kind, told.entry.basis) == ("redaction.made", "GDPR-17")
    assert redact.text(told, "by") == "Ada" and redact.text(told, "note") == "asked"
    kit.close()
    verdict = verify(tmp_path / "home", view_factory=State)
    assert verdict.exit == 0, verdict.findings


@pytest.mark.promise("6.3")
def test_what_was_redacted_cannot_be_guessed_from_its_commitment(kit: AgentKit) -> None:
    """Four digits are found in ten thousand tries by whoever has the salt; without it there is nothing to check."""
    saga = order(kit)
    [record] = [r for r in kit.log.thread(saga) if r.entry.kind == "step.intended" and r.entry.tool == "pay"]
    assert record.blob is not None
    [line] = record.blob.splitlines(True)
    before, _, after = line.partition(PIN.encode())

    def guessed(before: bytes) -> list[int]:
        hashes = {sha256(b"%b%04d%b" % (before, pin, after)).hexdigest(): pin for pin in range(10_000)}
        return [pin for digest, pin in hashes.items() if digest in record.entry.c]

    assert guessed(before) == [int(PIN)], "with the salt"
    gone(kit.log, saga)
    left = kit.log.record(record.entry.seq)
    assert left.blob is None and left.entry.c == record.entry.c
    assert guessed(b'["' + b"A" * 22 + before[24:]) == [], "without it"


def marked(folder: Path, *names: str) -> set[int]:
    """The numbers of the rows whose marks lie in the files."""
    raw = subprocess.run(["cat", *names], cwd=folder, capture_output=True, check=True).stdout
    return {int(number) for number in re.findall(rb"MK(\d{6})\d\d\dX", raw)}


@pytest.mark.promise("6.3")
def test_what_moved_between_pages_before_is_gone_from_their_unused_room_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite joins pages that run empty, as after a compaction, and may leave a copy of a row where it was."""
    monkeypatch.setattr(sqlite, "IDLE_S", 3600.0)
    monkeypatch.setattr(sqlite, "SIGN_S", 3600.0)
    left_behind = 0
    for seed in (6, 52, 54):
        chance, folder = random.Random(seed), tmp_path / str(seed)
        folder.mkdir()
        log = make(folder)
        log.commit(facts(opened("a")))
        seqs = []
        for i in range(120):
            size = chance.choice([30, 60, 200, 600, 1500])
            text = b"".join(b"MK%06d%03dX" % (i, j) for j in range(size // 12 + 1))
            seqs += [entry.seq for entry in log.commit(facts(Draft("note", {}, (b'{"args":"%b"}' % text,))))]
        rows = list(range(120))
        chance.shuffle(rows)
        with log._lock:
            for row in rows[:60]:
                log._db.run("delete from entry where seq = ?", (seqs[row],))
        erased, rows = set(rows[:60]), rows[60:]
        while rows:
            taken = [rows.pop() for _ in range(min(len(rows), chance.choice([1, 3, 10])))]
            gone(log, "", [(seqs[row], 0) for row in taken])
            erased |= set(taken)
            log.truncate()
            left_behind += bool(marked(folder, "amends.db") & erased)
            assert log.finish_erasing(10).done
            assert not marked(folder, "amends.db", "amends.db-wal") & erased, seed
        with log._lock:
            assert log._db.run("pragma integrity_check").fetchall() == [("ok",)]
        die(log)
    assert left_behind, "no copy was ever left behind: this test shows nothing"


def test_only_the_unused_room_of_a_page_is_cleaned() -> None:
    cells = b"cell-one" + b"cell-two"
    page = bytearray(4096)
    page[4096 - len(cells) :] = cells
    page[:12] = bytes([0x0D, 0, 0, 0, 2]) + (4096 - len(cells)).to_bytes(2, "big") + b"\0" + b"\x0f\xf0\x0f\xf8"
    assert pages.cleaned(bytes(page)) is None
    page[100:106] = b"secret"
    clean = pages.cleaned(bytes(page))
    assert clean is not None and b"secret" not in clean and clean[4080:] == cells and clean[:12] == page[:12]
    assert pages.cleaned(b"\x05" + bytes(page[1:])) is None, "an inner page of a table holds no rows"
    inner = b"\x02" + bytes(page[1:8]) + b"\0\0\0\7" + bytes(page[8:12]) + bytes(page[16:])
    assert (pages.cleaned(b"\x0a" + bytes(page[1:])) or b"")[1:] == clean[1:]
    assert b"secret" not in (pages.cleaned(inner) or inner) and (pages.cleaned(inner) or b"")[:16] == inner[:16]
    page[5:7] = b"\xff\xff"
    assert pages.cleaned(bytes(page)) is None and pages.suspect(bytes(page)), (
        "nonsense is left alone, and looked at again"
    )


# ---- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.3")
def test_what_people_were_asked_about_is_found_by_its_fields_too(kit: AgentKit) -> None:
    """The text of a request repeats the arguments. `done` was said while the address stood in there."""
    odd = "Zoe\u0308"
    asked, answer = threading.Event(), []

    def say_yes() -> None:
        while not answer:
            for item in kit.inbox():
                answer.append(item["id"])
                kit.approve(item["id"], by="Ann")
            asked.wait(0.02)

    threading.Thread(target=say_yes, daemon=True).start()
    with saga_scope("mail", kit=kit) as made:
        given = {"email": MAIL, "to": {"name": odd, odd: 1.5}}
        made.execute("mail.send", lambda email, to: 1, given, semantics=IRREVERSIBLE)
    kit.log.flush()
    found = list(openings_of(kit.log, kit.log.thread(kit.log.sagas()[0].saga)))
    requests = [one for one in found if "request" in (one.fields or {})]
    assert len(requests) == 1 and MAIL in requests[0].fields["request"]
    for fields, conditions in (["email"], []), (["args.email"], []), ([], [f"email={MAIL}"]), ([], ["email~ZELDA"]), (
        [odd], []), ([], [f"name={odd}"]), ([], [f"{odd}=1.5"]):  # fmt: skip
        choice = choose(found, fields, [where(text) for text in conditions])
        assert requests[0] in choice.gone, (fields, conditions)
    assert choose(found, ["nothing"]).gone == []


@pytest.mark.promise("6.3")
def test_fields_that_share_one_fate_go_together_and_what_is_apart_stays(kit: AgentKit) -> None:
    with saga_scope("apart", kit=kit) as made:
        made.execute("pay", lambda email, amount: 1, {"email": MAIL, "amount": 5}, semantics=COMPENSABLE,
                     undo=Compensation(handler="redact.cancel", kwargs={"of": "x"}), apart=("email",))  # fmt: skip
    saga = kit.log.sagas()[0].saga
    openings = list(openings_of(kit.log, kit.log.thread(saga)))
    choice = choose(openings, ["email"])
    assert len(choice.gone) == 1 and choice.also[choice.places[0]] == []
    shared = choose(openings, ["args.amount"])
    assert [also for also in shared.also.values()] == [["compensation", "identity"]]
    gone(kit.log, saga, choice.places)
    [intent] = [record for record in kit.log.thread(saga) if record.entry.kind == "step.intended"]
    assert MAIL.encode() not in (intent.blob or b"") and b'"amount":5' in (intent.blob or b"")


@pytest.mark.promise("6.3")
def test_openings_are_chosen_by_what_a_field_holds(kit: AgentKit) -> None:
    saga = order(kit)
    openings = list(openings_of(kit.log, kit.log.thread(saga)))
    kinds = {one.place: one.entry.kind for one in openings}
    assert kinds
    chosen = {one.entry.kind for one in choose(openings, (), [where(f"to={MAIL}")]).gone}
    assert chosen == {"step.intended", "step.done"}
    assert [one.entry.tool for one in choose(openings, (), [where("text~LINKÖPING")]).gone] == ["write"]
    long = choose(openings, ["text"])
    assert len(long.places) > 5, "the openings that carry the long text go with it"
    assert choose(openings, (), [where("to=nobody")]).gone == []
    for nonsense in ("", "x", "=y", "__import__('os')"):
        with pytest.raises(BadValue):
            where(nonsense)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(log: Any, places: list[redact.Place], code: str) -> AmendsError:
    size, before = log.size, [record.blob for record in log.records()]
    with pytest.raises(AmendsError) as caught:
        redact.redact(log, places, basis="GDPR-17", by="Ada")
    assert caught.value.code == code, caught.value
    assert log.size == size and [record.blob for record in log.records()] == before
    return caught.value


@pytest.mark.promise("6.3")
def test_nothing_is_redacted_twice_and_the_first_is_named(kit: AgentKit) -> None:
    saga = order(kit)
    places = everything(kit.log, saga)
    [fact] = gone(kit.log, saga)
    assert f"record {fact}, by Ada" in refused(kit.log, places[:1], "redacted_already").message


@pytest.mark.promise("6.3")
def test_records_of_control_are_kept_as_they_are(kit: AgentKit) -> None:
    saga = order(kit)
    [fact] = gone(kit.log, saga)
    hold = redact.hold(kit.log, saga, by="Bo", reason="case 12")
    redact.lift(kit.log, hold.seq, by="Bo", reason="over")
    for seq in (fact, hold.seq):
        refused(kit.log, [(seq, 0)], "control_record")
    assert not any(one.entry.seq in (fact, hold.seq) for one in openings_of(kit.log, kit.log.records()))


@pytest.mark.promise("6.3")
def test_a_hold_forbids_until_it_is_lifted_and_says_whose_it_is(kit: AgentKit) -> None:
    saga = order(kit)
    places = everything(kit.log, saga)
    for target in (saga, ALL):
        first = redact.hold(kit.log, target, by="Bo", reason="case 12")
        second = redact.hold(kit.log, target, by="Cy", reason="case 13")
        told = refused(kit.log, places, "held").message
        assert "Bo" in told and "case 12" in told
        redact.lift(kit.log, first.seq, by="Bo")
        assert "Cy" in refused(kit.log, places, "held").message
        redact.lift(kit.log, second.seq, by="Cy")
        with pytest.raises(NotFound):
            redact.lift(kit.log, second.seq, by="Cy")
    assert gone(kit.log, saga)


@pytest.mark.promise("6.3")
def test_a_hold_covers_what_follows_the_saga_and_is_inside_it(kit: AgentKit) -> None:
    with saga_scope("outer", kit=kit) as made:
        made.execute("pay", lambda: 1, semantics=COMPENSABLE, undo=Compensation(lambda: None))
        with saga_scope("inner", kit=kit) as inner:
            inner.execute("pay", lambda: 1, semantics=COMPENSABLE, undo=Compensation(lambda: None))
    kit.log.flush()
    by_name = {row.first: row.saga for row in kit.log.sagas()}
    outer, inside = (by_name[first] for first in sorted(by_name))
    redact.hold(kit.log, outer, by="Bo", reason="case 12")
    refused(kit.log, everything(kit.log, inside), "held")


@pytest.mark.promise("6.3")
def test_an_open_saga_keeps_what_undoes_it(kit: AgentKit) -> None:
    saga = order(kit)
    places = everything(kit.log, saga)
    with saga_scope("open", kit=kit) as made:
        made.execute("pay", lambda: 1, semantics=COMPENSABLE, undo=Compensation(lambda: None))
        kit.log.flush()
        mine = kit.log.sagas()[0].saga
        refused(kit.log, everything(kit.log, mine), "saga_open")
        with pytest.raises(NotFound):
            redact.redact(kit.log, [(places[0][0], 9)], basis="GDPR-17", by="Ada")
        with pytest.raises(NotFound):
            redact.redact(kit.log, [(10_000, 0)], basis="GDPR-17", by="Ada")
    assert gone(kit.log, mine) and gone(kit.log, saga)


def test_a_saga_whose_follow_up_is_still_at_work_keeps_what_it_holds(kit: AgentKit) -> None:
    saga = order(kit)
    places = everything(kit.log, saga)
    up = {"fence": 1, "driver": "d", "of": saga}
    kit.log.commit(lambda state, now: [Draft("saga.opened", {"saga": "after", **up}, up=True)])
    assert "after" in refused(kit.log, places, "saga_open").message
    kit.log.commit(lambda state, now: [Draft("saga.ended", {"saga": "after", "fence": 1, "out": "committed"})])
    assert gone(kit.log, saga)


def test_who_decides_and_on_what_basis_is_said(kit: AgentKit) -> None:
    places = everything(kit.log, order(kit))
    for basis, by in (("", "Ada"), ("two words", "Ada"), ("GDPR-17", " ")):
        with pytest.raises(BadValue):
            redact.redact(kit.log, places, basis=basis, by=by)
    with pytest.raises(Refused) as caught:
        redact.redact(kit.log, [], basis="GDPR-17", by="Ada")
    assert caught.value.code == "nothing_chosen"


def test_an_opening_that_no_record_explains_is_not_explained_afterwards(kit: AgentKit) -> None:
    """Else a redaction would cover up what somebody cut out of the file."""
    saga = order(kit)
    seq, place = everything(kit.log, saga)[0]
    with kit.log._lock:  # type: ignore[attr-defined]
        kit.log._db.run("update entry set open = null where seq = ?", (seq,))  # type: ignore[attr-defined]
    with pytest.raises(Refused) as caught:
        redact.redact(kit.log, [(seq, place)], basis="GDPR-17", by="Ada")
    assert caught.value.code == "opening_missing"


@pytest.mark.promise("6.3")
def test_what_was_altered_is_said_to_be_and_is_not_taken_for_an_opening(kit: AgentKit) -> None:
    record = next(record for record in kit.log.thread(order(kit)) if record.blob)
    with pytest.raises(Malformed) as refused:
        list(openings_of(kit.log, [record._replace(blob=record.blob.replace(b"PIN", b"NIP") + b"[]\n")]))
    assert refused.value.facts["finding"] == "E_OPENING"


def test_more_openings_than_a_fact_holds_are_several_facts(kit: AgentKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "PLACES", 4)
    monkeypatch.setattr(redact, "AT_ONCE", 10)
    saga = order(kit)
    places = everything(kit.log, saga)
    facts = [kit.log.record(seq).entry for seq in gone(kit.log, saga)]
    assert [pair for entry in facts for pair in entry.places] == places
    assert len(places) > 10 and all(len(entry.places) <= 4 for entry in facts)


# ---- deaths ----------------------------------------------------------------------------------------------------------


class Cut:
    """A home on a disk that loses power while a saga is redacted and erased."""

    def __init__(self, folder: Path) -> None:
        self.disk = Disk(folder)
        self.home = Home(folder)
        self.home.create()
        self.log = open_log(self.home, State(), warn=lambda text: None)
        self.done = False

    def work(self, n: int) -> Cut:
        bodies = (b'{"args":{"to":"%b"}}' % MAIL.encode(), b'{"args":{"text":"%b"}}' % (b"pack my box" * 900))
        drafts = [Draft("saga.opened", {"saga": "a", "fence": 1, "driver": "d"}, (b'{"name":"zelda"}',), up=True),
                  Draft("saga.ended", {"saga": "a", "fence": 1, "out": "committed"}, bodies)]  # fmt: skip
        self.log.commit(lambda state, now: drafts)
        self.log.truncate()
        self.disk.fail(n, "cut")
        try:
            gone(self.log, "a")
            self.done = self.log.finish_erasing().done
        except Exception as error:
            self.error = error
        return self


@pytest.mark.promise("6.3")
@pytest.mark.parametrize("then", [NOTHING, ANYTHING, pytest.param(EVERYTHING, marks=pytest.mark.long)])
def test_a_death_at_any_moment_leaves_all_or_nothing_and_is_finished_later(
    tmp_path: Path, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "IDLE_S", 3600.0)
    monkeypatch.setattr(sqlite, "LAZY_S", 3600.0)
    monkeypatch.setattr(sqlite, "WAL_BYTES", 0)
    fired, seen = 0, set()
    with under():
        for n in range(1, 500):
            folder = tmp_path / str(n)
            folder.mkdir()
            life = Cut(folder).work(n)
            die(life.log)
            if not life.disk.fired:
                assert life.done
                life.disk.gone()
                break
            fired += 1
            seen.update(life.disk.fired)
            after = life.disk.after_the_cut(then)
            log = open_log(life.home, State(), warn=lambda text: None)
            told = [record.entry for record in log.records() if record.entry.kind == "redaction.made"]
            assert {len(record.entry.c) - len(log.places(record.entry.seq)) for record in log.thread("a")} in (
                ({0},) if not told else ({1, 2},)
            ), f"cut at {n}, then {then}"
            assert told or not life.done
            if told:
                assert log.finish_erasing().done
                log.close()
                assert lies_in(folder, MAIL.encode(), b"pack my box", b"zelda") == [], f"cut at {n}, then {then}"
            else:
                log.close()
            assert verify(folder, view_factory=State).exit == 0
            after.gone()
    assert fired > 15 and {"cut in write", "cut in sync"} <= seen


AGENT = """
import os, sys, signal
from amends import AgentKit
from amends.store import redact
from test_redact import everything, order
kit = AgentKit(home=sys.argv[1], warn=lambda text: None)
saga = order(kit)
kit.log.truncate()
"""


def process(home: Path, body: str, *args: str, **more: Any) -> subprocess.Popen[str]:
    """Another process with a kit on this home, and a saga of its own."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", AGENT + body, str(home), *args], env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, **more,
    )  # fmt: skip


@pytest.mark.promise("6.3")
@pytest.mark.parametrize("moment", ["_cut", "_landed", "_emptied", "_clean"])
def test_a_kill_in_the_middle_is_finished_by_whoever_writes_next(tmp_path: Path, moment: str) -> None:
    body = f"""
from amends.store import sqlite
if {moment!r} == "_cut":
    cut = sqlite.ACTS["redaction.made"]
    def struck(*args):
        cut(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    sqlite.ACTS["redaction.made"] = struck
else:
    real = getattr(sqlite.SqliteLog, {moment!r})
    def struck(self, *args):
        said = real(self, *args)
        if self.keeping.unfinished:
            os.kill(os.getpid(), signal.SIGKILL)
        return said
    setattr(sqlite.SqliteLog, {moment!r}, struck)
    if {moment!r} == "_clean":
        sqlite.SqliteLog._suspects = lambda self: [1, 2, 3]
redact.redact(kit.log, everything(kit.log, saga), basis="GDPR-17", by="Ada")
kit.log.finish_erasing(10)
"""
    home = tmp_path / "home"
    dead = process(home, body)
    assert dead.wait(60) == -signal.SIGKILL, "it was not killed where it should have been"
    with AgentKit(home=home, warn=lambda text: None) as kit:
        [row] = kit.log.sagas()
        blobs = [record.blob for record in kit.log.thread(row.saga) if record.entry.c]
        if moment == "_cut":
            assert all(blobs) and not kit.log.keeping.erasing
            gone(kit.log, row.saga)
        assert not any(record.blob for record in kit.log.thread(row.saga))
        eventually(lambda: not kit.log.keeping.unfinished, 30)
    assert lies_in(home, MAIL.encode(), b'"pin":"' + PIN.encode()) == []
    assert verify(home, view_factory=State).exit == 0


# ---- others meanwhile ------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.3")
def test_of_two_processes_that_redact_the_same_one_wins(kit: AgentKit, tmp_path: Path) -> None:
    saga = order(kit)
    places = everything(kit.log, saga)
    body = f"""
from amends import Refused
print("ready", flush=True)
sys.stdin.readline()
try:
    print(len(redact.redact(kit.log, {places!r}, basis="GDPR-17", by=sys.argv[2])), flush=True)
except Refused as refused:
    print(refused.code, flush=True)
kit.close()
"""
    both = [process(tmp_path / "home", body.replace("saga = order(kit)", ""), by) for by in ("Ada", "Bo")]
    for one in both:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in both:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    assert sorted(one.communicate(timeout=60)[0].strip() for one in both) == ["1", "redacted_already"]
    kit.log.refresh()
    assert [r.entry.kind for r in kit.log.records()].count("redaction.made") == 1


def test_of_two_threads_that_redact_the_same_one_wins(kit: AgentKit) -> None:
    saga = order(kit)
    places = everything(kit.log, saga)
    said: list[str] = []

    def work() -> None:
        try:
            redact.redact(kit.log, places, basis="GDPR-17", by="Ada")
            said.append("done")
        except Refused as refused:
            said.append(refused.code)

    def decide_twice(state: Any, now: Any) -> list[Draft]:
        """Both decisions in one transaction: the second must see the first, of which nothing is in the file yet."""
        return redact.redacting(kit.log, places, "GDPR-17", "Ada", "")(state, now)

    threads = [threading.Thread(target=work) for _ in range(8)]
    with kit.log._lock:  # type: ignore[attr-defined]  # so that all of them are queued, and one batch takes them
        for thread in threads:
            thread.start()
        eventually(lambda: len(kit.log._queue) == 8)  # type: ignore[attr-defined]
    for thread in threads:
        thread.join(30)
    assert sorted(said) == ["done", *["redacted_already"] * 7]


READER = """
import sys, apsw
db = apsw.Connection(sys.argv[1])
db.execute("begin")
db.execute("select count(*) from entry").fetchall()
print("reads", flush=True)
sys.stdin.readline()
"""


@pytest.mark.promise("6.3")
@linux
@pytest.mark.parametrize("old", [True, False], ids=["old pages", "the newest pages"])
def test_while_old_pages_are_read_it_is_erasing_by_whom_and_then_done_by_itself(
    kit: AgentKit, tmp_path: Path, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, saga = tmp_path / "home", order(kit)
    monkeypatch.setattr(sqlite, "ERASE_FIRST_S", 0.2 if old else 5.0)  # nobody is faster than the reader begins
    if not old:
        gone(kit.log, saga)
    reader = subprocess.Popen([sys.executable, "-c", READER, str(home / "amends.db")], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert reader.stdout is not None and reader.stdin is not None and reader.stdout.readline() == "reads\n"
    if old:
        gone(kit.log, saga)
    said = kit.log.finish_erasing(0.3)
    assert not said.done and [pin.pid for pin in said.pins] == [reader.pid]
    assert "apsw" in said.pins[0].command
    assert kit.log.keeping.unfinished and "erasure.done" not in [r.entry.kind for r in kit.log.records()]
    told = run(home, "doctor")
    assert f"pid {reader.pid}" in told.stdout and "erasing since" in told.stdout
    made = run(home, "redact", "order-1", "--basis", "GDPR-17", "--by", "Ada", "--json")
    assert json.loads(made.stdout)["error"]["code"] == "redacted_already"
    reader.stdin.write("\n")
    reader.stdin.close()
    assert reader.wait(30) == 0
    eventually(lambda: [r.entry.kind for r in kit.log.records()].count("erasure.done") == 1, 30)
    assert not kit.log.keeping.unfinished
    assert lies_in(home, MAIL.encode(), b'"pin":"' + PIN.encode()) == []


@pytest.mark.promise("6.3")
@linux
def test_the_command_says_erasing_and_the_daemon_finishes(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with AgentKit(home=home, warn=lambda text: None) as kit:
        order(kit)
    reader = subprocess.Popen([sys.executable, "-c", READER, str(home / "amends.db")], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert reader.stdout is not None and reader.stdin is not None and reader.stdout.readline() == "reads\n"
    made = run(home, "redact", "order-1", "--basis", "GDPR-17", "--by", "Ada", "--json")
    assert made.exit_code == 3
    told = json.loads(made.stdout)
    assert (told["state"], [pin["pid"] for pin in told["pins"]]) == ("erasing", [reader.pid])
    with AgentKit(home=home, warn=lambda text: None) as kit:
        watch = Watch(kit, kit.hosts, lambda swept: None)
        thread = threading.Thread(target=watch.run)
        thread.start()
        try:
            assert kit.log.keeping.unfinished
            reader.communicate("\n", timeout=30)
            eventually(lambda: not kit.log.keeping.unfinished, 30)
        finally:
            watch.stop()
            thread.join(30)
    assert lies_in(home, MAIL.encode(), b'"pin":"' + PIN.encode()) == []


@pytest.mark.promise("6.3")
def test_agents_that_write_meanwhile_lose_nothing(kit: AgentKit, tmp_path: Path) -> None:
    home = tmp_path / "home"
    sagas = [order(kit, f"order-{n}") for n in range(6)]
    body = """
from amends import COMPENSABLE, Compensation, saga_scope
print("ready", flush=True)
for n in range(150):
    with saga_scope(f"{sys.argv[2]}-{n}", kit=kit) as made:
        made.execute("pay", lambda n: n, {"n": n}, semantics=COMPENSABLE, undo=Compensation(lambda: None))
kit.close()
"""
    agents = [process(home, body.replace("saga = order(kit)", ""), name) for name in ("x", "y")]
    for agent in agents:
        assert agent.stdout is not None and agent.stdout.readline() == "ready\n"
    for saga in sagas:
        gone(kit.log, saga)
        kit.log.finish_erasing(5)
    assert [agent.wait(120) for agent in agents] == [0, 0]
    kit.log.refresh()
    names = {json.loads(r.blob.splitlines()[0])[1].get("name") for r in kit.log.records()
             if r.entry.kind == "saga.opened" and r.blob}  # fmt: skip
    assert {f"{name}-{n}" for name in ("x", "y") for n in range(150)} <= names
    eventually(lambda: kit.log.finish_erasing(1).done, 60)
    kit.close()
    verdict = verify(home, view_factory=State)
    assert verdict.exit == 0, verdict.findings


def test_who_holds_a_lock_is_read_from_what_linux_lists() -> None:
    text = (
        "1: POSIX  ADVISORY  READ 4711 08:01:99 124 124\n"
        "1: -> POSIX  ADVISORY  WRITE 4712 08:01:99 124 124\n"
        "2: POSIX  ADVISORY  READ 4713 08:01:99 128 128\n"
        "3: POSIX  ADVISORY  WRITE 4714 08:01:98 124 124\n"
        "4: POSIX  ADVISORY  WRITE 4715 08:02:99 123 127\n"
        "5: FLOCK  ADVISORY  WRITE 4716 08:01:99 0 EOF\n"
        "6: POSIX  ADVISORY  WRITE -1 08:01:99 120 EOF\n"
    )
    assert pins.holders(text, 99, (8, 1)) == [0, 4711]
    assert pins.holders(text, 99, (0, 44)) == [0, 4711, 4715], "a device that is listed otherwise"
    assert pins.holders("", 99, (8, 1)) == []


# ---- how it is told --------------------------------------------------------------------------------------------------


def run(home: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["--home", str(home), *words], prog_name="amends")


@pytest.mark.promise("6.3")
def test_one_person_is_taken_out_of_every_saga_but_those_that_wait(kit: AgentKit, tmp_path: Path) -> None:
    """Open and held ones are named, and everything of others stays."""
    home = tmp_path / "home"
    for n in range(3):
        order(kit, f"order-{n}")
    with saga_scope("other", kit=kit) as made:
        made.execute("pay", lambda to: 1, {"to": "bob@example.org"}, semantics="REVERSIBLE")
    run(home, "hold", "order-1", "--by", "Ada", "--reason", "a court asked for it")
    going = saga_scope("going", kit=kit)
    contextvars.Context().run(going.__enter__).execute(
        "pay", lambda to: 1, {"to": MAIL}, semantics=COMPENSABLE, undo=Compensation(handler="x")
    )
    said = run(home, "redact", "--all", "--where", f"to={MAIL}", "--basis", "GDPR-17", "--by", "Ada", "--json")
    assert said.exit_code == 0, said.output
    told = json.loads(said.stdout)
    assert {(one["saga"], one["why"]) for one in told["left"]} == {("going", "saga_open"), ("order-1", "held")}
    hidden = {kit.engine.hide(f"order-{n}") for n in (0, 2)}
    assert {one["saga"] for one in told["openings"]} == hidden
    kit.log.refresh()
    for name, there in (("order-0", False), ("order-1", True), ("order-2", False), ("going", True)):
        held = b"".join(r.blob or b"" for r in kit.log.thread(kit.engine.hide(name)) if r.entry.kind == "step.intended")
        assert (f'"to":"{MAIL}"'.encode() in held) is there, name
    assert any(b"bob@example.org" in (r.blob or b"") for r in kit.log.records())
    again = run(home, "redact", "--all", "--where", "to=nobody", "--basis", "GDPR-17", "--by", "Ada", "--json")
    assert (again.exit_code, json.loads(again.stdout)["records"]) == (0, [])
    for words in (("--all",), ("order-0", "--all", "--field", "to")):
        assert run(home, "redact", *words, "--basis", "GDPR-17", "--by", "Ada").exit_code == 2


@pytest.mark.promise("6.3", "12")
def test_what_is_gone_is_said_to_be_and_nothing_fails_over_it(kit: AgentKit, tmp_path: Path) -> None:
    home, saga = tmp_path / "home", order(kit)
    order(kit, "order-2")
    listed = run(home, "redact", "order-1", "--field", "text", "--basis", "GDPR-17", "--by", "Ada", "--dry-run")
    assert listed.exit_code == 0 and "compensation" in listed.stdout and "Nothing was changed" in listed.stdout
    assert "no undo: order-1 step 2 write" in listed.stdout
    held = run(home, "hold", "order-1", "--by", "Bo", "--reason", "case 12", "--json")
    hold = json.loads(held.stdout)["record"]
    assert json.loads(run(home, "hold", "--list", "--json").stdout)[0]["name"] == "order-1"
    assert run(home, "redact", "order-1", "--basis", "GDPR-17", "--by", "Ada").exit_code == 6
    assert run(home, "redact", "order-1", "--basis", "GDPR-17", "--by", "Ada", "--dry-run").exit_code == 6
    assert run(home, "hold", "--lift", str(hold), "--by", "Bo").exit_code == 0
    made = run(home, "redact", "order-1", "--basis", "GDPR-17", "--by", "Ada")
    assert made.exit_code == 0 and "done" in made.stdout
    shown = run(home, "show", "order-1")
    assert shown.exit_code == 0 and "pay(redacted) was called" in shown.stdout and MAIL not in shown.stdout
    assert saga in run(home, "ps").stdout, "its name is gone, so it goes by its header id"
    document = json.loads(run(home, "show", "order-1", "--json").stdout)
    assert document["saga"] == saga and all(step["redacted"] for step in document["steps"])
    assert {step["compensation"]["state"] for step in document["steps"]} == {"redacted"}
    for words in (("show", "order-1", "--why"), ("log",), ("log", saga, "--json"), ("status",), ("inbox",)):
        said = run(home, *words)
        assert "Traceback" not in said.stderr and said.exit_code in (0, 1), said
    assert "(redacted)" in run(home, "log", saga).stdout
    undone = run(home, "undo", "order-1", "--by", "Ada", "--reason", "sorry")
    assert undone.exit_code == 6 and "redacted" in undone.stderr and "Traceback" not in undone.stderr
    with pytest.raises(Refused) as caught, saga_scope("order-1", kit=kit):
        pass
    assert caught.value.code == "redacted"


@pytest.mark.promise("6.3")
def test_copies_that_were_handed_out_are_named(kit: AgentKit, tmp_path: Path) -> None:
    order(kit)
    copy = {"out": "bundle", "event": "ab" * 32, "upto": kit.log.size, "payload": "sealed"}
    kit.log.commit(lambda state, now: [Draft("copy.made", copy, up=True)])
    made = run(tmp_path / "home", "redact", "order-1", "--basis", "GDPR-17", "--by", "Ada")
    assert "not reached: the bundle abababababababab" in made.stdout and "amends forget" in made.stdout


@pytest.mark.parametrize("words", [
    ("redact",), ("redact", "nobody", "--basis", "X", "--by", "Ada"), ("redact", "--basis", "X", "--by", "Ada"),
    ("redact", "order-1", "--opening", "x", "--basis", "X", "--by", "Ada"),
    ("redact", "order-1", "--where", "x", "--basis", "X", "--by", "Ada"),
    ("redact", "order-1", "--basis", "two words", "--by", "Ada"), ("hold",), ("hold", "order-1", "--all"),
    ("hold", "order-1"), ("hold", "order-1", "--by", "Bo"), ("hold", "--lift", "3", "--by", "Bo"),
    ("redact", "--opening", "99999:0", "--basis", "X", "--by", "Ada"),
])  # fmt: skip
def test_a_typing_error_is_one_sentence_and_changes_nothing(
    kit: AgentKit, tmp_path: Path, words: tuple[str, ...]
) -> None:
    order(kit)
    said = run(tmp_path / "home", *words)
    assert said.exit_code == 2 and "Traceback" not in said.stderr and said.stderr
    kit.log.refresh()
    assert not {"redaction.made", "hold.placed"} & {record.entry.kind for record in kit.log.records()}


# ---- under seal ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.3")
def test_sealed_openings_are_cut_out_without_their_neighbours_and_also_those_that_nobody_can_read(
    tmp_path: Path,
) -> None:
    home, owner = Home(tmp_path / "home"), Owner(b"\7" * 32)
    home.create()
    log = open_log(home, State(), warn=lambda text: None, owner=lambda: owner)
    sealing.begin(log, owner, "Ada")
    sealing.finish(log)
    bodies = (b'{"args":{"to":"x"}}', b'{"args":{"text":"%b"}}' % (b"pack my box" * 900), b'{"note":"y"}')
    for saga in ("one", "two"):
        drafts = [Draft("saga.opened", {"saga": saga, "fence": 1, "driver": "d"}, bodies, up=True),
                  Draft("saga.ended", {"saga": saga, "fence": 1, "out": "committed"})]  # fmt: skip
        log.commit(lambda state, now, drafts=drafts: drafts)
    first, second = (log.thread(saga)[0].entry.seq for saga in ("one", "two"))
    with log._lock:
        [(cell,)] = log._db.run("select open from entry where seq = ?", (first,)).fetchall()
    ciphertexts = [part.ciphertext for part in seal.parts(cell)]
    gone(log, "one", [(first, 1)])
    assert log.places(first) == (0, 2)
    assert b'"to":"x"' in (log.record(first).blob or b"") and b"pack my box" not in (log.record(first).blob or b"")
    assert log.finish_erasing(20).done
    assert lies_in(home.path, ciphertexts[1]) == [] and lies_in(home.path, ciphertexts[0])
    sealing.forget(log, ["two"], "Ada", "asked to")
    assert log.record(second).blob is None and log.places(second) == (0, 1, 2)
    choice = choose(openings_of(log, log.thread("two")), ["to"])
    assert not choice.gone and len(choice.unread) == 3, "nothing is skipped in silence"
    gone(log, "two")
    assert log.places(second) == ()
    log.close()
    verdict = verify(home.path, view_factory=State)
    assert verdict.exit == 0, verdict.findings
