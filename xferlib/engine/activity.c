// What a trace collects; see activity.h.
//
// One lock guards the lists. It is held for some instructions, and never while the interpreter is asked for frames. A forked child begins
// with nothing: what its parent has collected is the parent's.
//
// CUPTI asks for buffers on the thread that launches, and writes the records of its kernels there. So buffers are made ready before they
// are asked for: zeroed, and with all their pages.
#define _GNU_SOURCE
#include "activity.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ENTER = 0, RUNTIME = 2, READY = 8, PAGE = 4096 };

typedef struct full {
    struct full *next;
    uint8_t *buffer;
    size_t valid;
} full;

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool running;
static size_t buffer_nbytes, most_buffers, buffers, most_calls;
static uint8_t *ready[READY];
static size_t ready_count;
static full *oldest, **newest = &oldest;
static xe_call *calls;
static size_t call_count, call_room;
static xe_frame *frames;
static size_t frame_count, frame_room;
static uint64_t lost;
static uint8_t flags[2][XE_MOST_FUNCTIONS];
static xe_python python;
static atomic_bool has_python;
static atomic_uint traces;

// The frames of the call that this thread is inside of: the runtime's calls of the driver are the same call.
static __thread int depth;
static __thread unsigned of_trace;
static __thread xe_frame inner[XE_MOST_FRAMES];
static __thread uint32_t inner_count;
static __thread xe_call current;

static uint64_t time_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t xe_activity_now(void) {
    return time_of(CLOCK_MONOTONIC);
}

uint64_t xe_activity_usual(void) {
    return time_of(CLOCK_REALTIME);
}

static void lock(void) {
    pthread_mutex_lock(&mu);
}

static void unlock(void) {
    pthread_mutex_unlock(&mu);
}

// The memory stays as it is: some of it may be under a call that another thread of the parent was in.
static void forget(void) {
    pthread_mutex_init(&mu, NULL);
    atomic_store(&running, false);
    atomic_store(&has_python, false);
    buffers = ready_count = call_count = call_room = frame_count = frame_room = 0;
    oldest = NULL, newest = &oldest, calls = NULL, frames = NULL;
    depth = 0, inner_count = 0, current.start = 0;
}

static void survive_forks(void) {
    pthread_atfork(lock, unlock, forget);
}

// A buffer of zeroes whose pages are there. Its own size is in the page before it. Null: there is no memory.
static uint8_t *made(size_t nbytes) {
    size_t all = PAGE + nbytes;
    void *memory = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    *(size_t *)memory = all;
    return (uint8_t *)memory + PAGE;
}

static void unmade(uint8_t *buffer) {
    void *memory = buffer - PAGE;
    munmap(memory, *(size_t *)memory);
}

// Keep a buffer for who asks next, if one may be asked for and fewer are kept than should be.
static void make_ready(void) {
    for (;;) {
        lock();
        int wanted = atomic_load(&running) && ready_count < READY && buffers + ready_count < most_buffers;
        size_t nbytes = buffer_nbytes;
        unlock();
        uint8_t *buffer = wanted ? made(nbytes) : NULL;
        if (buffer == NULL) return;
        lock();
        int kept = atomic_load(&running) && ready_count < READY && nbytes == buffer_nbytes;
        if (kept) ready[ready_count++] = buffer;
        unlock();
        if (!kept) unmade(buffer);
    }
}

int xe_activity_start(size_t nbytes, size_t most, size_t most_of_calls, const uint8_t *wanted, const xe_python *with) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, survive_forks);
    lock();
    int fits = !atomic_load(&running) && oldest == NULL && calls == NULL;
    if (fits) {
        buffer_nbytes = nbytes, most_buffers = most, most_calls = most_of_calls;
        lost = 0;
        memset(flags, 0, sizeof flags);
        if (wanted != NULL) memcpy(flags, wanted, sizeof flags);
        if (with != NULL) python = *with;
        atomic_store(&has_python, with != NULL);
        atomic_fetch_add(&traces, 1);
        atomic_store(&running, true);
    }
    unlock();
    if (fits) make_ready();
    return fits;
}

void xe_activity_stop(void) {
    lock();
    atomic_store(&running, false);
    atomic_store(&has_python, false);
    uint8_t *unused[READY];
    size_t count = ready_count;
    memcpy(unused, ready, sizeof unused);
    ready_count = 0;
    unlock();
    while (count) unmade(unused[--count]);
}

void xe_activity_requested(uint8_t **buffer, size_t *size, size_t *most_records) {
    *buffer = NULL, *size = 0, *most_records = 0;
    lock();
    int given = atomic_load(&running) && buffers < most_buffers;
    buffers += given;
    lost += !given && atomic_load(&running);
    size_t nbytes = buffer_nbytes;
    if (given && ready_count) *buffer = ready[--ready_count];
    unlock();
    if (!given) return;
    if (*buffer == NULL) *buffer = made(nbytes);
    if (*buffer != NULL) {
        *size = nbytes;
        return;
    }
    lock();
    buffers--, lost++;
    unlock();
}

void xe_activity_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)context, (void)stream, (void)size;
    if (buffer == NULL) return;
    full *entry = valid ? malloc(sizeof *entry) : NULL;
    lock();
    int kept = entry != NULL && atomic_load(&running);
    if (kept) {
        *entry = (full){NULL, buffer, valid};
        *newest = entry, newest = &entry->next;
    } else {
        // Nothing is in it, the trace is over, or there is no memory to note it.
        buffers -= buffers > 0;
        lost += valid != 0 && atomic_load(&running);
    }
    unlock();
    if (!kept) free(entry), unmade(buffer);
    // On a thread of CUPTI's own.
    make_ready();
}

uint8_t *xe_activity_take(size_t *valid) {
    lock();
    full *entry = oldest;
    if (entry != NULL && (oldest = entry->next) == NULL) newest = &oldest;
    unlock();
    if (entry == NULL) return NULL;
    uint8_t *buffer = entry->buffer;
    *valid = entry->valid;
    free(entry);
    return buffer;
}

void xe_activity_free(uint8_t *buffer) {
    unmade(buffer);
    lock();
    buffers -= buffers > 0;
    unlock();
}

// Collect the frames of the calling thread, if it runs Python. No Python code runs meanwhile, not even a finalizer: the collector, which
// older interpreters start inside an allocation, is off.
static void note_frames(void) {
    inner_count = 0;
    if (!atomic_load(&has_python) || python.this_thread() == NULL) return;
    int state = python.ensure();
    int collects = python.gc_disable();
    void *frame = python.frame();
    int owned = 0;
    while (frame != NULL && inner_count < XE_MOST_FRAMES) {
        inner[inner_count++] = (xe_frame){python.code(frame), python.at(frame), 0};
        void *outer = python.back(frame);
        if (owned) python.decref(frame);
        frame = outer, owned = 1;
    }
    if (owned && frame != NULL) python.decref(frame);
    if (collects) python.gc_enable();
    python.release(state);
}

static void let_go(void) {
    if (inner_count == 0) return;
    int state = python.ensure();
    while (inner_count) python.decref(inner[--inner_count].code);
    python.release(state);
}

// Make room for more entries of `nbytes` each. The lock is held.
static int grown(void **list, size_t *room, size_t wanted, size_t nbytes) {
    if (wanted <= *room) return 1;
    size_t more = *room ? 2 * *room : 1024;
    while (more < wanted) more *= 2;
    void *moved = realloc(*list, more * nbytes);
    if (moved == NULL) return 0;
    *list = moved, *room = more;
    return 1;
}

void xe_activity_called(void *user, int domain, uint32_t function, const void *told) {
    (void)user;
    const xe_callback_data *data = told;
    if ((domain != 1 && domain != RUNTIME) || function >= XE_MOST_FUNCTIONS) return;
    uint8_t flag = flags[domain - 1][function];
    if (!(flag & XE_WANTED)) return;
    if (data->site == ENTER) {
        // The end of a call may never be told: the trace before may have ended inside it.
        if (of_trace != atomic_load(&traces)) of_trace = atomic_load(&traces), depth = 0, current.start = 0;
        if (depth++ || !atomic_load(&running)) return;
        current = (xe_call){.start = xe_activity_now(), .correlation = data->correlation, .domain = (uint32_t)domain, .function = function};
        if ((flag & XE_COPIES) && data->parameters != NULL) {
            const uint64_t *words = data->parameters;
            current.destination = words[0], current.source = words[1], current.nbytes = words[2];
        }
        note_frames();
        return;
    }
    // A trace may have begun inside the call.
    if (depth > 0) depth--;
    if (depth || current.start == 0) return;
    current.end = xe_activity_now();
    current.thread = (uint32_t)syscall(SYS_gettid);
    lock();
    int noted = atomic_load(&running) && call_count < most_calls && grown((void **)&calls, &call_room, call_count + 1, sizeof *calls) &&
                grown((void **)&frames, &frame_room, frame_count + inner_count, sizeof *frames);
    if (noted) {
        current.first = frame_count, current.frames = inner_count;
        memcpy(frames + frame_count, inner, inner_count * sizeof *frames);
        frame_count += inner_count;
        calls[call_count++] = current;
        inner_count = 0;
    } else {
        lost += atomic_load(&running);
    }
    unlock();
    if (!noted) let_go();
    current.start = 0;
}

const xe_call *xe_activity_calls(size_t *count) {
    *count = call_count;
    return calls;
}

const xe_frame *xe_activity_frames(size_t *count) {
    *count = frame_count;
    return frames;
}

void xe_activity_drop(void) {
    lock();
    free(calls), free(frames);
    calls = NULL, frames = NULL;
    call_count = call_room = frame_count = frame_room = 0;
    unlock();
}

uint64_t xe_activity_lost(void) {
    lock();
    uint64_t found = lost;
    unlock();
    return found;
}
