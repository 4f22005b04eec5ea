"""The home: created once by whoever comes first, yours alone, and refused where it could not keep a log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from amends.store.errors import HomeRefused, Malformed, YouErred
from amends.store.home import Home, mount_of, synced_by

TABLE = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 27 0:40 / /mnt/nas rw shared:2 - nfs4 server:/export rw
31 27 0:41 / /mnt/nas/local rw - ext4 /dev/sdb rw
32 27 0:42 / /mnt/my\040share rw - cifs //server/share rw
33 27 0:43 / /shared rw - 9p drvfs rw
34 27 0:44 / /tmp rw - tmpfs tmpfs rw
35 27 0:45 / /vault rw - fuse.gocryptfs gocryptfs rw
36 27 0:46 / /hidden rw - ext4 /dev/sdc rw
37 27 0:47 / /hidden rw - virtiofs host rw
38 27 0:48 / /far rw - fuse.sshfs me@far: rw
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    return path


def test_the_home_is_what_was_said_else_the_variable_else_the_users_data_folder(tmp_path, monkeypatch):
    assert Home.find(str(tmp_path / "x")) == tmp_path / "x"
    assert Home.find() == tmp_path / "home"
    monkeypatch.delenv("AMENDS_HOME")
    assert Home.find().name == "amends"
    monkeypatch.chdir(tmp_path)
    assert Home.find("here") == tmp_path / "here"


@pytest.mark.promise("14.4")
def test_the_home_and_its_keys_are_yours_alone(tmp_path):
    home = Home(tmp_path / "deep" / "home").create()
    assert home.path.stat().st_mode & 0o777 == 0o700
    assert home.device.stat().st_mode & 0o777 == 0o700
    assert home.seed.stat().st_mode & 0o777 == 0o600
    assert len(home.load_seed()) == 32 and len(home.load_install().install) == 26


@pytest.mark.promise("14.4")
def test_what_was_open_to_others_is_closed_and_said(tmp_path):
    home = Home(tmp_path / "home").create()
    home.path.chmod(0o755)
    home.seed.chmod(0o644)
    home.create()
    seed = home.load_seed()
    assert home.path.stat().st_mode & 0o777 == 0o700 and home.seed.stat().st_mode & 0o777 == 0o600
    assert len(home.warnings) == 2 and len(seed) == 32


def test_creating_again_changes_nothing(tmp_path):
    home = Home(tmp_path / "home").create()
    before = home.load_seed(), home.load_install()
    Home(home.path).create()
    assert (home.load_seed(), home.load_install()) == before


def test_of_many_creators_all_get_one_identity(tmp_path):
    script = "import sys; from amends.store.home import Home; print(Home(sys.argv[1]).create().load_seed().hex())"
    racers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "home")], stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    seeds = {racer.communicate()[0] for racer in racers}
    assert len(seeds) == 1 and len(seeds.pop().strip()) == 64


def test_a_database_without_keys_is_given_none(tmp_path):
    home = Home(tmp_path / "home")
    home.path.mkdir()
    home.db.write_bytes(b"")
    home.create()
    assert not home.seed.exists()
    with pytest.raises(HomeRefused) as refused:
        home.load_seed()
    assert refused.value.code == "keys_missing" and refused.value.exit == 4 and "--adopt" in refused.value.next


def test_a_short_seed_and_a_broken_install_file_are_said(tmp_path):
    home = Home(tmp_path / "home").create()
    home.seed.write_bytes(b"short")
    with pytest.raises(HomeRefused, match="5 bytes"):
        home.load_seed()
    home.install.write_bytes(b"{")
    with pytest.raises(Malformed):
        home.load_install()


def test_a_home_that_cannot_be_made_is_said_in_words(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(YouErred, match="cannot be made") as refused:
        Home(tmp_path / "file" / "home").create()
    assert refused.value.exit == 2 and "--home" in refused.value.next


@pytest.mark.promise("14.5")
@pytest.mark.parametrize(
    ("path", "type"),
    [
        ("/mnt/nas/home", "nfs4"),
        ("/mnt/my share/home", "cifs"),
        ("/shared/home", "9p"),
        ("/hidden/home", "virtiofs"),
        ("/far/home", "fuse.sshfs"),
    ],
)
def test_a_file_system_that_cannot_lock_is_refused_by_name(table, path, type):
    with pytest.raises(HomeRefused) as refused:
        Home(path, mounts=table).check_place()
    assert refused.value.code == "no_locks" and refused.value.exit == 4 and type in str(refused.value)


@pytest.mark.promise("14.5")
@pytest.mark.parametrize("path", ["/mnt/nas/local/home", "/home/me", "/mnt/nasty/home", "/vault/home", "/tmp/home"])
def test_its_honest_neighbour_is_not(table, path):
    home = Home(path, mounts=table)
    home.check_place()
    assert bool(home.warnings) == path.startswith(("/vault", "/tmp"))
    assert home.volatile == path.startswith("/tmp")


def test_without_a_mount_table_nothing_is_claimed(tmp_path):
    home = Home(tmp_path / "home", mounts=tmp_path / "none")
    assert home.mount() == ("", "") and not home.volatile
    home.check_place()


def test_a_torn_mount_table_is_read_as_far_as_it_goes():
    assert mount_of("/x", "rubbish\n1 2 3 / / rw - ext4 x rw\n9 9") == ("/", "ext4")


@pytest.mark.parametrize(
    ("folder", "mark", "service"),
    [
        ("OneDrive - Contoso", "", "OneDrive"),
        ("Dropbox", "", "Dropbox"),
        ("Mobile Documents", "", "iCloud"),
        ("sync", ".stfolder", "Syncthing"),
        ("box", ".dropbox", "Dropbox"),
    ],
)
def test_a_synced_folder_is_refused_unless_one_knows(tmp_path, folder, mark, service):
    place = tmp_path / folder
    place.mkdir()
    if mark:
        (place / mark).touch()
    with pytest.raises(HomeRefused) as refused:
        Home(place / "deep" / "home").create()
    assert refused.value.code == "synced_folder" and service in str(refused.value) and "--i-know" in refused.value.next
    assert not (place / "deep").exists()
    Home(place / "deep" / "home", i_know=True).create()
    Home(place / "deep" / "home").create()  # said once, kept


def test_a_folder_that_only_sounds_synced_is_not(tmp_path):
    assert synced_by(tmp_path / "My OneDriver" / "home") == ""
    (tmp_path / ".dropbox").mkdir()  # the client's settings in a home folder
    assert synced_by(tmp_path / "home") == ""


def test_every_place_of_ours_is_listed(tmp_path):
    paths = Home(tmp_path / "home").paths()
    assert paths["anchors"] == tmp_path / "anchors" and paths["db"] == tmp_path / "home" / "amends.db"
    assert all(isinstance(path, Path) and os.path.isabs(path) for path in paths.values())


@pytest.mark.promise("14.4")
def test_a_folder_with_other_things_in_it_is_not_taken_for_a_home(tmp_path: Path) -> None:
    """One mistyped variable, and /tmp would be closed to everybody else."""
    busy = tmp_path / "busy"
    busy.mkdir(mode=0o755)
    (busy / "letters.txt").write_text("dear")
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    for folder in (busy, sticky, Path("/")):
        before = folder.stat().st_mode
        with pytest.raises(YouErred) as refused:
            Home(folder).create()
        assert refused.value.code == "not_a_home" and folder.stat().st_mode == before
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    (prepared / "handlers.toml").write_text("version = 1\n")
    Home(prepared).create()
    (tmp_path / "empty").mkdir()
    Home(tmp_path / "empty").create()


@pytest.mark.promise("12")
def test_too_many_open_files_are_said_in_words(tmp_path: Path) -> None:
    """The limit is set once everything is imported, as when an agent's own files have used it up."""
    resource = pytest.importorskip("resource", reason="no limits on open files here")
    assert resource
    program = """
import os, resource, sys
from amends.store.home import Home
from amends.store.errors import TheyErred
home = Home(sys.argv[1]).create()
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, 4096))
try:
    home.create()
except TheyErred as error:
    os.write(1, f"{error.code} {error.next}".encode())
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "home")], capture_output=True, text=True)
    assert done.stdout.startswith("too_many_files") and "ulimit -n" in done.stdout, done.stderr
