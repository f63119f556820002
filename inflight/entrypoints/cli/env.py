"""`inflight env`: shows versions, processor, memory, GPUs, the torch build, and the model families that Inflight computes with
its own code. For bug reports.

Most facts come from /proc, /sys, the GPU's driver and torch. If the machine does not report a fact, its value is None, and the
text shows "unknown". Facts are never guessed. A package that is absent is "not installed".
"""

import json
import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

import inflight
from inflight import envs, foreign_variables
from inflight.config.control_groups import cpu_quota
from inflight.config.cuda_driver import CudaFacts, read_cuda_facts, to_version
from inflight.config.free_memory import available_bytes, is_limited
from inflight.config.machine import detect_machine
from inflight.config.parse_architecture import SUPPORTED_ARCHITECTURES
from inflight.device.core_glance import share_of_waiting
from inflight.device.core_waiting import SHARED
from inflight.entrypoints.cli.command import command
from inflight.errors import ConfigError
from inflight.hub import EMBEDDED_MODEL
from inflight.weight_cache.folder import CacheFolder
from inflight.weight_cache.place import cache_path

PACKAGES = "torch numpy safetensors tokenizers jinja2 huggingface_hub transformers triton typer ray tqdm".split()
# Processor flags on which the choice of kernels depends: vector width, dot products in bfloat16 and int8, matrix tiles.
CPU_FLAGS = """
    avx2 fma f16c avx512f avx512bw avx512vl avx512_bf16 avx512_vnni avx512_fp16
    avx_vnni amx_tile amx_bf16 amx_int8 asimd asimddp bf16 i8mm sve
""".split()
GLANCE_SECONDS = 0.05  # so long it is measured whether other programs use the cores
_VARIABLES = (*foreign_variables.PREFIXES, "OMP_", "MKL_", "KMP_", "HF_", "CUDA_VISIBLE_DEVICES")
_SECRETS = (
    "TOKEN",
    "KEY",
    "SECRET",
    "PASSWORD",
)  # if the name of a variable contains one of these, its value is not shown

Report = dict[str, dict[str, Any]]  # section -> fact -> JSON value


@command
def env(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False) -> None:
    """Show versions, processor, memory, and the model families that Inflight computes with its own code."""
    report = make_report()
    typer.echo(json.dumps(report, indent=2) if as_json else to_text(report))


def make_report() -> Report:
    """All sections, in the order in which they are shown. Loads torch."""
    return {
        "inflight": {"version": inflight.__version__, "folder": str(Path(inflight.__file__).parent)},
        "system": {"platform": platform.platform(), "python": platform.python_version()},
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(_read(Path("/proc/cpuinfo"))),
        "C++ kernels": kernel_facts(envs.cpu_kernels),
        "packed weights": packed_weights_facts(),
        "memory": _memory(_read(Path("/proc/meminfo"))),
        "gpu": gpu_facts(read_cuda_facts),
        "torch": _torch(),
        "models": {"families": list(SUPPORTED_ARCHITECTURES), "embedded": (EMBEDDED_MODEL / "config.json").is_file()},
        "environment": environment(os.environ.items()),
    }


def to_text(report: Report) -> str:
    """The report as text for people, which can be pasted into an issue."""
    lines = []
    width = 2 + max(len(name) for facts in report.values() for name in facts)
    for section, facts in report.items():
        lines.append(section)
        lines += [f"  {name:<{width}}{_show(value)}" for name, value in facts.items()]
    return "\n".join(lines)


def environment(variables: Any) -> dict[str, str]:  # Any: os.environ.items() has no public type
    """The variables whose names begin with one of `_VARIABLES`. The value of a secret is not shown."""
    return {
        name: "(set)" if any(secret in name for secret in _SECRETS) else value
        for name, value in sorted(variables)
        if name.startswith(_VARIABLES)
    }


def _show(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value is None else str(value)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def kernel_facts(read_wanted: Callable[[], str]) -> dict[str, Any]:
    """Which C++ kernels there are, which of them an engine on the CPU uses ("none" if it computes in plain torch), and why.

    Args:
        read_wanted: returns the value of INFLIGHT_CPU_KERNELS.
    """
    from inflight.kernels.cpu.library import INSTRUCTION_SETS, KernelsUnavailableError, open_kernels  # loads torch

    folder = Path(inflight.__file__).parent / "kernels" / "cpu"
    built = [name for name in INSTRUCTION_SETS if (folder / f"_{name}.so").is_file()]
    facts: dict[str, Any] = {"built": built}
    try:
        wanted = read_wanted()
        if wanted == "off":
            return {**facts, "used": "none", "obstacle": "INFLIGHT_CPU_KERNELS=off"}
        return {**facts, "used": open_kernels(wanted).instruction_set, "obstacle": "none"}
    except (ConfigError, KernelsUnavailableError) as error:
        return {**facts, "used": "none", "obstacle": f"{error}: plain torch is used, which is slower"}


def packed_weights_facts() -> dict[str, Any]:
    """Where packed weights are kept, and how large they are."""
    path = cache_path()
    if path is None:
        return {"folder": None}
    entries = CacheFolder(path).entries()
    size = sum(entry.num_bytes for entry in entries) / 1e9
    return {"folder": str(path), "files": len(entries), "size": f"{size:.2f} GB"}


def _cpu(cpuinfo: str) -> dict[str, Any]:
    fields = dict(_fields(cpuinfo, ":"))
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "model": fields.get("model name"),
        "cores": os.cpu_count(),
        "cores for this process": len(os.sched_getaffinity(0)),
        "quota of processor time, in cores": cpu_quota() or "none",
        "shared with other programs": _sharing(),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
    }


def _sharing() -> str | None:
    num_threads = detect_machine("cpu").num_cores
    share = share_of_waiting(num_threads, GLANCE_SECONDS)
    if share is None:
        return None
    threads = "one thread" if num_threads == 1 else f"{num_threads} threads"
    measured = f"{threads} waited for a core for {share:.0%} of {GLANCE_SECONDS * 1e3:.0f} ms"
    return f"{'yes' if share > SHARED else 'no'}: {measured}"


def _memory(meminfo: str) -> dict[str, Any]:
    fields = dict(_fields(meminfo, ":"))
    thp = _read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        "total": _gibibytes(fields.get("MemTotal")),
        "available": f"{available_bytes() / 2**30:.1f} GiB",
        "limited by a control group": is_limited(),
        "transparent huge pages": thp.partition("[")[2].partition("]")[0] or None,
    }


def gpu_facts(read_facts: Callable[[], CudaFacts]) -> dict[str, Any]:
    """The GPUs, CUDA versions, and the "obstacle": the reason why device="cuda" cannot be used, or "none"."""
    try:
        facts = read_facts()
    except ConfigError as error:
        return {"devices": [], "obstacle": str(error)}
    obstacle = "none"
    try:
        detect_machine("cuda", read_facts=lambda: facts)
    except ConfigError as error:
        obstacle = str(error)
    return {
        "devices": [
            f"{gpu.name} (compute capability {to_version(gpu.compute_capability)}, {gpu.total_memory_bytes / 2**30:.1f} GiB)"
            for gpu in facts.gpus
        ],
        "CUDA of the driver": to_version(facts.driver),
        "CUDA of torch": "none" if facts.torch_cuda is None else to_version(facts.torch_cuda),
        "obstacle": obstacle,
    }


def _torch() -> dict[str, Any]:
    import torch  # the import takes seconds, and no other section needs it

    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return {
        "build": torch.__version__,
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "OpenMP": torch.backends.openmp.is_available(),  # type: ignore[no-untyped-call]
        "oneDNN": has_onednn,
        "oneDNN bfloat16": has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    }


def _fields(text: str, separator: str) -> list[tuple[str, str]]:
    parts = [line.partition(separator) for line in text.splitlines()]
    return [(name.strip(), value.strip()) for name, found, value in parts if found]


def _gibibytes(kibibytes: str | None) -> str | None:
    if kibibytes is None:
        return None
    return f"{int(kibibytes.split()[0]) / 2**20:.1f} GiB"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
