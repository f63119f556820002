"""`RankAcceptor`: lets the ranks of other nodes join node 0 (processes/acceptor.py). A rank that Ray has started has a
token of its own, which is valid once."""

from collections.abc import Callable

from inflight.config.engine import ParallelConfig
from inflight.interface.codec import MESSAGE_TYPES
from inflight.interface.framing import MAX_FRAME_BYTES
from inflight.interface.start_up import Hello
from inflight.processes.acceptor import Acceptor
from inflight.processes.io_thread import IoThread
from inflight.processes.streams import IoStream

MAX_HELLO_BYTES = 4096


class RankAcceptor:
    """The `Gatekeeper` of ranks: one connection for each expected rank. All methods but the constructor run in the I/O thread.

    Args:
        address, local_name, max_silence_seconds: see `Acceptor`.
        token: the token of all ranks that have none of their own.
        on_join: called for each rank that connects, with the rank and its stream.

    Raises:
        ConfigError: node 0 cannot listen on the address.
    """

    place = "node 0"

    def __init__(
        self,
        io: IoThread,
        address: tuple[str, int],
        local_name: str,
        parallel: ParallelConfig,
        token: str,
        max_silence_seconds: float,
        on_join: Callable[[int, IoStream], None],
    ) -> None:
        self._token = token
        self._world_size = parallel.world_size
        self._nnodes = parallel.nnodes
        self._tokens: dict[int, str] = {}  # of all ranks that were ever expected
        self._missing: set[int] = set()
        self._on_join = on_join
        self._acceptor = Acceptor(
            io.loop,
            self,
            address,
            "master_addr, master_port",
            local_name=local_name,
            max_silence_seconds=max_silence_seconds,
            hello=(Hello, MAX_HELLO_BYTES),
        )
        self.address = self._acceptor.address

    def start(self) -> None:
        self._acceptor.start()

    def close(self) -> None:
        """Stop accepting connections. Idempotent."""
        self._acceptor.close()

    def expect(self, rank: int, token: str = "") -> None:
        """Accept one connection of this rank, which has none now. `token`: its own token; "": it has the token of all ranks."""
        self._tokens[rank] = token or self._token
        self._missing.add(rank)

    @property
    def missing(self) -> set[int]:
        """The expected ranks that have not joined yet."""
        return set(self._missing)

    # -- `Gatekeeper` ----------------------------------------------------------------------------------------------------

    def token_of(self, number: int) -> str:
        return self._tokens.get(number, self._token)

    def seconds_to_wait(self, hello: Hello) -> float:
        return 0.0

    def refusal(self, hello: Hello) -> str:
        if (hello.world_size, hello.nnodes) != (self._world_size, self._nnodes):
            return (
                f"it was started for {hello.world_size} ranks on {hello.nnodes} nodes, but node 0 for {self._world_size} ranks "
                f"on {self._nnodes} nodes; use the same parallel sizes and --nnodes on all nodes"
            )
        if hello.rank not in self._tokens:
            return f"rank {hello.rank} does not belong to a node other than node 0; check the --node-rank"
        if hello.rank not in self._missing:
            return f"rank {hello.rank} has joined before, and lives; give each node a --node-rank of its own"
        return ""

    def join(self, hello: Hello, stream: IoStream, host: str) -> None:
        self._missing.remove(hello.rank)
        stream.allowed = MESSAGE_TYPES
        stream.allow_frames_of(MAX_FRAME_BYTES)
        self._on_join(hello.rank, stream)
