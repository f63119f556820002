"""`image_outputs`: runs a call of `LLM` for a model that takes images. The engine computes prompts while the images of later
prompts are processed."""

from collections.abc import Sequence
from typing import Protocol

from inflight.entrypoints.llm_arguments import one_of
from inflight.entrypoints.offline_engine import OfflineEngine
from inflight.entrypoints.prepared_ahead import PreparedAhead, Request
from inflight.outputs import RequestOutput

WAIT_SECONDS = 0.1  # for an image, until an interrupt is noticed


class RunningCall(Protocol):
    """What is needed of the thread of a call (llm.py). `argument`: the user's name for the list of prompts."""

    @property
    def engine(self) -> OfflineEngine: ...

    @property
    def requests(self) -> Sequence[Request]: ...

    @property
    def argument(self) -> str: ...

    def step(self) -> dict[str, RequestOutput]: ...

    def raise_if_interrupted(self) -> None: ...


def image_outputs(call: RunningCall) -> list[RequestOutput]:
    """Returns the outputs in the order of the requests. If one is wrong, or the call is interrupted, all are aborted."""
    engine = call.engine
    num_requests = len(call.requests)
    ahead = PreparedAhead(engine.images, iter(call.requests))
    finished: dict[str, RequestOutput] = {}
    num_added = 0
    try:
        while len(finished) < num_requests:
            is_idle = num_added == len(finished)
            while (request := ahead.take(WAIT_SECONDS if is_idle else 0.0)) is not None:
                request_id, prompt, params, options = request
                with one_of(call.argument, num_added, num_requests):
                    engine.add_request(request_id, prompt, params, **options)
                num_added += 1
                is_idle = False
                call.raise_if_interrupted()
            if not is_idle:
                ended = call.step()
                finished |= ended
                ahead.ended(ended)
            call.raise_if_interrupted()
    except BaseException:
        engine.abort_requests([request_id for request_id, *_ in call.requests])
        raise
    finally:
        ahead.close()
    return [finished[request_id] for request_id, *_ in call.requests]
