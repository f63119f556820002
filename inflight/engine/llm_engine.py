"""`LLMEngine`: prompts in, `RequestOutput`s out, in one process: input processor, `EngineCore`, output processor."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from inflight import envs
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.gguf_config import read_model_config
from inflight.config.gguf_file import read_gguf
from inflight.config.machine import detect_machine
from inflight.config.parse_architecture import parse_architecture
from inflight.config.resolve import resolve
from inflight.engine.core import EngineCore
from inflight.engine.input_processor import InputProcessor, ProcessedRequest, Prompt
from inflight.engine.output_processor import OutputProcessor, RequestOutputKind
from inflight.engine.step_figures import ENGINE, StepFigures, step_figures
from inflight.errors import EngineClosedError, InvalidRequestError
from inflight.executor.executor import Executor
from inflight.hub import read_generation_config, resolve_model_folder, resolve_tokenizer_folder
from inflight.outputs import RequestOutput
from inflight.parsers.markup import ToolMarkup
from inflight.parsers.selector import detect_parsers
from inflight.parsers.tool_choice import constrain_tools
from inflight.sampling_params import SamplingParams
from inflight.structured_output.manager import StructuredOutputManager
from inflight.structured_output.selector import create_backend
from inflight.timeline import Event, chrome_trace
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.gguf_tokenizer import gguf_chat_template, gguf_tokenizer
from inflight.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """Not thread-safe: one caller adds requests and steps. `close` ends it.

    Attributes:
        core: the engine core, with the scheduler and its timeline.
        executor: what runs the model.
        tokenizer: None with skip_tokenizer_init.
        default_params: the `SamplingParams` of a request that brings none.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        input_processor: InputProcessor,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        *,
        serves_priorities: bool,
    ) -> None:
        self.core = core
        self.executor = executor
        self.tokenizer = tokenizer
        self.default_params = input_processor.default_params
        self._input_processor = input_processor
        self._output_processor = OutputProcessor(tokenizer)
        self._chat_template = chat_template
        self._serves_priorities = serves_priorities
        self._is_closed = False

    @classmethod
    def from_args(cls, args: EngineArgs) -> LLMEngine:
        """Read the folder, load the model, size the KV cache.

        Raises:
            ConfigError: the arguments, the folder or the machine do not fit; nothing is left running.
        """
        start = time.perf_counter()
        folder = resolve_model_folder(args.model, args.revision)
        config = resolve(
            args,
            folder=folder,
            architecture=parse_architecture(read_model_config(folder)),
            machine=detect_machine(args.device),
            timeout_seconds=envs.execute_model_timeout_seconds(),
        )
        tokenizer, chat_template = _read_tokenizer(args, folder)
        input_processor = InputProcessor(
            config.model,
            tokenizer,
            read_generation_config(folder),
            args.seed,
            use_generation_defaults=args.generation_config == "auto",
            structured_outputs=config.structured_outputs,
        )
        executor = Executor.get_class(config)(config)
        try:
            core = EngineCore(config, executor, _make_grammars(config, tokenizer, input_processor.eos_token_ids))
        except BaseException:  # an interrupt, too: no worker outlives the constructor that failed
            executor.shutdown()
            raise
        logger.info("%s is ready after %.2f s", config.model.name, time.perf_counter() - start)
        return cls(
            core,
            executor,
            input_processor,
            tokenizer,
            chat_template,
            serves_priorities=config.scheduler.policy == "priority",
        )

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> ProcessedRequest:
        """Validate and tokenise, without adding anything.

        Raises:
            InvalidRequestError: says what was given, what is allowed and what to do.
        """
        self._check_open()
        if priority and not self._serves_priorities:
            raise InvalidRequestError(
                f"priority={priority} has no effect with scheduling_policy='fcfs'; make the engine with 'priority'"
            )
        return self._input_processor.process(
            request_id,
            prompt,
            params,
            arrival_time=time.monotonic(),
            priority=priority,
            add_special_tokens=add_special_tokens,
        )

    def add_processed(self, request: ProcessedRequest, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY) -> None:
        """Queue a request that `process` returned. `kind`: what `step` returns of it, and when.

        Raises:
            InvalidRequestError: a request with this id is still running.
        """
        self._check_open()
        self._output_processor.add_request(request, kind)
        for child in request.children:
            self.core.add_request(child)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
    ) -> None:
        """`process` and `add_processed` in one."""
        self.add_processed(self.process(request_id, prompt, params, priority=priority), kind)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns what it changed, of each request as its kind says.

        Raises:
            EngineError: the step failed. Its requests are still there: abort them, or call again to try again.
        """
        self._check_open()
        processed = self._output_processor.process(self.core.step())
        if processed.requests_to_abort:
            self.core.abort_requests(processed.requests_to_abort)
        return processed.request_outputs

    def has_unfinished_requests(self) -> bool:
        return self._output_processor.has_unfinished_requests()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests at once; they are not returned by `step` any more. Unknown and finished ids are passed over."""
        self.core.abort_requests(self._output_processor.abort(request_ids).requests_to_abort)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],  # Any: JSON
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """A conversation as the token ids of a prompt, by the model's chat template."""
        if self.tokenizer is None or self._chat_template is None:
            raise InvalidRequestError("chat needs a tokenizer, and the engine has none (skip_tokenizer_init=True)")
        text = self._chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def with_strict_tools(
        self, params: SamplingParams | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> SamplingParams | None:
        """The parameters of a chat that `render_chat` renders with `tools`: calls of one that is strict satisfy its schema."""
        if not tools or self._chat_template is None:
            return params
        given = params or self.default_params
        constrained = constrain_tools(given, tools, markup=self._tool_markup)
        return params if constrained is given else constrained

    @cached_property
    def _tool_markup(self) -> ToolMarkup | None:
        return detect_parsers(self._chat_template).markup

    def timeline_events(self, first_step: int = 0) -> dict[str, list[Event]]:
        """What is still in the rings of steps `first_step` and later: of "engine", and of "rank 0", "rank 1", ...

        The steps in flight are committed first. Ranks of other machines have clocks of their own and are left out. With
        external_launcher all engines have to call it, as all else; each has its own "engine".
        """
        self._check_open()
        of_ranks = self.core.collective_rpc("timeline_events")
        events = {ENGINE: self.core.timeline.events()}
        events |= {f"rank {rank}": of_ranks[rank] for rank in self.executor.local_ranks}
        return {name: [event for event in found if event.step_id >= first_step] for name, found in events.items()}

    def write_trace(self, path: str | Path) -> None:
        """`timeline_events` as a file that chrome://tracing and Perfetto show."""
        Path(path).write_text(json.dumps(chrome_trace(self.timeline_events())) + "\n", encoding="utf-8")

    def step_figures(self) -> StepFigures:
        """Device idle time, step period, hidden host work and the time of every phase, of `timeline_events`."""
        return step_figures(self.timeline_events())

    def close(self) -> None:
        """Stop the workers and free their memory. Idempotent; what is unfinished is dropped."""
        self._is_closed = True
        self.core.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine was closed; make a new one")


def _make_grammars(
    config: EngineConfig, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int]
) -> StructuredOutputManager | None:
    """It costs nothing before the first request that needs it."""
    if tokenizer is None:
        return None
    vocab_size = config.model.architecture.vocab_size
    create = partial(create_backend, config.structured_outputs.backend, tokenizer, vocab_size, sorted(eos_token_ids))
    return StructuredOutputManager(create, vocab_size, num_buffers=2 * config.scheduler.depth)


def _read_tokenizer(args: EngineArgs, folder: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    if args.skip_tokenizer_init:
        return None, None
    source = folder if args.tokenizer is None else resolve_tokenizer_folder(args.tokenizer)
    if source.is_file() and not (source.parent / "tokenizer.json").is_file():
        file = read_gguf(source)
        return gguf_tokenizer(file), gguf_chat_template(file, args.chat_template)
    source = source.parent if source.is_file() else source
    return Tokenizer.from_folder(source), ChatTemplate.from_folder(source, args.chat_template)
