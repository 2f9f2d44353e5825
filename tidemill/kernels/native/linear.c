/* y = x W^T + b with W in panels of eight output features.

A panel holds, for every group of input features, eight rows side by side, so that eight outputs are the lanes of one vector:

  F32, F16, BF16   [panel][k][8]                       one value each
  Q8, Q8M          [panel][k / 32][8 fours][8][4]      signed codes
  Q4               [panel][k / 32][4 fours][8][4]      codes 0 .. 15; a byte's high half is four f + 4's code
  MX4              the same                            numbers of E2M1 values, which MX4_CODES has twice as large
  S4               the same                            codes -8 .. 7, which are multiplied sixteen times as large

and for these kinds scales [panel][k / 32][8] (Q8, MX4) or [panel][k / 32][2][8] (scale and offset) in float16: w = scale * code + offset;
S4's are float32 and a sixteenth: the conversion of a float16 takes as long as four products.
Activations meet the Q kinds as signed bytes with one scale for 32 of them.

An output is summed over k in order, by one chain of operations that is the same for any number of rows and any tile: the bits of a
row do not depend on the rest of the batch. Integer sums within a group of 32 are exact. */
#include <stddef.h>

#include "linear.h"
#include "simd.h"
#include "tidemill.h"

#define ROWS 4        /* of a tile of the Q kinds */
#define FLOAT_ROWS 8  /* of a tile of the others */
static const int8_t MX4_CODES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
TM_INLINE int is_packed(int kind) { return kind == Q4 || kind == MX4 || kind == S4; }
TM_INLINE int has_offsets(int kind) { return kind == Q8M || kind == Q4; }
TM_INLINE long scale_halves(int kind) { return has_offsets(kind) || kind == S4 ? 2 * LANES : LANES; } /* of a group, 16 bits each */

/* Two codes of each byte. */
TM_INLINE void split(int kind, u8x32 both, u8x32 *low, u8x32 *high) {
    if (kind == S4) {
        *low = u8x32_low_by_16(both), *high = u8x32_high_by_16(both);
        return;
    }
    *low = u8x32_low(both), *high = u8x32_high(both);
    if (kind == MX4) *low = u8x32_look_up(MX4_CODES, *low), *high = u8x32_look_up(MX4_CODES, *high);
}

#define WIDE_ROWS 16  /* from so many rows on, a panel is unpacked once instead of once a tile */

void quantize_row(void *arg, long row, int thread) {
    (void)thread;
    const linear_job *j = arg;
    long num_groups = j->num_in / GROUP;
    for (long g = 0; g < num_groups; g++) {
        const float *x = j->x + row * j->num_in + g * GROUP;
        f32x8 v0 = f32x8_load(x), v1 = f32x8_load(x + 8), v2 = f32x8_load(x + 16), v3 = f32x8_load(x + 24);
        float top = f32x8_maximum(f32x8_max(f32x8_max(f32x8_abs(v0), f32x8_abs(v1)), f32x8_max(f32x8_abs(v2), f32x8_abs(v3))));
        float inverse = top > 0 ? 127.0f / top : 0.0f;
        i32x8 q0 = f32x8_to_i32x8(f32x8_mul1(v0, inverse)), q1 = f32x8_to_i32x8(f32x8_mul1(v1, inverse));
        i32x8 q2 = f32x8_to_i32x8(f32x8_mul1(v2, inverse)), q3 = f32x8_to_i32x8(f32x8_mul1(v3, inverse));
        int8_t *to = j->xq + row * j->num_in + g * GROUP;
        i32x8_store_bytes(to, q0);
        i32x8_store_bytes(to + 8, q1);
        i32x8_store_bytes(to + 16, q2);
        i32x8_store_bytes(to + 24, q3);
        float d = top / 127.0f + 0 * f32x8_sum(f32x8_add(f32x8_add(v0, v1), f32x8_add(v2, v3))); /* not finite if any value is not */
        j->xd[row * num_groups + g] = d;
        j->xs[row * num_groups + g] = d * (float)i32x8_sum(i32x8_add(i32x8_add(q0, q1), i32x8_add(q2, q3)));
    }
}

#define DOT(acc, w, x, f) (kind == Q4 ? i32x8_dot_unsigned(acc, w, x, f) : i32x8_dot(acc, w, x, f))
#define FOUR(f)                                                                  \
    {                                                                            \
        u8x32 low, high;                                                         \
        split(kind, u8x32_load(codes + f * 32), &low, &high);                    \
        for (int r = 0; r < n; r++) dot[r] = DOT(dot[r], low, first[r], f);      \
        for (int r = 0; r < n; r++) dot[r] = DOT(dot[r], high, second[r], f);    \
    }
#define BYTES(at, half, f)                                               \
    {                                                                    \
        u8x32 w = u8x32_load(codes + at * 32);                           \
        for (int r = 0; r < n; r++) dot[r] = DOT(dot[r], w, half[r], f); \
    }

TM_INLINE f32x8 load_scale(const void *scales, long at, int wide) {
    return wide ? f32x8_load((const float *)scales + at) : f32x8_load_f16((const uint16_t *)scales + at);
}

/* One panel by `n` rows from `row` on. `kind`, `wide` and `n` are constants where this is called, so branches go and loops unroll.
   wide: unpacked to a byte a code and float scales. */
TM_INLINE void tile_q(const linear_job *j, int kind, int wide, const uint8_t *codes, const void *scales, long row, int n, f32x8 *out) {
    long num_groups = j->num_in / GROUP, num_scales = has_offsets(kind) ? 2 * LANES : LANES;
    const int8_t *x = j->xq + row * j->num_in;
    const float *xd = j->xd + row * num_groups, *xs = j->xs + row * num_groups;
    f32x8 acc[ROWS];
    for (int r = 0; r < n; r++) acc[r] = f32x8_set(0);
    for (long g = 0; g < num_groups; g++) {
        i32x8 dot[ROWS];
        i8x16 first[ROWS], second[ROWS];
        for (int r = 0; r < n; r++) dot[r] = i32x8_start();
        for (int r = 0; r < n; r++) first[r] = i8x16_load(x + r * j->num_in), second[r] = i8x16_load(x + r * j->num_in + 16);
        if (is_packed(kind) && !wide) {
            FOUR(0) FOUR(1) FOUR(2) FOUR(3)
            codes += 128;
        } else {
            BYTES(0, first, 0) BYTES(1, first, 1) BYTES(2, first, 2) BYTES(3, first, 3)
            BYTES(4, second, 0) BYTES(5, second, 1) BYTES(6, second, 2) BYTES(7, second, 3)
            codes += 256;
        }
        f32x8 d = load_scale(scales, g * num_scales, wide || kind == S4);
        for (int r = 0; r < n; r++) acc[r] = f32x8_fma(acc[r], i32x8_finish(dot[r]), f32x8_mul1(d, xd[r * num_groups + g]));
        if (has_offsets(kind)) {
            f32x8 m = load_scale(scales, g * num_scales + LANES, wide);
            for (int r = 0; r < n; r++) acc[r] = f32x8_fma1(acc[r], m, xs[r * num_groups + g]);
        }
        x += GROUP;
    }
    for (int r = 0; r < n; r++) out[r] = acc[r];
}

#define SINGLE_FOUR(f)                                        \
    {                                                         \
        u8x32 low, high;                                      \
        split(kind, u8x32_load(codes + f * 32), &low, &high); \
        dot[p] = DOT(dot[p], low, first, f);                  \
        dot[p] = DOT(dot[p], high, second, f);                \
    }
#define SINGLE_BYTES(at, half, f) dot[p] = i32x8_dot(dot[p], u8x32_load(codes + at * 32), half, f);

/* `n` groups of one panel by one row, added to `acc`. */
TM_INLINE f32x8 single_groups(const linear_job *j, int kind, const uint8_t *codes, const uint16_t *scales, long g, int n, f32x8 acc) {
    long code_bytes = is_packed(kind) ? 128 : 256;
    i32x8 dot[2];
    codes += g * code_bytes, scales += g * scale_halves(kind);
    for (int p = 0; p < n; p++) {
        i8x16 first = i8x16_load(j->xq + (g + p) * GROUP), second = i8x16_load(j->xq + (g + p) * GROUP + 16);
        dot[p] = i32x8_start();
        if (is_packed(kind)) {
            SINGLE_FOUR(0) SINGLE_FOUR(1) SINGLE_FOUR(2) SINGLE_FOUR(3)
        } else {
            SINGLE_BYTES(0, first, 0) SINGLE_BYTES(1, first, 1) SINGLE_BYTES(2, first, 2) SINGLE_BYTES(3, first, 3)
            SINGLE_BYTES(4, second, 0) SINGLE_BYTES(5, second, 1) SINGLE_BYTES(6, second, 2) SINGLE_BYTES(7, second, 3)
        }
        codes += code_bytes;
    }
    for (int p = 0; p < n; p++) {
        acc = f32x8_fma(acc, i32x8_finish(dot[p]), f32x8_mul1(load_scale(scales, 0, kind == S4), j->xd[g + p]));
        if (has_offsets(kind)) acc = f32x8_fma1(acc, f32x8_load_f16(scales + LANES), j->xs[g + p]);
        scales += scale_halves(kind);
    }
    return acc;
}

/* One panel by one row, two groups at a time: one group alone is a single chain of sums, and the processor would wait. */
TM_INLINE void single_q(const linear_job *j, int kind, const uint8_t *codes, const uint16_t *scales, f32x8 *out) {
    long num_groups = j->num_in / GROUP, g = 0;
    f32x8 acc = f32x8_set(0);
    for (; g + 2 <= num_groups; g += 2) acc = single_groups(j, kind, codes, scales, g, 2, acc);
    if (g < num_groups) acc = single_groups(j, kind, codes, scales, g, 1, acc);
    *out = acc;
}

TM_INLINE f32x8 load_weight(int kind, const void *codes, long at) {
    if (kind == F32) return f32x8_load((const float *)codes + at);
    if (kind == F16) return f32x8_load_f16((const uint16_t *)codes + at);
    return f32x8_load_bf16((const uint16_t *)codes + at);
}

#define LANE(f)                                                                     \
    {                                                                               \
        f32x8 w = load_weight(kind, codes, (k + f) * LANES);                        \
        for (int r = 0; r < n; r++) acc[r] = f32x8_fma_lane(acc[r], w, four[r], f); \
    }

TM_INLINE void tile_f(const linear_job *j, int kind, const void *codes, long row, int n, f32x8 *out) {
    const float *x = j->x + row * j->num_in;
    f32x8 acc[FLOAT_ROWS];
    long k = 0;
    for (int r = 0; r < n; r++) acc[r] = f32x8_set(0);
    for (; k + 4 <= j->num_in; k += 4) {
        f32x4 four[FLOAT_ROWS];
        for (int r = 0; r < n; r++) four[r] = f32x4_load(x + r * j->num_in + k);
        LANE(0) LANE(1) LANE(2) LANE(3)
    }
    for (; k < j->num_in; k++) {
        f32x8 w = load_weight(kind, codes, k * LANES);
        for (int r = 0; r < n; r++) acc[r] = f32x8_fma1(acc[r], w, x[r * j->num_in + k]);
    }
    for (int r = 0; r < n; r++) out[r] = acc[r];
}

/* Four panels by one row: a row alone has too few sums under way to keep the multipliers busy. */
TM_INLINE void four_panels(const linear_job *j, int kind, const void *codes, long row, f32x8 *out) {
    const float *x = j->x + row * j->num_in;
    long panel = j->num_in * LANES;
    f32x8 acc[4] = {f32x8_set(0), f32x8_set(0), f32x8_set(0), f32x8_set(0)};
    for (long k = 0; k < j->num_in; k++)
        for (int p = 0; p < 4; p++) acc[p] = f32x8_fma1(acc[p], load_weight(kind, codes, p * panel + k * LANES), x[k]);
    for (int p = 0; p < 4; p++) out[p] = acc[p];
}

static void store_tile(const linear_job *j, long panel, long row, int n, const f32x8 *values) {
    long first = panel * LANES, num = j->num_out - first < LANES ? j->num_out - first : LANES;
    for (int r = 0; r < n; r++) {
        float *to = j->out + (row + r) * j->num_out + first;
        if (num == LANES) {
            f32x8_store(to, j->bias ? f32x8_add(values[r], f32x8_load(j->bias + first)) : values[r]);
            continue;
        }
        float lanes[LANES];
        f32x8_store(lanes, values[r]);
        for (long i = 0; i < num; i++) to[i] = j->bias ? lanes[i] + j->bias[first + i] : lanes[i];
    }
}

#define TILE(count, tile, ...) \
    case count: tile(j, __VA_ARGS__, row, count, values); store_tile(j, panel, row, count, values); break;

#define Q_PANEL(name, kind, wide)                                                                     \
    static void name(const linear_job *j, long panel, const uint8_t *codes, const void *scales) {     \
        for (long row = 0; row < j->num_rows; row += ROWS) {                                          \
            f32x8 values[ROWS];                                                                       \
            long left = j->num_rows - row;                                                            \
            switch (left < ROWS ? left : ROWS) {                                                      \
                TILE(1, tile_q, kind, wide, codes, scales) TILE(2, tile_q, kind, wide, codes, scales) \
                TILE(3, tile_q, kind, wide, codes, scales) TILE(4, tile_q, kind, wide, codes, scales) \
            }                                                                                         \
        }                                                                                             \
    }
#define Q_SINGLE(name, kind)                                                                          \
    static __attribute__((noinline)) void name(const linear_job *j, long panel, const uint8_t *codes, const uint16_t *scales) { \
        f32x8 value;                                                                                  \
        single_q(j, kind, codes, scales, &value);                                                     \
        store_tile(j, panel, 0, 1, &value);                                                           \
    }
Q_SINGLE(single_q4, Q4)
Q_SINGLE(single_q8, Q8)
Q_SINGLE(single_q8m, Q8M)
Q_SINGLE(single_mx4, MX4)
Q_SINGLE(single_s4, S4)
Q_PANEL(panel_q4, Q4, 0)
Q_PANEL(panel_q8, Q8, 0)
Q_PANEL(panel_q8m, Q8M, 0)
Q_PANEL(panel_mx4, MX4, 0)
Q_PANEL(panel_s4, S4, 0)
Q_PANEL(wide_q4, Q4, 1)
Q_PANEL(wide_q8, Q8, 1)
Q_PANEL(wide_q8m, Q8M, 1)

#define F_PANEL(name, kind)                                                                            \
    static void name(const linear_job *j, long panel, const void *codes) {                             \
        for (long row = 0; row < j->num_rows; row += FLOAT_ROWS) {                                     \
            f32x8 values[FLOAT_ROWS];                                                                  \
            long left = j->num_rows - row;                                                             \
            switch (left < FLOAT_ROWS ? left : FLOAT_ROWS) {                                           \
                TILE(1, tile_f, kind, codes) TILE(2, tile_f, kind, codes) TILE(3, tile_f, kind, codes) \
                TILE(4, tile_f, kind, codes) TILE(5, tile_f, kind, codes) TILE(6, tile_f, kind, codes) \
                TILE(7, tile_f, kind, codes) TILE(8, tile_f, kind, codes)                              \
            }                                                                                          \
        }                                                                                              \
    }                                                                                                  \
    static void name##_by_4(const linear_job *j, long panel, const void *codes) {                      \
        for (long row = 0; row < j->num_rows; row++) {                                                 \
            f32x8 values[4];                                                                           \
            four_panels(j, kind, codes, row, values);                                                  \
            for (int p = 0; p < 4; p++) store_tile(j, panel + p, row, 1, values + p);                  \
        }                                                                                              \
    }
F_PANEL(panel_f32, F32)
F_PANEL(panel_f16, F16)
F_PANEL(panel_bf16, BF16)

static void float_panels(const linear_job *j, long panel, long end) {
    long stride = j->num_in * LANES * (j->kind == F32 ? 4 : 2);
    const char *codes = (const char *)j->codes + panel * stride;
    while (panel < end) {
        int by_4 = j->num_rows <= 2 && panel + 4 <= end;
        switch (j->kind) {
        case F32: (by_4 ? panel_f32_by_4 : panel_f32)(j, panel, codes); break;
        case F16: (by_4 ? panel_f16_by_4 : panel_f16)(j, panel, codes); break;
        default: (by_4 ? panel_bf16_by_4 : panel_bf16)(j, panel, codes);
        }
        panel += by_4 ? 4 : 1;
        codes += stride * (by_4 ? 4 : 1);
    }
}

TM_INLINE void unpack_codes(int kind, const uint8_t *codes, long num_groups, uint8_t *to) {
    for (long g = 0; g < num_groups; g++, to += 256)
        for (int f = 0; f < 4; f++) {
            u8x32 low, high;
            split(kind, u8x32_load(codes + g * 128 + f * 32), &low, &high);
            u8x32_store(to + f * 32, low);
            u8x32_store(to + f * 32 + 128, high);
        }
}

/* A byte a code and float scales (which S4 has), in the thread's memory. */
static void unpack(const linear_job *j, const uint8_t *codes, const uint16_t *scales, uint8_t *wide_codes, float *wide_scales) {
    long num_groups = j->num_in / GROUP, num_scales = j->kind == S4 ? 0 : num_groups * (has_offsets(j->kind) ? 2 : 1);
    for (long i = 0; i < num_scales; i++) f32x8_store(wide_scales + i * LANES, f32x8_load_f16(scales + i * LANES));
    switch (j->kind) {
    case Q4: unpack_codes(Q4, codes, num_groups, wide_codes); break;
    case MX4: unpack_codes(MX4, codes, num_groups, wide_codes); break;
    case S4: unpack_codes(S4, codes, num_groups, wide_codes); break;
    }
}

void run_panels(void *arg, long task, int thread) {
    const linear_job *j = arg;
    long panel = task * j->panels_per_task;
    long end = panel + j->panels_per_task < j->num_panels ? panel + j->panels_per_task : j->num_panels;
    if (j->kind < Q8) {
        float_panels(j, panel, end);
        return;
    }
    long num_groups = j->num_in / GROUP, code_bytes = is_packed(j->kind) ? 128 : 256, num_scales = scale_halves(j->kind);
    /* Without memory for the unpacked codes, the packed ones give the same result. */
    float *wide_scales = j->num_rows >= WIDE_ROWS ? tm_scratch(thread, 1, num_groups * (256 + num_scales * (long)sizeof(float))) : NULL;
    uint8_t *wide_codes = (uint8_t *)(wide_scales + num_groups * num_scales);
    for (; panel < end; panel++) {
        const uint8_t *codes = (const uint8_t *)j->codes + panel * num_groups * code_bytes;
        const uint16_t *scales = j->scales + panel * num_groups * num_scales;
        if (j->num_rows == 1) {
            switch (j->kind) {
            case Q8: single_q8(j, panel, codes, scales); break;
            case Q8M: single_q8m(j, panel, codes, scales); break;
            case MX4: single_mx4(j, panel, codes, scales); break;
            case S4: single_s4(j, panel, codes, scales); break;
            default: single_q4(j, panel, codes, scales);
            }
            continue;
        }
        if (wide_scales) unpack(j, codes, scales, wide_codes, wide_scales);
        switch (j->kind) {
        case Q8: wide_scales ? wide_q8(j, panel, codes, wide_scales) : panel_q8(j, panel, codes, scales); break;
        case Q8M: wide_scales ? wide_q8m(j, panel, codes, wide_scales) : panel_q8m(j, panel, codes, scales); break;
        case MX4: wide_scales ? wide_q8(j, panel, wide_codes, wide_scales) : panel_mx4(j, panel, codes, scales); break;
        case S4: wide_scales ? wide_q8(j, panel, wide_codes, (const float *)scales) : panel_s4(j, panel, codes, scales); break;
        default: wide_scales ? wide_q4(j, panel, wide_codes, wide_scales) : panel_q4(j, panel, codes, scales);
        }
    }
}

int linear_op(int kind, const float *x, long num_rows, long num_in, const void *codes, const uint16_t *scales, const float *bias,
              long num_out, float *out) {
    linear_job j = {kind, x, codes, scales, bias, out, num_rows, num_in, num_out, (num_out + LANES - 1) / LANES, 0, NULL, NULL, NULL};
    if (num_rows == 0) return 0;
    if (kind >= Q8) {
        long num_groups = num_in / GROUP;
        j.xq = tm_scratch(0, 0, num_rows * (num_in + 2 * num_groups * (long)sizeof(float)));
        if (!j.xq) return -1;
        j.xd = (float *)(j.xq + num_rows * num_in);
        j.xs = j.xd + num_rows * num_groups;
        tm_parallel(num_rows, num_rows < 4 ? num_rows : 1, quantize_row, &j);
    }
    long per_thread = (j.num_panels + tm_num_threads() - 1) / tm_num_threads();
    j.panels_per_task = per_thread > 8 ? per_thread / 8 : 1;
    tm_parallel((j.num_panels + j.panels_per_task - 1) / j.panels_per_task, 1, run_panels, &j);
    return 0;
}

TM_API int tm_linear(int kind, const float *x, long num_rows, long num_in, const void *codes, const uint16_t *scales,
                     const float *bias, long num_out, float *out) {
    tm_lock();
    int failed = linear_op(kind, x, num_rows, num_in, codes, scales, bias, num_out, out);
    tm_unlock();
    return failed;
}
