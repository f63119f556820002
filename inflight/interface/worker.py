"""`WorkerBase`: what an executor calls on each rank. `inflight.worker.worker` is the real one; tests have their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field

from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput

TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address at which the ranks of one epoch form their process groups: rank 0 serves a store there, the others connect.

    Everybody who can connect to the address can read the store, so it holds no secret. This message brings the secret that the
    ranks need to connect to each other.

    Attributes:
        timeout_seconds: the budget of a step. If a collective takes longer, a peer is lost.
        token: the secret of this epoch, TOKEN_BYTES random bytes. `repr` does not show it.
        listen_fd: on rank 0, the descriptor of the socket that already listens at `host`:`port`. Rank 0's store closes it.
            None on the other ranks.
    """

    host: str
    port: int
    epoch: int
    timeout_seconds: float
    token: bytes = field(repr=False)
    listen_fd: int | None = None


class WorkerBase(ABC):
    """One rank. All methods are called from one thread, in the order of the executor's calls. Any thread may call
    `leave_groups_after_failure`, `phase` and `is_waiting`.

    The constructor takes `(config: EngineConfig, rank: int, rendezvous: Rendezvous | None)`. The rendezvous is None if there is
    one rank, or if the ranks are threads of one process.

    Any public method can be called by `Executor.collective_rpc` under its name.
    """

    @abstractmethod
    def load_model(self) -> None:
        """Build the model and read its weights. Idempotent."""

    @abstractmethod
    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Returns layer name -> spec, in layer order, for the layers of this rank."""

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Returns the bytes free for the KV cache, after a profile run at the largest batch; 0 or less if there are none.
        Idempotent."""

    @abstractmethod
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the arena, bind it to the layers, warm up. Idempotent for an equal config."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Run one step to its end, or begin it and return its future.

        With a future, the next step may begin before this one has ended. Steps end in the order in which they began. Until all
        have ended, only this method, `provide_grammar_output`, `leave_groups_after_failure`, `phase`, `is_waiting` and
        `shutdown` are called.
        """

    def provide_grammar_output(self, step_id: int, grammar_output: GrammarOutput) -> None:
        """Receive the masks of a step that has begun and has `grammar_rows`. Called on the ranks of the last stage only. Must
        not wait. The default suits a worker that draws no tokens under a grammar."""

    @abstractmethod
    def execute_dummy_batch(self) -> None:
        """Run a forward pass of one token that belongs to no request; touches no request's cache."""

    def leave_groups_after_failure(self) -> None:
        """Called after the reply that a step has failed on this rank: leave the process groups, which frees the ranks that wait
        for this one. From any thread."""

    def phase(self) -> str:
        """Describe for error messages what the rank computes now; "" if not known. Any thread may call it; must not wait."""
        return ""

    def is_waiting(self) -> bool:
        """Whether the rank waits for another rank now; False if not known. Any thread may call it; must not wait."""
        return False

    def check_health(self) -> None:
        """Raise if this rank cannot serve. The default: a rank that answers is healthy."""

    def shutdown(self) -> None:
        """Free what the rank holds. A step that waits for another rank ends. Idempotent."""
