"""`ImageArgs`: the arguments of the engine about images in prompts, a part of `EngineArgs`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from inflight.setting import setting

_images = partial(setting, group="Images")
DEFAULT_MAX_IMAGES = 999


@dataclass(frozen=True, kw_only=True)
class ImageArgs:
    """None leaves the choice to the engine."""

    language_model_only: bool = _images(
        False,
        "Do not load the part of the model that reads images. The model then takes text only, and needs less memory.",
    )
    mmproj: str | None = _images(
        None,
        "The GGUF file with the part of the model that reads images, if the model is a GGUF file. Default: the only file "
        "mmproj*.gguf beside it.",
        metavar="FILE",
    )
    limit_mm_per_prompt: Mapping[str, Any] | None = _images(  # Any: `image_problems` checks it
        None, f"Most images of a prompt: '{{\"image\": 4}}'. Default: {DEFAULT_MAX_IMAGES}."
    )
    mm_processor_kwargs: Mapping[str, Any] | None = _images(  # Any: the model's processor checks them
        None, "Arguments of the model's image processor, such as '{\"max_pixels\": 602112}'. A request may have others."
    )
    mm_processor_cache_gb: float = _images(
        4.0,
        "Most memory of a front end for images that were processed before, but at most an eighth of what is free at the "
        "start; 0: none.",
        bounds=(0, 2**20),
        metavar="GIB",
    )
    mm_processor_workers: int = _images(
        1, "Most processes of a front end that decode and process images.", bounds=(1, 256)
    )
    allowed_local_media_path: str | None = _images(
        None, "Let requests name images in this folder, as file: URLs. Default: none.", metavar="FOLDER"
    )
    allowed_media_domains: tuple[str, ...] = _images(
        (),
        "Let requests name images on these hosts, as https: or http: URLs. Redirects and addresses that are not public are "
        "refused. Default: no hosts.",
        metavar="HOST ...",
    )

    @property
    def max_images(self) -> int:
        limit = self.limit_mm_per_prompt or {}
        count: int = limit.get("image", DEFAULT_MAX_IMAGES)
        return count

    def image_problems(self) -> Iterator[str]:
        """What is wrong with these arguments, beside the types of the values."""
        for name, count in (self.limit_mm_per_prompt or {}).items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                yield (
                    f"limit_mm_per_prompt[{name!r}]={count!r} is not a number of images; give one, as in {{'image': 4}}"
                )
            elif name != "image" and count > 0:
                yield f"limit_mm_per_prompt[{name!r}]={count}: prompts may have images only; leave it out"
        for host in self.allowed_media_domains:
            if host != host.strip().lower() or not host or any(character in host for character in "/:*@ "):
                yield (
                    f"allowed_media_domains has {host!r}, which is not the name of a host in small letters; give one such as "
                    "'images.example.com'"
                )
