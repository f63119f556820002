"""Greedy accuracy of the model that reads drawings, on held-out drawings: `python -m scripts.demo.vision.evaluate`.

Inflight answers by default, transformers with `--with transformers`, and with `--with both` the tokens of the two are compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scripts.demo.vision.drawings import paint
from scripts.demo.vision.folder import default_folder, messages_of
from scripts.demo.vision.questions import KINDS, Conversation, held_out

if TYPE_CHECKING:
    from inflight import LLM

MAX_TOKENS = 32


class Answer(NamedTuple):
    """`token_ids`: as they were drawn, the one that ends the answer included."""

    text: str
    token_ids: list[int]


Generate = Callable[[Sequence[Conversation]], list[Answer]]


def with_engine(model: Path, **engine_args: Any) -> Generate:  # Any: as `LLM` takes them
    from inflight import LLM  # not needed for --with transformers

    return partial(answers_of, LLM(model=str(model), **engine_args))


def answers_of(llm: LLM, conversations: Sequence[Conversation]) -> list[Answer]:
    from inflight import SamplingParams  # as above

    messages = [messages_of(each, paint(each.drawing)) for each in conversations]
    outputs = llm.chat(messages, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    return [Answer(output.outputs[0].text, list(output.outputs[0].token_ids)) for output in outputs]


def with_transformers(model: Path, dtype: str = "auto") -> Generate:
    import torch  # optional dependencies: the engine's path needs neither
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(model, backend="pil")
    network = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).eval()

    def generate(conversations: Sequence[Conversation]) -> list[Answer]:
        answers = []
        for each in conversations:
            messages = messages_of(each, paint(each.drawing))
            inputs = processor.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
            with torch.no_grad():
                output = network.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
            ids = output[0, inputs["input_ids"].shape[1] :].tolist()
            answers.append(Answer(processor.decode(ids, skip_special_tokens=True), ids))
        return answers

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy accuracy of the model that reads drawings.")
    parser.add_argument("--model", type=Path, default=default_folder(), help="[%(default)s]")
    parser.add_argument("--with", dest="backend", choices=("inflight", "transformers", "both"), default="inflight")
    parser.add_argument("--engine-args", type=json.loads, default={}, help='JSON, as {"quantization": "int8"}')
    parser.add_argument("--dtype", default="auto", help="auto (that of the weights, bfloat16) or float32 [%(default)s]")
    parser.add_argument("--count", type=int, default=200, help="held-out drawings for each kind [%(default)s]")
    parser.add_argument("--show-errors", type=int, default=0, help="wrong answers to print for each kind")
    options = parser.parse_args()
    if options.engine_args and options.backend == "transformers":
        parser.error("--engine-args are the engine's; transformers takes none")
    if not options.model.exists():
        parser.error(f"{options.model} does not exist: train it with `python -m scripts.demo.vision.train`")
    backends = {
        "inflight": lambda: with_engine(options.model, dtype=options.dtype, **options.engine_args),
        "transformers": lambda: with_transformers(options.model, options.dtype),
    }
    used = [options.backend] if options.backend != "both" else list(backends)
    generates = {name: backends[name]() for name in used}
    print(f"{'kind':<8} {'correct':>9} {'accuracy':>9}")
    accuracies = {}
    for kind in KINDS:
        conversations = held_out(kind, options.count)
        answers = {name: generate(conversations) for name, generate in generates.items()}
        found = list(zip(conversations, answers[used[0]], strict=True))
        wrong = [(asked, answer) for asked, answer in found if answer.text.strip() != asked.questions[-1].answer]
        accuracies[kind] = 1 - len(wrong) / len(found)
        print(f"{kind:<8} {len(found) - len(wrong):>4}/{len(found):<4} {accuracies[kind]:>8.1%}", flush=True)
        if len(answers) == 2:
            equal = sum(ours.token_ids == theirs.token_ids for ours, theirs in zip(*answers.values(), strict=True))
            print(f"         the same tokens by Inflight and by transformers: {equal}/{len(found)}", flush=True)
        for asked, answer in wrong[: options.show_errors]:
            question = asked.questions[-1]
            print(f"  asked {question.text!r}, expected {question.answer!r}, got {answer.text!r}")
    print(json.dumps({kind: round(accuracy, 4) for kind, accuracy in accuracies.items()}))


if __name__ == "__main__":
    main()
