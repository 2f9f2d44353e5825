/* RMSNorm and LayerNorm, with the residual addition before or after them (kernels/norm.py has the references). */
#include <math.h>
#include <stddef.h>

#include "rows.h"

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
