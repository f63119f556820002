"""The parser of Harmony, the format of gpt-oss. It divides the whole text of the model into messages.

    <|channel|>analysis<|message|>The user wants...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

A message has a header, the tag `<|message|>`, and a body. (There are no line breaks between messages.) The first message has no
`<|start|>assistant`, because the prompt ends with it. The receiver `to=...` may also stand before `<|channel|>`.

If the receiver is a function and the request has tools, the body is a call. Otherwise the body is reasoning in the channel
"analysis" and content in all other channels. The first tags of a header may be missing, as may "functions." before the name of
a known tool. A header is never content. If the text ends within a header, the header is dropped.
"""

import re

from inflight.interface.request import AnswerFrame
from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser

_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_PLAIN = re.compile(r"[^<\n]+")
_FUNCTION = re.compile(r"to=(functions\.)?([^\s<]+)")
_WORDS = ("assistant", "analysis", "commentary", "final")
_AFTER_WORD = ("<|channel|>", "<|constrain|>", "<|message|>", "to=")
_RECEIVER = "to=functions."

# Reasoning may come before the answer, and each message but the first begins with `<|start|>assistant`.
FRAME = AnswerFrame(
    begin="<|channel|>analysis<|message|>",
    end="<|end|>",
    answer="<|channel|>final<|message|>",
    next_message="<|start|>assistant",
    not_in_reasoning=("<|start|>", "<|channel|>", "<|message|>"),
)


class HarmonyParser(ToolParser):
    ends = (*_STARTS, *_ENDS)

    @classmethod
    def beginnings(cls) -> tuple[str, ...]:
        return (f"<|channel|>commentary {_RECEIVER}", f" {_RECEIVER}", _RECEIVER)

    def run(self) -> Steps[None]:
        yield from self._hold_blanks()
        tag = yield from self._hold_literal("to=", *_STARTS)
        if not tag:
            tag = yield from self._word_of_header()
        if not tag:
            self._writer.reject()
        while True:
            is_thought = tag not in ("", *_ENDS) and (yield from self._begin_message(tag))
            if is_thought:
                self._writer.begin_reasoning()
                self._writer.reasoning("\n\n")  # between two messages of reasoning; dropped before the first
            write = self._writer.reasoning if is_thought else self._writer.content
            tag = yield from self._reader.until(write, *_STARTS, *_ENDS)
            if not tag:
                return
            if is_thought:
                self._writer.end_reasoning()
            if tag in _STARTS:
                self._writer.hold(tag)
            else:
                tag = yield from self._word_of_header()

    def _word_of_header(self) -> Steps[str]:
        """Hold the first word of a header without its tags, as in "final<|message|>"; "" if no such word comes next."""
        if not (yield from self._reader.follows(dict.fromkeys(_WORDS, dict.fromkeys(_AFTER_WORD)))):
            return ""
        return (yield from self._hold_literal(*_WORDS))

    def _begin_message(self, tag: str) -> Steps[bool]:
        """Read the rest of a header, which began with `tag`, and the call if the body is one. Returns whether the rest of the
        body is reasoning."""
        try:
            header = yield from self._rest_of_header(tag)
        except MalformedCallError:
            if tag not in _WORDS and not (yield from self._reader.peek()):  # the text has ended within the header
                self._writer.accept()
            self._writer.reject()
            return False
        self._writer.accept()
        function = _FUNCTION.search(header)
        name = function[2] if function and (function[1] or function[2] in self._tool_names) else ""
        if name and name.isprintable() and self._tools:
            try:
                yield from self._hold_blanks()
                if (yield from self._reader.comes(*_ENDS)):
                    self._writer.start_call(name)
                    self._writer.arguments("{}")
                else:
                    yield from self._arguments(name)
                self._writer.end_call()
            except MalformedCallError:
                self._writer.reject()
            return False
        return "<|channel|>analysis" in header or header.startswith("analysis")

    def _rest_of_header(self, tag: str) -> Steps[str]:
        pieces = [tag]
        while tag != "<|message|>":
            pieces.append((yield from self._hold_run(_PLAIN)))
            tag = yield from self._expect("<|channel|>", "<|constrain|>", "<|message|>")
            pieces.append(tag)
        return "".join(pieces)
