"""A backup is one file that holds a home as it was at one moment, made while agents run.

    backup.tar: manifest.json  amends.db  config.toml  handlers.toml  policy.toml  certificates/…  device/install
                [device/seed]

The database is copied by SQLite itself out of one snapshot (`VACUUM INTO`): nobody waits for it, and what was redacted
or removed before is in no free page of the copy. The keys stay out unless they are asked for: the device's seed, and
the sagas' keys under which openings are sealed. What is in the file is named in its manifest with size and SHA-256, and
a restore takes exactly that or nothing.

A restored home is never simply the device again: the original may live on, and two homes that sign under one key are
two histories of one device. It is marked, refuses to be written, and goes on as a new incarnation once somebody has
decided that (`identity.adopt`).

Why a tar: it can be listed and unpacked with what every system has.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .audit import verify
from .chain import Draft
from .errors import Malformed, YouErred
from .evidence import Evidence
from .examiner import worst
from .facts import COPIED
from .home import Home, in_words, replace_file, sync_folder
from .identity import Restored
from .keys import origin_of
from .merkle import root_at
from .sqlite import SqliteLog, copy_into

FORMAT = "amends/backup/1"
MANIFEST, DB, SEED, INSTALL = "manifest.json", "amends.db", "device/seed", "device/install"
SETTINGS = ("config.toml", "handlers.toml", "policy.toml")
NAMES = (DB, INSTALL, SEED, *SETTINGS)
CERTIFICATES = "certificates"
_CERTIFICATE = re.compile(CERTIFICATES + r"/[0-9a-f]{64}\.json")
MANIFEST_MAX = 4 << 20
CHUNK = 1 << 20


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the backup: size in bytes, SHA-256 in hex."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a backup says about itself. size, root (hex): of the log in it; made_us: when, microseconds; seal: id of the
    owner's key that its openings are sealed under; verdict: what `verify` said of it."""

    format: str
    origin: str
    install: str
    size: int
    root: str
    made_us: int
    keys: bool
    seal: str
    verdict: str
    files: dict[str, Part]


class Made(NamedTuple):
    """A backup that was made. id: SHA-256 of its manifest, hex."""

    path: Path
    id: str
    bytes: int
    manifest: Manifest


# ---- making one -----------------------------------------------------------------------------------------------------


def backup(log: SqliteLog, home: Home, target: Path, *, keys: bool = False, by: str = "") -> Made:
    """Copy a home into the new file `target` (mode 0600) and record it (`copy.made`); agents go on meanwhile.

    keys: with the device's seed and the sagas' keys. Raises YouErred where `target` exists or cannot be made.
    """
    target = Path(os.path.abspath(target.expanduser()))
    _check_target(target, home)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    copy = part.with_suffix(".db")
    try:
        with in_words(target.parent):
            _make_empty(copy)
            copy_into(log.path, copy, keys=keys)
            small = _small(home, keys)
            manifest, raw = _describe(log, copy, small, keys)
            _write(part, raw, copy, small)
            _give_name(part, target)
    finally:
        for left in (part, copy, copy.with_name(copy.name + "-journal")):
            with suppress(FileNotFoundError):
                os.unlink(left)
    made = Made(target, sha256(raw).hexdigest(), target.stat().st_size, manifest)
    log.commit(lambda view, now: [_fact(made, by)])
    return made


def _check_target(target: Path, home: Home) -> None:
    if target.exists():
        raise YouErred(f"{target} exists.", next="Name another file, or remove it first.", code="exists")
    if not target.parent.is_dir():
        raise YouErred(f"There is no folder {target.parent}.", next="Make it, or name another.", code="no_folder")
    if target.is_relative_to(home.path):
        raise YouErred(
            f"{target} lies in the home that it would be a copy of.", next="Name a file elsewhere.", code="inside_home"
        )


def _make_empty(path: Path) -> None:
    """The copy is its owner's alone before anything is in it; SQLite fills an empty file."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def _describe(log: SqliteLog, copy: Path, small: dict[str, bytes], keys: bool) -> tuple[Manifest, bytes]:
    with Evidence(copy) as evidence:
        genesis = evidence.genesis()
        size = evidence.size
        root = root_at(evidence, size).hex()
    manifest = Manifest(
        FORMAT,
        origin_of(bytes.fromhex(genesis.log)) if genesis else "",
        genesis.install if genesis else "",
        size,
        root,
        log.clock.wall_us(),
        keys,
        log.keeping.seal,
        _verdict(copy, keys),
        {DB: _part(copy)} | {name: Part(len(data), sha256(data).hexdigest()) for name, data in small.items()},
    )
    return manifest, msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def _verdict(copy: Path, keys: bool) -> str:
    """What `verify` says of the copy. That the sagas' keys are not in a copy made without them is no fault of it."""
    return worst([found for found in verify(copy).findings if keys or found.code != "E_KEYS_ABSENT"])


def _small(home: Home, keys: bool) -> dict[str, bytes]:
    """The files beside the database, read once: what the manifest says of them is said of these bytes, whoever changes
    them meanwhile."""
    found = {}
    kept = sorted(f"{CERTIFICATES}/{path.name}" for path in (home.path / CERTIFICATES).glob("*.json"))
    for name in (INSTALL, *((SEED,) if keys else ()), *SETTINGS, *filter(_is_certificate, kept)):
        with suppress(FileNotFoundError):
            found[name] = (home.path / name).read_bytes()
    return found


def _is_certificate(name: str) -> bool:
    """What removed records count by: without it nothing can be certified about a log that was compacted."""
    return bool(_CERTIFICATE.fullmatch(name))


def _part(path: Path) -> Part:
    size, digest = 0, sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
            size += len(block)
    return Part(size, digest.hexdigest())


def _write(part: Path, manifest: bytes, copy: Path, small: dict[str, bytes]) -> None:
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as out:
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            tar.addfile(_member(MANIFEST, len(manifest)), io.BytesIO(manifest))
            with copy.open("rb") as file:
                tar.addfile(_member(DB, copy.stat().st_size), file)
            for name, data in small.items():
                tar.addfile(_member(name, len(data)), io.BytesIO(data))
        out.flush()
        os.fsync(out.fileno())


def _member(name: str, size: int) -> tarfile.TarInfo:
    """Nothing of the machine it was made on."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    return member


def _give_name(part: Path, target: Path) -> None:
    """Under its name only when it is whole; never over something that came meanwhile."""
    try:
        os.link(part, target)
    except FileExistsError:
        raise YouErred(f"{target} exists.", next="Name another file, or remove it first.", code="exists") from None
    except OSError:  # a file system without links
        os.rename(part, target)
    sync_folder(target.parent)


def _fact(made: Made, by: str) -> Draft:
    manifest = made.manifest
    payload = "plain" if not manifest.seal or manifest.keys else "sealed"
    fields = {"out": "backup", "event": made.id, "upto": manifest.size, "payload": payload}
    about = {"by": by, "to": str(made.path)} if by else {"to": str(made.path)}
    return Draft(COPIED, fields, (msgspec.json.encode(about, order="sorted"),), up=True)


# ---- restoring ------------------------------------------------------------------------------------------------------


def restore(source: Path, home: Home) -> Manifest:
    """Lay a backup out as a new home, which asks to be adopted before it is written to.

    All of it is checked against its manifest before anybody may open the home. Raises YouErred where the file or the
    place will not do, HomeRefused (`half_restored`), Malformed (E_BACKUP) for a file that is no backup, or was altered.
    """
    home.check_whole()
    if home.path.exists() and (not home.path.is_dir() or any(home.path.iterdir())):
        raise _not_empty(home)
    home.check_place()
    with in_words(home.path), _opened(source) as tar:
        manifest, raw = _manifest(tar, source)
        home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.path.chmod(0o700)
        try:
            home.device.mkdir(mode=0o700)
        except FileExistsError:
            raise _not_empty(home) from None  # another restore came meanwhile
        replace_file(home.restoring, b"")  # half a home is none, also after a kill
        mark = Restored(sha256(raw).hexdigest(), manifest.origin, manifest.size)
        replace_file(home.restored, msgspec.json.encode(mark) + b"\n")  # first: it is never without its mark
        try:
            _unpack(tar, manifest, home.path)
        except BaseException:
            _remove(home)
            raise
        sync_folder(home.path)
        sync_folder(home.device)
        home.restoring.unlink()
        sync_folder(home.device)
    return manifest


def _not_empty(home: Home) -> YouErred:
    return YouErred(
        f"{home.path} is no empty folder, and a backup is restored beside what is there, never over it.",
        next="Name a new folder with --home.",
        code="exists",
    )


def _opened(source: Path) -> tarfile.TarFile:
    if source.exists() and not source.is_file():
        raise YouErred(f"{source} is no file.", next="Name the file that `amends backup` wrote.", code="no_file")
    try:
        return tarfile.open(source, "r:")
    except FileNotFoundError:
        raise YouErred(f"There is no file {source}.", next="Name a backup.", code="no_file") from None
    except (tarfile.TarError, EOFError) as error:
        raise _no_backup(source, str(error)) from None
    except OSError as error:
        raise YouErred(
            f"{source} cannot be read: {error.strerror or error}.", next="Name the file that `amends backup` wrote.",
            code="no_file",
        ) from None  # fmt: skip


def _manifest(tar: tarfile.TarFile, source: Path) -> tuple[Manifest, bytes]:
    raw = b""
    try:
        first = tar.next()
        if first is not None and first.name == MANIFEST and first.isreg() and first.size <= MANIFEST_MAX:
            raw = _bytes_of(tar, first)
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (tarfile.TarError, msgspec.DecodeError, UnicodeDecodeError, EOFError) as error:
        raise _no_backup(source, f"its first part is no manifest ({error})") from None
    if manifest.format != FORMAT:
        raise _no_backup(source, f"it has format {manifest.format!r}, and this amends knows {FORMAT}")
    if DB not in manifest.files or not all(name in NAMES or _is_certificate(name) for name in manifest.files):
        raise _no_backup(source, "its manifest names other files than a home has")
    return manifest, raw


def _unpack(tar: tarfile.TarFile, manifest: Manifest, folder: Path) -> None:
    left = dict(manifest.files)
    if any(map(_is_certificate, left)):
        (folder / CERTIFICATES).mkdir(mode=0o700)
    try:
        while (member := tar.next()) is not None:
            wanted = left.pop(member.name, None)
            if wanted is None or not member.isreg() or member.size != wanted.bytes:
                raise _no_backup(Path(str(tar.name)), f"{member.name!r} is not in its manifest, or not so")
            if _copy(tar, member, folder / member.name) != wanted.sha256:
                raise _no_backup(Path(str(tar.name)), f"{member.name} is not what was backed up")
    except (tarfile.TarError, EOFError) as error:
        raise _no_backup(Path(str(tar.name)), str(error)) from None
    if left:
        raise _no_backup(Path(str(tar.name)), f"{', '.join(sorted(left))} is missing")


def _copy(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> str:
    """Write a member to the disk; its SHA-256."""
    digest = sha256()
    inside: Any = tar.extractfile(member)
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        while block := inside.read(CHUNK):
            digest.update(block)
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _bytes_of(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    inside: Any = tar.extractfile(member)
    data: bytes = inside.read()
    return data


def _remove(home: Home) -> None:
    """Half a home is none."""
    for name in (*NAMES, "device/restored", "device/restoring"):
        with suppress(FileNotFoundError):
            os.unlink(home.path / name)
    for path in (home.path / CERTIFICATES).glob("*.json"):
        path.unlink()
    for folder in (home.path / CERTIFICATES, home.device, home.path):
        with suppress(OSError):
            folder.rmdir()


def _no_backup(source: Path, why: str) -> Malformed:
    return Malformed(
        f"{source} is no backup, or was altered: {why}.", next="Name another one; nothing was restored.",
        finding="E_BACKUP",
    )  # fmt: skip


def missing(manifest: Manifest) -> list[str]:
    """What a backup does not bring back, in words."""
    told = []
    if not manifest.keys:
        told.append(
            "the device's keys: ids of sagas cannot be told from their names any more, and secrets' fingerprints "
            "cannot be compared"
        )
    if manifest.seal and not manifest.keys:
        told.append(
            f"the sagas' keys: openings sealed under the owner's key {manifest.seal} cannot be read, and what they "
            "would undo cannot be undone"
        )
    elif manifest.seal:
        told.append(f"the owner's key {manifest.seal}: openings are read with it only")
    return told
