"""`local_hub`: a hub on this machine, for programs whose HF_ENDPOINT is its address. It has the repositories of a folder."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMIT = "c" * 40


@dataclass
class LocalHub:
    """
    Attributes:
        url: for HF_ENDPOINT.
        damaged: names of files whose contents are sent with one byte changed.
        sent: names of files that were downloaded.
    """

    folder: Path
    url: str = ""
    damaged: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_api else parts[:2])
        repository = self.hub.folder / name
        if not repository.is_dir():
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
        elif is_api:
            self._send(200, json.dumps(self._listed(repository, name, parts)).encode(), {}, with_body)
        else:
            self._send_file(repository, "/".join(parts[4:]), with_body)

    def _listed(self, repository: Path, name: str, parts: list[str]) -> Any:
        files = sorted(path for path in repository.rglob("*") if path.is_file())
        names = [path.relative_to(repository).as_posix() for path in files]
        if "tree" in parts:
            return [
                {"type": "file", "path": each, "size": path.stat().st_size, "oid": _git_digest(path.read_bytes())}
                for each, path in zip(names, files, strict=True)
            ]
        return {"id": name, "modelId": name, "sha": COMMIT, "siblings": [{"rfilename": each} for each in names]}

    def _send_file(self, repository: Path, name: str, with_body: bool) -> None:
        path = repository / name
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{_git_digest(content)}"', "X-Repo-Commit": COMMIT}
        if name in self.hub.damaged:
            content = bytes([content[0] ^ 1]) + content[1:]
        if with_body:
            self.hub.sent.append(name)
        self._send(200, content, headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextmanager
def local_hub(folder: Path) -> Iterator[LocalHub]:
    """`folder` has the repositories as ORG/NAME."""
    hub = LocalHub(folder)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
