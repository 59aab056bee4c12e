// SPDX-License-Identifier: Apache-2.0
// Sums of vectors, in one pass over memory each. The Python twin of each function is in kernels.py and gives the
// same bits: no function may be compiled with fused multiplication and addition, or in another order of additions.

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "lanes.h"

enum { ENGINE_VERSION = 3, LARGEST = 0x7f7fffff };

int engine_version(void) { return ENGINE_VERSION; }

// Adds factor * values, rounded by the shift (see exact.py), to the totals. Returns 0, or -1 if a value is not within
// the bound, or not finite: then the totals are of no use. Without their signs, floats are in the order of their bits,
// and those of infinity and NaN come last.
FOR_EACH_PROCESSOR
int add_rounded(double *restrict totals, const float *restrict values, size_t count, double factor, double shift,
                float bound)
{
    uint32_t most = 0, limit;
    memcpy(&limit, &bound, 4);
    limit &= 0x7fffffff; // of -0.0, too, whose bits would come behind all others
    limit = limit < LARGEST ? limit : LARGEST;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
        totals[i] += ((double)values[i] * factor + shift) - shift;
    }
    return most > limit ? -1 : 0;
}

// Returns the sum of the values' squares, in lanes.
FOR_EACH_PROCESSOR
double squares(const float *values, size_t count)
{
    double lanes[LANES] = {0};
    size_t whole = count - count % LANES;
    for (size_t start = 0; start < whole; start += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] += (double)values[start + lane] * values[start + lane];
    for (size_t i = whole; i < count; i++)
        lanes[i - whole] += (double)values[i] * values[i];
    return sum_of(lanes);
}

// Adds the sums of another range of vectors, whole multiples of the same unit within the bound. Returns 0, or -1 if one
// is not within the bound, not a number, or no multiple: then the totals are of no use.
FOR_EACH_PROCESSOR
int add_totals(double *restrict totals, const double *restrict others, size_t count, double shift, double bound)
{
    int beyond = 0;
    for (size_t i = 0; i < count; i++) {
        beyond |= !(fabs(others[i]) <= bound) | ((others[i] + shift) - shift != others[i]);
        totals[i] += others[i];
    }
    return beyond ? -1 : 0;
}

FOR_EACH_PROCESSOR
void divide(float *restrict means, const double *restrict totals, size_t count, double divisor)
{
    for (size_t i = 0; i < count; i++)
        means[i] = (float)(totals[i] / divisor);
}

// Writes whole numbers in words of 4 bytes, or of 8 if they are wide, in this unit and over the divisor.
FOR_EACH_PROCESSOR
void divide_words(float *restrict means, const void *restrict words, size_t count, int wide, double unit,
                  double divisor)
{
    const int32_t *narrow = words;
    const int64_t *whole = words;
    if (wide)
        for (size_t i = 0; i < count; i++)
            means[i] = (float)((double)whole[i] * unit / divisor);
    else
        for (size_t i = 0; i < count; i++)
            means[i] = (float)((double)narrow[i] * unit / divisor);
}

// Writes factor * values, rounded by the shift (see exact.py), as whole numbers modulo 2**32, or 2**64 if they are wide:
// the last bit of a value plus the shift is worth 1. Returns 0, or -1 as add_rounded does.
FOR_EACH_PROCESSOR
int round_values(void *restrict words, const float *restrict values, size_t count, int wide, double factor,
                 double shift, float bound)
{
    uint32_t most = 0, limit, *narrow = words;
    uint64_t zero, *whole = words;
    memcpy(&limit, &bound, 4);
    memcpy(&zero, &shift, 8);
    limit &= 0x7fffffff; // of -0.0, too, whose bits would come behind all others
    limit = limit < LARGEST ? limit : LARGEST;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    if (wide)
        for (size_t i = 0; i < count; i++) {
            double rounded = (double)values[i] * factor + shift;
            uint64_t bits;
            memcpy(&bits, &rounded, 8);
            whole[i] = bits - zero;
        }
    else
        for (size_t i = 0; i < count; i++) {
            double rounded = (double)values[i] * factor + shift;
            uint64_t bits;
            memcpy(&bits, &rounded, 8);
            narrow[i] = (uint32_t)(bits - zero);
        }
    return most > limit ? -1 : 0;
}
