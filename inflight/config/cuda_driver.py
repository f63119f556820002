"""Asks the NVIDIA driver and the installed packages about GPUs, without importing torch or creating a CUDA context.

The driver is asked through its own library, libcuda.so.1, so CUDA_VISIBLE_DEVICES has the same effect as on torch.
"""

import ctypes
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError

# constants of cuda.h: a CUresult, and three CUdevice_attribute
_NO_DEVICE = 100
_MULTIPROCESSOR_COUNT = 16
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_MAX_NAME_BYTES = 256  # the size of our buffer for the name of a GPU

_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*'(\d+)\.(\d+)", re.MULTILINE)

Version = tuple[int, int]  # (major, minor)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that this process sees."""

    name: str
    compute_capability: Version
    num_multiprocessors: int
    total_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class CudaFacts:
    """The CUDA versions of the driver and of torch, the GPUs, and whether triton is installed. `machine.py` checks
    whether a GPU can be used with these.

    Attributes:
        driver: the newest CUDA version that the driver supports.
        gpus: at least one GPU; they are in the driver's order.
        torch_cuda: the CUDA version that torch was built for; None if torch is a build for CPUs, or is not installed.
        packages: contains "triton" if this package can be imported.
    """

    driver: Version
    gpus: tuple[Gpu, ...]
    torch_cuda: Version | None
    packages: frozenset[str]


def read_cuda_facts(open_library: Callable[[str], Any] = ctypes.CDLL) -> CudaFacts:  # Any: a C library, or a fake
    """
    Raises:
        ConfigError: there is no driver, it does not work, or it shows no GPU. `detect_machine` puts "device='cuda', but"
            before the message; `inflight env` shows it alone.
    """
    try:
        library = open_library("libcuda.so.1")
    except OSError as error:
        raise ConfigError(
            f"there is no NVIDIA driver: {error}; install it (in a container: start the container with `docker run --gpus "
            "all`), or give device='cpu'"
        ) from error
    call = partial(_call, library)
    call("cuInit", ctypes.c_uint(0))
    driver = _integer_of(partial(call, "cuDriverGetVersion"))
    count = _integer_of(partial(call, "cuDeviceGetCount"))
    if count == 0:
        raise ConfigError(_no_gpu())
    return CudaFacts(
        driver=(driver // 1000, driver % 1000 // 10),
        gpus=tuple(_read_gpu(call, ordinal) for ordinal in range(count)),
        torch_cuda=read_torch_cuda(_find_torch()),
        packages=frozenset(name for name in ("triton",) if importlib.util.find_spec(name) is not None),
    )


def to_version(version: Version) -> str:
    """Returns the version as text: (13, 0) becomes "13.0"."""
    return f"{version[0]}.{version[1]}"


def read_torch_cuda(torch_folder: Path | None) -> Version | None:
    """The CUDA version that the torch in `torch_folder` was built for, read from its version.py. None if
    `torch_folder` is None, or if this torch is a build for CPUs."""
    if torch_folder is None:
        return None
    match = _TORCH_CUDA.search((torch_folder / "version.py").read_text(encoding="utf-8"))
    return None if match is None else (int(match[1]), int(match[2]))


def _find_torch() -> Path | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _read_gpu(call: Callable[..., None], ordinal: int) -> Gpu:
    device = _integer_of(lambda out: call("cuDeviceGet", out, ctypes.c_int(ordinal)))
    name = ctypes.create_string_buffer(_MAX_NAME_BYTES)
    num_bytes = ctypes.c_size_t()
    call("cuDeviceGetName", name, ctypes.c_int(_MAX_NAME_BYTES), ctypes.c_int(device))
    call("cuDeviceTotalMem_v2", ctypes.byref(num_bytes), ctypes.c_int(device))
    major, minor, multiprocessors = (
        _integer_of(partial(_attribute, call, attribute, device))
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSOR_COUNT)
    )
    return Gpu(
        name=name.value.decode(errors="replace"),
        compute_capability=(major, minor),
        num_multiprocessors=multiprocessors,
        total_memory_bytes=num_bytes.value,
    )


def _attribute(call: Callable[..., None], attribute: int, device: int, out: object) -> None:
    call("cuDeviceGetAttribute", out, ctypes.c_int(attribute), ctypes.c_int(device))


def _integer_of(call: Callable[[object], None]) -> int:
    """Give `call` the address of an integer, and return the integer that it writes there."""
    out = ctypes.c_int()
    call(ctypes.byref(out))
    return out.value


def _call(library: Any, function: str, *arguments: object) -> None:  # Any: C functions
    result = getattr(library, function)(*arguments)
    if result == _NO_DEVICE:
        raise ConfigError(_no_gpu())
    if result != 0:
        text = ctypes.c_char_p()
        library.cuGetErrorString(ctypes.c_int(result), ctypes.byref(text))
        raise ConfigError(
            f"the NVIDIA driver does not work: {function} returned {result} ({(text.value or b'unknown').decode()}); check "
            "whether nvidia-smi works (after an update of the driver: restart the machine), or give device='cpu'"
        )


def _no_gpu() -> str:
    return (
        "the NVIDIA driver shows no GPU to this process; check what nvidia-smi lists and whether CUDA_VISIBLE_DEVICES "
        "hides the GPU, or give device='cpu'"
    )
