"""`ExpertArgs`: the arguments of the engine about layers with experts, a part of `EngineArgs`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from inflight.config.expert_parallel import ALL2ALL_BACKENDS
from inflight.setting import setting

_parallel = partial(setting, group="Parallel")


@dataclass(frozen=True, kw_only=True)
class ExpertArgs:
    """None leaves the choice to the engine."""

    enable_expert_parallel: bool = _parallel(
        False,
        "Give each rank whole experts of a layer, but not all of them, instead of a part of every expert. CPUs only.",
        short="-ep",
    )
    all2all_backend: str | None = _parallel(
        None,
        "How ranks with different experts exchange tokens: through memory that they share, or by collectives, which needs more "
        "copies. Default: shared_memory if all of them are on one machine.",
        choices=(None, *ALL2ALL_BACKENDS),
        metavar="|".join(ALL2ALL_BACKENDS),
    )

    enable_eplb: bool = _parallel(
        False,
        "Copy busy experts to ranks that have less to do, while the engine serves (expert parallel load balancing). For "
        "replicas with --enable-expert-parallel.",
    )
    eplb_config: Mapping[str, Any] | None = _parallel(  # Any: `resolve_eplb` checks the values
        None,
        "How busy experts are copied, as JSON: window_size (steps whose work counts; default 1000), step_interval (steps "
        "between two decisions; default 3000), num_redundant_experts (places for copies in each layer; default: the number of "
        "ranks), use_async (copy beside the steps; default true), log_balancedness (default false). "
        "Example: '{\"step_interval\": 500}'.",
    )

    def expert_problems(self) -> Iterator[str]:
        """What is wrong with these arguments, beside the types of the values."""
        if self.all2all_backend is not None and not self.enable_expert_parallel:
            yield (
                f"all2all_backend={self.all2all_backend!r} without enable_expert_parallel: no rank has experts that another "
                "one needs; give enable_expert_parallel, too, or leave it out"
            )
        if self.enable_eplb and not self.enable_expert_parallel:
            yield (
                "enable_eplb=True with enable_expert_parallel=False: each rank has a part of every expert, so no rank is "
                "busier than another one; give enable_expert_parallel, too, or leave enable_eplb out"
            )
        if self.eplb_config is not None and not self.enable_eplb:
            yield f"eplb_config={dict(self.eplb_config)!r} with enable_eplb=False: give enable_eplb, too, or leave it out"
