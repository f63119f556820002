"""`ExpertArgs`: the arguments of the engine about layers with experts, a part of `EngineArgs`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

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

    def expert_problems(self) -> Iterator[str]:
        """What is wrong with these arguments, beside the types of the values."""
        if self.all2all_backend is not None and not self.enable_expert_parallel:
            yield (
                f"all2all_backend={self.all2all_backend!r} without enable_expert_parallel: no rank has experts that another "
                "one needs; give enable_expert_parallel, too, or leave it out"
            )
