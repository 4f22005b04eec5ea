"""The one door for developers: it sets up everything, then does the job. Standard library only.

    python3 packaging/do.py demo              the main job, told in plain words (under 20 s, offline)
    python3 packaging/do.py test [ARGS...]    the whole suite; ARGS go to pytest
    python3 packaging/do.py check [--long]    format, lint, types, tests, promises; --long adds fuzz and planted faults
    python3 packaging/do.py bench [ARGS...]   the measurements that README quotes
    python3 packaging/do.py freeze            the one-file executable: dist/amends

Needs Python 3.11 or newer with pip 22.3 or newer, and git; `freeze` on Linux needs objcopy (Debian: binutils).
Everything lands in .venv, build and dist of this checkout; a second call finds it done.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENV = ROOT / ".venv"
BIN = ENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
AMENDS = BIN / ("amends.exe" if os.name == "nt" else "amends")
PINS = ROOT / "packaging" / "pins.txt"
SITE = ROOT / "build" / "site"
# The pip that fills .venv is the one of whoever calls, and of the Python below where that is .venv itself.
HOST = sys._base_executable if Path(sys.prefix).resolve() == ENV.resolve() else sys.executable  # type: ignore[attr-defined]
PIP = [HOST, "-m", "pip", "--quiet", "--disable-pip-version-check"]
OLDEST_PIP = (22, 3)  # the first with --python: this interpreter's pip fills .venv, which needs none of its own


def demo(*args: str) -> int:
    return run(AMENDS, "demo", *args)


def test(*args: str) -> int:
    """The suite on two workers at most: real processes are killed in it, and more of them starve each other."""
    workers = () if any(a.startswith(("-n", "-p")) for a in args) or (os.cpu_count() or 1) < 2 else ("-n", "2")
    return run(PYTHON, "-m", "pytest", "-rs", *workers, *args)  # -rs: what was skipped is named, with the reason


def check(*args: str) -> int:
    """Every step runs, whatever the ones before said; the failed ones are named at the end."""
    if set(args) - {"--long"}:
        sys.exit(__doc__)
    steps = {
        "format": ("-m", "ruff", "format", "--check", "."),
        "lint": ("-m", "ruff", "check", "."),
        "types": ("-m", "mypy"),
        "promises": ("tests/promises.py", "cover"),
        "tests": ("-m", "pytest", "-n", "2", "-m", "not slow and not long"),
    }
    if "--long" in args:
        steps |= {"tests": ("-m", "pytest", "-n", "2", "--long"), "faults": ("tests/promises.py", "faults")}
    failed = []
    for name, command in steps.items():
        print(f"== {name}", flush=True)
        if run(PYTHON, *command):
            failed.append(name)
    print(f"== {'failed: ' + ', '.join(failed) if failed else 'all is well: ' + ', '.join(steps)}", flush=True)
    return 1 if failed else 0


def bench(*args: str) -> int:
    set_up("bench")
    return run(PYTHON, "bench", *args)


def freeze(*args: str) -> int:
    """Freeze what the wheel would hold: PyInstaller cannot see an editable install."""
    if sys.platform == "linux" and not shutil.which("objcopy"):
        sys.exit(
            "freeze needs objcopy, which is not on PATH. Install it (Debian: apt install binutils) and call again."
        )
    for stale in (SITE, ROOT / "build" / "lib", ROOT / "build" / "amends"):
        shutil.rmtree(stale, ignore_errors=True)  # a file removed from the tree would live on in the executable
    fixed = {"SOURCE_DATE_EPOCH": "1", "PYTHONHASHSEED": "1"}  # same tree, same bytes
    pip("install", "--no-deps", "--target", SITE, ROOT)
    command = ("-m", "PyInstaller", "--noconfirm", "--log-level=ERROR", "packaging/amends.spec", *args)
    if run(PYTHON, *command, **fixed):
        return 1
    frozen = ROOT / "dist" / ("amends.exe" if os.name == "nt" else "amends")
    (ROOT / "dist" / "amends.tree").write_text(tree_digest())
    print(f"{frozen}  {frozen.stat().st_size / 1e6:.1f} MB")
    return 0


def tree_digest() -> str:
    """Names the sources that an executable was frozen from, so that a test can refuse a stale one."""
    digest = hashlib.sha256()
    rooms = [ROOT / name for name in ("runtime", "mesh", "store", "cli")]
    files = [
        ROOT / "__init__.py",
        ROOT / "pyproject.toml",
        ROOT / "packaging/entry.py",
        ROOT / "packaging/amends.spec",
        PINS,
    ]
    for folder in rooms:
        files += [
            f for f in folder.rglob("*") if f.is_file() and f.suffix in {".py", ".sql", ".html", ".css", ".js", ".svg"}
        ]
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT).as_posix()}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def set_up(extra: str = "dev") -> None:
    """Make .venv hold this checkout, editable, with the tools of `extra` at their pinned versions."""
    parts = [(ROOT / "pyproject.toml").read_bytes(), PINS.read_bytes(), sys.version.encode(), str(ROOT).encode()]
    wanted = hashlib.sha256(b"\0".join(parts)).hexdigest()
    stamp = ENV / f"set-up-{extra}.sha256"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if Path(sys.prefix).resolve() == ENV.resolve():  # called from inside .venv, which is about to be made anew
        base = getattr(sys, "_base_executable", "")
        if not base or Path(base).resolve().is_relative_to(ENV.resolve()):
            sys.exit("The environment .venv is out of date. Call this again with the system's own python3.")
        raise SystemExit(subprocess.run([base, *sys.argv]).returncode)
    found = subprocess.run([*PIP, "--version"], capture_output=True, text=True)
    version = tuple(int(n) for n in found.stdout.split()[1].split(".")[:2]) if found.returncode == 0 else (0, 0)
    if version < OLDEST_PIP:
        sys.exit(
            f"{sys.executable} has {'pip ' + found.stdout.split()[1] if found.stdout else 'no pip'}; "
            "22.3 or newer is needed. Install it (Debian: apt install python3-pip) and call again."
        )
    if extra == "dev":
        venv.create(ENV, clear=True, with_pip=False, symlinks=os.name != "nt")
    pip("--python", PYTHON, "install", "--constraint", PINS, "--editable", f"{ROOT}[{extra}]")
    stamp.write_text(wanted)


def pip(*args: object) -> None:
    """Run pip; leave with its exit code if it fails, having let it say why."""
    env = os.environ | {"SOURCE_DATE_EPOCH": "1", "PIP_ROOT_USER_ACTION": "ignore"}  # same tree, same bytes; no lecture
    done = subprocess.run([*PIP, *map(str, args)], cwd=ROOT, env=env)
    if done.returncode:
        sys.exit(f"pip could not do this: {' '.join(map(str, args))}. What it said stands above; then call again.")


def run(*command: object, **more: str) -> int:
    return subprocess.run([*map(str, command)], cwd=ROOT, env=os.environ | more).returncode


JOBS = {"demo": demo, "test": test, "check": check, "bench": bench, "freeze": freeze}


def main(job: str = "", *args: str) -> int:
    if job in ("-h", "--help"):
        print(__doc__)
        return 0
    if job not in JOBS:
        sys.exit(__doc__)
    set_up()
    return JOBS[job](*args)


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036, whoever starts this may have another Python
        sys.exit(f"amends needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}.")
    raise SystemExit(main(*sys.argv[1:]))
