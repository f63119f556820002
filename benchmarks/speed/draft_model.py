"""A draft model at given rates of acceptance: with drafts and without, in turns; the tokens must be equal.

    python -m benchmarks.draft_model [--model qwen3-0.6b] [--layers 4] [--quantization int8] [--drafts 4] [--rates 1 0.8 0.6]
                                     [--batches 1 8 32]

Models with random weights never agree, so the acceptance is scripted: the draft model computes each draft in its usual time,
and then the draft is exchanged: for the right token with the probability of the rate, otherwise for a wrong one. So the speeds
are those of two trained models that agree so often. The draft model is the first layers of the served model, with its head.

A batch is so many streams with the same prompt, each computed for itself.

    tokens a step    of one stream
    share of bound   the time of the steps' computations / the whole time: 1 if nothing waits between them
    p99 gap          the 99th percentile of the time between two steps that give tokens: with drafts / without
    p99 per token    the same of this time divided by the tokens that the step gives each stream
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.shared.models import add_model_arguments, model_folder
from benchmarks.shared.report import emit, print_table
from inflight import LLM, SamplingParams
from inflight.interface.request import Int32Array
from inflight.spec_decode.draft_model import DraftModel

PROMPT_TOKENS = 64


@dataclass
class Script:
    """Which tokens are right: those of a run without drafts, behind the prompt. `rate`: how often a draft is right."""

    tokens: list[int]
    rate: float = 1.0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def exchange(self, drawn: Int32Array, positions: npt.NDArray[np.integer]) -> Int32Array:
        """Draft number 0 of a step is right with the probability `rate`, and so is each one behind a right one."""
        right = [self.tokens[position] if position < len(self.tokens) else 0 for position in positions.tolist()]
        wrong = [(token + 1) % 1000 for token in right]
        is_right = [self.random.random() < self.rate for _ in right]
        return np.array(
            [r if good else w for good, r, w in zip(is_right, right, wrong, strict=True)], dtype=drawn.dtype
        )


@dataclass
class Run:
    token_ids: list[list[int]]  # of each stream
    seconds: float
    computed: float  # seconds of the steps' forwards and draws
    gaps: list[float]  # seconds between the steps that give tokens
    given: list[int]  # tokens of all streams, behind each gap

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_a_step(self) -> float:
        return len(self.token_ids[0]) / (1 + len(self.gaps))

    @property
    def longest_gap(self) -> float:
        """The 99th percentile."""
        return float(np.quantile(self.gaps, 0.99))

    @property
    def longest_per_token(self) -> float:
        """The 99th percentile."""
        per_stream = np.array(self.given) / len(self.token_ids)
        return float(np.quantile(np.array(self.gaps) / per_stream, 0.99))


def shortened(folder: Path, num_layers: int, into: Path) -> Path:
    """A model of the first layers of the model in `folder`, for weights that are drawn at the start."""
    into.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja") and "index" not in file.name:
            shutil.copy(file, into)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    config.pop("layer_types", None)
    (into / "config.json").write_text(json.dumps(config))
    return into


def run(llm: LLM, prompt: list[int], params: SamplingParams, batch: int = 1) -> Run:
    core = llm.llm_engine.core
    computed: list[float] = []
    times: list[float] = []
    given: list[int] = []
    commit = core.scheduler.update_from_output

    def record(plan: Any, output: Any) -> Any:  # Any: as the scheduler's
        computed.append(output.compute_seconds)
        if len(output.sampled_token_ids):
            times.append(time.perf_counter())
            given.append(len(output.sampled_token_ids))
        return commit(plan, output)

    core.scheduler.update_from_output = record  # type: ignore[method-assign]
    try:
        start = time.perf_counter()
        outputs = llm.generate([prompt] * batch, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    finally:
        core.scheduler.update_from_output = commit  # type: ignore[method-assign]
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    return Run(token_ids, seconds, sum(computed), np.diff(times).tolist(), given[1:])


def compare(
    engines: tuple[LLM, LLM], prompt: list[int], params: SamplingParams, batch: int, rate: float, rounds: int
) -> list[str]:
    """A row of the table. `engines`: without drafts, and with."""
    runs: tuple[list[Run], list[Run]] = ([], [])
    for index in range(rounds + 1):  # the first is a warm-up
        for which in (0, 1) if index % 2 else (1, 0):
            runs[which].append(run(engines[which], prompt, params, batch))
    assert all(each.token_ids == runs[0][0].token_ids for found in runs for each in found), "drafts changed a token"
    free, drafted = (statistics.median(each.num_tokens / each.seconds for each in found[1:]) for found in runs)
    a_step = statistics.median(each.tokens_a_step for each in runs[1][1:])
    bound = statistics.median(each.computed / each.seconds for each in runs[1][1:])
    pairs = list(zip(*(found[1:] for found in runs), strict=True))
    gap = statistics.median(on.longest_gap / off.longest_gap for off, on in pairs)
    per_token = statistics.median(on.longest_per_token / off.longest_per_token for off, on in pairs)
    emit(benchmark="draft_model", streams=batch, rate=rate, tokens_a_step=round(a_step, 2), free=round(free, 1),
         drafted=round(drafted, 1), ratio=round(drafted / free, 3), share_of_bound=round(bound, 3), p99_gap=round(gap, 3),
         p99_per_token=round(per_token, 3),
    )  # fmt: skip
    ratios = [f"{drafted / free:.2f}", f"{bound:.2f}", f"{gap:.2f}", f"{per_token:.2f}"]
    return [str(batch), f"{rate:g}", f"{a_step:.2f}", f"{free:.1f}", f"{drafted:.1f}", *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=4, help="of the draft model [%(default)s]")
    parser.add_argument("--quantization", help="of the draft model")
    parser.add_argument("--drafts", type=int, default=4, help="of a step [%(default)s]")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 0.8, 0.6], help="of acceptance [1 0.8 0.6]")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="numbers of streams [1]")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--tokens", type=int, default=128, help="[%(default)s]")
    parser.add_argument("--dtype", default="bfloat16", help="[%(default)s]")
    options = parser.parse_args()
    folder = model_folder(options.model, options.models)
    draft = shortened(folder, options.layers, options.models / f"{options.model}-{options.layers}-layers")
    drafting: dict[str, Any] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": options.drafts}
    if options.quantization is not None:
        drafting["quantization"] = options.quantization
    shared: dict[str, Any] = {
        "dtype": options.dtype,
        "load_format": "dummy",
        "seed": 0,
        "enable_prefix_caching": False,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 1 << 30,  # 8,000 tokens, so that 32 streams need not wait for each other
        "distributed_executor_backend": "uni",
        "skip_tokenizer_init": True,
    }
    rng = random.Random(0)
    prompt = [rng.randrange(300, 1500) for _ in range(PROMPT_TOKENS)]
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    off = LLM(str(folder), **shared)
    on = LLM(str(folder), speculative_config=drafting, **shared)
    script = Script([*prompt, *run(off, prompt, params).token_ids[0]])
    draw = DraftModel._draw
    DraftModel._draw = lambda self, logits, sampling, positions, sampler: script.exchange(  # type: ignore[method-assign]
        draw(self, logits, sampling, positions, sampler), positions
    )
    rows = []
    for batch in options.batches:
        for rate in options.rates:
            script.rate = rate
            rows.append(compare((off, on), prompt, params, batch, rate, options.rounds))
    off.close()
    on.close()
    columns = [
        "streams",
        "acceptance",
        "tokens a step",
        "tokens/s",
        "with drafts",
        "ratio",
        "share of bound",
        "p99 gap",
        "p99 per token",
    ]
    print_table(columns, rows)


if __name__ == "__main__":
    main()
