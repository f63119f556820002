"""Two GPUs: NCCL under a CUDA graph and between stages, a rank that leaves, and the tokens of two ranks against those of one.

This file is also the program of each rank: `python test_two_ranks.py RANK TP PP PORT LISTEN_FD`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inflight import LLM, SamplingParams
from inflight.config.ranks import RankLayout
from inflight.distributed.process_world import ProcessWorld
from inflight.interface.worker import TOKEN_BYTES, Rendezvous
from inflight.sockets import listen
from tests.support.listening import listening_hosts
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model

ROOT = Path(__file__).parents[2]
LAYOUTS = {"tp2": RankLayout(2, 1), "pp2": RankLayout(1, 2)}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS),
]


# -- what a rank's process does ------------------------------------------------------------------------------------


def check_group(world: ProcessWorld, device: torch.device) -> None:
    """Collectives in a graph; then rank 0 is alone with a reduction, until it leaves."""
    group = world.tensor_parallel_group("model")
    x, own = torch.zeros(1000, device=device), float(world.tp_rank)
    group.all_gather(group.all_reduce(x.clone()))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        reduced = group.all_reduce(x + 1)
        gathered = group.all_gather(x[None], dim=0)
    for i in range(3):
        x.fill_(own + i)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(reduced, torch.full_like(reduced, 3.0 + 2 * i))
        assert gathered[:, 0].tolist() == [i, 1.0 + i]
    if world.rank == 0:
        leave_while(world, graph.replay)


def check_channel(world: ProcessWorld, device: torch.device) -> None:
    """Ten transfers; then rank 0 waits for one that does not come, until it leaves."""
    channel, stream = world.device_channel(1 - world.rank, "x"), torch.cuda.Stream(device)
    tensors = [torch.full((1000 * (i + 1),), float(i) if world.rank else -1.0, device=device) for i in range(10)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for tensor in tensors:
            (channel.send if world.rank else channel.receive)(tensor)
    stream.synchronize()
    assert all(torch.equal(tensor, torch.full_like(tensor, i)) for i, tensor in enumerate(tensors))
    if world.rank == 0:
        leave_while(world, lambda: channel.receive(tensors[0]))


def leave_while(world: ProcessWorld, launch: Callable[[], None]) -> None:
    launch()
    threading.Timer(0.5, world.close, ("the test is over",)).start()
    torch.cuda.synchronize()  # for ever, if the kernel is not told to end


def main(rank: int, layout: RankLayout, listen_fd: int, ports: list[int]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    rendezvous = Rendezvous(
        epoch=0,
        timeout_seconds=60.0,
        token=bytes(TOKEN_BYTES),
        listen_fd=listen_fd,
        addresses=tuple(("127.0.0.1", port) for port in ports),
    )
    world = ProcessWorld(layout, rank, rendezvous, device)
    (check_group if layout.tensor_parallel_size > 1 else check_channel)(world, device)
    assert listening_hosts([os.getpid()]) == {"127.0.0.1"}
    print("checked", flush=True)
    sys.stdin.read()  # a rank that ends takes its memory along: all end together
    world.close("the test is over")
    os._exit(0)


# -- the tests -----------------------------------------------------------------------------------------------------


def test_nccl(layout: RankLayout) -> None:
    listeners = [listen("127.0.0.1", 0) for _ in range(2)]
    sizes = (layout.tensor_parallel_size, layout.pipeline_parallel_size)
    ports = [listener.getsockname()[1] for listener in listeners]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *map(str, (rank, *sizes, listener.fileno(), *ports))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "NCCL_SOCKET_IFNAME": "=lo"},
            pass_fds=[listener.fileno()],
        )
        for rank, listener in enumerate(listeners)
    ]
    for listener in listeners:
        listener.close()
    try:
        for rank in ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()  # the time limit of the ranks ends it
            assert line == "checked\n", rank.communicate()[1]
        for rank in ranks:
            rank.communicate(timeout=300)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("eager", [False, True])
def test_tokens_are_those_of_one_rank(layout: RankLayout, eager: bool, tmp_path: Path) -> None:
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=1)
    prompts = [[(7 * i + j * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate([1, 5, 33, 60])]
    tokens = []
    for chosen in (RankLayout(1, 1), layout):
        with LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            device="cuda",
            enforce_eager=eager,
            max_model_len=128,
            max_num_batched_tokens=64,
            tensor_parallel_size=chosen.tensor_parallel_size,
            pipeline_parallel_size=chosen.pipeline_parallel_size,
        ) as llm:
            outputs = llm.generate(
                prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False
            )
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


if __name__ == "__main__":
    rank, tp, pp, listen_fd, *ports = map(int, sys.argv[1:])
    main(rank, RankLayout(tp, pp), listen_fd, ports)
