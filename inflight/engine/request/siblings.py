"""`siblings`: the sequences of a request with n > 1. `unknown_option`: the error for an option that requests do not have."""

import dataclasses
import difflib

from inflight.engine.request.processed import RequestOptions
from inflight.errors import UnknownParameterError
from inflight.interface.request import EngineCoreRequest
from inflight.sample.seeds import derive_seed


def siblings(parent: EngineCoreRequest) -> tuple[EngineCoreRequest, ...]:
    """Returns the n sequences of a request with n > 1, each with its own seed. The first sequence computes the prompt, and what
    the request wants of the prompt. The other sequences use the KV cache of this prompt."""
    params, seed, leader = parent.sampling.params, parent.sampling.seed, f"0_{parent.request_id}"
    return tuple(
        dataclasses.replace(
            parent,
            request_id=f"{index}_{parent.request_id}",
            sampling=dataclasses.replace(parent.sampling, seed=derive_seed(seed, index)),
            prompt_leader=None if index == 0 else leader,
            parts=tuple(part for part in parent.parts if index == 0 or not part.is_of_leader),
        )
        for index in range(params.n)
    )


def unknown_option(options: RequestOptions) -> UnknownParameterError:
    """Makes the error for an option that `RequestOptions` does not have. A program may give it, since Python does not check the
    keys of a TypedDict."""
    known = RequestOptions.__annotations__
    name = next(name for name in options if name not in known)
    near = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return UnknownParameterError(f"a request has no option {name!r}; {advice}")
