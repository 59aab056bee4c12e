/* SPDX-License-Identifier: Apache-2.0 */
/* Carries packets between two TUN interfaces and does nothing else: the limit of what any tunnel over TUN can do.
 *
 *   relay NETNS INTERFACE VNET_HEADER OFFLOADS THREADS
 *
 * Makes INTERFACE in the present network namespace and in the one that the file NETNS names, with vnet headers of
 * VNET_HEADER bytes and the TUN_F_* bits OFFLOADS, prints "ready", and copies packets until it is killed: in one loop
 * over both if THREADS is 1, in a thread per direction if it is 2.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { LARGEST = 128 << 10, BURST = 64 };

static int ends[2];

static void die(const char *what)
{
    fprintf(stderr, "relay: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int make_tun(const char *name, int vnet_header, unsigned long offloads, int blocking)
{
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    int tun = open("/dev/net/tun", O_RDWR | (blocking ? 0 : O_NONBLOCK));
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (tun < 0 || ioctl(tun, TUNSETIFF, &request))
        die("TUN");
    if (ioctl(tun, TUNSETVNETHDRSZ, &vnet_header) || ioctl(tun, TUNSETOFFLOAD, offloads))
        die("offloads");
    return tun;
}

/* One packet from FROM to TO; what TO refuses is lost, as in any tunnel. False if there was none. */
static int carry(int from, int to, char *packet)
{
    ssize_t size = read(from, packet, LARGEST);
    if (size < 0 && errno != EAGAIN)
        die("read");
    if (size > 0 && write(to, packet, size) < 0 && errno == EBADFD)
        die("write");
    return size > 0;
}

static void both_ways(void)
{
    static char packet[LARGEST];
    struct pollfd polled[2] = {{ends[0], POLLIN, 0}, {ends[1], POLLIN, 0}};
    while (poll(polled, 2, -1) > 0)
        for (int i = 0; i < 2; i++)
            for (int n = 0; polled[i].revents && n < BURST && carry(ends[i], ends[!i], packet); n++)
                ;
}

static void *one_way(void *from)
{
    static __thread char packet[LARGEST];
    int *end = from;
    for (;;)
        carry(*end, ends[end == ends], packet);
    return NULL;
}

static void a_thread_each(void)
{
    pthread_t other;
    if (pthread_create(&other, NULL, one_way, &ends[1]))
        die("thread");
    one_way(&ends[0]);
}

int main(int argc, char **argv)
{
    if (argc != 6) {
        fputs("relay NETNS INTERFACE VNET_HEADER OFFLOADS THREADS\n", stderr);
        return 2;
    }
    int threads = atoi(argv[5]) == 2;
    int there = open(argv[1], O_RDONLY);
    ends[0] = make_tun(argv[2], atoi(argv[3]), atol(argv[4]), threads);
    if (there < 0 || setns(there, CLONE_NEWNET))
        die(argv[1]);
    ends[1] = make_tun(argv[2], atoi(argv[3]), atol(argv[4]), threads);
    puts("ready");
    fflush(stdout);
    threads ? a_thread_each() : both_ways();
    return 0;
}
