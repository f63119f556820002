"""`detect_machine`: finds, without importing torch, the facts about this machine that the defaults of options depend on."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from inflight import envs
from inflight.config import openmp
from inflight.config.control_groups import cpu_quota
from inflight.config.cpu_binding import AUTO
from inflight.config.cuda_driver import CudaFacts, Gpu, Version, read_cuda_facts, to_version
from inflight.config.free_memory import available_bytes
from inflight.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_COMPUTE_CAPABILITY = (8, 0)  # Ampere, the first with bfloat16 tensor cores and asynchronous copies to shared memory


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts about this machine that the values of options may depend on."""

    device: str  # "cpu" | "cuda"
    num_cores: int  # cores that the compute threads of all ranks together may use
    dtypes: tuple[str, ...]  # the dtypes in which the device can compute
    usable_cores: tuple[int, ...] = ()  # the cores that this process may run on, ascending
    threads_bind: str = AUTO  # the environment's value of the option `cpu_threads_bind`
    free_host_bytes: int | None = None  # the host memory that is free now
    gpus: tuple[Gpu, ...] = ()  # the GPUs that ranks may run on; rank 0 of this node gets the first

    @property
    def compute_capability(self) -> Version:
        """The compute capability of the oldest GPU; (0, 0) if there is no GPU."""
        return min((gpu.compute_capability for gpu in self.gpus), default=(0, 0))


def detect_machine(device: str, *, read_facts: Callable[[], CudaFacts] = read_cuda_facts) -> Machine:
    """`device`: "cuda", "cpu" or "auto", which means GPUs if they can be used and otherwise the CPU.

    Raises:
        ConfigError: `device` is "cuda", but there is no GPU, or the GPU, its driver or a package is missing or too old.
    """
    assert device in ("auto", "cpu", "cuda"), device
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if device != "cpu":
        try:
            facts = read_facts()
            return Machine(
                device="cuda",
                num_cores=_num_cores(cores),
                dtypes=("bfloat16", "float16", "float32"),
                usable_cores=cores,
                free_host_bytes=available_bytes(),
                gpus=_usable_gpus(facts),
            )
        except ConfigError as error:
            if device == "cuda":
                raise ConfigError(f"device='cuda', but {error}") from error
            logger.debug("device='auto' is the CPU: %s", error)
    openmp.tell_ignored()
    # float16 is left out, because processors without float16 arithmetic emulate it slowly
    return Machine(
        device="cpu",
        num_cores=_num_cores(cores),
        dtypes=("bfloat16", "float32"),
        usable_cores=cores,
        free_host_bytes=available_bytes(),
        threads_bind=envs.cpu_threads_bind(),
    )


def _usable_gpus(facts: CudaFacts) -> tuple[Gpu, ...]:
    """The GPUs that come before the first too old GPU in the driver's order.

    Raises:
        ConfigError: no GPU can be used. The caller puts "device='cuda', but" before the message.
    """
    usable = tuple(takewhile(lambda gpu: gpu.compute_capability >= MIN_COMPUTE_CAPABILITY, facts.gpus))
    if not usable:
        gpu = facts.gpus[0]
        raise ConfigError(
            f"GPU 0, {gpu.name}, has compute capability {to_version(gpu.compute_capability)}, and at least "
            f"{to_version(MIN_COMPUTE_CAPABILITY)} (Ampere, 2020) is needed; choose a newer one with CUDA_VISIBLE_DEVICES, or "
            "give device='cpu'"
        )
    if facts.torch_cuda is None:
        raise ConfigError(
            "the torch that is installed is a build without CUDA; install a build with CUDA, for CUDA "
            f"{facts.driver[0]} at most (https://pytorch.org/get-started), or give device='cpu'"
        )
    # a driver supports all minor versions of its own major version, and all older major versions
    if facts.driver[0] < facts.torch_cuda[0]:
        raise ConfigError(
            f"the driver supports CUDA {to_version(facts.driver)} at most, but torch was built for "
            f"{to_version(facts.torch_cuda)}: update the driver to one for CUDA {facts.torch_cuda[0]}, or install a torch for "
            f"CUDA {facts.driver[0]}"
        )
    if "triton" not in facts.packages:
        raise ConfigError(
            "the engine's GPU kernels need the package triton: pip install triton, in the version that torch requires"
        )
    return usable


def _num_cores(usable: Sequence[int]) -> int:
    """How many threads can run at once: the number of `usable` cores, or fewer if a quota of processor time or the variables
    of OpenMP allow fewer. A quota is rounded to the nearest whole number, for example 1.5 cores to two threads: when they have
    used up the quota, the system stops both until the next period, but they compute more than one thread that is never stopped.
    With a quota of 1.25 cores, two threads decode no faster than one (docs/benchmarks.md)."""
    quota = cpu_quota()
    wanted = openmp.max_threads()
    limits = [len(usable)]
    if quota is not None:
        limits.append(max(1, int(quota + 0.5)))
    if wanted is not None:
        limits.append(wanted)
    return min(limits)
