"""`Detokenizer`: makes the text of one completion from its tokens. The text ends at the first stop string.

    tokens -> IncrementalDecoder -> text -> StopSearch -> [ released | held back: may be the beginning of a stop string ]
                                         -> OutputParser -> events: content, reasoning and tool calls

Released text never changes, so it can be streamed. The cost is linear in the length of the text. If there is a parser, all text
goes to the parser. It searches for stop strings in the content only: in the reasoning, a stop string would end the request
before the answer, and in a call it would cut the arguments.
"""

from collections.abc import Sequence

from inflight.interface.events import Event, join_deltas
from inflight.parsers.output_parser import OutputParser
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.stop_strings import StopSearch, StopStrings
from inflight.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """If there is no tokenizer, or with detokenize=False, the text is empty.

    Attributes:
        num_reasoning_tokens: how many tokens were reasoning. The token that completes a tag does not count. Without a parser it
            is 0. The tokens of a thought behind content or a call count when it ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_strings: StopStrings | None,
        parser: OutputParser | None = None,
    ) -> None:
        """`stop_strings` finds the stop strings of `params`; None if there are none. All completions of a request share it."""
        self._decoder = None
        if tokenizer is not None and params.detokenize:
            self._decoder = tokenizer.incremental_decoder(prompt_token_ids, params.skip_special_tokens)
        self._includes_stop = params.include_stop_str_in_output
        self._search = None
        if stop_strings is not None:
            self._search = StopSearch(stop_strings, includes_stop=self._includes_stop)
        self._parser = parser
        if parser is not None:
            parser.search_content(self._search)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []  # released text that `take` has not returned yet
        self._events: list[Event] = []
        self.num_reasoning_tokens = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text, or None."""
        return None if self._search is None else self._search.found

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Add tokens. If a token completes a stop string, cut the text there, ignore the later tokens, and return the number of
        tokens that were used, including this token. Otherwise return None.

        As in vLLM, a stop string may begin, but not end, in the text of the first `min_tokens` tokens.
        """
        assert not self.stop_string
        if self._decoder is None:
            return None
        if self._search is None and self._parser is None:
            self._pieces.append(self._decoder.push_all(token_ids))
            return None
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            self._add(self._decoder.push(token_id), search=self._num_tokens > self._min_tokens)
            if self._parser is not None:
                self.num_reasoning_tokens = self._parser.num_reasoning_pieces
            if self.stop_string is not None:
                return count
        return None

    def finish(self, end_token_id: int | None = None, *, is_cut: bool = False) -> None:
        """Release the text that is held back, and an incomplete character at the end.

        Args:
            end_token_id: the token that ended the request, if `push` was not called with it. If `include_stop_str_in_output` is
                set, the text of this token is added. No stop string is searched for in this text.
            is_cut: whether something else than the model or a stop string has ended the request: a limit or an abort.
        """
        if self._decoder is not None and self.stop_string is None:
            if end_token_id is not None and self._includes_stop:
                self._add(self._decoder.push(end_token_id), search=False)
            self._add(self._decoder.flush(), search=False)
        if self._parser is not None:
            self._events += self._parser.finish(is_cut=is_cut)
        elif self._search is not None:
            self._pieces.append(self._search.release())

    def take(self) -> str:
        """Returns the text that was released since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def take_events(self) -> list[Event]:
        """Returns the events of the parser since the last call."""
        events, self._events = self._events, []
        return join_deltas(events)

    def _add(self, text: str, *, search: bool) -> None:
        if self._parser is not None:
            self._events += self._parser.push(text, may_stop=search)
        elif self._search is not None:
            self._pieces.append(self._search.write(text, search=search))
        else:
            self._pieces.append(text)
