// Mixtures of experts. Three functions compute a layer: the first chooses the experts of each row, the second multiplies the rows by
// the weights of their experts, and the third adds the results of each row. The formulas are in kernels/expert_choice.py.
//
// The second function sorts the pairs (row, expert) by expert. Then it computes all chosen experts together: first the products with
// gate and up, and after them the products with down. It multiplies each result by the weight of its pair and writes it to the place
// of the pair. The tasks of many experts are in one list. So a thread that has finished its part of one expert goes on with the next
// expert, and does not wait for other threads. No row is padded. If no row has chosen an expert, its weights are not read.
//
// A row's result is the same bit for bit, whatever the other rows are. This holds for the products (linear.cpp), and the results of a
// row are added in the order of its choices.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "experts.h"
#include "linear_product.h"
#include "threads.h"

namespace {

constexpr int64_t kParallelElements = 1 << 13;  // with fewer, waking the other threads takes longer than their work
constexpr int64_t kPairsAtOnce = 2048;          // the most pairs of several experts that are computed together; bounds their memory

struct Choice {  // int32 [., 2] in Python
    int32_t expert;
    float weight;
};

// -- the router -------------------------------------------------------------------------------------------------------

// Writes the scores of `logits` [count]. Both arrays have room for whole vectors.
void write_scores(const ExpertRouter& router, const float* logits, int64_t count, float* scores) {
    if (router.scoring == 2) {
        std::copy(logits, logits + count, scores);
        return;
    }
    const bool is_softmax = router.scoring == 0;
    float largest_logit = logits[0];
    for (int64_t i = 1; i < count; i++) largest_logit = std::max(largest_logit, logits[i]);
    for (int64_t i = 0; i < count; i += kLanes) {
        const VecF x = load(logits + i);
        store(scores + i, is_softmax ? exponential(sub(x, splat(largest_logit))) : sigmoid(x));
    }
    if (!is_softmax) return;
    float total = 0;
    for (int64_t i = 0; i < count; i++) total += scores[i];
    for (int64_t i = 0; i < count; i++) scores[i] /= total;
}

float sigmoid_of(float x) {
    alignas(64) float lanes[kLanes];
    store(lanes, sigmoid(splat(x)));
    return lanes[0];
}

// Returns the index of the highest score that is not taken: of equal scores, the first one. At least one must not be taken.
int64_t find_highest(const float* scores, const bool* is_taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!is_taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
    return best;
}

float score_of_group(const ExpertRouter& router, const float* scores, int64_t size) {
    float highest = scores[0], second = -std::numeric_limits<float>::infinity();
    for (int64_t i = 1; i < size; i++) {
        second = std::max(second, std::min(highest, scores[i]));
        highest = std::max(highest, scores[i]);
    }
    return router.group_scoring == 0 ? highest : highest + second;
}

// Marks the experts of all groups that are not chosen as taken, so that none of them is chosen.
void take_other_groups(const ExpertRouter& router, const float* scores, bool* is_taken) {
    const int64_t num_groups = router.num_groups, size = router.num_experts / num_groups;
    float of_group[kMostExperts];
    bool is_chosen[kMostExperts] = {};
    for (int64_t group = 0; group < num_groups; group++)
        of_group[group] = score_of_group(router, scores + group * size, size);
    for (int64_t place = 0; place < router.top_groups; place++)
        is_chosen[find_highest(of_group, is_chosen, num_groups)] = true;
    for (int64_t i = 0; i < router.num_experts; i++) is_taken[i] = !is_chosen[i / size];
}

// Returns the weight of the expert `best` by the sparse mixer: see `RouterSpec`. `is_taken`: the experts that were chosen before.
float mixer_weight(const ExpertRouter& router, const float* logits, const bool* is_taken, int64_t best) {
    float total = 0;
    for (int64_t i = 0; i < router.num_experts; i++) {
        const float distance = (logits[best] - logits[i]) / std::max(std::abs(logits[i]), logits[best]);
        if (!is_taken[i] && !(distance > 2 * router.jitter)) total += std::exp(logits[i] - logits[best]);
    }
    return 1 / total;
}

void choose(const ExpertRouter& router, const float* given, Choice* choices) {
    alignas(64) float logits[kMostExperts + kLanes] = {}, scores[kMostExperts + kLanes];
    float for_choice[kMostExperts];
    bool is_taken[kMostExperts] = {};
    const int64_t count = router.num_experts;
    std::copy(given, given + count, logits);
    write_scores(router, logits, count, scores);
    for (int64_t i = 0; i < count; i++) for_choice[i] = router.choice_bias ? scores[i] + router.choice_bias[i] : scores[i];
    const auto is_nan = [](float number) { return std::isnan(number); };
    // no model chooses by such numbers: the logits of its request shall be NaN, so that it fails, alone
    const bool is_undefined = std::any_of(for_choice, for_choice + count, is_nan) ||
                              std::any_of(logits, logits + count, is_nan) || std::isinf(*std::max_element(logits, logits + count));
    if (router.num_groups > 1) take_other_groups(router, for_choice, is_taken);
    float total = 0;
    for (int64_t place = 0; place < router.top_k; place++) {
        const int64_t best = find_highest(for_choice, is_taken, count);
        const float weight = router.scoring == 2 ? mixer_weight(router, scores, is_taken, best) : scores[best];
        is_taken[best] = true;
        choices[place] = {static_cast<int32_t>(best), weight};
        total += weight;
    }
    for (int64_t place = 0; place < router.top_k; place++) {
        if (router.renormalizes) choices[place].weight /= total + router.sum_offset;
        choices[place].weight *= router.scale;
        if (router.expert_scale) choices[place].weight *= router.expert_scale[choices[place].expert];
        if (is_undefined) choices[place].weight = std::numeric_limits<float>::quiet_NaN();
    }
    const float weight = router.num_shared > 0 && router.has_shared_gate ? sigmoid_of(given[count]) : 1.0f;
    for (int64_t part = 0; part < router.num_shared; part++)
        choices[router.top_k + part] = {static_cast<int32_t>(count + part), weight};
}

// -- which rank computes what -------------------------------------------------------------------------------------------

// If several ranks have an expert, its pairs are divided among them in blocks: the experts with the most blocks first, and each block
// goes to the rank that has the fewest. All ranks see the pairs of all rows, so all find the same. A block is as large as
// the number of rows for which reading the weights takes about as long as the products: a smaller part would only read them twice.
constexpr int64_t kBlock = 16;

struct Shares {
    std::vector<int64_t> first, end;  // of each routed expert: the pairs that this rank computes, in the order of the rows
    std::vector<int64_t> counts;      // of each routed expert: its pairs

    void count(const Choice* choices, const std::vector<ExpertRows>& parts, const Experts& layer) {
        const int64_t per_row = layer.choices_per_row;
        counts.assign(layer.num_routed, 0);
        for (const ExpertRows& part : parts)
            for (int64_t i = part.first * per_row; i < (part.first + part.num_rows) * per_row; i++)
                if (choices[i].expert < layer.num_routed) counts[choices[i].expert]++;
    }

    // Counts the pairs, and divides them. Adds to what `balance` counts.
    void divide(const ExpertHolders& holders, ExpertBalance& balance) {
        const int64_t num_ranks = holders.num_ranks, num_experts = counts.size();
        blocks.assign(num_ranks, 0);
        first.assign(num_experts, 0);
        end.assign(num_experts, 0);
        shared.clear();
        for (int64_t expert = 0; expert < num_experts; expert++) {
            if (counts[expert] == 0) continue;
            balance.pairs[expert] += counts[expert];
            const uint8_t* const has = holders.of_expert + expert * num_ranks;
            const int64_t only = std::find(has, has + num_ranks, 1) - has;
            if (std::find(has + only + 1, has + num_ranks, 1) != has + num_ranks) {
                shared.push_back(expert);
                continue;
            }
            blocks[only] += num_blocks(expert);
            if (only == holders.rank) end[expert] = counts[expert];
        }
        std::stable_sort(shared.begin(), shared.end(), [&](int64_t one, int64_t other) { return num_blocks(one) > num_blocks(other); });
        for (const int64_t expert : shared) divide_one(expert, holders);
        int64_t total = 0;
        for (const int64_t of_rank : blocks) total += of_rank;
        balance.num_blocks += total;
        balance.busiest_blocks += *std::max_element(blocks.begin(), blocks.end());
    }

private:
    std::vector<int64_t> blocks, given, shared;

    int64_t num_blocks(int64_t expert) const { return (counts[expert] + kBlock - 1) / kBlock; }

    void divide_one(int64_t expert, const ExpertHolders& holders) {
        const uint8_t* const has = holders.of_expert + expert * holders.num_ranks;
        given.assign(holders.num_ranks, 0);
        for (int64_t block = num_blocks(expert); block > 0; block--) {
            int64_t best = -1;
            for (int64_t rank = 0; rank < holders.num_ranks; rank++)
                if (has[rank] && (best < 0 || blocks[rank] < blocks[best])) best = rank;
            blocks[best]++;
            given[best]++;
        }
        int64_t start = 0;
        for (int64_t rank = 0; rank < holders.rank; rank++) start += given[rank];
        first[expert] = std::min(start * kBlock, counts[expert]);
        end[expert] = std::min((start + given[holders.rank]) * kBlock, counts[expert]);
    }
};

// -- the products -----------------------------------------------------------------------------------------------------

struct Pairs {  // (row, expert), sorted by expert
    std::vector<int32_t> rows;     // the row of each pair in the hidden states
    std::vector<int32_t> places;   // the row of each pair in the results
    std::vector<float> weights;    // the weight of each pair
    std::vector<int64_t> starts;   // the first pair of each expert, and at the end the number of pairs
    std::vector<int64_t> passed;   // the pairs of each expert that `sort` has seen

    // Only the pairs that this rank computes: those of experts that it has or, with `shares`, its share of them. The shared expert of
    // a rank is only for the rows of its own replica.
    void sort(const Choice* choices, const std::vector<ExpertRows>& parts, const Experts& layer, const Shares* shares) {
        const int64_t per_row = layer.choices_per_row;
        const auto each_pair = [&](const auto& body) {
            if (shares) passed.assign(layer.num_routed, 0);
            for (const ExpertRows& part : parts)
                for (int64_t i = part.first * per_row; i < (part.first + part.num_rows) * per_row; i++) {
                    const int32_t expert = choices[i].expert;
                    if (shares && expert < layer.num_routed) {
                        const int64_t at = passed[expert]++;
                        if (at >= shares->first[expert] && at < shares->end[expert]) body(i, expert);
                    } else if (layer.gate_up[expert].packed && (part.is_own || expert < layer.num_routed)) {
                        body(i, expert);
                    }
                }
        };
        starts.assign(layer.num_experts + 2, 0);  // at first, starts[expert + 2] counts the pairs of an expert
        each_pair([&](int64_t, int32_t expert) { starts[expert + 2]++; });
        for (int64_t expert = 0; expert < layer.num_experts; expert++) starts[expert + 2] += starts[expert + 1];
        rows.resize(starts.back());
        places.resize(starts.back());
        weights.resize(starts.back());
        each_pair([&](int64_t i, int32_t expert) {
            const int64_t at = starts[expert + 1]++;
            rows[at] = static_cast<int32_t>(i / per_row);
            places[at] = static_cast<int32_t>(i);
            weights[at] = choices[i].weight;
        });
    }
};

struct Memory {  // the calling thread keeps it from call to call
    Shares shares;
    Pairs pairs;
    RowMemory rows;
    std::vector<char> inner;  // the results of gates, which are the inputs of the products with down
    std::vector<Product> products;
    // The rows of all products are counted through, and so are their tasks. This is where those of each product end.
    std::vector<int64_t> row_ends, task_ends;
};

// Returns the index of the product that has item `at`. `ends`: where the items of each product end.
int64_t find(const std::vector<int64_t>& ends, int64_t at) {
    return std::upper_bound(ends.begin(), ends.end(), at) - ends.begin();
}

// [first, end) is a range of the items of all products. For each product that has items in it, calls body(product, first, end) with
// the range of these items, counted from the first item of the product.
template <typename Body>
void each_part(const std::vector<int64_t>& ends, int64_t first, int64_t end, const Body& body) {
    for (int64_t product = find(ends, first); first < end; product++) {
        const int64_t start = product == 0 ? 0 : ends[product - 1], stop = std::min(end, ends[product]);
        body(product, first - start, stop - start);
        first = stop;
    }
}

// Computes all products in `memory.products`.
void compute(Memory& memory) {
    const std::vector<Product>& products = memory.products;
    int64_t num_rows = 0, num_tasks = 0, work = 0;
    bool is_stream = true;
    memory.row_ends.clear();
    memory.task_ends.clear();
    for (const Product& product : products) {
        memory.row_ends.push_back(num_rows += product.num_rows());
        memory.task_ends.push_back(num_tasks += product.num_tasks());
        work += product.num_multiplications();
        is_stream &= product.is_stream();
    }
    const bool is_shared = work >= kParallelWork;
    const std::vector<int64_t>&row_ends = memory.row_ends, &task_ends = memory.task_ends;
    const auto needs_arranging = [](const Product& product) { return product.needs_arranging(); };
    if (std::any_of(products.begin(), products.end(), needs_arranging))
        share_each(num_rows, is_shared, [&](int64_t row) {
            const int64_t index = find(row_ends, row);
            const Product& product = products[index];
            if (product.needs_arranging()) product.arrange(row - (row_ends[index] - product.num_rows()));
        });
    share(num_tasks, is_shared, is_stream ? num_tasks : 1, [&](int64_t first, int64_t end) {
        each_part(task_ends, first, end, [&](int64_t index, int64_t from, int64_t to) { products[index].compute(from, to); });
    });
}

// Computes the experts [first, end). Some of them may have no pairs.
void compute_experts(
    const char* x, int64_t x_stride, float* results, const Experts& layer, int64_t first, int64_t end, Memory& memory) {
    const Pairs& pairs = memory.pairs;
    const int64_t element = layer.dtype == kFloat32 ? sizeof(float) : sizeof(bf16);
    const int64_t start = pairs.starts[first], inner_bytes = layer.inner_size * element;
    const int64_t num_pairs = pairs.starts[end] - start;
    memory.inner.resize(std::max<size_t>(memory.inner.size(), num_pairs * inner_bytes));
    const auto multiply = [&](const LinearWeight* weights, const auto& call_of) {
        memory.rows.reserve(num_pairs, weights + first, end - first);
        memory.products.clear();
        for (int64_t expert = first; expert < end; expert++) {
            const int64_t at = pairs.starts[expert], count = pairs.starts[expert + 1] - at;
            if (count > 0) memory.products.emplace_back(call_of(weights[expert], at, count), memory.rows.from(at - start));
        }
        compute(memory);
    };
    const auto inner = [&](int64_t at) { return memory.inner.data() + (at - start) * inner_bytes; };
    multiply(layer.gate_up, [&](const LinearWeight& weight, int64_t at, int64_t count) {
        return Call{x, x_stride * element, layer.dtype, inner(at), layer.inner_size, layer.dtype, count, weight, pairs.rows.data() + at};
    });
    multiply(layer.down, [&](const LinearWeight& weight, int64_t at, int64_t count) {
        return Call{
            inner(at), inner_bytes, layer.dtype, reinterpret_cast<char*>(results), layer.hidden_size, kFloat32, count, weight,
            nullptr, pairs.places.data() + at, pairs.weights.data() + at};
    });
}

// Adds `count` columns of the results of one row.
template <typename T>
void add_results(const float* results, int64_t per_row, int64_t size, int64_t count, T* out) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        VecF total = load(results + i);
        for (int64_t place = 1; place < per_row; place++) total = add(total, load(results + place * size + i));
        store(out + i, total);
    }
    for (; i < count; i++) {
        float total = results[i];
        for (int64_t place = 1; place < per_row; place++) total += results[place * size + i];
        out[i] = from_float<T>(total);
    }
}

}  // namespace

void multiply_experts(
    const void* x, int64_t x_stride, const void* choices, float* out, const std::vector<ExpertRows>& parts, const Experts& layer,
    const ExpertHolders& holders) {
    static thread_local Memory memory;  // all threads use that of the caller, because the products point to it
    const Choice* const all = static_cast<const Choice*>(choices);
    if (holders.of_expert) {
        memory.shares.count(all, parts, layer);
        memory.shares.divide(holders, *layer.balance);
    }
    memory.pairs.sort(all, parts, layer, holders.of_expert ? &memory.shares : nullptr);
    const std::vector<int64_t>& starts = memory.pairs.starts;
    for (int64_t first = 0; first < layer.num_experts;) {
        int64_t end = first + 1;
        while (end < layer.num_experts && starts[end + 1] - starts[first] <= kPairsAtOnce) end++;
        if (starts[end] > starts[first])
            compute_experts(static_cast<const char*>(x), x_stride, out, layer, first, end, memory);
        first = end;
    }
}

void add_experts(
    const float* results, int64_t per_row, int64_t size, int64_t first, int64_t count, char* out, int32_t dtype) {
    if (dtype == kFloat32)
        add_results(results + first, per_row, size, count, reinterpret_cast<float*>(out) + first);
    else
        add_results(results + first, per_row, size, count, reinterpret_cast<bf16*>(out) + first);
}

extern "C" {

void inflight_choose_experts(
    const float* logits, int64_t logits_stride, void* out, int64_t num_rows, const ExpertRouter* router) {
    const int64_t per_row = router->top_k + router->num_shared;
    share_each(num_rows, num_rows * router->num_experts * router->top_k >= kParallelElements, [&](int64_t row) {
        choose(*router, logits + row * logits_stride, static_cast<Choice*>(out) + row * per_row);
    });
}

void inflight_experts(
    const void* x, int64_t x_stride, const void* choices, float* out, int64_t num_rows, const Experts* layer) {
    multiply_experts(x, x_stride, choices, out, {{0, num_rows, true}}, *layer, {nullptr, 1, 0});
}

void inflight_add_experts(
    const float* results, void* out, int64_t num_rows, int64_t per_row, int64_t size, int32_t dtype) {
    share_each(num_rows, num_rows * per_row * size >= 2 * kParallelElements, [&](int64_t row) {
        const int64_t element = dtype == kFloat32 ? sizeof(float) : sizeof(bf16);
        add_experts(results + row * per_row * size, per_row, size, 0, size, static_cast<char*>(out) + row * size * element, dtype);
    });
}
}
