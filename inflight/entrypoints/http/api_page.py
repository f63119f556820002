"""The page /docs: the list of all paths, which needs no network, and Swagger UI in its place where the browser can load it."""

import html
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response

_SWAGGER = "https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui"
# The scripts come last, so that the browser shows the list while it waits for them.
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Inflight: API</title></head>
<body>
<div id="swagger-ui">
<h1>Inflight: API</h1>
<p>Programs read <a href="openapi.json">openapi.json</a>. A page to try the API takes the place of this list if your browser
can load its scripts from cdn.jsdelivr.net.</p>
<table>
{rows}
</table>
</div>
<link rel="stylesheet" href="{swagger}.css">
<script src="{swagger}-bundle.js"></script>
<script>if (window.SwaggerUIBundle) SwaggerUIBundle({{url: "openapi.json", dom_id: "#swagger-ui"}});</script>
</body>
</html>
"""


def add_api_page(app: FastAPI) -> None:
    """Add /docs. The app must have an OpenAPI document at /openapi.json."""

    async def docs(request: Request) -> Response:
        page = _PAGE.format(rows=_rows(app.openapi()), swagger=_SWAGGER)
        return Response(page, media_type="text/html", headers={"X-Frame-Options": "DENY"})

    app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)


def _rows(document: Mapping[str, Any]) -> str:  # Any: JSON
    """A row for each method of each path, with the first line of its description."""
    return "\n".join(
        f"<tr><td><code>{method.upper()} {html.escape(path)}</code></td><td>{html.escape(_about(operation))}</td></tr>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )


def _about(operation: Mapping[str, Any]) -> str:  # Any: as above
    lines = str(operation.get("description", "")).splitlines()
    return lines[0] if lines else str(operation.get("summary", ""))
