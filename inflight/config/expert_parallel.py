"""Expert parallelism: which rank has which experts, and when it cannot be. See docs/moe.md."""

from dataclasses import dataclass, fields, replace
from typing import Protocol

from inflight.config.architecture import TRANSFORMERS, MlpSpec, ModelArchitecture
from inflight.config.experts import DenseAndMoeSpec, MoeSpec
from inflight.config.machine import Machine
from inflight.errors import ConfigError

SHARED_MEMORY = "shared_memory"
COLLECTIVES = "allgather_reducescatter"  # vLLM's name
ALL2ALL_BACKENDS = (SHARED_MEMORY, COLLECTIVES)


@dataclass(frozen=True)
class ExpertRoom:
    """The sizes that the rows of all layers with experts fit into.

    Attributes:
        choices_per_row: the chosen experts of a token, and the parts of the shared expert.
    """

    hidden_size: int
    choices_per_row: int


def experts_of(num_experts: int, rank: int, size: int) -> range:
    """The experts of one of `size` ranks: neighbours. The numbers of two ranks differ by at most one."""
    return range(num_experts * rank // size, num_experts * (rank + 1) // size)


def moe_of(mlp: MlpSpec) -> MoeSpec | None:
    """The mixture of experts in a layer, if it has one."""
    if isinstance(mlp, DenseAndMoeSpec):
        return mlp.moe
    return mlp if isinstance(mlp, MoeSpec) else None


def mixtures_of(architecture: ModelArchitecture) -> list[MoeSpec]:
    """The mixtures of a model, each once."""
    found = (moe_of(layer.mlp) for layer in architecture.layers)
    return [*dict.fromkeys(moe for moe in found if moe is not None)]


def expert_room(architecture: ModelArchitecture, tp_size: int) -> ExpertRoom:
    mixtures = mixtures_of(architecture)
    most = max(moe.router.top_k + (tp_size if moe.shared_size else 0) for moe in mixtures)
    return ExpertRoom(hidden_size=architecture.hidden_size, choices_per_row=most)


class _Args(Protocol):
    """What of `EngineArgs` is about experts."""

    @property
    def enable_expert_parallel(self) -> bool: ...

    @property
    def all2all_backend(self) -> str | None: ...

    @property
    def tensor_parallel_size(self) -> int: ...

    @property
    def pipeline_parallel_size(self) -> int: ...

    @property
    def data_parallel_size(self) -> int: ...

    @property
    def replicas(self) -> range: ...

    @property
    def nnodes(self) -> int: ...

    @property
    def distributed_executor_backend(self) -> str | None: ...


def choose_all2all_backend(args: _Args) -> str | None:
    """How ranks exchange tokens; None if each has a part of every expert."""
    return (args.all2all_backend or SHARED_MEMORY) if args.enable_expert_parallel else None


def is_in_lockstep(args: _Args) -> bool:
    """Whether replicas divide the experts among all their ranks."""
    return args.enable_expert_parallel and args.data_parallel_size > 1


def check_lockstep(args: _Args) -> None:
    """
    Raises:
        ConfigError: replicas are to divide the experts, but they cannot keep step.
    """
    if not is_in_lockstep(args):
        return
    given = f"enable_expert_parallel=True with data_parallel_size={args.data_parallel_size}"
    if len(args.replicas) != args.data_parallel_size:
        raise ConfigError(
            f"{given}: the replicas divide the experts among them through memory that they share, so all of them must run on "
            f"this machine and behind this server, but only {len(args.replicas)} of them would; leave the options "
            "data_parallel_rank, data_parallel_size_local, data_parallel_hybrid_lb and data_parallel_address out, or leave "
            "enable_expert_parallel out"
        )
    if args.pipeline_parallel_size > 1 or args.nnodes > 1:
        stages = f"pipeline_parallel_size={args.pipeline_parallel_size}"
        other = stages if args.pipeline_parallel_size > 1 else f"nnodes={args.nnodes}"
        raise ConfigError(
            f"{given} and {other}: replicas that divide the experts have one pipeline stage on one machine; leave one of "
            "these options out"
        )
    if args.distributed_executor_backend not in (None, "mp"):
        raise ConfigError(
            f"{given} and distributed_executor_backend={args.distributed_executor_backend!r}: the ranks of replicas that "
            "divide the experts are processes of this machine; give 'mp', or leave it out"
        )


def for_ranks(args: _Args, architecture: ModelArchitecture, machine: Machine) -> ModelArchitecture:
    """The architecture as the ranks divide it: with expert parallelism, the sizes of experts need not be divisible.

    Raises:
        ConfigError: see `check_expert_parallel`.
    """
    if not args.enable_expert_parallel:
        return architecture
    check_expert_parallel(architecture, args.tensor_parallel_size * args.data_parallel_size, machine.device)
    check_lockstep(args)
    return replace(
        architecture, layers=tuple(replace(layer, mlp=_undivided(layer.mlp)) for layer in architecture.layers)
    )


class _WholeExperts(MoeSpec):
    """A mixture whose experts are not divided. Its shared expert is."""

    def fits(self, tp_size: int) -> bool:
        return self.shared_size % tp_size == 0


def _undivided(mlp: MlpSpec) -> MlpSpec:
    if isinstance(mlp, DenseAndMoeSpec):
        return replace(mlp, moe=_whole_experts(mlp.moe))
    return _whole_experts(mlp) if isinstance(mlp, MoeSpec) else mlp


def _whole_experts(moe: MoeSpec) -> MoeSpec:
    return _WholeExperts(**{each.name: getattr(moe, each.name) for each in fields(moe)})


def check_expert_parallel(architecture: ModelArchitecture, num_ranks: int, device: str) -> None:
    """
    Raises:
        ConfigError: the experts of the model cannot be divided among so many ranks.
    """
    given = "enable_expert_parallel=True"
    if architecture.implementation == TRANSFORMERS:
        raise ConfigError(
            f"{given}: {architecture.name} is computed by transformers, whose experts stay on one rank; leave it out"
        )
    mixtures = mixtures_of(architecture)
    if not mixtures:
        raise ConfigError(
            f"{given}: {architecture.name} has no layers with experts (it is a dense model); leave it out"
        )
    if device != "cpu":
        raise ConfigError(
            f"{given} on {device}: whole experts are divided among ranks on CPUs only; leave it out, then each rank has a part "
            "of every expert"
        )
    if num_ranks == 1:
        raise ConfigError(
            f"{given} with one rank: there is no other rank that could have some of the experts; raise tensor_parallel_size or "
            "data_parallel_size, or leave it out"
        )
    fewest = min(moe.num_experts for moe in mixtures)
    if num_ranks > fewest:
        raise ConfigError(
            f"{given} with {num_ranks} ranks: {architecture.name} has only {fewest} experts in a layer, and each rank needs "
            "one; use fewer ranks, or leave it out"
        )
