"""The files of the page: small, their own, the same for everybody, and under a policy that runs nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from inflight.entrypoints import page
from tests.unit.entrypoints.api_client import SETTINGS, Api, serving

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
WEB = Path(page.__file__).parent / "web"
FILES = sorted(path.relative_to(WEB).as_posix() for path in WEB.rglob("*") if path.is_file())
OWN = [name for name in FILES if not name.startswith("vendor/")]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving() as made:
        yield made


def test_a_browser_gets_the_page_and_programs_the_text_of_ollama(api: Api) -> None:
    answer = api.get("/", BROWSER)
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == (WEB / "index.html").read_text()
    assert api.get("/", {"accept": "*/*"}).text == "Ollama is running"


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_sent_as_it_is(api: Api, name: str) -> None:
    answer = api.get(f"/page/{name}")
    kinds = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    assert answer.status == 200 and answer.text == (WEB / name).read_text()
    assert answer.headers["content-type"].startswith(kinds.get(Path(name).suffix, "text/plain"))
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = api.get(f"/page/{name}", {"if-none-match": answer.headers["etag"]})
    assert (again.status, again.text) == (304, "")


def test_the_policy_runs_no_text_as_a_script(api: Api) -> None:
    policy = dict(part.split(" ", 1) for part in api.get("/", BROWSER).headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'self'" and policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in str(policy) and "script-src" not in policy


@pytest.mark.parametrize("name", ["../page_files.py", "..%2fpage_files.py", "missing.js", "", "vendor", "/etc/passwd"])
def test_nothing_else_can_be_asked_for(api: Api, name: str) -> None:
    assert api.get(f"/page/{name}").status == 404


def test_the_files_are_small_together() -> None:
    assert sum((WEB / name).stat().st_size for name in FILES) <= 400_000


def test_the_page_needs_no_other_host_and_makes_no_element_of_a_text() -> None:
    for name in OWN:
        text = (WEB / name).read_text()
        hosts = set(re.findall(r"https?://[\w./-]+", text)) - {"http://www.w3.org/2000/svg"}
        assert hosts <= {"http://www.w3.org/1998/Math/MathML"}, name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", text
        ), name
        assert name != "index.html" or not re.search(r"<style|\bon\w+=|style=|<script>", text)


def test_each_library_has_its_licence_beside_it() -> None:
    licences = {"vendor/marked.LICENSE", "vendor/temml.LICENSE", "vendor/highlight/LICENSE"}
    assert licences == {name for name in FILES if name.endswith("LICENSE")}
    libraries = {re.sub(r"\.js$", "", name).split("/")[1] for name in FILES if re.match(r"vendor/.*\.js$", name)}
    assert libraries == {"marked", "temml", "highlight"}


def test_with_keys_the_files_come_without_one_and_the_rest_does_not() -> None:
    with serving(replace(SETTINGS, api_keys=("first-key-1",), served_model_names=("secret-name",))) as api:
        assert api.get("/", BROWSER).status == api.get("/page/main.js").status == 200
        assert api.get("/v1/models", BROWSER).status == 401
        assert not any("secret-name" in api.get(f"/page/{name}").text for name in OWN)


def test_without_the_page_its_files_are_gone() -> None:
    with serving(replace(SETTINGS, ui=False)) as api:
        assert api.get("/page/main.js").status == 404
        assert '<script type="module"' not in api.get("/", BROWSER).text


def test_a_host_that_is_not_allowed_gets_no_page(api: Api) -> None:
    assert api.get("/", {**BROWSER, "host": "evil.example.com"}).status == 403


@pytest.mark.filterwarnings("ignore:The `root_path` parameter is deprecated")
def test_behind_a_prefix_all_addresses_are_relative() -> None:
    with serving(replace(SETTINGS, root_path="/llm")) as api:
        page_text = api.get("/llm/", BROWSER).text
        addresses = re.findall(r'(?:href|src)="([^"#]+)"', page_text)
        assert addresses and all(api.get(f"/llm/{address}").status == 200 for address in addresses)
