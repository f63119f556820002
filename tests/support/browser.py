"""`Browser`: Debian's chromium, driven by chromedriver with W3C WebDriver, which is JSON over HTTP.

Nine calls are all that the tests need, so there is no dependency for them. Tests that use it are skipped where it is missing.
"""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs a browser: apt-get install chromium chromium-driver"
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver, section 12.1: the name of a reference to an element
ENTER, ESCAPE, TAB, SHIFT, ALT, CONTROL = "\ue007", "\ue00c", "\ue004", "\ue008", "\ue00a", "\ue009"
SECONDS = 120.0

_T = TypeVar("_T")


class Browser:
    """One window. A method that looks for an element waits until it is there."""

    def __init__(self, session: httpx.Client) -> None:
        self._http = session

    def _call(self, method: str, path: str, body: object = None) -> Any:  # Any: JSON
        answer = self._http.request(method, path, json={} if body is None and method == "POST" else body)
        value = answer.json()["value"]
        if answer.status_code != 200:
            raise AssertionError(f"{method} {path}: {value.get('error')}: {value.get('message', '')[:500]}")
        return value

    def open(self, url: str) -> None:
        self._call("POST", "url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:  # Any: JSON
        """What a function with this body returns in the page. It may return a promise."""
        return self._call("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def resize(self, width: int, height: int) -> None:
        self._call("POST", "window/rect", {"width": width, "height": height})

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._call("GET", "screenshot")))

    def errors(self) -> list[str]:
        """What the console has had since the last call, without the failures of requests that a test wants."""
        entries = self._call("POST", "se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def _find(self, selector: str) -> str:
        def look() -> str | None:
            found = self._call("POST", "elements", {"using": "css selector", "value": selector})
            return found[0][_ELEMENT] if found else None

        return until(look, f"an element {selector}")

    def click(self, selector: str) -> None:
        until(lambda: self._try_click(selector), f"{selector} to be clicked")

    def _try_click(self, selector: str) -> bool:
        try:
            self._call("POST", f"element/{self._find(selector)}/click")
        except AssertionError as error:  # it was replaced meanwhile, or is not shown yet
            if any(name in str(error) for name in ("stale", "not interactable", "intercepted")):
                return False
            raise
        return True

    def type(self, selector: str, text: str) -> None:
        """Type into an element, which has the focus then."""
        self._call("POST", f"element/{self._find(selector)}/value", {"text": text})

    def choose_files(self, selector: str, *files: Path) -> None:
        self._call("POST", f"element/{self._find(selector)}/value", {"text": "\n".join(map(str, files))})

    def press(self, *keys: str) -> None:
        """Press keys together, at the element that has the focus, and let go of them."""
        down = [{"type": "keyDown", "value": key} for key in keys]
        up = [{"type": "keyUp", "value": key} for key in reversed(keys)]
        self._call("POST", "actions", {"actions": [{"type": "key", "id": "keys", "actions": down + up}]})

    def text(self, selector: str) -> str:
        """The text of the last element of these, as it is shown. "" if there is none."""
        return str(self.run("return [...document.querySelectorAll(arguments[0])].at(-1)?.innerText ?? ''", selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def wait_for_text(self, selector: str, text: str) -> None:
        until(lambda: text in self.text(selector), f"{text!r} in {selector}")


def until(look: Callable[[], _T | None], what: str) -> _T:
    """What `look` returns, once it is true."""
    deadline = time.monotonic() + SECONDS
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{SECONDS:.0f} s were not enough for {what}")
        time.sleep(0.05)
    return found


@contextmanager
def browser(*options: str) -> Iterator[Browser]:
    assert DRIVER is not None and CHROMIUM is not None
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        process = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/", timeout=SECONDS) as http:
                until(lambda: _answers(http), "chromedriver")
                session = http.post("session", json=_wanted(folder, options), timeout=SECONDS).json()["value"]
                http.base_url = f"http://127.0.0.1:{port}/session/{session['sessionId']}/"
                try:
                    yield Browser(http)
                finally:
                    http.delete(f"http://127.0.0.1:{port}/session/{session['sessionId']}")
        finally:
            process.terminate()
            process.wait()


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("status").status_code == 200
    except httpx.TransportError:
        return False


def _wanted(folder: str, options: Sequence[str]) -> object:
    arguments = [
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1280,800",
        "--force-device-scale-factor=1", f"--user-data-dir={folder}/profile", *options,
    ]  # fmt: skip
    # otherwise the browser may ask whether to keep a key, and that question gets what is typed
    preferences = {"credentials_enable_service": False, "profile.password_manager_enabled": False}
    chromium = {"binary": CHROMIUM, "args": arguments, "prefs": preferences}
    wanted = {"browserName": "chrome", "goog:chromeOptions": chromium, "goog:loggingPrefs": {"browser": "ALL"}}
    return {"capabilities": {"alwaysMatch": wanted}}
