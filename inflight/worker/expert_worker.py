"""`ExpertWorker`: the worker of a rank whose replica divides the experts with other replicas (engine/lockstep/).

The ranks of all replicas run the same steps. In a step without rows this rank computes its experts for the rows of others.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from inflight.config.expert_parallel import SHARED_MEMORY, expert_room
from inflight.distributed.expert_parallel import DividesExperts
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.replica_experts import ReplicaExperts
from inflight.errors import PeerError
from inflight.interface.step import GrammarOutput, SchedulerOutput
from inflight.worker.expert_balance.balancer import ExpertBalancer
from inflight.worker.model_input import DrawnStep, ForwardOutput, ModelInput
from inflight.worker.model_runner import ModelRunner
from inflight.worker.runner import AnyRunner
from inflight.worker.runner_base import RankParts
from inflight.worker.worker import Worker


class ExpertWorker(Worker):
    def _join_experts(self) -> ReplicaExperts:
        parallel = self._config.parallel
        self._experts = ReplicaExperts(
            self._tp,
            expert_room(self._config.model.architecture, self._tp.size),
            num_replicas=len(parallel.replicas),
            replica=parallel.replica_index,
            num_places=0 if parallel.eplb is None else parallel.eplb.num_redundant_experts or 0,
            shares_memory=parallel.all2all_backend == SHARED_MEMORY,
        )
        self._experts.connect(self._tp.collectives)
        return self._experts

    def _runner_class(self) -> type[AnyRunner]:
        return ExpertRunner

    def listen_for_experts(self) -> tuple[str, int]:
        """Listen for the ranks of other replicas. Returns the address."""
        return self._experts.listen()

    def join_experts(self, token: bytes, addresses: Sequence[tuple[str, int]]) -> None:
        """Compute steps together with the ranks of all replicas. See `ReplicaExperts.meet`."""
        self._experts.meet(
            token, [(host, port) for host, port in addresses], self._config.execute_model_timeout_seconds
        )
        self._balancer.begin(self._experts.channels)

    def take_expert_counts(self) -> tuple[int, ...] | None:
        """The fields of `ExpertBalancer.take_counts`. Called beside the steps."""
        counts = self._balancer.take_counts()
        return None if counts is None else astuple(counts)

    @property
    def _balancer(self) -> ExpertBalancer:
        runner = self.runner
        assert isinstance(runner, ExpertRunner)
        return runner.balancer

    def execute_dummy_batch(self) -> None:
        """It is no step of the other replicas, so this rank computes it alone."""
        with self._experts.alone():
            super().execute_dummy_batch()

    def is_waiting(self) -> bool:
        return super().is_waiting() or self._experts.is_waiting or self._balancer.is_waiting

    def leave_groups(self, reason: str) -> None:
        super().leave_groups(reason)
        self._experts.leave()

    def shutdown(self) -> None:
        self._world.close("it was shut down")
        self._experts.leave()
        if self._runner is not None:
            self._balancer.end()
        super().shutdown()


@dataclass(frozen=True, slots=True)
class _NoInputs:
    drawn_in_step: int = -1  # no step draws an input


@dataclass(frozen=True, slots=True)
class IdleInput:
    """The input of a step without rows."""

    plan: SchedulerOutput
    inputs: _NoInputs = _NoInputs()


class ExpertRunner(ModelRunner):
    """Runs steps without rows, too."""

    def __init__(self, parts: RankParts) -> None:
        super().__init__(parts)
        self._mixtures = [each for each in parts.model.modules() if isinstance(each, DividesExperts)]
        self.balancer = ExpertBalancer(self._mixtures, parts.config.parallel.eplb)

    def prepare_inputs(self, plan: SchedulerOutput) -> ModelInput | IdleInput:  # type: ignore[override]
        return super().prepare_inputs(plan) if len(plan.slots) else IdleInput(plan)

    def execute_model(  # type: ignore[override]
        self, model_input: ModelInput | IdleInput, intermediate: IntermediateTensors | None = None
    ) -> ForwardOutput | IntermediateTensors | None:
        try:
            self.balancer.before_step()
            if not isinstance(model_input, IdleInput):
                return super().execute_model(model_input, intermediate)
            with self._timeline.span(model_input.plan.step_id, "forward"):
                for each in self._mixtures:
                    each.compute_for_others()
            return None
        except PeerError as error:  # its ranks are not those of this engine alone
            raise ConnectionError(f"the ranks of all replicas have stopped this step: {error}") from None

    def sample(
        self,
        model_input: ModelInput | IdleInput,
        forward: ForwardOutput | IntermediateTensors | None,
        grammar_output: GrammarOutput | None = None,
    ) -> DrawnStep:
        if isinstance(model_input, IdleInput) or forward is None:
            return DrawnStep(model_input.plan.step_id)
        return super().sample(model_input, forward, grammar_output)
