/* Weights that lie in a file and are read while others are computed with (tidemill/quant/streamed.py).

A unit, the weights of a layer or of an expert, is read piece by piece into a slot of memory by threads of the stream. Layers have
fixed slots, and those that come next are read ahead; experts that are used often stay, others take turns. Slots are given to
units by the thread that computes, when it asks for one: what it asked for before is then no longer read. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tidemill.h"

#define MAX_READERS 16
#define CANDIDATES 256
#define FEW_CANDIDATES 4
#define GUESSES 128 /* after so many, less than half of them right, there are none for a while */
#define PAUSE 1024  /* requests */
#define HALVE_AFTER 64 /* uses of an expert, on average, after which all counts are halved: what was hot long ago may cool down */

struct tm_stream {
    tm_stream_spec spec;
    long *in_slot; /* the unit that is there, or on its way; -1: none */
    long *left;    /* pieces of it that are still to come */
    long *where;   /* of each unit: its slot; -1: in none */
    long *uses, *used_at; /* of each unit: how often, and the number of the last request that used it */
    long *is_foreseen;    /* of each unit: it was read ahead by a guess, and not asked for since */
    long *queue;   /* slots to fill, in order: a ring */
    long first, num_queued, next_piece; /* of the first */
    long num_requests, num_uses, hand; /* hand: the last slot that was looked at */
    long most_missed;      /* by one request */
    long num_guessed, num_right, pause_until; /* guesses since they were last judged; the number of a request */
    long num_filled;       /* slots that were ever used, of experts */
    long *transients;      /* slots whose units do not stay */
    long *transient;       /* of each slot: its place among them; -1: its unit stays */
    long num_transients, next_transient;
    int failed, is_stopping;
    pthread_mutex_t lock;
    pthread_cond_t work, arrived;
    pthread_t readers[MAX_READERS];
    long num_readers;
    tm_stream_figures figures;
};

static long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

/* ---- the threads that read */

static int read_piece(const tm_stream_spec *spec, const tm_piece *piece, char *to) {
    long done = 0;
    while (done < piece->num_bytes) {
        ssize_t num = pread((int)spec->fd, to + done, piece->num_bytes - done, piece->offset + done);
        if (num < 0 && errno == EINTR) continue;
        if (num < 0) return TM_STREAM_FAILED;
        if (num == 0) return TM_STREAM_CHANGED; /* cut short */
        done += num;
    }
    struct stat now;
    if (fstat((int)spec->fd, &now)) return TM_STREAM_FAILED;
#ifdef __APPLE__
    const struct timespec *changed = &now.st_mtimespec;
#else
    const struct timespec *changed = &now.st_mtim;
#endif
    return now.st_size == spec->file_bytes && changed->tv_sec * 1000000000L + changed->tv_nsec == spec->changed_ns ? 0 : TM_STREAM_CHANGED;
}

static void *reader(void *arg) {
    tm_stream *s = arg;
    pthread_mutex_lock(&s->lock);
    while (!s->is_stopping) {
        if (!s->num_queued || s->failed) {
            pthread_cond_wait(&s->work, &s->lock);
            continue;
        }
        const long slot = s->queue[s->first], unit = s->in_slot[slot];
        const tm_piece *piece = s->spec.pieces + s->spec.first_piece[unit] + s->next_piece++;
        if (piece + 1 == s->spec.pieces + s->spec.first_piece[unit + 1]) {
            s->first = (s->first + 1) % s->spec.num_slots;
            s->num_queued--;
            s->next_piece = 0;
        }
        pthread_mutex_unlock(&s->lock);
        const int failed = read_piece(&s->spec, piece, s->spec.slots + slot * s->spec.slot_bytes + piece->place);
        pthread_mutex_lock(&s->lock);
        if (failed) s->failed = failed;
        s->figures.num_bytes += piece->num_bytes;
        if (--s->left[slot] == 0 || failed) pthread_cond_broadcast(&s->arrived);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- the thread that computes; all with the lock */

static void fill(tm_stream *s, long slot, long unit) {
    if (s->in_slot[slot] >= 0) s->where[s->in_slot[slot]] = -1, s->is_foreseen[s->in_slot[slot]] = 0;
    s->in_slot[slot] = unit;
    s->where[unit] = slot;
    s->left[slot] = s->spec.first_piece[unit + 1] - s->spec.first_piece[unit];
    s->queue[(s->first + s->num_queued++) % s->spec.num_slots] = slot;
    s->figures.num_read++;
}

static void wait_for(tm_stream *s, long slot) {
    if (!s->left[slot] || s->failed) return;
    const long began = now_ns();
    while (s->left[slot] && !s->failed) pthread_cond_wait(&s->arrived, &s->lock);
    s->figures.waited_ns += now_ns() - began;
}

/* Whether a slot belongs to a layer from `layer` on, before the one `ahead` of it. */
static int is_taken(const tm_stream *s, long layer, long ahead) {
    const long slot = s->spec.slot_of[(layer + ahead) % s->spec.num_units];
    for (long i = 0; i < ahead; i++)
        if (s->spec.slot_of[(layer + i) % s->spec.num_units] == slot) return 1;
    return 0;
}

int stream_layer_op(tm_stream *s, long layer) {
    pthread_mutex_lock(&s->lock);
    s->figures.num_asked++;
    for (long ahead = 0; ahead < s->spec.num_units && !is_taken(s, layer, ahead); ahead++) {
        const long unit = (layer + ahead) % s->spec.num_units, slot = s->spec.slot_of[unit];
        if (s->in_slot[slot] == unit) continue;
        if (s->left[slot]) { /* another layer is on its way: not the order that was foreseen */
            if (ahead) break;
            wait_for(s, slot);
            if (s->failed) break;
        }
        fill(s, slot, unit);
    }
    pthread_cond_broadcast(&s->work);
    wait_for(s, s->spec.slot_of[layer]);
    const int failed = s->failed;
    pthread_mutex_unlock(&s->lock);
    return failed;
}

/* Units that are used often stay; the others share a few transient slots, as many as a request needed at once. So units that are used
   equally often, each in its turn, do not push each other out before their turn comes again. */

static int is_free(const tm_stream *s, long slot) { return s->used_at[s->in_slot[slot]] != s->num_requests && !s->left[slot]; }

/* The slot that stays whose unit was used least often, of some that come in turn. */
static long coldest(tm_stream *s, long num_candidates) {
    long best = -1;
    for (long i = 0, num_seen = 0; i < s->spec.num_slots && num_seen < num_candidates; i++) {
        const long slot = s->hand = (s->hand + 1) % s->spec.num_slots;
        if (s->transient[slot] >= 0 || !is_free(s, slot)) continue;
        num_seen++;
        if (best < 0 || s->uses[s->in_slot[slot]] < s->uses[s->in_slot[best]]) best = slot;
    }
    return best;
}

/* For a unit that is in none. -1: all are needed now, or stay. One that stays makes room while there are fewer transient slots than
   so many. */
static long find_slot(tm_stream *s, long most_transients) {
    if (s->num_filled < s->spec.num_slots) return s->num_filled++;
    for (long i = 0; i < s->num_transients; i++) {
        s->next_transient = (s->next_transient + 1) % s->num_transients;
        if (is_free(s, s->transients[s->next_transient])) return s->transients[s->next_transient];
    }
    const long slot = s->num_transients < most_transients ? coldest(s, CANDIDATES) : -1;
    if (slot >= 0) {
        s->transient[slot] = s->num_transients;
        s->transients[s->num_transients++] = slot;
    }
    return slot;
}

/* Waits for reads ahead if there is no other slot. */
static long find_slot_at_last(tm_stream *s) {
    for (;;) {
        const long slot = find_slot(s, s->spec.num_slots);
        int is_on_its_way = 0;
        for (long i = 0; i < s->spec.num_slots && slot < 0; i++) is_on_its_way |= s->left[i] && s->used_at[s->in_slot[i]] != s->num_requests;
        if (slot >= 0 || !is_on_its_way || s->failed) return slot;
        pthread_cond_broadcast(&s->work);
        pthread_cond_wait(&s->arrived, &s->lock);
    }
}

/* A unit in a transient slot that is used clearly more often than one that stays changes places with it. */
static void promote(tm_stream *s, long unit) {
    const long slot = s->where[unit], number = s->transient[slot];
    const long other = number < 0 ? -1 : coldest(s, FEW_CANDIDATES);
    if (other < 0 || s->uses[unit] <= s->uses[s->in_slot[other]] * 5 / 4 + 2) return;
    s->transient[slot] = -1;
    s->transient[other] = number;
    s->transients[number] = other;
}

static void count_use(tm_stream *s, long unit) {
    s->uses[unit]++;
    s->used_at[unit] = s->num_requests;
    if (++s->num_uses < HALVE_AFTER * s->spec.num_units) return;
    s->num_uses = 0;
    for (long i = 0; i < s->spec.num_units; i++) s->uses[i] /= 2;
}

int stream_experts(tm_stream *s, const long *units, long num, const char **places) {
    long num_missed = 0;
    pthread_mutex_lock(&s->lock);
    s->num_requests++;
    s->figures.num_asked += num;
    for (long i = 0; i < num; i++) {
        count_use(s, units[i]);
        s->figures.num_foreseen += s->is_foreseen[units[i]];
        s->num_right += s->is_foreseen[units[i]];
        s->is_foreseen[units[i]] = 0;
    }
    for (long i = 0; i < num && !s->failed; i++) {
        if (s->where[units[i]] >= 0) {
            promote(s, units[i]);
            continue;
        }
        const long slot = find_slot_at_last(s);
        s->figures.num_missed++;
        if (++num_missed > s->most_missed) s->most_missed = num_missed;
        if (slot < 0 && !s->failed) s->failed = TM_STREAM_FAILED; /* there are slots for all experts of a layer */
        else if (slot >= 0) fill(s, slot, units[i]);
    }
    pthread_cond_broadcast(&s->work);
    for (long i = 0; i < num && !s->failed; i++) {
        wait_for(s, s->where[units[i]]);
        places[i] = s->spec.slots + s->where[units[i]] * s->spec.slot_bytes;
    }
    const int failed = s->failed;
    pthread_mutex_unlock(&s->lock);
    return failed;
}

/* Reading what nobody needs takes the disk from what is needed. */
static int guesses_well(tm_stream *s) {
    if (s->num_guessed >= GUESSES) {
        if (2 * s->num_right < s->num_guessed) s->pause_until = s->num_requests + PAUSE;
        s->num_guessed = s->num_right = 0;
    }
    return s->num_requests >= s->pause_until;
}

void stream_ahead(tm_stream *s, const long *units, long num) {
    pthread_mutex_lock(&s->lock);
    if (!guesses_well(s)) num = 0;
    const long twice = 2 * s->most_missed, half = s->spec.num_slots / 2, most_transients = twice < half ? twice : half;
    for (long i = 0; i < num; i++) s->used_at[units[i]] = s->num_requests;
    for (long i = 0; i < num && !s->failed; i++) {
        const long slot = s->where[units[i]] < 0 ? find_slot(s, most_transients) : -1;
        if (s->where[units[i]] < 0 && slot < 0) break;
        if (slot >= 0) fill(s, slot, units[i]), s->is_foreseen[units[i]] = 1, s->num_guessed++;
    }
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
}

/* ---- for Python */

TM_API int tm_stream_layer(tm_stream *s, long layer) { return stream_layer_op(s, layer); }

TM_API void tm_stream_figures_of(tm_stream *s, tm_stream_figures *out) {
    pthread_mutex_lock(&s->lock);
    *out = s->figures;
    pthread_mutex_unlock(&s->lock);
}

static long *numbers(long num, long value) {
    long *made = malloc(sizeof(long) * (size_t)(num + 1));
    for (long i = 0; made && i < num; i++) made[i] = value;
    return made;
}

/* Waits for reads under way. What is in slots stays there. */
TM_API void tm_stream_close(tm_stream *s) {
    pthread_mutex_lock(&s->lock);
    s->is_stopping = 1;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
    for (long i = 0; i < s->num_readers; i++) pthread_join(s->readers[i], NULL);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->work);
    pthread_cond_destroy(&s->arrived);
    free(s->in_slot), free(s->left), free(s->where), free(s->uses), free(s->used_at), free(s->is_foreseen), free(s->queue), free(s->transients), free(s->transient);
    free(s);
}

/* The arrays of the spec are the caller's, as long as the stream is open. NULL: no memory, or no threads. */
TM_API tm_stream *tm_stream_open(const tm_stream_spec *spec, long num_readers) {
    tm_stream *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->spec = *spec;
    s->in_slot = numbers(spec->num_slots, -1), s->left = numbers(spec->num_slots, 0), s->queue = numbers(spec->num_slots, 0);
    s->where = numbers(spec->num_units, -1), s->uses = numbers(spec->num_units, 0), s->used_at = numbers(spec->num_units, -1);
    s->is_foreseen = numbers(spec->num_units, 0);
    s->transients = numbers(spec->num_slots, 0), s->transient = numbers(spec->num_slots, -1);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_cond_init(&s->arrived, NULL);
    const int has_memory = s->in_slot && s->left && s->queue && s->where && s->uses && s->used_at && s->is_foreseen && s->transients && s->transient;
    while (has_memory && s->num_readers < num_readers && s->num_readers < MAX_READERS &&
           !pthread_create(&s->readers[s->num_readers], NULL, reader, s))
        s->num_readers++;
    if (s->num_readers) return s;
    tm_stream_close(s);
    return NULL;
}
