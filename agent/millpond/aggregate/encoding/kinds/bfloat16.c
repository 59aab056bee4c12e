// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"

enum { AT_ONCE = 1 << 10 };

FOR_EACH_PROCESSOR
static double encode_bfloat16(uint16_t *restrict out, const float *restrict values, size_t count, float *largest)
{
    double lanes[LANES] = {0};
    float decoded[AT_ONCE];
    uint32_t most = 0, given = 0; // a NaN may be rounded to a number
    while (count) {
        size_t size = count < AT_ONCE ? count : AT_ONCE;
        for (size_t i = 0; i < size; i++) {
            uint32_t bits = bits_of(values[i]), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
            uint32_t before = bits & MAGNITUDE, after = rounded << 16 & MAGNITUDE;
            given = before > given ? before : given;
            most = after > most ? after : most;
            out[i] = (uint16_t)rounded;
            decoded[i] = float_of(rounded << 16);
        }
        if (given >= INFINITE || most >= INFINITE)
            return -1.0;
        add_squares(lanes, decoded, size);
        out += size, values += size, count -= size;
    }
    *largest = float_of(most);
    return sum_of(lanes);
}

FOR_EACH_PROCESSOR
static int decode_bfloat16(float *restrict out, const uint16_t *restrict data, size_t count)
{
    for (size_t i = 0; i < count; i++)
        out[i] = float_of((uint32_t)data[i] << 16);
    return 0;
}

double encode(void *out, const float *values, const float *kept, float *left, size_t count, size_t whole, size_t rest,
              float *largest)
{
    (void)kept, (void)left, (void)whole, (void)rest;
    return encode_bfloat16(out, values, count, largest);
}

int decode(float *out, const void *data, size_t count, size_t whole, size_t rest)
{
    (void)whole, (void)rest;
    return decode_bfloat16(out, data, count);
}
