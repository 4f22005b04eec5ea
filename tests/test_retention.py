"""What is settled and old goes by the rule that a person wrote down, and nothing that is needed goes with it."""

from __future__ import annotations

import base64
import contextvars
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from amends import COMPENSABLE, AgentKit, BudgetLimit, Compensation, PreFlightGate, SagaAborted
from amends.cli.main import main
from amends.runtime import retention
from amends.runtime.config_file import BadConfig, Retention, retention_of
from amends.runtime.facts import fact
from amends.runtime.state import State
from amends.store.audit import verify
from amends.store.clock import SystemClock
from amends.store.errors import DiskFull, YouErred

DAY = 86_400_000
Later = Callable[[float], None]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Iterator[Later]:
    """Both clocks of the machine, days ahead of what they are."""
    ahead = [0.0]
    wall, boot = SystemClock.wall_us, SystemClock.boot_ms
    monkeypatch.setattr(SystemClock, "wall_us", lambda self: wall(self) + int(ahead[0] * DAY * 1000))
    monkeypatch.setattr(SystemClock, "boot_ms", lambda self: boot(self) + int(ahead[0] * DAY))

    def go(days: float) -> None:
        ahead[0] += days

    yield go


def charge(amount: int) -> str:
    return "ch"


def refund(amount: int) -> None:
    """Give it back."""


def pay(kit: AgentKit, name: str, amount: int = 10, tool: str = "pay.charge", fails: bool = False) -> None:
    try:
        with kit.transaction(id=name) as saga:
            saga.execute(
                tool, charge, {"amount": amount}, semantics=COMPENSABLE, undo=Compensation(refund, {"amount": amount})
            )
            if fails:
                raise ValueError("it did not work out")
    except SagaAborted:
        assert fails


def work(kit: AgentKit, name: str, count: int = 100, **more: Any) -> None:
    for n in range(count):
        pay(kit, f"{name}-{n}", **more)


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="amends")


def asked(*words: str | Path, code: int = 0) -> Any:
    said = call(*words, "--json")
    assert said.exit_code == code, said.output
    return json.loads(said.stdout)


@pytest.fixture
def aged(later: Later, tmp_path: Path) -> Path:
    """A home with 100 sagas of a hundred days ago and 100 of today."""
    kit = AgentKit("agent", home=tmp_path / "home")
    work(kit, "old")
    later(100)
    work(kit, "new")
    kit.close()
    return tmp_path / "home"


@pytest.mark.promise("14.3")
@pytest.mark.promise("6.4")
def test_what_is_settled_and_past_retention_goes_and_the_rest_adds_up(aged: Path) -> None:
    before = verify(aged, view_factory=State)
    told = asked("compact", "--by", "Ann")
    assert told["removed_sagas"] == told["sagas"] == 100 and told["removed"] == told["entries"] >= 400
    assert told["state"] == "done" and told["left"] == []
    found = verify(aged, view_factory=State)
    assert (before.verdict, found.verdict) == ("INTACT", "INTACT"), found.findings
    assert len(asked("ps", "--all")) == 100
    assert asked("compact", "--by", "Ann")["sagas"] == 0, "what is gone is gone once"
    assert asked("certify")["verdict"] == "SAFE", "what went counts by the certificate that was made before"


@pytest.mark.promise("6.4")
def test_what_went_is_counted_as_it_was_before_and_once(later: Later, tmp_path: Path) -> None:
    """Committed, undone, undone by a later saga, and known not to have happened: the certificate says the same."""
    kit = AgentKit("agent", home=tmp_path / "home")
    work(kit, "good", 5)
    work(kit, "bad", 5, fails=True)
    work(kit, "undone", 5)
    for n in range(5):
        kit.undo(f"undone-{n}", by="Ann", reason="it was wrong")
    with pytest.raises(SagaAborted), kit.transaction(id="never") as saga:
        saga.execute("pay.charge", _raises, {}, semantics=COMPENSABLE, undo=Compensation(refund, {"amount": 1}))
    later(100)
    work(kit, "new")
    kit.close()
    before = asked("certify")["counts"]
    told = asked("compact", "--by", "Ann")
    assert told["removed_sagas"] == 21 and not told["left"]
    after = asked("certify")["counts"]
    kept = ("sagas", "effects", "committed", "approved", "compensated", "accepted", "not_happened", "unaccounted")
    assert {word: before[word] for word in kept} == {word: after[word] for word in kept}
    assert before["effects"] == 116 and after["compacted"] == told["removed"]


def _raises() -> None:
    raise ValueError("the card was refused")


@pytest.mark.promise("14.3")
def test_nothing_is_removed_by_default_and_nothing_by_nobody(aged: Path) -> None:
    size = asked("status")["records"]
    asked("recoverd", "--once")
    assert asked("status")["records"] == size and not retention_of(aged / "config.toml").auto
    said = call("compact", "--json")
    assert (said.exit_code, json.loads(said.stdout)["error"]["code"]) == (2, "no_name")
    assert asked("compact", "--dry-run")["sagas"] == 100
    assert asked("status")["records"] == size


@pytest.mark.promise("14.3")
def test_ninety_days_are_kept_where_nothing_is_said(later: Later, tmp_path: Path) -> None:
    kit = AgentKit("agent", home=tmp_path / "home")
    work(kit, "old", 5)
    later(89)
    work(kit, "new", 100)
    kit.close()
    assert asked("compact", "--dry-run")["stay"] == {retention.YOUNG: 105}
    later(2)
    assert asked("compact", "--dry-run")["sagas"] == 5


@pytest.mark.promise("6.4")
def test_a_wall_clock_that_is_set_forward_makes_nothing_older(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kit = AgentKit("agent", home=tmp_path / "home")
    work(kit, "old", 5)
    wall = SystemClock.wall_us
    monkeypatch.setattr(SystemClock, "wall_us", lambda self: wall(self) + 400 * DAY * 1000)
    work(kit, "new", 100)
    kit.close()
    assert asked("compact", "--dry-run")["stay"] == {retention.YOUNG: 105}


@pytest.mark.promise("6.4")
@pytest.mark.parametrize("why", [retention.OPEN, retention.HELD, retention.UNACCOUNTED, retention.NEEDED])
def test_what_is_needed_stays_with_the_reason(later: Later, tmp_path: Path, why: str) -> None:
    gate = (
        PreFlightGate([], limits=[BudgetLimit("all", max_total=1000, window=None)]) if why == retention.NEEDED else None
    )
    kit = AgentKit("agent", home=tmp_path / "home", gate=gate)
    if why == retention.OPEN:
        contextvars.Context().run(kit.transaction(id="kept").__enter__).execute(
            "pay.charge", charge, {"amount": 1}, semantics=COMPENSABLE, undo=Compensation(refund, {"amount": 1})
        )
    elif why == retention.UNACCOUNTED:
        pay(kit, "kept")  # and the world was asked, and does not have it
        [effect] = [record.entry for record in kit.log.records() if record.entry.kind == "step.intended"]
        seen = {"of": effect.saga, "step": 1, "out": "drift", "ref": effect.seq, "why": "absent"}
        kit.log.commit(lambda view, now: [fact("effect.observed", up=True, **seen)])
    else:
        pay(kit, "kept")
    later(100)
    free = AgentKit("other", home=tmp_path / "home")
    work(free, "new")
    if why == retention.HELD:
        asked("hold", "kept", "--by", "Ann", "--reason", "a court asked for it")
    told = asked("compact", "--dry-run")
    assert told["sagas"] == 0 and told["stay"] == {why: 1, retention.YOUNG: 100}
    assert asked("compact", "--by", "Ann")["removed"] == 0
    for one in (free, kit):
        one.close()


@pytest.mark.promise("6.4")
def test_a_limit_counts_what_its_window_holds_after_old_records_went(later: Later, tmp_path: Path) -> None:
    """And the budget of today is what it was before."""
    gate = PreFlightGate([], limits=[BudgetLimit("day", max_total=500, window=86_400)])
    kit = AgentKit("agent", home=tmp_path / "home", gate=gate)
    work(kit, "old", 20, amount=10)
    later(100)
    work(kit, "new", 40, amount=10)
    kit.close()
    plain = AgentKit("other", home=tmp_path / "home")
    work(plain, "more", 60, tool="mail.send")
    plain.close()
    [before] = asked("status")["limits"]
    assert asked("compact", "--by", "Ann")["removed_sagas"] == 20
    [after] = asked("status")["limits"]
    assert before["said"] == after["said"] and after["said"]["used"] == "400.00 eur"
    found = verify(tmp_path / "home", view_factory=State)
    assert found.verdict == "INTACT", found.findings


@pytest.mark.promise("14.3")
def test_the_daemon_removes_only_where_the_file_says_so(aged: Path) -> None:
    (aged / "config.toml").write_text('[retention]\nkeep = "30d"\nauto = true\n')
    asked("recoverd", "--once")
    assert len(asked("ps", "--all")) == 100


@pytest.mark.promise("14.3")
def test_doctor_says_how_the_log_grows_and_what_retention_would_free(aged: Path) -> None:
    said = asked("doctor", code=asked_code("doctor"))
    told = [check["text"] for check in said["checks"] if check["check"] in ("growth", "head")]
    assert any("MB a day" in text for text in told), told
    assert any("retention 90 d: 402 records" in text for text in told), told
    assert any("nobody else can tell" in text for text in told), told
    asked("backup", aged.parent / "copy.tar")
    asked("compact", "--by", "Ann")
    said = asked("doctor", code=asked_code("doctor"))
    told = [check["text"] for check in said["checks"] if check["check"] in ("growth", "head")]
    assert any("retention 90 d: 2 records" in text for text in told) and any("(backup)" in text for text in told), told


@pytest.mark.promise("14.3")
def test_doctor_names_who_keeps_the_wal_from_being_used_anew(aged: Path) -> None:
    script = (
        "import sys, apsw\n"
        "db = apsw.Connection(sys.argv[1])\n"
        "db.cursor().execute('begin').execute('select * from entry').fetchone()\n"
        "print('reading', flush=True)\n"
        "sys.stdin.read()\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", script, aged / "amends.db"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
    try:
        told = [check["text"] for check in asked("doctor", code=asked_code("doctor"))["checks"]]
        assert any(f"pid {reader.pid} " in text for text in told), told
    finally:
        reader.communicate("")
    told = [check["text"] for check in asked("doctor", code=asked_code("doctor"))["checks"]]
    assert not any(f"pid {reader.pid} " in text for text in told)


@pytest.mark.promise("6.4")
def test_a_compaction_that_a_reader_holds_up_is_not_done_when_it_is_asked_for_again(aged: Path) -> None:
    script = (
        "import sys, apsw\n"
        "db = apsw.Connection(sys.argv[1])\n"
        "db.cursor().execute('begin').execute('select * from entry').fetchone()\n"
        "print('reading', flush=True)\n"
        "sys.stdin.read()\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", script, aged / "amends.db"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
    try:
        assert asked("compact", "--by", "Ann", code=3)["removed_sagas"] == 100
        again = asked("compact", "--by", "Ann", code=3)
        assert (again["removed"], again["state"]) == (0, "erasing")
    finally:
        reader.communicate("")
    assert asked("compact", "--by", "Ann")["state"] == "done"
    with AgentKit("agent", home=aged) as kit:
        assert kit.log.room().free == 0  # the room that it held up is given back


@pytest.mark.promise("14.3")
def test_on_a_full_disk_the_certificate_takes_the_reserve(aged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, keep = aged / "reserve", retention.keep
    reserve.write_bytes(b"room")

    def full(*words: Any) -> Path:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return keep(*words)

    monkeypatch.setattr(retention, "keep", full)
    assert asked("compact", "--by", "Ann")["removed_sagas"] == 100


def asked_code(*words: str) -> int:
    return call(*words, "--json").exit_code


@pytest.mark.slow
@pytest.mark.promise("14.3")
def test_a_log_at_its_size_begins_no_new_saga_and_finishes_what_runs(tmp_path: Path) -> None:
    home = tmp_path / "home"
    AgentKit("agent", home=home).close()
    (home / "config.toml").write_text('[retention]\nmax_size = "64MB"\n')
    kit = AgentKit("agent", home=home)
    running = kit.transaction(id="running")
    saga = running.__enter__()
    for n in range(4):  # 18 MB each, and nothing that could be compressed
        fill = base64.b64encode(os.urandom(18_000_000)).decode()
        saga.execute(f"fill-{n}", lambda fill: "ok", {"fill": fill}, semantics="REVERSIBLE")
        text = asked("doctor", code=asked_code("doctor"))["checks"]
        full = [check["level"] for check in text if "config.toml allows" in check["text"]]
    with pytest.raises(DiskFull) as refused:
        contextvars.Context().run(kit.transaction(id="new").__enter__)
    assert (refused.value.code, refused.value.exit, full) == ("size_cap", 10, ["bad"])
    saga.execute("pay.charge", charge, {"amount": 1}, semantics=COMPENSABLE, undo=Compensation(refund, {"amount": 1}))
    running.__exit__(None, None, None)
    assert asked("show", "running")["outcome"] == "committed"
    kit.close()


def test_the_section_is_read_strictly_and_says_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('\n[retention]\nkeep = "30d"\nauto = true\nmax_size = "2GB"\n')
    assert retention_of(path) == Retention(30 * DAY, True, 2 * 10**9)
    for line in ('keep = "3d"', "keep = 90", 'auto = "yes"', "max_size = 5", 'max_size = "1MB"', 'keeep = "90d"'):
        path.write_text(f"\n[retention]\n{line}\n")
        with pytest.raises(BadConfig) as refused:
            retention_of(path)
        assert refused.value.facts["line"] == 3
    assert retention_of(tmp_path / "none.toml") == Retention()


def test_too_short_a_retention_is_refused(aged: Path) -> None:
    with pytest.raises(YouErred):
        kit = AgentKit("agent", home=aged)
        try:
            retention.plan(kit, DAY)
        finally:
            kit.close()
    assert asked("compact", "--keep", "soon", "--by", "Ann", code=2)["error"]["code"] == "bad_retention"


@pytest.mark.promise("6.4")
@pytest.mark.promise("6.5")
def test_a_name_that_was_forgotten_and_removed_is_taken_again_and_forgotten_again(
    later: Later, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log was called tampered, since a key of that name was there, and the second saga could not be forgotten."""
    monkeypatch.setenv("OWN", base64.b64encode(bytes(range(32))).decode())
    monkeypatch.setenv("AMENDS_SEAL_KEY", "env:OWN")
    kit = AgentKit("agent", home=tmp_path / "home")
    asked("seal", "--key", "env:OWN", "--by", "Ann")
    for turn in range(3):
        pay(kit, "again")
        if turn != 1:
            assert asked("forget", "again", "--by", "Ann", "--reason", "asked")["forgotten"]
            assert asked("forget", "again", "--by", "Ann", "--reason", "asked", code=6)["error"]["code"] == "forgotten"
        work(kit, f"more-{turn}", 70)
        assert verify(tmp_path / "home", view_factory=State).verdict == "INTACT"
        later(100)
        work(kit, f"new-{turn}", 70)
        assert retention.remove(kit, 90 * DAY, by="Ann").done
        found = verify(tmp_path / "home", view_factory=State)
        assert found.verdict == "INTACT", found.findings
    pay(kit, "again")
    assert asked("show", "again")["steps"][0]["args"]["amount"] == 10
    kit.close()
