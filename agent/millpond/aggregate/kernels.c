// SPDX-License-Identifier: Apache-2.0
// Sums of vectors, in one pass over memory each. The Python twin of each function is in kernels.py and gives the
// same bits: no function may be compiled with fused multiplication and addition, or in another order of additions.
//
// Lanes: sums over all values of a vector have eight lanes, value i in lane i % 8, so that a compiler may use vector
// instructions of up to eight doubles without another result.

#include <math.h>
#include <stddef.h>
#include <stdint.h>

enum { ENGINE_VERSION = 1, LANES = 8 };

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

int engine_version(void) { return ENGINE_VERSION; }

static double sum_of(const double *lanes)
{
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += lanes[lane];
    return sum;
}

// Adds factor * values, rounded by the shift (see exact.py), to the totals. Returns the sum of the values' squares, or
// -1 if a value is not within the bound, or not a number: then the totals are of no use.
FOR_EACH_PROCESSOR
double add_rounded(double *restrict totals, const float *restrict values, size_t count, double factor, double shift,
                   float bound)
{
    double squares[LANES] = {0};
    int beyond = 0;
    size_t whole = count - count % LANES;
    for (size_t start = 0; start < whole; start += LANES) {
        int found = 0;
        for (int lane = 0; lane < LANES; lane++) {
            float value = values[start + lane];
            double wide = value;
            found |= !(fabsf(value) <= bound);
            squares[lane] += wide * wide;
            totals[start + lane] += (wide * factor + shift) - shift;
        }
        beyond |= found;
    }
    for (size_t i = whole; i < count; i++) {
        double wide = values[i];
        beyond |= !(fabsf(values[i]) <= bound);
        squares[i - whole] += wide * wide;
        totals[i] += (wide * factor + shift) - shift;
    }
    return beyond ? -1.0 : sum_of(squares);
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
