/* Kinds whose activations are bytes with a scale for 32 of them (layouts: linear.c). Sums over 32 are whole numbers; those over groups
are floats, in the order of the groups: a sum times the activations' scale, then that times the weights' added, then the offset. */
#include "linear.h"
#include "tiles.h"
#if defined(HAS_QUADS)
#include "linear_neon.h"
#endif

#define PAIR_ROWS 8 /* of a tile of two panels */

static const int8_t MX4_CODES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
TM_INLINE int is_packed(int kind) { return kind == Q4 || kind == MX4 || kind >= G4; }
TM_INLINE int has_offsets(int kind) { return kind == Q8M || kind == Q4 || kind == G8M || kind == G4; }
TM_INLINE long scale_halves(int kind) { return has_offsets(kind) ? 2 * LANES : LANES; } /* of a group, 16 bits each */

/* Two codes of each byte. */
TM_INLINE void split(int kind, const int8_t *table, u8x32 both, u8x32 *low, u8x32 *high) {
    if (kind == GS4) {
        *low = u8x32_low_by_16(both), *high = u8x32_high_by_16(both);
        return;
    }
    *low = u8x32_low(both), *high = u8x32_high(both);
    if (kind == MX4) table = MX4_CODES;
    if (kind == MX4 || kind == GT4) *low = u8x32_look_up(table, *low), *high = u8x32_look_up(table, *high);
}

/* With the last two bits of 24 cleared: its product with 1.5 * 2^23 has no rounding (halves_finish). */
static float short_factor(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= ~3u;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

#if defined(HAS_QUADS)
static void put_quad(const linear_job *j, long row, long g, float d, int32_t sum) {
    float *quad = quad_of(j, row) + g * QUAD, *less = quad + 8 + row % 4 * 4;
    if (g == 0 && row % 4 == 0) memset(quad - QUAD, 0, QUAD * sizeof(float));
    quad[row % 4] = d, quad[4 + row % 4] = d * (float)sum;
    less[0] = less[1] = less[2] = less[3] = -12582912.0f * d;
}
#else
#define put_quad(j, row, g, d, sum)
#endif

void quantize_row(void *arg, long row, int thread) {
    (void)thread;
    const linear_job *j = arg;
    long num_groups = j->num_in / GROUP;
    for (long g = 0; g < num_groups; g++) {
        const float *x = j->x + row * j->num_in + g * GROUP;
        float ordered[GROUP];
        if (j->order) {
            for (int i = 0; i < GROUP; i++) ordered[i] = j->x[row * j->num_in + j->order[g * GROUP + i]];
            x = ordered;
        }
        f32x8 v0 = f32x8_load(x), v1 = f32x8_load(x + 8), v2 = f32x8_load(x + 16), v3 = f32x8_load(x + 24);
        float top = f32x8_maximum(f32x8_max(f32x8_max(f32x8_abs(v0), f32x8_abs(v1)), f32x8_max(f32x8_abs(v2), f32x8_abs(v3))));
        float inverse = top > 1e-36f ? 127.0f / top : 0.0f; /* below, it would be infinite */
        i32x8 q0 = f32x8_to_i32x8(f32x8_mul1(v0, inverse)), q1 = f32x8_to_i32x8(f32x8_mul1(v1, inverse));
        i32x8 q2 = f32x8_to_i32x8(f32x8_mul1(v2, inverse)), q3 = f32x8_to_i32x8(f32x8_mul1(v3, inverse));
        int8_t *to = j->xq + row * j->num_in + g * GROUP;
        i32x8_store_bytes(to, q0);
        i32x8_store_bytes(to + 8, q1);
        i32x8_store_bytes(to + 16, q2);
        i32x8_store_bytes(to + 24, q3);
        float d = short_factor(top / 127.0f);
        /* not a number if any value is none, or too large for halves_finish, which multiplies it by 1.5 * 2^23 */
        d += 0 * (f32x8_sum(f32x8_add(f32x8_add(v0, v1), f32x8_add(v2, v3))) + 12582912.0f * d);
        j->xd[row * num_groups + g] = d;
        int32_t sum = i32x8_sum(i32x8_add(i32x8_add(q0, q1), i32x8_add(q2, q3)));
        j->xs[row * num_groups + g] = d * (float)sum;
        if (j->starts) halves_prepare(j->starts + row * num_groups + g, d, sum);
        if (j->quads) put_quad(j, row, g, d, sum);
    }
}

TM_INLINE int is_signed(int kind) { return kind != Q4 && kind != G4; } /* once unpacked */

/* How a group's sums start, and products are added to them. */
#if HAS_RAISED
#define START(of) (is_signed(kind) ? i32x8_set((of)->raised) : i32x8_start())
#define DOT(acc, w, x, f) i32x8_dot_unsigned(acc, is_signed(kind) ? u8x32_flip_top(w) : (w), x, f)
#else
#define START(of) ((void)(of), i32x8_start())
#define DOT(acc, w, x, f) (is_signed(kind) ? i32x8_dot(acc, w, x, f) : i32x8_dot_unsigned(acc, w, x, f))
#endif
#define FOUR(f)                                                                  \
    {                                                                            \
        u8x32 low, high;                                                         \
        split(kind, j->table, u8x32_load(codes + f * 32), &low, &high);                    \
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
    const halves_start *starts = j->starts + row * num_groups;
#if defined(HAS_QUADS)
    if (wide && n == 4 && j->quads) {
        four_rows_by_panel(has_offsets(kind), codes, scales, x, j->num_in, quad_of(j, row), num_groups, out);
        return;
    }
#endif
    f32x8 acc[ROWS];
    for (int r = 0; r < n; r++) acc[r] = f32x8_set(0);
    for (long g = 0; g < num_groups; g++) {
        i32x8 dot[ROWS];
        i8x16 first[ROWS], second[ROWS];
        for (int r = 0; r < n; r++) dot[r] = START(starts + r * num_groups + g);
        for (int r = 0; r < n; r++) first[r] = i8x16_load(x + r * j->num_in), second[r] = i8x16_load(x + r * j->num_in + 16);
        if (is_packed(kind) && !wide) {
            FOUR(0) FOUR(1) FOUR(2) FOUR(3)
            codes += 128;
        } else {
            BYTES(0, first, 0) BYTES(1, first, 1) BYTES(2, first, 2) BYTES(3, first, 3)
            BYTES(4, second, 0) BYTES(5, second, 1) BYTES(6, second, 2) BYTES(7, second, 3)
            codes += 256;
        }
        f32x8 d = load_scale(scales, g * num_scales, wide);
        for (int r = 0; r < n; r++) acc[r] = f32x8_fma(acc[r], f32x8_mul1(i32x8_finish(dot[r]), xd[r * num_groups + g]), d);
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
        split(kind, j->table, u8x32_load(codes + f * 32), &low, &high); \
        dot[p] = DOT(dot[p], low, first, f);                  \
        dot[p] = DOT(dot[p], high, second, f);                \
    }
#define SINGLE_BYTES(at, half, f) dot[p] = DOT(dot[p], u8x32_load(codes + at * 32), half, f);

#define PREFETCH 1024 /* bytes of codes ahead; from memory, a row alone takes 5 % less with it */

/* `n` groups of one panel by one row, added to `acc`. */
TM_INLINE f32x8 single_groups(const linear_job *j, int kind, const uint8_t *codes, const uint16_t *scales, long g, int n, f32x8 acc) {
    long code_bytes = is_packed(kind) ? 128 : 256;
    i32x8 dot[2];
    codes += g * code_bytes, scales += g * scale_halves(kind);
    __builtin_prefetch(scales + PREFETCH / 8);
    for (int p = 0; p < n; p++) {
        i8x16 first = i8x16_load(j->xq + (g + p) * GROUP), second = i8x16_load(j->xq + (g + p) * GROUP + 16);
        dot[p] = START(j->starts + g + p);
        for (long at = 0; at < code_bytes; at += 64) __builtin_prefetch(codes + PREFETCH + at);
        if (is_packed(kind)) {
            SINGLE_FOUR(0) SINGLE_FOUR(1) SINGLE_FOUR(2) SINGLE_FOUR(3)
        } else {
            SINGLE_BYTES(0, first, 0) SINGLE_BYTES(1, first, 1) SINGLE_BYTES(2, first, 2) SINGLE_BYTES(3, first, 3)
            SINGLE_BYTES(4, second, 0) SINGLE_BYTES(5, second, 1) SINGLE_BYTES(6, second, 2) SINGLE_BYTES(7, second, 3)
        }
        codes += code_bytes;
    }
    for (int p = 0; p < n; p++) {
        acc = f32x8_fma(acc, f32x8_mul1(i32x8_finish(dot[p]), j->xd[g + p]), f32x8_load_f16(scales));
        if (has_offsets(kind)) acc = f32x8_fma1(acc, f32x8_load_f16(scales + LANES), j->xs[g + p]);
        scales += scale_halves(kind);
    }
    return acc;
}

/* One panel by one row, two groups at a time: one group alone is a single chain of sums, and the processor would wait. */
TM_INLINE void single_q(const linear_job *j, int kind, const uint8_t *codes, const void *scales, f32x8 *out) {
    long num_groups = j->num_in / GROUP, g = 0;
    f32x8 acc = f32x8_set(0);
    for (; g + 2 <= num_groups; g += 2) acc = single_groups(j, kind, codes, scales, g, 2, acc);
    if (g < num_groups) acc = single_groups(j, kind, codes, scales, g, 1, acc);
    *out = acc;
}

/* ---- S4 */

#define HALVES(f)                                                                                                 \
    {                                                                                                             \
        halves both = halves_load(codes + f * 16), lower = halves_lower(both);                                    \
        for (int r = 0; r < n; r++) dot[r] = halves_dot(dot[r], lower, both, f < 4 ? first[r] : second[r], f % 4); \
    }
#define ALL_HALVES HALVES(0) HALVES(1) HALVES(2) HALVES(3) HALVES(4) HALVES(5) HALVES(6) HALVES(7)

TM_INLINE void tile_s4(const linear_job *j, int kind, int wide, const uint8_t *codes, const void *from, long row, int n, f32x8 *out) {
    (void)kind, (void)wide;
    long num_groups = j->num_in / GROUP;
    const int8_t *x = j->xq + row * j->num_in;
    const float *xd = j->xd + row * num_groups, *scales = from;
    const halves_start *starts = j->starts + row * num_groups;
    f32x8 acc[ROWS];
    for (int r = 0; r < n; r++) acc[r] = f32x8_set(0);
    for (long g = 0; g < num_groups; g++, x += GROUP, codes += 128, scales += LANES) {
        i32x8 dot[ROWS];
        i8x16 first[ROWS], second[ROWS];
        for (int r = 0; r < n; r++) dot[r] = halves_begin(starts + r * num_groups + g);
        for (int r = 0; r < n; r++) first[r] = i8x16_load(x + r * j->num_in), second[r] = i8x16_load(x + r * j->num_in + 16);
        for (long at = 0; at < 128; at += 64) __builtin_prefetch(codes + PREFETCH + at);
        __builtin_prefetch(scales + 8 * LANES);
        ALL_HALVES
        f32x8 d = f32x8_load(scales);
        for (int r = 0; r < n; r++) acc[r] = f32x8_fma(acc[r], halves_finish(dot[r], starts + r * num_groups + g, xd[r * num_groups + g]), d);
    }
    for (int r = 0; r < n; r++) out[r] = acc[r];
}

/* `num` groups of one panel by one row, added to `acc`, as single_groups. */
TM_INLINE f32x8 groups_s4(const linear_job *j, const uint8_t *from, const float *scales, long g, int num, f32x8 acc) {
    const halves_start *starts = j->starts + g;
    i32x8 sums[2];
    __builtin_prefetch(scales + 8 * LANES);
    for (int p = 0; p < num; p++) {
        const int n = 1;
        const uint8_t *codes = from + p * 128;
        for (long at = 0; at < 128; at += 64) __builtin_prefetch(codes + PREFETCH + at);
        i8x16 first[1] = {i8x16_load(j->xq + (g + p) * GROUP)}, second[1] = {i8x16_load(j->xq + (g + p) * GROUP + 16)};
        i32x8 dot[1] = {halves_begin(starts + p)};
        ALL_HALVES
        sums[p] = dot[0];
    }
    for (int p = 0; p < num; p++) acc = f32x8_fma(acc, halves_finish(sums[p], starts + p, j->xd[g + p]), f32x8_load(scales + p * LANES));
    return acc;
}

TM_INLINE void row_s4(const linear_job *j, int kind, const uint8_t *codes, const void *scales, f32x8 *out) {
    (void)kind;
    long num_groups = j->num_in / GROUP, g = 0;
    f32x8 acc = f32x8_set(0);
    for (; g + 2 <= num_groups; g += 2) acc = groups_s4(j, codes + g * 128, (const float *)scales + g * LANES, g, 2, acc);
    if (g < num_groups) acc = groups_s4(j, codes + g * 128, (const float *)scales + g * LANES, g, 1, acc);
    *out = acc;
}

static void unpack_s4(const linear_job *j, const uint8_t *codes, uint8_t *to, long stride) {
    for (long at = 0; at < j->num_in / 4; at++) u8x32_store(to + at * stride, halves_unpack(halves_load(codes + at * 16)));
}

/* ---- groups of any multiple of 32, float scales: a group's sum first, then its scale */

TM_INLINE void tile_g(const linear_job *j, int kind, int wide, const uint8_t *codes, const void *from, long row, int n, f32x8 *out) {
    long num_groups = j->num_in / GROUP;
    const int8_t *x = j->xq + row * j->num_in;
    const float *xd = j->xd + row * num_groups, *xs = j->xs + row * num_groups, *scales = from;
    const halves_start *starts = j->starts + row * num_groups;
    f32x8 acc[ROWS];
    for (int r = 0; r < n; r++) acc[r] = f32x8_set(0);
    for (long g = 0; g < num_groups;) {
        long end = g + j->group < num_groups ? g + j->group : num_groups;
        f32x8 part[ROWS];
        float sum[ROWS];
        for (int r = 0; r < n; r++) part[r] = f32x8_set(0), sum[r] = 0;
        for (; g < end; g++) {
            i32x8 dot[ROWS];
            i8x16 first[ROWS], second[ROWS];
            for (int r = 0; r < n; r++) dot[r] = START(starts + r * num_groups + g);
            for (int r = 0; r < n; r++) first[r] = i8x16_load(x + r * j->num_in), second[r] = i8x16_load(x + r * j->num_in + 16);
            if (is_packed(kind) && !wide) {
                FOUR(0) FOUR(1) FOUR(2) FOUR(3)
                codes += 128;
            } else {
                BYTES(0, first, 0) BYTES(1, first, 1) BYTES(2, first, 2) BYTES(3, first, 3)
                BYTES(4, second, 0) BYTES(5, second, 1) BYTES(6, second, 2) BYTES(7, second, 3)
                codes += 256;
            }
            for (int r = 0; r < n; r++) part[r] = f32x8_fma1(part[r], i32x8_finish(dot[r]), xd[r * num_groups + g]);
            if (has_offsets(kind)) for (int r = 0; r < n; r++) sum[r] += xs[r * num_groups + g];
            x += GROUP;
        }
        f32x8 d = f32x8_load(scales);
        for (int r = 0; r < n; r++) acc[r] = f32x8_fma(acc[r], part[r], d);
        scales += LANES;
        if (has_offsets(kind)) {
            f32x8 m = f32x8_load(scales);
            for (int r = 0; r < n; r++) acc[r] = f32x8_fma1(acc[r], m, sum[r]);
            scales += LANES;
        }
    }
    for (int r = 0; r < n; r++) out[r] = acc[r];
}

/* Where a group of a single row ends. */
typedef struct {
    f32x8 acc, part;
    float sum;
    long inside;
    const float *scales;
} single_sums;

TM_INLINE void end_group(int kind, single_sums *s) {
    s->acc = f32x8_fma(s->acc, s->part, f32x8_load(s->scales));
    if (has_offsets(kind)) s->acc = f32x8_fma1(s->acc, f32x8_load(s->scales + LANES), s->sum);
    s->scales += has_offsets(kind) ? 2 * LANES : LANES;
    s->part = f32x8_set(0), s->sum = 0, s->inside = 0;
}

/* The sums of `n` groups of 32: whole numbers, several chains at once. */
TM_INLINE void single_sum(const linear_job *j, int kind, const uint8_t *codes, long g, int n, single_sums *s) {
    i32x8 dot[2];
    for (int p = 0; p < n; p++) {
        i8x16 first = i8x16_load(j->xq + (g + p) * GROUP), second = i8x16_load(j->xq + (g + p) * GROUP + 16);
        dot[p] = START(j->starts + g + p);
        if (is_packed(kind)) {
            SINGLE_FOUR(0) SINGLE_FOUR(1) SINGLE_FOUR(2) SINGLE_FOUR(3)
            codes += 128;
        } else {
            SINGLE_BYTES(0, first, 0) SINGLE_BYTES(1, first, 1) SINGLE_BYTES(2, first, 2) SINGLE_BYTES(3, first, 3)
            SINGLE_BYTES(4, second, 0) SINGLE_BYTES(5, second, 1) SINGLE_BYTES(6, second, 2) SINGLE_BYTES(7, second, 3)
            codes += 256;
        }
    }
    for (int p = 0; p < n; p++) {
        s->part = f32x8_fma1(s->part, i32x8_finish(dot[p]), j->xd[g + p]);
        if (has_offsets(kind)) s->sum += j->xs[g + p];
        if (++s->inside == j->group) end_group(kind, s);
    }
}

TM_INLINE void single_g(const linear_job *j, int kind, const uint8_t *codes, const void *scales, f32x8 *out) {
    long num_groups = j->num_in / GROUP, g = 0, code_bytes = is_packed(kind) ? 128 : 256;
    single_sums s = {f32x8_set(0), f32x8_set(0), 0, 0, scales};
    for (; g + 2 <= num_groups; g += 2) single_sum(j, kind, codes + g * code_bytes, g, 2, &s);
    if (g < num_groups) single_sum(j, kind, codes + g * code_bytes, g, 1, &s);
    if (s.inside) end_group(kind, &s);
    *out = s.acc;
}

/* ---- the functions of each kind */

SINGLE_OF(single_q4, single_q, Q4)
PANEL_OF(panel_q4, tile_q, Q4, 0)
SINGLE_OF(single_q8, single_q, Q8)
PANEL_OF(panel_q8, tile_q, Q8, 0)
SINGLE_OF(single_q8m, single_q, Q8M)
PANEL_OF(panel_q8m, tile_q, Q8M, 0)
SINGLE_OF(single_mx4, single_q, MX4)
PANEL_OF(panel_mx4, tile_q, MX4, 0)
SINGLE_OF(single_s4, row_s4, S4)
PANEL_OF(panel_s4, tile_s4, S4, 0)
PANEL_OF(wide_s4, tile_q, S4, 1)
PANEL_OF(wide_q4, tile_q, Q4, 1)
PANEL_OF(wide_q8, tile_q, Q8, 1)
PANEL_OF(wide_q8m, tile_q, Q8M, 1)
SINGLE_OF(single_g8, single_g, G8)
PANEL_OF(panel_g8, tile_g, G8, 0)
SINGLE_OF(single_g8m, single_g, G8M)
PANEL_OF(panel_g8m, tile_g, G8M, 0)
SINGLE_OF(single_g4, single_g, G4)
PANEL_OF(panel_g4, tile_g, G4, 0)
SINGLE_OF(single_gs4, single_g, GS4)
PANEL_OF(panel_gs4, tile_g, GS4, 0)
SINGLE_OF(single_gt4, single_g, GT4)
PANEL_OF(panel_gt4, tile_g, GT4, 0)
PANEL_OF(wide_g4, tile_g, G4, 1)

#if defined(HAS_PAIRS)
/* Two panels at once. Signed codes are multiplied 128 larger here, and the sums start from what that adds.
   wide: unpacked, and the panels' vectors take turns; else both lie in memory as they are, `other` bytes apart. */

/* Two codes of each byte, as they are multiplied. */
TM_INLINE void split_pair(int kind, u8x64 table, u8x64 both, u8x64 *low, u8x64 *high) {
    if (kind == GS4) {
        *low = u8x64_flip_top(u8x64_mask(u8x64_shift_left_4(both), 0xf0)), *high = u8x64_flip_top(u8x64_mask(both, 0xf0));
        return;
    }
    *low = u8x64_mask(both, 15), *high = u8x64_mask(u8x64_shift_right_4(both), 15);
    if (kind == MX4 || kind == GT4) *low = u8x64_look_up(table, *low), *high = u8x64_look_up(table, *high);
}

#define PAIR_DOTS_OF(w, half, f) \
    for (int r = 0; r < n; r++) dot[r] = i32x16_dot_unsigned(dot[r], w, half[r], f);
#define PAIR_FOUR(f)                                                                                       \
    {                                                                                                      \
        u8x64 low, high;                                                                                   \
        split_pair(kind, table, u8x64_of(codes + (f) * 32, codes + other + (f) * 32), &low, &high);        \
        PAIR_DOTS_OF(low, first, f)                                                                        \
        PAIR_DOTS_OF(high, second, f)                                                                      \
    }
#define PAIR_BYTES(at, half, f)                                                                            \
    {                                                                                                      \
        u8x64 w = wide ? u8x64_load(codes + (at) * 64) : u8x64_of(codes + (at) * 32, codes + other + (at) * 32); \
        if (is_signed(kind)) w = u8x64_flip_top(w);                                                        \
        PAIR_DOTS_OF(w, half, f)                                                                           \
    }
/* A group of 32: the sums of `n` rows. */
#define PAIR_GROUP                                                                                                                  \
    i32x16 dot[PAIR_ROWS];                                                                                                          \
    i8x16 first[PAIR_ROWS], second[PAIR_ROWS];                                                                                      \
    for (int r = 0; r < n; r++) dot[r] = i32x16_set(is_signed(kind) ? starts[r * num_groups + g].raised : 0);                       \
    for (int r = 0; r < n; r++) first[r] = i8x16_load(x + r * j->num_in), second[r] = i8x16_load(x + r * j->num_in + 16);           \
    if (is_packed(kind) && !wide) {                                                                                                 \
        PAIR_FOUR(0) PAIR_FOUR(1) PAIR_FOUR(2) PAIR_FOUR(3)                                                                         \
    } else {                                                                                                                        \
        PAIR_BYTES(0, first, 0) PAIR_BYTES(1, first, 1) PAIR_BYTES(2, first, 2) PAIR_BYTES(3, first, 3)                             \
        PAIR_BYTES(4, second, 0) PAIR_BYTES(5, second, 1) PAIR_BYTES(6, second, 2) PAIR_BYTES(7, second, 3)                         \
    }                                                                                                                               \
    codes += wide ? 512 : is_packed(kind) ? 128 : 256;

TM_INLINE long other_codes(const linear_job *j, int kind) { return j->num_in / GROUP * (is_packed(kind) ? 128 : 256); }
TM_INLINE u8x64 pair_table(const linear_job *j, int kind) { return u8x64_flip_top(u8x64_table(kind == GT4 ? j->table : MX4_CODES)); }

TM_INLINE f32x16 pair_scale(const void *scales, long at, long other, int wide) {
    return wide ? f32x16_load((const float *)scales + 2 * at) : f32x16_load_f16((const uint16_t *)scales + at, (const uint16_t *)scales + other + at);
}

/* As tile_q. */
TM_INLINE void tile_pair(const linear_job *j, int kind, int wide, const uint8_t *codes, const void *scales, long row, int n, f32x16 *out) {
    long num_groups = j->num_in / GROUP, other = other_codes(j, kind), num = scale_halves(kind);
    const int8_t *x = j->xq + row * j->num_in;
    const float *xd = j->xd + row * num_groups, *xs = j->xs + row * num_groups;
    const halves_start *starts = j->starts + row * num_groups;
    u8x64 table = pair_table(j, kind);
    f32x16 acc[PAIR_ROWS];
    for (int r = 0; r < n; r++) acc[r] = f32x16_set(0);
    for (long g = 0; g < num_groups; g++, x += GROUP) {
        PAIR_GROUP
        f32x16 d = pair_scale(scales, g * num, num_groups * num, wide);
        for (int r = 0; r < n; r++) acc[r] = f32x16_fma(acc[r], f32x16_mul1(i32x16_to_f32x16(dot[r]), xd[r * num_groups + g]), d);
        if (!has_offsets(kind)) continue;
        f32x16 m = pair_scale(scales, g * num + LANES, num_groups * num, wide);
        for (int r = 0; r < n; r++) acc[r] = f32x16_fma1(acc[r], m, xs[r * num_groups + g]);
    }
    for (int r = 0; r < n; r++) out[r] = acc[r];
}

/* As tile_g: scales lie one panel's after the other's. */
TM_INLINE void tile_pair_g(const linear_job *j, int kind, int wide, const uint8_t *codes, const void *from, long row, int n, f32x16 *out) {
    long num_groups = j->num_in / GROUP, other = other_codes(j, kind);
    const float *scales = from, *others = scales + (num_groups + j->group - 1) / j->group * scale_halves(kind);
    const int8_t *x = j->xq + row * j->num_in;
    const float *xd = j->xd + row * num_groups, *xs = j->xs + row * num_groups;
    const halves_start *starts = j->starts + row * num_groups;
    u8x64 table = pair_table(j, kind);
    f32x16 acc[PAIR_ROWS];
    for (int r = 0; r < n; r++) acc[r] = f32x16_set(0);
    for (long g = 0; g < num_groups;) {
        long end = g + j->group < num_groups ? g + j->group : num_groups;
        f32x16 part[PAIR_ROWS];
        float sum[PAIR_ROWS];
        for (int r = 0; r < n; r++) part[r] = f32x16_set(0), sum[r] = 0;
        for (; g < end; g++, x += GROUP) {
            PAIR_GROUP
            for (int r = 0; r < n; r++) part[r] = f32x16_fma1(part[r], i32x16_to_f32x16(dot[r]), xd[r * num_groups + g]);
            if (has_offsets(kind)) for (int r = 0; r < n; r++) sum[r] += xs[r * num_groups + g];
        }
        f32x16 d = f32x16_of(f32x8_load(scales), f32x8_load(others));
        for (int r = 0; r < n; r++) acc[r] = f32x16_fma(acc[r], part[r], d);
        scales += LANES, others += LANES;
        if (!has_offsets(kind)) continue;
        f32x16 m = f32x16_of(f32x8_load(scales), f32x8_load(others));
        for (int r = 0; r < n; r++) acc[r] = f32x16_fma1(acc[r], m, sum[r]);
        scales += LANES, others += LANES;
    }
    for (int r = 0; r < n; r++) out[r] = acc[r];
}

#if defined(HAS_TILES)
#define TILE_ROWS 16
static const tile_shapes PAIR_SHAPES = {.palette = 1, .row_bytes = {64, 64, [4] = GROUP, GROUP, 64, 64}, .rows = {TILE_ROWS, TILE_ROWS, [4] = TILE_ROWS, TILE_ROWS, GROUP / 4, GROUP / 4}};

#define PAIR_DOTS(sums, xs, codes_of, group)                           \
    {                                                                  \
        tile_zero(sums);                                               \
        tile_load(xs, x + (group) * GROUP, j->num_in);                 \
        tile_load(codes_of, codes + (group) * 512, 64);                \
        if (is_signed(kind)) tile_dot_signed(sums, xs, codes_of);      \
        else tile_dot_signed_unsigned(sums, xs, codes_of);             \
        tile_store(dots[sums], 64, sums);                              \
    }

TM_INLINE void scale_pairs(const linear_job *j, int kind, const int32_t *dots, const float *scales, long row, long g, f32x16 *acc) {
    long num_groups = j->num_in / GROUP;
    const float *xd = j->xd + row * num_groups + g, *xs = j->xs + row * num_groups + g;
    scales += g * 2 * scale_halves(kind);
    f32x16 d = f32x16_load(scales), m = has_offsets(kind) ? f32x16_load(scales + 2 * LANES) : d;
    _Pragma("GCC unroll 16") for (int r = 0; r < TILE_ROWS; r++) {
        acc[r] = f32x16_fma(acc[r], f32x16_mul1(i32x16_to_f32x16(i32x16_load(dots + r * 16)), xd[r * num_groups]), d);
        if (has_offsets(kind)) acc[r] = f32x16_fma1(acc[r], m, xs[r * num_groups]);
    }
}

/* As tile_pair, of 16 rows. A group's sums are under way while those of the one before are scaled. */
TM_INLINE void tile_pair_16(const linear_job *j, int kind, const uint8_t *codes, const float *scales, long row, f32x16 *out) {
    int32_t dots[2][TILE_ROWS * 16] __attribute__((aligned(64)));
    long num_groups = j->num_in / GROUP;
    const int8_t *x = j->xq + row * j->num_in;
    f32x16 acc[TILE_ROWS];
    _Pragma("GCC unroll 16") for (int r = 0; r < TILE_ROWS; r++) acc[r] = f32x16_set(0);
    PAIR_DOTS(0, 4, 6, 0)
    for (long g = 0; g < num_groups; g += 2) {
        if (g + 1 < num_groups) PAIR_DOTS(1, 5, 7, g + 1)
        scale_pairs(j, kind, dots[0], scales, row, g, acc);
        if (g + 2 < num_groups) PAIR_DOTS(0, 4, 6, g + 2)
        if (g + 1 < num_groups) scale_pairs(j, kind, dots[1], scales, row, g + 1, acc);
    }
    _Pragma("GCC unroll 16") for (int r = 0; r < TILE_ROWS; r++) out[r] = acc[r];
}
#else
#define TILE_ROWS PAIR_ROWS
#endif

/* The lines that a tile's sums go to: while they are on their way, nothing stored after them can be read back from tiles. */
static void prefetch_pair(const linear_job *j, long panel, long row, int n) {
    for (int r = 0; r < n; r++) __builtin_prefetch(j->out + (row + r) * j->num_out + panel * LANES, 1);
}

static void store_pair(const linear_job *j, long panel, long row, int n, const f32x16 *values) {
    if (!j->sparse_first && !j->outliers && (panel + 2) * LANES <= j->num_out) {
        for (int r = 0; r < n; r++)
            f32x16_store(j->out + (row + r) * j->num_out + panel * LANES, j->bias ? f32x16_add(values[r], f32x16_load(j->bias + panel * LANES)) : values[r]);
        return;
    }
    f32x8 half[TILE_ROWS];
    for (int upper = 0; upper < 2; upper++) {
        for (int r = 0; r < n; r++) half[r] = f32x16_half(values[r], upper);
        store_tile(j, panel + upper, row, n, half);
    }
}

TM_INLINE void any_pair(const linear_job *j, int kind, int wide, const uint8_t *codes, const void *scales, long row, int n, f32x16 *out) {
    if (kind < G8) tile_pair(j, kind, wide, codes, scales, row, n, out);
    else tile_pair_g(j, kind, wide, codes, scales, row, n, out);
}

TM_INLINE void rows_by_pair(const linear_job *j, int kind, int wide, long panel, const uint8_t *codes, const void *scales) {
    f32x16 values[TILE_ROWS];
    long row = 0;
#if defined(HAS_TILES)
    if (wide && has_tiles && kind < G8) {
        tiles_begin(&PAIR_SHAPES);
        for (; row + TILE_ROWS <= j->num_rows; row += TILE_ROWS) {
            prefetch_pair(j, panel, row, TILE_ROWS);
            tile_pair_16(j, kind, codes, scales, row, values);
            store_pair(j, panel, row, TILE_ROWS, values);
        }
        tiles_end();
    }
#endif
    for (long n; row < j->num_rows; row += n) {
        long left = j->num_rows - row;
        if (left >= PAIR_ROWS) any_pair(j, kind, wide, codes, scales, row, n = PAIR_ROWS, values);
        else if (left >= 6) any_pair(j, kind, wide, codes, scales, row, n = 6, values);
        else if (left >= 4) any_pair(j, kind, wide, codes, scales, row, n = 4, values);
        else if (left >= 3) any_pair(j, kind, wide, codes, scales, row, n = 3, values);
        else if (left >= 2) any_pair(j, kind, wide, codes, scales, row, n = 2, values);
        else any_pair(j, kind, wide, codes, scales, row, n = 1, values);
        store_pair(j, panel, row, (int)n, values);
    }
}

#define PAIR_OF(name, kind, wide) \
    static void name(const linear_job *j, long panel, const uint8_t *codes, const void *scales) { rows_by_pair(j, kind, wide, panel, codes, scales); }
PAIR_OF(pair_q4, Q4, 1)
PAIR_OF(pair_q8, Q8, 1)
PAIR_OF(pair_q8m, Q8M, 1)
PAIR_OF(pair_g4, G4, 1)
PAIR_OF(pair_g8, G8, 1)
PAIR_OF(pair_g8m, G8M, 1)
PAIR_OF(two_q4, Q4, 0)
PAIR_OF(two_q8, Q8, 0)
PAIR_OF(two_q8m, Q8M, 0)
PAIR_OF(two_mx4, MX4, 0)
PAIR_OF(two_g4, G4, 0)
PAIR_OF(two_g8, G8, 0)
PAIR_OF(two_g8m, G8M, 0)
PAIR_OF(two_gs4, GS4, 0)
PAIR_OF(two_gt4, GT4, 0)
#define PAIR(pair, two, is_raised) pair, two, is_raised

/* Bytes stay bytes: only two panels' vectors come to take turns. */
static void copy_codes(const linear_job *j, const uint8_t *codes, uint8_t *to, long stride) {
    for (long at = 0; at < j->num_in / 4; at++) u8x32_store(to + at * stride, u8x32_load(codes + at * 32));
}
#else
#define copy_codes NULL
#define PAIR(pair, two, is_raised) NULL, NULL, 0
#endif

TM_INLINE void unpack_codes(const linear_job *j, int kind, const uint8_t *codes, uint8_t *to, long stride) {
    for (long g = 0; g < j->num_in / GROUP; g++, to += 8 * stride)
        for (int f = 0; f < 4; f++) {
            u8x32 low, high;
            split(kind, j->table, u8x32_load(codes + g * 128 + f * 32), &low, &high);
            u8x32_store(to + f * stride, low);
            u8x32_store(to + (f + 4) * stride, high);
        }
}

static void unpack_q4(const linear_job *j, const uint8_t *codes, uint8_t *to, long stride) { unpack_codes(j, Q4, codes, to, stride); }
static void unpack_mx4(const linear_job *j, const uint8_t *codes, uint8_t *to, long stride) { unpack_codes(j, MX4, codes, to, stride); }
static void unpack_gs4(const linear_job *j, const uint8_t *codes, uint8_t *to, long stride) { unpack_codes(j, GS4, codes, to, stride); }
static void unpack_gt4(const linear_job *j, const uint8_t *codes, uint8_t *to, long stride) { unpack_codes(j, GT4, codes, to, stride); }

const linear_kind linear_codes[] = {
    [Q8 - Q8] = {quantize_row, single_q8, panel_q8, wide_q8, copy_codes, 256, 16, 1, 0, 0, 1, WIDE_ROWS, PAIR(pair_q8, two_q8, 1)},
    [Q8M - Q8] = {quantize_row, single_q8m, panel_q8m, wide_q8m, copy_codes, 256, 32, 1, 0, 0, 1, WIDE_ROWS, PAIR(pair_q8m, two_q8m, 1)},
    [Q4 - Q8] = {quantize_row, single_q4, panel_q4, wide_q4, unpack_q4, 128, 32, 1, 0, 0, 1, WIDE_ROWS, PAIR(pair_q4, two_q4, 0)},
    [MX4 - Q8] = {quantize_row, single_mx4, panel_mx4, wide_q8, unpack_mx4, 128, 16, 1, 0, 0, 1, WIDE_ROWS, PAIR(pair_q8, two_mx4, 1)},
    [S4 - Q8] = {quantize_row, single_s4, panel_s4, wide_s4, unpack_s4, 128, 32, 0, 0, 0, 1, WIDE_ROWS + 1, NULL, NULL, 1},
    [G8 - Q8] = {quantize_row, single_g8, panel_g8, panel_g8, copy_codes, 256, 32, 0, 0, 0, 1, WIDE_ROWS, PAIR(pair_g8, two_g8, 1)},
    [G8M - Q8] = {quantize_row, single_g8m, panel_g8m, panel_g8m, copy_codes, 256, 64, 0, 0, 0, 1, WIDE_ROWS, PAIR(pair_g8m, two_g8m, 1)},
    [G4 - Q8] = {quantize_row, single_g4, panel_g4, wide_g4, unpack_q4, 128, 64, 0, 0, 0, 1, WIDE_ROWS, PAIR(pair_g4, two_g4, 0)},
    [GS4 - Q8] = {quantize_row, single_gs4, panel_gs4, panel_g8, unpack_gs4, 128, 32, 0, 0, 0, 1, WIDE_ROWS, PAIR(pair_g8, two_gs4, 1)},
    [GT4 - Q8] = {quantize_row, single_gt4, panel_gt4, panel_g8, unpack_gt4, 128, 32, 0, 1, 0, 1, WIDE_ROWS, PAIR(pair_g8, two_gt4, 1)},
};

/* ---- rows of a matrix as floats, as tables of embeddings give them: of the kinds to S4 */

static void take_group(int kind, const uint8_t *codes, const void *scales, long lane, float *out) {
    float d[LANES], m[LANES] = {0};
    f32x8_store(d, load_scale(scales, 0, kind == S4));
    if (has_offsets(kind)) f32x8_store(m, f32x8_load_f16((const uint16_t *)scales + LANES));
    for (int k = 0; k < GROUP; k++) {
        int f = k / 4, code;
        if (kind == S4) {
            uint8_t both = codes[f * 16 + lane % 4 * 4 + k % 4];
            code = lane < 4 ? (both & 15) - 8 : (int8_t)(both & 0xf0);
        } else if (is_packed(kind)) {
            uint8_t both = codes[f % 4 * 32 + lane * 4 + k % 4];
            code = f < 4 ? both & 15 : both >> 4;
            if (kind == MX4) code = MX4_CODES[code];
        } else {
            code = (int8_t)codes[f * 32 + lane * 4 + k % 4];
        }
        float value = (float)code * d[lane];
        out[k] = has_offsets(kind) ? value + m[lane] : value;
    }
}

/* -1: one is not there. */
TM_API int tm_take_rows(int kind, const uint8_t *codes, const char *scales, long num_out, const int64_t *rows, long num_rows, long num_in, float *out) {
    const linear_kind *how = linear_codes + (kind - Q8);
    long num_groups = num_in / GROUP;
    for (long i = 0; i < num_rows; i++) {
        if (rows[i] < 0 || rows[i] >= num_out) return -1;
        for (long g = 0; g < num_groups; g++) {
            long at = rows[i] / LANES * num_groups + g;
            take_group(kind, codes + at * how->code_bytes, scales + at * how->scale_bytes, rows[i] % LANES, out + i * num_in + g * GROUP);
        }
    }
    return 0;
}
