from __future__ import annotations

from dataclasses import replace

from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.serving.output_lengths import FIRST_LENGTH, OutputLengths
from tests.unit.engine.request.output_cases import request


def made(max_tokens: int, **params: object) -> ProcessedRequest:
    result = request("r", None, **{"max_tokens": max_tokens, **params})
    sequences = tuple(
        replace(each, sampling=replace(each.sampling, max_tokens=max_tokens)) for each in result.sequences
    )
    return replace(result, sequences=sequences)


def test_what_is_expected_of_a_request() -> None:
    lengths = OutputLengths()
    assert lengths.work_of(made(10_000)) == FIRST_LENGTH
    assert lengths.work_of(made(10_000, n=3)) == 3 * FIRST_LENGTH
    assert lengths.work_of(made(20)) == 20
    assert lengths.work_of(made(10_000, ignore_eos=True)) == 10_000
    assert lengths.work_of(made(10_000, min_tokens=700)) == 700
    resumed = made(20)
    resumed = replace(resumed, sequences=(replace(resumed.sequences[0], emitted_token_ids=tuple(range(20))),))
    assert lengths.work_of(resumed) == 1


def test_the_mean_follows_what_ends() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.ended(40)
    assert lengths.work_of(made(10_000)) == 40
    for _ in range(200):
        lengths.ended(1000)
    assert lengths.work_of(made(10_000)) > 990
