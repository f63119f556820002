"""`BrowserPage`: what a person sees with --no-ui who opens the server's address in a browser: the model, whether it is ready,
and base URLs.

The page loads nothing from elsewhere. It asks the app inside of it for /ready, /version and /v1/models, with the headers of the
browser's own request. So it shows nothing that the server would not tell this client: without a key of a server with keys, it
shows no names. Programs that ask for `/` without `Accept: text/html` get the app's own answer, as before.
"""

import base64
import hashlib
import html
import json
import re
import shlex
from typing import Any
from urllib.parse import urlsplit

from inflight.entrypoints.apis import base_urls
from inflight.entrypoints.page.page_files import accepts_html
from inflight.entrypoints.serve.asgi import RETRY_AFTER_SECONDS, ASGIApp, Message, Receive, Scope, Send, header_of

# What may be shown of a Host header, which every web page and program can choose.
_HOST = re.compile(rb"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem; color-scheme: light dark; }
h1 { font-size: 1.6rem; } code, pre { font: 14px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; border: 1px solid #8886; border-radius: 6px; padding: .7rem; }
th { text-align: left; font-weight: normal; padding-right: 1.5rem; vertical-align: top; }
"""
# The answer of /ready is shown as text, never as markup. After a start or a recovery the page is loaded again, to show the
# names of the model.
_SCRIPT = """
const shown = document.getElementById("state"), before = shown.textContent;
async function showState() {
  let text = "does not answer";
  try {
    const answer = await fetch("ready", {cache: "no-store"}), body = await answer.json();
    text = answer.ok ? "ready" : "not ready: " + (body.error ? body.error.message : answer.status);
    if (answer.ok && before !== "ready") location.reload();
  } catch (error) {}
  shown.textContent = text;
}
setInterval(showState, 5000);
"""
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Inflight</title><style>{style}</style></head>
<body>
<h1>Inflight{version}</h1>
<table>
<tr><th>Server</th><td id="state">{state}</td></tr>
{names}</table>
<p>This is an API for programs. Base URLs:</p>
<table>
{apis}</table>
<pre>{curl}</pre>
<p>{links}</p>
<script>{script}</script>
</body>
</html>
"""


def _hash_source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_HEADERS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"vary", b"Accept"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        f"default-src 'none'; style-src {_hash_source(_STYLE)}; script-src {_hash_source(_SCRIPT)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'".encode(),
    ),
]


class BrowserPage:
    """
    Args:
        url: the server's own address, for requests whose `Host` header is not shown.
        root_path: the prefix of paths that a proxy does not remove.
        has_docs: whether the app has the page /docs.
    """

    def __init__(self, app: ASGIApp, url: str, root_path: str, *, has_docs: bool) -> None:
        self._app = app
        self._url = url
        self._root_path = root_path
        self._links = ["docs", "openapi.json"] if has_docs else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/" or scope["method"] != "GET" or not accepts_html(scope):
            await self._app(scope, receive, send)
            return
        status, ready = await self._ask(scope, "/ready")
        error = ready.get("error", {})
        state = "ready" if status == 200 else f"not ready: {error.get('message', status)}"
        version: dict[str, Any] = {}
        models: dict[str, Any] = {}
        if not str(error.get("code")).startswith(
            "server_"
        ):  # otherwise the server refuses all other paths, and counts that
            status, models = await self._ask(scope, "/v1/models")
            _, version = await self._ask(scope, "/version")
        body = self._page(scope, state, version.get("version", ""), models, needs_key=status == 401).encode()
        headers = [*_HEADERS, (b"content-length", b"%d" % len(body))]
        headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
        headers += [(b"retry-after", b"%d" % RETRY_AFTER_SECONDS)] if status == 503 else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _page(self, scope: Scope, state: str, version: str, models: dict[str, Any], *, needs_key: bool) -> str:
        names = [card["id"] for card in models.get("data", ())]
        rows = [("Model", ", ".join(names))] if names else []
        rows += [("Key", "Requests need a key: Authorization: Bearer KEY")] if needs_key else []
        host = header_of(scope, b"host") or b""
        own = urlsplit(self._url)
        shown = host.decode() if _HOST.fullmatch(host) else own.netloc or "localhost"
        base = f"{scope.get('scheme') or own.scheme}://{shown}{self._root_path}"
        question = {"model": names[0] if names else "NAME", "messages": [{"role": "user", "content": "Hello"}]}
        curl = f"curl {base}/v1/chat/completions -H 'Content-Type: application/json' "
        curl += "-H 'Authorization: Bearer KEY' " if needs_key or header_of(scope, b"authorization") else ""
        curl += f"-d {shlex.quote(json.dumps(question, ensure_ascii=False))}"
        return _PAGE.format(
            style=_STYLE,
            script=_SCRIPT,
            version=html.escape(f" {version}" if version else ""),
            state=html.escape(state),
            names="".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>\n" for name, value in rows),
            apis="".join(
                f"<tr><th>{titles}</th><td><code>{html.escape(base + path)}</code></td></tr>\n"
                for path, titles in base_urls().items()
            ),
            curl=html.escape(curl),
            links=" · ".join(f'<a href="{path}">/{path}</a>' for path in (*self._links, "health", "ready", "metrics")),
        )

    async def _ask(self, scope: Scope, path: str) -> tuple[int, dict[str, Any]]:  # Any: JSON
        """The app's answer for another path, with the headers of this request."""
        status = 500
        body = b""

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")

        state = dict(scope.get("state", {}))
        await self._app(
            {**scope, "path": path, "raw_path": path.encode(), "query_string": b"", "state": state}, receive, send
        )
        try:
            answer = json.loads(body)
        except ValueError:
            return status, {}
        return status, answer if isinstance(answer, dict) else {}
