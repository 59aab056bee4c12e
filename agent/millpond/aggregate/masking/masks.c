// SPDX-License-Identifier: Apache-2.0
// Masks: the keystream of AES-128 in counter mode, made and added in one pass over memory. Its Python twin, in
// stream.py, is OpenSSL's cipher and gives the same words. Only processors with vector AES instructions (VAES,
// AVX-512) run it; these take the same time for all keys.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { ENGINE_VERSION = 1, ROUNDS = 10, MOST_MASKS = 64, SEED = 32, BLOCK = 16384 };

int engine_version(void) { return ENGINE_VERSION; }

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define VECTOR_AES __attribute__((target("aes,vaes,avx512f,avx512bw")))

typedef struct {
    __m128i keys[ROUNDS + 1];
    uint64_t high; // of the counter block, which is big-endian: the first half of it is fixed
    int subtract;
} Stream;

int is_supported(void)
{
    return __builtin_cpu_supports("vaes") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}

VECTOR_AES static inline __m128i next_key(__m128i key, __m128i assisted)
{
    key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
    key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
    return _mm_xor_si128(key, _mm_shuffle_epi32(assisted, 0xff));
}

VECTOR_AES static void expand(Stream *stream, const uint8_t *seed, int subtract)
{
    __m128i *keys = stream->keys;
    keys[0] = _mm_loadu_si128((const __m128i *)seed);
#define EXPAND(round, constant) keys[round] = next_key(keys[round - 1], _mm_aeskeygenassist_si128(keys[round - 1], constant))
    EXPAND(1, 0x01);
    EXPAND(2, 0x02);
    EXPAND(3, 0x04);
    EXPAND(4, 0x08);
    EXPAND(5, 0x10);
    EXPAND(6, 0x20);
    EXPAND(7, 0x40);
    EXPAND(8, 0x80);
    EXPAND(9, 0x1b);
    EXPAND(10, 0x36);
    memcpy(&stream->high, seed + 16, 8);
    stream->high = __builtin_bswap64(stream->high);
    stream->subtract = subtract;
}

VECTOR_AES static inline __m512i changed(__m512i words, __m512i mask, int wide, int subtract)
{
    if (wide)
        return subtract ? _mm512_sub_epi64(words, mask) : _mm512_add_epi64(words, mask);
    return subtract ? _mm512_sub_epi32(words, mask) : _mm512_add_epi32(words, mask);
}

// Adds a keystream from its block `first` on to whole vectors of 64 bytes, and to what is left behind them.
VECTOR_AES static void add(uint8_t *words, size_t bytes, int wide, uint64_t first, const Stream *stream)
{
    enum { WIDTH = 64, LANES = 4 };
    const __m512i reversed = _mm512_broadcast_i32x4(_mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m512i step = _mm512_set_epi64(0, 4, 0, 4, 0, 4, 0, 4);
    const long long high = (long long)stream->high, low = (long long)first;
    __m512i counter = _mm512_set_epi64(high, low + 3, high, low + 2, high, low + 1, high, low), keys[ROUNDS + 1];
    for (int round = 0; round <= ROUNDS; round++)
        keys[round] = _mm512_broadcast_i32x4(stream->keys[round]);
    for (size_t at = 0; at < bytes; at += LANES * WIDTH) {
        __m512i mask[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            mask[lane] = _mm512_xor_si512(_mm512_shuffle_epi8(counter, reversed), keys[0]);
            counter = _mm512_add_epi64(counter, step);
        }
        for (int round = 1; round < ROUNDS; round++)
            for (int lane = 0; lane < LANES; lane++)
                mask[lane] = _mm512_aesenc_epi128(mask[lane], keys[round]);
        for (int lane = 0; lane < LANES; lane++) {
            size_t place = at + lane * WIDTH;
            if (place >= bytes)
                return;
            mask[lane] = _mm512_aesenclast_epi128(mask[lane], keys[ROUNDS]);
            size_t left = bytes - place;
            __mmask16 some = left >= WIDTH ? 0xffff : (__mmask16)((1u << (left / 4)) - 1);
            __m512i old = _mm512_maskz_loadu_epi32(some, words + place);
            _mm512_mask_storeu_epi32(words + place, some, changed(old, mask[lane], wide, stream->subtract));
        }
    }
}

// Adds masks, up to MOST_MASKS, to words of 4 bytes, or of 8 if they are wide. Each has a seed of SEED bytes, a key and
// the first counter block, whose second half is 0; `first` is the block of the keystreams for the first word.
VECTOR_AES void add_masks(uint8_t *words, size_t bytes, int wide, uint64_t first, const uint8_t *seeds,
                          const uint8_t *subtract, int count)
{
    Stream streams[MOST_MASKS];
    for (int i = 0; i < count; i++)
        expand(&streams[i], seeds + i * SEED, subtract[i]);
    for (size_t start = 0; start < bytes; start += BLOCK)
        for (int i = 0; i < count; i++) {
            size_t size = bytes - start < BLOCK ? bytes - start : BLOCK;
            add(words + start, size, wide, first + start / 16, &streams[i]);
        }
}
#else
int is_supported(void) { return 0; }

void add_masks(uint8_t *words, size_t bytes, int wide, uint64_t first, const uint8_t *seeds, const uint8_t *subtract,
               int count)
{
    (void)words, (void)bytes, (void)wide, (void)first, (void)seeds, (void)subtract, (void)count;
}
#endif
