"""Extraction prompts of the embedded model under a constraint and without: accuracy, and how many tokens need no draw.

    python -m benchmarks.structured_extraction [--count 200]

Held-out prompts, greedy. The constraints name the fields that the prompt asks for, with their types. The model was trained on
JSON with a space behind each colon and comma: a schema leaves it to choose, "compact" forbids what it knows; "as json.dumps"
and the regex ask for just that, so that all but the values is forced.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from benchmarks.shared.report import emit, print_table
from inflight import LLM, SamplingParams
from inflight.structured_outputs_params import StructuredOutputsParams
from scripts.demo.evaluate import held_out_samples
from scripts.demo.tasks import Sample, is_correct

MAX_TOKENS = 128
VALUES = {"integer": "-?[0-9]{1,9}", "string": r'"[^"\\\x00-\x1f]*"'}


def schema_of(sample: Sample) -> dict[str, Any]:
    """What a user would ask for who knows the fields, and not their values."""
    answer = json.loads(sample.answer["content"])
    properties = {name: {"type": "integer" if isinstance(value, int) else "string"} for name, value in answer.items()}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def regex_of(schema: dict[str, Any]) -> str:
    fields = (f'"{name}": {VALUES[field["type"]]}' for name, field in schema["properties"].items())
    return rf"\{{{', '.join(fields)}\}}"


CONDITIONS: dict[str, Callable[[dict[str, Any]], StructuredOutputsParams] | None] = {
    "free": None,
    "schema": lambda schema: StructuredOutputsParams(json=schema),
    "schema, compact": lambda schema: StructuredOutputsParams(json=schema, disable_any_whitespace=True),
    "schema, as json.dumps": lambda schema: StructuredOutputsParams(json=schema, separators=(", ", ": ")),
    "regex": lambda schema: StructuredOutputsParams(regex=regex_of(schema)),
}


def params_for(sample: Sample, constrain: Callable[[dict[str, Any]], StructuredOutputsParams] | None) -> SamplingParams:
    constraint = None if constrain is None else constrain(schema_of(sample))
    return SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, structured_outputs=constraint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="held-out prompts [%(default)s]")
    options = parser.parse_args()
    samples = held_out_samples("extraction", options.count)
    rows = []
    with LLM() as llm:
        stats = llm.llm_engine.core.scheduler.stats
        for name, constrain in CONDITIONS.items():
            params = [params_for(sample, constrain) for sample in samples]
            sampled, forced = stats.num_sampled_tokens, stats.num_forced_tokens
            start = time.perf_counter()
            outputs = llm.chat([list(sample.messages) for sample in samples], params, use_tqdm=False)
            seconds = time.perf_counter() - start
            sampled, forced = stats.num_sampled_tokens - sampled, stats.num_forced_tokens - forced
            correct = sum(
                is_correct(sample, output.outputs[0].text) for sample, output in zip(samples, outputs, strict=True)
            )
            share = forced / (sampled + forced)
            emit(benchmark="structured_extraction", condition=name, count=len(samples), correct=correct,
                 draws_per_answer=round(sampled / len(samples), 2), forced_share=round(share, 3), seconds=round(seconds, 2),
            )  # fmt: skip
            rows.append(
                [
                    name,
                    f"{correct / len(samples):.1%}",
                    f"{sampled / len(samples):.1f}",
                    f"{share:.0%}",
                    f"{seconds:.1f}",
                ]
            )
    print_table(["extraction", "correct", "draws per answer", "forced", "seconds"], rows)


if __name__ == "__main__":
    main()
