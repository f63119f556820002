"""Images in plans: each is encoded before its tokens are computed, once while there is room, and never in the way of decodes.

The mock worker sees another token in the place of a placeholder for each image. So a block that is shared by prompts with the
same placeholders and other images is an assertion, and so are wrong tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config.vision import Idefics3VisionSpec
from inflight.errors import ErrorKind, RankError
from inflight.interface.images import ImageInput, ImagesPart
from inflight.interface.request import EngineCoreRequest, FinishReason, ResolvedSampling
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.sampling_params import SamplingParams
from inflight.scheduler.encoder_inputs import EncoderInputs
from inflight.scheduler.step_time.model import StepTimeModel
from tests.support.mock_engine import MAX_MODEL_LEN, VOCAB_SIZE, MockEngine, Wanted
from tests.support.mock_worker import MockWorker, mock_generate

PLACEHOLDER = 3
VISION = Idefics3VisionSpec(
    image_token_id=PLACEHOLDER,
    out_size=8,
    hidden_size=8,
    num_layers=5,
    num_heads=1,
    mlp_size=16,
    merge_size=1,
    patch_size=4,
    num_channels=3,
    positions_per_side=4,
    eps=1e-6,
    activation="gelu_tanh",
)


def image(name: int, start: int, num_tokens: int) -> ImageInput:
    pixels = np.full((2, 2), name, dtype=np.float32)
    digest = hashlib.sha256(pixels.tobytes()).digest()
    return ImageInput(start=start, num_tokens=num_tokens, digest=digest, pixels=pixels, grid=(1, 1, num_tokens))


def seen(tokens: list[int], images: tuple[ImageInput, ...]) -> list[int]:
    """What the mock worker sees of a prompt."""
    found = list(tokens)
    for each in images:
        found[each.start : each.stop] = [10 + each.digest[0] % 30] * each.num_tokens
    return found


class ImageWorker(MockWorker):
    """Keeps the encoder cache of a rank."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.layers: dict[bytes, int] = {}  # digest -> how many layers are computed
        self.images: dict[int, tuple[ImageInput, ...]] = {}  # by slot
        self.num_begun = 0
        self.keeps_images_whole = False
        self.refused: set[bytes] = set()  # the digests of images that the tower cannot compute
        self.recoveries: list[RankError] = []  # those of the executor: each rank begins anew behind one
        self.num_recoveries = 0

    def apply(self, plan: SchedulerOutput) -> None:
        super().apply(plan)
        for data in plan.new_requests:
            self.images[data.slot] = tuple(each for part in data.parts for each in part.images)  # type: ignore[attr-defined]
            assert all(not each.pixels.size for each in self.images[data.slot])
            self._tokens[data.slot] = seen(self._tokens[data.slot], self.images[data.slot])

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        plan = scheduler_output
        if self.num_recoveries < len(self.recoveries):
            self.num_recoveries = len(self.recoveries)
            self.layers.clear()
        for digest in plan.encoder_evictions:
            del self.layers[digest]
        for each in plan.encoder_inputs:
            assert (each.part is not None) == (each.digest not in self.layers)
            if each.part is not None:
                assert isinstance(each.part, ImagesPart) and each.part.images[0].pixels.size
                self.num_begun += 1
            self.layers[each.digest] = self.layers.get(each.digest, 0) + each.num_slices
            assert 0 < self.layers[each.digest] <= VISION.num_layers
        ended = [each.digest for each in plan.encoder_inputs if self.layers[each.digest] == VISION.num_layers]
        refused = tuple((digest, "too odd") for digest in ended if digest in self.refused)
        output = replace(super().execute_model(plan), refused_images=refused)
        for row, slot in enumerate(plan.slots.tolist()):
            start, count = int(plan.num_computed_tokens[row]), int(plan.num_scheduled_tokens[row])
            for found in self.images[slot]:
                if found.start < start + count and found.stop > start:
                    assert self.layers[found.digest] == VISION.num_layers
                    assert not self.keeps_images_whole or found.stop <= start + count
        return output

    def _check_inputs(self, plan: SchedulerOutput, spans: Any) -> None:
        pass  # it compares with the ids of the prompt


@dataclass
class ImageEngine(MockEngine):
    max_image_tokens: int = 24
    digests: dict[str, set[bytes]] = field(default_factory=dict)  # by request
    keeps_images_whole: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        gates, sharing = self.scheduler.gates, self.scheduler.sharing
        self.scheduler.encoder = EncoderInputs(
            VISION,
            self.max_image_tokens,
            gates,
            sharing,
            self.scheduler.fail,
            is_whole=not self.chunked,
            keeps_images_whole=self.keeps_images_whole,
        )
        self.image_worker.keeps_images_whole = self.keeps_images_whole
        self.image_worker.recoveries = self.executor.recoveries

    def _new_worker(self) -> MockWorker:
        return ImageWorker(
            vocab_size=VOCAB_SIZE,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            windows=list(self.windows),
            num_speculative_tokens=self.num_speculative_tokens,
        )

    @property
    def image_worker(self) -> ImageWorker:
        assert isinstance(self.worker, ImageWorker)
        return self.worker

    def ask(self, request_id: str, tokens: list[int], images: tuple[ImageInput, ...], max_tokens: int = 4) -> None:
        limit = min(len(tokens) + max_tokens, MAX_MODEL_LEN)
        answer = mock_generate(seen(tokens, images), limit - len(tokens), VOCAB_SIZE)
        self.wanted[request_id] = Wanted(tokens, limit, answer, False, False)
        self.outputs[request_id], self.prompt_logprobs[request_id] = [], []
        params = SamplingParams(max_tokens=max_tokens)
        request = EngineCoreRequest(
            request_id=request_id,
            sampling=ResolvedSampling(params=params, seed=0, max_tokens=max_tokens),
            parts=(ImagesPart(images=images),) if images else (),
        )
        self.digests[request_id] = {each.digest for each in images}
        self.core.add_request(request, np.array(tokens, dtype=np.int32))

    def check_refused(self) -> None:
        """The requests with images that the tower cannot compute have failed, and these alone."""
        for request_id, reason in self.finished.items():
            has_refused = bool(self.digests[request_id] & self.image_worker.refused)
            assert (reason is FinishReason.ERROR) == has_refused, request_id
            assert not has_refused or not self.outputs[request_id]


def with_image(name: int, before: int, num_tokens: int, behind: int) -> tuple[list[int], tuple[ImageInput, ...]]:
    return [1] * before + [PLACEHOLDER] * num_tokens + [2] * behind, (image(name, before, num_tokens),)


def test_an_image_is_encoded_once_for_all_requests_and_turns() -> None:
    engine = ImageEngine()
    for number in range(4):
        engine.ask(f"first {number}", *with_image(7, 5, 9, 3 + number))
    engine.run()
    assert engine.image_worker.num_begun == 1


@pytest.mark.parametrize("before", [0, 4, 6])
def test_another_image_behind_the_same_text_shares_no_block_of_it(before: int) -> None:
    engine = ImageEngine(max_num_seqs=1)
    for name in (7, 8, 7):
        engine.ask(f"{name} {len(engine.wanted)}", *with_image(name, before, 9, 3))
    engine.run()
    assert engine.image_worker.num_begun == 2
    cached = [0, before // 4 * 4, (before + 11) // 4 * 4]
    assert list(engine.cached_tokens.values()) == cached
    assert engine.scheduler.encoder is not None
    counts = engine.scheduler.encoder.take_counts()
    assert counts.num_queries == sum(num_tokens < before + 9 for num_tokens in cached)
    assert (counts.num_misses, counts.num_slices, counts.usage) == (2, 2 * VISION.num_layers, 18 / 24)
    assert not engine.scheduler.encoder.take_counts().num_queries


@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize("behind", [0, 1])
def test_an_image_may_begin_and_end_the_prompt(before: int, behind: int) -> None:
    engine = ImageEngine(max_num_batched_tokens=4)
    engine.ask("a", *with_image(7, before, 9, behind))
    engine.ask("b", *with_image(8, before, 9, behind))
    engine.run()
    assert engine.image_worker.num_begun == 2


def test_too_many_images_for_the_room_take_turns() -> None:
    engine = ImageEngine(max_image_tokens=10, max_num_seqs=2, caching=False)
    for number in range(6):
        engine.ask(str(number), *with_image(number % 3, 2, 9, 2))
    tokens, first = with_image(7, 2, 9, 2)
    engine.ask("two", tokens + tokens, (*first, image(8, 15, 9)))
    engine.run()
    assert sum(engine.image_worker.layers.values()) <= VISION.num_layers


def test_decodes_go_on_while_an_image_is_encoded() -> None:
    """In each step with decodes the image gets one layer first, and then as many as fit into the time."""
    engine = ImageEngine()
    engine.ask("stream", [5, 6], (), max_tokens=30)
    engine.step()
    # a token takes 1 ms, and a step may take 2
    engine.limit_times(StepTimeModel((1e-3, *[1e-9] * 6)), target_seconds=2e-3)
    engine.ask("image", *with_image(7, 4, 9, 3))
    engine.ask("text behind it", [9, 8, 7], (), max_tokens=2)
    engine.run()
    plans = [plan for plan in engine.executor.plans if plan.encoder_inputs]
    assert len(plans) > 1 and all("stream" in plan.request_ids for plan in plans)
    assert engine.order[0] == "text behind it"


def test_a_fault_makes_the_embeddings_again() -> None:
    engine = ImageEngine(fault_tolerance=True)
    engine.lose_arenas()
    engine.executor.failing = {0: False, 3: True}
    for number in range(3):
        engine.ask(str(number), *with_image(number, 3, 9, 3))
    engine.run()
    assert len(engine.executor.recoveries) == 2


@pytest.mark.parametrize("depth", [1, 3])
def test_an_image_that_the_tower_refuses_fails_its_requests_alone(depth: int) -> None:
    engine = ImageEngine(depth=depth, max_num_seqs=3)
    engine.ask("text", [5, 6], (), max_tokens=20)
    engine.step()
    tokens, odd = with_image(7, 5, 9, 3)
    engine.image_worker.refused.add(odd[0].digest)
    engine.ask("odd", tokens, (replace(odd[0], place="messages[0]"),))
    engine.ask("fine", *with_image(8, 5, 9, 3))
    engine.ask("odd again", [1, *tokens], (replace(odd[0], start=6),))
    failed = {}
    while engine.core.has_unfinished_requests():
        failed |= {output.request_id: output for output in engine.step() if output.error}
    engine.run()
    engine.check_refused()
    errors = {name: (output.error, output.error_kind, output.error_param) for name, output in failed.items()}
    assert errors == {
        "odd": ("messages[0]: too odd", ErrorKind.REQUEST, "messages[0]"),
        "odd again": ("too odd", ErrorKind.REQUEST, ""),
    }
    assert not engine.executor.recoveries
    counts = engine.scheduler.encoder.take_counts() if engine.scheduler.encoder is not None else None
    assert counts is not None and counts.usage == 9 / 24  # only the fine one


def test_without_chunked_prefill_all_images_are_encoded_in_the_step_of_the_prompt() -> None:
    engine = ImageEngine(chunked=False, max_image_tokens=32)
    tokens, first = with_image(7, 2, 9, 2)
    engine.ask("two", tokens + tokens, (*first, image(8, 15, 9)))
    engine.ask("one", *with_image(9, 2, 9, 2))
    engine.run()
    assert engine.image_worker.num_begun == 3


def test_an_image_is_not_cut() -> None:
    """A step ends before it, or behind it."""
    engine = ImageEngine(keeps_images_whole=True, max_num_batched_tokens=9)
    engine.ask("image", *with_image(7, 5, 9, 3))
    engine.run()
    starts = [int(plan.num_computed_tokens[0]) for plan in engine.executor.plans if len(plan.slots)]
    assert starts[:3] == [0, 5, 14]


def test_an_image_that_is_not_cut_may_take_longer_than_a_step_should() -> None:
    """Beside decodes, a step of the prompt would have a block of four tokens."""
    engine = ImageEngine(keeps_images_whole=True)
    engine.ask("stream", [5, 6], (), max_tokens=30)
    engine.step()
    engine.limit_times(StepTimeModel((1e-3, *[1e-3] * 6)), target_seconds=1e-3)
    for number in range(3):
        engine.ask(f"image {number}", *with_image(number, 0, 9, 3))
    engine.run()
    counts = [(plan.num_scheduled_tokens > 8).sum() for plan in engine.executor.plans]
    assert max(counts) == 1 and sum(counts) == 3
    assert all("stream" in plan.request_ids for plan, count in zip(engine.executor.plans, counts, strict=True) if count)


def test_cached_blocks_may_end_inside_an_image_that_is_not_cut() -> None:
    engine = ImageEngine(keeps_images_whole=True, max_num_seqs=1)
    for name in ("first", "again"):
        engine.ask(name, *with_image(7, 3, 9, 0))
        engine.run()
    assert engine.cached_tokens == {"first": 0, "again": 8}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_schedule_gives_the_tokens_of_each_request_alone(data: st.DataObject) -> None:
    numbers = st.integers
    keeps_images_whole = data.draw(st.booleans())
    engine = ImageEngine(
        keeps_images_whole=keeps_images_whole,
        max_num_seqs=data.draw(numbers(1, 3)),
        max_num_batched_tokens=data.draw(st.sampled_from([15, 64] if keeps_images_whole else [4, 9, 64])),
        max_image_tokens=data.draw(numbers(9, 30)),
        extra_blocks=data.draw(numbers(0, 20)),
        depth=data.draw(numbers(1, 3)),
        stagger=data.draw(numbers(1, 2)),
        caching=data.draw(st.booleans()),
        num_speculative_tokens=data.draw(st.sampled_from([0, 2])),
        fault_tolerance=True,
    )
    if data.draw(st.booleans()):
        engine.limit_times(StepTimeModel((1e-3, *[1e-4] * 6)), target_seconds=data.draw(st.sampled_from([2e-3, 1.0])))
    for step in data.draw(st.lists(numbers(0, 30), max_size=2)):
        engine.executor.failing[step] = data.draw(st.booleans())
    if data.draw(st.booleans()):
        _, (odd,) = with_image(0, 0, 1, 1)
        engine.image_worker.refused.add(odd.digest)
    for number in range(data.draw(numbers(1, 6))):
        tokens: list[int] = []
        images: list[ImageInput] = []
        for _ in range(data.draw(numbers(0, 2))):
            more, (found,) = with_image(data.draw(numbers(0, 3)), data.draw(numbers(0, 5)), data.draw(numbers(1, 9)), 1)
            images.append(replace(found, start=found.start + len(tokens)))
            tokens += more
        tokens += [1] * data.draw(numbers(0 if tokens else 1, 5))
        engine.ask(str(number), tokens, tuple(images), max_tokens=data.draw(numbers(1, 5)))
        for _ in range(data.draw(numbers(0, 4))):
            engine.step()
        if data.draw(numbers(0, 9)) == 0:
            engine.abort(str(number))
    engine.run()
    engine.check_refused()
