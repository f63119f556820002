"""`Detokenizer`: makes the text of one completion from its tokens. The text ends at the first stop string.

    tokens -> IncrementalDecoder -> text -> StopStrings -> [ released | held back: may be the beginning of a stop string ]

Released text never changes, so it can be streamed. The cost is linear in the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.stop_strings import START, StopStrings
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """If there is no tokenizer, or with detokenize=False, the text is empty.

    Attributes:
        stop_string: the stop string that has ended the text, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_strings: StopStrings | None,
    ) -> None:
        """`stop_strings` finds the stop strings of `params`; None if there are none. All completions of a request share it."""
        self._decoder = None
        if tokenizer is not None and params.detokenize:
            self._decoder = tokenizer.incremental_decoder(prompt_token_ids, params.skip_special_tokens)
        self._stop_strings = stop_strings
        self._min_tokens = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._state = START
        self._num_tokens = 0
        self._pieces: list[str] = []  # released text that `take` has not returned yet
        self._held = ""  # text that is held back
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Add tokens. If a token completes a stop string, cut the text there, ignore the later tokens, and return the number of
        tokens that were used, including this token. Otherwise return None.

        As in vLLM, a stop string may begin, but not end, in the text of the first `min_tokens` tokens.
        """
        assert self.stop_string is None
        if self._decoder is None:
            return None
        if self._stop_strings is None:
            self._pieces.append(self._decoder.push_all(token_ids))
            return None
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            if self._search(self._stop_strings, self._decoder.push(token_id)):
                return count
        return None

    def finish(self, end_token_id: int | None = None) -> None:
        """Release the text that is held back, and an incomplete character at the end.

        Args:
            end_token_id: the token that ended the request, if `push` was not called with it. If `include_stop_str_in_output` is
                set, the text of this token is added. No stop string is searched for in this text.
        """
        if self._decoder is not None and self.stop_string is None:
            if end_token_id is not None and self._includes_stop:
                self._held += self._decoder.push(end_token_id)
            self._held += self._decoder.flush()
        self._release(len(self._held))

    def take(self) -> str:
        """Returns the text that was released since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def _search(self, stop_strings: StopStrings, text: str) -> bool:
        """Add the text of one token. Returns whether this text completes a stop string."""
        is_counted = self._num_tokens > self._min_tokens
        self._state, num_read, found = stop_strings.advance(self._state, text, search=is_counted)
        self._held += text[:num_read]
        self.stop_string = found
        if found is None:
            self._release(len(self._held) - stop_strings.num_held[self._state])
        elif not self._includes_stop:
            self._held = self._held[: -len(found)]
        return found is not None

    def _release(self, count: int) -> None:
        if count > 0:
            self._pieces.append(self._held[:count])
            self._held = self._held[count:]
