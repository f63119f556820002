"""`AGENTS`: the coding agents that `inflight launch` runs, a row for each: what each needs to use a server.

No file of the user's is changed. What an agent reads only from a file is given in an environment variable, in options, or in a
folder that lasts as long as the agent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NO_KEY = "none"  # agents want a key that is not empty; a server without keys accepts any
ANSWER_TOKENS = 8192  # of an agent that must be told how long an answer may get
KEY_VARIABLE = "INFLIGHT_LAUNCH_KEY"
FOLDER = "{folder}"  # stands for the folder with `Setting.files`


@dataclass(frozen=True)
class Target:
    """
    Attributes:
        url: the server's address, without /v1.
        context: the length of the model's context in tokens; None if the server does not say it.
        key: the server's API key; None if it has none.
    """

    url: str
    model: str
    context: int | None
    key: str | None = None

    @property
    def shown_key(self) -> str:
        return self.key or NO_KEY


@dataclass(frozen=True)
class Setting:
    """How an agent is run.

    Attributes:
        variables: of the environment; None removes one.
        options: come before those of the user.
        files: name -> text; they are in a folder of their own, for which `FOLDER` stands in the variables.
        beside: the user's own folder whose other files are in the new folder, too, as links; None if there is none.
    """

    variables: Mapping[str, str | None] = field(default_factory=dict)
    options: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    beside: Path | None = None


@dataclass(frozen=True)
class Agent:
    """Attributes: `program`: the name of its command. `install`: the command that installs it."""

    program: str
    install: str
    make: Callable[[Target], Setting]


def _claude(target: Target) -> Setting:
    # with one model any name would do, but not with several
    kinds = [f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")]
    names = ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", *kinds]
    return Setting(
        variables={
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.shown_key,
            **dict.fromkeys(names, target.model),
            **_context("CLAUDE_CODE_MAX_CONTEXT_TOKENS", target),
            # each of these would send the requests elsewhere
            **dict.fromkeys(("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")),
        }
    )


def _codex(target: Target) -> Setting:
    provider = {"name": "Inflight", "base_url": f"{target.url}/v1", "wire_api": "responses", "env_key": KEY_VARIABLE}
    given: dict[str, str | int] = {"model": target.model, "model_provider": "inflight"}
    given |= {f"model_providers.inflight.{name}": value for name, value in provider.items()}
    if target.context is not None:
        given["model_context_window"] = target.context
    # the values are TOML, whose strings and numbers are written like those of JSON
    options = [part for name, value in given.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Setting({KEY_VARIABLE: target.shown_key}, options)


def _opencode(target: Target) -> Setting:
    model: dict[str, object] = {"name": target.model}
    if target.context is not None:
        model["limit"] = {"context": target.context, "output": min(ANSWER_TOKENS, target.context // 2)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Inflight",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.shown_key},
        "models": {target.model: model},
    }
    name = f"inflight/{target.model}"
    config = {"model": name, "small_model": name, "provider": {"inflight": provider}}
    return Setting({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _pi(target: Target) -> Setting:
    own = Path("~/.pi/agent").expanduser()
    model: dict[str, object] = {"id": target.model}
    if target.context is not None:
        model["contextWindow"] = target.context
    provider = {
        "baseUrl": f"{target.url}/v1",
        "api": "openai-completions",
        "apiKey": target.shown_key,
        "models": [model],
    }
    files = {"models.json": json.dumps({"providers": {"inflight": provider}})}
    options = ("--provider", "inflight", "--model", target.model)
    return Setting({"PI_CODING_AGENT_DIR": FOLDER}, options, files, beside=own)


def _copilot(target: Target) -> Setting:
    return Setting(
        {
            "COPILOT_OFFLINE": "true",
            "COPILOT_MODEL": target.model,
            "COPILOT_PROVIDER_BASE_URL": f"{target.url}/v1",
            "COPILOT_PROVIDER_API_KEY": target.shown_key,
        }
    )


def _qwen(target: Target) -> Setting:
    return Setting({**_openai(target), "OPENAI_MODEL": target.model}, ("--auth-type", "openai"))


def _aider(target: Target) -> Setting:
    return Setting(_openai(target), ("--model", f"openai/{target.model}"))


def _openai(target: Target) -> dict[str, str | None]:
    base = f"{target.url}/v1"
    return {"OPENAI_BASE_URL": base, "OPENAI_API_BASE": base, "OPENAI_API_KEY": target.shown_key}


def _context(variable: str, target: Target) -> dict[str, str | None]:
    return {} if target.context is None else {variable: str(target.context)}


AGENTS: Mapping[str, Agent] = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "pi": Agent("pi", "npm install -g @mariozechner/pi-coding-agent", _pi),
    "copilot": Agent("copilot", "npm install -g @github/copilot", _copilot),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "aider": Agent("aider", "pip install aider-chat", _aider),
}
