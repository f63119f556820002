"""Several ranks have the same expert: whoever computes a row, the bits are the same, and each row is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.config.expert_parallel import expert_room
from inflight.distributed import expert_parallel
from inflight.distributed.collectives import Collectives
from inflight.distributed.expert_parallel import ExpertParallelGroup
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.kernels.cpu.expert_balance import EMPTY, BalancedExperts, Homes, Indices, describe, empty_description
from inflight.kernels.cpu.library import load_kernels
from inflight.layers.moe import FusedMoE
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.unit.layers.test_expert_parallel import connect, layers_of, model_config
from tests.unit.layers.zoo_layers import drawn

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs the C++ kernels")
SIZE = 3
NUM_PLACES = 4  # of all ranks
# plain experts; a shared one with a gate; biases
FAMILIES = ("qwen3_moe", "qwen2_moe", "gpt_oss")


@pytest.fixture
def opened() -> Iterator[list[Collectives]]:
    found: list[Collectives] = []
    yield found
    for each in found:
        each.close()


class Ranks:
    """A layer of three replicas with one rank each, and of one rank that has all experts."""

    def __init__(self, folder: Path, quantization: str | None, opened: list[Collectives]) -> None:
        config = model_config(folder, quantization)
        self.alone = layers_of(config, TensorParallelGroup(), None)[0]
        room = expert_room(config.architecture, 1)
        self.hidden_size = room.hidden_size
        tp = TensorParallelGroup()
        groups = [ExpertParallelGroup(tp, room, num_replicas=SIZE, replica=index) for index in range(SIZE)]
        self.layers: list[FusedMoE] = [layers_of(config, tp, group)[0] for group in groups]
        self.threads = ThreadPoolExecutor(SIZE)
        collectives = connect("shared", SIZE, opened)
        list(self.threads.map(lambda index: groups[index].connect(collectives[index]), range(SIZE)))
        num_experts = self.alone.spec.num_experts
        of_expert = np.arange(num_experts) * SIZE // num_experts
        for index, group in enumerate(groups):
            held = group.local_experts(num_experts)
            of_expert[held.start : held.stop] = index
        of_place = np.array([0, 0, 1, 2])
        self.balanced = []
        for index, layer in enumerate(self.layers):
            assert layer.kernel is not None
            self.balanced.append(BalancedExperts(layer.kernel, Homes(SIZE, index, of_expert, of_place)))

    def draw_copies(self, random: Random, kept: Indices) -> Indices:
        """Copies in all places that `kept` leaves empty, with their weights."""
        homes = self.balanced[0].homes
        copies = kept.copy()
        for place in np.flatnonzero(kept == EMPTY):
            rank = homes.of_place[place]
            on_rank = {*np.flatnonzero(homes.of_expert == rank), *copies[homes.of_place == rank]}
            copies[place] = random.choice(sorted({*range(len(homes.of_expert))} - on_rank))
            source = self.balanced[homes.of_expert[copies[place]]]
            for part, product in zip(
                self.balanced[rank].places[place].parts, source.products_of(int(copies[place])), strict=True
            ):
                description, stored = describe(product)
                assert description.nbytes == empty_description().nbytes
                memory, fits = part.begin(description)
                assert fits
                for to, each in zip(memory, stored, strict=True):
                    to.copy_(each)
        return copies

    def compute(self, rows: list[Tensor]) -> None:
        """And compare with the rank that has all experts, bit for bit."""

        def run(index: int) -> Tensor:
            with torch.inference_mode():
                result: Tensor = self.layers[index](rows[index])
                return result

        for found, given in zip(self.threads.map(run, range(SIZE)), rows, strict=True):
            assert torch.equal(found, self.alone(given) if len(given) else given)


def rows_of(ranks: Ranks, random: Random) -> list[Tensor]:
    numbers = [random.choice((0, 1, 5, 40, 70)) for _ in range(SIZE)]
    return [drawn(number, ranks.hidden_size, seed=random.randrange(1000)) for number in numbers]


@pytest.mark.parametrize(("family", "quantization"), [*((each, None) for each in FAMILIES), ("qwen3_moe", "int8")])
@torch.inference_mode()
def test_copies_change_no_bits(
    family: str, quantization: str | None, opened: list[Collectives], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in several rounds of rows. No rank computes what another one has computed: that would count twice."""
    config = FAMILY_CONFIGS[family][0]
    hidden_size = config.hidden_size
    monkeypatch.setattr(expert_parallel, "_MOST_BYTES", 32 * SIZE * 4 * 4 * hidden_size)
    ranks = Ranks(write_model(config, tmp_path / "model", seed=1), quantization, opened)
    random, now = Random(0), np.full(NUM_PLACES, EMPTY)
    num_pairs = 0
    for turn in range(6):
        kept = np.where([random.random() < 0.5 for _ in now], now, EMPTY)
        for each in ranks.balanced:
            each.use(kept)
        target = ranks.draw_copies(random, kept)
        for ready in range(SIZE + 1):  # one rank after the other is ready
            rows = rows_of(ranks, random)
            ranks.compute(rows)
            num_pairs += sum(len(each) for each in rows) * ranks.alone.spec.router.top_k
            assert [each.is_agreed for each in ranks.balanced] == [ready == SIZE] * SIZE
            if ready < SIZE:
                ranks.balanced[ready].agree_on(target, turn + 1)
        for each in ranks.balanced:
            each.use(target)
            assert each.pairs.sum() == num_pairs and np.array_equal(each.pairs, ranks.balanced[0].pairs)
        now = target
        assert len({each.work for each in ranks.balanced}) == 1


@torch.inference_mode()
def test_ranks_that_are_ready_for_different_copies_use_none(opened: list[Collectives], tmp_path: Path) -> None:
    ranks = Ranks(write_model(FAMILY_CONFIGS["qwen3_moe"][0], tmp_path / "model", seed=1), None, opened)
    random, nothing = Random(1), np.full(NUM_PLACES, EMPTY)
    target = ranks.draw_copies(random, nothing)
    for index, each in enumerate(ranks.balanced):
        each.agree_on(target, 1 + (index == 1))
    ranks.compute(rows_of(ranks, random))
    assert not any(each.is_agreed for each in ranks.balanced)
    for each in ranks.balanced:  # the move is given up
        each.use(nothing)
    ranks.compute(rows_of(ranks, random))


@torch.inference_mode()
def test_work_goes_to_the_rank_that_has_the_least_to_do(opened: list[Collectives], tmp_path: Path) -> None:
    """All rows choose the same two experts of rank 0, of which rank 2 gets one."""
    ranks = Ranks(write_model(FAMILY_CONFIGS["qwen3_moe"][0], tmp_path / "model", seed=1), None, opened)
    rows = [drawn(1, ranks.hidden_size, seed=3).repeat(64, 1), *(drawn(0, ranks.hidden_size, seed=0),) * 2]
    first = ranks.balanced[0]
    ranks.compute(rows)
    chosen = np.flatnonzero(first.pairs)
    assert first.pairs[chosen].tolist() == [64] * len(chosen)
    total, busiest = first.work
    assert total == 4 * len(chosen), "blocks of 16 rows"
    homes = first.homes.of_expert[chosen]
    assert busiest == max(4 * (homes == rank).sum() for rank in range(SIZE))
    heavy = int(np.bincount(homes).argmax())
    place = next(place for place in range(NUM_PLACES) if first.homes.of_place[place] != heavy)
    copies = np.full(NUM_PLACES, EMPTY)
    copies[place] = next(int(each) for each, home in zip(chosen, homes, strict=True) if home == heavy)
    for each in ranks.balanced:
        each.use(np.full(NUM_PLACES, EMPTY))
    source = ranks.balanced[heavy].products_of(int(copies[place]))
    target = ranks.balanced[int(first.homes.of_place[place])]
    for part, product in zip(target.places[place].parts, source, strict=True):
        description, stored = describe(product)
        memory, _ = part.begin(description)
        for to, each in zip(memory, stored, strict=True):
            to.copy_(each)
    for each in ranks.balanced:
        each.use(copies)
    ranks.compute(rows)
    assert first.work[0] - total == total and first.work[1] - busiest < busiest


@torch.inference_mode()
def test_an_expert_that_is_too_large_does_not_get_into_a_place(opened: list[Collectives], tmp_path: Path) -> None:
    """It is read to its end, so that what comes behind it can be read."""
    ranks = Ranks(write_model(FAMILY_CONFIGS["qwen3_moe"][0], tmp_path / "model", seed=1), None, opened)
    part = ranks.balanced[0].places[0].parts[0]
    product = ranks.balanced[2].products_of(ranks.alone.spec.num_experts - 1)[0]
    description, stored = describe(product)
    part._packed = part._packed[: len(part._packed) // 2]
    memory, fits = part.begin(description)
    assert not fits and [each.nbytes for each in memory] == [each.nbytes for each in stored]
