/* Norm and rotation of queries and keys, and writing keys and values to the paged cache (kernels/attention.py and kv_cache.py have
the references). */
#include <math.h>
#include <string.h>

#include "attention.h"

static void rotate(float *x, const float *cos, const float *sin, long half) {
    for (long i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}

static void norm(float *x, const float *weight, float eps, long dim) {
    f32x8 sum = f32x8_set(0);
    for (long i = 0; i < dim; i += 8) sum = f32x8_fma(sum, f32x8_load(x + i), f32x8_load(x + i));
    float factor = 1.0f / sqrtf(f32x8_sum(sum) / (float)dim + eps);
    for (long i = 0; i < dim; i += 8) f32x8_store(x + i, f32x8_mul(f32x8_mul1(f32x8_load(x + i), factor), f32x8_load(weight + i)));
}

/* ---- into the cache; bit for bit as `quantize` of kv_cache.py */

static void put_nibbles(char *row, uint16_t *scale, const float *x, long dim) {
    f32x8 most = f32x8_load(x), least = most, bad = f32x8_set(0);
    for (long i = 0; i < dim; i += 8) {
        f32x8 value = f32x8_load(x + i);
        most = f32x8_max(most, value), least = f32x8_min(least, value);
        bad = f32x8_fma(bad, value, f32x8_set(0));
    }
    float high = f32x8_maximum(most), low = -f32x8_maximum(f32x8_sub(f32x8_set(0), least)), nothing = f32x8_sum(bad);
    float middle[8] = {low * 0.5f + high * 0.5f + (high - low) * (0.5f / 15)}, factor = 0;
    uint16_t offset[8];
    f32x8_store_bf16(offset, f32x8_load(middle));
    uint32_t bits = (uint32_t)offset[0] << 16;
    memcpy(middle, &bits, 4);
    float above = (high - *middle) * (1 / 7.0f), below = (*middle - low) * 0.125f, step = above > below ? above : below;
    if (nothing != 0 || !(step < INFINITY)) {
        scale[0] = 0x7fc0, scale[1] = 0;
    } else {
        step = step < TINY ? 0 : step;
        memcpy(&bits, &step, 4);
        bits = (bits + 0xffff) & 0xffff0000;
        memcpy(&step, &bits, 4);
        factor = step > 0 ? 1 / step : 0;
        scale[0] = bits >> 16, scale[1] = offset[0];
    }
    for (long i = 0; i < dim / 2; i += 4) { /* of a byte, the lower half has value i, the upper one value dim / 2 + i */
        int8_t codes[8] = {0};
        float values[8];
        memcpy(values, x + i, 16);
        memcpy(values + 4, x + dim / 2 + i, 16);
        if (factor) i32x8_store_bytes(codes, f32x8_to_i32x8(f32x8_mul1(f32x8_sub(f32x8_load(values), f32x8_set(*middle)), factor)));
        for (int j = 0; j < 4; j++) row[i + j] = (codes[j] & 15) | (codes[j + 4] & 15) << 4;
    }
}

static void put_codes(char *row, uint16_t *scale, const float *x, long dim, int format) {
    if (format == TM_KV_INT4) {
        put_nibbles(row, scale, x, dim);
        return;
    }
    float top = magnitude(x, dim), step = top / 127;
    uint32_t bits;
    memcpy(&bits, &step, 4);
    bits = top == top ? (bits + 0xffff) & 0xffff0000 : 0x7fc00000;
    memcpy(&step, &bits, 4);
    *scale = bits >> 16;
    float factor = top > 0 ? 1 / step : 0;
    for (long i = 0; i < dim; i += 8) {
        if (factor)
            i32x8_store_bytes((int8_t *)row + i, f32x8_to_i32x8(f32x8_mul1(f32x8_load(x + i), factor)));
        else
            memset(row + i, 0, 8);
    }
}

static void put(char *row, const float *x, long dim, int format) {
    if (format == TM_KV_BF16)
        for (long i = 0; i < dim; i += 8) f32x8_store_bf16((uint16_t *)row + i, f32x8_load(x + i));
    else if (format == TM_KV_F16)
        for (long i = 0; i < dim; i += 8) f32x8_store_f16((uint16_t *)row + i, f32x8_load(x + i));
    else
        memcpy(row, x, dim * sizeof(float));
}

static void write_token(void *arg, long token, int thread) {
    (void)thread;
    const tm_attention_job *j = arg;
    const tm_step *s = j->step;
    const tm_layer *l = j->layer;
    long dim = l->head_dim, half = l->num_rotated / 2, slot = s->slots[l->group * s->num_tokens + token];
    long page = slot / s->page_size, offset = slot % s->page_size;
    int format = (int)s->kv_format;
    float *q = j->qkv + token * qkv_width(l), *k = q + l->num_heads * dim, *v = k + l->num_stored * dim;
    for (long h = 0; h < l->num_heads + l->num_stored; h++) {
        if (j->learned.q_norm) norm(q + h * dim, h < l->num_heads ? j->learned.q_norm : j->learned.k_norm, j->learned.eps, dim);
        if (l->quant && h >= l->num_heads) continue; /* its keys are stored as they are before rotation */
        if (half) rotate(q + h * dim, l->cos + s->positions[token] * half, l->sin + s->positions[token] * half, half);
    }
    for (long h = 0; h < l->num_stored && slot >= 0; h++) { /* below 0: policy_rounds writes them */
        long row = h * s->page_size + offset;
        char *key = j->keys + page * s->page_bytes + row * row_bytes(dim, format);
        char *value = j->values + page * s->page_bytes + row * row_bytes(l->value_row, format);
        if (l->quant) {
            kvquant_put(s, l, j->keys, j->values, page, h, offset, s->positions[token], k + h * dim, v + h * dim);
        } else if (l->key_scales) {
            put_codes(key, scale_at(s, l->key_scales, page, h, offset), k + h * dim, dim, format);
            put_codes(value, scale_at(s, l->value_scales, page, h, offset), v + h * l->value_dim, l->value_dim, format);
        } else {
            put(key, k + h * dim, dim, format);
            if (h < l->num_values) put(value, v + h * l->value_dim, l->value_dim, format);
        }
    }
}

void write_kv_op(const tm_step *step, const tm_layer *layer, tm_learned learned, float *qkv, void *keys, void *values) {
    tm_attention_job j = {step, layer, learned, qkv, keys, values, NULL, NULL};
    tm_parallel(step->num_tokens, 8, write_token, &j);
}

TM_API void tm_write_kv(const tm_step *step, const tm_layer *layer, const float *q_norm, const float *k_norm, float eps, float *qkv, void *keys,
                     void *values) {
    tm_lock();
    write_kv_op(step, layer, (tm_learned){q_norm, k_norm, NULL, eps}, qkv, keys, values);
    tm_unlock();
}
