"""What whoever verifies brings along is read strictly, and `verify` takes whatever lies at the path it is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from disclosing import order

from amends import AgentKit
from amends.cli.main import main
from amends.store import note
from amends.store.errors import YouErred
from amends.store.home import Home
from amends.store.keys import Identity
from amends.store.note import COSIGNATURE, cosign, public_of, vkey
from amends.store.trust import brought, cosigned, parse_policy

SEEDS = [bytes([n]) * 32 for n in range(1, 6)]
LOG = vkey("example.org/log", public_of(b"L" * 32))
WITNESSES = [vkey(f"w{n}.example", public_of(seed), COSIGNATURE) for n, seed in enumerate(SEEDS)]
KEYS = [note.parse_vkey(text) for text in WITNESSES]


def policy(*lines: str) -> Any:
    named = [f"witness w{n} {text}" for n, text in enumerate(WITNESSES)]
    return parse_policy("\n".join([f"log {LOG} https://example.org", *named, *lines]) + "\n")


# ---- the policy -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.1")
@pytest.mark.parametrize(
    ("lines", "enough", "too_few"),
    [
        (["quorum w0"], [{0}, {0, 1}], [set(), {1}]),
        (["quorum none"], [set()], []),
        (["group g any w0 w1", "quorum g"], [{0}, {1}], [set(), {2}]),
        (["group g all w0 w1", "quorum g"], [{0, 1}], [{0}, {1}, {0, 2}]),
        (["group g 2 w0 w1 w2", "quorum g"], [{0, 2}, {0, 1, 2}], [{0}, {3, 4}]),
        (
            ["group a 1 w0 w1", "group b all w2 w3", "group g all a b", "quorum g"],
            [{0, 2, 3}, {1, 2, 3}],
            [{0, 1}, {2, 3}, {0, 2}],
        ),
    ],
)
def test_a_quorum_is_met_by_what_its_groups_ask_and_by_nothing_less(lines, enough, too_few):
    asked = policy("# who counts", "", *lines)
    for some in enough:
        assert asked.met({KEYS[n] for n in some})
    for some in too_few:
        assert not asked.met({KEYS[n] for n in some})


@pytest.mark.promise("6.1")
@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["quorum"],
        ["quorum w0", "quorum w1"],
        ["quorum w9"],
        ["quorum g", "group g any w0"],
        ["group g any w9", "quorum none"],
        ["group g 3 w0 w1", "quorum none"],
        ["group g 0 w0", "quorum none"],
        ["group g -1 w0", "quorum none"],
        ["group g many w0", "quorum none"],
        ["group g any", "quorum none"],
        ["group g any w0 w0", "quorum none"],
        ["group g any g", "quorum none"],
        ["group g any w0", "group g any w1", "quorum none"],
        ["group none any w0", "quorum none"],
        ["group g any w0", "group h any w0", "quorum none"],
        [f"witness again {WITNESSES[0]}", "quorum none"],
        [f"witness w0 {vkey('x.example', public_of(b'x' * 32), COSIGNATURE)}", "quorum none"],
        [f"witness plain {LOG}", "quorum none"],
        [f"log {WITNESSES[0]}", "quorum none"],
        ["witness w7 example+00000000+AAAA", "quorum none"],
        ["trust me", "quorum none"],
    ],
)
def test_a_policy_that_can_be_read_two_ways_is_refused(lines):
    with pytest.raises(YouErred) as refused:
        policy(*lines)
    assert refused.value.code == "bad_policy" and refused.value.exit == 2 and refused.value.next


@pytest.mark.promise("6.1")
def test_a_cosignature_counts_only_under_a_note_that_the_log_signed():
    log = note.parse_vkey(LOG)
    body = note.checkpoint_body("example.org/log", 3, bytes(32))
    whole = note.sign_note(body, log.name, b"L" * 32)
    line = cosign(body, "w0.example", SEEDS[0], 1_700_000_000)
    asked = policy("quorum w0")
    assert cosigned(whole + line, log, asked).witnesses == {KEYS[0]}
    assert not cosigned(note.note_of(body, [line]), log, asked).witnesses
    assert not cosigned(whole + line.replace(b"w0.example", b"w1.example"), log, asked).witnesses
    other = cosign(note.checkpoint_body("example.org/log", 4, bytes(32)), "w0.example", SEEDS[0], 1_700_000_000)
    spoiled = cosigned(whole + other, log, asked)
    assert not spoiled.witnesses and "does not hold" in spoiled.trouble


@pytest.mark.promise("6.1")
def test_a_note_is_read_from_a_file_or_as_it_stands(tmp_path):
    text = note.sign_note(note.checkpoint_body("example.org/log", 3, bytes(32)), "example.org/log", b"L" * 32)
    (tmp_path / "note").write_bytes(text)
    assert brought(str(tmp_path / "note")).head == brought(text.decode()).head
    for said in (str(tmp_path / "nothing"), str(tmp_path), "three\nlines\n\nbut no head\n"):
        with pytest.raises(YouErred) as refused:
            brought(said)
        assert refused.value.code == "bad_note" and refused.value.exit == 2


# ---- the command line -----------------------------------------------------------------------------------------------


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="amends")


def told(*args: object) -> tuple[int, dict[str, Any]]:
    result = run(*args, "--json")
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which three orders have ended, named as the home of every verb."""
    monkeypatch.setenv("AMENDS_HOME", str(tmp_path / "home"))
    kit = AgentKit("shop", home=tmp_path / "home")
    for number in range(3):
        order(kit, f"order-{number}")
    kit.close()
    return tmp_path


def note_of(home: Path) -> tuple[bytes, Identity]:
    """The head that the home has anchored, as it leaves the device."""
    mine = Identity.load(Home(home))
    head = mine.anchored()
    body = note.checkpoint_body(mine.origin, head.size, head.root)
    key = note.Key(mine.origin, note.ED25519, mine.log_key)
    return note.note_of(body, [note.signature_line(key, head.signature)]), mine


@pytest.mark.promise("6.1")
def test_verify_takes_a_home_a_database_a_bundle_and_a_disclosure(device):
    home = device / "home"
    text, _ = note_of(home)
    (device / "note").write_bytes(text)
    assert run("export", "--out", device / "bundle").exit_code == 0
    assert run("prove", "order-1", "--out", device / "order.json").exit_code == 0
    for path, level in (
        (home, "local anchor"),
        (home / "amends.db", "signed"),
        (device / "bundle", "signed"),
        (device / "order.json", "signed"),
    ):
        exit, said = told("verify", path)
        assert (exit, said["verdict"], said["level"]) == (0, "INTACT", level), (path, said)
        assert list(said)[:6] == ["verdict", "level", "size", "root", "findings", "not_proved"] and said["not_proved"]
    for path in (home, home / "amends.db", device / "bundle"):
        exit, said = told("verify", path, "--anchor", device / "note")
        assert (exit, said["level"]) == (0, "outside anchor"), (path, said)


@pytest.mark.promise("6.1")
def test_what_is_brought_and_demanded_on_the_command_line_decides_the_exit(device):
    text, mine = note_of(device / "home")
    body = text[: text.rfind(b"\n\n") + 1]
    (device / "note").write_bytes(text)
    (device / "cosigned").write_bytes(text + cosign(body, "w0.example", SEEDS[0], 1_700_000_000))
    lines = [f"log {vkey(mine.origin, mine.log_key)}", f"witness w0 {WITNESSES[0]}", "quorum w0", ""]
    (device / "policy").write_text("\n".join(lines))
    for args, exit in (
        (["--require", "signed", "--require", "anchored"], 0),
        (["--require", "witnessed"], 3),
        (["--policy", device / "policy"], 6),
        (["--policy", device / "policy", "--anchor", device / "note"], 6),
        (["--policy", device / "policy", "--anchor", device / "cosigned", "--require", "witnessed"], 0),
        (["--since", device / "note"], 0),
        (["--since", text.decode()], 0),
        (["--anchor", device / "nothing"], 2),
        (["--policy", device / "note"], 2),
        (["--require", "everything"], 2),
        (["--key", "nowhere:at-all"], 2),
    ):
        result = run("verify", *args)
        assert result.exit_code == exit, (args, result.output)


@pytest.mark.promise("6.1")
@pytest.mark.parametrize("what", ["home", "order.json"])
def test_whoever_kept_a_note_is_no_witness_of_a_policy(device, what):
    text, mine = note_of(device / "home")
    signed = cosign(text[: text.rfind(b"\n\n") + 1], "w0.example", SEEDS[0], 1_700_000_000)
    (device / "note").write_bytes(text)
    (device / "cosigned").write_bytes(text + signed)
    lines = [f"log {vkey(mine.origin, mine.log_key)}", f"witness w0 {WITNESSES[0]}", "quorum w0", ""]
    (device / "policy").write_text("\n".join(lines))
    assert run("prove", "order-1", "--out", device / "order.json").exit_code == 0
    asked = ("verify", device / what, "--require", "witnessed", "--anchor")
    exit, said = told(*asked, device / "note")
    assert (exit, said["level"]) == (3, "outside anchor")
    exit, said = told(*asked, device / "cosigned", "--policy", device / "policy")
    assert (exit, said["level"]) == (0, "outside anchor"), said


@pytest.mark.promise("6.1")
def test_a_bundle_without_openings_says_so_and_cannot_show_them(device):
    assert run("export", "--out", device / "bundle").exit_code == 0
    exit, said = told("verify", device / "bundle", "--require", "openings")
    assert exit == 3 and [finding["code"] for finding in said["findings"]] == ["E_REQUIRED"]
    assert any("not in this bundle" in text for text in said["not_proved"])
    assert run("export", "--out", device / "full", "--payload", "plain").exit_code == 0
    exit, said = told("verify", device / "full", "--require", "openings")
    assert exit == 0, said


@pytest.mark.promise("6.2")
def test_a_bundles_own_keys_and_policy_are_never_believed(device, tmp_path):
    """Somebody hands out a bundle of a log of their own making: whoever kept a note, or names the log, sees it."""
    text, mine = note_of(device / "home")
    (device / "note").write_bytes(text)
    lines = [f"log {vkey(mine.origin, mine.log_key)}", "quorum none", ""]
    (device / "policy").write_text("\n".join(lines))
    kit = AgentKit("shop", home=tmp_path / "forged")
    order(kit, "order-0")
    kit.close()
    assert run("--home", tmp_path / "forged", "export", "--out", device / "bundle").exit_code == 0
    exit, said = told("verify", device / "bundle")
    assert exit == 0 and said["level"] == "signed", "by itself it is a sound log"
    assert told("verify", device / "bundle", "--policy", device / "policy")[0] == 6
    assert told("verify", device / "bundle", "--anchor", device / "note")[0] == 4
