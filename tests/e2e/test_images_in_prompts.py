"""Prompts with images, as users give them: `LLM.generate` and `AsyncLLM.generate` answer as transformers does."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import SmolVLMConfig

from inflight import LLM, SamplingParams
from inflight.config.engine_args import EngineArgs
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.errors import ContextLengthExceededError, InvalidRequestError
from inflight.outputs import RequestOutput
from tests.support.image_models import (
    FAMILIES,
    byte_tokenizer,
    drawing,
    file_of,
    processor_of_transformers,
    write_image_family,
)
from tests.support.vision_models import VISION_CONFIGS, reference_model, write_vision_model

# Tiles of 24 x 24 pixels, which are 9 tokens each.
TINY = FAMILIES["smolvlm"]._replace(
    image_processor={
        **FAMILIES["smolvlm"].image_processor,
        "max_image_size": {"longest_edge": 24},
        "size": {"longest_edge": 48},
    },
    processor_config={"image_seq_len": 9, "processor_class": "SmolVLMProcessor"},
    config={},  # transformers writes it with the weights
)
MAX_TOKENS = 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
ARGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "seed": 0}
TEXT = "A: <image> and <image>: what?"


class Truth(NamedTuple):
    folder: Path
    prompt: list[int]
    answer: list[int]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A model of random weights, and what transformers makes of the prompt with two drawings."""
    config = SmolVLMConfig(**VISION_CONFIGS["smolvlm"][0].to_dict())
    config.text_config.vocab_size = 320
    config.image_token_id = byte_tokenizer(TINY.special_tokens).token_to_id("<image>")
    folder = write_vision_model(config, tmp_path_factory.mktemp("model") / "m", seed=2)
    write_image_family(folder, TINY)
    given = processor_of_transformers(folder, TINY)(images=images(), text=TEXT, return_tensors="pt")
    with torch.inference_mode():
        found = reference_model(folder).generate(
            **given, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    prompt = given["input_ids"][0].tolist()
    return Truth(folder, prompt, found[0, len(prompt) :].tolist())


def images() -> list[Any]:
    return [drawing(40, 30), drawing(20, 50, seed=3)]


def prompt_of(*given: object, text: str = TEXT, **more: object) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(given)}, **more}


@pytest.fixture(scope="module")
def llm(truth: Truth) -> Iterator[LLM]:
    folder = str(truth.folder.parent)
    with LLM(
        str(truth.folder),
        limit_mm_per_prompt={"image": 3},
        allowed_local_media_path=folder,
        mm_processor_workers=2,
        **ARGS,
    ) as made:
        yield made


def tokens(output: RequestOutput) -> tuple[list[int], list[int]]:
    return list(output.prompt_token_ids), list(output.outputs[0].token_ids)


def test_the_answer_is_that_of_transformers_for_each_form_of_an_image(truth: Truth, llm: LLM) -> None:
    drawn = images()
    path = truth.folder.parent / "a.png"
    path.write_bytes(file_of(drawn[1]))
    url = "data:image/png;base64," + base64.b64encode(file_of(drawn[1])).decode()
    others = [drawn[1], np.asarray(drawn[1]), path, path.as_uri(), url, file_of(drawn[1])]
    outputs = llm.generate([prompt_of(drawn[0], each) for each in others], PARAMS, use_tqdm=False)
    assert [tokens(each) for each in outputs] == [(truth.prompt, truth.answer)] * len(others)
    assert {each.prompt for each in outputs} == {TEXT}


def test_a_prompt_of_token_ids_is_expanded(truth: Truth, llm: LLM) -> None:
    ids = byte_tokenizer(TINY.special_tokens).encode(TEXT).ids
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": images()}}
    [output] = llm.generate(prompt, PARAMS, use_tqdm=False)
    assert tokens(output) == (truth.prompt, truth.answer)


def test_texts_and_images_in_one_call(truth: Truth, llm: LLM) -> None:
    [text] = llm.generate("what?", PARAMS, use_tqdm=False)
    both = llm.generate(["what?", prompt_of(*images()), "what?"], PARAMS, use_tqdm=False)
    assert [tokens(each) for each in both] == [tokens(text), (truth.prompt, truth.answer), tokens(text)]


def test_options_change_the_number_of_tokens(llm: LLM) -> None:
    prompt = prompt_of(drawing(40, 30), text="<image>", mm_processor_kwargs={"do_image_splitting": False})
    few, many = llm.generate([prompt, prompt_of(drawing(40, 30), text="<image>")], PARAMS, use_tqdm=False)
    assert len(few.prompt_token_ids) < len(many.prompt_token_ids)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (prompt_of(*[drawing(9, 9)] * 4), "multi_modal_data['image']"),
        (prompt_of(drawing(9, 9)), "multi_modal_data['image']"),  # two placeholders
        (prompt_of(drawing(9, 9), b"no image"), "multi_modal_data['image'][1]"),
        (prompt_of(drawing(9, 9), "file:///etc/passwd"), "multi_modal_data['image'][1]"),
        (prompt_of(drawing(9, 9), "http://127.0.0.1/"), "multi_modal_data['image'][1]"),
        (prompt_of(drawing(9, 9), drawing(9, 9), mm_processor_kwargs={"max_pixels": 9}), "mm_processor_kwargs"),
        (prompt_of(drawing(9, 9), None, multi_modal_uuids={"image": [None, "?"]}), "multi_modal_uuids['image'][1]"),
        ("a text with <image>", "prompt"),
        ({"prompt": TEXT}, "prompt"),
        (prompt_of(drawing(9, 9), drawing(9, 9), multi_modal_date={}), ""),
    ],
    ids="limit count damaged file address option uuid literal no-images key".split(),
)
def test_a_wrong_prompt_is_refused(prompt: Any, param: str, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError) as error:
        llm.generate(prompt, PARAMS, use_tqdm=False)
    assert error.value.param == param


def test_an_image_that_is_longer_than_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceededError):
        llm.generate(prompt_of(*images(), drawing(100, 100), text="<image>" * 3 + "x" * 150), PARAMS, use_tqdm=False)


def test_a_model_without_a_tower_takes_no_images(truth: Truth) -> None:
    with LLM(str(truth.folder), language_model_only=True, **ARGS) as llm:
        with pytest.raises(InvalidRequestError, match="takes no images") as error:
            llm.generate(prompt_of(*images()), PARAMS, use_tqdm=False)
        assert error.value.param == "multi_modal_data['image']"
        assert llm.generate("what?", PARAMS, use_tqdm=False)


def test_many_clients_of_a_server_with_the_same_images(truth: Truth) -> None:
    async def ask(engine: AsyncLLM, prompt: Any) -> RequestOutput:
        async for output in engine.generate(prompt, PARAMS):
            last = output
        return last

    async def run() -> None:
        async with await AsyncLLM.from_args(EngineArgs(model=str(truth.folder), **ARGS)) as engine:
            first = prompt_of(*images(), multi_modal_uuids={"image": ["x", "y"]})
            outputs = await asyncio.gather(*(ask(engine, first) for _ in range(8)))
            assert [tokens(each) for each in outputs] == [(truth.prompt, truth.answer)] * 8
            again = prompt_of(None, None, multi_modal_uuids={"image": ["x", "y"]})
            assert tokens(await ask(engine, again)) == (truth.prompt, truth.answer)
            prepared = await engine.prepare(again)
            assert prepared.token_ids == truth.prompt
            assert tokens(await ask(engine, prepared)) == (truth.prompt, truth.answer)
            assert prepared.text == TEXT
            with pytest.raises(InvalidRequestError):
                await ask(engine, prompt_of(drawing(9, 9), b"no image"))
            assert tokens(await ask(engine, again)) == (truth.prompt, truth.answer)

    asyncio.run(asyncio.wait_for(run(), 500))


def test_replicas_name_the_blocks_of_images(truth: Truth) -> None:
    """Each replica's cache has the names of blocks with images, which front ends compute, too."""
    prompts = [prompt_of(*images()), prompt_of(*images()[::-1]), prompt_of(*images())]
    with LLM(str(truth.folder), data_parallel_size=2, block_size=8, **ARGS) as llm:
        first = [tokens(each) for each in llm.generate(prompts, PARAMS, use_tqdm=False)]
        assert first[0] == first[2] == (truth.prompt, truth.answer)
        assert first[1] != first[0]
        assert [tokens(each) for each in llm.generate(prompts, PARAMS, use_tqdm=False)] == first
