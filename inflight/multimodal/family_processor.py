"""`FamilyProcessor`: the processor that transformers has for the model's family, for one image at a time.

The processor's class is called with one image and with the text of one placeholder, so that it prepares the pixels and writes
the expansion of the placeholder. This works in the same way for each family. Videos and sounds are not supported, so the
processor is made without those parts.

transformers is imported here only, in a process of its own, and without torch (processor_main.py).
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from inflight.errors import ConfigError, InvalidRequestError
from inflight.interface.packed_arrays import pack_arrays
from inflight.interface.request import Float32Array
from inflight.multimodal.messages import Options, Start
from inflight.multimodal.processed import Grid, ProcessedImage, ProcessedInput, digest_of

if TYPE_CHECKING:
    from PIL import Image

# What a request may not choose: the form of the result, and what must be as the model's weights are.
_FIXED = frozenset(
    """
    return_tensors device data_format input_data_format disable_grouping return_row_col_info image_seq_length patch_size
    temporal_patch_size merge_size pooling_kernel_size
    """.split()
)
_SIZES = ("size", "pixels", "edge", "crops", "patches", "tiles", "tokens")  # parts of names of options
# What processors return about the text of a prompt, and not about its images
_ABOUT_TEXT = frozenset("input_ids attention_mask token_type_ids mm_token_type_ids text_replacement_offsets".split())
_MOST_UNKNOWN = 4096  # of an option without a value in the model's files
MAX_PIXEL_BYTES = 2**29  # of the pixels of one image


class FamilyProcessor:
    """
    Args:
        start: which processor to load.

    Raises:
        ConfigError: transformers has no processor for images of the model, or cannot load it.
    """

    def __init__(self, start: Start) -> None:
        self._processor = _load(start)
        self._image_processor = self._processor.image_processor
        # QianfanOCR has another token in its chat template than in the expansion
        self._placeholder = str(getattr(self._processor, "image_placeholder_token", self._processor.image_token))
        self._keeps_whole = start.image_token_id is not None
        self._patch_size = 0 if self._keeps_whole else _patch_size(start.folder, self._image_processor)
        token = getattr(self._processor.tokenizer, "image_token", None) or str(self._processor.image_token)
        own = self._processor.tokenizer.convert_tokens_to_ids(token)
        self._image_token_id: int = own if start.image_token_id is None else start.image_token_id
        self._known_options = self._find_options() - _FIXED
        self._largest = {
            **_largest_of(getattr(self._processor, "images_kwargs", {})),  # Gemma 3's limits of crops
            **_sizes_of(self._image_processor, self._known_options),
            **_largest_of(start.options),
        }
        self._bos_id = self._processor.tokenizer.bos_token_id
        self._edge_ids = frozenset(_read_json(start.folder / "config.json").get("visual_indicator_token_ids", ()))
        self._usual_shape: tuple[int, ...] | None = None  # of the pixels of a tile, without options
        self._usual_shape = self._shape_without_options(_blank_image())
        if self._keeps_whole and self._shape_without_options(_blank_image(2)) != self._usual_shape:
            self._usual_shape = None  # the tower takes images of any size

    def process(self, image: Image.Image, options: Options) -> ProcessedImage:
        """Prepare an image.

        Args:
            image: in RGB.
            options: arguments of the image processor, such as `size` or `do_image_splitting`.

        Raises:
            InvalidRequestError: the processor refuses the image, or an option (`param` is "mm_processor_kwargs").
        """
        self._check_sizes(options)
        found = self._call(image, self._checked(options))
        border = ""
        if "text_replacement_offsets" in found:
            expansion = str(found["text_replacement_offsets"][0][0]["replacement"])
        else:  # Idefics2: its placeholder becomes special tokens only
            written = self._processor.tokenizer.convert_ids_to_tokens(found["input_ids"][0])
            expansion = "".join(written[1:] if found["input_ids"][0][0] == self._bos_id else written)
            border = str(self._processor.fake_image_token)
        pixels = found["pixel_values"]
        if pixels.nbytes > MAX_PIXEL_BYTES:
            raise InvalidRequestError(
                f"the image has {pixels.nbytes} bytes of pixels when it is processed; at most {MAX_PIXEL_BYTES} are allowed: "
                "send a smaller image, or options for a smaller size"
            )
        if self._keeps_whole:
            if options:
                self._check_pieces([(np.asarray(pixels, dtype=np.float32), (1, 1, 1))])
            whole = self._whole(found, image)
            return ProcessedImage(placeholder=self._placeholder, expansion=expansion, inputs=(whole,), border=border)
        pieces = self._pieces(np.asarray(pixels, dtype=np.float32), found)
        if options:
            self._check_pieces(pieces)
        counts = _run_lengths(found["input_ids"][0], self._image_token_id)
        if len(counts) != len(pieces):
            raise ConfigError(
                f"{type(self._processor).__name__} writes {len(counts)} runs of placeholders for {len(pieces)} inputs of the "
                "vision tower; Inflight needs one run for each"
            )
        return ProcessedImage(
            placeholder=self._placeholder,
            expansion=expansion,
            inputs=tuple(
                ProcessedInput(pixels=each, grid=grid, num_tokens=count, digest=digest_of(each, grid))
                for (each, grid), count in zip(pieces, counts, strict=True)
            ),
        )

    def _whole(self, found: Any, image: Image.Image) -> ProcessedInput:  # Any: of transformers
        """All that the processor has returned, for a tower of transformers. It gets the tokens from the first placeholder to
        the last one, and tokens around them whose embeddings the tower makes, too (Ovis2's visual indicators)."""
        token_ids = [int(token_id) for token_id in found["input_ids"][0]]
        places = [place for place, token_id in enumerate(token_ids) if token_id == self._image_token_id]
        if not places:
            raise InvalidRequestError(
                f"the processor of this model makes no token of an image of {image.width}x{image.height} pixels: send a "
                "larger image"
            )
        first, last = places[0], places[-1]
        while first > 0 and token_ids[first - 1] in self._edge_ids:
            first -= 1
        while last + 1 < len(token_ids) and token_ids[last + 1] in self._edge_ids:
            last += 1
        span = token_ids[first : last + 1]
        arrays = {name: np.asarray(value) for name, value in found.items() if name not in _ABOUT_TEXT}
        pixels = pack_arrays({"input_ids": np.array([span]), **arrays})
        grid = (1, 1, len(span))
        return ProcessedInput(
            pixels=pixels, grid=grid, num_tokens=len(span), digest=digest_of(pixels, grid), token_ids=tuple(span)
        )

    def _shape_without_options(self, image: Image.Image) -> tuple[int, ...]:
        if not self._keeps_whole:
            return self.process(image, {}).inputs[0].pixels.shape
        shape: tuple[int, ...] = np.asarray(self._call(image, {})["pixel_values"]).shape[-3:]
        return shape

    def _find_options(self) -> frozenset[str]:
        own = getattr(self._image_processor, "valid_kwargs", None)
        of_processor = self._processor.valid_processor_kwargs.__annotations__["images_kwargs"]
        return frozenset(getattr(own, "__annotations__", {})) | frozenset(of_processor.__annotations__)

    def _check_sizes(self, options: Options) -> None:
        """A request may ask for smaller images than the engine's, but not for larger ones, which cost everybody."""
        for name, largest in _largest_of(options).items():
            most = self._largest.get(name, self._largest.get("size", 0) if "pixels" in name else _MOST_UNKNOWN)
            if not 0 < largest <= most:
                raise InvalidRequestError(
                    f"{name}={options[name]!r} must have positive numbers of at most {most}; the server's option "
                    "--mm-processor-kwargs allows larger ones",
                    "mm_processor_kwargs",
                )

    def _checked(self, options: Options) -> dict[str, Any]:  # Any: JSON
        """Returns the options as the image processor takes them."""
        for name in options:
            if name not in self._known_options:
                raise InvalidRequestError(
                    f"the processor of this model has no option {name!r}; it has {', '.join(sorted(self._known_options))}",
                    "mm_processor_kwargs",
                )
        checked = dict(options)
        usual = dict(self._image_processor.size or {})
        for name, side in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if name in checked:  # the limits of an area, in Qwen's processors
                checked["size"] = {**usual, **checked.get("size", {}), side: checked.pop(name)}
        return checked

    def _call(self, image: Image.Image, options: dict[str, Any]) -> Any:  # Any: of transformers
        try:
            return self._processor(
                images=[image],
                text=self._placeholder,
                return_text_replacement_offsets=True,
                images_kwargs={**options, "return_tensors": "np"},
                text_kwargs={"return_tensors": "np"},  # some processors ask for tensors of torch otherwise
            )
        except MemoryError:
            raise InvalidRequestError(
                "the processed image needs too much memory; send a smaller image, or options for a smaller size"
            ) from None
        except Exception as error:  # whatever a processor raises because of an image or an option
            place = "mm_processor_kwargs" if options else ""
            what = (
                f"the image with the options {options}"
                if options
                else f"an image of {image.width}x{image.height} pixels"
            )
            advice = "choose other options" if options else "send one of another size"
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequestError(
                f"the processor of this model cannot process {what} ({reason}); {advice}", place
            ) from error

    def _pieces(self, pixels: Float32Array, found: Any) -> list[tuple[Float32Array, Grid]]:  # Any: of transformers
        """Divides the pixels of an image into the inputs of the tower. `found`: what the processor has returned."""
        if "image_grid_thw" in found:  # Qwen: one array of patches
            frames, rows, columns = (int(number) for number in found["image_grid_thw"][0])
            return [(pixels, (frames, rows, columns))]
        if "image_position_ids" in found:  # Gemma 4: patches row by row, with their columns and rows, and then padding
            places = np.asarray(found["image_position_ids"][0])
            places = places[(places >= 0).all(axis=1)]
            columns, rows = (int(number) + 1 for number in places.max(axis=0))
            return [(np.ascontiguousarray(pixels[0, : len(places)]), (1, rows, columns))]
        tiles = pixels.reshape(-1, *pixels.shape[-3:])  # [num_tiles, 3, height, width]
        height, width = tiles.shape[-2:]
        grid = 1, height // self._patch_size, width // self._patch_size
        return [(tile, grid) for tile in tiles]

    def _check_pieces(self, pieces: list[tuple[Float32Array, Grid]]) -> None:
        """Options must not change what the tower gets in a way that its weights do not allow."""
        for pixels, _ in pieces:
            usual = self._usual_shape
            shape = pixels.shape[-len(usual or ()) :]
            skipped = 1 if pixels.ndim == 2 else 0  # the number of patches is free
            if usual is not None and shape[skipped:] != usual[skipped:]:
                raise InvalidRequestError(
                    f"with these options an input of the model has the shape {list(pixels.shape)}; "
                    f"the model takes {list(usual)}",
                    "mm_processor_kwargs",
                )
            if not np.isfinite(pixels).all():
                raise InvalidRequestError("with these options pixels are not finite", "mm_processor_kwargs")


def _largest_of(options: Options) -> dict[str, float]:
    """The largest number of each option that is a size, or that counts tiles or pixels. A number that is not positive counts as
    the largest, so that it is found."""
    found: dict[str, float] = {}
    for name, value in options.items():
        given = value.values() if isinstance(value, Mapping) else [value]
        numbers = [number for number in given if isinstance(number, int | float) and not isinstance(number, bool)]
        if numbers and any(part in name for part in _SIZES):
            found[name] = min(numbers) if min(numbers) <= 0 else max(numbers)
    return found


def _sizes_of(image_processor: Any, names: Iterable[str]) -> dict[str, float]:  # Any: of transformers
    values: dict[str, Any] = {name: getattr(image_processor, name, None) for name in names}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    # sizes are of a class that is like a dictionary, but no Mapping; a side without a limit is None
    sizes = {name: dict(value) for name, value in values.items() if "size" in name and hasattr(value, "__iter__")}
    return _largest_of({**numbers, **sizes})


def _load(start: Start) -> Any:  # Any: a processor of transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    files = [_read_json(start.folder / name) for name in ("processor_config.json", "preprocessor_config.json")]
    model_type = _read_json(start.folder / "config.json").get("model_type", "")
    named = next((each["processor_class"] for each in files if "processor_class" in each), None)
    name = named or PROCESSOR_MAPPING_NAMES.get(model_type)
    base = None if name is None else _pixtral() if name == "PixtralProcessor" else processor_class_from_name(name)
    if base is None:
        raise ConfigError(f"transformers has no processor for images of this model ({name or model_type or 'no name'})")

    class ImagesOnly(base):  # type: ignore[misc, valid-type]  # a class of transformers, chosen at run time
        """Accepts that the processor has no part for videos or sound."""

        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> type:
            return type(argument)

    options = {"trust_remote_code": start.trust_remote_code, "local_files_only": True}
    parts: dict[str, Any] = {
        "image_processor": AutoImageProcessor.from_pretrained(start.folder, backend="pil", **options),
        "tokenizer": AutoTokenizer.from_pretrained(start.tokenizer, **options),
    }
    accepted = inspect.signature(base.__init__).parameters.keys()
    others = {key: value for key, value in files[0].items() if key in accepted and key not in base.get_attributes()}
    processor = ImagesOnly.__new__(ImagesOnly)
    try:
        base.__init__(processor, **{part: parts.get(part) for part in base.get_attributes()}, **others)
    except ImportError:  # a package for videos is missing; what images need is set before that is found
        processor.__dict__.update(parts)
    return processor


def _pixtral() -> Any:  # Any: a class of transformers
    """transformers offers it only beside torchvision, from whose file for images it imports a function. The file for Pillow has
    this function, too."""
    folder = "transformers.models.pixtral"
    try:
        importlib.import_module(f"{folder}.image_processing_pixtral")
    except ImportError:
        for_pillow = importlib.import_module(f"{folder}.image_processing_pil_pixtral")
        sys.modules[f"{folder}.image_processing_pixtral"] = for_pillow
    return importlib.import_module(f"{folder}.processing_pixtral").PixtralProcessor


def _read_json(path: Path) -> dict[str, Any]:  # Any: JSON
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}


def _patch_size(folder: Path, image_processor: Any) -> int:  # Any: of transformers
    """Pixels of a side of a patch. Some config.json leave it out, because it is the default of the family."""
    from transformers import AutoConfig

    own = getattr(image_processor, "patch_size", None)
    if isinstance(own, int):
        return own
    return int(AutoConfig.from_pretrained(folder).vision_config.patch_size)


def _blank_image(shape: int = 1) -> Image.Image:
    """`shape`: how many times wider than high it is."""
    from PIL import Image

    return Image.new("RGB", (64 * shape, 64))


def _run_lengths(token_ids: list[int], token_id: int) -> list[int]:
    """The lengths of the runs of one token."""
    is_token = np.concatenate([[0], np.asarray(token_ids) == token_id, [0]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(is_token))
    return [int(length) for length in edges[1::2] - edges[::2]]
