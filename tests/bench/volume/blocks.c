/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of a file, read or written and timed: what the volume's benchmark does with a mount.
 *
 *   blocks read  FILE BLOCK COUNT sequential|random SEED
 *   blocks write FILE BLOCK COUNT sync|nosync SEED
 *
 * read    COUNT blocks of BLOCK bytes, in order or in an order that follows from SEED, each block of the file once
 *         before the first comes again; of standard input if FILE is "-"
 * write   a new file of COUNT blocks whose contents follow from SEED, with an fsync or without
 *
 * Prints one JSON object: seconds from before open to after close, CPU seconds of this program in them, and a sum
 * over the first 8 bytes of each page that was read, which differ from page to page.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096 };

static void die(const char *what)
{
    fprintf(stderr, "blocks: %s: %s\n", what, errno ? strerror(errno) : "too short");
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu(void)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

static uint64_t state;

static uint64_t any(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static void *allocate(size_t size)
{
    void *space = malloc(size);
    if (!space)
        die("memory");
    return space;
}

static size_t *order_of(size_t blocks, int random)
{
    size_t *order = allocate(blocks * sizeof *order);
    for (size_t i = 0; i < blocks; i++)
        order[i] = i;
    for (size_t i = blocks; random && i > 1; i--) {
        size_t other = any() % i, kept = order[i - 1];
        order[i - 1] = order[other];
        order[other] = kept;
    }
    return order;
}

static int is_standard_input(const char *path)
{
    return !strcmp(path, "-");
}

static void read_blocks(const char *path, size_t block, size_t count, const size_t *order, size_t blocks, char *data,
                        uint64_t *sum)
{
    int file = is_standard_input(path) ? STDIN_FILENO : open(path, O_RDONLY);
    if (file < 0)
        die(path);
    for (size_t i = 0; i < count; i++) {
        off_t at = (off_t)(order[i % blocks] * block);
        for (size_t got = 0; got < block;) {
            ssize_t more = pread(file, data + got, block - got, at + (off_t)got);
            if (more <= 0)
                die(path);
            got += (size_t)more;
        }
        for (size_t page = 0; page < block; page += PAGE)
            *sum = *sum * 31 + *(uint64_t *)(data + page);
    }
    close(file);
}

static void write_blocks(const char *path, size_t block, size_t count, int sync, char *data)
{
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL, 0644);
    if (file < 0)
        die(path);
    for (size_t i = 0; i < count; i++) {
        for (size_t page = 0; page < block; page += PAGE)
            *(uint64_t *)(data + page) = any();
        for (size_t put = 0; put < block;) {
            ssize_t more = write(file, data + put, block - put);
            if (more <= 0)
                die(path);
            put += (size_t)more;
        }
    }
    if ((sync && fsync(file)) || close(file))
        die(path);
}

int main(int argc, char **argv)
{
    if (argc != 7)
        return fprintf(stderr, "blocks: wrong arguments\n"), 2;
    int reads = !strcmp(argv[1], "read");
    size_t block = strtoul(argv[3], NULL, 10), count = strtoul(argv[4], NULL, 10), blocks = 0, *order = NULL;
    state = strtoul(argv[6], NULL, 10) * 0x9E3779B97F4A7C15u | 1;
    uint64_t sum = 0, *data = allocate(block);
    for (size_t i = 0; i < block / sizeof *data; i++)
        data[i] = any();
    struct stat found;
    if (reads) {
        int asked = is_standard_input(argv[2]) ? fstat(STDIN_FILENO, &found) : stat(argv[2], &found);
        if (asked || !(blocks = (size_t)found.st_size / block))
            die(argv[2]);
        order = order_of(blocks, !strcmp(argv[5], "random"));
    }
    double cpu_before = cpu(), began = now();
    if (reads)
        read_blocks(argv[2], block, count, order, blocks, (char *)data, &sum);
    else
        write_blocks(argv[2], block, count, !strcmp(argv[5], "sync"), (char *)data);
    double seconds = now() - began, used = cpu() - cpu_before;
    printf("{\"seconds\": %.9f, \"cpu\": %.6f, \"sum\": %llu}\n", seconds, used, (unsigned long long)sum);
    return 0;
}
