"""A real Chromium, driven through two pipes: no driver program, no web socket, nothing but the standard library.

Chromium reads commands on descriptor 3 and writes answers and events on 4, each a JSON text that ends in NUL
(`--remote-debugging-pipe`). The browser has a profile of its own, and is killed with everything that it started.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-default-browser-check",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--mute-audio", "--remote-debugging-pipe", "--force-color-profile=srgb",
)  # fmt: skip
PATIENCE_S = 60
# The child gets the pipes on the descriptors that Chromium expects, whatever numbers they have here.
LAUNCH = "import os,sys; r,w=map(int,sys.argv[1:3]); os.dup2(r,63); os.dup2(w,62); os.dup2(63,3); os.dup2(62,4); " \
    "[os.set_inheritable(n,True) for n in (3,4)]; os.closerange(5,64); os.execv(sys.argv[3],sys.argv[3:])"  # fmt: skip


class Broken(AssertionError):
    """The browser, or the script in it, raised."""


class Chromium:
    """A browser. Use as a context manager; `page()` opens a tab with cookies and storage of its own."""

    def __init__(self) -> None:
        self.profile = Path(tempfile.mkdtemp(prefix="chromium-"))
        commands, ours = os.pipe()
        theirs, answers = os.pipe()
        command = [sys.executable, "-c", LAUNCH, str(commands), str(answers), CHROMIUM, *FLAGS]
        self.process = subprocess.Popen(
            [*command, f"--user-data-dir={self.profile}", "about:blank"],
            pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._write, self._read = ours, theirs
        self._numbers = itertools.count(1)
        self._answers: dict[int, Any] = {}
        self._came = threading.Condition()
        self.heard: list[dict[str, Any]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _listen(self) -> None:
        rest = b""
        while data := os.read(self._read, 1 << 16):
            *whole, rest = (rest + data).split(b"\0")
            with self._came:
                for text in whole:
                    message = json.loads(text)
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self.heard.append(message)
                self._came.notify_all()
        with self._came:
            self._answers[0] = {"error": {"message": "the browser is gone"}}
            self._came.notify_all()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        with self._came:
            while data:
                data = data[os.write(self._write, data) :]
            there = self._came.wait_for(lambda: number in self._answers or 0 in self._answers, PATIENCE_S)
            answer = self._answers.pop(number, None) or self._answers.get(0)
        if not there or answer is None:
            raise Broken(f"{method}: no answer")
        if "error" in answer:
            raise Broken(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def page(self) -> Page:
        """A new tab, as of a browser that nobody used yet."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, target, context)

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(10)
                break
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.wait(10)
        os.close(self._write)
        shutil.rmtree(self.profile, ignore_errors=True)


class Page:
    """A tab."""

    def __init__(self, browser: Chromium, session: str, target: str, context: str) -> None:
        self.browser, self.session, self.target, self.context = browser, session, target, context
        self.keys: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    # -- looking ------------------------------------------------------------------------------------------------------

    def go(self, url: str) -> None:
        """Open an address and wait until it has been read."""
        failed = self.call("Page.navigate", url=url).get("errorText")
        if failed:
            raise Broken(f"{url}: {failed}")
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, code: str) -> Any:
        """The value of an expression, awaited."""
        found = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True, userGesture=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise Broken(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    def until(self, code: str, seconds: float = PATIENCE_S) -> Any:
        """Wait until an expression is true; its value."""
        end, last = time.monotonic() + seconds, ""
        while time.monotonic() < end:
            try:
                if found := self.js(code):
                    return found
            except Broken as error:  # between two documents there is none to ask
                last = str(error)
            time.sleep(0.03)
        raise Broken(f"never true: {code} {last}\n{self.text()}")

    def text(self) -> str:
        return str(self.js("document.body ? document.body.innerText : ''"))

    def errors(self) -> list[str]:
        """What scripts of this tab raised, and what the browser refused to load for them."""
        mine = [one for one in self.browser.heard if one.get("sessionId") == self.session]
        raised = [one["params"]["exceptionDetails"] for one in mine if one["method"] == "Runtime.exceptionThrown"]
        said = [one["params"]["entry"] for one in mine if one["method"] == "Log.entryAdded"]
        return [one.get("exception", {}).get("description", one["text"]) for one in raised] + [
            f"{one['source']}: {one['text']}" for one in said if one["level"] == "error" and one["source"] != "network"
        ]

    # -- doing --------------------------------------------------------------------------------------------------------

    def click(self, selector: str) -> None:
        """A true click in the middle of an element."""
        box = self.until(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e || e.disabled) return null; "
            "e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect(); "
            "return b.width ? {x: b.x + b.width / 2, y: b.y + b.height / 2} : null })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        """A true key press."""
        codes = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " ")}
        number, typed = codes.get(key, (code or ord(key.upper()[0]), text or (key if len(key) == 1 else "")))
        more = {"key": key, "windowsVirtualKeyCode": number, "nativeVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown", **more, **({"text": typed} if typed else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **more)

    def fill(self, selector: str, text: str) -> None:
        """Type into a field, in place of what is in it."""
        self.until(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e?.focus(); return !!e }})()")
        self.js("document.activeElement.select?.()")
        self.call("Input.insertText", text=text)

    def window(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def shot(self, path: Path, *, whole: bool = False) -> None:
        """A picture of what is seen."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))

    # -- keys ---------------------------------------------------------------------------------------------------------

    def authenticator(self, **options: Any) -> Authenticator:
        """A security key in a slot of this tab, with somebody who touches it and knows its PIN."""
        self.call("WebAuthn.enable", enableUI=False)
        asked = {
            "protocol": "ctap2", "ctap2Version": "ctap2_1", "transport": "usb", "hasResidentKey": False,
            "hasUserVerification": True, "isUserVerified": True, "automaticPresenceSimulation": True,
        }  # fmt: skip
        made = self.call("WebAuthn.addVirtualAuthenticator", options=asked | options)
        return Authenticator(self, made["authenticatorId"])


class Authenticator:
    """A virtual security key."""

    def __init__(self, page: Page, id: str) -> None:
        self.page, self.id = page, id

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.page.call(f"WebAuthn.{method}", authenticatorId=self.id, **params)

    def lies(self, **overrides: bool) -> None:
        """isBogusSignature, isBadUV, isBadUP: answers that only a broken or forged key would give."""
        self.call("setResponseOverrideBits", **overrides)

    def credentials(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("getCredentials")["credentials"]
        return found

    def remove(self) -> None:
        self.call("removeVirtualAuthenticator")
