"""What holds for every test: it has a home and anchors of its own, and the user's own are never touched."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest
from hypothesis import HealthCheck, settings
from mortals import Ledger, Mortals
from world import World

from amends import AgentKit
from amends.runtime.current import CURRENT

ROOT = Path(__file__).resolve().parents[1]

# Random examples on every run, on a build machine too; a failing one prints what reproduces it.
COMMON = {
    "deadline": None,
    "print_blob": True,
    "derandomize": False,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("amends", max_examples=100, **COMMON)
settings.register_profile("amends-long", max_examples=2000, **COMMON)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run fuzz and simulation that take minutes")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("amends-long" if config.getoption("--long") else "amends")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="long: runs with --long"))


# -- the platform's own places are out of bounds -------------------------------------------------------------


def defaults() -> list[Path]:
    """Where a home and its anchors lie when nobody says otherwise."""
    return [Path(platformdirs.user_data_dir("amends")), Path(platformdirs.user_state_dir("amends"))]


TRUE_DEFAULTS = {path: path.exists() for path in defaults()}
TRIPWIRE = Path(tempfile.mkdtemp(prefix="amends-tripwire-"))
# Whoever forgets AMENDS_HOME lands here, seen and harmless, and not in the home of whoever runs the suite.
os.environ["XDG_DATA_HOME"] = str(TRIPWIRE / "data")
os.environ["XDG_STATE_HOME"] = str(TRIPWIRE / "state")
os.environ.pop("AMENDS_HOME", None)
os.environ.pop("AMENDS_ANCHORS", None)


def touched() -> list[str]:
    """What of the defaults came into being since this process began."""
    wire = [str(path) for path in TRIPWIRE.rglob("*")]
    return wire + [str(path) for path, stood in TRUE_DEFAULTS.items() if path.exists() and not stood]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    found = touched()
    if found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        for path in found if reporter else ():
            reporter.write_line(f"ERROR: a test touched the platform's default home: {path}", red=True)
    shutil.rmtree(TRIPWIRE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """AMENDS_HOME and AMENDS_ANCHORS name folders of this test's own, not created yet."""
    monkeypatch.setenv("AMENDS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AMENDS_ANCHORS", str(tmp_path / "anchors"))
    yield
    CURRENT.set(None)  # a saga that a test left open is not the next one's
    found = touched()
    assert not found, f"this test (or one beside it) touched the platform's default home: {found}"


@pytest.fixture
def vectors() -> Path:
    """The folder of published test vectors; a test that needs it is skipped by name where it is not there."""
    folder = ROOT.parent / "shared" / "vectors"
    if not folder.is_dir():
        pytest.skip(f"published vectors are not at {folder}")
    return folder


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def memory() -> Iterator[AgentKit]:
    """A kit whose log lives in this process only."""
    kit = AgentKit.in_memory()
    yield kit
    CURRENT.set(None)
    kit.close()


@pytest.fixture(params=["memory", "file"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AgentKit]:
    """A kit in memory, then one on a real file."""
    kit = AgentKit.in_memory() if request.param == "memory" else AgentKit(home=tmp_path / "home")
    yield kit
    CURRENT.set(None)
    kit.close()


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """A far side in a process of its own."""
    made = Ledger()
    yield made
    made.close()


@pytest.fixture
def mortals(tmp_path: Path) -> Iterator[Mortals]:
    """Processes that die on request."""
    made = Mortals(tmp_path / "errors")
    yield made
    made.close()
