// The layout of linear weights in memory, which packing and multiplying share.
//
// Output features are divided into panels of kPanel features, two vectors. A panel holds all input features of its output
// features, and is read from its beginning to its end:
//
//     plain     [in_features in units][kPanel] units (a unit is one float or two bfloat16, see simd.h)
//     groups    for each group of input features: [group in units][kPanel] units. With 8 bits a unit is four bytes. With 4 bits
//               it is four pairs of nibbles: the low ones belong to one unit of the group, the high ones to the next. Then
//               kPanel scales, then kPanel offsets if there are any: half-precision, or float if a row is one group. A nibble is
//               an unsigned integer, or a place in the weight's table of 16 signed integers
//
// In a gated weight, a panel's first vector is features of the gate, and its second vector the features that they multiply.
#pragma once

#include "integer.h"
#include "kernels.h"

constexpr int kPanel = 2 * kLanes;

struct PanelLayout {
    int64_t num_panels;
    int64_t panel_bytes;
    int64_t group_bytes;   // of one group in a panel; a plain weight has one group
    int64_t weight_bytes;  // the weights' part of group_bytes
    int64_t num_groups;
    int64_t scale_bytes;   // of one scale or offset

    explicit PanelLayout(const LinearWeight& weight) {
        const int64_t columns = weight.gate ? weight.out_features / 2 : weight.out_features;
        const int64_t width = weight.gate ? kLanes : kPanel;
        num_panels = (columns + width - 1) / width;
        num_groups = weight.in_features / weight.group_size;
        weight_bytes = weight.group_size * kPanel * weight.bits / 8;
        scale_bytes = num_groups == 1 ? sizeof(float) : sizeof(fp16);
        group_bytes = weight_bytes;
        if (weight.bits <= 8) group_bytes += kPanel * scale_bytes * (weight.has_offsets ? 2 : 1);
        panel_bytes = num_groups * group_bytes;
    }

    // The output feature in a lane of a panel, or -1 for padding.
    static int64_t feature(const LinearWeight& weight, int64_t panel, int lane) {
        if (!weight.gate) {
            const int64_t column = panel * kPanel + lane;
            return column < weight.out_features ? column : -1;
        }
        const int64_t half = weight.out_features / 2, column = panel * kLanes + lane % kLanes;
        return column < half ? column + (lane / kLanes) * half : -1;
    }
};
