"""What the device itself can do: bytes read per second, and bf16 operations per second of matrix products, random data.

    python -m benchmarks.gpu.ceilings [--device cuda] [--quick]

Reading is measured by a copy (read and written bytes count), by a sum and by a matrix-vector product (read bytes count): the
best of them is the ceiling. Data is random: products of zeros run faster than those of numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.arguments import parse_device
from benchmarks.gpu.sizes import Sizes
from benchmarks.shared.report import emit

WARM_UPS, REPEATS, CALLS = 3, 7, 4


def seconds_of(device: torch.device, call: Callable[[], object]) -> float:
    """Median over `REPEATS` of the mean of `CALLS` calls in a row, by the device's clock where it has one."""
    for _ in range(WARM_UPS):
        call()
    found = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            found.append(float(start.elapsed_time(end)) / 1e3)
        else:
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            found.append(time.perf_counter() - began)
    return statistics.median(found) / CALLS


def measure_bandwidth(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Bytes per second by way of measuring."""
    columns = 8192
    source = torch.empty(sizes.read_bytes // 2 // columns, columns, dtype=torch.bfloat16, device=device).normal_()
    vector = torch.randn(columns, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    num_bytes = source.numel() * source.element_size()
    as_floats = source.view(torch.float32)
    return {
        "copy": 2 * num_bytes / seconds_of(device, lambda: target.copy_(source)),
        "sum": num_bytes / seconds_of(device, as_floats.sum),
        "matrix_vector": num_bytes / seconds_of(device, lambda: torch.mv(source, vector)),
    }


def measure_matrix_peak(device: torch.device, size: int) -> float:
    """Operations per second of a product of two square bf16 matrices."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / seconds_of(device, lambda: torch.mm(left, right, out=out))


def main() -> None:
    device_name, sizes = parse_device(__doc__)
    device = torch.device(device_name)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        emit(
            figure="device", name=properties.name, compute_capability=f"{properties.major}.{properties.minor}",
            multiprocessors=properties.multi_processor_count, memory_gib=round(properties.total_memory / 2**30, 1),
            torch=torch.__version__, cuda=torch.version.cuda,
        )  # fmt: skip
    bandwidth = measure_bandwidth(device, sizes)
    emit(
        figure="bandwidth",
        bytes_per_second=round(max(bandwidth.values())),
        **{k: round(v) for k, v in bandwidth.items()},
    )
    emit(figure="matrix_peak", operations_per_second=round(measure_matrix_peak(device, sizes.matrix_size)))


if __name__ == "__main__":
    main()
