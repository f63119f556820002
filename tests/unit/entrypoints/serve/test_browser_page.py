"""The page at / with --no-ui: for browsers only. It tells a client no more than the API, and is safe with any name and host."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

import inflight
from inflight.entrypoints.serve.middlewares import wrap
from inflight.entrypoints.serve.settings import ServerSettings
from tests.unit.entrypoints.api_client import SETTINGS as OTHER_SETTINGS
from tests.unit.entrypoints.api_client import Answer, Api, serving
from tests.unit.entrypoints.serve.test_middlewares import call

SETTINGS = replace(OTHER_SETTINGS, ui=False)
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving(SETTINGS) as made:
        yield made


class Page(HTMLParser):
    """Attributes: `tags`: names of the elements, with their attributes; `texts`: the texts between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def __contains__(self, words: str) -> bool:
        return any(words in text for text in self.texts)


def page_of(answer: Answer) -> Page:
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["vary"] == "Accept"
    return Page(answer.text)


def test_a_browser_gets_a_page(api: Api) -> None:
    answer = api.get("/", BROWSER)
    page = page_of(answer)
    assert answer.status == 200
    name = api.get("/v1/models").json["data"][0]["id"]
    for words in (f"Inflight {inflight.__version__}", name, "ready", "http://localhost/v1", f'"model": "{name}"'):
        assert words in page, words
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == ["docs", "openapi.json", "health", "ready", "metrics"]
    assert all(api.get(f"/{link}").status == 200 for link in links)


def test_the_page_loads_nothing_from_elsewhere_and_runs_only_its_own_script(api: Api) -> None:
    answer = api.get("/", BROWSER)
    assert not any(name in attributes for _, attributes in page_of(answer).tags for name in ("src", "srcset", "style"))
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    for element, directive in (("style", "style-src"), ("script", "script-src")):
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", answer.text, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy


@pytest.mark.parametrize(
    "accept", ["", "*/*", "application/json", "application/json, text/plain, */*", "text/html;q=0, */*", "text/*"]
)
def test_programs_get_the_text_of_ollama(api: Api, accept: str) -> None:
    assert api.get("/", {"accept": accept} if accept else {}).text == "Ollama is running"


def test_only_the_path_itself_is_a_page(api: Api) -> None:
    assert api.get("/v1/models", BROWSER).headers["content-type"] == "application/json"
    assert api.open("/", None, BROWSER, method="POST").end().status == 405
    head = api.get("/", BROWSER, method="HEAD")
    assert head.status == 200 and head.headers["content-type"] == "text/html; charset=utf-8"


def test_with_keys_the_page_tells_nothing_that_they_protect() -> None:
    settings = replace(SETTINGS, api_keys=("first-key-1",), served_model_names=("secret-name",))
    with serving(settings) as api:
        for headers in (BROWSER, {**BROWSER, "authorization": "Bearer wrong-key-1"}):
            answer = api.get("/", headers)
            assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert inflight.__version__ not in answer.text and "secret-name" not in answer.text
            assert "Requests need a key: Authorization: Bearer KEY" in page_of(answer)
        answer = api.get("/", {**BROWSER, "authorization": "Bearer first-key-1"})
        assert answer.status == 200 and "secret-name" in page_of(answer) and "first-key-1" not in answer.text


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("llm.example.com:8080", "http://llm.example.com:8080/v1"),
        ("[::1]:8000", "http://[::1]:8000/v1"),
        ('x"><script>alert(1)</script>', "http://127.0.0.1:8000/v1"),
        ("a'; rm -rf /; '", "http://127.0.0.1:8000/v1"),
        ("$(id)", "http://127.0.0.1:8000/v1"),
    ],
)
def test_a_strange_host_is_not_shown(host: str, shown: str) -> None:
    with serving(replace(SETTINGS, allowed_hosts=("*",))) as api:
        answer = api.get("/", {**BROWSER, "host": host})
        assert shown in page_of(answer)
        assert shown[:-3] == f"http://{host}" or host not in answer.text
        assert answer.text.count("<script>") == 1


def test_the_names_of_models_are_text() -> None:
    name = "<img src=x onerror=alert(1)>'\"&$(id)"
    with serving(replace(SETTINGS, served_model_names=(name,))) as api:
        page = page_of(api.get("/", BROWSER))
        assert name in page
        assert not any(tag == "img" for tag, _ in page.tags)


def test_a_name_that_is_not_allowed_gets_no_page(api: Api) -> None:
    assert api.get("/", {**BROWSER, "host": "evil.example.com"}).status == 403


@pytest.mark.filterwarnings("ignore:The `root_path` parameter is deprecated")
def test_behind_a_prefix_the_links_are_relative_and_the_addresses_have_it() -> None:
    with serving(replace(SETTINGS, root_path="/llm", disable_fastapi_docs=True)) as api:
        page = page_of(api.get("/llm/", BROWSER))
        assert "http://localhost/llm/v1" in page
        assert [attributes["href"] for tag, attributes in page.tags if tag == "a"] == ["health", "ready", "metrics"]


def test_while_the_server_starts_the_page_says_so_and_asks_for_nothing_else() -> None:
    asked = []

    async def starting(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 503, "headers": []})
        error = b'{"error": {"message": "the engine is <starting>", "code": "server_starting"}}'
        await send({"type": "http.response.body", "body": error})

    status, headers, _ = call(wrap(starting, ServerSettings(access_log="off", ui=False)), "/", headers=BROWSER)
    assert (status, headers["retry-after"], asked) == (503, "5", ["/ready"])
