// How a kernel divides its work among the threads of the caller's pool.
#pragma once

#include <cstdint>

#include "parts.h"
#include "team.h"

// The threads of the caller's pool, itself included.
int max_threads();

// Computes `work` on the calling thread. Meanwhile the other threads of its pool wait for tasks of `parallel`.
void with_team(const TeamTask& work);

// Computes a task on the calling thread, and if `is_shared` also on the other threads of its pool that have the time: see
// `Team::lead`. Inside a task it computes on the calling thread alone.
void parallel(bool is_shared, const TeamTask& task);

// Calls body(first, end) for ranges that together are [0, count). Each thread goes through a part of the numbers from first to
// last, and then takes from others' parts: see parts.h. No range has more than `most` numbers.
template <typename Body>
void share(int64_t count, bool is_shared, int64_t most, const Body& body) {
    Parts parts(count, is_shared ? max_threads() : 1);
    parallel(is_shared, [&] { parts.take(most, body); });
}

// Calls body(i) for each i in [0, count), which all take equally long. There is one range for each thread: neighbours may write to
// the same cache lines.
template <typename Body>
void share_each(int64_t count, bool is_shared, const Body& body) {
    const int64_t num_ranges = is_shared ? max_threads() : 1;
    share(num_ranges, is_shared, 1, [&](int64_t range, int64_t) {
        for (int64_t i = range * count / num_ranges; i < (range + 1) * count / num_ranges; i++) body(i);
    });
}
