/* y += scale * up (down x), in place, with the low-rank pair of each row's adapter: a step may have any number of adapters.

The rows of a step come in tiles of one adapter each. Pairs are in panels of eight outputs, like weights in linear.c:
down [rank / 8][num_in][8], up [outs / 8][rank][8]. Every sum is one chain in the order of its inputs, so that the bits of a row do
not depend on the rest of its tile. A fused matrix has several parts, each with a pair and columns of its own. */
#include <stddef.h>

#include "simd.h"
#include "tidemill.h"

#define LANES 8
#define ROWS 4 /* of a tile, at most; kernels/lora.py makes them */

typedef struct {
    const tm_lora *lora;
    const float *x;
    float *y, *low; /* low: [place in the order][part][max_rank]: scale * down x */
    long num_out, blocks, chunks;
} lora_job;

enum { F32 = 0, F16 = 1, BF16 = 2 };

TM_INLINE f32x8 load_value(int kind, const void *values, long at) {
    if (kind == F32) return f32x8_load((const float *)values + at);
    if (kind == F16) return f32x8_load_f16((const uint16_t *)values + at);
    return f32x8_load_bf16((const uint16_t *)values + at);
}

/* out[panel][row]: `m` panels by `n` rows; all three constants where this is called. */
TM_INLINE void multiply(int kind, const void *panels, const float *const *rows, long num_in, int n, int m, f32x8 out[][ROWS]) {
    for (int p = 0; p < m; p++)
        for (int r = 0; r < n; r++) out[p][r] = f32x8_set(0);
    for (long k = 0; k < num_in; k++)
        for (int p = 0; p < m; p++) {
            f32x8 w = load_value(kind, panels, (p * num_in + k) * LANES);
            for (int r = 0; r < n; r++) out[p][r] = f32x8_fma1(out[p][r], w, rows[r][k]);
        }
}

#define BY_ROWS(kind, m)                                                                  \
    switch (n) {                                                                          \
    case 1: multiply(kind, panels, rows, num_in, 1, m, out); break;                       \
    case 2: multiply(kind, panels, rows, num_in, 2, m, out); break;                       \
    case 3: multiply(kind, panels, rows, num_in, 3, m, out); break;                       \
    default: multiply(kind, panels, rows, num_in, 4, m, out);                             \
    }
#define BY_PANELS(kind)        \
    if (m == 1) {              \
        BY_ROWS(kind, 1)       \
    } else {                   \
        BY_ROWS(kind, 2)       \
    }

/* One or two panels by up to four rows. */
static void panels_by_rows(int kind, const void *panels, const float *const *rows, long num_in, int n, int m, f32x8 out[][ROWS]) {
    if (kind == F32) {
        BY_PANELS(F32)
    } else if (kind == F16) {
        BY_PANELS(F16)
    } else {
        BY_PANELS(BF16)
    }
}

static const void *at_panel(int kind, const void *panels, long panel, long num_in) {
    return (const char *)panels + panel * num_in * LANES * (kind == F32 ? 4 : 2);
}

/* Two panels of a part's ranks for a tile. */
static void shrink(void *arg, long index, int thread) {
    (void)thread;
    const lora_job *j = arg;
    const tm_lora *l = j->lora;
    long panel = index % j->blocks * 2, part = index / j->blocks % l->num_parts;
    const tm_lora_tile *tile = l->step->tiles + index / j->blocks / l->num_parts;
    const tm_lora_pair *pair = l->pairs + tile->slot * l->num_parts + part;
    long num_panels = (pair->rank + LANES - 1) / LANES;
    if (panel >= num_panels) return;
    int n = (int)tile->count, m = num_panels - panel > 1 ? 2 : 1;
    const float *rows[ROWS] = {NULL};
    f32x8 out[2][ROWS];
    for (int r = 0; r < n; r++) rows[r] = j->x + l->step->order[tile->first + r] * l->num_in;
    panels_by_rows((int)pair->kind, at_panel((int)pair->kind, pair->down, panel, l->num_in), rows, l->num_in, n, m, out);
    for (int r = 0; r < n; r++)
        for (int p = 0; p < m; p++)
            f32x8_store(j->low + ((tile->first + r) * l->num_parts + part) * l->max_rank + (panel + p) * LANES, f32x8_mul1(out[p][r], pair->scale));
}

static void add_to(float *y, f32x8 value, long num) {
    if (num >= LANES) {
        f32x8_store(y, f32x8_add(f32x8_load(y), value));
        return;
    }
    float lanes[LANES];
    f32x8_store(lanes, value);
    for (long i = 0; i < num; i++) y[i] += lanes[i];
}

/* A stretch of a part's columns for a tile. */
static void expand(void *arg, long index, int thread) {
    (void)thread;
    const lora_job *j = arg;
    const tm_lora *l = j->lora;
    long chunk = index % j->chunks, part = index / j->chunks % l->num_parts;
    const tm_lora_tile *tile = l->step->tiles + index / j->chunks / l->num_parts;
    const tm_lora_pair *pair = l->pairs + tile->slot * l->num_parts + part;
    if (!pair->rank) return;
    long size = l->sizes[part], num_panels = (size + LANES - 1) / LANES, each = (num_panels + j->chunks - 1) / j->chunks;
    long end = (chunk + 1) * each < num_panels ? (chunk + 1) * each : num_panels;
    int n = (int)tile->count;
    const float *rows[ROWS] = {NULL};
    for (int r = 0; r < n; r++) rows[r] = j->low + ((tile->first + r) * l->num_parts + part) * l->max_rank;
    for (long panel = chunk * each; panel < end; panel += 2) {
        int m = end - panel > 1 ? 2 : 1;
        f32x8 out[2][ROWS];
        panels_by_rows((int)pair->kind, at_panel((int)pair->kind, pair->up, panel, pair->rank), rows, pair->rank, n, m, out);
        for (int r = 0; r < n; r++) {
            float *y = j->y + l->step->order[tile->first + r] * j->num_out + l->columns[part];
            for (int p = 0; p < m; p++) add_to(y + (panel + p) * LANES, out[p][r], size - (panel + p) * LANES);
        }
    }
}

int lora_op(const tm_lora *lora, const float *x, float *y, long num_out) {
    const tm_lora_step *step = lora->step;
    if (!step->num_tiles) return 0;
    lora_job j = {lora, x, y, NULL, num_out, (lora->max_rank + 2 * LANES - 1) / (2 * LANES), 1};
    j.low = tm_scratch(0, 0, step->num_tokens * lora->num_parts * lora->max_rank * (long)sizeof(float));
    if (!j.low) return -1;
    while (j.chunks < 64 && step->num_tiles * lora->num_parts * j.chunks < 4L * tm_num_threads()) j.chunks *= 2;
    tm_parallel(step->num_tiles * lora->num_parts * j.blocks, 1, shrink, &j);
    tm_parallel(step->num_tiles * lora->num_parts * j.chunks, 1, expand, &j);
    return 0;
}

TM_API int tm_lora_add(const tm_lora *lora, const float *x, float *y, long num_out) {
    tm_lock();
    int failed = lora_op(lora, x, y, num_out);
    tm_unlock();
    return failed;
}
