"""Real clients against `inflight serve`: starts a server of the embedded model, and one of a small model with random weights
that reads images, and runs each client's tests against them.

`make test-clients` makes the environments that these tests need, and then runs this file with the project's own Python.
Every set of tests runs in the environment of its clients, in a process that is ended after its time. The exit code is 0
if all of them have passed; what cannot run here is named with the reason.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.free_port import free_port
from tests.support.served_image_model import write_served_image_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = Path(os.environ.get("INFLIGHT_CLIENTS_DIR", ROOT / ".venv-clients"))
START_SECONDS = 120
KEY = secrets.token_hex(16)


@dataclass(frozen=True)
class Suite:
    """The tests of the clients that share one environment."""

    name: str
    command: list[str]
    seconds: float  # after which it hangs; several times what a busy machine needs
    missing: str = ""  # why the suite cannot run here; "" if it can


def pytest(environment: str, *files: str) -> list[str]:
    python = ENVIRONMENTS / environment / "bin" / "python"
    options = ["-c", str(HERE / "pytest.ini"), "-q", "--tb=short", "--durations=5"]
    return [str(python), "-m", "pytest", *options, *(str(HERE / file) for file in files)]


def node_tests() -> list[str]:
    """Node finds packages in the folders above a file, so the tests run as copies beside their node_modules."""
    folder = ENVIRONMENTS / "node"
    if folder.is_dir():
        for path in (HERE / "node").glob("*.mjs"):
            shutil.copy(path, folder)
    tests = sorted(str(folder / path.name) for path in (HERE / "node").glob("*.test.mjs"))
    return ["node", "--test", "--test-reporter=spec", "--test-timeout=600000", *tests]


def _missing_for_page(*, has_node: bool) -> str:
    if not has_node:
        return "node or npm is not installed"
    return "" if shutil.which("chromedriver") else "chromium and chromium-driver are not installed"


def suites() -> list[Suite]:
    has_node = (ENVIRONMENTS / "node" / ".stamp").exists()
    current = [
        "test_openai.py",
        "test_anthropic.py",
        "test_ollama.py",
        "test_http.py",
        "test_langchain.py",
        "test_pydantic_ai.py",
    ]
    current += ["test_openai_agents.py", "test_cohere.py", "test_images.py"]
    templates = ["templates", "image_templates", "gemma_images"]
    own = [
        str(ROOT / ".venv" / "bin" / "python"),
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-q",
        "--tb=short",
    ]
    return [
        Suite("templates", [*own, *(str(HERE / f"test_{name}.py") for name in templates)], 1800),
        Suite("openai-3", pytest("openai-3", *current), 900),
        Suite(
            "openai-2",
            pytest("openai-2", "test_openai.py", "test_litellm.py", "test_llama_index.py", "test_images_litellm.py"),
            900,
        ),
        Suite("lm-eval", pytest("openai-2", "test_lm_eval.py"), 600),
        Suite("vllm", pytest("openai-3", "test_vllm_bench.py"), 900),
        Suite("page", [*own, str(HERE / "test_page.py")], 300, _missing_for_page(has_node=has_node)),
        Suite("node", node_tests(), 900, "" if has_node else "node or npm is not installed"),
    ]


@contextlib.contextmanager
def server(*options: str, key: str = KEY) -> Iterator[str]:
    """The address of a server that is ready, with these options of `inflight serve`. If `key` is empty, clients need none. The
    server ends with the `with` block."""
    port = free_port()
    command = [str(ROOT / ".venv" / "bin" / "inflight"), "serve", *options, "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFLIGHT_SERVE_")}
    with tempfile.TemporaryFile("w+") as log:
        started = subprocess.Popen(
            [*command, "--access-log", "off"],
            cwd=ROOT,
            env={**environment, **({"INFLIGHT_API_KEY": key} if key else {})},
            stdout=log,
            stderr=log,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(started, url)
            yield url
        except BaseException:
            log.seek(0)
            print(f"the server's log:\n{log.read()[-5000:]}", file=sys.stderr)
            raise
        finally:
            started.terminate()
            try:
                started.wait(300)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def image_server(folder: str) -> contextlib.AbstractContextManager[str]:
    """A server of a model that reads images, which is written into the folder."""
    model = write_served_image_model(Path(folder) / "images")
    return server(str(model), "--served-model-name", "images", "--max-model-len", "1024", "--dtype", "float32")


def wait_until_ready(started: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            if answer.status == 200:
                return
        if started.poll() is not None:
            raise RuntimeError(f"the server has ended with exit code {started.returncode}")
        if time.monotonic() > end:
            raise TimeoutError(f"the server is not ready after {START_SECONDS} seconds")
        time.sleep(0.2)


def run(suite: Suite, url: str, images_url: str) -> str:
    """Run a suite. Returns "passed", or what went wrong in one line."""
    if suite.missing:
        return f"skipped: {suite.missing}"
    environment = {
        **os.environ,
        "INFLIGHT_CLIENT_TESTS_URL": url,
        "INFLIGHT_CLIENT_TESTS_IMAGES_URL": images_url,
        "INFLIGHT_CLIENT_TESTS_KEY": KEY,
        "INFLIGHT_CLIENT_TESTS_VLLM": str(ENVIRONMENTS / "vllm" / "bin" / "python"),
        # no downloads from a hub, no telemetry
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        environment.pop(name, None)
    started = subprocess.Popen(suite.command, cwd=HERE, env=environment, start_new_session=True)
    try:
        code = started.wait(suite.seconds)
    except subprocess.TimeoutExpired:
        return f"failed: not finished after {suite.seconds:.0f} seconds"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # and all processes that a test has left behind
        started.wait()
    return "passed" if code == 0 else f"failed: exit code {code}"


def main(names: list[str]) -> int:
    """Runs the suites of these names, or all of them."""
    known = suites()
    unknown = set(names) - {suite.name for suite in known}
    if unknown:
        print(f"no such suite: {', '.join(sorted(unknown))}; there are {', '.join(suite.name for suite in known)}")
        return 2
    results: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        server("--dtype", "float32") as url,
        image_server(folder) as images_url,
    ):
        for suite in known:
            if names and suite.name not in names:
                continue
            print(f"== {suite.name}", flush=True)
            begin = time.monotonic()
            results[suite.name] = f"{run(suite, url, images_url)} ({time.monotonic() - begin:.0f} s)"
    for name, result in results.items():
        print(f"{name:<10} {result}")
    return 1 if any(result.startswith("failed") for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
