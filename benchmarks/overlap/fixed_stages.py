"""An engine whose stages take a fixed time, over links that do: everything is real but the model's arithmetic and the wire.

A stage sleeps in its forward pass, so the stages of a pipeline overlap on any number of cores. The delay is below the stage
link and the token link, in their channels. What is drawn shows that all data arrived: each token is its predecessor plus one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.overlap.delayed_channel import DelayedChannel
from benchmarks.shared.stand_in_model import StandInModel, StandInWorker
from inflight.config.architecture import GatedMlpSpec, LayerSpec, ModelArchitecture
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.machine import Machine
from inflight.config.mixers import AttentionSpec, RopeConfig
from inflight.config.resolve import resolve
from inflight.distributed.channel import Channel
from inflight.distributed.collectives import Collectives
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.thread_world import ThreadWorlds
from inflight.distributed.world import World
from inflight.engine.core.engine_core import EngineCore
from inflight.engine.start.make_core import make_core
from inflight.executor.executor import Executor
from inflight.executor.multiproc import MultiprocExecutor
from inflight.executor.uniproc import UniProcExecutor
from inflight.interface.request import EngineCoreRequest, Int32Array, ResolvedSampling
from inflight.interface.worker import Rendezvous
from inflight.models.causal_lm import ModelStep
from inflight.sampling_params import SamplingParams
from inflight.timeline import Event

STAGE_SECONDS = 0.020  # a forward pass of any number of tokens
LINK_SECONDS = 0.010  # a step's activations from one stage to the next; its tokens from the last stage to the first
VOCAB_SIZE = 1024
MAX_MODEL_LEN = 1024


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many stages, and how far the engine plans ahead. With depth and stagger 1 the next step begins when the previous
    one ends. Stagger None: the engine measures and chooses it."""

    name: str
    num_stages: int
    stagger: int | None
    depth: int = 0
    backend: str = "uni"  # "uni" | "mp"
    fast_links: bool = False  # links take no time, instead of LINK_SECONDS


class FixedStage(StandInModel):
    """Hands the input ids on in the first column of the residual, and makes the next token the most probable one."""

    def _set_up(self, architecture: ModelArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        self._template = IntermediateTensors.template(architecture.hidden_size, dtype, device)

    def forward(self, step: ModelStep) -> Tensor | IntermediateTensors:
        time.sleep(STAGE_SECONDS)
        intermediate = step.intermediate
        if intermediate is None:
            intermediate = self._template.empty_like(len(step.input_ids))
            intermediate.residual[:, 0] = step.input_ids
        if not self._stage.is_last:
            return intermediate
        return intermediate.residual if step.rows is None else intermediate.residual[step.rows]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        following = (hidden[:, 0].long() + 1) % VOCAB_SIZE
        return torch.nn.functional.one_hot(following, VOCAB_SIZE).float()


class DelayedWorld(World):
    """A world whose channels need `seconds` to send a step's tensors, as a busy wire would."""

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world.layout, world.rank)
        self._world, self._seconds = world, seconds

    def collectives(self, name: str) -> Collectives:
        return self._world.collectives(name)

    def channel(self, peer: int, name: str) -> Channel:
        num_tensors = 1 if name == "tokens" else 2  # of a step
        return DelayedChannel(self._world.channel(peer, name), repeat(self._seconds / num_tensors), repeat(0.0))

    def close(self, reason: str) -> None:
        self._world.close(reason)


class FixedStageWorker(StandInWorker):
    """The real worker with another model, in a world that delays."""

    model_class = FixedStage
    link_seconds: ClassVar[float] = LINK_SECONDS

    def _join(self, rendezvous: Rendezvous | ThreadWorlds | None) -> World:
        return DelayedWorld(super()._join(rendezvous), self.link_seconds)


class FastLinkWorker(FixedStageWorker):
    link_seconds = 0.0


def make_engine(layout: Layout, max_num_seqs: int) -> tuple[EngineCore, Executor]:
    """The core owns the executor: closing it ends both."""
    config = _engine_config(layout, max_num_seqs)
    executor: Executor
    worker_class = FastLinkWorker if layout.fast_links else FixedStageWorker
    if layout.backend == "mp":
        executor = MultiprocExecutor(config, f"benchmarks.overlap.fixed_stages:{worker_class.__name__}")
    else:
        worlds = ThreadWorlds(config.parallel.layout, config.execute_model_timeout_seconds)
        executor = UniProcExecutor(config, lambda config, rank, _: worker_class(config, rank, worlds))
    try:
        return make_core(config, executor), executor
    except BaseException:  # an interrupt, too
        executor.shutdown()
        raise


def decode_request(index: int, max_tokens: int) -> tuple[EngineCoreRequest, Int32Array]:
    """Eight prompt tokens, each its predecessor plus one; then as many as said, drawn greedily."""
    prompt = (np.arange(8, dtype=np.int32) + 10 * index) % VOCAB_SIZE
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    sampling = ResolvedSampling(params=params, seed=index, max_tokens=max_tokens)
    request = EngineCoreRequest(request_id=str(index), sampling=sampling)
    return request, prompt.astype(np.int32)


def rank_events(executor: Executor) -> dict[str, list[Event]]:
    """The timelines of all ranks, as `chrome_trace` takes them."""
    stages = executor.config.parallel.layout
    timelines = executor.collective_rpc("timeline_events")
    return {f"rank {rank}, stage {stages.pp_rank(rank)}": events for rank, events in enumerate(timelines)}


def _engine_config(layout: Layout, max_num_seqs: int) -> EngineConfig:
    architecture = ModelArchitecture(
        name="FixedStage",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        layers=(
            LayerSpec(
                mixer=AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=64, rope=RopeConfig()),
                mlp=GatedMlpSpec(size=64),
            ),
        )
        * layout.num_stages,
        rms_norm_eps=1e-6,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    args = EngineArgs(
        max_num_seqs=max_num_seqs,
        load_format="dummy",
        pipeline_parallel_size=layout.num_stages,
        pipeline_layer_partition=",".join("1" * layout.num_stages),
        distributed_executor_backend=layout.backend,
        kv_cache_memory_bytes=1 << 26,
        num_threads=1,
    )
    config = resolve(
        args,
        folder=Path("fixed-stages"),
        architecture=architecture,
        machine=Machine(device="cpu", num_cores=1, dtypes=("float32",)),
        timeout_seconds=60.0,
    )
    if layout.stagger is None:
        return config
    # not by arguments: `resolve` refuses a pipeline whose steps do not overlap, which is what the others are compared with
    scheduler = replace(config.scheduler, depth=layout.depth, stagger=layout.stagger, max_stagger=None)
    return replace(config, scheduler=scheduler)
