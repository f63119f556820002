"""The page in a browser (chromium) before a server with several models: which are loaded, and whose engine is shown."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import inflight
from tests.e2e.serve_process import ServeProcess, serving
from tests.page.test_page import ANSWER, EMPTY, ask
from tests.support.browser import Browser, browser, needs_browser, until

pytestmark = [needs_browser, pytest.mark.timeout(600)]
CHAT = Path(inflight.__file__).parent / "demo" / "model"
CHOOSE = """
const picker = document.getElementById("model");
picker.value = arguments[0];
picker.dispatchEvent(new Event("change"));
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        (folder / name).symlink_to(CHAT)
    small = ["--num-threads", "1", "--kv-cache-memory-bytes", "64M"]
    with serving("--models-dir", str(folder), "--models-max", "1", *small, has_name=False) as made:
        made.wait_until("/ready", 200)
        yield made
        made.popen.send_signal(signal.SIGTERM)
        assert made.end() == 0, made.text_of_log()


@pytest.fixture(scope="module")
def window(server: ServeProcess) -> Iterator[Browser]:
    with browser() as made:
        made.open(f"http://127.0.0.1:{server.port}/page/theme.js")
        made.run(EMPTY)
        made.open(f"http://127.0.0.1:{server.port}/")
        made.wait_for_text("#state", "ready")
        made.errors()  # a script as a page has no icon
        yield made


def labels(window: Browser) -> list[str]:
    return list(window.run("return [...document.querySelectorAll('#model option')].map(each => each.textContent)"))


def states(server: ServeProcess) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in json.loads(server.request("GET", "/v1/models")[1])["data"]}


def test_the_chosen_model_is_loaded_and_the_picker_says_so(server: ServeProcess, window: Browser) -> None:
    until(lambda: labels(window) == ["first (unloaded)", "second (unloaded)"], "the models")
    window.run(CHOOSE, "second")
    ask(window, "What is 2 + 3?")
    assert "5" in window.text(ANSWER) and states(server) == {"first": "unloaded", "second": "loaded"}
    until(lambda: labels(window) == ["first (unloaded)", "second"], "the state of the model")
    window.run("location.reload()")
    window.wait_for_text("#state", "ready")
    until(lambda: window.run("return document.getElementById('model').value") == "second", "the model chosen before")
    assert window.errors() == []


def test_a_watched_engine_is_that_of_the_chosen_model_and_may_be_unloaded(
    server: ServeProcess, window: Browser
) -> None:
    window.run("location.hash = 'engine'")
    window.wait_for_text(".replica", "Replica 0")
    window.run(CHOOSE, "first")
    window.wait_for_text(".engine > .problem", "'first' is unloaded, not loaded")
    assert window.count(".replica") == 0 and states(server)["first"] == "unloaded"
    window.run(CHOOSE, "second")
    window.wait_for_text(".replica", "Replica 0")
    # the other model takes the only place, although somebody watches
    body = {"model": "first", "prompt": "Once", "max_tokens": 1}
    assert server.request("POST", "/v1/completions", body)[0] == 200
    assert states(server) == {"first": "loaded", "second": "unloaded"}
    window.wait_for_text(".engine > .problem", "'second' is unloaded, not loaded")
    window.run(CHOOSE, "first")
    window.wait_for_text(".replica", "Replica 0")
    until(lambda: labels(window) == ["first", "second (unloaded)"], "the states of the models")
    window.run("location.hash = 'chat'")
    # what a browser logs of the feed that was refused
    assert all("409" in error or "engine/live" in error for error in window.errors())
