"""Writes format.json beside it: the bytes of FORMAT.md, made from the page alone and not by the code under test.

Nothing of amends is imported: JSON, SHA-256, base64 and a library for Ed25519 and XChaCha20-Poly1305 are enough. The
result is frozen; it changes only with the page and the format's number. `python3 tests/vectors/make_format.py --check`
says whether it still agrees.
"""

from __future__ import annotations

import base64
import hmac
import json
import sys
from binascii import crc32
from hashlib import sha256
from pathlib import Path
from typing import Any

from nacl.bindings import crypto_aead_xchacha20poly1305_ietf_encrypt as xchacha
from nacl.signing import SigningKey

TARGET = Path(__file__).with_name("format.json")
SEED = bytes(range(32))
HEAD = "seq prev at kind saga n step fence tool sem inv handler key out ref use up".split()
START = 1764460800000000


def b32(data: bytes, length: int) -> str:
    return base64.b32encode(data).decode().lower()[:length]


def salt(name: str) -> str:
    return base64.urlsafe_b64encode(sha256(name.encode()).digest()).decode()[:22]


def packed(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def ordered(fields: dict[str, Any]) -> dict[str, Any]:
    """Keys as the page orders them: common ones, the kind's own sorted, then salt or c."""
    last = [key for key in ("salt", "c") if key in fields]
    own = sorted(key for key in fields if key not in HEAD and key not in last)
    return {key: fields[key] for key in [*(key for key in HEAD if key in fields), *own, *last]}


class Writer:
    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.hashes: list[bytes] = []
        self.counts: dict[str, int] = {}

    def add(self, kind: str, *openings: dict[str, Any], **fields: Any) -> int:
        seq = len(self.hashes)
        fields |= {
            "seq": seq,
            "prev": self.hashes[-1].hex() if seq else "0" * 64,
            "at": START + 1000 * seq,
            "kind": kind,
        }
        if "saga" in fields:
            fields["n"] = self.counts[fields["saga"]] = self.counts.get(fields["saga"], 0) + 1
        lines = [
            packed([salt(f"opening {seq}.{place}"), dict(sorted(body.items()))]) + "\n"
            for place, body in enumerate(openings)
        ]
        if lines:
            fields["c"] = [sha256(line.encode()).hexdigest() for line in lines]
        else:
            fields["salt"] = salt(f"entry {seq}")
        line = packed(ordered(fields)) + "\n"
        self.hashes.append(sha256(b"\0" + line.encode()).digest())
        self.entries.append({"line": line, "openings": lines, "h": self.hashes[-1].hex()})
        return seq


def root(hashes: list[bytes]) -> bytes:
    """RFC 6962 section 2.1, word for word."""
    if len(hashes) < 2:
        return hashes[0] if hashes else sha256(b"").digest()
    k = 1
    while k * 2 < len(hashes):
        k *= 2
    return sha256(b"\1" + root(hashes[:k]) + root(hashes[k:])).digest()


def inclusion(index: int, hashes: list[bytes]) -> list[bytes]:
    """RFC 6962 section 2.1.1."""
    if len(hashes) < 2:
        return []
    k = 1
    while k * 2 < len(hashes):
        k *= 2
    if index < k:
        return [*inclusion(index, hashes[:k]), root(hashes[k:])]
    return [*inclusion(index - k, hashes[k:]), root(hashes[:k])]


def consistency(old: int, hashes: list[bytes], whole: bool = True) -> list[bytes]:
    """RFC 6962 section 2.1.2."""
    if old == len(hashes):
        return [] if whole else [root(hashes)]
    k = 1
    while k * 2 < len(hashes):
        k *= 2
    if old <= k:
        return [*consistency(old, hashes[:k], whole), root(hashes[k:])]
    return [*consistency(old - k, hashes[k:], False), root(hashes[:k])]


def story(log: Writer, public: bytes) -> None:
    """A device opens its log; sagas meet every kind of fact once."""
    one, two, inner = (b32(sha256(name.encode()).digest(), 26) for name in ("one", "two", "inner"))
    driver, other = (b32(sha256(name.encode()).digest(), 26) for name in ("driver", "other driver"))
    key = b32(sha256(b"key").digest(), 32)
    log.add(
        "log.opened", v=1, log=public.hex(), witness="11" * 32, export="22" * 32, noise="33" * 32,
        install=b32(sha256(b"install").digest(), 26),
    )  # fmt: skip
    log.add("log.booted", boot="5b7c3f0e-9d52-4d0c-8a5e-0d3f0a6c1b11", up=[1, 812000])
    log.add("clock.stepped", up=[1, 812345])
    log.add("saga.opened", {"name": "order-4711"}, saga=one, fence=1, driver=driver, on_crash="unwind")
    log.add(
        "step.intended", {"args": {"amount_minor": 4200, "note": "Grüße", "rate": 1.5}, "host": None},
        saga=one, step=1, fence=1, tool="stripe.charge", sem="compensable", inv="declared", handler="stripe.refund",
        key=key, use={"eur": 4200, "usd": -5}, up=[1, 812400], again="keyed", probe=1, settle_ms=2000,
    )  # fmt: skip
    log.add("step.attempted", saga=one, step=1, fence=1, attempt=2)
    log.add(
        "step.done", {"result": {"id": "ch_1"}}, {"approver": "apart"},
        saga=one, step=1, fence=1, inv="both", handler="stripe.refund", again="keyed",
    )  # fmt: skip
    log.add("saga.opened", {"name": "inner"}, saga=inner, fence=1, driver=driver, parent=one)
    log.add("step.intended", {"args": {}}, saga=inner, step=1, fence=1, tool="mail.send", sem="compensable", inv="none")
    log.add("step.failed", {"error": {"type": "OSError"}}, saga=inner, step=1, fence=1)
    log.add("saga.joined", saga=inner, fence=1)
    log.add("step.intended", {"args": {}}, saga=one, step=2, fence=1, tool="erp.book", sem="compensable", inv="derived")
    log.add("step.lost", saga=one, step=2, fence=1, up=[1, 813000])
    log.add("saga.released", saga=one, fence=1)
    log.add("saga.taken", saga=one, fence=2, driver=other, why="death")
    log.add("saga.unwinding", saga=one, fence=2, why="crash")
    log.add("step.probed", saga=one, step=2, fence=2, out="absent")
    log.add("step.landed", {"error": {"type": "Refused"}}, saga=one, step=2, fence=2, out="failed")
    log.add(
        "undo.intended",
        saga=one,
        step=1,
        fence=2,
        handler="stripe.refund",
        key=b32(sha256(b"undo").digest(), 32),
        scope="undo",
    )
    log.add("undo.lost", saga=one, step=1, fence=2)
    log.add(
        "undo.intended",
        saga=one,
        step=1,
        fence=2,
        handler="stripe.refund",
        key=b32(sha256(b"undo").digest(), 32),
        scope="undo",
    )
    log.add("undo.done", {"result": {"status": "refunded"}}, saga=one, step=1, fence=2, out="already")
    log.add("saga.ended", saga=inner, fence=1, out="compensated")
    ended = log.add("saga.ended", saga=one, fence=2, out="compensated")
    log.add(
        "saga.opened",
        {"name": "follow-up"},
        saga=two,
        fence=1,
        driver=driver,
        of=one,
        ref=ended,
        on_failure="continue",
        within_ms=60000,
    )
    log.add(
        "step.carried",
        {"args": {}},
        saga=two,
        step=1,
        fence=1,
        tool="stripe.charge",
        sem="compensable",
        inv="declared",
        handler="stripe.refund",
        key=key,
        out="done",
        of=one,
        ref=4,
        again="idempotent",
    )
    text = canonical(request(two))
    asked = sha256(text.encode()).hexdigest()
    log.add(
        "step.asked", {"args": {"to": "Zoë"}}, {"request": text}, saga=two, step=2, fence=1, tool="wire.send",
        sem="irreversible", key=key, up=[1, 814000], level=3, policy="9f86d081884c7d65", quorum=2, request=asked,
        within_ms=86400000,
    )  # fmt: skip
    log.add("approval.escalated", {"targets": ["boss"]}, up=[1, 814500], level=1, request=asked)
    log.add(
        "vote.cast", {"proof": {"credential": "AQ", "kind": "webauthn", "signature": "AA"}},
        {"by": "Ada", "note": "fine"},
        step=2, out="approve", up=[1, 815000], counter=7, credential="AQ", level=4, of=two, person="60303ae22b998861",
        request=asked,
    )  # fmt: skip
    glass = log.add(
        "vote.cast", {"by": "Bo", "reason": "it cannot wait"}, step=2, out="break_glass", up=[1, 815100], level=1,
        of=two,
        person="fd61a03af4f77d87", request=asked, why="denied",
    )  # fmt: skip
    log.add(
        "review.closed", {"by": "Ada", "reason": "it could not"}, ref=glass, up=[1, 815200], person="60303ae22b998861"
    )
    log.add(
        "step.refused",
        {"reason": "limit"},
        saga=two,
        step=3,
        fence=1,
        tool="stripe.charge",
        sem="compensable",
        why="limit",
    )
    log.add(
        "step.refused", {"reason": "Bo denied wire.send."}, saga=two, step=2, fence=1, tool="wire.send",
        sem="irreversible",
        ref=glass, up=[1, 815300], policy="9f86d081884c7d65", why="denied",
    )  # fmt: skip
    log.add("saga.suspended", saga=two, fence=1, why="arguments")
    log.add("saga.taken", saga=two, fence=2, driver=other, why="undo")
    log.add("saga.unwinding", saga=two, fence=2, why="asked")
    log.add("undo.intended", saga=two, step=1, fence=2, handler="stripe.refund", key=key, scope="undo/late")
    log.add("undo.failed", {"error": {"type": "Gone"}}, saga=two, step=1, fence=2)
    log.add("saga.escalated", saga=two, step=1, fence=2, why="undo_failed")
    log.add("step.accepted", {"by": "Ada", "reason": "booked by hand"}, saga=two, step=1)
    log.add("saga.ended", saga=two, fence=2, out="settled")
    gate(log, asked)


def gate(log: Writer, asked: str) -> None:
    """A saga with limits, names and what is tentative; levers, keys and messages."""
    three, driver = (b32(sha256(name.encode()).digest(), 26) for name in ("three", "driver"))
    key, name = b32(sha256(b"key").digest(), 32), "0123456789abcdef"
    log.add("clock.accepted", {"by": "Ada", "reason": "it was ahead", "wall": "2025-11-30T00:00:00.000Z"},
            up=[1, 816000], by_ms=3600000)  # fmt: skip
    log.add("saga.opened", {"name": "three"}, saga=three, fence=1, driver=driver)
    log.add("limit.set", up=[1, 816100], cap=100000, limit="daily", scale=2, unit="EUR", within_ms=86400000)
    log.add("lock.awaited", saga=three, fence=1, up=[1, 816150], lock=name)
    log.add("lock.taken", saga=three, fence=1, up=[1, 816200], lock=name)
    log.add(
        "step.intended", {"args": {}}, {"votes": [43]}, saga=three, step=1, fence=1, tool="seat.hold",
        sem="compensable",
        inv="declared", handler="seat.free", key=key, use={"daily": 4200, f"fast/{name}": 1}, up=[1, 816300],
        again="keyed", confirm="declared", confirm_again="keyed", confirmer="seat.book", policy="9f86d081884c7d65",
        request=asked, resource="fedcba9876543210", tags="money,seat",
    )  # fmt: skip
    log.add("step.attempted", saga=three, step=1, fence=1, use={f"fast/{name}": 1}, up=[1, 816400], attempt=2)
    log.add("step.done", saga=three, step=1, fence=1)
    log.add("lock.freed", saga=three, fence=1, lock=name)
    log.add("saga.concluding", {"result": 1}, saga=three, fence=1, up=[1, 816500])
    log.add("confirm.intended", saga=three, step=1, fence=1, handler="seat.book", key=key, attempt=1)
    log.add("confirm.lost", {"error": "TimeoutError"}, saga=three, step=1, fence=1, up=[1, 816600], why="TimeoutError")
    log.add("confirm.intended", saga=three, step=1, fence=1, handler="seat.book", key=key, attempt=2)
    log.add(
        "confirm.failed", {"error": "ValueError: no"}, saga=three, step=1, fence=1, up=[1, 816700], why="ValueError"
    )
    log.add("confirm.intended", saga=three, step=1, fence=1, handler="seat.book", key=key, attempt=3)
    log.add("confirm.done", saga=three, step=1, fence=1, out="already")
    log.add("saga.ended", saga=three, fence=1, out="committed")
    lever = log.add("switch.set", {"by": "Ada", "reason": "odd"}, out="halt", up=[1, 816800], target="tool:wire.*",
                    undo=1, within_ms=60000)  # fmt: skip
    log.add("switch.lifted", {"by": "Ada", "reason": "fine"}, ref=lever, up=[1, 816900])
    event = ""
    for kind in "founded added revoked rotated quarantined released recovering vetoed recovered".split():
        statement = canonical({"kind": kind, "nonce": sha256(kind.encode()).hexdigest(), "v": 1})
        prior, event = event, sha256(statement.encode()).hexdigest()
        log.add(f"key.{kind}", {"event": statement, "proofs": []}, up=[1, 817000], event=event,
                **({"prior": prior} if prior else {}))  # fmt: skip
    about = {"step": 2, "ref": 5, "up": [1, 818000], "attempt": 1, "channel": "ops", "item": "abcdefghij", "level": 1}
    log.add("notice.claimed", **about, of=three, within_ms=21000)
    log.add("notice.sent", {"error": "no answer"}, **about, of=three, out="failed")
    log.add("reconcile.begun", up=[1, 819000], within_ms=21600000)
    seen = {"step": 1, "ref": 5, "up": [1, 819100], "of": three, "why": "missing"}
    log.add("effect.observed", {"host": "shop.py (python3)", "note": "no such charge"}, **seen, out="drift")
    log.add("reconcile.done", use={"drift": 1, "examined": 1}, up=[1, 819200])
    log.add("effect.observed", {"by": "Ada", "reason": "paid in cash"}, **seen, out="accepted")
    first, second = (key_id(bytes([n]) * 32) for n in (1, 2))
    log.add("seal.begun", {"by": "Ada"}, up=[1, 820000], seal=first)
    log.add("seal.rotated", {"by": "Ada"}, up=[1, 820100], seal=second, prior=first)
    log.add("seal.forgotten", {"by": "Ada", "reason": "asked to"}, up=[1, 820200], target=three)
    log.add("seal.ended", {"by": "Ada"}, up=[1, 820300], prior=second)

    log.add(
        "redaction.made", {"by": "Ada"}, {"note": "asked to"}, up=[1, 819210], basis="GDPR-17", places=[[4, 0], [6, 1]]
    )
    log.add("erasure.done", up=[1, 819220], upto=69)
    held = log.add("hold.placed", {"by": "Bo", "name": "three", "reason": "case 12"}, up=[1, 819230], target=three)
    log.add("hold.placed", {"by": "Bo", "reason": "all of it"}, up=[1, 819235])
    log.add("hold.lifted", {"by": "Bo", "reason": "closed"}, ref=held, up=[1, 819240])
    log.add("compaction.made", {"by": "Ada"}, up=[1, 819250], cert="ef" * 32, count=7, runs=[[3, 7], [9, 10]],
            use={"committed": 1, "effects": 2, "sagas": 2}, within_ms=7776000000)  # fmt: skip
    log.add("copy.made", {"by": "Ada", "to": "the auditor"}, out="bundle", up=[1, 819300],
            event=sha256(b"manifest").hexdigest(), upto=70, payload="plain")  # fmt: skip


def key_id(key: bytes) -> str:
    """HKDF-SHA-256 of an owner's key: one block is enough for 8 bytes."""
    return hmac.digest(hmac.digest(bytes(32), key, "sha256"), b"amends/seal/id\x01", "sha256")[:8].hex()


# ---- requests and decisions -----------------------------------------------------------------------------------------


def canonical(value: Any) -> str:
    """The one encoding of section 11: sorted keys, no blanks, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def request(saga: str) -> dict[str, Any]:
    """What people are asked about one step."""
    return {
        "args": {"amount": {"$": "decimal", "v": "42.00"}, "rate": {"$": "float", "v": "1.5"}, "to": "Zoë"},
        "attempt": 1,
        "break_glass": True,
        "created": 1764460800000,
        "effect": "irreversible",
        "executor": "amends.local/kzdvvj2umnduyauf35o36k6kw4",
        "expires": 1764547200000,
        "idempotency_key": b32(sha256(b"key").digest(), 32),
        "kind": "approval-request",
        "ledger_id": sha256(b"genesis").hexdigest(),
        "level": "presence",
        "nonce": base64.urlsafe_b64encode(sha256(b"nonce").digest()).decode().rstrip("="),
        "policy": "9f86d081884c7d65",
        "quorum": 2,
        "reasons": ["IRREVERSIBLE"],
        "requester": "agent",
        "roles": ["approver"],
        "saga": saga,
        "saga_name": "follow-up",
        "step": 2,
        "tool": "wire.send",
        "v": 1,
    }


def approval() -> dict[str, Any]:
    """A request, what names it, what SSH and raw keys sign of each decision, and the challenge of WebAuthn keys."""
    text = canonical(request(b32(sha256(b"two").digest(), 26)))
    digest = sha256(text.encode()).hexdigest()
    signed = {
        verdict: b"amends/approval/1\0"
        + canonical({"kind": "approval-decision", "request": digest, "v": 1, "verdict": verdict}).encode()
        for verdict in ("approve", "deny", "break_glass")
    }
    return {
        "request": text,
        "digest": digest,
        "code": "-".join(digest[at : at + 4] for at in range(0, 20, 4)).upper(),
        "signed": {verdict: message.hex() for verdict, message in signed.items()},
        "challenge": {verdict: sha256(message).hexdigest() for verdict, message in signed.items()},
    }


def parts(public: bytes) -> list[dict[str, Any]]:
    """A log with one fact that has 34 openings: its first 32 lie beside its last entry."""
    log, saga = Writer(), b32(sha256(b"parts").digest(), 26)
    log.add("log.opened", v=1, log=public.hex(), witness="11" * 32, export="22" * 32, noise="33" * 32, install="parts")
    log.add("saga.opened", saga=saga, fence=1, driver=b32(sha256(b"driver").digest(), 26))
    openings = [{"at": place} for place in range(34)]
    log.add("step.done", *openings[32:], saga=saga, part=[1, 2])
    log.add("step.done", *openings[:32], saga=saga, step=1, fence=1, tool="file.put", sem="reversible", part=[2, 2])
    return log.entries


def large() -> dict[str, Any]:
    """A value of 300,001 bytes: 150,000 times a character of two bytes cannot be cut at every 65,536."""
    value = packed("x" + "é" * 150_000).encode()
    chunks, start = [], 0
    while start < len(value):
        end = min(start + 65536, len(value))
        while end < len(value) and value[end] & 0xC0 == 0x80:
            end -= 1
        chunks.append(value[start:end])
        start = end
    of = sha256(value).hexdigest()
    bodies = [packed({"at": at, "chunk": chunk.decode(), "of": of}).encode() for at, chunk in enumerate(chunks)]
    return {
        "value": "the string of one x and 150000 times U+00E9",
        "manifest": packed({"$": "manifest", "size": len(value), "chunks": len(chunks), "sha256": of}),
        "sizes": [len(chunk) for chunk in chunks],
        "bodies": [sha256(body).hexdigest() for body in bodies],
    }


def cell() -> dict[str, str]:
    """A compressed cell, put together by hand: raw block, a block of one byte repeated, raw block (RFC 8878)."""
    before, after = b'["' + salt("cell").encode() + b'",{"text":"', b'"}]\n'
    blocks = [(0, len(before), before), (1, 2000, b"a"), (0, len(after), after)]
    size = len(before) + 2000 + len(after)
    frame = bytes.fromhex("28b52ffd") + b"\x60" + (size - 256).to_bytes(2, "little")
    for place, (kind, length, data) in enumerate(blocks):
        frame += (length << 3 | kind << 1 | (place == 2)).to_bytes(3, "little") + data
    seal = bytes.fromhex("502a4d1804000000") + crc32(frame).to_bytes(4, "little")
    return {"plain": (before + b"a" * 2000 + after).decode(), "cell": (frame + seal).hex()}


def sealed() -> dict[str, Any]:
    """A cell of two sealed openings of which the middle one was cut out, and the key that opens it, wrapped."""
    owner, key, origin, saga, seq = bytes([1]) * 32, bytes(range(32)), "amends.local/vector", "saga", 258
    lines = [packed([salt(f"sealed {place}"), {"text": "Grüße" * many}]).encode() + b"\n"
             for place, many in enumerate((1, 2, 300))]  # fmt: skip
    c = [sha256(line).hexdigest() for line in lines]
    frame = bytes.fromhex("28b52ffd") + b"\x60" + (len(lines[2]) - 256).to_bytes(2, "little")
    frame += (len(lines[2]) << 3 | 1).to_bytes(3, "little") + lines[2]
    cell = b"\x01"
    for place, plain in ((0, b"\0" + lines[0]), (2, b"\1" + frame)):
        nonce = sha256(b"nonce %d" % place).digest()[:24]
        bound = b"amends/seal/1\0" + origin.encode() + b"\0" + seq.to_bytes(8, "big") + c[place].encode()
        ciphertext = xchacha(plain, bound, nonce, key)
        cell += bytes([place]) + len(ciphertext).to_bytes(4, "big") + nonce + ciphertext
    names = b"\0".join([b"amends/wrap/1", origin.encode(), saga.encode(), key_id(owner).encode()])
    nonce = sha256(b"nonce of the key").digest()[:24]
    return {"owner": owner.hex(), "seal": key_id(owner), "key": key.hex(), "origin": origin, "saga": saga, "seq": seq,
            "wrapped": (nonce + xchacha(key, names, nonce, owner)).hex(), "c": c,
            "openings": [lines[0].decode(), lines[2].decode()], "cell": cell.hex()}  # fmt: skip


def made() -> dict[str, Any]:
    signer = SigningKey(SEED)
    public = bytes(signer.verify_key)
    origin = "amends.local/" + b32(sha256(public).digest(), 26)
    log = Writer()
    story(log, public)
    told = len(log.hashes)
    while len(log.hashes) < 520:
        log.add("clock.stepped", up=[1, len(log.hashes)])
    sizes = [*range(told + 1), 255, 256, 257, 511, 512, 513, 520]
    head = root(log.hashes[:300])
    body = f"{origin}\n300\n{base64.b64encode(head).decode()}\n"
    id = sha256(origin.encode() + b"\n\x01" + public).digest()[:4]
    signature = base64.b64encode(id + signer.sign(body.encode()).signature).decode()
    return {
        "about": "Vectors of store/FORMAT.md, version 1. Made by make_format.py from the page, without amends.",
        "seed": SEED.hex(),
        "origin": origin,
        "entries": log.entries[:told],
        "then": "entries up to size 520 are clock.stepped with up [1, seq]; at = 1764460800000000 + 1000 seq;"
        " salt = base64url(SHA-256('entry <seq>'))[:22]",
        "roots": {str(size): root(log.hashes[:size]).hex() for size in sizes},
        "runs": [root(log.hashes[start : start + 256]).hex() for start in (0, 256)],
        "inclusion": [
            {"index": index, "size": size, "proof": [hash.hex() for hash in inclusion(index, log.hashes[:size])]}
            for index, size in ((0, 1), (3, 7), (44, 300), (255, 257), (256, 257), (519, 520))
        ],
        "consistency": [
            {"old": old, "new": new, "proof": [hash.hex() for hash in consistency(old, log.hashes[:new])]}
            for old, new in ((1, 2), (6, 7), (37, 300), (256, 257), (256, 512), (300, 520))
        ],
        "approval": approval(),
        "parts": parts(public),
        "large": large(),
        "cell": cell(),
        "sealed": sealed(),
        "checkpoint": {
            "size": 300,
            "vkey": f"{origin}+{id.hex()}+{base64.b64encode(bytes([1]) + public).decode()}",
            "body": body,
            "note": f"{body}\n— {origin} {signature}\n",
        },
    }


def main() -> int:
    text = json.dumps(made(), indent=1, ensure_ascii=True) + "\n"
    if "--check" in sys.argv:
        return int(TARGET.read_text() != text)
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
