"""The house: arrows between rooms, no circles, no dead files, no silence, and pages that keep up with the code.

The first half asks the tree; the second shows each checker a small tree with a planted fault, so that a checker
which no longer sees anything is seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import house
import promises
import pytest

ROOT = Path(__file__).resolve().parents[1]
Checker = Callable[[Path], list[str]]


@pytest.mark.parametrize(
    "checker",
    [
        house.arrows,
        house.circles,
        house.packages,
        house.dead_files,
        house.forbidden,
        house.silent_handlers,
        house.workplace,
        house.docstrings,
        house.undocumented_kinds,
        house.left_out_of_the_freeze,
    ],
    ids=lambda checker: checker.__name__,
)
def test_the_house_is_in_order(checker: Checker) -> None:
    complaints = checker(ROOT)
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.promise("12")
def test_every_command_has_help_and_every_option_is_in_a_page() -> None:
    from amends.cli.main import main

    complaints = house.undocumented_commands(main, house.pages(ROOT))
    assert not complaints, "\n" + "\n".join(complaints)


PAGES = ("README.md", "runtime/GUIDE.md")
SNIPPETS = [
    (page, line, code)
    for page in PAGES
    if (ROOT / page).exists()
    for line, code in house.snippets((ROOT / page).read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_how_it_is_used(page: str) -> None:
    assert page in {name for name, _, _ in SNIPPETS}, f"{page} holds no ```python block"


@pytest.mark.parametrize(("page", "line", "code"), SNIPPETS, ids=[f"{page} line {line}" for page, line, _ in SNIPPETS])
def test_a_snippet_of_a_page_runs(page: str, line: int, code: str, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"AMENDS_HOME": str(tmp_path / "home"), "AMENDS_ANCHORS": str(tmp_path / "anchors")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{page} line {line}:\n{done.stdout}\n{done.stderr}"
    assert "cannot be run after a crash" not in done.stderr, f"{page} line {line} shows a handler that dies with it"


def test_promises_are_numbered_once_and_each_states_its_limit() -> None:
    numbers = promises.promised(ROOT)
    assert len(numbers) == len(set(numbers)) > 30
    assert not promises.without_limit(ROOT)


# -- each checker is shown going red -------------------------------------------------------------------------

PROJECT = '[tool.setuptools]\npackages = ["amends", "amends.runtime", "amends.mesh", "amends.store", "amends.cli"]\n'
SOUND = {
    "__init__.py": '"""root"""\n',
    "pyproject.toml": PROJECT,
    "packaging/amends.spec": 'Analysis(["x"], excludes="sqlite3 multiprocessing".split())\n',
    "runtime/__init__.py": '"""runtime"""\n',
    "runtime/facts.py": '"""facts"""\nKINDS = {"saga.opened": 1}\n',
    "runtime/kit.py": '"""kit"""\nfrom ..store.log import Log\nfrom . import facts\n',
    "mesh/__init__.py": '"""mesh"""\n',
    "store/__init__.py": '"""store"""\n',
    "store/log.py": '"""log"""\nLog = int\n',
    "store/FORMAT.md": "`saga.opened`\n",
    "cli/__init__.py": '"""cli"""\n',
    "cli/main.py": '"""main"""\nfrom ..runtime.kit import Log\n',
} | {f"{room}/py.typed": "" for room in house.ROOMS}

RED: list[tuple[Checker, str, str, str]] = [
    (house.arrows, "store/log.py", '"""log"""\nfrom ..runtime.kit import Log\n', "store may not import runtime"),
    (house.arrows, "store/log.py", '"""log"""\ndef f():\n    from ..cli import main\n', "store may not import cli"),
    (house.arrows, "runtime/kit.py", '"""kit"""\nfrom .. import cli\n', "runtime may not import cli"),
    (house.arrows, "runtime/kit.py", '"""kit"""\nfrom ..mesh import x\n', "runtime may not import mesh"),
    (house.arrows, "mesh/x.py", '"""x"""\nfrom ..runtime import kit\n', "mesh may not import runtime"),
    (house.arrows, "runtime/kit.py", '"""kit"""\nfrom .. import AgentKit\n', "imports the root package"),
    (house.arrows, "runtime/kit.py", '"""kit"""\nfrom amends.store.log import Log\n', "absolutely"),
    (house.arrows, "runtime/kit.py", '"""kit"""\nimport store.log\n', "absolutely"),
    (house.circles, "store/log.py", '"""log"""\nfrom . import other\n', "amends.store.log -> amends.store.other"),
    (house.packages, "runtime/saga/__init__.py", '"""nested"""\n', "amends.runtime.saga is a package"),
    (house.packages, "pyproject.toml", PROJECT.replace(', "amends.mesh"', ""), "amends.mesh is a package"),
    (house.packages, "packaging/__init__.py", "", "packaging/__init__.py must not exist"),
    (house.packages, "runtime/deep/x.py", '"""x"""\n', "in a folder without an __init__.py"),
    (house.dead_files, "store/forgotten.py", '"""forgotten"""\n', "store/forgotten.py is imported by nobody"),
    (house.dead_files, "store/lonely.py", '"""x"""\nfrom . import lonely\n', "store/lonely.py is imported by nobody"),
    (house.forbidden, "store/log.py", '"""log"""\nimport sqlite3\n', "imports sqlite3"),
    (house.forbidden, "store/log.py", '"""log"""\nimport apsw\n', "imports apsw"),
    (house.forbidden, "store/log.py", '"""log"""\nfrom pickle import loads\n', "imports pickle"),
    (house.forbidden, "store/log.py", '"""log"""\neval("1")\n', "calls eval"),
    (house.forbidden, "store/log.py", '"""log"""\nimport time\ntime.time()\n', "clocks are read in"),
    (house.forbidden, "bench/x.py", 'import subprocess\nsubprocess.run("ls", shell=True)\n', "shell=True"),
    (house.forbidden, "store/utils.py", '"""x"""\n', "named by what it holds"),
    (house.forbidden, "store/log.py", '"""log"""\ndef f():\n    raise NotImplementedError\n', "a stub"),
    (house.silent_handlers, "store/log.py", "try:\n    f()\nexcept Exception:\n    pass  # why\n", "forgets it"),
    (house.silent_handlers, "store/log.py", "try:\n    f()\nexcept:\n    ...\n", "catches everything"),
    (house.silent_handlers, "store/log.py", "try:\n    f()\nexcept OSError:\n    pass\n", "without a comment"),
    (house.silent_handlers, "store/log.py", "with suppress(Exception):\n    f()\n", "suppresses everything"),
    (house.workplace, "docs/page.md", "see /wo" "rk/main\n", "docs/page.md:1"),
    (house.workplace, "store/log.py", '"""closes issu' 'e 4"""\n', "store/log.py:1"),
    (house.workplace, "store/log.py", '"""log"""\n# TO' "DO\n", "unfinished"),
    (house.docstrings, "store/log.py", "Log = int\n", "store/log.py: no module docstring"),
    (house.undocumented_kinds, "runtime/facts.py", '"""f"""\nKINDS = ("saga.opened", "saga.lost")\n', "saga.lost"),
    (house.undocumented_kinds, "runtime/facts.py", '"""f"""\n', "no room's facts.py"),
    (house.left_out_of_the_freeze, "store/log.py", '"""log"""\nimport multiprocessing.pool\n', "does not carry"),
]  # fmt: skip


def planted(tmp_path: Path, changes: dict[str, str]) -> Path:
    for name, text in (SOUND | changes).items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


@pytest.mark.parametrize(
    "checker", sorted({case[0] for case in RED}, key=lambda c: c.__name__), ids=lambda c: c.__name__
)
def test_a_checker_is_content_with_a_sound_tree(checker: Checker, tmp_path: Path) -> None:
    assert checker(planted(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("checker", "name", "text", "complaint"), RED, ids=[f"{c[0].__name__} {c[3]} {n}" for n, c in enumerate(RED)]
)
def test_a_checker_goes_red(checker: Checker, name: str, text: str, complaint: str, tmp_path: Path) -> None:
    extra = {"store/other.py": '"""other"""\nfrom .log import Log\n'} if checker is house.circles else {}
    found = checker(planted(tmp_path, {name: text} | extra))
    assert any(complaint in line for line in found), found


def test_typing_and_late_imports_are_no_circle(tmp_path: Path) -> None:
    late = '"""log"""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .other import x\n'
    late += "def f():\n    from . import other\n"
    tree = planted(tmp_path, {"store/log.py": late, "store/other.py": '"""other"""\nfrom .log import Log\n'})
    assert house.circles(tree) == []


def test_a_module_named_in_a_lazy_table_is_alive(tmp_path: Path) -> None:
    tree = planted(
        tmp_path, {"__init__.py": '"""root"""\nNAMES = {"X": ".store.late"}\n', "store/late.py": '"""late"""\n'}
    )
    assert house.dead_files(tree) == []


def test_the_command_checker_goes_red() -> None:
    @click.group(help="The program.")
    def program() -> None:
        raise AssertionError("never run")

    @program.command("ps", help="List.")
    @click.option("--json", "as_json", is_flag=True)
    @click.option("--json-lines", "lines", is_flag=True)
    @click.option("--hush", hidden=True)
    def ps(as_json: bool, lines: bool, hush: str) -> None:
        raise AssertionError("never run")

    page = "`amends ps --json` and --json-lines"
    assert house.undocumented_commands(program, page) == []
    assert house.undocumented_commands(program, "amends ps --json-lines") == [
        "`amends ps` takes --json, which is in no page"
    ]
    assert "`amends ps` is in no page" in house.undocumented_commands(program, "--json --json-lines")
    ps.help = ""
    assert house.undocumented_commands(program, page) == ["`amends ps` has no help"]


def test_snippets_are_found_with_their_lines_and_continued() -> None:
    page = "x\n```python\na = 1\n```\n```sh\nls\n```\n```python continues\nb = a\n```\n```python\nc\n```\n"
    assert house.snippets(page) == [(2, "a = 1\nb = a\n"), (11, "c\n")]


# -- promises and planted faults -----------------------------------------------------------------------------

PAGE = "**1.1** A thing holds.\n*Limit:* not under water.\n\n**1.2** Another.\n*Limit:* none known.\n"
FAULT = """# promise: 1.1
# test: tests/test_log.py::test_it_holds
diff --git a/store/log.py b/store/log.py
--- a/store/log.py
+++ b/store/log.py
@@ -1,2 +1,2 @@
 \"\"\"log\"\"\"
-Log = int
+Log = str
"""
CLAIM = (
    "import pytest\nfrom amends.store.log import Log\n\n\n"
    '@pytest.mark.promise("1.1")\ndef test_it_holds():\n    assert Log is int\n\n\ndef test_nothing():\n    pass\n'
)
TRUE_TREE = {
    "PROMISES.md": PAGE,
    "tests/test_log.py": CLAIM,
    "tests/conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--long', action='store_true')\n",
    "tests/faults/1.1-wrong-type.patch": FAULT,
    "pyproject.toml": PROJECT + "[tool.pytest.ini_options]\nmarkers = ['promise(number): x']\n",
}


def test_a_promise_without_test_fault_or_limit_is_named(tmp_path: Path) -> None:
    found = promises.uncovered(planted(tmp_path, TRUE_TREE | {"PROMISES.md": PAGE + "**1.3** Boundless.\n"}))
    assert "promise 1.2 has no test marked @pytest.mark.promise('1.2')" in found
    assert "promise 1.2 has no planted fault tests/faults/1.2-*.patch" in found
    assert "promise 1.3 does not state its limit" in found
    assert not [line for line in found if "1.1" in line]


def test_a_test_for_a_promise_that_nobody_made_is_named(tmp_path: Path) -> None:
    found = promises.uncovered(planted(tmp_path, TRUE_TREE | {"PROMISES.md": PAGE.replace("**1.1**", "**1.4**")}))
    assert "test_log.py: no promise 1.1 in PROMISES.md" in found
    assert "a fault is planted for 1.1, which is not promised" in found


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, ""),
        ({"tests/faults/1.1-wrong-type.patch": FAULT.replace("test_it_holds", "test_nothing")}, "still passes"),
        ({"tests/faults/1.1-wrong-type.patch": FAULT.replace("-Log = int", "-Log = bytes")}, "no longer applies"),
        ({"tests/faults/1.1-wrong-type.patch": FAULT.replace("test_it_holds", "test_gone")}, "does not pass to begin"),
        ({"tests/faults/1.1-wrong-type.patch": FAULT.replace("+Log = str", "+Log ==")}, "could not run"),
        ({"tests/test_log.py": CLAIM.replace("assert Log is int", "pytest.skip('no')")}, "was skipped"),
    ],
    ids=["red", "still passes", "stale patch", "no such test", "breaks the import", "skipped"],
)
@pytest.mark.slow
def test_a_planted_fault_must_turn_its_test_red(change: dict[str, str], complaint: str, tmp_path: Path) -> None:
    tree = planted(tmp_path, TRUE_TREE | change)
    scratch = promises.Scratch(tree, tmp_path)
    [fault] = promises.faults(tree)
    said = promises.plant(scratch, fault)
    assert complaint in said and bool(complaint) == bool(said)
    assert (scratch.tree / "store/log.py").read_text() == SOUND["store/log.py"], "the patch was taken back"
