"""`InsightMethods`: the methods of `LLM` that show what the engine does, and call its workers."""

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.engine.core.chrome_trace import chrome_trace
from inflight.engine.core.step_figures import StepFigures, step_figures
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.timeline import Event


class InsightMethods(ABC):
    """Only for one engine in this process: with several replicas the methods raise ConfigError."""

    _turn: threading.Lock

    @property
    @abstractmethod
    def llm_engine(self) -> LLMEngine: ...

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
        """The phases of the last steps, with their times, for "engine" and the ranks of this machine ("rank 0", ...)."""
        with self._turn:
            return self.llm_engine.timeline_events()

    def write_trace(self, path: str | Path) -> None:
        """Write `timeline_events` as a Chrome trace (JSON), for https://ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(chrome_trace(self.timeline_events())) + "\n", encoding="utf-8")

    def step_figures(self) -> StepFigures:
        """For the last steps: how long the devices were idle, and the share of the host's work that ran while they computed."""
        return step_figures(self.timeline_events())
