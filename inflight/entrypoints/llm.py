"""`LLM`: generates text, or makes vectors, for many prompts at once, without a server. Most Python users start with this class.

Each call of `generate` or `chat` runs the engine in a thread of its own. Python raises KeyboardInterrupt, and the exceptions of
other signal handlers, only in the main thread. So they never interrupt the engine in the middle of a step. If a call is
interrupted, its thread ends the requests of this call after the present step.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NoReturn, Self, Unpack, cast

from tqdm.auto import tqdm

from inflight import foreign_variables
from inflight.engine.request.chats import ChatOptions
from inflight.engine.request.processed import RequestOptions
from inflight.engine.request.prompt import Prompt
from inflight.entrypoints.conversations import Message, as_conversations
from inflight.entrypoints.foreign_llm import missing_attribute, own_arguments, refuse_others
from inflight.entrypoints.image_outputs import image_outputs
from inflight.entrypoints.insight_methods import InsightMethods
from inflight.entrypoints.llm_arguments import as_prompts, one_each, one_of, priorities
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.entrypoints.make_engine import make_engine
from inflight.entrypoints.offline_engine import OfflineEngine
from inflight.entrypoints.pooling_methods import PoolingMethods
from inflight.errors import ConfigError
from inflight.outputs import RequestOutput
from inflight.pooling_params import Params
from inflight.processes.object_end import call_in_forks
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.user_tokenizer import UserTokenizer

logger = logging.getLogger(__name__)

NO_TIME_LIMITS = {"target_inter_token_latency": "none", "max_step_time": "none"}


class LLM(PoolingMethods, InsightMethods):
    """A model that is ready to generate text. `close`, the end of a `with` block, or `del llm` ends it.

        with LLM("path/to/model") as llm:
            for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
                print(output.outputs[0].text)

    The arguments are those of `EngineArgs`. If a value is None or "auto", the engine chooses the value. `model` is a folder in
    the Hugging Face layout, a GGUF file, a hub id, a GGUF file on the hub ("org/name:FILE.gguf"), or None for the small model
    that Inflight contains. The defaults of `target_inter_token_latency` and `max_step_time` are "none" here: `generate` returns
    only whole completions, so long steps delay no reader. With `data_parallel_size` above 1, the prompts
    of a call are divided among so many engines, each in a process of its own. Then `llm_engine`, `collective_rpc`,
    `timeline_events`, `step_figures` and `write_trace` raise ConfigError. Any thread may call any method: calls are run one
    after another.

    Raises:
        ConfigError: an argument is unknown, or it does not fit the model or the machine.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:  # Any: EngineArgs checks every value
        for note in foreign_variables.engine_notes(os.environ):
            logger.warning("%s", note)
        self._request_ids = itertools.count()
        self._has_hinted = False
        self._free_turn()
        call_in_forks(self._free_turn)
        self._engine = make_engine({"model": model, **NO_TIME_LIMITS, **own_arguments(engine_args)})

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine in this process.

        Raises:
            ConfigError: there are several replicas, in other processes.
        """
        if not isinstance(self._engine, LLMEngine):
            raise ConfigError(
                "data_parallel_size > 1: the engines are in other processes, so llm_engine, collective_rpc, timeline_events, "
                "step_figures and write_trace cannot be used; leave data_parallel_size out"
            )
        return self._engine

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Complete every prompt. The outputs are in the order of the prompts.

        Args:
            prompts: one prompt or several, in a list, a generator, or a column of another library (a pandas Series, a numpy
                array). A prompt is a string, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`. The two
                dictionaries may also have a "cache_salt", and images: "multi_modal_data": {"image": image or list}.
            sampling_params: one for all prompts, or one for each prompt. None means the model's defaults.
            use_tqdm: show a progress bar.
            priority: one number for each prompt, for scheduling_policy="priority". Lower numbers are served first.

        Raises:
            InvalidRequestError: a prompt or a parameter is wrong. Of several prompts, the message names the wrong one, such as
                `prompts[7]`. Nothing of this call was computed, unless prompts have images.
            EngineError: a step failed, and all requests of this call are aborted. The engine can be used again only if it has
                one rank and this rank can still compute. With several replicas, only the requests of this step fail: their
                outputs have the finish reason "error".
            EngineDeadError: the engine failed permanently in an earlier call. The message names the cause.
            KeyboardInterrupt: all requests of this call are aborted. The engine can be used again.
        """
        if others:
            refuse_others("generate", others, ())
        given = as_prompts(prompts)
        params = one_each(sampling_params, len(given), SamplingParams, "sampling_params")
        options = [RequestOptions(priority=each) for each in priorities(priority, len(given))]
        outputs = self._run("prompts", given, params, options, use_tqdm)
        self._hint_at_chat(outputs)
        return outputs

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        **chat_options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several. The model's chat template makes the prompts.

        Args:
            messages: a conversation `[{"role": "user", "content": "..."}, ...]`, or several, in a list, a generator or a
                column of another library. docs/multimodal.md says how a content has images.
            tools: functions that the model may call, as JSON schemas. If a tool has `"strict": True`, the model can call only
                tools of this list, and the arguments of a call to a strict tool satisfy the tool's `parameters`.
            add_generation_prompt: whether the prompt ends with the beginning of an assistant's message; True by default.
            continue_final_message: whether the model continues the last message, instead of a new one; False by default.
            chat_template_kwargs: further variables for the chat template.
            priority: one number for each conversation, as in `generate`.

        Raises: as `generate`, and TokenizerError if the model has no chat template.
        """
        given: dict[str, Any] = {**chat_options}  # a program may also give names that the type does not allow
        names = ChatOptions.__annotations__
        refuse_others("chat", {name: value for name, value in given.items() if name not in names}, names)
        chat_options = cast("ChatOptions", {name: value for name, value in given.items() if name in names})
        conversations = as_conversations(messages)
        count = len(conversations)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            with one_of("messages", index, count):
                prompts.append(self._engine.chat_prompt(conversation, **chat_options))
        tools = chat_options.get("tools")
        params = [
            self._engine.with_strict_tools(each, tools)
            for each in one_each(sampling_params, count, SamplingParams, "sampling_params")
        ]
        thinks_first = not chat_options.get("continue_final_message", False)
        options = [
            RequestOptions(add_special_tokens=False, thinks_first=thinks_first, priority=each)
            for each in priorities(priority, count)
        ]
        return self._run("messages", prompts, params, options, use_tqdm)

    def assistant_message(
        self,
        output: RequestOutput,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: JSON
        index: int = 0,
        reasoning_field: str = "reasoning_content",
    ) -> dict[str, Any]:  # Any: JSON
        """Read the answer of a chat as the server does: returns the message that the assistant has written.

            {"role": "assistant", "content": "...", "reasoning_content": "...", "tool_calls": [
                {"id": "...", "type": "function", "function": {"name": "...", "arguments": "<JSON text>"}}]}

        Reasoning and calls are there only if the model has written some. The message can be put behind the messages of
        the chat, with {"role": "tool", "tool_call_id": ..., "content": result} behind it for each call. How the model writes
        calls and reasoning is found in its chat template.

        Args:
            output: an output of `chat`.
            tools: the tools that the chat had. Without tools, no text is read as a call.
            index: which of the `n` completions.
            reasoning_field: the name of the reasoning, as --reasoning-field of the server: "reasoning" or "both" are others.

        Raises:
            InvalidRequestError: there is no such completion, or the engine has no tokenizer.
        """
        return self._engine.assistant_message(output, tools, index, reasoning_field)

    def get_tokenizer(self) -> UserTokenizer | None:
        """The tokenizer. It is None if skip_tokenizer_init is set."""
        tokenizer = self._engine.tokenizer
        return None if tokenizer is None else UserTokenizer(tokenizer, self._engine.chat_template)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that has none: `SamplingParams()` with the values of generation_config.json."""
        return replace(self._engine.default_params)

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forget the KV blocks of earlier prompts. With `reset_connector` also those in tiers (docs/kv-cache-tiers.md)."""
        with self._turn:
            self._engine.reset_prefix_cache(reset_connector=reset_connector)

    def close(self) -> None:
        """Stop the workers, and free the memory that they use. Idempotent."""
        self._engine.close()

    def __getattr__(self, name: str) -> NoReturn:  # called only for names that are no attributes
        raise missing_attribute(self, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _free_turn(self) -> None:
        self._turn = threading.Lock()  # held by the call that uses the engine. A forked process needs a new one

    def _hint_at_chat(self, outputs: Sequence[RequestOutput]) -> None:
        """Log a hint, once, if the model has ended a prompt of `generate` at once: many chat models do so with a question."""
        if self._has_hinted or not self._engine.has_chat_template:
            return
        for output in outputs:
            first = output.outputs[0]
            if output.prompt is not None and first.finish_reason == "stop" and not first.text.strip():
                self._has_hinted = True
                logger.warning(
                    "the model has ended the text of %r at once: `generate` continues a text as it is; to ask this model "
                    'something, use llm.chat([{"role": "user", "content": ...}])',
                    output.prompt[:50],
                )
                return

    def _run(
        self,
        argument: str,
        prompts: Sequence[Prompt],
        params: Sequence[Params | None],
        options: Sequence[RequestOptions],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        request_ids = [str(next(self._request_ids)) for _ in prompts]
        requests = list(zip(request_ids, prompts, params, options, strict=True))
        call = _Call(self._engine, self._turn, requests, argument)
        try:
            call.start()
            with tqdm(total=len(request_ids), disable=not use_tqdm, unit="request", dynamic_ncols=True) as bar:
                _show_progress(call, bar)
        except BaseException:  # an interrupt; a second interrupt ends `join`
            call.is_interrupted = True
            if call.is_alive():
                call.join()
            raise
        outputs = call.outputs.result()
        if failed := [index for index, output in enumerate(outputs) if output.error]:
            logger.warning(
                "%d of %d requests could not be completed, the first for this reason: %s[%d]: %s (`error` of each output)",
                *(len(failed), len(outputs), argument, failed[0], outputs[failed[0]].error),
            )
        return outputs


class _Call(threading.Thread):
    """Runs the requests of one call.

    Attributes:
        is_interrupted: set to True to end the requests after the present step.
        progress: gets the requests that have ended, whenever some have. An empty list says that the call has ended.
        outputs: the outputs in the order of the requests, or the error that has ended the call.
    """

    def __init__(
        self,
        engine: OfflineEngine,
        turn: threading.Lock,
        requests: Sequence[tuple[str, Prompt, Params | None, RequestOptions]],
        argument: str = "prompts",
    ) -> None:
        """
        Args:
            argument: the user's name for the list of prompts, for errors.
        """
        super().__init__(name="inflight-call", daemon=True)
        self.engine, self.requests, self.argument = engine, requests, argument
        self._turn = turn
        self.is_interrupted = False
        self.progress: SimpleQueue[list[RequestOutput]] = SimpleQueue()
        self.outputs: Future[list[RequestOutput]] = Future()

    def run(self) -> None:
        try:
            with self._turn:
                self.outputs.set_result(image_outputs(self) if self.engine.takes_images else self._outputs())
        except BaseException as error:  # the caller raises it
            self.outputs.set_exception(error)
        self.progress.put([])

    def _outputs(self) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        try:
            for index, (request_id, prompt, params, options) in enumerate(self.requests):
                with one_of(self.argument, index, len(self.requests)):
                    self.engine.add_request(request_id, prompt, params, **options)
                self.raise_if_interrupted()
            while len(finished) < len(self.requests):
                finished |= self.step()
                self.raise_if_interrupted()
        except BaseException:  # a wrong request, a failed step or an interrupt ends all requests of this call
            self.engine.abort_requests([request_id for request_id, *_ in self.requests])
            raise
        return [finished[request_id] for request_id, *_ in self.requests]

    def step(self) -> dict[str, RequestOutput]:
        """Returns the outputs of the requests that have ended in this step, by the ids of the requests."""
        done = {output.request_id: output for output in self.engine.step() if output.finished}
        if done:
            self.progress.put(list(done.values()))
        return done

    def raise_if_interrupted(self) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt


def _show_progress(call: _Call, bar: "tqdm[Any]") -> None:  # Any: the bar iterates over nothing
    """Move the bar until the call has ended. Beside it stand the tokens per second of the prompts and of the answers, counted
    when a request ends."""
    start, num_in, num_out = time.monotonic(), 0, 0
    for ended in iter(call.progress.get, []):
        num_in += sum(len(output.prompt_token_ids) for output in ended)
        num_out += sum(len(completion.token_ids) for output in ended for completion in output.outputs)
        seconds = max(time.monotonic() - start, 1e-9)
        bar.set_postfix_str(f"in {num_in / seconds:.0f}, out {num_out / seconds:.0f} tokens/s", refresh=False)
        bar.update(len(ended))
