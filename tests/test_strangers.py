"""A bundle is checked by tools that know nothing of amends, with the very commands that its README.txt prints.

Each tool that is not here is skipped by its name: sha256sum, openssl, signify, minisign, tlog-tiles.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from handing import commands, files, home_of_work
from test_export import compacted, exported

from amends.cli.main import main
from amends.store.entry import leaf

pytestmark = pytest.mark.promise("6.6")

OURS = Path(tempfile.mkdtemp(prefix="amends-strangers-"))
"""Commands of this very interpreter, wherever its scripts lie."""
for word, module in (("amends", "amends.cli"), ("tlog-tiles", "tlog_scales.cli")):
    if find_spec(module.partition(".")[0]):
        (OURS / word).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (OURS / word).chmod(0o755)

TOOLS = ("sha256sum", "openssl", "signify", "minisign", "tlog-tiles", "check_amends.py", "amends verify")
"""By these words a block of commands is known."""


def path() -> str:
    return os.pathsep.join((str(OURS), os.environ.get("PATH", "")))


def needs(*names: str) -> None:
    """Skip, by name, without a tool."""
    for name in names:
        if not any(shutil.which(one, path=path()) for one in name.split("|")):
            pytest.skip(f"{name} is not installed")


def typed(folder: Path, block: str) -> subprocess.CompletedProcess[str]:
    """What a person who reads the README types."""
    environment = os.environ | {"PATH": path(), "LC_ALL": "C.UTF-8", "TMPDIR": str(folder.parent)}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block], cwd=folder, capture_output=True, text=True, env=environment
    )


def block_of(folder: Path, *words: str) -> str:
    """The README's block with these words."""
    found = [one for one in commands((folder / "README.txt").read_text()) if all(word in one for word in words)]
    assert len(found) == 1, (words, found)
    return found[0]


def passes(folder: Path, *words: str) -> str:
    done = typed(folder, block_of(folder, *words))
    assert done.returncode == 0, done
    return done.stdout


def fails(folder: Path, *words: str) -> None:
    assert typed(folder, block_of(folder, *words)).returncode != 0


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A bundle of a whole log, and one of a log of which the older part is gone."""
    folder = tmp_path_factory.mktemp("strangers")
    patch = pytest.MonkeyPatch()
    patch.setenv("AMENDS_ANCHORS", str(folder / "anchors"))
    made = {}
    for name in ("whole", "holey"):
        home_of_work(folder / name, 60 if name == "whole" else 90)
        if name == "holey":
            assert compacted(folder / name, 10) > 100
        made[name] = exported(folder / name, folder / f"{name}-bundle", "--payload", "plain")
    patch.undo()
    yield made


@pytest.fixture(params=["whole", "holey"])
def made(templates: dict[str, Path], request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(templates[request.param], tmp_path / "made"))


def swapped(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data and old != new
    path.write_bytes(data.replace(old, new, 1))


def altered_line(made: Path, number: int = -3) -> None:
    """One digit of one record is another one, and the list of files fits it."""
    segment = made / "entries/000000.ndjson"
    lines = segment.read_bytes().splitlines(True)
    at = re.search(rb'"at":(\d+)', lines[number])
    assert at
    lines[number] = lines[number].replace(at[1], at[1][:-1] + (b"1" if at[1][-1:] != b"1" else b"2"))
    segment.write_bytes(b"".join(lines))


def listed_anew(made: Path) -> None:
    names = [name for name in files(made) if not name.startswith("SHA256SUMS")]
    sums = subprocess.run(["sha256sum", *names], cwd=made, capture_output=True, check=True).stdout
    (made / "SHA256SUMS").write_bytes(sums)


# ---- the page is complete -------------------------------------------------------------------------------------------


def test_the_readme_has_a_command_for_each_tool_and_no_other(made: Path) -> None:
    blocks = commands((made / "README.txt").read_text())
    for word in TOOLS:
        assert any(word in block for block in blocks), word
    assert not [block for block in blocks if not any(word in block for word in TOOLS)]


def test_the_readme_says_what_sha256sum_does_not_prove(made: Path) -> None:
    text = " ".join((made / "README.txt").read_text().split())
    assert "it does NOT show who made them, nor that nothing was cut off" in text


def test_every_block_of_the_readme_passes_on_an_honest_bundle(made: Path) -> None:
    needs("sha256sum", "openssl", "signify-openbsd|signify", "minisign", "tlog-tiles", "amends", "python3")
    for block in commands((made / "README.txt").read_text()):
        done = typed(made, block)
        assert done.returncode == 0, done


# ---- sha256sum ------------------------------------------------------------------------------------------------------


def test_sha256sum_finds_a_file_that_is_altered_missing_or_not_of_the_bundle(made: Path) -> None:
    needs("sha256sum")
    passes(made, "sha256sum -c")
    (made / "more").write_text("x")
    fails(made, "sha256sum -c")
    (made / "more").unlink()
    passes(made, "sha256sum -c")
    altered_line(made)
    fails(made, "sha256sum -c")


def test_the_chain_is_checked_with_sed_and_sha256sum_alone(made: Path) -> None:
    needs("sha256sum", "split", "sed", "awk")
    passes(made, "split -l 1")
    altered_line(made)
    listed_anew(made)
    passes(made, "sha256sum -c")  # the list fits
    fails(made, "split -l 1")


def test_the_chain_finds_a_line_that_is_gone_or_moved(made: Path) -> None:
    needs("sha256sum", "split", "sed", "awk")
    segment = made / "entries/000000.ndjson"
    lines = segment.read_bytes().splitlines(True)
    segment.write_bytes(b"".join([*lines[:-3], lines[-2], lines[-3], lines[-1]]))
    fails(made, "split -l 1")
    gone = lines[-3].replace(b'{"seq":', b'{"seq":9')  # renumbered, so that the gap looks like a removal
    segment.write_bytes(b"".join([*lines[:-3], gone, *lines[-2:]]))
    fails(made, "split -l 1")


def test_an_opening_is_checked_against_its_record(made: Path) -> None:
    needs("sha256sum")
    passes(made, "openings/000000.ndjson")
    swapped(made / "openings/000000.ndjson", b'"', b"'")
    fails(made, "openings/000000.ndjson")


# ---- openssl, signify, minisign -------------------------------------------------------------------------------------


def test_openssl_verifies_the_device_s_signature_over_the_root(made: Path) -> None:
    needs("openssl")
    assert "Signature Verified Successfully" in passes(made, "pkeyutl")
    lines = (made / "checkpoint").read_bytes().split(b"\n")
    (made / "checkpoint").write_bytes(b"\n".join([lines[0], lines[1] + b"0", *lines[2:]]))
    fails(made, "pkeyutl")


def test_openssl_tells_a_key_that_is_not_the_one_the_log_is_named_after(made: Path, tmp_path: Path) -> None:
    needs("openssl", "base32")
    passes(made, "openssl dgst")
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / "key"], check=True)
    public = ["openssl", "pkey", "-in", tmp_path / "key", "-pubout", "-out", made / "keys/device.pem"]
    subprocess.run(public, check=True)
    fails(made, "openssl dgst")
    fails(made, "pkeyutl")


@pytest.mark.parametrize(
    ("tool", "file", "words"),
    [
        ("signify-openbsd|signify", "SHA256SUMS.sig", ("signify",)),
        ("minisign", "SHA256SUMS.minisig", ("minisign",)),
    ],
)
def test_the_list_is_verified_by_the_tools_of_others(made: Path, tool: str, file: str, words: tuple[str, ...]) -> None:
    needs(tool)
    passes(made, *words)
    altered_line(made)
    listed_anew(made)
    fails(made, *words)


def test_minisign_refuses_another_trusted_comment(made: Path) -> None:
    needs("minisign")
    swapped(made / "SHA256SUMS.minisig", b"trusted comment: a bundle", b"trusted comment: the bundle")
    fails(made, "minisign")


def test_signify_is_told_the_key_that_record_0_names(made: Path) -> None:
    needs("signify-openbsd|signify")
    segment = made / "entries/000000.ndjson"
    export = re.search(rb'"export":"([0-9a-f]{64})"', segment.read_bytes())
    assert export
    swapped(segment, export[1], bytes(reversed(export[1])))
    fails(made, "signify")


# ---- tlog-tiles -----------------------------------------------------------------------------------------------------


def leaf_of(made: Path, seq: int) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PATH": path()}
    return subprocess.run(
        ["tlog-tiles", "get-leaf", "-c", "./", str(seq)], cwd=made, capture_output=True, env=environment
    )


def test_tlog_tiles_proves_records_from_the_tiles_alone(made: Path) -> None:
    needs("tlog-tiles")
    lines = (made / "entries/000000.ndjson").read_bytes().splitlines(True)
    tiles = {int(p.name.partition(".")[0]) for p in (made / "tile/entries").iterdir()}
    proved = 0
    for line in lines[:: max(1, len(lines) // 12)] + lines[-1:]:
        seq = int(line.split(b",")[0].split(b":")[1])
        got = leaf_of(made, seq)
        assert (got.returncode == 0) == (seq // 256 in tiles), got
        proved += got.returncode == 0 and got.stdout == line
    assert proved > 1
    shutil.rmtree(made / "entries")
    passes(made, "tlog-tiles")


def test_tlog_tiles_refuses_a_line_that_is_not_under_the_signed_root(made: Path) -> None:
    needs("tlog-tiles")
    last = max((made / "tile/entries").rglob("*"), key=lambda path: (path.is_file(), str(path)))
    data = bytearray(last.read_bytes())
    data[-4] ^= 1
    last.write_bytes(data)
    fails(made, "tlog-tiles")


def test_the_proof_of_tlog_tiles_is_one_that_we_would_give(made: Path) -> None:
    needs("tlog-tiles")
    from base64 import b64decode

    from amends.store.merkle import check_inclusion
    from amends.store.note import parse_checkpoint

    head = parse_checkpoint((made / "checkpoint").read_bytes().partition(b"\n\n")[0] + b"\n")
    line = (made / "entries/000000.ndjson").read_bytes().splitlines(True)[-1]
    environment = os.environ | {"PATH": path()}
    done = subprocess.run(
        ["tlog-tiles", "gen-proof", "./", "-1"], cwd=made, capture_output=True, text=True, check=True, env=environment
    )
    proof = done.stdout.split("\n\n")[0].split("\n")[2:]
    hashes = [b64decode(text) for text in proof]
    assert check_inclusion(leaf(line), head.size - 1, head.size, hashes, head.root)


# ---- our own, by themselves -----------------------------------------------------------------------------------------


def test_the_checker_in_the_bundle_needs_nothing_of_ours(made: Path) -> None:
    bare = [sys.executable, "-I", "-S", "check_amends.py", "."]
    assert subprocess.run(bare, cwd=made, capture_output=True).returncode == 0
    altered_line(made)
    listed_anew(made)
    assert subprocess.run(bare, cwd=made, capture_output=True).returncode != 0


def test_amends_verify_takes_the_folder(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main(["verify", str(made)])
    assert capsys.readouterr().out.startswith("INTACT")
