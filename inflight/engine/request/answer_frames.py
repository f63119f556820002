"""`AnswerFrames`: finds where the reasoning of a request is in its text, and how many tokens it may have."""

from collections.abc import Collection
from dataclasses import replace
from enum import Enum, auto
from functools import cached_property
from typing import Final, Literal

from inflight.config.engine import EngineConfig
from inflight.errors import InvalidRequestError
from inflight.interface.request import AnswerFrame, Int32Array
from inflight.parsers.reasoning import ReasoningMarkup, answer_frame, find_opening
from inflight.parsers.selector import (
    DetectedParsers,
    call_beginnings,
    detect_parsers,
    read_tags,
    reasoning_markup,
    reasoning_with_end,
)
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.tokenizer import Tokenizer

_MAX_TAIL = 4096  # tokens at the end of a prompt without an end token, in which the tags are searched for


class _Find(Enum):
    FIND = auto()


FIND: Final = _Find.FIND  # the caller of `AnswerFrames.find` does not know the frame
GivenFrame = AnswerFrame | Literal[_Find.FIND] | None


class AnswerFrames:
    """Several threads may call all methods."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        eos_token_ids: Collection[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._eos_token_ids = eos_token_ids
        self._end_markup = reasoning_with_end(config.reasoning_end) if config.reasoning_end else None
        self._default_budget = config.reasoning_budget
        self._message = config.reasoning_budget_message
        self._named_markup = reasoning_markup(config.reasoning.reasoning_parser or None)
        if end := config.reasoning.reasoning_end_str:
            tags = read_tags(config.reasoning.reasoning_start_str, end)
            self._named_markup = tags.markup
            self._message = self._message or tags.message
        self._closing: dict[
            str, tuple[int, ...]
        ] = {}  # text -> its tokens; there is one text for each end tag and message

    def find(
        self,
        params: SamplingParams,
        prompt_token_ids: Int32Array,
        *,
        max_tokens: int,
        thinks_first: bool,
        given: GivenFrame,
    ) -> AnswerFrame | None:
        """Returns the frame of a request's text; None if it needs none.

        Args:
            max_tokens: the most tokens that the request may emit.
            thinks_first: whether the text is an answer in a chat, which may begin with reasoning.
            given: the frame without a budget, if the caller knows it.

        Raises:
            InvalidRequestError: the request bounds its reasoning, but the reasoning of this model cannot be found.
        """
        budget = self._budget(params, thinks_first)
        if params.structured_outputs is None and (budget is None or budget >= max_tokens):
            return None
        if self._end_markup is not None and self._tokenizer is not None and thinks_first:
            frame = self._frame_in(self._end_markup, prompt_token_ids, params)
        elif given is not FIND:
            frame = given
        elif budget is None:
            frame = None
        elif self._tokenizer is not None and (markup := self._end_markup or self._detected) is not None:
            frame = self._frame_in(markup, prompt_token_ids, params)
        elif params.thinking_token_budget is None:  # the default of the engine has no effect for such a model
            frame = None
        else:
            raise InvalidRequestError(
                "thinking_token_budget needs a model whose chat template shows how reasoning is marked, and a tokenizer: leave "
                "it out, or give the engine reasoning_end",
                "thinking_token_budget",
            )
        if frame is None or not frame.end or budget is None:
            return frame if params.structured_outputs is not None else None
        return replace(frame, max_reasoning_tokens=budget, closing_token_ids=self._closing_of(frame, budget))

    def _budget(self, params: SamplingParams, thinks_first: bool) -> int | None:
        budget = params.thinking_token_budget
        if budget is None and thinks_first and params.allowed_token_ids is None:
            budget = self._default_budget
        return None if budget is None or budget < 0 else budget

    @cached_property
    def _parsers(self) -> DetectedParsers:
        return detect_parsers(self._chat_template)

    @property
    def _detected(self) -> ReasoningMarkup | None:
        return self._named_markup or reasoning_markup(self._parsers.reasoning)

    def _frame_in(
        self, markup: ReasoningMarkup, prompt_token_ids: Int32Array, params: SamplingParams
    ) -> AnswerFrame | None:
        """The tags in the prompt's last turn say whether the reasoning is open."""
        assert self._tokenizer is not None
        prompt = prompt_token_ids.tolist()
        from_end = range(len(prompt) - 1, -1, -1)
        turn = next((i + 1 for i in from_end if prompt[i] in self._eos_token_ids), 0)
        text = self._tokenizer.decode(prompt[max(turn, len(prompt) - _MAX_TAIL) :], skip_special_tokens=False)
        has_tag = any(tag in text for tag in (markup.begin, markup.end) if tag)
        opening = find_opening(markup, text, text if has_tag else None)
        if params.structured_outputs is not None:
            return answer_frame(markup, opening)
        return answer_frame(markup, opening, call_beginnings(self._parsers.tool), is_constrained=False)

    def _closing_of(self, frame: AnswerFrame, budget: int) -> tuple[int, ...]:
        """The tokens that close the reasoning. The message explains a cut, so it is left out if there is no reasoning."""
        assert self._tokenizer is not None
        message = self._message if budget else ""
        text = message + frame.end
        if text not in self._closing:
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
            written = self._tokenizer.decode(token_ids, skip_special_tokens=False)
            if any(tag in message for tag in (frame.end, *frame.not_in_reasoning)) or not written.endswith(frame.end):
                raise InvalidRequestError(
                    f"the reasoning cannot be closed with the text {text!r}: leave out thinking_token_budget, or give the "
                    "engine another reasoning_budget_message",
                    "thinking_token_budget",
                )
            self._closing[text] = tuple(token_ids)
        return self._closing[text]
