// What a trace collects while the program runs: CUPTI's buffers of activity records, and the calls of the driver and the runtime that
// CUPTI tells of, with the Python frames that made them.
//
// CUPTI calls back on any thread, its own among them, and perhaps while the interpreter ends. So no Python code runs in a callback: the
// functions below take what is told, and the trace asks for it later. Nothing here is linked against CUPTI or Python: the addresses of
// what is called in the interpreter are given.
#ifndef XFERLIB_ACTIVITY_H
#define XFERLIB_ACTIVITY_H

#include <stddef.h>
#include <stdint.h>

enum {
    XE_MOST_FUNCTIONS = 4096,  // Of each domain.
    XE_MOST_FRAMES = 40,       // Of one call, the innermost first.
    XE_WANTED = 1,             // Flags of a function: note its calls;
    XE_COPIES = 2,             // its parameters begin with a destination, a source and a size, of 64 bits each.
};

// Functions of the interpreter.
typedef struct xe_python {
    void *(*this_thread)(void);  // PyGILState_GetThisThreadState: null on a thread that has run no Python.
    int (*ensure)(void);         // PyGILState_Ensure
    void (*release)(int);        // PyGILState_Release
    void *(*frame)(void);        // PyEval_GetFrame: borrowed.
    void *(*code)(void *);       // PyFrame_GetCode
    int (*at)(void *);           // PyFrame_GetLasti: to find the line takes longer, and is done later.
    void *(*back)(void *);       // PyFrame_GetBack
    void (*decref)(void *);      // Py_DecRef
    int (*gc_disable)(void);     // PyGC_Disable
    int (*gc_enable)(void);      // PyGC_Enable
} xe_python;

// CUpti_CallbackData of cupti_callbacks.h.
typedef struct {
    int site;
    const char *function_name;
    const void *parameters;
    void *returned;
    const char *symbol;
    void *context;
    uint32_t context_uid;
    uint64_t *correlation_data;
    uint32_t correlation;
} xe_callback_data;

typedef struct xe_call {
    uint64_t start, end;  // Nanoseconds of CLOCK_MONOTONIC.
    uint64_t destination, source, nbytes;
    uint64_t first;       // The number of its first frame.
    uint32_t frames;
    uint32_t correlation;
    uint32_t domain, function;
    uint32_t thread;      // The kernel's number of it.
    uint32_t reserved;
} xe_call;

typedef struct xe_frame {
    void *code;  // A reference, which whoever takes it owns.
    int32_t at;  // The instruction, in bytes.
    int32_t reserved;
} xe_frame;

#pragma GCC visibility push(default)

// Start collecting, with buffers of zeroes: at most `most_buffers` buffers of `nbytes` each, and `most_calls` calls. `wanted`: XE_MOST_FUNCTIONS flags of each of
// domains 1 and 2, or null. `python` may be null: then no frames are noted. What an earlier trace left must have been taken. 0: refused.
int xe_activity_start(size_t nbytes, size_t most_buffers, size_t most_calls, const uint8_t *wanted, const xe_python *python);
// Stop: calls that are noted from here on are dropped, and so are buffers that are handed out.
void xe_activity_stop(void);

// For CUPTI: BuffersCallbackRequestFunc, BuffersCallbackCompleteFunc, CallbackFunc, TimestampCallbackFunc.
void xe_activity_requested(uint8_t **buffer, size_t *size, size_t *most_records);
void xe_activity_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);
void xe_activity_called(void *user, int domain, uint32_t function, const void *data);
uint64_t xe_activity_now(void);
// The clock that CUPTI has of itself, to be given back to it.
uint64_t xe_activity_usual(void);

// After the stop. The oldest full buffer, which the caller gives back by xe_activity_free; null: there is none.
uint8_t *xe_activity_take(size_t *valid);
void xe_activity_free(uint8_t *buffer);
// The calls and their frames, valid until the next start or `xe_activity_drop`, which owns no code any more.
const xe_call *xe_activity_calls(size_t *count);
const xe_frame *xe_activity_frames(size_t *count);
void xe_activity_drop(void);
// How many buffers could not be given and calls not noted.
uint64_t xe_activity_lost(void);

#pragma GCC visibility pop

#endif
