"""A person decides at the terminal: what is shown is what is signed, and only whoever really signs it decides."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keyed_home import PIN, KeyedHome, Terminal, quiet
from nacl.signing import SigningKey
from soft_agent import SoftAgent
from soft_ctap import CANCELLED, SoftKey, device, plugged_in

from amends.cli import airgap, approvals, security_key
from amends.runtime.gate.proof import (
    EDDSA,
    ES256,
    Credential,
    Unproven,
    base64url,
    register,
    unbase64url,
    verify,
)
from amends.runtime.gate.shown import fields_of
from amends.runtime.gate.statement import challenge, check_code, decision, request_digest
from amends.store.errors import AmendsError, BadValue, Refused, TheyErred, YouErred

REQUEST = request_digest(b"x")
SIGNED = decision(REQUEST, "approve")


@pytest.fixture
def keyed(tmp_path: Path) -> KeyedHome:
    return KeyedHome(tmp_path)


def code_of(run: Callable[[], object]) -> str:
    with pytest.raises(AmendsError) as caught:
        run()
    assert caught.value.next
    return caught.value.code


# ---- a USB key, through python-fido2 as it is -----------------------------------------------------------------------


def enrolled(key: SoftKey, algs: tuple[int, ...] = (EDDSA,)) -> Credential:
    nonce = os.urandom(32)
    with plugged_in(key):
        answer = security_key.make(nonce, "cem", quiet(), threading.Event(), algs=algs)
    return register(
        answer, challenge=nonce, origins={security_key.ORIGIN}, rp_id=security_key.RP_ID, algs=algs, person="cem"
    )


def signed_by(key: SoftKey, held: Credential, talk: Any = None, over: threading.Event | None = None) -> dict[str, str]:
    with plugged_in(key):
        return security_key.sign(SIGNED, [held], talk or quiet(), over or threading.Event())


def judged(held: Credential, proof: dict[str, str], **more: Any) -> Any:
    return verify(held, proof, SIGNED, origins={security_key.ORIGIN}, rp_id=security_key.RP_ID, **more)


@pytest.mark.promise("3.5")
def test_a_touch_and_a_pin_make_a_proof_that_our_verifier_takes() -> None:
    key = SoftKey(pin=PIN)
    held = enrolled(key)
    shown = judged(held, signed_by(key, held), counter=held.counter, verification=True)
    assert shown.present and shown.verified and shown.counter > held.counter


@pytest.mark.promise("3.5")
def test_a_key_made_here_answers_nothing_before_it_is_shown_a_pin() -> None:
    from fido2.ctap import CtapError
    from fido2.ctap2.base import Ctap2

    key = SoftKey(pin=PIN)
    held = enrolled(key)
    with pytest.raises(CtapError, match="NO_CREDENTIALS"):
        Ctap2(device(key)).get_assertion(
            security_key.RP_ID, bytes(32), [{"type": "public-key", "id": unbase64url(held.id)}], options={"up": False}
        )


@pytest.mark.promise("3.5")
def test_what_a_program_gets_from_the_key_without_a_touch_is_refused() -> None:
    """Whoever knows the PIN may ask the key for a signature that nobody touches it for; it is a good one."""
    from fido2.ctap2.base import Ctap2
    from fido2.ctap2.pin import ClientPin
    from fido2.webauthn import CollectedClientData

    key = SoftKey(pin=PIN, touch=False)
    held = enrolled(SoftKey(pin=PIN))  # the same seed: the same key, touched once
    ctap = Ctap2(device(key))
    client = CollectedClientData.create(CollectedClientData.TYPE.GET, challenge(SIGNED), security_key.ORIGIN)
    pins = ClientPin(ctap)
    token = pins.get_pin_token(PIN, ClientPin.PERMISSION.GET_ASSERTION, security_key.RP_ID)
    answer = ctap.get_assertion(
        security_key.RP_ID, client.hash, [{"type": "public-key", "id": unbase64url(held.id)}], options={"up": False},
        pin_uv_param=pins.protocol.authenticate(token, client.hash), pin_uv_protocol=2,
    )  # fmt: skip
    proof = {
        "kind": "webauthn", "credential": held.id, "client_data": base64url(bytes(client)),
        "authenticator_data": base64url(bytes(answer.auth_data)), "signature": base64url(answer.signature),
    }  # fmt: skip
    with pytest.raises(Unproven) as caught:
        judged(held, proof)
    assert caught.value.code == "user_not_present"


@pytest.mark.promise("3.5")
def test_a_wrong_pin_signs_nothing_and_too_many_lock_the_key() -> None:
    key, told, codes = SoftKey(pin=PIN), [], []
    held = enrolled(key)

    def pin(tries: int) -> str:
        told.append(tries)
        return "0000"

    for _ in range(3):
        for _ in range(3):
            codes.append(code_of(lambda: signed_by(key, held, quiet()._replace(pin=pin))))
        key.replug()
    codes.append(code_of(lambda: signed_by(key, held)))
    assert told == [8, 7, 6, 5, 4, 3, 2, 1]
    assert codes == ["pin_invalid", "pin_invalid", "pin_auth_blocked"] * 2 + [
        "pin_invalid", "pin_blocked", "pin_blocked", "pin_blocked",
    ]  # fmt: skip
    assert key.tries == 0


@pytest.mark.promise("3.5")
def test_a_wrong_pin_is_never_tried_again_by_itself() -> None:
    key = SoftKey(pin=PIN)
    held = enrolled(key)
    assert code_of(lambda: signed_by(key, held, quiet("0000"))) == "pin_invalid"
    assert key.tries == 7


@pytest.mark.promise("3.5")
@pytest.mark.parametrize(
    ("made", "code"),
    [
        ({"pin": None}, "pin_not_set"),
        ({"touch": False}, "touch_denied"),
        ({"seed": b"\1" * 32}, "other_key"),
    ],
    ids=["no PIN", "denied", "a foreign key"],
)
def test_a_key_that_does_not_sign_is_told_in_words(made: dict[str, Any], code: str) -> None:
    held = enrolled(SoftKey(pin=PIN))
    assert code_of(lambda: signed_by(SoftKey(**{"pin": PIN} | made), held)) == code


@pytest.mark.promise("3.5")
def test_giving_up_at_the_pin_signs_nothing() -> None:
    held = enrolled(SoftKey(pin=PIN))
    assert code_of(lambda: signed_by(SoftKey(pin=PIN), held, quiet(""))) == "pin_missing"


@pytest.mark.promise("3.7")
def test_the_end_of_the_time_ends_the_touch() -> None:
    key, over = SoftKey(pin=PIN), threading.Event()
    held = enrolled(key)
    blinking = SoftKey(pin=PIN, touch=lambda: over.set())  # asked whether somebody is there: nobody is, and time is up
    assert code_of(lambda: signed_by(blinking, held, over=over)) == "expired"
    assert blinking.asked[-1][0] == 2 and blinking.answered[-1] == CANCELLED  # not until it gave up by itself


@pytest.mark.promise("3.5")
def test_a_key_without_ed25519_is_told_so_before_it_is_touched() -> None:
    key = SoftKey(pin=PIN, algs=(ES256,))
    assert code_of(lambda: enrolled(key)) == "alg_not_supported"
    assert {command for command, _ in key.asked} == {4}
    held = enrolled(key, algs=(EDDSA, ES256))
    assert held.alg == ES256 and judged(held, signed_by(key, held), algs={EDDSA, ES256}).present
    assert code_of(lambda: judged(held, signed_by(key, held))) == "alg_not_allowed"


@pytest.mark.promise("3.5")
def test_a_key_that_claims_a_touch_it_did_not_ask_for_is_believed_and_one_that_does_not_is_not() -> None:
    held = enrolled(SoftKey(pin=PIN))
    assert code_of(lambda: judged(held, signed_by(SoftKey(pin=PIN, lies={"flags": 4}), held))) == "user_not_present"
    assert code_of(lambda: judged(held, signed_by(SoftKey(pin=PIN, lies={"flags": 7}), held))) == "reserved_flags"


@pytest.mark.promise("3.5")
def test_of_several_keys_the_one_that_is_touched_is_asked() -> None:
    right, idle, said = SoftKey(pin=PIN), SoftKey(b"\1" * 32, pin=PIN, touch=None), []
    held = enrolled(right)
    with plugged_in(idle, right):
        proof = security_key.sign(SIGNED, [held], quiet()._replace(say=said.append), threading.Event())
    assert judged(held, proof).present and said[0].startswith("2 keys")
    assert not any(command == 2 for command, _ in idle.asked)


@pytest.mark.promise("3.5")
def test_a_key_is_not_enrolled_twice() -> None:
    key = SoftKey(pin=PIN)
    held = enrolled(key)
    with plugged_in(key):
        again = code_of(lambda: security_key.make(bytes(32), "cem", quiet(), threading.Event(), known=[held]))
    assert again == "credential_known"


@pytest.mark.promise("3.5")
def test_no_key_and_no_library_are_two_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    held = enrolled(SoftKey(pin=PIN))
    with plugged_in(), pytest.raises(TheyErred) as none:
        security_key.sign(SIGNED, [held], quiet(), threading.Event())
    assert none.value.code == "no_security_key"
    monkeypatch.setitem(sys.modules, "fido2.client", None)
    with pytest.raises(YouErred) as missing:
        security_key.sign(SIGNED, [held], quiet(), threading.Event())
    assert missing.value.code == "extra_missing" and "amends[usb]" in missing.value.next


def selftest(key: SoftKey) -> dict[str, bool]:
    with plugged_in(key):
        return {one.name: one.good for one in security_key.selftest(quiet())}


@pytest.mark.promise("3.5")
def test_the_selftest_tries_all_that_a_decision_needs() -> None:
    key = SoftKey(pin=PIN)
    assert selftest(key) == dict.fromkeys(("key", "algorithms", "PIN", "credProtect", "enrol", "sign", "silent"), True)
    assert not selftest(SoftKey(pin=None))["PIN"]
    assert not selftest(SoftKey(pin=PIN, algs=(ES256,)))["algorithms"]


# ---- at the terminal ------------------------------------------------------------------------------------------------


@pytest.mark.promise("3.5")
@pytest.mark.promise("3.7")
def test_a_usb_key_decides_from_the_terminal(keyed: KeyedHome) -> None:
    with keyed.asking() as asking:
        terminal = Terminal(keyed.command("approve", asking.item, "--usb", usb={}), keyed.env)
        terminal.until("8 tries left")
        terminal.type(PIN)
        terminal.until("Touch your key now")
        assert terminal.end() == 0, terminal.seen
        assert asking.end() == [{"to": "ann", "amount_minor": 1250}]
        [vote] = asking.votes()
    assert (vote.out, vote.level) == ("approve", 4)
    assert "cem approved" in terminal.seen and "check code" in terminal.seen and PIN not in terminal.seen


@pytest.mark.promise("3.5")
def test_a_wrong_pin_at_the_terminal_decides_nothing(keyed: KeyedHome) -> None:
    with keyed.asking() as asking:
        terminal = Terminal(keyed.command("approve", asking.item, "--usb", usb={}), keyed.env)
        terminal.until("8 tries left")
        terminal.type("1111")
        assert terminal.end() == 6 and "not its PIN" in terminal.seen
        again = Terminal(keyed.command("approve", asking.item, "--usb", usb={}), keyed.env)
        again.until("7 tries left")
        again.type("")
        assert again.end() == 6 and not asking.votes()


@pytest.mark.slow
@pytest.mark.promise("3.7")
def test_a_request_that_runs_out_stops_the_key(tmp_path: Path) -> None:
    keyed = KeyedHome(tmp_path, "presence", deadline="6s")
    with keyed.asking() as asking:
        terminal = Terminal(keyed.command("approve", asking.item, "--usb", usb={"touch": None}), keyed.env)
        terminal.until("8 tries left")
        terminal.type(PIN)
        assert terminal.end() == 1, terminal.seen
        assert "nothing was sent" in terminal.seen and not asking.votes() and asking.end() == []


@pytest.mark.promise("3.5")
def test_a_pin_is_not_read_from_a_pipe(keyed: KeyedHome) -> None:
    with keyed.asking() as asking:
        assert keyed.refusal("approve", asking.item, "--usb", usb={}, input=f"{PIN}\n") == (2, "no_terminal")
        assert not asking.votes()


@pytest.mark.promise("3.7")
@pytest.mark.parametrize("words", [(), ("--by", "ann", "--no-input"), ("--key", "RAW", "--no-input")])
def test_a_pipe_and_no_input_approve_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    keyed = KeyedHome(tmp_path, "named")
    said = [str(keyed.raw) if word == "RAW" else word for word in words]
    with keyed.asking() as asking:
        done = keyed.amends("approve", asking.item, *said, input="y\nyes\napprove\n\n")
        assert done.returncode in (2, 6) and "Nothing was decided" in done.stdout + done.stderr
        assert not asking.votes()


@pytest.mark.promise("3.7")
@pytest.mark.parametrize("way", ["key", "ssh", "import", "glass"])
def test_no_input_approves_nothing_where_the_same_words_without_it_do(tmp_path: Path, way: str) -> None:
    keyed, taken = KeyedHome(tmp_path, "file"), tmp_path / "request"
    with keyed.asking() as asking:
        keyed.asked("approve", asking.item, "--export", taken)
        command = ["ssh-keygen", "-Y", "sign", "-f", str(keyed.ssh), "-n", "approval@amends", str(taken)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        words: tuple[str | Path, ...] = {
            "key": ("--key", keyed.raw),
            "ssh": ("--ssh", keyed.ssh),
            "import": ("--import", f"{taken}.sig"),
            "glass": ("--break-glass", "--reason", "fire", "--key", keyed.raw),
        }[way]
        assert keyed.refusal("approve", asking.item, *words, "--no-input") == (6, "input_needed")
        assert not asking.votes()
        assert keyed.asked("approve", asking.item, *words)["decision"] == "approved"
        assert asking.end()


@pytest.mark.promise("3.7")
def test_no_input_asks_no_key_no_browser_and_no_terminal(keyed: KeyedHome, tmp_path: Path) -> None:
    taken = tmp_path / "request"
    with keyed.asking() as asking:
        assert keyed.refusal("approve", asking.item, "--usb", "--no-input", usb={}) == (6, "input_needed")
        assert keyed.refusal("approve", asking.item, "--page", "--no-input") == (2, "usage")
        assert keyed.asked("approve", asking.item, "--export", taken, "--no-input")["decision"] is None
        elsewhere = ("approve", "--request", f"{taken}.json", "--key", keyed.raw)
        assert keyed.refusal(*elsewhere, "--no-input") == (2, "signer_needed")
        assert keyed.asked(*elsewhere)["answer"]
        terminal = Terminal(keyed.command("approve", asking.item, "--by", "ana", "--no-input"), keyed.env)
        assert terminal.end() == 6 and "Nothing was decided" in terminal.seen
        assert not asking.votes()


@pytest.mark.promise("3.7")
@pytest.mark.parametrize(
    ("level", "signer", "outcome"),
    [("named", "--by", 1), ("file", "--by", 6), ("file", "--key", 2), ("file", "--ssh", 2), ("presence", "--ssh", 6)],
)
def test_what_a_script_passes_decides_at_its_own_level_and_no_higher(
    tmp_path: Path, level: str, signer: str, outcome: int
) -> None:
    keyed = KeyedHome(tmp_path, level)
    with keyed.asking() as asking:
        words = (signer, {"--by": "dora", "--key": keyed.raw, "--ssh": keyed.ssh}[signer])
        if outcome == 6:
            assert keyed.refusal("approve", asking.item, *words)[0] == 6 and not asking.votes()
        else:
            assert keyed.asked("approve", asking.item, *words)["level"] == outcome and asking.end()


@pytest.mark.promise("3.7")
def test_enter_decides_nothing_and_the_check_code_does(tmp_path: Path) -> None:
    keyed = KeyedHome(tmp_path, "named")
    with keyed.asking() as asking:
        for typed in ("", "y", "yes"):
            terminal = Terminal(keyed.command("approve", asking.item, "--by", "dora"), keyed.env)
            terminal.until("Enter decides nothing")
            terminal.type(typed)
            assert terminal.end() == 6 and not asking.votes()
        terminal = Terminal(keyed.command("approve", asking.item, "--by", "dora"), keyed.env)
        terminal.until("Enter decides nothing")
        request = asking.votes() or next(r.entry for r in asking.kit.log.records(0) if r.entry.kind == "step.asked")
        terminal.type(check_code(request.request)[:4].lower())
        assert terminal.end() == 0, terminal.seen
        assert asking.end()


def test_no_option_says_yes() -> None:
    for verb in (approvals.approve, approvals.deny):
        options = {option for parameter in verb.params for option in parameter.opts}
        assert not options & {"--yes", "-y", "--force", "--assume-yes", "--approve"}


def test_one_signer_at_a_time(keyed: KeyedHome) -> None:
    with keyed.asking() as asking:
        assert keyed.refusal("approve", asking.item, "--usb", "--key", keyed.raw) == (2, "usage")
        assert keyed.refusal("approve", asking.item, "--key", keyed.raw, "--qr") == (2, "usage")
        assert keyed.refusal("approve") == (2, "usage")


@pytest.mark.promise("3.7")
def test_the_time_that_is_left_runs_while_the_key_waits(keyed: KeyedHome) -> None:
    with keyed.asking() as asking:
        terminal = Terminal(keyed.command("approve", asking.item, "--usb", usb={"touch": None}), keyed.env)
        terminal.until("8 tries left")
        terminal.type(PIN)
        terminal.until("Touch your key now")
        assert re.search(r"23:59:\d\d left ", terminal.until(" left "))
        terminal.interrupt()
        assert terminal.end() == 130 and not asking.votes()


def test_the_page_is_opened_where_it_runs(keyed: KeyedHome) -> None:
    pytest.importorskip("starlette", reason="starlette is not installed")
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    env = keyed.env | {"BROWSER": "true"}  # the program that opens nothing
    command = keyed.command("ui", "--no-open", "--json", "--port", str(free_port()))
    server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    guard = threading.Timer(60, server.kill)
    guard.start()
    try:
        assert server.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = server.stdout.readline()
            assert line, "the page did not start"
            text += line
        told = keyed.asked("approve", "--page", env={"BROWSER": "true"})
        assert told["running"] and told["port"] == json.loads(text)["port"]
    finally:
        guard.cancel()
        server.terminate()
        server.wait(30)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- SSH ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("3.5")
@pytest.mark.promise("3.4")
def test_an_ssh_key_in_a_file_is_enough_for_a_file_and_not_for_a_touch(tmp_path: Path) -> None:
    keyed = KeyedHome(tmp_path, "file")
    with keyed.asking() as asking:
        done = keyed.asked("approve", asking.item, "--ssh", keyed.ssh)
        assert (done["decision"], done["by"], done["level"]) == ("approved", "ana", 2)
        assert asking.end()
    other = KeyedHome(tmp_path / "other" if (tmp_path / "other").mkdir() is None else tmp_path)
    with other.asking() as asking:
        assert other.refusal("approve", asking.item, "--ssh", other.ssh) == (6, "other_key")
        assert not asking.votes()


@pytest.mark.promise("3.5")
@pytest.mark.parametrize(
    ("flags", "outcome"), [(1, 3), (5, 4), (0, "user_not_present"), (4, "user_not_present"), (0x21, "reserved_flags")]
)
def test_an_ssh_key_on_a_security_key_counts_when_it_was_touched(keyed: KeyedHome, flags: int, outcome: Any) -> None:
    keyed.sk.count = 100
    with keyed.asking() as asking, SoftAgent(keyed.folder, keyed.sk, flags=flags) as agent:
        words = ("approve", asking.item, "--ssh", agent.public)
        if isinstance(outcome, int):
            done = keyed.asked(*words, env=agent.env)
            assert (done["by"], done["level"]) == ("ben", outcome) and asking.end()
        else:
            assert keyed.refusal(*words, env=agent.env) == (6, outcome) and not asking.votes()
    assert agent.asked == 1


@pytest.mark.promise("3.5")
def test_ssh_keygen_that_signs_nothing_decides_nothing(keyed: KeyedHome) -> None:
    with keyed.asking() as asking, SoftAgent(keyed.folder, keyed.sk, refuses=True) as agent:
        code = keyed.refusal("approve", asking.item, "--ssh", agent.public, env=agent.env)
        assert code == (6, "not_signed") and not asking.votes()
        assert keyed.refusal("approve", asking.item, "--ssh", keyed.folder / "nothing") == (2, "bad_key_file")


@pytest.mark.slow
@pytest.mark.promise("3.7")
def test_ssh_keygen_is_stopped_when_the_request_runs_out(tmp_path: Path) -> None:
    keyed = KeyedHome(tmp_path, "presence", deadline="6s")
    with keyed.asking() as asking, SoftAgent(keyed.folder, keyed.sk, hangs=True) as agent:
        assert keyed.refusal("approve", asking.item, "--ssh", agent.public, env=agent.env) == (1, "expired")
        assert agent.asked == 1 and not asking.votes() and asking.end() == []


def test_ssh_keygen_asks_for_the_passphrase_at_the_terminal(tmp_path: Path) -> None:
    keyed = KeyedHome(tmp_path, "file")
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "a secret", "-f", str(keyed.ssh)], check=True, timeout=60)
    with keyed.asking() as asking:
        terminal = Terminal(keyed.command("deny", asking.item, "--ssh", keyed.ssh), keyed.env)
        terminal.until("passphrase")
        terminal.type("a secret")
        assert terminal.end() == 0, terminal.seen
        assert asking.end() == []
        assert [(vote.out, vote.level) for vote in asking.votes()] == [("deny", 2)]


# ---- a raw key, files, and other devices ----------------------------------------------------------------------------


@pytest.mark.promise("3.5")
def test_a_raw_key_in_a_file_decides(tmp_path: Path) -> None:
    keyed = KeyedHome(tmp_path, "file")
    with keyed.asking() as asking:
        done = keyed.asked("approve", asking.item, "--key", keyed.raw, "--note", "seen")
        assert (done["by"], done["level"], done["standing"]) == ("ana", 2, "approved")
        assert asking.end()


@pytest.mark.promise("3.1")
@pytest.mark.promise("3.5")
def test_what_is_exported_is_signed_by_ssh_keygen_and_comes_back(tmp_path: Path) -> None:
    keyed, taken = KeyedHome(tmp_path, "file"), tmp_path / "request"
    with keyed.asking() as asking:
        told = keyed.asked("approve", asking.item, "--export", taken)
        assert taken.read_bytes() == decision(told["request"], "approve") and told["decision"] is None
        assert oct(taken.stat().st_mode & 0o777) == "0o600"
        assert told["code"] in (tmp_path / "request.txt").read_text()
        assert keyed.refusal("approve", asking.item, "--export", taken) == (2, "file_exists")
        command = ["ssh-keygen", "-Y", "sign", "-f", str(keyed.ssh), "-n", "approval@amends", str(taken)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        signature = Path(f"{taken}.sig")
        assert keyed.refusal("deny", asking.item, "--import", signature) == (6, "bad_signature")
        assert not asking.votes()
        assert keyed.asked("approve", asking.item, "--import", signature)["by"] == "ana"
        assert asking.end()


@pytest.mark.promise("3.5")
def test_sixty_four_bytes_of_any_program_are_an_answer(tmp_path: Path) -> None:
    """What `openssl pkeyutl -sign -rawin` writes, for whoever has nothing else on the device that signs."""
    from amends.cli import raw_key
    from amends.store import note

    keyed, taken, answer = KeyedHome(tmp_path, "file"), tmp_path / "request", tmp_path / "answer"
    with keyed.asking() as asking:
        keyed.asked("approve", asking.item, "--export", taken)
        answer.write_bytes(note.sign(b"\1" * 32, taken.read_bytes()))
        assert keyed.refusal("approve", asking.item, "--import", answer) == (6, "credential_unknown")
        answer.write_bytes(note.sign(raw_key.read(keyed.raw), taken.read_bytes()))
        assert keyed.asked("approve", asking.item, "--import", answer)["by"] == "ana"
        assert asking.end()


@pytest.mark.promise("3.1")
@pytest.mark.promise("3.5")
@pytest.mark.parametrize("signer", ["--key", "--usb"])
def test_a_device_that_knows_nothing_of_the_saga_shows_and_answers_a_request(tmp_path: Path, signer: str) -> None:
    keyed = KeyedHome(tmp_path, "file")
    nowhere = {"AMENDS_HOME": str(tmp_path / "nowhere")}
    with keyed.asking() as asking:
        told = keyed.asked("approve", asking.item, "--export", tmp_path / "request")
        away = ("approve", "--request", tmp_path / "request.json", "--export", tmp_path / "answer")
        if signer == "--key":
            there = keyed.asked(*away, "--key", keyed.raw, env=nowhere)
            assert there["code"] == told["code"]
        else:
            terminal = Terminal(keyed.command(*away, "--usb", usb={}), keyed.env | nowhere)
            terminal.until("tries left")
            terminal.type(PIN)
            assert terminal.end() == 0 and told["code"] in terminal.seen and "1250" in terminal.seen
        assert not (tmp_path / "nowhere").exists() and not asking.votes()
        assert keyed.refusal("deny", asking.item, "--import", tmp_path / "answer") == (6, "other_verdict")
        done = keyed.asked("approve", asking.item, "--import", tmp_path / "answer")
        assert done["by"] == ("ana" if signer == "--key" else "cem") and asking.end()
    with keyed.asking(saga="order-2") as asking:
        assert keyed.refusal("approve", asking.item, "--import", tmp_path / "answer") == (6, "other_request")
        assert not asking.votes()


@pytest.mark.promise("3.7")
def test_a_request_that_was_changed_on_its_way_is_another_one(tmp_path: Path) -> None:
    keyed = KeyedHome(tmp_path, "file")
    with keyed.asking() as asking:
        keyed.asked("approve", asking.item, "--export", tmp_path / "request")
        document = json.loads((tmp_path / "request.json").read_text())
        document["request"] = document["request"].replace("1250", "9250")
        (tmp_path / "changed").write_text(json.dumps(document))
        away = ("approve", "--request", tmp_path / "changed", "--key", keyed.raw, "--export", tmp_path / "answer")
        assert keyed.asked(*away)["code"] != keyed.asked("approve", asking.item, code=2)["code"]
        assert keyed.refusal("approve", asking.item, "--import", tmp_path / "answer") == (6, "other_request")
        document["request"] = document["request"].replace(":", ": ", 1)
        (tmp_path / "spaced").write_text(json.dumps(document))
        assert keyed.refusal("approve", "--request", tmp_path / "spaced", "--key", keyed.raw) == (2, "bad_request")
        assert not asking.votes()


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"AMENDS1:.", b"AMENDS1:ABC.", b"\xff" * 65, b"[1]", b'{"kind":"amends-decision"}', b"a" * 300_000],
)
def test_what_is_no_answer_is_told_so(content: bytes) -> None:
    with pytest.raises(BadValue) as caught:
        airgap.read_answer(content, REQUEST, "approve", ())
    assert caught.value.code == "bad_answer"


@pytest.mark.parametrize("content", [b"", b"{}", b'{"kind":"amends-request","v":1}', b"AMENDS1:QQQ."])
def test_what_is_no_request_is_told_so(content: bytes) -> None:
    with pytest.raises(BadValue) as caught:
        airgap.read_request(content)
    assert caught.value.code == "bad_request"


@given(st.binary(max_size=200))
def test_base45_reads_back(data: bytes) -> None:
    assert airgap.unbase45(airgap.base45(data)) == data


def test_base45_is_that_of_the_rfc() -> None:
    for plain, encoded in (
        (b"AB", "BB8"),
        (b"Hello!!", "%69 VD92EX0"),
        (b"base-45", "UJCLQE7W581"),
        (b"ietf!", "QED8WEX0"),
    ):
        assert airgap.base45(plain) == encoded and airgap.unbase45(encoded) == plain
    for bad in ("GGW", ":::", "A", "a", "::"):
        with pytest.raises(ValueError):
            airgap.unbase45(bad)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=50), max_size=4))
def test_a_packed_document_reads_back_and_a_changed_one_does_not(document: dict[str, str]) -> None:
    line = airgap.pack(document)
    assert json.loads(airgap.unpack(line)) == document
    middle = len(airgap.MARK) + (len(line) - len(airgap.MARK)) // 2
    for letter in "0Z":
        changed = line[:middle] + letter + line[middle + 1 :]
        if changed != line:
            with pytest.raises(ValueError):
                airgap.unpack(changed)


def test_a_line_that_would_unpack_to_much_takes_no_memory() -> None:
    import zlib

    bomb = f"{airgap.MARK}{airgap.base45(zlib.compress(bytes(100_000_000), 9))}{airgap.END}"
    with pytest.raises(ValueError):
        airgap.unpack(bomb)


@pytest.mark.promise("3.1")
def test_a_request_is_drawn_as_a_qr_code_and_the_pasted_answer_counts(tmp_path: Path) -> None:
    pytest.importorskip("segno", reason="segno is not installed")
    keyed = KeyedHome(tmp_path, "file")
    with keyed.asking() as asking:
        terminal = Terminal(keyed.command("approve", asking.item, "--qr"), keyed.env | {"NO_COLOR": "1"}, columns=180)
        seen = terminal.until("Paste the answer")
        text = seen[seen.index("AMENDS1:") :].split("\n")[0]
        (tmp_path / "scanned").write_text(text)
        away = ("approve", "--request", tmp_path / "scanned", "--key", keyed.raw)
        answer = keyed.asked(*away, env={"AMENDS_HOME": str(tmp_path / "nowhere")})["answer"]
        terminal.type(answer)
        assert terminal.end() == 0, terminal.seen
        assert asking.end()
    blocks = [line for line in seen.split("\n") if line and set(line) <= set("█▀▄ ")]
    assert len(blocks) >= 20 and len(set(map(len, blocks))) == 1 and len(blocks[0]) <= 80 + 25


def test_what_is_too_large_for_a_camera_goes_by_file() -> None:
    pytest.importorskip("segno", reason="segno is not installed")
    assert code_of(lambda: airgap.qr({"text": os.urandom(2000).hex()}, False)) == "too_large"
    assert airgap.qr({"text": "small"}, True)[0].startswith("\x1b[30;107m")


def test_without_segno_a_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "segno", None)
    assert code_of(lambda: airgap.qr({}, False)) == "extra_missing"


# ---- no, the glass, too late ----------------------------------------------------------------------------------------


@pytest.mark.promise("3.3")
def test_a_no_takes_a_name_and_any_live_key(keyed: KeyedHome) -> None:
    with keyed.asking() as asking:
        assert keyed.asked("deny", asking.item, "--by", "dora", "--note", "not today")["decision"] == "denied"
        assert asking.end() == [] and isinstance(asking.error, Exception)
    with keyed.asking(saga="order-2") as asking:
        assert keyed.asked("deny", asking.item, "--key", keyed.raw)["by"] == "ana"


@pytest.mark.promise("3.3")
def test_the_glass_is_broken_with_a_reason_and_a_key(keyed: KeyedHome) -> None:
    with keyed.asking() as asking:
        words = ("approve", asking.item, "--break-glass")
        assert keyed.refusal(*words, "--key", keyed.raw) == (2, "bad_value")
        assert keyed.refusal(*words, "--by", "dora", "--reason", "fire") == (6, "level_too_low")
        done = keyed.asked(*words, "--key", keyed.raw, "--reason", "fire")
        assert (done["verdict"], done["decision"], done["level"]) == ("break_glass", "approved", 2) and asking.end()


@pytest.mark.promise("3.3")
def test_an_approve_from_elsewhere_breaks_no_glass_and_a_broken_glass_approves_nothing(tmp_path: Path) -> None:
    keyed = KeyedHome(tmp_path, "file")
    with keyed.asking() as asking:
        glass = ("--break-glass", "--reason", "fire")
        out, answers = tmp_path / "out", {"approve": tmp_path / "yes", "break_glass": tmp_path / "glass"}
        told = keyed.asked("approve", asking.item, *glass, "--export", out)["request"]
        assert out.read_bytes() == decision(told, "break_glass")
        elsewhere = ("approve", "--request", f"{out}.json", "--key", keyed.raw, "--export")
        keyed.asked(*elsewhere, answers["approve"])
        keyed.asked(*elsewhere, answers["break_glass"], *glass)
        take = ("approve", asking.item, "--import")
        assert keyed.refusal(*take, answers["approve"], *glass) == (6, "other_verdict")
        assert keyed.refusal(*take, answers["break_glass"]) == (6, "other_verdict")
        signed = SigningKey(bytes(range(32))).sign(decision(told, "approve")).signature
        (tmp_path / "bare").write_bytes(signed)  # 64 bytes say nothing of their verdict, and are of one only
        assert keyed.refusal(*take, tmp_path / "bare", *glass) == (6, "credential_unknown")
        assert not asking.done
        done = keyed.asked(*take, answers["break_glass"], *glass)
        assert done["verdict"] == "break_glass" and asking.end()


@pytest.mark.promise("3.1")
def test_whoever_comes_second_is_told_who_was_first(tmp_path: Path) -> None:
    keyed = KeyedHome(tmp_path, "named")
    with keyed.asking() as asking:
        keyed.asked("approve", asking.item, "--by", "ana")
        asking.end()
        done = keyed.amends("approve", asking.item, "--by", "ben")
        assert done.returncode == 1 and "ana approved it already" in done.stderr
        touched = keyed.amends("approve", asking.item, "--usb", usb={})
        assert touched.returncode == 1 and "ana approved it already" in touched.stderr
        assert "PIN" not in touched.stdout + touched.stderr


# ---- what is seen ---------------------------------------------------------------------------------------------------

MEAN = "ok\x1b[2J\x1b[1;1HAPPROVED\r\n│ fine \u202egnp.exe\u2066 \u200b\x00\x9b31m\u2028 check code  AAAA"


@pytest.mark.promise("3.7")
def test_what_an_agent_writes_cannot_draw_over_what_stands_beside_it(keyed: KeyedHome) -> None:
    args = {"to": MEAN, "amount_minor": 1, "lines": [{"text": "x" * 500}], MEAN: "key"}
    with keyed.asking(args=args) as asking:
        for extra in ({}, {"NO_COLOR": "1"}):
            terminal = Terminal(keyed.command("approve", asking.item), keyed.env | extra, columns=60)
            assert terminal.end() == 2
            text = terminal.seen
            for colour in ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m"):
                text = text.replace(colour, "")
            assert all(letter.isprintable() or letter == "\n" for letter in text)
            lines = text.split("\n")
            assert max(map(len, lines)) <= 60 + 60 and sum("check code" in line[:10] for line in lines) == 1
            assert "".join(line.partition("│ ")[2] for line in lines).count("x" * 500) == 1
        shown = keyed.asked("approve", asking.item, code=2)
        assert request_digest(shown["request"].encode()) == shown["digest"]
        assert check_code(shown["digest"]) == shown["code"]


@pytest.mark.promise("3.7")
def test_every_argument_is_shown_whole_and_so_is_all_that_is_signed_beside_them(keyed: KeyedHome) -> None:
    args = {
        "to": "ann@example.org",
        "amount_minor": 125_000,
        "memo": "a b  c",
        "nested": {"deep": [True, None, "é" * 300]},
    }
    with keyed.asking(args=args) as asking:
        done = keyed.amends("approve", asking.item)
        shown = keyed.asked("approve", asking.item, code=2)
    request = json.loads(shown["request"])
    behind = "".join(line.partition("│ ")[2] for line in done.stdout.split("\n"))
    for value in ("ann@example.org", "125000", "a b  c", "é" * 300, "true"):
        assert value in behind
    for name, value in request.items():
        if name not in ("args", "created", "expires") and value not in ("", []):
            assert name in done.stdout and (value if isinstance(value, str) else json.dumps(value)) in behind
    assert shown["code"] in done.stdout and "time left" in done.stdout


letters = st.text(st.characters(exclude_categories=["Cs"]), max_size=120)
values = letters | st.integers() | st.lists(letters, max_size=3)


@pytest.mark.promise("3.7")
@given(st.dictionaries(letters.filter(lambda name: name != "$"), values, max_size=4))
def test_whatever_the_text_it_stays_behind_the_bar_and_is_all_there(args: dict[str, Any]) -> None:
    import unicodedata

    for field in fields_of(args):
        lines = ["".join(approvals._text(part) for part in line) for line in approvals.drawn([field])]
        seen = "".join(lines)
        assert all(letter.isprintable() or unicodedata.category(letter) == "Zs" for letter in seen)
        for line in lines:
            assert sum(2 if unicodedata.east_asian_width(c) in "WFA" else 1 for c in line) <= approvals.WIDTH
        bars = [line.partition("│ ") for line in lines]
        assert "".join(rest for _, bar, rest in bars if bar) == field.value
        assert all(line.startswith("  ") for line in lines)


@pytest.mark.promise("3.7")
def test_what_is_seen_is_made_of_the_signed_text_and_of_nothing_else(
    keyed: KeyedHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever shows another text shows another code, and signs something that this device did not ask."""
    from amends.runtime.gate import signing

    with keyed.asking() as asking:
        honest = signing.review(asking.kit, asking.item)
        swapped = honest.request.replace(b"1250", b"1")
        assert honest.digest != request_digest(swapped)
        proof = asking_proof(keyed, swapped)
        with pytest.raises(Refused) as caught:
            signing.vote(asking.kit, asking.item, "approve", proof=proof)
        assert caught.value.code in ("bad_signature", "challenge_mismatch", "level_too_low") and not asking.votes()


def asking_proof(keyed: KeyedHome, request: bytes) -> dict[str, Any]:
    return keyed.sk.get(decision(request_digest(request), "approve"), counter=500)


@pytest.mark.promise("3.7")
@pytest.mark.promise("11.1")
def test_page_and_terminal_escape_the_same_characters() -> None:
    from amends.runtime.plain import HARMFUL, UNSEEN, plain

    script = (Path(approvals.__file__).parent / "web" / "static" / "dom.js").read_text()
    [listed] = re.findall(r"^const HARMFUL = /\[(.*)\]/u;$", script, re.MULTILINE)
    categories = re.findall(r"\\p\{(\w+)\}", listed)
    letter = r"\\u(?:\{(\w+)\}|(\w{4}))"
    places = re.findall(f"{letter}(?:-{letter})?", re.sub(r"\\p\{\w+\}", "", listed))
    ranges = [(int(a or b, 16), int(c or d or a or b, 16)) for a, b, c, d in places]
    assert set(categories) == HARMFUL
    assert {chr(code) for first, last in ranges for code in range(first, last + 1)} == UNSEEN
    for seen in "\u3164\u2800\u115f\u034f\ufe0f\u00a0\u3000\uffa0\u180b\U000e0100":
        assert plain(seen) == f"\\x{ord(seen):02x}" or plain(seen).lower().startswith("\\u")
    assert plain("a é 日本") == "a é 日本"


def test_the_time_that_is_left_is_said_in_hours() -> None:
    assert [approvals.left(ms) for ms in (0, 1, 59_999, 3_661_000, 90_000_000)] == [
        "none: it has expired", "0:00:00", "0:00:59", "1:01:01", "25:00:00",
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _anchors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AMENDS_ANCHORS", str(tmp_path / "anchors"))
    yield
