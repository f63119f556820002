// Binds the compute threads to cores.

#include <omp.h>
#include <sched.h>

#include <cerrno>

#include "kernels.h"

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
