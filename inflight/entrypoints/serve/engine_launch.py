"""The engine's process, for the command that supervises several front ends.

The supervisor imports this module on a thread after it has started the front ends, because the import takes longer than they
need for their first answer.
"""

from __future__ import annotations

from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.engine.core_client import MAX_END_SECONDS, EngineProcess
from inflight.engine.front_end import resolve_config
from inflight.entrypoints.serve.shutdown import CUT_SECONDS

__all__ = ["LaunchedEngine", "resolve_config"]


class LaunchedEngine:
    """
    Attributes:
        sockets: one to the engine for each front end.
    """

    def __init__(self, args: EngineArgs, config: EngineConfig, num_front_ends: int) -> None:
        self._process = EngineProcess(args, config, num_front_ends)
        self.sockets = self._process.sockets

    def close(self, *, is_cut: bool) -> None:
        """Blocks until the engine's process has ended."""
        self._process.close(CUT_SECONDS if is_cut else MAX_END_SECONDS)
