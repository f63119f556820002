// Teams of threads for test_team.py, which compiles this with a sanitizer: test_team NUM_THREADS NUM_TASKS. Every task reads what
// the task before it wrote, in memory that only the team orders.

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "team.h"

int main(int, char** arguments) {
    const int num_threads = std::atoi(arguments[1]), num_tasks = std::atoi(arguments[2]);
    constexpr int kSize = 64;
    for (int round = 0; round < 3; round++) {
        Team team;
        std::vector<std::thread> helpers;
        for (int i = 1; i < num_threads; i++) helpers.emplace_back([&] { team.help(); });
        std::vector<int> numbers(kSize, 0);
        for (int task = 1; task <= num_tasks; task++) {
            std::atomic<int> next{0};
            team.lead([&] {
                for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < kSize;) {
                    if (i == kSize / 2 && task % 16 == 1) std::this_thread::yield();
                    numbers[i]++;
                }
            });
            for (const int number : numbers)
                if (number != task) return std::printf("task %d: %d\n", task, number), 1;
            if (task % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));  // the helpers fall asleep
        }
        team.dismiss();
        for (std::thread& helper : helpers) helper.join();
    }
    return 0;
}
