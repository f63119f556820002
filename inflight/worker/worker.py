"""`Worker`: one rank. It owns the device, the model, the runner and the connections to other ranks.

Its steps are in step_pipeline.py. Here are its start, its faults and its end. The executor calls it from one thread. Loading
and all computation run in the device's compute thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from inflight.attention.backend import AttentionBackend
from inflight.attention.selector import get_backend
from inflight.config.architecture import TRANSFORMERS
from inflight.config.engine import EngineConfig
from inflight.config.ranks import Place
from inflight.device.accelerator import Accelerator
from inflight.device.selector import get_device
from inflight.distributed.expert_parallel import ExpertParallelGroup, join_experts
from inflight.distributed.thread_world import ThreadWorlds
from inflight.distributed.world import World
from inflight.errors import ConfigError
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.worker import Rendezvous, TierCounts
from inflight.kv_connector.rank_transfers import RankTransfers
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import CausalLM
from inflight.spec_decode.load_drafter import load_drafter
from inflight.timeline import Event
from inflight.weight_cache.background import BackgroundWork
from inflight.worker.kv_transfers import make_transfers
from inflight.worker.memory_budget import MemoryBudget
from inflight.worker.model_runner import ModelRunner
from inflight.worker.phase_order import PhaseOrder
from inflight.worker.pipeline import Pipeline
from inflight.worker.profiling import RankProfiler
from inflight.worker.runner import AnyRunner
from inflight.worker.runner_base import RankParts
from inflight.worker.startup import join_world, start_threads
from inflight.worker.step_pipeline import StepPipeline

T = TypeVar("T")

WRITE_SECONDS = 4.0  # so long a rank that is shut down goes on writing packed weights


class Worker(StepPipeline):
    """The worker that computes a real model. `WorkerBase` documents its methods.

    Args:
        place: the rank, and where it runs.
        rendezvous: how the ranks connect: as processes, or as threads of this process. None if there is one rank only.

    Raises:
        ConfigError, ConnectionError: the ranks could not connect to each other.
    """

    def __init__(self, config: EngineConfig, place: Place, rendezvous: Rendezvous | ThreadWorlds | None) -> None:
        device = get_device(config.device.kind, place.device_index)
        super().__init__(config, place.rank, device)
        self._core_watch = start_threads(config, place, self._device)
        self._memory = MemoryBudget(config, place, self._device)
        self._available_bytes: int | None = None
        self._has_warmed_up = False  # whether a step without requests has run
        self._kv_cache_config: KVCacheConfig | None = None
        self._background = BackgroundWork()
        self._transfers: RankTransfers | None = None
        try:
            self._world = self._join(rendezvous)
        except BaseException:
            self._device.close()
            raise
        # ranks that are threads share one profiler: the profiler of rank 0 records them all
        self._shares_profiler = isinstance(rendezvous, ThreadWorlds) and place.rank > 0
        self._profiler = RankProfiler(f"tp{self._world.tp_rank}-pp{self._world.pp_rank}", self._device.kind)
        try:
            self._tp = self._world.tensor_parallel_group("model")
            self._ep = self._join_experts()
            self._pipeline = Pipeline(config, self._stage, self._world, self._device, self._timeline)
        except BaseException:  # also an interrupt: other ranks must not wait for this one
            self._world.close("it could not start")
            self._device.close()
            raise

    def load_model(self) -> None:
        if self._runner is None:
            self._device.submit(self._load_model).result()

    @torch.inference_mode()
    def _load_model(self) -> None:
        model_config = self._config.model
        dtype: torch.dtype = getattr(torch, model_config.dtype)
        cache = self._config.cache
        kv_cache_dtype: torch.dtype = getattr(torch, cache.dtype)
        device = self._device
        backend = get_backend(
            *(device.kind, self._config.head_dims, cache.block_size, dtype, kv_cache_dtype),
            num_multiprocessors=device.num_multiprocessors if isinstance(device, Accelerator) else 0,
            max_shared_bytes=device.max_shared_bytes if isinstance(device, Accelerator) else 0,
        )
        model = self._load_stage(backend)
        if model.backend is not None and model.backend is not backend:
            if kv_cache_dtype != dtype:
                raise ConfigError(
                    f"kv_cache_dtype={cache.dtype!r}: no kernel supports this model's attention; leave it out"
                )
            backend = model.backend
        make_runner = self._runner_class()
        self._runner = make_runner(
            RankParts(
                config=self._config,
                model=model,
                backend=backend,
                device=device,
                timeline=self._timeline,
                tp=self._tp,
                pipeline=self._pipeline,
                draft_model=load_drafter(
                    *(self._config, self._stage, self._tp, backend, device),
                    served=model,
                    served_bytes=self._memory.served_bytes,
                    check_size=self._memory.check_beside,
                    later=self._background,
                ),
            )
        )

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.runner.kv_cache_specs()

    def determine_available_memory(self) -> int:
        if self._available_bytes is None:
            self._available_bytes = self._compute(lambda: self._memory.measure_available(self.runner))
        return self._available_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        if kv_cache_config != self._kv_cache_config or not self._has_warmed_up:
            self._compute(partial(self._initialize, kv_cache_config))
            self._background.start(lambda: any(event.phase == "drain" for event in self._timeline.events()))

    @torch.inference_mode()
    def _initialize(self, kv_cache_config: KVCacheConfig) -> None:
        if kv_cache_config != self._kv_cache_config:
            self.runner.initialize(kv_cache_config)
            self._kv_cache_config = kv_cache_config
            if kv_cache_config.num_slots:
                self._transfers = make_transfers(
                    self._config, self.rank, self._device, self.runner.arena, kv_cache_config
                )
        self.runner.warm_up()
        self._has_warmed_up = True

    def kv_save(
        self, transfer_id: int, blocks: Sequence[int], slots: Sequence[int], keys: Sequence[Sequence[bytes]]
    ) -> Future[bool]:
        return self._rank_transfers.save(transfer_id, blocks, slots, keys)

    def kv_stored(self, transfer_id: int) -> Future[tuple[bool, TierCounts]]:
        return self._rank_transfers.stored(transfer_id)

    def kv_load(self, slots: Sequence[int], blocks: Sequence[int]) -> Future[bool]:
        newest = self._futures[-1] if self._futures else None  # it and older steps may still use the blocks
        return self._rank_transfers.load(slots, blocks, newest)

    def kv_fetch(
        self, keys: Sequence[bytes], slots: Sequence[int], chunks: Sequence[tuple[bytes, int]]
    ) -> Future[tuple[list[bool], TierCounts]]:
        return self._rank_transfers.fetch(keys, slots, chunks)

    def kv_touch(self, keys: Sequence[Sequence[bytes]]) -> Future[tuple[list[bool], TierCounts]]:
        return self._rank_transfers.touch(keys)

    def kv_restore(self, keys: Sequence[Sequence[bytes]], slots: Sequence[int]) -> Future[tuple[bool, TierCounts]]:
        return self._rank_transfers.restore(keys, slots)

    @property
    def _rank_transfers(self) -> RankTransfers:
        assert self._transfers is not None, "the engine has no host pool"
        return self._transfers

    def graph_report(self) -> dict[str, Any]:  # Any: JSON
        """Reports what was recorded and tuned at the start.

        `num_graphs`, `seconds` and `bytes` (of device memory) describe the CUDA graphs. `linears` lists, for each matrix
        product, the fields of its `LinearChoice`: how the product is computed if it has few rows. On a CPU the numbers are 0
        and the list is empty.
        """
        return self.runner.graph_report()

    def execute_dummy_batch(self) -> None:
        self._compute(partial(torch.inference_mode()(self.runner.dummy_run), 1))

    def phase(self) -> str:
        return ", ".join(self._timeline.under_way())

    def is_waiting(self) -> bool:
        receives = any(phase.startswith("receive ") for phase in self._timeline.under_way())
        return receives or self._world.is_waiting

    def check_health(self) -> None:
        """Compute a step without requests. It fails if the device cannot compute any more. From now on steps run again."""
        if self._has_left and self._config.parallel.world_size > 1:
            raise ConnectionError(f"rank {self.rank} has stopped its communication")
        self.execute_dummy_batch()
        self._failed_step = None
        if isinstance(self._device, Accelerator):
            self._device.compute.record().synchronize()

    def end_steps(self) -> None:
        self._pipeline.close()
        self._device.synchronize()  # forwards and samples that were submitted fail, because this rank has left its groups
        self._device.submit(lambda: self._device.drain(lambda: None)).result().result()
        for future in self._futures:
            future.cancel()  # its step waits for masks that never come
        self._futures.clear()
        self._order = PhaseOrder(self._device.submit)
        if self._transfers is not None:
            self._transfers.begin_epoch()

    def join_epoch(self, rendezvous: Rendezvous | ThreadWorlds | None) -> None:
        self._world = self._join(rendezvous)
        self._has_left = self._has_warmed_up = False
        self._failed_step = None
        try:
            self._world.tensor_parallel_group("model", into=self._tp)
            if self._ep is not None:
                self._ep.connect(self._tp.collectives)
            self._pipeline = Pipeline(self._config, self._stage, self._world, self._device, self._timeline)
        except BaseException:  # other ranks must not wait for this one
            self.leave_groups("it could not meet the others")
            raise
        self.runner.begin_epoch(self._pipeline)

    def profile(self, start: bool, folder: str = "") -> str | None:
        """Start a trace of this rank's threads, or stop the trace. The stop writes the trace to tp<n>-pp<n>.json in the
        `folder` that was given at the start, and returns the path of the file.

        Steps are marked "step <id>". If the ranks are threads of one process, rank 0 records all ranks, and the other ranks
        return None.
        """
        if self._shares_profiler:
            return None
        if start:
            self._profiler.start(folder)
            return None
        return self._profiler.stop()

    def timeline_events(self, since_ns: int = 0) -> list[Event]:
        """The last events of this rank: `prepare`, `receive`, `forward`, `sample`, `drain` and `send` of each step."""
        return self._timeline.events(since_ns)

    def shutdown(self) -> None:
        self._has_left = True
        self._world.close("it was shut down")
        self._pipeline.close()
        self._device.close()
        for future in self._futures:
            future.cancel()  # its step still waits for masks, or its tasks were dropped
        if self._transfers is not None:
            self._transfers.close()  # after these steps, because loads wait for them
        self._profiler.close()
        self._background.close(WRITE_SECONDS)
        self._runner = None

    def _join(self, rendezvous: Rendezvous | ThreadWorlds | None) -> World:
        """Connect to the other ranks. Benchmarks override it."""
        return join_world(self._config, self.rank, rendezvous, self._device)

    def _join_experts(self) -> ExpertParallelGroup | None:
        return join_experts(self._config, self._tp)

    def _load_stage(self, backend: AttentionBackend) -> CausalLM:
        """This rank's part of the model, weights included. Benchmarks override it."""
        return load_model(
            self._config.model,
            device=self._device.torch_device,
            backend=backend,
            tp=self._tp,
            ep=self._ep,
            stage=self._stage,
            check_size=self._memory.check_before_loading,
            later=self._background,
        )

    def _compute(self, task: Callable[[], T]) -> T:
        """Run `task` in the compute thread and wait for it. If it fails, leave the groups, so that no other rank waits."""
        try:
            return self._device.submit(task).result()
        except BaseException:
            self._world.close("it failed")
            raise

    def _runner_class(self) -> type[AnyRunner]:
        """The class of the runner. Drafts are proposed and verified on the host, so an engine with drafts has a
        `ModelRunner` on a GPU too, and so has a model whose code may wait for the device: no graph can be captured of it."""
        config = self._config
        is_fallback = config.model.architecture.implementation == TRANSFORMERS
        if not isinstance(self._device, Accelerator) or config.speculative is not None or is_fallback:
            return ModelRunner
        from inflight.worker.gpu.graph_model_runner import GraphModelRunner  # needs triton

        return GraphModelRunner
