// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"

enum { BLOCK = 1 << 10 };

#define SMALLEST 0x1p-100f // a block below it is all zeros: the quotients of smaller numbers are too coarse
#define WHOLE 0x1.8p23f    // numbers from 2^23 to 2^24 are 1 apart, so a sum with it is rounded to a whole number

FOR_EACH_PROCESSOR
static double encode_int8(unsigned char *restrict out, const float *restrict values, const float *restrict kept,
                          float *restrict left, size_t count, float *largest)
{
    double lanes[LANES] = {0};
    float decoded[BLOCK];
    *largest = 0;
    while (count) {
        size_t size = count < BLOCK ? count : BLOCK;
        uint32_t most = add_kept(left, values, kept, size);
        if (most >= INFINITE)
            return -1.0;
        float scale = float_of(most) < SMALLEST ? 0.0f : float_of(most) / 127.0f;
        float divisor = scale > 0 ? scale : 1.0f;
        memcpy(out, &scale, sizeof scale);
        int8_t *numbers = (int8_t *)(out + sizeof scale);
        for (size_t i = 0; i < size; i++) {
            float number = (left[i] / divisor + WHOLE) - WHOLE;
            numbers[i] = (int8_t)(int32_t)number;
            decoded[i] = (float)(int32_t)number * scale;
            left[i] -= decoded[i];
        }
        add_squares(lanes, decoded, size);
        *largest = scale * 127.0f > *largest ? scale * 127.0f : *largest;
        out += sizeof scale + size, values += size, kept += size, left += size, count -= size;
    }
    return sum_of(lanes);
}

// Returns -1 if a scale can be none: it is negative or not finite.
FOR_EACH_PROCESSOR
static int decode_int8(float *restrict out, const unsigned char *restrict data, size_t count)
{
    while (count) {
        size_t size = count < BLOCK ? count : BLOCK;
        float scale;
        memcpy(&scale, data, sizeof scale);
        if (bits_of(scale) >= INFINITE)
            return -1;
        const int8_t *numbers = (const int8_t *)(data + sizeof scale);
        for (size_t i = 0; i < size; i++)
            out[i] = (float)numbers[i] * scale;
        out += size, data += sizeof scale + size, count -= size;
    }
    return 0;
}

double encode(void *out, const float *values, const float *kept, float *left, size_t count, size_t whole, size_t rest,
              float *largest)
{
    (void)whole, (void)rest;
    return encode_int8(out, values, kept, left, count, largest);
}

int decode(float *out, const void *data, size_t count, size_t whole, size_t rest)
{
    (void)whole, (void)rest;
    return decode_int8(out, data, count);
}
