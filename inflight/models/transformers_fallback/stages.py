"""`cut`: leaves one pipeline stage of a model. transformers' plan for pipelines says what is before and after the layers."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from inflight.config.pipeline_stage import PipelineStage
from inflight.errors import UnsupportedModelError
from inflight.models.transformers_fallback.adapters import replace_module


class _Skipped(nn.Module):
    """Stands for a layer of another stage. It keeps the layer's plain attributes, which decoders may read."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(layer).items() if not name.startswith("_")})

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:  # Any: each family has its own
        return hidden_states


def cut(model: PreTrainedModel, layers_name: str, layers: nn.ModuleList, stage: PipelineStage) -> nn.ModuleList:
    """Replaces the modules of other stages by modules without weights. Returns the layers of this stage.

    Raises:
        UnsupportedModelError: transformers has no plan to cut this model.
    """
    if stage.is_first and stage.is_last:
        return layers
    decoder_name, _, leaf = layers_name.rpartition(".")
    config = getattr(model.get_submodule(decoder_name), "config", None)
    steps = list(getattr(config, "base_model_pp_plan", None) or ())
    if leaf not in steps or len(layers) != stage.num_layers:
        raise UnsupportedModelError(
            f"{type(model).__name__}: transformers has no plan to cut it into stages; leave pipeline_parallel_size out"
        )
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    is_tied = head is not None and getattr(head, "weight", None) is embedding.weight
    index = steps.index(leaf)
    before = () if stage.is_first else steps[:index]
    after = () if stage.is_last else steps[index + 1 :]
    unused = [*before, *after]
    for name in unused:
        module = model.get_submodule(f"{decoder_name}.{name}" if decoder_name else name)
        if not (stage.is_last and is_tied and module is embedding):  # whose weights the head needs
            replace_module(model, f"{decoder_name}.{name}" if decoder_name else name, nn.Identity())
    if not stage.is_last and head is not None:
        replace_module(model, next(name for name, module in model.named_modules() if module is head), nn.Identity())
    for i, layer in enumerate(layers):
        if not stage.start <= i < stage.stop:
            layers[i] = _Skipped(layer)
    return nn.ModuleList(layers[stage.start : stage.stop])
