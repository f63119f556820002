"""The workloads of `bench offline`: fixed batch sizes, lengths and token ids, so that engines and versions can be compared.

Tokens are chosen greedily, end tokens are ignored, and there is no prefix caching. The result of a workload is in output tokens
per second, and that of a workload `prefill*` in prompt tokens per second. The measured time includes the prompts, which take
long in the workloads `decode*` of `LONG`. So compare their results between engines, not with those of other workloads.
"""

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inflight.sampling_params import SamplingParams

if TYPE_CHECKING:
    from inflight.entrypoints.llm_engine import LLMEngine

FIRST_TOKEN_ID = 3  # in most vocabularies smaller ids are special tokens
MAX_TOKEN_ID = 3900  # all token ids are smaller than this number, and smaller than the size of the vocabulary


@dataclass(frozen=True, slots=True)
class Workload:
    """`batch_size` requests, each with `input_len` prompt tokens and `output_len` output tokens."""

    name: str
    batch_size: int
    input_len: int
    output_len: int

    @property
    def num_counted_tokens(self) -> int:
        return self.batch_size * (self.input_len if self.name.startswith("prefill") else self.output_len)

    def prompts(self, seed: int = 0, max_token_id: int = MAX_TOKEN_ID) -> list[list[int]]:
        """The prompts, as token ids. They are the same for every engine."""
        rng = random.Random(seed)
        return [
            [rng.randrange(FIRST_TOKEN_ID, max_token_id) for _ in range(self.input_len)] for _ in range(self.batch_size)
        ]


WARM_UP = Workload("warm-up", 1, 16, 8)
STANDARD = (
    Workload("decode1", 1, 16, 128),
    Workload("decode8", 8, 16, 64),
    Workload("decode32", 32, 16, 64),
    Workload("prefill", 1, 1024, 1),
    Workload("mixed", 16, 256, 64),
)
LONG = (
    Workload("prefill4k", 1, 4096, 1),
    Workload("decode1x4k", 1, 4096, 64),
    Workload("decode1x8k", 1, 8192, 64),
    Workload("decode8x4k", 8, 4096, 32),
)
BY_NAME = {workload.name: workload for workload in (*STANDARD, *LONG)}


def select(names: str) -> list[Workload]:
    """The workloads for a text such as "decode1,prefill", "all" (`STANDARD`) or "long" (`LONG`). A workload that is named twice
    comes once.

    Raises:
        ValueError: the text names no workload, or an unknown one.
    """
    chosen: dict[str, Workload] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        group = {"all": STANDARD, "long": LONG}.get(name) or ((BY_NAME[name],) if name in BY_NAME else ())
        if not group:
            raise ValueError(f"unknown workload {name!r}; the names are: all, long, {', '.join(BY_NAME)}")
        chosen |= {workload.name: workload for workload in group}
    if not chosen:
        raise ValueError(f"no workload is given; the names are: all, long, {', '.join(BY_NAME)}")
    return list(chosen.values())


def run(engine: "LLMEngine", workload: Workload, max_token_id: int = MAX_TOKEN_ID) -> float:
    """Run the workload. Returns the seconds from the first request to the last token."""
    prompts = workload.prompts(max_token_id=max_token_id)
    params = SamplingParams(temperature=0.0, max_tokens=workload.output_len, ignore_eos=True, detokenize=False)
    num_tokens = 0
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{workload.name}-{index}", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                num_tokens += len(output.outputs[0].token_ids)
    seconds = time.perf_counter() - start
    assert num_tokens == workload.batch_size * workload.output_len, (workload, num_tokens)
    return seconds
