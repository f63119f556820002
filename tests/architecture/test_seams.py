"""A capability is plugged in from outside. Made-up parts are registered here without a change of inflight/, and run once each:
layers, request parts, a tier, an executor, a tool parser, a type of GGUF tensors, an API. How to add a real one:
docs/extending.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from inflight import LLM, SamplingParams
from inflight.config import parse_architecture
from inflight.config.architecture import LayerSpec, MlpSpec, ModelArchitecture
from inflight.config.engine_args import EngineArgs
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.gguf_types import GgufType, gguf_types
from inflight.config.mixers import MIXER_KINDS, MixerSpec, RecurrenceSpec
from inflight.config.mlp_kinds import MLP_KINDS
from inflight.engine.request.answer_parts import ANSWER_PARTS
from inflight.entrypoints.apis import APIS
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from inflight.interface.codec import schema_digest
from inflight.interface.part_kinds import PART_KINDS, PARTS_OF_PARAMETERS, RESULT_KINDS
from inflight.interface.statistics import TransferCounts
from inflight.layers.context import LayerContext
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mixer import MixerPlace
from inflight.layers.recurrent_mixer import RecurrentMixer
from inflight.layers.recurrent_state import RecurrentState
from inflight.layers.sharding import even_shard
from inflight.layers.weights import Loadable
from inflight.model_loader.gguf_blocks import FLOATS, UNPACKERS
from inflight.models.layer_kinds import MIXERS, MLPS
from inflight.outputs import RequestOutput
from inflight.parsers.selector import TOOL_PARSERS
from inflight.scheduler.kv_transfers import KVTransfers
from inflight.worker.parts.row_parts import READERS
from tests.architecture import made_up_api
from tests.architecture.made_up_parts import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    HERE,
    TYPE_NAME,
    TYPE_NUMBER,
    AtToolParser,
    LoneExecutor,
    ShelfTier,
    draw_last,
    unpack_last,
)
from tests.architecture.made_up_pooling import LAST, MAX_STEP_TOKENS, MEAN, READ, Pooling, largest_difference, register
from tests.support.gguf_files import QUANTIZED
from tests.support.gguf_models import write_pair
from tests.support.waits import wait_until
from tests.unit.entrypoints.api_client import MAX_MODEL_LEN, SETTINGS, serving

PROMPTS = [list(range(3, 40)), [5, 9, 11]]
CONFIG = {
    "architectures": ["MadeUpForCausalLM"],
    "model_type": "made_up",
    "vocab_size": 203,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True, kw_only=True)
class DecaySpec(RecurrenceSpec):
    """A mixer: each channel is a mean of the channel's past, in which older tokens weigh less."""

    kind: Literal["decay"] = "decay"
    kernel_size: int = 1
    num_channels: int
    rate: float

    @property
    def num_features(self) -> int:
        return 2 * self.num_channels

    def state_bytes(self, itemsize: int, tp_size: int) -> int:
        return 4 * self.num_channels // tp_size

    def fits(self, tp_size: int) -> bool:
        return self.num_channels % tp_size == 0

    def __str__(self) -> str:
        return f"{self.num_channels} channels that decay"


class Decay(RecurrentMixer):
    name = "decay"
    kernel = None

    def __init__(self, spec: DecaySpec, place: MixerPlace) -> None:
        super().__init__()
        context, hidden_size = place.context, place.architecture.hidden_size
        part = even_shard(spec.num_channels, context.tp)
        self.in_proj = ColumnParallelLinear(hidden_size, {"in_proj": part}, bias=False, context=context)
        self.out_proj = RowParallelLinear(spec.num_channels, hidden_size, bias=False, context=context)
        self.state = RecurrentState(
            f"model.layers.{place.layer}.decay", [(part.size,)], [torch.float32], context.backend
        )
        self.rate, self.ops = spec.rate, context.ops

    def compute_piece(self, rows: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        (mean,) = state
        means = []
        for row in rows.float():
            mean = self.rate * mean + (1 - self.rate) * row
            means.append(mean)
        return torch.stack(means).to(rows.dtype), mean


@dataclass(frozen=True, kw_only=True)
class SquaredMlpSpec(MlpSpec):
    """An MLP without a gate: down(max(up(x), 0) ** 2)."""

    reads = ("num_experts",)

    kind: Literal["squared"] = "squared"
    size: int

    @property
    def num_features(self) -> int:
        return 2 * self.size

    def fits(self, tp_size: int) -> bool:
        return self.size % tp_size == 0

    def __str__(self) -> str:
        return f"{self.size} squared numbers"


class SquaredMlp(Loadable):
    def __init__(self, hidden_size: int, spec: SquaredMlpSpec, context: LayerContext) -> None:
        super().__init__()
        part = even_shard(spec.size, context.tp)
        self.up_proj = ColumnParallelLinear(hidden_size, {"up_proj": part}, bias=False, context=context)
        self.down_proj = RowParallelLinear(spec.size, hidden_size, bias=False, context=context)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(torch.relu(self.up_proj(hidden)).square())
        return out


def parse_plain(fields: FamilyFields) -> ModelArchitecture:
    """Nothing is made up."""
    layer = LayerSpec(mixer=fields.attention(), mlp=fields.mlp())
    return fields.architecture((layer,) * fields.num_layers)


def parse_decay(fields: FamilyFields) -> ModelArchitecture:
    mixer = DecaySpec(num_channels=16, rate=0.75)
    attention = LayerSpec(mixer=fields.attention(), mlp=fields.mlp())
    return fields.architecture((LayerSpec(mixer=mixer, mlp=fields.mlp()), attention, attention))


def parse_squared(fields: FamilyFields) -> ModelArchitecture:
    layer = LayerSpec(mixer=fields.attention(), mlp=SquaredMlpSpec(size=fields.integer("intermediate_size")))
    return fields.architecture((layer,) * fields.num_layers)


@contextmanager
def made_up_model(folder: Path, monkeypatch: pytest.MonkeyPatch, parse: Any, **options: Any) -> Iterator[LLM]:
    family = Family(architecture="MadeUpForCausalLM", model_type="made_up", parse=parse)
    monkeypatch.setitem(parse_architecture.BY_ARCHITECTURE, family.architecture, family)
    (folder / "config.json").write_text(json.dumps(CONFIG | options.pop("config", {})))
    given = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "kv_cache_memory_bytes": 2**22}
    with LLM(model=str(folder), **given, **options) as llm:
        yield llm


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_a_made_up_mixer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a prompt and steps of one token give the tokens of the whole prompt: the state is kept where it belongs."""
    monkeypatch.setitem(MIXER_KINDS, "decay", DecaySpec)
    spec: type[MixerSpec] = DecaySpec
    monkeypatch.setitem(MIXERS, spec, Decay)
    with made_up_model(tmp_path, monkeypatch, parse_decay) as llm:
        whole = tokens(llm)
    with made_up_model(tmp_path, monkeypatch, parse_decay, max_num_batched_tokens=7, max_num_seqs=4) as llm:
        assert tokens(llm) == whole
    with made_up_model(tmp_path, monkeypatch, parse_plain) as llm:
        assert tokens(llm) != whole


def test_a_made_up_mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a field that is refused where no layer reads it."""
    monkeypatch.setitem(MLP_KINDS, "squared", SquaredMlpSpec)
    spec: type[MlpSpec] = SquaredMlpSpec
    monkeypatch.setitem(MLPS, spec, SquaredMlp)
    experts = {"num_experts": 4}
    with made_up_model(tmp_path, monkeypatch, parse_squared, config=experts) as llm:
        found = tokens(llm)
        assert all(len(each) == 6 for each in found)
    with made_up_model(tmp_path, monkeypatch, parse_plain) as llm:
        assert tokens(llm) != found
    with (
        pytest.raises(UnsupportedModelError, match="num_experts"),
        made_up_model(tmp_path, monkeypatch, parse_plain, config=experts),
    ):
        pass


TEXT = "The quick brown fox jumps over the lazy dog and tells Anna a story about the forest in the morning."
CHATS = ["Once upon a time", "Tell me a story"]


def pooled(kind: str | None, *, num_pooled: int = 1, **arguments: Any) -> tuple[list[Any], list[list[int]]]:
    """The pooled values of prompts (with a `kind`), and the tokens of two chats beside them."""
    args = EngineArgs(dtype="float32", num_threads=1, max_num_seqs=6, kv_cache_memory_bytes=2**24, **arguments)
    engine = LLMEngine.from_args(args)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for number, chat in enumerate(CHATS):
        engine.add_request(f"chat{number}", chat, greedy)
    for number in range(num_pooled if kind is not None else 0):
        engine.add_request(f"pool{number}", TEXT, SamplingParams(max_tokens=1), parts=[Pooling(pooling_type=str(kind))])
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
    engine.close()
    values = [output.parts["made_up_pooling"] for name, output in found.items() if name.startswith("pool")]
    return values, [found[f"chat{number}"].outputs[0].token_ids for number in range(len(CHATS))]


@pytest.mark.parametrize("kind", [LAST, MEAN])
def test_a_made_up_request_part(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, the prefix cache, pipeline stages and drafts change no result, and chats in the same batch do not notice."""
    register(monkeypatch)
    ((whole,), chats) = pooled(kind, max_num_batched_tokens=2048)
    assert pooled(None)[1] == chats and whole.std() > 0
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    for arguments in (
        {"max_num_batched_tokens": 8},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "uni", "max_num_batched_tokens": 16},
        drafts,
    ):
        values, beside = pooled(kind, num_pooled=2, **arguments)
        assert beside == chats, arguments
        assert len(values) == 2
        assert all(largest_difference(each, whole) < 1e-4 for each in values), arguments
    assert 0 < max(READ) <= MAX_STEP_TOKENS, "a step costs no more than the kind allows"
    assert sum(READ) >= 7 * len(TEXT.split())


def test_a_request_part_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="Pooling"):
        pooled(LAST)
    before = schema_digest()
    register(monkeypatch)
    assert schema_digest() != before, "ranks and front ends with other kinds refuse each other when they connect"


def test_the_tables_of_request_parts_agree() -> None:
    assert READERS.keys() == PART_KINDS.keys()
    assert RESULT_KINDS.keys() <= PART_KINDS.keys() and ANSWER_PARTS.keys() <= RESULT_KINDS.keys()
    assert all(name in SamplingParams.__dataclass_fields__ for name in PARTS_OF_PARAMETERS)


PLAIN = {"dtype": "float32", "num_threads": 1, "kv_cache_memory_bytes": 2**24, "block_size": 16}
STORY = "The quick brown fox jumps over the lazy dog and tells Anna a story. " * 3


def story(**arguments: Any) -> tuple[list[int], TransferCounts | None]:
    """The tokens after STORY, and what the transfers of blocks have done."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(**{**PLAIN, **arguments}) as llm:
        ((output,), core) = llm.generate([STORY], params, use_tqdm=False), llm.llm_engine.core

        def is_idle() -> bool:
            core.scheduler.transfers.settle()
            return not core.scheduler.transfers.is_running

        wait_until(is_idle)
        return output.outputs[0].token_ids, core.scheduler.transfers.take_counts()


def test_a_made_up_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one engine has stored, another one finds."""
    monkeypatch.setattr(
        KVTransfers, "_seconds_to_wait", lambda transfers, num_tokens: 1e6
    )  # however slow the machine is
    tier = {"type": "custom", "module_path": f"{HERE}:ShelfTier", "options": {"shelf": "story"}}
    config = {"kv_connector_extra_config": {"cpu_bytes_to_use": 2e7, "secondary_tiers": [tier]}}
    truth, _ = story()
    first, _ = story(kv_transfer_config=config)
    second, counts = story(kv_transfer_config=config)
    assert first == second == truth
    assert ShelfTier.shelves["story"] and counts is not None and counts.num_fetched_blocks > 0


def test_a_made_up_executor() -> None:
    truth, _ = story()
    before = LoneExecutor.num_commands
    found, _ = story(distributed_executor_backend=f"{HERE}:LoneExecutor")
    assert found == truth and LoneExecutor.num_commands > before + 6


def test_a_made_up_tool_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server reads calls with it, in a whole answer and in a stream."""
    monkeypatch.setitem(TOOL_PARSERS, "at", AtToolParser)
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    asked = {"messages": [{"role": "user", "content": "Hello"}], "tools": [tool], "max_tokens": 100}
    wanted = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    with serving(replace(SETTINGS, tool_call_parser="at")) as api:
        api.core.texts = ('@call get_weather {"city": "Oslo"}',)
        (choice,) = api.post("/v1/chat/completions", asked).json["choices"]
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [wanted]
        assert choice["finish_reason"] == "tool_calls"
        events = api.post("/v1/chat/completions", asked | {"stream": True}).events
    deltas = [call["function"] for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert {key: "".join(delta.get(key, "") for delta in deltas) for key in wanted} == wanted


def test_a_made_up_type_of_gguf_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in this type has the weights that were written, and generates."""
    monkeypatch.setitem(gguf_types(), TYPE_NUMBER, GgufType(TYPE_NAME, BLOCK_SIZE, BLOCK_BYTES))
    monkeypatch.setitem(UNPACKERS, TYPE_NAME, unpack_last)
    monkeypatch.setitem(QUANTIZED, TYPE_NAME, (TYPE_NUMBER, BLOCK_SIZE, draw_last))
    plain, file = write_pair(tmp_path, "qwen3", {"ffn_up": TYPE_NAME, "ffn_down": TYPE_NAME})
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")  # they quantize activations, too
    given: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "kv_cache_memory_bytes": 2**22}
    found = []
    for path in (plain, file):
        with LLM(model=str(path), **given) as llm:
            found.append(tokens(llm))
    assert found[0] == found[1]
    monkeypatch.delitem(gguf_types(), TYPE_NUMBER)
    with pytest.raises(CheckpointError, match=f"type {TYPE_NUMBER}"):
        LLM(model=str(file), **given)


def test_the_tables_of_gguf_types_agree() -> None:
    types = {each.name: each for each in gguf_types().values()}
    assert types.keys() >= UNPACKERS.keys() | FLOATS.keys()
    assert {name for name, each in types.items() if not each.is_quantized} == FLOATS.keys()


def test_a_made_up_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors have its form and its names: those of wrong bodies, of paths, of the engine. Other APIs do not notice."""
    monkeypatch.setitem(APIS, "made up", made_up_api.API)
    path = "/made-up/say"
    with serving(replace(SETTINGS, ui=False)) as api:
        answer = api.post(path, {"say": "x", "most": 9, "temperature": 0, "stop": ["!"], "colour": "red"})
        assert (answer.json, answer.headers["x-ignored-fields"]) == ({"said": "Hi"}, "colour")
        assert [*map(api.core.sequences[-1].sampling.params.__getattribute__, ("temperature", "max_tokens"))] == [
            0.0,
            9,
        ]
        live = api.post(path, {"say": "x", "live": True})
        assert "".join(line.get("said", "") for line in live.lines) == "Hi!" and live.lines[-1] == {"over": True}
        for body, field in (
            ({"say": "x", "most": 0}, "most"),
            ({"say": "x" * MAX_MODEL_LEN}, "say"),
            ({"say": "x", "most": 2, "min_tokens": 3}, "min_tokens"),
            ({"say": "x", "structured_outputs": {}}, "structured_outputs"),
        ):
            answer = api.post(path, body)
            assert (answer.status, answer.json["at"]) == (400, field)
        assert "use /made-up/say" in api.post("/made-up/sing", {}).json["oops"]
        assert path in api.get("/openapi.json").json["paths"]
        assert api.post("/v1/completions", {}).error["param"] == "prompt"
        page = api.get("/", {"accept": "text/html"}).text
        assert "<th>Made up</th>" in page and "http://localhost/made-up" in page
    monkeypatch.undo()
    with serving() as api:
        assert api.post(path, {"say": "x"}).error["code"] == "not_found"
