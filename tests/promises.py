"""Each promise of PROMISES.md can be broken by a test, and each such test is shown going red once.

    python tests/promises.py cover              every promise has a test and a planted fault
    python tests/promises.py faults [PATTERN]   plant each fault in a copy of the tree and see its test fail

A planted fault is a patch under tests/faults/, named PROMISE-anything.patch. It begins with

    # promise: 1.6
    # test: tests/test_endings.py::test_a_cancelled_step_is_unknown

and then holds what `git diff` prints (paths from the root). The named test must pass before and fail after; a patch
that no longer applies, a test that cannot be collected and a run that hangs are failures of the fault, not proof.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROMISE = re.compile(r"^\*\*(\d+(?:\.\d+)?)\*\* ", re.MULTILINE)
LIMIT = re.compile(r"^\*Limit:\* ", re.MULTILINE)
HEADER = re.compile(r"^# (promise|test): *(\S.*?) *$", re.MULTILINE)
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
RUN_S = 180


def promised(root: Path) -> list[str]:
    """The numbers of PROMISES.md in order."""
    return PROMISE.findall((root / "PROMISES.md").read_text(encoding="utf-8"))


def without_limit(root: Path) -> list[str]:
    """Numbers of promises that do not state their limit beside them."""
    parts = PROMISE.split((root / "PROMISES.md").read_text(encoding="utf-8"))[1:]
    return [number for number, text in zip(parts[::2], parts[1::2], strict=True) if not LIMIT.search(text)]


def tested(root: Path) -> dict[str, set[str]]:
    """Number -> the test files whose tests carry `@pytest.mark.promise(number)`."""
    found: dict[str, set[str]] = {}
    for path in sorted((root / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise":
                for argument in node.args:
                    if isinstance(argument, ast.Constant):
                        found.setdefault(str(argument.value), set()).add(path.name)
    return found


class Fault(NamedTuple):
    patch: Path
    promise: str
    test: str


def faults(root: Path) -> Iterator[Fault]:
    """The planted faults. Raises ValueError for one whose header or name does not say what it is."""
    for patch in sorted((root / "tests/faults").glob("*.patch")):
        said = dict(HEADER.findall(patch.read_text(encoding="utf-8").split("\ndiff ")[0]))
        if set(said) != {"promise", "test"}:
            raise ValueError(f"{patch.name} must begin with `# promise: N.N` and `# test: tests/test_x.py::test_y`")
        if not patch.name.startswith(f"{said['promise']}-"):
            raise ValueError(
                f"{patch.name} breaks promise {said['promise']} and must be named {said['promise']}-*.patch"
            )
        yield Fault(patch, said["promise"], said["test"])


def uncovered(root: Path) -> list[str]:
    """What `cover` complains about."""
    numbers, marks = promised(root), tested(root)
    try:
        planted = {fault.promise for fault in faults(root)}
    except ValueError as error:
        return [str(error)]
    wrong = [f"promise {n} stands twice in PROMISES.md" for n in sorted({n for n in numbers if numbers.count(n) > 1})]
    wrong += [f"promise {n} does not state its limit" for n in without_limit(root)]
    wrong += [f"promise {n} has no test marked @pytest.mark.promise({n!r})" for n in numbers if n not in marks]
    wrong += [f"promise {n} has no planted fault tests/faults/{n}-*.patch" for n in numbers if n not in planted]
    wrong += [
        f"{', '.join(sorted(marks[n]))}: no promise {n} in PROMISES.md" for n in sorted(set(marks) - set(numbers))
    ]
    return wrong + [f"a fault is planted for {n}, which is not promised" for n in sorted(planted - set(numbers))]


# -- planting ------------------------------------------------------------------------------------------------


class Scratch:
    """A copy of the tree with an environment of its own in which `amends` is the copy, whoever starts it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.tree = folder / "amends"
        shutil.copytree(root, self.tree, symlinks=True, ignore=LEFT_BEHIND)
        env = folder / "env"
        venv.create(env, with_pip=False, symlinks=os.name != "nt")
        self.bin = env / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / ("python.exe" if os.name == "nt" else "python")
        # Read as plain folders: the borrowed one's own .pth files, which lead to the true tree, are not followed.
        [site] = [Path(p) for p in self._ask("import site; print(site.getsitepackages()[0])").splitlines()]
        borrowed = [p for p in sys.path if p.endswith("site-packages")]
        (site / "scratch.pth").write_text("\n".join([str(folder), *borrowed]) + "\n")
        command = self.bin / "amends"
        command.write_text(f"#!{self.python}\nfrom amends.cli.main import main\nmain(prog_name='amends')\n")
        command.chmod(0o755)
        for module, place in (("amends", self.tree), ("amends.store", self.tree / "store")):
            at = self._ask(f"import {module}; print({module}.__path__[0])").strip()
            if Path(at).resolve() != place.resolve():
                raise RuntimeError(f"{module} comes from {at} in the copy: the faults would prove nothing")

    def _ask(self, code: str) -> str:
        return subprocess.run([self.python, "-c", code], check=True, capture_output=True, text=True, cwd="/").stdout

    def apply(self, patch: Path, *options: str) -> str:
        """Apply a patch exactly; return what git objects to, empty if nothing."""
        env = os.environ | {"GIT_CEILING_DIRECTORIES": str(self.tree.parent), "GIT_DIR": os.devnull}
        command = ["git", "apply", "--whitespace=nowarn", *options, str(patch)]
        done = subprocess.run(command, cwd=self.tree, env=env, capture_output=True, text=True)
        return done.stderr.strip() or f"git apply: {done.returncode}" if done.returncode else ""

    def pytest(self, *tests: str) -> tuple[int | None, str]:
        """Exit code (None: hung) and the last lines of a run."""
        path = os.pathsep.join([str(self.bin), os.environ.get("PATH", os.defpath)])
        env = os.environ | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [self.python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", "--long", *tests]
        process = subprocess.Popen(
            command,
            cwd=self.tree,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said = process.communicate(timeout=RUN_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
        return process.returncode, said


def plant(scratch: Scratch, fault: Fault) -> str:
    """Empty if the fault's test passes without it and fails with it, else what is wrong."""
    code, said = scratch.pytest(fault.test)
    if code != 0:
        return f"{fault.test} does not pass to begin with (exit {code})\n{said[-2000:]}"
    if "passed" not in said:
        return f"{fault.test} was skipped, so it proves nothing here"
    if objection := scratch.apply(fault.patch):
        return f"the patch no longer applies: {objection}"
    try:
        code, said = scratch.pytest(fault.test)
    finally:
        undone = scratch.apply(fault.patch, "--reverse")
    if undone:
        return f"the patch could not be taken back: {undone}"
    verdicts = {1: "", 0: f"{fault.test} still passes: it cannot break the promise", None: "hung instead of failing"}
    return verdicts.get(code, f"pytest could not run {fault.test} (exit {code})\n{said[-2000:]}")


def run_faults(root: Path, pattern: str = "*") -> int:
    chosen = [f for f in faults(root) if fnmatch.fnmatch(f.patch.name, f"*{pattern}*")]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="amends-faults-") as folder:
        scratch = Scratch(root, Path(folder).resolve())
        for fault in chosen:
            wrong = plant(scratch, fault)
            failed += bool(wrong)
            print(f"{'NOT RED' if wrong else 'red':8} {fault.patch.name}{': ' + wrong if wrong else ''}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} planted faults turned their test red")
    return 1 if failed or not chosen else 0


def main(verb: str = "", *arguments: str) -> int:
    if verb == "cover":
        wrong = uncovered(ROOT)
        print("\n".join(wrong) or f"{len(promised(ROOT))} promises, each with a test and a planted fault")
        return 1 if wrong else 0
    if verb == "faults":
        return run_faults(ROOT, *arguments)
    sys.exit(__doc__)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
