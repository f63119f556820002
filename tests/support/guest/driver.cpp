// Computes the calls of another process: the kernels of another processor, under an emulator. kernels.py starts this program.
//
// The arguments of a call may be pointers into the memory of the other process. It copies the pages that the call will probably
// touch into a file that both processes have mapped, and this program maps the copies at the addresses of the pages. Access to
// another page is a fault, and then this program asks for it. After the call it forgets the pages, and the other process looks
// what has changed in them. So a call reads and writes what it would in the other process, and nothing has to know how large
// the buffers are.
#include <errno.h>
#include <omp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" {
#define FUNCTION(name) void name();
#include "functions.inc"
#undef FUNCTION
}

namespace {

constexpr int kMostArguments = 16;

struct Request {
    int64_t function;
    int64_t num_threads;
    int64_t num_pieces;                // that follow
    int64_t integers[kMostArguments];  // and pointers
    float number;                      // the one float that a function may have
    int32_t unused;
};

struct Piece {  // pages of the other process
    uintptr_t address;
    int64_t size;
    int64_t place;  // in the file
};

enum Kind : int64_t { kRead, kDone };

struct Message {
    int64_t kind;
    int64_t value;  // kRead: the address of a page; kDone: the result
    int64_t size;   // kRead: how many bytes from there on may be given
};

using Function = int64_t (*)(
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
    int64_t, int64_t, int64_t, float);  // a callee ignores the rest: integers and floats have registers of their own

const Function kFunctions[] = {
#define FUNCTION(name) reinterpret_cast<Function>(name),
#include "functions.inc"
#undef FUNCTION
};

[[noreturn]] void fail(const char* text, uintptr_t address) {
    char line[200];
    const int size = snprintf(line, sizeof line, "%s %#lx\n", text, static_cast<unsigned long>(address));
    (void)!write(STDERR_FILENO, line, size);
    _exit(1);
}

void send(const void* from, size_t size) {
    for (const char* at = static_cast<const char*>(from); size > 0;) {
        const ssize_t count = write(STDOUT_FILENO, at, size);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) _exit(2);
        at += count;
        size -= count;
    }
}

void receive(void* to, size_t size) {
    for (char* at = static_cast<char*>(to); size > 0;) {
        const ssize_t count = read(STDIN_FILENO, at, size);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) _exit(0);  // the other process has ended
        at += count;
        size -= count;
    }
}

constexpr int64_t kPage = 4096, kPagesAtOnce = 64;
constexpr int kMostPieces = 1 << 16;

Piece pieces[kMostPieces];
int num_pieces = 0;
int contents;  // the file
std::atomic_flag is_busy = ATOMIC_FLAG_INIT;

// Other threads may read the pages at once. So memory that nobody may touch takes the place first, and the copies replace it in one
// step. QEMU maps a file to a place that it may choose in two steps: for a moment there would be zeros.
void map(const Piece& piece) {
    if (num_pieces == kMostPieces) fail("too many pieces of memory, at", piece.address);
    void* const wanted = reinterpret_cast<void*>(piece.address);
    if (mmap(wanted, piece.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != wanted)
        fail("this process uses the same address:", piece.address);
    if (mmap(wanted, piece.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, contents, piece.place) != wanted)
        fail("there is no copy to map at", piece.address);
    pieces[num_pieces++] = piece;
}

void fetch(int, siginfo_t* info, void*) {
    const uintptr_t page = reinterpret_cast<uintptr_t>(info->si_addr) / kPage * kPage;
    while (is_busy.test_and_set()) {}
    Message request{kRead, static_cast<int64_t>(page), kPage * kPagesAtOnce};
    for (int i = 0; i < num_pieces && request.size > 0; i++) {
        const uintptr_t first = pieces[i].address;
        if (first <= page && page < first + pieces[i].size) request.size = 0;  // another thread was first
        if (first > page && first < page + request.size) request.size = first - page;
    }
    if (request.size > 0) {
        send(&request, sizeof request);
        Piece piece;
        receive(&piece, sizeof piece);
        if (piece.size == 0) fail("there is no memory at", reinterpret_cast<uintptr_t>(info->si_addr));
        map(piece);
    }
    is_busy.clear();
}

}  // namespace

int main(int, char** arguments) {
    contents = atoi(arguments[1]);
    struct sigaction action = {};
    action.sa_sigaction = fetch;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    for (Request request;;) {
        receive(&request, sizeof request);
        for (Piece piece; num_pieces < request.num_pieces; map(piece)) receive(&piece, sizeof piece);
        omp_set_num_threads(static_cast<int>(request.num_threads));
        const int64_t* a = request.integers;
        const int64_t result = kFunctions[request.function](
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15],
            request.number);
        while (num_pieces > 0) {
            const Piece& piece = pieces[--num_pieces];
            munmap(reinterpret_cast<void*>(piece.address), piece.size);
        }
        const Message done{kDone, result, 0};
        send(&done, sizeof done);
    }
}
