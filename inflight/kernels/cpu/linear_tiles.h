// Products of linear layers by AMX: one instruction multiplies a tile of 16 rows of activations with a tile of 16 output features,
// over 16 units (32 bits) of input features.
//
// The two vectors of a panel (linear.h) already are the tiles of a weight: 16 neighbouring units of one vector are a tile. Rows are
// arranged in *blocks* of up to 32 rows:
//
//     block     [groups][tiles of a group][rows of the block][16 units]; behind the last unit of a group are zeros
//
// A block and a panel have four sums, each of them a tile: two tiles of rows times two vectors of the panel.
//
// bfloat16 is multiplied in this way whatever the number of rows is, even for one row: a tile adds up its products in another order
// than the vector instruction, and a row's result must not depend on the other rows. Sums of integers are exact, so they use tiles
// only where these are faster. A panel of 4 bits is unpacked to bytes, once for all blocks that a thread multiplies it with.
#pragma once

#include "linear_product.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

constexpr int kTileUnits = 16;
constexpr int kBlockRows = 32;

// Whether products of so many rows use tiles. Of integers, groups must fill their tiles: the sums of each group are scaled in vector
// registers, which takes as long as the products of a group of 32. Fewer rows do not pay for that, and for the unpacking of 4 bits.
inline bool uses_tiles(const LinearWeight& weight, int64_t num_rows) {
    if (!kHasTiles || weight.bits == 32) return false;
    if (weight.bits == 16) return true;
    const bool fills_tiles = weight.group_size == weight.in_features || weight.group_size % (4 * kTileUnits) == 0;
    return fills_tiles && num_rows >= (weight.bits == 8 ? 16 : 32);
}

// Units of a group. A row of bfloat16 is one group.
inline int64_t units_per_group(const LinearWeight& weight) { return weight.group_size * (weight.bits == 16 ? 2 : 1) / 4; }

// How many tiles the units of a group fill. The last one may have room for more.
inline int64_t steps_per_group(const LinearWeight& weight) { return (units_per_group(weight) + kTileUnits - 1) / kTileUnits; }

inline int64_t units_in_block(const LinearWeight& weight) {  // of a row
    return weight.in_features / weight.group_size * steps_per_group(weight) * kTileUnits;
}

// Copies the units of a row to its place in a block.
void arrange_in_block(const uint32_t* units, const LinearWeight& weight, const Tile& block, int64_t row_in_block, uint32_t* to);

// Multiplies the blocks [first_block, end_block) with the panels [first, end).
void multiply_by_tiles(
    const Call& call, const PanelLayout& layout, const Rows& rows, const Tiling& blocks, int64_t first_block, int64_t end_block,
    int64_t first, int64_t end);
