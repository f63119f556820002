"""The page /docs: without the network it lists all paths."""

from __future__ import annotations

import html
from dataclasses import replace

from tests.unit.entrypoints.api_client import SETTINGS, serving


def test_the_page_lists_every_path_before_it_loads_anything() -> None:
    with serving() as api:
        answer = api.get("/docs")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        listed, _, rest = answer.text.partition("</table>")
        for path, operations in api.get("/openapi.json").json["paths"].items():
            for method in operations:
                assert f"<code>{method.upper()} {html.escape(path)}</code>" in listed
        assert "https://" not in listed and 'src="https://cdn.jsdelivr.net/' in rest
        assert "cdn.jsdelivr.net" in listed, "the page says what it would load"


def test_the_page_may_be_left_out() -> None:
    with serving(replace(SETTINGS, disable_fastapi_docs=True)) as api:
        assert api.get("/docs").status == 404
