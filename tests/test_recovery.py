"""A dead agent's work is undone by another process: each inverse once, in reverse order, and the ledger agrees."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import PROGRAM, SHOP, World, kill


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


THREE = """
with saga_scope(id="order-1") as saga:
    buy(saga, "book")
    buy(saga, "pen", compensate=derived)
    buy(saga, "ink", "{wish}", undo=declared(), compensate=derived)
"""


@pytest.mark.promise("4.1")
def test_a_killed_agent_is_unwound_by_another_process_in_reverse_order(world: World) -> None:
    agent = world.agent(THREE.format(wish="then=hang"))
    world.kill_at_open(agent)
    assert world.standing() == ["book", "pen", "ink"]
    code, said = world.recover()
    assert (code, said) == (0, {"recovered": ["order-1"], "escalated": [], "skipped": []})
    assert world.refunded() == ["ink", "pen", "book"]
    assert world.standing() == [] and world.one_effect_per_key()


@pytest.mark.promise("1.8")
def test_an_effect_that_lands_after_its_caller_died_is_undone_once_it_cannot_land_any_more(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "ink", "after_close_ms=300", undo=declared(), settle=1.0)
        """
    )
    world.kill_at_open(agent)
    assert world.recover()[1]["recovered"] == ["order-1"]
    assert world.refunded() == ["ink", "book"]
    time.sleep(0.5)
    assert world.standing() == [] and world.one_effect_per_key()


@pytest.mark.promise("1.3")
def test_without_a_declared_inverse_an_effect_whose_answer_was_lost_goes_to_a_person(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "ink", "then=hang", compensate=derived, settle=0.2)
        """
    )
    world.kill_at_open(agent)
    code, said = world.recover()
    assert code == 1 and said["recovered"] == []
    assert said["escalated"] == [{"saga": "order-1", "step": 2, "reason": "unknown_without_inverse"}]
    assert world.recover() == (code, said), "asked again, it says the same and does nothing"
    assert world.standing() == ["ink"], "what nothing can undo holds nobody up"


@pytest.mark.promise("4.1")
def test_an_interrupted_unwinding_is_finished_and_not_restarted(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "pen", undo=declared("answer_ms=600"))
            buy(saga, "ink", undo=declared())
            time.sleep(60)
        """
    )
    world.until("three charges", lambda: len(world.effects("charge")) == 3 and world.kinds().count("step.done") == 3)
    kill(agent)
    first = world.daemon()
    world.until("the second refund is under way", lambda: len(world.effects("refund")) == 2)
    kill(first)
    assert world.recover()[0] == 0
    assert world.refunded() == ["ink", "pen", "book"]
    tried = [attempt["body"]["of"] for attempt in world.attempts() if attempt["kind"] == "refund"]
    assert [tried.count(of) for of in dict.fromkeys(tried)] == [1, 2, 1], "only the one whose answer was lost"
    assert world.one_effect_per_key()


@pytest.mark.promise("4.1")
def test_an_inverse_that_may_not_run_twice_is_not_run_again_when_its_answer_was_lost(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "ink", undo=declared("answer_ms=30000", "shop.refund_unkeyed"))
            time.sleep(60)
        """
    )
    world.until("two charges", lambda: world.effects("charge") and world.kinds().count("step.done") == 2)
    kill(agent)
    first = world.daemon()
    world.until_open(kind="refund")
    kill(first)
    code, said = world.recover()
    assert code == 1 and said["escalated"] == [{"saga": "order-1", "step": 2, "reason": "undo_answer_lost"}]
    assert len([a for a in world.attempts() if a["kind"] == "refund"]) == 1
    assert world.standing() == ["book"], "what lies behind it waits"


@pytest.mark.promise("4.1")
def test_of_many_daemons_one_undoes_each_dead_saga(world: World) -> None:
    daemons = [world.daemon() for _ in range(4)]
    agents = [
        world.agent(
            f"""
            with saga_scope(id="order-{n}") as saga:
                buy(saga, "book-{n}")
                buy(saga, "pen-{n}", undo=declared("answer_ms=150"))
                buy(saga, "ink-{n}", "then=hang", undo=declared(), settle=0.3)
            """,
            name=f"agent_{n}",
        )
        for n in range(5)
    ]
    world.until_open(5)
    for agent in agents:
        kill(agent)
    world.until("all sagas have ended", lambda: world.kinds().count("saga.ended") == 5)
    refunds = [attempt["key"] for attempt in world.attempts() if attempt["kind"] == "refund"]
    assert len(refunds) == len(set(refunds)) == 15
    assert world.standing() == []
    for daemon in daemons:
        daemon.send_signal(signal.SIGTERM)
    assert [daemon.wait(20) for daemon in daemons] == [0] * 4
    assert not list((world.home / "run").glob("?" * 26 + ".lock")), "the dead leave no lock files"


@pytest.mark.promise("4.2")
def test_a_stopped_agent_is_alive_and_is_not_robbed(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "ink", "delay_ms=700")
        """
    )
    world.until_open()
    agent.send_signal(signal.SIGSTOP)
    code, said = world.recover()
    assert (code, said["skipped"]) == (0, [{"saga": "order-1", "reason": "held by a live driver"}])
    agent.send_signal(signal.SIGCONT)
    assert agent.wait(20) == 0
    assert world.recover()[1] == {"recovered": [], "escalated": [], "skipped": []}
    assert world.standing() == ["book", "ink"]


@pytest.mark.promise("4.2")
def test_a_process_that_lost_its_saga_is_fenced_off(world: World) -> None:
    """Somebody deletes the lock file of a stopped agent by hand; when it goes on, its facts are refused."""
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "ink", "delay_ms=700")
            buy(saga, "pen")
        """
    )
    world.until_open()
    agent.send_signal(signal.SIGSTOP)
    for lock in (world.home / "run").glob("*.lock"):
        if lock.stem != "home":
            lock.unlink()
    assert world.recover()[1]["recovered"] == ["order-1"]
    agent.send_signal(signal.SIGCONT)
    assert agent.wait(20) != 0
    agent.communicate()
    world.recover()  # what it noticed late is a follow-up saga, which its end may have left to recovery
    assert world.kinds()[-1] == "saga.ended"
    entries = world.log()
    taken = next(entry for entry in entries if entry.kind == "saga.taken")
    after = [entry for entry in entries if entry.saga == taken.saga and entry.seq > taken.seq]
    assert after and all(entry.fence != taken.fence - 1 for entry in after), "a fact of the stale process was written"
    assert "pen" not in [effect["body"].get("item") for effect in world.effects()]


@pytest.mark.promise("4.3")
def test_a_handler_that_nobody_has_is_escalated_and_runs_once_somebody_has_it(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "ink", undo=declared(handler="shop.elsewhere"))
            time.sleep(60)
        """
    )
    world.until("two charges", lambda: world.effects("charge") and world.kinds().count("step.done") == 2)
    kill(agent)
    code, said = world.recover()
    assert code == 1 and said["escalated"] == [{"saga": "order-1", "step": 2, "reason": "no_handler"}]
    assert world.effects("refund") == [], "what lies behind it waits"
    (world.folder / "elsewhere.py").write_text(
        "import shop\nfrom amends import compensator\ncompensator('shop.elsewhere')(shop.refund)\n"
    )
    (world.home / "handlers.toml").write_text(
        f'version = 1\n[python.shop]\ninterpreter = "{sys.executable}"\nfiles = ["{world.folder}/elsewhere.py"]\n'
        f'path = ["{world.folder}"]\n'
    )
    item = json.loads(world.amends("inbox", "--json").stdout)[0]
    assert world.amends("retry", item["id"], "--by", "Ada").returncode == 0
    assert world.refunded() == ["ink", "book"]


@pytest.mark.promise("4.3")
def test_a_closure_dies_with_its_process_and_is_escalated(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "ink", undo=Compensation(lambda: None))
            time.sleep(60)
        """
    )
    world.until("a charge", lambda: world.effects("charge") and world.kinds().count("step.done") == 1)
    kill(agent)
    assert world.recover()[1]["escalated"] == [{"saga": "order-1", "step": 1, "reason": "closure"}]


@pytest.mark.promise("4.4")
def test_any_program_can_be_a_handler(world: World) -> None:
    (world.folder / "unpay").write_text(
        f"#!{sys.executable}\nimport json, sys\nsys.path.insert(0, {str(world.folder)!r})\nimport shop\n"
        "asked = json.load(sys.stdin)\n"
        "shop.post('/refund', asked['kwargs'], asked['idempotency_key'])\n"
    )
    (world.folder / "unpay").chmod(0o755)
    world.amends("init")
    (world.home / "handlers.toml").write_text(
        f'version = 1\n[exec."bank.unpay"]\ncommand = ["{world.folder}/unpay"]\nidempotent = true\n'
    )
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "ink", "then=hang", undo=declared(handler="bank.unpay"))
        """
    )
    world.kill_at_open(agent)
    assert world.recover()[1]["recovered"] == ["order-1"]
    assert world.refunded() == ["ink"]


@pytest.mark.promise("1.14")
@pytest.mark.parametrize(
    ("wish", "settle", "said", "refunded"),
    [("then=hang", 60, "present", ["ink", "book"]), ("delay_ms=60000", 1, "absent", ["book"])],
)
def test_a_probe_in_a_host_settles_what_nobody_knows(
    world: World, wish: str, settle: int, said: str, refunded: list[str]
) -> None:
    """Present is believed at once; absent only when nothing can land any more."""
    (world.folder / "look.py").write_text(
        "import json, os, urllib.request\nfrom amends import ABSENT, PRESENT\n"
        "def charged(item, idempotency_key, wish=''):\n"
        "    with urllib.request.urlopen(os.environ['LEDGER_URL'] + '/effects') as answer:\n"
        "        there = [e for e in json.load(answer) if e['key'] == idempotency_key]\n"
        "    return PRESENT(there[0]['id']) if there else ABSENT\n"
    )
    agent = world.agent(
        """
        import look
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "ink", "WISH", undo=declared(), probe=look.charged, settle=SETTLE)
        """.replace("WISH", wish).replace("SETTLE", str(settle))
    )
    world.kill_at_open(agent)
    assert world.recover()[1]["recovered"] == ["order-1"]
    assert world.refunded() == refunded
    assert [e.out for e in world.log() if e.kind == "step.probed"] == [said]


@pytest.mark.promise("4.3")
@pytest.mark.parametrize("column", ["line", "open"])
def test_a_damaged_record_stops_recovery_before_anything_is_done(world: World, column: str) -> None:
    agent = world.agent(THREE.format(wish="then=hang"))
    world.kill_at_open(agent)
    seq = next(e.seq for e in world.log() if e.kind == "step.intended" and e.step == 2)
    _flip(world.home / "amends.db", seq, column)
    ran = world.amends("recoverd", "--once", "--json")
    said = json.loads(ran.stdout)
    assert ran.returncode == 7, ran.stderr
    named = (seq, seq + 1) if column == "line" else (seq,)  # a changed line shows where the next one names its hash
    assert any(f"ecord {one}" in said["error"]["message"] for one in named), said
    assert world.effects("refund") == []


def _flip(path: Path, seq: int, column: str) -> None:
    """Change one letter inside a value, so that the record is still well-formed JSON."""
    import apsw

    db = apsw.Connection(str(path))
    (value,) = db.execute(f"select {column} from entry where seq = ?", (seq,)).fetchone()
    raw = value if isinstance(value, bytes) else value.encode()
    place = raw.index(b"shop.charge" if column == "line" else b"pen")
    changed = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
    stored = changed if isinstance(value, bytes) else changed.decode()
    db.execute(f"update entry set {column} = ? where seq = ?", (stored, seq))
    db.close()


@pytest.mark.promise("4.3")
def test_without_the_devices_keys_nothing_is_done(world: World) -> None:
    agent = world.agent(THREE.format(wish="then=hang"))
    world.kill_at_open(agent)
    (world.home / "device" / "seed").unlink()
    ran = world.amends("recoverd", "--once")
    assert ran.returncode == 4 and "keys" in ran.stderr
    assert world.effects("refund") == []


@pytest.mark.promise("4.7")
def test_a_dry_run_tells_the_story_and_changes_nothing(world: World) -> None:
    agent = world.agent(THREE.format(wish="then=hang"))
    world.kill_at_open(agent)
    before = len(world.log()), sorted(str(path) for path in world.home.rglob("*"))
    ran = world.amends("recoverd", "--dry-run", "--json")
    said = json.loads(ran.stdout)
    assert ran.returncode == 0 and said["recovered"] == ["order-1"]
    assert [(deed["does"], deed["step"]) for deed in said["plan"]] == [
        ("wait", 3), ("undo", 3), ("undo", 2), ("undo", 1), ("end", 0),
    ]  # fmt: skip
    assert (len(world.log()), sorted(str(path) for path in world.home.rglob("*"))) == before
    assert world.effects("refund") == []
    told = world.amends("recoverd", "--dry-run").stdout
    assert "Nothing was changed" in told and "shop.refund" in told
    assert world.recover()[1]["recovered"] == ["order-1"], "and then it happens as told"


@pytest.mark.promise("4.1")
def test_a_saga_inside_another_is_undone_with_it_in_one_order(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="outer") as saga:
            buy(saga, "book")
            with saga_scope(name="inner") as inner:
                buy(inner, "pen")
                buy(inner, "cap")
            buy(saga, "ink", "then=hang")
        """
    )
    world.kill_at_open(agent)
    assert world.recover()[1]["recovered"] == ["outer"]
    assert world.refunded() == ["ink", "cap", "pen", "book"]
    assert world.kinds().count("saga.ended") == 2


@pytest.mark.promise("1.11")
def test_a_saga_that_wants_to_be_resumed_is_left_and_resumed(world: World) -> None:
    body = """
        with saga_scope(id="order-1", on_crash="resume", resume_within={within}) as saga:
            buy(saga, "book")
            if not os.environ.get("AGAIN"):
                time.sleep(60)
            buy(saga, "pen")
        """
    agent = world.agent(body.format(within=3600))
    world.until("a charge", lambda: world.kinds().count("step.done") == 1)
    kill(agent)
    code, said = world.recover()
    assert code == 0 and said["recovered"] == [] and "waits to be resumed" in said["skipped"][0]["reason"]
    assert world.agent(body.format(within=3600), env={"AGAIN": "1"}).wait(20) == 0
    assert world.standing() == ["book", "pen"] and len(world.attempts()) == 2


@pytest.mark.promise("1.11")
def test_a_saga_that_nobody_resumes_in_time_is_undone_by_the_waiting_daemon(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1", on_crash="resume", resume_within=1.5) as saga:
            buy(saga, "book")
            time.sleep(60)
        """
    )
    world.until("a charge", lambda: world.kinds().count("step.done") == 1)
    kill(agent)
    world.daemon()
    world.until("it was let lie", lambda: "saga.released" in world.kinds())
    assert world.effects("refund") == []
    world.until("it was undone", lambda: world.kinds()[-1] == "saga.ended")
    assert world.refunded() == ["book"]


@pytest.mark.promise("4.1")
def test_a_question_that_nobody_waits_for_any_more_is_withdrawn(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            saga.execute("shop.send", shop.charge, dict(item="parcel"), semantics=IRREVERSIBLE)
        """
    )
    world.until("it asks", lambda: "step.asked" in world.kinds())
    kill(agent)
    assert world.recover()[1] == {"recovered": ["order-1"], "escalated": [], "skipped": []}
    assert world.refunded() == ["book"] and json.loads(world.amends("inbox", "--json").stdout) == []


@pytest.mark.promise("4.1")
def test_a_daemon_that_is_asked_to_stop_lets_go_between_two_inverses(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "ink", undo=declared("answer_ms=700"))
            time.sleep(60)
        """
    )
    world.until("two charges", lambda: world.kinds().count("step.done") == 2)
    kill(agent)
    daemon = world.daemon()
    world.until_open(kind="refund")
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(20) == 0
    assert world.refunded() == ["ink"], "the one that ran was waited for, the next one was not begun"
    assert [e.kind for e in world.log() if e.saga][-2:] == ["undo.done", "saga.released"]
    assert world.recover()[1]["recovered"] == ["order-1"]
    assert world.refunded() == ["ink", "book"]
    assert len([a for a in world.attempts() if a["kind"] == "refund"]) == 2


@pytest.mark.promise("4.1")
def test_an_agent_can_ask_for_recovery_before_it_starts(world: World) -> None:
    agent = world.agent(THREE.format(wish="then=hang"))
    world.kill_at_open(agent)
    later = world.agent(
        """
        print(AgentKit(recover=True).status()["dead"])
        """,
        name="later",
    )
    out, err = later.communicate(timeout=30)
    assert (out.strip(), later.returncode) == ("[]", 0), err
    assert world.refunded() == ["ink", "pen", "book"]


# ---- amends run ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("12.1")
def test_run_passes_on_the_exit_code_and_recovers_at_once(world: World) -> None:
    script = world.script(
        """
        import signal
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    ran = world.amends("run", "--", sys.executable, str(script))
    assert ran.returncode == 128 + 9 and ran.stdout == ""
    assert "order-1" in ran.stderr and world.refunded() == ["book"]
    assert world.amends("run", "--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    assert world.amends("run", "--", "/nowhere/agent").returncode == 127
    assert world.amends("run").returncode == 2


@pytest.mark.promise("4.1")
def test_run_undoes_what_earlier_agents_left_before_it_starts_the_next(world: World) -> None:
    agent = world.agent(THREE.format(wish="then=hang"))
    world.kill_at_open(agent)
    script = world.script("buy_next = shop.charge('next')", name="next")
    assert world.amends("run", "--", sys.executable, str(script)).returncode == 0
    order = [(effect["kind"], effect["body"].get("item")) for effect in world.effects()]
    assert order[-4:] == [("refund", None)] * 3 + [("charge", "next")]


@pytest.mark.promise("12.1")
def test_run_hands_signals_on_to_the_agent(world: World) -> None:
    script = world.script(
        """
        import signal
        with saga_scope(id="order-1", unwind_on_sigterm=True) as saga:
            buy(saga, "book")
            time.sleep(60)
        """
    )
    child = world.start([*PROGRAM, "run", "--", sys.executable, str(script)], start_new_session=True)
    world.until("a charge", lambda: world.kinds().count("step.done") == 1)
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 128 + 15, child.communicate()
    assert world.refunded() == ["book"]


@pytest.mark.promise("4.1")
def test_run_gives_the_agent_its_home(world: World) -> None:
    other = world.folder / "other"
    show = "import os; print(os.environ['AMENDS_HOME'])"
    ran = world.amends("--home", str(other), "run", "--", sys.executable, "-c", show)
    assert ran.stdout.strip() == str(other)
    assert (other / "amends.db").exists()


@pytest.mark.promise("4.1")
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
def test_ctrl_c_reaches_the_agent_once_and_its_rollback_is_not_abandoned(world: World) -> None:
    """A terminal sends Ctrl-C to the whole group; `run` must not hand it on a second time."""
    script = world.script(
        """
        import signal
        seen = []
        with saga_scope(id="order-1") as saga:
            buy(saga, "book", undo=declared("answer_ms=500"))
            time.sleep(60)
        """
    )
    child, terminal = _on_a_terminal([*PROGRAM, "run", "--", sys.executable, str(script)], world)
    world.until("a charge", lambda: world.kinds().count("step.done") == 1)
    os.write(terminal, b"\x03")
    said = _read_all(terminal)
    assert os.waitpid(child, 0)[1] != 0
    assert world.kinds()[-1] == "saga.ended" and world.refunded() == ["book"], said
    assert "saga.taken" not in world.kinds(), "the agent itself undid it, undisturbed"
    assert said.count("Ctrl-C again") == 1


def _on_a_terminal(command: list[str], world: World) -> tuple[int, int]:
    """A child whose controlling terminal is ours to type on: (pid, our end)."""
    import pty

    pid, terminal = pty.fork()
    if not pid:
        os.chdir(world.folder)
        os.execve(command[0], command, world.env)
    return pid, terminal


def _read_all(terminal: int) -> str:
    said = b""
    while True:
        try:
            more = os.read(terminal, 4096)
        except OSError:  # EIO: nobody has the other end any more
            return said.decode(errors="replace")
        if not more:
            return said.decode(errors="replace")
        said += more


@pytest.mark.promise("4.4")
def test_handlers_come_from_import_before_anything_else(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "ink", "then=hang", undo=declared(handler="shop.elsewhere"))
        """
    )
    world.kill_at_open(agent)
    (world.folder / "mine.py").write_text(
        f"import sys\nsys.path.insert(0, {str(world.folder)!r})\nimport os, shop\nfrom amends import compensator\n"
        "@compensator('shop.elsewhere')\ndef refund(of, idempotency_key):\n"
        "    open('ran', 'w').write(str(os.getppid()))\n    return shop.refund(of, '', idempotency_key)\n"
    )
    daemon = world.daemon("--import", str(world.folder / "mine.py"))
    world.until("it is undone", lambda: world.kinds()[-1] == "saga.ended")
    assert world.refunded() == ["ink"]
    assert (world.folder / "ran").read_text() == str(daemon.pid), "in a process of its own, not in the daemon"


@pytest.mark.promise("4.1")
@pytest.mark.slow
def test_five_daemons_and_twenty_dead_sagas_with_slow_handlers(world: World) -> None:
    body = """
        import threading
        def one(n):
            with saga_scope(id=f"order-{who}-{n}") as saga:
                buy(saga, f"book-{n}", undo=declared("answer_ms=100"))
                buy(saga, f"ink-{n}", "then=hang", undo=declared("answer_ms=200"), settle=0.3)
        who = {who}
        threads = [threading.Thread(target=one, args=(n,)) for n in range(10)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        """
    daemons = [world.daemon() for _ in range(5)]
    agents = [world.agent(body.replace("{who}", str(who)), name=f"agent_{who}") for who in range(2)]
    world.until_open(20)
    kill(agents[0])
    kill(daemons[0])
    kill(agents[1])
    world.until("all sagas have ended", lambda: world.kinds().count("saga.ended") == 20, 60)
    refunds = [attempt["key"] for attempt in world.attempts() if attempt["kind"] == "refund"]
    assert len(set(refunds)) == 40 and world.standing() == [] and world.one_effect_per_key()
    assert len(refunds) == 40, "the daemon that was killed had not begun: nothing was attempted twice"


@pytest.mark.promise("4.1")
def test_a_daemon_that_dies_at_work_is_followed_by_another(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book", undo=declared("answer_ms=800"))
            buy(saga, "ink", undo=declared("answer_ms=800"))
            time.sleep(60)
        """
    )
    world.until("two charges", lambda: world.kinds().count("step.done") == 2)
    first, second = world.daemon(), world.daemon()
    kill(agent)
    world.until_open(kind="refund")
    taker = next(e.driver for e in world.log() if e.kind == "saga.taken")
    pid = json.loads((world.home / "run" / f"{taker}.lock").read_text())["pid"]
    kill(first if first.pid == pid else second)
    world.until("the other one has finished", lambda: world.kinds()[-1] == "saga.ended")
    assert world.refunded() == ["ink", "book"] and world.one_effect_per_key()
    assert world.kinds().count("saga.taken") == 2


@pytest.mark.promise("4.2")
@pytest.mark.parametrize("days", [1, -1])
def test_a_clock_that_is_a_day_off_robs_nobody_and_stops_nothing(world: World, days: int) -> None:
    """The wall clock of the recovering process is set at the one door to it: `faketime` breaks Python's own waits."""
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "ink", "then=hang")
        """
    )
    world.until_open()
    stepped = (
        "import time\nfrom amends.store.clock import SystemClock\n"
        f"SystemClock.wall_us = lambda self: time.time_ns() // 1000 + {days} * 86_400_000_000\n"
        "from amends.cli.main import main\nmain(['recoverd', '--once', '--json'])"
    )
    child = world.start([sys.executable, "-c", stepped])
    assert json.loads(child.communicate(timeout=60)[0])["skipped"][0]["reason"] == "held by a live driver"
    kill(agent)
    child = world.start([sys.executable, "-c", stepped])
    out, err = child.communicate(timeout=60)
    assert json.loads(out)["recovered"] == ["order-1"], err
    assert world.refunded() == ["ink", "book"]
    assert world.amends("verify").returncode == 0


@pytest.mark.promise("4.5")
def test_after_recovery_every_door_tells_the_same(world: World) -> None:
    agent = world.agent(THREE.format(wish="then=hang"))
    world.kill_at_open(agent)
    assert json.loads(world.amends("ps", "--json").stdout)[0]["outcome"] == "interrupted"
    world.recover()
    (row,) = json.loads(world.amends("ps", "--json").stdout)
    assert (row["saga"], row["outcome"], row["clean"], row["standing"]) == ("order-1", "compensated", True, 0)
    shown = json.loads(world.amends("show", "order-1", "--json").stdout)
    assert (shown["outcome"], [step["state"] for step in shown["steps"]]) == ("compensated", ["compensated"] * 3)
    assert json.loads(world.amends("inbox", "--json").stdout) == []
    checked = world.amends("verify", "--json")
    assert (checked.returncode, json.loads(checked.stdout)["verdict"]) == (0, "INTACT")


@pytest.mark.promise("4.3")
def test_a_waiting_daemon_ends_with_the_same_code_when_the_log_is_damaged(world: World) -> None:
    agent = world.agent(THREE.format(wish="then=hang"))
    world.kill_at_open(agent)
    seq = next(e.seq for e in world.log() if e.kind == "step.done" and e.step == 2)
    _flip(world.home / "amends.db", seq, "open")
    daemon = world.daemon()
    assert daemon.wait(30) == 7
    assert world.effects("refund") == []


@pytest.mark.promise("13")
@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no such sockets here")
def test_a_supervisor_hears_that_the_daemon_is_ready_alive_and_stopping(world: World) -> None:
    """Also while a handler is slow: the loop that looks is not the thread that waits for it."""
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book", undo=declared("answer_ms=2500"))
            time.sleep(60)
        """
    )
    world.until("a charge", lambda: world.kinds().count("step.done") == 1)
    kill(agent)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    door.bind(str(world.folder / "notify"))
    door.settimeout(20)
    daemon = world.daemon(env={"NOTIFY_SOCKET": str(world.folder / "notify"), "WATCHDOG_USEC": "2000000"})
    assert door.recv(100) == b"READY=1"
    world.until_open(kind="refund")
    assert door.recv(100) == b"WATCHDOG=1"
    assert [a["state"] for a in world.attempts() if a["kind"] == "refund"] == ["open"], "said while a handler ran"
    daemon.send_signal(signal.SIGTERM)
    heard = door.recv(100)
    while heard == b"WATCHDOG=1":
        heard = door.recv(100)
    assert heard == b"STOPPING=1" and daemon.wait(20) == 0
    door.close()


@pytest.mark.promise("4.1")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="there is no /proc to count wake-ups in")
def test_while_nobody_lives_the_daemon_wakes_at_most_once_a_second(world: World) -> None:
    daemon = world.daemon()
    world.until("it has a log", lambda: world.kinds())
    time.sleep(2)
    before = _wakeups(daemon.pid)
    time.sleep(3)
    assert _wakeups(daemon.pid) - before <= 3 * 4, "one look a second, and what a look itself waits for"


def _wakeups(pid: int) -> int:
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                found += int(line.split()[1])
    return found


@pytest.mark.promise("4.1")
def test_more_drivers_than_there_are_watchers_are_all_noticed(world: World) -> None:
    crowded = "import amends.runtime.daemon as d\nd.WATCHERS = 1\nfrom amends.cli.main import main\nmain(['recoverd'])"
    world.start([sys.executable, "-c", crowded])
    body = """
        with saga_scope(id="order-{n}") as saga:
            buy(saga, "ink-{n}", "then=hang", undo=declared(), settle=0.3)
        """
    agents = [world.agent(body.replace("{n}", str(n)), name=f"agent_{n}") for n in range(3)]
    world.until_open(3)
    time.sleep(1.2)
    for n, agent in enumerate(agents):
        kill(agent)
        world.until(f"saga {n} has ended", lambda n=n: world.kinds().count("saga.ended") == n + 1)
    assert world.standing() == []


@pytest.mark.promise("4.1")
def test_ctrl_c_ends_a_sweep_between_two_inverses_and_nothing_is_lost(world: World) -> None:
    agent = world.agent(
        """
        with saga_scope(id="order-1") as saga:
            buy(saga, "book")
            buy(saga, "ink", undo=declared("answer_ms=700"))
            time.sleep(60)
        """
    )
    world.until("two charges", lambda: world.kinds().count("step.done") == 2)
    kill(agent)
    once = world.start([*PROGRAM, "recoverd", "--once", "--json"])
    world.until_open(kind="refund")
    once.send_signal(signal.SIGINT)
    said = json.loads(once.communicate(timeout=30)[0])
    assert said["skipped"] == [{"saga": "order-1", "reason": "Recovery was asked to stop."}]
    assert world.refunded() == ["ink"]
    assert world.recover()[1]["recovered"] == ["order-1"] and world.refunded() == ["ink", "book"]
    assert len(world.effects("refund")) == len([a for a in world.attempts() if a["kind"] == "refund"]) == 2


@pytest.mark.promise("1.5")
def test_arguments_that_need_many_openings_come_back_after_a_crash(world: World) -> None:
    (world.folder / "shop.py").write_text(SHOP.replace('refund(of, wish=""', 'refund(of, wish="", note=b""'))
    agent = world.agent(
        """
        def undo(item, idempotency_key, **rest):
            kwargs = dict(of=idempotency_key, note=os.urandom(400_000))
            return Compensation(handler="shop.refund", kwargs=kwargs)
        with saga_scope(id="order-1") as saga:
            buy(saga, "book" * 100_000)
            saga.execute("shop.charge", shop.charge, dict(item="ink"), semantics=COMPENSABLE, undo=undo)
            time.sleep(60)
        """
    )
    world.until("two charges", lambda: world.kinds().count("step.done") == 2)
    kill(agent)
    code, said = world.recover()
    assert (code, said["recovered"]) == (0, ["order-1"]), said
    assert [item[:4] for item in world.refunded()] == ["ink", "book"]
