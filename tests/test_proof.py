"""A decision counts only if an enrolled key signed exactly it: every rule, broken alone, is refused by its own code."""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from soft_agent import SoftAgent
from soft_keys import AT, BE, BS, ED, ORIGIN, ORIGINS, RP, UP, UV, SoftPasskey, SoftRaw, SoftSsh

from amends.runtime.gate import cbor, sshsig, webauthn
from amends.runtime.gate.levels import FILE, PRESENT, VERIFIED
from amends.runtime.gate.proof import (
    ALGORITHMS,
    REASONS,
    Credential,
    Unproven,
    Verified,
    base64url,
    level_of,
    raw_credential,
    register,
    ssh_credential,
    ssh_proof,
    unbase64url,
    verify,
)
from amends.runtime.gate.statement import (
    APPROVAL_TAG,
    KEYRING_TAG,
    canonical,
    challenge,
    check_code,
    decision,
    request_digest,
)
from amends.store.errors import BadValue

VECTORS = Path(__file__).parents[1].parent / "shared" / "vectors"
REQUEST = request_digest(b'{"tool":"send"}')
SIGNED, DENIED = decision(REQUEST, "approve"), decision(REQUEST, "deny")
NONCE = bytes(range(32))
UNSOUND = bytes([1]) + bytes(31)  # the identity point: anybody signs for it


def published(name: str) -> Any:
    path = VECTORS / name
    if not path.exists():
        pytest.skip(f"published vectors {name} are not here")
    return json.loads(gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes())


def judged(credential: Credential, proof: Any, signed: bytes = SIGNED, **asked: Any) -> Verified:
    said = dict(origins=ORIGINS, rp_id=RP, algs=ALGORITHMS, counter=0) | asked
    return verify(credential, proof, signed, **said)


def refused(run: Callable[[], object]) -> str:
    with pytest.raises(Unproven) as caught:
        run()
    assert caught.value.next and caught.value.exit == 6
    return caught.value.code


# ---- what is signed -------------------------------------------------------------------------------------------------


@pytest.mark.promise("3.7")
def test_the_signed_bytes_are_these_and_no_others() -> None:
    assert SIGNED == (
        b'amends/approval/1\0{"kind":"approval-decision","request":"'
        + REQUEST.encode()
        + b'","v":1,"verdict":"approve"}'
    )
    assert challenge(SIGNED) == hashlib.sha256(SIGNED).digest()
    assert check_code("3f2a91c077de0b14a5e2" + "0" * 44) == "3F2A-91C0-77DE-0B14-A5E2"
    assert len({APPROVAL_TAG, KEYRING_TAG}) == 2 and not APPROVAL_TAG.startswith(KEYRING_TAG[:-3])


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (1.0, "$ is of type float"),
        ({"a": [1, {"b": float("nan")}]}, "$.a[1].b is of type float"),
        ({"a": 1 << 53}, "$.a is an integer beyond 2^53"),
        ({"a": -(1 << 53)}, "$.a is an integer beyond 2^53"),
        ({1: "a"}, "$ has a key of type int"),
        (("a",), "$ is of type tuple"),
        (b"a", "$ is of type bytes"),
        ({"name": "e\u0301"}, "decomposed"),
        ({"e\u0301": 1}, "decomposed"),
        (["\ud800"], "surrogate"),
    ],
)
def test_what_has_two_spellings_cannot_be_signed(value: Any, path: str) -> None:
    with pytest.raises(BadValue) as caught:
        canonical(value)
    assert path in caught.value.message


def test_a_value_nested_without_end_is_an_error_of_ours() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadValue, match="nested"):
        canonical(deep)


@pytest.mark.parametrize(
    ("request_", "verdict"), [("0" * 63, "approve"), ("A" * 64, "deny"), (REQUEST, "maybe"), (REQUEST, "")]
)
def test_a_decision_is_about_a_request_and_says_yes_or_no(request_: str, verdict: str) -> None:
    with pytest.raises(BadValue):
        decision(request_, verdict)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.text(st.characters(codec="ascii"), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('abc"\\\n\x7f', max_size=4), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_a_statement_reads_back_as_itself_and_has_one_encoding(value: Any) -> None:
    text = canonical(value)
    assert json.loads(text) == value and canonical(json.loads(text)) == text
    assert b"\n" not in text


# ---- one table of refusals ------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A rule that is broken, and nothing else is."""

    name: str
    code: str
    run: Callable[[], object]


def with_client(**client: Any) -> Callable[[], object]:
    return lambda: judged(KEY.enrolled(), KEY.get(SIGNED, client=client))


def with_raw(raw: bytes) -> Callable[[], object]:
    return lambda: judged(KEY.enrolled(), KEY.get(SIGNED, raw=raw))


def with_flags(flags: int, tail: bytes = b"", **asked: Any) -> Callable[[], object]:
    return lambda: judged(KEY.enrolled(), KEY.get(SIGNED, flags=flags, tail=tail), **asked)


def enrolling(*, algs: Any = (-8,), known: Any = (), **lies: Any) -> Callable[[], Credential]:
    asked = {name: lies.pop(name) for name in ("verification", "synced", "extensions") if name in lies}
    return lambda: register(
        KEY.create(NONCE, **lies), challenge=NONCE, origins=ORIGINS, rp_id=RP, algs=algs, known=known, **asked
    )


def with_ssh(key: SoftSsh, asked: dict[str, Any] | None = None, /, **lies: Any) -> Callable[[], object]:
    return lambda: judged(key.enrolled(), key.get(SIGNED, **lies), **(asked or {}))


def enrolling_key(cose: str) -> Callable[[], object]:
    return enrolling(cose=bytes.fromhex(cose))


def without_the_extra(run: Callable[[], object]) -> Callable[[], object]:
    def bare() -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
            return run()

    return bare


KEY, ES, PLAIN, SK, RAW = SoftPasskey(), SoftPasskey(alg=-7), SoftSsh(), SoftSsh(application="ssh:amends"), SoftRaw()
OTHER = SoftPasskey(b"\5" * 32, credential=b"\2" * 16)
FOREIGN = SoftSsh(b"\6" * 32, application="ssh:other")
CLIENT = {"type": "webauthn.get", "challenge": base64url(challenge(SIGNED)), "origin": ORIGIN}
TEXT = json.dumps(CLIENT).encode()
X, Y = ES.public[1:33].hex(), ES.public[33:].hex()
POINT = KEY.public.hex()
ES_PROOF = ES.get(SIGNED)
PROTECTED = bytes.fromhex("a16b") + b"credProtect" + b"\3"
UNASKED = bytes.fromhex("a16b") + b"hmac-secret" + b"\xf5"

ROWS = [
    # the envelope
    Row("a field is missing", "bad_proof", lambda: judged(KEY.enrolled(), KEY.get(SIGNED, signature=None))),
    Row("a field too many", "bad_proof", lambda: judged(KEY.enrolled(), KEY.get(SIGNED, user_handle="AA"))),
    Row("no object", "bad_proof", lambda: judged(KEY.enrolled(), ["webauthn"])),
    Row("a kind that nobody knows", "bad_proof", lambda: judged(KEY.enrolled(kind="u2f"), KEY.get(SIGNED, kind="u2f"))),
    Row("padded", "bad_base64url", lambda: judged(RAW.enrolled(), RAW.get(SIGNED, signature="AA=="))),
    Row("plain base64", "bad_base64url", lambda: judged(RAW.enrolled(), RAW.get(SIGNED, signature="+/8"))),
    Row("spaces", "bad_base64url", lambda: judged(RAW.enrolled(), RAW.get(SIGNED, signature="AA AA"))),
    Row("stray bits", "bad_base64url", lambda: judged(RAW.enrolled(), RAW.get(SIGNED, signature="AB"))),
    Row("a number", "bad_base64url", lambda: judged(RAW.enrolled(), RAW.get(SIGNED, signature=7))),
    Row("not ASCII", "bad_base64url", lambda: judged(RAW.enrolled(), RAW.get(SIGNED, signature="ÄÄÄÄ"))),
    Row("another key's name", "other_credential", lambda: judged(KEY.enrolled(), OTHER.get(SIGNED))),
    Row("another kind", "other_credential", lambda: judged(SK.enrolled(), SK.get(SIGNED) | {"kind": "ssh"})),
    # the algorithm
    Row("ES256, not allowed", "alg_not_allowed", lambda: judged(ES.enrolled(), ES.get(SIGNED), algs={-8})),
    Row("Ed25519, not allowed", "alg_not_allowed", lambda: judged(KEY.enrolled(), KEY.get(SIGNED), algs={-7})),
    Row("ES256 and no extra", "es256_extra_missing",
        without_the_extra(lambda: judged(ES.enrolled(), ES_PROOF))),
    Row("a raw key with ES256", "alg_not_allowed", lambda: judged(RAW.enrolled(alg=-7), RAW.get(SIGNED))),
    Row("a weak key in the ring", "weak_key",
        lambda: judged(KEY.enrolled(public=base64url(UNSOUND)), KEY.get(SIGNED))),
    Row("a short key in the ring", "bad_key", lambda: judged(KEY.enrolled(public="AAAA"), KEY.get(SIGNED))),
    Row("a point off the curve", "bad_key",
        lambda: judged(ES.enrolled(public=base64url(b"\4" + b"\1" * 64)), ES.get(SIGNED))),
    # the client
    Row("too long", "bad_client_data", with_raw(TEXT + b" " * 8192)),
    Row("not UTF-8", "bad_client_data", with_raw(TEXT[:-1] + b',"x":"\xff"}')),
    Row("not JSON", "bad_client_data", with_raw(TEXT[:-1])),
    Row("NaN", "bad_client_data", with_raw(TEXT[:-1] + b',"x":NaN}')),
    Row("nested without end", "bad_client_data", with_raw(TEXT[:-1] + b',"x":' + b"[" * 4000 + b"]" * 4000 + b"}")),
    Row("an array", "bad_client_data", with_raw(b"[" + TEXT + b"]")),
    Row("a key twice", "bad_client_data", with_raw(TEXT[:-1] + b',"origin":"http://evil.example"}')),
    Row("a key twice, the same", "bad_client_data", with_raw(TEXT[:-1] + b',"type":"webauthn.get"}')),
    Row("a key twice inside", "bad_client_data", with_raw(TEXT[:-1] + b',"x":{"a":1,"a":2}}')),
    Row("an enrolment", "wrong_type", with_client(type="webauthn.create")),
    Row("a payment", "wrong_type", with_client(type="payment.get")),
    Row("no type", "wrong_type", with_client(type=None)),
    Row("the other verdict", "challenge_mismatch", lambda: judged(KEY.enrolled(), KEY.get(DENIED))),
    Row("another request", "challenge_mismatch", with_client(challenge=base64url(NONCE))),
    Row("a padded challenge", "challenge_mismatch", with_client(challenge=base64url(challenge(SIGNED)) + "=")),
    Row("no challenge", "challenge_mismatch", with_client(challenge=None)),
    Row("half a surrogate", "challenge_mismatch", with_raw(TEXT.replace(CLIENT["challenge"].encode(), b"\\ud800"))),
    Row("another port", "origin_not_allowed", with_client(origin="http://amends.localhost:8800")),
    Row("another host", "origin_not_allowed", with_client(origin="http://localhost:8799")),
    Row("another scheme", "origin_not_allowed", with_client(origin="https://amends.localhost:8799")),
    Row("a longer host", "origin_not_allowed", with_client(origin=ORIGIN + ".evil.example")),
    Row("a host in front", "origin_not_allowed", with_client(origin="http://evil.amends.localhost:8799")),
    Row("capitals", "origin_not_allowed", with_client(origin="http://AMENDS.localhost:8799")),
    Row("a slash", "origin_not_allowed", with_client(origin=ORIGIN + "/")),
    Row("no origin", "origin_not_allowed", with_client(origin=None)),
    Row("origins in a list", "origin_not_allowed", with_client(origin=[ORIGIN])),
    Row("in a frame", "cross_origin", with_client(crossOrigin=True)),
    Row("in a frame, in words", "cross_origin", with_client(crossOrigin="false")),
    Row("zero is not false", "cross_origin", with_client(crossOrigin=0)),
    Row("below another page", "cross_origin", with_client(topOrigin=ORIGIN)),
    # the key
    Row("cut short", "bad_authenticator_data",
        lambda: judged(KEY.enrolled(), KEY.get(SIGNED, data=hashlib.sha256(RP.encode()).digest() + b"\5\0\0\0"))),
    Row("bytes left over", "bad_authenticator_data", with_flags(UP | UV, b"\0")),
    Row("too long to be one", "bad_authenticator_data", with_flags(UP | UV, bytes(4096))),
    Row("another site", "rp_mismatch", lambda: judged(KEY.enrolled(), KEY.get(SIGNED, rp="localhost"))),
    Row("enrolled at another site", "rp_mismatch", lambda: judged(KEY.enrolled(rp_id="localhost"), KEY.get(SIGNED))),
    Row("reserved bit 1", "reserved_flags", with_flags(UP | UV | 2)),
    Row("reserved bit 5", "reserved_flags", with_flags(UP | UV | 32)),
    Row("nobody there", "user_not_present", with_flags(UV)),
    Row("a PIN is a must", "user_not_verified", with_flags(UP, verification=True)),
    Row("copied, though it cannot be", "backup_state_impossible", with_flags(UP | UV | BS)),
    Row("became copyable", "backup_eligibility_changed", with_flags(UP | UV | BE)),
    Row("is copyable no more", "backup_eligibility_changed",
        lambda: judged(KEY.enrolled(backup_eligible=True), KEY.get(SIGNED))),
    Row("a new key in an answer", "attested_data_unasked",
        with_flags(UP | UV | AT, bytes(16) + b"\0\x01a" + KEY.cose())),
    Row("an extension in an answer", "extensions_unasked", with_flags(UP | UV | ED, PROTECTED)),
    Row("an extension that is no CBOR", "bad_cbor", with_flags(UP | UV | ED, b"\xbf\xff")),
    Row("another key signed", "bad_signature",
        lambda: judged(KEY.enrolled(), OTHER.get(SIGNED, credential=KEY.enrolled().id))),
    Row("signed with nothing", "bad_signature", lambda: judged(KEY.enrolled(), KEY.get(SIGNED, signature=""))),
    Row("ES256 signed something else", "bad_signature",
        lambda: judged(ES.enrolled(), ES.get(SIGNED, signature=base64url(ES.sign(b"x"))))),
    Row("ES256 and no DER", "bad_signature", lambda: judged(ES.enrolled(), ES.get(SIGNED, signature="AAAA"))),
    Row("ES256 and endless", "bad_signature", lambda: judged(ES.enrolled(), ES.get(SIGNED, signature="A" * 4000))),
    Row("the counter stands", "counter_went_back",
        lambda: judged(KEY.enrolled(), KEY.get(SIGNED, counter=7), counter=7)),
    Row("the counter fell", "counter_went_back", lambda: judged(KEY.enrolled(), KEY.get(SIGNED, counter=6), counter=7)),
    Row("the counter is gone", "counter_went_back",
        lambda: judged(KEY.enrolled(), KEY.get(SIGNED, counter=0), counter=7)),
    # enrolling
    Row("a signature is no enrolment", "wrong_type", enrolling(client={"type": "webauthn.get"})),
    Row("another challenge", "challenge_mismatch", enrolling(client={"challenge": base64url(bytes(32))})),
    Row("enrolled elsewhere", "origin_not_allowed", enrolling(client={"origin": "https://evil.example"})),
    Row("enrolled in a frame", "cross_origin", enrolling(client={"crossOrigin": True})),
    Row("enrolled for another site", "rp_mismatch", enrolling(rp="localhost")),
    Row("enrolled by nobody", "user_not_present", enrolling(flags=UV | AT)),
    Row("enrolled without a PIN", "user_not_verified", enrolling(flags=UP | AT)),
    Row("no field", "bad_base64url", lambda: register({}, challenge=NONCE, origins=ORIGINS, rp_id=RP)),
    Row("no new key", "credential_missing", enrolling(flags=UP | UV)),
    Row("no name", "bad_credential_id", enrolling(credential=b"")),
    Row("a name too long", "bad_credential_id", enrolling(credential=bytes(1024))),
    Row("a name cut short", "bad_authenticator_data", enrolling(cose=b"", credential=b"", aaguid=b"")),
    Row("copied by its provider", "synced_key_not_allowed", enrolling(flags=UP | UV | AT | BE | BS)),
    Row("known", "credential_known", enrolling(known={base64url(KEY.credential)})),
    Row("unasked extension", "extensions_unasked", enrolling(flags=UP | UV | AT | ED, tail=UNASKED)),
    Row("extensions in an array", "extensions_unasked", enrolling(flags=UP | UV | AT | ED, tail=b"\x80")),
    Row("an alg we did not ask for", "alg_not_allowed", enrolling(algs=(-7,))),
    Row("-19", "alg_not_allowed", enrolling_key(f"a4010103322006215820{POINT}")),
    Row("RSA", "alg_not_allowed", enrolling_key("a2010303390100")),
    Row("no alg", "alg_not_allowed", enrolling_key(f"a301012006215820{POINT}")),
    Row("no map", "bad_key", enrolling_key("80")),
    Row("a label too many", "bad_key", enrolling_key(f"a50101032704272006215820{POINT}")),
    Row("Ed448", "bad_key", enrolling_key(f"a4010103272007215820{POINT}")),
    Row("31 bytes", "bad_key", enrolling_key(f"a401010327200621581f{POINT[2:]}")),
    Row("a key type of true", "bad_key", enrolling_key(f"a401f503272006215820{POINT}")),
    Row("no coordinate", "bad_key", enrolling_key("a3010103272006")),
    Row("a weak key", "weak_key", enrolling_key(f"a4010103272006215820{UNSOUND.hex()}")),
    Row("P-256 with -8", "bad_key", enrolling_key(f"a5010203272001215820{X}225820{Y}")),
    Row("P-256, off the curve", "bad_key",
        enrolling(algs=(-7, -8), cose=bytes.fromhex(f"a5010203262001215820{X}225820{X}"))),
    Row("P-256, compressed", "bad_key", enrolling(algs=(-7, -8), cose=bytes.fromhex(f"a5010203262001215820{X}22f5"))),
    Row("ES256 and no extra here", "es256_extra_missing", without_the_extra(
        enrolling(algs=(-7, -8), cose=ES.cose()))),
    Row("longer than needed", "bad_cbor", enrolling_key(f"a401010327200621590020{POINT}")),
    Row("indefinite", "bad_cbor", enrolling_key(f"bf010103272006215820{POINT}ff")),
    Row("a label twice", "bad_cbor", enrolling_key(f"a50101010103272006215820{POINT}")),
    Row("out of order", "bad_cbor", enrolling_key(f"a4032701012006215820{POINT}")),
    Row("tagged", "bad_cbor", enrolling_key(f"c1a4010103272006215820{POINT}")),
    Row("a float", "bad_cbor", enrolling_key(f"a401f93c0003272006215820{POINT}")),
    Row("deep", "bad_cbor", enrolling_key("81818181818101")),
    Row("endless", "bad_cbor", enrolling_key("bb00ffffffffffffff")),
    Row("text that is none", "bad_cbor", enrolling_key("a161ff01")),
    # SSH
    Row("another purpose", "namespace_mismatch", with_ssh(PLAIN, namespace="file")),
    Row("a keyring's event", "namespace_mismatch", with_ssh(SK, namespace="keyring@amends")),
    Row("the ssh key of another", "other_credential",
        lambda: judged(SK.enrolled(), SoftSsh(b"\1" * 32, application="ssh:amends").get(SIGNED)
                       | {"credential": SK.enrolled().id})),
    Row("an sk key of another application", "application_mismatch", with_ssh(FOREIGN)),
    Row("enrolled for another application", "application_mismatch", lambda: ssh_credential(FOREIGN.line)),
    Row("a bit for extensions", "reserved_flags", with_ssh(SK, flags=0x81)),
    Row("any other bit", "reserved_flags", with_ssh(SK, flags=0x03)),
    Row("untouched", "user_not_present", with_ssh(SK, flags=0)),
    Row("a PIN and no touch", "user_not_present", with_ssh(SK, flags=4)),
    Row("no PIN where one is a must", "user_not_verified", with_ssh(SK, {"verification": True}, flags=1)),
    Row("a file shows nobody's PIN", "user_not_verified", with_ssh(PLAIN, {"verification": True})),
    Row("nor does a raw key", "user_not_verified",
        lambda: judged(RAW.enrolled(), RAW.get(SIGNED), verification=True)),
    Row("version 2", "bad_sshsig", with_ssh(PLAIN, version=2)),
    Row("no magic", "bad_sshsig", with_ssh(PLAIN, magic=b"SSHSIX")),
    Row("a reserved field", "bad_sshsig", with_ssh(PLAIN, reserved=b"x")),
    Row("another hash", "bad_sshsig", with_ssh(PLAIN, hash="sha384")),
    Row("left over", "bad_sshsig", with_ssh(PLAIN, tail=b"\0")),
    Row("cut", "bad_sshsig", with_ssh(PLAIN, answer=b"\0\0\0\x0bssh-ed25519\0\0\0\x40")),
    Row("an endless string", "bad_sshsig", with_ssh(PLAIN, answer=b"\0\0\0\x0bssh-ed25519\xff\xff\xff\xff")),
    Row("too long a blob", "bad_sshsig", with_ssh(PLAIN, tail=bytes(8192))),
    Row("a plain signature by an sk key", "bad_sshsig",
        with_ssh(SK, answer=SoftSsh().answer(b""))),
    Row("another type of key", "alg_not_allowed", with_ssh(PLAIN, key=b"\0\0\0\x07ssh-rsa\0\0\0\1\1\0\0\0\1\1")),
    Row("the ssh key signed something else", "bad_signature", with_ssh(SK, answer=SK.answer(b"else"))),
    Row("the plain key signed something else", "bad_signature", with_ssh(PLAIN, answer=PLAIN.answer(b"else"))),
    Row("signed the other verdict", "bad_signature", lambda: judged(SK.enrolled(), SK.get(DENIED))),
    Row("the sk counter stands", "counter_went_back", with_ssh(SK, {"counter": 9}, counter=9)),
    Row("the name is not the key's", "bad_key", lambda: judged(
        SK.enrolled(public=PLAIN.enrolled().public), SK.get(SIGNED))),
    Row("not a line of a .pub file", "bad_key", lambda: ssh_credential("ssh-ed25519")),
    Row("two types in a line", "bad_key", lambda: ssh_credential(PLAIN.line.replace("ssh-ed25519 ", "ssh-rsa "))),
    Row("an rsa line", "alg_not_allowed", lambda: ssh_credential("ssh-rsa AAAAB3NzaC1yc2EAAAABAQAAAAEB")),
    Row("a known ssh key", "credential_known", lambda: ssh_credential(SK.line, known={SK.enrolled().id})),
    Row("a weak ssh key", "weak_key", lambda: ssh_credential(
        "ssh-ed25519 " + base64.b64encode(sshsig.key_blob(sshsig.Key("ssh-ed25519", UNSOUND))).decode())),
    # raw
    Row("raw, the other verdict", "bad_signature", lambda: judged(RAW.enrolled(), RAW.get(DENIED))),
    Row("raw, 63 bytes", "bad_signature", lambda: judged(RAW.enrolled(), RAW.get(SIGNED, signature="A" * 84))),
    Row("raw, a name of another", "bad_key", lambda: judged(
        RAW.enrolled(public=base64url(KEY.public)), RAW.get(SIGNED))),
    Row("raw, weak", "weak_key", lambda: raw_credential(UNSOUND)),
    Row("raw, short", "bad_key", lambda: raw_credential(b"\2" * 31)),
    Row("raw, known", "credential_known", lambda: raw_credential(RAW.public, known={RAW.enrolled().id})),
]  # fmt: skip


@pytest.mark.promise("3.5")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_rule_that_is_broken_alone_refuses_by_its_own_code(row: Row) -> None:
    assert refused(row.run) == row.code


def test_every_code_is_reached_and_every_sentence_ends() -> None:
    assert {row.code for row in ROWS} == set(REASONS)
    for code in REASONS:
        assert str(Unproven(code)).endswith((".", "`."))


# ---- what holds -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("3.5")
def test_an_honest_proof_of_every_kind_holds_and_says_what_it_shows() -> None:
    shown = {
        (key.enrolled().kind, key.enrolled().alg, flags): judged(key.enrolled(), key.get(SIGNED, flags=flags))
        for key in (KEY, ES, SK)
        for flags in (UP, UP | UV)
    } | {(key.enrolled().kind, -8, 0): judged(key.enrolled(), key.get(SIGNED)) for key in (PLAIN, RAW)}
    assert {name: (one.present, one.verified) for name, one in shown.items()} == {
        ("webauthn", -8, UP): (True, False), ("webauthn", -8, UP | UV): (True, True),
        ("webauthn", -7, UP): (True, False), ("webauthn", -7, UP | UV): (True, True),
        ("ssh-sk", -8, UP): (True, False), ("ssh-sk", -8, UP | UV): (True, True),
        ("ssh", -8, 0): (False, False), ("raw", -8, 0): (False, False),
    }  # fmt: skip


@pytest.mark.promise("3.4")
def test_the_level_follows_from_what_was_shown() -> None:
    touched, pinned, lying = Verified("", True, False, 1), Verified("", True, True, 1), Verified("", False, False, 0)
    assert [level_of(KEY.enrolled(), one) for one in (touched, pinned, lying)] == [PRESENT, VERIFIED, FILE]
    assert [level_of(SK.enrolled(), one) for one in (touched, pinned)] == [PRESENT, VERIFIED]
    assert [level_of(one.enrolled(), lying) for one in (PLAIN, RAW)] == [FILE, FILE]
    assert level_of(KEY.enrolled(backup_eligible=True), pinned) == FILE


@pytest.mark.promise("3.5")
def test_keys_without_a_counter_never_count_back_and_jumps_are_no_copies() -> None:
    assert judged(KEY.enrolled(), KEY.get(SIGNED, counter=0)).counter == 0
    assert judged(KEY.enrolled(), KEY.get(SIGNED, counter=9), counter=3).counter == 9


@pytest.mark.promise("3.5")
def test_what_a_browser_adds_and_a_mark_in_front_change_nothing() -> None:
    judged(KEY.enrolled(), KEY.get(SIGNED, client={"other_keys_can_be_added_here": "x", "crossOrigin": None}))
    judged(KEY.enrolled(), KEY.get(SIGNED, raw=b"\xef\xbb\xbf" + TEXT))


@pytest.mark.promise("3.5")
def test_a_key_is_enrolled_with_what_it_said_of_itself_and_then_signs() -> None:
    for key, extra in ((KEY, {}), (ES, {}), (KEY, {"flags": UP | UV | AT | ED, "tail": PROTECTED})):
        answer = key.create(NONCE, **extra)
        made = register(
            answer, challenge=NONCE, origins=ORIGINS, rp_id=RP, algs=ALGORITHMS, person="p", roles=("admin",), label="l"
        )
        wanted = key.enrolled(person="p", roles=("admin",), label="l", counter=made.counter)
        assert made == wanted and judged(made, key.get(SIGNED), counter=made.counter)


@pytest.mark.promise("3.5")
def test_a_synced_key_is_enrolled_only_where_it_is_allowed_and_is_then_no_more_than_a_file() -> None:
    made = enrolling(flags=UP | UV | AT | BE | BS, synced=True)()
    shown = judged(made, KEY.get(SIGNED, flags=UP | UV | BE))
    assert made.backup_eligible and level_of(made, shown) == FILE


@pytest.mark.promise("3.5")
def test_ssh_and_raw_keys_are_enrolled_from_what_lies_in_their_files() -> None:
    assert ssh_credential(SK.line, person="b" * 16, roles=("approver",)) == SK.enrolled()
    assert ssh_credential(PLAIN.line, person="b" * 16, roles=("approver",)) == PLAIN.enrolled()
    assert raw_credential(RAW.public, person="c" * 16, roles=("approver",)) == RAW.enrolled()


# ---- every bit ------------------------------------------------------------------------------------------------------


def flipped(data: bytes) -> list[bytes]:
    return [data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for at in range(len(data)) for bit in range(8)]


@pytest.mark.promise("3.5")
@pytest.mark.parametrize("key", [KEY, ES, PLAIN, SK, RAW], ids=["webauthn", "es256", "ssh", "ssh-sk", "raw"])
def test_every_bit_of_a_proof_counts(key: Any) -> None:
    credential, proof, codes = key.enrolled(), key.get(SIGNED), Counter[str]()
    judged(credential, proof)
    for name in ("client_data", "authenticator_data", "signature"):
        for bad in flipped(unbase64url(proof[name])) if name in proof else ():
            codes[refused(lambda bad=bad, name=name: judged(credential, proof | {name: base64url(bad)}))] += 1
    assert codes["bad_signature"] >= 64 * 8 and codes.total() >= 64 * 8


@pytest.mark.promise("3.5")
@pytest.mark.parametrize("key", [KEY, ES, PLAIN, SK, RAW], ids=["webauthn", "es256", "ssh", "ssh-sk", "raw"])
def test_every_bit_of_what_was_signed_counts(key: Any) -> None:
    proof = key.get(SIGNED)
    for bad in flipped(SIGNED):
        assert refused(lambda bad=bad: judged(key.enrolled(), proof, bad)) in ("bad_signature", "challenge_mismatch")


# ---- mutations ------------------------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """Canonical CBOR, written independently of what reads it."""

    def head(major: int, number: int) -> bytes:
        if number < 24:
            return bytes([major << 5 | number])
        width = next(w for w in (1, 2, 4, 8) if number < 1 << 8 * w)
        return bytes([major << 5 | 24 + (width.bit_length() - 1)]) + number.to_bytes(width, "big")

    if value is None or isinstance(value, bool):
        return bytes([{False: 0xF4, True: 0xF5, None: 0xF6}[value]])
    if isinstance(value, int):
        return head(0, value) if value >= 0 else head(1, -1 - value)
    if isinstance(value, bytes):
        return head(2, len(value)) + value
    if isinstance(value, str):
        return head(3, len(value.encode())) + value.encode()
    if isinstance(value, list):
        return head(4, len(value)) + b"".join(map(encode, value))
    pairs = [(encode(key), encode(one)) for key, one in value.items()]
    pairs.sort(key=lambda pair: (pair[0][0] >> 5, len(pair[0]), pair[0]))
    return head(5, len(pairs)) + b"".join(key + one for key, one in pairs)


numbers = st.integers(-(2**64), 2**64 - 1)
atoms = st.none() | st.booleans() | numbers | st.binary(max_size=40) | st.text(max_size=12)
keys = st.integers(-30, 300) | st.text(max_size=4) | st.binary(max_size=4)
trees = st.recursive(
    atoms, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
)


def depth(value: Any) -> int:
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@given(trees)
def test_canonical_cbor_reads_back_as_itself(value: Any) -> None:
    if depth(value) <= cbor.DEPTH_MAX:
        assert cbor.read(encode(value)) == (value, len(encode(value)))
    else:
        assert refused(lambda: cbor.read(encode(value))) == "bad_cbor"


@pytest.mark.promise("3.5")
@given(trees, st.data())
def test_what_is_read_as_cbor_is_the_one_encoding_of_it(value: Any, data: st.DataObject) -> None:
    raw = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        what = data.draw(st.sampled_from(("put", "cut", "set")))
        if what == "put":
            raw.insert(at, data.draw(st.integers(0, 255)))
        elif raw and at < len(raw):
            raw[at : at + 1] = b"" if what == "cut" else bytes([data.draw(st.integers(0, 255))])
    try:
        found, end = cbor.read(bytes(raw))
    except Unproven as refusal:
        assert refusal.code == "bad_cbor"
    else:
        assert encode(found) == raw[:end]


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_refusal(data: bytes) -> None:
    for read in (cbor.read, webauthn.parse, sshsig.parse, sshsig.parse_key, webauthn._client_data):
        try:
            read(data)
        except Unproven:
            continue
    text = data.decode("latin-1")
    for read_text in (sshsig.unarmour, sshsig.parse_line, unbase64url, ssh_proof):
        try:
            read_text(text)
        except Unproven:
            continue


# ---- against the verifiers of others --------------------------------------------------------------------------------


def py_webauthn_accepts(key: SoftPasskey, proof: dict[str, str], verification: bool, counter: int) -> bool:
    from webauthn import verify_authentication_response
    from webauthn.helpers.exceptions import WebAuthnException

    try:
        verify_authentication_response(
            credential={
                "id": proof["credential"], "rawId": proof["credential"], "type": "public-key",
                "response": {
                    "clientDataJSON": proof["client_data"], "authenticatorData": proof["authenticator_data"],
                    "signature": proof["signature"],
                },
            },
            expected_challenge=challenge(SIGNED), expected_rp_id=RP, expected_origin=sorted(ORIGINS),
            credential_public_key=key.cose(), credential_current_sign_count=counter,
            require_user_verification=verification,
        )  # fmt: skip
    except WebAuthnException:
        return False
    return True


def fido2_accepts(key: SoftPasskey, proof: dict[str, str], verification: bool) -> bool:
    from cryptography.exceptions import InvalidSignature
    from fido2 import cbor as fido_cbor
    from fido2.cose import CoseKey
    from fido2.server import Fido2Server
    from fido2.webauthn import AttestedCredentialData, PublicKeyCredentialRpEntity, UserVerificationRequirement

    server = Fido2Server(PublicKeyCredentialRpEntity(id=RP, name=RP), verify_origin=lambda origin: origin in ORIGINS)
    held = AttestedCredentialData.create(bytes(16), key.credential, CoseKey.parse(fido_cbor.decode(key.cose())))
    wanted = UserVerificationRequirement.REQUIRED if verification else UserVerificationRequirement.DISCOURAGED
    state = {"challenge": base64url(challenge(SIGNED)), "user_verification": wanted}
    response = {
        "clientDataJSON": proof["client_data"], "authenticatorData": proof["authenticator_data"],
        "signature": proof["signature"],
    }  # fmt: skip
    try:
        server.authenticate_complete(
            state, [held], {"id": proof["credential"], "rawId": proof["credential"], "response": response}
        )
    except (ValueError, InvalidSignature):
        return False
    return True


odd = st.sampled_from([None, 0, 1, True, False, "", "x", [], {}, "webauthn.get", "webauthn.create", ORIGIN, "null"])
clients = st.dictionaries(
    st.sampled_from(["type", "challenge", "origin", "crossOrigin", "topOrigin", "extra", "tokenBinding"]),
    odd,
    max_size=2,
)
FLAGS = [UP, UP | UV, UP, UP | UV, UV, 0, UP | BE, UP | BS, UP | UV | BE | BS, UP | 2, UP | 32, UP | ED, UP | AT]


@pytest.mark.promise("3.5")
def test_what_we_accept_the_verifiers_of_others_accept() -> None:
    pytest.importorskip("webauthn", reason="py_webauthn is not installed")
    pytest.importorskip("fido2", reason="python-fido2 is not installed")
    seen = Counter[str]()

    @given(
        key=st.sampled_from([KEY, ES]), client=st.just({}) | clients, flags=st.sampled_from(FLAGS),
        tail=st.sampled_from([b"", b"", b"", b"\0", b"\xa0", PROTECTED]), rp=st.sampled_from([RP, RP, RP, "localhost"]),
        origin=st.sampled_from([*ORIGINS, "http://localhost:8799"]), counter=st.sampled_from([0, 3, 4, 5]),
        before=st.sampled_from([0, 0, 4]), verification=st.booleans(), spoilt=st.sampled_from([False, False, True]),
    )  # fmt: skip
    def compare(
        key: SoftPasskey, client: Any, flags: int, tail: bytes, rp: str, origin: str, counter: int, before: int,
        verification: bool, spoilt: bool,
    ) -> None:  # fmt: skip
        proof = key.get(SIGNED, client=client, flags=flags, tail=tail, rp=rp, origin=origin, counter=counter)
        if spoilt:
            proof["signature"] = base64url(key.sign(b"something else"))
        try:
            judged(key.enrolled(), proof, counter=before, verification=verification)
        except Unproven as refusal:
            seen[refusal.code] += 1
            return
        seen["accepted"] += 1
        assert py_webauthn_accepts(key, proof, verification, before)
        assert fido2_accepts(key, proof, verification)

    compare()
    assert seen["accepted"] >= 3 and len(seen) >= 5, seen


@pytest.mark.promise("3.5")
@pytest.mark.parametrize(
    "name",
    ["in a frame", "below another page", "reserved bit 1", "reserved bit 5", "a key twice", "became copyable"],
)
def test_what_the_verifiers_of_others_let_pass_is_refused_here(name: str) -> None:
    """Shows that the table asks for more than they do; whichever of them learns it is welcome."""
    [row] = [row for row in ROWS if row.name == name]
    assert refused(row.run) == row.code


# ---- published vectors ----------------------------------------------------------------------------------------------


@pytest.mark.promise("3.5")
def test_wycheproof_is_judged_as_published() -> None:
    accepted = tried = 0
    for group in published("wycheproof-ed25519.json.gz")["testGroups"]:
        credential = raw_credential(bytes.fromhex(group["publicKey"]["pk"]))
        for case in group["tests"]:
            proof = {"kind": "raw", "credential": credential.id, "signature": base64url(bytes.fromhex(case["sig"]))}
            try:
                judged(credential, proof, bytes.fromhex(case["msg"]))
                verdict = True
            except Unproven as refusal:
                assert refusal.code == "bad_signature"
                verdict = False
            assert verdict is (case["result"] == "valid"), case["tcId"]
            accepted, tried = accepted + verdict, tried + 1
    assert (accepted, tried) == (88, 151)


@pytest.mark.promise("3.5")
def test_of_signatures_that_verifiers_disagree_about_only_the_honest_one_is_accepted() -> None:
    codes = Counter[str]()
    for case in published("cctv-ed25519.json.gz")["vectors"]:
        try:
            credential = raw_credential(public := bytes.fromhex(case["key"]))
            proof = {"kind": "raw", "credential": credential.id, "signature": base64url(bytes.fromhex(case["sig"]))}
            assert judged(credential, proof, case["msg"].encode()).credential == SoftRaw.name(public)
            assert not case["flags"], case["number"]
            codes["accepted"] += 1
        except Unproven as refusal:
            codes[refusal.code] += 1
    assert codes["accepted"] == 1 and codes.total() == 914 and set(codes) == {"accepted", "weak_key", "bad_signature"}


@pytest.mark.promise("3.5")
def test_weak_keys_are_never_enrolled_and_never_verify() -> None:
    vectors = published("ed25519-weak-keys.json")
    for one in vectors["keys"]:
        public = bytes.fromhex(one["public_key"])
        assert refused(lambda public=public: raw_credential(public)) == "weak_key", one["name"]
        held = Credential(SoftRaw.name(public), "raw", -8, base64url(public))
        forged = base64url(bytes.fromhex(vectors["forgery"]["signature"]))
        proof = {"kind": "raw", "credential": held.id, "signature": forged}
        assert refused(lambda held=held, proof=proof: judged(held, proof)) == "weak_key", one["name"]


def derived(salt: int, size: int) -> bytes:
    """The W3C's recipe for its example "Packed Attestation with Ed25519 Credential": HKDF-SHA-256."""
    key = hmac.digest(bytes([salt]), b"WebAuthn test vectors", "sha256")
    return hmac.digest(key, b"packed.EdDSA\1", "sha256")[:size]


@pytest.mark.promise("3.5")
def test_the_example_of_the_w3c_enrols_and_signs() -> None:
    """Made here from the published recipe, byte for byte as the specification prints it."""
    key = SoftPasskey(derived(1, 32), credential=derived(5, 32))
    extra = "clientDataJSON may be extended with additional fields in the future, such as this: "
    client = {"extraData": extra + base64url(derived(3, 16))}
    where = {"origin": "https://example.org", "rp": "example.org"}
    answer = key.create(derived(0, 32), client=client, flags=UP | AT, aaguid=derived(4, 16), **where)
    made = register(
        answer, challenge=derived(0, 32), origins={"https://example.org"}, rp_id="example.org", verification=False
    )
    said = webauthn.parse(unbase64url(answer["authenticator_data"]))
    assert made.id == base64url(derived(5, 32)) and not said.flags & UV
    ours = json.loads(unbase64url(answer["client_data"]))
    assert ours["challenge"] == "qKv52r3GsN9jRms5vanoo0o04YUzelnxxXmZBnbTs70"
    published_ = published("webauthn-l3-packed-eddsa.json")
    assert unbase64url(answer["client_data"]).hex() == published_["registration"]["client_data_json"]
    assert unbase64url(answer["authenticator_data"]).hex() == published_["registration"]["authenticator_data"]
    signed = {name: bytes.fromhex(text) for name, text in published_["authentication"].items()}
    webauthn.check_client(signed["client_data_json"], webauthn.GET, derived(9, 32), {"https://example.org"})
    data = webauthn.parse(signed["authenticator_data"])
    assert refused(lambda: webauthn.check_flags(data, "example.org", True)) == "user_not_verified"
    webauthn.check_flags(data, "example.org", False)
    assert key.sign(webauthn.message(signed["client_data_json"], signed["authenticator_data"])) == signed["signature"]


@pytest.mark.promise("3.5")
@pytest.mark.parametrize("alg", ["-8", "-7"])
def test_what_chromium_sent_enrols_and_signs(alg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = published("chromium-virtual-authenticator.json")["cases"][alg]
    made, seen = {name: bytes.fromhex(text) for name, text in case["registration"].items()}, case["authentication"]
    asked = dict(origins={"http://localhost:8765"}, rp_id="localhost", algs=ALGORITHMS)
    answer = {
        "client_data": base64url(made["client_data_json"]), "authenticator_data": base64url(made["authenticator_data"]),
    }  # fmt: skip
    credential = register(answer, challenge=made["challenge"], **asked)
    assert unbase64url(credential.public).hex() == case["public_key"] and credential.alg == int(alg)
    proof = {
        "kind": "webauthn",
        "credential": credential.id,
        "signature": base64url(bytes.fromhex(seen["signature"])),
    } | {
        name: base64url(bytes.fromhex(seen[f"{name}_json" if name == "client_data" else name]))
        for name in ("client_data", "authenticator_data")
    }
    monkeypatch.setattr("amends.runtime.gate.proof.challenge", lambda signed: bytes.fromhex(seen["challenge"]))
    shown = verify(credential, proof, b"whatever has this challenge", counter=credential.counter, **asked)
    assert shown == Verified(credential.id, True, True, 2)
    assert refused(lambda: verify(credential, proof, b"", counter=2, **asked)) == "counter_went_back"


def foreign_ssh(case: dict[str, Any], message: bytes, namespace: str, verification: bool) -> str:
    """What the rules say of a signature that was made for another application than ours."""
    from amends.runtime.gate.proof import _check_signature

    try:
        signature = sshsig.parse(bytes.fromhex(case["sshsig_blob"]))
        key = bytes.fromhex(case["public_key_blob"])
        sshsig.check(signature, key=key, namespace=namespace, verification=verification)
        _check_signature(-8, sshsig.parse_key(key).public, sshsig.signed(signature, message), signature.raw)
        if case.get("application") is not None and case["application"] != sshsig.parse_key(key).application:
            raise Unproven("application_mismatch")
    except Unproven as refusal:
        return refusal.code
    return "accept"


@pytest.mark.promise("3.5")
def test_signatures_of_openssh_are_judged_as_published() -> None:
    vectors = published("openssh-sshsig.json")
    message = bytes.fromhex(vectors["message"])
    for name, case in vectors["cases"].items():
        assert foreign_ssh(case, message, vectors["namespace"], False) == case["expect"], name
    read = sshsig.parse(bytes.fromhex(vectors["cases"]["ed25519_sk"]["sshsig_blob"]))
    assert (read.flags, read.counter) == (1, 0x12345678)


RENAMED = {"rp_id_mismatch": "application_mismatch", "bad_sshsig": "reserved_flags"}


@pytest.mark.promise("3.5")
def test_signatures_of_a_soft_security_key_are_judged_as_published() -> None:
    vectors = published("own-sshsig.json")
    for case in vectors["cases"]:
        verification = case.get("policy", {}).get("require_uv", False)
        code = foreign_ssh(case, bytes.fromhex(vectors["message"]), vectors["namespace"], verification)
        assert code in (case["expect"], RENAMED.get(case["expect"])), case["name"]


def test_our_own_vectors_are_judged_as_they_say() -> None:
    """tests/vectors/proofs.json: for whoever writes another verifier. Made by make_proofs.py, which is asked too."""
    rows = json.loads((Path(__file__).parent / "vectors" / "proofs.json").read_text())
    codes = Counter[str]()
    for row in rows["cases"]:
        credential = Credential(**row["credential"] | {"roles": tuple(row["credential"].get("roles", ()))})
        asked = row["asked"]
        try:
            shown = verify(
                credential, row["proof"], bytes.fromhex(row["signed"]), origins=set(asked["origins"]),
                rp_id=asked["rp_id"], algs=set(asked["algs"]), counter=asked["counter"],
                verification=asked["verification"],
            )  # fmt: skip
            code = "accepted"
            assert [shown.present, shown.verified, shown.counter] == row["shows"]
        except Unproven as refusal:
            code = refusal.code
        assert code == row["expect"], row["name"]
        codes[code] += 1
    assert codes["accepted"] >= 5 and len(codes) >= 12


def test_the_vectors_are_what_their_maker_makes() -> None:
    folder = Path(__file__).parent / "vectors"
    made = subprocess.run([sys.executable, str(folder / "make_proofs.py"), "--check"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


# ---- the real ssh-keygen --------------------------------------------------------------------------------------------


def ssh_keygen(*words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    from shutil import which

    if which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    return subprocess.run(["ssh-keygen", *map(str, words)], capture_output=True, text=True, timeout=60, **more)


@pytest.mark.promise("3.5")
@pytest.mark.parametrize("hash", ["sha512", "sha256"])
def test_a_plain_key_signs_with_ssh_keygen_itself(tmp_path: Path, hash: str) -> None:
    key, request = tmp_path / "key", tmp_path / "request"
    request.write_bytes(SIGNED)
    ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", key, check=True)
    ssh_keygen("-Y", "sign", "-f", key, "-n", "approval@amends", "-O", f"hashalg={hash}", request, check=True)
    text = request.with_suffix(".sig").read_text()
    credential = ssh_credential(key.with_suffix(".pub").read_text())
    assert level_of(credential, judged(credential, ssh_proof(text))) == FILE
    assert sshsig.armour(sshsig.unarmour(text)) == text
    assert refused(lambda: judged(credential, ssh_proof(text), DENIED)) == "bad_signature"
    assert ssh_proof(text.replace("\n", "\r\n")) == ssh_proof(text)


@pytest.mark.promise("3.5")
@pytest.mark.parametrize(
    ("flags", "verdict"),
    [(1, PRESENT), (5, VERIFIED), (0, "user_not_present"), (4, "user_not_present"), (0x81, "reserved_flags")],
)
def test_a_security_key_signs_through_ssh_keygen_and_what_nobody_touched_is_refused(
    tmp_path: Path, flags: int, verdict: Any
) -> None:
    request = tmp_path / "request"
    request.write_bytes(SIGNED)
    with SoftAgent(tmp_path, SoftSsh(application="ssh:amends"), flags=flags) as agent:
        done = ssh_keygen("-Y", "sign", "-f", agent.public, "-n", "approval@amends", request, env=agent.env)
    assert agent.asked == 1, done.stderr
    credential, proof = ssh_credential(agent.key.line), ssh_proof(request.with_suffix(".sig").read_text())
    if isinstance(verdict, int):
        assert level_of(credential, judged(credential, proof)) == verdict
    else:
        assert refused(lambda: judged(credential, proof)) == verdict


@pytest.mark.promise("3.5")
def test_a_signature_for_another_purpose_is_none_for_this_one(tmp_path: Path) -> None:
    key, request = tmp_path / "key", tmp_path / "request"
    request.write_bytes(SIGNED)
    ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", key, check=True)
    ssh_keygen("-Y", "sign", "-f", key, "-n", "file", request, check=True)
    credential = ssh_credential(key.with_suffix(".pub").read_text())
    proof = ssh_proof(request.with_suffix(".sig").read_text())
    assert refused(lambda: judged(credential, proof)) == "namespace_mismatch"


@pytest.mark.parametrize(
    "text",
    ["", "-----BEGIN SSH SIGNATURE-----\n-----END SSH SIGNATURE-----\n", "-----BEGIN SSH SIGNATURE-----\nAB==\n",
     "-----BEGIN SSH SIGNATURE-----\nAB==\n-----END SSH SIGNATURE-----\n",
     "-----BEGIN SSH SIGNATURE-----\n" + "A" * 80 + "\n-----END SSH SIGNATURE-----\n",
     "x-----BEGIN SSH SIGNATURE-----\nAA==\n-----END SSH SIGNATURE-----\n",
     "-----BEGIN SSH SIGNATURE-----\nAA==\n-----END SSH SIGNATURE-----\n\n"],
)  # fmt: skip
def test_what_is_not_a_signature_file_is_refused_as_such(text: str) -> None:
    assert refused(lambda: ssh_proof(text)) == "bad_sshsig"
