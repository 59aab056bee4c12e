/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The datapath in C: the four loops of python_loops.py over the same rings, for small packets and for processors
 * that reorder memory accesses. docs/explanation/tunnel.md describes the region, python_loops.py each loop.
 * native.py fills in `struct context` and runs a loop in a process of its own.
 *
 * The peer's entries are copied before they are checked, and checked before they are used.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#define ENGINE_VERSION 4 /* of struct context; native.py has the same */

enum { SQE_SIZE = 64, CQE_SIZE = 16, MAX_ENTRIES = 1024, MAX_HEAD = 64 };
enum { SAFETY_TIMEOUT_MS = 100, SPURIOUS_WAKEUPS = 64, REST_MS = 1 };
enum { SEND = 0x81, RECV = 0x82 };
enum { NEEDS_CSUM = 1, DATA_VALID = 2, GSO_TCPV4 = 1, GSO_TCPV6 = 4 }; /* of a vnet header */
enum { OFFLOAD_CSUM = 1, OFFLOAD_TSO4 = 2, OFFLOAD_TSO6 = 4 };         /* TUN_F_* */
enum { TCP = 6, TCP_HEADER = 20, TCP_CHECKSUM = 16, LEAST_SEGMENT = 8, MOST_SEGMENT = 0xFFFF, FRAGMENT = 0x3FFF };
enum outcome { GOES_ON = 0, VIOLATION = 1, INTERFACE_GONE = 2, BROKEN = 3 };
enum counter {
    PACKETS, BYTES, NOTIFICATIONS, SLEEPS, BACKLOG, FULL, MALFORMED, FOREIGN_SOURCE, FOREIGN_DESTINATION, REFUSED
};

struct context {
    uint8_t *submissions, *completions;     /* the rings */
    uint32_t *tail_doorbell, *head_doorbell;
    uint32_t *own_word, *peer_word;         /* sleep words */
    uint8_t *buffers;                       /* the first of `entries` buffers of `buffer_size` bytes */
    uint64_t buffers_address;               /* as commands name it */
    uint64_t *counters;
    uint32_t *notifier_register;            /* wakes the peer by `notifier_value`; NULL where `notifier` does */
    uint32_t notifier_value;
    uint32_t buffer_size, entries, queue;
    uint32_t weakly_ordered;                /* of a strongly ordered processor: write-combining memory on x86 */
    int32_t wake, notifier, interface;      /* descriptors */
    uint32_t vnet_header, offloads, addresses_at, addresses_length, version_bits;
    uint8_t addresses[32], mask[32];        /* allowed source and destination, and the bits of them that count */
    char reason[256];                       /* why a loop ended */
};

struct command { uint32_t opcode, cid, length; uint64_t address; };
struct completion { uint32_t cid, result, status, sq_head, sq_id; };

static uint32_t load(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static void store(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static void full_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/* After a load that announces others, before a store that does: on x86 acquire and release are no instructions. */
static void order(const struct context *ctx) {
    if (ctx->weakly_ordered)
        full_fence();
}

static void count(struct context *ctx, enum counter which, uint64_t by) {
    __atomic_store_n(&ctx->counters[which], ctx->counters[which] + by, __ATOMIC_RELAXED);
}

/* A copy that the compiler cannot undo by reading the original, which the peer can change, a second time. */
static void copy_private(void *to, const void *from, size_t size) {
    memcpy(to, from, size);
    __asm__ volatile("" : : "r"(to) : "memory");
}

#define FAIL(ctx, outcome, ...) (snprintf((ctx)->reason, sizeof (ctx)->reason, __VA_ARGS__), (outcome))

static int system_error(struct context *ctx, const char *what) {
    if (errno == EBADFD || errno == EFAULT)
        return FAIL(ctx, INTERFACE_GONE, "the interface was deleted");
    return FAIL(ctx, BROKEN, "%s: %s", what, strerror(errno));
}

/* Notifications */

static void wake_if_waiting(struct context *ctx, uint32_t index) {
    full_fence();
    if (load(ctx->peer_word) != index + 1)
        return;
    store(ctx->peer_word, 0); /* before the notification, so that a cleared word is always followed by one */
    count(ctx, NOTIFICATIONS, 1);
    if (ctx->notifier_register) {
        full_fence();
        *(volatile uint32_t *)ctx->notifier_register = ctx->notifier_value;
    } else {
        eventfd_write(ctx->notifier, 1);
    }
}

struct sleeper { struct context *ctx; int epoll, spurious; };

static int sleeper_open(struct sleeper *sleeper, struct context *ctx) {
    struct epoll_event edge = {.events = EPOLLIN | EPOLLET};
    sleeper->ctx = ctx;
    sleeper->spurious = 0;
    sleeper->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (sleeper->epoll < 0 || epoll_ctl(sleeper->epoll, EPOLL_CTL_ADD, ctx->wake, &edge) < 0)
        return system_error(ctx, "epoll");
    return GOES_ON;
}

/* Between begin_sleep and end_sleep the caller checks the ring once more; if it is still empty, sleep_until_notified
 * waits, and returns whether a notification came. */
static void begin_sleep(struct sleeper *sleeper, uint32_t index) {
    store(sleeper->ctx->own_word, index + 1);
    full_fence();
}

static int sleep_until_notified(struct sleeper *sleeper) {
    struct epoll_event event;
    count(sleeper->ctx, SLEEPS, 1);
    return epoll_wait(sleeper->epoll, &event, 1, SAFETY_TIMEOUT_MS) > 0;
}

/* After a wake-up. Many spurious ones in a row, which an honest peer never causes, cost a pause each. */
static void count_wakeup(struct sleeper *sleeper, int ready) {
    sleeper->spurious = ready ? 0 : sleeper->spurious + 1;
    if (sleeper->spurious > SPURIOUS_WAKEUPS) {
        sleeper->spurious = SPURIOUS_WAKEUPS;
        poll(NULL, 0, REST_MS);
    }
}

static void end_sleep(struct sleeper *sleeper) { store(sleeper->ctx->own_word, 0); }

/* The interface */

static int read_packet(struct context *ctx, uint8_t *buffer, uint32_t *size) {
    ssize_t got;
    do
        got = read(ctx->interface, buffer, ctx->buffer_size);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return system_error(ctx, "read");
    *size = got;
    return GOES_ON;
}

static int differs(const uint8_t *found, const uint8_t *expected, const uint8_t *mask, uint32_t length) {
    uint8_t wrong = 0;
    for (uint32_t i = 0; i < length; i++)
        wrong |= (found[i] & mask[i]) ^ expected[i];
    return wrong;
}

struct vnet_header { uint8_t flags, gso; uint16_t header, segment, start, offset, buffers; };

/* Whether the IP header is of TCP that may be segmented so. */
static int can_segment(const struct context *ctx, const uint8_t *ip, uint8_t gso) {
    if (ip[0] >> 4 == 4)
        return gso == GSO_TCPV4 && ctx->offloads & OFFLOAD_TSO4 && !((ip[6] << 8 | ip[7]) & FRAGMENT) && ip[9] == TCP;
    return gso == GSO_TCPV6 && ctx->offloads & OFFLOAD_TSO6 && ip[6] == TCP;
}

/* Whether the kernel may be given a packet of `size` bytes with this vnet header: the rules of vnet_header.py. */
static int vnet_header_allowed(const struct context *ctx, const uint8_t *head, uint32_t size) {
    struct vnet_header vnet = {0};
    const uint8_t *ip = head + ctx->vnet_header;
    uint32_t packet = size - ctx->vnet_header, ip_header = ip[0] >> 4 == 6 ? 40 : (ip[0] & 15) * 4;
    if (ctx->vnet_header < offsetof(struct vnet_header, buffers))
        return 1;
    memcpy(&vnet, head, ctx->vnet_header < sizeof vnet ? ctx->vnet_header : sizeof vnet);
    if (vnet.buffers > 1)
        return 0;
    if (vnet.flags != NEEDS_CSUM)
        return (vnet.flags == 0 || vnet.flags == DATA_VALID)
               && !(vnet.gso | vnet.header | vnet.segment | vnet.start | vnet.offset);
    if (!(ctx->offloads & OFFLOAD_CSUM) || ip_header < 20 || vnet.start < ip_header
        || vnet.start + vnet.offset + 2u > packet || vnet.header > packet)
        return 0;
    if (!vnet.gso)
        return !vnet.segment;
    return vnet.start == ip_header && vnet.offset == TCP_CHECKSUM && vnet.start + TCP_HEADER <= vnet.header
           && vnet.segment >= LEAST_SEGMENT && vnet.start + TCP_HEADER + vnet.segment <= MOST_SEGMENT
           && can_segment(ctx, ip, vnet.gso);
}

static enum counter refusal_reason(const struct context *ctx, const uint8_t *head, uint32_t length, uint32_t size) {
    uint32_t half = ctx->addresses_length / 2;
    if (length < ctx->addresses_at + ctx->addresses_length || (head[ctx->vnet_header] & 0xF0) != ctx->version_bits)
        return MALFORMED;
    if (differs(head + ctx->addresses_at, ctx->addresses, ctx->mask, half))
        return FOREIGN_SOURCE;
    if (differs(head + ctx->addresses_at + half, ctx->addresses + half, ctx->mask + half, half))
        return FOREIGN_DESTINATION;
    return vnet_header_allowed(ctx, head, size) ? PACKETS : MALFORMED;
}

static int deliver(struct context *ctx, uint8_t *buffer, uint32_t size) {
    uint8_t head[MAX_HEAD];
    uint32_t length = ctx->addresses_at + ctx->addresses_length;
    if (size <= ctx->vnet_header || size > ctx->buffer_size)
        return FAIL(ctx, VIOLATION, "a packet of %u bytes; %u to %u are possible", size, ctx->vnet_header + 1,
                    ctx->buffer_size);
    if (length > size)
        length = size;
    copy_private(head, buffer, length);
    enum counter verdict = refusal_reason(ctx, head, length, size);
    if (verdict == PACKETS) {
        struct iovec parts[2] = {{head, length}, {buffer + length, size - length}};
        ssize_t done;
        do
            done = writev(ctx->interface, parts, 2);
        while (done < 0 && errno == EINTR);
        if (done < 0 && (errno == EBADFD || errno == EFAULT))
            return system_error(ctx, "write");
        if (done < 0)
            verdict = REFUSED;
        else
            count(ctx, BYTES, size);
    }
    count(ctx, verdict, 1);
    return GOES_ON;
}

/* The host's side of a queue pair */

struct host {
    struct context *ctx;
    uint32_t sq_head, sq_tail, cq_head, phase, free_count;
    uint16_t free[MAX_ENTRIES];
    uint8_t in_flight[MAX_ENTRIES];
};

static void host_open(struct host *h, struct context *ctx) {
    memset(h, 0, sizeof *h);
    h->ctx = ctx;
    h->phase = 1;
    while (h->free_count < ctx->entries - 1) {
        h->free[h->free_count] = h->free_count;
        h->free_count++;
    }
}

static uint8_t *host_buffer(struct host *h, uint32_t cid) { return h->ctx->buffers + (size_t)cid * h->ctx->buffer_size; }

static void host_submit(struct host *h, uint32_t opcode, uint32_t cid, uint32_t length) {
    struct context *ctx = h->ctx;
    uint32_t index = h->sq_tail, entry[SQE_SIZE / 4] = {opcode | cid << 16};
    uint64_t address = ctx->buffers_address + (uint64_t)cid * ctx->buffer_size;
    entry[6] = (uint32_t)address; /* PRP1 */
    entry[7] = address >> 32;
    entry[10] = length; /* CDW10 */
    memcpy(ctx->submissions + (size_t)index * SQE_SIZE, entry, SQE_SIZE);
    h->in_flight[cid] = 1;
    h->sq_tail = (index + 1) % ctx->entries;
    order(ctx);
    store(ctx->tail_doorbell, h->sq_tail);
    wake_if_waiting(ctx, index);
}

static const uint16_t *host_status(struct host *h, uint32_t index) {
    return (const uint16_t *)(h->ctx->completions + (size_t)index * CQE_SIZE) + 7;
}

static int host_ready(struct host *h, uint32_t ahead) {
    uint32_t position = h->cq_head + ahead, entries = h->ctx->entries;
    uint32_t phase = h->phase ^ (position >= entries);
    return (__atomic_load_n(host_status(h, position % entries), __ATOMIC_ACQUIRE) & 1) == phase;
}

static int host_check(struct host *h, const struct completion *done) {
    struct context *ctx = h->ctx;
    uint32_t entries = ctx->entries;
    if (done->cid >= entries || !h->in_flight[done->cid] || done->sq_id != ctx->queue)
        return FAIL(ctx, VIOLATION, "a completion for command %u of queue %u, which is not in flight", done->cid,
                    done->sq_id);
    if (done->sq_head >= entries
        || (done->sq_head + entries - h->sq_head) % entries > (h->sq_tail + entries - h->sq_head) % entries)
        return FAIL(ctx, VIOLATION, "a completion reports submission queue head %u, beyond the tail", done->sq_head);
    return GOES_ON;
}

/* Takes a completion that is ready, and frees its CID. */
static int host_reap(struct host *h, struct completion *done) {
    struct context *ctx = h->ctx;
    uint32_t index = h->cq_head, status = __atomic_load_n(host_status(h, index), __ATOMIC_ACQUIRE), entry[4];
    order(ctx);
    copy_private(entry, ctx->completions + (size_t)index * CQE_SIZE, CQE_SIZE);
    *done = (struct completion){
        .result = entry[0], .sq_head = entry[2] & 0xFFFF, .sq_id = entry[2] >> 16, .cid = entry[3] & 0xFFFF,
        .status = status >> 1};
    int outcome = host_check(h, done);
    if (outcome)
        return outcome;
    h->cq_head = (index + 1) % ctx->entries;
    if (h->cq_head == 0)
        h->phase ^= 1;
    order(ctx);
    store(ctx->head_doorbell, h->cq_head);
    h->sq_head = done->sq_head;
    h->in_flight[done->cid] = 0;
    h->free[h->free_count++] = done->cid;
    if (done->status)
        return FAIL(ctx, VIOLATION, "%s failed with NVMe status 0x%x", ctx->queue == 1 ? "SEND" : "RECV", done->status);
    return GOES_ON;
}

/* The next entry is checked too: a device may write a later one alone, which leaves nothing to do. */
static int host_worth_waking(struct host *h, uint32_t ahead) { return host_ready(h, ahead) && host_ready(h, 0); }

static void host_sleep(struct host *h, struct sleeper *sleeper, uint32_t ahead) {
    begin_sleep(sleeper, (h->cq_head + ahead) % h->ctx->entries);
    if (!host_worth_waking(h, ahead) && sleep_until_notified(sleeper))
        count_wakeup(sleeper, host_worth_waking(h, ahead));
    end_sleep(sleeper);
}

int submit_packets(struct context *ctx) {
    struct host h;
    struct sleeper sleeper;
    struct completion done;
    uint32_t size, half = (ctx->entries - 1) / 2;
    int outcome = sleeper_open(&sleeper, ctx);
    host_open(&h, ctx);
    while (!outcome) {
        while (!outcome && host_ready(&h, 0))
            outcome = host_reap(&h, &done);
        if (outcome)
            break;
        if (!h.free_count) {
            count(ctx, FULL, 1);
            host_sleep(&h, &sleeper, half);
            continue;
        }
        uint32_t cid = h.free[--h.free_count];
        outcome = read_packet(ctx, host_buffer(&h, cid), &size);
        if (outcome)
            break;
        host_submit(&h, SEND, cid, size);
        count(ctx, PACKETS, 1);
        count(ctx, BYTES, size);
        count(ctx, BACKLOG, ctx->entries - 1 - h.free_count);
    }
    return outcome;
}

int deliver_receives(struct context *ctx) {
    struct host h;
    struct sleeper sleeper;
    struct completion done;
    int outcome = sleeper_open(&sleeper, ctx);
    host_open(&h, ctx);
    while (h.free_count)
        host_submit(&h, RECV, h.free[--h.free_count], ctx->buffer_size);
    while (!outcome) {
        if (!host_ready(&h, 0)) {
            host_sleep(&h, &sleeper, 0);
            continue;
        }
        outcome = host_reap(&h, &done);
        if (!outcome && done.result) /* a controller may complete an idle RECV without a packet */
            outcome = deliver(ctx, host_buffer(&h, done.cid), done.result);
        if (!outcome)
            host_submit(&h, RECV, h.free[--h.free_count], ctx->buffer_size);
    }
    return outcome;
}

/* The controller's side of a queue pair */

struct controller { struct context *ctx; uint32_t opcode, sq_head, cq_tail, phase; };

static int controller_ready(struct controller *c, uint32_t ahead) {
    uint32_t tail = load(c->ctx->tail_doorbell), entries = c->ctx->entries;
    return tail >= entries || (tail + entries - c->sq_head) % entries > ahead;
}

static int controller_check(struct controller *c, const struct command *command) {
    struct context *ctx = c->ctx;
    uint64_t offset = command->address - ctx->buffers_address;
    if (command->opcode != c->opcode)
        return FAIL(ctx, VIOLATION, "opcode 0x%x on queue %u", command->opcode, ctx->queue);
    if (command->cid >= ctx->entries)
        return FAIL(ctx, VIOLATION, "command identifier %u in a queue of %u", command->cid, ctx->entries);
    if (command->address < ctx->buffers_address || offset % ctx->buffer_size || offset / ctx->buffer_size >= ctx->entries)
        return FAIL(ctx, VIOLATION, "address 0x%llx is no buffer of queue %u", (unsigned long long)command->address,
                    ctx->queue);
    if (command->length == 0 || command->length > ctx->buffer_size)
        return FAIL(ctx, VIOLATION, "a transfer of %u bytes; buffers have %u", command->length, ctx->buffer_size);
    return GOES_ON;
}

/* Takes a command that is ready. */
static int controller_fetch(struct controller *c, struct command *command) {
    struct context *ctx = c->ctx;
    uint32_t tail = load(ctx->tail_doorbell), entry[SQE_SIZE / 4];
    if (tail >= ctx->entries)
        return FAIL(ctx, VIOLATION, "submission tail doorbell %u in a queue of %u", tail, ctx->entries);
    order(ctx);
    copy_private(entry, ctx->submissions + (size_t)c->sq_head * SQE_SIZE, SQE_SIZE);
    *command = (struct command){
        .opcode = entry[0] & 0xFF, .cid = entry[0] >> 16, .address = entry[6] | (uint64_t)entry[7] << 32,
        .length = entry[10]};
    c->sq_head = (c->sq_head + 1) % ctx->entries;
    return controller_check(c, command);
}

static uint8_t *controller_buffer(struct controller *c, const struct command *command) {
    return c->ctx->buffers + (command->address - c->ctx->buffers_address);
}

/* Answers a fetched command; `backlog` becomes the completions that the host has not taken before this one. */
static int controller_complete(struct controller *c, const struct command *command, uint32_t result,
                               uint32_t *backlog) {
    struct context *ctx = c->ctx;
    uint32_t index = c->cq_tail, entries = ctx->entries, head = load(ctx->head_doorbell);
    if (head >= entries)
        return FAIL(ctx, VIOLATION, "completion head doorbell %u in a queue of %u", head, entries);
    *backlog = (index + entries - head) % entries;
    if (*backlog == entries - 1)
        return FAIL(ctx, VIOLATION, "the host submitted more commands than it takes completions");
    uint8_t *entry = ctx->completions + (size_t)index * CQE_SIZE;
    uint32_t body[3] = {result, 0, c->sq_head | ctx->queue << 16};
    uint16_t cid = command->cid;
    memcpy(entry, body, sizeof body);
    memcpy(entry + sizeof body, &cid, sizeof cid);
    order(ctx);
    __atomic_store_n((uint16_t *)entry + 7, c->phase, __ATOMIC_RELEASE);
    c->cq_tail = (index + 1) % entries;
    if (c->cq_tail == 0)
        c->phase ^= 1;
    wake_if_waiting(ctx, index);
    return GOES_ON;
}

static void controller_sleep(struct controller *c, struct sleeper *sleeper, uint32_t ahead) {
    begin_sleep(sleeper, (c->sq_head + ahead) % c->ctx->entries);
    if (!controller_ready(c, ahead) && sleep_until_notified(sleeper))
        count_wakeup(sleeper, controller_ready(c, ahead));
    end_sleep(sleeper);
}

int execute_sends(struct context *ctx) {
    struct controller c = {.ctx = ctx, .opcode = SEND, .phase = 1};
    struct sleeper sleeper;
    struct command command;
    uint32_t backlog;
    int outcome = sleeper_open(&sleeper, ctx);
    while (!outcome) {
        if (!controller_ready(&c, 0)) {
            controller_sleep(&c, &sleeper, 0);
            continue;
        }
        outcome = controller_fetch(&c, &command);
        if (!outcome)
            outcome = deliver(ctx, controller_buffer(&c, &command), command.length);
        if (!outcome)
            outcome = controller_complete(&c, &command, 0, &backlog);
    }
    return outcome;
}

int answer_receives(struct context *ctx) {
    struct controller c = {.ctx = ctx, .opcode = RECV, .phase = 1};
    struct sleeper sleeper;
    struct command command;
    uint32_t size, backlog, half = (ctx->entries - 1) / 2;
    int outcome = sleeper_open(&sleeper, ctx);
    while (!outcome) {
        if (!controller_ready(&c, 0)) {
            count(ctx, FULL, 1);
            controller_sleep(&c, &sleeper, half);
            continue;
        }
        outcome = controller_fetch(&c, &command);
        if (!outcome && command.length != ctx->buffer_size) /* a TUN truncates a packet to the buffer */
            outcome = FAIL(ctx, VIOLATION, "RECV for %u bytes; a buffer has %u", command.length, ctx->buffer_size);
        if (!outcome)
            outcome = read_packet(ctx, controller_buffer(&c, &command), &size);
        if (!outcome)
            outcome = controller_complete(&c, &command, size, &backlog);
        if (!outcome) {
            count(ctx, PACKETS, 1);
            count(ctx, BYTES, size);
            count(ctx, BACKLOG, backlog + 1);
        }
    }
    return outcome;
}

int engine_version(void) { return ENGINE_VERSION; }
