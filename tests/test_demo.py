"""The demo does what it tells: ledger and log, asked and read by somebody else, agree with it."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from worlds import PROGRAM

from amends.runtime.state import State
from amends.store.audit import verify
from amends.store.home import Home
from amends.store.identity import open_log


def spy_on(folder: Path, child: subprocess.Popen[str]) -> dict[str, Any]:
    """What the demo's ledger said last, asked again and again until the demo ends."""
    last: dict[str, Any] = {}
    url = ""
    while child.poll() is None:
        for path in folder.glob("amends-demo-*/home/handlers.toml"):
            found = re.search(r"http://127\.0\.0\.1:\d+", path.read_text())
            url = found[0] if found else url
        for word in ("effects", "attempts", "standing", "counts") if url else ():
            try:
                with urllib.request.urlopen(f"{url}/{word}", timeout=5) as answer:
                    last[word] = json.load(answer)
            except (OSError, http.client.HTTPException):
                break  # the ledger ends with the demo, perhaps in the middle of an answer
        time.sleep(0.005)
    return last


@pytest.fixture
def quiet(tmp_path: Path) -> dict[str, str]:
    """An environment with nothing in it but a place for temporary files."""
    return {"TMPDIR": str(tmp_path), "PATH": "/nowhere", "HOME": str(tmp_path / "nobody")}


@pytest.mark.promise("4.1")
def test_what_the_demo_tells_is_what_the_ledger_and_the_log_say(
    tmp_path: Path, quiet: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([*PROGRAM, "demo", "--json", "--keep"], env=quiet, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)  # fmt: skip
    seen = spy_on(tmp_path, child)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, (out, err)
    told = json.loads(out)

    charges = [effect for effect in seen["effects"] if effect["kind"] == "charge"]
    refunds = [effect for effect in seen["effects"] if effect["kind"] == "refund"]
    assert [effect["body"]["what"] for effect in charges] == ["train", "hotel", "flight"]
    assert [effect["of"] for effect in refunds] == [effect["id"] for effect in reversed(charges)]
    assert seen["standing"] == [] and all(count == {"attempts": 1, "effects": 1} for count in seen["counts"].values())
    flight = next(attempt for attempt in seen["attempts"] if attempt["body"].get("what") == "flight")
    assert flight["state"] == "gone", "its caller was killed in the middle of it"
    ledger = told["ledger"]
    assert (ledger["attempts"], ledger["charges"], ledger["refunds"]) == (len(seen["attempts"]), 3, 3)
    assert ledger["landed_after_death"] is True and ledger["standing"] == 0

    monkeypatch.setenv("AMENDS_ANCHORS", told["anchors"])
    home = Home(told["home"])
    log = open_log(home, State(), write=False, warn=lambda text: None)
    entries = [record.entry for record in log.records()]
    log.close()
    assert told["log"]["records"] == len(entries) and entries[-1].out == "compensated"
    assert told["log"]["undone"] == ["flight.pay", "hotel.pay", "train.pay"]
    assert {entry.driver for entry in entries if entry.kind == "saga.opened"}.isdisjoint(
        entry.driver for entry in entries if entry.kind == "saga.taken"
    ), "another process took it over"
    assert verify(home, view_factory=State).verdict == told["verify"]["verdict"] == "INTACT"


def test_the_demo_speaks_plainly_and_leaves_nothing_behind(tmp_path: Path, quiet: dict[str, str]) -> None:
    ran = subprocess.run([*PROGRAM, "demo"], env=quiet, text=True, capture_output=True, timeout=60)
    assert ran.returncode == 0, ran
    assert "youngest first: flight.pay, hotel.pay, train.pay" in ran.stdout
    assert "0 payments left standing" in ran.stdout and "nothing is left standing" in ran.stdout
    assert list(tmp_path.iterdir()) == [], "neither a folder nor a home of the user"


def test_the_demo_touches_no_home_that_it_is_told_of(tmp_path: Path) -> None:
    env = {**os.environ, "AMENDS_HOME": str(tmp_path / "mine"), "AMENDS_ANCHORS": str(tmp_path / "my-anchors")}
    ran = subprocess.run([*PROGRAM, "demo", "--json"], env=env, text=True, capture_output=True, timeout=60)
    assert json.loads(ran.stdout)["ok"] is True, ran
    assert not (tmp_path / "mine").exists() and not (tmp_path / "my-anchors").exists()
