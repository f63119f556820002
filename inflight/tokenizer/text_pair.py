"""`TextPairs`: tokenises pairs of texts, as models that score a pair (cross-encoders) read them: both in one sequence."""

from typing import NamedTuple

import tokenizers

from inflight.errors import ContextLengthExceededError, InvalidRequestError
from inflight.tokenizer.cut_text import cut_encoding
from inflight.tokenizer.failures import encoding_failure
from inflight.tokenizer.tokenizer import Tokenizer


class PairTokens(NamedTuple):
    token_ids: list[int]
    second: int | None  # where the tokens of type 1 begin; None if there are none


class PairLimits(NamedTuple):
    """How a pair that is too long is cut.

    Attributes:
        total: the most tokens of both and what is around them; -1: as many as the model takes; None: a longer one is refused.
        first, second: the most tokens of one text, if it may be cut; None: only both together are.
    """

    total: int | None = None
    first: int | None = None
    second: int | None = None

    def most(self, max_len: int) -> int:
        """The most tokens of a pair, if the model takes `max_len`."""
        return max_len if self.total in (None, -1) else min(self.total, max_len)


# The two texts as parameters, in errors
FIRST, SECOND = "data_1", "data_2"


class TextPairs:
    """`max_len`: the most tokens of a pair, special tokens included. Several threads may use it at once."""

    def __init__(self, tokenizer: Tokenizer, max_len: int) -> None:
        """
        Raises:
            InvalidRequestError: the tokenizer puts nothing between two texts.
        """
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        self._num_special: int = self._backend.num_special_tokens_to_add(True)
        self._max_len = max_len
        self._last: tuple[str, int, tokenizers.Encoding] | None = None
        if not self._num_special:
            raise InvalidRequestError(
                "this model's tokenizer has no form for a pair of texts, so there is no score of one"
            )

    def encode(self, one: str, other: str, limits: PairLimits) -> PairTokens:
        """Of a pair that is too long and may be cut, the longer text loses tokens first.

        Raises:
            InvalidRequestError: a text is not valid Unicode. `param` is FIRST or SECOND. Or nothing would be left of a text.
            ContextLengthExceededError: the pair is too long. `param` is the longer text.
        """
        room = limits.most(self._max_len) - self._num_special
        if room < 2:
            raise InvalidRequestError(
                f"truncate_prompt_tokens={limits.total} leaves no token of each text beside {self._num_special} special tokens",
                "truncate_prompt_tokens",
            )
        # no more tokens than these are needed
        most_left, most_right = (room + 1 if most is None else min(most, room + 1) for most in limits[1:])
        param = FIRST
        try:
            left = self._left(one, most_left)
            param = SECOND
            right = cut_encoding(self._backend, other, most_right)
            num_left, num_right = len(left.ids), len(right.ids)
            if limits.total is None and num_left + num_right > room:
                raise ContextLengthExceededError(
                    f"This model's maximum context length is {self._max_len} tokens. However, the two texts and "
                    f"{self._num_special} special tokens have more: shorten one, or give truncate_prompt_tokens=-1.",
                    num_left + num_right + self._num_special,
                    FIRST if num_left > num_right else SECOND,
                )
            num_left, num_right = _longest_first(num_left, num_right, room)
            left.truncate(num_left)
            right.truncate(num_right)
            pair = self._backend.post_process(left, right, True)
        except ContextLengthExceededError:
            raise
        except BaseException as error:
            raise encoding_failure(error, param) from None
        types: list[int] = pair.type_ids
        return PairTokens(pair.ids, types.index(1) if 1 in types else None)

    def _left(self, text: str, most: int) -> tokenizers.Encoding:
        """As `cut_encoding`. The last text is remembered, because a query comes with thousands of documents."""
        found = self._last
        if found is None or found[:2] != (text, most):
            found = self._last = (text, most, cut_encoding(self._backend, text, most))
        return tokenizers.Encoding.merge([found[2]])  # a copy, because the caller cuts it


def _longest_first(left: int, right: int, room: int) -> tuple[int, int]:
    """How many tokens both texts keep: the shorter one all, if it has at most half of the room, and otherwise each half.
    `tokenizers` does the same, but if the room is odd it knows which text is longer."""
    shorter, longer = sorted((left, right))
    if shorter + longer > room:
        shorter = min(shorter, room // 2)
        longer = room - shorter
    return (shorter, longer) if left <= right else (longer, shorter)
