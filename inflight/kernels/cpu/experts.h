// What experts.cpp computes, for expert_exchange.cpp.
#pragma once

#include <vector>

#include "kernels.h"

struct ExpertRows {  // some rows, one behind the other
    int64_t first;
    int64_t num_rows;
    bool is_own;  // of this rank's replica
};

struct ExpertHolders {  // which ranks have which experts, as in `ExpertBalance`
    const uint8_t* of_expert;      // [routed experts, num_ranks]; null: this rank computes the experts that it has
    int64_t num_ranks;
    int64_t rank;
};

// As inflight_experts, for the rows in `parts` and the experts that this rank has. The others' places in `out` stay as they are.
void multiply_experts(
    const void* x, int64_t x_stride, const void* choices, float* out, const std::vector<ExpertRows>& parts, const Experts& layer,
    const ExpertHolders& holders);

// As inflight_add_experts, for one row, and for the columns [first, first + count) of it.
void add_experts(
    const float* results, int64_t per_row, int64_t size, int64_t first, int64_t count, char* out, int32_t dtype);
