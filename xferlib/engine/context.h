// Calls of a driver that need a context, each in one call: the calling thread is put into the context, the driver is called, and the
// thread is where it was.
//
// There is no state here: any thread may call, at any time, and in a forked child what the driver says there is returned. Whoever calls
// from Python gives the interpreter up meanwhile: the driver has a lock that another thread may keep until the device is idle.
#ifndef XFERLIB_CONTEXT_H
#define XFERLIB_CONTEXT_H

#include <stddef.h>
#include <stdint.h>

// A context, and the functions of its driver. Each returns 0, or a status of the driver's own. `push` makes the context the calling
// thread's current one, `pop` the one that was before it; `capture_mode` exchanges what the thread may call while streams are captured.
typedef struct {
    void *context;
    int32_t relaxed;         // The mode in which every call is allowed.
    int32_t reserved;
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*capture_mode)(int *mode);
    int (*copy_h2d)(uint64_t dst, const void *src, size_t nbytes, void *stream);
    int (*copy_d2h)(void *dst, uint64_t src, size_t nbytes, void *stream);
    int (*record)(void *event, void *stream);
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*query_event)(void *event);
    int (*query_stream)(void *stream);
    int (*synchronize)(void *event);
    int (*pointer_attribute)(void *found, int attribute, uint64_t address);
} xe_context;

#pragma GCC visibility push(default)

// Each returns what the driver said, or what `push` did where the thread could not be put there, and nothing was called. Nobody is told
// how going back went: where it fails the driver is of no use any more.
int xe_context_copy_h2d(const xe_context *in, uint64_t dst, const void *src, size_t nbytes, void *stream);
int xe_context_copy_d2h(const xe_context *in, void *dst, uint64_t src, size_t nbytes, void *stream);
int xe_context_record(const xe_context *in, void *event, void *stream);
int xe_context_wait(const xe_context *in, void *stream, void *event);

// These would spoil a capture, of whatever thread: they are made in the relaxed mode, and the thread has its own again behind them.
int xe_context_query_event(const xe_context *in, void *event);
int xe_context_query_stream(const xe_context *in, void *stream);
int xe_context_pointer_attribute(const xe_context *in, void *found, int attribute, uint64_t address);
// Blocks until the event is reached.
int xe_context_synchronize(const xe_context *in, void *event);

#pragma GCC visibility pop

#endif
