/* Sampling with Gumbel noise, and greedy (kernels/noise.py and kernels/argmax.py have the references). */
#include <math.h>

#include "rows.h"

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
