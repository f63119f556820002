"""`load_drafter`: the model that writes drafts, on the rank that draws."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from inflight.attention.backend import AttentionBackend
from inflight.config.architecture import ModelArchitecture
from inflight.config.engine import EngineConfig
from inflight.config.pipeline_stage import PipelineStage
from inflight.device.base import Device
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.model_loader.loader import load_model
from inflight.model_loader.weight_size import WeightSizes
from inflight.models.causal_lm import CausalLM
from inflight.models.drafting_layer import DraftingLayer
from inflight.spec_decode.draft_costs import num_weights_read
from inflight.spec_decode.draft_model import DraftModel
from inflight.spec_decode.hidden_state_drafter import HiddenStateDrafter
from inflight.spec_decode.model_drafter import ModelDrafter
from inflight.weight_cache.background import BackgroundWork


def load_drafter(
    config: EngineConfig,
    stage: PipelineStage,
    tp: TensorParallelGroup,
    backend: AttentionBackend,
    device: Device,
    *,
    served: CausalLM,
    served_bytes: int,
    check_size: Callable[[WeightSizes], None],
    later: BackgroundWork | None = None,
) -> ModelDrafter | None:
    """The whole drafter, on the rank that draws; None on other ranks, and in an engine without one.

    Args:
        served: this rank's part of the served model, with weights.
        served_bytes: of the weights of the served model, all stages together, on one of the ranks that share a layer.
        check_size, later: as of `load_model`.
    """
    if config.draft_model is None or not stage.is_last or tp.rank > 0:
        return None
    sizes = list[WeightSizes]()

    def check(size: WeightSizes) -> None:
        sizes.append(size)
        check_size(size)

    load = partial(load_model, device=device.torch_device, backend=backend, tp=TensorParallelGroup(), check_size=check)
    architecture = config.draft_model.architecture
    if architecture.hidden_inputs is None:
        draft_model = load(config.draft_model, later=later)
        share = sizes[0].whole / max(1, served_bytes)
        return DraftModel(draft_model, config, backend=backend, device=device, share_of_step=share)
    ends: CausalLM | None = None
    if not (architecture.hidden_inputs.has_embedding and architecture.hidden_inputs.head_size):
        ends = served if tp.size == 1 and stage.is_first else load(replace(config.model, architecture=_ends(config)))
    layer = load(config.draft_model, served=ends)  # it is packed in no time
    assert isinstance(layer, DraftingLayer)
    if config.draft_model.load_format != "dummy":
        layer.read_targets(config.draft_model.folder)
    share = min(1.0, num_weights_read(architecture) / num_weights_read(config.model.architecture) * tp.size)
    return HiddenStateDrafter(layer, config, backend=backend, device=device, share_of_step=share)


def _ends(config: EngineConfig) -> ModelArchitecture:
    """The embedding and the head of the served model, without its layers. All tensors of the layers are left unread."""
    architecture = config.model.architecture
    return replace(architecture, layers=(), unread=("",), vision=None, token_inputs=None, mtp=None, captured=())
