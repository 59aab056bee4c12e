// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"

enum { BLOCK = 1 << 13, SENT = 6, DIGIT = 11, DIGITS = 1 << DIGIT }; // SENT: the bytes of a value and its position

// Returns the bits of the magnitude that is at rank `rank` (1 is the largest), and sets how many are larger.
static uint32_t magnitude_at(const float *values, size_t count, uint32_t rank, uint32_t *larger)
{
    uint32_t found = 0, known = 0;
    *larger = 0;
    for (int shift = 2 * DIGIT; shift >= 0; shift -= DIGIT) {
        uint32_t counts[DIGITS] = {0}, digit = DIGITS - 1;
        for (size_t i = 0; i < count; i++) {
            uint32_t bits = bits_of(values[i]) & MAGNITUDE;
            if ((bits & known) == found)
                counts[bits >> shift & (DIGITS - 1)]++;
        }
        while (*larger + counts[digit] < rank)
            *larger += counts[digit--];
        found |= digit << shift;
        known |= (uint32_t)(DIGITS - 1) << shift;
    }
    return found;
}

static double encode_top(unsigned char *restrict out, const float *restrict values, const float *restrict kept,
                         float *restrict left, size_t count, size_t top, size_t rest, float *largest)
{
    double lanes[LANES] = {0};
    size_t sent = 0;
    *largest = 0;
    while (count) {
        size_t size = count < BLOCK ? count : BLOCK, taken = count < BLOCK ? rest : top;
        uint32_t most = add_kept(left, values, kept, size), larger;
        if (most >= INFINITE)
            return -1.0;
        *largest = float_of(most) > *largest ? float_of(most) : *largest;
        uint32_t least = magnitude_at(left, size, (uint32_t)taken, &larger);
        size_t ties = taken - larger; // of the least magnitude, the first ones are sent
        unsigned char *positions = out + taken * sizeof(float);
        for (size_t i = 0, n = 0; n < taken; i++) {
            uint32_t bits = bits_of(left[i]) & MAGNITUDE;
            if (bits < least || (bits == least && !ties))
                continue;
            ties -= bits == least;
            uint16_t position = (uint16_t)i;
            memcpy(out + n * sizeof(float), &left[i], sizeof(float));
            memcpy(positions + n * sizeof position, &position, sizeof position);
            lanes[sent++ % LANES] += (double)left[i] * left[i];
            left[i] = 0;
            n++;
        }
        out = positions + taken * sizeof(uint16_t), values += size, kept += size, left += size, count -= size;
    }
    return sum_of(lanes);
}

// Returns -1 if a position is beyond its block, or not after the one before.
static int decode_top(float *restrict out, const unsigned char *restrict data, size_t count, size_t top, size_t rest)
{
    while (count) {
        size_t size = count < BLOCK ? count : BLOCK, taken = count < BLOCK ? rest : top, next = 0;
        const unsigned char *positions = data + taken * sizeof(float);
        memset(out, 0, size * sizeof(float));
        for (size_t n = 0; n < taken; n++) {
            uint16_t position;
            memcpy(&position, positions + n * sizeof position, sizeof position);
            if (position < next || position >= size)
                return -1;
            memcpy(&out[position], data + n * sizeof(float), sizeof(float));
            next = (size_t)position + 1;
        }
        out += size, data = positions + taken * sizeof(uint16_t), count -= size;
    }
    return 0;
}

double encode(void *out, const float *values, const float *kept, float *left, size_t count, size_t whole, size_t rest,
              float *largest)
{
    return encode_top(out, values, kept, left, count, whole / SENT, rest / SENT, largest);
}

int decode(float *out, const void *data, size_t count, size_t whole, size_t rest)
{
    return decode_top(out, data, count, whole / SENT, rest / SENT);
}
