"""Forms of conversations that clients send. Each is legal in at least one API; many chat templates refuse some of them.

Every text that a template must write is a word that begins with "Text". The templates must write these words in the order of
the conversation. Thoughts are words that begin with "Thought", because most templates leave out earlier thoughts on purpose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # Any: JSON
FIRST, SECOND = "call_0123456789abcdef01234567", "toolu_01A09q90qw90lq917835lq9"


def system(text: Any = "TextSystem") -> Message:
    return {"role": "system", "content": text}


def user(text: Any = "TextUser") -> Message:
    return {"role": "user", "content": text}


def answer(text: Any = "TextAnswer", **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(name: str = "get_weather", call_id: str | None = FIRST, city: str = "TextOslo") -> Message:
    made = {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"city": city}}}
    return made if call_id is not None else {key: value for key, value in made.items() if key != "id"}


def calling(*calls: Message, **more: Any) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": list(calls or (call(),)), **more}


def result(text: Any = "TextResult", call_id: str | None = FIRST, **more: Any) -> Message:
    found = {"role": "tool", "content": text, "tool_call_id": call_id, **more}
    return found if call_id is not None else {key: value for key, value in found.items() if key != "tool_call_id"}


def parts(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def older_call(arguments: Any = None, name: str = "get_weather", **more: Any) -> Message:
    function = {"name": name, "arguments": {"city": "TextOslo"} if arguments is None else arguments}
    return {"role": "assistant", "content": None, "function_call": function, **more}


def older_result(text: Any = "TextResult", name: str = "get_weather") -> Message:
    return {"role": "function", "name": name, "content": text}


def custom_call(call_id: str = FIRST) -> Message:
    return {"id": call_id, "type": "custom", "custom": {"name": "shell", "input": "TextCommand"}}


BOTH = (call(), call("get_time", SECOND, "TextRome"))


@dataclass(frozen=True)
class Form:
    """
    Attributes:
        order: the texts in the order of the prompt; None: the order in which the messages have them.
        ends: whether the conversation may end there. Otherwise it is also tried with an answer and a question behind it.
    """

    name: str
    messages: Sequence[Message]
    order: tuple[str, ...] | None = None
    has_tools: bool = field(default=True)


def _plain(*messages: Message) -> list[Message]:
    return list(messages)


FORMS = (
    Form("a question", [user()], has_tools=False),
    Form("turns", [system(), user(), answer(), user("TextMore")], has_tools=False),
    Form("two questions in a row", [user("TextA"), user("TextB")]),
    Form("two questions later", [user("TextA"), answer(), user("TextB"), user("TextC")]),
    Form("two answers in a row", [user(), answer("TextA"), answer("TextB"), user("TextC")]),
    Form("text parts", [system(parts("TextS")), user(parts("TextA", "TextB")), answer(parts("TextC")), user("TextD")]),
    Form("two questions, the first of parts", [user(parts("TextA", "TextB")), user("TextC")]),
    Form("a greeting", [answer(), user()]),
    Form("a greeting behind a system message", [system(), answer(), user()]),
    Form("only a system message", [system()]),
    Form("system messages in a row", [system("TextA"), system("TextB"), user()]),
    Form("developer", [{"role": "developer", "content": "TextDeveloper"}, user()]),
    Form("a late system message", [system("TextA"), user(), system("TextB")]),
    Form("a late system message behind an answer", [user("TextA"), answer("TextB"), system("TextC"), user("TextD")]),
    Form("a late system message behind a result", [system("TextA"), user(), calling(), result(), system("TextB")]),
    Form("an answer last", [user(), answer()]),
    Form("a call", [user(), calling(), result()]),
    Form("a call of a system's conversation", [system(), user(), calling(), result(), answer(), user("TextMore")]),
    Form("a call with text", [user(), calling(content="TextAnswer"), result()]),
    Form("a call with empty text", [user(), calling(content=""), result(), answer()]),
    Form("a call with an empty list", [user(), calling(content=[]), result()]),
    Form("a call with absent text", [user(), {k: v for k, v in calling().items() if k != "content"}, result()]),
    Form("a call last", [user(), calling()]),
    Form("a question behind a result", [user(), calling(), result(), user("TextMore")]),
    Form("two questions behind a result", [user(), calling(), result(), user("TextA"), user("TextB")]),
    Form("a question behind a call without a result", [user(), calling(), user("TextMore")]),
    Form(
        "a tool loop", [user(), calling(), result("TextA"), calling(call("get_time", SECOND)), result("TextB", SECOND)]
    ),
    Form("an answer, then a call", [user(), answer(), calling(), result(), answer("TextEnd"), user("TextMore")]),
    Form(
        "parallel calls",
        [user(), calling(*BOTH), result("TextA"), result("TextB", SECOND)],
        order=("TextUser", "TextA", "TextB"),
    ),
    Form(
        "parallel calls, results in another order",
        [user(), calling(*BOTH), result("TextB", SECOND), result("TextA"), answer(), user("TextMore")],
        order=("TextUser", "TextAnswer", "TextMore"),
    ),
    Form(
        "parallel calls, a result is missing",
        [user(), calling(*BOTH), result("TextB", SECOND), user("TextMore")],
        order=("TextUser", "TextB", "TextMore"),
    ),
    Form(
        "calls in messages of their own",
        [user(), calling(BOTH[0]), calling(BOTH[1]), result("TextA"), result("TextB", SECOND)],
        order=("TextUser", "TextA", "TextB"),
    ),
    Form(
        "Codex",
        [
            {"role": "developer", "content": "TextDeveloper1"},
            {"role": "developer", "content": "TextDeveloper2"},
            user("TextUser1"),
            user("TextUser2"),
            calling(BOTH[0]),
            calling(BOTH[1]),
            result("TextA"),
            result("TextB", SECOND),
            user("TextUser3"),
        ],
        order=("TextDeveloper1", "TextDeveloper2", "TextUser1", "TextUser2", "TextA", "TextB", "TextUser3"),
    ),
    Form("a result of parts", [user(), calling(), result(parts("TextA", "TextB"))]),
    Form("a result that is an object", [user(), calling(), result({"found": "TextA", "all": [1]})]),
    Form("a result that is a list", [user(), calling(), result([{"found": "TextA"}, 2])]),
    Form("an empty result", [user(), calling(), result(""), answer()]),
    Form("a result without content", [user(), calling(), result(None), answer()]),
    Form("a result without a call", [user("TextA"), result("TextB"), user("TextC")]),
    Form("a cut history: a result first", [result("TextA"), answer("TextB"), user("TextC")]),
    Form("a cut history: a call first", [system(), calling(), result("TextA"), user("TextC")]),
    Form(
        "a message between call and result",
        [user("TextA"), calling(), user("TextB"), result("TextC")],
        order=("TextA",),
    ),
    Form("calls without ids", [user(), calling(call(call_id=None)), result(call_id=None)]),
    Form(
        "calls without ids, results with names",
        [
            user(),
            calling(call(call_id=None), call("get_time", None, "TextRome")),
            result("TextB", None, name="get_time"),
            result("TextA", None, name="get_weather"),
        ],
        order=("TextUser",),
    ),
    Form(
        "arguments as text",
        [
            user(),
            calling({**call(), "function": {"name": "get_weather", "arguments": '{"city": "TextOslo"}'}}),
            result(),
        ],
    ),
    Form("arguments absent", [user(), calling({**call(), "function": {"name": "get_weather"}}), result()]),
    Form(
        "arguments empty", [user(), calling({**call(), "function": {"name": "get_weather", "arguments": {}}}), result()]
    ),
    Form("only a thought", [user(), answer("", reasoning_content="Thought"), user("TextMore")]),
    Form("only a thought, content null", [user(), answer(None, reasoning_content="Thought"), user("TextMore")]),
    Form("only a thought, content absent", [user(), {"role": "assistant", "reasoning": "Thought"}, user("TextMore")]),
    Form("only a thought, content an empty list", [user(), answer([], reasoning_content="Thought"), user("TextMore")]),
    Form("an empty answer", [user(), answer(""), user("TextMore")]),
    Form("an answer of nothing", [user(), answer(None), user("TextMore")]),
    Form("a thought and an answer", [user(), answer(reasoning_content="Thought"), user("TextMore")]),
    Form("a thought and a call", [user(), calling(reasoning_content="Thought"), result()]),
    Form("a thought, text and a call", [user(), calling(content="TextAnswer", reasoning_content="Thought"), result()]),
    Form(
        "a thought, text and two calls",
        [user(), calling(*BOTH, content="TextAnswer", reasoning="Thought"), result("TextA"), result("TextB", SECOND)],
        order=("TextUser", "TextA", "TextB"),
    ),
    Form(
        "a thought as a part",
        [user(), answer([{"type": "thinking", "thinking": "Thought"}, *parts("TextAnswer")]), user("TextMore")],
    ),
    Form("only a thought as a part", [user(), answer([{"type": "thinking", "thinking": "Thought"}]), user("TextMore")]),
    Form("an older call", [user(), older_call(), older_result()]),
    Form(
        "an older call, text as arguments",
        [user(), older_call('{"city": "TextOslo"}'), older_result(), user("TextMore")],
    ),
    Form(
        "older calls in a loop",
        [user(), older_call(), older_result("TextA"), older_call(name="get_time"), older_result("TextB", "get_time")],
    ),
    Form("an older call with text", [user(), older_call(content="TextAnswer"), older_result({"found": "TextA"})]),
    Form("an older result without a call", [user("TextA"), older_result("TextB"), user("TextC")]),
    Form("a call of a custom tool", [user(), calling(custom_call()), result(), answer(), user("TextMore")]),
    Form(
        "custom and other calls",
        [user(), calling(custom_call(SECOND), call()), result("TextA", SECOND), result("TextB")],
        order=("TextUser", "TextA", "TextB"),
    ),
    Form("another role", [{"role": "document", "content": "TextDocument"}, user(), answer(), user("TextMore")]),
    Form("another role later", [user(), answer(), {"role": "critic", "content": "TextCritic"}, user("TextMore")]),
    Form("another role last", [user(), answer(), {"role": "critic", "content": parts("TextCritic")}]),
    Form("another role behind a result", [user(), calling(), result(), {"role": "critic", "content": "TextCritic"}]),
    Form("an empty question", [user(""), answer(), user("TextMore")]),
    Form("an empty system message", [system(""), user()]),
)


def texts(form: Form) -> list[str]:
    """The texts that the prompt must have, in its order."""
    if form.order is not None:
        return list(form.order)
    found: list[str] = []
    for message in form.messages:
        found += (word for word in _words(message.get("content")) if word.startswith("Text"))
    return found


def all_texts(form: Form) -> list[str]:
    """The texts of all messages and calls, without an order."""
    found: list[str] = []
    for message in form.messages:
        found += [word for name in ("content", "tool_calls", "function_call") for word in _words(message.get(name))]
    return [word for word in found if word.startswith("Text")]


def _words(value: object) -> list[str]:
    return re.findall(r"\bText\w*", json.dumps(value))


def _parameters(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"city": {"type": "string", "description": "TextCity"}}, **more}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


FULL_TOOLS = [
    tool("get_weather", description="TextDescription", parameters=_parameters(required=["city"])),
    tool("get_time", description="TextOther", parameters=_parameters(required=["city"])),
]
# Lists of tools in which something is absent.
TOOLS: dict[str, list[dict[str, Any]]] = {
    "no description": [tool("get_weather", parameters=_parameters(required=["city"]))],
    "no parameters": [tool("get_weather", description="TextDescription")],
    "only a name": [tool("get_weather")],
    "no properties": [tool("get_weather", description="TextDescription", parameters={"type": "object"})],
    "no required": [tool("get_weather", description="TextDescription", parameters=_parameters())],
    "strict": [
        tool("get_weather", description="TextDescription", strict=True, parameters=_parameters(required=["city"]))
    ],
    "no type": [{"function": FULL_TOOLS[0]["function"]}],
    "empty parameters": [tool("get_weather", description="TextDescription", parameters={})],
    "a property without description": [
        tool("get_weather", description="D", parameters={"type": "object", "properties": {"city": {"type": "string"}}})
    ],
    "a property without type": [
        tool(
            "get_weather", description="D", parameters={"type": "object", "properties": {"city": {"description": "C"}}}
        )
    ],
    "an empty property": [
        tool("get_weather", description="D", parameters={"type": "object", "properties": {"city": {}}})
    ],
    "types of a union": [
        tool(
            "get_weather",
            description="D",
            parameters=_parameters() | {"properties": {"city": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}},
        )
    ],
    "nested": [
        tool(
            "get_weather",
            description="D",
            parameters=_parameters()
            | {
                "properties": {
                    "cities": {"type": "array", "items": {"type": "object", "properties": {"a": {}}}},
                    "b": {"enum": [1, "x"]},
                }
            },
        )
    ],
    "a null description": [tool("get_weather", description=None, parameters=_parameters())],
    "null parameters": [tool("get_weather", description="D", parameters=None)],
    "mixed": [*FULL_TOOLS, tool("get_weather")],
}
