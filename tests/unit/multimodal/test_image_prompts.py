"""Prompts with images in an input processor: prepared before, or read by the thread that processes them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inflight.config.engine_args import EngineArgs
from inflight.config.vision import Idefics3VisionSpec
from inflight.engine.request import image_support
from inflight.engine.request.image_support import ImageSupport, NoImages, make_image_support
from inflight.errors import ConfigError, InvalidRequestError
from inflight.interface.images import ImagesPart
from inflight.multimodal import start as module
from inflight.multimodal.cache import Scope
from inflight.multimodal.image_prompts import ImagePrompts
from inflight.multimodal.images import Images
from inflight.multimodal.messages import Start
from inflight.multimodal.processed import ProcessedImage, ProcessedInput
from inflight.multimodal.settings import ImageSettings

IMAGE = 64  # "@"
TOWER = Idefics3VisionSpec(
    image_token_id=IMAGE,
    out_size=8,
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    mlp_size=8,
    merge_size=1,
    patch_size=1,
    num_channels=3,
    positions_per_side=99,
    eps=1e-5,
    activation="gelu",
)
FOUND = ProcessedImage(
    placeholder="@",
    expansion="[@@]",
    inputs=(
        ProcessedInput(pixels=np.zeros((3, 1, 2), dtype=np.float32), grid=(1, 1, 2), num_tokens=2, digest=bytes(32)),
    ),
)


class Tokenizer:
    """A token for each character."""

    def encode(self, text: str, _: bool) -> list[int]:
        return [ord(character) for character in text]


class FakeImages(Images):
    """Has `FOUND` for each image."""

    def __init__(self) -> None:
        super().__init__(
            ImageSettings(max_images=9, cache_bytes=0), Start(folder=Path("/nowhere"), tokenizer=Path("/nowhere"))
        )
        self.asked: list[Scope] = []

    async def prepare(self, prompt: Any, scope: Scope, client: str = "") -> tuple[ProcessedImage, ...]:
        self.asked.append(scope)
        return (FOUND,) * len(prompt["multi_modal_data"]["image"])


@pytest.fixture
def images() -> FakeImages:
    return FakeImages()


@pytest.fixture
def prompts(images: FakeImages) -> ImagePrompts:
    return ImagePrompts(images, TOWER, Tokenizer())  # type: ignore[arg-type]


def prompt_of(count: int, **more: object) -> dict[str, Any]:
    return {"prompt": "@" * count, "multi_modal_data": {"image": [b"a"] * count}, **more}


@pytest.mark.parametrize("prompt", ["text", [1, 2], {"prompt": "text"}, {"prompt": "", "multi_modal_data": None}])
def test_a_prompt_without_images_stays_as_it_is(prompt: object) -> None:
    prompts: ImageSupport = NoImages()
    assert asyncio.run(prompts.prepared(prompt, "")) is prompt
    assert prompts.processed(prompt, "") == ()
    assert prompts.expanded("text", ()) == "text"
    assert prompts.parts(np.array([1, IMAGE], dtype=np.int32), (), ()) == ()


def test_a_prepared_prompt_is_not_read_again(prompts: ImagePrompts, images: FakeImages) -> None:
    prepared = asyncio.run(prompts.prepared(prompt_of(2), "salt"))
    assert prompts.processed(prepared, "salt") == (FOUND, FOUND)
    assert asyncio.run(prompts.prepared(prepared, "salt")) is prepared
    assert images.asked == [("", "salt")]


def test_a_prompt_that_is_not_prepared_is_read_at_once(prompts: ImagePrompts, images: FakeImages) -> None:
    assert prompts.processed(prompt_of(1, cache_salt="own"), "salt") == (FOUND,)
    assert images.asked == [("", "own")]


def test_the_way_of_a_prompt(prompts: ImagePrompts) -> None:
    for given in ("a@b", [97, IMAGE, 98]):
        expanded = prompts.expanded(given, (FOUND,))
        tokens = Tokenizer().encode(expanded, False) if isinstance(expanded, str) else expanded
        assert tokens == Tokenizer().encode("a[@@]b", False)
    [part] = prompts.parts(np.array(tokens, dtype=np.int32), (FOUND,), ())
    assert isinstance(part, ImagesPart)
    assert [(each.start, each.num_tokens) for each in part.images] == [(2, 2)]


def test_tokens_of_images_without_images_are_refused(prompts: ImagePrompts) -> None:
    tokens = np.array([97, IMAGE], dtype=np.int32)
    with pytest.raises(InvalidRequestError) as error:
        prompts.parts(tokens, (), ())
    assert error.value.param == "prompt"
    part = ImagesPart(images=())  # a caller may give the part itself
    assert prompts.parts(tokens, (), (part,)) == (part,)


def test_a_model_without_images_refuses_them(prompts: ImagePrompts, images: FakeImages) -> None:
    supports: list[ImageSupport] = [NoImages(), ImagePrompts(images, TOWER, None)]  # type: ignore[arg-type]
    for unable in supports:
        with pytest.raises(InvalidRequestError) as error:
            asyncio.run(unable.prepared(prompt_of(1), ""))
        assert error.value.param == "multi_modal_data['image']"
        with pytest.raises(InvalidRequestError):
            unable.processed(prompt_of(1), "")
        unable.close()


# -- from the arguments of the engine ----------------------------------------------------------------------------------


def made_with(monkeypatch: pytest.MonkeyPatch, *, vision: object = TOWER, **args: Any) -> ImageSupport:
    monkeypatch.setattr(module, "available_bytes", lambda: 8 * 10**9)
    architecture = SimpleNamespace(vision=vision)
    model = SimpleNamespace(architecture=architecture, folder=Path("/model"), trust_remote_code=False, mmproj=None)
    config: Any = SimpleNamespace(model=model)
    return make_image_support(EngineArgs(**args), config, None)


def test_the_settings_are_those_of_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_IMAGE_FETCH_TIMEOUT_SECONDS", "2.5")
    made = made_with(
        monkeypatch,
        limit_mm_per_prompt={"image": 3},
        mm_processor_kwargs={"max_pixels": 5},
        mm_processor_cache_gb=0.5,
        mm_processor_workers=2,
        allowed_local_media_path="/images",
        allowed_media_domains=("a.example",),
    )
    assert isinstance(made, ImagePrompts)
    assert made._images.settings == ImageSettings(
        max_images=3,
        options={"max_pixels": 5},
        cache_bytes=2**29,
        local_path=Path("/images"),
        domains=frozenset({"a.example"}),
        num_processes=2,
        fetch_seconds=2.5,
    )


def test_the_cache_has_at_most_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_with(monkeypatch)
    assert isinstance(made, ImagePrompts)
    assert made._images.cache.max_bytes == 10**9


def test_a_model_without_a_tower_has_no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(made_with(monkeypatch, vision=None), NoImages)


def test_without_the_code_for_images_a_model_with_a_tower_takes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_support, "KINDS", {})
    made = made_with(monkeypatch)
    with pytest.raises(InvalidRequestError, match=r"not read here.*leave them out"):
        made.processed(prompt_of(1), "")
    assert made.processed({"prompt": "text"}, "") == () and made.totals() is None


def test_a_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_IMAGE_FETCH_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ConfigError, match="INFLIGHT_IMAGE_FETCH_TIMEOUT_SECONDS"):
        made_with(monkeypatch)
