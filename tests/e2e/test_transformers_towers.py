"""Towers that the code of transformers computes: the answers are its own, for each type, and however they are computed.

Odd images are tried with towers of our own, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from inflight import SamplingParams
from inflight.config.engine_args import EngineArgs
from inflight.config.families.transformers_vision import TYPES as TABLE
from inflight.config.gguf_config import read_model_config
from inflight.config.unknown_family import describe_model
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.errors import CheckpointError, InvalidRequestError
from inflight.interface.images import ImagesPart
from inflight.interface.packed_arrays import unpack_arrays
from inflight.models.transformers_fallback.tower import TransformersTower
from inflight.multimodal.decode import decode_file
from inflight.multimodal.expansion import expand_text
from inflight.multimodal.family_processor import FamilyProcessor
from inflight.multimodal.image_parts import images_part
from inflight.multimodal.messages import Start
from tests.support.image_models import (
    ImageFamily,
    as_bytes,
    byte_tokenizer,
    drawing,
    file_of,
    processor_of_transformers,
    write_image_family,
)
from tests.support.native_vision_models import NATIVE, native_family, write_native_model
from tests.support.transformers_vision_models import TYPES, config_of, family_of, write_tower_type
from tests.support.vision_models import reference_model

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
# The sizes of the images of each prompt. The first two have images of the same size behind the same text.
IMAGES = [[(50, 40, 1)], [(50, 40, 2)], [(40, 90, 3), (30, 30, 4)], []]


class Given(NamedTuple):
    """A prompt, and what transformers answers."""

    tokens: list[int]
    part: ImagesPart | None
    answer: list[int]


def text_of(num_images: int, placeholder: str) -> str:
    return "A: " + " and ".join([placeholder] * num_images) + ", what?"


def given_of(name: str, folder: Path) -> list[Given]:
    family = family_of(name)
    spec = describe_model(read_model_config(folder), "auto").vision
    assert spec is not None
    truth = reference_model(folder)
    ours = FamilyProcessor(Start(folder=folder, tokenizer=folder, image_token_id=spec.image_token_id))
    theirs = processor_of_transformers(folder, family)
    tokenizer = byte_tokenizer(family.special_tokens)
    found = []
    for sizes in IMAGES:
        images = [drawing(width, height, seed) for width, height, seed in sizes]
        text = text_of(len(images), family.placeholder)
        processed = [ours.process(image, {}) for image in images]
        tokens = tokenizer.encode(expand_text(text, processed) if images else text).ids
        inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens])}
        if images:
            inputs = dict(theirs(images=images, text=text, return_tensors="pt"))
            assert inputs["input_ids"][0].tolist() == tokens
        with torch.inference_mode():
            answer = truth.generate(
                **inputs, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        part = images_part(torch.tensor(tokens, dtype=torch.int32).numpy(), processed, spec) if images else None
        found.append(Given(tokens, part, answer[0, len(tokens) :].tolist()))
    return found


def answers(folder: Path, given: list[Given], params: SamplingParams = PARAMS, **settings: Any) -> list[list[int]]:
    args = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4, "num_threads": 1, **settings}
    engine = LLMEngine.from_args(EngineArgs(model=str(folder), skip_tokenizer_init=True, **args))
    found: dict[str, list[int]] = {}
    try:
        for number, each in enumerate(given):
            parts = () if each.part is None else (each.part,)
            engine.add_request(str(number), {"prompt_token_ids": each.tokens}, params, parts=parts)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
        if "kv_cache_memory_bytes" in settings:
            assert engine.core.scheduler.stats.num_preemptions, "the KV cache is too large for this test"
    finally:
        engine.close()
    return [found[str(number)] for number in range(len(given))]


def test_each_type_has_a_model() -> None:
    assert {each.model_type for each in TABLE} == TYPES.keys()


QUICK = ("aya_vision", "llava", "mistral3")  # the others are for `make test-full`


def marked(names: Iterable[str], quick: Collection[str]) -> list[Any]:  # Any: what pytest makes of a parameter
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.full]) for name in names]


@pytest.mark.parametrize("name", marked(TYPES, QUICK))
def test_the_answers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = write_tower_type(name, tmp_path / "m")
    given = given_of(name, folder)
    assert answers(folder, given) == [each.answer for each in given]
    assert given[0].tokens == given[1].tokens and given[0].answer != given[1].answer


PROCESSES = """
import sys
from pathlib import Path
from PIL import Image
from inflight.multimodal.processor_main import hide_torch

hide_torch()
from inflight.multimodal.family_processor import FamilyProcessor
from inflight.multimodal.messages import Start

for name, image_token_id in (each.split(":") for each in sys.argv[1:]):
    processor = FamilyProcessor(Start(folder=Path(name), tokenizer=Path(name), image_token_id=int(image_token_id)))
    assert processor.process(Image.new("RGB", (50, 40)), {}).inputs, name
"""


def test_the_processors_need_no_torch(tmp_path: Path) -> None:
    """In an engine, the processes that process images do not import it."""
    given = []
    for name in TYPES:
        config = config_of(name)
        config.save_pretrained(tmp_path / name)
        write_image_family(tmp_path / name, family_of(name))
        given.append(f"{name}:{byte_tokenizer(TYPES[name].special_tokens).token_to_id(TYPES[name].image_token)}")
    found = subprocess.run(
        [sys.executable, "-c", PROCESSES, *given],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr


# Sizes at which code that counts patches may fail, and the modes of files that are not RGB
SIZES = [
    *((1, 1), (1, 3), (3, 1), (1, 40), (40, 1), (3, 40), (13, 13), (14, 14), (28, 14), (28, 28), (27, 29)),
    *((4, 200), (200, 4), (5, 1000), (1000, 5), (300, 300), (1500, 1100)),
]
MODES = ["L", "LA", "P", "RGBA", "1", "I;16"]


def odd_images() -> list[Image.Image]:
    found = [drawing(width, height, 3) for width, height in SIZES]
    for mode in MODES:
        grey = np.asarray(drawing(30, 28, 4).convert("L"))
        given = Image.fromarray(grey.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(grey).convert(mode)
        found.append(decode_file(as_bytes(file_of(given))))
    frames = [drawing(20, 30, seed) for seed in range(2)]
    found.append(decode_file(as_bytes(file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]))))
    return found


def features_of(truth: Any, inputs: dict[str, Any]) -> Any:  # Any: a model of transformers
    """Embeddings of a prompt with one image, if transformers' own code fails with an image of so few tokens alone: those that
    it computes of this image beside another one."""
    pixels, sizes = inputs["pixel_values"], inputs["image_sizes"]
    large = torch.nn.functional.pad(pixels, (0, 56 - pixels.shape[-1], 0, 56 - pixels.shape[-2]))
    both = torch.cat([large, torch.ones(1, 3, 56, 56)])
    found = truth.model.get_image_features(both, torch.cat([sizes, torch.tensor([[56, 56]])])).pooler_output[0]
    embeddings = truth.get_input_embeddings()(inputs["input_ids"])
    embeddings[inputs["input_ids"] == truth.config.image_token_id] = found
    return embeddings


class OddPrompt(NamedTuple):
    """A prompt with one image, and transformers' logits of the next token."""

    tokens: list[int]
    part: ImagesPart
    logits: torch.Tensor


def odd_prompts(folder: Path, family: ImageFamily, *, is_native: bool) -> list[OddPrompt]:
    """Those with each of the odd images that is not refused."""
    truth = reference_model(folder)
    spec = describe_model(read_model_config(folder), "auto").vision
    assert spec is not None
    image_token_id = None if is_native else spec.image_token_id
    ours = FamilyProcessor(Start(folder=folder, tokenizer=folder, image_token_id=image_token_id))
    theirs = processor_of_transformers(folder, family)
    tokenizer = byte_tokenizer(family.special_tokens)
    found = []
    for image in odd_images():
        try:
            processed = ours.process(image, {})
        except InvalidRequestError:
            continue
        text = text_of(1, family.placeholder)
        tokens = tokenizer.encode(expand_text(text, [processed])).ids
        part = images_part(np.array(tokens, dtype=np.int32), [processed], spec)
        inputs = dict(theirs(images=[image], text=text, return_tensors="pt"))
        assert inputs["input_ids"][0].tolist() == tokens
        with torch.inference_mode():
            if truth.config.model_type == "mistral3" and part.images[0].num_tokens == 1:
                inputs = {"inputs_embeds": features_of(truth, inputs), "attention_mask": inputs["attention_mask"]}
            found.append(OddPrompt(tokens, part, truth(**inputs).logits[0, -1]))
    return found


def check_odd_images(folder: Path, family: ImageFamily, *, is_native: bool = False) -> None:
    """Images that transformers' processor takes are computed, and a fault of the engine is none of their answers."""
    prompts = odd_prompts(folder, family, is_native=is_native)
    assert len(prompts) > len(MODES)  # most types refuse no size
    given = [Given(each.tokens, each.part, []) for each in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for [token], prompt in zip(answers(folder, given, params, max_model_len=4096), prompts, strict=True):
        lost = prompt.logits.max() - prompt.logits[token]
        assert lost <= 1e-3 * prompt.logits.abs().max(), "another token, which is no tie"


@pytest.mark.parametrize("name", marked(TYPES, ["mistral3"]))
def test_images_of_any_size_are_read_or_refused(tmp_path: Path, name: str) -> None:
    check_odd_images(write_tower_type(name, tmp_path / "m"), family_of(name))


@pytest.mark.parametrize("name", marked(NATIVE, ["gemma3", "qwen3_vl"]))
def test_images_of_any_size_in_towers_of_our_own(tmp_path: Path, name: str) -> None:
    check_odd_images(write_native_model(name, tmp_path / "m"), native_family(name), is_native=True)


class Told(NamedTuple):
    """What came of requests: the tokens of each, or its error, and how many faults the engine has had."""

    tokens: dict[str, list[int]]
    errors: dict[str, str]
    num_faults: int


def told(folder: Path, given: dict[str, Given], **settings: Any) -> Told:
    args = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4, "num_threads": 1, **settings}
    engine = LLMEngine.from_args(EngineArgs(model=str(folder), skip_tokenizer_init=True, **args))
    found = Told({}, {}, 0)
    try:
        for name, each in given.items():
            parts = () if each.part is None else (each.part,)
            engine.add_request(name, {"prompt_token_ids": each.tokens}, PARAMS, parts=parts)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished and output.outputs[0].finish_reason == "error":
                    found.errors[output.request_id] = output.error
                elif output.finished:
                    found.tokens[output.request_id] = list(output.outputs[0].token_ids)
        return found._replace(num_faults=engine.core.fault_status().epoch)
    finally:
        engine.close()


WAYS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two tensor-parallel ranks": {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
    "two stages": {"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"},
}


@pytest.mark.parametrize("way", marked(WAYS, ["one rank", "two stages"]))
def test_an_image_with_which_transformers_fails_costs_its_request_alone(
    model: tuple[Path, list[Given]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (first, second, third, text) = model
    failing, real = second.part, TransformersTower.call

    def call(self: TransformersTower, arrays: dict[str, torch.Tensor]) -> None:
        assert failing is not None
        if torch.equal(
            arrays["pixel_values"], torch.from_numpy(unpack_arrays(failing.images[0].pixels)["pixel_values"])
        ):
            raise ValueError("shape '[1]' is invalid\nfor this image")
        real(self, arrays)

    monkeypatch.setattr(TransformersTower, "call", call)
    given = {"text": text, "odd": second, "first": first, "odd again": second, "third": third}
    found = told(folder, given, **WAYS[way])
    assert found.tokens == {name: each.answer for name, each in given.items() if each is not second}
    assert set(found.errors) == {"odd", "odd again"} and found.num_faults == 0
    assert all("(ValueError: shape '[1]' is invalid)" in error for error in found.errors.values())


def test_memory_that_runs_out_in_the_tower_is_a_fault_and_no_error_of_the_request(
    model: tuple[Path, list[Given]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, given = model
    real, failures = (
        TransformersTower.call,
        [MemoryError(), RuntimeError("[enforce fail] can't allocate memory: 9 bytes")],
    )

    def call(self: TransformersTower, arrays: dict[str, torch.Tensor]) -> None:
        if failures:
            raise failures.pop()
        real(self, arrays)

    monkeypatch.setattr(TransformersTower, "call", call)
    found = told(folder, {"first": given[0], "text": given[-1]})
    assert found.tokens == {"first": given[0].answer, "text": given[-1].answer}
    assert found.num_faults == 2 and not found.errors


def test_a_part_for_text_that_only_transformers_knows(tmp_path: Path) -> None:
    folder = write_tower_type("llava", tmp_path / "m", "arcee")
    given = given_of("llava", folder)
    assert answers(folder, given) == [each.answer for each in given]
    assert given[0].answer != given[1].answer


def test_a_checkpoint_that_lacks_a_weight_of_the_tower_is_refused(tmp_path: Path) -> None:
    folder = write_tower_type("llava", tmp_path / "m")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.startswith("multi_modal_projector") and name.endswith("1.bias"))
    save_file({each: tensors[each] for each in tensors if each != name}, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"lacks model\.multi_modal_projector\.linear_1\.bias.*--language-model-only"
    ):
        answers(folder, [])


# A type with one run of tokens for an image, one with other tokens between its rows, one with several runs, and one whose part
# for text transformers' code computes, too.
IDENTITY = ["llava_next", "mistral3", "idefics2", "aya_vision"]
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks end inside images": {"max_num_batched_tokens": 8, "block_size": 4},
    "prefix hits": {"max_num_seqs": 1, "block_size": 4},
    "preemption": {"kv_cache_memory_bytes": 44_000, "max_model_len": 80, "block_size": 4},
    "two tensor-parallel ranks": {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
    "two stages": {"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"},
}


@pytest.fixture(scope="module", params=marked(IDENTITY, ["mistral3"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Given]]:
    folder = write_tower_type(request.param, tmp_path_factory.mktemp("model") / "m")
    return folder, given_of(request.param, folder)


@pytest.mark.parametrize("name", marked(SETTINGS, ["chunks end inside images", "prefix hits"]))
def test_the_answers_do_not_depend_on_how_they_are_computed(model: tuple[Path, list[Given]], name: str) -> None:
    folder, given = model
    twice = [*given, *given]
    assert answers(folder, twice, **SETTINGS[name]) == [each.answer for each in twice]
