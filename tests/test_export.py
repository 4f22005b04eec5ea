"""A bundle says what the log says, whatever happens meanwhile, and whoever alters one is found out by `verify`."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from handing import FORMULA, SECRET, files, home_of_work
from outsider import Outsider

from amends.cli.main import main
from amends.runtime import dumps
from amends.runtime.state import State
from amends.store import bundle, note, signify
from amends.store.audit import verify
from amends.store.bundle_evidence import BundleEvidence
from amends.store.compact import compact
from amends.store.entry import leaf
from amends.store.errors import Refused
from amends.store.fold import NoView
from amends.store.home import Home
from amends.store.identity import open_log
from amends.store.keys import Identity
from amends.store.redact import redact
from amends.store.seal import Owner
from amends.store.tiles import Tiles, tile_name

pytestmark = pytest.mark.promise("6.6")


def quiet(text: str) -> None:
    pass


def run(home: Path, *args: str) -> Result:
    return CliRunner().invoke(main, ["--home", str(home), *args], prog_name="amends")


def asked(home: Path, *args: str, code: int = 0) -> Any:
    result = run(home, *args, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def exported(home: Path, out: Path, *args: str) -> Path:
    told = asked(home, "export", "--out", str(out), *args)
    assert told["verdict"] == "INTACT" and told["out"] == str(out)
    return out


def verdict_of(folder: Path) -> Any:
    return verify(folder)


def codes(verdict: Any) -> set[str]:
    return {finding.code for finding in verdict.findings}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return home_of_work(tmp_path / "home", 12)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A bundle with everything in plain text, and the home that it is of."""
    folder = tmp_path_factory.mktemp("template")
    patch = pytest.MonkeyPatch()
    patch.setenv("AMENDS_ANCHORS", str(folder / "anchors"))
    home_of_work(folder / "home", 40)
    exported(folder / "home", folder / "bundle", "--payload", "plain")
    patch.undo()
    yield folder


@pytest.fixture
def made(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template / "bundle", tmp_path / "made", symlinks=True))


# ---- what is in it --------------------------------------------------------------------------------------------------


def test_a_bundle_holds_every_record_and_opening_as_it_was_hashed(home: Path, tmp_path: Path) -> None:
    folder = exported(home, tmp_path / "b", "--payload", "plain")
    size = json.loads((folder / "manifest.json").read_text())["size"]
    log = open_log(home, State(), write=False, warn=quiet)
    records = list(log.records(0, size))
    log.close()
    assert (folder / "entries/000000.ndjson").read_bytes() == b"".join(record.line for record in records)
    assert (folder / "openings/000000.ndjson").read_bytes() == b"".join(record.blob or b"" for record in records)
    verdict = verdict_of(folder)
    assert (verdict.verdict, verdict.size, verdict.level) == ("INTACT", size, "signed"), verdict.findings


def test_without_asking_a_bundle_has_no_arguments_or_results(home: Path, tmp_path: Path) -> None:
    folder = exported(home, tmp_path / "b")
    assert not [name for name in files(folder) if SECRET.encode() in (folder / name).read_bytes()]
    assert not [name for name in files(folder) if "openings" in name]
    assert verdict_of(folder).verdict == "INTACT"


def test_the_log_keeps_that_a_bundle_was_made_by_the_hash_of_its_manifest(home: Path, tmp_path: Path) -> None:
    folder = exported(home, tmp_path / "b", "--payload", "plain", "--to", "the auditor", "--by", "Ada")
    log = open_log(home, State(), write=False, warn=quiet)
    told = [record for record in log.records() if record.entry.kind == "copy.made"]
    copy = log.keeping.copies[-1]
    log.close()
    id = sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert [(r.entry.out, r.entry.event, r.entry.payload) for r in told] == [("bundle", id, "plain")]
    assert b'{"by":"Ada","to":"the auditor"}' in (told[0].blob or b"")
    assert copy.id == id and copy.size == told[0].entry.upto == verdict_of(folder).size


def test_a_bundle_goes_up_to_a_head_that_is_anchored_and_names_it(home: Path, tmp_path: Path) -> None:
    folder = exported(home, tmp_path / "b")
    identity = Identity.load(Home(home))
    head = note.parse_checkpoint(note.open_note((folder / "checkpoint").read_bytes(), [identity.log_vkey]).body)
    anchor = identity.anchored()
    assert anchor is not None and head.size <= anchor.size and head.origin == identity.origin
    assert head.size == json.loads((folder / "manifest.json").read_text())["size"]


def test_a_bundle_brings_a_certificate_that_its_records_bear_out(home: Path, tmp_path: Path) -> None:
    folder = exported(home, tmp_path / "b")
    certificate = json.loads((folder / "certificate.dsse.json").read_text())
    assert certificate["payloadType"] == "application/vnd.in-toto+json"


# ---- half a bundle never has the name -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_bundle_that_cannot_be_written_leaves_nothing_and_says_so_in_a_sentence(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, at: int
) -> None:
    real, left = bundle._Folder.open, [at]

    def fails(self: Any, name: str) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code), name)
        return real(self, name)

    monkeypatch.setattr(bundle._Folder, "open", fails)
    result = run(home, "export", "--out", str(tmp_path / "b"))
    assert left[0] == -1, "the fault fired"
    assert result.exit_code == (10 if code == errno.ENOSPC else 3) and "Traceback" not in result.output
    assert os.listdir(tmp_path) in (["home"], ["home", "anchors"], ["anchors", "home"])
    log = open_log(home, State(), write=False, warn=quiet)
    assert log.keeping.copies == []
    log.close()


def test_a_log_that_cannot_be_told_gives_no_bundle(home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def refuses(*_: Any) -> Any:
        raise Refused("no")

    monkeypatch.setattr(bundle, "copied", refuses)
    assert run(home, "export", "--out", str(tmp_path / "b")).exit_code == 6
    assert not [name for name in os.listdir(tmp_path) if "b" == name or name.endswith(".part")]


def test_a_target_that_is_there_is_left_alone(home: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "nowhere")
    for name in ("b", "c"):
        assert asked(home, "export", "--out", str(tmp_path / name), code=2)["error"]["code"] == "exists"
    assert os.listdir(tmp_path / "b") == [] and not (tmp_path / "nowhere").exists()


def test_a_place_that_is_not_there_is_named(home: Path, tmp_path: Path) -> None:
    told = asked(home, "export", "--out", str(tmp_path / "no" / "b"), code=3)["error"]
    assert told["code"] == "not_written" and "No such file" in told["message"]


@pytest.mark.parametrize("args", [(), ("--out", "x", "--saga", "order-1"), ("--out", "x", "--since", "2026-01-01")])
def test_what_a_bundle_cannot_be_is_usage(home: Path, args: tuple[str, ...]) -> None:
    assert asked(home, "export", *args, code=2)["error"]["message"]


# ---- a log that does not verify -------------------------------------------------------------------------------------


@pytest.fixture
def broken(home: Path) -> Path:
    """A home whose file somebody edited."""
    db = Outsider(home / "amends.db")
    line = db.line(7)
    db.change("update entry set line = ? where seq = 7", line.replace(b'"up"', b'"uq"').replace(b'"at":1', b'"at":2'))
    db.close()
    return home


def test_a_log_that_does_not_verify_is_not_handed_out(broken: Path, tmp_path: Path) -> None:
    told = asked(broken, "export", "--out", str(tmp_path / "b"), code=verify(broken).exit)["error"]
    assert told["code"] == "not_intact" and not (tmp_path / "b").exists()


def test_one_that_is_wanted_all_the_same_is_labelled_and_signed_by_nobody(broken: Path, tmp_path: Path) -> None:
    told = asked(broken, "export", "--out", str(tmp_path / "b"), "--allow-broken", "--payload", "plain")
    folder = tmp_path / "b-BROKEN"
    assert told["out"] == str(folder) and told["verdict"] == verify(broken, view_factory=State).verdict != "INTACT"
    assert not {"SHA256SUMS.sig", "SHA256SUMS.minisig", "certificate.dsse.json", "checkpoint"} & set(files(folder))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["verdict"] == told["verdict"] and manifest["findings"]
    assert "DID NOT VERIFY" in (folder / "README.txt").read_text()
    verdict = verdict_of(folder)
    assert verdict.exit and any("exported though it did not verify" in one.reason for one in verdict.findings)


def test_a_log_that_verifies_is_not_labelled_broken(home: Path, tmp_path: Path) -> None:
    exported(home, tmp_path / "b", "--allow-broken")


# ---- while others write, and destroy --------------------------------------------------------------------------------


def test_a_bundle_made_while_agents_write_is_a_whole_cut(tmp_path: Path) -> None:
    home = home_of_work(tmp_path / "home", 3)
    agent = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from amends import AgentKit
from handing import work
with AgentKit(home={str(home)!r}) as kit:
    print("on", flush=True)
    for round in range(10_000):
        work(kit, 5, 1000 + 5 * round)
"""
    agents = [
        subprocess.Popen([sys.executable, "-c", agent.replace("1000", str(10**6 * n))], stdout=subprocess.PIPE)
        for n in (1, 2)
    ]
    try:
        assert all(one.stdout and one.stdout.readline() == b"on\n" for one in agents)
        sizes = []
        for n in range(4):
            verdict = verdict_of(exported(home, tmp_path / f"b{n}", "--payload", "plain"))
            assert verdict.verdict == "INTACT", verdict.findings
            sizes.append(verdict.size)
        assert sizes == sorted(set(sizes)) and all(one.poll() is None for one in agents)
    finally:
        for one in agents:
            one.kill()
            one.communicate()


def redacted(home: Path, seqs: int = 4) -> list[bytes]:
    """Destroy some openings; the lines that were there."""
    log = open_log(home, State(), warn=quiet)
    having = [record for record in log.records() if record.entry.kind == "step.intended"][:seqs]
    redact(log, [(record.entry.seq, 0) for record in having], basis="GDPR-17", by="Ada")
    log.finish_erasing()
    log.close()
    return [(record.blob or b"").splitlines(True)[0] for record in having]


def test_what_was_redacted_is_in_no_bundle_and_the_bundle_says_why(home: Path, tmp_path: Path) -> None:
    gone = redacted(home)
    folder = exported(home, tmp_path / "b", "--payload", "plain")
    everything = b"".join((folder / name).read_bytes() for name in files(folder))
    assert gone and not [line for line in gone if line in everything or line[2:24] in everything]
    assert verdict_of(folder).verdict == "INTACT"
    assert json.loads((folder / "manifest.json").read_text())["counts"]["redacted"] == len(gone)


def test_what_is_redacted_while_a_bundle_is_written_is_not_handed_out(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bundle._Writer._manifest

    def slow(self: Any) -> bytes:
        assert redacted(home, 1)
        return real(self)

    monkeypatch.setattr(bundle._Writer, "_manifest", slow)
    told = asked(home, "export", "--out", str(tmp_path / "b"), "--payload", "plain", code=6)
    assert told["error"]["code"] == "meanwhile" and not (tmp_path / "b").exists()


def test_a_cut_explains_whatever_it_lacks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Openings that go between the anchored head and the look at the file are not missing without a word."""
    log: Any = open_log(home, State(), warn=quiet)
    real, fired = log.identity.anchored, []

    def anchored_and_lost() -> Any:
        anchor = real()
        if not fired:
            fired.extend(redacted(home, 1))
        return anchor

    monkeypatch.setattr(log.identity, "anchored", anchored_and_lost)
    with bundle.cut(log) as (evidence, head):
        assert fired and evidence.size >= head.size >= log.keeping.erasing > 0
    log.close()


def compacted(home: Path, keep: int) -> int:
    """Remove the records of the oldest sagas; how many went."""
    log = open_log(home, NoView(), warn=quiet)
    names = [row.saga for row in log.sagas()][keep:]
    made = compact(log, names, within_ms=1, use=lambda name: {"sagas": 1}, by="Ada")
    log.close()
    return made.entries


def test_a_log_with_holes_gives_a_bundle_that_verifies_by_what_is_left(tmp_path: Path) -> None:
    home = home_of_work(tmp_path / "home", 90)
    gone = compacted(home, 10)
    folder = exported(home, tmp_path / "b", "--payload", "plain")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert gone > 100 and manifest["counts"]["removed"] == gone
    verdict = verdict_of(folder)
    assert verdict.verdict == "INTACT", verdict.findings
    stubs = (folder / "stubs.tsv").read_text().splitlines()
    assert sum(1 << int(line.split("\t")[1]) for line in stubs) == gone
    root = BundleEvidence(folder).peaks(manifest["size"]).root()
    assert root.hex() == manifest["root"]


def sealed(home: Path, owner: Owner) -> None:
    from amends.store import sealing

    log = open_log(home, State(), warn=quiet)
    sealing.begin(log, owner, "Ada")
    sealing.finish(log)
    log.close()


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Owner:
    monkeypatch.setenv("AMENDS_SEAL_KEY", "env:THE_KEY")
    monkeypatch.setenv("THE_KEY", bytes(range(32)).hex())
    return Owner(bytes(range(32)))


def test_sealed_openings_leave_as_they_lie_and_no_key_leaves(home: Path, tmp_path: Path, key: Owner) -> None:
    sealed(home, key)
    folder = exported(home, tmp_path / "b", "--payload", "sealed")
    everything = b"".join((folder / name).read_bytes() for name in files(folder))
    assert SECRET.encode() not in everything and "openings.sealed/000000.ndjson" in files(folder)
    wrapped = [row for (row,) in Outsider(home / "amends.db").run("select wrapped from datakey")]
    assert wrapped and not [row for row in wrapped if row in everything or row.hex().encode() in everything]
    assert verdict_of(folder).verdict in ("INTACT", "UNVERIFIED") and not codes(verdict_of(folder)) - {"E_KEYS_ABSENT"}
    plain = exported(home, tmp_path / "p", "--payload", "plain")
    assert SECRET.encode() in (plain / "openings/000000.ndjson").read_bytes()
    assert verdict_of(plain).verdict == "INTACT"


def test_a_log_that_is_not_sealed_has_nothing_sealed_to_hand_out(home: Path, tmp_path: Path) -> None:
    told = asked(home, "export", "--out", str(tmp_path / "b"), "--payload", "sealed", code=2)
    assert told["error"]["code"] == "not_sealed"


# ---- whoever alters it ----------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def drop(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    away = Path(tempfile.mkdtemp()) / path.name
    shutil.move(path, away)
    path.symlink_to(away)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize("alter", [flip, cut, drop, link, empty, longer])
def test_each_file_that_is_altered_is_found(made: Path, alter: Callable[[Path], None]) -> None:
    assert verdict_of(made).verdict == "INTACT"
    for name in files(made):
        path = made / name
        was = path.read_bytes()
        if alter in (cut, empty, flip) and not was:
            continue  # no gap, no stub
        alter(path)
        if path.is_symlink() or not path.exists() or path.read_bytes() != was:
            try:
                assert verdict_of(made).exit not in (0, 2), (alter.__name__, name)
            except Exception as error:  # a folder without a manifest is no bundle, and that is said
                assert name == "manifest.json" and getattr(error, "exit", 0) in (2, 7), (alter.__name__, name, error)
        path.unlink(missing_ok=True)
        path.write_bytes(was)
    assert verdict_of(made).verdict == "INTACT", "as it was"


STRAYS = {
    "another file": lambda made: (made / "notes.txt").write_text("x"),
    "another segment": lambda made: (made / "entries/000001.ndjson").write_bytes(b""),
    "another signature": lambda made: (made / "SHA256SUMS.ots").write_text("x"),
    "an odd name": lambda made: (made / "entries/\x1b[31m.ndjson").write_text("x"),
    "a name that is no text": lambda made: (made / os.fsdecode(b"\xff\xfe")).write_text("x"),
    "a hidden file": lambda made: (made / ".hidden").write_text("x"),
    "an empty folder": lambda made: (made / "more").mkdir(),
    "a linked folder": lambda made: (made / "tile/more").symlink_to(made / "entries"),
    "a pipe": lambda made: os.mkfifo(made / "pipe"),
    "another checkpoint": lambda made: shutil.copy(made / "checkpoint", made / "checkpoints/1"),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_what_is_not_of_the_bundle_is_found(made: Path, stray: str) -> None:
    STRAYS[stray](made)
    verdict = verdict_of(made)
    assert verdict.verdict == "TAMPERED" and "E_BUNDLE" in codes(verdict)
    assert not [f for f in verdict.findings if not str(f.reason).isprintable()]


def test_a_listed_file_that_is_a_pipe_is_not_waited_for(made: Path) -> None:
    (made / "entries/000000.ndjson").unlink()
    os.mkfifo(made / "entries/000000.ndjson")
    assert verdict_of(made).exit not in (0, 2)


def listed_anew(made: Path) -> None:
    """The list and the manifest made again to fit, as anybody can."""
    manifest = json.loads((made / "manifest.json").read_text())
    names = [name for name in files(made) if not name.startswith("SHA256SUMS")]
    told = {name: (made / name).read_bytes() for name in names}
    manifest["files"] = {
        name: {"sha256": sha256(data).hexdigest(), "bytes": len(data), "lines": data.count(b"\n")}
        for name, data in told.items()
        if not name.startswith("tile/") and name != "manifest.json"
    }
    told["manifest.json"] = json.dumps(manifest).encode()
    (made / "manifest.json").write_bytes(told["manifest.json"])
    sums = "".join(f"{sha256(told[name]).hexdigest()}  {name}\n" for name in sorted(names))
    (made / "SHA256SUMS").write_text(sums)


def signed_anew(made: Path, seed: bytes) -> None:
    """Signed by some key."""
    sums = (made / "SHA256SUMS").read_bytes()
    (made / "SHA256SUMS.sig").write_bytes(signify.signify_signature(seed, sums))
    (made / "SHA256SUMS.minisig").write_bytes(signify.minisign_signature(seed, sums, "x"))


def test_a_list_made_to_fit_is_not_signed_by_the_device(made: Path) -> None:
    (made / "README.txt").write_text("trust me\n")
    listed_anew(made)
    assert codes(verdict_of(made)) == {"E_SIGNATURE"}


def test_a_list_signed_by_another_key_is_found_though_its_key_lies_beside_it(made: Path) -> None:
    seed = b"\1" * 32
    for name, data in signify.key_files(bytes(32), note.public_of(seed)).items():
        if name != "keys/device.pem":
            (made / name).write_bytes(data)
    listed_anew(made)
    signed_anew(made, seed)
    assert {"E_SIGNATURE", "E_BUNDLE"} <= codes(verdict_of(made))


FORGED = {
    "a tile": lambda made: flip(made / "tile/0/000"),
    "a tile of lines": lambda made: flip(made / "tile/entries/000"),
    "a missing tile": lambda made: drop(made / "tile/0/000"),
    "a key for openssl": lambda made: (made / "keys/device.pem").write_bytes(signify.pem(b"\3" * 32)),
    "an older head": lambda made: (made / "checkpoint").write_bytes((made / "README.txt").read_bytes()),
    "a place of an opening": lambda made: flip_place(made / "openings/000000.tsv"),
    "a stub over what is there": lambda made: (made / "stubs.tsv").write_text(f"0\t3\t{'0' * 64}\n"),
    "a count": lambda made: retold(made, "counts", {"entries": 1}),
    "the root": lambda made: retold(made, "root", "0" * 64),
    "the head": lambda made: retold(made, "head", "0" * 64),
    "the size": lambda made: retold(made, "size", 5),
    "the origin": lambda made: retold(made, "origin", "amends.local/other"),
    "the export key": lambda made: retold(made, "export_key", "0" * 64),
    "the payload": lambda made: retold(made, "payload", "none"),
    "a line": lambda made: (made / "entries/000000.ndjson").write_bytes(_without_line(made, 9)),
    "an opening": lambda made: flip(made / "openings/000000.ndjson"),
}


def _without_line(made: Path, number: int) -> bytes:
    lines = (made / "entries/000000.ndjson").read_bytes().splitlines(True)
    return b"".join(lines[:number] + lines[number + 1 :])


def flip_place(path: Path) -> None:
    lines = path.read_text().splitlines(True)
    lines[3], lines[9] = lines[9], lines[3]
    path.write_text("".join(lines))


def retold(made: Path, key: str, value: Any) -> None:
    manifest = json.loads((made / "manifest.json").read_text())
    manifest[key] = value
    (made / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("what", FORGED)
def test_what_does_not_fit_the_records_is_found_whoever_signed_the_list(
    made: Path, template: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody with the export key, and without the log key."""
    seed = Identity.load(Home(template / "home")).export_seed
    listed_anew(made)
    signed_anew(made, seed)
    assert verdict_of(made).verdict == "INTACT", "the key is right"
    FORGED[what](made)
    listed_anew(made)
    signed_anew(made, seed)
    assert verdict_of(made).exit not in (0, 2), what


def test_no_flipped_bit_anywhere_is_overlooked(made: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    names = [name for name in files(made) if (made / name).stat().st_size]
    for _ in range(60):
        path = made / dice.choice(names)
        was = path.read_bytes()
        data = bytearray(was)
        place = dice.randrange(len(data))
        data[place] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        try:
            assert verdict_of(made).exit not in (0, 2), (path, place)
        except AssertionError:
            raise
        except Exception as error:
            assert path.name == "manifest.json" and getattr(error, "exit", 0) in (2, 7), (path, place, error)
        path.write_bytes(was)


# ---- tiles ----------------------------------------------------------------------------------------------------------


def test_the_tiles_are_those_of_the_tree_also_where_records_are_gone() -> None:
    from amends.store.merkle import Peaks

    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    for trial in range(60):
        hashes = [dice.randbytes(32) for _ in range(dice.randrange(1, 3000))]
        tree = Peaks()
        tree.extend(hashes)
        runs = dict(tree.runs) if trial % 2 else {}
        whole: dict[str, bytes] = {}
        some: dict[str, bytes] = {}
        full, holey = Tiles(whole.__setitem__), Tiles(some.__setitem__, runs.get)
        for hash in hashes:
            full.entry(b"x\n", hash)
        while holey.size < len(hashes):
            level = dice.randrange(12)
            stop = holey.size + (1 << level)
            if dice.random() < 0.3 and holey.size % (1 << level) == 0 and stop <= len(hashes):
                under = Peaks()
                under.extend(hashes[holey.size : stop])
                holey.stub(level, under.root())
            else:
                holey.entry(b"x\n", hashes[holey.size])
        full.finish()
        holey.finish()
        assert full.root() == holey.root() == tree.root()
        assert some.items() <= whole.items()


def test_a_tile_is_named_in_threes() -> None:
    assert tile_name(0, 1234067) == "tile/0/x001/x234/067" and tile_name(-1, 5, 3) == "tile/entries/005.p/3"


# ---- large ----------------------------------------------------------------------------------------------------------

_PEAK = """
import resource, sys
from pathlib import Path
from amends.store.bundle_evidence import BundleEvidence
from amends.cli.main import main
home, out = sys.argv[1:]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    main(["--home", home, "export", "--out", out])
except SystemExit as end:
    assert end.code == 0, end.code
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def grown(folder: Path, sagas: int) -> Path:
    from amends.store.chain import Draft

    log = open_log(Home(folder), State(), warn=quiet)
    for first in range(0, sagas, 250):
        drafts = []
        for n in range(first, min(first + 250, sagas)):
            head = {"saga": f"s{n}", "fence": 1}
            step = {**head, "step": 1}
            drafts += [
                Draft("saga.opened", {**head, "driver": "d"}, (b'{"label":"x"}',), True),
                Draft("step.intended", {**step, "tool": "t", "sem": "compensable", "key": f"k{n}"}, (), True),
                Draft("step.done", step, (b'{"result":1}',)),
                Draft("saga.ended", {**head, "out": "committed"}),
            ]
        log.commit(lambda view, now, drafts=drafts: drafts)
    log.close()
    return folder


@pytest.mark.slow
def test_a_large_log_takes_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    peaks = []
    for name, sagas in (("small", 2_500), ("large", 25_000)):
        home = grown(tmp_path / name, sagas)
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, str(home), str(tmp_path / f"{name}-b")], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]))
    print("megabytes at most:", peaks)
    assert peaks[1] - peaks[0] < 24
    folder = tmp_path / "large-b"
    assert len(list((folder / "entries").iterdir())) == 2 and verdict_of(folder).verdict == "INTACT"


# ---- the other formats ----------------------------------------------------------------------------------------------


def dumped(home: Path, format: str, *args: str) -> str:
    result = run(home, "export", "--format", format, *args)
    assert result.exit_code == 0, result.output
    return result.stdout


def in_file(home: Path, tmp_path: Path, format: str, *args: str) -> str:
    out = tmp_path / f"dump.{format}"
    told = asked(home, "export", "--format", format, "--out", str(out), *args)
    assert told["format"] == format
    return out.read_text()


@pytest.mark.parametrize("format", dumps.FORMATS)
def test_no_format_has_arguments_or_results_unless_asked(home: Path, tmp_path: Path, format: str) -> None:
    assert SECRET not in dumped(home, format) and FORMULA[:12] not in dumped(home, format)
    handed = SECRET if format != "ocsf" else "ch_1"  # an event is about what came of it
    assert handed in in_file(home, tmp_path, format, "--payload", "plain")


def test_json_is_the_records_with_their_hashes(home: Path) -> None:
    told = json.loads(dumped(home, "json"))
    log = open_log(home, State(), write=False, warn=quiet)
    for row, record in zip(told, log.records(), strict=True):
        assert row.pop("hash") == leaf(record.line).hex() and row.pop("time").endswith("Z")
        assert row == json.loads(record.line)
    log.close()


def test_no_cell_of_a_csv_is_a_formula(home: Path, tmp_path: Path) -> None:
    for text in (dumped(home, "csv"), in_file(home, tmp_path, "csv", "--payload", "plain")):
        rows = list(csv.reader(io.StringIO(text)))
        assert len({len(row) for row in rows}) == 1 and len(rows) > 50
        assert not [cell for row in rows for cell in row if cell.lstrip(" ")[:1] in tuple("=+-@\t\r\n|%") and cell]
    assert [dumps._cell(text) for text in ("=1", " +1", "-1", "@x", "a=1", -5)] == (
        ["'=1", "' +1", "'-1", "'@x", "a=1", "'-5"]
    )


def test_otlp_is_a_trace_a_saga_and_a_span_a_step_under_ids_that_stay(home: Path) -> None:
    first, again = dumped(home, "otlp"), dumped(home, "otlp")
    assert first == again
    traces = [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"] for line in first.splitlines()]
    assert len(traces) == 12 and len({spans[0]["traceId"] for spans in traces}) == 12
    for root, *steps in traces:
        assert len(root["traceId"]) == 32 and "parentSpanId" not in root and len(steps) == 2
        for span in steps:
            values = {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}
            assert span["parentSpanId"] == root["spanId"] and span["traceId"] == root["traceId"]
            assert values["gen_ai.operation.name"] == "execute_tool"
            assert span["name"] == f"execute_tool {values['gen_ai.tool.name']}" and values["gen_ai.tool.call.id"]
            assert isinstance(span["startTimeUnixNano"], str) and len(span["spanId"]) == 16
            assert int(root["startTimeUnixNano"]) <= int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    states = [
        next(iter(one["value"].values())) for spans in traces for one in spans[1]["attributes"]
        if one["key"] == "amends.step.state"
    ]  # fmt: skip
    assert states.count("compensated") == 4 and states.count("done") == 8


def test_ocsf_is_an_api_activity_an_outcome(home: Path) -> None:
    events = [json.loads(line) for line in dumped(home, "ocsf").splitlines()]
    assert len(events) == 12 * 2 + 4 * 2
    for event in events:
        assert (event["class_uid"], event["category_uid"], event["type_uid"]) == (6003, 6, 600399)
        assert event["metadata"]["version"] == dumps.OCSF_VERSION and event["metadata"]["profiles"] == ["ai_operation"]
        assert event["actor"] and event["src_endpoint"] and event["api"]["operation"] and event["ai_agent"]["uid"]
        assert event["status_id"] == 1 and event["severity_id"] == 1
    assert len({event["metadata"]["uid"] for event in events}) == len(events)
    assert [event["activity_name"] for event in events].count("Compensate") == 8


@pytest.mark.parametrize("format", dumps.FORMATS)
def test_one_saga_and_a_time_can_be_asked_for(home: Path, format: str) -> None:
    whole, one = dumped(home, format), dumped(home, format, "--saga", "order-3")
    assert 0 < len(one) < len(whole) / 4
    assert dumped(home, format, "--since", "1999-01-01") == whole
    assert SECRET not in one and len(dumped(home, format, "--until", "1999-01-01T00:00:00Z").splitlines()) <= 1
    assert asked(home, "export", "--format", format, "--since", "yesterday", code=2)["error"]["code"] == "usage"


def test_what_was_destroyed_or_is_sealed_is_said(home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    redacted(home, 2)
    rows = json.loads(in_file(home, tmp_path, "json", "--payload", "plain"))
    assert [row["destroyed"] for row in rows if "destroyed" in row] == [1, 1]
    monkeypatch.setenv("AMENDS_SEAL_KEY", "env:THE_KEY")
    monkeypatch.setenv("THE_KEY", bytes(range(32)).hex())
    sealed(home, Owner(bytes(range(32))))
    monkeypatch.delenv("AMENDS_SEAL_KEY")
    assert SECRET not in dumped(home, "json")


def test_a_dump_in_plain_text_goes_into_a_file_and_the_log_keeps_that_it_left(home: Path, tmp_path: Path) -> None:
    assert asked(home, "export", "--format", "json", "--payload", "plain", code=2)["error"]["code"] == "usage"
    text = in_file(home, tmp_path, "json", "--payload", "plain", "--to", "a friend")
    log = open_log(home, State(), write=False, warn=quiet)
    copy = log.keeping.copies[-1]
    log.close()
    assert (copy.out, copy.id, copy.payload) == ("dump", sha256(text.encode()).hexdigest(), "plain")
    assert asked(home, "export", "--format", "json", "--out", str(tmp_path / "dump.json"), code=2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is not here")
def test_an_output_that_is_full_is_an_error_and_one_that_nobody_reads_is_none(home: Path) -> None:
    command = [sys.executable, "-m", "amends.cli", "--home", str(home), "export", "--format", "json"]
    with open("/dev/full", "wb") as full:
        assert subprocess.run(command, stdout=full, stderr=subprocess.PIPE).returncode == 10
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout and child.stderr
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == b"" and child.wait() == 0


@pytest.mark.parametrize("payload", ["plain", "sealed"])
def test_what_was_forgotten_is_in_no_bundle_in_plain_text_and_the_bundle_says_why(
    home: Path, tmp_path: Path, key: Owner, payload: str
) -> None:
    from amends.store import sealing

    sealed(home, key)
    log = open_log(home, State(), warn=quiet, owner=lambda: key)
    saga = log.sagas()[3].saga
    seqs = {record.entry.seq for record in log.thread(saga) if record.blob}
    sealing.forget(log, [saga], "Ada", "asked to")
    log.finish_erasing()
    log.close()
    folder = exported(home, tmp_path / "b", "--payload", payload)
    name = "openings/000000.tsv" if payload == "plain" else "openings.sealed/000000.ndjson"
    there = {int(line.strip("[").replace("\t", ",").split(",")[0]) for line in (folder / name).read_text().splitlines()}
    assert seqs and (not seqs & there if payload == "plain" else seqs <= there)
    assert not codes(verdict_of(folder)) - {"E_KEYS_ABSENT"}, verdict_of(folder).findings
