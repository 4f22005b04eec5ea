"""A decision by a key you have already: `ssh-keygen` signs, with its own questions and its own agent; we check.

The exact bytes lie in a folder that only you can read, for as long as ssh-keygen needs them. A key on a security key
blinks and wants a touch; a plain one is a file and proves no more than that you have it. When the time of the request
is over, ssh-keygen is stopped.

Why never `ssh-keygen -Y verify`: it does not look whether anybody touched the key.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from ..runtime.gate.proof import Credential, ssh_credential, ssh_proof
from ..runtime.hosts import environment
from ..store.errors import Refused, YouErred

PUBLIC_MAX = 16 * 1024


def public(key: Path) -> Credential:
    """The key in `KEY.pub`, or in KEY if that is the public one. Raises YouErred (bad_key_file), Unproven."""
    beside = key if key.suffix == ".pub" else Path(f"{key}.pub")
    try:
        line = beside.read_text(encoding="utf-8")[:PUBLIC_MAX]
    except (OSError, UnicodeDecodeError):
        raise YouErred(
            f"The public key {beside} cannot be read.",
            next=f"`ssh-keygen -y -f {key} > {beside}` makes it anew.",
            code="bad_key_file",
        ) from None
    return ssh_credential(line)


def sign(key: Path, signed: bytes, namespace: str, over: threading.Event) -> dict[str, Any]:
    """The proof that ssh-keygen makes. Raises Refused (not_signed, expired), YouErred (extra_missing), Unproven."""
    with tempfile.TemporaryDirectory(prefix="amends-sign-") as folder:
        request = Path(folder) / "request"
        request.write_bytes(signed)
        code, said = _run(["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", namespace, str(request)], over)
        answer = request.with_name("request.sig")
        if code == 0 and answer.exists():
            return ssh_proof(answer.read_text(encoding="latin-1"))
    if over.is_set():
        raise Refused(
            "The time of this request is over: nothing was signed and nothing was sent.",
            next="Run `amends inbox`.",
            code="expired",
        )
    last = said.strip().splitlines()[-1:] or [f"it ended with {code}"]
    raise Refused(f"ssh-keygen signed nothing: {last[0][:200]}.", next="Run this again.", code="not_signed")


def _run(command: list[str], over: threading.Event) -> tuple[int, str]:
    """Its exit code and what it said. It asks for a passphrase or a PIN at the terminal itself, never on our input."""
    try:
        child = subprocess.Popen(
            command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace",
        )  # fmt: skip
    except FileNotFoundError:
        raise YouErred(
            "ssh-keygen is not installed.", next="Install OpenSSH 8.2 or newer.", code="extra_missing"
        ) from None
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(_tail(child)), daemon=True)
    reader.start()
    try:
        while True:
            try:
                code = child.wait(0.1)
                break
            except subprocess.TimeoutExpired:
                if over.is_set():
                    child.send_signal(signal.SIGTERM)
    except BaseException:
        child.kill()
        child.wait()
        raise
    reader.join(5)
    return code, "".join(said)


def _tail(child: subprocess.Popen[str]) -> str:
    """What it says on standard error: shown as it comes, since it says when to touch the key, and kept."""
    from . import ui

    kept = ""
    for line in child.stderr or ():
        if not line.startswith(("Signing file ", "Write signature to ")):
            ui.say(line.rstrip("\r\n"), err=True)
            kept = (kept + line)[-4000:]
    return kept
