"""lm-eval: generation through both endpoints, and log-likelihoods. The tasks and their data are made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from conversations import MODEL, PERSON, SUM_ANSWER
from lm_eval.tasks import TaskManager

TOKENIZER = Path(__file__).resolve().parents[2] / "inflight" / "demo" / "model"

GENERATE = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/sums.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 100, do_sample: false}
metric_list: [{metric: exact_match}]
"""
CHOOSE = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/capitals.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "<|im_start|>user\\n{{question}}<|im_end|>\\n<|im_start|>assistant\\n"
doc_to_choice: choices
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
ROLL = """
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    rows: dict[str, list[dict[str, Any]]] = {
        "sums": [{"question": "What is 7 + 5?", "answer": SUM_ANSWER}] * 4,
        "capitals": [
            {"question": "What is the capital of France?", "choices": ["Oslo", "Paris", "Rome"], "answer": 1},
            {"question": "What is the capital of Norway?", "choices": ["Oslo", "Paris", "Rome"], "answer": 0},
        ],
        "texts": [{"text": "Once upon a time there was a fox named Anna."}, {"text": json.dumps(PERSON)}],
    }
    for name, text in (("sums", GENERATE), ("capitals", CHOOSE), ("texts", ROLL)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch, api_key: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", api_key)


def results(model: str, url: str, task: str, tasks: TaskManager, *, chat: bool = False, **more: Any) -> dict[str, Any]:
    arguments = {"model": MODEL, "base_url": url, "num_concurrent": 2, "max_retries": 1, "max_length": 2048, **more}
    found: Any = lm_eval.simple_evaluate(
        model, model_args=arguments, tasks=[task], task_manager=tasks, apply_chat_template=chat, bootstrap_iters=0
    )
    return dict(found["results"][task])


def test_chat(base_url: str, tasks: TaskManager) -> None:
    found = results(
        "local-chat-completions", f"{base_url}/chat/completions", "sums", tasks, chat=True, tokenizer_backend=None
    )
    assert found["exact_match,none"] == 1


LOCAL = {"tokenizer": str(TOKENIZER), "tokenizer_backend": "huggingface"}
REMOTE = {"tokenizer_backend": "remote"}


@pytest.mark.parametrize("tokenizer", [LOCAL, REMOTE], ids=["local tokenizer", "remote tokenizer"])
def test_loglikelihoods(base_url: str, api_key: str, tasks: TaskManager, tokenizer: dict[str, str]) -> None:
    if tokenizer is REMOTE:
        tokenizer = {**REMOTE, "auth_token": api_key}  # the requests for the tokenizer do not use OPENAI_API_KEY
    assert results("local-completions", f"{base_url}/completions", "capitals", tasks, **tokenizer)["acc,none"] == 1


def test_rolling_loglikelihoods(base_url: str, tasks: TaskManager) -> None:
    assert results("local-completions", f"{base_url}/completions", "texts", tasks, **LOCAL)["word_perplexity,none"] > 1


def test_completions(base_url: str, tasks: TaskManager) -> None:
    found = results("local-completions", f"{base_url}/completions", "sums", tasks, **LOCAL)
    assert (
        0 <= found["exact_match,none"] <= 1
    )  # without the chat template the model writes a story, so any score is right
