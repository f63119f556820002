"""Requests made from the server's own OpenAPI document, right and wrong ones, while eight good streams go on undisturbed.

They come from a fixed seed, so that every run of `make test` asks the same. `INFLIGHT_TEST_FULL=1`: 5,000 from a random seed,
which the test prints. To repeat such a run, write that seed into SEED.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.conftest import FULL
from tests.e2e.good_streams import GoodStreams
from tests.e2e.watched_server import WatchedServer, serve_process

NUM_CASES = 5000 if FULL else 200
EXAMPLES = 25 if FULL else 2  # of one operation, of one kind, in one round
SEED = 20260
SECONDS = 300.0  # no answer takes longer

_CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
_TOO_LARGE = 413  # a refusal, too, but not one that `negative_data_rejection` knows
_SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES,
    derandomize=False,  # the seed says
    phases=[hypothesis.Phase.generate],  # the first failure is shown as it is
    suppress_health_check=list(hypothesis.HealthCheck),
)
_SUM = "What is 7 + 5?"
_GOOD: dict[str, Any] = {"prompt": _SUM, "messages": [{"role": "user", "content": _SUM}], "input": _SUM}


def is_refusal_of_a_full_queue(response: schemathesis.Response) -> bool:
    if response.status_code != 503:
        return False
    error = response.json()["error"]  # in Ollama's form only a text
    is_overload = isinstance(error, str) or error["type"] == "overloaded_error"
    return is_overload and int(response.headers["retry-after"][0]) >= 1


def check_response(case: Case, response: schemathesis.Response) -> None:
    if response.status_code != 200:
        error = response.json()["error"]
        is_anthropics = case.path.startswith("/v1/messages")
        assert list(response.json()) == (["type", "error"] if is_anthropics else ["error"])
        if case.path.startswith("/api/"):
            error = {"message": error}
        else:
            assert set(error) == ({"type", "message"} if is_anthropics else {"message", "type", "param", "code"})
        assert 0 < len(error["message"]) <= 1000
    assert response.status_code < 500 or is_refusal_of_a_full_queue(response), response.text
    checks = _CHECKS if response.status_code == _TOO_LARGE else [*_CHECKS, negative_data_rejection]
    case.validate_response(response, checks=checks)


def with_few_fields(case: Case, choose: random.Random) -> Case:
    """A good prompt, and a few of the generated fields: all at once are hardly ever in order, and then nothing is done."""
    body = case.body
    names = [name for name in body if name != "model" and name not in _GOOD]
    kept = {name: body[name] for name in choose.sample(names, min(len(names), 3))}
    needed = {name: value for name, value in _GOOD.items() if name in body}
    case.body = {**kept, **dict(choose.sample(list(needed.items()), min(1, len(needed)))), **_tokens(body)}
    return case


def _tokens(body: dict[str, Any]) -> dict[str, Any]:
    """What /detokenize needs, within the vocabulary."""
    return {"tokens": [int(token) % 1000 for token in body["tokens"]]} if "tokens" in body else {}


def run_cases(
    operation: APIOperation[Any, Any, Any], mode: GenerationMode, seed: int, judge: Callable[[Case], None]
) -> None:
    """Each right body is sent twice, whole and with few of its fields, because to generate a body takes longer than to answer
    it."""

    @hypothesis.seed(seed)
    @_SETTINGS
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        judge(case)
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
            few = with_few_fields(case, random.Random(repr(case.body)))
            hypothesis.note(f"with few fields: {few.body}")
            judge(few)

    with contextlib.suppress(Unsatisfiable):  # an operation that takes nothing cannot be asked wrongly
        run()


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
def test_no_request_of_the_document_disturbs_the_server() -> None:
    seed = secrets.randbelow(2**32) if FULL else SEED
    print(f"seed: {seed}")
    with serve_process("--max-model-len", "256", "--access-log", "off") as server:
        engine = server.engine_pid
        good = GoodStreams(server.url)
        with good.running():
            statuses = _run_rounds(server, seed)
        print(f"{statuses.total()} cases: {dict(statuses)}; rounds of the good streams: {good.rounds}")
        server.seconds_to_baseline(SECONDS)
        assert server.engine_pid == engine
        assert requests.get(f"{server.url}/ready", timeout=SECONDS).status_code == 200
        assert statuses["200"] > NUM_CASES / 10  # not only refusals
    assert not [line for line in server.log if "ERROR" in line or "Traceback" in line]


def _run_rounds(server: WatchedServer, seed: int) -> Counter[str]:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=SECONDS)
    operations = [found.ok() for found in document.get_all_operations()]
    statuses: Counter[str] = Counter()
    with requests.Session() as session:

        def judge(case: Case) -> None:
            response = case.call(session=session, timeout=SECONDS)
            check_response(case, response)
            statuses[str(response.status_code)] += 1

        number = 0
        while statuses.total() < NUM_CASES:
            for operation in operations:
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                    run_cases(operation, mode, seed + number, judge)
            number += 1
    return statuses
