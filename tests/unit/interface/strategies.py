"""Hypothesis strategies for every message that crosses a process boundary, and equality that looks into arrays."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from inflight.config.architecture import GatedMlpSpec, LayerSpec
from inflight.config.engine import EngineConfig
from inflight.config.experts import MoeSpec, RouterSpec
from inflight.config.mixers import (
    AttentionSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    MixerSpec,
    RopeConfig,
    ShortConvSpec,
)
from inflight.config.plain_mlp import PlainMlpSpec
from inflight.config.ranks import places_on
from inflight.config.vision import (
    Gemma3VisionSpec,
    Gemma4VisionSpec,
    Idefics3VisionSpec,
    Qwen3VisionSpec,
    Qwen25VisionSpec,
    TransformersVisionSpec,
    VisionSpec,
)
from inflight.errors import ErrorKind
from inflight.interface.engine_view import EndRequests, EngineView, Watch
from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.interface.messages import (
    AskActivity,
    ExecuteModel,
    ProvideGrammarOutput,
    RpcCall,
    RpcReply,
    StepReply,
    WorkerActivity,
    WorkerFailure,
)
from inflight.interface.parts import RequestPart
from inflight.interface.pooling import PoolingPart, PoolingResult
from inflight.interface.prompt_logprobs import PromptLogprobsPart, PromptLogprobsResult
from inflight.interface.request import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LogprobsColumns,
    ResolvedSampling,
)
from inflight.interface.serving import (
    AbortRequests,
    AddRequest,
    CachedBlocks,
    EndDamagedEngine,
    EngineDied,
    EngineOutputs,
    EngineReady,
    EngineStartFailed,
    PrefixCacheReset,
    ResetPrefixCache,
    StartEngine,
)
from inflight.interface.start_up import (
    BeginEpoch,
    Hello,
    JoinEpoch,
    Listening,
    PlaceRanks,
    Preload,
    RanksPlaced,
    Ready,
    Refused,
    ReplicaHello,
    StartRank,
    StartUp,
    StartUpFailed,
    Stop,
    Submitted,
    Welcome,
)
from inflight.interface.statistics import FAULT_CAUSES, FaultStatus, SchedulerStats, StepCounts
from inflight.interface.step import (
    BlockTableDelta,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenDelta,
)
from inflight.interface.token_types import TokenTypesPart
from inflight.interface.worker import Rendezvous
from inflight.sampling_params import SamplingParams
from inflight.timeline import Event
from tests.conformance.configs import engine_config

ids = st.integers(0, 2**63 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()


def arrays(dtype: str, ndim: int = 1) -> st.SearchStrategy[Any]:
    """Most are small; some are too large for the frame's body."""
    small = hnp.arrays(dtype, hnp.array_shapes(min_dims=ndim, max_dims=ndim, min_side=0, max_side=6))
    large = st.integers(5000, 9000).map(lambda n: np.resize(np.arange(251).astype(dtype), (n,) + (2,) * (ndim - 1)))
    return st.one_of(small, small, small, large)


any_array = st.one_of(
    st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype)),
    st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, 3)),
    st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, ())),
    arrays("int64", 2).map(lambda array: array[:, ::-1].T),  # not contiguous
)
int32s, bools = arrays("int32"), arrays("bool")
failures = st.builds(
    WorkerFailure,
    type_name=texts,
    message=texts,
    traceback=texts,
    is_echo=st.booleans(),
    lost_ranks=st.lists(ids, max_size=2).map(tuple),
)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 2),
    seed=st.none() | ids,
    stop=st.lists(texts.filter(bool), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-9, 9), max_size=3),
    bad_words=st.just(["a"]) | st.none(),
    allowed_token_ids=st.none() | st.just([3, 4]),
)
samplings = st.builds(
    ResolvedSampling,
    params=params,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=ids,
    stop_token_ids=st.frozensets(st.integers(0, 99)),
    bad_words_token_ids=st.just(((1, 2), (3,))),
)
pooling_parts = st.builds(PoolingPart, pooling_type=texts, dimensions=st.none() | ids, activation=texts, num_done=ids)
parts: st.SearchStrategy[RequestPart] = st.one_of(
    st.builds(PromptLogprobsPart, num_logprobs=ids, num_done=ids), pooling_parts, st.builds(TokenTypesPart, first=ids)
)
new_requests = st.builds(
    NewRequestData,
    request_id=texts,
    slot=ids,
    token_ids=int32s,
    num_prompt_tokens=ids,
    block_ids=st.tuples(int32s, int32s),
    sampling=samplings,
    parts=st.lists(parts, max_size=2).map(tuple),
)
deltas = st.builds(BlockTableDelta, slots=int32s, columns=int32s, block_ids=int32s)
plans = st.builds(
    SchedulerOutput,
    step_id=ids,
    new_requests=st.lists(new_requests, max_size=2).map(tuple),
    request_ids=st.lists(texts, max_size=3).map(tuple),
    slots=int32s,
    num_computed_tokens=int32s,
    num_scheduled_tokens=int32s,
    samples=bools,
    block_table_deltas=st.lists(deltas, max_size=2).map(tuple),
    max_draft_tokens=int32s,
    grammar_rows=int32s,
    forced_tokens=st.none() | st.builds(TokenDelta, slots=int32s, positions=int32s, token_ids=int32s),
)
grammar_outputs = st.builds(GrammarOutput, rows=int32s, num_masks=int32s, masks=arrays("int32", 2))
columns = st.builds(LogprobsColumns, token_ids=arrays("int32", 2), logprobs=arrays("float32", 2), ranks=int32s)
part_results = st.builds(PromptLogprobsResult, start=ids, columns=columns) | st.builds(
    PoolingResult, start=ids, vectors=arrays("float32", 2)
)
outputs = st.builds(
    ModelRunnerOutput,
    step_id=ids,
    sampled_token_ids=int32s,
    num_sampled_tokens=int32s,
    sampled_positions=int32s,
    logprobs=st.none() | columns,
    logprobs_rows=int32s,
    parts=st.lists(st.tuples(ids, part_results), max_size=2).map(tuple),
    draft_token_ids=arrays("int32", 2),
)
specs = st.builds(
    KVCacheSpec,
    block_size=ids,
    num_kv_heads=ids,
    head_dim=ids,
    dtype=texts,
    itemsize=ids,
    scale_bytes=ids,
    sliding_window=st.none() | ids,
)
kv_configs = st.builds(
    KVCacheConfig,
    num_blocks=ids,
    block_bytes=ids,
    groups=st.lists(st.builds(KVCacheGroup, layer_names=st.tuples(texts), spec=specs), max_size=2).map(tuple),
)
events = st.builds(Event, step_id=ids, phase=texts, start_ns=ids, end_ns=ids)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=50)
)
keys = st.booleans() | st.integers(-9, 9) | texts | st.tuples(texts, st.integers(0, 9))
plain_data = st.recursive(
    scalars | any_array | specs | kv_configs | events | plans | outputs,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=6,
)
core_requests = st.builds(
    EngineCoreRequest,
    request_id=texts,
    sampling=samplings,
    priority=st.integers(-9, 9),
    cache_salt=texts,
    prompt_leader=st.none() | texts,
    client=texts,
    emitted_token_ids=st.lists(ids, max_size=3).map(tuple),
    num_losses=ids,
    parts=st.lists(parts, max_size=2).map(tuple),
)
core_outputs = st.builds(
    EngineCoreOutput,
    request_id=texts,
    new_token_ids=st.lists(ids, max_size=3).map(tuple),
    logprobs=st.none() | columns,
    parts=st.lists(part_results, max_size=2).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | ids,
    num_cached_tokens=ids,
    queue_seconds=st.floats(0, 99),
    error=texts,
    error_kind=st.sampled_from(ErrorKind),
    error_param=texts,
)
fault_statuses = st.builds(
    FaultStatus,
    state=st.sampled_from(["healthy", "recovering", "failed"]),
    epoch=ids,
    num_recoveries=st.dictionaries(st.sampled_from(FAULT_CAUSES), ids),
    last_cause=texts,
    last_kind=st.sampled_from(("", *FAULT_CAUSES)),
    last_recovery_seconds=st.floats(0, 99),
    num_stale_frames=ids,
    num_resumed_requests=ids,
    spare_workers=ids,
)
scheduler_stats = st.builds(
    SchedulerStats,
    step_id=st.integers(-1, 99),
    num_running=ids,
    num_waiting=ids,
    num_waiting_tokens=ids,
    kv_cache_usage=st.floats(0, 1),
    counts=st.builds(StepCounts, *[ids] * 7),
    step_gaps=st.lists(st.floats(0, 9), max_size=3).map(tuple),
    hidden_share=st.none() | st.floats(0, 1),
)
rendezvous = st.builds(
    Rendezvous,
    epoch=ids,
    timeout_seconds=st.floats(0, 99),
    token=st.binary(max_size=40),
    listen_fd=st.none() | ids,
    addresses=st.lists(st.tuples(texts, ids), max_size=2).map(tuple),
)

MIXERS: tuple[MixerSpec, ...] = (
    AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig(factors=(1.0, 2.0)), window=5),
    LatentAttentionSpec(
        num_heads=2, head_dim=6, rope=None, rank=4, query_rank=None, nope_dim=3, rope_dim=2, value_dim=5
    ),
    GatedDeltaSpec(num_key_heads=1, num_value_heads=2, key_dim=3, value_dim=4, kernel_size=4),
    ShortConvSpec(num_channels=8, kernel_size=3, bias=True),
)


_TOWER: dict[str, Any] = {
    "image_token_id": 7,
    "out_size": 8,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_size": 24,
    "merge_size": 2,
}
_SIGLIP = {**_TOWER, "patch_size": 4, "num_channels": 3, "positions_per_side": 5, "eps": 1e-6, "activation": "gelu"}
_QWEN = {**_TOWER, "patch_size": 4, "num_frames": 2, "num_channels": 3, "rope_theta": 1e4, "activation": "silu"}
TOWERS: tuple[VisionSpec, ...] = (
    Idefics3VisionSpec(**_SIGLIP),
    Gemma3VisionSpec(**_SIGLIP),
    Qwen3VisionSpec(**_QWEN, positions_per_side=5, deepstack_layers=(1, 0)),
    Qwen25VisionSpec(**_QWEN, window=3, full_layers=(1,)),
    Gemma4VisionSpec(
        **{name: value for name, value in _QWEN.items() if name not in ("num_frames", "num_channels")},
        head_dim=8,
        num_positions=9,
        eps=1e-6,
    ),
    TransformersVisionSpec(
        image_token_id=7, out_size=8, hidden_size=4, num_layers=2, num_heads=2, mlp_size=6, config_json="{}"
    ),
)


def config_with(*mixers: MixerSpec, vision: VisionSpec | None = None) -> EngineConfig:
    config = engine_config()
    experts = MoeSpec(num_experts=4, size=8, router=RouterSpec(top_k=2), shared_size=16)
    mlps = (GatedMlpSpec(size=8), experts, PlainMlpSpec(size=8))
    layers = tuple(LayerSpec(mixer=mixer, mlp=mlps[index % len(mlps)]) for index, mixer in enumerate(mixers))
    architecture = replace(config.model.architecture, layers=layers, vision=vision)
    return replace(config, model=replace(config.model, architecture=architecture))


MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    Watch: st.builds(Watch, is_wanted=st.booleans()),
    EndRequests: st.builds(EndRequests, request_ids=st.lists(texts, max_size=3).map(tuple)),
    EngineView: st.builds(
        EngineView,
        step_id=ids,
        num_ranks=ids,
        request_ids=st.lists(texts, max_size=3).map(tuple),
        requests=arrays("int32", 2),
        blocks=st.binary(max_size=6),
        phases=st.lists(texts, max_size=3).map(tuple),
        spans=arrays("int64", 2),
    ),
    ExecuteModel: st.builds(ExecuteModel, epoch=ids, scheduler_output=plans),
    ProvideGrammarOutput: st.builds(ProvideGrammarOutput, epoch=ids, step_id=ids, grammar_output=grammar_outputs),
    RpcCall: st.builds(
        RpcCall,
        epoch=ids,
        call_id=ids,
        method=texts,
        args=st.lists(plain_data, max_size=2).map(tuple),
        kwargs=st.dictionaries(texts, plain_data, max_size=2),
    ),
    StepReply: st.builds(StepReply, epoch=ids, step_id=ids, rank=ids, output=outputs)
    | st.builds(StepReply, epoch=ids, step_id=ids, rank=ids, failure=failures),
    RpcReply: st.builds(RpcReply, epoch=ids, call_id=ids, rank=ids, value=plain_data, failure=st.none() | failures),
    AskActivity: st.builds(AskActivity),
    WorkerActivity: st.builds(WorkerActivity, rank=ids, text=texts, is_waiting=st.booleans()),
    Hello: st.builds(Hello, schema=texts, rank=ids, world_size=ids, nnodes=ids),
    ReplicaHello: st.builds(
        ReplicaHello,
        schema=texts,
        rank=ids,
        linked=st.lists(ids, max_size=3).map(tuple),
        terms=st.dictionaries(texts, texts, max_size=3),
    ),
    Welcome: st.builds(Welcome, max_silence_seconds=st.floats(allow_nan=False)),
    Refused: st.builds(Refused, reason=texts),
    StartUp: st.builds(
        StartUp,
        config=st.just(engine_config(tensor_parallel_size=2)),
        place=st.sampled_from(places_on([0, 1, 0])),
        title=texts,
        worker_class=texts,
        epoch=ids,
        host=texts,
    ),
    Preload: st.builds(Preload, worker_class=texts),
    BeginEpoch: st.builds(BeginEpoch, epoch=ids),
    Listening: st.builds(Listening, rank=ids, epoch=ids, address=st.tuples(texts, ids), num_dropped=ids),
    JoinEpoch: st.builds(JoinEpoch, epoch=ids, rendezvous=st.none() | rendezvous),
    Ready: st.builds(Ready, rank=ids, epoch=ids),
    StartUpFailed: st.builds(StartUpFailed, rank=ids, failure=failures, epoch=ids),
    Stop: st.builds(Stop),
    PlaceRanks: st.builds(
        PlaceRanks, num_ranks=ids, num_cpus=ids, num_gpus=ids, cluster=texts, group=texts, max_seconds=st.just(1.5)
    ),
    RanksPlaced: st.builds(RanksPlaced, machines=st.lists(texts, max_size=3).map(tuple), machine=texts, host=texts),
    StartRank: st.builds(
        StartRank, rank=ids, world_size=ids, title=texts, local_name=texts, host=texts, port=ids, token=texts
    ),
    Submitted: st.builds(Submitted, name=st.text(), digest=st.text()),
    StartEngine: st.builds(
        StartEngine,
        config=st.sampled_from([config_with(*MIXERS), *(config_with(*MIXERS, vision=tower) for tower in TOWERS)]),
        tokenizer=st.none() | texts,
        skip_tokenizer_init=st.booleans(),
        is_spare=st.booleans(),
    ),
    FaultStatus: fault_statuses,
    EngineReady: st.builds(EngineReady, front_end=ids, num_kv_cache_tokens=ids),
    EngineStartFailed: st.builds(EngineStartFailed, failure=failures),
    AddRequest: st.builds(AddRequest, sequences=st.lists(core_requests, max_size=2).map(tuple)),
    AbortRequests: st.builds(AbortRequests, request_ids=st.lists(texts, max_size=3).map(tuple)),
    ResetPrefixCache: st.builds(ResetPrefixCache, call_id=ids),
    EndDamagedEngine: st.builds(EndDamagedEngine, reason=st.text()),
    PrefixCacheReset: st.builds(PrefixCacheReset, call_id=ids),
    EngineOutputs: st.builds(
        EngineOutputs,
        outputs=st.lists(core_outputs, max_size=3).map(tuple),
        num_received=ids,
        stats=st.none() | scheduler_stats,
    ),
    CachedBlocks: st.builds(
        CachedBlocks,
        stored=st.binary(max_size=64),
        removed=st.binary(max_size=64),
        kinds=st.lists(ids, max_size=3).map(tuple),
    ),
    EngineDied: st.builds(EngineDied, reason=texts, summary=texts),
}


@st.composite
def messages(draw: st.DrawFn) -> Any:
    return draw(MESSAGES[draw(st.sampled_from(list(MESSAGES)))])


def same(a: object, b: object) -> bool:
    """Equal, of the same types, and arrays of the same dtype, shape and bytes (so a NaN equals itself)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    if isinstance(a, list | tuple):
        assert isinstance(b, list | tuple)
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return same(list(a.items()), list(b.items()))
    return a == b
