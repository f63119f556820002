"""`make_image_prompts`: what an input processor has for prompts with images, from the arguments of the engine."""

import os
from pathlib import Path

from inflight import envs
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.free_memory import available_bytes
from inflight.config.vision import TransformersVisionSpec
from inflight.hub import resolve_tokenizer_folder
from inflight.multimodal.image_prompts import ImagePrompts
from inflight.multimodal.images import Images
from inflight.multimodal.messages import Start
from inflight.multimodal.settings import ImageSettings
from inflight.tokenizer.tokenizer import Tokenizer

CACHE_SHARE = 8  # the cache of images has at most one part of so many of the free memory


def make_image_prompts(args: EngineArgs, config: EngineConfig, tokenizer: Tokenizer | None) -> ImagePrompts:
    """For a model that takes images. Starts the processes that process them, in the background: the first image would wait for
    some seconds.

    Raises:
        ConfigError: an environment variable is wrong.
    """
    vision = config.model.architecture.vision
    assert vision is not None, "a model for text"
    settings = ImageSettings(
        max_images=args.max_images,
        options=dict(args.mm_processor_kwargs or {}),
        cache_bytes=min(int(args.mm_processor_cache_gb * 2**30), available_bytes() // CACHE_SHARE),
        local_path=None
        if args.allowed_local_media_path is None
        else Path(os.path.expanduser(args.allowed_local_media_path)),
        domains=frozenset(args.allowed_media_domains),
        num_processes=args.mm_processor_workers,
        fetch_seconds=envs.image_fetch_timeout_seconds(),
    )
    folder = config.model.folder
    start = Start(
        folder=folder,
        tokenizer=folder if args.tokenizer is None else resolve_tokenizer_folder(args.tokenizer),
        mmproj=config.model.mmproj,
        trust_remote_code=config.model.trust_remote_code,
        options=settings.options,
        image_token_id=vision.image_token_id if isinstance(vision, TransformersVisionSpec) else None,
    )
    images = Images(settings, start)
    if tokenizer is not None:
        images.warm_up()
    return ImagePrompts(images, vision, tokenizer)
