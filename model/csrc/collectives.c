/*
 * Collectives between processes of one host, over a memory segment that all of them have mapped.
 *
 * The segment holds one line of counters per rank, then two slots ("even" and "odd") per rank. Every operation is a
 * row of turns. In turn k a rank
 *   1. writes what it has to say into its own slot of parity k & 1,
 *   2. publishes k in its counter (release) and waits until every other rank's counter has reached k (acquire),
 *   3. may read all slots of parity k & 1.
 * One wait per turn is enough: who writes for turn k + 2 has seen everybody arrive in turn k + 1, so nobody still
 * reads what lay there for turn k.
 *
 * Every rank holds a POSIX record lock on byte `rank` of the segment's file. The kernel drops it when the process
 * dies, even while it is a zombie, and a pid used again can't be mistaken for it.
 *
 * Functions return 0, or (reason << 8 | rank) with a reason from `enum failure`.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "half.h"
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

enum { MAX_RANKS = 128, LINE = 64, PAGE = 4096, TILE = 512 };
enum failure { DIED = 1, CLOSED = 2, TIMED_OUT = 3, NOT_YET = 4 };
enum dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "counters shared between processes must be lock-free");

static const double YIELD_S = 1e-3;  /* how long a wait yields its core before it sleeps */
static const double SLEEP_S = 0.1;   /* how often a sleeper looks whether its peers still live */
static const size_t SPLIT_BYTES = 64 * 1024; /* from here on more than two ranks share the work of summing */

typedef struct {
    _Alignas(LINE) _Atomic uint32_t arrived; /* last turn this rank has published; wraps around */
    _Atomic uint32_t sleepers;               /* how many ranks sleep on `arrived` */
    _Atomic uint32_t closed;
} rank_line;

typedef struct communicator {
    rank_line *lines;
    unsigned char *slots;
    size_t slot_bytes;
    int rank, world, file;
    uint32_t turn;
    double spin_s, timeout_s;
} communicator;

/* ---- waiting ---------------------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

static void sleep_on(_Atomic uint32_t *word, uint32_t seen) {
    struct timespec most = {0, (long)(SLEEP_S * 1e9)};
#if defined(__linux__) && defined(SYS_futex)
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &most, NULL, 0);
#else
    (void)word, (void)seen;
    most.tv_nsec = 1000000;
    nanosleep(&most, NULL);
#endif
}

static void wake(_Atomic uint32_t *word) {
#if defined(__linux__) && defined(SYS_futex)
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

static inline int reached(const communicator *c, int peer) {
    uint32_t arrived = atomic_load_explicit(&c->lines[peer].arrived, memory_order_acquire);
    return (int32_t)(arrived - c->turn) >= 0;
}

static int is_dead(const communicator *c, int peer) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = peer, .l_len = 1};
    return fcntl(c->file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

/* Whether some rank can never arrive in this turn. `probe` also asks the kernel who still lives. */
static int find_failure(const communicator *c, int probe) {
    int failure = 0;
    if (atomic_load(&c->lines[c->rank].closed)) return CLOSED << 8 | c->rank;
    for (int peer = 0; peer < c->world; peer++) {
        if (peer == c->rank || reached(c, peer)) continue;
        int closed = (int)atomic_load(&c->lines[peer].closed);
        if (!closed && !(probe && is_dead(c, peer))) continue;
        if (reached(c, peer)) continue; /* it arrived just before it left */
        if (!closed) return DIED << 8 | peer;
        if (!failure) failure = CLOSED << 8 | peer;
    }
    return failure;
}

static int wait_for(communicator *c, int peer, double *start, double spin_s, double yield_s, double limit_s) {
    rank_line *line = &c->lines[peer];
    if (reached(c, peer)) return 0;
    if (*start == 0) *start = now();
    while (now() - *start < spin_s)
        for (int i = 0; i < 16; i++) {
            relax();
            if (reached(c, peer)) return 0;
        }
    while (now() - *start < yield_s) {
        sched_yield();
        if (reached(c, peer)) return 0;
        int failure = find_failure(c, 0);
        if (failure) return failure;
    }
    for (;;) {
        uint32_t seen = atomic_load(&line->arrived);
        if ((int32_t)(seen - c->turn) >= 0) return 0;
        int failure = find_failure(c, 1);
        if (failure) return failure;
        if (now() - *start >= limit_s) return TIMED_OUT << 8 | peer;
        atomic_fetch_add(&line->sleepers, 1);
        sleep_on(&line->arrived, seen);
        atomic_fetch_sub(&line->sleepers, 1);
    }
}

static void arrive(communicator *c) {
    rank_line *own = &c->lines[c->rank];
    c->turn++;
    /* Sequentially consistent on both words: either we see the sleeper, or its futex call sees the new turn. */
    atomic_store(&own->arrived, c->turn);
    if (atomic_load(&own->sleepers)) wake(&own->arrived);
}

static int await(communicator *c) {
    double start = 0;
    for (int peer = 0; peer < c->world; peer++) {
        if (peer == c->rank) continue;
        int failure = wait_for(c, peer, &start, c->spin_s, YIELD_S, c->timeout_s);
        if (failure) return failure;
    }
    return 0;
}

static int take_turn(communicator *c) {
    arrive(c);
    return await(c);
}

/* Slot of a rank in turn `turn`. */
static inline unsigned char *slot(const communicator *c, int rank, uint32_t turn) {
    return c->slots + ((size_t)rank * 2 + (turn & 1)) * c->slot_bytes;
}

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* ---- sums in float32, rounded once to nearest even ---------------------------------------------------------- */

/* out[i] = sum over ranks 0, 1, ... of element first + i of their slots in turn `turn`. */
#define DEFINE_SUM(name, type)                                                                              \
    static void sum_##name(const communicator *c, uint32_t turn, size_t first, size_t count, void *out) {   \
        float total[TILE];                                                                                  \
        for (size_t at = 0; at < count; at += TILE) {                                                       \
            size_t n = least(TILE, count - at);                                                             \
            const type *in = (const type *)slot(c, 0, turn) + first + at;                                   \
            for (size_t i = 0; i < n; i++) total[i] = from_##name(in[i]);                                   \
            for (int rank = 1; rank < c->world; rank++) {                                                   \
                in = (const type *)slot(c, rank, turn) + first + at;                                        \
                for (size_t i = 0; i < n; i++) total[i] += from_##name(in[i]);                              \
            }                                                                                               \
            type *to = (type *)out + at;                                                                    \
            for (size_t i = 0; i < n; i++) to[i] = to_##name(total[i]);                                     \
        }                                                                                                   \
    }
DEFINE_SUM(float32, float)
DEFINE_SUM(bfloat16, uint16_t)
DEFINE_SUM(float16, uint16_t)

static void sum(const communicator *c, int dtype, uint32_t turn, size_t first, size_t count, void *out) {
    if (dtype == FLOAT32) sum_float32(c, turn, first, count, out);
    else if (dtype == BFLOAT16) sum_bfloat16(c, turn, first, count, out);
    else sum_float16(c, turn, first, count, out);
}

/* Each rank sums one part, and in a second turn takes the other parts from those who summed them. */
static int sum_shared(communicator *c, int dtype, size_t item, unsigned char *x, size_t count) {
    size_t part = (count + (size_t)c->world - 1) / (size_t)c->world;
    part = (part + 31) / 32 * 32;
    uint32_t turn = c->turn;
    size_t first = least(count, part * (size_t)c->rank);
    sum(c, dtype, turn, first, least(part, count - first), slot(c, c->rank, turn + 1) + first * item);
    int failure = take_turn(c);
    if (failure) return failure;
    for (int rank = 0; rank < c->world; rank++) {
        first = least(count, part * (size_t)rank);
        memcpy(x + first * item, slot(c, rank, turn + 1) + first * item, least(part, count - first) * item);
    }
    return 0;
}

/* ---- what Python calls --------------------------------------------------------------------------------------- */

static size_t head_bytes(int world) { return ((size_t)world * sizeof(rank_line) + PAGE - 1) / PAGE * PAGE; }

int coll_max_ranks(void) { return MAX_RANKS; }

/* `slot_bytes` is a multiple of the page size. A segment starts as zeros. */
int64_t coll_segment_bytes(int world, int64_t slot_bytes) {
    return (int64_t)head_bytes(world) + 2 * (int64_t)world * slot_bytes;
}

/* Takes this rank's lock on `file`; NULL and errno where that fails. */
communicator *coll_open(void *segment, int rank, int world, int64_t slot_bytes, int file, double spin_s,
                        double timeout_s) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    if (fcntl(file, F_SETLK, &lock) != 0) return NULL;
    communicator *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->lines = segment;
    c->slots = (unsigned char *)segment + head_bytes(world);
    c->slot_bytes = (size_t)slot_bytes;
    c->rank = rank, c->world = world, c->file = file;
    c->spin_s = spin_s, c->timeout_s = timeout_s;
    return c;
}

/* No other call may be running. */
void coll_free(communicator *c) { free(c); }

/* This rank takes part in nothing more; may be called while another thread of it waits. */
void coll_close(communicator *c) {
    atomic_store(&c->lines[c->rank].closed, 1);
    for (int rank = 0; rank < c->world; rank++) wake(&c->lines[rank].arrived);
}

int coll_barrier(communicator *c) { return take_turn(c); }

int coll_all_reduce(communicator *c, void *data, int64_t elements, int dtype) {
    size_t item = dtype == FLOAT32 ? 4 : 2, left = (size_t)elements, most = c->slot_bytes / item;
    unsigned char *x = data;
    while (left > 0) {
        size_t count = least(left, most);
        memcpy(slot(c, c->rank, c->turn + 1), x, count * item);
        int failure = take_turn(c);
        if (failure) return failure;
        if (c->world > 2 && count * item >= SPLIT_BYTES) {
            failure = sum_shared(c, dtype, item, x, count);
            if (failure) return failure;
        } else {
            sum(c, dtype, c->turn, 0, count, x);
        }
        x += count * item, left -= count;
    }
    return 0;
}

/* Copies bytes [at, at + size) of a matrix with rows of `row` bytes to their places in rows of `stride` bytes. */
static void place(unsigned char *out, size_t stride, size_t row, size_t at, const unsigned char *from, size_t size) {
    while (size > 0) {
        size_t column = at % row, n = least(row - column, size);
        memcpy(out + at / row * stride + column, from, n);
        at += n, from += n, size -= n;
    }
}

/* x: `rows` rows of row_bytes[rank] bytes. out, on rank 0: `rows` rows, the ranks' rows side by side. */
int coll_gather(communicator *c, const void *x, int64_t rows, const int64_t *row_bytes, void *out) {
    size_t stride = 0, most = 0;
    for (int rank = 0; rank < c->world; rank++) {
        stride += (size_t)row_bytes[rank];
        if ((size_t)row_bytes[rank] > most) most = (size_t)row_bytes[rank];
    }
    most *= (size_t)rows;
    for (size_t at = 0; at < most; at += c->slot_bytes) {
        size_t own = (size_t)rows * (size_t)row_bytes[c->rank];
        if (at < own && c->rank != 0)
            memcpy(slot(c, c->rank, c->turn + 1), (const unsigned char *)x + at, least(own - at, c->slot_bytes));
        int failure = take_turn(c);
        if (failure) return failure;
        if (c->rank != 0) continue;
        size_t column = 0;
        for (int rank = 0; rank < c->world; rank++) {
            size_t row = (size_t)row_bytes[rank], size = (size_t)rows * row;
            const unsigned char *from = rank == 0 ? (const unsigned char *)x + at : slot(c, rank, c->turn);
            if (at < size) place((unsigned char *)out + column, stride, row, at, from, least(size - at, c->slot_bytes));
            column += row;
        }
    }
    return 0;
}

/* Rank 0's side of a broadcast: the length, on a line of its own, and the data. */
int coll_send(communicator *c, const void *data, int64_t bytes) {
    const unsigned char *from = data;
    size_t left = (size_t)bytes, offset = LINE;
    uint64_t length = (uint64_t)bytes;
    memcpy(slot(c, 0, c->turn + 1), &length, sizeof length);
    do {
        size_t n = least(left, c->slot_bytes - offset);
        if (n) memcpy(slot(c, 0, c->turn + 1) + offset, from, n);
        int failure = take_turn(c);
        if (failure) return failure;
        from += n, left -= n, offset = 0;
    } while (left > 0);
    return 0;
}

/* The other ranks' side: arrive, expect until it returns 0, then receive as many bytes as it wrote to *bytes. */
void coll_arrive(communicator *c) { arrive(c); }

/* Waits at most limit_s, so that the caller can serve signals: NOT_YET then. Only a first call spins. */
int coll_expect(communicator *c, int first, double limit_s, int64_t *bytes) {
    double start = 0;
    for (int peer = 0; peer < c->world; peer++) {
        if (peer == c->rank) continue;
        int failure = wait_for(c, peer, &start, first ? c->spin_s : 0, first ? YIELD_S : 0, limit_s);
        if (failure >> 8 == TIMED_OUT) return NOT_YET << 8 | peer;
        if (failure) return failure;
    }
    uint64_t length;
    memcpy(&length, slot(c, 0, c->turn), sizeof length);
    *bytes = (int64_t)length;
    return 0;
}

int coll_receive(communicator *c, void *out, int64_t bytes) {
    unsigned char *to = out;
    size_t left = (size_t)bytes, offset = LINE;
    for (;;) {
        size_t n = least(left, c->slot_bytes - offset);
        if (n) memcpy(to, slot(c, 0, c->turn) + offset, n);
        to += n, left -= n, offset = 0;
        if (left == 0) return 0;
        int failure = take_turn(c);
        if (failure) return failure;
    }
}
