"""`FewestTokens`: a lower bound for the number of tokens of a text, so that far too long texts are refused at once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FewestTokens:
    """
    Attributes:
        bytes_per_token: the most bytes of a text that one token covers; 0 if no bound is known.
        spaces_count: whether a token covers spaces as it covers other characters. If not, spaces do not count.
    """

    bytes_per_token: int
    spaces_count: bool

    def __call__(self, text: str) -> int:
        """Returns the bound for `text`; 0 if no bound is known. Special tokens around the text do not count."""
        if not self.bytes_per_token:
            return 0
        counted = text if self.spaces_count else "".join(text.split())
        return -(-len(counted.encode("utf-8", "surrogatepass")) // self.bytes_per_token)
