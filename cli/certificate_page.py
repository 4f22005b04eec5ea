"""A certificate for people: one page of text or HTML, made from the statement alone, with nothing loaded from anywhere.

It says what is claimed, what it rests on, what is not claimed, and how somebody else checks it. Texts of the log are
escaped: in HTML as HTML, in both as control characters.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from . import ui

CLAIMS = {
    "SAFE": "Every effect in these records is accounted for.",
    "UNSAFE": "At least one effect in these records is not accounted for.",
    "INDETERMINATE": "Nobody can say yet whether every effect in these records is accounted for.",
}
_COUNTED = {
    "sagas": "sagas", "open": "of them still open", "effects": "effects",
    "committed": "committed with their saga", "approved": "irreversible, approved by people before they began",
    "break_glass": "of those by breaking the glass", "compensated": "taken back",
    "accepted": "accepted by a named person", "not_happened": "known not to have happened",
    "unaccounted": "not accounted for", "carried": "taken over by a later saga, and counted there",
    "by_probe": "not known once, settled by a probe",
    "by_compensation": "not known once, settled by a compensation that was answered",
    "by_person": "not known once, settled by a named person",
    "by_answer": "not known once, settled by their own answer",
    "compacted": "records removed since, counted by the certificates below",
}  # fmt: skip
TEMPLATE = (
    "If this is to be shown to a court of the United States, Federal Rules of Evidence 902(13) and 902(14) speak of a "
    "certification by a qualified person; what that person would name is above: the process (an append-only log whose "
    "heads are signed), the tool and its version, the root, and the SHA-256 of this certificate. This is a template "
    "and not legal advice."
)

Part = tuple[str, list[str]]


def _parts(statement: dict[str, Any], id: str) -> Iterator[Part]:
    told = statement["predicate"]
    head, counts = told["log"], told["counts"]
    yield (
        "Claim",
        [
            f"{told['verdict']}: {CLAIMS[told['verdict']]}",
            f"Records {told['window'][0]} to {head['size'] - 1} of log {head['origin']}, by rules {told['rules']}.",
        ],
    )
    yield "Counted", [f"{counts[name]} {said}" for name, said in _COUNTED.items() if counts[name] or name == "effects"]
    found = [
        f"{one['code']}: record {one['seq']}, saga {one['saga'] or '-'}, step {one['step']}: {one['text']}"
        for one in told["findings"]
    ]
    if found:
        yield "Findings", found + ([f"{told['more']} more are not listed."] if told["more"] else [])
    yield (
        "What it rests on",
        [
            "Headers of records only. No argument, result or name was read.",
            f"Made at {told['time']} by {told['tool']}, after the log was verified.",
            f"Root (RFC 6962, SHA-256): {head['root']}",
            f"SHA-256 of this certificate: {id}",
            *[f"Certificate over removed records, SHA-256: {prior}" for prior in told["prior"]],
            *_follows(told),
            "The signed head (C2SP signed note):",
            *(line for line in head["note"].splitlines() if line),
        ],
    )
    yield "What is not claimed", told["not_claimed"]
    yield (
        "How to check it",
        [
            "amends certify --check CERTIFICATE [HOME or BUNDLE]",
            "Without amends: DSSE with an in-toto Statement v1; its key is `export` in the log's first record.",
        ],
    )
    yield "As evidence", [TEMPLATE]


def _follows(told: dict[str, Any]) -> list[str]:
    before = told.get("follows")
    return [f"The log follows {before['origin']} at {before['size']} records, which is not judged."] if before else []


def text(statement: dict[str, Any], id: str) -> str:
    """The page as plain text."""
    lines = ["ROLLBACK SAFETY CERTIFICATE"]
    for title, said in _parts(statement, id):
        lines += ["", title.upper(), *(f"  {ui.clean(line)}" for line in said)]
    return "\n".join(lines) + "\n"


def page(statement: dict[str, Any], id: str) -> str:
    """The page as one HTML file."""
    verdict = statement["predicate"]["verdict"]
    sections = "".join(
        f"<h2>{escape(title)}</h2><ul>{''.join(f'<li>{escape(ui.clean(line))}</li>' for line in said)}</ul>\n"
        for title, said in _parts(statement, id)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        "<title>Rollback safety certificate</title>\n<style>body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;"
        "margin:2rem auto;padding:0 1rem}li{overflow-wrap:anywhere}h1 b{display:block}</style></head><body>\n"
        f"<h1>Rollback safety certificate <b>{escape(verdict)}</b></h1>\n{sections}</body></html>\n"
    )
