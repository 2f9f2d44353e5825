/* Attention over keys and values in 8 or 4 bits, in whole numbers.

A token and head has codes of -127 .. 127 (in 4 bits -8 .. 7, taken here sixteen times as large) and a scale, in 4 bits also an offset:
its part of a score is the offset times the sum of the query. Queries, and the
probabilities of a block of keys times the values' scales, become whole numbers of 15 bits, each row with a factor of its own. Their
sums of products with codes are exact, so they have no order; rounding a query to 15 bits changes it by less than float16 would. */
#ifndef TM_KV_CODES_H
#define TM_KV_CODES_H

#include "attention.h"

#define CODE_BLOCK 32      /* keys */
#define CODE_ROWS 4        /* query rows taken together, at most */
#define LARGEST_FACTOR 16383
#define MAX_CODE_DIM 1024  /* sums of products of so many fit 32 bits */

TM_INLINE long padded_dim(long dim) { return (dim + 31) / 32 * 32; }

/* ---- a block of keys and values */

typedef const char *code_rows[CODE_BLOCK];

typedef struct {
    const char *const *keys; /* codes in eight bits, [padded_dim] of each */
    code_rows unpacked;
    value_code *values; /* [key / 4], each as `values_store` lays out four */
    float key_scales[CODE_BLOCK], value_scales[CODE_BLOCK]; /* past the last key: 0 */
    float key_offsets[CODE_BLOCK], value_offsets[CODE_BLOCK];
    int has_offsets;
} code_block;

/* To the scores of `n` rows, the keys' offsets times the sum of each row's query. */
static void score_offsets(const float *sums, const code_block *block, int n, float *scores) {
    for (int r = 0; r < n; r++)
        for (long k = r * CODE_BLOCK; k < (r + 1) * CODE_BLOCK; k += 8)
            f32x8_store(scores + k, f32x8_fma(f32x8_load(scores + k), f32x8_load(block->key_offsets + (k & (CODE_BLOCK - 1))), f32x8_set(sums[r])));
}

/* To the sums of `n` rows, the values' offsets times probabilities. */
static void mix_offsets(const float *probs, const code_block *block, long dim, int n, float *sums) {
    for (int r = 0; r < n; r++) {
        f32x8 part = f32x8_set(0);
        for (long k = 0; k < CODE_BLOCK; k += 8) part = f32x8_fma(part, f32x8_load(probs + r * CODE_BLOCK + k), f32x8_load(block->value_offsets + k));
        f32x8 all = f32x8_set(f32x8_sum(part));
        for (long i = r * dim; i < (r + 1) * dim; i += 8) f32x8_store(sums + i, f32x8_add(f32x8_load(sums + i), all));
    }
}

/* Codes of a row in eight bits, followed by zeros. */
static void unpack_row(const char *row, long dim, int format, int8_t *to) {
    long half = dim / 2, i = 0;
    if (format == TM_KV_INT8) {
        memcpy(to, row, dim);
        i = dim;
    } else if (half % 32 == 0) {
        for (; i < half; i += 32) {
            u8x32 both = u8x32_load(row + i);
            u8x32_store(to + i, u8x32_low_by_16(both));
            u8x32_store(to + half + i, u8x32_high_by_16(both));
        }
        i = dim;
    } else {
        for (; i < half; i++) {
            to[i] = (int8_t)((uint8_t)row[i] << 4);
            to[half + i] = (int8_t)(row[i] & 0xf0);
        }
        i = dim;
    }
    if (i < padded_dim(dim)) memset(to + i, 0, padded_dim(dim) - i);
}

/* `keys` and `values`: where the rows lie in the cache. `room`: for 4 * CODE_BLOCK * padded_dim bytes. */
static void take_block(const code_rows keys, const code_rows values, long num, long dim, int format, char *room, code_block *block) {
    long padded = padded_dim(dim);
    int8_t *unpacked = (int8_t *)room;
    block->values = (value_code *)(room + CODE_BLOCK * padded);
    int is_packed = format != TM_KV_INT8 || dim != padded;
    block->keys = is_packed ? block->unpacked : keys;
    for (long k = 0; k < CODE_BLOCK && is_packed; k++) {
        if (k < num) unpack_row(keys[k], dim, format, unpacked + k * padded);
        block->unpacked[k] = (const char *)unpacked + (k < num ? k : num - 1) * padded;
    }
    int8_t four[4 * MAX_CODE_DIM];
    for (long k = 0; k < num; k += 4) {
        const int8_t *rows[4];
        for (int f = 0; f < 4; f++) {
            if (is_packed) unpack_row(values[k + f], dim, format, four + f * padded);
            rows[f] = is_packed ? four + f * padded : (const int8_t *)values[k + f];
        }
        for (long i = 0; i < padded; i += 16) values_store(block->values + (k * padded + 4 * i), rows, i);
    }
}

/* Whole numbers for `num` values, a multiple of 8, in `parts` that lie `stride` apart. Returns what one of them is worth. */
TM_INLINE float to_factors(const float *x, long num, code_factor *to, long stride) {
    float top = magnitude(x, num), factor = top > 0 ? LARGEST_FACTOR / top : 0;
    for (long i = 0; i < num; i += 8) factors_store(to + i, stride, f32x8_load(x + i), factor);
    return top / LARGEST_FACTOR;
}

/* A query's, [part][padded_dim]. */
static float query_factors(const float *q, long dim, code_factor *to) {
    long padded = padded_dim(dim);
    if (dim < padded) memset(to, 0, sizeof(code_factor) * FACTOR_PARTS * padded);
    return to_factors(q, dim, to, padded);
}

/* scores[r][0 .. 31] = q_r . k. `queries`: [row][part][padded_dim]; `worth`: of each row. */
TM_INLINE void score_codes(const code_factor *queries, const float *worth, const code_block *block, long num, long padded, int n,
                           float *scores) {
    for (long b = 0; b < CODE_BLOCK; b += 4) {
        if (b >= num) { /* hidden from all */
            for (int r = 0; r < n; r++) memset(scores + r * CODE_BLOCK + b, 0, 16);
            continue;
        }
        code_sum acc[CODE_ROWS][4];
        for (int r = 0; r < n; r++)
            for (int k = 0; k < 4; k++) acc[r][k] = code_sum_zero();
        for (int part = 0; part < FACTOR_PARTS; part++) {
            if (part)
                for (int r = 0; r < n; r++)
                    for (int k = 0; k < 4; k++) acc[r][k] = code_sum_next_part(acc[r][k]);
            for (long i = 0; i < padded; i += 32) {
                codes32 key[4];
                for (int k = 0; k < 4; k++) key[k] = codes32_load(block->keys[b + k] + i);
                for (int r = 0; r < n; r++) {
                    factors32 q = factors32_load(queries + (r * FACTOR_PARTS + part) * padded + i);
                    for (int k = 0; k < 4; k++) acc[r][k] = code_sum_dot(acc[r][k], key[k], q);
                }
            }
        }
        for (int r = 0; r < n; r++) code_sums_store(scores + r * CODE_BLOCK + b, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    }
    for (int r = 0; r < n; r++)
        for (long k = 0; k < CODE_BLOCK; k += 8)
            f32x8_store(scores + r * CODE_BLOCK + k,
                        f32x8_mul(f32x8_load(scores + r * CODE_BLOCK + k), f32x8_mul1(f32x8_load(block->key_scales + k), worth[r])));
}

#define MIX_FOUR(f)                                                                                       \
    {                                                                                                     \
        codes8x4 value = codes8x4_load(block->values + ((k + 4 * f) * padded + 4 * i));                   \
        for (int r = 0; r < n; r++)                                                                       \
            for (int p = 0; p < FACTOR_PARTS; p++) acc[r][p] = codes8x4_dot(acc[r][p], value, prob[r][p], f); \
    }

/* Eight dimensions from `i` on. The parts' sums, below 2^22, become floats one by one. */
TM_INLINE void mix_part_codes(const code_factor *probs, const float *worth, const code_block *block, long num, long dim, long i, int n,
                              float *sums) {
    long padded = padded_dim(dim);
    i32x8 acc[CODE_ROWS][FACTOR_PARTS];
    for (int r = 0; r < n; r++)
        for (int p = 0; p < FACTOR_PARTS; p++) acc[r][p] = i32x8_start();
    for (long k = 0; k < num; k += 16) {
        factors16 prob[CODE_ROWS][FACTOR_PARTS];
        for (int r = 0; r < n; r++)
            for (int p = 0; p < FACTOR_PARTS; p++) prob[r][p] = factors16_load(probs + (r * FACTOR_PARTS + p) * CODE_BLOCK + k);
        MIX_FOUR(0) MIX_FOUR(1) MIX_FOUR(2) MIX_FOUR(3)
    }
    for (int r = 0; r < n; r++) {
        f32x8 sum = f32x8_load(sums + r * dim + i);
        for (int p = 0; p < FACTOR_PARTS; p++)
            sum = f32x8_fma1(sum, i32x8_finish(acc[r][p]), p + 1 < FACTOR_PARTS ? 128 * worth[r] : worth[r]);
        f32x8_store(sums + r * dim + i, sum);
    }
}

/* sums[r] += probability * value, over the block's first `num` keys. `scores`: probabilities; multiplied by the values' scales. */
TM_INLINE void mix_codes(float *scores, const code_block *block, long num, long dim, int n, float *sums) {
    code_factor probs[CODE_ROWS * FACTOR_PARTS * CODE_BLOCK];
    float worth[CODE_ROWS];
    for (int r = 0; r < n; r++) {
        float *row = scores + r * CODE_BLOCK;
        for (long k = 0; k < CODE_BLOCK; k += 8) f32x8_store(row + k, f32x8_mul(f32x8_load(row + k), f32x8_load(block->value_scales + k)));
        worth[r] = to_factors(row, CODE_BLOCK, probs + r * FACTOR_PARTS * CODE_BLOCK, CODE_BLOCK);
    }
    for (long i = 0; i < dim; i += 8) mix_part_codes(probs, worth, block, num, dim, i, n, sums);
}

#define SCORE_CODES(n, size) case n: score_codes(q, worth, block, num, padded_dim(size), n, scores); break;
#define MIX_CODES(n, size) case n: mix_codes(scores, block, num, size, n, sums); break;
#define CODES_FOR_DIM(name, size)                                                                                                 \
    static void score_codes_##name(const code_factor *q, const float *worth, const code_block *block, long num, long any, int n,  \
                                   float *scores) {                                                                               \
        (void)any;                                                                                                                \
        switch (n) { SCORE_CODES(1, size) SCORE_CODES(2, size) SCORE_CODES(3, size) SCORE_CODES(4, size) }                        \
    }                                                                                                                             \
    static void mix_codes_##name(float *scores, const code_block *block, long num, long any, int n, float *sums) {                \
        (void)any;                                                                                                                \
        switch (n) { MIX_CODES(1, size) MIX_CODES(2, size) MIX_CODES(3, size) MIX_CODES(4, size) }                                \
    }
CODES_FOR_DIM(64, 64)
CODES_FOR_DIM(128, 128)
CODES_FOR_DIM(any_dim, any)
static void (*const CODE_SCORES[3])(const code_factor *, const float *, const code_block *, long, long, int, float *) = {
    score_codes_64, score_codes_128, score_codes_any_dim};
static void (*const CODE_MIXES[3])(float *, const code_block *, long, long, int, float *) = {mix_codes_64, mix_codes_128, mix_codes_any_dim};

#endif
