"""`ToolSupport`: says when a model cannot use a request's tools, at the start and at the first request with tools."""

import logging

from inflight.parsers.selector import DetectedParsers
from inflight.parsers.template_markup import shows_tools
from inflight.tokenizer.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

_NOT_SHOWN = (
    "the chat template of %s has no place for tools: the model does not see the tools of requests. "
    "Give --chat-template a template that writes them"
)
_NOT_READ = (
    "no tool parser fits the chat template of %s: calls that the model writes stay text. "
    "If the model has a form of docs/tool-calls.md, name its parser with --tool-call-parser"
)


class ToolSupport:
    """Each server has one object of this class. It remembers whether it has logged the problem.

    Attributes:
        is_shown: whether the model sees the tools of a request.
        is_read: whether calls that the model writes are read.
    """

    def __init__(self, model: str, template: ChatTemplate | None, parsers: DetectedParsers, *, is_wanted: bool) -> None:
        """`is_wanted`: whether the operator wants calls to be read. If not, it is no problem that they are not read."""
        has_template = template is not None and template.default_source is not None
        self.is_shown = not has_template or template is None or shows_tools(template)
        self.is_read = not has_template or not is_wanted or parsers.tool is not None
        self._model = model
        self._is_logged = False
        if self.is_shown and not self.is_read:
            logger.warning(_NOT_READ, model)

    def report(self) -> tuple[str, ...]:
        """A request with tools has come. Returns the names for the header of its answer."""
        if self.is_shown and self.is_read:
            return ()
        if not self._is_logged:
            self._is_logged = True
            logger.warning(
                "A request has tools, but " + (_NOT_READ if self.is_shown else _NOT_SHOWN) + "; this is logged once",
                self._model,
            )
        return ("tools",)
