"""A security key of software, from its USB packets inward, so that python-fido2 runs on it as it is.

What is replaced is the kernel's hidraw file alone: `CtapHidDevice`, `Ctap2`, `ClientPin` and `Fido2Client` talk to
`Wire` in 64-byte CTAPHID packets, with keepalives and CANCEL, to a CTAP 2.1 key with Ed25519 (or ES256), PIN protocol 2
and credProtect. A credential's private key follows from the seed and the credential's name, so that a key of the same
seed is the same key in another process; what it counts lies in `state`, if one is given.

    with plugged_in(SoftKey(pin="1234")):          # whatever lists devices finds it
        amends.cli.main.main(["approve", …])
    python tests/soft_ctap.py '{"pin": "1234"}' approve ITEM --usb      # the command line, with such a key
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from fido2 import cbor, hid
from fido2.ctap2.pin import PinProtocolV2
from fido2.hid import CtapHidDevice
from fido2.hid.base import CtapHidConnection, HidDescriptor
from nacl.signing import SigningKey

OK, INVALID_COMMAND, INVALID_PARAMETER, EXCLUDED, UNSUPPORTED_ALGORITHM, DENIED = 0, 1, 2, 0x19, 0x26, 0x27
CANCELLED, NO_CREDENTIALS, TIMEOUT = 0x2D, 0x2E, 0x2F
PIN_INVALID, PIN_BLOCKED, PIN_AUTH_INVALID, PIN_AUTH_BLOCKED, PIN_NOT_SET, PUAT_REQUIRED = range(0x31, 0x37)
UP, UV, AT, ED = 1, 4, 64, 128
TRIES, IN_A_ROW = 8, 3
PATIENCE = 1500  # looks, a fiftieth of a second apart: keys give up after half a minute
AAGUID = bytes.fromhex("9e66c661f1d94b1c8a1f0b5d2e6c7a30")


class Answer(Exception):
    """A command that ends with an error."""

    def __init__(self, status: int) -> None:
        super().__init__(f"0x{status:02x}")
        self.status = status


class SoftKey:
    """What lies behind the plug.

    touch: True (somebody touches it), False (somebody refuses), None (nobody is there); or a function that says so
    each time. lies: `flags` to claim in every signature, whatever happened.
    """

    def __init__(
        self, seed: bytes = b"\x2a" * 32, *, pin: str | None = "1234", touch: Any = True, algs: tuple[int, ...] = (-8,),
        state: str | os.PathLike[str] | None = None, lies: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.seed, self.pin, self.algs, self.lies = seed, pin, algs, dict(lies or {})
        self.touch: Callable[[], bool | None] = touch if callable(touch) else lambda: touch
        self.asked: list[tuple[int, Any]] = []  # every command that arrived
        self.answered: list[int] = []  # with which status each ended
        self._file = Path(state) if state else None
        self._kept = {"count": 0, "tries": TRIES, "made": 0}
        if self._file and self._file.exists():
            self._kept = json.loads(self._file.read_text())
        self._protocol = PinProtocolV2()
        self._agreement = ec.generate_private_key(ec.SECP256R1())
        self.replug()

    @property
    def count(self) -> int:
        return self._kept["count"]

    @property
    def tries(self) -> int:
        """PINs left before it locks itself for good."""
        return self._kept["tries"]

    def replug(self) -> None:
        """Out and in again: its token is another one, and it takes PINs again."""
        self._token, self._row = os.urandom(32), 0

    def command(self, data: bytes, wait: Callable[[], bool]) -> bytes:
        """The answer to one CTAP2 command: its status, then CBOR. wait: tells that a touch is awaited; True cancels."""
        said = cbor.decode(data[1:]) if len(data) > 1 else {}
        self.asked.append((data[0], said))
        answer = self._answer(data[0], said, wait)
        self.answered.append(answer[0])
        return answer

    def _answer(self, command: int, said: Any, wait: Callable[[], bool]) -> bytes:
        try:
            run = {1: self._make, 2: self._get, 4: self._info, 6: self._client_pin, 11: self._selection}[command]
            answer = run(said, wait)
        except KeyError:
            return bytes([INVALID_COMMAND])
        except Answer as refused:
            return bytes([refused.status])
        return bytes([OK]) + (cbor.encode(answer) if answer is not None else b"")

    # -- what it is ---------------------------------------------------------------------------------------------------

    def _info(self, said: Any, wait: Any) -> Any:
        options = {"rk": False, "up": True, "plat": False, "clientPin": self.pin is not None, "pinUvAuthToken": True,
                   "makeCredUvNotRqd": True}  # fmt: skip
        kinds = [{"alg": alg, "type": "public-key"} for alg in self.algs]
        return {1: ["FIDO_2_0", "FIDO_2_1"], 2: ["credProtect"], 3: AAGUID, 4: options, 5: 1200, 6: [2], 7: 8, 8: 128,
                9: ["usb"], 10: kinds}  # fmt: skip

    def _selection(self, said: Any, wait: Callable[[], bool]) -> None:
        self._touched(wait)

    # -- a person -----------------------------------------------------------------------------------------------------

    def _touched(self, wait: Callable[[], bool]) -> None:
        for _ in range(PATIENCE):
            if wait():
                raise Answer(CANCELLED)
            answer = self.touch()
            if answer is not None:
                if not answer:
                    raise Answer(DENIED)
                return
        raise Answer(TIMEOUT)

    def _verified(self, said: Any, param: int, protocol: int) -> bool:
        """Whether the platform proved that it was told the PIN, for this client data."""
        if param not in said:
            return False
        client_data = said[1] if param == 8 else said[2]
        if said.get(protocol) != 2 or not hmac.compare_digest(
            said[param], hmac.digest(self._token, client_data, "sha256")
        ):
            raise Answer(PIN_AUTH_INVALID)
        return True

    def _client_pin(self, said: Any, wait: Any) -> Any:
        steps = {1: self._retries, 2: self._agree, 5: self._token_for, 9: self._token_for}
        if said[2] not in steps:
            raise Answer(INVALID_PARAMETER)
        return steps[said[2]](said)

    def _retries(self, said: Any) -> Any:
        return {3: self.tries, 4: self._row >= IN_A_ROW}

    def _agree(self, said: Any) -> Any:
        numbers = self._agreement.public_key().public_numbers()
        return {1: {1: 2, 3: -25, -1: 1, -2: numbers.x.to_bytes(32, "big"), -3: numbers.y.to_bytes(32, "big")}}

    def _token_for(self, said: Any) -> Any:
        if self.pin is None:
            raise Answer(PIN_NOT_SET)
        if self.tries == 0:
            raise Answer(PIN_BLOCKED)
        if self._row >= IN_A_ROW:
            raise Answer(PIN_AUTH_BLOCKED)
        x, y = (int.from_bytes(said[3][label], "big") for label in (-2, -3))
        theirs = ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
        shared = self._protocol.kdf(self._agreement.exchange(ec.ECDH(), theirs))
        if self._protocol.decrypt(shared, said[6]) != sha256(self.pin.encode()).digest()[:16]:
            self._row += 1
            self._keep(tries=self.tries - 1)
            raise Answer(PIN_BLOCKED if not self.tries else PIN_AUTH_BLOCKED if self._row == IN_A_ROW else PIN_INVALID)
        self._row = 0
        self._keep(tries=TRIES)
        return {2: self._protocol.encrypt(shared, self._token)}

    # -- credentials --------------------------------------------------------------------------------------------------

    def _name(self, rp: str, alg: int, protect: int) -> bytes:
        """A credential's name: what it is, sealed by the seed, so that nothing has to be kept of it."""
        self._keep(made=self._kept["made"] + 1)
        said = bytes([protect, -alg]) + os.urandom(14)
        return said + hmac.digest(self.seed, said + rp.encode(), "sha256")[:16]

    def _mine(self, name: bytes, rp: str) -> bool:
        return len(name) == 32 and hmac.compare_digest(
            name[16:], hmac.digest(self.seed, name[:16] + rp.encode(), "sha256")[:16]
        )

    def _signer(self, name: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
        """The COSE key of a credential, and how it signs."""
        secret = hmac.digest(self.seed, b"key" + name, "sha256")
        if name[1] == 8:
            key = SigningKey(secret)
            return cbor.encode({1: 1, 3: -8, -1: 6, -2: bytes(key.verify_key)}), lambda data: key.sign(data).signature
        es = ec.derive_private_key(int.from_bytes(secret, "big") >> 8 or 1, ec.SECP256R1())
        point = es.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
        cose = cbor.encode({1: 2, 3: -7, -1: 1, -2: point[1:33], -3: point[33:]})
        return cose, lambda data: es.sign(data, ec.ECDSA(SHA256()))

    def _make(self, said: Any, wait: Callable[[], bool]) -> Any:
        alg = next((one["alg"] for one in said[4] if one["alg"] in self.algs), None)
        if alg is None:
            raise Answer(UNSUPPORTED_ALGORITHM)
        verified, rp = self._verified(said, 8, 9), said[2]["id"]
        self._touched(wait)
        if any(self._mine(one["id"], rp) for one in said.get(5, [])):
            raise Answer(EXCLUDED)
        protect = said.get(6, {}).get("credProtect", 0)
        name = self._name(rp, alg, protect or 1)
        cose, sign = self._signer(name)
        extensions = cbor.encode({"credProtect": protect}) if protect else b""
        flags = UP | AT | (UV if verified else 0) | (ED if extensions else 0)
        data = self._data(rp, flags, AAGUID + struct.pack(">H", len(name)) + name + cose + extensions)
        return {1: "packed", 2: data, 3: {"alg": alg, "sig": sign(data + said[1])}}

    def _get(self, said: Any, wait: Callable[[], bool]) -> Any:
        verified, present = self._verified(said, 6, 7), said.get(5, {}).get("up", True)
        names = [one["id"] for one in said.get(3, []) if self._mine(one["id"], said[1])]
        names = [name for name in names if verified or name[0] < 3]  # credProtect 3: none without a PIN
        if present:
            self._touched(wait)
        if not names:
            raise Answer(NO_CREDENTIALS)
        data = self._data(said[1], (UP if present else 0) | (UV if verified else 0))
        _, sign = self._signer(names[0])
        return {1: {"id": names[0], "type": "public-key"}, 2: data, 3: sign(data + said[2])}

    def _data(self, rp: str, flags: int, rest: bytes = b"") -> bytes:
        self._keep(count=self.count + 1)
        flags = self.lies.get("flags", flags)
        return sha256(rp.encode()).digest() + bytes([flags]) + struct.pack(">I", self.count) + rest

    def _keep(self, **changed: int) -> None:
        self._kept |= changed
        if self._file:
            self._file.write_text(json.dumps(self._kept))


# ---- the plug -------------------------------------------------------------------------------------------------------

INIT, CBOR, CANCEL, KEEPALIVE, ERROR = 0x06, 0x10, 0x11, 0x3B, 0x3F
PACKET = 64


class Wire(CtapHidConnection):
    """CTAPHID in packets, as hidraw gives them: one channel, one command at a time."""

    def __init__(self, key: SoftKey) -> None:
        self._key = key
        self._out: queue.Queue[bytes] = queue.Queue()
        self._cancelled = threading.Event()
        self._message, self._wanted, self._command = b"", 0, 0

    def close(self) -> None:
        self._cancelled.set()

    def read_packet(self) -> bytes:
        return self._out.get(timeout=60)

    def write_packet(self, data: bytes) -> None:
        assert len(data) == PACKET
        channel, kind = data[:4], data[4]
        if kind & 0x80:
            self._command, self._wanted = kind & 0x7F, int.from_bytes(data[5:7], "big")
            self._message = data[7:]
        else:
            self._message += data[5:]
        if self._command == CANCEL:
            self._cancelled.set()
        elif len(self._message) >= self._wanted:
            self._answer(channel, self._message[: self._wanted])

    def _answer(self, channel: bytes, message: bytes) -> None:
        if self._command == INIT:  # a channel, version 2, firmware 1.0.0, capabilities CBOR and no U2F
            return self._send(channel, INIT, message[:8] + b"\x00\x00\x00\x01" + bytes([2, 1, 0, 0, 0x04 | 0x08]))
        if self._command != CBOR:
            return self._send(channel, ERROR, b"\x01")
        self._cancelled.clear()
        threading.Thread(target=self._work, args=(channel, message), daemon=True).start()
        return None

    def _work(self, channel: bytes, message: bytes) -> None:
        def wait() -> bool:
            self._send(channel, KEEPALIVE, b"\x02")
            return self._cancelled.wait(0.02)

        self._send(channel, CBOR, self._key.command(message, wait))

    def _send(self, channel: bytes, command: int, payload: bytes) -> None:
        first, rest = payload[: PACKET - 7], payload[PACKET - 7 :]
        self._put(channel + struct.pack(">BH", 0x80 | command, len(payload)) + first)
        for number, at in enumerate(range(0, len(rest), PACKET - 5)):
            self._put(channel + bytes([number]) + rest[at : at + PACKET - 5])

    def _put(self, packet: bytes) -> None:
        self._out.put(packet.ljust(PACKET, b"\0"))


def descriptor(number: int = 0) -> HidDescriptor:
    return HidDescriptor(f"/dev/soft{number}", 0x1209, 0xF1D0, PACKET, PACKET, f"Soft Key {number}", None)


def device(key: SoftKey) -> CtapHidDevice:
    """A device of python-fido2 over this key."""
    return CtapHidDevice(descriptor(), Wire(key))


@contextmanager
def plugged_in(*keys: SoftKey) -> Iterator[None]:
    """These keys are all that this process finds at its USB."""
    listed, opened = hid.list_descriptors, hid.open_connection
    found = {descriptor(number).path: key for number, key in enumerate(keys)}
    hid.list_descriptors = lambda: [descriptor(number) for number in range(len(keys))]
    hid.open_connection = lambda one: Wire(found[one.path])
    try:
        yield
    finally:
        hid.list_descriptors, hid.open_connection = listed, opened


if __name__ == "__main__":
    from amends.cli.main import main

    said = json.loads(sys.argv[1])
    keys = [SoftKey(**{**one, "seed": bytes.fromhex(one["seed"])} if "seed" in one else one)
            for one in (said if isinstance(said, list) else [said])]  # fmt: skip
    with plugged_in(*keys):
        main(sys.argv[2:])
