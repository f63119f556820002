// [0, count) in parts, one for each thread of a team. Threads take ranges of them until nothing is left.
//
// A thread takes the ranges of its own part from first to last, so that it reads memory from front to back. After a jump
// to another place it would wait for the memory, up to a microsecond. Its ranges are short compared to its part. So if a thread
// is late, or is stopped, the others do its work: one that has finished its part takes ranges from the ends of other parts.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

class Parts {
  public:
    // `count`: at most 2^32 - 1.
    Parts(int64_t count, int64_t num_threads)
        : num_parts_(std::max<int64_t>(1, std::min({count, num_threads, kMostParts}))) {
        for (int64_t i = 0; i < num_parts_; i++)
            parts_[i].range.store(packed(i * count / num_parts_, (i + 1) * count / num_parts_), std::memory_order_relaxed);
    }

    // Each thread calls this. It calls body(first, end) for ranges of at most `most` numbers.
    template <typename Body>
    void take(int64_t most, const Body& body) {
        int64_t part;
        while ((part = next_part_.fetch_add(1, std::memory_order_relaxed)) < num_parts_)
            while (take_range(parts_[part], true, most, body)) {}
        for (int64_t i = 0; i < num_parts_; i++)  // from different parts on, so that threads do not meet
            while (take_range(parts_[(part + i) % num_parts_], false, most, body)) {}
    }

  private:
    struct alignas(64) Part {
        std::atomic<uint64_t> range;  // where it begins and, in the lower half, where it ends
    };

    static uint64_t packed(int64_t first, int64_t end) {
        return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(end);
    }

    // Takes some numbers of the part, from its beginning or its end. Returns false if nothing is left.
    template <typename Body>
    static bool take_range(Part& part, bool is_own, int64_t most, const Body& body) {
        uint64_t range = part.range.load(std::memory_order_relaxed);
        for (;;) {
            const int64_t first = range >> 32, end = range & UINT32_MAX, left = end - first;
            if (left == 0) return false;
            const int64_t count = std::max<int64_t>(1, std::min(most, left / (is_own ? kOwnShare : kOthersShare)));
            const uint64_t rest = is_own ? packed(first + count, end) : packed(first, end - count);
            if (!part.range.compare_exchange_weak(range, rest, std::memory_order_relaxed)) continue;
            if (is_own)
                body(first, first + count);
            else
                body(end - count, end);
            return true;
        }
    }

    static constexpr int64_t kMostParts = 64;                  // with more threads, some have none, and take from the others'
    static constexpr int64_t kOwnShare = 8, kOthersShare = 2;  // a range is such a share of what is left of the part

    const int64_t num_parts_;
    alignas(64) std::atomic<int64_t> next_part_{0};
    Part parts_[kMostParts];
};
