"""`ImagesReader`: computes the embeddings of images, and puts them in the places of the placeholder tokens."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.config.pipeline_stage import PipelineStage
from inflight.config.vision import max_image_tokens
from inflight.interface.images import ImagesPart
from inflight.interface.parts import EncoderInput, RequestPart
from inflight.interface.request import Int32Array
from inflight.interface.step import SchedulerOutput
from inflight.layers.attention import Attention
from inflight.models.causal_lm import CausalLM, ImageEmbeddings, ModelStep
from inflight.models.vision.tower import EncoderState, RefusedImageError, VisionTower
from inflight.worker.input_batch import InputBatch, StepInputs
from inflight.worker.parts.image_positions import positions_of
from inflight.worker.parts.reader import NO_ROW, PartReader, PartWork, prompt_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderWork(PartWork):
    """What a step computes of embeddings, before its rows."""

    evictions: tuple[bytes, ...]
    inputs: tuple[EncoderInput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesWork(PartWork):
    """`pieces`: (digest, first, count, token) for each image of the row: `count` of its embeddings, from `first` on, are those
    of the row's tokens from `token` on. `positions` is int32 [3, num_tokens] in a model whose positions have three rows. In a
    model whose layers see whole images, `arrays` has what `ends_of` returns."""

    pieces: tuple[tuple[bytes, int, int, int], ...]
    positions: Int32Array | None


def encoder_cache_bytes(model: CausalLM, max_model_len: int) -> int:
    """What the embeddings of images need, and a layer of the tower for the largest image."""
    if model.tower is None:
        return 0
    spec = model.tower.spec
    num_tokens = max_image_tokens(max_model_len)
    cached = num_tokens * spec.out_size * (1 + spec.num_deepstack)
    # the residual stream, its norm, queries, keys, values, a copy of the last two, the attention's result, and the MLP
    working = spec.most_patches(num_tokens) * (8 * spec.hidden_size + 2 * spec.mlp_size)
    return (cached + working) * model.tower.dtype.itemsize


class ImagesReader(PartReader):
    """The embeddings and the images that are being encoded belong to the compute thread. The scheduler has decided which there
    are, and all ranks of the first stage compute the same. The ranks of other stages need only the positions, and how far each
    token sees."""

    kind = "images"
    reads_hidden = False

    def __init__(self) -> None:
        super().__init__()
        self._tower: VisionTower | None = None  # only the first stage has it
        self._sees_whole_images = False  # whether a layer of this stage does
        self._states: dict[bytes, EncoderState] = {}
        self._embeddings: dict[bytes, Tensor] = {}

    @staticmethod
    def is_on(stage: PipelineStage) -> bool:
        return True

    def bind(self, model: CausalLM) -> None:
        self._tower = model.tower
        users = model.cache_users()
        self._sees_whole_images = any(isinstance(user, Attention) and user.params.sees_whole_images for user in users)

    def prepare(self, plan: SchedulerOutput, inputs: StepInputs, batch: InputBatch) -> Iterator[PartWork]:
        if plan.encoder_inputs and self._tower is not None:
            yield EncoderWork(
                reader=self,
                part=_NO_IMAGES,
                row=NO_ROW,
                slot=-1,
                first_token=0,
                start=0,
                num_tokens=0,
                evictions=plan.encoder_evictions,
                inputs=plan.encoder_inputs,
            )
        for row, part in prompt_rows(plan, inputs, batch, self.parts):
            assert isinstance(part, ImagesPart)
            stop = row.start + row.num_tokens
            pieces = []
            for image in part.images if self._tower is not None else ():
                first, last = max(image.start, row.start), min(image.stop, stop)
                if first < last:
                    pieces.append((image.digest, first - image.start, last - first, first - row.start))
            positions = None
            if part.position_merge is not None and part.images:
                positions = positions_of(part, row.start, stop)
            ends = ends_of(part, row.start, stop) if self._sees_whole_images else None
            if pieces or positions is not None or ends is not None:
                yield ImagesWork(
                    reader=self,
                    part=part,
                    pieces=tuple(pieces),
                    positions=positions,
                    arrays=() if ends is None else (ends,),
                    **row._asdict(),
                )

    def extend(self, step: ModelStep, work: PartWork, arrays: Sequence[Tensor]) -> ModelStep:
        if isinstance(work, EncoderWork):
            self._encode(work)
            return step
        assert isinstance(work, ImagesWork)
        device = step.positions.device
        if work.positions is not None:
            positions = step.positions
            if positions.dim() == 1:
                positions = positions.expand(3, -1).contiguous()
            new = torch.from_numpy(work.positions).to(device, positions.dtype)
            positions[:, work.first_token : work.first_token + work.num_tokens] = new
            step = step._replace(positions=positions)
        for ends in arrays:
            metadata = tuple(each.with_ends(work.first_token, ends) for each in step.attn_metadata)
            step = step._replace(attn_metadata=metadata)
        if work.pieces:
            rows = [
                torch.arange(count, dtype=torch.int64, device=device) + (work.first_token + token)
                for _, _, count, token in work.pieces
            ]
            vectors = [self._embeddings[digest][first : first + count] for digest, first, count, _ in work.pieces]
            if step.images is not None:
                rows, vectors = [step.images.rows, *rows], [step.images.vectors, *vectors]
            step = step._replace(images=ImageEmbeddings(torch.cat(rows), torch.cat(vectors)))
        return step

    def _encode(self, work: EncoderWork) -> None:
        tower = self._tower
        assert tower is not None
        for digest in work.evictions:
            self._states.pop(digest, None)
            self._embeddings.pop(digest, None)
        for each in work.inputs:
            if each.part is not None:
                assert isinstance(each.part, ImagesPart)
                (image,) = each.part.images
                # a copy, because the array may be one that must not be written to
                pixels = torch.tensor(np.ascontiguousarray(image.pixels), dtype=torch.float32, device="cpu")
                self._states[each.digest] = tower.begin(pixels, image.grid)
            state = self._states[each.digest]
            try:
                tower.advance(state, each.num_slices)
            except RefusedImageError as error:
                logger.info("%s", error, exc_info=True)
                del self._states[each.digest]
                self._embeddings[each.digest] = tower.refuse(each.digest, str(error), state.grid)
                continue
            if state.layer == tower.spec.num_layers:
                self._embeddings[each.digest] = tower.finish(self._states.pop(each.digest))


def ends_of(part: ImagesPart, start: int, stop: int) -> Int32Array | None:
    """How far the tokens [start, stop) of the prompt see, int32 [stop - start]: those of an image up to its end, others up to
    themselves. None if none of them is of an image.

    Raises:
        AssertionError: an image ends behind `stop`, so that some of its keys are missing.
    """
    found = None
    for image in part.images:
        if image.start < stop and image.stop > start:
            assert image.stop <= stop, f"a step has the tokens [{start}, {stop}) of an image that ends at {image.stop}"
            if found is None:
                found = np.arange(start + 1, stop + 1, dtype=np.int32)
            found[max(image.start - start, 0) : image.stop - start] = image.stop
    return found


_NO_IMAGES: RequestPart = ImagesPart(images=())
