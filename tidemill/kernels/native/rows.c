/* What is done to each row on its own: norm, activation, lookup, noise. A row's bits depend on the row alone. */
#include <math.h>
#include <stddef.h>

#include "simd.h"
#include "tidemill.h"

#define SERIAL_VALUES 8192 /* a second thread takes longer to start than these take */

static void for_rows(long num_rows, long width, tm_task task, void *arg) {
    tm_parallel(num_rows, (SERIAL_VALUES + width - 1) / width, task, arg);
}

/* ---- residual += x; out = residual / rms(residual) * weight. x may be NULL. */

typedef struct {
    const float *x, *weight;
    float *residual, *out, eps;
    long width;
} norm_job;

static void norm_row(void *arg, long row, int thread) {
    (void)thread;
    const norm_job *j = arg;
    const float *x = j->x ? j->x + row * j->width : NULL;
    float *residual = j->residual + row * j->width, *out = j->out + row * j->width;
    f32x8 sum = f32x8_set(0);
    long i = 0;
    for (; i + 8 <= j->width; i += 8) {
        f32x8 v = f32x8_load(residual + i);
        if (x) {
            v = f32x8_add(v, f32x8_load(x + i));
            f32x8_store(residual + i, v);
        }
        sum = f32x8_fma(sum, v, v);
    }
    float total = f32x8_sum(sum);
    for (; i < j->width; i++) {
        if (x) residual[i] += x[i];
        total = fmaf(residual[i], residual[i], total);
    }
    float factor = 1.0f / sqrtf(total / (float)j->width + j->eps);
    for (i = 0; i + 8 <= j->width; i += 8) f32x8_store(out + i, f32x8_mul(f32x8_mul1(f32x8_load(residual + i), factor), f32x8_load(j->weight + i)));
    for (; i < j->width; i++) out[i] = residual[i] * factor * j->weight[i];
}

void norm_op(const float *x, float *residual, const float *weight, float eps, float *out, long num_rows, long width) {
    norm_job j = {x, weight, residual, out, eps, width};
    for_rows(num_rows, width, norm_row, &j);
}

TM_API void tm_add_rms_norm(const float *x, float *residual, const float *weight, float eps, float *out, long num_rows, long width) {
    tm_lock();
    norm_op(x, residual, weight, eps, out, num_rows, width);
    tm_unlock();
}

/* ---- act(gate) * up of [gate | up]; glu.py has the activations */

typedef struct {
    const float *gate_up;
    float *out;
    long width;
    int act;
} glu_job;

/* x / (1 + exp(-z)) * up */
TM_INLINE f32x8 glu(int act, f32x8 x, f32x8 up) {
    f32x8 one = f32x8_set(1), z = x;
    if (act == 2) { /* the clamped value last: on x86, too, a NaN stays one */
        x = f32x8_min(f32x8_set(7), x);
        z = f32x8_mul1(x, 1.702f);
        up = f32x8_add(f32x8_max(f32x8_set(-7), f32x8_min(f32x8_set(7), up)), one);
    } else if (act) z = f32x8_mul(x, f32x8_fma(f32x8_set(1.5957691216f), f32x8_mul(x, x), f32x8_set(0.0713548162726f)));
    return f32x8_mul(f32x8_div(x, f32x8_add(one, f32x8_exp(f32x8_sub(f32x8_set(0), z)))), up);
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

/* ---- a draw: the highest of logit + Gumbel noise of (key, token), see kernels/noise.py */

typedef struct {
    const float *logits;
    const int64_t *keys;
    int64_t *out;
    long width;
} draw_job;

TM_INLINE uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

/* Tokens first .. first + 7. */
TM_INLINE f32x8 exponential_noise(int64_t key, long first) {
    float lanes[8];
    for (long i = 0; i < 8; i++) {
        uint64_t bits = mix((uint64_t)key + (uint64_t)(first + i + 1) * 0x9E3779B97F4A7C15ull) >> 1;
        lanes[i] = (float)bits * 0x1p-63f;
    }
    /* -log(1 - u), with what the subtraction rounds off added again: small values, which win, keep all their digits. */
    f32x8 one = f32x8_set(1), u = f32x8_load(lanes), v = f32x8_max(f32x8_sub(one, u), f32x8_set(0x1p-92f));
    f32x8 noise = f32x8_sub(f32x8_div(f32x8_sub(u, f32x8_sub(one, v)), v), f32x8_log(v));
    return f32x8_min(f32x8_max(noise, f32x8_set(1e-30f)), f32x8_set(64));
}

static void draw_row(void *arg, long row, int thread) {
    (void)thread;
    const draw_job *j = arg;
    const float *logits = j->logits + row * j->width;
    float best = -INFINITY;
    j->out[row] = 0;
    for (long first = 0; first < j->width; first += 8) {
        float lanes[8];
        long num = j->width - first < 8 ? j->width - first : 8;
        if (num == 8 && f32x8_maximum(f32x8_load(logits + first)) + 70 < best) continue; /* no noise is as high as 70 */
        for (long i = 0; i < 8; i++) lanes[i] = i < num ? logits[first + i] : -INFINITY;
        f32x8_store(lanes, f32x8_sub(f32x8_load(lanes), f32x8_log(exponential_noise(j->keys[row], first))));
        for (long i = 0; i < num; i++)
            if (lanes[i] > best) best = lanes[i], j->out[row] = first + i;
    }
}

TM_API void tm_gumbel_argmax(const float *logits, const int64_t *keys, int64_t *out, long num_rows, long width) {
    draw_job j = {logits, keys, out, width};
    tm_lock();
    for_rows(num_rows, width, draw_row, &j);
    tm_unlock();
}

/* ---- the first index of each row's highest value; of a NaN, if there is one */

typedef struct {
    const float *x;
    int64_t *out;
    long width;
} argmax_job;

static void argmax_row(void *arg, long row, int thread) {
    (void)thread;
    const argmax_job *j = arg;
    const float *x = j->x + row * j->width;
    f32x8 top = f32x8_set(-INFINITY), sum = f32x8_set(0);
    long i = 0;
    for (; i + 8 <= j->width; i += 8) {
        f32x8 v = f32x8_load(x + i);
        top = f32x8_max(top, v);
        sum = f32x8_fma(sum, v, f32x8_set(0)); /* NaN if any value is; or infinite, which the search below sorts out */
    }
    float highest = f32x8_maximum(top), check = f32x8_sum(sum);
    for (; i < j->width; i++) {
        highest = x[i] > highest ? x[i] : highest;
        check += x[i] * 0;
    }
    if (check != 0)
        for (i = 0; i < j->width; i++)
            if (x[i] != x[i]) {
                j->out[row] = i;
                return;
            }
    for (i = 0; i < j->width - 1 && x[i] != highest; i++) {}
    j->out[row] = i;
}

TM_API void tm_argmax(const float *x, int64_t *out, long num_rows, long width) {
    argmax_job j = {x, out, width};
    tm_lock();
    for_rows(num_rows, width, argmax_row, &j);
    tm_unlock();
}
