/* Kinds whose activations are bytes with one scale a row (layouts: linear.c). Sums within a group of weights that share a scale, which may
be a whole row, are whole numbers: their bits are the same in any order. Those over groups are floats, in the order of the groups. */
#include <math.h>

#include "linear.h"

/* A row's activations, zeros instead of those that are no bytes; their columns are noted. */
static const float *without_outliers(const linear_job *j, long row, int thread) {
    const float *x = j->x + row * j->num_in;
    float *kept = tm_scratch(thread, 1, j->num_in * (long)sizeof(float)); /* linear_op has made sure there is */
    int32_t *columns = j->outliers + row * (j->num_in + 1) + 1, num = 0;
    for (long k = 0; k < j->num_in; k++) {
        const int is_outlier = fabsf(x[k]) >= j->threshold;
        if (is_outlier) columns[num++] = (int32_t)k;
        kept[k] = is_outlier ? 0 : x[k];
    }
    columns[-1] = num;
    return kept;
}

void add_outliers(const linear_job *j, long panel, long row, int n, f32x8 *values) {
    const int8_t *codes = (const int8_t *)j->codes + panel * j->num_in * LANES;
    for (int r = 0; r < n; r++) {
        const int32_t *columns = j->outliers + (row + r) * (j->num_in + 1);
        const float *x = j->x + (row + r) * j->num_in;
        f32x8 sum = f32x8_set(0);
        for (int32_t i = 1; i <= columns[0]; i++) {
            const long k = columns[i];
            float weights[LANES];
            for (int lane = 0; lane < LANES; lane++) weights[lane] = codes[k / 4 * 32 + lane * 4 + k % 4];
            sum = f32x8_fma1(sum, f32x8_load(weights), x[k]);
        }
        if (columns[0]) values[r] = f32x8_fma(values[r], sum, f32x8_load((const float *)j->scales + panel * LANES));
    }
}

static void quantize_token(void *arg, long row, int thread) {
    const linear_job *j = arg;
    const float *x = j->outliers ? without_outliers(j, row, thread) : j->x + row * j->num_in;
    f32x8 top = f32x8_set(0), total = f32x8_set(0), most = f32x8_set(127), least = f32x8_set(-127);
    for (long k = 0; k < j->num_in; k += 8) {
        f32x8 v = f32x8_load(x + k);
        top = f32x8_max(top, f32x8_abs(v));
        total = f32x8_add(total, v);
    }
    float largest = f32x8_maximum(top), d = j->static_scale > 0 ? j->static_scale : largest / 127.0f;
    float inverse = j->static_scale > 0 ? 1.0f / j->static_scale : largest > 0 ? 127.0f / largest : 0.0f;
    long per_group = j->group * GROUP, num_groups = (j->num_in + per_group - 1) / per_group;
    int32_t *sums = (int32_t *)j->xs + row * num_groups;
    for (long g = 0; g < num_groups; g++) {
        long end = (g + 1) * per_group < j->num_in ? (g + 1) * per_group : j->num_in;
        i32x8 sum = i32x8_set(0);
        for (long k = g * per_group; k < end; k += 8) {
            i32x8 q = f32x8_to_i32x8(f32x8_max(least, f32x8_min(most, f32x8_mul1(f32x8_load(x + k), inverse))));
            i32x8_store_bytes(j->xq + row * j->num_in + k, q);
            sum = i32x8_add(sum, q);
        }
        sums[g] = i32x8_sum(sum);
    }
    j->xd[row] = d + 0 * f32x8_sum(total); /* not finite if any value is not */
}

#define SPAN 4 /* panels whose ternary codes share bytes */

/* Where the groups of a row of activations begin and end, and the sum of each. */
typedef struct { long size, num; const int32_t *sums; } token_groups;

TM_INLINE token_groups groups_of(const linear_job *j, long row) {
    long size = j->group * GROUP, num = (j->num_in + size - 1) / size;
    return (token_groups){size, num, (const int32_t *)j->xs + row * num};
}

TM_INLINE f32x8 add_group(int kind, int32_t sum, i32x8 dot, const float *scale, f32x8 acc) {
    if (kind == T2) dot = i32x8_add(dot, i32x8_set(-sum)); /* codes are one more than their values */
    return f32x8_fma(acc, i32x8_to_f32x8(dot), f32x8_load(scale));
}

TM_INLINE void tile_w(const linear_job *j, int kind, int wide, const uint8_t *codes, const void *scales, long row, int n, f32x8 *out) {
    (void)wide;
    const int8_t *x = j->xq + row * j->num_in;
    token_groups groups = groups_of(j, row);
    f32x8 acc[ROWS];
    for (int r = 0; r < n; r++) acc[r] = f32x8_set(0);
    for (long g = 0, k = 0; g < groups.num; g++) {
        i32x8 dot[ROWS];
        long end = (g + 1) * groups.size < j->num_in ? (g + 1) * groups.size : j->num_in;
        for (int r = 0; r < n; r++) dot[r] = i32x8_set(0);
        for (; k < end; k += GROUP, x += GROUP, codes += 256) {
            i8x16 first[ROWS], second[ROWS];
            for (int r = 0; r < n; r++) first[r] = i8x16_load(x + r * j->num_in), second[r] = i8x16_load(x + r * j->num_in + 16);
#define WHOLE(at, half, f)                                                     \
    {                                                                          \
        u8x32 w = u8x32_load(codes + at * 32);                                 \
        for (int r = 0; r < n; r++) dot[r] = i32x8_dot(dot[r], w, half[r], f); \
    }
            WHOLE(0, first, 0) WHOLE(1, first, 1) WHOLE(2, first, 2) WHOLE(3, first, 3)
            WHOLE(4, second, 0) WHOLE(5, second, 1) WHOLE(6, second, 2) WHOLE(7, second, 3)
        }
        for (int r = 0; r < n; r++) acc[r] = add_group(kind, groups.sums[r * groups.num + g], dot[r], (const float *)scales + g * LANES, acc[r]);
    }
    for (int r = 0; r < n; r++) out[r] = f32x8_mul1(acc[r], j->xd[row + r]);
}

/* Four chains of sums, so that none waits for another. */
TM_INLINE void single_w8(const linear_job *j, int kind, const uint8_t *codes, const void *scales, f32x8 *out) {
    i32x8 dot[4] = {i32x8_set(0), i32x8_set(0), i32x8_set(0), i32x8_set(0)};
    for (long k = 0; k < j->num_in; k += GROUP, codes += 256) {
        i8x16 first = i8x16_load(j->xq + k), second = i8x16_load(j->xq + k + 16);
        dot[0] = i32x8_dot(dot[0], u8x32_load(codes), first, 0);
        dot[1] = i32x8_dot(dot[1], u8x32_load(codes + 32), first, 1);
        dot[2] = i32x8_dot(dot[2], u8x32_load(codes + 64), first, 2);
        dot[3] = i32x8_dot(dot[3], u8x32_load(codes + 96), first, 3);
        dot[0] = i32x8_dot(dot[0], u8x32_load(codes + 128), second, 0);
        dot[1] = i32x8_dot(dot[1], u8x32_load(codes + 160), second, 1);
        dot[2] = i32x8_dot(dot[2], u8x32_load(codes + 192), second, 2);
        dot[3] = i32x8_dot(dot[3], u8x32_load(codes + 224), second, 3);
    }
    i32x8 sum = i32x8_add(i32x8_add(dot[0], dot[1]), i32x8_add(dot[2], dot[3]));
    *out = f32x8_mul1(add_group(kind, 0, sum, scales, f32x8_set(0)), j->xd[0]);
}

/* Four panels by `n` rows, from `k` to `end`: a byte has a code of each panel. */
#define FOUR_PANELS(f)                                           \
    {                                                            \
        u8x32 w = u8x32_load(codes + f * 32);                    \
        for (int r = 0; r < n; r++) fields_dot(dots[r], w, four[r], f) \
    }
TM_INLINE void dots_t2(const linear_job *j, const uint8_t *codes, long row, int n, long k, long end, i32x8 dots[2][SPAN]) {
    const int8_t *x = j->xq + row * j->num_in;
    codes += k * LANES;
    for (int r = 0; r < n; r++)
        for (int p = 0; p < SPAN; p++) dots[r][p] = i32x8_set(0);
    for (; k < end; k += 16, codes += 128) {
        i8x16 four[2];
        for (int r = 0; r < n; r++) four[r] = i8x16_load(x + r * j->num_in + k);
        FOUR_PANELS(0) FOUR_PANELS(1) FOUR_PANELS(2) FOUR_PANELS(3)
    }
}

TM_INLINE void tile_t2(const linear_job *j, long panel, const uint8_t *codes, const float *scales, long row, int n) {
    token_groups groups = groups_of(j, row);
    f32x8 acc[2][SPAN];
    int span = j->num_panels - panel < SPAN ? (int)(j->num_panels - panel) : SPAN; /* the last panels may be missing */
    for (int p = 0; p < SPAN; p++) acc[0][p] = acc[1][p] = f32x8_set(0);
    for (long g = 0; g < groups.num; g++) {
        i32x8 dots[2][SPAN];
        dots_t2(j, codes, row, n, g * groups.size, (g + 1) * groups.size < j->num_in ? (g + 1) * groups.size : j->num_in, dots);
        for (int r = 0; r < n; r++) {
            int32_t sum = groups.sums[r * groups.num + g];
            fields_finish(dots[r], sum);
            for (int p = 0; p < span; p++) acc[r][p] = add_group(T2, sum, dots[r][p], scales + (p * groups.num + g) * LANES, acc[r][p]);
        }
    }
    for (int r = 0; r < n; r++)
        for (int p = 0; p < span; p++) {
            f32x8 value = f32x8_mul1(acc[r][p], j->xd[row + r]);
            store_tile(j, panel + p, row + r, 1, &value);
        }
}

/* One row and one scale a row of weights: the same operations, without the loops over groups and rows. The compiler may not mix the
   four steps: it would move sums from register to register, which takes 7 % of the time, as memory does without the prefetch. */
#define ONE_ROW(f)                                                  \
    fields_dot(dots, u8x32_load(codes + f * 32), four, f)           \
    __asm__ volatile("");
static __attribute__((noinline)) void row_dots_t2(const uint8_t *codes, const int8_t *x, long num_in, i32x8 *out) {
    i32x8 dots[SPAN] = {i32x8_set(0), i32x8_set(0), i32x8_set(0), i32x8_set(0)};
    for (const uint8_t *end = codes + num_in * LANES; codes < end; codes += 128, x += 16) {
        i8x16 four = i8x16_load(x);
        __builtin_prefetch(codes + 2048);
        __builtin_prefetch(codes + 2048 + 64);
        ONE_ROW(0) ONE_ROW(1) ONE_ROW(2) ONE_ROW(3)
    }
    for (int p = 0; p < SPAN; p++) out[p] = dots[p];
}

static __attribute__((noinline)) void single_t2(const linear_job *j, long panel, const uint8_t *codes, const void *scales) {
    if (j->group * GROUP < j->num_in) {
        tile_t2(j, panel, codes, scales, 0, 1);
        return;
    }
    const int32_t sum = *(const int32_t *)j->xs;
    const int span = j->num_panels - panel < SPAN ? (int)(j->num_panels - panel) : SPAN;
    i32x8 dots[SPAN];
    row_dots_t2(codes, j->xq, j->num_in, dots);
    fields_finish(dots, sum);
    for (int p = 0; p < span; p++) {
        f32x8 value = f32x8_mul1(add_group(T2, sum, dots[p], (const float *)scales + p * LANES, f32x8_set(0)), j->xd[0]);
        store_tile(j, panel + p, 0, 1, &value);
    }
}

static __attribute__((noinline)) void panels_t2(const linear_job *j, long panel, const uint8_t *codes, const void *scales) {
    long row = 0;
    for (; row + 2 <= j->num_rows; row += 2) tile_t2(j, panel, codes, scales, row, 2);
    if (row < j->num_rows) tile_t2(j, panel, codes, scales, row, 1);
}

/* To a byte a code, panel by panel. */
static void unpack_t2(const linear_job *j, const uint8_t *codes, uint8_t *to, long stride) {
    (void)stride; /* they are four panels */
    long panel = j->num_in * LANES;
    for (long at = 0; at < panel; at += 32) {
        u8x32 w = u8x32_flip_top(u8x32_load(codes + at));
        u8x32_store(to + at, u8x32_mask(w, 3));
        u8x32_store(to + panel + at, u8x32_mask(u8x32_shift_2(w), 3));
        u8x32_store(to + 2 * panel + at, u8x32_mask(u8x32_high(w), 3));
        u8x32_store(to + 3 * panel + at, u8x32_shift_6(w));
    }
}

SINGLE_OF(single_of_w8, single_w8, W8)
PANEL_OF(panel_w8, tile_w, W8, 0)
PANEL_OF(wide_panel_t2, tile_w, T2, 1)

static void wide_t2(const linear_job *j, long panel, const uint8_t *codes, const void *scales) {
    long num_groups = groups_of(j, 0).num;
    for (int p = 0; p < SPAN && panel + p < j->num_panels; p++)
        wide_panel_t2(j, panel + p, codes + p * j->num_in * LANES, (const float *)scales + p * num_groups * LANES);
}

const linear_kind linear_tokens[] = {
    [W8 - W8] = {quantize_token, single_of_w8, panel_w8, panel_w8, NULL, 256, 32, 0, 0, 1, 1, WIDE_ROWS},
    [T2 - W8] = {quantize_token, single_t2, panels_t2, wide_t2, unpack_t2, 64, 32, 0, 0, 1, SPAN, WIDE_ROWS},
};
