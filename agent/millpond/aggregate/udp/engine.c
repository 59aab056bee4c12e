// SPDX-License-Identifier: Apache-2.0
// The hot path of the UDP protocol: datagrams with values, many in each system call. native.py fills in the structures,
// whose arrays are those of arrivals.py and sums.py; python_engine.py does the same one datagram at a time. Words (START,
// GRANT, ...) are passed on to Python; what is not genuine is counted and dropped here.
//
// BLAKE2b is computed for four datagrams at a time, one in each lane of a vector.

#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "values are sent as they lie in memory: the Python engine is for processors of the other byte order"
#endif

enum { ENGINE_VERSION = 4, PROTOCOL = 1, DATA = 7, FROM_AGGREGATOR = 8 };
enum { HEADER = 16, TAG = 16, OVERHEAD = HEADER + TAG, DIGEST = 32, LANES = 4, BLOCK = 128 };
enum { BUFFER = 65536, BATCH = 16, SEGMENTS = 64, LARGEST = 65507, MESSAGES = 64, RECORD = 4 };
enum counter { ACCEPTED, CONTROL, MALFORMED, CLIENT, ROUND, WRONG_TAG, LENGTH, DUPLICATE, LATE };

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

typedef uint64_t lanes __attribute__((vector_size(8 * LANES)));
typedef int add_function(double *totals, const float *values, size_t count, double factor, double shift, float bound);
typedef void divide_function(float *means, const double *totals, size_t count, double divisor);

struct header { uint8_t kind, reserved; uint16_t client; uint32_t round, sequence, index; };

struct receiver {
    const uint64_t *keys; // of each row: the state of BLAKE2b after the key's block, 8 words
    uint8_t *bits;
    uint8_t *beyond;
    uint32_t *received, *seen, *counts, *whole, *whole_count;
    uint64_t *counters;
    double *totals;      // of an aggregator, with the bounds of each row; of words: see add_words
    const float *bounds;
    float *mean;         // of a client
    add_function *add;
    uint8_t *buffers;    // BATCH * BUFFER bytes
    uint64_t size;
    double shift;
    uint32_t values, blocks, stride, rows, first, round, direction, closed, more, words;
};

struct sender {
    uint64_t key[8];
    const float *vector;  // of a client
    const double *totals, *divisors; // of an aggregator, with digests of parts that have been sent before
    uint8_t *digests, *digested;
    divide_function *divide;
    uint8_t *buffer;      // BUFFER bytes
    uint64_t size;
    uint32_t values, blocks, client, round, direction, segmented, address_length, words;
    uint8_t address[32];
};

int engine_version(void) { return ENGINE_VERSION; }

// BLAKE2b (RFC 7693)

static const uint64_t START[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};
static const uint8_t SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

#define TURN(x, n) (((x) >> (n)) | ((x) << (64 - (n))))
#define MIX(a, b, c, d, x, y)                                                                                          \
    (v[a] += v[b] + m[x], v[d] ^= v[a], v[d] = TURN(v[d], 32), v[c] += v[d], v[b] ^= v[c], v[b] = TURN(v[b], 24),       \
     v[a] += v[b] + m[y], v[d] ^= v[a], v[d] = TURN(v[d], 16), v[c] += v[d], v[b] ^= v[c], v[b] = TURN(v[b], 63))

// Takes one block of each lane into the states. `counted` is the number of bytes up to its end.
FOR_EACH_PROCESSOR
static void compress(lanes *restrict h, const lanes *restrict m, uint64_t counted, int last)
{
    lanes v[16];
    for (int i = 0; i < 8; i++) {
        v[i] = h[i];
        v[i + 8] = (lanes){0} + START[i];
    }
    v[12] ^= counted;
    if (last)
        v[14] = ~v[14];
#pragma GCC unroll 12
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = SIGMA[round];
        MIX(0, 4, 8, 12, s[0], s[1]);
        MIX(1, 5, 9, 13, s[2], s[3]);
        MIX(2, 6, 10, 14, s[4], s[5]);
        MIX(3, 7, 11, 15, s[6], s[7]);
        MIX(0, 5, 10, 15, s[8], s[9]);
        MIX(1, 6, 11, 12, s[10], s[11]);
        MIX(2, 7, 8, 13, s[12], s[13]);
        MIX(3, 4, 9, 14, s[14], s[15]);
    }
    for (int i = 0; i < 8; i++)
        h[i] ^= v[i] ^ v[i + 8];
}

static void load_block(lanes *m, const uint8_t *const *from, size_t at, size_t length)
{
    uint64_t words[LANES][BLOCK / 8];
    for (int lane = 0; lane < LANES; lane++) {
        memset(words[lane], 0, length < BLOCK ? BLOCK : 0);
        memcpy(words[lane], from[lane] + at, length < BLOCK ? length : BLOCK);
    }
    for (int i = 0; i < BLOCK / 8; i++)
        m[i] = (lanes){words[0][i], words[1][i], words[2][i], words[3][i]};
}

static void store_lane(void *to, const lanes *h, int lane, size_t size)
{
    uint64_t words[8];
    for (int i = 0; i < 8; i++)
        words[i] = h[i][lane];
    memcpy(to, words, size);
}

// Writes the digests of four payloads of one length.
static void digest_payloads(uint8_t (*digests)[DIGEST], const uint8_t *const *payloads, size_t length)
{
    lanes h[8], m[BLOCK / 8];
    for (int i = 0; i < 8; i++)
        h[i] = (lanes){0} + START[i];
    h[0] ^= 0x01010000 ^ DIGEST;
    size_t at = 0;
    for (; at + BLOCK < length; at += BLOCK) {
        load_block(m, payloads, at, BLOCK);
        compress(h, m, at + BLOCK, 0);
    }
    load_block(m, payloads, at, length - at);
    compress(h, m, length, 1);
    for (int lane = 0; lane < LANES; lane++)
        store_lane(digests[lane], h, lane, DIGEST);
}

// Writes the tags of four datagrams, whose payloads have these digests.
static void make_tags(uint8_t (*tags)[TAG], const uint8_t *const *headers, uint8_t (*digests)[DIGEST],
                      const uint64_t *const *keys)
{
    uint8_t text[LANES][HEADER + DIGEST];
    const uint8_t *from[LANES];
    lanes h[8], m[BLOCK / 8];
    for (int lane = 0; lane < LANES; lane++) {
        memcpy(text[lane], headers[lane], HEADER);
        memcpy(text[lane] + HEADER, digests[lane], DIGEST);
        from[lane] = text[lane];
    }
    for (int i = 0; i < 8; i++)
        h[i] = (lanes){keys[0][i], keys[1][i], keys[2][i], keys[3][i]};
    load_block(m, from, 0, HEADER + DIGEST);
    compress(h, m, BLOCK + HEADER + DIGEST, 1);
    for (int lane = 0; lane < LANES; lane++)
        store_lane(tags[lane], h, lane, TAG);
}

// Writes the state after the block of a key of 32 bytes.
void prepare_key(uint64_t *state, const uint8_t *key)
{
    const uint8_t *from[LANES] = {key, key, key, key};
    lanes h[8], m[BLOCK / 8];
    for (int i = 0; i < 8; i++)
        h[i] = (lanes){0} + START[i];
    h[0] ^= 0x01010000 ^ 32 << 8 ^ TAG;
    load_block(m, from, 0, 32);
    compress(h, m, BLOCK, 0);
    store_lane(state, h, 0, 64);
}

static uint32_t values_of(uint64_t size, uint32_t values, uint32_t index)
{
    uint64_t left = size - (uint64_t)index * values;
    return left < values ? (uint32_t)left : values;
}

// Receiving

struct found { const uint8_t *datagram; uint32_t length, row; const struct sockaddr_storage *from; uint32_t from_length; };
struct words { uint8_t *at, *end; };

static void drop(struct receiver *r, enum counter why) { r->counters[why]++; }

// What is wrong with a datagram apart from its tag, or -1. Nothing is read beyond its length.
static int fault_of(const struct receiver *r, struct found *found)
{
    struct header h;
    if (found->length < OVERHEAD || found->length > LARGEST)
        return MALFORMED;
    memcpy(&h, found->datagram, sizeof h);
    if (h.kind >> 4 != PROTOCOL || h.reserved || (h.kind & FROM_AGGREGATOR) != r->direction)
        return MALFORMED;
    found->row = (uint32_t)h.client - r->first;
    if (found->row >= r->rows)
        return CLIENT;
    if (h.round != r->round)
        return ROUND;
    if ((h.kind & 7) != DATA)
        return -1;
    if (r->closed)
        return LATE;
    if ((uintptr_t)found->datagram % sizeof(float)) // behind others that are none
        return MALFORMED;
    if (h.index >= r->blocks || found->length != OVERHEAD + 4 * values_of(r->size, r->values, h.index))
        return LENGTH;
    return -1;
}

// Adds words, in halves of 4 bytes, which are joined when all are there.
static void add_words(uint64_t *totals, const float *values, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, &values[i], 4);
        totals[i] += word;
    }
}

static void take_values(struct receiver *r, const struct found *found)
{
    struct header h;
    memcpy(&h, found->datagram, sizeof h);
    uint32_t row = found->row, count = values_of(r->size, r->values, h.index);
    uint8_t *byte = r->bits + (size_t)row * r->stride + (h.index >> 3), bit = (uint8_t)(1 << (h.index & 7));
    if (r->seen[row] <= h.sequence)
        r->seen[row] = h.sequence < UINT32_MAX ? h.sequence + 1 : h.sequence;
    if (*byte & bit) {
        drop(r, DUPLICATE);
        return;
    }
    *byte |= bit;
    size_t at = (size_t)h.index * r->values;
    const float *values = (const float *)(found->datagram + HEADER);
    if (r->mean)
        memcpy(r->mean + at, values, 4 * (size_t)count);
    else if (r->words)
        add_words((uint64_t *)r->totals + at, values, count);
    else if (r->add(r->totals + at, values, count, 1.0, r->shift, r->bounds[row]))
        r->beyond[row] = 1;
    r->counters[ACCEPTED]++;
    r->received[row]++;
    if (++r->counts[h.index] == r->rows)
        r->whole[(*r->whole_count)++] = h.index;
}

// Passes a word on: two lengths, the address, the datagram.
static void pass_on(const struct found *found, struct words *out)
{
    if ((size_t)(out->end - out->at) < RECORD + found->from_length + found->length)
        return; // it is said again
    uint16_t lengths[2] = {(uint16_t)found->from_length, (uint16_t)found->length};
    memcpy(out->at, lengths, RECORD);
    memcpy(out->at + RECORD, found->from, found->from_length);
    memcpy(out->at + RECORD + found->from_length, found->datagram, found->length);
    out->at += RECORD + found->from_length + found->length;
}

// Takes up to four datagrams of one length.
static void take_lanes(struct receiver *r, const struct found *found, int count, struct words *out)
{
    const uint8_t *datagrams[LANES], *payloads[LANES];
    const uint64_t *keys[LANES];
    uint8_t digests[LANES][DIGEST], tags[LANES][TAG];
    for (int lane = 0; lane < LANES; lane++) {
        const struct found *each = &found[lane < count ? lane : 0];
        datagrams[lane] = each->datagram;
        payloads[lane] = each->datagram + HEADER;
        keys[lane] = r->keys + 8 * (size_t)each->row;
    }
    digest_payloads(digests, payloads, found->length - OVERHEAD);
    make_tags(tags, datagrams, digests, keys);
    for (int lane = 0; lane < count; lane++) {
        uint8_t differs = 0;
        for (int i = 0; i < TAG; i++)
            differs |= (uint8_t)(tags[lane][i] ^ found[lane].datagram[found[lane].length - TAG + i]);
        if (differs)
            drop(r, WRONG_TAG);
        else if ((found[lane].datagram[0] & 7) == DATA)
            take_values(r, &found[lane]);
        else
            pass_on(&found[lane], out);
    }
}

static uint32_t segment_size(struct msghdr *message, uint32_t length)
{
    for (struct cmsghdr *each = CMSG_FIRSTHDR(message); each; each = CMSG_NXTHDR(message, each))
        if (each->cmsg_level == SOL_UDP && each->cmsg_type == UDP_GRO) {
            int size;
            memcpy(&size, CMSG_DATA(each), sizeof size);
            return size > 0 ? (uint32_t)size : length;
        }
    return length;
}

static void take_message(struct receiver *r, struct mmsghdr *message, struct words *out)
{
    const uint8_t *buffer = message->msg_hdr.msg_iov->iov_base;
    uint32_t length = message->msg_len, size = segment_size(&message->msg_hdr, length);
    struct found found[LANES];
    int count = 0;
    if (!length || message->msg_hdr.msg_flags & MSG_TRUNC)
        drop(r, MALFORMED);
    for (uint32_t at = 0; at < length; at += size) {
        struct found next = {buffer + at, length - at < size ? length - at : size, 0, message->msg_hdr.msg_name,
                             message->msg_hdr.msg_namelen};
        int fault = fault_of(r, &next);
        if (fault >= 0) {
            drop(r, (enum counter)fault);
            continue;
        }
        if (count && (count == LANES || next.length != found->length)) {
            take_lanes(r, found, count, out);
            count = 0;
        }
        found[count++] = next;
    }
    if (count)
        take_lanes(r, found, count, out);
}

// Takes what has come, until that are `most` bytes; r->more says whether there may be more. Returns the bytes of words
// that were written, or -errno.
long receive_datagrams(struct receiver *r, int fd, uint32_t most, uint8_t *words, size_t room)
{
    struct mmsghdr messages[BATCH];
    struct iovec parts[BATCH];
    struct sockaddr_storage from[BATCH];
    union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr aligned; } control[BATCH];
    struct words out = {words, words + room};
    r->more = 0;
    for (uint64_t size = 0; size < most;) {
        memset(messages, 0, sizeof messages);
        for (int i = 0; i < BATCH; i++) {
            parts[i] = (struct iovec){r->buffers + (size_t)i * BUFFER, BUFFER};
            messages[i].msg_hdr = (struct msghdr){&from[i], sizeof from[i], &parts[i], 1, &control[i], sizeof control[i], 0};
        }
        int count = recvmmsg(fd, messages, BATCH, MSG_DONTWAIT, NULL);
        if (count < 0)
            return errno == EAGAIN || errno == EINTR || errno == ECONNREFUSED ? out.at - words : -errno;
        for (int i = 0; i < count; i++) {
            size += messages[i].msg_len;
            take_message(r, &messages[i], &out);
        }
        if (count < BATCH)
            return out.at - words;
    }
    r->more = 1;
    return out.at - words;
}

// Sending

// Writes sums of words of so many bits.
static void write_words(uint8_t *to, const uint64_t *totals, uint32_t count, uint32_t bits)
{
    for (uint32_t i = 0; bits == 32 && i < count; i++) {
        uint32_t word = (uint32_t)totals[i];
        memcpy(to + 4 * (size_t)i, &word, 4);
    }
    for (uint32_t i = 0; bits == 64 && i + 1 < count; i += 2) {
        uint64_t word = totals[i] + (totals[i + 1] << 32);
        memcpy(to + 4 * (size_t)i, &word, 8);
    }
}

// Writes the values of a datagram to its place. Returns how many.
static uint32_t write_values(const struct sender *s, uint32_t index, uint8_t *to)
{
    uint32_t count = values_of(s->size, s->values, index);
    size_t at = (size_t)index * s->values;
    if (s->vector)
        memcpy(to, s->vector + at, 4 * (size_t)count);
    else if (s->words)
        write_words(to, (const uint64_t *)s->totals + at, count, s->words);
    else
        s->divide((float *)to, s->totals + at, count, s->divisors[index]);
    return count;
}

static void digest_lanes(const struct sender *s, const uint32_t *indices, uint8_t *const *datagrams, int count,
                         uint32_t values, uint8_t (*digests)[DIGEST])
{
    const uint8_t *payloads[LANES];
    int known = s->digested != NULL;
    for (int lane = 0; lane < LANES; lane++) {
        payloads[lane] = datagrams[lane < count ? lane : 0] + HEADER;
        known = known && s->digested[indices[lane < count ? lane : 0]];
    }
    if (!known)
        digest_payloads(digests, payloads, 4 * (size_t)values);
    for (int lane = 0; s->digested && lane < count; lane++) {
        uint8_t *kept = s->digests + (size_t)indices[lane] * DIGEST;
        memcpy(known ? digests[lane] : kept, known ? kept : digests[lane], DIGEST);
        s->digested[indices[lane]] = 1;
    }
}

// Writes up to four datagrams of one length, one behind the other. Returns how many.
static int write_lanes(const struct sender *s, const uint32_t *indices, uint32_t most, uint32_t sequence, uint8_t *to)
{
    uint8_t *datagrams[LANES] = {to}, digests[LANES][DIGEST] = {{0}}, tags[LANES][TAG];
    const uint8_t *headers[LANES];
    const uint64_t *keys[LANES] = {s->key, s->key, s->key, s->key};
    uint32_t values = values_of(s->size, s->values, indices[0]), length = OVERHEAD + 4 * values;
    int count = 0;
    for (; count < LANES && (uint32_t)count < most; count++) {
        if (values_of(s->size, s->values, indices[count]) != values)
            break;
        struct header h = {(uint8_t)(PROTOCOL << 4 | s->direction | DATA), 0, (uint16_t)s->client, s->round,
                           sequence + (uint32_t)count, indices[count]};
        datagrams[count] = to + (size_t)count * length;
        memcpy(datagrams[count], &h, sizeof h);
        write_values(s, indices[count], datagrams[count] + HEADER);
    }
    for (int lane = 0; lane < LANES; lane++)
        headers[lane] = datagrams[lane < count ? lane : 0];
    digest_lanes(s, indices, datagrams, count, values, digests);
    make_tags(tags, headers, digests, keys);
    for (int lane = 0; lane < count; lane++)
        memcpy(datagrams[lane] + length - TAG, tags[lane], TAG);
    return count;
}

// Writes datagrams of one length to the buffer, as many as one system call takes. Returns how many.
static uint32_t write_train(const struct sender *s, const uint32_t *indices, uint32_t count, uint32_t sequence)
{
    uint32_t length = OVERHEAD + 4 * values_of(s->size, s->values, indices[0]), written = 0, most = LARGEST / length;
    if (most > SEGMENTS)
        most = SEGMENTS;
    if (most > count)
        most = count;
    while (written < most) {
        uint32_t index = indices[written];
        if (OVERHEAD + 4 * values_of(s->size, s->values, index) != length)
            break;
        written += (uint32_t)write_lanes(s, indices + written, most - written, sequence + written,
                                         s->buffer + (size_t)written * length);
    }
    return written;
}

static int send_segmented(struct sender *s, int fd, uint32_t length, uint32_t count)
{
    union { char bytes[CMSG_SPACE(sizeof(uint16_t))]; struct cmsghdr aligned; } control = {{0}};
    struct iovec part = {s->buffer, (size_t)length * count};
    struct msghdr message = {s->address, s->address_length, &part, 1, NULL, 0, 0};
    if (count > 1) {
        uint16_t size = (uint16_t)length;
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *option = CMSG_FIRSTHDR(&message);
        option->cmsg_level = SOL_UDP;
        option->cmsg_type = UDP_SEGMENT;
        option->cmsg_len = CMSG_LEN(sizeof size);
        memcpy(CMSG_DATA(option), &size, sizeof size);
    }
    return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? -1 : (int)count;
}

static int send_each(struct sender *s, int fd, uint32_t length, uint32_t count)
{
    struct mmsghdr messages[MESSAGES] = {0};
    struct iovec parts[MESSAGES];
    for (uint32_t i = 0; i < count; i++) {
        parts[i] = (struct iovec){s->buffer + (size_t)i * length, length};
        messages[i].msg_hdr = (struct msghdr){s->address, s->address_length, &parts[i], 1, NULL, 0, 0};
    }
    return sendmmsg(fd, messages, count, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// Sends datagrams of these indices. Returns how many went out, or -errno if none did for another reason than a full buffer.
long send_datagrams(struct sender *s, int fd, const uint32_t *indices, uint32_t count, uint32_t sequence)
{
    uint32_t done = 0;
    while (done < count) {
        uint32_t length = OVERHEAD + 4 * values_of(s->size, s->values, indices[done]);
        uint32_t written = write_train(s, indices + done, count - done, sequence + done);
        int sent = s->segmented ? send_segmented(s, fd, length, written) : send_each(s, fd, length, written);
        if (sent < 0 && s->segmented && written > 1 && (errno == EIO || errno == EINVAL || errno == ENOPROTOOPT)) {
            s->segmented = 0; // the interface cannot
            continue;
        }
        if (sent < 0 && errno != EAGAIN && errno != ENOBUFS && errno != EINTR && errno != ECONNREFUSED)
            return done ? (long)done : -errno;
        if (sent < 0)
            break;
        done += (uint32_t)sent;
        if ((uint32_t)sent < written)
            break;
    }
    return done;
}
