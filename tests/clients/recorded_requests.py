"""The requests of real clients in ../shared/clients/recorded, as the server's APIs give them to the chat template.

Each request goes to the HTTP application over an engine that is played. What it gives to the chat template is kept, so it can
be rendered with other templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.tokenizer.chat_template import ChatTemplate, RenderedChat
from tests.unit.entrypoints.api_client import SETTINGS, serving
from tests.unit.structured_output.grammar_case import MODEL

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "clients" / "recorded"
# The endpoints that use a chat template.
PATHS = (
    "/chat/completions",
    "/responses",
    "/responses/input_tokens",
    "/messages",
    "/messages/count_tokens",
    "/api/chat",
)


@dataclass(frozen=True)
class Rendered:
    """Arguments of `ChatTemplate.render`, and the file whose request has led to them."""

    file: str
    messages: list[dict[str, Any]]  # Any: JSON
    options: dict[str, Any]


class Recorder(ChatTemplate):
    """A template that keeps what it renders."""

    def __init__(self, source: str) -> None:
        super().__init__({"default": source})
        self.calls: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> RenderedChat:  # Any: of ChatTemplate
        self.calls.append(json.loads(json.dumps([list(messages), options])))
        return super().render_chat(messages, **options)


def recorded(folder: Path = FOLDER) -> tuple[list[Rendered], list[str]]:
    """What all requests give to the template, and the files whose requests give nothing to it."""
    source = ChatTemplate.from_folder(MODEL).default_source
    assert source is not None
    found: list[Rendered] = []
    without: list[str] = []
    template = Recorder(source)
    with serving(SETTINGS, template=source) as api:
        api.engine.chat_template = template
        for file, path, body in _requests(folder):
            template.calls.clear()
            api.post(path, body)  # most answers are an error: the played engine takes 200 tokens
            found += [Rendered(file, messages, options) for messages, options in template.calls[-1:]]
            without += [] if template.calls else [file]
    return found, without


def _requests(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for file in sorted(folder.glob("*/*.json")):
        request = json.loads(file.read_text(encoding="utf-8"))
        path = request["path"].removeprefix("/v1")
        if request["method"] == "POST" and path in PATHS:
            body = {key: value for key, value in request["body"].items() if key != "model"}
            yield file.name, path if path.startswith("/api/") else f"/v1{path}", body
