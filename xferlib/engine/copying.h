#ifndef XFERLIB_COPYING_H
#define XFERLIB_COPYING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { HUGE_PAGE = 2 << 20 };

typedef struct {
    const char *first;
    size_t nbytes;
} range;

// `aside`: past the caches, for memory that the CPU does not read again soon. `around`: NULL where the memory has pages; else the
// range around it that the caller has all of written, under which pages are put at once. `fresh`: set where pages had to be found.
// False where the memory is a file's that has become shorter. Needs `survive_bus_errors`, once in the process.
bool copy_guarded(void *dst, const void *src, size_t nbytes, bool aside, const range *around, bool *fresh);
// The same of an array's items, in C order, from wherever its strides (bytes) lead. Not more than MOST_AXES.
enum { MOST_AXES = 64 };
bool gather_guarded(void *dst, const void *src, int axes, const int64_t *shape, const int64_t *strides, size_t itemsize);
void survive_bus_errors(void);
// Read bytes of a file. False where it has no so many, or cannot be read.
bool read_whole(int descriptor, int64_t offset, char *dst, size_t nbytes);
// Whether memory has a page, or the system does not say.
bool is_there(const char *at);
// Have the system put pages under a range, whose contents stay. Returns 0, or why it has none (errno).
int touch_pages(char *memory, size_t nbytes);
// Ask the system to read bytes of a file into its cache. Returns 0, or why it does not (errno).
int read_ahead(int descriptor, int64_t start, size_t nbytes);

#endif
