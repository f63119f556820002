"""Sets up a rank before it loads the model: compute threads on its cores, and a connection to the other ranks."""

from __future__ import annotations

import logging
import os
import socket
import threading
from functools import partial

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
from inflight.worker.core_sharing import CoreBinding, waited_seconds

logger = logging.getLogger(__name__)


def start_threads(config: EngineConfig, place: Place, device: Device) -> CoreBinding | None:
    """Set the number of compute threads, and on a CPU bind them to the rank's cores. If the rank has one thread and was not
    told its core, the result may change the thread's binding.

    Raises:
        ConfigError: the configuration names cores, but the C++ library that binds threads is not installed, or the operating
            system refuses to bind the threads.
    """
    options = config.device
    device.set_num_threads(options.num_threads)
    if options.kind != "cpu":
        return None
    usable = sorted(os.sched_getaffinity(0))
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
        if options.threads_bind == AUTO and len(cores) == 1:
            thread_id = device.submit(threading.get_native_id).result()
            return CoreBinding(thread_id, cores[0], usable, partial(waited_seconds, thread_id))
    elif cores is not None and options.threads_bind != AUTO:
        raise ConfigError(
            f"cpu_threads_bind={options.threads_bind!r} needs the C++ kernels, which are not installed: give 'off' or 'auto'"
        )
    return None


def join_world(config: EngineConfig, rank: int, rendezvous: Rendezvous | ThreadWorlds | None, device: Device) -> World:
    """Connect to the other ranks.

    Raises:
        ConfigError, ConnectionError: the ranks could not connect to each other.
    """
    layout = config.parallel.layout
    if isinstance(rendezvous, ThreadWorlds):
        return rendezvous.of(rank)
    if rendezvous is not None and layout.world_size > 1:
        has_listener = rendezvous.addresses and rendezvous.listen_fd is not None
        listener = socket.socket(fileno=rendezvous.listen_fd) if has_listener else None
        return ProcessWorld(layout, rank, rendezvous, device.torch_device, listener)
    assert layout.world_size == 1, f"{layout.world_size} ranks need a rendezvous"
    return LoneWorld()
