"""`PageFiles`: sends the files of the page to browsers. They are the same for everybody, and tell nothing about the server.

GET /              with `Accept: text/html`: web/index.html; other programs get the answer of the app
GET /page/NAME     web/NAME

The files need no key, because the page must be there to ask for one; all that it shows comes from endpoints that need it.
Nothing is loaded from other hosts, and no script runs that is not one of these files: `_POLICY` has the browser hold it.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from inflight.entrypoints.serve.asgi import ASGIApp, Receive, Scope, Send, header_of

_FOLDER = Path(__file__).parent / "web"
_INDEX = "index.html"
_PREFIX = "/page/"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# data: only for the images that a user attaches. Trusted types refuse every way to make elements of a text.
_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = [
    (b"cache-control", b"no-cache"),  # the browser asks each time whether its copy is the same
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", _POLICY.encode()),
]


@dataclass(frozen=True)
class _File:
    body: bytes
    content_type: bytes
    etag: bytes


class PageFiles:
    """`app` answers all other requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files: dict[str, _File] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = self._file_at(scope) if scope["method"] == "GET" else None
        if file is None:
            await self._app(scope, receive, send)
            return
        headers = [*_HEADERS, (b"etag", file.etag), (b"vary", b"Accept")]
        if header_of(scope, b"if-none-match") == file.etag:
            await send({"type": "http.response.start", "status": 304, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        headers += [(b"content-type", file.content_type), (b"content-length", b"%d" % len(file.body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": file.body})

    def _file_at(self, scope: Scope) -> _File | None:
        path = scope["path"]
        if path == "/" and accepts_html(scope):
            name = _INDEX
        elif path.startswith(_PREFIX):
            name = path.removeprefix(_PREFIX)
        else:
            return None
        if self._files is None:  # not at the start, which need not wait for them
            self._files = _read_files()
        return self._files.get(name)


def _read_files() -> dict[str, _File]:
    """All files, by their paths below `web/`. A name that is not among them cannot be asked for."""
    files = {}
    for path in sorted(_FOLDER.rglob("*")):
        if path.is_file():
            body = path.read_bytes()
            kind = _TYPES.get(path.suffix, "text/plain")
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            name = path.relative_to(_FOLDER).as_posix()
            files[name] = _File(body, f"{kind}; charset=utf-8".encode(), etag.encode())
    return files


def accepts_html(scope: Scope) -> bool:
    """Whether the client takes HTML by name, as browsers do. `*/*` is not enough: other programs send it."""
    given = b",".join(value for name, value in scope["headers"] if name == b"accept").decode("latin-1").lower()
    for entry in given.split(","):
        kind, *parameters = (part.replace(" ", "").strip() for part in entry.split(";"))
        if kind == "text/html":
            return not any(re.fullmatch(r"q=0(\.0*)?", parameter) for parameter in parameters)
    return False
