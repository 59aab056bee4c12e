/*
 * The C engine: the four loops of pump.py over the same rings, for small packets and for processors that
 * reorder memory accesses. tunnel/README.md describes what lies in the region; pump.py says why each loop is
 * as it is. engine.py fills in `struct station` and runs a loop in a process of its own.
 *
 * What the peer wrote is copied before it is looked at, and looked at before it is used.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#define ENGINE_VERSION 3 /* of struct station; engine.py has the same */

enum { SQE_SIZE = 64, CQE_SIZE = 16, MAX_ENTRIES = 1024, MAX_HEAD = 64 };
enum { SAFETY_TIMEOUT_MS = 100, FALSE_ALARMS = 64, REST_MS = 1 };
enum { SEND = 0x81, RECV = 0x82 };
enum outcome { GOES_ON = 0, VIOLATION = 1, INTERFACE_GONE = 2, BROKEN = 3 };
enum counter { PACKETS, BYTES, BELLS, SLEEPS, BACKLOG, FULL, MALFORMED, FOREIGN_SOURCE, FOREIGN_DESTINATION, REFUSED };

struct station {
    uint8_t *submissions, *completions;     /* the rings */
    uint32_t *tail_doorbell, *head_doorbell;
    uint32_t *own_word, *peer_word;         /* sleep words */
    uint8_t *buffers;                       /* the first of `entries` buffers of `buffer_size` bytes */
    uint64_t buffers_address;               /* as commands name it */
    uint64_t *counters;
    uint32_t *bell_register;                /* rings at the peer with `bell_value`; or none, and `bell` does */
    uint32_t bell_value;
    uint32_t buffer_size, entries, queue;
    uint32_t weakly_ordered;                /* the memory is, though the processor is not: write-combining on x86 */
    int32_t wake, bell, interface;          /* descriptors */
    uint32_t vnet_header, addresses_at, addresses_length, version_bits;
    uint8_t addresses[32], mask[32];        /* source and destination that are let through, and which of their bits */
    char reason[256];                       /* why a loop ended */
};

struct command { uint32_t opcode, cid, length; uint64_t address; };
struct completion { uint32_t cid, result, status, sq_head, sq_id; };

static uint32_t load(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static void store(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static void full_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/* After a load that announces others, before a store that does: on x86 acquire and release are no instructions. */
static void order(const struct station *s) {
    if (s->weakly_ordered)
        full_fence();
}

static void count(struct station *s, enum counter which, uint64_t by) {
    __atomic_store_n(&s->counters[which], s->counters[which] + by, __ATOMIC_RELAXED);
}

/* A copy that the compiler cannot undo by reading the original, which the peer can change, a second time. */
static void copy_private(void *to, const void *from, size_t size) {
    memcpy(to, from, size);
    __asm__ volatile("" : : "r"(to) : "memory");
}

#define FAIL(s, outcome, ...) (snprintf((s)->reason, sizeof (s)->reason, __VA_ARGS__), (outcome))

static int system_error(struct station *s, const char *what) {
    if (errno == EBADFD || errno == EFAULT)
        return FAIL(s, INTERFACE_GONE, "the interface was deleted");
    return FAIL(s, BROKEN, "%s: %s", what, strerror(errno));
}

/* Bells */

static void ring(struct station *s, uint32_t slot) {
    full_fence();
    if (load(s->peer_word) != slot + 1)
        return;
    store(s->peer_word, 0); /* before the bell: whoever clears the word always rings after it */
    count(s, BELLS, 1);
    if (s->bell_register) {
        full_fence();
        *(volatile uint32_t *)s->bell_register = s->bell_value;
    } else {
        eventfd_write(s->bell, 1);
    }
}

struct sleeper { struct station *s; int epoll, false_alarms; };

static int sleeper_open(struct sleeper *sleeper, struct station *s) {
    struct epoll_event edge = {.events = EPOLLIN | EPOLLET};
    sleeper->s = s;
    sleeper->false_alarms = 0;
    sleeper->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (sleeper->epoll < 0 || epoll_ctl(sleeper->epoll, EPOLL_CTL_ADD, s->wake, &edge) < 0)
        return system_error(s, "epoll");
    return GOES_ON;
}

/* Between nap_begin and nap_end the caller looks once more; if there is still nothing, nap waits: did the bell ring? */
static void nap_begin(struct sleeper *sleeper, uint32_t slot) {
    store(sleeper->s->own_word, slot + 1);
    full_fence();
}

static int nap(struct sleeper *sleeper) {
    struct epoll_event event;
    count(sleeper->s, SLEEPS, 1);
    return epoll_wait(sleeper->epoll, &event, 1, SAFETY_TIMEOUT_MS) > 0;
}

/* After a bell. Many in a row that bring nothing, which an honest peer never rings, cost a rest each. */
static void count_alarm(struct sleeper *sleeper, int ready) {
    sleeper->false_alarms = ready ? 0 : sleeper->false_alarms + 1;
    if (sleeper->false_alarms > FALSE_ALARMS) {
        sleeper->false_alarms = FALSE_ALARMS;
        poll(NULL, 0, REST_MS);
    }
}

static void nap_end(struct sleeper *sleeper) { store(sleeper->s->own_word, 0); }

/* The interface */

static int read_packet(struct station *s, uint8_t *buffer, uint32_t *size) {
    ssize_t got;
    do
        got = read(s->interface, buffer, s->buffer_size);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return system_error(s, "read");
    *size = got;
    return GOES_ON;
}

static int differs(const uint8_t *found, const uint8_t *expected, const uint8_t *mask, uint32_t length) {
    uint8_t wrong = 0;
    for (uint32_t i = 0; i < length; i++)
        wrong |= (found[i] & mask[i]) ^ expected[i];
    return wrong;
}

static enum counter why_not(const struct station *s, const uint8_t *head, uint32_t length) {
    uint32_t half = s->addresses_length / 2;
    if (length < s->addresses_at + s->addresses_length || (head[s->vnet_header] & 0xF0) != s->version_bits)
        return MALFORMED;
    if (differs(head + s->addresses_at, s->addresses, s->mask, half))
        return FOREIGN_SOURCE;
    if (differs(head + s->addresses_at + half, s->addresses + half, s->mask + half, half))
        return FOREIGN_DESTINATION;
    return PACKETS;
}

static int deliver(struct station *s, uint8_t *buffer, uint32_t size) {
    uint8_t head[MAX_HEAD];
    uint32_t length = s->addresses_at + s->addresses_length;
    if (size <= s->vnet_header || size > s->buffer_size)
        return FAIL(s, VIOLATION, "a packet of %u bytes; %u to %u are possible", size, s->vnet_header + 1,
                    s->buffer_size);
    if (length > size)
        length = size;
    copy_private(head, buffer, length);
    enum counter verdict = why_not(s, head, length);
    if (verdict == PACKETS) {
        struct iovec parts[2] = {{head, length}, {buffer + length, size - length}};
        ssize_t done;
        do
            done = writev(s->interface, parts, 2);
        while (done < 0 && errno == EINTR);
        if (done < 0 && (errno == EBADFD || errno == EFAULT))
            return system_error(s, "write");
        if (done < 0)
            verdict = REFUSED;
        else
            count(s, BYTES, size);
    }
    count(s, verdict, 1);
    return GOES_ON;
}

/* The host's side of a queue pair */

struct host {
    struct station *s;
    uint32_t sq_head, sq_tail, cq_head, phase, free_count;
    uint16_t free[MAX_ENTRIES];
    uint8_t in_flight[MAX_ENTRIES];
};

static void host_open(struct host *h, struct station *s) {
    memset(h, 0, sizeof *h);
    h->s = s;
    h->phase = 1;
    while (h->free_count < s->entries - 1) {
        h->free[h->free_count] = h->free_count;
        h->free_count++;
    }
}

static uint8_t *host_buffer(struct host *h, uint32_t cid) { return h->s->buffers + (size_t)cid * h->s->buffer_size; }

static void host_submit(struct host *h, uint32_t opcode, uint32_t cid, uint32_t length) {
    struct station *s = h->s;
    uint32_t slot = h->sq_tail, entry[SQE_SIZE / 4] = {opcode | cid << 16};
    uint64_t address = s->buffers_address + (uint64_t)cid * s->buffer_size;
    entry[6] = (uint32_t)address; /* PRP1 */
    entry[7] = address >> 32;
    entry[10] = length; /* CDW10 */
    memcpy(s->submissions + (size_t)slot * SQE_SIZE, entry, SQE_SIZE);
    h->in_flight[cid] = 1;
    h->sq_tail = (slot + 1) % s->entries;
    order(s);
    store(s->tail_doorbell, h->sq_tail);
    ring(s, slot);
}

static const uint16_t *host_status(struct host *h, uint32_t slot) {
    return (const uint16_t *)(h->s->completions + (size_t)slot * CQE_SIZE) + 7;
}

static int host_ready(struct host *h, uint32_t ahead) {
    uint32_t position = h->cq_head + ahead, entries = h->s->entries;
    uint32_t phase = h->phase ^ (position >= entries);
    return (__atomic_load_n(host_status(h, position % entries), __ATOMIC_ACQUIRE) & 1) == phase;
}

static int host_check(struct host *h, const struct completion *done) {
    struct station *s = h->s;
    uint32_t entries = s->entries;
    if (done->cid >= entries || !h->in_flight[done->cid] || done->sq_id != s->queue)
        return FAIL(s, VIOLATION, "a completion for command %u of queue %u, which is not in flight", done->cid,
                    done->sq_id);
    if (done->sq_head >= entries
        || (done->sq_head + entries - h->sq_head) % entries > (h->sq_tail + entries - h->sq_head) % entries)
        return FAIL(s, VIOLATION, "a completion reports submission queue head %u, beyond the tail", done->sq_head);
    return GOES_ON;
}

/* Takes a completion that is ready; its command's CID is free again. */
static int host_reap(struct host *h, struct completion *done) {
    struct station *s = h->s;
    uint32_t slot = h->cq_head, status = __atomic_load_n(host_status(h, slot), __ATOMIC_ACQUIRE), entry[4];
    order(s);
    copy_private(entry, s->completions + (size_t)slot * CQE_SIZE, CQE_SIZE);
    *done = (struct completion){
        .result = entry[0], .sq_head = entry[2] & 0xFFFF, .sq_id = entry[2] >> 16, .cid = entry[3] & 0xFFFF,
        .status = status >> 1};
    int outcome = host_check(h, done);
    if (outcome)
        return outcome;
    h->cq_head = (slot + 1) % s->entries;
    if (h->cq_head == 0)
        h->phase ^= 1;
    order(s);
    store(s->head_doorbell, h->cq_head);
    h->sq_head = done->sq_head;
    h->in_flight[done->cid] = 0;
    h->free[h->free_count++] = done->cid;
    if (done->status)
        return FAIL(s, VIOLATION, "%s failed with NVMe status 0x%x", s->queue == 1 ? "SEND" : "RECV", done->status);
    return GOES_ON;
}

/* The next entry counts too: a device may write the later one alone, with which there is nothing to do. */
static int host_worth_waking(struct host *h, uint32_t ahead) { return host_ready(h, ahead) && host_ready(h, 0); }

static void host_sleep(struct host *h, struct sleeper *sleeper, uint32_t ahead) {
    nap_begin(sleeper, (h->cq_head + ahead) % h->s->entries);
    if (!host_worth_waking(h, ahead) && nap(sleeper))
        count_alarm(sleeper, host_worth_waking(h, ahead));
    nap_end(sleeper);
}

int submit_packets(struct station *s) {
    struct host h;
    struct sleeper sleeper;
    struct completion done;
    uint32_t size, half = (s->entries - 1) / 2;
    int outcome = sleeper_open(&sleeper, s);
    host_open(&h, s);
    while (!outcome) {
        while (!outcome && host_ready(&h, 0))
            outcome = host_reap(&h, &done);
        if (outcome)
            break;
        if (!h.free_count) {
            count(s, FULL, 1);
            host_sleep(&h, &sleeper, half);
            continue;
        }
        uint32_t cid = h.free[--h.free_count];
        outcome = read_packet(s, host_buffer(&h, cid), &size);
        if (outcome)
            break;
        host_submit(&h, SEND, cid, size);
        count(s, PACKETS, 1);
        count(s, BYTES, size);
        count(s, BACKLOG, s->entries - 1 - h.free_count);
    }
    return outcome;
}

int deliver_receives(struct station *s) {
    struct host h;
    struct sleeper sleeper;
    struct completion done;
    int outcome = sleeper_open(&sleeper, s);
    host_open(&h, s);
    while (h.free_count)
        host_submit(&h, RECV, h.free[--h.free_count], s->buffer_size);
    while (!outcome) {
        if (!host_ready(&h, 0)) {
            host_sleep(&h, &sleeper, 0);
            continue;
        }
        outcome = host_reap(&h, &done);
        if (!outcome && done.result) /* a controller may complete an idle RECV with nothing in it */
            outcome = deliver(s, host_buffer(&h, done.cid), done.result);
        if (!outcome)
            host_submit(&h, RECV, h.free[--h.free_count], s->buffer_size);
    }
    return outcome;
}

/* The controller's side of a queue pair */

struct controller { struct station *s; uint32_t opcode, sq_head, cq_tail, phase; };

static int controller_ready(struct controller *c, uint32_t ahead) {
    uint32_t tail = load(c->s->tail_doorbell), entries = c->s->entries;
    return tail >= entries || (tail + entries - c->sq_head) % entries > ahead;
}

static int controller_check(struct controller *c, const struct command *command) {
    struct station *s = c->s;
    uint64_t offset = command->address - s->buffers_address;
    if (command->opcode != c->opcode)
        return FAIL(s, VIOLATION, "opcode 0x%x on queue %u", command->opcode, s->queue);
    if (command->cid >= s->entries)
        return FAIL(s, VIOLATION, "command identifier %u in a queue of %u", command->cid, s->entries);
    if (command->address < s->buffers_address || offset % s->buffer_size || offset / s->buffer_size >= s->entries)
        return FAIL(s, VIOLATION, "address 0x%llx is no buffer of queue %u", (unsigned long long)command->address,
                    s->queue);
    if (command->length == 0 || command->length > s->buffer_size)
        return FAIL(s, VIOLATION, "a transfer of %u bytes; buffers have %u", command->length, s->buffer_size);
    return GOES_ON;
}

/* Takes a command that is ready. */
static int controller_fetch(struct controller *c, struct command *command) {
    struct station *s = c->s;
    uint32_t tail = load(s->tail_doorbell), entry[SQE_SIZE / 4];
    if (tail >= s->entries)
        return FAIL(s, VIOLATION, "submission tail doorbell %u in a queue of %u", tail, s->entries);
    order(s);
    copy_private(entry, s->submissions + (size_t)c->sq_head * SQE_SIZE, SQE_SIZE);
    *command = (struct command){
        .opcode = entry[0] & 0xFF, .cid = entry[0] >> 16, .address = entry[6] | (uint64_t)entry[7] << 32,
        .length = entry[10]};
    c->sq_head = (c->sq_head + 1) % s->entries;
    return controller_check(c, command);
}

static uint8_t *controller_buffer(struct controller *c, const struct command *command) {
    return c->s->buffers + (command->address - c->s->buffers_address);
}

/* Answers a fetched command; `backlog` becomes the completions that the host has not taken before this one. */
static int controller_complete(struct controller *c, const struct command *command, uint32_t result,
                               uint32_t *backlog) {
    struct station *s = c->s;
    uint32_t slot = c->cq_tail, entries = s->entries, head = load(s->head_doorbell);
    if (head >= entries)
        return FAIL(s, VIOLATION, "completion head doorbell %u in a queue of %u", head, entries);
    *backlog = (slot + entries - head) % entries;
    if (*backlog == entries - 1)
        return FAIL(s, VIOLATION, "the host submitted more commands than it takes completions");
    uint8_t *entry = s->completions + (size_t)slot * CQE_SIZE;
    uint32_t body[3] = {result, 0, c->sq_head | s->queue << 16};
    uint16_t cid = command->cid;
    memcpy(entry, body, sizeof body);
    memcpy(entry + sizeof body, &cid, sizeof cid);
    order(s);
    __atomic_store_n((uint16_t *)entry + 7, c->phase, __ATOMIC_RELEASE);
    c->cq_tail = (slot + 1) % entries;
    if (c->cq_tail == 0)
        c->phase ^= 1;
    ring(s, slot);
    return GOES_ON;
}

static void controller_sleep(struct controller *c, struct sleeper *sleeper, uint32_t ahead) {
    nap_begin(sleeper, (c->sq_head + ahead) % c->s->entries);
    if (!controller_ready(c, ahead) && nap(sleeper))
        count_alarm(sleeper, controller_ready(c, ahead));
    nap_end(sleeper);
}

int execute_sends(struct station *s) {
    struct controller c = {.s = s, .opcode = SEND, .phase = 1};
    struct sleeper sleeper;
    struct command command;
    uint32_t backlog;
    int outcome = sleeper_open(&sleeper, s);
    while (!outcome) {
        if (!controller_ready(&c, 0)) {
            controller_sleep(&c, &sleeper, 0);
            continue;
        }
        outcome = controller_fetch(&c, &command);
        if (!outcome)
            outcome = deliver(s, controller_buffer(&c, &command), command.length);
        if (!outcome)
            outcome = controller_complete(&c, &command, 0, &backlog);
    }
    return outcome;
}

int answer_receives(struct station *s) {
    struct controller c = {.s = s, .opcode = RECV, .phase = 1};
    struct sleeper sleeper;
    struct command command;
    uint32_t size, backlog, half = (s->entries - 1) / 2;
    int outcome = sleeper_open(&sleeper, s);
    while (!outcome) {
        if (!controller_ready(&c, 0)) {
            count(s, FULL, 1);
            controller_sleep(&c, &sleeper, half);
            continue;
        }
        outcome = controller_fetch(&c, &command);
        if (!outcome && command.length != s->buffer_size) /* a TUN cuts what does not fit */
            outcome = FAIL(s, VIOLATION, "RECV for %u bytes; a buffer has %u", command.length, s->buffer_size);
        if (!outcome)
            outcome = read_packet(s, controller_buffer(&c, &command), &size);
        if (!outcome)
            outcome = controller_complete(&c, &command, size, &backlog);
        if (!outcome) {
            count(s, PACKETS, 1);
            count(s, BYTES, size);
            count(s, BACKLOG, backlog + 1);
        }
    }
    return outcome;
}

int engine_version(void) { return ENGINE_VERSION; }
