// SPDX-License-Identifier: Apache-2.0
// Encodings of vectors, see layout.py. The Python twin of each function is in numpy_codec.py and gives the same bits:
// no function may be compiled with fused multiplication and addition, or in another order of additions.
//
// A function that encodes returns the sum of the squares of the values as they will be decoded, in eight lanes (the
// i-th in lane i % 8), and sets the largest of their magnitudes. It returns -1 if a value is not finite, or would not be
// when decoded: then all that it has written is of no use. One with feedback adds what was kept of earlier vectors, and
// leaves what this one loses; it computes with its own sums alone, whatever another process does to the values meanwhile.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { ENGINE_VERSION = 1, LANES = 8, INT8_VALUES = 1 << 10, TOP_VALUES = 1 << 13, DIGIT = 11, DIGITS = 1 << DIGIT };
enum { BFLOAT16 = 1, INT8, TOP };

#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u
#define SMALLEST 0x1p-100f // a block below it is all zeros: the quotients of smaller numbers are too coarse
#define WHOLE 0x1.8p23f    // numbers from 2^23 to 2^24 are 1 apart, so a sum with it is rounded to a whole number

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

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

static double sum_of(const double *lanes)
{
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += lanes[lane];
    return sum;
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

FOR_EACH_PROCESSOR
static double encode_int8(unsigned char *restrict out, const float *restrict values, const float *restrict kept,
                          float *restrict left, size_t count, float *largest)
{
    double lanes[LANES] = {0};
    float decoded[INT8_VALUES];
    *largest = 0;
    while (count) {
        size_t size = count < INT8_VALUES ? count : INT8_VALUES;
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
        size_t size = count < INT8_VALUES ? count : INT8_VALUES;
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

FOR_EACH_PROCESSOR
static double encode_bfloat16(uint16_t *restrict out, const float *restrict values, size_t count, float *largest)
{
    double lanes[LANES] = {0};
    float decoded[INT8_VALUES];
    uint32_t most = 0, given = 0; // a NaN may be rounded to a number
    while (count) {
        size_t size = count < INT8_VALUES ? count : INT8_VALUES;
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
        size_t size = count < TOP_VALUES ? count : TOP_VALUES, taken = count < TOP_VALUES ? rest : top;
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
        size_t size = count < TOP_VALUES ? count : TOP_VALUES, taken = count < TOP_VALUES ? rest : top, next = 0;
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

// Of top-k, `top` values of a whole block are sent, and `rest` of the last one if it is shorter.
double encode(int kind, void *out, const float *values, const float *kept, float *left, size_t count, size_t top,
              size_t rest, float *largest)
{
    switch (kind) {
    case BFLOAT16:
        return encode_bfloat16(out, values, count, largest);
    case INT8:
        return encode_int8(out, values, kept, left, count, largest);
    default:
        return encode_top(out, values, kept, left, count, top, rest, largest);
    }
}

// Returns -1 for bytes that are none of the encoding.
int decode(int kind, float *out, const void *data, size_t count, size_t top, size_t rest)
{
    switch (kind) {
    case BFLOAT16:
        return decode_bfloat16(out, data, count);
    case INT8:
        return decode_int8(out, data, count);
    default:
        return decode_top(out, data, count, top, rest);
    }
}
