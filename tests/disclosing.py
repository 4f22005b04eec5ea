"""A device whose sagas are handed out, what is done to the files on the way, and both verifiers to look at them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from amends import COMPENSABLE, AgentKit, Compensation, compensator, saga_scope
from amends.cli.main import main
from amends.store import check_amends, disclosure
from amends.store.disclosure import Checked
from amends.store.home import Home
from amends.store.keys import Identity
from amends.store.trust import carried

SCRIPT = Path(check_amends.__file__)


@compensator("proofs.refund")
def refund(charge: str, idempotency_key: str) -> None:
    pass


def order(kit: AgentKit, name: str, *, inside: str = "", **args: Any) -> None:
    """A saga of two steps, with another one inside it if it has a name."""
    with saga_scope(name, kit=kit) as saga:
        step(saga, "shop.charge", {"amount_minor": 4200, "note": "Grüße, Ann", **args})
        if inside:
            with saga_scope(inside, kit=kit) as inner:
                step(inner, "shop.pack", {"box": 7})
        step(saga, "shop.send", {"to": "ann@example.org"})


def step(saga: Any, tool: str, args: dict[str, Any]) -> None:
    saga.execute(
        tool,
        lambda **given: {"id": f"{tool}-1", "of": sorted(given)},
        args,
        semantics=COMPENSABLE,
        compensate=lambda done: Compensation(handler="proofs.refund", kwargs={"charge": done["id"]}),
    )


def amends(*words: object) -> Result:
    """The command line, in this process."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def proved(folder: Path, saga: str, *words: object) -> bytes:
    """The disclosure that the command line makes."""
    out = folder / f"disclosure-{len(list(folder.glob('disclosure-*')))}.json"
    result = amends("prove", saga, "--out", out, *words)
    assert result.exit_code == 0, result.output
    return out.read_bytes()


def identity_here() -> Identity:
    return Identity.load(Home(Path(os.environ["AMENDS_HOME"])))


def anchored() -> bytes:
    """The newest head that the device remembers outside its log, as a note."""
    identity = identity_here()
    anchor = identity.anchored()
    assert anchor is not None
    return identity.note(anchor.size, anchor.root, anchor.signature)


def changed(text: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The same file with something done to its JSON."""
    document = json.loads(text)
    change(document)
    return json.dumps(document, ensure_ascii=False).encode()


def codes(checked: Checked) -> list[str]:
    return [finding.code for finding in checked.findings]


def by_script(path: Path, *words: object, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """What the program that lies in a bundle says, in a process with nothing of ours."""
    command = [python, "-I", str(SCRIPT), str(path), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={"PYTHONIOENCODING": "utf-8"})


def both(text: bytes, path: Path, anchors: tuple[tuple[str, bytes], ...] = ()) -> tuple[Checked, Any]:
    """Both verifiers' reports on one disclosure; the second one called in this process, which is quicker."""
    checked = disclosure.check(text, anchors=[carried(name, note) for name, note in anchors])
    report = check_amends.Report()
    try:
        check_amends.check_disclosure(text, anchors, report)
    except check_amends.Bad as error:
        report.find(*error.args)
    return checked, report
