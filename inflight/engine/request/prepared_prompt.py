"""`PreparedPrompt`: a prompt that is read and tokenised, with the parts that its images have become."""

from dataclasses import dataclass

from inflight.interface.parts import RequestPart
from inflight.interface.request import Int32Array


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """`InputProcessor.prepare` makes it, and `process` takes it: nothing is read, processed or tokenised again.

    Attributes:
        text: None if the prompt was given as token ids.
        array: the tokens, with those of images.
        parts: of the request.
    """

    text: str | None
    array: Int32Array
    cache_salt: str
    parts: tuple[RequestPart, ...]

    @property
    def token_ids(self) -> list[int]:
        token_ids: list[int] = self.array.tolist()
        return token_ids
