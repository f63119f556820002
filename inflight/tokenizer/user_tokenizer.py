"""`UserTokenizer`: the tokenizer with the methods that programs for transformers use."""

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.tokenizer import Tokenizer


class UserTokenizer:
    """It also has the attributes of `Tokenizer`, and those of the special tokens, such as `eos_token`.

    Args:
        chat_template: None if the model has none.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    def __getattr__(self, name: str) -> Any:
        special = self._tokenizer.special_tokens
        if name in special:
            return special[name]
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Returns `input_ids` and `attention_mask`. Each is a list; if `text` is a list, each has a list for every text."""
        if isinstance(text, str):
            ids = self._tokenizer.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        rows = [self._tokenizer.encode(each, add_special_tokens) for each in text]
        return {"input_ids": rows, "attention_mask": [[1] * len(ids) for ids in rows]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self._tokenizer.decode(ids, skip_special_tokens) for ids in rows]

    def get_vocab(self) -> dict[str, int]:
        """Each token as the vocabulary spells it -> its id. Added tokens are included."""
        return self._tokenizer.vocabulary()

    def tokenize(self, text: str) -> list[str]:
        return self.convert_ids_to_tokens(self._tokenizer.encode(text, add_special_tokens=False))

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_piece(token_id) or "" for token_id in token_ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:  # Any: an id for a token, a list for a list
        vocabulary = self._tokenizer.vocabulary()
        unknown = self._tokenizer.unk_token_id
        if isinstance(tokens, str):
            return vocabulary.get(tokens, unknown)
        return [vocabulary.get(token, unknown) for token in tokens]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],  # Any: JSON
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> Any:  # Any: a list of ids, or the text without `tokenize`
        """Render a conversation. `variables`: further variables for the template.

        Raises: as `ChatTemplate.render`.
        """
        if self._chat_template is None:
            raise InvalidRequestError("the model has no chat template")
        text = self._chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=variables,
        )
        if not tokenize:
            return text
        return self._tokenizer.encode(text, add_special_tokens=False)
