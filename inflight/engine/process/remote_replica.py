"""`RemoteReplica`: a replica on another machine, which `inflight serve --headless` runs there (entrypoints/serve/headless.py).

    the head                                                        the other machine
    front end 0  <== TCP ======================================>    engine core
    front end 1  <== TCP ======================================>        "
    process with the keepers  <== TCP: a spare connection =====>        "

The engine core makes all connections, and has a spare one (head_links.py). If a front end has no connection to the replica, it
gets the spare one from `RemoteReplica`, and uses it like the socket to an engine core of its own machine. When a connection has
ended, because process, machine or link was lost, requests go on at other replicas, and the front end waits for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import replace

from inflight import envs
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.safetensors_file import digests
from inflight.engine.process.engine_keeper import EngineKeeper, FrontEnd
from inflight.engine.start.contents import weight_files
from inflight.errors import EngineDeadError
from inflight.hub import resolve_tokenizer_folder
from inflight.interface.start_up import Hello, ReplicaHello
from inflight.processes.acceptor import RETRY_SECONDS, Acceptor
from inflight.processes.streams import REPLACED_LINK_SILENCE_SECONDS, IoStream
from inflight.sockets import shown
from inflight.version import __version__

logger = logging.getLogger(__name__)

NUMBER_BYTES = 4  # of a front end
MAX_HELLO_BYTES = 2**16  # a replica's has a digest of each file of weights
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
AWAY_SECONDS = REPLACED_LINK_SILENCE_SECONDS  # a machine is away if it makes no spare connection for so long


class RemoteReplica:
    """Has the methods of an `EngineKeeper` that servers use. It is never given up: its machine may come back at any time.

    Attributes:
        state: "missing" until its machine has come, then "here" or "away".
        spare: the spare connection. None while the machine is away or makes another one.
    """

    has_ended = False

    def __init__(self, number: int, acceptor: RemoteReplicas) -> None:
        self.state = "missing"
        self.spare: IoStream | None = None
        self._number = number
        self._acceptor = acceptor
        self._front_ends: dict[int, FrontEnd] = {}
        self._num_front_ends = 0
        self._waiting: set[int] = set()  # front ends that have never had a connection
        self._gone: set[int] = set()  # front ends that can use none any more, because their processes have ended
        # the headless process that had the newest connection; until when no other one may take its place
        self._owner = ""
        self._owned_until = 0.0
        self._away: asyncio.TimerHandle | None = None  # runs while there is no spare connection

    def add(self, front_end: FrontEnd) -> int:
        """Like `EngineKeeper.add`. If the machine is away, the front end is told so, and need not wait for it."""
        number, self._num_front_ends = self._num_front_ends, self._num_front_ends + 1
        self._front_ends[number] = front_end
        self._waiting.add(number)
        if self.state == "away":
            self._fail_waiting()
        elif self.spare is not None:
            self._give(self.spare, number)
        return number

    def remove(self, number: int) -> None:
        del self._front_ends[number]
        self._waiting.discard(number)
        self._gone.discard(number)

    def start(self) -> None:
        self._acceptor.start()

    async def failed(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def close(self, grace_seconds: float = 0.0) -> None:
        """End the spare connection. The engine core looks for another head."""
        self._acceptor.close()
        self._stop_timer()
        if self.spare is not None:
            self.spare.close()

    def stop(self) -> None:
        self._stop_timer()

    def abandon(self) -> None:
        """Does nothing: when the event loop has ended, nobody answers the engine core, and it looks for another head."""

    def doubt_seconds(self, process: str) -> float:
        """How many seconds the headless process named `process` must wait, because another one had this replica until just now.
        If the engine core of that one lives, it connects again in this time. Zero or less: no wait."""
        if self.spare is None and self._owner != process:
            return self._owned_until - time.monotonic()
        return 0.0

    def take(self, spare: IoStream, linked: tuple[int, ...], process: str) -> None:
        """Give a new connection to a front end that has none (one that is not in `linked`). If all have one, it is the spare
        one."""
        spare.allowed = ()
        spare.on_end = self._lose
        self._stop_timer()
        self._owner = process
        self.spare = spare
        self.state = "here"
        for number in [each for each in self._front_ends if each not in {*linked, *self._gone}][:1]:
            self._give(spare, number)

    def _give(self, spare: IoStream, number: int) -> None:
        spare.send([number.to_bytes(NUMBER_BYTES)])
        try:
            taken = spare.detach()
        except OSError as error:  # no free descriptor
            logger.error("a connection of replica %d is lost: %s", self._number, error)
            spare.close()
        else:
            self._waiting.discard(number)
            if not self._front_ends[number].put(taken):
                self._gone.add(number)
        self._lose("")

    def _lose(self, _: str) -> None:
        """There is no spare connection. The engine core makes another one at once, if it lives."""
        self.spare = None
        self._owned_until = time.monotonic() + 2 * RETRY_SECONDS
        self._stop_timer()
        self._away = asyncio.get_running_loop().call_later(AWAY_SECONDS, self._record_absence)

    def _stop_timer(self) -> None:
        if self._away is not None:
            self._away.cancel()

    def _record_absence(self) -> None:
        self.state = "away"
        logger.warning(
            "replica %d has made no connection for %g s: %s", self._number, AWAY_SECONDS, self._acceptor.describe()
        )
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        for number in self._waiting:
            self._front_ends[number].fail(EngineDeadError("the machine of the replica is away"))
        self._waiting.clear()


class RemoteReplicas:
    """Listens for the replicas on other machines, and is their `Gatekeeper`. They are in `replicas`, by number.

    Raises:
        ConfigError: there is no token, or this machine cannot listen on the address.
    """

    place = "the head"

    def __init__(self, args: EngineArgs, config: EngineConfig, terms: dict[str, str]) -> None:
        address = args.data_parallel_address or "", args.data_parallel_rpc_port
        self._token = envs.cluster_token()
        self._terms = terms
        self._acceptor = Acceptor(
            asyncio.get_running_loop(),
            self,
            address,
            "data_parallel_address, data_parallel_rpc_port",
            max_silence_seconds=REPLACED_LINK_SILENCE_SECONDS,
            hello=(ReplicaHello, MAX_HELLO_BYTES),
        )
        self.replicas = {each: RemoteReplica(each, self) for each in args.served_replicas if each not in args.replicas}
        logger.info("%s waits for replicas of other machines: %s", shown(*address), self.describe())

    def describe(self) -> str:
        return ", ".join(f"{number} is {replica.state}" for number, replica in self.replicas.items())

    def start(self) -> None:
        self._acceptor.start()

    def close(self) -> None:
        self._acceptor.close()

    # -- `Gatekeeper` ----------------------------------------------------------------------------------------------------

    def token_of(self, number: int) -> str:
        return self._token

    def seconds_to_wait(self, hello: Hello) -> float:
        """Delays the answer to the trial of a new headless process until it is known whether an older process with this number
        lives. An engine core gets its answer at once, because it tries again after a refusal."""
        assert isinstance(hello, ReplicaHello)
        replica = self.replicas.get(hello.rank) if hello.is_trial else None
        return 0.0 if replica is None else replica.doubt_seconds(hello.process)

    def refusal(self, hello: Hello) -> str:
        assert isinstance(hello, ReplicaHello)
        ours = self._terms
        theirs = hello.terms
        replica = self.replicas.get(hello.rank)
        if names := sorted({name for name, _ in ours.items() ^ theirs.items()}):
            told = [f"{name} is {theirs.get(name)} at the replica, {ours.get(name)} at the head" for name in names]
            return f"{'; '.join(told)}; use the same model and options on all machines"
        if replica is None or replica.spare is not None or replica.doubt_seconds(hello.process) > 0:
            expected = f"{self.place} expects no new replica {hello.rank} ({self.describe()})"
            return f"{expected}; give each machine its own --data-parallel-start-rank, or end the other process first"
        return ""

    def join(self, hello: Hello, stream: IoStream, host: str) -> None:
        assert isinstance(hello, ReplicaHello)
        if hello.is_trial:
            stream.close()
            return
        before = self.describe()
        self.replicas[hello.rank].take(stream, hello.linked, hello.process)
        if self.describe() != before:
            logger.info("replica %d has come from %s: %s", hello.rank, host, self.describe())


Keeper = EngineKeeper | RemoteReplica


async def make_keepers(args: EngineArgs, config: EngineConfig) -> list[Keeper]:
    """Returns an object for each replica, in the order of their indices.

    Raises:
        ConfigError: see `RemoteReplicas`.
    """
    keepers: dict[int, Keeper] = {}
    if args.served_replicas != args.replicas:
        envs.cluster_token()  # raises if there is none, before all weights are read
        keepers |= RemoteReplicas(args, config, await asyncio.to_thread(terms_of, args, config)).replicas
    if config.parallel.is_in_lockstep:
        config = replace(config, parallel=replace(config.parallel, lockstep_secret=secrets.token_hex(32)))
    keepers |= {number: EngineKeeper(args, each) for number, each in zip(args.replicas, config.replicas(), strict=True)}
    return [keepers[number] for number in args.served_replicas]


def terms_of(args: EngineArgs, config: EngineConfig) -> dict[str, str]:
    """What must be the same on all machines, so that a request can go on at any replica with the same tokens: name -> value.
    Reads all weights if it has not read them before."""
    model, parallel = config.model, config.parallel
    tokenizer = model.folder if args.tokenizer is None else resolve_tokenizer_folder(args.tokenizer)
    drafting = {} if config.draft_model is None else digests(weight_files(config.draft_model))
    terms = {
        "the version of Inflight": __version__,
        "dtype": model.dtype,
        "config.json, quantization, kv_cache_dtype or seed": model.fingerprint,
        "max_model_len": model.max_model_len,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "block_size": config.cache.block_size,
        "speculative_config": config.speculative,
        "reasoning_end": config.reasoning_end,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "data_parallel_routing": parallel.routes_by_prefix,
        "device": config.device.kind,
    } | digests([*weight_files(model), *(file for name in _TOKENIZER_FILES for file in tokenizer.glob(name))])
    terms |= {f"draft model, {name}": value for name, value in drafting.items()}
    return {name: str(value) for name, value in terms.items()}
