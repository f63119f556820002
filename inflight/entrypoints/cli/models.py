"""`inflight pull`, `list`, `show`, `rm` and `ps`: the models on this machine, and those that servers serve now."""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer

from inflight.entrypoints.cli.command import command
from inflight.entrypoints.cli.conversation import API_KEY_VARIABLE, LOCAL_SERVER, address_of
from inflight.entrypoints.cli.env import to_text
from inflight.errors import ConfigError, EngineError
from inflight.hub import resolve_model_folder
from inflight.hub_cache import CachedModel, cached_models, check_files, remove_model, size_text
from inflight.model_name import is_local, read_model_name

ASK_SECONDS = 5.0

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Names = Annotated[list[str], typer.Argument(metavar="MODEL", help="ORG/NAME, or ORG/NAME:FILE.gguf.")]

PULL_EPILOG = """\b
Examples:
  inflight pull Qwen/Qwen3-0.6B
  inflight pull Qwen/Qwen3-0.6B-GGUF:Q8_0

Called again, an interrupted download goes on where it stopped. HF_HOME is where the cache is, HF_TOKEN is for gated models.
"""


@command
def pull(models: _Names, revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None) -> None:
    """Download models from the hub, and compare their files with the hub's digests."""
    for given in models:
        name = read_model_name(given)
        if name.model is None or is_local(name.model):
            raise ConfigError(f"{given!r} is on this machine already; give a model of the hub, as ORG/NAME")
        source = resolve_model_folder(name.model, revision or name.revision)
        check_files(source)
        typer.echo(f"{name.model}: {source}")


@command
def list_models(as_json: AsJson = False) -> None:
    """List the models in the hub's cache, also those that other programs downloaded."""
    found = cached_models()
    if as_json:
        typer.echo(json.dumps([_entry(model) for model in found], indent=2))
        return
    rows = [(_name(model), size_text(model.num_bytes), f"{_modified(model):%Y-%m-%d %H:%M}") for model in found]
    _print_table(("MODEL", "SIZE", "MODIFIED"), rows)


@command
def show(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A folder, a GGUF file or a hub id.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a model is: family, sizes, format, memory, what it takes and answers. Weights are not downloaded."""
    from inflight.entrypoints.cli.model_facts import model_facts  # loads numpy and tokenizers

    name = read_model_name(model) if model is not None else None
    facts = model_facts(None if name is None else name.model, revision or (None if name is None else name.revision))
    typer.echo(json.dumps(facts, indent=2) if as_json else to_text(facts))


@command
def remove(models: _Names) -> None:
    """Remove models from the hub's cache."""
    for given in models:
        name = read_model_name(given).model or given
        typer.echo(f"{name}: removed, {size_text(remove_model(name))} are free again")


@command
def running(
    url: Annotated[
        list[str] | None, typer.Option(metavar="URL", help=f"A server; may be repeated.  [default: {LOCAL_SERVER}]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the models that running servers serve. OPENAI_API_KEY in the environment is their key."""
    key = os.environ.get(API_KEY_VARIABLE)
    found = [served for each in url or [LOCAL_SERVER] for served in served_models(each.rstrip("/"), key)]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    rows = [(each["model"], str(each["max_model_len"] or "-"), each["state"], each["url"]) for each in found]
    _print_table(("MODEL", "CONTEXT", "STATE", "SERVER"), rows)


def _entry(model: CachedModel) -> dict[str, Any]:  # Any: JSON
    return {
        "model": model.name,
        "num_bytes": model.num_bytes,
        "modified": _modified(model).isoformat(timespec="seconds"),
        "is_whole": model.is_whole,
    }


def _name(model: CachedModel) -> str:
    return model.name if model.is_whole else f"{model.name} (unfinished: inflight pull {model.name})"


def _modified(model: CachedModel) -> datetime:
    return datetime.fromtimestamp(model.modified).astimezone()


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [titles, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for line in lines:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


class NoServerError(EngineError):
    """Nothing answers at an address."""


class WrongKeyError(ConfigError):
    """A server wants another API key."""


def served_models(url: str, key: str | None) -> list[dict[str, Any]]:  # Any: JSON
    """One entry for each model that the server at this address serves.

    Raises:
        ConfigError: the text is no address.
        WrongKeyError: the server wants another key.
        NoServerError: no server answers there.
        EngineError: it has not OpenAI's API, or does not answer yet.
    """
    address_of(url)
    base = url.removesuffix("/v1")
    try:
        models = json.loads(_get(f"{base}/v1/models", key))["data"]
        ids = [(str(each["id"]), each.get("max_model_len")) for each in models]
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            raise WrongKeyError(f"{base} wants an API key; set {API_KEY_VARIABLE} in the environment") from error
        raise EngineError(f"{base}/v1/models answers {error.code} {error.reason}") from error
    except OSError as error:  # refused, no such host, a time-out
        raise NoServerError(f"no server answers at {base}: {getattr(error, 'reason', error)}") from error
    except (http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{base}/v1/models answers with something else than a list of models") from error
    state = _state(base, key)
    return [{"model": name, "max_model_len": length, "state": state, "url": base} for name, length in ids]


def _state(base: str, key: str | None) -> str:
    """Whether the server takes requests; its own words if it does not."""
    try:
        _get(f"{base}/ready", key)
    except urllib.error.HTTPError as error:
        with error:
            try:
                return str(json.loads(error.read())["error"]["message"])
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
                return (
                    "serving" if error.code == 404 else f"/ready answers {error.code}"
                )  # other engines have no /ready
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {getattr(error, 'reason', error)}"
    return "ready"


def _get(address: str, key: str | None) -> bytes:
    request = urllib.request.Request(address)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=ASK_SECONDS) as answer:
        body: bytes = answer.read()
    return body
