// Which parts of a step's attention there are for threads to take, and where their results wait to be merged.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "attention_cells.h"

constexpr int kTileRows = 48;
constexpr int kSplitKeys = 1024;            // several threads may share a sequence in pieces of so many keys
constexpr int64_t kPartialBytes = 1 << 20;  // for each thread, of results that wait to be merged

struct Tile {
    int row;
    int first_head, end_head;    // key heads
    int first, end;              // query rows of each: token * (heads per key head) + head
    int first_split, end_split;  // the keys that it goes over, in kSplitKeys
    int64_t partial;             // where its result waits to be merged, in floats; -1: it is the whole result

    int rows_of_head() const { return end - first; }
    int num_rows() const { return (end_head - first_head) * rows_of_head(); }
    int num_splits() const { return end_split - first_split; }
};

struct Segment {  // tokens of one request that fall into one group of the cache
    int row, first_position, end_position;
};

struct Work {
    std::vector<Segment> segments;
    std::vector<Tile> tiles;  // whole ones; then, where there are too few, what threads compute instead
    size_t num_whole = 0;
    int num_threads = 1;
    int first_splits = 0;        // of a shared tile's first part, other parts have one; 0: no tile is shared
    int64_t partial_floats = 0;  // what all results that wait to be merged take

    int num_parts(const Tile& whole) const { return std::max(1, whole.num_splits() - first_splits + 1); }
};

// Of the state of a tile: a multiple of a cache line.
inline int64_t state_floats(int num_rows, int head_dim) { return (static_cast<int64_t>(num_rows) * (head_dim + 2) + 15) / 16 * 16; }

inline State state_at(float* memory, int num_rows, int head_dim) {
    float* largest = memory + static_cast<int64_t>(num_rows) * head_dim;
    return State{largest, largest + num_rows, memory};
}

// Where there are few tiles for many threads, threads share the splits of a tile. Its parts are one split each, or, where so many
// results would take more than `kPartialBytes` a thread, the first part is longer: it has its splits merged when it is done. In
// both ways splits are merged one by one, in order: a row gets the same result bit for bit.
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
    for (size_t i = 0; i < work.num_whole; i++) {  // first parts, and what stays whole: the longest work comes first
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

class Space {  // of one thread, kept from call to call; what it holds is not set to anything
  public:
    float* at_least(int64_t count) {
        if (size_ < count) {
            floats_.reset();  // before there is more
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
