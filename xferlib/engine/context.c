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

static int ask(const xe_context *in, int (*question)(void *), void *handle) {
    int status = in->push(in->context);
    if (status) return status;
    int mode = in->relaxed;
    // Refused only where the driver is of no use any more, and the question says that better. Then there is no mode to go back to.
    int refused = in->capture_mode(&mode);
    status = question(handle);
    if (!refused) in->capture_mode(&mode);
    leave(in);
    return status;
}

int xe_context_query_event(const xe_context *in, void *event) { return ask(in, in->query_event, event); }

int xe_context_query_stream(const xe_context *in, void *stream) { return ask(in, in->query_stream, stream); }

int xe_context_synchronize(const xe_context *in, void *event) { return ask(in, in->synchronize, event); }
