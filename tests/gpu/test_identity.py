"""The CPU engine, one request at a time, is what the GPU engine must agree with, whatever is on or off and in whatever company.

Requests draw by seed, with every way of cutting and penalising; so this is also the device's sampling against the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from tests.e2e.identity import PLAIN, Engines, Event, Features, run_example
from tests.e2e.test_identity_matrix import EVENTS
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NUM_EXAMPLES = 12
MODELS = {"grouped queries": ("llama", 0), "mixed windows": ("qwen3", 4)}

_ROOMY = Features(caching=False, chunk=None, tight=False, max_num_seqs=5, plans_ahead=True)
_EAGER = {"enforce_eager": True}
# features, and further arguments of the engine
VARIANTS: dict[str, tuple[Features, dict[str, Any]]] = {
    "graphs, asynchronous": (_ROOMY, {}),
    "graphs, synchronous": (replace(_ROOMY, plans_ahead=False), {}),
    "eager, asynchronous": (_ROOMY, _EAGER),
    "eager, synchronous": (replace(_ROOMY, plans_ahead=False), _EAGER),
    "prefix cache": (replace(_ROOMY, caching=True), {}),
    "chunks": (replace(_ROOMY, chunk=16), {}),
    "preempted": (replace(_ROOMY, chunk=16, tight=True), {}),
    "n-grams verified": (replace(_ROOMY, num_drafts=3), {}),
    "everything": (replace(_ROOMY, caching=True, chunk=5, tight=True, num_drafts=3), {}),
}


@pytest.fixture(scope="module", params=MODELS)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    family, index = MODELS[request.param]
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path_factory.mktemp("identity") / "model", seed=1)
    engines = Engines(folder, block_size=16, shared={"skip_tokenizer_init": True, "device": "cpu"})
    yield engines
    engines.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_the_cpu(plain: Engines, variant: str) -> None:
    features, arguments = VARIANTS[variant]
    engines = replace(
        plain, arguments={"device": DEVICE, "num_threads": None, **arguments}, llms={PLAIN: plain.llm(PLAIN)}
    )

    @settings(max_examples=NUM_EXAMPLES)
    @given(events=EVENTS)
    def check(events: list[Event]) -> None:
        run_example(engines, features, events)

    try:
        check()
    finally:
        engines.close(but=PLAIN)
    print(f"{variant}: {engines.num_tokens} tokens, {engines.num_ties} ties")
    assert engines.num_ties <= engines.num_tokens / 500
