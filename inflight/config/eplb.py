"""`EplbConfig`: copies of busy experts on other ranks, as vLLM's options --enable-eplb and --eplb-config name it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from inflight.config.architecture import ModelArchitecture
from inflight.config.expert_parallel import SHARED_MEMORY, mixtures_of
from inflight.config.json_option import from_json
from inflight.errors import ConfigError
from inflight.setting import setting

logger = logging.getLogger(__name__)

_OPTION = "eplb_config"


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """
    Attributes:
        window_size: the experts that were busy in so many of the last steps get copies.
        step_interval: after so many steps it is decided again which experts get copies.
        num_redundant_experts: places for copies in each layer, of all ranks together; None: one for each rank.
        use_async: copies come beside the steps. Otherwise the step after the decision waits for them.
        log_balancedness: log how evenly the ranks were busy, at each decision.
    """

    window_size: int = setting(1000, "Steps whose work counts.", bounds=(1, 2**31 - 1))
    step_interval: int = setting(3000, "Steps between two decisions.", bounds=(1, 2**31 - 1))
    num_redundant_experts: int | None = setting(None, "Places for copies in each layer.", bounds=(1, 65536))
    use_async: bool = setting(True, "Whether copies come beside the steps.")
    log_balancedness: bool = setting(False, "Whether it is logged how evenly the ranks were busy.")


class _Args(Protocol):
    @property
    def enable_eplb(self) -> bool: ...

    @property
    def eplb_config(self) -> Mapping[str, Any] | None: ...  # Any: checked here

    @property
    def tensor_parallel_size(self) -> int: ...

    @property
    def data_parallel_size(self) -> int: ...

    @property
    def all2all_backend(self) -> str | None: ...


def resolve_eplb(args: _Args, architecture: ModelArchitecture) -> EplbConfig | None:
    """None: no expert is copied. If `enable_eplb` is given, `enable_expert_parallel` is given, too, and `for_ranks` refuses a
    model without experts.

    Raises:
        ConfigError: a value out of bounds, or ranks that cannot copy experts.
    """
    counts = sorted({moe.num_experts for moe in mixtures_of(architecture)})
    if not args.enable_eplb or not counts:
        return None
    if args.data_parallel_size == 1:
        raise ConfigError(
            "enable_eplb=True with data_parallel_size=1: experts are copied only between the ranks of several replicas; "
            "raise data_parallel_size, or leave enable_eplb out"
        )
    if args.all2all_backend not in (None, SHARED_MEMORY):
        raise ConfigError(
            f"enable_eplb=True with all2all_backend={args.all2all_backend!r}: only with {SHARED_MEMORY!r} may several ranks "
            "have the same expert; leave one of the two options out"
        )
    given = args.eplb_config
    if isinstance(given, Mapping):
        known = {each.name for each in fields(EplbConfig)}
        if unknown := [str(name) for name in given if name not in known]:
            logger.warning("%s: %s has no meaning here, and is ignored", _OPTION, ", ".join(unknown))
        given = {name: value for name, value in given.items() if name in known}
    config = from_json(EplbConfig, _OPTION, given)
    num_ranks = args.tensor_parallel_size * args.data_parallel_size
    num_places = config.num_redundant_experts or num_ranks
    if len(counts) > 1:
        raise ConfigError(
            f"enable_eplb=True: {architecture.name} has layers with {counts[0]} and with {counts[-1]} experts, and copies need "
            "the same number in all layers; leave it out"
        )
    if num_places > counts[0] * (num_ranks - 1):
        raise ConfigError(
            f"{_OPTION}: num_redundant_experts={num_places}, but with {num_ranks} ranks and {counts[0]} experts in a layer "
            f"there are at most {counts[0] * (num_ranks - 1)} copies; lower it, or leave it out"
        )
    return replace(config, num_redundant_experts=num_places)
