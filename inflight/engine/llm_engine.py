"""`LLMEngine`: prompts in, `RequestOutput`s out, in one process: `FrontEnd`, `EngineCore`, output processor."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.config.engine_args import EngineArgs
from inflight.engine.core import EngineCore
from inflight.engine.front_end import FrontEnd, resolve_config
from inflight.engine.input_processor import ProcessedRequest, Prompt
from inflight.engine.output_processor import OutputProcessor
from inflight.engine.request_state import RequestOutputKind
from inflight.engine.step_figures import ENGINE, StepFigures, step_figures
from inflight.errors import EngineClosedError
from inflight.executor.executor import Executor
from inflight.outputs import RequestOutput
from inflight.sampling_params import SamplingParams
from inflight.timeline import Event, chrome_trace

logger = logging.getLogger(__name__)

MAX_TOLD_UNENFORCED = 1000  # lines of the log


class LLMEngine:
    """Not thread-safe: one caller adds requests and steps. `close` ends it.

    Attributes:
        core: the engine core, with the scheduler and its timeline.
        executor: what runs the model.
        tokenizer: None with skip_tokenizer_init.
        default_params: the `SamplingParams` of a request that brings none.
    """

    def __init__(self, core: EngineCore, executor: Executor, front_end: FrontEnd) -> None:
        self.core = core
        self.executor = executor
        self.tokenizer = front_end.tokenizer
        self.default_params = front_end.default_params
        self._front_end = front_end
        self._output_processor = OutputProcessor(front_end.tokenizer)
        self._is_closed = False
        self._told_unenforced: set[str] = set()

    @classmethod
    def from_args(cls, args: EngineArgs) -> LLMEngine:
        """Read the folder, load the model, size the KV cache.

        Raises:
            ConfigError: the arguments, the folder or the machine do not fit; nothing is left running.
        """
        start = time.perf_counter()
        config = resolve_config(args)
        front_end = FrontEnd(args, config)
        executor = Executor.get_class(config)(config)
        try:
            core = EngineCore(config, executor, front_end.make_grammars())
        except BaseException:  # an interrupt, too: no worker outlives the constructor that failed
            executor.shutdown()
            raise
        logger.info("%s is ready after %.2f s", config.model.name, time.perf_counter() - start)
        return cls(core, executor, front_end)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        thinks_first: bool = True,
    ) -> ProcessedRequest:
        """Validate and tokenise, without adding anything. The arguments are those of `InputProcessor.process`.

        Raises:
            InvalidRequestError: says what was given, what is allowed and what to do.
        """
        self._check_open()
        return self._front_end.process(
            request_id,
            prompt,
            params,
            priority=priority,
            add_special_tokens=add_special_tokens,
            thinks_first=thinks_first,
        )

    def add_processed(self, request: ProcessedRequest, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY) -> None:
        """Queue a request that `process` returned. `kind`: what `step` returns of it, and when.

        Raises:
            InvalidRequestError: a request with this id is still running.
        """
        self._check_open()
        self._tell_unenforced(request.unenforced)
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

    def _tell_unenforced(self, places: Iterable[str]) -> None:
        """Log each place once: the rows of a batch mostly have the same schema."""
        for place in places:
            if place not in self._told_unenforced and len(self._told_unenforced) < MAX_TOLD_UNENFORCED:
                self._told_unenforced.add(place)
                logger.warning("%s: the grammar library cannot enforce it, and it is ignored", place)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns what it changed, of each request as its kind says.

        Raises:
            EngineError: the step failed. If the engine has one rank that can still compute, the requests are still there: abort
                them, or call `step` again. Otherwise the engine has failed for good, and this error is the cause.
            EngineDeadError: the engine has failed for good before.
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
        return self._front_end.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )

    def with_strict_tools(
        self, params: SamplingParams | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> SamplingParams | None:
        """The parameters of a chat that `render_chat` renders with `tools`: calls of one that is strict satisfy its schema."""
        return self._front_end.with_strict_tools(params, tools)

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
        self.core.check_alive()
