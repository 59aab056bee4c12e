// SPDX-License-Identifier: Apache-2.0
// What kernels over vectors share. Sums over all values of a vector have eight lanes, value i in lane i % 8, so that a
// compiler may use vector instructions of up to eight doubles without another result.

#include <stddef.h>

enum { LANES = 8 };

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

static inline double sum_of(const double *lanes)
{
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += lanes[lane];
    return sum;
}
