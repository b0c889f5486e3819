// The threads, lanes, jobs and chunks; see engine.h.
//
// One lock, `mu`, guards everything here. It is held for some dozen instructions: never while bytes are copied, a device is called,
// or anything is waited for.
//
// A chunk's states, and who takes it from one to the next:
//
//   FREE ----> FILLING ----> READY ----> ISSUING ----> COPYING ----> FREE                       to the device
//   FREE ------------------> READY ----> ISSUING ----> COPYING ----> LANDED ----> LANDING ----> FREE     to the host
//    start_part     fill_part     issue_ready,     issued     reached       step      land_part
//                                 xe_requests
//
//   ISSUING --> FREE   nothing of it was enqueued (issued)
//   ISSUING, COPYING --> LOST   nobody can know when the device is done with it, and nobody gets it any more (issued, ask)
//   READY, LANDED --> FREE   the job fails (fail), so that no chunk of a failed job is in these lists
//   FILLING, COPYING --> FREE   it has failed meanwhile
//
// The turn: of a lane's READY chunks one thread at a time issues (`issuing`), in their order, and whoever adds one meanwhile leaves
// it to that thread. So what the stream is to wait for comes directly before a job's first copy, and its event directly behind
// the last. A turn is no lock: nobody waits for it.
//
// No thread waits for an event. One at a time asks the oldest of each lane (`polling`), and sleeps longer and longer meanwhile.
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
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
    LEAST_PART = 128 << 10,      // Bytes. Less would be more calls than copying.
    MOST_THREADS = 64,
    MOST_NODES = 1024,           // The kernel's.
    MOST_LANES_ASKED = 32,       // How many events are asked for in one round.
    ROUNDS_AWAKE = 100,          // Rounds of asking without a sleep: a chunk takes tens of microseconds.
    FIRST_SLEEP = 20, LONGEST_SLEEP = 200,   // Microseconds.
    LONGEST_DOZE = 2000,         // Likewise, of who asks: a microsecond longer each time, so late by a hundredth of the time waited.
    BUCKETS = 1024,
    MOST_ISSUED = 8,             // Chunks that a thread which waits issues before it looks whether it waits any more.
    AWAKE = 400,                 // Microseconds: longer than most programs need from one batch to the next.
    GLANCE = 5,                  // Microseconds between two questions of a thread that waits.
    PAUSE = 10,                  // Microseconds between two questions of who asks: half of what a chunk of a mebibyte takes.
    BREATHS = 32,                // Between two looks at the clock: about a microsecond.
};

typedef enum { FREE, FILLING, READY, ISSUING, COPYING, LANDED, LANDING, LOST } state;

typedef struct job job;
typedef struct lane lane;

typedef struct chunk {
    struct chunk *next;          // In the list that its state stands for.
    struct chunk *other;         // Of the same lane, in any state.
    lane *lane;
    job *job;
    uint64_t number;
    char *memory;
    size_t nbytes;
    void *event;
    state state;
    size_t piece, offset;        // Where its part of the job begins.
    size_t part_nbytes;          // How much of its memory is used.
    bool last;                   // Of a lane without calls: its owner was asked for the job's event, too.
} chunk;

typedef struct { chunk *first, *last; } chunks;

struct job {
    job *next;                   // In its lane's queue.
    job *other;                  // In its bucket.
    job *finished_next;
    lane *lane;
    uint64_t row;
    xe_piece *pieces;
    size_t count;
    size_t piece, offset;        // Where the next part begins.
    size_t part_nbytes;
    void *after, *done;
    size_t started, issued, out; // Parts that were given a chunk; whose copies are in the stream; whose chunk is not back.
    size_t touched;              // Of those, how many are copied from or to the caller's memory now.
    size_t calling;              // Of those, for how many a device is called now, or its owner is.
    int come;                    // How many stages it has reached, as those who wait were told.
    bool small;                  // It has one part.
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
    chunk *all, *idle;           // Idle ones: the last one first, which is warm.
    chunks ready, copying;
    jobs small, large;
    size_t open;                 // Jobs that have not finished.
    bool issuing, large_next;
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work, doze, news, asked;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static lane *lanes;              // The one to be looked at first stands first.
static job *buckets[BUCKETS];
static job *finished_first, *finished_last;
static chunks landed;
static int threads, idle_threads;
static int near[MOST_NODES];     // Of the threads, those that were started for each node.
static size_t touching, copying;       // Threads that copy or call a device; chunks whose events are the engine's to ask for.
static unsigned quiet;           // Rounds of asking in a row that found nothing.
static size_t rounds;            // Of asking some of the lanes.
static bool polling, dozing, stopping;      // A thread asks; it sleeps between two rounds.
static xe_figures figures;
static _Atomic unsigned work_told;     // How often there was something new to do.
static _Atomic unsigned news_told;     // How often a job has come further.
static bool spares_cores;        // There are twice as many as threads.
// Where this thread is, for the device.
static _Thread_local struct {
    bool guest;                  // It is not the engine's, and goes back to where it was.
    bool inside;                 // Of `context`, which was entered last.
    void *context, *context_before;
    int (*enter)(void *context);       // By which it came from where it was; NULL: it is there.
    int mode_before;
    int (*capture_mode)(int *mode);    // By which it was relaxed; NULL: it was not.
} here;

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

static job **place_of(uint64_t row) {
    job **place = &buckets[(row * 0x9E3779B97F4A7C15u >> 32) % BUCKETS];
    while (*place && (*place)->row != row) place = &(*place)->other;
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

static void wake(size_t many) {
    if (many) atomic_fetch_add_explicit(&work_told, 1, memory_order_relaxed);
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
        if (j->lane->direction == XE_H2D) return j->touched == 0 && all_started(j);
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

static void give_back(chunk *c) {
    job *j = c->job;
    c->job = NULL;
    c->state = FREE;
    c->next = c->lane->idle;
    c->lane->idle = c;
    j->out--;
    look_at(j);
}

// Give back a job's chunks out of a list, and return how many those are.
static size_t clear(chunks *list, const job *j) {
    size_t count = 0;
    chunks rest = {0};
    for (chunk *c; (c = pop(list));) {
        if (c->job != j) {
            push(&rest, c);
        } else {
            give_back(c);
            count++;
        }
    }
    *list = rest;
    return count;
}

static void fail(job *j, int32_t status, const char *at) {
    if (has_failed(j)) return;
    j->status = status;
    j->at = at;
    unqueue(j);
    // Others may wait for its chunks.
    wake(clear(&j->lane->ready, j) + clear(&landed, j));
    look_at(j);
}

// While every chunk of a lane is lost, nothing on it can begin or go on: whoever waits for one is told.
static void fail_without_chunks(lane *l) {
    if (!l->all) return;
    for (const chunk *c = l->all; c; c = c->other)
        if (c->state != LOST) return;
    while (wants_chunks(l)) fail(l->small.first ? l->small.first : l->large.first, ENOBUFS, "every chunk of the lane is lost");
}

static void lose(chunk *c) {
    job *j = c->job;
    c->job = NULL;
    c->state = LOST;
    j->lost = true;
    j->out--;
    look_at(j);
    fail_without_chunks(c->lane);
}

// Starting parts.

static job *pick(lane *l) {
    // A small job need not wait for a large one, nor the large one for ever for small ones.
    job *j = l->small.first && !(l->large.first && l->large_next) ? l->small.first : l->large.first;
    l->large_next = j && j->small;
    return j;
}

static chunk *start_part(lane *l) {
    if (!l->idle || !wants_chunks(l)) return NULL;
    job *j = pick(l);
    chunk *c = l->idle;
    l->idle = c->next;
    c->job = j;
    c->piece = j->piece;
    c->offset = j->offset;
    walk w = walk_of(c);
    segment s;
    size_t capacity = c->nbytes < j->part_nbytes ? c->nbytes : j->part_nbytes;
    while (next_segment(j, &w, capacity, &s)) {}
    c->part_nbytes = w.end;
    j->piece = w.piece;
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
    pthread_mutex_unlock(&mu);
}

static void come_back(void) {
    pthread_mutex_lock(&mu);
    if (--touching == 0 && stopping) pthread_cond_broadcast(&news);
}

static bool copy_part(chunk *c) {
    job *j = c->job;
    bool to_device = c->lane->direction == XE_H2D, whole = true;
    j->touched++;
    leave();
    walk w = walk_of(c);
    segment s;
    while (whole && next_segment(j, &w, c->part_nbytes, &s)) {
        // What is read by a copy engine next stays in a cache; the caller's memory is read by nobody knows whom.
        whole = to_device ? copy_guarded(c->memory + s.at, s.host, s.nbytes, false)
                          : copy_guarded(s.host, c->memory + s.at, s.nbytes, true);
    }
    come_back();
    j->touched--;
    figures.copied_nbytes += c->part_nbytes;
    return whole;
}

static void fill_part(chunk *c) {
    job *j = c->job;
    c->state = FILLING;
    if (!copy_part(c)) fail(j, SIGBUS, "reading the source");
    if (has_failed(j)) {
        give_back(c);
        return;
    }
    c->state = READY;
    push(&c->lane->ready, c);
    look_at(j);
    if (!c->lane->calls) pthread_cond_signal(&asked);
}

static void land_part(chunk *c) {
    c->state = LANDING;
    if (!copy_part(c)) fail(c->job, SIGBUS, "writing the destination");
    give_back(c);
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
        c->state = LANDED;
        push(&landed, c);
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
        fill_part(c);
        return;
    }
    c->state = READY;
    push(&c->lane->ready, c);
    if (!c->lane->calls) pthread_cond_signal(&asked);
}

// Do something that can be done now. False: there is nothing but to ask.
static bool step(void) {
    chunk *c = pop(&landed);
    if (c) {
        land_part(c);
        return true;
    }
    for (lane *l = lanes; l; l = l->next) {
        if (!l->calls || l->issuing || !l->ready.first) continue;
        issue_ready(l, SIZE_MAX);
        return true;
    }
    for (lane *l = lanes; l; l = l->next) {
        if (!(c = start_part(l))) continue;
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
// them would have to be woken first.
static bool help(job *j) {
    lane *l = j->lane;
    chunk *c = landed.first;
    while (c && c->job != j) c = c->next;
    if (c) {
        take_out(&landed, c);
        land_part(c);
        return true;
    }
    if (l->calls && !l->issuing && l->ready.first) {
        issue_ready(l, MOST_ISSUED);
        return true;
    }
    if ((c = start_part(l))) {
        begin_part(c);
        return true;
    }
    if (polling || copying == 0) return false;
    polling = true;
    size_t found = ask(), mine = 0;
    polling = false;
    // None of this job's had landed before. The rest is for others.
    for (c = landed.first; c; c = c->next) mine += c->job == j;
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
    pthread_cond_timedwait(condition, &mu, &until);
}

static void take_breath(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Look out for a moment whether there is more: waking up takes longer than the next part needs to come. Not where the cores are
// wanted. `told` counts what is looked out for. Lets go of `mu` meanwhile.
static bool stays_awake(_Atomic unsigned *told, int64_t microseconds) {
    if (!spares_cores) return false;
    unsigned seen = atomic_load_explicit(told, memory_order_relaxed);
    pthread_mutex_unlock(&mu);
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    do
        for (int n = 0; n < BREATHS && atomic_load_explicit(told, memory_order_relaxed) == seen; n++) take_breath();
    while (atomic_load_explicit(told, memory_order_relaxed) == seen && since(&began) < microseconds);
    pthread_mutex_lock(&mu);
    // Asked again: what was told since the last look has woken nobody, and nobody will be woken for it.
    return stopping || atomic_load_explicit(told, memory_order_relaxed) != seen;
}

// There is nothing to do now: ask, or sleep until there is.
static void rest(void) {
    if (polling || copying == 0) {
        if (stays_awake(&work_told, AWAKE)) return;
        idle_threads++;
        figures.sleeps++;
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
        // next one.
        stays_awake(&work_told, PAUSE);
    }
    polling = false;
    // One of them is this thread's.
    if (found > 1) wake(found - 1);
}

static void *run(void *unused) {
    (void)unused;
    // For whoever lists the threads of the process.
    pthread_setname_np(pthread_self(), "xferlib-engine");
    pthread_mutex_lock(&mu);
    while (!stopping)
        if (!step()) rest();
    pthread_mutex_unlock(&mu);
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
    pthread_mutex_lock(&mu);
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
    spares_cores = sysconf(_SC_NPROCESSORS_ONLN) >= 2 * threads;
    int there = stopping ? XE_STOPPED : threads;
    pthread_mutex_unlock(&mu);
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
    pthread_mutex_lock(&mu);
    int status = stopping ? XE_STOPPED : XE_OK;
    if (!stopping && !find_lane(number)) {
        l->next = lanes;
        lanes = l;
        l = NULL;
    }
    pthread_mutex_unlock(&mu);
    free(l);
    return status;
}

int xe_close_lane(uint32_t number) {
    pthread_mutex_lock(&mu);
    lane *l = find_lane(number);
    int status = l == NULL ? XE_UNKNOWN : l->open || l->issuing ? XE_BUSY : XE_OK;
    if (status == XE_OK) {
        lane **place = &lanes;
        while (*place != l) place = &(*place)->next;
        *place = l->next;
    }
    pthread_mutex_unlock(&mu);
    if (status != XE_OK) return status;
    while (l->all) {
        chunk *c = l->all;
        l->all = c->other;
        free(c);
    }
    free(l);
    return XE_OK;
}

int xe_add_chunk(uint32_t number, uint64_t which, void *memory, size_t nbytes, void *event) {
    if (!memory || nbytes < ALIGNMENT) return XE_WRONG;
    chunk *c = calloc(1, sizeof *c);
    if (!c) return XE_NO_MEMORY;
    *c = (chunk){.number = which, .memory = memory, .nbytes = nbytes, .event = event};
    pthread_mutex_lock(&mu);
    lane *l = find_lane(number);
    const chunk *there = l ? find_chunk(l, which) : NULL;
    int status = !l ? XE_UNKNOWN : stopping ? XE_STOPPED : there && there->state == LOST ? XE_BUSY : XE_OK;
    if (status == XE_OK && !there) {
        c->lane = l;
        c->other = l->all;
        l->all = c;
        c->next = l->idle;
        l->idle = c;
        c = NULL;
        wake(wants_chunks(l));
    }
    pthread_mutex_unlock(&mu);
    free(c);
    return status;
}

int xe_take_chunk(uint32_t number, uint64_t which) {
    pthread_mutex_lock(&mu);
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
        free(c);
    }
    pthread_mutex_unlock(&mu);
    return !c ? XE_UNKNOWN : idle ? XE_OK : lost ? XE_BUSY : XE_NOT_YET;
}

static size_t least_chunk(const lane *l) {
    size_t least = SIZE_MAX;
    for (const chunk *c = l->all; c; c = c->other)
        if (c->nbytes < least) least = c->nbytes;
    return least;
}

static size_t part_of(size_t nbytes) {
    // All threads begin, and none of them ends with more than half of another one's part.
    size_t share = nbytes / (threads ? 2 * (size_t)threads : 1);
    // Rounded up, or one would be left over, and all would wait for it.
    return (share / LEAST_PART + 1) * LEAST_PART;
}

size_t xe_part_nbytes(size_t nbytes) {
    pthread_mutex_lock(&mu);
    size_t part = part_of(nbytes);
    pthread_mutex_unlock(&mu);
    return part;
}

static void shape(job *j, size_t nbytes) {
    j->part_nbytes = part_of(nbytes);
    size_t least = least_chunk(j->lane), capacity = least < j->part_nbytes ? least : j->part_nbytes;
    walk w = {0};
    segment s;
    while (next_segment(j, &w, capacity, &s)) {}
    j->small = w.piece == j->count;
}

int xe_submit(uint64_t row, uint32_t number, const xe_piece *pieces, size_t count, void *after, void *done) {
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
    *j = (job){.row = row, .pieces = kept, .count = count, .after = after, .done = done, .queued = true};
    pthread_mutex_lock(&mu);
    lane *l = find_lane(number);
    job **place = place_of(row);
    int status = !l ? XE_UNKNOWN : stopping ? XE_STOPPED : !l->calls && (after || done) ? XE_WRONG : XE_OK;
    if (status == XE_OK && !*place) {
        j->lane = l;
        shape(j, nbytes);
        *place = j;
        l->open++;
        enqueue(j->small ? &l->small : &l->large, j);
        figures.jobs++;
        quiet = 0;
        // As many as there are parts; the first of them may ask in the end.
        wake(1 + nbytes / j->part_nbytes);
        fail_without_chunks(l);
        j = NULL;
        kept = NULL;
    }
    pthread_mutex_unlock(&mu);
    free(j);
    free(kept);
    return status;
}

int xe_drop(uint64_t row) {
    pthread_mutex_lock(&mu);
    job *j = *place_of(row);
    int status = !j ? XE_UNKNOWN : j->started || j->finished ? XE_NOT_YET : XE_OK;
    if (status == XE_OK) fail(j, ECANCELED, "dropped before it had begun");
    pthread_mutex_unlock(&mu);
    return status;
}

int xe_abandon(uint64_t row) {
    pthread_mutex_lock(&mu);
    job *j = *place_of(row);
    if (j && !j->finished) fail(j, ECANCELED, "abandoned");
    pthread_mutex_unlock(&mu);
    return j ? XE_OK : XE_UNKNOWN;
}

int xe_wait(uint64_t row, int stage, int64_t microseconds) {
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    struct timespec busy = began;
    here.guest = true;
    bool worked = false;
    int status, questions = 1;
    pthread_mutex_lock(&mu);
    for (;;) {
        job *j = *place_of(row);
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
        if (threads && help(j)) {
            worked = true;
            clock_gettime(CLOCK_MONOTONIC, &busy);
            continue;
        }
        if (threads && spares_cores && since(&busy) < AWAKE) {
            stays_awake(&news_told, GLANCE);
            continue;
        }
        // What this thread has begun is for others now. Where all of them are in calls, this one asks.
        if (worked) wake(1);
        worked = false;
        bool unasked = copying && !polling;
        int64_t longest = threads ? unasked ? LONGEST_SLEEP : left : unasked ? FIRST_SLEEP : LONGEST_SLEEP;
        sleep_for(&news, left < longest ? left : longest);
    }
    if (here.enter || here.capture_mode) {
        touching++;
        pthread_mutex_unlock(&mu);
        go_back();
        come_back();
    }
    // As above; threads that were started meanwhile may sleep already.
    if (worked) wake(1);
    pthread_mutex_unlock(&mu);
    return status;
}

int xe_error(uint64_t row, int32_t *status, const char **at, int *lost) {
    pthread_mutex_lock(&mu);
    job *j = *place_of(row);
    int known = !j ? XE_UNKNOWN : has_failed(j) ? XE_OK : XE_NOT_YET;
    if (known == XE_OK) {
        *status = j->status;
        *at = j->at;
        *lost = j->lost;
    }
    pthread_mutex_unlock(&mu);
    return known;
}

size_t xe_finished(uint64_t *rows, size_t count) {
    size_t found = 0;
    pthread_mutex_lock(&mu);
    while (found < count && finished_first) {
        job *j = finished_first;
        finished_first = j->finished_next;
        if (!finished_first) finished_last = NULL;
        j->listed = false;
        rows[found++] = j->row;
    }
    pthread_mutex_unlock(&mu);
    return found;
}

int xe_forget(uint64_t row) {
    pthread_mutex_lock(&mu);
    job **place = place_of(row), *j = *place;
    int status = !j ? XE_UNKNOWN : !j->finished || j->listed ? XE_BUSY : XE_OK;
    if (status == XE_OK) *place = j->other;
    pthread_mutex_unlock(&mu);
    if (status != XE_OK) return status;
    free(j->pieces);
    free(j);
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
        requests[count] = (xe_request){j->row, c->number, s.device, c->memory + s.at, s.nbytes, l->number, first && !count, 0, 0, 0};
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
    pthread_mutex_lock(&mu);
    size_t found = stopping ? 0 : next_requests(requests, count);
    if (!found && !stopping && microseconds > 0) {
        sleep_for(&asked, microseconds);
        if (!stopping) found = next_requests(requests, count);
    }
    pthread_mutex_unlock(&mu);
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
    pthread_mutex_lock(&mu);
    int known = with_chunk(number, which, ISSUING, &c);
    if (known == XE_OK) {
        job *j = c->job;
        if (c->last && status == 0 && recorded && !has_failed(j)) j->last_issued = true;
        issued(c, (outcome){status, status ? "the backend's calls" : recorded ? NULL : "recording an event", true, recorded != 0});
    }
    pthread_mutex_unlock(&mu);
    return known;
}

int xe_reached(uint32_t number, uint64_t which, int32_t status) {
    chunk *c;
    pthread_mutex_lock(&mu);
    int known = with_chunk(number, which, COPYING, &c);
    if (known == XE_OK) {
        take_out(&c->lane->copying, c);
        if (status != 0) fail(c->job, status, "copying");
        reached(c);
        wake(1);
    }
    pthread_mutex_unlock(&mu);
    return known;
}

int xe_stop(int64_t microseconds) {
    pthread_once(&once, set_up);
    pthread_mutex_lock(&mu);
    stopping = true;
    pthread_cond_broadcast(&work);
    pthread_cond_broadcast(&doze);
    pthread_cond_broadcast(&asked);
    pthread_cond_broadcast(&news);
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (int64_t left; touching && (left = microseconds - since(&began)) > 0;) sleep_for(&news, left);
    int status = touching ? XE_NOT_YET : XE_OK;
    pthread_mutex_unlock(&mu);
    return status;
}

void xe_read_figures(xe_figures *found) {
    pthread_mutex_lock(&mu);
    *found = figures;
    found->threads = (uint64_t)threads;
    pthread_mutex_unlock(&mu);
}

int xe_copy(void *dst, const void *src, size_t nbytes, int aside) {
    pthread_once(&once, set_up);
    return copy_guarded(dst, src, nbytes, aside != 0) ? XE_OK : XE_WRONG;
}

int xe_touch(void *memory, size_t nbytes) { return touch_pages(memory, nbytes); }
