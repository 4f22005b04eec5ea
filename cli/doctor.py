"""`doctor` asks whether the device could come to harm, or do none at all (`verify` asks about the log).

A check is one function and one line in the table: it answers with findings, each `ok`, `warn` or `bad`, a sentence, and
what to do. Doctor changes nothing but one scratch file of its own, which it removes; the database is never opened
behind SQLite's back. `--hosts` starts every handler host; without it, only the Python hosts of handlers.toml are asked,
and only where a compensation is pending whose name nothing else explains.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from ..runtime.channels import Message, send, unready
from ..runtime.config_file import load as read_config
from ..runtime.due import unwinding_order
from ..runtime.gate import clock
from ..runtime.gate.policy_file import Policy
from ..runtime.hosts import Hosts
from ..runtime.inverse import read
from ..runtime.openings import blob_at, raw_fields, when, whole
from ..runtime.values import looks_like_secret
from ..store.anchor import read_all
from ..store.errors import AmendsError, YouErred
from ..store.home import Home, refusal
from ..store.keys import Identity
from ..store.sealing import left
from ..store.sqlite import SqliteLog, engine_version
from . import ui
from .device import Looking, existing, home, steering
from .device import hosts as hosts_of
from .log_health import grows, heads, readers
from .redact import in_the_way
from .said import Said
from .service_units import Daemon, unit

SCANNED = 20_000
"""How many of the newest records are looked through for secrets."""
LONGEST = 64 << 10
"""Bytes of a value that is looked through for secrets; a longer one is a document, and takes minutes."""
LOW_SPACE = 100 << 20
DAY_US = 86_400_000_000
SLOW_DISK_S = 0.05
QUICK_DISK_S = 0.00003


# ---- doctor ---------------------------------------------------------------------------------------------------------


class Patient:
    """What the checks look at. kit is None where the log cannot be read; `trouble` says why."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.kit: Looking | None = None
        self.trouble: AmendsError | None = None
        self.warned: list[str] = []
        try:
            self.kit = Looking(home, self.warned.append)
        except AmendsError as error:
            self.trouble = error


@click.command(cls=ui.Verb, name="doctor")
@click.option("--hosts", "with_hosts", is_flag=True, help="Start every handler host; say what it lacks.")
@click.option("--notify", "with_channels", is_flag=True, help="Send a trial message through every channel.")
@click.option("--paths", is_flag=True, help="Print where every file of amends is, and nothing else.")
@click.option("--accept-clock", is_flag=True, help="Say that the clock is right, though it stands behind the log.")
@click.option("--by", metavar="NAME", help="With --accept-clock: who says so.")
@click.option("--reason", metavar="TEXT", help="With --accept-clock: why.")
def doctor(
    with_hosts: bool, with_channels: bool, paths: bool, accept_clock: bool, by: str | None, reason: str | None
) -> int:
    """Look for what could go wrong on this device. Exit 1 if something needs you."""
    if paths:
        return _paths(home())
    if accept_clock:
        return _accept_clock(by or "", reason or "")
    if by or reason:
        raise YouErred("--by and --reason go with --accept-clock.", next="Leave them out, or accept the clock.")
    patient = Patient(existing())
    checks = dict(CHECKS) | ({"hosts": _hosts} if with_hosts else {})
    checks |= {"notify": _try_channels} if with_channels else {}
    try:
        found = [(name, said) for name, check in checks.items() for said in check(patient)]
    finally:
        if patient.kit is not None:
            patient.kit.close()
    bad = any(said.level == "bad" for _, said in found)
    if ui.session().as_json:
        listed = [{"check": name, "level": s.level, "text": s.text, "next": s.next} for name, s in found]
        ui.emit({"ok": not bad, "checks": listed})
        return int(bad)
    for name, said in found:
        ui.say(ui.word(said.level), " " * (6 - len(said.level)), ui.Word(f"{name:<9}", "dim"), said.text)
        if said.next:
            ui.say(" " * 15, said.next)
    return int(bad)


def _paths(home: Home) -> int:
    """Where every file is, there or not, so that whoever removes amends finds them all."""
    where = home.paths()
    if home.install.exists():
        where["anchor outside"] = home.anchors / home.load_install().install
    frozen = getattr(sys, "frozen", False)
    where["program"] = Path(sys.executable).resolve() if frozen else Path(__file__).resolve().parent.parent
    service = _service(home)
    if service is not None:
        where["service"] = service
    if ui.session().as_json:
        ui.emit({name: {"path": str(path), "exists": path.exists()} for name, path in where.items()})
        return 0
    for name, path in where.items():
        ui.say(f"{name:<15} ", str(path), "" if path.exists() else ui.Word("  (not there)", "dim"))
    return 0


def _accept_clock(by: str, reason: str) -> int:
    """Let irreversible steps start again after the clock was set back."""
    with steering() as kit:
        said = clock.accept_clock(kit, by=by, reason=reason)
    if ui.session().as_json:
        ui.emit(said._asdict() | {"by": by})
        return 0
    ui.say(f"{by} accepted the clock at {said.wall}, {said.behind_s} s behind the log. Record {said.record}.")
    return 0


def _service(home: Home) -> Path | None:
    """The file that `service install` writes for this platform's supervisor."""
    try:
        return unit(Daemon(Path(sys.executable), home.path)).path
    except AmendsError:
        return None


# ---- the checks -----------------------------------------------------------------------------------------------------


def _place(patient: Patient) -> Iterator[Said]:
    home = patient.home
    mode = stat.S_IMODE(home.path.stat().st_mode)
    if os.name != "nt" and mode & 0o077:
        yield Said("bad", f"{home.path} is open to other users (mode {mode:o}).", f"chmod 700 {home.path}")
    else:
        yield Said("ok", f"{home.path}, mode {mode:o}")
    type = home.mount().type
    try:
        home.check_place()
    except AmendsError as error:
        yield Said("bad", error.message, error.next)
        return
    said = list(home.warnings)
    home.warnings.clear()
    yield Said("warn" if said else "ok", "; ".join(said) or f"file system {type or 'unknown'}")
    if sys.platform != "linux":
        yield Said("warn", f"amends has only been tested on Linux, and this is {sys.platform}.")


def _disk(patient: Patient) -> Iterator[Said]:
    """How long the disk takes to say that something is on it. One that is quicker than any disk does not wait."""
    try:
        took = _flushed(patient.home.path)
    except OSError as error:
        spoken = refusal(patient.home.path, error)
        yield Said("bad", *((spoken.message, spoken.next) if spoken else (f"{error}.",)))
        return
    text = f"a flush takes {took * 1000:.2f} ms (fdatasync, median of 9)"
    if patient.home.volatile:
        yield Said("warn", f"{text}; the home is in memory, so nothing survives a reboot.")
    elif took < QUICK_DISK_S:
        yield Said("warn", f"{text}: no disk is so quick. It may lose what it has acknowledged at a power cut.")
    elif took > SLOW_DISK_S:
        yield Said("warn", f"{text}; each durable step waits for two of them.", 'barriers="merged" saves one of them.')
    else:
        yield Said("ok", text)
    free = shutil.disk_usage(patient.home.path).free
    if free < LOW_SPACE:
        yield Said("bad", f"{free >> 20} MB are free.", "Make room: without it no new effect may start.")
    else:
        yield Said("ok", f"{free >> 20} MB free")
    if not patient.home.reserve.exists():
        yield Said("warn", "The reserve for unwinding on a full disk is not there yet.",
                   "A process that has the log open for some seconds makes it, as the daemon does.")  # fmt: skip


def _flushed(folder: Path) -> float:
    """Seconds that a flush takes, the median of nine. Leaves nothing behind."""
    fd, name = tempfile.mkstemp(prefix=".doctor-", dir=folder)
    try:
        return sorted(_sync_time(fd) for _ in range(9))[4]
    finally:
        os.close(fd)
        os.unlink(name)


def _sync_time(fd: int) -> float:
    os.pwrite(fd, os.urandom(4096), 0)
    began = time.perf_counter()
    getattr(os, "fdatasync", os.fsync)(fd)
    return time.perf_counter() - began


def _clock(patient: Patient) -> Iterator[Said]:
    if patient.kit is None:
        return
    now, records = patient.kit.log.clock.wall_us(), patient.kit.log.size
    newest = patient.kit.log.record(records - 1).entry.at if records else 0
    if now < 1_600_000_000_000_000:
        yield Said("warn", "The clock says a time before 2020: times in the log are what it says.", "Set the clock.")
    elif newest > now + 2_000_000:
        ahead = f"The newest record is {(newest - now) // 1_000_000} s ahead of the clock, which was set back."
        stopped = clock.behind_us(patient.kit.engine.state.clock, patient.kit.log.now()) > clock.SLACK_US
        more = " Nothing irreversible starts." if stopped else ""
        next = "If it is right: amends doctor --accept-clock --by NAME --reason TEXT" if stopped else "Check the clock."
        yield Said("bad" if stopped else "warn", ahead + more, next)
    else:
        yield Said("ok", "the clock goes on from the newest record")


def _keys(patient: Patient) -> Iterator[Said]:
    home = patient.home
    try:
        identity = Identity.load(home, patient.warned.append)
    except AmendsError as error:
        yield Said("bad", error.message, error.next)
        return
    yield Said("ok", f"keys of {identity.origin}, install {identity.install}")
    anchors, troubles = read_all(home, identity)
    for text in troubles:
        yield Said("warn", text)
    there = {anchor.path for anchor in anchors}
    for path in (home.anchor, home.anchors / identity.install):
        if path not in there:
            text = f"There is no anchor at {path}: restoring an older copy may go unnoticed."
            yield Said("warn", text, "It is written at the next commit.")
    if there:
        yield Said("ok", f"anchored at {max(anchor.size for anchor in anchors)} records, in {len(there)} places")


def _log(patient: Patient) -> Iterator[Said]:
    if patient.trouble is not None:
        yield Said("bad", patient.trouble.message, patient.trouble.next)
    for text in dict.fromkeys(patient.warned):
        yield Said("bad", text)
    if patient.kit is not None:
        yield Said("ok", f"{patient.kit.log.size} records, SQLite {engine_version()}")


def _erasing(patient: Patient) -> Iterator[Said]:
    """What was redacted, compacted or forgotten, and may still be found in the file."""
    kit = patient.kit
    if kit is None or not kit.log.keeping.unfinished:
        return
    erasure = kit.log.erasure()
    pins = {"pins": [pin._asdict() for pin in erasure.pins], "pins_told": erasure.told}
    since = when(kit.log.record(kit.log.keeping.erasing - 1).entry.at)
    next = "It is finished by itself once they are gone, by the daemon or whoever writes next."
    yield Said("warn", f"erasing since {since}: {in_the_way(pins)}.", next)


def _sagas(patient: Patient) -> Iterator[Said]:
    """What nobody drives, what needs a person, and every pending compensation that no host can run."""
    kit = patient.kit
    if kit is None:
        return
    status = kit.status()
    if status["dead"]:
        waits = ui.count(len(status["dead"]), "saga of a dead agent waits", "sagas of dead agents wait")
        yield Said("bad", f"{waits} to be undone.", "amends recoverd --once")
    if status["waiting"]:
        yield Said("bad", f"{ui.count(status['waiting'], 'thing needs', 'things need')} a person.", "amends inbox")
    if not status["dead"] and not status["waiting"]:
        yield Said("ok", f"{ui.count(status['open'], 'saga')} open, none dead, nothing needs a person")


def _handlers(patient: Patient) -> Iterator[Said]:
    kit = patient.kit
    if kit is None:
        return
    try:
        hosts = hosts_of(patient.home)
    except AmendsError as error:
        yield Said("bad", error.message, error.next)
        return
    pending, homeless, sealed = 0, False, 0
    try:
        for saga, step in unwinding_order(list(kit.engine.state.sagas.values())):
            recorded = read(blob_at(kit.log, step.inverse_seq)) if step.inverse_seq else None
            if recorded is None or step.inv == "human":
                sealed += bool(step.inverse_seq) and bool(kit.log.record(step.inverse_seq).withheld)
                continue
            pending += 1
            where = f"step {step.number} {step.tool} of {saga.id[:8]}"
            if not recorded.handler:
                homeless = True
                why = recorded.unreachable or "it lives only in the process that made it"
                text = f"{where}: its compensation cannot be recovered: {why}."
                yield Said("warn", text, "Name a handler: @compensator(NAME).")
            elif why := _unreached(hosts, recorded.handler, recorded.host):
                homeless = True
                text = f"{where}: no host for {recorded.handler}: {why}"
                yield Said("bad", text, f"Name one in {patient.home.handlers}.")
    finally:
        hosts.close()
    if sealed:
        yield Said(
            "warn", f"{ui.count(sealed, 'pending compensation')} under seal: without the key no host is looked for."
        )
    elif not homeless:
        yield Said("ok", f"{ui.count(pending, 'pending compensation')}, each with a host")


def _unreached(hosts: Hosts, handler: str, recorded: Any) -> str:
    """Why no host has the handler, without starting one: what is configured by name, else the recorded file."""
    if handler in hosts.programs or hosts.pythons:
        return "" if handler in hosts.programs else _unknown_in(hosts, handler, recorded)
    if not recorded:
        return "none was recorded and handlers.toml names none"
    paths = [str(recorded.get(name)) for name in ("interpreter", "file")]
    missing = [path for path in paths if not os.path.exists(path)]
    return f"{', '.join(missing)} is not there any more" if missing else ""


def _unknown_in(hosts: Hosts, handler: str, recorded: Any) -> str:
    found, known = hosts.find(handler, recorded)
    return "" if found is not None else known.why


def _daemon(patient: Patient) -> Iterator[Said]:
    path = _service(patient.home)
    if path is not None and path.exists():
        yield Said("ok", f"the recovery daemon is installed ({path})")
    else:
        yield Said("warn", "No service is installed: what a dead agent left waits until somebody recovers it.",
                   "amends service install, or run agents under `amends run -- CMD`.")  # fmt: skip


def _secrets(patient: Patient) -> Iterator[Said]:
    """Values in the newest records that look like a token; where, never what."""
    kit = patient.kit
    if kit is None:
        return
    seen: dict[str, int] = {}
    long = sealed = 0
    for record in whole(kit.log.records(max(0, kit.log.size - SCANNED))):
        sealed += bool(record.withheld)
        for name, raw in raw_fields(record.blob).items() if record.blob else ():
            if len(raw) > LONGEST:
                long += 1
                continue
            for path in _suspicious(name, msgspec.json.decode(raw)):
                seen.setdefault(f"{record.entry.tool or record.entry.kind}: {path}", record.entry.seq)
    for place, seq in list(seen.items())[:10]:
        yield Said("bad", f"{place} (record {seq}) holds what looks like a secret, in plain text.",
                   'Mark it: Secret[str], or @tool(secret=("NAME",)); then change the secret.')  # fmt: skip
    if long:
        said = ui.count(long, "value is", "values are")
        yield Said("warn", f"{said} longer than {LONGEST >> 10} KiB, and not looked through for secrets.")
    if sealed:
        yield Said(
            "warn", f"{ui.count(sealed, 'record is', 'records are')} under seal, and not looked through for secrets."
        )
    elif not seen:
        yield Said("ok", f"nothing in the newest {min(SCANNED, kit.log.size)} records looks like a secret")


def _suspicious(path: str, value: Any) -> Iterator[str]:
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, str):
        if looks_like_secret(value):
            yield path
    elif isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, item in inner:
        yield from _suspicious(f"{path}.{key}", item)


def _seal(patient: Patient) -> Iterator[Said]:
    """Whether arguments lie in plain text, and whether whoever starts here finds the key."""
    kit = patient.kit
    if kit is None or not isinstance(kit.log, SqliteLog):
        return
    seal, log = kit.log.keeping.seal, kit.log
    if (count := left(log)) and seal:
        yield Said("bad", f"{ui.count(count, 'record')} older than the seal still in plain text.",
                   "Whoever has the log open for writing goes on by itself, as the daemon does.")  # fmt: skip
    elif count:
        yield Said("warn", f"{ui.count(count, 'record')} still under the seal that ended.")
    if not seal:
        yield Said("ok", "what records hold lies in plain text, mode 0600; `amends seal` encrypts it")
    elif log.vault.has(seal):
        yield Said("ok", f"sealed under key {seal}, which is at hand")
    else:
        refusal = log.vault.refusal(seal, log.keeping)
        yield Said("bad", refusal.message.removesuffix(" Nothing was written."), refusal.next)


def _growth(patient: Patient) -> Iterator[Said]:
    if patient.kit is not None and patient.kit.log.size and isinstance(patient.kit.log, SqliteLog):
        yield from grows(patient.home, patient.kit.log)


def _head(patient: Patient) -> Iterator[Said]:
    if patient.kit is not None and patient.kit.log.size and isinstance(patient.kit.log, SqliteLog):
        yield from heads(patient.kit.log)
        yield from readers(patient.kit.log)


def _told(patient: Patient) -> Iterator[Said]:
    """Who is told of what needs a person, and what stands in the way."""
    try:
        channels = read_config(patient.home.config).channels
    except AmendsError as error:
        yield Said("bad", error.message, error.next)
        return
    for channel in channels:
        if flaw := unready(channel):
            yield Said("warn", f"Channel {channel.name} cannot be used from here: {flaw}.", "Set it, or use env_file.")
    failing = patient.kit.status().get("notices", ()) if patient.kit is not None else ()
    for name in sorted({told["channel"] for told in failing}):
        yield Said("bad", f"Channel {name} could not be told of what needs a person.", "amends doctor --notify")
    if channels and not failing:
        yield Said("ok", f"{ui.count(len(channels), 'channel')} of config.toml: {', '.join(c.name for c in channels)}")
    if not channels:
        yield Said("ok", "nobody is told of what needs a person: config.toml names no channel")


def _policy(patient: Patient) -> Iterator[Said]:
    """Whether the policy can be read: of a broken one every new step is refused, and no agent starts."""
    try:
        digest = Policy(patient.home.policy).digest
    except AmendsError as error:
        yield Said("bad", error.message, error.next)
        return
    none = "there is none: irreversible tools ask a person, everything else is allowed"
    yield Said("ok", f"{patient.home.policy} is sound, digest {digest}" if digest else none)


CHECKS: dict[str, Callable[[Patient], Iterator[Said]]] = {
    "home": _place,
    "disk": _disk,
    "clock": _clock,
    "keys": _keys,
    "log": _log,
    "head": _head,
    "erasing": _erasing,
    "sagas": _sagas,
    "handlers": _handlers,
    "policy": _policy,
    "told": _told,
    "service": _daemon,
    "seal": _seal,
    "secrets": _secrets,
    "growth": _growth,
}


def _try_channels(patient: Patient) -> Iterator[Said]:
    """Send a message that says it is a trial through every channel."""
    try:
        channels = read_config(patient.home.config).channels
    except AmendsError:
        return  # `told` has said it
    for channel in channels:
        if why := send(channel, TRIAL):
            yield Said("bad", f"Channel {channel.name} was not told: {why}.", "See `config.toml` in the guide.")
        else:
            yield Said("ok", f"channel {channel.name} took a message")


TRIAL = Message(
    event="test", item="", saga="", step=0, tool="", since="", level=0, commands=(), show="", device="this device",
    reason="Somebody tries whether this reaches you; nothing is asked.",
)  # fmt: skip


def _hosts(patient: Patient) -> Iterator[Said]:
    """Start every host of handlers.toml, and those that pending compensations recorded."""
    try:
        hosts = hosts_of(patient.home)
    except AmendsError:
        return  # `handlers` has said it
    try:
        found = hosts.check()
        for checked in found:
            known = "found" if checked.handlers == (checked.name,) else ", ".join(checked.handlers) or "no handlers"
            yield Said("bad" if checked.why else "ok", f"{checked.name}: {checked.why or known}")
        if patient.kit is not None:
            yield from _recorded_hosts(patient.kit, hosts)
        if not found:
            yield Said("ok", f"{patient.home.handlers} names no host")
    finally:
        hosts.close()


def _recorded_hosts(kit: Looking, hosts: Hosts) -> Iterator[Said]:
    asked = set()
    for _, step in unwinding_order(list(kit.engine.state.sagas.values())):
        recorded = read(blob_at(kit.log, step.inverse_seq)) if step.inverse_seq else None
        if recorded is None or not recorded.handler or (recorded.handler, str(recorded.host)) in asked:
            continue
        if recorded.handler in hosts.programs:
            continue  # it has been started and told of above
        asked.add((recorded.handler, str(recorded.host)))
        host, known = hosts.find(recorded.handler, recorded.host)
        yield Said("ok" if host else "bad", f"{recorded.handler}: {known.why or 'found'}")
