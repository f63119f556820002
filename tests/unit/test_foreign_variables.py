"""Environment variables of other engines: none that is set is ignored without a word, and none that protects a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.envs import ADMIN_KEY_VARIABLE, API_KEY_VARIABLES
from inflight.foreign_variables import NO_EFFECT, OF_OTHER_SERVERS, REFUSED, SAME, engine_notes, refusals, server_notes

LINES = (Path(__file__).parent / "vllm_variables.txt").read_text(encoding="utf-8").splitlines()
VLLM_VARIABLES = [line for line in LINES if not line.startswith("#")]
READ = {"VLLM_API_KEY", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"}
KEY = {"api_keys": ("some-long-key",)}


def test_every_variable_of_vllm_is_read_or_named_with_a_reason() -> None:
    assert len(VLLM_VARIABLES) > 290
    for name in VLLM_VARIABLES:
        found = [*refusals({name: "1"}, {}), *server_notes({name: "1"}, {})]
        assert len(found) == (name not in READ), name
        assert all(name in line and "reads no such" not in line for line in found), found


def test_one_variable_is_in_one_table() -> None:
    names = [*SAME, *OF_OTHER_SERVERS, *REFUSED, *(name for names in NO_EFFECT.values() for name in names.split())]
    assert len(names) == len(set(names))
    assert not READ & set(names)


@pytest.mark.parametrize(
    "name", ["VLLM_USE_V1", "VLLM_MODEL", "SGLANG_ENABLE_X", "SGL_X", "LLAMA_ARG_MMAP", "OLLAMA_HOST"]
)
def test_a_server_names_variables_of_other_engines(name: str) -> None:
    (note,) = server_notes({name: "x", "PATH": "/bin", "LANG": "C"}, {})
    assert note.startswith(f"{name} has no effect here: ")
    assert list(engine_notes({name: "x"})) == ([note] if name.startswith("VLLM_") else [])


@pytest.mark.parametrize(
    "name",
    """
    VLLM_API_KEYS VLLM_API_KEY_FILE VLLM_SERVER_API_KEY VLLM_APIKEY INFLIGHT_API_KEYS INFLIGHT_API_KEY_FILE INFLIGHT_APIKEY
    INFLIGHT_SERVE_API_KEYS LLAMA_API_KEY LLAMA_ARG_API_KEY LLAMA_ARG_API_KEY_FILE APHRODITE_API_KEY
    """.split(),
)
def test_a_key_that_nothing_reads_ends_the_start_of_a_server_without_keys(name: str) -> None:
    (reason,) = refusals({name: "some-long-key"}, {})
    assert name in reason and "INFLIGHT_API_KEY" in reason and "some-long-key" not in reason
    for closed in (KEY, {"api_key_file": "/keys"}, {"ssl_ca_certs": "/ca.pem"}, {"headless": True}):
        assert not list(refusals({name: "some-long-key"}, closed))
        named = list(server_notes({name: "some-long-key"}, closed))
        assert len(named) == (not name.startswith("INFLIGHT_")), "inflight.envs names ours"


@pytest.mark.parametrize("name", [*API_KEY_VARIABLES, ADMIN_KEY_VARIABLE, "INFLIGHT_SERVE_API_KEY_FILE"])
def test_variables_of_keys_that_are_read(name: str) -> None:
    assert not [*refusals({name: "some-long-key"}, {}), *server_notes({name: "some-long-key"}, {})]


def test_a_key_that_is_empty_or_not_used_is_named() -> None:
    empty = {"VLLM_API_KEY": "", "INFLIGHT_API_KEY": " "}
    assert [line.split()[0] for line in server_notes(empty, {})] == ["INFLIGHT_API_KEY", "VLLM_API_KEY"]
    both = {"VLLM_API_KEY": "key-of-vllm", "INFLIGHT_API_KEY": "key-of-ours"}
    assert list(server_notes(both, KEY)) == ["VLLM_API_KEY is not read, because INFLIGHT_API_KEY is set"]


def test_what_changes_results_or_tls_ends_the_start_unless_it_is_set_here() -> None:
    for name, settled in (
        ("VLLM_BATCH_INVARIANT", {"batch_invariant": True}),
        ("LLAMA_ARG_SSL_KEY_FILE", {"ssl_certfile": "/cert.pem"}),
    ):
        assert len(list(refusals({name: "1"}, {}))) == 1 and not list(server_notes({name: "1"}, {}))
        assert not list(refusals({name: "1"}, settled)) and len(list(server_notes({name: "1"}, settled))) == 1
    for value in ("0", "false", "False", "", "no"):
        assert not list(refusals({"VLLM_BATCH_INVARIANT": value, "VLLM_USE_MODELSCOPE": value}, {}))
    assert len(list(engine_notes({"VLLM_BATCH_INVARIANT": "1"}))) == 1


def test_variables_of_kubernetes_are_left_out() -> None:
    url = "tcp://10.0.0.1:80"
    given = {
        "VLLM_PORT": url,
        "VLLM_SERVICE_HOST": "10.0.0.1",
        "VLLM_QWEN_PORT_80_TCP_ADDR": "10.0.0.1",
        "VLLM_QWEN_SERVICE_PORT_HTTP": "80",
        "OLLAMA_PORT_80_TCP": url,
    }
    assert not list(server_notes(given, {}))
    assert len(list(server_notes({"VLLM_PORT": "5000"}, {}))) == 1
