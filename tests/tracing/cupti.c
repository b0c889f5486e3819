// A library with the functions of CUPTI that a trace calls, for machines without a GPU. It writes records as cupti_activity.h lays them
// out, and tells of calls that a test makes through it, on the test's thread or on one that runs no Python.
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define OUT __attribute__((visibility("default")))

typedef struct {
    int site;
    const char *name;
    const void *parameters;
    void *returned;
    const char *symbol;
    void *context;
    uint32_t uid;
    uint64_t *data;
    uint32_t correlation;
} told;

typedef void (*called)(void *, int, uint32_t, const void *);
typedef void (*requested)(uint8_t **, size_t *, size_t *);
typedef void (*completed)(void *, uint32_t, uint8_t *, size_t, size_t);

OUT uint32_t version = 130401;
OUT uint32_t kernel_nbytes = 248;
OUT int subscribers = 0, registered = 0, enabled = 0, zeroed = 0;
OUT uint64_t dirty = 0;  // Bytes of buffers that were said to be zeroes, and were not.
OUT int64_t dropped = 0;

static called callback;
static requested request;
static completed complete;
static uint64_t (*now)(void);
static uint32_t correlation = 100;
static uint8_t *buffer;
static size_t used, room;
static uint8_t wanted[3][4096];
static const char *const NAMES[3][8] = {
    {0},
    {0, "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize", "cuMemAlloc_v2", "cuLaunchKernel", "cuMemAllocAsync", 0},
    {0, "cudaMemcpyAsync_v3020", "cudaMemcpy_v3020", 0, 0, 0, 0, 0},
};

OUT int cuptiGetVersion(uint32_t *found) { return *found = version, 0; }
OUT int cuptiGetResultString(int status, const char **text) { return *text = status == 39 ? "MULTIPLE_SUBSCRIBERS" : "SOMETHING", 0; }
OUT int cuptiSubscribe(void **subscriber, called with, void *user) {
    (void)user;
    if (subscribers) return 39;
    subscribers = 1, callback = with, *subscriber = &subscribers;
    return 0;
}
OUT int cuptiUnsubscribe(void *subscriber) { return (void)subscriber, subscribers = 0, callback = 0, 0; }
OUT int cuptiGetCallbackName(int domain, uint32_t number, const char **name) {
    *name = number < 8 ? NAMES[domain][number] : 0;
    return *name ? 0 : 1;
}
OUT int cuptiEnableCallback(uint32_t on, void *subscriber, int domain, uint32_t number) {
    return (void)subscriber, wanted[domain][number] = (uint8_t)on, 0;
}
OUT int cuptiActivityRegisterTimestampCallback(uint64_t (*with)(void)) { return now = with, 0; }
OUT int cuptiActivitySetAttribute(int attribute, size_t *nbytes, uint8_t *value) {
    if (attribute != 5 || *nbytes != 1) return 1;
    return zeroed = *value, 0;
}
OUT uint64_t standin_clock(void) { return now(); }
OUT int cuptiActivityRegisterCallbacks(requested one, completed other) { return request = one, complete = other, registered = 1, 0; }
OUT int cuptiActivityDisable(int kind) { return (void)kind, enabled--, 0; }
OUT int cuptiActivityEnable(int kind) { return (void)kind, enabled++, 0; }

static uint8_t *record(size_t nbytes) {
    if (buffer == 0) {
        size_t most;
        request(&buffer, &room, &most);
        used = 0;
        for (size_t at = 0; zeroed && buffer && at < room; at++) dirty += buffer[at] != 0;
    }
    if (buffer == 0 || used + nbytes > room) return 0;
    uint8_t *made = memset(buffer + used, 0, nbytes);
    used += nbytes;
    return made;
}
static void u32(uint8_t *at, uint32_t value) { memcpy(at, &value, 4); }
static void u64(uint8_t *at, uint64_t value) { memcpy(at, &value, 8); }

OUT int cuptiActivityEnableAndDump(int kind) {
    uint8_t *made = record(24);
    enabled++;
    if (made == 0) return 1;
    u32(made, (uint32_t)kind), u32(made + 4, 1), u32(made + 8, 7), u32(made + 16, 3);
    return 0;
}
OUT int cuptiActivityFlushAll(uint32_t flag) {
    (void)flag;
    if (buffer) complete(0, 0, buffer, room, used);
    buffer = 0;
    return 0;
}
OUT int cuptiActivityGetNextRecord(uint8_t *from, size_t valid, uint8_t **at) {
    uint32_t kind;
    size_t nbytes = 0;
    if (*at) {
        memcpy(&kind, *at, 4);
        nbytes = kind == 1 ? 112 : kind == 2 ? 104 : kind == 10 ? kernel_nbytes : kind == 12 ? 56 : kind == 22 ? 96 : 24;
    }
    uint8_t *next = *at ? *at + nbytes : from;
    if (next >= from + valid) return 12;
    return *at = next, 0;
}
OUT int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *found) {
    return (void)context, (void)stream, *found = (size_t)dropped, 0;
}

// What tests call. A call of a function, which copies: `way` is 1 to the device and 2 to the host, `memory` 1 pageable and 2 pinned.
static void tell(int site, int domain, uint32_t function, uint32_t number, uint64_t *parameters) {
    uint64_t data = 0;
    told what = {site, function < 8 ? NAMES[domain][function] : "cuSomething", parameters, 0, 0, 0, 1, &data, number};
    if (callback && wanted[domain][function]) callback(0, domain, function, &what);
}
OUT void standin_copy(int domain, int function, uint64_t target, uint64_t source, uint64_t nbytes, int way, int memory, int stream, int done) {
    uint32_t number = correlation++;
    uint64_t parameters[4] = {target, source, nbytes, 0};
    tell(0, domain, (uint32_t)function, number, parameters);
    // The runtime calls the driver.
    if (domain == 2) tell(0, 1, 1, number, parameters), tell(1, 1, 1, number, parameters);
    uint64_t start = now();
    uint8_t *made = record(112);
    if (made) {
        u32(made, 1), made[4] = (uint8_t)way;
        made[5] = (uint8_t)(way == 1 ? memory : 3), made[6] = (uint8_t)(way == 1 ? 3 : memory);
        u64(made + 8, nbytes), u64(made + 16, start), u64(made + 24, done ? start + 1000 : 0);
        u32(made + 32, 0), u32(made + 36, 1), u32(made + 40, (uint32_t)stream), u32(made + 44, number);
    }
    tell(1, domain, (uint32_t)function, number, parameters);
}
OUT void standin_kernel(const char *name, int stream, uint64_t nanoseconds) {
    uint8_t *made = record(kernel_nbytes);
    uint64_t start = now();
    if (made == 0) return;
    u32(made, 10), u64(made + 16, start), u64(made + 24, start + nanoseconds);
    u32(made + 40, 0), u32(made + 44, 1), u32(made + 48, (uint32_t)stream), u32(made + 92, correlation++), u64(made + 104, (uint64_t)(uintptr_t)name);
}
OUT void standin_range(const char *name) {
    for (uint32_t flag = 2; flag <= 4; flag += 2) {
        uint8_t *made = record(56);
        if (made == 0) return;
        u32(made, 12), u32(made + 4, flag), u64(made + 8, now()), u32(made + 16, 5);
        u64(made + 40, flag == 2 ? (uint64_t)(uintptr_t)name : 0);
    }
}
OUT void standin_call(int domain, int function) {
    uint32_t number = correlation++;
    uint64_t parameters[4] = {0};
    tell(0, domain, (uint32_t)function, number, parameters), tell(1, domain, (uint32_t)function, number, parameters);
}
// The beginning of a call whose end is never told.
OUT void standin_begin(int domain, int function) {
    uint64_t parameters[4] = {0};
    tell(0, domain, (uint32_t)function, correlation++, parameters);
}
// A thread that keeps the GIL, if it is called so, until another has come out of a call that it makes meanwhile; 0: that did not come.
static atomic_int keeps, is_out;
static void pause_for_a_millisecond(void) { nanosleep(&(struct timespec){0, 1000000}, 0); }
OUT int standin_keep(int milliseconds) {
    is_out = 0;
    keeps = 1;
    while (!is_out && milliseconds--) pause_for_a_millisecond();
    keeps = 0;
    return is_out;
}
OUT void standin_call_meanwhile(int domain, int function) {
    while (!keeps) pause_for_a_millisecond();
    standin_call(domain, function);
    is_out = 1;
}

static void *copies(void *nothing) {
    (void)nothing;
    for (int i = 0; i < 3; i++) standin_copy(1, 1, 0x5000, 0x100, 64, 1, 2, 14, 1);
    return 0;
}
OUT void standin_native_thread(void) {
    pthread_t thread;
    pthread_create(&thread, 0, copies, 0);
    pthread_join(thread, 0);
}
