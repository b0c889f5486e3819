// Copies by the CPU: past its caches where that pays, and not fatal where a file behind a mapping has become shorter.
#define _GNU_SOURCE
#include "copying.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Below, the bytes stay in a cache until they are asked for, and stores past it only cost.
enum { ASIDE_FROM = 64 << 10 };
// What is asked for above its own limit the system ignores; this is the usual one.
enum { ADVISED = 128 << 10 };
enum { PAGE = 4096, POPULATE_WRITE = 23, COLLAPSE = 25 };  // MADV_POPULATE_WRITE of Linux 5.14, MADV_COLLAPSE of 6.1.

#if defined(__x86_64__)
// Each stores whole vectors past the caches, and returns how many bytes that were. `dst` is aligned to the vector.
__attribute__((target("avx512f"))) static size_t store_avx512(char *dst, const char *src, size_t nbytes) {
    size_t at = 0;
    for (; at + 256 <= nbytes; at += 256) {
        __m512i a = _mm512_loadu_si512(src + at), b = _mm512_loadu_si512(src + at + 64);
        __m512i c = _mm512_loadu_si512(src + at + 128), d = _mm512_loadu_si512(src + at + 192);
        _mm512_stream_si512((void *)(dst + at), a);
        _mm512_stream_si512((void *)(dst + at + 64), b);
        _mm512_stream_si512((void *)(dst + at + 128), c);
        _mm512_stream_si512((void *)(dst + at + 192), d);
    }
    return at;
}

__attribute__((target("avx2"))) static size_t store_avx2(char *dst, const char *src, size_t nbytes) {
    size_t at = 0;
    for (; at + 128 <= nbytes; at += 128) {
        __m256i a = _mm256_loadu_si256((const void *)(src + at)), b = _mm256_loadu_si256((const void *)(src + at + 32));
        __m256i c = _mm256_loadu_si256((const void *)(src + at + 64)), d = _mm256_loadu_si256((const void *)(src + at + 96));
        _mm256_stream_si256((void *)(dst + at), a);
        _mm256_stream_si256((void *)(dst + at + 32), b);
        _mm256_stream_si256((void *)(dst + at + 64), c);
        _mm256_stream_si256((void *)(dst + at + 96), d);
    }
    return at;
}

static size_t store(char *dst, const char *src, size_t nbytes) {
    if (__builtin_cpu_supports("avx512f")) return store_avx512(dst, src, nbytes);
    if (__builtin_cpu_supports("avx2")) return store_avx2(dst, src, nbytes);
    return 0;
}
#endif

bool is_there(const char *at) {
    unsigned char there = 1;
    return mincore((void *)((uintptr_t)at & -(uintptr_t)PAGE), PAGE, &there) || there & 1;
}

// A huge page comes three times as fast as the small ones that it stands for, a driver locks it in half of the time, and it goes in a
// twentieth. To shared memory most systems give none unless they are asked in this way, which Linux has from 6.1 on. Where there is
// none, or something is there, nothing is changed but for the last page.
static void fetch_huge(char *border, const range *around) {
    // Of the last one, as little may be left over as whoever maps memory leaves.
    ptrdiff_t within = around->first + around->nbytes - border;
    if (border < around->first || within < HUGE_PAGE - HUGE_PAGE / 4 || is_there(border)) return;
    // One page must be there. The last: where a file ends before it, a huge page would take what is written behind the end, which is
    // lost, and nobody would be told.
    uintptr_t last = (uintptr_t)border + (within < HUGE_PAGE ? within : HUGE_PAGE) - 1;
    if (madvise((void *)(last & -(uintptr_t)PAGE), PAGE, POPULATE_WRITE)) return;
    // Where the system gives huge pages by itself, that was one. Otherwise little is there that would have to be copied.
    if (!is_there(border + PAGE)) madvise(border, HUGE_PAGE, COLLAPSE);
}

static char *border_before(const char *at) { return (char *)((uintptr_t)at & -(uintptr_t)HUGE_PAGE); }

int touch_pages(char *memory, size_t nbytes) {
    range all = {memory, nbytes};
    for (size_t at = 0, part; at < nbytes; at += part) {
        // In parts: other threads of the process can change their mappings in between.
        char *border = border_before(memory + at);
        part = border + HUGE_PAGE - (memory + at);
        if (part > nbytes - at) part = nbytes - at;
        fetch_huge(border, &all);
        while (madvise(memory + at, part, POPULATE_WRITE)) {
            if (errno == EINVAL) {
                // An older system. The same, more slowly: each page is written to, and what is in it stays, whoever writes meanwhile.
                for (size_t page = at; page < at + part; page += PAGE)
                    __atomic_fetch_add((unsigned char *)memory + page, 0, __ATOMIC_RELAXED);
                break;
            }
            if (errno != EAGAIN && errno != EINTR) return errno;
        }
    }
    return 0;
}

int read_ahead(int descriptor, int64_t start, size_t nbytes) {
    for (size_t at = 0; at < nbytes; at += ADVISED) {
        int code = posix_fadvise(descriptor, start + (int64_t)at, ADVISED, POSIX_FADV_WILLNEED);
        if (code) return code;
    }
    return 0;
}

// Memory that was never touched comes page by page, each with a fault. Where the first page is not there, mostly none is.
static bool populate(char *dst, size_t nbytes, const range *around) {
    uintptr_t page = PAGE, first = ((uintptr_t)dst + page - 1) & -page, end = ((uintptr_t)dst + nbytes) & -page;
    if (first >= end || is_there((char *)first)) return false;
    // A huge page that others fill in part, too, comes with its first part.
    for (char *border = border_before(dst); (uintptr_t)border < end; border += HUGE_PAGE) fetch_huge(border, around);
    // Older systems refuse, and nothing is lost.
    madvise((void *)first, end - first, POPULATE_WRITE);
    return true;
}

static void copy_bytes(void *dst, const void *src, size_t nbytes, bool aside) {
#if defined(__x86_64__)
    if (aside && nbytes >= ASIDE_FROM) {
        char *to = dst;
        const char *from = src;
        size_t head = -(uintptr_t)to & 63;
        memcpy(to, from, head);
        size_t stored = head + store(to + head, from + head, nbytes - head);
        memcpy(to + stored, from + stored, nbytes - stored);
        // Such stores are not ordered by anything else: before anybody is told, they are there.
        _mm_sfence();
        return;
    }
#else
    (void)aside;
#endif
    memcpy(dst, src, nbytes);
}

bool read_whole(int descriptor, int64_t offset, char *dst, size_t nbytes) {
    while (nbytes) {
        ssize_t found = pread(descriptor, dst, nbytes, offset);
        if (found < 0 && errno == EINTR) continue;
        if (found <= 0) return false;
        dst += found;
        offset += found;
        nbytes -= (size_t)found;
    }
    return true;
}

// `count` runs of bytes, each `stride` behind the one before. Compilers make one move of a copy whose size they know.
static char *gather_runs(char *to, const char *from, int64_t count, int64_t stride, size_t nbytes) {
#define RUNS(SIZE)                                                                             \
    case SIZE:                                                                                 \
        for (int64_t i = 0; i < count; i++) memcpy(to + i * SIZE, from + i * stride, SIZE);    \
        break
    switch (nbytes) {
        RUNS(1);
        RUNS(2);
        RUNS(4);
        RUNS(8);
        RUNS(16);
    default:
        for (int64_t i = 0; i < count; i++) memcpy(to + i * nbytes, from + i * stride, nbytes);
    }
#undef RUNS
    return to + count * nbytes;
}

static void gather(char *to, const char *from, int axes, const int64_t *shape, const int64_t *strides, size_t run) {
    int64_t counts[MOST_AXES], steps[MOST_AXES], index[MOST_AXES] = {0};
    int last = -1, axis;
    for (axis = 0; axis < axes; axis++) {
        // The step of an axis of one may be any number, and nobody takes it.
        if (shape[axis] == 1) continue;
        // Two axes are one where the outer goes on as the inner would.
        if (last < 0 || steps[last] != shape[axis] * strides[axis]) counts[++last] = 1;
        counts[last] *= shape[axis];
        steps[last] = strides[axis];
    }
    // What lies in one piece is copied in one.
    if (last >= 0 && steps[last] == (int64_t)run) run *= counts[last--];
    do {
        to = last >= 0 ? gather_runs(to, from, counts[last], steps[last], run) : gather_runs(to, from, 1, 0, run);
        // The next of the outer axes, as an odometer counts. No step leads out of the array.
        for (axis = last - 1; axis >= 0; axis--) {
            if (++index[axis] < counts[axis]) {
                from += steps[axis];
                break;
            }
            index[axis] = 0;
            from -= (counts[axis] - 1) * steps[axis];
        }
    } while (axis >= 0);
}

// A mapping whose file was cut off raises SIGBUS on the thread that touches it.

static _Thread_local sigjmp_buf back;
static _Thread_local volatile sig_atomic_t guarded;
static struct sigaction before;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    // By somebody, and not by what this thread touched.
    bool sent = info->si_code <= 0;
    if (guarded && !sent) {
        guarded = 0;
        siglongjmp(back, 1);
    }
    // Not ours. Whoever was asked before is asked; nobody: it comes again and ends the process, as it would have.
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler == SIG_IGN && sent) {
        // As before. What is touched is not ignored by any system.
    } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
        signal(number, SIG_DFL);
        // By itself it does not come again.
        if (sent) raise(number);
    } else {
        before.sa_handler(number);
    }
}

static void listen(void) {
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
}

void survive_bus_errors(void) { pthread_once(&once, listen); }

bool copy_guarded(void *dst, const void *src, size_t nbytes, bool aside, const range *around, bool *fresh) {
    // The mask is not kept: SIGBUS is not blocked by its handler.
    if (sigsetjmp(back, 0)) return false;
    guarded = 1;
    if (around && around->nbytes >= ASIDE_FROM && populate(dst, nbytes, around)) *fresh = true;
    copy_bytes(dst, src, nbytes, aside);
    guarded = 0;
    return true;
}

bool gather_guarded(void *dst, const void *src, int axes, const int64_t *shape, const int64_t *strides, size_t itemsize) {
    if (!itemsize) return true;
    for (int axis = 0; axis < axes; axis++)
        if (!shape[axis]) return true;
    if (sigsetjmp(back, 0)) return false;
    guarded = 1;
    // Moves are made in line, and compilers may make them before or behind what is volatile.
    atomic_signal_fence(memory_order_seq_cst);
    gather(dst, src, axes, shape, strides, itemsize);
    atomic_signal_fence(memory_order_seq_cst);
    guarded = 0;
    return true;
}
