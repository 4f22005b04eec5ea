"""A device knows its own past: each way of losing it refuses in words, and each has an honest twin that passes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from amends.store import foreign, identity, note
from amends.store.anchor import BLOCK, pack
from amends.store.anchor import read_all as read_anchors
from amends.store.audit import verify
from amends.store.chain import Draft
from amends.store.errors import Damaged, HomeRefused, LogHeld, LogReplaced, YouErred
from amends.store.fold import NoView
from amends.store.home import Home
from amends.store.identity import adopt, open_log
from amends.store.keys import Identity, hkdf, origin_of

# RFC 5869 A.3: test case 3, no salt and no info
RFC5869_SEED = bytes.fromhex("0b" * 22)
RFC5869_OUT = bytes.fromhex("8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8")


class Told(list[str]):
    """What was warned of."""

    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def home(tmp_path) -> Home:
    return Home(tmp_path / "home")


def write(home: Home, sagas: int = 1, told: Told | None = None, end: bool = True) -> int:
    """Open, write some sagas, close; return the size."""
    log = open_log(home, NoView(), warn=told if told is not None else Told())
    for _ in range(sagas):
        name = f"s{log.size}"
        log.commit(lambda view, now, name=name: [Draft("saga.opened", {"saga": name, "fence": 1})])
        if end:
            log.commit(lambda view, now, name=name: [Draft("saga.ended", {"saga": name, "out": "committed"})])
    size = log.size
    log.close()
    return size


def refusal(home: Home) -> HomeRefused:
    with pytest.raises(HomeRefused) as refused:
        open_log(home, NoView(), warn=Told())
    assert refused.value.exit == 4
    assert "amends init --adopt --by NAME --reason TEXT" in refused.value.next
    return refused.value


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_keys_are_drawn_as_rfc_5869_says():
    assert hkdf(RFC5869_SEED, b"", 42) == RFC5869_OUT


def test_one_key_has_one_job(home):
    home.create()
    one = Identity.load(home)
    keys = {one.log_key, one.witness_key, one.export_key, one.noise_key, one.noise_secret, one.log_seed}
    assert len(keys) == 6
    assert note.parse_vkey(one.log_vkey).name == one.origin and len(one.origin) == len("amends.local/") + 26
    again = Identity.load(home)
    assert again.log_vkey == one.log_vkey and again.hide("x") == one.hide("x")


def test_a_hidden_name_is_the_same_here_and_another_elsewhere(home, tmp_path):
    here, there = Identity.load(home.create()), Identity.load(Home(tmp_path / "other").create())
    assert here.hide("order-42") == here.hide("order-42") != there.hide("order-42")
    assert len(here.hide("order-42")) == 26 and here.hide("order-42") != here.hide("order-43")
    assert len(here.meter("eur")) == 16
    assert here.fingerprint(b"order-42") != here.hide("order-42")
    assert here.fingerprint(b"k") != there.fingerprint(b"k")


def test_the_genesis_names_the_keys_and_the_log_is_called_after_its_key(home):
    write(home)
    log = open_log(home, NoView(), write=False, warn=Told())
    first = next(iter(log.records(0, 1))).entry
    mine = Identity.load(home)
    assert (first.log, first.witness, first.export, first.noise) == tuple(
        key.hex() for key in (mine.log_key, mine.witness_key, mine.export_key, mine.noise_key)
    )
    assert first.install == mine.install and first.v == 1
    assert log.origin == mine.origin == origin_of(mine.log_key)
    log.close()


# ---- anchors --------------------------------------------------------------------------------------------------------


def test_both_anchors_are_one_block_written_in_place_and_only_grow(home):
    size = write(home)
    mine = Identity.load(home)
    paths = [home.anchor, home.anchors / mine.install]
    inodes = [path.stat().st_ino for path in paths]
    assert all(path.stat().st_size == BLOCK for path in paths)
    assert [anchor.size for anchor in read_anchors(home, mine)[0]] == [size, size]
    root = b"\1" * 32
    assert mine.anchor(size + 5, root, mine.sign(size + 5, root))
    assert mine.anchor(size + 1, root, mine.sign(size + 1, root)), "a larger one is there"
    assert [anchor.size for anchor in read_anchors(home, mine)[0]] == [size + 5] * 2
    assert [path.stat().st_ino for path in paths] == inodes
    note.open_note(mine.note(size + 5, root, mine.sign(size + 5, root)), [mine.log_vkey])


@pytest.mark.parametrize("bit", [0, 8 * 20, 8 * 60, 8 * 200, 8 * 400, 8 * 505, 8 * 511])
def test_a_damaged_anchor_says_nothing_and_is_written_anew(home, told, bit):
    write(home)
    block = bytearray(home.anchor.read_bytes())
    block[bit // 8] ^= 1
    home.anchor.write_bytes(block)
    mine = Identity.load(home)
    anchors, troubles = read_anchors(home, mine)
    assert len(anchors) == 1 and len(troubles) == 1
    size = write(home, told=told)
    assert any("anchor" in text for text in told)
    assert [anchor.size for anchor in read_anchors(home, mine)[0]] == [size, size]


def test_an_anchor_that_this_device_did_not_sign_says_nothing(home, told):
    size = write(home)
    mine = Identity.load(home)
    home.anchor.write_bytes(pack(mine.install, mine.note(size + 100, b"\2" * 32, b"\3" * 64)))
    assert [anchor.size for anchor in read_anchors(home, mine)[0]] == [size]
    write(home, told=told)
    assert any("not signed by this device" in text for text in told)


def test_an_unwritable_second_anchor_is_one_warning(home, told, tmp_path):
    (tmp_path / "anchors").write_bytes(b"a file where the folder should be")
    write(home, sagas=3, told=told)
    assert len([text for text in told if "second anchor" in text]) == 1
    assert home.anchor.exists()


def test_a_stopped_process_that_holds_an_anchor_holds_nobody_up(home):
    size = write(home)
    mine = Identity.load(home)
    script = (
        "import sys, os, fcntl, time\nfd = os.open(sys.argv[1], os.O_RDWR)\nfcntl.flock(fd, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\ntime.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(home.anchor)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline().strip() == "held"
        root = b"\4" * 32
        assert mine.anchor(size + 1, root, mine.sign(size + 1, root)) is False
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert mine.anchor(size + 1, root, mine.sign(size + 1, root)) is True


# ---- refusals and their honest twins --------------------------------------------------------------------------------


@pytest.mark.promise("6.2")
def test_a_restored_old_database_is_refused(home, tmp_path):
    write(home)
    shutil.copy(home.db, tmp_path / "old.db")
    shutil.copy(f"{home.db}-wal", tmp_path / "old.db-wal")
    write(home, sagas=3)
    for end in ("", "-wal"):
        shutil.copy(tmp_path / f"old.db{end}", f"{home.db}{end}")
    Path(f"{home.db}-shm").unlink(missing_ok=True)
    refused = refusal(home)
    assert refused.code == "rolled_back" and "signed 10" in refused.message
    verdict = verify(home)
    assert verdict.exit == 4 and [finding.code for finding in verdict.findings] == ["E_ROLLED_BACK"]


@pytest.mark.promise("6.2")
def test_a_copy_that_is_put_back_at_once_is_not(home, tmp_path, told):
    write(home, sagas=2)
    shutil.copytree(home.path, tmp_path / "copy")
    shutil.rmtree(home.path)
    shutil.copytree(tmp_path / "copy", home.path)
    write(home, told=told)
    assert verify(home).exit == 0


@pytest.mark.promise("6.2")
def test_a_removed_wal_with_records_in_it_is_refused(home):
    write(home, sagas=2)
    wal = Path(f"{home.db}-wal")
    assert wal.stat().st_size > 0
    wal.unlink()
    Path(f"{home.db}-shm").unlink()
    assert refusal(home).code == "rolled_back"
    assert verify(home).exit in (4, 7)


@pytest.mark.promise("6.2")
def test_a_removed_wal_after_everything_moved_into_the_database_is_not(home):
    log = open_log(home, NoView(), warn=Told())
    log.commit(lambda view, now: [Draft("saga.opened", {"saga": "s", "fence": 1})])
    log.sign_head()
    log.truncate()
    log.close()
    for end in ("-wal", "-shm"):
        Path(f"{home.db}{end}").unlink(missing_ok=True)
    write(home)
    assert verify(home).exit == 0


@pytest.mark.promise("6.2")
def test_a_clone_whose_original_went_on_is_refused(home, tmp_path):
    write(home)
    clone = tmp_path / "clone"
    shutil.copytree(home.path, clone)
    write(home, sagas=2)
    assert refusal(Home(clone)).code == "rolled_back"
    write(home)


@pytest.mark.promise("6.2")
def test_a_clone_that_went_on_by_as_much_is_a_fork(home, tmp_path, monkeypatch):
    write(home)
    clone = tmp_path / "clone"
    shutil.copytree(home.path, clone)
    write(home, sagas=2)
    monkeypatch.setenv("AMENDS_ANCHORS", str(tmp_path / "elsewhere"))  # the clone wakes up on another machine
    write(Home(clone), sagas=3)
    monkeypatch.setenv("AMENDS_ANCHORS", str(tmp_path / "anchors"))  # and is carried back
    assert refusal(Home(clone)).code == "forked"
    verdict = verify(Home(clone))
    assert verdict.exit == 5 and [finding.code for finding in verdict.findings] == ["E_FORKED"]


@pytest.mark.promise("6.2")
def test_a_moved_home_opens_with_one_warning_that_is_not_repeated(home, tmp_path, told):
    size = write(home, told=told)
    assert told == []
    moved = tmp_path / "moved"
    subprocess.run(["cp", "-a", str(home.path), str(moved)], check=True)
    shutil.rmtree(home.path)
    assert write(Home(moved), told=told) == size + 2
    assert len(told) == 1 and "moved" in told[0] and str(home.path) in told[0]
    write(Home(moved), told=told)
    assert len(told) == 1
    assert verify(Home(moved)).exit == 0


@pytest.mark.promise("14.5")
def test_another_machine_id_is_one_warning(home, told, monkeypatch):
    write(home)
    monkeypatch.setattr(identity, "_machine", lambda install: "another")
    write(home, told=told)
    write(home, told=told)
    assert len(told) == 1 and "another id" in told[0]


@pytest.mark.promise("6.2")
def test_a_database_without_its_keys_can_be_read_and_not_written(home, tmp_path, told):
    size = write(home)
    shutil.rmtree(home.device)
    assert refusal(home).code == "keys_missing"
    assert not home.device.exists()
    log = open_log(home, NoView(), write=False, warn=told)
    assert log.size == size and log.identity.hide("x") == ""
    with pytest.raises(HomeRefused):
        log.identity.sign(1, b"\0" * 32)
    log.close()
    assert any("keys of this device are missing" in text for text in told)
    verdict = verify(home)
    assert verdict.exit == 0 and verdict.level == "signed"
    assert any("keys were not there" in text for text in verdict.not_proved)


@pytest.mark.promise("6.2")
def test_a_database_of_another_device_is_refused(home, tmp_path):
    write(home)
    other = Home(tmp_path / "other")
    write(other, sagas=4)
    for end in ("", "-wal", "-shm"):
        shutil.copy(f"{other.db}{end}", f"{home.db}{end}")
    assert refusal(home).code == "foreign_log"
    assert verify(home).exit == 4


@pytest.mark.promise("6.2")
def test_the_device_folder_of_another_is_refused(home, tmp_path):
    write(home)
    other = Home(tmp_path / "other").create()
    shutil.rmtree(home.device)
    shutil.copytree(other.device, home.device)
    assert refusal(home).code == "foreign_log"


@pytest.mark.promise("6.2")
def test_another_install_id_is_refused(home):
    write(home)
    install = home.load_install()
    install.install = "a" * 26
    home.save_install(install)
    assert refusal(home).code == "foreign_log"


@pytest.mark.promise("6.2")
def test_a_removed_database_is_refused_and_not_begun_anew(home):
    write(home)
    for end in ("", "-wal", "-shm"):
        Path(f"{home.db}{end}").unlink()
    refused = refusal(home)
    assert refused.code == "rolled_back" and "empty or gone" in refused.message
    assert not home.db.exists()
    assert verify(home).exit == 4


def test_reading_where_there_is_nothing_is_a_users_mistake(home):
    with pytest.raises(YouErred) as refused:
        open_log(home, NoView(), write=False)
    assert refused.value.exit == 2 and not home.path.exists()
    with pytest.raises(YouErred):
        verify(home)


def test_a_file_that_is_no_database_is_said(home):
    write(home)
    home.db.write_bytes(b"not a database at all" * 400)
    Path(f"{home.db}-wal").unlink()
    Path(f"{home.db}-shm").unlink()
    with pytest.raises(Damaged):
        open_log(home, NoView(), warn=Told())
    assert verify(home).exit == 7


def test_a_home_opened_before_its_first_anchor_opens_again(home, told):
    """Killed between the first commit and the first anchor."""
    write(home)
    for path in (home.anchor, home.anchors / Identity.load(home).install):
        path.unlink()
    write(home, told=told)
    assert len(told) == 1 and "No anchor" in told[0]
    assert verify(home).level == "local anchor"


def test_a_log_that_another_process_is_just_anchoring_is_no_alarm(home, told):
    """Of several that begin at once, one finds the log before its maker has written the anchors."""
    write(home)
    anchors = [home.anchor, home.anchors / Identity.load(home).install]
    for path in anchors:
        path.rename(path.with_suffix(".soon"))
    maker = threading.Timer(0.2, lambda: [path.with_suffix(".soon").rename(path) for path in anchors])
    maker.start()
    write(home, told=told)
    maker.join()
    assert not told


# ---- adoption -------------------------------------------------------------------------------------------------------


def rolled_back(home: Home, tmp_path: Path) -> tuple[int, int]:
    """A home whose database was set back; the size it has, and the size it had."""
    small = write(home, end=False)
    shutil.copy(home.db, tmp_path / "old.db")
    shutil.copy(f"{home.db}-wal", tmp_path / "old.db-wal")
    large = write(home, sagas=2)
    for end in ("", "-wal"):
        shutil.copy(tmp_path / f"old.db{end}", f"{home.db}{end}")
    Path(f"{home.db}-shm").unlink(missing_ok=True)
    refusal(home)
    return small, large


@pytest.mark.promise("6.2")
def test_adopting_opens_a_new_incarnation_that_says_what_it_follows(home, tmp_path, told):
    small, large = rolled_back(home, tmp_path)
    before = Identity.load(home)
    left = adopt(home, "ada", "the disk was restored")
    assert [(saga, first) for saga, first, _ in left] == [("s1", 2)] or len(left) == 1
    after = Identity.load(home)
    assert after.incarnation == 2 and after.install != before.install and after.origin != before.origin
    assert after.hide("x") == before.hide("x"), "names stay what they were"
    log = open_log(home, NoView(), warn=told)
    record = log.record(0)
    assert (record.entry.follows, record.entry.follows_size) == (before.origin, small)
    assert b'"by":"ada"' in record.blob and b'"lost_size":%d' % large in record.blob and b"restored" in record.blob
    log.close()
    assert told == []
    write(home)
    verdict = verify(home)
    assert verdict.exit == 0 and verdict.level == "local anchor", verdict.findings


@pytest.mark.promise("6.2")
def test_a_clone_that_is_adopted_and_its_original_are_two_devices(home, tmp_path):
    write(home)
    clone = Home(tmp_path / "clone")
    shutil.copytree(home.path, clone.path)
    write(home)
    adopt(clone, "ada", "a second laptop")
    write(clone)
    write(home)
    assert verify(home).exit == verify(clone).exit == 0
    assert Identity.load(home).origin != Identity.load(clone).origin


@pytest.mark.promise("6.2")
def test_adopting_gives_a_database_without_keys_new_ones(home):
    size = write(home)
    shutil.rmtree(home.device)
    adopt(home, "ada", "the key folder was lost")
    log = open_log(home, NoView(), warn=Told())
    assert log.record(0).entry.follows_size == size
    log.close()
    assert verify(home).exit == 0


@pytest.mark.promise("6.2")
def test_a_gone_database_can_be_given_up(home):
    size = write(home)
    for end in ("", "-wal", "-shm"):
        Path(f"{home.db}{end}").unlink()
    assert adopt(home, "ada", "lost") == []
    log = open_log(home, NoView(), warn=Told())
    assert log.record(0).entry.follows_size == 0 and b'"lost_size":%d' % size in log.record(0).blob
    log.close()
    assert verify(home).exit == 0


@pytest.mark.parametrize("point", ["before", "after"])
def test_an_interrupted_adoption_has_happened_or_has_not(home, tmp_path, monkeypatch, point):
    rolled_back(home, tmp_path)
    retire = foreign.retire

    def die(*args: object) -> None:
        if point == "after":
            retire(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(foreign, "retire", die)
    with pytest.raises(KeyboardInterrupt):
        adopt(home, "ada", "why")
    monkeypatch.undo()
    os.environ["AMENDS_ANCHORS"] = str(tmp_path / "anchors")
    assert home.next_install.exists()
    if point == "before":
        assert refusal(home).code == "rolled_back"
    else:
        write(home)
        assert verify(home).exit == 0
    assert not home.next_install.exists()


def test_nobody_adopts_without_a_name_and_a_reason(home):
    write(home)
    for by, reason in (("", "x"), ("x", " ")):
        with pytest.raises(YouErred):
            adopt(home, by, reason)


def test_a_home_in_use_is_not_adopted(home, tmp_path, monkeypatch):
    from amends.store.driver import Driver

    write(home)
    driver = Driver.start(home.run)
    with pytest.raises(LogHeld, match=str(os.getpid())):
        adopt(home, "ada", "why")
    driver.release()
    monkeypatch.setattr("amends.store.identity._in_order", lambda home: False)
    adopt(home, "ada", "why")


@pytest.mark.promise("6.2")
def test_a_log_that_was_open_during_an_adoption_writes_no_more(home, monkeypatch):
    monkeypatch.setattr("amends.store.identity._in_order", lambda home: False)
    write(home)
    log = open_log(home, NoView(), warn=Told())
    adopt(home, "ada", "why")
    for _ in range(2):
        with pytest.raises(LogReplaced):
            log.commit(lambda view, now: [Draft("saga.opened", {"saga": "late", "fence": 1})])
    log.close()
    assert verify(home).exit == 0 and verify(home).size == 1


def test_a_log_that_does_not_add_up_is_not_followed(home):
    import apsw

    write(home)
    db = apsw.Connection(str(home.db))
    db.execute("update entry set line = cast(replace(cast(line as text), '.ended', '.endee') as blob) where seq = 3")
    assert db.changes() == 1
    db.close()
    with pytest.raises(Damaged, match="not followed"):
        adopt(home, "ada", "why")
    assert not home.next_install.exists()


def test_a_home_that_is_in_order_is_not_adopted(tmp_path: Path) -> None:
    """Another incarnation would put its history out of reach for nothing."""
    open_log(tmp_path / "home", NoView()).close()
    with pytest.raises(YouErred) as refused:
        adopt(tmp_path / "home", "Ada", "just to be sure")
    assert refused.value.code == "nothing_to_adopt"
    open_log(tmp_path / "home", NoView()).close()
