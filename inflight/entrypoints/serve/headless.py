"""`run_headless`: runs replicas for a server on another machine, the head (engine/process/remote_replica.py has a drawing)."""

import asyncio
import logging
import secrets
import signal
from dataclasses import replace
from typing import Any

from inflight import envs
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.engine.process.engine_keeper import EngineKeeper
from inflight.engine.process.head_links import join_head
from inflight.engine.process.remote_replica import terms_of
from inflight.engine.start.model_files import resolve_config
from inflight.entrypoints.serve.terminal import ServerTerminal
from inflight.executor.node import MAX_CONNECT_SECONDS
from inflight.sockets import shown

logger = logging.getLogger(__name__)


def run_headless(args: EngineArgs) -> None:
    """Run the replicas of this machine until a signal comes. Call it in the main thread.

    Raises:
        ConfigError: the model cannot be used, or the head refuses a replica. No process was started.
        EngineError: the head does not answer, or a replica was given up. No process is left running.
    """
    terminal = ServerTerminal()
    envs.cluster_token()  # raises if there is none, before all weights are read
    config = resolve_config(args)
    head = args.data_parallel_address or "", args.data_parallel_rpc_port
    parallel = replace(config.parallel, head=head, terms=terms_of(args, config), headless=secrets.token_hex(8))
    config = replace(config, parallel=parallel)
    logger.info("replicas %s join the head at %s", ", ".join(map(str, args.replicas)), shown(*head))
    for replica in config.replicas():
        join_head(replica.parallel, frozenset(), MAX_CONNECT_SECONDS, is_trial=True).close()
    asyncio.run(_run(args, config, terminal))


async def _run(args: EngineArgs, config: EngineConfig, terminal: ServerTerminal) -> None:
    signalled = asyncio.Event()
    terminal.on_hangup(signalled.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    keepers = [EngineKeeper(args, replica) for replica in config.replicas()]
    try:
        for keeper in keepers:
            keeper.start()
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(keeper.failed()) for keeper in keepers]
        ends.append(asyncio.create_task(signalled.wait()))
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:  # with the engine cores the connections end, and the requests go on at other replicas
        await asyncio.gather(*(keeper.close() for keeper in keepers))
