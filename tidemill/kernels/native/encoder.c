/* Row by row, for models with LayerNorm and blocks without a gate. A row's bits depend on the row alone. */
#include <math.h>
#include <stddef.h>

#include "simd.h"
#include "tidemill.h"

#define SERIAL_VALUES 8192 /* a second thread takes longer to start than these take */

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
    long i = 0, whole = j->width / 8 * 8;
    for (; i < whole; i += 8) {
        f32x8 v = f32x8_load(residual + i);
        if (x) {
            v = f32x8_add(v, f32x8_load(x + i));
            f32x8_store(residual + i, v);
        }
        sum = f32x8_add(sum, v);
    }
    float mean = f32x8_sum(sum), total;
    for (; i < j->width; i++) {
        if (x) residual[i] += x[i];
        mean += residual[i];
    }
    mean /= (float)j->width;
    for (i = 0; i < whole; i += 8) {
        f32x8 v = f32x8_sub(f32x8_load(residual + i), f32x8_set(mean));
        squares = f32x8_fma(squares, v, v);
    }
    total = f32x8_sum(squares);
    for (; i < j->width; i++) total = fmaf(residual[i] - mean, residual[i] - mean, total);
    float factor = 1.0f / sqrtf(total / (float)j->width + j->eps);
    for (i = 0; i < whole; i += 8) {
        f32x8 v = f32x8_mul1(f32x8_sub(f32x8_load(residual + i), f32x8_set(mean)), factor);
        f32x8_store(out + i, f32x8_fma(f32x8_load(j->bias + i), v, f32x8_load(j->weight + i)));
    }
    for (; i < j->width; i++) out[i] = fmaf((residual[i] - mean) * factor, j->weight[i], j->bias[i]);
}

void layer_norm_op(const float *x, float *residual, const float *weight, const float *bias, float eps, float *out, long num_rows,
                   long width) {
    layer_norm_job j = {x, weight, bias, residual, out, eps, width};
    tm_parallel(num_rows, (SERIAL_VALUES + width - 1) / width, layer_norm_row, &j);
}

TM_API void tm_add_layer_norm(const float *x, float *residual, const float *weight, const float *bias, float eps, float *out,
                              long num_rows, long width) {
    tm_lock();
    layer_norm_op(x, residual, weight, bias, eps, out, num_rows, width);
    tm_unlock();
}

/* ---- activations; activation.py has their formulas */

typedef struct {
    const float *x;
    float *out;
    long width;
    int act;
} act_job;

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

TM_INLINE f32x8 gelu_tanh(f32x8 x) {
    f32x8 z = f32x8_mul(x, f32x8_fma(f32x8_set(1.5957691216f), f32x8_mul(x, x), f32x8_set(0.0713548162726f)));
    return f32x8_div(x, f32x8_add(f32x8_set(1), f32x8_exp(f32x8_sub(f32x8_set(0), z))));
}

TM_INLINE f32x8 act(int kind, f32x8 x) {
    return kind == 0 ? gelu(x) : kind == 1 ? gelu_tanh(x) : f32x8_max(x, f32x8_set(0));
}

static void act_row(void *arg, long row, int thread) {
    (void)thread;
    const act_job *j = arg;
    const float *x = j->x + row * j->width;
    float *out = j->out + row * j->width;
    long i = 0;
    for (; i + 8 <= j->width; i += 8) f32x8_store(out + i, act(j->act, f32x8_load(x + i)));
    if (i < j->width) { /* the tail by the same operations */
        float v[8] = {0};
        for (long k = i; k < j->width; k++) v[k - i] = x[k];
        f32x8_store(v, act(j->act, f32x8_load(v)));
        for (long k = i; k < j->width; k++) out[k] = v[k - i];
    }
}

void act_op(int kind, const float *x, float *out, long num_rows, long width) {
    act_job j = {x, out, width, kind};
    tm_parallel(num_rows, (SERIAL_VALUES + width - 1) / width, act_row, &j);
}

TM_API void tm_act(int kind, const float *x, float *out, long num_rows, long width) {
    tm_lock();
    act_op(kind, x, out, num_rows, width);
    tm_unlock();
}
