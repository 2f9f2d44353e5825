/* A recorded forward pass: the ops of all layers in one call, so that a step costs no Python between them (program.py).

Activations live in one arena. A buffer is named by its first column: with T rows it lies at column * T, so a recording serves any T. */
#include <stddef.h>

#include "tidemill.h"

enum { LINEAR = 0, NORM = 1, SWIGLU = 2, ATTENTION = 3 };

typedef struct {
    long op;
    long in, in_out, out;       /* columns; -1: none */
    long kind, width, num_out;  /* width: columns of the input */
    const void *a, *b, *c, *d;  /* codes, scales, bias; weight; keys, values, weights of q's and k's norms */
    float eps;
} tm_op;

/* Python compares this with its own view before it calls anything: a library left over from older sources is not used. */
TM_API int tm_abi(void) { return (int)(sizeof(tm_step) << 16 | sizeof(tm_op) << 8 | 2); }

TM_API int tm_replay(const tm_op *ops, long num_ops, float *arena, long num_rows, const tm_step *step) {
    int failed = 0;
    tm_lock();
    for (const tm_op *o = ops; o < ops + num_ops && !failed; o++) {
        float *in = o->in < 0 ? NULL : arena + o->in * num_rows, *out = arena + o->out * num_rows;
        switch (o->op) {
        case LINEAR: failed = linear_op((int)o->kind, in, num_rows, o->width, o->a, o->b, o->c, o->num_out, out); break;
        case NORM: norm_op(in, arena + o->in_out * num_rows, o->a, o->eps, out, num_rows, o->width); break;
        case SWIGLU: swiglu_op(in, out, num_rows, o->num_out); break;
        default: failed = attention_op(step, in, (void *)o->a, (void *)o->b, o->c, o->d, o->eps, out);
        }
    }
    tm_unlock();
    return failed;
}
