"""`ImageCall`: a call of `LLM` for a model that takes images. The engine computes prompts while the images of later prompts are
processed."""

from inflight.entrypoints.llm import Call
from inflight.entrypoints.llm_arguments import one_of
from inflight.entrypoints.prepared_ahead import PreparedAhead
from inflight.outputs import RequestOutput

WAIT_SECONDS = 0.1  # for an image, until an interrupt is noticed


class ImageCall(Call):
    def _outputs(self) -> list[RequestOutput]:
        engine, num_requests = self._engine, len(self._requests)
        ahead = PreparedAhead(engine.images, iter(self._requests))
        finished, num_added = dict[str, RequestOutput](), 0
        try:
            while len(finished) < num_requests:
                is_idle = num_added == len(finished)
                while (request := ahead.take(WAIT_SECONDS if is_idle else 0.0)) is not None:
                    request_id, prompt, params, options = request
                    with one_of(self._argument, num_added, num_requests):
                        engine.add_request(request_id, prompt, params, **options)
                    num_added, is_idle = num_added + 1, False
                    self._raise_if_interrupted()
                if not is_idle:
                    ended = self._step()
                    finished |= ended
                    ahead.ended(ended)
                self._raise_if_interrupted()
        except BaseException:
            engine.abort_requests([request_id for request_id, *_ in self._requests])
            raise
        finally:
            ahead.close()
        return [finished[request_id] for request_id, *_ in self._requests]
