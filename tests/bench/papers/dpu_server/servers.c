// SPDX-License-Identifier: Apache-2.0
// One round of the servers and clients of "Performance Improvement of Federated Learning Server using Smart NIC" (2023),
// sections 3 and 4. By TCP a thread for each client receives a vector; when all have come, the threads add them. By UDP
// each thread has a socket and the clients with numbers i, i + threads, ...; it adds what comes at once. All add to one vector, with an atomic
// addition for each value or racing.
//
// A datagram is an index of 4 bytes and up to 367 float32; the four words are indices alone. Nothing is sent again but
// words. The paper's receiving and sending threads and their rings are the kernel's here, as are the queues of a card:
// receive buffers that hold a whole round. Many datagrams pass the kernel at once (UDP_SEGMENT, UDP_GRO), as TCP's
// segments do.

#define _GNU_SOURCE
#include "shared_vector.c"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { VALUES = 367, BATCH = 16, BUFFER = 65536, TRAIN = 44, MOST_CLIENTS = 64, MOST_THREADS = 16, AGAIN_MS = 50 };
enum { START = 0xFFFFFFF0u, START_ACK, END, END_ACK };
enum { UDP = 1, LOCKED = 2, SPINS = 4, PINNED = 8 };

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

struct packet { uint32_t index; float values[VALUES]; };

// What a socket has received: `count` datagrams, whose places and senders are beside each other.
struct arrivals {
    uint32_t buffers[BATCH][BUFFER / 4];
    struct sockaddr_in from[BATCH], *senders[BATCH * (TRAIN + 1)];
    const struct packet *packets[BATCH * (TRAIN + 1)];
    int count;
};

static __thread struct arrivals taken;

struct server {
    const int *sockets;   // TCP: of the clients; UDP: of the threads
    float *sum, *mean;
    uint32_t *counts;     // UDP: clients whose values of a datagram have come
    size_t size;
    int clients, threads, how;
    double *times;        // until the START, until all ENDs, until the mean
    pthread_mutex_t mutex;
    pthread_barrier_t barrier;
    _Atomic uint64_t accepted;
    _Atomic int failed;
};

struct server_thread { struct server *server; int number; };

struct client {
    const float *vector;
    float *mean;
    size_t size;
    int socket, how;
    uint64_t dropped, seed, came; // of 2^32 datagrams of the mean, so many are dropped
    double seconds;
    int failed;
};

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static uint32_t blocks_of(size_t size) { return (uint32_t)((size + VALUES - 1) / VALUES); }

static size_t length_of(size_t size, uint32_t index)
{
    size_t left = size - (size_t)index * VALUES;
    return left < VALUES ? left : VALUES;
}

static void note(struct server *server, int which, int first)
{
    double at = now();
    pthread_mutex_lock(&server->mutex);
    if (!server->times[which] || (at < server->times[which]) == first)
        server->times[which] = at;
    pthread_mutex_unlock(&server->mutex);
}

static void add(const struct server *server, size_t at, const float *values, size_t count)
{
    (server->how & LOCKED ? add_locked : add_racing)(server->sum + at, values, count);
}

// The mean, by one thread: over the clients, or over those whose values have come.
static void divide(struct server *server, int number)
{
    pthread_barrier_wait(&server->barrier);
    if (!number) {
        for (size_t i = 0; i < server->size; i++) {
            uint32_t count = server->how & UDP ? server->counts[i / VALUES] : (uint32_t)server->clients;
            server->mean[i] = count ? server->sum[i] / (float)count : 0;
        }
        server->times[2] = now();
    }
    pthread_barrier_wait(&server->barrier);
}

static int transfer(int fd, void *data, size_t size, int sends)
{
    for (size_t done = 0; done < size;) {
        char *at = (char *)data + done;
        ssize_t count = sends ? send(fd, at, size - done, MSG_NOSIGNAL) : recv(fd, at, size - done, 0);
        if (count <= 0)
            return -1;
        done += (size_t)count;
    }
    return 0;
}

static void serve_tcp(struct server *server, int number, float *vector)
{
    int fd = server->sockets[number];
    char start;
    server->failed |= transfer(fd, &start, 1, 0);
    note(server, 0, 1);
    server->failed |= transfer(fd, vector, 4 * server->size, 0);
    note(server, 1, 0);
    pthread_barrier_wait(&server->barrier); // on a link that all share evenly all come at once
    add(server, 0, vector, server->size);
    divide(server, number);
    server->failed |= transfer(fd, server->mean, 4 * server->size, 1);
}

static uint32_t segment_of(struct msghdr *message, uint32_t length)
{
    int size = 0;
    for (struct cmsghdr *each = CMSG_FIRSTHDR(message); each; each = CMSG_NXTHDR(message, each))
        if (each->cmsg_level == SOL_UDP && each->cmsg_type == UDP_GRO)
            memcpy(&size, CMSG_DATA(each), sizeof size);
    return size ? (uint32_t)size : length;
}

// Takes what has come to `taken`; waits at most `wait` ms for the first datagram, unless the thread spins.
static void take_batch(int fd, int how, int wait)
{
    struct mmsghdr messages[BATCH];
    struct iovec parts[BATCH];
    union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr aligned; } control[BATCH];
    struct pollfd waited = {fd, POLLIN, 0};
    double until = now() + 1e-3 * wait;
    int count;
    for (taken.count = 0;;) {
        for (int i = 0; i < BATCH; i++) {
            parts[i] = (struct iovec){taken.buffers[i], BUFFER};
            messages[i].msg_hdr = (struct msghdr){&taken.from[i], sizeof taken.from[i], &parts[i], 1, &control[i],
                                                  sizeof control[i], 0};
        }
        count = recvmmsg(fd, messages, BATCH, MSG_DONTWAIT, NULL);
        if (count >= 0)
            break;
        if (how & SPINS ? now() > until : poll(&waited, 1, wait) == 0)
            return;
    }
    for (int i = 0; i < count; i++) {
        uint32_t length = messages[i].msg_len, size = segment_of(&messages[i].msg_hdr, length);
        for (uint32_t at = 0; at < length && taken.count < BATCH * (TRAIN + 1); at += size) {
            taken.senders[taken.count] = &taken.from[i];
            taken.packets[taken.count++] = (const struct packet *)((const char *)taken.buffers[i] + at);
        }
    }
}

static void say(int fd, const struct sockaddr_in *to, uint32_t word)
{
    sendto(fd, &word, sizeof word, 0, (const struct sockaddr *)to, to ? sizeof *to : 0);
}

// Sends a vector in datagrams, to a connected socket without `to`.
static void send_values(int fd, const struct sockaddr_in *to, const float *vector, size_t size)
{
    static __thread struct packet packets[TRAIN];
    uint32_t blocks = blocks_of(size);
    for (uint32_t first = 0; first < blocks;) {
        uint32_t count = 0;
        size_t length = 0;
        for (; count < TRAIN && first + count < blocks; count++) {
            size_t values = length_of(size, first + count);
            packets[count].index = first + count;
            memcpy(packets[count].values, vector + (size_t)(first + count) * VALUES, 4 * values);
            length += 4 + 4 * values;
        }
        union { char bytes[CMSG_SPACE(sizeof(uint16_t))]; struct cmsghdr aligned; } control = {{0}};
        struct iovec part = {packets, length};
        struct msghdr message = {(void *)to, to ? sizeof *to : 0, &part, 1, &control, sizeof control, 0};
        struct cmsghdr *option = CMSG_FIRSTHDR(&message);
        *option = (struct cmsghdr){CMSG_LEN(sizeof(uint16_t)), SOL_UDP, UDP_SEGMENT};
        memcpy(CMSG_DATA(option), &(uint16_t){sizeof(struct packet)}, sizeof(uint16_t));
        if (sendmsg(fd, &message, 0) > 0)
            first += count;
        else if (errno != ENOBUFS && errno != EAGAIN)
            return;
    }
}

static int of_port(const struct sockaddr_in *clients, int count, in_port_t port)
{
    for (int i = 0; i < count; i++)
        if (clients[i].sin_port == port)
            return i;
    return -1;
}

// Takes the vectors of a thread's clients. Returns how many have come, with their addresses.
static int take_vectors(struct server *server, int fd, int expected, struct sockaddr_in *clients)
{
    int known = 0, ended[MOST_CLIENTS] = {0}, left = expected;
    double until = now() + 60;
    while (left && now() < until) {
        take_batch(fd, server->how, 1000);
        for (int i = 0; i < taken.count; i++) {
            const struct packet *packet = taken.packets[i];
            const struct sockaddr_in *from = taken.senders[i];
            uint32_t index = packet->index;
            int client = of_port(clients, known, from->sin_port);
            if (index == START) {
                if (client < 0 && known < expected)
                    clients[known++] = *from;
                note(server, 0, 1);
                say(fd, from, START_ACK);
            } else if (index == END && client >= 0) {
                say(fd, from, END_ACK);
                left -= !ended[client];
                ended[client] = 1;
            } else if (client >= 0 && index < blocks_of(server->size)) {
                add(server, (size_t)index * VALUES, packet->values, length_of(server->size, index));
                __atomic_fetch_add(&server->counts[index], 1, __ATOMIC_RELAXED);
                server->accepted++;
            }
        }
    }
    return left ? -1 : known;
}

// Says a word to one client until it answers; other clients' words are answered meanwhile. Returns 0, or -1.
static int ask(int fd, const struct sockaddr_in *to, uint32_t word, uint32_t answer)
{
    for (int attempt = 0; attempt < 200; attempt++) {
        say(fd, to, word);
        take_batch(fd, 0, AGAIN_MS);
        for (int i = 0; i < taken.count; i++) {
            if (taken.packets[i]->index == END)
                say(fd, taken.senders[i], END_ACK);
            if (taken.packets[i]->index == answer && taken.senders[i]->sin_port == to->sin_port)
                return 0;
        }
    }
    return -1;
}

static void serve_udp(struct server *server, int number)
{
    struct sockaddr_in clients[MOST_CLIENTS];
    int fd = server->sockets[number], expected = 0;
    for (int i = number; i < server->clients; i += server->threads)
        expected++;
    int known = take_vectors(server, fd, expected, clients);
    server->failed |= known < 0;
    note(server, 1, 0);
    divide(server, number);
    for (int i = 0; i < known; i++) {
        server->failed |= ask(fd, &clients[i], START, START_ACK);
        send_values(fd, &clients[i], server->mean, server->size);
        server->failed |= ask(fd, &clients[i], END, END_ACK);
    }
}

static void *serve(void *argument)
{
    struct server_thread *thread = argument;
    struct server *server = thread->server;
    if (server->how & PINNED) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(thread->number % sysconf(_SC_NPROCESSORS_ONLN), &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    }
    if (server->how & UDP) {
        serve_udp(server, thread->number);
        return NULL;
    }
    float *vector = malloc(4 * server->size);
    serve_tcp(server, thread->number, vector);
    free(vector);
    return NULL;
}

// One round. `times` has three seconds of a clock: the first START, the last END, the mean. Returns how many datagrams
// came, or -1.
long run_server(const int *sockets, int clients, int threads, int how, float *sum, float *mean, uint32_t *counts,
                size_t size, double *times)
{
    struct server server = {sockets, sum, mean, counts, size, clients, threads, how, times,
                            PTHREAD_MUTEX_INITIALIZER, {{0}}, 0, 0};
    struct server_thread arguments[MOST_THREADS];
    pthread_t started[MOST_THREADS];
    memset(sum, 0, 4 * size);
    memset(counts, 0, sizeof *counts * blocks_of(size));
    memset(times, 0, 3 * sizeof *times);
    pthread_barrier_init(&server.barrier, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++) {
        arguments[i] = (struct server_thread){&server, i};
        pthread_create(&started[i], NULL, serve, &arguments[i]);
    }
    for (int i = 0; i < threads; i++)
        pthread_join(started[i], NULL);
    pthread_barrier_destroy(&server.barrier);
    return server.failed ? -1 : (long)server.accepted;
}

static uint32_t drawn(uint64_t *seed) // xorshift64*
{
    *seed ^= *seed >> 12, *seed ^= *seed << 25, *seed ^= *seed >> 27;
    return (uint32_t)(*seed * 0x2545F4914F6CDD1Dull >> 32);
}

static int await(int fd, uint32_t word, uint32_t answer)
{
    for (int attempt = 0; attempt < 600; attempt++) {
        say(fd, NULL, word);
        take_batch(fd, 0, 2 * AGAIN_MS);
        for (int i = 0; i < taken.count; i++) {
            if (taken.packets[i]->index == answer)
                return 0;
            if (taken.packets[i]->index == END) // of the round before: its END_ACK was lost
                say(fd, NULL, END_ACK);
        }
    }
    return -1;
}

static void take_mean(struct client *client)
{
    double until = now() + 60;
    while (now() < until) {
        take_batch(client->socket, 0, 1000);
        for (int i = 0; i < taken.count; i++) {
            uint32_t index = taken.packets[i]->index;
            if (index == START)
                say(client->socket, NULL, START_ACK);
            if (index == END) {
                say(client->socket, NULL, END_ACK);
                return;
            }
            if (index >= blocks_of(client->size) || drawn(&client->seed) < client->dropped)
                continue;
            size_t values = length_of(client->size, index);
            memcpy(client->mean + (size_t)index * VALUES, taken.packets[i]->values, 4 * values);
            client->came++;
        }
    }
    client->failed = 1;
}

static void *participate(void *argument)
{
    struct client *client = argument;
    double began = now();
    memcpy(client->mean, client->vector, 4 * client->size); // kept where nothing comes
    if (client->how & UDP) {
        client->failed |= await(client->socket, START, START_ACK);
        send_values(client->socket, NULL, client->vector, client->size);
        client->failed |= await(client->socket, END, END_ACK);
        take_mean(client);
    } else {
        client->failed |= transfer(client->socket, &(char){1}, 1, 1);
        client->failed |= transfer(client->socket, (void *)client->vector, 4 * client->size, 1);
        client->failed |= transfer(client->socket, client->mean, 4 * client->size, 0);
    }
    client->seconds = now() - began;
    return NULL;
}

// One round of all clients, a thread each: vectors[i] goes out, and means[i] is what the client has then. `dropped` of
// 2^32 datagrams of the mean are dropped. Returns the datagrams of the mean that came, or -1.
long run_clients(const int *sockets, int count, int how, const float *vectors, float *means, size_t size,
                 uint64_t dropped, uint64_t seed, double *seconds)
{
    struct client clients[MOST_CLIENTS];
    pthread_t started[MOST_CLIENTS];
    long came = 0;
    int failed = 0;
    for (int i = 0; i < count; i++) {
        clients[i] = (struct client){vectors + (size_t)i * size, means + (size_t)i * size, size, sockets[i], how,
                                     dropped, (seed * MOST_CLIENTS + (uint64_t)i + 1) * 0x9E3779B97F4A7C15u, 0, 0, 0};
        pthread_create(&started[i], NULL, participate, &clients[i]);
    }
    for (int i = 0; i < count; i++) {
        pthread_join(started[i], NULL);
        failed |= clients[i].failed;
        came += (long)clients[i].came;
        seconds[i] = clients[i].seconds;
    }
    return failed ? -1 : came;
}
