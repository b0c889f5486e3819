// Tests of the engine in C alone, against a device made of memcpy, delays and failures. `harness NAME` runs one, in a process of its
// own; without a name it prints the names. Built with a sanitizer, that is what judges.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "callbacks.h"
#include "context.h"
#include "engine.h"

#define CHECK(condition)                                                                    \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);       \
            fflush(stderr);                                                                 \
            abort();                                                                        \
        }                                                                                   \
    } while (0)

#if defined(__SANITIZE_THREAD__)
#define BY_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define BY_THREAD_SANITIZER 1
#endif
#endif
#ifndef BY_THREAD_SANITIZER
#define BY_THREAD_SANITIZER 0
#endif

#ifndef PATIENCE_SECONDS
#define PATIENCE_SECONDS 60
#endif
enum { KIB = 1 << 10, MIB = 1 << 20, SECOND = 1000000, PATIENCE = PATIENCE_SECONDS * SECOND };

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static void pause_for(int microseconds) {
    struct timespec span = {microseconds / SECOND, microseconds % SECOND * 1000};
    nanosleep(&span, NULL);
}

static uint32_t dice(uint32_t *seed, uint32_t below) {
    *seed = *seed * 1664525 + 1013904223;
    return (*seed >> 8) % below;
}

// The device. A stream is a thread that does what it was told in order. Its memory is the host's.

enum { NOT_READY = 600, BROKEN = 700, LOST_DEVICE = 999 };

typedef struct {
    atomic_uint recorded, reached;   // How often.
} event;

typedef enum { COPY, RECORD, WAIT, HOLD } kind;

typedef struct op {
    struct op *next;
    kind kind;
    void *dst;
    const void *src;
    size_t nbytes;
    event *event;
    unsigned target;
} op;

typedef struct {
    pthread_mutex_t mu;
    pthread_cond_t more;
    op *first, *last;
    kind kinds[1 << 16];             // What came into it, in order.
    const void *which[1 << 16];      // The event, or where a copy writes to.
    atomic_size_t count;
    atomic_int inside;               // Calls that are in it now.
    const void *context;             // Calls for it are made in this one,
    int library;                     // of this library.
    bool slow;
    uint32_t seed;
    pthread_t thread;
    bool over;
} stream;

static atomic_int calls_made, fail_at = -1, fail_kind = -1;
static atomic_bool device_lost, copies_fail_late, copies_fail_unseen;
static atomic_bool gate = true;      // Open.
static _Atomic(const void *) held_in, held_too;  // The streams whose copies do not return before the gate is open.
static atomic_int enter_fails;

static void *stream_runs(void *which) {
    stream *s = which;
    for (;;) {
        pthread_mutex_lock(&s->mu);
        while (!s->first && !s->over) pthread_cond_wait(&s->more, &s->mu);
        op *o = s->first;
        if (!o) {
            pthread_mutex_unlock(&s->mu);
            return NULL;
        }
        s->first = o->next;
        if (!s->first) s->last = NULL;
        pthread_mutex_unlock(&s->mu);
        if (s->slow) pause_for((int)dice(&s->seed, 300));
        switch (o->kind) {
        case COPY: memcpy(o->dst, o->src, o->nbytes); break;
        case RECORD: atomic_store(&o->event->reached, o->target); break;
        case WAIT:
            while (atomic_load(&o->event->reached) < o->target) pause_for(50);
            break;
        case HOLD:
            while (!atomic_load(&gate)) pause_for(2000);
            break;
        }
        free(o);
    }
}

static int contexts[2];

static stream *new_stream(const void *context, bool slow) {
    stream *s = calloc(1, sizeof *s);
    s->context = context;
    pthread_mutex_init(&s->mu, NULL);
    pthread_cond_init(&s->more, NULL);
    s->slow = slow;
    s->seed = 7;
    CHECK(pthread_create(&s->thread, NULL, stream_runs, s) == 0);
    return s;
}

static void end_stream(stream *s) {
    pthread_mutex_lock(&s->mu);
    s->over = true;
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->mu);
    pthread_join(s->thread, NULL);
    free(s);
}

static void tell(stream *s, op told, const void *which) {
    op *o = malloc(sizeof *o);
    *o = told;
    o->next = NULL;
    pthread_mutex_lock(&s->mu);
    if (s->last) s->last->next = o;
    else s->first = o;
    s->last = o;
    size_t count = atomic_load(&s->count);
    if (count < sizeof s->kinds / sizeof *s->kinds) {
        s->kinds[count] = o->kind;
        s->which[count] = which;
        atomic_store(&s->count, count + 1);
    }
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->mu);
}

// Wait until it has nothing to do.
static void drain(stream *s) {
    event *e = calloc(1, sizeof *e);
    tell(s, (op){.kind = RECORD, .event = e, .target = 1}, e);
    while (!atomic_load(&e->reached)) pause_for(50);
    free(e);
}

// One call of the driver; which of them fail is decided here.
static int fails(kind what) {
    int number = atomic_fetch_add(&calls_made, 1);
    if (atomic_load(&device_lost)) return LOST_DEVICE;
    if (number == atomic_load(&fail_at) || (int)what == atomic_load(&fail_kind)) return BROKEN;
    return 0;
}

// Where a thread is, in each of two libraries for devices.
enum { STRICT, RELAXED = 2 };
static _Thread_local struct {
    void *context;
    bool entered;
    int mode;
} places[2];
static pthread_t harness;
static atomic_int exchanges;

static int enter_in(int library, void *context) {
    if (atomic_load(&enter_fails)) return LOST_DEVICE;
    places[library].context = context;
    places[library].entered = true;
    return 0;
}

static int current_in(int library, void **context) {
    *context = places[library].context;
    return 0;
}

static int exchange_in(int library, int *mode) {
    int before = places[library].mode;
    places[library].mode = *mode;
    *mode = before;
    // Who waits works, too, and goes back to where it was: its own matter.
    if (!pthread_equal(pthread_self(), harness)) atomic_fetch_add(&exchanges, 1);
    return 0;
}

static int enter(void *context) { return enter_in(0, context); }
static int current(void **context) { return current_in(0, context); }
static int exchange(int *mode) { return exchange_in(0, mode); }
static int enter_second(void *context) { return enter_in(1, context); }
static int current_second(void **context) { return current_in(1, context); }
static int exchange_second(int *mode) { return exchange_in(1, mode); }

// By a thread of the test, which does what the engine does.
static void go_to(void *context) {
    int mode = RELAXED;
    enter(context);
    exchange(&mode);
}

static void begin_call(stream *s) {
    CHECK(places[s->library].context == s->context && places[s->library].mode == RELAXED);
    CHECK(atomic_fetch_add(&s->inside, 1) == 0);
}

static int copy_h2d(uint64_t dst, const void *src, size_t nbytes, void *which) {
    stream *s = which;
    begin_call(s);
    if (s->slow) pause_for(20);
    while ((atomic_load(&held_in) == s || atomic_load(&held_too) == s) && !atomic_load(&gate)) pause_for(100);
    int status = fails(COPY);
    if (!status || atomic_load(&copies_fail_late)) tell(s, (op){.kind = COPY, .dst = (void *)dst, .src = src, .nbytes = nbytes}, (void *)dst);
    atomic_fetch_sub(&s->inside, 1);
    return status;
}

static int copy_d2h(void *dst, uint64_t src, size_t nbytes, void *which) {
    return copy_h2d((uint64_t)dst, (const void *)src, nbytes, which);
}

static int record(void *which, void *where) {
    event *e = which;
    stream *s = where;
    begin_call(s);
    int status = fails(RECORD);
    if (!status) tell(s, (op){.kind = RECORD, .event = e, .target = atomic_fetch_add(&e->recorded, 1) + 1}, e);
    atomic_fetch_sub(&s->inside, 1);
    return status;
}

// Questions of the threads that say so do not return before they may.
static _Thread_local bool is_held_asking;
static atomic_bool asks, may_ask;

static int query(void *which) {
    event *e = which;
    if (is_held_asking) {
        atomic_store(&asks, true);
        while (!atomic_load(&may_ask)) pause_for(100);
    }
    CHECK((places[0].entered && places[0].mode == RELAXED) || (places[1].entered && places[1].mode == RELAXED));
    if (atomic_load(&device_lost)) return LOST_DEVICE;
    if (atomic_load(&copies_fail_unseen)) return BROKEN;
    // One that was never recorded is reached, as CUDA has it.
    return atomic_load(&e->reached) < atomic_load(&e->recorded) ? NOT_READY : 0;
}

static int wait_for(void *where, void *which, unsigned flags) {
    stream *s = where;
    event *e = which;
    CHECK(flags == 0);
    begin_call(s);
    int status = fails(WAIT);
    if (!status) tell(s, (op){.kind = WAIT, .event = e, .target = atomic_load(&e->recorded)}, e);
    atomic_fetch_sub(&s->inside, 1);
    return status;
}

#define IN(which, context, enter, current, exchange) \
    {XE_VERSION, sizeof which, context, NOT_READY, RELAXED, enter, current, exchange, copy_h2d, copy_d2h, record, query, wait_for}
static const xe_calls DEVICE = IN(DEVICE, &contexts[0], enter, current, exchange);
static const xe_calls OTHER = IN(OTHER, &contexts[1], enter, current, exchange);
static const xe_calls FOREIGN = IN(FOREIGN, &contexts[1], enter_second, current_second, exchange_second);

// Lanes with their chunks.

enum { MOST_CHUNKS = 32 };

typedef struct {
    uint32_t number;
    int direction;
    stream *stream;
    event events[MOST_CHUNKS];
    char *memory;
    size_t chunks, nbytes;
} bench;

static atomic_uint_fast64_t next_id = 1;
static size_t together = 1;          // So many chunks of a bench lie side by side in a block.

// Take back what can be, of the chunks with the first numbers, and return how many those were.
static int take_idle(uint32_t lane, uint64_t numbers) {
    int taken = 0;
    for (uint64_t n = 0; n < numbers; n++) {
        int status = xe_take_chunk(lane, n);
        CHECK(status == XE_OK || status == XE_NOT_YET);
        taken += status == XE_OK;
    }
    return taken;
}

static bench *new_bench(uint32_t number, int direction, const xe_calls *calls, size_t chunks, size_t nbytes, bool slow) {
    CHECK(chunks <= MOST_CHUNKS);
    bench *b = calloc(1, sizeof *b);
    *b = (bench){.number = number, .direction = direction, .chunks = chunks, .nbytes = nbytes};
    b->stream = new_stream(calls ? calls->context : &contexts[0], slow);
    b->stream->library = calls && calls->enter == enter_second;
    b->memory = aligned_alloc(4096, chunks * nbytes);
    CHECK(xe_open_lane(number, direction, calls, b->stream) == XE_OK);
    for (size_t n = 0; n < chunks; n++)
        CHECK(xe_add_chunk(number, n, b->memory + n * nbytes, nbytes, n / together, calls ? &b->events[n] : NULL) == XE_OK);
    return b;
}

static void end_bench(bench *b) {
    CHECK(xe_close_lane(b->number) == XE_OK);
    end_stream(b->stream);
    free(b->memory);
    free(b);
}

// A transfer of pieces: each lies at a multiple of 256 behind the one before, on the device, in one block.

typedef struct {
    uint64_t id;
    bench *bench;
    size_t count, *sizes, total;
    char **host;
    char *device;
    xe_piece *pieces;
    uint32_t seed;
} transfer;

static char value(uint32_t seed, size_t piece, size_t at) { return (char)(seed * 31 + piece * 7 + at * 13 + (at >> 8) + 1); }

static transfer *new_transfer(bench *b, size_t count, const size_t *sizes, uint32_t seed) {
    transfer *t = calloc(1, sizeof *t);
    *t = (transfer){.id = atomic_fetch_add(&next_id, 1), .bench = b, .count = count, .seed = seed};
    t->sizes = malloc(count * sizeof *t->sizes);
    memcpy(t->sizes, sizes, count * sizeof *t->sizes);
    t->host = calloc(count, sizeof *t->host);
    t->pieces = calloc(count, sizeof *t->pieces);
    for (size_t n = 0; n < count; n++) t->total += (sizes[n] + 255) / 256 * 256;
    t->device = aligned_alloc(256, t->total);
    memset(t->device, 0x55, t->total);
    size_t at = 0;
    for (size_t n = 0; n < count; n++) {
        // Not aligned: as the memory of users.
        t->host[n] = (char *)malloc(sizes[n] + 3) + 3;
        // Where nothing is there, parts have other lengths.
        memset(t->host[n], 0x33, sizes[n]);
        t->pieces[n] = (xe_piece){t->host[n], (uint64_t)(t->device + at), sizes[n], 1};
        char *from = b->direction == XE_H2D ? t->host[n] : t->device + at;
        for (size_t k = 0; k < sizes[n]; k++) from[k] = value(seed, n, k);
        at += (sizes[n] + 255) / 256 * 256;
    }
    return t;
}

static void start(transfer *t, event *after, event *done) {
    CHECK(xe_submit(t->id, t->bench->number, t->pieces, t->count, NULL, after, done) == XE_OK);
}

static void check_arrived(const transfer *t) {
    for (size_t n = 0; n < t->count; n++) {
        const char *there = t->bench->direction == XE_H2D ? (const char *)t->pieces[n].device : t->host[n];
        for (size_t k = 0; k < t->sizes[n]; k++) CHECK(there[k] == value(t->seed, n, k));
    }
}

static void end_transfer(transfer *t) {
    uint64_t ids[8];
    while (xe_forget(t->id) == XE_BUSY) {
        CHECK(xe_wait(t->id, XE_FINISHED, 0) != XE_NOT_YET);
        while (xe_finished(ids, 8)) {}
    }
    for (size_t n = 0; n < t->count; n++) free(t->host[n] - 3);
    free(t->host);
    free(t->device);
    free(t->pieces);
    free(t->sizes);
    free(t);
}

static transfer *of_one(bench *b, size_t nbytes, uint32_t seed) { return new_transfer(b, 1, &nbytes, seed); }

static void finish(transfer *t) {
    CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_OK);
    check_arrived(t);
    end_transfer(t);
}

// By the engine's threads alone: whoever waits works as well.
static int ask_until(const transfer *t, int stage) {
    int status;
    double until = seconds() + PATIENCE_SECONDS;
    while ((status = xe_wait(t->id, stage, 0)) == XE_NOT_YET && seconds() < until) pause_for(5);
    return status;
}

// Both directions and lanes of their owner's, too: a thread stands for whoever owns them.

static atomic_bool owner_over;
static bench *owned[2];
static atomic_int owner_fails_at = -1, owner_answers, owner_lasts;

static void *own(void *unused) {
    (void)unused;
    struct { bench *bench; uint64_t chunk; } out[64];
    size_t waiting = 0;
    static xe_request requests[4 * XE_MOST_PIECES];
    uint32_t seed = 3;
    go_to(&contexts[0]);
    while (!atomic_load(&owner_over)) {
        size_t count = xe_requests(requests, 4 * XE_MOST_PIECES, 200);
        int failed = 0;
        for (size_t n = 0; n < count; n++) {
            xe_request *r = &requests[n];
            bench *b = owned[0] && owned[0]->number == r->lane ? owned[0] : owned[1];
            if (atomic_fetch_add(&owner_answers, 1) == atomic_load(&owner_fails_at)) failed = BROKEN;
            if (!failed) {
                if (b->direction == XE_H2D) copy_h2d(r->device, r->memory, r->nbytes, b->stream);
                else copy_d2h(r->memory, r->device, r->nbytes, b->stream);
            }
            if (r->last) atomic_fetch_add(&owner_lasts, 1);
            if (r->record) {
                CHECK(record(&b->events[r->chunk], b->stream) == 0);
                CHECK(xe_answer(r->lane, r->chunk, failed, 1) == XE_OK);
                CHECK(xe_answer(r->lane, r->chunk, failed, 1) == XE_WRONG);
                out[waiting].bench = b;
                out[waiting++].chunk = r->chunk;
                failed = 0;
            }
        }
        // In any order.
        for (size_t n = 0; n < waiting;) {
            size_t k = n + dice(&seed, (uint32_t)(waiting - n));
            if (query(&out[k].bench->events[out[k].chunk]) == 0) {
                CHECK(xe_reached(out[k].bench->number, out[k].chunk, 0) == XE_OK);
                out[k] = out[--waiting];
            } else {
                n++;
            }
        }
    }
    return NULL;
}

static const size_t SIZES[] = {1, 255, 256, 257, 4 * KIB, 64 * KIB, 256 * KIB - 1, 256 * KIB, 256 * KIB + 1, MIB, 3 * MIB + 17, 9 * MIB};

static void moves(const xe_calls *calls, int threads, bool slow) {
    xe_start(threads);
    together = 3;
    bench *both[2] = {new_bench(1, XE_H2D, calls, 4, MIB, slow), new_bench(2, XE_D2H, calls, 4, MIB, slow)};
    pthread_t owner;
    if (!calls) {
        owned[0] = both[0];
        owned[1] = both[1];
        CHECK(pthread_create(&owner, NULL, own, NULL) == 0);
    }
    for (int way = 0; way < 2; way++) {
        for (size_t n = 0; n < sizeof SIZES / sizeof *SIZES; n++) {
            transfer *t = of_one(both[way], SIZES[n], (uint32_t)n);
            start(t, NULL, NULL);
            finish(t);
        }
        // Of many pieces, whose sizes cross every border.
        size_t sizes[700];
        uint32_t seed = 11;
        for (size_t n = 0; n < 700; n++) sizes[n] = 1 + dice(&seed, n % 100 == 0 ? 700 * KIB : 3 * KIB);
        transfer *many = new_transfer(both[way], 700, sizes, 5);
        start(many, NULL, NULL);
        finish(many);
        // Several at once.
        transfer *several[12];
        for (size_t n = 0; n < 12; n++) start(several[n] = of_one(both[way], SIZES[n], (uint32_t)n + 40), NULL, NULL);
        for (size_t n = 0; n < 12; n++) finish(several[n]);
    }
    if (!calls) {
        atomic_store(&owner_over, true);
        pthread_join(owner, NULL);
        xe_figures figures;
        xe_read_figures(&figures);
        CHECK(atomic_load(&owner_lasts) == (int)figures.jobs);
    }
    // Each thread once.
    if (calls && threads) CHECK(atomic_load(&exchanges) <= threads);
    end_bench(both[0]);
    end_bench(both[1]);
}

static void moves_by_one_thread(void) { moves(&DEVICE, 1, false); }
static void moves_by_four_threads(void) { moves(&DEVICE, 4, false); }
static void moves_slowly(void) { moves(&DEVICE, 3, true); }
static void moves_by_whoever_waits(void) { moves(&DEVICE, 0, false); }
static void moves_by_its_owner(void) { moves(NULL, 2, false); }
static void moves_slowly_by_its_owner(void) { moves(NULL, 3, true); }

// When a job is staged, its source may be rewritten.
static void frees_its_source(void) {
    xe_start(3);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 4, 256 * KIB, false);
    for (uint32_t n = 0; n < 20; n++) {
        transfer *t = of_one(b, n % 2 ? 200 * KIB : 2 * MIB, n);
        start(t, NULL, NULL);
        CHECK(xe_wait(t->id, XE_STAGED, PATIENCE) == XE_OK);
        memset(t->host[0], 0, t->sizes[0]);
        finish(t);
    }
    end_bench(b);
}

// Pieces in different blocks are not joined, though they lie side by side, nor are those that do not.
static void joins_what_belongs_together(void) {
    xe_start(2);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 4, MIB, false);
    size_t sizes[5] = {512, 300, 512, 256, 512};
    transfer *t = new_transfer(b, 5, sizes, 1);
    t->pieces[2].block = 2;
    // What lies between is somebody else's.
    char between[256];
    memcpy(between, (char *)t->pieces[3].device, sizeof between);
    xe_piece sent[4] = {t->pieces[0], t->pieces[1], t->pieces[2], t->pieces[4]};
    sent[3].block = 2;
    CHECK(xe_submit(t->id, 1, sent, 4, NULL, NULL, NULL) == XE_OK);
    CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_OK);
    CHECK(memcmp(between, (char *)t->pieces[3].device, sizeof between) == 0);
    memcpy((char *)t->pieces[3].device, t->host[3], sizes[3]);
    check_arrived(t);
    size_t copies = 0;
    for (size_t n = 0; n < b->stream->count; n++) copies += b->stream->kinds[n] == COPY;
    CHECK(copies == 3);
    end_transfer(t);
    end_bench(b);
}

// A copy that is held on one lane holds up nobody, with one thread.
static void waits_for_no_lane(void) {
    xe_start(1);
    bench *held = new_bench(1, XE_D2H, &DEVICE, 4, MIB, false);
    bench *puts = new_bench(2, XE_H2D, &DEVICE, 4, MIB, false), *gets = new_bench(3, XE_D2H, &OTHER, 4, MIB, false);
    atomic_store(&gate, false);
    tell(held->stream, (op){.kind = HOLD}, NULL);
    transfer *first = of_one(held, 9 * MIB, 1);
    start(first, NULL, NULL);
    for (uint32_t n = 0; n < 5; n++) {
        transfer *put = of_one(puts, 9 * MIB, n), *get = of_one(gets, 9 * MIB, n + 5);
        start(put, NULL, NULL);
        start(get, NULL, NULL);
        finish(put);
        finish(get);
    }
    CHECK(xe_wait(first->id, XE_FINISHED, 1000) == XE_NOT_YET);
    CHECK(xe_wait(first->id, XE_ISSUED, 0) == XE_NOT_YET);
    atomic_store(&gate, true);
    finish(first);
    end_bench(held);
    end_bench(puts);
    end_bench(gets);
}

// However many lanes are held, each of them is asked.
static void asks_every_lane(void) {
    enum { HELD = 40 };
    xe_start(1);
    bench *held[HELD];
    transfer *t[HELD];
    atomic_store(&gate, false);
    for (uint32_t n = 0; n < HELD; n++) {
        held[n] = new_bench(n + 1, XE_D2H, &DEVICE, 1, 64 * KIB, false);
        tell(held[n]->stream, (op){.kind = HOLD}, NULL);
        start(t[n] = of_one(held[n], 100, n), NULL, NULL);
    }
    for (uint32_t n = 0; n < HELD; n++) CHECK(xe_wait(t[n]->id, XE_ISSUED, PATIENCE) == XE_OK);
    bench *b = new_bench(HELD + 1, XE_D2H, &DEVICE, 1, 64 * KIB, false);
    for (uint32_t n = 0; n < 3; n++) {
        transfer *free = of_one(b, 100, n);
        start(free, NULL, NULL);
        // A thread of the engine puts the lane behind all others as it begins; whoever waits would leave it where it is.
        CHECK(ask_until(free, XE_FINISHED) == XE_OK);
        finish(free);
    }
    atomic_store(&gate, true);
    for (uint32_t n = 0; n < HELD; n++) {
        finish(t[n]);
        end_bench(held[n]);
    }
    end_bench(b);
}

// Until the only thread has gone to sleep so often.
static void until_asleep(uint64_t times) {
    xe_figures figures;
    do {
        pause_for(100);
        xe_read_figures(&figures);
    } while (figures.sleeps < times);
}

static void *start_and_wait(void *which) {
    transfer *t = which;
    start(t, NULL, NULL);
    CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_OK);
    return NULL;
}

// Threads that are started while somebody works instead of them take over what was begun.
static void takes_over(int direction) {
    bench *b = new_bench(1, direction, &DEVICE, 1, 64 * KIB, false);
    transfer *t = of_one(b, 100, 1);
    atomic_store(&gate, false);
    atomic_store(&held_in, b->stream);
    pthread_t waits;
    CHECK(pthread_create(&waits, NULL, start_and_wait, t) == 0);
    while (atomic_load(&b->stream->inside) == 0) pause_for(100);
    CHECK(xe_start(1) == 1);
    // It has found nothing to do.
    xe_figures figures = {0};
    while (figures.sleeps == 0) {
        pause_for(100);
        xe_read_figures(&figures);
    }
    atomic_store(&gate, true);
    pthread_join(waits, NULL);
    finish(t);
    end_bench(b);
}

static void takes_over_to_the_device(void) { takes_over(XE_H2D); }
static void takes_over_to_the_host(void) { takes_over(XE_D2H); }

// The thread of the engine does not come back from a call, and whoever waits does the work.
static void works_while_it_waits(int direction) {
    xe_start(1);
    bench *held = new_bench(1, XE_H2D, &DEVICE, 1, 64 * KIB, false), *b = new_bench(2, direction, &DEVICE, 2, 64 * KIB, false);
    atomic_store(&gate, false);
    atomic_store(&held_in, held->stream);
    transfer *first = of_one(held, 100, 1), *second = of_one(b, 900 * KIB, 2);
    start(first, NULL, NULL);
    while (atomic_load(&held->stream->inside) == 0) pause_for(100);
    start(second, NULL, NULL);
    CHECK(xe_wait(second->id, XE_FINISHED, PATIENCE) == XE_OK);
    finish(second);
    atomic_store(&gate, true);
    finish(first);
    end_bench(b);
    end_bench(held);
}

static void works_while_it_waits_to_the_device(void) { works_while_it_waits(XE_H2D); }
static void works_while_it_waits_to_the_host(void) { works_while_it_waits(XE_D2H); }

static void *start_and_leave(void *which) {
    transfer *t = which;
    start(t, NULL, NULL);
    CHECK(xe_wait(t->id, XE_ISSUED, PATIENCE) == XE_OK);
    return NULL;
}

// What whoever waits has begun goes on when he has gone, though the threads of the engine slept meanwhile.
static void leaves_what_it_began(void) {
    xe_start(1);
    bench *held = new_bench(1, XE_H2D, &DEVICE, 1, 64 * KIB, false), *b = new_bench(2, XE_H2D, &DEVICE, 1, 64 * KIB, false);
    atomic_store(&gate, false);
    atomic_store(&held_in, held->stream);
    atomic_store(&held_too, b->stream);
    transfer *first = of_one(held, 100, 1), *second = of_one(b, 100, 2);
    start(first, NULL, NULL);
    while (atomic_load(&held->stream->inside) == 0) pause_for(100);
    pthread_t waits;
    CHECK(pthread_create(&waits, NULL, start_and_leave, second) == 0);
    while (atomic_load(&b->stream->inside) == 0) pause_for(100);
    atomic_store(&held_in, NULL);
    CHECK(ask_until(first, XE_FINISHED) == XE_OK);
    // The thread of the engine finds nothing to do, and sleeps.
    xe_figures before, after = {0};
    do {
        before = after;
        pause_for(10000);
        xe_read_figures(&after);
    } while (after.sleeps == 0 || after.sleeps != before.sleeps);
    atomic_store(&gate, true);
    pthread_join(waits, NULL);
    CHECK(ask_until(second, XE_FINISHED) == XE_OK);
    finish(first);
    finish(second);
    end_bench(b);
    end_bench(held);
}

// Nor does it matter that there were none when it began.
static void *asks_and_leaves(void *which) {
    is_held_asking = true;
    CHECK(xe_wait(((const transfer *)which)->id, XE_FINISHED, 1000) == XE_NOT_YET);
    return NULL;
}

// Whoever waits, and asks meanwhile, leaves that to others when its time is over: they sleep.
static void leaves_what_it_asks_for(void) {
    xe_start(1);
    bench *held = new_bench(1, XE_H2D, &DEVICE, 1, 64 * KIB, false), *b = new_bench(2, XE_H2D, &DEVICE, 1, 64 * KIB, false);
    atomic_store(&gate, false);
    atomic_store(&held_in, held->stream);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    transfer *first = of_one(b, 100, 1), *second = of_one(held, 100, 2);
    start(first, NULL, NULL);
    CHECK(ask_until(first, XE_ISSUED) == XE_OK);
    start(second, NULL, NULL);
    while (atomic_load(&held->stream->inside) == 0) pause_for(100);
    pthread_t waits;
    CHECK(pthread_create(&waits, NULL, asks_and_leaves, first) == 0);
    while (!atomic_load(&asks)) pause_for(100);
    xe_figures before, after;
    xe_read_figures(&before);
    atomic_store(&held_in, NULL);
    until_asleep(before.sleeps + 1);
    atomic_store(&may_ask, true);
    pthread_join(waits, NULL);
    xe_read_figures(&before);
    double until = seconds() + PATIENCE_SECONDS;
    // Without a word to the engine that might wake somebody.
    do {
        pause_for(1000);
        xe_read_figures(&after);
    } while (after.polls == before.polls && seconds() < until);
    CHECK(after.polls > before.polls);
    CHECK(ask_until(second, XE_FINISHED) == XE_OK);
    atomic_store(&gate, true);
    finish(first);
    finish(second);
    end_bench(b);
    end_bench(held);
}

static void leaves_what_it_began_before_there_were_threads(void) {
    bench *b = new_bench(1, XE_H2D, &DEVICE, 1, 64 * KIB, false);
    atomic_store(&gate, false);
    atomic_store(&held_in, b->stream);
    transfer *t = of_one(b, 100, 1);
    pthread_t waits;
    CHECK(pthread_create(&waits, NULL, start_and_leave, t) == 0);
    while (atomic_load(&b->stream->inside) == 0) pause_for(100);
    CHECK(xe_start(1) == 1);
    until_asleep(1);
    atomic_store(&gate, true);
    pthread_join(waits, NULL);
    CHECK(ask_until(t, XE_FINISHED) == XE_OK);
    finish(t);
    end_bench(b);
}

// A device that takes its time with a call on one lane holds up nobody else, with two threads.
static void waits_for_no_call(void) {
    xe_start(2);
    bench *other = new_bench(1, XE_D2H, &DEVICE, 1, 64 * KIB, false), *held = new_bench(2, XE_D2H, &DEVICE, 1, 64 * KIB, false);
    atomic_store(&gate, false);
    atomic_store(&held_in, held->stream);
    // One thread asks for this one, and the other one sleeps, when the call that does not return is to be made.
    tell(other->stream, (op){.kind = HOLD}, NULL);
    transfer *first = of_one(other, 100, 1), *second = of_one(held, 100, 2);
    start(first, NULL, NULL);
    CHECK(xe_wait(first->id, XE_ISSUED, PATIENCE) == XE_OK);
    pause_for(50000);
    start(second, NULL, NULL);
    while (atomic_load(&held->stream->inside) == 0) pause_for(100);
    pause_for(20000);
    xe_figures before, after;
    xe_read_figures(&before);
    double began = seconds();
    do {
        pause_for(1000);
        xe_read_figures(&after);
    } while (after.polls == before.polls && seconds() - began < 5);
    CHECK(after.polls > before.polls);
    atomic_store(&gate, true);
    finish(first);
    finish(second);
    end_bench(other);
    end_bench(held);
}

// The calls are made in the lane's context, on whatever thread, and whatever was done on it meanwhile; it finds itself where it was.
static void enters_again_where_it_works_for_others(void) {
    static xe_calls nowhere, alike;
    nowhere = alike = DEVICE;
    nowhere.context = NULL;
    alike.capture_mode = NULL;
    const xe_calls *calls[] = {&nowhere, &DEVICE, &alike};
    for (uint32_t n = 0; n < 3; n++) {
        bench *b = new_bench(n + 1, XE_H2D, calls[n], 2, 64 * KIB, false);
        // Where threads have no modes, none is needed.
        int before = calls[n]->capture_mode ? STRICT : RELAXED;
        for (uint32_t k = 0; k < 3; k++) {
            transfer *t = of_one(b, 300 * KIB, k);
            enter(&contexts[1]);
            places[0].mode = before;
            start(t, NULL, NULL);
            finish(t);
            CHECK(places[0].context == &contexts[1] && places[0].mode == before);
        }
        end_bench(b);
    }
}

// Of two libraries, too, whose lanes are worked for in turn.
static void goes_back_in_each_library(void) {
    bench *first = new_bench(1, XE_H2D, &DEVICE, 1, 64 * KIB, false), *second = new_bench(2, XE_H2D, &FOREIGN, 1, 64 * KIB, false);
    int place;
    for (uint32_t n = 0; n < 3; n++) {
        transfer *one = of_one(first, 300 * KIB, n), *two = of_one(second, 300 * KIB, n + 9);
        places[0].context = places[1].context = &place;
        start(one, NULL, NULL);
        start(two, NULL, NULL);
        CHECK(xe_wait(one->id, XE_FINISHED, PATIENCE) == XE_OK && xe_wait(two->id, XE_FINISHED, PATIENCE) == XE_OK);
        for (int k = 0; k < 2; k++) CHECK(places[k].context == &place && places[k].mode == STRICT);
        finish(one);
        finish(two);
    }
    end_bench(first);
    end_bench(second);
}

// An event that is reached when its recording returns.
static int record_reached(void *which, void *where) {
    int status = record(which, where);
    drain(where);
    return status;
}

// Whoever asks without waiting gets on where there are no threads, as far as the chunks that are idle or come back go.
static void does_what_can_be_done_at_once(void) {
    static xe_calls prompt;
    prompt = DEVICE;
    prompt.record = record_reached;
    for (int direction = 0; direction < 2; direction++) {
        bench *b = new_bench((uint32_t)direction + 1, direction, &prompt, 1, 256 * KIB, false);
        transfer *t = of_one(b, 4 * 256 * KIB, 1);
        start(t, NULL, NULL);
        // The first part is issued and asked for, and the second one issued; and so on.
        for (int n = 0; n < 3; n++) CHECK(xe_wait(t->id, XE_FINISHED, 0) == XE_NOT_YET);
        CHECK(xe_wait(t->id, XE_FINISHED, 0) == XE_OK);
        CHECK(places[0].context == NULL && places[0].mode == STRICT);
        finish(t);
        // What is held does not hold up who asks.
        atomic_store(&gate, false);
        tell(b->stream, (op){.kind = HOLD}, NULL);
        prompt.record = record;
        start(t = of_one(b, 100, 2), NULL, NULL);
        for (int n = 0; n < 3; n++) CHECK(xe_wait(t->id, XE_FINISHED, 0) == XE_NOT_YET);
        CHECK(xe_wait(t->id, XE_ISSUED, 0) == XE_OK);
        atomic_store(&gate, true);
        prompt.record = record_reached;
        finish(t);
        end_bench(b);
    }
}

static double processor_seconds(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

// Prints what it costs to have a held copy asked for; judged by whoever reads it.
static void costs_little_while_held(void) {
    xe_start(4);
    bench *held = new_bench(1, XE_D2H, &DEVICE, 4, MIB, false);
    atomic_store(&gate, false);
    tell(held->stream, (op){.kind = HOLD}, NULL);
    transfer *t = of_one(held, MIB, 1);
    start(t, NULL, NULL);
    CHECK(xe_wait(t->id, XE_ISSUED, PATIENCE) == XE_OK);
    pause_for(100000);
    xe_figures before, after;
    xe_read_figures(&before);
    double began = seconds(), used = processor_seconds();
    pause_for(2 * SECOND);
    xe_read_figures(&after);
    double share = (processor_seconds() - used) / (seconds() - began);
    printf("a held copy: %.1f %% of a core, %.0f questions a second\n", 100 * share, (after.polls - before.polls) / (seconds() - began));
    // Without the backoff it is a whole core, and there are a hundred times as many.
    CHECK(after.polls - before.polls < 2 * 5100 + 200);
    CHECK(after.polls - before.polls > 100);
    atomic_store(&gate, true);
    finish(t);
    // All sleep when there is nothing in flight.
    pause_for(20000);
    xe_read_figures(&before);
    pause_for(100000);
    xe_read_figures(&after);
    CHECK(after.polls == before.polls && after.sleeps == before.sleeps);
    end_bench(held);
}

// What comes before a job is waited for directly before its first copy, and its event comes directly behind the last.
static void orders_its_copies(void) {
    xe_start(4);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 4, 256 * KIB, false);
    stream *producer = new_stream(&contexts[0], false);
    event before[6], done[6];
    memset(before, 0, sizeof before);
    memset(done, 0, sizeof done);
    transfer *t[6];
    atomic_store(&gate, false);
    tell(producer, (op){.kind = HOLD}, NULL);
    go_to(&contexts[0]);
    for (uint32_t n = 0; n < 6; n++) {
        t[n] = of_one(b, n % 2 ? 100 * KIB : 3 * MIB, n);
        record(&before[n], producer);
        start(t[n], n % 3 == 2 ? NULL : &before[n], &done[n]);
    }
    // All is held that comes behind the first wait.
    pause_for(20000);
    CHECK(xe_wait(t[0]->id, XE_FINISHED, 0) == XE_NOT_YET);
    for (size_t k = 0; k < t[0]->total; k++) CHECK(t[0]->device[k] == 0x55);
    atomic_store(&gate, true);
    for (uint32_t n = 0; n < 6; n++) {
        CHECK(xe_wait(t[n]->id, XE_ISSUED, PATIENCE) == XE_OK);
        // It is recorded by then: a wait for it waits for the copies.
        CHECK(atomic_load(&done[n].recorded) == 1);
        CHECK(xe_wait(t[n]->id, XE_FINISHED, PATIENCE) == XE_OK);
        check_arrived(t[n]);
    }
    stream *s = b->stream;
    pthread_mutex_lock(&s->mu);
    for (uint32_t n = 0; n < 6; n++) {
        size_t first = s->count, last = 0, waits = 0, dones = 0, waited = 0, done_at = 0;
        for (size_t k = 0; k < s->count; k++) {
            const char *where = s->which[k];
            if (s->kinds[k] == COPY && where >= t[n]->device && where < t[n]->device + t[n]->total) {
                if (k < first) first = k;
                last = k;
            }
            if (s->which[k] == &before[n]) waits++, waited = k;
            if (s->which[k] == &done[n]) dones++, done_at = k;
        }
        CHECK(waits == (n % 3 != 2));
        if (waits) CHECK(waited + 1 == first);
        // Behind the last copy comes the event of its chunk.
        CHECK(dones == 1 && done_at == last + 2);
    }
    pthread_mutex_unlock(&s->mu);
    for (uint32_t n = 0; n < 6; n++) end_transfer(t[n]);
    end_stream(producer);
    end_bench(b);
}

// Not when its last part has begun, nor when its copy is being enqueued: somebody waits on its event next.
static void is_issued_when_its_event_is_recorded(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 1, 64 * KIB, false);
    event done = {0};
    transfer *t = of_one(b, 100, 1);
    atomic_store(&gate, false);
    atomic_store(&held_in, b->stream);
    start(t, NULL, &done);
    while (atomic_load(&b->stream->inside) == 0) pause_for(100);
    CHECK(xe_wait(t->id, XE_STAGED, 0) == XE_OK);
    CHECK(xe_wait(t->id, XE_ISSUED, 0) == XE_NOT_YET);
    atomic_store(&gate, true);
    CHECK(xe_wait(t->id, XE_ISSUED, PATIENCE) == XE_OK);
    CHECK(atomic_load(&done.recorded) == 1);
    finish(t);
    end_bench(b);
}

// Small ones need not wait for large ones, nor for ever the other way round.
static void is_fair(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 2, 256 * KIB, false);
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    transfer *large = of_one(b, 8 * MIB, 1);
    start(large, NULL, NULL);
    while (xe_wait(large->id, XE_STAGED, 0) == XE_NOT_YET && b->stream->count < 5) pause_for(100);
    transfer *small[3];
    for (uint32_t n = 0; n < 3; n++) start(small[n] = of_one(b, 64 * KIB, n + 2), NULL, NULL);
    atomic_store(&gate, true);
    // Of two threads either may be faster.
    for (uint32_t n = 0; n < 3; n++) CHECK(ask_until(small[n], XE_FINISHED) == XE_OK);
    CHECK(xe_wait(large->id, XE_FINISHED, PATIENCE) == XE_OK);
    size_t copies = 0, place[3];
    for (size_t k = 0; k < b->stream->count; k++) {
        if (b->stream->kinds[k] != COPY) continue;
        for (uint32_t n = 0; n < 3; n++)
            if (b->stream->which[k] == small[n]->device) place[n] = copies;
        copies++;
    }
    // Two of the large one had begun when they came, and between them comes one each.
    CHECK(place[0] <= 3 && place[1] <= 5 && place[2] <= 7);
    CHECK(place[2] - place[0] >= 4);
    for (uint32_t n = 0; n < 3; n++) {
        check_arrived(small[n]);
        end_transfer(small[n]);
    }
    check_arrived(large);
    end_transfer(large);
    end_bench(b);
}

// Whatever call fails, the job says so, nothing hangs, and the next one arrives.
static void fails_alone(int direction, bool late) {
    xe_start(2);
    atomic_store(&copies_fail_late, late);
    for (int at = 0; at < 26; at++) {
        bench *b = new_bench((uint32_t)at + 1, direction, &DEVICE, 3, 256 * KIB, true);
        event before = {0}, done = {0};
        transfer *t = of_one(b, MIB + 100, 1);
        atomic_store(&fail_at, atomic_load(&calls_made) + at);
        start(t, &before, &done);
        int staged = xe_wait(t->id, XE_STAGED, PATIENCE), status = xe_wait(t->id, XE_FINISHED, PATIENCE);
        CHECK(staged != XE_NOT_YET && status != XE_NOT_YET);
        int32_t why = 0;
        int lost;
        const char *what = NULL;
        if (status == XE_FAILED) {
            CHECK(xe_error(t->id, &why, &what, &lost) == XE_OK && why == BROKEN && what);
            CHECK(lost == (strcmp(what, "recording an event") == 0));
            if (lost) drain(b->stream);
            CHECK(xe_wait(t->id, XE_ISSUED, 0) == XE_FAILED && xe_wait(t->id, XE_STAGED, 0) == XE_FAILED);
        } else {
            CHECK(xe_error(t->id, &why, &what, &lost) == XE_NOT_YET);
            check_arrived(t);
        }
        // The wait, five copies and their events, and the job's.
        CHECK(status == (at < 12 ? XE_FAILED : XE_OK));
        atomic_store(&fail_at, -1);
        end_transfer(t);
        transfer *next = of_one(b, MIB + 100, 2);
        start(next, NULL, NULL);
        finish(next);
        end_bench(b);
    }
}

static void fails_alone_to_the_device(void) { fails_alone(XE_H2D, false); }
static void fails_alone_to_the_host(void) { fails_alone(XE_D2H, false); }
static void fails_alone_though_it_copies(void) { fails_alone(XE_H2D, true); }

// A copy that failed on the device is told by its event alone, and nobody knows whether it goes on.
static void tells_what_an_event_says(void) {
    xe_start(2);
    for (uint32_t n = 0; n < 2; n++) {
        bench *b = new_bench(n + 1, (int)n, &DEVICE, 1, 256 * KIB, false);
        atomic_store(&copies_fail_unseen, true);
        transfer *t = of_one(b, MIB, n);
        start(t, NULL, NULL);
        CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_FAILED);
        atomic_store(&copies_fail_unseen, false);
        int32_t why;
        const char *what;
        int lost;
        CHECK(xe_error(t->id, &why, &what, &lost) == XE_OK && why == BROKEN && lost);
        CHECK(xe_take_chunk(b->number, 0) == XE_BUSY);
        drain(b->stream);
        end_transfer(t);
        end_bench(b);
    }
}

// Whoever owns a lane knows: what has failed is at rest.
static void tells_what_its_owner_says(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_H2D, NULL, 1, 256 * KIB, false);
    transfer *t = of_one(b, 100, 1);
    start(t, NULL, NULL);
    xe_request requests[XE_MOST_PIECES];
    while (xe_requests(requests, XE_MOST_PIECES, SECOND) == 0) {}
    CHECK(xe_answer(1, 0, 0, 1) == XE_OK && xe_reached(1, 0, BROKEN) == XE_OK);
    CHECK(xe_wait(t->id, XE_FINISHED, 0) == XE_FAILED);
    int32_t why;
    const char *what;
    int lost;
    CHECK(xe_error(t->id, &why, &what, &lost) == XE_OK && why == BROKEN && !lost);
    CHECK(xe_take_chunk(1, 0) == XE_OK);
    end_transfer(t);
    end_bench(b);
}

// A chunk whose event could not be recorded is given to nobody: its copy may still be under way.
static void gives_away_no_chunk_that_may_be_read(void) {
    xe_start(2);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 2, 256 * KIB, false);
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    atomic_store(&fail_kind, RECORD);
    transfer *t = of_one(b, 100, 1);
    start(t, NULL, NULL);
    CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_FAILED);
    atomic_store(&fail_kind, -1);
    // The one that was added last.
    CHECK(xe_take_chunk(1, 0) == XE_OK);
    // Lost, and told of once.
    CHECK(xe_take_chunk(1, 1) == XE_BUSY && xe_take_chunk(1, 1) == XE_UNKNOWN);
    atomic_store(&gate, true);
    drain(b->stream);
    end_transfer(t);
    end_bench(b);
}

// Where nobody can ask, a copy may be under way as well.
static void gives_away_no_chunk_that_it_cannot_ask_for(void) {
    bench *b = new_bench(1, XE_H2D, &DEVICE, 1, 256 * KIB, false);
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    transfer *t = of_one(b, 100, 1);
    start(t, NULL, NULL);
    CHECK(xe_wait(t->id, XE_ISSUED, PATIENCE) == XE_OK);
    atomic_store(&enter_fails, 1);
    CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_FAILED);
    atomic_store(&enter_fails, 0);
    int32_t why;
    const char *what;
    int lost;
    CHECK(xe_error(t->id, &why, &what, &lost) == XE_OK && why == LOST_DEVICE && lost);
    CHECK(xe_take_chunk(1, 0) == XE_BUSY);
    atomic_store(&gate, true);
    drain(b->stream);
    end_transfer(t);
    end_bench(b);
}

// When the last chunk of a lane is lost, those fail that wait for one, and those that come, until it has one again.
static void fails_when_its_chunks_are_lost(void) {
    enum { MANY = 8 };
    xe_start(2);
    bench *b = new_bench(1, XE_D2H, &DEVICE, 3, 256 * KIB, false);
    transfer *t[MANY];
    atomic_store(&fail_kind, RECORD);
    // None is lost before all of them wait.
    atomic_store(&gate, false);
    atomic_store(&held_in, b->stream);
    for (uint32_t n = 0; n < MANY; n++) start(t[n] = of_one(b, n % 2 ? 100 : 2 * MIB, n), NULL, NULL);
    atomic_store(&gate, true);
    for (uint32_t n = 0; n < MANY; n++) {
        CHECK(xe_wait(t[n]->id, XE_STAGED, PATIENCE) == XE_FAILED);
        CHECK(xe_wait(t[n]->id, XE_FINISHED, PATIENCE) == XE_FAILED);
    }
    atomic_store(&fail_kind, -1);
    drain(b->stream);
    transfer *late = of_one(b, 100, 1);
    start(late, NULL, NULL);
    CHECK(xe_wait(late->id, XE_FINISHED, PATIENCE) == XE_FAILED);
    int32_t why;
    const char *what;
    int lost;
    CHECK(xe_error(late->id, &why, &what, &lost) == XE_OK && why == ENOBUFS && !lost);
    // The same one is not given twice.
    for (uint64_t n = 0; n < 3; n++) CHECK(xe_add_chunk(1, n, b->memory, 256 * KIB, n, &b->events[n]) == XE_BUSY);
    CHECK(xe_add_chunk(1, 3, b->memory, 256 * KIB, 3, &b->events[3]) == XE_OK);
    transfer *next = of_one(b, MIB, 2);
    start(next, NULL, NULL);
    finish(next);
    for (uint32_t n = 0; n < MANY; n++) end_transfer(t[n]);
    end_transfer(late);
    end_bench(b);
}

static void owner_fails(void) {
    xe_start(2);
    bench *b = owned[0] = new_bench(1, XE_D2H, NULL, 3, 256 * KIB, false);
    pthread_t owner;
    CHECK(pthread_create(&owner, NULL, own, NULL) == 0);
    for (int at = 0; at < 7; at++) {
        atomic_store(&owner_fails_at, atomic_load(&owner_answers) + at);
        transfer *t = of_one(b, MIB + 100, 1);
        start(t, NULL, NULL);
        int status = xe_wait(t->id, XE_FINISHED, PATIENCE);
        CHECK(status == (at < 5 ? XE_FAILED : XE_OK));
        atomic_store(&owner_fails_at, -1);
        end_transfer(t);
        transfer *next = of_one(b, MIB + 100, 2);
        start(next, NULL, NULL);
        finish(next);
    }
    atomic_store(&owner_over, true);
    pthread_join(owner, NULL);
    end_bench(b);
}

// The device goes in the middle: everybody is told.
static void loses_the_device(void) {
    xe_start(3);
    bench *b[2] = {new_bench(1, XE_H2D, &DEVICE, 4, 256 * KIB, true), new_bench(2, XE_D2H, &DEVICE, 4, 256 * KIB, true)};
    transfer *t[6];
    for (uint32_t n = 0; n < 6; n++) t[n] = of_one(b[n % 2], 8 * MIB, n);
    atomic_store(&gate, false);
    for (uint32_t n = 0; n < 2; n++) {
        for (int k = 0; k < 3; k++) tell(b[n]->stream, (op){.kind = HOLD}, NULL);
    }
    for (uint32_t n = 0; n < 6; n++) start(t[n], NULL, NULL);
    while (b[0]->stream->count < 8 || b[1]->stream->count < 8) pause_for(100);
    atomic_store(&device_lost, true);
    double began = seconds();
    for (uint32_t n = 0; n < 6; n++) CHECK(xe_wait(t[n]->id, XE_FINISHED, PATIENCE) == XE_FAILED);
    printf("everybody was told after %.3f s\n", seconds() - began);
    atomic_store(&gate, true);
    for (uint32_t n = 0; n < 2; n++) {
        // What was lost is the caller's to keep: here until the copies, which this device makes all the same, are over.
        drain(b[n]->stream);
        CHECK(xe_close_lane(b[n]->number) == XE_OK);
        end_stream(b[n]->stream);
        free(b[n]->memory);
        free(b[n]);
    }
    for (uint32_t n = 0; n < 6; n++) end_transfer(t[n]);
}

static void drops_what_has_not_begun(void) {
    bench *b = new_bench(1, XE_H2D, &DEVICE, 1, 256 * KIB, false);
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    transfer *first = of_one(b, MIB, 1), *second = of_one(b, MIB, 2), *third = of_one(b, 100, 3);
    start(first, NULL, NULL);
    start(second, NULL, NULL);
    start(third, NULL, NULL);
    CHECK(xe_drop(third->id) == XE_OK && xe_drop(third->id) == XE_NOT_YET);
    CHECK(xe_wait(third->id, XE_STAGED, 0) == XE_FAILED);
    xe_start(1);
    while (xe_drop(second->id) == XE_NOT_YET) {}
    while (b->stream->count < 3) pause_for(100);
    CHECK(xe_drop(first->id) == XE_NOT_YET);
    // It goes on, whoever stopped waiting for it.
    CHECK(xe_wait(first->id, XE_FINISHED, 1000) == XE_NOT_YET);
    CHECK(xe_close_lane(1) == XE_BUSY);
    atomic_store(&gate, true);
    finish(first);
    int32_t why;
    const char *what;
    int lost;
    CHECK(xe_error(second->id, &why, &what, &lost) == XE_OK && why == ECANCELED && !lost);
    end_transfer(second);
    end_transfer(third);
    CHECK(xe_drop(12345) == XE_UNKNOWN);
    // Nothing of the others was ever looked at.
    xe_figures figures;
    xe_read_figures(&figures);
    CHECK(figures.copied_nbytes == MIB);
    end_bench(b);
}

static void check_abandoned(const transfer *t) {
    int32_t why;
    const char *what;
    int lost;
    CHECK(xe_error(t->id, &why, &what, &lost) == XE_OK && why == ECANCELED && strcmp(what, "abandoned") == 0 && !lost);
}

// What was abandoned is at rest while its copies are held, is begun no further, and holds up nobody behind it.
static void abandons(int direction) {
    xe_start(2);
    bench *b = new_bench(1, direction, &DEVICE, 4, 256 * KIB, false);
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    event none = {0}, done = {0};
    // One has parts that want a chunk, one is in the stream as a whole, one has not begun.
    transfer *whole = of_one(b, 300 * KIB, 1), *begun = of_one(b, 8 * MIB, 2), *waiting = of_one(b, MIB, 3), *next = of_one(b, MIB, 4);
    start(whole, NULL, &done);
    CHECK(xe_wait(whole->id, XE_ISSUED, PATIENCE) == XE_OK);
    start(begun, NULL, &none);
    while (b->stream->count < 1 + 8 + 1) pause_for(100);
    start(waiting, NULL, &none);
    start(next, NULL, NULL);
    transfer *abandoned[3] = {whole, begun, waiting};
    for (int n = 0; n < 3; n++) {
        CHECK(xe_abandon(abandoned[n]->id) == XE_OK && xe_abandon(abandoned[n]->id) == XE_OK);
        CHECK(xe_wait(abandoned[n]->id, XE_STAGED, PATIENCE) == XE_FAILED);
        memset(abandoned[n]->host[0], 0x11, abandoned[n]->sizes[0]);
        check_abandoned(abandoned[n]);
    }
    // What has come so far stays there.
    CHECK(xe_wait(whole->id, XE_ISSUED, 0) == XE_FAILED && xe_wait(begun->id, XE_ISSUED, 0) == XE_NOT_YET);
    CHECK(xe_wait(whole->id, XE_FINISHED, 0) == XE_NOT_YET && xe_wait(waiting->id, XE_FINISHED, 0) == XE_FAILED);
    CHECK(xe_close_lane(1) == XE_BUSY);
    atomic_store(&gate, true);
    finish(next);
    size_t copies = 0;
    for (size_t n = 0; n < b->stream->count; n++) copies += b->stream->kinds[n] == COPY;
    CHECK(copies == 4 + 4 && atomic_load(&done.recorded) == 1 && atomic_load(&none.recorded) == 0);
    for (int n = 0; n < 3; n++) {
        CHECK(xe_wait(abandoned[n]->id, XE_FINISHED, PATIENCE) == XE_FAILED);
        const char *host = abandoned[n]->host[0];
        for (size_t k = 0; k < abandoned[n]->sizes[0]; k++) CHECK(host[k] == 0x11);
        end_transfer(abandoned[n]);
    }
    // What has finished has not failed.
    transfer *late = of_one(b, MIB, 5);
    start(late, NULL, NULL);
    CHECK(xe_wait(late->id, XE_FINISHED, PATIENCE) == XE_OK && xe_abandon(late->id) == XE_OK);
    finish(late);
    CHECK(xe_abandon(12345) == XE_UNKNOWN);
    end_bench(b);
}

static void abandons_to_the_device(void) { abandons(XE_H2D); }
static void abandons_to_the_host(void) { abandons(XE_D2H); }

// Its chunks that nobody has issued come back at once, while another one's call does not return.
static void abandons_what_is_ready(int direction) {
    xe_start(2);
    bench *b = new_bench(1, direction, &DEVICE, 4, 256 * KIB, false);
    atomic_store(&gate, false);
    atomic_store(&held_in, b->stream);
    transfer *t = of_one(b, 4 * 256 * KIB, 1);
    start(t, NULL, NULL);
    xe_figures figures = {0};
    while (figures.chunks < 4 || (direction == XE_H2D && figures.copied_nbytes < MIB) || atomic_load(&b->stream->inside) == 0) {
        pause_for(100);
        xe_read_figures(&figures);
    }
    CHECK(xe_abandon(t->id) == XE_OK);
    CHECK(take_idle(1, 4) == 3);
    CHECK(xe_wait(t->id, XE_STAGED, 0) == XE_NOT_YET && xe_wait(t->id, XE_FINISHED, 0) == XE_NOT_YET);
    atomic_store(&gate, true);
    CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_FAILED);
    check_abandoned(t);
    CHECK(b->stream->count == 2);
    end_transfer(t);
    end_bench(b);
}

static void abandons_what_is_ready_to_the_device(void) { abandons_what_is_ready(XE_H2D); }
static void abandons_what_is_ready_to_the_host(void) { abandons_what_is_ready(XE_D2H); }

// Memory that stops who touches it, until the gate is open.
static char *trap;
static atomic_int trapped;
static atomic_bool let_out;      // Before that.

static void on_fault(int number) {
    (void)number;
    atomic_fetch_add(&trapped, 1);
    while (!atomic_load(&gate) && !atomic_load(&let_out)) pause_for(100);
    mprotect(trap, MIB, PROT_READ | PROT_WRITE);
}

static void set_trap(void) {
    trap = mmap(NULL, MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(trap != MAP_FAILED && signal(SIGSEGV, on_fault) != SIG_ERR);
    atomic_store(&gate, false);
}

// But for one page of it, whose pages are there.
static void leave_trap_at(size_t at) {
    mprotect(trap, MIB, PROT_READ | PROT_WRITE);
    memset(trap, 1, MIB);
    mprotect(trap + at, 4 * KIB, PROT_NONE);
}

// Nobody may touch it any more.
static void take_trap_away(void) {
    munmap(trap, MIB);
    signal(SIGSEGV, SIG_DFL);
}

// Of a large job whoever waits copies nothing while as many as half of the threads do, and of a small one what there is.
static void leaves_large_jobs_to_threads_that_copy(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 2, 512 * KIB, false), *other = new_bench(2, XE_H2D, &DEVICE, 1, 64 * KIB, false);
    set_trap();
    leave_trap_at(0);
    char *device = calloc(1, MIB);
    xe_piece piece = {trap, (uint64_t)device, MIB, 0};
    uint64_t id = atomic_fetch_add(&next_id, 1);
    CHECK(xe_submit(id, 1, &piece, 1, NULL, NULL, NULL) == XE_OK);
    while (!atomic_load(&trapped)) pause_for(100);
    CHECK(xe_wait(id, XE_STAGED, 5000) == XE_NOT_YET);
    xe_figures figures;
    xe_read_figures(&figures);
    CHECK(figures.copied_nbytes == 0);
    transfer *small = of_one(other, 100, 1);
    start(small, NULL, NULL);
    CHECK(xe_wait(small->id, XE_FINISHED, PATIENCE) == XE_OK);
    finish(small);
    atomic_store(&gate, true);
    CHECK(xe_wait(id, XE_FINISHED, PATIENCE) == XE_OK);
    for (size_t n = 4 * KIB; n < MIB; n++) CHECK(device[n] == 1);
    uint64_t ids[8];
    while (xe_forget(id) == XE_BUSY) xe_finished(ids, 8);
    take_trap_away();
    free(device);
    end_bench(other);
    end_bench(b);
}

// With three threads, of which one copies and two are in calls, whoever waits copies; with two, of which one is in a call, not.
static void copies_where_fewer_than_half_do(void) {
    for (int many = 2; many <= 3; many++) {
        CHECK(xe_start(many) == many);
        bench *b = new_bench(1, XE_H2D, &DEVICE, 4, 128 * KIB, false), *held[2];
        set_trap();
        leave_trap_at(0);
        transfer *first[2];
        for (int n = 0; n < many - 1; n++) {
            held[n] = new_bench(2 + (uint32_t)n, XE_H2D, &DEVICE, 1, 64 * KIB, false);
            atomic_store(n ? &held_too : &held_in, held[n]->stream);
            first[n] = of_one(held[n], 100, 1);
            start(first[n], NULL, NULL);
            while (atomic_load(&held[n]->stream->inside) == 0) pause_for(100);
        }
        xe_figures before, after;
        xe_read_figures(&before);
        char *device = calloc(1, MIB);
        xe_piece piece = {trap, (uint64_t)device, 400 * KIB, 0};
        uint64_t id = atomic_fetch_add(&next_id, 1);
        int caught = atomic_load(&trapped);
        CHECK(xe_submit(id, 1, &piece, 1, NULL, NULL, NULL) == XE_OK);
        while (atomic_load(&trapped) == caught) pause_for(100);
        CHECK(xe_wait(id, XE_STAGED, many == 2 ? 5000 : 200000) == XE_NOT_YET);
        xe_read_figures(&after);
        CHECK((after.copied_nbytes > before.copied_nbytes) == (many == 3));
        atomic_store(&gate, true);
        CHECK(xe_wait(id, XE_FINISHED, PATIENCE) == XE_OK);
        for (size_t n = 4 * KIB; n < 400 * KIB; n++) CHECK(device[n] == 1);
        for (int n = 0; n < many - 1; n++) {
            finish(first[n]);
            end_bench(held[n]);
        }
        uint64_t ids[8];
        while (xe_forget(id) == XE_BUSY) xe_finished(ids, 8);
        take_trap_away();
        free(device);
        end_bench(b);
    }
}

static void *waits_until_staged(void *id) {
    CHECK(xe_wait(*(uint64_t *)id, XE_STAGED, PATIENCE) == XE_OK);
    return NULL;
}

// But what threads leave again, because none of them comes back from a call, whoever waits copies after all. With two threads, one of
// them is in a call from the beginning.
static void copies_what_threads_leave(void) {
    for (int many = 1; many <= 2; many++) {
        CHECK(xe_start(many) == many);
        bench *b = new_bench(1, XE_H2D, &DEVICE, 4, 128 * KIB, false), *held = new_bench(2, XE_H2D, &DEVICE, 1, 64 * KIB, false);
        set_trap();
        leave_trap_at(0);
        transfer *first = of_one(held, 100, 1);
        if (many == 2) {
            atomic_store(&held_too, held->stream);
            start(first, NULL, NULL);
            while (atomic_load(&held->stream->inside) == 0) pause_for(100);
        }
        char *device = calloc(1, MIB);
        xe_piece piece = {trap, (uint64_t)device, 400 * KIB, 0};
        uint64_t id = atomic_fetch_add(&next_id, 1);
        int caught = atomic_load(&trapped);
        CHECK(xe_submit(id, 1, &piece, 1, NULL, NULL, NULL) == XE_OK);
        while (atomic_load(&trapped) == caught) pause_for(100);
        pthread_t waits;
        CHECK(pthread_create(&waits, NULL, waits_until_staged, &id) == 0);
        // It has found that it is not needed, and sleeps.
        pause_for(50000);
        atomic_store(&held_in, b->stream);
        atomic_store(&let_out, true);
        pthread_join(waits, NULL);
        atomic_store(&gate, true);
        atomic_store(&let_out, false);
        CHECK(xe_wait(id, XE_FINISHED, PATIENCE) == XE_OK);
        for (size_t n = 4 * KIB; n < 400 * KIB; n++) CHECK(device[n] == 1);
        atomic_store(&held_in, NULL);
        if (many == 1) start(first, NULL, NULL);
        finish(first);
        uint64_t ids[8];
        while (xe_forget(id) == XE_BUSY) xe_finished(ids, 8);
        take_trap_away();
        free(device);
        end_bench(held);
        end_bench(b);
    }
}

// What was abandoned is not at rest while one of its parts is copied, and no other one is begun.
static void rests_behind_a_copy(int direction) {
    xe_start(1);
    bench *b = new_bench(1, direction, &DEVICE, 4, 256 * KIB, false);
    set_trap();
    char *device = calloc(1, MIB);
    xe_piece piece = {trap, (uint64_t)device, MIB, 0};
    CHECK(xe_submit(700, 1, &piece, 1, NULL, NULL, NULL) == XE_OK);
    while (atomic_load(&trapped) == 0) pause_for(100);
    CHECK(xe_abandon(700) == XE_OK);
    CHECK(xe_wait(700, XE_STAGED, 10000) == XE_NOT_YET);
    atomic_store(&gate, true);
    CHECK(xe_wait(700, XE_STAGED, PATIENCE) == XE_FAILED);
    take_trap_away();
    CHECK(xe_wait(700, XE_FINISHED, PATIENCE) == XE_FAILED);
    xe_figures figures;
    xe_read_figures(&figures);
    // Nor the rest of that part.
    CHECK(atomic_load(&trapped) == 1 && figures.copied_nbytes == 128 * KIB);
    free(device);
    end_bench(b);
}

static void rests_behind_a_copy_to_the_device(void) { rests_behind_a_copy(XE_H2D); }
static void rests_behind_a_copy_to_the_host(void) { rests_behind_a_copy(XE_D2H); }

// Several threads copy a part together, and it is done when the last of them is.
static void copies_together(int direction) {
    xe_start(2);
    bench *b = new_bench(1, direction, &DEVICE, 1, MIB, false);
    set_trap();
    // In the third of four slices.
    leave_trap_at(512 * KIB);
    char *device = calloc(1, MIB);
    xe_piece piece = {trap, (uint64_t)device, MIB, 0};
    CHECK(xe_submit(700, 1, &piece, 1, NULL, NULL, NULL) == XE_OK);
    xe_figures figures = {0};
    for (double until = seconds() + PATIENCE_SECONDS; seconds() < until; pause_for(100)) {
        xe_read_figures(&figures);
        if (figures.copied_nbytes >= 768 * KIB && atomic_load(&trapped)) break;
    }
    CHECK(atomic_load(&trapped) == 1 && figures.copied_nbytes == 768 * KIB);
    CHECK(xe_wait(700, XE_FINISHED, 10000) == XE_NOT_YET);
    if (direction == XE_H2D) CHECK(xe_wait(700, XE_STAGED, 0) == XE_NOT_YET && b->stream->count == 0);
    CHECK(xe_take_chunk(1, 0) == XE_NOT_YET);
    atomic_store(&gate, true);
    CHECK(xe_wait(700, XE_FINISHED, PATIENCE) == XE_OK);
    take_trap_away();
    free(device);
    end_bench(b);
}

static void copies_together_to_the_device(void) { copies_together(XE_H2D); }
static void copies_together_to_the_host(void) { copies_together(XE_D2H); }

// What was abandoned gives its chunk back when all threads are through with it.
static void abandons_what_several_copy(void) {
    xe_start(2);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 1, MIB, false);
    set_trap();
    leave_trap_at(0);
    char *device = calloc(1, MIB);
    xe_piece piece = {trap, (uint64_t)device, MIB, 0};
    CHECK(xe_submit(700, 1, &piece, 1, NULL, NULL, NULL) == XE_OK);
    while (atomic_load(&trapped) == 0) pause_for(100);
    CHECK(xe_abandon(700) == XE_OK);
    CHECK(xe_wait(700, XE_FINISHED, 10000) == XE_NOT_YET && xe_take_chunk(1, 0) == XE_NOT_YET);
    atomic_store(&gate, true);
    CHECK(xe_wait(700, XE_STAGED, PATIENCE) == XE_FAILED && xe_wait(700, XE_FINISHED, PATIENCE) == XE_FAILED);
    CHECK(xe_take_chunk(1, 0) == XE_OK && b->stream->count == 0);
    take_trap_away();
    free(device);
    end_bench(b);
}

// A thread that fails ends the job, while another one copies a slice of the same part.
static void fails_while_others_copy(void) {
    xe_start(2);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 1, MIB, false);
    set_trap();
    leave_trap_at(0);
    char name[] = "/tmp/xferlib-engine-XXXXXX";
    int file = mkstemp(name);
    unlink(name);
    CHECK(ftruncate(file, 512 * KIB) == 0);
    char *mapped = mmap(NULL, 512 * KIB, PROT_READ, MAP_SHARED, file, 0), *device = aligned_alloc(256, MIB);
    CHECK(mapped != MAP_FAILED && ftruncate(file, 0) == 0);
    // Each is half of the part.
    xe_piece pieces[2] = {{trap, (uint64_t)device, 512 * KIB, 1}, {mapped, (uint64_t)device + 512 * KIB, 512 * KIB, 1}};
    CHECK(xe_submit(700, 1, pieces, 2, NULL, NULL, NULL) == XE_OK);
    int32_t why;
    const char *what;
    int lost;
    for (double until = seconds() + PATIENCE_SECONDS; xe_error(700, &why, &what, &lost) != XE_OK && seconds() < until;) pause_for(100);
    CHECK(xe_error(700, &why, &what, &lost) == XE_OK && why == SIGBUS && !lost);
    CHECK(xe_wait(700, XE_STAGED, 10000) == XE_NOT_YET && xe_take_chunk(1, 0) == XE_NOT_YET);
    atomic_store(&gate, true);
    CHECK(xe_wait(700, XE_STAGED, PATIENCE) == XE_FAILED && xe_wait(700, XE_FINISHED, PATIENCE) == XE_FAILED);
    CHECK(xe_take_chunk(1, 0) == XE_OK && b->stream->count == 0);
    take_trap_away();
    munmap(mapped, 512 * KIB);
    close(file);
    free(device);
    end_bench(b);
}

static size_t copies_in(const bench *b) {
    size_t count = 0;
    for (size_t n = 0; n < b->stream->count; n++) count += b->stream->kinds[n] == COPY;
    return count;
}

// Chunks that lie side by side are copied from as one, and no others. The first part is one chunk. The last are not: the device, which
// is held, has enough to do while they are filled.
static void joins_chunks(void) {
    // One thread, so that parts come in order.
    xe_start(0);
    together = 32;
    bench *b = new_bench(1, XE_H2D, &DEVICE, 32, 64 * KIB, false);
    for (uint32_t turn = 0; turn < 2; turn++) {
        transfer *t = of_one(b, 20 * 64 * KIB, turn);
        size_t before = b->stream->count, found = 0;
        // Or the first parts could be back before the next ones begin, which would be as small.
        atomic_store(&gate, false);
        tell(b->stream, (op){.kind = HOLD}, NULL);
        start(t, NULL, NULL);
        CHECK(xe_wait(t->id, XE_ISSUED, PATIENCE) == XE_OK);
        const char *copies[32];
        for (size_t n = before; n < b->stream->count; n++)
            if (b->stream->kinds[n] == COPY) copies[found++] = b->stream->which[n];
        // 1, 1, 2, 4, half of what is left, and all of it.
        CHECK(found == 6 && copies[0] == t->device && copies[1] == t->device + 64 * KIB);
        CHECK(copies[4] == t->device + 8 * 64 * KIB && copies[5] == t->device + 14 * 64 * KIB);
        atomic_store(&gate, true);
        finish(t);
    }
    CHECK(take_idle(1, 32) == 32);
    end_bench(b);
}

static void joins_no_blocks(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 16, 64 * KIB, false);
    transfer *t = of_one(b, 2 * MIB, 5);
    start(t, NULL, NULL);
    CHECK(xe_wait(t->id, XE_ISSUED, PATIENCE) == XE_OK && copies_in(b) == 32);
    finish(t);
    end_bench(b);
}

// Of chunks that are used as one, each is lost with the others.
static void loses_what_it_joined(void) {
    xe_start(0);
    together = 16;
    bench *b = new_bench(1, XE_D2H, &DEVICE, 16, 64 * KIB, false);
    transfer *t = of_one(b, 512 * KIB, 5);
    atomic_store(&copies_fail_unseen, true);
    start(t, NULL, NULL);
    CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_FAILED);
    atomic_store(&copies_fail_unseen, false);
    int lost = 0, idle = 0;
    for (uint64_t n = 0; n < 16; n++) {
        int status = xe_take_chunk(1, n);
        lost += status == XE_BUSY;
        idle += status == XE_OK;
    }
    CHECK(lost == 8 && idle == 8);
    drain(b->stream);
    end_transfer(t);
    end_bench(b);
}

// What fits is in the stream though the copies are held, in parts however short. What does not fit waits for longer ones.
static void waits_for_longer_runs(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_D2H, &DEVICE, 0, 64 * KIB, false);
    char *memory = aligned_alloc(4096, 16 * 64 * KIB);
    for (size_t n = 0; n < 16; n++)
        CHECK(xe_add_chunk(1, n, memory + n * 64 * KIB, 64 * KIB, n < 8 ? 0 : n, &b->events[n]) == XE_OK);
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    size_t sizes[8];
    for (int n = 0; n < 8; n++) sizes[n] = 64 * KIB;
    transfer *first = of_one(b, 512 * KIB, 1), *fits = new_transfer(b, 8, sizes, 2);
    start(first, NULL, NULL);
    CHECK(xe_wait(first->id, XE_ISSUED, PATIENCE) == XE_OK);
    start(fits, NULL, NULL);
    CHECK(xe_wait(fits->id, XE_ISSUED, PATIENCE) == XE_OK);
    atomic_store(&gate, true);
    finish(first);
    finish(fits);
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    transfer *again = of_one(b, 512 * KIB, 3), *large = of_one(b, 2 * MIB, 4);
    start(again, NULL, NULL);
    CHECK(xe_wait(again->id, XE_ISSUED, PATIENCE) == XE_OK);
    xe_figures before, after;
    xe_read_figures(&before);
    start(large, NULL, NULL);
    CHECK(xe_wait(large->id, XE_ISSUED, 50000) == XE_NOT_YET);
    xe_read_figures(&after);
    CHECK(after.chunks - before.chunks == 1);
    atomic_store(&gate, true);
    finish(again);
    finish(large);
    CHECK(take_idle(1, 16) == 16);
    end_bench(b);
    free(memory);
}

// A held lane with sixteen chunks, in runs: of so many chunks, and of so many behind those, and what is left, each alone.
static bench *of_runs(const xe_calls *calls, size_t first, size_t second) {
    bench *b = new_bench(1, XE_D2H, calls, 0, 64 * KIB, false);
    free(b->memory);
    b->memory = aligned_alloc(4096, 16 * 64 * KIB);
    for (size_t n = 0; n < 16; n++) {
        uint64_t block = n < first ? 0 : n < first + second ? first : n;
        CHECK(xe_add_chunk(1, n, b->memory + n * 64 * KIB, 64 * KIB, block, calls ? &b->events[n] : NULL) == XE_OK);
    }
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    return b;
}

// Of `held`, half of the memory is on its way; of `large`, so much as fits in a run that is left; then it waits for longer ones.
static bench *of_short_runs(const xe_calls *calls, transfer **held, transfer **large) {
    bench *b = of_runs(calls, 8, 0);
    xe_figures figures = {0};
    size_t parts[2] = {4, 5};
    for (int n = 0; n < 2; n++) {
        transfer *t = of_one(b, n ? 2 * MIB : 512 * KIB, (uint32_t)n);
        *(n ? large : held) = t;
        start(t, NULL, NULL);
        for (double until = seconds() + PATIENCE_SECONDS; figures.chunks < parts[n] && seconds() < until; xe_read_figures(&figures)) pause_for(100);
        CHECK(figures.chunks == parts[n]);
    }
    return b;
}

// Until the engine's threads do nothing: they have gone to sleep once more, and not again.
static void until_nothing_is_done(void) {
    xe_figures before, after = {0};
    do {
        before = after;
        pause_for(10000);
        xe_read_figures(&after);
    } while (after.sleeps == 0 || after.sleeps != before.sleeps);
}

// Of whoever owns a lane without calls: make the copies that are asked for, and those that follow, until a job has finished.
static void copy_until_finished(const transfer *t) {
    static xe_request requests[4 * XE_MOST_PIECES];
    while (xe_wait(t->id, XE_FINISHED, 0) == XE_NOT_YET) {
        size_t count = xe_requests(requests, 4 * XE_MOST_PIECES, 1000);
        for (size_t n = 0; n < count; n++) {
            memcpy(requests[n].memory, (const void *)requests[n].device, requests[n].nbytes);
            CHECK(xe_answer(1, requests[n].chunk, 0, 1) == XE_OK && xe_reached(1, requests[n].chunk, 0) == XE_OK);
        }
    }
}

// Of whoever owns a lane without calls: what is to be done next, or nothing after a long time.
static size_t next_asked(xe_request *requests, size_t count) {
    size_t found = 0;
    for (double until = seconds() + PATIENCE_SECONDS; !found && seconds() < until;) found = xe_requests(requests, count, SECOND);
    return found;
}

// The shortest run that is long enough is taken, from its front.
static void leaves_longer_runs(void) {
    xe_start(1);
    bench *b = of_runs(&DEVICE, 8, 5);
    // In parts of four chunks, two, one and one.
    transfer *t = of_one(b, 512 * KIB, 1);
    start(t, NULL, NULL);
    CHECK(xe_wait(t->id, XE_ISSUED, PATIENCE) == XE_OK);
    // Of those that are alone, it has any two.
    for (uint64_t n = 0; n < 12; n++) CHECK(xe_take_chunk(1, n) == (n < 2 || n >= 8 ? XE_NOT_YET : XE_OK));
    atomic_store(&gate, true);
    finish(t);
    end_bench(b);
}

// Short runs are used as long as less than half of the memory is on its way.
static void waits_where_half_is_on_its_way(void) {
    xe_start(1);
    bench *b = of_runs(&DEVICE, 4, 0);
    // In parts of two chunks, one and one; and of two, one and one, before it waits.
    transfer *held = of_one(b, 256 * KIB, 1), *large = of_one(b, 2 * MIB, 2);
    start(held, NULL, NULL);
    CHECK(xe_wait(held->id, XE_ISSUED, PATIENCE) == XE_OK);
    start(large, NULL, NULL);
    CHECK(xe_wait(large->id, XE_ISSUED, 50000) == XE_NOT_YET);
    xe_figures figures;
    xe_read_figures(&figures);
    CHECK(figures.chunks == 3 + 3);
    atomic_store(&gate, true);
    finish(held);
    finish(large);
    end_bench(b);
}

// How long parts are depends on the chunks that are there now, in whatever order they came.
static void fits_its_parts_to_its_chunks(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_D2H, &DEVICE, 0, 64 * KIB, false);
    free(b->memory);
    b->memory = aligned_alloc(4096, 16 * 64 * KIB);
    for (size_t n = 16; n--;) CHECK(xe_add_chunk(1, n, b->memory + n * 64 * KIB, 64 * KIB, 0, &b->events[n]) == XE_OK);
    xe_figures figures;
    for (int few = 0; few < 2; few++) {
        xe_figures before;
        xe_read_figures(&before);
        transfer *t = of_one(b, 256 * KIB, 1);
        atomic_store(&gate, false);
        tell(b->stream, (op){.kind = HOLD}, NULL);
        start(t, NULL, NULL);
        CHECK(xe_wait(t->id, XE_ISSUED, PATIENCE) == XE_OK);
        xe_read_figures(&figures);
        // Two chunks, one and one; or each alone.
        CHECK(figures.chunks - before.chunks == (few ? 4 : 3));
        atomic_store(&gate, true);
        finish(t);
        for (uint64_t n = 0; n < 16 && !few; n++)
            if (n < 3 || n >= 7) CHECK(xe_take_chunk(1, n) == XE_OK);
    }
    end_bench(b);
}

// It needs no more chunks than it fills.
static void cuts_at_whole_chunks(void) {
    xe_start(1);
    together = 5;
    bench *b = new_bench(1, XE_D2H, &DEVICE, 5, 64 * KIB, false);
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    transfer *t = of_one(b, 5 * 64 * KIB, 1);
    start(t, NULL, NULL);
    CHECK(xe_wait(t->id, XE_ISSUED, PATIENCE) == XE_OK);
    atomic_store(&gate, true);
    finish(t);
    end_bench(b);
}

// A large job is one, though no chunk was there when it came, and whoever comes behind it need not wait.
static void is_fair_before_there_are_chunks(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 0, 64 * KIB, false);
    free(b->memory);
    b->memory = malloc(64 * KIB);
    transfer *large = of_one(b, 5 * MIB, 1), *small = of_one(b, 100, 2);
    start(large, NULL, NULL);
    start(small, NULL, NULL);
    CHECK(xe_add_chunk(1, 0, b->memory, 64 * KIB, 0, &b->events[0]) == XE_OK);
    CHECK(xe_wait(small->id, XE_FINISHED, PATIENCE) == XE_OK);
    CHECK(b->stream->which[0] == small->device);
    finish(small);
    finish(large);
    end_bench(b);
}

// It ends in short parts only where nothing follows.
static void ends_small_where_nothing_follows(void) {
    together = 16;
    bench *b = new_bench(1, XE_D2H, &DEVICE, 16, 64 * KIB, false);
    transfer *first = of_one(b, 256 * KIB, 1), *second = of_one(b, 256 * KIB, 2);
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    start(first, NULL, NULL);
    start(second, NULL, NULL);
    CHECK(xe_wait(first->id, XE_ISSUED, PATIENCE) == XE_OK && xe_wait(second->id, XE_ISSUED, PATIENCE) == XE_OK);
    xe_figures figures;
    xe_read_figures(&figures);
    // Four chunks; and two, one and one.
    CHECK(figures.chunks == 1 + 3);
    atomic_store(&gate, true);
    finish(first);
    finish(second);
    end_bench(b);
}

// However much memory a lane has, whoever comes next need not wait for long.
static void makes_no_part_too_long(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_D2H, NULL, 0, 4 * MIB, false);
    // Nobody looks into it.
    free(b->memory);
    b->memory = malloc(16 * 4 * MIB);
    // Otherwise parts would end at huge pages.
    memset(b->memory, 1, 16 * 4 * MIB);
    for (size_t n = 0; n < 16; n++) CHECK(xe_add_chunk(1, n, b->memory + n * 4 * MIB, 4 * MIB, 0, NULL) == XE_OK);
    xe_piece piece = {b->memory, 256, 64 * MIB, 0};
    CHECK(xe_submit(700, 1, &piece, 1, NULL, NULL, NULL) == XE_OK);
    static xe_request requests[4 * XE_MOST_PIECES];
    size_t count = next_asked(requests, 4 * XE_MOST_PIECES);
    CHECK(count > 0 && requests[0].nbytes == 8 * MIB);
    CHECK(xe_abandon(700) == XE_OK);
    for (size_t n = 0; n < count; n++) CHECK(xe_answer(1, requests[n].chunk, 0, 1) == XE_OK && xe_reached(1, requests[n].chunk, 0) == XE_OK);
    CHECK(xe_wait(700, XE_FINISHED, PATIENCE) == XE_FAILED);
    end_bench(b);
}

// Whoever stands behind a job that waits for longer runs begins when that is given up, though nothing comes back.
static void leaves_short_runs_to_others(void) {
    xe_start(1);
    transfer *held, *large;
    bench *b = of_short_runs(NULL, &held, &large);
    transfer *fits = of_one(b, 256 * KIB, 3);
    start(fits, NULL, NULL);
    static xe_request before[4 * XE_MOST_PIECES], after[XE_MOST_PIECES];
    size_t count = xe_requests(before, 4 * XE_MOST_PIECES, 0);
    CHECK(count == 5);
    until_nothing_is_done();
    CHECK(xe_requests(after, XE_MOST_PIECES, 0) == 0 && xe_abandon(large->id) == XE_OK);
    CHECK(next_asked(after, XE_MOST_PIECES) == 1 && after[0].id == fits->id);
    memcpy(after[0].memory, (const void *)after[0].device, after[0].nbytes);
    CHECK(xe_answer(1, after[0].chunk, 0, 1) == XE_OK && xe_reached(1, after[0].chunk, 0) == XE_OK);
    copy_until_finished(fits);
    for (size_t n = 0; n < count; n++) {
        memcpy(before[n].memory, (const void *)before[n].device, before[n].nbytes);
        CHECK(xe_answer(1, before[n].chunk, 0, 1) == XE_OK && xe_reached(1, before[n].chunk, 0) == XE_OK);
    }
    atomic_store(&gate, true);
    finish(fits);
    finish(held);
    CHECK(xe_wait(large->id, XE_FINISHED, PATIENCE) == XE_FAILED);
    end_transfer(large);
    CHECK(take_idle(1, 16) == 16);
    end_bench(b);
}

// Nor are longer runs waited for that are lost.
static void waits_for_no_runs_that_are_lost(void) {
    xe_start(1);
    transfer *held, *large;
    bench *b = of_short_runs(NULL, &held, &large);
    static xe_request requests[4 * XE_MOST_PIECES];
    size_t count = xe_requests(requests, 4 * XE_MOST_PIECES, 0);
    CHECK(count == 5);
    until_nothing_is_done();
    // With the first of them its job fails, and the large one still waits.
    CHECK(requests[0].id == held->id && xe_answer(1, requests[0].chunk, BROKEN, 0) == XE_OK);
    until_nothing_is_done();
    CHECK(xe_requests(requests + count, XE_MOST_PIECES, 0) == 0);
    for (size_t n = 1; n < count; n++)
        if (requests[n].id == held->id) CHECK(xe_answer(1, requests[n].chunk, BROKEN, 0) == XE_OK);
    xe_request next[XE_MOST_PIECES];
    CHECK(next_asked(next, XE_MOST_PIECES) == 1 && next[0].id == large->id);
    memcpy(next[0].memory, (const void *)next[0].device, next[0].nbytes);
    CHECK(xe_answer(1, next[0].chunk, 0, 1) == XE_OK && xe_reached(1, next[0].chunk, 0) == XE_OK);
    for (size_t n = 0; n < count; n++) {
        if (requests[n].id == held->id) continue;
        memcpy(requests[n].memory, (const void *)requests[n].device, requests[n].nbytes);
        CHECK(xe_answer(1, requests[n].chunk, 0, 1) == XE_OK && xe_reached(1, requests[n].chunk, 0) == XE_OK);
    }
    copy_until_finished(large);
    atomic_store(&gate, true);
    finish(large);
    CHECK(xe_wait(held->id, XE_FINISHED, PATIENCE) == XE_FAILED);
    end_transfer(held);
    end_bench(b);
}

// Small ones do not wait with a large one for longer runs.
static void waits_for_longer_runs_alone(void) {
    xe_start(1);
    transfer *held, *large, *small[2];
    bench *b = of_short_runs(&DEVICE, &held, &large);
    for (uint32_t n = 0; n < 2; n++) {
        start(small[n] = of_one(b, 64 * KIB, n + 5), NULL, NULL);
        CHECK(xe_wait(small[n]->id, XE_ISSUED, PATIENCE) == XE_OK);
    }
    CHECK(xe_wait(large->id, XE_ISSUED, 0) == XE_NOT_YET);
    atomic_store(&gate, true);
    for (uint32_t n = 0; n < 2; n++) finish(small[n]);
    finish(held);
    finish(large);
    CHECK(take_idle(1, 16) == 16);
    end_bench(b);
}

// What was abandoned is not at rest while the device is called for it, and nothing of it comes into the stream behind that call.
static void rests_behind_a_call(int direction) {
    xe_start(1);
    bench *b = new_bench(1, direction, &DEVICE, 4, 256 * KIB, false);
    atomic_store(&gate, false);
    atomic_store(&held_in, b->stream);
    event done = {0};
    transfer *t = of_one(b, MIB, 1);
    start(t, NULL, &done);
    while (atomic_load(&b->stream->inside) == 0) pause_for(100);
    CHECK(xe_abandon(t->id) == XE_OK && b->stream->count == 0);
    CHECK(xe_wait(t->id, XE_STAGED, 10000) == XE_NOT_YET && xe_wait(t->id, XE_ISSUED, 0) == XE_NOT_YET);
    atomic_store(&gate, true);
    CHECK(xe_wait(t->id, XE_STAGED, PATIENCE) == XE_FAILED);
    // The copy that was called for, and the event of its chunk.
    CHECK(b->stream->count == 2);
    CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_FAILED);
    check_abandoned(t);
    // Whoever comes next has every chunk, and nothing before it.
    transfer *next = of_one(b, MIB, 2);
    start(next, NULL, NULL);
    finish(next);
    CHECK(b->stream->count == 2 + 2 * 4 && atomic_load(&done.recorded) == 0);
    end_transfer(t);
    end_bench(b);
}

static void rests_behind_a_call_to_the_device(void) { rests_behind_a_call(XE_H2D); }
static void rests_behind_a_call_to_the_host(void) { rests_behind_a_call(XE_D2H); }

// Nobody is asked for what was abandoned, and what was asked for before is answered as ever.
static void abandons_what_its_owner_copies(void) {
    xe_start(1);
    for (int asked = 0; asked < 2; asked++) {
        bench *b = new_bench((uint32_t)asked + 1, XE_H2D, NULL, 4, 256 * KIB, false);
        transfer *t = of_one(b, MIB, 1);
        start(t, NULL, NULL);
        CHECK(xe_wait(t->id, XE_STAGED, PATIENCE) == XE_OK);
        xe_request requests[4 * XE_MOST_PIECES];
        size_t count = asked ? xe_requests(requests, 4 * XE_MOST_PIECES, 0) : 0;
        CHECK(count == (asked ? 4 : 0) && xe_abandon(t->id) == XE_OK);
        CHECK(xe_requests(requests + count, XE_MOST_PIECES * 3, 0) == 0);
        for (size_t n = 0; n < count; n++) {
            // Until it answers, its owner may be copying.
            CHECK(xe_wait(t->id, XE_STAGED, 0) == XE_NOT_YET);
            CHECK(xe_answer(requests[n].lane, requests[n].chunk, 0, 1) == XE_OK);
        }
        CHECK(xe_wait(t->id, XE_STAGED, 0) == XE_FAILED);
        for (size_t n = 0; n < count; n++) {
            CHECK(xe_wait(t->id, XE_FINISHED, 0) == XE_NOT_YET);
            CHECK(xe_reached(requests[n].lane, requests[n].chunk, 0) == XE_OK);
        }
        CHECK(xe_wait(t->id, XE_FINISHED, 0) == XE_FAILED);
        check_abandoned(t);
        end_transfer(t);
        end_bench(b);
    }
}

// What has come and was not copied yet goes back at once.
static void abandons_what_has_landed(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_D2H, NULL, 4, 256 * KIB, false);
    set_trap();
    char *device = calloc(1, MIB);
    xe_piece piece = {trap, (uint64_t)device, MIB, 0};
    CHECK(xe_submit(700, 1, &piece, 1, NULL, NULL, NULL) == XE_OK);
    xe_request requests[4 * XE_MOST_PIECES];
    for (int n = 0; n < 4; n++) {
        while (xe_requests(requests, XE_MOST_PIECES, SECOND) == 0) {}
        CHECK(xe_answer(1, requests[0].chunk, 0, 1) == XE_OK && xe_reached(1, requests[0].chunk, 0) == XE_OK);
    }
    while (atomic_load(&trapped) == 0) pause_for(100);
    CHECK(xe_abandon(700) == XE_OK);
    CHECK(take_idle(1, 4) == 3);
    atomic_store(&gate, true);
    CHECK(xe_wait(700, XE_FINISHED, PATIENCE) == XE_FAILED);
    take_trap_away();
    free(device);
    end_bench(b);
}

// The event of a job that was abandoned says nothing, so it is not recorded behind a copy that was being made.
static void abandons_during_its_last_copy(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 1, 256 * KIB, false);
    atomic_store(&gate, false);
    atomic_store(&held_in, b->stream);
    event done = {0};
    transfer *t = of_one(b, 100, 1);
    start(t, NULL, &done);
    while (atomic_load(&b->stream->inside) == 0) pause_for(100);
    CHECK(xe_abandon(t->id) == XE_OK);
    atomic_store(&gate, true);
    CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_FAILED);
    CHECK(atomic_load(&done.recorded) == 0);
    end_transfer(t);
    end_bench(b);
}

// Whoever waits for chunks gets those of what was abandoned, and who has some keeps them.
static void leaves_others_their_chunks(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_H2D, NULL, 4, 256 * KIB, false);
    transfer *t[3];
    until_asleep(1);
    for (uint32_t n = 0; n < 3; n++) {
        start(t[n] = of_one(b, 2 * 256 * KIB, n), NULL, NULL);
        until_asleep(n + 2);
    }
    CHECK(xe_wait(t[1]->id, XE_STAGED, 0) == XE_OK && xe_wait(t[2]->id, XE_STAGED, 0) == XE_NOT_YET);
    CHECK(xe_abandon(t[0]->id) == XE_OK);
    CHECK(ask_until(t[2], XE_STAGED) == XE_OK);
    xe_request requests[4 * XE_MOST_PIECES];
    CHECK(xe_requests(requests, 4 * XE_MOST_PIECES, 0) == 4);
    for (int n = 0; n < 4; n++) {
        CHECK(requests[n].id == t[n < 2 ? 1 : 2]->id);
        memcpy((void *)requests[n].device, requests[n].memory, requests[n].nbytes);
        CHECK(xe_answer(1, requests[n].chunk, 0, 1) == XE_OK && xe_reached(1, requests[n].chunk, 0) == XE_OK);
    }
    CHECK(xe_wait(t[0]->id, XE_FINISHED, 0) == XE_FAILED);
    end_transfer(t[0]);
    finish(t[1]);
    finish(t[2]);
    end_bench(b);
}

// A job that was there before its chunks keeps them until it has begun as a whole.
static void leaves_chunks_to_jobs_that_want_them(void) {
    bench *b = new_bench(1, XE_H2D, &DEVICE, 0, 256 * KIB, false);
    char *memory = malloc(2 * 256 * KIB);
    transfer *small = of_one(b, 100, 1), *large = of_one(b, 2 * MIB, 2);
    transfer *each[2] = {small, large};
    for (uint64_t n = 0; n < 2; n++) {
        start(each[n], NULL, NULL);
        CHECK(xe_add_chunk(1, n, memory + n * 256 * KIB, 256 * KIB, n, &b->events[n]) == XE_OK);
        CHECK(xe_take_chunk(1, n) == XE_NOT_YET);
        finish(each[n]);
        CHECK(xe_take_chunk(1, n) == XE_OK);
    }
    free(memory);
    end_bench(b);
}

// A chunk is taken back by its number, once, unless it is in use or wanted.
static void takes_back_by_number(void) {
    bench *b = new_bench(1, XE_H2D, &DEVICE, 3, 256 * KIB, false);
    CHECK(xe_take_chunk(9, 0) == XE_UNKNOWN && xe_take_chunk(1, 9) == XE_UNKNOWN);
    CHECK(xe_take_chunk(1, 1) == XE_OK && xe_take_chunk(1, 1) == XE_UNKNOWN);
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    transfer *t = of_one(b, 100, 1);
    start(t, NULL, NULL);
    CHECK(xe_take_chunk(1, 0) == XE_NOT_YET && xe_take_chunk(1, 2) == XE_NOT_YET);
    CHECK(xe_wait(t->id, XE_ISSUED, PATIENCE) == XE_OK);
    // The one that was added last is in use now.
    CHECK(xe_take_chunk(1, 2) == XE_NOT_YET && xe_take_chunk(1, 0) == XE_OK && xe_take_chunk(1, 0) == XE_UNKNOWN);
    atomic_store(&gate, true);
    finish(t);
    CHECK(xe_take_chunk(1, 2) == XE_OK && xe_take_chunk(1, 2) == XE_UNKNOWN);
    // Nothing is left to begin with until one is given again.
    start(t = of_one(b, 100, 2), NULL, NULL);
    CHECK(xe_wait(t->id, XE_STAGED, 1000) == XE_NOT_YET);
    CHECK(xe_add_chunk(1, 1, b->memory, 256 * KIB, 1, &b->events[1]) == XE_OK);
    finish(t);
    end_bench(b);
}

// Whoever waits for a stage.
typedef struct {
    uint64_t id;
    int stage, status;
    atomic_bool over;
    pthread_t thread;
} waiter;

static void *wait_for_stage(void *which) {
    waiter *w = which;
    w->status = xe_wait(w->id, w->stage, PATIENCE);
    atomic_store(&w->over, true);
    return NULL;
}

static void start_waiter(waiter *w, uint64_t id, int stage) {
    *w = (waiter){.id = id, .stage = stage};
    CHECK(pthread_create(&w->thread, NULL, wait_for_stage, w) == 0);
}

// It has come now, and not because its patience is over.
static void end_waiter(waiter *w, int status) {
    double began = seconds();
    pthread_join(w->thread, NULL);
    CHECK(w->status == status && seconds() - began < PATIENCE_SECONDS / 2.0);
}

// Whoever owns a lane is woken when there is something to be done.
static void *wait_for_requests(void *count) {
    static xe_request requests[XE_MOST_PIECES];
    *(size_t *)count = xe_requests(requests, XE_MOST_PIECES, PATIENCE);
    if (*(size_t *)count) CHECK(xe_answer(requests[0].lane, requests[0].chunk, 0, 1) == XE_OK && xe_reached(requests[0].lane, requests[0].chunk, 0) == XE_OK);
    return NULL;
}

static void wakes_whoever_owns_a_lane(void) {
    xe_start(1);
    for (int direction = 0; direction < 2; direction++) {
        bench *b = new_bench((uint32_t)direction + 1, direction, NULL, 1, 64 * KIB, false);
        transfer *t = of_one(b, 100, 1);
        pthread_t owner;
        size_t count;
        CHECK(pthread_create(&owner, NULL, wait_for_requests, &count) == 0);
        // It is asleep.
        pause_for(50000);
        start(t, NULL, NULL);
        double began = seconds();
        pthread_join(owner, NULL);
        CHECK(count == 1 && seconds() - began < PATIENCE_SECONDS / 2.0);
        CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_OK);
        end_transfer(t);
        end_bench(b);
    }
}

// Whoever waits is woken when a job has come so far, and no later.
static void wakes_whoever_waits(int direction) {
    xe_start(1);
    bench *b = new_bench(1, direction, &DEVICE, 0, 256 * KIB, false);
    char *memory = malloc(256 * KIB);
    atomic_store(&gate, false);
    atomic_store(&held_in, b->stream);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    transfer *t = of_one(b, 100, 1);
    start(t, NULL, NULL);
    waiter w[XE_FINISHED + 1];
    for (int stage = 0; stage <= XE_FINISHED; stage++) start_waiter(&w[stage], t->id, stage);
    // They are asleep.
    pause_for(50000);
    CHECK(xe_add_chunk(1, 0, memory, 256 * KIB, 0, &b->events[0]) == XE_OK);
    if (direction == XE_H2D) end_waiter(&w[XE_STAGED], XE_OK);
    while (atomic_load(&b->stream->inside) == 0) pause_for(100);
    CHECK(!atomic_load(&w[XE_ISSUED].over));
    // The call returns, and the stream stays as it is.
    atomic_store(&held_in, NULL);
    if (direction == XE_D2H) end_waiter(&w[XE_STAGED], XE_OK);
    end_waiter(&w[XE_ISSUED], XE_OK);
    CHECK(!atomic_load(&w[XE_FINISHED].over));
    atomic_store(&gate, true);
    end_waiter(&w[XE_FINISHED], XE_OK);
    finish(t);
    CHECK(xe_take_chunk(1, 0) == XE_OK);
    free(memory);
    end_bench(b);
}

static void wakes_whoever_waits_to_the_device(void) { wakes_whoever_waits(XE_H2D); }
static void wakes_whoever_waits_to_the_host(void) { wakes_whoever_waits(XE_D2H); }

// Of a job that failed, too, of which a stage counts no more that had been reached.
static void wakes_whoever_waits_for_what_failed(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 1, 256 * KIB, false);
    atomic_store(&gate, false);
    atomic_store(&held_in, b->stream);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    transfer *t = of_one(b, 100, 1), *waiting = of_one(b, 100, 2);
    start(t, NULL, NULL);
    start(waiting, NULL, NULL);
    while (atomic_load(&b->stream->inside) == 0) pause_for(100);
    CHECK(xe_wait(t->id, XE_STAGED, 0) == XE_OK && xe_abandon(t->id) == XE_OK);
    waiter staged, finished, not_begun;
    start_waiter(&staged, t->id, XE_STAGED);
    start_waiter(&finished, t->id, XE_FINISHED);
    start_waiter(&not_begun, waiting->id, XE_FINISHED);
    pause_for(50000);
    CHECK(!atomic_load(&staged.over) && xe_abandon(waiting->id) == XE_OK);
    end_waiter(&not_begun, XE_FAILED);
    atomic_store(&held_in, NULL);
    end_waiter(&staged, XE_FAILED);
    CHECK(!atomic_load(&finished.over));
    atomic_store(&gate, true);
    end_waiter(&finished, XE_FAILED);
    end_transfer(t);
    end_transfer(waiting);
    end_bench(b);
}

// A thread that is about to fall asleep misses nothing, whenever it is told.
static void misses_nothing_as_it_falls_asleep(void) {
    xe_start(1);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 1, 64 * KIB, false);
    uint32_t seed = 5;
    for (int n = 0; n < 3000; n++) {
        transfer *t = of_one(b, 100, 1);
        // About as long as it stays awake; asleep, this thread would come later.
        for (double until = seconds() + dice(&seed, 130) * 1e-6; seconds() < until;) {}
        start(t, NULL, NULL);
        CHECK(ask_until(t, XE_FINISHED) == XE_OK);
        finish(t);
    }
    end_bench(b);
}

// Without work it sleeps: where there are cores to spare a moment later, and still.
static void falls_asleep(void) {
    for (int threads = 1; threads < 4; threads += 2) {
        xe_start(threads);
        bench *b = new_bench((uint32_t)threads, XE_H2D, &DEVICE, 2, 64 * KIB, false);
        transfer *t = of_one(b, 300 * KIB, 1);
        start(t, NULL, NULL);
        finish(t);
        pause_for(50000);
        double began = seconds(), used = processor_seconds();
        pause_for(200000);
        CHECK(processor_seconds() - used < 0.3 * (seconds() - began));
        end_bench(b);
    }
}

// Of the engine's threads, by their name, how many there are, and how many run on just these CPUs.
static void count_threads(const cpu_set_t *cpus, int *all, int *on_them) {
    *all = *on_them = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    for (const struct dirent *task; (task = readdir(tasks));) {
        char path[300], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (!file) continue;
        bool ours = fgets(name, sizeof name, file) && strcmp(name, "xferlib-engine\n") == 0;
        fclose(file);
        if (!ours) continue;
        cpu_set_t found;
        CHECK(sched_getaffinity(atoi(task->d_name), sizeof found, &found) == 0);
        ++*all;
        *on_them += CPU_EQUAL(&found, cpus) != 0;
    }
    closedir(tasks);
}

// Threads of a node run on its CPUs, as many as were asked for there, whatever others there are; where it has none, anywhere.
static void stands_near_a_device(void) {
    cpu_set_t before, after, one, none;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    CPU_ZERO(&one);
    CPU_ZERO(&none);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &before)) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
    }
    CHECK(xe_start(1) == 1);
    CHECK(xe_start_near(2, 1, &one, sizeof one) == 3);
    CHECK(xe_start_near(2, 1, &before, sizeof before) == 3 && xe_start_near(1, 1, &one, sizeof one) == 3 && xe_start(3) == 3);
    CHECK(xe_start_near(1, 0, &one, sizeof one) == 4);
    CHECK(xe_start_near(1, 7, &none, sizeof none) == 5);
    CHECK(xe_start_near(1, -1, &one, sizeof one) == XE_WRONG && xe_start_near(1, 1 << 20, &one, sizeof one) == XE_WRONG);
    int all = 0, near = 0;
    for (double began = seconds(); all < 5 && seconds() < began + PATIENCE_SECONDS; pause_for(1000)) count_threads(&one, &all, &near);
    CHECK(all == 5);
    CHECK(near == (CPU_COUNT(&before) == 1 ? 5 : 3));
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(&before, &after));
    bench *b = new_bench(1, XE_H2D, &DEVICE, 2, 64 * KIB, false);
    transfer *t = of_one(b, MIB, 1);
    start(t, NULL, NULL);
    finish(t);
    end_bench(b);
}

// A second call with the same number changes nothing, and nonsense is refused.
static void may_be_called_again(void) {
    xe_start(2);
    CHECK(xe_start(1) == 2);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 2, 256 * KIB, false);
    CHECK(xe_open_lane(1, XE_H2D, &DEVICE, b->stream) == XE_OK);
    CHECK(xe_add_chunk(1, 0, b->memory, 256 * KIB, 0, &b->events[0]) == XE_OK);
    transfer *t = of_one(b, MIB, 1);
    for (int n = 0; n < 5; n++) start(t, NULL, NULL);
    CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_OK);
    start(t, NULL, NULL);
    uint64_t ids[4];
    CHECK(xe_forget(t->id) == XE_BUSY);
    CHECK(xe_finished(ids, 4) == 1 && ids[0] == t->id);
    check_arrived(t);
    end_transfer(t);
    CHECK(xe_forget(atomic_load(&next_id) - 1) == XE_UNKNOWN);
    CHECK(xe_wait(atomic_load(&next_id) - 1, XE_FINISHED, 0) == XE_UNKNOWN);
    CHECK(xe_take_chunk(1, 0) == XE_OK && xe_take_chunk(1, 0) == XE_UNKNOWN);
    CHECK(xe_take_chunk(2, 1) == XE_UNKNOWN && xe_take_chunk(1, 1) == XE_OK);
    char host[8];
    xe_piece nothing = {host, 1, 0, 0}, nowhere = {NULL, 1, 8, 0}, piece = {host, 1, 8, 0};
    event e = {0};
    CHECK(xe_submit(900, 1, &piece, 0, NULL, NULL, NULL) == XE_WRONG && xe_submit(900, 1, &nothing, 1, NULL, NULL, NULL) == XE_WRONG);
    CHECK(xe_submit(900, 1, &nowhere, 1, NULL, NULL, NULL) == XE_WRONG && xe_submit(900, 9, &piece, 1, NULL, NULL, NULL) == XE_UNKNOWN);
    CHECK(xe_open_lane(5, 2, &DEVICE, NULL) == XE_WRONG);
    xe_calls older = DEVICE;
    older.version--;
    CHECK(xe_open_lane(5, XE_H2D, &older, NULL) == XE_WRONG);
    CHECK(xe_open_lane(5, XE_H2D, NULL, NULL) == XE_OK && xe_submit(900, 5, &piece, 1, NULL, &e, NULL) == XE_WRONG);
    CHECK(xe_close_lane(5) == XE_OK && xe_close_lane(5) == XE_UNKNOWN);
    CHECK(xe_add_chunk(5, 1, host, 256, 1, NULL) == XE_UNKNOWN && xe_add_chunk(1, 1, host, 8, 1, NULL) == XE_WRONG);
    CHECK(xe_answer(1, 77, 0, 1) == XE_UNKNOWN && xe_reached(1, 77, 0) == XE_UNKNOWN);
    end_bench(b);
    // Of a lane with calls nobody tells what is reached.
    b = new_bench(6, XE_H2D, &DEVICE, 1, 256 * KIB, false);
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    t = of_one(b, 100, 1);
    start(t, NULL, NULL);
    CHECK(xe_wait(t->id, XE_ISSUED, PATIENCE) == XE_OK);
    CHECK(xe_reached(6, 0, 0) == XE_WRONG && xe_answer(6, 0, 0, 1) == XE_WRONG);
    CHECK(xe_wait(t->id, XE_FINISHED, 0) == XE_NOT_YET);
    atomic_store(&gate, true);
    finish(t);
    end_bench(b);
}

static int open_descriptors(void) {
    int found = 0;
    for (int n = 0; n < 256; n++) found += fcntl(n, F_GETFD) >= 0;
    return found;
}

static int inherited_descriptors(void) {
    int found = 0;
    for (int n = 0; n < 256; n++) {
        int flags = fcntl(n, F_GETFD);
        found += flags >= 0 && !(flags & FD_CLOEXEC);
    }
    return found;
}

// A file with so many bytes of a transfer's kind, and no name.
static int file_of(size_t nbytes, uint32_t seed) {
    char name[] = "/tmp/xferlib-engine-XXXXXX", *bytes = malloc(nbytes);
    int file = mkstemp(name);
    unlink(name);
    for (size_t k = 0; k < nbytes; k++) bytes[k] = value(seed, 0, k);
    CHECK(file >= 0 && write(file, bytes, nbytes) == (ssize_t)nbytes);
    free(bytes);
    return file;
}

static void check_read(const char *device, size_t from, size_t nbytes, uint32_t seed) {
    for (size_t k = 0; k < nbytes; k++) CHECK(device[k] == value(seed, 0, from + k));
}

// In the place of the system's: some file systems are interrupted in the middle of a read, or give less than was asked for.
static _Atomic bool stingy;
static _Atomic unsigned reads;

// The first read of a file of `held_nbytes` goes on when others have read all the rest, and a moment later. 0: none is held.
static _Atomic size_t held_nbytes, read_beside;
static _Atomic bool is_held;

static void hold_back(int file, size_t nbytes) {
    if (atomic_exchange(&is_held, true)) return;
    for (double until = seconds() + PATIENCE_SECONDS; read_beside + nbytes < held_nbytes && seconds() < until;) pause_for(100);
    for (double until = seconds() + 0.05; fcntl(file, F_GETFD) >= 0 && seconds() < until;) pause_for(100);
    held_nbytes = 0;
}

ssize_t pread(int file, void *into, size_t nbytes, off_t offset) {
    if (held_nbytes) {
        hold_back(file, nbytes);
        ssize_t found = syscall(SYS_pread64, file, into, nbytes, offset);
        if (found > 0) read_beside += (size_t)found;
        return found;
    }
    if (stingy && reads++ % 2) {
        errno = EINTR;
        return -1;
    }
    return syscall(SYS_pread64, file, into, stingy && nbytes > 1000 ? 1000 : nbytes, offset);
}

// A read that is cut short goes on. The file ends with a page, and directly behind it there is memory that is not the file's.
static void reads_a_file_bit_by_bit(void) {
    xe_start(2);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 4, 256 * KIB, false);
    char *mapped = mmap(NULL, 2 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *device = aligned_alloc(256, 2 * MIB);
    char *beside = mapped + MIB;
    CHECK(mapped != MAP_FAILED && mprotect(beside, 64 * KIB, PROT_READ | PROT_WRITE) == 0);
    for (size_t k = 0; k < 64 * KIB; k++) beside[k] = value(8, 0, k);
    xe_piece pieces[2] = {{beside, (uint64_t)device + MIB, 64 * KIB, 1}, {mapped, (uint64_t)device, MIB, 1}};
    int file = file_of(MIB, 7), before = open_descriptors();
    xe_file read = {mapped, MIB, file, 0};
    stingy = true;
    CHECK(xe_submit(700, 1, pieces, 2, &read, NULL, NULL) == XE_OK);
    CHECK(xe_wait(700, XE_FINISHED, PATIENCE) == XE_OK);
    stingy = false;
    check_read(device, 0, MIB, 7);
    check_read(device + MIB, 0, 64 * KIB, 8);
    // What has the number of a file that is closed is left alone.
    for (double until = seconds() + PATIENCE_SECONDS; open_descriptors() > before && seconds() < until;) pause_for(100);
    int others[8];
    for (size_t k = 0; k < 8; k++) others[k] = dup(file);
    uint64_t id;
    CHECK(xe_finished(&id, 1) == 1 && xe_forget(700) == XE_OK && open_descriptors() == before + 8);
    for (size_t k = 0; k < 8; k++) close(others[k]);
    close(file);
    munmap(mapped, 2 * MIB);
    free(device);
    end_bench(b);
}

// One thread is still in a read when others have read all the rest: the file stays open until it is out.
static void closes_no_file_that_is_read(void) {
    xe_start(2);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 8, 256 * KIB, false);
    char *mapped = mmap(NULL, MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *device = aligned_alloc(256, MIB);
    CHECK(mapped != MAP_FAILED);
    xe_piece piece = {mapped, (uint64_t)device, MIB, 1};
    int file = file_of(MIB, 7);
    xe_file read = {mapped, MIB, file, 0};
    held_nbytes = MIB;
    CHECK(xe_submit(700, 1, &piece, 1, &read, NULL, NULL) == XE_OK);
    CHECK(xe_wait(700, XE_FINISHED, PATIENCE) == XE_OK);
    CHECK(is_held && held_nbytes == 0);
    check_read(device, 0, MIB, 7);
    uint64_t id;
    CHECK(xe_finished(&id, 1) == 1 && xe_forget(700) == XE_OK);
    close(file);
    munmap(mapped, MIB);
    free(device);
    end_bench(b);
}

// Host memory that a job says is a file's is never touched, and the file is open as long as it is read, whoever else closes it.
static void reads_a_file(void) {
    xe_start(2);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 4, 256 * KIB, false);
    size_t from = 3 * KIB + 1, nbytes = MIB, all = from + nbytes;
    // Nobody may read here.
    char *mapped = mmap(NULL, 2 * all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *device = aligned_alloc(256, 2 * MIB);
    // Behind it there is memory that is not the file's.
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *beside = mapped + (all + page - 1) / page * page;
    CHECK(mapped != MAP_FAILED && mprotect(beside, 64 * KIB, PROT_READ | PROT_WRITE) == 0);
    for (size_t k = 0; k < 64 * KIB; k++) beside[k] = value(8, 0, k);
    xe_piece pieces[2] = {{mapped + from, (uint64_t)device, nbytes, 1}, {beside, (uint64_t)device + MIB, 64 * KIB, 1}};
    int file = file_of(all, 7), before = open_descriptors();
    xe_file read = {mapped, all, file, 0};
    CHECK(xe_submit(700, 1, pieces, 2, &read, NULL, NULL) == XE_OK);
    close(file);
    CHECK(xe_wait(700, XE_FINISHED, PATIENCE) == XE_OK);
    check_read(device, from, nbytes, 7);
    // What is no part of the file is copied.
    check_read(device + MIB, 0, 64 * KIB, 8);
    // It is closed though nobody has forgotten the job.
    for (double until = seconds() + PATIENCE_SECONDS; open_descriptors() >= before && seconds() < until;) pause_for(100);
    CHECK(open_descriptors() == before - 1);
    // Nor is one left open where nothing was read.
    before = open_descriptors();
    file = file_of(all, 7);
    read.descriptor = file;
    CHECK(xe_submit(701, 9, pieces, 2, &read, NULL, NULL) == XE_UNKNOWN && open_descriptors() == before + 1);
    CHECK(xe_open_lane(2, XE_H2D, &DEVICE, b->stream) == XE_OK);
    int inherited = inherited_descriptors();
    CHECK(xe_submit(702, 2, pieces, 2, &read, NULL, NULL) == XE_OK && open_descriptors() == before + 2);
    // Programs that are started meanwhile have none of it.
    CHECK(inherited_descriptors() == inherited);
    uint64_t ids[4];
    CHECK(xe_abandon(702) == XE_OK && xe_finished(ids, 4) == 2 && xe_forget(702) == XE_OK && xe_forget(700) == XE_OK);
    close(file);
    CHECK(open_descriptors() == before && xe_close_lane(2) == XE_OK);
    munmap(mapped, 2 * all);
    free(device);
    end_bench(b);
}

// A file that has fewer bytes than it had fails the job, even by less than a page, of which a mapping would have zeros.
static void reads_no_more_than_a_file_has(void) {
    xe_start(2);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 4, 256 * KIB, false);
    char *mapped = mmap(NULL, MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *device = malloc(MIB);
    int file = file_of(MIB, 7), before = open_descriptors();
    CHECK(ftruncate(file, MIB - 10) == 0);
    xe_file read = {mapped, MIB, file, 0};
    xe_piece piece = {mapped, (uint64_t)device, MIB, 0};
    CHECK(xe_submit(700, 1, &piece, 1, &read, NULL, NULL) == XE_OK);
    CHECK(xe_wait(700, XE_FINISHED, PATIENCE) == XE_FAILED);
    int32_t why;
    const char *what;
    int lost;
    CHECK(xe_error(700, &why, &what, &lost) == XE_OK && why == SIGBUS && !lost);
    for (double until = seconds() + PATIENCE_SECONDS; open_descriptors() > before && seconds() < until;) pause_for(100);
    CHECK(open_descriptors() == before);
    transfer *next = of_one(b, MIB, 2);
    start(next, NULL, NULL);
    finish(next);
    munmap(mapped, MIB);
    free(device);
    close(file);
    end_bench(b);
}

// A source whose file was cut off fails the job, and nobody else.
static void cut_off_a_file(void) {
    bench *b = new_bench(1, XE_H2D, &DEVICE, 4, 256 * KIB, false);
    char name[] = "/tmp/xferlib-engine-XXXXXX";
    int file = mkstemp(name);
    unlink(name);
    CHECK(ftruncate(file, MIB) == 0);
    char *mapped = mmap(NULL, MIB, PROT_READ, MAP_SHARED, file, 0);
    CHECK(mapped != MAP_FAILED && ftruncate(file, 64 * KIB) == 0);
    char *device = malloc(MIB);
    xe_piece piece = {mapped, (uint64_t)device, MIB, 0};
    CHECK(xe_submit(500, 1, &piece, 1, NULL, NULL, NULL) == XE_OK);
    CHECK(xe_wait(500, XE_FINISHED, PATIENCE) == XE_FAILED);
    int32_t why;
    const char *what;
    int lost;
    CHECK(xe_error(500, &why, &what, &lost) == XE_OK && why == SIGBUS && !lost);
    transfer *next = of_one(b, MIB, 2);
    start(next, NULL, NULL);
    finish(next);
    free(device);
    munmap(mapped, MIB);
    close(file);
    end_bench(b);
}

static void survives_a_file_that_is_cut_off(void) {
    xe_start(2);
    cut_off_a_file();
}

// Whoever copied from it copies no more, so that others who wait do.
static void works_for_others_after_a_file_was_cut_off(void) {
    xe_start(1);
    cut_off_a_file();
    works_while_it_waits(XE_H2D);
}

// In a child with an engine of its own, which found `handler` there: the status by which it ended.
static int end_of_child(void (*handler)(int), bool while_copying) {
    pid_t child = fork();
    if (child == 0) {
        signal(SIGBUS, handler);
        if (while_copying) {
            // It comes to the engine's thread, which nobody else keeps it from.
            sigset_t bus;
            sigemptyset(&bus);
            sigaddset(&bus, SIGBUS);
            pthread_sigmask(SIG_BLOCK, &bus, NULL);
            xe_start(1);
            new_bench(1, XE_H2D, &DEVICE, 1, 256 * KIB, false);
            set_trap();
            xe_piece piece = {trap, 256, 100, 0};
            CHECK(xe_submit(800, 1, &piece, 1, NULL, NULL, NULL) == XE_OK);
            while (atomic_load(&trapped) == 0) pause_for(100);
            kill(getpid(), SIGBUS);
            CHECK(xe_wait(800, XE_FINISHED, PATIENCE) == XE_FAILED);
        } else {
            CHECK(xe_open_lane(1, XE_H2D, &DEVICE, NULL) == XE_OK);
            kill(getpid(), SIGBUS);
        }
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

static void exit_by_signal(int number) { _exit(number == SIGBUS ? 44 : 45); }

// One that was sent, and that no fault has raised, does what it did before there was an engine.
static void ends_by_a_signal_that_was_sent(void) {
    int status = end_of_child(SIG_DFL, false);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
#if !BY_THREAD_SANITIZER
    // It keeps signals back while another one is handled, as here.
    status = end_of_child(SIG_DFL, true);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
#endif
    status = end_of_child(SIG_IGN, false);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    status = end_of_child(exit_by_signal, false);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 44);
}

// At exit nothing more is issued, and nobody waits for what is held.
static void stops(void) {
    xe_start(3);
    bench *b = new_bench(1, XE_D2H, &DEVICE, 4, 256 * KIB, false);
    atomic_store(&gate, false);
    tell(b->stream, (op){.kind = HOLD}, NULL);
    // Reachable to the end: nobody may free what is held.
    static transfer *t;
    t = of_one(b, 9 * MIB, 1);
    start(t, NULL, NULL);
    while (b->stream->count < 9) pause_for(100);
    CHECK(xe_stop(SECOND) == XE_OK);
    size_t before = b->stream->count;
    atomic_store(&gate, true);
    pause_for(20000);
    CHECK(b->stream->count == before);
    CHECK(xe_wait(t->id, XE_FINISHED, PATIENCE) == XE_STOPPED);
    CHECK(xe_submit(901, 1, t->pieces, 1, NULL, NULL, NULL) == XE_STOPPED && xe_start(4) == XE_STOPPED);
    xe_request requests[XE_MOST_PIECES];
    CHECK(xe_requests(requests, XE_MOST_PIECES, PATIENCE) == 0);
}

// Whoever stops it is told of a call that has not returned.
static void stops_behind_a_call(void) {
    xe_start(1);
    static bench *b;
    static transfer *t;
    b = new_bench(1, XE_D2H, &DEVICE, 2, 64 * KIB, false);
    t = of_one(b, 300 * KIB, 1);
    atomic_store(&gate, false);
    atomic_store(&held_in, b->stream);
    start(t, NULL, NULL);
    while (atomic_load(&b->stream->inside) == 0) pause_for(100);
    CHECK(xe_stop(1000) == XE_NOT_YET);
    atomic_store(&gate, true);
    CHECK(xe_stop(PATIENCE) == XE_OK);
    // The chunk's copy and its event, and nothing behind.
    CHECK(b->stream->count == 2 && atomic_load(&b->stream->inside) == 0);
    pause_for(20000);
    CHECK(b->stream->count == 2);
}

// Nor does it come back before threads are through with what they copy, and no more of that is begun.
static void stops_behind_a_copy(void) {
    xe_start(1);
    static bench *b;
    b = new_bench(1, XE_H2D, &DEVICE, 1, MIB, false);
    set_trap();
    static char device[MIB];
    xe_piece piece = {trap, (uint64_t)device, MIB, 0};
    CHECK(xe_submit(700, 1, &piece, 1, NULL, NULL, NULL) == XE_OK);
    while (atomic_load(&trapped) == 0) pause_for(100);
    CHECK(xe_stop(1000) == XE_NOT_YET);
    atomic_store(&gate, true);
    CHECK(xe_stop(PATIENCE) == XE_OK);
    take_trap_away();
    pause_for(20000);
    xe_figures figures;
    xe_read_figures(&figures);
    CHECK(figures.copied_nbytes == 512 * KIB && b->stream->count == 0);
}

// A child has no threads, and is left alone by what the parent does.
static void forks(void) {
    xe_start(3);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 4, 256 * KIB, true);
    for (uint32_t n = 0; n < 5; n++) {
        transfer *t = of_one(b, 2 * MIB, n);
        start(t, NULL, NULL);
        pid_t child = fork();
        if (child == 0) _exit(0);
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        finish(t);
    }
    end_bench(b);
}

// No signal is handled on a thread of the engine.
static atomic_int handled_elsewhere;
static pthread_t main_thread;

static void on_signal(int number) {
    (void)number;
    if (!pthread_equal(pthread_self(), main_thread)) atomic_fetch_add(&handled_elsewhere, 1);
}

static void blocks_signals(void) {
    main_thread = pthread_self();
    xe_start(4);
    // Before the stream's thread is made, which would take some.
    sigset_t alarm, old;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm, &old);
    bench *b = new_bench(1, XE_H2D, &DEVICE, 4, 256 * KIB, false);
    signal(SIGALRM, on_signal);
    for (uint32_t n = 0; n < 50; n++) {
        transfer *t = of_one(b, MIB, n);
        start(t, NULL, NULL);
        kill(getpid(), SIGALRM);
        finish(t);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    CHECK(atomic_load(&handled_elsewhere) == 0);
    end_bench(b);
}

// Chunks come and go, and lanes, while jobs of any shape are under way, from several threads.
static void *rush(void *which) {
    enum { TURNS = 10, MOST = 6 };
    uint32_t seed = 100 + (uint32_t)(uintptr_t)which;
    // The stream may reach them after their jobs have finished, until the bench ends.
    event done[TURNS][MOST];
    memset(done, 0, sizeof done);
    bench *b = new_bench(50 + (uint32_t)(uintptr_t)which, (int)((uintptr_t)which % 2), (uintptr_t)which % 3 ? &DEVICE : &OTHER, 5, 256 * KIB, dice(&seed, 2));
    for (int turn = 0; turn < TURNS; turn++) {
        transfer *t[MOST];
        size_t count = 1 + dice(&seed, MOST);
        for (size_t n = 0; n < count; n++) {
            size_t sizes[40], pieces = 1 + dice(&seed, 40);
            for (size_t k = 0; k < pieces; k++) sizes[k] = 1 + dice(&seed, dice(&seed, 6) ? 2000 : 400 * KIB);
            start(t[n] = new_transfer(b, pieces, sizes, seed), NULL, &done[turn][n]);
        }
        uint64_t chunk = dice(&seed, (uint32_t)b->chunks);
        if (dice(&seed, 2) && xe_take_chunk(b->number, chunk) == XE_OK)
            CHECK(xe_add_chunk(b->number, chunk, b->memory + chunk * b->nbytes, b->nbytes, chunk / together, &b->events[chunk]) == XE_OK);
        for (size_t n = count; n--;) {
            if (xe_drop(t[n]->id) != XE_OK) {
                CHECK(xe_wait(t[n]->id, XE_FINISHED, PATIENCE) == XE_OK);
                CHECK(atomic_load(&done[turn][n].recorded) == 1);
                check_arrived(t[n]);
            }
            end_transfer(t[n]);
        }
    }
    end_bench(b);
    return NULL;
}

static void stands_a_rush(void) {
    xe_start(3);
    together = 4;
    pthread_t threads[6];
    for (uintptr_t n = 0; n < 6; n++) CHECK(pthread_create(&threads[n], NULL, rush, (void *)n) == 0);
    for (uintptr_t n = 0; n < 6; n++) pthread_join(threads[n], NULL);
}

// Past the caches or not, aligned or not, the bytes are the same.
static void copies_whole(void) {
    size_t most = 3 * MIB;
    char *from = malloc(most + 200), *to = malloc(most + 200);
    for (size_t n = 0; n < most + 200; n++) from[n] = value(1, 2, n);
    const size_t sizes[] = {0, 1, 63, 64, 65, 255, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 64 * KIB + 300, MIB + 77, 3 * MIB};
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++)
        for (size_t a = 0; a < 130; a += 13)
            for (int aside = 0; aside < 2; aside++) {
                memset(to, 0, sizes[n] + 200);
                xe_copy(to + a, from + 3, sizes[n], aside);
                CHECK(memcmp(to + a, from + 3, sizes[n]) == 0 && to[a + sizes[n]] == 0 && (a == 0 || to[a - 1] == 0));
            }
    free(from);
    free(to);
}

// The sanitizer of threads keeps all signals back in a handler, and for good where that jumps out: one more would end the process.
static void listen_again(void) {
#if BY_THREAD_SANITIZER
    sigset_t bus;
    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    pthread_sigmask(SIG_UNBLOCK, &bus, NULL);
#endif
}

// How much of a range is in huge pages.
static size_t huge_nbytes(const char *from, const char *to) {
    FILE *maps = fopen("/proc/self/smaps", "r");
    CHECK(maps != NULL);
    char line[512];
    unsigned long begin = 0, end = 0, kib;
    size_t found = 0;
    while (fgets(line, sizeof line, maps)) {
        unsigned long first, last;
        char space;
        if (sscanf(line, "%lx-%lx%c", &first, &last, &space) == 3 && space == ' ') {
            begin = first;
            end = last;
        } else if (sscanf(line, "ShmemPmdMapped: %lu kB", &kib) == 1 && begin < (uintptr_t)to && (uintptr_t)from < end) {
            found += kib * KIB;
        }
    }
    fclose(maps);
    return found;
}

static bool is_there(char *page) {
    unsigned char there;
    CHECK(mincore(page, 4 * KIB, &there) == 0);
    return there & 1;
}

// Shared memory from a border of huge pages on, of which nothing is there.
enum { HUGE_PAGE = 2 * MIB, RESERVED = 32 * MIB };
static char *reserved;

static char *new_memory(void) {
    reserved = mmap(NULL, RESERVED + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(reserved != MAP_FAILED);
    // The offset in the mapping must be that of a huge page, too.
    char *memory = reserved + (HUGE_PAGE - (uintptr_t)reserved % HUGE_PAGE) % HUGE_PAGE;
    CHECK(mmap(memory, RESERVED, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
    return memory;
}

static void end_memory(void) { munmap(reserved, RESERVED + HUGE_PAGE); }

// Not on an older system, and not where it has none left.
static bool gives_huge_pages(void) {
    char *memory = new_memory();
    memset(memory, 1, HUGE_PAGE);
    bool given = madvise(memory, HUGE_PAGE, 25 /* MADV_COLLAPSE */) == 0 && huge_nbytes(memory, memory + HUGE_PAGE) == HUGE_PAGE;
    end_memory();
    return given;
}

// Memory that is to be locked, and what a transfer writes to, is in huge pages where nothing is there yet: those that lie in it, the
// first part of one that three quarters of lie in it, and nothing around it.
static void puts_huge_pages_under_what_is_touched(void) {
    bool given = gives_huge_pages();
    const struct { size_t from, nbytes, huge; } rows[] = {
        {0, 6 * MIB, 3}, {MIB, 6 * MIB, 2}, {0, HUGE_PAGE - 4 * KIB, 1}, {0, HUGE_PAGE + 3 * HUGE_PAGE / 4, 2},
        {0, HUGE_PAGE + 3 * HUGE_PAGE / 4 - 4 * KIB, 1}, {4 * KIB, HUGE_PAGE, 0}, {3 * MIB, MIB, 0},
    };
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        char *memory = new_memory(), *from = memory + rows[n].from, *to = from + rows[n].nbytes;
        CHECK(xe_touch(from, rows[n].nbytes) == 0);
        for (char *page = from; page < to; page += 4 * KIB) CHECK(is_there(page));
        if (rows[n].from) CHECK(!is_there(from - 4 * KIB));
        if (given) CHECK(huge_nbytes(memory, to) == rows[n].huge * HUGE_PAGE);
        end_memory();
    }
    // What is there stays as it is.
    char *memory = new_memory();
    memory[3 * MIB] = 7;
    memory[4 * MIB] = 8;
    CHECK(xe_touch(memory, 6 * MIB) == 0 && memory[3 * MIB] == 7 && memory[4 * MIB] == 8);
    if (given) CHECK(huge_nbytes(memory, memory + 6 * MIB) == 2 * HUGE_PAGE);
    end_memory();
    // Whoever wants small ones has them.
    memory = new_memory();
    bool refused = madvise(memory, 6 * MIB, MADV_NOHUGEPAGE) == 0;
    CHECK(xe_touch(memory, 6 * MIB) == 0);
    for (char *page = memory; page < memory + 6 * MIB; page += 4 * KIB) CHECK(is_there(page));
    if (given && refused) CHECK(huge_nbytes(memory, memory + 6 * MIB) == 0);
    end_memory();
}

// A huge page would lie behind the end of a file, too, and take what is written there, which is lost.
static void tells_where_a_file_ends_in_a_huge_page(void) {
    // A sanitizer's own handler would be asked before.
    signal(SIGBUS, SIG_DFL);
    bool given = gives_huge_pages();
    char *from = calloc(1, 2 * HUGE_PAGE);
    for (int touched = 0; touched < 2; touched++) {
        char *memory = new_memory();
        int file = memfd_create("xferlib-engine", 0);
        CHECK(file >= 0 && ftruncate(file, HUGE_PAGE + MIB) == 0);
        CHECK(mmap(memory, 2 * HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == memory);
        // What an older system does not put there is touched, and nobody jumps out of that.
        if (touched && given) CHECK(xe_touch(memory, 2 * HUGE_PAGE) == EFAULT);
        else CHECK(xe_copy(memory, from, 2 * HUGE_PAGE, 1) == XE_WRONG);
        listen_again();
        struct stat found;
        CHECK(fstat(file, &found) == 0 && found.st_blocks * 512 == HUGE_PAGE + MIB);
        if (given) CHECK(huge_nbytes(memory, memory + 2 * HUGE_PAGE) == HUGE_PAGE);
        close(file);
        end_memory();
    }
    free(from);
}

static void puts_huge_pages_under_results(void) {
    bool given = gives_huge_pages();
    xe_start(1);
    together = 8;
    bench *b = new_bench(1, XE_D2H, &DEVICE, 8, MIB, false);
    // Slices of a usual length would end somewhere in a huge page. What the first piece is written to is there.
    size_t sizes[] = {4 * KIB, 20 * MIB + 1800 * KIB}, total = sizes[0] + sizes[1];
    char *memory = new_memory() + MIB + 64 * KIB, *device = malloc(total), *before = malloc(sizes[0]);
    memset(before, 1, sizes[0]);
    for (size_t n = 0; n < total; n++) device[n] = value(3, 1, n);
    xe_piece pieces[] = {{before, (uint64_t)device, sizes[0], 0}, {memory, (uint64_t)device + sizes[0], sizes[1], 0}};
    uint64_t id = atomic_fetch_add(&next_id, 1), ids[8];
    CHECK(xe_submit(id, 1, pieces, 2, NULL, NULL, NULL) == XE_OK);
    // Not by this thread: where two write to one huge page, small ones may come first.
    while (xe_wait(id, XE_FINISHED, 0) == XE_NOT_YET) pause_for(1000);
    CHECK(memcmp(before, device, sizes[0]) == 0 && memcmp(memory, device + sizes[0], sizes[1]) == 0);
    CHECK(!is_there(memory - 4 * KIB));
    // From the first border on, ten whole ones. Of the last one too little is written.
    if (given) CHECK(huge_nbytes(memory, memory + sizes[1]) == 10 * HUGE_PAGE);
    while (xe_forget(id) == XE_BUSY) xe_finished(ids, 8);
    free(before);
    free(device);
    end_memory();
    end_bench(b);
}

// Of memory without pages, each part but the last is written to whole huge pages.
static void ends_parts_at_huge_pages(void) {
    xe_start(1);
    together = 12;
    char *memory = new_memory();
    for (int fresh = 1; fresh >= 0; fresh--) {
        bench *b = new_bench(1, XE_D2H, NULL, 12, MIB, false);
        xe_piece piece = {memory + MIB, 256, 22 * MIB, 0};
        CHECK(xe_submit(700, 1, &piece, 1, NULL, NULL, NULL) == XE_OK);
        static xe_request requests[4 * XE_MOST_PIECES];
        size_t count = next_asked(requests, 4 * XE_MOST_PIECES);
        CHECK(count > 1 && requests[0].nbytes == 3 * MIB && requests[1].nbytes == (fresh ? 2 : 3) * MIB);
        CHECK(xe_abandon(700) == XE_OK);
        for (size_t n = 0; n < count; n++) CHECK(xe_answer(1, requests[n].chunk, 0, 1) == XE_OK && xe_reached(1, requests[n].chunk, 0) == XE_OK);
        CHECK(xe_wait(700, XE_FINISHED, PATIENCE) == XE_FAILED);
        uint64_t ids[8];
        while (xe_forget(700) == XE_BUSY) xe_finished(ids, 8);
        end_bench(b);
        memset(memory, 1, 24 * MIB);
    }
    end_memory();
}

// Strided arrays, against one item at a time; what lies around them is not touched.

enum { MANY_AXES = 64 };

typedef struct {
    int axes;
    int64_t shape[MANY_AXES], strides[MANY_AXES];
    size_t itemsize, count;
    char *memory;      // Just what the items reach, so that a sanitizer sees each byte beside them.
    const char *first;
} strided;

static strided new_strided(uint32_t *seed, int axes) {
    static const size_t ITEMS[] = {1, 2, 3, 4, 7, 8, 16, 24};
    strided a = {.axes = axes, .itemsize = ITEMS[dice(seed, 8)], .count = 1};
    int64_t low = 0, high = (int64_t)a.itemsize, step = (int64_t)a.itemsize;
    int order[MANY_AXES] = {0};
    for (int n = 0; n < axes; n++) {
        uint32_t other = dice(seed, (uint32_t)n + 1);
        order[n] = order[other];
        order[other] = n;
    }
    for (int n = 0; n < axes; n++) {
        int axis = dice(seed, 3) ? axes - 1 - n : order[n];
        if (a.shape[axis]) continue;
        int64_t length = 1 + dice(seed, axes > 6 ? 2 : 5);
        if (a.count * (size_t)length > 400) length = 1;
        // Side by side, with a gap that aligns nothing, backwards, or all the same.
        uint32_t way = dice(seed, 8);
        int64_t stride = way < 3 ? step : way < 5 ? step + (int64_t)dice(seed, 9) : way < 7 ? -step : 0;
        a.shape[axis] = length;
        a.count *= (size_t)length;
        a.strides[axis] = stride;
        int64_t reach = (length - 1) * stride;
        if (reach < 0) low += reach;
        else high += reach;
        step = (step + (stride < 0 ? -stride : stride)) * length;
        // Nobody takes a step along an axis of one.
        if (length == 1) a.strides[axis] = way & 1 ? INT64_MIN + (int64_t)way : INT64_MAX - (int64_t)way;
        if (step > KIB) step = 1 + dice(seed, 64);
    }
    for (int axis = 0; axis < axes; axis++)
        if (!a.shape[axis]) a.shape[axis] = 1, a.strides[axis] = INT64_MAX;
    size_t nbytes = (size_t)(high - low);
    a.memory = malloc(nbytes);
    for (size_t n = 0; n < nbytes; n++) a.memory[n] = (char)dice(seed, 256);
    a.first = a.memory - low;
    return a;
}

static const char *item_of(const strided *a, size_t number) {
    const char *at = a->first;
    for (int axis = a->axes - 1; axis >= 0; axis--) {
        int64_t index = (int64_t)(number % (size_t)a->shape[axis]);
        number /= (size_t)a->shape[axis];
        if (index) at += index * a->strides[axis];
    }
    return at;
}

static void gathers_in_order(void) {
    uint32_t seed = 5;
    for (int n = 0; n < 3000; n++) {
        strided a = new_strided(&seed, n % 50 == 0 ? MANY_AXES : n % 50 == 1 ? 32 : (int)dice(&seed, 7));
        size_t nbytes = a.count * a.itemsize, off = dice(&seed, 8);
        char *to = malloc(off + nbytes);
        CHECK(xe_gather(to + off, a.first, a.axes, a.shape, a.strides, a.itemsize) == XE_OK);
        for (size_t item = 0; item < a.count; item++)
            CHECK(memcmp(to + off + item * a.itemsize, item_of(&a, item), a.itemsize) == 0);
        // Of nothing nothing is read, however much of it there is.
        int64_t shape[] = {1ll << 60, 0, 1ll << 60}, strides[] = {1, 1, 1};
        CHECK(xe_gather(NULL, NULL, 3, shape, strides, a.itemsize) == XE_OK);
        CHECK(xe_gather(NULL, NULL, 1, shape, strides, 0) == XE_OK);
        free(to);
        free(a.memory);
    }
}

// An array whose file is cut off is not read; what others gather is whole; and each call survives for itself alone.

enum { CUT_ROWS = 512, CUT_NBYTES = 256 * KIB, CUT_PAGE = 4096 };
static const int64_t CUT_SHAPE[] = {CUT_ROWS, CUT_NBYTES / CUT_ROWS / 16}, CUT_STRIDES[] = {CUT_NBYTES / CUT_ROWS, 16};

static void *gathers_what_is_whole(void *over) {
    char *from = malloc(CUT_NBYTES), *to = malloc(CUT_NBYTES / 2);
    for (size_t n = 0; n < CUT_NBYTES; n++) from[n] = value(1, 2, n);
    do {
        memset(to, 0, CUT_NBYTES / 2);
        CHECK(xe_gather(to, from, 2, CUT_SHAPE, CUT_STRIDES, 8) == XE_OK);
        for (size_t n = 0; n < CUT_NBYTES / 2; n++) CHECK(to[n] == value(1, 2, n / 8 * 16 + n % 8));
    } while (!atomic_load((atomic_bool *)over));
    free(from);
    free(to);
    return NULL;
}

static char *cut_off_at(size_t nbytes) {
    char name[] = "/tmp/xferlib-engine-XXXXXX";
    int file = mkstemp(name);
    unlink(name);
    CHECK(ftruncate(file, CUT_NBYTES) == 0);
    char *mapped = mmap(NULL, CUT_NBYTES, PROT_READ, MAP_SHARED, file, 0);
    CHECK(mapped != MAP_FAILED && ftruncate(file, (off_t)nbytes) == 0);
    close(file);
    return mapped;
}

static void gathers_from_a_file_that_is_cut_off(void) {
    // A sanitizer's own handler would be asked before.
    signal(SIGBUS, SIG_DFL);
    char *to = malloc(CUT_NBYTES);
    atomic_bool over = false;
    pthread_t other;
    CHECK(pthread_create(&other, NULL, gathers_what_is_whole, &over) == 0);
    for (size_t left = 0; left <= CUT_NBYTES; left += CUT_NBYTES / 16) {
        char *mapped = cut_off_at(left);
        for (int n = 0; n < 3; n++) {
            CHECK(xe_gather(to, mapped, 2, CUT_SHAPE, CUT_STRIDES, 8) == (left < CUT_NBYTES ? XE_WRONG : XE_OK));
            listen_again();
            CHECK(xe_copy(to, mapped, CUT_NBYTES, 0) == (left < CUT_NBYTES ? XE_WRONG : XE_OK));
            listen_again();
        }
        munmap(mapped, CUT_NBYTES);
    }
    atomic_store(&over, true);
    pthread_join(other, NULL);
    // Behind a call, and behind one that failed, whoever touches what is not there ends.
    for (int failed = 0; failed < 2; failed++) {
        pid_t child = fork();
        if (child == 0) {
            struct rlimit none = {0, 0};
            setrlimit(RLIMIT_CORE, &none);
            // Where it went on it might do so for ever.
            alarm(5);
            char *mapped = cut_off_at(CUT_PAGE);
            int64_t shape = 64, stride = 16;
            CHECK(xe_gather(to, mapped + (failed ? CUT_PAGE : 0), 1, &shape, &stride, 8) == (failed ? XE_WRONG : XE_OK));
            listen_again();
            _exit(((volatile char *)mapped)[CUT_PAGE]);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && !WIFEXITED(status) && WTERMSIG(status) == SIGBUS);
    }
    free(to);
}

// Calls in a context, for whoever is somewhere else. The driver notes where its functions are called.

static struct {
    void *contexts[4];
    int depth, mode;
    int status, push_status, mode_status;   // What its functions say.
    int pushes, pops, exchanges, made;      // How often it was called; the last of them where something is done.
    void *context_then;                     // Where and how that was,
    int mode_then;
    const char *called;                     // and what.
    uint64_t given[4];
} driver;

static int driver_push(void *context) {
    driver.pushes++;
    if (driver.push_status == 0) driver.contexts[++driver.depth] = context;
    return driver.push_status;
}

static int driver_pop(void **context) {
    CHECK(driver.depth > 0);
    driver.pops++;
    *context = driver.contexts[driver.depth--];
    return 0;
}

static int driver_exchange(int *mode) {
    driver.exchanges++;
    if (driver.mode_status) return driver.mode_status;
    int before = driver.mode;
    driver.mode = *mode;
    *mode = before;
    return 0;
}

static int driver_made(const char *called, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    driver.made++;
    driver.called = called;
    driver.context_then = driver.contexts[driver.depth];
    driver.mode_then = driver.mode;
    memcpy(driver.given, (uint64_t[]){a, b, c, d}, sizeof driver.given);
    return driver.status;
}

#define WORD(x) ((uint64_t)(uintptr_t)(x))
static int driver_copy_h2d(uint64_t dst, const void *src, size_t n, void *on) { return driver_made("copy_h2d", dst, WORD(src), n, WORD(on)); }
static int driver_copy_d2h(void *dst, uint64_t src, size_t n, void *on) { return driver_made("copy_d2h", WORD(dst), src, n, WORD(on)); }
static int driver_record(void *which, void *on) { return driver_made("record", WORD(which), WORD(on), 0, 0); }
static int driver_wait(void *on, void *which, unsigned flags) { return driver_made("wait", WORD(on), WORD(which), flags, 0); }
static int driver_query_event(void *which) { return driver_made("query_event", WORD(which), 0, 0, 0); }
static int driver_query_stream(void *on) { return driver_made("query_stream", WORD(on), 0, 0, 0); }
static int driver_synchronize(void *which) { return driver_made("synchronize", WORD(which), 0, 0, 0); }

static int driver_pointer_attribute(void *found, int attribute, uint64_t address) {
    return driver_made("pointer_attribute", WORD(found), (uint64_t)attribute, address, 0);
}

static const xe_context IN_CONTEXT = {
    &contexts[0], RELAXED, 0, driver_push, driver_pop, driver_exchange, driver_copy_h2d, driver_copy_d2h, driver_record, driver_wait,
    driver_query_event, driver_query_stream, driver_synchronize, driver_pointer_attribute,
};
enum { EACH_CALL = 8, FIRST_RELAXED = 4 };
static const char *const CALLED[EACH_CALL] = {
    "copy_h2d", "copy_d2h", "record", "wait", "query_event", "query_stream", "synchronize", "pointer_attribute",
};
static const uint64_t GIVEN[EACH_CALL][4] = {
    {11, 12, 13, 14}, {11, 12, 13, 14}, {11, 14}, {14, 11}, {11}, {14}, {11}, {11, 12, 13},
};

// Have the driver say so, make one call, and return what came of it.
static int call_in_context(int number, int status) {
    void *a = (void *)11, *b = (void *)12, *on = (void *)14;
    driver.status = status;
    driver.called = "";
    driver.made = driver.pushes = driver.pops = driver.exchanges = 0;
    switch (number) {
    case 0: return xe_context_copy_h2d(&IN_CONTEXT, 11, b, 13, on);
    case 1: return xe_context_copy_d2h(&IN_CONTEXT, a, 12, 13, on);
    case 2: return xe_context_record(&IN_CONTEXT, a, on);
    case 3: return xe_context_wait(&IN_CONTEXT, on, a);
    case 4: return xe_context_query_event(&IN_CONTEXT, a);
    case 5: return xe_context_query_stream(&IN_CONTEXT, on);
    case 6: return xe_context_synchronize(&IN_CONTEXT, a);
    default: return xe_context_pointer_attribute(&IN_CONTEXT, a, 12, 13);
    }
}

static void be_elsewhere(void) {
    memset(&driver, 0, sizeof driver);
    driver.contexts[driver.depth = 1] = &contexts[1];
    driver.mode = STRICT + 1;
}

static void is_elsewhere_still(void) {
    CHECK(driver.depth == 1 && driver.contexts[1] == &contexts[1]);
    CHECK(driver.mode == STRICT + 1);
}

static void calls_in_its_context(void) {
    be_elsewhere();
    for (int number = 0; number < EACH_CALL; number++)
        for (int n = 0; n < 3; n++) {
            static const int SAID[] = {0, NOT_READY, BROKEN};
            CHECK(call_in_context(number, SAID[n]) == SAID[n]);
            CHECK(driver.made == 1 && strcmp(driver.called, CALLED[number]) == 0);
            CHECK(memcmp(driver.given, GIVEN[number], sizeof driver.given) == 0);
            CHECK(driver.context_then == &contexts[0]);
            CHECK(driver.mode_then == (number < FIRST_RELAXED ? STRICT + 1 : RELAXED));
            CHECK(driver.pushes == 1 && driver.pops == 1);
            is_elsewhere_still();
        }
}

static void calls_nothing_where_it_cannot_go(void) {
    be_elsewhere();
    driver.push_status = LOST_DEVICE;
    for (int number = 0; number < EACH_CALL; number++) {
        CHECK(call_in_context(number, 0) == LOST_DEVICE);
        CHECK(driver.made == 0 && driver.pops == 0);
        is_elsewhere_still();
    }
}

static void asks_in_whatever_mode_it_gets(void) {
    be_elsewhere();
    driver.mode_status = LOST_DEVICE;
    for (int number = FIRST_RELAXED; number < EACH_CALL; number++) {
        CHECK(call_in_context(number, BROKEN) == BROKEN);
        CHECK(driver.made == 1 && driver.exchanges == 1);
        is_elsewhere_still();
    }
}

// Callbacks of CUPTI. No thread here has Python's lock.

enum { RUNTIME_COPY = 41, DRIVER_RECORD = 119, DRIVER_COPY = 277, LAUNCH = 652, BATCH = 796, CALLERS = 8, ROUNDS = 200 };
static xe_reads callback_reads[2 * XE_MOST_FUNCTIONS];
static atomic_int callbacks_handled;

static int has_no_lock(void) { return 0; }
static int has_lock(void) { return 1; }

static void count_callback(const xe_callback *call) {
    (void)call;
    atomic_fetch_add(&callbacks_handled, 1);
}

static void start_callbacks(uint64_t recording, int64_t longest, int (*holds_gil)(void)) {
    callback_reads[DRIVER_COPY] = (xe_reads){1, 32, 0, 0, 0};
    callback_reads[DRIVER_RECORD] = (xe_reads){1, 8, 0, 1, 0};
    callback_reads[LAUNCH] = (xe_reads){1, 8, 40, 0, 0};
    callback_reads[BATCH] = (xe_reads){1, 64, 0, 0, 1};
    callback_reads[XE_MOST_FUNCTIONS + RUNTIME_COPY] = (xe_reads){1, 40, 0, 0, 0};
    CHECK(xe_callbacks_start(recording, longest, holds_gil, count_callback, callback_reads));
}

static void tell_of(int site, int domain, uint32_t number, const void *parameters) {
    xe_callback_data data = {.site = site, .function_name = "cuSomething", .parameters = parameters};
    xe_callbacks_called(NULL, domain, number, &data);
}

static void *handle_callbacks(void *recording) {
    while (xe_callbacks_wait(*(uint64_t *)recording)) {
        xe_callback *call = xe_callbacks_take(*(uint64_t *)recording);
        if (call == NULL) continue;
        // What the thread will look at when it goes on.
        if (call->enters) *(int *)(uintptr_t)call->parameters[0] += 1;
        count_callback(call);
        xe_callbacks_handled(call);
    }
    return NULL;
}

static void *call_cuda(void *unused) {
    for (int round = 0; round < ROUNDS; round++) {
        int seen = 0;
        uint64_t runtime[5] = {(uintptr_t)&seen}, words[4] = {0};
        tell_of(0, 2, RUNTIME_COPY, runtime);
        CHECK(seen == 1);
        tell_of(0, 1, DRIVER_COPY, words);
        tell_of(1, 1, DRIVER_COPY, words);
        tell_of(1, 2, RUNTIME_COPY, runtime);
    }
    return unused;
}

static void hands_its_callbacks_over(void) {
    uint64_t recording = 1;
    start_callbacks(recording, PATIENCE, has_no_lock);
    pthread_t clerk, callers[CALLERS];
    CHECK(pthread_create(&clerk, NULL, handle_callbacks, &recording) == 0);
    for (int n = 0; n < CALLERS; n++) CHECK(pthread_create(&callers[n], NULL, call_cuda, NULL) == 0);
    for (int n = 0; n < CALLERS; n++) pthread_join(callers[n], NULL);
    CHECK(callbacks_handled == 2 * CALLERS * ROUNDS && xe_callbacks_missed(recording) == 0);
    xe_callbacks_stop(recording);
    pthread_join(clerk, NULL);
    // Whoever has the lock needs no clerk. What it calls meanwhile, or says to be ours, is nobody's.
    callbacks_handled = 0;
    start_callbacks(2, PATIENCE, has_lock);
    uint64_t words[4] = {0};
    for (int ours = 1; ours >= 0; ours--) {
        if (ours) xe_callbacks_nest(1);
        tell_of(0, 1, DRIVER_COPY, words), tell_of(1, 1, DRIVER_COPY, words);
        if (ours) xe_callbacks_nest(-1);
    }
    CHECK(callbacks_handled == 2);
    // The end of a call whose beginning nobody saw, and a call in the middle of which a recording ends.
    tell_of(1, 1, DRIVER_COPY, words), tell_of(0, 1, DRIVER_COPY, words);
    CHECK(callbacks_handled == 3);
    xe_callbacks_stop(2);
    tell_of(0, 1, DRIVER_COPY, words);
    start_callbacks(3, PATIENCE, has_lock);
    tell_of(0, 1, DRIVER_COPY, words);
    CHECK(callbacks_handled == 4);
    xe_callbacks_stop(2);
    tell_of(1, 1, DRIVER_COPY, words);
    CHECK(callbacks_handled == 5);
    callback_reads[1].nbytes = XE_PARAMETERS + 1;
    CHECK(!xe_callbacks_start(4, PATIENCE, has_lock, count_callback, callback_reads));
}

static void *make_one_call(void *number) {
    uint64_t config[5] = {0, 0, 0, 0, 7}, launch[1] = {(uintptr_t)config};
    uint64_t targets[2] = {10, 11}, sources[2] = {20, 21}, sizes[2] = {4, 5};
    uint64_t batch[8] = {(uintptr_t)targets, (uintptr_t)sources, (uintptr_t)sizes, 2, 0, 0, 0, 7};
    uint32_t which = *(uint32_t *)number;
    tell_of(0, 1, which, which == BATCH ? batch : launch);
    return NULL;
}

static xe_callback *taken_callback(uint64_t recording) {
    CHECK(xe_callbacks_wait(recording));
    xe_callback *call = xe_callbacks_take(recording);
    CHECK(call != NULL);
    return call;
}

static uint64_t word_at(uint64_t address) { return *(const uint64_t *)(uintptr_t)address; }

// The clerk has a call of each kind when its thread goes on, and ends: what it has is its own.
static void leaves_callbacks_that_come_late(void) {
    start_callbacks(1, 20000, has_no_lock);
    for (int round = 0; round < 2; round++) {
        uint32_t number = round ? BATCH : LAUNCH;
        pthread_t caller;
        CHECK(pthread_create(&caller, NULL, make_one_call, &number) == 0);
        xe_callback *call = taken_callback(1);
        pthread_join(caller, NULL);
        CHECK(xe_callbacks_missed(1) == 1);
        if (round) {
            CHECK(word_at(call->parameters[0]) == 10 && word_at(call->parameters[1]) == 20 && word_at(call->parameters[2]) == 9);
            CHECK(call->parameters[3] == 1 && call->parameters[7] == 7);
        } else {
            CHECK(word_at(call->parameters[0] + 32) == 7);
        }
        xe_callbacks_forgive(1);
        // What was made of it comes too late, even for whoever has forgiven that.
        xe_callbacks_handled(call);
        CHECK(xe_callbacks_missed(1) == 1);
        xe_callbacks_forgive(1);
    }
    // One that nobody takes is gone; from then on nobody waits.
    uint64_t words[4] = {0};
    tell_of(0, 1, DRIVER_COPY, words), tell_of(1, 1, DRIVER_COPY, words);
    tell_of(0, 1, DRIVER_COPY, words), tell_of(1, 1, DRIVER_COPY, words);
    CHECK(xe_callbacks_missed(1) == 2 && xe_callbacks_take(1) == NULL);
    xe_callbacks_stop(1);
    CHECK(xe_callbacks_missed(1) == 0 && !xe_callbacks_wait(1));
}

// Of a call whose order alone matters the thread goes on soon, and the clerk still gets it, in time or late; or the recording's end does.
static void keeps_callbacks_that_may_be_late(void) {
    start_callbacks(1, PATIENCE, has_no_lock);
    uint64_t words[2] = {3, 5};
    for (int round = 0; round < 2; round++) {
        tell_of(0, 1, DRIVER_RECORD, words), tell_of(1, 1, DRIVER_RECORD, words);
        xe_callback *call = taken_callback(1);
        CHECK(call->state == XE_LEFT && call->enters && call->serial == 1 + (uint64_t)round && call->parameters[0] == 3);
        xe_callbacks_handled(call);
    }
    uint32_t number = DRIVER_RECORD;
    pthread_t caller;
    CHECK(pthread_create(&caller, NULL, make_one_call, &number) == 0);
    xe_callback *call = taken_callback(1);
    pthread_join(caller, NULL);
    CHECK(call->state == XE_LEFT);
    xe_callbacks_handled(call);
    CHECK(xe_callbacks_missed(1) == 0 && xe_callbacks_take(1) == NULL);
    for (int n = 0; n < 3; n++) tell_of(0, 1, DRIVER_RECORD, words), tell_of(1, 1, DRIVER_RECORD, words);
    xe_callbacks_stop(1);
    start_callbacks(2, PATIENCE, has_no_lock);
    CHECK(xe_callbacks_take(2) == NULL);
    xe_callbacks_stop(2);
}

static void ends_with_callbacks_under_way(void) {
    start_callbacks(1, (int64_t)3600 * SECOND, has_no_lock);
    pthread_t callers[3];
    uint32_t number = LAUNCH;
    for (int n = 0; n < 3; n++) CHECK(pthread_create(&callers[n], NULL, make_one_call, &number) == 0);
    xe_callback *call = taken_callback(1);
    xe_callbacks_stop(1);
    for (int n = 0; n < 3; n++) pthread_join(callers[n], NULL);
    start_callbacks(2, PATIENCE, has_no_lock);
    xe_callbacks_handled(call);
    CHECK(xe_callbacks_take(2) == NULL && xe_callbacks_missed(2) == 0);
    // A forked child has no recording.
    pid_t child = fork();
    if (child == 0) {
        uint64_t words[4] = {0};
        tell_of(0, 1, DRIVER_COPY, words);
        _exit(xe_callbacks_wait(2));
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    xe_callbacks_stop(2);
}

#define TEST(name) {#name, name}
static const struct { const char *name; void (*run)(void); } TESTS[] = {
    TEST(moves_by_one_thread), TEST(moves_by_four_threads), TEST(moves_slowly), TEST(moves_by_whoever_waits),
    TEST(moves_by_its_owner), TEST(moves_slowly_by_its_owner), TEST(frees_its_source), TEST(joins_what_belongs_together),
    TEST(joins_chunks), TEST(joins_no_blocks), TEST(loses_what_it_joined), TEST(waits_for_longer_runs),
    TEST(fits_its_parts_to_its_chunks), TEST(makes_no_part_too_long), TEST(cuts_at_whole_chunks), TEST(ends_small_where_nothing_follows), TEST(is_fair_before_there_are_chunks), TEST(leaves_longer_runs), TEST(waits_where_half_is_on_its_way), TEST(leaves_short_runs_to_others), TEST(waits_for_no_runs_that_are_lost), TEST(waits_for_longer_runs_alone),
    TEST(copies_together_to_the_device), TEST(copies_together_to_the_host), TEST(abandons_what_several_copy), TEST(fails_while_others_copy), TEST(waits_for_no_lane), TEST(asks_every_lane),
    TEST(takes_over_to_the_device), TEST(takes_over_to_the_host), TEST(works_while_it_waits_to_the_device),
    TEST(works_while_it_waits_to_the_host), TEST(leaves_large_jobs_to_threads_that_copy), TEST(copies_where_fewer_than_half_do), TEST(copies_what_threads_leave), TEST(leaves_what_it_began), TEST(leaves_what_it_asks_for), TEST(leaves_what_it_began_before_there_were_threads),
    TEST(waits_for_no_call), TEST(enters_again_where_it_works_for_others),
    TEST(goes_back_in_each_library), TEST(does_what_can_be_done_at_once),
    TEST(costs_little_while_held), TEST(orders_its_copies), TEST(is_issued_when_its_event_is_recorded), TEST(is_fair), TEST(fails_alone_to_the_device),
    TEST(fails_alone_to_the_host), TEST(fails_alone_though_it_copies), TEST(tells_what_an_event_says), TEST(tells_what_its_owner_says),
    TEST(gives_away_no_chunk_that_may_be_read),
    TEST(gives_away_no_chunk_that_it_cannot_ask_for), TEST(fails_when_its_chunks_are_lost),
    TEST(owner_fails), TEST(loses_the_device), TEST(drops_what_has_not_begun), TEST(abandons_to_the_device),
    TEST(abandons_to_the_host), TEST(abandons_what_is_ready_to_the_device), TEST(abandons_what_is_ready_to_the_host),
    TEST(rests_behind_a_copy_to_the_device), TEST(rests_behind_a_copy_to_the_host), TEST(rests_behind_a_call_to_the_device), TEST(rests_behind_a_call_to_the_host), TEST(abandons_what_its_owner_copies), TEST(abandons_what_has_landed),
    TEST(abandons_during_its_last_copy), TEST(leaves_others_their_chunks),
    TEST(leaves_chunks_to_jobs_that_want_them), TEST(takes_back_by_number), TEST(wakes_whoever_waits_to_the_device),
    TEST(wakes_whoever_waits_to_the_host), TEST(wakes_whoever_waits_for_what_failed), TEST(misses_nothing_as_it_falls_asleep),
    TEST(falls_asleep), TEST(stands_near_a_device), TEST(may_be_called_again),
    TEST(reads_a_file), TEST(reads_a_file_bit_by_bit), TEST(closes_no_file_that_is_read), TEST(reads_no_more_than_a_file_has), TEST(survives_a_file_that_is_cut_off), TEST(works_for_others_after_a_file_was_cut_off), TEST(ends_by_a_signal_that_was_sent), TEST(stops), TEST(stops_behind_a_call), TEST(stops_behind_a_copy), TEST(wakes_whoever_owns_a_lane), TEST(forks), TEST(blocks_signals), TEST(stands_a_rush), TEST(copies_whole), TEST(puts_huge_pages_under_what_is_touched), TEST(tells_where_a_file_ends_in_a_huge_page), TEST(puts_huge_pages_under_results), TEST(ends_parts_at_huge_pages), TEST(gathers_in_order), TEST(gathers_from_a_file_that_is_cut_off),
    TEST(calls_in_its_context), TEST(calls_nothing_where_it_cannot_go), TEST(asks_in_whatever_mode_it_gets),
    TEST(hands_its_callbacks_over), TEST(leaves_callbacks_that_come_late), TEST(keeps_callbacks_that_may_be_late), TEST(ends_with_callbacks_under_way),
};

int main(int argc, char **argv) {
    harness = pthread_self();
    for (size_t n = 0; n < sizeof TESTS / sizeof *TESTS; n++) {
        if (argc < 2) {
            puts(TESTS[n].name);
        } else if (strcmp(argv[1], TESTS[n].name) == 0) {
            TESTS[n].run();
            return 0;
        }
    }
    return argc < 2 ? 0 : 2;
}
