"""What can be said about keys, and who may say it: one rule for each kind of event, and one code for each refusal.

An event is a statement (statement.py) of its kind, the events that it follows and 32 random bytes. What is signed is a
tag and that statement, so that nobody who approves something can be made to enrol a key by it:

    amends/keyring/1 NUL {"key":{…},"kind":"added","nonce":"…","prior":["<64 hex>"],"v":1}

A new key signs the very event that brings it in (it is there, and it wants to be), and is not counted among those who
vouch for it. Roles, person and settings stand inside what is signed. A key that was in the ring once never comes back,
under whatever id: what is compared is the public key itself.

Pure: an event is judged against a `Standing`, the keys as they stood when it was said. What stood then is asked in
keyring.py.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple, NoReturn

import msgspec

from ...store.errors import BadValue, Refused
from ..plain import plain
from .approvals import plain_name
from .proof import (
    ALGORITHMS,
    EDDSA,
    KEYRING,
    Credential,
    Unproven,
    Verified,
    check_key,
    raw_credential,
    unbase64url,
    verify,
)
from .proof import KINDS as KEY_KINDS
from .sshsig import parse_key
from .statement import KEYRING_TAG, canonical, challenge

APPROVER, ADMIN = ROLES = ("approver", "admin")
VERSION = 1
HOUR_MS = 3_600_000
DELAY_MS = (24 * HOUR_MS, 72 * HOUR_MS)
NAME_MAX = 100
KEYS_MAX, TEXT_MAX = 64, 64 * 1024
_HEX64 = re.compile("[0-9a-f]{64}")

FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    kind: (frozenset(must.split()) | {"kind", "v", "nonce"}, frozenset(may.split()))
    for kind, must, may in (
        ("founded", "keys recovery settings", ""),
        ("added", "prior key", ""),
        ("revoked", "prior credential", "reason"),
        ("rotated", "prior credential key", "reason"),
        ("released", "prior credential of", "reason"),
        ("recovering", "prior keys recovery settings", ""),
        ("vetoed", "prior of", ""),
        ("recovered", "prior of", ""),
        ("quarantined", "prior credential reason", ""),
    )
}
"""kind -> the fields of its statement: those that must be there, and those that may"""

REFUSALS: dict[str, tuple[str, str]] = {
    "bad_event": ("it is no event of a keyring as this version writes them", "Make it again with this version."),
    "newer_event": ("it is written by a newer amends", "Use that version here too."),
    "no_keyring": ("there is no keyring on this device", "`amends keys init` founds one."),
    "keyring_exists": ("there is a keyring already", "`amends keys enrol` adds a key to it."),
    "stale_event": ("the keyring has changed since this was made", "Make it again, and sign that."),
    "ring_frozen": (
        "the keyring is frozen: two events that exclude each other were both signed by those who may",
        "Ask all admins; `amends keys recover` begins anew from the recovery key.",
    ),
    "too_few_keys": ("two keys are asked at least: one to use, and one to fall back on", "Name another key."),
    "too_many_keys": (f"a keyring has at most {KEYS_MAX} keys at once", "Revoke one first."),
    "same_key_twice": ("one key stands in it twice", "Use another device, or another file, for the second."),
    "backup_not_admin": ("two keys must be admins, so that either can replace the other", "Give both that role."),
    "recovery_is_a_key": ("the recovery key is one of the others, or was", "Make one for this alone."),
    "weak_key": ("it is a key for which anybody can make signatures", "Make another."),
    "alg_not_allowed": ("the keyring does not allow this key's algorithm", "Use an Ed25519 key."),
    "synced_key_not_allowed": (
        "the key is copied to other devices by its provider",
        "Use one that stays in its place.",
    ),
    "other_site": ("the key was made for another site than the keyring's", "Enrol it at this device's own page."),
    "bad_role": ("a key is approver, admin, or both", "Pass --roles approver,admin."),
    "no_person": ("a key belongs to a named person", "Pass --person NAME."),
    "bad_name": ("a name holds a character that cannot be seen", "Type the name plainly."),
    "bad_settings": ("a setting is outside what is allowed", "`amends keys init --help` names them."),
    "bad_delay": ("a recovery waits between 24 and 72 hours", "Pass a delay in that range."),
    "quorum_unreachable": ("fewer people are admins than are asked to add a key", "Add admins, or ask fewer."),
    "key_known": ("this key is in the ring already", "Use another."),
    "key_dead": ("this key was in the ring once, and no key comes back", "Make a new one."),
    "no_such_key": ("no such key is in the ring", "`amends keys list` names them."),
    "possession_missing": ("a new key did not sign for itself", "Sign with the new key too."),
    "not_admin": ("nobody who may signed it", "An admin of the ring signs this, `amends keys list` names them."),
    "quorum_missing": ("not enough admins signed it", "The others sign the same event: `amends keys sign FILE`."),
    "last_admin": ("no admin would be left", "Add one first."),
    "not_quarantined": ("that key is not in quarantine, or for another reason", "`amends keys list` tells."),
    "not_recovery_key": ("the recovery key did not sign it", "It is the one written down at `amends keys init`."),
    "nothing_recovering": ("no recovery waits, or it was stopped", "`amends keys recover` begins one."),
    "too_early": ("the recovery waits still, so that whoever holds a live key can stop it", "Come back then."),
    "not_live": ("no live key signed it", "A key of the ring signs this, `amends keys list` names them."),
}
"""code -> what is wrong, what to do"""


class Unauthorised(Refused):
    """An event that those who signed it may not bring about: `code` is one of REFUSALS."""

    code = "unauthorised"


def refuse(code: str, detail: str = "") -> NoReturn:
    """Raise Unauthorised."""
    said, next = REFUSALS[code]
    raise Unauthorised(f"The keyring stays as it is: {said}{f' ({detail})' if detail else ''}.", next=next, code=code)


# ---- the statement --------------------------------------------------------------------------------------------------


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a ring allows, the same on every device since it is signed.

    algs: COSE algorithms. rp_id, origins: the site that WebAuthn keys sign for, exactly. synced: whether keys that
    their provider copies may join. quorum: how many people must sign to add a key. delay_ms: how long a recovery waits.
    """

    algs: tuple[int, ...] = (EDDSA,)
    rp_id: str = "amends.localhost"
    origins: tuple[str, ...] = ("http://amends.localhost", "http://amends.localhost:8799")
    synced: bool = False
    quorum: int = 1
    delay_ms: int = DELAY_MS[1]


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A statement, read. prior: the events it follows, sorted. of: events that it is about."""

    kind: str
    v: int
    nonce: str
    prior: tuple[str, ...] = ()
    key: Credential | None = None
    keys: tuple[Credential, ...] = ()
    credential: str = ""
    of: tuple[str, ...] = ()
    recovery: str = ""
    settings: Settings | None = None
    reason: str = ""


class Event(NamedTuple):
    """A statement as its bytes, and as they were read."""

    text: bytes
    said: Said

    @property
    def digest(self) -> str:
        """What names the event, 64 hex digits."""
        return sha256(self.text).hexdigest()

    @property
    def signed(self) -> bytes:
        """What SSH and raw keys sign."""
        return KEYRING_TAG + self.text

    @property
    def challenge(self) -> bytes:
        """What a WebAuthn key signs, 32 bytes."""
        return challenge(self.signed)

    @property
    def kind(self) -> str:
        """The kind of the fact that records it."""
        return f"key.{self.said.kind}"

    @property
    def new(self) -> tuple[Credential, ...]:
        """The keys that it would bring in."""
        return self.said.keys + ((self.said.key,) if self.said.key else ())


def position(prior: Iterable[str]) -> str:
    """The events that one follows, as one name: its own if it is one, else the hash of all."""
    names = sorted(prior)
    return names[0] if len(names) == 1 else sha256("\n".join(names).encode()).hexdigest() if names else ""


def event(kind: str, nonce: str, **fields: Any) -> Event:
    """A new event. Raises BadValue, Unauthorised (bad_event)."""
    told = {name: msgspec.to_builtins(value) for name, value in fields.items() if value not in ("", (), None)}
    return parse(canonical(_listed({"kind": kind, "nonce": nonce, "v": VERSION, **told})))


def _listed(value: Any) -> Any:
    """The same value with lists for tuples."""
    if isinstance(value, dict):
        return {key: _listed(one) for key, one in value.items()}
    return [_listed(one) for one in value] if isinstance(value, (list, tuple)) else value


def parse(text: bytes) -> Event:
    """The event in a statement from anywhere. Raises Unauthorised: bad_event, newer_event."""
    try:
        raw = msgspec.json.decode(text) if len(text) <= TEXT_MAX else None
        if not isinstance(raw, dict) or canonical(raw) != text:
            refuse("bad_event", "not canonical")
        if type(raw.get("v")) is int and raw["v"] > VERSION:
            refuse("newer_event")
        said = msgspec.convert(raw, Said)
    except (msgspec.MsgspecError, BadValue, RecursionError, UnicodeDecodeError) as error:
        refuse("bad_event", str(error)[:120])
    must, may = FIELDS.get(said.kind, (frozenset(), frozenset()))
    if said.v != VERSION or not must <= set(raw) <= must | may:
        refuse("bad_event", f"{said.kind[:20]!r}, version {said.v}")
    if any(value in ("", [], None) for value in raw.values()) or not _HEX64.fullmatch(said.nonce):
        refuse("bad_event", "an empty field")
    for names in (said.prior, said.of):
        if list(names) != sorted(set(names)) or len(names) > KEYS_MAX or not all(map(_HEX64.fullmatch, names)):
            refuse("bad_event", "the events that it follows, or is about")
    return Event(text, said)


# ---- what stood when it was said ------------------------------------------------------------------------------------


class Standing(NamedTuple):
    """The keys at one position. dead: those that were in the ring once. recovery: base64url of 32 bytes."""

    live: Mapping[str, Credential]
    dead: Mapping[str, Credential]
    recovery: str
    settings: Settings

    def admins(self, without: str = "") -> list[Credential]:
        """The live admins, but for one key."""
        return [key for key in self.live.values() if ADMIN in key.roles and key.id != without]


NOTHING = Standing({}, {}, "", Settings())


def apply(standing: Standing, said: Said) -> Standing:
    """The keys after an event that was judged."""
    gone = [said.credential] if said.kind in ("revoked", "rotated") else []
    live = {id: key for id, key in standing.live.items() if id not in gone}
    dead = dict(standing.dead) | {id: key for id, key in standing.live.items() if id in gone}
    if said.key:
        live[said.key.id] = said.key
    return standing._replace(live=live, dead=dead)


def founded(standing: Standing, said: Said) -> Standing:
    """The keys after a founding, or a recovery: all that were there are dead, the recovery key too."""
    assert said.settings is not None
    live = {key.id: key for key in said.keys}
    dead = {**standing.dead, **standing.live}
    if standing.recovery:
        used = recovery_credential(standing.recovery)
        dead[used.id] = used
    return Standing(live, dead, said.recovery, said.settings)


def recovery_credential(recovery: str) -> Credential:
    """The recovery key as proofs name it. Raises Unproven."""
    return raw_credential(unbase64url(recovery))


def material(credential: Credential) -> bytes:
    """The public key itself, whatever it is wrapped in."""
    public = unbase64url(credential.public)
    return parse_key(public).public if credential.kind in ("ssh", "ssh-sk") else public


def person_of(name: str) -> str:
    """A person's name as it is signed. Raises Unauthorised (no_person, bad_name)."""
    name = unicodedata.normalize("NFC", name).strip() if isinstance(name, str) else ""
    if not name or len(name) > NAME_MAX:
        refuse("no_person", f"1 to {NAME_MAX} characters")
    if plain(name) != name:
        refuse("bad_name", plain(name))
    return name


def people(keys: Iterable[Credential]) -> set[str]:
    """Whose keys these are: two keys of one person are one."""
    return {plain_name(key.person) for key in keys}


# ---- who signed it --------------------------------------------------------------------------------------------------


class Signed(NamedTuple):
    """The keys whose proofs hold: new ones of the event, live ones, the recovery key; how far each had counted. unsure:
    those whose proofs this device cannot check."""

    new: frozenset[str]
    live: frozenset[str]
    recovery: bool
    counters: Mapping[str, int]
    unsure: Mapping[str, Unproven]


def signed_by(event: Event, proofs: Iterable[Mapping[str, Any]], standing: Standing) -> Signed:
    """Whose proofs hold. One that does not counts for nothing."""
    counters: dict[str, int] = {}
    unsure: dict[str, Unproven] = {}
    known, settings = signers(event, standing), settings_for(event, standing)
    for proof in proofs:
        key = known.get(str(proof.get("credential")))
        try:
            if key is not None:
                counters[key.id] = max(check_proof(event, proof, key, settings).counter, counters.get(key.id, 0))
        except Unproven as error:
            if key is not None and error.code == "es256_extra_missing":
                unsure[key.id] = error
    return Signed(
        frozenset(key.id for key in event.new) & set(counters),
        frozenset(standing.live) & set(counters),
        _recovery_id(standing) in counters,
        counters,
        unsure,
    )


def check_proof(
    event: Event, proof: Mapping[str, Any], key: Credential, settings: Settings, counter: int = 0
) -> Verified:
    """What a proof shows of an event (`Verified`). Raises Unproven."""
    return check_bytes(event.signed, proof, key, settings, counter)


def check_bytes(
    signed: bytes, proof: Mapping[str, Any], key: Credential, settings: Settings, counter: int = 0
) -> Verified:
    """The same for the signed bytes of an event, also of one that this version cannot read."""
    return verify(key, proof, signed, origins=settings.origins, rp_id=settings.rp_id, namespace=KEYRING,
                  algs=settings.algs, counter=counter)  # fmt: skip


def settings_for(event: Event, standing: Standing) -> Settings:
    """The settings under which proofs of an event are checked: its own where it founds a ring anew."""
    return event.said.settings or standing.settings


def signers(event: Event, standing: Standing) -> dict[str, Credential]:
    """Every key that has anything to sign here, by id."""
    found = {key.id: key for key in event.new} | dict(standing.live)
    if standing.recovery and event.said.kind == "recovering":
        key = recovery_credential(standing.recovery)
        found[key.id] = key
    return found


def _recovery_id(standing: Standing) -> str:
    return recovery_credential(standing.recovery).id if standing.recovery else ""


# ---- the rules ------------------------------------------------------------------------------------------------------


def judge(standing: Standing, event: Event, by: Signed, barred: frozenset[str] = frozenset()) -> None:
    """Raise Unauthorised if those who signed may not bring this about, Unproven if this device cannot tell. barred:
    live keys that do not count."""
    counted = frozenset(id for id in by.live if id not in barred)
    _RULES[event.said.kind](standing, event.said, by, counted)


def _found(standing: Standing, said: Said, by: Signed, counted: frozenset[str]) -> None:
    assert said.settings is not None
    settings = said.settings
    _check_settings(settings)
    if len(said.keys) < 2:
        refuse("too_few_keys")
    if len(said.keys) > KEYS_MAX:
        refuse("too_many_keys")
    for key in said.keys:
        _check_new(standing, key, settings)
    if len({key.id for key in said.keys}) < len(said.keys) or len(set(map(material, said.keys))) < len(said.keys):
        refuse("same_key_twice")
    admins = [key for key in said.keys if ADMIN in key.roles]
    if len(admins) < 2:
        refuse("backup_not_admin")
    if len(people(admins)) < settings.quorum:
        refuse("quorum_unreachable", f"{len(people(admins))} of {settings.quorum}")
    _check_recovery(standing, said)
    _possession(said.keys, by)


def _check_settings(settings: Settings) -> None:
    sound = (
        settings.algs and set(settings.algs) <= ALGORITHMS and list(settings.algs) == sorted(set(settings.algs))
        and re.fullmatch(r"[a-z0-9.-]{1,253}", settings.rp_id)
        and 1 <= len(settings.origins) <= 16 and list(settings.origins) == sorted(set(settings.origins))
        and all(re.fullmatch(r"https?://[a-z0-9.-]{1,253}(?::[0-9]{1,5})?", origin) for origin in settings.origins)
        and 1 <= settings.quorum <= KEYS_MAX
    )  # fmt: skip
    if not sound:
        refuse("bad_settings")
    if not DELAY_MS[0] <= settings.delay_ms <= DELAY_MS[1]:
        refuse("bad_delay")


def _check_new(standing: Standing, key: Credential, settings: Settings) -> None:
    """Whether a key may join at all."""
    if key.person != person_of(key.person):
        refuse("no_person")
    if not key.roles or list(key.roles) != sorted(set(key.roles)) or not set(key.roles) <= set(ROLES):
        refuse("bad_role", ",".join(key.roles)[:40])
    if key.kind not in KEY_KINDS or key.alg not in settings.algs:
        refuse("alg_not_allowed")
    _check_public(key)
    if key.kind == "webauthn" and key.rp_id != settings.rp_id:
        refuse("other_site")
    if key.backup_eligible and not settings.synced:
        refuse("synced_key_not_allowed")
    for code, others in (("key_known", standing.live), ("key_dead", standing.dead)):
        if key.id in others or material(key) in map(material, others.values()):
            refuse(code)
    if standing.recovery and {key.id, material(key)} & _recovery_names(standing.recovery):
        refuse("recovery_is_a_key")


def _check_public(key: Credential) -> None:
    """Whether only its owner can sign with it. What a device cannot tell, it says (es256_extra_missing)."""
    try:
        check_key(key)
    except Unproven as error:
        if error.code == "es256_extra_missing":
            raise
        refuse("weak_key", error.code)


def _check_recovery(standing: Standing, said: Said) -> None:
    try:
        names = _recovery_names(said.recovery)
    except Unproven:
        refuse("weak_key", "the recovery key")
    others = [*said.keys, *standing.live.values(), *standing.dead.values()]
    if any({key.id, material(key)} & names for key in others) or said.recovery == standing.recovery:
        refuse("recovery_is_a_key")


def _recovery_names(recovery: str) -> set[str | bytes]:
    """What no other key may be: its id, as which proofs name it, and itself. Raises Unproven."""
    return {recovery_credential(recovery).id, unbase64url(recovery)}


def _possession(keys: Iterable[Credential], by: Signed) -> None:
    for key in keys:
        if key.id in by.unsure:
            raise by.unsure[key.id]
    missing = [key.label or key.id for key in keys if key.id not in by.new]
    if missing:
        refuse("possession_missing", ", ".join(missing)[:120])


def _add(standing: Standing, said: Said, by: Signed, counted: frozenset[str]) -> None:
    assert said.key is not None
    _admins(standing, by, counted, standing.settings.quorum)  # first: what nobody vouches for is not looked at
    _check_new(standing, said.key, standing.settings)
    if len(standing.live) >= KEYS_MAX and said.kind == "added":
        refuse("too_many_keys")
    _possession((said.key,), by)


def _admins(standing: Standing, by: Signed, counted: frozenset[str], need: int = 1) -> None:
    """k people who are admins. The new key is none of the live ones, so it cannot vouch for itself."""
    admins = standing.admins()
    have = len(people(key for key in admins if key.id in counted))
    if have >= need:
        return
    unsure = [key for key in admins if key.id in by.unsure]
    if have + len(people(unsure)) >= need:
        raise by.unsure[unsure[0].id]
    refuse("quorum_missing" if have else "not_admin", f"{have} of {need}")


def _revoke(standing: Standing, said: Said, by: Signed, counted: frozenset[str]) -> None:
    if said.credential not in standing.live:
        refuse("no_such_key")
    if not standing.admins(without=said.credential):
        refuse("last_admin")
    if said.credential in by.unsure:
        raise by.unsure[said.credential]
    if said.credential not in by.live:  # a key may always end itself, also one in quarantine
        _admins(standing, by, counted)


def _rotate(standing: Standing, said: Said, by: Signed, counted: frozenset[str]) -> None:
    assert said.key is not None
    if said.credential not in standing.live:
        refuse("no_such_key")
    _add(standing, said, by, counted)
    if not standing.admins(without=said.credential) and ADMIN not in said.key.roles:
        refuse("last_admin")


def _release(standing: Standing, said: Said, by: Signed, counted: frozenset[str]) -> None:
    if said.credential not in standing.live:
        refuse("no_such_key")
    _admins(standing, by, counted - {said.credential})


def _recovering(standing: Standing, said: Said, by: Signed, counted: frozenset[str]) -> None:
    if not by.recovery:
        refuse("not_recovery_key")
    _found(standing, said, by, counted)


def _live(standing: Standing, said: Said, by: Signed, counted: frozenset[str]) -> None:
    if not counted:
        for error in by.unsure.values():
            raise error
        refuse("not_live")


def _anybody(standing: Standing, said: Said, by: Signed, counted: frozenset[str]) -> None:
    """A quarantine needs no signature: it only takes away."""


_RULES: dict[str, Callable[[Standing, Said, Signed, frozenset[str]], None]] = {
    "founded": _found,
    "added": _add,
    "revoked": _revoke,
    "rotated": _rotate,
    "released": _release,
    "recovering": _recovering,
    "vetoed": _live,
    "recovered": _live,  # one of the new keys; what it puts in force, and when, is asked in keyring.py
    "quarantined": _anybody,
}
