"""`PipelineStage`: the layers of one pipeline stage."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineStage:
    """Layers `[start, stop)` of a model. The first stage also has the embedding, the last stage the final norm and the head."""

    start: int
    stop: int
    num_layers: int  # of the whole model

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_layers


def pipeline_stage(layer_partition: tuple[int, ...], pp_rank: int) -> PipelineStage:
    """`layer_partition`: the number of layers of each stage."""
    start = sum(layer_partition[:pp_rank])
    return PipelineStage(start, start + layer_partition[pp_rank], sum(layer_partition))
