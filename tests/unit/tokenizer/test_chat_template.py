"""Chat templates against transformers' `apply_chat_template`, and what a malicious one cannot do."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import InvalidRequestError, TokenizerError
from inflight.tokenizer.chat_template import ChatTemplate
from tests.support.fakes_tokenizer import BOS, EOS, save_folder

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
    {% if messages[-1].name is defined %}
    named
    {% endif %}
  {% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA_3 = """{% set loop_messages = messages %}{% for message in loop_messages %}
{%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}
{%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% else %}{{ eos_token }}{% endif %}"""

TOOLS = """{{- bos_token }}
{%- set ns = namespace(first=true, count=0) %}
{%- if tools %}
    {{- "Tools:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- "\\n" + tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for document in documents or [] %}{{ document.title ~ ': ' ~ document.text }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {%- if message.content is string %}
        {{- "[" + message.role + "] " + message.content }}
    {%- elif message.content %}
        {%- for part in message.content %}{{ "[" + message.role + "/" + part.type + "] " + part.text }}{% endfor %}
    {%- endif %}
    {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name + "(" + call.function.arguments | tojson + ")" }}
    {%- endfor %}
    {%- set ns.count = ns.count + 1 %}
    {%- if loop.index > 20 %}{% break %}{% endif %}
{%- endfor %}
{%- set d = dict(a=1) %}{{ d.a }} of {{ ns.count }}{{ " <thinking>" if enable_thinking }}
{%- generation %} marked{% endgeneration %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""

TEMPLATES = {"chatml": CHATML, "llama_3": LLAMA_3, "tools": TOOLS}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "  Grüße 🙂  "},
    {"role": "assistant", "content": "Hello\nthere"},
    {"role": "user", "content": "Bye", "name": None},
]
TOOL_MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "text", "text": "Now."}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "look it up",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Köln", "html": "<b>&"}}}],
    },
    {"role": "tool", "content": '{"degrees": 21}'},
    {"role": "skip", "content": "x"},
]
TOOL = {"type": "function", "function": {"name": "weather", "description": "ä <b>", "parameters": {"type": "object"}}}


def both(folder: Path, messages: list[dict[str, Any]], **arguments: Any) -> tuple[str, str]:
    from transformers import AutoTokenizer

    ours = ChatTemplate.from_folder(folder).render(messages, **arguments)
    extra = arguments.pop("chat_template_kwargs", {})
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, **{"add_generation_prompt": True, **arguments, **extra}
    )
    return ours, theirs


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize(
    "arguments",
    [{}, {"add_generation_prompt": False}, {"add_generation_prompt": False, "continue_final_message": True}],
)
def test_equals_transformers(tmp_path: Path, name: str, arguments: dict[str, Any]) -> None:
    folder = save_folder(tmp_path, "byte_level", chat_template=TEMPLATES[name])
    for length in range(1, len(MESSAGES) + 1):
        ours, theirs = both(folder, MESSAGES[:length], **arguments)
        assert ours == theirs


def test_tools_equal_transformers(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, "byte_level", chat_template=TOOLS)
    documents = [{"title": "T", "text": "words"}]
    ours, theirs = both(
        folder, TOOL_MESSAGES, tools=[TOOL], documents=documents, chat_template_kwargs={"enable_thinking": True}
    )
    assert ours == theirs
    assert '"ä <b>"' in ours
    assert "<think>look it up</think>" in ours
    assert "T: words" in ours
    assert "<thinking>" in ours


def test_continuing_text_parts_equals_transformers(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, "byte_level", chat_template=TOOLS)
    messages = [*TOOL_MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "It is "}]}]
    ours, theirs = both(folder, messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == theirs
    assert ours.endswith("It is ")


def test_the_embedded_models_template_equals_transformers(tmp_path: Path) -> None:
    from scripts.demo.tokenizer import CHAT_TEMPLATE

    folder = save_folder(tmp_path, "byte_level", chat_template=CHAT_TEMPLATE)
    messages = [*MESSAGES, *TOOL_MESSAGES[1:3]]
    for tools in (None, [TOOL]):
        ours, theirs = both(folder, messages, tools=tools)
        assert ours == theirs


# -- where the template comes from ---------------------------------------------------------------------------------------


def test_sources_in_order(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", "byte_level", chat_template="config")
    hello = [{"role": "user", "content": "x"}]
    assert ChatTemplate.from_folder(folder).render(hello) == "config"
    (folder / "chat_template.jinja").write_text("file of the model {{ bos_token }}")
    assert ChatTemplate.from_folder(folder).render(hello) == f"file of the model {BOS}"
    given = tmp_path / "given.jinja"
    given.write_text("given file {{ eos_token }}")
    assert ChatTemplate.from_folder(folder, str(given)).render(hello) == f"given file {EOS}"
    assert ChatTemplate.from_folder(folder, "{{ 'given text' }}").render(hello) == "given text"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    folder = save_folder(tmp_path, "byte_level", chat_template=named)
    for tools in (None, [TOOL]):
        ours, theirs = both(folder, MESSAGES, tools=tools)
        assert ours == theirs
    template = ChatTemplate({"rag": "x"})
    with pytest.raises(TokenizerError, match=r"named rag .*no default"):
        template.render(MESSAGES)


def test_templates_in_files_as_transformers_5_saves_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = save_folder(tmp_path / "m", "byte_level")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools", "rag": "rag"}
    tokenizer.save_pretrained(folder)
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    for tools in (None, [TOOL]):
        ours, theirs = both(folder, MESSAGES, tools=tools)
        assert ours == theirs
    assert both(folder, MESSAGES, tools=[TOOL])[0] == "with tools"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [
        {"name": "tool_use", "template": "of the config"},
        {"name": "default", "template": "default of the config"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    ours, theirs = both(folder, MESSAGES, tools=[TOOL])
    assert ours == theirs == "with tools"
    (folder / "chat_template.jinja").unlink()  # transformers has no default then
    assert ChatTemplate.from_folder(folder).render(MESSAGES) == "default of the config"
    assert both(folder, MESSAGES, tools=[TOOL])[0] == "with tools"


def test_a_template_is_chosen_by_its_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "rag", "template": "with documents"}]
    folder = save_folder(tmp_path, "byte_level", chat_template=named)
    assert ChatTemplate.from_folder(folder, "rag").render(MESSAGES, tools=[TOOL]) == "with documents"
    with pytest.raises(TokenizerError, match="neither a Jinja template nor a file"):
        ChatTemplate.from_folder(folder, "other")


def test_without_a_template_only_rendering_fails(tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(save_folder(tmp_path, "byte_level"))
    with pytest.raises(TokenizerError, match=r"no chat template"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("/no/such/file", "neither a Jinja template nor a file"),
        ("{% if %}", "not valid, line 1"),
        ("{{ x", "not valid"),
    ],
)
def test_a_bad_given_template(tmp_path: Path, given: str, says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        ChatTemplate.from_folder(tmp_path, given)


@pytest.mark.parametrize("value", [3, [{"name": "default"}], ["text"]])
def test_a_malformed_template_in_the_config(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(TokenizerError, match="neither text nor a list"):
        ChatTemplate.from_folder(tmp_path)


# -- errors --------------------------------------------------------------------------------------------------------------


def test_the_template_refuses(tmp_path: Path) -> None:
    template = ChatTemplate({"default": "{{ raise_exception('roles must alternate') }}"})
    with pytest.raises(InvalidRequestError, match="refuses the messages: roles must alternate"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "source", ["{{ messages[9].content }}", "{{ 1 + 'a' }}", "{{ none | length }}", "{{ 1 // 0 }}"]
)
def test_a_failing_template(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate({"default": source}).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({}) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns.__dict__ }}",
        "{{ dict.__class__.__subclasses__() }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ 'a' * 10**9 }}",
        "{{ 10**8 * [1] }}",
        "{{ 9**9**9 }}",
        "{% for i in range(10**7) %}a{% endfor %}",
        "{% set a = 'x' * 10**7 %}{% for i in range(10) %}{{ a }}{% endfor %}",
    ],
)
def test_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate({"default": source}).render(MESSAGES)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hello", "messages is a str"),
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\] has role=None"),
        ([{"role": "user"}], r"role 'user'\) has no content"),
        ([{"role": "user", "content": 5}], "is a int; it must be text or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "of type 'image_url'.*'text' parts only",
        ),
        ([{"role": "user", "content": ["x"]}], r"\['content'\]\[0\] is of type 'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without a string 'text'"),
        ([{"role": "user", "content": "x", "meta": object()}], r"messages\[0\]\['meta'\] is a object"),
        ([{"role": "user", "content": "x", "meta": {1: 2}}], "keys must be strings"),
        ([{"role": "user", "content": "x", "meta": float("nan")}], "is (nan|inf)"),
    ],
)
def test_malformed_messages(messages: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        ChatTemplate({"default": CHATML}).render(messages)


def test_messages_nested_too_deep() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="nested more than 64 deep"):
        ChatTemplate({"default": CHATML}).render([{"role": "user", "content": "x", "meta": deep}])


def test_malformed_arguments() -> None:
    template = ChatTemplate({"default": CHATML})
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        template.render(MESSAGES, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="may not set messages, tools"):
        template.render(MESSAGES, chat_template_kwargs={"tools": [], "messages": []})
    with pytest.raises(InvalidRequestError, match=r"tools\[0\] is a str"):
        template.render(MESSAGES, tools=["x"])  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="documents is a dict"):
        template.render(MESSAGES, documents={})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="no content to continue"):
        template.render([{"role": "assistant"}], add_generation_prompt=False, continue_final_message=True)
    leaves_out = ChatTemplate({"default": "{{ messages[0].content }}"})
    with pytest.raises(InvalidRequestError, match="leaves out"):
        leaves_out.render(MESSAGES, add_generation_prompt=False, continue_final_message=True)


def test_parts_are_joined_for_a_template_that_wants_text() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    text = [{"role": "user", "content": "a\nb"}]
    template = ChatTemplate({"default": CHATML})
    assert template.render(parts) == template.render(text)


def test_the_callers_messages_are_not_touched() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(messages)
    ChatTemplate({"default": TOOLS}).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("loop", "keeps"),
    [
        ("for part in message.content", True),
        ("for part in message['content']", True),
        ("for part in message['content'] | selectattr('type')", True),
        ("+ for part in content", True),
        ("for a, b in content.items()", True),
        ("for part in messages", False),
        ("for part in messages if part.content", False),
    ],
)
def test_content_stays_a_list_for_a_template_that_loops_over_it(loop: str, keeps: bool) -> None:
    source = (
        "{%" + loop.replace("for", " for", 1).replace("+ ", "+") + " %}{% endfor %}{{ messages[0].content is string }}"
    )
    source = "{% set message = messages[0] %}{% set content = {} %}" + source
    rendered = ChatTemplate({"default": source}).render([{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    assert rendered == str(not keeps)


def test_looking_for_such_loops_takes_linear_time() -> None:
    start = time.thread_time()
    ChatTemplate({"default": "{% for a in" + " " * 20_000 + "messages %}{% endfor %}{# for a in" + " " * 20_000 + "#}"})
    assert time.thread_time() - start < 5, "a regular expression took 10 s for 2,000 blanks"


@pytest.mark.parametrize(
    "source", ["{% for a in b %}" * 30 + "{% endfor %}" * 30, "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}"]
)
def test_what_is_nested_too_deep_is_one_clear_error(source: str) -> None:
    with pytest.raises(TokenizerError, match="not valid"):
        ChatTemplate({"default": source})
