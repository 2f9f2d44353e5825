/* Rotation of queries and keys, their entry into the paged cache, and causal attention over it.

Queries are taken in tiles: some tokens of one request, times the query heads that share a KV head. Keys are taken in blocks of 32
positions, counted from the request's first token. For every query the blocks are merged in order by the online softmax, each sum
being one chain of operations: bits depend on the query's position and the tokens before it, not on tiles, pages or company. */
#include <math.h>
#include <stddef.h>

#include "simd.h"
#include "tidemill.h"

#define BLOCK 32
#define MAX_TILE_ROWS 32
#define TOGETHER 4 /* query rows */

typedef struct {
    const tm_step *step;
    float *qkv;          /* [token][q heads | k heads | v heads][head_dim] */
    char *keys, *values; /* [kv head][page][offset][head_dim] */
    float *out;          /* [token][q heads][head_dim] */
} attention_job;

static void rotate(float *x, const float *cos, const float *sin, long half) {
    for (long i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}

static void put(char *cache, long at, const float *x, long dim, int is_half) {
    if (is_half)
        for (long i = 0; i < dim; i += 8) f8_store_f16((uint16_t *)cache + at + i, f8_load(x + i));
    else
        memcpy((float *)cache + at, x, dim * sizeof(float));
}

static void enter_token(void *arg, long token, int thread) {
    (void)thread;
    const attention_job *j = arg;
    const tm_step *s = j->step;
    long dim = s->head_dim, half = dim / 2, num_slots = s->num_pages * s->page_size;
    float *q = j->qkv + token * (s->num_heads + 2 * s->num_kv_heads) * dim;
    float *k = q + s->num_heads * dim, *v = k + s->num_kv_heads * dim;
    const float *cos = s->cos + s->positions[token] * half, *sin = s->sin + s->positions[token] * half;
    for (long h = 0; h < s->num_heads + s->num_kv_heads; h++) rotate(q + h * dim, cos, sin, half);
    for (long h = 0; h < s->num_kv_heads; h++) {
        long at = (h * num_slots + s->slots[token]) * dim;
        put(j->keys, at, k + h * dim, dim, s->is_half);
        put(j->values, at, v + h * dim, dim, s->is_half);
    }
}

/* Positions first .. first + num - 1 of a request, out of its pages, as floats in a row. */
static void fetch(const tm_step *s, const char *cache, const int32_t *pages, long head, long first, long num, float *to) {
    long dim = s->head_dim;
    for (long i = 0; i < num;) {
        long position = first + i, offset = position % s->page_size, run = s->page_size - offset;
        if (run > num - i) run = num - i;
        long at = ((head * s->num_pages + pages[position / s->page_size]) * s->page_size + offset) * dim;
        if (s->is_half)
            for (long k = 0; k < run * dim; k += 8) f8_store(to + i * dim + k, f8_load_f16((const uint16_t *)cache + at + k));
        else
            memcpy(to + i * dim, (const float *)cache + at, run * dim * sizeof(float));
        i += run;
    }
}

/* scores[r][0 .. 31] = q_r . k for `n` rows, a constant where this is called. Keys past the last are whatever lies there. */
TM_INLINE void score_rows(const float *q, const float *keys, long dim, int n, float *scores) {
    for (long b = 0; b < BLOCK; b += 4) {
        f8 acc[2][4];
        for (int r = 0; r < n; r++)
            for (int k = 0; k < 4; k++) acc[r][k] = f8_set(0);
        for (long i = 0; i < dim; i += 8) {
            f8 query[2];
            for (int r = 0; r < n; r++) query[r] = f8_load(q + r * dim + i);
            for (int k = 0; k < 4; k++) {
                f8 key = f8_load(keys + (b + k) * dim + i);
                for (int r = 0; r < n; r++) acc[r][k] = f8_fma(acc[r][k], query[r], key);
            }
        }
        for (int r = 0; r < n; r++) f8_sum4(scores + r * BLOCK + b, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    }
}

/* acc[r] += sum over keys of probability * value, in the order of the keys, for 8 * `width` dimensions from `i` on. */
TM_INLINE void mix_part(const float *probs, const float *values, long num_keys, long dim, long i, int n, int width, float *acc) {
    f8 sum[TOGETHER][2];
    for (int r = 0; r < n; r++)
        for (int w = 0; w < width; w++) sum[r][w] = f8_load(acc + r * dim + i + 8 * w);
    for (long k = 0; k < num_keys; k++) {
        f8 value[2];
        for (int w = 0; w < width; w++) value[w] = f8_load(values + k * dim + i + 8 * w);
        for (int r = 0; r < n; r++)
            for (int w = 0; w < width; w++) sum[r][w] = f8_fma1(sum[r][w], value[w], probs[r * BLOCK + k]);
    }
    for (int r = 0; r < n; r++)
        for (int w = 0; w < width; w++) f8_store(acc + r * dim + i + 8 * w, sum[r][w]);
}

TM_INLINE void mix_rows(const float *probs, const float *values, long num_keys, long dim, int n, float *acc) {
    long i = 0;
    for (; i + 16 <= dim; i += 16) mix_part(probs, values, num_keys, dim, i, n, 2, acc);
    if (i < dim) mix_part(probs, values, num_keys, dim, i, n, 1, acc);
}

/* Scores of one row to probabilities relative to the highest so far; returns what the earlier blocks are to be scaled by. */
static float soften(float *scores, long num_keys, float *top, float *total) {
    f8 lane_top = f8_set(-INFINITY);
    for (long k = num_keys; k < BLOCK; k++) scores[k] = -INFINITY;
    for (long k = 0; k < BLOCK; k += 8) lane_top = f8_max(lane_top, f8_load(scores + k));
    float block_top = f8_maximum(lane_top), new_top = block_top > *top ? block_top : *top;
    f8 sum = f8_set(0);
    for (long k = 0; k < BLOCK; k += 8) f8_store(scores + k, f8_exp(f8_sub(f8_load(scores + k), f8_set(new_top))));
    for (long k = num_keys; k < BLOCK; k++) scores[k] = 0;
    for (long k = 0; k < BLOCK; k += 8) sum = f8_add(sum, f8_load(scores + k));
    float shrink[8];
    f8_store(shrink, f8_exp(f8_set(*top - new_top)));
    if (*top == -INFINITY) shrink[0] = 0; /* the first block */
    *total = *total * shrink[0] + f8_sum(sum);
    *top = new_top;
    return shrink[0];
}

static void attend_tile(void *arg, long task, int thread) {
    const attention_job *j = arg;
    const tm_step *s = j->step;
    long dim = s->head_dim, group = s->num_heads / s->num_kv_heads;
    long tile = task / s->num_kv_heads, head = task % s->num_kv_heads;
    long len = s->tile_len[tile], num_rows = len * group, start = s->tile_start[tile], end = start + len;
    const int32_t *pages = s->table + s->tile_row[tile] * s->table_width;
    float *keys = tm_scratch(thread, 1, (2 * BLOCK + 2 * num_rows) * dim * (long)sizeof(float));
    if (!keys) return; /* attention_op has made sure there is */
    float *values = keys + BLOCK * dim, *queries = values + BLOCK * dim, *sums = queries + num_rows * dim;
    float scores[TOGETHER * BLOCK], top[MAX_TILE_ROWS], total[MAX_TILE_ROWS];
    for (long row = 0; row < num_rows; row++) {
        const float *q = j->qkv + ((s->tile_token[tile] + row / group) * (s->num_heads + 2 * s->num_kv_heads) + head * group + row % group) * dim;
        for (long i = 0; i < dim; i += 8) {
            f8_store(queries + row * dim + i, f8_mul1(f8_load(q + i), s->scale));
            f8_store(sums + row * dim + i, f8_set(0));
        }
        top[row] = -INFINITY;
        total[row] = 0;
    }
    for (long first = 0; first < end; first += BLOCK) {
        long num = end - first < BLOCK ? end - first : BLOCK;
        fetch(s, j->keys, pages, head, first, num, keys);
        fetch(s, j->values, pages, head, first, num, values);
        for (long row = 0; row < num_rows; row += TOGETHER) {
            int n = num_rows - row < TOGETHER ? num_rows - row : TOGETHER;
            long last = start + (row + n - 1) / group; /* position of the last row's token */
            if (last < first) continue;
            float *acc = sums + row * dim;
            const float *q = queries + row * dim;
            for (int r = 0; r < n; r += 2)
                if (n - r > 1)
                    score_rows(q + r * dim, keys, dim, 2, scores + r * BLOCK);
                else
                    score_rows(q + r * dim, keys, dim, 1, scores + r * BLOCK);
            for (int r = 0; r < n; r++) {
                long visible = start + (row + r) / group + 1 - first;
                if (visible <= 0) { /* a row whose token lies before this block, beside one whose token does not */
                    for (long k = 0; k < BLOCK; k++) scores[r * BLOCK + k] = 0;
                    continue;
                }
                float shrink = soften(scores + r * BLOCK, visible < BLOCK ? visible : BLOCK, top + row + r, total + row + r);
                for (long i = 0; i < dim; i += 8) f8_store(acc + r * dim + i, f8_mul1(f8_load(acc + r * dim + i), shrink));
            }
            long reach = last + 1 - first < num ? last + 1 - first : num;
            switch (n) {
            case 1: mix_rows(scores, values, reach, dim, 1, acc); break;
            case 2: mix_rows(scores, values, reach, dim, 2, acc); break;
            case 3: mix_rows(scores, values, reach, dim, 3, acc); break;
            default: mix_rows(scores, values, reach, dim, 4, acc);
            }
        }
    }
    for (long row = 0; row < num_rows; row++) {
        float *to = j->out + ((s->tile_token[tile] + row / group) * s->num_heads + head * group + row % group) * dim;
        for (long i = 0; i < dim; i += 8) f8_store(to + i, f8_mul1(f8_load(sums + row * dim + i), 1.0f / total[row]));
    }
}

int attention_op(const tm_step *step, float *qkv, void *keys, void *values, float *out) {
    attention_job j = {step, qkv, keys, values, out};
    for (int t = 0; t < tm_num_threads(); t++)
        if (!tm_scratch(t, 1, (2 * BLOCK + 2 * MAX_TILE_ROWS) * step->head_dim * (long)sizeof(float))) return -1;
    tm_parallel(step->num_tokens, 8, enter_token, &j);
    tm_parallel(step->num_tiles * step->num_kv_heads, 1, attend_tile, &j);
    return 0;
}

TM_API int tm_attention(const tm_step *step, float *qkv, void *keys, void *values, float *out) {
    tm_lock();
    int failed = attention_op(step, qkv, keys, values, out);
    tm_unlock();
    return failed;
}
