"""Stored responses with the official `openai` client, over two front ends, and over a server that is killed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from tests.e2e.serve_process import MODEL, ServeProcess, serving
from tests.support.waits import wait_until

KEYS = ("the-key-of-one", "the-key-of-two")
SHORT: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
LONG: Any = {"model": MODEL, "input": "x", "max_output_tokens": 100_000, "extra_body": {"ignore_eos": True}}


@contextlib.contextmanager
def client_of(server: ServeProcess, key: str = KEYS[0]) -> Iterator[OpenAI]:
    """Each request has a connection of its own, so the requests reach both front ends."""
    url = f"http://127.0.0.1:{server.port}/v1"
    headers = {"Connection": "close"}
    with OpenAI(base_url=url, api_key=key, max_retries=0, timeout=300, default_headers=headers) as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    temporary = tmp_path_factory.mktemp("temporary")
    keys = ["--api-key", KEYS[0], "--api-key", KEYS[1]]
    with serving("--api-server-count", "2", *keys, TMPDIR=str(temporary)) as made:
        yield made
        (folder,) = temporary.glob("inflight-responses-*")
        assert (folder / "responses.sqlite").exists()
        made.popen.send_signal(signal.SIGTERM)
        assert made.end() == 0, made.text_of_log()
        assert not folder.exists()


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> Iterator[OpenAI]:
    with client_of(server) as made:
        yield made


def ended(client: OpenAI, id: str) -> Response:
    wait_until(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(id)


def test_a_conversation_over_both_front_ends(client: OpenAI) -> None:
    first = client.responses.create(input="What is 2 + 3?", instructions="Answer.", **SHORT)
    second = client.responses.create(input="And 7 + 5?", previous_response_id=first.id, **SHORT)
    history: Any = [
        {"role": "user", "content": "What is 2 + 3?"},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "And 7 + 5?"},
    ]
    whole = client.responses.create(input=history, store=False, **SHORT)
    assert second.output_text == whole.output_text
    assert second.usage is not None and whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens
    for _ in range(8):
        assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.type for item in items] == ["message"] * 3
    assert items[1].id == first.output[0].id
    again: Any = [{"type": "item_reference", "id": item.id} for item in items]
    assert client.responses.create(input=again, **SHORT).output_text == second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(input="x", previous_response_id=second.id, **SHORT)
    assert refused.value.param == "previous_response_id"


def test_a_stream_is_stored(client: OpenAI) -> None:
    with client.responses.stream(input="What is 2 + 3?", **SHORT) as stream:
        final = stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == final.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(client.responses.create(input="x", store=False, **SHORT).id)


def test_another_key_finds_nothing(server: ServeProcess, client: OpenAI) -> None:
    mine = client.responses.create(input="x", **SHORT)
    with client_of(server, KEYS[1]) as other:
        for use in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="not found"):
                use(mine.id)
    assert client.responses.retrieve(mine.id).id == mine.id


def test_the_background(client: OpenAI) -> None:
    queued = client.responses.create(input="What is 2 + 3?", background=True, **SHORT)
    assert (queued.status, queued.background) == ("queued", True)
    done = ended(client, queued.id)
    assert done.output_text == client.responses.create(input="What is 2 + 3?", **SHORT).output_text
    running = client.responses.create(background=True, **LONG)
    assert client.responses.cancel(running.id).status == "cancelled"
    assert client.responses.retrieve(running.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(client.responses.create(input="x", **SHORT).id)


def test_a_stream_in_the_background_goes_on_elsewhere(client: OpenAI) -> None:
    stream = client.responses.create(input="What is 2 + 3?", background=True, stream=True, **SHORT)
    seen = [next(stream) for _ in range(5)]
    stream.close()
    assert seen[0].type == "response.created"
    id = seen[0].response.id
    rest = list(client.responses.retrieve(id, stream=True, starting_after=seen[-1].sequence_number))
    numbers = [event.sequence_number for event in [*seen, *rest]]
    assert numbers == list(range(len(numbers)))
    last = rest[-1]
    assert last.type == "response.completed" or last.type == "response.incomplete"
    deltas = [event.delta for event in [*seen, *rest] if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text == ended(client, id).output_text


def test_after_a_crash_responses_are_there_and_a_running_one_has_failed(tmp_path: Path) -> None:
    options = ["--response-store", str(tmp_path / "responses.sqlite")]
    with serving(*options) as server, client_of(server) as client:
        done = client.responses.create(input="What is 2 + 3?", **SHORT)
        running = client.responses.create(background=True, **LONG)
        wait_until(lambda: client.responses.retrieve(running.id).status == "in_progress")
        server.popen.kill()
        server.end()
    with serving(*options) as server, client_of(server) as client:
        assert client.responses.retrieve(done.id).to_dict() == done.to_dict()
        failed = client.responses.retrieve(running.id)
        assert failed.status == "failed" and failed.error is not None
        assert "restarted" in failed.error.message
        client.responses.create(input="And 7 + 5?", previous_response_id=done.id, **SHORT)
        # a server that ends in order says so in the response
        running = client.responses.create(background=True, **LONG)
        server.popen.send_signal(signal.SIGTERM)
        server.wait_until("/ready", 503)  # two signals at once could be one
        server.popen.send_signal(signal.SIGTERM)
        server.end()
    with serving(*options) as server, client_of(server) as client:
        assert client.responses.retrieve(running.id).status == "failed"
