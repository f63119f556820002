"""`VisionSpec`: the vision tower of a model that reads images, a class for each kind of tower.

The tower makes embeddings of the patches of an image. They take the places of the embeddings of placeholder tokens. To add a
kind: a subclass here, its entry in `VISION_KINDS`, and its tower in models/vision/towers.py.
"""

import math
from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, Literal

Grid = tuple[int, int, int]  # frames, rows and columns of patches, before any of them are merged

_MOST_IMAGE_TOKENS = 16_384


class VisionSpec(ABC):
    """What is known of a tower before it is loaded. All subclasses are dataclasses with these fields.

    Attributes:
        kind: the name of the subclass in messages between processes.
        prefixes: the names of the tower's tensors begin with one of these.
        patches_of_slice: a slice of a layer computes so many patches. Steps compute images slice by slice.
        has_position_rows: the decoder's positions have three rows: frame, row and column (worker/parts/image_positions.py).
        image_token_id: the placeholder, a token of which the prompt has one for each embedding of an image.
        out_size: the hidden size of the decoder.
        hidden_size, num_layers, num_heads, mlp_size: those of the tower.
        patch_features: the numbers of a patch.
        merge_size: rows and columns of patches that become one token.
        num_deepstack: how many of the first decoder layers get further features of the image.
    """

    kind: str
    prefixes: ClassVar[tuple[str, ...]]
    has_gated_mlp: ClassVar[bool] = False
    has_position_rows: ClassVar[bool] = False
    patches_of_slice: ClassVar[int] = 1024

    image_token_id: int
    out_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    merge_size: int = 1

    @property
    def num_deepstack(self) -> int:
        return 0

    @property
    def most_tokens(self) -> int:
        """How many tokens an image has at most."""
        return _MOST_IMAGE_TOKENS

    @property
    def position_merge(self) -> int | None:
        """See `ImagesPart`."""
        return self.merge_size if self.has_position_rows else None

    @property
    def patch_features(self) -> int:
        raise NotImplementedError

    def num_tokens(self, grid: Grid) -> int:
        """How many tokens an image of this grid has."""
        frames, rows, columns = grid
        return frames * (rows // self.merge_size) * (columns // self.merge_size)

    def grid_problem(self, grid: Grid) -> str | None:
        """Why the tower cannot compute an image of this grid; None if it can."""
        frames, rows, columns = grid
        size = self.merge_size
        if min(grid) < 1 or rows % size or columns % size:
            return (
                f"an image of {frames} x {rows} x {columns} patches; rows and columns must be multiples of {size}, because so "
                "many of them become one token"
            )
        return None

    def slices_of_layer(self, grid: Grid) -> int:
        """Into how many slices a layer is divided for an image of this grid."""
        return -(-math.prod(grid) // self.patches_of_slice)

    def num_slices(self, grid: Grid) -> int:
        """How many slices all layers have together."""
        return self.num_layers * self.slices_of_layer(grid)

    def most_patches(self, num_tokens: int) -> int:
        """How many patches an image of `num_tokens` tokens has at most."""
        return num_tokens * self.merge_size**2

    @property
    def num_weights(self) -> int:
        """The fewest weights of the tower: norms, positions and projections to the decoder are left out."""
        matrices = 3 if self.has_gated_mlp else 2
        of_layer = 4 * self.hidden_size**2 + matrices * self.hidden_size * self.mlp_size
        return self.num_layers * of_layer + self.hidden_size * self.patch_features


@dataclass(frozen=True, kw_only=True)
class SiglipSpec(VisionSpec):
    """A SigLIP tower (arXiv:2303.15343). A patch is a square of `patch_size` rows of pixels with `num_channels` numbers each.
    There is a learned position for each patch of a square of `positions_per_side` rows. `activation` is that of the MLP."""

    image_token_id: int
    out_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    merge_size: int
    patch_size: int
    num_channels: int
    positions_per_side: int
    eps: float
    activation: str

    @property
    def patch_features(self) -> int:
        return self.num_channels * self.patch_size**2

    def most_patches(self, num_tokens: int) -> int:
        return min(super().most_patches(num_tokens), self.positions_per_side**2)


@dataclass(frozen=True, kw_only=True)
class Idefics3VisionSpec(SiglipSpec):
    """The tower of Idefics3 and SmolVLM (arXiv:2408.12637, arXiv:2504.05299): a SigLIP tower for images of any size. The
    features of a square of `merge_size` rows of patches, one behind the other, are projected to one token."""

    prefixes = ("model.vision_model.", "model.connector.")

    kind: Literal["idefics3"] = "idefics3"


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionSpec(SiglipSpec):
    """The tower of Gemma 3 (arXiv:2503.19786): a SigLIP tower for images of one size. The mean of `merge_size` x
    `merge_size` patches is normed, and projected to one token."""

    prefixes = ("model.vision_tower.", "model.multi_modal_projector.")

    kind: Literal["gemma3"] = "gemma3"

    @property
    def most_tokens(self) -> int:
        return (self.positions_per_side // self.merge_size) ** 2

    def grid_problem(self, grid: Grid) -> str | None:
        side = self.positions_per_side
        if grid == (1, side, side):
            return None
        return f"an image of {grid[0]} x {grid[1]} x {grid[2]} patches; it must have 1 x {side} x {side}"


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionSpec(VisionSpec):
    """The tower of Gemma 4, for images of any size. A patch is a square of `patch_size` rows of pixels in three colours. It has
    learned positions, one of `num_positions` columns and one of as many rows, and a rotary embedding, in which columns rotate
    the first half of a head of `head_dim` numbers and rows the second. The mean of `merge_size` x `merge_size` patches is
    normed, and projected to one token. With `has_bounds`, inputs and outputs of linear layers are clamped. If `is_standardized`
    is set, a bias and a scale are applied to the means."""

    prefixes = ("model.vision_tower.", "model.embed_vision.")
    has_gated_mlp = True

    kind: Literal["gemma4"] = "gemma4"
    image_token_id: int
    out_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    mlp_size: int
    merge_size: int
    patch_size: int
    num_positions: int
    eps: float
    rope_theta: float
    activation: str
    has_bounds: bool = False
    is_standardized: bool = False

    @property
    def patch_features(self) -> int:
        return 3 * self.patch_size**2

    @property
    def most_tokens(self) -> int:
        """The most that transformers' processor can be told to make of an image."""
        return 1120

    def grid_problem(self, grid: Grid) -> str | None:
        if grid[0] != 1 or max(grid) > self.num_positions:
            return (
                f"an image of {grid[0]} x {grid[1]} x {grid[2]} patches; it must have one frame, and at most "
                f"{self.num_positions} rows and columns"
            )
        if self.num_tokens(grid) > self.most_tokens:
            return f"an image of {self.num_tokens(grid)} tokens; at most {self.most_tokens} are allowed"
        return super().grid_problem(grid)


@dataclass(frozen=True, kw_only=True)
class QwenVisionSpec(VisionSpec):
    """What the towers of Qwen have in common. A patch is a square of `patch_size` rows of pixels in each of `num_frames` frames
    of a film, with `num_channels` numbers each; all frames of an image are equal. `rope_theta`: of the rotary embedding, which
    has rows and columns as positions. `activation` is that of the MLP."""

    prefixes = ("model.visual.",)
    has_position_rows = True

    image_token_id: int
    out_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    merge_size: int
    patch_size: int
    num_frames: int
    num_channels: int
    rope_theta: float
    activation: str

    @property
    def patch_features(self) -> int:
        return self.num_channels * self.num_frames * self.patch_size**2


@dataclass(frozen=True, kw_only=True)
class Qwen3VisionSpec(QwenVisionSpec):
    """The tower of Qwen3-VL (arXiv:2511.21631) and Qwen3.5. There is a learned position for each patch of a square of
    `positions_per_side` rows, which is stretched over the image. The results of `deepstack_layers` become features for the
    first decoder layers."""

    kind: Literal["qwen3_vl"] = "qwen3_vl"
    positions_per_side: int
    deepstack_layers: tuple[int, ...] = ()

    @property
    def num_deepstack(self) -> int:
        return len(self.deepstack_layers)


@dataclass(frozen=True, kw_only=True)
class Qwen25VisionSpec(QwenVisionSpec):
    """The tower of Qwen2.5-VL (arXiv:2502.13923). In all layers but `full_layers`, a patch sees only those of its window, which
    has `window` rows of tokens."""

    has_gated_mlp = True

    kind: Literal["qwen2_5_vl"] = "qwen2_5_vl"
    window: int
    full_layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TransformersVisionSpec(VisionSpec):
    """A tower that the code of transformers computes, for a whole image at a time (models/transformers_fallback/tower.py).
    `config_json` is the whole config.json. An image has one row of `num_tokens` columns as its grid; its pixels are the arrays
    that transformers' processor returns (interface/packed_arrays.py). The sizes are those that config.json gives, and 0 where
    it gives none: they only say how much memory an image needs."""

    prefixes = tuple(
        f"{outer}{name}"
        for outer in ("model.", "")
        for name in (
            *("vision_tower.", "vision_model.", "vision_encoder.", "vision_projection.", "visual.", "qwen2_model."),
            *("multi_modal_projector.", "connector.", "aligner.", "projector.", "high_res_vision_", "image_newline"),
            *("visual_embeddings_table.",),
        )
    )

    kind: Literal["transformers"] = "transformers"
    image_token_id: int
    out_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    merge_size: int = 2
    config_json: str

    @property
    def patch_features(self) -> int:
        return 0

    def num_tokens(self, grid: Grid) -> int:
        return grid[2]

    def grid_problem(self, grid: Grid) -> str | None:
        return None

    def num_slices(self, grid: Grid) -> int:
        return 1


# kind -> specification: what a message may have as `ModelArchitecture.vision` (interface/codec.py)
VISION_KINDS: dict[str, type[VisionSpec]] = {
    each.kind: each
    for each in (
        Idefics3VisionSpec,
        Qwen3VisionSpec,
        Qwen25VisionSpec,
        Gemma3VisionSpec,
        Gemma4VisionSpec,
        TransformersVisionSpec,
    )
}


def max_image_tokens(max_model_len: int) -> int:
    """Of how many tokens a rank keeps the embeddings of images, and how many tokens an image has at most."""
    return min(max_model_len, _MOST_IMAGE_TOKENS)
