// CUPTI's callbacks, handed to Python; see callbacks.h.
//
// One lock guards the queue and the state of each call in it. It is held for some instructions, never while Python code runs. A call is
// freed by its caller, unless that has gone on: then by the clerk, or as the recording ends.
#define _GNU_SOURCE
#include "callbacks.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ENTER = 0, QUEUED = 0, TAKEN, HANDLED, LEFT = XE_LEFT };
enum { SOON = 20000 };  // Microseconds that a call waits where it need not: so long its thread stands on its line.

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queued, handled;
static xe_callback *oldest, **newest = &oldest;
static atomic_uint_least64_t running;  // The recording; 0: none.
static atomic_uint_least64_t serials;
static uint64_t missed;
static int64_t longest;
static int (*holds_gil)(void);
static void (*python)(const xe_callback *);
static xe_reads reads[2][XE_MOST_FUNCTIONS];

// The calls that this thread is inside of, and whether the outermost was told of.
static __thread uint64_t of_recording;
static __thread int depth, is_told;

static void lock(void) {
    pthread_mutex_lock(&mu);
}

static void unlock(void) {
    pthread_mutex_unlock(&mu);
}

static void begin(void) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&queued, &monotonic);
    pthread_cond_init(&handled, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

// A forked child has neither the clerk nor those who wait. What they have in the queue stays as it is.
static void forget(void) {
    pthread_mutex_init(&mu, NULL);
    begin();
    atomic_store(&running, 0);
    oldest = NULL, newest = &oldest;
}

static void begin_once(void) {
    begin();
    pthread_atfork(lock, unlock, forget);
}

int xe_callbacks_start(uint64_t recording, int64_t microseconds, int (*check)(void), void (*with)(const xe_callback *),
                       const xe_reads *wanted) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, begin_once);
    for (size_t at = 0; at < 2 * XE_MOST_FUNCTIONS; at++)
        if (wanted[at].nbytes > XE_PARAMETERS || wanted[at].pointed > XE_POINTED || (wanted[at].batch && wanted[at].nbytes < 32)) return 0;
    lock();
    longest = microseconds, holds_gil = check, python = with, missed = 0;
    memcpy(reads, wanted, sizeof reads);
    atomic_store(&serials, 0);
    atomic_store(&running, recording);
    unlock();
    return 1;
}

static void unlink_call(xe_callback *call) {
    xe_callback **at = &oldest;
    while (*at != call) at = &(*at)->next;
    *at = call->next;
    if (newest == &call->next) newest = at;
}

void xe_callbacks_stop(uint64_t recording) {
    lock();
    if (atomic_load(&running) == recording) {
        atomic_store(&running, 0);
        // Of those that have gone on, nobody else frees what they have left.
        for (xe_callback *call = oldest, *next; call != NULL; call = next) {
            next = call->next;
            if (call->state == LEFT) unlink_call(call), free(call);
        }
        pthread_cond_broadcast(&queued), pthread_cond_broadcast(&handled);
    }
    unlock();
}

static void copy_parameters(xe_callback *call, const void *parameters, const xe_reads *of) {
    uint64_t *words = call->parameters;
    if (parameters != NULL) memcpy(words, parameters, of->nbytes);
    if (of->pointed) {
        const void *there = (const void *)(uintptr_t)words[0];
        if (there != NULL) memcpy(call->pointed, there, of->pointed);
        words[0] = (uintptr_t)call->pointed;
    }
    if (of->batch && words[3]) {
        const uint64_t *targets = (const uint64_t *)(uintptr_t)words[0], *sources = (const uint64_t *)(uintptr_t)words[1];
        const uint64_t *sizes = (const uint64_t *)(uintptr_t)words[2];
        call->pointed[0] = targets[0], call->pointed[1] = sources[0];
        for (uint64_t copy = 0; copy < words[3]; copy++) call->pointed[2] += sizes[copy];
        for (int at = 0; at < 3; at++) words[at] = (uintptr_t)&call->pointed[at];
        words[3] = 1;
    }
}

static int may_be_late(const xe_callback *call) {
    return reads[call->domain - 1][call->number].late;
}

// Have the clerk handle a call, which is given away. 0: it did not, or is still to.
static int hand_over(xe_callback *call) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    lock();
    if (atomic_load(&running) != call->recording || missed) {
        missed += atomic_load(&running) == call->recording;
        unlock();
        free(call);
        return 0;
    }
    int is_patient = may_be_late(call);
    int64_t nanoseconds = until.tv_nsec + (is_patient && SOON < longest ? SOON : longest) * 1000;
    until.tv_sec += nanoseconds / 1000000000, until.tv_nsec = nanoseconds % 1000000000;
    *newest = call, newest = &call->next;
    pthread_cond_signal(&queued);
    int late = 0;
    while (call->state != HANDLED && atomic_load(&running) == call->recording && !late)
        late = pthread_cond_timedwait(&handled, &mu, &until) == ETIMEDOUT;
    int runs = atomic_load(&running) == call->recording, done = call->state == HANDLED;
    int is_clerks = call->state == TAKEN || (call->state == QUEUED && is_patient && runs);
    missed += !done && !is_patient && runs;
    if (call->state == QUEUED && !is_clerks) unlink_call(call);
    if (is_clerks) call->state = LEFT;
    unlock();
    if (!is_clerks) free(call);
    return done;
}

static int tell(uint64_t recording, int domain, uint32_t number, const xe_callback_data *data) {
    xe_callback here = {0}, *call = &here;
    int direct = holds_gil();
    if (!direct && (call = calloc(1, sizeof *call)) == NULL) {
        lock();
        missed++;
        unlock();
        return 0;
    }
    call->recording = recording, call->thread = (uint64_t)pthread_self();
    call->function = data->function_name, call->context = data->context;
    call->domain = (uint32_t)domain, call->number = number, call->enters = data->site == ENTER;
    if (call->enters) call->serial = atomic_fetch_add(&serials, 1) + 1;
    if (call->enters) copy_parameters(call, data->parameters, &reads[domain - 1][number]);
    int is_once = may_be_late(call);
    if (!direct) return hand_over(call) && !is_once;
    python(call);
    return !is_once;
}

// Return the recording that runs, by which this thread counts its calls from now on.
static uint64_t counted_by(void) {
    uint64_t recording = atomic_load(&running);
    // The end of a call may never be told: the recording before may have ended inside it.
    if (of_recording != recording) of_recording = recording, depth = 0;
    return recording;
}

void xe_callbacks_called(void *user, int domain, uint32_t number, const void *told) {
    (void)user;
    const xe_callback_data *data = told;
    uint64_t recording = counted_by();
    if (recording == 0 || (domain != 1 && domain != 2) || number >= XE_MOST_FUNCTIONS || !reads[domain - 1][number].known) return;
    if (data->site == ENTER) {
        // What is called while this call is told of is inside it, too.
        if (depth++ == 0) is_told = tell(recording, domain, number, data);
        return;
    }
    // The recording may have begun inside the call.
    if (depth == 1 && is_told) tell(recording, domain, number, data);
    if (depth > 0) depth--;
}

void xe_callbacks_nest(int by) {
    counted_by();
    if (depth + by >= 0) depth += by;
}

int xe_callbacks_wait(uint64_t recording) {
    lock();
    while (atomic_load(&running) == recording && oldest == NULL) pthread_cond_wait(&queued, &mu);
    int runs = atomic_load(&running) == recording;
    unlock();
    return runs;
}

xe_callback *xe_callbacks_take(uint64_t recording) {
    lock();
    xe_callback *call = atomic_load(&running) == recording ? oldest : NULL;
    // Of a recording before this one, whose caller has not woken up yet, is nothing to be handled.
    while (call != NULL && call->recording != recording) call = call->next;
    if (call != NULL) unlink_call(call), call->state = call->state == LEFT ? LEFT : TAKEN;
    unlock();
    return call;
}

void xe_callbacks_handled(xe_callback *call) {
    lock();
    int is_left = call->state == LEFT;
    // What it was handled as comes after what its thread has done since. Its miss may have been forgiven.
    missed += is_left && !may_be_late(call) && atomic_load(&running) == call->recording;
    call->state = HANDLED;
    pthread_cond_broadcast(&handled);
    unlock();
    if (is_left) free(call);
}

uint64_t xe_callbacks_missed(uint64_t recording) {
    lock();
    uint64_t found = atomic_load(&running) == recording ? missed : 0;
    unlock();
    return found;
}

void xe_callbacks_forgive(uint64_t recording) {
    lock();
    if (atomic_load(&running) == recording) missed = 0;
    unlock();
}
