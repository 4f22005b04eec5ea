"""One saga is handed out: whoever gets it sees that it is whole, and no changed byte of it passes."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from disclosing import (
    amends,
    anchored,
    both,
    by_script,
    changed,
    codes,
    identity_here,
    order,
    proved,
    step,
)
from log_contract import Ledger, done, ended, facts, intended, opened

from amends import AgentKit, saga_scope
from amends.cli import proofs
from amends.store import note
from amends.store.chain import Draft
from amends.store.compact import compact
from amends.store.disclosure import OUTSIDE, QUORUM, SIGNED, check, document_of, prove
from amends.store.entry import leaf, opening, parse
from amends.store.errors import BadValue, Malformed, NotFound, Refused
from amends.store.facts import COPIED
from amends.store.merkle import Peaks, check_inclusion, inclusion_proof
from amends.store.redact import redact
from amends.store.sqlite import SqliteLog, open_read
from amends.store.tlog_proof import parse_tlog_proof, tlog_proof
from amends.store.trust import parse_policy

SEED = 20260801
GREETING = "Grüße".encode()  # stands in the arguments, and nowhere else


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A home in which three orders have ended, the second one with a saga inside it."""
    kit = AgentKit("shop", home=tmp_path / "home")
    for number in range(3):
        order(kit, f"order-{number}", inside="packing" if number == 1 else "")
    kit.close()
    yield tmp_path


def again(tmp_path: Path) -> AgentKit:
    return AgentKit("shop", home=tmp_path / "home")


# ---- what is handed out ---------------------------------------------------------------------------------------------


@pytest.mark.promise("6.8")
def test_a_saga_is_disclosed_whole_with_what_ran_inside_it_and_checks_without_a_home(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = proved(device, "order-1")
    checked, report = both(text, device)
    assert (checked.verdict, checked.level, report.verdict()) == ("INTACT", SIGNED, "INTACT")
    assert {entry.kind for entry in checked.records} >= {"saga.opened", "saga.joined", "step.done", "saga.ended"}
    assert len({entry.saga for entry in checked.records}) == 2 and checked.openings[1:] == (0, 0)
    assert any(checked.origin in told for told in checked.not_proved)
    monkeypatch.setenv("AMENDS_HOME", str(device / "none"))
    file = device / "disclosure-0.json"
    said = amends("check-proof", file, "--json")
    assert said.exit_code == 0 and json.loads(said.output)["verdict"] == "INTACT"
    assert {"verdict", "level", "size", "root", "findings", "not_proved"} <= json.loads(said.output).keys()
    assert "Grüße" in amends("check-proof", file).output or "shop.charge" in amends("check-proof", file).output
    assert not (device / "none").exists()
    script = by_script(file)
    assert script.returncode == 0 and "INTACT" in script.stdout, script.stdout + script.stderr


@pytest.mark.promise("6.8")
def test_the_holder_chooses_what_is_shown(device: Path) -> None:
    closed, whole = proved(device, "order-0", "--closed"), proved(device, "order-0")
    args = proved(device, "order-0", "--open", "result")
    assert GREETING in whole and GREETING not in closed and GREETING not in args and b"shop.charge-1" in args
    for text in (closed, args):
        checked, report = both(text, device)
        assert checked.verdict == report.verdict() == "INTACT"
        assert any("not shown" in told for told in checked.not_proved)
    assert check(closed).openings[0] == 0 < check(args).openings[0] < check(whole).openings[0]
    said = amends("prove", "order-0", "--open", "colour", "--out", device / "no.json")
    assert said.exit_code == 2 and "has no field" not in said.output.split("\n")[1] and "colour" in said.output
    assert not (device / "no.json").exists()


def test_a_large_value_is_shown_with_all_its_pieces_and_hidden_with_all_of_them(device: Path) -> None:
    kit = again(device)
    order(kit, "large", report="x" * 700_000)
    kit.close()
    shown, hidden = proved(device, "large", "--open", "args"), proved(device, "large", "--open", "result")
    assert shown.count(b"xxxxxxxxxx") > 60_000 and b"xxxxxxxxxx" not in hidden
    assert both(shown, device)[1].verdict() == both(hidden, device)[1].verdict() == "INTACT"


@pytest.mark.promise("6.8")
def test_that_openings_left_stands_in_the_log_before_they_leave(device: Path) -> None:
    text = proved(device, "order-0", "--to", "the auditor", "--by", "Ada")
    proved(device, "order-0", "--closed")
    kit = again(device)
    [made] = [record for record in kit.log.records() if record.entry.kind == COPIED]
    assert (made.entry.out, made.entry.event, made.entry.payload) == ("disclosure", sha256(text).hexdigest(), "plain")
    assert made.entry.upto == check(text).size and b"the auditor" in (made.blob or b"")
    kit.close()


def test_a_saga_that_is_open_or_unknown_is_not_proved(device: Path) -> None:
    kit = again(device)
    with saga_scope("running", kit=kit) as saga:
        step(saga, "shop.charge", {"amount_minor": 1})
        said = amends("prove", "running")
        assert said.exit_code == 6 and "is open" in said.output
    assert amends("prove", "running", "--closed").exit_code == 0
    assert amends("prove", "nobody").exit_code == 2
    assert amends("prove", "running", "--closed", "--open", "args").exit_code == 2
    (device / "there.json").write_text("x")
    assert amends("prove", "running", "--out", device / "there.json").exit_code == 2
    kit.close()


def test_what_followed_a_saga_comes_along_or_is_named(device: Path) -> None:
    kit = again(device)
    assert kit.undo("order-0", by="Ada", reason="wrong order").clean
    kit.close()
    whole, alone = check(proved(device, "order-0")), check(proved(device, "order-0", "--alone"))
    assert any(entry.kind == "undo.done" for entry in whole.records)
    assert not any(entry.kind == "undo.done" for entry in alone.records)
    assert alone.verdict == "INTACT" and any("it is not disclosed" in told for told in alone.not_proved)
    assert both(proved(device, "order-0", "--alone"), device)[1].verdict() == "INTACT"


def test_votes_come_along_if_they_are_asked_for(device: Path) -> None:
    kit = again(device)
    with saga_scope("asked", kit=kit) as saga:
        step(saga, "shop.charge", {"amount_minor": 1})
    header = next(row.saga for row in kit.log.sagas())
    late = {"of": header, "step": 1, "request": "0" * 64, "out": "approve", "why": "decided", "person": "p", "level": 1}
    kit.log.commit(lambda view, now: [Draft("vote.cast", late, (b'{"by":"Ann"}',), up=True)])
    kit.close()
    without, with_votes = check(proved(device, "asked")), check(text := proved(device, "asked", "--with-votes"))
    assert without.verdict == with_votes.verdict == both(text, device)[1].verdict() == "INTACT"
    assert b'"by\\":\\"Ann' in text and any("all votes" in told for told in with_votes.not_proved)


# ---- old heads ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.8")
def test_whoever_kept_an_old_head_sees_that_the_log_has_only_grown(device: Path) -> None:
    old = anchored()
    kit = again(device)
    for number in range(40):
        order(kit, f"later-{number}")
    kit.close()
    (device / "old").write_bytes(old)
    text = proved(device, "later-3", "--since", device / "old")
    checked, report = both(text, device, (("old", old),))
    assert (checked.verdict, checked.level) == ("INTACT", OUTSIDE) == (report.verdict(), report.level)
    assert checked.since == note.parse_checkpoint(old.split(b"\n\n")[0] + b"\n").size < checked.size
    without, script = both(proved(device, "later-3"), device, (("old", old),))
    assert codes(without) == ["E_ANCHOR"] and without.verdict == script.verdict() == "UNVERIFIED"
    said = amends("check-proof", device / "disclosure-0.json", "--anchor", device / "old")
    assert said.exit_code == 0 and OUTSIDE in said.output
    assert by_script(device / "disclosure-0.json", "--anchor", device / "old").returncode == 0


@pytest.mark.promise("6.8")
def test_an_old_head_of_another_history_is_a_fork(device: Path) -> None:
    identity, text = identity_here(), proved(device, "order-1")
    head = document_of(text).checkpoint.split("\n")
    for size, root in ((int(head[1]), bytes(32)), (5, bytes(32))):
        forked = identity.note(size, root, identity.sign(size, root))
        checked, report = both(text, device, (("kept", forked),))
        assert checked.verdict == report.verdict() == ("FORKED" if size > 5 else "UNVERIFIED")
        (device / "kept").write_bytes(forked)
        claimed = changed(text, lambda d, forked=forked: d.update(consistency={"note": forked.decode(), "proof": []}))
        assert both(claimed, device)[0].exit and both(claimed, device)[1].verdict() != "INTACT"


def test_a_key_and_a_policy_say_whose_log_it_is(device: Path) -> None:
    text, identity = proved(device, "order-0"), identity_here()
    key = note.parse_vkey(identity.log_vkey)
    other = note.vkey("amends.local/other", note.public_of(bytes(32)))
    assert check(text, key=key).verdict == "INTACT"
    assert not any("Whose log" in told for told in check(text, key=key).not_proved)
    assert codes(check(text, key=note.parse_vkey(other))) == ["E_IDENTITY"]
    witness = note.vkey("wit", note.public_of(bytes(32)), note.COSIGNATURE)
    policy = parse_policy(f"log {identity.log_vkey}\nwitness w {witness}\nquorum w\n")
    assert codes(check(text, policy=policy)) == ["E_QUORUM"]
    body = document_of(text).checkpoint.split("\n\n")[0].encode() + b"\n"
    line = note.cosign(body, "wit", bytes(32), 1764460800).decode()
    signed = changed(text, lambda d: d.update(checkpoint=d["checkpoint"] + line))
    assert (check(signed, policy=policy).verdict, check(signed, policy=policy).level) == ("INTACT", QUORUM)
    stranger = parse_policy(f"log {other}\nquorum none\n")
    assert codes(check(text, policy=stranger)) == ["E_STRANGE"]
    (device / "key").write_text(identity.log_vkey + "\n")
    (device / "policy").write_text(f"log {other}\nquorum none\n")
    file = device / "disclosure-0.json"
    assert amends("check-proof", file, "--key", device / "key").exit_code == 0
    assert amends("check-proof", file, "--policy", device / "policy").exit_code == 6
    assert amends("check-proof", file, "--key", "a+b+c").exit_code == 2
    assert amends("check-proof", device / "missing").exit_code == 2
    assert amends("check-proof", device / "key").exit_code == 7


# ---- what was destroyed ---------------------------------------------------------------------------------------------


@pytest.mark.promise("6.8")
def test_what_was_destroyed_comes_with_the_record_that_says_so(device: Path) -> None:
    kit = again(device)
    header = kit.log.sagas()[-1].saga
    place = next(r.entry.seq for r in kit.log.thread(header) if r.blob and GREETING in r.blob)
    redact(kit.log, [(place, 0)], basis="GDPR-17", by="Ada", note="asked for by Ann")
    kit.close()
    text = proved(device, "order-0")
    assert GREETING not in text and b"redaction.made" in text
    checked, report = both(text, device)
    assert checked.verdict == report.verdict() == "INTACT" and checked.openings[2] == 1
    assert any("were destroyed" in told for told in checked.not_proved)


@pytest.mark.promise("6.8")
def test_what_was_destroyed_and_is_shown_all_the_same_is_refused(device: Path) -> None:
    before = document_of(proved(device, "order-0"))
    kit = again(device)
    header = kit.log.sagas()[-1].saga
    place = next(r.entry.seq for r in kit.log.thread(header) if r.blob and GREETING in r.blob)
    redact(kit.log, [(place, 0)], basis="GDPR-17", by="Ada")
    kit.close()
    kept = {parse(item.line.encode()).seq: item.open for item in before.entries}

    def put_back(document: dict[str, Any]) -> None:
        for item in document["entries"]:
            if parse(item["line"].encode()).seq == place:
                item["open"] = list(kept[place])

    checked, report = both(changed(proved(device, "order-0"), put_back), device)
    assert codes(checked) == ["E_REDACT_INCOMPLETE"] and report.verdict() == "TAMPERED"


@pytest.mark.promise("6.8")
def test_of_a_sealed_log_fields_are_shown_with_the_key_and_a_forgotten_saga_says_that_it_is(
    device: Path,
) -> None:
    source = f"file:{device / 'owner'}"
    assert amends("seal", "--new-key", device / "owner", "--by", "Ada").exit_code == 0
    assert amends("prove", "order-1").exit_code == 3 and amends("prove", "order-1", "--closed").exit_code == 0
    text = proved(device, "order-1", "--key", source)
    assert GREETING in text and both(text, device)[0].verdict == both(text, device)[1].verdict() == "INTACT"
    assert amends("forget", "order-0", "--key", source, "--by", "Ada", "--reason", "asked").exit_code == 0
    gone = proved(device, "order-0", "--key", source)
    checked, report = both(gone, device)
    assert GREETING not in gone and checked.verdict == report.verdict() == "INTACT"
    assert checked.openings[2] > 0 and b"seal.forgotten" in gone and b"asked" in gone
    assert any("were destroyed" in told for told in checked.not_proved)


@pytest.mark.promise("6.8")
def test_a_saga_is_proved_in_a_log_of_which_others_were_removed(tmp_path: Path) -> None:
    AgentKit("shop", home=tmp_path / "home").close()
    identity = identity_here()
    log = SqliteLog(tmp_path / "other.db", Ledger(), identity)
    names = [f"s{number}" for number in range(160)]
    for name in names:
        log.commit(facts(opened(name, b'{"name":"x"}'), intended(name, 1), done(name, 1), ended(name)))
    log.sign_head()
    before = anchored()
    gone = names[3:60] + names[61:90]
    removed = compact(log, gone, within_ms=1, use=lambda name: {"sagas": 1}, by="Ada")
    assert removed.entries == 4 * len(gone)
    log.sign_head()
    for name in ("s2", "s60", "s159"):
        with open_peek(log) as reader:
            text = prove(log, reader, anchored(), [name], since=before).text
        checked, report = both(text, tmp_path, (("before", before),))
        assert (checked.verdict, checked.level) == (report.verdict(), report.level) == ("INTACT", OUTSIDE)
    with open_peek(log) as reader, pytest.raises(NotFound):
        prove(log, reader, anchored(), ["s30"])
    said = proofs._gone(SimpleNamespace(log=log), NotFound("There is no saga s30."))  # type: ignore[arg-type]
    assert said.code == "compacted" and "by record" in said.message
    log.close()


# ---- tampering ------------------------------------------------------------------------------------------------------


def _drop(place: int) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["entries"].pop(place)


def _swap(document: dict[str, Any]) -> None:
    rows = document["entries"]
    rows[1], rows[2] = rows[2], rows[1]


def _edit(document: dict[str, Any]) -> None:
    item = document["entries"][1]
    item["line"] = item["line"].replace("shop.charge", "shop.chargf")


def _close_gap(document: dict[str, Any]) -> None:
    """A record is withheld and the numbers after it are made to count up again."""
    del document["entries"][2]
    for item in document["entries"][2:]:
        n = parse(item["line"].encode()).n
        item["line"] = item["line"].replace(f'"n":{n},', f'"n":{n - 1},')


def _opening(document: dict[str, Any]) -> None:
    item = next(item for item in document["entries"] if "amount_minor" in str(item.get("open")))
    item["open"] = [line.replace("4200", "4300") for line in item["open"]]


def _other_opening(document: dict[str, Any]) -> None:
    item = next(item for item in document["entries"] if item.get("open"))
    item["open"] = [opening(b"A" * 22, b'{"args":{}}').decode()]


def _twice(document: dict[str, Any]) -> None:
    item = next(item for item in document["entries"] if item.get("open"))
    item["open"] = item["open"] * 2


def _proof(document: dict[str, Any]) -> None:
    proof = document["entries"][1]["proof"]
    proof[0], proof[1] = proof[1], proof[0]


def _longer_proof(document: dict[str, Any]) -> None:
    document["entries"][1]["proof"].append(base64.b64encode(bytes(32)).decode())


def _root(document: dict[str, Any]) -> None:
    lines = document["checkpoint"].split("\n")
    lines[2] = base64.b64encode(bytes(32)).decode()
    document["checkpoint"] = "\n".join(lines)


def _size(document: dict[str, Any]) -> None:
    lines = document["checkpoint"].split("\n")
    lines[1] = str(int(lines[1]) + 1)
    document["checkpoint"] = "\n".join(lines)


def _resigned(document: dict[str, Any]) -> None:
    """Signed by a stranger under the log's name."""
    body = document["checkpoint"].split("\n\n")[0] + "\n"
    document["checkpoint"] = note.sign_note(body.encode(), body.split("\n")[0], bytes(32)).decode()


def _other_genesis(document: dict[str, Any]) -> None:
    """A stranger's key in the genesis, and the head signed with it."""
    public = note.public_of(bytes(32))
    line = document["genesis"]["line"]
    document["genesis"]["line"] = line.replace(parse(line.encode()).log, public.hex())
    from amends.store.keys import origin_of

    size, root = document["checkpoint"].split("\n")[1:3]
    body = note.checkpoint_body(origin_of(public), int(size), base64.b64decode(root))
    document["checkpoint"] = note.sign_note(body, origin_of(public), bytes(32)).decode()


def _remark(document: dict[str, Any]) -> None:
    document["remark"] = "trust me"


def _remark_inside(document: dict[str, Any]) -> None:
    document["entries"][0]["remark"] = "trust me"


def _other_saga(document: dict[str, Any]) -> None:
    document["saga"] = "a" * 26


def _beside(document: dict[str, Any]) -> None:
    """The genesis told a second time, as if it were about the saga."""
    document["beside"] = [document["genesis"]]


def _end_twice(document: dict[str, Any]) -> None:
    document["entries"].append(document["entries"][-1])


def _moved(document: dict[str, Any]) -> None:
    document["beside"] = [document["entries"].pop()]


TAMPERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "the first record is withheld": (_drop(0), "E_ORDINAL"),
    "a record in the middle is withheld": (_drop(2), "E_ORDINAL"),
    "the last record is withheld": (_drop(-1), "E_ENDED"),
    "the last record is moved aside": (_moved, "E_ENDED"),
    "a record is withheld and the rest renumbered": (_close_gap, "E_PROOF"),
    "two records are swapped": (_swap, "E_ORDER"),
    "the end stands twice": (_end_twice, "E_ORDER"),
    "a record is edited": (_edit, "E_PROOF"),
    "an opening is edited": (_opening, "E_OPENING"),
    "an opening is another one": (_other_opening, "E_OPENING"),
    "an opening is there twice": (_twice, "E_OPENING_EXTRA"),
    "a proof is shuffled": (_proof, "E_PROOF"),
    "a proof is longer": (_longer_proof, "E_PROOF"),
    "the root is another one": (_root, "E_SIGNATURE"),
    "the size is another one": (_size, "E_SIGNATURE"),
    "a stranger signed it": (_resigned, "E_UNSIGNED"),
    "a stranger's key is put into the genesis": (_other_genesis, "E_PROOF"),
    "there is a remark": (_remark, "E_DISCLOSURE"),
    "a record has a remark": (_remark_inside, "E_DISCLOSURE"),
    "it is said to be of another saga": (_other_saga, "E_ENDED"),
    "the genesis stands beside it": (_beside, "E_GENESIS"),
}


@pytest.mark.promise("6.8")
def test_no_tampering_by_hand_passes_either_verifier(device: Path) -> None:
    text = proved(device, "order-0")
    for name, (tamper, code) in TAMPERS.items():
        checked, report = both(changed(text, tamper), device)
        assert checked.verdict != "INTACT" and code in codes(checked), (name, codes(checked))
        assert report.verdict() != "INTACT", name
    assert len(TAMPERS) >= 13


@pytest.mark.promise("6.8")
def test_no_changed_byte_passes_either_verifier(device: Path) -> None:
    text, dice = proved(device, "order-1"), random.Random(SEED)
    print(f"seed {SEED}, {len(text)} bytes")
    same = 0
    for _ in range(150):
        place = dice.randrange(len(text))
        flipped = text[:place] + bytes([text[place] ^ 1 << dice.randrange(8)]) + text[place + 1 :]
        checked, report = both(flipped, device)
        if checked.verdict == "INTACT":
            assert document_of(flipped) == document_of(text), place
            same += 1
        else:
            assert report.verdict() != "INTACT", place
    print(f"{same} flips changed nothing that is said")
    assert same < 3


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"nonsense",
        b"\xff\xfe",
        b'{"format":"amends/disclosure/1"}',
        b'{"format":1,"format":2}',
        b"[" * 100_000,
        b'{"format":' + b"9" * 10_000 + b"}",
        b'{"format":"amends/disclosure/1","checkpoint":"\\ud800","saga":"a","genesis":{"line":"","proof":[]},'
        b'"entries":[{"line":"","proof":[]}]}',
    ],
)
def test_what_is_no_disclosure_is_malformed_and_nothing_worse(text: bytes, tmp_path: Path) -> None:
    checked, report = both(text, tmp_path)
    assert checked.verdict == "MALFORMED" and report.verdict() in ("MALFORMED", "TAMPERED")


def test_a_name_that_stands_twice_is_refused_wherever_it_stands(device: Path) -> None:
    text = proved(device, "order-0")
    for name in ("saga", "line", "proof", "checkpoint"):
        doubled = text.replace(f'"{name}":'.encode(), f'"{name}":"","{name}":'.encode(), 1)
        assert codes(check(doubled)) == ["E_DISCLOSURE"] and both(doubled, device)[1].verdict() == "MALFORMED"


# ---- the text of a proof for other tools ----------------------------------------------------------------------------


@pytest.mark.promise("6.8")
def test_each_record_has_a_proof_that_tools_of_others_read(device: Path) -> None:
    text = proved(device, "order-1", "--tlog-proofs", device / "proofs")
    checked = check(text)
    found = sorted((device / "proofs").glob("*.tlog-proof"))
    assert len(found) == len(checked.records) + 1
    for path in found:
        proof = parse_tlog_proof(path.read_bytes())
        line = path.with_suffix(".entry").read_bytes()
        head = note.parse_checkpoint(proof.checkpoint.split(b"\n\n")[0] + b"\n")
        assert check_inclusion(leaf(line), proof.seq, head.size, proof.proof, head.root)
        assert tlog_proof(proof.seq, proof.proof, proof.checkpoint) == path.read_bytes()


@pytest.mark.promise("6.8")
def test_proofs_are_written_and_refused_as_published(vectors: Path) -> None:
    known = json.loads((vectors / "tlog-proof.json").read_text())
    for case in known["marshal"]:
        hashes = tuple(sha256(text.encode()).digest() for text in case["hashes_of"])
        extra = None if case["extra"] is None else case["extra"].encode()
        text = tlog_proof(case["index"], hashes, case["checkpoint"].encode(), extra)
        assert parse_tlog_proof(text) == (case["index"], hashes, case["checkpoint"].encode(), extra)
        assert text.startswith(b"c2sp.org/tlog-proof@v1\n")
    for text, why in known["bad"]:
        with pytest.raises(Malformed):
            parse_tlog_proof(text.encode())
            pytest.fail(why)
    assert len(known["bad"]) == 7


# ---- the port -------------------------------------------------------------------------------------------------------


def test_a_proof_is_only_made_under_a_head_that_covers_the_saga(device: Path) -> None:
    kit = again(device)
    log: Any = kit.log
    first = log.sagas()[-1].saga
    identity = identity_here()
    tree = Peaks()
    tree.extend(leaf(record.line) for record in log.records(0, 7))
    early = identity.note(7, tree.root(), identity.sign(7, tree.root()))
    with open_peek(log) as reader:
        with pytest.raises(Refused) as refused:
            prove(log, reader, early, [first])
        assert refused.value.code == "not_anchored"
        with pytest.raises(NotFound):
            prove(log, reader, anchored(), ["nobody"])
        with pytest.raises(BadValue):
            prove(log, reader, anchored(), [first], since=identity.note(99, bytes(32), bytes(64)))
        assert inclusion_proof(reader, 0, 7)
    kit.close()


class open_peek:
    def __init__(self, log: Any) -> None:
        self._reader = open_read(log.path)

    def __enter__(self) -> Any:
        return self._reader

    def __exit__(self, *_: object) -> None:
        self._reader.close()


def test_sizes_are_what_the_page_says(device: Path) -> None:
    kit = again(device)
    for number in range(120):
        order(kit, f"more-{number}")
    kit.close()
    text = proved(device, "more-60", "--closed")
    checked = check(text)
    print(f"{len(checked.records)} records of {checked.size}: {len(text)} bytes closed")
    assert len(text) < 1500 * (len(checked.records) + 1)
