"""`RequestPart`: what a request wants beside its tokens, or brings beside its prompt. `PartResult`: what comes of it.

A part goes from the front end through the scheduler to the ranks, and its results come back on the same way. Only its own code
at the two ends looks inside: a reader on the ranks (worker/parts/), and the code in the front end that collects the results
(engine/request/answer_parts.py). All others carry parts, and ask what is declared here. `part_kinds.py` has the table of kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self


class Content(NamedTuple):
    """What the tokens [start, stop) of a prompt stand for, beside their ids: `digest`, 32 bytes, is a hash of it. The keys and
    values of these tokens and of all later ones depend on it."""

    start: int
    stop: int
    digest: bytes

    def is_in(self, start: int, size: int) -> bool:
        """Whether some of the tokens are among [start, start + size)."""
        return self.start < start + size and self.stop > start


class RequestPart(ABC):
    """A frozen dataclass, because parts are sent to other processes.

    Attributes:
        kind: the name of the subclass in messages between processes. A request has at most one part of a kind.
        is_of_leader: of the sequences of a request with n > 1, only the first one has the part.
        max_step_cost: how much a step may spend on the parts of this kind (see `cost`); None for any amount.
    """

    kind: str
    is_of_leader: ClassVar[bool] = False
    max_step_cost: ClassVar[int | None] = None

    @property
    def first_position(self) -> int | None:
        """The position of the first token that must be computed for the part, even if its keys and values are cached. The
        tokens behind it are computed, too. None: the part does not ask for any token."""
        return None

    @property
    def contents(self) -> tuple[Content, ...]:
        """What some tokens of the prompt stand for, in the order of their positions. The names of cached blocks tell it."""
        return ()

    @property
    def rope_delta(self) -> int:
        """What is added to the place of a token behind the prompt to get its position for rotary embeddings."""
        return 0

    def for_ranks(self) -> RequestPart:
        """The part as the ranks get it with its request."""
        return self

    def after(self, result: PartResult) -> RequestPart:
        """The part as it is when `result` has been received. It replaces the part if the request is sent again: after a
        preemption, and to another engine core after a fault."""
        return self

    def cost(self, start: int, stop: int) -> int:
        """What a step spends on the part if it computes the prompt tokens [start, stop). It grows with `stop`."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """The step computes the next `num_slices` slices of the vision tower's layers for an image. The last of them give the
    embeddings.

    Attributes:
        digest: of the image (interface/images.py).
        part: has only this image, with its pixels; None if an earlier step has begun with it.
    """

    digest: bytes
    num_slices: int
    part: RequestPart | None = None


class PartResult(ABC):
    """What one step has found for a part, or several steps together. A frozen dataclass with the `kind` of its part."""

    kind: str

    @property
    @abstractmethod
    def size(self) -> int:
        """About how many numbers the front end has to process."""

    @abstractmethod
    def joined(self, later: Sequence[Self]) -> PartResult:
        """This result and the following ones as one result. The order is that of the steps."""

    def pieces(self, max_size: int) -> Iterator[PartResult]:
        """Divides the result, so that the front end can do other work in between. The pieces have about `max_size`."""
        yield self


def contents_of(parts: Sequence[RequestPart]) -> tuple[Content, ...]:
    """The contents of all parts, in the order of their positions."""
    return tuple(sorted(content for part in parts for content in part.contents))


def contents_of_block(contents: Sequence[Content], start: int, size: int) -> bytes:
    """What the name of the block with the tokens [start, start + size) tells of contents."""
    found = (content for content in contents if content.is_in(start, size))
    return b"".join(content.digest + (content.start - start).to_bytes(8, "little", signed=True) for content in found)


def after_results(parts: tuple[RequestPart, ...], results: Sequence[PartResult]) -> tuple[RequestPart, ...]:
    """The parts of a request as they are when `results` have been received."""
    for result in results:
        parts = tuple(part.after(result) if part.kind == result.kind else part for part in parts)
    return parts


def join_results(results: Sequence[PartResult]) -> tuple[PartResult, ...]:
    """One result for each kind. `results` are in the order of the steps."""
    by_kind: dict[str, list[PartResult]] = {}
    for result in results:
        by_kind.setdefault(result.kind, []).append(result)
    return tuple(first.joined(later) if later else first for first, *later in by_kind.values())
