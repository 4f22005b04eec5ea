"""What was said about a saga outside of it goes when the saga goes, and what is left says the same without.

Beside test_retention.py, which a host imports by itself to undo something, and which so imports no other test's file.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from approving import Asking, People
from outsider import Outsider
from soft_keys import SoftPasskey, SoftRaw
from test_retention import Later, asked, call, later, pay, work

from amends import AgentKit, PreFlightGate
from amends.runtime import retention
from amends.runtime.facts import fact
from amends.runtime.gate import ceremonies, keyring, signing
from amends.runtime.gate.proof import base64url
from amends.runtime.gate.rules import ApprovalPolicy
from amends.runtime.notices import Address, Claim, outcome
from amends.runtime.state import State
from amends.store.audit import verify

__all__ = ["later"]  # a fixture

ROLES = ("admin", "approver")


def wire(**kwargs: Any) -> str:
    return "sent"


def signed(kit: AgentKit, people: People, name: str, who: str = "Ann", **decides: Any) -> None:
    """A wire that a key of this person let happen."""
    asking = Asking(kit, wire, {"amount": 5, "to": name}, id=name)
    seen = asking.seen()
    glass = decides.get("break_glass", False)
    proof = people.keys[who].get(seen.glass) if glass else people.yes(who, seen)
    signing.vote(kit, seen.item, "approve", proof=proof, **decides)
    assert asking.end() == "sent"


def denied(kit: AgentKit, name: str) -> None:
    asking = Asking(kit, wire, {"amount": 5, "to": name}, id=name)
    signing.vote(kit, asking.seen().item, "deny", by="Cid")
    assert isinstance(asking.end(), Exception)


def expired(kit: AgentKit, name: str) -> None:
    gate = PreFlightGate(approval=ApprovalPolicy(timeout=0.05))
    other = AgentKit("other", home=kit.home.path, gate=gate)
    assert "expired" in Asking(other, wire, {"amount": 5, "to": name}, id=name).code()
    other.close()
    kit.log.refresh()


def tell_about(kit: AgentKit, name: str) -> None:
    """Two levels of escalation and messages about a question, which is then answered."""
    asking = Asking(kit, wire, {"amount": 5, "to": name}, id=name)
    asked = asking.asked
    for level in (1, 2):
        about = Address(f"item-{name}", "slack", level, asked.saga, asked.step, asked.seq)
        said(kit, "approval.escalated", request=asked.request, level=level)
        kit.log.commit(Claim(about, 1000, lambda state: True))
        kit.log.commit(outcome(about, 1, ""))
    signing.vote(kit, asking.seen().item, "deny", by="Cid")
    assert isinstance(asking.end(), Exception)


def drift(kit: AgentKit, name: str, closes: bool = True) -> None:
    """The world was asked about an effect: it is gone, people are told, and it is found again."""
    pay(kit, name)
    effect = next(r.entry for r in reversed(list(kit.log.records())) if r.entry.kind == "step.intended")
    about = {"of": effect.saga, "step": effect.step, "ref": effect.seq}
    seq = said(kit, "effect.observed", out="drift", why="absent", **about)
    told = Address(f"item-{name}", "slack", 0, "", 0, seq)
    kit.log.commit(Claim(told, 1000, lambda state: True))
    kit.log.commit(outcome(told, 1, "no route"))
    if closes:
        said(kit, "effect.observed", out="confirmed", why="present", **about)


def said(kit: AgentKit, kind: str, **header: Any) -> int:
    [entry] = kit.log.commit(lambda view, now: [fact(kind, up=True, **header)])
    return entry.seq


def close(kit: AgentKit) -> None:
    [vote] = kit.engine.state.approvals.reviews
    signing.close_review(kit, vote, "Cid", "it was right")


def kinds(kit: AgentKit) -> Counter[str]:
    return Counter(record.entry.kind for record in kit.log.records() if record.entry.kind in COMPANIONS)


COMPANIONS = {
    "vote.cast", "approval.escalated", "review.closed", "notice.claimed", "notice.sent", "effect.observed",
}  # fmt: skip


def agrees(home: Path) -> None:
    """The log verifies, folded with and without its memo, in the same words by the checker of strangers."""
    for memo in (True, False):
        if not memo:
            outsider = Outsider(home / "amends.db")
            outsider.change("delete from memo")
            outsider.close()
        found = verify(home, view_factory=State)
        assert found.verdict == "INTACT", found.findings
        AgentKit("again", home=home).close()
    folder = home.parent / f"bundle-{len(list(home.parent.iterdir()))}"
    assert call("export", "--out", folder).exit_code == 0
    done = subprocess.run([sys.executable, "-I", "-S", folder / "check_amends.py", folder], capture_output=True)
    assert done.returncode == 0, done.stdout


TOLD = ("sagas", "effects", "committed", "approved", "compensated", "accepted", "not_happened", "unaccounted")


def counted() -> dict[str, int]:
    told = asked("certify")
    assert told["verdict"] == "SAFE", told["findings"]
    return {word: told["counts"][word] for word in TOLD}


@pytest.mark.promise("6.4")
def test_what_people_let_happen_goes_with_what_they_said(later: Later, tmp_path: Path) -> None:
    kit = AgentKit("agent", home=tmp_path / "home")
    people = People(kit)
    signed(kit, people, "signed-1")
    signed(kit, people, "signed-2", "Bob")
    signed(kit, people, "glass", "Ann", break_glass=True, reason="the house is on fire")
    close(kit)
    denied(kit, "denied")
    expired(kit, "expired")
    tell_about(kit, "told")
    drift(kit, "drifted")
    assert kinds(kit).keys() == COMPANIONS
    later(100)
    for who in ("Ann", "Bob"):  # how far their keys have counted is known by these
        signed(kit, people, f"new-{who}", who)
    work(kit, "new", 100)
    kit.close()
    before = counted()
    planned = asked("compact", "--dry-run")
    told = asked("compact", "--by", "Ann")
    assert told["removed_sagas"] == planned["sagas"] == 7 and not told["left"]
    assert told["removed"] == planned["entries"]
    assert counted() == before and before["approved"] == 5
    agrees(tmp_path / "home")
    kit = AgentKit("agent", home=tmp_path / "home")
    assert kinds(kit) == {"vote.cast": 2}
    signed(kit, people, "after")
    kit.close()
    assert call("prove", "new-Ann", "--with-votes", "--out", tmp_path / "proof.json").exit_code == 0
    assert call("verify", tmp_path / "proof.json").exit_code == 0
    said = call("redact", "new-Bob", "--basis", "GDPR-17", "--field", "args", "--by", "Ann")
    assert said.exit_code == 0, said.output
    agrees(tmp_path / "home")


@pytest.mark.promise("6.4")
def test_what_is_known_of_a_key_by_its_newest_decision_stays(later: Later, tmp_path: Path) -> None:
    kit = AgentKit("agent", home=tmp_path / "home")
    people = People(kit)
    for name in ("first", "second"):
        signed(kit, people, name)
    later(100)
    work(kit, "new", 100)
    kit.close()
    assert asked("compact", "--dry-run")["stay"] == {retention.NEEDED: 1, retention.YOUNG: 100}
    assert asked("compact", "--by", "Ann")["removed_sagas"] == 1
    agrees(tmp_path / "home")


@pytest.mark.promise("6.4")
@pytest.mark.promise("3.6")
def test_a_decision_that_stopped_a_recovery_stays(
    later: Later, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = AgentKit("agent", home=tmp_path / "home")
    people = People(kit)
    signed(kit, people, "before")
    new = [SoftPasskey(bytes([n]) * 32, credential=bytes([n]) * 16) for n in (8, 9)]
    keys = tuple(key.enrolled(person=f"New {n}", roles=ROLES) for n, key in enumerate(new))
    paper = base64url(SoftRaw(b"\66" * 32).public)
    event = ceremonies.begin(kit, "recovering", keys=keys, recovery=paper, settings=ceremonies.Settings())
    signers = [people.recovery, *new]
    ceremonies.submit(kit, event, [key.get(event.signed) for key in signers])
    assert ceremonies.ring_now(kit).recovery
    for name in ("stops-it", "more"):
        signed(kit, people, name)
    assert not ceremonies.ring_now(kit).recovery
    later(100)
    signed(kit, people, "new")
    work(kit, "new", 100)
    assert not ceremonies.ring_now(kit).recovery
    kit.close()
    same = keyring.same_without
    monkeypatch.setattr(keyring, "same_without", lambda known, votes: False)  # as if one of them were the one
    assert asked("compact", "--dry-run")["stay"][retention.NEEDED] == 2
    monkeypatch.setattr(keyring, "same_without", same)
    assert asked("compact", "--by", "Ann")["removed_sagas"] == 3, "a newer decision stops it as well"
    kit = AgentKit("agent", home=tmp_path / "home")
    assert not ceremonies.ring_now(kit).recovery
    kit.close()


@pytest.mark.promise("6.4")
@pytest.mark.parametrize("waits", ["review", "drift"])
def test_what_waits_for_a_person_keeps_its_saga(later: Later, tmp_path: Path, waits: str) -> None:
    kit = AgentKit("agent", home=tmp_path / "home")
    people = People(kit)
    if waits == "review":
        signed(kit, people, "kept", break_glass=True, reason="the house is on fire")
        signed(kit, people, "more")
    else:
        drift(kit, "kept", closes=False)
    later(100)
    signed(kit, people, "new")
    work(kit, "new", 100)
    kit.close()
    asked("compact", "--by", "Ann")
    assert "kept" in [row["name"] for row in asked("ps", "--all")], "somebody has to look at it"
    kit = AgentKit("agent", home=tmp_path / "home")
    if waits == "review":
        close(kit)
        kit.close()
        assert asked("compact", "--dry-run")["sagas"] == 0, "what people say is as young as their word"
        later(100)
        kit = AgentKit("agent", home=tmp_path / "home")
        work(kit, "newer", 100)
        kit.close()
        asked("compact", "--by", "Ann")
        assert "kept" not in [row["name"] for row in asked("ps", "--all")]
        agrees(tmp_path / "home")
    kit.close()


@pytest.mark.slow
@pytest.mark.promise("6.4")
@pytest.mark.parametrize("seed", range(3))
def test_whatever_was_said_about_them_what_is_left_says_the_same(later: Later, tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    kit = AgentKit("agent", home=tmp_path / "home")
    people = People(kit)

    def glass(kit: AgentKit, name: str) -> None:
        signed(kit, people, name, dice.choice(["Ann", "Bob"]), break_glass=True, reason="now")
        close(kit)

    does = [denied, expired, tell_about, drift, glass, pay, lambda kit, name: signed(kit, people, name)]
    for n in range(14):
        dice.choice(does)(kit, f"old-{n}")
    later(100)
    for n in range(6):
        dice.choice(does)(kit, f"mid-{n}")
    work(kit, "new", 80)
    kit.close()
    before = counted()
    told = asked("compact", "--by", "Ann")
    assert told["removed_sagas"] >= 8 and not told["left"]
    assert counted() == before
    agrees(tmp_path / "home")
