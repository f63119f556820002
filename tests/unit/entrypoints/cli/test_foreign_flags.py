"""Flags of other engines: each flag of vLLM is known; docs/from-vllm.md lists those that are not ours."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from inflight.entrypoints.cli.foreign_flags import NO_EFFECT, REFUSED, SAME, SAME_VALUES, sort_out
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.errors import ConfigError
from scripts import flags
from tests.unit.entrypoints.runner import COMMAND, invoke

SERVE: Any = COMMAND.commands["serve"]
OWN = {flag for option in SERVE.params for flag in (*option.opts, *option.secondary_opts)}
LINES = (Path(__file__).parent / "vllm_flags.txt").read_text(encoding="utf-8").splitlines()
VLLM_FLAGS = [line for line in LINES if not line.startswith("#")]


def names(table: dict[str, str]) -> list[str]:
    return [flag.rstrip("=+") for flags in table.values() for flag in flags.split()]


def parsed(line: str) -> Any:
    """The values that `inflight serve` reads on this command line."""
    return SERVE.make_context("serve", line.split()).params


def test_every_flag_of_vllm_is_known() -> None:
    same = {flag.removesuffix("[]") for flag in SAME}
    known = [OWN, same, set(names(NO_EFFECT)), set(names(REFUSED))]
    assert len(VLLM_FLAGS) > 300
    for flag in VLLM_FLAGS:
        assert sum(any(fnmatchcase(flag, name) for name in table) for table in known) == 1, flag


def test_a_flag_is_in_one_table_and_ours_are_in_none() -> None:
    foreign = [flag.removesuffix("[]") for flag in SAME] + names(NO_EFFECT) + names(REFUSED)
    assert len(foreign) == len(set(foreign))
    assert not OWN & set(foreign)
    assert {ours.partition("=")[0] for ours in SAME.values()} <= OWN
    assert {theirs.split()[0] for theirs in SAME_VALUES} <= OWN


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--max_model_len 64 --no_enable_prefix_caching", "--max-model-len 64 --no-enable-prefix-caching"),
        ("--max_model_len=64", "--max-model-len 64"),
        ("-q int8 -n 2 -r 1 -asc 3", "--quantization int8 --nnodes 2 --node-rank 1 --api-server-count 3"),
        ("--trust-request-chat-template m", "m"),
        ("--enable-request-chat-template --template-timeout 2 m", "m"),
        ('--allowed-origins ["https://a","https://b"]', "--allowed-origin https://a --allowed-origin https://b"),
        ("--allowed-methods=GET", "--allowed-method GET"),
        ("m --served-model-name a b --port 1", "m --served-model-name a --served-model-name b --port 1"),
        ("--model m --api-key key-1-xyz key-2-xyz", "--model m --api-key key-1-xyz --api-key key-2-xyz"),
        ("--served-model-name a ./m", "./m --served-model-name a"),
        ("--dtype half --generation-config=vllm", "--dtype float16 --generation-config none"),
        ("--sse-keep-alive-interval 3", "--stream-keep-alive-interval 3"),
        ("-O.mode 3 -O.level=3 m", "m"),
        ("m -O3 --compilation-config.mode 3 --no-enable-lora -cc {}", "m"),
        ("-O 3 --mm-processor-cache-type shm --mm-encoder-only m", "m"),
        ("m --allowed-media-domains a b", "m --allowed-media-domains a --allowed-media-domains b"),
        ("--cudagraph-capture-sizes 1 2 4 --port 3", "--port 3"),
        ("--max-logprobs -1 m", "m"),  # a negative number is a value
    ],
)
def test_what_a_command_line_of_vllm_means(theirs: str, ours: str) -> None:
    assert parsed(theirs) == parsed(ours)


def test_an_empty_list_does_not_take_the_next_flag_as_its_value() -> None:
    with pytest.raises(ConfigError, match="--allowed-methods: the list is empty"):
        sort_out(["--allowed-methods", "[]", "--check"], {"--allowed-method": "+"})


def test_a_foreign_flag_of_a_command_without_its_counterpart() -> None:
    assert sort_out(["-n", "2"], {"-n": "=", "--nnodes": "="})[0] == ["-n", "2"], "our own meaning goes first"
    assert sort_out(["-q", "int8"], {"--port": "="})[0] == ["-q", "int8"]


def test_fields_of_requests_that_reasons_name_exist() -> None:
    fields = ChatCompletionRequest.model_fields.keys()
    ours = {name.removeprefix("--").replace("-", "_") for name in OWN}
    for reason in (*NO_EFFECT, *REFUSED):
        if "request sets" in reason or "each tool sets" in reason:
            named = set(re.findall(r"[a-z]+(?:_[a-z]+)+", reason)) - ours
            assert named <= fields, (reason, named - fields)


@pytest.mark.parametrize("flag", names(REFUSED))
def test_a_refused_flag_says_why(flag: str) -> None:
    flag = flag.replace("*", "x")
    with pytest.raises(ConfigError, match=f"{flag} is not supported: \\S"):
        sort_out([flag, "1"], {})


def test_the_parts_of_a_json_value() -> None:
    with pytest.raises(ConfigError, match=r"--speculative-config"):
        sort_out(["--speculative-config.method", "ngram"], {"--speculative-config": "="})


def test_a_refused_flag_ends_the_command() -> None:
    done = invoke(["serve", "--check", "-dp", "2", "-dpm", "8000"])
    assert done.exit_code == 2
    assert "-dpm is not supported: on several machines give --data-parallel-hybrid-lb or --headless" in done.output
    done = invoke(["serve", "--check", "-dp", "0"])
    assert done.exit_code == 2
    assert "data_parallel_size=0 is not an integer in [1, 4096]" in done.output


def test_the_page_lists_them() -> None:
    page = flags.PAGE.read_text(encoding="utf-8")
    assert flags.with_tables(page) == page, "run scripts/flags.py"
    with pytest.raises(ValueError, match="lacks"):
        flags.with_tables("# Title\n")
