"""Checkers of the house: each reads a tree of sources and answers with complaints, one line each.

They are functions of a folder, so that test_house.py can show each of them a small tree with a planted fault.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOMS = ("runtime", "mesh", "store", "cli")
MAY_IMPORT = {
    "cli": {"runtime", "mesh", "store"},
    "runtime": {"store"},
    "mesh": {"store"},
    "store": set(),
    "": {"runtime", "mesh", "store"},  # the root __init__.py, which hands out the public names
}
ENTRIES = {"amends", "amends.cli.main", "amends.cli.__main__"}  # started by name, from outside
SKIPPED = {
    ".git",
    ".venv",
    "build",
    "dist",
    ".hypothesis",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "__pycache__",
}


# -- reading a tree ------------------------------------------------------------------------------------------


def files(root: Path, *suffixes: str) -> Iterator[Path]:
    """The tree's own files, symlinked folders and everything built left out."""
    for path in sorted(root.iterdir()):
        if path.name in SKIPPED or path.is_symlink() or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from files(path, *suffixes)
        elif not suffixes or path.suffix in suffixes:
            yield path


@cache
def _parsed(path: Path, stamp: int) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def tree_of(path: Path) -> ast.Module:
    return _parsed(path, path.stat().st_mtime_ns)


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module in the rooms and the root package."""
    found = {"amends": root / "__init__.py"} if (root / "__init__.py").exists() else {}
    for room in ROOMS:
        for path in files(root / room, ".py") if (root / room).is_dir() else ():
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(("amends", *parts)).removesuffix(".__init__")] = path
    return found


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


class Import:
    """One imported module as written and as it resolves; `always` if it runs when the importing module is imported."""

    def __init__(self, line: int, target: str, relative: bool, always: bool) -> None:
        self.line, self.target, self.relative, self.always = line, target, relative, always


def imports(path: Path, module: str) -> list[Import]:
    """Every import of a module, `from . import x` resolved to the candidates `package` and `package.x`."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found: list[Import] = []

    def visit(node: ast.AST, always: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(node.lineno, alias.name, False, always) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for target in [name, *(f"{name}.{alias.name}" for alias in node.names)]:
                found.append(Import(node.lineno, target, node.level > 0, always))
        inner = always and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            visit(child, inner and not (typing_only and child in node.body))

    visit(tree_of(path), True)
    return found


# -- arrows, circles, packages, dead files -------------------------------------------------------------------


def arrows(root: Path) -> list[str]:
    """Rooms import downward only, and relatively."""
    wrong = []
    known = modules(root)
    for module, path in known.items():
        here = room_of(module)
        for made in imports(path, module):
            where = f"{path.relative_to(root)}:{made.line}"
            first = made.target.split(".")[0]
            if not made.relative and (first == "amends" or first in ROOMS):
                wrong.append(f"{where}: imports {made.target} absolutely; inside a room imports are relative")
            there = room_of(made.target)
            if made.relative and there in ROOMS and there != here and there not in MAY_IMPORT[here]:
                wrong.append(f"{where}: {here or 'the root'} may not import {there}")
            if made.relative and made.target == "amends" and module != "amends" and here:
                names = {f"amends.{room}" for room in ROOMS}
                if not any(o.line == made.line and o.target in names for o in imports(path, module)):
                    wrong.append(f"{where}: a room imports the root package, which is made of rooms")
    return sorted(set(wrong))


def circles(root: Path) -> list[str]:
    """No two modules need each other while being imported."""
    known = modules(root)
    needs = {
        module: {made.target for made in imports(path, module) if made.always and made.target in known} - {module}
        for module, path in known.items()
    }
    # `from .x import y` names the package too; a package whose __init__ imports nothing cannot close a circle.
    wrong: set[str] = set()
    done: set[str] = set()

    def walk(module: str, trail: list[str]) -> None:
        if module in trail:
            ring = trail[trail.index(module) :]
            start = ring.index(min(ring))
            wrong.add(" -> ".join([*ring[start:], *ring[:start], ring[start]]))
            return
        if module in done:
            return
        for other in sorted(needs[module]):
            walk(other, [*trail, module])
        done.add(module)

    for module in sorted(needs):
        walk(module, [])
    return sorted(wrong)


def packages(root: Path) -> list[str]:
    """pyproject lists exactly the folders that are packages: one that is missing works here and not in the wheel."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = {module for module, path in modules(root).items() if path.name == "__init__.py"}
    wrong = [
        f"pyproject.toml lists {name}, which is no folder with an __init__.py" for name in sorted(listed - folders)
    ]
    wrong += [f"{name} is a package that pyproject.toml does not list" for name in sorted(folders - listed)]
    for module, path in modules(root).items():
        if path.parent != root and not (path.parent / "__init__.py").exists():
            wrong.append(f"{module} lies in a folder without an __init__.py")
    for name in ("packaging", "tests", "bench"):
        if (root / name / "__init__.py").exists():
            wrong.append(f"{name}/__init__.py must not exist: at the root it would hide the distribution of that name")
    for room in ROOMS:
        if (root / room).is_dir() and not (root / room / "py.typed").exists():
            wrong.append(f"{room}/py.typed is missing")
    return wrong


def dead_files(root: Path) -> list[str]:
    """Every module is imported by another one, named in a table of lazy imports, or an entry."""
    known = modules(root)
    alive = set(ENTRIES)
    strings: set[str] = set()
    for module, path in known.items():
        alive |= {made.target for made in imports(path, module)} - {module}
        strings |= {
            n.value for n in ast.walk(tree_of(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }
    for module, path in known.items():
        tail = module.removeprefix("amends")
        named = {module, tail, tail.removeprefix("."), f".{tail.split('.')[-1]}", path.name}
        if path.name != "__init__.py" and named & strings:
            alive.add(module)
    return [
        f"{known[m].relative_to(root)} is imported by nobody"
        for m in sorted(set(known) - alive)
        if not _package(known[m])
    ]


def _package(path: Path) -> bool:
    return path.name == "__init__.py"


# -- what may not be written ---------------------------------------------------------------------------------

BANNED_MODULES = {
    "sqlite3": "a second SQLite in the process loses locks; the database is reached through apsw in store/sqlite.py",
    "pickle": "decoding must not run anything",
    "marshal": "decoding must not run anything",
    "shelve": "decoding must not run anything",
}
BANNED_CALLS = {
    "eval": "data must not become code",
    "os.system": "no shell between us and a program",
    "os.popen": "no shell between us and a program",
    "asyncio.create_subprocess_shell": "no shell between us and a program",
}
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now", "date.today"}
CLOCK_DOORS = {"store/clock.py"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "manager", "base", "common", "misc"}
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")


def forbidden(root: Path) -> list[str]:
    """Second SQLite libraries, decoders and shells that can run things, clocks beside the one door, vague names."""
    wrong = []
    for path in files(root, ".py"):
        name = path.relative_to(root).as_posix()
        ours, tests = name.split("/")[0] in ROOMS, name.startswith("tests/")
        for node in ast.walk(tree_of(path)):
            where = f"{name}:{getattr(node, 'lineno', 0)}"
            for imported in _imported_names(node):
                if imported in BANNED_MODULES and not tests:
                    wrong.append(f"{where}: imports {imported}: {BANNED_MODULES[imported]}")
                if imported == "apsw" and ours and name != "store/sqlite.py":
                    wrong.append(f"{where}: imports apsw: the database is reached through store/sqlite.py")
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in BANNED_CALLS:
                    wrong.append(f"{where}: calls {called}: {BANNED_CALLS[called]}")
                if ours and not name.startswith("cli/") and called in WALL_CLOCKS and name not in CLOCK_DOORS:
                    wrong.append(f"{where}: calls {called}: clocks are read in store/clock.py")
                if any(k.arg == "shell" and not _is_false(k.value) for k in node.keywords):
                    wrong.append(f"{where}: shell=True: no shell between us and a program")
            if ours and isinstance(node, ast.Raise) and node.exc and "NotImplemented" in ast.unparse(node.exc):
                wrong.append(f"{where}: a stub")
        if ours and path.stem in VAGUE_NAMES:
            wrong.append(f"{name}: a module is named by what it holds")
    return wrong


def _imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level and node.module:
        return [node.module.split(".")[0]]
    return []


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


BROAD = {"", "Exception", "BaseException"}


def silent_handlers(root: Path) -> list[str]:
    """Nothing is caught and forgotten. A narrow handler that only passes says why beside it; a broad one never may."""
    wrong = []
    for path in files(root, ".py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree_of(path)):
            where = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ExceptHandler) and all(_does_nothing(s) for s in node.body):
                caught = ast.unparse(node.type) if node.type else ""
                said = "".join(lines[node.lineno - 1 : node.body[-1].end_lineno])
                if caught in BROAD:
                    wrong.append(f"{where}: catches {caught or 'everything'} and forgets it")
                elif "#" not in said and path.relative_to(root).parts[0] != "tests":
                    wrong.append(f"{where}: catches {caught} and passes without a comment that says why")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"suppress", "contextlib.suppress"}:
                if any(ast.unparse(a) in BROAD for a in node.args):
                    wrong.append(f"{where}: suppresses everything")
    return wrong


def _does_nothing(node: ast.stmt) -> bool:
    if isinstance(node, ast.Pass | ast.Continue):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# Spelt in pieces, so that this file does not find itself.
WORKPLACE = re.compile(
    r"/wo" r"rk/|/fa" r"rm\b|fa" r"rm-(?:bench|studio)|/tmp/(?:pl" r"an|ve" r"nv)\b|\bissu" r"e #?\d+\b"
    r"|\bHOU" r"SE\.md|\bdesi" r"gn/\w+\.md|\bPL" r"AN\.md|\bCl" r"aude\b|shared/PRO" r"MISES",
    re.IGNORECASE,
)  # fmt: skip


def workplace(root: Path) -> list[str]:
    """No file names the place it was written in, or a page that does not travel with it; no unfinished marks."""
    wrong = []
    for path in files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        for number, line in enumerate(text.splitlines(), 1):
            if found := WORKPLACE.search(line):
                wrong.append(f"{path.relative_to(root)}:{number}: says {found.group()!r}")
            if path.suffix == ".py" and (mark := UNFINISHED.search(line)):
                wrong.append(f"{path.relative_to(root)}:{number}: an unfinished mark, {mark.group()}")
    return wrong


def docstrings(root: Path) -> list[str]:
    """A room opens with its promise: every module of ours has a docstring."""
    return [
        f"{path.relative_to(root)}: no module docstring"
        for path in modules(root).values()
        if not ast.get_docstring(tree_of(path))
    ]


# -- facts and docs ------------------------------------------------------------------------------------------

KIND = re.compile(r"[a-z_]+\.[a-z_]+")


def kinds(root: Path) -> dict[str, str]:
    """Fact kind -> file, from the literal `KINDS` of each room's facts.py."""
    found = {}
    for room in ROOMS:
        path = root / room / "facts.py"
        for node in ast.walk(tree_of(path)) if path.exists() else ():
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(t, ast.Name) and t.id == "KINDS" for t in targets) and getattr(node, "value", None):
                keys = node.value.keys if isinstance(node.value, ast.Dict) else [node.value]
                for key in keys:
                    for part in ast.walk(key) if key else ():
                        if isinstance(part, ast.Constant) and isinstance(part.value, str):
                            if KIND.fullmatch(part.value) or part.value == "seen":
                                found[part.value] = f"{room}/facts.py"
    return found


def undocumented_kinds(root: Path) -> list[str]:
    """Every fact kind has its entry in store/FORMAT.md."""
    page = (root / "store/FORMAT.md").read_text(encoding="utf-8") if (root / "store/FORMAT.md").exists() else ""
    wrong = [] if kinds(root) else ["no room's facts.py holds a literal KINDS"]
    return wrong + [
        f"{where}: {kind} is not in store/FORMAT.md" for kind, where in kinds(root).items() if f"`{kind}`" not in page
    ]


def pages(root: Path) -> str:
    """What a user reads about the command line: README.md and the pages under docs/ and cli/."""
    found = [root / "README.md", *files(root / "cli", ".md")] if (root / "cli").is_dir() else [root / "README.md"]
    found += files(root / "docs", ".md") if (root / "docs").is_dir() else ()
    return "\n".join(path.read_text(encoding="utf-8") for path in found if path.exists())


def undocumented_commands(command: object, text: str, name: str = "amends") -> list[str]:
    """Every click command has help and is in the pages as `amends NAME`, every visible option by its long name."""
    import click

    wrong = []
    assert isinstance(command, click.Command)
    if name != "amends" and not re.search(rf"{re.escape(name)}\b", text):
        wrong.append(f"`{name}` is in no page")
    if not (command.help or "").strip():
        wrong.append(f"`{name}` has no help")
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            long = [o for o in (*parameter.opts, *parameter.secondary_opts) if o.startswith("--")]
            wrong += [f"`{name}` takes {o}, which is in no page" for o in long if not re.search(rf"{o}\b(?!-)", text)]
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for sub in command.list_commands(context):
            child = command.get_command(context, sub)
            if child is not None and not child.hidden:
                wrong += undocumented_commands(child, text, f"{name} {sub}")
    return wrong


SNIPPET = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(markdown: str) -> list[tuple[int, str]]:
    """(line number, code) of each ```python block; one marked `continues` is appended to the block before it."""
    found: list[tuple[int, str]] = []
    for match in SNIPPET.finditer(markdown):
        line = markdown[: match.start()].count("\n") + 1
        if "continues" in match.group(1) and found:
            found[-1] = (found[-1][0], found[-1][1] + match.group(2))
        else:
            found.append((line, match.group(2)))
    return found


# -- packaging -----------------------------------------------------------------------------------------------


def left_out_of_the_freeze(root: Path) -> list[str]:
    """No module of ours imports what packaging/amends.spec leaves out of the executable."""
    spec = ast.parse((root / "packaging/amends.spec").read_text())
    [excluded] = [
        set(k.value.func.value.value.split())  # type: ignore[attr-defined]
        for node in ast.walk(spec)
        if isinstance(node, ast.Call)
        for k in node.keywords
        if k.arg == "excludes"
    ]
    return [
        f"{path.relative_to(root)}:{made.line}: imports {made.target}, which the executable does not carry"
        for module, path in modules(root).items()
        if path.name != "host_program.py"  # runs in the user's own interpreter
        for made in imports(path, module)
        if not made.relative and (made.target in excluded or made.target.split(".")[0] in excluded)
    ]
