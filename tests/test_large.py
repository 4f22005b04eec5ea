"""Values above 256 KiB come back as what they were, up to 64 MiB, and above that nothing happens at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from world import eventually, fold, home_kit

from amends import COMPENSABLE, REVERSIBLE, AgentKit, Compensation, compensator, saga, saga_scope
from amends.runtime.daemon import sweep
from amends.runtime.engine import ResumeConflict, UnstorableResult
from amends.runtime.inverse import read
from amends.runtime.openings import blob_at, fields_of, raw_fields, served_steps, spread, whole
from amends.runtime.scope import SagaAborted
from amends.runtime.state import State
from amends.runtime.values import CHUNK, INLINE_MAX, MANIFEST, VALUE_MAX, encode
from amends.store.audit import verify
from amends.store.entry import unfinished
from amends.store.errors import BadValue, Refused

MIB = 1 << 20


def text(size: int) -> str:
    """Text of that many bytes that does not repeat, with characters of one to four bytes."""
    words = "".join(f'{n:x}é"\\😀\n' for n in range(size // 12))
    return words[: size // 2]


def noise(size: int) -> str:
    return os.urandom(size // 2).hex()


def proved(kit: AgentKit) -> None:
    """The file is intact, its memo included."""
    assert kit.home is not None
    verdict = verify(kit.home, view_factory=State)
    assert (verdict.exit, verdict.findings) == (0, [])


@pytest.mark.promise("1.18")
def test_a_large_argument_and_result_survive_the_file_a_crash_and_verify(tmp_path: Path) -> None:
    page, image = text(3 * MIB), os.urandom(10 * MIB)
    calls: list[int] = []

    def render(page: str) -> dict[str, Any]:
        calls.append(len(page))
        return {"image": image, "of": page[:10]}

    if (pid := os.fork()) == 0:  # a process that dies with its saga open
        with saga_scope("large", kit=home_kit(tmp_path), on_crash="resume") as made:
            made.execute("render", render, {"page": page}, semantics=COMPENSABLE)
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    kit = home_kit(tmp_path)
    with saga_scope("large", kit=kit, on_crash="resume") as made:
        result = made.execute("render", render, {"page": page}, semantics=COMPENSABLE)
    assert result == {"image": image, "of": page[:10]} and calls == []
    proved(kit)
    kit.close()
    proved(kit)


@pytest.mark.promise("1.18")
def test_other_large_arguments_are_another_step(kit: AgentKit) -> None:
    page = text(MIB)
    with pytest.raises(ResumeConflict):
        for body in (page, page[:-1] + "x"):
            with saga_scope("same", kit=kit, on_crash="resume") as made:
                made.execute("read", lambda body: len(body), {"body": body}, semantics=COMPENSABLE)


@pytest.mark.promise("1.18")
@pytest.mark.parametrize("size", [VALUE_MAX + 1, 65 * MIB])
def test_a_value_above_the_cap_is_refused_before_anything_happens(kit: AgentKit, size: int) -> None:
    calls: list[int] = []
    with pytest.raises(SagaAborted) as aborted, saga_scope(kit=kit) as made:
        made.execute("store", lambda data: calls.append(1), {"data": "x" * size}, semantics=COMPENSABLE)
    assert isinstance(aborted.value.cause, BadValue) and "64 MiB" in str(aborted.value.cause)
    assert not calls and not any(record.entry.kind == "step.intended" for record in kit.log.records())


@pytest.mark.promise("1.18")
def test_a_result_above_the_cap_is_done_and_said(memory: AgentKit) -> None:
    with pytest.raises(SagaAborted) as aborted, saga_scope("huge", kit=memory) as made:
        made.execute("make", lambda: "x" * (VALUE_MAX + 1), semantics=COMPENSABLE,
                     compensate=lambda result: Compensation(lambda: None))  # fmt: skip
    assert isinstance(aborted.value.cause, UnstorableResult)
    assert len(aborted.value.report.compensated) == 1


UNDONE: list[str] = []


@compensator("test.unrender", idempotent=True)
def unrender(page: str) -> None:
    UNDONE.append(page)


@pytest.mark.promise("1.18")
def test_a_compensation_gets_its_large_arguments_back_after_a_crash(tmp_path: Path) -> None:
    page = noise(5 * MIB)
    if (pid := os.fork()) == 0:
        with saga_scope("undone", kit=home_kit(tmp_path)) as made:
            made.execute("render", lambda: 1, semantics=COMPENSABLE, undo=Compensation(unrender, {"page": page}))
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    kit = home_kit(tmp_path)
    [step] = kit.engine.state.sagas[kit.engine.hide("undone")].steps.values()
    recorded = read(blob_at(kit.log, step.inverse_seq))
    assert recorded is not None and recorded.kwargs == {"page": page} and recorded.handler == "test.unrender"
    proved(kit)


AGENT = """
import os, sys
from pathlib import Path
from amends import AgentKit, Compensation, compensator, saga_scope

@compensator("large.erase", idempotent=True)
def erase(page, name):
    Path(__file__).with_name(name).write_text(page)

if __name__ == "__main__":
    with saga_scope("dead", kit=AgentKit()) as saga:
        for name in ("declared", "derived"):
            made = Compensation(erase, {"page": name * 400_000, "name": name})
            options = {"undo": made} if name == "declared" else {"compensate": lambda result: made}
            saga.execute("write", lambda: 1, semantics="compensable", **options)
        os._exit(7)
"""


@pytest.mark.promise("4.1")
def test_the_daemon_hands_large_arguments_to_the_host_that_undoes(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    assert subprocess.run([sys.executable, agent], check=False).returncode == 7
    with home_kit(tmp_path) as kit:
        assert sweep(kit).recovered == ["dead"]
        proved(kit)
    for name in ("declared", "derived"):
        assert (tmp_path / name).read_text() == name * 400_000


@pytest.mark.promise("1.18")
def test_an_unwinding_runs_with_large_arguments(kit: AgentKit) -> None:
    page = text(2 * MIB + 100)
    UNDONE.clear()
    with pytest.raises(SagaAborted) as aborted, saga_scope("undone", kit=kit) as made:
        made.execute("render", lambda: 1, semantics=COMPENSABLE, undo=Compensation(unrender, {"page": page}))
        raise ValueError("no")
    assert aborted.value.report.clean and UNDONE == [page]


@pytest.mark.promise("1.20")
def test_a_committed_saga_is_undone_later_with_large_arguments(kit: AgentKit) -> None:
    page = noise(4 * MIB)
    UNDONE.clear()
    with saga_scope("done", kit=kit) as made:
        made.execute("render", lambda: {"page": page}, semantics=COMPENSABLE,
                     compensate=lambda result: Compensation(unrender, {"page": result["page"]}))  # fmt: skip
    assert kit.undo("done", by="ada", reason="wrong").clean and UNDONE == [page]
    with pytest.raises(Refused, match="left to undo"):
        kit.undo("done", by="ada", reason="again")


@pytest.mark.promise("1.18")
def test_an_effect_that_lands_late_is_undone_with_large_arguments(kit: AgentKit) -> None:
    page, gate = noise(3 * MIB), threading.Event()
    UNDONE.clear()

    def slow() -> str:
        gate.wait(20)
        return page

    with pytest.raises(SagaAborted), saga_scope("late", kit=kit) as made:
        made.execute("render", slow, semantics=COMPENSABLE, timeout=0.1, settle=0.1,
                     undo=Compensation(unrender, {"page": "first"}),
                     compensate=lambda result: Compensation(unrender, {"page": result}))  # fmt: skip
    assert UNDONE == ["first"]
    gate.set()
    eventually(lambda: UNDONE == ["first", page])


@pytest.mark.promise("1.18")
def test_a_reversible_step_told_in_one_fact_keeps_large_values_on_both_sides(kit: AgentKit) -> None:
    page = text(3 * MIB)
    with saga_scope("copied", kit=kit) as made:
        assert made.execute("copy", lambda page: [page], {"page": page}, semantics=REVERSIBLE) == [page]
    kit.log.flush()
    ((_, args, result),) = served_steps(kit.log, kit.engine.hide("copied")).values()
    assert args == encode({"page": page}) and result == encode([page])


@pytest.mark.promise("1.18")
def test_a_saga_returns_its_large_result_again(kit: AgentKit) -> None:
    page = text(4 * MIB)

    @saga(id="report", kit=kit)
    def report() -> str:
        return page

    assert report() == page
    assert report() == page
    assert fold(kit, kit.engine.hide("report")).out == "committed"


@pytest.mark.promise("1.18")
def test_large_arguments_set_apart_are_joined_with_the_others(kit: AgentKit) -> None:
    page = text(3 * MIB)
    with saga_scope("apart", kit=kit) as made:
        made.execute("send", lambda page, to: None, {"page": page, "to": "a@b"}, semantics=COMPENSABLE, apart=("page",))
    ((_, args, _),) = served_steps(kit.log, kit.engine.hide("apart")).values()
    assert msgspec.json.decode(args) == {"page": page, "to": "a@b"}


# -- as it lies in the log ---------------------------------------------------------------------------------------------


def parted(kit: AgentKit, size: int = 5 * MIB) -> list[Any]:
    with saga_scope("parted", kit=kit) as made:
        made.execute("send", lambda page: 1, {"page": noise(size)}, semantics=COMPENSABLE)
    return kit.log.thread(kit.engine.hide("parted"))


def test_a_fact_with_many_openings_is_several_entries_of_which_the_last_tells_it(kit: AgentKit) -> None:
    records = [record for record in parted(kit) if record.entry.kind == "step.intended"]
    assert [record.entry.part for record in records] == [(1, 3), (2, 3), (3, 3)]
    assert [record.entry.seq - records[0].entry.seq for record in records] == [0, 1, 2]
    assert all(len(record.entry.c) <= 32 and len(record.line) <= 16384 for record in records)
    assert not any(record.entry.tool or record.entry.step or record.entry.key for record in records[:2])
    assert records[2].entry.tool == "send" and b"identity" in records[2].blob
    [one] = whole(records)
    assert one.entry == records[2].entry and len(raw_fields(one.blob)["args"]) > 5 * MIB
    assert raw_fields(records[2].blob)["args"].startswith(MANIFEST)  # alone it says how large it is, and no more


def test_chunks_are_text_and_the_value_is_their_concatenation(memory: AgentKit) -> None:
    page = text(MIB)
    [first, *chunks] = spread((b'{"args":' + encode({"page": page}) + b"}",))
    read = [msgspec.json.decode(chunk) for chunk in chunks]
    assert "".join(chunk["chunk"] for chunk in read) == encode({"page": page}).decode()
    assert [chunk["at"] for chunk in read] == list(range(len(read)))
    assert all(len(chunk["chunk"].encode()) <= CHUNK for chunk in read)
    assert fields_of([first, *chunks[::-1]])["args"] == encode({"page": page})


@pytest.mark.parametrize("extra", [0, 1])
def test_the_cap_of_what_lies_inline_is_exact(extra: int) -> None:
    value = encode("x" * (INLINE_MAX - 2 + extra))
    assert len(spread((b'{"args":' + value + b"}",))) == (1 if not extra else 6)


@pytest.mark.promise("1.18")
def test_show_and_log_tell_of_large_values_without_losing_any(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from amends.cli.main import main

    kit = home_kit(tmp_path)
    records = parted(kit, 3 * MIB)
    kit.close()
    assert any(unfinished(record.entry) for record in records)
    runner = CliRunner(env={"AMENDS_HOME": str(tmp_path / "home")})
    said = runner.invoke(main, ["show", "parted"])
    assert said.exit_code == 0 and len(said.output) < 10_000, said.output[:500]
    shown = runner.invoke(main, ["show", "parted", "--json"])
    [step] = msgspec.json.decode(shown.stdout)["steps"]
    assert len(step["args"]["page"]) >= 3 * MIB - 2
    assert runner.invoke(main, ["log", "parted"]).output.count("part ") == 2
