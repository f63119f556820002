// What the machine can do: memory read and dot products, by a number of threads. roofline.py compiles and runs it.
//
//     roofline NUM_THREADS    ->   {"read": GB/s, "read_huge_pages": GB/s, "fp32": G/s, "bf16": G/s, "int8": G/s}
//
// Operations count a multiplication and an addition each. null: the processor has no such instruction. Each figure is the
// best of several passes, in which all threads start together; thread i is bound to the i-th processor it may use.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { MAX_THREADS = 256, NUM_PASSES = 7, NUM_ACCUMULATORS = 16 };
static const size_t TOTAL_BYTES = (size_t)1 << 30;    // far beyond any cache; a multiple of a huge page for up to 512 threads
static const long NUM_ITERATIONS = 1 << 21;           // of NUM_ACCUMULATORS instructions

typedef float Floats __attribute__((vector_size(64)));
typedef int64_t Integers __attribute__((vector_size(64)));
typedef double (*Work)(int thread);                   // returns what it has done: bytes or operations

static int num_threads;
static int processors[MAX_THREADS];
static char *buffers[MAX_THREADS];
static pthread_barrier_t barrier;
static Work work;
static double amounts[MAX_THREADS], starts[MAX_THREADS], ends[MAX_THREADS];
static volatile double sink;                          // so that nothing is optimised away

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static double read_memory(int thread) {
    size_t num_bytes = TOTAL_BYTES / num_threads / sizeof(Integers) / 8 * sizeof(Integers) * 8;
    const Integers *data = (const Integers *)buffers[thread];
    Integers sums[8] = {{0}};
    for (size_t i = 0; i < num_bytes / sizeof(Integers); i += 8) {
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) sums[k] ^= data[i + k];
    }
    for (int k = 1; k < 8; k++) sums[0] ^= sums[k];
    sink = (double)sums[0][0];
    return (double)num_bytes;
}

static double multiply_fp32(int thread) {
    Floats sums[NUM_ACCUMULATORS], a, b;
    for (int k = 0; k < NUM_ACCUMULATORS; k++) sums[k] = (Floats){0};
    for (int i = 0; i < 16; i++) a[i] = b[i] = 0.5f / (thread + 1);
    for (long i = 0; i < NUM_ITERATIONS; i++) {
#pragma GCC unroll 16
        for (int k = 0; k < NUM_ACCUMULATORS; k++) sums[k] = sums[k] * a + b;
    }
    for (int k = 1; k < NUM_ACCUMULATORS; k++) sums[0] += sums[k];
    sink = sums[0][0];
    return (double)NUM_ITERATIONS * NUM_ACCUMULATORS * 16 * 2;
}

#if defined(__AVX512BF16__)
static double multiply_bf16(int thread) {
    __m512 sums[NUM_ACCUMULATORS];
    __m512bh a = (__m512bh)_mm512_set1_epi32(0x3c003c00 + thread), b = a;
    for (int k = 0; k < NUM_ACCUMULATORS; k++) sums[k] = _mm512_setzero_ps();
    for (long i = 0; i < NUM_ITERATIONS; i++) {
#pragma GCC unroll 16
        for (int k = 0; k < NUM_ACCUMULATORS; k++) sums[k] = _mm512_dpbf16_ps(sums[k], a, b);
    }
    for (int k = 1; k < NUM_ACCUMULATORS; k++) sums[0] = _mm512_add_ps(sums[0], sums[k]);
    sink = sums[0][0];
    return (double)NUM_ITERATIONS * NUM_ACCUMULATORS * 32 * 2;
}
#else
#define multiply_bf16 NULL
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#if defined(__AVX512VNNI__)
typedef __m512i Bytes;
#define SET1(x) _mm512_set1_epi8(x)
#define DOT(sum, a, b) _mm512_dpbusd_epi32(sum, a, b)
#define ADD(a, b) _mm512_add_epi32(a, b)
#define FIRST(a) _mm_cvtsi128_si32(_mm512_castsi512_si128(a))
#else
typedef __m256i Bytes;
#define SET1(x) _mm256_set1_epi8(x)
#define DOT(sum, a, b) _mm256_dpbusd_avx_epi32(sum, a, b)
#define ADD(a, b) _mm256_add_epi32(a, b)
#define FIRST(a) _mm_cvtsi128_si32(_mm256_castsi256_si128(a))
#endif
static double multiply_int8(int thread) {
    Bytes sums[NUM_ACCUMULATORS], a = SET1(1 + thread % 3), b = SET1(2);
    for (int k = 0; k < NUM_ACCUMULATORS; k++) sums[k] = SET1(0);
    for (long i = 0; i < NUM_ITERATIONS; i++) {
#pragma GCC unroll 16
        for (int k = 0; k < NUM_ACCUMULATORS; k++) sums[k] = DOT(sums[k], a, b);
    }
    for (int k = 1; k < NUM_ACCUMULATORS; k++) sums[0] = ADD(sums[0], sums[k]);
    sink = FIRST(sums[0]);
    return (double)NUM_ITERATIONS * NUM_ACCUMULATORS * sizeof(Bytes) * 2;
}
#else
#define multiply_int8 NULL
#endif

static void *run(void *argument) {
    int thread = (int)(intptr_t)argument;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(processors[thread], &one);
    sched_setaffinity(0, sizeof one, &one);
    for (int pass = 0; pass < NUM_PASSES; pass++) {
        pthread_barrier_wait(&barrier);               // all start
        starts[thread] = seconds();                   // here, not in main(), which may find no core to see it on
        amounts[thread] = work(thread);
        ends[thread] = seconds();
        pthread_barrier_wait(&barrier);               // all have ended
    }
    return NULL;
}

// Giga-units per second of the best pass; negative where there is no such work.
static double best(Work chosen) {
    if (chosen == NULL) return -1;
    pthread_t threads[MAX_THREADS];
    double rate = 0;
    work = chosen;
    pthread_barrier_init(&barrier, NULL, num_threads + 1);
    for (int i = 0; i < num_threads; i++) pthread_create(&threads[i], NULL, run, (void *)(intptr_t)i);
    for (int pass = 0; pass < NUM_PASSES; pass++) {
        pthread_barrier_wait(&barrier);
        pthread_barrier_wait(&barrier);
        double start = starts[0], end = ends[0], total = 0;
        for (int i = 0; i < num_threads; i++) {
            start = starts[i] < start ? starts[i] : start;
            end = ends[i] > end ? ends[i] : end;
            total += amounts[i];
        }
        if (total / (end - start) > rate) rate = total / (end - start);
    }
    for (int i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&barrier);
    return rate * 1e-9;
}

static double best_read(int advice) {
    size_t huge = (size_t)2 << 20, share = (TOTAL_BYTES / num_threads + huge) & ~(huge - 1);
    size_t num_bytes = share * num_threads + huge;
    char *pages = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return -1;
    char *start = (char *)(((uintptr_t)pages + huge - 1) & ~(huge - 1));
    madvise(start, num_bytes - huge, advice);         // without huge pages in the kernel both figures are the same
    memset(start, 1, num_bytes - huge);
    for (int i = 0; i < num_threads; i++) buffers[i] = start + i * share;
    double rate = best(read_memory);
    munmap(pages, num_bytes);
    return rate;
}

static void print_rate(const char *name, double rate, const char *end) {
    if (rate < 0) printf("\"%s\": null%s", name, end);
    else printf("\"%s\": %.2f%s", name, rate, end);
}

int main(int argc, char **argv) {
    cpu_set_t usable;
    num_threads = argc == 2 ? atoi(argv[1]) : 0;
    sched_getaffinity(0, sizeof usable, &usable);
    if (num_threads < 1 || num_threads > MAX_THREADS || num_threads > CPU_COUNT(&usable)) {
        fprintf(stderr, "usage: roofline NUM_THREADS   (1 to %d)\n", CPU_COUNT(&usable));
        return 2;
    }
    for (int processor = 0, i = 0; i < num_threads; processor++)
        if (CPU_ISSET(processor, &usable)) processors[i++] = processor;
    printf("{");
    print_rate("read", best_read(MADV_NOHUGEPAGE), ", ");
    print_rate("read_huge_pages", best_read(MADV_HUGEPAGE), ", ");
    print_rate("fp32", best(multiply_fp32), ", ");
    print_rate("bf16", best(multiply_bf16), ", ");
    print_rate("int8", best(multiply_int8), "}\n");
    return 0;
}
