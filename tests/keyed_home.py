"""A home with a keyring of soft keys, an agent that waits for a person in it, and a terminal that somebody sits at.

keyed = KeyedHome(tmp_path)                 # ana: a raw key and an SSH key; ben: an sk key; cem: a USB key
with keyed.asking("pay.send", {"to": "ann"}) as asking:
    keyed.amends("approve", asking.item, "--key", keyed.raw)
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from nacl.signing import SigningKey
from soft_ctap import SoftKey, device
from soft_keys import SoftSsh

from amends import IRREVERSIBLE, AgentKit, saga_scope
from amends.cli import raw_key
from amends.cli.security_key import ORIGIN, RP_ID, Talk, _assertion, _client, _credential
from amends.runtime.gate import ceremonies
from amends.runtime.gate.keyevent import Settings
from amends.runtime.gate.keyring import read
from amends.runtime.gate.proof import Credential, base64url, raw_credential, register, ssh_credential, ssh_proof
from amends.runtime.gate.sshsig import KEYRING, armour

TESTS = Path(__file__).resolve().parent
PIN = "2468"
PYTHON = [sys.executable, "-m", "amends.cli"]
BOTH = ("admin", "approver")


def quiet(pin: str = PIN) -> Talk:
    """Somebody who knows the PIN."""
    return Talk(lambda text: None, lambda tries: pin)


class Asking:
    """A tool call that waits for a person on a thread. item: its id in the inbox; done: the calls that went through."""

    def __init__(self, home: Path, tool: str, args: dict[str, Any], saga: str) -> None:
        self.kit = AgentKit("shop-agent", home=home, warn=lambda text: None)
        self.done: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self._begins = self.kit.log.size
        self._thread = threading.Thread(target=self._run, args=(tool, args, saga), daemon=True)
        self._thread.start()
        end = time.monotonic() + 30
        while not (found := self.kit.inbox()):
            assert self._thread.is_alive() and time.monotonic() < end, self.error
            time.sleep(0.01)
        self.item: str = found[0]["id"]

    def _run(self, tool: str, args: dict[str, Any], saga: str) -> None:
        def act(**given: Any) -> None:
            self.done.append(given)

        try:
            with saga_scope(saga, kit=self.kit) as scope:
                scope.execute(tool, act, args, semantics=IRREVERSIBLE)
        except BaseException as error:
            self.error = error

    def end(self) -> list[dict[str, Any]]:
        """What was done, once the call has come to an end."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.done

    def votes(self) -> list[Any]:
        """The votes since it was asked."""
        self.kit.log.refresh()
        return [one.entry for one in self.kit.log.records(self._begins) if one.entry.kind == "vote.cast"]


class KeyedHome:
    """level: what pay.send asks; roles: of every key. usb: the soft key of cem, with this state file in any process."""

    def __init__(self, folder: Path, level: str = "", *, deadline: str = "24h", quorum: int = 1) -> None:
        self.folder, self.home = folder, folder / "home"
        self.raw, self.ssh = folder / "raw.key", folder / "id_ed25519"
        self.sk = SoftSsh(b"\x31" * 32, application="ssh:amends")
        self.state = folder / "usb.json"
        self.usb = SoftKey(b"\x32" * 32, pin=PIN, state=self.state)
        with AgentKit("keys", home=self.home) as kit:
            self._found(kit)
        if level:
            (self.home / "policy.toml").write_text(
                f'version = 1\n[tools."pay.send"]\nsemantics = "irreversible"\n'
                f'approval = {{ level = "{level}", quorum = {quorum}, deadline = "{deadline}" }}\n'
            )

    def _found(self, kit: AgentKit) -> None:
        seed = bytes(range(32))
        raw_key.write(self.raw, seed)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ana", "-f", str(self.ssh)], check=True, timeout=60
        )
        keys = [
            raw_key.public(seed), ssh_credential(self.ssh.with_suffix(".pub").read_text()),
            ssh_credential(self.sk.line), self._usb_credential(),
        ]  # fmt: skip
        keys = [
            msgspec.structs.replace(key, person=person, roles=BOTH, label=person)
            for key, person in zip(keys, ("ana", "ana", "ben", "cem"), strict=True)
        ]
        self.credentials: list[Credential] = keys
        recovery = SigningKey(b"\x33" * 32)
        event = ceremonies.begin(
            kit, "founded", keys=tuple(keys), recovery=base64url(bytes(recovery.verify_key)), settings=Settings()
        )
        ceremonies.submit(kit, event, self._proofs(seed, keys, event.signed))
        assert set(read(kit.log).credentials) == {key.id for key in keys}

    def _usb_credential(self) -> Credential:
        asked, over = os.urandom(32), threading.Event()
        client = _client(device(self.usb), quiet())
        answer = _credential(client, asked, "cem", (-8,), (), RP_ID, over)
        return register(answer, challenge=asked, origins={ORIGIN}, rp_id=RP_ID)

    def _proofs(self, seed: bytes, keys: Sequence[Credential], signed: bytes) -> list[dict[str, Any]]:
        request = self.folder / "event"
        request.write_bytes(signed)
        command = ["ssh-keygen", "-Y", "sign", "-f", str(self.ssh), "-n", KEYRING, str(request)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        plain = ssh_proof(request.with_suffix(".sig").read_text())
        touched = self.sk.get(signed, namespace=KEYRING)
        name = [base64url_to_bytes(keys[3].id)]
        usb = _assertion(_client(device(self.usb), quiet()), signed, name, RP_ID, threading.Event())
        return [raw_key.sign(seed, signed), plain, touched, usb]

    # -- an agent ------------------------------------------------------------------------------------------------------

    @contextmanager
    def asking(
        self, tool: str = "pay.send", args: dict[str, Any] | None = None, saga: str = "order-1"
    ) -> Iterator[Asking]:
        asking = Asking(self.home, tool, {"to": "ann", "amount_minor": 1250} if args is None else args, saga)
        try:
            yield asking
        finally:
            if asking._thread.is_alive():
                with AgentKit("ender", home=self.home, warn=lambda text: None) as kit:
                    for one in kit.inbox():
                        if one["kind"] == "approval":
                            kit.deny(one["id"], by="the end of the test")
            asking._thread.join(30)
            asking.kit.close()

    # -- the command line ---------------------------------------------------------------------------------------------

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"AMENDS_HOME": str(self.home), "PYTHONPATH": str(TESTS)}

    def command(self, *words: str | Path, usb: Any = None) -> list[str]:
        """The command line; usb: what is plugged in, as soft_ctap.SoftKey takes it."""
        if usb is None:
            return [*PYTHON, *map(str, words)]
        plugged = {"seed": self.usb.seed.hex(), "pin": PIN, "state": str(self.state)}
        keys = [plugged | one for one in (usb if isinstance(usb, list) else [usb])]
        return [sys.executable, str(TESTS / "soft_ctap.py"), json.dumps(keys), *map(str, words)]

    def amends(
        self, *words: str | Path, usb: Any = None, input: str = "", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The command line in a process of its own, its standard input a pipe."""
        return subprocess.run(
            self.command(*words, usb=usb), env=self.env | (env or {}), input=input, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip

    def asked(self, *words: str | Path, code: int = 0, **more: Any) -> Any:
        """What it answers on --json."""
        done = self.amends(*words, "--json", **more)
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    def refusal(self, *words: str | Path, **more: Any) -> tuple[int, str]:
        """Its exit code, and that of its error."""
        done = self.amends(*words, "--json", **more)
        return done.returncode, json.loads(done.stdout)["error"]["code"]


def base64url_to_bytes(text: str) -> bytes:
    from amends.runtime.gate.proof import unbase64url

    return unbase64url(text)


class Terminal:
    """A command at a terminal that somebody sits at. seen: all that stood there so far."""

    def __init__(self, command: Sequence[str], env: dict[str, str], columns: int = 100) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, bytes([40, 0, columns, 0, 0, 0, 0, 0]))
        self._fd, self.seen = ours, ""
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env | {"TERM": "xterm"}, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)

    def until(self, text: str) -> str:
        """Read until a text stands there."""
        end, start = time.monotonic() + 60, len(self.seen)
        while text not in self.seen[start:]:
            assert time.monotonic() < end and self._more(), f"{text!r} never stood there:\n{self.seen}"
        return self.seen

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode() + b"\r")

    def interrupt(self) -> None:
        os.write(self._fd, b"\x03")

    def end(self) -> int:
        """Its exit code, once it has ended and all was read."""
        end = time.monotonic() + 120
        while self._more():
            if time.monotonic() > end:  # a countdown goes on and on
                self.process.kill()
                raise AssertionError(f"it did not end:\n{self.seen}")
        code = self.process.wait(30)
        os.close(self._fd)
        return code

    def _more(self) -> bool:
        if not select.select([self._fd], [], [], 60)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # how Linux says that nobody holds the other end any more
            return False
        self.seen += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


__all__ = ["Asking", "KeyedHome", "PIN", "Terminal", "armour", "quiet", "raw_credential"]
