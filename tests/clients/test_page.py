"""The page is accessible: axe-core (npm) finds nothing in its views, light and dark, on a wide window and on a phone's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.browser import ENTER, Browser, browser, until
from tests.support.scripted_chat import scripted_chat

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = Path(os.environ.get("INFLIGHT_CLIENTS_DIR", ROOT / ".venv-clients"))
AXE = ENVIRONMENTS / "node" / "node_modules" / "axe-core" / "axe.min.js"
TEXT = (
    "# Title\n\n1. one\n2. two\n\n> quoted\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
    "```python\ndef f():  # note\n    return 'a', 1\n```\n\n"
    "$x^2$ and [a link](https://example.com)\n\n- [x] done\n"
)
PROBLEMS = """
return axe.run(document, {resultTypes: ["violations"]}).then(({violations}) =>
  violations.map(({id, nodes}) => [id, nodes.map((node) => node.html)]))
"""


def problems(window: Browser) -> object:
    return window.run(PROBLEMS)


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(theme: str, width: int) -> None:
    with scripted_chat() as (chat, url), browser() as window:
        chat.say({"reasoning_content": "Hm."}, TEXT)
        window.resize(width, 900)
        window.open(url)
        window.wait_for_text("#state", "ready")
        window.run("document.documentElement.dataset.theme = arguments[0]", theme)
        window.click(".composer textarea")
        window.type(".composer textarea", "What?" + ENTER)
        until(lambda: window.count(".message.assistant h2") and not window.count(".message.running"), "the answer")
        window.run(AXE.read_text())
        assert problems(window) == []
        window.click("[aria-label='Options of requests']")
        assert problems(window) == []
        window.click("[aria-label='Close the options']")
        window.run("location.hash = '#engine'")
        until(lambda: window.count(".engine"), "the engine")
        assert problems(window) == []
