"""What an engine core tells a front end while somebody watches it: `EngineView`. Counts and ids only, never texts or tokens.

front end  -- Watch, EndRequests -->  core
core       -- EngineView, at most ten a second while the front end watches -->  front end
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from inflight.interface.request import Int32Array

Int64Array = npt.NDArray[np.int64]

# the columns of `EngineView.requests`, in this order
COLUMNS = ("state", "prompt", "cached", "computed", "emitted", "drafts", "blocks")
STATES = ("waiting", "running", "preempted")  # of a request, by the number in its column
# of a block, by the number in `EngineView.blocks`: without content; free, but its content can be found; in use by one request;
# in use by several
BLOCK_STATES = ("free", "cached", "owned", "shared")


def _no_requests() -> Int32Array:
    return np.empty((0, len(COLUMNS)), dtype=np.int32)


def _no_spans() -> Int64Array:
    return np.empty((0, 5), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Send views from now on, or, if not `is_wanted`, send no more."""

    is_wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequests:
    """End these sequences, of whichever front end. Their owners get an error. Ids of ended ones are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """
    Attributes:
        step_id: the newest step that was planned.
        num_ranks: how many ranks compute.
        request_ids: the ids of all sequences, in the order of their arrival.
        requests: [num_sequences, len(COLUMNS)], a row for each id.
        blocks: the state of each KV block, a byte each; the first is the dummy block.
        phases: the names of the phases in `spans`.
        spans: [num_spans, 5]: what has ended since the last view: lane (0: the engine; 1 + r: rank r), index in `phases`, step,
            begin and duration, in nanoseconds of one clock.
    """

    step_id: int
    num_ranks: int
    request_ids: tuple[str, ...] = ()
    requests: Int32Array = field(default_factory=_no_requests)
    blocks: bytes = b""
    phases: tuple[str, ...] = ()
    spans: Int64Array = field(default_factory=_no_spans)
