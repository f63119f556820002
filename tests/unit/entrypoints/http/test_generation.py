"""The events of several prompts in one stream, and whose fault it is that a request ended with an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.entrypoints.http.errors import to_api_error
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.generation import MAX_LOGPROBS_OF_ANSWER, _check_logprobs, check_output, send_events
from inflight.entrypoints.http.presenter import AnswerTo
from inflight.entrypoints.http.sse import EventStream
from inflight.entrypoints.openai.completion_presenter import CompletionPresenter
from inflight.entrypoints.openai.protocol import DetokenizeRequest
from inflight.errors import ErrorKind, InflightError, InvalidRequestError
from inflight.outputs import RequestOutput
from inflight.sampling_params import SamplingParams
from tests.unit.entrypoints.outputs import completion, output, request


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        ("json: it is too complex", ErrorKind.REQUEST, 400),
        ("", ErrorKind.REQUEST, 400),
        ("the step failed", ErrorKind.ENGINE, 500),
        ("too many grammars wait", ErrorKind.OVERLOAD, 503),
    ],
)
def test_an_error_is_the_requests_or_the_servers(error: str, kind: ErrorKind, status: int) -> None:
    failed = output(completion("", finish_reason="error"), error=error, error_kind=kind)
    with pytest.raises(InflightError) as raised:
        check_output(failed)
    assert getattr(raised.value, "param", "") == ("structured_outputs" if kind is ErrorKind.REQUEST else "")
    told = to_api_error(raised.value)
    assert told.status_code == status
    assert ("Retry-After" in (told.headers or {})) is (status == 503)
    check_output(output(completion("x", finish_reason="stop")))


@pytest.mark.parametrize(
    ("logprobs", "prompt_logprobs", "is_stream", "most"),
    [
        (0, None, False, MAX_LOGPROBS_OF_ANSWER // 4),  # of 2 prompts with 2 choices each: the drawn tokens' own
        (1, None, False, MAX_LOGPROBS_OF_ANSWER // 8),
        (1, None, True, 2**30),  # they are sent as they come
        (None, 0, True, MAX_LOGPROBS_OF_ANSWER // 2),
        (None, 3, False, MAX_LOGPROBS_OF_ANSWER // 8),
    ],
)
def test_the_logprobs_of_an_answer_are_bounded(
    logprobs: int | None, prompt_logprobs: int | None, is_stream: bool, most: int
) -> None:
    """`most`: the most tokens of a completion, or of a prompt."""

    def check(num_tokens: int) -> None:
        params = SamplingParams(n=2, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        sequences = [SimpleNamespace(sampling=SimpleNamespace(max_tokens=num_tokens))] * 2
        asked: Any = SimpleNamespace(params=params, sequences=sequences, prompt_token_ids=range(num_tokens))
        _check_logprobs([asked, asked], is_stream)

    check(most)
    if most < 2**30:
        with pytest.raises(InvalidRequestError, match="log-probabilities"):
            check(most + 1)


async def delayed(*pieces: tuple[float, str | Exception]) -> AsyncIterator[RequestOutput]:
    """Outputs of one prompt, or an error, each after its seconds. The last output ends the prompt."""
    for i, (seconds, piece) in enumerate(pieces):
        await asyncio.sleep(seconds)
        if isinstance(piece, Exception):
            raise piece
        yield output(completion(piece, finish_reason="stop" if i == len(pieces) - 1 else None))


class OpeningPresenter(CompletionPresenter):
    def opening(self) -> bytes:
        return b'data: "opened"\n\n'


def sent_events(
    *streams: AsyncIterator[RequestOutput], kind: type[CompletionPresenter] = CompletionPresenter
) -> list[Any]:
    """The JSON of the events before the last one, which is [DONE]."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    presenter = kind(AnswerTo("id", request(len(streams), stream=True), "fp", None))
    every: Any = streams
    asyncio.run(send_events(every, presenter, EventStream(send), FieldNames(DetokenizeRequest(tokens=[]))))
    assert [message["type"] for message in messages].count("http.response.start") == 1
    *events, done, end = b"".join(message.get("body", b"") for message in messages).decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_the_prompts_events_come_as_their_outputs_do() -> None:
    events = sent_events(delayed((0.0, "a"), (0.06, "b")), delayed((0.03, "c"), (0.06, "d")))
    found = [(event["choices"][0]["index"], event["choices"][0]["text"]) for event in events]
    assert found == [(0, "a"), (1, "c"), (0, "b"), (1, "d")]


def test_an_error_of_one_prompt_ends_the_stream() -> None:
    wrong = InvalidRequestError("json: it is too complex")
    first, error = sent_events(delayed((0.0, "a"), (20.0, "b")), delayed((0.03, wrong)))
    assert first["choices"][0]["text"] == "a"
    assert error["error"]["message"] == str(wrong)
    for streams in ([delayed((0.0, wrong))], [delayed((20.0, "a")), delayed((0.0, wrong))]):
        with pytest.raises(InvalidRequestError, match="too complex"):
            sent_events(*streams)


def test_a_stream_that_has_been_opened_ends_with_its_error() -> None:
    opened, told = sent_events(delayed((0.0, InvalidRequestError("wrong"))), kind=OpeningPresenter)
    assert (opened, told["error"]["message"]) == ("opened", "wrong")
    opened, text = sent_events(delayed((0.0, "a")), kind=OpeningPresenter)
    assert (opened, text["choices"][0]["text"]) == ("opened", "a")
