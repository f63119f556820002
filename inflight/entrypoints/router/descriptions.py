"""`Descriptions`: descriptions of models, loaded or not, in the formats of OpenAI, llama.cpp and Ollama."""

import asyncio
import math
from datetime import UTC, datetime, timedelta
from typing import Any

from inflight.entrypoints.router.catalog import KnownModel
from inflight.entrypoints.router.forward import get, get_json
from inflight.entrypoints.router.loaded_models import LoadedModels, ModelState, Slot

_NEVER = "9999-12-31T23:59:59Z"  # as Ollama shows that a model stays loaded

Json = dict[str, Any]  # Any: JSON


class Descriptions:
    def __init__(self, models: LoadedModels) -> None:
        self._models = models

    async def card(self, known: KnownModel) -> Json:
        """An entry of /v1/models, with the `status` of llama.cpp's router."""
        slot = self._models.slot(known)
        own = await _ask(slot, "/v1/models", "data")
        status: Json = {"value": str(slot.state)}
        if slot.failure is not None:
            status |= {"failed": True, "error": str(slot.failure)}
        first = {"id": known.name, "object": "model", "created": int(known.modified), "owned_by": "inflight"}
        return {**first, **own, "id": known.name, "in_cache": known.is_cached, "status": status}

    async def tag(self, known: KnownModel) -> Json:
        """An entry of Ollama's /api/tags."""
        return {**_tag_of_files(known), **await _ask(self._models.slot(known), "/api/tags", "models")}

    async def running(self) -> list[Json]:
        """The entries of Ollama's /api/ps: all loaded models."""
        loop = asyncio.get_running_loop()
        found = []
        for slot in self._models.slots().values():
            if slot.state is not ModelState.LOADED:
                continue
            left = math.inf
            if not slot.known.preset.is_pinned:
                left = slot.idle_seconds - (0 if slot.num_active else loop.time() - slot.last_used)
            end = _NEVER if left > 1e9 else (datetime.now(UTC) + timedelta(seconds=max(0, left))).isoformat()
            found.append({**_tag_of_files(slot.known), **await _ask(slot, "/api/ps", "models"), "expires_at": end})
        return found

    async def shown(self, known: KnownModel) -> Json:
        """Ollama's /api/show for a model that is not loaded.

        Raises:
            ConfigError: a file of the model is damaged.
        """

        def read() -> Json:
            from inflight.entrypoints.cli.model_facts import model_facts  # loads numpy and tokenizers

            facts: Json = model_facts(known.model)
            return facts

        facts = await asyncio.to_thread(read)
        architecture, text = facts["architecture"], facts["text"]
        family = str(architecture["family"]).removesuffix("ForCausalLM").lower()
        answers = "completion" if text["answers"] == "text" else "embedding"
        has = {
            "tools": text.get("tool calls", "none") != "none",
            "thinking": text.get("reasoning", "none") != "none",
            "vision": "images" in text["takes"],
        }
        tag = _tag_of_files(known)
        return {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": {**tag["details"], "family": family, "families": [family]},
            "model_info": {
                "general.architecture": family,
                "general.basename": known.name,
                f"{family}.context_length": architecture["longest sequence"],
                f"{family}.embedding_length": architecture["hidden size"],
                f"{family}.block_count": architecture["layers"],
                f"{family}.vocab_size": architecture["vocabulary"],
            },
            "capabilities": [answers, *(name for name, is_there in has.items() if is_there)],
            "modified_at": tag["modified_at"],
        }

    async def metrics(self) -> bytes:
        """The metrics of all loaded models. The label `model_name` has the model."""
        texts = []
        for slot in self._models.slots().values():
            if slot.state is ModelState.LOADED:
                try:
                    texts.append((await get(slot.socket, "/metrics")).decode())
                except (OSError, ValueError):  # it has just ended
                    continue
        return merge_metrics(texts).encode()


def merge_metrics(texts: list[str]) -> str:
    """Several texts in Prometheus' format as one: all samples of a metric come together, after one HELP and TYPE."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        name = ""
        for line in text.splitlines():
            if line.startswith("# "):
                _, kind, name, *_ = line.split(" ", 3)
                head = heads.setdefault(name, [])
                if not any(known.startswith(f"# {kind} ") for known in head):
                    head.append(line)
                samples.setdefault(name, [])
            elif line:
                samples.setdefault(name, []).append(line)
    merged: list[str] = []
    for name, lines in samples.items():
        merged += heads.get(name, ())
        merged += lines
    return "".join(f"{line}\n" for line in merged)


async def _ask(slot: Slot, path: str, member: str) -> Json:
    """What the model's own server says about it; empty if it is not loaded. The server is asked once after each load."""
    if slot.state is not ModelState.LOADED:
        return {}
    if path not in slot.described:
        try:
            answer: Any = await get_json(slot.socket, path)
            slot.described[path] = answer[member][0]
        except (OSError, ValueError, LookupError, TypeError):  # it has just ended
            return {}
    return slot.described[path]


def _tag_of_files(known: KnownModel) -> Json:
    is_gguf = known.model.endswith(".gguf")
    return {
        "name": known.name,
        "model": known.name,
        "modified_at": datetime.fromtimestamp(known.modified, UTC).isoformat(),
        "size": known.num_bytes,
        "digest": known.digest,
        "details": {
            "parent_model": "",
            "format": "gguf" if is_gguf else "safetensors",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
