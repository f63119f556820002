"""`LowerCaseTokenizer`: makes the letters of texts small before it tokenises them, as sentence-transformers does with
`do_lower_case`."""

from collections.abc import Iterable, Mapping

import tokenizers

from inflight.tokenizer.fewest_tokens import FewestTokens
from inflight.tokenizer.tokenizer import Tokenizer


class LowerCaseTokenizer(Tokenizer):
    """Special tokens that stand in a text become small, too, and so are no tokens any more."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        extra_special_tokens: Iterable[str] = (),
    ) -> None:
        super().__init__(backend, special_tokens, extra_special_tokens)
        self.fewest_tokens = FewestTokens(0, False)  # a text may lose bytes, so no bound is known

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text.lower(), add_special_tokens)

    def encode_cut(self, text: str, most: int, add_special_tokens: bool = True) -> list[int]:
        return super().encode_cut(text.lower(), most, add_special_tokens)
