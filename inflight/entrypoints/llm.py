"""`LLM`: generates text for many prompts at once, without a server. Most Python users start with this class.

Each call of `generate` or `chat` runs the engine in a thread of its own. Python raises KeyboardInterrupt, and the exceptions of
other signal handlers, only in the main thread. So they never interrupt the engine in the middle of a step. If a call is
interrupted, its thread ends the requests of this call after the present step.
"""

import itertools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, Unpack, cast

from tqdm import tqdm

from inflight.config.engine_args import EngineArgs
from inflight.engine.core.chrome_trace import chrome_trace
from inflight.engine.core.step_figures import StepFigures, step_figures
from inflight.engine.request.input_processor import ChatOptions, RequestOptions
from inflight.engine.request.prompt import Prompt
from inflight.entrypoints.llm_engine import LLMEngine, OfflineEngine
from inflight.errors import ConfigError, InvalidRequestError
from inflight.outputs import RequestOutput
from inflight.sampling_params import SamplingParams
from inflight.timeline import Event
from inflight.tokenizer.user_tokenizer import UserTokenizer

Message = Mapping[str, Any]  # Any: JSON, checked by the chat template
NO_TIME_LIMITS = {"target_inter_token_latency": "none", "max_step_time": "none"}


class LLM:
    """A model that is ready to generate text. The end of a `with` block calls `close`.

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
        self._request_ids = itertools.count()
        self._turn = threading.Lock()  # held by the call that uses the engine
        self._engine = _make_engine(EngineArgs.from_kwargs({"model": model, **NO_TIME_LIMITS, **engine_args}))

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
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Complete every prompt. The outputs are in the order of the prompts.

        Args:
            prompts: one prompt or several. A prompt is a string, a list of token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`. The two dictionaries may also have a "cache_salt".
            sampling_params: one for all prompts, or one for each prompt. None means the model's defaults.
            use_tqdm: show a progress bar.
            priority: one number for each prompt, for scheduling_policy="priority". Lower numbers are served first.

        Raises:
            InvalidRequestError: a prompt or a parameter is wrong. Nothing of this call was computed.
            EngineError: a step failed, and all requests of this call are aborted. The engine can be used again only if it has
                one rank and this rank can still compute. With several replicas, only the requests of this step fail: their
                outputs have the finish reason "error".
            EngineDeadError: the engine failed permanently in an earlier call. The message names the cause.
            KeyboardInterrupt: all requests of this call are aborted. The engine can be used again.
        """
        _refuse_others("generate", others, ())
        given = _as_prompts(prompts)
        params = _one_each(sampling_params, len(given))
        options = [RequestOptions(priority=each) for each in _priorities(priority, len(given))]
        return self._run(given, params, options, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        **chat_options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several. The model's chat template makes the prompts.

        Args:
            messages: a conversation `[{"role": "user", "content": "..."}, ...]`, or a list of them.
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
        _refuse_others("chat", {name: value for name, value in given.items() if name not in names}, names)
        chat_options = cast("ChatOptions", {name: value for name, value in given.items() if name in names})
        if not messages:
            raise InvalidRequestError("messages is empty; give at least one message")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = [
            self._engine.render_chat(cast("Sequence[Message]", conversation), **chat_options)
            for conversation in conversations
        ]
        tools = chat_options.get("tools")
        params = [self._engine.with_strict_tools(each, tools) for each in _one_each(sampling_params, len(prompts))]
        thinks_first = not chat_options.get("continue_final_message", False)
        options = [
            RequestOptions(add_special_tokens=False, thinks_first=thinks_first, priority=each)
            for each in _priorities(priority, len(prompts))
        ]
        return self._run(prompts, params, options, use_tqdm)

    def get_tokenizer(self) -> UserTokenizer | None:
        """The tokenizer. It is None if skip_tokenizer_init is set."""
        tokenizer = self._engine.tokenizer
        return None if tokenizer is None else UserTokenizer(tokenizer, self._engine.chat_template)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a request without sampling parameters: `SamplingParams()` with the values of
        generation_config.json."""
        return replace(self._engine.default_params)

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forget the KV blocks of earlier prompts, so that no later prompt uses them. Those in host memory and in tiers
        (docs/kv-cache-tiers.md) are kept, unless `reset_connector` is set."""
        with self._turn:
            self._engine.reset_prefix_cache(reset_connector=reset_connector)

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a method of every worker. Returns the results, one for each rank."""
        with self._turn:
            return self.llm_engine.core.collective_rpc(method, args, kwargs, timeout=timeout)

    def timeline_events(self) -> dict[str, list[Event]]:
        """The phases of the last steps, with their times. The keys are "engine" and the names of the ranks on this machine
        ("rank 0", ...)."""
        with self._turn:
            return self.llm_engine.timeline_events()

    def write_trace(self, path: str | Path) -> None:
        """Write `timeline_events` as a Chrome trace (JSON), for https://ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(chrome_trace(self.timeline_events())) + "\n", encoding="utf-8")

    def step_figures(self) -> StepFigures:
        """For the last steps: how long the devices were idle, and the share of the host's work that ran while they computed."""
        return step_figures(self.timeline_events())

    def close(self) -> None:
        """Stop the workers, and free the memory that they use. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        options: Sequence[RequestOptions],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        request_ids = [str(next(self._request_ids)) for _ in prompts]
        call = _Call(self._engine, self._turn, list(zip(request_ids, prompts, params, options, strict=True)))
        try:
            call.start()
            with tqdm(total=len(request_ids), disable=not use_tqdm, unit="request", dynamic_ncols=True) as bar:
                for num_done in iter(call.progress.get, 0):
                    bar.update(num_done)
        except BaseException:  # an interrupt; a second interrupt ends `join`
            call.is_interrupted = True
            if call.is_alive():
                call.join()
            raise
        return call.outputs.result()


class _Call(threading.Thread):
    """Runs the requests of one call.

    Attributes:
        is_interrupted: set to True to end the requests after the present step.
        progress: gets a number whenever requests have ended: how many. A 0 says that the call has ended.
        outputs: the outputs in the order of the requests, or the error that has ended the call.
    """

    def __init__(
        self,
        engine: OfflineEngine,
        turn: threading.Lock,
        requests: Sequence[tuple[str, Prompt, SamplingParams | None, RequestOptions]],
    ) -> None:
        super().__init__(name="inflight-call", daemon=True)
        self._engine, self._turn, self._requests = engine, turn, requests
        self.is_interrupted = False
        self.progress: SimpleQueue[int] = SimpleQueue()
        self.outputs: Future[list[RequestOutput]] = Future()

    def run(self) -> None:
        try:
            with self._turn:
                self.outputs.set_result(self._outputs())
        except BaseException as error:  # the caller raises it
            self.outputs.set_exception(error)
        self.progress.put(0)

    def _outputs(self) -> list[RequestOutput]:
        engine, finished = self._engine, dict[str, RequestOutput]()
        try:
            for request_id, prompt, params, options in self._requests:
                engine.add_request(request_id, prompt, params, **options)
                self._raise_if_interrupted()
            while len(finished) < len(self._requests):
                done = {output.request_id: output for output in engine.step() if output.finished}
                finished |= done
                if done:
                    self.progress.put(len(done))
                self._raise_if_interrupted()
        except BaseException:  # a wrong request, a failed step or an interrupt ends all requests of this call
            engine.abort_requests([request_id for request_id, *_ in self._requests])
            raise
        return [finished[request_id] for request_id, *_ in self._requests]

    def _raise_if_interrupted(self) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt


def _make_engine(args: EngineArgs) -> OfflineEngine:
    if args.data_parallel_size == 1:
        return LLMEngine.from_args(args)
    from inflight.entrypoints.replicated_engine import ReplicatedEngine  # needs msgspec, which one engine does not

    return ReplicatedEngine(args)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Make a list of prompts. A string, a dict or a list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [cast("Prompt", prompts)]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"prompts must be a prompt or a list of prompts, not a {type(prompts).__name__}")
    if len(prompts) and isinstance(prompts[0], int):
        return [cast("Prompt", prompts)]
    return [cast("Prompt", prompt) for prompt in prompts]


def _priorities(given: Sequence[int] | None, count: int) -> Sequence[int]:
    if given is None:
        return [0] * count
    if not isinstance(given, list | tuple | range):
        raise InvalidRequestError(f"priority={given!r} is not a list; give one number for each prompt")
    if len(given) != count:
        raise InvalidRequestError(
            f"priority has {len(given)} numbers for {count} prompts; give one number for each prompt"
        )
    return given


def _refuse_others(method: str, given: Mapping[str, object], more: Iterable[str]) -> None:
    """Refuse arguments that `method` does not have. If an argument is None, it is ignored: programs for vLLM pass some so.

    Args:
        more: the arguments that `method` has besides the common ones.
    """
    for name, value in given.items():
        if value is not None:
            names = ", ".join(["sampling_params", "use_tqdm", "priority", *more])
            raise InvalidRequestError(f"{method} has no argument {name!r} (given: {value!r:.100}); it has {names}")


def _one_each(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams | None]:
    if given is None or isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or any(not isinstance(each, SamplingParams | None) for each in given):
        raise InvalidRequestError(
            "sampling_params has values that are no SamplingParams; give only SamplingParams or None"
        )
    if len(given) != count:
        raise InvalidRequestError(
            f"there are {len(given)} sampling_params for {count} prompts; give one for all, or one for each prompt"
        )
    return given
