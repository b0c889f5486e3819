// CUPTI's callbacks, handed to Python without waiting for its lock (the GIL) on the thread that calls CUDA.
//
// Such a thread may hold a lock of its framework for which another thread waits with the GIL. So only a thread that has the GIL runs
// Python code in a callback. All others hand the call to the recording's clerk, a thread of Python's, and wait until it has handled it,
// but not for ever: a call that was not handled in time counts as missed.
#ifndef XFERLIB_CALLBACKS_H
#define XFERLIB_CALLBACKS_H

#include <stdint.h>

#include "activity.h"

enum {
    XE_PARAMETERS = 80,  // Most bytes that are read of a call's parameters,
    XE_POINTED = 200,    // and of what the first of them points to.
    XE_LEFT = 3,
};

// What is read of the parameters of a function.
typedef struct xe_reads {
    uint8_t known;    // 0: its calls are not told of.
    uint8_t nbytes;   // Of the parameters.
    uint8_t pointed;  // Bytes of what the first parameter points to.
    uint8_t late;     // Nothing need be done before the call goes on: its order is enough. It is not told of again as it is left.
    uint8_t batch;    // The first three parameters are arrays, of targets, sources and sizes; the fourth is their length.
} xe_reads;

// A call that is entered or left, with copies of what is read of its parameters: the caller's may be gone when they are read.
typedef struct xe_callback {
    struct xe_callback *next;
    uint64_t recording;
    uint64_t serial;       // The order in which calls are entered.
    uint64_t thread;       // Its pthread_t, which is Python's ident of it.
    const char *function;
    void *context;         // The thread's current context, or null.
    uint32_t domain, number;
    uint32_t enters;       // 0: the call is left.
    uint32_t state;        // XE_LEFT: the caller has gone on.
    uint64_t parameters[XE_PARAMETERS / 8];
    uint64_t pointed[XE_POINTED / 8];  // The first parameter of the copy points here. Of a batch: one target, one source, all bytes.
} xe_callback;

#pragma GCC visibility push(default)

// Begin a recording, by a number other than 0 that none had before. A call waits for the clerk at most `longest` microseconds.
// `holds_gil`: PyGILState_Check. `python` is called with the GIL, on the thread that calls CUDA. `reads`: XE_MOST_FUNCTIONS of each of
// domains 1 and 2. 0: refused, since more would be read than there is room for.
int xe_callbacks_start(uint64_t recording, int64_t longest, int (*holds_gil)(void), void (*python)(const xe_callback *),
                       const xe_reads *reads);
// End it, if it is the one that runs: whoever waits goes on at once. Nobody calls CUDA any later because of it.
void xe_callbacks_stop(uint64_t recording);

// For CUPTI: CallbackFunc. The runtime's calls of the driver count as the same call.
void xe_callbacks_called(void *user, int domain, uint32_t number, const void *data);
// Count what the calling thread calls as part of a call that is not told of (1), or no longer (-1).
void xe_callbacks_nest(int by);

// For the clerk. Wait, without the GIL, until there is something to take; 0: the recording is over.
int xe_callbacks_wait(uint64_t recording);
// Take the oldest, or null. Give it back by xe_callbacks_handled, whatever becomes of the recording.
xe_callback *xe_callbacks_take(uint64_t recording);
void xe_callbacks_handled(xe_callback *call);

// How many calls were missed. From the first on, calls of threads without the GIL are not told of, so nobody waits in vain again.
uint64_t xe_callbacks_missed(uint64_t recording);
// Forget those, and tell of calls again.
void xe_callbacks_forgive(uint64_t recording);

#pragma GCC visibility pop

#endif
