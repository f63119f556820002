"""Chat templates: turn messages into a prompt, as transformers' `apply_chat_template` does.

A template comes with the model and is not trusted. It runs in a `TemplateSandbox`, which bounds its time and memory, and gets
only plain JSON data. See https://huggingface.co/docs/transformers/chat_templating.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes

from inflight.errors import InvalidRequestError, TokenizerError
from inflight.hub import read_json
from inflight.tokenizer.folder_tokenizer import read_special_tokens, read_tokenizer_config
from inflight.tokenizer.image_parts import check_number, check_texts
from inflight.tokenizer.messages import TOOL, check_messages, check_objects, check_template_kwargs
from inflight.tokenizer.probes import QUESTION
from inflight.tokenizer.reasoning_effort import ReasoningEffort
from inflight.tokenizer.sandbox.budget import TemplateBudget, TemplateLimitError
from inflight.tokenizer.sandbox.environment import TemplateSandbox
from inflight.tokenizer.template_form import TemplateForm

_MAX_REASON = 2000  # characters that a template can put into an error
_PROBE_STEPS = 2**22  # an invented conversation is short, and a template is rendered with many
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """
    Attributes:
        text: the prompt. It already contains the special tokens, so encode it with add_special_tokens=False.
        images: the numbers of the images, in the order in which they stand in the text. The text of each image is `image_text`.
        image_text: "" if there are no images.
    """

    text: str
    images: tuple[int, ...] = ()
    image_text: str = ""


class ChatTemplate:
    """The templates of one tokenizer, by name. Only "default" and "tool_use" are used.

    Attributes:
        default_source: the Jinja text of the template "default"; None if there is no such template.
        takes_images: whether the model reads images.
    """

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str] | None = None, image_token: str = ""
    ) -> None:
        """Compile the templates.

        Args:
            image_token: the token for an image, as text; "" if the model reads no images.

        Raises:
            TokenizerError: a template is not valid Jinja.
        """
        self.default_source = sources.get("default")
        sandbox = TemplateSandbox()
        self.takes_images = bool(image_token)
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template] = {}
        self._forms: dict[str, TemplateForm] = {}
        self._tool_names: dict[str, str] = {}  # the name of the variable with the tools
        self._efforts: dict[str, ReasoningEffort] = {}
        for name, source in sources.items():
            try:
                parsed = sandbox.read(source)
                self._tool_names[name] = _name_of_tools(parsed)
                self._efforts[name] = ReasoningEffort(partial(self._takes_effort, name))
                self._forms[name] = TemplateForm(
                    partial(self._probe, name), loops=_loops_over_content(parsed), image_token=image_token
                )
                self._compiled[name] = sandbox.make(parsed)
            except jinja2.TemplateSyntaxError as error:
                message = f"the chat template {name!r} is not valid, line {error.lineno}: {error.message}"
                raise TokenizerError(message) from error
            except Exception as error:  # too deep nesting is a SyntaxError, a RecursionError or a MemoryError
                raise TokenizerError(f"the chat template {name!r} is not valid: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path, given: str | None = None, image_token: str = "") -> "ChatTemplate":
        """Uses the template `given` (the name of one of the folder's templates, Jinja text, or a file). If it is None, uses the
        folder's chat_template.jinja and additional_chat_templates/NAME.jinja. If there is no such file, uses the template in
        chat_template.json, where older models that read images have it, or else the templates in tokenizer_config.json.

        A folder without a template is no error here, because base models have none. Only `render` raises an error then.
        """
        config = read_tokenizer_config(folder)
        sources = choose_source(given, lambda: _find_sources(folder, config))
        with naming_model(folder, given):
            return cls(sources, read_special_tokens(config), image_token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],  # Any: JSON
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt of messages without images. The arguments are those of `render_chat`."""
        return self.render_chat(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        ).text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],  # Any: JSON
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Writes the prompt.

        Args:
            messages: `{"role": ..., "content": text or a list of parts, ...}`. A part is `{"type": "text", "text": ...}` or
                `{"type": "image", "number": N}`.
            tools: JSON schemas of functions.
            add_generation_prompt: end with the header of an assistant message.
            continue_final_message: leave out the end of the last message, so that the model continues it.
            chat_template_kwargs: further variables for the template.

        Raises:
            TokenizerError: there is no template.
            InvalidRequestError: the messages are malformed, the template refuses them, or a text contains what stands for an
                image in the prompts of a model that reads images.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other: the first goes on with the last "
                "message, the second opens a new one; set one of them to False",
                "continue_final_message",
            )
        name = self._select(has_tools=bool(tools))
        conversation = check_messages(messages)
        content = conversation[-1].get("content")
        has_content = bool(content) or isinstance(content, str)
        form = self._forms[name]
        tools, given = check_objects(tools, "tools", TOOL), conversation
        conversation, images = form.prepare(conversation, continues=continue_final_message)
        final_text = _tag_final_message(conversation, has_content=has_content) if continue_final_message else ""
        variables: dict[str, Any] = {
            **self._special_tokens,
            **self._variables(name, chat_template_kwargs),
            "messages": conversation,
            self._tool_names[name]: form.prepare_tools(tools),
            "documents": check_objects(documents, "documents", "a dict like {'title': ..., 'text': ...}") or None,
            "add_generation_prompt": add_generation_prompt,
        }
        if images or self.takes_images:
            check_texts({"messages": given, "tools": tools, "documents": variables["documents"]}, form.images.texts)
        budget = TemplateBudget.of_chat(len(conversation), sum(map(_num_characters, conversation)))
        rendered = _render(self._compiled[name], variables, budget)
        if continue_final_message:
            rendered = _cut_at_tag(rendered, final_text)
        if not images:
            return RenderedChat(rendered)
        check_number(rendered, form.images.text, len(images))
        return RenderedChat(rendered, tuple(images), form.images.text)

    def render_plain(self, variables: Mapping[str, Any], *, num_messages: int, num_characters: int) -> str:
        """Renders the template "default" with these variables and the special tokens. Nothing is changed to fit the template.

        Args:
            num_messages, num_characters: of the variables; they bound what the template may do.

        Raises: as `render`.
        """
        budget = TemplateBudget.of_chat(num_messages, num_characters)
        return _render(self._compiled[self._select(has_tools=False)], {**self._special_tokens, **variables}, budget)

    def _variables(self, name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The further variables of a request, with a level of effort that the template takes."""
        variables = check_template_kwargs(given)
        effort = variables.get("reasoning_effort")
        if isinstance(effort, str) and (taken := self._efforts[name].nearest(effort)) != effort:
            variables = {key: value for key, value in variables.items() if key != "reasoning_effort"}
            if taken is None:
                return variables
            return {**variables, "reasoning_effort": taken}
        return variables

    def _takes_effort(self, name: str, effort: str | None) -> bool:
        given = {"messages": [QUESTION], "tools": None, "add_generation_prompt": True}
        variables = {} if effort is None else {"reasoning_effort": effort}
        with suppress(InvalidRequestError):
            self._render_probe(name, {**variables, **given})
            return True
        return False

    def _probe(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        given = {
            "messages": messages,
            self._tool_names[name]: tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._render_probe(name, given)

    def _render_probe(self, name: str, variables: Mapping[str, Any]) -> str:
        return _render(self._compiled[name], {**self._special_tokens, **variables}, TemplateBudget(_PROBE_STEPS))

    def _select(self, *, has_tools: bool) -> str:
        if not self._compiled:
            raise TokenizerError(
                "the model has no chat template (neither chat_template.jinja nor one in tokenizer_config.json): give the "
                "engine one with chat_template, or send a plain prompt instead of messages"
            )
        if has_tools and "tool_use" in self._compiled:
            return "tool_use"
        if "default" not in self._compiled:
            raise TokenizerError(
                f"the model has chat templates named {', '.join(sorted(self._compiled))} but no default; choose one "
                "with chat_template=..."
            )
        return "default"


def read_given(given: str) -> str:
    """Returns the text of a template: `given` itself if it contains a "{" or a line break, otherwise the content of the file
    with this path."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(os.path.expanduser(given)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"chat_template={given!r} is neither a Jinja template nor a file that can be read"
        ) from error


def choose_source(given: str | None, find: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
    """The template `given`, as "default"; None: all templates of the model, which `find` returns by name."""
    if given is None:
        return find()
    is_name = re.fullmatch(r"[\w-]+", given) is not None and not Path(given).exists()
    named = find().get(given) if is_name else None
    return {"default": read_given(given) if named is None else named}


@contextmanager
def naming_model(path: Path, given: str | None) -> Iterator[None]:
    """An error about the model's own template names the model's folder or file. `given`: the template that is used instead."""
    try:
        yield
    except TokenizerError as error:
        if given is not None:
            raise
        raise TokenizerError(f"{path}: {error}; chat_template=... sets another one") from error


def _find_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """If there are files with templates, those in tokenizer_config.json do not count, except for a missing default."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (path := folder / "chat_template.jinja").is_file():
        files["default"] = path
    sources = {name: _read_text(path) for name, path in files.items()}
    if "default" in sources:
        return sources
    of_processor = folder / "chat_template.json"
    found = read_json(of_processor).get("chat_template") if of_processor.is_file() else None
    if isinstance(found, str):
        return {**sources, "default": found}
    of_config = _of_config(folder, config)
    return {**{name: source for name, source in of_config.items() if not sources or name == "default"}, **sources}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read as UTF-8 text") from error


def _of_config(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    found = config.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    try:
        return {entry["name"]: entry["template"] for entry in found}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            f"chat_template in {folder / 'tokenizer_config.json'} is neither text nor a list of name and template"
        ) from error


def _name_of_tools(template: nodes.Template) -> str:
    """The variable from which the template reads the tools. SmolLM3's has another name for it."""
    names = jinja2.meta.find_undeclared_variables(template)
    if "xml_tools" in names and "tools" not in names:
        return "xml_tools"
    return "tools"


def _loops_over_content(template: nodes.Template) -> bool:
    """Whether the template has a loop over message.content, message['content'] or content."""
    return any(
        "content" in (getattr(node, "attr", None), getattr(node, "name", None), getattr(node, "value", None))
        for loop in template.find_all(nodes.For)
        for node in (loop.iter, *loop.iter.find_all((nodes.Getattr, nodes.Name, nodes.Const)))
    )


def _num_characters(message: Mapping[str, Any]) -> int:
    content = message.get("content") or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content)


# -- rendering -----------------------------------------------------------------------------------------------------------


def _render(template: jinja2.Template, variables: dict[str, Any], budget: TemplateBudget) -> str:
    try:
        return TemplateSandbox.render(template, variables, budget)
    except TemplateLimitError as error:
        raise InvalidRequestError(
            f"the chat template of the model does too much, whatever the request asks for: {error.message}; "
            "give the engine another one with chat_template"
        ) from error
    except jinja2.TemplateError as error:
        reason = str(error.message or type(error).__name__)[:_MAX_REASON]
        raise InvalidRequestError(f"the chat template refuses the messages: {reason}") from error
    except Exception as error:  # a template can raise whatever Python can: len(None), 1 + "a", [][0]
        reason = f"{type(error).__name__}: {error}"[:_MAX_REASON]
        raise InvalidRequestError(f"the chat template failed on the messages: {reason}") from error


# -- continue_final_message ----------------------------------------------------------------------------------------------


def _tag_final_message(conversation: list[dict[str, Any]], *, has_content: bool) -> str:
    """Append a tag to the text of the last message. The prompt will be cut at the tag. Return the text without the tag."""
    content = conversation[-1].get("content")
    if has_content and isinstance(content, str):
        conversation[-1]["content"] = content + _CONTINUE_TAG
        return content
    if content and "text" in content[-1]:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + _CONTINUE_TAG
        return text
    raise InvalidRequestError(
        "continue_final_message: the last message has no content to continue", "continue_final_message"
    )


def _cut_at_tag(rendered: str, final_text: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if tag not in rendered or final_text.strip() not in rendered:
        raise InvalidRequestError(
            "continue_final_message: the chat template leaves out (part of) the last message, so it cannot be continued",
            "continue_final_message",
        )
    at = rendered.rindex(tag)
    if rendered[at:].startswith(_CONTINUE_TAG):
        return rendered[:at]
    return rendered[:at].rstrip()  # the template strips the end of messages, so strip the text here, too
