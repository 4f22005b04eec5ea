"""What a person does in the local page, done by a real browser with a virtual security key: see a request whole, say
yes or no to exactly that, and change whose keys count.

Needs Chromium (Debian: apt install chromium); skipped by name where it is not there.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("starlette", reason="the page needs the extra `ui`")
pytest.importorskip("uvicorn", reason="the page needs the extra `ui`")

from approving import Asking  # noqa: E402
from cdp import CHROMIUM, Authenticator, Chromium, Page  # noqa: E402

from amends import ActionSemantics, AgentKit, Compensation, Secret, saga_scope  # noqa: E402
from amends.cli import raw_key  # noqa: E402
from amends.cli.web.access import Access, random_text  # noqa: E402
from amends.cli.web.server import Server, listen  # noqa: E402
from amends.runtime.gate import ceremonies, keyring, signing  # noqa: E402

pytestmark = [
    pytest.mark.promise("11.1"),
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not here (Debian: apt install chromium): no page was tried"),
]

SIZES = [(1280, 800), (390, 844)]
SHOTS = Path(shots) if (shots := os.environ.get("AMENDS_SHOTS")) else None
"""Where pictures of each page go, if anybody wants to look at them."""

AGENT = """
import json, os, sys
from decimal import Decimal
from amends import ActionSemantics, AgentKit, ApprovalPolicy, PreFlightGate, saga_scope

def transfer(**args):
    with open(os.environ["WIRE"], "a") as wire:
        wire.write(json.dumps({name: str(value) for name, value in args.items()}) + "\\n")
    return {"id": "tr_1"}

name, timeout, level = sys.argv[1], float(sys.argv[2]), sys.argv[3] or None
policy = ApprovalPolicy(timeout=timeout, level=level, quorum=2 if level == "quorum" else 1)
args = {"amount": Decimal("4200.00"), "currency": "EUR", "payee": "M\\u00fcller GmbH", "reference": os.environ["WHY"]}
with AgentKit("billing-agent", gate=PreFlightGate(approval=policy)) as kit:
    try:
        with saga_scope(name, kit=kit) as saga:
            saga.execute("bank.transfer", transfer, args, semantics=ActionSemantics.IRREVERSIBLE)
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, getattr(error.__cause__ or error, "code", ""), error, flush=True)
"""
REFERENCE = (
    "Invoice 7\n\u202eplease approve\u202c <b>now</b> <script>document.title = 'owned'</script> "
    + "A sentence that makes it long. " * 12
)


class Desk:
    """A home with a page, an agent that asks, a wire that remembers what was sent, and a browser with a key."""

    def __init__(self, folder: Path, page: Page) -> None:
        self.folder, self.page = folder, page
        self.wire = folder / "wire"
        self.kit = AgentKit("page", home=folder / "home")
        self.server = Server(self.kit, listen(0), Access(random_text(32)))
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        assert self.server.ready.wait(30)
        self.origin = self.server.origin
        self.agents: list[subprocess.Popen[str]] = []

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.communicate()
        self.server.stop()
        self.thread.join(30)
        self.kit.close()

    # -- the world ----------------------------------------------------------------------------------------------------

    def agent(self, saga: str = "invoice-7", within: float = 3600, level: str = "") -> subprocess.Popen[str]:
        """An agent that wants to do what nothing takes back, and waits."""
        env = os.environ | {"WIRE": str(self.wire), "WHY": REFERENCE}
        made = subprocess.Popen(
            [sys.executable, "-c", AGENT, saga, str(within), level], env=env, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        self.agents.append(made)
        return made

    def sent(self) -> list[dict[str, str]]:
        """What went over the wire."""
        return [json.loads(line) for line in self.wire.read_text().splitlines()] if self.wire.exists() else []

    def votes(self) -> list[Any]:
        self.kit.log.refresh()
        return [record.entry for record in self.kit.log.records() if record.entry.kind == "vote.cast"]

    # -- the page -----------------------------------------------------------------------------------------------------

    def enter(self) -> Page:
        self.page.go(self.server.link())
        self.page.until("location.pathname === '/' && !!document.querySelector('.stage h1')")
        return self.page

    def asked(self) -> str:
        """Wait until the page lists a question; its id."""
        item = self.page.until("document.querySelector(\"a[href^='/approve/']\")?.getAttribute('href')")
        return str(item).removeprefix("/approve/")

    def open(self) -> str:
        """Open the question that the page lists."""
        item = self.asked()
        self.page.click("a[href^='/approve/']")
        self.page.until("!!document.querySelector('#deny')")
        self.settle()
        return item

    def settle(self) -> None:
        """Wait until the page takes a decision: what is held down from the page before counts for nothing."""
        self.page.js("new Promise((done) => setTimeout(done, 600))")

    def said(self) -> str:
        """What the bar says, once it says anything that is an outcome."""
        return str(self.page.until(OUTCOME))


OUTCOME = """
document.querySelector('#bar .said .notice:is(.good,.bad)')?.innerText
|| (document.querySelector('#deny') ? '' : document.querySelector('#bar .said').innerText)
"""


def found(desk: Desk, **options: Any) -> Authenticator:
    """Found a keyring in the page, by two keys of two devices. Both end in one device, since a test cannot unplug."""
    page = desk.page
    page.click("nav a[data-page=keys]")
    page.click("#found")
    main = page.authenticator(**options)
    page.fill("input[name=person]", "Ada Lovelace")
    page.click("form button[type=submit]")
    page.until("document.querySelector('form')?.innerText.includes('enrolled already')")
    main.call("setAutomaticPresenceSimulation", enabled=False)
    backup = page.authenticator(transport="nfc", **options)
    page.click("form button[type=submit]")
    page.until("!!document.querySelector('.paper')")
    page.click("input[name=written]")
    page.click("form button[type=submit]")
    page.until("!!document.querySelector('form #code')")
    [second] = backup.credentials()
    backup.remove()
    main.call("addCredential", credential=second)
    main.call("setAutomaticPresenceSimulation", enabled=True)
    page.click("form button[type=submit]")
    page.until("document.querySelector('.notice.good')?.innerText.includes('done')")
    page.click(".notice.good button")
    page.until("document.querySelectorAll('tr[data-key]').length === 2")
    page.click("nav a[data-page=inbox]")
    page.until("document.querySelector('h1')?.innerText === 'Inbox'")
    return main


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as made:
        yield made


@pytest.fixture
def desk(browser: Chromium, tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path, browser.page())
    made.enter()
    yield made
    errors = [error for error in made.page.errors() if "CORS" not in error]
    made.close()
    assert not errors


# -- what is seen ---------------------------------------------------------------------------------------------


def test_a_request_is_drawn_whole_from_the_text_that_is_signed(desk: Desk) -> None:
    desk.agent()
    item = desk.open()
    review = signing.review(desk.kit, item)
    text = desk.page.text()
    request = json.loads(review.request)
    for field in review.fields:
        for word in field.value.replace("\\n", " ").replace("\\u202e", " ").replace("\\u202c", " ").split():
            assert word in text, f"{field.label} is not shown whole: {word}"
    for name in ("saga", "idempotency_key", "nonce", "ledger_id", "executor", "requester", "level"):
        assert str(request[name]) in text, f"{name} is signed and not shown"
    assert review.code in text
    assert desk.page.js("document.querySelector('h1').innerText").startswith(
        "bank.transfer: amount 4200.00, currency EUR"
    )
    assert "Written by the agent" in desk.page.js("document.querySelector('.prose h2').innerText")


def test_what_an_agent_wrote_can_neither_act_nor_hide_nor_turn_the_letters(desk: Desk) -> None:
    desk.agent()
    desk.open()
    prose = desk.page.js("document.querySelector('.prose').innerText")
    assert "\\u202e" in prose and "\\u202c" in prose and "\\n" in prose and "<script>" in prose
    assert "\u202e" not in prose
    assert desk.page.js("document.title") != "owned"
    assert desk.page.js("document.querySelectorAll('.prose script, .prose b').length") == 0


@dataclass
class Line:
    text: str


EVERY_TAG: dict[str, Any] = {
    "amount": Decimal("4200.00"),
    "payee": "Müller GmbH",
    "odd": {"Jose\u0301": "a name spelled out", "k" * 20_000: "a name too long", "plain": "beside them"},
    "own": {"$": "large", "size": "no hash at all"},
    "times": [date(2024, 2, 29), datetime(2024, 2, 29, tzinfo=UTC)],
    "parts": [UUID(int=7), 1.5, 1 << 60, b"\1\2", b"x" * 500, (1,) * 40_000],
    "held": [("in a tuple",), {"in a set"}, Line("in a record"), Secret("hunter2"), None, True, [], {}],
    "long": ["x" * 20_000, Decimal("1" * 20_000), "Jose\u0301"],
    "unseen": "a\u3164b\u00a0c",
}  # fmt: skip


def test_values_of_every_sort_are_drawn(desk: Desk) -> None:
    with AgentKit("billing-agent", home=desk.folder / "home") as kit:
        waiting = Asking(kit, lambda **args: "sent", EVERY_TAG, id="every-tag")
        review = signing.review(desk.kit, desk.open())
        text = desk.page.text()
        tags = set(re.findall(r'"\$":"(\w+)"', review.request.decode()))
        desk.kit.deny(review.item, by="Ada")
        waiting.end()
    assert tags == {
        "bytes", "date", "datetime", "decimal", "dict", "escaped", "float", "int", "large", "pairs", "record", "secret",
        "set", "tuple", "uuid",
    }  # fmt: skip
    for word in (
        "4200.00", "Müller GmbH", "Jose\\u0301", "a name spelled out", "a name too long", "beside them", "80001 bytes",
        "no hash at all", "2024-02-29", "00000000-0000-0000-0000-000000000007", "1.5", str(1 << 60), "AQI=",
        "500 bytes", "20000 bytes", "in a tuple", "in a set", "in a record", "a secret", "a\\u3164b\\xa0c",
    ):  # fmt: skip
        assert word in text, word
    assert "hunter2" not in text and "[object" not in text


LAID_OUT = """
(() => {
  const parts = [...document.querySelectorAll('#code, #left, #bar input, #bar button, #bar .label')].map((part) => {
    const range = document.createRange();
    range.selectNodeContents(part);
    const box = (part.matches('.label, #left, #code') ? range : part).getBoundingClientRect();
    return {name: part.id || part.name || part.innerText, l: box.left, t: box.top, r: box.right, b: box.bottom};
  });
  const out = (b) => b.l < 0 || b.t < 0 || b.r > innerWidth || b.b > innerHeight || b.r - b.l < 10;
  const over = [];
  for (const [i, a] of parts.entries()) for (const c of parts.slice(i + 1)) {
    const apart = a.l >= c.r - 0.5 || c.l >= a.r - 0.5 || a.t >= c.b - 0.5 || c.t >= a.b - 0.5;
    if (!apart) over.push(`${a.name} over ${c.name}`);
  }
  return {outside: parts.filter(out).map((part) => part.name), over, parts: parts.length,
          wide: document.documentElement.scrollWidth > innerWidth, focus: document.activeElement.id};
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_code_countdown_and_buttons_are_seen_without_scrolling(desk: Desk, width: int, height: int, dark: bool) -> None:
    desk.page.window(width, height, dark=dark)
    desk.agent()
    desk.open()
    seen = desk.page.js(LAID_OUT)
    assert seen == {"outside": [], "over": [], "wide": False, "focus": "deny", "parts": 8}, seen
    desk.page.js("window.scrollTo(0, document.body.scrollHeight)")
    assert desk.page.js(LAID_OUT)["outside"] == [], "and at the end of the page"
    for name, path in (("approval", ""), ("inbox", "nav a[data-page=inbox]"), ("keys", "nav a[data-page=keys]"),
                       ("sagas", "nav a[data-page=sagas]")):  # fmt: skip
        if path:
            desk.page.click(path)
            desk.page.until(f"document.querySelector('h1')?.innerText.toLowerCase() === '{name}'")
        assert not desk.page.js("document.documentElement.scrollWidth > innerWidth"), f"{name} is wider than the window"
        if SHOTS:
            desk.page.js("window.scrollTo(0, 0)")
            desk.page.shot(SHOTS / f"{name}-{width}-{'dark' if dark else 'light'}.png")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_where_several_people_are_needed_the_code_is_typed_and_one_yes_is_not_enough(
    desk: Desk, width: int, height: int
) -> None:
    found(desk)
    desk.page.window(width, height)
    desk.agent(level="quorum")
    item = desk.open()
    seen = desk.page.js(LAID_OUT)
    assert seen == {"outside": [], "over": [], "wide": False, "focus": "deny", "parts": 10}, seen
    desk.page.click("#approve")
    desk.page.until("document.querySelector('#bar .said').innerText.includes('first four')")
    assert not desk.votes()
    desk.page.fill("#bar input[name=group]", signing.review(desk.kit, item).code[:4].lower())
    desk.page.click("#approve")
    assert "1 of 2 have said yes" in desk.said()
    assert len(desk.votes()) == 1 and not desk.sent()


def test_the_list_is_live_and_the_keyboard_leads_through_it(desk: Desk) -> None:
    assert "Nothing needs you." in desk.page.text()
    desk.agent("one")
    desk.asked()
    desk.agent("two")
    desk.page.until("document.querySelectorAll(\"a[href^='/approve/']\").length === 2")
    desk.page.press("j")
    desk.page.press("j")
    second = desk.page.js("document.activeElement.getAttribute('href')")
    assert second == desk.page.js("document.querySelectorAll('.list a')[1].getAttribute('href')")
    desk.page.press("k")
    assert desk.page.js("document.activeElement.getAttribute('href')") != second
    assert desk.page.js("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
    desk.page.press("Enter")
    desk.page.until("location.pathname.startsWith('/approve/') && !!document.querySelector('#deny')")
    desk.page.press("Escape")
    desk.page.until("location.pathname === '/' && document.querySelector('h1')?.innerText === 'Inbox'")


def test_a_saga_is_told_with_its_steps_and_what_undoes_them(desk: Desk) -> None:
    with saga_scope("order-1", kit=desk.kit) as saga:
        args = {"card": "4111", "key": Secret("sk_live_hunter2")}
        by_hand = Compensation.human("call the bank")
        saga.execute(
            "shop.charge", lambda **args: {"id": "ch_9"}, args, semantics=ActionSemantics.COMPENSABLE, undo=by_hand
        )
    desk.page.click("nav a[data-page=sagas]")
    desk.page.click("a[href='/sagas/order-1']")
    text = desk.page.until("document.body.innerText.includes('Story') && document.body.innerText")
    for word in ("shop.charge", "4111", "ch_9", "call the bank", "committed", "It was committed."):
        assert word in text, word
    assert "hunter2" not in text and "a secret" in text


# -- yes and no -----------------------------------------------------------------------------------------------


def test_a_named_yes_lets_it_happen_once(desk: Desk) -> None:
    agent = desk.agent()
    desk.open()
    desk.page.click("#approve")
    desk.page.until("document.querySelector('#bar .said').innerText.includes('Say who you are')")
    assert not desk.votes() and not desk.sent()
    desk.page.fill("#bar input[name=name]", "Grace Hopper")
    desk.page.click("#approve")
    assert "Grace Hopper approved it" in desk.said()
    assert agent.communicate(timeout=60)[0].strip() == "done"
    assert [one["amount"] for one in desk.sent()] == ["4200.00"]


def test_enter_never_says_yes_and_a_held_key_decides_nothing(desk: Desk) -> None:
    desk.agent()
    desk.asked()
    desk.page.js("document.querySelector(\"a[href^='/approve/']\").click()")
    desk.page.until("document.activeElement.id === 'deny'")
    desk.page.press("Enter")  # held down since the list
    desk.settle()
    desk.page.fill("#bar input[name=name]", "Grace Hopper")
    desk.page.press("Enter")
    desk.page.js("document.querySelector('#approve').focus()")
    desk.page.press("Enter")
    desk.settle()
    assert not desk.votes() and not desk.sent()
    desk.page.press(" ")
    assert "approved" in desk.said()


def test_a_no_keeps_it_from_happening(desk: Desk) -> None:
    agent = desk.agent()
    desk.open()
    desk.page.fill("#bar input[name=name]", "Grace Hopper")
    desk.page.click("#deny")
    assert "Grace Hopper denied it" in desk.said()
    assert "denied" in agent.communicate(timeout=60)[0]
    assert desk.sent() == []


def test_a_key_says_yes_to_exactly_this_and_it_is_sent_once(desk: Desk) -> None:
    """End to end: two devices found a keyring, an agent waits, a touch lets it go on, the wire has it once."""
    found(desk)
    agent = desk.agent()
    desk.open()
    desk.page.click("#approve")
    assert "Ada Lovelace approved it" in desk.said()
    assert agent.communicate(timeout=60)[0].strip() == "done"
    assert len(desk.sent()) == 1
    [vote] = desk.votes()
    assert (vote.out, vote.level) == ("approve", 4) and vote.credential


def test_a_key_says_no_as_well(desk: Desk) -> None:
    found(desk)
    agent = desk.agent()
    desk.open()
    desk.page.click("#deny")
    assert "Ada Lovelace denied it" in desk.said()
    assert "denied" in agent.communicate(timeout=60)[0] and desk.sent() == []
    [vote] = desk.votes()
    assert vote.out == "deny" and vote.credential


def test_a_no_needs_no_key(desk: Desk) -> None:
    found(desk)
    agent = desk.agent()
    desk.open()
    desk.page.fill("#bar input[name=name]", "Grace Hopper")
    desk.page.click("#deny")
    assert "Grace Hopper denied it" in desk.said()
    assert "denied" in agent.communicate(timeout=60)[0] and desk.sent() == []


# -- keys that lie --------------------------------------------------------------------------------------------

NOT_TOUCHED = "No key signed"


@pytest.mark.parametrize(
    ("lie", "code"),
    [
        (lambda key: key.lies(isBogusSignature=True), "the signature does not hold"),
        (lambda key: key.lies(isBadUV=True), "did not ask for a PIN"),
        (lambda key: key.lies(isBadUP=True), "nobody touched the key"),
        (lambda key: key.call("setUserVerified", isUserVerified=False), NOT_TOUCHED),
        (lambda key: key.remove(), ""),
    ],
    ids=["bogus signature", "no PIN", "no touch", "PIN refused", "no key"],
)
def test_a_key_that_lies_or_is_not_there_approves_nothing(
    desk: Desk, lie: Callable[[Authenticator], Any], code: str
) -> None:
    key = found(desk)
    desk.agent(level="verification")
    desk.open()
    lie(key)
    desk.page.click("#approve")
    if code:
        assert code in desk.said()
    else:
        desk.page.until("document.querySelector('#bar .said').innerText.includes('Touch your key')")
    assert not desk.votes() and not desk.sent()


def test_a_signature_of_something_else_than_is_shown_approves_nothing(desk: Desk) -> None:
    """Were another text drawn than the one that is asked about, the key would sign that other one."""
    found(desk)
    desk.agent()
    desk.open()
    desk.page.js(
        "(() => { const get = navigator.credentials.get.bind(navigator.credentials); navigator.credentials.get = "
        "(asked) => { asked.publicKey.challenge = new Uint8Array(32); return get(asked); } })()"
    )
    desk.page.click("#approve")
    assert "another request, or another verdict, was signed" in desk.said()
    assert not desk.votes() and not desk.sent()


def test_a_no_is_not_a_yes_in_other_hands(desk: Desk) -> None:
    """The verdict is signed: a page that turned it round would be seen."""
    found(desk)
    desk.agent()
    desk.open()
    desk.page.js(
        """(() => {
          const send = window.fetch;
          window.fetch = (path, asked) => {
            if (path === '/api/vote') asked.body = asked.body.replace('"verdict":"deny"', '"verdict":"approve"');
            return send(path, asked);
          };
        })()"""
    )
    desk.page.click("#deny")
    assert "another request, or another verdict, was signed" in desk.said()
    assert not desk.votes() and not desk.sent()


def test_a_page_refuses_to_draw_what_is_not_what_is_asked_about(desk: Desk) -> None:
    desk.agent()
    item = desk.asked()
    desk.page.js(
        """(() => {
          const ask = window.fetch;
          window.fetch = async (path, asked) => {
            const answer = await ask(path, asked);
            if (!String(path).startsWith('/api/review/')) return answer;
            return new Response((await answer.text()).replace('4200.00', '1.00'), {status: 200});
          };
        })()"""
    )
    desk.page.click(f"a[href='/approve/{item}']")
    assert "shows another request" in desk.page.until("document.querySelector('.notice.bad')?.innerText")
    assert desk.page.js("!document.querySelector('#approve')")


def test_at_zero_the_touch_is_given_up_and_nothing_is_sent(desk: Desk) -> None:
    key = found(desk)
    key.call("setAutomaticPresenceSimulation", enabled=False)  # nobody touches it
    agent = desk.agent(within=6)
    desk.open()
    desk.page.click("#approve")
    desk.page.until("document.querySelector('#bar .said').innerText.includes('Touch your key')")
    assert "Expired. Nothing was sent." in desk.said()
    assert desk.page.js("!document.querySelector('#approve') && !document.querySelector('#deny')")
    assert "expired" in agent.communicate(timeout=60)[0]
    assert desk.sent() == [] and desk.votes() == []


def test_whoever_comes_second_is_told_who_was_first(desk: Desk) -> None:
    agent = desk.agent()
    item = desk.open()
    desk.page.js(
        """(() => {
          const ask = window.fetch;  // the page does not hear of what happens elsewhere
          window.fetch = (path, asked) =>
            String(path).startsWith('/api/review/') ? new Promise(() => {}) : ask(path, asked);
        })()"""
    )
    signing.vote(desk.kit, item, "deny", by="Linus")
    desk.page.fill("#bar input[name=name]", "Grace Hopper")
    desk.page.click("#approve")
    assert "Linus denied it already" in desk.said()
    assert "denied" in agent.communicate(timeout=60)[0] and desk.sent() == []


def test_a_decision_made_elsewhere_reaches_the_open_page(desk: Desk) -> None:
    desk.agent()
    item = desk.open()
    signing.vote(desk.kit, item, "deny", by="Linus")
    desk.page.until("document.querySelector('.notice.bad')?.innerText.includes('Linus')")
    desk.page.until("!document.querySelector('#approve')")


# -- from elsewhere -------------------------------------------------------------------------------------------


def test_a_page_of_another_local_port_reaches_nothing(desk: Desk) -> None:
    """Another program of this machine has the same host name, so that the browser sends it our cookie."""

    class Other(BaseHTTPRequestHandler):
        cookies: list[str] = []

        def do_GET(self) -> None:
            Other.cookies.append(self.headers.get("cookie", ""))
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>other</title>")

        def log_message(self, *args: Any) -> None:
            return

    desk.agent()
    item = desk.asked()
    review = signing.review(desk.kit, item)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        desk.page.go(f"http://amends.localhost:{server.server_port}/")
        body = json.dumps({"item": item, "digest": review.digest, "verdict": "approve", "by": "Mallory"})
        vote, inbox = (json.dumps(desk.origin + path) for path in ("/api/vote", "/api/inbox"))
        for mode, headers in (("cors", "{'content-type': 'application/json'}"), ("no-cors", "{}")):
            asked = f"{{method: 'POST', credentials: 'include', mode: '{mode}', headers: {headers}, body: {body!r}}}"
            tried = desk.page.js(f"fetch({vote}, {asked}).then((r) => r.type + r.status, (e) => e.name)")
            assert tried in ("TypeError", "opaque0"), tried
        read = desk.page.js(f"fetch({inbox}, {{credentials: 'include'}}).then((r) => r.text(), (e) => e.name)")
        assert read == "TypeError"
        assert any("amends-" in cookie for cookie in Other.cookies), "the cookie alone does go there"
        stolen = {"Cookie": Other.cookies[0], "Host": desk.origin.removeprefix("http://"), "Origin": desk.origin}
        with socket.create_connection(("127.0.0.1", desk.server.port)) as connection:
            lines = "".join(f"{name}: {value}\r\n" for name, value in stolen.items())
            connection.sendall(f"GET /api/inbox HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())
            assert b" 401 " in connection.recv(100), "and opens nothing without the key"
    finally:
        server.shutdown()
        server.server_close()
    assert not desk.votes()


def test_a_browser_without_the_link_is_told_what_to_do(desk: Desk, browser: Chromium) -> None:
    other = browser.page()
    other.go(f"{desk.origin}/keys")
    assert "You are not in" in other.text() and "amends ui" in other.text()
    link = desk.server.link()
    other.go(link)
    other.until("location.pathname === '/' && !location.hash && !!document.querySelector('.stage h1')")
    third = browser.page()
    third.go(link)
    third.until("document.body.innerText.includes('no longer good')")


def test_the_way_in_leads_to_the_page_that_was_meant(desk: Desk, browser: Chromium) -> None:
    desk.agent()
    item = desk.asked()
    other = browser.page()
    other.go(desk.server.link(f"/approve/{item}"))
    other.until(f"location.pathname === '/approve/{item}' && !!document.querySelector('#deny')")


# -- keys -----------------------------------------------------------------------------------------------------


def test_one_device_does_not_found_a_keyring_with_itself(desk: Desk) -> None:
    desk.page.authenticator()
    desk.page.click("nav a[data-page=keys]")
    desk.page.click("#found")
    desk.page.fill("input[name=person]", "Ada Lovelace")
    desk.page.click("form button[type=submit]")
    desk.page.until("document.querySelector('form')?.innerText.includes('enrolled already')")
    assert not ceremonies.ring_now(desk.kit).founded


def test_a_key_is_enrolled_by_an_admin_and_revoked_again(desk: Desk) -> None:
    main = found(desk)
    page = desk.page
    main.call("setAutomaticPresenceSimulation", enabled=False)
    third = page.authenticator(transport="nfc")
    page.click("nav a[data-page=keys]")
    page.click(".head button.main")
    page.fill("input[name=person]", "Grace Hopper")
    page.fill("input[name=label]", "Grace's key")
    page.click("form button[type=submit]")
    page.until("!!document.querySelector('form #code')")
    [made] = third.credentials()
    third.remove()
    main.call("addCredential", credential=made)
    main.call("setAutomaticPresenceSimulation", enabled=True)
    page.click("form button[type=submit]")
    page.until("document.querySelector('.notice.good')?.innerText.includes('done')")
    ring = ceremonies.ring_now(desk.kit)
    [new] = [key for key in ring.credentials.values() if key.person == "Grace Hopper"]
    assert new.roles == ("approver",) and new.label == "Grace's key"
    page.click(".notice.good button")
    page.click(f"tr[data-key='{new.id}'] button.danger")
    page.fill("input[name=reason]", "lost in a taxi")
    page.click("form button[type=submit]")
    page.until("!!document.querySelector('form #code')")
    page.click("form button[type=submit]")
    page.until("document.querySelector('.notice.good')?.innerText.includes('done')")
    assert new.id not in ceremonies.ring_now(desk.kit).credentials


def test_a_key_that_its_provider_copies_is_not_enrolled(desk: Desk) -> None:
    desk.page.authenticator(defaultBackupEligibility=True, defaultBackupState=True)
    desk.page.click("nav a[data-page=keys]")
    desk.page.click("#found")
    desk.page.fill("input[name=person]", "Ada Lovelace")
    desk.page.click("form button[type=submit]")
    assert "copied to other devices" in desk.page.until("document.querySelector('form .notice.bad')?.innerText")
    assert not ceremonies.ring_now(desk.kit).founded


def test_a_key_that_cannot_ask_for_a_pin_is_not_enrolled(desk: Desk) -> None:
    key = desk.page.authenticator()
    key.call("setUserVerified", isUserVerified=False)
    desk.page.click("nav a[data-page=keys]")
    desk.page.click("#found")
    desk.page.fill("input[name=person]", "Ada Lovelace")
    desk.page.click("form button[type=submit]")
    assert NOT_TOUCHED in desk.page.until("document.querySelector('form .notice.bad')?.innerText")


def test_founding_waits_until_the_recovery_key_was_written_down(desk: Desk) -> None:
    found_first = desk.page.authenticator()
    desk.page.click("nav a[data-page=keys]")
    desk.page.click("#found")
    desk.page.fill("input[name=person]", "Ada Lovelace")
    desk.page.click("form button[type=submit]")
    desk.page.until("document.querySelector('form')?.innerText.includes('enrolled already')")
    found_first.call("setAutomaticPresenceSimulation", enabled=False)
    desk.page.authenticator(transport="nfc")
    desk.page.click("form button[type=submit]")
    paper = desk.page.until("document.querySelector('.paper')?.innerText")
    desk.page.click("form button[type=submit]")
    desk.page.until("document.querySelector('form .notice.bad')?.innerText.includes('Write it down')")
    assert len(raw_key.from_paper(paper)) == 32
    assert not keyring.read(desk.kit.log).founded


# -- the verb -------------------------------------------------------------------------------------------------


def test_the_link_that_the_verb_prints_opens_the_page(browser: Chromium, tmp_path: Path) -> None:
    AgentKit(home=tmp_path / "home").close()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "amends.cli", "ui", "--no-open", "--json", "--port", str(port)]
    served = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
    try:
        assert served.stdout is not None
        link = json.loads("".join(iter(served.stdout.readline, "}\n")) + "}")["link"]
        page = browser.page()
        page.go(link)
        page.until("document.body.innerText.includes('Nothing needs you.')")
        assert not page.errors()
    finally:
        served.send_signal(signal.SIGTERM)
        assert served.wait(30) == 0
    page.until("document.getElementById('live').dataset.state === 'off'")
