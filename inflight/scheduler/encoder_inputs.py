"""`EncoderInputs`: which images are encoded when. A vision tower encodes an image slice by slice: parts of its layers.

A prompt is computed up to its first image that is not encoded. Then the steps compute slices of this image beside their
decodes, as many as the step's limit of time allows, but at least one. A request whose next token belongs to such an image is
not admitted before the image is encoded. The embeddings stay in the encoder cache of the ranks until other images need the
room. So an image is encoded once for all requests that have it, and again only if it was evicted. A step does not evict an
image that it uses, so the first request in queue order always goes on. If the tower refuses an image, the requests that have
it fail, and no other one.

Plans tell the ranks what to encode and what to evict. The ranks decide nothing, so they all have the same embeddings.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inflight.config.vision import VisionSpec
from inflight.errors import ErrorKind
from inflight.interface.images import NO_PIXELS, EncoderCounts, ImageInput, ImagesPart
from inflight.interface.parts import EncoderInput, RequestPart
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.scheduler.gates import Gates
from inflight.scheduler.prompt_sharing import PromptSharing
from inflight.scheduler.request import Request
from inflight.scheduler.step_time.limits import StepBudget
from inflight.scheduler.step_time.load import load_of

# ends a request with an error: its id, the reason, the kind and the parameter of the error
Fail = Callable[[str, str, ErrorKind, str], None]
_PACE = 0.3  # after each step that encodes, the seconds of a unit of work move by this share of their error


@dataclass(slots=True)
class _Encoding:
    """An image in the encoder cache, or on its way into it.

    Attributes:
        num_done: how many slices are computed when all planned steps are.
        step: the last step that uses it, or computes some of it.
    """

    image: ImageInput
    num_done: int = 0
    step: int = -1


class EncoderInputs:
    """Owned by the scheduler's thread. It adds a gate to `gates`: requests wait there for their first image.

    Args:
        max_tokens: of how many tokens the ranks keep the embeddings. An image has at most so many.
        fail: the scheduler's.
        is_whole: prompts are not divided, so all images of a prompt are encoded in its step, however long it takes.
        keeps_images_whole: the tokens of an image see each other in both directions, so one step computes all of them. Of an
            image whose first tokens are in cached blocks, it computes the others: the names of these blocks have the digest of
            the whole image, and the keys and values were computed with all of it.

    Attributes:
        planned_seconds: how long the step that was planned last is expected to encode; infinite if that is not known.
    """

    def __init__(
        self,
        vision: VisionSpec,
        max_tokens: int,
        gates: Gates,
        sharing: PromptSharing,
        fail: Fail,
        *,
        is_whole: bool = False,
        keeps_images_whole: bool = False,
    ) -> None:
        self._vision, self._max_tokens, self._gates, self._sharing = vision, max_tokens, gates, sharing
        self._fail = fail
        self._is_whole = is_whole
        self._keeps_images_whole = keeps_images_whole
        gates.gates.append(self._image_awaited)
        self._encodings: OrderedDict[bytes, _Encoding] = OrderedDict()  # the one that was used last is the last one
        self._num_tokens = 0
        self._awaited: dict[bytes, None] = {}  # digests of images for which requests are held, in their order
        # of each step that was planned and not committed: its work, and the seconds that are expected without it
        self._in_flight: deque[tuple[float, float]] = deque()
        self._counts = EncoderCounts()
        self._seconds_per_work: float | None = None
        self.planned_seconds = 0.0
        # of the step that is being planned:
        self._step = -1
        self._budget: StepBudget | None = None
        self._num_tokens_at_begin = 0
        self._is_idle = False
        self._num_slices: dict[bytes, int] = {}  # how many slices of which image it computes
        self._evicted: list[bytes] = []

    def begin_step(self, step_id: int, budget: StepBudget, *, is_idle: bool) -> None:
        """Begin to plan a step. `is_idle`: no step is in flight."""
        self._step, self._budget, self._is_idle = step_id, budget, is_idle
        self._num_tokens_at_begin, self._num_slices = budget.num_tokens, {}
        budget.fit_images = self.fitting_tokens
        has_room = True
        for digest in list(self._awaited):
            if digest in self._encodings or has_room:
                has_room &= digest in self._encodings
                del self._awaited[digest]
                self._gates.release(_event(digest))

    def _image_awaited(self, request: Request) -> str | None:
        """A request waits until the image is encoded to which its first token to compute belongs. If prompts are not divided,
        it waits until there is room for all its images, and they are encoded in the step of the prompt."""
        images = _images_of(request.parts)
        start = self._sharing.num_computed(request) if images else 0
        for image in images:
            is_needed = image.stop > start and (self._is_whole or image.start <= start)
            if is_needed and not self._encode(image):
                self._awaited[image.digest] = None
                return _event(image.digest)
        return None

    def is_awaited_by(self, parts: Sequence[RequestPart]) -> bool:
        """Whether the request of these parts may be held until an image is encoded."""
        return any(image.digest in self._awaited for image in _images_of(parts))

    def fitting_tokens(self, parts: Sequence[RequestPart], start: int, count: int, most: int) -> int:
        """Returns how many of `count` prompt tokens, from position `start` on, the step may compute: those before the first
        image that will not be encoded then. Plans slices of this image. If images are kept whole, `count` does not end inside
        an image, but before it, or if the image begins at `start` or earlier, behind it. At most `most` tokens are computed."""
        for image in _images_of(parts):
            if image.start < start + count and image.stop > start:
                num_before = max(image.start - start, 0)
                if not self._encode(image):
                    return num_before
                if self._keeps_images_whole and image.stop > start + count:
                    num_tokens = image.stop - start
                    return num_before or (num_tokens if num_tokens <= most else 0)
        return count

    def _encode(self, image: ImageInput) -> bool:
        """Returns whether the image is encoded when the step computes its rows. Plans slices of it, unless it is."""
        encoding = self._encodings.get(image.digest)
        if encoding is None:
            if not self._make_room(image.num_tokens):
                return False
            encoding = self._encodings[image.digest] = _Encoding(image)
            self._counts.num_misses += 1
            self._num_tokens += image.num_tokens
        encoding.step = self._step
        self._encodings.move_to_end(image.digest)
        left = self._vision.num_slices(image.grid) - encoding.num_done
        if left and image.digest not in self._num_slices:
            count = left if self._is_whole or self._is_alone() else self._fitting_slices(image, left)
            if count:
                self._num_slices[image.digest] = count
        return left == self._num_slices.get(image.digest, 0)

    def _is_alone(self) -> bool:
        """Whether the step delays nobody: nothing is decoded, and nothing else has been planned."""
        budget = self._budget
        assert budget is not None, "begin_step was not called"
        return self._is_idle and not budget.load.num_tokens and budget.num_tokens == self._num_tokens_at_begin

    def _fitting_slices(self, image: ImageInput, left: int) -> int:
        """How many slices the step's limit of time allows. The first image of a step gets at least one."""
        budget = self._budget
        assert budget is not None, "begin_step was not called"
        if budget.times is None:
            return left
        is_first = not self._num_slices
        if self._seconds_per_work is None:  # the first step measures it
            return int(is_first)
        seconds = self._seconds_per_work * self._slice_work(image)
        room = budget.seconds - budget.times.seconds(budget.load)
        count = min(left, max(int(room / seconds), int(is_first)))
        budget.seconds -= count * seconds
        return count

    def _slice_work(self, image: ImageInput) -> float:
        """How many numbers a slice multiplies for the image: with the layer's weights, and for its attention."""
        num_patches = math.prod(image.grid)
        num_weights = self._vision.num_weights / self._vision.num_layers
        of_layer = num_patches * (num_weights + 2 * num_patches * self._vision.hidden_size)
        return of_layer / self._vision.slices_of_layer(image.grid)

    def _make_room(self, num_tokens: int) -> bool:
        """Evict images that the step does not use, the one that was used the longest ago first."""
        needed = self._num_tokens + num_tokens - self._max_tokens
        if needed > 0:
            unused = [each for each in self._encodings.values() if each.step != self._step]
            if sum(each.image.num_tokens for each in unused) < needed:
                return False
            for each in unused:
                if needed <= 0:
                    break
                del self._encodings[each.image.digest]
                self._num_tokens -= each.image.num_tokens
                needed -= each.image.num_tokens
                if each.num_done:
                    self._evicted.append(each.image.digest)
        return True

    def extended(self, plan: SchedulerOutput) -> SchedulerOutput:
        """The plan of the step, with what the ranks encode and evict."""
        inputs, work = [], 0.0
        computed = dict(zip(plan.slots.tolist(), plan.num_computed_tokens.tolist(), strict=True))
        for new in plan.new_requests:
            self._counts.num_queries += sum(image.stop > computed[new.slot] for image in _images_of(new.parts))
        for digest, count in self._num_slices.items():
            each = self._encodings[digest]
            part = None if each.num_done else ImagesPart(images=(each.image,))
            inputs.append(EncoderInput(digest=digest, num_slices=count, part=part))
            work += count * self._slice_work(each.image)
            each.num_done += count
            self._counts.num_slices += count
            each.image = replace(each.image, pixels=NO_PIXELS)
        times = None if self._budget is None else self._budget.times
        self._in_flight.append((work, 0.0 if times is None or not work else times.seconds(load_of(plan))))
        self.planned_seconds = work and work * (math.inf if self._seconds_per_work is None else self._seconds_per_work)
        self._num_slices = {}
        if not inputs:  # what was evicted is told with the next image, before which the ranks need no room
            return plan
        evicted = tuple(self._evicted)
        self._evicted.clear()
        return replace(plan, encoder_evictions=evicted, encoder_inputs=tuple(inputs))

    def committed(self, output: ModelRunnerOutput) -> float:
        """The oldest step in flight has ended. Fails the requests whose images were refused. Returns how many seconds the step
        has taken (0: unknown), or 0 if it has encoded something, because it tells nothing about other steps then."""
        for digest, reason in output.refused_images:
            self._refuse(digest, reason)
        seconds = output.compute_seconds
        work, expected = self._in_flight.popleft()
        if not work:
            return seconds
        if seconds > 0:
            longer = max(seconds - expected, 0.1 * seconds)
            self._counts.seconds += longer
            found, before = longer / work, self._seconds_per_work
            self._seconds_per_work = found if before is None else before + _PACE * (found - before)
        return 0.0

    def _refuse(self, digest: bytes, reason: str) -> None:
        encoding = self._encodings.pop(digest, None)
        if encoding is not None:
            self._num_tokens -= encoding.image.num_tokens
            self._evicted.append(digest)  # what the ranks have instead of its embeddings
        for request in list(self._sharing.requests.values()):
            image = next((each for each in _images_of(request.parts) if each.digest == digest), None)
            if image is not None:
                message = f"{image.place}: {reason}" if image.place else reason
                self._fail(request.request_id, message, ErrorKind.REQUEST, image.place)

    def take_counts(self) -> EncoderCounts:
        """Returns the counts since the last call."""
        counts, self._counts = self._counts, EncoderCounts()
        counts.usage = self._num_tokens / self._max_tokens
        return counts

    def reset(self) -> None:
        """The ranks have lost all embeddings, and no step is in flight."""
        self._encodings.clear()
        self._evicted.clear()
        self._in_flight.clear()
        self._num_tokens = 0


def _images_of(parts: Sequence[RequestPart]) -> Sequence[ImageInput]:
    return next((part.images for part in parts if isinstance(part, ImagesPart)), ())


def _event(digest: bytes) -> str:
    return f"image {digest.hex()}"
