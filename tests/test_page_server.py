"""The local page answers its own browser on this machine, and nobody else: every way in but the door is shut."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from amends import AgentKit, saga_scope
from amends.runtime.config_file import BadConfig, port_of
from amends.runtime.semantics import ActionSemantics
from amends.store.errors import AmendsError, Refused, TheyErred

pytest.importorskip("starlette", reason="the page needs the extra `ui`")
pytest.importorskip("uvicorn", reason="the page needs the extra `ui`")

from amends.cli import serve  # noqa: E402
from amends.cli.web import live as live_module  # noqa: E402
from amends.cli.web import security  # noqa: E402
from amends.cli.web.access import LINKS, SESSIONS, Access, link_of, random_text  # noqa: E402
from amends.cli.web.live import WATCHERS, Live  # noqa: E402
from amends.cli.web.security import HEADERS, Asked, Rule  # noqa: E402
from amends.cli.web.server import Server, listen, static_files  # noqa: E402

pytestmark = pytest.mark.promise("11.1")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


class Served:
    """A server on a free port of this machine, and a client that says exactly what it is told to say."""

    def __init__(self, kit: AgentKit) -> None:
        self.kit = kit
        self.access = Access(random_text(32))
        self.server = Server(kit, listen(0), self.access)
        self.port, self.origin = self.server.port, self.server.origin
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        assert self.server.ready.wait(30)

    def send(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
        return connection

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Answer:
        """One request, with these headers and no others (but the length of a body)."""
        said = {"Connection": "close"} | headers
        if body and "Transfer-Encoding" not in said and "Content-Length" not in said:
            said["Content-Length"] = str(len(body))
        with self.send(method, path, said, body) as connection:
            return read(connection)

    def enter(self) -> dict[str, str]:
        """The headers of a browser that came in."""
        said = {"link": self.access.link()}
        answer = self.ask("POST", "/api/enter", self.page(), json.dumps(said).encode())
        assert answer.status == 200, answer
        cookie = answer.headers["set-cookie"]
        assert "httponly" in cookie.lower() and "samesite=strict" in cookie.lower()
        return self.page() | {"Cookie": cookie.split(";")[0], "X-Amends-Key": answer.json["key"]}

    def page(self) -> dict[str, str]:
        """The headers of a page of ours that has not come in."""
        return {
            "Host": f"amends.localhost:{self.port}", "Origin": self.origin, "Content-Type": "application/json",
            "Sec-Fetch-Site": "same-origin",
        }  # fmt: skip

    def close(self) -> None:
        self.server.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()


def read(connection: socket.socket) -> Answer:
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(piece.split(b"\r\n", 1)[1] for piece in _chunks(body))
    return Answer(int(first.split()[1]), headers, body)


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, rest = body.partition(b"\r\n")
        if not int(size, 16):
            return
        yield size + b"\r\n" + rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with AgentKit(home=tmp_path / "home") as kit:
        made = Served(kit)
        yield made
        made.close()


def work(kit: AgentKit, name: str) -> None:
    with saga_scope(name, kit=kit) as saga:
        saga.execute("shop.look", lambda: 1, semantics=ActionSemantics.REVERSIBLE)


# -- what everything wears ------------------------------------------------------------------------------------


def test_every_answer_wears_the_same_headers_whatever_it_is(served: Served) -> None:
    inside, outside = served.enter(), served.page()
    asked = [
        ("GET", "/", inside, b"", 200), ("GET", "/keys", inside, b"", 200),
        ("GET", "/static/app.js", outside, b"", 200),
        ("GET", "/enter", outside, b"", 200), ("GET", "/api/inbox", inside, b"", 200), ("GET", "/", outside, b"", 401),
        ("GET", "/api/inbox", outside, b"", 401), ("GET", "/nowhere", inside, b"", 404),
        ("GET", "/api/sagas/nobody", inside, b"", 404), ("POST", "/api/enter", outside, b"{", 400),
        ("PUT", "/", inside, b"", 405), ("GET", "/", inside | {"Host": "x"}, b"", 421),
        ("POST", "/api/leave", inside | {"Origin": "http://x"}, b"{}", 403),
        ("POST", "/api/leave", inside | {"Content-Type": "text/plain"}, b"{}", 415),
        ("POST", "/api/leave", inside, b" " * (security.BODY_BYTES + 1), 413),
    ]  # fmt: skip
    for method, path, headers, body, status in asked:
        answer = served.ask(method, path, headers, body)
        assert answer.status == status, (method, path, answer)
        for name, value in HEADERS.items():
            assert answer.headers.get(name) == value, (method, path, name)
        assert "server" not in answer.headers


def test_nothing_foreign_and_nothing_inline_may_run(served: Served) -> None:
    policy = HEADERS["content-security-policy"]
    assert policy == (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    for name, file in static_files().items():
        text = file.data.decode()
        foreign = [
            word for word in ("http://", "https://", "//cdn") if word in text.replace("http://www.w3.org/2000/svg", "")
        ]
        assert not foreign, f"{name} speaks of {foreign}"
        if name.endswith(".html"):
            assert "style=" not in text and "onclick" not in text and "<script>" not in text and "<style" not in text
        if name.endswith(".js"):
            assert "innerHTML" not in text and "eval(" not in text and "insertAdjacentHTML" not in text, name


# -- who is turned away ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:{}", "localhost:{}", "[::1]:{}", "amends.localhost", "amends.localhost:1", "Amends.localhost:{}",
     "x.amends.localhost:{}", "amends.localhost:{}.evil.example", "amends.localhost.:{}", "evil.example", " "],
)  # fmt: skip
def test_another_host_name_is_turned_away(served: Served, host: str) -> None:
    inside = served.enter() | {"Host": host.format(served.port)}
    for method, path in (("GET", "/"), ("GET", "/api/inbox"), ("GET", "/static/app.js"), ("POST", "/api/leave")):
        answer = served.ask(method, path, inside, b"{}" if method == "POST" else b"")
        assert answer.status in (400, 421), (method, path, answer)
        assert b"amends" not in answer.body or answer.code == "wrong_host"


@pytest.mark.parametrize(
    "origin",
    [None, "null", "", "http://localhost:{}", "http://127.0.0.1:{}", "https://amends.localhost:{}",
     "http://amends.localhost", "http://amends.localhost:1", "http://x.amends.localhost:{}",
     "http://amends.localhost:{}.evil.example", "HTTP://AMENDS.LOCALHOST:{}", "http://amends.localhost:{}/",
     "http://amends.localhost:{} http://evil.example"],
)  # fmt: skip
def test_an_answer_of_another_origin_is_turned_away(served: Served, origin: str | None) -> None:
    inside = served.enter()
    if origin is None:
        del inside["Origin"]
    else:
        inside["Origin"] = origin.format(served.port)
    answer = served.ask("POST", "/api/leave", inside, b"{}")
    assert (answer.status, answer.code) == (403, "wrong_origin")
    if origin is not None:
        assert served.ask("GET", "/api/inbox", inside).status == 403
    assert served.ask("GET", "/api/inbox", inside | {"Origin": served.origin}).status == 200, "still in"


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
def test_a_question_that_another_site_began_is_turned_away(served: Served, site: str) -> None:
    inside = served.enter() | {"Sec-Fetch-Site": site}
    del inside["Origin"]
    assert served.ask("GET", "/api/inbox", inside).status == 403
    assert served.ask("GET", "/", inside).status == 200, "a link from elsewhere may open the page"


def test_both_the_cookie_and_the_key_are_needed(served: Served) -> None:
    one, other = served.enter(), served.enter()
    wrong = {
        "no cookie": {k: v for k, v in one.items() if k != "Cookie"},
        "no key": {k: v for k, v in one.items() if k != "X-Amends-Key"},
        "another cookie": one | {"Cookie": f"amends-{served.port}={random_text()}"},
        "a cookie of another port": one | {"Cookie": one["Cookie"].replace("amends-", "amends-1")},
        "the key of another browser": one | {"X-Amends-Key": other["X-Amends-Key"]},
        "an empty key": one | {"X-Amends-Key": ""},
        "letters that are none": one | {"X-Amends-Key": "\xe9" * 22, "Cookie": f"amends-{served.port}=\xe9"},
        "broken cookies": one | {"Cookie": '"=;;;=\x07'},
    }
    for what, headers in wrong.items():
        answer = served.ask("GET", "/api/inbox", headers)
        assert answer.status in (400, 401), what
        if answer.status == 401:
            assert answer.code == "not_in"
        assert served.ask("POST", "/api/leave", headers, b"{}").status in (400, 401), what
    assert served.ask("GET", "/api/inbox", one).status == 200


def test_who_is_not_in_is_told_so_in_words(served: Served) -> None:
    for path in ("/", "/approve/abcd", "/sagas", "/nowhere"):
        answer = served.ask("GET", path, {"Host": f"amends.localhost:{served.port}"})
        assert answer.status == 401 and answer.headers["content-type"].startswith("text/html")
        assert b"amends ui" in answer.body


def test_a_link_works_once_and_used_twice_it_lets_nobody_stay(served: Served) -> None:
    link = json.dumps({"link": served.access.link()}).encode()
    first = served.ask("POST", "/api/enter", served.page(), link)
    inside = served.page() | {"Cookie": first.headers["set-cookie"].split(";")[0], "X-Amends-Key": first.json["key"]}
    assert served.ask("GET", "/api/inbox", inside).status == 200
    again = served.ask("POST", "/api/enter", served.page(), link)
    assert (again.status, again.code) == (401, "not_in") and "set-cookie" not in again.headers
    assert served.ask("GET", "/api/inbox", inside).status == 401


def test_a_link_of_another_run_or_a_made_up_one_lets_nobody_in(served: Served) -> None:
    own = served.access.link()
    for link in ("", ".", own[:-1], own + "x", "A" + own[1:], link_of(random_text(32), random_text()), "é" * 30):
        answer = served.ask("POST", "/api/enter", served.page(), json.dumps({"link": link}).encode())
        assert answer.status == 401 or link == own, link
    assert served.ask("POST", "/api/enter", served.page(), json.dumps({"link": own}).encode()).status == 200


def test_whoever_leaves_is_out(served: Served) -> None:
    inside = served.enter()
    assert served.ask("POST", "/api/leave", inside, b"{}").status == 200
    assert served.ask("GET", "/api/inbox", inside).status == 401


def test_only_so_many_browsers_and_links_are_remembered() -> None:
    access = Access(random_text(32))
    came = [access.enter(access.link()) for _ in range(SESSIONS + 1)]
    assert all(came) and access.session(came[0].cookie) is None and access.session(came[-1].cookie) == came[-1]
    access._used = dict.fromkeys(map(str, range(LINKS)), "")
    assert access.enter(access.link()) is None


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "HEY"])
def test_other_methods_are_not_answered(served: Served, method: str) -> None:
    assert served.ask(method, "/api/leave", served.enter()).status in (400, 405)


def test_a_page_takes_no_answers(served: Served) -> None:
    assert served.ask("POST", "/", served.enter(), b"{}").status == 405


# -- what may be said -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
             "application/json; charset=utf-8", "application/jsonx"]
)  # fmt: skip
def test_an_answer_is_json_and_says_so(served: Served, type: str | None) -> None:
    inside = served.enter()
    del inside["Content-Type"]
    answer = served.ask("POST", "/api/leave", inside | ({"Content-Type": type} if type else {}), b"{}")
    assert (answer.status, answer.code) == (415, "wrong_type")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"link": 1}', b'{"lonk": "x"}', b'{"link":"x","more":1}',
                                  b'{"link": "\xff"}', b"\x00", b"[" * 5000])  # fmt: skip
def test_what_is_not_asked_for_is_refused_in_words(served: Served, body: bytes) -> None:
    headers = served.page() | {"Content-Length": str(len(body))}
    answer = served.ask("POST", "/api/enter", headers, body)
    assert (answer.status, answer.code) == (400, "bad_request"), answer
    assert b"Traceback" not in answer.body


def test_an_answer_that_is_too_large_is_not_read(served: Served) -> None:
    headers = served.page() | {"Content-Length": str(10**9)}
    assert served.ask("POST", "/api/enter", headers).status == 413
    assert served.ask("POST", "/api/enter", served.page() | {"Content-Length": "9" * 40}).status in (400, 413)
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    answer = served.ask(
        "POST", "/api/enter", served.page() | {"Transfer-Encoding": "chunked"}, chunk * 5 + b"0\r\n\r\n"
    )
    assert (answer.status, answer.code) == (413, "too_large")


def test_a_body_that_does_not_come_is_not_waited_for_long(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "BODY_S", 0.05)
    answer = served.ask("POST", "/api/enter", served.page() | {"Content-Length": "20"}, b"{")
    assert (answer.status, answer.code) == (408, "too_slow")


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/..%2fserver.py", "/static/%2e%2e/server.py", "/static//etc/passwd",
             "/static/", "/static/app.js%00", "/static/../../main.py", "//static/app.js"]
)  # fmt: skip
def test_no_other_file_is_served(served: Served, path: str) -> None:
    answer = served.ask("GET", path, served.enter())
    assert answer.status == 404 and b"import" not in answer.body


def test_the_order_of_the_checks_is_that_of_the_table() -> None:
    """Whoever speaks to another host learns nothing but that."""
    rule = Rule(8799, Access("s"))
    bad = {"host": ("x",), "origin": ("http://x",), "content-type": ("text/plain",), "content-length": ("1" * 20,)}
    good = {"host": (rule.host,), "origin": (rule.origin,)}
    steps = [("wrong_host", {}), ("wrong_origin", {"host": good["host"]}), ("not_in", good)]
    for code, right in steps:
        turned = rule.turned_away(Asked("POST", "/api/vote", bad | right))
        assert turned is not None and turned.code == code
    twice = Asked("GET", "/static/app.js", {"host": (rule.host, rule.host)})
    assert rule.turned_away(twice) is not None, "two host names are none"
    assert rule.turned_away(Asked("GET", "/static/app.js", {"host": (rule.host,)})) is None


# -- what is decided ------------------------------------------------------------------------------------------


def waits(kit: AgentKit, saga: str) -> str:
    """An irreversible step that waits for a person; its item."""

    def work() -> None:
        with suppress(AmendsError), saga_scope(saga, kit=kit) as scope:
            scope.execute("bank.transfer", lambda amount: amount, {"amount": 7}, semantics=ActionSemantics.IRREVERSIBLE)

    threading.Thread(target=work, daemon=True).start()
    for _ in range(600):
        if found := [one for one in kit.inbox() if one["saga"] == saga]:
            return str(found[0]["id"])
        time.sleep(0.05)
    raise AssertionError("nobody was asked")


def said_to(served: Served, inside: dict[str, str], path: str, **body: Any) -> Answer:
    return served.ask("POST", path, inside, json.dumps(body).encode())


def test_a_name_decides_only_about_the_request_that_was_shown(served: Served) -> None:
    item, inside = waits(served.kit, "pay-1"), served.enter()
    shown = served.ask("GET", f"/api/review/{item}", inside).json
    wrong = said_to(served, inside, "/api/vote", item=item, digest="0" * 64, verdict="approve", by="Ada")
    assert (wrong.status, wrong.code) == (409, "superseded")
    assert served.ask("GET", f"/api/review/{item}", inside).json["standing"] == "pending"
    right = said_to(served, inside, "/api/vote", item=item, digest=shown["digest"], verdict="deny", by="Ada")
    assert right.status == 200 and right.json["standing"] == "denied"
    again = said_to(served, inside, "/api/vote", item=item, digest=shown["digest"], verdict="approve", by="Bob")
    assert (again.status, again.code) == (409, "decided") and "Ada" in again.json["error"]["message"]


def test_a_decision_that_lacks_a_name_or_is_none_is_refused_in_words(served: Served) -> None:
    item, inside = waits(served.kit, "pay-2"), served.enter()
    shown = served.ask("GET", f"/api/review/{item}", inside).json
    for more, status in (({"verdict": "approve"}, 400), ({"verdict": "perhaps", "by": "Ada"}, 400),
                         ({"verdict": "approve", "proof": {"kind": "webauthn", "credential": "x"}}, 409)):  # fmt: skip
        answer = said_to(served, inside, "/api/vote", item=item, digest=shown["digest"], **more)
        assert answer.status == status and answer.json["error"]["message"], answer
    assert said_to(served, inside, "/api/vote", item="zzzz", digest="", verdict="deny", by="Ada").status == 404
    assert served.ask("GET", f"/api/review/{item}", inside).json["standing"] == "pending"


@pytest.mark.parametrize("step", ["options", "made", "found", "add", "revoke", "release", "veto", "missing", "submit"])
def test_a_ceremony_that_makes_no_sense_is_refused_in_words(served: Served, step: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "options": {"person": ""},
        "made": {"answer": {}, "challenge": "x", "person": "Ada", "roles": ["admin"]},
        "found": {"keys": ["x"], "recovery": "x"},
        "add": {"key": "x"},
        "revoke": {"credential": "x"},
        "release": {"credential": "x"},
        "veto": {},
        "missing": {"event": "{}", "proofs": []},
        "submit": {"event": "{}", "proofs": [{}]},
    }
    answer = said_to(served, served.enter(), f"/api/keys/{step}", **bodies[step])
    assert 400 <= answer.status < 500 and answer.json["error"]["next"], answer
    assert said_to(served, served.enter(), "/api/keys/nothing").status == 404


# -- live -----------------------------------------------------------------------------------------------------


def watch(served: Served, inside: dict[str, str]) -> socket.socket:
    return served.send("GET", "/api/live", inside)


def heard(connection: socket.socket, word: bytes, data: bytes = b"") -> bytes:
    while word not in data:
        part = connection.recv(4096)
        assert part, f"closed before {word!r}: {data!r}"
        data += part
    return data


ELSEWHERE = """
from amends import AgentKit, ActionSemantics, saga_scope
with AgentKit() as kit, saga_scope("far", kit=kit) as saga:
    saga.execute("shop.look", lambda: 1, semantics=ActionSemantics.REVERSIBLE)
"""


def test_a_page_hears_of_what_another_process_wrote(served: Served, tmp_path: Path) -> None:
    inside = served.enter()
    with watch(served, inside) as connection:
        first = heard(connection, b"grown")
        assert b"text/event-stream" in first and b"no-store" in first
        subprocess.run([sys.executable, "-c", ELSEWHERE], check=True, timeout=60)
        served.kit.log.refresh()
        assert b"event: grown" in heard(connection, f'"size":{served.kit.log.size}'.encode(), first)
    assert served.ask("GET", "/api/sagas", inside).json["sagas"][0]["saga"] == "far"


def test_nothing_is_looked_at_while_nobody_watches() -> None:
    looks = 0

    async def grown() -> int:
        nonlocal looks
        looks += 1
        return looks

    async def run() -> None:
        live = Live(grown)
        await asyncio.sleep(0)
        assert not looks and not live.following
        sizes = live.sizes()
        assert await anext(sizes) and live.following
        await sizes.aclose()
        for _ in range(100):
            await asyncio.sleep(0.01 if live.following else 0)
        assert not live.following
        seen = looks
        await asyncio.sleep(3 * live_module.LOOK_S)
        assert looks == seen

    asyncio.run(run())


def test_a_watcher_that_does_not_read_holds_back_one_number() -> None:
    """It gets the newest when it reads again, and none of those between."""
    size = 0

    async def grown() -> int:
        nonlocal size
        size += 1
        return size

    async def run() -> None:
        live = Live(grown)
        slow, fast = live.sizes(), live.sizes()
        assert await anext(slow) == await anext(fast) == 1
        for expected in (2, 3, 4):
            assert await anext(fast) == expected
        assert await anext(slow) == 4
        await slow.aclose()
        await fast.aclose()

    asyncio.run(run())


def test_a_watcher_that_never_reads_is_in_nobodys_way(served: Served) -> None:
    inside = served.enter()
    with watch(served, inside) as deaf, watch(served, inside) as other:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        data = heard(other, b"grown")
        for n in range(20):
            work(served.kit, f"saga-{n}")
        heard(other, f'"size":{served.kit.log.size}'.encode(), data)
        assert served.ask("GET", "/api/inbox", inside).status == 200


def test_only_so_many_pages_watch_at_once(served: Served) -> None:
    inside = served.enter()
    watching = [watch(served, inside) for _ in range(WATCHERS)]
    try:
        for one in watching:
            heard(one, b"grown")
        with watch(served, inside) as late:
            assert b"too_many_pages" in heard(late, b"trouble")
        watching.pop().close()

        def comes_in() -> bool:
            with watch(served, inside) as next:
                return b"grown" in heard(next, b"event:")

        assert any(comes_in() for _ in range(100))
    finally:
        for one in watching:
            one.close()


def test_trouble_with_the_log_is_told_and_does_not_last() -> None:
    trouble: list[AmendsError] = [Refused("The log cannot be read.")]

    async def grown() -> int:
        if trouble:
            raise trouble[0]
        return 7

    async def run() -> None:
        live = Live(grown)
        with pytest.raises(Refused, match="cannot be read"):
            await anext(live.sizes())
        trouble.clear()
        assert await anext(live.sizes()) == 7

    asyncio.run(run())


@pytest.mark.promise("11.1")
def test_trouble_that_is_no_error_of_ours_is_told_to_who_watches_and_to_who_serves(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inside = served.enter()

    def broken() -> None:
        raise OSError(5, "Input/output error")

    with watch(served, inside) as connection:
        data = heard(connection, b"grown")
        monkeypatch.setattr(served.kit.log, "refresh", broken)
        assert b"event: trouble" in heard(connection, b"trouble", data)
        while connection.recv(4096):
            continue
    monkeypatch.undo()
    with watch(served, inside) as connection:
        heard(connection, b"grown")
    assert "OSError: [Errno 5] Input/output error" in capfd.readouterr().err


def test_a_sign_of_life_comes_when_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "BEAT_S", 0.01)

    async def grown() -> int:
        return 3

    async def run() -> None:
        sizes = Live(grown).sizes()
        while (first := await anext(sizes)) is None:
            continue
        assert first == 3 and await anext(sizes) is None

    asyncio.run(run())


def test_stopping_lets_every_watcher_go(tmp_path: Path) -> None:
    with AgentKit(home=tmp_path / "home") as kit:
        served = Served(kit)
        with watch(served, served.enter()) as connection:
            heard(connection, b"grown")
            served.close()
            while connection.recv(4096):
                continue


# -- where it listens -----------------------------------------------------------------------------------------


def test_it_listens_on_this_machine_alone(served: Served) -> None:
    names = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    for name in names - {"127.0.0.1", "::1"}:
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        with socket.socket(family) as outside, pytest.raises(OSError):
            outside.settimeout(10)
            outside.connect((name, served.port))
    sockets = listen(0)
    try:
        assert {one.getsockname()[0] for one in sockets} <= {"127.0.0.1", "::1"}
    finally:
        for one in sockets:
            one.close()


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_port_that_another_program_has_is_not_shared(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as other:
        try:
            other.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no {address}")
        other.listen(1)
        with pytest.raises(AmendsError) as refused:
            listen(other.getsockname()[1])
        assert refused.value.code == "port_taken"


# -- the verb -------------------------------------------------------------------------------------------------


def amends(*args: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "amends.cli", *args], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more
    )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_verb_prints_a_link_serves_and_ends_when_asked(number: int, tmp_path: Path) -> None:
    AgentKit(home=tmp_path / "home").close()
    port = free_port()
    (tmp_path / "home" / "config.toml").write_text(f"[ui]\nport = {port}\n")
    first = amends("ui", "--no-open", "--json")
    try:
        assert first.stdout is not None
        told = json.loads("".join(iter(first.stdout.readline, "}\n")) + "}")
        assert told["port"] == port and told["link"].startswith(f"http://amends.localhost:{port}/enter#")
        second = amends("ui", "--no-open")
        said = second.communicate(timeout=60)[0]
        assert second.returncode == 0 and "runs already" in said and f"amends.localhost:{port}/enter#" in said
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(f"GET / HTTP/1.1\r\nHost: amends.localhost:{port}\r\nConnection: close\r\n\r\n".encode())
            assert read(connection).status == 401
    finally:
        first.send_signal(number)
        out, err = first.communicate(timeout=60)
    assert first.returncode == 0 and not err, (first.returncode, err)


@pytest.mark.promise("11.1")
def test_what_a_dead_run_left_is_not_handed_out_while_the_next_one_starts(tmp_path: Path) -> None:
    lock = tmp_path / "ui.lock"
    lock.write_bytes(json.dumps({"port": 8799, "secret": "of a run that was killed"}).encode())
    with serve._held(lock) as (_, other):
        assert other is None
        with pytest.raises(TheyErred) as refused, serve._held(lock):
            pass
        assert refused.value.code == "starting"


def test_a_port_is_read_beside_channels_that_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    assert port_of(file) == 8799
    file.write_text("[ui]\nport = 9000\n[[notify]]\nnmae = 'x'\n")
    assert port_of(file) == 9000
    file.write_text("\n[ui]\nport = 0\n")
    with pytest.raises(BadConfig, match="line 3: port under"):
        port_of(file)


def test_the_verb_makes_no_home() -> None:
    ran = amends("ui", "--no-open", "--json")
    out = ran.communicate(timeout=60)[0]
    assert ran.returncode == 2 and json.loads(out)["error"]["code"] == "no_home"
    assert not Path(os.environ["AMENDS_HOME"]).exists()


@pytest.mark.parametrize("text", ["[ui]\nport = 0\n", "[ui]\nport = '8'\n", "[ui]\nport = true\n", "ui = 3\n", "[ui\n"])
def test_a_port_that_is_none_is_refused_in_words(text: str, tmp_path: Path) -> None:
    AgentKit(home=tmp_path / "home").close()
    (tmp_path / "home" / "config.toml").write_text(text)
    ran = amends("ui", "--no-open", "--json")
    out = ran.communicate(timeout=60)[0]
    assert ran.returncode == 2 and json.loads(out)["error"]["code"] == "bad_config"


def test_without_its_libraries_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    AgentKit(home=tmp_path / "home").close()
    code = "import sys; sys.modules['uvicorn'] = None\nfrom amends.cli.main import main\nmain(['ui', '--no-open'])"
    ran = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60)
    assert ran.returncode == 2 and "amends[ui]" in ran.stderr and "Traceback" not in ran.stderr


def test_no_other_verb_pays_for_the_page() -> None:
    code = (
        "import sys\nfrom amends.cli import main\nimport amends.cli.sagas, amends.cli.control\n"
        "print([name for name in ('starlette', 'uvicorn', 'anyio', 'h11') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60)
    assert ran.stdout.strip() == "[]", ran
