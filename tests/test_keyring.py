"""Whose keys count: only those whom the ring itself let in, in whatever order its history comes, and however it is
cut, doubled or forged."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from soft_keys import ORIGIN, SoftPasskey, SoftRaw, SoftSsh
from world import home_kit

from amends import IRREVERSIBLE, REVERSIBLE, AgentKit, Compensation, PreFlightGate, Rule, SagaAborted, Verdict
from amends.cli import keys
from amends.cli.main import main
from amends.runtime.facts import body, fact
from amends.runtime.gate import ceremonies, keyring
from amends.runtime.gate.cast import Cast
from amends.runtime.gate.keyevent import (
    FIELDS,
    HOUR_MS,
    REFUSALS,
    Event,
    Settings,
    Unauthorised,
    event,
    parse,
    position,
)
from amends.runtime.gate.keyring import History, Keys, Ring, Told, ring_of
from amends.runtime.gate.proof import APPROVAL, KEYRING, Credential, Unproven, base64url
from amends.runtime.gate.rules import tool_is
from amends.runtime.gate.statement import APPROVAL_TAG, KEYRING_TAG, check_code, decision
from amends.runtime.plain import plain
from amends.runtime.state import State
from amends.store.clock import SystemClock
from amends.store.entry import Entry, opening
from amends.store.errors import Illegal

ROOT = Path(__file__).resolve().parents[1]
BOTH = ("admin", "approver")
pytestmark = pytest.mark.promise("3.6")


class Key(NamedTuple):
    """A key that lies in a file, and how the ring knows it."""

    soft: SoftRaw
    credential: Credential

    @property
    def id(self) -> str:
        return self.credential.id

    def proves(self, said: Event) -> dict[str, Any]:
        return self.soft.get(said.signed)


def key(number: int, person: str = "ada", roles: tuple[str, ...] = BOTH) -> Key:
    soft = SoftRaw(bytes([number]) * 32)
    return Key(soft, soft.enrolled(person=person, roles=roles, label=f"key {number}"))


ADA, SPARE, BOB, CLEO, DAN, EVE = (
    key(n, person) for n, person in enumerate(("ada", "ada", "bob", "cleo", "dan", "eve"), 1)
)
PAPER, PAPER2 = key(101), key(102)
NEW, NEW2 = key(20, "ada"), key(21, "bob")
RECOVERY = base64url(PAPER.soft.public)
_nonces = itertools.count(1)


def said(kind: str, **what: Any) -> Event:
    """An event with a nonce of its own."""
    held = {name: value.credential if isinstance(value, Key) else value for name, value in what.items()}
    return event(kind, f"{next(_nonces):064x}", **held)


def proofs(one: Event, *by: Key) -> list[dict[str, Any]]:
    return [key.proves(one) for key in by]


# ---- histories without a log -----------------------------------------------------------------------------------------


class Story:
    """Events as they are told, one record after the other."""

    def __init__(self, *admins: Key, quorum: int = 1) -> None:
        self.told: list[Told] = []
        self.heard: dict[str, int] = {}
        self.votes: list[Cast] = []
        self.clock = 0
        self._ring: tuple[Any, Ring] = (None, Ring())
        self.founders = admins or (ADA, SPARE, BOB)
        keys = tuple(one.credential for one in self.founders)
        self.root = said("founded", keys=keys, recovery=RECOVERY, settings=Settings(quorum=quorum))
        self.tell(self.root, *self.founders)

    def tell(self, one: Event, *by: Key, after_ms: int = 0, proofs_of: Sequence[dict[str, Any]] = ()) -> Event:
        self.clock += after_ms
        made = (*proofs(one, *by), *proofs_of)
        self.told.append(Told(2 * len(self.told), self.clock, one, tuple(made)))
        return one

    def say(self, kind: str, *by: Key, after: Sequence[Event] | None = None, after_ms: int = 0, **what: Any) -> Event:
        """An event that follows the newest one, or those given."""
        prior = self.ring.tips if after is None else tuple(sorted(one.digest for one in after))
        return self.tell(said(kind, prior=prior, **what), *by, after_ms=after_ms)

    @property
    def ring(self) -> Ring:
        told = (len(self.told), len(self.votes), tuple(self.heard.items()))
        if self._ring[0] != told:
            self._ring = told, ring_of(self.history)
        return self._ring[1]

    @property
    def history(self) -> History:
        return History(tuple(self.told), dict(self.heard), "h", votes=lambda: tuple(self.votes))

    def vote(self, by: Key, signer: Key | None = None, request: str = "a" * 64, seq: int | None = None) -> None:
        """An answer in the name of a key, which another may have signed."""
        place = self.told[-1].seq + 1 if seq is None else seq
        proof = (signer or by).soft.get(decision(request, "deny")) | {"credential": by.id}
        self.votes.append(Cast(place, by.id, request, "deny", proof))
        self.heard[by.id] = place

    def refusal(self, kind: str, *by: Key, after_ms: int = 0, **what: Any) -> str:
        """The code with which the next event would be refused; empty if it would not."""
        return self.code(said(kind, **({"prior": self.ring.tips} if kind != "founded" else {}) | what), *by,
                         after_ms=after_ms)  # fmt: skip

    def code(self, one: Event, *by: Key, after_ms: int = 0) -> str:
        try:
            next = Told(keyring.FAR, self.clock + after_ms, one, tuple(proofs(one, *by)))
            keyring.admit(keyring.judged(self.history), next)
        except (Unauthorised, Unproven) as refused:
            return refused.code
        return ""


def same(one: Ring, other: Ring) -> bool:
    """Whether two rings let the same keys do the same, and the same event comes next."""
    names = ("founded", "credentials", "quarantined", "dead", "settings", "recovery_key", "tips")
    return all(getattr(one, name) == getattr(other, name) for name in names) and bool(one.frozen) == bool(other.frozen)


def ids(*keys: Key) -> set[str]:
    return {one.id for one in keys}


def shuffled(told: Sequence[Told], seed: int) -> History:
    mixed = list(told)
    random.Random(seed).shuffle(mixed)
    return History(tuple(one._replace(seq=place) for place, one in enumerate(mixed)), {}, "h")


# ---- every refusal ---------------------------------------------------------------------------------------------------


def new(number: int = 30, **changed: Any) -> Credential:
    return SoftRaw(bytes([number]) * 32).enrolled(**({"person": "zoe", "roles": ("approver",)} | changed))


def founding(*keys: Credential, recovery: str = RECOVERY, **settings: Any) -> dict[str, Any]:
    return {"keys": keys, "recovery": recovery, "settings": Settings(**settings)}


WEAK = bytes(32)
CASES: list[tuple[str, Callable[[Story], str]]] = [
    ("too_few_keys", lambda s: fresh("founded", ADA, **founding(ADA.credential))),
    ("too_many_keys", lambda s: fresh("founded", **founding(*(new(n, roles=BOTH) for n in range(30, 95))))),
    ("same_key_twice", lambda s: fresh("founded", ADA, **founding(ADA.credential, ADA.credential))),
    ("same_key_twice", lambda s: fresh("founded", ADA, **founding(ADA.credential, as_ssh(ADA)))),
    ("backup_not_admin", lambda s: fresh("founded", ADA, **founding(ADA.credential, new()))),
    ("quorum_unreachable", lambda s: unsound(quorum=2)),
    ("recovery_is_a_key", lambda s: unsound(recovery=base64url(ADA.soft.public))),
    ("weak_key", lambda s: unsound(recovery=base64url(WEAK))),
    ("bad_delay", lambda s: unsound(delay_ms=1)),
    ("bad_delay", lambda s: unsound(delay_ms=73 * HOUR_MS)),
    ("bad_settings", lambda s: unsound(algs=(-257,))),
    ("bad_settings", lambda s: unsound(origins=("http://amends.localhost/evil",))),
    ("possession_missing", lambda s: fresh("founded", ADA, **founding(ADA.credential, SPARE.credential))),
    ("keyring_exists", lambda s: s.refusal("founded", ADA, SPARE, **founding(ADA.credential, SPARE.credential))),
    ("no_keyring", lambda s: fresh("added", ADA, prior=("0" * 64,), key=new())),
    ("not_admin", lambda s: s.refusal("added", key=new())),
    ("not_admin", lambda s: s.refusal("added", key(30), key=new())),  # a new key does not vouch for itself
    ("possession_missing", lambda s: s.refusal("added", ADA, key=new())),
    ("quorum_missing", lambda s: Story(ADA, SPARE, BOB, quorum=2).refusal("added", ADA, SPARE, key(30), key=new())),
    ("key_known", lambda s: s.refusal("added", ADA, key=BOB)),
    ("key_known", lambda s: s.refusal("added", ADA, key=as_ssh(BOB))),
    ("key_dead", lambda s: (s.say("revoked", ADA, credential=BOB.id), s.refusal("added", ADA, BOB, key=BOB))[1]),
    ("key_dead", lambda s: (s.say("revoked", ADA, credential=BOB.id), s.refusal("added", ADA, key=as_ssh(BOB)))[1]),
    ("recovery_is_a_key", lambda s: s.refusal("added", ADA, PAPER, key=PAPER)),
    ("recovery_is_a_key", lambda s: s.refusal("added", ADA, key=passkey(id=PAPER.id))),
    ("weak_key", lambda s: s.refusal("added", ADA, key=weak())),
    ("alg_not_allowed", lambda s: s.refusal("added", ADA, key=es256(b"\7" * 32).enrolled(person="zoe"))),
    ("synced_key_not_allowed", lambda s: s.refusal("added", ADA, key=passkey(backup_eligible=True))),
    ("other_site", lambda s: s.refusal("added", ADA, key=passkey(rp_id="localhost"))),
    ("bad_role", lambda s: s.refusal("added", ADA, key=new(roles=("agent",)))),
    ("bad_role", lambda s: s.refusal("added", ADA, key=new(roles=()))),
    ("bad_role", lambda s: s.refusal("added", ADA, key=new(roles=("approver", "admin")))),  # one spelling
    ("no_person", lambda s: s.refusal("added", ADA, key=new(person=""))),
    ("no_person", lambda s: s.refusal("added", ADA, key=new(person=" zoe"))),
    *(("bad_name", lambda s, hidden=hidden: s.refusal("added", ADA, key=new(person=f"zo{hidden}e")))
      for hidden in "\u202e\u200b\u00ad\ufe0f\u2062\u3164\0\u0378"),
    ("no_such_key", lambda s: s.refusal("revoked", ADA, credential=DAN.id)),
    ("not_admin", lambda s: s.refusal("revoked", DAN, credential=BOB.id)),
    ("last_admin", lambda s: (s.say("revoked", ADA, credential=BOB.id), s.say("revoked", ADA, credential=SPARE.id),
                              s.refusal("revoked", ADA, credential=ADA.id))[2]),
    ("last_admin", lambda s: (s.say("revoked", ADA, credential=BOB.id), s.say("revoked", ADA, credential=SPARE.id),
                              s.refusal("rotated", ADA, key(30), credential=ADA.id, key=new()))[2]),
    ("no_such_key", lambda s: s.refusal("rotated", ADA, key(30), credential=DAN.id, key=new())),
    ("stale_event", lambda s: (s.say("revoked", ADA, credential=BOB.id),
                               s.refusal("revoked", ADA, credential=SPARE.id, prior=(s.root.digest,)))[1]),
    ("not_quarantined", lambda s: s.refusal("released", ADA, credential=BOB.id, of=("0" * 64,))),
    ("not_admin", lambda s: s.refusal("released", BOB, credential=BOB.id, of=(quarantine(s, BOB),))),
    ("not_recovery_key", lambda s: s.refusal("recovering", NEW, NEW2, ADA, **again())),
    ("recovery_is_a_key", lambda s: s.refusal("recovering", NEW, NEW2, PAPER, **again(recovery=RECOVERY))),
    ("key_known", lambda s: s.refusal("recovering", NEW, ADA, PAPER, **again(ADA))),
    ("possession_missing", lambda s: s.refusal("recovering", NEW, PAPER, **again())),
    ("nothing_recovering", lambda s: s.refusal("recovered", NEW, of=("0" * 64,))),
    ("nothing_recovering", lambda s: stopped(s)),
    ("too_early", lambda s: s.refusal("recovered", NEW, of=(lost(s).digest,), after_ms=72 * HOUR_MS - 1)),
    ("not_live", lambda s: s.refusal("recovered", DAN, of=(lost(s).digest,), after_ms=72 * HOUR_MS)),
    ("not_live", lambda s: s.refusal("vetoed", NEW, of=(lost(s).digest,))),
    ("ring_frozen", lambda s: (fork(s), s.refusal("added", ADA, key(30), key=new()))[1]),
]  # fmt: skip


def unsound(**said: Any) -> str:
    """The refusal of a founding that would be sound but for this."""
    return fresh("founded", ADA, SPARE, **founding(ADA.credential, SPARE.credential, **said))


def fresh(kind: str, *by: Key, **what: Any) -> str:
    """The refusal where there is no ring yet."""
    story = Story()
    story.told = []
    return story.code(said(kind, **what), *by)


def as_ssh(one: Key) -> Credential:
    """The same key, in SSH's wrapping."""
    number = one.credential.label.split()[-1]
    return SoftSsh(bytes([int(number)]) * 32).enrolled(person="zoe", roles=("approver",))


def es256(seed: bytes) -> SoftPasskey:
    """A key as phones have it, where there is what makes and checks one."""
    pytest.importorskip("cryptography", reason="cryptography (extra passkeys) is not installed")
    return SoftPasskey(seed, alg=-7)


def weak() -> Credential:
    return Credential(SoftRaw.name(WEAK), "raw", -8, base64url(WEAK), "zoe", ("approver",))


def passkey(**changed: Any) -> Credential:
    return SoftPasskey().enrolled(**({"person": "zoe"} | changed))


def again(second: Key = NEW2, recovery: str = base64url(PAPER2.soft.public)) -> dict[str, Any]:
    return founding(NEW.credential, second.credential, recovery=recovery)


def lost(story: Story) -> Event:
    """All keys are lost: the recovery key begins its wait."""
    return story.say("recovering", NEW, NEW2, PAPER, **again())


def stopped(story: Story) -> str:
    asked = lost(story)
    story.say("vetoed", BOB, of=(asked.digest,))
    return story.refusal("recovered", NEW, of=(asked.digest,), after_ms=72 * HOUR_MS)


def quarantine(story: Story, of: Key, why: str = "counter") -> str:
    return story.say("quarantined", credential=of.id, reason=why).digest


def fork(story: Story) -> tuple[Event, Event]:
    """Two admins, out of each other's sight."""
    after = [story.root]
    one = story.say("added", ADA, CLEO, key=CLEO, after=after)
    return one, story.say("rotated", BOB, DAN, credential=ADA.id, key=DAN, after=after)


@pytest.mark.parametrize(("code", "case"), CASES, ids=[f"{place}-{code}" for place, (code, _) in enumerate(CASES)])
def test_every_refusal_has_its_code(code: str, case: Callable[[Story], str]) -> None:
    assert case(Story()) == code


def test_the_table_of_refusals_is_whole() -> None:
    assert {code for code, _ in CASES} | {"bad_event", "newer_event"} == set(REFUSALS)


def _plain(**changed: Any) -> dict[str, Any]:
    sound = json.loads(said("revoked", prior=("0" * 64,), credential="x").text)
    return {name: value for name, value in (sound | changed).items() if value is not None}


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{}", b"null", b"\xff", b"{" * 5000,
        json.dumps(_plain(), sort_keys=True).encode(),  # blanks
        json.dumps(_plain(), separators=(",", ":"), sort_keys=True).encode().replace(b'"v":1', b'"v":1,"v":1'),
        *(json.dumps(_plain(**changed), separators=(",", ":"), sort_keys=True).encode() for changed in (
            {"v": 0}, {"kind": "approval-decision"}, {"kind": "crowned"}, {"nonce": "1"}, {"nonce": None},
            {"prior": []}, {"prior": None}, {"prior": ["0" * 64, "0" * 64]}, {"prior": ["f" * 64, "0" * 64]},
            {"prior": ["X" * 64]}, {"credential": ""}, {"credential": None}, {"extra": 1}, {"of": ["0" * 64]},
            {"v": True}, {"v": 1.0},
        )),
    ],
)  # fmt: skip
def test_what_is_no_event_is_refused_in_words(text: bytes) -> None:
    with pytest.raises(Unauthorised) as refused:
        parse(text)
    assert refused.value.code == "bad_event"


def test_an_event_that_names_an_ancestor_beside_its_child_is_none() -> None:
    story = Story()
    one = story.say("revoked", ADA, credential=BOB.id)
    story.say("revoked", ADA, credential=SPARE.id, after=[story.root, one])
    assert SPARE.id in story.ring.credentials


# ---- what lets in ----------------------------------------------------------------------------------------------------


def test_two_keys_and_a_recovery_key_found_a_ring() -> None:
    ring = Story(ADA, SPARE).ring
    assert ring.founded and set(ring.credentials) == ids(ADA, SPARE) and not ring.frozen
    assert ring.may(ADA.credential, "admin") and not ring.may(BOB.credential, "approver")


def test_an_admin_and_the_new_key_add_it_with_its_roles_and_no_more() -> None:
    story = Story()
    eve = key(40, "eve", ("approver",))
    story.say("added", ADA, eve, key=eve)
    assert story.ring.may(eve.credential, "approver") and not story.ring.may(eve.credential, "admin")
    assert story.refusal("revoked", eve, credential=BOB.id) == "not_admin"


def test_two_keys_of_one_person_are_one_admin() -> None:
    story = Story(ADA, SPARE, BOB, quorum=2)
    assert story.refusal("added", ADA, SPARE, CLEO, key=CLEO) == "quorum_missing"
    assert story.refusal("added", ADA, BOB, CLEO, key=CLEO) == ""


def test_a_key_ends_itself_and_never_comes_back() -> None:
    story = Story()
    story.say("revoked", BOB, credential=BOB.id)
    assert set(story.ring.credentials) == ids(ADA, SPARE) and set(story.ring.dead) == ids(BOB)
    assert story.refusal("added", ADA, BOB, key=BOB) == "key_dead"


def test_no_ring_is_left_without_an_admin() -> None:
    story = Story(ADA, SPARE)
    story.say("added", ADA, key(40, "eve", ("approver",)), key=key(40, "eve", ("approver",)))
    story.say("revoked", ADA, credential=SPARE.id)
    story.say("revoked", ADA, credential=ADA.id)
    assert story.ring.may(ADA.credential, "admin")


def test_rotation_replaces_in_one_step() -> None:
    story = Story()
    story.say("rotated", SPARE, NEW, credential=ADA.id, key=NEW)
    assert set(story.ring.credentials) == ids(SPARE, BOB, NEW) and set(story.ring.dead) == ids(ADA)


def test_the_last_admin_may_be_rotated_into_another_admin() -> None:
    story = Story(ADA, SPARE)
    story.say("revoked", ADA, credential=SPARE.id)
    story.say("rotated", ADA, NEW, credential=ADA.id, key=NEW)
    assert set(story.ring.credentials) == ids(NEW)


def test_a_signature_under_an_approval_adds_no_key() -> None:
    story = Story()
    one = said("added", prior=story.ring.tips, key=CLEO)
    under_approval = ADA.soft.get(APPROVAL_TAG + one.text)
    story.tell(one, CLEO, proofs_of=[under_approval])
    assert CLEO.id not in story.ring.credentials
    ssh = SoftSsh(b"\x33" * 32)
    member = ssh.enrolled(person="fay", roles=BOTH)
    joined = said("added", prior=story.ring.tips, key=member)
    story.tell(joined, ADA, proofs_of=[ssh.get(joined.signed, namespace=KEYRING)])
    assert member.id in story.ring.credentials
    other = said("revoked", prior=story.ring.tips, credential=BOB.id)
    story.tell(other, proofs_of=[ssh.get(other.signed, namespace=APPROVAL)])
    assert BOB.id in story.ring.credentials
    assert decision("0" * 64, "approve").startswith(APPROVAL_TAG) and not other.signed.startswith(APPROVAL_TAG)


def test_no_key_joins_that_nobody_vouches_for() -> None:
    story = Story()
    story.say("added", CLEO, key=CLEO)
    story.say("rotated", CLEO, credential=BOB.id, key=CLEO)
    assert set(story.ring.credentials) == ids(ADA, SPARE, BOB)


def test_no_key_joins_that_did_not_sign_for_itself() -> None:
    story = Story()
    story.say("added", ADA, BOB, key=CLEO)
    assert CLEO.id not in story.ring.credentials


def test_roles_and_person_stand_inside_what_is_signed() -> None:
    story = Story()
    eve = key(40, "eve", ("approver",))
    one = said("added", prior=story.ring.tips, key=eve)
    raised = json.loads(one.text)
    raised["key"]["roles"] = ["admin", "approver"]
    forged = parse(json.dumps(raised, separators=(",", ":"), sort_keys=True).encode())
    story.tell(forged, proofs_of=proofs(one, ADA, eve))
    assert eve.id not in story.ring.credentials


# ---- in any order, doubled, replayed, forged -------------------------------------------------------------------------

POOL = [key(n, person) for n, person in zip(range(50, 58), "fghfghij", strict=True)]


@st.composite
def histories(draw: st.DrawFn) -> Story:
    """What honest people do, one after the other, and revocations side by side."""
    story = Story(ADA, SPARE, BOB, CLEO)
    fresh = list(POOL)
    for _ in range(draw(st.integers(0, 5))):
        live = [one for one in (ADA, SPARE, BOB, CLEO, *POOL) if one.id in story.ring.credentials]
        admin, target = draw(st.sampled_from(live)), draw(st.sampled_from(live))
        doing = draw(st.sampled_from(("add", "revoke", "rotate", "side by side")))
        if doing == "add" and fresh:
            joins = fresh.pop()
            story.say("added", admin, joins, key=joins)
        elif doing == "revoke" and len(live) > 2:
            story.say("revoked", admin, credential=target.id)
        elif doing == "rotate" and fresh:
            joins = fresh.pop()
            story.say("rotated", admin, joins, credential=target.id, key=joins)
        elif doing == "side by side" and len(live) > 3:
            prior = story.ring.tips
            for gone in draw(st.permutations(live))[:2]:
                signer = next(one for one in live if one.id != gone.id)
                story.tell(said("revoked", prior=prior, credential=gone.id), signer)
    return story


@st.composite
def noise(draw: st.DrawFn, story: Story) -> list[Told]:
    """What the world adds: records doubled, cut off from their proofs, moved, forged."""
    found = []
    for _ in range(draw(st.integers(0, 8))):
        base = draw(st.sampled_from(story.told))
        how = draw(st.sampled_from(("again", "bare", "moved", "outsider", "self-made", "borrowed", "founded")))
        prior = draw(st.sampled_from([story.root.digest, *story.ring.tips]))
        one, by = base.event, base.proofs
        if how == "bare":
            by = ()
        elif how == "moved" and one.said.kind != "founded":
            plain = json.loads(one.text) | {"prior": [prior]}
            one = parse(json.dumps(plain, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode())
            if one.digest == base.event.digest:
                continue
        elif how == "outsider":
            one = said("revoked", prior=(prior,), credential=ADA.id)
            by = tuple(proofs(one, EVE))
        elif how == "self-made":
            one = said("added", prior=(prior,), key=EVE)
            by = tuple(proofs(one, EVE))
        elif how == "borrowed":
            one = said("added", prior=(prior,), key=EVE)
            by = (*proofs(one, EVE), *base.proofs)
        elif how == "founded":
            one = said("founded", **founding(EVE.credential, DAN.credential))
            by = tuple(proofs(one, EVE))  # one of two
        found.append(Told(0, base.lived, one, by))
    return found


@given(data=st.data())
def test_nothing_but_those_who_may_changes_the_ring(data: st.DataObject) -> None:
    story = data.draw(histories())
    sound = story.ring
    added = data.draw(noise(story))
    seed = data.draw(st.integers(0, 1 << 30))
    note(f"{[one.event.said.kind for one in story.told]} and {len(added)} more, shuffled by {seed}")
    assert same(sound, ring_of(shuffled([*story.told, *added], seed)))
    assert EVE.id not in sound.credentials and not sound.frozen


@given(seed=st.integers(0, 1 << 30), signers=st.lists(st.sampled_from([ADA, SPARE, BOB, CLEO]), min_size=2, max_size=4))
def test_revocations_side_by_side_all_hold_in_any_order(seed: int, signers: list[Key]) -> None:
    story = Story(ADA, SPARE, BOB, CLEO, DAN)
    everybody = [ADA, SPARE, BOB, CLEO]
    gone = set()
    for signer in signers:  # each revokes another one, having seen none of the others do so
        target = everybody[(everybody.index(signer) + 1) % 4]
        story.say("revoked", signer, credential=target.id, after=[story.root])
        gone.add(target.id)
    for history in (story.history, shuffled(story.told, seed)):
        ring = ring_of(history)
        assert not ring.frozen and set(ring.credentials) == ids(*everybody, DAN) - gone
    story.say("added", DAN, EVE, key=EVE)  # and what comes next follows all of them
    assert EVE.id in story.ring.credentials and gone <= set(story.ring.dead)


def test_two_admins_who_revoke_each_other_are_both_gone() -> None:
    story = Story(ADA, SPARE, BOB)
    story.say("revoked", ADA, credential=BOB.id, after=[story.root])
    story.say("revoked", BOB, credential=ADA.id, after=[story.root])
    assert set(story.ring.credentials) == ids(SPARE) and not story.ring.frozen


# ---- rivals ----------------------------------------------------------------------------------------------------------

RIVALS: dict[str, Callable[[Story, tuple[Key, ...]], Event]] = {
    "added": lambda s, by: s.say("added", *by, DAN, key=DAN, after=[s.root]),
    "rotated": lambda s, by: s.say("rotated", *by, DAN, credential=SPARE.id, key=DAN, after=[s.root]),
    "revoked": lambda s, by: s.say("revoked", *by, credential=SPARE.id, after=[s.root]),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", RIVALS)
def test_only_rivals_that_were_both_authorised_freeze_the_ring(kind: str, seed: int) -> None:
    story = Story()
    story.say("added", ADA, CLEO, key=CLEO)
    sound = story.ring
    RIVALS[kind](story, (EVE,))
    RIVALS[kind](story, ())
    assert same(sound, ring_of(shuffled(story.told, seed)))
    RIVALS[kind](story, (BOB,))
    frozen = ring_of(shuffled(story.told, seed))
    assert frozen.frozen and "key.added" in frozen.frozen
    assert keyring.check_ring(frozen).code == "ring_frozen"  # type: ignore[union-attr]
    assert not ids(CLEO, DAN) & set(frozen.credentials)  # what only one of them brought is not there
    if kind != "added":
        assert SPARE.id not in frozen.credentials  # what either of them took away is gone


def test_a_thief_and_an_owner_side_by_side_leave_neither_the_thief_nor_his_key() -> None:
    story = Story()
    story.say("added", BOB, EVE, key=EVE, after=[story.root])  # Bob's key is in other hands
    story.say("revoked", ADA, credential=BOB.id, after=[story.root])
    assert story.ring.frozen and set(story.ring.credentials) == ids(ADA, SPARE)


def test_a_frozen_ring_still_revokes_and_does_not_thaw_by_it() -> None:
    story = Story()
    fork(story)
    story.say("revoked", BOB, credential=SPARE.id)
    assert story.ring.frozen and set(story.ring.credentials) == ids(BOB)


def test_the_recovery_key_settles_a_frozen_ring() -> None:
    story = Story()
    fork(story)
    asked = lost(story)
    story.say("recovered", NEW, of=(asked.digest,), after_ms=72 * HOUR_MS)
    assert not story.ring.frozen and set(story.ring.credentials) == ids(NEW, NEW2)


# ---- recovery --------------------------------------------------------------------------------------------------------


def test_after_the_wait_all_older_keys_are_dead() -> None:
    story = Story()
    asked = lost(story)
    assert story.ring.recovery is not None and set(story.ring.credentials) == ids(ADA, SPARE, BOB)
    assert story.ring.recovery.until - story.ring.recovery.since == 72 * HOUR_MS
    story.say("recovered", NEW2, of=(asked.digest,), after_ms=72 * HOUR_MS)
    ring = story.ring
    assert set(ring.credentials) == ids(NEW, NEW2) and ids(ADA, SPARE, BOB, PAPER) == set(ring.dead)
    assert ring.recovery is None and ring.recovery_key == base64url(PAPER2.soft.public)
    assert story.refusal("added", NEW, ADA, key=ADA) == "key_dead"
    assert story.refusal("added", NEW, PAPER, key=PAPER) == "key_dead"


STOPS: dict[str, Callable[[Story, Event], Any]] = {
    "a veto": lambda s, asked: s.say("vetoed", SPARE, of=(asked.digest,)),
    "a new key": lambda s, asked: s.say("added", ADA, CLEO, key=CLEO),
    "a revocation": lambda s, asked: s.say("revoked", BOB, credential=BOB.id),
    "a rotation": lambda s, asked: s.say("rotated", ADA, CLEO, credential=BOB.id, key=CLEO),
    "a vote": lambda s, asked: s.vote(BOB),
    "a vote, and somebody's lie after it": lambda s, asked: (s.vote(BOB), s.vote(BOB, EVE, "b" * 64)),
}


@pytest.mark.parametrize("how", STOPS)
def test_whatever_a_live_key_signs_stops_a_recovery(how: str) -> None:
    story = Story()
    asked = lost(story)
    STOPS[how](story, asked)
    assert story.ring.recovery is None
    story.tell(said("recovered", prior=(story.root.digest,), of=(asked.digest,)), NEW, after_ms=99 * HOUR_MS)
    assert not ids(NEW, NEW2) & set(story.ring.credentials)
    if how == "a veto":  # it said no to that one, and not for ever
        story.say("recovered", NEW, of=(lost(story).digest,), after_ms=72 * HOUR_MS)
        assert set(story.ring.credentials) == ids(NEW, NEW2)


@pytest.mark.parametrize("who", ["an outsider", "a dead key", "the new key", "the recovery key", "one in quarantine"])
def test_nobody_else_stops_a_recovery(who: str) -> None:
    story = Story()
    story.say("revoked", ADA, credential=BOB.id)
    if who == "one in quarantine":
        quarantine(story, SPARE)
    asked = lost(story)
    by = {"an outsider": EVE, "a dead key": BOB, "the new key": NEW, "the recovery key": PAPER,
          "one in quarantine": SPARE}[who]  # fmt: skip
    story.say("vetoed", by, of=(asked.digest,))
    story.vote(by)
    assert story.ring.recovery is not None


@pytest.mark.promise("6.4")
def test_a_vote_without_which_a_recovery_would_have_come_into_force_is_told_from_others() -> None:
    story = Story()
    story.vote(BOB)
    before = story.votes[-1].seq
    assert keyring.same_without(story.history, {before}), "nobody recovers anything"
    begun = lost(story)
    story.vote(BOB, request="b" * 64)
    stops = story.votes[-1].seq
    story.say("recovered", NEW, of=(begun.digest,), after_ms=72 * HOUR_MS)  # all the same
    story.vote(BOB, request="c" * 64)
    assert ids(ADA, BOB) <= story.ring.credentials.keys()
    assert keyring.same_without(story.history, {before})
    assert not keyring.same_without(story.history, {stops})


@pytest.mark.promise("3.6")
def test_an_unsigned_vote_in_the_name_of_a_key_stops_no_recovery() -> None:
    story = Story()
    lost(story)
    story.vote(BOB, EVE)
    assert story.ring.recovery is not None
    quarantine(story, BOB)  # and whoever was put into quarantine after they had voted has voted all the same
    story.vote(ADA)
    quarantine(story, ADA)
    assert story.ring.recovery is None


@pytest.mark.promise("3.6")
def test_a_vote_before_a_recovery_says_nothing_about_it_nor_does_a_copy_of_it_after() -> None:
    story = Story()
    story.vote(BOB)
    lost(story)
    assert story.ring.recovery is not None
    story.vote(BOB)  # the same answer, written down once more
    assert story.ring.recovery is not None
    story.vote(BOB, EVE, "b" * 64, seq=0)  # what somebody wrote in his name beforehand keeps his own from nothing
    story.vote(BOB, request="b" * 64)
    assert story.ring.recovery is None


def test_dead_keys_do_not_speak_from_the_past() -> None:
    """After a recovery, whoever kept an old key signs what might have been said before it, and puts it in."""
    story = Story()
    asked = lost(story)
    story.say("recovered", NEW, of=(asked.digest,), after_ms=72 * HOUR_MS)
    sound = story.ring
    story.say("added", ADA, EVE, key=EVE, after=[story.root])
    story.say("vetoed", ADA, of=(asked.digest,), after=[story.root])
    story.vote(ADA)
    assert same(sound, story.ring) and not story.ring.frozen


def test_a_recovery_that_was_hidden_in_an_unsigned_record_waits_from_when_it_was_signed() -> None:
    story = Story()
    asked = said("recovering", prior=story.ring.tips, **again())
    story.tell(asked)  # nobody signed: nobody is shown it
    assert story.ring.recovery is None
    story.tell(asked, NEW, NEW2, PAPER, after_ms=100 * HOUR_MS)
    assert story.refusal("recovered", NEW, of=(asked.digest,)) == "too_early"


def test_after_two_recoveries_the_first_recovery_key_is_of_no_use() -> None:
    story = Story()
    story.say("recovered", NEW, of=(lost(story).digest,), after_ms=72 * HOUR_MS)
    third = founding(CLEO.credential, DAN.credential, recovery=base64url(key(103).soft.public))
    assert story.refusal("recovering", CLEO, DAN, PAPER, **third) == "not_recovery_key"
    assert story.refusal("recovering", CLEO, DAN, PAPER2, **third) == ""


# ---- quarantine ------------------------------------------------------------------------------------------------------


def test_a_key_in_quarantine_counts_no_more_and_comes_back_by_another_admin() -> None:
    story = Story()
    held = quarantine(story, BOB)
    ring = story.ring
    assert set(ring.credentials) == ids(ADA, SPARE) and set(ring.quarantined) == ids(BOB) and not ring.frozen
    assert story.refusal("added", BOB, CLEO, key=CLEO) == "not_admin"
    assert story.refusal("revoked", BOB, credential=ADA.id) == "not_admin"
    story.say("released", ADA, credential=BOB.id, of=(held,))
    assert set(story.ring.credentials) == ids(ADA, SPARE, BOB)
    quarantine(story, BOB, "once more")
    assert BOB.id in story.ring.quarantined


def test_when_all_are_in_quarantine_the_recovery_key_begins_anew_and_one_free_admin_lets_the_others_out() -> None:
    story = Story(ADA, SPARE, BOB)
    held = {each.id: quarantine(story, each) for each in (SPARE, BOB)}
    assert set(story.ring.credentials) == ids(ADA)
    for each in (SPARE, BOB):
        story.say("released", ADA, credential=each.id, of=(held[each.id],))
    assert set(story.ring.credentials) == ids(ADA, SPARE, BOB)
    held = {each.id: quarantine(story, each, "again") for each in (ADA, SPARE, BOB)}
    assert not story.ring.credentials
    assert story.refusal("released", ADA, credential=BOB.id, of=(held[BOB.id],)) == "not_admin"
    story.say("recovered", NEW, of=(lost(story).digest,), after_ms=72 * HOUR_MS)
    assert set(story.ring.credentials) == ids(NEW, NEW2)


def test_a_key_in_quarantine_may_still_end_itself() -> None:
    story = Story()
    quarantine(story, BOB)
    story.say("revoked", BOB, credential=BOB.id)
    assert BOB.id in story.ring.dead


def test_a_quarantine_does_not_undo_what_its_key_had_signed() -> None:
    story = Story()
    story.say("revoked", BOB, credential=SPARE.id)
    quarantine(story, BOB)
    assert SPARE.id in story.ring.dead


def test_a_quarantine_beside_anything_freezes_nothing_and_raises_nobody() -> None:
    story = Story()
    story.say("added", ADA, CLEO, key=CLEO)
    story.say("quarantined", credential=CLEO.id, reason="no reason", after=[story.root])
    story.say("quarantined", credential="nobody", reason="no reason", after=[story.root])
    assert not story.ring.frozen and set(story.ring.credentials) == ids(ADA, SPARE, BOB)


# ---- the bytes -------------------------------------------------------------------------------------------------------

FROZEN = ROOT / "tests" / "vectors" / "keyring.json"


def test_events_that_were_made_from_the_page_alone_are_read_the_same() -> None:
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))
    told = []
    for place, one in enumerate(frozen["told"]):
        encoded = [json.dumps(one[name], ensure_ascii=False).encode() for name in ("text", "proofs")]
        blob = opening(b"0" * 22, body(event=encoded[0], proofs=encoded[1]))
        read = keyring.told_by(place, one["lived"], one["kind"], one["event"], one["prior"], blob)
        assert isinstance(read, Told) and read.event.challenge.hex() == one["challenge"], one["kind"]
        assert read.event.signed == bytes.fromhex(frozen["tag"]) + one["text"].encode()
        told.append(read)
    before, after = (ring_of(History(tuple(some), {}, "h")) for some in (told[:-1], told))
    wanted = frozen["before_the_last"]
    assert [*before.quarantined] == wanted["live"] and not before.credentials and [*before.tips] == wanted["tips"]
    assert before.recovery is not None and before.recovery.event == wanted["recovering"] and before.ignored == (2,)
    assert sorted(after.credentials) == frozen["after_all"]["live"] and [*after.tips] == frozen["after_all"]["tips"]


def test_the_frozen_events_are_what_their_maker_makes() -> None:
    done = subprocess.run([sys.executable, str(FROZEN.with_name("make_keyring.py")), "--check"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


# ---- on a log --------------------------------------------------------------------------------------------------------


class Clock:
    """The machine's clocks; `sleeps` makes lived time go by, `ahead` sets the wall alone."""

    def __init__(self) -> None:
        self._true, self.ahead_ms, self.slept_ms = SystemClock(), 0, 0

    def wall_us(self) -> int:
        return self._true.wall_us() + (self.ahead_ms + self.slept_ms) * 1000

    def boot_ms(self) -> int:
        return self._true.boot_ms() + self.slept_ms

    def boot_id(self) -> str:
        return self._true.boot_id()


def do(kit: AgentKit, kind: str, *by: Key, **what: Any) -> ceremonies.Receipt:
    held = {name: value.credential if isinstance(value, Key) else value for name, value in what.items()}
    one = ceremonies.begin(kit, kind, **held)
    return ceremonies.submit(kit, one, proofs(one, *by))


def found(kit: AgentKit, *keys: Key) -> ceremonies.Receipt:
    keys = keys or (ADA, SPARE, BOB)
    made = tuple(one.credential for one in keys)
    return do(kit, "founded", *keys, keys=made, recovery=RECOVERY, settings=Settings())


def test_a_ring_is_read_back_by_whoever_opens_the_log(tmp_path: Path) -> None:
    with home_kit(tmp_path) as kit:
        assert not ceremonies.ring_now(kit).founded and keyring.read(kit.log).head == ""
        found(kit)
        receipt = do(kit, "added", ADA, CLEO, key=CLEO)
        do(kit, "rotated", SPARE, DAN, credential=ADA.id, key=DAN)
        do(kit, "revoked", BOB, credential=BOB.id)
        here = ceremonies.ring_now(kit)
    with home_kit(tmp_path) as kit:
        there = ceremonies.ring_now(kit)
        assert there == here and set(there.credentials) == ids(SPARE, CLEO, DAN)
        assert there.head == kit.log.view.keys.head != receipt.head
        entries = [record.entry for record in kit.log.records() if record.entry.kind.startswith("key.")]
        assert [entry.prior for entry in entries[1:]] == [entry.event for entry in entries[:-1]]


def test_a_name_does_not_stand_in_a_header(kit: AgentKit) -> None:
    found(kit)
    quentin = key(41, "quentin")
    do(kit, "added", ADA, quentin, key=quentin)
    assert quentin.id in ceremonies.ring_now(kit).credentials
    for record in kit.log.records():
        assert b"quentin" not in record.line.lower()


def test_what_is_handed_in_twice_is_recorded_once(kit: AgentKit) -> None:
    found(kit)
    one = ceremonies.begin(kit, "added", key=CLEO.credential)
    made = proofs(one, ADA, CLEO)
    ceremonies.submit(kit, one.text.decode(), made)
    size = kit.log.size
    with pytest.raises(Unauthorised) as refused:
        ceremonies.submit(kit, one, made)
    assert refused.value.code == "stale_event" and kit.log.size == size


@pytest.mark.parametrize("lie", ["another's", "changed", "under another name", "no member", "nothing"])
def test_a_proof_that_does_not_hold_records_nothing(kit: AgentKit, lie: str) -> None:
    found(kit)
    one = ceremonies.begin(kit, "added", key=CLEO.credential)
    good = proofs(one, ADA, CLEO)
    wrong: Any = {
        "another's": ADA.proves(ceremonies.begin(kit, "added", key=CLEO.credential)),
        "changed": good[0] | {"signature": good[1]["signature"]},
        "under another name": EVE.proves(one) | {"credential": ADA.id},
        "no member": EVE.proves(one),
        "nothing": {},
    }[lie]
    size = kit.log.size
    with pytest.raises((Unauthorised, Unproven)):
        ceremonies.submit(kit, one, [wrong, good[1]])
    assert kit.log.size == size and CLEO.id not in ceremonies.ring_now(kit).credentials


def test_a_junk_record_changes_nothing_and_is_named(kit: AgentKit) -> None:
    found(kit)
    sound = ceremonies.ring_now(kit)
    one = said("added", prior=sound.tips, key=EVE)
    for text, digest in ((one.text.decode(), one.digest), ("{}", "0" * 64), (one.text.decode(), "f" * 64)):
        encoded = [json.dumps(value).encode() for value in (text, proofs(one, EVE))]
        draft = fact("key.added", body(event=encoded[0], proofs=encoded[1]), event=digest,
                     prior=position(sound.tips), up=True)  # fmt: skip
        kit.log.commit(lambda state, now, draft=draft: (draft,))
    ring = ceremonies.ring_now(kit)
    assert same(sound, ring) and len(ring.ignored) == 3
    ceremonies.submit(kit, one, proofs(one, ADA, EVE))  # and stands in nobody's way
    assert EVE.id in ceremonies.ring_now(kit).credentials


def test_records_whose_statements_are_gone_freeze_the_ring() -> None:
    """Reading on without them might bring a revoked key back."""
    story = Story()
    ring = ring_of(story.history._replace(lost=(7,)))
    assert ring.frozen and "record 7" in ring.frozen and not ring.credentials and ring.founded
    read = keyring.judged(story.history._replace(lost=(7,)))
    one = said("revoked", prior=(story.root.digest,), credential=BOB.id)
    with pytest.raises(Unauthorised) as refused:
        keyring.admit(read, Told(9, 0, one, tuple(proofs(one, ADA))))
    assert refused.value.code == "ring_frozen"


def test_what_a_newer_version_says_of_keys_freezes_the_ring(kit: AgentKit) -> None:
    """It may have ended a key. What merely claims to be so, under another hash or unsigned, changes nothing."""
    found(kit)
    do(kit, "added", ADA, CLEO, key=CLEO)  # no admin, once she is one
    do(kit, "revoked", ADA, credential=CLEO.id)
    signed = newer(kit)
    for by, digest, frozen in (
        ((), signed, False), ((ADA,), "0" * 64, False), ((EVE,), signed, False), ((CLEO,), signed, False),
        ((EVE, ADA), signed, True),
    ):  # fmt: skip
        newer(kit, *by, digest=digest)
        ring = ceremonies.ring_now(kit)
        assert bool(ring.frozen) == frozen, (by, ring.frozen)
        assert frozen or ADA.id in ring.credentials
    assert "newer amends" in ring.frozen and [need.kind for need in ceremonies.needs(kit)] == ["keyring_frozen"]
    for kind, by, what in (("added", (ADA, EVE), {"key": EVE}), ("revoked", (ADA,), {"credential": BOB.id})):
        with pytest.raises(Unauthorised) as refused:
            do(kit, kind, *by, **what)
        assert refused.value.code == "ring_frozen"


@pytest.mark.promise("3.6")
def test_the_recovery_key_leads_back_from_what_a_newer_version_says() -> None:
    clock = Clock()
    with AgentKit.in_memory(clock=clock) as kit:
        found(kit)
        newer(kit, ADA)
        do(kit, "recovering", NEW, NEW2, PAPER, **again())
        clock.slept_ms = 73 * HOUR_MS
        do(kit, "recovered", NEW)
        ring = ceremonies.ring_now(kit)
        assert not ring.frozen and set(ring.credentials) == ids(NEW, NEW2)
        newer(kit, ADA)  # nobody any more
        assert not ceremonies.ring_now(kit).frozen


def newer(kit: AgentKit, *by: Key, digest: str = "") -> str:
    """Write what a later version might say, signed by these. Its digest."""
    later = json.dumps({"kind": "revoked", "v": 2, "whom": BOB.id}, separators=(",", ":"), sort_keys=True)
    signed = [one.soft.get(KEYRING_TAG + later.encode()) for one in by]
    draft = fact("key.revoked", body(event=json.dumps(later).encode(), proofs=json.dumps(signed).encode()),
                 event=digest or sha256(later.encode()).hexdigest(),
                 prior=position(ceremonies.ring_now(kit).tips), up=True)  # fmt: skip
    if by or digest:
        kit.log.commit(lambda state, now: (draft,))
    return sha256(later.encode()).hexdigest()


@pytest.mark.promise("3.6")
def test_a_frozen_ring_stops_also_what_a_rule_would_let_happen_unasked() -> None:
    gate = PreFlightGate([Rule("trusted", tool_is("mail.send"), Verdict.ALLOW)])
    sent: list[str] = []
    with AgentKit.in_memory(gate=gate) as agent:
        found(agent)
        with agent.transaction() as saga:
            saga.execute("mail.send", lambda: sent.append("before"), semantics=IRREVERSIBLE)
        newer(agent, ADA)
        with pytest.raises(SagaAborted) as aborted, agent.transaction() as saga:
            saga.execute("mail.send", lambda: sent.append("after"), semantics=IRREVERSIBLE)
        with agent.transaction() as saga:  # what can be taken back goes on
            saga.execute("file.write", lambda: sent.append("undoable"), semantics=REVERSIBLE, undo=Compensation(print))
    assert aborted.value.cause.code == "ring_frozen" and sent == ["before", "undoable"]


def test_a_device_that_cannot_check_a_key_freezes_and_does_not_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, an event by an ES256 key can neither be taken for signed nor be passed over."""
    phone = es256(b"\x21" * 32)
    member = phone.enrolled(person="phil", roles=BOTH)
    story = Story(ADA, SPARE)
    keys = (ADA.credential, member)
    root = said("founded", keys=keys, recovery=RECOVERY, settings=Settings(algs=(-8, -7)))
    story.told = []
    story.tell(root, ADA, proofs_of=[phone.get(root.signed)])
    gone = said("revoked", prior=(root.digest,), credential=ADA.id)
    story.tell(gone, proofs_of=[phone.get(gone.signed)])
    assert set(story.ring.credentials) == {member.id}
    for name in ("cryptography", "cryptography.hazmat.primitives.asymmetric", "cryptography.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    blind = ring_of(story.history)
    assert "cannot check" in blind.frozen and not blind.credentials and blind.founded
    read = keyring.judged(story.history)
    with pytest.raises(Unauthorised) as refused:
        keyring.admit(read, Told(keyring.FAR, 0, said("revoked", prior=(gone.digest,), credential=ADA.id), ()))
    assert refused.value.code == "ring_frozen"


def test_junk_with_a_key_that_cannot_be_checked_freezes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    story.told = []
    keys = tuple(one.credential for one in (ADA, SPARE))
    story.tell(said("founded", keys=keys, recovery=RECOVERY, settings=Settings(algs=(-8, -7))), ADA, SPARE)
    sound = story.ring
    phone = es256(b"\x21" * 32)
    junk = said("added", prior=sound.tips, key=phone.enrolled(person="phil"))
    story.tell(junk, EVE, proofs_of=[phone.get(junk.signed)])
    for name in ("cryptography", "cryptography.hazmat.primitives.asymmetric", "cryptography.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    assert same(sound, ring_of(story.history))


def test_a_recovery_waits_in_lived_time_and_not_by_the_wall() -> None:
    clock = Clock()
    with AgentKit.in_memory(clock=clock) as kit:
        found(kit)
        do(kit, "recovering", NEW, NEW2, PAPER, **again())
        [need] = ceremonies.needs(kit)
        assert need.kind == "keyring_recovery" and any(said.startswith("amends keys veto --") for said in need.commands)
        clock.ahead_ms = 100 * HOUR_MS  # somebody sets the clock
        with pytest.raises(Unauthorised) as refused:
            do(kit, "recovered", NEW)
        assert refused.value.code == "too_early"
        clock.slept_ms = 72 * HOUR_MS + 1000
        do(kit, "recovered", NEW)
        assert set(ceremonies.ring_now(kit).credentials) == ids(NEW, NEW2) and not ceremonies.needs(kit)


def test_a_veto_is_written_and_read() -> None:
    clock = Clock()
    with AgentKit.in_memory(clock=clock) as kit:
        found(kit)
        do(kit, "recovering", NEW, NEW2, PAPER, **again())
        do(kit, "vetoed", BOB)
        clock.slept_ms = 80 * HOUR_MS
        with pytest.raises(Unauthorised) as refused:
            do(kit, "recovered", NEW)
        assert refused.value.code == "nothing_recovering"
        with pytest.raises(Unauthorised):
            do(kit, "vetoed", BOB)


def test_a_vote_of_a_live_key_stops_a_recovery_that_waits() -> None:
    state = State()
    keys: Keys = state.keys
    keys.fold(Entry(9, "", 0, "vote.cast", credential=keyring.header_id(BOB.id), counter=4), 0, state)
    assert keys.heard == {BOB.id: 9} and keys.counters == {BOB.id: 4}
    other = State().keys
    other.load(keys.dump())
    assert other.heard == keys.heard


@pytest.mark.promise("3.6")
def test_a_vote_that_is_written_with_its_proof_stops_a_recovery_and_one_without_stops_none(kit: AgentKit) -> None:
    found(kit)
    do(kit, "recovering", NEW, NEW2, PAPER, **again())

    def cast(request: str, by: Key, signer: Key) -> None:
        proof = signer.soft.get(decision(request, "deny")) | {"credential": by.id}
        draft = fact("vote.cast", body(proof=json.dumps(proof).encode()), of="z" * 26, step=1, request=request, up=True,
                     out="deny", person="0" * 16, level=1, credential=by.id, counter=1 << 52, why="late")  # fmt: skip
        kit.log.commit(lambda state, now: [draft])

    cast("a" * 64, BOB, EVE)
    assert ceremonies.ring_now(kit).recovery is not None
    cast("b" * 64, BOB, BOB)
    assert ceremonies.ring_now(kit).recovery is None


def test_a_counter_that_went_back_puts_the_key_into_quarantine(kit: AgentKit) -> None:
    token = SoftSsh(b"\x44" * 32, application="ssh:amends")
    member = token.enrolled(person="tom", roles=BOTH)
    found(kit)
    one = ceremonies.begin(kit, "added", key=member)
    ceremonies.submit(kit, one, [ADA.proves(one), token.get(one.signed, namespace=KEYRING, counter=9)])
    two = ceremonies.begin(kit, "revoked", credential=SPARE.id)
    with pytest.raises(Unproven) as refused:  # a copy of the key, that has counted less
        ceremonies.submit(kit, two, [token.get(two.signed, namespace=KEYRING, counter=9)])
    assert refused.value.code == "counter_went_back"
    ring = ceremonies.ring_now(kit)
    assert member.id in ring.quarantined and SPARE.id in ring.credentials
    [need] = ceremonies.needs(kit)
    assert need.kind == "key_quarantined" and any(
        said.startswith("amends keys release --") and said.endswith(f" {member.id}") for said in need.commands
    )
    assert ceremonies.quarantine(kit, member.id, "again") is None
    do(kit, "released", ADA, credential=member.id)
    three = ceremonies.begin(kit, "revoked", credential=SPARE.id)
    ceremonies.submit(kit, three, [token.get(three.signed, namespace=KEYRING, counter=10)])
    assert SPARE.id in ceremonies.ring_now(kit).dead


def test_an_old_proof_played_again_is_stale_and_no_copied_key(kit: AgentKit) -> None:
    token = SoftSsh(b"\x45" * 32, application="ssh:amends")
    member = token.enrolled(person="tom", roles=BOTH)
    found(kit)
    one = ceremonies.begin(kit, "added", key=member)
    made = [ADA.proves(one), token.get(one.signed, namespace=KEYRING)]
    ceremonies.submit(kit, one, made)
    with pytest.raises(Unauthorised):
        ceremonies.submit(kit, one, made)
    assert not ceremonies.ring_now(kit).quarantined


def test_a_passkey_is_made_for_a_challenge_that_is_used_once(kit: AgentKit) -> None:
    found(kit)
    ring, given = ceremonies.ring_now(kit), ceremonies.Challenges()
    asked = ceremonies.creation(ring, "phil", given.issue())
    assert asked["rp"]["id"] == "amends.localhost" and [one["alg"] for one in asked["pubKeyCredParams"]] == [-8]
    browser = SoftPasskey(b"\x22" * 32)
    challenge = given.spend(asked["challenge"])
    with pytest.raises(Unproven):
        given.spend(asked["challenge"])
    made = ceremonies.enrolled(ring, browser.create(challenge), challenge, person="phil", roles=("approver",))
    one = ceremonies.begin(kit, "added", key=made)
    ceremonies.submit(kit, one, [ADA.proves(one), browser.get(one.signed, origin=ORIGIN)])
    ring = ceremonies.ring_now(kit)
    assert made.id in ring.credentials and ring.counter(made.id, kit.log.view.keys) == 1
    assert ceremonies.creation(ring, "phil", given.issue())["excludeCredentials"] == [
        {"type": "public-key", "id": made.id}
    ]
    with pytest.raises(Unproven) as refused:
        ceremonies.enrolled(ring, browser.create(challenge), challenge, person="phil", roles=("approver",))
    assert refused.value.code == "credential_known"


def test_who_is_asked_to_sign_is_told(kit: AgentKit) -> None:
    found(kit, ADA, SPARE)
    one = ceremonies.begin(kit, "added", key=CLEO.credential)
    assert {(part.credential.id, part.role, part.must) for part in ceremonies.parts(kit, one)} == {
        (ADA.id, "admin", False), (SPARE.id, "admin", False), (CLEO.id, "new", True),
    }  # fmt: skip
    assert ceremonies.missing(kit, one, proofs(one, CLEO)) == "not_admin"
    assert ceremonies.missing(kit, one, proofs(one, CLEO, ADA)) == ""
    lost_all = ceremonies.begin(kit, "recovering", **again())
    roles = {part.credential.id: part.role for part in ceremonies.parts(kit, lost_all) if part.must}
    assert roles == {NEW.id: "new", NEW2.id: "new", PAPER.id: "recovery"}


# ---- the view --------------------------------------------------------------------------------------------------------


def _fact(seq: int, **header: Any) -> Entry:
    held: dict[str, Any] = {
        "kind": "key.added",
        "event": f"{seq:064x}",
        "prior": "0" * 64,
        "c": ("0" * 64,),
        "up": (1, 1),
    }
    return Entry(seq, "", seq, **(held | header))


@given(order=st.permutations(range(1, 7)))
def test_the_head_does_not_care_in_which_order_facts_came(order: list[int]) -> None:
    state = State()
    heads = []
    for places in (order, range(1, 7)):
        keys = Keys()
        for place in places:
            keys.check(_fact(place), state)
            keys.fold(_fact(place), place, state)
        heads.append(keys.head)
        again = Keys()
        again.load(keys.dump())
        assert (again.head, again.seqs, again.places, again.dump()) == (keys.head, keys.seqs, keys.places, keys.dump())
    assert heads[0] == heads[1] != Keys().head == ""


@pytest.mark.parametrize(
    "header", [{"event": ""}, {"event": "X" * 64}, {"prior": ""}, {"prior": "x"}, {"c": ()}, {"up": ()},
               {"kind": "key.founded"}],
)  # fmt: skip
def test_a_fact_of_a_key_without_its_place_is_illegal(header: dict[str, Any]) -> None:
    with pytest.raises(Illegal):
        Keys().check(_fact(3, **header), State())


# ---- at once, and cut off --------------------------------------------------------------------------------------------


def test_of_two_events_that_follow_the_same_one_is_recorded(tmp_path: Path) -> None:
    """Two processes of the device, each with an event that was signed for the same place."""
    with home_kit(tmp_path) as one, home_kit(tmp_path) as two:
        found(one)
        joins = [
            ceremonies.begin(one, "added", key=CLEO.credential),
            ceremonies.begin(two, "added", key=DAN.credential),
        ]
        signed = [proofs(joins[0], ADA, CLEO), proofs(joins[1], BOB, DAN)]
        codes: list[str] = []
        gate = threading.Barrier(2)

        def hand_in(kit: AgentKit, place: int) -> None:
            gate.wait()
            try:
                ceremonies.submit(kit, joins[place], signed[place])
                codes.append("")
            except Unauthorised as refused:
                codes.append(refused.code)

        threads = [threading.Thread(target=hand_in, args=(kit, place)) for place, kit in enumerate((one, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ring = ceremonies.ring_now(one)
        assert sorted(codes) == ["", "stale_event"] and not ring.frozen
        assert len(ids(CLEO, DAN) & set(ring.credentials)) == 1
        assert ring == ceremonies.ring_now(two)


def test_what_was_judged_is_what_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process ends Ada's key after her signature was checked, and before it is recorded."""
    with home_kit(tmp_path) as one, home_kit(tmp_path) as two:
        found(one)
        joins = ceremonies.begin(two, "added", key=CLEO.credential)
        commit, turns = two.log.commit, []

        def late(decide: Any, *more: Any) -> Any:
            if not turns:
                turns.append(do(one, "revoked", BOB, credential=ADA.id))
            return commit(decide, *more)

        monkeypatch.setattr(two.log, "commit", late)
        with pytest.raises(Unauthorised) as refused:
            ceremonies.submit(two, joins, proofs(joins, ADA, CLEO))
        ring = ceremonies.ring_now(one)
        assert turns and refused.value.code == "stale_event" and not ring.frozen
        assert set(ring.credentials) == ids(SPARE, BOB)


def test_an_event_is_whole_or_not_there_wherever_its_process_dies(tmp_path: Path) -> None:
    """Killed at some point of its way; whoever comes next hands the same signatures in again."""
    with home_kit(tmp_path) as kit:
        found(kit)
    died, arrived = 0, 0
    for turn, wait in enumerate((0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08)):
        joins = key(60 + turn, "zoe", ("approver",))
        with home_kit(tmp_path) as kit:
            one = ceremonies.begin(kit, "added", key=joins.credential)
            made = proofs(one, ADA, joins)
        ready, go = os.pipe()
        if (pid := os.fork()) == 0:
            child = home_kit(tmp_path)
            os.write(go, b".")
            ceremonies.submit(child, one, made)
            time.sleep(20)
            os._exit(0)
        os.read(ready, 1)
        time.sleep(wait)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(go)
        with home_kit(tmp_path) as kit:
            there = joins.id in ceremonies.ring_now(kit).credentials
            arrived, died = arrived + there, died + (not there)
            if there:
                with pytest.raises(Unauthorised, match="changed since"):
                    ceremonies.submit(kit, one, made)
            else:
                ceremonies.submit(kit, one, made)
            ring = ceremonies.ring_now(kit)
            assert joins.id in ring.credentials and not ring.frozen and not ring.ignored
    assert arrived + died == 7 and arrived, f"{died} died, {arrived} arrived"


# ---- the command line, with the keys that people have ----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A home, and SSH keys of the real ssh-keygen."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    for name in ("one", "two", "three", "four"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    home_kit(tmp_path).close()
    yield tmp_path


def amends(folder: Path, *args: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "amends.cli", *args], cwd=folder, capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def listed(folder: Path) -> dict[str, Any]:
    code, out, err = amends(folder, "keys", "list", "--json")
    assert code in (0, 1), err
    found: dict[str, Any] = json.loads(out)
    return found


def states(folder: Path) -> dict[str, str]:
    return {row["label"]: row["state"] for row in listed(folder)["keys"]}


def test_two_ssh_keys_found_a_ring_at_the_terminal(folder: Path) -> None:
    assert listed(folder)["founded"] is False
    code, out, err = amends(folder, "keys", "init", "--person", "ada", "--ssh", "one", "--ssh", "two")
    assert code == 0, err
    assert "Write it down now" in out and "Fingerprints" in out and "key.founded" in out
    paper = next(line.strip() for line in out.splitlines() if line.startswith("    ") and len(line.split()) == 14)
    told = listed(folder)
    assert [row["person"] for row in told["keys"]] == ["ada", "ada"] and states(folder) == {
        "one": "live",
        "two": "live",
    }
    for row in (*told["keys"], {"fingerprint": told["recovery_key"]}):
        assert row["fingerprint"] in out
    printed = subprocess.run(["ssh-keygen", "-l", "-f", "one.pub"], cwd=folder, capture_output=True, text=True)
    assert told["keys"][0]["id"] == printed.stdout.split()[1]
    code, out, err = amends(folder, "keys", "init", "--person", "ada", "--ssh", "three", "--ssh", "four")
    assert code == 6 and "there is a keyring already" in err and "recovery" not in out

    code, _, err = amends(folder, "keys", "enrol", "--person", "bob", "--new-ssh", "three", "--ssh", "three")
    assert code == 6 and "may signed" in err or "no such key" in err
    assert amends(folder, "keys", "enrol", "--person", "bob", "--new-ssh", "three", "--ssh", "one")[0] == 0
    code, out, err = amends(folder, "keys", "revoke", "one", "--ssh", "three")
    assert code == 6 and "nobody who may signed it" in err
    assert amends(folder, "keys", "revoke", "one", "--ssh", "two", "--reason", "lost in a train")[0] == 0
    assert states(folder) == {"one": "dead", "two": "live", "three": "live"}
    code, out, err = amends(folder, "keys", "rotate", "two", "--new-ssh", "four", "--ssh", "two", "--json")
    assert code == 0 and json.loads(out)["kind"] == "key.rotated"
    assert states(folder) == {"one": "dead", "two": "dead", "three": "live", "four": "live"}

    (folder / "paper").write_text(paper.upper().replace(" ", "-"))
    for name in ("raw1", "raw2"):
        assert amends(folder, "keys", "new", name)[0] == 0
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    code, out, err = amends(folder, "keys", "recover", "--person", "ada", "--new-key", "raw1", "--new-key", "raw2",
                            "--recovery", "paper", "--recovery-out", "newpaper")  # fmt: skip
    assert code == 0 and "Nothing is replaced yet" in out, err
    assert listed(folder)["recovery"]["left_ms"] > 71 * HOUR_MS
    code, out, err = amends(folder, "keys", "recover", "--finish", "--key", "raw1")
    assert code == 6 and "waits still" in err
    code, out, _ = amends(folder, "keys", "list")
    assert code == 1 and "all keys are replaced in" in out
    assert amends(folder, "keys", "veto", "--ssh", "three")[0] == 0
    assert listed(folder)["recovery"] is None and amends(folder, "verify")[0] == 0


def test_two_admins_sign_one_event_in_two_places(folder: Path) -> None:
    code, _, err = amends(folder, "keys", "init", "--ssh", "ada=one", "--ssh", "bob=two", "--quorum", "2",
                          "--recovery-out", "recovery", "--json")  # fmt: skip
    assert code == 0, err
    assert (folder / "recovery").stat().st_mode & 0o777 == 0o600
    enrol = ("keys", "enrol", "--person", "cleo", "--new-ssh", "three", "--ssh", "one")
    code, _, err = amends(folder, *enrol)
    assert code == 6 and "not enough admins" in err
    assert amends(folder, *enrol, "--to", "event.json")[0] == 0
    assert amends(folder, "keys", "submit", "event.json")[0] == 6 and states(folder).keys() == {"one", "two"}
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    code, _, err = amends(
        elsewhere, "--home", str(elsewhere / "none"), "keys", "sign", "../event.json", "--ssh", "../two"
    )
    assert code == 0 and "joins       cleo, fingerprint" in err and not (elsewhere / "none").exists()
    assert amends(folder, "keys", "submit", "event.json")[0] == 0
    assert states(folder)["three"] == "live"


VALUES: dict[str, Any] = {
    "keys": (ADA.credential, new(30, label="\u202ekcab\x1b[2J")),
    "key": new(31, person="zo\u2028e"),
    "recovery": RECOVERY,
    "settings": Settings(
        (-7, -8), rp_id="other.localhost", origins=("http://evil.example",), synced=True, quorum=3, delay_ms=86400000
    ),
    "prior": ("ab" * 32, "cd" * 32),
    "of": ("ef" * 32,),
    "credential": "some-key",
    "reason": "lost\x07 \u2066in a train",
}


def leaves(value: Any) -> Iterator[Any]:
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from leaves(one)
    if not isinstance(value, (dict, list)):
        yield value


@pytest.mark.promise("3.7")
@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_of_an_event_stands_on_the_screen_of_whoever_signs_it(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    must, may = FIELDS[kind]
    one = event(kind, "5a" * 32, **{name: VALUES[name] for name in sorted(must | may) if name in VALUES})
    said = json.loads(one.text)
    assert must | may == set(said), "the event has every field that its kind may have"
    file = tmp_path / "event.json"
    file.write_text(json.dumps({"kind": "amends-keyring-event", "v": 1, "event": one.text.decode(), "proofs": []}))
    with pytest.raises(SystemExit):  # no key was named
        main(["keys", "sign", str(file)])
    shown = capsys.readouterr().err
    assert not [letter for letter in shown if unicodedata.category(letter)[0] == "C" and letter != "\n"]
    whole = "".join(line.partition("\u2502 ")[2] for line in shown.splitlines())
    for value in leaves(said):
        text = {True: "true", False: "false"}[value] if isinstance(value, bool) else plain(str(value))
        assert (text or "(empty text)") in whole, (kind, value)
    for name in said:
        assert re.search(rf"^  {name}\b", shown, re.MULTILINE), (kind, name)
    for key in one.new:
        assert keys.fingerprint(key) in shown
    assert check_code(one.digest) in shown


def test_a_usb_key_founds_adds_and_signs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its packets inward the key is of software; python-fido2 and everything above it are as they are."""
    pytest.importorskip("fido2", reason="python-fido2 (extra usb) is not installed")
    pytest.importorskip("cryptography", reason="cryptography (extra passkeys) is not installed")
    from soft_ctap import SoftKey, plugged_in

    from amends.cli import keys as verbs
    from amends.cli.main import main
    from amends.cli.security_key import Talk

    monkeypatch.chdir(folder)
    monkeypatch.setattr(verbs, "_talk", lambda: Talk(lambda text: None, lambda left: "1234"))

    def run(*args: str) -> object:
        with pytest.raises(SystemExit) as left:
            main(["keys", *args])
        return left.value.code

    token = SoftKey(state=folder / "token")
    with plugged_in(token):
        assert run("init", "--person", "ada", "--usb", "--ssh", "one", "--recovery-out", "paper") == 0
        assert run("enrol", "--person", "bob", "--new-ssh", "two", "--usb") == 0
        assert run("enrol", "--person", "bob", "--new-usb", "--ssh", "one") == 6  # the same key once more
    other = SoftKey(b"\x2b" * 32, state=folder / "other")
    with plugged_in(other):
        assert run("revoke", "two", "--usb") == 6
        assert run("enrol", "--person", "cleo", "--new-usb", "--label", "hers", "--ssh", "one") == 0
    rows = {row["label"]: row for row in listed(folder)["keys"]}
    assert rows.keys() == {"USB key", "one", "two", "hers"} and rows["hers"]["kind"] == "webauthn"
    assert rows["USB key"]["level"] == "verification" and rows["one"]["level"] == "file"


CANNOT_BE = [
    (("init", "--person", "ada", "--ssh", "one"), "two keys are asked at least"),
    (("init", "--ssh", "one", "--ssh", "two"), "named person"),
    (("init", "--person", "ada", "--ssh", "one", "--ssh", "one"), "one key stands in it twice"),
    (("init", "--person", "ada", "--ssh", "one", "--ssh", "none"), "cannot be read"),
    (("init", "--person", "ada", "--ssh", "one", "--ssh", "two", "--json"), "not into a document"),
    (("enrol", "--person", "bob", "--new-ssh", "one", "--ssh", "two"), "no keyring on this device"),
    (("revoke", "x", "--ssh", "one"), "No key of the ring goes by"),
    (("recover", "--finish", "--ssh", "one"), "no keyring on this device"),
    (("veto", "--ssh", "one"), "no keyring on this device"),
    (("sign", "one", "--ssh", "one"), "holds no keyring event"),
    (("submit", "nothing"), "holds no keyring event"),
    (("new", "one"), "is there already"),
]


def test_what_cannot_be_is_one_sentence_and_changes_nothing(folder: Path) -> None:
    for args, said in CANNOT_BE:
        code, out, err = amends(folder, "keys", *args)
        assert code in (2, 6) and said in out + err, (args, code, out, err)
        assert "Traceback" not in err and "shown once" not in out
    assert listed(folder)["founded"] is False


def test_a_raw_key_that_others_can_read_does_not_sign(folder: Path) -> None:
    for name in ("raw1", "raw2"):
        amends(folder, "keys", "new", name)
    (folder / "raw2").chmod(0o644)
    init = ("keys", "init", "--person", "ada", "--key", "raw1", "--key", "raw2", "--recovery-out", "paper")
    code, _, err = amends(folder, *init)
    assert code == 2 and "can be read by others" in err and not (folder / "paper").exists()
    (folder / "raw2").chmod(0o600)
    assert amends(folder, *init)[0] == 0 and (folder / "paper").exists()


def test_recovery_on_paper_survives_how_people_type() -> None:
    from amends.cli import raw_key
    from amends.store.errors import YouErred

    seed = os.urandom(32)
    text = raw_key.on_paper(seed)
    assert raw_key.from_paper(text.upper().replace(" ", "\n")) == seed == raw_key.from_paper(text.replace("o", "0"))
    for place in range(0, len(text), 5):
        wrong = text[:place] + ("b" if text[place] != "b" else "c") + text[place + 1 :]
        with pytest.raises(YouErred):
            raw_key.from_paper(wrong)
