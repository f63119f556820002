"""Draws histograms of a benchmark's latencies into a PNG file. This needs the extra "bench" of the package."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from inflight.errors import ConfigError
from inflight_bench.record import RequestRecord

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ConfigError('--plot needs matplotlib: pip install "inflight-llm[bench]"') from error

NUM_BINS = 60
MARKS = ((50.0, "tab:green"), (99.0, "tab:red"))


def plot_latencies(path: Path, title: str, records: Sequence[RequestRecord]) -> None:
    """Draw three histograms, each with its p50 and p99: TTFT, ITL and end-to-end latency of the requests that succeeded."""
    good = [record for record in records if record.success]
    panels = {
        "Time to first token": [record.ttft for record in good],
        "Inter-token latency": [itl for record in good for itl in record.itls],
        "End-to-end latency": [record.latency for record in good],
    }
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    figure.suptitle(title)
    for axes, (name, seconds) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        _draw(axes, name, np.asarray(seconds) * 1e3)
    figure.savefig(path, format="png", dpi=120)


def _draw(axes: Axes, name: str, milliseconds: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    axes.set_title(name)
    axes.set_xlabel("milliseconds")
    if not milliseconds.size:
        axes.text(0.5, 0.5, "nothing measured", ha="center", va="center", transform=axes.transAxes)
        return
    low, high = float(milliseconds.min()), float(milliseconds.max())
    is_wide = low > 0 and high / low > 50  # on a linear axis nearly all values would fall into one bar
    bins = np.geomspace(low, high, NUM_BINS) if is_wide else np.linspace(low, max(high, low + 1e-3), NUM_BINS)
    axes.hist(milliseconds, bins=bins.tolist(), color="tab:blue", alpha=0.75)
    if is_wide:
        axes.set_xscale("log")
    axes.set_ylabel("count")
    for percentile, color in MARKS:
        value = float(np.percentile(milliseconds, percentile))
        axes.axvline(value, color=color, linestyle="--", label=f"p{percentile:g} = {value:.2f} ms")
    axes.legend()
