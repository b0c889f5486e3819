// The engine: threads that move the bytes of ordinary memory through small chunks of pinned memory, beside the interpreter.
//
// It knows no Python, links against no device's library, and calls nobody back. Whoever uses it chooses the numbers of lanes,
// chunks and jobs and keeps alive what they refer to; a number is never used twice. Every call may be made from any thread and
// repeated: a second call with the same number changes nothing. Only xe_wait, xe_requests and xe_stop block, for as long as they
// are told.
//
// A lane is one copy stream, in one direction, with its chunks. A job is one transfer on a lane: pieces of host memory and where
// they lie on the device. Lanes share the threads and nothing else, so none of them ever waits for another.
#ifndef XFERLIB_ENGINE_H
#define XFERLIB_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#define XE_VERSION 5

enum { XE_H2D, XE_D2H };

// What calls return: below zero nothing was done, but for XE_FAILED, which tells how a job ended.
enum {
    XE_OK = 1,
    XE_NOT_YET = 0,
    XE_FAILED = -1,
    XE_UNKNOWN = -2,      // No such lane or job.
    XE_NO_MEMORY = -3,
    XE_STOPPED = -4,      // xe_stop was called.
    XE_BUSY = -5,
    XE_WRONG = -6,        // An argument makes no sense.
};

// How far a job has come. Each includes those before it; a job that failed has reached one as soon as what it stands for is true.
enum {
    XE_STAGED,            // To the device: its host memory is not read any more. To the host: as XE_ISSUED. Of a job that failed: no
                          // thread of the engine reads or writes its host memory now or later, and no copy of it comes into the
                          // stream any more, whatever those that are there wait for.
    XE_ISSUED,            // Every copy is in the stream, and so is the job's event behind them.
    XE_FINISHED,          // Every copy has been made, and those to the host are in the caller's memory.
};

// The calls of one device, for streams that the engine may use itself. Each returns 0, or a status of the device's own; `query`
// returns `not_ready` for an event that is not reached, and any other status leaves open whether the copy before it goes on: its
// chunk is lost. `enter` is called on each thread before its other calls, and again where the thread has been in another context
// since. `capture_mode` exchanges what the thread may call while streams are captured, and may be NULL; each thread gets `relaxed`
// before its first call. A thread that is not the engine's, but works while it waits, is asked first where it is (`current`), and
// is there again, and in its own mode, when xe_wait returns.
typedef struct {
    uint32_t version, nbytes;   // XE_VERSION, and the size of this struct.
    void *context;
    int32_t not_ready;
    int32_t relaxed;
    int (*enter)(void *context);
    int (*current)(void **context);
    int (*capture_mode)(int *mode);
    int (*copy_h2d)(uint64_t dst, const void *src, size_t nbytes, void *stream);
    int (*copy_d2h)(void *dst, uint64_t src, size_t nbytes, void *stream);
    int (*record)(void *event, void *stream);
    int (*query)(void *event);
    int (*wait)(void *stream, void *event, unsigned flags);
} xe_calls;

// A part of a job. Pieces to the device with the same `block`, each of which begins at the multiple of 256 bytes that follows the
// one before, may be copied as one, with the bytes between them.
typedef struct {
    void *host;
    uint64_t device;
    uint64_t nbytes;
    uint64_t block;
} xe_piece;

// A file, from its start, of which host memory that a job reads is a mapping. What lies there is read from the file: no pages have to
// be found for the mapping, and a file that was cut off is a short read. `descriptor` is the caller's, and is needed for the call alone.
typedef struct {
    const void *memory;
    uint64_t nbytes;
    int32_t descriptor;
    int32_t reserved;
} xe_file;

// What the owner of a lane without calls is asked to do, in order: if `first`, let the lane wait for what comes before the job;
// copy; if `record`, record the chunk's event; if `last`, the job's. Then xe_answer for the chunk, once, after its last request.
typedef struct {
    uint64_t id, chunk, device;
    void *memory;
    uint64_t nbytes;
    uint32_t lane;
    uint8_t first, record, last, reserved;
} xe_request;

#pragma GCC visibility push(default)

int xe_version(void);
// Of the sources that it was built from; empty where that was not told.
const char *xe_source_hash(void);

// Have at least so many threads. Returns how many there are, which is fewer where the system refuses: with none, whoever waits
// works. Signals are blocked on them.
int xe_start(int threads);
// Have at least so many threads that were started for a NUMA node, on CPUs of it: a set as sched_setaffinity has it. Where the system
// refuses these CPUs, they run where the caller may. Returns how many there are in all.
int xe_start_near(int threads, int node, const void *cpus, size_t nbytes);

// `calls` NULL: its owner makes the calls; see xe_request. `calls` must stay.
int xe_open_lane(uint32_t lane, int direction, const xe_calls *calls, void *stream);
// XE_BUSY while a job is on it. Take every chunk back first: those that are left are lost, and a copy may be under way in them.
int xe_close_lane(uint32_t lane);

// Give a lane pinned memory to copy through, and for lanes with calls an event of its own. Chunks with the same `block` whose memory
// lies side by side may be copied from or to as one. XE_BUSY: the chunk of this number is lost.
int xe_add_chunk(uint32_t lane, uint64_t chunk, void *memory, size_t nbytes, uint64_t block, void *event);
// Take back a chunk. XE_NOT_YET: it is in use, or a job of the lane wants chunks. XE_UNKNOWN: it was taken back already. XE_BUSY: it
// is lost, and taken back, but a copy may be under way in its memory for ever.
int xe_take_chunk(uint32_t lane, uint64_t chunk);

// Start a job. `after`: an event that the lane's stream waits for directly before the first copy; `done`: one that is recorded
// directly behind the last. Both only for lanes with calls, and NULL for none. `file`: see xe_file; NULL for none. The pieces are copied.
int xe_submit(uint64_t id, uint32_t lane, const xe_piece *pieces, size_t count, const xe_file *file, void *after, void *done);
// Take back a job of which nothing has begun: as if it had failed. XE_NOT_YET: it has begun, and goes on.
int xe_drop(uint64_t id);
// Fail a job (ECANCELED), though it has begun. No more of it is begun or issued, and its event is not recorded any more; what is in
// the stream goes on, and its chunks come back as ever. At XE_STAGED its host memory is at rest. A job that has failed or finished
// stays as it is.
int xe_abandon(uint64_t id);
// Block until a job has come so far, or so many microseconds have passed; 0 asks without waiting. Where there are no threads, what
// can be done at once is done first.
int xe_wait(uint64_t id, int stage, int64_t microseconds);
// Why a job failed: the device's status, and at what. `lost`: a copy may be under way of which nobody can know when it ends, so
// that what the job refers to must be kept for good, and its chunk. While every chunk of a lane is lost, its jobs fail (ENOBUFS).
int xe_error(uint64_t id, int32_t *status, const char **at, int *lost);
// Store the numbers of jobs that have finished, at most `count`, each once, and return how many.
size_t xe_finished(uint64_t *ids, size_t count);
// Forget a job that has finished and was told of.
int xe_forget(uint64_t id);

// Of lanes without calls. Store what is to be done next, whole chunks only, and return how many requests that is; blocks so long
// for the first one. `count` is at least XE_MOST_PIECES.
#define XE_MOST_PIECES 256
size_t xe_requests(xe_request *requests, size_t count, int64_t microseconds);
// The calls for a chunk have returned; `status` is not 0 where one failed. `recorded`: its event will say when it is at rest.
int xe_answer(uint32_t lane, uint64_t chunk, int32_t status, int recorded);
// The chunk's event is reached, or has failed.
int xe_reached(uint32_t lane, uint64_t chunk, int32_t status);

// Issue nothing more, and wait so long for threads that touch memory of the caller's or call a device. XE_NOT_YET: some still do.
// Every later call that would begin or wait for something returns XE_STOPPED.
int xe_stop(int64_t microseconds);

// Figures since the start, for tests and benchmarks.
typedef struct {
    uint64_t threads, jobs, chunks, sleeps, polls, copied_nbytes;
} xe_figures;
void xe_read_figures(xe_figures *figures);

// Copy as the engine does. `aside`: past the caches, for memory that the CPU does not read again soon. XE_WRONG where memory is a
// file's that has become shorter.
int xe_copy(void *dst, const void *src, size_t nbytes, int aside);

// Start copies from device memory to host memory, where each begins as the one before ends, in order. For threads that are not the
// engine's: this one is where it was when it returns. Returns the device's status; the copies before one that failed may be under way.
int xe_copies_d2h(const xe_calls *calls, void *stream, void *host, const uint64_t *device, const uint64_t *nbytes, size_t count);

// Copy an array's items to one piece of memory, in C order; `src` is the first of them, and strides are bytes. XE_WRONG as above, and
// for more than 64 axes.
int xe_gather(void *dst, const void *src, int axes, const int64_t *shape, const int64_t *strides, size_t itemsize);

// Have the system put pages under memory, on the calling thread, huge ones where nothing is there yet and it gives them; what is in it
// stays. Returns 0, or why it has none (errno).
int xe_touch(void *memory, size_t nbytes);

// Ask the system to read bytes of a file into its cache, in steps that it does not cut short: advice, which may come to nothing.
// Returns 0, or why it takes none (errno).
int xe_read_ahead(int descriptor, int64_t start, size_t nbytes);

#pragma GCC visibility pop

#endif
