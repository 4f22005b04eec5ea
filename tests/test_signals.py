"""A deadline by `signal.alarm`: its exception strikes anywhere in a commit, is the caller's, and harms no log."""

import random
import signal
from pathlib import Path

import pytest

from amends.runtime.kit import AgentKit
from amends.runtime.scope import SagaAborted, saga_scope
from amends.runtime.tools import Compensation, compensator
from amends.store.audit import verify
from amends.store.errors import AmendsError


class Deadline(Exception):
    """The user's own."""


@compensator("signals.undo")
def undo(idempotency_key: str) -> None:
    pass


def quick(idempotency_key: str) -> int:
    return 1


@pytest.mark.promise("1.6")
@pytest.mark.parametrize("raised", [Deadline, TimeoutError, KeyboardInterrupt])
def test_an_exception_of_a_signal_handler_spoils_no_log(tmp_path: Path, raised: type[BaseException]) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    def handler(number: int, frame: object) -> None:
        raise raised("the deadline")

    before = signal.signal(signal.SIGALRM, handler)
    struck = 0
    kit = AgentKit(home=tmp_path / "home", warn=lambda text: None)
    try:
        for number in range(150):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.006))
                try:
                    with saga_scope(f"saga-{number}", kit=kit) as saga:
                        for _ in range(3):
                            saga.execute(
                                "quick", quick, {}, semantics="compensable", settle=0.01,
                                undo=Compensation(handler="signals.undo"),
                            )  # fmt: skip
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except (raised, SagaAborted):
                struck += 1
            except AmendsError as error:  # it struck where the scope was just closing
                assert error.code in ("fenced", "saga_ended", "saga_not_running", "inside", "log_closed"), error
    finally:
        signal.signal(signal.SIGALRM, before)
        kit.close()
    assert struck > 10, "the fault never fired"
    assert verify(tmp_path / "home" / "amends.db").exit in (0, 3)
    AgentKit(home=tmp_path / "home", warn=lambda text: None).close()
