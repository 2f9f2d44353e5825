/* A matmul under way: what the tasks of linear.c read. linear_op makes one, moe.c several at once. */
#ifndef TM_LINEAR_H
#define TM_LINEAR_H

#include <stdint.h>

#include "simd.h"
#include "tidemill.h"

/* The low byte of a kind. Above it, for the kinds from G8 on: values that share a scale / 32 (20 bits; 0: a whole row), and whether the
   input's columns have an order of their own, and whether single values come on top. */
enum { F32 = 0, F16, BF16, Q8, Q8M, Q4, MX4, S4, G8, G8M, G4, GS4, GT4, W8, T2 };
#define KIND(kind) ((kind) & 255)
#define KIND_GROUP(kind) (((kind) >> 8) & 0xfffff)
#define ORDERED (1 << 28)
#define SPARSE (1 << 29) /* single values are added to the matrix */
#define GROUP 32
#define LANES 8
#define ROWS 4        /* of a tile of quantized kinds */
#define WIDE_ROWS 16  /* from so many rows on, a panel is unpacked once instead of once a tile */
#define PAIR_WIDE_ROWS 64 /* the same, of two panels by vectors of 512 bits, where a tile has twice as many rows and unpacks twice as fast */

typedef struct { int32_t place; float value; } sparse_value; /* of a panel: column * 8 + row */
typedef struct linear_kind linear_kind;
typedef struct {
    int kind;
    const float *x;
    const void *codes;
    const uint16_t *scales;
    const float *bias;
    float *out;
    long num_rows, num_in, num_out, num_panels, panels_per_task;
    int8_t *xq;      /* [row][k] */
    float *xd, *xs;  /* [row][k / 32]: scale; scale * sum of codes. Kinds with a scale a row: [row]; [row][group]: sum of codes */
    halves_start *starts; /* [row][k / 32]: where sums start, of kinds with has_starts */
    float *quads;         /* [row / 4][1 + k / 32][QUAD]: what linear_neon.h reads of four rows; NULL: it is not used */
    /* set by linear_start */
    const linear_kind *how;
    long group;           /* groups of 32 that share a scale */
    const int32_t *order; /* of the input's columns; NULL: as they are */
    const int8_t *table;  /* what 4-bit numbers mean */
    float static_scale;   /* of activations; 0: each row has its own */
    float threshold;      /* activations of this size and more are no bytes: they are multiplied as they are; 0: all are bytes */
    int32_t *outliers;    /* [row][num_in + 1]: how many, then their columns */
    const int32_t *sparse_first; /* [panels + 1]: where the values of each panel begin; NULL: there are none */
    const sparse_value *sparse;
} linear_job;

/* One panel by all rows of a job; of `wide` ones, codes are bytes and scales floats. */
typedef void (*panel_function)(const linear_job *job, long panel, const uint8_t *codes, const void *scales);

struct linear_kind {
    tm_task quantize;       /* a row of activations to bytes; NULL: they stay floats */
    panel_function single;  /* of one row */
    panel_function packed;  /* of any number of rows, as the codes are */
    panel_function wide;    /* of unpacked codes: with many rows, a panel is unpacked once instead of once a tile */
    void (*unpack)(const linear_job *job, const uint8_t *codes, uint8_t *to, long stride); /* stride: from a vector of 32 codes to the next. NULL: codes are bytes */
    int code_bytes;         /* of 32 columns of a panel */
    int scale_bytes;        /* of a group of a panel */
    int has_half_scales;    /* float16, which `wide` takes as floats */
    int has_table, is_token; /* a table before the scales; one scale of activations for a whole row */
    int span;               /* panels whose codes share bytes, which a function computes together; the last of them may be missing */
    int wide_rows;          /* from so many on, unpacked */
    panel_function pair;    /* as wide, of two panels whose vectors of codes and of scales take turns; NULL: there is none */
    panel_function two;     /* as packed, of two panels; where there is a pair */
    int has_starts;         /* where the sums of a row's groups start is told by `starts` */
};

extern const linear_kind linear_codes[], linear_tokens[]; /* Q8 .. GT4; W8 .. T2 */
static inline int has_starts(int kind) { return KIND(kind) >= Q8 && KIND(kind) < W8 && linear_codes[KIND(kind) - Q8].has_starts; }

#if defined(HAS_QUADS)
#define QUAD 24 /* floats for a group of four rows: xd, xs, and of each -1.5 * 2^23 times xd, four times. Before the first group: zeros */
static inline float *quad_of(const linear_job *j, long row) { return j->quads + (row / 4 * (j->num_in / GROUP + 1) + 1) * QUAD; }
#endif

/* Reads what lies before the scales. */
void linear_start(linear_job *job);

/* Tasks (tm_task) of a job: a row of x to bytes, for the kinds that multiply bytes; then some panels of the output. */
void quantize_row(void *job, long row, int thread);
void run_panels(void *job, long task, int thread);

/* To `n` rows of outputs, the products of a panel's single values, in their order. */
void add_sparse(const linear_job *job, long panel, long row, int n, f32x8 *values);

/* To `n` rows of outputs of W8, the products of the activations that are no bytes, in the order of their columns. */
void add_outliers(const linear_job *job, long panel, long row, int n, f32x8 *values);

static inline void store_tile(const linear_job *j, long panel, long row, int n, f32x8 *values) {
    if (j->sparse_first) add_sparse(j, panel, row, n, values);
    if (j->outliers) add_outliers(j, panel, row, n, values);
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

/* A function of one panel and all rows, from one of tiles of `count` rows: tile(job, ..., row, count, values). */
#define TILE(count, tile, ...) \
    case count: tile(j, __VA_ARGS__, row, count, values); store_tile(j, panel, row, count, values); break;
#define PANEL_OF(name, tile, kind, wide)                                                              \
    static void name(const linear_job *j, long panel, const uint8_t *codes, const void *scales) {     \
        for (long row = 0; row < j->num_rows; row += ROWS) {                                          \
            f32x8 values[ROWS];                                                                       \
            long left = j->num_rows - row;                                                            \
            switch (left < ROWS ? left : ROWS) {                                                      \
                TILE(1, tile, kind, wide, codes, scales) TILE(2, tile, kind, wide, codes, scales)     \
                TILE(3, tile, kind, wide, codes, scales) TILE(4, tile, kind, wide, codes, scales)     \
            }                                                                                         \
        }                                                                                             \
    }
#define SINGLE_OF(name, single, kind)                                                                 \
    static __attribute__((noinline)) void name(const linear_job *j, long panel, const uint8_t *codes, const void *scales) { \
        f32x8 value;                                                                                  \
        single(j, kind, codes, scales, &value);                                                       \
        store_tile(j, panel, 0, 1, &value);                                                           \
    }

#endif
