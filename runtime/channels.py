"""How people are told: a program of yours, a webhook (plain JSON, or in the shape of Slack, Teams or Discord), or the
desktop.

A message says which saga, step and tool, which item of the inbox, and what to run next; arguments only where the
channel asks for them. Nothing in it can bite: invisible characters are escaped, and no shape lets a text of the agent
become a link, a mention or markup. A channel answers "" when it was told and else why not, within its deadline; it
never raises, and what it says never holds the address, which is mostly a secret. No answer decides anything.

Shapes after: Slack's incoming webhooks and Block Kit (plain_text is not parsed), Adaptive Cards 1.2 (TextRun knows no
Markdown), Discord's execute webhook (a code block, and no mentions allowed).
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import msgspec

from .hosts import Unavailable, environment, run_program
from .plain import cut, plain

KINDS = ("command", "webhook", "slack", "teams", "discord", "desktop")
WEBHOOKS = ("webhook", "slack", "teams", "discord")
TIMEOUT_S = 10.0
ARGS_MAX = 1000
"""Characters of arguments that a message for people shows; plain JSON has all of them."""
TEXT_MAX = 1900
"""Discord takes 2,000 characters, Slack 3,000."""
GRACE_S = 1.0
"""Beside its deadline a message gets so long to end in words of its own."""
REDIRECTS = 3
BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


class Channel(msgspec.Struct, frozen=True):
    """Where messages go. kind: one of KINDS. url_env: the name of the variable that holds the URL. events: those it
    wants, empty for all. targets: it hears of an approval only at a level that names one of them."""

    name: str
    kind: str
    url: str = ""
    url_env: str = ""
    command: tuple[str, ...] = ()
    cwd: str = ""
    env: tuple[tuple[str, str], ...] = ()
    env_file: str = ""
    events: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    include_args: bool = False
    timeout_s: float = TIMEOUT_S


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is told: everything as text that is safe to show. args: present only where the channel asks for them."""

    event: str
    item: str
    saga: str
    step: int
    tool: str
    reason: str
    since: str
    level: int
    commands: tuple[str, ...]
    show: str
    device: str
    left: str = ""
    args: str = ""


class NotTold(Exception):
    """Why a message did not go out, in words without an address."""


def send(channel: Channel, message: Message, leaving: Callable[[], bool] = lambda: False) -> str:
    """Tell one channel; "" or why it was not told. Takes no longer than the channel's deadline and GRACE_S. A program
    is killed as soon as leaving() says that this process ends: nobody would end it later."""
    tell = _TELL.get(channel.kind)
    if tell is None:
        return within(channel.timeout_s + GRACE_S, lambda: _webhook(channel, message))
    return within(channel.timeout_s + GRACE_S, lambda: tell(channel, message, leaving))


def within(seconds: float, work: Callable[[], None]) -> str:
    """Run work on a thread of its own, wait so long; "" if it was done, else why not. Late work is left alone: its own
    time-outs end it."""
    said: list[str] = []

    def run() -> None:
        try:
            work()
            said.append("")
        except NotTold as why:
            said.append(str(why))
        except Exception as error:  # a bug of ours in a message is told like any other failure, and stops nobody
            said.append(f"{type(error).__name__} in the notifier")

    thread = threading.Thread(target=run, name="amends-notice", daemon=True)
    thread.start()
    thread.join(seconds)
    return said[0] if said else f"no answer within {seconds:g} s"


# ---- what is said ---------------------------------------------------------------------------------------------------

EVENTS = {
    "approval": "waits for an approval",
    "escalated": "needs a person",
    "stuck": "is stuck",
    "review": "waits for a review",
    "resume": "died and waits to be run again",
    "frozen": "is frozen",
    "drift": "is not as the log says",
    "keys": "has a keyring that needs a person",
    "other": "needs a person",
    "test": "tries whether this reaches you",
}
"""The events a channel can want, and how a message begins."""


def title(message: Message) -> str:
    """One line for people."""
    subject = message.tool or ("A saga" if message.saga else "This device")
    again = f" (level {message.level})" if message.level else ""
    return f"amends: {subject} {EVENTS[message.event]}{again}"


def lines(message: Message) -> list[str]:
    """The rest for people, a line each."""
    step = f", step {message.step} {message.tool}" if message.step else ""
    place = f"saga {message.saga}{step}" if message.saga else f"device {message.device}"
    told = [f"{place}, since {message.since}" if message.since else place, message.reason]
    if message.left:
        told.append(f"time left: {message.left}")
    if message.args:
        told.append(f"arguments: {cut(message.args, ARGS_MAX)}")
    told += [f"item {message.item}: {' or '.join(message.commands)}"] if message.item else []
    return [*told, message.show] if message.show else told


def document(message: Message) -> dict[str, Any]:
    """The message as JSON, for programs: stable keys, `v` is 1."""
    return {"v": 1, "title": title(message), **msgspec.to_builtins(message)}


def _slack(message: Message) -> dict[str, Any]:
    text = cut("\n".join(lines(message)), TEXT_MAX)
    fallback = title(message).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {
        "text": fallback,
        "blocks": [
            {"type": "header", "text": {"type": "plain_text", "text": cut(title(message), 150), "emoji": False}},
            {"type": "section", "text": {"type": "plain_text", "text": text, "emoji": False}},
        ],
    }


def _teams(message: Message) -> dict[str, Any]:
    def row(text: str, **style: Any) -> dict[str, Any]:
        return {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text, **style}]}

    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.2",
        "body": [row(title(message), weight="Bolder"), *(row(cut(line, TEXT_MAX)) for line in lines(message))],
    }
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [attachment]}


def _discord(message: Message) -> dict[str, Any]:
    told = "\n".join([title(message), *lines(message)]).replace("`", "\\x60")
    return {"content": f"```\n{cut(told, TEXT_MAX)}\n```", "allowed_mentions": {"parse": []}}


SHAPES: Mapping[str, Callable[[Message], dict[str, Any]]] = {
    "webhook": document,
    "slack": _slack,
    "teams": _teams,
    "discord": _discord,
}


# ---- a program ------------------------------------------------------------------------------------------------------


def _command(channel: Channel, message: Message, leaving: Callable[[], bool]) -> None:
    """Exit 0 is told. The program reads one JSON object; what it prints is not looked at but for its last complaint."""
    ended = _run(channel, channel.command, (json.dumps(document(message)) + "\n").encode(), leaving)
    if ended:
        raise NotTold(ended)


def _run(
    channel: Channel, command: tuple[str, ...], data: bytes, leaving: Callable[[], bool],
    env: tuple[tuple[str, str], ...] = (),
) -> str:  # fmt: skip
    try:
        given = environment((*channel.env, *env), channel.env_file)
        ended = run_program(command, given, channel.cwd, data, channel.timeout_s, leaving)
    except Unavailable as why:
        return str(why)
    if ended.status is None and leaving():
        return "the process that sent it ended first; its process group was killed"
    if ended.status is None:
        return f"no answer within {channel.timeout_s:g} s; its process group was killed"
    if ended.status:
        last = plain(ended.stderr.strip().splitlines()[-1][:200]) if ended.stderr.strip() else ""
        return f"{command[0]} ended with {ended.status}{': ' + last if last else ''}"
    return ""


# ---- the desktop ----------------------------------------------------------------------------------------------------

_APPLE = "on run argv\ndisplay notification (item 2 of argv) with title (item 1 of argv)\nend run"
_WINDOWS = (
    "Add-Type -AssemblyName System.Windows.Forms, System.Drawing;"
    "$n = New-Object System.Windows.Forms.NotifyIcon;$n.Icon = [System.Drawing.SystemIcons]::Information;"
    "$n.Visible = $true;$n.ShowBalloonTip(10000, $env:AMENDS_TITLE, $env:AMENDS_TEXT, 'Info');"
    "Start-Sleep -Seconds 5;$n.Dispose()"
)


def _desktop(channel: Channel, message: Message, leaving: Callable[[], bool]) -> None:
    """By what the system has. Texts are handed over as arguments or variables, never as part of a script."""
    head, text = title(message), cut("\n".join(lines(message)), TEXT_MAX)
    if shutil.which("notify-send"):
        safe = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")  # its body knows some markup
        why = _run(channel, ("notify-send", "--app-name=amends", "--urgency=critical", "--", head, safe), b"", leaving)
    elif sys.platform == "darwin" and shutil.which("osascript"):
        why = _run(channel, ("osascript", "-e", _APPLE, head, text), b"", leaving)
    elif os.name == "nt" and shutil.which("powershell"):
        told = (("AMENDS_TITLE", head), ("AMENDS_TEXT", text))
        shell = ("powershell", "-NoProfile", "-NonInteractive", "-Command", _WINDOWS)
        why = _run(channel, shell, b"", leaving, told)
    else:
        why = "this system has neither notify-send nor osascript nor powershell"
    if why:
        raise NotTold(why)


_TELL: dict[str, Callable[[Channel, Message, Callable[[], bool]], None]] = {"command": _command, "desktop": _desktop}

# ---- webhooks -------------------------------------------------------------------------------------------------------


def address_flaw(url: str) -> str:
    """Why a URL is no place to send messages to; "" if it is: https, or http to this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        parts.port  # noqa: B018  (raises for a port that is none)
    except ValueError:
        return "it is no URL"
    if any(ord(c) <= 32 or ord(c) > 126 for c in url) or not host or parts.scheme not in ("https", "http"):
        return "it is no https URL"
    if parts.username is not None or parts.password is not None:
        return "a user name in it would be lost"
    if parts.scheme == "http" and not _loopback(host):
        return "http goes to this machine only (127.0.0.1, ::1, localhost); https anywhere"
    return ""


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _webhook(channel: Channel, message: Message) -> None:
    post(_url(channel), SHAPES[channel.kind](message), channel.timeout_s)


def unready(channel: Channel) -> str:
    """What this process lacks to use a channel: its secret; "" if nothing."""
    try:
        _url(channel)
    except NotTold as why:
        return str(why)
    return ""


def _url(channel: Channel) -> str:
    """The address, from the file or by reference. Raises NotTold, which names the variable and not its value."""
    if not channel.url_env:
        return channel.url
    try:
        url: str = environment(channel.env, channel.env_file).get(channel.url_env, "")
    except Unavailable as why:
        raise NotTold(str(why)) from None
    if not url:
        raise NotTold(f"{channel.url_env} is not set here")
    if flaw := address_flaw(url):
        raise NotTold(f"{channel.url_env}: {flaw}")
    return url


def post(url: str, shape: Mapping[str, Any], seconds: float) -> None:
    """POST one JSON document; any 2xx is told. Raises NotTold. Follows a redirect only where it stays at the same place
    and keeps the document (307, 308)."""
    import urllib.error
    import urllib.request

    body = json.dumps(shape).encode()
    place = _place(url)
    for _ in range(REDIRECTS + 1):
        request = urllib.request.Request(
            url, data=body, method="POST", headers={"Content-Type": "application/json", "User-Agent": "amends"}
        )
        try:
            with _opener(url).open(request, timeout=seconds):
                return
        except urllib.error.HTTPError as answer:
            with answer:
                if answer.code not in (301, 302, 303, 307, 308):
                    raise NotTold(f"HTTP {answer.code}") from None
                url = _redirected(answer, url, place)
        except urllib.error.URLError as error:
            raise NotTold(_in_words(error.reason)) from None
        except (OSError, HTTPException, ValueError) as error:
            raise NotTold(_in_words(error)) from None
    raise NotTold("it redirects again and again")


def _redirected(answer: Any, url: str, place: tuple[str, str, int | None]) -> str:
    from urllib.parse import urljoin

    there: str = urljoin(url, answer.headers.get("Location", ""))
    if answer.code not in (307, 308) or address_flaw(there) or _place(there) != place:
        raise NotTold(f"HTTP {answer.code}: it redirects elsewhere, and is not followed")
    return there


def _place(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def _opener(url: str) -> Any:
    """What opens this URL and follows nothing. The proxies of the environment are for what leaves this machine."""
    import urllib.request

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *args: Any, **more: Any) -> None:
            return None

    if url.startswith("http:"):
        return urllib.request.build_opener(urllib.request.ProxyHandler({}), Stay)
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=_trust()), Stay)


def _trust() -> Any:
    """The certificates of this system. A frozen program looks where its own Python was built, and is shown the way."""
    import ssl

    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()
    if not context.cert_store_stats()["x509_ca"] and not (paths.capath and os.path.isdir(paths.capath)):
        for bundle in BUNDLES:
            if os.path.exists(bundle):
                context.load_verify_locations(bundle)
                break
    return context


def _in_words(error: object) -> str:
    """What went wrong on the way, without the address: only what the system itself calls it."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return plain(error.strerror)
    return type(error).__name__ if isinstance(error, BaseException) else "it cannot be reached"
