"""What a certificate says, rule by rule (runtime/SEMANTICS.md 10), as a file for others, and at the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import certify_alone
import pytest
from click.testing import CliRunner

from amends import AgentKit, Compensation, saga_scope
from amends.cli.main import main
from amends.runtime import certificate, retention, step
from amends.runtime.certificate import Given, NotVerified, certify, check
from amends.runtime.certify import (
    ALWAYS,
    BY_SAGA,
    CODES,
    INDETERMINATE,
    SAFE,
    UNSAFE,
    Finding,
    Judged,
    Prior,
    judge,
)
from amends.runtime.scope import SagaAborted
from amends.store import dsse, note
from amends.store.entry import ZERO, Entry, line_of
from amends.store.errors import Malformed
from amends.store.evidence import Evidence
from amends.store.home import Home
from amends.store.note import BadSignature

Fact = dict[str, Any]

# ---- the smallest logs -----------------------------------------------------------------------------------------------


def log_of(facts: Iterable[Fact]) -> list[Entry]:
    """Entries of facts, with places, counted; `seq` may be given where some are missing."""
    counts: dict[str, int] = {}
    made = [Entry(0, ZERO, 1, "log.opened", v=1, salt="s" * 22)]
    for fact in facts:
        seq = fact.pop("seq", made[-1].seq + 1)
        saga = fact.get("saga", "")
        if saga:
            counts[saga] = counts.get(saga, 0) + 1
            fact["n"] = counts[saga]
        salted = {} if "c" in fact else {"salt": "s" * 22}
        made.append(Entry(seq, ZERO, seq + 1, **fact, **salted))
    return made


def opened(saga: str = "a", driver: str = "d", **more: Any) -> Fact:
    return {"kind": "saga.opened", "saga": saga, "driver": driver, "fence": 1} | more


def of(kind: str, number: int = 1, saga: str = "a", **more: Any) -> Fact:
    return {"kind": kind, "saga": saga} | ({"step": number} if number else {}) | more


def intended(number: int = 1, saga: str = "a", sem: str = "compensable", **more: Any) -> Fact:
    return of("step.intended", number, saga, tool="pay", sem=sem, inv="declared", handler="pay.back") | more


def carried(ref: int, saga: str = "b", out: str = "done", **more: Any) -> Fact:
    return of("step.carried", 1, saga, tool="pay", sem="compensable", inv="declared", out=out, ref=ref) | more


UNWINDS, COMMITTED = of("saga.unwinding", 0, why="exception"), of("saga.ended", 0, out="committed")
UNDONE, CONTINUED = of("saga.ended", 0, out="compensated"), of("saga.ended", 0, out="continued")
DONE, LOST, FAILED = of("step.done"), of("step.lost"), of("step.failed")
UNDO, BACK, LANDED = of("undo.intended", scope="undo"), of("undo.done", out="done"), of("step.landed", out="done")
OPENING = ("0" * 64,)
ACCEPTED = of("step.accepted", c=OPENING)
ASKED = of("step.asked", tool="wipe", sem="irreversible", request="r" * 64, level=1, quorum=1, within_ms=9)
FOR_GOOD: Fact = {"tool": "wipe", "sem": "irreversible", "inv": "none"}
SAID: Fact = {"kind": "vote.cast", "of": "a", "step": 1, "request": "r" * 64, "person": "p1", "level": 1}
SPENT = of("step.intended", request="r" * 64, **FOR_GOOD)
TENTATIVE = intended(tool="tentative", resource="0" * 16, confirm="declared")


def probed(out: str) -> Fact:
    return of("step.probed", out=out)


def judged(*facts: Fact, **more: Any) -> Judged:
    """The verdict, which the program that knows nothing of amends has to share."""
    entries = log_of(dict(fact) for fact in facts)
    said = judge(entries, **more)
    if not more:
        told = certify_alone.verdict(line_of(entry) for entry in entries)
        assert told.verdict == said.verdict
        assert sorted(told.findings) == sorted((f.seq, f.saga, f.step, f.code) for f in said.findings)
        counts = said.counts._replace(open=0, compacted=0)._asdict()
        assert {word: count for word, count in counts.items() if count} == {w: n for w, n in told.counts.items() if n}
    return said


RULES: list[tuple[str, str, Sequence[Fact], str]] = [
    # name, the one finding (or none), the log, what is counted
    ("committed", "", [opened(), intended(), DONE, COMMITTED], "committed"),
    ("compensated", "", [opened(), intended(), DONE, UNWINDS, UNDO, BACK, UNDONE], "compensated"),
    ("gone already", "", [opened(), intended(), DONE, UNWINDS, UNDO, of("undo.done", out="already"), UNDONE],
     "compensated"),
    ("accepted", "", [opened(), intended(), DONE, UNWINDS, ACCEPTED, UNDONE], "accepted"),
    ("accepted by nobody", "unnamed", [opened(), intended(), DONE, UNWINDS, of("step.accepted"), UNDONE], ""),
    ("failed", "", [opened(), intended(), FAILED, UNWINDS, UNDONE], "not_happened"),
    ("refused", "", [opened(), of("step.refused", tool="pay", sem="compensable"), UNWINDS, UNDONE], ""),
    ("reversible, told in one", "",
     [opened(), of("step.done", tool="put", sem="reversible", inv="declared"), COMMITTED], "committed"),
    ("stands in an undone saga", "standing", [opened(), intended(), DONE, UNWINDS, UNDONE], ""),
    ("orphaned", "orphaned", [opened(), intended(inv="none"), DONE, UNWINDS, UNDONE], ""),
    ("unknown", "unknown", [opened(), intended(), LOST, UNWINDS, UNDONE], ""),
    ("unknown and committed", "unknown", [opened(), intended(), LOST, COMMITTED], ""),
    ("cannot tell", "unknown", [opened(), intended(), LOST, probed("cannot_tell"), UNWINDS, UNDONE], ""),
    ("probed absent", "", [opened(), intended(), LOST, probed("absent"), UNWINDS, UNDONE], "not_happened by_probe"),
    ("probed present", "", [opened(), intended(), LOST, probed("present"), UNWINDS, UNDO, BACK, UNDONE],
     "compensated by_probe"),
    ("probed absent, landed after all", "standing",
     [opened(), intended(), LOST, probed("absent"), LANDED, UNWINDS, UNDONE], ""),
    ("undone though unknown", "", [opened(), intended(), LOST, UNWINDS, UNDO, BACK, UNDONE],
     "compensated by_compensation"),
    ("its undo was lost, and the world says it is gone", "",
     [opened(), intended(), LOST, UNWINDS, UNDO, of("undo.lost"), probed("absent"), of("undo.done", out="already"),
      UNDONE], "compensated by_probe"),
    ("landed after its compensation", "standing",
     [opened(), intended(), LOST, UNWINDS, UNDO, BACK, LANDED, UNDONE], ""),
    ("landed after its compensation, and undone again", "",
     [opened(), intended(), LOST, UNWINDS, UNDO, BACK, LANDED, of("undo.intended", scope="undo/late"), BACK, UNDONE],
     "compensated by_compensation"),
    ("answered late", "", [opened(), intended(), LOST, LANDED, COMMITTED], "committed by_answer"),
    ("accepted though unknown", "", [opened(), intended(), LOST, UNWINDS, ACCEPTED, UNDONE], "accepted by_person"),
    ("lost, then tried again and failed", "lost_then_failed",
     [opened(), intended(), LOST, intended(), FAILED, UNWINDS, UNDONE], ""),
    ("lost, then tried again and done", "", [opened(), intended(), LOST, intended(), DONE, COMMITTED],
     "committed by_answer"),
    ("one of two calls failed late", "lost_then_failed",
     [opened(), intended(), of("step.attempted", attempt=2), LOST, of("step.landed", out="failed"), UNWINDS, UNDONE],
     ""),
    ("the one call failed late", "", [opened(), intended(), LOST, of("step.landed", out="failed"), UNWINDS, UNDONE],
     "not_happened by_answer"),
    ("its compensation failed", "compensation_failed",
     [opened(), intended(), DONE, UNWINDS, UNDO, of("undo.failed"), UNDONE], ""),
    ("its compensation's answer was lost", "undo_unknown",
     [opened(), intended(), DONE, UNWINDS, UNDO, of("undo.lost"), UNDONE], ""),
    ("a fallback hides its primary", "fallback_hidden",
     [opened(), intended(), LOST, intended(2, scope="fallback"), of("step.done", 2), probed("present"), COMMITTED], ""),
    ("a fallback of what had not happened", "",
     [opened(), intended(), FAILED, intended(2, scope="fallback"), of("step.done", 2), COMMITTED],
     "committed not_happened"),
    ("a primary that was taken back", "",
     [opened(), intended(), LOST, intended(2, scope="fallback"), of("step.done", 2), UNWINDS, UNDO, BACK,
      of("undo.intended", 2, scope="undo"), of("undo.done", 2, out="done"), UNDONE], "by_compensation"),
    ("another tool's fallback", "",
     [opened(), intended(tool="mail"), LOST, intended(2, scope="fallback"), of("step.done", 2), probed("present"),
      COMMITTED], "by_probe"),
    ("irreversible and approved", "", [opened(), ASKED, SAID | {"out": "approve"}, SPENT, DONE, COMMITTED], "approved"),
    ("irreversible, nobody asked", "not_approved", [opened(), of("step.intended", **FOR_GOOD), DONE, COMMITTED], ""),
    ("irreversible, denied", "not_approved",
     [opened(), ASKED, SAID | {"out": "approve"}, SAID | {"out": "deny", "person": "p2"}, SPENT, DONE, COMMITTED], ""),
    ("irreversible, a vote too late", "not_approved",
     [opened(), ASKED, SAID | {"out": "approve", "why": "late"}, SPENT, DONE, COMMITTED], ""),
    ("irreversible, too few people", "not_approved",
     [opened(), ASKED | {"quorum": 2}, SAID | {"out": "approve"}, SAID | {"out": "approve"}, SPENT, DONE, COMMITTED],
     ""),
    ("irreversible, too weak a proof", "not_approved",
     [opened(), ASKED | {"level": 3}, SAID | {"out": "approve", "level": 2}, SPENT, DONE, COMMITTED], ""),
    ("irreversible, a yes to another step", "not_approved",
     [opened(), ASKED, SAID | {"out": "approve", "step": 2}, SPENT, DONE, COMMITTED], ""),
    ("irreversible, asked and not spent", "not_approved",
     [opened(), ASKED, SAID | {"out": "approve"}, of("step.intended", **FOR_GOOD), DONE, COMMITTED], ""),
    ("irreversible and undone", "orphaned",
     [opened(), ASKED, SAID | {"out": "approve"}, SPENT, DONE, UNWINDS, UNDONE], ""),
    ("irreversible, undone and accepted", "",
     [opened(), ASKED, SAID | {"out": "approve"}, SPENT, DONE, UNWINDS, ACCEPTED, UNDONE], "accepted"),
    ("a broken glass", "review_open", [opened(), ASKED, SAID | {"out": "break_glass"}, SPENT, DONE, COMMITTED],
     "approved break_glass"),
    ("a broken glass that was looked at", "",
     [opened(), ASKED, SAID | {"out": "break_glass"}, SPENT, DONE, COMMITTED,
      {"kind": "review.closed", "ref": 3, "person": "p2"}], "approved break_glass"),
    ("a broken glass for what was then accepted", "",
     [opened(), ASKED, SAID | {"out": "break_glass"}, SPENT, DONE, UNWINDS, ACCEPTED, UNDONE], "accepted"),
    ("tentative and confirmed", "",
     [opened(), TENTATIVE, DONE, of("saga.concluding", 0), of("confirm.intended"), of("confirm.done", out="done"),
      COMMITTED], "committed"),
    ("tentative and cancelled", "", [opened(), TENTATIVE, DONE, UNWINDS, UNDO, BACK, UNDONE], "compensated"),
    ("tentative and forgotten", "tentative", [opened(), TENTATIVE, DONE, COMMITTED], ""),
    ("tentative, its confirmation lost", "tentative",
     [opened(), TENTATIVE, DONE, of("saga.concluding", 0), of("confirm.intended"), of("confirm.lost"),
      of("saga.released", 0)], ""),
    ("running", "running", [opened(), intended(), DONE], ""),
    ("running, nothing stands", "", [opened(), intended(), FAILED], "not_happened"),
    ("left by its driver", "standing", [opened(), intended(), DONE, UNWINDS, of("saga.released", 0)], ""),
    ("escalated while the rest is undone", "orphaned",
     [opened(), intended(inv="none"), DONE, UNWINDS, of("saga.escalated", why="orphaned")], ""),
    ("carried and undone", "",
     [opened(), intended(), DONE, COMMITTED, opened("b"), carried(2), UNWINDS | {"saga": "b"}, UNDO | {"saga": "b"},
      BACK | {"saga": "b"}, UNDONE | {"saga": "b"}], "compensated carried"),
    ("carried and left", "standing",
     [opened(), intended(), DONE, COMMITTED, opened("b", ""), carried(2), UNWINDS | {"saga": "b"}], "carried"),
    ("landed after its saga had ended", "",
     [opened(), intended(), FAILED, UNWINDS, UNDONE, opened("b"), carried(2, scope="undo/late"),
      UNWINDS | {"saga": "b"}, UNDO | {"saga": "b", "scope": "undo/late"}, BACK | {"saga": "b"},
      UNDONE | {"saga": "b"}], "compensated carried"),
    ("landed after its saga had ended, and undone under the first key", "standing",
     [opened(), intended(), FAILED, UNWINDS, UNDONE, opened("b"), carried(2, scope="undo/late"),
      UNWINDS | {"saga": "b"}, UNDO | {"saga": "b"}, BACK | {"saga": "b"}, UNDONE | {"saga": "b"}], "carried"),
    ("continued and committed", "",
     [opened(), intended(), DONE, CONTINUED, opened("b"), carried(2), COMMITTED | {"saga": "b"}], "committed carried"),
    ("continued, nothing taken over", "left_behind",
     [opened(), intended(), DONE, CONTINUED, opened("b"), COMMITTED | {"saga": "b"}], ""),
    ("continued as done, though unknown", "unknown",
     [opened(), intended(), LOST, CONTINUED, opened("b"), carried(2), COMMITTED | {"saga": "b"}], "carried"),
    ("an approval goes along", "",
     [opened(), ASKED, SAID | {"out": "approve"}, SPENT, DONE, CONTINUED, opened("b"),
      carried(4, **FOR_GOOD), COMMITTED | {"saga": "b"}], "approved carried"),
    ("taken over from nowhere", "nowhere", [opened("b"), carried(1), COMMITTED | {"saga": "b"}], ""),
    ("from a log before", "", [opened("b"), carried(0), UNWINDS | {"saga": "b"}, ACCEPTED | {"saga": "b"}], "accepted"),
    ("drift", "drift", [opened(), intended(), DONE, COMMITTED, of("effect.observed", 1, "", ref=2, out="drift")],
     "committed"),
    ("drift, and all is well again", "",
     [opened(), intended(), DONE, COMMITTED, of("effect.observed", 1, "", ref=2, out="drift"),
      of("effect.observed", 1, "", ref=2, out="confirmed")], "committed"),
    ("drift of what went on in another saga", "drift",
     [opened(), intended(), DONE, CONTINUED, opened("b"), carried(2), COMMITTED | {"saga": "b"},
      of("effect.observed", 1, "", ref=2, out="drift")], "committed carried"),
    ("drift of what was undone later on", "drift",
     [opened(), intended(), DONE, COMMITTED, opened("b"), carried(2), UNWINDS | {"saga": "b"}, UNDO | {"saga": "b"},
      BACK | {"saga": "b"}, UNDONE | {"saga": "b"}, of("effect.observed", 1, "", ref=2, out="drift")],
     "compensated carried"),
    ("drift, and undone since, and nobody has looked again", "drift",
     [opened(), intended(), DONE, COMMITTED, of("effect.observed", 1, "", ref=2, out="drift"), opened("b"), carried(2),
      UNWINDS | {"saga": "b"}, UNDO | {"saga": "b"}, BACK | {"saga": "b"}, UNDONE | {"saga": "b"}],
     "compensated carried"),
    ("drift of what was taken over twice, and all is well again", "",
     [opened(), intended(), DONE, CONTINUED, opened("b"), carried(2), CONTINUED | {"saga": "b"}, opened("c"),
      carried(6, "c"), COMMITTED | {"saga": "c"}, of("effect.observed", 1, "", ref=2, out="drift"),
      of("effect.observed", 1, "", ref=2, out="confirmed")], "committed carried"),
    ("drift of what was taken over twice", "drift",
     [opened(), intended(), DONE, CONTINUED, opened("b"), carried(2), CONTINUED | {"saga": "b"}, opened("c"),
      carried(6, "c"), COMMITTED | {"saga": "c"}, of("effect.observed", 1, "", ref=2, out="drift")],
     "committed carried"),
    ("lost, failed, and the world was asked", "",
     [opened(), intended(), LOST, intended(), FAILED, UNWINDS, UNDONE,
      of("effect.observed", 1, "", ref=4, out="confirmed")], "not_happened by_probe"),
    ("removed, and nobody vouches", "compacted",
     [{"kind": "compaction.made", "seq": 5, "runs": ((1, 4),), "count": 4, "cert": "c" * 64}], ""),
    ("missing", "missing", [opened("b", seq=3), COMMITTED | {"saga": "b"}], ""),
]  # fmt: skip


@pytest.mark.promise("6.7")
@pytest.mark.parametrize(("code", "facts", "counted"), [rule[1:] for rule in RULES], ids=[rule[0] for rule in RULES])
def test_a_rule(code: str, facts: Sequence[Fact], counted: str) -> None:
    said = judged(*facts)
    assert [finding.code for finding in said.findings] == ([code] if code else [])
    assert said.verdict == (CODES[code][0] if code else SAFE)
    counts = said.counts._asdict()
    assert all(counts[word] for word in counted.split()), counts


def test_every_code_has_a_rule_and_every_state_a_fate() -> None:
    assert {code for _, code, _, _ in RULES} - {""} == set(CODES)
    for row in BY_SAGA.values():
        assert set(row) | set(ALWAYS) == set(step.TABLE) - {""}


def test_the_page_of_rules_names_every_code() -> None:
    page = (Path(__file__).resolve().parents[1] / "runtime" / "SEMANTICS.md").read_text(encoding="utf-8")
    assert not [code for code in CODES if f"`{code}`" not in page]


@pytest.mark.promise("6.7")
def test_a_finding_names_its_record_its_saga_and_its_step() -> None:
    said = judged(opened(), intended(), DONE, intended(2), of("step.lost", 2), UNWINDS, UNDO, BACK, UNDONE)
    assert [finding[:4] for finding in said.findings] == [(4, "a", 2, "unknown")]


def test_a_window_leaves_out_what_had_ended_before() -> None:
    facts = [opened(), intended(), LOST, COMMITTED, opened("b"), intended(1, "b"), of("step.done", 1, "b")]
    facts += [COMMITTED | {"saga": "b"}]
    assert judged(*facts).verdict == UNSAFE
    said = judged(*facts, since=5)
    assert (said.verdict, said.counts.sagas, said.counts.effects) == (SAFE, 1, 1)


def test_what_was_removed_counts_by_the_certificate_that_covered_it() -> None:
    use = {"sagas": 1, "effects": 2, "committed": 1}
    removed = {"kind": "compaction.made", "seq": 5, "runs": ((1, 4),), "count": 4, "cert": "c" * 64, "use": use}

    def with_prior(prior: Prior) -> Judged:
        return judged(removed, priors={"c" * 64: prior}.get)

    said = with_prior(Prior(5, SAFE, ()))
    assert (said.verdict, said.counts.effects, said.counts.committed, said.counts.not_happened) == (SAFE, 2, 1, 1)
    assert said.certs == ("c" * 64,)
    assert with_prior(Prior(4, SAFE, ())).verdict == INDETERMINATE  # it covers less than was removed
    assert with_prior(Prior(5, UNSAFE, (), 3)).verdict == INDETERMINATE  # it does not list all that it found
    inside, outside = Finding(2, "a", 1, "standing", "it stands"), Finding(9, "b", 1, "standing", "it stands")
    assert with_prior(Prior(10, UNSAFE, (inside,))).verdict == UNSAFE
    assert with_prior(Prior(10, UNSAFE, (outside,))).verdict == SAFE


# ---- a file that others check ----------------------------------------------------------------------------------------


def test_the_published_envelope_is_signed_over_these_bytes(vectors: Path) -> None:
    told = json.loads((vectors / "dsse.json").read_text())
    assert dsse.pae(told["payloadType"], told["payload"].encode()) == told["pae"].encode()
    with pytest.raises(BadSignature, match="did not sign"):  # another key's, of another sort
        dsse.unseal(json.dumps(told["envelope"]).encode(), note.public_of(b"k" * 32), told["payloadType"])


SEED = b"e" * 32
PAYLOAD = dsse.statement("log", "0" * 64, "p", {"a": 1})


def test_an_envelope_is_opened_by_the_key_that_signed_it() -> None:
    made = dsse.seal(PAYLOAD, SEED)
    assert dsse.unseal(made, note.public_of(SEED)) == PAYLOAD
    assert dsse.seal(PAYLOAD, SEED) == made
    assert dsse.read_statement(PAYLOAD)["predicate"] == {"a": 1}
    with pytest.raises(BadSignature):
        dsse.unseal(made, note.public_of(b"f" * 32))
    stranger = {"keyid": "", "sig": "AAAA"}
    value = json.loads(made)
    value["signatures"].insert(0, stranger | {"keyid": "somebody"})
    assert dsse.unseal(json.dumps(value).encode(), note.public_of(SEED)) == PAYLOAD


def test_a_payload_is_signed_with_its_type() -> None:
    value = json.loads(dsse.seal(PAYLOAD, SEED))
    assert dsse.pae("type", b"body") == b"DSSEv1 4 type 4 body"
    with pytest.raises(BadSignature):
        dsse.unseal(json.dumps(value | {"payloadType": "other"}).encode(), note.public_of(SEED), "other")


@pytest.mark.promise("6.7")
def test_no_changed_byte_of_an_envelope_passes() -> None:
    made = dsse.seal(PAYLOAD, SEED)
    public = note.public_of(SEED)
    for at in range(len(made) - 1):
        changed = made[:at] + bytes([made[at] ^ 1]) + made[at + 1 :]
        with pytest.raises((Malformed, BadSignature)):
            dsse.unseal(changed, public)


@pytest.mark.parametrize(
    "envelope",
    [
        b"", b"[]", b"nonsense", b"\xff", b'{"payload":"AA=="}', b"[" * 100_000,
        b'{"payload":"AA==","payload":"AA==","payloadType":"t","signatures":[{"sig":"AA=="}]}',
        b'{"payload":"AB==","payloadType":"t","signatures":[{"sig":"AA=="}]}',
        b'{"payload":"AA==","payloadType":"t","signatures":[]}',
        b'{"payload":"AA==","payloadType":"t","signatures":[{"sig":1}]}',
        b'{"payload":"AA==","payloadType":"t","signatures":[{"sig":"AA==","x":1}]}',
        b'{"payload":"AA==","payloadType":NaN,"signatures":[{"sig":"AA=="}]}',
    ],
)  # fmt: skip
def test_what_is_no_envelope_is_refused_in_words(envelope: bytes) -> None:
    with pytest.raises(Malformed, match="This is not a signed statement"):
        dsse.unseal(envelope, note.public_of(SEED))


# ---- over a home -----------------------------------------------------------------------------------------------------


def worked(home: Path, *, ends_well: bool = True) -> None:
    """A saga of two effects, with secrets in its arguments."""
    kit = AgentKit(home=home)
    with suppress(SagaAborted), saga_scope(kit=kit) as saga:
        for number in range(2):
            undo = None if not ends_well and number else Compensation(handler="pay.back", kwargs={})
            args = {"customer": f"cus_secret{number}"}
            saga.execute("pay", lambda customer: None, args, semantics="compensable", undo=undo)
        if not ends_well:
            raise ValueError("no")
    kit.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    worked(tmp_path / "home")
    return tmp_path / "home"


def amends(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(arg) for arg in args])
    return done.exit_code, done.output


@pytest.mark.promise("6.7")
def test_a_certificate_is_made_and_worked_out_again(home: Path, tmp_path: Path) -> None:
    code, said = amends("--home", home, "certify", "--out", tmp_path / "c.json", "--by", "ann", "--json")
    told = json.loads(said)
    assert (code, told["verdict"], told["counts"]["committed"]) == (0, SAFE, 2)
    envelope = (tmp_path / "c.json").read_bytes()
    assert told["id"] == sha256(envelope).hexdigest() and b"secret" not in dsse._read(envelope)[0]
    code, said = amends("--home", home, "certify", "--check", tmp_path / "c.json", "--json")
    assert (code, json.loads(said)["holds"], json.loads(said)["unknown"]) == (0, True, "")
    kit = AgentKit(home=home)
    copy = kit.log.keeping.copies[-1]
    kit.close()
    assert (copy.out, copy.id, copy.size, copy.payload) == ("certificate", told["id"], told["log"]["size"], "none")


@pytest.mark.promise("6.7")
def test_an_unsafe_log_says_which_step_and_exits_1(tmp_path: Path) -> None:
    worked(tmp_path / "home", ends_well=False)
    code, said = amends("--home", tmp_path / "home", "certify", "--json")
    told = json.loads(said)
    assert code == 1 and told["verdict"] == UNSAFE
    assert {(one["step"], one["code"]) for one in told["findings"]} >= {(2, "orphaned")}
    code, said = amends("--home", tmp_path / "home", "certify")
    assert code == 1 and "step 2" in said and told["findings"][0]["saga"] in said


@pytest.mark.promise("6.7")
def test_a_running_saga_is_indeterminate(tmp_path: Path) -> None:
    kit = AgentKit(home=tmp_path / "home")
    with saga_scope(kit=kit) as saga:
        saga.execute("pay", lambda: None, {}, semantics="compensable", undo=Compensation(handler="pay.back", kwargs={}))
        code, said = amends("--home", tmp_path / "home", "certify", "--json")
    kit.close()
    assert (code, [one["code"] for one in json.loads(said)["findings"]]) == (3, ["running"])


@pytest.mark.promise("6.7")
def test_nothing_is_certified_about_a_log_that_does_not_verify(home: Path) -> None:
    db = Evidence(Home(home).db)._db
    db.pragma("query_only", 0)
    line = db.one("select line from entry where seq = 3")
    db.run("commit")
    db.run("update entry set line = ? where seq = 3", (line.replace(b'"kind":"step', b'"kind":"stop'),))
    db.close()
    code, said = amends("--home", home, "certify", "--json")
    assert code == 6 and '"not_verified"' in said and "E_CHAIN" in said


@pytest.mark.promise("6.7")
def test_the_same_records_give_the_same_statement(home: Path) -> None:
    kit = AgentKit(home=home)
    one, other = certify(kit.log, "t"), certify(kit.log, "t")  # type: ignore[arg-type]
    kit.close()
    for made in (one, other):
        made.statement["predicate"].pop("time")
    assert one.statement == other.statement


@pytest.mark.promise("6.7")
def test_no_opening_is_read(home: Path) -> None:
    """With every opening gone the records say the same."""
    kit = AgentKit(home=home)
    with certificate.cut(kit.log) as (evidence, head):  # type: ignore[arg-type]
        stripped = _Bare(evidence)
        full, bare = (list(certificate.entries_of(one)) for one in (evidence, stripped))
        assert judge(full, head.size) == judge(bare, head.size)
    kit.close()


class _Bare:
    """A source without any opening."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def stored(self) -> Any:
        return (row._replace(blob=None) for row in self._source.stored())


@pytest.mark.promise("6.7")
def test_a_certificate_with_anything_changed_does_not_hold(home: Path, tmp_path: Path) -> None:
    """Signed anew by the very key: what it says is worked out again, and not believed."""
    kit = AgentKit(home=home)
    made, identity = certify(kit.log, "t"), kit.log.identity  # type: ignore[arg-type,attr-defined]
    kit.close()
    with Evidence(Home(home).db) as source:
        assert not check(made.envelope, source, Given(source)).troubles
        for name, value in (
            ("verdict", UNSAFE), ("counts", {"effects": 9}), ("more", 7),
            ("findings", [Finding(1, "a", 1, "unknown", "")._asdict()]),
            ("not_claimed", []), ("window", [2, 5]),
        ):  # fmt: skip
            told = made.statement["predicate"] | {name: value}
            payload = dsse.statement(identity.origin, told["log"]["root"], certificate.PREDICATE, told)
            found = check(dsse.seal(payload, identity.export_seed), source, Given(source))
            assert found.troubles and found.exit == 1, name
        for seed in (identity.log_seed, identity.witness_seed):  # the right device, and the wrong key
            with pytest.raises(BadSignature):
                check(dsse.seal(dsse.canonical(made.statement), seed), source, Given(source))
        told = dict(made.statement["predicate"], log=made.statement["predicate"]["log"] | {"root": "0" * 64})
        payload = dsse.statement(identity.origin, "0" * 64, certificate.PREDICATE, told)
        with pytest.raises(Malformed):
            check(dsse.seal(payload, identity.export_seed), source, Given(source))


@pytest.mark.promise("6.7")
def test_a_certificate_of_another_log_is_refused(home: Path, tmp_path: Path) -> None:
    worked(tmp_path / "other")
    assert amends("--home", tmp_path / "other", "certify", "--out", tmp_path / "c.json")[0] == 0
    code, said = amends("--home", home, "certify", "--check", tmp_path / "c.json", "--json")
    assert code == 1 and json.loads(said)["error"]["code"] == "bad_signature"


def test_a_certificate_still_holds_when_the_log_has_grown(home: Path, tmp_path: Path) -> None:
    assert amends("--home", home, "certify", "--out", tmp_path / "c.json")[0] == 0
    worked(home, ends_well=False)
    assert amends("--home", home, "certify", "--check", tmp_path / "c.json")[0] == 0
    assert amends("--home", home, "certify")[0] == 1


def test_a_kept_certificate_is_found_by_its_name(home: Path) -> None:
    kit = AgentKit(home=home)
    made = certify(kit.log, "t")  # type: ignore[arg-type]
    path = certificate.keep(Home(home), made)
    kit.close()
    assert path.read_bytes() == made.envelope
    with Evidence(Home(home).db) as source:
        given = Given(source, home=Home(home))
        found = given(made.id)
        assert found is not None and (found.verdict, given.used) == (SAFE, [made.id])
        path.write_bytes(made.envelope.replace(b"0", b"1"))
        assert given(made.id) is None and given("0" * 64) is None


def test_a_window_begins_at_a_record_or_at_a_signed_head(home: Path, tmp_path: Path) -> None:
    code, said = amends("--home", home, "certify", "--json")
    head = json.loads(said)["log"]
    (tmp_path / "note").write_text(head["note"])
    worked(home)
    for since in (head["size"], tmp_path / "note"):
        code, said = amends("--home", home, "certify", "--since", since, "--json")
        told = json.loads(said)
        assert (code, told["window"][0], told["counts"]["sagas"]) == (0, head["size"], 1)
    assert amends("--home", home, "certify", "--since", 10**9)[0] == 2


@pytest.mark.parametrize("name", ["page.html", "page.txt"])
def test_a_page_says_what_is_claimed_and_what_is_not(home: Path, tmp_path: Path, name: str) -> None:
    code, said = amends("--home", home, "certify", "--page", tmp_path / name, "--json")
    told, page = json.loads(said), (tmp_path / name).read_text()
    assert code == 0
    for words in (told["log"]["root"], told["id"], "902(13)", "not legal advice", *told["not_claimed"]):
        assert words in page
    assert "src=" not in page and "href=" not in page and "<script" not in page


def test_where_the_page_went_is_said_and_other_endings_are_refused(home: Path, tmp_path: Path) -> None:
    code, said = amends("--home", home, "certify", "--page", tmp_path / "page.html")
    assert code == 0 and f"The page for people is {tmp_path / 'page.html'}." in said
    assert "<li></li>" not in (tmp_path / "page.html").read_text()
    code, said = amends("--home", home, "certify", "--page", tmp_path / "page.pdf", "--json")
    assert (code, json.loads(said)["error"]["code"]) == (2, "usage") and not (tmp_path / "page.pdf").exists()


def test_a_page_cannot_be_written_by_what_it_tells_of() -> None:
    from amends.cli.certificate_page import page, text

    evil = '<script>alert(1)</script>\x1b[31m"'
    found = Finding(1, evil, 1, "unknown", evil)._asdict()
    counts = dict.fromkeys(("sagas", "open", "effects"), 0) | judged().counts._asdict()
    told = {
        "verdict": UNSAFE, "log": {"origin": evil, "size": 1, "root": "00", "note": evil}, "window": [0, 1],
        "rules": "1", "counts": counts, "findings": [found], "more": 1, "prior": [], "not_claimed": [evil],
        "time": "", "tool": "",
    }  # fmt: skip
    html, plain = page({"predicate": told}, "id"), text({"predicate": told}, "id")
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert "\x1b" not in html and "\x1b" not in plain


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--by", "ann"], 2), (["--check", "nothing.json"], 2), (["--out", "c", "--check", "c"], 2), (["somewhere"], 2),
        (["--since", "nothing"], 2), (["--prior", "nothing"], 2),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(home: Path, args: list[str], code: int) -> None:
    found, said = amends("--home", home, "certify", *args)
    assert found == code and "Traceback" not in said


def test_a_certificate_is_not_written_over_another_file(home: Path, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("mine")
    assert amends("--home", home, "certify", "--out", tmp_path / "c.json")[0] == 2
    assert (tmp_path / "c.json").read_text() == "mine"


def test_unreadable_certificates_are_refused_in_words(home: Path, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    for option in ("--check", "--prior"):
        code, said = amends("--home", home, "certify", option, tmp_path / "c.json")
        assert code == 7 and "not a signed statement" in said


def test_a_log_that_does_not_verify_says_what_was_found() -> None:
    assert issubclass(NotVerified, Exception) and NotVerified("no").exit == 6


# ---- with what else is done to a log ---------------------------------------------------------------------------------


@pytest.mark.promise("6.7")
def test_after_everything_was_redacted_the_verdict_is_the_same(tmp_path: Path) -> None:
    home = tmp_path / "home"
    worked(home)
    worked(home)
    before = json.loads(amends("--home", home, "certify", "--json")[1])
    kit = AgentKit(home=home)
    sagas = [row.saga for row in kit.log.sagas()]
    blobs = sum(record.blob is not None for record in kit.log.records() if record.entry.saga)
    kit.close()
    for saga in sagas:
        assert amends("--home", home, "redact", saga, "--by", "ann", "--basis", "GDPR-17")[0] == 0
    code, said = amends("--home", home, "certify", "--json")
    told = json.loads(said)
    assert (code, told["verdict"], told["findings"]) == (0, before["verdict"], before["findings"])
    assert told["counts"] == before["counts"]
    kit = AgentKit(home=home)
    assert sum(record.blob is not None for record in kit.log.records() if record.entry.saga) < blobs
    kit.close()


@pytest.mark.promise("6.7")
def test_whoever_has_a_bundle_works_the_certificate_out_again(home: Path, tmp_path: Path) -> None:
    assert amends("--home", home, "export", "--out", tmp_path / "bundle")[0] == 0
    file = tmp_path / "bundle" / "certificate.dsse.json"
    code, said = amends("--home", tmp_path / "none", "certify", "--check", file, tmp_path / "bundle", "--json")
    assert (code, json.loads(said)["holds"], json.loads(said)["unknown"]) == (0, True, "")
    lines = b"".join(path.read_bytes() for path in sorted((tmp_path / "bundle" / "entries").iterdir()))
    assert certify_alone.verdict(lines.splitlines()).verdict == json.loads(said)["verdict"]


class _Earlier:
    """A clock of a boot before, which can be set on."""

    def __init__(self) -> None:
        self.ms = 5000

    def wall_us(self) -> int:
        return 1_700_000_000_000_000 + self.ms * 1000

    def boot_ms(self) -> int:
        return self.ms

    def boot_id(self) -> str:
        return "a-boot-before"


@pytest.mark.promise("6.7")
def test_what_was_removed_still_counts_by_the_certificate_that_is_kept(tmp_path: Path) -> None:
    home, clock = tmp_path / "home", _Earlier()
    kit = AgentKit(home=home)
    kit.log.clock = clock
    for _ in range(100):
        with saga_scope(kit=kit) as saga:
            undo = Compensation(handler="pay.back", kwargs={})
            saga.execute("pay", lambda: None, {}, semantics="compensable", undo=undo)
    clock.ms += 8 * 86_400_000
    before = certify(kit.log, "t")  # type: ignore[arg-type]
    (tmp_path / "before.json").write_bytes(before.envelope)
    removed = retention.remove(kit, 7 * 86_400_000, tool="t")
    kit.close()
    assert removed.cert and removed.done and removed.done.sagas, removed
    code, said = amends("--home", home, "certify", "--json", "--out", tmp_path / "after.json")
    told = json.loads(said)
    assert (code, told["verdict"], told["prior"]) == (0, SAFE, [removed.cert])
    assert (told["counts"]["effects"], told["counts"]["committed"]) == (100, 100) and told["counts"]["compacted"] > 0
    assert amends("--home", home, "certify", "--check", tmp_path / "after.json")[0] == 0
    code, said = amends("--home", home, "certify", "--check", tmp_path / "before.json", "--json")
    assert code == 3 and "removed since" in json.loads(said)["unknown"]
    kept = certificate.folder(Home(home)) / f"{removed.cert}.json"
    kept.rename(tmp_path / "elsewhere.json")
    code, said = amends("--home", home, "certify", "--json")
    assert (code, [one["code"] for one in json.loads(said)["findings"]]) == (3, ["compacted"])
    assert amends("--home", home, "certify", "--prior", tmp_path / "elsewhere.json")[0] == 0
    assert amends("--home", home, "certify", "--check", tmp_path / "after.json")[0] == 3
