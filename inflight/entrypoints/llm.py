"""`LLM`: offline generation, many requests at once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from tqdm import tqdm

from inflight.config.engine_args import EngineArgs
from inflight.engine.input_processor import ProcessedRequest, Prompt
from inflight.engine.llm_engine import LLMEngine
from inflight.engine.step_figures import StepFigures
from inflight.errors import InvalidRequestError
from inflight.outputs import RequestOutput
from inflight.sampling_params import SamplingParams
from inflight.timeline import Event
from inflight.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]  # Any: JSON, checked by the chat template


class LLM:
    """A model, ready to generate. Also a context manager, which closes it.

        with LLM("path/to/model") as llm:
            for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
                print(output.outputs[0].text)

    The arguments are those of `EngineArgs`; None and "auto" leave the choice to the engine, and an unknown name is an
    error. `model` is a folder in the Hugging Face layout, a GGUF file, a hub id, "org/name:FILE.gguf", or None for the small
    model that is embedded.

    Raises:
        ConfigError: an argument, the folder or the machine does not fit.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:  # Any: EngineArgs checks every value
        self._request_ids = itertools.count()
        self.llm_engine = LLMEngine.from_args(EngineArgs.from_kwargs({"model": model, **engine_args}))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; the outputs are in the order of the prompts.

        Args:
            prompts: one or several, each a string, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`,
                the last two with an optional "cache_salt".
            sampling_params: one for all, or one each; None takes the model's defaults.
            use_tqdm: show a progress bar.
            priority: one number each, with scheduling_policy="priority"; lower is served first.

        Raises:
            InvalidRequestError: one of the prompts or parameters is wrong; nothing has been started.
            EngineError: a step failed; all requests of this call are aborted. The engine can be used again only if it has one
                rank, and this rank can still compute.
            EngineDeadError: the engine failed for good in an earlier call; the message names the cause.
        """
        given = _as_prompts(prompts)
        params = _one_each("sampling_params", sampling_params, len(given))
        return self._run(given, params, use_tqdm, priority, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        Args:
            messages: a conversation `[{"role": "user", "content": "..."}, ...]`, or a list of them.
            tools: functions the model may call, as JSON schemas. With `"strict": True` on one of them, what the model calls is
                one of the tools, and the arguments satisfy the `parameters` of a tool that is strict.
            add_generation_prompt: open the assistant's turn.
            continue_final_message: go on with the last message instead.
            chat_template_kwargs: further variables for the template.

        Raises: as `generate`, and TokenizerError without a chat template.
        """
        if not messages:
            raise InvalidRequestError("there are no messages")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = [
            self.llm_engine.render_chat(
                cast("Sequence[Message]", conversation),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        params = [
            self.llm_engine.with_strict_tools(each, tools)
            for each in _one_each("sampling_params", sampling_params, len(prompts))
        ]
        return self._run(
            prompts, params, use_tqdm, None, add_special_tokens=False, thinks_first=not continue_final_message
        )

    def get_tokenizer(self) -> Tokenizer | None:
        """None with skip_tokenizer_init."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: the model's generation_config.json, then `SamplingParams()`."""
        return self.llm_engine.default_params

    def reset_prefix_cache(self) -> None:
        """Forget the KV blocks of earlier prompts."""
        self.llm_engine.core.reset_prefix_cache()

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a method of every worker; one value per rank."""
        return self.llm_engine.core.collective_rpc(method, args, kwargs, timeout=timeout)

    def timeline_events(self) -> dict[str, list[Event]]:
        """What the engine ("engine") and each rank of this machine ("rank 0", ...) did in the last steps, from when to when."""
        return self.llm_engine.timeline_events()

    def write_trace(self, path: str | Path) -> None:
        """The same as a Chrome trace (JSON), for https://ui.perfetto.dev or chrome://tracing."""
        self.llm_engine.write_trace(path)

    def step_figures(self) -> StepFigures:
        """How long devices stood idle in the last steps, and how much of the host's work they hid; see `StepFigures`."""
        return self.llm_engine.step_figures()

    def close(self) -> None:
        """Stop the workers and free their memory. Idempotent."""
        self.llm_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        use_tqdm: bool,
        priority: Sequence[int] | None,
        *,
        add_special_tokens: bool,
        thinks_first: bool = True,
    ) -> list[RequestOutput]:
        priorities = [0] * len(prompts) if priority is None else priority
        if len(priorities) != len(prompts):
            raise InvalidRequestError(f"{len(priorities)} priorities for {len(prompts)} prompts; give one each")
        requests = [
            self.llm_engine.process(
                str(next(self._request_ids)),
                prompt,
                each,
                priority=priority,
                add_special_tokens=add_special_tokens,
                thinks_first=thinks_first,
            )
            for prompt, each, priority in zip(prompts, params, priorities, strict=True)
        ]
        finished = self._run_to_end(requests, use_tqdm)
        return [finished[request.request_id] for request in requests]

    def _run_to_end(self, requests: Sequence[ProcessedRequest], use_tqdm: bool) -> dict[str, RequestOutput]:
        engine, finished = self.llm_engine, dict[str, RequestOutput]()
        try:
            for request in requests:
                engine.add_processed(request)
            with tqdm(total=len(requests), disable=not use_tqdm, unit="request", dynamic_ncols=True) as bar:
                while len(finished) < len(requests):
                    done = {output.request_id: output for output in engine.step() if output.finished}
                    finished |= done
                    bar.update(len(done))
        except BaseException:  # an interrupt, too: nothing of this call goes on
            engine.abort_requests([request.request_id for request in requests])
            raise
        return finished


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a list of integers is one prompt, and so is a string or a dict."""
    if isinstance(prompts, (str, Mapping)):
        return [cast("Prompt", prompts)]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"prompts must be a prompt or a list of prompts; this is a {type(prompts).__name__}")
    if len(prompts) and isinstance(prompts[0], int):
        return [cast("Prompt", prompts)]
    return [cast("Prompt", prompt) for prompt in prompts]


def _one_each(
    name: str, given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    if given is None or isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise InvalidRequestError(f"{len(given)} {name} for {count} prompts; give one for all, or one each")
    return given
