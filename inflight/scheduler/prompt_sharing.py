"""`PromptSharing`: which blocks of a prompt need not be computed, because another request or the prefix cache has them."""

from __future__ import annotations

from collections.abc import Mapping

from inflight.kv_cache.manager import NO_BLOCKS, KVCacheManager
from inflight.scheduler.request import Request, RequestStatus


class PromptSharing:
    """
    Args:
        requests: all requests that have not ended, by their ids. The scheduler changes it.
    """

    def __init__(self, requests: Mapping[str, Request], kv_cache: KVCacheManager) -> None:
        self._requests, self._kv_cache = requests, kv_cache

    def leader(self, request: Request) -> Request | None:
        """Returns the leader if the request is a follower that has never run; otherwise None.

        The first of the n completions of a prompt is the leader. It computes the prompt. The others are its followers. When
        plans have been made for all of the prompt but its last token, the followers can be admitted and share the leader's
        blocks. If a step of the leader fails that is still in flight, the later step of the follower is void, too.
        """
        return self._requests.get(request.core.prompt_leader or "") if request.status is RequestStatus.WAITING else None

    def leader_to_wait_for(self, request: Request) -> Request | None:
        """Returns the leader of a follower that cannot be admitted yet, otherwise None. A prompt that fits one block has
        nothing to share, so its followers do not wait."""
        leader = self.leader(request)
        must_wait = leader is not None and not leader.has_planned_prompt
        return leader if must_wait and request.num_prompt_tokens > self._kv_cache.block_size else None

    def computed_blocks(self, request: Request) -> tuple[list[int], ...]:
        """Returns the blocks that the request need not compute: blocks of its leader, or blocks in the prefix cache."""
        last = request.num_tokens - 1  # at least this token is computed, because its logits are needed
        if request.sampling.params.prompt_logprobs is not None:
            last = min(last, request.num_prompt_logprobs_done - 1)
        if (leader := self.leader(request)) is not None and leader.status is RequestStatus.RUNNING:
            shared = self._kv_cache.share_prompt(request.blocks, leader.blocks, last // self._kv_cache.block_size)
            if shared != NO_BLOCKS:
                return shared
        return self._kv_cache.get_computed_blocks(request.blocks, request.token_ids[: last + 1])

    def num_computed_tokens(self, request: Request) -> int:
        """Returns how many tokens the blocks of `computed_blocks` hold."""
        blocks = self.computed_blocks(request)
        return len(blocks[0]) * self._kv_cache.block_size if blocks else 0
