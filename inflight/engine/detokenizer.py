"""`Detokenizer`: one completion's text, token by token, until a stop string ends it.

    tokens -> IncrementalDecoder -> text -> StopStrings -> [ released | held: may begin a stop string ]

Released text never changes again, so it can be streamed. The cost is linear in the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.stop_strings import START, StopStrings
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Without a tokenizer (or with detokenize=False) the text stays empty.

    Attributes:
        stop_string: the stop string that ended the text, once one has.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_strings: StopStrings | None,
    ) -> None:
        """`stop_strings` is made from `params.stop_strings`, once for all completions of a request; None if it has none."""
        self._decoder = None
        if tokenizer is not None and params.detokenize:
            self._decoder = tokenizer.incremental_decoder(prompt_token_ids, params.skip_special_tokens)
        self._stop_strings = stop_strings
        self._min_tokens = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._state = START
        self._num_tokens = 0
        self._pieces: list[str] = []  # released, not yet taken
        self._held = ""
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Add tokens. How many of them there were when the text completed a stop string, None if it has not. Then the text is
        cut, and nothing may be pushed.

        As in vLLM, the text of the first `min_tokens` tokens completes none, though one may begin in it.
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
        """Release what is held, an incomplete character too. `end_token_id`, which ended the request, was not pushed:
        its text is added if `include_stop_str_in_output`, and is not searched for stop strings.
        """
        if self._decoder is not None and self.stop_string is None:
            if end_token_id is not None and self._includes_stop:
                self._held += self._decoder.push(end_token_id)
            self._held += self._decoder.flush()
        self._release(len(self._held))

    def take(self) -> str:
        """The text released since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def _search(self, stop_strings: StopStrings, text: str) -> bool:
        """Take a token's text in; whether it completes a stop string."""
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
