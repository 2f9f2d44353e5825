/* Activations and gates (kernels/glu.py and kernels/gate.py have the references). */
#include <math.h>

#include "rows.h"

/* ---- act(gate) * up of [gate | up]; glu.py has the activations */

typedef struct {
    const float *gate_up;
    float *out;
    long width;
    int act;
} glu_job;

/* By the approximation of erf in glu.py. */
TM_INLINE f32x8 gelu(f32x8 x) {
    f32x8 one = f32x8_set(1), size = f32x8_mul1(f32x8_abs(x), 0.70710678118f);
    f32x8 t = f32x8_div(one, f32x8_fma1(one, size, 0.3275911f));
    f32x8 tail = f32x8_fma1(f32x8_set(-1.453152027f), t, 1.061405429f);
    tail = f32x8_fma(f32x8_set(1.421413741f), tail, t);
    tail = f32x8_fma(f32x8_set(-0.284496736f), tail, t);
    tail = f32x8_mul(f32x8_fma(f32x8_set(0.254829592f), tail, t), t);
    tail = f32x8_mul(tail, f32x8_exp(f32x8_sub(f32x8_set(0), f32x8_mul(size, size))));
    return f32x8_sub(f32x8_max(x, f32x8_set(0)), f32x8_mul(tail, f32x8_mul1(size, 0.70710678118f)));
}

/* silu and gelu_tanh: x / (1 + exp(-z)) */
TM_INLINE f32x8 activated(int act, f32x8 x) {
    f32x8 one = f32x8_set(1), z = x;
    if (act == 3) return gelu(x);
    if (act == 4) return f32x8_max(x, f32x8_set(0));
    if (act == 5) {
        f32x8 positive = f32x8_max(x, f32x8_set(0));
        return f32x8_mul(positive, positive);
    }
    if (act == 2) { /* the clamped value last: on x86, too, a NaN stays one */
        x = f32x8_min(f32x8_set(7), x);
        z = f32x8_mul1(x, 1.702f);
    } else if (act) z = f32x8_mul(x, f32x8_fma(f32x8_set(1.5957691216f), f32x8_mul(x, x), f32x8_set(0.0713548162726f)));
    return f32x8_div(x, f32x8_add(one, f32x8_exp(f32x8_sub(f32x8_set(0), z))));
}

TM_INLINE f32x8 glu(int act, f32x8 x, f32x8 up) {
    if (act == 2) up = f32x8_add(f32x8_max(f32x8_set(-7), f32x8_min(f32x8_set(7), up)), f32x8_set(1));
    return f32x8_mul(activated(act, x), up);
}

void glu_values(int act, const float *gate_up, float *out, long width) {
    const float *gate = gate_up, *up = gate + width;
    long i = 0;
    for (; i + 8 <= width; i += 8) f32x8_store(out + i, glu(act, f32x8_load(gate + i), f32x8_load(up + i)));
    if (i < width) { /* the tail by the same operations */
        float g[8] = {0}, u[8] = {0}, o[8];
        for (long k = i; k < width; k++) g[k - i] = gate[k], u[k - i] = up[k];
        f32x8_store(o, glu(act, f32x8_load(g), f32x8_load(u)));
        for (long k = i; k < width; k++) out[k] = o[k - i];
    }
}

static void glu_row(void *arg, long row, int thread) {
    (void)thread;
    const glu_job *j = arg;
    glu_values(j->act, j->gate_up + row * 2 * j->width, j->out + row * j->width, j->width);
}

void glu_op(int act, const float *gate_up, float *out, long num_rows, long width) {
    glu_job j = {gate_up, out, width, act};
    for_rows(num_rows, width, glu_row, &j);
}

TM_API void tm_glu(int act, const float *gate_up, float *out, long num_rows, long width) {
    tm_lock();
    glu_op(act, gate_up, out, num_rows, width);
    tm_unlock();
}

/* ---- act(x) */

typedef struct {
    const float *x;
    float *out;
    long width;
    int act;
} act_job;

static void act_row(void *arg, long row, int thread) {
    (void)thread;
    const act_job *j = arg;
    const float *x = j->x + row * j->width;
    float *out = j->out + row * j->width;
    long i = 0;
    for (; i + 8 <= j->width; i += 8) f32x8_store(out + i, activated(j->act, f32x8_load(x + i)));
    if (i < j->width) {
        float v[8] = {0};
        for (long k = i; k < j->width; k++) v[k - i] = x[k];
        f32x8_store(v, activated(j->act, f32x8_load(v)));
        for (long k = i; k < j->width; k++) out[k] = v[k - i];
    }
}

void act_op(int act, const float *x, float *out, long num_rows, long width) {
    act_job j = {x, out, width, act};
    for_rows(num_rows, width, act_row, &j);
}

TM_API void tm_act(int act, const float *x, float *out, long num_rows, long width) {
    tm_lock();
    act_op(act, x, out, num_rows, width);
    tm_unlock();
}

/* ---- x * sigmoid(gate) */

typedef struct {
    const float *x, *gate;
    float *out;
    long width;
} gate_job;

static void gate_row(void *arg, long row, int thread) {
    (void)thread;
    const gate_job *j = arg;
    f32x8 one = f32x8_set(1), zero = f32x8_set(0);
    for (long i = row * j->width; i < (row + 1) * j->width; i += 8) /* a multiple of 8 */
        f32x8_store(j->out + i, f32x8_div(f32x8_load(j->x + i), f32x8_add(one, f32x8_exp(f32x8_sub(zero, f32x8_load(j->gate + i))))));
}

void gate_op(const float *x, const float *gate, float *out, long num_rows, long width) {
    gate_job j = {x, gate, out, width};
    for_rows(num_rows, width, gate_row, &j);
}

TM_API void tm_gate(const float *x, const float *gate, float *out, long num_rows, long width) {
    tm_lock();
    gate_op(x, gate, out, num_rows, width);
    tm_unlock();
}
