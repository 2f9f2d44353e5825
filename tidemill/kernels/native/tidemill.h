/* What the files of this library share: the thread pool, the ops, and the step of a paged attention. Python's side is __init__.py. */
#ifndef TM_TIDEMILL_H
#define TM_TIDEMILL_H

#include <stdint.h>

#define TM_API __attribute__((visibility("default")))

/* ---- pool.c */

typedef void (*tm_task)(void *arg, long index, int thread);

/* Runs task(arg, 0 .. count-1), `chunk` indices at a time, on all threads; a chunk goes to whichever thread is free, so a thread
   that the system takes away holds up one chunk, not a share of the work. */
void tm_parallel(long count, long chunk, tm_task task, void *arg);
int tm_num_threads(void);

/* Memory of a thread, kept between calls; grows as asked. Slots are independent buffers. NULL when there is no memory. */
void *tm_scratch(int thread, int slot, long num_bytes);

/* The pool serves one call at a time; every exported function holds it while it runs. */
void tm_lock(void);
void tm_unlock(void);

/* ---- ops; those that return an int return 0, or -1 when there is no memory */

/* What a layer's attention computes. Field by field as in __init__.py, like tm_step. */
typedef struct {
    long num_heads, num_kv_heads, head_dim;
    long num_rotated;       /* dimensions of a head, from the first on */
    long window;            /* a query sees so many keys, its own the last; 0: all before it */
    long is_bidirectional;  /* a query sees all keys up to the end of its sequence in this step */
    long bias_stride;       /* from a head's numbers to the next's; that of distance 0 is number bias_stride / 2 */
    const float *bias;      /* added to scores, by the key's position less the query's; NULL: none */
    const float *cos, *sin; /* [position][num_rotated / 2] */
    float scale, softcap;   /* softcap: 0: none */
} tm_layer;

/* One step of all layers. */
typedef struct {
    long num_tokens;
    long page_size, page_stride, table_width; /* stride: values from a page to the next; width: pages a row of the table can name */
    long is_bf16;                           /* the cache holds bfloat16 */
    long num_tiles;
    const int64_t *tile_token, *tile_len, *tile_start, *tile_row; /* first token in the step, tokens, position, row of the table */
    const int64_t *tile_end; /* position after the last token that the step has of the tile's sequence */
    const int32_t *table;
    const int64_t *positions, *slots; /* of tokens; slot: page * page_size + offset */
} tm_step;

/* What a layer's attention has learned besides its projections; NULL: nothing of the kind. */
typedef struct {
    const float *q_norm, *k_norm; /* [head_dim], of each head before rotation */
    const float *sinks;           /* [num_heads]: a score that joins the softmax, without a value */
    float eps;
} tm_learned;

/* ---- a recorded op (program.c). A buffer is named by its first column in the arena. */

typedef struct {
    long op;                    /* its number in the table of ops */
    long in, in_out, out;       /* columns; -1: none */
    long kind, width, num_out;  /* width: columns of the input */
    const void *a, *b, *c, *d, *e, *f; /* what else the op reads: weights, its layer's cache, its layer */
    float eps;
} tm_op;

/* Where a replay with `num_rows` rows has an op's buffers; NULL: none. */
typedef struct {
    float *in, *in_out, *out;
    long num_rows;
    const tm_step *step;
} tm_buffers;

int linear_op(int kind, const float *x, long num_rows, long num_in, const void *codes, const uint16_t *scales, const float *bias,
              long num_out, float *out);
/* qkv is normed and rotated in place. */
int attention_op(const tm_step *step, const tm_layer *layer, tm_learned learned, float *qkv, void *keys, void *values, float *out);
void norm_op(const float *x, float *residual, const float *weight, float eps, float *out, long num_rows, long width);
void layer_norm_op(const float *x, float *residual, const float *weight, const float *bias, float eps, float *out, long num_rows,
                   long width);
void act_op(int kind, const float *x, float *out, long num_rows, long width);
void glu_op(int act, const float *gate_up, float *out, long num_rows, long width);

#endif
