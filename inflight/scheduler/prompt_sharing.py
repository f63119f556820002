"""`PromptSharing`: which blocks of a prompt need not be computed, because another request or the prefix cache has them."""

from collections.abc import Mapping

from inflight.kv_cache.manager import NO_BLOCKS, KVCacheManager
from inflight.scheduler.request import Request, RequestStatus
from inflight.scheduler.step_time.limits import StepLimits


class PromptSharing:
    """
    Args:
        requests: id -> request, for all requests that have not ended. The scheduler adds and removes entries. An attribute,
            too.
    """

    def __init__(self, requests: Mapping[str, Request], kv_cache: KVCacheManager) -> None:
        self.requests, self._kv_cache = requests, kv_cache

    def leader(self, request: Request) -> Request | None:
        """Returns the leader if the request is a follower that has never run and the leader has not ended; otherwise None.

        A prompt may have n completions, each with its own `Request`. The first is the leader, which computes the prompt. The
        others are its followers. When plans have been made for all of the prompt but its last token, the followers can be
        admitted and share the leader's blocks. Steps in flight may still have to compute some of these blocks. This is safe,
        because all ranks run the steps in order, and if a step fails, all later steps are void.
        """
        return self.requests.get(request.core.prompt_leader or "") if request.status is RequestStatus.WAITING else None

    def leader_to_wait_for(self, request: Request) -> Request | None:
        """If the request is a follower that cannot be admitted yet, returns its leader, otherwise None. A prompt that fits one
        block has no block to share, so its followers do not wait."""
        leader = self.leader(request)
        must_wait = leader is not None and not leader.has_planned_prompt
        return leader if must_wait and request.num_prompt_tokens > self._kv_cache.block_size else None

    def computed_blocks(self, request: Request) -> tuple[list[int], ...]:
        """Returns the blocks that the request need not compute: blocks of its leader, or blocks in the prefix cache."""
        last = self.last_reusable(request)
        if (leader := self.leader(request)) is not None and leader.status is RequestStatus.RUNNING:
            # the emitted tokens of a resumed request are its own
            last_shared = min(last, request.num_prompt_tokens - 1)
            shared = self._kv_cache.share_prompt(
                request.blocks, leader.blocks, last_shared // self._kv_cache.block_size
            )
            if shared != NO_BLOCKS:
                return shared
        return self._kv_cache.get_computed_blocks(request.blocks, request.token_ids[: last + 1])

    def last_reusable(self, request: Request) -> int:
        """Returns the position of the first token that the request itself must compute, whatever is cached."""
        asked = [first for part in request.parts if (first := part.first_position) is not None]
        return min([request.num_tokens - 1, *asked])  # the logits of the last token are needed

    def is_long(self, request: Request, limits: StepLimits) -> bool:
        """Returns whether the request is long: whether many of its tokens must still be computed, because they are not in the
        blocks of `computed_blocks`."""
        if not limits.is_long(request.num_tokens):
            return False
        return limits.is_long(request.num_tokens - self.num_computed(request))

    def num_computed(self, request: Request) -> int:
        """Returns how many tokens the request need not compute."""
        return self._kv_cache.num_tokens_of(self.computed_blocks(request))
