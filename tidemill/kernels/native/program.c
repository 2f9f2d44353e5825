/* A recorded forward pass: the ops of all layers in one call, so that a step costs no Python between them (program.py).

Activations live in one arena. A buffer is named by its first column: with T rows it lies at column * T, so a recording serves any T. */
#include <stddef.h>

#include "tidemill.h"

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
        LAYER(num_heads), LAYER(num_kv_heads), LAYER(head_dim), LAYER(num_rotated), LAYER(window),
        LAYER(is_bidirectional), LAYER(bias_stride), LAYER(bias), LAYER(cos), LAYER(sin),
        LAYER(scale), LAYER(softcap), STEP(num_tokens), STEP(page_size), STEP(page_stride),
        STEP(table_width), STEP(is_bf16), STEP(num_tiles), STEP(tile_token), STEP(tile_len), STEP(tile_start), STEP(tile_row),
        STEP(tile_end),
        STEP(table), STEP(positions), STEP(slots),
        OP(op), OP(in), OP(in_out), OP(out), OP(kind), OP(width), OP(num_out), OP(a), OP(b), OP(c), OP(d), OP(e), OP(f), OP(eps),
        {NULL, 0},
    };
    return fields;
}

/* ---- ops: one joins with a function and a line in the table; Python finds its number by its name */

static int run_linear(const tm_op *o, const tm_buffers *at) {
    return linear_op((int)o->kind, at->in, at->num_rows, o->width, o->a, o->b, o->c, o->num_out, at->out);
}

static int run_norm(const tm_op *o, const tm_buffers *at) {
    norm_op(at->in, at->in_out, o->a, o->eps, at->out, at->num_rows, o->width);
    return 0;
}

static int run_glu(const tm_op *o, const tm_buffers *at) {
    glu_op((int)o->kind, at->in, at->out, at->num_rows, o->num_out);
    return 0;
}

static int run_layer_norm(const tm_op *o, const tm_buffers *at) {
    layer_norm_op(at->in, at->in_out, o->a, o->b, o->eps, at->out, at->num_rows, o->width);
    return 0;
}

static int run_act(const tm_op *o, const tm_buffers *at) {
    act_op((int)o->kind, at->in, at->out, at->num_rows, o->num_out);
    return 0;
}

static int run_attention(const tm_op *o, const tm_buffers *at) {
    return attention_op(at->step, o->f, (tm_learned){o->c, o->d, o->e, o->eps}, at->in, (void *)o->a, (void *)o->b, at->out);
}

static const struct {
    const char *name;
    int (*run)(const tm_op *, const tm_buffers *);
} OPS[] = {
    {"linear", run_linear},
    {"norm", run_norm},
    {"glu", run_glu},
    {"attention", run_attention},
    {"layer_norm", run_layer_norm},
    {"act", run_act},
};

/* The name of op number `i`; NULL after the last. */
TM_API const char *tm_op_name(long i) { return i < (long)(sizeof OPS / sizeof *OPS) ? OPS[i].name : NULL; }

TM_API int tm_replay(const tm_op *ops, long num_ops, float *arena, long num_rows, const tm_step *step) {
    int failed = 0;
    tm_lock();
    for (const tm_op *o = ops; o < ops + num_ops && !failed; o++) {
        const tm_buffers at = {
            o->in < 0 ? NULL : arena + o->in * num_rows, o->in_out < 0 ? NULL : arena + o->in_out * num_rows,
            arena + o->out * num_rows, num_rows, step,
        };
        failed = OPS[o->op].run(o, &at);
    }
    tm_unlock();
    return failed;
}
