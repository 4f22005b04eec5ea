"""What whoever verifies brings along: notes that they kept, and a policy that says whose signatures they believe.

A note is a checkpoint that left the device once (a mail, a ticket, a print, another bundle). It counts only where the
log's own key signed it. A policy is C2SP's tlog-policy:

    log <vkey>                         whose log is asked for
    witness <name> <vkey>              whose cosignatures count
    group <name> <k|any|all> <names>   how many of them do
    quorum <name|none>                 what has to be met

Keys come from the policy only: one that lies in a bundle or in the log says nothing about whom to trust.
Sources: C2SP tlog-policy, tlog-cosignature, tlog-checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from . import note
from .anchor import Anchor
from .errors import Malformed, YouErred
from .note import COSIGNATURE, ED25519, BadSignature, Checkpoint, Key

LINES_MAX = 1000
POLICY_MAX = 1 << 20


class Brought(NamedTuple):
    """A note as it was brought: what it is called in a finding, its bytes, the head that it claims."""

    name: str
    text: bytes
    head: Checkpoint

    def anchor(self, key: Key) -> Anchor:
        """The same as an anchor. Raises BadSignature or Malformed if the log's key did not sign it."""
        note.open_note(self.text, [key])
        return Anchor(Path(self.name), "", *self.head, b"")


def brought(said: str) -> Brought:
    """A note from a file, or written out. Raises YouErred (`bad_note`)."""
    if "\n" in said:
        return _note("the note", said.encode())
    try:
        with open(said, "rb") as file:
            return _note(said, file.read(note.NOTE_MAX + 1))
    except OSError as error:
        raise _bad_note(f"The note {said} cannot be read ({error.strerror or error}).") from None


def carried(name: str, text: bytes) -> Brought:
    """A note that lies in a bundle. Raises Malformed."""
    return Brought(name, text, note.parse_checkpoint(text[: text.rfind(b"\n\n") + 1]))


def _note(name: str, text: bytes) -> Brought:
    try:
        return carried(name, text)
    except Malformed as error:
        raise _bad_note(f"{name} is no signed head of a log. {error.message}") from None


def _bad_note(message: str) -> YouErred:
    return YouErred(message, next="Give a file that holds a checkpoint note, or its text.", code="bad_note")


# ---- the policy -----------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """So many of these have to be there."""

    least: int
    members: tuple[str, ...]


class Policy(NamedTuple):
    """Whose logs and whose cosignatures count. quorum: the name that has to be met, empty for none."""

    logs: tuple[Key, ...]
    witnesses: dict[str, Key]
    groups: dict[str, Group]
    quorum: str

    def met(self, signers: Iterable[Key]) -> bool:
        """Whether these cosigners are enough."""
        there = frozenset(signers)
        return not self.quorum or self._met(self.quorum, there)

    def _met(self, name: str, there: frozenset[Key]) -> bool:
        if name in self.witnesses:
            return self.witnesses[name] in there
        group = self.groups[name]  # its members were named before it, so this ends
        return sum(self._met(member, there) for member in group.members) >= group.least


def read_policy(path: Path) -> Policy:
    """A policy from its file. Raises YouErred (`bad_policy`)."""
    try:
        with open(path, "rb") as file:
            data = file.read(POLICY_MAX + 1)
        if len(data) > POLICY_MAX:
            raise _bad_policy(f"The policy {path} is larger than {POLICY_MAX >> 20} MiB.")
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_policy(f"The policy {path} cannot be read ({error}).") from None
    return parse_policy(text)


def parse_policy(text: str) -> Policy:
    """A policy from its text. Raises YouErred (`bad_policy`) naming the line."""
    policy, quorum = Policy((), {}, {}, ""), ""
    lines = text.splitlines()
    if len(lines) > LINES_MAX:
        raise _bad_policy(f"A policy has at most {LINES_MAX} lines.")
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            if words[0] == "quorum":
                _want(not quorum and len(words) == 2, "one quorum, of one name")
                quorum = words[1]
                _want(quorum == "none" or _known(policy, quorum), f"{quorum} is not named before")
            else:
                policy = _taken(policy, words)
        except (Malformed, ValueError) as error:
            raise _bad_policy(f"Line {number} of the policy: {getattr(error, 'message', error)}") from None
    if not quorum:
        raise _bad_policy("The policy has no quorum line.")
    return policy._replace(quorum="" if quorum == "none" else quorum)


def _taken(policy: Policy, words: list[str]) -> Policy:
    match words:
        case ["log", vkey] | ["log", vkey, _]:
            key = note.parse_vkey(vkey)
            _want(key.type == ED25519, "a log signs with a plain Ed25519 key")
            return policy._replace(logs=(*policy.logs, key))
        case ["witness", name, vkey] | ["witness", name, vkey, _]:
            key = note.parse_vkey(vkey)
            _want(key.type == COSIGNATURE, "a witness signs with a cosignature key")
            _want(all(key.public != other.public for other in policy.witnesses.values()), "that key is named already")
            _new(policy, name)
            return policy._replace(witnesses={**policy.witnesses, name: key})
        case ["group", name, least, *members]:
            _new(policy, name)
            _want(bool(members) and len(set(members)) == len(members), "a group has members, each once")
            for member in members:
                _want(_known(policy, member), f"{member} is not named before")
                _want(all(member not in group.members for group in policy.groups.values()), f"{member} is in a group")
            return policy._replace(groups={**policy.groups, name: Group(_least(least, len(members)), tuple(members))})
    raise ValueError("log, witness, group or quorum is asked, with what belongs to it.")


def _least(word: str, members: int) -> int:
    least = {"any": 1, "all": members}.get(word) or (int(word) if word.isascii() and word.isdigit() else 0)
    _want(0 < least <= members, f"{word} of {members} members")
    return least


def _known(policy: Policy, name: str) -> bool:
    return name in policy.witnesses or name in policy.groups


def _new(policy: Policy, name: str) -> None:
    _want(name != "none" and not _known(policy, name), f"{name} is named already")


def _want(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why + ".")


def _bad_policy(message: str) -> YouErred:
    return YouErred(message, next="See https://c2sp.org/tlog-policy for the form.", code="bad_policy")


class Cosigned(NamedTuple):
    """Who of a policy's witnesses signed a note; trouble: why it does not count at all."""

    witnesses: frozenset[Key]
    trouble: str = ""


def cosigned(text: bytes, log: Key, policy: Policy) -> Cosigned:
    """The policy's witnesses whose cosignatures on a note of this log hold."""
    try:
        opened = note.open_note(text, [log, *policy.witnesses.values()])
    except (BadSignature, Malformed) as error:
        return Cosigned(frozenset(), error.message)
    keys = frozenset(signature.key for signature in opened.signatures)
    if log not in keys:
        return Cosigned(frozenset(), "The log's own key did not sign it.")
    return Cosigned(keys & frozenset(policy.witnesses.values()))
