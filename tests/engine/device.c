// A device for tests from Python: functions of a driver's shape. A stream is a thread that does what it was told, in order; an event
// counts how often it was recorded and reached; memory is the host's. An event lives as long as the process: whatever is in a stream
// may refer to it.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NO_MEMORY = 2, NOT_READY = 600 };

typedef struct {
    atomic_uint recorded, reached;   // How often.
    atomic_int failed;               // What has failed before it, if anything.
} event;

typedef enum { COPY, RECORD, WAIT, HOLD, BREAK, CALL } kind;

typedef struct op {
    struct op *next;
    kind kind;
    void *dst;
    const void *src;
    size_t nbytes;
    event *event;
    unsigned target;
    int status;
    void (*call)(uint64_t);
    uint64_t given;
} op;

typedef struct {
    pthread_mutex_t mu;
    pthread_cond_t more;
    op *first, *last;
    bool over, ended;
    pthread_t thread;
    atomic_uint holds, released;     // How often.
    atomic_int refused_in, refusal;  // After so many copies one is refused; below zero: none.
    int broken;                      // Only its thread looks, as at the next.
    uint64_t drawn;
} stream;

static void (*_Atomic watch)(uint64_t dst, uint64_t src, uint64_t nbytes);   // Called before each copy.
static atomic_uint lateness;         // Microseconds by which a stream is late at most.

static void pause_for(long microseconds) {
    struct timespec span = {0, microseconds * 1000};
    nanosleep(&span, NULL);
}

// Every other time not at all.
static void be_late(stream *s) {
    unsigned most = atomic_load(&lateness);
    if (!most) return;
    s->drawn ^= s->drawn << 13;
    s->drawn ^= s->drawn >> 7;
    s->drawn ^= s->drawn << 17;
    if (s->drawn & 1) pause_for((s->drawn >> 8) % most);
}

static void carry_out(stream *s, const op *o) {
    be_late(s);
    switch (o->kind) {
    case COPY:
        if (atomic_load(&watch)) atomic_load(&watch)((uint64_t)(uintptr_t)o->dst, (uint64_t)(uintptr_t)o->src, o->nbytes);
        if (!s->broken) memcpy(o->dst, o->src, o->nbytes);
        break;
    case RECORD:
        atomic_store(&o->event->failed, s->broken);
        atomic_store(&o->event->reached, o->target);
        break;
    case WAIT:
        while (atomic_load(&o->event->reached) < o->target) pause_for(50);
        break;
    case HOLD:
        while (atomic_load(&s->released) < o->target) pause_for(50);
        break;
    case BREAK: s->broken = o->status; break;
    case CALL: o->call(o->given); break;
    }
}

static void *run(void *which) {
    stream *s = which;
    for (;;) {
        pthread_mutex_lock(&s->mu);
        while (!s->first && !s->over) pthread_cond_wait(&s->more, &s->mu);
        op *o = s->first;
        if (o) s->first = o->next;
        if (!s->first) s->last = NULL;
        pthread_mutex_unlock(&s->mu);
        if (!o) return NULL;
        carry_out(s, o);
        free(o);
    }
}

static int tell(stream *s, op told) {
    op *o = malloc(sizeof *o);
    if (!o) return NO_MEMORY;
    *o = told;
    pthread_mutex_lock(&s->mu);
    if (s->ended) {
        carry_out(s, o);
        free(o);
    } else {
        if (s->last) s->last->next = o;
        else s->first = o;
        s->last = o;
        pthread_cond_signal(&s->more);
    }
    pthread_mutex_unlock(&s->mu);
    return 0;
}

// Of the driver.

static _Thread_local struct {
    void *context;
    int mode;
} here;

int device_enter(void *context) {
    here.context = context;
    return 0;
}

int device_current(void **context) {
    *context = here.context;
    return 0;
}

int device_capture_mode(int *mode) {
    int before = here.mode;
    here.mode = *mode;
    *mode = before;
    return 0;
}

int device_copy_h2d(uint64_t dst, const void *src, size_t nbytes, void *where) {
    stream *s = where;
    if (atomic_load(&s->refused_in) >= 0 && atomic_fetch_sub(&s->refused_in, 1) == 0) return atomic_load(&s->refusal);
    return tell(s, (op){.kind = COPY, .dst = (void *)(uintptr_t)dst, .src = src, .nbytes = nbytes});
}

int device_copy_d2h(void *dst, uint64_t src, size_t nbytes, void *where) {
    return device_copy_h2d((uint64_t)(uintptr_t)dst, (const void *)(uintptr_t)src, nbytes, where);
}

int device_record(void *which, void *where) {
    event *e = which;
    return tell(where, (op){.kind = RECORD, .event = e, .target = atomic_fetch_add(&e->recorded, 1) + 1});
}

int device_query(void *which) {
    event *e = which;
    // One that was never recorded is reached, as CUDA has it.
    return atomic_load(&e->reached) < atomic_load(&e->recorded) ? NOT_READY : atomic_load(&e->failed);
}

int device_wait(void *where, void *which, unsigned flags) {
    event *e = which;
    (void)flags;
    return tell(where, (op){.kind = WAIT, .event = e, .target = atomic_load(&e->recorded)});
}

int device_synchronize(void *which) {
    int status;
    while ((status = device_query(which)) == NOT_READY) pause_for(50);
    return status;
}

// Of the test.

void *device_new_event(void) { return calloc(1, sizeof(event)); }

void *device_new_stream(void) {
    stream *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    static atomic_uint made;
    s->drawn = 88172645463325252u + atomic_fetch_add(&made, 1);
    atomic_store(&s->refused_in, -1);
    pthread_mutex_init(&s->mu, NULL);
    pthread_cond_init(&s->more, NULL);
    if (pthread_create(&s->thread, NULL, run, s) == 0) return s;
    free(s);
    return NULL;
}

// When it has done what it was told. It can still be told something, which is done at once: whoever knows its handle may wait in it,
// or record.
void device_end_stream(void *which) {
    stream *s = which;
    pthread_mutex_lock(&s->mu);
    bool over = s->over;
    s->over = true;
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->mu);
    if (over) return;
    pthread_join(s->thread, NULL);
    pthread_mutex_lock(&s->mu);
    s->ended = true;
    pthread_mutex_unlock(&s->mu);
}

// A function of the host's is called when all that came before is done.
int device_call(void *which, void (*call)(uint64_t), uint64_t given) {
    return tell(which, (op){.kind = CALL, .call = call, .given = given});
}

void device_watch(void (*call)(uint64_t dst, uint64_t src, uint64_t nbytes)) { atomic_store(&watch, call); }

// Streams are late from now on, now and then, by less than so many microseconds.
void device_be_late(unsigned microseconds) { atomic_store(&lateness, microseconds); }

// What comes into it from now on is not done before it is released once more.
int device_hold(void *which) {
    stream *s = which;
    return tell(s, (op){.kind = HOLD, .target = atomic_fetch_add(&s->holds, 1) + 1});
}

void device_release(void *which) { atomic_fetch_add(&((stream *)which)->released, 1); }

// Of the copies that come one is refused, after so many others.
void device_refuse(void *which, int after, int status) {
    stream *s = which;
    atomic_store(&s->refusal, status);
    atomic_store(&s->refused_in, after);
}

// What comes into it from now on fails.
int device_break(void *which, int status) { return tell(which, (op){.kind = BREAK, .status = status}); }
