"""`Partings`: where prompts part, in a model of which some layers do not see all tokens.

Full attention can go on from any block of a cached prompt. A sliding window needs the blocks just before this place, and
recurrent layers need a state. To keep these everywhere would take too much memory. So they are kept where prompts are seen to
part: if a prompt begins like an earlier one and goes on in another way, the place is likely to be the end of a system prompt or
of a document, and others will part there, too.

A prompt that goes on from the end of an earlier answer does not part: this is the next message of a chat. What it needs was
kept at the end of the answer. If another prompt goes on from the same answer, it is a parting.
"""

from collections.abc import Sequence
from itertools import islice

from inflight.kv_cache.block_pool import BlockPool
from inflight.kv_cache.groups import CacheGroup
from inflight.kv_cache.request_blocks import RequestBlocks


class Partings:
    """
    Args:
        group: a KV group whose cached blocks tell of earlier prompts, too: of full attention, if there is one.
        num_names: so many names of blocks of the newest prompts are remembered.
    """

    def __init__(self, pool: BlockPool, group: int, num_names: int) -> None:
        self._pool = pool
        self._group = group
        self._num_names = num_names
        # names of blocks of prompts, and of the last blocks of requests that have ended; the oldest ones first
        self._seen = dict[bytes, None]()
        self._ends = dict[bytes, None]()

    def note(self, blocks: RequestBlocks, num_blocks: int) -> None:
        """Find where the prompt, whose first `num_blocks` blocks have names, parts from earlier ones. Once for each request."""
        if blocks.num_shared >= 0:
            return
        names = blocks.hashes[:num_blocks]
        lookup = self._pool.lookup
        shared = 0
        while shared < num_blocks and (names[shared] in self._seen or lookup((names[shared], self._group)) is not None):
            shared += 1
        is_next_message = shared > 0 and names[shared - 1] in self._ends
        if is_next_message:
            del self._ends[names[shared - 1]]
        blocks.num_shared = 0 if is_next_message else shared
        self._remember(self._seen, names)

    def record_end(self, blocks: RequestBlocks) -> None:
        """The request ends, or is preempted."""
        if 0 < blocks.num_committed <= len(blocks.hashes):
            self._remember(self._ends, [blocks.hashes[blocks.num_committed - 1]])

    def _remember(self, names: dict[bytes, None], new: list[bytes]) -> None:
        for name in new:
            names.pop(name, None)
            names[name] = None
        for name in list(islice(names, max(0, len(names) - self._num_names))):
            del names[name]


def make_partings(groups: Sequence[CacheGroup], pool: BlockPool) -> Partings | None:
    """Returns None if all groups are of full attention: then a prompt can go on from any cached block."""
    whole = [index for index, group in enumerate(groups) if group.is_whole]
    if len(whole) < len(groups):
        return Partings(pool, whole[0] if whole else 0, pool.num_blocks)
    return None
