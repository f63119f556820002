"""`PromptedPairs`: puts pairs of texts into the template of a reranker that is prompted, and tokenises them."""

import tokenizers

from inflight.errors import ContextLengthExceededError, InvalidRequestError, TokenizerError
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.cut_text import cut_encoding
from inflight.tokenizer.failures import encoding_failure
from inflight.tokenizer.text_pair import FIRST, SECOND, PairLimits, PairTokens
from inflight.tokenizer.tokenizer import Tokenizer

QUERY, DOCUMENT, INSTRUCTION = "query", "document", "system"  # roles of messages, as in sentence-transformers
_MARKS = ("QUERY-MARK", "DOCUMENT-MARK")

Variables = tuple[tuple[str, bool | int | str], ...]


class PairTemplate:
    """A template that has a place for a query and one for a document, as the contents of messages with these roles."""

    def __init__(self, template: ChatTemplate, variables: Variables = (), *, has_parts: bool = False) -> None:
        """
        Args:
            variables: names and values of further variables of the template.
            has_parts: whether the template reads a content as a list of parts.
        """
        self._template, self._variables, self._has_parts = template, dict(variables), has_parts

    @classmethod
    def find(cls, template: ChatTemplate | None, variables: Variables = ()) -> "PairTemplate | None":
        """The chat template, if it is for pairs; else None. A template for chats may show a message whatever its role is, so
        the names of the roles must be in it."""
        source = "" if template is None else template.default_source or ""
        if template is None or QUERY not in source or DOCUMENT not in source:
            return None
        for has_parts in (False, True):
            found = cls(template, variables, has_parts=has_parts)
            try:
                text = found.render(*_MARKS)
            except (InvalidRequestError, TokenizerError):
                continue
            if all(mark in text for mark in _MARKS):
                return found
        return None

    def render(self, query: str, document: str, instruction: str = "") -> str:
        messages = [(QUERY, query), (DOCUMENT, document)]
        if instruction:
            messages.insert(0, (INSTRUCTION, instruction))
        return self._template.render_plain(
            {
                **self._variables,
                "messages": [
                    {"role": role, "content": [{"type": "text", "text": text}] if self._has_parts else text}
                    for role, text in messages
                ],
            },
            num_messages=len(messages),
            num_characters=sum(len(text) for _, text in messages),
        )


class PromptedPairs:
    """Several threads may use it at once."""

    def __init__(self, tokenizer: Tokenizer, template: PairTemplate, max_len: int, instruction: str = "") -> None:
        """
        Args:
            max_len: the most tokens of a pair in the template.
            instruction: that of pairs that have none; "" for the template's own.
        """
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        self._template, self._max_len, self._instruction = template, max_len, instruction
        begin, _, self._end = template.render(*_MARKS, instruction).partition(_MARKS[1])
        self._begin = begin.partition("\n")[0]
        self._last: tuple[str, int] | None = None  # a text without its document, and how many tokens it has

    def encode(self, one: str, other: str, limits: PairLimits, instruction: str | None = None) -> PairTokens:
        """`one` is the query. If the pair is too long and may be cut, the document loses its end.

        Users of other engines put texts into the template themselves: the query begins with the template's first line, and the
        document ends with the template's end. Such texts are only joined.

        Raises:
            InvalidRequestError: a text is not valid Unicode. `param` is FIRST or SECOND of text_pair.py.
            ContextLengthExceededError: the pair is too long. `param` is the text that leaves no room.
        """
        is_done = bool(self._begin and self._end) and one.startswith(self._begin) and other.endswith(self._end)
        document = other.removesuffix(self._end) if is_done else other

        def prompt(document: str) -> str:
            if is_done:
                return one + document + self._end
            return self._template.render(one, document, instruction or self._instruction)

        param = FIRST
        try:
            if limits.first is not None:
                one, _ = self._beginning(one, limits.first)
            most = limits.most(self._max_len)
            num_others = self._count(prompt(""))
            room = most - num_others
            param = SECOND
            if limits.second is not None:
                document, _ = self._beginning(document, limits.second)
            cut, is_cut = self._beginning(document, max(room, 0))
            if room < 1 or (is_cut and limits.total is None):
                raise ContextLengthExceededError(
                    f"This model's maximum context length is {most} tokens. However, the query in the template of this model "
                    f"has {num_others} tokens, and the document "
                    f"has {'more than ' if is_cut else ''}{max(room, 0)}: shorten them, or give truncate_prompt_tokens=-1 to "
                    "cut the document.",
                    most + 1,
                    FIRST if room < 1 else SECOND,
                )
            ids = self._ids(prompt(cut))
            while len(ids) > most:  # the tokens at the seam may be others than those of the document alone
                if limits.total is None:
                    raise ContextLengthExceededError(
                        f"This model's maximum context length is {most} tokens. However, the two texts in the template of "
                        f"this model have {len(ids)}: shorten one, or give truncate_prompt_tokens=-1.",
                        len(ids),
                        SECOND,
                    )
                room -= len(ids) - most
                cut, _ = self._beginning(document, max(room, 0))
                ids = self._ids(prompt(cut))
        except InvalidRequestError:
            raise
        except BaseException as error:
            raise encoding_failure(error, param) from None
        return PairTokens(ids, None)

    def _ids(self, text: str) -> list[int]:
        [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _count(self, text: str) -> int:
        """How many tokens a text has. The last one is remembered, because a query comes with thousands of documents."""
        if self._last is None or self._last[0] != text:
            self._last = (text, len(self._ids(text)))
        return self._last[1]

    def _beginning(self, text: str, most: int) -> tuple[str, bool]:
        """The text of its first `most` tokens, and whether there are more."""
        encoding = cut_encoding(self._backend, text, most + 1)
        if len(encoding.ids) <= most:
            return text, False
        return text[: encoding.offsets[most - 1][1]] if most else "", True
