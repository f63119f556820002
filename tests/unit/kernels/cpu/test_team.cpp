// Teams of threads for test_team.py, which compiles this with a sanitizer: test_team NUM_THREADS NUM_TASKS. Every task reads what
// the task before it wrote, in memory that only the team orders. Every second task is divided into parts (parts.h).

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "parts.h"
#include "team.h"

// Whether one thread alone takes each number of [0, count) once, whatever the number of parts.
bool takes_all_alone(int64_t count, int64_t num_parts, int64_t most) {
    std::vector<int> taken(count, 0);
    Parts parts(count, num_parts);
    parts.take(most, [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end; i++) taken.at(i)++;
    });
    return std::count(taken.begin(), taken.end(), 1) == count;
}

int main(int, char** arguments) {
    for (const int64_t count : {0, 1, 2, 7, 63, 1000})
        for (const int64_t num_parts : {1, 2, 3, 64, 65, 200})
            for (const int64_t most : {1, 2, 1000})
                if (!takes_all_alone(count, num_parts, most)) return std::printf("%ld numbers are not taken once\n", count), 1;
    const int num_threads = std::atoi(arguments[1]), num_tasks = std::atoi(arguments[2]);
    constexpr int kSize = 64;
    for (int round = 0; round < 3; round++) {
        Team team;
        std::vector<std::thread> helpers;
        for (int i = 1; i < num_threads; i++) helpers.emplace_back([&] { team.help(); });
        std::vector<int> numbers(kSize, 0);
        for (int task = 1; task <= num_tasks; task++) {
            std::atomic<int> next{0};
            Parts parts(kSize, num_threads);
            const int most = task % 4 == 1 ? 3 : kSize;
            std::atomic<bool> is_too_long{false};
            const auto change = [&](int i) {
                if (i == kSize / 2 && task % 16 <= 1) std::this_thread::yield();
                numbers[i]++;
            };
            team.lead([&] {
                if (task % 2 == 0)
                    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < kSize;) change(i);
                else
                    parts.take(most, [&](int64_t first, int64_t end) {
                        if (first >= end || end - first > most) is_too_long.store(true);
                        for (int64_t i = first; i < end; i++) change(static_cast<int>(i));
                    });
            });
            if (is_too_long.load()) return std::printf("task %d: a range of a wrong length\n", task), 1;
            for (const int number : numbers)
                if (number != task) return std::printf("task %d: %d\n", task, number), 1;
            if (task % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));  // the helpers fall asleep
        }
        team.dismiss();
        for (std::thread& helper : helpers) helper.join();
    }
    return 0;
}
