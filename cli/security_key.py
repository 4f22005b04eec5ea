"""A USB key from the terminal: put it in, type its PIN, touch it; no browser, and the same proof as from the page.

The key is asked to show a PIN (or a fingerprint) and a touch, always. What can go wrong is said in a sentence: how many
PINs it still takes stands there before one is typed, a wrong one is never tried again by us, and when the time of the
request is over the key stops blinking. Keys made here answer nothing, not even silently, before they are shown a PIN.

The one room that knows python-fido2 (extra `usb`). A program of this machine can claim any address it likes; ours is
the origin without a port, so that a record shows which way a decision came.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from ..runtime.gate.proof import EDDSA, Credential, Unproven, base64url, register, unbase64url, verify
from ..runtime.gate.statement import APPROVE, challenge, decision
from ..store.errors import Refused, TheyErred, YouErred

if TYPE_CHECKING:
    from fido2.client import Fido2Client
    from fido2.hid import CtapHidDevice

T = TypeVar("T")

ORIGIN = "http://amends.localhost"
RP_ID = "amends.localhost"
NAMES = {-7: "ES256", -8: "Ed25519", -35: "ES384", -257: "RS256"}
_UDEV = "Your user needs the right to open it: install the udev rules of your key's maker, and put it in again."


class Talk(NamedTuple):
    """How whoever sits there is spoken to. pin: asked with how many the key still takes; "" gives up."""

    say: Callable[[str], None]
    pin: Callable[[int], str]


class Found(NamedTuple):
    """One finding of the self-test."""

    name: str
    good: bool
    said: str


# ---- what it is for -------------------------------------------------------------------------------------------------


def sign(
    signed: bytes, allowed: Sequence[Credential], talk: Talk, over: threading.Event, rp_id: str = RP_ID
) -> dict[str, str]:
    """The proof (gate/proof.py) of a key among those allowed. over: set when it is too late.

    Raises Refused: other_key, pin_invalid, pin_blocked, pin_auth_blocked, pin_not_set, pin_missing, not_touched,
    touch_denied, expired; TheyErred: no_security_key; YouErred: extra_missing.
    """
    names = [unbase64url(one.id) for one in allowed if one.kind == "webauthn"]
    if not names:
        raise _refused("other_key")
    with _chosen(talk, over) as device:
        return _assertion(_client(device, talk), signed, names, rp_id, over)


def make(
    asked: bytes, person: str, talk: Talk, over: threading.Event, *, algs: Sequence[int] = (EDDSA,),
    known: Sequence[Credential] = (), rp_id: str = RP_ID,
) -> dict[str, str]:  # fmt: skip
    """The answer for `register` (gate/proof.py) of a key that makes a credential for this person; asked: 32 random
    bytes. Raises as `sign`, and Refused: alg_not_supported, credential_known."""
    with _chosen(talk, over) as device:
        _check_algorithms(device, algs)
        return _credential(_client(device, talk), asked, person, algs, known, rp_id, over)


# ---- which key ------------------------------------------------------------------------------------------------------


def _fido2() -> Any:
    try:
        import fido2.client
        import fido2.ctap2
        import fido2.hid
    except ImportError:
        raise YouErred(
            "A USB key needs python-fido2, which is not installed.",
            next="Run `pip install 'amends[usb]'`; `amends ui` takes the key in a browser instead.",
            code="extra_missing",
        ) from None
    return fido2


@contextmanager
def _chosen(talk: Talk, over: threading.Event) -> Iterator[CtapHidDevice]:
    """The key that is plugged in; of several, the one that is touched."""
    _fido2()
    found = _devices()
    try:
        yield found[0] if len(found) == 1 else _touched(found, talk, over)
    finally:
        for device in found:
            device.close()


def _devices() -> list[CtapHidDevice]:
    try:
        found = list(_fido2().hid.CtapHidDevice.list_devices())
    except OSError as error:
        raise TheyErred(f"A security key cannot be opened: {error}.", next=_UDEV, code="no_security_key") from None
    if not found:
        locked = any(not os.access(path, os.R_OK | os.W_OK) for path in Path("/dev").glob("hidraw*"))
        raise TheyErred(
            "No security key is plugged in." if not locked else "No security key can be opened.",
            next=_UDEV if locked else "Put it in and run this again; `--ssh KEY` and `--export FILE` need none here.",
            code="no_security_key",
        )
    return found


def _touched(found: Sequence[CtapHidDevice], talk: Talk, over: threading.Event) -> CtapHidDevice:
    """Of several keys the one that somebody touches first; the others stop blinking."""
    talk.say(f"{len(found)} keys are plugged in: touch the one to use.")
    chosen: list[CtapHidDevice] = []
    settled = threading.Event()
    trouble: list[Exception] = []

    def ask(device: CtapHidDevice) -> None:
        try:
            _client(device, talk).selection(settled)
        except Exception as error:
            trouble.append(error)
            return
        if not settled.is_set():
            chosen.append(device)
            settled.set()

    asking = [threading.Thread(target=ask, args=(device,), daemon=True) for device in found]
    for thread in asking:
        thread.start()
    while any(thread.is_alive() for thread in asking) and not settled.wait(0.05):
        if over.is_set():
            settled.set()
    for thread in asking:
        thread.join()
    if not chosen:
        raise _refused("expired" if over.is_set() else "not_touched") from next(iter(trouble), None)
    return chosen[0]


def _check_algorithms(device: CtapHidDevice, algs: Sequence[int]) -> None:
    """Said before a touch is asked for. A key that lists none can do ES256 and no more."""
    offered = [one["alg"] for one in _fido2().ctap2.Ctap2(device).info.algorithms] or [-7]
    if not set(offered) & set(algs):
        said = ", ".join(NAMES.get(alg, f"COSE {alg}") for alg in offered)
        raise Refused(
            f"This key cannot do {' or '.join(NAMES[alg] for alg in algs)}; it offers {said}.",
            next="Use another one (YubiKey 5.2 or newer, Solo 2, Nitrokey 3 …), or allow ES256, extra `passkeys`.",
            code="alg_not_supported",
        )


# ---- one ceremony ---------------------------------------------------------------------------------------------------


def _client(device: CtapHidDevice, talk: Talk) -> Fido2Client:
    from fido2.client import DefaultClientDataCollector, Fido2Client, UserInteraction
    from fido2.ctap2.extensions import CredProtectExtension

    class Person(UserInteraction):
        def prompt_up(self) -> None:
            talk.say("Touch your key now.")

        def request_pin(self, permissions: Any, rp_id: str | None) -> str | None:
            return talk.pin(_tries(device)) or None

        def request_uv(self, permissions: Any, rp_id: str | None) -> bool:
            talk.say("Use your key's own fingerprint reader or keypad now.")
            return True

    return Fido2Client(
        device, DefaultClientDataCollector(ORIGIN), user_interaction=Person(), extensions=[CredProtectExtension()]
    )


def _tries(device: CtapHidDevice) -> int:
    """How many PINs the key still takes. Raises Refused where it takes none."""
    from fido2.ctap2.base import Ctap2
    from fido2.ctap2.pin import ClientPin

    left, replug = ClientPin(Ctap2(device)).get_pin_retries()
    if not left or replug:
        raise _refused("pin_auth_blocked" if left else "pin_blocked")
    return left


def _assertion(
    client: Fido2Client, signed: bytes, names: Sequence[bytes], rp_id: str, over: threading.Event
) -> dict[str, str]:
    from fido2.webauthn import PublicKeyCredentialDescriptor as Descriptor
    from fido2.webauthn import PublicKeyCredentialRequestOptions as Options
    from fido2.webauthn import PublicKeyCredentialType as Type
    from fido2.webauthn import UserVerificationRequirement as Verification

    allowed = [Descriptor(type=Type.PUBLIC_KEY, id=name) for name in names]
    options = Options(
        challenge=challenge(signed), rp_id=rp_id, allow_credentials=allowed, user_verification=Verification.REQUIRED
    )
    answer = _told(over, lambda: client.get_assertion(options, event=over).get_response(0))
    return {
        "kind": "webauthn",
        "credential": base64url(answer.raw_id),
        "client_data": base64url(bytes(answer.response.client_data)),
        "authenticator_data": base64url(bytes(answer.response.authenticator_data)),
        "signature": base64url(answer.response.signature),
    }


def _credential(
    client: Fido2Client, asked: bytes, person: str, algs: Sequence[int], known: Sequence[Credential], rp_id: str,
    over: threading.Event,
) -> dict[str, str]:  # fmt: skip
    from fido2.webauthn import AuthenticatorSelectionCriteria, ResidentKeyRequirement, UserVerificationRequirement
    from fido2.webauthn import PublicKeyCredentialCreationOptions as Options
    from fido2.webauthn import PublicKeyCredentialDescriptor as Descriptor
    from fido2.webauthn import PublicKeyCredentialParameters as Parameters
    from fido2.webauthn import PublicKeyCredentialRpEntity as Site
    from fido2.webauthn import PublicKeyCredentialType as Type
    from fido2.webauthn import PublicKeyCredentialUserEntity as User

    protects = "credProtect" in client.info.extensions
    options = Options(
        rp=Site(id=rp_id, name="amends"),
        user=User(id=person.encode()[:64], name=person, display_name=person),
        challenge=asked,
        pub_key_cred_params=[Parameters(type=Type.PUBLIC_KEY, alg=alg) for alg in algs],
        exclude_credentials=[
            Descriptor(type=Type.PUBLIC_KEY, id=unbase64url(one.id)) for one in known if one.kind == "webauthn"
        ],
        authenticator_selection=AuthenticatorSelectionCriteria(
            resident_key=ResidentKeyRequirement.DISCOURAGED, user_verification=UserVerificationRequirement.REQUIRED
        ),
        extensions={
            "credentialProtectionPolicy": "userVerificationRequired",
            "enforceCredentialProtectionPolicy": True,
        }
        if protects
        else None,
    )
    answer = _told(over, lambda: client.make_credential(options, event=over)).response
    return {
        "client_data": base64url(bytes(answer.client_data)),
        "authenticator_data": base64url(bytes(answer.attestation_object.auth_data)),
    }


# ---- what went wrong ------------------------------------------------------------------------------------------------

_AGAIN = "Run this again."
_SAID = {
    "other_key": ("This key is none of those that may decide here.", "`amends keys list` shows them."),
    "credential_known": ("This key is enrolled already.", "`amends keys list` shows it."),
    "pin_invalid": ("That was not its PIN.", "Run this again; it says how many it still takes."),
    "pin_blocked": (
        "The key has locked itself: too many wrong PINs.",
        "Only a reset opens it, which forgets its keys: revoke it with another one, `amends keys revoke`.",
    ),
    "pin_auth_blocked": ("The key takes no PIN until it is put in anew.", "Take it out, put it in, run this again."),
    "pin_not_set": (
        "The key has no PIN, and without one whoever holds it is you.",
        "Set one with its maker's program, or `fido2-token -S`.",
    ),
    "pin_missing": ("No PIN was typed, so nothing was signed.", _AGAIN),
    "not_touched": ("Nobody touched the key, so nothing was signed.", _AGAIN),
    "touch_denied": ("The key was told no, so nothing was signed.", _AGAIN),
    "expired": ("The time of this request is over: nothing was signed and nothing was sent.", "Run `amends inbox`."),
    "alg_not_supported": ("This key can do none of the algorithms that are allowed here.", "Use another key."),
    "key_too_old": ("This key knows no PIN (U2F only).", "Use a FIDO2 key."),
    "key_failed": ("The key answered with an error.", "Take it out, put it in, run this again."),
}
_BY_NAME = {
    "NO_CREDENTIALS": "other_key",
    "CREDENTIAL_EXCLUDED": "credential_known",
    "PIN_INVALID": "pin_invalid",
    "PIN_BLOCKED": "pin_blocked",
    "PIN_AUTH_BLOCKED": "pin_auth_blocked",
    "UV_BLOCKED": "pin_auth_blocked",
    "UV_INVALID": "pin_invalid",
    "PIN_NOT_SET": "pin_not_set",
    "OPERATION_DENIED": "touch_denied",
    "KEEPALIVE_CANCEL": "not_touched",
    "ACTION_TIMEOUT": "not_touched",
    "USER_ACTION_TIMEOUT": "not_touched",
    "UNSUPPORTED_ALGORITHM": "alg_not_supported",
    "UNSUPPORTED_OPTION": "key_too_old",
}
"""How the key names it -> our code"""


def _refused(code: str, detail: str = "") -> Refused:
    said, next = _SAID[code]
    return Refused(f"{said[:-1]} ({detail})." if detail else said, next=next, code=code)


def _told(over: threading.Event, run: Callable[[], T]) -> T:
    """What a ceremony gave; what became of it otherwise, in words."""
    from fido2.client import ClientError
    from fido2.ctap import CtapError

    try:
        return run()
    except (ClientError, CtapError) as error:
        _say_why(error, over)
    except OSError as error:
        raise TheyErred(f"The key was taken out, or failed: {error}.", next=_AGAIN, code="no_security_key") from None


def _say_why(error: Any, over: threading.Event) -> NoReturn:
    """Raise what the key or the client said, in words."""
    from fido2.client import ClientError, PinRequiredError
    from fido2.ctap import CtapError

    cause = error if isinstance(error, CtapError) else error.cause
    name = cause.code.name if isinstance(cause, CtapError) else ""
    code = _BY_NAME.get(name, "key_failed")
    if isinstance(error, PinRequiredError):
        code = "pin_missing"
    elif isinstance(error, ClientError) and not name:
        code = {
            ClientError.ERR.CONFIGURATION_UNSUPPORTED: "pin_not_set",
            ClientError.ERR.TIMEOUT: "not_touched",
            ClientError.ERR.DEVICE_INELIGIBLE: "other_key",
        }.get(error.code, "key_failed")
    if code == "not_touched" and over.is_set():
        code = "expired"
    raise _refused(code, name if code == "key_failed" else "") from None


# ---- the self-test --------------------------------------------------------------------------------------------------


def selftest(talk: Talk) -> Iterator[Found]:
    """Whether this key would do: what it can, that a touch is asked for, and that what it signs without one is refused.

    The credential it makes is kept nowhere, on the key neither. One PIN, two touches.
    """
    over, talk = threading.Event(), _once(talk)
    with _chosen(talk, over) as device:
        info = _fido2().ctap2.Ctap2(device).info
        algs = [one["alg"] for one in info.algorithms]
        yield Found("key", True, f"{device.product_name or 'unnamed'}, {', '.join(info.versions)}")
        said = ", ".join(NAMES.get(alg, f"COSE {alg}") for alg in algs) or "not said"
        yield Found("algorithms", EDDSA in algs, said)
        pin = bool(info.options.get("clientPin") or info.options.get("uv"))
        yield Found("PIN", pin, "set" if pin else "not set: anybody who holds it could use it")
        protects = "credProtect" in info.extensions
        yield Found("credProtect", protects, "it answers nothing before it is shown a PIN" if protects else "not there")
        if EDDSA in algs and pin:
            yield from _tried(device, talk, over)


def _once(talk: Talk) -> Talk:
    """Asks for the PIN once. A wrong one ends the test, so that it is not tried twice."""
    typed: list[str] = []

    def pin(tries: int) -> str:
        if not typed:
            typed.append(talk.pin(tries))
        return typed[0]

    return talk._replace(pin=pin)


def _tried(device: CtapHidDevice, talk: Talk, over: threading.Event) -> Iterator[Found]:
    nonce = os.urandom(32)
    client = _client(device, talk)
    made = register(
        _credential(client, nonce, "self-test", (EDDSA,), (), RP_ID, over),
        challenge=nonce, origins={ORIGIN}, rp_id=RP_ID,
    )  # fmt: skip
    yield Found("enrol", True, "it made a key, after a PIN and a touch")
    signed = decision(os.urandom(32).hex(), APPROVE)
    proof = _assertion(client, signed, [unbase64url(made.id)], RP_ID, over)
    shown = verify(made, proof, signed, origins={ORIGIN}, rp_id=RP_ID, counter=made.counter, verification=True)
    yield Found("sign", True, f"its signature holds, counter {shown.counter}")
    yield _silent(device, made, signed, talk)


def _silent(device: CtapHidDevice, made: Credential, signed: bytes, talk: Talk) -> Found:
    """What a program of this machine could get from the key once the PIN is known, without anybody touching it."""
    from fido2.ctap import CtapError
    from fido2.ctap2.base import Ctap2
    from fido2.ctap2.pin import ClientPin
    from fido2.webauthn import CollectedClientData

    ctap = Ctap2(device)
    client = CollectedClientData.create(CollectedClientData.TYPE.GET, challenge(signed), ORIGIN)
    names: list[Mapping[str, Any]] = [{"type": "public-key", "id": unbase64url(made.id)}]
    pins = ClientPin(ctap)
    try:
        ctap.get_assertion(RP_ID, client.hash, names, options={"up": False})
        without = "it signs silently even before a PIN, "
    except CtapError:
        without = "silent and without a PIN it signs nothing, "
    try:
        token = pins.get_pin_token(talk.pin(_tries(device)), ClientPin.PERMISSION.GET_ASSERTION, RP_ID)
        param = pins.protocol.authenticate(token, client.hash)
        answer = ctap.get_assertion(
            RP_ID, client.hash, names, options={"up": False}, pin_uv_param=param, pin_uv_protocol=pins.protocol.VERSION
        )
    except CtapError as error:
        return Found("silent", True, f"{without}nor with one ({error.code.name})")
    proof = {
        "kind": "webauthn", "credential": made.id, "client_data": base64url(bytes(client)),
        "authenticator_data": base64url(bytes(answer.auth_data)), "signature": base64url(answer.signature),
    }  # fmt: skip
    try:
        verify(made, proof, signed, origins={ORIGIN}, rp_id=RP_ID)
    except Unproven as refusal:
        return Found("silent", refusal.code == "user_not_present", f"{without}and what it does sign is refused here")
    return Found("silent", False, "a signature that nobody touched it for was taken for one")
