"""`ResponsesPresenter`: writes the answers of /v1/responses.

A response has items: reasoning, messages and calls. In a stream each item has these events; <text> is `output_text`,
`reasoning_text`, `function_call_arguments` or `custom_tool_call_input`:

    output_item.added, content_part.added, <text>.delta, ..., <text>.done, content_part.done, output_item.done

Calls have no content part, and calls of OpenAI's own tools have no text. Before all items come `created` and `in_progress`,
after them `completed`, `incomplete` or `failed`. In the background `queued` comes after `created`.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic_core import from_json

from inflight.entrypoints.http.bodies import TokenLogprob
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.logprobs import PositionLogprobs, chat_logprobs
from inflight.entrypoints.http.presenter import AnswerTo, Presenter, events_of, to_json_in_slices
from inflight.entrypoints.http.sse import DONE
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.responses_api.bodies import (
    ItemStatus,
    ResponseError,
    ResponseState,
    ResponseStatus,
    ResponseUsage,
)
from inflight.entrypoints.responses_api.client_tools import ClientTool
from inflight.entrypoints.responses_api.conversation import ValidatedResponse
from inflight.entrypoints.responses_api.items import REASONING_ID
from inflight.entrypoints.responses_api.protocol import TextOptions
from inflight.entrypoints.responses_api.tools import OtherTool
from inflight.interface.events import ContentDelta, Event, ReasoningDelta, ToolCallStart
from inflight.outputs import RequestOutput
from inflight.parsers.surrogates import without_lone_surrogates
from inflight.tokenizer.call_arguments import readable_part
from inflight.tokenizer.history.other_calls import INPUT


class _Kind(NamedTuple):
    """A kind of item.

    Attributes:
        text_events: the beginning of the names of the events that carry the item's text.
        text_name: the member that has the whole text.
        part: the type of the content part that has the text; None if the item itself has it.
    """

    id_prefix: str
    type: str
    text_events: bytes
    text_name: str
    part: str | None


_REASONING = _Kind(REASONING_ID, "reasoning", b"response.reasoning_text", "text", "reasoning_text")
_MESSAGE = _Kind("msg_", "message", b"response.output_text", "text", "output_text")
_FUNCTION = _Kind("fc_", "function_call", b"response.function_call_arguments", "arguments", None)
_CUSTOM = _Kind("ctc_", "custom_tool_call", b"response.custom_tool_call_input", "input", None)

_STATUSES: dict[str, ResponseStatus] = {"stop": "completed", "length": "incomplete"}  # by the reason of the end

# members of a response that repeat fields of the request
_REPEATED = "instructions max_output_tokens max_tool_calls user safety_identifier".split()
_REPEATED += ["prompt_cache_key", "prompt_cache_retention"]
_SAMPLING = "temperature top_p presence_penalty frequency_penalty".split()


@dataclass(slots=True)
class _Item:
    """The item that is written now. `where` are the members by which events name the place of its text."""

    kind: _Kind
    members: dict[str, Any]  # Any: JSON
    where: bytes
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def part(self, text: str) -> dict[str, Any]:
        if self.kind is _MESSAGE:
            return {"type": self.kind.part, "text": text, "annotations": [], "logprobs": self.logprobs}
        return {"type": self.kind.part, "text": text}


@dataclass(slots=True)
class _ClientCall:
    """A call of a tool of OpenAI's that the client runs. It becomes an item at its end, because only its complete arguments say
    whether the client can run it."""

    tool: ClientTool
    call_id: str
    arguments: list[str] = field(default_factory=list)


class ResponsesPresenter(Presenter):
    """
    Attributes:
        status, final: of the response that has ended, and its JSON.
        output: the JSON of the items that have ended.
    """

    id_prefix = "resp"

    def __init__(self, to: AnswerTo) -> None:
        super().__init__(to)
        request = to.request
        assert isinstance(request, ValidatedResponse)
        self.id = to.answer_id
        self.model = request.presentation.model
        self.status: ResponseStatus = "in_progress"
        self.final = b""
        self.output: list[bytes] = []
        self._kept = request.kept
        self._tools = request.tools
        self._is_stream = request.presentation.stream
        self._shows_reasoning = request.presentation.reasoning
        self._echo = to_json(_echo(to.answer_id, request))
        self._sequence_number = 0
        self._finish_reason: str | None = None
        self._item: _Item | None = None
        self._client_call: _ClientCall | None = None
        self._rows: list[PositionLogprobs] = []  # the log-probabilities of tokens whose text has not come yet

    def opening(self) -> bytes:
        return b"".join(self.opening_events())

    def opening_events(self) -> list[bytes]:
        if self._kept is None or not self._kept.is_background:
            return [self._response_event("created", "in_progress"), self.keep_alive()]
        return [self._response_event("created", "queued"), self._response_event("queued", "queued"), self.keep_alive()]

    def keep_alive(self) -> bytes:
        # some clients, such as Codex, close a stream that sends only comments
        return self._response_event("in_progress", "in_progress")

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        self._usage.add(prompt_index, output)
        (choice,) = output.outputs
        self._finish_reason = choice.finish_reason
        if self._top_logprobs is not None:
            self._rows += choice.logprobs or ()
        chunks: list[bytes] = []
        for event in events_of(choice, with_reasoning=self._shows_reasoning):
            chunks += self._write(event)
        if choice.finish_reason is not None:
            if (
                self._item is None and self._client_call is None and not self.output
            ):  # a client expects a message, even if it is empty
                chunks += self._begin(_MESSAGE, role="assistant")
            chunks += self._end_item("completed" if choice.finish_reason == "stop" else "incomplete")
        return chunks

    def end(self) -> bytes:
        return self._last_event(self._final_status())

    def failure(self, error: ApiError) -> bytes:
        told = from_json(error.body())["error"]  # without what clients should not see
        return self._last_event("failed", {"code": told["code"] or told["type"], "message": told["message"]})

    def _last_event(self, status: ResponseStatus, error: ResponseError | None = None) -> bytes:
        body = self._end(status, error)
        return self._event(b"response." + status.encode(), b',"response":' + body) + DONE

    def _end(self, status: ResponseStatus, error: ResponseError | None = None) -> bytes:
        self.status = status
        self.final = self.response(status, error)
        return self.final

    async def keep(self) -> None:
        if self._kept is not None:
            await self._kept.add(self.id, self.model, self.status, self.final, self.output)

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        self.chunks(0, output)
        return self._end(self._final_status())

    # -- items ---------------------------------------------------------------------------------------------------------

    def _write(self, event: Event) -> list[bytes]:
        if isinstance(event, ToolCallStart):
            tool = self._tools.called(event.name)
            if tool.client is not None:
                ended = self._end_item("completed")
                self._client_call = _ClientCall(tool.client, event.id)
                return ended
            kind = _CUSTOM if tool.is_custom else _FUNCTION
            namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
            call = {"call_id": event.id, "name": tool.name, **namespace, kind.text_name: ""}
            return self._begin(kind, **call)
        if not event.text:
            return []
        begun: list[bytes] = []
        if isinstance(event, ContentDelta) and (self._item is None or self._item.kind is not _MESSAGE):
            begun = self._begin(_MESSAGE, role="assistant")
        elif isinstance(event, ReasoningDelta) and (self._item is None or self._item.kind is not _REASONING):
            begun = self._begin(_REASONING, summary=[])
        if self._client_call is not None:
            self._client_call.arguments.append(event.text)
            return begun
        assert self._item is not None
        self._item.texts.append(event.text)
        logprobs = self._take_logprobs(self._item)
        # the input of a custom tool is in the JSON of the arguments, which is read when it is complete
        has_delta = self._is_stream and self._item.kind is not _CUSTOM
        if not has_delta:
            return begun
        return [*begun, self._delta(self._item, event.text, logprobs)]

    def _begin(self, kind: _Kind, **members: Any) -> list[bytes]:
        """End the item before, and begin one."""
        chunks = self._end_item("completed")
        index = len(self.output)
        content: dict[str, Any] = {} if kind.part is None else {"content": []}
        shown = {
            "id": kind.id_prefix + uuid.uuid4().hex,
            "type": kind.type,
            "status": "in_progress",
            **members,
            **content,
        }
        place = {"item_id": shown["id"], "output_index": index, **({} if kind.part is None else {"content_index": 0})}
        self._item = item = _Item(kind, shown, _members(**place))
        chunks.append(self._event(b"response.output_item.added", _members(output_index=index, item=shown)))
        if kind.part is not None:
            chunks.append(self._event(b"response.content_part.added", item.where, _members(part=item.part(""))))
        return chunks

    def _end_item(self, status: ItemStatus) -> list[bytes]:
        item, self._item = self._item, None
        if item is None:
            return self._end_client_call(status)
        text = "".join(item.texts)
        if item.kind is _CUSTOM:
            text = input_of(text)
        item.members["status"] = status
        if item.kind.part is None:
            item.members[item.kind.text_name] = text
        else:
            item.members["content"] = [item.part(text)]
        ended = to_json_in_slices(item.members) if item.logprobs else to_json(item.members)
        chunks = self._end_events(item, text, ended) if self._is_stream else []
        self.output.append(ended)
        return chunks

    def _end_client_call(self, status: ItemStatus) -> list[bytes]:
        call, self._client_call = self._client_call, None
        if call is None:
            return []
        arguments = "".join(call.arguments)
        members = call.tool.item_members(arguments)
        if members is None:
            # The client gets what the model has written, as the call of a function. It says that there is no such function, or
            # why the arguments are wrong, and the model tries again.
            chunks = self._begin(_FUNCTION, call_id=call.call_id, name=call.tool.type, arguments="")
            assert self._item is not None
            self._item.texts.append(arguments)
            chunks.append(self._delta(self._item, arguments, []))
            return chunks + self._end_item(status)
        place = _members(output_index=len(self.output))
        shown = {
            "id": call.tool.id_prefix + uuid.uuid4().hex,
            "type": call.tool.call,
            "status": "in_progress",
            "call_id": call.call_id,
            **members,
        }
        added = self._event(b"response.output_item.added", place, b',"item":' + to_json(shown))
        self.output.append(to_json({**shown, "status": status}))
        return [added, self._event(b"response.output_item.done", place, b',"item":' + self.output[-1])]

    def _end_events(self, item: _Item, text: str, ended: bytes) -> list[bytes]:
        chunks: list[bytes] = []
        done: dict[str, Any] = {item.kind.text_name: text}
        if item.kind is _CUSTOM:
            chunks.append(self._delta(item, text, []))
        elif item.kind is _FUNCTION:
            done["name"] = item.members["name"]
        elif item.kind is _MESSAGE:
            done["logprobs"] = item.logprobs
        chunks.append(self._event(item.kind.text_events + b".done", item.where, _members(**done)))
        if item.kind.part is not None:
            chunks.append(self._event(b"response.content_part.done", item.where, _members(part=item.part(text))))
        place = _members(output_index=len(self.output))
        chunks.append(self._event(b"response.output_item.done", place, b',"item":' + ended))
        return chunks

    def _take_logprobs(self, item: _Item) -> list[TokenLogprob]:
        """The log-probabilities for the next piece of the item's text. Only messages have them. A stream does not keep them, so
        the response at its end has none."""
        rows, self._rows = self._rows, []
        if self._top_logprobs is None or item.kind is not _MESSAGE:
            return []
        logprobs = chat_logprobs(rows, self._top_logprobs, self._tokenizer)
        if not self._is_stream:
            item.logprobs += logprobs
        return logprobs

    # -- events --------------------------------------------------------------------------------------------------------

    def _event(self, name: bytes, *members: bytes) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        data = b'{"type":"%s","sequence_number":%d%s}' % (name, number, b"".join(members))
        return b"event: %s\ndata: %s\n\n" % (name, data)

    def _delta(self, item: _Item, text: str, logprobs: list[TokenLogprob]) -> bytes:
        members = b',"delta":' + to_json(text)
        if item.kind is _MESSAGE:
            members += b',"logprobs":' + (to_json(logprobs) if logprobs else b"[]")
        return self._event(item.kind.text_events + b".delta", item.where, members)

    def _response_event(self, name: str, status: ResponseStatus) -> bytes:
        return self._event(b"response." + name.encode(), b',"response":' + self.response(status))

    # -- the response --------------------------------------------------------------------------------------------------

    def _final_status(self) -> ResponseStatus:
        return _STATUSES.get(self._finish_reason or "", "failed")

    def response(self, status: ResponseStatus, error: ResponseError | None = None) -> bytes:
        """The JSON of the response as it is now."""
        if status == "failed" and error is None:
            error = {"code": "server_error", "message": "the server had to end the request"}
        state: ResponseState = {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None if status in ("queued", "in_progress") or not self._usage.prompts else self._usage_json(),
        }
        return b'%s,"output":[%s],%s' % (self._echo[:-1], b",".join(self.output), to_json(state)[1:])

    def _usage_json(self) -> ResponseUsage:
        usage = self._usage.as_json()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._usage.reasoning_tokens or 0},
            "total_tokens": usage["total_tokens"],
        }


def input_of(arguments: str) -> str:
    """The input of a custom tool, from the arguments of the function that stands for it. A model may give the argument another
    name, or write no JSON."""
    found = readable_part(without_lone_surrogates(arguments))
    values = [found[INPUT]] if INPUT in found else found.values()
    return next((value for value in values if isinstance(value, str)), arguments)


def _members(**members: object) -> bytes:
    """JSON for members that follow others."""
    return b"," + to_json(members)[1:-1]


def _echo(answer_id: str, request: ValidatedResponse) -> dict[str, Any]:
    """The members of a response that do not change. Most of them repeat the request."""
    asked, params = request.asked, request.params
    choice = asked.tool_choice or "auto"
    text = asked.text or TextOptions()
    reasoning = asked.reasoning
    text_format = {"type": "text"} if text.format is None else text.format.model_dump(by_alias=True)
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": request.presentation.model,
        **{name: getattr(asked, name) for name in _REPEATED},
        **{name: getattr(params, name) for name in _SAMPLING},
        "top_logprobs": params.logprobs or 0,
        "tools": [tool.model_dump() for tool in asked.tools or () if not isinstance(tool, OtherTool)],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "text": {"format": text_format, **text.model_dump(include={"verbosity"}, exclude_none=True)},
        "reasoning": {name: reasoning and getattr(reasoning, name) for name in ("effort", "summary")},
        "metadata": asked.metadata or {},
        "truncation": "disabled",
        "background": bool(asked.background),
        "store": request.kept is not None,
        "previous_response_id": asked.previous_response_id,
        "service_tier": "default",
    }
