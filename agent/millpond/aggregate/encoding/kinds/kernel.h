// SPDX-License-Identifier: Apache-2.0
// What the kernels of encodings share, see kind.py. The class in NAME.py has the twin of NAME.c's loops, with the same bits:
// no function may be compiled with fused multiplication and addition, or in another order of additions.
//
// A kernel exports two functions. A whole block takes `whole` bytes, the last one, if it is shorter, `rest`.
//
//   double encode(void *out, const float *values, const float *kept, float *left, size_t count, size_t whole, size_t rest,
//                 float *largest)
//   int decode(float *out, const void *data, size_t count, size_t whole, size_t rest)
//
// `encode` returns the sum of the squares of the values as they will be decoded, in eight lanes (the i-th in lane i % 8),
// and sets the largest of their magnitudes. It returns -1 if a value is not finite, or would not be when decoded: then all
// that it has written is of no use. With feedback it adds what was kept of earlier vectors, and leaves what this one loses;
// it computes with its own sums alone, whatever another process does to the values meanwhile. `decode` returns -1 for
// bytes that are none of the encoding.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../../lanes.h"

enum { ENGINE_VERSION = 2 };

#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u

int engine_version(void) { return ENGINE_VERSION; }

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void add_squares(double *lanes, const float *decoded, size_t count)
{
    size_t whole = count - count % LANES;
    for (size_t start = 0; start < whole; start += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] += (double)decoded[start + lane] * decoded[start + lane];
    for (size_t i = whole; i < count; i++)
        lanes[i - whole] += (double)decoded[i] * decoded[i];
}

// Sets left to the sums of values and kept. Returns the bits of the largest magnitude.
static inline uint32_t add_kept(float *restrict left, const float *restrict values, const float *restrict kept,
                                size_t count)
{
    uint32_t most = 0;
    for (size_t i = 0; i < count; i++) {
        float sum = values[i] + kept[i];
        uint32_t bits = bits_of(sum) & MAGNITUDE;
        left[i] = sum;
        most = bits > most ? bits : most;
    }
    return most;
}
