// The threads, lanes, jobs and chunks; see engine.h.
//
// One lock, `mu`, guards everything here. It is held for some dozen instructions: never while bytes are copied, a device is called,
// or anything is waited for.
//
// A chunk's states, and who takes it from one to the next:
//
//   FREE ----> FILLING ----> READY ----> ISSUING ----> COPYING ----> FREE              to the device
//   FREE ------------------> READY ----> ISSUING ----> COPYING ----> LANDING ----> FREE     to the host
//    start_part    copy_slice     issue_ready,     issued     reached     copy_slice
//                                 xe_requests
//
//   ISSUING --> FREE   nothing of it was enqueued (issued)
//   ISSUING, COPYING --> LOST   nobody can know when the device is done with it, and nobody gets it any more (issued, ask)
//   READY, FILLING, LANDING --> FREE   the job fails (fail), so that no chunk of a failed job is in these lists; where threads copy
//                                      from or to it, the last of them gives it back (copy_slice)
//   COPYING --> FREE   it has failed meanwhile
//
//   FREE --> JOINED --> FREE, LOST   its memory follows that of another one, and lengthens it (take_run, let_go)
//
// Several threads fill or empty a part together, a slice each, and a part may have several chunks that lie side by side: so it may be
// large, which is few calls of the device. Each of these takes a lock that whoever launches work wants, too. Small parts take little
// memory all the same.
//
// The turn: of a lane's READY chunks one thread at a time issues (`issuing`), in their order, and whoever adds one meanwhile leaves
// it to that thread. So what the stream is to wait for comes directly before a job's first copy, and its event directly behind
// the last. A turn is no lock: nobody waits for it.
//
// No thread waits for an event. One at a time asks the oldest of each lane (`polling`), and sleeps longer and longer meanwhile.
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "copying.h"

enum {
    ALIGNMENT = 256,             // Between pieces that may be copied as one. The core's.
    LEAST_SLICE = 128 << 10,     // Bytes. Less would be more locking than copying.
    MOST_SLICE = 1 << 20,        // Likewise: half of a core's second-level cache, on the processors beside these devices.
    FEW_SLICES = 4,              // Of a part.
    MOST_PART = 8 << 20,         // Likewise: between two copies the link rests for a microsecond or two.
    SOON = 16 << 20,             // Likewise: the largest job, and the most that is on its way before a part, for the device to read it soon.
    SHARES = 4,                  // Parts of a lane's memory: one is filled or emptied while others wait for the device.
    SMALL_JOB = 4 << 20,         // Likewise, at most: it need not wait for larger ones.
    MOST_THREADS = 64,
    MOST_NODES = 1024,           // The kernel's.
    MOST_LANES_ASKED = 32,       // How many events are asked for in one round.
    ROUNDS_AWAKE = 100,          // Rounds of asking without a sleep: a chunk takes tens of microseconds.
    FIRST_SLEEP = 20, LONGEST_SLEEP = 200,   // Microseconds.
    LONGEST_DOZE = 2000,         // Likewise, of who asks: a microsecond longer each time, so late by a hundredth of the time waited.
    BUCKETS = 1024,
    MOST_ISSUED = 8,             // Parts that a thread which waits issues before it looks whether it waits any more.
    AWAKE = 400,                 // Microseconds: longer than most programs need from one batch to the next.
    GLANCE = 5,                  // Microseconds between two questions of a thread that waits.
    PAUSE = 10,                  // Microseconds between two questions of who asks, for each mebibyte of a part: half of what it takes.
    MOST_PAUSES = 4,
    TRIES = 200,                 // To get the lock: some microseconds.
    BREATHS = 32,                // Between two looks at the clock: about a microsecond.
};

typedef enum { FREE, FILLING, READY, ISSUING, COPYING, LANDING, JOINED, LOST } state;

typedef struct job job;
typedef struct lane lane;

typedef struct chunk {
    struct chunk *next;          // In the list that its state stands for.
    struct chunk *other;         // Of the same lane, in any state.
    struct chunk *before, *behind;     // In memory, in the same block.
    struct chunk *joined;        // Behind it in memory, and lengthens it.
    lane *lane;
    job *job;
    uint64_t number, block;
    char *memory;
    size_t nbytes;
    void *event;
    state state;
    size_t piece, offset;        // Where its part of the job begins.
    size_t part_nbytes;          // How much of its memory is used.
    size_t begun;                // So much of that, from the front, have threads begun to copy.
    size_t hands;                // So many do it now.
    bool aside;                  // Filled past the caches.
    bool last;                   // Of a lane without calls: its owner was asked for the job's event, too.
} chunk;

typedef struct { chunk *first, *last; } chunks;

struct job {
    job *next;                   // In its lane's queue.
    job *other;                  // In its bucket.
    job *finished_next;
    lane *lane;
    uint64_t id;
    xe_piece *pieces;
    size_t count;
    size_t piece, offset;        // Where the next part begins.
    size_t left;                 // Bytes that are in no part yet.
    xe_file file;                // Its descriptor is this job's own; -1: there is none, or it is closed.
    void *after, *done;
    size_t started, issued, out; // Parts that were given a chunk; whose copies are in the stream; whose chunk is not back.
    size_t filling;              // Of those, how many are not filled yet.
    size_t touched;              // How many threads copy from or to the caller's memory now.
    size_t calling;              // Of the parts, for how many a device is called now, or its owner is.
    bool fresh;                  // It is written to memory that had no pages.
    int come;                    // How many stages it has reached, as those who wait were told.
    bool small;                  // A chunk has room for it.
    bool soon;                   // To the device, which reads all of it before it can have left the caches of those who fill.
    bool queued, ordered, last_issued, finished, listed, lost;
    int32_t status;
    const char *at;              // Where it failed; NULL: it has not.
};

typedef struct { job *first, *last; } jobs;

struct lane {
    lane *next;
    uint32_t number;
    int direction;
    const xe_calls *calls;
    void *stream;
    chunk *all, *idle;
    chunks ready, copying;
    jobs small, large;
    size_t open;                 // Jobs that have not finished.
    size_t nbytes, longest;      // Of its chunks in all, and of those that lie side by side; but for those that are lost.
    size_t under_way;            // Of that, what the parts use that have a chunk.
    bool issuing, large_next;
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work, doze, news, asked;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static lane *lanes;              // The one to be looked at first stands first.
static job *buckets[BUCKETS];
static job *finished_first, *finished_last;
static chunks uncopied;          // Chunks that are to be filled or emptied, as long as there is a slice that nobody has begun.
static int threads, idle_threads;
static int near[MOST_NODES];     // Of the threads, those that were started for each node.
static size_t hands;             // Threads that copy now, of the engine and of callers.
static size_t touching, copying;       // Threads that copy or call a device; chunks whose events are the engine's to ask for.
static int64_t rest_between = PAUSE;     // Microseconds between two questions.
static unsigned quiet;           // Rounds of asking in a row that found nothing.
static size_t rounds;            // Of asking some of the lanes.
static bool polling, dozing, stopping;      // A thread asks; it sleeps between two rounds.
static xe_figures figures;
static _Atomic bool taken;       // `mu` is, as far as can be told by looking.
static _Atomic size_t called;    // So many of the threads that look out for work are to come, and have not yet.
static _Atomic unsigned work_told;     // How often there was something new to do.
static _Atomic unsigned news_told;     // How often a job has come further.
static _Atomic bool spares_cores;      // The threads are no more than five eighths of them.
// Where this thread is, for the device.
static _Thread_local struct {
    bool guest;                  // It is not the engine's, and goes back to where it was.
    bool inside;                 // Of `context`, which was entered last.
    void *context, *context_before;
    int (*enter)(void *context);       // By which it came from where it was; NULL: it is there.
    int mode_before;
    int (*capture_mode)(int *mode);    // By which it was relaxed; NULL: it was not.
} here;

static void take_breath(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Where there are cores to spare, whoever has the lock lets it go before a thread would have fallen asleep. To try for it takes its
// cache line from whoever has it, so that it is tried for only when it looks free.
static void lock(void) {
    for (int n = 0; spares_cores && n < TRIES; n++) {
        if (!atomic_load_explicit(&taken, memory_order_relaxed) && pthread_mutex_trylock(&mu) == 0) {
            atomic_store_explicit(&taken, true, memory_order_relaxed);
            return;
        }
        take_breath();
    }
    pthread_mutex_lock(&mu);
    atomic_store_explicit(&taken, true, memory_order_relaxed);
}

static void unlock(void) {
    atomic_store_explicit(&taken, false, memory_order_relaxed);
    pthread_mutex_unlock(&mu);
}

// Lists.

static void push(chunks *list, chunk *c) {
    c->next = NULL;
    if (list->last) list->last->next = c;
    else list->first = c;
    list->last = c;
}

static chunk *pop(chunks *list) {
    chunk *c = list->first;
    if (c) {
        list->first = c->next;
        if (!list->first) list->last = NULL;
    }
    return c;
}

static bool take_out(chunks *list, chunk *c) {
    chunk *before = NULL;
    for (chunk *each = list->first; each; before = each, each = each->next) {
        if (each != c) continue;
        if (before) before->next = c->next;
        else list->first = c->next;
        if (list->last == c) list->last = before;
        return true;
    }
    return false;
}

static void enqueue(jobs *list, job *j) {
    j->next = NULL;
    if (list->last) list->last->next = j;
    else list->first = j;
    list->last = j;
}

static void dequeue(jobs *list, job *j) {
    job *before = NULL;
    for (job *each = list->first; each; before = each, each = each->next) {
        if (each != j) continue;
        if (before) before->next = j->next;
        else list->first = j->next;
        if (list->last == j) list->last = before;
        return;
    }
}

static bool wants_chunks(const lane *l) { return l->small.first || l->large.first; }

// Perhaps: a job may wait for longer runs.
static bool can_begin(const lane *l) { return l->idle && wants_chunks(l); }

static lane *find_lane(uint32_t number) {
    lane *l = lanes;
    while (l && l->number != number) l = l->next;
    return l;
}

static chunk *find_chunk(lane *l, uint64_t number) {
    chunk *c = l->all;
    while (c && c->number != number) c = c->other;
    return c;
}

static job **place_of(uint64_t id) {
    job **place = &buckets[(id * 0x9E3779B97F4A7C15u >> 32) % BUCKETS];
    while (*place && (*place)->id != id) place = &(*place)->other;
    return place;
}

// The lane that was served goes to the end.
static void rotate(lane *l) {
    if (!l->next) return;
    lane **place = &lanes;
    while (*place != l) place = &(*place)->next;
    *place = l->next;
    while (*place) place = &(*place)->next;
    *place = l;
    l->next = NULL;
}

// Of those that look out for work no more come than are called: all of them at once would only wait for the lock.
static void wake(size_t many) {
    if (many > (size_t)threads) many = (size_t)threads;
    if (many) atomic_fetch_add_explicit(&work_told, 1, memory_order_relaxed);
    if (atomic_load_explicit(&called, memory_order_relaxed) < many) atomic_store_explicit(&called, many, memory_order_relaxed);
    if (many && dozing) {
        pthread_cond_signal(&doze);
        many--;
    }
    if (many == 0 || idle_threads == 0) return;
    if (many >= (size_t)idle_threads) pthread_cond_broadcast(&work);
    else while (many--) pthread_cond_signal(&work);
}

// Parts. One is what one chunk carries: a run of pieces, the first and the last perhaps cut.

typedef struct {
    char *host;
    uint64_t device;
    size_t nbytes;
    size_t at;                   // In the chunk.
} segment;

typedef struct {
    size_t piece, offset, end;   // Where the next segment begins, and where the last one has ended in the chunk.
    uint64_t base;               // On the device, of the whole part.
    size_t pieces;
} walk;

static uint64_t round_up(uint64_t nbytes) { return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static bool next_segment(const job *j, walk *w, size_t capacity, segment *s) {
    if (w->piece == j->count || w->pieces == XE_MOST_PIECES) return false;
    const xe_piece *p = &j->pieces[w->piece];
    uint64_t device = p->device + w->offset;
    size_t at = 0;
    if (w->pieces == 0) {
        w->base = device;
    } else if (w->offset) {
        // It was cut, so the chunk is full.
        return false;
    } else if (j->lane->direction == XE_H2D) {
        // It is one copy: over two allocations that lie side by side there is none.
        if (p->block != p[-1].block || device != round_up(w->base + w->end)) return false;
        at = device - w->base;
    } else {
        at = round_up(w->end);
    }
    if (at >= capacity) return false;
    size_t left = p->nbytes - w->offset, room = capacity - at;
    *s = (segment){(char *)p->host + w->offset, device, left < room ? left : room, at};
    w->end = at + s->nbytes;
    w->pieces++;
    w->offset += s->nbytes;
    if (w->offset == p->nbytes) {
        w->piece++;
        w->offset = 0;
    }
    return true;
}

static walk walk_of(const chunk *c) { return (walk){.piece = c->piece, .offset = c->offset}; }

static bool all_started(const job *j) { return j->piece == j->count; }

// How far a job has come. Under `mu`, as all that follows unless it says otherwise.

static bool has_failed(const job *j) { return j->at != NULL; }

static bool has_come(const job *j, int stage) {
    // Of one that failed, nothing counts before its memory is at rest, and nothing more of it can come into the stream.
    if (has_failed(j) && (j->touched || j->calling)) return false;
    switch (stage) {
    case XE_STAGED:
        if (has_failed(j)) return true;
        if (j->lane->direction == XE_H2D) return j->filling == 0 && all_started(j);
        // fall through
    case XE_ISSUED:
        return j->finished || j->last_issued;
    default:
        return j->finished;
    }
}

static void look_at(job *j) {
    if (!j->finished && j->out == 0 && !j->queued && (j->last_issued || has_failed(j))) {
        j->finished = true;
        j->lane->open--;
        j->finished_next = NULL;
        if (finished_last) finished_last->finished_next = j;
        else finished_first = j;
        finished_last = j;
        j->listed = true;
    }
    // Whoever waits is not woken by each part.
    int come = 0;
    while (come <= XE_FINISHED && has_come(j, come)) come++;
    if (come > j->come) {
        atomic_fetch_add_explicit(&news_told, 1, memory_order_relaxed);
        pthread_cond_broadcast(&news);
    }
    j->come = come;
}

static void unqueue(job *j) {
    if (!j->queued) return;
    j->queued = false;
    dequeue(j->small ? &j->lane->small : &j->lane->large, j);
}

// The last one first, which is warm.
static void put_aside(chunk *c) {
    c->state = FREE;
    c->next = c->lane->idle;
    c->lane->idle = c;
}

// With those that lengthen it.
static void let_go(chunk *c, state now) {
    job *j = c->job;
    c->job = NULL;
    c->lane->under_way -= c->part_nbytes;
    j->filling -= c->state == FILLING;
    j->out--;
    while (c) {
        chunk *next = c->joined;
        c->joined = NULL;
        c->state = now;
        if (now == FREE) put_aside(c);
        c = next;
    }
}

static void give_back(chunk *c) {
    job *j = c->job;
    let_go(c, FREE);
    look_at(j);
}

// Give back a job's chunks out of a list. Where threads copy, nothing more is begun.
static void clear(chunks *list, const job *j) {
    chunks rest = {0};
    for (chunk *c; (c = pop(list));) {
        if (c->job != j) {
            push(&rest, c);
        } else if (c->hands) {
            c->begun = c->part_nbytes;
        } else {
            give_back(c);
        }
    }
    *list = rest;
}

static void fail(job *j, int32_t status, const char *at) {
    if (has_failed(j)) return;
    j->status = status;
    j->at = at;
    unqueue(j);
    clear(&j->lane->ready, j);
    clear(&uncopied, j);
    // Others may wait for its chunks, or behind it for those that it left idle.
    wake(can_begin(j->lane));
    look_at(j);
}

// While every chunk of a lane is lost, nothing on it can begin or go on: whoever waits for one is told.
static void fail_without_chunks(lane *l) {
    if (!l->all) return;
    for (const chunk *c = l->all; c; c = c->other)
        if (c->state != LOST) return;
    while (wants_chunks(l)) fail(l->small.first ? l->small.first : l->large.first, ENOBUFS, "every chunk of the lane is lost");
}

static void measure(lane *l) {
    l->nbytes = l->longest = 0;
    for (const chunk *c = l->all; c; c = c->other) {
        if (c->state == LOST) continue;
        l->nbytes += c->nbytes;
        if (c->before && c->before->state != LOST) continue;
        size_t run = 0;
        for (const chunk *each = c; each && each->state != LOST; each = each->behind) run += each->nbytes;
        if (run > l->longest) l->longest = run;
    }
}

static void lose(chunk *c) {
    job *j = c->job;
    let_go(c, LOST);
    j->lost = true;
    measure(c->lane);
    look_at(j);
    fail_without_chunks(c->lane);
    // Longer runs may have been waited for, of which this was one.
    wake(can_begin(c->lane));
}

// Starting parts.

// How many bytes the device has to copy yet.
static size_t enqueued(const lane *l) {
    size_t nbytes = 0;
    for (const chunk *c = l->copying.first; c; c = c->next) nbytes += c->part_nbytes;
    return nbytes;
}

// How much the next part of a job should carry, in whole chunks. Copies to the device begin small, so that the link does not wait for the
// first of them, and become as large as what is on its way. Where nothing follows, they end small, so that little is left to do behind
// the last; but not where the device has as much to do until then.
static size_t wanted(const lane *l, const job *j) {
    size_t chunk_nbytes = l->all->nbytes, most = l->nbytes / SHARES;
    if (most > l->longest) most = l->longest;
    if (most > MOST_PART) most = MOST_PART;
    if (l->direction == XE_H2D && l->under_way < most) most = l->under_way;
    bool alone = (l->small.first == NULL) != (l->large.first == NULL) && !j->next;
    if (alone && l->direction == XE_H2D && enqueued(l) >= j->left) alone = false;
    if (alone && j->left / 2 < most) most = j->left / 2;
    return most < chunk_nbytes ? chunk_nbytes : most / chunk_nbytes * chunk_nbytes;
}

// Take idle chunks that lie side by side, as many as so many bytes want, and no more: the shortest run that is long enough, or the
// longest. Return the first. NULL: what there is is short, longer runs will come back, and the job, of which so much is `left`, has to
// wait for them in any case. Otherwise parts would become shorter and shorter.
static chunk *take_run(lane *l, size_t nbytes, size_t left, size_t *found) {
    chunk *best = NULL;
    size_t best_run = 0, idle = 0;
    for (chunk *c = l->idle; c; c = c->next) {
        idle += c->nbytes;
        if (c->before && c->before->state == FREE) continue;
        size_t run = 0;
        for (const chunk *each = c; each && each->state == FREE; each = each->behind) run += each->nbytes;
        if (best && (best_run < nbytes ? run <= best_run : run < nbytes || run >= best_run)) continue;
        best = c;
        best_run = run;
    }
    if (best_run < nbytes / 2 && l->under_way >= l->nbytes / 2 && left > idle) return NULL;
    chunk *last = NULL;
    *found = 0;
    for (chunk *c = best; c && c->state == FREE && (!last || *found < nbytes); last = c, c = c->behind) {
        chunk **place = &l->idle;
        while (*place != c) place = &(*place)->next;
        *place = c->next;
        *found += c->nbytes;
        c->state = JOINED;
        if (last) last->joined = c;
    }
    return best;
}

static walk fill_walk(const job *j, size_t capacity) {
    for (;;) {
        walk w = {.piece = j->piece, .offset = j->offset};
        segment s = {0};
        while (next_segment(j, &w, capacity, &s)) {}
        // A huge page is fetched by one thread. Another one that wrote to it meanwhile, for the next part, would get small pages. Short
        // parts stay as they are.
        size_t over = j->fresh && w.offset ? (uintptr_t)(s.host + s.nbytes) % HUGE_PAGE : 0;
        if (over == 0 || over >= s.nbytes || over > w.end / 2) return w;
        capacity = w.end - over;
    }
}

static chunk *start_part(lane *l) {
    if (!can_begin(l)) return NULL;
    // A small job need not wait for a large one, nor the large one for ever for small ones.
    job *j = l->small.first && !(l->large.first && l->large_next) ? l->small.first : l->large.first;
    size_t capacity;
    walk w = fill_walk(j, wanted(l, j));
    // Nor does a small job wait with the large one for longer runs: they alternate there, too.
    chunk *c = take_run(l, w.end, l->large_next ? 0 : j->left, &capacity);
    if (!c) return NULL;
    if (capacity < w.end) w = fill_walk(j, capacity);
    l->large_next = j->small;
    c->job = j;
    c->piece = j->piece;
    c->offset = j->offset;
    c->part_nbytes = w.end;
    // The device reads what still lies in the cache of the core that wrote it at half the rate of the link. What waits behind more, or
    // has more behind it, has left that cache by then for one that all cores share, which serves the device well and spares the memory.
    c->aside = j->soon && l->under_way < SOON;
    l->under_way += w.end;
    for (; j->piece < w.piece; j->piece++, j->offset = 0) j->left -= j->pieces[j->piece].nbytes - j->offset;
    j->left -= w.offset - j->offset;
    j->offset = w.offset;
    j->started++;
    j->out++;
    figures.chunks++;
    if (all_started(j)) unqueue(j);
    return c;
}

// Lets go of `mu` meanwhile, as all that follows down to `step`.

// To copy, or to call a device: however long that takes, meanwhile another thread asks.
static void leave(void) {
    touching++;
    if (copying && !polling) wake(1);
    unlock();
}

static void come_back(void) {
    lock();
    if (--touching == 0 && stopping) pthread_cond_broadcast(&news);
}

static size_t slices(const chunk *c, size_t *nbytes) {
    // All threads have one, and none of them ends with more than half of another one's. Where several lanes are under way, the threads
    // divide themselves between these: each slice takes the lock, for which all would wait at last.
    size_t busy = 0, many = threads ? 2 * (size_t)threads : 1;
    for (const lane *l = lanes; l; l = l->next) busy += l->under_way > 0;
    if (busy > 1 && many > FEW_SLICES) many = FEW_SLICES;
    size_t share = c->part_nbytes / many;
    // Those that ask for the same huge page wait for each other.
    *nbytes = c->job->fresh ? HUGE_PAGE : share < LEAST_SLICE ? LEAST_SLICE : share > MOST_SLICE ? MOST_SLICE : share;
    return (c->part_nbytes + *nbytes - 1) / *nbytes;
}

// For all threads, of which this is one.
static void have_copied(chunk *c) {
    size_t unused;
    c->begun = 0;
    push(&uncopied, c);
    wake(slices(c, &unused) - 1);
}

// Whether memory is a mapping of the job's file, from where on.
static bool is_of_file(const job *j, const char *host, int64_t *offset) {
    *offset = (int64_t)((uintptr_t)host - (uintptr_t)j->file.memory);
    return j->file.descriptor >= 0 && *offset >= 0 && (uint64_t)*offset < j->file.nbytes;
}

// How far it is from a place in a part to the next border of a huge page in the caller's memory.
static size_t to_border(const chunk *c, size_t from) {
    walk w = walk_of(c);
    segment s;
    while (next_segment(c->job, &w, c->part_nbytes, &s))
        if (from < s.at + s.nbytes) return HUGE_PAGE - ((uintptr_t)s.host + from - s.at) % HUGE_PAGE;
    return HUGE_PAGE;
}

// Without `mu`.
static bool copy_range(const chunk *c, size_t from, size_t to, bool *fresh) {
    bool to_device = c->lane->direction == XE_H2D, whole = true;
    walk w = walk_of(c);
    segment s;
    while (whole && next_segment(c->job, &w, c->part_nbytes, &s) && s.at < to) {
        size_t begin = s.at < from ? from : s.at, end = s.at + s.nbytes < to ? s.at + s.nbytes : to;
        if (begin >= end) continue;
        char *host = s.host + (begin - s.at), *there = c->memory + begin;
        // Of the piece that this is a segment of, the walk is behind it.
        const xe_piece *p = &c->job->pieces[w.offset ? w.piece : w.piece - 1];
        int64_t offset;
        // The caller's memory is read by nobody knows whom.
        if (to_device && is_of_file(c->job, host, &offset)) whole = read_whole(c->job->file.descriptor, offset, there, end - begin);
        else whole = to_device ? copy_guarded(there, host, end - begin, c->aside, NULL, NULL)
                               : copy_guarded(host, there, end - begin, true, &(range){p->host, p->nbytes}, fresh);
    }
    return whole;
}

// Where nobody reads a job's file any more, close it: whoever owns it may want it gone long before the job is forgotten. Lets go of
// `mu` meanwhile.
static void let_go_of_file(job *j) {
    int descriptor = j->file.descriptor;
    bool more = has_failed(j) ? j->touched > 0 : j->filling > 0 || !all_started(j);
    if (descriptor < 0 || more) return;
    j->file.descriptor = -1;
    unlock();
    close(descriptor);
    lock();
}

// All of a chunk is copied, or no more of it is.
static void copied(chunk *c) {
    job *j = c->job;
    if (has_failed(j) || c->state == LANDING) {
        give_back(c);
        return;
    }
    c->state = READY;
    j->filling--;
    push(&c->lane->ready, c);
    look_at(j);
    if (!c->lane->calls) pthread_cond_signal(&asked);
}

// Of a chunk that is in `uncopied`.
static void copy_slice(chunk *c) {
    job *j = c->job;
    size_t nbytes;
    slices(c, &nbytes);
    if (j->fresh) nbytes = to_border(c, c->begun);
    size_t from = c->begun, to = c->part_nbytes - from < nbytes ? c->part_nbytes : from + nbytes;
    c->begun = to;
    if (to == c->part_nbytes) take_out(&uncopied, c);
    c->hands++;
    hands++;
    j->touched++;
    leave();
    bool fresh = false, whole = copy_range(c, from, to, &fresh);
    come_back();
    j->touched--;
    hands--;
    j->fresh |= fresh;
    figures.copied_nbytes += to - from;
    if (!whole) fail(j, SIGBUS, c->lane->direction == XE_H2D ? "reading the source" : "writing the destination");
    // The last one goes on, and the rest of one that failed is not begun.
    if (--c->hands || c->begun < c->part_nbytes) return;
    copied(c);
    let_go_of_file(j);
}

// Where a thread is, all without `mu`. Other functions are those of another device's library, and what was exchanged by them is set
// right first.

static void go_back(void) {
    if (here.guest && here.enter) here.enter(here.context_before);
    if (here.guest && here.capture_mode) here.capture_mode(&here.mode_before);
    here.inside = false;
    here.enter = NULL;
    here.capture_mode = NULL;
}

static int relax(const xe_calls *calls) {
    if (!calls->capture_mode || here.capture_mode == calls->capture_mode) return 0;
    here.mode_before = calls->relaxed;
    int status = calls->capture_mode(&here.mode_before);
    if (status == 0) here.capture_mode = calls->capture_mode;
    return status;
}

static int enter(const xe_calls *calls) {
    if (here.enter && here.enter != calls->enter) go_back();
    int status = relax(calls);
    if (status == 0 && here.inside && here.context == calls->context) return 0;
    if (status == 0 && here.guest && !here.enter) status = calls->current(&here.context_before);
    if (status != 0) return status;
    here.enter = calls->enter;
    here.context = calls->context;
    status = calls->enter(calls->context);
    here.inside = status == 0;
    return status;
}

typedef struct {
    int32_t status;
    const char *at;
    bool enqueued, recorded;
} outcome;

#define ATTEMPT(what, call)                       \
    do {                                          \
        int32_t status = (call);                  \
        if (status != 0 && o.at == NULL) {        \
            o.status = status;                    \
            o.at = what;                          \
        }                                         \
    } while (0)

// Without `mu`.
static outcome issue(chunk *c, bool first) {
    const lane *l = c->lane;
    const xe_calls *calls = l->calls;
    const job *j = c->job;
    outcome o = {0};
    ATTEMPT("entering the context", enter(calls));
    if (!o.at && first && j->after) ATTEMPT("waiting for what comes before", calls->wait(l->stream, j->after, 0));
    if (o.at) return o;
    // A copy that failed may have begun.
    o.enqueued = true;
    if (l->direction == XE_H2D) {
        uint64_t device = j->pieces[c->piece].device + c->offset;
        ATTEMPT("copying to the device", calls->copy_h2d(device, c->memory, c->part_nbytes, l->stream));
    } else {
        walk w = walk_of(c);
        segment s;
        while (!o.at && next_segment(j, &w, c->part_nbytes, &s))
            ATTEMPT("copying to the host", calls->copy_d2h(c->memory + s.at, s.device, s.nbytes, l->stream));
    }
    int32_t status = calls->record(c->event, l->stream);
    o.recorded = status == 0;
    if (status != 0 && !o.at) {
        o.status = status;
        o.at = "recording an event";
    }
    return o;
}

static bool is_last(job *j) { return ++j->issued == j->started && all_started(j) && !has_failed(j); }

static void issued(chunk *c, outcome o) {
    job *j = c->job;
    j->calling--;
    if (o.at) fail(j, o.status, o.at);
    if (o.recorded) {
        c->state = COPYING;
        push(&c->lane->copying, c);
        if (c->lane->calls) {
            copying++;
            quiet = 0;
            if (dozing) pthread_cond_signal(&doze);
        }
        look_at(j);
    } else if (o.enqueued) {
        lose(c);
    } else {
        give_back(c);
    }
}

// With the lane's turn. What is more than `most` is left to whoever looks next.
static void issue_ready(lane *l, size_t most) {
    l->issuing = true;
    chunk *c;
    while (!stopping && most-- && (c = pop(&l->ready))) {
        job *j = c->job;
        c->state = ISSUING;
        j->calling++;
        bool first = !j->ordered;
        j->ordered = true;
        leave();
        outcome o = issue(c, first);
        come_back();
        if (!o.at && is_last(j)) {
            // Before the chunk may come back: with it the job would be finished.
            int32_t status = 0;
            if (j->done) {
                leave();
                status = l->calls->record(j->done, l->stream);
                come_back();
            }
            if (status == 0) j->last_issued = true;
            else fail(j, status, "recording the job's event");
        }
        issued(c, o);
    }
    l->issuing = false;
    if (l->ready.first) wake(1);
}

static void reached(chunk *c) {
    if (c->lane->direction == XE_H2D || has_failed(c->job)) {
        give_back(c);
    } else {
        c->state = LANDING;
        have_copied(c);
    }
}

// Ask once whether the oldest copies of the lanes have been made, and return how many have. None but this thread takes them out.
static size_t ask(void) {
    chunk *oldest[MOST_LANES_ASKED];
    int32_t statuses[MOST_LANES_ASKED];
    bool asked_for[MOST_LANES_ASKED];
    size_t count = 0, busy = 0;
    for (lane *l = lanes; l; l = l->next) busy += l->calls && l->copying.first;
    // Where they are more, each round goes on behind those of the last one.
    size_t skipped = busy > MOST_LANES_ASKED ? rounds++ * MOST_LANES_ASKED % busy : 0;
    for (int again = 0; again < 2; again++) {
        size_t number = 0;
        for (lane *l = lanes; l && count < MOST_LANES_ASKED; l = l->next)
            if (l->calls && l->copying.first && (number++ < skipped) == again) oldest[count++] = l->copying.first;
    }
    size_t least = MOST_PAUSES << 20;
    for (size_t n = 0; n < count; n++)
        if (oldest[n]->part_nbytes < least) least = oldest[n]->part_nbytes;
    rest_between = PAUSE / 2 + (int64_t)(PAUSE * least >> 20);
    figures.polls++;
    leave();
    for (size_t n = 0; n < count; n++) {
        const xe_calls *calls = oldest[n]->lane->calls;
        statuses[n] = enter(calls);
        asked_for[n] = statuses[n] == 0;
        if (asked_for[n]) statuses[n] = calls->query(oldest[n]->event);
    }
    come_back();
    size_t found = 0;
    for (size_t n = 0; n < count; n++) {
        chunk *c = oldest[n];
        if (asked_for[n] && statuses[n] == c->lane->calls->not_ready) continue;
        pop(&c->lane->copying);
        copying--;
        found++;
        if (statuses[n] == 0) {
            reached(c);
        } else {
            fail(c->job, statuses[n], asked_for[n] ? "copying" : "entering the context");
            lose(c);
        }
    }
    return found;
}

static void begin_part(chunk *c) {
    if (c->lane->direction == XE_H2D) {
        c->state = FILLING;
        c->job->filling++;
        have_copied(c);
        copy_slice(c);
        return;
    }
    c->state = READY;
    push(&c->lane->ready, c);
    if (!c->lane->calls) pthread_cond_signal(&asked);
}

// Do something that can be done now. False: there is nothing but to ask.
static bool step(void) {
    for (lane *l = lanes; l; l = l->next) {
        if (!l->calls || l->issuing || !l->ready.first) continue;
        issue_ready(l, SIZE_MAX);
        return true;
    }
    if (uncopied.first) {
        copy_slice(uncopied.first);
        return true;
    }
    for (lane *l = lanes; l; l = l->next) {
        chunk *c = start_part(l);
        if (!c) continue;
        rotate(l);
        begin_part(c);
        return true;
    }
    return false;
}

// What a thread may do that waits where there is none of the engine's. False: nothing has come.
static bool ask_meanwhile(void) {
    if (polling || copying == 0) return false;
    polling = true;
    size_t found = ask();
    polling = false;
    return found > 0;
}

// What a thread may do that waits for a job where the engine has threads: what brings this job further, and not for long. Each of
// them would have to be woken first. Of a large job it copies nothing where enough of them do: what passes through its cache takes the
// place of what its program needs next. On an H100 machine Python took 100 us longer from one batch of 16 MiB to the next.
static bool help(job *j) {
    lane *l = j->lane;
    if (l->calls && !l->issuing && l->ready.first) {
        issue_ready(l, MOST_ISSUED);
        return true;
    }
    bool copies = j->small || 2 * hands < (size_t)threads;
    chunk *c = uncopied.first;
    while (c && c->job != j) c = c->next;
    if (c && copies) {
        copy_slice(c);
        return true;
    }
    if (copies && (c = start_part(l))) {
        begin_part(c);
        return true;
    }
    if (polling || copying == 0) return false;
    polling = true;
    size_t found = ask(), mine = 0;
    polling = false;
    // None of this job's had landed before. What this thread does not copy is for others.
    for (c = uncopied.first; c && copies; c = c->next) mine += c->job == j;
    if (found > mine) wake(found - mine);
    return found > 0;
}

static int64_t since(const struct timespec *began) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (now.tv_sec - began->tv_sec) * 1000000 + (now.tv_nsec - began->tv_nsec) / 1000;
}

static void sleep_for(pthread_cond_t *condition, int64_t microseconds) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += microseconds / 1000000;
    until.tv_nsec += microseconds % 1000000 * 1000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    atomic_store_explicit(&taken, false, memory_order_relaxed);
    pthread_cond_timedwait(condition, &mu, &until);
}

static bool is_called(unsigned unused) {
    (void)unused;
    size_t left = atomic_load_explicit(&called, memory_order_relaxed);
    while (left && !atomic_compare_exchange_weak_explicit(&called, &left, left - 1, memory_order_relaxed, memory_order_relaxed)) {}
    return left > 0;
}

static bool is_work(unsigned seen) { return atomic_load_explicit(&work_told, memory_order_relaxed) != seen; }

static bool is_news(unsigned seen) { return atomic_load_explicit(&news_told, memory_order_relaxed) != seen; }

// Look out for a moment whether there is more: waking up takes longer than the next part needs to come. Not where the cores are
// wanted. Lets go of `mu` meanwhile.
static bool stays_awake(bool (*more)(unsigned), unsigned seen, int64_t microseconds) {
    if (!spares_cores) return false;
    unlock();
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    bool come = false;
    do
        for (int n = 0; n < BREATHS && !come; come = more(seen), n++) take_breath();
    while (!come && since(&began) < microseconds);
    lock();
    // Asked again: what has come since the last look has woken nobody, and nobody will be woken for it.
    return come || stopping || more(seen);
}

// There is nothing to do now: ask, or sleep until there is.
static void rest(void) {
    if (polling || copying == 0) {
        if (stays_awake(is_called, 0, AWAKE)) return;
        idle_threads++;
        figures.sleeps++;
        atomic_store_explicit(&taken, false, memory_order_relaxed);
        pthread_cond_wait(&work, &mu);
        idle_threads--;
        return;
    }
    polling = true;
    size_t found = ask();
    if (found) {
        quiet = 0;
    } else if (++quiet > ROUNDS_AWAKE) {
        unsigned longer = FIRST_SLEEP + (quiet - ROUNDS_AWAKE);
        figures.sleeps++;
        dozing = true;
        sleep_for(&doze, longer < LONGEST_DOZE ? longer : LONGEST_DOZE);
        dozing = false;
    } else if (copying > 1) {
        // Each question takes a lock of the driver's, which whoever launches work wants, too. Meanwhile the device goes on with the
        // next one. Whatever is new ends the pause, since others may have come for it and be in calls.
        stays_awake(is_work, atomic_load_explicit(&work_told, memory_order_relaxed), rest_between);
    }
    polling = false;
    // One of them is this thread's.
    if (found > 1) wake(found - 1);
}

static void *run(void *unused) {
    (void)unused;
    // For whoever lists the threads of the process.
    pthread_setname_np(pthread_self(), "xferlib-engine");
    lock();
    while (!stopping)
        if (!step()) rest();
    unlock();
    return NULL;
}

static void set_up(void) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&work, &monotonic);
    pthread_cond_init(&doze, &monotonic);
    pthread_cond_init(&news, &monotonic);
    pthread_cond_init(&asked, &monotonic);
    pthread_condattr_destroy(&monotonic);
    survive_bus_errors();
}

// The calls.

int xe_version(void) { return XE_VERSION; }

#ifndef XE_SOURCE_HASH
#define XE_SOURCE_HASH ""
#endif

const char *xe_source_hash(void) { return XE_SOURCE_HASH; }

// `started`: how many there are of those that are wanted. `where`: NULL for the CPUs of the caller.
static int start(int wanted, int *started, const pthread_attr_t *where) {
    pthread_once(&once, set_up);
    lock();
    while (!stopping && *started < wanted && threads < MOST_THREADS) {
        sigset_t all, old;
        pthread_t thread;
        // What comes on purpose is for the threads of the program; what a thread does wrong is its own.
        sigfillset(&all);
        sigdelset(&all, SIGBUS);
        sigdelset(&all, SIGSEGV);
        sigdelset(&all, SIGFPE);
        sigdelset(&all, SIGILL);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        int refused = pthread_create(&thread, where, run, NULL);
        // The CPUs were taken from the process meanwhile, or the system lets nobody choose.
        if (refused && where) refused = pthread_create(&thread, NULL, run, NULL);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        if (refused) break;
        pthread_detach(thread);
        threads++;
        if (started != &threads) ++*started;
    }
    spares_cores = 5 * sysconf(_SC_NPROCESSORS_ONLN) >= 8 * threads;
    int there = stopping ? XE_STOPPED : threads;
    unlock();
    return there;
}

int xe_start(int wanted) { return start(wanted, &threads, NULL); }

int xe_start_near(int wanted, int node, const void *cpus, size_t nbytes) {
    if (node < 0 || node >= MOST_NODES) return XE_WRONG;
    pthread_attr_t where;
    pthread_attr_init(&where);
    int there = XE_NO_MEMORY;
    if (pthread_attr_setaffinity_np(&where, nbytes, cpus) == 0) there = start(wanted, &near[node], &where);
    pthread_attr_destroy(&where);
    return there;
}

int xe_open_lane(uint32_t number, int direction, const xe_calls *calls, void *stream) {
    if (direction != XE_H2D && direction != XE_D2H) return XE_WRONG;
    if (calls && (calls->version != XE_VERSION || calls->nbytes != sizeof *calls || !calls->not_ready)) return XE_WRONG;
    pthread_once(&once, set_up);
    lane *l = calloc(1, sizeof *l);
    if (!l) return XE_NO_MEMORY;
    *l = (lane){.number = number, .direction = direction, .calls = calls, .stream = stream};
    lock();
    int status = stopping ? XE_STOPPED : XE_OK;
    if (!stopping && !find_lane(number)) {
        l->next = lanes;
        lanes = l;
        l = NULL;
    }
    unlock();
    free(l);
    return status;
}

int xe_close_lane(uint32_t number) {
    lock();
    lane *l = find_lane(number);
    int status = l == NULL ? XE_UNKNOWN : l->open || l->issuing ? XE_BUSY : XE_OK;
    if (status == XE_OK) {
        lane **place = &lanes;
        while (*place != l) place = &(*place)->next;
        *place = l->next;
    }
    unlock();
    if (status != XE_OK) return status;
    while (l->all) {
        chunk *c = l->all;
        l->all = c->other;
        free(c);
    }
    free(l);
    return XE_OK;
}

int xe_add_chunk(uint32_t number, uint64_t which, void *memory, size_t nbytes, uint64_t block, void *event) {
    if (!memory || nbytes < ALIGNMENT) return XE_WRONG;
    chunk *c = calloc(1, sizeof *c);
    if (!c) return XE_NO_MEMORY;
    *c = (chunk){.number = which, .block = block, .memory = memory, .nbytes = nbytes, .event = event};
    lock();
    lane *l = find_lane(number);
    const chunk *there = l ? find_chunk(l, which) : NULL;
    int status = !l ? XE_UNKNOWN : stopping ? XE_STOPPED : there && there->state == LOST ? XE_BUSY : XE_OK;
    if (status == XE_OK && !there) {
        c->lane = l;
        for (chunk *each = l->all; each; each = each->other) {
            if (each->block != block) continue;
            if (each->memory + each->nbytes == c->memory) (c->before = each)->behind = c;
            if (c->memory + nbytes == each->memory) (c->behind = each)->before = c;
        }
        c->other = l->all;
        l->all = c;
        put_aside(c);
        measure(l);
        c = NULL;
        wake(wants_chunks(l));
    }
    unlock();
    free(c);
    return status;
}

int xe_take_chunk(uint32_t number, uint64_t which) {
    lock();
    lane *l = find_lane(number);
    chunk *c = l ? find_chunk(l, which) : NULL;
    // One that is wanted stays, be it that nobody has got to it yet.
    bool idle = c && c->state == FREE && !wants_chunks(l), lost = c && c->state == LOST;
    if (idle) {
        chunk **place = &l->idle;
        while (*place != c) place = &(*place)->next;
        *place = c->next;
    }
    if (idle || lost) {
        chunk **place = &l->all;
        while (*place != c) place = &(*place)->other;
        *place = c->other;
        if (c->before) c->before->behind = NULL;
        if (c->behind) c->behind->before = NULL;
        free(c);
        measure(l);
    }
    unlock();
    return !c ? XE_UNKNOWN : idle ? XE_OK : lost ? XE_BUSY : XE_NOT_YET;
}

static size_t least_chunk(const lane *l) {
    size_t least = SMALL_JOB;
    for (const chunk *c = l->all; c; c = c->other)
        if (c->nbytes < least) least = c->nbytes;
    return least;
}

static void shape(job *j) {
    walk w = {0};
    segment s;
    while (next_segment(j, &w, least_chunk(j->lane), &s)) {}
    j->small = w.piece == j->count;
}

static void free_job(job *j) {
    if (j->file.descriptor >= 0) close(j->file.descriptor);
    free(j->pieces);
    free(j);
}

int xe_submit(
    uint64_t id, uint32_t number, const xe_piece *pieces, size_t count, const xe_file *file, void *after, void *done
) {
    if (count == 0 || count > SIZE_MAX / sizeof *pieces) return XE_WRONG;
    size_t nbytes = 0;
    for (size_t n = 0; n < count; n++) {
        if (pieces[n].nbytes == 0 || !pieces[n].host) return XE_WRONG;
        nbytes += pieces[n].nbytes;
    }
    job *j = calloc(1, sizeof *j);
    xe_piece *kept = malloc(count * sizeof *kept);
    if (!j || !kept) {
        free(j);
        free(kept);
        return XE_NO_MEMORY;
    }
    memcpy(kept, pieces, count * sizeof *kept);
    *j = (job){.id = id, .pieces = kept, .count = count, .left = nbytes, .after = after, .done = done, .queued = true};
    // Mostly the first tells for all: then no two threads begin with the same huge page.
    bool fresh = pieces->nbytes >= HUGE_PAGE && !is_there((char *)pieces->host + HUGE_PAGE / 2);
    j->file = file ? *file : (xe_file){.descriptor = -1};
    // Where the process may have no more of them, the mapping is read.
    if (file) j->file.descriptor = fcntl(file->descriptor, F_DUPFD_CLOEXEC, 0);
    lock();
    lane *l = find_lane(number);
    job **place = place_of(id);
    int status = !l ? XE_UNKNOWN : stopping ? XE_STOPPED : !l->calls && (after || done) ? XE_WRONG : XE_OK;
    if (status == XE_OK && !*place) {
        j->lane = l;
        shape(j);
        j->fresh = fresh && l->direction == XE_D2H;
        // Where a lane has no calls, the CPU reads what was filled.
        j->soon = l->calls && l->direction == XE_H2D && nbytes <= SOON;
        *place = j;
        l->open++;
        enqueue(j->small ? &l->small : &l->large, j);
        figures.jobs++;
        quiet = 0;
        // As many as there are slices of the first parts; the first of them may ask in the end.
        wake(1 + nbytes / LEAST_SLICE);
        fail_without_chunks(l);
        j = NULL;
    }
    unlock();
    if (j) free_job(j);
    return status;
}

int xe_drop(uint64_t id) {
    lock();
    job *j = *place_of(id);
    int status = !j ? XE_UNKNOWN : j->started || j->finished ? XE_NOT_YET : XE_OK;
    if (status == XE_OK) fail(j, ECANCELED, "dropped before it had begun");
    unlock();
    return status;
}

int xe_abandon(uint64_t id) {
    lock();
    job *j = *place_of(id);
    if (j && !j->finished) fail(j, ECANCELED, "abandoned");
    unlock();
    return j ? XE_OK : XE_UNKNOWN;
}

int xe_wait(uint64_t id, int stage, int64_t microseconds) {
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    struct timespec busy = began;
    here.guest = true;
    bool worked = false, has_asked = false;
    int status, questions = 1;
    lock();
    for (;;) {
        job *j = *place_of(id);
        if (!j) {
            status = XE_UNKNOWN;
            break;
        }
        if (has_come(j, stage)) {
            status = has_failed(j) ? XE_FAILED : XE_OK;
            break;
        }
        if (stopping) {
            status = XE_STOPPED;
            break;
        }
        int64_t left = microseconds - since(&began);
        if (threads == 0) {
            // There is no thread but those that wait: each of them works, and sleeps where there is nothing to be done. When its
            // time is over it asks once more and no further, so that what others have to be done does not keep it.
            bool done = step();
            if (!done && (left > 0 || questions-- > 0)) done = ask_meanwhile();
            worked = worked || done;
            if (done) continue;
        }
        if (left <= 0) {
            status = XE_NOT_YET;
            break;
        }
        has_asked = has_asked || (copying && !polling);
        if (threads && help(j)) {
            worked = true;
            clock_gettime(CLOCK_MONOTONIC, &busy);
            continue;
        }
        if (threads && spares_cores && since(&busy) < AWAKE) {
            stays_awake(is_news, atomic_load_explicit(&news_told, memory_order_relaxed), GLANCE);
            continue;
        }
        // What this thread has begun is for others now. Where all of them are in calls, this one asks.
        if (worked) wake(1);
        worked = false;
        bool unasked = copying && !polling, relied = 2 * hands >= (size_t)threads;
        // Threads that copy may all be in calls next, and nobody tells those who relied on them.
        int64_t longest = threads ? unasked || relied ? LONGEST_SLEEP : left : unasked ? FIRST_SLEEP : LONGEST_SLEEP;
        sleep_for(&news, left < longest ? left : longest);
    }
    if (here.enter || here.capture_mode) {
        touching++;
        unlock();
        go_back();
        come_back();
    }
    // As above; threads that were started meanwhile may sleep already. Those that saw this one ask do, and do not ask.
    if (worked || (has_asked && copying && !polling)) wake(1);
    unlock();
    return status;
}

int xe_error(uint64_t id, int32_t *status, const char **at, int *lost) {
    lock();
    job *j = *place_of(id);
    int known = !j ? XE_UNKNOWN : has_failed(j) ? XE_OK : XE_NOT_YET;
    if (known == XE_OK) {
        *status = j->status;
        *at = j->at;
        *lost = j->lost;
    }
    unlock();
    return known;
}

size_t xe_finished(uint64_t *ids, size_t count) {
    size_t found = 0;
    lock();
    while (found < count && finished_first) {
        job *j = finished_first;
        finished_first = j->finished_next;
        if (!finished_first) finished_last = NULL;
        j->listed = false;
        ids[found++] = j->id;
    }
    unlock();
    return found;
}

int xe_forget(uint64_t id) {
    lock();
    job **place = place_of(id), *j = *place;
    int status = !j ? XE_UNKNOWN : !j->finished || j->listed ? XE_BUSY : XE_OK;
    if (status == XE_OK) *place = j->other;
    unlock();
    if (status != XE_OK) return status;
    free_job(j);
    return XE_OK;
}

// Lanes without calls. Their owner is one thread, and so has every turn.

static size_t ask_for(chunk *c, xe_request *requests) {
    job *j = c->job;
    lane *l = c->lane;
    c->state = ISSUING;
    j->calling++;
    bool first = !j->ordered;
    j->ordered = true;
    c->last = is_last(j);
    size_t count = 0;
    walk w = walk_of(c);
    segment s;
    while (next_segment(j, &w, c->part_nbytes, &s)) {
        if (count && l->direction == XE_H2D) {
            // One copy carries them all.
            requests[0].nbytes = s.at + s.nbytes;
            continue;
        }
        requests[count] = (xe_request){j->id, c->number, s.device, c->memory + s.at, s.nbytes, l->number, first && !count, 0, 0, 0};
        count++;
    }
    requests[count - 1].record = 1;
    requests[count - 1].last = c->last;
    return count;
}

static size_t next_requests(xe_request *requests, size_t count) {
    size_t found = 0;
    for (lane *l = lanes; l; l = l->next) {
        if (l->calls) continue;
        while (l->ready.first && count - found >= XE_MOST_PIECES) {
            found += ask_for(pop(&l->ready), requests + found);
        }
    }
    return found;
}

size_t xe_requests(xe_request *requests, size_t count, int64_t microseconds) {
    pthread_once(&once, set_up);
    lock();
    size_t found = stopping ? 0 : next_requests(requests, count);
    if (!found && !stopping && microseconds > 0) {
        sleep_for(&asked, microseconds);
        if (!stopping) found = next_requests(requests, count);
    }
    unlock();
    return found;
}

static int with_chunk(uint32_t number, uint64_t which, state wanted, chunk **found) {
    lane *l = find_lane(number);
    chunk *c = l ? find_chunk(l, which) : NULL;
    *found = c;
    return !c ? XE_UNKNOWN : l->calls || c->state != wanted ? XE_WRONG : XE_OK;
}

int xe_answer(uint32_t number, uint64_t which, int32_t status, int recorded) {
    chunk *c;
    lock();
    int known = with_chunk(number, which, ISSUING, &c);
    if (known == XE_OK) {
        job *j = c->job;
        if (c->last && status == 0 && recorded && !has_failed(j)) j->last_issued = true;
        issued(c, (outcome){status, status ? "the backend's calls" : recorded ? NULL : "recording an event", true, recorded != 0});
    }
    unlock();
    return known;
}

int xe_reached(uint32_t number, uint64_t which, int32_t status) {
    chunk *c;
    lock();
    int known = with_chunk(number, which, COPYING, &c);
    if (known == XE_OK) {
        take_out(&c->lane->copying, c);
        if (status != 0) fail(c->job, status, "copying");
        reached(c);
        wake(1);
    }
    unlock();
    return known;
}

int xe_stop(int64_t microseconds) {
    pthread_once(&once, set_up);
    lock();
    stopping = true;
    pthread_cond_broadcast(&work);
    pthread_cond_broadcast(&doze);
    pthread_cond_broadcast(&asked);
    pthread_cond_broadcast(&news);
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (int64_t left; touching && (left = microseconds - since(&began)) > 0;) sleep_for(&news, left);
    int status = touching ? XE_NOT_YET : XE_OK;
    unlock();
    return status;
}

void xe_read_figures(xe_figures *found) {
    lock();
    *found = figures;
    found->threads = (uint64_t)threads;
    unlock();
}

int xe_copy(void *dst, const void *src, size_t nbytes, int aside) {
    pthread_once(&once, set_up);
    bool unused;
    range all = {dst, nbytes};
    return copy_guarded(dst, src, nbytes, aside != 0, aside ? &all : NULL, &unused) ? XE_OK : XE_WRONG;
}

int xe_copies_d2h(const xe_calls *calls, void *stream, void *host, const uint64_t *device, const uint64_t *nbytes, size_t count) {
    here.guest = true;
    int status = enter(calls);
    char *to = host;
    for (size_t n = 0; n < count && status == 0; to += nbytes[n++])
        if (nbytes[n]) status = calls->copy_d2h(to, device[n], nbytes[n], stream);
    go_back();
    return status;
}

int xe_gather(void *dst, const void *src, int axes, const int64_t *shape, const int64_t *strides, size_t itemsize) {
    if (axes < 0 || axes > MOST_AXES) return XE_WRONG;
    pthread_once(&once, set_up);
    return gather_guarded(dst, src, axes, shape, strides, itemsize) ? XE_OK : XE_WRONG;
}

int xe_touch(void *memory, size_t nbytes) { return touch_pages(memory, nbytes); }

int xe_read_ahead(int descriptor, int64_t start, size_t nbytes) { return read_ahead(descriptor, start, nbytes); }
