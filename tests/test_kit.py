"""The one object: what it opens, what it promises, and what it tells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from world import World, fold

from amends import (
    COMPENSABLE,
    IRREVERSIBLE,
    AgentKit,
    Refused,
    RollbackReport,
    SagaAborted,
    current_saga,
    model_outcome,
    saga_scope,
)
from amends.runtime.report import ModelOutcome


@pytest.mark.promise("1.2")
def test_the_devices_file_is_the_default_everywhere(tmp_path: Path, world: World) -> None:
    kit = AgentKit.default()
    try:
        with saga_scope("trip") as saga:
            assert saga.kit is kit
            saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE)
        assert AgentKit.default() is kit
        assert kit.home is not None and Path(kit.home.path) == Path(os.environ["AMENDS_HOME"])
    finally:
        kit.close()
    again = AgentKit.default()
    assert again is not kit and fold(again, again.engine.hide("trip")).out == "committed"
    again.close()


@pytest.mark.promise("1.2")
def test_memory_leaves_nothing_on_the_disk_and_says_so(world: World) -> None:
    with AgentKit.in_memory() as kit, saga_scope("trip", kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE)
        told = kit.guarantees()
    assert not told["durable"] and "memory" in told["survives"]
    assert not Path(os.environ["AMENDS_HOME"]).exists()


def test_guarantees_are_data_with_what_is_not_claimed(kit: AgentKit) -> None:
    told = kit.guarantees()
    assert told["version"] == 1 and len(told["not_claimed"]) >= 3
    assert told["durable"] is (kit.home is not None)


def test_status_tells_what_runs_and_what_waits(kit: AgentKit, world: World) -> None:
    assert (kit.status()["open"], kit.status()["waiting"]) == (0, 0)
    with saga_scope(kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE)
        assert kit.status()["open"] == 1 and kit.status()["dead"] == []
    with pytest.raises(SagaAborted), saga_scope(kit=kit) as saga:
        saga.execute("hotel", world.book, {"what": "b"}, semantics=COMPENSABLE)
        raise ValueError
    told = kit.status()
    assert (told["readable"], told["open"], told["escalated"], told["waiting"], told["dead"]) == (True, 1, 1, 1, [])


def test_a_kit_that_is_closed_says_so_and_closes_once(kit: AgentKit) -> None:
    kit.close()
    kit.close()
    with pytest.raises(Exception, match="closed"), saga_scope(kit=kit) as saga:
        saga.execute("t", lambda: None, {}, semantics=COMPENSABLE)


def test_a_saga_on_another_kit_inside_a_saga_has_its_own_fate(world: World) -> None:
    with AgentKit.in_memory() as one, AgentKit.in_memory() as two:
        with pytest.raises(SagaAborted), saga_scope(kit=one) as outer:
            outer.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
            with two.transaction() as other:
                other.execute("hotel", world.book, {"what": "b"}, semantics=COMPENSABLE, undo=world.undo)
            raise ValueError
    assert world.standing == ["b"]


def test_whatever_happens_the_process_drives_nothing_afterwards(kit: AgentKit, world: World) -> None:
    for error in (None, ValueError, KeyboardInterrupt, SystemExit):
        try:
            with saga_scope(kit=kit) as saga:
                saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
                if error:
                    raise error
        except (SagaAborted, KeyboardInterrupt, SystemExit):
            pass
        assert not kit.engine.runs and not kit.engine.resting and current_saga() is None


@pytest.mark.promise("14.7")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_forked_child_opens_its_own_log_and_leaves_its_parents_saga_alone(tmp_path: Path, world: World) -> None:
    with AgentKit(home=tmp_path / "home") as kit:
        with saga_scope("parent", kit=kit) as saga:
            saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    with saga_scope("child", kit=kit) as own:
                        own.execute("hotel", lambda: os.getpid(), {}, semantics=COMPENSABLE)
                    code = 0 if own._run.parent is None else 2
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            saga.execute("hotel", world.book, {"what": "b"}, semantics=COMPENSABLE, undo=world.undo)
        kit.log.refresh()
        parent, child = (fold(kit, kit.engine.hide(name)) for name in ("parent", "child"))
        assert (parent.out, child.out) == ("committed", "committed") and not child.parent
        assert parent.fence == 1


DEAD = """
import os
from amends import saga_scope, COMPENSABLE
saga = saga_scope("trip").__enter__()
saga.execute("hotel", lambda what: what, {"what": "a"}, semantics=COMPENSABLE)
os._exit(9)
"""


@pytest.mark.promise("4.1")
def test_whoever_opens_the_home_is_told_in_one_line_what_waits_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "dead.py"
    script.write_text(DEAD)
    env = {**os.environ, "AMENDS_HOME": str(tmp_path / "home")}
    assert subprocess.run([sys.executable, str(script)], env=env, timeout=20).returncode == 9
    with AgentKit(home=tmp_path / "home") as kit:
        said = capsys.readouterr().err
        assert "1 saga of a dead agent waits" in said and said.count("\n") == 1
        assert kit.status()["dead"] == [kit.engine.hide("trip")]
    with AgentKit(home=tmp_path / "home", recover=True) as kit:
        assert kit.status()["dead"] == [] and kit.status()["escalated"] == 1


@pytest.mark.promise("4.2")
def test_two_kits_of_one_process_on_one_home_respect_each_other(tmp_path: Path, world: World) -> None:
    with AgentKit(home=tmp_path / "home") as one, AgentKit(home=tmp_path / "home") as two:
        with saga_scope("trip", kit=one) as saga:
            saga.execute("hotel", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
            with pytest.raises(Exception, match="being run by"):
                _open_elsewhere(two)
        two.log.refresh()
        assert fold(two, two.engine.hide("trip")).out == "committed"


def _open_elsewhere(kit: AgentKit) -> Any:
    import contextvars

    return contextvars.Context().run(lambda: saga_scope("trip", kit=kit).__enter__())


@pytest.mark.promise("1.6")
def test_a_report_puts_every_step_in_one_bucket(kit: AgentKit, world: World) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as saga:
        saga.execute("done", world.book, {"what": "a"}, semantics=COMPENSABLE, undo=world.undo)
        world.refuse = [ValueError()]
        with pytest.raises(ValueError):
            saga.execute("failed", world.book, {"what": "b"}, semantics=COMPENSABLE)
        saga.execute("orphan", world.book, {"what": "c"}, semantics=COMPENSABLE)
        raise ValueError
    report: RollbackReport = aborted.value.report
    buckets = [report.done, report.compensated, report.failed, report.not_happened, report.orphaned, report.unknown,
               report.accepted]  # fmt: skip
    names = sorted(step.tool for bucket in buckets for step in bucket)
    assert names == sorted(step.tool for step in report.steps) == ["done", "failed", "orphan"]
    assert not report.clean and "1 standing without an inverse" in report.summary()


@pytest.mark.promise("1.16")
def test_a_model_is_told_an_outcome_it_can_act_on(kit: AgentKit, world: World) -> None:
    def asks(fail: bool = False, inverse: bool = True, **step: Any) -> ModelOutcome:
        try:
            with saga_scope(kit=kit) as saga:
                options = {"semantics": COMPENSABLE, "undo": world.undo if inverse else None, **step}
                saga.execute("hotel", world.book, {"what": "a"}, **options)
                if fail:
                    raise RuntimeError("over budget")
        except Exception as error:
            return model_outcome(error)
        return model_outcome()

    assert asks().outcome == "committed"
    undone = asks(fail=True)
    assert (undone.outcome, undone.code) == ("compensated", "RuntimeError") and "do not try again" in undone.next
    assert asks(fail=True, inverse=False).outcome == "pending_human" and len(kit.inbox()) == 1
    wrong = asks(semantics=IRREVERSIBLE)
    assert (wrong.outcome, wrong.code) == ("refused", "bad_value") and "drop the inverse" in wrong.next
    with saga_scope("trip", kit=kit), pytest.raises(Refused) as busy:
        _open_elsewhere(kit)
    told = model_outcome(busy.value)
    assert (told.outcome, told.code) == ("refused", "saga_busy") and told.next
    with pytest.raises(ZeroDivisionError):
        model_outcome(ZeroDivisionError())
