"""A dependency that may be absent, or is heavy, is imported only where it is the subject."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, Package, write_package
from tests.architecture.test_api_rooms import ROOMS

# dependency -> files (or folders, with a slash) that may import it
_APIS = tuple(f"entrypoints/{room}/" for room in ROOMS)
_HTTP = (*_APIS, "entrypoints/http/")
OPTIONAL: dict[str, tuple[str, ...]] = {
    "msgspec": (
        "interface/codec.py",
        "engine/process/kv_event_publisher.py",
        "structured_output/structural_tag.py",
        "weight_cache/packed_file.py",
        "entrypoints/router/app.py",
    ),
    "llguidance": ("structured_output/llguidance_backend.py",),
    "gguf": ("config/gguf_types.py",),
    "triton": ("kernels/triton/",),
    "transformers": ("models/transformers_fallback/", "multimodal/family_processor.py"),
    "PIL": ("multimodal/decode.py", "multimodal/family_processor.py"),
    "tokenizers": ("tokenizer/", "tokenizer.py"),
    "jinja2": ("tokenizer/chat_template.py", "tokenizer/sandbox/"),
    "huggingface_hub": ("hub.py", "hub_cache.py"),
    "typer": ("entrypoints/cli/",),
    "tqdm": ("entrypoints/",),
    "fastapi": _HTTP,
    "starlette": (
        *_HTTP,
        "entrypoints/serve/",
        "entrypoints/response_store/reading.py",
        "entrypoints/router/responses.py",
    ),
    "pydantic": (*_HTTP, "entrypoints/fields/", "python_schema.py"),
    "uvicorn": ("entrypoints/serve/",),
    "httptools": ("entrypoints/serve/", "entrypoints/router/"),
    "uvloop": ("entrypoints/serve/", "entrypoints/router/"),
    "yaml": ("entrypoints/serve/config_file.py",),
    "prometheus_client": ("metrics/exposition.py",),
    "opentelemetry": ("metrics/tracing.py",),
    "aiohttp": (),
    "ray": ("executor/ray_placement.py",),
    "zmq": ("engine/process/kv_event_publisher.py",),
    "matplotlib": (),
    "xxhash": ("kv_connector/tier_object.py",),
    "redis": ("kv_connector/redis_tier.py",),
    "obstore": ("kv_connector/object_store_tier.py",),
}


def _is_allowed(path: str, allowed: tuple[str, ...]) -> bool:
    return any(path == entry or (entry.endswith("/") and path.startswith(entry)) for entry in allowed)


def dependency_problems(package: Package) -> list[str]:
    found = []
    for file in package.files:
        for imported in package.imports(file):
            if imported.top not in OPTIONAL:
                continue
            if not _is_allowed(file.path, OPTIONAL[imported.top]):
                allowed = ", ".join(OPTIONAL[imported.top]) or "no file"
                found.append(f"{file.path}:{imported.line}: {imported.top} is imported in {allowed} only")
    return found


def test_each_dependency_stays_in_its_place() -> None:
    assert dependency_problems(Package(ROOT / PACKAGE)) == []


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("interface/step.py", "import msgspec", "msgspec"),
        ("structured_output/manager.py", "import llguidance", "llguidance"),
        ("structured_output/manager.py", "def f():\n    import llguidance.numpy", "llguidance"),
        ("models/decoder.py", "def f():\n    from transformers import AutoModel", "transformers"),
        ("engine/core/engine_core.py", "from tokenizers import Tokenizer", "tokenizers"),
        ("entrypoints/openai/chat.py", "from jinja2.sandbox import ImmutableSandboxedEnvironment", "jinja2"),
        ("config/resolve.py", "import huggingface_hub.constants", "huggingface_hub"),
        ("entrypoints/llm.py", "import typer", "typer"),
        ("worker/worker.py", "import tqdm", "tqdm"),
    ],
)
def test_a_dependency_out_of_place_is_found(tmp_path: Path, path: str, text: str, name: str) -> None:
    found = dependency_problems(write_package(tmp_path, {path: text}))
    assert len(found) == 1
    assert found[0].startswith(path)
    assert name in found[0]


def test_a_second_importer_is_found(tmp_path: Path) -> None:
    files = {"tokenizer/chat_template.py": "import jinja2", "tokenizer/sandbox/budget.py": "import jinja2"}
    assert dependency_problems(write_package(tmp_path, files)) == []
    files["tokenizer/tokenizer.py"] = "import jinja2"
    found = dependency_problems(write_package(tmp_path, files))
    assert len(found) == 1
    assert found[0].startswith("tokenizer/tokenizer.py")
