// A driver for tests from Python, by the names of CUDA's: it has contexts and capture modes, for each thread its own, and notes of each
// call where it was made and with what. It does nothing, and says what it is told to say, when it is let.
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { DEEPEST = 8, TOO_DEEP = 2, NO_SUCH_DEVICE = 101, NO_CONTEXT = 201, REFUSED = 709, HELD_FOR_EVER = 999, CONTEXT = 0x5000, MOST_LOOKS = 2000 };

typedef struct {
    int status;              // What it says; the test writes it.
    int count;               // How often it was called.
    int mode;                // In which mode the last time,
    void *context;           // in which context,
    uint64_t given[4];       // and with what.
} made;

static _Thread_local void *contexts[DEEPEST];
static _Thread_local int depth, mode;

static atomic_int held;      // Whoever calls what needs a context waits, as for a lock that another thread has.

void driver_hold(int yes) { atomic_store(&held, yes); }

static void *current(void) { return depth ? contexts[depth - 1] : NULL; }

static int note(made *m, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    m->count++;
    m->mode = mode;
    m->context = current();
    uint64_t given[4] = {a, b, c, d};
    memcpy(m->given, given, sizeof given);
    return m->status;
}

static int call(made *m, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    int status = note(m, a, b, c, d);
    for (int looks = 0; atomic_load(&held); looks++) {
        if (looks == MOST_LOOKS) return HELD_FOR_EVER;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    return status;
}

#define WORD(x) ((uint64_t)(uintptr_t)(x))
#define NOTE(name, a) note(&made_##name, WORD(a), 0, 0, 0)
#define CALL(name, a, b, c, d) call(&made_##name, WORD(a), WORD(b), WORD(c), WORD(d))

// Where a thread is.

made made_cuCtxPushCurrent_v2, made_cuCtxPopCurrent_v2, made_cuThreadExchangeStreamCaptureMode;

static void *refused;        // A context that no thread can enter.

void driver_refuse(void *context) { refused = context; }

int cuCtxPushCurrent_v2(void *context) {
    if (depth == DEEPEST) return TOO_DEEP;
    if (refused && context == refused) return REFUSED;
    int status = NOTE(cuCtxPushCurrent_v2, context);
    if (status == 0) contexts[depth++] = context;
    return status;
}

int cuCtxPopCurrent_v2(void **context) {
    if (depth == 0) return NO_CONTEXT;
    NOTE(cuCtxPopCurrent_v2, 0);
    *context = contexts[--depth];
    return 0;
}

int cuCtxGetCurrent(void **context) { return *context = current(), 0; }

int cuThreadExchangeStreamCaptureMode(int *other) {
    int before = mode, status = NOTE(cuThreadExchangeStreamCaptureMode, *other);
    if (status) return status;
    mode = *other;
    *other = before;
    return 0;
}

void *driver_context(void) { return current(); }
int driver_depth(void) { return depth; }
int driver_mode(void) { return mode; }

// What is called there.

made made_cuEventQuery, made_cuEventRecord, made_cuEventSynchronize, made_cuMemcpyDtoHAsync_v2, made_cuMemcpyHtoDAsync_v2;
made made_cuStreamQuery, made_cuStreamWaitEvent, made_cuEventCreate, made_cuStreamCreate, made_cuStreamDestroy_v2;
made made_cuMemHostAlloc, made_cuMemFreeHost, made_cuMemHostRegister_v2, made_cuMemHostUnregister, made_cuPointerGetAttribute;
made made_cuLaunchHostFunc;

int cuEventQuery(void *event) { return CALL(cuEventQuery, event, 0, 0, 0); }
int cuEventRecord(void *event, void *stream) { return CALL(cuEventRecord, event, stream, 0, 0); }
int cuEventSynchronize(void *event) { return CALL(cuEventSynchronize, event, 0, 0, 0); }
int cuMemcpyDtoHAsync_v2(void *dst, uint64_t src, size_t n, void *stream) { return CALL(cuMemcpyDtoHAsync_v2, dst, src, n, stream); }
int cuMemcpyHtoDAsync_v2(uint64_t dst, const void *src, size_t n, void *stream) {
    return CALL(cuMemcpyHtoDAsync_v2, dst, src, n, stream);
}
int cuStreamQuery(void *stream) { return CALL(cuStreamQuery, stream, 0, 0, 0); }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return CALL(cuStreamWaitEvent, stream, event, flags, 0); }

int cuEventCreate(void **event, unsigned flags) {
    *event = (void *)(uintptr_t)0xe000;
    return CALL(cuEventCreate, 0, flags, 0, 0);
}
int cuStreamCreate(void **stream, unsigned flags) {
    *stream = (void *)(uintptr_t)0xf000;
    return CALL(cuStreamCreate, 0, flags, 0, 0);
}
int cuStreamDestroy_v2(void *stream) { return CALL(cuStreamDestroy_v2, stream, 0, 0, 0); }
int cuMemHostAlloc(void **memory, size_t n, unsigned flags) {
    *memory = (void *)(uintptr_t)0xa000;
    return CALL(cuMemHostAlloc, 0, n, flags, 0);
}
int cuMemFreeHost(void *memory) { return CALL(cuMemFreeHost, memory, 0, 0, 0); }
int cuMemHostRegister_v2(void *memory, size_t n, unsigned flags) { return CALL(cuMemHostRegister_v2, memory, n, flags, 0); }
int cuMemHostUnregister(void *memory) { return CALL(cuMemHostUnregister, memory, 0, 0, 0); }
int cuPointerGetAttribute(void *found, int attribute, uint64_t address) {
    memcpy(found, &(int){1}, sizeof(int));
    return CALL(cuPointerGetAttribute, 0, attribute, address, 0);
}
int cuLaunchHostFunc(void *stream, void *function, void *argument) { return CALL(cuLaunchHostFunc, stream, function, argument, 0); }

// What needs no context.

int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGet(int *device, int ordinal) { return ordinal < 0 ? NO_SUCH_DEVICE : (*device = ordinal, 0); }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGetPCIBusId(char *text, int nbytes, int device) {
    (void)device;
    return strncpy(text, "0000:0a:00.0", (size_t)nbytes), 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(uintptr_t)(CONTEXT + device), 0; }
int cuGetErrorName(int status, const char **text) { return *text = status == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OTHER", 0; }
