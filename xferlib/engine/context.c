// Calls of a driver in a context; see context.h.
#include "context.h"

static void leave(const xe_context *in) {
    void *popped;
    in->pop(&popped);
}

// Behind a push that was refused there is nothing to pop but what the thread had.

int xe_context_copy_h2d(const xe_context *in, uint64_t dst, const void *src, size_t nbytes, void *stream) {
    int status = in->push(in->context);
    if (status) return status;
    status = in->copy_h2d(dst, src, nbytes, stream);
    leave(in);
    return status;
}

int xe_context_copy_d2h(const xe_context *in, void *dst, uint64_t src, size_t nbytes, void *stream) {
    int status = in->push(in->context);
    if (status) return status;
    status = in->copy_d2h(dst, src, nbytes, stream);
    leave(in);
    return status;
}

int xe_context_record(const xe_context *in, void *event, void *stream) {
    int status = in->push(in->context);
    if (status) return status;
    status = in->record(event, stream);
    leave(in);
    return status;
}

int xe_context_wait(const xe_context *in, void *stream, void *event) {
    int status = in->push(in->context);
    if (status) return status;
    status = in->wait(stream, event, 0);
    leave(in);
    return status;
}

// What a thread comes back to.
typedef struct {
    int mode;
    int refused;     // Its mode was not exchanged.
} before;

static int enter_relaxed(const xe_context *in, before *b) {
    int status = in->push(in->context);
    if (status) return status;
    b->mode = in->relaxed;
    // Refused only where the driver is of no use any more, and the question says that better. Then there is no mode to go back to.
    b->refused = in->capture_mode(&b->mode);
    return 0;
}

static void leave_relaxed(const xe_context *in, before *b) {
    if (!b->refused) in->capture_mode(&b->mode);
    leave(in);
}

static int ask(const xe_context *in, int (*question)(void *), void *handle) {
    before b;
    int status = enter_relaxed(in, &b);
    if (status) return status;
    status = question(handle);
    leave_relaxed(in, &b);
    return status;
}

int xe_context_pointer_attribute(const xe_context *in, void *found, int attribute, uint64_t address) {
    before b;
    int status = enter_relaxed(in, &b);
    if (status) return status;
    status = in->pointer_attribute(found, attribute, address);
    leave_relaxed(in, &b);
    return status;
}

int xe_context_query_event(const xe_context *in, void *event) { return ask(in, in->query_event, event); }

int xe_context_query_stream(const xe_context *in, void *stream) { return ask(in, in->query_stream, stream); }

int xe_context_synchronize(const xe_context *in, void *event) { return ask(in, in->synchronize, event); }
