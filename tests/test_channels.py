"""Channels: what a message says in each shape, where it may go, and how a broken one ends; config.toml by line."""

from __future__ import annotations

import json
import os
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from amends.runtime import channels
from amends.runtime.channels import Channel, Message, address_flaw, send, unready
from amends.runtime.config_file import BadConfig, Config, Retention, current, load, retention_of

EVIL = "<!channel> [x](https://evil) `@everyone` **b** \u202e\x1b[2J &"
SAID = Message(
    event="approval", item="abcdefgh23", saga="order-17", step=3, tool="mail.send", level=0,
    reason="An irreversible step waits.", since="2026-01-01T00:00:00.000Z",
    commands=("amends approve abcdefgh23 --by NAME", "amends deny abcdefgh23 --by NAME"),
    show="amends show order-17", device="amends.local/x",
)  # fmt: skip


# ---- a server that remembers, and misbehaves when told to -----------------------------------------------------------


class Server:
    """A loopback HTTP server. `heard`: (path, decoded body) of each POST. `answer`: what it does with the next ones."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.answer: Callable[[BaseHTTPRequestHandler], None] = lambda request: _status(request, 200)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.heard.append((self.path, json.loads(body)))
                outer.answer(self)

            def log_message(self, *args: Any) -> None:
                return None

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def url(self, path: str = "/hook") -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}{path}"

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def _status(request: BaseHTTPRequestHandler, code: int, **headers: str) -> None:
    request.send_response(code)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", "0")
    request.end_headers()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def hook(server: Server, kind: str = "webhook", path: str = "/hook", **more: Any) -> Channel:
    return Channel("hook", kind, url=server.url(path), **more)


def program(folder: Path, text: str, name: str = "tell") -> tuple[str, ...]:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o700)
    return (str(path),)


# ---- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("14.6")
@pytest.mark.parametrize("kind", channels.WEBHOOKS)
def test_every_shape_names_saga_step_tool_item_and_what_to_run(server: Server, kind: str) -> None:
    assert send(hook(server, kind), SAID) == ""
    [(path, document)] = server.heard
    text = json.dumps(document, ensure_ascii=False)
    for said in (
        "order-17",
        "step",
        "mail.send",
        "abcdefgh23",
        "amends approve abcdefgh23 --by NAME",
        "amends show order-17",
    ):
        assert said in text, (kind, said)
    assert path == "/hook"


def test_plain_json_has_stable_keys(server: Server) -> None:
    send(hook(server), SAID)
    [(_, document)] = server.heard
    assert document == {
        "v": 1, "title": "amends: mail.send waits for an approval", "event": "approval", "item": "abcdefgh23",
        "saga": "order-17", "step": 3, "tool": "mail.send", "reason": "An irreversible step waits.",
        "since": "2026-01-01T00:00:00.000Z", "level": 0, "show": "amends show order-17", "device": "amends.local/x",
        "commands": ["amends approve abcdefgh23 --by NAME", "amends deny abcdefgh23 --by NAME"],
    }  # fmt: skip


@pytest.mark.promise("14.6")
def test_no_shape_lets_a_text_of_the_agent_become_markup() -> None:
    message = Message(**{name: getattr(SAID, name) for name in SAID.__struct_fields__} | {"tool": "x", "reason": EVIL})
    slack = channels.SHAPES["slack"](message)
    assert all(block["text"]["type"] == "plain_text" and not block["text"]["emoji"] for block in slack["blocks"])
    assert "<" not in channels.SHAPES["slack"](Message(**_fields(message) | {"tool": "<!here>"}))["text"]
    teams = channels.SHAPES["teams"](message)["attachments"][0]["content"]
    assert {row["type"] for row in teams["body"]} == {"RichTextBlock"}, "TextBlock would be Markdown"
    assert {run["type"] for row in teams["body"] for run in row["inlines"]} == {"TextRun"}
    discord = channels.SHAPES["discord"](message)
    assert discord["allowed_mentions"] == {"parse": []}
    inside = discord["content"].removeprefix("```\n").removesuffix("\n```")
    assert inside != discord["content"] and "`" not in inside, "what is in a code block stays in it"


def _fields(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_a_long_message_fits_what_the_services_take() -> None:
    message = Message(**_fields(SAID) | {"reason": "x" * 90_000, "args": "y" * 90_000})
    assert len(channels.SHAPES["discord"](message)["content"]) <= 2000
    assert all(len(block["text"]["text"]) <= 3000 for block in channels.SHAPES["slack"](message)["blocks"])
    assert len(json.dumps(channels.SHAPES["teams"](message))) < 28_000


# ---- a program ------------------------------------------------------------------------------------------------------


def test_a_program_gets_one_json_object_and_a_clean_environment(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("_PYI_ARCHIVE_FILE", "x")
    out = tmp_path / "out"
    text = f"import json, os, sys\njson.dump([json.load(sys.stdin), dict(os.environ)], open({str(out)!r}, 'w'))\n"
    channel = Channel("page", "command", command=program(tmp_path, text), env=(("TONE", "loud"),))
    assert send(channel, SAID) == ""
    document, environment = json.loads(out.read_text())
    assert document["item"] == "abcdefgh23" and document["commands"] == list(SAID.commands)
    assert environment["TONE"] == "loud" and "_PYI_ARCHIVE_FILE" not in environment


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys\nsys.stderr.write('no such pager\\n')\nsys.exit(3)", "ended with 3: no such pager"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended with -9"),
    ],
)
def test_a_program_that_fails_has_not_told(tmp_path: Path, text: str, said: str) -> None:
    assert said in send(Channel("page", "command", command=program(tmp_path, text)), SAID)


def test_a_program_that_is_not_there_has_not_told(tmp_path: Path) -> None:
    assert "cannot be started" in send(Channel("page", "command", command=(str(tmp_path / "none"),)), SAID)


def test_a_program_that_hangs_is_killed_with_its_group(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '600'])\nopen({str(pid)!r}, 'w').write(str(child.pid))\ntime.sleep(600)\n"
    )
    channel = Channel("page", "command", command=program(tmp_path, text), timeout_s=2.0)
    assert "process group was killed" in send(channel, SAID)
    child = int(pid.read_text())
    end = time.monotonic() + 10
    while _alive(child):
        assert time.monotonic() < end, "its child lives on"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_program_complains_of_cannot_bite(tmp_path: Path) -> None:
    text = "import sys\nsys.stderr.write('\\x1b[2J\\u202e bad')\nsys.exit(1)"
    said = send(Channel("page", "command", command=program(tmp_path, text)), SAID)
    assert "\\x1b[2J\\u202e bad" in said and "\x1b" not in said


# ---- the desktop ----------------------------------------------------------------------------------------------------


def test_the_desktop_is_told_by_what_the_system_has(tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "out"
    program(tmp_path, f"import json, sys\njson.dump(sys.argv[1:], open({str(out)!r}, 'w'))\n", "notify-send")
    monkeypatch.setenv("PATH", str(tmp_path))
    message = Message(**_fields(SAID) | {"tool": "--urgency=low", "reason": "<b>&"})
    assert send(Channel("screen", "desktop"), message) == ""
    arguments = json.loads(out.read_text())
    head, text = arguments[-2:]
    assert arguments[-3] == "--", "a text that begins with - is no option"
    assert head.startswith("amends: --urgency=low") and "&lt;b&gt;&amp;" in text


def test_a_system_without_a_desktop_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither notify-send" in send(Channel("screen", "desktop"), SAID)


# ---- webhooks that misbehave ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [400, 404, 429, 500])
def test_an_answer_that_is_no_yes_has_not_told(server: Server, code: int) -> None:
    server.answer = lambda request: _status(request, code)
    assert send(hook(server), SAID) == f"HTTP {code}"


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_place_is_not_followed(server: Server, code: int) -> None:
    other = Server()
    try:
        server.answer = lambda request: _status(request, code, Location=other.url("/stolen"))
        assert "redirects elsewhere" in send(hook(server), SAID)
        assert not other.heard
    finally:
        other.close()


def test_a_redirect_at_the_same_place_is_followed_with_the_document(server: Server) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        _status(request, 308, Location="/there") if request.path == "/hook" else _status(request, 200)

    server.answer = answer
    assert send(hook(server), SAID) == ""
    assert [path for path, _ in server.heard] == ["/hook", "/there"] and server.heard[0][1] == server.heard[1][1]


def test_a_redirect_in_a_circle_ends(server: Server) -> None:
    server.answer = lambda request: _status(request, 307, Location="/hook")
    assert "again and again" in send(hook(server), SAID)


def test_a_server_that_hangs_is_given_up(server: Server) -> None:
    gate = threading.Event()
    server.answer = lambda request: gate.wait(30) and None
    try:
        assert "no answer" in send(hook(server, timeout_s=0.3), SAID)
    finally:
        gate.set()


def test_a_server_that_drips_is_given_up(server: Server) -> None:
    gate = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        while not gate.wait(0.05):
            try:
                request.wfile.write(b"H")
                request.wfile.flush()
            except OSError:
                return

    server.answer = drip
    try:
        assert "no answer within" in send(hook(server, timeout_s=0.3), SAID)
    finally:
        gate.set()


def test_a_server_that_talks_nonsense_has_not_told(server: Server) -> None:
    def nonsense(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"\x00\x01 no http\r\n\r\n")
        request.close_connection = True

    server.answer = nonsense
    assert send(hook(server), SAID) not in ("", None)


def test_nobody_there_is_said_without_the_address(server: Server) -> None:
    secret = server.url("/T0/B0/secret-token")
    server.close()
    said = send(Channel("ops", "slack", url=secret), SAID)
    assert said and "secret-token" not in said and "127.0.0.1" not in said
    server.http = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # for the fixture to close
    threading.Thread(target=server.http.serve_forever, daemon=True).start()


def test_a_proxy_of_the_environment_does_not_see_what_stays_here(server: Server, monkeypatch: Any) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert send(hook(server), SAID) == ""


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    cert = _self_signed(tmp_path)
    context.load_cert_chain(cert)
    server = Server()
    server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
    try:
        said = send(Channel("ops", "webhook", url=server.url().replace("http:", "https:")), SAID)
        assert said and not server.heard
    finally:
        server.close()


def _self_signed(folder: Path) -> Path:
    import datetime

    x509 = pytest.importorskip("cryptography.x509", reason="cryptography makes the certificate")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    path = folder / "cert.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


# ---- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/T/B/x",
        "http://127.0.0.1:8080/x",
        "http://localhost/x",
        "http://[::1]:1/",
        "http://127.9.9.9/",
    ],
)
def test_https_anywhere_and_http_to_this_machine(url: str) -> None:
    assert address_flaw(url) == ""


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/", "http://10.0.0.1/", "http://localhost.evil.com/", "http://127.0.0.1.evil.com/",
        "ftp://x/", "file:///etc/passwd", "https://", "https://u:p@x/", "https://x:99999/", "no", "", "https://x/a b",
        "http://2130706433/", "https://x/\n",
    ],
)  # fmt: skip
def test_anything_else_is_no_address(url: str) -> None:
    assert address_flaw(url)


def test_a_secret_is_named_and_never_shown(tmp_path: Path, server: Server, monkeypatch: Any) -> None:
    monkeypatch.delenv("HOOK_URL", raising=False)
    channel = Channel("ops", "slack", url_env="HOOK_URL")
    assert unready(channel) == "HOOK_URL is not set here" == send(channel, SAID)
    monkeypatch.setenv("HOOK_URL", "http://secret.example/")
    assert "HOOK_URL" in unready(channel) and "secret" not in send(channel, SAID)
    secrets = tmp_path / "notify.env"
    secrets.write_text(f"HOOK_URL={server.url()}\n")
    secrets.chmod(0o644)
    private = Channel("ops", "slack", url_env="HOOK_URL", env_file=str(secrets))
    assert "chmod 600" in unready(private)
    secrets.chmod(0o600)
    assert unready(private) == "" and send(private, SAID) == ""
    assert stat.S_IMODE(os.stat(secrets).st_mode) == 0o600


def test_doctor_tries_every_channel_and_says_which_was_not_told(tmp_path: Path, server: Server) -> None:
    from click.testing import CliRunner

    from amends import AgentKit
    from amends.cli.main import main

    AgentKit(home=tmp_path / "home").close()
    text = f'[[notify]]\nname = "hook"\nkind = "slack"\nurl = "{server.url()}"\n'
    written(tmp_path / "home", text + '[[notify]]\nname = "page"\nkind = "command"\ncommand = ["false"]\n')
    said = CliRunner().invoke(main, ["doctor", "--notify"], prog_name="amends")
    assert (
        "channel hook took a message" in said.stdout and "Channel page was not told: false ended with 1" in said.stdout
    )
    assert said.exit_code == 1 and len(server.heard) == 1


# ---- config.toml ----------------------------------------------------------------------------------------------------

GOOD = """\
stuck_after_s = 60

[ui]
port = 8800

[[notify]]
name = "ops"
kind = "slack"
url_env = "SLACK_URL"
env_file = "notify.env"
events = ["approval", "escalated"]

[[notify]]
name = "pager"
kind = "command"
command = ["./page", "-v"]
targets = ["on-call"]
include_args = true
timeout_s = 3
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_every_key_is_read(tmp_path: Path) -> None:
    config = load(written(tmp_path, GOOD))
    ops, pager = config.channels
    assert config.stuck_after_s == 60
    assert (ops.name, ops.kind, ops.url_env, ops.events) == ("ops", "slack", "SLACK_URL", ("approval", "escalated"))
    assert ops.env_file == str(tmp_path / "notify.env") and not ops.include_args
    assert pager.command == (str(tmp_path / "page"), "-v") and pager.targets == ("on-call",)
    assert pager.include_args and pager.timeout_s == 3.0


def test_what_the_guide_shows_is_read(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[1] / "runtime" / "GUIDE.md").read_text(encoding="utf-8")
    told, kept = (part.split("```")[0] for part in guide.split("```toml config.toml\n")[1:])
    assert [channel.name for channel in load(written(tmp_path, told)).channels] == ["ops", "pager"]
    assert load(written(tmp_path, kept)).channels == ()
    assert retention_of(written(tmp_path, kept)) == Retention(90 * 86_400_000, True, 2_000_000_000)


def test_no_file_tells_nobody(tmp_path: Path) -> None:
    assert load(tmp_path / "config.toml") == Config() == current(tmp_path / "config.toml")


BAD = [
    ("[[notify]]\nname = 'a'\nkind = 'sms'\n", 3, "kind is expected to be one of"),
    ("[[notify]]\nname = 'a'\nkind = 'slack'\n", 1, "url or url_env is missing"),
    ("[[notify]]\nname = 'a'\nkind = 'slack'\nurl = 'http://x.example'\n", 4, "https URL"),
    ("[[notify]]\nname = 'a'\nkind = 'slack'\nurl = 'https://x'\nurl_env = 'X'\n", 5, "both say where"),
    ("[[notify]]\nname = 'a'\nkind = 'desktop'\ncommand = ['x']\n", 4, "says nothing for kind desktop"),
    ("[[notify]]\nkind = 'desktop'\n", 1, "name is missing"),
    ("[[notify]]\nname = 'a'\nkind = 'desktop'\nevent = ['approval']\n", 4, "unknown key event"),
    ("[[notify]]\nname = 'a'\nkind = 'desktop'\nevents = ['aproval']\n", 4, "a list of some of"),
    ("[[notify]]\nname = 'a'\nkind = 'desktop'\ntimeout_s = 0\n", 4, "seconds from 0.1 to 60"),
    ("[[notify]]\nname = 'a'\nkind = 'desktop'\n\n[[notify]]\nname = 'a'\nkind = 'desktop'\n", 6, "named a already"),
    ("[notify]\nname = 'a'\n", 1, "two brackets"),
    ("\n[[notfy]]\nname = 'a'\n", 2, "unknown key notfy"),
    ("stuck_after_s = true\n", 1, "seconds, 0 for never"),
    ("version = 2\n", 1, "reads version 1"),
    ("x = \n", 1, "not TOML"),
    ("[[notify]]\nname = 'a\"b'\nkind = 'desktop'\n", 2, "printable ASCII"),
]


@pytest.mark.parametrize(("text", "line", "said"), BAD, ids=[said for _, _, said in BAD])
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    with pytest.raises(BadConfig) as wrong:
        load(written(tmp_path, text))
    assert said in wrong.value.message and f"config.toml, line {line}:" in wrong.value.message
    assert wrong.value.code == "bad_config" and wrong.value.exit == 2


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    assert len(current(path).channels) == 2
    path.write_text(GOOD.split("\n[[notify]]")[0] + "\n# another length\n")
    assert current(path).channels == ()
