"""The verdict of a certificate, worked out by a program that imports nothing of amends.

    python certify_alone.py < entries.ndjson        SAFE, UNSAFE or INDETERMINATE, and a line for each finding

It reads the header lines of a log (one JSON object a line, as they are hashed) and goes by runtime/SEMANTICS.md,
sections 1 and 10, which it was written from. Certificates over removed records are not read: where a compaction names
one, the verdict here is at best INDETERMINATE.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

UNDECIDED = {"running", "review_open", "nowhere", "compacted", "missing"}


class Result(NamedTuple):
    verdict: str
    findings: list[tuple[int, str, int, str]]
    counts: dict[str, int]


class Effect:
    """A step, with the state that section 1 gives it."""

    def __init__(self) -> None:
        self.state = "new"
        self.place = 0
        self.tool = self.sem = self.inverse = self.resource = ""
        self.provisional = self.due_again = False
        self.hidden = self.unknown = self.nameless = False
        self.basis = self.yes = ""
        self.glasses: list[int] = []
        self.moved = self.again = False


class Piece:
    """A saga."""

    def __init__(self, driver: str) -> None:
        self.driver, self.out, self.concluding, self.ended = driver, "", False, False
        self.steps: dict[int, Effect] = {}
        self.people: set[int] = set()


def verdict(lines: Iterable[bytes | str]) -> Result:
    return Book().read(json.loads(line) for line in lines)


class Book:
    def __init__(self) -> None:
        self.sagas: dict[str, Piece] = {}
        self.places: dict[int, tuple[str, int]] = {}  # of every announcement: saga and step
        self.requests: dict[str, dict[str, Any]] = {}
        self.votes: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.reviewed: set[int] = set()
        self.drifts: dict[int, tuple[int, str, int]] = {}
        self.claims: list[tuple[int, int, str, int]] = []
        self.later: dict[int, int] = {}  # a place that was taken over -> by which announcement
        self.moves = 0
        self.runs: list[list[int]] = []
        self.removals: list[dict[str, Any]] = []

    def read(self, entries: Iterable[dict[str, Any]]) -> Result:
        expected, gaps = 0, []
        for entry in entries:
            if entry["seq"] > expected:
                gaps.append((expected, entry["seq"]))
            expected = entry["seq"] + 1
            self.one(entry)
        return self.sum_up(gaps)

    def one(self, e: dict[str, Any]) -> None:
        kind, part = e["kind"], e.get("part")
        if part and part[0] < part[1]:
            return
        if "saga" not in e:
            self.outside(e)
            return
        if kind == "saga.opened":
            self.sagas[e["saga"]] = Piece(e.get("driver", ""))
            return
        saga = self.sagas[e["saga"]]
        if kind.startswith("saga."):
            self.saga_fact(saga, e)
        elif e.get("step"):
            step = saga.steps.setdefault(e["step"], Effect())
            self.step_fact(saga, step, e)
            if kind in ("step.accepted", "step.probed", "step.landed", "undo.done"):
                saga.people.discard(e["step"])

    def outside(self, e: dict[str, Any]) -> None:
        kind = e["kind"]
        if kind == "vote.cast" and "why" not in e:
            self.votes[e["request"]].append(e)
        elif kind == "review.closed":
            self.reviewed.add(e["ref"])
        elif kind == "effect.observed":
            if e["out"] == "drift":
                self.drifts[e["ref"]] = (e["seq"], e.get("of", ""), e.get("step", 0))
                return
            place = self.now(e["ref"])
            if e["out"] == "confirmed" and place in self.places:
                name, number = self.places[place]
                saga, step = self.sagas[name], self.sagas[name].steps[number]
                if saga.ended and step.place == place and self.fate(saga, step) == "lost_then_failed":
                    step.basis = "probe"
            if e["out"] == "confirmed" or (e["out"] == "accepted" and "c" in e):
                self.drifts.pop(e["ref"], None)
        elif kind == "compaction.made":
            self.removals.append(e)
            self.runs += e["runs"]

    def now(self, ref: int) -> int:
        """Where the effect of a place counts: with whoever took it over last."""
        while self.later.get(ref, 0) > ref:
            ref = self.later[ref]
        return ref

    def saga_fact(self, saga: Piece, e: dict[str, Any]) -> None:
        kind = e["kind"]
        if kind == "saga.taken":
            saga.driver = e.get("driver", "")
            if e.get("why") in ("retry", "resume", "undo"):
                saga.people -= {e["step"]} if e.get("step") else set(saga.people)
        elif kind in ("saga.released", "saga.suspended"):
            saga.driver = ""
        elif kind == "saga.concluding":
            saga.concluding = True
        elif kind == "saga.escalated":
            saga.people.add(e.get("step", 0))
        elif kind == "saga.ended":
            saga.ended, saga.out, saga.driver = True, e["out"], ""

    def step_fact(self, saga: Piece, step: Effect, e: dict[str, Any]) -> None:
        kind, out, before = e["kind"], e.get("out", ""), step.state
        alone = kind == "step.done" and before == "new"
        if kind in ("step.intended", "step.carried") or alone:
            self.announced(saga, step, e)
        elif "inv" in e:
            step.inverse = e["inv"]
        step.state = self.after(step, kind, out, before, e.get("scope", ""))
        if kind == "step.asked":
            self.requests[e["request"]] = e
        step.again = step.again or kind == "step.attempted" or (kind == "step.intended" and step.unknown)
        if kind.endswith(".lost"):
            step.unknown, step.basis = True, ""
        settled = {
            "step.done": "answer", "step.landed": "answer" if out == "done" or not step.again else "",
            "confirm.done": "answer", "undo.done": "compensation", "step.accepted": "person",
            "step.probed": "probe" if out in ("present", "absent") else "",
        }.get(kind, "")  # fmt: skip
        if step.unknown and settled and not (kind == "undo.done" and step.basis == "probe"):
            step.basis = settled
        if kind == "step.accepted":
            step.nameless = "c" not in e

    def after(self, step: Effect, kind: str, out: str, before: str, scope: str) -> str:
        """The state that section 1 leads to."""
        if kind == "step.carried":
            return out
        if kind == "step.probed":
            if before == "unknown":
                return {"present": "done", "absent": "failed"}.get(out, "unknown")
            return "compensated" if before == "compensation_failed" and out == "absent" else before
        if kind == "step.landed":
            return self.landed(step, out, before)
        if kind == "undo.intended":
            step.provisional = step.provisional or before == "unknown"
            step.due_again = step.due_again and scope != "undo/late"
            return "undoing"
        if kind == "undo.done":
            return "done" if step.due_again else "compensated"
        if kind == "step.refused":
            return before if before in ("unknown", "failed") else "refused"
        return {
            "step.asked": "waiting", "step.intended": "intended", "step.attempted": "intended", "step.done": "done",
            "step.failed": "failed", "step.lost": "unknown", "step.accepted": "accepted",
            "undo.failed": "compensation_failed", "undo.lost": "undo_lost", "confirm.intended": "confirming",
            "confirm.done": "confirmed", "confirm.failed": "unconfirmed", "confirm.lost": "confirm_lost",
        }[kind]  # fmt: skip

    def landed(self, step: Effect, out: str, before: str) -> str:
        """A late outcome; one that happened after a compensation that was only provisional is due once more."""
        if out == "done":
            if step.provisional and before in ("compensated", "undoing", "undo_lost", "compensation_failed"):
                step.due_again = True
            if before in ("unknown", "failed", "waiting") or (before == "compensated" and step.provisional):
                return "done"
        return "failed" if out == "failed" and before == "unknown" else before

    def announced(self, saga: Piece, step: Effect, e: dict[str, Any]) -> None:
        step.place, step.tool, step.sem = e["seq"], e.get("tool", ""), e.get("sem", "")
        step.inverse, step.resource = e.get("inv", ""), e.get("resource", "")
        self.places[e["seq"]] = (e["saga"], e["step"])
        if e.get("scope") == "fallback":
            for other in saga.steps.values():
                if other is not step and other.tool == step.tool and other.state in ("failed", "unknown"):
                    other.hidden = True
        if "request" in e:
            self.approved(step, e)
        if e["kind"] == "step.carried":
            self.carried(step, e)

    def approved(self, step: Effect, e: dict[str, Any]) -> None:
        asked = self.requests.get(e["request"])
        if asked is None or (asked["saga"], asked["step"]) != (e["saga"], e["step"]):
            return
        votes = [v for v in self.votes[e["request"]] if (v.get("of"), v.get("step")) == (asked["saga"], asked["step"])]
        least = 4 if asked["level"] == 6 else asked["level"]
        yes = {v["person"] for v in votes if v["out"] == "approve" and v["level"] >= least}
        glasses = [v["seq"] for v in votes if v["out"] == "break_glass"]
        step.yes, step.glasses = "", []
        if any(v["out"] == "deny" for v in votes):
            return
        if len(yes) >= asked["quorum"]:
            step.yes = "people"
        elif glasses:
            step.yes, step.glasses = "glass", glasses

    def carried(self, step: Effect, e: dict[str, Any]) -> None:
        self.moves += 1
        step.due_again = e.get("scope") == "undo/late"
        lost = e["out"] == "unknown"
        if e.get("ref"):
            self.claims.append((e["ref"], e["seq"], e["saga"], e["step"]))
            self.later[e["ref"]] = e["seq"]
            name, number = self.places.get(e["ref"], ("", 0))
            if name and self.sagas[name].steps[number].place == e["ref"]:
                old = self.sagas[name]
                origin = old.steps[number]
                origin.moved = True
                if old.ended and old.out == "continued":
                    step.hidden, step.yes, step.glasses = origin.hidden, origin.yes, origin.glasses
                    step.unknown, step.basis = origin.unknown, origin.basis
                lost = lost or (old.ended and origin.state in ("unknown", "intended"))
        if lost:
            step.unknown, step.basis = True, ""

    # -- the sum -------------------------------------------------------------------------------------------------------

    def fate(self, saga: Piece, step: Effect) -> str:
        out = "committed" if saga.concluding and not saga.ended else saga.out
        out = out if out in ("committed", "continued") else ""
        same = {
            "compensated": "compensated", "accepted": "accepted", "failed": "not_happened", "refused": "",
            "waiting": "", "new": "", "intended": "unknown", "unknown": "unknown",
            "compensation_failed": "compensation_failed", "undoing": "undo_unknown", "undo_lost": "undo_unknown",
            "confirming": "tentative", "confirm_lost": "tentative", "unconfirmed": "tentative",
            "done": {"committed": "committed", "continued": "left_behind"}.get(out, "standing"),
            "confirmed": "committed" if out else "standing",
        }  # fmt: skip
        found = "left_behind" if (out, step.state) == ("continued", "unknown") else same[step.state]
        if step.resource and step.state == "done" and found != "left_behind":
            return "tentative"
        if step.hidden and found in ("committed", "unknown"):
            return "fallback_hidden"
        if found in ("committed", "not_happened") and step.unknown and not step.basis:
            return "unknown" if found == "committed" else "lost_then_failed"
        if found == "committed" and step.sem == "irreversible":
            return "approved" if step.yes else "not_approved"
        if found == "accepted" and step.nameless:
            return "unnamed"
        return "orphaned" if found == "standing" and step.inverse in ("", "none") else found

    def sum_up(self, gaps: list[tuple[int, int]]) -> Result:
        found: list[tuple[int, str, int, str]] = []
        counts: dict[str, int] = defaultdict(int)
        counted: set[int] = set()
        for name, saga in self.sagas.items():
            counts["sagas"] += 1
            going = []
            for number, step in saga.steps.items():
                fate = self.fate(saga, step)
                if not fate or step.moved:
                    continue
                counted.add(step.place)
                counts["effects"] += 1
                if fate in ("committed", "approved", "compensated", "accepted", "not_happened"):
                    counts[fate] += 1
                    if step.unknown:
                        counts[f"by_{step.basis}"] += 1
                    if fate == "approved" and step.yes == "glass":
                        counts["break_glass"] += 1
                        left = set(step.glasses) - self.reviewed
                        found += [(seq, name, number, "review_open") for seq in left]
                elif not saga.ended and saga.driver and number not in saga.people:
                    going.append((step.place, number))
                else:
                    found.append((step.place, name, number, fate))
                counts["unaccounted"] += fate not in (
                    "committed", "approved", "compensated", "accepted", "not_happened",
                )  # fmt: skip
            if going:
                found.append((min(going)[0], name, min(going)[1], "running"))
        gone = {place for low, high in self.runs for place in range(low, high + 1)}
        found += [(*self.drifts[ref], "drift") for ref in self.drifts if self.now(ref) in counted]
        for ref, seq, name, number in self.claims:
            if ref not in self.places and ref not in gone:
                found.append((seq, name, number, "nowhere"))
        found += [(low, "", 0, "missing") for low, high in gaps if not set(range(low, high)) <= gone]
        found += [(e["seq"], "", 0, "compacted") for e in self.removals]
        counts["carried"] = self.moves
        codes = {code for *_, code in found}
        said = "UNSAFE" if codes - UNDECIDED else "INDETERMINATE" if codes else "SAFE"
        return Result(said, sorted(found), dict(counts))


if __name__ == "__main__":
    told = verdict(sys.stdin.buffer)
    print(told.verdict)
    for seq, saga, step, code in told.findings:
        print(f"{code}\trecord {seq}\tsaga {saga or '-'}\tstep {step}")
    sys.exit({"SAFE": 0, "UNSAFE": 1}.get(told.verdict, 3))
