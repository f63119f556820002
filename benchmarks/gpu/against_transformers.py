"""Our tokens per second beside those of transformers, on the same device and weights, in turns.

    python -m benchmarks.gpu.against_transformers [--device cuda] [--quick] [--compiled]

transformers draws the weights in bfloat16 and saves them in a temporary folder, from which the engine reads them. Its
`generate` (attention by sdpa, the cache it chooses itself, or with --compiled a static one and torch.compile) and its
continuous batching, whose manager with its graphs is kept between runs, each against the engine with the same prompts.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from benchmarks.gpu.arguments import device_parser, measured
from benchmarks.gpu.driving import Driver
from benchmarks.gpu.sizes import CONFIGS, Sizes, random_prompts, sizes_of
from benchmarks.shared.in_turns import compare_in_turns
from inflight import LLM

KV_CACHE_BYTES = {"cuda": 8 << 30, "cpu": 1 << 26}
BATCHING_MEMORY_SHARE = 0.3  # of the free memory, for the cache of transformers


Run = tuple[int, float]  # tokens, and the seconds that they took


class Transformers:
    """The same prompts and output lengths as the engine's, by the model of transformers."""

    def __init__(self, model: PreTrainedModel, output_len: int) -> None:
        self._model = model
        self._lengths: dict[str, Any] = {  # Any: fields of GenerationConfig
            "do_sample": False, "max_new_tokens": output_len, "eos_token_id": None, "pad_token_id": 0
        }  # fmt: skip

    def generate(self, prompts: list[list[int]], **fields: Any) -> Run:  # Any: as above
        rows = torch.tensor(prompts, device=self._model.device)
        config = GenerationConfig(**self._lengths, **fields)
        start = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(rows, attention_mask=torch.ones_like(rows), generation_config=config)
        tokens = output[:, rows.shape[1] :].tolist()  # which waits for the device
        return sum(map(len, tokens)), time.perf_counter() - start

    def generate_batch(self, prompts: list[list[int]]) -> Run:
        """The time is from the first request's making to the last one's end: threads that start and stop do not count.

        Raises:
            ImportError, AttributeError, TypeError: this transformers has no such continuous batching.
        """
        from transformers.generation.configuration_utils import ContinuousBatchingConfig  # not in every version

        outputs = self._model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(**self._lengths),
            continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=BATCHING_MEMORY_SHARE),
            progress_bar=False,
            persistent_manager=True,
        ).values()
        seconds = max(output.lifespan[1] for output in outputs) - min(output.created_time for output in outputs)
        return sum(len(output.generated_tokens) for output in outputs), seconds


def compare(llm: LLM, model: PreTrainedModel, device: str, sizes: Sizes, *, compiled: bool) -> None:
    """The largest batch first: what transformers makes for its continuous batching is made for the first that it sees. That
    comes last, for it changes the model."""
    output_len = sizes.output_len // 2
    driver, transformers = Driver(llm, device), Transformers(model, output_len)

    def compare_case(figure: str, prompts: list[list[int]], run: Callable[[list[list[int]]], Run]) -> None:
        expected = len(prompts) * output_len

        def theirs() -> float:
            count, seconds = run(prompts)
            if count != expected:
                raise RuntimeError(f"{count} tokens instead of {expected}")
            return count / seconds

        def ours() -> float:
            return expected / sum(driver.run(prompts, [output_len] * len(prompts)))

        compare_in_turns("transformers", figure, theirs, ours, sizes.rounds)  # it emits the speeds and their ratio

    cases: dict[str, Callable[[list[list[int]]], Run]] = {
        "generate": transformers.generate,
        "continuous_batching": transformers.generate_batch,
    }
    if compiled:
        cases = {"generate_compiled": partial(transformers.generate, cache_implementation="static")}
    for name, run in cases.items():
        for batch in reversed(sizes.compared_batches):
            figure, prompts = f"{name}/{batch}", random_prompts([sizes.prompt_len] * batch)
            measured(figure, partial(compare_case, figure, prompts, run))


def main() -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--compiled", action="store_true", help="its static cache and torch.compile, and nothing else")
    args = parser.parse_args()
    sizes = sizes_of(args.device, quick=args.quick)
    config = AutoConfig.from_pretrained(CONFIGS / ("tiny" if args.device == "cpu" else "qwen3-0.6b"))
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # else it would end what asks for no end
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with LLM(
            folder,
            device=args.device,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=sizes.prompt_len + sizes.output_len,
            max_num_seqs=max(sizes.batches),
            kv_cache_memory_bytes=KV_CACHE_BYTES[args.device],
            distributed_executor_backend="uni",
            **({"num_threads": 1} if args.device == "cpu" else {}),
        ) as llm:
            compare(llm, model, args.device, sizes, compiled=args.compiled)


if __name__ == "__main__":
    main()
