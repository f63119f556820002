"""`LLMEngine`: makes `RequestOutput`s from prompts. `LLM` uses it. The caller calls `step` again and again.

The engine core runs in the caller's process. Ranks may be processes of their own.
"""

import logging
import time
from collections.abc import Iterable
from typing import Unpack

from inflight.config.engine_args import EngineArgs
from inflight.config.openmp import placement_hidden
from inflight.engine.core.engine_core import EngineCore
from inflight.engine.core.step_figures import ENGINE
from inflight.engine.request.input_processor import InputProcessor
from inflight.engine.request.model_info import make_input_processor
from inflight.engine.request.output_processor import OutputProcessor
from inflight.engine.request.processed import RequestOptions
from inflight.engine.request.prompt import Prompt
from inflight.engine.request.request_state import RequestOutputKind
from inflight.engine.start.make_core import make_core
from inflight.engine.start.model_files import make_grammars, resolve_config
from inflight.entrypoints.offline_engine import OfflineEngine
from inflight.errors import ConfigError, EngineClosedError
from inflight.executor.executor import Executor
from inflight.outputs import RequestOutput
from inflight.pooling_params import Params
from inflight.processes.object_end import close_with, run_to_end
from inflight.timeline import Event

logger = logging.getLogger(__name__)


class LLMEngine(OfflineEngine):
    """Not thread-safe: only one thread may call its methods.

    Attributes:
        core: the engine core, with the scheduler and the engine's timeline.
        executor: runs the model.
    """

    def __init__(self, core: EngineCore, executor: Executor, input_processor: InputProcessor) -> None:
        super().__init__(input_processor)
        self.core = core
        self.executor = executor
        self._output_processor = OutputProcessor(input_processor.tokenizer)
        self._keep_open = close_with(self, core.close)

    @classmethod
    def from_args(cls, args: EngineArgs) -> "LLMEngine":
        """Read the model's folder, load the model and allocate the KV cache.

        Raises:
            ConfigError: the arguments are wrong, or do not fit the model or the machine. No worker is left running.
        """
        start = time.perf_counter()
        if args.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={args.data_parallel_size}: only `inflight serve`, AsyncLLM and LLM run several replicas; "
                "this engine is a single one: leave data_parallel_size out"
            )
        config = resolve_config(args)
        if config.cache.events is not None:
            raise ConfigError(
                "kv_events_config: the engine runs in the caller's process, and publishes no events; use `inflight serve`, "
                "AsyncLLM or LLM(data_parallel_size=2), or leave it out"
            )
        input_processor = make_input_processor(args, config)
        tokenizer = input_processor.tokenizer
        with placement_hidden():  # the executor may import torch here, in a thread of the user's program
            executor = Executor.get_class(config)(config)
        try:
            grammars = None if tokenizer is None else make_grammars(config, lambda: tokenizer)
            core = make_core(config, executor, grammars)
        except BaseException:  # also KeyboardInterrupt: if this method fails, no worker may stay alive
            run_to_end(executor.shutdown)
            raise
        logger.info("%s is ready after %.2f s", config.model.name, time.perf_counter() - start)
        return cls(core, executor, input_processor)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        *,
        kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Queue a request. Calls of `step` compute it. `InputProcessor.process` describes the arguments.

        Args:
            kind: what the outputs of the request contain, and when `step` returns one.

        Raises:
            InvalidRequestError: the request is wrong (the message says what to do), or a request with this id still runs.
        """
        self._check_open()
        request = self._input_processor.process(request_id, prompt, params, **options)
        self._output_processor.add_request(request, kind)
        if request.unenforced:
            self._log_unenforced(request.unenforced)
        for sequence in request.sequences:
            self.core.add_request(sequence, request.prompt_array)

    def step(self) -> list[RequestOutput]:
        """Run one step. For each request that the step changed, returns an output if its `kind` asks for one now.

        Raises:
            EngineError: a step failed, and the engine has not recovered. If `core.is_dead` is False, the engine keeps the
                requests: abort them or call `step` again. If it is True, the engine cannot continue.
            EngineDeadError: an earlier call failed, and the engine cannot continue.
        """
        self._check_open()
        update = self._output_processor.update(self.core.step())
        if update.requests_to_abort:
            self.core.abort_requests(update.requests_to_abort)
        return update.take_outputs()

    def has_unfinished_requests(self) -> bool:
        return self._output_processor.has_unfinished_requests()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.core.abort_requests(self._output_processor.abort(request_ids).requests_to_abort)

    def timeline_events(self, first_step: int = 0) -> dict[str, list[Event]]:
        """Returns for "engine", "rank 0" and so on the events of `first_step` and later ones that the timelines contain.

        This method first commits the steps in flight. Ranks on other machines are left out, because their clocks differ.
        With external_launcher every engine must call this method, and gets its own events under "engine".
        """
        self._check_open()
        of_ranks = self.core.collective_rpc("timeline_events")
        events = {ENGINE: self.core.timeline.events()}
        events |= {f"rank {rank}": of_ranks[rank] for rank in self.executor.local_ranks}
        return {name: [event for event in found if event.step_id >= first_step] for name, found in events.items()}

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        self.core.reset_prefix_cache(reset_connector=reset_connector)

    def close(self) -> None:
        run_to_end(self.core.close)
        self._input_processor.images.close()
        self._keep_open()

    def _check_open(self) -> None:
        if self.core.is_closed:
            raise EngineClosedError("the engine was closed, or belongs to another process; make a new one")
        self.core.check_alive()
