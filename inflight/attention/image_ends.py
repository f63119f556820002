"""`ends_of_step`: how far the tokens of a step see, if some of them are tokens of images.

In some models (Gemma 3 and 4) the tokens of an image see each other in both directions. So a step computes all of them, or
those that are left, if an earlier request has computed the first ones of the same image.
"""

import numpy as np

from inflight.attention.metadata import AttentionInputs
from inflight.interface.request import Int32Array


def ends_of_step(inputs: AttentionInputs, before: Int32Array | None, first_token: int, ends: Int32Array) -> Int32Array:
    """Returns for each token of the step the position behind the last key that it sees: int32 [num_tokens], a new array.

    Args:
        before: the result of an earlier call for the same step, which holds for all other tokens; None if there is none. Then
            the other tokens see nothing behind themselves.
        first_token, ends: the token `first_token + i` of the step sees the keys before position `ends[i]`.

    Raises:
        AssertionError: a token would not see itself, or would see keys that the step does not have, or less than the token
            before it.
    """
    starts = inputs.query_start_loc
    lengths = np.diff(starts)
    own = np.arange(starts[-1], dtype=np.int32) + np.repeat(inputs.num_computed_tokens - starts[:-1], lengths) + 1
    found = own.copy() if before is None else before.copy()
    tokens = slice(first_token, first_token + len(ends))
    assert first_token >= 0 and tokens.stop <= len(found), f"{tokens} of {len(found)} tokens"
    found[tokens] = ends
    least = own.copy()
    least[1:] = np.maximum(own[1:], found[:-1])
    least[starts[:-1][lengths > 0]] = own[starts[:-1][lengths > 0]]  # the token before is of another row
    fit = (least <= found).all() and (found <= np.repeat(inputs.seq_lens, lengths)).all()
    assert fit, f"tokens at {own - 1} cannot see the keys before {found}"
    return found
