"""`ImageCounts`: what was done with the images of a front end's requests since its start, for metrics."""

import threading
from dataclasses import dataclass, field

from inflight.interface.image_prompts import ImageTotals


@dataclass(eq=False)
class ImageCounts:
    """Any thread may call the methods."""

    _totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ImageTotals.__dataclass_fields__, 0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def looked_up(self, *, is_hit: bool) -> None:
        self._add(num_queries=1, num_hits=int(is_hit))

    def processed(self, seconds: float) -> None:
        self._add(num_processed=1, processing_seconds=seconds)

    def refused(self) -> None:
        self._add(num_refused=1)

    def overloaded(self) -> None:
        self._add(num_overloaded=1)

    def totals(self) -> ImageTotals:
        with self._lock:
            return ImageTotals(**self._totals)  # type: ignore[arg-type]  # all counts but one are whole

    def _add(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                self._totals[name] += count
