"""What a command line says of what it cannot take: the name, the value, what is allowed, and what to do."""

from __future__ import annotations

import pytest

from inflight.entrypoints.cli.foreign_flags import sort_out
from inflight.errors import ConfigError
from tests.unit.entrypoints.runner import invoke


def said(line: str, code: int = 2) -> str:
    done = invoke(line.split())
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate hello", "'hello' is not an option: give a prompt as -p TEXT"),
        ("chat ./model", "'./model' is not an option: give a model as -m MODEL"),
        ("env x", "'x' is not an option: this command takes options only"),
        ("serve a b", "takes only one MODEL, but 'b' is a second one"),
        ("generate -p x --max-tokens abc", "--max-tokens: 'abc' should be an integer"),
        ("chat --temperature hot", "--temperature: 'hot' should be a number"),
        ("bench serve --num-prompts 0", "--num-prompts: '0' should be greater than or equal to 1"),
        ("download org/name", "there is no command 'download': `inflight pull ORG/NAME` downloads a model of the hub"),
        ("pull", "Missing argument 'MODEL'"),
        ("pull .", "'.' is on this machine already"),
        ("show org/quants:Q4_K_M", "the hub's cache has no 'org/quants:Q4_K_M': `inflight pull org/quants:Q4_K_M`"),
        ("serv", "there is no command 'serv': did you mean 'serve'?"),
        ("xyz", "there is no command 'xyz': `inflight --help` lists them"),
        ("bench xyz", "there is no command 'xyz': `inflight bench --help` lists them"),
        ("bench srve", "there is no command 'srve': did you mean 'serve'?"),
        ("serve --prot 3", "there is no option --prot; did you mean --port?"),
        ("serve --max-modle-len 3", "there is no option --max-modle-len; did you mean --max-model-len?"),
        ("generate --frobnicate -p x", "there is no option --frobnicate; -h lists all"),
        ("worker", "\nError: Missing option '--nnodes'.\n"),
        ("serve --enable-lora", "--enable-lora is not supported: LoRA adapters are not served"),
        ("serve --middleware=os.system", "--middleware is not supported: no code from outside"),
    ],
)
def test_a_mistake_is_told_with_what_to_do(line: str, message: str) -> None:
    assert message in said(line)


def test_flags_of_other_engines_are_left_out_and_told() -> None:
    output = said("serve --check --port 0 --enable-auto-tool-choice --swap-space 4 --uvicorn_log_level=info", code=0)
    assert output.count("note:") == 3
    assert "--enable-auto-tool-choice has no effect here: tool calls are always parsed" in output
    assert "--uvicorn-log-level" in output
    assert "the revision of the model" in said("serve --check --port 0 --code-revision main", code=0)


def test_only_what_belongs_to_a_foreign_flag_goes_with_it() -> None:
    line = [
        "m",
        "--swap-space",
        "4",
        "--port",
        "1",
        "--swap-space",
        "--host",
        "x",
        "--swap-space=3",
        "-p",
        "--swap-space",
        "--",
        "--swap-space",
    ]
    arguments, notes = sort_out(line, {"-p": "=", "--port": "=", "--host": "="})
    assert arguments == ["m", "--port", "1", "--host", "x", "-p", "--swap-space", "--", "--swap-space"]
    assert len(notes) == 3
    with pytest.raises(ConfigError, match="--ec-transfer-config is not supported"):
        sort_out(["--ec_transfer_config={}"], {})
