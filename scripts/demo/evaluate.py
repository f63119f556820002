"""Greedy accuracy of the embedded model on held-out prompts: `python -m scripts.demo.evaluate`.

The engine answers by default, transformers with `--with transformers`: same folder, same samples.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from inflight.hub import EMBEDDED_MODEL
from scripts.demo.tasks import KINDS, MULTI_TURN, Sample, draw, is_correct

if TYPE_CHECKING:
    from inflight import LLM

MAX_TOKENS = 512
# The assistant's text for each sample: control tokens removed, tool calls as the model wrote them.
Generate = Callable[[Sequence[Sample]], list[str]]


def held_out_samples(kind: str, count: int) -> list[Sample]:
    """`count` samples with distinct prompts, the same ones in every run."""
    rng = Random(f"evaluate {kind}")
    samples: dict[str, Sample] = {}
    while len(samples) < count:
        sample = draw(kind, rng, held_out=True)
        samples.setdefault(json.dumps([sample.messages, sample.tools]), sample)
    return list(samples.values())


def with_engine(model: Path, **engine_args: Any) -> Generate:  # Any: as `LLM` takes them
    from inflight import LLM  # not needed for --with transformers

    return partial(answers_of, LLM(model=str(model), **engine_args))


def answers_of(llm: LLM, samples: Sequence[Sample]) -> list[str]:
    from inflight import SamplingParams  # as above

    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    texts: dict[int, str] = {}
    by_tools: dict[str, list[int]] = {}  # one batch for all samples that offer the same tools
    for index, sample in enumerate(samples):
        by_tools.setdefault(json.dumps(sample.tools), []).append(index)
    for indices in by_tools.values():
        conversations = [list(samples[index].messages) for index in indices]
        tools = list(samples[indices[0]].tools) or None
        for index, output in zip(indices, llm.chat(conversations, params, tools=tools, use_tqdm=False), strict=True):
            texts[index] = output.outputs[0].text
    return [texts[index] for index in range(len(samples))]


def with_transformers(model: Path) -> Generate:
    import torch  # optional dependencies: the engine's path needs neither
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # more make so small a network slower
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def generate(samples: Sequence[Sample]) -> list[str]:
        texts = []
        for sample in samples:
            ids = tokenizer.apply_chat_template(
                list(sample.messages),
                tools=list(sample.tools) or None,
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=False,
            )
            mask = torch.ones_like(ids)
            output = network.generate(ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False)
            texts.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
        return texts

    return generate


BACKENDS: dict[str, Callable[..., Generate]] = {"inflight": with_engine, "transformers": with_transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy accuracy of the embedded model on held-out prompts.")
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--with", dest="backend", choices=sorted(BACKENDS), default="inflight")
    parser.add_argument("--engine-args", type=json.loads, default={}, help='JSON, as {"quantization": "int8"}')
    parser.add_argument("--count", type=int, default=200, help="held-out prompts of each kind")
    parser.add_argument("--show-errors", type=int, default=0, help="wrong answers to print for each kind")
    options = parser.parse_args()
    if options.engine_args and options.backend != "inflight":
        parser.error("--engine-args are the engine's; transformers takes none")
    generate = BACKENDS[options.backend](options.model, **options.engine_args)
    accuracies = {}
    print(f"{'kind':<12} {'correct':>9} {'accuracy':>9}")
    for kind in (*KINDS, MULTI_TURN):
        samples = held_out_samples(kind, options.count)
        answers = list(zip(samples, generate(samples), strict=True))
        wrong = [(sample, text) for sample, text in answers if not is_correct(sample, text)]
        accuracies[kind] = 1 - len(wrong) / len(samples)
        print(f"{kind:<12} {len(samples) - len(wrong):>4}/{len(samples):<4} {accuracies[kind]:>8.1%}", flush=True)
        for sample, text in wrong[: options.show_errors]:
            print(f"  asked {sample.messages[-1]['content']!r}, expected {sample.answer}, got {text!r}")
    print(json.dumps({kind: round(accuracy, 4) for kind, accuracy in accuracies.items()}))


if __name__ == "__main__":
    main()
