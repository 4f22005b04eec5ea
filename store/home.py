"""One folder holds everything of a device, is yours alone (0700), and refuses to live where it could lie.

`--home`, else `AMENDS_HOME`, else the user's data folder. Whoever comes first creates it, under a lock of its own:

    amends.db  device/{seed,install,anchor}  run/  reserve  config.toml  handlers.toml  policy.toml  app/<version>/

A second anchor lies outside, in the user's state folder (`AMENDS_ANCHORS` overrides), so that restoring the folder
does not restore what it is checked against.

A network file system cannot be trusted with locks, and a synced folder copies a database while it is written: both
are refused with the reason. A tmpfs is allowed and said, since it forgets at reboot.
"""

from __future__ import annotations

import base64
import errno
import os
import re
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import msgspec

from . import driver
from .errors import DiskFull, HomeRefused, Malformed, TheyErred, YouErred

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED_BYTES = 32
MOUNTS = Path("/proc/self/mountinfo")

_NETWORK = "its locks and its shared memory do not reach across machines"
_VIRTUAL = "it crosses the border of a virtual machine, and locks do not"
_REFUSED = {
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "ceph", "lustre"), _NETWORK),
    **dict.fromkeys(("gfs2", "ocfs2", "gpfs", "beegfs", "orangefs", "glusterfs"), _NETWORK),
    **dict.fromkeys(("fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "fuse.davfs"), _NETWORK),
    **dict.fromkeys(("fuse.curlftpfs", "fuse.glusterfs", "fuse.ceph", "fuse.cephfs", "fuse.juicefs"), _NETWORK),
    **dict.fromkeys(("fuse.goofys", "fuse.nfs"), _NETWORK),
    **dict.fromkeys(("9p", "virtiofs", "vboxsf", "prl_fs", "drvfs", "vmhgfs", "fuse.vmhgfs-fuse"), _VIRTUAL),
    **dict.fromkeys(("fuse.grpcfuse", "fuse.osxfs", "osxfs", "grpcfuse", "fuse.prl_fsd", "fakeowner"), _VIRTUAL),
}
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_SYNCED_NAMES = (
    (re.compile(r"OneDrive( - .*)?", re.I), "OneDrive"),
    (re.compile(r"Dropbox( \(.*\))?", re.I), "Dropbox"),
    (re.compile(r"iCloud ?Drive|Mobile Documents|com~apple~CloudDocs", re.I), "iCloud"),
)
_SYNCED_MARKS = ((".stfolder", "Syncthing"), (".dropbox", "Dropbox"), (".dropbox.cache", "Dropbox"))
_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """Where a path lies: mount point and type as the kernel names it ("" where there is no table to ask)."""

    point: str
    type: str


class Install(msgspec.Struct, omit_defaults=True):
    """`device/install`: which copy of the home this is. `left` are the origins that were given up by adoption;
    path, machine and inode are what was last seen, so that a move is said once."""

    install: str
    incarnation: int = 1
    path: str = ""
    machine: str = ""
    inode: int = 0
    synced_ok: bool = False
    second: bool = False
    left: list[str] = []


OWN = frozenset({"amends.db", "device", "run", "handlers.toml", "config.toml", "policy.toml"})
"""What a folder has that is a home, or was prepared as one."""


class Home:
    """A home folder. Nothing is read or created before it is asked for; `warnings` collects what should be said."""

    def __init__(self, path: Path | str, *, i_know: bool = False, mounts: Path = MOUNTS) -> None:
        self.path = Path(os.path.abspath(Path(path).expanduser()))
        self.i_know = i_know
        self.warnings: list[str] = []
        self._mounts = mounts

    @staticmethod
    def find(explicit: str | os.PathLike[str] | None = None) -> Path:
        """Where the home is: what was said, else AMENDS_HOME, else the user's data folder."""
        said = explicit or os.environ.get("AMENDS_HOME")
        if said:
            return Path(os.path.abspath(Path(said).expanduser()))
        import platformdirs  # 10 ms, and rarely needed

        return platformdirs.user_data_path("amends", appauthor=False)

    # -- where things are ---------------------------------------------------------------------------------------------

    @property
    def db(self) -> Path:
        return self.path / "amends.db"

    @property
    def device(self) -> Path:
        return self.path / "device"

    @property
    def seed(self) -> Path:
        return self.device / "seed"

    @property
    def install(self) -> Path:
        return self.device / "install"

    @property
    def next_install(self) -> Path:
        """What `install` becomes when the adoption that is under way has reached the database."""
        return self.device / "install.next"

    @property
    def restored(self) -> Path:
        """What the home came from, as long as nobody has decided that it goes on."""
        return self.device / "restored"

    @property
    def restoring(self) -> Path:
        """There while a backup is being laid out here: what lies beside it is half a home."""
        return self.device / "restoring"

    def check_whole(self) -> None:
        """Raise HomeRefused (`half_restored`) while a restore is under way here, or where one was ended in the middle:
        keys without their log, or a log without its policy, would go on as if they were all."""
        if self.restoring.exists():
            raise HomeRefused(
                f"A backup is being restored to {self.path}, or that was ended in the middle: it is half a home.",
                next="If nobody is at it any more, remove the folder and restore again.",
                code="half_restored",
            )

    @property
    def anchor(self) -> Path:
        return self.device / "anchor"

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def reserve(self) -> Path:
        return self.path / "reserve"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def handlers(self) -> Path:
        return self.path / "handlers.toml"

    @property
    def policy(self) -> Path:
        return self.path / "policy.toml"

    @property
    def app(self) -> Path:
        return self.path / "app"

    @property
    def anchors(self) -> Path:
        """The folder of second anchors, outside the home."""
        if said := os.environ.get("AMENDS_ANCHORS"):
            return Path(os.path.abspath(Path(said).expanduser()))
        import platformdirs

        return platformdirs.user_state_path("amends", appauthor=False) / "anchors"

    def paths(self) -> dict[str, Path]:
        """Every file and folder of ours, by name, for whoever wants to look or to remove them."""
        names = "db device seed install anchor run reserve config handlers policy app anchors"
        return {"home": self.path} | {name: getattr(self, name) for name in names.split()}

    # -- creating -----------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        return self.db.exists() or self.seed.exists()

    def create(self) -> Home:
        """Make what is missing, under `run/home.lock`; harmless when all is there. Raises HomeRefused for a place that
        cannot keep a log, YouErred where the folder cannot be made, TheyErred where the system has no room for it.

        A database that lies there without its keys gets none: it can be read, and is never written.
        """
        with in_words(self.path):
            return self._create()

    def _create(self) -> Home:
        self.check_place()
        if not _is_utf8(self.path):
            raise YouErred(
                f"The path {str(self.path)!r} is not UTF-8, and what is kept about a home is.",
                next="Choose another folder with --home or AMENDS_HOME.",
                code="home_unwritable",
            )
        try:
            self._not_somebody_elses()
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._ours_alone()
            self.run.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            unmade = error.errno in _DENIED and not self.path.exists()  # the folder above is another's
            raise (None if unmade else refusal(self.path, error)) or _cannot_make(self.path, error) from error
        with self.locked():
            if not self.seed.exists() and not self.db.exists():
                self.device.mkdir(mode=0o700, exist_ok=True)
                install = Install(new_id(), synced_ok=self.i_know)
                self.save_install(install)
                write_new(self.seed, os.urandom(SEED_BYTES))
            elif self.i_know and self.install.exists():
                self.save_install(msgspec.structs.replace(self.load_install(), synced_ok=True))
        return self

    def _not_somebody_elses(self) -> None:
        """A folder that holds other things is no place for a home: closing it would take it from others."""
        if not self.path.is_dir():
            return
        inside = {entry.name for entry in os.scandir(self.path)}
        shared = os.name != "nt" and self.path.stat().st_mode & stat.S_ISVTX
        if (inside and not inside & OWN) or shared or self.path == Path(self.path.anchor):
            raise YouErred(
                f"{self.path} is a folder with other things in it, and not a home of amends.",
                next="Name a new or an empty folder with --home or AMENDS_HOME.",
                code="not_a_home",
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold `run/home.lock`: creation, adoption and the record of a move happen one at a time."""
        fd = driver.open_known(self.run / "home.lock", os.O_RDWR | os.O_CREAT)
        try:
            driver.wait_lock(fd)
            yield
        finally:
            driver.close_known(fd)

    def _ours_alone(self) -> None:
        """Other users of the machine have no business in here: who can write the home *is* the device."""
        mode = self.path.stat().st_mode & 0o777
        if os.name != "nt" and mode & 0o077:
            self.path.chmod(0o700)
            self.warnings.append(f"{self.path} was open to other users (mode {mode:o}); it is yours alone now.")

    def load_install(self) -> Install:
        """Raises HomeRefused where it is missing or is not what we wrote."""
        try:
            return msgspec.json.decode(self.install.read_bytes(), type=Install)
        except FileNotFoundError:
            raise keys_missing(self) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Malformed(
                f"{self.install} cannot be read ({error}).",
                next=f"Put the file back from a copy, or {adopt_words()}",
                finding="E_FILE",
            ) from error

    def save_install(self, install: Install, *, next: bool = False) -> None:
        replace_file(self.next_install if next else self.install, msgspec.json.encode(install) + b"\n")

    def load_seed(self) -> bytes:
        """The 32 bytes all keys come from. Raises HomeRefused if missing or of another length."""
        try:
            seed = self.seed.read_bytes()
        except FileNotFoundError:
            raise keys_missing(self) from None
        if len(seed) != SEED_BYTES:
            raise HomeRefused(
                f"{self.seed} holds {len(seed)} bytes where {SEED_BYTES} are asked: the keys of this device are lost.",
                next="Put the file back from a copy; with it moved away, the log can still be read.",
                code="keys_missing",
            )
        if os.name != "nt" and (mode := self.seed.stat().st_mode & 0o777) & 0o077:
            self.seed.chmod(0o600)
            self.warnings.append(f"{self.seed} was open to other users (mode {mode:o}); it is yours alone now.")
        return seed

    # -- the place ----------------------------------------------------------------------------------------------------

    def mount(self) -> Mount:
        """Where the home lies, or will lie."""
        try:
            table = self._mounts.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return Mount("", "")  # no such table on this system
        return mount_of(os.path.realpath(self.path), table)

    @property
    def volatile(self) -> bool:
        """Whether the home forgets at reboot."""
        return self.mount().type in _MEMORY

    def check_place(self) -> None:
        """Raises HomeRefused (`no_locks`, `synced_folder`) where a log cannot be kept; notes a tmpfs."""
        point, type = self.mount()
        if type in _REFUSED:
            raise HomeRefused(
                f"{self.path} lies on {type} (mounted at {point}): {_REFUSED[type]}, so two processes could both "
                "believe that they own a saga.",
                next="Choose a local folder with --home or AMENDS_HOME; devices meet by `amends sync`.",
                code="no_locks",
            )
        if type.startswith("fuse.") or type == "fuse":
            self.warnings.append(f"{self.path} lies on {type}: make sure that it is local and that its locks work.")
        if type in _MEMORY:
            self.warnings.append(f"{self.path} lies in memory ({type}): everything in it lasts until reboot.")
        if self.i_know or (self.install.exists() and self.load_install().synced_ok):
            return
        if by := synced_by(self.path):
            raise HomeRefused(
                f"{self.path} lies in a folder that {by} copies while it is written: a copy of a database in use is a "
                "damaged one, and restoring it makes two devices of one.",
                next="Choose another folder with --home or AMENDS_HOME; if you are sure, say --i-know.",
                code="synced_folder",
            )


def synced_by(path: Path) -> str:
    """The service that keeps a folder above `path` in step with other machines, or ""."""
    for folder in (path, *path.parents):
        for pattern, name in _SYNCED_NAMES:
            if pattern.fullmatch(folder.name):
                return name
        for mark, name in _SYNCED_MARKS:
            # ~/.dropbox is the client's own settings, not the mark of a synced folder
            if (folder / mark).exists() and not (mark == ".dropbox" and (folder / mark).is_dir()):
                return name
    return ""


def mount_of(path: str, table: str) -> Mount:
    """The last mount whose point is `path` or above it. `table` as /proc/self/mountinfo (proc(5))."""
    best = Mount("", "")
    for line in table.splitlines():
        left, dash, right = line.partition(" - ")
        words = left.split(" ")
        if not dash or len(words) < 5:
            continue
        point = _ESCAPE.sub(lambda octal: chr(int(octal[1], 8)), words[4])
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and len(point) >= len(best.point):  # a later mount over the same point hides the earlier one
            best = Mount(point, right.split(" ")[0])
    return best


# ---- words that several refusals share ------------------------------------------------------------------------------


def adopt_words() -> str:
    return "`amends init --adopt --by NAME --reason TEXT` opens a new incarnation that says what it follows."


def keys_missing(home: Home) -> HomeRefused:
    return HomeRefused(
        f"The keys of this device are missing ({home.device}): without them the log can be read, and not written.",
        next=f"Put the folder `device` back from a copy, or {adopt_words()}",
        code="keys_missing",
    )


_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)


def refusal(path: Path, error: OSError) -> TheyErred | None:
    """What the system's refusal means for a home, in words; None for one that is about something else."""
    if error.errno in _FULL:
        return DiskFull(
            f"Nothing can be written in the home {path}: no space is left.", next="Free some, or use another disk."
        )
    if error.errno == errno.EROFS or error.errno in _DENIED:
        return HomeRefused(
            f"Nothing can be written in the home {path}: {error.strerror}.",
            next="Make it writable for this user, or choose another folder with --home or AMENDS_HOME; what only "
            "looks, like `amends ps`, works as it is.",
            code="read_only",
        )
    if error.errno in _TOO_MANY:
        return TheyErred(
            f"The home {path} cannot be used: too many files are open in this process.",
            next="Allow more (`ulimit -n`), or close some.",
            code="too_many_files",
        )
    return None


@contextmanager
def in_words(path: Path) -> Iterator[None]:
    """The system's refusals around a home leave as ours. Raises HomeRefused, DiskFull, TheyErred."""
    try:
        yield
    except OSError as error:
        spoken = refusal(path, error)
        if spoken is None:
            raise
        raise spoken from error


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _cannot_make(path: Path, error: OSError) -> YouErred:
    return YouErred(
        f"The home {path} cannot be made: {error.strerror or error}.",
        next="Choose another folder with --home or AMENDS_HOME.",
        code="home_unwritable",
    )


# ---- files ----------------------------------------------------------------------------------------------------------


def new_id() -> str:
    """26 random characters of lower-case base32."""
    return base64.b32encode(os.urandom(17)).decode()[:26].lower()


def write_new(path: Path, data: bytes) -> None:
    """A new file of mode 0600, on the disk when this returns."""
    replace_file(path, data)


def open_regular(path: str | os.PathLike[str], more: int = 0) -> IO[bytes]:
    """A regular file, to read; a pipe or a device is not waited for. `more`: flags. Raises OSError."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    file = os.fdopen(os.open(path, flags | more), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no file", os.fspath(path))
    return file


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """The file holds `data` or what it held before, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """A new name in a folder is on the disk only after the folder is."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
