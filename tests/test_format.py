"""FORMAT.md keeps up with what is written: a tour of the real engine through every kind, held against the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
from approving import Asking, People
from soft_keys import SoftRaw
from world import eventually, home_kit

from amends import (
    COMPENSABLE,
    IRREVERSIBLE,
    REVERSIBLE,
    AgentKit,
    Compensation,
    Fallback,
    KillSwitch,
    Refused,
    RetryPolicy,
    compensator,
    saga_scope,
)
from amends.runtime import tools, unwind
from amends.runtime.adopted import carry_over
from amends.runtime.channels import Channel
from amends.runtime.current import CURRENT
from amends.runtime.daemon import sweep
from amends.runtime.drift import Turn
from amends.runtime.engine import ResumeConflict
from amends.runtime.facts import KINDS as RUNTIME_KINDS
from amends.runtime.facts import body, fact
from amends.runtime.follow import Follower, tell
from amends.runtime.gate import ceremonies, signing
from amends.runtime.gate.breaker import BreakerPolicy
from amends.runtime.gate.clock import accept_clock
from amends.runtime.gate.keyevent import Settings
from amends.runtime.gate.limits import BudgetLimit, RateLimit, by_tool
from amends.runtime.gate.proof import Credential, base64url
from amends.runtime.gate.rules import ApprovalPolicy, EscalationLevel, PreFlightGate
from amends.runtime.openings import raw_fields, whole
from amends.runtime.scope import SagaAborted, Unconfirmed
from amends.runtime.state import State
from amends.runtime.tools import ABSENT, CANNOT_TELL, PRESENT
from amends.store import redact, sealing
from amends.store.bundle import Made, copied
from amends.store.clock import SystemClock
from amends.store.compact import compact
from amends.store.examiner import CODES
from amends.store.facts import KINDS as LOG_KINDS
from amends.store.home import Home
from amends.store.identity import adopt, open_log
from amends.store.seal import Owner

PAGE = (Path(__file__).parents[1] / "store" / "FORMAT.md").read_text(encoding="utf-8")
FROZEN = json.loads((Path(__file__).parent / "vectors" / "format.json").read_text(encoding="utf-8"))
COMMON = {"seq", "prev", "at", "kind", "salt", "c", "saga", "n", "fence", "part"}


def rows(section: str) -> Iterator[list[str]]:
    """The rows of a section's tables whose first cell is a word in code."""
    for line in PAGE.split(f"\n## {section}")[1].split("\n## ")[0].splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.split("|")[1:-1]]


def keys_on_the_page() -> dict[str, tuple[set[str], set[str], set[str]]]:
    """Kind -> keys that are written, keys in round brackets (kept for later), fields of openings in square ones."""
    found = {}
    for kind, _, cell in rows("6."):
        told = re.fullmatch(r"([^(\[]*)(?:\(([^)]*)\))?\s*(?:\[([^]]*)\])?", cell.replace("`", ""))
        assert told, cell
        found[kind.strip("`")] = tuple(set((words or "").split()) for words in told.groups())
    return found  # type: ignore[return-value]


# ---- the tour --------------------------------------------------------------------------------------------------------


class Clock:
    """The machine's clocks: a wall that can be set, and time that goes by at once."""

    def __init__(self) -> None:
        self._true, self.ahead, self.slept_ms = SystemClock(), 0, 0

    def wall_us(self) -> int:
        return self._true.wall_us() + self.ahead + self.slept_ms * 1000

    def boot_ms(self) -> int:
        return self._true.boot_ms() + self.slept_ms

    def boot_id(self) -> str:
        return self._true.boot_id()


@compensator("tour.cancel")
def cancel(of: str, idempotency_key: str) -> None:
    return None


@compensator("tour.once")
def cancel_once(of: str) -> None:
    raise TimeoutError("no answer")


@compensator("tour.broken", idempotent=True)
def cancel_never(of: str) -> None:
    raise ValueError("no")


def undo(of: str = "x") -> Compensation:
    return Compensation(handler="tour.cancel", kwargs={"of": of})


def aborted(kit: AgentKit, id: str, *steps: dict[str, Any], **options: Any) -> Any:
    """A saga with these steps that is given up."""
    with pytest.raises(SagaAborted) as left, saga_scope(id, kit=kit, **options) as made:
        for step in steps:
            made.execute("book", step.pop("fn", lambda: {"id": 1}), semantics=COMPENSABLE, **step)
        raise ValueError("no")
    return left.value.report


def lose() -> None:
    raise TimeoutError("no answer")


def kept(kit: AgentKit) -> None:
    """Committed sagas: every way to declare a step, one saga inside another, one that goes on as another."""
    with saga_scope("kept", kit=kit, name="a label", on_crash="resume", on_compensation_failure="continue") as made:
        made.execute("copy", lambda: 1, semantics=REVERSIBLE, undo=undo(), probe=lambda: PRESENT())
        made.execute("look", lambda: 1, semantics=REVERSIBLE, undo=Compensation(lambda: None), probe=lambda: PRESENT())
        made.execute("seek", lambda: _raise(KeyError("no")), semantics=REVERSIBLE, fallback=lambda: 2)
        made.execute("book", lambda: 1, semantics=COMPENSABLE, undo=undo(), probe=lambda: PRESENT())
        made.execute("rent", lambda: 1, semantics=COMPENSABLE, compensate=lambda result: undo())
        made.execute("sure", lose, semantics=COMPENSABLE, undo=undo(), probe=lambda: PRESENT("there"))
        made.execute("flaky", fails_once(), semantics=COMPENSABLE, undo=undo(),
                     retry=RetryPolicy(max_retries=3, base_delay=0.0))  # fmt: skip
        made.execute("either", lambda: _raise(KeyError("no")), semantics=COMPENSABLE,
                     fallback=Fallback(lambda: 2, undo=undo()))  # fmt: skip
        with saga_scope("inner", kit=kit) as inner:
            inner.execute("book", lambda: 1, semantics=COMPENSABLE, undo=undo())
        made.continue_as_new("kept-2")
        made.execute("more", lambda: 1, semantics=COMPENSABLE, undo=undo())
    assert kit.undo("kept-2", by="ada", reason="changed her mind").compensated


def fails_once() -> Callable[[], None]:
    errors = [KeyError("once")]
    return lambda: _raise(errors.pop()) if errors else None


def _raise(error: BaseException) -> Any:
    raise error


def given_up(kit: AgentKit) -> None:
    """Unwound sagas: what is lost, asked, failing, for a person, or late."""
    aborted(kit, "plain", {"undo": undo()}, {"fn": lambda: None})
    with pytest.raises(SagaAborted), saga_scope("lost", kit=kit) as made:
        made.execute("book", lose, semantics=COMPENSABLE, undo=undo(), settle=0.01)
    said = [CANNOT_TELL, PRESENT("there")]  # asked once more when it is unwound
    with pytest.raises(SagaAborted), saga_scope("found", kit=kit) as made:
        made.execute("book", lose, semantics=COMPENSABLE, settle=0.01, probe=lambda: said.pop(0),
                     compensate=lambda result: undo())  # fmt: skip
    with pytest.raises(SagaAborted), saga_scope("asked", kit=kit) as made:
        made.execute("book", lose, semantics=COMPENSABLE, settle=0.01, probe=lambda: CANNOT_TELL("who knows"))
    for handler in ("tour.broken", "tour.once"):
        aborted(kit, handler, {"undo": Compensation(handler=handler, kwargs={"of": "x"})})
    [first, *_] = [item for item in kit.inbox() if item["saga"] == "tour.broken"]
    kit.retry(first["id"], by="ada")
    for item in kit.inbox():
        if item["kind"] != "resume":
            kit.accept(item["id"], by="ada", reason="seen to")
    with pytest.raises(SagaAborted), saga_scope("odd", kit=kit) as made:
        made.execute("book", object, semantics=COMPENSABLE, undo=undo())
    with pytest.raises(SagaAborted), saga_scope("absent", kit=kit) as made:
        made.execute("book", lambda: _raise(KeyError("no")), semantics=COMPENSABLE, probe=lambda: ABSENT())
    gate = threading.Event()
    with pytest.raises(SagaAborted), saga_scope("late", kit=kit) as made:
        made.execute("book", lambda: gate.wait(20), semantics=COMPENSABLE, timeout=0.05, settle=0.05, undo=undo(),
                     compensate=lambda result: undo("y"))  # fmt: skip
    gate.set()
    eventually(lambda: any(r.entry.kind == "step.carried" and r.entry.scope == "undo/late" for r in kit.log.records()))
    landing = threading.Event()
    with pytest.raises(SagaAborted), saga_scope("landing", kit=kit) as made:
        made.execute("book", lambda: landing.wait(20), semantics=COMPENSABLE, timeout=0.05, settle=0.05,
                     compensate=lambda result: undo("y"))  # fmt: skip
    landing.set()
    eventually(lambda: any(r.entry.kind == "step.landed" and r.entry.handler for r in kit.log.records()))


def limited() -> PreFlightGate:
    """A budget, a rate for each tool, and a breaker."""
    limits = [BudgetLimit("daily", max_total=100, window=60), RateLimit("fast", max_calls=9, window=60, scope=by_tool)]
    return PreFlightGate([], limits=limits, breaker=BreakerPolicy())


def metered(kit: AgentKit) -> None:
    """A step that takes from limits, and is tried again."""
    with saga_scope("metered", kit=kit) as made:
        work = fails_once()
        made.execute("charge", lambda amount: work and work(), {"amount": 5}, semantics=COMPENSABLE, undo=undo(),
                     retry=RetryPolicy(max_retries=1, base_delay=0.0))  # fmt: skip


def asked(kit: AgentKit) -> None:
    """An irreversible step, approved."""
    done = threading.Event()

    def send() -> None:
        with saga_scope("sent", kit=kit) as made:
            made.execute("mail.send", lambda: 1, semantics=IRREVERSIBLE)
        done.set()

    threading.Thread(target=send, daemon=True).start()
    eventually(lambda: [item for item in kit.inbox() if item["kind"] == "approval"])
    [item] = [item for item in kit.inbox() if item["kind"] == "approval"]
    kit.approve(item["id"], by="ada", note="fine")
    assert done.wait(10)


def stopped(kit: AgentKit) -> None:
    """Levers, set and lifted."""
    KillSwitch(kit).halt(by="ada", reason="an incident", ttl=60, including_compensations=True)
    KillSwitch(kit).resume(by="ada", reason="over")


def told(kit: AgentKit) -> None:
    """A question of which one channel hears at once, and another at the next level, without success."""

    def ask() -> None:
        with suppress(SagaAborted, Refused), saga_scope("told", kit=kit) as made:
            made.execute("mail.send", lambda: 1, semantics=IRREVERSIBLE)

    channels = Channel("ops", "command", command=("true",)), Channel("boss", "command", command=("false",))
    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: any(due.level for due in Follower(kit).due(channels)))
    assert {tell(kit, due) for due in Follower(kit).due(channels)} == {"", "false ended with 1"}
    kit.deny(kit.inbox()[0]["id"], by="ada")
    asking.join(10)


def keyed(kit: AgentKit, clock: Clock) -> None:
    """A keyring, with everything that can be said about its keys."""
    first, spare, joins, other, fresh, last, paper, paper2 = (SoftRaw(bytes([n]) * 32) for n in range(1, 9))

    def made(key: SoftRaw) -> Credential:
        return key.enrolled(person="ada", roles=("admin", "approver"))

    def say(kind: str, *by: SoftRaw, **what: Any) -> None:
        event = ceremonies.begin(kit, kind, **what)
        ceremonies.submit(kit, event, [key.get(event.signed) for key in by])

    again = {"keys": (made(fresh), made(other)), "recovery": base64url(paper2.public), "settings": Settings()}
    say("founded", first, spare, keys=(made(first), made(spare)), recovery=base64url(paper.public), settings=Settings())
    say("added", first, joins, key=made(joins))
    say("quarantined", credential=made(joins).id, reason="its counter went back")
    say("released", first, credential=made(joins).id)
    say("recovering", fresh, other, paper, **again)
    say("vetoed", joins)
    say("revoked", joins, credential=made(joins).id, reason="left")
    say("recovering", fresh, other, paper, **again)
    clock.slept_ms += Settings().delay_ms
    say("recovered", other)
    say("rotated", fresh, last, credential=made(other).id, key=made(last))


def decided(kit: AgentKit, clock: Clock) -> None:
    """A question of two people: one signs, one breaks the glass, one comes too late; then a clock that is set back."""
    people = People(kit)
    waiting = Asking(kit, lambda amount: amount, {"amount": 5}, id="decided")
    seen = waiting.seen()
    signing.vote(kit, seen.item, "approve", proof=people.yes("Ann", seen), note="fine")
    touched = people.keys["Bob"].get(seen.glass)
    signing.vote(kit, seen.item, "approve", proof=touched, break_glass=True, reason="it cannot wait")
    assert waiting.end() == 5
    with pytest.raises(Refused):
        kit.deny(seen.item, by="Cid")
    kit.accept(kit.inbox()[0]["id"], by="Ann", reason="it could not")
    clock.ahead -= 3_600_000_000
    accept_clock(kit, by="Ann", reason="it was ahead")


def held(kit: AgentKit) -> None:
    """Names that sagas claim, and what is tentative in them: confirmed, cancelled, failing, lost, and carried on."""
    with saga_scope("page-1", kit=kit) as made:
        made.execute("book", lambda: 1, semantics=COMPENSABLE, undo=undo(), tags=("money",), locks=("a", "b"))
        made.tentative("seat", confirm=undo(), cancel=undo())
        made.continue_as_new("page-2")
        made.unlock("b")
        outside(lambda: refused_a_name(kit))
    aborted(kit, "no", {"undo": undo(), "locks": ("a",)})
    with pytest.raises(SagaAborted), saga_scope("cancelled", kit=kit) as made:
        made.tentative("seat")
        raise ValueError("no")
    for handler in ("tour.broken", "tour.once"):
        with pytest.raises(Unconfirmed), saga_scope(f"not {handler}", kit=kit) as made:
            made.tentative("seat", confirm=Compensation(handler=handler, kwargs={"of": "x"}))


def refused_a_name(kit: AgentKit) -> None:
    with pytest.raises(SagaAborted), saga_scope("waits", kit=kit) as made:
        made.execute("book", lambda: 1, semantics=COMPENSABLE, undo=undo(), locks=("a",), lock_timeout=0.05)


def child(work: Callable[[], Any]) -> None:
    """A process that does this and dies."""
    if (pid := os.fork()) == 0:
        work()
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def died(folder: Path) -> None:
    """Sagas of processes that died: one resumed with other code, one undone, one with an open question."""

    def work() -> None:
        kit = home_kit(folder)
        with saga_scope("resumed", kit=kit, on_crash="resume") as made:
            made.execute("book", lambda: 1, semantics=COMPENSABLE, undo=undo())
            outside(lambda: dies_asking(kit))

    def dies_asking(kit: AgentKit) -> None:
        with saga_scope("asking", kit=kit) as made:
            made.execute("book", lambda: 1, semantics=COMPENSABLE, undo=undo())
            threading.Thread(target=lambda: (eventually(kit.inbox), os._exit(7)), daemon=True).start()
            made.execute("mail.send", lambda: 1, semantics=IRREVERSIBLE)

    child(work)
    with home_kit(folder) as kit:
        sweep(kit)
        with pytest.raises(ResumeConflict), saga_scope("resumed", kit=kit, on_crash="resume") as made:
            made.execute("other", lambda: 1, semantics=COMPENSABLE)


def outside(work: Callable[[], None]) -> None:
    """On a thread that is in no saga."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def set_back(folder: Path) -> None:
    """A home that was copied, used, and put back as it was: a new incarnation goes on."""
    shutil.copytree(folder / "home", folder / "older")
    with home_kit(folder) as kit, saga_scope("later", kit=kit) as made:
        made.execute("book", lambda: 1, semantics=COMPENSABLE)
    shutil.rmtree(folder / "home")
    shutil.copytree(folder / "older", folder / "home")
    adopt(Home(folder / "home"), "ada", "restored from a backup")
    with AgentKit(home=folder / "home", warn=lambda text: None) as kit:
        carry_over(kit)


def reconciled(kit: AgentKit) -> None:
    """The world is asked by the clock, and says otherwise than the log; a person accounts for it."""
    told = [PRESENT("there"), ABSENT("nothing goes by that name")]
    with saga_scope("order", kit=kit) as made:
        made.execute("tour.pay", lambda: 1, semantics=COMPENSABLE, undo=undo())
    kit.log.commit(Turn(3_600_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools, "_RECONCILERS", {"tour.pay": lambda: told.pop(0)})
        kit.reconcile()
        kit.reconcile()
    kit.accept(kit.inbox()[0]["id"], by="ada", reason="paid in cash")


def handed_out(kit: AgentKit) -> None:
    """A bundle was made."""
    made = Made(Path("b"), "ab" * 32, 3, 1, 0, "cd" * 32)
    kit.log.commit(lambda state, now: [copied(made, "plain", (b'{"by":"ada","to":"bob"}',))])


def redacted(folder: Path) -> None:
    """What a saga held is destroyed, after a hold on it was lifted."""
    with home_kit(folder / "redacted") as kit:
        with saga_scope("gone", kit=kit):
            pass
        [saga] = [row.saga for row in kit.log.sagas()]
        held = redact.hold(kit.log, saga, by="bob", reason="case 12", name="gone")
        redact.lift(kit.log, held.seq, by="bob", reason="closed")
        places = redact.choose(redact.openings_of(kit.log, kit.log.thread(saga))).places
        redact.redact(kit.log, places, basis="GDPR-17", by="ada", note="asked to")
        assert kit.log.finish_erasing(20).done


def under_seal(folder: Path) -> None:
    """A log is sealed, gets another key, forgets a saga, and lies in plain text again."""
    log = open_log(folder / "home", State(), warn=lambda text: None)
    log.commit(lambda state, now: [fact("saga.opened", body(label=b'"x"'), saga="gone", fence=1)])
    log.commit(lambda state, now: [fact("saga.ended", saga="gone", fence=1, out="committed")])
    one, two = Owner(os.urandom(32)), Owner(os.urandom(32))
    sealing.begin(log, one, "ada")
    sealing.finish(log)
    sealing.rotate(log, two, "ada")
    sealing.forget(log, ["gone"], "ada", "asked to")
    sealing.end(log, "ada")
    sealing.finish(log)
    log.close()


def compacted(kit: AgentKit) -> None:
    """Records were removed."""
    for number in range(150):
        with saga_scope(f"old-{number}", kit=kit):
            pass
    settled = [row.saga for row in kit.log.sagas() if not row.open]
    compact(kit.log, settled[-3:], within_ms=1, use=lambda saga: {"sagas": 1}, by="ada", cert="ef" * 32)


class Toured:
    """Kind -> the keys, and the fields of openings, that its facts were written with."""

    def __init__(self) -> None:
        self.keys: dict[str, set[str]] = {}
        self.fields: dict[str, set[str]] = {}

    def take(self, kit: AgentKit) -> None:
        kit.log.flush()
        for record in whole(kit.log.records()):
            entry = json.loads(record.line)
            self.keys.setdefault(entry["kind"], set()).update(set(entry) - COMMON)
            self.fields.setdefault(entry["kind"], set()).update(raw_fields(record.blob))


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Toured:
    folder = tmp_path_factory.mktemp("tour")
    patch = pytest.MonkeyPatch()
    patch.setattr(unwind, "BACKOFF", 0.001)
    patch.setenv("AMENDS_ANCHORS", str(folder / "anchors"))
    toured = Toured()
    try:
        with AgentKit.in_memory() as kit:
            reconciled(kit)
            handed_out(kit)
            toured.take(kit)
        with AgentKit.in_memory() as kit:
            compacted(kit)
            toured.take(kit)
        for part in (given_up, asked, held):
            clock = Clock()
            with AgentKit.in_memory(clock=clock) as kit:
                part(kit)
                clock.ahead = 10_000_000
                kit.log.commit(lambda state, now: ())
                toured.take(kit)
            CURRENT.set(None)
        clock = Clock()
        with AgentKit.in_memory(clock=clock) as kit:
            keyed(kit, clock)
            toured.take(kit)
        clock = Clock()
        with AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(quorum=3)), clock=clock) as kit:
            decided(kit, clock)
            toured.take(kit)
        levels = (EscalationLevel(("boss",), 0.001),)
        with AgentKit.in_memory(gate=PreFlightGate(approval=ApprovalPolicy(levels=levels))) as kit:
            told(kit)
            stopped(kit)
            toured.take(kit)
        with AgentKit.in_memory(gate=limited()) as kit:
            metered(kit)
            toured.take(kit)
        with home_kit(folder / "kept") as kit:
            kept(kit)
            toured.take(kit)
        redacted(folder)
        with home_kit(folder / "redacted") as kit:
            toured.take(kit)
        under_seal(folder / "sealed")
        with home_kit(folder / "sealed") as kit:
            toured.take(kit)
        for on_file in (died, set_back):
            on_file(folder)
            with home_kit(folder) as kit:
                toured.take(kit)
            CURRENT.set(None)
    finally:
        patch.undo()
    return toured


# ---- the page --------------------------------------------------------------------------------------------------------


def test_every_kind_is_on_the_page_and_no_other() -> None:
    assert set(keys_on_the_page()) == {*LOG_KINDS, *RUNTIME_KINDS}


@pytest.mark.parametrize("kind", [*LOG_KINDS, *RUNTIME_KINDS])
def test_the_keys_and_fields_of_a_kind_are_those_that_the_engine_writes(tour: Toured, kind: str) -> None:
    assert kind in tour.keys, "the tour does not meet it"
    written, _, fields = keys_on_the_page()[kind]
    assert written == tour.keys[kind] and tour.fields[kind] <= fields


def test_keys_kept_for_later_are_in_the_vectors_and_are_not_written(tour: Toured) -> None:
    frozen: dict[str, set[str]] = {}
    for told in FROZEN["entries"]:
        entry = json.loads(told["line"])
        frozen.setdefault(entry["kind"], set()).update(set(entry) - COMMON)
    for kind, (written, later, _) in keys_on_the_page().items():
        assert not later & tour.keys[kind] and later == frozen[kind] - written, kind


def test_the_codes_of_verify_are_those_on_the_page() -> None:
    told = {code.strip("`"): (verdict, meaning) for code, verdict, meaning in rows("8.")}
    assert told == {code: (verdict, meaning) for code, (verdict, meaning) in CODES.items()}


def test_the_tables_on_the_page_are_those_of_the_file(tmp_path: Path) -> None:
    with home_kit(tmp_path) as kit:
        path = kit.log.path  # type: ignore[attr-defined]
    db = apsw.Connection(path)
    made = {name for (name,) in db.execute("select name from sqlite_schema where type = 'table'")}
    assert {cells[0].strip("`") for cells in rows("7.") if len(cells) == 2} == made | {
        "fentry", "fstub", "fcheckpoint", "stub", "checkpoint", "datakey", "sealing",
    }  # fmt: skip
