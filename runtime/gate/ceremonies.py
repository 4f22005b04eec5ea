"""Changing whose keys count: say what is to happen, let those sign who must, and hand it in.

`begin` makes the statement: `event.signed` is what SSH and raw keys sign, `event.challenge` what WebAuthn keys do.
`submit` checks every proof and commits. Terminal and page use the same two. A key in a browser or a USB port must first
be made: `creation` is what it is asked, `enrolled` reads its answer, and the challenge between them is used once.

`submit` judges against the keyring as it was read, and commits only if that still stands, inside the transaction; else
it judges again. What was signed names the events that it follows, so that no signature can be moved to another day.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...store.chain import Draft
from ...store.clock import Now
from ...store.errors import Refused
from ..facts import body, fact
from .keyevent import (
    ADMIN,
    Event,
    Settings,
    check_proof,
    event,
    parse,
    person_of,
    position,
    refuse,
    settings_for,
    signers,
)
from .keyring import FAR, Read, Ring, Told, admit, check_counter, read, read_all, standing_for
from .proof import WEBAUTHN, Credential, Unproven, base64url, register
from .ways import signing

if TYPE_CHECKING:
    from ..kit import AgentKit
    from ..state import State

AGAIN = 8
"""How often an event is judged anew because the keyring moved while it was."""
BYTES, CHALLENGES_MAX, TOUCH_MS = 32, 64, 60_000
NEW, RECOVERY, LIVE = "new", "recovery", "live"


class Receipt(NamedTuple):
    """An event that is in the log: its kind, digest and record, and the head of the keyring after it."""

    kind: str
    event: str
    seq: int
    head: str


class Part(NamedTuple):
    """A key that can sign an event, and as what: new, admin, live or recovery. must: without it nothing comes of it."""

    credential: Credential
    role: str
    must: bool


# ---- what is to happen ----------------------------------------------------------------------------------------------


def ring_now(kit: AgentKit) -> Ring:
    """The keyring, with everything that other processes have written."""
    kit.log.refresh()
    return read(kit.log)


def begin(kit: AgentKit, kind: str, **what: Any) -> Event:
    """A statement to be signed, which follows the keyring as it is now. kind: without `key.`; fields: as
    keyevent.FIELDS, where `prior` is found here, and `of` if it is left out. Raises Unauthorised."""
    ring = ring_now(kit)
    if kind == "founded" and ring.founded:
        refuse("keyring_exists")
    if kind != "founded":
        if not ring.founded:
            refuse("no_keyring")
        what["prior"] = ring.tips or refuse("ring_frozen", ring.frozen)
    if kind in _ABOUT and "of" not in what:
        what["of"] = _ABOUT[kind](read_all(kit.log), str(what.get("credential", "")))
    return event(kind, os.urandom(BYTES).hex(), **what)


def _quarantines(read: Read, credential: str) -> tuple[str, ...]:
    found = (one.event for one in read.known.told if one.event.said.kind == "quarantined")
    return tuple(sorted({each.digest for each in found if each.said.credential == credential})) or refuse(
        "not_quarantined"
    )


def _recoveries(read: Read, credential: str) -> tuple[str, ...]:
    waiting = read.epoch.waiting(read.known) if read.epoch else []
    return tuple(sorted(one.event.digest for one in waiting)) or refuse("nothing_recovering")


def _recovery(read: Read, credential: str) -> tuple[str, ...]:
    return (read.ring.recovery.event,) if read.ring.recovery else refuse("nothing_recovering")


_ABOUT = {"released": _quarantines, "vetoed": _recoveries, "recovered": _recovery}
"""kind -> the events that it is about, where nobody said"""


def parts(kit: AgentKit, event: Event) -> list[Part]:
    """Whose signatures an event can use, as the keyring stands. Raises Unauthorised."""
    kept = read_all(kit.log)
    standing = standing_for(kept.epoch, event)
    new = {key.id for key in event.new}
    found = []
    for key in signers(event, standing).values():
        if key.id in new:
            found.append(Part(key, NEW, True))
        elif key.id not in standing.live:
            found.append(Part(key, RECOVERY, True))
        elif key.id not in kept.ring.quarantined:
            found.append(Part(key, ADMIN if ADMIN in key.roles else LIVE, False))
    return found


def missing(kit: AgentKit, event: Event, proofs: Iterable[Mapping[str, Any]]) -> str:
    """Why an event with these proofs would be refused now, as a code; empty if it would not."""
    kept = read_all(kit.log)
    try:
        admit(kept, Told(FAR, kit.log.now().lived, event, tuple(proofs)))
    except Refused as error:
        return error.code
    return ""


# ---- handing it in --------------------------------------------------------------------------------------------------


def submit(kit: AgentKit, event: Event | str, proofs: Sequence[Mapping[str, Any]]) -> Receipt:
    """Record an event with the proofs of those who signed. Raises Unauthorised, Unproven; a key whose counter went back
    is put into quarantine first."""
    said = parse(event.encode()) if isinstance(event, str) else event
    kit.log.refresh()
    for _ in range(AGAIN):
        kept = read_all(kit.log)
        _fresh(kept, said)  # before any proof is looked at: an old one played again must not look like a copied key
        _prove(kit, kept, said, proofs)
        admit(kept, Told(FAR, kit.log.now().lived, said, tuple(proofs)))
        found = _commit(kit, kept, said, proofs)
        if found is not None:
            return found
        kit.log.refresh()
    refuse("stale_event")


def _fresh(kept: Read, event: Event) -> None:
    if kept.ring.founded and event.said.kind == "founded":
        refuse("keyring_exists")
    if not kept.ring.founded and event.said.kind != "founded":
        refuse("no_keyring")
    said_already = (
        kept.epoch.remarks(event.said.kind) if kept.epoch and event.said.kind in ("recovering", "vetoed") else ()
    )
    if event.said.prior != kept.ring.tips or any(one.event.digest == event.digest for one in said_already):
        refuse("stale_event")


def _prove(kit: AgentKit, kept: Read, event: Event, proofs: Sequence[Mapping[str, Any]]) -> None:
    """Raise for a proof that does not hold: whoever hands it in is told, where a reader of the log passes it over."""
    standing = standing_for(kept.epoch, event)
    known, settings = signers(event, standing), settings_for(event, standing)
    for proof in proofs:
        key = known.get(str(proof.get("credential"))) if isinstance(proof, Mapping) else None
        if key is None:
            refuse("no_such_key", "one that signed")
        try:
            check_counter(kit.log, kept.ring, key, check_proof(event, proof, key, settings).counter)
        except Unproven as error:
            if error.code == "counter_went_back":
                quarantine(kit, key.id, error.message)
            raise


def _commit(kit: AgentKit, kept: Read, event: Event, proofs: Sequence[Mapping[str, Any]]) -> Receipt | None:
    """None if the keyring is not the one any more that was judged by."""
    encoded = (msgspec.json.encode(event.text.decode()), msgspec.json.encode([dict(proof) for proof in proofs]))
    draft = fact(
        event.kind,
        body(event=encoded[0], proofs=encoded[1]),
        event=event.digest,
        prior=position(event.said.prior),
        up=True,
    )

    def decide(state: State, now: Now) -> Sequence[Draft]:
        same = state.keys.head == kept.known.head
        return (draft,) if same and (kept.ring.recovery is None or state.keys.heard == kept.known.heard) else ()

    written = kit.log.commit(decide)
    if not written:
        return None
    return Receipt(event.kind, event.digest, written[0].seq, kit.log.view.keys.head)


def quarantine(kit: AgentKit, credential: str, why: str) -> Receipt | None:
    """Ask a key no more until an admin lets it out. Needs nobody's signature; None if it does not count anyhow."""
    ring = ring_now(kit)
    if credential not in ring.credentials:
        return None
    return submit(kit, begin(kit, "quarantined", credential=credential, reason=why[:200]), ())


# ---- keys that must be made first -----------------------------------------------------------------------------------


class Challenges:
    """Challenges that were given out and not used yet: each is good for one answer."""

    def __init__(self) -> None:
        self._open: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def issue(self) -> bytes:
        """32 random bytes."""
        made = os.urandom(BYTES)
        with self._lock:
            while len(self._open) >= CHALLENGES_MAX:
                del self._open[next(iter(self._open))]
            self._open[base64url(made)] = made
        return made

    def spend(self, text: str) -> bytes:
        """One of ours, never to be used again. Raises Unproven (challenge_mismatch)."""
        with self._lock:
            made = self._open.pop(text, None)
        if made is None:
            raise Unproven("challenge_mismatch", "not one that was given out, or used before")
        return made


def creation(ring: Ring, person: str, challenge: bytes, settings: Settings | None = None) -> dict[str, Any]:
    """What a browser or a USB key is asked to make: PublicKeyCredentialCreationOptions, bytes as base64url.

    settings: of a ring that is to be founded. Raises Unauthorised (no_person)."""
    allowed, name = settings or ring.settings, person_of(person)
    known = [id for id, key in _everything(ring).items() if key.kind == WEBAUTHN]
    return {
        "rp": {"id": allowed.rp_id, "name": "amends"},
        "user": {"id": base64url(os.urandom(BYTES)), "name": name, "displayName": name},
        "challenge": base64url(challenge),
        "pubKeyCredParams": [{"type": "public-key", "alg": alg} for alg in allowed.algs],
        "timeout": TOUCH_MS,
        "excludeCredentials": [{"type": "public-key", "id": id} for id in known],
        "authenticatorSelection": {"residentKey": "discouraged", "userVerification": "required"},
        "attestation": "none",
        "extensions": {
            "credentialProtectionPolicy": "userVerificationRequired",
            "enforceCredentialProtectionPolicy": False,
        },
    }


def enrolled(
    ring: Ring,
    answer: Mapping[str, Any],
    challenge: bytes,
    *,
    person: str,
    roles: tuple[str, ...],
    label: str = "",
    settings: Settings | None = None,
) -> Credential:
    """The key that was made, to be put into an event. Raises Unproven, Unauthorised."""
    allowed = settings or ring.settings
    return register(
        answer,
        challenge=challenge,
        origins=allowed.origins,
        rp_id=allowed.rp_id,
        algs=allowed.algs,
        known=set(_everything(ring)),
        synced=allowed.synced,
        person=person_of(person),
        roles=tuple(sorted(set(roles))),
        label=label,
    )


def _everything(ring: Ring) -> dict[str, Credential]:
    return {**ring.dead, **ring.quarantined, **ring.credentials}


# ---- what needs a person --------------------------------------------------------------------------------------------


class Need(NamedTuple):
    """Something about the keyring that a person has to see to: since which record, why, and what settles it."""

    kind: str
    seq: int
    reason: str
    commands: tuple[str, ...]


def needs(kit: AgentKit) -> list[Need]:
    """What of the keyring needs a person: that it is frozen, a recovery that waits, keys in quarantine."""
    kept = read_all(kit.log)
    ring, told = kept.ring, {one.event.digest: one for one in kept.known.told}
    found = []
    if ring.frozen:
        last = max(kit.log.view.keys.seqs, default=0)
        found.append(
            Need(
                "keyring_frozen",
                last,
                f"The keyring is frozen: {ring.frozen}.",
                ("amends keys list", "amends keys recover --person NAME --new-ssh KEY --new-ssh KEY"),
            )
        )
    if ring.recovery:
        waiting = told[ring.recovery.event]
        found.append(Need("keyring_recovery", waiting.seq, STOP, _stop_or_not(ring, waiting.event.new)))
    newest = {one.event.said.credential: one for one in kept.known.told if one.event.said.kind == "quarantined"}
    for credential in ring.quarantined:
        one = newest[credential]
        found.append(Need("key_quarantined", one.seq, one.event.said.reason, _revoke_or_release(ring, credential)))
    return found


STOP = "The recovery key wants to replace all keys. Whoever holds a live key and did not start this stops it."


def _stop_or_not(ring: Ring, joining: Iterable[Credential]) -> tuple[str, ...]:
    live = ring.credentials.values()
    return (*signing("amends keys veto", live), *signing("amends keys recover --finish", joining))


def _revoke_or_release(ring: Ring, credential: str) -> tuple[str, ...]:
    admins = [key for key in ring.credentials.values() if ADMIN in key.roles and key.id != credential]
    revoke, release = (signing(f"amends keys {verb}", admins, credential) for verb in ("revoke", "release"))
    return (*revoke, *release)
