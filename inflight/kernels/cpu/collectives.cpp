// Collectives between processes of one machine, through memory that all of them map. The memory, zero at the beginning:
//
//     offset 0                kHeaderBytes for the caller, then the cause of the end, then one line for each rank
//     offset kSlotsOffset     slots: [2, size, piece_bytes]
//
// A tensor is exchanged in pieces of at most `piece_bytes`. Every rank publishes each piece:
//
//     1. it writes the piece into its slot, and adds 2 to the counter in its line
//     2. it waits until the counters of all ranks have this value
//     3. it reads the slots of all ranks
//
// Pieces use the two rows of slots in turn. A rank that writes piece k + 2 has seen that all ranks have published piece k + 1, so
// no rank still reads piece k from the row. One wait for each piece is enough.
//
// Bit 0 of every counter is set when a rank leaves. A counter that has reached the value a rank waits for counts nevertheless: its
// piece is complete. Bit 0 changes the counter, so a rank that is about to sleep on it does not fall asleep.
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>

#include "kernels.h"
#include "simd.h"
#include "team.h"

namespace {

constexpr int64_t kHeaderBytes = 64;
constexpr int64_t kSlotsOffset = 16384;
constexpr int64_t kLineBytes = 128;  // two cache lines, because processors fetch them in pairs
constexpr int32_t kMaxRanks = (kSlotsOffset - kLineBytes) / kLineBytes;

// A rank that waits first spins, then sleeps. Ranks may have to share a core, with each other or with other programs, and the rank
// that others wait for must get it. To yield the core between two looks would give it to another program for milliseconds.
constexpr int64_t kSpinNs = 50'000;
constexpr int64_t kSleepNs = 10'000'000;  // a sleeping rank looks so often whether a peer has died

struct Line {
    std::atomic<uint32_t> counter;
    std::atomic<int32_t> num_sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Line) == 8);

char* memory_of(const RankGroup* group) { return static_cast<char*>(group->memory); }

std::atomic<int32_t>& cause_of_end(const RankGroup* group) {
    return *reinterpret_cast<std::atomic<int32_t>*>(memory_of(group) + kHeaderBytes);
}

Line& line_of(const RankGroup* group, int32_t rank) {
    return *reinterpret_cast<Line*>(memory_of(group) + (rank + 1) * kLineBytes);
}

char* slot_of(const RankGroup* group, int32_t rank) {
    const int64_t row = group->num_pieces & 1;
    return memory_of(group) + kSlotsOffset + (row * group->size + rank) * group->piece_bytes;
}

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void wake(Line& line) { syscall(SYS_futex, &line.counter, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Let every wait in the group fail, now and later. Returns the first cause of the end, which may be an older one.
int32_t end_group(const RankGroup* group, int32_t kind, int32_t rank) {
    int32_t cause = 0;
    const int32_t ours = kind | rank << 8;
    if (cause_of_end(group).compare_exchange_strong(cause, ours)) cause = ours;
    for (int32_t i = 0; i < group->size; i++) {
        line_of(group, i).counter.fetch_or(1);
        wake(line_of(group, i));
    }
    return cause;
}

bool has_reached(uint32_t counter, uint32_t wanted) {  // counters may overflow
    return static_cast<int32_t>((counter & ~1u) - wanted) >= 0;
}

// The rank of a process that has ended, or -1.
int32_t find_dead(const RankGroup* group) {
    pollfd peers[kMaxRanks];
    for (int32_t i = 0; i < group->size; i++) peers[i] = pollfd{group->pidfds[i], POLLIN, 0};
    if (poll(peers, group->size, 0) <= 0) return -1;
    for (int32_t i = 0; i < group->size; i++) {
        if (peers[i].revents != 0) return i;
    }
    return -1;
}

// Waits until `peer` has published the pieces up to `wanted`. Returns 0, or the cause of the group's end.
int32_t wait_for(const RankGroup* group, int32_t peer, uint32_t wanted) {
    Line& line = line_of(group, peer);
    const int64_t start = now_ns();
    for (int32_t i = 0;; i++) {
        const uint32_t counter = line.counter.load(std::memory_order_acquire);
        if (has_reached(counter, wanted)) return 0;
        if (counter & 1) return cause_of_end(group).load();
        const int64_t waited = now_ns() - start;
        if (waited < kSpinNs) {
            for (int32_t pause = 0; pause < 8; pause++) pause_briefly();
        } else if (waited > group->timeout_ns) {
            return end_group(group, kSilent, peer);
        } else {
            line.num_sleepers.fetch_add(1);
            const timespec most{0, kSleepNs};
            const bool woken = syscall(SYS_futex, &line.counter, FUTEX_WAIT, counter, &most, nullptr, 0) == 0;
            line.num_sleepers.fetch_sub(1);
            if (woken) continue;
            const int32_t dead = find_dead(group);
            if (dead >= 0 && !has_reached(line.counter.load(), wanted)) return end_group(group, kDead, dead);
        }
    }
}

// Publishes this rank's slot and waits until all ranks have published theirs. Returns 0, or the cause of the group's end.
int32_t publish(RankGroup* group) {
    Line& own = line_of(group, group->rank);
    const uint32_t wanted = 2 * (group->num_pieces + 1);
    own.counter.fetch_add(2);
    if (own.num_sleepers.load() > 0) wake(own);
    int32_t cause = 0;
    for (int32_t i = 0; i < group->size && cause == 0; i++) {
        if (i == group->rank || has_reached(line_of(group, i).counter.load(std::memory_order_acquire), wanted)) continue;
        __atomic_store_n(&group->is_waiting, 1, __ATOMIC_RELAXED);
        cause = wait_for(group, i, wanted);
        __atomic_store_n(&group->is_waiting, 0, __ATOMIC_RELAXED);
    }
    return cause;
}

// Exchanges `num_bytes` in pieces. `fill(slot, start, size)` writes the bytes [start, start + size) into this rank's slot, and
// `take(start, size)` reads them from the slots of all ranks.
template <typename Fill, typename Take>
int32_t exchange(RankGroup* group, int64_t num_bytes, const Fill& fill, const Take& take) {
    for (int64_t start = 0; start < num_bytes; start += group->piece_bytes) {
        if (line_of(group, group->rank).counter.load() & 1) return cause_of_end(group).load();
        const int64_t size = std::min(group->piece_bytes, num_bytes - start);
        fill(slot_of(group, group->rank), start, size);
        if (const int32_t cause = publish(group)) return cause;
        take(start, size);
        group->num_pieces++;
    }
    return 0;
}

// x = parts[0] + parts[1] + ..., added in float in this order, and rounded once. One of the parts may be x.
template <typename T>
void add_parts(const T* const* parts, int32_t num_parts, T* x, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        VecF total = load(parts[0] + i);
        for (int32_t part = 1; part < num_parts; part++) total = add(total, load(parts[part] + i));
        store(x + i, total);
    }
    if (i == count) return;
    T rest[kLanes] = {};
    VecF total = zero();
    for (int32_t part = 0; part < num_parts; part++) {
        std::memcpy(rest, parts[part] + i, (count - i) * sizeof(T));
        total = part == 0 ? load(rest) : add(total, load(rest));
    }
    store(rest, total);
    std::memcpy(x + i, rest, (count - i) * sizeof(T));
}

template <typename T>
int32_t all_reduce(RankGroup* group, T* x, int64_t count) {
    char* const bytes = reinterpret_cast<char*>(x);
    const auto fill = [&](char* slot, int64_t start, int64_t size) { std::memcpy(slot, bytes + start, size); };
    const auto take = [&](int64_t start, int64_t size) {
        const T* parts[kMaxRanks];
        T* const piece = reinterpret_cast<T*>(bytes + start);
        for (int32_t i = 0; i < group->size; i++) {
            parts[i] = i == group->rank ? piece : reinterpret_cast<const T*>(slot_of(group, i));
        }
        add_parts(parts, group->size, piece, size / static_cast<int64_t>(sizeof(T)));
    };
    return exchange(group, count * sizeof(T), fill, take);
}

}  // namespace

int32_t meet(RankGroup* group) {
    if (line_of(group, group->rank).counter.load() & 1) return cause_of_end(group).load();
    const int32_t cause = publish(group);
    if (cause == 0) group->num_pieces++;
    return cause;
}

extern "C" int64_t inflight_group_memory_bytes(int32_t size, int64_t piece_bytes) {
    return size > kMaxRanks ? 0 : kSlotsOffset + 2 * size * piece_bytes;
}

extern "C" int32_t inflight_all_reduce(RankGroup* group, void* x, int64_t count, int32_t dtype) {
    switch (dtype) {
        case kBFloat16: return all_reduce(group, static_cast<bf16*>(x), count);
        case kFloat16: return all_reduce(group, static_cast<fp16*>(x), count);
        default: return all_reduce(group, static_cast<float*>(x), count);
    }
}

extern "C" int32_t inflight_all_gather(
    RankGroup* group, const void* x, void* out, int64_t num_rows, int64_t row_bytes) {
    const char* const own = static_cast<const char*>(x);
    const auto fill = [&](char* slot, int64_t start, int64_t size) { std::memcpy(slot, own + start, size); };
    const auto take = [&](int64_t start, int64_t size) {
        for (int32_t i = 0; i < group->size; i++) {
            const char* const slot = i == group->rank ? own + start : slot_of(group, i);
            for (int64_t done = 0; done < size;) {
                const int64_t row = (start + done) / row_bytes, column = (start + done) % row_bytes;
                const int64_t count = std::min(row_bytes - column, size - done);
                std::memcpy(static_cast<char*>(out) + (row * group->size + i) * row_bytes + column, slot + done, count);
                done += count;
            }
        }
    };
    return exchange(group, num_rows * row_bytes, fill, take);
}

extern "C" int32_t inflight_broadcast(RankGroup* group, void* x, int64_t num_bytes) {
    char* const bytes = static_cast<char*>(x);
    const auto fill = [&](char* slot, int64_t start, int64_t size) {
        if (group->rank == 0) std::memcpy(slot, bytes + start, size);
    };
    const auto take = [&](int64_t start, int64_t size) {
        if (group->rank != 0) std::memcpy(bytes + start, slot_of(group, 0), size);
    };
    return exchange(group, num_bytes, fill, take);
}

extern "C" void inflight_leave_group(const RankGroup* group) { end_group(group, kLeft, group->rank); }
