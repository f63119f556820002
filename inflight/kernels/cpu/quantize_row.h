// Rows of activations as integers of 8 bits, for the products with integer weights (linear.cpp).
//
// A row is quantised symmetrically, with one scale. If the scale came from the largest number of all, a few large numbers would
// spoil the others: trained models have input features a hundred times as large as the rest, which would then become 0. So the
// *outliers* of a row are kept as floats. They are 0 among the integers, and the scale comes from the largest number of the rest.
//
// A number is an outlier if its magnitude is above a threshold. The threshold is found in two steps. Features are dealt to 64
// buckets, and the limit is a multiple of a typical large magnitude of the row, which a few outliers do not change: about the
// median of the buckets' largest numbers. The threshold is the largest number of all buckets whose largest number is not above
// the limit. So it is the largest ordinary number, too, from which the scale comes. Which numbers are outliers depends on the
// row alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "integer.h"

constexpr int kBuckets = 64;
constexpr int kMostOutliers = 32;  // of a row; if there were more, the threshold is raised

struct Outlier {
    int32_t feature;
    float value;
};

struct QuantizedRow {
    float scale;  // what the integers are to be multiplied by; NaN if a number of the row is not finite
    int32_t num_outliers;
};

// How many times the typical large magnitude of a row the limit is. The larger a row is, the closer are the largest numbers of its
// buckets to the largest of all, so the factor falls with the size. With weights of 8 bits, a row of 256 to 14,336 normally
// distributed numbers has about one outlier. (With one scale for all numbers it would have the same error as a row of weights,
// which is too much.) Weights of 4 bits have ten times the error of rows, so only larger numbers matter there.
inline float outlier_factor(int64_t size, int32_t bits) {
    return (bits == 4 ? 2.0f : 1.2f) + 13.0f / std::sqrt(static_cast<float>(size));
}

constexpr int kVectors = kBuckets / kLanes;

// `largest`: the largest magnitude in each bucket. The buckets are taken in 16 groups of four, so that few operations find the
// result: the median of the groups' second or third largest numbers.
inline float typical_magnitude(const VecF (&largest)[kVectors]) {
    constexpr int kGroups = kBuckets / 4, kStep = kVectors / 4;
    alignas(64) float numbers[kGroups];
    VecF middle[kStep];
    for (int k = 0; k < kStep; k++) {
        middle[k] = min(max(largest[k], largest[k + kStep]), max(largest[k + 2 * kStep], largest[k + 3 * kStep]));
        store(numbers + k * kLanes, middle[k]);
    }
    float median = 0;
    for (const float number : numbers) {
        int num_below = 0;
        for (int k = 0; k < kStep; k++) num_below += __builtin_popcount(lanes_above(splat(number), middle[k]));
        median = num_below < kGroups / 2 ? std::max(median, number) : median;
    }
    return median;
}

// The magnitude of which `rank` others of the row are not smaller.
template <typename T>
float magnitude_of_rank(const T* row, int64_t size, int64_t rank) {
    static thread_local std::vector<float> magnitudes;
    magnitudes.resize(size);
    for (int64_t i = 0; i < size; i++) magnitudes[i] = std::fabs(to_float(row[i]));
    std::nth_element(magnitudes.begin(), magnitudes.begin() + rank, magnitudes.end(), std::greater<float>());
    return magnitudes[rank];
}

// Writes `row` [size] times `inverse` as integers. Four integers are a unit; the units are written to to[0], to[step],
// to[2 * step], ... The sum of each group goes to group_sums[0], group_sums[sums_step], ... If kHasOutliers, numbers above `threshold`
// become 0, and the first kMostOutliers of them are written to `outliers`. Returns how many there are.
template <bool kHasOutliers, typename T>
int64_t write_integers(
    const T* row, int64_t size, int64_t group_size, float inverse, float threshold, int64_t step, uint32_t* to,
    int64_t sums_step, int32_t* group_sums, Outlier* outliers) {
    int64_t count = 0;
    const auto keep_outlier = [&](int64_t at) {
        if (count < kMostOutliers) outliers[count] = {static_cast<int32_t>(at), to_float(row[at])};
        count++;
    };
    for (int64_t start = 0; start < size; start += group_size, group_sums += sums_step) {
        VecI sums = splat_int(0);
        int32_t group_sum = 0;
        const int64_t end = start + group_size;
        int64_t i = start;
        for (; i + kLanes <= end; i += kLanes) {
            VecF x = load(row + i);
            if constexpr (kHasOutliers) {
                uint32_t lanes = lanes_above(magnitude(x), splat(threshold));
                if (lanes != 0) x = unless_above(x, splat(threshold));
                for (; lanes != 0; lanes &= lanes - 1) keep_outlier(i + __builtin_ctz(lanes));
            }
            const VecI values = to_int(mul(x, splat(inverse)));
            sums = add(sums, values);
            uint32_t units[kLanes / 4];
            store_as_bytes(units, values);
            for (const uint32_t unit : units) {
                *to = unit;
                to += step;
            }
        }
        for (; i < end; i += 4, to += step) {
            uint32_t unit = 0;
            for (int k = 0; k < 4; k++) {
                const float x = to_float(row[i + k]);
                if (kHasOutliers && std::fabs(x) > threshold) {
                    keep_outlier(i + k);
                    continue;
                }
                const int32_t value = static_cast<int32_t>(std::nearbyint(x * inverse));
                group_sum += value;
                unit |= static_cast<uint32_t>(value & 0xff) << (8 * k);
            }
            *to = unit;
        }
        *group_sums = group_sum + sum(sums);
    }
    return count;
}

// Quantises `row` [size] to integers in [-127, 127], which `write_integers` writes, and outliers.
template <typename T>
QuantizedRow quantize_row(
    const T* row, int64_t size, int64_t group_size, float factor, int64_t step, uint32_t* to, int64_t sums_step,
    int32_t* group_sums, Outlier* outliers) {
    VecF most[kVectors], broken[kVectors];  // `broken` becomes NaN if a number is not finite; then the whole result must be NaN
    for (int k = 0; k < kVectors; k++) most[k] = broken[k] = zero();
    int64_t i = 0;
    for (; i + kBuckets <= size; i += kBuckets) {
#pragma GCC unroll 8
        for (int k = 0; k < kVectors; k++) {
            const VecF x = load(row + i + k * kLanes);
            most[k] = max(most[k], magnitude(x));
            broken[k] = fma(x, zero(), broken[k]);
        }
    }
    alignas(64) float buckets[kBuckets];
    for (int k = 0; k < kVectors; k++) store(buckets + k * kLanes, most[k]);
    for (int k = 1; k < kVectors; k++) broken[0] = add(broken[0], broken[k]);
    float nothing = sum(broken[0]);
    for (; i < std::max<int64_t>(size, kBuckets); i++) {  // a short row is repeated, so that no bucket is empty
        const float x = to_float(row[i % size]);
        buckets[i % kBuckets] = std::max(buckets[i % kBuckets], std::fabs(x));
        nothing += x * 0.0f;
    }
    for (int k = 0; k < kVectors; k++) most[k] = load(buckets + k * kLanes);
    const VecF limit = splat(typical_magnitude(most) * factor);
    VecF all = most[0], ordinary = unless_above(most[0], limit);
    for (int k = 1; k < kVectors; k++) {
        all = max(all, most[k]);
        ordinary = max(ordinary, unless_above(most[k], limit));
    }
    const float largest_value = largest(all);
    float threshold = largest(ordinary);
    if (largest_value == threshold || nothing != 0) {
        const float inverse = largest_value > 0 ? 127.0f / largest_value : 0.0f;
        write_integers<false>(row, size, group_size, inverse, 0, step, to, sums_step, group_sums, nullptr);
        return {largest_value / 127.0f + nothing, 0};
    }
    for (;;) {
        const float range = std::max({threshold, largest_value * 1e-25f, 1e-30f});  // outliers can be divided by the scale
        const int64_t num_outliers = write_integers<true>(
            row, size, group_size, 127.0f / range, threshold, step, to, sums_step, group_sums, outliers);
        if (num_outliers <= kMostOutliers) return {range / 127.0f, static_cast<int32_t>(num_outliers)};
        threshold = magnitude_of_rank(row, size, kMostOutliers);
    }
}
