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

/* Four codes of each byte, 0 .. 2. */
TM_INLINE void split_4(u8x32 all, u8x32 codes[4]) {
    codes[0] = u8x32_mask(all, 3);
    codes[1] = u8x32_mask(u8x32_shift_2(all), 3);
    codes[2] = u8x32_mask(u8x32_high(all), 3);
    codes[3] = u8x32_shift_6(all);
}

TM_INLINE void finish_token(const linear_job *j, int kind, long row, i32x8 dot, const float *scales, f32x8 *out) {
    if (kind == T2) dot = i32x8_add(dot, i32x8_set(-((const int32_t *)j->xs)[row])); /* codes are one more than their values */
    *out = f32x8_mul(i32x8_to_f32x8(dot), f32x8_mul1(f32x8_load(scales), j->xd[row]));
}

TM_INLINE void tile_w(const linear_job *j, int kind, int wide, const uint8_t *codes, const void *scales, long row, int n, f32x8 *out) {
    long num_groups = j->num_in / GROUP;
    const int8_t *x = j->xq + row * j->num_in;
    i32x8 dot[ROWS];
    for (int r = 0; r < n; r++) dot[r] = i32x8_set(0);
    for (long g = 0; g < num_groups; g++, x += GROUP) {
        i8x16 first[ROWS], second[ROWS];
        for (int r = 0; r < n; r++) first[r] = i8x16_load(x + r * j->num_in), second[r] = i8x16_load(x + r * j->num_in + 16);
        if (kind == T2 && !wide) {
            u8x32 even[4], odd[4];
            split_4(u8x32_load(codes), even), split_4(u8x32_load(codes + 32), odd);
            for (int r = 0; r < n; r++) {
                dot[r] = i32x8_dot_unsigned(dot[r], even[0], first[r], 0);
                dot[r] = i32x8_dot_unsigned(dot[r], odd[0], first[r], 1);
                dot[r] = i32x8_dot_unsigned(dot[r], even[1], first[r], 2);
                dot[r] = i32x8_dot_unsigned(dot[r], odd[1], first[r], 3);
                dot[r] = i32x8_dot_unsigned(dot[r], even[2], second[r], 0);
                dot[r] = i32x8_dot_unsigned(dot[r], odd[2], second[r], 1);
                dot[r] = i32x8_dot_unsigned(dot[r], even[3], second[r], 2);
                dot[r] = i32x8_dot_unsigned(dot[r], odd[3], second[r], 3);
            }
            codes += 64;
            continue;
        }
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

/* A byte's second and third code are multiplied where they lie, 4 and 16 times as large, and their sums are shifted. */
TM_INLINE void single_t2(const linear_job *j, int kind, const uint8_t *codes, const void *scales, f32x8 *out) {
    i32x8 dot[4] = {i32x8_set(0), i32x8_set(0), i32x8_set(0), i32x8_set(0)};
    for (long k = 0; k < j->num_in; k += GROUP, codes += 64) {
        i8x16 first = i8x16_load(j->xq + k), second = i8x16_load(j->xq + k + 16);
        u8x32 even = u8x32_load(codes), odd = u8x32_load(codes + 32);
        dot[0] = i32x8_dot_unsigned(dot[0], u8x32_mask(even, 3), first, 0);
        dot[1] = i32x8_dot_unsigned(dot[1], u8x32_mask(even, 12), first, 2);
        dot[2] = i32x8_dot_unsigned(dot[2], u8x32_mask(even, 48), second, 0);
        dot[3] = i32x8_dot_unsigned(dot[3], u8x32_shift_6(even), second, 2);
        dot[0] = i32x8_dot_unsigned(dot[0], u8x32_mask(odd, 3), first, 1);
        dot[1] = i32x8_dot_unsigned(dot[1], u8x32_mask(odd, 12), first, 3);
        dot[2] = i32x8_dot_unsigned(dot[2], u8x32_mask(odd, 48), second, 1);
        dot[3] = i32x8_dot_unsigned(dot[3], u8x32_shift_6(odd), second, 3);
    }
    i32x8 sum = i32x8_add(i32x8_add(dot[0], dot[3]), i32x8_add(i32x8_shift_right(dot[1], 2), i32x8_shift_right(dot[2], 4)));
    finish_token(j, kind, 0, sum, scales, out);
}

static void unpack_t2(const linear_job *j, const uint8_t *codes, uint8_t *to) {
    for (long g = 0; g < j->num_in / GROUP; g++, codes += 64, to += 256)
        for (int odd = 0; odd < 2; odd++) {
            u8x32 four[4];
            split_4(u8x32_load(codes + odd * 32), four);
            for (int i = 0; i < 4; i++) u8x32_store(to + (2 * i + odd) * 32, four[i]);
        }
}

SINGLE_OF(single_of_w8, single_w8, W8)
SINGLE_OF(single_of_t2, single_t2, T2)
PANEL_OF(panel_w8, tile_w, W8, 0)
PANEL_OF(panel_t2, tile_w, T2, 0)
PANEL_OF(wide_t2, tile_w, T2, 1)

const linear_kind linear_tokens[] = {
    [W8 - W8] = {quantize_token, single_of_w8, panel_w8, panel_w8, NULL, 256, 32, 0, 0, 1},
    [T2 - W8] = {quantize_token, single_of_t2, panel_t2, wide_t2, unpack_t2, 64, 32, 0, 0, 1},
};
