"""What is wrong with an image is a 400 in each API, with the image's place in `param`, before anything runs."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from inflight.entrypoints.serve.settings import ServerSettings
from tests.e2e.openai_server import MODEL, demo_args, running_server
from tests.support.served_image_model import picture, png, write_served_image_model

MOST, MOST_TOKENS = 2, 64  # of a prompt: images, tokens
# Counters that grow when the engine computes something, or has a request
COMPUTED = ("encoder_slices", "encoder_cache_queries", "prompt_tokens", "request_success")


def bomb() -> bytes:
    """A small file of 30,000 x 30,000 pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(30_000 * 3_751), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def long_image() -> bytes:
    """More tokens than the context."""
    file = io.BytesIO()
    Image.new("RGB", (400, 400)).save(file, "PNG")
    return file.getvalue()


# what is wrong -> the content of a file, or a URL; and words of the error
FILES: dict[str, tuple[bytes, str]] = {
    "no image": (b"<html>not found</html>", "not an image"),
    "empty": (b"", ""),
    "decompression bomb": (bomb(), "pixels"),
    "truncated": (png(picture(1))[:400], ""),
}
URLS: dict[str, tuple[str, str]] = {
    "host that is not allowed": ("https://example.com/a.png", "may not be fetched"),
    "private address": ("http://127.0.0.1/a.png", "may not be fetched"),
    "metadata of a cloud": ("http://169.254.169.254/latest", "may not be fetched"),
    "file": ("file:///etc/passwd", "allowed-local-media-path"),
    "other scheme": ("ftp://example.com/a.png", ""),
}
# API -> its path, the place of the second image, and what follows the place in an error about a URL or a file
APIS = {
    "chat": ("/v1/chat/completions", "messages[0].content[1].image_url.url", "messages"),
    "responses": ("/v1/responses", "input[0].content[1].image_url", "input"),
    "messages": ("/v1/messages", "messages[0].content[1].source", "messages"),
    "ollama": ("/api/chat", "messages[0].images[1]", "messages"),
}


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{encoded(content)}"


def body_of(api: str, images: list[bytes | str]) -> dict[str, Any]:
    """A request with these files, or URLs."""
    urls = [each if isinstance(each, str) else data_url(each) for each in images]
    if api == "chat":
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    if api == "responses":
        items = [{"type": "input_image", "image_url": url} for url in urls]
        return {"input": [{"role": "user", "content": items}], "max_output_tokens": 16}
    if api == "messages":
        sources: list[dict[str, Any]] = [
            {"type": "url", "url": each}
            if isinstance(each, str)
            else {"type": "base64", "media_type": "image/png", "data": encoded(each)}
            for each in images
        ]
        blocks = [{"type": "image", "source": each} for each in sources]
        return {"messages": [{"role": "user", "content": blocks}], "max_tokens": 2}
    assert all(isinstance(each, bytes) for each in images), "Ollama's API has no URLs"
    contents = [encoded(each) for each in images if isinstance(each, bytes)]
    return {"messages": [{"role": "user", "content": "a", "images": contents}], "stream": False}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = write_served_image_model(tmp_path_factory.mktemp("model") / "images")
    settings = ServerSettings(served_model_names=(MODEL,), access_log="off", stream_keep_alive_interval=None)
    args = demo_args(model=str(folder), max_model_len=MOST_TOKENS, limit_mm_per_prompt={"image": MOST})
    with running_server(args, settings) as running, httpx.Client(base_url=running.url, timeout=300) as client:
        yield client


def computed(http: httpx.Client) -> dict[str, float]:
    found = dict.fromkeys(COMPUTED, 0.0)
    for line in http.get("/metrics").text.splitlines():
        name = line.partition("{")[0].removeprefix("inflight:").removesuffix("_total")
        if line.startswith("inflight:") and name in found:
            found[name] += float(line.rpartition(" ")[2])
    return found


def refused(http: httpx.Client, api: str, images: list[bytes | str], place: str, words: str) -> None:
    before = computed(http)
    answer = http.post(APIS[api][0], json=body_of(api, images))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert words in message
    # Anthropic's and Ollama's errors have no other field for it than the message
    param = error["param"] if isinstance(error, dict) and "param" in error else message
    assert str(param).startswith(place), error
    assert computed(http) == before, "something was computed"


GOOD = png(picture(0, 48, 12))  # has fewer tiles than a square


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("api", APIS)
def test_a_wrong_file(http: httpx.Client, api: str, what: str) -> None:
    content, words = FILES[what]
    refused(http, api, [GOOD, content], APIS[api][1], words)


@pytest.mark.parametrize("what", URLS)
@pytest.mark.parametrize("api", [api for api in APIS if api != "ollama"])
def test_a_wrong_url(http: httpx.Client, api: str, what: str) -> None:
    url, words = URLS[what]
    refused(http, api, [GOOD, url], APIS[api][1], words)


@pytest.mark.parametrize("api", APIS)
def test_too_many_images(http: httpx.Client, api: str) -> None:
    refused(http, api, [GOOD] * (MOST + 1), APIS[api][2], str(MOST))


@pytest.mark.parametrize("api", APIS)
def test_an_image_that_is_longer_than_the_context(http: httpx.Client, api: str) -> None:
    # Claude Code compacts a conversation if it reads this sentence (docs/agents.md)
    place = "prompt is too long" if api == "messages" else APIS[api][2]
    refused(http, api, [long_image()], place, "tokens")


@pytest.mark.parametrize("api", APIS)
def test_a_model_for_text(api: str) -> None:
    settings = ServerSettings(served_model_names=(MODEL,), access_log="off", stream_keep_alive_interval=None)
    with running_server(demo_args(), settings) as running, httpx.Client(base_url=running.url, timeout=300) as client:
        refused(client, api, [GOOD], APIS[api][2], "takes no images")


def test_an_unknown_uuid(http: httpx.Client) -> None:
    before = computed(http)
    for path, image, place in (
        ("/v1/chat/completions", {"type": "image_url", "image_url": None, "uuid": "?"}, "messages[0].content[0].uuid"),
        ("/v1/responses", {"type": "input_image", "uuid": "?"}, "input[0].content[0].uuid"),
    ):
        name = place.partition("[")[0]
        answer = http.post(path, json={name: [{"role": "user", "content": [image]}]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, place), answer.text
    assert computed(http) == before
