/* y = x W^T + b with W in panels of eight output features.

A panel holds, for every group of input features, eight rows side by side, so that eight outputs are the lanes of one vector:

  F32, F16, BF16   [panel][k][8]                       one value each
  Q8, Q8M          [panel][k / 32][8 fours][8][4]      signed codes
  Q4               [panel][k / 32][4 fours][8][4]      codes 0 .. 15; a byte's high half is four f + 4's code
  MX4              the same                            numbers of E2M1 values, which MX4_CODES has twice as large
  S4               [panel][k / 32][8 fours][4][4]      codes -8 .. 7: rows 0 .. 3 in the lower halves, 8 more; rows 4 .. 7 in the upper halves
  G8, G8M, G4      as Q8, Q8M, Q4
  GS4              as Q4                               codes -8 .. 7, which are multiplied sixteen times as large
  GT4              as Q4                               numbers of a table of 16 signed bytes
  W8               as Q8
  T2               [panel / 4][k / 4][8][4]            codes 0 .. 2, one more than their values; in a byte one of each of four panels, the
                                                       first in the lowest bits, and the top bit flipped

and for the kinds to S4 scales [panel][k / 32][8] (Q8, MX4) or [panel][k / 32][2][8] (scale and offset) in float16: w = scale * code + offset;
S4's are float32, those of the upper halves a sixteenth: the conversion of a float16 takes as long as four products.
The G kinds and T2 have float32 scales for groups of any multiple of 32, [panel][group][8] or [panel][group][2][8], W8 for rows, [panel][8].
Before them lie GT4's table (16 bytes), the scale of activations of W8 and T2 (a float, 0: each row its own), the size from which on they are
no bytes (a float, 0: all are; of W8) and 24 bytes of nothing,
the order of columns (int32 [k]) of matrices that have one, and single values that are added to a matrix: where those of each panel begin
(int32 [panels + 1]), then their places and values.
Activations are signed bytes with one scale for 32 of them; for W8 and T2, with one a row.

An output is summed over k in order, by one chain of operations that is the same for any number of rows and any tile: the bits of a
row do not depend on the rest of the batch. Integer sums within a group of 32 are exact. */
#include <stddef.h>

#include "linear.h"
#include "tiles.h"

#define FLOAT_ROWS 8  /* of a tile of float kinds */

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

static const struct {
    void (*panel)(const linear_job *j, long panel, const void *codes), (*by_4)(const linear_job *j, long panel, const void *codes);
    int value_bytes;
} FLOATS[] = {[F32] = {panel_f32, panel_f32_by_4, 4}, [F16] = {panel_f16, panel_f16_by_4, 2}, [BF16] = {panel_bf16, panel_bf16_by_4, 2}};

static void float_panels(const linear_job *j, long panel, long end) {
    long stride = j->num_in * LANES * FLOATS[j->kind].value_bytes;
    const char *codes = (const char *)j->codes + panel * stride;
    while (panel < end) {
        int by_4 = j->num_rows <= 2 && panel + 4 <= end;
        (by_4 ? FLOATS[j->kind].by_4 : FLOATS[j->kind].panel)(j, panel, codes);
        panel += by_4 ? 4 : 1;
        codes += stride * (by_4 ? 4 : 1);
    }
}

void linear_start(linear_job *j) {
    int kind = KIND(j->kind);
    if (kind < Q8) return;
    j->how = kind < W8 ? linear_codes + (kind - Q8) : linear_tokens + (kind - W8);
    j->group = kind < G8 ? 1 : KIND_GROUP(j->kind) ? KIND_GROUP(j->kind) : j->num_in / GROUP;
    const char *head = (const char *)j->scales;
    if (j->how->has_table) j->table = (const int8_t *)head, head += 16;
    if (j->how->is_token) j->static_scale = ((const float *)head)[0], j->threshold = ((const float *)head)[1], head += 32;
    if (j->kind & ORDERED) j->order = (const int32_t *)head, head += j->num_in * (long)sizeof(int32_t);
    if (j->kind & SPARSE) {
        j->sparse_first = (const int32_t *)head, head += (j->num_panels + 1) * (long)sizeof(int32_t);
        j->sparse = (const sparse_value *)head, head += j->sparse_first[j->num_panels] * (long)sizeof(sparse_value);
    }
    j->scales = (const uint16_t *)head;
}

void add_sparse(const linear_job *j, long panel, long row, int n, f32x8 *values) {
    for (int r = 0; r < n; r++) {
        const float *x = j->x + (row + r) * j->num_in;
        float lanes[LANES];
        f32x8_store(lanes, values[r]);
        for (long i = j->sparse_first[panel]; i < j->sparse_first[panel + 1]; i++) {
            float product = j->sparse[i].value * x[j->sparse[i].place / LANES];
            lanes[j->sparse[i].place % LANES] += product;
        }
        values[r] = f32x8_load(lanes);
    }
}

/* A job's rows from `row` on, at most so many; a multiple of 4. Of the kinds with a scale for 32 activations. */
static linear_job some_rows(const linear_job *j, long row, long num) {
    linear_job part = *j;
    long num_groups = j->num_in / GROUP;
    part.num_rows = j->num_rows - row < num ? j->num_rows - row : num;
    part.x += row * j->num_in, part.out += row * j->num_out, part.xq += row * j->num_in;
    part.xd += row * num_groups, part.xs += row * num_groups;
    if (j->starts) part.starts += row * num_groups;
#if defined(HAS_QUADS)
    if (j->quads) part.quads += row / 4 * (num_groups + 1) * QUAD;
#endif
    return part;
}

#define PANELS_AT_ONCE 8           /* that are unpacked before rows are multiplied by them */
#define PANEL_BYTES (512 * 1024)   /* of unpacked codes: they stay in the L2 cache */
#define ROW_BYTES (128 * 1024)     /* of the activations that all of these panels take before the next: they stay there, too */

/* Room for unpacked codes and scales of so many panels. */
typedef struct {
    long num_panels, code_bytes, num_scales;
    float *scales;
    uint8_t *codes;
} wide_room;

static wide_room make_room(const linear_job *j, long num_panels, int thread) {
    const linear_kind *how = j->how;
    long fours = j->num_in / GROUP, num_groups = (fours + j->group - 1) / j->group;
    wide_room room = {.num_panels = how->span, .code_bytes = fours * 256, .num_scales = how->has_half_scales ? num_groups * how->scale_bytes / 2 : 0};
    long least = how->pair && !has_tiles ? PAIR_WIDE_ROWS : how->wide_rows;
    if (j->num_rows < least || (!how->unpack && !room.num_scales)) return room;
    if (how->pair) {
        room.num_panels = 2;
    } else if (how->span == 1 && !how->is_token) {
        room.num_panels = PANEL_BYTES / room.code_bytes < PANELS_AT_ONCE ? PANEL_BYTES / room.code_bytes : PANELS_AT_ONCE;
        if (room.num_panels < 1) room.num_panels = 1;
    }
    if (num_panels < room.num_panels && how->span == 1) room.num_panels = num_panels;
    room.scales = tm_scratch(thread, 1, room.num_panels * (room.code_bytes + room.num_scales * (long)sizeof(float)));
    room.codes = (uint8_t *)(room.scales + room.num_panels * room.num_scales);
    return room;
}

/* Panels whose codes are unpacked once for all rows. */
static void wide_panels(const linear_job *j, const wide_room *room, long panel, long num, const uint8_t *codes, const char *scales) {
    const linear_kind *how = j->how;
    long packed_bytes = j->num_in / GROUP * how->code_bytes, scale_bytes = room->num_scales * 2;
    int is_pair = how->pair && num == 2;
    long parts = is_pair ? 2 : 1; /* whose vectors take turns */
    for (long p = 0; p < num; p += how->span) {
        const uint16_t *halves = (const uint16_t *)(scales + p * scale_bytes);
        float *to = room->scales + p * (is_pair ? LANES : room->num_scales);
        for (long i = 0; i < room->num_scales; i += LANES) f32x8_store(to + i * parts, f32x8_load_f16(halves + i));
        if (how->unpack) how->unpack(j, codes + p * packed_bytes, room->codes + p * (is_pair ? 32 : room->code_bytes), 32 * parts);
    }
    if (how->unpack) codes = room->codes, packed_bytes = room->code_bytes;
    if (num == how->span || is_pair) {
        (is_pair ? how->pair : how->wide)(j, panel, codes, room->num_scales ? (const void *)room->scales : scales);
        return;
    }
    long group_bytes = room->num_scales ? room->num_scales * (long)sizeof(float) : (j->num_in / GROUP + j->group - 1) / j->group * how->scale_bytes;
    if (room->num_scales) scales = (const char *)room->scales;
    long most = ROW_BYTES / j->num_in < WIDE_ROWS ? WIDE_ROWS : ROW_BYTES / j->num_in / 4 * 4;
    for (long row = 0; row < j->num_rows; row += most) {
        linear_job part = some_rows(j, row, most);
        for (long p = 0; p < num; p++) how->wide(&part, panel + p, codes + p * packed_bytes, scales + p * group_bytes);
    }
}

void run_panels(void *arg, long task, int thread) {
    const linear_job *j = arg;
    const linear_kind *how = j->how;
    long panel = task * j->panels_per_task;
    long end = panel + j->panels_per_task < j->num_panels ? panel + j->panels_per_task : j->num_panels;
    if (!how) {
        float_panels(j, panel, end);
        return;
    }
    long fours = j->num_in / GROUP, num_groups = (fours + j->group - 1) / j->group;
    wide_room room = make_room(j, end - panel, thread); /* without memory for it, the packed codes give the same result */
    for (long num; panel < end; panel += num) {
        const uint8_t *codes = (const uint8_t *)j->codes + panel * fours * how->code_bytes;
        const char *scales = (const char *)j->scales + panel * num_groups * how->scale_bytes;
        num = how->span;
        if (j->num_rows == 1) {
            how->single(j, panel, codes, scales);
        } else if (!room.scales) {
            if (how->two && end - panel >= 2) num = 2;
            (num == 2 && how->two ? how->two : how->packed)(j, panel, codes, scales);
        } else {
            if (num == 1) num = end - panel < room.num_panels ? end - panel : room.num_panels;
            wide_panels(j, &room, panel, num, codes, scales);
        }
    }
}

int linear_op(int kind, const float *x, long num_rows, long num_in, const void *codes, const uint16_t *scales, const float *bias,
              long num_out, float *out) {
    linear_job j = {.kind = kind, .x = x, .codes = codes, .scales = scales, .bias = bias, .out = out, .num_rows = num_rows, .num_in = num_in,
                    .num_out = num_out, .num_panels = (num_out + LANES - 1) / LANES};
    if (num_rows == 0) return 0;
    linear_start(&j);
    if (j.how) {
        long num_groups = num_in / GROUP;
        long listed = j.threshold > 0 ? num_in + 1 : 0; /* of a row: numbers of columns */
        long starts = has_starts(kind) ? num_groups * (long)sizeof(halves_start) : 0;
        long quads = 0;
#if defined(HAS_QUADS)
        if (KIND(kind) < G8 && num_rows >= j.how->wide_rows) quads = (num_rows + 3) / 4 * (num_groups + 1) * QUAD * (long)sizeof(float);
#endif
        j.xq = tm_scratch(0, 0, num_rows * (num_in + starts + (2 * num_groups + listed) * (long)sizeof(float)) + quads);
        if (!j.xq) return -1;
        if (quads) j.quads = (float *)(j.xq + num_rows * (num_in + starts + (2 * num_groups + listed) * (long)sizeof(float)));
        if (starts) j.starts = (halves_start *)(j.xq + num_rows * num_in);
        j.xd = (float *)(j.xq + num_rows * (num_in + starts));
        j.xs = j.xd + num_rows * num_groups;
        if (listed) {
            for (int t = 0; t < tm_num_threads(); t++)
                if (!tm_scratch(t, 1, num_in * (long)sizeof(float))) return -1;
            j.outliers = (int32_t *)(j.xs + num_rows * num_groups);
        }
        tm_parallel(num_rows, num_rows < 4 ? num_rows : 1, j.how->quantize, &j);
    }
    long per_thread = (j.num_panels + tm_num_threads() - 1) / tm_num_threads();
    long span = !j.how ? 1 : j.how->pair ? 2 : j.how->span;
    j.panels_per_task = ((per_thread > 8 ? per_thread / 8 : 1) + span - 1) / span * span;
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
