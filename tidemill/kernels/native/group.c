/* Collectives among processes of one host, in shared memory (tidemill/distributed/shared.py makes it).

Every rank has two slots, which operations use in turn. An operation copies what a rank has into its slot, says so by raising the
rank's number of operations, waits until all ranks have, and reads their slots. Whoever begins operation n has seen all ranks begin
n - 1, and so none reads what operation n - 2 left in the slot that is written now. Sums are in the order of ranks. */
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "simd.h"
#include "tidemill.h"

#define LINE 64
#define SPINS 2000      /* looks at another's number before the core is given away */
#define YIELDS 200      /* and before this thread sleeps */
#define SLEEP_NS 20000000L

typedef struct {
    atomic_uint failed, num_asleep;
    char rest[LINE - 2 * sizeof(atomic_uint)];
} shared_head;

typedef struct {
    atomic_uint number; /* of operations begun */
    uint32_t kind[2];   /* of those in the two slots */
    int64_t num_values[2];
    char rest[LINE - 3 * sizeof(uint32_t) - 2 * sizeof(int64_t) - 4];
} shared_rank;

_Static_assert(sizeof(shared_head) == LINE && sizeof(shared_rank) == LINE, "of a cache line each");

enum { REDUCE = 1, GATHER, RANGES, TO_COLUMNS, TO_ROWS };

static shared_head *head_of(const tm_group *g) { return (shared_head *)g->shared; }
static shared_rank *rank_of(const tm_group *g, long rank) { return (shared_rank *)(g->shared + LINE * (1 + rank)); }
static float *slot_of(const tm_group *g, long rank, unsigned number) {
    return (float *)(g->shared + LINE * (1 + g->size) + g->slot_bytes * (2 * rank + (number & 1)));
}

static long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

/* Until the number is another than `seen`, or a while has passed. */
static void sleep_on(shared_head *head, atomic_uint *number, unsigned seen) {
    const struct timespec time = {0, SLEEP_NS};
    atomic_fetch_add(&head->num_asleep, 1);
#ifdef __linux__
    syscall(SYS_futex, number, FUTEX_WAIT, seen, &time, NULL, 0);
#else
    (void)number, (void)seen;
    const struct timespec brief = {0, 50000};
    (void)time;
    nanosleep(&brief, NULL);
#endif
    atomic_fetch_sub(&head->num_asleep, 1);
}

static void wake_all(shared_head *head, atomic_uint *number) {
#ifdef __linux__
    if (atomic_load(&head->num_asleep)) syscall(SYS_futex, number, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
#else
    (void)head, (void)number;
#endif
}

static int wait_for(const tm_group *g, long rank, unsigned number) {
    shared_head *head = head_of(g);
    atomic_uint *theirs = &rank_of(g, rank)->number;
    long until = 0;
    for (long looks = 0;; looks++) {
        unsigned seen = atomic_load(theirs);
        if ((int)(seen - number) >= 0) return 0;
        if (looks < SPINS) {
            tm_pause();
            continue;
        }
        if (atomic_load(&head->failed)) return TM_PEER_LOST;
        if (looks < SPINS + YIELDS) {
            sched_yield();
            continue;
        }
        if (!until) until = now_ns() + g->deadline_ns;
        if (now_ns() > until) {
            atomic_store(&head->failed, 1); /* of no use to the others any more */
            return TM_PEER_LATE;
        }
        sleep_on(head, theirs, seen);
    }
}

/* The own slot is filled: tell, and wait until all others are. All must be in the same operation. */
static int meet(const tm_group *g, unsigned number, unsigned kind, long num_values) {
    shared_rank *own = rank_of(g, g->rank);
    own->kind[number & 1] = kind;
    own->num_values[number & 1] = num_values;
    atomic_store(&own->number, number);
    wake_all(head_of(g), &own->number);
    for (long r = 0; r < g->size; r++) {
        int failed = r == g->rank ? 0 : wait_for(g, r, number);
        if (failed) return failed;
        const shared_rank *other = rank_of(g, r);
        const int is_equal = other->num_values[number & 1] == num_values || kind == GATHER || kind == RANGES;
        if (other->kind[number & 1] != kind || !is_equal) {
            atomic_store(&head_of(g)->failed, 1);
            return TM_PEERS_DIFFER;
        }
    }
    return 0;
}

static unsigned next_number(const tm_group *g) { return atomic_load(&rank_of(g, g->rank)->number) + 1; }
static long least(long a, long b) { return a < b ? a : b; }

static void add_to(float *sum, const float *x, long num) {
    long i = 0;
    for (; i + 8 <= num; i += 8) f32x8_store(sum + i, f32x8_add(f32x8_load(sum + i), f32x8_load(x + i)));
    for (; i < num; i++) sum[i] += x[i];
}

int all_reduce_op(const tm_group *g, float *x, long num_rows, long width) {
    if (g->call) return g->call(TM_ALL_REDUCE, x, NULL, num_rows, width, 0);
    const long room = g->slot_bytes / 4, num_values = num_rows * width;
    for (long done = 0; done < num_values; done += room) {
        const unsigned number = next_number(g);
        const long num = least(room, num_values - done);
        memcpy(slot_of(g, g->rank, number), x + done, 4 * num);
        int failed = meet(g, number, REDUCE, num_values);
        if (failed) return failed;
        memcpy(x + done, slot_of(g, 0, number), 4 * num);
        for (long r = 1; r < g->size; r++) add_to(x + done, slot_of(g, r, number), num);
    }
    return 0;
}

/* Values first .. of a matrix [rows][width], stored one after the other, into columns of one that is `stride` wide. */
static void put_columns(const float *from, long first, long num, long width, float *to, long stride) {
    for (long i = 0; i < num;) {
        const long row = (first + i) / width, column = (first + i) % width, part = least(width - column, num - i);
        memcpy(to + row * stride + column, from + i, 4 * part);
        i += part;
    }
}

int all_gather_op(const tm_group *g, const float *x, float *out, long num_rows, long width, long num_out) {
    if (g->call) return g->call(TM_ALL_GATHER, (float *)x, out, num_rows, width, num_out);
    const long room = g->slot_bytes / 4, own = num_rows * width;
    for (long done = 0, most = own; done == 0 || done < most; done += room) { /* a rank may have none */
        const unsigned number = next_number(g);
        if (done < own) memcpy(slot_of(g, g->rank, number), x + done, 4 * least(room, own - done));
        int failed = meet(g, number, GATHER, own);
        if (failed) return failed;
        long column = 0;
        for (long r = 0; r < g->size; r++) {
            const long theirs = rank_of(g, r)->num_values[number & 1], num = least(room, theirs - done);
            if (theirs > most) most = theirs;
            if (column + theirs / num_rows > num_out) return TM_PEERS_DIFFER;
            if (num > 0) put_columns(slot_of(g, r, number), done, num, theirs / num_rows, out + column, num_out);
            column += theirs / num_rows;
        }
        if (column != num_out) return TM_PEERS_DIFFER;
    }
    return 0;
}

/* ---- rows that are divided among ranks */

void own_rows_op(const float *x, long all, long width, long rank, long size, float *out) {
    const long first = first_row(all, rank, size), end = first_row(all, rank + 1, size);
    memcpy(out, x + first * width, 4 * (end - first) * width);
}

void columns_op(const float *x, long num_rows, long width, long first, long num, float *out) {
    for (long i = 0; i < num_rows; i++) memcpy(out + i * num, x + i * width + first, 4 * num);
}

int to_columns_op(const tm_exchange *e, const float *x, float *out, long all) {
    const tm_group *g = e->group;
    const long room = g->slot_bytes / 4 / e->width, most = (all + g->size - 1) / g->size;
    const long own = first_row(all, g->rank + 1, g->size) - first_row(all, g->rank, g->size);
    if (room < 1) return TM_PEERS_DIFFER;
    for (long done = 0; done == 0 || done < most; done += room) {
        const unsigned number = next_number(g);
        if (done < own) memcpy(slot_of(g, g->rank, number), x + done * e->width, 4 * least(room, own - done) * e->width);
        int failed = meet(g, number, TO_COLUMNS, all);
        if (failed) return failed;
        for (long r = 0; r < g->size; r++) {
            const long first = first_row(all, r, g->size) + done, end = least(first + room, first_row(all, r + 1, g->size));
            for (long i = first; i < end; i++) {
                const float *from = slot_of(g, r, number) + (i - first) * e->width;
                float *to = out + i * e->own_width;
                for (long run = 0; run < e->num_runs; to += e->lens[run++]) memcpy(to, from + e->firsts[run], 4 * e->lens[run]);
            }
        }
    }
    return 0;
}

int to_rows_op(const tm_exchange *e, const float *x, float *out, long all) {
    const tm_group *g = e->group;
    const long begin = first_row(all, g->rank, g->size), end = first_row(all, g->rank + 1, g->size), own = e->widths[g->rank];
    long widest = 1;
    for (long r = 0; r < g->size; r++)
        if (e->widths[r] > widest) widest = e->widths[r];
    const long room = g->slot_bytes / 4 / widest;
    if (room < 1) return TM_PEERS_DIFFER;
    for (long done = 0; done < all; done += room) {
        const unsigned number = next_number(g);
        memcpy(slot_of(g, g->rank, number), x + done * own, 4 * least(room, all - done) * own);
        int failed = meet(g, number, TO_ROWS, all);
        if (failed) return failed;
        const long first = begin > done ? begin : done, last = least(end, done + room);
        for (long r = 0, column = 0; r < g->size; column += e->widths[r++])
            for (long i = first; i < last; i++)
                memcpy(out + (i - begin) * e->width + column, slot_of(g, r, number) + (i - done) * e->widths[r], 4 * e->widths[r]);
    }
    return 0;
}

/* ---- for Python */

TM_API void tm_own_rows(const float *x, long all, long width, long rank, long size, float *out) { own_rows_op(x, all, width, rank, size, out); }
TM_API void tm_columns(const float *x, long num_rows, long width, long first, long num, float *out) { columns_op(x, num_rows, width, first, num, out); }
TM_API int tm_to_columns(const tm_exchange *e, const float *x, float *out, long all) { return to_columns_op(e, x, out, all); }
TM_API int tm_to_rows(const tm_exchange *e, const float *x, float *out, long all) { return to_rows_op(e, x, out, all); }

TM_API int tm_all_reduce(const tm_group *g, float *x, long num_rows, long width) { return all_reduce_op(g, x, num_rows, width); }

TM_API int tm_all_gather(const tm_group *g, const float *x, float *out, long num_rows, long width, long num_out) {
    return all_gather_op(g, x, out, num_rows, width, num_out);
}

/* All show `num_bytes` bytes; of those of rank r, bytes starts[r] .. starts[r] + lens[r] - 1 go to `out`, one after the other. The
   most that a rank shows is `most`, in bytes. */
TM_API int tm_take_ranges(const tm_group *g, const char *x, long num_bytes, long most, const long *starts, const long *lens, char *out) {
    const long room = g->slot_bytes;
    for (long done = 0; done == 0 || done < most; done += room) {
        const unsigned number = next_number(g);
        if (done < num_bytes) memcpy(slot_of(g, g->rank, number), x + done, least(room, num_bytes - done));
        int failed = meet(g, number, RANGES, num_bytes);
        if (failed) return failed;
        char *to = out;
        for (long r = 0; r < g->size; r++) {
            const long first = starts[r] > done ? starts[r] : done, end = least(starts[r] + lens[r], done + room);
            if (first < end) memcpy(to + first - starts[r], (char *)slot_of(g, r, number) + first - done, end - first);
            to += lens[r];
        }
    }
    return 0;
}

/* A rank is gone: nobody waits any longer. */
TM_API void tm_fail_group(const tm_group *g) {
    atomic_store(&head_of(g)->failed, 1);
    for (long r = 0; r < g->size; r++) wake_all(head_of(g), &rank_of(g, r)->number);
}
