"""Verbs about whose keys decide: found a keyring, add a key, end one, replace one, begin anew when all are lost.

Each change is a statement that the keys themselves sign, here and now or on other machines (`--to FILE`, `keys sign`,
`keys submit`). Founding is the one moment that nothing vouches for, so that its fingerprints are printed to be written
down. A key signs by `--ssh KEY`, `--key FILE` or `--usb`; one that is to join is named by `--new-ssh`, `--new-key` or
`--new-usb`, and signs too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from ..runtime.gate import ceremonies
from ..runtime.gate.keyevent import (
    HOUR_MS,
    NOTHING,
    ROLES,
    Event,
    Settings,
    material,
    parse,
    person_of,
    recovery_credential,
    refuse,
)
from ..runtime.gate.keyring import Ring
from ..runtime.gate.levels import LEVELS, PRESENT
from ..runtime.gate.proof import EDDSA, ES256, KEYRING, Credential, Verified, base64url, level_of
from ..runtime.gate.shown import fields_of
from ..runtime.gate.signing import able
from ..runtime.gate.statement import check_code
from ..runtime.kit import AgentKit
from ..store import note
from ..store.errors import NotFound, YouErred
from . import raw_key, ssh_key, ui
from .approvals import drawn, show
from .device import acting, beginning, looking

EVENT = "amends-keyring-event"
PREFIX_MIN, SHOWN_ID = 4, 26
BOTH = ",".join(ROLES)
Proofs = list[dict[str, Any]]


@click.group(cls=ui.Verbs)
def keys() -> None:
    """Say whose keys decide: found a keyring, and enrol, list, revoke, rotate or recover keys."""


# ---- who signs ------------------------------------------------------------------------------------------------------


class Hand(NamedTuple):
    """A way to sign, as it was named: ssh, key or usb; which file; whose it is, where that was said."""

    sort: str
    where: str = ""
    person: str = ""


def _hands(new: str = "") -> Callable[[Any], Any]:
    """The options that name keys to sign with, or with `new-` before them those that are to join."""
    told = "A key that is to join" if new else "Sign"
    many: dict[str, Any] = {"multiple": True, "metavar": "KEY"}

    def add(command: Any) -> Any:
        for option in (
            click.option(f"--{new}usb", count=True, help=f"{told}: a security key in a USB port. Repeatable."),
            click.option(f"--{new}key", **many, help=f"{told}: a raw key in a file, of `keys new`. Repeatable."),
            click.option(f"--{new}ssh", **many, help=f"{told}: an Ed25519 key of SSH, its file. Repeatable."),
        ):
            command = option(command)
        return command

    return add


def _named(ssh: Sequence[str], key: Sequence[str], usb: int) -> list[Hand]:
    return [*(_hand("ssh", one) for one in ssh), *(_hand("key", one) for one in key), *[Hand("usb")] * usb]


def _hand(sort: str, said: str) -> Hand:
    """`PATH`, or `PERSON=PATH` for a key of somebody else than --person."""
    person, equals, where = said.partition("=")
    return Hand(sort, where, person) if equals and not Path(said).exists() else Hand(sort, said)


def _talk() -> Any:
    from .security_key import Talk

    def pin(left: int) -> str:
        if not sys.stdin.isatty():
            raise YouErred("The PIN of the key is typed at a terminal.", next="Run this at one.", code="no_terminal")
        typed: str = click.prompt(f"PIN ({left} tries left)", hide_input=True, default="", show_default=False, err=True)
        return typed

    return Talk(ui.warn, pin)


def _prove(hand: Hand, event: Event, allowed: Sequence[Credential], rp_id: str) -> dict[str, Any]:
    """The proof of one key over an event."""
    over = threading.Event()
    if hand.sort == "ssh":
        return ssh_key.sign(Path(hand.where), event.signed, KEYRING, over)
    if hand.sort == "key":
        return raw_key.sign(raw_key.read(Path(hand.where)), event.signed)
    from . import security_key

    return dict(security_key.sign(event.signed, allowed, _talk(), over, rp_id))


class Joining(NamedTuple):
    """A key that is to join, and how it signs."""

    credential: Credential
    hand: Hand


def _joining(hands: Iterable[Hand], ring: Ring, settings: Settings, whose: dict[str, Any]) -> list[Joining]:
    """New keys for an event. whose: person, roles and label, where the key says nothing else."""
    found: list[Joining] = []
    for hand in hands:
        if hand.sort == "usb" and any(each.hand.sort == "usb" for each in found):
            ui.warn("Now the next security key: take out the one before it.")
            _wait_for_enter()
        mine = whose | ({"person": hand.person} if hand.person else {})
        mine["label"] = _plain(mine.get("label") or (Path(hand.where).stem if hand.where else "USB key"))
        made = _made(hand, ring, settings, [each.credential for each in found], mine)
        mine = mine | {"person": person_of(mine["person"]), "roles": tuple(sorted(set(mine["roles"])))}
        found.append(Joining(msgspec.structs.replace(made, **mine), hand))
    return found


def _made(hand: Hand, ring: Ring, settings: Settings, others: list[Credential], whose: dict[str, Any]) -> Credential:
    if hand.sort == "ssh":
        return ssh_key.public(Path(hand.where))
    if hand.sort == "key":
        return raw_key.public(raw_key.read(Path(hand.where)))
    from . import security_key

    asked = os.urandom(32)
    known = [*others, *ring.credentials.values(), *ring.quarantined.values(), *ring.dead.values()]
    answer = security_key.make(
        asked, person_of(whose["person"]), _talk(), threading.Event(), algs=settings.algs, known=known,
        rp_id=settings.rp_id,
    )  # fmt: skip
    return ceremonies.enrolled(ring, answer, asked, settings=settings, **whose)


def _wait_for_enter() -> None:
    if sys.stdin.isatty():
        click.prompt("Press Enter when it is in", default="", show_default=False, err=True, prompt_suffix=" ")


def _plain(text: str) -> str:
    """In the one form in which it can be signed."""
    return unicodedata.normalize("NFC", text.strip())


def _roles(said: str) -> tuple[str, ...]:
    return tuple(sorted({role.strip() for role in said.split(",") if role.strip()}))


# ---- a change -------------------------------------------------------------------------------------------------------


def _signed(kit: AgentKit, event: Event, joining: Sequence[Joining], hands: Sequence[Hand]) -> Proofs:
    """The proofs of everybody who was named."""
    parts = ceremonies.parts(kit, event)
    settings = event.said.settings or ceremonies.ring_now(kit).settings
    allowed = [part.credential for part in parts]
    proofs = [_prove(each.hand, event, [each.credential], settings.rp_id) for each in joining]
    return proofs + [_prove(hand, event, allowed, settings.rp_id) for hand in hands]


def _hand_in(kit: AgentKit, event: Event, proofs: Proofs, to: str = "") -> None:
    """Record an event, or put it into a file for others to sign."""
    if to:
        return _write_out(kit, event, proofs, Path(to))
    return _say_done(kit, ceremonies.submit(kit, event, proofs))


def _say_done(kit: AgentKit, receipt: ceremonies.Receipt) -> None:
    ring = ceremonies.ring_now(kit)
    if ui.session().as_json:
        said = {"kind": receipt.kind, "event": receipt.event, "record": receipt.seq, "head": receipt.head}
        return ui.emit(said | {"keys": rows(ring)})
    ui.say(ui.Word(receipt.kind, "good"), f", record {receipt.seq}; the keyring is now {check_code(receipt.head)}.")
    return None


def _write_out(kit: AgentKit, event: Event, proofs: Proofs, file: Path) -> None:
    why = ceremonies.missing(kit, event, proofs)
    parts = ceremonies.parts(kit, event)
    settings = event.said.settings or ceremonies.ring_now(kit).settings
    _save(file, {
        "kind": EVENT, "v": 1, "event": event.text.decode(), "proofs": proofs, "rp_id": settings.rp_id,
        "usb": [part.credential.id for part in parts if part.credential.kind == "webauthn"],
    })  # fmt: skip
    if ui.session().as_json:
        return ui.emit({"file": str(file), "event": event.digest, "missing": why or None})
    ui.say(f"{file} holds it, with {ui.count(len(proofs), 'signature')}. Nothing is changed yet.")
    ui.say("Next: others sign it with `amends keys sign FILE`, then `amends keys submit FILE`.")
    return None


def _save(file: Path, document: dict[str, Any]) -> None:
    """All of it or nothing: a file that others have signed is not left half written."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, file)


def _load(file: Path) -> tuple[dict[str, Any], Event]:
    wrong = YouErred(f"{file} holds no keyring event.", next="`--to FILE` makes one.", code="bad_file")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise wrong from None
    sound = isinstance(document, dict) and document.get("kind") == EVENT and document.get("v") == 1
    if not sound or not isinstance(document.get("event"), str) or not isinstance(document.get("proofs"), list):
        raise wrong
    return document, parse(document["event"].encode("utf-8", "surrogatepass"))


# ---- looking --------------------------------------------------------------------------------------------------------


def rows(ring: Ring) -> list[dict[str, Any]]:
    """The keys of a ring for people: those that are live first, each person's together."""
    states = (("live", ring.credentials), ("quarantined", ring.quarantined), ("dead", ring.dead))
    found = [(state, key) for state, held in states for key in held.values() if key.roles]
    order = [state for state, _ in states]
    found.sort(key=lambda one: (order.index(one[0]), one[1].person, one[1].label))
    return [row(key, state) for state, key in found]


def row(key: Credential, state: str) -> dict[str, Any]:
    """A key for people; level: the best evidence that it can give."""
    best = LEVELS[level_of(key, Verified(key.id, True, True, 0))][0]
    return {
        "id": key.id, "person": key.person, "roles": sorted(key.roles, key=ROLES.index), "kind": key.kind,
        "alg": key.alg, "level": best, "label": key.label, "state": state, "fingerprint": fingerprint(key),
    }  # fmt: skip


def fingerprint(key: Credential) -> str:
    """Of the public key itself, whatever it is wrapped in: five groups of four, to compare with what is on paper."""
    return check_code(sha256(material(key)).hexdigest())


@keys.command(name="list")
def list_() -> int:
    """List whose keys decide, and what of them needs you. Exit 1 if something does."""
    with looking() as kit:
        ring = ceremonies.ring_now(kit)
        needs = ceremonies.needs(kit)
        left = ring.recovery.until - kit.log.now().lived if ring.recovery else 0
    document = {
        "founded": ring.founded, "head": ring.head, "frozen": ring.frozen or None, "keys": rows(ring),
        "recovery_key": _recovery_fingerprint(ring) or None,
        "recovery": {"left_ms": max(0, left), "keys": list(ring.recovery.keys)} if ring.recovery else None,
        "settings": msgspec.to_builtins(ring.settings) if ring.founded else None, "ignored": list(ring.ignored),
        "needs": [{"kind": need.kind, "reason": need.reason, "commands": list(need.commands)} for need in needs],
    }  # fmt: skip
    if ui.session().as_json:
        ui.emit(document)
    else:
        _tell(document)
    return 1 if needs else 0


def _recovery_fingerprint(ring: Ring) -> str:
    return fingerprint(recovery_credential(ring.recovery_key)) if ring.recovery_key else ""


def _tell(document: dict[str, Any]) -> None:
    if not document["founded"]:
        return ui.say("There is no keyring: a named click decides. `amends keys init` founds one.")
    if document["frozen"]:
        ui.say(ui.Word("frozen: ", "bad"), document["frozen"], ". No signature counts.")
    if document["recovery"]:
        left = document["recovery"]["left_ms"] / HOUR_MS
        ui.say(ui.Word("recovery: ", "bad"), f"all keys are replaced in {left:.1f} h unless a live one says no; "
               "`amends keys veto`")  # fmt: skip
    ui.table(
        ("KEY", "WHOSE", "ROLES", "KIND", "LEVEL", "STATE", "FINGERPRINT", "LABEL"),
        [
            (row["id"][:SHOWN_ID], row["person"], ",".join(row["roles"]), row["kind"], row["level"],
             ui.Word(row["state"], {"live": "good", "quarantined": "bad"}.get(row["state"], "dim")),
             row["fingerprint"], row["label"])
            for row in document["keys"]
        ],
    )  # fmt: skip
    settings = document["settings"]
    ui.say(f"head      {check_code(document['head'])}")
    ui.say(f"recovery  {document['recovery_key']}, after {settings['delay_ms'] // HOUR_MS} h")
    ui.say(f"to add    {ui.count(settings['quorum'], 'admin')}")
    if document["ignored"]:
        ui.warn(
            f"signed by nobody who may, so they changed nothing: records {', '.join(map(str, document['ignored']))}"
        )
    return None


def _key(ring: Ring, name: str) -> Credential:
    """A key by its id, a beginning of it that only it has, its fingerprint or its label."""
    held = {**ring.quarantined, **ring.credentials}
    if name in held:
        return held[name]
    found = [key for key in held.values() if _goes_by(key, name)]
    if len(found) == 1:
        return found[0]
    said = "More than one key goes" if found else "No key of the ring goes"
    raise NotFound(f"{said} by {name!r}.", next="`amends keys list` lists them.", code="no_such_key")


def _goes_by(key: Credential, name: str) -> bool:
    starts = (key.id, key.id.removeprefix("SHA256:"), fingerprint(key))
    return key.label == name or (len(name) >= PREFIX_MIN and any(start.startswith(name) for start in starts))


# ---- founding -------------------------------------------------------------------------------------------------------


def _recovery_options(command: Any) -> Any:
    for option in (
        click.option("--recovery-public", default="", metavar="KEY", help="A recovery key made elsewhere: its public "
                     "half, base64url."),
        click.option("--recovery-out", default="", metavar="FILE", help="Put the new recovery key into a new file, "
                     "instead of printing it once."),
    ):  # fmt: skip
        command = option(command)
    return command


class NewRecovery(NamedTuple):
    """The key for the day when all others are lost. seed: to be shown or filed; None for one made elsewhere."""

    public: str
    seed: bytes | None
    out: str


def _new_recovery(out: str, public: str) -> NewRecovery:
    if public:
        return NewRecovery(public, None, "")
    if ui.session().as_json and not out:
        raise YouErred(
            "A recovery key is printed for people, and not into a document.",
            next="Pass --recovery-out FILE, or --recovery-public KEY.",
            code="recovery_where",
        )
    seed = os.urandom(raw_key.SEED_BYTES)
    return NewRecovery(base64url(note.public_of(seed)), seed, out)


def _show_recovery(new: NewRecovery) -> None:
    """Before anything is recorded: a ring whose recovery key nobody has would be worse than none."""
    if new.seed is None:
        return
    if new.out:
        return raw_key.write(Path(new.out), new.seed)
    ui.say(
        "The recovery key. Write it down now and keep it away from this machine; it is shown once and stored nowhere:"
    )
    ui.say()
    ui.say("    ", ui.Word(raw_key.on_paper(new.seed), "bold"))
    ui.say()
    ui.finish()
    if ui.unsaid() is not None:
        raise YouErred("The recovery key could not be shown.", next="Pass --recovery-out FILE.", code="recovery_where")
    return None


def _tell_fingerprints(event: Event) -> None:
    if ui.session().as_json:
        return
    ui.say("Fingerprints, to write down and compare later: nothing else vouches for this moment.")
    for key in (*event.said.keys, recovery_credential(event.said.recovery)):
        whose = f"{key.person}, {', '.join(key.roles)}, {key.kind}, {key.label}" if key.roles else "the recovery key"
        ui.say(f"    {fingerprint(key)}  {whose}")


@keys.command()
@click.option("--person", default="", metavar="NAME", help="Whose keys these are; PERSON=KEY says otherwise for one.")
@_hands()
@click.option("--quorum", type=click.IntRange(1), default=1, metavar="N", help="How many people add a key; 1.")
@click.option(
    "--delay-hours", type=click.IntRange(24, 72), default=72, metavar="N", help="How long a recovery waits; 72."
)
@click.option("--es256", is_flag=True, help="Allow ES256 too, as passkeys of phones and laptops need (extra passkeys).")
@click.option("--synced", is_flag=True, help="Allow passkeys that their provider copies to other devices.")
@click.option("--origin", multiple=True, metavar="URL", help="Another address of the page, exactly. Repeatable.")
@_recovery_options
def init(
    person: str, ssh: tuple[str, ...], key: tuple[str, ...], usb: int, quorum: int, delay_hours: int, es256: bool,
    synced: bool, origin: tuple[str, ...], recovery_out: str, recovery_public: str,
) -> None:  # fmt: skip
    """Found a keyring: two keys at least, each of which signs, and a recovery key."""
    settings = Settings(
        algs=(EDDSA, ES256) if es256 else (EDDSA,),
        origins=tuple(sorted({*Settings().origins, *origin})),
        synced=synced,
        quorum=quorum,
        delay_ms=delay_hours * HOUR_MS,
    )
    new = _new_recovery(recovery_out, recovery_public)
    with beginning() as kit:
        if ceremonies.ring_now(kit).founded:
            refuse("keyring_exists")
        _found(kit, "founded", _named(ssh, key, usb), person, settings, new, [])


def _found(
    kit: AgentKit, kind: str, hands: list[Hand], person: str, settings: Settings, new: NewRecovery,
    also: Sequence[Callable[[Event], dict[str, Any]]],
) -> None:  # fmt: skip
    """Make the keys sign, show the recovery key, and only then record it."""
    if len(hands) < 2:
        refuse("too_few_keys", "name them with --ssh, --key or --usb")
    ring = ceremonies.ring_now(kit)
    joining = _joining(hands, ring, settings, {"person": person, "roles": ROLES, "label": ""})
    made = tuple(each.credential for each in joining)
    event = ceremonies.begin(kit, kind, keys=made, recovery=new.public, settings=settings)
    proofs = [_prove(each.hand, event, [each.credential], settings.rp_id) for each in joining]
    proofs += [sign(event) for sign in also]
    if not ceremonies.missing(kit, event, proofs):
        _show_recovery(new)
    receipt = ceremonies.submit(kit, event, proofs)
    _tell_fingerprints(event)
    _say_done(kit, receipt)
    if not able(ceremonies.ring_now(kit), PRESENT, ()):
        ui.warn(
            "None of these keys can show a touch, which an irreversible step asks for from now on: it is refused with "
            'no_approver until one is enrolled, or policy.toml says [approvals] level = "file".'
        )


# ---- changing -------------------------------------------------------------------------------------------------------

to_option = click.option("--to", default="", metavar="FILE", help="Only write it to a file, for others to sign too.")
key_argument = click.argument("name", metavar="KEY")
reason_option = click.option("--reason", default="", metavar="TEXT", help="Why, for those who read it later.")


def _one(hands: list[Hand]) -> list[Hand]:
    if len(hands) != 1:
        raise YouErred("One key joins at a time.", next="Name it with --new-ssh, --new-key or --new-usb.", code="usage")
    return hands


@keys.command()
@click.option("--person", required=True, metavar="NAME", help="Whose key it is.")
@click.option("--roles", default="approver", metavar="LIST", help=f"What it may do: {BOTH}; approver by default.")
@click.option("--label", default="", metavar="TEXT", help="What to call it.")
@_hands("new-")
@_hands()
@to_option
def enrol(
    person: str, roles: str, label: str, new_ssh: tuple[str, ...], new_key: tuple[str, ...], new_usb: int,
    ssh: tuple[str, ...], key: tuple[str, ...], usb: int, to: str,
) -> None:  # fmt: skip
    """Add a key: it signs for itself, and admins of the ring sign for it."""
    hands = _one(_named(new_ssh, new_key, new_usb))
    with acting() as kit:
        ring = ceremonies.ring_now(kit)
        whose = {"person": person, "roles": _roles(roles), "label": label}
        joining = _joining(hands, ring, ring.settings, whose)
        event = ceremonies.begin(kit, "added", key=joining[0].credential)
        return _hand_in(kit, event, _signed(kit, event, joining, _named(ssh, key, usb)), to)


@keys.command()
@key_argument
@reason_option
@_hands()
@to_option
def revoke(name: str, reason: str, ssh: tuple[str, ...], key: tuple[str, ...], usb: int, to: str) -> None:
    """End a key at once: one admin signs, or the key itself."""
    return _about(name, "revoked", reason, _named(ssh, key, usb), to)


@keys.command()
@key_argument
@reason_option
@_hands()
@to_option
def release(name: str, reason: str, ssh: tuple[str, ...], key: tuple[str, ...], usb: int, to: str) -> None:
    """Say that a key in quarantine is no copy: another admin signs."""
    return _about(name, "released", reason, _named(ssh, key, usb), to)


def _about(name: str, kind: str, reason: str, hands: list[Hand], to: str) -> None:
    with acting() as kit:
        credential = _key(ceremonies.ring_now(kit), name)
        event = ceremonies.begin(kit, kind, credential=credential.id, reason=_plain(reason))
        return _hand_in(kit, event, _signed(kit, event, [], hands), to)


@keys.command()
@key_argument
@click.option("--roles", default="", metavar="LIST", help="What the new key may do; as the old one by default.")
@click.option("--label", default="", metavar="TEXT", help="What to call it.")
@reason_option
@_hands("new-")
@_hands()
@to_option
def rotate(
    name: str, roles: str, label: str, reason: str, new_ssh: tuple[str, ...], new_key: tuple[str, ...], new_usb: int,
    ssh: tuple[str, ...], key: tuple[str, ...], usb: int, to: str,
) -> None:  # fmt: skip
    """Put a new key in the place of an old one, in one step: as enrol and revoke together."""
    hands = _one(_named(new_ssh, new_key, new_usb))
    with acting() as kit:
        ring = ceremonies.ring_now(kit)
        old = _key(ring, name)
        whose = {"person": old.person, "roles": _roles(roles) if roles else old.roles, "label": label}
        joining = _joining(hands, ring, ring.settings, whose)
        event = ceremonies.begin(kit, "rotated", credential=old.id, key=joining[0].credential, reason=_plain(reason))
        return _hand_in(kit, event, _signed(kit, event, joining, _named(ssh, key, usb)), to)


# ---- when all keys are lost -----------------------------------------------------------------------------------------


@keys.command()
@click.option("--person", default="", metavar="NAME", help="Whose the new keys are.")
@_hands("new-")
@click.option(
    "--recovery", "recovery", default="", metavar="FILE", help="The recovery key's file; else it is asked for."
)
@_recovery_options
@click.option("--finish", is_flag=True, help="After the wait: put it in force. One of the new keys signs.")
@_hands()
def recover(
    person: str, new_ssh: tuple[str, ...], new_key: tuple[str, ...], new_usb: int, recovery: str, recovery_out: str,
    recovery_public: str, finish: bool, ssh: tuple[str, ...], key: tuple[str, ...], usb: int,
) -> None:  # fmt: skip
    """Replace all keys by the recovery key: it begins a wait, in which any live key can say no."""
    if finish:
        return _without_more("recovered", _named(ssh, key, usb))
    with acting() as kit:
        ring = ceremonies.ring_now(kit)
        if not ring.founded:
            refuse("no_keyring")
        new, seed = _new_recovery(recovery_out, recovery_public), _recovery_seed(recovery)
        hands = _named(new_ssh, new_key, new_usb)
        _found(kit, "recovering", hands, person, ring.settings, new, [lambda e: raw_key.sign(seed, e.signed)])
        if not ui.session().as_json:
            hours = ring.settings.delay_ms // HOUR_MS
            ui.say(f"Nothing is replaced yet. In {hours} h: `amends keys recover --finish`, with one of the new keys.")


def _recovery_seed(file: str) -> bytes:
    """From a raw key's file, a file with the letters, or typed at the terminal."""
    if file:
        path = Path(file)
        text = path.read_bytes()[:1024].decode("utf-8", "replace") if path.is_file() else raw_key.MARK
        return raw_key.read(path) if text.startswith(raw_key.MARK) else raw_key.from_paper(text)
    if not sys.stdin.isatty():
        raise YouErred("The recovery key is typed at a terminal.", next="Or pass --recovery FILE.", code="no_terminal")
    return raw_key.from_paper(click.prompt("Recovery key", hide_input=True, err=True))


@keys.command()
@_hands()
@to_option
def veto(ssh: tuple[str, ...], key: tuple[str, ...], usb: int, to: str) -> None:
    """Stop a recovery that waits: any live key signs."""
    return _without_more("vetoed", _named(ssh, key, usb), to)


def _without_more(kind: str, hands: list[Hand], to: str = "") -> None:
    with acting() as kit:
        event = ceremonies.begin(kit, kind)
        return _hand_in(kit, event, _signed(kit, event, [], hands), to)


# ---- in several places ----------------------------------------------------------------------------------------------


@keys.command()
@click.argument("file", type=click.Path(path_type=Path))
def new(file: Path) -> None:
    """Make a raw key in a new file, which only you can read."""
    seed = os.urandom(raw_key.SEED_BYTES)
    raw_key.write(file, seed)
    made = raw_key.public(seed)
    if ui.session().as_json:
        return ui.emit({"file": str(file), "id": made.id, "public": made.public, "fingerprint": fingerprint(made)})
    ui.say(f"{file} holds the key {made.id}, fingerprint {fingerprint(made)}, public half {made.public}.")
    ui.say("It proves that somebody has the file, and not that anybody is there.")
    return None


@keys.command()
@click.argument("file", type=click.Path(path_type=Path))
@_hands()
def sign(file: Path, ssh: tuple[str, ...], key: tuple[str, ...], usb: int) -> None:
    """Sign an event that lies in a file, here or on a machine without the log."""
    document, event = _load(file)
    _describe(event)
    hands = _named(ssh, key, usb)
    if not hands:
        raise YouErred("Nothing signed it.", next="Name a key with --ssh, --key or --usb.", code="usage")
    named = [Credential(id, "webauthn", EDDSA, "") for id in document.get("usb", ()) if isinstance(id, str)]
    rp_id = str(document.get("rp_id", NOTHING.settings.rp_id))
    document["proofs"] += [_prove(hand, event, named, rp_id) for hand in hands]
    _save(file, document)
    if ui.session().as_json:
        return ui.emit({"file": str(file), "event": event.digest, "proofs": len(document["proofs"])})
    ui.say(f"{file} has {ui.count(len(document['proofs']), 'signature')} now; `amends keys submit FILE` records it.")
    return None


def _describe(event: Event) -> None:
    """What is about to be signed: every field of the very bytes, and what of it is on paper."""
    ui.say("You sign, whole:", err=True)
    show(drawn(tuple(fields_of(json.loads(event.text)))), err=True)
    for joins in event.new:
        ui.say(f"joins       {joins.person}, fingerprint {fingerprint(joins)}", err=True)
    if event.said.recovery:
        ui.say(f"recovery    fingerprint {fingerprint(recovery_credential(event.said.recovery))}", err=True)
    ui.say(f"check code  {check_code(event.digest)}: {event.said.kind}", err=True)


@keys.command()
@click.argument("file", type=click.Path(path_type=Path))
def submit(file: Path) -> None:
    """Record an event that lies in a file, with the signatures in it."""
    document, event = _load(file)
    with acting() as kit:
        return _hand_in(kit, event, document["proofs"])
