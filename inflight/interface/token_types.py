"""`TokenTypesPart`: where the second text of a pair begins, for models that tell the texts of a pair apart (BERT)."""

from dataclasses import dataclass
from typing import Literal

from inflight.interface.parts import RequestPart


@dataclass(frozen=True, kw_only=True)
class TokenTypesPart(RequestPart):
    """The tokens from the position `first` on have the type 1, those before it the type 0."""

    kind: Literal["token_types"] = "token_types"
    first: int
