/* Attention over keys and values in bfloat16 by AMX, for the layers that tiles_serve.

Keys are taken in blocks of 64 positions, counted from the request's first token, and 16 query rows at a time, which are the lanes of a
vector: scores are [key][row], as keys lie in the cache row by row; sums are [dimension][row], of values that are transposed once for all
rows. Queries and probabilities are sums of two numbers in bfloat16 each, which differ from the float32 by 2^-18 of it at most. Every
sum is one chain of operations in an order that positions give, and an instruction adds up each number of its result alone: bits do not
depend on other rows, on tiles, on pages or on the rest of the batch. A request that decodes takes the same way. */
#include "attention.h"
#include "tiles.h"

#if defined(HAS_TILES)
#include <math.h>

#define KEYS 64
#define ROWS 16
#define STEP 32 /* values that an instruction adds up */
#define TILE 256 /* numbers of a result */

static const tile_shapes SHAPES = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

int tiles_serve(const tm_step *step, const tm_layer *layer) {
    return has_tiles && step->kv_format == TM_KV_BF16 && !layer->quant && !layer->bias && layer->head_dim % STEP == 0 && layer->value_dim == layer->head_dim;
}

/* Queries and sums; values and keys; scores and probabilities. */
long tiles_scratch_bytes(long dim) { return MAX_TILE_ROWS * dim * 8 + KEYS * dim * 4 + KEYS * ROWS * 12; }

/* Query rows of one KV head: row = token * group + query head of the group. */
typedef struct {
    long num_rows, group, dim, window, start, end; /* start: position of the first token; end: of the keys that any row sees */
    int is_bidirectional;
    char *queries; /* [16 rows][high, low][dim / 32][16 pairs][row][2] */
    float *sums;   /* [16 rows][dim][row] */
    float *top, *total;
} rows_of_head;

TM_INLINE void transpose(__m512i x[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int c = 0; c < 2; c++) x[i + 2 * c] = _mm512_unpacklo_epi64(y[i + c], y[i + c + 2]), x[i + 2 * c + 1] = _mm512_unpackhi_epi64(y[i + c], y[i + c + 2]);
    for (int c = 0; c < 4; c++) { /* a quarter of x[4 g + c] has a column of rows 4 g .. 4 g + 3 */
        y[c] = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88), y[4 + c] = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd);
        y[8 + c] = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88), y[12 + c] = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
    }
    for (int c = 0; c < 4; c++) {
        x[c] = _mm512_shuffle_i32x4(y[c], y[8 + c], 0x88), x[8 + c] = _mm512_shuffle_i32x4(y[c], y[8 + c], 0xdd);
        x[4 + c] = _mm512_shuffle_i32x4(y[4 + c], y[12 + c], 0x88), x[12 + c] = _mm512_shuffle_i32x4(y[4 + c], y[12 + c], 0xdd);
    }
}

/* x rounded to its upper 16 bits, whatever the lower ones then are; and what is left of it, the same way. */
TM_INLINE __m512i high_part(f32x16 x) { return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)); }
TM_INLINE __m512i low_part(f32x16 x) {
    return high_part(f32x16_sub(x, _mm512_castsi512_ps(_mm512_and_si512(high_part(x), _mm512_set1_epi32((int)0xffff0000)))));
}
TM_INLINE __m512i upper_halves(__m512i a, __m512i b) { /* of a, then of b */
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(a, 16))), _mm512_cvtepi32_epi16(_mm512_srli_epi32(b, 16)), 1);
}
TM_INLINE __m512i pairs(__m512i even, __m512i odd) { /* the upper halves of each lane of both */
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
}

/* Queries of up to 16 rows, scaled; those past the last are 0. */
static void put_queries(const float *const *rows, long num_rows, long dim, float scale, char *to) {
    for (long i = 0; i < dim; i += STEP, to += 1024) {
        __m512i high[ROWS], low[ROWS];
        for (long r = 0; r < ROWS; r++) {
            f32x16 a = r < num_rows ? f32x16_mul1(f32x16_load(rows[r] + i), scale) : f32x16_set(0);
            f32x16 b = r < num_rows ? f32x16_mul1(f32x16_load(rows[r] + i + 16), scale) : f32x16_set(0);
            high[r] = upper_halves(high_part(a), high_part(b));
            low[r] = upper_halves(low_part(a), low_part(b));
        }
        transpose(high);
        transpose(low);
        for (long r = 0; r < ROWS; r++) {
            _mm512_storeu_si512(to + r * 64, high[r]);
            _mm512_storeu_si512(to + dim * 32 + r * 64, low[r]);
        }
    }
}

/* Values to [dim][key]; those past the last are 0. */
static void put_values(const char *const *rows, long num, long dim, char *to) {
    for (long k = 0; k < num; k += STEP)
        for (long i = 0; i < dim; i += 16) {
            __m512i x[16];
            for (long p = 0; p < 16; p++) {
                long even = k + 2 * p;
                x[p] = even < num ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(rows[even] + 2 * i))) : _mm512_setzero_si512();
                if (even + 1 < num) x[p] = _mm512_or_si512(x[p], _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(rows[even + 1] + 2 * i))), 16));
            }
            transpose(x);
            for (long d = 0; d < 16; d++) _mm512_storeu_si512(to + (i + d) * KEYS * 2 + k * 2, x[d]);
        }
}

/* 16 keys at a time: where they lie if they follow each other in the cache, else a copy. */
static void put_keys(const char *const *rows, long num, long dim, char *copies, const char **to) {
    long bytes = dim * 2;
    for (long k = 0; k < num; k += 16, copies += 16 * bytes) {
        if (k + 16 <= num && rows[k + 15] == rows[k] + 15 * bytes) {
            *to++ = rows[k];
            continue;
        }
        for (long i = 0; i < 16; i++)
            if (k + i < num) memcpy(copies + i * bytes, rows[k + i], bytes);
            else memset(copies + i * bytes, 0, bytes);
        *to++ = copies;
    }
}

/* Two results at a time: of each, the sum with the low part waits for the one with the high part. */
#define MULTIPLY_TWO(first, second)                                                         \
    {                                                                                       \
        tile_load(6, x[first] + s * 64, stride);                                            \
        if (m > second) tile_load(7, x[second] + s * 64, stride);                           \
        tile_dot_bf16(first, 6, 4);                                                         \
        if (m > second) tile_dot_bf16(second, 7, 4);                                        \
        tile_dot_bf16(first, 6, 5);                                                         \
        if (m > second) tile_dot_bf16(second, 7, 5);                                        \
    }

/* m results of 16 x 16, to which x (high + low) is added: x[m][16][steps of 32], its rows `stride` bytes apart. */
TM_INLINE void multiply(float *sums, int is_first, const char *const *x, int m, long stride, const char *high, const char *low, long num_steps) {
    if (is_first) {
        tile_zero(0); tile_zero(1); tile_zero(2); tile_zero(3);
    } else {
        tile_load(0, sums, 64);
        if (m > 1) tile_load(1, sums + TILE, 64);
        if (m > 2) tile_load(2, sums + 2 * TILE, 64);
        if (m > 3) tile_load(3, sums + 3 * TILE, 64);
    }
    for (long s = 0; s < num_steps; s++) {
        tile_load(4, high + s * 1024, 64);
        tile_load(5, low + s * 1024, 64);
        MULTIPLY_TWO(0, 1)
        if (m > 2) MULTIPLY_TWO(2, 3)
    }
    tile_store(sums, 64, 0);
    if (m > 1) tile_store(sums + TILE, 64, 1);
    if (m > 2) tile_store(sums + 2 * TILE, 64, 2);
    if (m > 3) tile_store(sums + 3 * TILE, 64, 3);
}

/* To sums of 16 rows, the values by their probabilities. */
static void add_values(float *sums, long dim, const char *values, const char *probs, long num_steps) {
    for (long i = 0; i < dim; i += 64) {
        const char *x[4];
        for (int t = 0; t < 4; t++) x[t] = values + (i + 16 * t) * KEYS * 2;
        if (dim - i >= 64) multiply(sums + i * ROWS, 0, x, 4, KEYS * 2, probs, probs + KEYS * ROWS * 2, num_steps);
        else multiply(sums + i * ROWS, 0, x, 2, KEYS * 2, probs, probs + KEYS * ROWS * 2, num_steps);
    }
}

/* Scores [key][row], which are logarithms to base 2, to probabilities relative to the highest so far, in pairs of keys: high parts, then low
   ones. `num`: a multiple of 16. Returns what earlier blocks are to be scaled by. */
static f32x16 soften(const float *scores, long num, float *top, float *total, char *probs) {
    f32x16 most[4], sum[4], old = f32x16_load(top);
    __mmask16 is_broken = 0;
    for (int c = 0; c < 4; c++) most[c] = f32x16_set(-INFINITY), sum[c] = f32x16_set(0);
    for (long k = 0; k < num; k += 4) {
        f32x16 x[4];
        for (int c = 0; c < 4; c++) x[c] = f32x16_load(scores + (k + c) * ROWS), most[c] = _mm512_max_ps(most[c], x[c]);
        is_broken |= _mm512_cmp_ps_mask(x[0], x[1], _CMP_UNORD_Q) | _mm512_cmp_ps_mask(x[2], x[3], _CMP_UNORD_Q);
    }
    f32x16 highest = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    f32x16 new = _mm512_mask_mov_ps(highest, _mm512_cmp_ps_mask(highest, old, _CMP_LE_OQ), old);
    new = _mm512_mask_mov_ps(new, is_broken | _mm512_cmp_ps_mask(old, old, _CMP_UNORD_Q), f32x16_set(NAN));
    f32x16 shrink = f32x16_exp2_negative(f32x16_sub(old, new));
    shrink = _mm512_mask_mov_ps(shrink, _mm512_cmp_ps_mask(new, new, _CMP_UNORD_Q), new);
    for (long k = 0; k < num; k += 4, probs += 128) {
        f32x16 p[4];
        for (int c = 0; c < 4; c++) { /* of hidden keys, whose score is minus infinity: 0 */
            p[c] = f32x16_exp2_negative(f32x16_sub(f32x16_load(scores + (k + c) * ROWS), new));
            sum[c] = f32x16_add(sum[c], p[c]);
        }
        for (int c = 0; c < 4; c += 2) {
            _mm512_storeu_si512(probs + c * 32, pairs(high_part(p[c]), high_part(p[c + 1])));
            _mm512_storeu_si512(probs + KEYS * ROWS * 2 + c * 32, pairs(low_part(p[c]), low_part(p[c + 1])));
        }
    }
    f32x16_store(top, new);
    f32x16_store(total, f32x16_add(_mm512_mul_ps(f32x16_load(total), shrink), f32x16_add(f32x16_add(sum[0], sum[1]), f32x16_add(sum[2], sum[3]))));
    return shrink;
}

TM_INLINE long position_of(const rows_of_head *t, long row) { return t->start + row / t->group; }
TM_INLINE long last_key(const rows_of_head *t, long row) { return t->is_bidirectional ? t->end - 1 : position_of(t, row); }

/* Minus infinity for the keys of a block that a row does not see. */
static void hide(const rows_of_head *t, long row, long first, long num, float *scores) {
    int32_t last[ROWS], past[ROWS];
    for (long r = 0; r < ROWS; r++) {
        long end = last_key(t, row + r) < t->end ? last_key(t, row + r) : t->end - 1;
        last[r] = (int32_t)(end - first);
        past[r] = t->window ? (int32_t)(position_of(t, row + r) - t->window - first) : -1;
    }
    for (int32_t k = 0; k < num; k++) {
        __m512i at = _mm512_set1_epi32(k);
        __mmask16 is_hidden = _mm512_cmpgt_epi32_mask(at, i32x16_load(last)) | _mm512_cmple_epi32_mask(at, i32x16_load(past));
        f32x16_store(scores + k * ROWS, _mm512_mask_mov_ps(f32x16_load(scores + k * ROWS), is_hidden, f32x16_set(-INFINITY)));
    }
}

/* As add_values, but of keys that a row does not see nothing is read: the same bits. */
static void add_seen_values(const rows_of_head *t, long row, long first, const char *const *rows, float *sums, const char *probs, long num, char *values) {
    float before[ROWS * t->dim] __attribute__((aligned(64))), after[ROWS * t->dim] __attribute__((aligned(64)));
    memcpy(before, sums, sizeof before);
    for (long r = 0; r < ROWS; r++) {
        long seen = last_key(t, row + r) + 1 - first;
        memset(values, 0, t->dim * KEYS * 2);
        if (seen > 0) put_values(rows, seen < num ? seen : num, t->dim, values);
        memcpy(after, before, sizeof after);
        add_values(after, t->dim, values, probs, KEYS / STEP);
        for (long i = 0; i < t->dim; i++) sums[i * ROWS + r] = after[i * ROWS + r];
    }
}

/* A block of keys and values, [64][dim] and [dim][64], and what 16 rows make of it. */
typedef struct {
    long first, num;
    const char *const *values, *keys[KEYS / 16];
    int is_broken; /* -1: not known */
    char *turned, *probs;
    float *scores[2], softcap; /* of 16 rows and of the next */
} block;

/* How many times 16 keys of a block any of 16 rows sees. */
TM_INLINE long num_seen(const rows_of_head *t, const block *b, long row) {
    long end = t->num_rows - row < ROWS ? t->num_rows : row + ROWS, last = last_key(t, end - 1), seen = last + 1 - b->first;
    if (last < b->first || (t->window && b->first + KEYS <= position_of(t, row) - t->window + 1)) return 0;
    return ((seen < b->num ? seen : b->num) + 15) / 16;
}

static void score_rows(const rows_of_head *t, const block *b, long row, long m, float *scores) {
    const char *queries = t->queries + row * t->dim * 4;
    if (m == 4) multiply(scores, 1, b->keys, 4, t->dim * 2, queries, queries + t->dim * 32, t->dim / STEP);
    else multiply(scores, 1, b->keys, (int)m, t->dim * 2, queries, queries + t->dim * 32, t->dim / STEP);
}

static void clear_probs(const block *b, long from, long to) {
    for (long p = from; p < to; p++)
        f32x16_store((float *)(b->probs + p * 64), f32x16_set(0)), f32x16_store((float *)(b->probs + KEYS * ROWS * 2 + p * 64), f32x16_set(0));
}

/* To the sums of 16 rows, the block's values by the probabilities of their scores. */
static void mix_rows(const rows_of_head *t, block *b, long row, long m, float *scores) {
    long dim = t->dim, end = t->num_rows - row < ROWS ? t->num_rows : row + ROWS, seen_by_all = last_key(t, row) + 1 - b->first;
    float *sums = t->sums + row * dim;
    if (b->softcap) cap(scores, m * TILE, b->softcap);
    if (seen_by_all < m * 16 || b->num < m * 16 || (t->window && b->first <= position_of(t, end - 1) - t->window)) hide(t, row, b->first, m * 16, scores);
    f32x16 shrink = soften(scores, m * 16, t->top + row, t->total + row, b->probs);
    if (_mm512_cmp_ps_mask(shrink, f32x16_set(1), _CMP_NEQ_UQ))
        for (long i = 0; i < dim; i++) f32x16_store(sums + i * ROWS, _mm512_mul_ps(f32x16_load(sums + i * ROWS), shrink));
    clear_probs(b, m * 8, (m + 1) / 2 * 16); /* of the other half of a step */
    if (seen_by_all < b->num && b->is_broken < 0) b->is_broken = has_broken(b->values, last_key(t, 0) + 1 - b->first, b->num, dim, TM_KV_BF16);
    if (seen_by_all < b->num && b->is_broken) {
        clear_probs(b, (m + 1) / 2 * 16, KEYS / 2);
        add_seen_values(t, row, b->first, b->values, sums, b->probs, b->num, b->turned);
        put_values(b->values, b->num, dim, b->turned);
    } else
        add_values(sums, dim, b->turned, b->probs, (m + 1) / 2);
}

/* One block of keys and values for the rows that see it. Scores of the next rows are under way while vectors do the softmax. */
static void attend_block(const rows_of_head *t, long first, long num, const char *const *keys, const char *const *values, float softcap, char *memory) {
    char *copies = memory + KEYS * t->dim * 2, *probs = copies + KEYS * t->dim * 2;
    float *scores = (float *)(probs + KEYS * ROWS * 4);
    block b = {.first = first, .num = num, .values = values, .is_broken = -1, .turned = memory, .probs = probs,
               .scores = {scores, scores + KEYS * ROWS}, .softcap = softcap};
    put_keys(keys, num, t->dim, copies, b.keys);
    put_values(values, num, t->dim, b.turned);
    long row = 0, m = 0;
    while (row < t->num_rows && !(m = num_seen(t, &b, row))) row += ROWS;
    if (row < t->num_rows) score_rows(t, &b, row, m, b.scores[0]);
    for (int at = 0; row < t->num_rows; at ^= 1) {
        long next = row + ROWS, next_m = 0;
        while (next < t->num_rows && !(next_m = num_seen(t, &b, next))) next += ROWS;
        if (next < t->num_rows) score_rows(t, &b, next, next_m, b.scores[at ^ 1]);
        mix_rows(t, &b, row, m, b.scores[at]);
        row = next, m = next_m;
    }
}

void attend_with_tiles(const tm_attention_job *j, long first_token, long len, long start, long end, const tm_places *where, long head, void *scratch) {
    const tm_step *s = j->step;
    const tm_layer *l = j->layer;
    long dim = l->head_dim, group = l->num_heads / l->num_kv_heads, num_rows = len * group, padded = (num_rows + ROWS - 1) / ROWS * ROWS;
    float top[MAX_TILE_ROWS], total[MAX_TILE_ROWS];
    rows_of_head t = {.num_rows = num_rows, .group = group, .dim = dim, .window = l->window, .start = start, .end = end, .is_bidirectional = l->is_bidirectional,
                      .queries = scratch, .sums = (float *)scratch + padded * dim, .top = top, .total = total};
    char *memory = (char *)(t.sums + padded * dim);
    for (long row = 0; row < padded; row += ROWS) {
        const float *q[ROWS];
        long num = num_rows - row < ROWS ? num_rows - row : ROWS;
        for (long r = 0; r < ROWS; r++) {
            const float *sinks = r < num ? j->learned.sinks : NULL;
            q[r] = r < num ? j->qkv + (first_token + (row + r) / group) * qkv_width(l) + (head * group + (row + r) % group) * dim : NULL;
            /* A sink is a key that was seen before all others, of which only the score counts. */
            top[row + r] = sinks ? sinks[head * group + (row + r) % group] * LOG2_E : -1e30f; /* lower than any score */
            total[row + r] = sinks ? 1 : 0;
        }
        put_queries(q, num, dim, l->scale * LOG2_E, t.queries + row * dim * 4);
    }
    memset(t.sums, 0, padded * dim * sizeof(float));
    tiles_begin(&SHAPES);
    long seen = l->window ? start - l->window + 1 : 0; /* the first position that any row sees */
    for (long first = seen > 0 ? seen / KEYS * KEYS : 0; first < end; first += KEYS) {
        const char *keys[KEYS], *values[KEYS];
        long num = end - first < KEYS ? end - first : KEYS;
        find_rows(s, dim, j->keys, where, head, first, num, keys);
        find_rows(s, dim, j->values, where, head, first, num, values);
        if (first + KEYS < end) prefetch(s, l, j, where->pages, head, first + KEYS, end - first - KEYS < KEYS ? end - first - KEYS : KEYS);
        attend_block(&t, first, num, keys, values, l->softcap * LOG2_E, memory);
    }
    tiles_end();
    for (long row = 0; row < num_rows; row += ROWS) {
        f32x16 part = _mm512_div_ps(f32x16_set(1), f32x16_load(total + row));
        for (long i = 0; i < dim; i += 16) {
            __m512i x[16];
            for (long d = 0; d < 16; d++) x[d] = _mm512_castps_si512(_mm512_mul_ps(f32x16_load(t.sums + row * dim + (i + d) * ROWS), part));
            transpose(x);
            for (long r = 0; r < ROWS && row + r < num_rows; r++) {
                long token = first_token + (row + r) / group;
                if (is_chosen(j, token, head)) _mm512_storeu_si512(j->out + (token * l->num_heads + head * group + (row + r) % group) * dim + i, x[r]);
            }
        }
    }
}
#else
int tiles_serve(const tm_step *step, const tm_layer *layer) {
    (void)step, (void)layer;
    return 0;
}
long tiles_scratch_bytes(long dim) { return 0 * dim; }
void attend_with_tiles(const tm_attention_job *j, long first_token, long len, long start, long end, const tm_places *where, long head, void *scratch) {
    (void)j, (void)first_token, (void)len, (void)start, (void)end, (void)where, (void)head, (void)scratch;
}
#endif
