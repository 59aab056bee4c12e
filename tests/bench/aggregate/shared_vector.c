// SPDX-License-Identifier: Apache-2.0
// The servers of "Performance Improvement of Federated Learning Server using Smart NIC" (2023), over TCP: threads that
// have some clients each and add what comes to one vector that they share, with a lock for each value or without one.
// Without one the threads race, and some additions are lost.

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>

enum { CHUNK = 1 << 16 };

struct shared {
    float *mean;
    float *sum;
    size_t size;
    const int *clients;
    int count, threads, locked;
    pthread_barrier_t barrier;
    _Atomic int failed;
};

struct thread {
    struct shared *shared;
    int number;
};

static void add_locked(float *sum, const float *values, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        _Atomic uint32_t *place = (_Atomic uint32_t *)&sum[i];
        uint32_t before = atomic_load_explicit(place, memory_order_relaxed), after;
        do {
            float value;
            memcpy(&value, &before, 4);
            value += values[i];
            memcpy(&after, &value, 4);
        } while (!atomic_compare_exchange_weak_explicit(place, &before, after, memory_order_relaxed,
                                                        memory_order_relaxed));
    }
}

static void add_racing(float *sum, const float *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        sum[i] += values[i];
}

static int take(struct shared *shared, int client)
{
    static __thread float buffer[CHUNK];
    size_t done = 0;
    while (done < shared->size) {
        size_t wanted = shared->size - done < CHUNK ? shared->size - done : CHUNK;
        for (size_t got = 0; got < 4 * wanted;) {
            ssize_t count = recv(client, (char *)buffer + got, 4 * wanted - got, 0);
            if (count <= 0)
                return -1;
            got += (size_t)count;
        }
        (shared->locked ? add_locked : add_racing)(shared->sum + done, buffer, wanted);
        done += wanted;
    }
    return 0;
}

static int give(const struct shared *shared, int client)
{
    for (size_t sent = 0; sent < 4 * shared->size;) {
        ssize_t count = send(client, (const char *)shared->mean + sent, 4 * shared->size - sent, MSG_NOSIGNAL);
        if (count <= 0)
            return -1;
        sent += (size_t)count;
    }
    return 0;
}

static void *run(void *argument)
{
    struct thread *thread = argument;
    struct shared *shared = thread->shared;
    for (int i = thread->number; i < shared->count; i += shared->threads)
        if (give(shared, shared->clients[i]))
            shared->failed = 1;
    for (int i = thread->number; i < shared->count; i += shared->threads)
        if (take(shared, shared->clients[i]))
            shared->failed = 1;
    pthread_barrier_wait(&shared->barrier);
    if (!thread->number)
        for (size_t i = 0; i < shared->size; i++)
            shared->mean[i] = shared->sum[i] / (float)shared->count;
    return NULL;
}

// One round: gives the mean of the last one to all clients, and takes their vectors. Returns 0, or -1 if one has gone.
int serve_round(float *mean, float *sum, size_t size, const int *clients, int count, int threads, int locked)
{
    struct shared shared = {mean, sum, size, clients, count, threads, locked, {{0}}, 0};
    pthread_t started[16];
    struct thread arguments[16];
    memset(sum, 0, 4 * size);
    pthread_barrier_init(&shared.barrier, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++) {
        arguments[i] = (struct thread){&shared, i};
        pthread_create(&started[i], NULL, run, &arguments[i]);
    }
    for (int i = 0; i < threads; i++)
        pthread_join(started[i], NULL);
    pthread_barrier_destroy(&shared.barrier);
    return shared.failed ? -1 : 0;
}
