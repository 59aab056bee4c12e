// SPDX-License-Identifier: Apache-2.0
// Sums of vectors, in one pass over memory each. The Python twin of each function is in kernels.py and gives the
// same bits: no function may be compiled with fused multiplication and addition, or in another order of additions.

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "lanes.h"

enum { ENGINE_VERSION = 2, LARGEST = 0x7f7fffff };

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
