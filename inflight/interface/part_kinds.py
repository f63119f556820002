"""The tables of the kinds of request parts. To add a kind, see docs/extending.md.

The codec reads `PART_KINDS` and `RESULT_KINDS`: a kind that is not in them is refused with its place in the message.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.config.engine import ModelConfig
from inflight.errors import InvalidRequestError
from inflight.interface.images import ImagesPart
from inflight.interface.parts import PartResult, RequestPart
from inflight.interface.pooling import PoolingPart, PoolingResult
from inflight.interface.prompt_logprobs import PromptLogprobsPart, PromptLogprobsResult
from inflight.interface.token_types import TokenTypesPart
from inflight.pooling_params import PoolingParams
from inflight.sampling_params import SamplingParams

PART_KINDS: dict[str, type[RequestPart]] = {
    each.kind: each for each in (PromptLogprobsPart, PoolingPart, TokenTypesPart, ImagesPart)
}
RESULT_KINDS: dict[str, type[PartResult]] = {each.kind: each for each in (PromptLogprobsResult, PoolingResult)}
# a sampling parameter -> the part that a request has if the parameter is not None. Any: the type of the parameter
PARTS_OF_PARAMETERS: Mapping[str, Callable[[Any], RequestPart]] = {
    "prompt_logprobs": lambda count: PromptLogprobsPart(num_logprobs=count)
}

# the parameters of a request that draws nothing -> the part that it has, for this model. Any: the class of the parameters
PARTS_OF_PROMPTS: Mapping[type, Callable[[Any, ModelConfig], RequestPart]] = {PoolingParams: PoolingPart.of}


def parts_of(params: SamplingParams, given: Sequence[RequestPart]) -> tuple[RequestPart, ...]:
    """The parts of a request: those that it brings itself, and those that its parameters ask for.

    Raises:
        InvalidRequestError: a part is of a kind that is not known, or two parts are of one kind.
    """
    for part in given:
        if PART_KINDS.get(getattr(part, "kind", "")) is not type(part):
            raise InvalidRequestError(
                f"a request has a part of the class {type(part).__name__}, which is none of the known kinds "
                f"({', '.join(PART_KINDS)}): leave it out"
            )
    asked = ((make, getattr(params, name)) for name, make in PARTS_OF_PARAMETERS.items())
    parts = *given, *(make(value) for make, value in asked if value is not None)
    twice = [kind for kind, count in Counter(part.kind for part in parts).items() if count > 1]
    if twice:
        raise InvalidRequestError(f"a request has several parts of the kind {twice[0]!r}: give at most one of a kind")
    return parts
