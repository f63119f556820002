"""Engines of one process that divide the experts of a mixture, each in a thread of its own, as replicas of a server are."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.engine.core.step_loop import CoreListener
from inflight.engine.request.model_info import make_input_processor
from inflight.engine.start.make_core import make_core
from inflight.engine.start.model_files import make_grammars, resolve_config
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.executor.uniproc import UniProcExecutor
from inflight.worker.expert_worker import ExpertWorker

T = TypeVar("T")

IDLE_SECONDS = 0.02  # a replica without work looks so often whether others want a step, if nothing wakes it


class _Listener(CoreListener):
    def __init__(self) -> None:
        self.woken = threading.Event()

    def wake(self) -> None:
        self.woken.set()


class LockstepEngines:
    """`engines` has one for each replica. Their ranks are threads."""

    def __init__(self, folder: Path, num_replicas: int, **arguments: Any) -> None:
        self.args = EngineArgs.from_kwargs(
            {
                "model": str(folder),
                "data_parallel_size": num_replicas,
                "enable_expert_parallel": True,
                "num_threads": 1,
                "cpu_threads_bind": "off",
                **arguments,
            }
        )
        config = resolve_config(self.args)
        config = replace(config, parallel=replace(config.parallel, lockstep_secret=secrets.token_hex(16)))
        self._threads = ThreadPoolExecutor(num_replicas)
        self._listeners = [_Listener() for _ in range(num_replicas)]
        self.engines = list(self._threads.map(self._make, config.replicas(), self._listeners))

    def _make(self, config: EngineConfig, listener: CoreListener) -> LLMEngine:
        executor = UniProcExecutor(config, ExpertWorker)
        inputs = make_input_processor(self.args, config)
        tokenizer = inputs.tokenizer
        grammars = None if tokenizer is None else make_grammars(config, lambda: tokenizer)
        return LLMEngine(make_core(config, executor, grammars, listener), executor, inputs)

    def run(self, work: Callable[[LLMEngine, int], T]) -> Sequence[T]:
        """Call `work` for each replica, all at once. A replica that has ended its work takes part in the steps of others."""
        num_working = len(self.engines)
        lock = threading.Lock()

        def follow(index: int) -> T:
            nonlocal num_working
            engine, listener = self.engines[index], self._listeners[index]
            try:
                return work(engine, index)
            finally:
                with lock:
                    num_working -= 1
                while num_working:
                    listener.woken.clear()
                    if engine.core.has_unfinished_requests():
                        assert engine.core.step() == [], "its requests have ended"
                    else:
                        listener.woken.wait(IDLE_SECONDS)

        return list(self._threads.map(follow, range(len(self.engines))))

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self._threads.shutdown()
