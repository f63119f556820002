"""Draws one token per row of logits in Triton, in two launches: over the whole vocabulary, then over each row's candidates.

A row is *restricted* if it has min_p, top_k or top_p. Its *cut* is the lowest logit that may be drawn.

    score_kernel, for each row and block of the vocabulary: finds the block's best token. For a restricted row it also computes
                  the block's mass, the sum of exp(x - max), and the largest logit of each group of neighbouring tokens.
    choose_kernel, for each row: finds the best of these tokens. For a restricted row it draws one that is not below the cut.

Other rows (greedy, or random without limits) read their logits once. A restricted row reads all its logits once, in parallel.
After that it reads only the groups that are listed. A group is listed if it has a token at or above a bound. The bound is not
above the cut. For top_k, the bound is the k-th largest of the groups' maxima, because each maximum is a token. For min_p, it is
the lowest logit that min_p allows. For top_p alone, groups are added until the tokens above the bound have top_p's share of the
probability. The cut is found without a sort, by a search over integers that have the same order as the logits. Each pass of the
search compares with four pivots. So it finds in which of five intervals the cut is. A pass reads the maxima (2,400 for 152,000
tokens) or the listed groups (20 for top_k = 20) from the caches. A row needs these passes:

    top_k          a search over the maxima, to list groups; a search over the listed tokens. A search has about 11 passes, or
                   14 if its logits have both signs
    top_p          one pass for the sum to reach; a search over the listed tokens; one pass for the tokens above the cut
    top_p alone    also a search over the maxima and one pass, each time that groups are added
    all            one pass to list the groups, one to draw

CUDA graphs can record the launches: they do not depend on the rows' parameters, which are read on the device. Blocks are summed
in a fixed order, so a row's token does not depend on the other rows.

The *key* of a logit, divided by the temperature, is an int32. Larger logits have larger keys, and NaN has the largest key.
"""

import triton
import triton.language as tl
from torch import Tensor

# Columns of the table of sampling parameters: an int32 word for each slot (request). 8 bytes have two columns, low words first.
MODE = tl.constexpr(0)
TEMPERATURE = tl.constexpr(1)  # float32
SEED = tl.constexpr(2)  # 8 bytes: mix64(seed + golden ratio), see `seeds.seed_words`
TOP_K = tl.constexpr(4)  # the vocabulary's size if unused
TOP_P = tl.constexpr(5)  # float64; above 1 if unused
LOG_MIN_P = tl.constexpr(7)  # float32; -inf if unused
NUM_COLUMNS = 8

SCORE_WARPS = 8
CHOOSE_WARPS = 16

GREEDY = tl.constexpr(0)
RANDOM = tl.constexpr(1)
RESTRICTED = tl.constexpr(2)

IMPOSSIBLE_TOKEN = tl.constexpr(-1)

_NAN_KEY = tl.constexpr(0x7FFFFFFF)
_NO_LOGIT_KEY = tl.constexpr(-0x7F800001)  # the key of -inf
_INFINITE_KEY = tl.constexpr(0x7F800000)  # the key of inf
_PADDING_KEY = tl.constexpr(-0x80000000)  # below all keys
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_NO_WINNER = tl.constexpr(-0x8000000000000000)
_FIRST_RANK = tl.constexpr(64)  # the number of groups that are listed first, with top_p alone
_MORE_RANKS = tl.constexpr(8)  # the factor by which this number grows each time that groups are added
_PIVOTS = tl.constexpr(4)


def choose_tokens(
    logits: Tensor,
    columns: Tensor,
    slots: Tensor,
    positions: Tensor,
    tokens: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor, Tensor],
    block: int,
    group: int,
    search_block: int,
) -> None:
    """See `DeviceSampler.draw`.

    Args:
        scratch: best int64 and mass float32, [>= num_rows, blocks]; maxima and listed int32, [>= num_rows, groups].
        block, group, search_block: powers of two, the numbers of tokens of a program of `score_kernel`, of a group, and of
            one iteration of a pass.
    """
    num_rows, vocab_size = logits.shape
    best, mass, maxima, listed = scratch
    num_blocks, num_groups = best.shape[1], maxima.shape[1]
    score_kernel[(num_rows, num_blocks)](
        logits,
        columns,
        slots,
        positions,
        best,
        mass,
        maxima,
        vocab_size,
        num_blocks,
        num_groups,
        columns.stride(0),
        BLOCK=block,
        GROUP=group,
        num_warps=SCORE_WARPS,
    )
    choose_kernel[(num_rows,)](
        logits,
        columns,
        slots,
        positions,
        tokens,
        best,
        mass,
        maxima,
        listed,
        vocab_size,
        num_blocks,
        num_groups,
        columns.stride(0),
        BLOCKS=triton.next_power_of_2(num_blocks),
        GROUP=group,
        BLOCK=search_block,
        num_warps=CHOOSE_WARPS,
        num_stages=1,
    )


@triton.jit
def key_of(x):
    """The keys of logits. The bits of negative floats, read as integers, have the reverse order, so they are flipped. 0.0 and
    -0.0 get the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, _NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def logit_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed(key, token):
    """Pack key and token into one int64. A larger key gives a larger number. At equal keys, a smaller token id does."""
    return (key.to(tl.int64) << 32) | (token ^ _LAST_ID).to(tl.int64)


@triton.jit
def wide_column(first, stride):
    """The word at `first` and the word of the next column, as one uint64."""
    low = tl.load(first).to(tl.uint32, bitcast=True)
    high = tl.load(first + stride).to(tl.uint32, bitcast=True)
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def draw_words(column, stride, position):
    """Computes the same two words as `seeds.draw_keys`, uint32."""
    word = wide_column(column + stride * SEED, stride) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    word = word ^ (word >> 31)
    return word.to(tl.uint32), (word >> 32).to(tl.uint32) | 1


@triton.jit
def log_exponential(tokens, word0, word1):
    """Computes the same as `noise.log_exponential`, for token ids (int32) and the two words of a draw."""
    h = tokens.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = ((h ^ (h >> 16)) ^ word0) * word1
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0x7FFFFFFF
    return log_of_exponential(h.to(tl.int32))


@triton.jit
def log_of_exponential(words):
    """Turns hashes, int32 in [0, 2**31), into log E, where E is an exponentially distributed random number."""
    u = words.to(tl.float32) * 4.656612873077393e-10  # 2**-31
    u = tl.minimum(tl.maximum(u, 2.3283064365386963e-10), 0.99999994)  # 2**-32, 1 - 2**-24
    rest = 1.0 - u
    lost = (rest - 1.0) + u  # the rounding error: log(1 - u) = log(rest - lost), to first order
    return tl.log(lost * (1.0 + u) - tl.log(rest))


@triton.jit(do_not_specialize=["num_blocks", "num_groups", "stride"])
def score_kernel(
    logits,  # float32 [num_rows, vocab_size]
    columns,  # int32 [NUM_COLUMNS, stride]
    slots,  # int32 [num_rows]
    positions,  # int32 [num_rows]
    best,  # int64 [num_rows, num_blocks]: `packed`
    mass,  # float32 [num_rows, num_blocks]
    maxima,  # int32 [num_rows, num_groups]: keys
    vocab_size,
    num_blocks,
    num_groups,
    stride,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    within = tokens < vocab_size
    x = tl.load(logits + row * vocab_size + tokens, mask=within, other=float("-inf"))
    column = columns + tl.load(slots + row)
    mode = tl.load(column + stride * MODE)
    if mode != GREEDY:
        x = tl.div_rn(x, tl.load(column + stride * TEMPERATURE).to(tl.float32, bitcast=True))
    if mode == RANDOM:
        word0, word1 = draw_words(column, stride, tl.load(positions + row))
        x = x - log_exponential(tokens, word0, word1)
    keys = key_of(x)
    group_keys = tl.max(keys, 1)
    key = tl.max(group_keys, 0)
    token = tl.min(tl.min(tl.where((keys == key) & within, tokens, _LAST_ID), 1), 0)
    tl.store(best + row * num_blocks + block, packed(key, token))
    if mode == RESTRICTED:
        tl.store(maxima + row * num_groups + groups, group_keys)
        top = logit_of(key)
        weights = tl.where(keys > _NO_LOGIT_KEY, tl.exp(x - top), 0.0)
        tl.store(mass + row * num_blocks + block, tl.sum(tl.sum(weights, 1), 0))


@triton.jit(do_not_specialize=["num_blocks", "num_groups", "stride"])
def choose_kernel(
    logits,
    columns,
    slots,
    positions,
    chosen,  # int32 [num_rows], the drawn tokens
    best,
    mass,
    maxima,
    listed,  # int32 [num_rows, num_groups], the listed groups
    vocab_size,
    num_blocks,
    num_groups,
    stride,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = columns + tl.load(slots + row)
    blocks = tl.arange(0, BLOCKS)
    bests = tl.load(best + row * num_blocks + blocks, mask=blocks < num_blocks, other=_NO_WINNER)
    winner = tl.max(bests, 0)
    key = (winner >> 32).to(tl.int32)
    possible = (key > _NO_LOGIT_KEY) & (key < _INFINITE_KEY)
    if possible & (tl.load(column + stride * MODE) == RESTRICTED):
        top = logit_of(key)
        masses = tl.load(mass + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
        block_tops = logit_of((bests >> 32).to(tl.int32))
        row_mass = tl.sum(tl.where(masses > 0.0, masses * tl.exp(block_tops - top), 0.0), 0)
        winner = draw_restricted(
            logits + row * vocab_size,
            column,
            stride,
            tl.load(positions + row),
            key,
            row_mass,
            maxima + row * num_groups,
            listed + row * num_groups,
            vocab_size,
            num_groups,
            GROUP,
            BLOCK,
        )
    token = (winner & _LAST_ID).to(tl.int32) ^ _LAST_ID
    tl.store(chosen + row, tl.where(possible, token, IMPOSSIBLE_TOKEN))


@triton.jit
def draw_restricted(
    logits,
    column,  # the column of the row's slot
    stride,
    position,
    top_key,
    row_mass,
    maxima,
    listed,
    vocab_size,
    num_groups,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The drawn token of one restricted row and its key, `packed`. `row_mass`: the sum of exp(x - max) over the vocabulary."""
    temperature = tl.load(column + stride * TEMPERATURE).to(tl.float32, bitcast=True)
    top_k = tl.load(column + stride * TOP_K)
    top_p = wide_column(column + stride * TOP_P, stride).to(tl.float64, bitcast=True)
    log_min_p = tl.load(column + stride * LOG_MIN_P).to(tl.float32, bitcast=True)
    top = logit_of(top_key)
    floor = tl.maximum(key_of(top + log_min_p), _NO_LOGIT_KEY + 1)
    floored = (top_k < vocab_size) | (log_min_p > float("-inf"))
    share = top_p * row_mass.to(tl.float64)

    # List the groups with a token of at least `bound`; the bound is at or below the cut.
    rank = tl.where(top_k < vocab_size, top_k, tl.where(floored, num_groups, _FIRST_RANK))
    bound = floor
    num_listed = num_groups
    covered = rank < 0
    while not covered:
        if rank < num_groups:
            bound = cut_of(
                rank.to(tl.float64), floor, top_key, maxima, listed, num_groups, 1.0, 0, False, False, GROUP, BLOCK
            )
        else:
            bound = floor
        num_listed = list_groups(bound, maxima, listed, num_groups, BLOCK)
        covered = floored | (rank >= num_groups)
        if not covered:
            reached = sum_above(bound - 1, top, logits, listed, num_listed, temperature, vocab_size, GROUP, BLOCK)
            covered = reached >= share
            rank = rank * _MORE_RANKS

    cut = bound
    if top_k < vocab_size:
        limit = top_k.to(tl.float64)
        cut = cut_of(
            limit, cut, top_key, logits, listed, num_listed, temperature, vocab_size, False, True, GROUP, BLOCK
        )
    above = share * 0.0
    weight = share * 0.0
    if top_p <= 1.0:
        if floored:
            share = top_p * sum_above(cut - 1, top, logits, listed, num_listed, temperature, vocab_size, GROUP, BLOCK)
        cut = cut_of(share, cut, top_key, logits, listed, num_listed, temperature, vocab_size, True, True, GROUP, BLOCK)
        above = sum_above(cut, top, logits, listed, num_listed, temperature, vocab_size, GROUP, BLOCK)
        weight = tl.exp(logit_of(cut) - top).to(tl.float64)

    # Draw among the tokens above the cut, and as many of those at the cut as top_p's share needs.
    word0, word1 = draw_words(column, stride, position)
    winner = tl.cast(_NO_WINNER, tl.int64)
    num_ties = num_listed * 0
    start = num_listed * 0
    while start < num_listed * GROUP:
        tokens, keys = listed_keys(start, logits, listed, num_listed, temperature, vocab_size, GROUP, BLOCK)
        ties = (keys == cut).to(tl.int32)
        before = above + (num_ties + tl.cumsum(ties, 0) - ties).to(tl.float64) * weight
        kept = (keys > cut) | ((keys == cut) & (before < share))
        scores = key_of(logit_of(keys) - log_exponential(tokens, word0, word1))
        winner = tl.maximum(winner, tl.max(tl.where(kept, packed(scores, tokens), _NO_WINNER), 0))
        num_ties += tl.sum(ties, 0)
        start += BLOCK
    return winner


@triton.jit
def list_groups(bound, maxima, listed, num_groups, BLOCK: tl.constexpr):
    """List the groups whose maximum is at least `bound`, in ascending order. Return their number."""
    tl.debug_barrier()  # all threads have read the old list
    num_listed = num_groups * 0
    start = num_groups * 0
    while start < num_groups:
        groups = start + tl.arange(0, BLOCK)
        keys = tl.load(maxima + groups, mask=groups < num_groups, other=_PADDING_KEY)
        taken = (keys >= bound).to(tl.int32)
        tl.store(listed + num_listed + tl.cumsum(taken, 0) - taken, groups, mask=taken != 0)
        num_listed += tl.sum(taken, 0)
        start += BLOCK
    tl.debug_barrier()  # all threads see the new list
    return num_listed


@triton.jit
def listed_keys(start, logits, listed, num_listed, temperature, vocab_size, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Ids and keys of BLOCK tokens: take all tokens of the listed groups in order, and begin with number `start`."""
    places = start + tl.arange(0, BLOCK)
    within = places < num_listed * GROUP
    tokens = tl.load(listed + places // GROUP, mask=within, other=0) * GROUP + places % GROUP
    x = tl.load(logits + tokens, mask=within & (tokens < vocab_size), other=float("-inf"))
    return tokens, tl.where(within, key_of(tl.div_rn(x, temperature)), _PADDING_KEY)


@triton.jit
def sums_above(
    pivots,
    top,
    source,
    listed,
    count,
    temperature,
    vocab_size,
    WEIGHTED: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For each pivot, sum the weights exp(x - top) of the keys above it, or count these if not WEIGHTED: float64 [pivots].

    If TOKENS, `source` has the row's logits, and the keys are those of all tokens in the `count` listed groups. If not TOKENS,
    `source` has `count` keys.
    """
    sums = tl.zeros_like(pivots).to(tl.float64)
    length = count
    if TOKENS:
        length = count * GROUP
    start = count * 0
    while start < length:
        if TOKENS:
            _, keys = listed_keys(start, source, listed, count, temperature, vocab_size, GROUP, BLOCK)
        else:
            places = start + tl.arange(0, BLOCK)
            keys = tl.load(source + places, mask=places < length, other=_PADDING_KEY)
        if WEIGHTED:
            weights = tl.exp(logit_of(keys) - top)
        else:
            weights = tl.full([BLOCK], 1.0, tl.float32)
        sums += tl.sum(tl.where(keys[None, :] > pivots[:, None], weights[None, :], 0.0), 1).to(tl.float64)
        start += BLOCK
    return sums


@triton.jit
def sum_above(key, top, logits, listed, num_listed, temperature, vocab_size, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the weights of the tokens in the listed groups whose keys are above `key`, float64."""
    pivots = tl.full([1], 0, tl.int32) + key
    return tl.sum(
        sums_above(pivots, top, logits, listed, num_listed, temperature, vocab_size, True, True, GROUP, BLOCK), 0
    )


@triton.jit
def cut_of(
    limit,
    lowest,
    highest,
    source,
    listed,
    count,
    temperature,
    vocab_size,
    WEIGHTED: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The lowest number in [lowest, highest] for which `sums_above` is less than `limit`. `highest` must be the largest key.

    The result is one of the keys, or `lowest`. If the keys are sorted in descending order, the shortest prefix that sums up to
    `limit` ends at the result.
    """
    top = logit_of(highest)
    low, high = lowest.to(tl.int64) - 1, highest.to(tl.int64)  # the cut is in (low, high]
    steps = 1 + tl.arange(0, _PIVOTS)
    while high - low > 1:
        width = high - low
        pivots = (low + (width * steps + _PIVOTS) // (_PIVOTS + 1)).to(tl.int32)
        sums = sums_above(pivots, top, source, listed, count, temperature, vocab_size, WEIGHTED, TOKENS, GROUP, BLOCK)
        num_reached = tl.sum((sums >= limit).to(tl.int32), 0)  # higher pivots have smaller sums
        high = low + (width * (num_reached + 1) + _PIVOTS) // (_PIVOTS + 1)
        low = low + (width * num_reached + _PIVOTS) // (_PIVOTS + 1)
    return high.to(tl.int32)
