"""A home with the work of an agent in it, for tests that hand it out."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from amends import COMPENSABLE, AgentKit, Compensation, SagaAborted, compensator, saga_scope
from amends.runtime.current import CURRENT

SECRET = "4111 1111 1111 1111"
FORMULA = '=HYPERLINK("http://evil.example","click")'


@compensator("handing.refund", idempotent=True)
def refund(of: str) -> None:
    return None


def work(kit: AgentKit, sagas: int = 20, first: int = 0) -> None:
    """Sagas of two steps; every third is undone."""
    for n in range(first, first + sagas):
        with suppress(SagaAborted), saga_scope(f"order-{n}", kit=kit) as saga:
            undo = Compensation(handler="handing.refund", kwargs={"of": f"ch_{n}"})
            saga.execute("shop.charge", _charge, {"card": SECRET, "n": n}, semantics=COMPENSABLE, undo=undo)
            saga.execute("mail.send", _send, {"to": FORMULA, "text": "pack my box " * 120}, semantics=COMPENSABLE,
                         undo=undo)  # fmt: skip
            if n % 3 == 2:
                raise ValueError("not today")
    CURRENT.set(None)


def _charge(card: str, n: int) -> dict[str, Any]:
    return {"id": f"ch_{n}"}


def _send(to: str, text: str) -> str:
    return "sent"


def home_of_work(path: Path, sagas: int = 20) -> Path:
    with AgentKit(home=path) as kit:
        work(kit, sagas)
    return path


def commands(readme: str) -> list[str]:
    """The blocks of commands that a README.txt prints."""
    return [block.replace("\n    ", "\n").strip() for block in re.findall(r"(?:^    .*\n)+", readme, re.MULTILINE)]


def files(folder: Path) -> list[str]:
    """Every file below, by name from there."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file())
