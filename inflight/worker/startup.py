"""Sets up a rank before it loads the model: compute threads on its cores, and a connection to the other ranks."""

import logging
import os
import threading
from collections.abc import Sequence
from functools import partial

import torch

from inflight.config.architecture import TRANSFORMERS
from inflight.config.cpu_binding import AUTO, cores_of_rank
from inflight.config.engine import EngineConfig
from inflight.config.ranks import Place
from inflight.device.base import Device
from inflight.distributed.process_world import ProcessWorld
from inflight.distributed.thread_world import ThreadWorlds
from inflight.distributed.world import LoneWorld, World
from inflight.errors import ConfigError
from inflight.interface.worker import Rendezvous
from inflight.kernels.cpu.library import bind_threads, load_kernels
from inflight.worker.core_binding import CoreBinding
from inflight.worker.core_sharing import Binding, CoreWatch, LeaderPlace
from inflight.worker.fewer_threads import ComputeThreads, FewerThreads, thread_ids

logger = logging.getLogger(__name__)

ELEMENTS_OF_A_THREAD = 1 << 15  # torch uses one more thread for each this many elements of a tensor


def start_threads(config: EngineConfig, place: Place, device: Device) -> CoreWatch | None:
    """Set the number of compute threads. On a CPU, start them, bind them to the rank's cores, and return their watch. The
    watch may change the binding, unless the configuration names the cores.

    Raises:
        ConfigError: the configuration names cores, but the C++ library that binds threads is not installed, or the operating
            system refuses to bind the threads.
    """
    device.set_num_threads(config.device.num_threads)
    if config.device.kind != "cpu":
        return None
    before = thread_ids()
    usable = sorted(os.sched_getaffinity(0))
    cores = _bind_threads(config, place, device, usable)
    compute_thread = device.submit(partial(_start_pool, config.device.num_threads)).result()
    threads = [compute_thread, *sorted(thread_ids() - before)]
    binding: Binding | None = None
    if cores is not None and config.device.threads_bind == AUTO:
        kernels = load_kernels()
        if len(cores) == 1:
            binding = CoreBinding(compute_thread, cores[0], usable)
        elif config.model.architecture.implementation == TRANSFORMERS and kernels is not None:
            binding = FewerThreads(ComputeThreads(device, kernels, threads, cores))
        else:
            binding = LeaderPlace(compute_thread, cores[0], cores)
    return CoreWatch(threads, binding)


def _bind_threads(config: EngineConfig, place: Place, device: Device, usable: Sequence[int]) -> Sequence[int] | None:
    """Returns the core of each compute thread; None if they are not bound."""
    options = config.device
    cores = cores_of_rank(
        options.threads_bind,
        usable=usable,
        num_threads=options.num_threads,
        local_rank=place.local_rank,
        num_local_ranks=place.num_local_ranks,
    )
    kernels = load_kernels()
    if cores is not None and kernels is not None:
        try:
            device.submit(partial(bind_threads, kernels, cores)).result()
        except ConfigError as error:
            if options.threads_bind != AUTO:
                raise
            logger.warning("%s", error)
            # the compute thread may be bound to the first core already
            device.submit(partial(os.sched_setaffinity, 0, cores)).result()
            return None
        return cores
    if cores is not None and options.threads_bind != AUTO:
        raise ConfigError(
            f"cpu_threads_bind={options.threads_bind!r} needs the C++ kernels, which are not installed: give 'off' or 'auto'"
        )
    return None


def _start_pool(num_threads: int) -> int:
    """Let torch compute with all threads of the calling thread's pool. Returns the id of the calling thread."""
    torch.zeros(num_threads * ELEMENTS_OF_A_THREAD, dtype=torch.float32, device="cpu").add_(1)
    return threading.get_native_id()


def join_world(config: EngineConfig, rank: int, rendezvous: Rendezvous | ThreadWorlds | None, device: Device) -> World:
    """Connect to the other ranks.

    Raises:
        ConfigError, ConnectionError: the ranks could not connect to each other.
    """
    layout = config.parallel.layout
    if isinstance(rendezvous, ThreadWorlds):
        return rendezvous.of(rank)
    if rendezvous is not None and layout.world_size > 1:
        return ProcessWorld(layout, rank, rendezvous, device.torch_device)
    assert layout.world_size == 1, f"{layout.world_size} ranks need a rendezvous"
    return LoneWorld()
