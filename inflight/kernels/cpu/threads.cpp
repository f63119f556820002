// Teams of the threads of OpenMP's pools, and the cores of these threads.

#include "threads.h"

#include <omp.h>
#include <sched.h>

#include <cerrno>

#include "kernels.h"

namespace {

thread_local Team* led_team = nullptr;  // the team that this thread leads
thread_local bool is_in_task = false;

}  // namespace

int max_threads() { return omp_get_max_threads(); }

void with_team(const TeamTask& work) {
    if (led_team != nullptr || is_in_task || max_threads() == 1) return work();
    Team team;
#pragma omp parallel
    if (omp_get_thread_num() == 0) {
        led_team = &team;
        work();
        led_team = nullptr;
        team.dismiss();
    } else {
        is_in_task = true;
        team.help();
        is_in_task = false;
    }
}

void parallel(bool is_shared, const TeamTask& task) {
    if (!is_shared || is_in_task || max_threads() == 1) return task();
    with_team([&] {
        is_in_task = true;
        led_team->lead(task);
        is_in_task = false;
    });
}

extern "C" int32_t inflight_bind_threads(const int32_t* cores, int32_t num_threads) {
    int32_t error = 0;
#pragma omp parallel num_threads(num_threads) reduction(max : error)
    {
        const int32_t core = cores[omp_get_thread_num()];
        cpu_set_t* const set = CPU_ALLOC(core + 1);
        const size_t size = CPU_ALLOC_SIZE(core + 1);
        CPU_ZERO_S(size, set);
        CPU_SET_S(core, size, set);
        if (sched_setaffinity(0, size, set) != 0) error = errno;
        CPU_FREE(set);
        if (omp_get_num_threads() != num_threads) error = EAGAIN;
    }
    return error;
}
