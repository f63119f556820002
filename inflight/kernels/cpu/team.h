// A team of threads that compute tasks together. One thread leads: it opens one task after another. The other threads help.
//
// The operating system may stop a thread at any time, for milliseconds, to run another program on its core. So the leader does not
// wait for a helper that has not begun: a task is opened, helpers that come in time join it, and the leader closes it when it finds
// no work left. Then it waits only for helpers that are inside. A helper that comes late joins the next task.
//
//     leader    open ── computes ─────────── close ─ wait ─ open ── computes ── close ─ ...
//     helper    ──── join ── computes ── leave ────────────── (stopped) ─────── late: the next task
//
// A thread that waits spins for kSpinNs and then sleeps, so that its core can run a thread of the team that was stopped elsewhere.
#pragma once

#if !defined(__aarch64__)
#include <immintrin.h>
#endif
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

class TeamTask {  // a reference to a function object without arguments, which must live as long
  public:
    template <typename Function>
    TeamTask(const Function& function)
        : object_(&function), call_([](const void* object) { (*static_cast<const Function*>(object))(); }) {}
    void operator()() const { call_(object_); }

  private:
    const void* object_;
    void (*call_)(const void*);
};

// What a thread does in a loop in which it waits.
inline void pause_briefly() {
#if defined(__aarch64__)
    asm volatile("isb" : : : "memory");  // `yield` does nothing on most processors
#else
    _mm_pause();
#endif
}

class Spin {  // one wait
  public:
    // Pauses for a moment. Returns false if the thread has spun long enough and should sleep.
    bool goes_on() {
        pause_briefly();
        if (++num_rounds_ % kRoundsPerLook != 0) return true;
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        const int64_t now = time.tv_sec * 1'000'000'000LL + time.tv_nsec;
        if (num_rounds_ == kRoundsPerLook) start_ = now;
        return now - start_ < kSpinNs;
    }

  private:
    static constexpr int64_t kSpinNs = 50'000;
    static constexpr uint32_t kRoundsPerLook = 32;
    uint32_t num_rounds_ = 0;
    int64_t start_ = 0;
};

class Team {
  public:
    // Computes a task: one call of it alone would do all the work; calls at the same time share the work. Returns when the task is
    // done. Only the leader calls this, and not from inside a task.
    void lead(const TeamTask& task) {
        task_ = &task;
        state_.store((state_.load() / kGeneration + 1) * kGeneration | kOpen);  // nobody is inside, so nobody else changes it
        if (num_asleep_.load() > 0) wake(state_, kWakeAtOnce);
        task();
        state_.fetch_and(~kOpen);
        for (Spin spin; state_.load() & kInside;) {
            if (spin.goes_on()) continue;
            leader_sleeps_.store(1);
            if (state_.load() & kInside) sleep(leader_sleeps_, 1);
            leader_sleeps_.store(0);
        }
    }

    // The other threads' part. Returns when the leader has dismissed the team.
    void help() {
        uint32_t last = 0;  // the generation of the last task that this thread joined; the first task has generation 1
        for (Spin spin;;) {
            uint32_t state = state_.load();
            if (state & kDismissed) return;
            if (state & kOpen && state / kGeneration != last) {
                if (!state_.compare_exchange_weak(state, state + kOne)) continue;
                last = state / kGeneration;
                (*task_)();
                leave();
            } else if (spin.goes_on()) {
                continue;
            } else {
                num_asleep_.fetch_add(1);
                const bool woken = sleep(state_, state);
                // to wake many helpers takes long, so they wake each other
                if (num_asleep_.fetch_sub(1) > 1 && woken) wake(state_, kWakeAtOnce);
            }
            spin = Spin();
        }
    }

    void dismiss() {
        state_.fetch_or(kDismissed);
        wake(state_, INT_MAX);
    }

  private:
    void leave() {
        const uint32_t before = state_.fetch_sub(kOne);
        const bool is_last = (before & kInside) == kOne && !(before & kOpen);
        if (is_last && leader_sleeps_.exchange(0) == 1) wake(leader_sleeps_, 1);
    }

    static void wake(std::atomic<uint32_t>& word, int most) {
        syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
    }
    // Sleeps while the word has this value. Returns true if another thread has called `wake`.
    static bool sleep(std::atomic<uint32_t>& word, uint32_t value) {
        return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0) == 0;
    }

    static constexpr int kWakeAtOnce = 2;
    // Bits of the state: two flags, the number of helpers inside the task, and the number of the task, which may overflow.
    static constexpr uint32_t kDismissed = 1, kOpen = 2, kOne = 4, kGeneration = 1 << 16, kInside = kGeneration - kOne;

    const TeamTask* task_ = nullptr;  // helpers read it while they are inside
    alignas(64) std::atomic<uint32_t> state_{0};
    alignas(64) std::atomic<uint32_t> num_asleep_{0};
    std::atomic<uint32_t> leader_sleeps_{0};
};
