/* Kinds whose activations are bytes with one scale a row, and weights with one a row (layouts: linear.c): a whole sum is a whole number,
so its bits are the same in any order. */
#include "linear.h"

static void quantize_token(void *arg, long row, int thread) {
    (void)thread;
    const linear_job *j = arg;
    const float *x = j->x + row * j->num_in;
    f32x8 top = f32x8_set(0), total = f32x8_set(0), most = f32x8_set(127), least = f32x8_set(-127);
    for (long k = 0; k < j->num_in; k += 8) {
        f32x8 v = f32x8_load(x + k);
        top = f32x8_max(top, f32x8_abs(v));
        total = f32x8_add(total, v);
    }
    float largest = f32x8_maximum(top), d = j->static_scale > 0 ? j->static_scale : largest / 127.0f;
    float inverse = j->static_scale > 0 ? 1.0f / j->static_scale : largest > 0 ? 127.0f / largest : 0.0f;
    i32x8 sum = f32x8_to_i32x8(f32x8_set(0));
    for (long k = 0; k < j->num_in; k += 8) {
        i32x8 q = f32x8_to_i32x8(f32x8_max(least, f32x8_min(most, f32x8_mul1(f32x8_load(x + k), inverse))));
        i32x8_store_bytes(j->xq + row * j->num_in + k, q);
        sum = i32x8_add(sum, q);
    }
    j->xd[row] = d + 0 * f32x8_sum(total); /* not finite if any value is not */
    ((int32_t *)j->xs)[row] = i32x8_sum(sum);
}

#define SPAN 4 /* panels whose ternary codes share bytes */

TM_INLINE void finish_token(const linear_job *j, int kind, long row, i32x8 dot, const float *scales, f32x8 *out) {
    if (kind == T2) dot = i32x8_add(dot, i32x8_set(-((const int32_t *)j->xs)[row])); /* codes are one more than their values */
    *out = f32x8_mul(i32x8_to_f32x8(dot), f32x8_mul1(f32x8_load(scales), j->xd[row]));
}

TM_INLINE void tile_w(const linear_job *j, int kind, int wide, const uint8_t *codes, const void *scales, long row, int n, f32x8 *out) {
    (void)wide;
    long num_groups = j->num_in / GROUP;
    const int8_t *x = j->xq + row * j->num_in;
    i32x8 dot[ROWS];
    for (int r = 0; r < n; r++) dot[r] = i32x8_set(0);
    for (long g = 0; g < num_groups; g++, x += GROUP) {
        i8x16 first[ROWS], second[ROWS];
        for (int r = 0; r < n; r++) first[r] = i8x16_load(x + r * j->num_in), second[r] = i8x16_load(x + r * j->num_in + 16);
#define WHOLE(at, half, f)                                                     \
    {                                                                          \
        u8x32 w = u8x32_load(codes + at * 32);                                 \
        for (int r = 0; r < n; r++) dot[r] = i32x8_dot(dot[r], w, half[r], f); \
    }
        WHOLE(0, first, 0) WHOLE(1, first, 1) WHOLE(2, first, 2) WHOLE(3, first, 3)
        WHOLE(4, second, 0) WHOLE(5, second, 1) WHOLE(6, second, 2) WHOLE(7, second, 3)
        codes += 256;
    }
    for (int r = 0; r < n; r++) finish_token(j, kind, row + r, dot[r], scales, out + r);
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
    finish_token(j, kind, 0, i32x8_add(i32x8_add(dot[0], dot[1]), i32x8_add(dot[2], dot[3])), scales, out);
}

/* Four panels by `n` rows: a byte has a code of each panel. Two chains of sums for each, so that none waits for another. */
TM_INLINE void tile_t2(const linear_job *j, const uint8_t *codes, long row, int n, i32x8 dots[2][SPAN]) {
    const int8_t *x = j->xq + row * j->num_in;
    i32x8 odd[SPAN];
    for (int p = 0; p < SPAN; p++) dots[0][p] = dots[1][p] = odd[p] = i32x8_set(0);
    for (long k = 0; k < j->num_in; k += 16, codes += 128) {
        i8x16 first = i8x16_load(x + k), second = i8x16_load(x + (n - 1) * j->num_in + k);
        u8x32 w[4] = {u8x32_load(codes), u8x32_load(codes + 32), u8x32_load(codes + 64), u8x32_load(codes + 96)};
        fields_dot(dots[0], w[0], first, 0) fields_dot((n == 1 ? odd : dots[0]), w[1], first, 1)
        fields_dot(dots[0], w[2], first, 2) fields_dot((n == 1 ? odd : dots[0]), w[3], first, 3)
        if (n == 1) continue;
        fields_dot(dots[1], w[0], second, 0) fields_dot(dots[1], w[1], second, 1)
        fields_dot(dots[1], w[2], second, 2) fields_dot(dots[1], w[3], second, 3)
    }
    for (int p = 0; p < SPAN; p++) dots[0][p] = i32x8_add(dots[0][p], odd[p]);
}

TM_INLINE void store_t2(const linear_job *j, long panel, long row, i32x8 dots[SPAN], const float *scales) {
    fields_finish(dots, ((const int32_t *)j->xs)[row]);
    for (int p = 0; p < SPAN && panel + p < j->num_panels; p++) {
        f32x8 value;
        finish_token(j, T2, row, dots[p], scales + p * LANES, &value);
        store_tile(j, panel + p, row, 1, &value);
    }
}

static __attribute__((noinline)) void single_t2(const linear_job *j, long panel, const uint8_t *codes, const void *scales) {
    i32x8 dots[2][SPAN];
    tile_t2(j, codes, 0, 1, dots);
    store_t2(j, panel, 0, dots[0], scales);
}

static __attribute__((noinline)) void panels_t2(const linear_job *j, long panel, const uint8_t *codes, const void *scales) {
    i32x8 dots[2][SPAN];
    long row = 0;
    for (; row + 2 <= j->num_rows; row += 2) {
        tile_t2(j, codes, row, 2, dots);
        store_t2(j, panel, row, dots[0], scales);
        store_t2(j, panel, row + 1, dots[1], scales);
    }
    if (row == j->num_rows) return;
    tile_t2(j, codes, row, 1, dots);
    store_t2(j, panel, row, dots[0], scales);
}

/* To a byte a code, panel by panel. */
static void unpack_t2(const linear_job *j, const uint8_t *codes, uint8_t *to) {
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
    for (int p = 0; p < SPAN && panel + p < j->num_panels; p++)
        wide_panel_t2(j, panel + p, codes + p * j->num_in * LANES, (const float *)scales + p * LANES);
}

const linear_kind linear_tokens[] = {
    [W8 - W8] = {quantize_token, single_of_w8, panel_w8, panel_w8, NULL, 256, 32, 0, 0, 1, 1},
    [T2 - W8] = {quantize_token, single_t2, panels_t2, wide_t2, unpack_t2, 64, 32, 0, 0, 1, SPAN},
};
