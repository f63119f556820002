"""`Pipeline`: one rank's links to the other pipeline stages, made at start-up and after each fault, and closed together."""

import torch

from inflight.config.engine import EngineConfig
from inflight.config.pipeline_stage import PipelineStage
from inflight.device.accelerator import Accelerator
from inflight.device.base import Device
from inflight.distributed.activation_link import ActivationLink, LinkSpec, agree
from inflight.distributed.device_stage_link import DeviceStageLink
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.stage_link import StageLink
from inflight.distributed.token_link import TokenReceiver, TokenSender
from inflight.distributed.world import World
from inflight.timeline import Timeline


class Pipeline:
    """The links connect ranks with the same tp_rank. Activations go to the next stage. Drawn tokens go from the last stage to
    the first or, in an engine with drafts, to all earlier stages.

    Attributes:
        stage: this rank's stage.
        link: sends and receives activations; None if there is only one stage.
        senders: each sends drawn tokens to one earlier stage. Only the last stage has senders.
        receiver: receives drawn tokens; None on stages that receive none.
    """

    def __init__(
        self, config: EngineConfig, stage: PipelineStage, world: World, device: Device, timeline: Timeline
    ) -> None:
        self.stage = stage
        layout = world.layout
        tp_rank = world.tp_rank
        pp_rank = world.pp_rank
        self.link: ActivationLink | None = None
        self.senders: tuple[TokenSender, ...] = ()
        self.receiver: TokenReceiver | None = None
        if layout.pipeline_parallel_size == 1:
            return
        spec = LinkSpec(
            hidden_size=config.model.architecture.hidden_size,
            dtype=getattr(torch, config.model.dtype),
            max_num_tokens=config.scheduler.max_num_batched_tokens,
            tensor_parallel_size=layout.tensor_parallel_size,
            num_captured=len(config.model.architecture.captured),
        )
        self.link = _link(spec, stage, world, device, timeline)
        last = layout.pipeline_parallel_size - 1
        k = config.speculative.num_speculative_tokens if config.speculative else 0
        receivers = range(last if k else 1)
        if stage.is_last:
            channels = [world.channel(layout.rank(tp_rank, pp_rank), "tokens") for pp_rank in receivers]
            self.senders = tuple(map(TokenSender, channels))
        elif pp_rank in receivers:
            self.receiver = TokenReceiver(world.channel(layout.rank(tp_rank, last), "tokens"), width=2 * k + 1)

    def close(self) -> None:
        """End the links' threads. A thread that waits for a link gets an error. Idempotent."""
        for part in (self.link, *self.senders, self.receiver):
            if part is not None:
                part.close()


def _link(spec: LinkSpec, stage: PipelineStage, world: World, device: Device, timeline: Timeline) -> ActivationLink:
    """Make the link to the previous and the next stage. All ranks open their channels in the same order, because the two ends
    of a channel wait for each other."""
    layout = world.layout
    tp_rank = world.tp_rank
    pp_rank = world.pp_rank
    previous = None if stage.is_first else layout.rank(tp_rank, pp_rank - 1)
    next_ = None if stage.is_last else layout.rank(tp_rank, pp_rank + 1)
    before = None if previous is None else world.channel(previous, "activations")
    after = None if next_ is None else world.channel(next_, "activations")
    if not isinstance(device, Accelerator):
        template = IntermediateTensors.template(spec.hidden_size, spec.dtype, device.torch_device, spec.num_captured)
        group = world.tensor_parallel_group("link")
        return StageLink(spec, template, group, timeline, before=before, after=after)
    agree(spec, before, after)
    return DeviceStageLink(
        spec,
        device,
        before=None if previous is None else world.device_channel(previous, "activations"),
        after=None if next_ is None else world.device_channel(next_, "activations"),
        group=world.tensor_parallel_group("link"),
    )
