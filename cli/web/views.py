"""What the pages show, as data: read from the same fold as everything else, and nothing of it is decided here.

Values go out as the log has them, tagged where JSON lacks a word; the page writes them for the eye and escapes what
could bite. Nothing is cut here: whoever decides sees all of it. Secrets are not in the log, so they are in no view.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec

from ...runtime.followup import resolve
from ...runtime.gate import keyring, signing
from ...runtime.gate.approvals import APPROVE, APPROVED, PENDING
from ...runtime.gate.levels import LEVELS, NAMED
from ...runtime.gate.proof import WEBAUTHN
from ...runtime.inbox import commands, in_the_way, items, queue
from ...runtime.kit import AgentKit
from ...runtime.openings import when
from ...runtime.story import Stories, Story
from ...store.errors import Refused
from .. import telling
from ..approvals import ways_of

SAGAS = 200
"""Sagas that one look at the list shows at most, and at first a part of them."""


def inbox(kit: AgentKit) -> dict[str, Any]:
    """Everything that needs a person, oldest first."""
    found = items(kit)
    for item in found:
        if "approval" in item:
            item["approval"] |= _who(kit, item["approval"]["request"])
    return {"items": found, "now": _now(kit), "size": kit.log.size}


def _who(kit: AgentKit, digest: str) -> dict[str, str]:
    """Who asks, as the request says; empty where its text is gone."""
    asked = kit.engine.state.approvals.requests.get(digest)
    text = signing.request_text(kit.log, asked) if asked else None
    request = msgspec.json.decode(text) if text else {}
    return {name: request.get(name, "") for name in ("requester", "on_behalf_of")}


def inside(kit: AgentKit) -> dict[str, Any]:
    """What every page shows in its frame: how much waits for a person."""
    return {"waiting": len(queue(kit)), "origin": kit.log.origin, "size": kit.log.size}


def _now(kit: AgentKit) -> str:
    return when(kit.log.clock.wall_us())


def sagas(kit: AgentKit, limit: int = 50) -> dict[str, Any]:
    """The newest sagas and what became of them; more: whether there are older ones."""
    kit.log.refresh()
    stories = iter(Stories(kit))
    rows = [story.row() for story in itertools.islice(stories, max(1, min(limit, SAGAS)))]
    return {
        "sagas": rows,
        "more": next(stories, None) is not None,
        "most": SAGAS,
        "now": _now(kit),
        "size": kit.log.size,
    }


def saga(kit: AgentKit, name: str) -> dict[str, Any]:
    """One saga: its steps with what they were given, returned and would be undone by, and its story in sentences."""
    kit.log.refresh()
    story = Stories(kit).of(resolve(kit, name))
    document = story.document()
    for step, one in zip(document["steps"], story.steps, strict=True):
        step["reasons"] = telling.reasons(one)
    told = [{"at": at, "place": place, "said": said} for at, place, said in telling.events(story)]
    return {**document, "story": told, "needs": _needs(kit, story), "label": story.root.label, "size": kit.log.size}


def _needs(kit: AgentKit, story: Story) -> list[Mapping[str, Any]]:
    family = {thread.saga.id for thread in story.threads}
    return [
        {"id": item.id, "kind": item.kind, "reason": item.reason, "commands": commands(item)}
        for item in queue(kit)
        if item.saga is not None and item.saga.id in family
    ]


# ---- an approval -----------------------------------------------------------------------------------------------------


def review(kit: AgentKit, item: str) -> dict[str, Any]:
    """A request as it is signed, and what decides it: the page draws it from the text of the request alone."""
    seen = signing.review(kit, item)
    here = [one for one in seen.credentials if one.kind == WEBAUTHN]
    return {
        "item": seen.item,
        "saga": seen.saga,
        "request": seen.request.decode(),
        "digest": seen.digest,
        "code": seen.code,
        "remarks": seen.remarks,
        "left_ms": seen.left_ms,
        "have": seen.have,
        "need": seen.need,
        "level": seen.level_word,
        "evidence": LEVELS[seen.level][1],
        "named": seen.level == NAMED and not seen.roles,
        "standing": seen.standing,
        "takes_no": seen.standing in (PENDING, APPROVED),
        "voted": [{"by": by, "out": out, "level": level} for by, out, level in seen.voted],
        "credentials": [{"id": one.id, "person": one.person, "label": one.label} for one in here],
        "ways": [way for way in ways_of(seen, APPROVE) if not way.endswith("--page")],
        "break_glass": seen.break_glass,
        "rp_id": keyring.read(kit.log).settings.rp_id,
        "size": kit.log.size,
    }


def vote(
    kit: AgentKit, item: str, digest: str, verdict: str, by: str, note: str, proof: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Record a decision about the very request that the page shows. Raises Refused, Unproven, BadValue."""
    if proof is None and signing.review(kit, item).digest != digest:  # a key signs the digest itself
        raise Refused("Another request is asked now.", next="Look at it first.", code="superseded")
    receipt = signing.vote(kit, item, verdict, by=by, proof=proof, note=note)
    way = in_the_way(kit, digest) if receipt.standing == APPROVED else []
    return {**receipt._asdict(), "in_the_way": way}
