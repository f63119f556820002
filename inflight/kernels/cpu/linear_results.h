// What becomes of the sums of a product before they are stored: scales, the bias, factors, and the gate or the activation.
#pragma once

#include "linear_product.h"

// Stores the results of `num_rows` rows and one panel, from `sums` [num_rows][kPanel]. `first_row`: of the rows in the call.
// `scales`: of the rows, if the weight is of integers.
void finish(const Call& call, const float* scales, int64_t first_row, int64_t num_rows, int64_t panel, const float* sums);
