/* Attention over the paged KV cache: causal, or over the whole sequence (kernels/attention.py has the reference).

Queries are taken in tiles: some tokens of one request, times the query heads that share a KV head. Keys are taken in blocks of 32
positions, counted from the request's first token. For every query the blocks are merged in order by the online softmax, each sum
being one chain of operations: bits depend on the query's position and the tokens before it, not on tiles, pages or the rest of the batch. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__aarch64__)
#pragma GCC optimize("no-schedule-insns") /* which moves loads up until the register tiles spill: a quarter slower */
#endif

#include <limits.h>
#include <math.h>

#include "attention.h"
#include "kv_codes.h"

#define BLOCK 32
#define FEW 4    /* query rows up to which keys and values are read where they lie */
#define MANY 6   /* query rows of a register tile otherwise */

/* Queries of some tokens of one request for one KV head; row = token * group + query head of the group. */
typedef struct {
    long num_rows, group, start, dim, value_dim; /* start: position of the first token */
    long num_biased;                  /* rows without those that only fill a register tile */
    long window;
    long reach;         /* position of the last key that all rows see; -1: each its own, the tile is causal */
    const float *bias;  /* of the KV head's first query head, for distance 0; NULL: none */
    long bias_stride;
    float softcap; /* of scores as they are here, logarithms to base 2 */
    float *queries, *sums, *top, *total;
    code_factor *factors; /* queries in whole numbers, and what one of each row is worth */
    float *worth, *query_sums;
} tile;

/* Of a thread: a block of keys and values, a tile's queries and sums, and a block as KVQuant gives it. */
static long scratch_bytes(long dim) {
    long bytes = 2 * (2 * BLOCK + MAX_TILE_ROWS + 2) * padded_dim(dim) * (long)sizeof(float), of_tiles = tiles_scratch_bytes(dim);
    return bytes > of_tiles ? bytes : of_tiles;
}

TM_INLINE long largest_dim(const tm_layer *l) { return l->head_dim > l->value_dim ? l->head_dim : l->value_dim; }

/* A block of keys or values: where each position's numbers lie. */
typedef const char *block_rows[BLOCK];

/* As find_rows, of a whole block: rows past the last repeat it; they are read, never used. */
static void find_block(const tm_step *s, long dim, const char *cache, const tm_places *w, long head, long first, long num, block_rows rows) {
    find_rows(s, dim, cache, w, head, first, num, rows);
    for (long i = num; i < BLOCK; i++) rows[i] = rows[num - 1];
}

/* Scales and offsets of the same positions, of codes of four bits, which are taken sixteen times as large: a sixteenth. */
static void find_offsets(const tm_step *s, const char *scales, const tm_places *w, long head, long first, long num, float *to, float *offsets) {
    long shift = __builtin_ctzl(s->page_size), last = s->page_size - 1;
    for (long i = 0; i < BLOCK; i++) {
        long position = i < num ? place_of(w, first + i) : 0;
        const uint16_t *both = scale_at(s, scales, w->pages[position >> shift], head, position & last);
        uint32_t scale = i < num ? (uint32_t)both[0] << 16 : 0, offset = i < num ? (uint32_t)both[1] << 16 : 0;
        memcpy(to + i, &scale, 4);
        memcpy(offsets + i, &offset, 4);
        to[i] *= 0.0625f;
    }
}

/* Scales of the same positions. Past the last: 0. */
static void find_scales(const tm_step *s, const char *scales, const tm_places *w, long head, long first, long num, float *to) {
    long shift = __builtin_ctzl(s->page_size), i = 0, last = s->page_size - 1;
    if (s->page_size >= 8)
        for (; i + 8 <= num && first + i + 8 <= w->base; i += 8)
            f32x8_store(to + i, f32x8_load_bf16(scale_at(s, scales, w->pages[(first + i) >> shift], head, (first + i) & last)));
    for (; i < BLOCK; i++) {
        long position = i < num ? place_of(w, first + i) : 0;
        uint32_t bits = i < num ? (uint32_t)*scale_at(s, scales, w->pages[position >> shift], head, position & last) << 16 : 0;
        memcpy(to + i, &bits, 4);
    }
}

/* KVQuant's numbers beside the codes of the same positions. */
static void find_extras(const tm_step *s, const char *extras, const tm_places *w, long head, long first, long num, block_rows to) {
    long shift = __builtin_ctzl(s->page_size), last = s->page_size - 1;
    for (long i = 0; i < num; i++) {
        long position = place_of(w, first + i);
        to[i] = extras + w->pages[position >> shift] * s->page_bytes + ((head << shift) + (position & last)) * 8;
    }
}

/* A block in float32, for many query rows. What is past the last position is zero. */
#if defined(__aarch64__)
/* Keys in pairs: eight dimensions of one, then the same of the other. */
static void copy_keys(const block_rows rows, long num, long dim, int format, float *to) {
    for (long k = 0; k < BLOCK; k++, to += k & 1 ? 8 : 2 * dim - 8)
        for (long i = 0; i < dim; i += 8) f32x8_store(to + 2 * i, k < num ? load(rows[k], i, format) : f32x8_set(0));
}
#else
/* Keys side by side: of each of the eight lanes that add up a score, its dimensions one after the other, [lane][dim / 8][key]. */
static void copy_keys(const block_rows rows, long num, long dim, int format, float *to) {
    for (long k = 0; k < BLOCK; k += 8)
        for (long i = 0; i < dim; i += 8) {
            f32x8 x[8];
            for (long r = 0; r < 8; r++) x[r] = k + r < num ? load(rows[k + r], i, format) : f32x8_set(0);
            f32x8_transpose(x);
            for (long lane = 0; lane < 8; lane++) f32x8_store(to + (lane * (dim / 8) + i / 8) * BLOCK + k, x[lane]);
        }
}
#endif
static void copy_values(const block_rows rows, long num, long dim, int format, float *to) {
    for (long k = 0; k < BLOCK; k++, to += dim)
        for (long i = 0; i < dim; i += 8) f32x8_store(to + i, k < num ? load(rows[k], i, format) : f32x8_set(0));
}

/* scores[r][0 .. num - 1] = q_r . k for `n` rows; of four, two keys at a time: their sums must fit the registers. `n` and `format` are
   constants where this is called, and so is `dim` for the usual sizes. */
TM_INLINE void score_rows(const float *q, const block_rows keys, long num, long dim, int n, int format, float *scores) {
    const int together = n < FEW ? 4 : 2;
    for (long b = 0; b < num; b += together) {
        f32x8 acc[FEW][4];
        for (int r = 0; r < n; r++)
            for (int k = 0; k < together; k++) acc[r][k] = f32x8_set(0);
        for (long i = 0; i < dim; i += 8)
            for (int k = 0; k < together; k++) {
                f32x8 key = load(keys[b + k], i, format);
                for (int r = 0; r < n; r++) acc[r][k] = f32x8_fma(acc[r][k], f32x8_load(q + r * dim + i), key);
            }
        for (int r = 0; r < n; r++) {
            if (together == 2) f32x8_store_two_sums(scores + r * BLOCK + b, f32x8_sum2(acc[r][0], acc[r][1]));
            else f32x8_store_sums(scores + r * BLOCK + b, f32x8_sum2(acc[r][0], acc[r][1]), f32x8_sum2(acc[r][2], acc[r][3]));
        }
    }
}

#define MIX_KEY(f)                                                                                       \
    {                                                                                                    \
        f32x8 value[2];                                                                                  \
        for (int w = 0; w < width; w++) value[w] = load(values[k + f], i + 8 * w, format);             \
        for (int r = 0; r < n; r++)                                                                      \
            for (int w = 0; w < width; w++) sum[r][w] = f32x8_fma_lane(sum[r][w], value[w], prob[r], f); \
    }

/* acc[r] += sum over keys of probability * value, in the order of the keys, for 8 * `width` dimensions from `i` on. Keys are taken
   four at a time; those past the last have probability 0. */
TM_INLINE void mix_part(const float *probs, const block_rows values, long num_keys, long dim, long i, int n, int format, int width,
                        float *acc) {
    f32x8 sum[FEW][2];
    for (int r = 0; r < n; r++)
        for (int w = 0; w < width; w++) sum[r][w] = f32x8_load(acc + r * dim + i + 8 * w);
    for (long k = 0; k < num_keys; k += 4) {
        f32x4 prob[FEW];
        for (int r = 0; r < n; r++) prob[r] = f32x4_load(probs + r * BLOCK + k);
        MIX_KEY(0) MIX_KEY(1) MIX_KEY(2) MIX_KEY(3)
    }
    for (int r = 0; r < n; r++)
        for (int w = 0; w < width; w++) f32x8_store(acc + r * dim + i + 8 * w, sum[r][w]);
}

TM_INLINE void mix_rows(const float *probs, const block_rows values, long num_keys, long dim, int n, int format, float *acc) {
    long i = 0;
    for (; i + 16 <= dim; i += 16) mix_part(probs, values, num_keys, dim, i, n, format, 2, acc);
    if (i < dim) mix_part(probs, values, num_keys, dim, i, n, format, 1, acc);
}

#define SCORE(n) case n: score_rows(q, keys, num, dim, n, format, scores); break;
#define MIX(n) case n: mix_rows(probs, values, num, dim, n, format, acc); break;

TM_INLINE void score_any(const float *q, const block_rows keys, long num, long dim, int n, int format, float *scores) {
    switch (n) { SCORE(1) SCORE(2) SCORE(3) SCORE(4) }
}
TM_INLINE void mix_any(const float *probs, const block_rows values, long num, long dim, int n, int format, float *acc) {
    switch (n) { MIX(1) MIX(2) MIX(3) MIX(4) }
}
#define FOR_DIM(name, dim, format)                                                                             \
    static void score_##name(const float *q, const block_rows keys, long num, long any, int n, float *scores) {  \
        (void)any;                                                                                               \
        score_any(q, keys, num, dim, n, format, scores);                                                       \
    }                                                                                                            \
    static void mix_##name(const float *probs, const block_rows values, long num, long any, int n, float *acc) { \
        (void)any;                                                                                               \
        mix_any(probs, values, num, dim, n, format, acc);                                                      \
    }
FOR_DIM(64, 64, 0)
FOR_DIM(128, 128, 0)
FOR_DIM(any_dim, any, 0)
FOR_DIM(bf16_64, 64, 1)
FOR_DIM(bf16_128, 128, 1)
FOR_DIM(bf16_any, any, 1)
FOR_DIM(f16_64, 64, 2)
FOR_DIM(f16_128, 128, 2)
FOR_DIM(f16_any, any, 2)
static void (*const SCORES[3][3])(const float *, const block_rows, long, long, int, float *) = {
    {score_64, score_128, score_any_dim}, {score_bf16_64, score_bf16_128, score_bf16_any}, {score_f16_64, score_f16_128, score_f16_any}};
static void (*const MIXES[3][3])(const float *, const block_rows, long, long, int, float *) = {
    {mix_64, mix_128, mix_any_dim}, {mix_bf16_64, mix_bf16_128, mix_bf16_any}, {mix_f16_64, mix_f16_128, mix_f16_any}};

/* Register tiles of the functions below have 6 rows, or 3. MIX_VECTORS: how many vectors of dimensions. */
#if defined(__aarch64__)
#define MIX_VECTORS 1
/* The same sums for `n` of many rows, over a block copied by copy_keys: two keys are the halves of a vector. */
TM_INLINE void score_copied(const float *q, const float *keys, long dim, int n, float *scores) {
    for (long b = 0; b < BLOCK; b += 2, keys += 2 * dim) {
        f32x8 acc[MANY][2];
        for (int r = 0; r < n; r++) acc[r][0] = acc[r][1] = f32x8_set(0);
        for (long i = 0; i < dim; i += 8) {
            f32x8 first = f32x8_load(keys + 2 * i), second = f32x8_load(keys + 2 * i + 8);
            for (int r = 0; r < n; r++) {
                f32x8 query = f32x8_load(q + r * dim + i);
                acc[r][0] = f32x8_fma(acc[r][0], query, first);
                acc[r][1] = f32x8_fma(acc[r][1], query, second);
            }
        }
        for (int r = 0; r < n; r++) f32x8_store_two_sums(scores + r * BLOCK + b, f32x8_sum2(acc[r][0], acc[r][1]));
    }
}
#else
#define MIX_VECTORS 2
/* The same sums for `n` of many rows, over a block copied by copy_keys: a vector has a lane's sums of as many keys. Lanes are then added
   in the order of f32x8_store_sums, without moving anything within a vector. */
TM_INLINE void score_copied(const float *q, const float *keys, long dim, int n, float *scores) {
    for (long b = 0; b < BLOCK; b += 2 * WIDE) {
        wide sum[3][MANY][2]; /* of one, two and four lanes */
        _Pragma("GCC unroll 8") for (int lane = 0; lane < 8; lane++) {
            const float *key = keys + lane * (dim / 8) * BLOCK + b;
            wide acc[MANY][2];
            for (int r = 0; r < n; r++) acc[r][0] = acc[r][1] = wide_(set)(0);
            for (long i = lane; i < dim; i += 8, key += BLOCK) {
                wide first = wide_(load)(key), second = wide_(load)(key + WIDE);
                for (int r = 0; r < n; r++) {
                    wide query = wide_(set)(q[r * dim + i]);
                    acc[r][0] = wide_(fma)(acc[r][0], query, first);
                    acc[r][1] = wide_(fma)(acc[r][1], query, second);
                }
            }
            int level = 0;
            for (; lane >> level & 1; level++)
                for (int r = 0; r < n; r++)
                    for (int w = 0; w < 2; w++) acc[r][w] = wide_(add)(sum[level][r][w], acc[r][w]);
            for (int r = 0; r < n; r++)
                for (int w = 0; w < 2; w++) {
                    if (lane < 7) sum[level][r][w] = acc[r][w];
                    else wide_(store)(scores + r * BLOCK + b + w * WIDE, acc[r][w]);
                }
        }
    }
}
#endif

#define COPIED_KEY(lanes, vector, f)                                                                                    \
    {                                                                                                                   \
        vector value[MIX_VECTORS];                                                                                      \
        for (int w = 0; w < width; w++) value[w] = vector##_load(values + (k + f) * dim + i + lanes * w);               \
        for (int r = 0; r < n; r++)                                                                                     \
            for (int w = 0; w < width; w++) sum[r][w] = vector##_fma_lane(sum[r][w], value[w], prob[r], f);             \
    }
/* As mix_part, over values copied by copy_values, for `width` vectors of dimensions from `i` on. */
#define MIX_COPIED(name, lanes, vector)                                                                                 \
    TM_INLINE void name(const float *probs, const float *values, long num_keys, long dim, long i, int n, int width, float *acc) { \
        vector sum[MANY][MIX_VECTORS];                                                                                  \
        for (int r = 0; r < n; r++)                                                                                     \
            for (int w = 0; w < width; w++) sum[r][w] = vector##_load(acc + r * dim + i + lanes * w);                   \
        for (long k = 0; k < num_keys; k += 4) {                                                                        \
            f32x4 prob[MANY];                                                                                           \
            for (int r = 0; r < n; r++) prob[r] = f32x4_load(probs + r * BLOCK + k);                                    \
            COPIED_KEY(lanes, vector, 0) COPIED_KEY(lanes, vector, 1)                                                   \
            COPIED_KEY(lanes, vector, 2) COPIED_KEY(lanes, vector, 3)                                                   \
        }                                                                                                               \
        for (int r = 0; r < n; r++)                                                                                     \
            for (int w = 0; w < width; w++) vector##_store(acc + r * dim + i + lanes * w, sum[r][w]);                   \
    }
MIX_COPIED(mix_copied_8, 8, f32x8)
#if defined(__AVX512F__)
MIX_COPIED(mix_copied_16, 16, f32x16)
#endif

TM_INLINE void mix_copied(const float *probs, const float *values, long num_keys, long dim, int n, float *acc) {
    long i = 0;
#if defined(__AVX512F__)
    for (; i + 16 * MIX_VECTORS <= dim; i += 16 * MIX_VECTORS) mix_copied_16(probs, values, num_keys, dim, i, n, MIX_VECTORS, acc);
#endif
    for (; i + 8 * MIX_VECTORS <= dim; i += 8 * MIX_VECTORS) mix_copied_8(probs, values, num_keys, dim, i, n, MIX_VECTORS, acc);
    if (i < dim) mix_copied_8(probs, values, num_keys, dim, i, n, 1, acc);
}

#define FOR_DIM_COPIED(name, dim)                                                                            \
    static void score_copied_##name(const float *q, const float *keys, long any, int n, float *scores) {     \
        (void)any;                                                                                           \
        n == MANY ? score_copied(q, keys, dim, MANY, scores) : score_copied(q, keys, dim, 3, scores);            \
    }                                                                                                        \
    static void mix_copied_##name(const float *probs, const float *values, long num, long any, int n, float *acc) { \
        (void)any;                                                                                           \
        n == MANY ? mix_copied(probs, values, num, dim, MANY, acc) : mix_copied(probs, values, num, dim, 3, acc); \
    }
FOR_DIM_COPIED(64, 64)
FOR_DIM_COPIED(128, 128)
FOR_DIM_COPIED(any_dim, any)
static void (*const COPIED_SCORES[3])(const float *, const float *, long, int, float *) = {
    score_copied_64, score_copied_128, score_copied_any_dim};
static void (*const COPIED_MIXES[3])(const float *, const float *, long, long, int, float *) = {mix_copied_64, mix_copied_128, mix_copied_any_dim};

/* Scores, which are logarithms to base 2, to probabilities relative to the highest so far; shrink[r]: what row r's earlier blocks are
   to be scaled by. Row by row the same as one row alone; together they do not wait for each other's sums. */
TM_INLINE void soften(float *scores, int n, float *top, float *total, float *shrink) {
    float new_top[MANY], change[8] = {0};
    for (int r = 0; r < n; r++) {
        f32x8 highest = f32x8_load(scores + r * BLOCK);
        for (long k = 8; k < BLOCK; k += 8) highest = f32x8_max(highest, f32x8_load(scores + r * BLOCK + k));
        float block_top = f32x8_maximum(highest);
        new_top[r] = block_top <= top[r] ? top[r] : block_top; /* a NaN stays one */
        change[r] = top[r] - new_top[r];
        top[r] = new_top[r];
    }
    f32x8_store(change, f32x8_exp2_negative(f32x8_load(change))); /* the first block's is 0, of nothing */
    for (int r = 0; r < n; r++) {
        f32x8 sum = f32x8_set(0);
        for (long k = 0; k < BLOCK; k += WIDE) {
            wide prob = wide_(exp2_negative)(wide_(sub)(wide_(load)(scores + r * BLOCK + k), wide_(set)(new_top[r])));
            wide_(store)(scores + r * BLOCK + k, prob); /* of hidden keys, whose score is minus infinity: 0 */
            sum = wide_(add_to)(sum, prob);
        }
        shrink[r] = new_top[r] == new_top[r] ? change[r] : new_top[r];
        total[r] = total[r] * shrink[r] + f32x8_sum(sum);
    }
}
static void soften_rows(float *scores, int n, float *top, float *total, float *shrink) {
    switch (n) {
    case 1: soften(scores, 1, top, total, shrink); break;
    case 2: soften(scores, 2, top, total, shrink); break;
    case 3: soften(scores, 3, top, total, shrink); break;
    case 4: soften(scores, 4, top, total, shrink); break;
    default: soften(scores, MANY, top, total, shrink);
    }
}

/* Position of the last key that a row sees. */
TM_INLINE long last_key(const tile *t, long row) { return t->reach >= 0 ? t->reach : t->start + row / t->group; }

/* To a row's scores of a block, what its head has learned about the distance of each key. The table goes on for a block past the
   largest distance. */
static void add_bias(const tile *t, long row, long first, float *scores) {
    const float *bias = t->bias + row % t->group * t->bias_stride + first - (t->start + row / t->group);
    for (long k = 0; k < BLOCK; k += 8)
        f32x8_store(scores + k, f32x8_fma(f32x8_load(scores + k), f32x8_load(bias + k), f32x8_set(LOG2_E)));
}

/* As mix_rows, but of keys that a row does not see nothing is read: the same bits. */
static void mix_seen(const tile *t, long row, int n, long first, const float *probs, const block_rows values, int format, float *acc) {
    for (int r = 0; r < n; r++) {
        long num = last_key(t, row + r) + 1 - first;
        for (long k = 0; k < num && k < BLOCK; k++)
            for (long i = r * t->value_dim; i < (r + 1) * t->value_dim; i += 8)
                f32x8_store(acc + i, f32x8_fma(f32x8_load(acc + i), load(values[k], i - r * t->value_dim, format), f32x8_set(probs[r * BLOCK + k])));
    }
}

TM_INLINE int size_of(long dim) { return dim == 64 ? 0 : dim == 128 ? 1 : 2; }

/* One block of keys and values for the rows of a tile that see it. `copied`: keys and values in float32, or NULL; `codes`: in 8 or 4
   bits, or NULL. */
static void attend_block(const tile *t, long first, long num, const block_rows keys, const block_rows values, int format,
                         const float *copied, const code_block *codes) {
    float scores[MANY * BLOCK], shrink[MANY];
    long dim = t->dim, value_dim = t->value_dim, together = copied ? MANY : FEW;
    int size = size_of(dim), value_size = size_of(value_dim), is_broken = -1; /* -1: not known */
    for (long row = 0; row < t->num_rows; row += together) {
        int n = t->num_rows - row < together ? t->num_rows - row : together;
        long last = last_key(t, row + n - 1);
        if (last < first || (t->window && first + BLOCK <= t->start + row / t->group - t->window + 1)) continue;
        const float *q = t->queries + row * dim;
        if (codes) {
            CODE_SCORES[size](t->factors + row * FACTOR_PARTS * padded_dim(dim), t->worth + row, codes, num, padded_dim(dim), n, scores);
            if (codes->has_offsets) score_offsets(t->query_sums + row, codes, n, scores);
        } else if (copied)
            COPIED_SCORES[size](q, copied, dim, n, scores);
        else
            SCORES[format][size](q, keys, num, dim, n, scores); /* of keys past the last, something that is not used */
        if (t->softcap) cap(scores, n * BLOCK, t->softcap);
        if (t->bias)
            for (int r = 0; r < n && row + r < t->num_biased; r++) add_bias(t, row + r, first, scores + r * BLOCK);
        if (t->window && first <= last - t->window)
            for (int r = 0; r < n; r++)
                for (long k = 0; k < BLOCK && first + k <= t->start + (row + r) / t->group - t->window; k++) scores[r * BLOCK + k] = -INFINITY;
        if (last_key(t, row) + 1 - first < BLOCK)
            for (int r = 0; r < n; r++)
                for (long k = last_key(t, row + r) + 1 - first; k < BLOCK; k++) scores[r * BLOCK + (k > 0 ? k : 0)] = -INFINITY;
        soften_rows(scores, n, t->top + row, t->total + row, shrink);
        float *acc = t->sums + row * value_dim;
        for (int r = 0; r < n; r++)
            if (shrink[r] != 1)
                for (long i = r * value_dim; i < (r + 1) * value_dim; i += 8) f32x8_store(acc + i, f32x8_mul1(f32x8_load(acc + i), shrink[r]));
        long num_keys = last + 1 - first < num ? last + 1 - first : num, num_seen = last_key(t, row) + 1 - first; /* by all of these rows */
        if (codes) {
            if (codes->has_offsets) mix_offsets(scores, codes, value_dim, n, acc);
            CODE_MIXES[value_size](scores, codes, num_keys, value_dim, n, acc);
        } else if (num_seen < num && (is_broken >= 0 ? is_broken : (is_broken = has_broken(values, last_key(t, 0) + 1 - first, num, value_dim, format))))
            mix_seen(t, row, n, first, scores, values, format, acc);
        else if (copied)
            COPIED_MIXES[value_size](scores, copied + BLOCK * dim, num_keys, value_dim, n, acc);
        else
            MIXES[format][value_size](scores, values, num_keys, value_dim, n, acc);
    }
}

/* Zeros for the tokens of a tile that did not choose a head. Returns whether any did. */
static int clear_unchosen(const tm_attention_job *j, long first, long len, long head) {
    long num_chosen = 0, width = j->layer->num_heads / j->layer->num_kv_heads * j->layer->value_dim;
    for (long token = first; token < first + len; token++) {
        if (is_chosen(j, token, head)) num_chosen++;
        else memset(j->out + (token * j->layer->num_kv_heads + head) * width, 0, width * sizeof(float));
    }
    return num_chosen > 0;
}

void attention_tile(const tm_attention_job *j, long first_token, long len, long start, long end, const tm_places *where, long head, int thread) {
    const tm_step *s = j->step;
    const tm_layer *l = j->layer;
    long dim = l->head_dim, value_dim = l->value_dim, most = largest_dim(l), group = l->num_heads / l->num_kv_heads, num_rows = len * group;
    if (j->chosen && !clear_unchosen(j, first_token, len, head)) return;
    if (!l->is_bidirectional) end = start + len;
    if (tiles_serve(s, l)) {
        attend_with_tiles(j, first_token, len, start, end, where, head, tm_scratch(thread, 1, scratch_bytes(most)));
        return;
    }
    int format = l->quant ? TM_KV_F32 : (int)s->kv_format, has_codes = l->key_scales && !l->quant, is_copied = num_rows > FEW && !has_codes;
    long padded = is_copied ? (num_rows + 2) / 3 * 3 : num_rows; /* a register tile has 3 or 6 rows; those added are ignored */
    float *copied = tm_scratch(thread, 1, scratch_bytes(most)); /* attention_op has made sure there is */
    float top[MAX_TILE_ROWS + 2], total[MAX_TILE_ROWS + 2], worth[MAX_TILE_ROWS + 2], query_sums[MAX_TILE_ROWS + 2], *dequantized = copied + 2 * BLOCK * padded_dim(most);
    float *queries = dequantized + 2 * BLOCK * padded_dim(most);
    tile t = {.num_rows = padded, .num_biased = num_rows, .group = group, .start = start, .dim = dim, .value_dim = value_dim, .window = l->window,
              .reach = l->is_bidirectional ? end - 1 : -1, .bias_stride = l->bias_stride, .softcap = l->softcap * LOG2_E,
              .bias = l->bias ? l->bias + head * group * l->bias_stride + l->bias_stride / 2 : NULL,
              .queries = queries, .sums = queries + padded * padded_dim(dim), .top = top, .total = total,
              .factors = (code_factor *)queries, .worth = worth, .query_sums = query_sums};
    for (long row = 0; row < padded; row++) {
        long token = first_token + row / group;
        const float *q = j->qkv + token * qkv_width(l) + (head * group + row % group) * dim;
        float scaled[MAX_CODE_DIM], *query = has_codes ? scaled : t.queries + row * dim;
        for (long i = 0; i < dim; i += 8) f32x8_store(query + i, row < num_rows ? f32x8_mul1(f32x8_load(q + i), l->scale * LOG2_E) : f32x8_set(0));
        for (long i = 0; i < value_dim; i += 8) f32x8_store(t.sums + row * value_dim + i, f32x8_set(0));
        /* A sink is a key that was seen before all others, of which only the score counts. */
        if (has_codes) {
            f32x8 sum = f32x8_set(0);
            for (long i = 0; i < dim && format == TM_KV_INT4; i += 8) sum = f32x8_add(sum, f32x8_load(query + i));
            query_sums[row] = f32x8_sum(sum);
            worth[row] = query_factors(query, dim, t.factors + row * FACTOR_PARTS * padded_dim(dim));
        }
        top[row] = j->learned.sinks ? j->learned.sinks[head * group + row % group] * LOG2_E : -1e30f; /* lower than any score */
        total[row] = j->learned.sinks ? 1 : 0;
    }
    long seen = l->window ? t.start - l->window + 1 : 0; /* the first position that any row sees */
    for (long first = seen > 0 ? seen / BLOCK * BLOCK : 0; first < end; first += BLOCK) {
        block_rows keys, values;
        code_block codes;
        long num = end - first < BLOCK ? end - first : BLOCK;
        find_block(s, dim, j->keys, where, head, first, num, keys);
        find_block(s, l->value_row, j->values, where, head, first, num, values);
        if (first + BLOCK < end) prefetch(s, l, j, where->pages, head, first + BLOCK, end - first - BLOCK < BLOCK ? end - first - BLOCK : BLOCK);
        if (has_codes) {
            take_block(keys, values, num, dim, format, (char *)copied, &codes);
            codes.has_offsets = format == TM_KV_INT4;
            if (codes.has_offsets) {
                find_offsets(s, l->key_scales, where, head, first, num, codes.key_scales, codes.key_offsets);
                find_offsets(s, l->value_scales, where, head, first, num, codes.value_scales, codes.value_offsets);
            } else {
                find_scales(s, l->key_scales, where, head, first, num, codes.key_scales);
                find_scales(s, l->value_scales, where, head, first, num, codes.value_scales);
            }
        }
        if (l->quant) {
            block_rows key_extras, value_extras;
            find_extras(s, l->key_scales, where, head, first, num, key_extras);
            find_extras(s, l->value_scales, where, head, first, num, value_extras);
            kvquant_take(l, head, first, num, keys, values, key_extras, value_extras, BLOCK, dequantized);
        }
        if (is_copied) {
            copy_keys(keys, num, dim, format, copied);
            copy_values(values, num, value_dim, format, copied + BLOCK * dim);
        }
        attend_block(&t, first, num, keys, values, format, is_copied ? copied : NULL, has_codes ? &codes : NULL);
    }
    for (long row = 0; row < num_rows; row++) {
        if (!is_chosen(j, first_token + row / group, head)) continue;
        float *to = j->out + ((first_token + row / group) * l->num_heads + head * group + row % group) * value_dim;
        for (long i = 0; i < value_dim; i += 8) f32x8_store(to + i, f32x8_mul1(f32x8_load(t.sums + row * value_dim + i), 1.0f / total[row]));
    }
}

static void attend_tile(void *arg, long task, int thread) {
    const tm_attention_job *j = arg;
    const tm_step *s = j->step;
    long at = task / j->layer->num_kv_heads, head = task % j->layer->num_kv_heads;
    tm_places where = {s->tables[j->layer->group] + s->tile_row[at] * s->table_width, NULL, LONG_MAX};
    if (s->tile_path) where.path = s->tile_path + at * s->path_width, where.base = s->tile_base[at];
    attention_tile(j, s->tile_token[at], s->tile_len[at], s->tile_start[at], s->tile_end[at], &where, head, thread);
}

int attention_op(const tm_step *step, const tm_layer *layer, tm_learned learned, float *qkv, void *keys, void *values, float *out, const float *chosen) {
    tm_attention_job j = {step, layer, learned, qkv, keys, values, out, chosen};
    for (int t = 0; t < tm_num_threads(); t++)
        if (!tm_scratch(t, 1, scratch_bytes(largest_dim(layer)))) return -1;
    write_kv_op(step, layer, learned, qkv, keys, values);
    tm_parallel(step->num_tiles * layer->num_kv_heads, 1, attend_tile, &j);
    return step->num_rounds ? policy_rounds(&j) : 0;
}

TM_API int tm_attention(const tm_step *step, const tm_layer *layer, const float *q_norm, const float *k_norm, const float *sinks, float eps,
                        float *qkv, void *keys, void *values, float *out, const float *chosen) {
    tm_lock();
    int failed = attention_op(step, layer, (tm_learned){q_norm, k_norm, sinks, eps}, qkv, keys, values, out, chosen);
    tm_unlock();
    return failed;
}
