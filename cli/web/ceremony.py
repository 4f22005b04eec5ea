"""Keys are made and signed with in the browser; every rule about them is the ring's, and is asked there.

The page has a key made (`options`, then `made`), has a statement written (`begin`), shows it whole, has it signed, and
hands it in (`submit`). What lies between two of those steps lies here, bounded, and is worth nothing without the
signatures: a key that was made joins no ring before it has signed the statement that brings it in.

A recovery key is made here and shown once. Its secret half goes to the page and is kept nowhere; founding takes the
public half, and only after the page has said that it was written down.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...runtime.gate import ceremonies
from ...runtime.gate.keyevent import Event, Settings, parse, recovery_credential
from ...runtime.gate.keyring import Ring
from ...runtime.gate.proof import EDDSA, ES256, WEBAUTHN, Credential, base64url
from ...runtime.gate.statement import check_code
from ...runtime.kit import AgentKit
from ...store import note
from ...store.errors import NotFound
from .. import raw_key
from ..keys import fingerprint, row, rows

WEBAUTHN_KEY = "public-key"
MADE = 32
"""Keys that were made and joined nothing yet, and that are remembered."""
TERMINAL = "http://amends.localhost"
"""The address that a USB key at the terminal signs for."""


class Ceremony:
    """The ceremonies of one run of the page, over one kit. Not for several threads at once."""

    def __init__(self, kit: AgentKit, origin: str) -> None:
        self.kit, self.origin = kit, origin
        self._challenges = ceremonies.Challenges()
        self._made: OrderedDict[str, Credential] = OrderedDict()

    # -- looking ------------------------------------------------------------------------------------------------------

    def ring(self) -> dict[str, Any]:
        """Whose keys count, for people."""
        ring = ceremonies.ring_now(self.kit)
        return {
            "founded": ring.founded,
            "code": check_code(ring.head) if ring.founded else "",
            "frozen": ring.frozen,
            "keys": rows(ring),
            "recovery": self._recovery(ring),
            "settings": msgspec.to_builtins(ring.settings) if ring.founded else None,
            "here": self.origin in (ring.settings.origins if ring.founded else (self.origin,)),
            "origin": self.origin,
            "es256": _has_es256(),
            "needs": [need._asdict() for need in ceremonies.needs(self.kit)],
            "ignored": ring.ignored,
            "size": self.kit.log.size,
        }

    def _recovery(self, ring: Ring) -> dict[str, Any] | None:
        if not ring.recovery_key:
            return None
        left = max(0, ring.recovery.until - self.kit.log.now().lived) if ring.recovery else None
        return {"fingerprint": fingerprint(recovery_credential(ring.recovery_key)), "left_ms": left}

    # -- making a key -------------------------------------------------------------------------------------------------

    def options(self, person: str, es256: bool, besides: Sequence[str]) -> dict[str, Any]:
        """What the browser is asked to make. besides: keys made just now, on whose devices no other is wanted."""
        ring = ceremonies.ring_now(self.kit)
        asked = ceremonies.creation(ring, person, self._challenges.issue(), self._settings(ring, es256))
        asked["excludeCredentials"] += [{"type": WEBAUTHN_KEY, "id": self._key(id).id} for id in besides]
        return asked

    def made(
        self, answer: Mapping[str, Any], challenge: str, person: str, roles: Sequence[str], label: str, es256: bool
    ) -> dict[str, Any]:
        """Take in what the browser made. Raises Unproven, Unauthorised."""
        ring = ceremonies.ring_now(self.kit)
        credential = ceremonies.enrolled(
            ring, answer, self._challenges.spend(challenge), person=person, roles=tuple(roles), label=label,
            settings=self._settings(ring, es256),
        )  # fmt: skip
        self._made[credential.id] = credential
        while len(self._made) > MADE:
            self._made.popitem(last=False)
        return row(credential, "new")

    def _settings(self, ring: Ring, es256: bool) -> Settings:
        """The ring's own; before it is founded, those that it would have."""
        if ring.founded:
            return ring.settings
        algs = (EDDSA, ES256) if es256 else (EDDSA,)
        return Settings(algs=algs, origins=tuple(sorted({TERMINAL, self.origin})))

    def recovery_key(self) -> dict[str, str]:
        """A new recovery key: what is to be written down, and its public half."""
        seed = os.urandom(raw_key.SEED_BYTES)
        public = base64url(note.public_of(seed))
        return {
            "paper": raw_key.on_paper(seed),
            "public": public,
            "fingerprint": fingerprint(recovery_credential(public)),
        }

    # -- a statement --------------------------------------------------------------------------------------------------

    def found(self, keys: Sequence[str], recovery: str, es256: bool) -> dict[str, Any]:
        """The statement that founds a ring with these keys."""
        ring = ceremonies.ring_now(self.kit)
        made = tuple(self._key(id) for id in keys)
        settings = self._settings(ring, es256)
        return self._told(ceremonies.begin(self.kit, "founded", keys=made, recovery=recovery, settings=settings))

    def add(self, key: str) -> dict[str, Any]:
        """The statement that brings in a key that was made here."""
        return self._told(ceremonies.begin(self.kit, "added", key=self._key(key)))

    def revoke(self, credential: str, reason: str) -> dict[str, Any]:
        return self._told(ceremonies.begin(self.kit, "revoked", credential=credential, reason=reason))

    def release(self, credential: str) -> dict[str, Any]:
        """The statement that lets a key out of quarantine."""
        return self._told(ceremonies.begin(self.kit, "released", credential=credential))

    def veto(self) -> dict[str, Any]:
        """The statement that stops a recovery."""
        return self._told(ceremonies.begin(self.kit, "vetoed"))

    def _key(self, id: str) -> Credential:
        if id not in self._made:
            raise NotFound("That key was not made in this run of the page.", next="Make it again.", code="no_such_key")
        return self._made[id]

    def _told(self, event: Event) -> dict[str, Any]:
        """The statement, and whose signatures it can use."""
        return {
            "event": event.text.decode(),
            "code": check_code(event.digest),
            "parts": [
                {**row(part.credential, part.role), "must": part.must, "here": part.credential.kind == WEBAUTHN}
                for part in ceremonies.parts(self.kit, event)
            ],
        }

    def missing(self, event: str, proofs: Sequence[Mapping[str, Any]]) -> str:
        """The code of what a statement with these signatures still lacks; empty for nothing."""
        return ceremonies.missing(self.kit, parse(event.encode()), proofs)

    def submit(self, event: str, proofs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Record it. Raises Unproven, Unauthorised."""
        receipt = ceremonies.submit(self.kit, event, proofs)
        return {**receipt._asdict(), "code": check_code(receipt.head)}


def _has_es256() -> bool:
    """Whether this device can check ES256."""
    from importlib.util import find_spec

    return find_spec("cryptography") is not None
