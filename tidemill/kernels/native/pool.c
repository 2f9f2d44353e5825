/* A pool of threads for many short jobs: a decode step is some 300 of them, 10 to 50 microseconds each.

Workers spin for a moment after a job, since the next one is usually near, then sleep. A job does not wait for workers that
sleep: threads that are awake take tasks until none is left. Each thread begins with a part of the tasks of its own, in order, so
that it reads weights as they lie in memory; one that is done takes what is left of the others'. */
#include "tidemill.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "simd.h"

#define MAX_THREADS 256
#define NUM_SLOTS 2
#define SPIN_NS 50000

static struct {
    tm_task task;
    void *arg;
    long chunk;
    int num_parts;
} job;

static struct {
    _Alignas(64) atomic_long next;
    long end;
} parts[MAX_THREADS];

static atomic_uint generation; /* of jobs */
static atomic_int is_open, num_active, num_asleep, num_workers, stopping;
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER, call_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_t workers[MAX_THREADS];

static struct { void *memory; long num_bytes; } scratch[MAX_THREADS][NUM_SLOTS];

void *tm_scratch(int thread, int slot, long num_bytes) {
    if (scratch[thread][slot].num_bytes < num_bytes) {
        free(scratch[thread][slot].memory);
        num_bytes = (num_bytes + num_bytes / 4 + 63) & ~63L;
        scratch[thread][slot].memory = aligned_alloc(64, num_bytes);
        scratch[thread][slot].num_bytes = scratch[thread][slot].memory ? num_bytes : 0;
    }
    return scratch[thread][slot].memory;
}

static void run_tasks(int thread) {
    for (int i = 0; i < job.num_parts; i++) {
        int part = (thread + i) % job.num_parts;
        long index, last = parts[part].end;
        while (atomic_load(&parts[part].next) < last && (index = atomic_fetch_add(&parts[part].next, job.chunk)) < last)
            for (long end = index + job.chunk < last ? index + job.chunk : last; index < end; index++) job.task(job.arg, index, thread);
    }
}

static long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void wait_for_job(unsigned seen) {
    long until = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load(&generation) != seen) return;
            tm_pause();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&sleep_lock);
    atomic_fetch_add(&num_asleep, 1);
    while (atomic_load(&generation) == seen) pthread_cond_wait(&wake, &sleep_lock);
    atomic_fetch_sub(&num_asleep, 1);
    pthread_mutex_unlock(&sleep_lock);
}

static void *worker(void *arg) {
    int thread = (int)(intptr_t)arg;
    unsigned seen = atomic_load(&generation);
    while (!atomic_load(&stopping)) {
        /* Either the caller sees us active and waits, or we see that the job is closed: both sides write before they read. */
        atomic_fetch_add(&num_active, 1);
        if (atomic_load(&is_open)) run_tasks(thread);
        atomic_fetch_sub(&num_active, 1);
        wait_for_job(seen);
        seen = atomic_load(&generation);
    }
    return NULL;
}

static void announce(void) {
    atomic_fetch_add(&generation, 1);
    if (atomic_load(&num_asleep)) {
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&sleep_lock);
    }
}

void tm_parallel(long count, long chunk, tm_task task, void *arg) {
    if (count <= chunk || atomic_load(&num_workers) == 0) {
        for (long i = 0; i < count; i++) task(arg, i, 0);
        return;
    }
    job.task = task;
    job.arg = arg;
    job.chunk = chunk;
    job.num_parts = tm_num_threads();
    long num_chunks = (count + chunk - 1) / chunk;
    for (int i = 0; i < job.num_parts; i++) {
        long end = num_chunks * (i + 1) / job.num_parts * chunk;
        atomic_store_explicit(&parts[i].next, num_chunks * i / job.num_parts * chunk, memory_order_relaxed);
        parts[i].end = end < count ? end : count;
    }
    atomic_store(&is_open, 1);
    announce();
    run_tasks(0);
    atomic_store(&is_open, 0);
    while (atomic_load(&num_active)) tm_pause();
}

int tm_num_threads(void) { return atomic_load(&num_workers) + 1; }
void tm_lock(void) { pthread_mutex_lock(&call_lock); }
void tm_unlock(void) { pthread_mutex_unlock(&call_lock); }

/* A forked child has the caller's thread and none of the workers. */
static void after_fork(void) {
    atomic_store(&num_workers, 0);
    atomic_store(&num_active, 0);
    atomic_store(&num_asleep, 0);
    atomic_store(&is_open, 0);
    atomic_store(&stopping, 0);
    pthread_mutex_init(&sleep_lock, NULL);
    pthread_mutex_init(&call_lock, NULL);
    pthread_cond_init(&wake, NULL);
}

/* The calling thread counts as one. Returns how many there are. */
TM_API int tm_set_threads(int num_threads) {
    static int is_registered;
    tm_lock();
    if (!is_registered) is_registered = !pthread_atfork(NULL, NULL, after_fork);
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    if (num_threads != tm_num_threads()) {
        atomic_store(&stopping, 1);
        announce();
        for (int i = 0; i < atomic_load(&num_workers); i++) pthread_join(workers[i], NULL);
        atomic_store(&stopping, 0);
        int started = 0;
        while (started < num_threads - 1 && !pthread_create(&workers[started], NULL, worker, (void *)(intptr_t)(started + 1))) started++;
        atomic_store(&num_workers, started);
    }
    int result = tm_num_threads();
    tm_unlock();
    return result;
}
