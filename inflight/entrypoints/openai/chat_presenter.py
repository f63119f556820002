"""`ChatPresenter`: answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from inflight.entrypoints.openai.logprobs import Row, chat_logprobs, prompt_logprobs
from inflight.entrypoints.openai.presenter import Presenter, encode_json
from inflight.entrypoints.openai.validated import Presentation
from inflight.outputs import CompletionOutput, RequestOutput
from inflight.parsers.events import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from inflight.parsers.output_parser import OutputParser
from inflight.tokenizer.tokenizer import Tokenizer

_ROLE = '{"role":"assistant","content":""}'


class ChatPresenter(Presenter):
    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def __init__(
        self, answer_id: str, presentation: Presentation, fingerprint: str, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(answer_id, presentation, fingerprint, tokenizer)
        self._parsers: dict[int, OutputParser | None] = {}  # by choice, from its first output on

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[str]:
        self._usage.add(prompt_index, output)
        events: list[str] = []
        for choice in output.outputs:
            if choice.index not in self._parsers:
                self._parsers[choice.index] = self._make_parser()
                events.append(self._role_chunk(choice.index, output))
            events += self._choice_chunks(choice, self._parsers[choice.index])
        return events

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        more: dict[str, Any] = {}
        if self._presentation.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
        if self._presentation.prompt_logprobs and output.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return self._body([self._choice(choice) for choice in output.outputs], outputs, **more)

    # -- a stream ------------------------------------------------------------------------------------------------------

    def _role_chunk(self, index: int, output: RequestOutput) -> str:
        more = ""
        if self._presentation.return_token_ids:
            more = ',"prompt_token_ids":' + encode_json(output.prompt_token_ids)
        return self._chunk(f'{{"index":{index},"delta":{_ROLE},"logprobs":null,"finish_reason":null}}', more)

    def _choice_chunks(self, choice: CompletionOutput, parser: OutputParser | None) -> list[str]:
        """One chunk per event of the parser. The first carries log-probabilities and ids, the last how the choice ended."""
        finished = choice.finish_reason is not None
        if parser is None:
            shows = bool(choice.text or (choice.token_ids and not finished))  # a token without text makes a chunk, too
            deltas = ['{"content":' + encode_json(choice.text) + "}"] if shows else []
        else:
            parsed = parser.push(choice.text) if choice.text else []
            parsed += parser.finish() if finished else []
            deltas = [_delta(event) for event in parsed]
        logprobs = self._logprobs(choice.logprobs)
        if not deltas and (finished or logprobs != "null" or self._shows_ids(choice)):
            deltas = ["{}"]
        events = []
        for i, delta in enumerate(deltas):
            end = "null"
            if finished and i == len(deltas) - 1:
                reason = encode_json(_finish_reason(choice, parser))
                end = f'{reason},"stop_reason":{encode_json(choice.stop_reason)}'
            ids = f',"token_ids":{encode_json(choice.token_ids)}' if i == 0 and self._shows_ids(choice) else ""
            events.append(
                self._chunk(
                    f'{{"index":{choice.index},"delta":{delta},"logprobs":{logprobs if i == 0 else "null"},'
                    f'"finish_reason":{end}{ids}}}'
                )
            )
        return events

    # -- both ----------------------------------------------------------------------------------------------------------

    def _make_parser(self) -> OutputParser | None:
        make = self._presentation.make_parser
        return None if make is None else make()

    def _shows_ids(self, choice: CompletionOutput) -> bool:
        return self._presentation.return_token_ids and bool(choice.token_ids)

    def _logprobs(self, rows: Sequence[Row] | None) -> str:
        top = self._presentation.top_logprobs
        if top is None or not rows:
            return "null"
        return encode_json({"content": chat_logprobs(rows, top, self._tokenizer), "refusal": None})

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        parser = self._make_parser()
        events: list[Event] = [ContentDelta(choice.text)]
        if parser is not None:
            events = [*parser.push(choice.text), *parser.finish()]
        top = self._presentation.top_logprobs
        logprobs = None
        if top is not None:
            logprobs = {"content": chat_logprobs(choice.logprobs or [], top, self._tokenizer), "refusal": None}
        return {
            "index": choice.index,
            "message": _message(events),
            "logprobs": logprobs,
            "finish_reason": _finish_reason(choice, parser),
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.token_ids} if self._presentation.return_token_ids else {}),
        }


def _finish_reason(choice: CompletionOutput, parser: OutputParser | None) -> str | None:
    if choice.finish_reason == "stop" and parser is not None and parser.num_tool_calls:
        return "tool_calls"
    return choice.finish_reason


def _delta(event: Event) -> str:
    if isinstance(event, ContentDelta):
        return '{"content":' + encode_json(event.text) + "}"
    if isinstance(event, ReasoningDelta):  # the second is the name that newer clients read
        text = encode_json(event.text)
        return f'{{"reasoning_content":{text},"reasoning":{text}}}'
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        call: dict[str, Any] = {"index": event.index, "id": event.id, "type": "function", "function": function}
    else:
        call = {"index": event.index, "function": {"arguments": event.text}}
    return encode_json({"tool_calls": [call]})


def _message(events: Iterable[Event]) -> dict[str, Any]:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, ContentDelta):
            content.append(event.text)
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, ToolCallStart):
            calls.append({"id": event.id, "type": "function", "function": {"name": event.name}})
            arguments.append([])
        else:
            assert isinstance(event, ToolArgumentsDelta)
            arguments[event.index].append(event.text)
    for call, pieces in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(pieces)
    text = "".join(content)
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    if reasoning:
        message |= {"reasoning_content": "".join(reasoning), "reasoning": "".join(reasoning)}
    if calls:
        message["tool_calls"] = calls
    return message
