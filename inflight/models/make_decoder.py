"""`make_decoder`: the decoder of an architecture, or its layer that predicts drafts."""

from inflight.config.architecture import ModelArchitecture
from inflight.config.pipeline_stage import PipelineStage
from inflight.layers.context import LayerContext
from inflight.models.captured_layers import CapturingDecoder
from inflight.models.causal_lm import CausalLM
from inflight.models.decoder import DecoderForCausalLM
from inflight.models.drafting_layer import DraftingLayer
from inflight.models.eagle3_layer import Eagle3Drafter


def make_decoder(
    architecture: ModelArchitecture, served: CausalLM | None, context: LayerContext, stage: PipelineStage
) -> CausalLM:
    """`served`: see `DraftingLayer`; other models do not need it."""
    spec = architecture.hidden_inputs
    if spec is None:
        decoder = CapturingDecoder if architecture.captured else DecoderForCausalLM
        return decoder(architecture, context, stage)
    assert served is None or isinstance(served, DecoderForCausalLM), "it was checked at start"
    drafter = Eagle3Drafter if spec.captured else DraftingLayer
    return drafter(architecture, context, served)
