/* What is done to each row on its own: norm, activation, lookup, noise. A row's bits depend on the row alone. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "simd.h"
#include "tidemill.h"

#define SERIAL_VALUES 8192 /* a second thread takes longer to start than these take */

static void for_rows(long num_rows, long width, tm_task task, void *arg) {
    tm_parallel(num_rows, (SERIAL_VALUES + width - 1) / width, task, arg);
}

/* ---- residual += x * scale; out = residual / rms(residual) * weight. x may be NULL. */

typedef struct {
    const float *x, *weight;
    float *residual, *out, eps, scale;
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
            v = f32x8_fma1(v, f32x8_load(x + i), j->scale);
            f32x8_store(residual + i, v);
        }
        sum = f32x8_fma(sum, v, v);
    }
    float total = f32x8_sum(sum);
    for (; i < j->width; i++) {
        if (x) residual[i] = fmaf(x[i], j->scale, residual[i]);
        total = fmaf(residual[i], residual[i], total);
    }
    float factor = 1.0f / sqrtf(total / (float)j->width + j->eps);
    for (i = 0; i + 8 <= j->width; i += 8) f32x8_store(out + i, f32x8_mul(f32x8_mul1(f32x8_load(residual + i), factor), f32x8_load(j->weight + i)));
    for (; i < j->width; i++) out[i] = residual[i] * factor * j->weight[i];
}

void norm_op(const float *x, float scale, float *residual, const float *weight, float eps, float *out, long num_rows, long width) {
    norm_job j = {x, weight, residual, out, eps, scale, width};
    for_rows(num_rows, width, norm_row, &j);
}

TM_API void tm_add_rms_norm(const float *x, float scale, float *residual, const float *weight, float eps, float *out, long num_rows,
                            long width) {
    tm_lock();
    norm_op(x, scale, residual, weight, eps, out, num_rows, width);
    tm_unlock();
}

/* ---- residual += scale * x, as a norm does it */

static void add_row(void *arg, long row, int thread) {
    (void)thread;
    const norm_job *j = arg;
    const float *x = j->x + row * j->width;
    float *residual = j->residual + row * j->width;
    long i = 0;
    for (; i + 8 <= j->width; i += 8) f32x8_store(residual + i, f32x8_fma1(f32x8_load(residual + i), f32x8_load(x + i), j->scale));
    for (; i < j->width; i++) residual[i] = fmaf(x[i], j->scale, residual[i]);
}

void add_op(const float *x, float scale, float *residual, long num_rows, long width) {
    norm_job j = {.x = x, .residual = residual, .scale = scale, .width = width};
    for_rows(num_rows, width, add_row, &j);
}

TM_API void tm_add(const float *x, float scale, float *residual, long num_rows, long width) {
    tm_lock();
    add_op(x, scale, residual, num_rows, width);
    tm_unlock();
}

/* ---- values cut off at a limit, in place; what is no number stays none */

static void clip_row(void *arg, long row, int thread) {
    (void)thread;
    const norm_job *j = arg;
    float *x = j->residual + row * j->width;
    for (long i = 0; i < j->width; i++) x[i] = x[i] > j->scale ? j->scale : x[i] < -j->scale ? -j->scale : x[i];
}

void clip_op(float *x, float limit, long num_rows, long width) {
    norm_job j = {.residual = x, .scale = limit, .width = width};
    for_rows(num_rows, width, clip_row, &j);
}

TM_API void tm_clip(float *x, float limit, long num_rows, long width) {
    tm_lock();
    clip_op(x, limit, num_rows, width);
    tm_unlock();
}

/* ---- side by side */

typedef struct {
    const float *const *parts;
    const long *widths;
    float *out;
} concat_job;

static void concat_row(void *arg, long row, int thread) {
    (void)thread;
    const concat_job *j = arg;
    float *to = j->out + row * (j->widths[0] + j->widths[1] + j->widths[2]);
    for (int i = 0; i < 3; to += j->widths[i++])
        if (j->widths[i]) memcpy(to, j->parts[i] + row * j->widths[i], j->widths[i] * sizeof(float));
}

void concat_op(const float *const parts[3], const long widths[3], long num_rows, float *out) {
    concat_job j = {parts, widths, out};
    for_rows(num_rows, widths[0] + widths[1] + widths[2], concat_row, &j);
}

TM_API void tm_concat(const float *first, const float *second, const float *third, const long *widths, long num_rows, float *out) {
    const float *const parts[3] = {first, second, third};
    tm_lock();
    concat_op(parts, widths, num_rows, out);
    tm_unlock();
}

/* ---- out = residual + x / rms(x) * weight */

typedef struct {
    const float *x, *residual, *weight;
    float *out, eps;
    long width;
} post_norm_job;

static float inverse_rms(const float *x, long width, float eps) {
    f32x8 sum = f32x8_set(0);
    long i = 0;
    for (; i + 8 <= width; i += 8) sum = f32x8_fma(sum, f32x8_load(x + i), f32x8_load(x + i));
    float total = f32x8_sum(sum);
    for (; i < width; i++) total = fmaf(x[i], x[i], total);
    return 1.0f / sqrtf(total / (float)width + eps);
}

static void post_norm_row(void *arg, long row, int thread) {
    (void)thread;
    const post_norm_job *j = arg;
    const float *x = j->x + row * j->width, *residual = j->residual + row * j->width;
    float *out = j->out + row * j->width, factor = inverse_rms(x, j->width, j->eps);
    long i = 0;
    for (; i + 8 <= j->width; i += 8)
        f32x8_store(out + i, f32x8_fma(f32x8_load(residual + i), f32x8_mul1(f32x8_load(x + i), factor), f32x8_load(j->weight + i)));
    for (; i < j->width; i++) out[i] = fmaf(x[i] * factor, j->weight[i], residual[i]);
}

void post_norm_op(const float *x, const float *residual, const float *weight, float eps, float *out, long num_rows, long width) {
    post_norm_job j = {x, residual, weight, out, eps, width};
    for_rows(num_rows, width, post_norm_row, &j);
}

TM_API void tm_post_norm(const float *x, const float *residual, const float *weight, float eps, float *out, long num_rows, long width) {
    tm_lock();
    post_norm_op(x, residual, weight, eps, out, num_rows, width);
    tm_unlock();
}

/* ---- the first columns of a row, q, and those that follow, k, each divided by its rms and multiplied by its weight; the rest as it is */

typedef struct {
    const float *x, *q_weight, *k_weight;
    float *out, eps;
    long num_q, num_k, width;
} qk_norm_job;

static void normed(const float *x, const float *weight, float eps, float *out, long width) {
    float factor = inverse_rms(x, width, eps);
    long i = 0;
    for (; i + 8 <= width; i += 8) f32x8_store(out + i, f32x8_mul(f32x8_mul1(f32x8_load(x + i), factor), f32x8_load(weight + i)));
    for (; i < width; i++) out[i] = x[i] * factor * weight[i];
}

static void qk_norm_row(void *arg, long row, int thread) {
    (void)thread;
    const qk_norm_job *j = arg;
    const float *x = j->x + row * j->width;
    float *out = j->out + row * j->width;
    normed(x, j->q_weight, j->eps, out, j->num_q);
    normed(x + j->num_q, j->k_weight, j->eps, out + j->num_q, j->num_k);
    for (long i = j->num_q + j->num_k; i < j->width; i++) out[i] = x[i];
}

void qk_norm_op(const float *x, const float *q_weight, long num_q, const float *k_weight, long num_k, float eps, float *out, long num_rows,
                long width) {
    qk_norm_job j = {x, q_weight, k_weight, out, eps, num_q, num_k, width};
    for_rows(num_rows, width, qk_norm_row, &j);
}

TM_API void tm_qk_norm(const float *x, const float *q_weight, long num_q, const float *k_weight, long num_k, float eps, float *out,
                       long num_rows, long width) {
    tm_lock();
    qk_norm_op(x, q_weight, num_q, k_weight, num_k, eps, out, num_rows, width);
    tm_unlock();
}

/* ---- residual += x; out = (residual - mean) / deviation * weight + bias. x may be NULL. */

typedef struct {
    const float *x, *weight, *bias;
    float *residual, *out, eps;
    long width;
} layer_norm_job;

static void layer_norm_row(void *arg, long row, int thread) {
    (void)thread;
    const layer_norm_job *j = arg;
    const float *x = j->x ? j->x + row * j->width : NULL;
    float *residual = j->residual + row * j->width, *out = j->out + row * j->width;
    f32x8 sum = f32x8_set(0), squares = f32x8_set(0);
    long i = 0;
    for (; i + 8 <= j->width; i += 8) {
        f32x8 v = f32x8_load(residual + i);
        if (x) {
            v = f32x8_add(v, f32x8_load(x + i));
            f32x8_store(residual + i, v);
        }
        sum = f32x8_add(sum, v);
    }
    float total = f32x8_sum(sum);
    for (; i < j->width; i++) {
        if (x) residual[i] += x[i];
        total += residual[i];
    }
    float mean = total / (float)j->width;
    for (i = 0; i + 8 <= j->width; i += 8) {
        f32x8 v = f32x8_sub(f32x8_load(residual + i), f32x8_set(mean));
        squares = f32x8_fma(squares, v, v);
    }
    total = f32x8_sum(squares);
    for (; i < j->width; i++) total = fmaf(residual[i] - mean, residual[i] - mean, total);
    float factor = 1.0f / sqrtf(total / (float)j->width + j->eps);
    for (i = 0; i + 8 <= j->width; i += 8) {
        f32x8 v = f32x8_mul1(f32x8_sub(f32x8_load(residual + i), f32x8_set(mean)), factor);
        f32x8_store(out + i, f32x8_fma(f32x8_load(j->bias + i), v, f32x8_load(j->weight + i)));
    }
    for (; i < j->width; i++) out[i] = fmaf((residual[i] - mean) * factor, j->weight[i], j->bias[i]);
}

void layer_norm_op(const float *x, float *residual, const float *weight, const float *bias, float eps, float *out, long num_rows, long width) {
    layer_norm_job j = {x, weight, bias, residual, out, eps, width};
    for_rows(num_rows, width, layer_norm_row, &j);
}

TM_API void tm_add_layer_norm(const float *x, float *residual, const float *weight, const float *bias, float eps, float *out, long num_rows,
                              long width) {
    tm_lock();
    layer_norm_op(x, residual, weight, bias, eps, out, num_rows, width);
    tm_unlock();
}

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

/* ---- the first index of each row's highest value; -1 if it is not finite, or a value is NaN */

typedef struct {
    const float *x;
    int64_t *out;
    long width;
} argmax_job;

#define ARGMAX_BLOCK 512

static void argmax_row(void *arg, long row, int thread) {
    (void)thread;
    const argmax_job *j = arg;
    const float *x = j->x + row * j->width;
    f32x8 sum = f32x8_set(0);
    float highest = -INFINITY, check = 0;
    long best = 0; /* where the block begins that has the first of the highest */
    for (long first = 0; first < j->width; first += ARGMAX_BLOCK) {
        f32x8 top = f32x8_set(-INFINITY);
        long end = first + ARGMAX_BLOCK < j->width ? first + ARGMAX_BLOCK : j->width, i = first;
        for (; i + 8 <= end; i += 8) {
            f32x8 v = f32x8_load(x + i);
            top = f32x8_max(top, v);
            sum = f32x8_fma(sum, v, f32x8_set(0)); /* NaN if any value is; or infinite, which the search below sorts out */
        }
        float of_block = f32x8_maximum(top);
        for (; i < end; i++) {
            of_block = x[i] > of_block ? x[i] : of_block;
            check += x[i] * 0;
        }
        if (of_block > highest) highest = of_block, best = first;
    }
    int is_valid = isfinite(highest);
    if (check + f32x8_sum(sum) != 0)
        for (long i = 0; i < j->width; i++) is_valid &= x[i] == x[i];
    while (is_valid && x[best] != highest) best++;
    j->out[row] = is_valid ? best : -1;
}

TM_API void tm_argmax(const float *x, int64_t *out, long num_rows, long width) {
    argmax_job j = {x, out, width};
    tm_lock();
    for_rows(num_rows, width, argmax_row, &j);
    tm_unlock();
}
