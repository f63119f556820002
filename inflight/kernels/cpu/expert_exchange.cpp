// Layers with experts that are divided among ranks (expert parallelism). The ranks are those of one or several replicas. A replica is
// a group of tensor-parallel ranks, which all have the same rows. Each rank computes its own experts, for the rows of all replicas.
//
// The rows are exchanged through memory that all ranks map. In each round up to `chunk_rows` rows of each replica are computed:
//
//     1. with several replicas: each replica writes how many rows it has, the rows and their choices; then all ranks meet
//     2. each rank multiplies the rows of all replicas by its experts. It writes each result to the place that the choice has in its
//        row; then all ranks meet
//     3. the ranks of a replica add the results of their rows, in the order of the choices. With several ranks each adds some of the
//        columns; then all ranks meet, and each copies the sums of all columns
//
// So a row's sum is the same bit for bit, whichever ranks have its experts and whatever other rows there are.
//
// No rank writes what another one still reads: rows are read before the second meeting and written after it, results are read before
// the next meeting and written after it, and sums are read before the next second meeting and written after it.
//
// The shared expert is divided among the ranks of a replica as a dense MLP is. Each part has a place of its own behind the choices.
//
// With several replicas, several ranks may have an expert (`ExpertBalance`). experts.cpp divides its rows among them. Which ranks have
// which experts may change between two steps. Before the first meeting each rank writes for which holders it is ready, and from then
// on all read what all have written. If all are ready for the same ones, all use them in this call. So no two ranks ever
// use different holders in one call, whenever each of them became ready.
#include <algorithm>
#include <cstring>
#include <vector>

#include "experts.h"
#include "meet.h"
#include "simd.h"
#include "threads.h"

namespace {

constexpr int64_t kParallelBytes = 1 << 16;  // with fewer, waking the other threads takes longer than their work

struct Round {
    const ExpertExchange& exchange;
    const Experts& layer;
    int64_t element, row_bytes, choices_bytes;

    Round(const ExpertExchange& exchange, const Experts& layer) : exchange(exchange), layer(layer) {
        element = layer.dtype == kFloat32 ? sizeof(float) : sizeof(bf16);
        row_bytes = layer.hidden_size * element;
        choices_bytes = layer.choices_per_row * 8;
    }

    int64_t* counts() const { return reinterpret_cast<int64_t*>(exchange.memory); }
    int64_t* ready() const { return counts() + exchange.num_replicas; }  // of each rank
    int64_t num_ranks() const { return exchange.num_replicas * exchange.tp_size; }
    int64_t rank() const { return exchange.replica * exchange.tp_size + exchange.tp_rank; }
    int64_t own_first() const { return exchange.replica * exchange.chunk_rows; }
    char* inputs() const { return exchange.memory + exchange.inputs_at; }
    char* choices() const { return exchange.memory + exchange.choices_at; }
    char* sums() const { return exchange.memory + exchange.sums_at; }
    float* results() const { return reinterpret_cast<float*>(exchange.memory + exchange.results_at); }

    // Writes this rank's share of the rows of its replica.
    void give(const char* x, int64_t x_stride, const char* from, int64_t num_rows) const {
        const int64_t first = num_rows * exchange.tp_rank / exchange.tp_size;
        const int64_t end = num_rows * (exchange.tp_rank + 1) / exchange.tp_size;
        share_each(end - first, (end - first) * row_bytes >= kParallelBytes, [&](int64_t i) {
            const int64_t row = first + i, place = own_first() + row;
            std::memcpy(inputs() + place * row_bytes, x + row * x_stride * element, row_bytes);
            std::memcpy(choices() + place * choices_bytes, from + row * choices_bytes, choices_bytes);
        });
    }

    // Which ranks have which experts in this call. Called after the first meeting.
    ExpertHolders agree(ExpertBalance& balance) const {
        const int64_t wanted = ready()[0];
        balance.is_agreed = wanted != 0;
        for (int64_t each = 1; each < num_ranks(); each++) balance.is_agreed &= ready()[each] == wanted;
        return {balance.holders + (balance.is_agreed ? layer.num_routed * num_ranks() : 0), num_ranks(), rank()};
    }

    // Adds the results of the columns [first, first + count) of the rows of this rank's replica. `out`: [num_rows, hidden_size].
    void add(int64_t num_rows, int64_t first, int64_t count, char* out) const {
        const int64_t per_row = layer.choices_per_row, size = layer.hidden_size;
        const float* const own = results() + own_first() * per_row * size;
        share_each(num_rows, num_rows * per_row * count * 4 >= kParallelBytes, [&](int64_t row) {
            add_experts(own + row * per_row * size, per_row, size, first, count, out + row * row_bytes, layer.dtype);
        });
    }
};

}  // namespace

extern "C" int32_t inflight_exchange_experts(
    const void* x, int64_t x_stride, const void* choices, void* out, int64_t num_rows, const Experts* layer,
    const ExpertExchange* exchange) {
    const Round round(*exchange, *layer);
    const bool is_alone = exchange->num_replicas == 1;
    std::vector<ExpertRows> parts;
    ExpertHolders holders{nullptr, 1, 0};
    for (int64_t start = 0, most = num_rows; start < most || (start == 0 && !is_alone); start += exchange->chunk_rows) {
        const int64_t count = std::clamp<int64_t>(num_rows - start, 0, exchange->chunk_rows);
        const char* rows = static_cast<const char*>(x) + start * x_stride * round.element;
        const char* chosen = static_cast<const char*>(choices) + start * round.choices_bytes;
        int64_t stride = x_stride;
        parts.assign(1, {0, count, true});
        if (!is_alone) {
            if (exchange->tp_rank == 0) round.counts()[exchange->replica] = num_rows;
            if (layer->balance) round.ready()[round.rank()] = layer->balance->is_ready_for;
            round.give(rows, x_stride, chosen, count);
            if (const int32_t cause = meet(exchange->group)) return cause;
            if (layer->balance) holders = round.agree(*layer->balance);
            rows = round.inputs();
            chosen = round.choices();
            stride = layer->hidden_size;
            parts.clear();
            for (int32_t replica = 0; replica < exchange->num_replicas; replica++) {
                const int64_t its_rows = round.counts()[replica];
                most = std::max(most, its_rows);
                const int64_t its_count = std::clamp<int64_t>(its_rows - start, 0, exchange->chunk_rows);
                parts.push_back({replica * exchange->chunk_rows, its_count, replica == exchange->replica});
            }
        }
        multiply_experts(rows, stride, chosen, round.results(), parts, *layer, holders);
        if (const int32_t cause = meet(exchange->group)) return cause;
        char* const of_chunk = static_cast<char*>(out) + start * round.row_bytes;
        if (exchange->tp_size == 1) {
            round.add(count, 0, layer->hidden_size, of_chunk);
            continue;
        }
        char* const sums = round.sums() + round.own_first() * round.row_bytes;
        const int64_t first = layer->hidden_size * exchange->tp_rank / exchange->tp_size;
        const int64_t end = layer->hidden_size * (exchange->tp_rank + 1) / exchange->tp_size;
        round.add(count, first, end - first, sums);
        if (const int32_t cause = meet(exchange->group)) return cause;
        std::memcpy(of_chunk, sums, count * round.row_bytes);
    }
    return 0;
}
