"""`RankProfiler`: writes a torch.profiler trace of one rank."""

from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from inflight.errors import InvalidRequestError


class RankProfiler:
    """Records every thread of the process between `start` and `stop`. On a GPU it also records the kernels.

    A process can have only one running profiler.
    """

    def __init__(self, name: str, device_kind: str) -> None:
        self._name = name
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device_kind == "cuda" else [])]
        self._running: tuple[profile, Path] | None = None

    def start(self, folder: str) -> None:
        """Start recording; `stop` will write the trace to `folder`.

        Raises:
            InvalidRequestError: the profiler is running already.
        """
        if self._running is not None:
            raise InvalidRequestError("the profiler is running already; stop it first: profile(False)")
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        # record all threads of the process, not only the one that starts the profiler
        config = _ExperimentalConfig(profile_all_threads=True)
        profiler = profile(activities=self._activities, experimental_config=config)
        profiler.start()
        self._running = profiler, path / f"{self._name}.json"

    def close(self) -> None:
        """Stop a running profiler without writing its trace. Idempotent."""
        if self._running is not None:
            self._running[0].stop()
            self._running = None

    def stop(self) -> str:
        """Write the trace (Chrome's format) and return its path.

        Raises:
            InvalidRequestError: the profiler is not running.
        """
        if self._running is None:
            raise InvalidRequestError("the profiler is not running; start it first: profile(True, folder)")
        profiler, path = self._running
        self._running = None
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        return str(path)
