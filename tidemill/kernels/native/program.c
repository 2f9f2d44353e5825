/* A recorded forward pass: the ops of all layers in one call, so that a step costs no Python between them (program.py).

Activations live in one arena. A buffer is named by its first column: with T rows it lies at column * T, so a recording serves any T. */
#include <stddef.h>

#include "tidemill.h"

enum { LINEAR = 0, NORM = 1, GLU = 2, ATTENTION = 3 };

typedef struct {
    long op;
    long in, in_out, out;       /* columns; -1: none */
    long kind, width, num_out;  /* width: columns of the input */
    const void *a, *b, *c, *d, *e, *f; /* codes, scales, bias; weight; keys, values, q_norm, k_norm, sinks, layer */
    float eps;
} tm_op;

/* Python checks both before it calls anything else: a library built from other sources is not used. */

#ifndef TM_SOURCES
#define TM_SOURCES "" /* setup.py passes the hash of all sources */
#endif
TM_API const char *tm_sources(void) { return TM_SOURCES; }

typedef struct {
    const char *name;
    long offset;
} field;

#define STEP(f) {"tm_step." #f, offsetof(tm_step, f)}
#define LAYER(f) {"tm_layer." #f, offsetof(tm_layer, f)}
#define OP(f) {"tm_op." #f, offsetof(tm_op, f)}
/* Offsets of the fields that Python writes; a struct's own name stands for its size. */
TM_API const field *tm_layout(void) {
    static const field fields[] = {
        {"tm_step", sizeof(tm_step)}, {"tm_layer", sizeof(tm_layer)}, {"tm_op", sizeof(tm_op)},
        LAYER(num_heads), LAYER(num_kv_heads), LAYER(head_dim), LAYER(num_rotated), LAYER(window), LAYER(cos), LAYER(sin),
        LAYER(scale), LAYER(softcap), STEP(num_tokens), STEP(page_size), STEP(page_stride),
        STEP(table_width), STEP(is_bf16), STEP(num_tiles), STEP(tile_token), STEP(tile_len), STEP(tile_start), STEP(tile_row),
        STEP(table), STEP(positions), STEP(slots),
        OP(op), OP(in), OP(in_out), OP(out), OP(kind), OP(width), OP(num_out), OP(a), OP(b), OP(c), OP(d), OP(e), OP(f), OP(eps),
        {NULL, 0},
    };
    return fields;
}

TM_API int tm_replay(const tm_op *ops, long num_ops, float *arena, long num_rows, const tm_step *step) {
    int failed = 0;
    tm_lock();
    for (const tm_op *o = ops; o < ops + num_ops && !failed; o++) {
        float *in = o->in < 0 ? NULL : arena + o->in * num_rows, *out = arena + o->out * num_rows;
        switch (o->op) {
        case LINEAR: failed = linear_op((int)o->kind, in, num_rows, o->width, o->a, o->b, o->c, o->num_out, out); break;
        case NORM: norm_op(in, arena + o->in_out * num_rows, o->a, o->eps, out, num_rows, o->width); break;
        case GLU: glu_op((int)o->kind, in, out, num_rows, o->num_out); break;
        default: failed = attention_op(step, o->f, (tm_learned){o->c, o->d, o->e, o->eps}, in, (void *)o->a, (void *)o->b, out);
        }
    }
    tm_unlock();
    return failed;
}
