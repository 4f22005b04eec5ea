"""A person says yes or no to one call, after having seen exactly what is signed.

`amends approve ITEM` draws the request from the signed bytes: every argument, whole, what agents wrote behind a bar
that nothing of theirs can draw; who asks, what is new about it, how long there is left, and a code to compare with
another screen. Then it takes a name, or what a key signs: a USB key, an SSH key, a raw key in a file, a browser, or a
file that comes back from elsewhere. Enter decides nothing, standard input is read only where it is a terminal, and
there is no `--yes`. A name, or a key in a file, that a script passes on its command line does decide, at its own level
and no higher: where nobody sits, nobody is asked to type the code. A touch is a touch, whoever asks for it; and
`--no-input` approves nothing, whatever signs.

Every way ends at the one door (gate/signing.py), which checks the proof and records the decision.
"""

from __future__ import annotations

import getpass
import os
import select
import shutil
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..runtime.gate import keyring, signing
from ..runtime.gate.approvals import APPROVED, DENIED, PENDING, SPENT
from ..runtime.gate.levels import LEVELS
from ..runtime.gate.proof import APPROVAL, Credential
from ..runtime.gate.shown import Field, about, fields_of, headline
from ..runtime.gate.statement import APPROVE, BREAK_GLASS, DENY, check_code, decision
from ..runtime.gate.ways import deciding
from ..runtime.plain import plain
from ..store.errors import NotFound, Refused, YouErred
from . import ui
from .device import acting, looking

if TYPE_CHECKING:
    from ..runtime.gate.signing import Receipt, Review
    from ..runtime.kit import AgentKit

RP_ID = "amends.localhost"
WIDTH = 100
BAR, NAME_MAX = "│ ", 30
TECHNICAL = frozenset(
    ("attempt", "idempotency_key", "keyring_head", "kind", "ledger_id", "nonce", "policy", "saga", "supersedes", "v")
)
"""What is signed to make a request one of its own; the rest tells a person something."""
SAID = {"approve": "approved", "deny": "denied", "break_glass": "approved"}


class Asked(NamedTuple):
    """What was asked on the command line. One of the signers is chosen, or none."""

    verdict: str
    by: str
    note: str
    reason: str
    break_glass: bool
    usb: bool
    ssh: str | None
    key: str | None
    export: str | None
    imported: str | None
    qr: bool
    page: bool
    no_input: bool

    @property
    def says(self) -> str:
        """The verdict that is signed."""
        return BREAK_GLASS if self.break_glass else self.verdict

    @property
    def again(self) -> str:
        """The verb, as whoever brings an answer back has to say it."""
        return f"{self.verdict} ITEM" + (" --break-glass --reason TEXT" if self.break_glass else "")

    @property
    def signers(self) -> list[str]:
        found = {
            "--usb": self.usb,
            "--ssh": self.ssh,
            "--key": self.key,
            "--import": self.imported,
            "--page": self.page,
        }
        return [name for name, chosen in found.items() if chosen]


# ---- the verbs ------------------------------------------------------------------------------------------------------

FILE = click.Path(dir_okay=False)
_SIGNERS = [
    click.option("--by", default="", metavar="NAME", help="Who decides. A key names its person itself."),
    click.option("--usb", is_flag=True, help="Sign with the security key that is plugged in."),
    click.option("--ssh", metavar="KEY", type=FILE, help="Sign with this SSH key, by ssh-keygen."),
    click.option("--key", metavar="FILE", type=FILE, help="Sign with the raw Ed25519 key in this file."),
    click.option("--page", is_flag=True, help="Decide in the browser: opens the local page."),
    click.option("--export", metavar="FILE", type=FILE, help="Write what is to be signed, to take it elsewhere."),
    click.option("--import", "imported", metavar="FILE", type=FILE, help="Take what was signed elsewhere."),
    click.option("--qr", is_flag=True, help="Show it as a QR code, and take the pasted answer."),
    click.option("--request", metavar="FILE", type=FILE, help="Answer a request that another device exported."),
    click.option("--note", default="", metavar="TEXT", help="A word beside the decision."),
    click.option("--no-input", is_flag=True, help="Ask nothing. Approves nothing, whatever else is said."),
]


def _signing(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_SIGNERS):
        command = option(command)
    return command


@click.command(cls=ui.Verb, name="approve")
@click.argument("item", required=False)
@_signing
@click.option("--break-glass", is_flag=True, help="Set aside what the request asks; opens a review for others.")
@click.option("--reason", default="", metavar="TEXT", help="With --break-glass: why.")
@click.option("--key-selftest", is_flag=True, help="Try the security key that is plugged in; decides nothing.")
def approve(item: str | None, request: str | None, key_selftest: bool, **said: Any) -> int | None:
    """Show a request as it is signed, and let it happen. ITEM is its id in the inbox, or its saga."""
    if key_selftest:
        return _selftest()
    return _decide(item, request, Asked(APPROVE, **said))


@click.command(cls=ui.Verb, name="deny")
@click.argument("item", required=False)
@_signing
def deny(item: str | None, request: str | None, **said: Any) -> int | None:
    """Keep a step from happening. ITEM is its id in the inbox, or its saga."""
    return _decide(item, request, Asked(DENY, reason="", break_glass=False, **said))


def _decide(item: str | None, request: str | None, asked: Asked) -> int | None:
    if len(asked.signers) > 1:
        raise YouErred(f"{' and '.join(asked.signers)}: one way to sign at a time.", next="Choose one.")
    if asked.signers and (asked.export or asked.qr) and request is None:
        raise YouErred(f"{asked.signers[0]} signs here, --export and --qr elsewhere.", next="Choose one.")
    if asked.page and asked.no_input:
        raise YouErred("--page opens a browser to ask in, and --no-input asks nothing.", next="Choose one.")
    if asked.page:
        _in_the_browser(item, asked)
    elif (item is None) == (request is None):
        raise YouErred("Name one request: ITEM, its id in the inbox, or --request FILE.", next="Run `amends inbox`.")
    elif request is not None:
        _answer_elsewhere(Path(request), asked)
    else:
        with acting() as kit:
            return _decide_here(kit, str(item), asked)
    return None


def _in_the_browser(item: str | None, asked: Asked) -> None:
    """Open the local page, at this request if one was named."""
    from ..runtime.inbox import find
    from .serve import show as open_page

    at = "/"
    if item is not None:
        with looking() as kit:
            at = f"/approve/{find(kit, item, asked.verdict).id}"
    open_page(at)


def _decide_here(kit: AgentKit, item: str, asked: Asked) -> int | None:
    review = _review(kit, item, asked)
    over = _over(review, asked)
    show(_lines_of_the_past(review) if over else _lines_of(review), err=ui.session().as_json)
    if over:
        _too_late(kit, review, asked)
    elif asked.export or (asked.qr and not asked.imported):
        _sent(kit, review, asked)
    elif asked.no_input and asked.verdict == APPROVE:
        raise Refused(
            "Nothing was decided: a yes is given by a person who is asked.",
            next="Run it without --no-input.",
            code="input_needed",
        )
    elif not asked.signers and not asked.by:
        return _nothing_decided(review, asked)
    else:
        with Countdown(review.left_ms) as countdown:
            proof = _proof(kit, review, asked, countdown)
        _voted(kit, review, asked, proof)
    return None


def _review(kit: AgentKit, item: str, asked: Asked) -> Review:
    """The request that goes by an id, or the one of a saga that this verb would settle; one that is over too."""
    from ..runtime.inbox import find

    try:
        found: Any = find(kit, item, asked.verdict)
    except (Refused, NotFound):  # over, or not there at all: the door knows what is over, and says the rest
        found = item
    return signing.review(kit, found)


def _over(review: Review, asked: Asked) -> bool:
    return review.standing != PENDING and not (asked.verdict == DENY and review.standing == APPROVED)


def _too_late(kit: AgentKit, review: Review, asked: Asked) -> None:
    """An answer that costs nobody a touch is recorded, and never used; whoever gives it is told who was first."""
    silent = asked.no_input and asked.verdict == APPROVE
    if not silent and (asked.imported or (asked.by and not asked.signers)):
        with Countdown(0) as countdown:
            proof = _proof(kit, review, asked, countdown) if asked.imported else None
        _voted(kit, review, asked, proof)
    raise Refused(
        f"{_how_it_ended(review)}: there is nothing to decide.",
        next=f"Run `amends show {quote(review.saga)}`.",
        code="decided" if review.standing in _DECIDED else review.standing,
    )


_DECIDED = frozenset((APPROVED, DENIED, SPENT))


def _how_it_ended(review: Review) -> str:
    decisive = (DENY,) if review.standing == DENIED else ("approve", "break_glass")
    said = [f"{by} {SAID[out]} it already" for by, out, _ in review.voted if out in decisive]
    return said[-1] if said and review.standing in _DECIDED else f"This request is {review.standing}"


def _voted(kit: AgentKit, review: Review, asked: Asked, proof: dict[str, Any] | None) -> None:
    receipt = signing.vote(
        kit, review.item, asked.verdict, by=asked.by, proof=proof, note=asked.note, reason=asked.reason,
        break_glass=asked.break_glass,
    )  # fmt: skip
    way = _onward(kit, review, receipt)
    if ui.session().as_json:
        return ui.emit(receipt._asdict() | {"decision": SAID[receipt.verdict], "in_the_way": way})
    return _told(receipt, way)


def _onward(kit: AgentKit, review: Review, receipt: Receipt) -> list[str]:
    """Why what was approved does not go on now; empty if it does, or was not."""
    from ..runtime.inbox import in_the_way

    return in_the_way(kit, review.digest) if receipt.standing == APPROVED else []


def _told(receipt: Receipt, way: Sequence[str]) -> None:
    """The result, last and by itself."""
    ui.say()
    verb = "broke the glass for" if receipt.verdict == "break_glass" else SAID[receipt.verdict]
    where = f"{receipt.item} ({receipt.saga}, step {receipt.step} {receipt.tool})"
    ui.say(ui.Word(f"{receipt.by} {verb} {where}.", "good" if receipt.verdict == DENY else "bold"))
    said = {"approved": "It goes on.", "denied": "It does not happen.",
            "pending": f"{receipt.have} of {receipt.need} have said yes; it waits for the others."}  # fmt: skip
    if way:
        said["approved"] = "That is recorded, and it does not go on now."
    ui.say(said.get(receipt.standing, f"It is {receipt.standing}."), f" Record {receipt.seq}.")
    for one in way:
        ui.say(ui.Word("! ", "ask"), one)


def _nothing_decided(review: Review, asked: Asked) -> int:
    """Exit 2: a person looked, and decided nothing."""
    ways = ways_of(review, asked.verdict)
    if ui.session().as_json:
        error = {"code": "signer_needed", "message": "Nothing was decided.", "next": f"Run {' or '.join(ways)}."}
        ui.emit(document(review) | {"error": error})
        return 2
    ui.say()
    ui.say("Nothing was decided. To decide:")
    for way in ways:
        ui.say("    ", ui.Word(way, "bold"))
    return 2


def ways_of(review: Review, verdict: str) -> list[str]:
    """The commands that would do, by what the request asks."""
    return list(deciding(review.item, verdict, review.level, review.roles, review.credentials))


# ---- what is seen ---------------------------------------------------------------------------------------------------

Line = tuple[object, ...]


def show(lines: Iterator[Line], err: bool = False) -> None:
    for line in lines:
        ui.say(*line, err=err)


def _lines_of(review: Review) -> Iterator[Line]:
    """A request of this device, for a person."""
    yield from _seen(review.headline, review.fields, review.about)
    for remark in review.remarks:
        yield ui.Word("! ", "ask"), remark
    for by, out, level in review.voted:
        yield (f"{by} said {out.replace('_', ' ')} ({level})",)
    yield (_needs(review),)
    yield from _bottom(review.code, review.left_ms)


def _lines_of_the_past(review: Review) -> Iterator[Line]:
    """One that is over: that first, and nothing of what it would have taken."""
    yield (ui.Word(f"{_how_it_ended(review)}: there is nothing to decide.", "bad"),)
    yield from _seen(review.headline, review.fields, review.about)
    for by, out, level in review.voted:
        yield (f"{by} said {out.replace('_', ' ')} ({level})",)


def _needs(review: Review) -> str:
    people = f", of each of {review.need} people; {review.have} have said yes" if review.need > 1 else ""
    roles = f", in the role {' or '.join(map(plain, review.roles))}" if review.roles else ""
    return f"needs       {LEVELS[review.level][1]}{people}{roles}"


def _seen(title: str, fields: Sequence[Field], rest: Sequence[Field]) -> Iterator[Line]:
    """What matters most stands last, next to the question: a terminal shows the end."""
    for line in _wrapped(title, _width()):
        yield (ui.Word(line, "bold"),)
    yield (ui.Word("signed with it:", "dim"),)
    yield from drawn(sorted(rest, key=lambda field: field.label in TECHNICAL, reverse=True))
    yield (ui.Word("what it is given; behind the bar stands what the agent wrote, and nobody has checked it:", "dim"),)
    yield from drawn(fields)


def drawn(fields: Sequence[Field]) -> Iterator[Line]:
    """Values, whole, each of their lines behind the bar; names that are too long stand above them."""
    names = [_name(field) for field in fields]
    column = max((_columns(name) for name in names if _columns(name) <= NAME_MAX), default=0)
    for name, field in zip(names, fields, strict=True):
        if _columns(name) > NAME_MAX:
            for line in _wrapped(name, _width() - 4):
                yield "  ", ui.Word(line, "dim")
            name = ""
        for line in _wrapped(field.value, _width() - column - 8):
            yield "  ", ui.Word(name + " " * (column - _columns(name)), "dim"), " ", ui.Word(BAR, "ask"), line
            name = ""


def _name(field: Field) -> str:
    """Where a value stands. Agents make names too: none of theirs holds a bar."""
    note = f" ({field.note})" if field.note else ""
    return f"{field.label or '(all of it)'}{note}".replace(BAR[0], f"\\u{ord(BAR[0]):04x}")


def _bottom(code: str, left_ms: int) -> Iterator[Line]:
    yield "check code  ", ui.Word(code, "bold"), "  the same on every screen that shows this request"
    yield "time left   ", ui.Word(left(left_ms), "bold" if left_ms else "bad")


def left(ms: int) -> str:
    """`23:59:07`; the hours run on beyond a day."""
    seconds = ms // 1000
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}" if ms > 0 else "none: it has expired"


def _width() -> int:
    return max(40, min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)) if sys.stdout.isatty() else WIDTH


def _wrapped(text: str, width: int) -> list[str]:
    """A text in lines that no terminal breaks for us: what it would break would stand outside the bar."""
    lines, line = [], ""
    for letter in ui.clean(text):
        if _columns(line + letter) > width:
            cut = line.rfind(" ") + 1 or len(line)
            cut = cut if cut > len(line) // 2 else len(line)
            lines.append(line[:cut])
            line = line[cut:]
        line += letter
    return [*lines, line]


def _columns(text: str) -> int:
    """How many columns a text takes at most: letters whose width depends on the terminal count as wide ones."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WFA" else 1 for letter in text)


def document(review: Review) -> dict[str, Any]:
    """A request for scripts: the signed text, what is drawn from it, and what stands of it."""
    told = review._asdict()
    for name in ("approve", "deny", "glass"):
        del told[name]
    return told | {
        "request": review.request.decode(),
        "fields": [field._asdict() for field in review.fields],
        "about": [field._asdict() for field in review.about],
        "credentials": [{"id": one.id, "kind": one.kind, "person": one.person} for one in review.credentials],
    }


# ---- who signs ------------------------------------------------------------------------------------------------------


def _proof(kit: AgentKit, review: Review, asked: Asked, countdown: Countdown) -> dict[str, Any] | None:
    """What the chosen signer makes; None where a name is enough."""
    signed = _to_sign(review, asked)
    if asked.imported:
        from .airgap import read_answer

        return read_answer(_read(asked.imported), review.digest, asked.says, _all(kit))
    return _made(asked, signed, review.code, _may(kit, review, asked), countdown, _rp_id(kit))


def _to_sign(review: Review, asked: Asked) -> bytes:
    return {APPROVE: review.approve, DENY: review.deny, BREAK_GLASS: review.glass}[asked.says]


def _made(
    asked: Asked, signed: bytes, code: str, credentials: Sequence[Credential] | None, countdown: Countdown, rp_id: str
) -> dict[str, Any] | None:
    """What a key of this machine signs. credentials: those that would do; None where nobody here can tell."""
    if asked.usb:
        from .security_key import sign

        return dict(sign(signed, credentials or (), _talk(countdown), countdown.over, rp_id))
    if asked.ssh:
        from . import ssh_key

        credential = ssh_key.public(Path(asked.ssh))
        _check_allowed(credential, credentials)
        if credential.kind == "ssh":
            _confirm(asked, code, countdown.over)
        return ssh_key.sign(Path(asked.ssh), signed, APPROVAL, countdown.over)
    if asked.key:
        from . import raw_key

        seed = raw_key.read(Path(asked.key))
        _check_allowed(raw_key.public(seed), credentials)
        _confirm(asked, code, countdown.over)
        return raw_key.sign(seed, signed)
    _confirm(asked, code, countdown.over)
    return None


def _check_allowed(credential: Credential, credentials: Sequence[Credential] | None) -> None:
    """Said before anybody types a passphrase or touches a key for nothing."""
    if credentials is not None and credential.id not in {one.id for one in credentials}:
        raise Refused(
            f"The key {credential.id} is none of those that may decide this.",
            next="`amends keys list` shows them.",
            code="other_key",
        )


def _may(kit: AgentKit, review: Review, asked: Asked) -> Sequence[Credential]:
    """The keys that would do. A no, and breaking the glass, take any live one."""
    return review.credentials if asked.verdict == APPROVE and not asked.break_glass else _all(kit)


def _all(kit: AgentKit) -> Sequence[Credential]:
    return tuple(keyring.read(kit.log).credentials.values())


def _rp_id(kit: AgentKit) -> str:
    return keyring.read(kit.log).settings.rp_id


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(512 * 1024)


# ---- a person at the terminal ---------------------------------------------------------------------------------------


def attended() -> bool:
    """Whether somebody sits there who can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _confirm(asked: Asked, code: str, over: threading.Event) -> None:
    """At a terminal a yes without a touch is typed: the beginning of the check code. Enter decides nothing."""
    if asked.verdict == DENY or ui.session().as_json or not attended():
        return
    first = code.split("-")[0]
    typed = _line(f"To approve, type the first group of the check code ({first}); Enter decides nothing: ", over)
    if typed.strip().upper() != first:
        raise Refused("Nothing was decided.", next="Run this again to decide.", code="not_confirmed")


def _line(prompt: str, over: threading.Event) -> str:
    """A line that is typed at the terminal, before the time is over. Raises Refused (expired)."""
    sys.stderr.write(prompt)
    sys.stderr.flush()
    while os.name == "posix" and not select.select([sys.stdin], [], [], 0.2)[0]:
        if over.is_set():
            ui.say("", err=True)
            raise Refused("The time of this request is over: nothing was decided and nothing was sent.",
                          next="Run `amends inbox`.", code="expired")  # fmt: skip
    return sys.stdin.readline()


def _talk(countdown: Countdown) -> Any:
    from .security_key import Talk

    def say(text: str) -> None:
        countdown.hide()
        ui.say(ui.Word(text, "bold"), err=True)
        countdown.show()

    def pin(tries: int) -> str:
        countdown.hide()
        return _pin(tries)

    return Talk(say, pin)


def _pin(tries: int) -> str:
    if not attended():
        raise YouErred("A PIN is typed at a terminal, and there is none.", next="Run this at one.", code="no_terminal")
    many = "the last one" if tries == 1 else f"{tries} tries left"
    return getpass.getpass(f"PIN of the key ({many}; Enter gives up): ")


class Countdown:
    """Sets `over` when the time of a request is over. Shown, the time that is left runs at the terminal."""

    def __init__(self, left_ms: int) -> None:
        self.over = threading.Event()
        self._end = time.monotonic() + left_ms / 1000
        self._ended = threading.Event()
        self._lock, self._shown, self._drawn = threading.Lock(), False, False
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def left_ms(self) -> int:
        return max(0, int((self._end - time.monotonic()) * 1000))

    def show(self) -> None:
        self._shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def hide(self) -> None:
        with self._lock:
            if self._drawn:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
            self._shown = self._drawn = False

    def __enter__(self) -> Countdown:
        if not self.left_ms:
            self.over.set()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.hide()

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self.left_ms / 1000)):
            if not self.left_ms:
                return self.over.set()
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            if self._shown:
                self._drawn = True
                sys.stderr.write(f"\r\x1b[K{left(self.left_ms)} left ")
                sys.stderr.flush()


# ---- to elsewhere, and back -----------------------------------------------------------------------------------------


def _sent(kit: AgentKit, review: Review, asked: Asked) -> None:
    """Write or draw what is to be signed. Only an answer that is pasted at a terminal decides anything here."""
    from .airgap import export, request_document

    packed = request_document(review.request, _may(kit, review, asked))
    made: list[Path] = []
    if asked.export:
        signed = _to_sign(review, asked)
        seen = "".join(f"{''.join(_text(part) for part in line)}\n" for line in _lines_of(review))
        made = export(Path(asked.export), signed, seen, packed)
    if asked.qr:
        _draw(packed)
        if attended() and not asked.no_input and not ui.session().as_json:
            return _pasted(kit, review, asked)
    if ui.session().as_json:
        return ui.emit({"item": review.item, "request": review.digest, "code": review.code, "decision": None,
                        "files": [str(one) for one in made]})  # fmt: skip
    for one in made:
        ui.say("written: ", str(one))
    if made:
        ui.say(f"Sign it anywhere: `ssh-keygen -Y sign -f KEY -n {APPROVAL} {made[0]}`; then")
    ui.say(f"    amends {asked.again.replace('ITEM', review.item)} --import FILE")
    return None


def _text(part: object) -> str:
    return ui.clean(part.text if isinstance(part, ui.Word) else part)


def _draw(packed: dict[str, Any]) -> None:
    from .airgap import pack, qr

    err = ui.session().as_json
    for line in qr(packed, ui.coloured(err)):
        ui.put(line, err=err, colour=True)
    ui.say("or as text: ", pack(packed), err=err)


def _pasted(kit: AgentKit, review: Review, asked: Asked) -> None:
    from .airgap import read_answer

    with Countdown(review.left_ms) as countdown:
        typed = _line("Paste the answer, one line that begins with AMENDS1; Enter decides nothing: ", countdown.over)
    if not typed.strip():
        later = f"Later: `amends {asked.again.replace('ITEM', review.item)} --import FILE`."
        raise Refused("Nothing was decided.", next=later, code="not_confirmed")
    _voted(kit, review, asked, read_answer(typed.encode(), review.digest, asked.says, _all(kit)))


def _answer_elsewhere(path: Path, asked: Asked) -> None:
    """On a device that holds nothing of the saga: show a request that came by file, and make an answer of it."""
    from .airgap import decision_document, pack, read_request, write

    found = read_request(_read(str(path)))
    fields = found.fields
    if not (asked.usb or asked.ssh or asked.key) or asked.no_input:
        raise YouErred("An answer to a request from elsewhere is signed by a key.", next="Add --usb, --ssh or --key.",
                       code="signer_needed")  # fmt: skip
    code, left_ms = check_code(found.digest), int(fields.get("expires", 0) - time.time() * 1000)
    show(_seen(headline(fields), tuple(fields_of(fields["args"])), tuple(about(fields))), err=ui.session().as_json)
    show(_bottom(code, max(0, left_ms)), err=ui.session().as_json)
    usb = [Credential(one, "webauthn", -8, "") for one in found.usb]
    signed = decision(found.digest, asked.says)
    if asked.break_glass and not fields.get("break_glass", True):
        raise Refused(f"The policy lets nobody break the glass for {plain(fields['tool'])}.",
                      next="Approve it as the policy asks.", code="no_break_glass")  # fmt: skip
    if left_ms <= 0:
        raise Refused("The time of this request is over.", next="Ask again.", code="expired")
    with Countdown(left_ms) as countdown:
        proof = _made(asked, signed, code, usb if asked.usb else None, countdown, RP_ID)
    assert proof is not None
    answer = decision_document(found.digest, asked.says, proof)
    if asked.export:
        write(Path(asked.export), pack(answer).encode() + b"\n")
    if ui.session().as_json:
        return ui.emit({"code": code, "answer": pack(answer), "decision": SAID[asked.verdict], "file": asked.export})
    if asked.qr:
        _draw(answer)
    elif not asked.export:
        ui.say("the answer: ", pack(answer))
    ui.say("On the device that asked: ", ui.Word(f"amends {asked.again} --import FILE", "bold"))
    return None


# ---- whether a key would do -----------------------------------------------------------------------------------------


def _selftest() -> int:
    """Exit 1 where the key would not do."""
    from .security_key import selftest

    found = []
    for one in selftest(_talk(Countdown(0))):
        found.append(one)
        if not ui.session().as_json:
            ui.say(
                ui.Word("ok    " if one.good else "no    ", "good" if one.good else "bad"), f"{one.name}: {one.said}"
            )
    good = all(one.good for one in found)
    if ui.session().as_json:
        ui.emit({"good": good, "findings": [one._asdict() for one in found]})
    else:
        ui.say("This key will do." if good else "This key will not do.")
    return 0 if good else 1
