"""What the scheduler does for parts of requests (interface/parts.py). It does not know their kinds."""

from collections.abc import Sequence

from inflight.interface.parts import PartResult, RequestPart, after_results
from inflight.scheduler.request import Request, RequestStatus


def record_results(
    found: Sequence[tuple[int, PartResult]], requests: Sequence[Request]
) -> dict[int, tuple[PartResult, ...]]:
    """Add a step's results to the parts of the requests that have not ended. Returns row -> its results.

    Args:
        found: results with their rows.
        requests: those of the step, in the order of its rows.
    """
    by_row: dict[int, tuple[PartResult, ...]] = {}
    for row, result in found:
        if requests[row].status is not RequestStatus.FINISHED:
            requests[row].parts = after_results(requests[row].parts, [result])
            by_row[row] = (*by_row.get(row, ()), result)
    return by_row


def fitting_tokens(parts: Sequence[RequestPart], start: int, count: int, spent: dict[str, int]) -> int:
    """Returns how many of `count` prompt tokens, from position `start` on, a step may compute: no kind of parts may cost the
    step more than its `max_step_cost`. If the step has spent nothing on a kind yet, one token fits whatever it costs.

    `spent`: kind -> what the step spends on it. It is changed.
    """
    limited = [part for part in parts if part.max_step_cost is not None]

    def fits(part: RequestPart, num_tokens: int) -> bool:
        before = spent.get(part.kind, 0)
        cost = part.cost(start, start + num_tokens)
        assert part.max_step_cost is not None
        return cost == 0 or before + cost <= part.max_step_cost or (not before and num_tokens == 1)

    for part in limited:
        most = 0  # the largest number that fits
        while most < count:
            middle = (most + count + 1) // 2
            if fits(part, middle):
                most = middle
            else:
                count = middle - 1
    if count:
        for part in limited:
            spent[part.kind] = spent.get(part.kind, 0) + part.cost(start, start + count)
    return count
