// How a step's attention is divided among threads: tiles, parts of tiles, and memory for the results that are to be merged.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "attention_cells.h"

constexpr int kTileRows = 48;
constexpr int kSplitKeys = 1024;            // keys of a split, the smallest part of a sequence that a thread works on
constexpr int64_t kPartialBytes = 1 << 20;  // per thread: memory for results that are not merged yet

struct Tile {
    int row;
    int first_head, end_head;    // key heads
    int first, end;              // query rows of each key head: row = token * (query heads per key head) + query head
    int first_split, end_split;  // its keys are [first_split, end_split) * kSplitKeys
    int64_t partial;             // index of the first float of its unmerged result; -1: the tile is not shared

    int rows_of_head() const { return end - first; }
    int num_rows() const { return (end_head - first_head) * rows_of_head(); }
    int num_splits() const { return end_split - first_split; }
};

struct Segment {  // tokens of one request that fall into one group of the cache
    int row, first_position, end_position;
};

struct Work {
    std::vector<Segment> segments;
    std::vector<Tile> tiles;  // first `num_whole` whole tiles; then, if threads share tiles, the parts that threads compute
    size_t num_whole = 0;
    int num_threads = 1;
    int first_splits = 0;        // splits in the first part of a shared tile; other parts have one split; 0: no tile is shared
    int64_t partial_floats = 0;  // memory of all unmerged results, in floats

    int num_parts(const Tile& whole) const { return std::max(1, whole.num_splits() - first_splits + 1); }
};

// Size of a tile's state in floats, rounded up to whole cache lines.
inline int64_t state_floats(int num_rows, int head_dim) { return (static_cast<int64_t>(num_rows) * (head_dim + 2) + 15) / 16 * 16; }

inline State state_at(float* memory, int num_rows, int head_dim) {
    float* largest = memory + static_cast<int64_t>(num_rows) * head_dim;
    return State{largest, largest + num_rows, memory};
}

// If there are few tiles for many threads, the threads share tiles: each part of a shared tile is one split. If the results of
// all parts would take more than `kPartialBytes` per thread, the first part of each tile gets several splits, and merges them
// itself. In both cases the splits are merged one by one, in order, so that a row's result is the same bit for bit.
inline void share_tiles(Work& work, int head_dim) {
    work.first_splits = 0;
    work.partial_floats = 0;
    if (work.num_threads == 1 || work.num_whole >= static_cast<size_t>(4 * work.num_threads)) return;
    const int64_t most_floats = kPartialBytes / static_cast<int64_t>(sizeof(float)) * work.num_threads;
    const auto floats_with = [&](int first_splits) {
        int64_t total = 0;
        for (size_t i = 0; i < work.num_whole; i++) {
            const Tile& tile = work.tiles[i];
            if (tile.num_splits() > first_splits)
                total += state_floats(tile.num_rows(), head_dim) * (tile.num_splits() - first_splits + 1);
        }
        return total;
    };
    int few = 1, enough = 1;  // first_splits is in [few, enough]
    for (size_t i = 0; i < work.num_whole; i++) enough = std::max(enough, work.tiles[i].num_splits());
    if (enough == 1) return;
    while (few < enough) {
        const int middle = (few + enough) / 2;
        if (floats_with(middle) <= most_floats)
            enough = middle;
        else
            few = middle + 1;
    }
    work.first_splits = few;
    for (size_t i = 0; i < work.num_whole; i++) {  // first the longest: tiles that are not shared, and first parts
        Tile part = work.tiles[i];
        if (work.num_parts(part) > 1) {
            part.partial = work.tiles[i].partial = work.partial_floats;
            part.end_split = part.first_split + work.first_splits;
            work.partial_floats += state_floats(part.num_rows(), head_dim) * work.num_parts(work.tiles[i]);
        }
        work.tiles.push_back(part);
    }
    for (size_t i = 0; i < work.num_whole; i++)
        for (int k = 1; k < work.num_parts(work.tiles[i]); k++) {
            Tile part = work.tiles[i];
            part.first_split += work.first_splits + k - 1;
            part.end_split = part.first_split + 1;
            part.partial += state_floats(part.num_rows(), head_dim) * k;
            work.tiles.push_back(part);
        }
}

class Space {  // scratch memory of one thread, kept from call to call; not initialised
  public:
    float* at_least(int64_t count) {
        if (size_ < count) {
            floats_.reset();  // free the old memory before the new is allocated
            floats_.reset(static_cast<float*>(operator new(count * sizeof(float), kLine)));
            size_ = count;
        }
        return floats_.get();
    }

  private:
    static constexpr std::align_val_t kLine{64};
    struct Delete {
        void operator()(float* memory) const { operator delete(memory, kLine); }
    };
    std::unique_ptr<float[], Delete> floats_;
    int64_t size_ = 0;
};
