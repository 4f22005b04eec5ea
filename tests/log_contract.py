"""What holds for every log: one suite, run over MemoryLog, Overlay and SqliteLog.

`Ledger` is the view it folds into: small, strict, and with a planted bug for those who ask for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from hashlib import sha512
from typing import Any

import msgspec
import pytest

from amends.store import redact
from amends.store.chain import Draft
from amends.store.clock import Now
from amends.store.entry import Entry, leaf, parse
from amends.store.errors import BadValue, Closed, Illegal, NotFound, Refused
from amends.store.log import BUFFERED, DURABLE, FILED


class Ledger:
    """Sums up `use` per saga; a step is intended before it is done."""

    version = 1

    def __init__(self) -> None:
        self.archive: Any = None
        self.spent: dict[str, int] = {}
        self.open: dict[str, list[int]] = {}
        self.lived = 0

    def fold(self, entry: Entry, lived: int) -> None:
        if entry.kind == "step.done" and entry.step not in self.open.get(entry.saga, ()):
            raise Illegal(f"step {entry.step} was never intended")
        if entry.kind == "step.failed":
            self.spent["bug"] = 1
            raise ZeroDivisionError("a bug in the view, after it has changed something")
        if entry.kind == "saga.opened":
            self.open[entry.saga] = []
        elif entry.kind == "saga.ended":
            del self.open[entry.saga]
        elif entry.kind == "step.intended":
            self.open[entry.saga].append(entry.step)
        for unit, amount in entry.use.items():
            self.spent[unit] = self.spent.get(unit, 0) + amount
        self.lived = lived

    def dump(self) -> bytes:
        return msgspec.msgpack.encode((self.spent, self.open, self.lived))

    def load(self, blob: bytes) -> None:
        self.spent, self.open, self.lived = msgspec.msgpack.decode(blob)


def facts(*drafts: Draft) -> Callable[[Any, Now], tuple[Draft, ...]]:
    return lambda view, now: drafts


def opened(saga: str, *openings: bytes) -> Draft:
    return Draft("saga.opened", {"saga": saga}, openings)


def intended(saga: str, step: int = 1, **more: Any) -> Draft:
    return Draft("step.intended", {"saga": saga, "step": step, **more}, (b'{"args":{"n":1}}',))


def done(saga: str, step: int = 1) -> Draft:
    return Draft("step.done", {"saga": saga, "step": step})


def ended(saga: str) -> Draft:
    return Draft("saga.ended", {"saga": saga, "out": "committed"})


def spend(saga: str, amount: int, cap: int, step: int = 1) -> Callable[[Any, Now], tuple[Draft, ...]]:
    """Check and debit."""

    def decide(view: Any, now: Now) -> tuple[Draft, ...]:
        if view.spent.get("eur", 0) + amount > cap:
            raise Refused("over the cap", code="limit")
        return (intended(saga, step, use={"eur": amount}),)

    return decide


def kinds(log: Any) -> list[str]:
    return [record.entry.kind for record in log.records()]


class LogContract:
    """Subclasses give a fixture `log`: open, with a Ledger, holding `self.below` entries."""

    def test_a_log_begins_with_its_genesis_and_names_the_boot(self, log: Any) -> None:
        log.commit(facts(opened("a")))
        assert kinds(log)[:3] == ["log.opened", "log.booted", "saga.opened"]
        assert log.record(1).entry.up[0] == 1

    @pytest.mark.promise("6.2")
    def test_every_entry_is_kept_verbatim_and_names_the_one_before_it(self, log: Any) -> None:
        log.commit(facts(opened("a", b'{"name":"x"}'), intended("a"), done("a")))
        prev = "0" * 64
        for seq, record in enumerate(log.records()):
            entry = parse(record.line)
            assert entry == record.entry
            assert (entry.seq, entry.prev) == (seq, prev)
            prev = leaf(record.line).hex()
        assert log.size == seq + 1

    def test_a_commit_returns_its_facts_and_the_view_has_them(self, log: Any) -> None:
        entries = log.commit(facts(opened("a"), intended("a", use={"eur": 5})))
        assert [(e.kind, e.n) for e in entries] == [("saga.opened", 1), ("step.intended", 2)]
        assert log.view.spent == {"eur": 5}
        assert log.size == entries[-1].seq + 1

    def test_an_opening_stands_beside_the_entry_that_commits_to_it(self, log: Any) -> None:
        (entry,) = log.commit(facts(opened("a", b'{"name":"x"}', b'{"who":"y"}')))
        record = log.record(entry.seq)
        assert len(entry.c) == 2 and record.blob.count(b"\n") == 2
        assert log.record(0).blob is None

    @pytest.mark.promise("6.3")
    def test_a_redaction_takes_the_openings_that_it_names_and_nothing_else(self, log: Any) -> None:
        long = b'{"text":"%b"}' % (b"pack my box " * 500)
        (first, _) = log.commit(facts(opened("a", b'{"name":"x"}', long, b'{"who":"y"}'), ended("a")))
        seq, line = first.seq, log.record(first.seq).line
        assert log.places(seq) == (0, 1, 2) and log.places(0) == ()
        redact.redact(log, [(seq, 1)], basis="GDPR-17", by="Ada", note="asked to")
        record = log.record(seq)
        assert log.places(seq) == (0, 2) and record.line == line
        assert b'"name":"x"' in record.blob and b'"who":"y"' in record.blob and b"pack my box" not in record.blob
        assert [r.blob for r in log.thread("a")][0] == record.blob
        assert log.keeping.unfinished and not log.erasure().done
        assert log.finish_erasing(20).done and log.erasure().done
        assert kinds(log)[-2:] == ["redaction.made", "erasure.done"]
        assert log.finish_erasing(20).done and kinds(log)[-1] == "erasure.done"
        redact.redact(log, [(seq, 0), (seq, 2)], basis="GDPR-17", by="Ada")
        assert log.record(seq).blob is None and log.places(seq) == ()
        with pytest.raises(NotFound):
            log.places(log.size)

    @pytest.mark.promise("6.3")
    def test_a_redaction_is_refused_twice_under_a_hold_and_in_an_open_saga(self, log: Any) -> None:
        (first,) = log.commit(facts(opened("a", b'{"name":"x"}')))
        places = [(first.seq, 0)]

        def refused() -> str:
            with pytest.raises(Refused) as caught:
                redact.redact(log, places, basis="GDPR-17", by="Ada")
            assert log.record(first.seq).blob is not None or caught.value.code == "redacted_already"
            return caught.value.code

        assert refused() == "saga_open"
        log.commit(facts(ended("a")))
        held = redact.hold(log, "a", by="Bo", reason="case 12")
        assert refused() == "held"
        redact.lift(log, held.seq, by="Bo")
        redact.redact(log, places, basis="GDPR-17", by="Ada")
        assert refused() == "redacted_already"

    @pytest.mark.promise("1.18")
    def test_a_fact_in_parts_is_one_fact_and_all_of_it_is_read_again(self, log: Any) -> None:
        bodies = tuple(b'{"at":%d,"text":"%s"}' % (n, b"pack my box " * 50) for n in range(70))
        log.commit(facts(opened("a"), intended("a")))
        entries = log.commit(facts(Draft("step.done", {"saga": "a", "step": 1, "use": {"eur": 7}}, bodies), ended("a")))
        assert [entry.part for entry in entries] == [(1, 3), (2, 3), (3, 3), ()]
        assert log.view.spent == {"eur": 7}
        *_, first, second, last, _ = log.thread("a")
        lines = b"".join((last.blob, first.blob, second.blob)).splitlines(keepends=True)
        assert [line[26:-2] for line in lines] == list(bodies)
        assert log.records(last.entry.seq, last.entry.seq + 1).__next__() == last == log.record(last.entry.seq)

    def test_a_refused_decision_leaves_no_trace_and_raises_what_it_raised(self, log: Any) -> None:
        log.commit(facts(opened("a")))
        size, image = log.size, log.view.dump()
        refusal = Refused("no")

        def refuse(view: Any, now: Now) -> tuple[Draft, ...]:
            raise refusal

        with pytest.raises(Refused) as caught:
            log.commit(refuse)
        assert str(caught.value) == "no"
        assert (log.size, log.view.dump()) == (size, image)

    def test_a_decision_that_is_illegal_half_way_leaves_no_trace(self, log: Any) -> None:
        log.commit(facts(opened("a")))
        size, image, standing = log.size, log.view.dump(), log.standing()
        with pytest.raises(Illegal):
            log.commit(facts(intended("a", 1, use={"eur": 3}), done("a", 7)))
        assert (log.size, log.view.dump(), log.standing()) == (size, image, standing)
        (entry,) = log.commit(facts(intended("a", 1, use={"eur": 4})))
        assert entry.seq == size and log.view.spent == {"eur": 4}

    def test_a_bug_in_the_view_leaves_no_trace(self, log: Any) -> None:
        log.commit(facts(opened("a")))
        with pytest.raises(ZeroDivisionError):
            log.commit(facts(Draft("step.failed", {"saga": "a", "step": 1})))
        assert "bug" not in log.view.spent
        assert log.commit(facts(intended("a")))[0].n == 2

    def test_an_illegal_fact_does_not_move_lived_time(self, log: Any) -> None:
        log.commit(facts(opened("a")))
        standing = log.standing()
        with pytest.raises(Illegal):
            log.commit(facts(Draft("step.done", {"saga": "a", "step": 7}, up=True)))
        assert log.standing() == standing

    def test_a_saga_begins_once_and_nothing_follows_its_end(self, log: Any) -> None:
        log.commit(facts(opened("a")))
        for wrong in (opened("a"), intended("b")):
            with pytest.raises(Illegal):
                log.commit(facts(wrong))
        log.commit(facts(ended("a")))
        with pytest.raises(Illegal):
            log.commit(facts(intended("a", 2)))
        with pytest.raises(Illegal):
            log.commit(facts(Draft("log.opened", {"v": 1})))

    @pytest.mark.parametrize(
        "fields",
        [{"tool": text} for text in ('a"b', "a\\b", "é", "x" * 257, "\n", "\x7f")] + [{"use": {"eur": 1 << 60}}],
        ids=["quote", "backslash", "accent", "lengthy", "newline", "delete", "huge"],
    )
    def test_what_could_not_be_read_back_is_not_written(self, log: Any, fields: dict[str, Any]) -> None:
        log.commit(facts(opened("a")))
        size = log.size
        with pytest.raises(BadValue):
            log.commit(facts(intended("a", **fields)))
        with pytest.raises(BadValue):
            log.commit(facts(Draft("n", fields)))
        assert log.size == size
        log.commit(facts(intended("a")))

    def test_records_are_read_between_two_places(self, log: Any) -> None:
        log.commit(facts(opened("a"), *[intended("a", step) for step in range(1, 600)]))
        seqs = [record.entry.seq for record in log.records()]
        assert seqs == list(range(log.size))
        assert [r.entry.seq for r in log.records(2, 5)] == [2, 3, 4]
        assert [r.entry.seq for r in log.records(log.size - 2)] == [log.size - 2, log.size - 1]
        assert list(log.records(5, 3)) == [] == list(log.records(log.size)) == list(log.records(0, 0))
        for missing in (-1, log.size):
            with pytest.raises(NotFound):
                log.record(missing)

    def test_a_saga_is_read_as_one_thread_open_or_ended(self, log: Any) -> None:
        log.commit(facts(opened("a", b'{"name":"x"}'), opened("b"), intended("a"), intended("b")))
        log.commit(facts(done("a"), ended("a"), opened("c"), ended("c")))
        assert [r.entry.n for r in log.thread("a")] == [1, 2, 3, 4]
        assert [r.entry.kind for r in log.thread("b")] == ["saga.opened", "step.intended"]
        assert [r.entry.kind for r in log.thread("c")] == ["saga.opened", "saga.ended"]
        assert log.thread("nobody") == []

    def test_sagas_are_listed_newest_first_by_pages(self, log: Any) -> None:
        for saga in "abcd":
            log.commit(facts(opened(saga), intended(saga)))
        log.commit(facts(ended("b"), ended("d")))
        rows = log.sagas()
        assert [row.saga for row in rows] == ["d", "c", "b", "a"]
        assert [row.open for row in rows] == [False, True, False, True]
        assert [log.record(row.head).entry.kind for row in rows][:2] == ["saga.ended", "step.intended"]
        page = log.sagas(limit=2)
        assert page == rows[:2]
        assert log.sagas(limit=2, before=page[-1].first) == rows[2:]
        assert [row.saga for row in log.sagas(open_only=True)] == ["c", "a"]

    def test_a_view_may_ask_for_an_ended_saga_while_it_decides(self, log: Any) -> None:
        log.commit(facts(opened("a", b'{"name":"x"}'), ended("a"), opened("b")))
        seen = []

        def look(view: Any, now: Now) -> tuple[Draft, ...]:
            seen.append([r.entry.kind for r in view.archive.thread("a")])
            return (intended("b"),)

        log.commit(look)
        assert seen == [["saga.opened", "saga.ended"]]

    def test_a_decision_cannot_commit_itself(self, log: Any) -> None:
        log.commit(facts(opened("a")))

        def greedy(view: Any, now: Now) -> tuple[Draft, ...]:
            log.commit(facts(intended("a")))
            return ()

        with pytest.raises(Closed):
            log.commit(greedy)
        assert kinds(log)[-1] == "saga.opened"

    def test_check_and_debit_cannot_come_apart_between_threads(self, log: Any) -> None:
        log.commit(facts(opened("a")))
        refused = []

        def work() -> None:
            for _ in range(25):
                try:
                    log.commit(spend("a", 1, 100))
                except Refused:
                    refused.append(1)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert log.view.spent == {"eur": 100}
        assert len(refused) == 100
        assert [r.entry.n for r in log.thread("a")] == list(range(1, 102))

    def test_tasks_commit_together_and_each_gets_its_own_answer(self, log: Any) -> None:
        log.commit(facts(opened("a")))

        async def work(amount: int) -> Any:
            try:
                return await log.acommit(spend("a", amount, 10), DURABLE)
            except Refused as refusal:
                return refusal

        async def main() -> list[Any]:
            return await asyncio.gather(*[work(amount) for amount in (4, 7, 6)])

        first, second, third = asyncio.run(main())
        assert isinstance(second, Refused)
        assert first[0].use == {"eur": 4} and third[0].use == {"eur": 6}

    @pytest.mark.promise("1.6")
    def test_the_facts_of_a_cancelled_waiter_stand(self, log: Any) -> None:
        log.commit(facts(opened("a")))

        async def main() -> None:
            task = asyncio.ensure_future(asyncio.wait_for(log.acommit(facts(intended("a"))), 10))
            future = log.acommit(facts(intended("a", 2)))
            await asyncio.sleep(0)
            task.cancel()
            future.cancel()
            await log.acommit(facts(intended("a", 3)))

        asyncio.run(main())
        assert sorted(r.entry.step for r in log.thread("a")) == [0, 1, 2, 3]

    def test_several_loops_in_several_threads_share_a_log(self, log: Any) -> None:
        log.commit(facts(opened("a")))
        wrong = []

        async def work(base: int) -> None:
            for step in range(base, base + 20):
                (entry,) = await log.acommit(facts(intended("a", step)))
                if entry.step != step:
                    wrong.append(step)

        async def many(base: int) -> None:
            await asyncio.gather(work(base), work(base + 100))

        threads = [threading.Thread(target=asyncio.run, args=(many(base),)) for base in (1000, 2000, 3000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads) and not wrong
        assert len(log.thread("a")) == 121

    def test_appended_facts_are_there_after_a_flush_or_the_next_commit(self, log: Any) -> None:
        log.commit(facts(opened("a")), FILED)
        log.append(facts(intended("a", 1)))
        log.flush()
        log.append(facts(intended("a", 2)))
        log.commit(facts(intended("a", 3)), BUFFERED)
        assert [r.entry.step for r in log.thread("a")] == [0, 1, 2, 3]

    def test_an_appended_fact_that_is_refused_is_said(self, log: Any) -> None:
        log.commit(facts(opened("a")))
        log.append(facts(done("a", 9)))
        log.flush()
        assert any("never intended" in text for text in log.warnings)

    def test_whoever_waits_for_growth_is_woken_by_it(self, log: Any) -> None:
        log.commit(facts(opened("a")))
        size = log.size
        assert not log.wait(size, 0.01)
        found = []
        waiter = threading.Thread(target=lambda: found.append(log.wait(size, 30)))
        waiter.start()
        log.commit(facts(intended("a")))
        waiter.join(40)
        assert found == [True]
        assert log.wait(size, 0)

    def test_a_question_meets_no_half_folded_fact(self, log: Any) -> None:
        log.commit(facts(opened("a")))
        stop = threading.Event()

        def work() -> None:
            step = 0
            while not stop.is_set():
                step += 2
                log.commit(facts(intended("a", step, use={"eur": 1}), intended("a", step + 1, use={"usd": 1})), FILED)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            seen = [
                log.look(lambda view, now: (view.spent.get("eur", 0), view.spent.get("usd", 0), len(view.open["a"])))
                for _ in range(300)
            ]
        finally:
            stop.set()
            thread.join(30)
        assert all(eur == usd and steps == eur + usd for eur, usd, steps in seen)
        assert log.look(lambda view, now: now.at) > log.record(log.size - 1).entry.at

    def test_the_image_of_a_log_is_of_one_moment(self, log: Any) -> None:
        log.commit(facts(opened("a"), intended("a", use={"eur": 2})))
        view, chain = log.image()
        other = Ledger()
        other.load(view)
        assert other.spent == log.view.spent and chain == log.standing()

    def test_a_closed_log_says_so(self, log: Any) -> None:
        log.commit(facts(opened("a")))
        log.close()
        log.close()
        with pytest.raises(Closed):
            log.commit(facts(intended("a")))
        with pytest.raises(Closed):
            log.append(facts(intended("a")))
        with pytest.raises(Closed):
            log.refresh()
        with pytest.raises(Closed):
            log.wait(log.size, 5)

    def test_whoever_waits_hears_that_the_log_is_closed(self, log: Any) -> None:
        """Else whoever waits in a loop would go round and round, and take the interpreter from everybody else."""
        heard: list[Any] = []

        def work() -> None:
            try:
                heard.append(log.wait(log.size, 30))
            except Closed as error:
                heard.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.05)
        log.close()
        thread.join(20)
        assert [type(one) for one in heard] == [Closed]


class Keys:
    """A device for tests: signs with a hash, and remembers what it anchored."""

    origin = "amends.local/test"

    def __init__(self) -> None:
        self.anchored: list[tuple[int, bytes, bytes]] = []

    def genesis(self) -> Draft:
        return Draft("log.opened", {"v": 1})

    def sign(self, size: int, root: bytes) -> bytes:
        return sha512(b"%d %b" % (size, root)).digest()

    def anchor(self, size: int, root: bytes, signature: bytes) -> bool:
        assert signature == self.sign(size, root)
        self.anchored.append((size, root, signature))
        return True
