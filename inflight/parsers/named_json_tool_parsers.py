"""Tool parsers for the families that write the name of a call, a tag, and JSON arguments: Kimi K2, Solar and Functionary."""

import re
from typing import ClassVar

from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser

_NAME = re.compile(r"[^\s<>{}]+")
_KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")
_LINE = re.compile(r"[^\n>]+")


class _NamedJson(ToolParser):
    """Reads `marker`, then calls, each from `second_marker` to `after_call`, then `end`.

    Attributes:
        before_arguments: the tag between the name and the arguments.
        after_call: the tag after the arguments. It may be missing before another tag.
        end: the tag after the last call, which may be missing; "" if there is none.
    """

    before_arguments: ClassVar[str]
    after_call: ClassVar[str]
    end: ClassVar[str] = ""

    def _marked_call(self, marker: str) -> Steps[None]:
        begin = self.second_marker or self.marker
        if marker != begin:
            yield from self._hold_blanks()
            yield from self._expect(begin)
        tag = begin
        while tag == begin:
            yield from self._one_call()
            yield from self._hold_blanks()
            if not (yield from self._hold_literal(self.after_call)):
                yield from self._expect(*filter(None, (self.after_call, self.end)))
                return
            self._writer.end_call()
            yield from self._hold_blanks()
            tag = yield from self._hold_literal(*filter(None, (begin, self.end)))

    def _one_call(self) -> Steps[None]:
        yield from self._hold_blanks()
        name = yield from self._name(_NAME)
        yield from self._named_arguments(name)

    def _named_arguments(self, name: str) -> Steps[None]:
        yield from self._hold_blanks()
        yield from self._expect(self.before_arguments)
        yield from self._hold_blanks()
        yield from self._arguments(name)


class KimiK2ToolParser(_NamedJson):
    """For Kimi K2. The model writes the ids of its calls. Its chat template writes only these ids, not the names.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
    <|tool_call_end|><|tool_calls_section_end|>
    """

    marker = "<|tool_calls_section_begin|>"
    second_marker = "<|tool_call_begin|>"
    after_marker = (second_marker,)
    before_arguments = "<|tool_call_argument_begin|>"
    after_call = "<|tool_call_end|>"
    end = "<|tool_calls_section_end|>"
    ends = (after_call, end, second_marker)

    def _one_call(self) -> Steps[None]:
        yield from self._hold_blanks()
        call_id = yield from self._name(_NAME)
        found = _KIMI_NAME.fullmatch(call_id)
        if found is None:
            raise MalformedCallError
        self._writer.next_call_id = call_id if ":" in call_id else ""
        yield from self._named_arguments(found[1])


class SolarToolParser(_NamedJson):
    """For Solar Open. The model writes the ids of its calls.

    <|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Oslo"}<|tool_call:end|>
    """

    marker = "<|tool_calls|>"
    second_marker = "<|tool_call:begin|>"
    after_marker = (second_marker,)
    before_arguments = "<|tool_call:args|>"
    after_call = "<|tool_call:end|>"
    end = "<|calls|>"
    ends = (after_call, end, second_marker)

    def _one_call(self) -> Steps[None]:
        self._writer.next_call_id = (yield from self._hold_run(_NAME)).strip()
        yield from self._expect("<|tool_call:name|>")
        yield from super()._one_call()


class FunctionaryV31ToolParser(_NamedJson):
    """For Functionary 3.1.

    <function=get_weather>{"city": "Oslo"}</function>
    """

    marker = "<function="
    before_arguments = ">"
    after_call = "</function>"
    ends = (after_call,)


class FunctionaryV32ToolParser(ToolParser):
    """For Functionary 3.2. Each part of an answer begins with its receiver: all, or a function. The prompt ends with `>>>`.

    >>>all
    I look.
    >>>get_weather
    {"city": "Oslo"}
    """

    ends = (">>>",)

    @classmethod
    def beginnings(cls) -> tuple[str, ...]:
        return (">>>",)

    def run(self) -> Steps[None]:
        yield from self._hold_literal(">>>")
        while True:
            try:
                receiver = yield from self._hold_run(_LINE)
                yield from self._expect("\n")
                if receiver in self._tool_names:
                    yield from self._hold_blanks()
                    yield from self._arguments(receiver)
                    self._writer.end_call()
                elif receiver == "all":
                    self._writer.accept()
                else:
                    raise MalformedCallError
            except MalformedCallError:
                self._writer.reject()
            if not (yield from self._reader.until(self._writer.content, ">>>")):
                return
            self._writer.hold(">>>")
