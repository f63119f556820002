"""Tool parsers for the families that write calls as in Python: LFM2, MiniCPM3, OLMo 3, and some Llama 3.2 and Llama 4.

    [get_weather(city="Oslo", days=3), get_time()]

`PythonArguments` reads the arguments. Where a family puts tags around its calls, JSON calls between them are read, too.
"""

import re
from typing import ClassVar

from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.python_reader import PythonArguments
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser

_NAME = re.compile(r"[^\s()\[\]{},=:'\"<>]+")
_CLOSING = re.compile(r"[)\]]+")
_AFTER_LIST = ("<|python_end|>",)
_SEPARATORS = (",", ";")
_PYTHON_TAGS = ("<|python_start|>", "<|python_tag|>")


class _CallsInPython(ToolParser):
    """Reads calls with a comma, a semicolon or a line break between them.

    Attributes:
        end: the tag after the last call; "" if there is none.
    """

    end: ClassVar[str] = ""

    def _python_calls(self, *, is_unmarked: bool = False) -> Steps[None]:
        """Read calls up to the end of the list. `is_unmarked`: whether only calls of the request's tools count."""
        ends = tuple(filter(None, (self.end,)))
        while True:
            yield from self._hold_blanks()
            name = yield from self._name(_NAME)
            yield from self._hold_blanks()
            yield from self._expect("(")
            if is_unmarked and name not in self._tool_names:
                raise MalformedCallError
            self._writer.start_call(name)
            schema = self._schema_of(name)
            arguments = PythonArguments(
                self._reader, self._writer.arguments, schema, stops=ends, after_list=ends or _AFTER_LIST
            )
            if not (yield from arguments.read()):
                yield from self._pass_on_rest(ends)
                return
            is_unmarked = False
            yield from self._hold_blanks()
            separator = yield from self._hold_literal(*_SEPARATORS)
            yield from self._hold_blanks()
            char = yield from self._reader.peek()
            if (not separator and not char.isidentifier()) or char in ")]" or (yield from self._comes_end()):
                return

    def _comes_end(self) -> Steps[bool]:
        return bool(self.end and (yield from self._reader.comes(self.end)))

    def _pass_on_rest(self, ends: tuple[str, ...]) -> Steps[None]:
        """Pass on the rest of a doubtful call as it was written, up to the closing tag."""
        if not ends:
            yield from self._reader.all(self._writer.arguments)
            return
        while (yield from self._reader.peek()) and not (yield from self._reader.comes(*ends)):
            piece = yield from self._reader.piece(_not_first(ends))
            self._writer.arguments(piece or self._reader.take(1))


def _not_first(ends: tuple[str, ...]) -> re.Pattern[str]:
    """A run of characters with which none of `ends` begins."""
    return re.compile(f"[^{re.escape(''.join(end[0] for end in ends))}]+")


class PythonicToolParser(_CallsInPython):
    """For models that write nothing but a list of calls: Llama 3.2, ToolACE. Llama 4 writes `<|python_start|>` before the list.

    [get_weather(city="Oslo", days=3), get_time()]

    If a message begins with anything else, it has no calls. The first call must be one of the request's tools.
    """

    def run(self) -> Steps[None]:
        try:
            yield from self._hold_blanks()
            yield from self._hold_literal(*_PYTHON_TAGS)
            while True:
                yield from self._hold_blanks()
                yield from self._expect("[")
                yield from self._python_calls(is_unmarked=True)
                yield from self._hold_run(_CLOSING)
                self._writer.end_call()
                yield from self._hold_blanks()
                if (yield from self._hold_literal("<|python_end|>")):
                    self._writer.end_call()
                    yield from self._hold_blanks()
        except MalformedCallError:
            self._writer.reject()
        yield from self._reader.all(self._writer.content)


class Lfm2ToolParser(_CallsInPython):
    """For LFM2 and LFM2.5.

    <|tool_call_start|>[get_weather(city="Oslo"), get_time()]<|tool_call_end|>
    """

    marker = "<|tool_call_start|>"
    end = "<|tool_call_end|>"
    ends = (end,)

    def _marked_call(self, marker: str) -> Steps[None]:
        yield from self._hold_blanks()
        yield from self._hold_fence()
        has_bracket = yield from self._hold_literal("[")
        yield from self._hold_blanks()
        if not (yield from self._reader.comes("{")):
            yield from self._python_calls()
            yield from self._hold_run(_CLOSING)
        elif has_bracket:
            yield from self._list_of_calls()
        else:
            yield from self._call()
        yield from self._hold_blanks()
        yield from self._hold_fence()
        yield from self._expect(self.end)


class MiniCpm3ToolParser(Lfm2ToolParser):
    """For MiniCPM3. The calls are a block of Markdown, and each is on a line of its own.

    <|tool_call_start|>
    ```python
    get_weather(city="Oslo")
    get_time()
    ```
    <|tool_call_end|>
    """


class Olmo3ToolParser(Lfm2ToolParser):
    """For OLMo 3. Each call is on a line of its own.

    <function_calls>
    get_weather(city="Oslo")
    get_time()
    </function_calls>
    """

    marker = "<function_calls>"
    end = "</function_calls>"
    ends = (end,)
