/* SPDX-License-Identifier: Apache-2.0 */
/* Traffic between two programs, counted: what the benchmarks send over a path.
 *
 *   traffic ROLE listen|connect ADDRESS PORT STREAMS BEGIN SECONDS
 *
 * From BEGIN (s on CLOCK_MONOTONIC; 0: once all is connected) for SECONDS:
 *   send, receive   TCP bytes over STREAMS connections
 *   ping, echo      64 bytes there and back over one TCP connection, one after the other
 *   flood, drain    UDP datagrams of 64 bytes, as fast as they go with at most WINDOW under way: without a limit
 *                   the sender takes the processor from those who carry, and the figure is the scheduler's
 *
 * A listener prints "listening" once it is. Each prints one JSON object: what it sent or received (bytes or
 * packets; *_in_time: within the window that begins WARM seconds after BEGIN), and its own CPU seconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_STREAMS = 64, CHUNK = 256 << 10, SMALL = 64, BATCH = 64, MAX_PINGS = 1 << 20, WINDOW = 256, PATIENCE = 20 };
static const double WARM = 0.15, SILENCE = 0.2;

static char buffer[CHUNK];
static double begin, seconds, end;

static void die(const char *what)
{
    fprintf(stderr, "traffic: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* Those who wait for one another begin together, those who begin at a time sleep until then. */
static void start_clock(void)
{
    begin = begin > 0 ? begin : now();
    end = begin + seconds;
}

static void sleep_until(double when)
{
    struct timespec t = {(time_t)when, (long)((when - (time_t)when) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

static struct sockaddr_in address(const char *host, const char *port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(port))};
    if (inet_pton(AF_INET, host, &a.sin_addr) != 1)
        die(host);
    return a;
}

static int make(int type, const struct sockaddr_in *to_bind)
{
    int one = 1, sock = socket(AF_INET, type, 0);
    if (sock < 0)
        die("socket");
    setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (to_bind && bind(sock, (const void *)to_bind, sizeof *to_bind))
        die("bind");
    return sock;
}

static void open_streams(int listens, struct sockaddr_in where, int *socks, int count)
{
    int one = 1, listener = -1;
    if (listens) {
        listener = make(SOCK_STREAM, &where);
        if (listen(listener, MAX_STREAMS))
            die("listen");
        puts("listening");
        fflush(stdout);
    }
    for (int i = 0; i < count; i++) {
        socks[i] = listens ? accept(listener, NULL, NULL) : make(SOCK_STREAM, NULL);
        if (socks[i] < 0)
            die("accept");
        if (!listens && connect(socks[i], (void *)&where, sizeof where))
            die("connect");
        setsockopt(socks[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    if (listens)
        close(listener);
    start_clock();
}

static void report(const char *format, double a, double b, double c)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    printf("{");
    printf(format, a, b, c);
    printf(", \"user\": %.6f, \"system\": %.6f}\n", used.ru_utime.tv_sec + used.ru_utime.tv_usec * 1e-6,
           used.ru_stime.tv_sec + used.ru_stime.tv_usec * 1e-6);
    fflush(stdout);
}

/* Ends only after the receivers have taken the last byte and closed. */
static void send_bytes(int *socks, int count)
{
    struct pollfd polled[MAX_STREAMS];
    double sent = 0;
    for (int i = 0; i < count; i++)
        polled[i] = (struct pollfd){socks[i], POLLOUT, 0};
    sleep_until(begin);
    while (now() < end) {
        poll(polled, count, 100);
        for (int i = 0; i < count; i++) {
            if (!polled[i].revents)
                continue;
            ssize_t n = send(socks[i], buffer, CHUNK, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n < 0 && errno != EAGAIN)
                die("send");
            sent += n > 0 ? n : 0;
        }
    }
    for (int i = 0; i < count; i++)
        shutdown(socks[i], SHUT_WR);
    for (int i = 0; i < count; i++)
        while (recv(socks[i], buffer, CHUNK, 0) > 0)
            ;
    report("\"bytes\": %.0f", sent, 0, 0);
}

static void receive_bytes(int *socks, int count)
{
    struct pollfd polled[MAX_STREAMS];
    double total = 0, in_time = 0;
    int open = count;
    for (int i = 0; i < count; i++)
        polled[i] = (struct pollfd){socks[i], POLLIN, 0};
    while (open) {
        poll(polled, count, -1);
        double time = now();
        for (int i = 0; i < count; i++) {
            if (!polled[i].revents)
                continue;
            ssize_t n = recv(socks[i], buffer, CHUNK, MSG_DONTWAIT);
            if (n < 0 && errno != EAGAIN)
                die("receive");
            if (n == 0) {
                polled[i].fd = -1;
                open--;
            }
            total += n > 0 ? n : 0;
            in_time += n > 0 && time >= begin + WARM && time < end ? n : 0;
        }
    }
    report("\"bytes\": %.0f, \"bytes_in_time\": %.0f, \"seconds_in_time\": %.6f", total, in_time, end - begin - WARM);
}

static int exchange(int sock, int receives)
{
    for (size_t done = 0; done < SMALL;) {
        ssize_t n = receives ? recv(sock, buffer + done, SMALL - done, 0) : send(sock, buffer, SMALL, MSG_NOSIGNAL);
        if (n <= 0)
            return 0;
        done += n;
    }
    return 1;
}

static void echo(int sock)
{
    double count = 0;
    while (exchange(sock, 1) && exchange(sock, 0))
        count++;
    report("\"packets\": %.0f", count, 0, 0);
}

static int ascending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void ping(int sock)
{
    static float times[MAX_PINGS];
    int count = 0;
    sleep_until(begin);
    for (double last = now(); last < end && count < MAX_PINGS; count++) {
        if (!exchange(sock, 0) || !exchange(sock, 1))
            die("the echo is gone");
        double time = now();
        times[count] = (float)((time - last) * 1e6);
        last = time;
    }
    qsort(times, count, sizeof *times, ascending);
    report("\"packets\": %.0f, \"p50_us\": %.2f, \"p99_us\": %.2f", count, times[count / 2], times[count * 99 / 100]);
}

static void fill(struct mmsghdr *messages, struct iovec *parts, char (*space)[SMALL])
{
    memset(messages, 0, BATCH * sizeof *messages);
    for (int i = 0; i < BATCH; i++) {
        parts[i] = (struct iovec){space[i], SMALL};
        messages[i].msg_hdr.msg_iov = &parts[i];
        messages[i].msg_hdr.msg_iovlen = 1;
    }
}

struct flight {
    double sent, received, lost;
};

/* How many datagrams are under way, by the receiver's counts; waits for those if the window is full. What is not
 * counted within PATIENCE ms is lost.
 */
static double under_way(int sock, struct flight *f)
{
    double count;
    struct pollfd polled = {sock, POLLIN, 0};
    if (f->sent - f->received - f->lost > WINDOW - BATCH && poll(&polled, 1, PATIENCE) == 0)
        f->lost = f->sent - f->received;
    while (recv(sock, &count, sizeof count, MSG_DONTWAIT) == sizeof count)
        f->received = count > f->received ? count : f->received;
    return f->sent - f->received - f->lost;
}

static void flood(struct sockaddr_in where)
{
    static struct mmsghdr messages[BATCH];
    static struct iovec parts[BATCH];
    static char space[BATCH][SMALL];
    struct flight flight = {0, 0, 0};
    int sock = make(SOCK_DGRAM, NULL);
    if (connect(sock, (void *)&where, sizeof where))
        die("connect");
    fill(messages, parts, space);
    start_clock();
    sleep_until(begin);
    while (now() < end) {
        if (under_way(sock, &flight) > WINDOW - BATCH)
            continue;
        int n = sendmmsg(sock, messages, BATCH, 0);
        if (n < 0 && errno != ENOBUFS && errno != EAGAIN)
            die("sendmmsg");
        flight.sent += n > 0 ? n : 0;
    }
    report("\"packets\": %.0f, \"lost\": %.0f", flight.sent, flight.lost, 0);
}

static void drain(struct sockaddr_in where)
{
    static struct mmsghdr messages[BATCH];
    static struct iovec parts[BATCH];
    static char space[BATCH][SMALL];
    static struct sockaddr_in from;
    double total = 0, in_time = 0, time;
    int sock = make(SOCK_DGRAM, &where), room = 4 << 20;
    setsockopt(sock, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    puts("listening");
    fflush(stdout);
    fill(messages, parts, space);
    messages[0].msg_hdr.msg_name = &from;
    poll(&(struct pollfd){sock, POLLIN, 0}, 1, -1);
    start_clock();
    while ((time = now()) < end + SILENCE) {
        struct pollfd polled = {sock, POLLIN, 0};
        messages[0].msg_hdr.msg_namelen = sizeof from;
        if (poll(&polled, 1, 50) <= 0)
            continue;
        int n = recvmmsg(sock, messages, BATCH, MSG_DONTWAIT, NULL);
        if (n <= 0)
            continue;
        total += n;
        in_time += time >= begin + WARM && time < end ? n : 0;
        sendto(sock, &total, sizeof total, MSG_DONTWAIT, (void *)&from, sizeof from);
    }
    report("\"packets\": %.0f, \"packets_in_time\": %.0f, \"seconds_in_time\": %.6f", total, in_time,
           end - begin - WARM);
}

int main(int argc, char **argv)
{
    int socks[MAX_STREAMS];
    if (argc != 8 || atoi(argv[5]) > MAX_STREAMS) {
        fputs("traffic ROLE listen|connect ADDRESS PORT STREAMS BEGIN SECONDS\n", stderr);
        return 2;
    }
    const char *role = argv[1];
    struct sockaddr_in where = address(argv[3], argv[4]);
    begin = atof(argv[6]);
    seconds = atof(argv[7]);
    if (!strcmp(role, "flood")) {
        flood(where);
        return 0;
    }
    if (!strcmp(role, "drain")) {
        drain(where);
        return 0;
    }
    open_streams(!strcmp(argv[2], "listen"), where, socks, atoi(argv[5]));
    if (!strcmp(role, "send"))
        send_bytes(socks, atoi(argv[5]));
    else if (!strcmp(role, "receive"))
        receive_bytes(socks, atoi(argv[5]));
    else if (!strcmp(role, "ping"))
        ping(socks[0]);
    else
        echo(socks[0]);
    return 0;
}
