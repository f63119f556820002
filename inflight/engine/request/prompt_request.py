"""`prompt_request`: a request that draws nothing, and wants only what one of its parts makes of its prompt."""

from inflight.engine.request.processed import ProcessedRequest, RequestOptions
from inflight.interface.parts import RequestPart
from inflight.interface.request import EngineCoreRequest, Int32Array, ResolvedSampling
from inflight.sampling_params import SamplingParams

# no value of these is read
_NO_SAMPLING = ResolvedSampling(params=SamplingParams(detokenize=False), seed=0, max_tokens=0)


def prompt_request(
    request_id: str,
    text: str | None,
    token_ids: Int32Array,
    cache_salt: str,
    block_names: bytes,
    part: RequestPart,
    arrival_time: float,
    options: RequestOptions,
) -> ProcessedRequest:
    """A request that draws nothing, and wants only what `part` makes of its prompt."""
    sequence = EngineCoreRequest(
        request_id=request_id,
        sampling=_NO_SAMPLING,
        priority=options.get("priority", 0),
        cache_salt=cache_salt,
        parts=(*options.get("parts", ()), part),
    )
    return ProcessedRequest(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=token_ids.tolist(),
        prompt_array=token_ids,
        params=_NO_SAMPLING.params,
        arrival_time=arrival_time,
        sequences=(sequence,),
        trace_headers=options.get("trace_headers", {}),
        block_names=block_names,
    )
