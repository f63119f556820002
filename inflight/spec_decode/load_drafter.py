"""`load_drafter`: the model that writes drafts, on the rank that draws."""

from collections.abc import Callable

from inflight.attention.backend import AttentionBackend
from inflight.config.architecture import ModelArchitecture
from inflight.config.engine import EngineConfig
from inflight.config.pipeline_stage import PipelineStage
from inflight.device.base import Device
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.model_loader.loader import load_model
from inflight.model_loader.weight_size import WeightSizes
from inflight.models.causal_lm import CausalLM
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

    reads_hidden = config.draft_model.architecture.hidden_inputs is not None
    model = load_model(
        config.draft_model,
        device=device.torch_device,
        backend=backend,
        tp=TensorParallelGroup(),
        check_size=check,
        served=served if tp.size == 1 else None,
        later=None if reads_hidden else later,  # a layer is packed in no time
    )
    if not reads_hidden:
        share = sizes[0].whole / max(1, served_bytes)
        return DraftModel(model, config, backend=backend, device=device, share_of_step=share)
    share = min(
        1.0, _weights_read(config.draft_model.architecture) / _weights_read(config.model.architecture) * tp.size
    )
    return HiddenStateDrafter(model, config, backend=backend, device=device, share_of_step=share)


def _weights_read(model: ModelArchitecture) -> float:
    """About how many weights a step of one token reads / the hidden size."""
    joined = 0 if model.hidden_inputs is None else 2 * model.hidden_size
    return model.vocab_size + joined + sum(each.mixer.num_features + each.mlp.num_features for each in model.layers)
