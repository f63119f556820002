"""`WorkerBase`: the methods that an executor calls on each rank. The real worker is in inflight/worker/worker.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field

from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput

TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address at which the ranks find each other at a start. Rank 0 serves a store (of torch.distributed) there, and the
    other ranks connect to it. An epoch is one start of the ranks.

    Any program that can connect to the address can read the store, so it contains no secret. The secret that the ranks need to
    connect to each other is sent in this message.

    Attributes:
        timeout_seconds: the time allowed for a step. If a collective takes longer, another rank is lost.
        token: the secret of this epoch, TOKEN_BYTES random bytes. `repr` does not show it.
        listen_fd: only on rank 0, otherwise None: the descriptor of a socket that already listens at `host`:`port`. Rank 0's
            store closes it.
    """

    host: str
    port: int
    epoch: int
    timeout_seconds: float
    token: bytes = field(repr=False)
    listen_fd: int | None = None


class WorkerBase(ABC):
    """One rank. All methods are called in one thread, in the order of the executor's calls. Only `leave_groups_after_failure`,
    `phase` and `is_waiting` may be called in any thread.

    The constructor has the arguments `(config: EngineConfig, rank: int, rendezvous: Rendezvous | None)`. The rendezvous is None
    if there is only one rank, or if the ranks are threads of one process.

    `Executor.collective_rpc` can call every public method by its name.
    """

    @abstractmethod
    def load_model(self) -> None:
        """Build the model and read its weights. Idempotent."""

    @abstractmethod
    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Returns the spec of each layer of this rank's cache, by layer name, in layer order."""

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Returns how many bytes are free for the KV cache. To measure this, the worker runs the largest batch. The result is
        0 or negative if no memory is left. Idempotent."""

    @abstractmethod
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache, connect it to the layers, and run first steps to warm up. A second call with an
        equal config does nothing."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Run one step to its end and return its output, or only begin it and return a future of the output.

        If the worker returns a future, the next step may begin before this one has ended. Steps end in the order in which they
        began. Until all have ended, only this method, `provide_grammar_output`, `leave_groups_after_failure`, `phase`,
        `is_waiting` and `shutdown` are called.
        """

    def provide_grammar_output(self, step_id: int, grammar_output: GrammarOutput) -> None:
        """Receive the masks of a step that has begun and has `grammar_rows`. Called only on the ranks of the last stage. Must
        not wait. By default it does nothing, for workers that draw no tokens under a grammar."""

    @abstractmethod
    def execute_dummy_batch(self) -> None:
        """Run a forward pass of one token that belongs to no request. It changes no request's cache."""

    def leave_groups_after_failure(self) -> None:
        """Called on this rank after it has replied that a step failed. It leaves the process groups, so that ranks that wait
        for this one stop waiting. May be called in any thread."""

    def phase(self) -> str:
        """Returns what the rank computes now, for error messages; "" if not known. Any thread may call it. Must not wait."""
        return ""

    def is_waiting(self) -> bool:
        """Whether the rank waits for another rank now; False if not known. Any thread may call it. Must not wait."""
        return False

    def check_health(self) -> None:
        """Raises if this rank cannot serve. By default, a rank that answers is healthy."""

    def shutdown(self) -> None:
        """Free the rank's resources. A step that waits for another rank is ended. Idempotent."""
