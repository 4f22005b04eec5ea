"""An ssh-agent that holds one soft key, so that the real `ssh-keygen -Y sign` asks it as it would ask a security key.

with SoftAgent(folder, SoftSsh(application="ssh:amends"), flags=5) as agent:
    subprocess.run(["ssh-keygen", "-Y", "sign", "-f", agent.public, …], env=agent.env)
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from soft_keys import SoftSsh, _text

FAILURE, IDENTITIES, IDENTITIES_ANSWER, SIGN, SIGN_ANSWER = 5, 11, 12, 13, 14


class SoftAgent:
    """Answers list and sign requests; `asked` counts the latter. refuses: as when a touch is not given; hangs: nobody
    is there to touch it."""

    def __init__(
        self, folder: Path, key: SoftSsh, *, flags: int = 1, refuses: bool = False, hangs: bool = False
    ) -> None:
        self.key, self.flags, self.refuses, self.hangs, self.asked = key, flags, refuses, hangs, 0
        self.public = folder / "soft.pub"
        self.public.write_text(key.line + "\n")
        self._path = folder / "agent"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._path))
        self._server.listen(4)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._ended = threading.Event()

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"SSH_AUTH_SOCK": str(self._path)}

    def __enter__(self) -> SoftAgent:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(5)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with client, client.makefile("rb") as lines, suppress(BrokenPipeError):  # whoever asked was stopped
                while request := _packet(lines):
                    client.sendall(_text(self._answer(request)))

    def _answer(self, request: bytes) -> bytes:
        if request[0] == IDENTITIES:
            return bytes([IDENTITIES_ANSWER]) + (1).to_bytes(4, "big") + _text(self.key.blob) + _text(b"soft")
        if request[0] == SIGN and not self.refuses:
            size = int.from_bytes(request[1:5], "big")
            length = int.from_bytes(request[5 + size : 9 + size], "big")
            if request[5 : 5 + size] == self.key.blob:
                self.asked += 1
                if self.hangs:
                    self._ended.wait()
                answer = self.key.answer(request[9 + size : 9 + size + length], self.flags)
                return bytes([SIGN_ANSWER]) + _text(answer)
        return bytes([FAILURE])


def _packet(lines: BinaryIO) -> bytes:
    head = lines.read(4)
    return lines.read(int.from_bytes(head, "big")) if len(head) == 4 else b""
