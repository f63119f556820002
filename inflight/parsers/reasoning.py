"""Where a model's reasoning is in its text: `ReasoningMarkup`, the tags of a family, and `Opening`, what the prompt says.

The grammar of a request and the parser of its answer must agree on this. So one place decides for both: `find_opening` for the
prompt, and `answer_frame` for the text.
"""

from dataclasses import dataclass
from enum import Enum, auto

from inflight.interface.request import AnswerFrame
from inflight.parsers.tool_parser import ToolParser


class Opening(Enum):
    """What the end of a prompt says about the reasoning."""

    NONE = auto()  # nothing: the text begins with reasoning if it begins with the opening tag
    OPEN = auto()  # the text begins inside the reasoning
    CLOSED = auto()  # the reasoning has ended, or the answer has begun: the text has no reasoning


@dataclass(frozen=True, slots=True)
class ReasoningMarkup:
    """The two tags around the reasoning of a model, which is the text that it writes before its answer.

    Attributes:
        begin: "" if it is not known. Then every text begins inside the reasoning unless the prompt has closed it.
        needs_special_tokens: whether the tags are special tokens, so that the text must be decoded with special tokens.
        answer_begins, answer_ends: tags that may stand around the answer.
        starts_inside: whether the text of the model begins with reasoning even without an opening tag.
        whole_parser: if the family divides its whole text into messages, reads this text, with reasoning, content and calls. It
            replaces the tool parser.
        frame: in such a family, what may be around a constrained text.
    """

    begin: str
    end: str
    needs_special_tokens: bool = False
    answer_begins: tuple[str, ...] = ()
    answer_ends: tuple[str, ...] = ()
    starts_inside: bool = False
    whole_parser: type[ToolParser] | None = None
    frame: AnswerFrame | None = None


def find_opening(markup: ReasoningMarkup, prompt: str, begun_answer: str | None = None) -> Opening:
    """
    Args:
        prompt: the end of the prompt. Chat templates write a tag there, to switch the reasoning on or off. A tag further in
            front may be part of a user's message, so it does not count.
        begun_answer: the part of the answer that the prompt ends with and that the model continues; None if the model begins an
            answer.
    """
    if begun_answer is not None:
        opened = _last(begun_answer, markup.begin)
        closed = _last(begun_answer, markup.end)
        if max(opened, closed) >= 0:
            return Opening.OPEN if opened > closed else Opening.CLOSED
        prompt = prompt.rstrip().removesuffix(begun_answer.rstrip())
    prompt = prompt.rstrip()
    if markup.begin and prompt.endswith(markup.begin):
        return Opening.OPEN
    if begun_answer is not None or prompt.endswith(markup.end):
        return Opening.CLOSED
    return Opening.NONE


def answer_frame(
    markup: ReasoningMarkup | None,
    opening: Opening = Opening.NONE,
    calls: tuple[str, ...] = (),
    *,
    only_calls: bool = False,
    is_constrained: bool = True,
) -> AnswerFrame | None:
    """What the model may write around a constrained text; None if nothing. For a text without a constraint: where its reasoning
    is; None if it has none.

    Args:
        markup: None for a model without reasoning.
        calls: texts with which a call begins, if a call may come instead of the constrained text, or if there is no constraint.
        only_calls: whether the constrained text itself is a call, so that it has no header of an answer.
        is_constrained: whether a grammar constrains the text. Without a grammar, the text may begin with reasoning even if
            the prompt has closed one.
    """
    is_closed = opening is Opening.CLOSED and (is_constrained or not markup or not markup.begin)
    if markup is None or is_closed:
        if calls and is_constrained:
            return AnswerFrame(begin="", end="", calls=calls)
        return None
    starts_inside = opening is Opening.NONE and markup.starts_inside and not is_constrained
    is_open = opening is Opening.OPEN or not markup.begin or starts_inside
    form = markup.frame or AnswerFrame(begin=markup.begin, end=markup.end)
    return AnswerFrame(
        begin=form.begin,
        end=form.end,
        is_open=is_open,
        answer="" if only_calls else form.answer,
        next_message=form.next_message,
        calls=calls,
        not_in_reasoning=form.not_in_reasoning,
    )


def _last(text: str, tag: str) -> int:
    return text.rfind(tag) if tag else -1
