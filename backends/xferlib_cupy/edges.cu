// Edges of frames. The arithmetic is defined in xferlib/workload.py and must come out the same to the last bit: integers, and for
// floats operations that round one by one (the compiler would fuse a product and a sum).
//
// Defined by whoever compiles it: PIXEL, the type of an element; FLOATS, 1 if that is floating-point; CHANNELS.
//
// An image in between is bytes, its rows padded to whole words of four pixels. The padding repeats the row's last pixel, so that a
// thread can treat a word at a time and the right edge needs no care. `tail` is width % 4.

typedef unsigned int word;
typedef unsigned long long wide;

#if FLOATS
typedef double value;
#define LEAST_YET (1.0 / 0.0)
#define GREATEST_YET (-1.0 / 0.0)
#else
typedef int value;
#define LEAST_YET 2147483647
#define GREATEST_YET (-2147483647 - 1)
#endif

#define CHUNK 4096  // Pixels that a warp looks through for the extremes.
#define STRIP 16    // Rows that a thread goes down, keeping what it has read of the last two.
#define SIGN (1ull << 63)

static __device__ value grey(const PIXEL* p) {
#if CHANNELS < 3
    return p[0];
#elif FLOATS
    return __dadd_rn(__dadd_rn(__dmul_rn(0.299, p[0]), __dmul_rn(0.587, p[1])), __dmul_rn(0.114, p[2]));
#else
    return (77 * p[0] + 150 * p[1] + 29 * p[2]) >> 8;
#endif
}

static __device__ bool counts(value v) {
#if FLOATS
    return fabs(v) <= 1.7976931348623157e308;  // False for what is not a number, too.
#else
    return true;
#endif
}

// Values as unsigned integers in the same order, since there is no atomic minimum of doubles.
static __device__ wide key(value v) {
#if FLOATS
    wide bits = (wide)__double_as_longlong(v);
    return bits & SIGN ? ~bits : bits ^ SIGN;
#else
    return (wide)(long long)v ^ SIGN;
#endif
}

static __device__ value unkey(wide k) {
#if FLOATS
    return __longlong_as_double((long long)(k & SIGN ? k ^ SIGN : ~k));
#else
    return (value)(long long)(k ^ SIGN);
#endif
}

extern "C" __global__ void reset(wide* extremes, word frames) {
    word frame = blockIdx.x * blockDim.x + threadIdx.x;
    if (frame >= frames) return;
    extremes[2 * frame] = ~0ull;
    extremes[2 * frame + 1] = 0;
}

// A warp per chunk of a frame. blockDim.x is a multiple of 32.
extern "C" __global__ void find_extremes(const PIXEL* frames, wide* extremes, wide pixels, word chunks, word warps) {
    word warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    word lane = threadIdx.x % 32;
    if (warp >= warps) return;
    word frame = warp / chunks;
    wide start = (wide)(warp % chunks) * CHUNK;
    wide stop = start + CHUNK < pixels ? start + CHUNK : pixels;
    const PIXEL* origin = frames + frame * pixels * CHANNELS;
    value least = LEAST_YET, greatest = GREATEST_YET;
#pragma unroll 8
    for (wide pixel = start + lane; pixel < stop; pixel += 32) {
        value v = grey(origin + pixel * CHANNELS);
        if (counts(v) && v < least) least = v;
        if (counts(v) && v > greatest) greatest = v;
    }
    for (int step = 16; step > 0; step /= 2) {
        value other = __shfl_xor_sync(0xffffffff, least, step);
        if (other < least) least = other;
        other = __shfl_xor_sync(0xffffffff, greatest, step);
        if (other > greatest) greatest = other;
    }
    if (lane == 0 && least <= greatest) {
        atomicMin(extremes + 2 * frame, key(least));
        atomicMax(extremes + 2 * frame + 1, key(greatest));
    }
}

// A thread per word of the image.
extern "C" __global__ void normalise(
    const PIXEL* frames, const wide* extremes, word* image, word height, word width, word words, word total) {
    word index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= total) return;
    word row = index / words;
    word first = index % words * 4;
    const PIXEL* origin = frames + (wide)row * width * CHANNELS;
    wide lowest = extremes[row / height * 2], highest = extremes[row / height * 2 + 1];
#if FLOATS
    double low = __dmul_rn(unkey(lowest), 0.5);
    double span = __dsub_rn(__dmul_rn(unkey(highest), 0.5), low);
#else
    value low = unkey(lowest);
    word span = (word)(unkey(highest) - low);
#endif
    word bytes = 0;
    for (word pixel = 0; pixel < 4; pixel++) {
        word column = first + pixel < width ? first + pixel : width - 1;
        value v = grey(origin + (wide)column * CHANNELS);
        word byte = 0;
#if FLOATS
        if (counts(v) && span > 0) byte = (word)__dmul_rn(__ddiv_rn(__dsub_rn(__dmul_rn(v, 0.5), low), span), 255.0);
#else
        if (span > 0) byte = (word)(v - low) * 255 / span;
#endif
        bytes |= byte << 8 * pixel;
    }
    image[index] = bytes;
}

// Four pixels as two words of two 16-bit sums each, of which no sum here overflows one: pixels 0 and 2, pixels 1 and 3.
struct quad {
    word even, odd;
};

static __device__ quad unpack(word bytes) { return {bytes & 0x00ff00ff, bytes >> 8 & 0x00ff00ff}; }
static __device__ quad sum(quad a, quad b) { return {a.even + b.even, a.odd + b.odd}; }
static __device__ quad twice(quad a) { return {2 * a.even, 2 * a.odd}; }

// A word of a row, and the same moved by one pixel either way; past the ends the end pixel counts again.
struct reach {
    quad left, centre, right;
};

static __device__ reach look(const word* row, word x, word words) {
    word here = row[x];
    word before = x > 0 ? row[x - 1] >> 24 : here & 0xff;
    word after = x + 1 < words ? row[x + 1] << 24 : here & 0xff000000;
    return {unpack(here << 8 | before), unpack(here), unpack(here >> 8 | after)};
}

static __device__ quad across(reach r) { return sum(sum(r.left, r.right), twice(r.centre)); }
static __device__ quad down(quad above, quad here, quad below) { return sum(sum(above, below), twice(here)); }

// A thread per word and strip: where its strip begins and ends, and its frame.
struct place {
    word x, top, end;
    wide frame;
};

static __device__ place locate(word index, word height, word words) {
    word strips = (height + STRIP - 1) / STRIP;
    word top = index / words % strips * STRIP;
    return {index % words, top, top + STRIP < height ? top + STRIP : height, index / words / strips};
}

extern "C" __global__ void blur(const word* source, word* target, word height, word words, word tail, word total) {
    word index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= total) return;
    place p = locate(index, height, words);
    source += p.frame * height * words;
    target += p.frame * height * words;
    quad here = across(look(source + (wide)p.top * words, p.x, words));
    quad above = p.top > 0 ? across(look(source + (wide)(p.top - 1) * words, p.x, words)) : here;
#pragma unroll 4
    for (word y = p.top; y < p.end; y++) {
        quad below = y + 1 < height ? across(look(source + (wide)(y + 1) * words, p.x, words)) : here;
        quad total16 = sum(down(above, here, below), {0x00080008, 0x00080008});
        word bytes = (total16.even >> 4 & 0x00ff00ff) | (total16.odd >> 4 & 0x00ff00ff) << 8;
        if (tail > 0 && p.x + 1 == words) {
            word last = bytes >> 8 * (tail - 1) & 0xff;
            word kept = (1u << 8 * tail) - 1;
            bytes = (bytes & kept) | (last * 0x01010101 & ~kept);
        }
        target[(wide)y * words + p.x] = bytes;
        above = here;
        here = below;
    }
}

static __device__ word distance(word a, word b) { return a > b ? a - b : b - a; }

// One of the two 16-bit lanes: min(255, |gx| + |gy|).
static __device__ word strength(word right, word left, word below, word above, int shift) {
    word gx = distance(right >> shift & 0xffff, left >> shift & 0xffff);
    word gy = distance(below >> shift & 0xffff, above >> shift & 0xffff);
    return gx + gy < 255 ? gx + gy : 255;
}

// The result is not padded: rows of `width` bytes.
extern "C" __global__ void sobel(
    const word* source, unsigned char* result, word height, word width, word words, word total) {
    word index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= total) return;
    place p = locate(index, height, words);
    source += p.frame * height * words;
    result += p.frame * height * width;
    reach here = look(source + (wide)p.top * words, p.x, words);
    reach above = p.top > 0 ? look(source + (wide)(p.top - 1) * words, p.x, words) : here;
#pragma unroll 4
    for (word y = p.top; y < p.end; y++) {
        reach below = y + 1 < height ? look(source + (wide)(y + 1) * words, p.x, words) : here;
        quad right = down(above.right, here.right, below.right), left = down(above.left, here.left, below.left);
        quad under = across(below), over = across(above);
        word bytes = strength(right.even, left.even, under.even, over.even, 0)
            | strength(right.odd, left.odd, under.odd, over.odd, 0) << 8
            | strength(right.even, left.even, under.even, over.even, 16) << 16
            | strength(right.odd, left.odd, under.odd, over.odd, 16) << 24;
        unsigned char* target = result + (wide)y * width + 4 * p.x;
        if (width % 4 == 0) {
            *(word*)target = bytes;
        } else {
            for (word pixel = 0; pixel < 4 && 4 * p.x + pixel < width; pixel++) target[pixel] = bytes >> 8 * pixel;
        }
        above = here;
        here = below;
    }
}
