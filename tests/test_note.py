"""Signed notes: what the published vectors accept we accept, what any careful verifier refuses we refuse."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amends.store.errors import Malformed
from amends.store.note import (
    COSIGNATURE,
    BadSignature,
    Checkpoint,
    Key,
    checkpoint_body,
    cosign,
    is_sound,
    key_id,
    note_of,
    open_note,
    parse_checkpoint,
    parse_vkey,
    public_of,
    sign,
    sign_note,
    signature_line,
    verify,
    vkey,
)

VECTORS = Path(__file__).parents[1].parent / "shared" / "vectors"
SEED, OTHER = bytes(range(32)), bytes(32)
NAME = "amends.local/k3"
ROOT = bytes(range(32))
BODY = checkpoint_body(NAME, 42, ROOT)
VKEY = vkey(NAME, public_of(SEED))
NOTE = sign_note(BODY, NAME, SEED)


def published(name: str) -> Any:
    path = VECTORS / name
    if not path.exists():
        pytest.skip(f"published vectors {name} are not here")
    return json.loads(gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes())


# ---- Ed25519 --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.2")
def test_wycheproof_is_judged_as_published() -> None:
    accepted = tried = 0
    for group in published("wycheproof-ed25519.json.gz")["testGroups"]:
        public = bytes.fromhex(group["publicKey"]["pk"])
        for case in group["tests"]:
            verdict = verify(public, bytes.fromhex(case["msg"]), bytes.fromhex(case["sig"]))
            assert verdict is (case["result"] == "valid"), case["tcId"]
            accepted, tried = accepted + verdict, tried + 1
    assert (accepted, tried) == (88, 151)


@pytest.mark.promise("6.2")
def test_no_signature_that_verifiers_disagree_on_is_accepted() -> None:
    harmless = {"low_order_component_R", "low_order_component_A"}  # a point of full order plus one of small order
    accepted = 0
    for case in (rows := published("cctv-ed25519.json.gz")["vectors"]):
        if verify(bytes.fromhex(case["key"]), case["msg"].encode(), bytes.fromhex(case["sig"])):
            assert set(case["flags"] or ()) <= harmless, case["number"]
            accepted += 1
    assert (accepted, len(rows)) == (43, 914)


@pytest.mark.promise("6.2")
def test_a_key_that_signs_for_everybody_is_refused_at_enrolment_and_at_verification() -> None:
    weak = published("ed25519-weak-keys.json")
    for key in weak["keys"]:
        public = bytes.fromhex(key["public_key"])
        assert not is_sound(public), key["name"]
        with pytest.raises(Malformed) as refused:
            vkey("weak", public)
        assert refused.value.facts["finding"] == "E_KEY"
    forged = weak["forgery"]
    assert not verify(bytes.fromhex(forged["public_key"]), b"any", bytes.fromhex(forged["signature"]))


@given(st.binary(max_size=64), st.integers(0, 64 * 8 - 1))
def test_a_signature_holds_and_no_neighbour_of_it_does(message: bytes, bit: int) -> None:
    signature = sign(SEED, message)
    assert verify(public_of(SEED), message, signature)
    changed = (int.from_bytes(signature, "big") ^ 1 << bit).to_bytes(64, "big")
    assert not verify(public_of(SEED), message, changed)
    assert not verify(public_of(SEED), message + b"\0", signature)
    assert not verify(public_of(OTHER), message, signature)
    assert not verify(public_of(SEED), message, signature[:63]) and not verify(public_of(SEED)[:31], message, signature)


# ---- published notes ------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.2")
def test_notes_are_judged_as_published() -> None:
    for case in (rows := published("signed-note.json")["cases"]):
        raw = base64.b64decode(case["note_b64"])
        if "error" not in case:
            note = open_note(raw, case["vkeys"])
            assert [signature.key.name for signature in note.signatures] == case["verified"]
            assert note.unknown == len(case["unverified"])
        elif "malformed" in case["error"]:
            with pytest.raises(Malformed):
                open_note(raw, case["vkeys"])
        else:
            with pytest.raises(BadSignature):
                open_note(raw, case["vkeys"])
    assert len(rows) == 13


def test_we_sign_the_same_note_as_others() -> None:
    known = published("signed-note.json")
    private = known["skey_public_test_key"].split("+", 4)
    seed = base64.b64decode(private[4])[1:]
    assert sign_note(known["sign"]["text"].encode(), private[2], seed).decode() == known["sign"]["signed"]


def test_no_part_of_a_vkey_and_no_neighbour_of_it_is_a_vkey() -> None:
    known = published("signed-note.json")
    good = known["cases"][0]["vkeys"][0]
    parse_vkey(good)
    bad = list(known["bad_vkeys"])
    bad += [
        good[start:stop]
        for start in range(len(good))
        for stop in range(start, len(good) + 1)
        if stop - start < len(good)
    ]
    bad += [good[:at] + chr(ord(good[at]) + 1) + good[at + 1 :] for at in range(len(good))]
    for text in bad:
        with pytest.raises(Malformed):
            parse_vkey(text)


# ---- our own notes --------------------------------------------------------------------------------------------------


def test_a_head_comes_back_from_its_note() -> None:
    note = open_note(NOTE, [VKEY])
    assert parse_checkpoint(note.body) == Checkpoint(NAME, 42, ROOT)
    assert [(signature.key.name, signature.time) for signature in note.signatures] == [(NAME, 0)] and not note.unknown


@pytest.mark.promise("6.2")
@settings(max_examples=20)
@given(st.integers(1, 255))
def test_no_changed_byte_of_a_note_is_believed(flip: int) -> None:
    for place in range(len(NOTE)):
        changed = NOTE[:place] + bytes([NOTE[place] ^ flip]) + NOTE[place + 1 :]
        with pytest.raises((Malformed, BadSignature)):
            open_note(changed, [VKEY])


@given(st.binary(max_size=200))
def test_noise_is_malformed_and_nothing_worse(noise: bytes) -> None:
    for text in (noise, BODY + b"\n" + noise, NOTE + noise, noise + b"\n" + NOTE[len(BODY) :]):
        try:
            note = open_note(text, [VKEY])
        except (Malformed, BadSignature):
            continue
        assert note.body == BODY


def test_who_signed_badly_spoils_the_note_even_beside_a_good_signature() -> None:
    good = NOTE[len(BODY) + 1 :]
    bad = signature_line(Key("other", 1, public_of(OTHER)), sign(OTHER, b"something else"))
    both = [VKEY, vkey("other", public_of(OTHER))]
    assert open_note(note_of(BODY, [bad, good]), [VKEY]).unknown == 1
    with pytest.raises(BadSignature) as refused:
        open_note(note_of(BODY, [good, bad]), both)
    assert refused.value.facts == {"finding": "E_SIGNATURE", "key": "other"}


def test_a_second_signature_by_the_same_key_must_hold_too_and_counts_once() -> None:
    line = NOTE[len(BODY) + 1 :]
    assert len(open_note(NOTE + line, [VKEY]).signatures) == 1
    with pytest.raises(BadSignature):
        open_note(NOTE + signature_line(parse_vkey(VKEY), sign(SEED, b"x")), [VKEY])


def test_a_note_by_strangers_is_unsigned() -> None:
    with pytest.raises(BadSignature) as refused:
        open_note(NOTE, [vkey(NAME, public_of(OTHER))])
    assert refused.value.facts["finding"] == "E_UNSIGNED"


def test_a_witness_signs_the_time_too() -> None:
    witness = vkey("witness", public_of(OTHER), COSIGNATURE)
    line = cosign(BODY, "witness", OTHER, 1764460800)
    assert [found.time for found in open_note(NOTE + line, [VKEY, witness]).signatures] == [0, 1764460800]
    payload = bytearray(base64.b64decode(line.split()[-1]))
    payload[11] ^= 1
    moved = b" ".join([*line.split()[:-1], base64.b64encode(payload)]) + b"\n"
    with pytest.raises(BadSignature):
        open_note(NOTE + moved, [VKEY, witness])
    # one key, one job: a witness key does not sign heads, nor a log key cosignatures
    assert key_id("witness", public_of(OTHER)) != key_id("witness", public_of(OTHER), COSIGNATURE)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"a\n1\n",
        BODY[:-1],
        BODY + b"more\n",
        BODY.replace(b"42", b"042"),
        BODY.replace(b"42", b"-1"),
        BODY.replace(b"42", b"+42"),
        BODY.replace(b"42", b"4_2"),
        BODY.replace(b"42", "４２".encode()),
        BODY.replace(b"42", b"9007199254740993"),
        BODY.replace(b"42", b"9" * 5000),
        BODY.replace(b"=\n", b"\n"),
        BODY.replace(b"8=\n", b"9=\n"),
        BODY.replace(NAME.encode(), b""),
        BODY.replace(NAME.encode(), b"a b"),
        BODY.replace(NAME.encode(), b"a+b"),
        BODY.replace(NAME.encode(), b"\xff"),
        checkpoint_body(NAME, 42, ROOT[:31]),
    ],
)
def test_a_head_has_one_spelling(body: bytes) -> None:
    with pytest.raises(Malformed) as refused:
        parse_checkpoint(body)
    assert refused.value.facts["finding"] == "E_CHECKPOINT"


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a\nb", "a\u2028b", "a\x00b"])
def test_a_key_has_a_plain_name(name: str) -> None:
    with pytest.raises(Malformed):
        vkey(name, public_of(SEED))
