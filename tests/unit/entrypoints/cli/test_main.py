"""The command line itself: help, options, errors and exit codes, prompts on the command line, chat, env."""

from __future__ import annotations

import dataclasses
import http.server
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import Result

import inflight
from inflight.config.cuda_driver import CudaFacts
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.env import environment, gpu_facts, kernel_facts, packed_weights_facts
from inflight.entrypoints.cli.terminal import CompletionPrinter, TextStream
from inflight.errors import ConfigError, StepError
from inflight.outputs import CompletionOutput, RequestOutput
from inflight.sampling_params import SamplingParams
from inflight.setting_text import parse_bytes, parse_count
from tests.architecture.source import ROOT
from tests.unit.config.fake_driver import H200, facts
from tests.unit.entrypoints.fake_engine import FakeEngine
from tests.unit.entrypoints.runner import COMMAND, invoke


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    level = logging.getLogger("inflight").level
    yield
    logging.getLogger("inflight").setLevel(level)


def run(*arguments: str, engine: FakeEngine | None = None, input: str = "") -> Result:
    return invoke(list(arguments), obj=engine or FakeEngine(), input=input)


# -- help and options --------------------------------------------------------------------------------------------------

_HELP = """
import sys
import threading
from inflight.entrypoints.cli.main import app
try:
    app(sys.argv[1:])
finally:
    print(sorted({"torch", "numpy", "transformers", "tokenizers", "jinja2", "rich", "tqdm"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        *[
            tuple(each.split())
            for each in ("generate", "chat", "bench", "bench offline", "bench serve", "trace", "env")
        ],
    ],
)
def test_help_loads_nothing_heavy(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", _HELP, *arguments, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: ")
    assert done.stdout.splitlines()[-1] == "[]"


def test_options_are_grouped() -> None:
    text = run("generate", "--help").output
    titles = ["Options:", "Sampling (default", "Model:", "Engine:", "Examples:"]
    assert sorted(titles, key=text.index) == titles
    assert "|none " not in text.replace("auto|none ", "")  # what is not given is None already
    assert "<" not in text.replace("<file", "").replace("</think>", "")  # no type names of Python


def test_version() -> None:
    assert run("--version").output == f"inflight {inflight.__version__}\n"


def test_version_and_help_are_commands_too() -> None:
    assert run("version").output == run("--version").output
    assert run("help").output == run("--help").output
    for name in ("serve", "generate", "bench", "bench offline", "env"):
        assert run("help", *name.split()).output == run(*name.split(), "--help").output
    assert run("help", "serve", "more").output == run("help", "serve").output
    wrong = run("help", "generat")
    assert wrong.exit_code == 2 and "did you mean 'generate'" in wrong.stderr


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("What is 2 + 3?", "What is 2 + 3?"),
        ("one\n", "one"),
        ("one\n\n", "one\n"),
        ("one\ntwo\n", "one\ntwo"),
        ("  grüße ", "  grüße "),
    ],
)
def test_a_prompt_comes_from_standard_input(text: str, prompt: str) -> None:
    engine = FakeEngine()
    done = run("generate", "--json", engine=engine, input=text)
    assert done.exit_code == 0, done.stderr
    other = FakeEngine()
    assert run("generate", "--json", "-p", prompt, engine=other, input="something else").exit_code == 0
    assert list(engine.prompts.values()) == list(other.prompts.values())


@pytest.mark.parametrize("text", ["", "\n", "  \n"])
def test_an_empty_standard_input_is_no_prompt(text: str) -> None:
    done = run("generate", input=text)
    assert done.exit_code == 2 and "--prompt" in done.stderr and "standard input" in done.stderr


def test_engine_options_are_engine_args() -> None:
    engine = FakeEngine()
    assert run("generate", "-p", "a", engine=engine).exit_code == 0
    assert engine.args == EngineArgs()
    command = COMMAND.commands["generate"]
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert names <= {option.name for option in command.params}
    assert run("generate", "-p", "a", "--seed", "3", engine=engine).exit_code == 0
    assert engine.args == EngineArgs(), "the seed is that of the requests"


def test_every_option_reaches_the_engine() -> None:
    engine = FakeEngine()
    options = (
        "--model m --dtype float32 --max-model-len 77 --max-num-seqs 3 --kv-cache-memory-bytes 1.5M --num-threads 1"
    )
    assert run("generate", "-p", "a", *options.split(), "--no-enable-prefix-caching", engine=engine).exit_code == 0
    assert engine.args == EngineArgs(
        model="m", dtype="float32", max_model_len=77, max_num_seqs=3, kv_cache_memory_bytes=3 * 2**19, num_threads=1,
        enable_prefix_caching=False,
    )  # fmt: skip


def test_sampling_options_are_sampling_params() -> None:
    engine = FakeEngine(default_params=SamplingParams(temperature=0.3, top_k=9, max_tokens=99))
    options = "--top-p 0.5 --stop a --stop b --stop-token-id 4 --ignore-eos --max-tokens 2 --seed 0 --n 2 --bad-word x"
    done = run("generate", "-p", "a", *options.split(), engine=engine)
    assert done.exit_code == 0, done.output
    assert engine.params["1"] == SamplingParams(
        temperature=0.3, top_k=9, top_p=0.5, stop=["a", "b"], stop_token_ids=[4], ignore_eos=True, max_tokens=2, seed=0,
        n=2, bad_words=["x"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"), [("5", 5), ("2G", 2**31), ("512m", 2**29), ("1.5KiB", 1536), ("1 TB", 2**40)]
)
def test_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5), ("-1", -1), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("1M", 2**20), ("2m", 2 * 10**6)],
)
def test_numbers_of_tokens(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "k", "auto", "1.5", "1.0001k", "5 k", "32G", "1e3", "٣", "9" * 400])
def test_no_numbers_of_tokens(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of tokens"):
        parse_count(text)


@pytest.mark.parametrize("text", ["", "G", "-5", "2X", "1e9", "5 5", "9" * 400])
def test_no_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes"):
        parse_bytes(text)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "either --prompt"),
        (["generate", "-p", "a", "-i", "x"], "either --prompt"),
        (["generate", "-p", "a", "-o", "x"], "need --input"),
        (["generate", "-p", "a", "--logprobs", "1"], "JSON"),
        (["generate", "-i", "no-such-file", "-o", "x"], "no such file"),
        (["generate", "-i", "no-such-file"], "no such file"),
        (["generate", "-p", "a", "--max-tokens", "0"], "max_tokens=0"),
        (["generate", "-p", "a", "--min-tokens", "9", "--max-tokens", "2"], "min_tokens=9"),
        (["generate", "-p", "a", "--dtype", "int3"], "dtype='int3'"),
        (["generate", "-p", "a", "--kv-cache-memory-bytes", "lots"], "number of bytes"),
        (["generate", "-p", "a", "--nonsense"], "--nonsense"),
        (["chat", "-n", "2"], "inflight generate"),
        (["bench", "offline", "-w", "decode7"], "decode7"),
        (["bench", "offline", "-w", "all", "--batch-size", "1"], "cannot be combined"),
        (["nonsense"], "nonsense"),
    ],
)
def test_a_wrong_command_line_loads_no_engine(arguments: list[str], message: str) -> None:
    engine = FakeEngine()
    done = run(*arguments, engine=engine)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert engine.args is None


def test_the_input_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n')
    done = run("generate", "-i", str(path), "-o", str(path), "--overwrite")
    assert done.exit_code == 2
    assert path.read_text() == '{"prompt": "a"}\n'


def test_an_error_is_one_line_and_verbose_shows_all() -> None:
    short = run("generate", "-p", "a" * 2000)
    assert (short.exit_code, short.stderr) == (2, "error: too long: -1000 tokens are left\n")
    for arguments in (["-v", "generate"], ["generate", "-v"]):
        long = run(*arguments, "-p", "a" * 2000)
        assert long.exit_code == 2
        assert "Traceback" in long.stderr


def test_the_log_level_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_LOG_LEVEL", "debug")
    assert "Traceback" in run("generate", "-p", "a" * 2000).stderr
    monkeypatch.setenv("INFLIGHT_LOG_LEVEL", "loud")
    done = run("generate", "-p", "a")
    assert done.exit_code == 2
    assert "INFLIGHT_LOG_LEVEL='LOUD'" in done.stderr


def test_an_engine_that_fails_is_no_mistake_of_the_user() -> None:
    def fail(step: int) -> None:
        raise StepError("rank 0 raised", rank=0, worker_traceback="Traceback of the worker")

    engine = FakeEngine(on_step=fail)
    done = run("generate", "-p", "a", engine=engine)
    assert (done.exit_code, done.stderr) == (1, "error: rank 0 raised (-v shows all of it)\n")
    assert engine.is_closed


# -- prompts on the command line ---------------------------------------------------------------------------------------


def test_one_prompt_is_printed_alone() -> None:
    assert run("generate", "-p", "Hello").stdout == "Hello!\n"


def test_several_prompts_are_printed_in_their_order() -> None:
    done = run("generate", "-p", "a long one", "-p", "b")
    assert done.stdout == "> a long one\na long one!\n\n> b\nb!\n"


def test_several_completions_are_numbered() -> None:
    assert run("generate", "-p", "a", "-n", "2").stdout == "[0] a!\n[1] a!\n"


def test_prompts_as_json() -> None:
    done = run("generate", "-p", "long", "-p", "b", "--json", "--logprobs", "0")
    assert [json.loads(line)["row"] for line in done.stdout.splitlines()] == [2, 1]


def test_a_prompt_is_a_message_where_there_is_a_template() -> None:
    assert run("generate", "-p", "Hi", engine=FakeEngine(has_chat_template=True)).stdout == "<user>Hi!\n"
    assert run("generate", "-p", "Hi", "--raw", engine=FakeEngine(has_chat_template=True)).stdout == "Hi!\n"
    done = run("generate", "-p", "Hi", "--chat")
    assert done.exit_code == 2
    assert "no chat template" in done.stderr


def test_max_tokens_has_a_default_that_gives_way_to_the_context() -> None:
    for max_model_len, expected in ((1000, 256), (100, 99)):
        engine = FakeEngine(max_model_len=max_model_len, answer=lambda prompt: "x" * 5000)
        assert len(run("generate", "-p", "a", engine=engine).stdout) == expected + 1
    assert run("generate", "-p", "a", "--max-tokens", "100", engine=FakeEngine(max_model_len=100)).exit_code == 0
    assert run("generate", "-p", "a" * 100, engine=FakeEngine(max_model_len=100)).exit_code == 2


def test_the_printer_streams_whose_turn_it_is() -> None:
    def output(text: str, finished: bool) -> RequestOutput:
        completion = CompletionOutput(index=0, text=text, token_ids=[])
        return RequestOutput(request_id="", prompt=None, prompt_token_ids=[], outputs=[completion], finished=finished)

    file = StringIO()
    printer = CompletionPrinter(file, ["p", "q"])
    seen = []
    for index, text, finished in ((1, "b", False), (0, "a", False), (1, "bb", True), (0, "aa", False), (0, "aa", True)):
        printer.update(index, output(text, finished))
        seen.append(file.getvalue())
    assert seen == ["", "> p\na", "> p\na", "> p\naa", "> p\naa\n\n> q\nbb\n"]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_control_characters_of_the_model_as_text() -> None:
    text = "a\x1b]52;c;aGk=\x07\x1b[2J\r\x9b\x08\tb\nü"
    shown = r"a\x1b]52;c;aGk=\x07\x1b[2J\x0d\x9b\x08" + "\tb\nü"
    for file, expected in ((Terminal(), shown), (StringIO(), text)):
        stream = TextStream(file)
        for end in range(1, len(text) + 1):
            stream.update(text[:end])
        assert file.getvalue() == expected, "a file gets the text as it is"
    completions = [CompletionOutput(index=index, text=text, token_ids=[]) for index in range(2)]
    output = RequestOutput(request_id="", prompt=None, prompt_token_ids=[], outputs=completions, finished=True)
    CompletionPrinter(file := Terminal(), ["p"]).update(0, output)
    assert file.getvalue() == f"[0] {shown}\n[1] {shown}\n"


# -- chat --------------------------------------------------------------------------------------------------------------


def answer(prompt: str) -> str:
    return f"({prompt.count('<user>')})"


def test_a_chat_remembers_until_it_is_reset() -> None:
    engine = FakeEngine(has_chat_template=True, answer=answer)
    done = run("chat", "--system", "Be brief.", engine=engine, input="a\n\nb\n/reset\nc\n/what\n/exit\nd\n")
    assert done.exit_code == 0
    assert done.stdout == "(1)\n(2)\n(1)\n"
    assert done.stderr.count("/reset forgets") == 1, "only for /what: nobody reads a greeting in a pipe"
    assert list(engine.prompts.values()) == [
        "<system>Be brief.<user>a",
        "<system>Be brief.<user>a<assistant>(1)<user>b",
        "<system>Be brief.<user>c",
    ]
    assert engine.is_closed


def test_images_come_before_the_first_question(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    (tmp_path / "b.png").write_bytes(b"b")
    engine = FakeEngine(has_chat_template=True, answer=answer, max_model_len=10_000)
    given = [option for name in ("a", "b") for option in ("--image", str(tmp_path / f"{name}.png"))]
    done = run("chat", *given, engine=engine, input="What?\nSure?\n/reset\nWhat?\n")
    assert done.stdout == "(1)\n(2)\n(1)\n", done.output
    first, second, third = engine.prompts.values()
    parts = [{"type": "image_url", "image_url": {"url": f"data:;base64,{each}"}} for each in ("YQ==", "Yg==")]
    assert first == third == f"<user>{[*parts, {'type': 'text', 'text': 'What?'}]}"
    assert second == f"{first}<assistant>(1)<user>Sure?"
    done = run("chat", "--image", str(tmp_path / "none.png"), engine=engine, input="a\n")
    assert done.exit_code == 2 and "none.png" in done.stderr


def test_ctrl_c_stops_the_answer_only() -> None:
    def interrupt(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    engine = FakeEngine(has_chat_template=True, answer=lambda prompt: "abcdefgh", on_step=interrupt)
    done = run("chat", engine=engine, input="a\nb\n")
    assert done.exit_code == 0
    assert done.stdout == "abc (stopped)\nabcdefgh\n"
    assert list(engine.prompts.values())[1] == "<user>a<assistant>abc<user>b"


def test_a_message_too_long_is_forgotten() -> None:
    engine = FakeEngine(has_chat_template=True, answer=answer, max_model_len=50)
    done = run("chat", engine=engine, input="a\n" + "x" * 100 + "\nb\n")
    assert done.stdout == "(1)\n(2)\n"
    assert "/reset" in done.stderr


class Served(http.server.BaseHTTPRequestHandler):
    """A server with OpenAI's API that says how many messages there were, or what is wrong."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append({"path": self.path, "key": self.headers["authorization"], **body})
        text = body["messages"][-1]["content"]
        self.send_response(400 if text == "bad" else 200)
        self.end_headers()
        if text == "bad":
            self.wfile.write(b'{"error": {"message": "no such thing"}}')
            return
        for piece in ("", "(", str(len(body["messages"])), ")"):
            chunk = {"choices": [{"index": 0, "delta": {"content": piece}}]}
            self.wfile.write(f": keep-alive\ndata: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


def test_a_chat_with_a_running_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret")
    Served.asked.clear()
    with http.server.HTTPServer(("127.0.0.1", 0), Served) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            url = f"127.0.0.1:{server.server_port}/v1"
            options = ["--temperature", "0", "--structured-outputs", '{"regex": "[a-c]"}']
            done = run("chat", "--url", url, "-s", "Be brief.", *options, input="a\nbad\nb\n/reset\nc\n")
        finally:
            server.shutdown()
            thread.join()
    assert done.stdout == "(2)\n(4)\n(2)\n", done.output
    assert "error: no such thing" in done.stderr
    first, _, third, _ = Served.asked
    assert first["path"] == "/v1/chat/completions" and first["key"] == "Bearer a-secret"
    assert (first["temperature"], first["structured_outputs"]) == (0, {"regex": "[a-c]"})
    assert "model" not in first and first["stream"]
    assert [each["content"] for each in third["messages"]] == ["Be brief.", "a", "(2)", "b"]


def test_a_chat_with_a_server_that_is_not_there() -> None:
    done = run("chat", "--url", "http://127.0.0.1:1", input="a\n")
    assert done.exit_code == 1 and "no server listens at http://127.0.0.1:1" in done.stderr
    assert "inflight serve" in done.stderr
    done = run("chat", "--url", "http://name.invalid", input="a\n")
    assert done.exit_code == 1 and "there is no machine 'name.invalid'" in done.stderr
    assert "no address of a server" in run("chat", "--url", "ftp://x", input="a\n").stderr
    assert "option of an engine" in run("chat", "--url", "x", "--dtype", "float32", input="a\n").stderr


def test_a_chat_needs_a_template() -> None:
    done = run("chat", engine=FakeEngine(), input="a\n")
    assert done.exit_code == 2
    assert done.stderr == "error: the model has no chat template\n"


# -- env ---------------------------------------------------------------------------------------------------------------


def test_env() -> None:
    done = run("env", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["inflight"]["version"] == inflight.__version__
    assert report["cpu"]["cores for this process"] >= 1
    shared = report["cpu"]["shared with other programs"]
    assert shared is None or re.fullmatch(r"(yes|no): .* waited for a core for \d+% of 50 ms", shared)
    assert report["packages"]["torch"] == report["torch"]["build"]
    assert "LlamaForCausalLM" in report["models"]["families"]
    text = run("env").stdout
    assert all(f"\n{section}\n" in f"\n{text}" for section in report)
    assert all(line.startswith("  ") and "  " in line.strip() for line in text.splitlines() if line not in report)


def test_env_says_why_gpus_are_not_used() -> None:
    def no_driver() -> CudaFacts:
        raise ConfigError("there is no NVIDIA driver")

    assert gpu_facts(no_driver) == {"devices": [], "obstacle": "there is no NVIDIA driver"}
    good = gpu_facts(lambda: facts(H200))
    assert good == {
        "devices": ["NVIDIA H200 (compute capability 9.0, 139.8 GiB)"],
        "CUDA of the driver": "13.0",
        "CUDA of torch": "13.0",
        "obstacle": "none",
    }
    bad = gpu_facts(lambda: facts(H200, torch_cuda=None))
    assert bad["devices"] == good["devices"]
    assert bad["CUDA of torch"] == "none"
    assert "a build without CUDA" in bad["obstacle"]


def test_secrets_are_not_shown() -> None:
    variables = {"HF_TOKEN": "hf_secret", "OMP_NUM_THREADS": "2", "HOME": "/home/me"}
    assert environment(variables.items()) == {"HF_TOKEN": "(set)", "OMP_NUM_THREADS": "2"}


def test_env_says_where_packed_weights_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "inflight" / "weights"
    assert packed_weights_facts() == {"folder": str(folder), "files": 0, "size": "0.00 GB"}
    folder.mkdir(parents=True)
    for name in "ab":
        with (folder / f"{name}.weights").open("wb") as file:
            file.truncate(10_000_000)
    assert packed_weights_facts() == {"folder": str(folder), "files": 2, "size": "0.02 GB"}


def test_env_says_which_kernels_are_used() -> None:
    built = kernel_facts(lambda: "auto")
    assert built["used"] in built["built"] and built["obstacle"] == "none"
    off = kernel_facts(lambda: "off")
    assert (off["built"], off["used"], off["obstacle"]) == (built["built"], "none", "INFLIGHT_CPU_KERNELS=off")
    other = kernel_facts(lambda: "neon")
    assert other["used"] == "none" and "'neon' cannot be used" in other["obstacle"]
