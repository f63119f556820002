"""The arguments of the engine about images."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.errors import ConfigError


@pytest.mark.parametrize(("limit", "count"), [(None, 999), ({}, 999), ({"image": 4}, 4), ({"image": 0, "video": 0}, 0)])
def test_the_most_images(limit: dict[str, int] | None, count: int) -> None:
    assert EngineArgs(limit_mm_per_prompt=limit).max_images == count


@pytest.mark.parametrize(
    "given",
    [
        {"limit_mm_per_prompt": {"image": -1}},
        {"limit_mm_per_prompt": {"image": True}},
        {"limit_mm_per_prompt": {"image": {"count": 4}}},
        {"limit_mm_per_prompt": {"video": 1}},
        {"limit_mm_per_prompt": 4},
        {"mm_processor_kwargs": ["max_pixels"]},
        {"mm_processor_cache_gb": -1},
        {"mm_processor_workers": 0},
        {"allowed_local_media_path": ""},
        {"allowed_media_domains": "images.example"},
        {"allowed_media_domains": ("https://images.example",)},
        {"allowed_media_domains": ("images.example/",)},
        {"allowed_media_domains": ("Images.example",)},
        {"allowed_media_domains": ("*.example",)},
        {"allowed_media_domains": ("images.example:443",)},
    ],
)
def test_a_wrong_argument_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        EngineArgs(**given)
