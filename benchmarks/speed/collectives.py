"""Collectives on CPUs: shared memory and TCP of our own, beside gloo, in turns.

    python -m benchmarks.collectives latency [--ranks 2] [--rounds 7]
    python -m benchmarks.collectives engine [--model qwen3-0.6b] [--models FOLDER] [--rounds 7]

`latency`: microseconds of one all_reduce, for ranks that do nothing else. `engine`: tokens per second of a model on two ranks
with one thread each, for one request that decodes and for a prompt. One engine serves all rounds: between them, its ranks
connect their group to the other collectives. Goal: ours are at least as fast as gloo.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, FileStore, ProcessGroupGloo

from benchmarks.shared.in_turns import compare_in_turns
from benchmarks.shared.models import add_model_arguments, model_folder
from benchmarks.shared.report import allow_slow_steps, emit, print_table
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.ranks import Place
from inflight.distributed.channel_collectives import ChannelCollectives
from inflight.distributed.collectives import Collectives
from inflight.distributed.exchange import Exchange
from inflight.distributed.shared_collectives import share_memory
from inflight.distributed.socket_channel import SocketMesh
from inflight.engine.request.model_info import make_input_processor
from inflight.engine.start.make_core import make_core
from inflight.engine.start.model_files import resolve_config
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.executor.multiproc import MultiprocExecutor
from inflight.interface.worker import TOKEN_BYTES, Rendezvous
from inflight.kernels.cpu.library import load_kernels
from inflight.sampling_params import SamplingParams
from inflight.sockets import listen
from inflight.worker.worker import Worker

TIMEOUT_SECONDS = 60.0
NUM_ROWS, WIDTH = (1, 8, 32, 512), 1024
ROUND_SECONDS = 0.05  # about as long as one case is measured in one round
PROMPT_TOKENS, DECODED_TOKENS = 1024, 48


class GlooCollectives(Collectives):
    """The collectives that Inflight used before it had its own."""

    def __init__(self, size: int, rank: int, file: str) -> None:
        self.size, self.rank = size, rank
        gloo_class: Any = ProcessGroupGloo  # Any: torch's stubs lack some of its members
        options = gloo_class._Options()
        options._timeout, options._threads = timedelta(seconds=TIMEOUT_SECONDS), 1
        options._devices = [gloo_class.create_device(hostname="127.0.0.1")]
        self._gloo = gloo_class(FileStore(file, size), rank, size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._gloo.allreduce([x], AllreduceOptions()).wait()
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._gloo._allgather_base(gathered, x.contiguous(), AllgatherOptions()).wait()
        return gathered if dim == 0 else torch.cat(gathered.chunk(self.size), dim=dim)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._gloo.broadcast([x], BroadcastOptions()).wait()
        return x

    def close(self) -> None:
        del self._gloo


# -- latency -------------------------------------------------------------------------------------------------------


def make_all(rank: int, listen_fd: int, ports: list[int], file: str) -> dict[str, Collectives]:
    listener, size = socket.socket(fileno=listen_fd), len(ports)
    mesh = SocketMesh(rank, listener, bytes(TOKEN_BYTES), lambda peer: ("127.0.0.1", ports[peer]), TIMEOUT_SECONDS)

    def connect(name: str) -> Exchange:
        peers = [peer for peer in range(size) if peer != rank]
        return Exchange(size, rank, {peer: mesh.connection(peer, name) for peer in peers}, TIMEOUT_SECONDS)

    shared = share_memory(connect("shared"), load_kernels())
    assert shared is not None, "this benchmark needs the C++ kernels"
    return {"gloo": GlooCollectives(size, rank, file), "shared": shared, "tcp": ChannelCollectives(connect("tcp"))}


def microseconds(collectives: Collectives, x: Tensor, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        collectives.all_reduce(x)
    return (time.perf_counter() - start) / count * 1e6


def run_rank(rank: int, rounds: int, listen_fd: int, ports: list[int], file: str) -> None:
    """All ranks agree on the number of calls, because rank 0 broadcasts it."""
    torch.set_num_threads(1)
    made = make_all(rank, listen_fd, ports, file)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows in NUM_ROWS:
            x = torch.zeros(num_rows, WIDTH, dtype=dtype)
            times: dict[str, list[float]] = {kind: [] for kind in made}
            for index in range(rounds + 1):
                for kind in list(made)[:: 1 if index % 2 else -1]:
                    estimate = microseconds(made[kind], x, 5)
                    wanted = torch.tensor([max(int(ROUND_SECONDS * 1e6 / estimate), 5)])
                    count = int(made["shared"].broadcast(wanted))
                    found = microseconds(made[kind], x, count)
                    if index:
                        times[kind].append(found)
            medians = {kind: statistics.median(each) for kind, each in times.items()}
            case = f"{num_rows} x {WIDTH} {str(dtype).removeprefix('torch.')}"
            if rank == 0:
                emit(benchmark="collectives", case=case, **{kind: round(each, 1) for kind, each in medians.items()})
            rows.append(
                [case, *(f"{each:.1f}" for each in medians.values()), f"{medians['gloo'] / medians['shared']:.1f}"]
            )
    if rank == 0:
        print_table(["all_reduce, us", *made, "gloo / shared"], rows)


def measure_latency(num_ranks: int, rounds: int) -> None:
    listeners = [listen("127.0.0.1", 0) for _ in range(num_ranks)]
    ports = [str(listener.getsockname()[1]) for listener in listeners]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.speed.collectives", "rank", str(rank), str(rounds),
                 str(listener.fileno()), f"{folder}/gloo", *ports],
                pass_fds=[listener.fileno()],
            )
            for rank, listener in enumerate(listeners)
        ]  # fmt: skip
        for listener in listeners:
            listener.close()
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


# -- engine --------------------------------------------------------------------------------------------------------


class ChangingWorker(Worker):
    """The real worker, whose ranks can change between the real collectives and gloo."""

    def __init__(self, config: EngineConfig, place: Place, rendezvous: Rendezvous) -> None:
        super().__init__(config, place, rendezvous)
        ours = self._tp.collectives
        assert ours is not None
        file = f"{tempfile.gettempdir()}/inflight-gloo-{rendezvous.addresses[0][1]}"
        self._kinds = {"shared": ours, "gloo": GlooCollectives(self._tp.size, self._tp.rank, file)}

    def use(self, kind: str) -> None:
        self._tp.connect(self._kinds[kind])


@contextmanager
def open_engine(folder: Path) -> Iterator[LLMEngine]:
    args = EngineArgs(
        model=str(folder),
        max_model_len=2 * PROMPT_TOKENS,
        max_num_seqs=4,
        max_num_batched_tokens=PROMPT_TOKENS,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        num_threads=1,
    )
    config = resolve_config(args)
    executor = MultiprocExecutor(config, "benchmarks.speed.collectives:ChangingWorker")
    try:
        engine = LLMEngine(make_core(config, executor), executor, make_input_processor(args, config))
    except BaseException:  # also an interrupt
        executor.shutdown()
        raise
    try:
        yield engine
    finally:
        engine.close()


def tokens_per_second(engine: LLMEngine, kind: str, num_prompt_tokens: int, num_tokens: int) -> float:
    """Of decoding if several tokens are drawn, otherwise of the prompt."""
    engine.executor.collective_rpc("use", (kind,))
    prompt = [random.Random(num_tokens).randrange(3, 3900) for _ in range(num_prompt_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    engine.add_request("x", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return (num_tokens if num_tokens > 1 else num_prompt_tokens) / (time.perf_counter() - start)


def measure_engine(folder: Path, rounds: int) -> None:
    allow_slow_steps()
    rows = []
    with open_engine(folder) as engine:
        for case, sizes in {"decode 1": (4, DECODED_TOKENS), "prefill": (PROMPT_TOKENS, 1)}.items():
            gloo, shared = (partial(tokens_per_second, engine, kind, *sizes) for kind in ("gloo", "shared"))
            rows.append(compare_in_turns("collectives", case, gloo, shared, rounds))
    print_table(["-tp 2, tokens/s", "gloo", "shared", "shared / gloo"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    latency, engine, rank = (commands.add_parser(name) for name in ("latency", "engine", "rank"))
    latency.add_argument("--ranks", type=int, default=2, help="[%(default)s]")
    add_model_arguments(engine, "qwen3-0.6b")
    for each in (latency, engine):
        each.add_argument("--rounds", type=int, default=7, help="[%(default)s]")
    rank.add_argument("rank", type=int)  # of `latency`, which starts these processes
    rank.add_argument("rounds", type=int)
    rank.add_argument("listen_fd", type=int)
    rank.add_argument("file")
    rank.add_argument("ports", type=int, nargs="+")
    args = parser.parse_args()
    match args.command:
        case "latency":
            measure_latency(args.ranks, args.rounds)
        case "engine":
            measure_engine(model_folder(args.model, args.models), args.rounds)
        case _:
            run_rank(args.rank, args.rounds, args.listen_fd, args.ports, args.file)


if __name__ == "__main__":
    main()
