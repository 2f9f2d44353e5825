/* Attention of sequences with a KV policy: what they give up, and when; and the pages that a query reads, where it reads few.

A query sees all slots up to its own, so it is computed like any other (attention.c), over slots instead of positions. Segments of a row
end where slots are given up; the next segment of the row is in the next round. All that a segment does is one chain of operations for
each KV head, and segments end at fixed positions: bits do not depend on how a prompt was cut or on the rest of the batch. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "simd.h"
#include "tidemill.h"

enum { WINDOW, STREAMING, H2O, SNAPKV, QUEST, RANDOM, DOUBLE }; /* as in policies.py */

#define LOG2_E 1.44269504f
#define POOLED 3 /* SnapKV: slots before and after, whose attention counts for a slot, too */

typedef struct {
    const tm_attention_job *attention;
    const tm_round *round;
} round_job;

static const int32_t *pages_of(const tm_attention_job *j, const tm_segment *g) {
    return j->step->tables[j->layer->group] + g->row * j->step->table_width;
}

static int has_bf16(const tm_attention_job *j) { return j->step->kv_format == TM_KV_BF16; } /* else float32 */
static long row_bytes(const tm_attention_job *j) { return j->layer->head_dim * (has_bf16(j) ? 2 : 4); }

/* Where a slot's keys or values lie. */
static char *row_at(const tm_attention_job *j, char *cache, const int32_t *pages, long head, long slot) {
    const tm_step *s = j->step;
    long page = pages[slot / s->page_size], offset = slot % s->page_size;
    return cache + page * s->page_bytes + (head * s->page_size + offset) * row_bytes(j);
}

TM_INLINE f32x8 load(const char *row, long i, int is_bf16) {
    return is_bf16 ? f32x8_load_bf16((const uint16_t *)row + i) : f32x8_load((const float *)row + i);
}

static void put(char *row, const float *x, long dim, int is_bf16) {
    for (long i = 0; i < dim; i += 8)
        if (is_bf16)
            f32x8_store_bf16((uint16_t *)row + i, f32x8_load(x + i));
        else
            f32x8_store((float *)row + i, f32x8_load(x + i));
}

static float *memory_of(const tm_attention_job *j, const tm_segment *g, long head) {
    return g->policy->memory + (j->layer->number * j->layer->num_kv_heads + head) * g->policy->stride;
}

static const float *query_of(const tm_attention_job *j, long token, long head) {
    const tm_layer *l = j->layer;
    return j->qkv + (token * (l->num_heads + 2 * l->num_kv_heads) + head * (l->num_heads / l->num_kv_heads)) * l->head_dim;
}

/* Keys and values of a segment of a later round go into the slots that are theirs now. */
static void enter_segment(void *arg, long task, int thread) {
    (void)thread;
    const round_job *r = arg;
    const tm_attention_job *j = r->attention;
    const tm_layer *l = j->layer;
    const tm_segment *g = r->round->segments + task / l->num_kv_heads;
    const int32_t *pages = pages_of(j, g);
    long head = task % l->num_kv_heads, dim = l->head_dim;
    for (long i = 0; i < g->count; i++) {
        const float *k = j->qkv + ((g->token + i) * (l->num_heads + 2 * l->num_kv_heads) + l->num_heads + head) * dim;
        put(row_at(j, j->keys, pages, head, g->slot + i), k, dim, has_bf16(j));
        put(row_at(j, j->values, pages, head, g->slot + i), k + l->num_kv_heads * dim, dim, has_bf16(j));
    }
}

static void attend_round(void *arg, long task, int thread) {
    const round_job *r = arg;
    const tm_step *s = r->round->tiles;
    const tm_attention_job *j = r->attention;
    long at = task / j->layer->num_kv_heads, head = task % j->layer->num_kv_heads;
    tm_places where = {s->tables[j->layer->group] + s->tile_row[at] * s->table_width, NULL, LONG_MAX};
    attention_tile(j, s->tile_token[at], s->tile_len[at], s->tile_start[at], s->tile_end[at], &where, head, thread);
}

/* ---- attention that slots get */

/* probs[0 .. num - 1] of one query over the first slots of a row; past the last, up to a multiple of 8, they are 0. */
static void soften(float *probs, long num) {
    for (long k = num; k & 7; k++) probs[k] = -INFINITY;
    f32x8 highest = f32x8_load(probs), sum = f32x8_set(0);
    for (long k = 0; k < num; k += 8) highest = f32x8_max(highest, f32x8_load(probs + k));
    f32x8 top = f32x8_set(f32x8_maximum(highest));
    for (long k = 0; k < num; k += 8) {
        f32x8 prob = f32x8_exp2_negative(f32x8_sub(f32x8_load(probs + k), top));
        f32x8_store(probs + k, prob);
        sum = f32x8_add(sum, prob);
    }
    float part = 1.0f / f32x8_sum(sum);
    for (long k = 0; k < num; k += 8) f32x8_store(probs + k, f32x8_mul1(f32x8_load(probs + k), part));
}

/* Scores of up to four heads' queries over the first slots of a row. */
static void score(const tm_attention_job *j, const float *q, int num_heads, const int32_t *pages, long head, long num, float *probs, long stride) {
    long dim = j->layer->head_dim;
    int is_bf16 = has_bf16(j);
    float scale = j->layer->scale * LOG2_E;
    for (long k = 0; k < num; k++) {
        const char *key = row_at(j, j->keys, pages, head, k);
        f32x8 acc[4] = {f32x8_set(0), f32x8_set(0), f32x8_set(0), f32x8_set(0)};
        for (long i = 0; i < dim; i += 8) {
            f32x8 part = load(key, i, is_bf16);
            for (int h = 0; h < num_heads; h++) acc[h] = f32x8_fma(acc[h], f32x8_load(q + h * dim + i), part);
        }
        for (int h = 0; h < num_heads; h++) probs[h * stride + k] = f32x8_sum(acc[h]) * scale;
    }
}

/* To each slot's sum, what the segment's queries attend to it: query after query, head after head. */
static void accumulate(const tm_attention_job *j, const tm_segment *g, long head, float *probs) {
    const tm_policy *p = g->policy;
    const int32_t *pages = pages_of(j, g);
    float *sums = memory_of(j, g, head);
    long group = j->layer->num_heads / j->layer->num_kv_heads, stride = (p->capacity + 8) & ~7L, end = g->position + g->count;
    if (p->kind == H2O)
        for (long k = g->slot; k < g->slot + g->count; k++) sums[k] = 0;
    else if (g->position <= p->first_observed && p->first_observed < end)
        for (long k = 0; k < p->capacity; k++) sums[k] = 0;
    for (long i = 0; i < g->count; i++) {
        if (p->kind == SNAPKV && (g->position + i < p->first_observed || g->position + i >= p->capacity)) continue;
        long num = g->slot + i + 1;
        for (long h = 0; h < group; h += 4) {
            int n = group - h < 4 ? (int)(group - h) : 4;
            score(j, query_of(j, g->token + i, head) + h * j->layer->head_dim, n, pages, head, num, probs, stride);
            for (int one = 0; one < n; one++) {
                soften(probs + one * stride, num);
                for (long k = 0; k < num; k++) sums[k] += probs[one * stride + k];
            }
        }
    }
}

/* ---- what stays */

static int by_rank(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}
static int by_place(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y ? 1 : 0;
}

/* Higher comes first: the bits of a float that is not negative are in its order; of equal ones, the earlier slot. */
static uint64_t rank(float score, long slot) {
    uint32_t bits;
    memcpy(&bits, &score, 4);
    return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)slot);
}

static uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/* The slots that stay, in their order: the best of the first `num - latest`, and all after these. */
static void choose(const tm_attention_job *j, const tm_segment *g, long head, long num, uint64_t *chosen) {
    const tm_policy *p = g->policy;
    const float *sums = memory_of(j, g, head);
    long older = num - p->recent, num_best = p->kept - p->recent;
    for (long k = 0; k < older; k++) {
        float best = 0;
        if (p->kind == H2O) best = sums[k];
        if (p->kind == SNAPKV)
            for (long i = k > POOLED ? k - POOLED : 0; i <= k + POOLED && i < older; i++) best = sums[i] > best ? sums[i] : best;
        if (p->kind == RANDOM) {
            long place = j->layer->number * j->layer->num_kv_heads + head;
            best = (float)(mixed((uint32_t)(g->position + g->count) * 0x9e3779b9u ^ mixed((uint32_t)(place << 20 ^ k))) >> 8);
        }
        chosen[k] = rank(best, k);
    }
    if (p->kind == WINDOW || p->kind == STREAMING)
        for (long k = 0; k < num_best; k++) chosen[k] = (uint64_t)k;
    else {
        qsort(chosen, older, sizeof *chosen, by_rank);
        for (long k = 0; k < num_best; k++) chosen[k] = 0xffffffffu - (uint32_t)chosen[k];
        qsort(chosen, num_best, sizeof *chosen, by_place);
    }
    for (long k = 0; k < p->recent; k++) chosen[num_best + k] = (uint64_t)(older + k);
}

/* The first keys, as far before the next as they were in the beginning: turned from where they were then. */
static void move_sinks(const tm_attention_job *j, const tm_segment *g, long head) {
    const tm_layer *l = j->layer;
    const tm_policy *p = g->policy;
    const int32_t *pages = pages_of(j, g);
    long dim = l->head_dim, half = l->num_rotated / 2, end = g->position + g->count, by = end - p->kept;
    const float *cos = l->cos + by * half, *sin = l->sin + by * half;
    float *first = memory_of(j, g, head);
    for (long k = 0; k < p->sinks && half; k++) {
        float *key = first + k * dim, turned[dim];
        char *row = row_at(j, j->keys, pages, head, k);
        if (end == p->capacity)
            for (long i = 0; i < dim; i += 8) f32x8_store(key + i, load(row, i, has_bf16(j)));
        memcpy(turned, key, dim * sizeof(float));
        for (long i = 0; i < half; i++) { /* tables may be scaled, as they are at position 0 */
            float c = cos[i] / l->cos[i], s = sin[i] / l->cos[i];
            turned[i] = key[i] * c - key[half + i] * s;
            turned[half + i] = key[half + i] * c + key[i] * s;
        }
        put(row, turned, dim, has_bf16(j));
    }
}

static void evict(const tm_attention_job *j, const tm_segment *g, long head, uint64_t *chosen) {
    const tm_policy *p = g->policy;
    const int32_t *pages = pages_of(j, g);
    float *sums = memory_of(j, g, head);
    choose(j, g, head, g->slot + g->count, chosen);
    for (long k = 0; k < p->kept; k++) {
        long from = (long)chosen[k];
        if (from == k) continue;
        memcpy(row_at(j, j->keys, pages, head, k), row_at(j, j->keys, pages, head, from), row_bytes(j));
        memcpy(row_at(j, j->values, pages, head, k), row_at(j, j->values, pages, head, from), row_bytes(j));
        if (p->kind == H2O) sums[k] = sums[from];
    }
    if (p->kind == STREAMING) move_sinks(j, g, head);
}

static int is_sparse(const tm_segment *g) { return g->policy->kind == QUEST || g->policy->kind == DOUBLE; }
static long scratch_bytes(const tm_segment *g) { return ((g->policy->capacity + 8) & ~7L) * 4 * (long)sizeof(float); }

static long token_bytes(const tm_segment *g) { return 2 * (g->position + 1) * (long)sizeof(uint64_t); }

static void finish_segment(void *arg, long task, int thread) {
    const round_job *r = arg;
    const tm_attention_job *j = r->attention;
    const tm_segment *g = r->round->segments + task / j->layer->num_kv_heads;
    long head = task % j->layer->num_kv_heads;
    if (is_sparse(g)) return;
    void *scratch = tm_scratch(thread, 1, scratch_bytes(g)); /* policy_rounds has made sure there is */
    if (g->policy->kind == H2O || g->policy->kind == SNAPKV) accumulate(j, g, head, scratch);
    if (g->evicts) evict(j, g, head, scratch);
}

/* ---- Quest */

static long num_channels(const tm_attention_job *j, const tm_segment *g) {
    return g->policy->channels < j->layer->head_dim ? g->policy->channels : j->layer->head_dim;
}

static float value_at(const char *row, long i, int is_bf16) {
    if (!is_bf16) return ((const float *)row)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)row)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Double Sparsity: squares of the observed queries by channel, behind all else that the head has in the row's memory. */
static float *squares_of(const tm_attention_job *j, const tm_segment *g, long head) {
    return memory_of(j, g, head) + g->policy->stride - j->layer->head_dim;
}

/* Added up query after query, head after head. */
static void observe(void *arg, long task, int thread) {
    (void)thread;
    const round_job *r = arg;
    const tm_attention_job *j = r->attention;
    const tm_segment *g = r->round->segments + task / j->layer->num_kv_heads;
    if (g->policy->kind != DOUBLE || g->num_read) return;
    long head = task % j->layer->num_kv_heads, dim = j->layer->head_dim, group = j->layer->num_heads / j->layer->num_kv_heads;
    float *squares = squares_of(j, g, head);
    if (g->position == g->policy->first_observed) memset(squares, 0, dim * sizeof *squares);
    for (long k = 0; k < g->count; k++) {
        const float *q = query_of(j, g->token + k, head);
        for (long h = 0; h < group; h++)
            for (long i = 0; i < dim; i += 8) {
                f32x8 part = f32x8_load(q + h * dim + i);
                f32x8_store(squares + i, f32x8_fma(f32x8_load(squares + i), part, part));
            }
    }
}

/* The channels that move scores most, in their order: the spread of the keys before a row's first sparse query, times the squares of
   the queries that were observed. A channel in which all keys are alike moves all scores alike, which changes no probability. */
static void choose_channels(const tm_attention_job *j, const tm_segment *g, long head, float *chosen) {
    const int32_t *pages = pages_of(j, g);
    long dim = j->layer->head_dim, num = num_channels(j, g);
    float mean[dim], spread[dim];
    uint64_t ranks[dim];
    int is_bf16 = has_bf16(j);
    for (long i = 0; i < dim; i += 8) {
        f32x8 sum = f32x8_set(0), squares = f32x8_set(0);
        for (long k = 0; k < g->position; k++) sum = f32x8_add(sum, load(row_at(j, j->keys, pages, head, k), i, is_bf16));
        f32x8_store(mean + i, f32x8_mul1(sum, 1.0f / (float)g->position));
        for (long k = 0; k < g->position; k++) {
            f32x8 off = f32x8_sub(load(row_at(j, j->keys, pages, head, k), i, is_bf16), f32x8_load(mean + i));
            squares = f32x8_fma(squares, off, off);
        }
        f32x8_store(spread + i, f32x8_mul(squares, f32x8_load(squares_of(j, g, head) + i)));
    }
    for (long i = 0; i < dim; i++) ranks[i] = rank(spread[i], i);
    qsort(ranks, dim, sizeof *ranks, by_rank);
    for (long i = 0; i < num; i++) ranks[i] = 0xffffffffu - (uint32_t)ranks[i];
    qsort(ranks, num, sizeof *ranks, by_place);
    for (long i = 0; i < num; i++) chosen[i] = (float)ranks[i];
}

/* Double Sparsity: of the keys of new tokens, the chosen channels. */
static void label(const tm_attention_job *j, const tm_segment *g, long head) {
    float *chosen = memory_of(j, g, head);
    long num = num_channels(j, g);
    if (!g->first_page) choose_channels(j, g, head, chosen);
    for (long k = g->first_page; k < g->first_page + g->num_pages; k++) {
        const char *key = row_at(j, j->keys, pages_of(j, g), head, k);
        for (long c = 0; c < num; c++) chosen[(k + 1) * num + c] = value_at(key, (long)chosen[c], has_bf16(j));
    }
}

/* The lowest and the highest of a page's keys, dimension by dimension. */
static void sum_up(void *arg, long task, int thread) {
    (void)thread;
    const round_job *r = arg;
    const tm_attention_job *j = r->attention;
    const tm_segment *g = r->round->segments + task / j->layer->num_kv_heads;
    const int32_t *pages = pages_of(j, g);
    long head = task % j->layer->num_kv_heads, dim = j->layer->head_dim, size = j->step->page_size;
    int is_bf16 = has_bf16(j);
    if (g->policy->kind == DOUBLE) {
        if (g->num_pages) label(j, g, head);
        return;
    }
    for (long page = g->first_page; page < g->first_page + g->num_pages; page++) {
        float *low = memory_of(j, g, head) + page * 2 * dim, *high = low + dim;
        for (long i = 0; i < dim; i += 8) {
            f32x8 lowest = load(row_at(j, j->keys, pages, head, page * size), i, is_bf16), highest = lowest;
            for (long k = 1; k < size; k++) {
                f32x8 key = load(row_at(j, j->keys, pages, head, page * size + k), i, is_bf16);
                lowest = f32x8_min(lowest, key), highest = f32x8_max(highest, key);
            }
            f32x8_store(low + i, lowest), f32x8_store(high + i, highest);
        }
    }
}

/* The most that a query of the group can score with a key of the page, summed over the group. */
static float bound(const float *q, long group, long dim, const float *low, const float *high) {
    f32x8 sum = f32x8_set(0);
    for (long h = 0; h < group; h++)
        for (long i = 0; i < dim; i += 8) {
            f32x8 part = f32x8_load(q + h * dim + i);
            sum = f32x8_add(sum, f32x8_max(f32x8_mul(part, f32x8_load(low + i)), f32x8_mul(part, f32x8_load(high + i))));
        }
    return f32x8_sum(sum);
}

/* As bits that are in the order of the floats, negative ones included. */
static uint64_t signed_rank(float score, long page) {
    uint32_t bits;
    memcpy(&bits, &score, 4);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)page);
}

/* One token over the tokens that score highest in the chosen channels, by the best of the group's queries; its own is always among them. */
static void attend_tokens(const tm_attention_job *j, const tm_segment *g, long head, int thread) {
    const tm_layer *l = j->layer;
    long num = g->num_read, width = num_channels(j, g), group = l->num_heads / l->num_kv_heads;
    uint64_t *ranks = tm_scratch(thread, 0, token_bytes(g)); /* policy_rounds has made sure there is */
    int64_t *path = (int64_t *)(ranks + g->position + 1);
    const float *chosen = memory_of(j, g, head), *q = query_of(j, g->token, head);
    float parts[group * width];
    for (long i = 0; i < group * width; i++) parts[i] = q[i / width * l->head_dim + (long)chosen[i % width]];
    for (long k = 0; k < g->position; k++) {
        const float *own = chosen + (k + 1) * width;
        float best = -INFINITY;
        for (long h = 0; h < group; h++) {
            float sum = 0;
            for (long c = 0; c < width; c++) sum += parts[h * width + c] * own[c];
            best = sum > best ? sum : best;
        }
        ranks[k] = signed_rank(best, k);
    }
    qsort(ranks, g->position, sizeof *ranks, by_rank);
    for (long i = 0; i < num - 1; i++) ranks[i] = 0xffffffffu - (uint32_t)ranks[i];
    qsort(ranks, num - 1, sizeof *ranks, by_place);
    for (long i = 0; i < num - 1; i++) path[i] = (int64_t)ranks[i];
    path[num - 1] = g->position;
    tm_places where = {pages_of(j, g), path, 0};
    attention_tile(j, g->token, 1, num - 1, 0, &where, head, thread);
}

/* One token over the pages that promise most; the first page and its own are always among them. */
static void attend_sparse(void *arg, long task, int thread) {
    const round_job *r = arg;
    const tm_attention_job *j = r->attention;
    const tm_layer *l = j->layer;
    const tm_segment *g = r->round->segments + task / l->num_kv_heads;
    if (!g->num_read) return;
    const int32_t *pages = pages_of(j, g);
    long head = task % l->num_kv_heads, size = j->step->page_size, last = g->position / size, num = g->num_read;
    if (g->policy->kind == DOUBLE && l->number >= g->policy->dense_layers && num <= g->position) {
        attend_tokens(j, g, head, thread);
        return;
    }
    if (l->number < g->policy->dense_layers || num > last || g->policy->kind == DOUBLE) {
        tm_places where = {pages, NULL, LONG_MAX};
        attention_tile(j, g->token, 1, g->position, 0, &where, head, thread);
        return;
    }
    uint64_t ranks[last]; /* a context of pages: some KiB */
    int32_t read[num];
    const float *summed = memory_of(j, g, head), *q = query_of(j, g->token, head);
    for (long page = 1; page < last; page++) {
        const float *low = summed + page * 2 * l->head_dim;
        ranks[page] = signed_rank(bound(q, l->num_heads / l->num_kv_heads, l->head_dim, low, low + l->head_dim), page);
    }
    qsort(ranks + 1, last - 1, sizeof *ranks, by_rank);
    ranks[0] = 0;
    for (long i = 1; i < num - 1; i++) ranks[i] = 0xffffffffu - (uint32_t)ranks[i];
    qsort(ranks, num - 1, sizeof *ranks, by_place);
    for (long i = 0; i < num - 1; i++) read[i] = pages[ranks[i]];
    read[num - 1] = pages[last];
    tm_places where = {read, NULL, LONG_MAX};
    attention_tile(j, g->token, 1, (num - 1) * size + g->position % size, 0, &where, head, thread);
}

int policy_rounds(const tm_attention_job *job) {
    long num_heads = job->layer->num_kv_heads;
    for (long i = 0; i < job->step->num_rounds; i++) {
        round_job r = {job, job->step->rounds + i};
        long num_tasks = r.round->num_segments * num_heads;
        int some_sparse = 0;
        for (long g = 0; g < r.round->num_segments; g++) {
            const tm_segment *one = r.round->segments + g;
            some_sparse |= is_sparse(one);
            for (int t = 0; t < tm_num_threads(); t++) {
                if (!is_sparse(one) && !tm_scratch(t, 1, scratch_bytes(one))) return -1;
                if (one->policy->kind == DOUBLE && !tm_scratch(t, 0, token_bytes(one))) return -1;
            }
        }
        if (r.round->tiles) {
            tm_parallel(num_tasks, 1, enter_segment, &r);
            tm_parallel(r.round->tiles->num_tiles * num_heads, 1, attend_round, &r);
        }
        if (some_sparse) {
            tm_parallel(num_tasks, 1, observe, &r);
            tm_parallel(num_tasks, 1, sum_up, &r);
            tm_parallel(num_tasks, 1, attend_sparse, &r);
        }
        tm_parallel(num_tasks, 1, finish_segment, &r);
    }
    return 0;
}
