"""`TransformersTower`: the part of a model of transformers that makes embeddings of images.

The model is built without its decoder. `_NoDecoder` stands there: it gets the embeddings that transformers' code gives to the
decoder, and these are the result. The embeddings of tokens that are not of an image come from the decoder's own table.

    arrays of the processor -> modules of transformers -> [num_tokens, hidden_size] -> _NoDecoder -> `finish`
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.modeling_outputs import MoeModelOutputWithPast

from inflight.config.vision import Grid, TransformersVisionSpec
from inflight.errors import CheckpointError, UnsupportedModelError
from inflight.interface.packed_arrays import unpack_arrays
from inflight.layers.context import LayerContext
from inflight.layers.weights import Loadable
from inflight.models.transformers_fallback.adapters import replace_module
from inflight.models.transformers_fallback.build import BUILDING, EmptyOnMeta, move
from inflight.models.transformers_fallback.default_dtype import DefaultDtype, float32_by_default
from inflight.models.transformers_fallback.weights import FallbackUnit, WeightPlan, missing_weights
from inflight.models.vision.tower import (
    Embed,
    EncoderState,
    RefusedImageError,
    VisionTower,
    hint_at_tower,
    tower_context,
)

# Modules beside the decoder that draw images (Janus)
_UNUSED = ("vqmodel", "generation_embeddings", "generation_aligner", "generation_head")
MAX_SHOWN = 300  # characters of an error of transformers
# In the errors of torch that have no class of their own: of its allocator on a CPU, of oneDNN, and of older calls of CUDA
_OF_THE_MACHINE = ("can't allocate memory", "could not create a primitive", "out of memory", "CUDA error")
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class _NoDecoder(nn.Module):
    """Stands for the decoder, and keeps the embeddings that it was given.

    Attributes:
        config: the decoder's.
        given: what the last call has brought.
    """

    def __init__(self, config: Any, embed: Embed) -> None:  # Any: a configuration of transformers
        super().__init__()
        self.config = config
        self._embed = embed
        self.given: Tensor | None = None

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        return self._embedded

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """token_ids: [1, num_tokens]."""
        ids = token_ids[0]
        return self._embed(ids, torch.zeros_like(ids), None)[None]

    def forward(
        self, *_: Any, inputs_embeds: Tensor, **__: Any
    ) -> MoeModelOutputWithPast:  # Any: each family has its own
        self.given = inputs_embeds
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class TransformersTower(VisionTower):
    """Every rank of the first stage computes whole images.

    Args:
        embed: of the decoder.

    Raises:
        UnsupportedModelError: transformers cannot build the model.
    """

    spec: TransformersVisionSpec

    def __init__(self, spec: TransformersVisionSpec, context: LayerContext, embed: Embed) -> None:
        context = tower_context(context)
        super().__init__(spec, context)
        self.blocks = nn.ModuleList()
        model = _build(spec, context)
        decoder = model.get_decoder()
        name = next(name for name, module in model.named_modules() if module is decoder)
        self._decoder = _NoDecoder(decoder.config, embed)
        replace_module(model, name, self._decoder)
        replace_module(model, "lm_head", nn.Identity())
        model.all_tied_weights_keys = {}
        base = model.base_model
        for each in _UNUSED:
            if hasattr(base, each):
                setattr(base, each, nn.Identity())
        base.get_input_embeddings = self._decoder.get_input_embeddings
        if base.config.model_type == "mistral3":
            # its code removes the first dimension of these features, which is that of the tokens if there is only one
            base.multi_modal_projector.register_forward_hook(lambda module, given, features: features[None])
        self._takes = _parameters(base)
        move(model, context)
        self._model = model.eval()
        self._plan: WeightPlan | None = None

    def read_names(self, stored: Mapping[str, tuple[int, ...]] | None) -> None:
        if stored is None:
            return
        of_tower = {name: shape for name, shape in stored.items() if name.startswith(self.spec.prefixes)}
        self._plan = WeightPlan(self._model, of_tower, lambda one, other: False)
        units = [("", FallbackUnit(self._model, "", (), self._plan))]
        if missing := missing_weights(units, self._plan, self._model):
            raise CheckpointError(f"the checkpoint lacks {', '.join(missing[:8])}{hint_at_tower([], self)}")

    def leaves_unread(self, name: str) -> bool:
        return self._plan is not None and name in self._plan.unread

    def load_units(self) -> list[tuple[str, Loadable]]:
        return [("", FallbackUnit(self._model, "", (), self._plan))]

    def begin(self, pixels: Tensor, grid: Grid) -> EncoderState:
        """pixels: float32 [n], as `pack_arrays` makes them."""
        return EncoderState(grid=grid, residual=pixels, segments=())

    def advance(self, state: EncoderState, num_slices: int) -> None:
        if state.layer == self.spec.num_layers or not num_slices:
            return
        arrays = unpack_arrays(state.residual.numpy())
        inputs = {
            name: self._on_device(torch.from_numpy(array)) for name, array in arrays.items() if name in self._takes
        }
        try:
            self.call(inputs)
        except Exception as error:
            if _is_of_the_machine(error):
                raise
            cause = f"{type(error).__name__}: {error}".partition("\n")[0][:MAX_SHOWN]
            raise RefusedImageError(
                f"the code of transformers for this model cannot compute the image ({cause}): send one of another size"
            ) from error
        assert self._decoder.given is not None
        state.features = [self._decoder.given[0]]
        self._decoder.given = None
        state.layer = self.spec.num_layers

    def call(self, inputs: dict[str, Tensor]) -> None:
        """Let transformers' code compute an image: `_NoDecoder` gets the embeddings."""
        with float32_by_default(), torch.no_grad():
            self._model.base_model(**inputs, use_cache=False)

    def finish(self, state: EncoderState) -> Tensor:
        (embeddings,) = state.features
        return embeddings.to(self.dtype)

    def _on_device(self, array: Tensor) -> Tensor:
        return array.to(self.device, self.dtype if array.dtype in _FLOATS else None)


def _build(spec: TransformersVisionSpec, context: LayerContext) -> PreTrainedModel:
    content = json.loads(spec.config_json)
    name = str(content["model_type"])
    try:
        with BUILDING, DefaultDtype(context.dtype), EmptyOnMeta():
            config = CONFIG_MAPPING[name].from_dict(content)
            model = AutoModelForImageTextToText.from_config(config, dtype=None)
    except (KeyError, ValueError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"config.json: transformers {transformers_version} cannot build the part for images of a model of the type "
            f"{name}: {error}; a newer transformers may, and language_model_only=True (--language-model-only) leaves it out"
        ) from error
    return cast("PreTrainedModel", model)


def _is_of_the_machine(error: Exception) -> bool:
    """Whether an error is not of the image that was computed: memory ran out, or the device or the system has failed."""
    if isinstance(error, MemoryError | OSError | ImportError | torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_THE_MACHINE)


def _parameters(model: nn.Module) -> frozenset[str]:
    """The names of the arguments of `forward`."""
    code = type(model).forward
    while hasattr(code, "__wrapped__"):
        code = code.__wrapped__
    return frozenset(code.__code__.co_varnames[: code.__code__.co_argcount + code.__code__.co_kwonlyargcount])
