"""Runs any number of rows (requests) through one engine. A row is read only when the engine has room for its request.

rows ──▶ RequestMaker ──▶ engine: running requests, and at most LOOKAHEAD waiting ──▶ on_output
               ╰─ a wrong row ──────────────────────────────────────────────────────▶ on_error, and the next row is read

Of rows with images a few more are read, and their images are processed meanwhile (`PreparedAhead`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from inflight.entrypoints.cli.options import Options
from inflight.entrypoints.cli.rows import InputRow
from inflight.entrypoints.cli.terminal import InterruptFlag
from inflight.entrypoints.whole_numbers import as_integers
from inflight.errors import ConfigError, InvalidRequestError, TokenizerError
from inflight.outputs import Logprob, RequestOutput
from inflight.sampling_params import MAX_SEED, SamplingParams
from inflight.setting import settings_of, unknown_name
from inflight.structured_outputs_params import StructuredOutputsParams

if TYPE_CHECKING:
    from inflight.engine.request.prompt import Prompt
    from inflight.entrypoints.llm_engine import LLMEngine
    from inflight.entrypoints.prepared_ahead import Request

WAIT_SECONDS = 0.1  # for an image, until an interrupt is noticed
LOOKAHEAD = 256  # requests that wait in the engine, so that when a request ends, another one can start at once
DEFAULT_MAX_TOKENS = 256

GivenSampling = Annotated[dict[str, Any], Options(SamplingParams, only_given=True)]  # fields of `SamplingParams`

# Written instead of minus infinity, which JSON cannot express, and for a token instead of any lower log-probability.
_LOWEST = -9999.0
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
_KEYS = (*_PROMPT_KEYS, "tools", "params")


class Maker(Protocol):
    """Makes requests from rows."""

    def make(self, row: InputRow) -> Request:
        """Returns the row as a request for the engine. The id of the request is the row's number.

        Raises:
            InvalidRequestError, ConfigError: the row is wrong.
        """


class RequestMaker:
    """Makes requests from rows. A sampling parameter gets its value from the row's "params", or else from the command's option,
    or else from the model's defaults. The defaults for `seed` and `max_tokens` differ: see `make`."""

    def __init__(
        self, engine: LLMEngine, options: GivenSampling, *, as_chat: bool | None, streams: bool = False
    ) -> None:
        """`as_chat`: whether a row's "prompt" is sent as a user's message. None means: if the model has a chat template.
        `streams`: whether a request has an output after each step. If not, it has only one, at its end."""
        self._engine = engine
        self._streams = streams
        self._as_chat = has_chat_template(engine) if as_chat is None else as_chat
        self._params = dataclasses.replace(unbounded(engine.default_params), **options)

    def make(self, row: InputRow) -> Request:
        """Returns the row as a request for the engine. The id of the request is the row's number. If no `seed` is given, the
        seed is derived from this number. If no `max_tokens` is given, the limit is DEFAULT_MAX_TOKENS.

        Raises:
            InvalidRequestError, ConfigError: the row is wrong.
        """
        if row.problem:
            raise InvalidRequestError(row.problem)
        if unknown := sorted(set(row.fields) - set(_KEYS)):
            raise InvalidRequestError(f"unknown key {unknown[0]!r}; known keys are 'id', {', '.join(map(repr, _KEYS))}")
        own = {} if row.fields.get("params") is None else row.fields["params"]
        params = params_from_json(self._params, own)
        if params.seed is None and not params.greedy:
            from inflight.sample.seeds import derive_seed  # loads numpy

            # Because the seed depends only on the row's number, a resumed run draws the same tokens as an uninterrupted run.
            params = dataclasses.replace(params, seed=derive_seed(0, row.number) & MAX_SEED)
        request_id = str(row.number)
        prompt = self._prompt(row.fields)
        params = self._engine.with_strict_tools(params, row.fields.get("tools")) or params
        if params.max_tokens is None and "max_tokens" not in own:
            params = dataclasses.replace(params, max_tokens=max(DEFAULT_MAX_TOKENS, params.min_tokens))
        from inflight.engine.request.request_state import RequestOutputKind  # loads numpy

        kind = RequestOutputKind.CUMULATIVE if self._streams else RequestOutputKind.FINAL_ONLY
        continues_text = (
            "prompt" in row.fields and not self._as_chat
        )  # a chat template writes the special tokens itself
        return request_id, prompt, params, {"kind": kind, "add_special_tokens": continues_text}

    def _prompt(self, fields: dict[str, Any]) -> Prompt:  # Any: JSON, checked by the engine
        given = [key for key in _PROMPT_KEYS if key in fields]
        if len(given) != 1:
            raise InvalidRequestError(
                f"a row must have exactly one of {', '.join(map(repr, _PROMPT_KEYS))}, but this one has {given or 'none'}"
            )
        key = given[0]
        prompt = fields[key]
        tools = fields.get("tools")
        if key == "prompt":
            if not isinstance(prompt, str):
                raise InvalidRequestError(f"prompt is a {type(prompt).__name__}; it must be a string")
            if self._as_chat:
                key, prompt = "messages", [{"role": "user", "content": prompt}]
        if key == "messages":
            return self._engine.chat_prompt(prompt, tools=tools)
        if tools is not None:
            raise InvalidRequestError(
                "a row with 'tools' must have 'messages', because only a chat template can show tools"
            )
        token_ids: Any = as_integers(prompt)  # Any: checked by the engine
        if key == "prompt":
            return {"prompt": prompt}
        return {"prompt_token_ids": token_ids}


def run_batch(
    engine: LLMEngine,
    rows: Iterator[InputRow],
    maker: Maker,
    interrupt: InterruptFlag,
    *,
    on_output: Callable[[InputRow, RequestOutput], None],
    on_error: Callable[[InputRow, str], None],
) -> None:
    """Run until all rows have ended, `interrupt` is set, or an error is raised. Requests that still run then are aborted.

    `on_output` is called with every output of a request. The last output of a request is `finished`. `on_error` is called with
    each wrong row and the reason.

    Raises:
        EngineError: a step failed.
    """
    from inflight.entrypoints.prepared_ahead import PreparedAhead  # loads numpy

    taken: dict[str, InputRow] = {}  # rows that were read, and have not ended
    running: set[str] = set()  # those of them that are in the engine

    def requests() -> Iterator[Request]:
        for row in rows:
            try:
                request = maker.make(row)
            except (InvalidRequestError, ConfigError) as error:
                on_error(row, str(error))
                continue
            taken[request[0]] = row
            yield request

    ahead = PreparedAhead(engine.images, requests())
    try:
        while not interrupt.is_set:
            while engine.core.scheduler.num_waiting < LOOKAHEAD and not interrupt.is_set:
                if (request := ahead.take(0.0 if running else WAIT_SECONDS)) is None:
                    break
                request_id, prompt, params, options = request
                try:
                    engine.add_request(request_id, prompt, params, **options)
                    running.add(request_id)
                except (InvalidRequestError, ConfigError) as error:
                    on_error(taken.pop(request_id), str(error))
            if not taken:
                return
            for output in engine.step() if running else ():
                on_output(taken[output.request_id], output)
                if output.finished:
                    del taken[output.request_id]
                    running.remove(output.request_id)
                    ahead.ended([output.request_id])
    finally:
        ahead.close()
        engine.abort_requests(running)


def has_chat_template(engine: LLMEngine) -> bool:
    if engine.tokenizer is None:
        return False
    try:
        with suppress(InvalidRequestError):  # this error means that there is a template, but it refuses these messages
            engine.render_chat([{"role": "user", "content": "Hello"}])
    except TokenizerError:
        return False
    return True


def unbounded(params: SamplingParams) -> SamplingParams:
    """Returns the model's sampling defaults, but with `max_tokens` None (no limit) instead of 16, the default of
    `SamplingParams`."""
    if params.max_tokens != SamplingParams().max_tokens:
        return params
    return dataclasses.replace(params, max_tokens=None)


def to_json(row: InputRow, output: RequestOutput, *, with_token_ids: bool) -> dict[str, Any]:  # Any: JSON
    """Returns the output row of a request that has finished."""
    completions = []
    for completion in output.outputs:
        entry: dict[str, Any] = {
            "index": completion.index,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "num_tokens": len(completion.token_ids),
        }
        if with_token_ids:
            entry["token_ids"] = completion.token_ids
        if completion.logprobs is not None:
            total = completion.cumulative_logprob
            entry["cumulative_logprob"] = _LOWEST if total == -math.inf else total
            entry["logprobs"] = [_logprobs_to_json(logprobs) for logprobs in completion.logprobs]
        completions.append(entry)
    result: dict[str, Any] = {**row_key(row), "outputs": completions}
    result |= {"num_prompt_tokens": len(output.prompt_token_ids), "num_cached_tokens": output.num_cached_tokens}
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [
            None if logprobs is None else _logprobs_to_json(logprobs) for logprobs in output.prompt_logprobs
        ]
    return result


def row_key(row: InputRow) -> dict[str, Any]:
    """The fields of an output row that identify the input row: its line number, and its id if it has an id."""
    if row.id is None:
        return {"row": row.number}
    return {"row": row.number, "id": row.id}


def _logprobs_to_json(logprobs: dict[int, Logprob]) -> list[dict[str, Any]]:
    return [
        {"token_id": token_id, "token": entry.decoded_token, "logprob": max(entry.logprob, _LOWEST), "rank": entry.rank}
        for token_id, entry in logprobs.items()
    ]


def check_sampling(given: GivenSampling) -> None:
    """Check the sampling options before the model is loaded. Limits that depend on the model are checked later.

    Raises:
        InvalidRequestError: an option is out of bounds, or contradicts another one.
    """
    SamplingParams(**{"max_tokens": None, **given})


def params_from_json(base: SamplingParams, values: object) -> SamplingParams:
    """Returns `base` with the values that a row's "params" gives.

    Raises:
        InvalidRequestError: `values` is not a JSON object, or one of its fields is unknown or wrong.
    """
    if not isinstance(values, Mapping):
        raise InvalidRequestError(f"params is a {type(values).__name__}; give an object of sampling parameters")
    if unknown := unknown_name(SamplingParams, values):
        raise InvalidRequestError(f"unknown sampling parameter {unknown}")
    settings = settings_of(SamplingParams)
    changes: dict[str, Any] = {  # Any: JSON
        name: as_integers(value) if int in (settings[name].type, settings[name].element) else value
        for name, value in values.items()
    }
    if isinstance(bias := changes.get("logit_bias"), Mapping):  # JSON objects have only strings as keys
        changes["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
    if changes.get("structured_outputs") is not None:
        changes["structured_outputs"] = StructuredOutputsParams.from_json(changes["structured_outputs"])
    try:
        return dataclasses.replace(base, **changes)
    except InvalidRequestError:
        raise
    except (TypeError, ValueError, AttributeError) as error:  # a value has a wrong type, such as a number for a list
        raise InvalidRequestError(f"params has a value of the wrong type: {error}") from error


def _token_id(key: str) -> int | str:
    digits = key.removesuffix(".0")
    return int(digits) if digits.isdigit() else key
