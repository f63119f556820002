"""Chat templates of real models, read from packages that have them. They are no part of this repository.

`make test-clients` runs `python -m tests.clients.real_templates FOLDER`: the archives that pip has downloaded into the folder
become two folders of templates. The variable INFLIGHT_TEMPLATES_DIR names another folder with *.jinja files.
"""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("INFLIGHT_TEMPLATES_DIR", ROOT / ".venv-clients" / "templates"))

# the beginning of an archive's name -> the folder of its templates, and the name of the folder that they get
PACKAGES = {
    "llama_cpp_python": ("vendor/llama.cpp/models/templates/", "llama.cpp"),
    "axolotl": ("axolotl/utils/chat_templates/templates/", "axolotl"),
}

# Templates that are not tried, with the reason.
LEFT_OUT = {
    "fireworks-ai-llama-3-firefunction-v2": "reads the tools as text from a variable `functions`, and the time from `datetime`"
}
# Families of docs/models.md, with the templates that stand for them. Without one: the packages have none that is near.
FAMILIES: dict[str, tuple[str, ...]] = {
    "Llama 2, 3, 3.1+": (
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "meta-llama-Llama-3.3-70B-Instruct",
        "llama3",
    ),
    "Mistral, Mistral Small 3": (
        "mistralai-Mistral-Nemo-Instruct-2407",
        "Mistral-Small-3.2-24B-Instruct-2506",
        "unsloth-mistral-Devstral-Small-2507",
        "mistral_v1",
        "mistral_v2v3",
        "mistral_v7_tekken",
    ),
    "Ministral 3": ("mistralai-Ministral-3-14B-Reasoning-2512",),
    "Qwen2, 2.5": ("Qwen-Qwen2.5-7B-Instruct", "qwen_25", "Qwen-QwQ-32B"),
    "Qwen3": ("Qwen-Qwen3-0.6B", "Qwen3-Coder", "qwen3"),
    "Qwen3.5 (text)": ("Qwen3.5-4B", "qwen3_5"),
    "Qwen3-Next": ("Qwen-Qwen3-0.6B",),  # Qwen3's, without thoughts
    "Qwen3.5, 3.6 with experts (text)": ("Qwen3.5-4B", "qwen3_5"),
    "Gemma 2": ("google-gemma-2-2b-it", "gemma"),
    "Gemma 3": ("gemma3",),
    "Gemma 4": ("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved", "gemma4"),
    "Phi-3, 3.5, 4, 4-mini": ("microsoft-Phi-3.5-mini-instruct", "phi_3", "phi_35", "phi_4"),  # none of Phi-4-mini
    "OLMo 2": ("chatml",),  # near: its own has other tags
    "OLMo 3": ("chatml",),  # near: its own also lists tools
    "Granite 3 (dense)": ("ibm-granite-granite-3.3-2B-Instruct",),
    "Granite 4 without Mamba layers (350M, 1B, micro)": ("ibm-granite-granite-3.3-2B-Instruct",),
    "SmolLM3": ("HuggingFaceTB-SmolLM3-3B",),
    "GLM-4 (2024)": (),
    "GLM-4-0414": (),
    "LFM2": ("LFM2-8B-A1B", "LFM2.5-8B-A1B", "LFM2.5-Instruct"),
    "LFM2 with experts": ("LFM2-8B-A1B", "LFM2.5-8B-A1B"),
    "Ministral 8B": ("mistral_v3_tekken",),
    "DeepSeek-V2, V2-Lite": ("deepseek_v2",),
    "DeepSeek-V3, R1, V3.1, Moonlight, Kimi K2": (
        "deepseek_v3",
        "deepseek-ai-DeepSeek-V3.1",
        "deepseek-ai-DeepSeek-V3.2",
    ),
    "GLM-4.7-Flash": (),
    "GLM-4.5, 4.6, 4.7": (),
    "Youtu-LLM": (),
    "MiniCPM3": ("openbmb-MiniCPM5-1B",),  # near: a later model's
    "Qwen3-MoE": ("Qwen-Qwen3-0.6B", "Qwen3-Coder", "qwen3"),
    "Qwen1.5-MoE, Qwen2-MoE": ("Qwen-Qwen2.5-7B-Instruct", "chatml"),
    "Mixtral": ("mistral_v1",),
    "OLMoE": (),
    "gpt-oss": ("openai-gpt-oss-120b",),
    "ERNIE 4.5 with experts": (),
    "Hunyuan with experts": (),
    "Phi-3.5-MoE": (),
    "Granite 3 (with experts)": ("ibm-granite-granite-3.3-2B-Instruct",),
}


def templates(folder: Path = FOLDER) -> dict[str, str]:
    """Name of the file without its ending -> text."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.jinja"))}


def unpack(folder: Path) -> int:
    """Write the templates of the archives in `folder`, and remove the archives. Returns the number of templates."""
    for archive in sorted(folder.glob("*.tar.gz")) + sorted(folder.glob("*.whl")):
        inner, name = next(found for begin, found in PACKAGES.items() if archive.name.startswith(begin))
        (folder / name).mkdir(exist_ok=True)
        for path, content in _files(archive):
            if inner in path and path.endswith(".jinja"):
                (folder / name / Path(path).name).write_bytes(content)
        archive.unlink()
    return len(templates(folder))


def _files(archive: Path) -> list[tuple[str, bytes]]:
    """The templates among the archive's files."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return [(name, wheel.read(name)) for name in wheel.namelist() if name.endswith(".jinja")]
    with tarfile.open(archive) as source:
        members = [member for member in source if member.isfile() and member.name.endswith(".jinja")]
        opened = [(member.name, source.extractfile(member)) for member in members]
        return [(name, file.read()) for name, file in opened if file is not None]


if __name__ == "__main__":
    print(f"{unpack(Path(sys.argv[1]))} chat templates")
