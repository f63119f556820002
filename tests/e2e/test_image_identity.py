"""Prompts with images: the tokens of transformers, whatever else runs, and however their computation is divided.

Each engine gets the same requests: with one image or two, the same image or another one behind the same text, several
sequences, and requests without images beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from inflight import SamplingParams
from inflight.config.engine_args import EngineArgs
from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.config.vision import Gemma4VisionSpec, Grid, VisionSpec
from inflight.config.whole_prompts import keeps_images_whole
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.errors import ConfigError
from inflight.models.vision import division
from tests.support.image_chats import Chat, make_chat, reference_inputs
from tests.support.vision_models import VISION_CONFIGS, draw_image, load, reference_model, write_vision_model

# name -> the family, which of its configurations, and the largest grid of its images
FAMILIES: dict[str, tuple[str, int, Grid]] = {
    "smolvlm": ("smolvlm", 0, (1, 6, 6)),
    "qwen3_vl": ("qwen3_vl", 0, (1, 6, 4)),
    "qwen3_vl without deepstack": ("qwen3_vl", 1, (1, 3, 2)),
    "qwen3_vl_moe": ("qwen3_vl_moe", 0, (1, 6, 4)),
    "qwen2_5_vl": ("qwen2_5_vl", 0, (1, 4, 8)),
    "qwen3_5": ("qwen3_5", 0, (1, 6, 4)),
    "gemma3": ("gemma3", 0, (1, 9, 9)),
    "gemma4": ("gemma4", 0, (1, 6, 6)),
}
# for less than the requests of one step, but more than the longest one. The states of recurrent layers need more.
CACHE_BYTES = {"qwen3_5": 300_000, "gemma4": 90_000}
SEEDS = {"gemma3": 2}  # of weights with which one pixel gives other tokens
MAX_TOKENS = 10
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"enable_prefix_caching": False},
    "prefix cache": {},
    "an image takes many steps": {"max_num_batched_tokens": 8, "block_size": 4},
    "chunks off": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    "one step at a time": {"async_scheduling": False},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "preemption": {"kv_cache_memory_bytes": 48_000, "max_model_len": 64, "block_size": 4},
    "two tensor-parallel ranks": {"tensor_parallel_size": 2},
    "two ranks divide an image": {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
    "two stages": {"pipeline_parallel_size": 2},
    "limited time": {"target_inter_token_latency": 1.0},
}
# for families whose images are computed in one step: they have 9 tokens, and 4 other sequences have a token each
WITH_WHOLE_IMAGES = {"an image takes many steps": {"max_num_batched_tokens": 13, "block_size": 4}}


class Model(NamedTuple):
    folder: Path
    spec: VisionSpec
    chats: list[Chat]
    expected: list[list[int]]
    cache_bytes: int | None
    keeps_images_whole: bool


def reference_tokens(model: Any, chat: Chat) -> list[int]:  # Any: each family has a class of its own
    with torch.inference_mode():
        found = model.generate(
            **reference_inputs(model, chat.tokens, chat.images),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = found[0, len(chat.tokens) :].tolist()
    return tokens


def tokens_of_whole_forwards(model: Any, chat: Chat) -> list[int]:  # Any: as above
    """Computes all tokens again for each new one: behind a prompt that ends with an image, `generate` of transformers counts
    the tokens of Qwen's models as parts of the image."""
    tokens: list[int] = []
    with torch.inference_mode():
        for _ in range(MAX_TOKENS):
            inputs = reference_inputs(model, [*chat.tokens, *tokens], chat.images)
            tokens.append(int(model(**inputs, use_cache=False).logits[0, -1].argmax()))
    return tokens


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, number, grid = FAMILIES[request.param]
    folder = write_vision_model(
        VISION_CONFIGS[family][number], tmp_path_factory.mktemp("model") / "m", seed=SEEDS.get(family, 1)
    )
    tower = load(folder).tower
    assert tower is not None
    size = tower.spec.merge_size
    small = (1, size, 2 * size) if len(draw_image(tower.spec, (1, size, size), 0).shape) == 2 else grid
    pieces: list[list[int | tuple[int, Grid]]] = [
        [5, 6, 7, (1, grid), 8, 9],
        [5, 6, 7, (2, grid), 8, 9],
        [5, 6, 7, (-1, grid), 8, 9],  # one pixel differs
        [5, 6, 7, (1, grid), 8, 9, 10, 11, (2, small), 12],
        [5, 6, 7, (1, grid), 8, 9, 10, 11, (3, small), 12],
        [5, 6, 7, 8, 9],
        [(2, small), 4, (2, grid), 5],
        [5, 6, 7, (1, grid), 8, 9],
        [5, 6, 7, (1, grid)],
    ]
    chats = [make_chat(each, tower.spec) for each in pieces]
    truth = reference_model(folder)
    *others, last = chats
    expected = [*(reference_tokens(truth, chat) for chat in others), tokens_of_whole_forwards(truth, last)]
    is_whole = keeps_images_whole(parse_architecture(read_model_config(folder)))
    return Model(folder, tower.spec, chats, expected, CACHE_BYTES.get(family), is_whole)


def answers(model: Model, n: int = 1, **settings: Any) -> list[list[list[int]]]:
    """The tokens of all sequences of each chat."""
    args = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 5, **settings}
    if "kv_cache_memory_bytes" in settings and model.cache_bytes is not None:
        args["kv_cache_memory_bytes"] = model.cache_bytes
    engine = LLMEngine.from_args(EngineArgs(model=str(model.folder), skip_tokenizer_init=True, **args))
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, n=n)
    found: dict[str, list[list[int]]] = {}
    try:
        for number, chat in enumerate(model.chats):
            parts = (chat.part(model.spec),) if chat.images else ()
            engine.add_request(str(number), {"prompt_token_ids": chat.tokens}, params, parts=parts)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = [list(each.token_ids) for each in output.outputs]
        if "kv_cache_memory_bytes" in settings:
            assert engine.core.scheduler.stats.num_preemptions, "the KV cache is too large for this test"
    finally:
        engine.close()
    return [found[str(number)] for number in range(len(model.chats))]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tokens_are_those_of_transformers(model: Model, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("an image takes many steps", "two ranks divide an image"):
        monkeypatch.setattr(VisionSpec, "patches_of_slice", 8)
        monkeypatch.setattr(division, "FEWEST_PATCHES", 4)
        monkeypatch.setattr(Gemma4VisionSpec, "most_tokens", 9)
    if model.spec.num_deepstack > 1 and name == "two stages":  # the model has two layers
        with pytest.raises(ConfigError, match="pipeline_layer_partition"):
            answers(model, **SETTINGS[name])
        return
    settings = SETTINGS[name]
    if model.keeps_images_whole:
        settings = WITH_WHOLE_IMAGES.get(name, settings)
    assert answers(model, **settings) == [[tokens] for tokens in model.expected]


def test_the_sequences_of_a_request_share_its_images(model: Model) -> None:
    assert answers(model, n=3) == [[tokens] * 3 for tokens in model.expected]


def test_images_matter(model: Model) -> None:
    """The requests with the same tokens and other images have other answers."""
    first, other, changed = model.expected[:3]
    assert model.expected[7] == first
    assert other != first != changed
