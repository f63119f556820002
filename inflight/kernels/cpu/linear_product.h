// A product of a linear layer as tasks, so that several products can share the threads: linear.cpp computes one, experts.cpp many.
#pragma once

#include <vector>

#include "linear.h"

struct Call {
    const char* x;
    int64_t x_stride;  // bytes
    int32_t x_dtype;
    char* out;
    int64_t out_stride;  // elements
    int32_t out_dtype;
    int64_t num_rows;
    const LinearWeight& weight;
    const int32_t* x_rows = nullptr;    // which rows of x are multiplied; null: the first num_rows
    const int32_t* out_rows = nullptr;  // which rows of out get the results; null: the first num_rows
    const float* factors = nullptr;     // what the results of each row are multiplied by; null: they are not
};

struct PlacedOutlier {  // an outlier of a row, with the place of its weights in a panel
    int32_t weights;    // bytes from the panel's beginning to the two vectors that hold them
    int32_t scales;     // and to their group's scales
    int32_t first_bit;  // of its weight in each unit of the vectors
    float value;        // relative to the row's scale
};

struct Rows {  // copied into tiles; a tile's part of an array begins where the rows before the tile end
    uint32_t* units;  // [num_rows * units per row]; within a tile: [unit][row]
    // only if the weight is of integers
    int32_t* group_sums;      // [num_rows * num_groups]; within a tile: [group][row]
    float* scales;            // [num_rows]
    int32_t* num_outliers;    // [num_rows]
    PlacedOutlier* outliers;  // [num_rows][kMostOutliers]
};

struct Tile {
    int64_t first, count;  // rows
};

struct Tiling {
    int64_t num_tiles, base, longer;  // the first `longer` tiles have base + 1 rows

    Tiling(int64_t num_rows, int64_t most) {
        num_tiles = (num_rows + most - 1) / most;
        base = num_rows / num_tiles;
        longer = num_rows % num_tiles;
    }
    Tile at(int64_t i) const { return {i * base + std::min(i, longer), base + (i < longer)}; }
    Tile of_row(int64_t row) const {
        const int64_t in_longer = longer * (base + 1);
        return at(row < in_longer ? row / (base + 1) : longer + (row - in_longer) / base);
    }
};

struct alignas(64) UnitLine {  // a line of the cache, so that no row of a tile crosses two of them
    uint32_t units[16];
};

class RowMemory {  // for the arranged rows of products. A thread keeps it from call to call
  public:
    // Makes room for `num_rows` rows of each of the weights.
    void reserve(int64_t num_rows, const LinearWeight* weights, int64_t num_weights);
    Rows from(int64_t row);

  private:
    int64_t units_per_row_ = 0, groups_per_row_ = 0;
    std::vector<UnitLine> units_;
    std::vector<int32_t> group_sums_;
    std::vector<float> scales_;
    std::vector<int32_t> num_outliers_;
    std::vector<PlacedOutlier> outliers_;
};

class Product {
  public:
    Product(const Call& call, const Rows& memory);

    int64_t num_rows() const { return call_.num_rows; }
    int64_t num_multiplications() const { return call_.num_rows * call_.weight.in_features * call_.weight.out_features; }
    // Whether `arrange` is to be called for each row before the tasks.
    bool needs_arranging() const { return !is_arranged_; }
    void arrange(int64_t row) const;

    // Each task is about as long as any other. Neighbouring tasks read neighbouring memory, if `is_stream`.
    int64_t num_tasks() const { return num_tasks_; }
    bool is_stream() const { return num_row_cuts_ == 1; }
    void compute(int64_t first_task, int64_t end_task) const;

  private:
    void multiply(int64_t first_tile, int64_t end_tile, int64_t first, int64_t end) const;

    Call call_;
    PanelLayout layout_;
    bool uses_tiles_;  // of AMX, see linear_tiles.h
    Tiling tiling_;
    int64_t row_units_;  // of a row when it is arranged
    Rows rows_;
    bool is_arranged_;
    int64_t tiles_at_once_, num_row_cuts_, panels_at_once_, num_tasks_;
};

constexpr int64_t kParallelWork = 1 << 17;  // with fewer multiplications, one thread is faster
