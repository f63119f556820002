"""`ImageCounts`: what was done with the images of a front end's requests since its start, for metrics."""

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ImageTotals:
    """
    Attributes:
        num_queries: images that were looked for in the cache of processed images.
        num_hits: how many of them were found there, or were being processed for another request.
        num_processed: images that were decoded and processed.
        processing_seconds: how long this took, added up; without the time for which they waited.
        num_refused: images that could not be used: they are damaged, too large, forbidden or not there.
        num_overloaded: images for which there was no place in a queue.
    """

    num_queries: int = 0
    num_hits: int = 0
    num_processed: int = 0
    processing_seconds: float = 0.0
    num_refused: int = 0
    num_overloaded: int = 0


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
