"""A tape computes the same bits as the layers one by one, and is dropped when what it holds changes. Ranks are threads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.attention.cpu_paged import CpuPagedBackend
from inflight.attention.metadata import AttentionInputs
from inflight.attention.selector import get_backend
from inflight.config.engine import ModelConfig
from inflight.config.parse_architecture import parse_architecture
from inflight.config.ranks import RankLayout
from inflight.distributed.exchange import Exchange
from inflight.distributed.shared_collectives import SharedCollectives, share_memory
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.distributed.thread_world import ThreadWorlds
from inflight.errors import LostPeerError
from inflight.kernels.cpu.library import load_kernels
from inflight.kernels.cpu.tape import Recorder, Tape
from inflight.layers.attention import Attention
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import ModelStep
from inflight.models.decoder import DecoderForCausalLM
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE, ONE_SET_OR_ALL
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model
from tests.unit.distributed.test_collectives import exchanges

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")

NUM_SEQUENCES, BLOCK_SIZE, BLOCKS_EACH = 32, 16, 4
LAST, ALL = "last", "all"  # which tokens' hidden states a step returns
# tokens of sequence 0, 1, ...; prompts, single tokens, both in one batch, as many as the first recording had and more
STEPS: list[tuple[tuple[int, ...], str]] = [
    ((5,), LAST), ((1,), LAST), ((7, 30), LAST), ((1, 1), ALL), ((1, 1, 12, 1), LAST),
    ((1,) * 8, LAST), ((1,), LAST), ((1,) * 32, LAST), ((2, 0, 9), ALL), ((3,), "none"), ((1,), ALL),
]  # fmt: skip


@pytest.fixture(params=ONE_SET_OR_ALL, autouse=True)
def _instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", request.param)


class Session:
    """A model with empty KV caches. Each session has the same weights."""

    def __init__(self, folder: Path, tp: TensorParallelGroup | None = None, *, is_taped: bool, dtype: str = "bfloat16"):
        architecture = parse_architecture(json.loads((folder / "config.json").read_text()))
        config = ModelConfig(
            folder=folder, name="x", architecture=architecture, dtype=dtype, max_model_len=64, load_format="safetensors",
            seed=5, fingerprint="",
        )  # fmt: skip
        self.dtype = getattr(torch, dtype)
        self.backend = get_backend("cpu", architecture.head_dims, BLOCK_SIZE, self.dtype, self.dtype)
        assert isinstance(self.backend, CpuPagedBackend), (
            f"the kernels do not support heads of {architecture.head_dims}"
        )
        model = load_model(config, device=torch.device("cpu"), backend=self.backend, tp=tp or TensorParallelGroup())
        assert isinstance(model, DecoderForCausalLM)
        self.model = model
        if not is_taped:
            vars(model)["taped"] = lambda compute, *_: compute()
        self.layers = list(model.cached_layers().values())
        self.clear()

    def rewind(self) -> None:
        """All sequences begin again, in the same KV caches."""
        self.computed = np.zeros(NUM_SEQUENCES, dtype=np.int32)
        self.random = torch.Generator().manual_seed(1)

    def clear(self) -> None:
        """New KV caches."""
        self.rewind()
        self.specs = [layer.kv_cache_spec(BLOCK_SIZE, self.dtype) for layer in self.layers]
        for layer, spec in zip(self.layers, self.specs, strict=True):
            arena = torch.zeros(NUM_SEQUENCES * BLOCKS_EACH, spec.block_bytes, dtype=torch.uint8)
            layer.bind(self.backend.layer_cache(arena, spec, 0), spec.sliding_window is not None)

    @torch.inference_mode()
    def step(self, tokens: tuple[int, ...], wanted: str) -> Tensor:
        sequences = [index for index, count in enumerate(tokens) if count]
        counts = np.array([tokens[index] for index in sequences], dtype=np.int32)
        starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
        assert (self.computed[sequences] + counts).max(initial=0) <= BLOCKS_EACH * BLOCK_SIZE, (
            "no room for the sequence"
        )
        before = self.computed[sequences]
        inputs = AttentionInputs(
            query_start_loc=starts,
            seq_lens=before + counts,
            num_computed_tokens=before,
            block_table=np.arange(NUM_SEQUENCES * BLOCKS_EACH, dtype=np.int32).reshape(-1, BLOCKS_EACH)[sequences],
        )
        spec_of = {spec.sliding_window is not None: spec for spec in self.specs}
        groups = [spec_of.get(has_window, self.specs[0]) for has_window in (False, True)]
        self.computed[sequences] += counts
        positions = np.concatenate([np.arange(a, a + n) for a, n in zip(before, counts, strict=True)])
        ids = torch.randint(0, VOCAB_SIZE, (int(starts[-1]),), generator=self.random)
        rows = {ALL: None, LAST: torch.from_numpy(starts[1:] - 1).long(), "none": torch.empty(0, dtype=torch.int64)}
        metadata = tuple(self.backend.metadata_builder(spec)(inputs) for spec in groups)
        hidden = self.model(ModelStep(ids, torch.from_numpy(positions), metadata, rows[wanted]))
        assert isinstance(hidden, Tensor)
        return hidden.clone()

    def run(self) -> list[Tensor]:
        return [self.step(*step) for step in STEPS]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done: "record", the reason of a refusal, or "replay"."""
    done: list[str] = []
    finish, replay = Recorder.finish, Tape.replay

    def counted_finish(self: Recorder, *arguments: Any) -> Any:
        tape = finish(self, *arguments)
        done.append(self.refusal or "record")
        return tape

    def counted_replay(self: Tape, *arguments: Any) -> Any:
        done.append("replay")
        return replay(self, *arguments)

    monkeypatch.setattr(Recorder, "finish", counted_finish)
    monkeypatch.setattr(Tape, "replay", counted_replay)
    return done


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), f"step {STEPS[index]}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("family", "index", "params"),
    [
        ("llama", 6, {}),
        ("mistral", 1, {}),
        ("qwen2", 3, {}),  # two KV groups
        ("qwen3", 4, {"soft_cap": 3.0}),
        ("qwen3", 1, {"sinks": torch.tensor([2.0, -1.0, 0.5, 3.0])}),
        ("qwen3_5", 0, {}),  # recurrent layers
        ("lfm2", 1, {}),
        ("qwen3_5_moe", 0, {}),  # experts behind recurrent layers
        ("lfm2_moe", 0, {}),
        ("deepseek_v2", 0, {}),  # latent attention
        ("deepseek_v2", 1, {}),  # queries from a latent vector
        ("deepseek_v3", 2, {}),  # groups of experts
        ("ministral3", 0, {}),  # scaled queries
        ("phimoe", 0, {}),  # LayerNorms
        ("hunyuan_v1_moe", 0, {}),  # norms after the rotation
        ("gemma4", 3, {}),  # experts beside the MLP
        ("gemma4", 0, {}),  # layers that read the cache of others, and vectors of the tokens
        ("olmo2", 0, {}),  # norms of all heads together, and none before the MLP
    ],
)
def test_batches_of_every_kind(
    family: str, index: int, params: dict[str, Any], dtype: str, tmp_path: Path, calls: list[str]
) -> None:
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path / "model", seed=1)
    results = []
    for is_taped in (True, False):
        session = Session(folder, is_taped=is_taped, dtype=dtype)
        for layer in session.layers:
            if isinstance(layer, Attention):
                layer.params = replace(layer.params, **params)
        results.append(session.run())
    assert calls == ["record", *["replay"] * 2, "record", *["replay"] * 7]
    assert_same(*results)


def test_a_recording_of_one_token_is_a_tape_for_many(tmp_path: Path, calls: list[str]) -> None:
    folder = write_model(FAMILY_CONFIGS["qwen3"][1], tmp_path / "model", seed=1)
    sessions = [Session(folder, is_taped=is_taped) for is_taped in (True, False)]
    for step in [((1,), LAST), ((33, 20), LAST), ((1,) * 32, LAST)]:
        found, wanted = (session.step(*step) for session in sessions)
        assert torch.equal(found, wanted)
    assert calls == ["record", "replay", "replay"]


def test_a_step_that_draws_no_token_is_no_recording(tmp_path: Path, calls: list[str]) -> None:
    """Such as the first part of a long prompt. The next step is recorded."""
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=1)
    sessions = [Session(folder, is_taped=is_taped) for is_taped in (True, False)]
    for step in [((5,), "none"), ((3,), LAST), ((1,), LAST)]:
        found, wanted = (session.step(*step) for session in sessions)
        assert torch.equal(found, wanted)
    assert calls == ["record", "replay"]


def test_inputs_with_gaps_between_rows_are_not_recorded(tmp_path: Path, calls: list[str]) -> None:
    session = Session(write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=1), is_taped=True)
    results = torch.ones(3, 4), torch.zeros(3, 4)
    assert session.model.taped(lambda: results, [torch.ones(3, 8)[:, ::2]], None, ()) is results
    assert not calls


def test_new_kv_caches_drop_the_tapes(tmp_path: Path, calls: list[str]) -> None:
    session = Session(write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=1), is_taped=True)
    first = session.run()
    session.clear()
    calls.clear()
    assert_same(session.run(), first)
    assert calls.count("record") == 2


# -- several ranks -------------------------------------------------------------------------------------------------

Connect = Callable[[], list[SharedCollectives]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[SharedCollectives] = []

    def connect() -> list[SharedCollectives]:
        connected = exchanges(2)

        def share(exchange: Exchange) -> SharedCollectives:
            shared = share_memory(exchange, load_kernels())
            assert shared is not None
            return shared

        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(share, connected))
        made.extend(both)
        for exchange in connected:
            exchange.close()
        return both

    yield connect
    for each in made:
        each.close()


def two(folder: Path, collectives: list[SharedCollectives], *, is_taped: bool) -> list[Session]:
    groups = [TensorParallelGroup(2, rank, each) for rank, each in enumerate(collectives)]
    return [Session(folder, group, is_taped=is_taped) for group in groups]


def run_both(sessions: list[Session]) -> list[Tensor]:
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(Session.run, sessions)
    assert_same(first, second)
    return first


def test_ranks_that_share_memory(tmp_path: Path, connect: Connect, calls: list[str]) -> None:
    folder = write_model(FAMILY_CONFIGS["qwen2"][2], tmp_path / "model", seed=1)
    plain = run_both(two(folder, connect(), is_taped=False))
    sessions = two(folder, connect(), is_taped=True)
    assert_same(run_both(sessions), plain)
    assert calls.count("record") == 4 and calls.count("replay") == 18
    calls.clear()
    for session, each in zip(sessions, connect(), strict=True):  # as in a new epoch
        session.model.taped._group.connect(each)
        session.clear()
    assert_same(run_both(sessions), plain)
    assert calls.count("record") == 4


def test_new_collectives_drop_the_tapes(tmp_path: Path, connect: Connect, calls: list[str]) -> None:
    """The KV caches stay, as in the new epoch of ranks that were not lost."""
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=1)
    plain, taped = (two(folder, connect(), is_taped=is_taped) for is_taped in (False, True))
    for sessions in (plain, taped):
        run_both(sessions)
    first = calls.count("record")
    for session, each in zip(taped, connect(), strict=True):
        session.model.taped._group.connect(each)
    for session in (*plain, *taped):
        session.rewind()
    assert_same(run_both(taped), run_both(plain))
    assert calls.count("record") == 2 * first > 0


@pytest.mark.parametrize("is_taped", [False, True])
@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_during_a_step(
    is_taped: bool, leaver: int, tmp_path: Path, connect: Connect, calls: list[str]
) -> None:
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=1)
    collectives = connect()
    sessions = two(folder, collectives, is_taped=is_taped)
    run_both(sessions)
    calls.clear()
    # rank 0 waits in a layer, not in the embedding
    vars(sessions[0].model.embed_tokens)["forward"] = lambda ids: torch.zeros(len(ids), 64, dtype=torch.bfloat16)
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(sessions[0].step, (1,), LAST)
        end = time.monotonic() + 300
        while not collectives[0].is_waiting and time.monotonic() < end:
            time.sleep(0.001)
        collectives[leaver].close()
        with pytest.raises(ConnectionError) as raised:
            step.result(300)
    text = "this rank has stopped its communication" if leaver == 0 else "rank 1 has left the group"
    assert isinstance(raised.value, LostPeerError) == (leaver == 1)
    assert str(raised.value) == text
    assert calls == (["replay"] if is_taped else [])


def test_collectives_that_cannot_be_recorded(tmp_path: Path, calls: list[str]) -> None:
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=1)
    worlds = ThreadWorlds(RankLayout(2, 1), timeout_seconds=60)
    run_both([Session(folder, worlds.of(rank).tensor_parallel_group("model"), is_taped=True) for rank in range(2)])
    assert not calls
