"""`WorkerBase`: the methods that an executor calls on each rank. The real worker is in inflight/worker/worker.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput

TOKEN_BYTES = 32

TierCounts = dict[str, dict[str, float]]  # name of a tier -> what it has done -> how often, or how long


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """How the ranks find each other in an epoch.

    Attributes:
        epoch: the number of the epoch. After a fault the ranks meet again, in a new epoch.
        timeout_seconds: the time allowed for a step. If a collective takes longer, the ranks take another rank to be lost.
        token: the secret of this epoch, TOKEN_BYTES random bytes. Ranks need it to connect to each other. `repr` does not show
            it.
        listen_fd: the descriptor of a socket that already listens at this rank's address. The rank's `World` owns it.
        addresses: rank -> host and port at which this rank listens for the other ranks.
    """

    epoch: int
    timeout_seconds: float
    token: bytes = field(repr=False)
    listen_fd: int | None = None
    addresses: tuple[tuple[str, int], ...]


class WorkerBase(ABC):
    """One rank. All methods are called in one thread, in the order of the executor's calls. Only `leave_groups`, `phase` and
    `is_waiting` may be called in any thread.

    The constructor has the arguments `(config: EngineConfig, place: Place, rendezvous: Rendezvous | None)`. The rendezvous is
    None if there is only one rank, or if the ranks are threads of one process.

    `Executor.collective_rpc` can call every public method by its name.
    """

    @abstractmethod
    def load_model(self) -> None:
        """Build the model and read its weights. Idempotent."""

    @abstractmethod
    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Returns layer name -> spec of the layer's KV cache, for this rank's layers, in layer order."""

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Returns how many bytes are free for the KV cache. To measure this, the worker runs the largest batch. The result is
        0 or negative if no memory is left. Idempotent."""

    @abstractmethod
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache, connect it to the layers, and run first steps to warm up. A second call with an equal config
        does nothing. But the first such call in a later epoch (see `join_epoch`) warms up again, together with the other
        ranks."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Run one step to its end and return its output, or only begin it and return a future of the output.

        If the worker returns a future, the next step may begin before this one has ended. Steps end in the order in which they
        began. Until all have ended, only this method, `provide_grammar_output`, `leave_groups`, `end_steps`, `phase`,
        `is_waiting` and `shutdown` are called.
        """

    def provide_grammar_output(self, step_id: int, grammar_output: GrammarOutput) -> None:
        """Receive the masks of a step that has begun and has `grammar_rows`. Called only on the ranks of the last stage. Must
        not wait. By default it does nothing, for workers that draw no tokens under a grammar."""

    @abstractmethod
    def execute_dummy_batch(self) -> None:
        """Run a forward pass of one token that belongs to no request. It changes no request's cache."""

    def leave_groups(self, reason: str) -> None:
        """Leave the groups and links of this epoch. Then this rank's waits for other ranks fail, and other ranks' waits for
        this rank fail. Called after the rank has replied that a step failed, and when a new epoch begins. Idempotent, in any
        thread."""

    def end_steps(self) -> None:
        """Drop the steps that have not ended, and wait until the device computes and copies nothing. The futures of these steps
        need not be completed. `leave_groups` was called before. By default this does nothing, for workers whose `execute_model`
        runs each step to its end."""

    def join_epoch(self, rendezvous: Rendezvous | None) -> None:
        """Connect to the other ranks again, in a new epoch. The weights and the KV cache do not change. Called after
        `end_steps`. By default this does nothing, for workers that use no groups.

        Raises:
            OSError: another rank cannot be reached.
        """

    def phase(self) -> str:
        """Returns what the rank computes now, for error messages, or "" if this is not known. Any thread may call this. Must
        not wait."""
        return ""

    def is_waiting(self) -> bool:
        """Whether the rank waits for another rank now. False if this is not known. Any thread may call this. Must not wait."""
        return False

    # -- transfers of KV blocks, called beside the steps, and only if the configuration has a host pool. rank_transfers.py
    # describes the arguments, and what the futures have --

    def kv_save(
        self, transfer_id: int, blocks: Sequence[int], slots: Sequence[int], keys: Sequence[Sequence[bytes]]
    ) -> Future[bool]:
        raise NotImplementedError

    def kv_stored(self, transfer_id: int) -> Future[tuple[bool, TierCounts]]:
        raise NotImplementedError

    def kv_load(self, slots: Sequence[int], blocks: Sequence[int]) -> Future[bool]:
        raise NotImplementedError

    def kv_fetch(
        self, keys: Sequence[bytes], slots: Sequence[int], chunks: Sequence[tuple[bytes, int]]
    ) -> Future[tuple[list[bool], TierCounts]]:
        raise NotImplementedError

    def kv_touch(self, keys: Sequence[Sequence[bytes]]) -> Future[tuple[list[bool], TierCounts]]:
        raise NotImplementedError

    def kv_restore(self, keys: Sequence[Sequence[bytes]], slots: Sequence[int]) -> Future[tuple[bool, TierCounts]]:
        raise NotImplementedError

    def check_health(self) -> None:
        """Raises if this rank cannot serve. By default, a rank that answers is healthy."""

    def shutdown(self) -> None:
        """Free the rank's resources. A step that waits for another rank is ended. Idempotent."""
